"""Short samples of nearly equal length, laid side by side: how many small matrix products become one batched call.

A sample's length is rounded up to the next of a few lengths, and samples of one rounded length form a group. The shape of a
sample's matrices thus depends on its own length alone, never on its neighbours: so do the bits of its results.

Shape legend: B samples of a group, L their rounded length, T tokens of the batch.
"""

from __future__ import annotations

import bisect
import dataclasses

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

LENGTHS = (8, 16, 24, 32, 40, 52, 64, 80, 104, 128)  # histories are often cut to 50, 100, 128
STEP = 32  # beyond
# What torch computes value by value (SiLU) it takes so many at a time, and the last few of a tensor by another routine, which
# rounds otherwise. Of matrices [L, L] that do not fill whole such parts the last row is therefore left to padding.
VECTOR = 32
# The bits of a product depend on where in a cache line its matrices begin, so each must fill whole ones: 16 floats. Matrices
# [L, L] and [L, D] do if L and D are multiples of 4; for any other D, L must be one of 16.
LINE = 16
LONGEST = tuple(length if length**2 % VECTOR == 0 else length - 1 for length in LENGTHS)  # samples of each


def rounded(length: int, width: int = LINE) -> int:
    """The length that samples of this one share, for matrices [L, width]."""
    beyond = length > LENGTHS[-1]
    length = -(-length // STEP) * STEP if beyond else LENGTHS[bisect.bisect_left(LONGEST, length)]
    return length if width % 4 == 0 else -(-length // LINE) * LINE


@dataclasses.dataclass(eq=False)
class Group:
    """Samples of one rounded length."""

    samples: Tensor  # [B]
    length: int
    rows: Tensor  # [B x L] the token at each place; behind a sample's last token, that token again
    places: (
        Tensor  # [B x L] the same, but behind the last token one row past all tokens: what is written there is not read
    )
    padding: Tensor  # the places behind last tokens
    start: int | None  # the first token, if the samples lie side by side as they are: nothing need be copied

    def __len__(self) -> int:
        return len(self.samples)

    def take(self, values: Tensor, first: int, last: int) -> Tensor:
        """[T, ...] -> [last - first, L, ...]: the tokens of samples first to last - 1 of the group."""
        a, z = first * self.length, last * self.length
        if self.start is not None and values.stride(0) % LINE == 0:
            return values[self.start + a : self.start + z].unflatten(0, (last - first, self.length))
        taken = values.index_select(0, self.rows[a:z])
        return taken.unflatten(0, (last - first, self.length))

    def take_or_zero(self, values: Tensor, first: int, last: int) -> Tensor:
        """The same with zeros behind the last tokens: gradients, where a copy must not count twice."""
        return self.take_or_fill(values, first, last, behind=0)

    def take_or_fill(self, values: Tensor, first: int, last: int, *, behind: float) -> Tensor:
        """The same with a number of one's own behind the last tokens."""
        taken = self.take(values, first, last)
        if len(self.padding):
            a, z = first * self.length, last * self.length
            within = self.padding if z - a == len(self.rows) else self.padding[(self.padding >= a) & (self.padding < z)]
            taken.flatten(0, 1).index_fill_(0, within - a, behind)
        return taken

    def put(self, out: Tensor, first: int, last: int, values: Tensor) -> None:
        """The inverse of `take`; `out` has T + 1 rows."""
        a, z = first * self.length, last * self.length
        if self.start is not None:
            out[self.start + a : self.start + z] = values.flatten(0, 1)
        else:
            out.index_copy_(0, self.places[a:z], values.flatten(0, 1))


_groups: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def groups_of(offsets: Tensor, *, width: int, longest: int | None = None) -> list[Group]:
    """The groups of all samples of 1 to `longest` tokens, shortest first, for matrices [L, width].

    All layers of a model ask for the groups of the same offsets: they are kept as long as the offsets live.
    """
    if offsets.is_inference():
        return _make(offsets, width, longest)
    version, made = _groups.get(offsets, (None, {}))
    if version != offsets._version:
        made = {}
        _groups[offsets] = (offsets._version, made)
    which = width % 4 == 0, longest
    if which not in made:
        made[which] = _make(offsets, width, longest)
    return made[which]


def _make(offsets: Tensor, width: int, longest: int | None) -> list[Group]:
    lengths = offsets[1:] - offsets[:-1]
    members: dict[int, list[int]] = {}
    for sample, length in enumerate(lengths.tolist()):
        if length > 0 and (longest is None or length <= longest):
            members.setdefault(rounded(length, width), []).append(sample)
    return [group_of(offsets, chosen, length) for length, chosen in sorted(members.items())]


def group_of(offsets: Tensor, chosen: list[int], length: int) -> Group:
    """The group of these samples, all of 1 to `length` tokens."""
    samples = torch.tensor(chosen, device=offsets.device)
    place_L = torch.arange(length, device=offsets.device)
    beyond_BL = place_L >= offsets[samples + 1, None] - offsets[samples, None]
    rows_BL = torch.minimum(offsets[samples, None] + place_L, offsets[samples + 1, None] - 1)
    places_BL = torch.where(beyond_BL, offsets[-1], rows_BL)
    padding = beyond_BL.flatten().nonzero().squeeze(1)
    start = int(rows_BL[0, 0])
    as_they_are = len(padding) == 0 and int(rows_BL[-1, -1]) - start == rows_BL.numel() - 1
    return Group(samples, length, rows_BL.flatten(), places_BL.flatten(), padding, start if as_they_are else None)
