"""Window: over which pieces of a batch its rows and gradients travel."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np


@dataclasses.dataclass(frozen=True)
class Window:
    """Inside a batch parameters do not change, so a row that a worker has got serves all later micro-batches.

    bounds: micro-batch m is samples bounds[m] to bounds[m + 1].
    parts: in how many messages rows come and gradients go: 1, or one per micro-batch. Then message m brings the rows that
        micro-batch m is the first to use, and takes the gradients of those that it is the last to use.
    cached: False is the paper's way: every micro-batch asks for all its rows again and sends all their gradients.

    What is added to what, in which order, does not depend on `parts`: a row's gradients are added up at the source,
    micro-batch by micro-batch, and then over sources by rank. (Not cached: all of them at the owner, by rank and
    micro-batch.)
    """

    bounds: list[int]
    parts: int = 1
    cached: bool = True

    @property
    def size(self) -> int:
        return self.bounds[-1]

    @property
    def micro_batches(self) -> int:
        return len(self.bounds) - 1

    @property
    def part_bounds(self) -> list[int]:
        """Part p is samples part_bounds[p] to part_bounds[p + 1]."""
        return self.bounds if self.parts > 1 else [0, self.size]

    def cut(self, offsets: np.ndarray, num_features: int) -> list[np.ndarray]:
        """The offsets of each part, where lists lie micro-batch by micro-batch, in each feature by feature."""
        bounds = [bound * num_features for bound in self.part_bounds]
        return [offsets[a : z + 1] for a, z in itertools.pairwise(bounds)]

    def ends(self, offsets: np.ndarray, num_features: int) -> np.ndarray:
        """How many entries of such lists there are up to the end of each micro-batch."""
        return offsets[np.array(self.bounds[1:]) * num_features]

    @property
    def last_use(self) -> np.dtype | None:
        """The type in which the source tells the owner each row's last micro-batch; None: nothing to tell."""
        if self.parts == 1 or not self.cached:
            return None
        return np.dtype(np.uint8 if self.parts <= 256 else np.uint16)
