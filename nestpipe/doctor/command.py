"""The command line of `nestpipe doctor`."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, NoReturn

PARTS = 8  # times --timeout, after which it ends itself, whatever it hangs in


def add_parser(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor", help="before a long run: are all workers, their data, folders and links in order?"
    )
    doctor.add_argument("config", type=Path, metavar="CONFIG.toml")
    doctor.add_argument(
        "--workers", type=int, default=1, metavar="N", help="on this machine; under torchrun: as it says"
    )
    doctor.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                        help="overrides an entry of the config")  # fmt: skip
    doctor.add_argument("--out", type=Path, help="run folder of the run to come (default: runs/NAME)")
    doctor.add_argument("--rows", action="append", default=[], metavar="TABLE=COUNT",
                        help="rows that a table will have, over all workers: is there room?")  # fmt: skip
    doctor.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="for each part (default: 60)")
    doctor.add_argument("--verdict", type=Path, help=argparse.SUPPRESS)  # where our own launcher wants the exit code
    doctor.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """The exit code: 1 if something has to be mended first."""
    from nestpipe import process

    try:
        rows = dict(_rows(text) for text in arguments.rows)
        if arguments.workers < 1 or not 0 < arguments.timeout <= 3600:
            raise ValueError("--workers must be at least 1, and --timeout from 0 to 3600 seconds")
    except ValueError as error:
        print(f"nestpipe: error: {error}", file=sys.stderr)
        return 2
    if arguments.workers > 1 and not process.under_launcher():
        return _launch(arguments)
    code = _examine(arguments, rows)
    if arguments.verdict is None:
        return code
    if process.rank() == 0:
        arguments.verdict.write_text(str(code))
    return 0  # a worker that leaves with another makes the launcher talk of a lost one


def _launch(arguments: argparse.Namespace) -> int:
    from nestpipe.launch import run_workers

    with tempfile.TemporaryDirectory() as folder:
        verdict = Path(folder) / "verdict"
        passed = ["doctor", str(arguments.config), "--timeout", str(arguments.timeout), "--verdict", str(verdict)]
        passed += ["--out", str(arguments.out)] if arguments.out else []
        passed += [word for text in arguments.overrides for word in ("--set", text)]
        passed += [word for text in arguments.rows for word in ("--rows", text)]
        code = run_workers(passed, workers=arguments.workers, port=0)
        return code or int(verdict.read_text())


def _examine(arguments: argparse.Namespace, rows: dict[str, float]) -> int:
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    from nestpipe import process
    from nestpipe.doctor.checks import FAIL, Finding
    from nestpipe.doctor.examine import Question, examine

    def tell(finding: Finding) -> None:
        print(finding, flush=True)

    def give_up() -> NoReturn:
        tell(
            Finding(
                FAIL, "doctor", f"rank {process.rank()} is not done after {PARTS * arguments.timeout:.0f} s; it hangs"
            )
        )
        os._exit(1)

    watch = threading.Timer(PARTS * arguments.timeout, give_up)
    watch.daemon = True
    watch.start()
    out = arguments.out or Path("runs") / arguments.config.stem
    question = Question(arguments.config, arguments.overrides, out, rows, arguments.timeout)
    try:
        store, rank, world = dist.HashStore(), 0, 1
        if process.under_launcher():
            store, rank, world = next(rendezvous("env://", timeout=datetime.timedelta(seconds=arguments.timeout)))
        return examine(question, store, rank, world, tell)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        tell(Finding(FAIL, "workers", f"rank {process.rank()} cannot meet the others at {address}: {error}"))
        return 1
    finally:
        watch.cancel()
        if dist.is_initialized():
            dist.destroy_process_group()


def _rows(text: str) -> tuple[str, float]:
    table, _, count = text.partition("=")
    try:
        return table, float(count.replace("_", ""))
    except ValueError:
        raise ValueError(f"--rows {text!r}: write it as TABLE=COUNT, for example --rows item=1e9") from None
