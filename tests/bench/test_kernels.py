from __future__ import annotations

from collections.abc import Callable

from nestpipe.bench import kernels


def test_every_kernel_is_timed_against_something(sane: Callable[..., str]) -> None:
    results = kernels.run(quick=True)
    for part in ("deduplicate", "index lookup + gather", "bucket", "pool", "scatter-add", "update adam", "update sgd"):
        assert any(name.startswith(part) for name in results), part
    assert all(one["ms"] > 0 and one["against_ms"] > 0 and one["speedup"] > 0 for one in results.values())
    text = sane(kernels.sections(results))
    assert all(f"| {name} |" in text for name in results)
