"""Rows and optimizer state of a trainer as state dicts of TorchRec or plain torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nestpipe.errors import did_you_mean
from nestpipe.migration.declarations import Configs, configs_of
from nestpipe.migration.load import state_names
from nestpipe.trainer import Trainer

BLOCK = 1 << 16  # rows that travel together


def state_dict(
    trainer: Trainer, sizes: Mapping[str, int] | Configs, *, names: Mapping[str, str] | None = None
) -> dict[str, Tensor]:
    """The opposite of load_weights: {entry: weight [num_embeddings, dim]} on the first worker, nothing on the others; every
    worker calls it. A key that was never trained on has the row that it would be born with. A key that has a row but is not below
    the size is an error: nothing is left out in silence.

    sizes: {table: num_embeddings}, for entries TABLE.weight; or TorchRec's configs or collections, for its own names.
    names: {table: entry}, in place of these.
    """
    wanted = _wanted(trainer, sizes, names)
    dtypes = {store.table.name: store.table.dtype for store in trainer.stores}
    weights = {
        entry: _read_all(trainer, size, functools.partial(trainer.rows, name)).to(dtypes[name])
        for name, (entry, size) in wanted.items()
    }
    return weights if trainer.workers.is_first else {}


def optimizer_state(
    trainer: Trainer, sizes: Mapping[str, int] | Configs, *, names: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The optimizer state of the same rows, under the same entries and in TorchRec's words: {"state": {entry: {"TABLE.momentum1":
    [num_embeddings] or [num_embeddings, dim]}}}; "TABLE.exp_avg" and "TABLE.exp_avg_sq" of Adam."""
    wanted = _wanted(trainer, sizes, names)
    tables = {store.table.name: store.table for store in trainer.stores}
    moments: dict[str, dict[str, Tensor]] = {}
    for name, (entry, size) in wanted.items():
        words = state_names(tables[name])
        state = _read_all(trainer, size, functools.partial(trainer.row_state, name))
        columns = state.split(tables[name].dim, 1) if len(words) > 1 else [state] * len(words)
        moments[entry] = {
            f"{name}.{word}": column[:, 0] if column.shape[1] == 1 else column.contiguous()
            for word, column in zip(words, columns, strict=True)
        }
    return {"state": moments} if trainer.workers.is_first else {}


def _wanted(
    trainer: Trainer, sizes: Mapping[str, int] | Configs, names: Mapping[str, str] | None
) -> dict[str, tuple[str, int]]:
    """{table: (entry, size)}, every row within it; raises the same on all workers."""
    wanted = trainer.workers.together(lambda: _asked(sizes, names or {}), what="sizes and names")
    told = trainer.workers.gather(wanted)
    if any(other != told[0] for other in told):
        raise ValueError("workers were told different sizes or names; give every worker the same")
    for name, (_, size) in wanted.items():
        keys = trainer.keys(name)
        outside = keys[(keys < 0) | (keys >= size)]
        beyond = [key for key in trainer.workers.gather(int(outside[0]) if len(outside) else None) if key is not None]
        if beyond:
            raise ValueError(
                f"table {name!r}: key {beyond[0]} has a row, but a matrix of {size:,} rows has none of that number: give a larger"
                f" size, or export keys and rows instead: trainer.keys, trainer.rows, nestpipe export"
            )
    return wanted


def _asked(sizes: Mapping[str, int] | Configs, names: Mapping[str, str]) -> dict[str, tuple[str, int]]:
    if isinstance(sizes, Mapping):
        asked = {name: (f"{name}.weight", size) for name, size in sizes.items()}
    else:
        kinds = {True: "embedding_bags", False: "embeddings"}
        asked = {
            config.name: (f"{kinds[hasattr(config, 'pooling')]}.{config.name}.weight", config.num_embeddings)
            for config in configs_of(sizes)
        }
    unknown = [name for name in names if name not in asked]
    if unknown:
        raise ValueError(f"names: table {unknown[0]!r}, {did_you_mean(unknown[0], list(asked))}")
    asked = {name: (names.get(name, entry), size) for name, (entry, size) in asked.items()}
    entries = [entry for entry, _ in asked.values()]
    twice = [name for name, (entry, _) in asked.items() if entries.count(entry) > 1]
    if twice:
        raise ValueError(f"names: tables {twice[0]!r} and {twice[1]!r} have the same entry {asked[twice[0]][0]!r}")
    return asked


def _read_all(trainer: Trainer, size: int, read: Callable[[Tensor], Tensor]) -> Tensor:
    """What keys 0 .. size - 1 have, for the first worker; the others ask for none, as often."""
    blocks = (torch.arange(start, min(start + BLOCK, size)) for start in range(0, max(1, size), BLOCK))
    return torch.cat([read(keys if trainer.workers.is_first else keys[:0]) for keys in blocks])
