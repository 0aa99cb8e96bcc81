"""An axis: from values to places between 0 and 1, and round numbers beside it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from nestpipe.report.markup import figure

MOST = 7  # marks beside an axis


@dataclasses.dataclass(frozen=True)
class Axis:
    """low, high: in logarithms where `log`. ticks: place and text. remark: what to add to its name."""

    low: float
    high: float
    log: bool
    ticks: list[tuple[float, str]]

    @classmethod
    def of(cls, values: Sequence[float], *, zero: bool) -> Axis:
        """Of positive values that span orders of magnitude, or double (1, 2, 4, ...), a logarithmic one.

        zero: a value axis, which has room around the values and begins with 0 unless they are all far from it.
        """
        if _is_log(values, doubling=not zero):
            low, high = math.log(min(values)), math.log(max(values))
            room = 0.05 * (high - low) if zero else 0.0
            axis = cls(low - room, high + room, True, [])
            distinct = sorted(set(values))
            marks = _round_logs(values) if zero else distinct[:: math.ceil(len(distinct) / MOST)]
            return dataclasses.replace(axis, ticks=[(axis.place(at), _short(at, figure(at))) for at in marks])
        low, high = min(values), max(values)
        if zero and 0 <= low < 0.6 * high:
            low = 0.0
        if low == high:
            low, high = (low - 0.5, high + 0.5) if low == 0 else (min(0.0, 2 * low), max(0.0, 2 * low))
        step = _round_step((high - low) / 4)
        if zero:
            low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
        axis = cls(low, high, False, [])
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        marks = [number * step for number in range(first, last + 1)]
        return dataclasses.replace(axis, ticks=[(axis.place(at), _short(at, f"{at:,.{decimals}f}")) for at in marks])

    def place(self, value: float) -> float:
        value = math.log(value) if self.log else value
        return (value - self.low) / (self.high - self.low)

    @property
    def remark(self) -> str:
        return " (logarithmic)" if self.log else ""


def _is_log(values: Sequence[float], *, doubling: bool) -> bool:
    low, high = min(values), max(values)
    if low <= 0 or high / low < (8 if doubling else 100):
        return False
    distinct = sorted(set(values))
    ratios = [later / earlier for earlier, later in zip(distinct, distinct[1:], strict=False)]
    return not doubling or (len(distinct) > 2 and min(ratios) >= 1.5)


def _short(value: float, text: str) -> str:
    """`20k` and `3M` beside an axis, where they are exact."""
    for sign, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 10 * scale or (scale > 1e3 and abs(value) >= scale):
            short = f"{value / scale:g}"
            return f"{short}{sign}" if len(short) <= 4 else text
    return text


def _round_step(step: float) -> float:
    scale = 10.0 ** math.floor(math.log10(step))
    return scale * next(nice for nice in (1, 2, 5, 10) if nice * scale >= step * (1 - 1e-9))


def _round_logs(values: Sequence[float]) -> list[float]:
    """Powers of ten, with 2 and 5 between them where those are few."""
    low, high = min(values), max(values)

    def marks(*digits: int) -> Iterator[float]:
        for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
            yield from (digit * 10.0**power for digit in digits if low <= digit * 10.0**power <= high)

    tens = list(marks(1))
    return tens if len(tens) > 3 else list(marks(1, 2, 5))
