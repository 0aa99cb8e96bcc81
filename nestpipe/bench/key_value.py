"""The disk tier beside embedded key-value stores: the same rows, batches and memory, alternating in one process.

A batch is read by its keys, changed and written back, as a training step does it. Reads and writes reach the disk: the
row file and RocksDB bypass the page cache (O_DIRECT), and LMDB, which cannot, has it emptied whenever it may have grown
to what the others have. None keeps a log (our file is working storage, gone with the run), none compresses. What a store
has left to do in the background at the end of a block of batches counts as its write-back.

The other stores are read by many threads, since both bindings give the GIL away while they wait; ours by one, which keeps
many reads under way.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import importlib.util
import json
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from nestpipe.bench.reading import _own_seconds
from nestpipe.optim import RowwiseAdagrad
from nestpipe.sizes import num_bytes
from nestpipe.store.disk import DiskStore
from nestpipe.tables import Table

DIM = 64
WORDS = DIM + 1  # values and the sum of squares
PAGE = 4096
READERS = 32  # threads that read from the others
LOAD = 1 << 16  # rows put at once in the beginning


@dataclasses.dataclass(frozen=True)
class Size:
    rows: int
    memory: str  # of each store: everything ours has in memory; cache and write buffers of RocksDB; LMDB's page cache
    keys: int  # of a batch
    rounds: int
    batches: int  # of a block


FULL = Size(rows=4_000_000, memory="192MB", keys=8192, rounds=4, batches=30)
QUICK = Size(rows=20_000, memory="8MB", keys=512, rounds=2, batches=3)


class Store(Protocol):
    """keys: ascending. load: keys of all rows, in order, in parts."""

    def load(self, keys: np.ndarray, rows: np.ndarray) -> None: ...
    def read(self, keys: np.ndarray, out: np.ndarray) -> None: ...
    def write(self, keys: np.ndarray, rows: np.ndarray) -> None: ...
    def settle(self) -> None:
        """Returns when nothing is being done in the background, and everything written but for its cache is on disk."""

    def close(self) -> None: ...


class RowFileTier:
    """DiskStore as the trainer uses it: key index, hot set, row file."""

    def __init__(self, folder: Path, size: Size) -> None:
        table = Table("item", DIM, optimizer=RowwiseAdagrad(), tier="disk", memory=size.memory)
        self._store = DiskStore(table, seed=0, folder=folder)
        self._step = 0
        self._positions = np.empty(0, np.int64)

    def load(self, keys: np.ndarray, rows: np.ndarray) -> None:
        self._store.put(keys, rows)

    def read(self, keys: np.ndarray, out: np.ndarray) -> None:
        self._step += 1
        self._positions = self._store.resolve(keys, self._step)
        self._store.fill(self._positions, out, np.arange(len(keys)))

    def write(self, keys: np.ndarray, rows: np.ndarray) -> None:
        self._store.write_back(self._positions, rows)

    def settle(self) -> None:
        self._store._hot.drain()

    def close(self) -> None:
        self._store.close()


class Lmdb:
    """One file, memory-mapped. Reads fault pages in; a commit writes changed pages to new places."""

    def __init__(self, folder: Path, size: Size) -> None:
        import lmdb

        self._path = folder / "rows.lmdb"
        room = 4 * size.rows * PAGE // 14 + (64 << 20)
        self._env = lmdb.open(
            str(self._path), subdir=False, map_size=room, sync=False, metasync=False, readahead=False, lock=False,
            max_spare_txns=READERS,
        )  # fmt: skip
        self._pool = ThreadPoolExecutor(READERS)
        self._memory, self._touched = num_bytes(size.memory), 0

    def load(self, keys: np.ndarray, rows: np.ndarray) -> None:
        with self._env.begin(write=True) as transaction:
            transaction.cursor().putmulti(list(zip(_names(keys), _values(rows), strict=True)), append=True)

    def read(self, keys: np.ndarray, out: np.ndarray) -> None:
        def part(names: list[bytes]) -> list[bytes]:
            with self._env.begin() as transaction:
                return [value for _, value in transaction.cursor().getmulti(names)]

        _by_threads(self._pool, part, keys, out)

    def write(self, keys: np.ndarray, rows: np.ndarray) -> None:
        with self._env.begin(write=True) as transaction:
            transaction.cursor().putmulti(list(zip(_names(keys), _values(rows), strict=True)))
        self._touched += 2 * len(keys) * PAGE  # each row's page, and its copy
        if self._touched > self._memory:
            self.settle()

    def settle(self) -> None:
        self._env.sync(True)
        self._drop()
        self._touched = 0

    def _drop(self) -> None:
        """The page cache gives up what is not mapped, so the mapping is emptied first."""
        for line in Path("/proc/self/maps").read_text().splitlines():
            if line.endswith(str(self._path.resolve())):
                start, end = (int(bound, 16) for bound in line.split()[0].split("-"))
                failed = ctypes.CDLL(None).madvise(
                    ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED
                )
                assert not failed
        fd = os.open(self._path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)

    def close(self) -> None:
        self._pool.shutdown()
        self._env.close()


class RocksDb:
    """Sorted files by level; writes gather in memory and are merged into them in the background."""

    def __init__(self, folder: Path, size: Size) -> None:
        import rocksdict

        memory = num_bytes(size.memory)
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_use_direct_reads(True)
        options.set_use_direct_io_for_flush_and_compaction(True)
        options.set_compression_type(rocksdict.DBCompressionType.none())
        options.set_write_buffer_size(memory // 16)
        options.set_max_write_buffer_number(4)
        options.set_max_background_jobs(4)
        options.set_optimize_filters_for_hits(True)  # every key is there
        blocks = rocksdict.BlockBasedOptions()
        blocks.set_block_size(PAGE)
        blocks.set_block_cache(rocksdict.Cache(memory - memory // 4))
        blocks.set_cache_index_and_filter_blocks(True)
        blocks.set_pin_l0_filter_and_index_blocks_in_cache(True)
        blocks.set_bloom_filter(10, False)
        options.set_block_based_table_factory(blocks)
        self._module = rocksdict
        self._db = rocksdict.Rdict(str(folder / "rocksdb"), options)
        without_log = rocksdict.WriteOptions()
        without_log.disable_wal = True
        self._db.set_write_options(without_log)
        self._write_options = without_log
        self._pool = ThreadPoolExecutor(READERS)
        self._loading = True

    def load(self, keys: np.ndarray, rows: np.ndarray) -> None:
        self.write(keys, rows)

    def read(self, keys: np.ndarray, out: np.ndarray) -> None:
        _by_threads(self._pool, self._db.get, keys, out)

    def write(self, keys: np.ndarray, rows: np.ndarray) -> None:
        batch = self._module.WriteBatch(raw_mode=True)
        for name, value in zip(_names(keys), _values(rows), strict=True):
            batch.put(name, value)
        self._db.write(batch, self._write_options)

    def settle(self) -> None:
        self._db.flush()
        if self._loading:
            self._loading = False
            self._db.compact_range(None, None)
        kinds = ("num-running-flushes", "num-running-compactions", "compaction-pending")
        while any(self._db.property_int_value(f"rocksdb.{kind}") for kind in kinds):
            time.sleep(0.002)

    def close(self) -> None:
        self._pool.shutdown()
        self._db.close()


STORES: dict[str, tuple[str | None, Callable[[Path, Size], Store]]] = {  # name: (module it needs, what makes it)
    "nestpipe disk tier": (None, RowFileTier),
    "LMDB": ("lmdb", Lmdb),
    "RocksDB": ("rocksdict", RocksDb),
}


def _names(keys: np.ndarray) -> list[bytes]:
    return keys.astype(">i8").view("V8").tolist()  # big-endian: the order of bytes is that of keys


def _values(rows: np.ndarray) -> list[bytes]:
    return np.ascontiguousarray(rows).view(f"V{WORDS * 4}")[:, 0].tolist()


def _by_threads(
    pool: ThreadPoolExecutor, get: Callable[[list[bytes]], list[bytes]], keys: np.ndarray, out: np.ndarray
) -> None:
    names, bounds = _names(keys), [len(keys) * n // READERS for n in range(READERS + 1)]

    def part(start: int, end: int) -> None:
        if end > start:
            values = b"".join(get(names[start:end]))
            out[start:end] = np.frombuffer(values, np.float32).reshape(end - start, WORDS)

    list(pool.map(part, bounds[:-1], bounds[1:]))


# -- measuring ---------------------------------------------------------------------------------------------------------


class Contestant:
    """A store full of rows, and what must be in them."""

    def __init__(self, store: Store, size: Size) -> None:
        self.store, self.size = store, size
        self._writes = np.zeros(size.rows, np.float32)  # so far, of each row: they are in its last word
        for start in range(0, size.rows, LOAD):
            keys = np.arange(start, min(start + LOAD, size.rows))
            store.load(keys, self._expected(keys))
        store.settle()

    def _expected(self, keys: np.ndarray) -> np.ndarray:
        rows = np.empty((len(keys), WORDS), np.float32)
        rows[:] = (keys % 9973).astype(np.float32)[:, None] + np.arange(WORDS, dtype=np.float32) / 128
        rows[:, -1] = self._writes[keys]
        return rows

    def block(self, rng: np.random.Generator, *, batches: int, verify: bool = True) -> dict[str, float]:
        """Rows, and seconds that reading and writing back took; CPU seconds of all threads.

        verify: compares every row that is read with what was written; not beside compute, which it would slow.
        """
        read = write = cpu = 0.0
        num_rows = 0
        for n in range(batches):
            keys = np.unique(rng.integers(0, self.size.rows, self.size.keys))
            rows = np.empty((len(keys), WORDS), np.float32)
            cpu_begin, begin = time.process_time(), time.perf_counter()
            self.store.read(keys, rows)
            read += time.perf_counter() - begin
            cpu += time.process_time() - cpu_begin
            assert not verify or np.array_equal(rows, self._expected(keys)), type(self.store).__name__
            self._writes[keys] += 1
            rows[:, -1] += 1
            cpu_begin, begin = time.process_time(), time.perf_counter()
            self.store.write(keys, rows)
            if n == batches - 1:
                self.store.settle()
            write += time.perf_counter() - begin
            cpu += time.process_time() - cpu_begin
            num_rows += len(keys)
        return {"rows": num_rows, "batches": batches, "read_s": read, "write_s": write, "cpu_s": cpu}


class Compute:
    """A thread of small torch operations, as in a training step; how many of them it gets done.

    per_second: on a clock that stands still while it waits for a core, since that depends on what else the machine does,
        but not while it waits for the GIL.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.per_second = 0.0

    def _run(self) -> None:
        a, b = torch.randn(64, 64), torch.randn(64, 64)
        done, begin = 0, _own_seconds()
        while not self._stop.is_set():
            for _ in range(16):
                torch.relu(torch.addmm(a, a, b))
            done += 16
        self.per_second = done / (_own_seconds() - begin)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()


def compare(folder: Path, size: Size) -> dict[str, Any]:
    """By store: rates over all blocks, because what a store does in the background comes in bursts."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        contestants = {}
        for name, (module, make) in STORES.items():
            if module is None or importlib.util.find_spec(module):
                store = make(folder, size)
                stack.callback(store.close)
                contestants[name] = Contestant(store, size)
        rng = np.random.default_rng(0)
        logs: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
        for contestant in contestants.values():
            # Caches filled, and everything in them written once: the rows of the beginning are neighbours, unlike later ones.
            contestant.block(rng, batches=-(-num_bytes(size.memory) // (WORDS * 4 * size.keys)))
        for turn in range(size.rounds):
            order = list(contestants)
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                figures = contestants[name].block(rng, batches=size.batches)
                alone, beside = Compute(), Compute()
                with alone.running():
                    time.sleep(1.0)
                with beside.running():
                    contestants[name].block(rng, batches=-(-size.batches // 3), verify=False)
                figures["compute"] = beside.per_second / alone.per_second
                logs[name].append(figures)
        return {"size": dataclasses.asdict(size), "stores": {name: _figures(log) for name, log in logs.items()}}


def _figures(log: list[dict[str, float]]) -> dict[str, Any]:
    """Rows per second read, written back, and both; CPU milliseconds a batch; the median share that compute keeps."""
    sums = {key: sum(block[key] for block in log) for key in log[0]}
    return {
        "read": sums["rows"] / sums["read_s"],
        "write": sums["rows"] / sums["write_s"],
        "both": sums["rows"] / (sums["read_s"] + sums["write_s"]),
        "cpu_ms": 1e3 * sums["cpu_s"] / sums["batches"],
        "compute": statistics.median(block["compute"] for block in log),
        "rounds": log,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="nestpipe-bench-", dir=".") as folder:
        arguments.json.write_text(json.dumps(compare(Path(folder), QUICK if arguments.quick else FULL)))


if __name__ == "__main__":
    main()
