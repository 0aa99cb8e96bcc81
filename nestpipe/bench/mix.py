"""The paper's mix: the shares that lookup, communication and compute had of a serial step on 1,536 workers, emulated.

Operations last as long as the mix says, in sleep (see emulated.py); they, their order, what they send and their waiting for
each other are real. Communication lasts in proportion to the bytes that a worker sends, at a rate at which a serial step's take
the share of the mix: that is the emulated link.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nestpipe.bench.contestants import DIM, POOL, Contestant, Law, in_memory, load_everything, pool_of
from nestpipe.bench.emulated import EmulatedModel, pad
from nestpipe.bench.figures import largest
from nestpipe.schedule.ops import PREFETCH, RETRIEVE, ROUTE, WRITEBACK
from nestpipe.schedule.setting import Setting


@dataclasses.dataclass(frozen=True)
class Mix:
    """Shares of the serial step. RETRIEVE and WRITEBACK together are the retrieval."""

    workers: int = 8
    law: Law = Law(1.05)
    samples: int = 128
    length: int = 20
    step: float = 3.0  # seconds, of the serial step; what is real in it is a few ms an operation
    prefetch: float = 0.146
    route: float = 0.10
    retrieve: float = 0.20
    writeback: float = 0.05
    communication: float = 0.208
    compute: float = 0.296
    cuts: Sequence[int] = (8, 16)
    rounds: int = 2
    steps: int = 12
    short: int = 6  # steps of a schedule that hides no lookups: nothing fills and drains; below 4 no end is left out

    @property
    def settings(self) -> list[Setting]:
        cut = [Setting(name, n, True, "window") for name in ("fwp", "nested") for n in self.cuts]
        return [
            Setting("serial"),
            Setting("dbp"),
            *cut,
            Setting("nested", self.cuts[0], True, "taper"),
            Setting("stale"),
        ]

    @property
    def lookup(self) -> float:
        return self.prefetch + self.route + self.retrieve + self.writeback

    def steps_of(self, setting: Setting) -> int:
        return self.steps if setting.hides_lookups else self.short


# Shares of the serial step that are exposed, and speed-up, at 1,536 workers; the rest of the step is 1,713 ms of compute.
# (serial: TorchRec; stale: UniEmb, which prefetches asynchronously.)
PAPER = {
    "serial": {"lookup": 0.496, "communication": 0.208, "speedup": 1.0},
    "dbp": {"lookup": 36 / 5794, "communication": 1169 / 5794, "speedup": 5794 / (1713 + 36 + 1169)},
    "fwp": {"lookup": 0.496, "communication": 160 / 5794, "speedup": 5794 / (1713 + 2871 + 160)},
    "nested": {"lookup": 30.19 / 5794, "communication": 154.23 / 5794, "speedup": 3.06},
    "stale": {"lookup": 23.49 / 5794, "communication": 1181 / 5794, "speedup": 1.98},
}


def mix_contestants(
    size: Mix, settings: Sequence[Setting], *, seconds_per_byte: float | None = None
) -> tuple[list[Contestant], float]:
    """Trainers whose operations last as the mix says, warmed up; and the seconds per byte of their links, which the bytes
    of the first setting, serial, decide where they are not given."""
    load_everything()
    pool = pool_of(size.law, size.samples, size.length)
    contestants = [in_memory(setting, EmulatedModel(dim=DIM), pool) for setting in settings]
    if seconds_per_byte is None:
        seconds_per_byte = size.step * size.communication / _bytes_sent(contestants[0])
    seconds = {
        PREFETCH: size.step * size.prefetch,
        ROUTE: size.step * size.route,
        RETRIEVE: size.step * size.retrieve,
        WRITEBACK: size.step * size.writeback,
    }
    per_token = size.step * size.compute / (size.samples * size.length)
    for contestant in contestants:
        pad(contestant.trainer, seconds, seconds_per_token=per_token, seconds_per_byte=seconds_per_byte)
        contestant.recorded()  # forgets what ran before that
    return contestants, seconds_per_byte


def _bytes_sent(contestant: Contestant) -> float:
    """Of rows and gradients per step by the worker that sends most, for whom all others wait."""
    before = contestant.trainer.sent.rows
    contestant.train(POOL)
    return largest({"sent": (contestant.trainer.sent.rows - before) / POOL})["sent"]
