"""Loader: reads and checks batches ahead of training, in a thread of its own."""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from nestpipe.batch import Batch, NotFinite, check_batch
from nestpipe.errors import Stopped
from nestpipe.sizes import READ_AHEAD
from nestpipe.source_state import state_of

MOMENT = 0.1  # seconds, after which a worker that waits for a batch looks whether it has been asked to stop


class _End:
    pass


class _Entry(NamedTuple):
    """skipped: batches that were left out before it: the thread may be ahead of what was asked for.
    state: what the source said when it had given this one."""

    item: Batch | BaseException | _End
    skipped: int
    state: Any = None


class _Given(NamedTuple):
    """An entry, and what `skipped` and `state` were before it."""

    entry: _Entry
    skipped: int
    state: Any


class Loader:
    """`next()` gives the next batch, or None for good once there are no more; what went wrong while reading is raised there.

    taken counts batches given out, skipped those left out so far because an input was not finite (only if skip_nonfinite).
    state: what the source said, as JSON, when it had given the last batch that was given out; None if it says nothing.
    limit: how many batches will be asked for; no more are taken from `batches`, so that another loader may go on there.
    after: a closed loader of the same iterator: what it has read and not given out comes first.
    stop_asked: whether the worker has been asked to stop: a `next` that has to wait then raises Stopped.
    keep: how many of the batches given out last may be given back.
    state: before the first batch. watch: what looks at the source while it is read.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        feature_names: Sequence[str],
        *,
        skip_nonfinite: bool,
        timeout: float,
        limit: int | None = None,
        after: Loader | None = None,
        stop_asked: Callable[[], bool] = lambda: False,
        keep: int = 0,
        state: Any = None,
        watch: Callable[[Iterator[Batch]], Iterator[Batch]] = lambda batches: batches,
    ) -> None:
        self.taken = self.skipped = 0
        self.state, self._watch = state, watch
        self._given: collections.deque[_Given] = collections.deque(maxlen=keep)
        self._names, self._skip, self._timeout = list(feature_names), skip_nonfinite, timeout
        self._limit, self._stop_asked = limit, stop_asked
        self._queue: queue.Queue[_Entry] = queue.Queue(READ_AHEAD)
        self._closed = threading.Event()
        self._ended = False
        self._unread: list[_Entry] = []  # what the thread could not give any more
        self._left, self._read_before = after._rest() if after is not None else ([], 0)
        self._thread = threading.Thread(target=self._read, args=(batches,), name="nestpipe-data", daemon=True)
        self._thread.start()

    def _read(self, batches: Iterable[Batch]) -> None:
        offered, skipped = len(self._left), self._read_before
        try:
            if self._limit is not None and offered >= self._limit:
                self._offer(_Entry(_End(), skipped))
                return
            source = iter(batches)
            # A DataLoader knows where its iterator stands; a generator's object may know it itself.
            speaker = batches if hasattr(batches, "state_dict") else source
            for batch in self._watch(source):
                try:
                    checked(batch, self._names)
                except NotFinite:
                    if not self._skip:
                        raise
                    skipped += 1
                    continue
                if not self._offer(_Entry(batch, skipped, state_of(speaker))):
                    return
                offered += 1
                if offered == self._limit:
                    break
            self._offer(_Entry(_End(), skipped))
        except BaseException as error:  # whatever it is, the trainer must hear of it
            self._offer(_Entry(error, skipped))

    def _offer(self, entry: _Entry) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(entry, timeout=0.2)
                return True
            except queue.Full:
                pass
        self._unread.append(entry)
        return False

    def _rest(self) -> tuple[list[_Entry], int]:
        """Of a closed loader: batches that were read and not given out, and how many were skipped after the last that was.
        Waits for the source to give the batch that it has been asked for."""
        self._thread.join(self._timeout)
        if self._thread.is_alive():
            raise TimeoutError(
                f"the data has not given the batch that it was asked for before fit returned, for {self._timeout:g} s; give fit "
                f"another iterator, or raise data_timeout"
            )
        read = [*self._left, *self._queue.queue, *self._unread]
        rest = [
            entry._replace(skipped=entry.skipped - self.skipped) for entry in read if not isinstance(entry.item, _End)
        ]
        return rest, max(0, *(entry.skipped - self.skipped for entry in read), 0)

    def next(self) -> Batch | None:
        if self._ended or self._closed.is_set():
            return None
        item, skipped, state = self._left.pop(0) if self._left else self._wait()
        if isinstance(item, _End) and self._closed.is_set():
            return None  # ours
        before, self.skipped = self.skipped, max(self.skipped, skipped)
        self._ended = not isinstance(item, Batch)
        if isinstance(item, _End):
            return None
        if isinstance(item, Exception):
            raise item
        if isinstance(item, BaseException):  # sys.exit() in a loader must not end this rank alone, and silently
            raise RuntimeError(f"the data source left with {type(item).__name__}: {item}") from item
        self.taken += 1
        self._given.append(_Given(_Entry(item, self.skipped, state), before, self.state))
        self.state = state
        return item

    def _wait(self) -> _Entry:
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return self._queue.get(timeout=min(MOMENT, max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                if self._stop_asked():
                    raise Stopped("asked to stop while waiting for data") from None
                if time.monotonic() < deadline:
                    continue
            self._ended = True  # nobody waits for it a second time
            raise TimeoutError(
                f"the data gave no batch for {self._timeout:g} s; look at what feeds this rank, or raise data_timeout"
            )

    def give_back(self, count: int) -> None:
        """The last `count` batches that were given out have not been trained on: who goes on gets them again."""
        if count:
            given = list(self._given)[-count:]
            assert len(given) == count, f"{count} batches to be given back, {len(given)} were kept"
            self._left = [*(each.entry for each in given), *self._left]
            self.taken, self.skipped, self.state = self.taken - count, given[0].skipped, given[0].state
            self._given.clear()

    def stop(self) -> None:
        """No more batches are wanted: `next`, also one that waits in another thread, gives None."""
        self._closed.set()
        with contextlib.suppress(queue.Full):  # then nobody waits
            self._queue.put_nowait(_Entry(_End(), 0))

    def close(self) -> None:
        self.stop()
        self._thread.join(1.0)  # so that what is left of the source can be read by another


def checked(batch: Batch, feature_names: Sequence[str]) -> Batch:
    if not isinstance(batch, Batch):
        raise ValueError(f"the data yielded {type(batch).__name__}; it must yield nestpipe.Batch objects")
    check_batch(batch, feature_names)
    return batch
