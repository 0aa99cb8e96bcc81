"""Sweeps: predictions against times worked out by hand, and the sections made of them."""

from __future__ import annotations

import pytest

from nestpipe.schedule.setting import Setting
from nestpipe.sections import Bars, Curves, Table, from_json, markdown, to_json
from nestpipe.simulate import sweep
from nestpipe.simulate.network import Level, Network
from nestpipe.simulate.workload import Workload
from tests.simulate.tiny import profile, workload

SLOW = Level(latency=0.1, bandwidth=1e5)
STEP = {"RETRIEVE": (3.0, 0.0), "WRITEBACK": (1.0, 0.0), "FWD": (1.0, 0.0), "BWD": (2.0, 0.0), "SYNC": (0.5, 0.0)}


def test_a_serial_step_is_the_sum_of_all_and_all_of_it_is_exposed() -> None:
    one = sweep.predict(workload(), profile(STEP), Setting("serial"), 4)
    assert one.step == pytest.approx(7500) and one.compute == pytest.approx(3000)
    assert one.lookup == one.exposed_lookup == pytest.approx(4500)
    assert one.communication == pytest.approx(0, abs=1e-6)
    assert one.samples_per_second == pytest.approx(4 * 10 / 7.5) and one.utilization == pytest.approx(3 / 7.5)
    assert (one.limit, one.limit_op, one.longest_lane) == ("compute", "RETRIEVE", pytest.approx(7500))


def test_a_pipelined_step_is_as_long_as_its_busiest_lane() -> None:
    one = sweep.predict(workload(), profile(STEP), Setting("dbp"), 4)
    # The store writes back and retrieves, 4 s; the next retrieval may begin after SYNC.
    assert one.step == pytest.approx(one.longest_lane, rel=0.2) and one.step < 7500
    assert (one.limit, one.limit_op) == ("store", "RETRIEVE")
    quick = sweep.predict(workload(), profile({**STEP, "RETRIEVE": (0.5, 0.0)}), Setting("dbp"), 4)
    assert quick.step == pytest.approx(3500) and (quick.limit, quick.limit_op) == ("compute", "the model")
    assert quick.exposed_lookup == pytest.approx(500), "SYNC, on the compute lane"


def test_bytes_sent_are_rows_and_gradients_for_others(histories: Workload) -> None:
    one = sweep.predict(workload(), profile(STEP), Setting("serial"), 4)
    assert one.sent == pytest.approx(2 * 20 * 8 * 4 * 3 / 4)
    assert sweep.predict(workload(), profile(STEP), Setting("serial"), 1).sent == 0
    settings = Setting("nested", 4, clustering="none"), Setting("nested", 4, False, "none")
    once, again = (sweep.predict(histories, profile(STEP), setting, 4).sent for setting in settings)
    assert again == pytest.approx(once * sum(histories.split(4, "none", False).rows)) and again > 1.01 * once


def test_efficiency_of_the_fewest_workers_is_one_and_falls_with_slower_exchanges() -> None:
    slow = profile(STEP, network=Network(1, SLOW, SLOW))
    settings = [Setting("serial"), Setting("dbp")]
    predictions = sweep.sweep(workload(), slow, settings, [8, 2, 32])
    assert [(one.schedule, one.workers) for one in predictions] == [
        (name, workers) for name in ("serial", "dbp") for workers in (8, 2, 32)
    ]
    found = sweep.efficiencies(predictions)
    for first in (0, 3):
        assert found[first + 1] == 1
        assert 1 > found[first] > found[first + 2] > 0
        steps = [one.step for one in predictions[first : first + 3]]
        assert found[first : first + 3] == pytest.approx([steps[1] / step for step in steps])


def test_results_and_sections_hang_together() -> None:
    settings = [Setting("serial"), Setting("dbp")]
    predictions = sweep.sweep(workload(), profile(STEP), settings, [2, 8])
    results = sweep.results(predictions)
    assert [one["efficiency"] for one in results] == pytest.approx([1.0] * 4)
    assert [one["utilization"] for one in results] == pytest.approx([one.utilization for one in predictions])
    table, efficiency, throughput, bars = sections = list(sweep.sections(predictions, "A note."))
    assert isinstance(table, Table) and len(table.rows) == 4 and "Predicted, not measured" in table.note
    speedups = [row[3] for row in table.rows]
    ratio = predictions[0].step / predictions[2].step
    assert speedups == ["1.00x", "1.00x", f"{ratio:.2f}x", f"{ratio:.2f}x"] and ratio > 1.5
    assert isinstance(efficiency, Curves) and efficiency.x == [2, 8]
    assert isinstance(throughput, Curves) and isinstance(bars, Bars)
    for place, one in enumerate(predictions[1::2]):
        assert sum(values[place] for values in bars.parts.values()) == pytest.approx(one.step)
    assert markdown(from_json(to_json(sections))) == markdown(sections)


def test_one_count_has_no_curves_and_no_serial_no_speed_up() -> None:
    table, bars = sweep.sections(sweep.sweep(workload(), profile(STEP), [Setting("dbp")], [4]), "A note.")
    assert isinstance(table, Table) and isinstance(bars, Bars) and table.rows[0][3] == ""


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["serial", "nested"])
def test_a_few_steps_are_enough_to_predict_from(name: str, steps: int) -> None:
    one = sweep.predict(workload(), profile(STEP), Setting(name), 4, steps=steps)
    assert one.step >= one.compute == pytest.approx(3000)
