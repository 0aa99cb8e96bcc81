"""`nestpipe bench peers`: makes an environment with TorchRec if there is none yet, and runs the comparison in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ENVIRONMENT = Path(os.environ.get("NESTPIPE_PEERS", ".venv-peers"))  # the peers are never installed beside nestpipe


def run(*, quick: bool) -> dict[str, Any]:
    python = environment()
    with tempfile.TemporaryDirectory(prefix="nestpipe-bench-") as folder:
        result = Path(folder) / "result.json"
        command = [str(python), "-m", "nestpipe.bench.peers.compare", "--json", str(result)]
        # The checkout or installation that runs this is the one measured.
        path = os.pathsep.join(p for p in (str(HERE.parents[2]), os.environ.get("PYTHONPATH")) if p)
        finished = subprocess.run(command + ["--quick"] * quick, env={**os.environ, "PYTHONPATH": path}, check=False)
        if finished.returncode:
            raise ValueError("the comparison with TorchRec failed; its own message stands above")
        return json.loads(result.read_text())


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


def table(results: dict[str, Any]) -> str:
    lines = [
        "| workload | nestpipe ms | TorchRec best ms | dense only ms | step ratio | over dense: nestpipe / TorchRec ms | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, one in results.items():
        times = {contestant: timing["median_ms"] for contestant, timing in one["timings"].items()}
        best, over = one["best_peer"], one["over_dense_ms"]
        lines.append(
            f"| {name} | {times['nestpipe']:.1f} | {times[best]:.1f} ({best.split()[1]}) | {times['dense only']:.1f} "
            f"| {one['step_ratio']:.2f}x | {over['nestpipe']:.1f} / {over[best]:.1f} | {one['over_dense_ratio']:.2f}x |"
        )
    return "\n".join(lines)
