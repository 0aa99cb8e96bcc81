"""Plans: memory of a worker by hand, and which setting is told first."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from nestpipe.files import write_json
from nestpipe.schedule import SCHEDULES
from nestpipe.schedule.setting import Setting
from nestpipe.sections import Table
from nestpipe.simulate import plan
from nestpipe.simulate.network import Level, Network
from nestpipe.simulate.plan import Choice, Memory, memory
from nestpipe.simulate.profile import Profile
from nestpipe.simulate.workload import Workload
from tests.simulate.tiny import load, profile, workload

SERIAL = Setting("serial")
COMPUTE = {"FWD": (1.0, 0.0), "BWD": (2.0, 0.0)}
DEVICE = profile(COMPUTE, device_memory=1e9)
HOST = profile(COMPUTE)
# Of a worker of four, in one batch: two buffers of 20 rows of 36 bytes; rows and gradients of 20 x 32 bytes that leave and
# come; four copies of the dense part; the inputs.
BUFFERS, MOVING, DENSE, INPUTS = 2 * 20 * 36, 4 * 20 * 32, 4 * 400, 1000


@pytest.fixture(scope="module")
def histories(histories: Workload) -> Workload:
    """Of four samples, so that there are few settings to try."""
    return dataclasses.replace(histories, samples=4)


def test_memory_of_a_table_in_memory_by_hand() -> None:
    needed = memory(workload(), DEVICE, SERIAL, 4, {"item": 1000})
    assert needed == Memory(BUFFERS + MOVING + DENSE + INPUTS, 250 * (26 + 36), 0)


def test_without_a_device_the_host_holds_all() -> None:
    needed = memory(workload(), HOST, SERIAL, 4, {"item": 1000})
    assert needed == Memory(0, 250 * (26 + 36) + BUFFERS + MOVING + DENSE + INPUTS, 0)


def test_a_pipeline_has_three_batches_on_their_way() -> None:
    assert memory(workload(), DEVICE, Setting("fwp"), 4, {}).device == BUFFERS + MOVING + DENSE + INPUTS
    for name in ("dbp", "nested"):
        assert memory(workload(), DEVICE, Setting(name), 4, {}).device == BUFFERS + 3 * (MOVING + INPUTS) + DENSE


def test_memory_of_a_table_on_disk_by_hand() -> None:
    needed = memory(workload(tables=[load(tier="disk", memory="40MB")]), DEVICE, SERIAL, 4, {"item": 1000})
    assert needed.host == 10e6, "the index is in the budget"
    assert needed.disk == pytest.approx(250 * (36 + 16) * 4096 / (4096 - 232))
    on_disk = workload(tables=[load(tier="disk")])
    assert memory(on_disk, DEVICE, SERIAL, 4, {"item": 1000}).host == 0.25e9, "1 GB unless the table says"


def test_replicas_hold_all_tables_in_each_group() -> None:
    one, two = (memory(workload(), DEVICE, Setting("serial", replicas=m), 8, {"item": 8000}).host for m in (1, 2))
    assert (one, two) == (1000 * 62, 2000 * 62)


def test_a_table_of_one_owner_is_whole_on_its_worker() -> None:
    """What a worker needs is what the one that holds it needs."""
    needed = memory(workload(tables=[load(owners=1)]), DEVICE, SERIAL, 4, {"item": 1000})
    assert needed.host == 1000 * (26 + 36)


def test_a_table_that_is_not_there_is_told() -> None:
    with pytest.raises(ValueError, match=r"--rows names a table 'itme'; the config has item"):
        memory(workload(), DEVICE, SERIAL, 4, {"itme": 1})
    with pytest.raises(ValueError, match="'itme'"):
        plan.plan(workload(samples=1), DEVICE, 2, {"itme": 1})


def test_a_tier_whose_size_is_not_known_is_never_short() -> None:
    needed = Memory(1e12, 1e12, 1e12)
    assert needed.short_of(HOST) == []
    assert needed.short_of(profile({}, device_memory=1.0, disk=1.0)) == ["device", "disk"]
    assert needed.short_of(profile({}, host_memory=1e12)) == [], "it fits exactly"


# -- settings ----------------------------------------------------------------------------------------------------------


def test_settings_are_all_exact_and_the_simplest_first() -> None:
    found = plan.settings(8)
    assert found[:4] == [Setting(name) for name in ("serial", "dbp", "fwp", "nested")]
    assert all(not SCHEDULES[one.schedule]().stale_by for one in found) and len(set(found)) == len(found)
    assert {one.replicas for one in found} == {1, 2, 4} and {one.replicas for one in plan.settings(3)} == {1}
    assert {one.micro_batches for one in found if one.schedule == "dbp"} == {1}
    assert {one.micro_batches for one in found if one.schedule == "nested"} == {1, *plan.CUTS}
    places = [one.replicas for one in found]
    assert places == sorted(places)


def test_no_more_micro_batches_than_samples(histories: Workload) -> None:
    choices = plan.plan(histories, HOST, 2, {})
    assert max(one.setting.micro_batches for one in choices) == histories.samples == 4


def test_among_settings_as_fast_the_simplest_is_first(histories: Workload) -> None:
    """Nothing but computing takes time: all are as fast."""
    simplest = [one for one in plan.settings(2) if one.micro_batches <= 4]
    assert [one.setting for one in plan.plan(histories, second(histories), 2, {})] == simplest


def second(load: Workload, **more: tuple[float, float]) -> Profile:
    """A step computes for one second, in however many pieces."""
    each = 1 / (load.forward_flops + load.backward_flops)
    return profile({"FWD": (0.0, each), "BWD": (0.0, each), **more})


def test_a_setting_must_gain_more_than_a_hundredth_to_come_before_a_simpler_one(histories: Workload) -> None:
    little, much = (second(histories, RETRIEVE=(took, 0.0)) for took in (0.005, 0.1))
    assert [one.setting for one in plan.plan(histories, little, 2, {})[:2]] == [SERIAL, Setting("dbp")]
    best = plan.plan(histories, much, 2, {})
    assert best[0].setting == Setting("dbp") and best[0].prediction.step == pytest.approx(1000)
    assert best[-1].prediction.step == pytest.approx(1100)


# -- what fits, and what is told ---------------------------------------------------------------------------------------

SLOW = Level(latency=0.05, bandwidth=1e9)
ROWS = {"item": 1e9}
NEEDED = 1e9 * (26 + 36) / 4  # of a worker of four


def planned(load: Workload, host_memory: float) -> tuple[list[Choice], Profile]:
    """Four workers, each on a node of its own, whose messages are slow: replicas send fewer."""
    cluster = dataclasses.replace(
        second(load), network=Network(1, SLOW, SLOW), device_memory=1e12, host_memory=host_memory
    )
    return plan.plan(load, cluster, 4, ROWS), cluster


def test_what_does_not_fit_is_ranked_last_however_fast(histories: Workload) -> None:
    choices, cluster = planned(histories, 1.5 * NEEDED)
    short = [one.setting.replicas > 1 for one in choices]
    assert short == sorted(short) and any(short) and not all(short)
    assert [bool(one.short_of) for one in choices] == short and choices[-1].short_of == ["host"]
    assert min(one.prediction.step for one in choices) == min(one.prediction.step for one in choices if one.short_of)
    text = plan.told(choices, cluster, 4, ROWS)
    assert "DOES NOT FIT" not in text and "replicas" not in text
    assert "host 15.5 GB of 23.2 GB" in text


def test_replicas_that_fit_are_told_beside_the_best_without(histories: Workload) -> None:
    choices, cluster = planned(histories, 10 * NEEDED)
    assert choices[0].setting.replicas == 2
    text = plan.told(choices, cluster, 4, ROWS)
    assert text.startswith("On 4 workers of paper: schedule") and text.splitlines()[0].endswith(", replicas = 2")
    assert "with one replica of the tables it would be" in text


def test_when_nothing_fits_it_is_said_with_what_to_do(histories: Workload) -> None:
    choices, cluster = planned(histories, 0.5 * NEEDED)
    assert all(one.short_of == ["host"] for one in choices)
    text = plan.told(choices, cluster, 4, ROWS)
    assert "DOES NOT FIT: host; use more workers, or tier = 'disk'" in text
    (table,) = plan.sections(choices, "A note.")
    assert isinstance(table, Table) and {row[-1] for row in table.rows} == {"no: host"} and len(table.rows) == 12


def test_the_runner_up_is_the_best_of_another_schedule(histories: Workload) -> None:
    lookups = second(histories, RETRIEVE=(0.8, 0.0))
    choices = plan.plan(histories, lookups, 2, {})
    text = plan.told(choices, lookups, 2, {})
    assert text.splitlines()[0] == "On 2 workers of paper: schedule 'dbp'"
    others = [one for one in choices if one.setting.schedule != "dbp"]
    assert f"runner-up: {others[0].setting.name}, 1,000.0 ms (1.00 times as long)" in text
    assert "the busiest lane is compute (the model)" in text
    assert "--rows TABLE=COUNT" in text, "tables without rows are told as empty"


def test_micro_batches_of_the_best_are_told(histories: Workload) -> None:
    setting = Setting("nested", 4, True, "taper")
    (one,) = [one for one in plan.plan(histories, HOST, 2, {}) if one.setting == setting]
    text = plan.told([one], HOST, 2, {"item": 1.0})
    assert "schedule 'nested', micro_batches = 4, clustering = 'taper'" in text
    assert "runner-up" not in text and "--rows" not in text


def test_results_can_be_written(histories: Workload, tmp_path: Path) -> None:
    choices = plan.plan(histories, HOST, 2, {})
    write_json(tmp_path / "plan.json", plan.results(choices))
    read = json.loads((tmp_path / "plan.json").read_text())
    assert [one["prediction"]["step"] for one in read] == [one.prediction.step for one in choices]
    assert read[0]["setting"]["schedule"] == choices[0].setting.schedule and read[0]["memory"]["host"] > 0
