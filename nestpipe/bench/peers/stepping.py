"""Stepper: a running `trainer.fit` that goes on by some steps at a time, so that pipelined schedules can take turns with others.

`fit` runs in a thread of its own. Every lane of its pipeline is held before the first task of a step that has not been asked
for; until then it runs as ever, so within a block steps overlap as they do in a free run. When all is done that was asked for,
the pipeline stands still, in the same state on every worker: so many whole steps of the schedule, no more and no less. What a
step does ahead for later batches is therefore in the time of its own block, and nothing runs while another contestant is timed.
What it costs: the last step of a block does not overlap with the first of the next one.

Collectives: a Trainer's keys and rows travel in groups of its own. Sums of dense gradients use the group of all workers, as
other contestants do; a Stepper at rest has none under way, and whoever takes turns does so in the same order on all workers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

import torch

from nestpipe.batch import Batch
from nestpipe.engine.context import StepResult
from nestpipe.schedule.ops import Task
from nestpipe.sizes import READ_AHEAD
from nestpipe.trainer import Trainer

PATIENCE = 300.0  # seconds for a block of steps; a peer that is lost makes `fit` raise long before


class Stepper:
    """`run(n)` trains on the next n batches and returns when nothing moves any more; `close()` ends it.

    batches: without an end, or `steps` of them.
    steps: after so many `fit` ends by itself, and the trainer is free again (for `rows`, `digest`); without it, closing
        leaves batches half-way, and the trainer is good for nothing any more.
    """

    def __init__(self, trainer: Trainer, batches: Iterable[Batch], *, steps: int | None = None) -> None:
        self._trainer, self._batches, self._steps = trainer, iter(batches), steps
        schedule = trainer.schedule
        self._look_ahead = schedule.look_ahead
        # How many batches after t each operation of step t works on.
        self._offsets = {(task.op.name, task.op.part): task.op.batch for task in schedule.tasks}
        self._changed = threading.Condition()
        self._asked = 0  # steps
        self._done = 0
        self._operations = 0  # finished ones
        self._taken = 0  # batches that have been read
        self._reading = True  # whether the loader has one in its hands
        self._free = False  # after a failure: lanes must not be held when they are to leave
        self._closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        trainer.around = self._around

    def run(self, steps: int) -> None:
        """So many more steps, all of them. Raises what went wrong in `fit`."""
        with self._changed:
            self._raise()
            if self._steps is not None and self._asked + steps > self._steps:
                raise ValueError(f"{self._asked} of {self._steps} steps are done; {steps} more are too many")
            self._asked += steps
            self._changed.notify_all()
        if self._thread is None:
            threads = torch.get_num_threads()  # of OpenMP, and a thread's own matter
            self._thread = threading.Thread(target=self._fit, args=(threads,), name="nestpipe-fit", daemon=True)
            self._thread.start()
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or self.resting, PATIENCE):
                raise TimeoutError(f"waited {PATIENCE:g} s for step {self._done} of fit to end")
            self._raise()

    @property
    def resting(self) -> bool:
        """Whether all is done that was asked for, and the loader has read what it may."""
        if self._steps is not None and self._asked == self._steps:
            return self._closed  # fit has still to return
        end = self._asked + self._look_ahead if self._steps is None else self._steps
        finished = sum(min(self._asked + offset, end) for offset in self._offsets.values())
        reading = self._reading and self._taken != self._steps
        return self._asked == 0 or (self._done == self._asked and self._operations == finished and not reading)

    def close(self) -> None:
        """Ends `fit` where it stands. Every worker must do so after the same step."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed and (self._done != self._asked or self._asked != self._steps):
            raise ValueError(f"closed after {self._done} steps: there are no more batches, or close() was called")

    # -- in the thread of fit, and those of its lanes ------------------------------------------------------------------

    def _fit(self, threads: int) -> None:
        torch.set_num_threads(threads)
        try:
            self._trainer.fit(self._source(), steps=self._steps, on_step=self._on_step)
        except _ClosedError:
            pass
        except BaseException as error:
            self._error = error
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _around(self, task: Task, do: Callable[[], None]) -> None:
        step = task.op.batch - self._offsets[task.op.name, task.op.part]
        if not self._may_run(step):
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._free or self._may_run(step))
                if self._closed:
                    raise _ClosedError
        try:
            do()
        except BaseException:
            with self._changed:
                self._free = True
                self._changed.notify_all()
            raise
        with self._changed:
            self._operations += 1
            if self._done == self._asked:  # else nobody counts yet, and waking up costs
                self._changed.notify_all()

    def _on_step(self, result: StepResult) -> None:
        with self._changed:
            self._done += 1
            if self._done == self._asked:
                self._changed.notify_all()

    def _source(self) -> Iterator[Batch]:
        for batch in self._batches:
            with self._changed:
                # The loader's queue is full by the end of the last step, as in a free run.
                self._reading = self._may_read()
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or self._free or self._may_read())
                if self._closed:
                    return
                self._reading, self._taken = True, self._taken + 1
            yield batch

    def _may_run(self, step: int) -> bool:
        return step < self._asked or self._asked == self._steps  # what is behind the last step, too

    def _may_read(self) -> bool:
        return self._taken < self._asked + self._look_ahead + READ_AHEAD


class _ClosedError(Exception):
    """Takes `fit` down in the middle; nobody sees it."""
