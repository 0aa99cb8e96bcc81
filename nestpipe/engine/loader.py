"""Loader: reads and checks batches ahead of training, in a thread of its own."""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from nestpipe.batch import Batch, NotFinite, check_batch
from nestpipe.errors import Stopped
from nestpipe.sizes import READ_AHEAD

MOMENT = 0.1  # seconds, after which a worker that waits for a batch looks whether it has been asked to stop


class _End:
    pass


_Entry = tuple[Batch | BaseException | _End, int]


class Loader:
    """`next()` gives the next batch, or None for good once there are no more; what went wrong while reading is raised there.

    taken counts batches given out, skipped those left out so far because an input was not finite (only if skip_nonfinite).
    limit: how many batches will be asked for; no more are taken from `batches`, so that another loader may go on there.
    after: a closed loader of the same iterator: what it has read and not given out comes first.
    stop_asked: whether the worker has been asked to stop: a `next` that has to wait then raises Stopped.
    keep: how many of the batches given out last may be given back.
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
    ) -> None:
        self.taken = self.skipped = 0
        # Each with the number of batches that had been skipped when it was asked for.
        self._given: collections.deque[tuple[_Entry, int]] = collections.deque(maxlen=keep)
        self._names, self._skip, self._timeout = list(feature_names), skip_nonfinite, timeout
        self._limit, self._stop_asked = limit, stop_asked
        # Each with the number of batches skipped before it: the thread may be ahead of what was asked for.
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
            for batch in batches if self._limit is None or offered < self._limit else ():
                try:
                    checked(batch, self._names)
                except NotFinite:
                    if not self._skip:
                        raise
                    skipped += 1
                    continue
                if not self._offer(batch, skipped):
                    return
                offered += 1
                if offered == self._limit:
                    break
            self._offer(_End(), skipped)
        except BaseException as error:  # whatever it is, the trainer must hear of it
            self._offer(error, skipped)

    def _offer(self, item: Batch | BaseException | _End, skipped: int) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put((item, skipped), timeout=0.2)
                return True
            except queue.Full:
                pass
        self._unread.append((item, skipped))
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
        rest = [(item, skipped - self.skipped) for item, skipped in read if not isinstance(item, _End)]
        return rest, max(0, *(skipped - self.skipped for _, skipped in read), 0)

    def next(self) -> Batch | None:
        if self._ended or self._closed.is_set():
            return None
        item, skipped = self._left.pop(0) if self._left else self._wait()
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
        self._given.append(((item, self.skipped), before))
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
            self._left = [*(entry for entry, _ in given), *self._left]
            self.taken, self.skipped = self.taken - count, given[0][1]
            self._given.clear()

    def stop(self) -> None:
        """No more batches are wanted: `next`, also one that waits in another thread, gives None."""
        self._closed.set()
        with contextlib.suppress(queue.Full):  # then nobody waits
            self._queue.put_nowait((_End(), 0))

    def close(self) -> None:
        self.stop()
        self._thread.join(1.0)  # so that what is left of the source can be read by another


def checked(batch: Batch, feature_names: Sequence[str]) -> Batch:
    if not isinstance(batch, Batch):
        raise ValueError(f"the data yielded {type(batch).__name__}; it must yield nestpipe.Batch objects")
    check_batch(batch, feature_names)
    return batch
