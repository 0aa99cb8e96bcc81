"""Points that are measured on a real server, and what the suite makes of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from nestpipe.bench.serving import ablation, capacity, command, exporting, loadgen, longest, losing, simulated
from nestpipe.bench.serving.checking import CLOSE, difference
from nestpipe.bench.serving.lab import ANYWHERE, FULL, HOST, RELAY, UNTRIGGERED, WAYS, Lab
from nestpipe.bench.serving.service import Service, parse_metrics
from nestpipe.files import write_json
from nestpipe.report import write
from nestpipe.sections import Curves, Table, from_json, markdown


def test_a_point_is_measured_and_its_answers_are_right(small_lab: Lab, service: Service) -> None:
    found = small_lab.measure(service, UNTRIGGERED, dataclasses.replace(small_lab.conditions.load, rate=25.0))
    assert found.requests > 5 and found.answered == found.requests and found.errors == 0
    assert found.checked >= 4 and found.wrong == 0 and found.worst <= CLOSE
    assert sum(found.signals.values()) > 5 and set(found.signals) <= {
        "fast_enough",
        "admitted",
        "on_device",
        "under_way",
    }
    assert sum(found.sources.values()) == found.answered and found.relayed > 0.5
    assert any(name.startswith("nestpipe_cache_computations") and count > 0 for name, count in found.server.items())
    points = [{"rate": 25.0, **found.to_json()}]
    ways = {
        way.name: {"highest": 25.0 * (1 + (way is HOST)), "peak": 25.0, "overload": 0.9, "points": points}
        for way in WAYS
    }
    law = dataclasses.asdict(small_lab.conditions.load)
    rows = capacity.sections({"slo": small_lab.slo, "base": 25.0, "load": law, "ways": ways})
    table, goodput, latency = rows
    assert isinstance(table, Table) and isinstance(goodput, Curves) and isinstance(latency, Curves)
    assert [row[2] for row in table.rows] == ["1.00x", "1.00x", "2.00x", "1.00x"]
    assert goodput.x == [25.0] and goodput.lines[HOST.name] == [found.goodput]


def test_contestants_get_the_same_visits_at_a_rate_which_is_really_that_rate(small_lab: Lab, service: Service) -> None:
    load = dataclasses.replace(small_lab.conditions.load, rate=30.0)
    one, other = (small_lab.order(service, load) for _ in range(2))
    assert list(one.visits()) == list(other.visits()) and one.name != other.name
    due = [visit for visit in one.visits() if visit.request >= one.warm_up]
    assert abs(len(due) / one.seconds / 30.0 - 1) < 0.15  # of one second; a draw like any other is off by a third


def test_a_wrong_score_is_seen() -> None:
    full = np.array([0.5, -1.0, 0.25], np.float32)
    assert difference([0.5, -1.0, 0.25], full) == 0
    assert difference([0.5, -1.0, 0.26], full) == pytest.approx(0.01, rel=1e-3)
    assert difference([0.5, -1.0], full) == difference([0.5, -1.0, float("nan")], full) == np.inf


def test_a_killed_instance_costs_no_wrong_score_and_comes_back(small_lab: Lab, service: Service) -> None:
    before = set(service.instances())
    found = losing.measure(small_lab, service, 15.0, before=0.5, after=2.0)
    assert found["wrong"] == 0 and found["checked"] > 10
    assert found["seconds_to_recover"] is not None and len(set(service.instances()) - before) == 1
    (table,) = losing.sections(found)
    assert isinstance(table, Table) and table.rows[0][2].startswith("0 of ")


def test_load_on_a_running_server_becomes_a_page(small_lab: Lab, service: Service, tmp_path: Path) -> None:
    sent = command.Sent(small_lab.path, rate=20.0, seconds=1.0, warm_up=0.2, url=service.url)
    document = command.load(sent, ["BUNDLE"])
    assert document["command"] == "nestpipe load BUNDLE" and document["results"]["figures"]["wrong"] == 0
    assert "wrong scores" in markdown(from_json(document["sections"]))
    write_json(tmp_path / "load.json", document)
    page = write([tmp_path / "load.json"], out=tmp_path / "load.html").read_text()
    assert "Latency by percentile" in page and "bench load" in page


def test_load_needs_a_server_that_runs_and_serves_this_bundle(small_lab: Lab) -> None:
    with pytest.raises(ValueError, match=r"does not answer .*nestpipe serve"):
        command.load(command.Sent(small_lab.path, url="http://127.0.0.1:9"))
    with pytest.raises(ValueError, match="rate=0"):
        command.Sent(small_lab.path, rate=0)


@pytest.mark.skipif(not loadgen.importlib.util.find_spec(loadgen.MODULE), reason="mlcommons-loadgen is not installed")
def test_mlperfs_generator_sends_the_same_requests(small_lab: Lab, service: Service) -> None:
    found = loadgen.measure(small_lab, service, 20.0)
    assert found is not None and found["mlperf"]["lost"] == 0
    assert found["mlperf"]["p99"] > found["mlperf"]["p50"] > 0
    (table,) = loadgen.sections(found)
    assert isinstance(table, Table) and len(table.rows) == 2


def test_the_simulated_fleet_uses_the_measured_costs(small_lab: Lab) -> None:
    found = simulated.measure(small_lab, simulated.Size(instances=4, requests=20, steps=2))
    assert list(found["ways"]) == [way.name for way in WAYS] and all(way["points"] for way in found["ways"].values())
    table, curves = simulated.sections(found)
    assert isinstance(table, Table) and isinstance(curves, Curves) and len(curves.x) == 2


def test_flags_switch_techniques_off(small_lab: Lab) -> None:
    flags = {way: small_lab.flags(way) for way in (FULL, RELAY, HOST, ANYWHERE, UNTRIGGERED)}
    assert "--no-relay" in flags[FULL] and "--no-affinity" in flags[ANYWHERE] and "--no-trigger" in flags[UNTRIGGERED]
    assert flags[RELAY][flags[RELAY].index("--host-memory") + 1] == "0"
    assert not [flag for flag in flags[HOST] if flag.startswith("--no-")]


def test_a_small_export_is_measured_and_predicts_as_the_trainer_does(tmp_path: Path) -> None:
    exporting.train(exporting.Size(rows=20_000), str(tmp_path))
    full, seconds = exporting.exported(tmp_path / "first", tmp_path / "bundle")
    delta, _ = exporting.exported(tmp_path / "second", tmp_path / "delta", since=tmp_path / "bundle")
    assert exporting.different(tmp_path) == 0
    assert 0.01 < delta / full < 0.02 and seconds > 0
    (tmp_path / "predictions.npy").write_bytes((tmp_path / "predictions.npy").read_bytes()[:-1] + b"\0")
    assert exporting.different(tmp_path) == 1


def test_metrics_of_instances_are_summed() -> None:
    text = '# HELP x y\nx_total{instance="a",why="late"} 2.0\nx_total{instance="b",why="late"} 3.0\ny{instance="a"} 1e3\nz 4\n'
    assert parse_metrics(text) == {'x_total{why="late"}': 5.0, "y": 1000.0, "z": 4.0}


def test_sections_of_lengths_and_ablation() -> None:
    points = [{"length": 128, "keeps": True, "p99": 5.0}, {"length": 256, "keeps": False, "p99": 50.0}]
    ways = {FULL.name: {"points": points, "longest": 128}, HOST.name: {"points": points[:1], "longest": 256}}
    (table,) = longest.sections({"slo": 0.1, "rate": 3.0, "lengths": [128, 256], "ways": ways})
    assert isinstance(table, Table) and [row[2] for row in table.rows] == ["1.00x", "2.00x"]
    found = {
        "kept": 0.99, "p50": 1.0, "p99": 2.0, "goodput": 9.0, "relayed": 0.5, "answered": 10, "rejected": 0,
        "sources": {"device": 5, "full": 5}, "signals": {"admitted": 3},
        "server": {"nestpipe_cache_computations_total": 4.0, "nestpipe_cache_wasted_total": 1.0,
                   "nestpipe_cache_wasted_tokens_total": 9.0},
    }  # fmt: skip
    ways = {way.name: found for way in (HOST, UNTRIGGERED, ANYWHERE, RELAY)}
    table, signals, _ = ablation.sections({"slo": 0.1, "rate": 3.0, "ways": ways})
    assert isinstance(table, Table) and table.rows[0][table.columns.index("of these wasted")] == "25%"
    assert isinstance(signals, Table) and "3" in signals.rows[0]
