"""Bodies of requests: what is right becomes a message, all else an error that names the field."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.serve import api
from nestpipe.serve.api import Limits, TooLarge
from nestpipe.serve.frames import LENGTHS, decode, encode
from nestpipe.serve.messages import Ask, Ranked, Rejected, Signal, digest
from nestpipe.serve.requests import Source

ASK = {"user": "u", "history": [1, 2], "candidates": [3]}
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


def test_requests_become_messages() -> None:
    body = orjson.dumps(ASK | {"user": 7, "times": [1, 2.5], "now": 3, "deadline_ms": 50})
    ask = api.read_ask(body, Limits())
    assert (ask.user, ask.now, ask.deadline_seconds) == ("7", 3.0, 0.05)
    assert ask.history.dtype == ask.candidates.dtype == np.int64 and ask.history.tolist() == [1, 2]
    assert ask.times is not None and ask.times.dtype == np.float64 and ask.times.tolist() == [1, 2.5]
    signal = api.read_signal(b'{"user": "u", "history": [], "times": [], "candidates": 5}', Limits())
    assert len(signal.history) == 0 and signal.candidates == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"user": None}, "user: it is missing; give user, history, candidates"),
        ({"user": ""}, "user: a string of 1 to 256 characters"),
        ({"user": True}, "user: a string"),
        ({"history": "1, 2"}, "history: a list of int64 keys is needed, not '1, 2'"),
        ({"history": [1, "2"]}, "history: a list of int64 keys is needed, entry 1 is '2'"),
        ({"history": [1, True]}, "entry 1 is true"),
        ({"history": [1.0]}, "entry 0 is 1.0"),
        ({"history": [[1]]}, "entry 0 is a list"),
        ({"history": [1, None]}, "entry 1 is null"),
        ({"candidates": []}, "candidates: the list is empty; give at least one item"),
        ({"candidates": [2**63]}, "candidates: a list of int64 keys is needed, one entry is beyond 64 bits"),
        ({"times": [1]}, "times: 1 for 2 items of the history; give one for each"),
        ({"times": [1, {}]}, "times: a list of seconds is needed, entry 1 is an object"),
        ({"now": "noon"}, "now: a number is needed, not 'noon'"),
        ({"deadline_ms": 0}, "deadline: 0.0 seconds from now; give a number above zero"),
        ({"histroy": []}, "field 'histroy', which is not known; did you mean 'history'?"),
        ({"x" * 99: 1}, f"field '{'x' * 50}...', which is not known"),
    ],
)
def test_a_wrong_field_is_named_and_what_to_do(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        api.read_ask(json.dumps(ASK | change).encode(), Limits())


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"3", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"user": NaN}',
                                  b'{"user": "\\ud800"}', b'{"now": 1e999}', b"{'user': 1}"])  # fmt: skip
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"the body (is no JSON|must be a JSON object)|is missing"):
        api.read_ask(body, Limits())


def test_lists_beyond_their_limits_are_too_large() -> None:
    for limits in (Limits(history=1), Limits(candidates=1)):
        with pytest.raises(TooLarge, match=r"2 entries, the server takes 1"):
            api.read_ask(json.dumps(ASK | {"candidates": [3, 4]}).encode(), limits)
    with pytest.raises(ValueError, match="at least 1"):
        Limits(history=0)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from([*ASK, "times", "now", "deadline_ms", "path", "other"]), ANY), st.booleans())
def test_no_body_does_anything_but_become_a_message_or_an_error(fields: dict[str, Any], complete: bool) -> None:
    body = json.dumps(ASK | fields if complete else fields).encode()
    for read in (
        lambda body: api.read_ask(body, Limits()),
        lambda body: api.read_signal(body, Limits()),
        api.read_update,
    ):
        error = ""
        try:
            message = read(body)
        except ValueError as wrong:
            error = str(wrong)
        assert json.loads(api.write_error(error))["error"] if error else isinstance(message, Ask | Signal | str)


def test_answers_have_the_digits_that_give_back_the_same_scores() -> None:
    scores = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    answer = json.loads(api.write_ranked(Ranked(scores, Source.GAVE_UP, "v", 0.0123456)))
    assert np.array_equal(np.array(answer["scores"], np.float32), scores)
    assert (answer["source"], answer["version"], answer["ms"]) == ("gave_up", "v", 12.346)


def test_arrays_pass_through_frames_unchanged() -> None:
    arrays = {"history": np.arange(5), "none": None, "times": np.array([0.5]), "scores": np.float32([1, 2, 3])}
    frame = encode({"id": 3, "user": "ü"}, arrays)
    header, data = LENGTHS.unpack(frame[:8])
    assert header % 8 == 0 and len(frame) == 8 + header + data
    told, found = decode(frame[8 : 8 + header], frame[8 + header :])
    assert told == {"id": 3, "user": "ü"} and found.keys() == arrays.keys() - {"none"}
    for name, array in found.items():
        assert array.dtype == arrays[name].dtype and np.array_equal(array, arrays[name])


# -- messages ----------------------------------------------------------------------------------------------------------


def test_messages_say_what_is_wrong_with_arrays() -> None:
    keys = np.arange(3)
    for wrong, message in (
        (lambda: Signal(5, keys), "user: a string is needed, got 5"),  # type: ignore[arg-type]
        (lambda: Signal("u", keys.astype(float)), "history: a list of int64 keys is needed, got float64"),
        (lambda: Signal("u", keys[None]), r"got int64 of shape \(1, 3\)"),
        (lambda: Signal("u", np.array([2**63], np.uint64)), "got uint64"),
        (lambda: Signal("u", keys, keys[1:]), "times: 2 for 3 items"),
        (lambda: Signal("u", keys, np.array([1, 2, np.nan])), "times: one of them is no finite number"),
        (lambda: Signal("u", keys, np.array(["1", "2", "3"])), "times: a list of seconds is needed"),
        (lambda: Signal("u", keys, candidates=-1), "candidates: a signal says how many"),
        (
            lambda: Signal("u", keys, np.array([0, 2**62, -(2**63)])),
            "times: one of them is no finite number .* or beyond",
        ),
        (lambda: Ask("u", keys, keys, now=np.inf), "now: inf is not a number of seconds"),
        (lambda: Ask("u", keys, keys, now=2.0**62), "now: .* beyond 2"),
        (lambda: Ask("u", keys, keys, deadline_seconds=-1.0), "deadline: -1.0 seconds"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


def test_whole_seconds_are_the_same_however_they_are_sent() -> None:
    whole = [Signal("u", np.arange(2), np.array(times)).times for times in ([1, 2], [1.0, 2.0])]
    broken = Signal("u", np.arange(2), np.array([1, 2.5])).times
    assert digest(np.arange(2), whole[0]) == digest(np.arange(2), whole[1]) != digest(np.arange(2), broken)


def test_rejections_survive_a_process_boundary() -> None:
    import pickle

    assert pickle.loads(pickle.dumps(Rejected("late"))).why == "late"
