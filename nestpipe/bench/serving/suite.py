"""`nestpipe bench serving`: a server on this machine under load, and what relaying prefixes is worth.

capacity    the highest rate within the SLO: full pass, relay, relay + host tier, the same without affinity; and beyond it.
sessions    the same for users who come once only.
longest     the longest history at a fixed rate.
ablation    each of the three techniques left out.
losing      an instance killed under load.
exporting   bundles and deltas of a large table.
simulated   a fleet of hundreds of instances.
equality    scores against the full pass over all of the above, and random operations on the cache.

Server, instances and load generator share the cores of this machine.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from nestpipe.bench.serving import ablation, capacity, equality, exporting, loadgen, longest, losing, simulated
from nestpipe.bench.serving.bundle import Ranker
from nestpipe.bench.serving.lab import ANYWHERE, FULL, HOST, RELAY, UNTRIGGERED, WAYS, Conditions, Lab, lab
from nestpipe.sections import Section
from nestpipe.serve.load import Load


@dataclasses.dataclass(frozen=True)
class Size:
    """lengths: of histories, for `longest`. once: the law of users who come once, its session. around: seconds of load
    before and after an instance is killed. operations: on the cache."""

    conditions: Conditions = Conditions()
    ladder: capacity.Ladder = capacity.Ladder()
    lengths: tuple[int, ...] = (1_024, 1_536, 2_048, 3_072, 4_096, 6_144, 8_192)
    around: tuple[float, float] = (5.0, 20.0)
    export: exporting.Size = exporting.Size()
    fleet: simulated.Size = simulated.Size()
    operations: int = 1_000_000


QUICK = Size(
    conditions=Conditions(
        ranker=Ranker(dim=16, layers=1, heads=1, longest=600, items=500),
        load=Load(
            users=50,
            session=4.0,
            pause=0.2,
            length=100.0,
            longest=256,
            candidates=20,
            retrieval=0.02,
            preprocessing=0.01,
        ),
        slack=20.0,
        device_memory="1MB",
        host_memory="8MB",
        warm_up=0.3,
        seconds=1.0,
        requests=1,
        keep=4,
    ),
    ladder=capacity.Ladder(base=20.0, halvings=0, lowest=0, highest=1),
    lengths=(128, 256),
    around=(1.0, 6.0),
    export=exporting.QUICK,
    fleet=simulated.QUICK,
    operations=20_000,
)


def run(*, quick: bool) -> dict[str, Any]:
    size = QUICK if quick else Size()
    with lab(size.conditions) as place:
        return {"conditions": dataclasses.asdict(size.conditions), **_served(place, size), **_alone(place, size)}


def _served(place: Lab, size: Size) -> dict[str, Any]:
    """What needs a server: one for each contestant, for all that it takes part in. Full passes come first: the rate they
    keep is where histories grow; then all techniques together, whose rate is that of the ablation."""
    load, ladder = size.conditions.load, size.ladder
    once = dataclasses.replace(load, session=1.0)
    rates, single, long, without, others = {}, {}, {}, {}, {}
    for way in (FULL, HOST, RELAY, ANYWHERE):
        with place.serving(way) as service:
            rates[way.name] = capacity.measure(place, service, way, ladder, load)
            highest = {name: found["highest"] or found["points"][0]["rate"] for name, found in rates.items()}
            if way is not FULL:
                without[way.name] = ablation.measure(place, service, way, highest[HOST.name])
            if way in (FULL, HOST):
                single[way.name] = capacity.measure(place, service, way, ladder, once)
                long[way.name] = longest.measure(place, service, way, size.lengths, highest[FULL.name])
            if way is FULL:
                others["loadgen"] = loadgen.measure(place, service, highest[FULL.name] / 2)
            if way is HOST:
                before, after = size.around
                others["losing"] = losing.measure(place, service, highest[HOST.name] / 2, before=before, after=after)
    with place.serving(UNTRIGGERED) as service:
        without[UNTRIGGERED.name] = ablation.measure(place, service, UNTRIGGERED, highest[HOST.name])
    return {
        "capacity": capacity.results(place, ladder, load, {way.name: rates[way.name] for way in WAYS}),
        "sessions": capacity.results(place, ladder, once, single),
        "longest": {"slo": place.slo, "rate": highest[FULL.name], "lengths": list(size.lengths), "ways": long},
        "ablation": {"slo": place.slo, "rate": highest[HOST.name], "ways": without},
        **others,
    }


def _alone(place: Lab, size: Size) -> dict[str, Any]:
    return {
        "simulated": simulated.measure(place, size.fleet),
        "exporting": exporting.measure(size.export),
        "equality": equality.measure(place, size.operations),
    }


def sections(results: dict[str, Any]) -> list[Section]:
    parts = (longest, ablation, losing, loadgen, simulated, exporting, equality)
    return [
        *capacity.sections(results["capacity"]),
        *capacity.sections(results["sessions"], title="Users who come once only: highest rate within the SLO")[:1],
        *(section for part in parts for section in part.sections(results[part.__name__.rpartition(".")[2]])),
    ]
