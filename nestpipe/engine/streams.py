"""Streams: where there is an accelerator, one stream per lane, with events where one lane waits for another.

On the CPU there is nothing to do. Written against torch.accelerator; it has never run on a device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nestpipe.process import current_device
from nestpipe.schedule.ops import COMPUTE, Task


class Streams:
    """Lane threads call `enter` once, `wait` before each task and `done` after it.

    A task that has returned may still run on its lane's stream; a task that waits for it must make its own stream wait.
    """

    def __init__(self, lanes: Sequence[str]) -> None:
        self._used = torch.accelerator.is_available()
        self._events: dict[tuple[str, int], torch.Event] = {}
        if self._used:
            # The compute lane keeps the stream that the user's code runs on.
            self._streams = {lane: torch.Stream(device=current_device()) for lane in lanes if lane != COMPUTE}
            self._streams[COMPUTE] = torch.accelerator.current_stream()

    def enter(self, lane: str) -> None:
        """Makes the lane's stream the current one of this thread; device and stream are per thread."""
        if self._used:
            current_device()
            torch.accelerator.set_stream(self._streams[lane])

    def wait(self, task: Task) -> None:
        if self._used:
            for op in task.after:
                # The newest event of a kind: its batch is this one or a later one of the same lane.
                event = self._events.get((op.name, op.part))
                if event is not None:
                    self._streams[task.lane].wait_event(event)

    def done(self, task: Task) -> None:
        if self._used:
            self._events[task.op.name, task.op.part] = self._streams[task.lane].record_event()
