"""Small configs, and a workload and a profile made by hand whose figures can be worked out on paper."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from nestpipe.config import Config, override, parse
from nestpipe.simulate.network import Level, Network
from nestpipe.simulate.profile import Profile, Work
from nestpipe.simulate.workload import TableLoad, Workload

SEQUENCES: dict[str, Any] = {
    "data": {
        "kind": "synthetic_sequences", "num_items": 300, "skew": 1.0, "mean_length": 6, "max_length": 12,
        "num_negatives": 4,
    },
    "model": {"kind": "hstu", "num_layers": 1},
    "tables": {"item": {"dim": 8, "features": ["history", "negatives"]}},
    "train": {"batch_size": 16},
    "schedule": {"name": "nested", "micro_batches": 4},
}  # fmt: skip

CLICKS: dict[str, Any] = {
    "data": {
        "kind": "synthetic_clicks", "num_features": 2, "keys_per_table": 50, "keys_per_bag": 3, "num_dense": 2,
        "num_samples": 4000,
    },
    "model": {"kind": "dlrm", "bottom": [8], "top": [8]},
    "tables": {"f*": {"dim": 4, "pooling": "sum"}},
    "train": {"batch_size": 32},
}  # fmt: skip


def sequences(*overrides: str) -> Config:
    return _config(SEQUENCES, overrides)


def clicks(*overrides: str, **sections: Any) -> Config:
    return _config({**CLICKS, **sections}, overrides)


def _config(values: Mapping[str, Any], overrides: tuple[str, ...]) -> Config:
    values = copy.deepcopy(dict(values))
    for one in overrides:
        override(values, one)
    return parse(values)


def load(**changes: Any) -> TableLoad:
    """40 keys a batch, half of them distinct, in rows of 8 floats."""
    values: dict[str, Any] = dict(name="item", dim=8, keys=40.0, growth=lambda drawn: drawn / 2, record=36)
    return TableLoad(**{**values, **changes})


def workload(**changes: Any) -> Workload:
    values: dict[str, Any] = dict(
        name="tiny", samples=10, input_bytes=1000.0, tables=[load()], dense_bytes=400.0, forward_flops=1e6,
        backward_flops=2e6,
    )  # fmt: skip
    return Workload(**{**values, **changes})


def profile(operations: Mapping[str, tuple[float, float]], **changes: Any) -> Profile:
    """Nodes of four; links that take no time unless others are given. operations: (fixed, each)."""
    free = Level(latency=0.0, bandwidth=1e30)
    values: dict[str, Any] = dict(name="paper", network=Network(4, free, free))
    works = {name: Work(*work) for name, work in operations.items()}
    return Profile(operations=works, **{**values, **changes})
