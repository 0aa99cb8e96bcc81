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
    found: list[Section] = []
    comparisons = results["comparisons"]
    for link in dict.fromkeys(one["link"] for one in comparisons):
        here = [one for one in comparisons if one["link"] == link]
        achieved = sorted(one["mbit_per_second"] for one in here)[len(here) // 2]
        where = "loopback" if link == "loopback" else f"links of {link}/s"
        note = f"{achieved:,.0f} Mbit/s went through when all sent to all."
        found.append(_steps(here, where, note if found else f"{NOTE} {note}"))
        found.append(_bars(here, where))
    if comparisons:
        found.append(_memory(comparisons))
    return found


def _steps(comparisons: list[dict[str, Any]], where: str, note: str) -> Table:
    columns = ("workload", "nestpipe serial", "nestpipe pipelined", "TorchRec best", "dense only", "speed-up",
               "over dense: nestpipe / TorchRec", "wire MB: nestpipe / TorchRec")  # fmt: skip
    rows = []
    for one in comparisons:
        best, peer, over = one["best"], one["best_peer"], one["over_dense_ms"]
        wire = {name: timing["counted"] / 1e6 for name, timing in one["timings"].items()}
        rows.append(
            (
                _name(one),
                _ms(one, "nestpipe serial"),
                _ms(one, best, of=f", {best.removeprefix('nestpipe ')}"),
                _ms(one, peer, of=f", {peer.removeprefix('torchrec ')}"),
                _ms(one, "dense only"),
                shown("{:.2f}x", one["speedup"][best]),
                shown("{:.0f} / {:.0f}", over[best], over[peer]),
                shown("{:.1f} / {:.1f}", wire[best], wire[peer]),
            )
        )
    return Table(f"nestpipe and TorchRec, {where}: ms per step", columns, rows, note)


def _bars(comparisons: list[dict[str, Any]], where: str) -> Bars:
    labels, dense, over = [], [], []
    for one in comparisons:
        for name in ("nestpipe serial", one["best"], one["best_peer"]):
            labels.append(f"{_name(one)}: {name}")
            over.append(max(0.0, one["over_dense_ms"][name]))
            dense.append(one["timings"][name]["median_ms"] - over[-1])
    parts = {"dense part": dense, "tables: keys, rows, gradients, updates": over}
    return Bars(f"A step of nestpipe and of TorchRec, {where}", "ms", labels, parts)


def _memory(comparisons: list[dict[str, Any]]) -> Table:
    """Rows and optimizer state do not depend on the link."""
    rows = []
    for one in {_name(one): one for one in reversed(comparisons)}.values():
        ours, theirs = one["facts"]["nestpipe serial"], one["facts"][one["best_peer"]]
        per_row = ours["table_bytes"] / max(1, ours["table_rows"])
        rows.append(
            (
                _name(one),
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


def _name(one: Mapping[str, Any]) -> str:
    return f"{one['workload']}, {one['keys']} keys"


def _ms(one: Mapping[str, Any], name: str, *, of: str = "") -> str:
    """of: words that are put behind."""
    timing = one["timings"][name]
    return shown("{:.0f} ({:.0f})" + of, timing["median_ms"], timing["iqr_ms"])
