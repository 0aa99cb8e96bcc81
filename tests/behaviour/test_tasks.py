"""Models of several tasks: the same as a plain program on one worker, under every schedule, with any split; judged by task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nestpipe import SGD, Batch, Callback, Feature, Jagged, Output, Table, Trainer, TrainingError
from nestpipe.metrics import AUC, LogLoss
from tests.cluster import Cluster

STEPS, NUM_KEYS, DIM, SIZE = 8, 30, 4, 12
LIKES = 0.5  # what the second task counts


class TwoTasks(nn.Module):
    """Whether an item is clicked, and of those that were shown in full, whether it is liked."""

    tasks = ("click", "like")

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.heads = nn.Linear(DIM, 2)

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        logits = self.heads(torch.tanh(rows["history"].mean() + rows["item"]))
        bce = nn.functional.binary_cross_entropy_with_logits
        labels, full = batch.labels, batch.dense["full"]
        losses = {
            "click": bce(logits[:, 0], labels["click"], reduction="none"),
            "like": LIKES * full * bce(logits[:, 1], labels["like"], reduction="none"),
        }
        predictions = {name: torch.sigmoid(logits[:, n].detach()) for n, name in enumerate(self.tasks)}
        return Output(losses, {"like": full}, predictions)


def global_batch(step: int, size: int = SIZE) -> Batch:
    rng = np.random.default_rng([2, step])
    lengths = torch.from_numpy(rng.integers(0, 4, size))
    history = torch.from_numpy(rng.integers(0, NUM_KEYS, int(lengths.sum())))
    item = Jagged.from_lengths(torch.from_numpy(rng.integers(0, NUM_KEYS, size)), torch.ones(size, dtype=torch.int64))
    labels: dict[str, Tensor | Jagged] = {
        name: torch.from_numpy(rng.integers(0, 2, size)).float() for name in ("click", "like")
    }
    full = torch.from_numpy(rng.integers(0, 2, size)).float()
    return Batch({"history": Jagged.from_lengths(history, lengths), "item": item}, {"full": full}, labels)


def make(**options: Any) -> Trainer:
    tables = [Table("item", DIM, optimizer=SGD(lr=0.5))]
    features = [Feature("history", "item"), Feature("item", "item", "sum")]
    return Trainer(
        options.pop("model", None) or TwoTasks(),
        tables,
        features,
        dense_optimizer=lambda p: torch.optim.SGD(p, 0.5),
        **options,
    )


def mine(trainer: Trainer, step: int) -> Batch:
    """The last worker has no samples at every third step."""
    batch, workers = global_batch(step), trainer.world - (trainer.world > 1 and step % 3 == 0)
    cut = [SIZE * min(rank, workers) // workers for rank in (trainer.rank, trainer.rank + 1)]
    return batch.slice(*cut)


def train(schedule: str, micro_batches: int, balance: str = "none") -> dict[str, Any]:
    with make(schedule=schedule, micro_batches=micro_batches, balance=balance) as trainer:
        first = trainer.rows("item", torch.arange(NUM_KEYS)).clone()
        results: list[Any] = []
        trainer.fit((mine(trainer, step) for step in range(STEPS)), on_step=results.append)
        return {
            "first": first,
            "losses": [(result.loss, result.losses) for result in results],
            "rows": trainer.rows("item", torch.arange(NUM_KEYS)),
            "dense": [parameter.detach().clone() for parameter in trainer.model.parameters()],
            "digest": trainer.digest(),
        }


def plain(first: Tensor) -> dict[str, Any]:
    """One process, one batch, torch alone: the mean over samples of the sum over tasks."""
    model, table = TwoTasks(), nn.Parameter(first.clone())
    optimizer = torch.optim.SGD([*model.parameters(), table], 0.5)
    losses = []
    for step in range(STEPS):
        batch = global_batch(step)
        history, item = batch.keys["history"], batch.keys["item"]
        rows = {"history": history.like(table[history.values]), "item": table[item.values]}
        output = model(batch, rows)
        loss = sum(task.sum() for task in output.losses.values()) / SIZE
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        like = output.losses["like"].sum() / batch.dense["full"].sum()
        losses.append((loss.item(), {"click": output.losses["click"].mean().item(), "like": like.item()}))
    return {"losses": losses, "rows": table.detach(), "dense": [p.detach() for p in model.parameters()]}


@pytest.mark.parametrize(("world", "micro_batches"), [(1, 1), (1, 3), (2, 2), (3, 1)])
def test_two_tasks_train_as_a_plain_program_does_and_alike_under_every_schedule(
    cluster: Cluster, world: int, micro_batches: int
) -> None:
    serial = cluster.run(world, train, "serial", micro_batches)
    expected = plain(serial[0]["first"])
    for of_worker in serial:
        assert torch.allclose(of_worker["rows"], expected["rows"], atol=1e-6)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(of_worker["dense"], expected["dense"], strict=True))
        for (loss, losses), (right, rights) in zip(of_worker["losses"], expected["losses"], strict=True):
            assert loss == pytest.approx(right, rel=1e-5)
            assert losses == pytest.approx(rights, rel=1e-5)
    for schedule in ("dbp", "fwp", "nested"):
        assert {one["digest"] for one in cluster.run(world, train, schedule, micro_batches)} == {serial[0]["digest"]}


def test_labels_of_tasks_travel_with_samples_that_are_dealt(cluster: Cluster) -> None:
    dealt, stayed = (cluster.run(2, train, "nested", 2, balance)[0] for balance in ("tokens", "none"))
    assert torch.allclose(dealt["rows"], stayed["rows"], atol=1e-6)
    assert dealt["losses"][-1][1] == pytest.approx(stayed["losses"][-1][1], rel=1e-5)
    assert dealt["digest"] != stayed["digest"], "else nothing was dealt"


def resumed(folder: str) -> tuple[str, str]:
    with make(schedule="nested", micro_batches=2) as trainer:
        trainer.fit(mine(trainer, step) for step in range(3))
        trainer.save(f"{folder}/three")
        trainer.fit(mine(trainer, step) for step in range(3, STEPS))
        whole = trainer.digest()
    with make(schedule="nested", micro_batches=2) as trainer:
        trainer.load(f"{folder}/three")
        trainer.fit(mine(trainer, step) for step in range(3, STEPS))
        return whole, trainer.digest()


def test_a_model_of_tasks_goes_on_to_the_same_bits(cluster: Cluster, tmp_path: Path) -> None:
    for whole, again in cluster.run(2, resumed, str(tmp_path)):
        assert whole == again


# -- judging -----------------------------------------------------------------------------------------------------------


def judged() -> dict[str, float]:
    with make() as trainer:
        batches = (mine(trainer, step) for step in range(STEPS))
        return trainer.evaluate(batches, {"AUC": AUC(), "like/LogLoss": LogLoss()})


def test_metrics_are_by_task_over_the_samples_that_have_a_label(cluster: Cluster) -> None:
    (alone,) = cluster.run(1, judged)
    for of_worker in cluster.run(3, judged):
        assert of_worker == pytest.approx(alone, rel=1e-9)
        assert of_worker["click/AUC"] == alone["click/AUC"] and of_worker["like/LogLoss"] == alone["like/LogLoss"]
    assert list(alone) == ["loss", "click/loss", "like/loss", "click/AUC", "like/AUC", "like/LogLoss"]
    model, table = TwoTasks().eval(), make().rows("item", torch.arange(NUM_KEYS))
    whole = Batch.joined([global_batch(step) for step in range(STEPS)])
    history, item = whole.keys["history"], whole.keys["item"]
    with torch.no_grad():
        output = model(whole, {"history": history.like(table[history.values]), "item": table[item.values]})
    auc, full = AUC(), whole.dense["full"] > 0
    assert isinstance(output.predictions, dict) and isinstance(whole.labels, dict)
    auc.update(output.predictions["like"][full], whole.labels["like"][full])
    assert alone["like/AUC"] == pytest.approx(auc.compute(), abs=0.01)
    assert alone["like/loss"] == pytest.approx(float(output.losses["like"].sum() / full.sum()), rel=1e-5)
    assert alone["like/LogLoss"] * LIKES == pytest.approx(alone["like/loss"], rel=1e-5)
    assert alone["loss"] == pytest.approx(float(sum(x.sum() for x in output.losses.values()) / whole.size), rel=1e-5)


def test_a_metric_of_a_task_that_is_not_there_is_refused() -> None:
    with make() as trainer, pytest.raises(TrainingError, match=r"task 'clik', .*did you mean 'click'"):
        trainer.evaluate([global_batch(0)], {"clik/AUC": AUC()})


class Returns(TwoTasks):
    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Any:
        return self.change(super().forward(batch, rows))


def undeclared(output: Output) -> Output:
    return Output({**output.losses, "share": output.losses["click"]})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda output: output.losses["click"], r"declares tasks = \('click', 'like'\) and returned losses of no task"),
        (undeclared, r"losses of the tasks 'click', 'like', 'share' and declares 'click', 'like'; say in the model"),
        (lambda output: Output(output.losses, {"lik": output.losses["like"]}), "weights of 'lik', which is none of"),
        (lambda output: Output(output.losses, None, output.losses["like"]), "predictions of no task"),
        (
            lambda output: Output({name: part.mean() for name, part in output.losses.items()}),
            "a scalar loss of task 'click' for 12 samples",
        ),
        (
            lambda output: Output(output.losses, {"like": torch.full((SIZE,), float("nan"))}),
            "weight nan of task 'like' for sample 0",
        ),
        (
            lambda output: Output(output.losses, None, {"like": output.losses["like"][:3]}),
            r"predictions of shape \(3,\) of task 'like' for 12 samples",
        ),
    ],
)
def test_outputs_that_do_not_fit_the_tasks_are_told(change: Any, told: str) -> None:
    with make(model=Returns(change)) as trainer, pytest.raises(TrainingError, match=told):
        trainer.step(global_batch(0))


def test_tasks_are_named_before_the_first_step() -> None:
    class Twice(TwoTasks):
        tasks = ("click", "click")  # type: ignore[assignment]

    with pytest.raises(TrainingError, match=r"tasks = \('click', 'click'\); they must be different names"):
        make(model=Twice())


def test_workers_with_other_tasks_hear_of_it(cluster: Cluster) -> None:
    for kind, (_, text, _) in cluster.outcomes(2, with_other_tasks):
        assert (
            kind == "failed" and "model: tasks is ('click', 'like') on rank 0 and ('like', 'click') on rank 1" in text
        )


def with_other_tasks() -> None:
    import torch.distributed as dist

    model = TwoTasks()
    model.tasks = model.tasks[:: 1 - 2 * dist.get_rank()]  # type: ignore[assignment]
    make(model=model)


def test_labels_of_a_task_are_checked_by_name() -> None:
    batch = global_batch(0)
    assert isinstance(batch.labels, dict)
    batch.labels["like"] = batch.labels["like"][:3]  # type: ignore[index]
    with make() as trainer, pytest.raises(TrainingError, match="labels of 'like' are given for 3 samples"):
        trainer.step(batch)


def test_two_metrics_of_one_name_are_refused() -> None:
    told = "metrics 'click/AUC' and 'AUC', which is of every task, are the same"
    with make() as trainer, pytest.raises(TrainingError, match=told):
        trainer.evaluate([global_batch(0)], {"AUC": AUC(), "click/AUC": AUC()})


def test_no_losses_at_all_are_told() -> None:
    model = Returns(lambda output: Output({}))
    model.tasks = ()  # type: ignore[assignment]
    with make(model=model) as trainer, pytest.raises(TrainingError, match="losses of the tasks none and declares none"):
        trainer.step(global_batch(0))


class Kept(Callback):
    wants_predictions = True

    def __init__(self) -> None:
        self.pairs: list[Any] = []

    def on_step(self, result: Any) -> None:
        self.pairs += result.predicted


def test_predictions_that_training_tells_of_are_of_samples_that_have_a_label() -> None:
    kept = Kept()
    with make(micro_batches=3) as trainer:
        trainer.fit([global_batch(0)], callbacks=[kept])
    batch = global_batch(0)
    full = batch.dense["full"] > 0
    assert isinstance(batch.labels, dict) and 0 < int(full.sum()) < SIZE
    for task, counted in (("click", torch.ones(SIZE, dtype=torch.bool)), ("like", full)):
        predictions, labels = (torch.cat([pair[n][task] for pair in kept.pairs]) for n in (0, 1))
        assert predictions.shape == labels.shape
        assert torch.equal(labels, batch.labels[task][counted])  # type: ignore[index]
