"""The front of a Ray Serve application: HTTP as `nestpipe serve` speaks it, with replicas of Ray in the place of its processes.

A front process needs no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from nestpipe.serve.api import Limits
from nestpipe.serve.app import Api
from nestpipe.serve.frames import Frame
from nestpipe.serve.link import Lost, Refused
from nestpipe.serve.messages import Ask, Signal
from nestpipe.serve.supervisor import Member

log = logging.getLogger("nestpipe")
BEAT = 1.0  # seconds between looks at the replicas
MISSED = 5  # looks without an answer; then a replica counts as lost, though Ray may still have it
NO_UPDATES = (
    "versions are changed through Ray: put the delta's path into user_config of the deployment Ranker, {'deltas': [...]}, and "
    "run `serve deploy` again"
)


class Refusal(NamedTuple):
    """A replica says no. Returned, not raised: Ray logs a traceback of each error, and overload has many. status: of HTTP."""

    status: int
    error: str


@dataclasses.dataclass(eq=False)
class Replica(Member):
    """As the last look at it was. missed: looks since then that it did not answer."""

    missed: int = 0

    @property
    def pid(self) -> int | None:
        return self.stats.get("pid")

    @property
    def in_flight(self) -> int:
        return int(self.stats.get("in_flight", 0))


class Replicas:
    """The replicas of a Ranker, as Api asks a Supervisor for its instances.

    slo: seconds that a request has if it does not say itself. patience: seconds beyond that; who has no answer then is told so.
    """

    def __init__(self, ranker: DeploymentHandle, *, bundle: str, slo: float, patience: float) -> None:
        self.options, self.slo, self.patience = {"bundle": bundle}, slo, patience
        self.members: dict[str, Replica] = {}
        self._ranker = ranker
        self._looking: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        return any(replica.state == "ready" for replica in self.members.values())

    @property
    def version(self) -> str | None:
        """That of all; while they change, one of them."""
        return next((replica.info["version"] for replica in self.members.values()), None)

    async def signal(
        self, user: str, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray | None]
    ) -> tuple[str, Frame]:
        """Name of the replica, and its answer."""
        signal = Signal(user, _given(arrays, "history"), arrays["times"], header["candidates"])
        replica, reason = await self._asked("signal", signal, self.slo)
        return replica, Frame({"reason": reason.name}, {})

    async def rank(
        self, user: str, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray | None]
    ) -> tuple[str, Frame]:
        due = header["deadline_seconds"]
        ask = Ask(
            user,
            _given(arrays, "history"),
            _given(arrays, "candidates"),
            times=arrays["times"],
            now=header["now"],
            deadline_seconds=due,
        )
        replica, ranked = await self._asked("rank", ask, self.slo if due is None else due)
        return replica, Frame({"source": ranked.source.name, "version": ranked.version}, {"scores": ranked.scores})

    async def update(self, path: Path) -> str:
        raise Refused(403, NO_UPDATES)

    async def _asked(self, method: str, message: Signal | Ask, due: float) -> tuple[str, Any]:
        handle = self._ranker.options(method_name=method, session_id=session(message.user))
        try:
            replica, answer = await asyncio.wait_for(handle.remote(message), due + self.patience)
        except RayActorError:
            raise Lost("the instance that had this request is lost; send it again") from None
        except DeploymentUnavailableError:
            raise Lost("no instance is ready; send it again") from None
        except BackPressureError:
            raise Refused(429, "not ranked: too many requests wait for an instance; send it later") from None
        except TimeoutError:
            raise Lost(f"no instance has answered {self.patience:g} s after it was due; send it again") from None
        if isinstance(answer, Refusal):
            raise Refused(*answer)
        return replica, answer

    # -- looks at all of them ------------------------------------------------------------------------------------------

    async def ask_stats(self, member: Member, *, timeout: float) -> None:
        """Renews `member.stats`, and those of all others: whoever asks meanwhile waits for the same look."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self.look(timeout))
        await asyncio.shield(self._looking)

    async def watch(self) -> None:
        """Looks at them again and again."""
        while True:
            try:
                await self.look(BEAT)
            except Exception:  # a watch that ends would leave this front unready for ever
                log.exception("the replicas could not be looked at; trying again")
            await asyncio.sleep(BEAT)

    async def look(self, timeout: float) -> None:
        answers: list[Any] = []
        with contextlib.suppress(TimeoutError, RayActorError, DeploymentUnavailableError):
            looks = self._ranker.broadcast("look")
            answers = await looks.results_async(timeout_s=timeout, return_exceptions=True)
        for replica in self.members.values():
            replica.missed += 1
        for answer in answers:
            if not isinstance(answer, BaseException):
                name, info, stats = answer
                self.members[name] = Replica(name, state="ready", info=info, stats=stats)
        self.members = {name: replica for name, replica in self.members.items() if replica.missed < MISSED}


class Front:
    """A deployment that Ray sends HTTP to."""

    def __init__(
        self,
        ranker: DeploymentHandle,
        limits: Limits,
        *,
        bundle: str,
        slo: float,
        patience: float,
        about: dict[str, Any],
    ) -> None:
        self._replicas = Replicas(ranker, bundle=bundle, slo=slo, patience=patience)
        self._api = Api(self._replicas, limits, updates=None, about=about, no_updates=NO_UPDATES)

    def __serve_build_asgi_app__(self) -> Starlette:
        self._watch = asyncio.get_running_loop().create_task(self._replicas.watch())
        return self._api.app()


def session(user: str) -> str:
    """The session id of a user. A digest: a name may be any text, an id has to be ASCII and not empty; and Ray writes ids to its
    logs."""
    return hashlib.blake2b(user.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _given(arrays: Mapping[str, np.ndarray | None], name: str) -> np.ndarray:
    array = arrays[name]
    assert array is not None
    return array
