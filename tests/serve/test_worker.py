"""A worker's answers are the full pass, whatever the cache, the threads and the failures around it do."""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nestpipe import Bundle, load_bundle
from nestpipe.ops.attention import cpu as attention
from nestpipe.serve import computations
from nestpipe.serve import worker as workers
from nestpipe.serve.batching import Batching
from nestpipe.serve.requests import RELAYED, Request, Settings, Source
from nestpipe.serve.scoring import Part, Scorer
from nestpipe.serve.states import ON_DEVICE, ON_HOST, READABLE, State
from nestpipe.serve.trigger import Reason
from nestpipe.serve.worker import Ask, Ranked, Rejected, Signal, Worker
from tests.serve.rankers import LENGTH, RECIPE, export_two, history_of, make_ask, signal_of

PREFIX = 264 * LENGTH  # bytes of the longest
EAGER = Settings(trigger=False, slo=60.0, wait=30.0, lease=60.0, device_bytes=64 * PREFIX)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return export_two(tmp_path_factory.mktemp("rankers"))


@pytest.fixture(scope="module")
def bundle(bundles: list[Path]) -> Bundle:
    return load_bundle(bundles[0])


@pytest.fixture(scope="module")
def full(bundle: Bundle) -> Callable[[Ask], np.ndarray]:
    return Scorer(bundle).full_pass


@pytest.fixture
def start(bundle: Bundle) -> Iterator[Callable[..., Worker]]:
    """Starts workers that are closed at the end."""
    started: list[Worker] = []

    def start(settings: Settings = EAGER, **options: Any) -> Worker:
        started.append(Worker(bundle, settings, **options))
        return started[-1]

    yield start
    for worker in started:
        worker.close(drain=0)


def assert_close(scores: np.ndarray, expected: np.ndarray, tolerance: float = 1e-5) -> None:
    assert scores.dtype == np.float32 and scores.shape == expected.shape
    # Of one candidate whose score is next to nothing, rounding is more than 1e-5.
    assert np.abs(scores - expected).max() <= tolerance * max(0.1, np.abs(expected).max())


def ask_for(user: str, length: int = 200, *, seed: int = 0) -> Ask:
    return make_ask(np.random.default_rng(len(user)), user, length=length, seed=seed)


def relayed(worker: Worker, ask: Ask) -> Ranked:
    """Signal, wait until its prefix is there, rank."""
    worker.signal(signal_of(ask))
    wait_until(lambda: worker.stats()["cache.computations"] == done(worker))
    return worker.rank(ask).result(30)


def done(worker: Worker) -> int:
    """Prefixes computed, or failed."""
    states = [entry.state for entry in worker._policy.cache.pool.entries.values()]
    return worker.stats()["cache.computations"] - states.count(State.COMPUTING)


def wait_until(true: Callable[[], bool], *, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.001)


def idle(worker: Worker) -> bool:
    with worker._lock:  # between two pieces nothing runs either, for a moment
        return worker._policy.running is None and worker._policy.copies.running is None


def check_books(worker: Worker) -> None:
    """Tensors lie where the cache says, and are as large as it counts."""
    pool, prefixes = worker._policy.cache.pool, worker._prefixes
    pool.check()
    for place, states, promised in (
        (prefixes.device, ON_DEVICE, {State.COMPUTING, State.LOADING}),
        (prefixes.host, ON_HOST, {State.SPILLING}),
    ):
        entries = {key: entry for key, entry in pool.entries.items() if entry.state in states - promised}
        assert place.keys() == entries.keys()
        assert all(place[key].num_bytes == entry.size for key, entry in entries.items())
    for key, made in prefixes.half_made.items():
        assert pool.entries[key].state is State.COMPUTING and made.num_bytes < pool.entries[key].size


# -- scores ------------------------------------------------------------------------------------------------------------


def test_a_prefix_that_is_there_gives_the_scores_of_the_same_cut_to_the_bit(start, bundle, full) -> None:
    worker, ask = start(), ask_for("user")
    answer = relayed(worker, ask)
    assert answer.source is Source.DEVICE and answer.version == bundle.version
    signal, scorer = signal_of(ask), Scorer(bundle)
    assert np.array_equal(answer.scores, scorer.rank([Part(ask, scorer.prefix(signal.history, signal.times))])[0])
    assert_close(answer.scores, full(ask))


def test_without_a_signal_it_is_the_full_pass_to_the_bit(start, full) -> None:
    answer = start().rank(ask_for("user")).result(30)
    assert answer.source is Source.FULL
    assert np.array_equal(answer.scores, full(ask_for("user")))


def test_prefixes_come_back_from_the_host_unchanged(start, full) -> None:
    worker = start(Settings(trigger=False, slo=60.0, device_bytes=2 * PREFIX, host_bytes=64 * PREFIX, spill_at=0.0))
    worker._policy.costs.copy.learns = False  # else it finds that computing prefixes as small as these is faster
    asks = [ask_for(f"user {number}", LENGTH) for number in range(4)]
    first = []
    for ask in asks:
        first.append(relayed(worker, ask))
        wait_until(
            lambda: worker.stats()["host_bytes"] >= PREFIX * 0.9 * len(first) and worker._policy.copies.running is None
        )
    again = [worker.rank(ask).result(30) for ask in asks]
    assert [answer.source for answer in again[:2]] == [Source.LOADED] * 2
    for ask, before, after in zip(asks, first, again, strict=True):
        assert np.array_equal(before.scores, after.scores)
        assert_close(after.scores, full(ask))
    check_books(worker)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_half_precision_takes_half_the_bytes_and_rounds(start, full, dtype: torch.dtype, tolerance: float) -> None:
    worker, ask = start(prefix_dtype=dtype), ask_for("user")
    answer = relayed(worker, ask)
    assert answer.source is Source.DEVICE and worker.settings.bytes_per_token == (264 - 8) // 2 + 8
    assert_close(answer.scores, full(ask), tolerance)
    assert not np.array_equal(answer.scores, full(ask))


def test_a_history_that_changed_in_the_past_is_ranked_in_full(start, full) -> None:
    worker, ask, other = start(), ask_for("user"), ask_for("user", seed=1)
    times = Ask("user", ask.history, ask.candidates, times=ask.times + 1, now=ask.now)
    shorter = ask_for("user", 100)
    for changed, stale in ((other, 1), (times, 2), (shorter, 2)):
        relayed(worker, ask)
        answer = worker.rank(changed).result(30)
        assert answer.source is Source.FULL and worker.stats()["stale"] == stale
        assert np.array_equal(answer.scores, full(changed))
    assert relayed(worker, other).source is Source.DEVICE  # and its own prefix is computed at its own signal


def test_a_prefix_that_has_taken_the_name_of_another_is_not_used(start) -> None:
    worker, ask, other = start(), ask_for("user"), ask_for("user", seed=1)
    relayed(worker, ask)
    prefixes, (key,) = worker._prefixes, worker._prefixes.device
    times, others = (one.times if worker._scorer.uses_times else None for one in (ask, other))
    _, matched, _ = prefixes.match("user", ask.history, times)
    asked = workers._Asked(ask, Future(), matched, 0.0)
    request = Request(0, "user", key.history, 200, 1, 0.0, 1.0, key=key, source=Source.DEVICE)
    assert matched and worker._part(request, asked).prefix is prefixes.device[key]
    prefixes.expect(key, other.history, others)  # the first was given up, and its name was free
    assert worker._part(request, asked).prefix is None and request.source is Source.UNUSABLE


def test_a_refused_signal_does_not_say_what_an_earlier_one_computes(
    start, full, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, before, after = start(), ask_for("user"), ask_for("user", seed=7)
    computes, begun, slow = worker._scorer.prefix, threading.Event(), threading.Event()
    worker._scorer.prefix = lambda *items: (begun.set(), slow.wait(30), computes(*items))[2]
    assert worker.signal(signal_of(before)) is Reason.ADMITTED
    assert begun.wait(30)
    monkeypatch.setattr(worker._policy.trigger, "decide", lambda *_, **__: Reason.LOAD)
    assert worker.signal(signal_of(after)) is Reason.LOAD
    answer = worker.rank(after)
    slow.set()
    assert_close(answer.result(30).scores, full(after))


def test_arrays_may_be_used_again_as_soon_as_a_call_returns(start, full) -> None:
    worker, ask, slow = start(), ask_for("user"), threading.Event()
    history, times, candidates = ask.history.copy(), ask.times.copy(), ask.candidates.copy()
    worker._computing.submit(slow.wait, 30)
    worker.signal(Signal("user", history[:150], times[:150]))
    answer = worker.rank(Ask("user", history, candidates, times=times, now=ask.now))
    for array in (history, times, candidates):
        array[:] = 0
    slow.set()
    assert_close(answer.result(30).scores, full(ask))
    assert_close(worker.rank(ask).result(30).scores, full(ask))


def test_a_history_that_has_grown_uses_the_prefix_it_began_with(start, full) -> None:
    worker = start()
    relayed(worker, ask_for("user", 150))
    ask = ask_for("user", 250)
    answer = worker.rank(ask).result(30)
    assert answer.source is Source.DEVICE
    assert_close(answer.scores, full(ask))


def test_an_empty_history_and_keys_without_rows_are_ranked(start, full) -> None:
    history, times = history_of("user", 0)
    for ask in (
        Ask("user", history, np.array([3, -(2**63)]), times=times, now=5.5),
        Ask("user", np.array([2**63 - 1]), np.array([7]), times=np.array([0.25]), now=9.0),
    ):
        assert np.array_equal(start().rank(ask).result(30).scores, full(ask))


# -- pieces ------------------------------------------------------------------------------------------------------------

PIECES = dataclasses.replace(EAGER, piece=1e-9)  # of one tile each


def count_pieces(worker: Worker) -> list[tuple[int, int]]:
    """Of each call that computes a piece of a prefix, from now on: items that are there, and those that it adds."""
    computes, calls = worker._scorer.prefix, []

    def prefix(history: np.ndarray, times: np.ndarray | None, behind: Any = None) -> Any:
        calls.append((behind.length if behind else 0, len(history)))
        return computes(history, times, behind)

    worker._scorer.prefix = prefix
    return calls


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-3)])
def test_a_prefix_in_pieces_gives_the_scores_of_the_full_pass(
    start, full, dtype: torch.dtype, tolerance: float
) -> None:
    worker, ask = start(PIECES, prefix_dtype=dtype), ask_for("user", LENGTH)
    calls = count_pieces(worker)
    worker.signal(signal_of(ask, 0))
    wait_until(lambda: idle(worker))
    assert calls == [(0, 128), (128, 128)] and worker._prefixes.half_made == {}
    answer = worker.rank(ask).result(30)
    assert answer.source is Source.DEVICE and worker.stats()["cache.computations"] == 1
    assert_close(answer.scores, full(ask), tolerance)
    check_books(worker)


def test_pieces_end_where_tiles_of_attention_do() -> None:
    assert computations.BLOCK == attention.BLOCK  # deciding needs no torch, so it is written twice


def test_a_prefix_that_has_become_too_short_is_extended(start, full) -> None:
    worker = start(dataclasses.replace(EAGER, max_tail=16))
    relayed(worker, ask_for("user", 100))
    calls, ask = count_pieces(worker), ask_for("user", 200)
    answer = relayed(worker, ask)
    assert calls == [(96, 100)] and worker.stats()["cache.extended"] == 1
    assert answer.source is Source.DEVICE and len(worker._prefixes.device) == 1
    assert_close(answer.scores, full(ask))


def test_a_ranking_is_computed_between_two_pieces(start, full) -> None:
    worker, ask, other = start(PIECES), ask_for("user", LENGTH), ask_for("other", 20)
    computes, begun, slow = worker._scorer.prefix, threading.Event(), threading.Event()
    worker._scorer.prefix = lambda *items: (begun.set(), slow.wait(30), computes(*items))[2]
    worker._policy.costs.prefix.learns = False
    worker.signal(signal_of(ask, 0))
    assert begun.wait(30)
    order: list[str] = []
    first = worker.rank(other)
    first.add_done_callback(lambda _: order.append("ranking"))
    worker._scorer.prefix = lambda *items: (order.append("piece"), computes(*items))[1]
    slow.set()
    assert_close(first.result(30).scores, full(other))
    assert_close(worker.rank(ask).result(30).scores, full(ask))
    assert order == ["ranking", "piece"]


def test_an_update_between_two_pieces_does_not_mix_versions(start, bundle, bundles, full) -> None:
    worker, newer, ask = start(PIECES), bundle.updated(bundles[1]), ask_for("user", LENGTH)
    scorer, computes, models = worker._scorer, worker._scorer.prefix, []
    half, slow = threading.Event(), threading.Event()

    def prefix(*items: Any) -> Any:
        models.append(bundle.version)
        half.set()
        slow.wait(30)
        return computes(*items)

    scorer.prefix = prefix
    worker.signal(signal_of(ask, 0))
    assert half.wait(30)
    worker.update(newer)
    answer = worker.rank(ask)
    slow.set()
    of = {bundle.version: full, newer.version: Scorer(newer).full_pass}
    assert_close(answer.result(30).scores, of[answer.result().version](ask))
    wait_until(lambda: len(worker._scorers) == 1)
    assert 1 <= len(models) <= 2 and worker._prefixes.half_made == {} == worker._prefixes.device


def test_a_piece_that_fails_leaves_nothing_behind(start, full) -> None:
    worker, ask = start(PIECES), ask_for("user", LENGTH)
    computes = worker._scorer.prefix
    worker._scorer.prefix = lambda *items: computes(*items) if items[2] is None else fail()
    worker.signal(signal_of(ask, 0))
    wait_until(lambda: worker.stats()["cache.failed"] == 1)
    assert worker._prefixes.half_made == {} and len(worker._policy.cache) == 0
    assert np.array_equal(worker.rank(ask).result(30).scores, full(ask))


def test_a_model_that_cannot_extend_prefixes_computes_them_in_one_go(start, bundle, full, monkeypatch) -> None:
    computes = bundle.model.prefix
    monkeypatch.setattr(bundle.model, "prefix", lambda rows, times=None: computes(rows, times))
    worker, ask = start(dataclasses.replace(PIECES, max_tail=0)), ask_for("user", LENGTH)
    calls = count_pieces(worker)
    worker.warm_up()
    calls.clear()
    relayed(worker, ask_for("user", 200))
    assert_close(relayed(worker, ask).scores, full(ask))
    assert calls == [(0, 196), (0, LENGTH - 4)]


# -- many at once ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_random_mixes_of_many_threads_give_the_full_pass(start, full, seed: int) -> None:
    wait = 4.0 * seed  # none: whether a prefix is there in time is up to the machine
    settings = Settings(
        trigger=False, slo=5.0, wait=wait, lease=0.01, device_bytes=4 * PREFIX, host_bytes=4 * PREFIX, spill_at=0.2,
        max_tail=16, piece=1e-9, batching=Batching(requests=4, hold=0.001),
    )  # fmt: skip
    worker = start(settings)
    worker._policy.costs.copy.learns = False
    answers: list[tuple[Ask, Future[Ranked]]] = []

    def visit(number: int) -> None:
        rng = np.random.default_rng([seed, number])
        for visits in range(25):  # histories grow, but for a few that are quite others
            ask = make_ask(rng, f"user {rng.integers(16)}", length=100 + 6 * visits, seed=int(rng.random() < 0.1))
            if rng.random() < 0.8:
                worker.signal(signal_of(ask, int(rng.integers(0, 20))))
            if rng.random() < 0.7:
                time.sleep(rng.random() * 0.01)
            if rng.random() < 0.9:
                answers.append((ask, worker.rank(ask)))

    threads = [threading.Thread(target=visit, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sources = collections.Counter(future.result(30).source for _, future in answers)
    for ask, future in answers:
        assert_close(future.result().scores, full(ask))
    stats = worker.stats()
    assert not wait or sum(sources[source] for source in RELAYED) > 10, sources
    assert sum(sources.values()) == len(answers) == sum(stats[f"answers.{source.name.lower()}"] for source in Source)
    for number in range(8):  # more than there is room for
        ask = ask_for(f"late user {number}", LENGTH)
        assert_close(relayed(worker, ask).scores, full(ask))
    assert worker.stats()["cache.device_drops"] and worker.stats()["cache.spills"]
    wait_until(lambda: idle(worker))
    with worker._lock:
        check_books(worker)


def test_an_update_amid_requests_never_mixes_versions(start, bundle, bundles, full) -> None:
    worker, newer = start(), bundle.updated(bundles[1])
    of = {bundle.version: full, newer.version: Scorer(newer).full_pass}
    answers: list[tuple[Ask, Future[Ranked]]] = []
    go_on = threading.Event()

    def visit(number: int) -> None:
        rng = np.random.default_rng(number)
        while not go_on.is_set() or len(answers) < 60:
            ask = make_ask(rng, f"user {rng.integers(4)}")
            worker.signal(signal_of(ask))
            answers.append((ask, future := worker.rank(ask)))
            future.result(30)

    threads = [threading.Thread(target=visit, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(answers) > 20)
    worker.update(newer)
    last = worker.rank(ask_for("someone else"))
    go_on.set()
    for thread in threads:
        thread.join()
    assert {future.result().version for _, future in answers} == of.keys()
    assert last.result(30).version == newer.version
    for ask, future in answers:
        assert_close(future.result().scores, of[future.result().version](ask))
    wait_until(lambda: len(worker._scorers) == 1)  # the old version is let go
    assert {key.model for key in worker._prefixes.device} <= {newer.version}


def test_close_answers_what_it_has_and_rejects_what_comes(start, full) -> None:
    worker = start()
    asks = [ask_for(f"user {number}") for number in range(8)]
    futures = [worker.rank(ask) for ask in asks]
    worker.close(drain=30)
    for ask, future in zip(asks, futures, strict=True):
        assert_close(future.result(0).scores, full(ask))
    for call in (lambda: worker.rank(asks[0]), lambda: worker.signal(signal_of(asks[0]))):
        with pytest.raises(Rejected, match="stopping"):
            call()


def test_close_amid_load_leaves_no_future_without_an_answer(start, full) -> None:
    worker, slow = start(), threading.Event()
    computes = worker._scorer.rank
    worker._scorer.rank = lambda parts: (slow.set(), time.sleep(0.1), computes(parts))[2]
    asks = [ask_for(f"user {number}") for number in range(40)]
    futures = [worker.rank(ask) for ask in asks]
    assert slow.wait(30)
    worker.close(drain=0.05)
    rejected = 0
    for ask, future in zip(asks, futures, strict=True):
        assert future.done()
        if isinstance(future.exception(), Rejected):
            rejected += 1
        else:
            assert_close(future.result().scores, full(ask))
    assert rejected


# -- failures ----------------------------------------------------------------------------------------------------------


def fail(*_: Any, **__: Any) -> Any:
    raise MemoryError("no more of it")


def test_a_prefix_that_cannot_be_computed_means_a_full_pass(start, full) -> None:
    worker, ask = start(), ask_for("user")
    worker._scorer.prefix = fail
    worker.signal(signal_of(ask))
    answer = worker.rank(ask).result(30)
    assert answer.source in (Source.FULL, Source.UNUSABLE) and worker.stats()["cache.failed"] == 1
    assert np.array_equal(answer.scores, full(ask))


@pytest.mark.parametrize("copy", ["to_host", "to_device"])
def test_a_copy_that_fails_means_a_full_pass_or_a_computation(
    start, full, copy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start(Settings(trigger=False, slo=60.0, device_bytes=2 * PREFIX, host_bytes=64 * PREFIX, spill_at=0.0))
    worker._policy.costs.copy.learns = False
    monkeypatch.setattr(workers, copy, fail)
    asks = [ask_for(f"user {number}", LENGTH) for number in range(4)]
    for ask in asks:
        relayed(worker, ask)
        wait_until(lambda: worker._policy.copies.running is None)
    for ask in asks:
        assert_close(worker.rank(ask).result(30).scores, full(ask))
    assert worker.stats()["cache.failed"]
    wait_until(lambda: idle(worker))
    check_books(worker)


def test_one_bad_request_does_not_fail_those_beside_it(start, full) -> None:
    worker = start(Settings(trigger=False, slo=60.0, batching=Batching(hold=0.2)))
    computes, calls = worker._scorer.rank, []

    def rank(parts: list[Part]) -> list[np.ndarray]:
        calls.append(len(parts))
        if any(part.ask.user == "bad" for part in parts):
            raise KeyError("of this user")
        return computes(parts)

    worker._scorer.rank = rank
    asks = [ask_for(user) for user in ("a", "bad", "b", "c")]
    futures = [worker.rank(ask) for ask in asks]
    for ask, future in zip(asks, futures, strict=True):
        if ask.user == "bad":
            with pytest.raises(KeyError, match="of this user"):
                future.result(30)
        else:
            assert_close(future.result(30).scores, full(ask))
    assert calls[0] == 4 and worker.stats()["failed"] == 1


def test_a_ranking_does_not_wait_for_a_slow_load(start, full, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(trigger=False, slo=60.0, wait=0.02, device_bytes=PREFIX, host_bytes=64 * PREFIX, spill_at=0.0)
    worker, asks, loads = start(settings), [ask_for(user, LENGTH) for user in "ab"], threading.Event()
    worker._policy.costs.copy.learns = False
    for ask in asks:
        relayed(worker, ask)
        wait_until(lambda: worker.stats()["host_bytes"] and worker._policy.copies.running is None)
    monkeypatch.setattr(workers, "to_device", lambda *_: fail() if loads.wait(30) else None)
    answer = worker.rank(asks[0]).result(30)
    loads.set()
    assert answer.source is Source.GAVE_UP
    assert np.array_equal(answer.scores, full(asks[0]))


def test_scores_that_are_no_numbers_are_an_error(start, bundle) -> None:
    worker, ask = start(), ask_for("user")
    scorer = worker._scorer
    scorer.model = type("Broken", (), {"rank": staticmethod(lambda *_, **__: bundle.model.rank(*_, **__).like(
        torch.full((len(ask.candidates),), torch.nan)))})  # fmt: skip
    with pytest.raises(ValueError, match="not a finite number"):
        worker.rank(ask).result(30)


def test_wrong_books_leave_nobody_waiting(start, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, ask, slow = start(), ask_for("user"), threading.Event()
    computes = worker._scorer.rank
    worker._scorer.rank = lambda parts: (slow.wait(30), computes(parts))[1]
    first = worker.rank(ask)
    monkeypatch.setattr(worker._policy, "request", fail)
    with pytest.raises(MemoryError):
        worker.rank(ask)
    slow.set()
    with pytest.raises(RuntimeError, match="the instance is broken"):
        first.result(30)
    assert worker.broken
    with pytest.raises(Rejected):
        worker.rank(ask)


def test_wrong_books_leave_those_turned_away_with_an_answer(start, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, ask, slow = start(Settings(slo=60.0, max_queue=1)), ask_for("user"), threading.Event()
    computes, made = worker._scorer.rank, []
    worker._scorer.rank = lambda parts: (slow.wait(30), computes(parts))[1]
    for _ in range(2):
        worker.rank(ask)
    monkeypatch.setattr(workers, "Future", lambda: made.append(Future()) or made[-1])
    monkeypatch.setattr(worker._policy, "next_wakeup", fail)  # behind the decision that the queue is full
    with pytest.raises(MemoryError):
        worker.rank(ask)
    slow.set()
    assert isinstance(made[0].exception(10), Rejected)


# -- limits ------------------------------------------------------------------------------------------------------------


def test_a_full_queue_and_late_requests_are_rejected(start) -> None:
    worker, slow = start(Settings(slo=0.2, max_queue=2, batching=Batching(requests=1, shed=True))), threading.Event()
    computes = worker._scorer.rank
    worker._scorer.rank = lambda parts: (slow.wait(30), computes(parts))[1]
    futures = [worker.rank(ask_for(f"user {number}")) for number in range(5)]
    for future in futures[3:]:
        with pytest.raises(Rejected, match="the queue is full") as caught:
            future.result(0)
        assert caught.value.why == "full"
    time.sleep(0.25)
    slow.set()
    assert futures[0].result(30)
    for future in futures[1:3]:
        with pytest.raises(Rejected, match="in time") as caught:
            future.result(30)
        assert caught.value.why == "late"


def test_a_prefix_whose_ranking_does_not_come_is_let_go(start) -> None:
    now = [0.0]
    worker = start(Settings(trigger=False, lease=5.0), clock=lambda: now[0])
    assert worker.signal(signal_of(ask_for("user"))) is Reason.ADMITTED
    wait_until(lambda: idle(worker))
    now[0] = 6.0
    worker.signal(signal_of(ask_for("another")))
    assert worker.stats()["expired"] == 1


def test_signals_that_pay_are_admitted_after_the_warm_up(start) -> None:
    worker = start(Settings(slo=60.0))
    worker.warm_up()
    assert worker._policy.costs.ranking.measured >= 10
    assert worker.signal(signal_of(ask_for("user", LENGTH))) is Reason.FAST_ENOUGH
    worker = start(Settings(slo=1e-4, overhead=0.0))
    worker.warm_up()
    assert worker.signal(signal_of(ask_for("user", LENGTH))) is Reason.ADMITTED


def test_what_the_model_cannot_take_is_told_at_once(start) -> None:
    worker, keys = start(), np.arange(LENGTH + 1)
    with pytest.raises(ValueError, match=f"257 items, the model takes {LENGTH}; send the last {LENGTH}"):
        worker.rank(Ask("user", keys, keys, times=keys))
    with pytest.raises(ValueError, match="times: the model looks at times"):
        worker.signal(Signal("user", keys[:5]))


def test_models_that_cannot_be_relayed_are_refused_with_the_reason(bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(bundle.model), "relay_problem", lambda self: "it looks at the moon")
    with pytest.raises(ValueError, match="it looks at the moon; switch relay off"):
        Worker(bundle)
    with Worker(bundle, Settings(relay=False)) as worker:
        assert worker.signal(signal_of(ask_for("user"))) is Reason.OFF
    monkeypatch.setattr(type(bundle.model), "rank", None)
    monkeypatch.setattr(bundle.model, "candidates", None)
    with pytest.raises(ValueError, match="HSTURanker cannot rank candidates: it has no rank and no candidates"):
        Worker(bundle, Settings(relay=False))


def test_a_ranker_without_layers_of_which_nothing_is_to_be_kept_is_served_too(tmp_path: Path) -> None:
    ask = make_ask(np.random.default_rng(0), "user", length=9)
    with Worker(load_bundle(export_two(tmp_path, RECIPE | {"num_layers": 0})[0])) as worker:
        worker.signal(signal_of(ask))
        assert np.array_equal(worker.rank(ask).result(10).scores, worker.scorer.full_pass(ask))


def test_a_version_of_another_model_does_not_take_its_place(start, tmp_path: Path) -> None:
    other = load_bundle(export_two(tmp_path, RECIPE | {"num_layers": 1})[0])
    worker = start()
    with pytest.raises(ValueError, match="is of another model: bytes_per_token is 136"):
        worker.update(other)
    assert worker.rank(ask_for("user")).result(30).version != other.version


def test_readable_states_are_those_that_have_tensors() -> None:
    assert ON_DEVICE - {State.COMPUTING, State.LOADING} == READABLE  # what check_books counts on
