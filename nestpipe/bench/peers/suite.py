"""`nestpipe bench peers`: makes an environment with TorchRec if there is none yet, and runs the comparison in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nestpipe.bench.alternate import Timing
from nestpipe.bench.peers.comparison import DENSE, SERIAL, Comparison
from nestpipe.sections import Bars, Section, Table, shown

HERE = Path(__file__).parent
ENVIRONMENT = Path(os.environ.get("NESTPIPE_PEERS", ".venv-peers"))  # the peers are never installed beside nestpipe

NOTE = """\
Two workers on one machine; milliseconds per step, median over rounds (IQR), the slowest worker's. All contestants train on \
the same batches in the same processes, in turn; each block is timed from rest to rest, so a pipeline's work ahead is in its \
own time. Before, on a small copy, rows are seen to be the same after training under every schedule and by TorchRec (to 1e-4). \
TorchRec: the fastest of its pipelines and shardings that run on CPUs. *Speed-up*: TorchRec / nestpipe, within a round. *Over \
dense*: what a step takes beyond the dense part alone (its sum of gradients over workers included). *Wire*: megabytes that \
leave both workers in a step, dense gradients and headers included, counted by the network interface."""


def run(*, quick: bool) -> dict[str, Any]:
    command = [str(environment()), "-m", "nestpipe.bench.peers.compare", "--parent", str(os.getpid())]
    # The checkout or installation that runs this is the one measured.
    path = os.pathsep.join(p for p in (str(HERE.parents[2]), os.environ.get("PYTHONPATH")) if p)
    # TorchRec makes torch open its compiler's cache, by default among the temporary files.
    settings = {"PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": str((ENVIRONMENT / "cache").absolute())}
    finished = subprocess.run(
        command + ["--quick"] * quick, env={**os.environ, **settings}, stdout=subprocess.PIPE, check=False
    )
    if finished.returncode:
        raise ValueError("the comparison with TorchRec failed; its own message stands above")
    return {"comparisons": json.loads(finished.stdout)}


def environment() -> Path:
    """The Python of an environment that has TorchRec; made on first use."""
    python = ENVIRONMENT / "bin" / "python"
    ready = ENVIRONMENT / "ready"
    if not ready.exists():
        print(f"installing TorchRec into {ENVIRONMENT} (once)", file=sys.stderr)
        venv.create(ENVIRONMENT, with_pip=True)
        for arguments in (["-r", HERE / "requirements.txt"], ["--no-deps", "-r", HERE / "requirements-nodeps.txt"]):
            subprocess.run([python, "-m", "pip", "install", "--quiet", *map(str, arguments)], check=True)
        ready.touch()
    return python


def sections(results: Mapping[str, Any]) -> list[Section]:
    page: list[Section] = []
    comparisons = [Comparison.from_json(values) for values in results["comparisons"]]
    for link in dict.fromkeys(comparison.link for comparison in comparisons):
        here = [comparison for comparison in comparisons if comparison.link == link]
        achieved = sorted(comparison.mbit_per_second for comparison in here)[len(here) // 2]
        where = "loopback" if link == "loopback" else f"links of {link}/s"
        note = f"{achieved:,.0f} Mbit/s went through when all sent to all."
        page.append(_steps(here, where, note if page else f"{NOTE} {note}"))
        page.append(_bars(here, where))
    if comparisons:
        page.append(_memory(comparisons))
    return page


def _steps(comparisons: list[Comparison], where: str, note: str) -> Table:
    columns = ("workload", "nestpipe serial", "nestpipe pipelined", "TorchRec best", "dense only", "speed-up",
               "over dense: nestpipe / TorchRec", "wire MB: nestpipe / TorchRec")  # fmt: skip
    rows = []
    for comparison in comparisons:
        best, peer = comparison.best, comparison.best_peer
        timings, over = comparison.timings, comparison.over_dense_ms
        rows.append(
            (
                comparison.name,
                _ms(timings[SERIAL]),
                _ms(timings[best], of=f", {best.removeprefix('nestpipe ')}"),
                _ms(timings[peer], of=f", {peer.removeprefix('torchrec ')}"),
                _ms(timings[DENSE]),
                shown("{:.2f}x", comparison.speedup[best]),
                shown("{:.0f} / {:.0f}", over[best], over[peer]),
                shown("{:.1f} / {:.1f}", timings[best].counted / 1e6, timings[peer].counted / 1e6),
            )
        )
    return Table(f"nestpipe and TorchRec, {where}: ms per step", columns, rows, note)


def _bars(comparisons: list[Comparison], where: str) -> Bars:
    labels, dense, over = [], [], []
    for comparison in comparisons:
        for name in (SERIAL, comparison.best, comparison.best_peer):
            labels.append(f"{comparison.name}: {name}")
            over.append(max(0.0, comparison.over_dense_ms[name]))
            dense.append(comparison.timings[name].median_ms - over[-1])
    parts = {"dense part": dense, "tables: keys, rows, gradients, updates": over}
    return Bars(f"A step of nestpipe and of TorchRec, {where}", "ms", labels, parts)


def _memory(comparisons: list[Comparison]) -> Table:
    """Rows and optimizer state do not depend on the link."""
    rows = []
    for comparison in {comparison.name: comparison for comparison in reversed(comparisons)}.values():
        ours, theirs = comparison.facts[SERIAL], comparison.facts[comparison.best_peer]
        per_row = ours["table_bytes"] / max(1, ours["table_rows"])
        rows.append(
            (
                comparison.name,
                shown("{:,.0f}", ours["table_bytes"] / 1e6),
                shown("{:,}", ours["table_rows"]),
                shown("{:.0f}", per_row),
                shown("{:,.0f}", theirs["table_bytes"] / 1e6),
            )
        )
    columns = ("workload", "nestpipe MB", "rows", "bytes per row", "TorchRec MB")
    note = (
        "Of all workers. nestpipe's tables have the rows of keys that came up so far, with their index and room to grow; "
        "TorchRec's have every row from the start, and no index."
    )
    return Table("Memory of tables and their optimizer state", columns, rows[::-1], note)


def _ms(timing: Timing, *, of: str = "") -> str:
    """of: words that are put behind."""
    return shown("{:.0f} ({:.0f})" + of, timing.median_ms, timing.iqr_ms)
