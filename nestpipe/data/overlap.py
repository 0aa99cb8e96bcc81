"""Batches whose neighbours share a given fraction of their distinct keys.

Every batch has the same number of distinct ids. The hot ones, the share that neighbours have in common, are the most
popular ids of the law and occur in every batch; the cold ones come from a window of the remaining ids that moves on
with each batch. So batch t is known from t alone. A batch is first drawn over *slots* 0 .. num_slots - 1, most popular
first; `cover` then makes each slot occur at least once and `Overlap.to_ids` puts the ids of batch t in place of its
slots.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from nestpipe.kernels.jit import kernel


@dataclasses.dataclass(frozen=True)
class Overlap:
    """num_slots distinct ids a batch: num_hot that are in every batch, the others from one of the windows.

    Window w begins at id first_cold + w * stride; there are num_windows of them.
    """

    num_slots: int
    num_hot: int
    first_cold: int
    stride: int
    num_windows: int

    @classmethod
    def plan(cls, *, fraction: float, num_slots: int, num_ids: int, granule: int = 1) -> Overlap:
        """The plan with `num_slots` distinct ids, or as many as a small catalogue allows.

        Windows start at multiples of `granule`, so that a slot and its id agree modulo the granule (their cluster).
        """
        num_slots = min(num_slots, num_ids)
        while num_slots > 0:
            num_hot = round(fraction * num_slots)
            stride = -(-(num_slots - num_hot) // granule) * granule
            # Neighbours must not share a window by chance, so there are two windows or more, or nothing cold at all.
            num_windows = (num_ids - num_hot) // stride if stride else 1
            if stride == 0 or num_windows >= 2:
                return cls(num_slots, num_hot, num_hot, stride, num_windows)
            num_slots = min(num_slots - 1, max(1, int((num_ids - 2 * granule) / (2 - fraction)) + 1))
        raise ValueError(
            f"overlap {fraction} cannot be met with {num_ids} ids: neighbouring batches have nothing else to take; "
            f"raise the number of ids above {2 * granule} or leave overlap out"
        )

    def at_most(self, *, fraction: float, num_slots: int) -> Overlap:
        """The same plan for a smaller batch (the last of an epoch): fewer hot ids, less of the same windows."""
        num_slots = min(num_slots, self.num_slots)
        return dataclasses.replace(self, num_slots=num_slots, num_hot=round(fraction * num_slots))

    def to_ids(self, slots: np.ndarray, *, index: int) -> np.ndarray:
        """The ids of batch `index` in place of its slots."""
        window = self.first_cold + (index % self.num_windows) * self.stride
        return np.where(slots < self.num_hot, slots, slots - self.num_hot + window)


def cover(slots: np.ndarray, *, num_slots: int, granule: int, num_free: int) -> None:
    """Changes `slots` in place until each of 0 .. num_slots - 1 occurs; needs len(slots) >= num_slots.

    Only surplus occurrences give way. The last `num_free` entries (negatives) go first; the others take a slot of the
    same cluster (modulo the granule) if they can, so that sequences keep their structure.
    """
    assert len(slots) >= num_slots
    counts = np.bincount(slots, minlength=num_slots)
    fixed = len(slots) - num_free
    for part, modulus in ((slots[fixed:], 1), (slots[:fixed], granule), (slots, 1)):
        if len(part) and not counts.all():
            _cover(part, counts, modulus, _coprime_step(len(part)))
    assert counts.all()


def _coprime_step(length: int) -> int:
    """A step that visits all positions in an order far from sequential, so that changes spread over the whole batch."""
    step = max(1, int(length * 0.618))
    while math.gcd(step, length) != 1:
        step += 1
    return step


@kernel
def _cover(slots: np.ndarray, counts: np.ndarray, modulus: int, step: int) -> None:
    cursors = np.arange(modulus)  # per cluster: the first slot that may still be missing
    where = 0
    for _ in range(len(slots)):
        slot = slots[where]
        if counts[slot] > 1:
            cluster = slot % modulus
            cursor = cursors[cluster]
            while cursor < len(counts) and counts[cursor] > 0:
                cursor += modulus
            cursors[cluster] = cursor
            if cursor < len(counts):
                counts[slot] -= 1
                counts[cursor] = 1
                slots[where] = cursor
        where = (where + step) % len(slots)
