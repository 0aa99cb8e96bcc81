"""Training: takes batches through the engine, counts them, stops when asked to; after a failure it knows whether it can go on."""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from torch import nn

from nestpipe import process
from nestpipe.batch import Batch, NotFinite
from nestpipe.engine.balance import Balance, Counts
from nestpipe.engine.context import StepResult
from nestpipe.engine.describe import overlap
from nestpipe.engine.draws import watched
from nestpipe.engine.engine import Around, Engine
from nestpipe.engine.flops import Work
from nestpipe.engine.loader import Loader, checked
from nestpipe.engine.mixing import refuse_batch_norm
from nestpipe.engine.placing import place_by_first_batch
from nestpipe.engine.step import StepOperations
from nestpipe.engine.tuning import STEPS, Tuning
from nestpipe.engine.waiting import MEASURED, Waiting, fit_squares, gather
from nestpipe.errors import TrainingError, describe, from_the_users_line
from nestpipe.exchange.mesh import Mesh
from nestpipe.schedule.setting import Setting

log = logging.getLogger("nestpipe")
OnStep = Callable[[StepResult], None]


@dataclasses.dataclass
class FitResult:
    """What a call of `fit` did, the same on every worker."""

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    evaluation_seconds: float = 0.0  # of these: evaluations, and what callbacks did about them
    ended_early: bool = False  # by Trainer.end_fit
    first_loss: float = float("nan")
    last_loss: float = float("nan")
    skipped: int = 0  # batches left out because something in them was not finite
    balance: Balance | None = None  # of tables over workers
    waiting: Waiting | None = None  # for the worker that has most to compute
    tokens: int = 0  # keys of the first sequence feature
    work: Work | None = None  # what the model computes, and the machine could

    @property
    def training_seconds(self) -> float:
        return self.seconds - self.evaluation_seconds

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.training_seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.training_seconds if self.seconds else 0.0

    @property
    def mfu(self) -> float | None:
        """Floating-point operations of the model over those that plain matrix products do in the same time; None if they could
        not be counted, `work.why_not` says why."""
        if self.work is None:
            return None
        return self.work.utilization(tokens=self.tokens, samples=self.samples, seconds=self.training_seconds)

    def add(self, result: StepResult) -> None:
        self.steps += 1
        self.samples += result.samples
        self.tokens += result.tokens
        self.skipped += result.skipped
        if result.weight and not result.skipped:
            self.first_loss = result.loss if np.isnan(self.first_loss) else self.first_loss
            self.last_loss = result.loss


class Training:
    """One worker's part in it.

    steps: batches so far. skipped: batches left out so far: inputs of this worker, losses of all.
    torn: why tables are in between two steps, if they are.
    """

    def __init__(
        self,
        ops: StepOperations,
        setting: Setting,
        mesh: Mesh,
        *,
        record: bool,
        skip_nonfinite: bool,
        data_timeout: float,
    ) -> None:
        self.ops, self.setting, self._mesh = ops, setting, mesh
        self.steps = self.skipped = 0
        self.torn: str | None = None
        self.enough = False  # whether this worker has been told to end `fit` at the next pause
        self._ended_early = False  # whether a worker was, and `fit` has ended
        self.stopped = False  # whether `fit` has returned because a worker was asked to stop
        self.around: Around | None = None  # see Engine
        self.tuning = Tuning() if setting.is_auto else None  # until it is done
        self.measures_balance = setting.balance == "auto"  # until it is done
        self.records, self._skip, self._data_timeout = record, skip_nonfinite, data_timeout
        self._names = [feature.name for feature in ops.plan.features]
        self._taken = 0  # batches that this worker has taken from its data before this call, those left out included
        self._data_state: Any = None  # what the source said after the last of them
        self.data_lost: str | None = None  # why it is not known, though it was saved
        self._loader: Loader | None = None
        self._left: tuple[Any, Loader] | None = None  # an iterator, and who has read ahead in it
        self._balance: Balance | None = None  # of the last call of fit
        self._waiting: Waiting | None = None
        self._told = False  # what travels how: said once, after the first batch has decided it
        modules = ops.dense_part.model.modules()
        self._has_batch_norms = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in modules)
        self.cut_into(setting.parts)

    def cut_into(self, micro_batches: int) -> None:
        self.engine = Engine(self.setting.cut_into(micro_batches), self.ops, trace=self.records)

    @property
    def position(self) -> int:
        return self._taken + (0 if self._loader is None else self._loader.taken + self._loader.skipped)

    @property
    def data_state(self) -> Any:
        """What the source of batches said, as JSON, after the last batch that was taken; None if it says nothing."""
        return self._data_state if self._loader is None else self._loader.state

    def start_at(self, steps: int, position: int, data_state: Any = None) -> None:
        """Goes on where another has ended."""
        self.steps, self._taken, self._data_state = steps, position, data_state

    def describe(self) -> list[str]:
        lines = overlap(self.engine.setting, self.engine.schedule, self.ops.stores, self.ops.dense_part.device)
        mesh = [self._mesh.describe()] if self.ops.plan.together else []
        known = self._balance is not None and self.ops.rows.world > 1
        balance = [f"balance of the last fit, the most of a worker over the mean: {self._balance}"] if known else []
        waiting = (
            [f"waiting for the slowest worker in the last fit: {self._waiting}"] if self._waiting and known else []
        )
        return [*self.ops.plan.describe(), *mesh, *lines, *balance, *waiting, *process.describe()]

    def fit(
        self, batches: Iterable[Batch], *, steps: int | None, on_step: OnStep | None, pauses: Sequence[int]
    ) -> FitResult:
        first, self.data_lost = self.ops.rows.rank == 0, None
        left, self._left = self._left, None
        loader = Loader(
            batches,
            self._names,
            skip_nonfinite=self._skip,
            timeout=self._data_timeout,
            limit=steps,
            after=left[1] if left is not None and left[0] is batches else None,
            stop_asked=lambda: self.ops.stop_asked or self.ops.problem is not None,
            keep=self.engine.schedule.look_ahead + 3,
            state=self._data_state,
            watch=lambda source: watched(source, tell=log.warning if first else log.debug),
        )
        self._loader, self.stopped, self._ended_early, counts = loader, False, False, Counts(self.ops)
        self.ops.loads.clear()
        fitted, begin, end = FitResult(), time.perf_counter(), sys.maxsize if steps is None else self.steps + steps
        failure: BaseException | None = None

        def finished(result: StepResult) -> None:
            fitted.add(result)
            self._finished(result, on_step)

        def interrupted() -> None:
            log.warning("Ctrl-C: training stops after the batches under way; press it again to stop at once")
            self.ops.stop_asked = True

        try:
            with process.first_interrupt(interrupted) as asked:
                while (
                    self.steps < end
                    and self._goes_on()
                    and self._run_until(self._next_stop(end, pauses), loader, finished)
                ):
                    pass
        except TrainingError as error:
            if self.ops.parted is None:
                raise
            failure = self.ops.problem or error  # who has the problem raises it as it was
        finally:
            loader.close()
            self.ops.problem = self.ops.parted = None
            self._taken, self._data_state, self._loader = self.position, self.data_state, None
            # Who goes on with the same iterator gets what was read ahead and not trained on.
            self._left = (batches, loader) if isinstance(batches, Iterator) else None
            self.skipped += loader.skipped
            if self.stopped or asked.is_set():
                self.ops.stop_asked = False  # it has been heard: training may go on with another call
        if failure is not None:
            raise from_the_users_line(failure)
        if asked.is_set():
            raise KeyboardInterrupt(f"training has stopped after step {self.steps}; it can go on from there")
        fitted.seconds, fitted.ended_early = time.perf_counter() - begin, self._ended_early
        fitted.skipped += int(self.ops.rows.sum(np.array([loader.skipped]))[0])
        fitted.balance = self._balance = counts.gather()
        fitted.waiting = self._waiting = gather(self.ops.loads, self.ops.rows)
        fitted.work = self.ops.flops.gather(self.ops.rows, self.ops.dense_part.device)
        if not fitted.steps and steps != 0 and first and not fitted.ended_early:
            log.warning("fit has trained nothing: no worker had a batch")
        return fitted

    def step(self, batch: Batch | None) -> StepResult | None:
        if self.tuning is not None:
            raise ValueError(
                "micro_batches='auto' is measured by fit; give a number to a trainer whose loop is your own"
            )
        if self.measures_balance:
            raise ValueError(
                "balance='auto' is measured by fit; give a number, or 'tokens', to a trainer whose loop is your own"
            )
        results: list[StepResult] = []

        def read() -> Batch | None:
            if batch is None:
                return None
            try:
                return checked(batch, self._names)
            except NotFinite:
                if not self._skip:
                    raise
                self.skipped += 1
                return Batch.empty(self._names)

        def finished(result: StepResult) -> None:
            results.append(result)
            self._finished(result, None)

        self._run(read, self.steps + 1, finished)
        self._taken += batch is not None
        self._data_state = None  # where such a loop gets its batches is not known here
        problem, self.ops.problem = self.ops.problem, None
        if problem is not None:
            raise problem
        return results[0] if results else None

    # -- a run of steps ------------------------------------------------------------------------------------------------

    def _next_stop(self, end: int, pauses: Sequence[int]) -> int:
        """The step up to which the pipeline need not run empty."""
        stops = [end, *(self.steps - self.steps % every + every for every in pauses)]
        if self.measures_balance:
            stops.append(self.steps + MEASURED)
        elif self.tuning is not None:
            stops.append(self.steps + STEPS)
        return min(stops)

    def _goes_on(self) -> bool:
        """Between runs of steps, when nothing is in flight: whether no worker has had enough."""
        self.enough = self._ended_early = self.ops.rows.any(self.enough)
        return not self.enough

    def _run_until(self, stop: int, loader: Loader, finished: OnStep) -> bool:
        """Whether training goes on after that: no worker has been asked to stop, and there is data."""
        if self.tuning is not None:
            self.tuning.begin()
        taken, self.engine.trained = loader.taken, 0
        try:
            self._run(loader.next, stop, finished, abandon=loader.stop)
            self.ops.meet(f"on_step, after step {self.steps}")
            self.stopped = self.engine.stopped
        finally:
            if self.torn is None:
                loader.give_back(loader.taken - taken - self.engine.trained)
        if not self.stopped:
            if self.measures_balance:
                self._measure_balance()
            elif self.tuning is not None:
                self._tune(self.tuning)
        return self.steps == stop and not self.stopped

    def _run(
        self,
        read: Callable[[], Batch | None],
        stop: int,
        finished: OnStep,
        *,
        abandon: Callable[[], None] = lambda: None,
    ) -> None:
        """Trains up to step `stop` (exclusive), or until no worker has data."""
        if self.ops.plan.unplaced or self.ops.plan.unchosen:
            read = place_by_first_batch(self.ops, read)
        model, self.engine.around = self.ops.dense_part.model, self.around
        if not model.training:  # modules that the user has put into eval mode inside a model that trains stay so
            model.train()
        if self._has_batch_norms:  # their modes may have changed since
            parts = self.engine.schedule.micro_batches
            self.ops.rows.together(
                lambda: refuse_batch_norm(model, world=self.ops.rows.world, micro_batches=parts), what="model"
            )
        try:
            self.engine.run(read, first=self.steps, last=stop, on_step=finished, abandon=abandon)
        except BaseException as error:
            self.torn = self._torn_by(error)
            raise

    def _torn_by(self, error: BaseException) -> str | None:
        torn, rows = self.engine.between(self.steps), self.ops.rows
        if self.ops.parted is not None:
            return torn  # some workers are elsewhere
        if isinstance(error, TrainingError):  # which all have: so they can tell each other
            causes = rows.gather_objects(torn)
            from_the_users_line(error)
            return next((f"rank {rank}: {text}" for rank, text in enumerate(causes) if text is not None), None)
        if rows.world > 1:
            return f"this worker left alone ({describe(error)}), and the others are elsewhere"
        return torn

    def _finished(self, result: StepResult, on_step: OnStep | None) -> None:
        self.steps += 1
        self.skipped += result.skipped
        if self.tuning is not None and not self.measures_balance:
            self.tuning.tick(result, self.ops.rows.world)
        elif not self._told and self.tuning is None:
            self._told = True
            if self.ops.rows.rank == 0:
                for line in self.describe():
                    process.tell(line)
        if on_step is None or self.ops.quitting:  # then it is called on no worker any more
            return
        try:
            on_step(result)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if self.ops.parted is None:  # all workers hear of it and stop after the same step, with nothing half done
                self.ops.problem = error
        if self.ops.parted is not None:  # it made a call that another worker did not, and all have heard of it
            raise self.ops.parted

    def _measure_balance(self) -> None:
        """After a run of steps in which samples have stayed where they were read: fixes what they cost."""
        if len(self.ops.loads) < MEASURED:
            return
        self.balance_by(fit_squares(self.ops.loads, self.ops.rows), f"fits {len(self.ops.loads)} steps of all workers")

    def balance_by(self, squares: float, why: str) -> None:
        """From here on samples are dealt, by tokens and so much for the square of a sample's."""
        self.ops.squares, self.measures_balance = squares, False
        self.ops.loads.clear()  # of steps before
        if self.ops.rows.rank == 0:
            process.tell(f"balance: {squares:g} [auto; {why}]")

    def _tune(self, tuning: Tuning) -> None:
        """After a run of steps: tries another number of micro-batches, or fixes it."""
        tuning.next(self.ops.rows)
        if tuning.micro_batches != self.engine.schedule.micro_batches:
            self.cut_into(tuning.micro_batches)
        if tuning.done:
            self.tuning = None
            if self.ops.rows.rank == 0:
                process.tell(tuning)
