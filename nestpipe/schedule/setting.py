"""A setting: all that decides in which order, and in which parts, batches are trained. Trainer, config, benches and the simulator
share it, and ask it what they need to know instead of asking for a schedule by its name."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection
from typing import Annotated, Any

from nestpipe.fields import AtLeast, AtMost, OneOf, check, hints
from nestpipe.schedule import SCHEDULES
from nestpipe.schedule.ops import COMPUTE, DEAL, EMB, MERGE, RETRIEVE, Schedule
from nestpipe.schedule.optional import including

CLUSTERINGS = ("none", "shared", "window", "taper")
NEAR = ("shards", "replicas")
BALANCES = ("none", "tokens", "auto")
MOST_SQUARES = 1.0  # what the square of a token may cost: above, tokens themselves count for nothing
MOST_PARTS = 65_536  # micro-batches that the last use of a row can name (exchange/window.py)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way to train; the entries are explained at Trainer.

    micro_batches: a number, or "auto": measured by `Trainer.fit`, which then asks for `cut_into` a number.
    replicas: groups of workers that each hold all tables, sharded inside (2D sparse parallelism).
    near: which workers are neighbours: those of a group, or those that hold the same shard.
    balance: "none"; "tokens"; a number, what the square of a token costs beside the token itself; or "auto": that number is
        measured by `Trainer.fit`.
    """

    schedule: Annotated[str, OneOf(SCHEDULES)] = "serial"
    micro_batches: Annotated[int, AtLeast(1), AtMost(MOST_PARTS)] | Annotated[str, OneOf(("auto",))] = 1
    window_cache: bool = True
    clustering: Annotated[str, OneOf(CLUSTERINGS)] = "window"
    look_ahead: int | None = None
    replicas: Annotated[int, AtLeast(1)] = 1
    near: Annotated[str, OneOf(NEAR)] = "shards"
    balance: Annotated[float, AtLeast(0), AtMost(MOST_SQUARES)] | Annotated[str, OneOf(BALANCES)] = "none"

    def __post_init__(self) -> None:
        for name, hint in hints(Setting).items():
            check(name, getattr(self, name), hint)
        self._made  # noqa: B018  (what does not fit together is said at once)

    @property
    def is_auto(self) -> bool:
        """Whether the number of micro-batches is still to be measured."""
        return self.micro_batches == "auto"

    @property
    def parts(self) -> int:
        """Micro-batches; while they are to be measured, one."""
        return self.micro_batches if isinstance(self.micro_batches, int) else 1

    @property
    def deals(self) -> bool:
        """Whether samples of a batch go to other workers than those that have read them."""
        return self.balance != "none"

    @property
    def squares(self) -> float | None:
        """What the square of a token costs, in tokens; None: samples stay where they are, or it is still to be measured."""
        return (
            {"none": None, "tokens": 0.0, "auto": None}[self.balance] if isinstance(self.balance, str) else self.balance
        )

    def cut_into(self, micro_batches: int) -> Setting:
        return dataclasses.replace(self, micro_batches=micro_batches)

    def make(self, needed: Collection[str] | None = None) -> Schedule:
        """needed: operations that tables or the model need and others do without: those that keep replicas together, those of a
        loss over all workers' samples; by default those of exact replicas, if there are any."""
        schedule = SCHEDULES[self.schedule](micro_batches=self.parts, look_ahead=self.look_ahead)
        needed = ([MERGE] if self.replicas > 1 else []) if needed is None else needed
        return including(schedule, [*([DEAL] if self.deals else []), *needed])

    @property
    def _made(self) -> Schedule:
        return _with_two(self.schedule, self.look_ahead)

    @property
    def hides_lookups(self) -> bool:
        """Whether rows of later batches are looked up while this one computes."""
        return any(task.op.name == RETRIEVE and task.lane != COMPUTE for task in self._made.tasks)

    @property
    def cuts(self) -> bool:
        """Whether rows travel micro-batch by micro-batch, so that cutting a batch into several hides communication."""
        return self._made.num_parts(EMB) > 1

    @property
    def hides_nothing(self) -> bool:
        """Whether others are compared with it."""
        return not (self.hides_lookups or self.cuts)

    @property
    def stale_by(self) -> int:
        """By how many updates a row that a batch reads may be behind."""
        return self._made.stale_by

    @property
    def is_exact(self) -> bool:
        return self.stale_by == 0

    @property
    def name(self) -> str:
        """For tables and charts."""
        name = self.schedule if self.is_exact else f"{self.schedule} (NOT exact)"
        if self.micro_batches != 1:
            name += f", N = {self.micro_batches}"
            name += "" if self.window_cache else ", no window cache"
            name += f", clustering {self.clustering}" if self.clustering != "none" else ""
        if self.replicas > 1:
            name += f", {self.replicas} replicas" + (" side by side" if self.near == "replicas" else "")
        name += ", balanced" if self.deals else ""
        return name

    def options(self) -> dict[str, Any]:
        """As arguments of Trainer."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@functools.cache  # by name, not kept in a Setting: that travels to other processes, and a schedule does not
def _with_two(schedule: str, look_ahead: int | None) -> Schedule:
    """A schedule with two micro-batches: enough to see what it does with them."""
    return SCHEDULES[schedule](micro_batches=2, look_ahead=look_ahead)
