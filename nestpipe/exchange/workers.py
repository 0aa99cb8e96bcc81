"""Workers: the processes of a run, for what a user's program and the commands do together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from nestpipe.exchange.transport import Transport

T = TypeVar("T")


class Workers:
    """`trainer.workers`. Every worker calls each of these methods, at the same point, between steps.

    rank: of this one, from 0. count: how many there are.
    """

    def __init__(self, transport: Transport, stop_asked: Callable[[], bool]) -> None:
        self.rank, self.count = transport.rank, transport.world
        self._transport, self._stop_asked = transport, stop_asked

    @property
    def is_first(self) -> bool:
        """For what one worker does for all, such as printing."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, by rank; whatever can be pickled. For reports, not for tensors of a step."""
        return self._transport.gather_objects(value)

    def from_first(self, value: Any) -> Any:
        """The first worker's value, on every worker."""
        return self.gather(value)[0]

    def any(self, flag: bool) -> bool:
        """Whether it is so on one of the workers."""
        return self._transport.any(flag)

    def together(self, work: Callable[[], T], *, what: str) -> T:
        """Done by every worker; what goes wrong on one is raised on all."""
        return self._transport.together(work, what=what)

    def on_first(self, work: Callable[[], object], *, what: str) -> None:
        """Done by the first worker while the others wait; what goes wrong is raised on all."""
        self._transport.together(work if self.is_first else None, what=what)

    def wait_for(self, work: Callable[[], T], *, what: str, limit: float) -> T:
        """Does what may take longer than workers wait for each other, at most `limit` seconds; returns when all have done it.
        Raises errors.Stopped on all of them if one is asked to stop meanwhile."""
        return self._transport.patiently(work, what=what, limit=limit, stop_asked=self._stop_asked)
