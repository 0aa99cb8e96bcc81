"""What `nestpipe trace RUN` does: the files to look at, and the figures as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nestpipe.schedule.ops import COMPUTE
from nestpipe.trace.chrome import to_chrome
from nestpipe.trace.picture import draw
from nestpipe.trace.ranks import waits
from nestpipe.trace.record import RankTrace, read, write_compact
from nestpipe.trace.times import RankSummary, summary


def report(run_folder: Path) -> str:
    """Writes RUN/trace.json (Perfetto) and RUN/trace.png; returns what to print: schedule, lanes, operations, verdict."""
    traces = read(run_folder)
    told = describe(traces)  # before the files: a trace without a step leaves none behind
    timeline, picture = run_folder / "trace.json", run_folder / "trace.png"
    write_compact(timeline, to_chrome(traces))
    draw(traces, picture)
    return f"{told}\n\npicture: {picture}\ntimeline: {timeline} (open ui.perfetto.dev, then drop the file on the page)"


def describe(traces: Sequence[RankTrace]) -> str:
    """What each lane and each operation took per step, as text: of the traces of all ranks, or of one's own alone."""
    ranks = summary(traces)
    parts = [
        f"schedule {traces[0].schedule}\n{traces[0].text.rstrip()}",
        "\n".join([_measured(ranks), *_notes(traces, ranks)]),
        lane_table(ranks),
        op_table(ranks),
        "\n".join([verdict(ranks), *_waiting(traces, ranks)]),
    ]
    return "\n\n".join(parts)


def lane_table(ranks: Sequence[RankSummary]) -> str:
    """Per lane, mean over ranks; beside it the rank that is worst: most exposed, for compute the most idle."""
    lines: list[tuple[str, ...]] = [("lane", "busy", "idle", "exposed", "worst rank")]
    for lane in _names(ranks):
        having = [rank for rank in ranks if any(time.lane == lane for time in rank.lanes)]
        cells = [_cell(having, [getattr(rank.lane(lane), name) for rank in having])
                 for name in ("busy_ms", "idle_ms", "exposed_ms")]  # fmt: skip
        name = "idle" if lane == COMPUTE else "exposed"
        worst = max(having, key=lambda rank: getattr(rank.lane(lane), f"{name}_ms"))
        lines.append((lane, *cells, f"{worst.rank}: {name} {getattr(worst.lane(lane), f'{name}_ms'):.1f} ms"))
    return _aligned(lines if len(ranks) > 1 else [line[:-1] for line in lines])


def op_table(ranks: Sequence[RankSummary]) -> str:
    """Per operation: how often in a step, and milliseconds per step; mean over ranks, and the rank that is worst."""
    lines: list[tuple[str, ...]] = [("op", "lane", "per step", "ms", "exposed", "worst rank")]
    for op, lane in dict.fromkeys((time.op, time.lane) for rank in ranks for time in rank.ops):
        times = [(rank, time) for rank in ranks for time in rank.ops if (time.op, time.lane) == (op, lane)]
        often, took, exposed = np.mean([(time.count / r.steps, time.ms, time.exposed_ms) for r, time in times], axis=0)
        rank, worst = max(times, key=lambda pair: pair[1].exposed_ms)
        lines.append((op, lane, f"{often:.1f}", f"{took:.2f}", f"{exposed:.2f}",
                      f"{rank.rank}: exposed {worst.exposed_ms:.2f} ms"))  # fmt: skip
    return _aligned(lines if len(ranks) > 1 else [line[:-1] for line in lines])


def verdict(ranks: Sequence[RankSummary]) -> str:
    """One sentence: how busy the compute lane is, what is exposed, and how far the step is from its busiest lane."""
    step = float(np.mean([rank.mean_step_ms for rank in ranks]))
    share = float(np.mean([rank.lane(COMPUTE).busy_ms / rank.mean_step_ms for rank in ranks]))
    others = [lane for lane in _names(ranks) if lane != COMPUTE]
    if others:
        exposed = {
            lane: float(np.mean([time.exposed_ms for rank in ranks for time in rank.lanes if time.lane == lane]))
            for lane in others
        }
        told = ", ".join(f"{lane} {ms:.1f} ms" for lane, ms in sorted(exposed.items(), key=lambda item: -item[1]))
    else:
        told = "everything, it is the only lane"
    slowest = max(ranks, key=lambda rank: rank.step_over_busiest)
    return (
        f"the compute lane is busy {share:.0%} of a step of {step:.1f} ms; exposed: {told}; "
        f"a step takes {slowest.step_over_busiest:.2f}x its busiest lane ({slowest.busiest.lane})"
    )


def _waiting(traces: Sequence[RankTrace], ranks: Sequence[RankSummary]) -> list[str]:
    """Of what looks like work of a collective, how much is waiting for another rank; the one that waits least is waited for."""
    if len(traces) < 2:
        return []
    counted = [
        (t.columns.end > r.window_ns[0]) & (t.columns.end <= r.window_ns[1]) for t, r in zip(traces, ranks, strict=True)
    ]
    waited = [
        wait[of_rank & (trace.columns.lane == trace.lanes.index(COMPUTE))].sum() / 1e6 / rank.steps
        for trace, rank, wait, of_rank in zip(traces, ranks, waits(traces), counted, strict=True)
    ]
    told = ", ".join(f"rank {rank.rank} {ms:.1f} ms" for rank, ms in zip(ranks, waited, strict=True))
    return [f"of a step the compute lane waits for the last rank to come to a collective: {told}"]


def _measured(ranks: Sequence[RankSummary]) -> str:
    first = ranks[0]
    left_out = f"; {first.skipped} before and after left out (fill, drain)" if first.skipped else ""
    too_few = "" if first.skipped else "; too few steps to leave out fill and drain"
    who = "1 rank" if len(ranks) == 1 else f"{len(ranks)} ranks (mean, and the worst)"
    counts = f"{first.steps} step{'s' * (first.steps > 1)}, batches {first.first_batch} to {first.last_batch}"
    return (
        f"{who}, {counts}{left_out}{too_few}\n"
        f"per step; exposed: all of compute, and of other lanes what runs while compute runs nothing"
    )


def _notes(traces: Sequence[RankTrace], ranks: Sequence[RankSummary]) -> list[str]:
    notes = [f"rank {trace.rank}: {trace.dropped:,} operations are missing, the recorder was full; only steps recorded "
             f"in all lanes count" for trace in traces if trace.dropped]  # fmt: skip
    uneven = max(ranks, key=lambda rank: rank.mean_step_ms / rank.step_ms)
    if uneven.mean_step_ms > 1.2 * uneven.step_ms:
        notes.append(
            f"rank {uneven.rank}: the mean step ({uneven.mean_step_ms:.1f} ms) is far above the median "
            f"({uneven.step_ms:.1f} ms): some steps were held up (evaluation, checkpoint, another program?)"
        )
    return notes


def _names(ranks: Sequence[RankSummary]) -> list[str]:
    return list(dict.fromkeys(lane.lane for rank in ranks for lane in rank.lanes))


def _cell(ranks: Sequence[RankSummary], values: list[float]) -> str:
    share = np.mean([value / rank.mean_step_ms for value, rank in zip(values, ranks, strict=True)])
    return f"{np.mean(values):.1f} ms {share:4.0%}"


def _aligned(lines: Sequence[tuple[str, ...]]) -> str:
    """Columns: text to the left, figures to the right, except `worst rank`, which begins with a rank."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def cell(text: str, width: int, numeric: bool) -> str:
        return text.rjust(width) if numeric else text.ljust(width)

    figures = [lines[1][at][:1].isdigit() and lines[0][at] != "worst rank" for at in range(len(widths))]
    return "\n".join(
        "   ".join(
            cell(text, width, figure) for text, width, figure in zip(line, widths, figures, strict=True)
        ).rstrip()
        for line in lines
    )
