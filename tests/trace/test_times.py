"""Traces against brute force, against figures known beforehand, and against broken files."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from nestpipe.schedule.ops import OPERATIONS
from nestpipe.trace import COMPUTE, Event, RankTrace, clear, draw, read, report, save, summary, to_chrome
from nestpipe.trace.times import covered, steady_steps, union

MS = 1_000_000
LANES = ["data", "copy", "keys", "store", "compute"]
STAGES = [("data", "PREFETCH", 9.0), ("copy", "H2D", 1.0), ("keys", "ROUTE", 6.0),
          ("store", "RETRIEVE", 22.0)]  # fmt: skip
STEP = [("SYNC", None, 1.5), ("EMB", None, 4.0), ("FWD", 0, 7.0), ("FWD", 1, 7.0), ("BWD", 0, 9.0), ("BWD", 1, 9.0),
        ("AGREE", None, 0.2), ("GRAD", None, 2.0), ("UPDATE", None, 1.0), ("REDUCE", None, 1.0),
        ("DENSE", None, 1.0)]  # fmt: skip
WRITEBACK_MS = 4.0


def make_trace(*, schedule="dbp", steps=20, rank=0, world=1, noise=0.0, retrieve_ms=22.0, wall_ns=0) -> RankTrace:
    """What an engine would record: dbp overlaps five lanes, serial runs all in one."""
    draws = np.random.default_rng(rank)
    lanes = [COMPUTE] if schedule == "serial" else LANES
    free = dict.fromkeys(lanes, 1000 * MS)
    events: list[Event] = []

    def run(lane: str, op: str, batch: int, part: int | None, ms: float, after: int) -> int:
        lane = COMPUTE if schedule == "serial" else lane
        start = max(free[lane], after)
        end = start + round(ms * (1 + noise * draws.random()) * MS)
        free[lane] = end
        events.append(Event(lanes.index(lane), op, batch, part, start, end))
        return end

    ready, done = [0] * steps, [0] * (steps + 1)  # when a batch's rows are there, and when the batch is done

    def stages(batch: int) -> None:
        ready[batch] = done[max(batch - 3, 0)]
        for lane, op, ms in STAGES:
            ready[batch] = run(lane, op, batch, None, retrieve_ms if op == "RETRIEVE" else ms, ready[batch])

    ahead = 0 if schedule == "serial" else 1
    for batch in range(ahead):
        stages(batch)
    for batch in range(steps):
        if batch + ahead < steps:
            stages(batch + ahead)  # the store retrieves batch t + 1 before it writes batch t back
        done[batch + 1] = ready[batch]
        for op, part, ms in STEP:
            done[batch + 1] = run(COMPUTE, op, batch, part, ms, done[batch + 1])
        run("store", "WRITEBACK", batch, None, WRITEBACK_MS, done[batch + 1])
    text = "\n".join(f"{lane:8}..." for lane in lanes)
    return RankTrace(rank, world, schedule, text, list(lanes), wall_ns, events)


# Files


def test_a_trace_reads_back_as_it_was_saved(tmp_path):
    traces = [make_trace(rank=rank, world=3, noise=0.2) for rank in range(3)]
    for trace in reversed(traces):
        save(tmp_path, trace)
    assert read(tmp_path) == traces
    assert sorted(path.name for path in (tmp_path / "trace").iterdir()) == [f"rank-{rank}.json" for rank in range(3)]


def test_a_trace_of_plain_tuples_reads_back_as_events(tmp_path):
    trace = make_trace(steps=2)
    save(tmp_path, dataclasses.replace(trace, events=[tuple(event) for event in trace.events]))
    assert read(tmp_path) == [trace]


def test_a_run_without_a_trace_says_how_to_record_one(tmp_path):
    with pytest.raises(ValueError, match=r"nestpipe train \.\.\. --trace"):
        read(tmp_path)


def test_a_truncated_file_is_named(tmp_path):
    path = save(tmp_path, make_trace())
    path.write_text(path.read_text()[:-200])
    with pytest.raises(ValueError, match=r"rank-0\.json is cut short"):
        read(tmp_path)


def test_missing_ranks_are_named(tmp_path):
    for rank in (0, 2):
        save(tmp_path, make_trace(rank=rank, world=4))
    with pytest.raises(ValueError, match="no trace of rank 1, 3 of 4"):
        read(tmp_path)


def test_traces_of_different_runs_are_refused(tmp_path):
    save(tmp_path, make_trace(rank=0, world=2))
    save(tmp_path, make_trace(rank=1, world=2, schedule="serial"))
    with pytest.raises(ValueError, match=r"schedule is dbp \(rank 0\), serial \(rank 1\)"):
        read(tmp_path)
    clear(tmp_path)
    save(tmp_path, make_trace(rank=0, world=1))
    assert len(read(tmp_path)) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 2, this nestpipe reads format 1"),
        ({"lanes": ["data"]}, "have no 'compute'"),
        ({"schedule": None}, "'schedule' must be of type str"),
        ({"rank": 1}, "says it is of rank 1 of 1"),
        ({"events": [[9, "FWD", 0, None, 0, 1]]}, "event 0 must be"),
        ({"events": [[0, "FWD", 0, None, 2, 1]]}, "event 0 must be"),
        ({"events": [[0, "FWD", 0, None, 1]]}, "event 0 must be"),
        ({"events": [[0, "FWD", None, None, 0, 1]]}, "event 0 must be"),
        ({"events": [7]}, "event 0 must be"),
    ],
)
def test_a_file_that_is_not_a_trace_says_what_is_wrong(tmp_path, change, message):
    path = save(tmp_path, make_trace(steps=1))
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=message):
        read(tmp_path)


# Figures

intervals = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 9)).map(lambda at: (at[0], at[0] + at[1])), max_size=12
)


def columns(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    start, end = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return start, end


def ticks(pairs: list[tuple[int, int]]) -> set[int]:
    """Brute force: the unit intervals that are covered."""
    return {tick for start, end in pairs for tick in range(start, end)}


@given(intervals, intervals)
def test_union_and_cover_equal_counting_every_tick(mine, others):
    start, end = union(*columns(others))
    assert ticks(list(zip(start.tolist(), end.tolist(), strict=True))) == ticks(others)
    assert (start < end).all() and (start[1:] > end[:-1]).all()
    expected = [len(ticks([pair]) & ticks(others)) for pair in mine]
    assert covered(*columns(mine), (start, end)).tolist() == expected


@st.composite
def random_traces(draw_from) -> RankTrace:
    """Lanes with operations and gaps of any length; compute runs A then DENSE of each batch."""
    lanes = draw_from(st.permutations(["store", "keys", COMPUTE]))
    lengths = st.tuples(st.integers(0, 4), st.integers(0, 5))
    events = []
    for lane, name in enumerate(lanes):
        now = 0
        steps = draw_from(st.lists(lengths, min_size=1, max_size=24))
        for number, (gap, length) in enumerate(steps):
            op = ("A", "DENSE")[number % 2] if name == COMPUTE else draw_from(st.sampled_from("AB"))
            start = now + gap + (name == COMPUTE)  # so that no two steps of compute end together
            now = start + length
            events.append(Event(lane, op, number // 2, None, start, now))
    return RankTrace(0, 1, "random", "", list(lanes), 0, draw_from(st.permutations(events)))


@given(random_traces(), st.integers(0, 3))
def test_busy_idle_and_exposed_equal_counting_every_tick(trace, skip):
    compute = trace.lanes.index(COMPUTE)
    ends = {}
    for event in sorted((e for e in trace.events if e.lane == compute), key=lambda e: e.end_ns):
        ends[event.batch] = event.end_ns  # DENSE is the last of its batch, where it has one
    bounds = [min(event.start_ns for event in trace.events), *ends.values()]
    skipped = min(skip, len(ends) // 4)
    bounds = bounds[skipped : len(bounds) - skipped]
    window = set(range(bounds[0], bounds[-1]))
    steps = len(bounds) - 1

    def busy(lane: int, op: str | None = None) -> set[int]:
        mine = [e for e in trace.events if e.lane == lane and op in (None, e.op)]
        return ticks([(e.start_ns, e.end_ns) for e in mine]) & window

    def same(ms: float, counted: int) -> bool:
        return ms == pytest.approx(counted / steps / 1e6, abs=1e-12)

    [found] = summary([trace], skip=skip)
    assert (found.steps, found.skipped, found.window_ns) == (steps, skipped, (bounds[0], bounds[-1]))
    assert same(found.step_ms * 1, round(float(np.median(np.diff(bounds))) * steps * 2) / 2)
    for lane in found.lanes:
        index = trace.lanes.index(lane.lane)
        hidden = set() if index == compute else busy(compute)
        assert same(lane.busy_ms, len(busy(index))) and same(lane.idle_ms, len(window - busy(index)))
        assert same(lane.exposed_ms, len(busy(index) - hidden))
    for op in found.ops:
        index = trace.lanes.index(op.lane)
        hidden = set() if index == compute else busy(compute)
        of_op = [e for e in trace.events if e.lane == index and e.op == op.op]
        assert same(op.ms, len(busy(index, op.op))) and same(op.exposed_ms, len(busy(index, op.op) - hidden))
        assert op.count == sum(bounds[0] < e.end_ns <= bounds[-1] for e in of_op)
    others = set().union(*(busy(lane) for lane in range(3) if lane != compute))
    assert same(found.exposed_ms, len(others - busy(compute)))


def test_in_a_pipeline_whose_compute_is_longest_nothing_else_is_exposed():
    [found] = summary([make_trace(retrieve_ms=22.0)])
    assert found.step_ms == pytest.approx(42.7) and found.step_over_busiest == pytest.approx(1.0)
    assert found.busiest.lane == COMPUTE and found.exposed_ms == 0.0
    assert found.lane("store").busy_ms == pytest.approx(26.0) and found.lane("store").idle_ms == pytest.approx(16.7)
    assert {op.op: op.ms for op in found.ops}["FWD"] == pytest.approx(14.0)
    assert {op.op: op.count for op in found.ops}["BWD"] == 2 * found.steps


def test_a_lookup_longer_than_compute_is_exposed_by_the_difference():
    [found] = summary([make_trace(retrieve_ms=50.0)])
    assert found.step_ms == pytest.approx(54.0) and found.busiest.lane == "store"
    assert found.lane("store").exposed_ms == pytest.approx(54.0 - 42.7) == found.lane(COMPUTE).idle_ms
    assert found.lane(COMPUTE).exposed_ms == found.lane(COMPUTE).busy_ms == pytest.approx(42.7)


def test_in_a_serial_run_every_operation_is_exposed():
    [found] = summary([make_trace(schedule="serial")])
    assert [lane.lane for lane in found.lanes] == [COMPUTE] and found.lane(COMPUTE).idle_ms == 0.0
    assert all(op.exposed_ms == op.ms for op in found.ops)
    assert {op.op: op.ms for op in found.ops}["RETRIEVE"] == pytest.approx(22.0)


def test_fill_and_drain_are_left_out_only_where_steps_are_enough():
    assert [summary([make_trace(steps=n)])[0].skipped for n in (1, 3, 4, 8, 20, 100)] == [0, 0, 1, 2, 5, 5]
    [whole], [steady] = (summary([make_trace(steps=40)], skip=skip) for skip in (0, 5))
    assert (whole.first_batch, whole.last_batch, steady.first_batch, steady.last_batch) == (0, 39, 5, 34)
    assert whole.exposed_ms == pytest.approx(38.0 / 40) and steady.exposed_ms == 0.0  # the first rows took 38 ms


def test_a_step_ends_with_its_update_even_if_the_compute_lane_writes_back_after_it():
    trace = make_trace(schedule="serial", steps=6)
    updates = [event.end_ns for event in trace.events if event.op == "DENSE"]
    assert steady_steps(trace, skip=0).bounds.tolist() == [trace.events[0].start_ns, *updates]


def test_operations_are_listed_in_the_order_in_which_they_first_ran():
    trace = make_trace(schedule="serial")
    [found] = summary([dataclasses.replace(trace, events=trace.events[::-1])])
    assert [op.op for op in found.ops] == list(dict.fromkeys(event.op for event in trace.events))


def test_without_updates_a_step_ends_with_the_last_operation_of_its_batch_in_the_compute_lane():
    trace = make_trace(steps=6)
    renamed = [event._replace(op="LAST") if event.op == "DENSE" else event for event in trace.events]
    assert summary([dataclasses.replace(trace, events=renamed)])[0].step_ms == summary([trace])[0].step_ms


def test_where_operations_were_dropped_only_steps_recorded_in_all_lanes_count():
    trace = make_trace(steps=40)
    store, late = LANES.index("store"), 20
    kept = [event for event in trace.events if event.lane != store or event.batch >= late]
    [blind] = summary([dataclasses.replace(trace, events=kept)])
    [found] = summary([dataclasses.replace(trace, events=kept, dropped=2 * late)])
    assert blind.lane("store").busy_ms < 20 < found.lane("store").busy_ms == pytest.approx(26.0)
    assert found.first_batch >= late


def test_a_trace_without_a_step_is_refused_and_leaves_no_files(tmp_path):
    save(tmp_path, dataclasses.replace(make_trace(steps=1), events=[]))
    with pytest.raises(ValueError, match="rank 0 has no operation in the lane 'compute'"):
        report(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]
    with pytest.raises(ValueError, match="skip must be at least 0"):
        steady_steps(make_trace(), skip=-1)


# Files to look at


def test_chrome_has_a_process_per_rank_a_thread_per_lane_and_a_slice_per_operation():
    # Machine 1 was switched on an hour earlier: its counter is ahead, its time of day is not.
    hour, now = 3600 * 10**9, 1_790_000_000 * 10**9
    early = make_trace(rank=1, world=2, wall_ns=now - hour + 7)
    early = dataclasses.replace(
        early, events=[e._replace(start_ns=e[4] + hour, end_ns=e[5] + hour) for e in early.events]
    )
    traces = [make_trace(world=2, wall_ns=now), early]
    chrome = json.loads(json.dumps(to_chrome(traces)))
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in chrome["traceEvents"] if e["name"] == "thread_name"}
    assert list(names.values()) == LANES * 2 and len({tid for _, tid in names}) == len(names) and (0, 0) not in names
    processes = [e["args"]["name"] for e in chrome["traceEvents"] if e["name"] == "process_name"]
    assert processes == ["rank 0", "rank 1"]
    for rank, shift in ((0, 0.0), (1, 0.007)):
        slices = [e for e in chrome["traceEvents"] if e["ph"] == "X" and e["pid"] == rank]
        first = traces[0].events[0].start_ns
        assert len(slices) == len(traces[rank].events)
        for slice_, event in zip(slices, traces[0].events, strict=True):
            assert slice_["ts"] == pytest.approx((event.start_ns - first) / 1e3 + shift, abs=1e-6)
            assert slice_["dur"] == pytest.approx((event.end_ns - event.start_ns) / 1e3, abs=1e-6)
            assert slice_["args"].get("part") == event.part and slice_["args"]["batch"] == event.batch
            assert names[rank, slice_["tid"]] == LANES[event.lane]
            assert slice_["cat"] == event.op and slice_["name"].startswith(event.op)


@pytest.mark.parametrize("schedule", ["serial", "dbp"])
def test_the_picture_shows_every_operation_in_its_colour_and_paler_for_every_other_batch(tmp_path, schedule):
    traces = [make_trace(schedule=schedule, rank=rank, world=5) for rank in range(5)]
    draw(traces, tmp_path / "trace.png", steps=2)
    pixels = (imread(tmp_path / "trace.png")[:, :, :3] * 255).round().astype(int)
    assert pixels.shape[1] == 1600 and pixels.shape[0] <= 900
    above_the_legend = set(map(tuple, pixels[:-40].reshape(-1, 3).tolist()))
    for op, operation in OPERATIONS.items():
        if operation.optional:  # this schedule does without
            continue
        colour = operation.colour
        strong = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
        pale = [round(255 * (value / 255 + (1 - value / 255) * 0.42)) for value in strong]
        assert tuple(strong) in above_the_legend and tuple(pale) in above_the_legend, op
    assert [path.name for path in tmp_path.iterdir()] == ["trace.png"]


def test_an_unknown_operation_is_drawn_too_and_a_picture_may_be_longer_than_the_run(tmp_path):
    trace = make_trace(steps=3)
    renamed = [event._replace(op="REDUCE") if event.op == "GRAD" else event for event in trace.events]
    draw([dataclasses.replace(trace, events=renamed)], tmp_path / "trace.png", steps=50)
    assert imread(tmp_path / "trace.png").shape[1] == 1600
    with pytest.raises(ValueError, match="at least 1 step"):
        draw([trace], tmp_path / "trace.png", steps=0)


def test_the_report_names_the_worst_rank_and_ends_with_where_to_look(tmp_path):
    for rank, retrieve_ms in enumerate((22.0, 50.0)):
        save(tmp_path, make_trace(rank=rank, world=2, retrieve_ms=retrieve_ms))
    text = report(tmp_path)
    lines = text.splitlines()
    assert lines[:2] == ["schedule dbp", "data    ..."]
    store = next(line.split() for line in lines if line.startswith("store ") and "ms" in line)
    assert store == [
        "store",
        "40.0",
        "ms",
        "80%",
        "8.4",
        "ms",
        "20%",
        "5.7",
        "ms",
        "10%",
        "1:",
        "exposed",
        "11.3",
        "ms",
    ]
    assert "the compute lane is busy 90% of a step of 48.4 ms; exposed: store 5.7 ms" in text
    assert "a step takes 1.00x its busiest lane" in text
    assert "ui.perfetto.dev" in lines[-1] and (tmp_path / "trace.png").exists()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_the_report_of_a_serial_run_says_that_nothing_is_hidden(tmp_path):
    save(tmp_path, make_trace(schedule="serial"))
    text = report(tmp_path)
    assert "exposed: everything, it is the only lane" in text and "worst rank" not in text


def test_the_report_says_what_the_recorder_dropped_and_when_steps_are_uneven(tmp_path):
    trace = make_trace(steps=20)
    pause = 2000 * MS  # an evaluation between batch 9 and 10
    held_up = [e._replace(start_ns=e[4] + pause, end_ns=e[5] + pause) if e.batch >= 10 else e for e in trace.events]
    save(tmp_path, dataclasses.replace(trace, events=held_up, dropped=1234))
    text = report(tmp_path)
    assert "rank 0: 1,234 operations are missing" in text
    assert "far above the median (42.7 ms)" in text
