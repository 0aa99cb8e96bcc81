"""`nestpipe serve` as a client sees it: one server for all tests here, which the last one stops."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from nestpipe import load_bundle
from nestpipe.serve.scoring import Scorer
from nestpipe.serve.worker import Ask
from tests.serve.rankers import RECIPE, export_two, make_ask, signal_of

COMMAND = [sys.executable, "-m", "nestpipe", "serve"]
JSON = {"content-type": "application/json"}


class Server:
    """The process, and a client."""

    def __init__(self, *arguments: object) -> None:
        command = [*COMMAND, *map(str, arguments), "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.client = httpx.Client(timeout=30, base_url=self.line(r"listening on (http://\S+)"))

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines += iter(self.process.stdout.readline, "")  # type: ignore[arg-type]

    def line(self, pattern: str) -> str:
        """The first group of it, as soon as it is printed."""
        wait_until(lambda: any(re.search(pattern, line) for line in [*self.lines]), of=self)
        return next(found[1] for line in self.lines if (found := re.search(pattern, line)))

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def rank(self, ask: Ask) -> httpx.Response:
        return self.post("/v1/rank", {
            "user": ask.user, "history": ask.history.tolist(), "times": ask.times.tolist(), "now": ask.now,  # type: ignore[union-attr]
            "candidates": ask.candidates.tolist(),
        })  # fmt: skip

    def signal(self, ask: Ask) -> httpx.Response:
        known = signal_of(ask)
        assert known.times is not None
        body = {"user": ask.user, "history": known.history.tolist(), "times": known.times.tolist()}
        return self.post("/v1/signal", body)

    def info(self) -> dict[str, Any]:
        return self.client.get("/v1/info").json()


def wait_until(true: Callable[[], bool], *, of: Server, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it did not come to pass: " + "".join(of.lines)
        assert of.process.poll() is None or true(), "the server is gone: " + "".join(of.lines)
        time.sleep(0.01)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return export_two(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def server(bundles: list[Path]) -> Iterator[Server]:
    server = Server(bundles[0], "--instances", 2, "--no-trigger", "--allow-updates", "--max-request", "100KB",
                    "--max-history", 300, "--max-candidates", 50, "--slo-ms", 5000)  # fmt: skip
    server.line("^(ready)")
    yield server
    server.process.kill()
    server.process.wait()


@pytest.fixture(scope="module")
def full(bundles: list[Path]) -> dict[str, Callable[[Ask], np.ndarray]]:
    """The full pass by version."""
    first = load_bundle(bundles[0])
    return {bundle.version: Scorer(bundle).full_pass for bundle in (first, first.updated(bundles[1]))}


def assert_right(response: httpx.Response, ask: Ask, full: dict[str, Callable[[Ask], np.ndarray]]) -> None:
    assert response.status_code == 200, response.text
    answer = response.json()
    expected = full[answer["version"]](ask)
    assert np.abs(np.array(answer["scores"], np.float32) - expected).max() <= 1e-5 * max(0.1, np.abs(expected).max())


def asks(seed: int, count: int) -> list[Ask]:
    rng = np.random.default_rng(seed)
    return [make_ask(rng, f"user {rng.integers(20)}") for _ in range(count)]


# -- right requests ----------------------------------------------------------------------------------------------------


def test_a_ranking_is_the_bundles_full_pass_to_the_bit_and_behind_a_signal_nearly(server: Server, full) -> None:
    ask = make_ask(np.random.default_rng(0), "someone", length=200)
    answer = server.rank(ask).json()
    assert answer["source"] == "full" and answer["ms"] > 0
    assert np.array_equal(np.array(answer["scores"], np.float32), full[answer["version"]](ask))
    told = server.signal(ask)
    assert told.status_code == 202 and told.json()["decision"] == "admitted"
    again = server.rank(ask)
    assert again.json()["source"] in ("device", "waited")
    assert_right(again, ask, full)


def test_signal_and_ranking_of_a_user_meet_at_one_instance(server: Server, full) -> None:
    for ask in (make_ask(np.random.default_rng(1), f"pair {number}", length=100) for number in range(8)):
        assert server.signal(ask).json()["decision"] == "admitted"
        response = server.rank(ask)
        assert response.json()["source"] in ("device", "waited")
        assert_right(response, ask, full)
    metrics = {sample.labels["instance"] for sample in samples(server, "nestpipe_rank_seconds_count") if sample.value}
    assert metrics == {"instance-0", "instance-1"}  # and users are spread over both


def samples(server: Server, name: str) -> list[Any]:
    families = text_string_to_metric_families(server.client.get("/metrics").text)
    return [sample for family in families for sample in family.samples if sample.name == name]


def test_operators_are_told(server: Server, bundles: list[Path], full) -> None:
    assert server.client.get("/healthz").json() == {"status": "alive"}
    ready = server.client.get("/readyz")
    assert ready.status_code == 200 and ready.json()["instances"] == {"instance-0": "ready", "instance-1": "ready"}
    info = server.info()
    assert info["bundle"] == str(bundles[0]) and info["version"] in full and info["model"] == "HSTURanker"
    answered = sum(sample.value for sample in samples(server, "nestpipe_answers_total"))
    assert answered == sum(sample.value for sample in samples(server, "nestpipe_rank_seconds_count")) > 0
    assert {sample.value for sample in samples(server, "nestpipe_instance_up")} == {1.0}
    assert re.search(r"curl http://127.0.0.1:\d+/v1/rank", "".join(server.lines))
    assert not any("warning" in line for line in server.lines)


# -- wrong requests ----------------------------------------------------------------------------------------------------


def test_wrong_requests_get_a_status_and_a_reason(server: Server) -> None:
    good = {"user": "u", "history": [1], "times": [1], "candidates": [2], "now": 5}
    for body, status, message in (
        ({**good, "history": [1] * 301, "times": [1] * 301}, 413, "history: 301 entries, the server takes 300"),
        ({**good, "history": [1] * 300, "times": [1] * 300}, 400, "300 items, the model takes 256; send the last 256"),
        ({**good, "candidates": [1] * 51}, 413, "candidates: 51 entries, the server takes 50"),
        ({**good, "times": None}, 400, "times: the model looks at times"),
        ({**good, "user": "x" * 200_000}, 413, "the body is larger than 100000 bytes"),
    ):
        response = server.post("/v1/rank", body)
        assert response.status_code == status and message in response.json()["error"]
    chunks = server.client.post("/v1/rank", content=(b"x" * 10_000 for _ in range(20)), headers=JSON)  # no length told
    assert chunks.status_code == 413 and "larger than" in chunks.json()["error"]
    for method, path, status in (("GET", "/v1/rank", 405), ("POST", "/v2/rank", 404), ("DELETE", "/metrics", 405)):
        response = server.client.request(method, path)
        assert response.status_code == status and "there are POST /v1/signal" in response.json()["error"]
    plain = server.client.post("/v1/rank", content=json.dumps(good), headers={"content-type": "text/plain"})
    assert plain.status_code == 415 and "application/json" in plain.json()["error"]


def test_random_bodies_never_do_any_harm(server: Server, full) -> None:
    rng = np.random.default_rng(5)
    good = json.dumps({"user": "u", "history": [1, 2], "times": [3, 4], "candidates": [5, 6], "now": 9}).encode()
    deep = [b"[" * 50_000, b'{"user":' * 10_000, b'{"history": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"]
    bodies = [b"", b"null", b'{"user": NaN}', b"\xff" * 100, *deep]
    for _ in range(150):
        body = bytearray(good)
        for _ in range(int(rng.integers(1, 6))):
            body[rng.integers(len(body))] = rng.integers(256)
        bodies.append(bytes(body[: rng.integers(1, len(body) + 1)]))
    statuses = set()
    for body in bodies:
        for path in ("/v1/rank", "/v1/signal") if len(body) < 1000 else ("/v1/rank",):
            response = server.client.post(path, content=body, headers=JSON)
            statuses.add(response.status_code)
            assert response.status_code in (200, 202, 400, 413), (body, response.text)
            assert response.status_code in (200, 202) or response.json()["error"]
    assert 400 in statuses and all(instance["deaths"] == 0 for instance in server.info()["instances"])


def test_requests_that_end_early_or_are_no_http_do_no_harm(server: Server, full) -> None:
    host, port = server.client.base_url.host, server.client.base_url.port
    head = b"POST /v1/rank HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n"
    for sent in (
        head + b'{"user"',
        b"\x16\x03\x01\x02\x00" * 10,
        b"GET\r\n\r\n",
        head[:30],
        b"POST /v1/rank HTTP/9.9\r\n\r\n",
    ):
        with socket.create_connection((host, port), timeout=10) as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1000)
    ask = asks(3, 1)[0]
    assert_right(server.rank(ask), ask, full)


# -- what changes meanwhile --------------------------------------------------------------------------------------------


def under_load(server: Server, during: Callable[[], None]) -> list[tuple[Ask, httpx.Response]]:
    """Answers to three clients, from before to after."""
    answers: list[tuple[Ask, httpx.Response]] = []
    over = threading.Event()

    def visit(seed: int) -> None:
        for ask in asks(seed, 5000):
            if over.is_set():
                return
            server.signal(ask)
            answers.append((ask, server.rank(ask)))

    threads = [threading.Thread(target=visit, args=(10 + number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(answers) > 20, of=server)
        during()
        many = len(answers)
        wait_until(lambda: len(answers) > many + 20, of=server)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    return answers


def test_updates_are_taken_from_beside_the_bundle_only(server: Server, bundles: list[Path], tmp_path: Path) -> None:
    before = server.info()["version"]
    for path, status, message in (
        (tmp_path, 403, "beside the bundle, alone"),
        (bundles[0].parent / "no such", 400, "is no folder"),
        (bundles[0].parent / "checkpoints", 400, ""),
    ):
        response = server.post("/v1/update", {"path": str(path)})
        assert response.status_code == status and message in response.json()["error"], response.text
    assert server.info()["version"] == before


def test_a_bundle_of_another_model_beside_this_one_is_refused_and_ends_nobody(
    server: Server, bundles: list[Path], tmp_path: Path, full
) -> None:
    before, other = server.info(), bundles[0].parent / "other"
    export_two(tmp_path, RECIPE | {"num_layers": 1})[0].rename(other)
    response = server.post("/v1/update", {"path": str(other)})
    assert response.status_code == 400 and "is of another model" in response.json()["error"], response.text
    after = server.info()
    assert after["version"] == before["version"]
    assert [instance["pid"] for instance in after["instances"]] == [instance["pid"] for instance in before["instances"]]
    for ask in asks(7, 8):
        assert_right(server.rank(ask), ask, full)


def test_a_delta_applied_under_load_gives_answers_of_one_version_each(server: Server, bundles, full) -> None:
    def update() -> None:
        response = server.post("/v1/update", {"path": str(bundles[1])})
        assert response.status_code == 200 and response.json()["version"] == list(full)[1]

    answers = under_load(server, update)
    for ask, response in answers:
        assert_right(response, ask, full)
    assert {response.json()["version"] for _, response in answers} == full.keys()
    assert {instance["version"] for instance in server.info()["instances"]} == {list(full)[1]}


def test_an_instance_killed_under_load_costs_only_what_it_had(server: Server, full) -> None:
    def kill() -> None:
        victim = server.info()["instances"][0]
        os.kill(victim["pid"], signal.SIGKILL)
        wait_until(lambda: server.info()["instances"][0]["deaths"] == 1, of=server)
        assert server.client.get("/readyz").status_code == 200  # the other one goes on

    answers = under_load(server, kill)
    failed = [response for _, response in answers if response.status_code != 200]
    assert len(failed) <= 3  # one in flight for each client
    for response in failed:
        assert response.status_code == 503 and response.headers["retry-after"] and "lost" in response.json()["error"]
    for ask, response in answers:
        if response.status_code == 200:
            assert_right(response, ask, full)
    wait_until(lambda: server.info()["instances"][0]["state"] == "ready", of=server)
    back = server.info()["instances"][0]
    assert back["version"] == list(full)[1] and 0 < back["recovery_seconds"] < 60  # with the delta, too
    after = asks(99, 12)
    for ask in after:
        assert_right(server.rank(ask), ask, full)


def test_sigterm_answers_what_is_in_flight_and_leaves_with_zero(server: Server, full) -> None:
    pids = [instance["pid"] for instance in server.info()["instances"]]
    answers: list[tuple[Ask, httpx.Response]] = []
    refused: list[Exception] = []

    def visit(number: int) -> None:
        for ask in asks(number, 2000):
            try:
                answers.append((ask, server.rank(ask)))
            except httpx.TransportError as error:
                refused.append(error)
                return

    threads = [threading.Thread(target=visit, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(answers) > 20, of=server)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
    for thread in threads:
        thread.join()
    for ask, response in answers:
        assert_right(response, ask, full)
    # A connection that was closed between two requests is no answer lost; one that had a request would be told with 5xx.
    assert all(isinstance(error, httpx.ConnectError | httpx.RemoteProtocolError | httpx.ReadError) for error in refused)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


# -- starting ----------------------------------------------------------------------------------------------------------


def refused(*arguments: object) -> str:
    done = subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr


def test_what_cannot_be_served_is_told(bundles: list[Path], tmp_path: Path) -> None:
    assert "is no folder; give a bundle, as `nestpipe export RUN BUNDLE` writes it" in refused(tmp_path / "none")
    damaged = shutil.copytree(bundles[0], tmp_path / "damaged")
    (damaged / "dense.safetensors").write_bytes(b"x")
    told = refused(damaged, "--port", 0)
    assert "nestpipe: error" in told and "dense.safetensors" in told and "Traceback" not in told


def test_a_port_that_is_taken_is_told(bundles: list[Path]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port} cannot be listened on: Address already in use" in refused(bundles[0], "--port", port)


def test_a_port_that_cannot_be_is_told_and_not_taken_for_another(bundles: list[Path]) -> None:
    assert "--port 70000: give a number up to 65535" in refused(bundles[0], "--port", 70_000)


def test_without_the_extra_it_says_what_to_install(monkeypatch, capsys, bundles: list[Path]) -> None:
    from nestpipe import cli

    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "nestpipe.serve.server", raising=False)
    with pytest.raises(SystemExit) as left:
        cli.main(["serve", str(bundles[0])])
    assert left.value.code == 1 and "pip install 'nestpipe[serve]'" in capsys.readouterr().err


def test_the_front_process_has_no_torch() -> None:
    code = "import sys, nestpipe.serve.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
