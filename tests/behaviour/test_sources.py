"""Sources that say where they stand: streams that never end, torchdata, Hugging Face; cut off, they go on with the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from nestpipe import Batch, Feature, Table, Trainer
from nestpipe.config import Config, parse
from nestpipe.data import Collate, from_rows
from nestpipe.data.reader import in_process
from nestpipe.errors import TrainingError
from nestpipe.source_state import from_json, to_json
from tests.behaviour.events import Events
from tests.behaviour.test_resume import cut_off, train
from tests.cluster import Cluster


def configured(**sections: dict[str, Any]) -> Config:
    values: dict[str, Any] = {
        "data": {"kind": "tests.behaviour.events:EventData"},
        "model": {"kind": "dlrm", "bottom": [4], "top": [4]},
        "tables": {"*": {"dim": 4, "pooling": "sum", "lr": 0.1}},
        "train": {"batch_size": 4, "steps": 12, "checkpoint_every": 3, "keep_checkpoints": 9, "eval_split": "none"},
        "schedule": {},
    }
    for section, entries in sections.items():
        values[section].update(entries)
    return parse(values)


def cut_off_and_resumed(folder: Path, sections: dict[str, Any]) -> tuple[str, str, int]:
    """The digests of a run that was never cut off and of one that was after step 7, and the batches that the latter took when it
    went on from step 6."""
    whole = train(configured(**sections), folder / "whole")
    cut_off(configured(**sections), folder / "cut")
    Events.given = 0
    resumed = train(configured(**sections), folder / "cut", resume=True)
    assert resumed["resumed_after"] == 6 and resumed["session_steps"] == 6
    return whole["digest"], resumed["digest"], Events.given


@pytest.mark.parametrize(("schedule", "reader"), [("serial", "thread"), ("nested", "thread"), ("nested", "process")])
def test_a_stream_that_never_ends_goes_on_after_the_last_batch_trained_on(
    cluster: Cluster, tmp_path: Path, schedule: str, reader: str
) -> None:
    sections = {"schedule": {"name": schedule}, "train": {"reader": reader}}
    for whole, resumed, given in cluster.run(2, cut_off_and_resumed, tmp_path, sections):
        assert resumed == whole
        if reader == "thread":
            assert 6 <= given <= 6 + 5, "those that are trained on and those that are read ahead; none is passed over"


def resumed_by_one(folder: Path) -> None:
    train(configured(train={"steps": 15}), folder, resume=True)


def test_another_number_of_workers_is_told_that_it_cannot_go_on(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(2, train_some, tmp_path / "run")
    [(kind, told)] = cluster.outcomes(1, resumed_by_one, tmp_path / "run")
    assert kind == "failed" and told[0] == "ValueError"
    assert "saved by 2 workers" in told[1] and "go on with as many workers" in told[1]


def train_some(folder: Path) -> None:
    train(configured(train={"steps": 3}), folder)


# -- in the API --------------------------------------------------------------------------------------------------------


def rows_of(count: int = 80) -> datasets.Dataset:
    draw = np.random.default_rng(0)
    columns: dict[str, Any] = {name: draw.integers(0, 40, count).tolist() for name in "ab"}
    columns |= {"x": draw.random(count).tolist(), "y": draw.integers(0, 2, count).tolist()}
    return datasets.Dataset.from_dict(columns)


COLUMNS: dict[str, Any] = {"keys": ["a", "b"], "dense": ["x"], "label": "y"}


class Scores(torch.nn.Module):
    mixes_samples = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, batch: Batch, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        score = (rows["a"] * rows["b"]).sum(1) + self.weight * batch.dense["dense"][:, 0]
        return torch.nn.functional.binary_cross_entropy_with_logits(score, batch.labels, reduction="none")


def scorer() -> Trainer:
    return Trainer(
        Scores(),
        [Table("t", dim=4)],
        [Feature("a", table="t", pooling="sum"), Feature("b", table="t", pooling="sum")],
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        schedule="nested",
    )


def torchdata_loader() -> Any:
    generator = torch.Generator().manual_seed(5)
    return StatefulDataLoader(rows_of(), batch_size=8, shuffle=True, generator=generator, collate_fn=Collate(**COLUMNS))


def streamed_rows() -> Any:
    return from_rows(rows_of().to_iterable_dataset(num_shards=2), batch_size=8, **COLUMNS)


class LoaderData:
    """Epochs of a loader of torchdata, each in an order of its own."""

    features = ("a", "b")

    def __init__(self, *, num_rows: int) -> None:
        self._rows = rows_of(num_rows)

    def batches(self, split: str, *, batch_size: int, rank: int, world: int, seed: int, epoch: int = 0) -> Any:
        draw = torch.Generator().manual_seed(epoch)
        collate = Collate(**COLUMNS)
        return StatefulDataLoader(self._rows, batch_size=batch_size, shuffle=True, generator=draw, collate_fn=collate)


@pytest.mark.parametrize("batches_per_epoch", [3, 4])  # the checkpoint of step 6 is between two epochs, and within one
def test_a_run_goes_on_in_the_epoch_of_a_loader_where_it_was(tmp_path: Path, batches_per_epoch: int) -> None:
    data = {"kind": "tests.behaviour.test_sources:LoaderData", "num_rows": 4 * batches_per_epoch}
    sections = {"data": data, "train": {"epochs": 12 // batches_per_epoch, "steps": None}}
    whole, resumed, _ = cut_off_and_resumed(tmp_path, sections)
    assert resumed == whole


@pytest.mark.parametrize("make", [torchdata_loader, streamed_rows])
def test_a_loader_with_a_state_goes_on_where_the_checkpoint_has_it(tmp_path: Path, make: Any) -> None:
    with scorer() as whole:
        whole.fit(make())
        digest = whole.digest()
        assert whole.steps == 10
    with scorer() as first:
        first.fit(make(), steps=4)
        first.save(tmp_path / "step-4")
    with scorer() as second:
        second.load(tmp_path / "step-4")
        source = make()
        source.load_state_dict(second.data_state)
        second.fit(source)
        assert second.steps == 10 and second.digest() == digest


def test_in_a_pause_the_state_is_that_of_the_last_batch_trained_on() -> None:
    with scorer() as trainer:
        states: list[Any] = []

        class Numbered:
            def __init__(self) -> None:
                self.given = 0

            def __iter__(self) -> Any:
                for batch in streamed_rows():
                    self.given += 1
                    yield batch

            def state_dict(self) -> int:
                return self.given

        trainer.fit(Numbered(), pause_every=3, on_step=lambda result: states.append((result.step, trainer.data_state)))
        assert [state for step, state in states if step in (3, 6, 9)] == [3, 6, 9]
        assert trainer.data_state == 10


def test_the_state_crosses_the_border_of_a_reader_process_with_its_batch() -> None:
    with in_process(Events, 0) as reader:
        for number in range(1, 4):
            next(reader)
            assert reader.state_dict() == {"at": number, "rank": 0}


@pytest.mark.parametrize(
    "state",
    [
        {"a": [1, 2.5, None, True, "x"], "b": {"c": (1, (2,))}, 3: b"bytes"},
        {"__nestpipe__": "tuple"},
        [float("inf"), np.int64(7), np.arange(6).reshape(2, 3), torch.arange(4, dtype=torch.uint8)],
    ],
)
def test_a_state_comes_back_as_it_was(state: Any) -> None:
    back = from_json(json.loads(json.dumps(to_json(state), allow_nan=False)))
    assert repr(back) == repr(state) and type(back) is type(state)


def test_a_state_that_no_checkpoint_can_hold_is_refused_at_the_first_batch() -> None:
    class Odd(list):
        def state_dict(self) -> Any:
            return {"sampler": {"seen": {1, 2}}}

    with scorer() as trainer, pytest.raises(TrainingError, match=r"state_dict\(\)\['sampler'\]\['seen'\] .* is a set"):
        trainer.fit(Odd(streamed_rows()))
