"""`nestpipe load`: sends load to a server, its own or one that runs already, and tells how it did, also for `nestpipe report`."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nestpipe.bench.progress import tell
from nestpipe.bench.serving.bundle import item_keys
from nestpipe.bench.serving.capacity import in_words
from nestpipe.bench.serving.checking import CLOSE, differences
from nestpipe.bench.serving.driver import Answer, Order, drive
from nestpipe.bench.serving.figures import figures
from nestpipe.bench.serving.http import Lost
from nestpipe.bench.serving.service import info, serving
from nestpipe.bench.suites import machine
from nestpipe.sections import Bars, Curves, Section, Table, shown, to_json
from nestpipe.serve.bundle import load_bundle
from nestpipe.serve.load import Load
from nestpipe.serve.requests import Source
from nestpipe.serve.scoring import Scorer

PERCENTILES = (50.0, 75.0, 90.0, 95.0, 98.0, 99.0, 99.5, 100.0)


@dataclasses.dataclass(frozen=True)
class Sent:
    """rate: requests per second. seconds: that count, after `warm_up`. url: of a server that runs; else one is started, with
    `instances`, and stopped at the end. slo: seconds; what a running server says if left out, else 0.1."""

    bundle: Path
    rate: float = 20.0
    seconds: float = 20.0
    warm_up: float = 5.0
    url: str | None = None
    instances: int = 2
    slo: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rate <= 0 or self.seconds <= 0 or self.warm_up < 0:
            raise ValueError(
                f"rate={self.rate}, seconds={self.seconds}, warm_up={self.warm_up}: give numbers above zero, warm_up zero or more"
            )


def load(sent: Sent, command: Sequence[str] = ()) -> dict[str, Any]:
    """Sends it, and gives the document that `nestpipe report` shows. command: how it was asked for."""
    torch.set_num_threads(1)
    begin = time.perf_counter()
    bundle = load_bundle(sent.bundle)
    scorer = Scorer(bundle)
    with tempfile.TemporaryDirectory(prefix="nestpipe-load-") as folder, _server(sent, Path(folder)) as (url, about):
        if about["version"] != bundle.version:
            raise ValueError(
                f"{url} serves version {about['version']}, {sent.bundle} is version {bundle.version}: give the bundle that is "
                f"served, whose items are sent and whose scores the answers are compared with"
            )
        slo = sent.slo or about["slo_ms"] / 1e3
        items = Path(folder) / "items.npy"
        np.save(items, item_keys(bundle))
        order = Order(
            url,
            str(items),
            _law(sent.rate, scorer.max_length),
            seconds=sent.seconds,
            warm_up=sent.warm_up,
            times=scorer.uses_times,
            signals=about["relay"],
            name=f"load-{time.time_ns()}",  # no user whom the server knows
            seed=sent.seed,
        )
        tell(
            f"load: {sent.rate:g} requests/s to {url}, {sent.warm_up:g} s to warm up and {sent.seconds:g} s that count"
        )
        driven = drive(order)
        off = differences(order, driven, scorer)
    found = figures(driven, seconds=sent.seconds, slo=slo)
    found.checked, found.wrong, found.worst = len(off), sum(x > CLOSE for x in off), max(off, default=0.0)
    results = {
        "load": dataclasses.asdict(order.load),
        "figures": found.to_json(),
        "by_second": _by_second(driven.answers, sent),
        "percentiles": _percentiles(driven.answers),
    }
    return {
        "suite": "load",
        "quick": False,
        "command": shlex.join(["nestpipe", "load", *command]),
        "machine": machine(),
        "seconds": time.perf_counter() - begin,
        "sections": to_json(sections(results)),
        "results": results,
    }


def _law(rate: float, max_length: int | None) -> Load:
    """Sessions of several requests, histories with a long tail up to what the model takes."""
    longest = min(max_length or 4_096, 4_096)
    return Load(
        rate=rate,
        users=2_000,
        session=6.0,
        pause=1.5,
        length=longest / 4,
        shortest=min(10, longest),
        longest=longest,
        candidates=100,
    )


@contextlib.contextmanager
def _server(sent: Sent, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Its address, and what it says of itself."""
    if sent.url is not None:
        try:
            yield sent.url, info(sent.url)
        except Lost as lost:
            raise ValueError(
                f"{sent.url} does not answer ({lost}): start it with `nestpipe serve {sent.bundle}`"
            ) from None
        return
    tell(f"load: a server with {sent.instances} instance(s) starts")
    flags = ["--reuse", *([] if sent.slo is None else ["--slo-ms", f"{1e3 * sent.slo:g}"])]
    with serving(sent.bundle, *flags, log=folder / "server.log", instances=sent.instances) as service:
        yield service.url, service.info()


def _by_second(answers: Sequence[Answer], sent: Sent) -> list[dict[str, float | None]]:
    """Of requests that were due in each second: how many, and their latency in ms."""
    rows = []
    for second in range(int(np.ceil(sent.seconds))):
        begin = sent.warm_up + second
        due = [answer for answer in answers if begin <= answer.due < begin + 1]
        latencies = [1e3 * answer.latency for answer in due if answer.status == 200]
        p50, p99 = np.quantile(latencies, (0.5, 0.99)).tolist() if latencies else (None, None)
        rows.append({"second": second, "requests": len(due), "p50": p50, "p99": p99})
    return rows


def _percentiles(answers: Sequence[Answer]) -> list[float]:
    latencies = [1e3 * answer.latency for answer in answers if answer.status == 200]
    return np.percentile(latencies, PERCENTILES).tolist() if latencies else []


def sections(results: Mapping[str, Any]) -> list[Section]:
    found, seconds = results["figures"], results["by_second"]
    row = (
        shown("{:.1f}", found["offered"]),
        shown("{:,}", found["requests"]),
        shown("{:.1%}", found["kept"]),
        shown("{:.1f}", found["goodput"]),
        shown("{:.0f} / {:.0f} / {:.0f}", found["p50"], found["p95"], found["p99"]) if found["answered"] else "",
        shown("{:.0%}", found["relayed"]),
        shown("{}", found["rejected"]),
        shown("{}", found["errors"]),
        shown("{} of {}", found["wrong"], found["checked"]),
        shown("{:.1f}", found["lag"]),
    )
    columns = ("offered /s", "requests", "in time", "goodput /s", "P50 / P95 / P99 ms", "relayed", "turned away", "errors",
               "wrong scores", "generator late ms")  # fmt: skip
    late = " **The generator itself was late: these are not figures of the server.**" if found["behind"] else ""
    problems = "; ".join(f"{count} x {text}" for text, count in found["problems"].items())
    note = (
        f"In time: within {1e3 * found['slo']:.0f} ms of when a request was due. Open loop. {in_words(results['load'])}{late}"
        + (f" Answers that were none: {problems}." if problems else "")
    )
    at = [second["second"] for second in seconds]
    signals = sorted(found["signals"].items(), key=lambda item: -item[1])
    made: list[Section] = [
        Table("Load", columns, [row], note),
        Curves(
            "Latency over the run",
            "second",
            "ms",
            at,
            {"P50": [second["p50"] for second in seconds], "P99": [second["p99"] for second in seconds]},
            "Of the requests that were due in each second.",
        ),
    ]
    if results["percentiles"]:
        made.append(
            Curves("Latency by percentile", "percentile", "ms", list(PERCENTILES), {"latency": results["percentiles"]})
        )
    shares = {
        source.value: [found["sources"].get(source.name.lower(), 0) / max(1, found["answered"])] for source in Source
    }
    made.append(Bars("Where answers came from", "of answers", ["answers"], shares))
    if signals:
        rows = [(name.replace("_", " "), shown("{:,}", count)) for name, count in signals]
        made.append(Table("What became of signals", ("decision", "signals"), rows, "Those of the warm-up included."))
    return made
