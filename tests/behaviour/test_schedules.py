"""Every schedule against the serial one, to the bit: tiers, optimizers, overlap, births, eviction, delays, ends of data."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import nestpipe.engine.worker
from nestpipe import SGD, Adagrad, Adam, Batch, Eviction, Feature, Jagged, Output, RowwiseAdagrad, Table, Trainer
from nestpipe.arena import Arena
from nestpipe.engine.buffers import DualBuffer
from nestpipe.engine.context import Context
from nestpipe.engine.engine import Around
from nestpipe.exchange import requests
from nestpipe.exchange.window import Window
from nestpipe.schedule.ops import EMB, Task
from nestpipe.schedule.setting import CLUSTERINGS, Setting
from nestpipe.store import rowfile
from nestpipe.store.disk import DiskStore
from tests.cluster import Cluster

DIM = 4
STEPS = 20  # unless there is a reason for more or fewer
OPTIMIZERS = {
    "sgd": SGD(lr=0.1),
    "adagrad": Adagrad(lr=0.1),
    "rowwise": RowwiseAdagrad(lr=0.1),
    "adam": Adam(lr=0.01),
}


@dataclasses.dataclass(frozen=True)
class Case:
    schedule: str = "serial"
    tier: str = "memory"
    overlap: float = 0.3  # share of a batch's keys that the batch before has
    steps: int = 100
    samples: int = 6  # of a batch, at most
    micro_batches: int = 1
    window_cache: bool = True
    clustering: str = "none"
    look_ahead: int | None = None
    delays: int | None = None  # seed
    pause_every: int | None = None
    check_freshness: bool = False
    broken_sync: bool = False
    replicas: int = 1
    averaged: int = 0  # every so many steps, all tables but the first; 0: all are exact
    hot: int | None = None  # rows of each table; then none has what does not go together with them
    balance: str | float = "none"


class SmallHotSet(DiskStore):
    """So few rows in memory that most lookups go to the file."""

    def __init__(self, table: Table, **options: Any) -> None:
        super().__init__(table, **options, hot_rows=24)


def declared(tier: str, samples: int = 6) -> tuple[list[Table], list[Feature]]:
    """Every row optimizer; with and without admission and eviction; sequences and bags; two dims, two types; held by all
    workers, by two, by one."""
    most = 23 * samples + 2
    limits = [
        {},
        {"admit_after": 3, "eviction": Eviction(max_rows=7 * samples, policy="lfu"), "dtype": torch.bfloat16},
        {"eviction": Eviction(max_rows=most, ttl=7), "owners": 2},
        {"admit_after": 2},
        {"owners": 1},
    ]
    tables, features = [], []
    for number, (name, limit) in enumerate(zip([*OPTIMIZERS, "rowwise"], limits, strict=True)):
        table = Table(f"{name} {number}", DIM + 2 * (number % 2), optimizer=OPTIMIZERS[name], tier=tier, **limit)  # type: ignore[arg-type]
        tables.append(table)
        features.append(Feature(table.name, table.name, (None, "sum", "mean")[number % 3]))
    return tables, features


class Model(nn.Module):
    def __init__(self, features: list[Feature], tables: list[Table]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.features = features
        self.out = nn.ModuleDict({t.name.replace(" ", "_"): nn.Linear(t.dim, 1) for t in tables})

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        total = torch.zeros(batch.size)
        for feature in self.features:
            values = rows[feature.name]
            if isinstance(values, Jagged):
                scores = self.out[feature.table.replace(" ", "_")](values.values)[:, 0]
                total = total.index_add(0, values.sample_ids(), scores)
            else:
                total = total + self.out[feature.table.replace(" ", "_")](values)[:, 0]
        return Output((total - batch.labels) ** 2)


def batches(features: list[Feature], case: Case, rank: int, world: int) -> Iterator[Batch]:
    """Some keys again from the batch before, some from the one before that, the rest new or long unused. The last batches
    are uneven: ranks end at different steps, and some batches are empty."""
    rng = np.random.default_rng([9, rank])
    last: list[np.ndarray] = [np.arange(4), np.arange(4)]
    for t in range(case.steps - (rank * 3 if world > 1 else 0)):
        size = int(rng.integers(0, case.samples + 1)) if t > case.steps * 3 // 4 else case.samples
        keys, fresh_keys = {}, []
        for feature in features:
            lengths = rng.integers(0, 4, size)
            n = int(lengths.sum())
            new = np.where(rng.random(n) < 0.5, rng.integers(0, 400, n), 1000 + t * 50 + rng.integers(0, 50, n))
            older = rng.choice(last[-2], n)
            draw = rng.random(n)
            values = np.where(draw < case.overlap, rng.choice(last[-1], n), np.where(draw > 0.9, older, new))
            if case.overlap == 0:
                values = np.where(np.isin(values, last[-1]), values + 10_000 * (t + 1), values)
            fresh_keys.append(values)
            keys[feature.name] = Jagged.from_lengths(torch.from_numpy(values), torch.from_numpy(lengths))
        used = np.unique(np.concatenate(fresh_keys))
        last.append(used if len(used) else last[-1])
        yield Batch(keys, {}, torch.from_numpy(rng.standard_normal(size).astype(np.float32)))


def random_delays(seed: int, rank: int, micro_batches: int) -> Around:
    """One in eight operations starts up to 2.4 ms late, one in eight takes that much longer; different on every rank. Of
    many micro-batches fewer."""
    share = 0.12 * min(1.0, 4 / micro_batches)

    def around(task: Task, work: Callable[[], None]) -> None:
        name = zlib.crc32(task.op.name.encode())
        before, after = np.random.default_rng([seed, rank, name, task.op.batch, task.op.part]).random(2)
        time.sleep(max(0.0, float(before) - 1 + share) / share * 0.0024)
        work()
        time.sleep(max(0.0, float(after) - 1 + share) / share * 0.0024)

    return around


def make(case: Case) -> tuple[Trainer, list[Feature], str]:
    tables, features = declared(case.tier, case.samples)
    if case.averaged:
        tables[1:] = [dataclasses.replace(t, sync="average", sync_every=case.averaged) for t in tables[1:]]
    if case.hot is not None:
        plain: dict[str, Any] = {"admit_after": 1, "eviction": None, "pooled_at": "source"}
        tables = [dataclasses.replace(t, **plain, hot=case.hot) for t in tables]
    nestpipe.engine.worker.DiskStore = SmallHotSet
    # In memory where there is such a folder: the timing of a disk is not what is tested here. (It has no O_DIRECT, so the
    # files are read through the page cache; tests/store does it the other way.) An extent there is memory to be cleared.
    rowfile.EXTENT_BYTES = 1 << 20
    folder = tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    trainer = Trainer(
        Model(features, tables),
        tables,
        features,
        dense_optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2),
        schedule=case.schedule,
        micro_batches=case.micro_batches,
        window_cache=case.window_cache,
        clustering=case.clustering,
        look_ahead=case.look_ahead,
        replicas=case.replicas,
        balance=case.balance,
        storage=folder,
        check_freshness=case.check_freshness,
    )
    disk = case.tier == "disk"  # else rows would never leave memory, and nothing of the file be tested
    assert all(isinstance(store, SmallHotSet) == (disk and store.table.tier == "disk") for store in trainer.stores)
    if case.delays is not None:
        trainer.around = random_delays(case.delays, trainer.rank, case.micro_batches)
    return trainer, features, folder


def close(trainer: Trainer, folder: str) -> None:
    """All stores together: the system takes tens of milliseconds for each."""
    stores = [store for store in trainer.stores if isinstance(store, DiskStore)]
    with ThreadPoolExecutor(len(stores) + 1) as pool:
        list(pool.map(DiskStore.close, stores))
    trainer.close()
    shutil.rmtree(folder)


def train(case: Case) -> tuple[str, str, int]:
    """Digest, hash of all losses, steps."""
    sync = DualBuffer.sync
    if case.broken_sync:
        DualBuffer.sync = sync_the_wrong_rows  # type: ignore[method-assign]
    trainer, features, folder = make(case)
    losses: list[bytes] = []
    try:
        source = batches(features, case, trainer.rank, trainer.world)
        trainer.fit(source, pause_every=case.pause_every, on_step=lambda r: losses.append(np.float64(r.loss).tobytes()))
        return trainer.digest(), hashlib.blake2b(b"".join(losses), digest_size=8).hexdigest(), trainer.steps
    finally:
        DualBuffer.sync = sync  # type: ignore[method-assign]
        close(trainer, folder)


def sync_the_wrong_rows(self: DualBuffer, batch: int) -> None:
    buffer = self.of(batch)
    if len(buffer.went_to):
        buffer.records[buffer.went_to] = self.of(batch - 1).records[np.roll(buffer.came_from, 1)]


SERIAL: dict[tuple[int, Case], tuple[str, str, int]] = {}


def serial(cluster: Cluster, world: int, case: Case) -> tuple[str, str, int]:
    """What the serial run of the same data with the same split gives, in memory."""
    plain = dataclasses.replace(
        case, schedule="serial", tier="memory", look_ahead=None, delays=None, pause_every=None, check_freshness=False,
        broken_sync=False,
    )  # fmt: skip
    if (world, plain) not in SERIAL:
        SERIAL[world, plain] = cluster.run(world, train, plain)[0]
    return SERIAL[world, plain]


PLACES = list(itertools.product(["memory", "disk"], [1, 2, 3, 4], [0.0, 0.3, 1.0]))  # tier, world, overlap
COUNTS = [1, 2, 3, 8, 32]
SPLITS = [  # number of micro-batches, clustering, window cache
    (count, clustering, cached)
    for count, clustering, cached in itertools.product(COUNTS, CLUSTERINGS, [True, False])
    if count > 2 or clustering in ("none", "window")  # else it makes no difference
]


def split_case(schedule: str, place: int, split: int, *, steps: int) -> tuple[int, Case]:
    """Workers, and the case; every other one with fewer samples than its larger numbers of micro-batches."""
    tier, world, overlap = PLACES[place]
    count, clustering, cached = SPLITS[split]
    samples = 6 if count < 8 or (place + split) % 2 else 40
    return world, Case(
        schedule,
        tier,
        overlap,
        steps,
        samples,
        count,
        cached,
        clustering,
        delays=place + split if schedule != "serial" else None,
    )


@pytest.mark.parametrize(
    "place",
    [i for i, (_, world, overlap) in enumerate(PLACES) if world <= 2 or overlap == 0.3],
    ids=lambda i: "-".join(map(str, PLACES[i])),
)
def test_many_steps_of_dbp_equal_serial_training_in_memory(cluster: Cluster, place: int) -> None:
    """Tables, optimizer state, dense weights and every loss: every row optimizer, births, admission, eviction, ranks that
    run out of data, and random delays in every lane."""
    steps = 60 if PLACES[place][1] <= 2 else 30  # workers share the cores
    world, case = split_case("dbp", place, 0, steps=steps)
    results = cluster.run(world, train, case)
    assert set(results) == {serial(cluster, world, case)}
    assert results[0][2] == steps


def evicted(case: Case) -> list[int]:
    trainer, features, folder = make(case)
    trainer.fit(batches(features, case, trainer.rank, trainer.world))
    found = [store.stats().evicted for store in trainer.stores if store.table.eviction is not None]
    close(trainer, folder)
    return found


def test_the_tables_of_these_tests_do_give_up_rows(cluster: Cluster) -> None:
    counts = np.sum(cluster.run(2, evicted, Case(steps=60)), 0)
    assert len(counts) == 2 and (counts > 10).all(), counts


# Every pair of a number of micro-batches, a clustering and a window occurs; `make grid` takes all three together.
PAIRED = [
    split
    for split, (count, clustering, cached) in enumerate(SPLITS)
    if (COUNTS.index(count) + (clustering in ("window", "shared")) + cached) % 2
]


@pytest.mark.parametrize("split", PAIRED, ids=lambda i: "-".join(map(str, SPLITS[i])))
def test_every_schedule_equals_serial_with_the_same_split(cluster: Cluster, split: int) -> None:
    """Numbers of micro-batches, clusterings and windows, each with another number of workers, tier and overlap."""
    many = SPLITS[split][0] >= 8
    places = [i for i, (_, world, _) in enumerate(PLACES) if world <= (2 if many else 4)]  # workers share the cores
    place = places[split * 5 % len(places)]
    steps = 6 if many else 12
    for schedule in ("fwp", "nested") if split % 3 else ("dbp", "fwp", "nested"):
        world, case = split_case(schedule, place, split, steps=steps)
        assert set(cluster.run(world, train, case)) == {serial(cluster, world, case)}, schedule


@pytest.mark.parametrize(("schedule", "look_ahead"), [("dbp", 1), ("dbp", 2), ("dbp", 7), ("nested", 1), ("nested", 6)])
def test_every_look_ahead_equals_serial(cluster: Cluster, schedule: str, look_ahead: int) -> None:
    case = Case(schedule, "disk", look_ahead=look_ahead, steps=STEPS, micro_batches=2, delays=look_ahead)
    assert cluster.run(2, train, case)[0] == serial(cluster, 2, case)


@pytest.mark.parametrize("schedule", ["dbp", "nested"])
def test_pauses_change_nothing(cluster: Cluster, schedule: str) -> None:
    case = Case(schedule, "disk", steps=STEPS, micro_batches=2, pause_every=7, delays=2)
    assert cluster.run(2, train, case)[0] == serial(cluster, 2, case)


@settings(max_examples=8, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from(["dbp", "fwp", "nested"]),
    st.sampled_from(["memory", "disk"]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_no_timing_changes_the_result(
    cluster: Cluster, seed: int, schedule: str, tier: str, overlap: float, world: int, micro_batches: int
) -> None:
    case = Case(schedule, tier, overlap, steps=15, micro_batches=micro_batches, delays=seed)
    assert cluster.run(world, train, case)[0] == serial(cluster, world, case)


@pytest.mark.parametrize("tier", ["memory", "disk"])
@pytest.mark.parametrize("schedule", ["serial", "dbp", "fwp", "nested"])
def test_every_row_carries_the_version_that_the_batch_before_left(cluster: Cluster, schedule: str, tier: str) -> None:
    case = Case(schedule, tier, steps=STEPS, micro_batches=2, delays=3, check_freshness=True)
    assert cluster.run(2, train, case)[0] == serial(cluster, 2, case)


@pytest.mark.parametrize("cached", [True, False])
def test_the_split_itself_changes_only_the_last_bits(cluster: Cluster, cached: bool) -> None:
    """Another order of samples and sums is another rounding, and nothing else."""
    plain = Case(steps=STEPS, samples=40)
    split = dataclasses.replace(plain, micro_batches=8, clustering="window", window_cache=cached)
    (digest, first), (other, second) = (cluster.run(2, digest_and_losses, case)[0] for case in (plain, split))
    assert digest != other and len(first) == len(second) == STEPS
    np.testing.assert_allclose(first, second, rtol=1e-4)


def digest_and_losses(case: Case) -> tuple[str, list[float]]:
    trainer, features, folder = make(case)
    losses: list[float] = []
    try:
        trainer.fit(batches(features, case, trainer.rank, trainer.world), on_step=lambda r: losses.append(r.loss))
        return trainer.digest(), losses
    finally:
        close(trainer, folder)


def evaluate_in_the_middle(case: Case) -> str:
    trainer, features, folder = make(case)
    seen = []

    def on_step(result: Any) -> None:
        if result.step % 5 == 0:
            seen.append(trainer.digest())

    try:
        trainer.fit(batches(features, case, trainer.rank, trainer.world), on_step=on_step, pause_every=case.pause_every)
        return str(len(set(seen)))
    except ValueError as error:
        return str(error)
    finally:
        close(trainer, folder)


def test_tables_can_be_looked_at_in_a_pause_and_only_there(cluster: Cluster) -> None:
    assert cluster.run(1, evaluate_in_the_middle, Case("serial", "disk", steps=20)) == ["4"]
    assert cluster.run(1, evaluate_in_the_middle, Case("dbp", "disk", steps=20, pause_every=5)) == ["4"]
    (message,) = cluster.run(1, evaluate_in_the_middle, Case("dbp", "disk", steps=20))
    assert "pause_every" in message


def train_step_by_step(case: Case) -> tuple[str, int]:
    trainer, features, folder = make(case)
    try:
        source = batches(features, case, trainer.rank, trainer.world)
        while trainer.step(next(source, None)) is not None:
            pass
        return trainer.digest(), trainer.steps
    finally:
        close(trainer, folder)


def test_a_loop_of_ones_own_equals_serial(cluster: Cluster) -> None:
    """Nothing is looked up ahead there, but it is the same training."""
    case = Case("dbp", "disk", steps=STEPS)
    digest, _, steps = serial(cluster, 2, case)
    assert cluster.run(2, train_step_by_step, case) == [(digest, steps)] * 2


# -- tests of the tests ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [0.3, 1.0])
def test_a_broken_sync_changes_the_digest(cluster: Cluster, overlap: float) -> None:
    case = Case("dbp", "disk", overlap, steps=STEPS, broken_sync=True)
    assert cluster.run(2, train, case)[0] != serial(cluster, 2, case)


def train_with_gradients_sent_too_early(case: Case) -> tuple[str, str, int]:
    """Every row's gradient leaves with the micro-batch that uses the row first."""
    used = requests.first_and_last_use

    def wrong(inverse: np.ndarray, ends: np.ndarray, num_new: np.ndarray, last: np.ndarray) -> None:
        used(inverse, ends, num_new, last)
        last[:] = np.repeat(np.arange(len(num_new)), num_new)

    requests.first_and_last_use = wrong  # type: ignore[assignment]
    try:
        return train(case)
    finally:
        requests.first_and_last_use = used


def test_a_gradient_that_leaves_before_its_last_use_changes_the_digest(cluster: Cluster) -> None:
    case = Case("fwp", "memory", 0.3, steps=STEPS, samples=12, micro_batches=3)
    assert cluster.run(2, train_with_gradients_sent_too_early, case)[0] != serial(cluster, 2, case)


@pytest.mark.parametrize("schedule", ["serial", "dbp"])
def test_a_broken_sync_is_caught_by_the_versions(cluster: Cluster, schedule: str) -> None:
    outcomes = cluster.outcomes(
        2, train_with_versions_unsynced, Case(schedule, "disk", steps=STEPS, check_freshness=True)
    )
    assert all(kind == "failed" and "rows that are not fresh" in value[1] for kind, value in outcomes), outcomes


def train_with_versions_unsynced(case: Case) -> None:
    trainer, features, folder = make(case)
    trainer._worker.ops._versions.sync = lambda *args: None  # type: ignore[union-attr, method-assign]
    try:
        trainer.fit(batches(features, case, trainer.rank, trainer.world))
    finally:
        close(trainer, folder)


@pytest.mark.parametrize("tier", ["memory", "disk"])
@pytest.mark.parametrize("schedule", ["semi_async", "stale"])
def test_the_versions_hold_a_schedule_to_what_it_says_of_itself(cluster: Cluster, schedule: str, tier: str) -> None:
    case = Case(schedule, tier, 0.3, steps=STEPS, micro_batches=2, check_freshness=True, delays=3)
    assert cluster.run(2, train, case)[0][2] == STEPS
    outcomes = cluster.outcomes(2, train_as_if_fresh, case)
    assert all(kind == "failed" and "rows that are not fresh" in value[1] for kind, value in outcomes), outcomes


def train_as_if_fresh(case: Case) -> tuple[str, str, int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Setting, "stale_by", 0)
        return train(case)


# -- rows one update behind --------------------------------------------------------------------------------------------


def train_one_behind_by_hand(case: Case) -> tuple[str, str, int]:
    """One thread, no schedule: batch t + 1 is looked up and its rows are sent right before update t."""
    parts = Setting(case.schedule, case.micro_batches).make().num_parts(EMB)
    trainer, features, folder = make(dataclasses.replace(case, schedule="serial"))
    ops, losses = trainer._worker.ops, []
    source = batches(features, case, trainer.rank, trainer.world)

    def open_next(number: int) -> Context | None:
        window = Window([0] * (case.micro_batches + 1), parts)
        ctx = Context(number, Batch.empty([f.name for f in features]), window, Arena(), has_data=False)
        ops.prefetch(ctx)
        ops.h2d(ctx)
        ops.route(ctx)
        if ctx.ends:
            return None
        ops.retrieve(ctx)
        ops.sync(ctx)  # with what the batch before has not changed yet
        for part in range(parts):
            ops.emb(ctx, part)
        return ctx

    try:
        ops.parts = parts
        ops.begin(lambda: next(source, None), "none")
        now = open_next(0)
        for t in itertools.count(1):
            if now is None:
                break
            for m in range(case.micro_batches):
                ops.fwd(now, m)
                ops.bwd(now, m)
            ops.agree(now)
            for part in range(parts):
                ops.grad(now, part)
            following = open_next(t)
            ops.update(now)
            ops.reduce(now)
            ops.dense(now)
            assert now.result is not None
            losses.append(np.float64(now.result.loss).tobytes())
            if following is not None:
                ops.sync(following)  # the update itself is of the row as it is
            ops.writeback(now)
            now = following
        trainer._worker.training.start_at(len(losses), len(losses))
        return trainer.digest(), hashlib.blake2b(b"".join(losses), digest_size=8).hexdigest(), len(losses)
    finally:
        close(trainer, folder)


@pytest.mark.parametrize(("world", "tier"), [(1, "disk"), (2, "disk"), (3, "memory")])
@pytest.mark.parametrize(("schedule", "micro_batches"), [("stale", 1), ("semi_async", 1), ("semi_async", 4)])
def test_rows_one_update_behind_equal_a_run_by_hand_and_not_the_serial_one(
    cluster: Cluster, schedule: str, micro_batches: int, world: int, tier: str
) -> None:
    case = Case(schedule, tier, 0.3, steps=STEPS, micro_batches=micro_batches, delays=4)
    result = cluster.run(world, train, case)[0]
    assert result == cluster.run(world, train_one_behind_by_hand, case)[0]
    assert result[0] != serial(cluster, world, case)[0]


@pytest.mark.parametrize("schedule", ["semi_async", "stale"])
def test_rows_one_update_behind_are_fresh_where_neighbours_share_none(cluster: Cluster, schedule: str) -> None:
    """The one thing that is stale is rows: with none in common nothing differs."""
    case = Case(schedule, "memory", 0.0, steps=20)
    # (Rows shared by rare keys are in common all the same, so tables without admission only.)
    assert cluster.run(1, rows_without_admission, case) == cluster.run(
        1, rows_without_admission, dataclasses.replace(case, schedule="serial")
    )


def rows_without_admission(case: Case) -> str:
    tables = [table for table in declared(case.tier)[0] if table.admit_after == 1]
    features = [feature for feature in declared(case.tier)[1] if feature.table in {table.name for table in tables}]
    trainer = Trainer(
        Model(features, tables),
        tables,
        features,
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, 1e-2),
        schedule=case.schedule,
    )
    trainer.fit(batches(features, case, 0, 1))
    return trainer.digest()
