"""Tables and features from TorchRec's configs."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch

from nestpipe.optim import RowOptimizer
from nestpipe.tables import Feature, Init, Normal, Table, Uniform, check_declarations

DTYPES = {"FP32": torch.float32, "BF16": torch.bfloat16}
POOLINGS = {"SUM": "sum", "MEAN": "mean", "NONE": None}
Configs = Iterable[Any]


def declare(configs: Configs, *, optimizer: RowOptimizer, **options: Any) -> tuple[list[Table], list[Feature]]:
    """Tables and features from TorchRec's EmbeddingBagConfig and EmbeddingConfig objects, or from its collections of them.

    A bag of `pooling` SUM or MEAN becomes a pooled feature, an EmbeddingConfig a sequence. First values are drawn from the same
    range; num_embeddings is not needed: tables grow. A feature that several tables read is declared once for each, under
    the name that TorchRec gives to what comes out, "feature@table"; a batch has to have its keys under each of them.

    optimizer: of every table; TorchRec's configs do not say. For tables that differ, dataclasses.replace what this returns.
    options: of every Table, in place of what the configs say: `tier="disk"`, `dtype=`, `init=`.
    """
    found = list(configs_of(configs))
    uses = [name for config in found for name in _feature_names(config)]
    tables, features = [], []
    for config in found:
        unsupported = [name for name in ("need_pos", "num_embeddings_post_pruning") if getattr(config, name, None)]
        if unsupported:
            raise ValueError(f"table {config.name!r}: nestpipe has nothing like {unsupported[0]}; leave it out")
        declared = {"init": _init, "dtype": _dtype}
        chosen = {name: options[name] if name in options else read(config) for name, read in declared.items()}
        tables.append(Table(config.name, config.embedding_dim, **{"optimizer": optimizer, **options, **chosen}))
        for name in _feature_names(config):
            unique = name if uses.count(name) < 2 else f"{name}@{config.name}"
            features.append(Feature(unique, config.name, _pooling(config)))
    check_declarations(tables, features)
    return tables, features


def configs_of(configs: Configs) -> Iterable[Any]:
    """Those of collections too, alone or in a list."""
    for listed in ("embedding_bag_configs", "embedding_configs"):
        if hasattr(configs, listed):
            yield from getattr(configs, listed)()
            return
    for config in configs:
        if hasattr(config, "embedding_dim"):
            yield config
        elif hasattr(config, "embedding_bag_configs") or hasattr(config, "embedding_configs"):
            yield from configs_of(config)
        else:
            raise ValueError(
                f"{config!r:.80} is neither an EmbeddingBagConfig or EmbeddingConfig nor a collection of them"
            )


def _feature_names(config: Any) -> list[str]:
    return config.feature_names or [config.name]  # as TorchRec does


def _pooling(config: Any) -> str | None:
    pooling = getattr(config, "pooling", None)
    word = str(getattr(pooling, "value", pooling or "NONE")).upper()
    if word not in POOLINGS:
        raise ValueError(f"table {config.name!r}: pooling {pooling!r}, use one of {', '.join(POOLINGS)}")
    return POOLINGS[word]


def _dtype(config: Any) -> torch.dtype:
    kind = getattr(config, "data_type", "FP32")
    word = str(getattr(kind, "value", kind))
    if word not in DTYPES:
        raise ValueError(
            f"table {config.name!r}: rows of {word} are not trained here; say dtype=torch.float32 or bfloat16"
        )
    return DTYPES[word]


def _init(config: Any) -> Init:
    """What its init_fn draws from, or TorchRec's default: uniform, up to the root of 1 / num_embeddings."""
    draw = getattr(config, "init_fn", None)
    if isinstance(draw, functools.partial) and draw.func is torch.nn.init.uniform_ and {"a", "b"} <= set(draw.keywords):
        return Uniform(draw.keywords["a"], draw.keywords["b"])
    if isinstance(draw, functools.partial) and draw.func is torch.nn.init.normal_ and not draw.keywords.get("mean"):
        return Normal(draw.keywords.get("std", 1.0))
    if draw is not None:
        raise ValueError(
            f"table {config.name!r}: what its init_fn draws is not known; say init=Uniform(...) or Normal(...)"
        )
    high = math.sqrt(1 / config.num_embeddings)
    given = getattr(config, "weight_init_min", None), getattr(config, "weight_init_max", None)
    return Uniform(-high if given[0] is None else given[0], high if given[1] is None else given[1])
