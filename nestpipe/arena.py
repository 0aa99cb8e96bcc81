"""Arena: large arrays that are kept and handed out again, because fresh ones cost page faults."""

from __future__ import annotations

import math

import numpy as np
import torch


class Arena:
    """Named scratch memory of one batch in flight. `take` with the same name gives the same memory again."""

    def __init__(self) -> None:
        self._kept: dict[str, np.ndarray] = {}

    def take(self, name: str, shape: int | tuple[int, ...], dtype: type[np.generic] | np.dtype) -> np.ndarray:
        """An uninitialised array of the given shape, valid until `name` is taken again."""
        shape = (shape,) if isinstance(shape, int) else shape
        size = math.prod(shape)
        kept = self._kept.get(name)
        if kept is None or len(kept) < size or kept.dtype != dtype:
            # An eighth more than asked for, so that batches of slightly different size settle at once.
            kept = self._kept[name] = np.empty(size + size // 8, dtype)
        return kept[:size].reshape(shape)


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """The same memory as a tensor."""
    return torch.from_numpy(array)
