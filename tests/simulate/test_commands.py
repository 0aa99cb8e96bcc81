"""`nestpipe simulate` and `nestpipe plan`, as a user meets them, in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nestpipe.cli import main
from nestpipe.config import read as read_config
from nestpipe.schedule.setting import Setting
from nestpipe.simulate.commands import settings_of
from nestpipe.simulate.profile import read, to_toml
from nestpipe.simulate.sweep import predict
from nestpipe.simulate.workload import of_config
from tests.simulate.tiny import profile, sequences

SEQUENCES = """
[data]
kind = "synthetic_sequences"
num_items = 300
mean_length = 6
max_length = 12
num_negatives = 4

[model]
kind = "hstu"
num_layers = 1

[tables.item]
dim = 8
features = ["history", "negatives"]

[train]
batch_size = 4

[schedule]
name = "nested"
micro_batches = 4
"""
CLICKS = """
[data]
kind = "synthetic_clicks"
num_features = 2
keys_per_table = 50
keys_per_bag = 3
num_dense = 2
num_samples = 4000

[model]
kind = "dlrm"
bottom = [8]
top = [8]

[tables."f*"]
dim = 4
pooling = "sum"
tier = "disk"

[train]
batch_size = 4
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.toml"
    path.write_text(SEQUENCES)
    return path


@pytest.fixture
def clicks(tmp_path: Path) -> Path:
    path = tmp_path / "clicks.toml"
    path.write_text(CLICKS)
    return path


def run(*arguments: str | Path) -> int:
    """In this process; the exit code."""
    with pytest.raises(SystemExit) as exit:
        main([str(argument) for argument in arguments])
    return int(exit.value.code or 0)


def document(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


# -- simulate ----------------------------------------------------------------------------------------------------------


def test_simulate_writes_figures_plot_and_timeline_that_a_report_shows(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ("simulate", config, "--profile", "npu-1536", "--workers", "32,2,8", "--out", out)
    assert run(*arguments, "--json", tmp_path / "copy.json") == 0
    told = capsys.readouterr().out
    assert "Predicted, not measured" in told and f"nestpipe report {out}/simulate.json" in told
    assert "timeline of nested, N = 4, clustering window on 32 workers" in told

    found = document(out / "simulate.json")
    assert found == document(tmp_path / "copy.json") and found["suite"] == "simulate"
    assert [(one["schedule"], one["workers"]) for one in found["results"]] == [
        (name, workers) for name in ("serial", "dbp", "fwp", "nested") for workers in (2, 8, 32)
    ]
    assert [one["efficiency"] for one in found["results"][::3]] == [1, 1, 1, 1]
    table = found["sections"][0]
    assert len(table["values"]) == len(table["rows"]) == 12
    for row, text, result in zip(table["values"], table["rows"], found["results"], strict=True):
        told_of = dict(zip(table["columns"], row, strict=True))
        assert told_of["workers"] == result["workers"] and told_of["step ms"] == result["step"]
        assert told_of["speed-up"] == result["speedup"] > 0
        assert told_of["exposed lookup ms"] == [result["exposed_lookup"], result["lookup"]]
        assert text[3] == f"{result['speedup']:.2f}x" and isinstance(told_of["setting"], str)
    assert found["profile"] == to_toml(read("npu-1536")) and found["machine"] == {"simulated": "npu-1536"}
    for picture in ("scaling.png", "trace.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    names = {str(event.get("name")).split()[0] for event in document(out / "trace.json")["traceEvents"]}
    assert {"PREFETCH", "RETRIEVE", "EMB", "FWD", "UPDATE", "WRITEBACK"} <= names

    assert run("report", out / "simulate.json", "--out", tmp_path / "page.html") == 0
    page = (tmp_path / "page.html").read_text()
    assert "Simulated steps" in page and "nested, N = 4, clustering window" in page


def test_where_nothing_is_said_it_is_written_below_runs(config: Path, tmp_path: Path) -> None:
    assert run("simulate", config, "--profile", "gpu-128", "--workers", "2", "--schedules", "serial") == 0
    folder = tmp_path / "runs" / "simulate-small"
    written = {"simulate.json", "scaling.png", "trace.png", "trace.json"}
    assert written <= {path.name for path in folder.iterdir()}


def test_a_profile_of_a_file_with_jitter_has_four_workers_on_its_timeline(config: Path, tmp_path: Path) -> None:
    shaken = profile({"FWD": (0.1, 0.0), "BWD": (0.2, 0.0)}, jitter=0.2)
    (tmp_path / "mine.toml").write_text(to_toml(shaken))
    arguments = ("simulate", config, "--profile", "mine.toml", "--workers", "6", "--schedules", "nested")
    assert run(*arguments, "--seed", "7", "--steps", "10", "--out", tmp_path / "out") == 0
    (found,) = document(tmp_path / "out" / "simulate.json")["results"]
    load, (setting,) = of_config(read_config(config)), settings_of(read_config(config), ["nested"], 1)
    seven, zero = (predict(load, read("mine.toml"), setting, 6, steps=10, seed=seed).step for seed in (7, 0))
    assert found["step"] == seven != zero
    assert len(list((tmp_path / "out" / "trace").iterdir())) == 4


def test_overrides_and_replicas_change_what_is_simulated(config: Path, tmp_path: Path) -> None:
    arguments = ("simulate", config, "--profile", "npu-1536", "--workers", "8", "--schedules", "nested")
    assert run(*arguments, "--out", tmp_path, "--set", "schedule.micro_batches=2", "--replicas", "2") == 0
    (one,) = document(tmp_path / "simulate.json")["results"]
    assert one["setting"] == "nested, N = 2, clustering window, 2 replicas"


def test_a_power_law_takes_the_place_of_counted_keys(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        "simulate",
        config,
        "--profile",
        "npu-1536",
        "--workers",
        "64",
        "--schedules",
        "serial",
        "--out",
        tmp_path,
    )
    found = {}
    for name, law in (("counted", ()), ("few", ("--zipf", "item=1.5,1e2")), ("many", ("--zipf", "item=0,1e12"))):
        assert run(*arguments, *law) == 0
        (one,) = document(tmp_path / "simulate.json")["results"]
        found[name] = one["step"]
    assert found["few"] < min(found["counted"], found["many"]), "as good as all keys in the data are distinct"
    assert "keys of which" in capsys.readouterr().out


def test_schedules_that_cut_take_the_cuts_of_the_config_or_eight() -> None:
    names = ("serial", "dbp", "fwp", "nested")
    expected = [
        Setting("serial"),
        Setting("dbp"),
        Setting("fwp", 4, True, "window"),
        Setting("nested", 4, True, "window"),
    ]
    assert settings_of(sequences(), names, 1) == expected
    for asked in ("1", "auto"):
        config = sequences(
            f"schedule.micro_batches={asked}", "schedule.window_cache=false", "schedule.clustering=shared"
        )
        assert settings_of(config, ["nested"], 2) == [Setting("nested", 8, False, "shared", replicas=2)]


# -- plan --------------------------------------------------------------------------------------------------------------


def test_plan_prints_a_plan_and_writes_it(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("plan", config, "--profile", "npu-1536", "--workers", "8", "--rows", "item=1_000_000")
    assert run(*arguments, "--json", tmp_path / "plan.json") == 0
    told = capsys.readouterr().out
    assert "On 8 workers of npu-1536: schedule" in told and "runner-up:" in told and "memory of a worker" in told
    assert "--rows" not in told, "the rows were given"
    found = document(tmp_path / "plan.json")
    table = found["sections"][0]
    for row, result in zip(table["values"], found["results"], strict=False):
        assert row[1:5] == [result["prediction"]["step"], result["utilization"], *list(result["memory"].values())[:2]]
        assert result["fits"] is True and row[6] == "yes"
    serial = next(one for one in found["results"] if one["setting"]["schedule"] == "serial")
    assert serial["memory"]["host"] == pytest.approx(1e6 / 8 * (26 + 36))
    assert run("report", tmp_path / "plan.json", "--out", tmp_path / "page.html") == 0
    assert run("plan", config, "--profile", "npu-1536", "--workers", "8") == 0
    assert "say how many rows they will have with --rows TABLE=COUNT" in capsys.readouterr().out


def test_the_budget_of_tables_named_with_a_wildcard_counts(clicks: Path, tmp_path: Path) -> None:
    """[tables."f*"] makes the tables f0 and f1, each with the budget."""
    arguments = ("plan", clicks, "--profile", "npu-1536", "--workers", "2", "--json", tmp_path / "plan.json")
    assert run(*arguments, "--set", "tables.f*.memory=100MB") == 0
    assert document(tmp_path / "plan.json")["results"][0]["memory"]["host"] == 2 * 100e6 / 2


# -- mistakes ----------------------------------------------------------------------------------------------------------


SIMULATE = {"--profile": "npu-1536", "--workers": "2,4"}
PLAN = {"--profile": "npu-1536", "--workers": "4"}


@pytest.mark.parametrize(
    ("command", "options", "told"),
    [
        ("simulate", {**SIMULATE, "--profile": "npu-153"}, "did you mean 'npu-1536'"),
        ("plan", {**PLAN, "--profile": "npu-153"}, "did you mean 'npu-1536'"),
        ("simulate", {**SIMULATE, "--profile": "none.toml"}, "cannot read the profile none.toml"),
        ("simulate", {**SIMULATE, "--workers": "0"}, "must be at least 1, got 0"),
        ("simulate", {**SIMULATE, "--workers": "4,-1"}, "must be at least 1, got -1"),
        ("plan", {**PLAN, "--workers": "0"}, "must be at least 1, got 0"),
        ("simulate", {**SIMULATE, "--steps": "0"}, "must be at least 1, got 0"),
        ("simulate", {**SIMULATE, "--schedules": "serial,nestd"}, "'nestd', which is not known; did you mean 'nested'"),
        ("simulate", {**SIMULATE, "--replicas": "3"}, "2 workers cannot form 3 equal groups (replicas)"),
        ("plan", {**PLAN, "--rows": "item"}, "write it as TABLE=COUNT"),
        ("plan", {**PLAN, "--rows": "item=many"}, "write it as TABLE=COUNT"),
        ("plan", {**PLAN, "--rows": "item=-5"}, "write it as TABLE=COUNT"),
        ("plan", {**PLAN, "--rows": "=5"}, "write it as TABLE=COUNT"),
        ("plan", {**PLAN, "--rows": "item=nan"}, "write it as TABLE=COUNT"),
        ("plan", {**PLAN, "--rows": "itme=5"}, "--rows names a table 'itme'; the config has item"),
        ("simulate", {**SIMULATE, "--zipf": "item=1.05"}, "write it as TABLE=SKEW,ITEMS"),
        ("simulate", {**SIMULATE, "--zipf": "item=-1,1e6"}, "needs items >= 1 and skew >= 0"),
        ("simulate", {**SIMULATE, "--zipf": "item=nan,1e6"}, "needs items >= 1 and skew >= 0"),
        ("plan", {**PLAN, "--zipf": "itme=1.05,1e6"}, "did you mean 'item'"),
        ("simulate", {**SIMULATE, "--set": "train.batchsize=3"}, "did you mean 'batch_size'"),
        ("plan", {"--workers": "4"}, "--profile"),
    ],
    ids=str,
)
def test_a_mistake_ends_with_one_line_that_says_what_to_do(
    command: str, options: dict[str, str], told: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [text for option in options.items() for text in option]
    flags = [f"{a}={b}" for a, b in zip(flags[::2], flags[1::2], strict=True)]  # a value may begin with a dash
    assert run(command, config, *flags) != 0
    err = capsys.readouterr().err
    assert told in err.splitlines()[-1] and "Traceback" not in err
    lines = [line for line in err.splitlines() if "error" in line]
    assert len(lines) == 1 and lines[0].startswith("nestpipe")


@pytest.mark.parametrize("entry", ["hosted = 3", "cores = 'x'", "jitter = [1]", "note = 3"])
def test_a_mistake_in_a_profile_is_told_in_one_line(
    entry: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = to_toml(profile({"FWD": (0.1, 0.0)}))
    name = entry.split()[0]
    start = text.index(f"{name} =")
    end = text.index("\n", text.index('"""', start + 10) if name == "note" else start)
    (tmp_path / "mine.toml").write_text(text[:start] + entry + text[end:])
    assert run("simulate", config, "--profile", "mine.toml", "--workers", "2", "--schedules", "serial") == 1
    assert capsys.readouterr().err.startswith("nestpipe: error: profile mine: ")
