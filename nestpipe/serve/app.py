"""The HTTP API of a server: reads requests within limits, sends them to the instances, and answers in JSON, errors too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from nestpipe.serve import api
from nestpipe.serve.exposition import Metrics
from nestpipe.serve.link import Lost, Refused
from nestpipe.serve.messages import Ranked
from nestpipe.serve.requests import Source
from nestpipe.serve.supervisor import Supervisor
from nestpipe.serve.trigger import Reason

BODY_SECONDS = 10.0  # in which a client must have sent its request
STATS_SECONDS = 1.0  # in which an instance must have answered a scrape; else what it said before is told
RETRY = {"Retry-After": "1"}


class Unwanted(Exception):
    """A request that is answered with a status and what is wrong with it."""

    def __init__(self, status: int, error: str) -> None:
        super().__init__(error)
        self.status = status


class Api:
    """updates: the folder that /v1/update takes versions from; None: it takes none. about: what /v1/info tells besides."""

    def __init__(
        self, supervisor: Supervisor, limits: api.Limits, *, updates: Path | None, about: dict[str, Any]
    ) -> None:
        self.supervisor, self.limits, self.updates, self.about = supervisor, limits, updates, about
        self.metrics = Metrics()

    def app(self) -> Starlette:
        answers = [
            ("/v1/signal", "POST", self.signal),
            ("/v1/rank", "POST", self.rank),
            ("/v1/update", "POST", self.update),
            ("/v1/info", "GET", self.info),
            ("/healthz", "GET", self.healthz),
            ("/readyz", "GET", self.readyz),
            ("/metrics", "GET", self.metrics_text),
        ]
        routes = [self._route(*answer) for answer in answers]

        async def unknown(request: Request, error: Exception) -> Response:
            assert isinstance(error, HTTPException)
            known = ", ".join(f"{method} {path}" for path, method, _ in answers)
            self.metrics.requests.labels("other", str(error.status_code)).inc()
            message = f"{request.method} of this path: {error.detail}; there are {known}"
            return _json(api.write_error(message), error.status_code, dict(error.headers or {}))

        async def wrong(request: Request, error: Exception) -> Response:
            self.metrics.requests.labels("other", "500").inc()
            return _json(api.write_error(f"a mistake of the server: {type(error).__name__}; its log says more"), 500)

        return Starlette(routes=routes, exception_handlers={HTTPException: unknown, Exception: wrong})

    def _route(self, path: str, method: str, answer: Callable[[Request], Awaitable[Response]]) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                response = await answer(request)
            except api.TooLarge as error:
                response = _json(api.write_error(str(error)), 413)
            except ValueError as error:
                response = _json(api.write_error(str(error)), 400)
            except (Unwanted, Refused) as error:
                headers = RETRY if error.status in (429, 503) else {}
                response = _json(api.write_error(str(error)), error.status, headers)
            except Lost as error:
                response = _json(api.write_error(str(error)), 503, RETRY)
            self.metrics.requests.labels(path, str(response.status_code)).inc()
            return response

        return Route(path, endpoint, methods=[method])

    # -- what clients ask ----------------------------------------------------------------------------------------------

    async def signal(self, request: Request) -> Response:
        signal = api.read_signal(await self._body(request), self.limits)
        header = {"kind": "signal", "user": signal.user, "candidates": signal.candidates}
        arrays = {"history": signal.history, "times": signal.times}
        _, answer = await self.supervisor.signal(signal.user, header, arrays)
        return _json(api.write_decision(Reason[answer.header["reason"]]), 202)

    async def rank(self, request: Request) -> Response:
        body, began = await self._body(request), time.perf_counter()
        ask = api.read_ask(body, self.limits)
        header = {"kind": "rank", "user": ask.user, "now": ask.now, "deadline_seconds": ask.deadline_seconds}
        arrays = {"history": ask.history, "candidates": ask.candidates, "times": ask.times}
        name, (told, found) = await self.supervisor.rank(ask.user, header, arrays)
        seconds = time.perf_counter() - began
        self.metrics.seconds.labels(name).observe(seconds)
        return _json(api.write_ranked(Ranked(found["scores"], Source[told["source"]], told["version"], seconds)))

    async def update(self, request: Request) -> Response:
        if self.updates is None:
            raise Unwanted(403, "this server takes no updates; start it with --allow-updates")
        path = Path(api.read_update(await self._body(request))).resolve()
        # Beside the bundle only: a version names the class of its model, which whoever reaches the port must not choose.
        if path.parent != self.updates:
            raise Unwanted(403, f"updates are taken from {self.updates}, beside the bundle, alone")
        if not path.is_dir():
            raise ValueError(f"path: {path} is no folder")
        return _json(api.dump({"version": await self.supervisor.update(path)}))

    # -- what operators ask ------------------------------------------------------------------------------------------

    async def healthz(self, request: Request) -> Response:
        """The front process is alive."""
        return _json(api.dump({"status": "alive"}))

    async def readyz(self, request: Request) -> Response:
        """At least one instance is warm and answers."""
        ready = self.supervisor.ready
        return _json(
            api.dump({"ready": ready, "instances": self._states()}), 200 if ready else 503, {} if ready else RETRY
        )

    async def info(self, request: Request) -> Response:
        members = self.supervisor.members.values()
        instances = [
            {
                "name": member.name,
                "state": member.state,
                "pid": member.link.process.pid if member.link else None,
                "version": member.info.get("version"),
                "deaths": member.deaths,
                "last_error": member.last_error,
                "recovery_seconds": round(member.recovery, 3),
                "in_flight": member.link.in_flight if member.link else 0,
            }
            for member in members
        ]
        model = next((member.info for member in members if member.info), {})
        told = {name: value for name, value in model.items() if name not in ("kind", "id")}
        told["version"] = self.supervisor.version
        own = {"bundle": self.supervisor.options["bundle"], **told, **self.about}
        return _json(api.dump({**own, "instances": instances}))

    async def metrics_text(self, request: Request) -> Response:
        members = list(self.supervisor.members.values())
        asked = (self.supervisor.ask_stats(member, timeout=STATS_SECONDS) for member in members)
        await asyncio.gather(*asked, return_exceptions=True)
        return Response(self.metrics.text(members), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _states(self) -> dict[str, str]:
        return {name: member.state for name, member in self.supervisor.members.items()}

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # Also what keeps web pages elsewhere from posting here through a browser on this machine.
            raise Unwanted(
                415, f"content type {kind[:50]!r}: send JSON, with the header Content-Type: application/json"
            )
        limit = self.limits.body
        told = request.headers.get("content-length", "")
        parts, size = [], int(told) if told.isdecimal() else 0
        too_large = api.TooLarge(f"the body is larger than {limit} bytes")
        if size > limit:
            raise too_large
        size = 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    parts.append(part)
                    size += len(part)
                    if size > limit:
                        raise too_large
        except ClientDisconnect:
            raise Unwanted(400, "the request ended before its body did") from None
        except TimeoutError:
            raise Unwanted(408, f"the body had not come after {BODY_SECONDS:.0f} s") from None
        return b"".join(parts)


def _json(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")
