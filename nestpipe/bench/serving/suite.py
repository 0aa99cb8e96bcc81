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

import contextlib
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
    """What needs a server: one for each contestant, all of them there from the beginning to the end, so that contestants can
    take turns; who is not measured is idle. The rate that full passes keep is where histories grow, that of all techniques
    together is the ablation's."""
    load, ladder = size.conditions.load, size.ladder
    once = dataclasses.replace(load, session=1.0)
    with contextlib.ExitStack() as stack:
        services = {way: stack.enter_context(place.serving(way)) for way in (*WAYS, UNTRIGGERED)}
        two = {way: services[way] for way in (FULL, HOST)}
        rates = capacity.measure(place, {way: services[way] for way in WAYS}, ladder, load)
        highest = {name: found["highest"] or found["points"][0]["rate"] for name, found in rates.items()}
        without = {
            way.name: ablation.measure(place, services[way], way, highest[HOST.name])
            for way in (HOST, UNTRIGGERED, ANYWHERE, RELAY)
        }
        long = longest.measure(place, two, size.lengths, highest[FULL.name])
        single = capacity.measure(place, two, ladder, once)
        others = {"loadgen": loadgen.measure(place, services[FULL], highest[FULL.name] / 2)}
        before, after = size.around
        others["losing"] = losing.measure(place, services[HOST], highest[HOST.name] / 2, before=before, after=after)
    return {
        "capacity": capacity.results(place, ladder, load, rates),
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
