"""Figures of a trace, against a step that can be worked out on paper."""

from __future__ import annotations

import pytest

from nestpipe.trace import Event, RankTrace
from nestpipe.trace.figures import figures

MS = 1_000_000


def test_what_runs_while_compute_waits_counts_once_and_as_communication_first() -> None:
    """Compute lane: SYNC, FWD, BWD, a gap. Beside it EMB for the first 3 ms of the gap, RETRIEVE from BWD to its end."""
    events = []
    for batch in range(24):
        start = 15 * batch
        for lane, op, begin, end in (
            (0, "SYNC", 0, 1), (0, "FWD", 1, 4), (0, "BWD", 4, 10), (1, "EMB", 10, 13), (2, "RETRIEVE", 8, 14.5),
            (1, "REDUCE", 4, 6), (0, "DENSE", 14.5, 15),
        ):  # fmt: skip
            events.append(Event(lane, op, batch, None, round((start + begin) * MS), round((start + end) * MS)))
    trace = RankTrace(0, 1, "nested", "compute ...", ["compute", "comm", "store"], 0, events)
    assert figures(trace) == pytest.approx(
        {
            "step": 15.0,
            "iqr": 0.0,
            "compute": 9.0,  # the model
            "communication": 5.0,
            "exposed communication": 3.0,  # REDUCE is hidden behind BWD
            "lookup": 7.5,
            "exposed lookup": 1.0 + 1.5,  # SYNC on the compute lane; RETRIEVE once EMB is over
            "longest lane": 10.5,
            "compute lane": 10.5,
        }
    )
