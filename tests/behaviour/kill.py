"""`make kill`: runs that lose a worker at a random moment, some in the middle of a checkpoint, and must end as others do.

Each run is a real `nestpipe train --workers W --restarts K`; one of its workers is killed with SIGKILL, once or twice. It has to
end by itself, with the digest of the run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.test_cli import children

CONFIG = """
[data]
kind = "synthetic_sequences"
num_items = 20000
num_valid_samples = 50
num_test_samples = 50
num_negatives = 8
mean_length = 10
max_length = 20
[model]
kind = "hstu"
num_layers = 1
max_length = 20
[tables]
item = {{ dim = 64, features = ["history", "negatives"], max_rows = 12000, {table} }}
[train]
batch_size = 32
steps = 160
checkpoint_every = 8
keep_checkpoints = 2
full_every = {full_every}
[schedule]
name = "{schedule}"
micro_batches = {micro_batches}
replicas = {replicas}
"""
PATIENCE = 300.0  # seconds for a whole run


def settings(rng: random.Random, replicas: int) -> dict[str, object]:
    schedule = rng.choice(["serial", "dbp", "fwp", "nested"])
    shards = rng.choice([2, 2, 3]) if replicas == 1 else 2
    # Of a table on disk: enough for a third of its rows. (With replicas a batch's buffers hold the rows of all groups.)
    memory = "16MB" if shards == 3 or replicas > 1 else "11MB"
    return {
        "workers": shards * replicas,
        "replicas": replicas,
        "schedule": schedule,
        "micro_batches": 1 if schedule in ("serial", "dbp") else 2,
        "table": rng.choice(['tier = "memory"', f'tier = "disk", memory = "{memory}"']),
        "full_every": rng.choice([1, 4]),
    }


def start(folder: Path, chosen: dict[str, object], *options: str) -> subprocess.Popen[bytes]:
    config = folder / "config.toml"
    config.write_text(CONFIG.format(**chosen))
    command = [sys.executable, "-m", "nestpipe", "train", str(config), "--workers", str(chosen["workers"])]
    log = (folder / "log").open("ab")
    return subprocess.Popen([*command, "--out", str(folder / "run"), *options], stdout=log, stderr=log)


def digest(folder: Path) -> str:
    return str(json.loads((folder / "run" / "result.json").read_text())["digest"])


def kill_one(process: subprocess.Popen[bytes], folder: Path, rng: random.Random, seconds: float) -> str:
    """Waits for a moment and kills a worker; says when and whom."""
    moment = rng.random() * seconds
    in_checkpoint = rng.random() < 0.5
    begin = time.monotonic()
    while process.poll() is None:
        now = time.monotonic() - begin
        writing = next((folder / "run" / "checkpoints").glob(".step-*.partial"), None)
        if now > moment and (writing is not None or not in_checkpoint):
            victims = children(process.pid)
            if victims:
                victim = rng.choice(victims)
                try:
                    os.kill(victim, signal.SIGKILL)
                except ProcessLookupError:
                    return "nobody"
                return f"worker {victims.index(victim)} after {now:.1f} s" + (
                    f", writing {writing.name}" if writing else ""
                )
        time.sleep(0.002)
    return "nobody: it was done"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=1, help="of the tables, each on two workers")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    expected: dict[tuple[object, ...], tuple[str, float]] = {}
    failed = lost = 0
    base = Path(tempfile.mkdtemp(prefix="nestpipe-kill-"))
    for number in range(arguments.runs):
        rng = random.Random(arguments.seed * 1_000_003 + number)
        chosen = settings(rng, arguments.replicas)
        # How often it is saved, and where rows are, must not change what is learned.
        same = chosen["workers"], chosen["micro_batches"]
        if same not in expected:
            folder = base / f"whole-{'-'.join(map(str, same))}"
            folder.mkdir()
            begin = time.monotonic()
            assert start(folder, chosen).wait(PATIENCE) == 0, (folder / "log").read_text()
            expected[same] = digest(folder), time.monotonic() - begin
        folder = base / f"run-{number}"
        seconds = expected[same][1]
        while True:  # until somebody was there to be killed
            folder.mkdir()
            process = start(folder, chosen, "--restarts", "4")
            told = [kill_one(process, folder, rng, seconds) for _ in range(rng.choice([1, 1, 2]))]
            try:
                code = process.wait(PATIENCE)
                right = code == 0 and digest(folder) == expected[same][0]
            except subprocess.TimeoutExpired:
                code, right = None, False
                process.kill()
            if not right or any(one.startswith("worker") for one in told):
                break
            shutil.rmtree(folder)
            seconds /= 2
        lost += sum(one.startswith("worker") for one in told)
        failed += not right
        print(
            f"{number}: {chosen} killed {'; '.join(told)}: {'same digest' if right else f'FAILED (exit code {code})'}",
            flush=True,
        )
        if right:
            shutil.rmtree(folder)
        else:
            print((folder / "log").read_text()[-3000:], flush=True)
    print(f"{arguments.runs} runs, which lost {lost} workers, {failed} failed")
    if not failed:
        shutil.rmtree(base)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
