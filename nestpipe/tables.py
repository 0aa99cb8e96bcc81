"""Table and Feature: everything a user declares about embeddings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from nestpipe.errors import did_you_mean
from nestpipe.optim import RowOptimizer, RowwiseAdagrad
from nestpipe.rates import LRSchedule, Schedule
from nestpipe.sizes import num_bytes


@dataclasses.dataclass(frozen=True)
class Uniform:
    """First values of a row: uniform between low and high."""

    low: float = -0.05
    high: float = 0.05

    def __post_init__(self) -> None:
        if not -math.inf < self.low <= self.high < math.inf:
            raise ValueError(f"Uniform: low must not be above high, both finite, got {self.low} and {self.high}")


@dataclasses.dataclass(frozen=True)
class Normal:
    """First values of a row: normal with mean 0."""

    std: float = 0.02

    def __post_init__(self) -> None:
        if not 0 <= self.std < math.inf:
            raise ValueError(f"Normal: std must be at least 0 and finite, got {self.std}")


Init = Uniform | Normal


def init_of(entry: object) -> Init:
    """From {"normal": std} or {"uniform": [low, high]}, as TOML and JSON hold it."""
    match entry:
        case {"normal": float() | int() as std}:
            return Normal(std)
        case {"uniform": [float() | int() as low, float() | int() as high]}:
            return Uniform(low, high)
    raise ValueError(f"init must be {{normal = std}} or {{uniform = [low, high]}}, got {entry!r}")


def init_entry(init: Init) -> dict[str, object]:
    """The opposite of `init_of`."""
    return {"normal": init.std} if isinstance(init, Normal) else {"uniform": [init.low, init.high]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eviction:
    """Which rows are given up, and when. A row that comes back after that is born anew.

    max_rows: budget of rows over all workers; each owner of the table holds an equal part. When new keys would exceed it,
        the rows with the lowest rank are dropped until 15/16 of the budget is left, never one that the current batch uses.
    policy: "lru" drops the rows whose last use is longest ago; "lfu" those used in the fewest steps, the longest ago of
        these first. Ties go by key, so that two runs drop the same rows.
    ttl: a row not used for more than this many steps is dropped, with or without a budget.
    """

    max_rows: int | None = None
    policy: str = "lru"
    ttl: int | None = None

    def __post_init__(self) -> None:
        if self.policy not in ("lru", "lfu"):
            raise ValueError(f"Eviction: policy must be 'lru' or 'lfu', got {self.policy!r}")
        for name in ("max_rows", "ttl"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"Eviction: {name} must be at least 1, got {value}")
        if self.max_rows is None and self.ttl is None:
            raise ValueError("Eviction: give max_rows, ttl or both")


TIERS = ("memory", "disk")
DEFAULT_MEMORY = "1GB"
POOLINGS = (None, "sum", "mean")
POOLED_AT = ("auto", "source", "owner")
SYNCS = ("exact", "average")
DEFAULT_OWNERS: int | str | None = None  # all workers


@dataclasses.dataclass(frozen=True)
class Table:
    """An embedding table: any int64 key, no declared size; a row is born when its key is first trained on.

    name: what features refer to; also part of the seed of the first values.
    dim: values per row.
    optimizer: a RowOptimizer; its state lies beside each row.
    lr_schedule: what its learning rate is multiplied by in each step: an LRSchedule, or a function of the step alone, the same
        on every worker; None: as the trainer's.
    frozen_until: so many steps, counted from the trainer's first, in which rows are born and read but not updated.
    init: distribution of first values. They depend only on (seed, table name, key).
    dtype: torch.float32 or torch.bfloat16 rows; state and arithmetic are float32 either way.
    tier: where rows live: "memory", or "disk": in a file, with those used last in memory.
    memory: of a table on disk: bytes over all workers, as a number or as text ("2GB", "512MiB"), for everything of it that
        is in memory; each of its owners takes an equal part. Key index first, rows used last in what is left. None: 1 GB.
    admit_after: a key gets a row of its own in the k-th step that uses it; before that it shares one of 65,536
        common rows (chosen by hash) with other rare keys.
    max_rare_keys: with admit_after, how many keys without a row of their own are counted, over all workers; each owner of
        the table counts an equal part, and a step that would count more is an error. A key takes up to 64 bytes.
    eviction: see Eviction; None keeps every row.
    pooled_at: how the rows of pooled features travel. "source" sends each distinct row once and pools where the sample is;
        "owner" pools where the rows live and sends one vector per sample and owner: fewer bytes when keys hardly repeat.
        "auto" counts both on the first batch, takes the smaller and says so. A table that also serves a sequence feature
        sends rows.
    owners: how many workers hold the table's rows, by key; None: all. 1 keeps the whole table on one worker, tables like it
        dealt out evenly: a bag pooled at the owner is then one vector on the wire, not one from every worker that has some
        of its keys. For tables that fit one worker and are read in bags whose keys hardly repeat. "auto" decides between 1
        and all from the first batch, and says so: 1 if that saves a fifth of the bytes and there are tables like it for the
        other workers. It cannot know how large a table will grow, see docs/design.md. With replicas, a number of each group.
    replicas: how many groups of workers hold the table, each all of it; None: as many as the run has (Trainer's `replicas`).
        1: none, its rows are spread over all workers; for tables that are too large to be held twice. "all": every worker
        holds all of it, so that no row travels; for small tables that every sample reads. `memory`, `max_rows` and
        `max_rare_keys` are of one replica.
    sync: how replicas are kept together. "exact": they exchange the gradients of the rows that a batch touches and all apply the
        same update: the result is that of one replica. "average": each applies the gradients of its own group, and every
        `sync_every` steps rows and optimizer state are averaged: fewer bytes, another result.
    hot: the rows of so many keys, those used most in the first batch of all workers, are held by every worker of the run:
        they do not travel, sums of their gradients do, and the result is the same. For tables of which every batch of
        every worker uses the same few keys. Not with admission, eviction or averaged replicas.
    """

    name: str
    dim: int
    optimizer: RowOptimizer = RowwiseAdagrad()
    init: Init = Normal()
    dtype: torch.dtype = torch.float32
    tier: str = "memory"
    admit_after: int = 1
    eviction: Eviction | None = None
    pooled_at: str = "auto"
    memory: int | str | None = None
    owners: int | str | None = DEFAULT_OWNERS
    max_rare_keys: int = 100_000_000
    replicas: int | str | None = None
    sync: str = "exact"
    sync_every: int = 1
    hot: int = 0
    lr_schedule: Schedule | None = None
    frozen_until: int = 0

    def __post_init__(self) -> None:
        def refuse(problem: str) -> ValueError:
            return ValueError(f"table {self.name!r}: {problem}")

        if not isinstance(self.dim, int) or isinstance(self.dim, bool) or self.dim < 1:
            raise refuse(f"dim must be a whole number of at least 1, got {self.dim!r}")
        if not isinstance(self.optimizer, RowOptimizer):
            raise refuse(
                f"optimizer must be a nestpipe row optimizer such as RowwiseAdagrad(lr=0.05), got {self.optimizer!r}"
            )
        if not isinstance(self.init, (Uniform, Normal)):
            raise refuse(f"init must be Uniform(low, high) or Normal(std), got {self.init!r}")
        if self.lr_schedule is not None and not callable(self.lr_schedule):
            raise refuse(f"lr_schedule must be an LRSchedule or a function of the step, got {self.lr_schedule!r}")
        if type(self.frozen_until) is not int or self.frozen_until < 0:
            raise refuse(f"frozen_until must be a number of steps, got {self.frozen_until!r}")
        if self.eviction is not None and not isinstance(self.eviction, Eviction):
            raise refuse(f"eviction must be an Eviction(...) or None, got {self.eviction!r}")
        if self.dtype not in (torch.float32, torch.bfloat16):
            raise refuse(f"dtype must be torch.float32 or torch.bfloat16, got {self.dtype}")
        if self.tier not in TIERS:
            raise refuse(f"tier must be 'memory' or 'disk', got {self.tier!r}")
        if self.memory is not None:
            if self.tier != "disk":
                raise refuse(
                    f"memory={self.memory!r} is the budget of a table with tier='disk'; this one is all in memory"
                )
            try:
                num_bytes(self.memory)
            except ValueError as error:
                raise refuse(f"memory {error}") from None
        for name in ("admit_after", "max_rare_keys", "sync_every"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise refuse(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.owners not in (None, "auto") and (type(self.owners) is not int or self.owners < 1):
            raise refuse(
                f"owners must be a number of workers of at least 1, 'auto', or None for all, got {self.owners!r}"
            )
        if self.replicas not in (None, 1, "all") or self.replicas is True:
            raise refuse(f"replicas must be 1, 'all', or None for as many as the run has, got {self.replicas!r}")
        if self.sync not in SYNCS:
            raise refuse(f"sync must be one of {SYNCS}, got {self.sync!r}")
        if self.sync_every > 1 and self.sync != "average":
            raise refuse(f"sync_every={self.sync_every} is for sync='average'; exact replicas meet in every step")
        if self.replicas == "all" and self.owners is not None:
            raise refuse(f"owners={self.owners!r} has no meaning with replicas='all': every worker holds all of it")
        if type(self.hot) is not int or self.hot < 0:
            raise refuse(f"hot must be a number of keys, got {self.hot!r}")
        if self.hot:
            # Workers would count, and give up, a hot row and the others of its table apart from each other.
            for clashes, what in (
                (self.replicas == "all", "replicas='all': every worker holds all of it anyway"),
                (self.sync == "average", "sync='average': hot rows are kept exactly together"),
                (self.pooled_at == "owner", "pooled_at='owner': bags of hot and other rows are pooled at the source"),
                (self.admit_after > 1, f"admit_after={self.admit_after}"),
                (self.eviction is not None, "an eviction"),
            ):
                if clashes:
                    raise refuse(f"hot={self.hot} does not go together with {what}; leave one of them out")
        if self.pooled_at not in POOLED_AT:
            raise refuse(f"pooled_at must be one of {POOLED_AT}, got {self.pooled_at!r}")

    @property
    def first_values(self) -> tuple[bool, float, float]:
        """`init` as kernels take it: whether it is normal; mean and deviation, or low and high."""
        init = self.init
        return (True, 0.0, init.std) if isinstance(init, Normal) else (False, init.low, init.high)

    @property
    def memory_bytes(self) -> int:
        """`memory` as a number."""
        return num_bytes(DEFAULT_MEMORY if self.memory is None else self.memory)


class HotRows(Table):
    """The hot rows of the table of the same name, as a table that every worker holds: made by the program, not declared."""

    @classmethod
    def of(cls, table: Table) -> HotRows:
        values = {field.name: getattr(table, field.name) for field in dataclasses.fields(table)}
        return cls(**{**values, "hot": 0, "replicas": "all", "owners": None, "tier": "memory", "memory": None})


@dataclasses.dataclass(frozen=True)
class Feature:
    """One list of keys per sample, looked up in a table. Several features may share a table.

    pooling: None gives the model a Jagged with one row per key; "sum" or "mean" a tensor [B, dim]. Weights of the keys
        scale rows before the sum; the mean is then divided by the sum of weights. A sample with no keys gets zeros.
    streamed: gives the model a `Streamed` instead of a Jagged: rows stay where they were received and are read a part at a
        time, so that they take no memory beside it, nor all of it on a device. For negatives, of which there are many.
    """

    name: str
    table: str
    pooling: str | None = None
    streamed: bool = False

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise ValueError(f"feature {self.name!r}: pooling must be None, 'sum' or 'mean', got {self.pooling!r}")
        if not isinstance(self.streamed, bool):
            raise ValueError(f"feature {self.name!r}: streamed must be True or False, got {self.streamed!r}")
        if self.streamed and self.pooling is not None:
            raise ValueError(
                f"feature {self.name!r}: streamed is for rows that come one by one, pooling={self.pooling!r} gives one vector "
                f"per sample; leave one of them out"
            )


def check_declarations(tables: Sequence[Table], features: Sequence[Feature]) -> None:
    """Raises ValueError for names used twice, features of unknown tables and tables nobody reads."""
    for kind, things in (("table", tables), ("feature", features)):
        names = [thing.name for thing in things]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"{kind} {sorted(twice)[0]!r} is declared more than once; names must be unique")
    known = [table.name for table in tables]
    for feature in features:
        if feature.table not in known:
            raise ValueError(
                f"feature {feature.name!r} refers to table {feature.table!r}, {did_you_mean(feature.table, known)}"
            )
    unread = set(known) - {feature.table for feature in features}
    if unread:
        raise ValueError(f"table {sorted(unread)[0]!r} is read by no feature; add a Feature for it or remove it")


def declarations(tables: Sequence[Table], features: Sequence[Feature]) -> dict[str, object]:
    """Everything that is declared, each with a name: what all workers must have in common."""
    named: dict[str, Table | Feature] = {f"table {number}": table for number, table in enumerate(tables)}
    named |= {f"feature {number}": feature for number, feature in enumerate(features)}
    return {
        f"{name}: {field.name}": told(getattr(thing, field.name))
        for name, thing in named.items()
        for field in dataclasses.fields(thing)
    }


def told(declared: object) -> object:
    """A function cannot be compared over workers; its values are, in every step."""
    return "a function" if callable(declared) and not isinstance(declared, LRSchedule) else declared
