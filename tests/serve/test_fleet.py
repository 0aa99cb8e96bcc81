"""The simulated fleet: techniques do what they are for, deaths cost what was in flight, and nothing is lost."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nestpipe.serve.batching import Batching
from nestpipe.serve.costs import Costs, Law
from nestpipe.serve.fleet import Death, Fleet, Report, simulate
from nestpipe.serve.load import Load
from nestpipe.serve.requests import Settings, Source
from nestpipe.serve.trigger import Bounds, Reason

LAW = Law((1e-3, 1e-5, 3e-9, 2e-9), learns=False)
SETTINGS = Settings(
    slo=0.05, device_bytes=1 << 27, host_bytes=1 << 32, bytes_per_token=1 << 14,
    bounds=Bounds(reuse=True), batching=Batching(shed=True),
)  # fmt: skip
FLEET = Fleet(instances=4, settings=SETTINGS, costs=Costs(LAW, LAW, Law((1e-4, 1e-10, 0, 0), learns=False)))
LOAD = Load(rate=320.0, users=800)


def run(
    *, requests: int = 2500, deaths: Any = (), rate: float = 320.0, affinity: bool = True, **settings: Any
) -> Report:
    fleet = dataclasses.replace(FLEET, settings=dataclasses.replace(SETTINGS, **settings), affinity=affinity)
    return simulate(fleet, dataclasses.replace(LOAD, rate=rate), requests=requests, seed=1, deaths=deaths)


@pytest.fixture(scope="module")
def whole() -> Report:
    return run()


def test_each_technique_is_worth_its_while(whole: Report) -> None:
    without = {
        "relay": run(relay=False),
        "host": run(host_bytes=0),
        "affinity": run(affinity=False),
    }
    for name, report in without.items():
        assert report.kept < whole.kept, name
        assert report.busy.mean() > whole.busy.mean(), name
    assert without["relay"].relayed == 0 and without["relay"].prefix_seconds == 0
    assert without["affinity"].wasted_seconds / without["affinity"].prefix_seconds > 0.3
    assert whole.wasted_seconds / whole.prefix_seconds < 0.2
    assert whole.relayed > 0.8


def test_every_request_is_accounted_for(whole: Report) -> None:
    assert whole.requests == 2000 == len(whole.latencies) + whole.rejected + whole.errors
    assert sum(whole.sources.values()) == len(whole.latencies) and sum(whole.reasons.values()) == 2000
    assert whole.in_time == (whole.latencies <= SETTINGS.slo).sum()
    assert whole.latency(0.5) <= whole.latency(0.99) <= whole.latencies[-1]
    assert 0 < whole.busy.min() <= whole.busy.max() < 1 and len(whole.busy) == 4


def test_the_same_seed_gives_the_same_figures(whole: Report) -> None:
    again = run()
    assert np.array_equal(again.latencies, whole.latencies) and again.reasons == whole.reasons


def test_overload_does_not_make_goodput_collapse() -> None:
    rates = (400.0, 800.0, 1600.0)
    goodput = [run(rate=rate, requests=int(6 * rate), device_bytes=1 << 30).goodput for rate in rates]
    assert goodput[2] > 0.9 * max(goodput), f"goodput at {rates}: {goodput}"


def test_without_trigger_all_signals_are_admitted_for_which_there_is_room() -> None:
    reasons = run(trigger=False, requests=600).reasons
    assert reasons[Reason.FAST_ENOUGH] == reasons[Reason.LOAD] == reasons[Reason.FOOTPRINT] == 0


def test_the_trigger_of_the_paper_admits_only_those_at_risk() -> None:
    report = run(bounds=Bounds(reuse=False), rate=80.0)
    assert 0 < report.relayed < 0.3 and report.reasons[Reason.REUSE] == 0
    assert report.kept > run(relay=False, rate=80.0).kept


def test_an_instance_that_dies_costs_what_was_in_flight_there_and_its_users_go_elsewhere() -> None:
    report = run(deaths=[Death(2.5 + 0.3 * number, number % 4, back=0.5) for number in range(10)])
    assert 0 < report.errors < 50
    assert report.requests == len(report.latencies) + report.rejected + report.errors
    assert 0.8 < report.kept < run().kept and report.sources[Source.DEVICE] > 0


def test_when_all_have_died_every_request_is_an_error_until_one_comes_back() -> None:
    report = run(requests=600, deaths=[Death(0.0, number) for number in range(4)])
    assert report.errors == report.requests and report.goodput == 0


def test_a_death_of_an_instance_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="instances 0 to 3"):
        run(requests=10, deaths=[Death(0.0, 4)])


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/relay.md").read_text()
    exec(page.split("```python\n")[1].split("```")[0].replace("10_000", "1_000"), {})
    kept, p99, relayed, errors = map(float, capsys.readouterr().out.split())
    assert 0 < kept <= 1 and p99 > 0 and 0 <= relayed <= 1 and errors >= 0


def test_deciding_needs_no_torch() -> None:
    program = "import sys, nestpipe.serve.fleet, nestpipe.serve.fuzz; print('torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "False"
