"""An axis: from values to places between 0 and 1, and round numbers beside it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator

from nestpipe.report.markup import figure

MOST = 7  # marks beside an axis
SPACES = 4  # between the marks of a linear one


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
        low, high = min(values), max(values)
        if _is_log(values, doubling=not zero):
            distinct = sorted(set(values))
            marks = _round_logs(low, high) if zero else distinct[:: math.ceil(len(distinct) / MOST)]
            room = 0.05 * math.log(high / low) if zero else 0.0
            axis = cls(math.log(low) - room, math.log(high) + room, True, [])
            return dataclasses.replace(axis, ticks=[(axis.place(at), _short(at, figure(at))) for at in marks])
        if zero and 0 <= low < 0.6 * high:
            low = 0.0
        if low == high:
            low, high = (low - 0.5, high + 0.5) if low == 0 else (min(0.0, 2 * low), max(0.0, 2 * low))
        marks = list(map(float, MaxNLocator(SPACES, steps=[1, 2, 5, 10]).tick_values(low, high)))
        decimals = max(0, -math.floor(math.log10(marks[1] - marks[0]) + 1e-9))
        if zero:
            low, high = marks[0], marks[-1]
        axis = cls(low, high, False, [])
        inside = [at for at in marks if -1e-9 <= axis.place(at) <= 1 + 1e-9]
        return dataclasses.replace(axis, ticks=[(axis.place(at), _short(at, f"{at:,.{decimals}f}")) for at in inside])

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
    short = EngFormatter(sep="")(value)
    return short if abs(value) >= 1e4 and len(short) <= 5 else text


def _round_logs(low: float, high: float) -> list[float]:
    """Powers of ten, with 2 and 5 between them where those are few."""
    tens, more = (
        [float(at) for at in LogLocator(subs=subs, numticks=100).tick_values(low, high) if low <= at <= high]
        for subs in ((1,), (1, 2, 5))
    )
    return tens if len(tens) > 3 else more
