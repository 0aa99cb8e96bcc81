from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nestpipe.errors import StorageError
from nestpipe.kernels import aio
from nestpipe.kernels.rows import NONE, gather, rows_of
from nestpipe.optim import SGD, Adagrad, Adam, RowwiseAdagrad, ScaledRowwiseAdagrad
from nestpipe.store import chunks, disk, rowfile
from nestpipe.store.disk import DiskStore
from nestpipe.store.memory import MemoryStore
from nestpipe.store.rowfile import RowFile, block_shape
from nestpipe.tables import Eviction, Table, Uniform
from tests.kernels.cases import int64, one_each, same_bits
from tests.store.model import ModelStore, OverBudget, first_values, restore
from tests.store.test_memory import POOL, evictions, programs
from tests.waiting import PATIENCE

ADAGRAD = Adagrad(lr=0.5, initial=0.125)
Make = Callable[..., DiskStore]


@pytest.fixture(autouse=True, scope="module")
def small_pieces():
    """Several chunks, and a file that grows often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", 128)
        patch.setattr(rowfile, "EXTENT_BYTES", 1 << 14)
        yield


@pytest.fixture(params=["asynchronous", "threads"])
def moving(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How blocks are moved: with asynchronous I/O, or as where the system does not have it."""
    if request.param == "threads":
        monkeypatch.setattr(aio, "_SETUP", 10**6)  # no such system call
    return request.param


def make_table(**settings) -> Table:
    return Table(**{"name": "item", "dim": 3, "optimizer": ADAGRAD, "tier": "disk", "memory": "64MB"} | settings)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes stores with hardly any rows in memory, and closes them."""
    with contextlib.ExitStack() as stack:

        def make_one(table: Table | None = None, *, hot_rows: int = 4, folder: Path = tmp_path, **rest) -> DiskStore:
            store = DiskStore(table or make_table(), seed=7, folder=folder, hot_rows=hot_rows, **rest)
            stack.callback(close, store)
            return store

        yield make_one


def close(store: DiskStore) -> None:
    with contextlib.suppress(StorageError):  # of a test about them
        store.close()


class Pipeline:
    """Runs a store as dual-buffer pipelining does: batch t + 1 is looked up while batch t still has to be updated."""

    def __init__(self, store: DiskStore) -> None:
        self.store = store
        self.last: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None  # positions, records, gradients

    def train(self, keys: list[int], step: int, grads: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """grads: of the distinct positions, given those of all keys. Returns the latter."""
        store = self.store
        everyone = store.resolve(int64(keys), step)
        positions = np.unique(everyone)[::-1].copy()
        records = np.full((len(positions), store.record_words), np.nan, np.float32)
        before = self.last[0].tolist() if self.last else []
        wanted = np.array([i for i, p in enumerate(positions.tolist()) if p not in before], np.int64)
        store.fill(positions, records, wanted)
        others = np.setdiff1d(np.arange(len(positions)), wanted)
        assert np.isnan(records[others]).all(), "rows of the batch before were read from the tier"
        self.finish()
        if len(others):
            assert self.written is not None
            records[others] = self.written[[before.index(p) for p in positions[others].tolist()]]
        self.last = positions, records, grads(everyone)
        return everyone

    def finish(self) -> None:
        """Updates and writes back the batch that is under way."""
        self.written = None
        if self.last is not None:
            positions, records, grads = self.last
            self.store.update(np.arange(len(positions)), one_each(grads), 1.0, self.store.rows_in(records))
            self.store.write_back(positions, records)
            self.written, self.last = records, None


def train(store: DiskStore | MemoryStore, keys: list[int], step: int, grad: float = 1.0) -> None:
    """One step, nothing overlapped; every row used gets the same gradient."""
    positions = np.unique(store.resolve(int64(keys), step))
    grads = one_each(np.full((len(positions), store.table.dim), grad, np.float32))
    if isinstance(store, MemoryStore):
        store.update(positions, grads, 1.0)
    else:
        records = np.full((len(positions), store.record_words), np.nan, np.float32)
        store.fill(positions, records, np.arange(len(positions)))
        store.update(np.arange(len(positions)), grads, 1.0, store.rows_in(records))
        store.write_back(positions, records)


def values_of(store: DiskStore | MemoryStore, keys: list[int]) -> torch.Tensor:
    out = np.full((len(keys), store.table.dim), np.nan, np.float32)
    store.read(int64(keys), store.find(int64(keys)), out)
    return torch.from_numpy(out)


def in_file(store: DiskStore) -> np.ndarray:
    """Keys whose row is in the file and nowhere else, and their positions."""
    store._hot.drain()
    keys, positions = store.items()
    cold = store._hot.find(positions) < 0
    return np.stack([keys[cold], positions[cold]], 1)


# -- against the model -----------------------------------------------------------------------------------------------


tables = st.builds(
    make_table,
    eviction=evictions,
    admit_after=st.sampled_from([1, 1, 2, 3]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    init=st.just(Uniform(-1.0, 1.0)),  # exact in the reference
)


@given(tables, programs, st.sampled_from([1, 2, 3, 6, 20]), st.booleans())
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_program_leaves_what_the_model_holds(
    tmp_path: Path, table: Table, program, hot_rows: int, overlaps: bool
) -> None:
    store, model, step = DiskStore(table, seed=7, folder=tmp_path, hot_rows=hot_rows), ModelStore(table, seed=7), 0
    pipeline = Pipeline(store)
    try:
        for gap, keys in program:
            step += gap
            try:
                rows = model.resolve(keys, step)
            except OverBudget:
                with pytest.raises(ValueError, match="raise max_rows or use smaller batches"):
                    store.resolve(int64(keys), step)
                return
            parts = {id(row): torch.zeros(3) for row in rows}
            for i, row in enumerate(rows):
                parts[id(row)] = parts[id(row)] + (i + 1) * torch.tensor([1.0, -2.0, 0.5])

            def grads(everyone: np.ndarray, rows=rows, parts=parts) -> np.ndarray:
                row_at = dict(zip(everyone.tolist(), rows, strict=True))
                assert len(row_at) == len(parts)
                order = np.unique(everyone)[::-1].tolist()
                return np.array([parts[id(row_at[p])].tolist() for p in order], np.float32).reshape(-1, 3)

            pipeline.train(keys, step, grads)
            for row in {id(row): row for row in rows}.values():
                model.update(row, parts[id(row)])
            if not overlaps:
                pipeline.finish()
                assert same_bits(values_of(store, POOL), torch.stack([model.read(key) for key in POOL]))
        pipeline.finish()
        check_everything(store, model)
    finally:
        store.close()


def check_everything(store: DiskStore, model: ModelStore) -> None:
    assert same_bits(values_of(store, POOL), torch.stack([model.read(key) for key in POOL]))
    stats = store.stats()
    assert (stats.rows, stats.shared_rows) == (len(model.rows), len(model.shared))
    assert (stats.born, stats.evicted) == (model.born, model.evicted)
    for (keys, positions), rows in ((store.items(), model.rows), (store.shared_items(), model.shared)):
        assert sorted(keys.tolist()) == sorted(rows)
        records = store.records(positions)
        for key, record in zip(keys.tolist(), records, strict=True):
            assert same_bits(record[store.record_words - 3 : store.record_words], rows[key].state)
            if store.table.eviction and rows is model.rows:
                assert record[store.record_words :].view(np.int32).tolist() == [rows[key].last_used, rows[key].uses]
    seen, counts = store.sightings()
    assert dict(zip(seen.tolist(), counts.tolist(), strict=True)) == model.sightings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 6, 64, 513, 1500])
@pytest.mark.parametrize(
    "optimizer",
    [SGD(), ADAGRAD, RowwiseAdagrad(), ScaledRowwiseAdagrad(scale="row"), Adam()],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_rows_of_every_width_end_as_they_do_in_memory(make: Make, optimizer, dim: int, dtype: torch.dtype) -> None:
    store = make(make_table(dim=dim, optimizer=optimizer, dtype=dtype), hot_rows=7)
    memory = MemoryStore(Table("item", dim, optimizer=optimizer, dtype=dtype), seed=7)
    pipeline, rng = Pipeline(store), np.random.default_rng(0)
    for step in range(12):
        keys = rng.permutation(40)[:20].tolist()
        grads = rng.standard_normal((20, dim)).astype(np.float32)
        order = np.argsort(pipeline.train(keys, step, lambda p, g=grads: g[np.argsort(p)[::-1]].copy()))
        assert len(order) == 20
        memory.update(memory.resolve(int64(keys), step), one_each(grads), 1.0)
    pipeline.finish()
    assert store.digest() == memory.digest()
    assert same_bits(values_of(store, list(range(50))), values_of(memory, list(range(50))))
    assert store.stats().reads > 50 and store.stats().writes > 50


@pytest.mark.parametrize("eviction", [None, Eviction(max_rows=64)])
def test_a_restored_store_has_every_record_and_goes_on_the_same(make: Make, tmp_path: Path, eviction) -> None:
    store = make(make_table(eviction=eviction, admit_after=2))
    for step in range(4):
        train(store, list(range(step, 40)), step)
    assert len(store.directory.shared)
    other = make(store.table, folder=tmp_path / "other")
    restore(store, into=other)
    assert other.digest() == store.digest()
    train(store, list(range(20, 60)), 4)
    train(other, list(range(20, 60)), 4)
    assert other.digest() == store.digest()
    assert [a.tolist() for a in other.sightings()] == [a.tolist() for a in store.sightings()]


def test_a_batch_that_was_never_written_back_leaves_first_values(make: Make) -> None:
    store = make()
    store.resolve(int64([1, 2, 3]), 0)  # and its update was skipped
    train(store, list(range(10, 30)), 1)
    expected = first_values(store.table, 7, [2, 1])
    torch.testing.assert_close(values_of(store, [2, 1]), expected, rtol=3e-7, atol=1e-7)
    train(store, [2], 2)
    assert not torch.allclose(values_of(store, [2]), expected[:1])


def test_an_empty_batch_changes_nothing(make: Make) -> None:
    store = make()
    train(store, [1, 2], 0)
    before = store.digest()
    train(store, [], 1)
    assert values_of(store, []).shape == (0, 3)
    assert store.digest() == before


# -- the background --------------------------------------------------------------------------------------------------


class Gate:
    """Holds back what is written to the file."""

    def __init__(self, store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        write = store.file.write

        def wait(positions, keys, slots, rows) -> None:
            def records() -> np.ndarray:
                out = np.empty((len(slots), store.record_words), np.float32)
                gather(rows, slots, NONE, out)
                return out

            before = records()
            self.reached.set()
            assert self.open.wait(PATIENCE)
            assert same_bits(records(), before), "a row was changed while it was being written"
            write(positions, keys, slots, rows)

        monkeypatch.setattr(store.file, "write", wait)


@pytest.mark.usefixtures("moving")
def test_rows_being_written_are_read_and_changed_meanwhile(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    store, memory = make(hot_rows=32), MemoryStore(Table("item", 3, optimizer=ADAGRAD), seed=7)
    gate = Gate(store, monkeypatch)
    for step, keys in enumerate([range(10), range(10, 20), range(20, 29)]):
        for trained in (store, memory):
            train(trained, list(keys), step)
    assert gate.reached.wait(PATIENCE)
    (slots,) = {tuple(store._hot._job.slots)} if store._hot._job else ((),)
    assert len(slots), "an eighth is left, and nothing is being written"
    writing = store.directory.key_at(store._hot._positions[list(slots)]).tolist()
    for trained in (store, memory):
        assert same_bits(values_of(trained, writing), values_of(memory, writing))
        train(trained, writing, 3, grad=-0.5)
    assert same_bits(values_of(store, writing), values_of(memory, writing))
    gate.open.set()
    store._hot.drain()
    assert same_bits(values_of(store, writing), values_of(memory, writing))  # not what is in the file now
    for trained in (store, memory):
        for step in range(4, 12):
            train(trained, list(range(step * 10, step * 10 + 10)), step)
    assert store.digest() == memory.digest()


def test_a_store_waits_when_rows_come_faster_than_they_are_written(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(hot_rows=16)
    gate = Gate(store, monkeypatch)
    trainer = threading.Thread(target=lambda: [train(store, list(range(s * 8, s * 8 + 8)), s) for s in range(6)])
    trainer.start()
    assert gate.reached.wait(PATIENCE)
    trainer.join(0.3)
    assert trainer.is_alive() and len(store._hot) <= 16
    gate.open.set()
    trainer.join(PATIENCE)
    assert not trainer.is_alive() and len(store) == 48


def test_a_row_that_is_put_again_does_not_make_room_for_its_neighbour(make: Make) -> None:
    store, memory = make(hot_rows=8), MemoryStore(Table("item", 3, optimizer=ADAGRAD), seed=7)
    for step, keys in enumerate([*([key] for key in range(8)), [0, 100]]):  # full; then its coldest row, and a new one
        for trained in (store, memory):
            train(trained, keys, step)
    assert store.digest() == memory.digest()


# -- trouble with the file -------------------------------------------------------------------------------------------


def cold_store(make: Make, **settings) -> tuple[DiskStore, np.ndarray]:
    """A store with trained rows in its file, and (key, position) of these."""
    store = make(make_table(dim=40, optimizer=SGD(lr=0.1), **settings))
    for step in range(3):
        train(store, list(range(100, 200)), step)
    cold = in_file(store)
    assert len(cold) > 60
    return store, cold


def slot_of(store: DiskStore, position: int) -> tuple[int, int]:
    """First byte and number of bytes."""
    num_bytes = store.record_words * 4 + 16
    block, slot = divmod(position, store.file.layout.per_block)
    return block * store.file.layout.block_bytes + slot * num_bytes, num_bytes


def patch_file(store: DiskStore, offset: int, data: bytes) -> None:
    with store.file.path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.usefixtures("moving")
@pytest.mark.parametrize("byte", [0, 77, 159, 160, 167, 168, 175])
def test_one_wrong_byte_is_an_error_with_file_place_table_and_key(make: Make, byte: int) -> None:
    store, cold = cold_store(make)
    key, position = cold[30].tolist()
    start, _ = slot_of(store, position)
    with store.file.path.open("rb") as file:
        file.seek(start + byte)
        old = file.read(1)[0]
    patch_file(store, start + byte, bytes([old ^ 4]))
    others = [k for k in range(100, 200) if k != key]
    assert values_of(store, others).isfinite().all()
    with pytest.raises(StorageError, match=rf"item\.0\.rows: .*table 'item', key {key}, byte {start}.*checkpoint"):
        values_of(store, [key])
    records = np.empty((1, store.record_words), np.float32)
    with pytest.raises(StorageError, match="damaged"):
        store.fill(int64([position]), records, np.arange(1))
    patch_file(store, start + byte, bytes([old]))
    assert values_of(store, [key]).isfinite().all()


@pytest.mark.parametrize("ours", [True, False])
def test_a_whole_row_of_another_place_is_not_taken_for_ours(make: Make, tmp_path: Path, ours: bool) -> None:
    """Copied within the file, or from the same place in the file of another table."""
    store, cold = cold_store(make)
    (key, position), (_, source) = cold[10].tolist(), cold[50].tolist()
    path = store.file.path
    if not ours:
        other, _ = cold_store(make, name="other")
        path, source = other.file.path, position
    with path.open("rb") as file:
        start, num_bytes = slot_of(store, source)
        file.seek(start)
        row = file.read(num_bytes)
    patch_file(store, slot_of(store, position)[0], row)
    with pytest.raises(StorageError, match=f"key {key}"):
        values_of(store, [key])


@pytest.mark.usefixtures("moving")
def test_the_row_of_another_key_at_its_own_place_is_not_taken(make: Make) -> None:
    store, cold = cold_store(make)
    key, position = cold[10].tolist()
    store.directory.index.note(int64([position]), int64([4321]))  # as if the index had given it to another key
    with pytest.raises(StorageError, match=rf"holds the row of key {key} \(table 'item', key 4321"):
        store.words(int64([position]))


@pytest.mark.usefixtures("moving")
def test_a_file_cut_short_is_an_error(make: Make) -> None:
    store, cold = cold_store(make)
    key, position = cold[-1].tolist()
    block = position // store.file.layout.per_block * store.file.layout.block_bytes
    os.truncate(store.file.path, block)
    with pytest.raises(StorageError, match=rf"rows: reading ended at byte {block} \(table 'item', key {key}"):
        values_of(store, [key])


@pytest.mark.usefixtures("moving")
def test_a_row_that_is_nowhere_is_an_error_and_not_zeros(make: Make) -> None:
    store, cold = cold_store(make)
    start, num_bytes = slot_of(store, int(cold[5][1]))
    patch_file(store, start, bytes(num_bytes))
    with pytest.raises(StorageError, match="damaged"):
        values_of(store, [int(cold[5][0])])


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond it, nor be written beyond it: the system's own refusal. (Python ignores the signal.)"""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("moving")
@pytest.mark.parametrize("how", ["growing", "writing"])
def test_a_full_disk_is_an_error_that_says_what_to_do_and_loses_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "writing":
        monkeypatch.setattr(rowfile, "EXTENT_BYTES", 1 << 20)  # there from the first row on
    table = make_table(dim=40, optimizer=SGD(lr=0.1))
    store, memory = make(table, hot_rows=16), MemoryStore(Table("item", 40, optimizer=SGD(lr=0.1)), seed=7)
    for trained in (store, memory):
        train(trained, list(range(40)), 0)
    store._hot.drain()

    batches, done = [list(range(s, s + 20)) for s in range(0, 400, 20)], 0
    problem: StorageError | None = None
    with largest_file(1 << 14):
        for batch in batches:
            positions = store.resolve(int64(batch), 1)
            records = np.empty((20, store.record_words), np.float32)
            try:
                store.fill(positions, records, np.arange(20))
                store.update(np.arange(20), one_each(np.ones((20, 40), np.float32)), 1.0, store.rows_in(records))
                store.write_back(positions, records)
            except StorageError as error:
                problem = error
                break
            done += 1
    assert problem is not None and problem.errno == errno.EFBIG
    assert re.search(rf"item\.0\.rows: {how} .* failed: File too large \(table 'item'\); free space", str(problem))
    assert 0 < done < len(batches)
    # Room again: all that was written back is there, and the store goes on with the rest.
    with contextlib.suppress(StorageError):
        store._hot.drain()
    for batch in batches[:done]:
        train(memory, batch, 1)
    keys = list(range(20 * done))
    assert same_bits(values_of(store, keys), values_of(memory, keys))
    for step, batch in enumerate(batches[done + 1 :], start=2):
        for trained in (store, memory):
            train(trained, batch, step)
    keys = [key for batch in batches[:done] + batches[done + 1 :] for key in batch]
    assert same_bits(values_of(store, keys), values_of(memory, keys))


@pytest.mark.usefixtures("moving")
def test_an_error_of_the_background_is_raised_by_close_and_the_file_is_gone(make: Make) -> None:
    store = make(hot_rows=64)
    train(store, list(range(40)), 0)
    with largest_file(1 << 10):
        store._hot._clock += 1
        store._hot._start(8)
        with pytest.raises(StorageError, match="free space"):
            store.close()
    assert not store.file.path.exists()


def test_two_runs_in_one_folder_are_refused_and_one_after_the_other_is_fine(make: Make, tmp_path: Path) -> None:
    store = make()
    train(store, list(range(50)), 0)
    before = store.digest()
    make(rank=1)  # another worker has a file of its own
    beside = make()  # so has another trainer of the same process
    train(beside, list(range(20)), 0)
    assert store.digest() == before
    beside.close()
    store.close()
    store.close()
    assert not store.file.path.exists() and not beside.file.path.exists()
    with (tmp_path / "item.0.rows").open("wb") as other:  # as another process has it
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match=r"item\.0\.rows is in use by another run; give each run a folder"):
            make()
    (tmp_path / "item.0.rows").write_bytes(b"left by a run that was killed" * 1000)
    again = make()
    assert (tmp_path / "item.0.rows").stat().st_size == 0
    train(again, list(range(50)), 0)
    assert again.digest() == before


def test_a_folder_that_cannot_be_made_is_named(make: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file/rows/item\.0\.rows: cannot be opened"):
        make(folder=tmp_path / "file" / "rows")


def test_a_file_system_without_o_direct_is_used_and_told(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path, flags, *rest) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    store, memory = make(), MemoryStore(Table("item", 3, optimizer=ADAGRAD), seed=7)
    assert not store.file.direct and "refuses O_DIRECT" in store.file.describe()
    for step in range(4):
        for trained in (store, memory):
            train(trained, list(range(step * 5, 40)), step)
    assert store.digest() == memory.digest()


# -- blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slot", "shape"),
    [(20, (204, 4096)), (276, (14, 4096)), (2048, (2, 4096)), (2064, (3, 8192)), (2730, (3, 8192)), (2732, (1, 4096)),
     (4096, (1, 4096)), (4100, (1, 8192)), (12_304, (1, 16_384))],
)  # fmt: skip
def test_blocks_are_as_small_as_a_disk_reads_and_hold_whole_slots(slot: int, shape: tuple[int, int]) -> None:
    assert block_shape(slot) == shape


@contextlib.contextmanager
def row_file(folder: Path, words: int) -> Iterator[RowFile]:
    file = RowFile(folder / "rows", "item", words=words, tag=np.uint64(9))
    try:
        yield file
    finally:
        file.close()


def check_rows(file: RowFile, num_rows: int) -> np.ndarray:
    """Rows written in any order and grouping keep their neighbours. Returns those of positions 0 to num_rows."""
    words = file.layout.words
    rng = np.random.default_rng(words)
    current = np.zeros((num_rows, words), np.float32)
    for n in (num_rows, 1, 2, num_rows // 2, num_rows // 9, num_rows - 1, 0):
        positions = np.sort(rng.permutation(num_rows)[:n])
        new = rng.standard_normal((n, words)).astype(np.float32)
        current[positions] = new
        shuffled = rng.permutation(n)
        mixed = np.empty_like(new)
        mixed[shuffled] = new
        file.write(positions, positions * 7, shuffled, rows_of(mixed))
        where = np.sort(rng.permutation(num_rows)[: n // 2])
        out = np.full((num_rows, words), np.nan, np.float32)
        file.read(where, where * 7, where, out)
        assert same_bits(out[where], current[where])
        assert np.isnan(np.delete(out, where, 0)).all()
    return current


@pytest.mark.parametrize("words", [2, 60, 514, 700, 1100])
@pytest.mark.parametrize("many", [True, False])
def test_a_batch_reads_and_writes_each_block_once_whoever_does_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moving: str, words: int, many: bool
) -> None:
    """More blocks than threads or than may be under way, and fewer."""
    monkeypatch.setattr(rowfile, "DEPTH", 128 if many else 3)
    monkeypatch.setattr(rowfile, "THREADS", 16 if many else 3)
    with row_file(tmp_path, words) as file:
        check_rows(file, 300)
        assert ("by 3 threads" in file.describe()) == (not many and not is_asynchronous(file))
        assert is_asynchronous(file) == (moving == "asynchronous" and file.direct)


def is_asynchronous(file: RowFile) -> bool:
    return all(len(rings) == 1 and rings[0].context for rings in file._rings)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[RowFile]:
    """With a row to a block."""
    with row_file(tmp_path, 1000) as file:
        if not is_asynchronous(file):
            pytest.skip("the file system or the system cannot")
        yield file


@pytest.mark.parametrize("taken", ["some", "none"])
def test_requests_that_the_system_does_not_take_at_once_are_made_later(file: RowFile, taken: str) -> None:
    """A context for few requests, used for many; and one that is no context."""
    unit, depth = file.layout.block_bytes, 1000
    contexts = [1 if taken == "none" else aio.make_ring(1, unit, file._fd).context for _ in range(2)]
    before = file._rings
    rings = [aio.make_ring(depth, unit)._replace(context=context) for context in contexts]
    file._rings = ([rings[0]], [rings[1]])
    for n in range(depth):
        aio.ask(rings[0], n, file._fd, aio.READ, unit, 0)
        rings[0].queue[n] = rings[0].requests[n].ctypes.data
    accepted = aio.submit(rings[0], depth)
    assert 0 < accepted < depth if taken == "some" else accepted == -1
    while taken == "some" and accepted > 0:
        accepted -= aio.wait(rings[0], 1)
    check_rows(file, 2000)
    if taken == "some":
        for ring in rings:
            ring.close()
    file._rings = before


def test_nothing_is_under_way_after_an_error_and_reading_goes_on(file: RowFile) -> None:
    rows = check_rows(file, 1000)
    out, everyone = np.empty_like(rows), np.arange(1000)
    for bad in (0, 500, 999):
        with file.path.open("r+b") as raw:
            raw.seek(bad * file.layout.block_bytes)
            raw.write(b"12345678")
        with pytest.raises(StorageError, match=f"damaged.*key {bad * 7}, byte {bad * file.layout.block_bytes}\\)"):
            file.read(everyone, everyone * 7, everyone, out)
        assert aio.wait(file._rings[0][0], 0) == 0
        file.write(everyone[bad : bad + 1], everyone[bad : bad + 1] * 7, everyone[bad : bad + 1], rows_of(rows))
        file.read(everyone, everyone * 7, everyone, out)
        assert same_bits(out, rows)
    os.truncate(file.path, 999 * file.layout.block_bytes)
    with pytest.raises(StorageError, match=f"reading ended at byte {999 * file.layout.block_bytes} "):
        file.read(everyone, everyone * 7, everyone, out)
    assert aio.wait(file._rings[0][0], 0) == 0


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.usefixtures("moving")
def test_what_the_system_says_about_a_block_is_told(tmp_path: Path, writes: bool) -> None:
    with row_file(tmp_path, 1000) as file:
        rows, everyone = check_rows(file, 300), np.arange(300)
        what, other, move = (
            ("writing", os.O_RDONLY, lambda: file.write(everyone, everyone * 7, everyone, rows_of(rows)))
            if writes
            else ("reading", os.O_WRONLY, lambda: file.read(everyone, everyone * 7, everyone, rows))
        )
        right, file._fd = file._fd, os.open(file.path, other | os.O_DIRECT * file.direct)
        try:
            with pytest.raises(StorageError, match=rf"rows: {what} failed: Bad file descriptor \(table 'item'") as told:
                move()
            assert told.value.errno == errno.EBADF
        finally:
            os.close(file._fd)
            file._fd = right


def test_a_file_that_cannot_be_read_asynchronously_is_noticed(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    try:
        assert aio.make_ring(4, 4096, fd).context == 0
    finally:
        os.close(fd)


# -- the budget ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("admit_after", "eviction"), [(1, None), (2, Eviction(max_rows=200_000))])
def test_the_hot_set_gives_way_as_the_index_grows_and_the_budget_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, admit_after: int, eviction
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1 << 20)
    budget = 24_000_000
    table = make_table(dim=32, optimizer=SGD(), memory=2 * budget, admit_after=admit_after, eviction=eviction)
    store = DiskStore(table, seed=7, folder=tmp_path, owners=np.arange(2))
    rows_at_start, capacities = store._hot.capacity, []
    try:
        for step in range(40):
            keys = np.arange(step * 3000, step * 3000 + 6000)  # each key twice
            positions = np.unique(store.resolve(keys, step))
            records = np.empty((len(positions), store.record_words), np.float32)
            store.fill(positions, records, np.arange(len(positions)))
            store.write_back(positions, records)
            assert store.nbytes + (store._hot.capacity - len(store._hot)) * (32 * 4 + 12) <= budget
            capacities.append(store._hot.capacity)
        assert capacities[-1] < rows_at_start * 0.9
        assert (np.diff(capacities) != 0).sum() < 20, "the hot set is moved at every step"
        assert len(store) > 100_000 or admit_after > 1
        assert same_bits(values_of(store, [60_001, 119_000]), first_values_of(store, [60_001, 119_000]))
    finally:
        store.close()


def first_values_of(store: DiskStore, keys: list[int]) -> torch.Tensor:
    fresh = MemoryStore(Table("item", store.table.dim, optimizer=SGD(), admit_after=store.table.admit_after), seed=7)
    for step in range(2):
        fresh.resolve(int64(keys), step)
    return values_of(fresh, keys)


def test_a_budget_that_the_index_eats_up_is_refused_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1 << 20)
    store = DiskStore(make_table(memory="9MB"), seed=7, folder=tmp_path)
    try:
        for step in range(2):
            store.resolve(np.arange(step * 10_000, step * 10_000 + 10_000), step)
        message = (
            r"'item': memory='9MB' is too little: .* the index of 120,000 keys takes .*give it memory='\d+MB' or more"
        )
        with pytest.raises(ValueError, match=message):
            store.resolve(np.arange(20_000, 120_000), 2)
    finally:
        store.close()
    with pytest.raises(ValueError, match="give it memory='5MB' or more"):
        DiskStore(make_table(memory=100_000), seed=7, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("moving")
def test_memory_beyond_the_capacity_goes_back_to_the_system(make: Make) -> None:
    store = make(make_table(dim=1024, optimizer=SGD()), hot_rows=8000)
    keys = list(range(6000))
    for part in np.array_split(keys, 6):
        train(store, part.tolist(), 0)
    before = values_of(store, keys)
    full = resident()
    store._hot.resize(500)
    assert len(store._hot) <= 500 == store._hot.capacity
    assert full - resident() > 15_000_000
    assert same_bits(values_of(store, keys), before)
    store._hot.resize(8000)
    train(store, keys[:3000], 1)
    assert same_bits(values_of(store, keys[3000:]), before[3000:])


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_the_default_budget_is_a_gigabyte_over_all_workers() -> None:
    assert Table("item", 3, tier="disk").memory_bytes == 10**9
    assert disk.MIN_ROWS > 0


@pytest.mark.usefixtures("moving")
def test_stats_tell_where_rows_are(make: Make) -> None:
    store = make(hot_rows=16)
    for step in range(3):
        train(store, list(range(50)), step)
    store._hot.drain()
    stats = store.stats()
    assert stats.rows == 50 and 0 < stats.hot_rows <= 16
    assert stats.hits + stats.reads == 100  # of the second and third step
    assert stats.reads >= 2 * (50 - 16) and stats.writes >= 50 - 16
    assert stats.file_bytes == store.file.path.stat().st_size > 0
    assert stats.bytes == store.nbytes
