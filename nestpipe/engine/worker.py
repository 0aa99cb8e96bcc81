"""Worker: what one process has in a run (connections, its part of the tables, the model), opened together, given up together."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nestpipe import process
from nestpipe.engine.computing import Computing
from nestpipe.engine.dense import Dense
from nestpipe.engine.evaluation import Evaluation
from nestpipe.engine.heartbeat import Heartbeat
from nestpipe.engine.meeting import Meetings, batch_norms
from nestpipe.engine.mixing import refuse_mixing
from nestpipe.engine.sharing import Sharing, shares
from nestpipe.engine.step import StepOperations, Store
from nestpipe.engine.training import Training
from nestpipe.exchange.mesh import Mesh
from nestpipe.exchange.plan import ExchangePlan, place, with_twins
from nestpipe.exchange.samples import Dealer, token_feature
from nestpipe.exchange.transport import Transport
from nestpipe.rates import Schedule
from nestpipe.schedule.setting import Setting
from nestpipe.store.disk import DiskStore
from nestpipe.store.memory import MemoryStore
from nestpipe.tables import Feature, Table, declarations, told

CLOSED = "it is closed"


@dataclasses.dataclass(frozen=True)
class Options:
    """How it trains, the same on every worker; see Trainer."""

    setting: Setting
    seed: int
    on_nonfinite: str
    record: bool
    check_freshness: bool
    lr_schedule: Schedule | None = None
    clip_norm: float = 0.0
    computing: Computing = Computing()

    def declared(self) -> dict[str, Any]:
        names = ("seed", "on_nonfinite", "record", "check_freshness", "lr_schedule", "clip_norm")
        own = {name: told(getattr(self, name)) for name in names}
        return {**self.setting.options(), **own, **dataclasses.asdict(self.computing)}


class Worker:
    """opened: gives everything up again, also where making it fails half-way.

    group: all workers of the run; None if there is one.
    lr_factor: what the learning rates of rows are multiplied by.
    """

    def __init__(
        self,
        model: nn.Module,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        dense_optimizer: Callable[[Any], torch.optim.Optimizer],
        lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        options: Options,
        data_timeout: float,
        storage: Path,
        opened: contextlib.ExitStack,
    ) -> None:
        self.group = dist.group.WORLD if dist.is_initialized() else None
        self.lr_factor = 1.0
        self._seed, self._storage, self._opened = options.seed, storage, opened
        self._calls: list[tuple[str, float]] = []  # that are running, the innermost last; since when
        # Keys, rows, dense gradients, samples and what they share travel in groups of their own: each is used by one thread, in
        # one order.
        self.keys, self.rows = (Transport(self._new_group(data_timeout)) for _ in range(2))
        opened.callback(self.keys.close)
        opened.callback(self.rows.close)
        self.rank, self.world = self.rows.rank, self.rows.world
        setting, skips = options.setting, options.on_nonfinite == "skip"
        refuse_mixing(
            model,
            rank=self.rank,
            world=self.world,
            micro_batches=setting.micro_batches,
            balance=setting.balance,
        )

        def make_dense() -> Dense:
            return Dense(
                model,
                dense_optimizer,
                lr_scheduler=lr_scheduler,
                clip_norm=options.clip_norm,
                computing=options.computing,
            )

        self.dense = self.rows.together(make_dense, what="model and dense_optimizer")
        mixes = {
            "model: mixes_samples": getattr(model, "mixes_samples", None),
            "model: SyncBatchNorm": batch_norms(model),
        }
        self.rows.compare({**declarations(tables, features), **options.declared(), **self.dense.declared(), **mixes})
        if self.group is not None and self.world > 1:
            self.dense.connect(self.group)
        # With one worker nothing travels, so that it makes no difference who is beside whom, or who has what.
        setting = setting if self.world > 1 else dataclasses.replace(setting, clustering="none", balance="none")
        dealer = self._dealer(features, data_timeout) if setting.deals else None
        sharing = self._sharing(data_timeout) if shares(model) else None
        meetings = self._meetings(model, data_timeout) if batch_norms(model) else None
        machines = self.rows.gather_objects(socket.gethostname())
        self.mesh = Mesh.of(machines, replicas=setting.replicas, near=setting.near)
        held = with_twins(tables, self.mesh)
        plan = ExchangePlan(held, features, place(held, features, self.mesh, self.rank))
        self.ops = StepOperations(
            plan,
            self._open_stores(plan),
            self.keys,
            self.rows,
            self.dense,
            lr_schedule=options.lr_schedule,
            dealer=dealer,
            sharing=sharing,
            meetings=meetings,
            skip_nonfinite=skips,
            check_freshness=options.check_freshness,
            stale_by=setting.stale_by,
            try_mixing=setting.micro_batches != 1,
        )
        self.ops.squares = setting.squares
        self.training = Training(
            self.ops, setting, self.mesh, record=options.record, skip_nonfinite=skips, data_timeout=data_timeout
        )
        self.evaluation = Evaluation(self.ops, data_timeout=data_timeout)
        if self.world > 1:
            timeout = process.patience(data_timeout).total_seconds()
            heart = Heartbeat(self.rows, self._places(), self._doing, timeout=timeout)
            opened.callback(heart.close)

    def _dealer(self, features: Sequence[Feature], timeout: float) -> Dealer:
        """Made by all workers, or by none."""
        tokens = token_feature(features)
        assert tokens is not None, "Trainer has seen to it"
        samples = Transport(self._new_group(timeout))
        self._opened.callback(samples.close)
        return Dealer(samples, tokens)

    def _sharing(self, timeout: float) -> Sharing:
        """Made by all workers, or by none."""
        shared = Transport(self._new_group(timeout))
        self._opened.callback(shared.close)
        return Sharing(shared)

    def _meetings(self, model: nn.Module, timeout: float) -> Meetings:
        """The same."""
        meetings = Meetings(Transport(self._new_group(timeout)), model)
        self._opened.callback(meetings.transport.close)
        self._opened.callback(meetings.close)
        return meetings

    def _places(self) -> tuple[Transport | Dense, ...]:
        """Where this worker may wait for others."""
        others = [part.transport for part in (self.ops.dealer, self.ops.sharing, self.ops.meetings) if part is not None]
        return self.keys, self.rows, self.dense, *others

    def _new_group(self, timeout: float) -> dist.ProcessGroup | None:
        return dist.new_group(backend="gloo", timeout=process.patience(timeout)) if self.group is not None else None

    def _open_stores(self, plan: ExchangePlan) -> list[Store]:
        def open_all() -> list[Store]:
            stores: list[Store] = []
            for k, (table, owners, peers) in enumerate(zip(plan.tables, plan.owners, plan.peers, strict=True)):
                store: Store
                if table.tier == "memory":
                    store = MemoryStore(table, seed=self._seed, owners=owners)
                else:
                    store = DiskStore(table, seed=self._seed, owners=owners, rank=self.rank, folder=self._storage)
                    self._opened.callback(store.close)
                if len(peers) > 1:
                    store.share = peers.tolist().index(self.rank), len(peers)
                if plan.is_averaged(k):
                    store.replicas = len(peers)
                stores.append(store)
            return stores

        return self.rows.together(open_all, what="tables")

    @property
    def stores(self) -> list[Store]:
        return self.ops.stores

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """What goes into empty tables in it is out again if it fails: tables, and who owns them, are as they were."""
        decisions = self.ops.plan.decisions()
        try:
            yield
        except BaseException:
            tracked = [store.tracks_changes for store in self.stores]
            for store in self.stores:
                if isinstance(store, DiskStore):
                    store.close()
            self.ops.plan.put_back(decisions)
            self.ops.use(self._open_stores(self.ops.plan))
            self.scale_row_lr(self.lr_factor)
            for store in (store for store, was in zip(self.stores, tracked, strict=True) if was):
                store.track_changes()
            raise

    def scale_row_lr(self, factor: float) -> None:
        for store in self.stores:
            store.lr = store.table.optimizer.lr * factor
        self.lr_factor = factor

    def close(self) -> None:
        self.training.torn, self.group = CLOSED, None
        self.dense.close()

    # -- calls ---------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def calling(self, what: str, *, meets: bool = True) -> Iterator[None]:
        """While a call of the user's runs that all workers make. meets: whether they see first that all of them make it (a step
        sees it by itself)."""
        self._calls.append((what, time.monotonic()))
        try:
            if meets:
                self.ops.meet(what)
            yield
        finally:
            self._calls.pop()

    def must_be_quiet(self, what: str) -> None:
        """Raises ValueError unless tables are as a step left them, and nothing is under way."""
        torn, engine, steps = self.training.torn, self.training.engine, self.training.steps
        if torn == CLOSED:
            raise ValueError(f"cannot {what}: the trainer is closed; make a new one")
        if torn is not None:
            raise ValueError(
                f"cannot {what}: training ended in the middle of step {steps + 1}, and the tables are in between two steps "
                f"({torn}); load a checkpoint into a new trainer"
            )
        if engine.in_flight:
            raise ValueError(
                f"cannot {what} while batches are in flight under schedule {engine.schedule.name!r}; do it between "
                f"calls of fit, or in on_step at the steps of fit(pause_every=N)"
            )

    def _doing(self) -> tuple[str, float] | None:
        """For others that wait for this worker: what it does, and since when; None if it waits as well, or is not asked to do
        anything."""
        places = self._places()
        waits = any(place.waiting_since is not None for place in places)
        work = self.training.engine.longest_work()
        if work is not None and not (waits and work[0].startswith("on_step")):
            return work
        calls = list(self._calls)  # another thread's
        if waits or not calls:
            return None
        call, since = calls[-1]
        return call, max(since, *(place.waited_until for place in places))
