"""`nestpipe bench SUITE`: runs a suite, prints its table, writes JSON."""

from __future__ import annotations

import importlib
import platform
from pathlib import Path
from typing import Any

import torch

from nestpipe.run import write_json

SUITES = {
    "ablation": "nestpipe.bench.ablation",
    "kernels": "nestpipe.bench.kernels",
    "overlap": "nestpipe.bench.overlap",
    "peers": "nestpipe.bench.peers.suite",
    "reading": "nestpipe.bench.reading",
    "storage": "nestpipe.bench.storage",
    "timelines": "nestpipe.bench.timelines",
}


def run(suite: str, *, json_file: Path | None, quick: bool) -> None:
    module = importlib.import_module(SUITES[suite])
    results: dict[str, Any] = module.run(quick=quick)
    print(module.table(results))
    if json_file is not None:
        machine = {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__}
        write_json(json_file, {"suite": suite, "quick": quick, "machine": machine, "results": results})
