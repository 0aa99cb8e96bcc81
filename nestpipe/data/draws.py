"""Random draws that are pure functions of (stream, sample, draw): any sample can be made anew, alone, on any rank.

A stream is a 64-bit number made of seeds. The n-th draw of a sample hashes (stream, sample, n), so nothing depends on
which samples were drawn before, nor on how they are cut into batches. The loops run without the GIL, beside training.
"""

from __future__ import annotations

import numpy as np

from nestpipe.kernels.jit import kernel

# The odd 64-bit number nearest to 2^64 / golden ratio: successive multiples of it fill the 64-bit circle evenly.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Multipliers and shifts of Stafford's variant 13 of the 64-bit finaliser: every input bit flips every output bit half
# the time.
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)
_UNIT = 2.0**-53


def stream_of(*numbers: int) -> np.uint64:
    """The stream that belongs to these numbers (seed, epoch, split, purpose, ...), none of them negative."""
    return np.random.SeedSequence(list(numbers)).generate_state(1, np.uint64)[0]


@kernel
def mix(bits: np.uint64) -> np.uint64:
    """A bijection on 64 bits that looks random."""
    bits = (bits ^ (bits >> _S30)) * _FIRST
    bits = (bits ^ (bits >> _S27)) * _SECOND
    return bits ^ (bits >> _S31)


@kernel
def sample_state(stream: np.uint64, sample: int) -> np.uint64:
    return mix(stream ^ mix(np.uint64(sample) + _GOLDEN))


@kernel
def uniform(state: np.uint64, draw: int) -> float:
    """The draw-th number of a sample, in [0, 1)."""
    return np.float64(mix(state + np.uint64(draw + 1) * _GOLDEN) >> _S11) * _UNIT


@kernel
def law_reach(count: int, skew: float) -> float:
    """The part of `power_law` that is the same for every draw."""
    if skew == 0.0:
        return np.float64(count)
    if skew == 1.0:
        return np.log(count + 1.0)
    return (count + 1.0) ** (1.0 - skew) - 1.0


@kernel
def power_law(u: float, count: int, skew: float, reach: float) -> np.int64:
    """Turns u in [0, 1) into a rank in [0, count), rank r with probability proportional to the integral of x^-skew,
    r+1..r+2.

    The integral instead of the sum makes a draw O(1) in time and memory for a table of any size.
    """
    if skew == 0.0:
        rank = np.int64(u * reach)
    elif skew == 1.0:
        rank = np.int64(np.exp(u * reach)) - 1
    else:
        rank = np.int64((1.0 + u * reach) ** (1.0 / (1.0 - skew))) - 1
    return min(rank, np.int64(count - 1))  # rounding may reach the upper end itself


@kernel
def uniform_table(stream: np.uint64, samples: np.ndarray, width: int) -> np.ndarray:
    """[len(samples), width] numbers in [0, 1), row i belonging to sample samples[i]."""
    out = np.empty((len(samples), width), np.float64)
    for i in range(len(samples)):
        state = sample_state(stream, samples[i])
        for j in range(width):
            out[i, j] = uniform(state, j)
    return out


@kernel
def uniform_ids(stream: np.uint64, samples: np.ndarray, width: int, count: int) -> np.ndarray:
    """[len(samples), width] ids, each uniform over [0, count)."""
    out = np.empty((len(samples), width), np.int64)
    for i in range(len(samples)):
        state = sample_state(stream, samples[i])
        for j in range(width):
            out[i, j] = min(np.int64(uniform(state, j) * count), np.int64(count - 1))
    return out


@kernel
def uniform_lists(stream: np.uint64, samples: np.ndarray, offsets: np.ndarray, count: int) -> np.ndarray:
    """The same in lists of different lengths, that of samples[i] at offsets[i] to offsets[i + 1]: a longer list of a sample
    begins with the shorter one."""
    out = np.empty(offsets[-1], np.int64)
    for i in range(len(samples)):
        state = sample_state(stream, samples[i])
        for j in range(offsets[i + 1] - offsets[i]):
            out[offsets[i] + j] = min(np.int64(uniform(state, j) * count), np.int64(count - 1))
    return out


@kernel
def spread(ids: np.ndarray, out: np.ndarray) -> None:
    """Ids to keys all over the int64 range, no two alike."""
    for i in range(len(ids)):
        out[i] = np.int64(mix(np.uint64(ids[i]) + _GOLDEN))


@kernel
def buckets(first: int, count: int, num_buckets: int) -> np.ndarray:
    """A bucket in [0, num_buckets) for each of the rows first .. first + count - 1, by a hash of the row number."""
    out = np.empty(count, np.int64)
    for i in range(count):
        out[i] = np.int64(mix(np.uint64(first + i) + _GOLDEN) % np.uint64(num_buckets))
    return out


def to_keys(ids: np.ndarray, *, spread_keys: bool) -> np.ndarray:
    if not spread_keys:
        return ids
    keys = np.empty_like(ids)
    spread(ids.reshape(-1), keys.reshape(-1))
    return keys
