"""Writing a checkpoint: every worker its own part, in the foreground or in a forked process while training goes on.

A forked process has the worker's memory as it was at that instant (the system copies a page when one of the two writes to it),
so all that training waits for is the fork. Its part complete, each tells so in a small file; the first worker's process waits for
all of them, writes the manifest and gives the folder its name. Before that nobody takes it for a checkpoint; whatever goes wrong,
the ones before it stay as they are.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import shutil
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial as bound
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as tensors_to_bytes

from nestpipe.checkpoint import manifest as manifests
from nestpipe.checkpoint.forked import Child, fork
from nestpipe.checkpoint.manifest import (
    DENSE,
    EXTRA,
    OPTIMIZER,
    OPTIMIZER_SETTINGS,
    Base,
    Damaged,
    Manifest,
    checksum,
    state_file,
    sync_folder,
    table_file,
    write_durably,
)
from nestpipe.engine.dense import Dense
from nestpipe.errors import NO_ROOM, TrainingError, describe
from nestpipe.exchange.transport import Transport
from nestpipe.store.table_store import TableStore
from nestpipe.tensorfile import TensorWriter

MOMENT = 0.05  # seconds
HEAD_START = 0.25  # seconds in which training fills its pipeline and copies the pages it changes in every step
SILENCE = 60.0  # seconds that training waits for a checkpoint before it says so
# A worker that leaves gives a checkpoint up when no worker has written any more of it for so many seconds; LEAVING if it leaves
# because of an error: the others may be gone.
QUIET, LEAVING = 300.0, 5.0
WORD = 2.0  # seconds that a worker that leaves waits for it before it says so
PATIENCE = 3600.0  # seconds that the first worker waits for the parts of the others

Part = tuple[str, Callable[[Path], None]]  # a file's name and what writes it


@dataclasses.dataclass(frozen=True)
class Content:
    """What there is to save, on one worker, all of one instant.

    position: batches that this worker has taken from its data. settings: what else the trainer wants back.
    base: the full checkpoint, in the same folder, since which only what changed is written; None: all is.
    """

    stores: Sequence[TableStore]
    dense: Dense
    step: int
    position: int
    settings: Mapping[str, Any]
    base: Base | None = None


def declared(store: TableStore) -> dict[str, Any]:
    table = store.table
    return {
        "name": table.name,
        "dim": table.dim,
        "dtype": str(table.dtype),
        "optimizer": type(table.optimizer).__name__,
        "counters": table.eviction is not None,
        "admit_after": table.admit_after,
        "seed": store.seed,
        "updates": store.updates,
    }


# -- in the foreground -------------------------------------------------------------------------------------------------


def save(path: Path, content: Content, transport: Transport) -> None:
    """Returns when the checkpoint is there; what goes wrong on one worker is raised on all, and nothing is left of it."""
    if transport.gather_objects(os.path.exists(path))[0]:
        raise ValueError(f"{path} exists already; save each checkpoint to a new folder")
    partial = _partial(path)
    first = transport.rank == 0
    try:
        transport.together((lambda: _make_empty(partial)) if first else None, what="checkpoint")
        parts: list[Part] = []
        make = bound(_parts, content, transport.rank, transport.world, save_table=_save_table)
        transport.together(lambda: parts.extend(make()), what="checkpoint")
        transport.together(lambda: _write_part(partial, parts, transport.rank), what="checkpoint")
        finish = _finisher(partial, path, content, transport.world)
        transport.together(finish if first else None, what="checkpoint")
    except TrainingError:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


# -- in the background -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Writing:
    """A checkpoint that a forked process writes this worker's part of."""

    child: Child
    path: Path
    is_full: bool
    rank: int
    tell: Callable[[str], None]

    @property
    def partial(self) -> Path:
        return _partial(self.path)

    def speak_for_it(self) -> None:
        """A process that was killed has told nobody: the first worker's waits for its part."""
        done = self.partial / _done_file(self.rank)
        if self.child.problem is not None and not done.exists():
            with contextlib.suppress(OSError):
                done.write_text(json.dumps({"failed": str(self.child.problem)}))

    def leave(self) -> None:
        """Waits as a worker that leaves does, because the process that writes ends with it. Of the others it knows only what they
        write."""
        if os.getpid() != self.child.parent:
            return  # a copy of the worker that somebody else has forked
        patience = LEAVING if sys.exc_info()[0] is not None else QUIET
        begin = changed = time.monotonic()
        before, said = self._state(), False
        while self.child.is_running():
            time.sleep(0.01)
            now, state = time.monotonic(), self._state()
            if state != before:
                before, changed = state, now
            if now - changed > patience:
                self.tell(
                    f"{self.path.name} is given up: nothing more of it was written to {self.path.parent} for {patience:g} s"
                )
                return
            if not said and now - begin > WORD:
                said = True
                self.tell(
                    f"rank {self.rank} waits for {self.path.name}, which is still being written to {self.path.parent}"
                )
        self.speak_for_it()
        if self.child.problem is not None:
            self.tell(f"{self.path.name} was not saved: rank {self.rank}: {self.child.problem}")

    def _state(self) -> list[tuple[str, int]]:
        try:
            with os.scandir(self.partial) as files:
                return sorted((file.name, file.stat().st_size) for file in files)
        except OSError:  # it has its name by now
            return []


class Background:
    """Checkpoints in a folder, one at a time, written while training goes on. The folder is that of one run: what another has
    saved there would be taken for a checkpoint of this one, or be removed as if it were.

    run, step: of the trainer, now. keep: how many stay. full_every: of so many checkpoints one is full, the others hold what
    changed since it. tell: called on the first worker with what is worth knowing.
    """

    def __init__(
        self,
        folder: Path,
        transport: Transport,
        *,
        run: str | None,
        step: int,
        keep: int,
        full_every: int,
        tell: Callable[[str], None],
    ) -> None:
        problem = transport.gather_objects(_not_ours(folder, run, step) if transport.rank == 0 else None)[0]
        if problem is not None:
            raise ValueError(problem)
        self.folder, self._transport, self._keep, self._full_every = folder, transport, keep, full_every
        self._tell = tell
        self._writing: Writing | None = None
        self._leave: weakref.finalize | None = (
            None  # of what is being written: when this is closed, forgotten, or at exit
        )
        self._stores: Sequence[TableStore] = []
        self._base: Base | None = None  # the last full one that is complete
        self._since_full = 0
        self.stalls: list[float] = []  # seconds that training waited for each

    def next_base(self) -> Base | None:
        """What the next checkpoint is to build on; None: it is full. All workers call it."""
        base = self._base if self._since_full < self._full_every - 1 else None
        if base is None:
            return None
        return base if self._transport.gather_objects(self._is_there(base))[0] else None

    def _is_there(self, base: Base) -> bool:
        """Somebody may have tidied up."""
        if self._transport.rank > 0:
            return True
        try:
            return manifests.read(self.folder / base.name).crc == base.crc
        except Damaged:
            return False

    def begin(self, content: Content) -> None:
        """All workers call it, while no batch is under way, and after `wait`."""
        begin = time.perf_counter()
        transport, path = self._transport, self.folder / manifests.folder_of(content.step)
        partial, exists, problem = _partial(path), False, None
        try:
            if transport.rank == 0:
                exists = path.exists()  # it was saved before the run was resumed
                _make_empty(partial)
            for store in content.stores:
                store.freeze()
            parts = _parts(content, transport.rank, transport.world, save_table=_save_frozen)
        except Exception as error:
            problem = error
        self._stores = content.stores
        told = transport.gather_objects((exists, _described(problem)))
        if told[0][0] or self._failed([text for _, text in told], content.step):
            self._clear(partial)
            return
        finish = _finisher(partial, path, content, transport.world, lambda: manifests.prune(self.folder, self._keep))

        def work() -> str:
            try:
                for store in content.stores:
                    store.open_frozen()
                time.sleep(HEAD_START)
                _write_part(partial, parts, transport.rank)
            finally:
                for store in content.stores:
                    store.close_frozen()
            if transport.rank > 0:
                return ""
            _wait_for_all(partial, transport.world)
            return f"{finish():08x}"

        try:
            child = fork(work)
        except OSError as error:  # no memory for another process, or too many of them
            child = Child(0, -1, error)
        self._writing = Writing(child, path, content.base is None, transport.rank, self._tell)
        self._leave = weakref.finalize(self, self._writing.leave)
        self.stalls.append(time.perf_counter() - begin)

    def wait(self) -> None:
        """Until the checkpoint under way is complete, or has failed: that is told, and training goes on."""
        if self._writing is None:
            return
        child, path = self._writing.child, self._writing.path
        # In turns of a moment each: the slowest disk may take longer than workers wait for each other.
        begin: float | None = time.monotonic()
        while self._transport.any(child.is_running()):
            time.sleep(MOMENT)
            if not child.is_running():
                self._writing.speak_for_it()
            if begin is not None and time.monotonic() - begin > SILENCE:
                if self._transport.rank == 0:
                    self._tell(f"training waits for {path.name}, which is still being written to {self.folder}")
                begin = None
        told = self._transport.gather_objects((_described(child.problem), child.returned))
        is_full, self._writing = self._writing.is_full, None
        assert self._leave is not None
        self._leave.detach()
        failed = self._failed([text for text, _ in told], manifests.step_of(path.name))
        self._clear(_partial(path))
        if not failed:
            if is_full:
                self._base = Base(path.name, int(told[0][1], 16))
            self._since_full = 0 if is_full else self._since_full + 1

    def close(self) -> None:
        """Waits for a checkpoint that is under way, as long as more of it is written; after an error not for long."""
        if self._leave is not None:
            self._leave()

    def _clear(self, partial: Path) -> None:
        """What is left of a checkpoint that is complete, or will not be."""
        for store in self._stores:
            store.thaw()
        if self._transport.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)

    def _failed(self, told: Sequence[str | None], step: int) -> bool:
        """Whether a worker has told a problem; the first worker makes it known. The next one then is full: it must not build on
        a folder in which something is wrong."""
        causes = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None]
        if causes:
            self._base = None
        if causes and self._transport.rank == 0:
            kept = manifests.complete(self.folder)
            newest = f"the newest is {kept[0].name}" if kept else "there is none yet"
            full = any(os.strerror(number) in cause for cause in causes for number in NO_ROOM)
            advice = f". Make room in {self.folder}, or set train.checkpoints to another folder" if full else ""
            self._tell(f"checkpoint of step {step} failed, training goes on ({newest}): {'; '.join(causes)}{advice}")
        return bool(causes)


def _not_ours(folder: Path, run: str | None, step: int) -> str | None:
    """Why a trainer of this run, after this many steps, must not save into a folder."""
    other = f"save to another folder, or move what is in {folder} away"
    for path in manifests.complete(folder):
        if manifests.step_of(path.name) > step:
            return (
                f"{folder} has a checkpoint of a later step, {path.name}, than this trainer is at ({step}): load it to go on "
                f"from there; or {other}"
            )
        with contextlib.suppress(Damaged):
            if manifests.read(path).settings.get("run") != run:
                return f"{folder} has checkpoints of another run ({path.name}): {other}"
    return None


def _described(problem: BaseException | None) -> str | None:
    return None if problem is None else describe(problem)


# -- parts -------------------------------------------------------------------------------------------------------------


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _make_empty(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _parts(content: Content, rank: int, world: int, *, save_table: Callable[..., None]) -> list[Part]:
    """What torch holds is copied here and now."""
    since = None if content.base is None else content.base.step
    parts: list[Part] = [
        (table_file(store.table.name, rank, world), bound(save_table, store=store, since=since))
        for store in content.stores
    ]
    state = {
        "position": content.position,
        "torch_rng": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
    }
    parts.append((state_file(rank, world), _writer(json.dumps(state).encode())))
    if rank == 0:
        parts.append((DENSE, _writer(_model_bytes(content.dense.model))))
        if content.dense.optimizer is not None:
            parts += _optimizer_parts(content.dense.optimizer)
    for store in content.stores:
        store.records(np.empty(0, np.int64))  # its kernels are loaded now, not by a process that must not take locks
    return parts


def _model_bytes(model: torch.nn.Module) -> bytes:
    state = model.state_dict()
    # Clones, because the format refuses tensors that share memory: tied weights.
    weights = {n: t.detach().cpu().contiguous().clone() for n, t in state.items() if isinstance(t, torch.Tensor)}
    extra = {name: value for name, value in state.items() if name not in weights}
    for name, value in extra.items():
        changed = _changed_by_json(value)
        if changed is not None:
            raise ValueError(
                f"the model's {name} ({changed}) can only be saved if get_extra_state gives a tensor or what JSON holds: "
                f"numbers, text, None, lists, and dicts whose keys are text"
            )
    return tensors_to_bytes(weights, metadata={EXTRA: json.dumps(extra)})


def _changed_by_json(value: Any) -> str | None:
    """The first thing in it that JSON refuses, or gives back as something else."""
    if isinstance(value, dict):
        keys = (f"a key {key!r}" for key in value if not isinstance(key, str))
        return next(keys, None) or _changed_by_json(list(value.values()))
    if isinstance(value, list):
        return next((changed for changed in map(_changed_by_json, value) if changed is not None), None)
    return None if value is None or isinstance(value, (str, int, float)) else f"a {type(value).__name__}"


def _writer(content: bytes) -> Callable[[Path], None]:
    return lambda path: write_durably(path, content)


def _optimizer_parts(optimizer: torch.optim.Optimizer) -> list[Part]:
    state = optimizer.state_dict()
    tensors, plain = {}, {}
    for index, entries in state["state"].items():
        for name, value in entries.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{index}.{name}"] = value.detach().cpu().contiguous().clone()
            else:
                plain[f"{index}.{name}"] = value
    groups = [
        {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in group.items()}
        for group in state["param_groups"]
    ]
    settings = {"plain": plain, "param_groups": groups}
    text = (json.dumps(settings, indent=1) + "\n").encode()
    return [(OPTIMIZER, _writer(tensors_to_bytes(tensors))), (OPTIMIZER_SETTINGS, _writer(text))]


def _written(partial: Path, name: str, write: Callable[[Path], None]) -> tuple[int, int]:
    write(partial / name)
    manifests.sync_file(partial / name)
    return checksum(partial / name)


def _done_file(rank: int) -> str:
    return f"done-{rank}.json"


def _write_part(partial: Path, parts: Sequence[Part], rank: int) -> None:
    """A worker's files, then word that they are there, or that they will not be."""
    done = partial / _done_file(rank)
    try:
        files = {name: _written(partial, name, write) for name, write in parts}
        waiting = done.with_suffix(".partial")
        write_durably(waiting, json.dumps(files).encode())
        waiting.rename(done)
    except BaseException as error:
        for name, _ in parts:  # room for others
            (partial / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # then the first worker gives up after its patience
            done.write_text(json.dumps({"failed": str(error)}))
        raise


def _wait_for_all(partial: Path, world: int) -> None:
    deadline = time.monotonic() + PATIENCE
    missing = set(range(world))
    while missing:
        missing = {rank for rank in missing if not (partial / _done_file(rank)).exists()}
        if missing and time.monotonic() > deadline:
            raise TimeoutError(f"rank {min(missing)} has not written its part within {PATIENCE:.0f} s")
        if missing:
            time.sleep(0.02)


def _finisher(
    partial: Path, path: Path, content: Content, world: int, afterwards: Callable[[], None] = lambda: None
) -> Callable[[], int]:
    """What the first worker does when all parts are there; gives the CRC-32 of the manifest."""
    tables = [declared(store) for store in content.stores]

    def finish() -> int:
        files: dict[str, tuple[int, int]] = {}
        for rank in range(world):
            values = json.loads((partial / _done_file(rank)).read_text())
            if "failed" in values:
                raise OSError(f"rank {rank} has not written its part: {values['failed']}")
            files |= {name: (size, crc) for name, (size, crc) in values.items()}
        for rank in range(world):
            (partial / _done_file(rank)).unlink()
        crc = manifests.write(Manifest(partial, content.step, world, tables, content.settings, files, content.base))
        partial.rename(path)
        sync_folder(path.parent)
        afterwards()
        return crc

    return finish


def _save_frozen(path: Path, *, store: TableStore, since: int | None) -> None:
    _save_table(path, store=store, since=since)
    store.close_frozen()


def _save_table(path: Path, *, store: TableStore, since: int | None) -> None:
    """All keys with their records; or all keys, and the records of those that changed since a step."""
    directory = store.directory
    directory.sweep()  # what is past its ttl is not saved; the numbers below hold from here on
    own, shared, seen = len(directory), len(directory.shared), len(directory.sightings)
    rows = own if since is None else store.num_changed(since)
    layout: dict[str, tuple[type, tuple[int, ...]]] = {
        "keys": (np.int64, (own,)),
        "records": (np.float32, (rows, store.saved_words)),
        "shared": (np.int64, (shared,)),
        "shared_records": (np.float32, (shared, store.saved_words)),
        "seen": (np.int64, (seen,)),
        "sightings": (np.int64, (seen,)),
    }
    if since is not None:
        layout["changed"] = (np.int64, (rows,))
    with TensorWriter(path, layout) as file:
        if since is not None:
            for keys, _ in directory.blocks():
                file.append("keys", keys)
            for keys, records in store.changed_blocks(since):
                file.append("changed", keys)
                file.append("records", records)
        else:
            for keys, records in store.blocks():
                file.append("keys", keys)
                file.append("records", records)
        for ids, records in store.blocks(shared=True):
            file.append("shared", ids)
            file.append("shared_records", records)
        for keys, counts in directory.sightings.blocks():
            file.append("seen", keys)
            file.append("sightings", counts)
