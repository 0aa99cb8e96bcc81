"""Instances that die, refuse or lag behind, without processes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from nestpipe.serve import supervisor as supervisors
from nestpipe.serve.frames import Frame
from nestpipe.serve.link import MOST_IN_FLIGHT, Link, Lost, Refused, ended
from nestpipe.serve.supervisor import Patience, Supervisor

QUICK = Patience(backoff=0.001, longest=0.01, deaths=3, well=0.5, start=0.2, beat=0.01, hung=0.05)
OPTIONS = {"bundle": "one", "threads": 1}


@dataclasses.dataclass(eq=False)
class Process:
    pid: int = 1


class FakeLink:
    """version: that it serves. refuses: why it cannot start. prepares: versions by path; else it refuses."""

    def __init__(self, version: str, *, refuses: str = "", dies: bool = False, prepares: dict[str, str] | None = None):
        self.version, self.refuses, self.prepares = version, refuses, prepares or {}
        self.gone, self.process, self.ended, self.hangs = asyncio.Event(), Process(), False, False
        self.asked: list[str] = []
        if dies:
            self.gone.set()

    async def ready(self) -> dict[str, Any]:
        if self.refuses:
            raise Refused(500, self.refuses)
        return {"version": self.version}

    async def call(self, header: dict[str, Any], arrays: object = None) -> Frame:
        self.asked.append(header["kind"])
        if self.gone.is_set():
            raise Lost("gone")
        if self.hangs:
            await self.gone.wait()
            raise Lost("gone")
        if header["kind"] == "prepare":
            if header["path"] not in self.prepares:
                raise Refused(400, f"no {header['path']}")
            return Frame({"version": self.prepares[header["path"]]}, {})
        if header["kind"] == "commit":
            self.version = header["version"]
        return Frame({"version": self.version, "stats": {"running_seconds": 0.0}}, {})

    async def end(self) -> int:
        self.gone.set()
        self.ended = True
        return -9

    async def stop(self, drain: float) -> None:
        await self.end()


def run(
    lives: Callable[[int], FakeLink], during: Callable[[Supervisor], Awaitable[None]], monkeypatch: pytest.MonkeyPatch, *,
    names: int = 1,
) -> Supervisor:  # fmt: skip
    """A supervisor whose instances live these lives, by the number of the start."""
    starts = iter(range(1000))

    async def start(options: object, *, threads: int) -> FakeLink:
        return lives(next(starts))

    monkeypatch.setattr(supervisors.Link, "start", start)

    async def work() -> Supervisor:
        supervisor = Supervisor(OPTIONS, [f"i{number}" for number in range(names)], patience=QUICK)
        supervisor.start()
        try:
            await asyncio.wait_for(during(supervisor), 10)
        finally:
            await supervisor.stop(0.0)
        return supervisor

    return asyncio.run(work())


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.001)


def test_an_instance_that_dies_comes_back_and_its_users_with_it(monkeypatch) -> None:
    links: list[FakeLink] = []

    async def during(supervisor: Supervisor) -> None:
        await until(lambda: supervisor.ready)
        links[0].gone.set()
        await until(lambda: not supervisor.ready)
        with pytest.raises(Lost, match="no instance is ready"):
            await supervisor.rank("user", {"kind": "rank"}, {})
        await until(lambda: supervisor.ready)
        assert (await supervisor.rank("user", {"kind": "rank"}, {}))[0] == "i0"
        member = supervisor.members["i0"]
        assert member.deaths == 1 and 0 < member.recovery < 5 and "SIGKILL" in member.last_error

    def live(number: int) -> FakeLink:
        links.append(FakeLink("v"))
        return links[-1]

    run(live, during, monkeypatch)


def test_one_that_dies_again_and_again_is_given_up_with_the_reason(monkeypatch) -> None:
    supervisor = run(lambda _: FakeLink("v", dies=True), lambda supervisor: supervisor.over.wait(), monkeypatch)
    assert supervisor.members["i0"].state == "given up" and supervisor.members["i0"].deaths == 3
    assert "SIGKILL" in supervisor.members["i0"].last_error and not supervisor.refused


def test_a_bundle_that_cannot_be_served_is_told_once(monkeypatch) -> None:
    supervisor = run(lambda _: FakeLink("v", refuses="damaged"), lambda s: s.over.wait(), monkeypatch, names=2)
    assert supervisor.refused == "damaged" and sum(member.deaths for member in supervisor.members.values()) == 0


def test_one_that_no_longer_answers_is_ended(monkeypatch) -> None:
    links: list[FakeLink] = []

    async def during(supervisor: Supervisor) -> None:
        await until(lambda: supervisor.ready)
        links[0].hangs = True
        await until(lambda: links[0].ended)
        await until(lambda: len(links) == 2 and supervisor.ready)

    def live(number: int) -> FakeLink:
        links.append(FakeLink("v"))
        return links[-1]

    run(live, during, monkeypatch)


def test_all_change_to_a_version_or_none_does(monkeypatch) -> None:
    links = [FakeLink("v1", prepares={"/two": "v2", "/three": "v3"}) for _ in range(2)]
    del links[1].prepares["/three"]

    async def during(supervisor: Supervisor) -> None:
        await until(lambda: len(supervisor.router.members) == 2)
        with pytest.raises(Refused, match="no /three"):
            await supervisor.update(Path("/three"))
        assert [link.version for link in links] == ["v1", "v1"] and supervisor.options["bundle"] == "one"
        assert await supervisor.update(Path("/two")) == "v2"
        assert [link.version for link in links] == ["v2", "v2"] and supervisor.version == "v2"

    run(lambda number: links[number], during, monkeypatch, names=2)


def test_one_that_comes_back_with_an_older_version_is_brought_up_before_it_serves(monkeypatch) -> None:
    links: list[FakeLink] = []

    async def during(supervisor: Supervisor) -> None:
        await until(lambda: supervisor.ready)
        await supervisor.update(Path("/two"))
        links[0].gone.set()
        await until(lambda: len(links) == 2 and supervisor.ready)
        assert links[1].version == "v2" and links[1].asked[:2] == ["prepare", "commit"]

    def live(number: int) -> FakeLink:
        links.append(FakeLink("v1", prepares={"/two": "v2"}))
        return links[-1]

    run(live, during, monkeypatch)


def test_one_that_comes_back_with_what_was_exchanged_on_disk_does_not_serve_beside_the_others(monkeypatch) -> None:
    links: list[FakeLink] = []

    async def during(supervisor: Supervisor) -> None:
        await until(lambda: len(supervisor.router.members) == 2)
        links[0].gone.set()
        await until(lambda: supervisor.members["i0"].state == "given up")
        assert "is now of version v2, the other instances serve v1" in supervisor.members["i0"].last_error
        assert supervisor.version == "v1" and list(supervisor.router.members) == ["i1"]
        links[1].gone.set()  # nobody is left to be at odds with
        await until(lambda: supervisor.version == "v2" and supervisor.ready)

    def live(number: int) -> FakeLink:
        version = "v1" if number < 2 else "v2"
        links.append(FakeLink(version, prepares={"one": version}))
        return links[-1]

    run(live, during, monkeypatch, names=2)


def test_an_instance_with_too_much_to_do_still_says_how_it_is() -> None:
    class Writer:
        def __init__(self) -> None:
            self.sent: list[bytes] = []

        def is_closing(self) -> bool:
            return False

        def write(self, data: bytes) -> None:
            self.sent.append(data)

    async def work() -> None:
        link = Link(Process(), asyncio.StreamReader(), writer := Writer())  # type: ignore[arg-type]
        many = [asyncio.create_task(link.call({"kind": "rank"})) for _ in range(MOST_IN_FLIGHT)]
        await asyncio.sleep(0)
        with pytest.raises(Refused, match="send it later"):
            await link.call({"kind": "signal"})
        asked = asyncio.create_task(link.call({"kind": "stats"}))
        await asyncio.sleep(0)
        assert not asked.done() and b"stats" in writer.sent[-1]
        for task in (*many, asked):
            task.cancel()

    asyncio.run(work())


def test_ends_of_processes_are_told_in_words() -> None:
    assert [ended(code) for code in (0, 3, -15, -99)] == ["exit code 0", "exit code 3", "SIGTERM", "signal 99"]
    assert ended(-9) == "SIGKILL, perhaps for lack of memory"
