"""Loader: reads and checks batches ahead of training, in a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Sequence

from nestpipe.batch import Batch, NotFinite, check_batch

AHEAD = 2


class _End:
    pass


class Loader:
    """`next()` gives the next batch, or None for good once there are no more; what went wrong while reading is raised there.

    skipped counts batches left out because an input was not finite (only if skip_nonfinite).
    """

    def __init__(
        self, batches: Iterable[Batch], feature_names: Sequence[str], *, skip_nonfinite: bool, timeout: float
    ) -> None:
        self.skipped = 0
        self._names, self._skip, self._timeout = list(feature_names), skip_nonfinite, timeout
        self._queue: queue.Queue[Batch | BaseException | _End] = queue.Queue(AHEAD)
        self._closed = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._read, args=(batches,), name="nestpipe-data", daemon=True)
        self._thread.start()

    def _read(self, batches: Iterable[Batch]) -> None:
        try:
            for batch in batches:
                try:
                    checked(batch, self._names)
                except NotFinite:
                    if not self._skip:
                        raise
                    self.skipped += 1
                    continue
                if not self._offer(batch):
                    return
            self._offer(_End())
        except BaseException as error:  # whatever it is, the trainer must hear of it
            self._offer(error)

    def _offer(self, item: Batch | BaseException | _End) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=0.2)
                return True
            except queue.Full:
                pass
        return False

    def next(self) -> Batch | None:
        if self._ended:
            return None
        try:
            item = self._queue.get(timeout=self._timeout)
        except queue.Empty:
            raise TimeoutError(
                f"the data gave no batch for {self._timeout:g} s; look at what feeds this rank, or raise data_timeout"
            ) from None
        if isinstance(item, _End):
            self._ended = True
            return None
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        self._closed.set()


def checked(batch: Batch, feature_names: Sequence[str]) -> Batch:
    if not isinstance(batch, Batch):
        raise ValueError(f"the data yielded {type(batch).__name__}; it must yield nestpipe.Batch objects")
    check_batch(batch, feature_names)
    return batch
