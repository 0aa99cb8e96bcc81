"""The same instances as replicas of Ray Serve, for more than one machine. Needs `nestpipe[ray]`.

    serve run nestpipe.serve.ray_app:app bundle=BUNDLE replicas=2

Two deployments. A `Ranker` replica is an instance: one Worker, with its threads and its prefixes. A `Front` replica speaks HTTP, the API
of `nestpipe serve`, and passes each request on under the user's session id: Ray's consistent-hash router sends signal and ranking of
one user to the same replica, and to the next one on its ring while that one is full or gone. Ray starts replicas, looks after their
health, replaces the dead and lets the leaving finish.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nestpipe.errors import describe
from nestpipe.serve import api
from nestpipe.serve.api import Limits, TooLarge
from nestpipe.serve.messages import Ask, Ranked, Rejected, Signal
from nestpipe.serve.requests import Settings
from nestpipe.serve.trigger import Reason

try:
    from ray import serve
    from ray.exceptions import RayActorError
    from ray.serve import Application
    from ray.serve.config import RequestRouterConfig
    from ray.serve.exceptions import BackPressureError
    from ray.serve.handle import DeploymentHandle
    from starlette.requests import Request
    from starlette.responses import Response
except ImportError as error:
    raise ImportError(f"Ray Serve is not there ({error}): pip install 'nestpipe[ray]'") from error

if TYPE_CHECKING:
    from nestpipe.serve.bundle import Bundle

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
STATUS = {"full": 429, "late": 503, "stopping": 503}  # of a Rejected
HUNG = 60.0  # seconds of one computation; then the replica is replaced


class Refused(NamedTuple):
    """Instead of an answer. Returned, not raised: Ray logs a traceback for each error, which under overload is more work to do.

    status: of HTTP.
    """

    status: int
    error: str


class Ranker:
    """An instance. deltas come by `user_config`, so that Ray can change them while the replica serves, and a replica that is started
    later has them too."""

    def __init__(self, bundle: str, settings: Settings, *, prefix_dtype: str, threads: int) -> None:
        import torch  # here: a Front imports this file too, and needs none of it

        from nestpipe.serve.bundle import load_bundle
        from nestpipe.serve.worker import Worker

        torch.set_num_threads(threads)
        self._path, self._deltas = bundle, [""][:0]
        self.replica = serve.get_replica_context().replica_id.unique_id
        self.worker = Worker(
            load_bundle(bundle), settings, prefix_dtype=getattr(torch, prefix_dtype), threads=threads
        )
        self.worker.warm_up()

    async def signal(self, signal: Signal) -> Reason | Refused:
        try:
            return self.worker.signal(signal)
        except Rejected as error:
            return Refused(STATUS[error.why], str(error))
        except ValueError as error:
            return Refused(400, str(error))

    async def rank(self, ask: Ask) -> Ranked | Refused:
        try:
            future = self.worker.rank(ask)
        except ValueError as error:
            return Refused(400, str(error))
        except Rejected as error:
            return Refused(STATUS[error.why], str(error))
        try:
            return await asyncio.wrap_future(future)
        except Rejected as error:
            return Refused(STATUS[error.why], str(error))
        except Exception as error:
            return Refused(500, describe(error))

    async def stats(self) -> dict[str, Any]:
        """Of the worker, with the replica's name and process."""
        return {"replica": self.replica, "pid": os.getpid(), **self.worker.stats()}

    async def info(self) -> dict[str, Any]:
        scorer = self.worker.scorer
        return {
            "version": scorer.bundle.version,
            "step": scorer.bundle.step,
            "model": type(scorer.model).__name__,
            "max_length": scorer.max_length,
            "uses_times": scorer.uses_times,
            "bytes_per_token": scorer.bytes_per_token,
        }

    # -- what Ray calls ------------------------------------------------------------------------------------------------

    async def reconfigure(self, config: Mapping[str, Any]) -> None:
        """Brings the bundle to these deltas, while requests go on with the version they began with."""
        deltas = list(config.get("deltas", []))
        if deltas != self._deltas:
            self.worker.update(await asyncio.to_thread(self._with, deltas))
            self._deltas = deltas

    def _with(self, deltas: Sequence[str]) -> Bundle:
        from nestpipe.serve.bundle import load_bundle

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
            raise RuntimeError(f"one computation takes {running:.0f} s already")

    def __del__(self) -> None:
        # Ray calls it when it has waited for the requests in flight; also after an __init__ that failed.
        worker = getattr(self, "worker", None)
        if worker is not None:
            worker.close(drain=1.0)


class Front:
    """HTTP to messages and back. patience: seconds beyond a request's deadline, for a replica to answer or to come back."""

    def __init__(self, ranker: DeploymentHandle, limits: Limits, *, slo: float, patience: float) -> None:
        self.ranker, self.limits, self.slo, self.patience = ranker, limits, slo, patience
        self.routes: dict[str, tuple[str, Callable[[Request], Awaitable[Response]]]] = {
            "/v1/rank": ("POST", self.rank),
            "/v1/signal": ("POST", self.signal),
            "/v1/info": ("GET", self.info),
            "/healthz": ("GET", self.healthz),
            "/readyz": ("GET", self.readyz),
        }

    async def __call__(self, request: Request) -> Response:
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        method, answer = self.routes.get(path, ("", None))
        if answer is None:
            return _error(404, f"no such path; there are {', '.join(self.routes)}")
        if request.method != method:
            return _error(405, f"{path} takes {method}", Allow=method)
        try:
            return await answer(request)
        except TooLarge as error:
            return _error(413, str(error))
        except ValueError as error:
            return _error(400, str(error))
        except RayActorError:
            return _error(503, "the instance that had this request is lost; send it again")
        except BackPressureError:
            return _error(429, "too many requests wait already; send it later")
        except TimeoutError:
            return _error(503, "no instance has answered in time; send it again")

    async def rank(self, request: Request) -> Response:
        ask = api.read_ask(await self._body(request), self.limits)
        ranked = await self._asked("rank", ask, self.slo if ask.deadline_seconds is None else ask.deadline_seconds)
        if isinstance(ranked, Refused):
            return _error(*ranked)
        return _json(200, api.write_ranked(ranked))

    async def signal(self, request: Request) -> Response:
        reason = await self._asked("signal", api.read_signal(await self._body(request), self.limits), self.slo)
        if isinstance(reason, Refused):
            return _error(*reason)
        return _json(202, api.write_decision(reason))

    async def info(self, _: Request) -> Response:
        return _json(200, api.dump(await asyncio.wait_for(self.ranker.info.remote(), self.patience)))

    async def healthz(self, _: Request) -> Response:
        return _json(200, b'{"status":"ok"}')

    async def readyz(self, _: Request) -> Response:
        await asyncio.wait_for(self.ranker.info.remote(), self.patience)
        return _json(200, b'{"status":"ready"}')

    async def _asked(self, method: str, message: Signal | Ask, due: float) -> Any:
        handle = self.ranker.options(method_name=method, session_id=session(message.user))
        return await asyncio.wait_for(handle.remote(message), due + self.patience)

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self.limits.body:
                raise TooLarge(f"the body has more than {self.limits.body} bytes, which is all the server takes")
        return bytes(body)


def session(user: str) -> str:
    """The session id of a user. Not the name itself: that may be any string, an id is ASCII and never empty; and it is logged."""
    return hashlib.blake2b(user.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def build_app(
    bundle: str | Path,
    settings: Settings | None = None,
    *,
    replicas: int = 2,
    fronts: int = 1,
    deltas: Sequence[str | Path] = (),
    prefix_dtype: str = "float32",
    threads: int = 1,
    max_ongoing_requests: int = 64,
    limits: Limits | None = None,
    patience: float = 5.0,
    drain: float = 10.0,
) -> Application:
    """A Ray Serve application that ranks out of a bundle: `ray.serve.run(build_app(...))`."""
    settings = settings or Settings()
    ranker = serve.deployment(
        Ranker,
        name="Ranker",
        num_replicas=replicas,
        ray_actor_options={"num_cpus": threads},
        user_config={"deltas": [str(delta) for delta in deltas]},
        max_ongoing_requests=max_ongoing_requests,
        max_queued_requests=settings.max_queue,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=drain,
        max_constructor_retry_count=3,
    )
    front = serve.deployment(
        Front,
        name="Front",
        num_replicas=fronts,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=replicas * (max_ongoing_requests + settings.max_queue),
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=drain,
    )
    instance = ranker.bind(str(bundle), settings, prefix_dtype=prefix_dtype, threads=threads)
    return front.bind(instance, limits or Limits(), slo=settings.slo, patience=patience)


def app(options: Mapping[str, Any]) -> Application:
    return build_app(options["bundle"], replicas=int(options.get("replicas", 2)))


def _json(status: int, body: bytes, **headers: str) -> Response:
    return Response(body, status, headers, media_type="application/json")


def _error(status: int, error: str, **headers: str) -> Response:
    if status in (429, 503):
        headers["Retry-After"] = "1"
    return _json(status, api.write_error(error), **headers)
