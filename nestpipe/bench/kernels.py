"""`nestpipe bench kernels`: each kernel beside its torch equivalent, alternating in one process on one thread."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch

from nestpipe.bench.alternate import spread
from nestpipe.bench.progress import tell
from nestpipe.kernels import update
from nestpipe.kernels.index import HashIndex
from nestpipe.kernels.keys import Deduplicator, bucket
from nestpipe.kernels.rows import NONE, ONES, gather, pool, pool_add, rows_of, scatter_add
from nestpipe.sections import Section, Table, shown

REPEATS = 3  # timed calls in a row, of each in turn
DIM = 64


@dataclasses.dataclass(frozen=True)
class Size:
    keys: int  # to deduplicate
    indexed: int  # rows that the hash index has
    rows: int  # of the table that the others work on
    touched: int  # rows or keys that are looked up, gathered, pooled, sent or updated
    rounds: int


FULL = Size(keys=1_000_000, indexed=16_000_000, rows=2_000_000, touched=200_000, rounds=15)
QUICK = Size(keys=10_000, indexed=20_000, rows=2_000, touched=1_000, rounds=3)


@numba.njit(nogil=True, cache=True)
def plain_gather(rows: np.ndarray, positions: np.ndarray, out: np.ndarray) -> None:
    """What one would write first: no prefetch, no addresses."""
    for i in range(len(positions)):
        for d in range(rows.shape[1]):
            out[i, d] = rows[positions[i], d]


def run(*, quick: bool) -> dict[str, Any]:
    """Medians in ms and ratios; `speedup` is the other's time divided by ours."""
    size = QUICK if quick else FULL
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results = {}
        for make in (_deduplicate, _index_gather, _gather, _pool, _bucket, _scatter_add, _pool_add, _updates):
            for name, (against, ours, theirs) in make(size).items():
                tell(f"kernels: {name}")
                results[name] = {"against": against, **_alternate(ours, theirs, rounds=size.rounds)}
        return results
    finally:
        torch.set_num_threads(threads)


def _alternate(ours: Callable[[], object], theirs: Callable[[], object], *, rounds: int) -> dict[str, float]:
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for function, log in zip((ours, theirs), times, strict=True):
            function()  # untimed: fills the caches that the other has just emptied
            begin = time.perf_counter()
            for _ in range(REPEATS):
                function()
            log.append((time.perf_counter() - begin) * 1e3 / REPEATS)
    ratios = [b / a for a, b in zip(*times, strict=True)]
    return {
        "ms": statistics.median(times[0]),
        "iqr_ms": spread(times[0]),
        "against_ms": statistics.median(times[1]),
        "speedup": statistics.median(ratios),
    }


def zipf_keys(count: int, skew: float, num_keys: int = 1 << 40, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).zipf(skew, count) % num_keys).astype(np.int64)


def _deduplicate(size: Size) -> dict[str, Any]:
    results = {}
    count = size.keys
    uniform = np.random.default_rng(0).integers(0, 1 << 40, count)
    for law, keys in (
        ("Zipf(1.2)", zipf_keys(count, 1.2)),
        ("Zipf(1.05)", zipf_keys(count, 1.05)),
        ("uniform", uniform),
    ):
        unique, inverse, dedup = np.empty_like(keys), np.empty(count, np.int32), Deduplicator()
        tensor = torch.from_numpy(keys)

        def ours(dedup: Any = dedup, keys: Any = keys, unique: Any = unique, inverse: Any = inverse) -> object:
            return dedup(keys, unique, inverse)

        def theirs(tensor: Any = tensor) -> object:
            return torch.unique(tensor, return_inverse=True)

        results[f"deduplicate {count:,} keys, {law}"] = ("torch.unique(return_inverse=True)", ours, theirs)
    return results


def _index_gather(size: Size) -> dict[str, Any]:
    num_rows, count = size.indexed, size.touched
    rng = np.random.default_rng(1)
    rows = np.zeros((num_rows, DIM), np.float32)
    keys = rng.permutation(num_rows).astype(np.int64) * 2_654_435_761
    index, everything = HashIndex(num_rows), np.arange(num_rows)
    index.insert(keys, everything, everything)
    known = rng.integers(0, num_rows, count)
    wanted, at, out, view = keys[known], np.empty(count, np.int64), np.empty((count, DIM), np.float32), rows_of(rows)

    def ours() -> None:
        index.find(wanted, at)
        gather(view, at, NONE, out)

    return {
        f"index lookup + gather, {count:,} of {num_rows:,} rows x {DIM}": (
            "plain Numba gather from known positions",
            ours,
            lambda: plain_gather(rows, known, out),
        )
    }


def _rows(size: Size) -> tuple[np.ndarray, np.ndarray, np.random.Generator]:
    rng = np.random.default_rng(2)
    return rng.standard_normal((size.rows, DIM), np.float32), rng.integers(0, size.rows, size.touched), rng


def _gather(size: Size) -> dict[str, Any]:
    rows, positions, _ = _rows(size)
    out, table, index = np.empty((len(positions), DIM), np.float32), torch.from_numpy(rows), torch.from_numpy(positions)
    into, view = torch.empty(len(positions), DIM), rows_of(rows)
    return {
        f"gather {len(positions):,} rows x {DIM}": (
            "torch.index_select(out=)",
            lambda: gather(view, positions, NONE, out),
            lambda: torch.index_select(table, 0, index, out=into),
        )
    }


def _pool(size: Size) -> dict[str, Any]:
    rows, positions, _ = _rows(size)
    offsets = np.arange(0, len(positions) + 1, 10)
    out, view = np.empty((len(offsets) - 1, DIM), np.float32), rows_of(rows)
    table, index, starts = torch.from_numpy(rows), torch.from_numpy(positions), torch.from_numpy(offsets[:-1])
    return {
        f"pool bags of 10, {len(positions):,} rows x {DIM}": (
            "torch embedding_bag",
            lambda: pool(view, positions, offsets, ONES, NONE, out),
            lambda: torch.nn.functional.embedding_bag(index, table, starts, mode="sum"),
        )
    }


def _bucket(size: Size) -> dict[str, Any]:
    count, world = size.touched, 8
    keys = np.random.default_rng(3).permutation(count * 4)[:count].astype(np.int64)
    owner, place, out = np.empty(count, np.int32), np.empty(count, np.int32), np.empty(count, np.int64)
    counts, start, tensor = np.zeros(world, np.int64), np.zeros(world, np.int64), torch.from_numpy(keys)

    def theirs() -> object:
        order = torch.argsort(tensor % world, stable=True)
        return tensor[order], torch.bincount(tensor % world, minlength=world)

    return {
        f"bucket {count:,} keys by {world} owners": (
            "torch argsort + bincount",
            lambda: bucket(keys, np.arange(world), owner, counts, start, out, place),
            theirs,
        )
    }


def _scatter_add(size: Size) -> dict[str, Any]:
    _, positions, rng = _rows(size)
    places = np.unique(positions, return_inverse=True)[1]
    grads = rng.standard_normal((len(positions), DIM), np.float32)
    out = np.zeros((len(positions), DIM), np.float32)
    total, index, values = torch.zeros(len(positions), DIM), torch.from_numpy(places), torch.from_numpy(grads)
    return {
        f"scatter-add {len(positions):,} rows x {DIM}": (
            "torch index_add_",
            lambda: scatter_add(grads, NONE, places, out),
            lambda: total.index_add_(0, index, values),
        )
    }


def _pool_add(size: Size) -> dict[str, Any]:
    _, positions, rng = _rows(size)
    places = np.unique(positions, return_inverse=True)[1]
    offsets = np.arange(0, len(positions) + 1, 10)
    grads = rng.standard_normal((len(offsets) - 1, DIM), np.float32)
    out = np.zeros((len(positions), DIM), np.float32)
    total, index, values = torch.zeros(len(positions), DIM), torch.from_numpy(places), torch.from_numpy(grads)
    bag = torch.from_numpy(np.repeat(np.arange(len(grads)), 10))
    return {
        f"scatter-add of bags of 10, {len(positions):,} rows x {DIM}": (
            "torch index_add_ of expanded gradients",
            lambda: pool_add(grads, NONE, places, offsets, ONES, out),
            lambda: total.index_add_(0, index, values[bag]),
        )
    }


def _updates(size: Size) -> dict[str, Any]:
    """Against torch's own sparse optimizers where it has them, else the same rule in plain torch operations."""
    rows, positions, rng = _rows(size)
    touched = np.unique(positions)
    grads = rng.standard_normal((len(touched), DIM), np.float32) * 1e-3
    scratch, f32 = update.scratch_for(DIM), np.float32
    everything = np.arange(len(touched) + 1, dtype=np.int32)
    by_row = update.Gradients(grads, everything, everything[:-1], ONES)
    results = {}
    index, values = torch.from_numpy(touched)[None], torch.from_numpy(grads.copy())
    makers: dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, 0.01),
        "adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
        "adam": lambda p: torch.optim.SparseAdam(p, 0.01),
    }
    for name, words in (("sgd", DIM), ("adagrad", 2 * DIM), ("rowwise_adagrad", DIM + 1), ("adam", 3 * DIM)):
        records = np.zeros((len(rows), words), np.float32)
        view = rows_of(records)
        rest = {
            "sgd": (),
            "adagrad": (f32(1e-10),),
            "rowwise_adagrad": (f32(1e-10),),
            "adam": (0.9, 0.999, f32(1e-8), 3),
        }[name]
        kernel = getattr(update, name)

        def ours(kernel: Any = kernel, view: Any = view, rest: Any = rest, records: Any = records) -> object:
            return kernel(view, touched, by_row, scratch, f32(1), f32(0.01), f32(0), f32(0), *rest)

        weights = torch.nn.Parameter(torch.from_numpy(rows.copy()))
        if name in makers:
            optimizer = makers[name]([weights])

            def theirs(weights: Any = weights, optimizer: Any = optimizer) -> object:
                weights.grad = torch.sparse_coo_tensor(
                    index, values, weights.shape, is_coalesced=True, check_invariants=False
                )
                return optimizer.step()

            against = f"torch.optim.{type(optimizer).__name__} on sparse gradients"
        else:
            sums, data, flat = torch.zeros(len(rows)), weights.data, index[0]

            def theirs(sums: Any = sums, data: Any = data, flat: Any = flat) -> object:  # type: ignore[misc]
                sums.index_add_(0, flat, values.square().mean(1))
                return data.index_add_(0, flat, values * (-0.01 / (sums[flat].sqrt() + 1e-10))[:, None])

            against = "the same rule in torch operations"
        results[f"update {name}, {len(touched):,} rows x {DIM}"] = (against, ours, theirs)
    return results


def sections(results: dict[str, Any]) -> list[Section]:
    rows = [
        (
            name,
            kernel["against"],
            shown("{:.2f}", kernel["ms"]),
            shown("{:.2f}", kernel["iqr_ms"]),
            shown("{:.2f}", kernel["against_ms"]),
            shown("{:.2f}x", kernel["speedup"]),
        )
        for name, kernel in results.items()
    ]
    note = f"One thread; medians over rounds of {REPEATS} calls each in turn, the speed-up is taken within a round."
    return [
        Table(
            "Kernels beside their torch equivalents",
            ("kernel", "against", "ours ms", "IQR ms", "theirs ms", "speed-up"),
            rows,
            note,
        ),
    ]
