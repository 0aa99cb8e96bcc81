"""Weights and optimizer state of TorchRec, or of plain torch, into the tables of a trainer."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestpipe.errors import did_you_mean
from nestpipe.optim import Adagrad, Adam, RowwiseAdagrad, ScaledRowwiseAdagrad
from nestpipe.tables import Table
from nestpipe.trainer import Trainer

SAMPLED = 64  # rows of a matrix by which workers see that all have the same one


def load_weights(
    trainer: Trainer,
    weights: Mapping[str, Any] | str | Path,
    *,
    names: Mapping[str, str] | None = None,
    optimizer: Mapping[str, Any] | str | Path | None = None,
    updates: int | None = None,
) -> dict[str, int]:
    """Rows of a TorchRec model, or of plain nn.Embedding, into the trainer's tables; how many each got, over all workers. Every
    worker calls it; each reads its part only, and rows go to the workers that hold them. See Trainer.put_rows.

    weights: a state dict, the same on every worker, or a file of one: safetensors, or what torch.save wrote (read with
        weights_only=True). A ShardedTensor gives the shards that this worker has.
    names: {table: entry of the state dict}, for these tables only. Left out, all tables: each from the one entry that is
        named after it, PREFIX.embedding_bags.TABLE.weight, PREFIX.embeddings.TABLE.weight, TABLE.weight or TABLE.
    optimizer: the state dict of the optimizer (TorchRec's `fused_optimizer.state_dict()`), or a file of it: then rows bring
        their state along. Left out, it begins anew.
    updates: how many updates have made it; Adam asks for it.
    """
    state = trainer.workers.together(lambda: _read(weights), what="weights")
    moments = None if optimizer is None else trainer.workers.together(lambda: _read(optimizer), what="optimizer state")
    tables = {store.table.name: store.table for store in trainer.stores}

    def part_of(name: str) -> _Part:
        if name not in tables:
            raise ValueError(f"names: table {name!r}, {did_you_mean(name, list(tables))}")
        entry = _entry(state, name) if names is None else names[name]
        if entry not in state:
            raise ValueError(f"names: entry {entry!r} of table {name!r}, {did_you_mean(entry, list(state))}")
        keys, rows = _part(state[entry], entry, trainer)
        part = _Part(keys, rows, None, [_sample(state[entry])])
        return part if moments is None else _with_state(part, moments, entry, tables[name], trainer)

    given = {}
    for name in tables if names is None else names:
        part = trainer.workers.together(functools.partial(part_of, name), what=f"table {name!r}")
        _check_alike(name, trainer.workers.gather(part.samples))
        trainer.put_rows(name, part.keys, part.rows, state=part.state, updates=updates)
        given[name] = sum(trainer.workers.gather(len(part.keys)))
    return given


def state_names(table: Table) -> tuple[str, ...]:
    """TorchRec's names of what lies beside a row."""
    optimizer = table.optimizer
    if isinstance(optimizer, Adam):
        return "exp_avg", "exp_avg_sq"
    by_row = isinstance(optimizer, ScaledRowwiseAdagrad) and optimizer.is_by_row
    if isinstance(optimizer, (Adagrad, RowwiseAdagrad, ScaledRowwiseAdagrad)) and not by_row:
        return ("momentum1",)
    if optimizer.state_floats(table.dim):
        raise ValueError(f"table {table.name!r}: TorchRec has no state like that of {optimizer}")
    return ()


class _Part(NamedTuple):
    """What this worker gives of a table. samples: of every matrix that it was cut from."""

    keys: Tensor
    rows: Tensor
    state: Tensor | None
    samples: list[Any]


def _read(source: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    if path.is_dir():
        raise ValueError(
            f"{path} is a folder; a checkpoint of torch.distributed.checkpoint becomes a file with "
            f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} FILE.pt"
        )
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(loaded, Mapping):
        raise ValueError(f"{path} holds a {type(loaded).__name__}, not a state dict")
    return loaded


def _entry(state: Mapping[str, Any], table: str) -> str:
    endings = (f".embedding_bags.{table}.weight", f".embeddings.{table}.weight")
    plain = (f"{table}.weight", table)
    fitting = [name for name in state if name in plain or f".{name}".endswith(endings)]
    if len(fitting) == 1:
        return fitting[0]
    matrices = [name for name, values in state.items() if len(getattr(values, "shape", ())) == 2]
    inner = [name for name, values in state.items() if isinstance(values, Mapping)]
    if inner and not matrices and not fitting:
        raise ValueError(
            f"table {table!r}: these are dicts of dicts, {', '.join(inner)}; give the one with the weights, as in "
            f"torch.load(FILE, weights_only=True)[{inner[0]!r}]"
        )
    which = f"{fitting[0]!r} and {fitting[1]!r} both fit" if fitting else "no entry is named after it"
    raise ValueError(
        f"table {table!r}: {which}; say which with names={{{table!r}: ...}}. Matrices: {', '.join(matrices)}"
    )


def _part(values: Any, entry: str, trainer: Trainer) -> tuple[Tensor, Tensor]:
    """The rows that this worker gives, and their numbers: its shards, or of a whole matrix its part."""
    if hasattr(values, "local_shards"):
        shards = [(shard.metadata.shard_offsets, shard.tensor) for shard in values.local_shards()]
        width = values.size()[1:]
        for offsets, tensor in shards:
            if any(offsets[1:]) or tensor.shape[1:] != width:
                raise ValueError(f"{entry} is sharded by column: gather it first, or shard it by row or by table")
        keys = [torch.arange(tensor.shape[0]) + offsets[0] for offsets, tensor in shards]
        empty = torch.empty(0, *width)
        return torch.cat([torch.arange(0), *keys]), torch.cat([tensor for _, tensor in shards]) if shards else empty
    if hasattr(values, "full_tensor"):
        raise ValueError(f"{entry} is a DTensor: give what its full_tensor() returns, on every worker")
    if not isinstance(values, Tensor) or not values.ndim:
        raise ValueError(f"{entry} must be a tensor with one row per key, got {type(values).__name__}")
    count, rank, world = len(values), trainer.rank, trainer.world
    mine = slice(count * rank // world, count * (rank + 1) // world)
    return torch.arange(mine.start, mine.stop), values[mine]


def _sample(values: Any) -> tuple[Any, ...]:
    """Of a whole matrix its shape and some of its rows, to the bit; of a ShardedTensor its shape only."""
    if not isinstance(values, Tensor):
        return ("sharded", tuple(values.size()))
    count = len(values)
    places = [number * (count - 1) // max(1, SAMPLED - 1) for number in range(SAMPLED)] if count else []
    rows = values.detach()[torch.tensor(places, dtype=torch.int64)].cpu().contiguous()
    return tuple(values.shape), str(values.dtype), rows.view(torch.uint8).numpy().tobytes()


def _check_alike(table: str, told: list[Any]) -> None:
    """Each worker takes its part of a whole matrix: if each had a shard of it, as a plain tensor, rows would go to wrong keys."""
    for rank, samples in enumerate(told):
        if samples != told[0]:
            raise ValueError(
                f"table {table!r}: rank {rank} has another matrix than rank 0; give every worker the whole one (a file of each "
                f"worker's shard will not do: join them first, or give each shard with trainer.put_rows and its keys)"
            )


def _with_state(part: _Part, moments: Mapping[str, Any], entry: str, table: Table, trainer: Trainer) -> _Part:
    """Of the rows that this worker gives."""
    words = state_names(table)
    of_row = moments.get("state", moments).get(entry)
    if not words:
        return part
    if of_row is None:
        raise ValueError(f"the optimizer has no state of {entry!r}")
    columns, samples = [], []
    for word in words:
        found = [of_row[name] for name in (f"{table.name}.{word}", word) if name in of_row]
        if not found:
            raise ValueError(
                f"the optimizer has no {word!r} of {entry!r}, which {type(table.optimizer).__name__} needs; it has "
                f"{', '.join(of_row)}: declare the optimizer that made it, or leave optimizer= out"
            )
        numbers, column = _part(found[0], f"{word} of {entry}", trainer)
        if not torch.equal(numbers, part.keys):
            raise ValueError(f"{word} of {entry!r} is for other rows than the weights are")
        columns.append((column[:, None] if column.ndim == 1 else column).float())
        samples.append(_sample(found[0]))
    return part._replace(state=torch.cat(columns, 1), samples=part.samples + samples)
