"""What the kernel tests share: keys that are hard on hash tables, floats that round, and records laid out in chunks."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from nestpipe.kernels.rows import ONES, Rows
from nestpipe.kernels.update import Gradients

few = settings(max_examples=40, deadline=None)  # no deadline: a kernel's first call compiles it

INT64 = np.iinfo(np.int64)
EXTREMES = [INT64.min, INT64.min + 1, -1, 0, 1, INT64.max - 1, INT64.max]
any_key = st.one_of(st.sampled_from(EXTREMES), st.integers(-3, 3), st.integers(INT64.min, INT64.max))
seeds = st.integers(0, 2**32 - 1)


def int64(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def one_each(grads: np.ndarray) -> Gradients:
    """Gradients [V, D] of V rows, one for each."""
    everything = np.arange(len(grads) + 1, dtype=np.int32)
    return Gradients(grads, everything, everything[:-1], ONES)


def signed(bits: int) -> int:
    """64 bits as the int64 that they are."""
    return (bits % 2**64 + 2**63) % 2**64 - 2**63


def key_with_hash(h: int) -> int:
    """The key that `mix` sends to h: each of its steps undone, last one first."""
    h ^= h >> 33
    h = h * pow(0xC4CEB9FE1A85EC53, -1, 2**64) % 2**64
    h ^= h >> 33
    h = h * pow(0xFF51AFD7ED558CCD, -1, 2**64) % 2**64
    h ^= h >> 33
    return signed(h)


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Float32 over many magnitudes, so that sums in another order or with another rounding come out different."""
    return (rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)).astype(np.float32)


def same_bits(a: Tensor | np.ndarray, b: Tensor | np.ndarray) -> bool:
    a, b = torch.as_tensor(a).float(), torch.as_tensor(b).float()
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


class Records:
    """Rows (float32 or bfloat16) with float32 state and spare words beside them, 2^shift records to a chunk."""

    def __init__(self, values: Tensor, state: Tensor | None = None, *, shift: int = 2, spare: int = 0) -> None:
        n, self.dim = values.shape
        state = torch.empty(n, 0) if state is None else state
        self.half = values.dtype == torch.bfloat16
        self.value_words = (self.dim + 1) // 2 if self.half else self.dim
        self.state_floats = state.shape[1]
        words = self.value_words + self.state_floats + spare
        chunks = max(1, -(-n >> shift))
        self._n, self._memory = n, np.zeros((chunks, 1 << shift, words), np.float32)
        self._gap = [np.empty(7 + c, np.uint8) for c in range(chunks)]  # chunks need not lie end to end
        self._chunks = [np.ascontiguousarray(part) for part in self._memory]
        self.rows = Rows(int64([c.ctypes.data for c in self._chunks]), shift, words * 4, self.half)
        self.raw = self.rows._replace(half=False)
        records = self.words
        if self.half:
            records.view(np.uint16)[:, : self.dim] = values.view(torch.uint16).numpy()
        else:
            records[:, : self.dim] = values.numpy()
        records[:, self.value_words : self.value_words + self.state_floats] = state.numpy()
        self.words = records

    @property
    def words(self) -> np.ndarray:
        """A copy of all records as float32 words."""
        return np.concatenate(self._chunks)[: self._n]

    @words.setter
    def words(self, records: np.ndarray) -> None:
        for i, record in enumerate(records):
            self._chunks[i >> self.rows.shift][i & ((1 << self.rows.shift) - 1)] = record

    @property
    def values(self) -> Tensor:
        if self.half:
            halves = np.ascontiguousarray(self.words.view(np.uint16)[:, : self.dim])
            return torch.from_numpy(halves.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(self.words[:, : self.dim].copy())

    @property
    def state(self) -> Tensor:
        return torch.from_numpy(self.words[:, self.value_words : self.value_words + self.state_floats].copy())
