"""`nestpipe bench SUITE ...`: runs suites, prints their tables, writes what they found.

A suite is a module with `run(*, quick) -> results` (plain values, as JSON has them) and `sections(results)`, which says
them as tables and charts. `all` is every suite of `ALL`, in that order.
"""

from __future__ import annotations

import importlib
import os
import platform
import shlex
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nestpipe.bench.progress import tell
from nestpipe.files import check_writable, write_json, write_text
from nestpipe.sections import from_json, markdown, to_json

SUITES = {
    "kernels": "nestpipe.bench.kernels",
    "overlap": "nestpipe.bench.overlap",
    "peers": "nestpipe.bench.peers.suite",
    "ablation": "nestpipe.bench.ablation",
    "scaling": "nestpipe.bench.scaling",
    "sensitivity": "nestpipe.bench.sensitivity",
    "reading": "nestpipe.bench.reading",
    "storage": "nestpipe.bench.storage",
    "timelines": "nestpipe.bench.timelines",
    "simulator": "nestpipe.bench.predictions",
    "checkpoint": "nestpipe.bench.saving",
    "two_d": "nestpipe.bench.two_d",
    "sequences": "nestpipe.bench.sequences.suite",
    "serving": "nestpipe.bench.serving.suite",
    "precision": "nestpipe.bench.precision",
}
# The figures that are compared with the papers'. Not the others: storage alone writes 20 GB to the disk, reading is
# about data sets, timelines are pictures for a page of the documentation, precision is about the model's own part, and
# simulator, checkpoint, two_d, sequences and serving have pages of their own.
ALL = ("kernels", "overlap", "peers", "ablation", "scaling", "sensitivity")
FOLDER = Path("runs/bench")  # of several suites, unless another one is asked for


def bench(
    names: Sequence[str],
    *,
    quick: bool,
    json_file: Path | None = None,
    markdown_file: Path | None = None,
    folder: Path | None = None,
) -> None:
    """Runs suites one after another. The others go on when one fails; at the end ValueError says which did, and why.

    names: of `SUITES`, or "all".
    json_file, markdown_file: of one suite.
    folder: gets SUITE.json and SUITE.md as soon as each is done; `FOLDER` where several suites have none.
    """
    chosen = list(dict.fromkeys(suite for name in names for suite in (ALL if name == "all" else (name,))))
    if len(chosen) > 1 and (json_file or markdown_file):
        raise ValueError(
            f"--json and --markdown are of one suite, and there are {len(chosen)}: write --out FOLDER, which gets "
            f"SUITE.json and SUITE.md of each"
        )
    if folder is None and len(chosen) > 1:
        folder = FOLDER
    check_writable(json_file, markdown_file, folder=folder)  # no news for after an hour
    failed: dict[str, str] = {}
    for name in chosen:
        try:
            document = run(name, quick=quick)
        except Exception as error:  # the other suites are worth having all the same
            failed[name] = str(error).strip() or type(error).__name__
            traceback.print_exc()
            tell(f"{name}: failed")
            continue
        text = markdown(from_json(document["sections"]))
        print(f"## {name}\n\n{text}\n" if len(chosen) > 1 else text, flush=True)
        for file in (json_file, folder and folder / f"{name}.json"):
            if file is not None:
                write_json(file, document)
        for file in (markdown_file, folder and folder / f"{name}.md"):
            if file is not None:
                write_text(file, text + "\n")
    if folder is not None and len(failed) < len(chosen):
        print(f"written to {folder}: SUITE.json and SUITE.md of {', '.join(n for n in chosen if n not in failed)}")
    if failed:
        raise ValueError("; ".join(f"bench {name} failed: {why.splitlines()[-1]}" for name, why in failed.items()))


def run(name: str, *, quick: bool) -> dict[str, Any]:
    """What the JSON of a suite has in it."""
    module = importlib.import_module(SUITES[name])
    begin = time.perf_counter()
    tell(f"{name}: begins")
    results: dict[str, Any] = module.run(quick=quick)
    seconds = time.perf_counter() - begin
    tell(f"{name}: done in {seconds:.0f} s")
    return {
        "suite": name,
        "quick": quick,
        "command": shlex.join(["nestpipe", "bench", name, *(["--quick"] if quick else [])]),
        "machine": machine(),
        "seconds": seconds,
        "sections": to_json(module.sections(results)),
        "results": results,
    }


def machine() -> dict[str, Any]:
    """What a reader needs to place the figures; nothing that tells whose machine it is."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu() -> str:
    names = Path("/proc/cpuinfo")
    if names.exists():
        for line in names.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
