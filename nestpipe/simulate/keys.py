"""How many distinct keys there are among so many: what sources ask for, what owners look up, what two batches share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

Growth = Callable[[float], float]  # keys drawn -> distinct ones among them

PIECES = 2_000  # ranks of a law that are as likely as each other are counted together, in so many pieces


def zipf(skew: float, items: float) -> Growth:
    """Of a power law: rank r is drawn in proportion to r^-skew. Any number of items: a trillion takes as long as a thousand."""
    if not (1 <= items < np.inf and 0 <= skew < np.inf):
        raise ValueError(f"a power law needs items >= 1 and skew >= 0, got items={items}, skew={skew}")
    edges = np.unique(np.floor(np.geomspace(1, items + 1, PIECES)))
    count = np.diff(edges)
    middle = np.sqrt(edges[:-1] * np.maximum(edges[1:] - 1, edges[:-1]))
    weight = middle**-skew
    chance = weight / (weight * count).sum()

    def distinct(drawn: float) -> float:
        # 1 - (1 - p)^n, also where p is far below the precision of a float
        return float((count * -np.expm1(drawn * np.log1p(-np.minimum(chance, 1 - 1e-12)))).sum())

    return distinct


@dataclasses.dataclass(frozen=True)
class Measured:
    """Counted in data: among drawn[i] keys there were distinct[i]. Between the points, and beyond them, as the nearest two say
    (on logarithmic axes: distinct keys grow as a power of those drawn); never more than were drawn."""

    drawn: Sequence[float]
    distinct: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.drawn) != len(self.distinct) or not len(self.drawn) or min(*self.drawn, *self.distinct) <= 0:
            raise ValueError(
                f"counts of keys need as many 'drawn' as 'distinct', all above 0, got {self.drawn} and {self.distinct}"
            )
        if list(self.drawn) != sorted(set(self.drawn)):
            raise ValueError(f"counts of keys need rising numbers of keys drawn, got {list(self.drawn)}")

    def __call__(self, drawn: float) -> float:
        if drawn <= 0:
            return 0.0
        x, y, at = np.log(self.drawn), np.log(self.distinct), np.log(drawn)
        if x[0] <= at <= x[-1]:
            return float(np.exp(np.interp(at, x, y)))
        end = 0 if at < x[0] else -1
        slope = 1.0 if len(x) == 1 else (y[1] - y[0]) / (x[1] - x[0]) if end == 0 else (y[-1] - y[-2]) / (x[-1] - x[-2])
        return float(min(drawn, np.exp(y[end] + min(1.0, slope) * (at - x[end]))))


def count(keys: Sequence[np.ndarray]) -> Measured:
    """Of batches of keys, in order: after the first, the first two, four, ... of them, and after parts of the first."""
    if not keys or not len(keys[0]):
        raise ValueError("no keys to count: the first batch of the data has none")
    points: dict[int, int] = {}
    for part in (64, 32, 16, 8, 4, 2):
        if len(keys[0]) // part:
            first = keys[0][: len(keys[0]) // part]
            points[len(first)] = len(np.unique(first))
    for batches in range(1, len(keys) + 1):
        if batches & (batches - 1) == 0 or batches == len(keys):
            all_ = np.concatenate(keys[:batches])
            points[len(all_)] = len(np.unique(all_))
    return Measured(list(points), list(points.values()))
