"""The checker: proves from a schedule alone that it equals serial training, or says what is missing.

Two steps. First, *no race*: whenever two operations touch the same thing and one of them writes it, the schedule must
order them. Then all runs of the schedule are alike, whatever the timing, and one of them can stand for all. So, second,
*one run*: follow a row through it, for every way in which neighbouring batches may use the row, and see which updates
each read has in it. See docs/consistency.md.
"""

from __future__ import annotations

import collections
import dataclasses
import graphlib
import itertools
import re
from collections.abc import Collection, Iterator

from nestpipe.schedule.ops import (
    AVERAGE,
    BWD,
    EMB,
    FWD,
    GRAD,
    MERGE,
    OPERATIONS,
    PREFETCH,
    RETRIEVE,
    SYNC,
    UPDATE,
    WRITEBACK,
    Op,
    Schedule,
    Task,
    relative,
)

USES = 5  # neighbouring batches over which every pattern of use of a row is tried
MICRO_BATCHES = 8  # of more than these, the first seven and the last are looked at


class ScheduleError(ValueError):
    """The schedule cannot be run as it says of itself."""


@dataclasses.dataclass
class Verdict:
    """problems: why the schedule must not be run, one sentence each; empty if it may.
    stale_by: by how many updates a row that a batch reads can be behind.
    in_flight: how many batches can be on their way at once.
    """

    problems: list[str]
    stale_by: int = 0
    in_flight: int = 0


def require(schedule: Schedule, needed: Collection[str] = ()) -> Verdict:
    """The verdict; raises ScheduleError if there is a problem, or rows are staler than the schedule says of itself.
    needed: operations that it may else do without."""
    verdict = check(schedule)
    problems = list(verdict.problems)
    problems += [f"no {name}(t): {OPERATIONS[name].lack}" for name in needed if not schedule.has(name)]
    if verdict.stale_by > schedule.stale_by:
        problems.append(f"batches read rows that are stale by {verdict.stale_by}, not {schedule.stale_by} as it says")
    if problems:
        raise ScheduleError(f"schedule {schedule.name!r}: " + "; ".join(problems))
    return verdict


def check(schedule: Schedule) -> Verdict:
    schedule = _thinned(schedule)
    # Long enough that its middle is free of the filling and emptying of the pipeline.
    num_batches = 2 * (schedule.look_ahead + schedule.behind) + USES + 2
    tasks = list(schedule.unroll(0, num_batches))
    problems = list(_missing(tasks, num_batches, schedule))
    if problems:
        return Verdict(problems)
    problems += _lanes_per_group(tasks)
    graph = _graph(tasks)
    try:
        run = list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        circle = " -> ".join(str(op) for op in reversed(error.args[1]))
        return Verdict([*problems, f"cycle: {circle}: none of them can ever start"])
    before = _Order(graph, {op: i for i, op in enumerate(run)})
    in_flight = _in_flight(before, num_batches, schedule)
    if in_flight is None:
        problems.append(
            f"unbounded: nothing keeps {PREFETCH}(t) from running far ahead; let it wait for {WRITEBACK}(t-k), with a k"
        )
    problems += _races(tasks, graph, before, schedule) or _read_too_early(run, schedule)
    if problems:
        return Verdict(problems, in_flight=in_flight or 0)
    first = schedule.look_ahead + schedule.behind
    stale_by = 0
    for bits in itertools.product((False, True), repeat=USES):
        users = {first + i for i, used in enumerate(bits) if used}
        for follow in (_follow_in_place, _follow_buffers):
            worst, trouble = follow(run, users)
            stale_by = max(stale_by, worst)
            problems += [text for text in trouble if text not in problems]
    return Verdict(problems[:3], stale_by, in_flight or 0)


# -- what is there -----------------------------------------------------------------------------------------------------


def _thinned(schedule: Schedule) -> Schedule:
    """The schedule with fewer micro-batches. A schedule treats all but the first and the last of them alike, so those in
    the middle show nothing new, and a proof that takes their number squared need not be taken over hundreds."""
    count = schedule.micro_batches
    if count <= MICRO_BATCHES:
        return schedule

    def kept(op: Op) -> Op | None:
        if op.part < MICRO_BATCHES - 1:
            return op
        return op._replace(part=MICRO_BATCHES - 1) if op.part == count - 1 else None

    def step(t: int) -> Iterator[Task]:
        for task in schedule.step(t):
            op = kept(task.op)
            if op is not None:
                yield Task(op, task.lane, tuple(after for after in map(kept, task.after) if after is not None))

    return dataclasses.replace(schedule, step=step)


def _missing(tasks: list[Task], num_batches: int, schedule: Schedule) -> Iterator[str]:
    """Every batch needs every operation: FWD and BWD once per micro-batch, EMB and GRAD once or once per micro-batch, none
    twice."""
    times = collections.Counter(task.op for task in tasks)
    for op in sorted(op for op, count in times.items() if count > 1):
        yield f"{op.name}(t) is there twice"
    for name in sorted({op.name for op in times} - set(OPERATIONS)):
        yield f"no operation is called {name!r}; there are {', '.join(OPERATIONS)}"
    middle, micro_batches = num_batches // 2, schedule.micro_batches
    present = {op.name for op in times}
    for name, operation in OPERATIONS.items():
        if operation.optional and name not in present:
            continue
        parts = {"always": micro_batches, "may": schedule.num_parts(name), "never": 1}[operation.cut]
        if parts not in (1, micro_batches):
            yield f"{name} has {parts} parts and there are {micro_batches} micro-batches; give it one part or one for each"
        for part in range(parts):
            if Op(name, middle, part) not in times:
                why = ": rows that batches t-1 and t share never reach the buffer of t" if name == SYNC else ""
                yield f"no {name}(t{f',{part}' if part else ''}){why}"
    for name in (GRAD, *({MERGE} & present)):
        if schedule.num_parts(EMB) != schedule.num_parts(name):
            yield f"{EMB} and {name} do not have the same parts: rows and gradients travel over one window"
    for task in tasks:
        for op in task.after:
            if 0 <= op.batch < num_batches and op not in times:
                yield f"{task.op} waits for {op}, which no step has"


def _lanes_per_group(tasks: list[Task]) -> Iterator[str]:
    """One lane per process group: then its collectives have one order, the same on every worker."""
    lanes: dict[str, dict[str, str]] = {}
    for task in tasks:
        for group in OPERATIONS[task.op.name].groups:
            lanes.setdefault(group, {}).setdefault(task.lane, task.op.name)
    for group, users in lanes.items():
        if len(users) > 1:
            text = " and ".join(f"{name} on lane {lane}" for lane, name in users.items())
            yield f"collectives of group {group} have no single order: {text}; put them on one lane"


# -- what is ordered ---------------------------------------------------------------------------------------------------


def _graph(tasks: list[Task]) -> dict[Op, set[Op]]:
    """Each operation with those that it waits for: in its lane, and by `after`."""
    present = {task.op for task in tasks}
    last_of: dict[str, Op] = {}
    graph: dict[Op, set[Op]] = {}
    for task in tasks:
        graph[task.op] = {op for op in task.after if op in present}
        if task.lane in last_of:
            graph[task.op].add(last_of[task.lane])
        last_of[task.lane] = task.op
    return graph


class _Order:
    """Whether one operation surely ends before another starts. number: any numbering of the operations."""

    def __init__(self, graph: dict[Op, set[Op]], number: dict[Op, int]) -> None:
        self.ops, self.number = list(number), number
        self._ancestors: dict[Op, int] = {}  # bit sets
        for op in graphlib.TopologicalSorter(graph).static_order():
            bits = 0
            for earlier in graph[op]:
                bits |= self._ancestors[earlier] | 1 << number[earlier]
            self._ancestors[op] = bits
        self._descendants = dict.fromkeys(graph, 0)
        for op in reversed(self._ancestors):
            for earlier in graph[op]:
                self._descendants[earlier] |= self._descendants[op] | 1 << number[op]

    def __call__(self, a: Op, b: Op) -> bool:
        return bool(self._ancestors[b] >> self.number[a] & 1)

    def loose(self, op: Op, others: int) -> Iterator[Op]:
        """Those of a set that are neither before nor after an operation."""
        rest = others & ~(self._ancestors[op] | self._descendants[op] | 1 << self.number[op])
        while rest:
            lowest = rest & -rest
            yield self.ops[lowest.bit_length() - 1]
            rest ^= lowest


def _in_flight(before: _Order, num_batches: int, schedule: Schedule) -> int | None:
    """How many batches may be between the start of their first operation and the end of their last; None: no bound."""
    newest = num_batches - 1
    for back in range(1, num_batches - schedule.behind):
        if before(Op(WRITEBACK, newest - back), Op(PREFETCH, newest)):
            return back
    return None


# -- what is touched ---------------------------------------------------------------------------------------------------


_THING = re.compile(
    r"(?P<name>[^\[]+)(\[t(?P<before>-1)?(?P<one_of_two> mod 2)?(, (?P<parts>m|all|up to m|from m))?\])?"
)


def _touched(op: Op, schedule: Schedule) -> Iterator[tuple[object, bool]]:
    """What an operation touches, as the table of operations has it, and whether it writes it."""
    operation = OPERATIONS[op.name]
    for text in operation.reads:
        yield from ((thing, False) for thing in _things(text, op, schedule))
    for text in operation.writes:
        yield from ((thing, True) for thing in _things(text, op, schedule))


def _things(text: str, op: Op, schedule: Schedule) -> Iterator[object]:
    match = _THING.fullmatch(text)
    assert match is not None, f"{op.name} touches {text!r}: not a word of schedule/ops.py"
    name, batch = match["name"], op.batch - (match["before"] is not None)
    if "[" not in text:
        yield name
    elif match["parts"] is None:
        yield name, batch % 2 if match["one_of_two"] else batch
    else:
        every = range(schedule.micro_batches)
        own = every[op.part : op.part + 1] if schedule.num_parts(op.name) > 1 else every
        several = {"m": own, "all": every, "up to m": every[: op.part + 1], "from m": every[op.part :]}
        yield from ((name, batch, part) for part in several[match["parts"]])


def _races(tasks: list[Task], graph: dict[Op, set[Op]], before: _Order, schedule: Schedule) -> list[str]:
    """What is touched by two operations, one of them writing, without an order: the edges that would mend it.

    One missing edge leaves many pairs without order. So the nearest pair is taken as the missing edge, it is added, and
    what is still without order after that is looked at again.
    """
    touching: dict[object, int] = collections.defaultdict(int)  # bit sets
    writing: dict[object, set[Op]] = collections.defaultdict(set)
    for task in tasks:
        for thing, writes in _touched(task.op, schedule):
            touching[thing] |= 1 << before.number[task.op]
            if writes:
                writing[thing].add(task.op)
    place = {op: i for i, op in enumerate(sorted(graph, key=_serial_place))}
    missing: list[str] = []
    graph = {op: set(earlier) for op, earlier in graph.items()}
    while True:
        loose = {
            (min(a, b, key=place.__getitem__), max(a, b, key=place.__getitem__)): thing
            for thing, users in touching.items()
            for a in writing[thing]
            for b in before.loose(a, users)
            if not _apart(thing, a, b)
        }
        if not loose:
            return missing
        first, then = min(loose, key=lambda pair: (place[pair[1]] - place[pair[0]], place[pair[0]]))
        thing = loose[first, then]
        name = thing if isinstance(thing, str) else thing[0]  # type: ignore[index]
        edge = f"{relative(first, then.batch)} -> {relative(then, then.batch)}"
        missing.append(f"missing edge {edge}: both touch the {name}, and nothing orders them")
        for op in graph:
            other = first._replace(batch=op.batch + first.batch - then.batch)
            if op._replace(batch=0) == then._replace(batch=0) and other in graph:
                graph[op].add(other)
        try:
            before = _Order(graph, before.number)
        except graphlib.CycleError:
            return missing


def _read_too_early(run: list[Op], schedule: Schedule) -> list[str]:
    """What belongs to one batch is complete before it is read: none of it is written after that (but given up by WRITEBACK)."""
    reader: dict[object, Op] = {}
    found: dict[str, None] = {}  # in order, each once
    for op in run:
        touched = [(thing, writes) for thing, writes in _touched(op, schedule) if _of_a_batch(thing)]
        for thing, writes in touched:
            if writes and thing in reader and op.name != WRITEBACK:
                early = relative(reader[thing], op.batch)
                found[f"{early} reads the {thing[0]} before {relative(op, op.batch)} has written it"] = None  # type: ignore[index]
        for thing, writes in touched:
            if not writes:
                reader.setdefault(thing, op)
    return list(found)


def _of_a_batch(thing: object) -> bool:
    """Not one of two buffers, and nothing that outlives a batch."""
    return isinstance(thing, tuple) and thing[0] != "buffer"


def _apart(thing: object, a: Op, b: Op) -> bool:
    """Whether two operations touch different rows of a thing, so that their order does not matter."""
    batch = {a.name: a.batch, b.name: b.batch}
    if RETRIEVE not in batch or a.name == b.name:
        return False
    if thing == "tier":
        # Rows that batch t-1 uses too are not read from the tier: SYNC brings them.
        return batch[RETRIEVE] == batch[WRITEBACK] + 1
    if thing == "given up rows":
        # A row that RETRIEVE(t) gives up is idle in batch t; its place is used again by RETRIEVE(t+1) at the earliest.
        (other,) = batch.keys() - {RETRIEVE}
        return batch[other] >= batch[RETRIEVE] - 1
    return False


def _serial_place(op: Op) -> tuple[int, int, int]:
    order = list(OPERATIONS)
    if op.name in (FWD, BWD):  # micro-batch by micro-batch
        return op.batch, order.index(FWD), 2 * op.part + (op.name == BWD)
    return op.batch, order.index(op.name), op.part


# -- one row, followed through one run ---------------------------------------------------------------------------------

Updates = tuple[int, ...]  # the batches whose updates a copy of the row has in it, in order


def _update_of(run: list[Op]) -> str:
    """After which operation a row is as the next batch must read it."""
    return AVERAGE if any(op.name == AVERAGE for op in run) else UPDATE


def _follow_in_place(run: list[Op], users: set[int]) -> tuple[int, list[str]]:
    """A row of a table in memory, used where it lies."""
    row: Updates = ()
    update = _update_of(run)
    stale, trouble = 0, []
    for op in run:
        if op.batch not in users:
            continue
        if op.name == EMB:
            stale = max(stale, _behind(row, users, op.batch))
        elif op.name == update:
            row = (*row, op.batch)
    if row != tuple(sorted(users)):
        trouble.append(f"updates of a row in memory are applied in the order {row}")
    return stale, trouble


def _follow_buffers(run: list[Op], users: set[int]) -> tuple[int, list[str]]:
    """A row of a table in a lower tier, used through two buffers. A copy is None where a buffer holds nothing of it."""
    tier: Updates = ()
    update = _update_of(run)
    buffers: list[tuple[int, Updates] | None] = [None, None]  # of which batch, and the row
    stale, trouble = 0, []

    def held(op: Op, batch: int) -> Updates | None:
        copy = buffers[batch % 2]
        if copy is None or copy[0] != batch:
            trouble.append(f"{op.name}(t) finds nothing of batch t{batch - op.batch:+d} in its buffer")
            return None
        return copy[1]

    for op in run:
        here, before = op.batch in users, op.batch - 1 in users
        if op.name == RETRIEVE:
            # Also for a batch that does not use the row: the buffer is that batch's from now on.
            buffers[op.batch % 2] = (op.batch, tier) if here and not before else None
        if not here:
            continue
        if op.name == SYNC and before:
            copy = held(op, op.batch - 1)
            buffers[op.batch % 2] = None if copy is None else (op.batch, copy)
        elif op.name == EMB:
            copy = held(op, op.batch)
            stale = max(stale, 0 if copy is None else _behind(copy, users, op.batch))
        elif op.name == update:
            copy = held(op, op.batch)
            buffers[op.batch % 2] = None if copy is None else (op.batch, (*copy, op.batch))
        elif op.name == WRITEBACK:
            tier = held(op, op.batch) or tier
    if tier != tuple(sorted(users)):
        trouble.append(f"the tier ends with the updates {tier} of {tuple(sorted(users))}")
    return stale, trouble


def _behind(row: Updates, users: set[int], batch: int) -> int:
    return sum(1 for user in users if user < batch and user not in row)
