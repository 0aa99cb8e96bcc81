import gc
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time

import pytest
import torch

from nestpipe.batch import Batch, Jagged
from nestpipe.data.reader import in_process
from nestpipe.engine.loader import Loader
from tests.data.data_samples import assert_same
from tests.waiting import PATIENCE, is_alive, until

WORLD = 3


def batch_of(number: int) -> Batch:
    return Batch({"f": Jagged.from_lists([[number, number + 1], []])})


def counting():
    return (batch_of(number) for number in itertools.count())


def failing(error):
    yield batch_of(0)
    raise error


def waiting():
    yield batch_of(0)
    time.sleep(2 * PATIENCE)


class TwoArguments(Exception):
    """Cannot be made from its message alone, so that it does not survive pickling."""

    def __init__(self, left, right):
        super().__init__(f"{left} is not {right}")


def failing_oddly():
    raise TwoArguments("this", "that")
    yield


def is_waiting_for_a_batch(reader):
    """Whether the main thread is in the call that receives one."""
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame is not None and frame.f_code is not type(reader)._receive.__code__:
        frame = frame.f_back
    return frame is not None


def while_waiting(reader, action, *arguments):
    """Does it from another thread once the next batch is waited for."""

    def act():
        until(lambda: is_waiting_for_a_batch(reader), "a batch is waited for")
        action(*arguments)

    threading.Thread(target=act, daemon=True).start()


def assert_ends(pid):
    until(lambda: not is_alive(pid), f"the reader process {pid} has ended")


def every_batch(data_sets):
    for data in data_sets.values():
        for rank, split, epoch in itertools.product(range(WORLD), ("train", "valid"), range(2)):
            yield from data.batches(split, batch_size=16, rank=rank, world=WORLD, seed=3, epoch=epoch)


def test_every_data_set_gives_the_same_bits_on_every_rank_and_epoch_as_without_a_process(data_sets):
    count = 0
    for ours, theirs in zip(every_batch(data_sets), in_process(every_batch, data_sets), strict=True):
        assert_same(ours, theirs)
        count += 1
    assert count > 100


def test_a_bound_method_is_read_to_its_end_and_stays_there(data_sets):
    request = {"batch_size": 16, "rank": 0, "world": 1, "seed": 3}
    reader = in_process(data_sets["synthetic_clicks"].batches, "valid", **request)
    batches = list(reader)
    assert [batch.size for batch in batches] == [16, 4]
    assert next(reader, None) is None
    assert reader.pid is None


def odd_tensors():
    shared = torch.tensor([0, 1, 3])
    return [
        Batch(
            keys={name: Jagged(torch.tensor([5, 6, 7]), shared, torch.ones(3).bfloat16()) for name in ("a", "b")},
            dense={
                "cube": torch.arange(24.0, dtype=torch.float64).view(2, 3, 4),
                "turned": torch.arange(6).view(3, 2).t(),
                "mask": torch.tensor([True, False]),
                "nothing": torch.empty(2, 0),
            },
            labels=torch.tensor([0.0, float("nan")]),
        ),
        Batch.empty(["a"]),
    ]


def test_tensors_of_any_type_and_shape_arrive_and_can_be_written_to():
    first, empty = in_process(odd_tensors)
    expected = odd_tensors()
    assert_same(first, expected[0])
    assert_same(empty, expected[1])
    first.keys["a"].values.zero_()
    assert first.keys["b"].values.tolist() == [5, 6, 7]


def test_an_error_comes_with_its_own_type_and_message_and_the_traceback_below():
    reader = in_process(failing, KeyError("no such column"))
    next(reader)
    with pytest.raises(KeyError) as caught:
        next(reader)
    assert caught.value.args == ("no such column",)
    assert "in failing" in caught.value.__notes__[0]
    assert next(reader, None) is None  # it is over


def test_an_error_that_cannot_be_sent_is_told_all_the_same():
    with pytest.raises(RuntimeError, match="TwoArguments: this is not that"):
        next(in_process(failing_oddly))


def test_a_request_that_cannot_be_met_is_told_as_it_is_without_a_process(data_sets):
    with pytest.raises(ValueError, match="batch_size is 0; it must be at least 1"):
        next(in_process(data_sets["synthetic_clicks"].batches, "train", batch_size=0, rank=0, world=1, seed=0))


def test_data_that_cannot_be_sent_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match=r"cannot be sent to a reader process.*top level of a module"):
        next(in_process(lambda: []))


def test_a_killed_reader_is_an_error_at_once():
    with in_process(waiting) as reader:
        next(reader)
        assert reader.pid is not None
        while_waiting(reader, os.kill, reader.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="was ended by SIGKILL"):
            next(reader)


def test_a_reader_that_leaves_through_sys_exit_does_not_end_the_trainer():
    loader = Loader(in_process(failing, SystemExit(3)), ["f"], skip_nonfinite=False, timeout=PATIENCE)
    assert loader.next() is not None
    with pytest.raises(RuntimeError, match="the data source left with SystemExit: 3"):
        loader.next()
    loader.close()


@pytest.mark.parametrize("make", [counting, waiting])
def test_an_early_stop_leaves_no_process(make):
    reader = in_process(make)
    next(reader)
    pid = reader.pid
    reader.close()
    assert not is_alive(pid)
    assert next(reader, None) is None


def test_a_reader_that_nobody_holds_leaves_no_process():
    reader = in_process(counting)
    next(reader)
    pid = reader.pid
    del reader
    gc.collect()
    assert_ends(pid)


def test_closing_from_another_thread_ends_a_wait():
    with in_process(waiting) as reader:
        next(reader)
        while_waiting(reader, reader.close)
        with pytest.raises(RuntimeError, match="closed while a batch was being read"):
            next(reader)


def read_and_die(pipe):
    reader = in_process(waiting)
    next(reader)
    pipe.send(reader.pid)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_trainer_that_is_killed_leaves_no_reader():
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    trainer = context.Process(target=read_and_die, args=(theirs,))
    trainer.start()
    assert ours.poll(PATIENCE)
    pid = ours.recv()
    trainer.join(PATIENCE)
    assert trainer.exitcode == -signal.SIGKILL
    assert_ends(pid)


def test_readers_work_beside_busy_threads_and_a_loader_goes_on_where_another_stopped():
    stop = threading.Event()

    def busy():
        while not stop.is_set():
            torch.ones(1000).sum()

    threads = [threading.Thread(target=busy) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        seen = []
        with in_process(counting) as reader:
            for limit in (3, 4):
                loader = Loader(reader, ["f"], skip_nonfinite=False, timeout=PATIENCE, limit=limit)
                while (batch := loader.next()) is not None:
                    seen.append(batch.keys["f"].values.tolist()[0])
                loader.close()
        assert seen == list(range(7))
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_the_random_numbers_of_the_trainer_are_left_alone():
    before = torch.get_rng_state()
    with in_process(counting) as reader:
        next(reader)
    assert torch.equal(before, torch.get_rng_state())
