"""Checkpoints that forked processes write while training goes on.

A forked process has the worker's memory as it was at that instant (the system copies a page when one of the two writes to it),
so all that training waits for is the fork. Each writes its worker's part; the first worker's waits for the others' and makes a
checkpoint of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from nestpipe.checkpoint import manifest as manifests
from nestpipe.checkpoint.forked import Child, fork
from nestpipe.checkpoint.manifest import Base, Damaged
from nestpipe.checkpoint.saving import (
    Content,
    Part,
    done_file,
    finish,
    make_empty,
    parts_of,
    tell_failure,
    wait_for_all,
    write_parts,
)
from nestpipe.errors import NO_ROOM, describe
from nestpipe.exchange.transport import Transport
from nestpipe.sealed import partial_of
from nestpipe.store.table_store import TableStore

MOMENT = 0.05  # seconds
HEAD_START = 0.25  # seconds in which training fills its pipeline and copies the pages it changes in every step
SILENCE = 60.0  # seconds that training waits for a checkpoint before it says so
# A worker that leaves gives a checkpoint up when no worker has written any more of it for so many seconds; LEAVING if it leaves
# because of an error: the others may be gone.
QUIET, LEAVING = 300.0, 5.0
WORD = 2.0  # seconds that a worker that leaves waits for it before it says so


class Background:
    """Checkpoints in a folder, one at a time, written while training goes on. The folder is that of one run: what another has
    saved there would be taken for a checkpoint of this one, or be removed as if it were.

    run, step: of the trainer, now. keep: how many stay. full_every: of so many checkpoints one is full, the others hold what
    changed since it. tell: called on the first worker with what is worth knowing. done: called on every worker, by `wait`, with a
    checkpoint that is complete, and its step.
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
        done: Callable[[Path, int], None] = lambda path, step: None,
    ) -> None:
        problem = transport.gather_objects(_not_ours(folder, run, step) if transport.rank == 0 else None)[0]
        if problem is not None:
            raise ValueError(problem)
        self.folder, self._transport, self._keep, self._full_every = folder, transport, keep, full_every
        self._tell, self._done = tell, done
        self._writing: Writing | None = None
        # Of what is being written: when this is closed, forgotten, or at exit.
        self._leave: weakref.finalize | None = None
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
        path = self.folder / manifests.folder_of(content.step)
        parts = self._prepare(path, content)
        if parts is None:
            return
        try:
            child = fork(lambda: self._write(path, content, parts))
        except OSError as error:  # no memory for another process, or too many of them
            child = Child(0, -1, error)
        self._writing = Writing(child, path, content.base is None, self._transport.rank, self._tell)
        self._leave = weakref.finalize(self, self._writing.leave)
        self.stalls.append(time.perf_counter() - begin)

    def _prepare(self, path: Path, content: Content) -> list[Part] | None:
        """What this worker is to write, with its tables frozen; None if there is nothing to write, or a worker has failed."""
        parts: list[Part] = []
        exists, problem = False, None
        try:
            if self._transport.rank == 0:
                exists = path.exists()  # it was saved before the run was resumed
                make_empty(partial_of(path))
            for store in content.stores:
                store.freeze()
            parts = parts_of(content, self._transport.rank, self._transport.world)
        except Exception as error:
            problem = error
        self._stores = content.stores
        told = self._transport.gather_objects((exists, _described(problem)))
        if told[0][0] or self._failed([text for _, text in told], content.step):
            self._clear(path)
            return None
        return parts

    def _write(self, path: Path, content: Content, parts: Sequence[Part]) -> str:
        """In the forked process. Returns the CRC-32 of the manifest if it has made the checkpoint."""
        rank, world, partial = self._transport.rank, self._transport.world, partial_of(path)
        try:
            for store in content.stores:
                store.open_frozen()
            time.sleep(HEAD_START)
            write_parts(partial, parts, rank)
        finally:
            for store in content.stores:
                store.close_frozen()
        if rank > 0:
            return ""
        wait_for_all(partial, world)
        crc = finish(partial, path, content, world)
        manifests.prune(self.folder, self._keep)
        return f"{crc:08x}"

    def wait(self) -> None:
        """Until the checkpoint under way is complete, or has failed: that is told, and training goes on."""
        if self._writing is None:
            return
        child, path, is_full = self._writing.child, self._writing.path, self._writing.is_full
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
        self._writing = None
        assert self._leave is not None
        self._leave.detach()
        failed = self._failed([text for text, _ in told], manifests.step_of(path.name))
        self._clear(path)
        if not failed:
            if is_full:
                self._base = Base(path.name, int(told[0][1], 16))
            self._since_full = 0 if is_full else self._since_full + 1
            self._done(path, manifests.step_of(path.name))

    def close(self) -> None:
        """Waits for a checkpoint that is under way, as long as more of it is written; after an error not for long."""
        if self._leave is not None:
            self._leave()

    def _clear(self, path: Path) -> None:
        """What is left of a checkpoint that is complete, or will not be."""
        for store in self._stores:
            store.thaw()
        if self._transport.rank == 0:
            shutil.rmtree(partial_of(path), ignore_errors=True)

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
        return partial_of(self.path)

    def speak_for_it(self) -> None:
        """A process that was killed has told nobody: the first worker's waits for its part."""
        if self.child.problem is not None and not done_file(self.partial, self.rank).exists():
            with contextlib.suppress(OSError):
                tell_failure(self.partial, self.rank, self.child.problem)

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
        """How much of it there is, of all workers."""
        try:
            with os.scandir(self.partial) as files:
                return sorted((file.name, file.stat().st_size) for file in files)
        except OSError:  # it has its name by now
            return []


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
            if manifests.read(path).settings.run != run:
                return f"{folder} has checkpoints of another run ({path.name}): {other}"
    return None


def _described(problem: BaseException | None) -> str | None:
    return None if problem is None else describe(problem)
