"""`nestpipe bench ablation` runs, and its figures hang together; how fast it is nobody asks here."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nestpipe.batch import Batch, Jagged
from nestpipe.bench import ablation, emulated, timelines
from nestpipe.bench.ablation import Bytes, Limited
from nestpipe.bench.contestants import Law
from nestpipe.bench.emulated import EmulatedModel, pad
from nestpipe.bench.mix import Mix
from nestpipe.schedule.ops import Op, Task

Here, Sane = Callable[[ModuleType], None], Callable[..., str]


def test_bytes_are_counted_for_every_way_to_cut_a_batch(here: Here, sane: Sane) -> None:
    here(ablation)
    size = Bytes(workers=(2,), laws=(Law(1.05, per_user=4),), cuts=(4,), samples=32, length=10, steps=1)
    results = ablation.run_bytes(size)
    assert len(results) == len(size.settings) == 7
    ratio = {(one["micro_batches"], one["window_cache"], one["clustering"]): one["ratio"] for one in results}
    assert ratio[1, True, "none"] == 1
    for clustering in ("none", "shared", "window"):
        # No row is sent twice; there is only a little more to say about which.
        assert 1 <= ratio[4, True, clustering] < ratio[4, False, clustering]
    assert ratio[4, False, "shared"] < ratio[4, False, "none"]
    text = sane(list(ablation.bytes_sections(results)))
    assert "| 2 | sessions (4 samples a user, Zipf(1.05)) |" in text
    assert f"| 4 | {ratio[4, True, 'none']:.3f} / {ratio[4, True, 'shared']:.3f} / " in text


def test_the_mix_is_measured_under_every_schedule(here: Here, sane: Sane) -> None:
    here(ablation)
    size = Mix(workers=2, samples=16, length=5, step=0.12, cuts=(4,), rounds=1, steps=8, short=4)
    results = ablation.run_mix(size)
    nested = ["nested, N = 4, clustering window", "nested, N = 4, clustering taper"]
    others = ["serial", "dbp", "fwp, N = 4, clustering window"]
    assert list(results["ms"]) == [*others, *nested, "stale (NOT exact)"]
    serial = results["ms"]["serial"]
    assert serial["step"] >= 0.9 * 120  # operations that last as they should
    assert serial["exposed communication"] == pytest.approx(serial["communication"])  # a serial run hides nothing
    assert serial["exposed lookup"] == pytest.approx(serial["lookup"]) and serial["speedup"] == 1
    assert serial["lookup"] > serial["compute"] > serial["communication"] * 0.5
    for one in results["ms"].values():
        assert 0 <= one["exposed communication"] <= one["communication"] * 1.001
        assert one["longest lane"] <= one["step"] * 1.001
        assert one["iqr"] >= 0 and one["memory"] > 0
        assert one["bytes"] == pytest.approx(serial["bytes"], rel=0.1)  # the window sends no row twice
    text = sane(list(ablation.mix_sections(results)), is_emulated=True)
    for said in ("nested, N = 4", "(3.06x)", "stale (NOT exact)", "(1.98x)"):
        assert said in text


def test_links_are_told_as_what_they_were(here: Here, sane: Sane) -> None:
    here(ablation)
    size = Limited(laws=((Law(1.05), 8),), real=(True,), length=5, micro_batches=2, rounds=1, steps=4)
    results = ablation.run_links(size)
    assert [run["compute"].split(",")[0] for run in results["runs"]] == [emulated.LABEL, "CPU"]
    for run in results["runs"]:
        assert (
            list(run["ms"]) == [setting.name for setting in size.settings]
            and run["ms"]["serial"]["exposed of own"] == 1
        )
    text = sane(list(ablation.links_sections(results)))
    assert "loopback, unlimited (a test)" in text and "| CPU, " in text and emulated.LABEL in text


def test_every_limited_run_has_its_serial_reference() -> None:
    for size in (Limited(), ablation.QUICK_LIMITED, Mix(), ablation.QUICK_MIX):
        names = [setting.name for setting in size.settings]
        assert names[0] == "serial" and len(set(names)) == len(names)


@pytest.mark.parametrize("per_user", [1, 4])
def test_samples_of_a_user_share_nearly_all_keys(per_user: int) -> None:
    keys = Law(1.05, per_user=per_user, equal=True, items=1 << 50).batch(64, 20, seed=3).keys["history"]
    assert len(keys.values) == 64 * 20 and int(keys.values.min()) >= 0
    distinct = len(np.unique(keys.values[keys.values > 1000]))  # few of these come twice by chance
    expected = 64 // per_user * (20 + per_user - 1)
    assert 0.6 * expected < distinct <= expected
    again = Law(1.05, per_user=per_user, equal=True, items=1 << 50).batch(64, 20, seed=3).keys["history"]
    assert torch.equal(keys.values, again.values)


def test_some_users_have_many_more_samples_than_others() -> None:
    keys = Law(1.05, per_user=4, items=1 << 50).batch(512, 20, seed=3).keys["history"].values.reshape(512, 20)
    rare = [frozenset(key for key in one if key > 10**6) for one in keys.tolist()]
    mates = [sum(len(one & other) > 1 for other in rare) for one in rare]  # of each sample, itself included
    assert 3 < np.mean([1 / n for n in mates if n]) ** -1 < 6 and max(mates) > 10 and min(mates) <= 1


def test_every_schedule_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Here, sane: Sane) -> None:
    monkeypatch.chdir(tmp_path)
    here(timelines)
    results = timelines.run(quick=True)
    assert list(results) == ["serial", "dbp", "fwp", "nested", "semi_async"]
    text = sane(timelines.sections(results), is_emulated=True)
    for name in results:
        picture = tmp_path / timelines.FOLDER / name / "trace.png"
        assert picture.read_bytes().startswith(b"\x89PNG") and f"{name}/trace.png" in text


def rows_of(batch: Batch, values: torch.Tensor) -> dict[str, Any]:
    return {"history": Jagged(values, batch.keys["history"].offsets)}


def test_the_emulated_model_gives_real_gradients() -> None:
    torch.manual_seed(0)
    batch = Batch({"history": Jagged.from_lengths(torch.arange(5), torch.tensor([3, 0, 2]))})
    values = torch.randn(5, 8, requires_grad=True)
    model = EmulatedModel(dim=8)
    losses = model(batch, rows_of(batch, values)).losses
    losses.sum().backward()
    weight = model.weight.detach()
    assert values.grad is not None and torch.allclose(values.grad, (values.detach() @ weight)[:, None] * weight)
    assert losses[1] == 0 and losses.shape == (3,) and model.tokens == 5


def test_the_emulated_model_gives_each_sample_the_same_whatever_it_is_cut_into() -> None:
    torch.manual_seed(0)
    batch = Law(1.05).batch(6, 5, seed=1)
    values, model = torch.randn(30, 8), EmulatedModel(dim=8)
    whole = model(batch, rows_of(batch, values)).losses
    parts = [batch.slice(0, 2), batch.slice(2, 6)]
    halves = [model(part, rows_of(part, v)).losses for part, v in zip(parts, values.split([10, 20]), strict=True)]
    assert torch.equal(whole, torch.cat(halves))


def test_padded_operations_last_as_long_as_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    model = EmulatedModel(dim=8)
    trainer: Any = SimpleNamespace(model=model, sent=SimpleNamespace(rows=0))
    pad(trainer, {"ROUTE": 0.05}, seconds_per_token=0.01, seconds_per_byte=1e-3)

    def seconds(name: str, work: Callable[[], None], part: int = 0) -> float:
        begin = time.perf_counter()
        trainer.around(Task(Op(name, 0, part), "compute"), work)
        return time.perf_counter() - begin

    def send() -> None:
        trainer.sent.rows += 100

    def compute(tokens: int) -> None:
        model.tokens = tokens

    assert seconds("ROUTE", lambda: time.sleep(0.03)) >= 0.05
    assert seconds("EMB", send) >= 0.1 and seconds("GRAD", send) >= 0.1
    assert seconds("FWD", lambda: compute(9), 0) >= 0.03 and seconds("FWD", lambda: compute(12), 1) >= 0.04
    assert seconds("BWD", lambda: None, 1) >= 0.08 and seconds("BWD", lambda: None, 0) >= 0.06
    monkeypatch.setattr(emulated.time, "sleep", lambda _: pytest.fail("an operation that is not named sleeps"))
    seconds("UPDATE", lambda: None)
