"""The words of a schedule: operations, lanes, what waits for what. No torch here, nothing runs here.

A schedule is a function that yields the tasks of step t. Step t is when batch t computes; a pipelined schedule works on
later batches in it too, and names them relative to t: every step is the same but for t. A lane runs its tasks one after
the other in the order in which the steps yield them; a task waits for the one before it in its lane, and for the operations
in `after`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

# The operations, in the order in which a serial step runs them.
PREFETCH = "PREFETCH"  # read a batch, split it into micro-batches, pinned memory
H2D = "H2D"  # dense inputs and labels to the device
ROUTE = "ROUTE"  # deduplicate keys, bucket them by owner, exchange them
RETRIEVE = "RETRIEVE"  # the owner finds or creates rows; those of a lower tier go into a buffer
SYNC = "SYNC"  # rows that the batch before also used: from its buffer into this one's
EMB = "EMB"  # rows to the workers that asked for them
FWD = "FWD"  # the user's model, one micro-batch
BWD = "BWD"
REDUCE = "REDUCE"  # the rest of the sum of dense gradients over workers, which the last BWD begins
AGREE = "AGREE"  # sum of losses, weights and troubles over workers
GRAD = "GRAD"  # gradients to the owners
UPDATE = "UPDATE"  # the owner's row optimizers, once, on the sums
DENSE = "DENSE"  # the dense optimizer, once
WRITEBACK = "WRITEBACK"  # updated rows to their tier

ORDER = (PREFETCH, H2D, ROUTE, RETRIEVE, SYNC, EMB, FWD, BWD, REDUCE, AGREE, GRAD, UPDATE, DENSE, WRITEBACK)

# Which process group an operation uses.
GROUPS = {ROUTE: "keys", EMB: "rows", AGREE: "rows", GRAD: "rows", BWD: "dense", REDUCE: "dense"}

# The lane that must never starve; it is the thread that called `fit`.
COMPUTE = "compute"


class Op(NamedTuple):
    """One operation on one batch. `part` tells several of a kind apart: the micro-batches of FWD and BWD, and of EMB and
    GRAD where rows travel micro-batch by micro-batch; two SYNCs."""

    name: str
    batch: int
    part: int = 0

    @property
    def meets(self) -> bool:
        """Whether it waits for other workers and does little else."""
        return self.name in GROUPS and self.name != BWD

    def __str__(self) -> str:
        return f"{self.name}({self.batch})" if self.part == 0 else f"{self.name}({self.batch},{self.part})"


class Task(NamedTuple):
    op: Op
    lane: str
    after: tuple[Op, ...] = ()

    def at(self, t: int) -> Task:
        """The same task of step t, of one of step 0."""
        after = tuple(Op(name, batch + t, part) for name, batch, part in self.after)
        return Task(self.op._replace(batch=self.op.batch + t), self.lane, after)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """name, summary: for people.
    step: yields the tasks of step t, in order.
    stale_by: by how many updates a row that a batch reads may be behind; 0 is exactly synchronous training. The
        checker holds the schedule to what it says here.
    """

    name: str
    summary: str
    step: Callable[[int], Iterable[Task]]
    stale_by: int = 0

    @functools.cached_property
    def tasks(self) -> list[Task]:
        """The tasks of one step, with batches relative to it."""
        return list(self.step(0))

    @property
    def look_ahead(self) -> int:
        """How many batches after t step t works on."""
        return max(task.op.batch for task in self.tasks)

    @property
    def behind(self) -> int:
        """How many batches before t step t still works on."""
        return -min(task.op.batch for task in self.tasks)

    @property
    def lanes(self) -> list[str]:
        return list(dict.fromkeys(task.lane for task in self.tasks))

    @property
    def micro_batches(self) -> int:
        return self.num_parts(FWD)

    def num_parts(self, name: str) -> int:
        """In how many parts an operation is done on each batch."""
        return self._last_parts.get(name, 0) + 1

    @functools.cached_property
    def _last_parts(self) -> dict[str, int]:
        last: dict[str, int] = {}
        for task in self.tasks:
            last[task.op.name] = max(task.op.part, last.get(task.op.name, 0))
        return last

    def unroll(self, first: int, last: int | None = None) -> Iterator[Task]:
        """The tasks of batches `first` to `last` (exclusive), with the filling and the emptying of the pipeline."""
        steps = itertools.count(first - self.look_ahead)
        if last is not None:
            steps = itertools.takewhile(lambda t: t < last + self.behind, steps)  # type: ignore[assignment]
        for t in steps:
            for task in self.step(t):
                if task.op.batch >= first and (last is None or task.op.batch < last):
                    yield task

    def __str__(self) -> str:
        """One line a lane: what it does in step t; of many micro-batches the first two and the last."""
        width = max(len(lane) for lane in self.lanes)
        lines = []
        for lane in self.lanes:
            words = []
            for op in (task.op for task in self.tasks if task.lane == lane):
                parts = self.num_parts(op.name)
                shown = relative(op) if parts == 1 else f"{relative(op._replace(part=0))[:-1]},{op.part})"
                words.append("..." if 1 < op.part < parts - 1 else shown)
            lines.append(f"{lane:{width}}  " + " ".join(word for word, _ in itertools.groupby(words)))
        return "\n".join(lines)


def relative(op: Op) -> str:
    """An operation of a step as text: batch 0 is t."""
    batch = "t" if op.batch == 0 else f"t{op.batch:+d}"
    return f"{op.name}({batch})" if op.part == 0 else f"{op.name}({batch},{op.part})"
