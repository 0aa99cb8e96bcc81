"""The load generator: sends the visits of a load to a server at their times, whatever the server does (open loop).

Everything that is sent is made before the clock starts. A request never waits for the answer to another one, and its
latency counts from the time it was due, not from when it was sent: a server that stands still is charged with all who
came meanwhile. How late the generator itself was is told beside it (lag): where that is not small, the figures are its
own and not the server's.

Runs in a process of its own, without torch: `python -m nestpipe.bench.serving.driver < Order > answers`, both JSON.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from nestpipe.bench.serving.environment import environment
from nestpipe.bench.serving.histories import Asked, Histories
from nestpipe.bench.serving.http import Client, Lost
from nestpipe.serve.load import Load, Visit, visits

NO_ANSWER = 0  # instead of a status: the connection was lost, or the run ended before


@dataclasses.dataclass(frozen=True)
class Order:
    """What to send.

    url: of the server. items: file of the keys to draw histories from (.npy). times: whether items have times.
    warm_up: seconds at the beginning whose requests are sent but not counted. seconds: that are counted.
    signals: False: ranking requests only. keep: answers whose scores are kept, spread over the run.
    patience: seconds to wait for answers after the last request.
    name: of the users; another name, other users.
    """

    url: str
    items: str
    load: Load
    seconds: float = 10.0
    warm_up: float = 2.0
    times: bool = False
    signals: bool = True
    keep: int = 20
    patience: float = 10.0
    name: str = "user"
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.seconds > 0 and self.warm_up >= 0 and self.patience >= 0):
            raise ValueError(f"seconds={self.seconds}, warm_up={self.warm_up}, patience={self.patience}: give seconds")

    def visits(self) -> Iterator[Visit]:
        """Whose request is due within the run."""
        end = self.warm_up + self.seconds
        expected = self.load.rate * end
        for visit in visits(self.load, requests=int(expected + 6 * expected**0.5 + 10), seed=self.seed):
            if visit.request <= end:
                yield visit

    def histories(self) -> Histories:
        return Histories(np.load(self.items), self.load, seed=self.seed, times=self.times, name=self.name)


class Shot(NamedTuple):
    """due: seconds from the start. number: of the visit. signal: an early one, else the ranking request."""

    due: float
    number: int
    signal: bool
    body: bytes


@dataclasses.dataclass
class Answer:
    """Of a ranking request. latency: seconds from when it was due; lag: from then until it was sent. seconds: as the
    server says. status: of HTTP, or NO_ANSWER. scores: of some."""

    number: int
    due: float
    lag: float
    latency: float
    status: int = NO_ANSWER
    source: str = ""
    version: str = ""
    seconds: float = 0.0
    error: str = ""
    scores: list[float] | None = None


@dataclasses.dataclass
class Driven:
    """What came of an order. answers: to the requests that count. signals: answers to signals, by what they say.
    connections: that were opened."""

    answers: list[Answer]
    signals: dict[str, int]
    connections: int


def drive(order: Order) -> Driven:
    """Sends it from a process of its own, and waits for the end."""
    told = json.dumps(dataclasses.asdict(order)).encode()
    longest = 60 + 2 * (order.warm_up + order.seconds + order.patience)
    finished = subprocess.run(
        [sys.executable, "-m", __name__],
        input=told,
        stdout=subprocess.PIPE,
        env=environment(),
        timeout=longest,
        check=False,
    )
    if finished.returncode:
        raise RuntimeError("the load generator failed; its own message stands above")
    values = json.loads(finished.stdout)
    return Driven([Answer(**answer) for answer in values["answers"]], values["signals"], values["connections"])


def shots(order: Order) -> list[Shot]:
    """All that is sent, in order of time."""
    histories, made = order.histories(), []
    for visit in order.visits():
        asked = histories.of(visit)
        if order.signals:
            made.append(Shot(visit.signal, visit.number, True, _body(asked, signal=True)))
        made.append(Shot(visit.request, visit.number, False, _body(asked, signal=False)))
    return sorted(made)


def _body(asked: Asked, *, signal: bool) -> bytes:
    count = asked.known if signal else len(asked.history)
    message: dict[str, Any] = {"user": asked.user, "history": asked.history[:count].tolist()}
    if asked.times is not None:
        message["times"] = asked.times[:count].tolist()
    if signal:
        message["candidates"] = len(asked.candidates)
    else:
        message["candidates"] = asked.candidates.tolist()
        if asked.now is not None:
            message["now"] = asked.now
    return json.dumps(message, separators=(",", ":")).encode()


async def send(order: Order) -> Driven:
    """Sends it from this process."""
    queue = shots(order)
    requests = [shot for shot in queue if not shot.signal and shot.due >= order.warm_up]
    kept = {shot.number for shot in requests[:: max(1, len(requests) // order.keep)]} if order.keep else set()
    client, clock = Client(order.url), asyncio.get_running_loop().time
    answers: list[Answer] = []
    signals: dict[str, int] = {}
    under_way: set[asyncio.Task[None]] = set()
    begin = clock() + 0.1

    async def signal(shot: Shot) -> None:
        told = await _told(client, "/v1/signal", shot.body)
        signals[told] = signals.get(told, 0) + 1

    async def rank(shot: Shot, lag: float) -> None:
        answer = Answer(shot.number, shot.due, lag, lag)
        if shot.due >= order.warm_up:
            answers.append(answer)  # now: it counts even if nobody ever answers
        try:
            answer.status, body = await client.post("/v1/rank", shot.body)
            answer.latency = clock() - begin - shot.due
            _read(answer, body, scores=shot.number in kept)
        except Lost as lost:
            answer.latency, answer.error = clock() - begin - shot.due, str(lost)

    gc.collect()
    gc.disable()  # a collection would hold up all that is due meanwhile
    for shot in queue:
        early = begin + shot.due - clock()
        if early > 0:
            await asyncio.sleep(early)
        lag = clock() - begin - shot.due
        task = asyncio.create_task(signal(shot) if shot.signal else rank(shot, lag))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    if under_way:
        _, late = await asyncio.wait(under_way, timeout=order.patience)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
    gc.enable()
    client.close()
    return Driven(answers, signals, client.opened)


def _read(answer: Answer, body: bytes, *, scores: bool) -> None:
    try:
        told = json.loads(body)
        if answer.status == 200:
            answer.source, answer.version = str(told["source"]), str(told["version"])
            answer.seconds = float(told["ms"]) / 1e3
            answer.scores = told["scores"] if scores else None
        else:
            answer.error = str(told["error"])
    except (ValueError, KeyError, TypeError) as error:
        answer.status, answer.error = NO_ANSWER, f"an answer of another form ({error!r}): {body[:80]!r}"


async def _told(client: Client, path: str, body: bytes) -> str:
    try:
        status, answer = await client.post(path, body)
        told = json.loads(answer)
        return str(told.get("decision") or f"{status}: {told.get('error', '')}")
    except (Lost, ValueError, AttributeError) as error:
        return f"no answer: {type(error).__name__}"


def main() -> None:
    values = json.load(sys.stdin)
    order = Order(**{**values, "load": Load(**values["load"])})
    json.dump(dataclasses.asdict(asyncio.run(send(order))), sys.stdout)


if __name__ == "__main__":
    main()
