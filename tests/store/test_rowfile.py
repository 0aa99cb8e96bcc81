"""A row file as it was at an instant, read by a forked process while this one goes on writing to it."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nestpipe.checkpoint.forked import Child, fork
from nestpipe.errors import StorageError
from nestpipe.kernels import aio, blocks
from nestpipe.kernels.rows import NONE
from nestpipe.optim import Adagrad
from nestpipe.store import rowfile
from nestpipe.store.disk import DiskStore
from nestpipe.tables import Eviction, Table
from tests.waiting import Signpost, until

NUM_ROWS = 3_000


@pytest.fixture(autouse=True)
def small_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowfile, "EXTENT_BYTES", 1 << 14)


@pytest.fixture(params=["asynchronous", "one after the other", "page cache"])
def moving(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "one after the other":
        monkeypatch.setattr(aio, "_SETUP", 10**6)  # no such system call
    if request.param == "page cache":
        monkeypatch.delattr(os, "O_DIRECT")


def make(folder: Path, dim: int = 8, hot_rows: int = 100, name: str = "item", **settings) -> DiskStore:
    table = Table(name, dim, optimizer=Adagrad(lr=0.5), tier="disk", memory="64MB", **settings)
    return DiskStore(table, seed=7, folder=folder, hot_rows=hot_rows)


def use(store: DiskStore, keys: np.ndarray, step: int) -> None:
    """A batch that changes these rows."""
    positions = store.resolve(np.unique(keys), step)
    records = np.zeros((len(positions), store.record_words), np.float32)
    store.fill(positions, records, np.arange(len(positions)))
    store.write_back(positions, records + 1 + step)


def content(store: DiskStore) -> dict[int, bytes]:
    return {
        int(key): record.tobytes()
        for keys, records in store.blocks()
        for key, record in zip(keys, records, strict=True)
    }


def in_child(store: DiskStore, folder: Path, wait: Callable[[int], None] = lambda _: None) -> tuple[Child, Path]:
    """Freezes and forks; the child writes what it finds, block by block, to a file."""
    out = folder / "found.npy"

    def work() -> None:
        blocks = []
        store.open_frozen()
        for number, (keys, records) in enumerate(store.blocks()):
            wait(number)
            blocks.append(np.concatenate([keys[:, None].view(np.float64), records.astype(np.float64)], 1))
        store.close_frozen()
        np.save(out, np.concatenate(blocks))

    store.freeze()
    return fork(work), out


def wait_for(child: Child) -> None:
    until(lambda: not child.is_running(), "the forked process has ended")


def as_saved(path: Path) -> dict[int, bytes]:
    saved = np.load(path)
    keys, records = np.ascontiguousarray(saved[:, 0]).view(np.int64), saved[:, 1:].astype(np.float32)
    return {int(key): record.tobytes() for key, record in zip(keys, records, strict=True)}


@pytest.mark.parametrize("dim", [8, 300])  # 51 slots to a block of 4096 bytes, and 3 to one of 8192
def test_a_forked_process_reads_rows_as_they_were_while_all_of_them_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moving: None, dim: int
) -> None:
    monkeypatch.setattr(DiskStore, "_block_rows", 64)
    store = make(tmp_path, dim, eviction=Eviction(max_rows=1_500))
    rng = np.random.default_rng(1)
    for step in range(1, 11):  # rows in the file, in memory, on their way; places given up and given out again
        use(store, rng.integers(0, NUM_ROWS, 300), step)
    expected = content(store)
    assert len(expected) > 1_000 and store.stats().evicted > 0 and store.stats().hot_rows <= 100
    written = Signpost()
    child, out = in_child(store, tmp_path, wait=lambda number: written.wait_for(number // 2))
    step, grown = 0, store.file.num_bytes
    while child.is_running():
        step += 1
        use(store, rng.integers(0, 2 * NUM_ROWS, 300), 10 + step)
        written.reach(step)
    assert child.problem is None, child.problem
    assert step > 5, "next to nothing was written meanwhile: the test shows nothing"
    assert store.file._undo is not None and (store.file._undo.kept == blocks.KEPT).mean() > 0.5
    assert as_saved(out) == expected
    assert content(store) != expected
    store.thaw()
    assert [path.suffix for path in tmp_path.glob("item*")] == [".rows"] and store.file.num_bytes >= grown
    store.close()


@pytest.mark.parametrize("times", range(3))
def test_blocks_that_are_overwritten_in_the_very_moment_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """The child looks, waits, and then reads: what it looked at has changed in between, by one row or by all."""
    monkeypatch.setattr(DiskStore, "_block_rows", 256)
    move = blocks.move_rows
    parent = os.getpid()

    written = Signpost()

    def slowly(*args: object) -> None:
        if os.getpid() != parent:
            written.wait_for(written.reached + 2)  # the one under way, and one more
        move(*args)

    store = make(tmp_path)
    rng = np.random.default_rng(times)
    use(store, np.arange(NUM_ROWS), 1)
    expected = content(store)
    monkeypatch.setattr(blocks, "move_rows", slowly)
    child, out = in_child(store, tmp_path)
    step = 0
    while child.is_running():
        step += 1
        use(store, rng.integers(0, NUM_ROWS, 40), 1 + step)
        written.reach(step)
    assert child.problem is None, child.problem
    assert as_saved(out) == expected and step > 10
    store.close()


def test_a_new_instant_is_not_disturbed_by_the_one_before(tmp_path: Path) -> None:
    store, written = make(tmp_path), Signpost()
    for step in range(1, 6):
        use(store, np.arange(NUM_ROWS), step)
        expected = content(store)
        child, out = in_child(store, tmp_path, wait=lambda _, step=step: written.wait_for(step))
        use(store, np.arange(NUM_ROWS // 2), step)
        written.reach(step)
        wait_for(child)
        assert child.problem is None and as_saved(out) == expected
    store.close()


def test_nothing_is_kept_after_the_reader_has_ended(tmp_path: Path) -> None:
    store = make(tmp_path)
    use(store, np.arange(NUM_ROWS), 1)
    child, _ = in_child(store, tmp_path)
    wait_for(child)
    undo = store.file._undo
    assert undo is not None and not undo.wanted()
    kept = undo.kept.copy()
    use(store, np.arange(NUM_ROWS), 2)
    store._hot.drain()
    assert (undo.kept == kept).all() and undo.path.stat().st_size == 0
    store.close()
    assert not list(tmp_path.glob("item*"))


def test_a_file_without_a_row_and_one_that_grows_meanwhile(tmp_path: Path) -> None:
    store = make(tmp_path, hot_rows=1_000)
    use(store, np.arange(500), 1)  # none of them in the file yet
    expected = content(store)
    written = Signpost()
    child, out = in_child(store, tmp_path, wait=lambda _: written.wait_for(1))
    use(store, np.arange(5_000), 2)
    written.reach(1)
    wait_for(child)
    assert child.problem is None and as_saved(out) == expected
    store.close()


def test_descriptors_are_given_back(tmp_path: Path) -> None:
    store = make(tmp_path)
    use(store, np.arange(NUM_ROWS), 1)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        store.freeze()
    store.thaw()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    store.close()


# -- trouble -----------------------------------------------------------------------------------------------------------


def test_no_room_for_what_is_overwritten_fails_the_reader_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(tmp_path)
    use(store, np.arange(NUM_ROWS), 1)
    store.freeze()
    undo = store.file._undo
    assert undo is not None
    monkeypatch.setattr(undo, "wanted", lambda: True)
    os.dup2(os.open("/dev/full", os.O_WRONLY), undo.fd)  # every write: no space left on device
    child, overwritten, _ = fork_reader(store)
    use(store, np.arange(NUM_ROWS), 2)
    expected = content(store)
    overwritten.reach(1)
    wait_for(child)
    assert "rows of table 'item' that training changed meanwhile could not be kept" in str(child.problem)
    assert "make room on that disk" in str(child.problem)
    assert content(store) == expected and len(expected) == NUM_ROWS
    store.close()


def fork_reader(store: DiskStore) -> tuple[Child, Signpost, Signpost]:
    """Reads when all has been overwritten; that it may, and that it has opened the file."""
    overwritten, opened = Signpost(), Signpost()

    def work() -> None:
        store.open_frozen()
        opened.reach(1)
        overwritten.wait_for(1)
        for _ in store.blocks():
            pass

    return fork(work), overwritten, opened


@pytest.mark.parametrize("whose", ["its own", "another table's", "another worker's"])
def test_a_file_that_must_grow_takes_the_room_of_what_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    store, other = make(tmp_path), make(tmp_path, name="other")
    kept = store if whose == "its own" else other
    for trained in (store, other):
        use(trained, np.arange(NUM_ROWS), 1)
    kept.freeze()
    child, overwritten, opened = fork_reader(kept)
    use(kept, np.arange(NUM_ROWS), 2)
    kept._hot.drain()
    undo = kept.file._undo
    assert undo is not None and undo.path.stat().st_blocks > 0
    if whose == "another worker's":  # nothing of it is known here
        opened.wait_for(1)
        undo.path.rename(tmp_path / "other.1.undo")
        undo.path = tmp_path / "other.1.undo"
    allocate = os.posix_fallocate

    def full(fd: int, offset: int, size: int) -> None:
        if undo.path.stat().st_blocks:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    use(store, np.arange(2 * NUM_ROWS), 3)
    store._hot.drain()
    assert len(content(store)) == 2 * NUM_ROWS
    use(kept, np.arange(NUM_ROWS), 4)
    kept._hot.drain()
    assert (undo.kept == blocks.LOST).all() and undo.path.stat().st_blocks == 0, "it goes on taking room"
    overwritten.reach(1)
    wait_for(child)
    assert "could not be kept" in str(child.problem)
    store.close()
    other.close()


def test_room_that_another_has_just_freed_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that want to grow at once: the first empties all files, the second finds nothing to empty."""
    store = make(tmp_path)
    use(store, np.arange(NUM_ROWS), 1)
    (tmp_path / "foreign.undo").mkdir()  # cannot be emptied, and is nobody's
    allocate, tried = os.posix_fallocate, []

    def full_at_first(fd: int, offset: int, size: int) -> None:
        tried.append(size)
        if len(tried) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full_at_first)
    use(store, np.arange(2 * NUM_ROWS), 2)
    assert len(content(store)) == 2 * NUM_ROWS and len(tried) > 1
    store.close()


def test_room_that_is_nowhere_to_be_had_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(tmp_path)
    use(store, np.arange(NUM_ROWS), 1)
    store.freeze()

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match="No space left"):
        use(store, np.arange(2 * NUM_ROWS), 2)
    with contextlib.suppress(StorageError):
        store.close()


def test_damage_is_found_in_the_forked_process_too(tmp_path: Path) -> None:
    store = make(tmp_path)
    use(store, np.arange(NUM_ROWS), 1)
    store._hot.drain()
    with store.file.path.open("r+b") as file:
        file.seek(100)
        file.write(b"\xff\xff")
    child, _ = in_child(store, tmp_path)
    wait_for(child)
    assert "is damaged: a checksum does not fit" in str(child.problem)
    store.close()


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    store = make(tmp_path)
    store.file.path.with_suffix(".undo").mkdir()
    with pytest.raises(StorageError, match="cannot be kept as it is"):
        store.freeze()
    store.file.path.with_suffix(".undo").rmdir()
    store.close()


def test_a_file_without_a_block_has_nothing_to_read_and_nothing_to_keep(tmp_path: Path) -> None:
    store = make(tmp_path)
    store.freeze()
    store.file.frozen().read(NONE, NONE, NONE, np.empty((0, store.record_words), np.float32))
    assert store.file._undo is not None and len(store.file._undo.kept) == 0
    store.close()
