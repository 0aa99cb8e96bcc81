"""The load generator, against a server of a few lines that answers when it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from nestpipe.bench.serving.driver import NO_ANSWER, Driven, Order, send
from nestpipe.bench.serving.figures import figures
from nestpipe.serve.load import Load

LOAD = Load(rate=100.0, users=20, length=20.0, longest=40, candidates=3, retrieval=0.01, preprocessing=0.01)
Reply = Callable[[str, dict], Awaitable[tuple[int, dict] | None]]


@pytest.fixture
def items(tmp_path: Path) -> str:
    np.save(tmp_path / "items.npy", np.arange(50))
    return str(tmp_path / "items.npy")


def driven(items: str, reply: Reply, **changes: object) -> tuple[Driven, Order]:
    """What comes of an order where the server answers with `reply(path, body)`; None: it hangs up."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            answer = await reply(head.split()[1].decode(), body)
            if answer is None:
                break
            text = json.dumps(answer[1]).encode()
            writer.write(b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n" % (answer[0], len(text)) + text)
        writer.close()

    async def quietly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await talk(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def run() -> tuple[Driven, Order]:
        server = await asyncio.start_server(quietly, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        given = {"seconds": 0.5, "warm_up": 0.1, "keep": 5, "patience": 2.0, **changes}
        order = Order(f"http://127.0.0.1:{port}", items, LOAD, **given)  # type: ignore[arg-type]
        result = await send(order)
        server.close()
        return result, order

    return asyncio.run(run())


async def well(path: str, body: dict) -> tuple[int, dict]:
    if path == "/v1/signal":
        return 202, {"decision": "admitted"}
    return 200, {"scores": [0.5] * len(body["candidates"]), "source": "device", "version": "1", "ms": 1.5}


def test_every_request_behind_the_warm_up_is_sent_once_and_answered(items: str) -> None:
    found, order = driven(items, well)
    due = [visit.number for visit in order.visits() if visit.request >= order.warm_up]
    assert sorted(answer.number for answer in found.answers) == sorted(due) and len(due) > 20
    assert {answer.status for answer in found.answers} == {200} and {a.source for a in found.answers} == {"device"}
    assert found.signals == {"admitted": len(list(order.visits()))}
    assert 5 <= sum(answer.scores is not None for answer in found.answers) <= 10
    assert all(0 <= answer.lag <= answer.latency for answer in found.answers)


def test_a_server_that_stands_still_is_charged_with_all_who_came_meanwhile(items: str) -> None:
    """A closed loop would see one slow request: here all that were due in the pause are late, and none of them is sent late."""
    still = asyncio.Event()

    async def stands_still(path: str, body: dict) -> tuple[int, dict]:
        loop = asyncio.get_running_loop()
        if not still.is_set():
            loop.call_later(0.4, still.set)
        await still.wait()
        return await well(path, body)

    found, order = driven(items, stands_still, warm_up=0.0, signals=False)
    late = [answer for answer in found.answers if answer.latency > 0.1]
    assert len(late) > 0.2 * LOAD.rate and found.connections > 10
    told = figures(found, seconds=order.seconds, slo=0.1)
    assert told.in_time == told.requests - len(late) and not told.keeps
    assert found.signals == {}


def test_answers_that_are_none_are_told_by_kind(items: str) -> None:
    kinds = [
        (429, {"error": "not ranked: the queue is full"}),
        (503, {"error": "instance-1 is lost"}),
        (400, {"error": "bad"}),
        (200, {"nothing": 1}),
        None,
    ]
    asked: list[int] = []

    async def badly(path: str, body: dict) -> tuple[int, dict] | None:
        asked.append(1)
        return kinds[len(asked) % len(kinds)]

    found, order = driven(items, badly, signals=False, warm_up=0.0)
    told = figures(found, seconds=order.seconds, slo=0.1)
    assert told.answered == 0 and told.in_time == 0 and told.goodput == 0 and not told.keeps
    assert 0 < told.rejected < told.requests and told.errors == told.requests - told.rejected
    statuses = {answer.status for answer in found.answers}
    assert statuses == {429, 503, 400, NO_ANSWER}
    assert any("another form" in problem for problem in told.problems)


def test_a_request_that_is_never_answered_counts_and_does_not_hold_up_the_end(items: str) -> None:
    async def never(path: str, body: dict) -> tuple[int, dict]:
        await asyncio.sleep(60)
        return 200, {}

    found, _ = driven(items, never, seconds=0.2, warm_up=0.0, patience=0.2, signals=False)
    assert found.answers and {answer.status for answer in found.answers} == {NO_ANSWER}


def test_nobody_listens(items: str) -> None:
    order = Order("http://127.0.0.1:9", items, LOAD, seconds=0.2, warm_up=0.0, patience=1.0)
    found = asyncio.run(send(order))
    assert found.answers and {answer.status for answer in found.answers} == {NO_ANSWER}
    assert set(found.signals) == {"no answer: Lost"}


def test_wrong_orders_are_refused(items: str) -> None:
    with pytest.raises(ValueError, match="seconds=0"):
        Order("http://127.0.0.1:1", items, LOAD, seconds=0)
    with pytest.raises(ValueError, match="http://HOST:PORT"):
        asyncio.run(send(Order("127.0.0.1:1", items, LOAD)))
