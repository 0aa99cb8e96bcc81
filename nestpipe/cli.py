"""nestpipe train | evaluate | predict | checkpoint | export | bundle | serve | load | trace | bench | report | profile |
simulate | plan | doctor"""

# Each command imports what it needs when it runs: torch takes seconds, and help, mistakes and a look at a run need none of it.

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nestpipe import __version__
from nestpipe.doctor import command as doctor
from nestpipe.importing import nothing_collected
from nestpipe.predict.arguments import add_arguments as add_predict_arguments
from nestpipe.predict.arguments import passed_on

SUITES = ("kernels", "overlap", "peers", "ablation", "scaling", "sensitivity", "reading", "storage", "timelines",
          "simulator", "checkpoint", "two_d", "sequences", "serving", "precision")  # fmt: skip
STOPPED = 128 + 15  # as a shell tells of a program that SIGTERM has ended
LEAVE_AFTER = 3.0  # seconds; the launcher ends all workers with the first that leaves


def main(argv: list[str] | None = None) -> None:
    """Parses the command line and leaves with its exit code."""
    arguments = _parser().parse_args(argv)
    arguments.is_own_process = argv is None
    if (
        os.getcwd() not in sys.path
    ):  # where models and data of one's own ("module:Class") are looked for, as python -m does
        sys.path.insert(0, os.getcwd())
    try:
        code = arguments.command(arguments)
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nestpipe", description=__doc__)
    parser.add_argument("--version", action="version", version=f"nestpipe {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a model described in a TOML file")
    train.add_argument("config", type=Path, metavar="CONFIG.toml")
    _add_workers(train)
    train.add_argument("--schedule", help="the same as --set schedule.name=...")
    train.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                       help="overrides an entry of the config, e.g. train.steps=20")  # fmt: skip
    train.add_argument("--out", type=Path, help="run folder (default: runs/NAME-TIME)")
    train.add_argument("--json", type=Path, metavar="FILE", help="write the result here too")
    train.add_argument(
        "--trace", action="store_true", help="record what runs when; look at it with `nestpipe trace RUN`"
    )
    train.add_argument("--resume", action="store_true", help="go on from the newest sound checkpoint in --out")
    train.add_argument("--restarts", type=_not_negative, default=0, metavar="K",
                       help="when a worker is lost, start all again from the newest sound checkpoint, up to K times")  # fmt: skip
    # By our own launcher, which has seen that the folder was new: what it starts again goes on from what the first start saved.
    # (Started again by another launcher after it was refused, a run must not go on in the folder of another one.)
    train.add_argument("--launched", action="store_true", help=argparse.SUPPRESS)
    train.set_defaults(command=_train)

    evaluate = commands.add_parser("evaluate", help="evaluate a finished run")
    evaluate.add_argument("run", type=Path, metavar="RUN", help="run folder")
    _add_workers(evaluate)
    evaluate.add_argument(
        "--checkpoint", choices=["final", "best"], help="default: best if the run keeps one, else final"
    )
    evaluate.add_argument("--split", choices=["train", "valid", "test"], help="default: train.eval_split of the run")
    evaluate.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    evaluate.add_argument("--json", type=Path, metavar="FILE")
    evaluate.set_defaults(command=_evaluate)

    predict = commands.add_parser("predict", help="scores, or the best items, for every sample of a data set")
    add_predict_arguments(predict, _positive)
    _add_workers(predict)
    predict.set_defaults(command=_predict)

    trace = commands.add_parser("trace", help="timeline of a run that was trained with --trace")
    trace.add_argument("run", type=Path, metavar="RUN", help="run folder")
    trace.set_defaults(command=_trace)

    checkpoint = commands.add_parser("checkpoint", help="look into checkpoints, check them, export their rows")
    actions = checkpoint.add_subparsers(required=True, metavar="ACTION")
    for name, what in (("inspect", "what is in it"), ("verify", "is every byte as it was written")):
        action = actions.add_parser(name, help=what)
        action.add_argument("path", type=Path, metavar="CHECKPOINT", help="a checkpoint, or a folder of them")
        action.set_defaults(command=_checkpoint, action=name)
    export = actions.add_parser(
        "export", help="rows of a table to Parquet; the same as `nestpipe export --format parquet`"
    )
    export.add_argument("source", type=Path, metavar="CHECKPOINT")
    export.add_argument("table", metavar="TABLE")
    export.add_argument("out", type=Path, metavar="FILE.parquet")
    export.set_defaults(command=_export_rows, format="parquet")

    export = commands.add_parser(
        "export", help="a bundle for serving, or the rows of a table, from a run or a checkpoint"
    )
    export.add_argument(
        "source", type=Path, metavar="RUN_OR_CHECKPOINT", help="its newest complete checkpoint, or that one"
    )
    export.add_argument("out", type=Path, metavar="OUT", help="a new folder; a file with --format parquet or npy")
    export.add_argument(
        "--since", type=Path, metavar="EARLIER", help="an earlier bundle: only what changed since, a delta"
    )
    export.add_argument("--format", choices=["bundle", "parquet", "npy"], default="bundle", help="default: bundle")
    export.add_argument(
        "--table", help="whose rows --format parquet or npy writes; may be left out if there is one only"
    )
    export.add_argument("--dtype", choices=["float32", "bfloat16"],
                        help="of rows in a bundle: bfloat16 halves those of float32 tables (default: as trained)")  # fmt: skip
    export.set_defaults(command=_export)

    bundle = commands.add_parser("bundle", help="look into bundles, check them")
    actions = bundle.add_subparsers(required=True, metavar="ACTION")
    for name, what in (("inspect", "what is in it"), ("verify", "is every byte as it was written")):
        action = actions.add_parser(name, help=what)
        action.add_argument("path", type=Path, metavar="BUNDLE")
        action.set_defaults(command=_bundle, action=name)

    serve = commands.add_parser("serve", help="rank candidates over HTTP with the model of a bundle")
    serve.add_argument("bundle", type=Path, metavar="BUNDLE", help="a folder of `nestpipe export`")
    serve.add_argument("--instances", type=_positive, default=1, metavar="N", help="processes that rank (default: 1)")
    serve.add_argument("--threads", type=_positive, default=1, metavar="N", help="of each instance (default: 1)")
    serve.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)"
    )
    serve.add_argument("--port", type=_not_negative, default=8000, help="0: any free one (default: 8000)")
    serve.add_argument("--slo-ms", type=float, default=100.0, metavar="MS",
                       help="a ranking is to be answered within; it says what is computed ahead (default: 100)")  # fmt: skip
    serve.add_argument("--device-memory", type=_bytes, default="1GB", metavar="SIZE",
                       help="for users' prefixes, in each instance (default: 1GB)")  # fmt: skip
    serve.add_argument("--host-memory", type=_bytes, default="4GB", metavar="SIZE",
                       help="behind it, for users who come back, in each instance; 0: none (default: 4GB)")  # fmt: skip
    serve.add_argument("--no-relay", action="store_true", help="full passes only; signals are of no use then")
    serve.add_argument("--reuse", action="store_true",
                       help="prefixes also for users whose full pass is fast enough, where that saves time")  # fmt: skip
    serve.add_argument("--answer-late", action="store_true",
                       help="also requests that have not begun by their deadline, when nothing else waits; else 503")  # fmt: skip
    serve.add_argument("--no-trigger", action="store_true", help="a prefix for every signal that there is room for")
    serve.add_argument("--no-affinity", action="store_true", help="requests go to any instance, not to their user's")
    serve.add_argument("--prefix-dtype", choices=["float32", "float16", "bfloat16"], default="float32",
                       help="in which prefixes are kept; half the bytes, rounded scores (default: float32)")  # fmt: skip
    serve.add_argument("--allow-updates", action="store_true",
                       help="POST /v1/update changes to a delta or bundle that lies beside BUNDLE")  # fmt: skip
    serve.add_argument("--max-request", type=_bytes, default="4MB", metavar="SIZE", help="default: 4MB")
    serve.add_argument("--max-history", type=_positive, default=16_384, metavar="N", help="items (default: 16384)")
    serve.add_argument("--max-candidates", type=_positive, default=4_096, metavar="N", help="items (default: 4096)")
    serve.add_argument("--drain", type=float, default=10.0, metavar="SECONDS",
                       help="that requests in flight are given when it is stopped (default: 10)")  # fmt: skip
    serve.set_defaults(command=_serve)

    load = commands.add_parser("load", help="send load to a server, and see how it does")
    load.add_argument(
        "bundle", type=Path, metavar="BUNDLE", help="that is served: its items are sent, its scores compared"
    )
    load.add_argument("--url", help="of a server that runs (default: one is started, and stopped at the end)")
    load.add_argument(
        "--instances", type=_positive, default=2, metavar="N", help="of a server that is started (default: 2)"
    )
    load.add_argument("--rate", type=float, default=20.0, help="ranking requests per second (default: 20)")
    load.add_argument("--seconds", type=float, default=20.0, help="that count (default: 20)")
    load.add_argument("--warm-up", type=float, default=5.0, metavar="SECONDS", help="before them (default: 5)")
    load.add_argument("--slo-ms", type=float, metavar="MS", help="in time is within (default: as the server says)")
    load.add_argument("--seed", type=int, default=0, help="of users, histories and times")
    load.add_argument("--json", type=Path, metavar="FILE", help="figures and charts, for `nestpipe report`")
    load.set_defaults(command=_load)

    bench = commands.add_parser("bench", help="side-by-side measurements")
    bench.add_argument("suites", nargs="+", choices=["all", *SUITES], metavar="SUITE",
                       help=f"one or more of {', '.join(SUITES)}; all: the first six")  # fmt: skip
    bench.add_argument("--json", type=Path, metavar="FILE", help="figures, tables and charts of one suite")
    bench.add_argument("--markdown", type=Path, metavar="FILE", help="the printed tables of one suite")
    bench.add_argument("--out", type=Path, metavar="FOLDER", help="SUITE.json and SUITE.md of each (default for several "
                       "suites: runs/bench)")  # fmt: skip
    bench.add_argument("--quick", action="store_true", help="small sizes: shows that it runs, not how fast")
    bench.set_defaults(command=_bench)

    report = commands.add_parser("report", help="runs and benches as one HTML page")
    report.add_argument("sources", type=Path, nargs="+", metavar="RUN_OR_JSON",
                        help="run folder, or file of `nestpipe bench SUITE --json FILE`")  # fmt: skip
    report.add_argument("--out", type=Path, metavar="FILE.html", help="default: in the run folder, beside the JSON; of "
                        "several sources ./report.html")  # fmt: skip
    report.add_argument("--title", help="of the page")
    report.set_defaults(command=_report)

    profile = commands.add_parser("profile", help="measure this machine and a model, for `simulate` and `plan`")
    _add_config(profile)
    _add_workers(profile, 2)
    profile.add_argument("--out", type=Path, default=Path("this-machine.toml"), metavar="FILE.toml",
                         help="default: this-machine.toml")  # fmt: skip
    profile.set_defaults(command=_profile)

    simulate = commands.add_parser("simulate", help="predict steps on a cluster that is not there")
    _add_config(simulate)
    _add_profile(simulate)
    simulate.add_argument("--workers", type=_counts, required=True, metavar="N,N,...", help="for example 128,256,1536")
    simulate.add_argument("--schedules", type=lambda text: text.split(","), default=["serial", "dbp", "fwp", "nested"],
                          metavar="NAME,...", help="default: serial,dbp,fwp,nested")  # fmt: skip
    simulate.add_argument("--replicas", type=_positive, metavar="M",
                          help="groups of workers that each hold all tables (default: as the config says)")  # fmt: skip
    simulate.add_argument("--steps", type=_positive, default=20, help="that are simulated (default: 20)")
    simulate.add_argument("--seed", type=int, default=0, help="of the profile's jitter")
    simulate.add_argument(
        "--out", type=Path, metavar="FOLDER", help="plot and timeline (default: runs/simulate-CONFIG)"
    )
    simulate.add_argument("--json", type=Path, metavar="FILE", help="figures, for programs and for `nestpipe report`")
    simulate.set_defaults(command=_simulate)

    plan = commands.add_parser("plan", help="memory of each tier and the best schedule for a cluster and a model")
    _add_config(plan)
    _add_profile(plan)
    plan.add_argument("--workers", type=_positive, required=True, metavar="N")
    plan.add_argument("--rows", action="append", default=[], metavar="TABLE=COUNT",
                      help="rows that a table will have, over all workers; once for each table")  # fmt: skip
    plan.add_argument("--json", type=Path, metavar="FILE")
    plan.set_defaults(command=_plan)
    doctor.add_parser(commands)
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                        help="overrides an entry of the config")  # fmt: skip


def _add_profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", required=True, metavar="P",
                        help="npu-1536, gpu-128, or a file of `nestpipe profile`")  # fmt: skip
    parser.add_argument("--zipf", action="append", default=[], metavar="TABLE=SKEW,ITEMS",
                        help="distinct keys of a table by a power law instead of as counted; once for each table")  # fmt: skip


def _add_workers(parser: argparse.ArgumentParser, default: int = 1) -> None:
    parser.add_argument("--workers", type=_positive, default=default, metavar="N",
                        help="worker processes on this machine")  # fmt: skip
    parser.add_argument("--port", type=int, default=0, help="port for the workers to meet at (default: any free one)")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _not_negative(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {number}")
    return number


def _bytes(text: str) -> int:
    from nestpipe.sizes import num_bytes

    try:
        return num_bytes(text, least=0)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _counts(text: str) -> list[int]:
    try:
        return sorted({_positive(count) for count in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"write numbers with commas between them, as in 128,256; got {text!r}"
        ) from None


def _set_flags(overrides: list[str]) -> list[str]:
    """As they are passed on to workers."""
    return [text for override in overrides for text in ("--set", override)]


def _train(arguments: argparse.Namespace) -> int:
    with _importing(arguments):
        from nestpipe import config, process, run
        from nestpipe.files import check_writable
        from nestpipe.running.result import lines_of

    overrides = [*arguments.overrides, *([f"schedule.name={arguments.schedule}"] if arguments.schedule else [])]
    if not process.under_launcher():
        folder = arguments.out or Path("runs") / f"{arguments.config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"

        # Read here first: a misspelt entry is told once, at once, and not by every worker.
        def check() -> None:
            if arguments.resume and arguments.out is None:
                raise ValueError("--resume needs the run folder to go on in: --out RUN")
            parsed = config.read(arguments.config, overrides)
            check_writable(arguments.json)
            run.check_places(parsed, folder)
            if not arguments.resume:
                run.check_unused(parsed, folder)

        problem = _guard(check, 0)
        if problem:
            return problem
        if arguments.workers > 1 or arguments.restarts:
            passed = ["train", str(arguments.config), "--out", str(folder), "--launched"]
            passed += ["--json", str(arguments.json)] if arguments.json else []
            passed += ["--trace"] if arguments.trace else []
            passed += ["--resume"] if arguments.resume else []
            passed += _set_flags(overrides)
            return _launch(arguments, passed, restarts=arguments.restarts)
    else:
        folder = arguments.out or Path("runs") / arguments.config.stem
    resume = arguments.resume or (arguments.launched and process.restarted())

    def work() -> None:
        parsed = config.read(arguments.config, overrides)
        result = run.train(parsed, folder=folder, json_file=arguments.json, record=arguments.trace, resume=resume)
        if _rank() == 0:
            print("\n".join(lines_of(result, parsed, folder)))
            if arguments.json:
                print(f"also written: {arguments.json}")
            if arguments.trace:
                print(f"timeline: nestpipe trace {folder}, or as a page: nestpipe report {folder}")

    return _worker(arguments, work)


def _evaluate(arguments: argparse.Namespace) -> int:
    with _importing(arguments):
        from nestpipe import config, process, run
        from nestpipe.files import check_writable, write_json

    saved = arguments.run / "config.json"
    if not saved.is_file():
        print(f"nestpipe: error: {arguments.run} is not a run folder: it has no config.json", file=sys.stderr)
        return 2

    def read() -> config.Config:
        check_writable(arguments.json)
        return config.read_json(saved, arguments.overrides)

    # Read here first: what is wrong is told once, and not by every worker.
    problem = 0 if process.under_launcher() else _guard(read, 0)
    if problem:
        return problem
    if not process.under_launcher() and arguments.workers > 1:
        passed = ["evaluate", str(arguments.run), *(["--split", arguments.split] if arguments.split else [])]
        passed += ["--json", str(arguments.json)] if arguments.json else []
        passed += ["--checkpoint", arguments.checkpoint] if arguments.checkpoint else []
        return _launch(arguments, passed + _set_flags(arguments.overrides))

    def work() -> None:
        parsed = read()
        split = arguments.split or parsed.train.eval_split
        if split == "none":
            raise ValueError('the run has train.eval_split = "none": say what to evaluate on with --split')
        name = arguments.checkpoint or ("best" if (arguments.run / "best").is_dir() else run.CHECKPOINT)
        metrics = run.evaluate(parsed, checkpoint=arguments.run / name, split=split)
        if _rank() == 0:
            print(f"{split}{'' if name == run.CHECKPOINT else f' ({name})'}: {run.in_words(metrics)}")
            if arguments.json:
                write_json(arguments.json, {"split": split, "metrics": metrics})

    return _worker(arguments, work)


def _predict(arguments: argparse.Namespace) -> int:
    with _importing(arguments):
        from nestpipe import config, process
        from nestpipe.files import check_writable
        from nestpipe.predict import command

    def read() -> command.Asked:
        saved = arguments.run / "config.json"
        if not saved.is_file():
            raise ValueError(f"{arguments.run} is not a run folder: it has no config.json")
        check_writable(arguments.out)
        return command.asked(config.read_json(saved, arguments.overrides), arguments)

    # Read here first: what is wrong is told once, and not by every worker.
    problem = 0 if process.under_launcher() else _guard(read, 0)
    if problem:
        return problem
    if not process.under_launcher() and arguments.workers > 1:
        return _launch(arguments, ["predict", *passed_on(arguments)])

    def work() -> None:
        rows = command.predict(read())
        if _rank() == 0:
            print(f"{arguments.out}: {rows:,} rows")

    return _worker(arguments, work)


def _trace(arguments: argparse.Namespace) -> int:
    from nestpipe.trace import report

    return _guard(lambda: print(report(arguments.run)), 0)


def _checkpoint(arguments: argparse.Namespace) -> int:
    from nestpipe.checkpoint import commands

    flaws: list[str] = []

    def work() -> None:
        try:
            act()
        except OSError as error:
            raise ValueError(f"{error.filename or arguments.path}: {error.strerror or error}") from error

    def act() -> None:
        if arguments.action == "inspect":
            print(commands.inspect(arguments.path))
        else:
            flaws.extend(commands.verify(arguments.path))
            print("\n".join(flaws) or f"{arguments.path}: sound")

    return _guard(work, 0) or int(bool(flaws))


def _export(arguments: argparse.Namespace) -> int:
    if arguments.format != "bundle":
        return _export_rows(arguments)
    with _importing(arguments):
        from nestpipe.export import export_bundle
        from nestpipe.files import check_writable

    def work() -> None:
        if arguments.table is not None:
            raise ValueError("--table is for --format parquet or npy; a bundle has all tables")
        check_writable(folder=arguments.out)
        started = time.perf_counter()
        try:
            made = export_bundle(arguments.source, arguments.out, since=arguments.since, dtype=arguments.dtype)
        except OSError as error:
            raise ValueError(
                f"{error.filename or arguments.out}: {error.strerror or error}; nothing was written"
            ) from error
        what = "all rows" if made.base is None else f"changes since {made.base.name} (version {made.base.version})"
        print(
            f"{arguments.out}: version {made.version}, step {made.step}, {what}, {made.num_bytes / 1e6:,.1f} MB in "
            f"{time.perf_counter() - started:.1f} s\nload it: nestpipe.load_bundle({str(arguments.out)!r})"
        )
        if (arguments.source / "best").is_dir():
            print(f"the run's best checkpoint is {arguments.source / 'best'}; this is its newest")

    return _guard(work, 0)


def _serve(arguments: argparse.Namespace) -> int:
    try:
        from nestpipe.serve.api import Limits
        from nestpipe.serve.server import CannotServe, Serving, serve
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("nestpipe"):
            raise
        print(
            f"nestpipe: error: serving needs {error.name}: pip install 'nestpipe[serve]'", file=sys.stderr, flush=True
        )
        return 1
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    def work() -> None:
        limits = Limits(arguments.max_request, arguments.max_history, arguments.max_candidates)
        serve(
            Serving(
                bundle=arguments.bundle,
                instances=arguments.instances,
                host=arguments.host,
                port=arguments.port,
                slo=arguments.slo_ms / 1000,
                device_memory=arguments.device_memory,
                host_memory=arguments.host_memory,
                threads=arguments.threads,
                relay=not arguments.no_relay,
                trigger=not arguments.no_trigger,
                reuse=arguments.reuse,
                answer_late=arguments.answer_late,
                affinity=not arguments.no_affinity,
                prefix_dtype=arguments.prefix_dtype,
                allow_updates=arguments.allow_updates,
                drain=arguments.drain,
                limits=limits,
            )
        )

    try:
        return _guard(work, 0)
    except CannotServe as error:
        print(f"nestpipe: error: {error}", file=sys.stderr, flush=True)
        return 1


def _export_rows(arguments: argparse.Namespace) -> int:
    from nestpipe.export import export_rows
    from nestpipe.files import check_writable

    def work() -> None:
        for option in ("since", "dtype"):
            if getattr(arguments, option, None) is not None:
                raise ValueError(f"--{option} is for --format bundle; {arguments.format} has all rows, in float32")
        check_writable(arguments.out)
        try:
            table, rows = export_rows(arguments.source, arguments.out, table=arguments.table, kind=arguments.format)
        except OSError as error:
            raise ValueError(f"{error.filename or arguments.source}: {error.strerror or error}") from error
        print(f"{rows:,} rows of {table}: {arguments.out}")

    return _guard(work, 0)


def _bundle(arguments: argparse.Namespace) -> int:
    from nestpipe.serve import manifest as manifests

    flaws: list[str] = []

    def work() -> None:
        if arguments.action == "inspect":
            print(manifests.in_words(arguments.path))
        else:
            flaws.extend(manifests.problems(arguments.path))
            print("\n".join(flaws) or f"{arguments.path}: sound")

    return _guard(work, 0) or int(bool(flaws))


def _load(arguments: argparse.Namespace) -> int:
    with _importing(arguments):
        from nestpipe.bench.serving import command
        from nestpipe.files import check_writable, write_json
        from nestpipe.sections import from_json, markdown

    def work() -> None:
        check_writable(arguments.json)
        sent = command.Sent(
            bundle=arguments.bundle,
            rate=arguments.rate,
            seconds=arguments.seconds,
            warm_up=arguments.warm_up,
            url=arguments.url,
            instances=arguments.instances,
            slo=None if arguments.slo_ms is None else arguments.slo_ms / 1e3,
            seed=arguments.seed,
        )
        document = command.load(sent, sys.argv[2:])
        print(markdown(from_json(document["sections"])))
        if arguments.json is not None:
            write_json(arguments.json, document)
            print(f"\nas a page: nestpipe report {arguments.json}")

    return _guard(work, 0)


def _bench(arguments: argparse.Namespace) -> int:
    from nestpipe.bench import suites

    def work() -> None:
        suites.bench(
            arguments.suites,
            quick=arguments.quick,
            json_file=arguments.json,
            markdown_file=arguments.markdown,
            folder=arguments.out,
        )

    return _guard(work, 0)


def _report(arguments: argparse.Namespace) -> int:
    from nestpipe.report import write

    def work() -> None:
        path = write(arguments.sources, out=arguments.out, title=arguments.title)
        print(f"report: {path}\nopen it in a browser: {path.resolve().as_uri()}")

    return _guard(work, 0)


def _profile(arguments: argparse.Namespace) -> int:
    from nestpipe import config
    from nestpipe.bench import profiling
    from nestpipe.files import check_writable, write_text
    from nestpipe.simulate.profile import to_toml

    def work() -> None:
        parsed = config.read(arguments.config, arguments.overrides)
        check_writable(arguments.out)
        profile = profiling.profile(parsed, workers=arguments.workers, name=arguments.out.stem)
        if profile is not None:
            write_text(arguments.out, to_toml(profile))
            print(
                f"profile: {arguments.out}\nnestpipe simulate {arguments.config} --profile {arguments.out} --workers 2,4,8"
            )

    return _guard(work, _rank())


def _simulate(arguments: argparse.Namespace) -> int:
    from nestpipe.simulate import commands

    def work() -> None:
        text = commands.simulate(
            arguments.config,
            arguments.overrides,
            profile_name=arguments.profile,
            counts=arguments.workers,
            schedules=arguments.schedules,
            replicas=arguments.replicas,
            laws=arguments.zipf,
            steps=arguments.steps,
            seed=arguments.seed,
            folder=arguments.out or Path("runs") / f"simulate-{arguments.config.stem}",
            json_file=arguments.json,
            command=sys.argv[1:],
        )
        print(text)

    return _guard(work, 0)


def _plan(arguments: argparse.Namespace) -> int:
    from nestpipe.simulate import commands

    def work() -> None:
        text = commands.make_plan(
            arguments.config,
            arguments.overrides,
            profile_name=arguments.profile,
            workers=arguments.workers,
            rows=arguments.rows,
            laws=arguments.zipf,
            json_file=arguments.json,
            command=sys.argv[1:],
        )
        print(text)

    return _guard(work, 0)


def _launch(arguments: argparse.Namespace, passed: list[str], *, restarts: int = 0) -> int:
    from nestpipe.launch import run_workers

    return run_workers(passed, workers=arguments.workers, port=arguments.port, restarts=restarts)


def _rank() -> int:
    return int(os.environ.get("RANK", 0))


@contextlib.contextmanager
def _importing(arguments: argparse.Namespace) -> Iterator[None]:
    """What is imported stays: nothing is collected meanwhile, and in a process of the command's own nobody looks at it again.
    Together that takes a fifth of the CPU time off a start."""
    with nothing_collected():
        yield
        if arguments.is_own_process:
            gc.freeze()


def _worker(arguments: argparse.Namespace, work: Any) -> int:
    """Runs on each worker; an error is told by the worker that has its cause."""
    with _importing(arguments):
        # torch's optimizers import it when the first one is made: a third of all that a worker imports.
        import torch._dynamo  # noqa: F401
        import torch.distributed as dist

    logging.basicConfig(level=logging.INFO if _rank() == 0 else logging.WARNING, format="%(message)s")
    code = _guard(work, _rank())
    if dist.is_initialized() and code == 0:
        dist.destroy_process_group()
    return code


def _guard(work: Any, rank: int) -> int:
    """0, or 1 after telling the user what went wrong and what to do."""
    from nestpipe.errors import Stopped, StorageError, TrainingError

    try:
        work()
    except Stopped as error:
        if rank == 0:
            print(f"nestpipe: {error}", file=sys.stderr, flush=True)
        return STOPPED
    except TrainingError as error:
        if error.is_ours:
            if not isinstance(error.__cause__, (ValueError, TimeoutError, MemoryError, StorageError, type(None))):
                traceback.print_exception(error.__cause__)  # not one of ours: where it was raised is what helps
            print(f"nestpipe: error: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(LEAVE_AFTER)  # the one that knows the cause
        return 1
    except ValueError as error:
        # Mostly all workers have the same one. The launcher ends all when the first leaves, so it is told once.
        time.sleep(LEAVE_AFTER if rank else 0)
        print(f"nestpipe: error: {f'rank {rank}: ' if rank else ''}{error}", file=sys.stderr, flush=True)
        return 1
    except (OSError, RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            print(
                f"nestpipe: error: {f'rank {rank}: ' if rank else ''}not enough memory: {error}",
                file=sys.stderr,
                flush=True,
            )
            return 1
        if isinstance(error, OSError) and error.filename is not None:
            time.sleep(LEAVE_AFTER if rank else 0)
            path = error.filename2 or error.filename  # where a file should have been moved to
            print(f"nestpipe: error: {path}: {error.strerror or error}", file=sys.stderr, flush=True)
            return 1
        if not _lost_contact(error):
            raise
        print(f"nestpipe: rank {rank} lost contact with another worker ({str(error).splitlines()[0]})", file=sys.stderr,
              flush=True)  # fmt: skip
        return 1
    return 0


def _lost_contact(error: BaseException) -> bool:
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "gloo")
    return any(sign in str(error) for sign in signs)
