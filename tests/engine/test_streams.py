"""Streams: there is no device here, so a pretended one writes down what it is told."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from nestpipe.engine import streams
from nestpipe.engine.lanes import Lanes
from nestpipe.schedule import SCHEDULES
from nestpipe.schedule.ops import Op, Task


class Stream:
    """Remembers the operation that was put on it last, and the events it waited for since then."""

    def __init__(self, device: Any = None) -> None:
        self.waited: list[Op] = []

    def wait_event(self, event: SimpleNamespace) -> None:
        self.waited.append(event.op)

    def record_event(self) -> SimpleNamespace:
        return SimpleNamespace(op=CURRENT.op)


CURRENT = threading.local()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Stream:
    user_stream = Stream()

    def set_stream(stream: Stream) -> None:
        CURRENT.stream = stream

    accelerator = SimpleNamespace(is_available=lambda: True, current_stream=lambda: user_stream, set_stream=set_stream)
    monkeypatch.setattr(streams, "torch", SimpleNamespace(accelerator=accelerator, Stream=Stream, Event=object))
    monkeypatch.setattr(streams, "current_device", lambda: "pretended")
    return user_stream


def test_a_lane_waits_for_the_events_of_what_its_task_waits_for(device: Stream) -> None:
    waited: dict[Op, list[Op]] = {}
    stream_of: dict[str, Any] = {}

    def execute(task: Task) -> None:
        CURRENT.op = task.op
        stream_of.setdefault(task.lane, CURRENT.stream)
        assert CURRENT.stream is stream_of[task.lane]
        waited[task.op], CURRENT.stream.waited = CURRENT.stream.waited, []

    schedule = SCHEDULES["dbp"]()
    Lanes(schedule, execute).run(0, 8)
    assert len({id(stream) for stream in stream_of.values()}) == len(schedule.lanes)
    assert stream_of["compute"] is device  # the user's model runs where the user's code does
    for task in schedule.unroll(0, 8):
        for op in task.after:
            if op.batch >= 0:  # that one, or a later one of the same lane
                assert any(one.name == op.name and one.batch >= op.batch for one in waited[task.op]), (task, op)


def test_on_the_cpu_nothing_is_done() -> None:
    assert not streams.Streams(["compute"])._used
