"""fwp: frozen-window pipelining. While a micro-batch computes, rows of the next and gradients of the last ones travel."""

from __future__ import annotations

from collections.abc import Iterator

from nestpipe.schedule.ops import AGREE, BWD, COMPUTE, DENSE, EMB, FWD, GRAD, H2D, PREFETCH, REDUCE, RETRIEVE  # isort: skip
from nestpipe.schedule.ops import ROUTE, SYNC, UPDATE, WRITEBACK, Op, Schedule, Task  # isort: skip


def fwp(*, micro_batches: int = 1, look_ahead: int | None = None) -> Schedule:
    if look_ahead:
        raise ValueError(
            f"schedule 'fwp' has no look-ahead, got look_ahead={look_ahead}; leave it out, or use 'nested'"
        )

    def step(t: int) -> Iterator[Task]:
        for name in (PREFETCH, H2D, ROUTE, RETRIEVE, SYNC):
            yield Task(Op(name, t), COMPUTE)
        yield from frozen_window(t, micro_batches)
        yield Task(Op(WRITEBACK, t), COMPUTE)

    return Schedule("fwp", "rows and gradients travel behind the compute of other micro-batches", step)


def frozen_window(t: int, micro_batches: int) -> Iterator[Task]:
    """From the rows of batch t, which no longer change, to their update."""
    last = micro_batches - 1

    # All rows first: nobody waits for gradients before the update, so none may hold up the rows of the next micro-batch. And
    # only the first rows beside dense gradients of the batch before: the first forward waits for both, for nothing else.
    for m in range(micro_batches):
        yield Task(Op(EMB, t, m), "comm", (Op(SYNC, t), *([Op(REDUCE, t - 1)] if m else [])))
    for m in range(micro_batches):
        yield Task(Op(FWD, t, m), COMPUTE, (Op(EMB, t, m),))
        yield Task(Op(BWD, t, m), COMPUTE)
    for m in range(last):
        yield Task(Op(GRAD, t, m), "comm", (Op(BWD, t, m),))
    # Gradients that are not finite show only now. Nobody updates anything before all know.
    yield Task(Op(AGREE, t), "comm", (Op(BWD, t, last),))
    yield Task(Op(GRAD, t, last), "comm")
    # Rows need nothing of the dense part: they are updated, and those of the next batch can leave, while the sum of dense
    # gradients is still on its way.
    yield Task(Op(UPDATE, t), "comm")
    yield Task(Op(REDUCE, t), COMPUTE)
    yield Task(Op(DENSE, t), COMPUTE, (Op(UPDATE, t),))
