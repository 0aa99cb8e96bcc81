"""One run: its figures, its timeline, where its time goes, its curves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nestpipe.report import charts, shares, timeline
from nestpipe.report.markup import NOTHING, escape, figure, size
from nestpipe.report.sources import Run
from nestpipe.schedule.ops import OPERATIONS
from nestpipe.sections import Bars, Curves, Section, Table
from nestpipe.trace import COMPUTE, LaneTime, OpTime, RankSummary
from nestpipe.trace.printout import verdict

EXPOSED = (
    "Per step, mean over ranks, in the steady state. A lane is *busy* while it runs an operation. What a lane other than "
    "compute runs is *hidden* while compute runs too, and *exposed* while compute runs nothing: by that much it may have held "
    "training up. On the compute lane itself everything counts."
)
Found = Sequence[tuple[RankSummary, LaneTime]] | Sequence[tuple[RankSummary, OpTime]]


def render(run: Run) -> str:
    parts = [f'<dl class="tiles">{"".join(_tile(*one) for one in _tiles(run))}</dl>']
    if run.traces:
        parts += [
            f'<p class="verdict">{escape(_sentence(verdict(run.ranks)))}</p>',
            timeline.render(run.traces, title=f"{run.name}, {run.way}"),
            charts.render([shares.chart([run], [run.way])]),
            _lanes(run.ranks),
            _operations(run.ranks),
        ]
    else:
        parts.append(
            '<p class="verdict">No timeline: the run was not recorded. '
            "<code>nestpipe train … --trace</code> records one.</p>"
        )
    parts.append(charts.render([*_curves(run), _tables(run), _facts(run)]))
    parts += _details(run)
    return "".join(parts)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _tile(name: str, value: str, remark: str = "") -> str:
    small = f"<small>{escape(remark)}</small>" if remark else ""
    return f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{small}</dd></div>"


def _tiles(run: Run) -> Iterator[tuple[str, ...]]:
    result = run.result
    yield "samples per second", f"{result['samples_per_second']:,.0f}"
    if run.ranks:
        mean = run.mean("mean_step_ms")
        busy = sum(rank.lane(COMPUTE).busy_ms for rank in run.ranks) / len(run.ranks)
        yield "step", f"{figure(run.mean('step_ms'))} ms", "median"
        yield "compute lane busy", f"{busy / mean:.0%}"
        parts = shares.shares(run)
        for name in ("exposed communication", "exposed lookup"):
            yield name, f"{figure(parts[name])} ms", f"{parts[name] / mean:.1%} of a step"
    yield "loss", _number(result.get("last_loss")), f"from {_number(result.get('first_loss'))}"
    for name, value in result.get("metrics", {}).items():
        yield name, _number(value)


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}" if isinstance(value, float) else NOTHING


def _lanes(ranks: Sequence[RankSummary]) -> str:
    names = list(dict.fromkeys(lane.lane for rank in ranks for lane in rank.lanes))
    found = {name: [(rank, rank.lane(name)) for rank in ranks if _has(rank, name)] for name in names}
    step = sum(rank.mean_step_ms for rank in ranks) / len(ranks)
    rows = []
    for name in names:
        busy, idle, exposed = (_mean(found[name], f"{what}_ms") for what in ("busy", "idle", "exposed"))
        worst = _worst(found[name], "idle_ms" if name == COMPUTE else "exposed_ms")
        rows.append([name, *(f"{ms:.2f} ms, {ms / step:.0%}" for ms in (busy, idle, exposed)), worst])
    chart = Bars("Lanes", "ms", names, _parts(found, names), {"a whole step": [step] * len(names)}, EXPOSED)
    return charts.bars(chart, Table("Lanes", ["lane", "busy", "idle", "exposed", "worst rank"], rows))


def _operations(ranks: Sequence[RankSummary]) -> str:
    ops = list(dict.fromkeys((op.op, op.lane) for rank in ranks for op in rank.ops))
    found = {key: [(rank, op) for rank in ranks for op in rank.ops if (op.op, op.lane) == key] for key in ops}
    rows = []
    for (op, lane), ones in found.items():
        often = sum(one.count / rank.steps for rank, one in ones) / len(ones)
        times = [f"{_mean(ones, 'ms'):.2f} ms", f"{_mean(ones, 'exposed_ms'):.2f} ms"]
        rows.append([op, lane, f"{often:.1f}", *times, _worst(ones, "exposed_ms"), _meaning(op)])
    chart = Bars("Operations", "ms", [f"{op} · {lane}" for op, lane in ops], _parts(found, [lane for _, lane in ops]))
    columns = ["operation", "lane", "in a step", "takes", "exposed", "worst rank", "what it does"]
    return charts.bars(chart, Table("Operations", columns, rows))


def _meaning(op: str) -> str:
    return OPERATIONS[op].meaning if op in OPERATIONS else ""


def _parts(found: Mapping[Any, Found], lanes: Sequence[str]) -> dict[str, list[float]]:
    """Hidden, exposed, and what is neither: the compute lane's own. One of each for each lane or operation."""
    mine = [lane == COMPUTE for lane in lanes]
    busy = [_mean(ones, "ms" if isinstance(ones[0][1], OpTime) else "busy_ms") for ones in found.values()]
    exposed = [_mean(ones, "exposed_ms") for ones in found.values()]
    return {
        "compute lane": [ms if own else 0.0 for ms, own in zip(busy, mine, strict=True)],
        "exposed": [0.0 if own else ms for ms, own in zip(exposed, mine, strict=True)],
        "hidden": [0.0 if own else max(0.0, b - e) for b, e, own in zip(busy, exposed, mine, strict=True)],
    }


def _has(rank: RankSummary, lane: str) -> bool:
    return any(one.lane == lane for one in rank.lanes)


def _mean(found: Found, name: str) -> float:
    return float(sum(getattr(one, name) for _, one in found) / len(found))


def _worst(found: Found, name: str) -> str:
    rank, one = max(found, key=lambda pair: getattr(pair[1], name))
    return f"rank {rank.rank}: {name.split('_')[0]} {getattr(one, name):.2f} ms"


def _curves(run: Run) -> Iterator[Section]:
    loss = run.curves.get("train/loss", [])
    if len(loss) > 1:
        yield Curves("Loss", "step", "loss", [at for at, _ in loss], {"loss": [value for _, value in loss]})
    for tag, points in run.curves.items():
        split, _, name = tag.partition("/")
        if split != "train" and len(points) > 1:
            values = [value for _, value in points]
            yield Curves(f"{name} ({split})", "step", name, [at for at, _ in points], {name: values})


def _tables(run: Run) -> Table:
    rows = [
        [
            name,
            f"{one.get('rows', 0):,}",
            size(one.get("bytes", 0)),
            figure(one.get("bytes_per_row")),
            size(one["file_bytes"]) if one.get("file_bytes") else NOTHING,
        ]
        for name, one in run.result["tables"].items()
    ]
    return Table("Tables", ["table", "rows", "in memory", "bytes a row", "on disk"], rows)


def _facts(run: Run) -> Table:
    result = run.result
    settings = run.config.get("schedule", {})
    rows = [
        ["schedule", str(result["schedule"])],
        ["micro-batches", str(result["micro_batches"])],
        *([["clustering", str(settings["clustering"])]] if settings.get("clustering") else []),
        ["workers", str(result["workers"])],
        ["steps", f"{result['steps']:,}"],
        ["samples", f"{result['samples']:,}"],
        ["seconds", figure(result.get("seconds"))],
    ]
    steps = result.get("session_steps", result["steps"])  # that it was sent in
    if isinstance(result.get("bytes_sent"), int) and steps:
        rows.append(["sent in a step", size(result["bytes_sent"] / steps)])
    if result.get("skipped_batches"):
        rows.append(["skipped batches (not finite)", str(result["skipped_batches"])])
    return Table("Facts", ["", ""], [*rows, ["digest", f"`{result['digest']}`"]])


def _details(run: Run) -> Iterator[str]:
    if run.traces:
        yield _folded("The schedule, lane by lane", run.traces[0].text)
    if run.config:
        yield _folded("The configuration", json.dumps(run.config, indent=2))


def _folded(title: str, text: str) -> str:
    return f'<details><summary>{escape(title)}</summary><pre tabindex="0">{escape(text)}</pre></details>'
