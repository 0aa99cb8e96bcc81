"""dbp: dual-buffer pipelining. While batch t computes, the next batches are read, copied, routed and looked up."""

from __future__ import annotations

from collections.abc import Iterator

from nestpipe.schedule.ops import AGREE, BWD, COMPUTE, DENSE, EMB, FWD, GRAD, H2D, PREFETCH, REDUCE, RETRIEVE  # isort: skip
from nestpipe.schedule.ops import ROUTE, SYNC, UPDATE, WRITEBACK, Op, Schedule, Task  # isort: skip

STAGES = 4  # before the compute: read, copy, route, retrieve


def dbp(*, micro_batches: int = 1, look_ahead: int | None = None) -> Schedule:
    ahead = stages_ahead("dbp", look_ahead)

    def step(t: int) -> Iterator[Task]:
        yield from lookups(t, ahead)
        # 5. forward and backward, with the exchange of rows and gradients inside
        yield Task(Op(EMB, t), COMPUTE)
        for m in range(micro_batches):
            yield Task(Op(FWD, t, m), COMPUTE)
            yield Task(Op(BWD, t, m), COMPUTE)
        for name in (AGREE, GRAD, UPDATE, REDUCE, DENSE):
            yield Task(Op(name, t), COMPUTE)

    return Schedule("dbp", "lookups of the next batches behind the compute of this one, no row stale", step)


def lookups(t: int, ahead: int, *, sync: str = COMPUTE) -> Iterator[Task]:
    """Everything before the rows of batch t leave their owners. sync: the lane that updates rows, and sends them."""
    read, copied, routed = t + ahead, t + min(ahead, 3), t + min(ahead, 2)

    # 1. data prefetch, no further ahead than asked for; and not while batch t waits for its first rows, with all of the CPU
    yield Task(Op(PREFETCH, read), "data", (Op(FWD, t),))
    # 2. host to device
    yield Task(Op(H2D, copied), "copy", (Op(PREFETCH, copied),))
    # 3. key routing
    yield Task(Op(ROUTE, routed), "keys", (Op(H2D, routed),))
    # 4. retrieval, into the buffer that batch t - 1 has left: its rows are back in their tier, and batch t has its own
    yield Task(Op(WRITEBACK, t - 1), "store", (Op(DENSE, t - 1),))
    yield Task(Op(RETRIEVE, t + 1), "store", (Op(ROUTE, t + 1), Op(SYNC, t)))
    yield Task(Op(SYNC, t), sync, (Op(RETRIEVE, t),))


def stages_ahead(schedule: str, look_ahead: int | None) -> int:
    """How many batches may be on their way behind the one that computes: 4 keeps every stage on a batch of its own, less
    makes some wait for each other, more evens out a source that stutters."""
    ahead = STAGES if look_ahead is None else look_ahead
    if ahead < 1:
        raise ValueError(f"schedule {schedule!r} needs a look_ahead of at least 1, got {look_ahead}; 'serial' has none")
    return ahead
