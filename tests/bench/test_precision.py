from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nestpipe.bench import precision


def test_every_way_of_computing_is_timed_and_judged_after_the_same_steps(
    sane: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[torch.nn.Module] = []

    def instead(model: torch.nn.Module, **_: object) -> torch.nn.Module:
        """Compiling takes tens of seconds."""
        compiled.append(model)
        return model

    monkeypatch.setattr(torch, "compile", instead)
    monkeypatch.setattr(precision, "finds_a_compiler", lambda: True)
    results = precision.run(quick=True)
    assert list(results["models"]) == ["DLRM", "HSTU"]
    for model in results["models"].values():
        ways = model["ways"]
        assert list(ways) == list(precision.WAYS)
        assert all(way["ms"] > 0 and way["first_s"] > 0 for way in ways.values())
        assert ways["float32, compiled"]["loss"] == ways["float32"]["loss"]
        assert ways["bf16, compiled"]["loss"] == ways["bf16"]["loss"]
        assert ways["bf16"]["loss"] != ways["float32"]["loss"]
        assert ways["bf16"]["loss"] == pytest.approx(ways["float32"]["loss"], rel=0.02)
    assert [type(model).__name__ for model in compiled] == ["DLRM", "DLRM", "HSTU", "HSTU"]
    text = sane(precision.sections(results))
    assert all(f"| {name} | {way} |" in text for name in results["models"] for way in precision.WAYS)


def test_without_a_compiler_the_rest_is_measured_and_the_table_says_so(
    sane: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "finds_a_compiler", lambda: False)
    text = sane(precision.sections(precision.run(quick=True)))
    assert "| HSTU | bf16 |" in text and "compiled |" not in text and "there is no C++ compiler" in text
