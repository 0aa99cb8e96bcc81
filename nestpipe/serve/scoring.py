"""Scores and prefixes out of a bundle, for requests given as arrays of keys: rows looked up, the model called. No cache here.

Legend: C candidates of a request.
"""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestpipe.batch import Jagged
from nestpipe.models.prefix import Prefix
from nestpipe.serve.bundle import Bundle
from nestpipe.serve.messages import Ask, Signal


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """One request of a call. prefix: of its first items; None: a full pass."""

    ask: Ask
    prefix: Prefix | None = None


class Scorer:
    """What a bundle's ranker makes of requests. prefix_dtype: in which prefixes are kept; scores are computed in the model's own.
    relay: whether prefixes are to be kept at all.

    ValueError for a bundle whose model cannot rank, or whose scores a kept prefix would change.
    """

    def __init__(self, bundle: Bundle, *, prefix_dtype: torch.dtype = torch.float32, relay: bool = True) -> None:
        model: Any = bundle.model
        name = type(model).__name__
        missing = [method for method in ("prefix", "rank") if not callable(getattr(model, method, None))]
        missing += [
            feature for feature in ("history", "candidates") if not isinstance(getattr(model, feature, None), str)
        ]
        if missing:
            raise ValueError(
                f"{name} cannot rank candidates: it has no {' and no '.join(missing)}; serve a ranker: hstu_ranker, fuxi_ranker, "
                f"or a model of your own with prefix and rank as nestpipe.models.Ranker has them (Bundle.predict answers others)"
            )
        problem = model.relay_problem() if relay and hasattr(model, "relay_problem") else None
        if problem is not None:
            raise ValueError(
                f"relay would change the scores of {name}: {problem}; switch relay off (Settings(relay=False), or "
                f"nestpipe serve --no-relay)"
            )
        self.bundle, self.model, self.prefix_dtype = bundle, model, prefix_dtype
        self.device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self.uses_times = bool(getattr(model, "num_time_buckets", 0))
        # A model of one's own may compute prefixes in one go only.
        self.in_pieces = "behind" in inspect.signature(model.prefix).parameters
        self.max_length: int | None = getattr(model, "max_length", None)
        tables = {feature.name: feature.table for feature in bundle.features if feature.pooling is None}
        absent = [name for name in (model.history, model.candidates) if name not in tables]
        if absent:
            raise ValueError(
                f"{name} reads rows of {absent[0]!r}, which is no feature of the bundle with a row per key (they are: "
                f"{', '.join(tables) or 'none'}); export a run whose features are named as the model's"
            )
        self._tables = tables[model.history], tables[model.candidates]
        self.bytes_per_token = self._bytes_of_one() if relay else 1

    def check(self, message: Signal | Ask) -> None:
        """Raises ValueError for what this model cannot take."""
        if self.max_length is not None and len(message.history) > self.max_length:
            raise ValueError(
                f"history: {len(message.history)} items, the model takes {self.max_length}; send the last {self.max_length}"
            )
        if self.uses_times and message.times is None:
            raise ValueError("times: the model looks at times; give the seconds of each item of the history")

    def prefix(self, history: np.ndarray, times: np.ndarray | None, behind: Prefix | None = None) -> Prefix:
        """Of these items, to be kept. behind: the prefix of the items before them; then it is the prefix of all."""
        rows = self._rows(self._tables[0], [history])
        seconds = self._seconds([times]) if self.uses_times else None
        with torch.no_grad():
            made: Prefix = self.model.prefix(rows, seconds, **({} if behind is None else {"behind": [behind]}))[0]
        return made if self.prefix_dtype is torch.float32 else made.to(dtype=self.prefix_dtype)

    def rank(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """float32 [C] of each request, computed together. Each is what it would be alone, up to rounding."""
        asks = [part.ask for part in parts]
        heads = [part.prefix.length if part.prefix else 0 for part in parts]
        tails = self._rows(self._tables[0], [ask.history[head:] for ask, head in zip(asks, heads, strict=True)])
        candidates = self._rows(self._tables[1], [ask.candidates for ask in asks])
        times = now = None
        if self.uses_times:
            times = self._seconds([_behind(ask.times, head) for ask, head in zip(asks, heads, strict=True)])
            clock = time.time()
            seconds = [clock if ask.now is None else ask.now for ask in asks]
            now = torch.tensor(seconds, dtype=torch.float64).to(self.device)
            if times.values.dtype == torch.int64 and all(map(float.is_integer, map(float, seconds))):
                now = now.to(torch.int64)
        with torch.no_grad():
            scores = self.model.rank([part.prefix for part in parts], tails, candidates, times=times, now=now)
        if not bool(torch.isfinite(scores.values).all()):
            raise ValueError(
                f"a score is not a finite number: weights or rows of version {self.bundle.version} are broken, or the prefix is "
                f"kept in too few bits"
            )
        values, bounds = scores.values.float().cpu().numpy(), scores.offsets.tolist()
        return [values[a:z].copy() for a, z in zip(bounds[:-1], bounds[1:], strict=True)]

    def full_pass(self, ask: Ask) -> np.ndarray:
        """Scores without any prefix, alone: what every answer has to be."""
        self.check(ask)
        return self.rank([Part(ask)])[0]

    def _bytes_of_one(self) -> int:
        """Bytes of a prefix of one item."""
        items = np.zeros(1, np.int64)
        return max(1, self.prefix(items, items if self.uses_times else None).num_bytes)

    def _rows(self, table: str, keys: Sequence[np.ndarray]) -> Jagged:
        lengths = torch.tensor([len(part) for part in keys], dtype=torch.int64)
        rows = self.bundle.rows(table, torch.from_numpy(np.concatenate(keys)))
        return Jagged.from_lengths(rows.to(self.device), lengths.to(self.device))

    def _seconds(self, times: Sequence[np.ndarray | None]) -> Jagged:
        parts = [np.empty(0, np.int64) if part is None else part for part in times]
        lengths = torch.tensor([len(part) for part in parts], dtype=torch.int64)
        # Whole and broken seconds together become float64.
        values: Tensor = torch.from_numpy(np.concatenate(parts))
        return Jagged.from_lengths(values.to(self.device), lengths.to(self.device))


def check_successor(before: Scorer, after: Scorer) -> None:
    """Raises ValueError unless requests and prefixes of one fit the other."""
    for what in ("bytes_per_token", "max_length", "uses_times", "in_pieces", "device"):
        ours, others = getattr(before, what), getattr(after, what)
        if ours != others:
            raise ValueError(
                f"version {after.bundle.version} is of another model: {what} is {others}, of the one that is served {ours}; "
                f"start a new instance with it"
            )


def to_host(prefix: Prefix) -> Prefix:
    """A copy in host memory; page-locked where the prefix is on a device. On a CPU, device and host are the same memory, and it
    is a copy all the same: two budgets, two buffers."""
    return _copied(prefix, lambda x: x.clone() if x.device.type == "cpu" else x.to("cpu").pin_memory())


def to_device(prefix: Prefix, device: torch.device) -> Prefix:
    """A copy in device memory."""
    return _copied(prefix, lambda x: x.to(device) if device.type != "cpu" else x.clone())


def _copied(prefix: Prefix, copy: Any) -> Prefix:
    layers = [(None if k is None else copy(k), copy(v)) for k, v in prefix.layers]
    return Prefix(layers, prefix.length, None if prefix.times is None else copy(prefix.times))


def _behind(times: np.ndarray | None, head: int) -> np.ndarray | None:
    return None if times is None else times[head:]
