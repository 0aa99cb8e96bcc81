"""The law of a load: when users come, how long their histories are, and how a ranking follows its signal.

Sessions begin as a Poisson process, whatever the service does (open loop). A session is a user, drawn by popularity (Zipf), and
several requests with pauses between them. Histories are log-normal over users and grow from request to request; where one has
outgrown its window, the oldest quarter of the window is forgotten, and what is left is a new version of the history. A request
begins with a signal; while the prefix may be computed, candidates are retrieved and preprocessed, and then the ranking request
comes. Everything follows from the law and a seed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np


@dataclasses.dataclass(frozen=True)
class Load:
    """rate: ranking requests per second, of all users together.
    users: how many there are. popularity: the k-th most active comes in proportion to k ** -popularity.
    session: requests per session, in the mean. pause: seconds between two of them, in the median; pause_spread: sigma of its log.
    length: items of a history, in the median; length_spread: sigma of its log; shortest, longest: bounds, the latter the window.
    growth: items that a history gains from one request of its user to the next, in the mean.
    candidates: to rank, per request.
    retrieval, preprocessing: seconds, in the mean, between signal and ranking request; stage_spread: sigma of the log of each.
    """

    rate: float = 100.0
    users: int = 10_000
    popularity: float = 0.8
    session: float = 4.0
    pause: float = 8.0
    pause_spread: float = 0.8
    length: float = 400.0
    length_spread: float = 1.0
    shortest: int = 10
    longest: int = 8192
    growth: float = 3.0
    candidates: int = 200
    retrieval: float = 0.04
    preprocessing: float = 0.02
    stage_spread: float = 0.3

    def __post_init__(self) -> None:
        positive = ("rate", "users", "pause", "length", "shortest", "candidates", "retrieval", "preprocessing")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < math.inf or (field.name in positive and value == 0):
                raise ValueError(
                    f"{field.name}={value}: give a number {'above zero' if field.name in positive else 'of zero or more'}"
                )
        if self.session < 1:
            raise ValueError(f"session={self.session}: a session has one request or more")
        if self.shortest > self.longest:
            raise ValueError(f"shortest={self.shortest} is above longest={self.longest}")


@dataclasses.dataclass(frozen=True, slots=True)
class Visit:
    """One pass through the cascade: a signal, and the ranking request behind it.

    signal, request: times. history: version. known: items at the signal. tokens: items at the request, the tail with them.
    """

    number: int
    user: int
    signal: float
    request: float
    history: int
    known: int
    tokens: int
    candidates: int


def lengths(load: Load, seed: int = 0) -> np.ndarray:
    """Of every user's history, at the beginning."""
    draw = np.random.default_rng([seed, 0])
    drawn = load.length * np.exp(load.length_spread * draw.standard_normal(load.users))
    return np.clip(drawn, load.shortest, load.longest).astype(np.int64)


def visits(load: Load, *, requests: int, seed: int = 0) -> Iterator[Visit]:
    """So many, in the order of their signals. The first ones find sessions that began before time zero."""
    draw = np.random.default_rng([seed, 1])
    times, users = _session_times(load, requests, draw)
    order = np.argsort(times, kind="stable")
    order = order[times[order] >= 0][:requests]
    times, users = times[order], users[order]
    total = lengths(load, seed)[users] + _sums_by(users, draw.poisson(load.growth, len(users)))
    forget = max(1, load.longest // 4)
    history = np.maximum(0, -((load.longest - total) // forget))
    tokens = total - history * forget
    late = np.minimum(
        draw.poisson(0.3 * load.growth, len(users)), tokens - 1
    )  # came in while candidates were retrieved
    stages = sum(
        mean * np.exp(load.stage_spread * draw.standard_normal(len(users)) - load.stage_spread**2 / 2)
        for mean in (load.retrieval, load.preprocessing)
    )
    columns = (users, times, times + stages, history, tokens - late, tokens)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for number, (user, signal, request, version, known, items) in enumerate(rows):
        yield Visit(number, user, signal, request, version, known, items, load.candidates)


def _session_times(load: Load, requests: int, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Times and users of requests around [0, requests / rate], more than are needed."""
    pause = load.pause * math.exp(load.pause_spread**2 / 2)
    before = 4 * load.session * pause  # by then as many sessions end as begin
    # A part of the sessions ends behind the last request that is taken; a few more make sure that there are enough.
    until = 1.1 * requests / load.rate + 10 / load.rate * math.sqrt(requests)
    starts = load.rate / load.session
    count = draw.poisson(starts * (before + until))
    begin = draw.uniform(-before, until, count)
    weights = np.arange(1, load.users + 1) ** -load.popularity
    rank = np.searchsorted(np.cumsum(weights / weights.sum()), draw.random(count))
    user = draw.permutation(load.users)[np.minimum(rank, load.users - 1)]
    per_session = draw.geometric(1 / load.session, count)
    which = np.repeat(np.arange(count), per_session)
    pauses = load.pause * np.exp(load.pause_spread * draw.standard_normal(len(which)))
    pauses[np.cumsum(per_session) - per_session] = 0.0  # the first of a session
    return begin[which] + _sums_by(which, pauses), user[which]


def _sums_by(groups: np.ndarray, values: np.ndarray) -> np.ndarray:
    """At each place, the sum of the values of its group up to there."""
    order = np.argsort(groups, kind="stable")
    running = np.cumsum(values[order])
    first = np.r_[True, groups[order][1:] != groups[order][:-1]]
    before = np.where(first, running - values[order], 0)
    start = np.maximum.accumulate(np.where(first, np.arange(len(groups)), 0))
    sums = np.empty_like(running)
    sums[order] = running - before[start]
    return sums
