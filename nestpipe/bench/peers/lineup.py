"""Who takes part where: over which links, nestpipe under which schedules, TorchRec with which pipelines, for how long."""

from __future__ import annotations

import dataclasses

from nestpipe.schedule.setting import Setting

LOOPBACK = "loopback"
LINKS = (LOOPBACK, "1gbit", "300mbit")
# Of nestpipe, by link; of the pipelined ones the fastest counts, as of TorchRec's. To try others, add them here.
SETTINGS: dict[str, tuple[Setting, ...]] = {
    LOOPBACK: (Setting("serial"), Setting("dbp"), Setting("nested")),
    "1gbit": (Setting("serial"), Setting("nested", 2, clustering="taper"), Setting("nested", 4, clustering="taper")),
    "300mbit": (Setting("serial"), Setting("nested", 4, clustering="taper"), Setting("nested", 8, clustering="taper")),
}
# Tables of bags are held whole by one worker each, as TorchRec's are, but for these: keys repeat so much that it is fewer bytes
# to send each row once from wherever it is. (A run says which it is, when it has counted its first batch.)
SPREAD = [("short bags", "zipf")]
PIPELINES = ("base", "sparse_dist")  # those of TorchRec that run on CPUs; see torchrec_side.py
PAIRS = [(load, keys) for load in ("bags", "sequences", "short bags", "long bags") for keys in ("uniform", "zipf")]
QUICK_PAIRS = [("bags", "zipf")]


@dataclasses.dataclass(frozen=True)
class Size:
    """Short rounds: neighbours on a shared machine come and go within seconds.

    rounds, steps: of each contestant, and timed steps in each. A pipeline does not overlap across the ends of a round.
    num_batches: per worker, used in turn; each once before the first round, so that no row is new after that.
    num_rows, num_samples: in place of the workload's own.
    """

    rounds: int = 4
    steps: int = 4
    num_batches: int = 12
    num_rows: int | None = None
    num_samples: int | None = None


FULL = Size()
QUICK = Size(rounds=2, steps=2, num_batches=4, num_rows=5_000, num_samples=64)
