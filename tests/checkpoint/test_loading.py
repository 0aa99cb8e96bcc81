"""What four workers saved, in one checkpoint or in two that build on each other, is whole on any other number of workers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nestpipe import Batch, Feature, Jagged, Table, Trainer
from nestpipe.checkpoint.manifest import folder_of
from nestpipe.kernels.keys import shards
from tests.checkpoint.test_saving import TABLES, Model, contents, make_trainer, train
from tests.cluster import Cluster

FULL, CHANGES = folder_of(5), folder_of(7)


def some_batches() -> list[Batch]:
    rng = np.random.default_rng(8)
    # Some of these keys have no row.
    return [
        Batch({table.name: Jagged.from_lists(rng.integers(0, 200, (6, 3)).tolist()) for table in TABLES})
        for _ in range(3)
    ]


def state_of(trainer: Trainer) -> dict[str, Any]:
    judged = trainer.evaluate(some_batches()[trainer.rank :: trainer.world], {})
    assert trainer._worker.dense.optimizer is not None
    optimizer = trainer._worker.dense.optimizer.state_dict()["state"]
    return {
        "contents": contents(trainer),
        "digest": trainer.digest(),
        "evaluation": judged,
        "dense": {name: tensor.tolist() for name, tensor in trainer.model.state_dict().items()},
        "dense optimizer": {
            f"{i}.{name}": value.tolist() for i, state in optimizer.items() for name, value in state.items()
        },
    }


def save_both(folder: Path) -> list[dict[str, Any]]:
    trainer = make_trainer()
    checkpoints = trainer.checkpoints(folder, full_every=2)
    train(trainer, 0, 5)
    trainer.checkpoint(checkpoints)
    states = [state_of(trainer)]
    train(trainer, 5, 7)
    trainer.checkpoint(checkpoints)
    checkpoints.wait()
    return [*states, state_of(trainer)]


@pytest.fixture(scope="module")
def saved(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("four")
    full, changes = cluster.run(4, save_both, folder)[0]
    return folder, {FULL: full, CHANGES: changes}


def load_state(path: Path) -> dict[str, Any]:
    trainer = make_trainer()
    trainer.load(path)
    return state_of(trainer)


@pytest.mark.parametrize("step", [FULL, CHANGES])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_everything_is_there_once_on_another_number_of_workers(
    cluster: Cluster, saved: tuple[Path, dict[str, Any]], world: int, step: str
) -> None:
    folder, before = saved
    for loaded in cluster.run(world, load_state, folder / step):
        for table in TABLES:
            for kind, expected in before[step]["contents"]["tables"][table.name].items():
                held = loaded["contents"]["tables"][table.name][kind]
                missing = sorted(set(expected) - set(held))
                assert not missing, f"{len(missing)} of {len(expected)} {kind} of {table.name} are gone: {missing[:5]}"
                assert held == expected, (table.name, kind)
        # Bags that are pooled where their rows are: another number of workers adds them in another order.
        assert loaded["evaluation"] == pytest.approx(before[step]["evaluation"], rel=1e-6)
        assert loaded == {**before[step], "evaluation": loaded["evaluation"]}


def test_the_second_checkpoint_is_another_state_than_the_first(saved: tuple[Path, dict[str, Any]]) -> None:
    full, changes = saved[1][FULL], saved[1][CHANGES]
    assert full["digest"] != changes["digest"] and full["evaluation"] != changes["evaluation"]
    assert full["contents"]["tables"]["rare"]["rows"] and full["contents"]["tables"]["rare"]["shared"]


# -- keys that have a row of their own in a shard with a shared row ----------------------------------------------------


class Bare(nn.Module):
    def forward(self, batch: Batch, rows: dict[str, Tensor]) -> Tensor:
        return rows["bag"].square().sum(1)


def rare_trainer() -> Trainer:
    table = Table("bag", 2, admit_after=2)
    return Trainer(Bare(), [table], [Feature("bag", "bag", "sum")], dense_optimizer=lambda p: torch.optim.SGD(p, 0.1))


def test_an_unchanged_row_of_a_key_is_not_taken_for_the_row_that_rare_keys_of_its_shard_share(tmp_path: Path) -> None:
    every = np.arange(1 << 17)
    same = every[shards(every) == shards(every[:1])].tolist()
    assert len(same) > 1
    frequent, rare = same[:2]
    trainer, other = rare_trainer(), rare_trainer()
    checkpoints = trainer.checkpoints(tmp_path, full_every=2)
    for key in (frequent, frequent):
        trainer.step(Batch({"bag": Jagged.from_lists([[key]])}))
    trainer.checkpoint(checkpoints)
    trainer.step(Batch({"bag": Jagged.from_lists([[rare]])}))
    trainer.checkpoint(checkpoints)
    checkpoints.wait()
    other.load(tmp_path / folder_of(3))
    assert list(contents(other)["tables"]["bag"]["rows"]) == [frequent]
    assert contents(other) == contents(trainer) and other.digest() == trainer.digest()


# -- other tables ------------------------------------------------------------------------------------------------------


def trainer_of(tables: list[Table]) -> Trainer:
    features = [Feature(table.name, table.name, "sum") for table in tables]
    return Trainer(Model(), tables, features, dense_optimizer=lambda p: torch.optim.Adam(p, 1e-2))


def load_some(path: Path, names: list[str]) -> dict[str, Any]:
    trainer = make_trainer()
    trainer.load(path, tables=names)
    loaded = state_of(trainer)
    train(trainer, trainer.steps, trainer.steps + 2)
    return loaded


@pytest.mark.parametrize("step", [FULL, CHANGES])
@pytest.mark.parametrize("world", [1, 2])
def test_a_subset_of_tables_is_loaded_and_the_others_start_anew(
    cluster: Cluster, saved: tuple[Path, dict[str, Any]], world: int, step: str
) -> None:
    folder, before = saved
    for loaded in cluster.run(world, load_some, folder / step, ["busy", "plain"]):
        tables, expected = loaded["contents"]["tables"], before[step]["contents"]["tables"]
        assert {name: tables[name] for name in ("busy", "plain")} == {
            name: expected[name] for name in ("busy", "plain")
        }
        assert all(not any(tables[name].values()) for name in ("rare", "short", "half/odd name"))
        assert loaded["dense"] == before[step]["dense"]
        assert loaded["contents"]["step"] == before[step]["contents"]["step"]
        assert loaded["contents"]["updates"] == [
            before[step]["contents"]["updates"][0],
            0,
            0,
            0,
            loaded["contents"]["step"],
        ]


@pytest.mark.parametrize(
    ("tables", "wanted", "message"),
    [
        ([*TABLES, Table("new", 4)], None, "has no table 'new'; it has busy, half/odd name, plain, rare, short"),
        (TABLES[1:], None, "has a table 'plain' that this trainer does not have.*tables="),
        (TABLES, ["plain", "plein"], "there is no table 'plein' to load into; this trainer has busy, half/odd name"),
        ([*TABLES, Table("new", 4)], ["new"], "has no table 'new'"),
        ([dataclasses.replace(TABLES[0], dim=6), *TABLES[1:]], None, "table 'plain': dim is 6 here but 4 in .*"),
        ([dataclasses.replace(TABLES[0], dim=6), *TABLES[1:]], ["rare", "plain"], "table 'plain': dim is 6 here but 4"),
    ],
    ids=["missing", "extra", "asked for and not here", "asked for and not there", "dim", "dim of a subset"],
)
def test_tables_that_do_not_fit_are_refused_and_nothing_is_loaded(
    saved: tuple[Path, dict[str, Any]], tables: list[Table], wanted: list[str] | None, message: str
) -> None:
    trainer = trainer_of(tables)
    before = trainer.digest(), trainer.steps
    with pytest.raises(ValueError, match=message):
        trainer.load(saved[0] / CHANGES, tables=wanted)
    assert (trainer.digest(), trainer.steps) == before


def test_what_the_messages_advise_works(saved: tuple[Path, dict[str, Any]]) -> None:
    """A table more than in the checkpoint, and one less: both load with the tables that are in both."""
    new = Table("new", TABLES[0].dim)
    names = [table.name for table in TABLES]
    more = trainer_of([*TABLES, new])
    more.load(saved[0] / FULL, tables=names)
    assert {name: contents(more)["tables"][name] for name in names} == saved[1][FULL]["contents"]["tables"]
    less = trainer_of([new, *TABLES[1:]])
    less.load(saved[0] / FULL, tables=names[1:])
    assert contents(less)["tables"]["rare"] == saved[1][FULL]["contents"]["tables"]["rare"]
    assert less.steps == more.steps == 5
