"""Instances as replicas of Ray Serve, with real processes on this machine: `make ray-test`."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
import types
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nestpipe.serve.batching import Batching
from nestpipe.serve.bundle import load_bundle
from nestpipe.serve.messages import Ask, Ranked
from nestpipe.serve.requests import RELAYED, Settings
from nestpipe.serve.scoring import Scorer
from nestpipe.serve.server import WAIT
from nestpipe.serve.trigger import Bounds
from tests.serve.rankers import export_two, make_ask, signal_of

ray = pytest.importorskip(
    "ray", reason="Ray Serve is not installed (pip install 'nestpipe[ray]'); `make ray-test` does"
)
from ray import serve  # noqa: E402

from nestpipe.serve import ray_app, ray_front, ray_ranker  # noqa: E402

SETTINGS = Settings(slo=30.0, wait=20.0, lease=60.0, trigger=False)  # a slow machine relays too
CLIENTS = 4
LONG = 120.0  # seconds, for what takes seconds


@dataclasses.dataclass(frozen=True)
class Service:
    """url: of the front. scorer: of the bundle that is served."""

    url: str
    scorer: Scorer

    def post(self, path: str, body: Any, kind: str = "application/json") -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._answer(urllib.request.Request(self.url + path, data, {"Content-Type": kind}))

    def get(self, path: str) -> tuple[int, Any]:
        return self._answer(urllib.request.Request(self.url + path))

    def _answer(self, request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=LONG) as answer:
                text = answer.read()
                return answer.status, json.loads(text) if answer.headers["Content-Type"] == "application/json" else text
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def signal(self, ask: Ask) -> int:
        told = signal_of(ask)
        assert told.times is not None
        return self.post(
            "/v1/signal", {"user": told.user, "history": told.history.tolist(), "times": told.times.tolist()}
        )[0]

    def rank(self, ask: Ask) -> tuple[int, Any]:
        assert ask.times is not None
        arrays = {"history": ask.history, "times": ask.times, "candidates": ask.candidates}
        return self.post("/v1/rank", {"user": ask.user, "now": ask.now, **{n: a.tolist() for n, a in arrays.items()}})

    def instances(self) -> dict[str, int]:
        """Process of each replica that answers."""
        return {member["name"]: member["pid"] for member in self.get("/v1/info")[1]["instances"]}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return export_two(tmp_path_factory.mktemp("bundles"))


@pytest.fixture(scope="module")
def service(bundles: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Two replicas on a Ray of this machine's own, which is gone afterwards with all its processes."""
    with pytest.MonkeyPatch.context() as patch, socket.socket() as free:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # Ray's own ports are open to the network: a secret of this run guards them, and no file in the home folder.
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("PYTHONPATH", os.getcwd())
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=80 << 20,
            log_to_driver=False,
            _temp_dir=str(tmp_path_factory.mktemp("r", numbered=False)),
        )
        started = descendants()
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            serve.run(ray_app.build_app(bundles[0], SETTINGS, replicas=2), name="nestpipe")
            made = Service(f"http://127.0.0.1:{port}", Scorer(load_bundle(bundles[0])))
            until(lambda: len(made.instances()) == 2, "two replicas answer")
            yield made
        finally:
            started |= descendants()
            serve.shutdown()
            ray.shutdown()
    until(lambda: not started & set(running()), "all processes of Ray have ended")


def running() -> dict[int, int]:
    """The parent of each process that runs."""
    lines = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout
    columns = [line.split() for line in lines.splitlines()]
    return {int(process): int(parent) for process, parent, state in columns if not state.startswith("Z")}


def descendants() -> set[int]:
    """Processes that this one has started, and those that they have."""
    parents, found = running(), {os.getpid()}
    while more := {process for process, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def until(happened: Callable[[], bool], what: str) -> None:
    late = time.monotonic() + LONG
    while not happened():
        assert time.monotonic() < late, f"not within {LONG:.0f} s: {what}"
        time.sleep(0.1)


def is_right(service: Service, ask: Ask, answer: dict[str, Any]) -> bool:
    scores = np.array(answer["scores"], np.float32)
    return bool(np.allclose(scores, service.scorer.full_pass(ask), rtol=0, atol=1e-5))


def test_signal_and_ranking_meet_at_one_replica_and_scores_equal_the_full_pass(service: Service) -> None:
    rng = np.random.default_rng(1)
    asks = [make_ask(rng, f"user {number}", length=100 + number) for number in range(20)]
    assert [service.signal(ask) for ask in asks] == [202] * 20
    answers = [service.rank(ask) for ask in asks]
    assert [status for status, _ in answers] == [200] * 20
    assert {answer["source"] for _, answer in answers} <= {source.name.lower() for source in RELAYED}
    assert all(is_right(service, ask, answer) for ask, (_, answer) in zip(asks, answers, strict=True))
    metrics = service.get("/metrics")[1].decode().splitlines()
    ranked = [line for line in metrics if line.startswith("nestpipe_rank_seconds_count")]
    assert len(ranked) == 2 and sum(float(line.split()[-1]) for line in ranked) == 20  # both had a part of them


def test_a_user_of_any_name_has_a_session_and_two_names_have_two(service: Service) -> None:
    rng = np.random.default_rng(2)
    for user in ("x" * 256, "ü/ \n\t%", "0"):
        assert service.rank(make_ask(rng, user, length=5))[0] == 200
    sessions = {ray_front.session(user) for user in ("", "a", "A", "\ud800", "ü")}
    assert len(sessions) == 5 and all(session.isascii() and session for session in sessions)


def test_bad_requests_get_the_status_and_the_words_of_nestpipe_serve(service: Service) -> None:
    assert service.post("/v1/rank", {"user": "u"}) == (
        400,
        {"error": "history: it is missing; give user, history, candidates"},
    )
    long = service.rank(
        dataclasses.replace(make_ask(np.random.default_rng(3), "u"), history=range(300), times=range(300))
    )
    assert long == (400, {"error": "history: 300 items, the model takes 256; send the last 256"})
    assert service.post("/v1/rank", b"{", kind="text/plain")[0] == 415
    assert service.post("/v1/rank", b" " * (5 << 20))[0] == 413
    assert service.get("/v1/nothing")[0] == 404
    status, refused = service.post("/v1/update", {"path": "/tmp"})
    assert status == 403 and "user_config" in refused["error"]


def test_a_replica_killed_under_load_costs_no_wrong_score_and_comes_back(service: Service) -> None:
    before, stop = service.instances(), threading.Event()
    answers: list[tuple[float, int, bool]] = []  # when it was sent; status; whether the scores are right

    def load(client: int) -> None:
        rng = np.random.default_rng([4, client])
        while not stop.is_set():
            ask = make_ask(rng, f"user {rng.integers(40)}")
            if rng.integers(2):
                service.signal(ask)
            sent = time.monotonic()
            status, answer = service.rank(ask)
            answers.append((sent, status, status != 200 or is_right(service, ask, answer)))

    clients = [threading.Thread(target=load, args=(client,)) for client in range(CLIENTS)]
    for client in clients:
        client.start()
    try:
        until(lambda: len(answers) > 30, "rankings under load")
        lost, process = next(iter(before.items()))
        os.kill(process, signal.SIGKILL)
        killed = time.monotonic()
        until(lambda: sum(sent > killed and status == 200 for sent, status, _ in list(answers)) > 30, "service goes on")
        until(lambda: len(service.instances().keys() - before.keys()) == 1, "a new replica is there")
        until(lambda: lost not in service.instances(), "the lost replica is forgotten")
    finally:
        stop.set()
        for client in clients:
            client.join(LONG)
    assert all(right for _, _, right in answers)
    assert {status for _, status, _ in answers} <= {200, 503}
    assert sum(status == 503 for _, status, _ in answers) <= CLIENTS  # those that were in flight there
    rng = np.random.default_rng(5)
    asks = [make_ask(rng, f"later {number}", length=100) for number in range(10)]
    assert [service.signal(ask) for ask in asks] == [202] * 10
    later = [service.rank(ask)[1] for ask in asks]
    assert {answer["source"] for answer in later} <= {source.name.lower() for source in RELAYED}
    assert all(is_right(service, ask, answer) for ask, answer in zip(asks, later, strict=True))


# -- without a cluster -------------------------------------------------------------------------------------------------


def test_a_replica_follows_the_deltas_that_it_is_told_forward_and_back(
    bundles: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = types.SimpleNamespace(replica_id=types.SimpleNamespace(unique_id="a"))
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    base = load_bundle(bundles[0])
    ask = make_ask(np.random.default_rng(6), "u", length=50)

    async def follow() -> None:
        ranker = ray_ranker.Ranker(str(bundles[0]), SETTINGS, prefix_dtype="float32", threads=1)
        for deltas, bundle in (([], base), ([bundles[1]], base.updated(bundles[1])), ([], base)):
            await ranker.reconfigure({"deltas": [str(delta) for delta in deltas]})
            replica, ranked = await ranker.rank(ask)
            assert isinstance(ranked, Ranked) and (replica, ranked.version) == ("a", bundle.version)
            np.testing.assert_array_equal(ranked.scores, Scorer(bundle).full_pass(ask))
        await ranker.check_health()
        ranker.worker.close()
        with pytest.raises(RuntimeError, match="broken"):
            await ranker.check_health()
        assert await ranker.rank(ask) == ("a", ray_front.Refusal(503, "not ranked: the instance is stopping"))

    asyncio.run(follow())


def test_options_may_be_text_and_are_those_of_nestpipe_serve(
    bundles: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: dict[str, Any] = {}
    monkeypatch.setattr(ray_app, "build_app", lambda bundle, settings, **rest: built.update(rest, settings=settings))
    given = {
        "replicas": "3",
        "slo_ms": "50",
        "host_memory": "2GB",
        "relay": "false",
        "reuse": "yes",
        "max_history": 100,
    }
    ray_app.app({"bundle": str(bundles[0]), **given})
    assert built["replicas"] == 3 and built["limits"].history == 100
    assert built["settings"] == Settings(
        slo=0.05,
        wait=WAIT * 0.05,
        host_bytes=2 * 10**9,
        device_bytes=1 << 30,
        relay=False,
        bounds=Bounds(reuse=True),
        batching=Batching(grace=0.0),
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "option bundle is missing"),
        ({"bundle": "b", "replica": 2}, "replicas"),
        ({"bundle": "b", "replicas": "two"}, "option replicas='two'"),
        ({"bundle": "b", "relay": "maybe"}, "give true or false"),
        ({"bundle": "b", "prefix_dtype": "int8"}, "float32, float16 or bfloat16"),
        ({"bundle": "nowhere"}, "is no folder; give a bundle"),
        ({"bundle": ".", "replicas": 0}, "replicas=0: give at least 1"),
    ],
)
def test_an_option_that_cannot_be_is_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ray_app.app(options)
