from __future__ import annotations

import sys
from collections.abc import Callable

from nestpipe.bench import reading


def test_every_way_of_reading_is_timed_beside_the_same_compute_loop(sane: Callable[..., str]) -> None:
    interval = sys.getswitchinterval()
    results = reading.run(quick=True)
    for part in ("synthetic_sequences", "synthetic_clicks", "criteo", "Python lists"):
        assert any(name.startswith(part) for name in results), part
    for one in results.values():
        assert list(one["ways"]) == ["alone", "thread", "thread, 0.5 ms switch interval", "process"]
        assert one["read_ms"] > 0 and all(way["ms"] > 0 for way in one["ways"].values())
    text = sane(reading.sections(results))
    assert all(f"| {name} |" in text for name in results)
    assert sys.getswitchinterval() == interval
