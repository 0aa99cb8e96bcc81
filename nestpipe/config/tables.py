"""From [tables.NAME] to Table and Feature."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from nestpipe.config.sections import DTYPES, TableSection, TrainSection, section
from nestpipe.errors import did_you_mean
from nestpipe.fields import check, hints
from nestpipe.optim import OPTIMIZERS
from nestpipe.tables import POOLINGS, Eviction, Feature, Table, init_of


def declared(name: str, values: Mapping[str, Any]) -> tuple[TableSection, dict[str, Any]]:
    """The entries of [tables.NAME] that describe the table, and those of its row optimizer."""
    own = hints(TableSection)
    optimizer = check(
        f"config: tables.{name}.optimizer", values.get("optimizer", TableSection.optimizer), own["optimizer"]
    )
    settings = [field.name for field in dataclasses.fields(OPTIMIZERS[optimizer])]
    for entry in values:
        if entry not in settings and entry not in own:
            raise ValueError(f"config: tables.{name}.{entry}, {did_you_mean(entry, [*own, *settings])}")
    table = section(TableSection, f"tables.{name}", {entry: values[entry] for entry in values if entry in own})
    return table, {entry: values[entry] for entry in values if entry in settings}


def make_tables(
    sections: Mapping[str, Mapping[str, Any]], data_features: Sequence[str], train: TrainSection
) -> tuple[list[Table], list[Feature]]:
    tables, features = [], []
    for pattern, values in sections.items():
        declaration, settings = declared(pattern, values)
        is_wild = any(character in pattern for character in "*?[")
        names = fnmatch.filter(data_features, pattern) if is_wild else [pattern]
        if not names:
            raise ValueError(
                f"config: tables.{pattern!r} fits no feature of the data, which has {', '.join(data_features)}"
            )
        for name in names:
            tables.append(make_table(name, declaration, settings, train))
            features.extend(_features(name, declaration, data_features))
    return tables, features


def make_table(name: str, declaration: TableSection, settings: Mapping[str, Any], train: TrainSection) -> Table:
    """What Table, Eviction and the row optimizer refuse is told with the table's section."""
    lr_schedule = declaration.lr_schedule(name, train)
    try:
        evicts = declaration.max_rows is not None or declaration.ttl is not None
        return Table(
            name,
            declaration.dim,
            optimizer=OPTIMIZERS[declaration.optimizer](**settings),
            init=init_of(declaration.init),
            dtype=DTYPES[declaration.dtype],
            tier=declaration.tier,
            memory=declaration.memory,
            admit_after=declaration.admit_after,
            max_rare_keys=declaration.max_rare_keys,
            eviction=Eviction(max_rows=declaration.max_rows, policy=declaration.evict, ttl=declaration.ttl)
            if evicts
            else None,
            pooled_at=declaration.pooled_at,
            owners=None if declaration.owners == "all" else declaration.owners,
            replicas=declaration.replicas,
            sync=declaration.sync,
            sync_every=declaration.sync_every,
            hot=declaration.hot,
            lr_schedule=lr_schedule,
            frozen_until=declaration.frozen_until,
        )
    except ValueError as error:
        raise ValueError(f"config: tables.{name}: {error}") from error


def _features(table: str, declaration: TableSection, data_features: Sequence[str]) -> list[Feature]:
    wanted = declaration.features or [table]
    poolings = wanted if isinstance(wanted, dict) else dict.fromkeys(wanted, declaration.pooling)
    for name in poolings:
        if name not in data_features:
            raise ValueError(
                f"config: tables.{table}: feature {name!r} of the data, {did_you_mean(name, data_features)}"
            )
    return [
        Feature(name, table, pooling if pooling in POOLINGS else None, streamed=pooling == "streamed")
        for name, pooling in poolings.items()
    ]
