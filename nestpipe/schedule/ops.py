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

PREFETCH, H2D, ROUTE, RETRIEVE, SYNC, EMB, FWD = "PREFETCH", "H2D", "ROUTE", "RETRIEVE", "SYNC", "EMB", "FWD"
BWD, REDUCE, AGREE, GRAD, UPDATE, DENSE, WRITEBACK = "BWD", "REDUCE", "AGREE", "GRAD", "UPDATE", "DENSE", "WRITEBACK"
# Only in runs that need them, see optional.py.
DEAL, MERGE, AVERAGE = "DEAL", "MERGE", "AVERAGE"
SHARE, COMPARE, UNSHARE = SHARING = "SHARE", "COMPARE", "UNSHARE"

# What an operation's time counts as, on every page: bringing rows to their owners' hands, exchange with other workers
# that training waits for, or the training itself.
LOOKUP, COMMUNICATION, COMPUTING = "lookup", "communication", "compute"


@dataclasses.dataclass(frozen=True)
class Operation:
    """What one operation is. The engine runs it (engine/step.py); all others read here what they need to know of it.

    kind: LOOKUP, COMMUNICATION or COMPUTING. meaning: for people.
    unit: of what it does how much; its cost in a profile is per unit (simulate/costs.py counts them).
    colour: in pictures.
    group: of which process group (or groups) it issues collectives: one lane uses each group, so that all workers have one order.
    collective: what it waits for other workers with: "all_to_all", "all_reduce", or None: it waits for nobody.
    cut: whether it is done micro-batch by micro-batch: "always", "never", or "may": once for all of them, or for each.
    behind: of an operation that a schedule may do without (or with, on every batch): which one it is put behind; if that
        one is done for every micro-batch and this one is not, behind the last of them.
    lack: of such a one: what is wrong with a run that needs it and does not have it.
    reads, writes: what it touches, for the checker. "tier": one thing, whatever the batch. "routes[t]": of its batch;
        "positions[t-1]": of the one before. "buffer[t mod 2]": one of two. "vectors[t, m]": of its micro-batch, or of all if it
        is done once for all of them; "[t, all]", "[t, up to m]", "[t, from m]": of several.
    """

    name: str
    kind: str
    meaning: str
    unit: str
    colour: str
    group: str | tuple[str, ...] | None = None
    collective: str | None = None
    cut: str = "never"
    behind: str = ""
    lack: str = ""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    @property
    def groups(self) -> tuple[str, ...]:
        return self.group if isinstance(self.group, tuple) else (self.group,) if self.group else ()

    @property
    def optional(self) -> bool:
        return bool(self.behind)


# The one list of operations, in the order in which a serial step runs them.
_TABLE = (
    Operation(
        PREFETCH,
        LOOKUP,
        "takes the next batch and deals its samples to micro-batches",
        unit="sample",
        colour="#8c8c3f",
        writes=("batch[t]", "source of data"),
    ),
    Operation(
        DEAL,
        LOOKUP,
        "deals the samples of all workers anew, so that all have as much to compute",
        unit="byte of inputs",
        colour="#b08f5a",
        group="samples",
        collective="all_to_all",
        behind=PREFETCH,
        lack="workers would compute on what they have read, and wait for the one that has most",
        writes=("batch[t]",),
    ),
    Operation(
        H2D,
        LOOKUP,
        "keys, dense inputs and labels to the device",
        unit="byte of inputs",
        colour="#c9a227",
        reads=("batch[t]",),
        writes=("inputs[t]",),
    ),
    Operation(
        ROUTE,
        LOOKUP,
        "deduplicates keys, sends them to the owners of their rows",
        unit="key",
        colour="#8e5ea2",
        group="keys",
        collective="all_to_all",
        reads=("inputs[t]",),
        writes=("routes[t]",),
    ),
    Operation(
        RETRIEVE,
        LOOKUP,
        "owners find or create the rows; those of a lower tier go into a buffer",
        unit="row of the owner",
        colour="#e07b29",
        # positions[t-1]: to know which rows SYNC will bring. Births may take the places of rows that were given up.
        reads=("routes[t]", "tier", "positions[t-1]"),
        writes=("keys that have rows", "positions[t]", "buffer[t mod 2]", "given up rows", "gradients[t, all]"),
    ),
    Operation(
        SYNC,
        LOOKUP,
        "rows that the batch before used too, from its buffer into this one's",
        unit="row of two batches",
        colour="#1fa187",
        reads=("positions[t]", "buffer[t-1 mod 2]"),
        writes=("buffer[t mod 2]",),
    ),
    Operation(
        EMB,
        COMMUNICATION,
        "rows to the workers that asked for them",
        unit="byte of rows",
        colour="#4fb8d6",
        group="rows",
        collective="all_to_all",
        cut="may",
        reads=("positions[t]", "buffer[t mod 2]", "rows in memory", "given up rows"),
        writes=("vectors[t, m]",),  # of rows that m is the first to use
    ),
    Operation(
        FWD,
        COMPUTING,
        "the model, forward",
        unit="forward operation",
        colour="#2f6fb4",
        group="statistics",  # of batch norms, if the model has any
        cut="always",
        reads=("vectors[t, up to m]", "dense weights"),
        writes=("output[t, m]", "losses and troubles[t]"),
    ),
    Operation(
        SHARE,
        COMMUNICATION,
        "what all samples of all workers are compared with, to all of them",
        unit="byte of shared vectors",
        colour="#5b9bb5",
        group="shared",
        collective="all_to_all",
        behind=FWD,
        lack="each worker would compare its samples with its own ones only",
        reads=("output[t, all]",),
        writes=("shared[t]", "losses and troubles[t]"),
    ),
    Operation(
        COMPARE,
        COMPUTING,
        "losses of this worker's samples among those of all, and their gradients",
        unit="pair of samples",
        colour="#274b8f",
        behind=SHARE,
        lack="there would be no loss",
        reads=("output[t, all]", "shared[t]", "dense weights"),
        writes=("shared gradients[t]", "dense gradients", "losses and troubles[t]"),
    ),
    Operation(
        UNSHARE,
        COMMUNICATION,
        "gradients of what was shared, to the workers that have shared it",
        unit="byte of shared vectors",
        colour="#6fae8d",
        group="shared",
        collective="all_to_all",
        behind=COMPARE,
        lack="no sample would learn from those that were compared with it",
        reads=("shared gradients[t]",),
        writes=("unshared[t]",),
    ),
    Operation(
        BWD,
        COMPUTING,
        "the model, backward; the last one begins the sum of dense gradients",
        unit="backward operation",
        colour="#1d3f78",
        group=("dense", "statistics"),
        cut="always",
        # vectors: of streamed features, once more
        reads=("output[t, m]", "unshared[t]", "dense weights", "vectors[t, up to m]"),
        # Gradients that are not finite are a trouble; [from m]: of rows that those are the last to use.
        writes=("dense gradients", "losses and troubles[t]", "gradients[t, from m]"),
    ),
    Operation(
        REDUCE,
        COMMUNICATION,
        "waits for the sum of dense gradients over workers",
        unit="byte of dense gradients",
        colour="#b7c36b",
        group="dense",
        collective="all_reduce",
        writes=("dense gradients",),
    ),
    Operation(
        AGREE,
        COMMUNICATION,
        "sums losses, weights and troubles over workers",
        unit="step",
        colour="#7f7f7f",
        group="rows",
        collective="all_reduce",
        reads=("losses and troubles[t]", "learning rates"),  # UPDATE applies those of now, however late it comes
        writes=("agreed[t]",),
    ),
    Operation(
        GRAD,
        COMMUNICATION,
        "gradients of rows to their owners",
        unit="byte of gradients",
        colour="#3a9a4f",
        group="rows",
        collective="all_to_all",
        cut="may",
        reads=("gradients[t, m]",),
        writes=("returned[t, m]",),
    ),
    Operation(
        MERGE,
        COMMUNICATION,
        "sums of row gradients to the other replicas of the rows",
        unit="byte of sums",
        colour="#6d9f71",
        group="rows",
        collective="all_to_all",
        cut="may",
        behind=GRAD,
        lack="replicas of tables would drift apart",
        reads=("routes[t]", "returned[t, up to m]"),  # of rows whose last gradient has come with m
        writes=("merged[t, m]",),
    ),
    Operation(
        UPDATE,
        COMPUTING,
        "row optimizers, once, where the rows are",
        unit="row of the owner",
        colour="#c0392b",
        reads=("agreed[t]", "returned[t, all]", "merged[t, all]"),
        writes=("buffer[t mod 2]", "rows in memory", "given up rows", "updated[t]"),
    ),
    Operation(
        AVERAGE,
        COMMUNICATION,
        "rows and their optimizer state averaged over replicas, every so many steps",
        unit="byte of records",
        colour="#a5573f",
        group="rows",
        collective="all_to_all",
        behind=UPDATE,
        lack="replicas of tables would drift apart",
        reads=("agreed[t]", "positions[t]", "updated[t]"),
        writes=("buffer[t mod 2]", "rows in memory", "given up rows"),
    ),
    Operation(
        DENSE,
        COMPUTING,
        "the dense optimizer, once",
        unit="byte of dense gradients",
        colour="#d98880",
        reads=("agreed[t]",),
        writes=("dense gradients", "dense weights", "learning rates"),  # a step has ended: the user may set them
    ),
    Operation(
        WRITEBACK,
        LOOKUP,
        "updated rows to the tier where they are kept",
        unit="row of the owner",
        colour="#8c564b",
        reads=("buffer[t mod 2]",),
        writes=("agreed[t]", "tier"),  # the batch is given up
    ),
)
OPERATIONS = {operation.name: operation for operation in _TABLE}


def in_order(names: Iterable[str]) -> list[str]:
    """As the table has them; those that it does not have (of a trace that another version recorded) behind, by name."""
    wanted = set(names)
    return [*(name for name in OPERATIONS if name in wanted), *sorted(wanted - OPERATIONS.keys())]


def of_kind(kind: str) -> tuple[str, ...]:
    return tuple(name for name, operation in OPERATIONS.items() if operation.kind == kind)


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
        return self.name in OPERATIONS and OPERATIONS[self.name].collective is not None

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

    def has(self, name: str) -> bool:
        """Whether an operation is done on each batch."""
        return name in self._last_parts

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


def relative(op: Op, origin: int = 0) -> str:
    """An operation as text: batch `origin` is t."""
    batch = "t" if op.batch == origin else f"t{op.batch - origin:+d}"
    return f"{op.name}({batch})" if op.part == 0 else f"{op.name}({batch},{op.part})"
