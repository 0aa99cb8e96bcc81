"""A run described in TOML: sections [data] [model] [tables.NAME] [train] [schedule].

`read` gives a Config of plain values, checked against what each part accepts; `build` makes the objects. An entry that
nobody knows is an error that names the nearest known one.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib
import inspect
import itertools
import json
import math
import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nestpipe import data as data_sets
from nestpipe import models
from nestpipe.data import DATASETS
from nestpipe.errors import did_you_mean
from nestpipe.metrics import SEEN_TARGETS
from nestpipe.optim import OPTIMIZERS
from nestpipe.process import MOST_SECONDS
from nestpipe.schedule import SCHEDULES
from nestpipe.schedule.setting import CLUSTERINGS
from nestpipe.tables import Eviction, Feature, Normal, Table, Uniform

MODELS: dict[str, type[nn.Module]] = {"dlrm": models.DLRM, "hstu": models.HSTU}
DENSE_OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}
# Said when the config is read, not after an hour of training.
CHOICES: dict[str, dict[str, Collection[str]]] = {
    "train": {
        "dense_optimizer": DENSE_OPTIMIZERS,
        "lr_decay": ("none", "cosine"),
        "on_nonfinite": ("raise", "skip"),
        "reader": ("auto", "thread", "process"),
        "eval_split": (*data_sets.SPLITS, "none"),
        "seen_targets": SEEN_TARGETS,
    },
    "schedule": {"name": SCHEDULES, "clustering": CLUSTERINGS},
}
AT_LEAST_ONE = {
    "train": (
        "batch_size",
        "steps",
        "epochs",
        "eval_batch_size",
        "rank_at",
        "timeout",
        "keep_checkpoints",
        "full_every",
    ),
    "schedule": ("micro_batches", "look_ahead"),
}
AT_LEAST_ZERO = {"train": ("seed", "dense_lr", "dense_weight_decay", "eval_every", "checkpoint_every")}
AT_MOST = {
    "train": {
        "timeout": MOST_SECONDS,
        "rank_at": 1_000_000,
        "seed": 2**32,
        "dense_lr": 1e30,
        "dense_weight_decay": 1e30,
    }
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _is_whole(value: Any) -> bool:
    """Of 64 bits, as TOML has them."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _list_of(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, (list, tuple)) and all(map(test, value))


# What a value must be for each type that an entry may be declared with; an int is fine where a float is asked for.
TYPES: dict[str, Callable[[Any], bool]] = {
    "int": _is_whole,
    "float": lambda value: _is_whole(value) or (isinstance(value, float) and math.isfinite(value)),
    "str": _is_text,
    "bool": lambda value: isinstance(value, bool),
    "None": lambda value: value is None,
    "tuple[int, ...]": _list_of(_is_whole),
    "Sequence[int]": _list_of(_is_whole),
    "list[int]": _list_of(_is_whole),
    "list[str]": _list_of(_is_text),
    "Sequence[str]": _list_of(_is_text),
}


@dataclasses.dataclass(kw_only=True)
class TrainSection:
    """[train]

    batch_size: samples per worker and step.
    steps, epochs: stop after the first of the two that is given; one epoch if neither is.
    seed: of the model, the rows and the order of data.
    dense_optimizer, dense_lr, dense_weight_decay: of the model's own parameters.
    lr_decay: "none", or "cosine": every learning rate falls to a twentieth over `steps`.
    on_nonfinite: "raise" or "skip".
    eval_split, eval_batch_size: what the run is judged on at its end; "none": it is not.
    eval_every: steps between evaluations on "valid"; 0 means none.
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

    batch_size: int = 256
    steps: int | None = None
    epochs: int | None = None
    seed: int = 0
    dense_optimizer: str = "adam"
    dense_lr: float = 1e-3
    dense_weight_decay: float = 0.0
    lr_decay: str = "none"
    on_nonfinite: str = "raise"
    eval_split: str = "test"
    eval_batch_size: int = 256
    eval_every: int = 0
    rank_at: tuple[int, ...] = (10, 50)
    exclude_seen: bool = True
    seen_targets: str = "rank"
    reader: str = "auto"
    checkpoint_every: int = 0
    keep_checkpoints: int = 3
    full_every: int = 1
    checkpoints: str | None = None
    storage: str | None = None
    timeout: float = 300.0

    def __post_init__(self) -> None:
        if self.lr_decay != "none" and self.steps is None:
            raise ValueError("config: train.lr_decay needs train.steps, to know where the end is")
        if self.seen_targets == "miss" and not self.exclude_seen:
            raise ValueError(
                "config: train.seen_targets = 'miss' needs train.exclude_seen = true, which leaves them out"
            )


@dataclasses.dataclass(kw_only=True)
class ScheduleSection:
    """[schedule]

    name: see nestpipe.schedule. micro_batches: parts of a batch, or "auto". window_cache, clustering: how their rows travel
    and which samples each has, see Trainer. look_ahead: batches on their way behind the one that computes; what the
    schedule needs if left out. check_freshness: debug mode, checks every row that is read.
    """

    name: str = "serial"
    micro_batches: int | str = 1
    window_cache: bool = True
    clustering: str = "window"
    look_ahead: int | None = None
    check_freshness: bool = False


@dataclasses.dataclass(kw_only=True)
class TableSection:
    """[tables.NAME]; NAME may have wildcards ("C*"): then every feature of the data that fits gets a table of its own.

    features: names (all with `pooling`), or {name = "sequence" | "sum" | "mean"}; the table's own name if left out.
    memory: budget of a table with tier = "disk", over all workers: "2GB", "512MiB" or a number of bytes.
    max_rows, evict, ttl: see Eviction. init: {normal = std} or {uniform = [low, high]}.
    Entries of the row optimizer (lr, weight_decay, clip, eps, ...) stand beside them.
    """

    dim: int
    optimizer: str = "rowwise_adagrad"
    init: dict[str, Any] = dataclasses.field(default_factory=lambda: {"normal": 0.02})
    dtype: str = "float32"
    tier: str = "memory"
    memory: int | str | None = None
    admit_after: int = 1
    max_rare_keys: int = Table.max_rare_keys
    max_rows: int | None = None
    evict: str = "lru"
    ttl: int | None = None
    pooled_at: str = "auto"
    owners: int | str | None = Table.owners
    features: list[str] | dict[str, str] | None = None
    pooling: str = "sequence"


@dataclasses.dataclass
class Config:
    """Plain values, as TOML or JSON holds them."""

    data: dict[str, Any]
    model: dict[str, Any]
    tables: dict[str, dict[str, Any]]
    train: TrainSection
    schedule: ScheduleSection

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def read(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The file with `--set key=value` entries applied on top."""
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"cannot read the config {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    for one in overrides:
        override(values, one)
    return parse(values)


def read_json(path: Path, overrides: Sequence[str] = ()) -> Config:
    """As `read`, of the config.json that a run has left in its folder."""
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"cannot read the config {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not what nestpipe writes: a JSON object was expected, got {values!r:.40}")
    for text in overrides:
        override(values, text)
    return parse(values)


def parse(values: Mapping[str, Any]) -> Config:
    """Checks sections and entries; raises ValueError with the nearest known name."""
    known = [field.name for field in dataclasses.fields(Config)]
    for section, content in values.items():
        if section not in known:
            raise ValueError(f"config: section [{section}], {did_you_mean(section, known)}")
        if not isinstance(content, Mapping):
            raise ValueError(f"config: {section} must be a section, got {content!r}")
    for section in ("data", "model", "tables"):
        if not values.get(section):
            raise ValueError(f"config: section [{section}] is missing; see examples/demo.toml")
    data, model, tables = (dict(values[section]) for section in ("data", "model", "tables"))
    _check_arguments("data", data, _dataset_class(data))
    _check_arguments("model", model, _model_class(model))
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise ValueError(f"config: tables.{name} must be a section [tables.{name}], got {table!r}")
        _table(name, *_table_parts(name, table))
    return Config(
        data,
        model,
        tables,
        _section(TrainSection, "train", values.get("train", {})),
        _section(ScheduleSection, "schedule", values.get("schedule", {})),
    )


@dataclasses.dataclass
class Built:
    """The objects a Config describes."""

    data: data_sets.Dataset
    model: nn.Module
    tables: list[Table]
    features: list[Feature]
    dense_optimizer: Any


def build(config: Config) -> Built:
    data_class = _dataset_class(config.data)
    data = _made("data", data_class, _without_kind(config.data))
    tables, features = _tables(config, data.features)
    model = _model(config, data, tables, features)
    make = DENSE_OPTIMIZERS[config.train.dense_optimizer]

    def dense_optimizer(parameters: Any) -> torch.optim.Optimizer:
        return make(parameters, lr=config.train.dense_lr, weight_decay=config.train.dense_weight_decay)

    return Built(data, model, tables, features, dense_optimizer)


# -- sections --------------------------------------------------------------------------------------------------------


def override(values: dict[str, Any], text: str) -> None:
    key, sign, raw = text.partition("=")
    parts = key.strip().split(".")
    if not sign or len(parts) < 2 or not all(parts):
        raise ValueError(f"--set {text!r}: write it as section.entry=value, for example --set train.steps=20")
    try:
        value = tomllib.loads(f"value = {raw.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()  # a string without quotes, as one types it in a shell
    place = values
    for part in parts[:-1]:
        place = place.setdefault(part, {})
        if not isinstance(place, dict):
            raise ValueError(f"--set {text!r}: {part!r} is not a section")
    place[parts[-1]] = value


def _section(kind: type[Any], name: str, values: Mapping[str, Any]) -> Any:
    hints = {field.name: field for field in dataclasses.fields(kind)}
    checked = {}
    for entry, value in values.items():
        if entry not in hints:
            raise ValueError(f"config: {name}.{entry}, {did_you_mean(entry, list(hints))}")
        checked[entry] = _typed(f"{name}.{entry}", value, str(hints[entry].type))
    missing = [
        field.name
        for field in hints.values()
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and field.name not in checked
    ]
    if missing:
        raise ValueError(f"config: {name}.{missing[0]} is missing")
    for entry, known in CHOICES.get(name, {}).items():
        if entry in checked and checked[entry] not in known:
            raise ValueError(f"config: {name}.{entry} {checked[entry]!r}, {did_you_mean(checked[entry], list(known))}")
    for entry in AT_LEAST_ONE.get(name, ()):
        value = checked.get(entry)
        if isinstance(value, str) and value != "auto":
            raise ValueError(f"config: {name}.{entry} must be a whole number or 'auto', got {value!r}")
        if (
            value is not None
            and value != "auto"
            and (value == () or min(value if isinstance(value, tuple) else (value,)) < 1)
        ):
            raise ValueError(f"config: {name}.{entry} must be at least 1, got {value!r}")
    for entry in AT_LEAST_ZERO.get(name, ()):
        if checked.get(entry, 0) < 0:
            raise ValueError(f"config: {name}.{entry} must be at least 0, got {checked[entry]!r}")
    for entry, most in AT_MOST.get(name, {}).items():
        value = checked.get(entry)
        if value is not None and max(value if isinstance(value, tuple) else (value,)) > most:
            raise ValueError(f"config: {name}.{entry} must be at most {most:,}, got {value!r}")
    return kind(**checked)


def _typed(name: str, value: Any, hint: str) -> Any:
    """The value, if it is of one of the types in `hint`; a type that TYPES does not have is a section of its own."""
    kinds = [part.strip() for part in hint.split("|")]
    for kind in kinds:
        if TYPES.get(kind, lambda v: isinstance(v, dict))(value):
            return tuple(value) if kind.startswith("tuple") else value
    wanted = re.sub(r"(?:tuple|list|Sequence)\[(\w+)[^]]*\]", r"list of \1", hint).replace(" | None", "")
    wanted = wanted.replace("float", "finite float")
    raise ValueError(f"config: {name} must be {wanted}, got {value!r}")


def _dataset_class(data: Mapping[str, Any]) -> type[Any]:
    return _by_kind("data", data, DATASETS)


def _model_class(model: Mapping[str, Any]) -> type[nn.Module]:
    kind = model.get("kind")
    if not isinstance(kind, str) or ":" not in kind:
        return _by_kind("model", model, MODELS)
    module, _, name = kind.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), name)):
        raise ValueError(
            f"config: model.kind {kind!r} cannot be imported: write MODULE:CLASS, as in package.module:Ranker"
        )
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"config: model.kind {kind!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        what = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
        raise ValueError(f"config: model.kind {kind!r} is {what}; it must be a class of torch.nn.Module")
    return found


def _by_kind(section: str, values: Mapping[str, Any], known: Mapping[str, type[Any]]) -> type[Any]:
    kind = values.get("kind")
    if kind is None:
        raise ValueError(f"config: {section}.kind is missing; one of {', '.join(sorted(known))}")
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(f"config: {section}.kind {kind!r}, {did_you_mean(str(kind), list(known))}")
    return known[kind]


def _without_kind(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "kind"}


def _check_arguments(section: str, values: Mapping[str, Any], kind: type[Any]) -> None:
    parameters = inspect.signature(kind).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return  # it takes anything
    known = list(parameters)
    for name, value in _without_kind(values).items():
        if name not in known:
            raise ValueError(f"config: {section}.{name}, {did_you_mean(name, known)}")
        if _is_ours(kind):
            _typed(f"{section}.{name}", value, str(parameters[name].annotation))


# -- tables and the model --------------------------------------------------------------------------------------------


def _table_parts(name: str, values: Mapping[str, Any]) -> tuple[TableSection, dict[str, Any]]:
    """The entries of [tables.NAME] that describe the table, and those of its row optimizer."""
    optimizer = values.get("optimizer", TableSection.optimizer)
    if not isinstance(optimizer, str) or optimizer not in OPTIMIZERS:
        raise ValueError(
            f"config: tables.{name}.optimizer {optimizer!r}, {did_you_mean(str(optimizer), list(OPTIMIZERS))}"
        )
    settings = [field.name for field in dataclasses.fields(OPTIMIZERS[optimizer])]
    own = [field.name for field in dataclasses.fields(TableSection)]
    for entry in values:
        if entry not in settings and entry not in own:
            raise ValueError(f"config: tables.{name}.{entry}, {did_you_mean(entry, own + settings)}")
    table = _section(TableSection, f"tables.{name}", {k: v for k, v in values.items() if k in own})
    return table, {k: v for k, v in values.items() if k in settings}


def _tables(config: Config, data_features: Sequence[str]) -> tuple[list[Table], list[Feature]]:
    tables, features = [], []
    for pattern, values in config.tables.items():
        section, settings = _table_parts(pattern, values)
        wild = any(c in pattern for c in "*?[")
        names = fnmatch.filter(data_features, pattern) if wild else [pattern]
        if not names:
            raise ValueError(
                f"config: tables.{pattern!r} fits no feature of the data, which has {', '.join(data_features)}"
            )
        for name in names:
            tables.append(_table(name, section, settings))
            features.extend(_features(name, section, data_features))
    return tables, features


def _table(name: str, section: TableSection, settings: dict[str, Any]) -> Table:
    if section.dtype not in DTYPES:
        raise ValueError(f"config: tables.{name}.dtype {section.dtype!r}, {did_you_mean(section.dtype, list(DTYPES))}")
    if section.evict not in ("lru", "lfu"):
        raise ValueError(
            f"config: tables.{name}.evict {section.evict!r}, {did_you_mean(section.evict, ['lru', 'lfu'])}"
        )
    match section.init:
        case {"normal": float() | int() as std}:
            first: dict[str, Any] = {"std": std}
        case {"uniform": [float() | int() as low, float() | int() as high]}:
            first = {"low": low, "high": high}
        case _:
            raise ValueError(
                f"config: tables.{name}.init must be {{normal = std}} or {{uniform = [low, high]}}, got {section.init!r}"
            )
    try:
        evicts = section.max_rows is not None or section.ttl is not None
        return Table(
            name,
            section.dim,
            optimizer=OPTIMIZERS[section.optimizer](**settings),
            init=Normal(**first) if "std" in first else Uniform(**first),
            dtype=DTYPES[section.dtype],
            tier=section.tier,
            memory=section.memory,
            admit_after=section.admit_after,
            max_rare_keys=section.max_rare_keys,
            eviction=Eviction(max_rows=section.max_rows, policy=section.evict, ttl=section.ttl) if evicts else None,
            pooled_at=section.pooled_at,
            owners=None if section.owners == "all" else section.owners,
        )
    except ValueError as error:
        raise ValueError(f"config: tables.{name}: {error}") from error


def _features(table: str, section: TableSection, data_features: Sequence[str]) -> list[Feature]:
    wanted = section.features or [table]
    pairs = list(wanted.items()) if isinstance(wanted, dict) else [(name, section.pooling) for name in wanted]
    features = []
    for name, pooling in pairs:
        if name not in data_features:
            raise ValueError(
                f"config: tables.{table}: feature {name!r} of the data, {did_you_mean(name, data_features)}"
            )
        if pooling not in ("sequence", "sum", "mean"):
            near = did_you_mean(str(pooling), ["sequence", "sum", "mean"])
            raise ValueError(f"config: tables.{table}: pooling {pooling!r} of feature {name!r}, {near}")
        features.append(Feature(name, table, None if pooling == "sequence" else pooling))
    return features


def _model(config: Config, data: data_sets.Dataset, tables: list[Table], features: list[Feature]) -> nn.Module:
    """The model; `dim`, `features` and `num_dense` follow from tables and data unless given."""
    kind = _model_class(config.model)
    arguments = _without_kind(config.model)
    accepted = inspect.signature(kind).parameters
    dims = {table.dim for table in tables}
    if "dim" in accepted and "dim" not in arguments and len(dims) == 1:
        arguments["dim"] = dims.pop()
    if "features" in accepted and "features" not in arguments:
        arguments["features"] = [feature.name for feature in features]
    if "num_dense" in accepted and "num_dense" not in arguments:
        # "valid" first: it is not shuffled, so that its first batch is at hand.
        splits = (data.batches(split, batch_size=1, rank=0, world=1, seed=0) for split in ("valid", "train"))
        first = next(itertools.chain.from_iterable(splits), None)
        dense = None if first is None else first.dense.get("dense")
        arguments["num_dense"] = dense.shape[1] if isinstance(dense, torch.Tensor) else 0
    missing = [
        name
        for name, parameter in accepted.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and name not in arguments
    ]
    if missing:
        raise ValueError(f"config: model.{missing[0]} is missing")
    torch.manual_seed(config.train.seed)
    return _made("model", kind, arguments)


def _made(section: str, kind: type[Any], arguments: Mapping[str, Any]) -> Any:
    """Arguments that do not fit the signature are the config's fault; what goes wrong inside a class of the user's own is not,
    and its traceback shows the line."""
    try:
        inspect.signature(kind).bind(**arguments)
    except TypeError as error:
        raise ValueError(f"config: the entries of [{section}] do not fit {kind.__name__}: {error}") from error
    return kind(**arguments)


def _is_ours(kind: type[Any]) -> bool:
    return kind in (*DATASETS.values(), *MODELS.values())
