"""The instances of one machine: started, watched, started again when they die, and told of new versions together.

An instance that dies takes its requests in flight with it: they are told at once. Its users go to their second choices until it
is back, and ready. One that dies again and again is given up, with the last reason; when none is left, so is the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nestpipe.serve.frames import Frame
from nestpipe.serve.link import Link, Lost, Refused, ended
from nestpipe.serve.router import Router

log = logging.getLogger("nestpipe")


@dataclasses.dataclass(frozen=True)
class Patience:
    """Seconds, and how often. backoff: before an instance is started again, doubled at each death, up to `longest`.
    deaths: in a row, without `well` seconds of service between two; then it is given up. start: until it must be ready.
    beat: between looks at it. hung: without an answer, or in one computation; then it is ended."""

    backoff: float = 0.25
    longest: float = 10.0
    deaths: int = 5
    well: float = 60.0
    start: float = 300.0
    beat: float = 2.0
    hung: float = 60.0


@dataclasses.dataclass(eq=False)
class Member:
    """An instance over all its lives. recovery: seconds from its last death until it was ready again. stats: as it last said."""

    name: str
    link: Link | None = None
    state: str = "starting"
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    deaths: int = 0
    last_error: str = ""
    recovery: float = 0.0
    stats: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def pid(self) -> int | None:
        return self.link.process.pid if self.link else None

    @property
    def in_flight(self) -> int:
        return self.link.in_flight if self.link else 0


class Supervisor:
    """options: what each instance is told: bundle, settings, prefix_dtype, threads. names: of the instances.
    affinity: False: requests go to any instance (to see what the router is good for)."""

    def __init__(
        self, options: Mapping[str, Any], names: list[str], *, patience: Patience | None = None, affinity: bool = True
    ) -> None:
        self.options, self.patience, self.affinity = dict(options), patience or Patience(), affinity
        self.router = Router()
        self.members = {name: Member(name) for name in names}
        self.version: str | None = None  # that all serve, once one is ready
        self.refused = ""  # why the bundle cannot be served at all
        self.over = asyncio.Event()  # no instance is left, nor will be
        self._updating = asyncio.Lock()
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    # -- asking --------------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return bool(self.router.members) and not self._stopping

    async def signal(
        self, user: str, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray | None]
    ) -> tuple[str, Frame]:
        """Name of the instance, and its answer."""
        name, link = self._route(self.router.signal, user)
        return name, await link.call(header, arrays)

    async def rank(
        self, user: str, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray | None]
    ) -> tuple[str, Frame]:
        """The same; it follows its signal."""
        name, link = self._route(self.router.ranking, user)
        self.router.begin(name)
        try:
            return name, await link.call(header, arrays)
        finally:
            self.router.done(name)

    def _route(self, choose: Callable[[float, str], str], user: str) -> tuple[str, Link]:
        while self.router.members:
            name = choose(time.monotonic(), user) if self.affinity else random.choice(list(self.router.members))
            link = self.members[name].link
            if link is not None and not link.gone.is_set():
                return name, link
            self.router.lost(name)  # it died this moment
        raise Lost("no instance is ready; send it again")

    # -- lives ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep(member)) for member in self.members.values()]

    async def stop(self, drain: float) -> None:
        """Answers what is in flight, for up to so many seconds, and ends all instances."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        alive = [(member.link, member.state == "ready") for member in self.members.values() if member.link is not None]
        await asyncio.gather(*(link.stop(drain) if ready else link.end() for link, ready in alive))

    async def _keep(self, member: Member) -> None:
        """Its lives, one after the other."""
        in_a_row, wait, died = 0, self.patience.backoff, 0.0
        while in_a_row < self.patience.deaths:
            if in_a_row:
                await asyncio.sleep(wait)
                wait = min(2 * wait, self.patience.longest)
            since = math.inf  # when it was ready, if it ever is
            try:
                since = await self._live(member, died)
            except Refused as refused:
                member.last_error = str(refused)
                if self.version is None:  # none ever was ready: the next try would say the same
                    self.refused = str(refused)
                    self._given_up(member)
                    return
            except Lost as lost:
                member.last_error = str(lost)
            except Exception as error:  # no process to be had, say
                log.exception("instance %s could not be started, or not be watched", member.name)
                member.last_error = f"{type(error).__name__}: {error}"
            finally:
                if member.name in self.router.members:
                    self.router.lost(member.name)
            died = time.monotonic()
            member.deaths += 1
            member.state = "starting"
            if member.link is not None:
                member.last_error = f"{member.last_error} ({ended(await member.link.end())})"
                member.link = None
            log.warning("instance %s is lost: %s", member.name, member.last_error)
            if died - since > self.patience.well:
                in_a_row, wait = 0, self.patience.backoff
            in_a_row += 1
        log.error(
            "instance %s has died %d times in a row and is given up: %s", member.name, in_a_row, member.last_error
        )
        self._given_up(member)

    async def _live(self, member: Member, died: float) -> float:
        """One life, to its end; since when it was ready. Lost or Refused if it never was."""
        member.link = link = await Link.start(self.options, threads=self.options["threads"])
        try:
            member.info = await asyncio.wait_for(link.ready(), self.patience.start)
        except TimeoutError:
            raise Lost(f"it was not ready after {self.patience.start:.0f} s") from None
        async with self._updating:  # it may have begun with an older version
            if self.version is not None and member.info["version"] != self.version:
                member.info |= await self._brought_up(link)
            self._check_version(member)
            self.version = member.info["version"]
            self.router.join(member.name)
        member.state, since = "ready", time.monotonic()
        if died:
            member.recovery = since - died
            log.warning("instance %s is back after %.1f s", member.name, member.recovery)
        watching = asyncio.create_task(self._watch(member, link))
        try:
            await link.gone.wait()
        finally:
            watching.cancel()
        member.last_error = "it ended"
        return since

    def _check_version(self, member: Member) -> None:
        """Lost if it would serve another version than those beside it: what lies at the bundle's path has been exchanged."""
        version, path = member.info["version"], self.options["bundle"]
        if self.version in (None, version):
            return
        if self.router.members:
            raise Lost(
                f"{path} is now of version {version}, the other instances serve {self.version}: put the old one back, or "
                f"start the server again"
            )
        log.warning(
            "%s is now of version %s, before it was %s; no instance is left that serves that",
            path,
            version,
            self.version,
        )

    async def _brought_up(self, link: Link) -> dict[str, Any]:
        prepared = await link.call({"kind": "prepare", "path": self.options["bundle"]})
        return (await link.call({"kind": "commit", "version": prepared.header["version"]})).header

    async def _watch(self, member: Member, link: Link) -> None:
        """Ends an instance that no longer answers."""
        while True:
            await asyncio.sleep(self.patience.beat)
            reason = f"no answer for {self.patience.hung:.0f} s"
            with contextlib.suppress(TimeoutError, Refused, Lost):
                await self.ask_stats(member, timeout=self.patience.hung)
                reason = f"one computation took more than {self.patience.hung:.0f} s"
                if member.stats["running_seconds"] < self.patience.hung:
                    continue
            if not link.gone.is_set():
                log.error("instance %s is ended: %s", member.name, reason)
                await link.end()
            return

    def _given_up(self, member: Member) -> None:
        member.state, member.link = "given up", None
        if all(other.state == "given up" for other in self.members.values()) or self.refused:
            self.over.set()

    # -- all of them ---------------------------------------------------------------------------------------------------

    async def ask_stats(self, member: Member, *, timeout: float) -> None:
        """Renews `member.stats`."""
        if member.link is not None and member.state == "ready":
            member.stats = (await asyncio.wait_for(member.link.call({"kind": "stats"}), timeout)).header["stats"]

    async def update(self, path: Path) -> str:
        """All instances serve this version from now on, or none does: first each opens it; only if all could, each switches.
        Refused with the reason if one could not."""
        async with self._updating:
            links = {
                name: member.link for name, member in self.members.items() if member.state == "ready" and member.link
            }
            if not links:
                raise Lost("no instance is ready; send it again")
            header = {"kind": "prepare", "path": str(path)}
            prepared = await asyncio.gather(*(link.call(header) for link in links.values()), return_exceptions=True)
            errors = [
                answer for answer in prepared if isinstance(answer, BaseException) and not isinstance(answer, Lost)
            ]
            if errors:
                raise errors[0]
            versions = {answer.header["version"] for answer in prepared if not isinstance(answer, BaseException)}
            if len(versions) != 1:
                raise Refused(503, "instances were lost meanwhile; send it again")
            version = versions.pop()
            self.options["bundle"], self.version = str(path), version  # an instance that dies now comes back with it
            for name, link in links.items():
                try:
                    self.members[name].info |= (await link.call({"kind": "commit", "version": version})).header
                except (Lost, Refused) as error:
                    # It must not go on with the old version: it is ended, and comes back with the new one.
                    log.error("instance %s could not change to version %s: %s", name, version, error)
                    await link.end()
            return version
