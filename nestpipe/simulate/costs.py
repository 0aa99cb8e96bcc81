"""What every operation of a schedule takes on every worker, from a workload and a profile."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from nestpipe.exchange.layout import Sizes
from nestpipe.exchange.window import Window
from nestpipe.schedule import ops as op
from nestpipe.schedule.ops import Op, Schedule, Task
from nestpipe.schedule.setting import Setting
from nestpipe.simulate.events import Cost, Seconds
from nestpipe.simulate.profile import READ, Profile, units
from nestpipe.simulate.workload import Workload
from nestpipe.sizes import BUCKET_BYTES, NUM_TOTALS, READ_AHEAD


class Costs:
    """Called with an operation, returns its Cost.

    schedule: what is to be run; where the profile knows what reading takes, with a lane for the thread that reads ahead.
    workers: of the cluster. seed: of the jitter.
    """

    def __init__(self, workload: Workload, profile: Profile, setting: Setting, workers: int, *, seed: int = 0) -> None:
        if workers < 1 or setting.replicas < 1 or workers % setting.replicas:
            raise ValueError(f"{workers} workers cannot form {setting.replicas} equal groups (replicas)")
        self.workload, self.profile, self.setting, self.workers = workload, profile, setting, workers
        schedule = setting.make([*(workload.keeping if setting.replicas > 1 else ()), *workload.sharing])
        self.schedule = _with_source(schedule) if READ in profile.operations else schedule
        self.group = workers // setting.replicas
        self._seed = seed
        self.split = workload.split(setting.parts, setting.clustering, setting.window_cache)
        self._crowd = 1 + profile.crowding * (workers - 1)
        self._busy = max(1.0, min(profile.network.per_node, workers) / profile.cores) if profile.cores else 1.0
        ops = sorted({(task.op.name, task.op.part) for task in self.schedule.tasks})
        # Neighbours share a node, and its fast links: those of a group, or those that hold the same shard. The others are apart.
        self._spread = setting.replicas if setting.near == "replicas" else 1  # of a group
        self._replica_spread = 1 if setting.near == "replicas" else self.group
        apart = profile.jitter > 0 and setting.replicas > 1
        columns, rows = np.arange(workers) % self._spread, np.arange(workers) // self.group
        self._groups = (columns if setting.near == "replicas" else rows) if apart else None
        peers = (
            np.arange(workers) // setting.replicas if setting.near == "replicas" else np.arange(workers) % self.group
        )
        self._replicas = peers if apart else None
        self._fixed = {(name, part): self._of(name, part) for name, part in ops}

    @property
    def counts(self) -> np.ndarray:
        """Workers that each column stands for: without jitter all are alike."""
        return np.ones(self.workers, np.int64) if self.profile.jitter else np.array([self.workers])

    def __call__(self, operation: Op) -> Cost:
        name, batch, part = operation
        cost = self._fixed[name, part]
        if not self.profile.jitter:
            return cost
        rng = np.random.default_rng((self._seed, zlib.crc32(name.encode()), batch, part))
        sigma = np.sqrt(np.log1p(self.profile.jitter**2))
        together: Seconds | None = cost.together
        if together is not None:
            together = together * rng.lognormal(-(sigma**2) / 2, sigma)
        return Cost(cost.alone * rng.lognormal(-(sigma**2) / 2, sigma, self.workers), together, cost.group)

    # -- one operation -------------------------------------------------------------------------------------------------

    def units(self, name: str, part: int = 0) -> float:
        """How much an operation does of its unit; of a micro-batch, where it is done for each."""
        load = self.workload
        match unit := units()[name]:
            case "step":
                return 1.0
            case "sample":
                return load.samples
            case "byte of inputs":
                return load.input_bytes
            case "key":
                return load.keys
            case "row of the owner":
                return self.held_rows
            case "row of two batches":
                return max(0.0, 2 * self.held_rows - self.owned_rows(batches=2 * self._told))
            case "byte of rows":
                return self.moved_bytes * self._share(name, self.split.rows, part)
            case "byte of gradients":
                return self.moved_bytes * self._share(name, self.split.grads, part)
            case "byte of sums":
                return self._sums(part)
            case "byte of records":
                return self._records
            case "forward operation":
                return load.forward_flops * self._share(name, self.split.compute, part)
            case "backward operation":
                return load.backward_flops * self._share(name, self.split.compute, part)
            case "byte of dense gradients":
                return load.dense_bytes
            case "byte of shared vectors":
                return load.shared_bytes
            case "pair of samples":
                return float(load.samples * load.samples * self.workers)
        raise ValueError(f"operation {name} does so many of {unit!r}, which `Costs.units` cannot count: teach it")

    def _share(self, name: str, shares: Sequence[float], part: int) -> float:
        return shares[part] if self.schedule.num_parts(name) > 1 else sum(shares)

    def _of(self, name: str, part: int) -> Cost:
        alone = self._alone(name, self.units(name, part))
        if self.workers == 1:
            return Cost(alone)
        if name == op.MERGE:  # the same to each of the others
            return Cost(alone, self._among_replicas(self.units(name, part) * self.setting.replicas), self._replicas)
        if name == op.AVERAGE:  # to the worker that averages them, and back to all
            return Cost(alone, 2 * self._among_replicas(self.units(name, part)), self._replicas)
        if name == op.DEAL:  # over all workers, whatever the groups; as if every sample went to another one
            return Cost(alone, self.profile.network.all_to_all(self._sent(name, part), self.workers))
        if name in (
            op.SHARE,
            op.UNSHARE,
        ):  # the same to each of the others, whatever the groups; and as much back from each
            return Cost(alone, self.profile.network.all_to_all(self._sent(name, part) * self.workers, self.workers))
        match op.OPERATIONS[name].collective if name in op.OPERATIONS else None:
            case "all_to_all":
                return Cost(alone, self._all_to_all(name, part), self._groups)
            case "all_reduce":
                return Cost(alone, self._all_reduce(name, part))
        return Cost(alone)

    def _sent(self, name: str, part: int) -> float:
        """Bytes that a worker brings to a collective, by what the operation does."""
        unit, amount = units()[name], self.units(name, part)
        if unit.startswith("byte of "):
            return amount
        match unit:
            case "step":
                return np.dtype(np.float64).itemsize * NUM_TOTALS
            case "key":
                return self.key_bytes
            case "row of the owner" | "row of two batches":
                return amount * self._mean_record
        raise ValueError(f"operation {name} exchanges so many of {unit!r}, whose bytes `Costs._sent` does not know")

    def _all_to_all(self, name: str, part: int) -> float:
        def seconds(num_bytes: float) -> float:
            return self.profile.network.all_to_all(num_bytes, self.group, spread=self._spread)

        if units()[name] != "key":
            return seconds(self._sent(name, part))
        told = self._among_replicas(self._owned_key_bytes * self.setting.replicas) if self.setting.replicas > 1 else 0.0
        return seconds(self._sent(name, part)) + seconds(self._sizes) + told

    def _among_replicas(self, num_bytes: float) -> float:
        return self.profile.network.all_to_all(num_bytes, self.setting.replicas, spread=self._replica_spread)

    @property
    def _sizes(self) -> float:
        """Bytes that every worker tells the others before keys travel."""
        return Sizes.empty(self.group, len(self.workload.tables), self.schedule.num_parts(op.EMB)).table.nbytes

    def _all_reduce(self, name: str, part: int) -> float:
        network, sent = self.profile.network, self._sent(name, part)
        whole = network.all_reduce(sent, self.workers)
        if units()[name] != "byte of dense gradients":
            return whole
        # It began in the last backward, behind which it runs; all but its last bucket, which is complete only then.
        hiding = self._alone(op.BWD, self.workload.backward_flops * self.split.compute[-1])
        return max(network.all_reduce(min(sent, BUCKET_BYTES), self.workers), whole - hiding)

    def _alone(self, name: str, units: float) -> float:
        seconds = self.profile.work(name)(units * (self._crowd if name in op.of_kind(op.LOOKUP) else 1.0))
        return seconds * (self._busy if name in self.profile.hosted else 1.0)

    # -- how much ------------------------------------------------------------------------------------------------------

    @property
    def key_bytes(self) -> float:
        """What a worker's batch sends to owners: its distinct keys, once, with the last micro-batch that uses the row; without
        the window cache again for every micro-batch."""
        window = Window([0], self.schedule.num_parts(op.EMB), self.setting.window_cache)
        told = 0 if window.last_use is None else window.last_use.itemsize
        once = sum(table.growth(table.keys) * (table.key_bytes + told) for table in self.workload.tables)
        return once * (1.0 if self.setting.window_cache else sum(self.split.rows))

    def owned_rows(self, batches: int = 1) -> float:
        """Distinct rows that an owner is asked for by its group, in so many of its batches."""
        return sum(table.growth(table.keys * self.group * batches) / self.group for table in self.workload.tables)

    @property
    def _told(self) -> int:
        """Groups whose rows an owner looks up: where replicas are kept exactly together, all of them."""
        return self.setting.replicas if op.MERGE in self.workload.keeping else 1

    @property
    def held_rows(self) -> float:
        """Distinct rows that an owner looks up and updates."""
        return self.owned_rows(batches=self._told)

    @property
    def _owned_key_bytes(self) -> float:
        tables = self.workload.tables
        return sum(table.growth(table.keys * self.group) / self.group * table.key_bytes for table in tables)

    def _sums(self, part: int) -> float:
        """Bytes of the sums of gradients that are complete at an owner with a part: of rows that no later micro-batch of its
        group uses, were keys dealt to them at random."""
        parts, total = self.schedule.num_parts(op.MERGE), 0.0
        for table in (table for table in self.workload.tables if table.sync == "exact"):
            later = [table.growth(table.keys * self.group * (parts - p) / parts) for p in (part, part + 1)]
            total += (later[0] - later[1]) / self.group * table.dim * 4
        return total

    @property
    def _records(self) -> float:
        """Bytes of the rows, with their state, that an owner averages in a step, on average."""
        total = 0.0
        for table in (table for table in self.workload.tables if table.sync == "average"):
            keys = table.keys * self.group * self.setting.replicas * table.sync_every
            total += table.growth(keys) / self.group * table.record / table.sync_every
        return total

    @property
    def moved_bytes(self) -> float:
        """Of the batch in one piece: rows that a worker gets, its own part included; as many gradients leave."""
        return sum(table.travelling(self.group) for table in self.workload.tables)

    @property
    def _mean_record(self) -> float:
        rows = [table.growth(table.keys) for table in self.workload.tables]
        return sum(r * table.record for r, table in zip(rows, self.workload.tables, strict=True)) / max(1e-9, sum(rows))


def _with_source(schedule: Schedule) -> Schedule:
    """With the thread that reads batches before PREFETCH asks for them, as a lane of its own."""

    def step(t: int) -> Iterator[Task]:
        for task in schedule.step(t):
            if task.op.name == op.PREFETCH:
                batch = task.op.batch
                yield Task(Op(READ, batch), "source", (Op(op.PREFETCH, batch - READ_AHEAD),))
                task = task._replace(after=(*task.after, Op(READ, batch)))
            yield task

    return dataclasses.replace(schedule, step=step)
