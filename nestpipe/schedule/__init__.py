"""What runs when, as plain values: see ops.py for the words, check.py for the proof, one file per schedule."""

from __future__ import annotations

from collections.abc import Callable

from nestpipe.schedule.dbp import dbp
from nestpipe.schedule.fwp import fwp
from nestpipe.schedule.nested import nested
from nestpipe.schedule.ops import Schedule
from nestpipe.schedule.semi_async import semi_async
from nestpipe.schedule.serial import serial
from nestpipe.schedule.stale import stale

# What a user may ask for by name; each takes micro_batches and look_ahead (None: what its stages need).
SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "serial": serial,
    "dbp": dbp,
    "fwp": fwp,
    "nested": nested,
    "semi_async": semi_async,
    "stale": stale,
}
