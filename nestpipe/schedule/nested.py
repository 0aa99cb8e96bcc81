"""nested: the frozen window inside dual-buffer pipelining. Lookups hide behind batches, the all-to-all behind micro-batches."""

from __future__ import annotations

from collections.abc import Iterator

from nestpipe.schedule.dbp import lookups, stages_ahead
from nestpipe.schedule.fwp import frozen_window
from nestpipe.schedule.ops import Schedule, Task


def nested(*, micro_batches: int = 1, look_ahead: int | None = None) -> Schedule:
    ahead = stages_ahead("nested", look_ahead)

    def step(t: int) -> Iterator[Task]:
        yield from lookups(t, ahead, sync="comm")
        yield from frozen_window(t, micro_batches)

    return Schedule("nested", "dbp and fwp together: only the first rows and the last gradients are waited for", step)
