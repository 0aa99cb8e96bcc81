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
from nestpipe.bench.serving.lab import FULL, HOST, Conditions, lab
from nestpipe.sections import Section
from nestpipe.serve.load import Load


@dataclasses.dataclass(frozen=True)
class Size:
    """lengths: of histories, for `longest`. once: the law of users who come once, its session. around: seconds of load before and after
    an instance is killed. operations: on the cache."""

    conditions: Conditions = Conditions()
    ladder: capacity.Ladder = capacity.Ladder()
    lengths: tuple[int, ...] = (1_024, 1_536, 2_048, 3_072, 4_096, 6_144, 8_192)
    around: tuple[float, float] = (5.0, 20.0)
    export: exporting.Size = exporting.Size()
    fleet: simulated.Size = simulated.Size()
    operations: int = 1_000_000


QUICK = Size(
    conditions=Conditions(
        ranker=Ranker(dim=16, layers=1, heads=1, longest=600, items=500, steps=1),
        load=Load(users=50, session=4.0, pause=0.2, length=100.0, longest=256, candidates=20, retrieval=0.02, preprocessing=0.01),
        slack=20.0,
        device_memory="1MB",
        host_memory="8MB",
        warm_up=0.3,
        seconds=1.0,
        requests=1,
        keep=4,
    ),
    ladder=capacity.Ladder(halvings=0, lowest=0, highest=1),
    lengths=(128, 256),
    around=(1.0, 6.0),
    export=exporting.QUICK,
    fleet=simulated.QUICK,
    operations=20_000,
)


def run(*, quick: bool) -> dict[str, Any]:
    size = QUICK if quick else Size()
    with lab(size.conditions) as place:
        found = capacity.measure(place, size.ladder)
        highest = {name: way["highest"] or found["base"] for name, way in found["ways"].items()}
        once = dataclasses.replace(size.conditions.load, session=1.0)
        results = {
            "conditions": dataclasses.asdict(size.conditions),
            "capacity": found,
            "sessions": capacity.measure(place, size.ladder, ways=(FULL, HOST), load=once),
            "longest": longest.measure(place, size.lengths, highest[FULL.name]),
            "ablation": ablation.measure(place, highest[HOST.name]),
            "losing": losing.measure(place, highest[HOST.name] / 2, before=size.around[0], after=size.around[1]),
            "loadgen": loadgen.measure(place, highest[HOST.name] / 2),
            "simulated": simulated.measure(place, size.fleet),
            "exporting": exporting.measure(size.export),
        }
        return results | {"equality": equality.measure(place, size.operations)}


def sections(results: dict[str, Any]) -> list[Section]:
    parts = (longest, ablation, losing, loadgen, simulated, exporting, equality)
    return [
        *capacity.sections(results["capacity"]),
        *capacity.sections(results["sessions"], title="Users who come once only: highest rate within the SLO")[:1],
        *(section for part in parts for section in part.sections(results[part.__name__.rpartition(".")[2]])),
    ]
