"""What to change in a recorded run: what was measured, the setting to try, and what it would gain.

Gains are estimated: the run's own operations are replayed by the simulator (`replay`) under the other setting, or without what
is slow. Lanes do not take CPU time from each other there, and cutting a batch costs nothing, so a gain is the most to expect.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from nestpipe.report.markup import figure, size
from nestpipe.report.replay import Replay, replay
from nestpipe.report.shares import DATA, NOTHING_RUNS, WAITING, rank_shares, shares
from nestpipe.report.sources import Run
from nestpipe.schedule import SCHEDULES
from nestpipe.schedule.ops import BWD, FWD, H2D, PREFETCH, RETRIEVE, ROUTE, SYNC, UPDATE, WRITEBACK
from nestpipe.schedule.setting import Setting
from nestpipe.sizes import num_bytes
from nestpipe.tables import DEFAULT_MEMORY
from nestpipe.trace.ranks import COLLECTIVES

WORTH = 0.05  # of a step: less is lost in the noise from run to run, and in what the estimate leaves out
UNEVEN = 0.10  # of a step that ranks may wait for each other in turn: batches are never quite alike
HELD_UP = (
    0.10  # of a step in which nothing may run at all: passing work from thread to thread takes some of a short step
)
FEWEST_STEPS = 10  # measured; the median of fewer says little
AS_GOOD = (
    1.02  # a simpler setting is taken if its step is no more than this times as long, as `micro_batches = "auto"` does
)
SHORT_FORWARD = (
    5.0  # ms: what launching the operations of a model takes (one to a few ms) is a large part of a shorter forward
)
CUTS = (2, 4, 8)  # micro-batches to begin with; more of them only if these turn out to be too few
ALL_COMPUTE = 0.85  # of a step, from which on only less compute or more workers help

IN_MODEL = (FWD, BWD)
IN_TABLES = (ROUTE, RETRIEVE, SYNC, UPDATE, WRITEBACK)
IN_DATA = (PREFETCH, H2D)
SLOW_BECAUSE = {
    IN_MODEL: "Look for other programs, a slower clock or fewer cores on its machine, and whether its samples are longer.",
    IN_TABLES: "Look at its disk and memory, and whether its keys are far more popular than those of others.",
    IN_DATA: "Look at what feeds it: its files may be on a slower disk, or larger.",
}


@dataclasses.dataclass(frozen=True)
class Advice:
    """title: what to do. reason: what was measured. settings: by section of the TOML file, entries to try. gain: what it would
    bring, with the word estimated; share: the same as a part of a step."""

    title: str
    reason: str
    settings: dict[str, dict[str, Any]]
    gain: str
    share: float


def advise(run: Run) -> list[Advice]:
    """Of a recorded run; empty if nothing is worth changing. What gains more comes first."""
    if not run.ranks or run.ranks[0].steps < FEWEST_STEPS:
        return []
    ranks, step, measured = rank_shares(run), run.mean("mean_step_ms"), replay(run)
    now = _setting(run)
    advices = [*_slow_rank(run, ranks, step, measured, now)]
    of_data = float(np.mean([parts[DATA] for parts in ranks]))
    if of_data >= WORTH * step:
        # The source gives a batch once in a step: until it is faster no other setting helps.
        return [_slow_data(run, of_data, step), *advices]
    advices += _held_up(ranks, step)
    if now is not None and now.is_exact:
        advices += _other_setting(run, step, measured, now)
        advices += _lookups_on_disk(run, ranks, step, now)
    return sorted(advices, key=lambda item: -item.share)


def verdict(run: Run, advices: Sequence[Advice]) -> str:
    """What stands in the place of the list where it is empty."""
    if not run.ranks:
        return (
            "The run was not recorded. Recorded with `nestpipe train … --trace` (in a script: `Trainer(…, record=True)` and "
            "`trainer.save_trace(folder)`), this page says what to change."
        )
    if run.ranks[0].steps < FEWEST_STEPS:
        return f"Too few steps were recorded to say what to change: {run.ranks[0].steps}, at least {FEWEST_STEPS} are needed."
    if advices:
        return ""
    nothing = f"Nothing: no change is estimated to make a step at least {WORTH:.0%} shorter."
    compute = float(np.mean([parts["compute"] for parts in rank_shares(run)])) / run.mean("mean_step_ms")
    if compute >= ALL_COMPUTE:
        nothing += f" {compute:.0%} of a step is compute: a faster model, a faster device or more workers would help."
    return nothing


def how(run: Run) -> str:
    """How gains are estimated, and how well that gives the run as it was."""
    now = _setting(run)
    text = (
        "Estimated gains are the most to expect: the simulator replays the operations of this run under the other setting, as "
        "if lanes did not slow each other down and cutting a batch cost nothing."
    )
    if not run.ranks or now is None:
        return text
    as_it_was, step = replay(run).step(now), run.mean("mean_step_ms")
    return f"{text} For the run as it was it gives a step of {figure(as_it_was)} ms; measured were {figure(step)} ms."


def lines(run: Run, advice: Advice) -> str:
    """The entries to try: TOML; for the run of a script the arguments of Trainer or Table."""
    if run.config or run.result:
        sections = [f"[{_key(name)}]\n" + "\n".join(_entries(of)) for name, of in advice.settings.items()]
        return "\n\n".join(sections)
    calls = []
    for name, of in advice.settings.items():
        named = {"schedule" if key == "name" else key: value for key, value in of.items()}
        what = f'Table("{name.removeprefix("tables.")}", …, ' if name.startswith("tables.") else "Trainer(…, "
        calls.append(what + ", ".join(_entries(named, "=")) + ")")
    return "\n".join(calls)


def _key(section: str) -> str:
    """`tables.item`, or `tables."user*"`: names with other characters are quoted in TOML."""
    group, dot, name = section.partition(".")
    return section if re.fullmatch(r"[\w-]*", name, re.ASCII) else f"{group}{dot}{json.dumps(name)}"


def _entries(values: dict[str, Any], equals: str = " = ") -> Iterator[str]:
    for name, value in values.items():
        yield f'{name}{equals}"{value}"' if isinstance(value, str) else f"{name}{equals}{value}"


def _setting(run: Run) -> Setting | None:
    """None: a schedule of someone's own, of which there is nothing to advise."""
    if run.schedule not in SCHEDULES:
        return None
    return Setting(run.schedule, run.micro_batches, look_ahead=run.config.get("schedule", {}).get("look_ahead"))


def _shorter(step: float, factor: float, provided: str = "") -> str:
    return (
        f"Estimated{provided}: a step of {figure(step * factor)} ms instead of {figure(step)} ms, "
        f"{1 - factor:.0%} shorter ({1 / factor:.2f}x the samples per second)."
    )


# -- slow ranks --------------------------------------------------------------------------------------------------------


def _slow_rank(
    run: Run, ranks: Sequence[dict[str, float]], step: float, measured: Replay, now: Setting | None
) -> Iterator[Advice]:
    """A rank that others wait for waits least itself."""
    if len(ranks) < 2:
        return
    waiting = np.array([parts[WAITING] for parts in ranks])
    slow = int(waiting.argmin())
    others = float(np.median(np.delete(waiting, slow)))
    if others - waiting[slow] >= WORTH * step:
        name = run.traces[slow].rank
        who = "The other ranks wait" if len(ranks) > 2 else f"Rank {run.traces[1 - slow].rank} waits"
        factor = 1 - (others - waiting[slow]) / step
        if now is not None:
            factor = 1 - (measured.step(now) - measured.with_rank_like_others(slow).step(now)) / step
        yield Advice(
            f"Find out why rank {name} is slow",
            f"{who} {figure(others)} ms of every step ({others / step:.0%}) for rank {name}, which itself waits only "
            f"{figure(waiting[slow])} ms. {_where_slow(slow, measured)}",
            {},
            _shorter(step, min(factor, 1.0), ", if it were as fast as the others"),
            (others - waiting[slow]) / step,
        )
    elif waiting.mean() >= UNEVEN * step:
        share, size_now = float(waiting.mean()) / step, run.config.get("train", {}).get("batch_size")
        yield Advice(
            "Make the work of the ranks more even",
            f"Ranks wait for each other in turn, {figure(share * step)} ms of every step ({share:.0%}). Other programs on the "
            f"machines do that, and batches that differ in length: larger ones differ less, but they also train differently.",
            {"train": {"batch_size": 2 * size_now}} if isinstance(size_now, int) else {},
            f"Estimated: at most {share:.0%} of a step, which is all they wait.",
            share,
        )


def _where_slow(slow: int, measured: Replay) -> str:
    """In which operations it takes longer than the others, and what may be the cause."""
    longer = {
        name: (took[slow], float(np.median(np.delete(took, slow))))
        for name, took in measured.seconds.items()
        if name not in COLLECTIVES
    }
    excess = {name: mine - others for name, (mine, others) in longer.items()}
    most = max(excess, key=lambda name: excess[name])
    told = [
        f"{name} ({figure(mine * 1e3)} ms, others {figure(others * 1e3)} ms)"
        for name, (mine, others) in sorted(longer.items(), key=lambda item: -excess[item[0]])
        if excess[name] > 0.2 * excess[most] > 0
    ]
    if not told:
        return "No operation of its own takes longer there: look for other programs on its machine."
    why = next((text for names, text in SLOW_BECAUSE.items() if most in names), "")
    return f"It takes longer in {' and '.join(told[:2])}. {why}".strip()


def _held_up(ranks: Sequence[dict[str, float]], step: float) -> Iterator[Advice]:
    share = float(np.mean([parts[NOTHING_RUNS] for parts in ranks])) / step
    if share >= HELD_UP:
        yield Advice(
            "Find out what else runs on the machine",
            f"For {figure(share * step)} ms of every step ({share:.0%}) no lane runs anything. Other programs that use the same "
            f"cores do that, Python code of your own in other threads, and steps of a few milliseconds (larger batches help).",
            {},
            f"Estimated: at most a step of {figure((1 - share) * step)} ms instead of {figure(step)} ms, {share:.0%} shorter.",
            share,
        )


# -- data, lookups, schedule -------------------------------------------------------------------------------------------


def _slow_data(run: Run, waited: float, step: float) -> Advice:
    reason = (
        f"Nothing runs for {figure(waited)} ms of every step ({waited / step:.0%}): training waits for its next batch. "
    )
    gain = f"Estimated: at most a step of {figure(step - waited)} ms instead of {figure(step)} ms, {waited / step:.0%} shorter."
    reader = run.result.get("reader", run.config.get("train", {}).get("reader"))
    if reader == "process":
        return Advice(
            "Make reading data faster",
            f"{reason}It is read in a process of its own already: more workers share the reading, a format that needs no "
            f"parsing (Parquet) or a faster disk takes less of it.",
            {},
            gain,
            waited / step,
        )
    reason += "A process of its own for reading does not share its time with training."
    if not run.config:
        reason += " In a script: give `fit` `nestpipe.data.reader.in_process(…)`."
    return Advice(
        "Read data in a process of its own",
        reason,
        {"train": {"reader": "process"}} if run.config else {},
        gain,
        waited / step,
    )


def _other_setting(run: Run, step: float, measured: Replay, now: Setting) -> Iterator[Advice]:
    of_now = measured.step(now)

    def factor(setting: Setting) -> float:
        """Only what the simulator knows of is saved, not what held this run up besides."""
        return 1 - (of_now - measured.step(setting)) / step

    candidates = _candidates(run, now)
    if candidates:
        factors = {setting: factor(setting) for setting in candidates}
        best = next(setting for setting, of in factors.items() if of <= AS_GOOD * min(factors.values()))
        if 1 - factors[best] >= WORTH:
            yield Advice(*_told(run, now, best, step), _shorter(step, factors[best]), 1 - factors[best])
            return
    forward = float(measured.seconds[FWD].mean()) * 1e3 / now.parts if FWD in measured.seconds else SHORT_FORWARD
    fewer = now.cut_into(now.parts // 2) if now.cuts and now.parts > 1 else None
    if fewer is not None and forward < SHORT_FORWARD and factor(fewer) <= AS_GOOD:
        yield Advice(
            f"Cut batches into fewer micro-batches: {fewer.parts} instead of {now.parts}",
            f"A forward of a micro-batch takes {figure(forward)} ms, much of it to launch the model, and as much is hidden with "
            f"{fewer.parts}.",
            {"schedule": {"micro_batches": fewer.parts}},
            f"Estimated: what is exposed stays the same (a step {factor(fewer):.2f} times as long, launches not counted). What "
            f'fewer launches gain cannot be seen in one run: `micro_batches = "auto"` measures it in the first steps.',
            0.0,
        )


def _candidates(run: Run, now: Setting) -> list[Setting]:
    """The simplest first. Cut no finer than a worker has samples."""
    most = (run.samples_per_step or 1e9) / (run.workers or 1)
    if now.hides_lookups and now.cuts:
        candidates = [now.cut_into(2 * now.parts)]
    else:
        plain = dataclasses.replace(now, look_ahead=None)
        nested = dataclasses.replace(plain, schedule="nested")
        candidates = [] if now.hides_lookups else [dataclasses.replace(plain, schedule="dbp")]
        candidates += [nested.cut_into(parts) for parts in ((now.parts,) if now.parts > 1 else CUTS)]
    return [setting for setting in candidates if setting.parts <= most]


def _told(run: Run, now: Setting, better: Setting, step: float) -> tuple[str, str, dict[str, dict[str, Any]]]:
    """Title, reason and settings."""
    parts, on_disk = shares(run), _on_disk(run)
    looked_up = "look rows up" + (f" ({' and '.join(on_disk)} on disk)" if on_disk else "")
    exposed = [
        f"{figure(parts[name])} ms ({parts[name] / step:.0%}) to {what}"
        for name, what in (
            ("exposed lookup", looked_up),
            ("exposed communication", "exchange rows, gradients and sums"),
        )
        if parts[name] >= 0.01 * step
    ]
    reason = f"Under {now.schedule} every step waits {' and '.join(exposed)}. " if exposed else ""
    if better.schedule == now.schedule:
        title = f"Cut batches into more micro-batches: {better.parts} instead of {now.parts}"
        why = f"Only the first rows and the last gradients of a batch are waited for; with {better.parts} parts they are fewer."
        return title, reason + why, {"schedule": {"micro_batches": better.parts}}
    entries: dict[str, Any] = {"name": better.schedule}
    same = "to the bit"
    if better.parts != now.parts:
        entries["micro_batches"] = better.parts
        same = "but for the last bits, as sums are cut differently"
    while_computing = " and ".join(
        what
        for what, hides in (("looks up the rows of the next batches", better.hides_lookups and not now.hides_lookups),
                            ("exchanges rows and gradients of other micro-batches", better.cuts and not now.cuts))
        if hides
    )  # fmt: skip
    why = f"The schedule {better.schedule} {while_computing} while one computes. The result is the same {same}."
    return f"Train under the schedule {better.schedule}", reason + why, {"schedule": entries}


def _on_disk(run: Run) -> list[str]:
    sections = {name: of for name, of in run.config.get("tables", {}).items() if isinstance(of, dict)}
    configured = [name for name, section in sections.items() if section.get("tier") == "disk"]
    return configured or [name for name, of in run.result.get("tables", {}).items() if of.get("file_bytes")]


def _lookups_on_disk(run: Run, ranks: Sequence[dict[str, float]], step: float, now: Setting) -> Iterator[Advice]:
    """Where the schedule hides lookups and they are still exposed."""
    exposed = float(np.mean([parts["exposed lookup"] - parts[DATA] for parts in ranks]))
    on_disk, sections = _on_disk(run), run.config.get("tables", {})
    budgets = {name: num_bytes(sections[name].get("memory") or DEFAULT_MEMORY) for name in on_disk if name in sections}
    if not now.hides_lookups or not on_disk or exposed < WORTH * step:
        return
    yield Advice(
        f"Keep more of {' and '.join(on_disk)} in memory",
        f"Rows on disk are looked up while the batch before computes, and that is too short: {figure(exposed)} ms of every step "
        f"({exposed / step:.0%}) are waited for them.",
        {f"tables.{name}": {"memory": size(2 * budget).replace(" ", "")} for name, budget in budgets.items()},
        f"Estimated: at most a step of {figure(step - exposed)} ms instead of {figure(step)} ms, {exposed / step:.0%} shorter, "
        f"once all rows that are used again and again fit.",
        exposed / step,
    )
