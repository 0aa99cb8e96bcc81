"""Rows of another program: every worker gives a part, the bits arrive where the keys live, and come out again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nestpipe import SGD, Adagrad, Adam, Batch, Eviction, Feature, Jagged, RowwiseAdagrad, Table, Trainer, TrainingError
from tests.cluster import Cluster

DIM, KEYS, SIZE = 5, 300, 24  # an odd dim: two bfloat16 share a word


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(DIM, 1)

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Tensor:
        return (self.out(rows["a"])[:, 0] - 1) ** 2


def make(
    storage: Path | str = "unused", schedule: str = "nested", table: dict[str, Any] | None = None, **options: Any
) -> Trainer:
    torch.manual_seed(0)
    declared = {"optimizer": RowwiseAdagrad(lr=0.1), **(table or {})}
    if declared.get("tier") == "disk":
        declared = {"memory": "40MB", **declared}
    tables, features = [Table("item", DIM, **declared)], [Feature("a", "item", "sum")]
    micro = {"micro_batches": 2} if schedule in ("fwp", "nested") else {}
    return Trainer(
        Sum(),
        tables,
        features,
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, 0.05),
        schedule=schedule,
        storage=storage,
        **micro,
        **options,
    )


def batches(trainer: Trainer, steps: int, seed: int = 0) -> Iterator[Batch]:
    draw = torch.Generator().manual_seed(1000 * seed + trainer.rank)
    for _ in range(steps):
        keys = torch.randint(0, KEYS, (2 * SIZE,), generator=draw)
        yield Batch({"a": Jagged.from_lengths(keys, torch.full((SIZE,), 2))}, labels=torch.ones(SIZE))


def foreign(count: int = KEYS, seed: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.arange(count), torch.randn(count, DIM, generator=draw), torch.rand(count, 1, generator=draw)


def give(trainer: Trainer, keys: Tensor, rows: Tensor, state: Tensor | None = None, **options: Any) -> None:
    """Every worker its part."""
    mine = slice(trainer.rank, None, trainer.world)
    trainer.put_rows("item", keys[mine], rows[mine], state=None if state is None else state[mine], **options)


# -- in and out --------------------------------------------------------------------------------------------------------


def in_and_out(storage: str, table: dict[str, Any], options: dict[str, Any]) -> tuple[bool, bool, list[int], str]:
    keys, rows, state = foreign()
    with make(storage, table=table, **options) as trainer:
        give(trainer, keys, rows, state)
        back, state_back = trainer.rows("item", keys.flip(0)), trainer.row_state("item", keys.flip(0))
        held = trainer.keys("item")
        expected = rows.to(table.get("dtype", torch.float32)).float()
        return (
            torch.equal(back, expected.flip(0)),
            torch.equal(state_back, state.flip(0)),
            held.tolist(),
            trainer.digest(),
        )


KINDS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one worker": (1, {}, {}),
    "two workers": (2, {}, {}),
    "three workers, on disk": (3, {"tier": "disk"}, {}),
    "one owner": (3, {"owners": 1}, {}),
    "owners still to be decided": (2, {"owners": "auto"}, {}),
    "hot rows still to be chosen": (2, {"hot": 8}, {}),
    "replicas": (4, {}, {"replicas": 2}),
    "averaged replicas": (2, {"sync": "average"}, {"replicas": 2}),
    "every worker holds all": (2, {"replicas": "all"}, {}),
    "rare keys": (2, {"admit_after": 3}, {}),
    "eviction": (2, {"eviction": Eviction(max_rows=1000, ttl=50)}, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_state_come_out_as_they_went_in_whoever_holds_them(
    cluster: Cluster, tmp_path: Path, kind: str
) -> None:
    world, table, options = KINDS[kind]
    told = cluster.run(world, in_and_out, str(tmp_path), table, options)
    assert all(rows and state for rows, state, _, _ in told)
    assert sorted(key for _, _, held, _ in told for key in held) == list(range(KEYS))  # each on one worker
    with make() as alone:
        give(alone, *foreign())
        assert {digest for *_, digest in told} == {alone.digest()}


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_rows_of_bfloat16_are_rounded_as_torch_does(tmp_path: Path, tier: str) -> None:
    rows, state, _, digest = in_and_out(str(tmp_path), {"dtype": torch.bfloat16, "tier": tier}, {})
    assert rows and state
    keys, values, sums = foreign()
    with make(table={"dtype": torch.bfloat16}) as other:
        give(other, keys, values.to(torch.bfloat16), sums)
        assert other.digest() == digest


# -- and training goes on ----------------------------------------------------------------------------------------------


def trained_from(way: str, folder: str, tier: str, schedule: str) -> str:
    """Six steps, of which the first three were done by another trainer, whose rows come in `way`."""
    table = {"optimizer": Adam(lr=0.01), "tier": tier}
    with make(f"{folder}/{way}-a", schedule, {**table, "tier": "memory"}) as before:
        before.fit(batches(before, 3))
        before.save(f"{folder}/{way}")
        keys = torch.cat([torch.as_tensor(part) for part in before.workers.gather(before.keys("item").tolist())])
        rows, state, model = before.rows("item", keys), before.row_state("item", keys), before.model.state_dict()
    with make(f"{folder}/{way}-b", schedule, table) as after:
        if way == "load":
            after.load(f"{folder}/{way}", tables=["item"])
        else:
            after.model.load_state_dict(model)
            give(after, keys, rows, state, updates=3)
        after.fit(batches(after, 3, seed=1))
        return after.digest()


@pytest.mark.parametrize(("schedule", "tier"), [("serial", "disk"), ("dbp", "disk"), ("nested", "memory")])
def test_training_goes_on_from_rows_with_their_state_as_from_a_checkpoint(
    cluster: Cluster, tmp_path: Path, schedule: str, tier: str
) -> None:
    digests = {cluster.run(2, trained_from, way, str(tmp_path), tier, schedule)[0] for way in ("load", "put")}
    assert len(digests) == 1


def given_in_a_pause(storage: str, tier: str, schedule: str, freshness: bool) -> str:
    """Rows that a batch before and one behind use are overwritten in the middle of fit."""
    keys, rows, state = foreign(40)
    with make(storage, schedule, {"tier": tier}, check_freshness=freshness) as trainer:

        def on_step(result: Any) -> None:
            if trainer.steps in (3, 4):
                give(trainer, keys, rows * trainer.steps, state)

        trainer.fit(batches(trainer, 8), on_step=on_step, pause_every=1)
        return trainer.digest()


def test_rows_given_in_a_pause_are_what_the_next_batch_reads_under_every_schedule_and_tier(
    cluster: Cluster, tmp_path: Path
) -> None:
    reference = {cluster.run(2, given_in_a_pause, str(tmp_path), "memory", "fwp", False)[0]}
    for tier, schedule in (("memory", "nested"), ("disk", "fwp"), ("disk", "nested")):
        reference |= set(cluster.run(2, given_in_a_pause, str(tmp_path), tier, schedule, tier == "disk"))
    assert len(reference) == 1


def test_rows_given_since_a_full_checkpoint_are_in_the_next_incremental_one(tmp_path: Path) -> None:
    keys, rows, state = foreign(50)
    with make() as trainer:
        saving = trainer.checkpoints(tmp_path / "saved", full_every=5)
        trainer.fit(batches(trainer, 2))
        trainer.checkpoint(saving)
        saving.wait()
        give(trainer, keys, rows, state)
        trainer.fit(batches(trainer, 1, seed=5))
        trainer.checkpoint(saving)
        saving.wait()
        digest = trainer.digest()
    with make() as loaded:
        loaded.load(tmp_path / "saved" / "step-000000003")
        assert loaded.digest() == digest


def test_a_key_that_was_rare_has_a_row_of_its_own_once_it_is_given_one() -> None:
    with make(table={"admit_after": 5, "optimizer": SGD(lr=0.1)}) as trainer:
        trainer.fit(batches(trainer, 1))
        assert not len(trainer.keys("item"))
        trainer.put_rows("item", [3], torch.ones(1, DIM))
        assert trainer.keys("item").tolist() == [3]
        assert torch.equal(trainer.rows("item", [3]), torch.ones(1, DIM))


# -- what cannot be ----------------------------------------------------------------------------------------------------

ROWS = torch.zeros(2, DIM)
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"rows": torch.zeros(2, DIM + 1)}, r"shape \(2, 5\) in float32, bfloat16 or float16, got \(2, 6\)"),
    ({}, {"rows": ROWS.double()}, "float64"),
    ({}, {"rows": ROWS.numpy()}, "rows must be a tensor, got ndarray"),
    ({}, {"keys": [1, 1]}, "key 1 is given twice"),
    ({}, {"keys": [1.5, 2.5]}, "keys must be whole numbers"),
    ({}, {"rows": torch.tensor([[0.0] * DIM, [float("nan")] * DIM])}, "rows of key 9 have NaN"),
    ({}, {"state": torch.zeros(2, DIM)}, r"RowwiseAdagrad of dim 5 keeps 1 floats .*\(2, 1\), got \(2, 5\)"),
    ({}, {"state": -torch.ones(2, 1)}, "sum of squares"),
    ({"optimizer": Adagrad()}, {"state": torch.zeros(2, 1)}, r"Adagrad of dim 5 keeps 5 floats"),
    ({"optimizer": Adam()}, {"state": torch.zeros(2, 2 * DIM)}, "give updates="),
    ({}, {"updates": -1}, "updates must be a whole number"),
    ({}, {"updates": 5}, "updates=5 goes with the state that they have made"),
    ({}, {"keys": [1, 2**63]}, "keys must be whole numbers of 64 bits"),
    ({"dtype": torch.bfloat16}, {"rows": torch.full((2, DIM), 3.4e38)}, "rows of key 1 have NaN or infinity"),
    ({"eviction": Eviction(max_rows=1)}, {}, "over its part .* of the budget max_rows=1"),
]


@pytest.mark.parametrize(("table", "arguments", "message"), REFUSED, ids=[message[:40] for *_, message in REFUSED])
def test_what_does_not_fit_the_table_is_refused_and_changes_nothing(
    table: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    with make(table=table) as trainer:
        before = trainer.digest()
        with pytest.raises(TrainingError, match=message):
            trainer.put_rows("item", **{"keys": [1, 9], "rows": ROWS, **arguments})
        assert trainer.digest() == before
        trainer.fit(batches(trainer, 1)) if table.get("eviction") is None else None  # it can still be used


def test_a_table_that_is_not_there_is_named_with_the_nearest_one() -> None:
    with make() as trainer, pytest.raises(ValueError, match=r"'itme'.* did you mean 'item'"):
        trainer.put_rows("itme", [1], ROWS[:1])


def wrong_on_one(what: str) -> tuple[str, str, str]:
    with make() as trainer:
        before, error = trainer.digest(), "done"
        keys, rows, options = torch.arange(4) + 4 * trainer.rank, torch.zeros(4, DIM), {}
        if what == "the same keys":
            keys = torch.arange(4)
        elif what == "state" and trainer.rank:
            options = {"state": torch.zeros(4, 1)}
        elif what == "shape" and trainer.rank:
            rows = rows[:, 1:]
        try:
            trainer.put_rows("item", keys, rows, **options)
        except TrainingError as problem:
            error = str(problem)
        return error, before, trainer.digest()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("the same keys", "is given by more than one worker; let each give a part"),
        ("state", "put_rows(state) is 'none' on rank 0 and 'some' on rank 1"),
        ("shape", "rank 1, rows of table 'item': 4 keys need rows of shape (4, 5)"),
    ],
)
def test_what_is_wrong_on_one_worker_is_said_on_all_and_changes_nothing(
    cluster: Cluster, what: str, message: str
) -> None:
    for error, before, after in cluster.run(2, wrong_on_one, what):
        assert message in error and before == after


def test_a_checkpoint_is_not_loaded_over_rows_that_were_given(tmp_path: Path) -> None:
    with make() as trainer:
        trainer.fit(batches(trainer, 1))
        trainer.save(tmp_path / "saved")
    with make() as other:
        other.put_rows("item", np.arange(2), ROWS)
        with pytest.raises(ValueError, match="has rows already"):
            other.load(tmp_path / "saved")


# -- beside everything else that a table can do ------------------------------------------------------------------------


def given_between_steps(folder: str, name: str, table: dict[str, Any], options: dict[str, Any]) -> tuple[str, str]:
    """The digest of six steps with rows given after the third; and of the same with a checkpoint after that, loaded elsewhere."""
    keys, rows, state = foreign(60, seed=3)

    def begin(storage: str) -> Trainer:
        return make(f"{folder}/{name}-{storage}", table=table, **options)

    with begin("a") as trainer:
        trainer.fit(batches(trainer, 3))
        give(trainer, keys, rows, state)
        trainer.save(f"{folder}/{name}")
        assert torch.equal(trainer.rows("item", keys), rows) and torch.equal(trainer.row_state("item", keys), state)
        trainer.fit(batches(trainer, 3, seed=1))
        through = trainer.digest()
    with begin("b") as other:
        other.load(f"{folder}/{name}")
        assert torch.equal(other.rows("item", keys), rows) and torch.equal(other.row_state("item", keys), state)
        other.fit(batches(other, 3, seed=1))
        return through, other.digest()


BESIDE: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "hot rows": (2, {"hot": 8}, {}),
    "replicas": (2, {}, {"replicas": 2}),
    "averaged replicas": (2, {"sync": "average", "sync_every": 2}, {"replicas": 2}),
    "averaged replicas on disk": (2, {"sync": "average", "sync_every": 2, "tier": "disk"}, {"replicas": 2}),
    "every worker holds all": (2, {"replicas": "all"}, {}),
    "rare keys": (2, {"admit_after": 3}, {}),
    "rare keys on disk": (2, {"admit_after": 3, "tier": "disk"}, {}),
    "eviction": (2, {"eviction": Eviction(max_rows=250, ttl=2)}, {}),
    "eviction on disk": (2, {"eviction": Eviction(max_rows=250, policy="lfu"), "tier": "disk"}, {}),
}


@pytest.mark.parametrize("kind", BESIDE)
def test_rows_given_between_steps_are_what_training_and_a_checkpoint_go_on_with(
    cluster: Cluster, tmp_path: Path, kind: str
) -> None:
    world, table, options = BESIDE[kind]
    told = cluster.run(world, given_between_steps, str(tmp_path), kind.replace(" ", "-"), table, options)
    assert len({digest for both in told for digest in both}) == 1


def test_a_row_that_is_given_counts_as_used_and_is_not_the_next_to_be_given_up() -> None:
    with make(table={"eviction": Eviction(max_rows=32)}) as trainer:

        def use(first: int, count: int = 16) -> None:
            keys = torch.arange(first, first + count)
            trainer.step(Batch({"a": Jagged.from_lengths(keys, torch.ones(count, dtype=torch.int64))}))

        use(0)
        use(16)
        trainer.put_rows("item", [3], torch.ones(1, DIM))
        use(32, 4)  # somebody has to go
        kept = trainer.keys("item").tolist()
        assert 3 in kept and 0 not in kept
        assert torch.equal(trainer.rows("item", [3]), torch.ones(1, DIM))


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_keys_at_both_ends_of_int64_are_keys_like_any_other(tmp_path: Path, tier: str) -> None:
    ends = torch.tensor([-(2**63), -1, 0, 2**63 - 1])
    with make(tmp_path, table={"tier": tier}) as trainer:
        rows = torch.arange(4 * DIM).reshape(4, DIM).float()
        trainer.put_rows("item", ends, rows)
        assert trainer.keys("item").tolist() == ends.tolist() and torch.equal(trainer.rows("item", ends), rows)


def refused_in_a_window() -> tuple[str, str]:
    """Replicas that wait to be averaged, and rows that two workers give."""
    with make(table={"sync": "average", "sync_every": 4}, replicas=2) as trainer:
        trainer.fit(batches(trainer, 2))
        before = trainer.digest()
        with pytest.raises(TrainingError, match="is given by more than one worker"):
            trainer.put_rows("item", [1], ROWS[:1])
        return before, trainer.digest()


def test_rows_that_are_refused_do_not_average_replicas_before_their_time(cluster: Cluster) -> None:
    for before, after in cluster.run(2, refused_in_a_window):
        assert before == after


def test_all_updates_of_adam_are_one_number_for_a_table() -> None:
    state = torch.zeros(2, 2 * DIM)
    with make(table={"optimizer": Adam()}) as trainer:
        trainer.put_rows("item", [1, 2], ROWS, state=state, updates=100)
        trainer.put_rows("item", [3, 4], ROWS, state=state, updates=100)
        with pytest.raises(TrainingError, match="updates=7, but rows of this table were given with updates=100 before"):
            trainer.put_rows("item", [5, 6], ROWS, state=state, updates=7)
