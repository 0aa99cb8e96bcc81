"""A headless Chromium, driven through its DevTools protocol over two pipes: no driver, no websocket, no network."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
PATIENCE = 60.0  # seconds; the machine may be busy
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--disable-dev-shm-usage",
           "--disable-background-networking", "--remote-debugging-pipe")  # fmt: skip


class Browser:
    """with Browser() as browser: browser.open(page); browser.run("document.title")"""

    def __enter__(self) -> Browser:
        self._stack = contextlib.ExitStack()
        profile = self._stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        reads, self._commands = _pipe()
        self._answers, writes = _pipe()
        # Chromium wants them as 3 and 4.
        line = f'exec "$@" 3</proc/self/fd/{reads} 4>/proc/self/fd/{writes}'
        self._process = subprocess.Popen(
            ["sh", "-c", line, "sh", CHROMIUM or "", *OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(reads, writes), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(reads)
        os.close(writes)
        self._numbers, self._buffer, self._session = itertools.count(1), b"", ""
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # of the session that was started above
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)
        self._stack.close()

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + PATIENCE
        while True:
            answer = self._next(until, method)
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def _next(self, until: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"no answer to {method} within {PATIENCE:.0f} s"
            read = os.read(self._answers, 1 << 20)
            assert read, f"the browser left during {method}"
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def window(self, width: int, height: int, *, phone: bool = False, dark: bool = False) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2 if phone else 1,
                  mobile=phone)  # fmt: skip
        self.send("Emulation.setTouchEmulationEnabled", enabled=phone)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def open(self, page: Path) -> None:
        """Waits until the page says that it is ready."""
        self.send("Page.navigate", url=page.resolve().as_uri())
        until = time.monotonic() + PATIENCE
        while self.run("document.readyState + document.documentElement?.dataset.ready") != "completeyes":
            assert time.monotonic() < until, f"{page} did not get ready: {self.troubles()}"
            time.sleep(0.05)

    def run(self, expression: str) -> Any:
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def settle(self) -> None:
        """Until what was asked for is drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def key(self, key: str, *, shift: bool = False) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, modifiers=8 if shift else 0)

    def touch(self, kind: str, *points: tuple[float, float]) -> None:
        touches = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(points)]
        self.send("Input.dispatchTouchEvent", type=kind, touchPoints=touches)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def troubles(self) -> list[str]:
        """Errors of scripts, refusals, and anything asked of a network."""
        told = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                told.append(str(params["exceptionDetails"]))
            elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                told.append(str(params["entry"]))
            elif event.get("method") == "Network.requestWillBeSent" and params["request"]["url"].startswith("http"):
                told.append(f"asked for {params['request']['url']}")
        return told


def _pipe() -> tuple[int, int]:
    """With numbers that are not 3 or 4."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]
