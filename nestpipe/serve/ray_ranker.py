"""A replica of Ray Serve that is an instance: one Worker, with its threads and its prefixes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

import torch
from ray import serve

from nestpipe.errors import describe
from nestpipe.serve.bundle import Bundle, load_bundle
from nestpipe.serve.instance import DTYPES, STATUS, told
from nestpipe.serve.messages import Ask, Ranked, Rejected, Signal
from nestpipe.serve.ray_front import Refusal
from nestpipe.serve.requests import Settings
from nestpipe.serve.trigger import Reason
from nestpipe.serve.worker import Worker

HUNG = 60.0  # seconds of one computation; then Ray replaces the replica
DRAIN = 1.0  # seconds at the end, for what Ray has not waited for


class Ranker:
    """Answers with its replica's name in front, so that whoever asks knows who it was.

    Deltas come by `reconfigure`: Ray calls it when user_config changes, and on every replica that it starts later. So a replica
    serves the version that Ray was told last, whenever it was born.
    """

    def __init__(self, bundle: str, settings: Settings, *, prefix_dtype: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.replica = str(serve.get_replica_context().replica_id.unique_id)
        self._path = bundle
        self._deltas: list[str] = []
        self.worker = Worker(load_bundle(bundle), settings, prefix_dtype=DTYPES[prefix_dtype], threads=threads)
        self.worker.warm_up()

    async def signal(self, signal: Signal) -> tuple[str, Reason | Refusal]:
        try:
            return self.replica, self.worker.signal(signal)
        except (ValueError, Rejected) as error:
            return self.replica, _refusal(error)

    async def rank(self, ask: Ask) -> tuple[str, Ranked | Refusal]:
        try:
            future = self.worker.rank(ask)
        except (ValueError, Rejected) as error:
            return self.replica, _refusal(error)
        try:
            return self.replica, await asyncio.wrap_future(future)
        except Rejected as error:
            return self.replica, _refusal(error)
        except Exception as error:
            return self.replica, Refusal(500, describe(error))

    async def look(self) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """Name, what it serves, and its counters."""
        return self.replica, told(self.worker), {"pid": os.getpid(), **self.worker.stats()}

    # -- what Ray calls ------------------------------------------------------------------------------------------------

    async def reconfigure(self, config: Mapping[str, Any]) -> None:
        """Brings the bundle to these deltas. Requests go on meanwhile, each with the version it began with."""
        deltas = [str(delta) for delta in config["deltas"]]
        if deltas != self._deltas:
            self.worker.update(await asyncio.to_thread(self._with, deltas))
            self._deltas = deltas

    def _with(self, deltas: list[str]) -> Bundle:
        done = len(self._deltas)
        if deltas[:done] == self._deltas:
            bundle, deltas = self.worker.bundle, deltas[done:]
        else:
            bundle = load_bundle(self._path)
        for delta in deltas:
            bundle = bundle.updated(delta)
        return bundle

    async def check_health(self) -> None:
        if self.worker.broken:
            raise RuntimeError("the instance is broken; its log says why")
        running = self.worker.stats()["running_seconds"]
        if running > HUNG:
            raise RuntimeError(f"one computation has taken {running:.0f} s already")

    def __del__(self) -> None:
        if hasattr(self, "worker"):  # else __init__ has failed
            self.worker.close(drain=DRAIN)


def _refusal(error: ValueError | Rejected) -> Refusal:
    return Refusal(STATUS[error.why] if isinstance(error, Rejected) else 400, str(error))
