"""What a page advises, of made-up traces: that it says so where there is a reason, and nothing where there is none."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from nestpipe.report import advice, replay, write
from nestpipe.report.shares import DATA, PARTS, WAITING, longest_lane, rank_shares, shares
from nestpipe.report.sources import Run, read_all
from nestpipe.schedule.ops import OPERATIONS, Op
from nestpipe.schedule.setting import Setting
from nestpipe.simulate.events import Cost, simulate
from nestpipe.trace import describe, save
from nestpipe.trace.ranks import COLLECTIVES, waits, without_pauses
from tests.report.test_page import Parsed

# Milliseconds of a batch: a step that is almost all compute, with a little of everything else.
TIMES = {"PREFETCH": 0.5, "H2D": 0.2, "ROUTE": 1.0, "RETRIEVE": 1.0, "SYNC": 0.1, "EMB": 1.0, "FWD": 40.0, "BWD": 60.0,
         "REDUCE": 0.5, "AGREE": 0.3, "GRAD": 1.0, "UPDATE": 1.0, "DENSE": 1.0, "WRITEBACK": 0.5}  # fmt: skip


def make_run(
    folder: Path, *, schedule="nested", parts=2, ranks=2, steps=40, config=None, result=None, slow=None, **times
) -> Run:
    """What the engine would record if each operation took TIMES, or as given; slow: {op: (rank, ms more)}. Parts are even."""
    made = Setting(schedule, parts).make()
    took = {name: np.full(ranks, ms) for name, ms in {**TIMES, **times}.items()}
    for name, (rank, more) in (slow or {}).items():
        took[name][rank] += more

    def cost(op: Op) -> Cost:
        seconds = took[op.name] / 1e3 / made.num_parts(op.name)
        return Cost(together=float(seconds.mean())) if op.name in COLLECTIVES else Cost(seconds)

    simulated = simulate(made, cost, steps=steps, counts=np.ones(ranks, np.int64))
    for rank in range(ranks):
        trace = simulated.trace(rank)
        save(folder, dataclasses.replace(trace, schedule=schedule))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if result is not None:
        values = {"schedule": schedule, "micro_batches": parts, "workers": ranks, "steps": steps, "samples": steps * 256,
                  "samples_per_second": 1000.0, "tables": {}, "digest": "00"}  # fmt: skip
        (folder / "result.json").write_text(json.dumps({**values, **result}))
    (run,) = read_all([folder])
    return run


def advised(run: Run) -> list[str]:
    return [item.title for item in advice.advise(run)]


# Waiting told from exchange


def test_a_collective_is_waiting_until_the_last_rank_comes_and_then_exchange(tmp_path):
    run = make_run(tmp_path, schedule="serial", parts=1, slow={"FWD": (1, 20.0)})
    first, second = rank_shares(run)
    assert first[WAITING] == pytest.approx(20.0) and second[WAITING] == pytest.approx(0.0)
    assert second["compute"] - first["compute"] == pytest.approx(20.0)
    assert first["exposed communication"] == pytest.approx(2.8) == second["exposed communication"]
    for parts, rank in zip((first, second), run.ranks, strict=True):
        assert sum(parts[name] for name in PARTS) == pytest.approx(rank.mean_step_ms)
    assert longest_lane(run) == pytest.approx(sum(TIMES.values()) + 20)  # of the rank that is waited for


def test_clocks_of_machines_that_differ_do_not_make_a_slow_rank(tmp_path):
    run = make_run(tmp_path, schedule="serial", parts=1)
    shifted = [dataclasses.replace(trace, wall_ns=3_000_000_000 * trace.rank) for trace in run.traces]
    assert all(wait.max() <= 1000 for wait in waits(shifted))


def test_an_operation_that_not_all_ranks_recorded_is_not_waited_for(tmp_path):
    run = make_run(tmp_path, slow={"FWD": (1, 20.0)})
    first, second = run.traces
    cut = dataclasses.replace(second, events=second.events[len(second.events) // 2 :], dropped=len(second.events) // 2)
    recorded = {(event.op, event.batch, event.part) for event in cut.events}
    for wait, event in zip(waits([first, cut])[0], first.events, strict=True):
        assert wait == 0 or (event.op, event.batch, event.part) in recorded


def test_a_rank_alone_waits_for_nobody(tmp_path):
    run = make_run(tmp_path, ranks=1)
    assert not run.waits[0].any() and shares(run)[WAITING] == 0


def test_pauses_are_cut_out_of_all_ranks_alike(tmp_path):
    run = make_run(tmp_path, slow={"FWD": (1, 20.0)})
    step = run.mean("mean_step_ms")
    end = max(event.end_ns for trace in run.traces for event in trace.events)
    pause = round(20 * step * 1e6)
    twice = [
        dataclasses.replace(
            trace,
            events=[
                *trace.events,
                *(e._replace(batch=e.batch + 40, start_ns=e.start_ns + end + pause, end_ns=e.end_ns + end + pause)
                  for e in trace.events),
            ],
        )
        for trace in run.traces
    ]  # fmt: skip
    shortened, seconds = without_pauses(twice)
    assert seconds == pytest.approx(pause / 1e9, rel=0.01)
    last = max(event.end_ns for trace in shortened for event in trace.events)
    assert last == pytest.approx(2 * end, rel=0.01)
    assert [wait.sum() for wait in waits(shortened)] == [wait.sum() for wait in waits(twice)]
    assert without_pauses(run.traces)[1] == 0


def test_a_hold_up_with_batches_under_way_is_no_pause(tmp_path):
    run = make_run(tmp_path)
    middle = max(event.end_ns for event in run.traces[0].events) // 2
    late = [
        dataclasses.replace(trace, events=[e if e.start_ns < middle else e._replace(start_ns=e.start_ns + 10**9,
                                                                                    end_ns=e.end_ns + 10**9)
                                           for e in trace.events])
        for trace in run.traces
    ]  # fmt: skip
    assert without_pauses(late)[1] == 0


# The advice


def test_a_replay_gives_the_run_as_it_was(tmp_path):
    for schedule, parts in (("serial", 1), ("dbp", 1), ("fwp", 4), ("nested", 4)):
        run = make_run(tmp_path / schedule, schedule=schedule, parts=parts, EMB=10.0, GRAD=10.0, RETRIEVE=20.0)
        assert replay.replay(run).step(Setting(schedule, parts)) == pytest.approx(run.mean("mean_step_ms"), rel=0.01)


@pytest.mark.parametrize(("schedule", "parts"), [("nested", 2), ("serial", 1), ("dbp", 1)])
def test_nothing_is_advised_where_a_step_is_all_compute(tmp_path, schedule, parts):
    run = make_run(tmp_path, schedule=schedule, parts=parts, config={"train": {"batch_size": 128}})
    assert advised(run) == []
    text = advice.verdict(run, [])
    assert text.startswith("Nothing: no change is estimated") and "of a step is compute" in text


@pytest.mark.parametrize("schedule", ["serial", "nested"])
def test_a_slow_rank_is_named_with_what_it_takes_longer_in(tmp_path, schedule):
    run = make_run(tmp_path, schedule=schedule, parts=2, ranks=3, slow={"FWD": (1, 20.0)})
    first = advice.advise(run)[0]
    assert first.title == "Find out why rank 1 is slow" and "for rank 1" in first.reason
    assert "FWD (60 ms, others 40 ms)" in first.reason and "BWD" not in first.reason
    step = run.mean("mean_step_ms")
    assert "Estimated" in first.gain and f"{20 / step:.0%} shorter" in first.gain and not first.settings


def test_ranks_that_are_slow_in_turn_are_not_called_slow(tmp_path):
    run = make_run(tmp_path, schedule="serial", parts=1, slow={"FWD": (1, 20.0), "RETRIEVE": (0, 20.0)}, steps=40,
                   config={"train": {"batch_size": 128}})  # fmt: skip
    titles = advised(run)
    assert "Make the work of the ranks more even" in titles and not any("slow" in title for title in titles)
    (even,) = (item for item in advice.advise(run) if "even" in item.title)
    assert even.settings == {"train": {"batch_size": 256}}


def test_a_rank_that_is_a_little_slower_is_not_worth_a_word(tmp_path):
    assert advised(make_run(tmp_path, slow={"FWD": (1, 2.0)})) == []


@pytest.mark.parametrize(
    ("reader", "title", "settings"),
    [
        ("thread", "Read data in a process of its own", {"train": {"reader": "process"}}),
        ("process", "Make reading data faster", {}),
    ],
)
@pytest.mark.parametrize(("schedule", "parts"), [("serial", 1), ("nested", 2)])
def test_slow_data_comes_first_and_silences_what_cannot_help_before(tmp_path, schedule, parts, reader, title, settings):
    run = make_run(tmp_path, schedule=schedule, parts=parts, PREFETCH=200.0, RETRIEVE=30.0,
                   config={"train": {"reader": "auto"}}, result={"reader": reader})  # fmt: skip
    assert shares(run)[DATA] > 30
    (first,) = advice.advise(run)
    assert first.title == title and first.settings == settings
    assert "waits for its next batch" in first.reason and "Estimated: at most" in first.gain


def test_data_that_is_read_behind_compute_is_fast_enough(tmp_path):
    assert advised(make_run(tmp_path, PREFETCH=50.0)) == []


def test_serial_is_told_what_nested_would_hide(tmp_path):
    run = make_run(tmp_path, schedule="serial", parts=1, RETRIEVE=30.0, EMB=40.0, GRAD=40.0, config={"schedule": {}})
    (only,) = advice.advise(run)
    assert only.title == "Train under the schedule nested"
    parts = only.settings["schedule"]["micro_batches"]
    assert advice.lines(run, only) == f'[schedule]\nname = "nested"\nmicro_batches = {parts}'
    assert "to look rows up" in only.reason and "to exchange rows" in only.reason
    # What it is told it would gain is what the same operations take under nested.
    other = make_run(tmp_path / "nested", parts=parts, RETRIEVE=30.0, EMB=40.0, GRAD=40.0)
    factor = other.mean("mean_step_ms") / run.mean("mean_step_ms")
    assert f"{1 - factor:.0%} shorter" in only.gain


def test_serial_with_slow_lookups_alone_needs_only_dbp(tmp_path):
    run = make_run(tmp_path, schedule="serial", parts=1, RETRIEVE=30.0, EMB=0.2, GRAD=0.2)
    (only,) = advice.advise(run)
    assert only.settings == {"schedule": {"name": "dbp"}}


def test_batches_are_cut_finer_only_where_the_exchange_is_exposed(tmp_path):
    exposed = make_run(tmp_path / "exposed", parts=2, EMB=40.0, GRAD=40.0)
    (only,) = advice.advise(exposed)
    assert only.settings == {"schedule": {"micro_batches": 4}} and "Estimated" in only.gain
    assert advised(make_run(tmp_path / "hidden", parts=8, EMB=40.0, GRAD=40.0)) == []


def test_batches_are_not_cut_finer_than_a_worker_has_samples(tmp_path):
    assert advised(make_run(tmp_path, parts=2, EMB=40.0, GRAD=40.0, result={"samples": 40 * 4})) == []


def test_fewer_micro_batches_are_advised_where_forwards_are_short_and_nothing_gets_exposed(tmp_path):
    run = make_run(tmp_path / "short", parts=32)
    (only,) = advice.advise(run)
    assert only.settings == {"schedule": {"micro_batches": 16}} and '`micro_batches = "auto"`' in only.gain
    assert advised(make_run(tmp_path / "long", parts=4)) == []  # a forward takes 10 ms
    assert advised(make_run(tmp_path / "needed", parts=16, EMB=40.0, GRAD=40.0)) == []  # they hide the exchange


def test_lookups_on_disk_that_the_schedule_cannot_hide_need_memory(tmp_path):
    config = {
        "tables": {"item": {"tier": "disk", "memory": "2GB"}, "a.b": {"tier": "disk"}, "user": {"tier": "memory"}}
    }
    run = make_run(tmp_path / "slow", RETRIEVE=150.0, config=config)
    (only,) = advice.advise(run)
    assert only.title == "Keep more of item and a.b in memory"
    assert advice.lines(run, only) == '[tables.item]\nmemory = "4GB"\n\n[tables."a.b"]\nmemory = "2GB"'
    assert advised(make_run(tmp_path / "hidden", RETRIEVE=80.0, config=config)) == []
    assert advised(make_run(tmp_path / "memory", RETRIEVE=150.0, config={"tables": {"item": {"tier": "memory"}}})) == []


def test_a_script_is_told_arguments_instead_of_toml(tmp_path):
    run = make_run(tmp_path, schedule="serial", parts=1, RETRIEVE=30.0, EMB=0.2, GRAD=0.2)
    assert advice.lines(run, advice.advise(run)[0]) == 'Trainer(…, schedule="dbp")'


def test_a_schedule_of_ones_own_and_few_steps_are_not_judged(tmp_path):
    run = make_run(tmp_path / "few", schedule="serial", parts=1, steps=6, RETRIEVE=30.0)
    assert advised(run) == [] and "Too few steps" in advice.verdict(run, [])
    own = make_run(tmp_path / "own", schedule="serial", parts=1, RETRIEVE=30.0, result={"schedule": "mine"})
    assert advised(own) == []


def test_steps_in_which_nothing_runs_are_told(tmp_path):
    run = make_run(tmp_path / "whole")
    stretched = [
        dataclasses.replace(trace, events=[e._replace(start_ns=e.start_ns + 20_000_000 * (e.start_ns // 100_000_000),
                                                      end_ns=e.end_ns + 20_000_000 * (e.start_ns // 100_000_000))
                                           for e in trace.events])
        for trace in run.traces
    ]  # fmt: skip
    for trace in stretched:
        save(tmp_path / "held", trace)
    (held,) = read_all([tmp_path / "held"])
    assert held.paused == 0 and shares(held)["nothing runs"] > 10
    assert "Find out what else runs on the machine" in advised(held)


# On the page


def test_the_page_of_a_folder_with_traces_alone_says_what_it_knows(tmp_path):
    make_run(tmp_path / "script", schedule="serial", parts=1, RETRIEVE=30.0, EMB=0.2, GRAD=0.2)
    text = Parsed(write([tmp_path / "script"]).read_text()).text
    for piece in ("as the run of a script", "serial, 2 workers", "What to change", "Train under the schedule dbp",
                  'Trainer(…, schedule="dbp")', "Estimated", "What ran when", "recorded steps"):  # fmt: skip
        assert piece in text, piece
    assert "samples per second\n" not in text and "digest" not in text.split("Facts")[1]


def test_runs_of_scripts_are_compared_by_the_time_of_a_step(tmp_path):
    for schedule, parts in (("serial", 1), ("nested", 4)):
        make_run(tmp_path / schedule, schedule=schedule, parts=parts, EMB=40.0, GRAD=40.0)
    text = Parsed(write([tmp_path / "serial", tmp_path / "nested"], out=tmp_path / "all.html").read_text()).text
    assert "By the time of a step" in text and "Speed-up over serial" in text


def test_what_each_took_is_text_for_scripts_too(tmp_path):
    run = make_run(tmp_path, schedule="serial", parts=1, slow={"FWD": (1, 20.0)})
    text = describe(run.traces)
    assert "RETRIEVE" in text and "rank 0 20.0 ms, rank 1 0.0 ms" in text
    assert "last rank" not in describe(run.traces[:1])  # of one's own trace alone nothing is known of others


def test_every_operation_of_the_table_is_explained_on_the_page(tmp_path):
    run = make_run(tmp_path, schedule="serial", parts=1)
    text = Parsed(write([tmp_path]).read_text()).text
    needed = [operation for operation in OPERATIONS.values() if not operation.optional]
    assert all(operation.meaning in text for operation in needed) and run.ranks
