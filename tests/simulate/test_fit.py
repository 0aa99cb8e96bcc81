"""Profiles of published clusters: the files are what the fit makes, and what the fit was not given comes out about right."""

from __future__ import annotations

import dataclasses

import pytest

from nestpipe.schedule.setting import Setting
from nestpipe.simulate import fit
from nestpipe.simulate.profile import Profile, read
from nestpipe.simulate.sweep import Prediction, predict
from nestpipe.simulate.workload import Workload

KNOWN_MISS = "NestPipe, N = 32, no clustering"  # docs/scaling.md says by how much, and why

Compared = dict[str, tuple[fit.Published, Prediction, float]]


def same_to_four_digits(fitted: Profile, written: Profile) -> None:
    assert fitted.name == written.name and fitted.operations.keys() == written.operations.keys()
    for name in fitted.operations:
        ours, theirs = fitted.work(name), written.work(name)
        assert (ours.fixed, ours.each) == pytest.approx((theirs.fixed, theirs.each), rel=1e-4, abs=0), name
    assert fitted.network.per_node == written.network.per_node
    for level in ("inside", "between"):
        ours, theirs = (dataclasses.asdict(getattr(one.network, level)) for one in (fitted, written))
        assert ours == pytest.approx(theirs, rel=1e-4), level
    for field in ("cores", "crowding", "jitter", "device_memory", "host_memory", "disk"):
        assert getattr(fitted, field) == pytest.approx(getattr(written, field), rel=1e-4), field
    assert fitted.hosted == written.hosted


def test_the_files_are_what_the_fit_makes(hstu_1536: Workload) -> None:
    npu = fit.npu_1536(hstu_1536)
    same_to_four_digits(npu, read("npu-1536"))
    same_to_four_digits(fit.gpu_128(hstu_1536, npu), read("gpu-128"))


def test_the_baseline_it_was_fitted_to_comes_back(hstu_1536: Workload) -> None:
    for workers in (fit.SMALL, fit.LARGE):
        one = predict(hstu_1536, read("npu-1536"), Setting("serial"), workers)
        assert one.lookup == pytest.approx(1e3 * fit.LOOKUP[workers], rel=0.03)
        assert one.communication == pytest.approx(1e3 * fit.COMMUNICATION[workers], rel=0.03)
        assert one.compute == pytest.approx(1e3 * fit.DENSE, rel=0.001)


@pytest.fixture(scope="module")
def compared(hstu_1536: Workload) -> Compared:
    found = fit.against_published(hstu_1536, read("npu-1536"))
    return {published.system: (published, predicted, efficiency) for published, predicted, efficiency in found}


@pytest.mark.parametrize("system", [one.system for one in fit.PUBLISHED if one.system != KNOWN_MISS])
def test_a_published_step_is_predicted_to_seven_percent_and_its_efficiency_to_four_points(
    compared: Compared, system: str
) -> None:
    published, predicted, efficiency = compared[system]
    assert predicted.workers == fit.LARGE and predicted.setting == published.setting.name
    assert predicted.step == pytest.approx(published.step, rel=0.07)
    if published.efficiency is not None:
        assert efficiency == pytest.approx(published.efficiency, abs=0.04)


def test_what_is_not_predicted_is_known(compared: Compared) -> None:
    """If this fails the simulator became better: say so in docs/scaling.md."""
    published, predicted, _ = compared[KNOWN_MISS]
    assert abs(predicted.step / published.step - 1) > 0.07


def test_only_the_baseline_was_fitted() -> None:
    assert [one.system for one in fit.PUBLISHED if one.fitted] == ["TorchRec"]


def test_the_published_speed_up_on_gpus_comes_back(hstu_1536: Workload) -> None:
    gpu = read("gpu-128")
    serial, nested = (predict(hstu_1536, gpu, setting, fit.SMALL).step for setting in (Setting("serial"), fit.NESTPIPE))
    assert serial / nested == pytest.approx(fit.GPU_SPEEDUP, abs=0.02)


def test_lines_and_powers_agree_on_the_published_counts_and_part_beyond_them(hstu_1536: Workload) -> None:
    counts = [fit.SMALL, fit.LARGE, 3072, 8192]
    found = fit.beyond(hstu_1536, read("npu-1536"), Setting("serial"), counts)
    assert [(line.workers, power.workers) for line, power in found] == [(count, count) for count in counts]
    lines, powers = ([pair[place].step for pair in found] for place in range(2))
    assert lines[:2] == pytest.approx(powers[:2], rel=0.002)
    assert lines == sorted(lines) and powers == sorted(powers)
    assert lines[-1] > 2 * lines[1] and lines[2] > 1.05 * powers[2] and lines[3] > 1.3 * powers[3]
