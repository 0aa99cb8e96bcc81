"""Transport: the only place that calls torch.distributed for keys, rows and gradients."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist
from torch import Tensor

from nestpipe.arena import as_tensor
from nestpipe.errors import Stopped, TrainingError, describe

T = TypeVar("T")
PAIRS = 64  # workers up to which bulk data travels pair by pair; above, posting each pair from Python costs too much


class Transport:
    """One process group, used by one lane; by the caller's thread only while no batch is between EMB and UPDATE (that is
    where on_step runs). With a single worker nothing is sent and nothing copied."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world = dist.get_world_size(group) if group is not None else 1
        self.bytes_sent = 0  # to other workers
        self.waiting_since: float | None = None  # for others, by time.monotonic()
        self.waited_until = 0.0  # when it last had waited for them

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        self.waiting_since = time.monotonic()
        try:
            yield
        finally:
            self.waiting_since, self.waited_until = None, time.monotonic()

    def close(self) -> None:
        """Gives up its connections and threads; for a group of one's own, when nothing more will be sent."""
        if self._group is not None:
            with contextlib.suppress(ValueError, AssertionError, RuntimeError):  # all groups have been given up before
                dist.destroy_process_group(self._group)
            self._group = None

    def all_to_all(
        self, sent: np.ndarray, sent_counts: np.ndarray, received: np.ndarray, received_counts: np.ndarray
    ) -> np.ndarray:
        """Worker w gets the w-th part of `sent`; returns `received` (or `sent` itself if there is one worker).

        Counts are in entries of the first dimension; both arrays must be contiguous.
        """
        if self.world == 1:
            return sent
        self.bytes_sent += (len(sent) - int(sent_counts[self.rank])) * (sent.nbytes // max(1, len(sent)))
        with self._waiting():
            if self.world > PAIRS:
                dist.all_to_all_single(
                    as_tensor(received),
                    as_tensor(sent),
                    received_counts.tolist(),
                    sent_counts.tolist(),
                    group=self._group,
                )
            else:
                self._in_pairs(sent, sent_counts, received, received_counts)
        return received

    def _in_pairs(
        self, sent: np.ndarray, sent_counts: np.ndarray, received: np.ndarray, received_counts: np.ndarray
    ) -> None:
        """Every receive is posted before any send. (gloo's own all-to-all sends at once to a peer that is ready, and its own
        readiness to receive waits behind that data in the socket: both directions of a link then take turns, at random.)"""
        leaves = np.split(sent, np.cumsum(sent_counts)[:-1])
        comes = np.split(received, np.cumsum(received_counts)[:-1])
        comes[self.rank][:] = leaves[self.rank]
        others = [(self.rank + i) % self.world for i in range(1, self.world)]
        works = [dist.irecv(as_tensor(comes[w]), group=self._group, group_src=w) for w in others if len(comes[w])]
        works += [dist.isend(as_tensor(leaves[w]), group=self._group, group_dst=w) for w in others if len(leaves[w])]
        for work in works:
            work.wait()  # type: ignore[union-attr]

    def spread(self, blocks: Sequence[np.ndarray], peers: Sequence[int]) -> None:
        """Of some workers (peers, by rank, this one among them) each sends its block to all others: blocks[i] is, or will be,
        what peers[i] has. Every receive is posted before any send."""
        here = peers.index(self.rank)
        others = [(here + i) % len(peers) for i in range(1, len(peers))]
        self.bytes_sent += blocks[here].nbytes * len(others)
        with self._waiting():
            works = [
                dist.irecv(as_tensor(blocks[i]), group=self._group, group_src=peers[i])
                for i in others
                if blocks[i].size
            ]
            if blocks[here].size:
                works += [dist.isend(as_tensor(blocks[here]), group=self._group, group_dst=peers[i]) for i in others]
            for work in works:
                work.wait()  # type: ignore[union-attr]

    def exchange_rows(self, table: np.ndarray, *, counted: bool = True) -> np.ndarray:
        """Row w of `table` goes to worker w; returns the rows that came, by source. For small tables: one message each.
        counted: among the bytes of a batch."""
        if self.world == 1:
            return table
        self.bytes_sent += (self.world - 1) * table[0].nbytes * counted
        received = np.empty_like(table)
        with self._waiting():
            dist.all_to_all_single(as_tensor(received), as_tensor(table), group=self._group)
        return received

    def gather(self, mine: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Everybody's numbers, end to end by rank; counts: how many each has."""
        padded = np.zeros((self.world, int(counts.max())), mine.dtype)
        padded[:, : len(mine)] = mine
        return self.exchange_rows(padded)[np.arange(padded.shape[1]) < counts[:, None]]

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Element-wise sum over all workers, in place."""
        if self.world > 1:
            with self._waiting():
                dist.all_reduce(as_tensor(values), group=self._group)
        return values

    def largest(self, values: np.ndarray) -> np.ndarray:
        """Element-wise largest over all workers, in place."""
        if self.world > 1:
            with self._waiting():
                dist.all_reduce(as_tensor(values), op=dist.ReduceOp.MAX, group=self._group)
        return values

    def any(self, mine: bool) -> bool:
        """Whether it is so on one of the workers."""
        return bool(self.sum(np.array([mine], np.int64))[0])

    def gather_objects(self, value: Any) -> list[Any]:
        """Everybody's value, by rank: for reports and errors, not for the hot path."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        with self._waiting():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def compare(self, declared: Mapping[str, Any]) -> None:
        """Raises the same TrainingError on every worker, with the first difference, unless all have declared the same things
        in the same order."""
        everybody = self.gather_objects([(name, _text(value)) for name, value in declared.items()])
        for rank, theirs in enumerate(everybody):
            if theirs == everybody[0]:
                continue
            nothing = ("", "nothing of the kind")
            pairs = itertools.zip_longest(everybody[0], theirs, fillvalue=nothing)
            first, other = next((a, b) for a, b in pairs if a != b)
            name = first[0] or other[0]
            here = [text if known in ("", name) else f"{known} = {text}" for known, text in (first, other)]
            raise TrainingError(
                f"workers were told different things: {name} is {here[0]} on rank 0 and {here[1]} on rank {rank}; give every "
                f"worker the same, in the same order",
                is_ours=self.rank == rank,
            )

    def patiently(
        self, work: Callable[[], T], *, what: str, limit: float, stop_asked: Callable[[], bool] = lambda: False
    ) -> T:
        """Does work that may take longer than workers wait for each other, and returns when all have done theirs. What goes
        wrong on one, or takes longer than `limit` seconds, is raised on all; Stopped if one is asked to stop meanwhile."""
        results: list[T] = []
        problems: list[BaseException] = []

        def run() -> None:
            try:
                results.append(work())
            except BaseException as error:
                problems.append(error)

        thread = threading.Thread(target=run, name=what, daemon=True)  # nobody waits for one that hangs
        thread.start()
        deadline = time.monotonic() + limit
        while self.any(thread.is_alive()):
            thread.join(0.05)
            if thread.is_alive() and time.monotonic() > deadline:
                problems.append(TimeoutError(f"not done after {limit:,.0f} s"))
            failed, stops = self.sum(np.array([bool(problems), stop_asked()], np.int64))
            if failed:
                break
            if stops:
                raise Stopped(f"asked to stop during {what}")
        self.raise_together(problems[0] if problems else None, what=what)
        return results[0]

    def together(self, work: Callable[[], T] | None, *, what: str) -> T:
        """Does this worker's part, if it has one, and waits for the others'; what goes wrong on one is raised on all."""
        result: T = None  # type: ignore[assignment]
        problem: Exception | None = None
        try:
            if work is not None:
                result = work()
        except Exception as error:
            problem = error
        self.raise_together(problem, what=what)
        return result

    def raise_together(self, problem: BaseException | None, *, what: str) -> None:
        """Raises the same TrainingError on every worker if one has a problem: all causes, by rank."""
        told = self.gather_objects(None if problem is None else describe(problem))
        causes = [(rank, text) for rank, text in enumerate(told) if text is not None]
        if causes:
            message = "\n".join(f"rank {rank}, {what}: {text}" for rank, text in causes)
            raise TrainingError(message, is_ours=self.rank == causes[0][0]) from problem


def _text(value: Any) -> str:
    """All of a value: repr rounds tensors and arrays, and leaves out the middle of long ones."""
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(_text, value)) + ("," if isinstance(value, tuple) and len(value) == 1 else "")
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, (Tensor, np.ndarray)):
        return f"{value.tolist()!r} of {value.dtype}"
    return repr(value)
