"""Profiles of published clusters: fitted to few of the published figures, so that the others can be predicted.

`npu-1536` is fitted to the baseline (TorchRec: lookup, communication) at 128 and 1,536 workers and to NestPipe's dense time.
Two pairs of figures give two lines: what a lookup takes and by how much it grows with the cluster; what a byte takes and by how
much it slows down with the number of peers. How the lookup divides into operations is not published: the shares are ours, the
same as in the lab's mix (bench/mix.py). `gpu-128` has one figure to go by (a speed-up of 1.36) and says so.

What operations do to how much (rows, bytes) comes from `examples/hstu_1536.toml`; on another model the same cluster has other
times, and the profile says which.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from nestpipe.schedule import ops as op
from nestpipe.schedule.setting import Setting
from nestpipe.simulate.costs import Costs
from nestpipe.simulate.network import Level, Network
from nestpipe.simulate.profile import Profile, Work
from nestpipe.simulate.sweep import Prediction, predict
from nestpipe.simulate.workload import Workload

# -- what was published ------------------------------------------------------------------------------------------------

MODEL = Path(__file__).parent / "published.toml"  # beside it, as a config; also examples/hstu_1536.toml
SMALL, LARGE = 128, 1536
LOOKUP = {SMALL: 0.244 * 2.569, LARGE: 2.87099}  # seconds, of TorchRec; at 128 workers a share of its step
COMMUNICATION = {SMALL: 0.092 * 2.569, LARGE: 1.20785}
DENSE = 1.89598 - 0.03019 - 0.15423  # NestPipe's step without what is exposed
SYNC = 0.002  # seconds; "under 2 ms"

SHARES = {op.PREFETCH: 0.146, op.ROUTE: 0.10, op.RETRIEVE: 0.20, op.WRITEBACK: 0.05}  # of a step; ours
LATENCY = 1e-6  # seconds a message, between nodes; ours, as modern network cards have
REPLICAS = 4  # of 2D sparse parallelism; as its authors had them, on 256 workers


@dataclasses.dataclass(frozen=True)
class Published:
    """step: milliseconds at 1,536 workers. efficiency: against 128. fitted: the profile was made from it. Replicas, where there
    are any, are averaged in every step."""

    system: str
    setting: Setting
    step: float
    efficiency: float | None = None
    fitted: bool = False


NESTPIPE = Setting("nested", 8, False, "shared")
PUBLISHED = (
    Published("TorchRec", Setting("serial"), 5793.83, 0.4434, fitted=True),
    Published("2D-SP", Setting("serial", replicas=REPLICAS, near="replicas"), 4914.01, 0.4932),
    Published("UniEmb", Setting("stale"), 2919.76, 0.6762),
    Published("DBP only", Setting("dbp"), 2920.0),
    Published("FWP only", Setting("fwp", 8, False, "shared"), 4745.0),
    Published("NestPipe", NESTPIPE, 1895.98, 0.9407),
    Published("NestPipe + 2D-SP", dataclasses.replace(NESTPIPE, replicas=REPLICAS, near="replicas"), 1822.0, 0.9717),
    Published("NestPipe, N = 32, clustering", dataclasses.replace(NESTPIPE, micro_batches=32), 1e3 * DENSE + 30.19 + 27.71),
    Published(
        "NestPipe, N = 32, no clustering",
        dataclasses.replace(NESTPIPE, micro_batches=32, clustering="none"),
        1e3 * DENSE + 30.19 + 0.252 * 1331,
    ),
)  # fmt: skip
GPU_SPEEDUP = 1.36  # NestPipe over TorchRec on 128 GPUs


# -- profiles ----------------------------------------------------------------------------------------------------------


def npu_1536(load: Workload) -> Profile:
    flops = load.forward_flops + load.backward_flops
    start = Profile(
        name="npu-1536",
        network=Network(16, Level(latency=LATENCY, bandwidth=1e12), Level(latency=LATENCY, bandwidth=1e9)),
        operations={},
    )
    large, small = (Costs(load, start, Setting("serial"), workers) for workers in (LARGE, SMALL))

    # Lookups. The share of each gives its time at 1,536 workers; by how much less there was to do at 128, and how much less
    # time it took, give the crowding.
    units = {
        op.PREFETCH: (load.samples, load.samples),
        op.ROUTE: (load.keys, load.keys),
        op.RETRIEVE: (large.owned_rows(), small.owned_rows()),
        op.WRITEBACK: (large.owned_rows(), small.owned_rows()),
    }
    whole = sum(SHARES.values())
    at_large = {name: share / whole * (LOOKUP[LARGE] - SYNC) for name, share in SHARES.items()}
    without_crowding = sum(at_large[name] * few / many for name, (many, few) in units.items())
    ratio = (LOOKUP[SMALL] - SYNC) / without_crowding
    crowding = (1 - ratio) / ((LARGE - 1) * ratio - (SMALL - 1))
    crowd = 1 + crowding * (LARGE - 1)
    operations = {name: Work(0.0, at_large[name] / crowd / units[name][0]) for name in SHARES}
    operations[op.SYNC] = Work(SYNC)  # whatever the cluster: of its rows nothing is known
    operations[op.FWD] = operations[op.BWD] = Work(0.0, DENSE / flops)
    return Profile(
        name="npu-1536",
        network=Network(16, Level(latency=LATENCY, bandwidth=1e12), _level(load, start, COMMUNICATION)),
        operations=operations,
        crowding=crowding,
        device_memory=64e9,
        host_memory=96e9,
        note=NOTE_NPU,
    )


def _level(load: Workload, start: Profile, seconds: Mapping[int, float]) -> Level:
    """Links between nodes on which rows and gradients of a serial step take so long, by count of workers. Two counts: a time
    for each byte, and one for each byte and peer. (What a step agrees on and sums up takes a thousandth of it.)"""
    lines = []
    for workers, total in seconds.items():
        costs = Costs(load, start, Setting("serial"), workers)
        peers = workers - min(workers, start.network.per_node)
        num_bytes = 2 * costs.moved_bytes * peers / workers
        lines.append(((total - 2 * LATENCY * peers) / num_bytes, peers - 1))
    (few, few_peers), (many, many_peers) = lines
    slope = (many - few) / (many_peers - few_peers)
    each = few - slope * few_peers
    return Level(latency=LATENCY, bandwidth=1 / each, congestion=slope / each)


def gpu_128(load: Workload, npu: Profile) -> Profile:
    """Shares of lookup and communication as on the other cluster at 128 workers; their sum gives the published speed-up."""
    ratio = LOOKUP[SMALL] / COMMUNICATION[SMALL]
    flops = load.forward_flops + load.backward_flops
    rate = 0.3 * 312e12
    dense = flops / rate
    # (1 + (1 + ratio) x) / (1 + x / N) = speed-up, with x the communication as a part of the dense time
    x = (GPU_SPEEDUP - 1) / (1 + ratio - GPU_SPEEDUP / NESTPIPE.parts)
    costs = Costs(load, npu, Setting("serial"), SMALL)
    units = {
        op.PREFETCH: load.samples,
        op.ROUTE: load.keys,
        op.RETRIEVE: costs.owned_rows(),
        op.WRITEBACK: costs.owned_rows(),
    }
    whole = sum(SHARES.values())
    lookup = {name: share / whole * x * ratio * dense for name, share in SHARES.items()}
    operations = {name: Work(0.0, lookup[name] / units[name]) for name in SHARES}
    operations[op.FWD] = operations[op.BWD] = Work(0.0, 1 / rate)
    peers = SMALL - 8
    num_bytes = 2 * costs.moved_bytes * peers / SMALL
    bandwidth = num_bytes / (x * dense - 2 * LATENCY * peers)
    return Profile(
        name="gpu-128",
        network=Network(8, Level(latency=LATENCY, bandwidth=3e11), Level(latency=LATENCY, bandwidth=bandwidth)),
        operations=operations,
        device_memory=80e9,
        host_memory=128e9,
        note=NOTE_GPU,
    )


NOTE_NPU = """\
Fitted by nestpipe/simulate/fit.py to published figures of a cluster of 1,536 NPUs (NestPipe, arXiv 2604.06956): the
baseline's lookup and communication at 128 and 1,536 workers and NestPipe's dense time, nothing else. Times for each unit hold
for the model of examples/hstu_1536.toml, whose sizes are not published; memory and latency are guesses. docs/scaling.md says
how far it is right.
"""
NOTE_GPU = """\
Fitted by nestpipe/simulate/fit.py to one published figure of 128 GPUs: NestPipe 1.36 times as fast as TorchRec. The division
into lookup and communication is that of the other cluster (npu-1536) at 128 workers, the device computes at 30% of 312
TFLOP/s, and nothing says how it grows beyond 128 workers: it has no congestion and no crowding. Use it with care.
"""


# -- predictions -------------------------------------------------------------------------------------------------------


def against_published(load: Workload, profile: Profile) -> list[tuple[Published, Prediction, float]]:
    """(published, predicted at 1,536 workers, predicted efficiency against 128)."""
    compared, load = [], load.averaged()
    for published in PUBLISHED:
        large, small = (predict(load, profile, published.setting, workers) for workers in (LARGE, SMALL))
        compared.append((published, large, small.step / large.step))
    return compared


def beyond(
    load: Workload, profile: Profile, setting: Setting, counts: Sequence[int]
) -> list[tuple[Prediction, Prediction]]:
    """On counts that nobody has published, (along the lines, along powers). Two points do not say how a time grows beyond
    them: the profile draws a line through them, a power of the number of workers goes through both as well and grows less."""
    return [
        (predict(load, profile, setting, workers), predict(load, _as_power(profile, workers), setting, workers))
        for workers in counts
    ]


def _as_power(profile: Profile, workers: int) -> Profile:
    """With the crowding and the congestion that the power through both counts has at a third one."""

    def slope(now: float, before: int) -> float:
        small, large = (1 + now * (count - before) for count in (SMALL, LARGE))
        factor = large * (workers / LARGE) ** (math.log(large / small) / math.log(LARGE / SMALL))
        return (factor - 1) / (workers - before)

    between = profile.network.between
    peers = profile.network.per_node + 1
    network = dataclasses.replace(
        profile.network, between=dataclasses.replace(between, congestion=slope(between.congestion, peers))
    )
    return dataclasses.replace(profile, crowding=slope(profile.crowding, 1), network=network)
