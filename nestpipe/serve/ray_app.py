"""The same instances as replicas of Ray Serve, where one machine is outgrown. Needs `nestpipe[ray]`.

    serve run nestpipe.serve.ray_app:app bundle=BUNDLE replicas=2

Two deployments. Each replica of Ranker is an instance. Front speaks HTTP, and sends a request on under its user's session id:
Ray's consistent-hash router brings signal and ranking of one user to the same Ranker, and to the next on its ring while that one
is full or gone. Ray starts the replicas, checks their health, replaces the dead, and lets those that leave finish.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nestpipe.errors import did_you_mean

try:
    from ray import serve
    from ray.serve import Application
    from ray.serve.config import RequestRouterConfig
    from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

    from nestpipe.serve.ray_front import Front
    from nestpipe.serve.ray_ranker import Ranker
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}; pip install 'nestpipe[ray]'", name=error.name) from error

from nestpipe.serve.api import Limits
from nestpipe.serve.batching import Batching
from nestpipe.serve.requests import Settings
from nestpipe.serve.server import Serving
from nestpipe.serve.trigger import Bounds
from nestpipe.sizes import num_bytes

HEALTH_PERIOD = (
    2.0  # seconds between Ray's looks at a replica: a dead one is noticed within that, unless a request notices before
)
HEALTH_TIMEOUT = 30.0


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
    """An application that ranks with the model of a bundle: `ray.serve.run(build_app("bundle", replicas=4))`.

    bundle, deltas: folders that all machines see under the same path. deltas: of the bundle, in their order.
    settings: of each replica, as those of an instance.
    replicas: of Ranker. fronts: replicas of Front, which reads and writes JSON.
    threads: of each Ranker, and the CPUs that Ray reserves for it.
    max_ongoing_requests: that a Ranker has at once. More go to the next replicas on the ring, where they are full passes; when
        those are full too, up to `settings.max_queue` wait in each front, and further ones get 429.
    patience: seconds beyond its deadline that a request may wait for an answer, while replicas are lost.
    drain: seconds that a replica which leaves gets for its requests.
    """
    path, settings, limits = Path(bundle).resolve(), settings or Settings(), limits or Limits()
    if not path.is_dir():
        raise ValueError(f"{path} is no folder; give a bundle, as `nestpipe export RUN BUNDLE` writes it")
    counts = {"replicas": replicas, "fronts": fronts, "threads": threads, "max_ongoing_requests": max_ongoing_requests}
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name}={count}: give at least 1")
    leaving: dict[str, Any] = {"graceful_shutdown_timeout_s": drain, "graceful_shutdown_wait_loop_s": 0.2}
    quiet: dict[str, Any] = {"enable_access_log": False}  # two lines for each request otherwise
    by_user: dict[str, Any] = {"request_router_class": ConsistentHashRouter}
    ranker = serve.deployment(
        name="Ranker",
        num_replicas=replicas,
        ray_actor_options={"num_cpus": threads},
        user_config={"deltas": [str(Path(delta).resolve()) for delta in deltas]},
        max_ongoing_requests=max_ongoing_requests,
        max_queued_requests=settings.max_queue,
        request_router_config=RequestRouterConfig(**by_user),
        health_check_period_s=HEALTH_PERIOD,
        health_check_timeout_s=HEALTH_TIMEOUT,
        max_constructor_retry_count=3,
        logging_config=quiet,
        **leaving,
    )(Ranker)
    front = serve.deployment(
        name="Front",
        num_replicas=fronts,
        ray_actor_options={"num_cpus": 0},  # so that a cluster of N CPUs has room for N Rankers
        max_ongoing_requests=replicas * max_ongoing_requests + settings.max_queue + 64,
        health_check_period_s=HEALTH_PERIOD,
        health_check_timeout_s=HEALTH_TIMEOUT,
        logging_config=quiet,
        **leaving,
    )(serve.ingress()(Front))
    about = {
        "relay": settings.relay,
        "trigger": settings.trigger,
        "reuse": settings.bounds.reuse,
        "affinity": True,
        "slo_ms": 1000 * settings.slo,
        "device_memory": settings.device_bytes,
        "host_memory": settings.host_bytes,
        "prefix_dtype": prefix_dtype,
        "limits": dataclasses.asdict(limits),
        "updates": False,
    }
    rankers = ranker.bind(str(path), settings, prefix_dtype=prefix_dtype, threads=threads)
    return front.bind(rankers, limits, bundle=str(path), slo=settings.slo, patience=patience, about=about)


def app(options: dict[str, Any]) -> Application:
    """What `serve run nestpipe.serve.ray_app:app bundle=BUNDLE ...` builds, and the `args` of a Serve config file: OPTIONS lists
    them. They are as those of `nestpipe serve`; each value may be text."""
    given: dict[str, Any] = {}
    for name, value in options.items():
        if name not in OPTIONS:
            raise ValueError(f"option {name!r}, {did_you_mean(name, list(OPTIONS))}")
        try:
            given[name] = OPTIONS[name](value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"option {name}={value!r}: {error}") from None
    if "bundle" not in given:
        raise ValueError("option bundle is missing: serve run nestpipe.serve.ray_app:app bundle=BUNDLE")
    limits = Limits(**{field: given.pop(name) for name, field in LIMITS.items() if name in given})
    serving = Serving(**{field: given.pop(name) for name, field in SERVING.items() if name in given}, limits=limits)
    return build_app(
        serving.bundle,
        Settings(
            **serving.settings,
            bounds=Bounds(reuse=serving.reuse),
            batching=Batching(grace=math.inf if serving.answer_late else 0.0),
        ),
        prefix_dtype=serving.prefix_dtype,
        threads=serving.threads,
        limits=serving.limits,
        drain=serving.drain,
        **given,
    )


def _switch(value: Any) -> bool:
    told = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(str(value).lower())
    if told is None:
        raise ValueError("give true or false")
    return told


def _dtype(value: Any) -> str:
    if value not in ("float32", "float16", "bfloat16"):
        raise ValueError("give float32, float16 or bfloat16")
    return str(value)


def _paths(value: Any) -> list[str]:
    return value.split(",") if isinstance(value, str) else list(value)


def _seconds(value: Any) -> float:
    return float(value) / 1000


# Options of `app` that are fields of Serving, and of Limits; the others are arguments of build_app.
SERVING = {"slo_ms": "slo"} | {
    name: name
    for name in (
        "bundle",
        "device_memory",
        "host_memory",
        "threads",
        "relay",
        "trigger",
        "reuse",
        "answer_late",
        "prefix_dtype",
        "drain",
    )
}
LIMITS = {"max_request": "body", "max_history": "history", "max_candidates": "candidates"}
OPTIONS: Mapping[str, Callable[[Any], Any]] = {
    "bundle": Path,
    "replicas": int,
    "fronts": int,
    "deltas": _paths,
    "threads": int,
    "slo_ms": _seconds,
    "device_memory": num_bytes,
    "host_memory": lambda value: num_bytes(value, least=0),
    "relay": _switch,
    "trigger": _switch,
    "reuse": _switch,
    "answer_late": _switch,
    "prefix_dtype": _dtype,
    "max_ongoing_requests": int,
    "max_request": num_bytes,
    "max_history": int,
    "max_candidates": int,
    "patience": float,
    "drain": float,
}
