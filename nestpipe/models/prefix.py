"""Prefix: what is kept of a user's first items so that ranking need not read them again.

Shape legend: P items of the prefix, T items of all tails, S items of prefixes and tails, E = heads x head width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

STORED = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclasses.dataclass(eq=False)
class Prefix:
    """Keys and values of a user's first items, layer by layer: what a ranking needs of them.

    They belong to the weights and rows that made them; another version of either needs a new one.

    layers: (k, v), each [P, E], per layer; k None where a layer needs none.
    length: P.
    times: [P] seconds, if the model looks at times.
    """

    layers: list[tuple[Tensor | None, Tensor]]
    length: int
    times: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        tensors = [x for k, v in self.layers for x in (k, v)]
        return sum(x.numel() * x.element_size() for x in (*tensors, self.times) if x is not None)

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Prefix:
        """The same elsewhere, or in another precision: half of it is for keeping, ranking computes in the model's own.

        float16 has 11 significant bits and ends at 65,504, bfloat16 has 8 and the range of float32.
        """
        if dtype is not None and dtype not in STORED:
            raise ValueError(f"a prefix can be kept as {', '.join(map(str, STORED))}, not as {dtype}")

        def moved(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            there = x.to(device=device, dtype=dtype)
            if dtype is torch.float16 and not bool(torch.isfinite(there).all()):
                raise ValueError(
                    "a key or value of the prefix is beyond 65,504, where float16 ends; keep it as bfloat16"
                )
            return there

        layers = []
        for k, v in self.layers:
            v_there = moved(v)
            assert v_there is not None
            layers.append((moved(k), v_there))
        return Prefix(layers, self.length, None if self.times is None else self.times.to(device=device))


def end_to_end(kept: Sequence[Tensor | None], tails: Tensor, bounds: Sequence[int]) -> Tensor:
    """[S, ...]: of each sample what is kept, if anything, and then its tail: one copy, and none where only one of them has
    anything in it. bounds: of the tails."""
    pieces = []
    for part, a, z in zip(kept, bounds[:-1], bounds[1:], strict=True):
        pieces += [part] if part is not None and len(part) else []
        pieces += [tails[a:z]] if a < z else []
    if not pieces:
        return tails
    if len(pieces) == 1:
        return pieces[0].to(tails.dtype)
    # Into memory of the right type: half precision becomes float32 on the way, not in a copy of its own.
    return torch.cat(pieces, out=tails.new_empty((sum(map(len, pieces)), *tails.shape[1:])))
