"""What a run of the load generator says about a server."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np

from nestpipe.bench.serving.driver import Answer, Driven
from nestpipe.serve.messages import REJECTIONS, Rejected
from nestpipe.serve.requests import RELAYED

KEPT = 0.99  # share of requests that must be answered within the SLO: a P99
TURNED_AWAY = tuple(str(Rejected(why)) for why in REJECTIONS)
LAG = 0.1  # of the SLO: above it, at P99, the generator was too late for its figures to be the server's


@dataclasses.dataclass
class Figures:
    """Of the requests that count.

    offered: requests per second, as they came. in_time: answered within the SLO. goodput: those, per second.
    rejected: turned away by an overloaded server. errors: no answer, or one that should not be.
    p50, p95, p99: latency of those that were answered, in ms. lag: P99 of how late the generator was, in ms.
    checked, wrong: answers compared with the full pass, and those that were not equal to it; worst: their largest
    relative difference. sources: of the answers. signals: what became of these. server: counters of the server, by which
    they rose.
    """

    offered: float
    requests: int
    answered: int
    in_time: int
    goodput: float
    rejected: int
    errors: int
    p50: float
    p95: float
    p99: float
    lag: float
    slo: float
    sources: dict[str, int]
    signals: dict[str, int]
    problems: dict[str, int]
    connections: int
    checked: int = 0
    wrong: int = 0
    worst: float = 0.0
    server: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def kept(self) -> float:
        """Share of requests that were answered within the SLO."""
        return self.in_time / self.requests if self.requests else 0.0

    @property
    def keeps(self) -> bool:
        """P99 within the SLO, and rejected requests count as late."""
        return self.kept >= KEPT

    @property
    def relayed(self) -> float:
        """Share of answers that used a prefix."""
        relayed = sum(self.sources.get(source.name.lower(), 0) for source in RELAYED)
        return relayed / self.answered if self.answered else 0.0

    @property
    def behind(self) -> bool:
        """The generator was: these are not figures of the server."""
        return self.lag > 1e3 * LAG * self.slo

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"kept": self.kept, "relayed": self.relayed, "behind": self.behind}


def figures(driven: Driven, *, seconds: float, slo: float) -> Figures:
    """seconds: for which requests counted. slo: seconds."""
    well = [answer for answer in driven.answers if answer.status == 200]
    bad = [answer for answer in driven.answers if answer.status != 200]
    rejected = sum(map(_turned_away, bad))
    in_time = sum(answer.latency <= slo for answer in well)
    p50, p95, p99 = 1e3 * np.quantile([answer.latency for answer in well], (0.5, 0.95, 0.99)) if well else [np.nan] * 3
    lags = [answer.lag for answer in driven.answers]
    return Figures(
        offered=len(driven.answers) / seconds,
        requests=len(driven.answers),
        answered=len(well),
        in_time=in_time,
        goodput=in_time / seconds,
        rejected=rejected,
        errors=len(bad) - rejected,
        p50=float(p50),
        p95=float(p95),
        p99=float(p99),
        lag=1e3 * float(np.quantile(lags, 0.99)) if lags else 0.0,
        slo=slo,
        sources=dict(collections.Counter(answer.source for answer in well)),
        signals=driven.signals,
        problems=dict(collections.Counter(f"{answer.status}: {answer.error}"[:120] for answer in bad)),
        connections=driven.connections,
    )


def _turned_away(answer: Answer) -> bool:
    return answer.status in (429, 503) and answer.error.startswith(TURNED_AWAY)
