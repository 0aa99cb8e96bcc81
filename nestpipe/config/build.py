"""The objects that a Config describes."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from typing import Any

import torch
from torch import nn

from nestpipe.config.fitted import note_fitted
from nestpipe.config.kinds import check_features, dataset_class
from nestpipe.config.sections import DENSE_OPTIMIZERS, Config
from nestpipe.config.tables import make_tables
from nestpipe.data import Dataset
from nestpipe.kinds import arguments, made, model_class
from nestpipe.tables import Feature, Table


@dataclasses.dataclass
class Built:
    """recipe: the model's kind and all its arguments, those too that follow from tables and data: enough to make it again."""

    data: Dataset
    model: nn.Module
    recipe: dict[str, Any]
    tables: list[Table]
    features: list[Feature]
    dense_optimizer: Any


def build(config: Config) -> Built:
    data = made("data", dataset_class(config.data), arguments(config.data))
    check_features(data)
    note_fitted(config, data)
    tables, features = make_tables(config.tables, data.features, config.train)
    recipe = _recipe(config, data, tables, features)
    torch.manual_seed(config.train.seed)
    model = made("model", model_class(recipe), arguments(recipe))
    make = DENSE_OPTIMIZERS[config.train.dense_optimizer]

    def dense_optimizer(parameters: Any) -> torch.optim.Optimizer:
        return make(parameters, lr=config.train.dense_lr, weight_decay=config.train.dense_weight_decay)

    return Built(data, model, recipe, tables, features, dense_optimizer)


def _recipe(config: Config, data: Dataset, tables: list[Table], features: list[Feature]) -> dict[str, Any]:
    """The model's kind and arguments: `dim`, `features`, `negatives_per` and `num_dense` follow from tables and data unless
    given."""
    kind = model_class(config.model)
    given = arguments(config.model)
    accepted = inspect.signature(kind).parameters
    dims = {table.dim for table in tables}
    if "dim" in accepted and "dim" not in given and len(dims) == 1:
        given["dim"] = dims.pop()
    drawn_per = getattr(data, "negatives_per", None)
    if (
        "negatives_per" in accepted
        and drawn_per is not None
        and given.setdefault("negatives_per", drawn_per) != drawn_per
    ):
        raise ValueError(
            f"config: model.negatives_per is {given['negatives_per']!r}, data.negatives_per {drawn_per!r}; leave that of the "
            f"model out, it follows from the data"
        )
    if "features" in accepted and "features" not in given:
        given["features"] = [feature.name for feature in features]
    if "num_dense" in accepted and "num_dense" not in given:
        # "valid" first: it is not shuffled, so that its first batch is at hand.
        splits = (data.batches(split, batch_size=1, rank=0, world=1, seed=0) for split in ("valid", "train"))
        first = next(itertools.chain.from_iterable(splits), None)
        dense = None if first is None else first.dense.get("dense")
        given["num_dense"] = dense.shape[1] if isinstance(dense, torch.Tensor) else 0
    for name, parameter in accepted.items():
        takes_any = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if parameter.default is parameter.empty and not takes_any and name not in given:
            raise ValueError(f"config: model.{name} is missing")
    return {"kind": config.model["kind"], **given}
