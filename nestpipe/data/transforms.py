"""What becomes of columns on their way to keys and inputs: buckets of numbers, crosses of keys, logarithms.

Everything is exact and the same on every machine: buckets compare with numbers that are saved, crosses are hashes of keys.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np

from nestpipe.errors import did_you_mean
from nestpipe.fields import AtLeast, AtMost, NotEmpty, check, hints
from nestpipe.kernels.strings import hash_each

SAMPLE = 100_000  # rows of the training split that quantiles are computed from
_KINDS = ("boundaries", "quantiles", "log", "width")
_MOST = 1e300  # where the buckets of a logarithm end


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bucket:
    """Numbers of a column -> keys, the number of the bucket that each falls into. One of these four says which:

    boundaries: ascending; bucket k has the numbers from boundaries[k - 1] up to but without boundaries[k].
    quantiles: so many buckets of as many training rows each (fewer where numbers repeat). Their boundaries are computed from
        a sample of the training split, and then stand beside it.
    log: bucket 0 has what is less than 1, bucket 1 the numbers up to this base, bucket 2 those up to its square, and so on.
        shift is added to each number before.
    width: bucket floor(x / width), any whole number; with modulo what is left of it after division by that: the hour of
        the day is {width = 3600, modulo = 24} of seconds.
    column: the feature's own name if left out.

    A missing number has no bucket: its list is empty.
    """

    column: str
    boundaries: Annotated[tuple[float, ...], NotEmpty()] | None = None
    quantiles: Annotated[int, AtLeast(2), AtMost(10_000)] | None = None
    log: Annotated[float, AtLeast(1.01)] | None = None
    shift: float | None = None
    width: float | None = None
    modulo: Annotated[int, AtLeast(2)] | None = None

    @classmethod
    def declared(cls, name: str, entries: Mapping[str, Any]) -> Bucket:
        """As `buckets` of a data set has it; ValueError that names what is wrong."""
        what, known = f"buckets.{name}", hints(cls)
        for entry in entries:
            if entry not in known:
                raise ValueError(f"{what}.{entry}, {did_you_mean(entry, list(known))}")
        values = {entry: check(f"{what}.{entry}", value, known[entry]) for entry, value in entries.items()}
        bucket = cls(**{"column": name, **values})
        kinds = [kind for kind in _KINDS if getattr(bucket, kind) is not None]
        if len(kinds) != 1 and kinds != ["boundaries", "quantiles"]:  # the two together: computed before
            raise ValueError(f"{what} has {' and '.join(kinds) or 'none'} of {', '.join(_KINDS)}; give one")
        for entry, kind in (("shift", "log"), ("modulo", "width")):
            if getattr(bucket, entry) is not None and kind not in kinds:
                raise ValueError(f"{what}.{entry} goes with {kind}; leave it out")
        if bucket.width is not None and bucket.width <= 0:
            raise ValueError(f"{what}.width must be greater than 0, got {bucket.width!r}")
        if any(a >= b for a, b in itertools.pairwise(bucket.boundaries or ())):
            raise ValueError(f"{what}.boundaries must ascend, got {list(bucket.boundaries or ())!r:.80}")
        return bucket

    @property
    def is_fitted(self) -> bool:
        """False while its quantiles have not been computed."""
        return self.quantiles is None or self.boundaries is not None

    def fitted(self, numbers: np.ndarray) -> Bucket:
        """With the boundaries that cut these numbers into quantiles; each is one of them. ValueError if there are none."""
        assert self.quantiles is not None
        numbers = np.sort(numbers[np.isfinite(numbers)])
        if not len(numbers):
            raise ValueError(
                f"column {self.column!r} has no number in the first {SAMPLE:,} training rows to compute quantiles from; "
                f"give boundaries instead"
            )
        starts = [k * len(numbers) // self.quantiles for k in range(1, self.quantiles)]
        return dataclasses.replace(self, boundaries=tuple(np.unique(numbers[starts]).tolist()))

    def entries(self) -> dict[str, Any]:
        """As `declared` takes them."""
        values = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return values | ({"boundaries": list(self.boundaries)} if self.boundaries is not None else {})

    def keys(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The keys of those that have one, and which these are. ValueError for a bucket beyond 64 bits."""
        if self.width is None:
            present = ~np.isnan(numbers)
            shifted = numbers[present] + (self.shift or 0.0)
            return np.searchsorted(self._bounds(), shifted, side="right").astype(np.int64), present
        present = np.isfinite(numbers)
        floors = np.floor(numbers[present] / self.width)
        if self.modulo is not None:
            floors = np.mod(floors, self.modulo)
        if len(floors) and np.abs(floors).max() >= 2.0**63:
            raise ValueError(f"{self.column} / {self.width} is beyond 64 bits; give a greater width, or modulo")
        return floors.astype(np.int64), present

    def _bounds(self) -> np.ndarray:
        if self.log is not None:
            # By repeated multiplication: powers and logarithms differ in the last bit from machine to machine.
            count = int(math.log(_MOST) / math.log(self.log))
            return np.multiply.accumulate(np.array([1.0, *[self.log] * count]))
        assert self.boundaries is not None, "quantiles are computed before the first row is read"
        return np.array(self.boundaries)


def crossed(parts: Sequence[np.ndarray]) -> np.ndarray:
    """One key for each tuple of keys, one of each part: XXH64 of their bytes, 8 for each key, the lowest first."""
    keys = np.ascontiguousarray(np.stack(parts, axis=1).astype("<i8"))
    out = np.empty(len(keys), np.int64)
    hash_each(keys.reshape(-1).view(np.uint8), np.arange(len(keys) + 1) * (8 * len(parts)), out)
    return out


def log1p(numbers: np.ndarray) -> np.ndarray:
    """log(1 + x), and 0 for what is negative."""
    return np.log1p(np.maximum(numbers, 0.0))
