"""`nestpipe bench SUITE`: runs a suite, prints its table, writes JSON."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

from nestpipe.bench import kernels
from nestpipe.run import write_json


def run(suite: str, *, json_file: Path | None, quick: bool) -> None:
    if suite == "kernels":
        results: dict[str, Any] = kernels.run(quick=quick)
        text = kernels.table(results)
    else:
        from nestpipe.bench.peers import suite as peers

        results = peers.run(quick=quick)
        text = peers.table(results)
    print(text)
    if json_file is not None:
        machine = {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__}
        write_json(json_file, {"suite": suite, "quick": quick, "machine": machine, "results": results})
