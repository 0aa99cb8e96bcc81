"""What each kernel computes, in plain torch: slow, without scratch, and the definition that the tests compare with.

Arguments that a kernel takes as an empty array are None here; results are returned instead of written into buffers.
Where the order of a sum is part of a kernel's contract, the sum is a loop. `gather` and `pool` are differentiable, and
`scatter_add` and `pool_add` are their gradients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

SHARD_BITS = 16


def _f32(value: float) -> Tensor:
    """A setting as the kernels see it: rounded to float32 before anything is computed with it."""
    return torch.tensor(value, dtype=torch.float32)


# -- keys ------------------------------------------------------------------------------------------------------------


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Logical shift to the right: torch's int64 would drag the sign along."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def mix(keys: Tensor) -> Tensor:
    """The finalizer of MurmurHash3; products of int64 wrap around, as those of uint64 do."""
    h = keys ^ _shifted(keys, 33)
    h = h * (0xFF51AFD7ED558CCD - 2**64)
    h = h ^ _shifted(h, 33)
    h = h * (0xC4CEB9FE1A85EC53 - 2**64)
    return h ^ _shifted(h, 33)


def shards(keys: Tensor) -> Tensor:
    return _shifted(mix(keys), 64 - SHARD_BITS)


def owner(keys: Tensor, owners: Tensor) -> Tensor:
    return owners[(shards(keys) * len(owners)) >> SHARD_BITS]


def deduplicate(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct keys in order of first appearance, and where each key is among them."""
    ordered, inverse = torch.unique(keys, return_inverse=True)
    first = torch.full_like(ordered, len(keys)).scatter_reduce(0, inverse, torch.arange(len(keys)), "amin")
    order = torch.argsort(first)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    return ordered[order], place[inverse]


def bucket(unique: Tensor, owners: Tensor, world: int) -> tuple[Tensor, Tensor, Tensor]:
    """The keys sorted by owner, where each went, and how many each owner has; equals stay in order."""
    of_key = owner(unique, owners)
    order = torch.argsort(of_key, stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    return unique[order], place, torch.bincount(of_key, minlength=world)


class Index:
    """HashIndex as a dict."""

    def __init__(self) -> None:
        self.positions: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.positions)

    def find(self, keys: Tensor) -> Tensor:
        return torch.tensor([self.positions.get(key, -1) for key in keys.tolist()], dtype=torch.int64)

    def insert(self, keys: Tensor, positions: Tensor) -> None:
        assert not set(keys.tolist()) & self.positions.keys()
        self.positions.update(zip(keys.tolist(), positions.tolist(), strict=True))

    def assign(self, keys: Tensor, positions: Tensor) -> None:
        assert set(keys.tolist()) <= self.positions.keys()
        self.positions.update(zip(keys.tolist(), positions.tolist(), strict=True))

    def delete(self, keys: Tensor) -> Tensor:
        return torch.tensor([self.positions.pop(key, -1) for key in keys.tolist()], dtype=torch.int64)


# -- rows ------------------------------------------------------------------------------------------------------------


def gather(rows: Tensor, positions: Tensor, targets: Tensor | None, out: Tensor) -> Tensor:
    """out, with out[targets[i]] = rows[positions[i]] wherever positions[i] >= 0."""
    targets = torch.arange(len(positions)) if targets is None else targets
    kept = positions >= 0
    return out.index_copy(0, targets[kept], rows[positions[kept]].to(out.dtype))


def scatter_add(grads: Tensor, origins: Tensor | None, positions: Tensor, out: Tensor) -> Tensor:
    """out, with grads[origins[i]] added to out[positions[i]], one i after the other."""
    origins = torch.arange(len(positions)) if origins is None else origins
    out = out.clone()
    for origin, position in zip(origins.tolist(), positions.tolist(), strict=True):
        out[position] += grads[origin]
    return out


def pool(
    rows: Tensor, positions: Tensor, offsets: Tensor, weights: Tensor | None, targets: Tensor | None, out: Tensor
) -> Tensor:
    """out, with out[targets[b]] = the weighted sum of the rows of bag b, added up from zero in order."""
    targets = torch.arange(len(offsets) - 1) if targets is None else targets
    totals = []
    for first, last in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        total = torch.zeros(out.shape[1])
        for i in range(first, last):
            row = rows[positions[i]].float()
            total = total + (row if weights is None else weights[i] * row)
        totals.append(total)
    return out.index_copy(0, targets, torch.stack(totals)) if totals else out.clone()


def pool_add(
    grads: Tensor, origins: Tensor | None, positions: Tensor, offsets: Tensor, weights: Tensor | None, out: Tensor
) -> Tensor:
    """out, with weights[i] * grads[origins[b]] added to out[positions[i]] for every i of every bag b, in order."""
    origins = torch.arange(len(offsets) - 1) if origins is None else origins
    out = out.clone()
    for origin, first, last in zip(origins.tolist(), offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        for i in range(first, last):
            out[positions[i]] += grads[origin] if weights is None else weights[i] * grads[origin]
    return out


def first_values(seed: int, keys: Tensor, dim: int, *, normal: bool, a: float, b: float) -> Tensor:
    """[N, dim] values that the rows of the keys are born with. `seed` is 64 bits, read as signed."""
    golden = 0x9E3779B97F4A7C15 - 2**64
    state = mix(keys ^ mix(torch.tensor(seed)))[:, None]

    def draw(count: Tensor) -> Tensor:
        """The count-th number in [0, 1) of each key, in steps of 2^-24."""
        return _shifted(mix(state + golden * count), 40).float() * 2.0**-24

    d = torch.arange(dim)
    if not normal:
        return _f32(a) + _f32(b - a) * draw(d + 1)
    pair = d // 2
    radius = torch.sqrt(-2.0 * torch.log(1.0 - draw(2 * pair + 1).double()))
    angle = 2.0 * math.pi * draw(2 * pair + 2).double()
    z = radius * torch.where(d % 2 == 1, torch.sin(angle), torch.cos(angle))
    return (a + b * z).float()


# -- row optimizers --------------------------------------------------------------------------------------------------


def _sqrt(values: Tensor) -> Tensor:
    """The float32 nearest to the root. torch.sqrt of float32 is now and then the one beside it."""
    return torch.sqrt(values.double()).float()


def sum_of_squares(values: Tensor) -> Tensor:
    """[N, D] -> [N]: columns 0, 8, ... in one running sum, 1, 9, ... in the next; these in pairs; then the rest."""
    full = values.shape[1] - values.shape[1] % 8
    lanes = torch.zeros(len(values), 8, dtype=values.dtype)
    for d in range(0, full, 8):
        lanes = lanes + values[:, d : d + 8] * values[:, d : d + 8]
    while lanes.shape[1] > 1:
        lanes = lanes[:, 0::2] + lanes[:, 1::2]
    total = lanes[:, 0]
    for d in range(full, values.shape[1]):
        total = total + values[:, d] * values[:, d]
    return total


def squares(values: Tensor) -> float:
    """[N]: the same of one row, in float64."""
    return float(sum_of_squares(values.double()[None])[0])


def prepare(rows: Tensor, grads: Tensor, *, scale: float, weight_decay: float, clip: float | Tensor) -> Tensor:
    """The gradients that an optimizer's rule sees. clip: one for all rows, or one for each."""
    grads, limit = grads * _f32(scale), torch.as_tensor(clip, dtype=torch.float32)
    norm = _sqrt(sum_of_squares(grads))
    shrink = torch.where((limit > 0) & (norm > limit), limit / norm, _f32(1))
    grads = grads * shrink[:, None]
    return grads + _f32(weight_decay) * rows.float() if weight_decay > 0 else grads


def sgd(
    rows: Tensor, state: Tensor, grads: Tensor, *, lr: float, scale: float, weight_decay: float = 0.0, clip: float = 0.0
) -> tuple[Tensor, Tensor]:
    """New rows and new state [N, state floats] (none here). bfloat16 rows are widened, and rounded once at the end."""
    grads = prepare(rows, grads, scale=scale, weight_decay=weight_decay, clip=clip)
    return (rows.float() - _f32(lr) * grads).to(rows.dtype), state


def adagrad(
    rows: Tensor, state: Tensor, grads: Tensor, *, lr: float, scale: float, weight_decay: float = 0.0,
    clip: float = 0.0, eps: float = 1e-10,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """state: a sum of squares per value."""
    grads = prepare(rows, grads, scale=scale, weight_decay=weight_decay, clip=clip)
    state = state + grads * grads
    return (rows.float() - _f32(lr) * grads / (_sqrt(state) + _f32(eps))).to(rows.dtype), state


def rowwise_adagrad(
    rows: Tensor, state: Tensor, grads: Tensor, *, lr: float, scale: float, weight_decay: float = 0.0,
    clip: float = 0.0, eps: float = 1e-10,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """state: one sum of mean squares per row."""
    grads = prepare(rows, grads, scale=scale, weight_decay=weight_decay, clip=clip)
    state = state + (sum_of_squares(grads) / _f32(grads.shape[1]))[:, None]
    return (rows.float() - _f32(lr) / (_sqrt(state) + _f32(eps)) * grads).to(rows.dtype), state


def scaled_rowwise_adagrad(
    rows: Tensor, state: Tensor, grads: Tensor, *, lr: float, scale: float, weight_decay: float = 0.0,
    clip: float = 0.0, eps: float = 1e-20, c: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """state: one sum of mean squares per row."""
    grads = prepare(rows, grads, scale=scale, weight_decay=weight_decay, clip=clip)
    state = state + (sum_of_squares(grads) / _f32(grads.shape[1]))[:, None]
    return (rows.float() - _f32(lr) / _sqrt(state / _f32(c) + _f32(eps)) * grads).to(rows.dtype), state


def signs(updates: int, dim: int) -> Tensor:
    """[dim] of 1 and -1, drawn for one batch."""
    drawn = mix(mix(torch.tensor(updates)) + (0x9E3779B97F4A7C15 - 2**64) * torch.arange(1, dim + 1))
    return torch.where(drawn < 0, 1.0, -1.0)  # the highest bit


def row_scaled_adagrad(
    rows: Tensor, state: Tensor, grads: Tensor, *, lr: float, scale: float, weight_decay: float = 0.0,
    clip: float = 0.0, eps: float = 1e-20, num_replicas: int = 1, sharers: Tensor | None = None, updates: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """state: squares, cross, agreed; own, shared, four sums of the sketch. What each is stands at the kernel."""
    squares, cross, agreed, own, shared, *_ = state.T
    replicas, one = _f32(num_replicas), _f32(1)
    n = torch.full((len(rows),), float(num_replicas)) if sharers is None else sharers.float()
    agree = torch.where(agreed > 0, (cross / agreed).clamp(0, 1), one)
    limit = _f32(clip) / _sqrt(n * (one + (n - one) * agree) / (replicas * replicas))
    grads = prepare(rows, grads, scale=scale, weight_decay=0.0, clip=limit)
    if weight_decay > 0:
        grads = grads + (_f32(weight_decay) * (replicas / n))[:, None] * rows.float()
    dim = grads.shape[1]
    square = sum_of_squares(grads) / _f32(dim)
    sketch = state[:, 5:]
    if num_replicas == 1:  # nobody will average
        squares = squares + square
    else:
        own, shared = own + square, shared + (n - one) * square
        sketch = _sketched(sketch, grads, updates)
    here = (one + shared / own) * (own + agree * shared) / (replicas * replicas)
    total = squares + agree * agreed + torch.where(own > 0, here, _f32(0))
    step = _f32(lr) / _sqrt(total + _f32(eps))
    after = (rows.float() - step[:, None] * grads).to(rows.dtype)
    return after, torch.cat([torch.stack([squares, cross, agreed, own, shared], 1), sketch], 1)


def _sketched(sketch: Tensor, grads: Tensor, updates: int) -> Tensor:
    dim = grads.shape[1]
    signed, full, lanes = grads * signs(updates, dim), dim - dim % 4, torch.zeros(len(grads), 4)
    for d in range(0, full, 4):
        lanes = lanes + signed[:, d : d + 4]
    sketch = sketch + lanes
    sketch[:, : dim - full] += signed[:, full:]
    return sketch


def adam(
    rows: Tensor, state: Tensor, grads: Tensor, *, lr: float, scale: float, weight_decay: float = 0.0,
    clip: float = 0.0, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, updates: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """state: first moments, then second moments. `updates` counts the table's updates, this one included.

    1 - beta is taken before it is rounded to float32.
    """
    grads = prepare(rows, grads, scale=scale, weight_decay=weight_decay, clip=clip)
    dim = grads.shape[1]
    first = _f32(beta1) * state[:, :dim] + _f32(1.0 - beta1) * grads
    second = _f32(beta2) * state[:, dim:] + _f32(1.0 - beta2) * grads * grads
    corrected = float(_f32(lr)) * math.sqrt(1.0 - beta2**updates) / (1.0 - beta1**updates)
    rows_after = rows.float() - _f32(corrected) * first / (_sqrt(second) + _f32(eps))
    return rows_after.to(rows.dtype), torch.cat([first, second], 1)


# -- replicas --------------------------------------------------------------------------------------------------------


def average(rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """[M, N, D] and [M, N, S] to [N, D] and [N, S]: means over the M replicas, summed in their order."""

    def mean(values: Tensor) -> Tensor:
        total = torch.zeros(values.shape[1:], dtype=torch.float64)
        for value in values:
            total = total + value.double()
        return (total / len(values)).float().to(values.dtype)

    return mean(rows), mean(state)


def average_row_scaled(rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The same, with the state that `row_scaled_adagrad` wants."""
    before, own, shared, sketch = state.double().split([3, 1, 1, 4], 2)
    cross = (sketch.sum(0).square() - sketch.square().sum(0)).sum(1, keepdim=True) / rows.shape[2]
    learnt = torch.cat([own.sum(0), cross, shared.sum(0)], 1) / len(rows) ** 2
    after = torch.cat([before[0] + learnt, torch.zeros(rows.shape[1], 6)], 1)
    return average(rows, state)[0], after.float()


# -- records ---------------------------------------------------------------------------------------------------------


def count_use(last_used: Tensor, uses: Tensor, positions: Tensor, step: int, *, first: bool) -> tuple[Tensor, Tensor]:
    """The counters of all rows after a use, perhaps the first, of those at (distinct) positions."""
    last_used, uses = last_used.clone(), uses.clone()
    last_used[positions] = step
    uses[positions] = 1 if first else uses[positions] + 1
    return last_used, uses


def digest(keys: Tensor, records: Tensor, tag: int) -> tuple[int, int]:
    """Two sums, modulo 2^64, of a hash of every (tag, key, record). Records are float32 words; `tag` is signed."""
    words = records.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    a = mix(keys ^ tag)
    b = mix(a + (0x9E3779B97F4A7C15 - 2**64))
    for word in words.T:
        a, b = mix(a ^ word), mix(b + word)
    return int(a.sum()) % 2**64, int(b.sum()) % 2**64


# -- messages --------------------------------------------------------------------------------------------------------


def copy_segments(source: Tensor, source_start: Tensor, target: Tensor, target_start: Tensor, counts: Tensor) -> Tensor:
    """target, with counts[w] entries from source_start[w] on copied to target_start[w] on, for every w."""
    target = target.clone()
    for a, b, n in zip(source_start.tolist(), target_start.tolist(), counts.tolist(), strict=True):
        target[b : b + n] = source[a : a + n]
    return target


def segment_places(counts: Tensor, start: Tensor) -> Tensor:
    segments = [torch.arange(a, a + n) for a, n in zip(start.tolist(), counts.tolist(), strict=True)]
    return torch.cat(segments) if segments else torch.empty(0, dtype=torch.int64)


def mean_weights(offsets: Tensor, weights: Tensor | None) -> Tensor:
    """The weights with which a pooled sum is a mean; a bag whose weights sum to zero gives zeros."""
    parts = [torch.empty(0)]
    for first, last in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        if weights is None:
            parts.append(torch.ones(last - first) / _f32(last - first))
            continue
        total = _f32(0)
        for weight in weights[first:last]:
            total = total + weight
        parts.append(weights[first:last] * (1 / total if total != 0 else total))
    return torch.cat(parts)


class BagParts(NamedTuple):
    """Bags cut into one part per owner. Parts and their keys are listed by owner, within an owner by bag."""

    num_bags: Tensor  # [W] parts by owner
    num_keys: Tensor  # [W] keys by owner
    lengths: Tensor  # of each part
    keys: Tensor
    weights: Tensor  # of each key
    vectors: Tensor  # bag by bag, in the order in which its owners appear: where its parts' vectors will arrive
    vector_offsets: Tensor  # [bags + 1] into vectors


def cut_bags(keys: Tensor, owner: Tensor, offsets: Tensor, weights: Tensor, vector_start: Tensor) -> BagParts:
    """`count_bags` and `fill_bags`."""
    world = len(vector_start)
    lengths: list[list[int]] = [[] for _ in range(world)]
    sent: list[list[int]] = [[] for _ in range(world)]
    vectors, vector_offsets = [], [0]
    for first, last in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        for w in dict.fromkeys(owner[first:last].tolist()):  # each owner once, in order of first appearance
            vectors.append(int(vector_start[w]) + len(lengths[w]))
            part = [i for i in range(first, last) if owner[i] == w]
            lengths[w].append(len(part))
            sent[w] += part
        vector_offsets.append(len(vectors))

    def whole(values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64)

    order = whole(chain(*sent))
    return BagParts(
        num_bags=whole(map(len, lengths)),
        num_keys=whole(map(len, sent)),
        lengths=whole(chain(*lengths)),
        keys=keys[order],
        weights=weights[order],
        vectors=whole(vectors),
        vector_offsets=whole(vector_offsets),
    )


def sums_by_row(row_of: Tensor, num_rows: int, grads: Tensor, origins: Tensor, weights: Tensor) -> Tensor:
    """What a row optimizer sees of Gradients: for each row, weights[e] * grads[origins[e]] added in the order of e."""
    out = torch.zeros(num_rows, grads.shape[1])
    for e, row in enumerate(row_of.tolist()):
        out[row] += grads[origins[e]] * (weights[e] if len(weights) else 1)
    return out


def deal(cost: Tensor, home: Tensor, world: int) -> Tensor:
    """The worker of each sample: dearest first, at home while that has no more than an even part, else where there is least."""
    even, load = float(cost.sum()) / world, [0.0] * world
    worker = home.clone()
    for i in torch.argsort(-cost, stable=True).tolist():
        place, least = int(home[i]), load.index(min(load))
        if load[place] + float(cost[i]) > even and load[least] < load[place]:
            place = least
        load[place] += float(cost[i])
        worker[i] = place
    return worker


# -- attention ---------------------------------------------------------------------------------------------------------


def add_time_bias(bias_QK: Tensor, times_NQ: Tensor, times_NK: Tensor, time_bias: Tensor) -> tuple[Tensor, Tensor]:
    """The bias of every tile, and the bucket of every pair: log(seconds) / 0.301, rounded down."""
    seconds_NQK = (times_NQ[:, :, None] - times_NK[:, None, :]).to(torch.float32).clamp(min=1)
    buckets_NQK = (seconds_NQK.log() / 0.301).to(torch.int64).clamp(max=len(time_bias) - 1)
    return bias_QK + time_bias[buckets_NQK], buckets_NQK


def sum_diagonals(grad_NQK: Tensor, first: int, num_distances: int) -> Tensor:
    """[M] by distance, from far to near."""
    out_M = torch.zeros(num_distances, dtype=torch.float64)
    for tile in grad_NQK.to(torch.float64):
        for i, row in enumerate(tile):
            for j, value in enumerate(row[: first + i + 1]):
                out_M[num_distances - 1 - (first + i - j)] += value
    return out_M


def sum_buckets(grad_NQK: Tensor, buckets_NQK: Tensor, num_buckets: int) -> Tensor:
    """The sum of each bucket. Runs of one bucket in a row are added up by themselves first."""
    out = torch.zeros(num_buckets, dtype=torch.float64)
    for row, buckets in zip(grad_NQK.flatten(0, 1).to(torch.float64), buckets_NQK.flatten(0, 1).tolist(), strict=True):
        for bucket, run in itertools.groupby(range(len(row)), key=lambda j: buckets[j]):
            out[bucket] += sum(row[j] for j in run)
    return out
