"""What may stand in a config: types, limits and defaults. Those of [schedule] stand at `Setting`, those of [data] and [model] at
the classes that they name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch

from nestpipe.data import SPLITS
from nestpipe.directions import direction_of
from nestpipe.engine.computing import PRECISIONS
from nestpipe.errors import did_you_mean
from nestpipe.fields import AtLeast, AtMost, NotEmpty, OneOf, check, hints
from nestpipe.metrics import names
from nestpipe.metrics.ranking import SEEN_TARGETS
from nestpipe.optim import OPTIMIZERS
from nestpipe.process import MOST_SECONDS
from nestpipe.rates import DECAYS, NEED_STEPS, LRSchedule
from nestpipe.schedule.setting import Setting
from nestpipe.tables import SYNCS, Table
from nestpipe.tracking import TRACKERS

DENSE_OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}
LR_ENTRIES = ("lr_warmup", "lr_decay", "lr_final", "lr_step_size", "lr_gamma")
SAMPLES = 256  # of a batch, unless it is said how many
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Positive = Annotated[int, AtLeast(1)]
NotNegative = Annotated[int, AtLeast(0)]
Rate = Annotated[float, AtLeast(0), AtMost(1e30)]
Fraction = Annotated[float, AtLeast(0), AtMost(1)]
Pooling = Literal["sequence", "streamed", "sum", "mean"]


@dataclasses.dataclass(kw_only=True)
class TrainSection:
    """[train]

    batch_size: samples per worker and step; 256 unless batch_tokens is given.
    batch_tokens: instead, tokens (keys of the first sequence feature) per worker and step: a batch takes samples until the next
        would make them more; one sample of more is a batch alone.
    steps, epochs: stop after the first of the two that is given; one epoch if neither is.
    seed: of the model, the rows and the order of data.
    dense_optimizer, dense_lr, dense_weight_decay: of the model's own parameters.
    lr_warmup, lr_decay, lr_final, lr_step_size, lr_gamma: of all learning rates, of rows too; see LRSchedule, whose `steps` are
        those of the run. Tables may have their own.
    clip_norm: largest norm of the dense gradient; 0 means no limit.
    precision: "float32" or "bf16" (the model, not rows and optimizers). compile: torch.compile of the model. See Trainer.
    on_nonfinite: "raise" or "skip".
    eval_split, eval_batch_size: what the run is judged on at its end; "none": it is not.
    eval_every: steps between evaluations on "valid"; 0 means none. eval_samples: how many samples of it each looks at, the
        first of every worker's share; all if left out.
    metrics: what an evaluation tells, by name: AUC, NE, LogLoss, Calibration, GAUC; of lists also NDCG@k, Recall@k, MAP@k,
        MRR; of rankings HR@k, NDCG@k, Recall@k, MRR, MAP@k, Coverage@k. Without @k: at every k of rank_at.
    group_by: what GAUC groups samples by: a feature with one key per sample, or a dense input of whole numbers.
    best_metric: the metric of these evaluations by which the best checkpoint is kept, in "best" of the run folder, and judged at
        the end; none is kept if left out. best_direction: "max" or "min"; "auto": as the metric's name says.
    patience: training ends after so many evaluations in a row that were not better; never if left out.
    track: where curves go: "tensorboard", "mlflow", "wandb".
    rank_at: the k of HR@k and NDCG@k.
    exclude_seen: leave all that a user has had out of the ranking.
    seen_targets: a target that its user has had before: "rank" it all the same, count it as a "miss", or "skip" the sample.
    reader: where training batches are read: "thread", "process" (one of its own), or "auto": a process for data sets that
        parse files as they go, whose work would hold up the compute lane (`nestpipe bench reading`).
    checkpoint_every: steps between checkpoints, which are written while training goes on; 0 means none before the end.
    keep_checkpoints: how many stay. full_every: of so many checkpoints one is full, the others hold what changed since it.
    checkpoints: folder for them, one that all workers see; "checkpoints" in the run folder if left out.
    storage: folder for tables on disk, a local one of each machine; "storage" in the run folder if left out.
    timeout: seconds a worker waits for another, or for data, before it gives up.
    """

    batch_size: Positive | None = None
    steps: Positive | None = None
    batch_tokens: Positive | None = None
    epochs: Positive | None = None
    seed: Annotated[int, AtLeast(0), AtMost(2**32)] = 0
    dense_optimizer: Annotated[str, OneOf(DENSE_OPTIMIZERS)] = "adam"
    dense_lr: Rate = 1e-3
    dense_weight_decay: Rate = 0.0
    lr_warmup: NotNegative = LRSchedule.warmup
    lr_decay: Annotated[str, OneOf(DECAYS)] = LRSchedule.decay
    lr_final: Fraction = LRSchedule.final
    lr_step_size: Positive | None = LRSchedule.step_size
    lr_gamma: Fraction = LRSchedule.gamma
    clip_norm: Rate = 0.0
    precision: Annotated[str, OneOf(PRECISIONS)] = "float32"
    compile: bool = False
    on_nonfinite: Literal["raise", "skip"] = "raise"
    eval_split: Annotated[str, OneOf((*SPLITS, "none"))] = "test"
    eval_batch_size: Positive = 256
    eval_every: NotNegative = 0
    metrics: Annotated[tuple[str, ...], NotEmpty()] | None = None
    group_by: str | None = None
    eval_samples: Positive | None = None
    best_metric: str | None = None
    best_direction: Literal["auto", "max", "min"] = "auto"
    patience: Positive | None = None
    track: tuple[Annotated[str, OneOf(TRACKERS)], ...] = ("tensorboard",)
    rank_at: Annotated[tuple[Annotated[int, AtLeast(1), AtMost(1_000_000)], ...], NotEmpty()] = (10, 50)
    exclude_seen: bool = True
    seen_targets: Annotated[str, OneOf(SEEN_TARGETS)] = "rank"
    reader: Literal["auto", "thread", "process"] = "auto"
    checkpoint_every: NotNegative = 0
    keep_checkpoints: Positive = 3
    full_every: Positive = 1
    checkpoints: str | None = None
    storage: str | None = None
    timeout: Annotated[float, AtLeast(1), AtMost(MOST_SECONDS)] = 300.0

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_tokens is not None:
            raise ValueError(
                f"config: train.batch_size = {self.batch_size} and train.batch_tokens = {self.batch_tokens}: a batch is cut by "
                f"samples or by tokens; leave one of them out"
            )
        if self.batch_tokens is None:
            self.batch_size = self.batch_size or SAMPLES
        for name in self.metrics or ():
            try:
                names.check(name)
            except ValueError as error:
                raise ValueError(f"config: train.metrics: {error}") from None
        if self.group_by is not None and self.metrics is not None and "GAUC" not in self.metrics:
            raise ValueError("config: train.group_by is for the metric GAUC; add it to train.metrics, or leave it out")
        self.lr_schedule()
        for entry in ("eval_samples", "best_metric"):
            if getattr(self, entry) is not None and not self.eval_every:
                raise ValueError(f"config: train.{entry} is of evaluations while training; set train.eval_every")
        for entry, absent in (("patience", None), ("best_direction", "auto")):
            if getattr(self, entry) != absent and self.best_metric is None:
                raise ValueError(f"config: train.{entry} needs train.best_metric, to know what is better")
        if self.best_metric is not None and self.best_direction == "auto":
            direction_of(self.best_metric)
        if len(set(self.track)) < len(self.track):
            raise ValueError(f"config: train.track names a tracker twice: {', '.join(self.track)}")
        if self.seen_targets == "miss" and not self.exclude_seen:
            raise ValueError(
                "config: train.seen_targets = 'miss' needs train.exclude_seen = true, which leaves them out"
            )

    def lr_schedule(self, table: str | None = None, **own: Any) -> LRSchedule | None:
        """Of all learning rates; of a table's, if it has entries of its own: each of them stands in place of the one here."""
        entries = {name: getattr(self, name) for name in LR_ENTRIES} | own
        if entries["lr_decay"] != "step" and "lr_step_size" not in own and table is not None:
            entries["lr_step_size"] = None  # it was of the decay here
        steps = self.steps if entries["lr_decay"] in NEED_STEPS else None
        where = "train" if table is None else f"tables.{table}"
        try:
            made = LRSchedule(**{name.removeprefix("lr_"): value for name, value in entries.items()}, steps=steps)
        except ValueError as error:
            text = str(error).removeprefix("LRSchedule: ")
            needs = " (train.steps)" if steps is None and entries["lr_decay"] in NEED_STEPS else ""
            raise ValueError(f"config: [{where}], entries lr_*: {text}{needs}") from None
        return None if made == LRSchedule() and table is None else made


@dataclasses.dataclass(kw_only=True)
class TableSection:
    """[tables.NAME]; NAME may have wildcards ("C*"): then every feature of the data that fits gets a table of its own.

    features: names (all with `pooling`), or {name = "sequence" | "streamed" | "sum" | "mean"}; the table's own name if left
        out. "streamed" is a sequence whose rows the model reads a part at a time.
    memory: budget of a table with tier = "disk", over all workers: "2GB", "512MiB" or a number of bytes.
    max_rows, evict, ttl: see Eviction. init: {normal = std} or {uniform = [low, high]}.
    lr_warmup, lr_decay, lr_final, lr_step_size, lr_gamma: in place of those of [train], each by itself.
    frozen_until: so many steps in which rows are not updated.
    Entries of the row optimizer (lr, weight_decay, clip, eps, ...) stand beside them. Limits that are not here are Table's.
    """

    dim: int
    optimizer: Annotated[str, OneOf(OPTIMIZERS)] = "rowwise_adagrad"
    init: Any = dataclasses.field(default_factory=lambda: {"normal": 0.02})
    dtype: Annotated[str, OneOf(DTYPES)] = "float32"
    tier: str = "memory"
    memory: int | str | None = None
    admit_after: int = 1
    max_rare_keys: int = Table.max_rare_keys
    max_rows: int | None = None
    evict: Literal["lru", "lfu"] = "lru"
    ttl: int | None = None
    pooled_at: str = "auto"
    owners: int | str | None = Table.owners
    replicas: int | str | None = Table.replicas
    sync: Annotated[str, OneOf(SYNCS)] = Table.sync
    sync_every: int = Table.sync_every
    hot: int = Table.hot
    lr_warmup: NotNegative | None = None
    lr_decay: Annotated[str, OneOf(DECAYS)] | None = None
    lr_final: Fraction | None = None
    lr_step_size: Positive | None = None
    lr_gamma: Fraction | None = None
    frozen_until: int = Table.frozen_until
    features: list[str] | dict[str, Pooling] | None = None
    pooling: Pooling = "sequence"

    def lr_schedule(self, name: str, train: TrainSection) -> LRSchedule | None:
        """None: that of the run."""
        own = {entry: getattr(self, entry) for entry in LR_ENTRIES if getattr(self, entry) is not None}
        return train.lr_schedule(name, **own) if own else None


@dataclasses.dataclass
class Config:
    """Plain values, as TOML or JSON holds them; [schedule] gives `setting` and `check_freshness`: debug mode, checks every row
    that is read."""

    data: dict[str, Any]
    model: dict[str, Any]
    tables: dict[str, dict[str, Any]]
    train: TrainSection
    setting: Setting
    check_freshness: bool = False

    def to_dict(self) -> dict[str, Any]:
        """By sections, as `parse` takes it."""
        options = self.setting.options()
        schedule = {"name": options.pop("schedule"), **options, "check_freshness": self.check_freshness}
        return {
            "data": self.data,
            "model": self.model,
            "tables": self.tables,
            "train": dataclasses.asdict(self.train),
            "schedule": schedule,
        }


def section(kind: type[Any], name: str, values: Mapping[str, Any]) -> Any:
    """[name] of a config: its entries are fields of `kind`."""
    entries = checked_entries(name, values, hints(kind))
    for field in dataclasses.fields(kind):
        if field.default is field.default_factory is dataclasses.MISSING and field.name not in entries:
            raise ValueError(f"config: {name}.{field.name} is missing")
    return kind(**entries)


def checked_entries(name: str, values: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """known: types and limits by entry."""
    for entry in values:
        if entry not in known:
            raise ValueError(f"config: {name}.{entry}, {did_you_mean(entry, list(known))}")
    return {entry: check(f"config: {name}.{entry}", value, known[entry]) for entry, value in values.items()}
