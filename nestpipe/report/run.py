"""One run: its figures, what to change, its timeline, where its time goes, its curves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nestpipe.report import advice, charts, shares, timeline
from nestpipe.report.markup import NOTHING, figure, size
from nestpipe.report.sources import Run
from nestpipe.schedule.ops import OPERATIONS
from nestpipe.sections import Bars, Curves, Section, Table
from nestpipe.trace import COMPUTE, LaneTime, OpTime, RankSummary

EXPOSED = (
    "Per step, mean over ranks, in the steady state. A lane is *busy* while it runs an operation. What a lane other than "
    "compute runs is *hidden* while compute runs too, and *exposed* while compute runs nothing: by that much it may have held "
    "training up. On the compute lane itself everything counts; what it waits there inside a collective for another rank is "
    "drawn apart."
)

Times = Sequence[tuple[RankSummary, LaneTime]] | Sequence[tuple[RankSummary, OpTime]]


def view(run: Run) -> dict[str, Any]:
    """For the macro `run` of blocks.html."""
    advices = advice.advise(run)
    items = [
        {"title": item.title, "reason": item.reason, "lines": advice.lines(run, item), "gain": item.gain}
        for item in advices
    ]
    sections = charts.views([*_curves(run), *_tables(run), *_balance(run), *_waiting(run), *_starts(run), _facts(run)])
    if run.traces:
        step = charts.view(shares.chart([run], [run.way]))
        sections = [step, _lanes(run), _operations(run), *sections]
    return {
        "warnings": list(_warnings(run)),
        "tiles": [(*tile, "")[:3] for tile in _tiles(run)],
        "advice": {"verdict": advice.verdict(run, advices), "advices": items, "how": advice.how(run)},
        "timeline": timeline.view(run.traces, title=f"{run.name}, {run.way}") if run.traces else None,
        "sections": sections,
        "details": list(_details(run)),
    }


def _warnings(run: Run) -> Iterator[str]:
    """What is not on the page, and why."""
    if not run.result and run.config:
        yield "This run has not finished: it has no result yet. Figures are of what it has written so far."
    elif not run.result:
        yield "This folder has no `result.json`, as the run of a script: no samples per second, tables or digest are known."
    if run.resumed_after and run.traces:
        yield (
            f"The run was resumed after step {run.resumed_after:,}. Times and timeline are of the last start; what ran in "
            f"earlier ones is not kept. Curves are of all starts."
        )


def _tiles(run: Run) -> Iterator[tuple[str, ...]]:
    result, loss = run.result, run.curves.get("train/loss", [])
    if result:
        yield "samples per second", f"{result['samples_per_second']:,.0f}", "without evaluation"
    if result.get("tokens"):
        yield "tokens per second", f"{result['tokens_per_second']:,.0f}", "keys of sequence features"
    work = result.get("work")
    if work:
        mfu = result.get("mfu")
        yield (
            "MFU",
            NOTHING if mfu is None else f"{mfu:.1%}",
            work["why_not"] or f"of {work['machine'] / 1e9:,.0f} GFLOP/s",
        )
        yield "peak memory", f"{work['memory'] / 1e6:,.0f} MB", "of the worker with most"
    if run.ranks:
        step, parts = run.mean("mean_step_ms"), shares.shares(run)
        yield "step", f"{figure(step)} ms", "mean" + (", without pauses" if run.paused else "")
        for name in shares.PARTS[:4]:
            if name in (shares.PARTS[0], *shares.PARTS[2:4]) or parts[name]:
                yield name, f"{parts[name] / step:.0%}", f"{figure(parts[name])} ms of a step"
    first = loss[0][1] if run.resumed_after and loss else result.get("first_loss", loss[0][1] if loss else None)
    last = result.get("last_loss", loss[-1][1] if loss else None)
    if first is not None or last is not None:
        yield "training loss", _number(last), f"from {_number(first)}"
    split = run.config.get("train", {}).get("eval_split", "evaluation")
    for name, value in (result.get("metrics") or {}).items():
        yield f"{name} ({split})", _number(value)


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}" if isinstance(value, float) else NOTHING


def _lanes(run: Run) -> charts.View:
    ranks = run.ranks
    names = list(dict.fromkeys(lane.lane for rank in ranks for lane in rank.lanes))
    times = {name: [(rank, rank.lane(name)) for rank in ranks if _has(rank, name)] for name in names}
    waited = {name: _waited(run, lane=name) for name in names}
    step = run.mean("mean_step_ms")
    rows = []
    for name in names:
        busy, idle, exposed = (_mean(times[name], f"{what}_ms") for what in ("busy", "idle", "exposed"))
        worst = _worst(times[name], "idle_ms" if name == COMPUTE else "exposed_ms")
        rows.append([name, *(f"{ms:.2f} ms, {ms / step:.0%}" for ms in (busy, waited[name], idle, exposed)), worst])
    parts = _parts(times, names, list(waited.values()))
    chart = Bars("Lanes", "ms", names, parts, {"a whole step": [step] * len(names)}, EXPOSED)
    return charts.view(chart, Table("Lanes", ["lane", "busy", "of it waiting", "idle", "exposed", "worst rank"], rows))


def _operations(run: Run) -> charts.View:
    ops = list(dict.fromkeys((op.op, op.lane) for rank in run.ranks for op in rank.ops))
    times = {key: [(rank, op) for rank in run.ranks for op in rank.ops if (op.op, op.lane) == key] for key in ops}
    waited = {(op, lane): _waited(run, lane=lane, op=op) for op, lane in ops}
    rows = []
    for (op, lane), of_ranks in times.items():
        often = sum(of_op.count / rank.steps for rank, of_op in of_ranks) / len(of_ranks)
        took = (_mean(of_ranks, "ms"), waited[op, lane], _mean(of_ranks, "exposed_ms"))
        meaning = OPERATIONS[op].meaning if op in OPERATIONS else ""
        worst = _worst(of_ranks, "exposed_ms")
        rows.append([op, lane, f"{often:.1f}", *(f"{ms:.2f} ms" for ms in took), worst, meaning])
    parts = _parts(times, [lane for _, lane in ops], list(waited.values()))
    chart = Bars("Operations", "ms", [f"{op} · {lane}" for op, lane in ops], parts)
    columns = ["operation", "lane", "in a step", "takes", "of it waiting", "exposed", "worst rank", "what it does"]
    return charts.view(chart, Table("Operations", columns, rows))


def _waited(run: Run, *, lane: str, op: str | None = None) -> float:
    """Milliseconds per step, mean over ranks, for the last rank to come."""
    of_ranks = shares.waiting(run)
    total = sum(ms for rank in of_ranks for (at, name), ms in rank.items() if at == lane and op in (None, name))
    return total / len(of_ranks)


def _parts(times: Mapping[Any, Times], lanes: Sequence[str], waited: Sequence[float]) -> dict[str, list[float]]:
    """Hidden, exposed, and what is neither: the compute lane's own, and there what is waiting. One of each for each lane or
    operation."""
    mine = [lane == COMPUTE for lane in lanes]
    busy = [_mean(of, "ms" if isinstance(of[0][1], OpTime) else "busy_ms") for of in times.values()]
    exposed = [_mean(of, "exposed_ms") for of in times.values()]
    parts = {
        "compute lane": [max(0.0, b - w) if own else 0.0 for b, w, own in zip(busy, waited, mine, strict=True)],
        shares.WAITING: [ms if own else 0.0 for ms, own in zip(waited, mine, strict=True)],
        "exposed": [0.0 if own else ms for ms, own in zip(exposed, mine, strict=True)],
        "hidden": [0.0 if own else max(0.0, b - e) for b, e, own in zip(busy, exposed, mine, strict=True)],
    }
    return {name: values for name, values in parts.items() if any(values)}


def _has(rank: RankSummary, lane: str) -> bool:
    return any(of_lane.lane == lane for of_lane in rank.lanes)


def _mean(times: Times, name: str) -> float:
    return float(sum(getattr(of_rank, name) for _, of_rank in times) / len(times))


def _worst(times: Times, name: str) -> str:
    rank, of_rank = max(times, key=lambda pair: getattr(pair[1], name))
    return f"rank {rank.rank}: {name.split('_')[0]} {getattr(of_rank, name):.2f} ms"


def _curves(run: Run) -> Iterator[Section]:
    loss = run.curves.get("train/loss", [])
    if len(loss) > 1:
        yield Curves("Training loss", "step", "loss", [at for at, _ in loss], {"loss": [value for _, value in loss]})
    for tag, points in run.curves.items():
        split, _, name = tag.partition("/")
        if split != "train" and len(points) > 1:
            values = [value for _, value in points]
            yield Curves(f"{name} ({split})", "step", name, [at for at, _ in points], {name: values})


def _tables(run: Run) -> Iterator[Table]:
    rows = [
        [
            name,
            f"{table.get('rows', 0):,}",
            size(table.get("bytes", 0)),
            figure(table.get("bytes_per_row")),
            size(table["file_bytes"]) if table.get("file_bytes") else NOTHING,
        ]
        for name, table in run.result.get("tables", {}).items()
    ]
    if rows:
        yield Table("Tables", ["table", "rows", "in memory", "bytes a row", "on disk"], rows)


def _balance(run: Run) -> Iterator[Table]:
    kinds = {"keys": "keys asked of it", "rows": "rows it holds", "bytes": "bytes it sent"}
    balance = run.result.get("balance")
    if not isinstance(balance, dict) or (run.workers or 1) < 2:
        return
    rows = []
    for kind, meaning in kinds.items():
        values = [value for value in balance.get(kind) or () if isinstance(value, (int, float))]
        mean = sum(values) / max(1, len(values))
        if mean:
            most = max(values)
            rows.append([meaning, f"{mean:,.0f}", f"{most:,.0f}", str(values.index(most)), f"{most / mean:.2f}"])
    if rows:
        note = "Of the steps since the run was started or resumed. 1.00 is even; the worker that has most holds up the others."
        yield Table("Balance over workers", ["of a worker", "mean", "most", "by worker", "most over mean"], rows, note)


def _waiting(run: Run) -> Iterator[Table]:
    waiting = run.result.get("waiting")
    if not isinstance(waiting, dict) or (run.workers or 1) < 2:
        return
    kinds = {
        "undealt": "predicted from what samples cost, as they were read",
        "dealt": "predicted, as they were dealt",
        "measured": "measured",
    }
    rows = [[text, f"{waiting[kind]:.1%}"] for kind, text in kinds.items() if isinstance(waiting.get(kind), float)]
    note = (
        "Share of the model's time, forward and backward, that a worker waits for the one that has most to compute. "
        '`schedule.balance = "auto"` deals samples so that all have as much.'
    )
    if rows:
        yield Table("Waiting for the slowest worker", ["share of the model's time", ""], rows, note)


def _starts(run: Run) -> Iterator[Table]:
    if len(run.starts) > 1:
        rows = [
            [str(number), f"{start.first_step:,} to {start.last_step:,}", f"{start.seconds:,.0f} s"]
            for number, start in enumerate(run.starts, 1)
        ]
        rows.append(["all", f"{rows[0][1].split()[0]} to {run.starts[-1].last_step:,}",
                     f"{sum(start.seconds for start in run.starts):,.0f} s"])  # fmt: skip
        note = (
            "The run was stopped and resumed. Steps between the first and the last point in the curves of each start, without "
            "those that a later one did again; evaluations count for the time."
        )
        yield Table("Starts", ["start", "steps", "took"], rows, note)


def _facts(run: Run) -> Table:
    result, before = run.result, run.resumed_after
    settings = run.config.get("schedule", {})
    rows = [
        ["schedule", run.schedule or NOTHING],
        ["micro-batches", str(run.micro_batches)],
        *([["clustering", str(settings["clustering"])]] if settings.get("clustering") else []),
        ["workers", str(run.workers or NOTHING)],
        *([["replicas", str(settings["replicas"])]] if settings.get("replicas", 1) != 1 else []),
    ]
    if result:
        steps, samples = result["steps"], result["samples"]
        in_all = f", {run.session_steps:,} of them since the last start" if before else ""
        rows += [["steps", f"{steps:,}{in_all}"]]
        about = f"about {steps * (run.samples_per_step or 0):,.0f}, {samples:,} of them since the last start"
        rows += [["samples", about if before and run.session_steps else f"{samples:,}"]]
        since = " since the last start" if before else ""
        rows += [[f"seconds of training{since}", figure(result.get("seconds"))]]
        if result.get("evaluation_seconds"):
            rows.append([f"seconds of evaluation meanwhile{since}", figure(result["evaluation_seconds"])])
    elif run.ranks:
        rows.append(["recorded steps", f"{run.ranks[0].steps + 2 * run.ranks[0].skipped:,}"])
    if run.paused:
        rows.append(["seconds of pauses left out of all times (evaluation, checkpoints)", figure(run.paused)])
    if isinstance(result.get("bytes_sent"), int) and run.session_steps:
        rows.append(["sent in a step", size(result["bytes_sent"] / run.session_steps)])
    if result.get("skipped_batches"):
        rows.append(["skipped batches (not finite)", str(result["skipped_batches"])])
    if result:
        rows.append(["digest", f"`{result['digest']}`"])
    return Table("Facts", ["", ""], rows)


def _details(run: Run) -> Iterator[tuple[str, str]]:
    if run.traces:
        yield "The schedule, lane by lane", run.traces[0].text
    if run.config:
        yield "The configuration", json.dumps(run.config, indent=2)
