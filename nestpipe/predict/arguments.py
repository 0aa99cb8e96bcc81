"""The arguments of `nestpipe predict`; without torch, which `--help` needs none of."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser, positive: Callable[[str], int]) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("data", nargs="?", metavar="DATA",
                        help="files to read instead of the run's own: a path or a pattern; all their rows")  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.parquet",
                        help="one row for each sample, in the order of the data")  # fmt: skip
    parser.add_argument(
        "--split", choices=["valid", "test"], help="of the run's data (default: train.eval_split, or test)"
    )
    parser.add_argument("--checkpoint", metavar="NAME",
                        help="of the run, as in step-1000 (default: best if the run keeps one, else final)")  # fmt: skip
    parser.add_argument(
        "--top-k", type=positive, metavar="K", help="the best K items for each sample instead of scores"
    )
    parser.add_argument("--exclude-seen", action="store_true", help="with --top-k: not what the user has had")
    parser.add_argument("--no-labels", action="store_true", help="DATA has no label column: leaves data.label out")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                        help="overrides an entry of the config")  # fmt: skip


def passed_on(arguments: argparse.Namespace) -> list[str]:
    """The same arguments, for workers."""
    given = [str(arguments.run), *([arguments.data] if arguments.data else []), "--out", str(arguments.out)]
    for name in ("split", "checkpoint", "top_k"):
        value = getattr(arguments, name)
        given += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    given += [f"--{name.replace('_', '-')}" for name in ("exclude_seen", "no_labels") if getattr(arguments, name)]
    return given + [text for override in arguments.overrides for text in ("--set", override)]
