"""MMoE: experts, gates and towers written out; labels by task."""

from __future__ import annotations

import pytest
import torch

from nestpipe.batch import Batch
from nestpipe.models import MMoE
from tests.models.clicks import assert_same_gradients, cross_entropy, fields_of, make_batch, make_model, perceptron

TASKS = ["click", "like.it"]  # no name that a module could have


def make(**changes):
    return make_model(MMoE, **({"tasks": TASKS, "num_experts": 3, "expert": (7, 5), "tower": (4,)} | changes))


def with_tasks(batch: Batch) -> Batch:
    labels = dict(zip(TASKS, (batch.labels, 1 - batch.labels * 0.5), strict=True))
    return Batch(batch.keys, batch.dense, labels)  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_dense", "weights"), [(0, None), (4, [0.5, 2.0])])
def test_equals_the_formula_expert_by_expert(num_dense, weights):
    model = make(num_dense=num_dense, task_weights=weights)
    batch, rows = make_batch(5, num_dense=num_dense, dtype=torch.float64)
    batch = with_tasks(batch)
    output = model(batch, rows)
    assert list(output.losses) == list(output.predictions) == list(model.tasks) == TASKS
    expected = {}
    for task, gate, tower in zip(TASKS, model.gates, model.towers, strict=True):
        logits = []
        for b in range(5):
            dense, fields = fields_of(batch, rows, b)
            x = torch.cat([*(number[None] for number in dense), *fields])
            scores = (gate.weight @ x).exp()
            mixed = sum(
                score / scores.sum() * perceptron(expert, x)
                for score, expert in zip(scores, model.experts, strict=True)
            )
            logits.append(perceptron(tower, mixed)[0])
        logits = torch.stack(logits)
        torch.testing.assert_close(output.predictions[task], logits.sigmoid())
        weight = 1.0 if weights is None else weights[TASKS.index(task)]
        expected[task] = weight * cross_entropy(logits, batch.labels[task].double())
    # Different factors for the tasks: a gate or a tower that served the wrong one would show.
    both, wanted = (losses["click"] + 3 * losses["like.it"] for losses in (output.losses, expected))
    assert_same_gradients(model, list(rows.values()), both, wanted)


def test_predict_needs_no_labels_and_gives_the_predictions_of_forward():
    model = make()
    batch, rows = make_batch(5, dtype=torch.float64)
    predictions = model(with_tasks(batch), rows).predictions
    predicted = model.predict(Batch({}, batch.dense), rows)
    assert list(predicted) == TASKS and all(torch.equal(predicted[task], predictions[task]) for task in TASKS)


def test_a_task_that_nobody_trains_leaves_the_others_as_they_are():
    model = make()
    batch, rows = make_batch(5, dtype=torch.float64)
    model(with_tasks(batch), rows).losses["click"].sum().backward()
    assert all(parameter.grad is None for parameter in (*model.gates[1].parameters(), *model.towers[1].parameters()))
    assert all(parameter.grad is not None for parameter in (*model.experts.parameters(), *model.towers[0].parameters()))


def test_no_tensor_is_made_on_another_device_than_the_rows():
    model = make()
    batch, rows = make_batch(5, dtype=torch.float64)
    with torch.device("meta"):
        sum(model(with_tasks(batch), rows).losses.values()).sum().backward()


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ({"tasks": []}, "tasks must be a list of different names"),
        ({"tasks": "click"}, "tasks must be a list of different names"),
        ({"tasks": ["click", "click"]}, "tasks must be a list of different names"),
        ({"tasks": ["click", ""]}, r"tasks\[1\] must be a name"),
        ({"task_weights": [1.0]}, "task_weights must be a number of at least 0 for each of the 2 tasks"),
        ({"task_weights": [1.0, -1]}, "task_weights must be a number of at least 0"),
        ({"num_experts": 0}, "num_experts must be a whole number of at least 1"),
        ({"expert": []}, "expert must have one width or more"),
    ],
)
def test_wrong_arguments_are_named(argument, problem):
    with pytest.raises(ValueError, match=f"MMoE: {problem}"):
        make(**argument)


def test_labels_that_are_missing_or_wrong_are_named_by_task():
    batch, rows = make_batch(4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"MMoE needs labels by task, \{name: \[B\]\} for click, like.it"):
        make()(batch, rows)
    for labels, problem in (
        (
            {"click": batch.labels},
            r"MMoE needs labels of 'like.it' of shape \[B\], got none; set Batch.labels\['like.it'\]",
        ),
        (
            {"click": batch.labels[:, None], "like.it": batch.labels},
            r"labels of 'click' of shape \[B\], got shape \(4, 1\)",
        ),
        ({"click": batch.labels + 2, "like.it": batch.labels}, "of sample 0 is outside"),
    ):
        with pytest.raises(ValueError, match=problem):
            make()(Batch({}, batch.dense, labels), rows)
