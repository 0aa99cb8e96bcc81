"""`nestpipe bench sequences`: models of long histories.

attention   the operation alone, against padded formulas: time and memory by length.
waiting     workers with uneven samples: as they come, and dealt.
steps       a whole model: tokens per second against the same in plain torch with padding.
negatives   many for each position: all rows held, streamed, in half precision, shared.
behind      rows one update behind (semi_async) against nested, on links of a limited rate.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from nestpipe.bench.sequences import attention, behind, negatives, steps, waiting
from nestpipe.sections import Section


def run(*, quick: bool) -> dict[str, Any]:
    of_attention = attention.QUICK if quick else attention.Size()
    uneven = (waiting.QUICK,) if quick else (waiting.EMULATED, waiting.BY_TOKENS, waiting.REAL)
    return {
        "attention": {"size": dataclasses.asdict(of_attention), "lengths": attention.measure(of_attention)},
        "waiting": {"runs": [{"size": dataclasses.asdict(s), "rounds": waiting.measure(s)} for s in uneven]},
        "negatives": _part(negatives, negatives.QUICK if quick else negatives.Size()),
        "behind": {"results": behind.measure(behind.QUICK if quick else behind.Behind())},
        "steps": _part(steps, steps.QUICK if quick else steps.Size()),
    }


def _part(part: Any, size: Any) -> dict[str, Any]:
    return {"size": dataclasses.asdict(size), "rounds": part.measure(size)}


def sections(results: dict[str, Any]) -> list[Section]:
    parts = {"attention": attention, "waiting": waiting, "steps": steps, "negatives": negatives, "behind": behind}
    return [section for name, part in parts.items() for section in part.sections(**results[name])]
