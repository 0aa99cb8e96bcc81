"""`nestpipe bench sequences` at its smallest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from nestpipe.bench import ablation
from nestpipe.bench.sequences import attention, negatives, steps, suite, waiting


def test_the_suite_measures_all_of_its_parts(here: Callable[..., None], sane: Callable[..., str]) -> None:
    for part in (waiting, steps, negatives, ablation):
        here(part)
    results = suite.run(quick=True)
    text = sane(suite.sections(results))
    assert [run["longest"] for run in results["attention"]["lengths"]] == list(attention.QUICK.lengths)
    for run in results["attention"]["lengths"]:
        assert run["differs"]["jagged"] < 1e-4 and run["ms"]["jagged"] > 0
    (uneven,) = results["waiting"]["runs"]
    assert uneven["size"] == dataclasses.asdict(waiting.QUICK)
    tokens = {name: rounds[0]["tokens"] for name, rounds in uneven["rounds"].items()}
    assert tokens["dealt by the data"] == tokens["dealt as a stream"] < tokens["as they come"]
    assert set(results["steps"]["rounds"]) == set(steps.MODELS)
    drawn = {name: blocks[0]["drawn"] for name, blocks in results["negatives"]["rounds"].items()}
    assert drawn["plain"] == drawn["streamed"] == 4 * drawn["a quarter drawn, streamed, shared with 3 others"]
    losses = {name: blocks[0]["loss"] for name, blocks in results["negatives"]["rounds"].items()}
    assert losses["streamed"] == pytest.approx(losses["plain"], rel=1e-5)
    assert "emulated accelerator" in text
