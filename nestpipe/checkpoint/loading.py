"""Reading a checkpoint on any number of workers. Every byte is checked, and everything compared with what is declared here,
before anything is changed."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.torch import load as tensors_from_bytes

from nestpipe import weights
from nestpipe.checkpoint import manifest as manifests
from nestpipe.checkpoint.manifest import (
    DENSE,
    OPTIMIZER,
    OPTIMIZER_SETTINGS,
    Damaged,
    Manifest,
    state_file,
    table_file,
)
from nestpipe.checkpoint.saving import declared
from nestpipe.checkpoint.settings import Settings
from nestpipe.engine.dense import Dense, remember
from nestpipe.engine.lr_scheduler import put_state, state_of
from nestpipe.exchange.hot import HotKeys
from nestpipe.exchange.transport import Transport
from nestpipe.kernels.keys import owners_of, shards
from nestpipe.store.table_store import TableStore
from nestpipe.tables import HotRows
from nestpipe.tensorfile import TensorReader

log = logging.getLogger("nestpipe")
BLOCK_BYTES = 8 << 20
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What the trainer wants back. positions: batches that each worker of then had taken from its data; data_states: what the
    data of each said of itself then. torch_rng: of this worker, where there were as many workers then."""

    step: int
    settings: Settings
    positions: Sequence[int]
    data_states: Sequence[Any]
    torch_rng: bytes | None


def load(
    path: Path,
    stores: Sequence[TableStore],
    dense: Dense,
    transport: Transport,
    *,
    tables: Sequence[str] | None = None,
    place: Callable[[str, Sequence[int] | None, Sequence[int] | None], None] = lambda table, owners, hot: None,
    hot: Callable[[str], HotKeys | None] = lambda table: None,
) -> Loaded:
    """tables: only these, the others stay as they are, and so does the rest of the checkpoint's tables.
    place: is told who held each table (see `_owners`), and its hot keys, before its rows come.
    hot: the hot keys of a table, from then on."""
    chain = _alike(transport, lambda: manifests.chain(path))
    wanted = _alike(transport, lambda: _wanted(chain[0], stores, tables))
    _alike(transport, lambda: _check(chain, transport))
    _alike(transport, lambda: _check_rows(chain, transport))
    positions, data_states, rng = _alike(transport, lambda: _read_states(chain[0], transport))
    put_dense = _alike(transport, lambda: _read_dense(chain[0].path, dense, transport))
    for store in wanted:
        place(store.table.name, _owners(chain[0], store, transport), chain[0].settings.hot.get(store.table.name, ()))
    held = [Held(store, hot(store.table.name), transport) for store in wanted]
    transport.together(lambda: _read_all(chain, held), what="checkpoint")
    _put_or_undo(put_dense, dense, transport)
    return Loaded(chain[0].step, chain[0].settings, positions, data_states, rng)


@dataclasses.dataclass(frozen=True)
class Held:
    """A store of this worker, and which keys belong into it. hot: those of its table that every worker holds."""

    store: TableStore
    hot: HotKeys | None
    transport: Transport

    @property
    def is_twin(self) -> bool:
        return isinstance(self.store.table, HotRows)

    def here(self, keys: np.ndarray, *, are_shards: bool) -> np.ndarray:
        """Which of them."""
        mine = owners_of(keys if are_shards else shards(keys), self.store.owners) == self.transport.rank
        if self.hot is None:
            return mine
        if are_shards:  # tables with rows that rare keys share have no hot ones
            return mine & (not self.is_twin)
        return mine & (self.hot.contains(keys) == self.is_twin)

    def writers(self, manifest: Manifest) -> list[int]:
        """Workers whose files may hold rows of this one: all of them, unless it has the same part now as then."""
        settings, name = manifest.settings, self.store.table.name
        hot_here, hot_there = [] if self.hot is None else self.hot.keys.tolist(), settings.hot.get(name) or []
        same = (
            manifest.world == self.transport.world
            and settings.owners.get(name) == self.store.owners.tolist()
            and settings.replicas.get(name, 1) == 1
            and hot_here == list(hot_there)
            and not self.is_twin
        )
        return [self.transport.rank] if same else list(range(manifest.world))


def _alike(transport: Transport, work: Callable[[], T]) -> T:
    """What goes wrong on a worker is raised on all. Where a checkpoint is to blame, in the words of the first: files are mostly
    the same for all of them."""
    problem: Exception | None = None
    try:
        result = work()
    except Exception as error:
        problem = error
    blames = isinstance(problem, ValueError)
    told = transport.gather_objects((isinstance(problem, Damaged), str(problem)) if blames else None)
    for damaged, text in filter(None, told):
        raise (Damaged if damaged else ValueError)(text)
    transport.raise_together(problem, what="checkpoint")
    return result


def _put_or_undo(put_dense: Callable[[], None], dense: Dense, transport: Transport) -> None:
    """The model may have code of its own that takes its state, and that may fail, on one worker too: then nothing has changed
    on any."""
    put_back, optimizer, scheduler = remember(dense.model), dense.optimizer, dense.lr_scheduler
    rates = None if scheduler is None else state_of(scheduler)
    before = None if optimizer is None else (optimizer.state, [dict(group) for group in optimizer.param_groups])
    try:
        transport.together(put_dense, what="checkpoint")
    except BaseException:
        put_back()
        if optimizer is not None and before is not None:
            optimizer.state, optimizer.param_groups = before
        if scheduler is not None:
            put_state(scheduler, rates)
        raise


def _check(chain: Sequence[Manifest], transport: Transport) -> None:
    """Every byte; workers share the reading."""
    mine = slice(transport.rank, None, transport.world)
    for manifest, name in manifests.to_check(chain)[mine]:
        _refuse(manifests.problem_of(manifest, name))


def _check_rows(chain: Sequence[Manifest], transport: Transport) -> None:
    """That every key has a row, here or in the full checkpoint; after `_check`."""
    for table, worker in manifests.parts(chain)[transport.rank :: transport.world]:
        _refuse(manifests.lost_row(chain, table, worker))


def _refuse(problem: str | None) -> None:
    if problem is not None:
        raise Damaged(f"{problem}. Nothing was loaded; take an earlier checkpoint")


def _wanted(manifest: Manifest, stores: Sequence[TableStore], tables: Sequence[str] | None) -> list[TableStore]:
    path = manifest.path
    here = {store.table.name: store for store in stores if not isinstance(store.table, HotRows)}
    saved = {table["name"]: table for table in manifest.tables}
    for name in tables or ():
        if name not in here:
            raise ValueError(f"there is no table {name!r} to load into; this trainer has {', '.join(sorted(here))}")
    names = list(here) if tables is None else list(tables)
    for name in names:
        if name not in saved:
            raise ValueError(
                f"{path} has no table {name!r}; it has {', '.join(sorted(saved))}. To start that table anew, load only the "
                f"others: tables=[...]"
            )
        for what, value in declared(here[name]).items():
            if what != "updates" and saved[name].get(what) != value:
                raise ValueError(f"table {name!r}: {what} is {value!r} here but {saved[name].get(what)!r} in {path}")
    extra = sorted(set(saved) - set(here))
    if tables is None and extra:
        raise ValueError(
            f"{path} has a table {extra[0]!r} that this trainer does not have; to leave it out, load only the tables that you "
            f"have: tables={names!r}"
        )
    return [store for store in stores if store.table.name in names]


def _read_states(manifest: Manifest, transport: Transport) -> tuple[list[int], list[Any], bytes | None]:
    """Every worker's place in its data, and what the data said of it; and this one's generator, if there were as many workers
    then."""
    world = manifest.world
    states = [json.loads((manifest.path / state_file(rank, world)).read_text()) for rank in range(world)]
    rng = None
    if world == transport.world:
        try:
            rng = base64.b64decode(states[transport.rank]["torch_rng"])
            torch.Generator().set_state(_as_state(rng))  # one that is of no account
        except (RuntimeError, binascii.Error) as error:
            raise Damaged(f"the random state of the checkpoint is of another version of torch: {error}") from None
    return [int(state["position"]) for state in states], [state.get("data") for state in states], rng


def _read_all(chain: Sequence[Manifest], stores: Sequence[Held]) -> None:
    newest = chain[0]
    saved = {table["name"]: table for table in newest.tables}
    for held in stores:
        store = held.store
        for worker in held.writers(newest):
            _load_table(newest.path / table_file(store.table.name, worker, newest.world), held)
        if len(chain) > 1:
            _load_unchanged(chain, held)
        # The last step is the last one that was trained on.
        store.resume(updates=saved[store.table.name]["updates"], step=max(0, newest.step - 1))


def _owners(manifest: Manifest, store: TableStore, transport: Transport) -> Sequence[int] | None:
    """The workers that held a table, or all if there were others; None if that was still to be decided."""
    owners = manifest.settings.owners.get(store.table.name)
    return owners if owners is None or manifest.world == transport.world else list(range(transport.world))


def _own(file: TensorReader, keys: str, values: str, held: Held) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """What belongs to this worker, in blocks."""
    row_bytes = 8 + int(np.prod(file.shape(values)[1:])) * 4
    size = max(1, BLOCK_BYTES // row_bytes)
    for start in range(0, file.shape(keys)[0], size):
        some = file.read(keys, start, start + size)
        mine = held.here(some, are_shards=keys == "shared")
        if mine.any():
            yield some[mine], file.read(values, start, start + size)[mine]


def _load_table(path: Path, held: Held) -> None:
    """Puts the rows of a file whose keys belong to this worker into its store."""
    store = held.store
    with TensorReader(path) as file:
        keys = "changed" if file.has("changed") else "keys"
        for some, records in _own(file, keys, "records", held):
            store.put(some, records)
        for some, records in _own(file, "shared", "shared_records", held):
            store.put(some, records, shared=True)
        for some, counts in _own(file, "seen", "sightings", held):
            store.put_sightings(some, counts)


def _load_unchanged(chain: Sequence[Manifest], held: Held) -> None:
    """Rows of the full checkpoint that still have a key and have not changed since."""
    store, (newest, base) = held.store, chain
    kept: list[np.ndarray] = []
    for worker in held.writers(newest):
        with TensorReader(newest.path / table_file(store.table.name, worker, newest.world)) as file:
            kept += [some for some, _ in _own(file, "keys", "keys", held)]
    keys = np.concatenate([np.empty(0, np.int64), *kept])
    positions = np.empty(len(keys), np.int64)
    store.directory.index.find(keys, positions)  # rows of their own; rare keys may share one besides
    missing = np.sort(keys[positions < 0])
    for worker in held.writers(base):
        path = base.path / table_file(store.table.name, worker, base.world)
        with TensorReader(path) as file:
            for some, records in _own(file, "keys", "records", held):
                at = np.searchsorted(missing, some)
                wanted = (
                    (at < len(missing)) & (missing[np.minimum(at, len(missing) - 1)] == some)
                    if len(missing)
                    else (np.zeros(len(some), bool))
                )
                if wanted.any():
                    store.put(some[wanted], records[wanted])


def _read_dense(path: Path, dense: Dense, transport: Transport) -> Callable[[], None]:
    """Reads the model and its optimizer and compares them with what is here; what it returns puts them there."""
    state_of_model = weights.from_bytes((path / DENSE).read_bytes())
    weights.check_fits(state_of_model, dense.model, where=path, kind="checkpoint")
    optimizer, scheduler = dense.optimizer, dense.lr_scheduler
    settings = None if optimizer is None else _read_settings(path)
    state = None if optimizer is None else _read_optimizer(path, optimizer, settings)
    rates = _rates_of(path, scheduler, settings, tells=transport.rank == 0)

    def put() -> None:
        dense.model.load_state_dict(state_of_model)
        if optimizer is not None:
            optimizer.load_state_dict(state)  # type: ignore[arg-type]
        if scheduler is not None:
            put_state(scheduler, rates)

    return put


def _read_settings(path: Path) -> Any:
    if not (path / OPTIMIZER_SETTINGS).exists():
        raise ValueError(f"{path} has no dense optimizer; the model had nothing to train when it was saved")
    return json.loads((path / OPTIMIZER_SETTINGS).read_text())


def _rates_of(path: Path, scheduler: Any, settings: Any, *, tells: bool) -> Any:
    """The state of the lr_scheduler. One that is here only would begin anew in the middle of a run; one that is there only is not
    needed to look at what was trained."""
    there, state = (settings or {}).get("lr_scheduler", (None, None))
    if scheduler is None:
        if there is not None and tells:
            log.warning(
                f"{path} has the state of an lr_scheduler ({there}), and there is none here: dense learning rates stay"
            )
        return None
    here = type(scheduler).__name__
    if there != here:
        was = f"with lr_scheduler {there}" if there else "without an lr_scheduler"
        raise ValueError(f"{path} was saved {was}, and the one here is {here}; make the trainer with the same")
    return state


def _read_optimizer(path: Path, optimizer: torch.optim.Optimizer, settings: Any) -> dict[str, Any]:
    groups, here = settings["param_groups"], optimizer.param_groups
    sizes, sizes_here = ([len(group["params"]) for group in some] for some in (groups, here))
    if sizes != sizes_here:
        raise ValueError(
            f"{path}: the dense optimizer of the checkpoint has groups of {sizes} parameters, the one here has {sizes_here}"
        )
    for group, group_here in zip(groups, here, strict=True):
        for name, value in group_here.items():
            if isinstance(value, torch.Tensor) and name in group:
                group[name] = torch.tensor(group[name], dtype=value.dtype, device=value.device)
    state: dict[int, dict[str, Any]] = {}
    tensors = tensors_from_bytes((path / OPTIMIZER).read_bytes())
    for key, value in [*tensors.items(), *settings["plain"].items()]:
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    return {"state": state, "param_groups": groups}


def set_torch_rng(state: bytes) -> None:
    """As `load` has returned it."""
    torch.set_rng_state(_as_state(state))


def _as_state(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
