"""Reducer: sums dense gradients over workers, bucket by bucket, behind the backward that completes them.

DistributedDataParallel does the same, but waits for the sums at the end of the backward. Here that is an operation of its
own, so that row gradients leave, rows are updated and the next batch's rows set out while dense gradients are still on
their way. It also needs no forward from a worker that has no samples, or whose forward failed: it takes part with zeros.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 4 << 20


@dataclasses.dataclass
class _Bucket:
    """Gradients of some parameters, one after the other in one buffer: what one collective sums."""

    buffer: Tensor
    size: int  # parameters
    ready: int = 0
    work: Any = None


class Reducer:
    """parameters: with their names, in the order of the model, the same on every worker; their `grad` is a view into a
    buffer from here on. A parameter without a gradient anywhere has None at the end, as if there were one worker.

    Sums have one order, whatever the timing: buckets are summed whole, and start in one order on every worker.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], group: dist.ProcessGroup) -> None:
        self._group, self._names = group, [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._buckets: list[_Bucket] = []
        self._bucket_of: list[int] = [0] * len(parameters)
        self._views: list[Tensor] = [torch.empty(0)] * len(parameters)
        self._used = [False] * len(parameters)
        self._last = False  # whether this is the backward that completes gradients
        self._next = 0  # the first bucket that has not started
        self._twice = ""  # a parameter whose gradient came after its bucket had started
        for members in self._deal():
            self._open(members)
        # Weakly: torch keeps hooks where the garbage collector does not look. A reducer that they held would never go, nor would
        # its group, whose threads wake up a hundred times a second.
        me = weakref.ref(self)
        for i, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(_hook(me, i))
        self.clear()

    def _deal(self) -> list[list[int]]:
        """Backward completes gradients from the last parameter to the first; so go the buckets."""
        buckets: list[list[int]] = []
        size, kind = 0, None
        for i in reversed(range(len(self._parameters))):
            parameter = self._parameters[i]
            this, num_bytes = (parameter.dtype, parameter.device), parameter.numel() * parameter.element_size()
            if not buckets or this != kind or size + num_bytes > BUCKET_BYTES:
                buckets.append([])
                size, kind = 0, this
            buckets[-1].append(i)
            size += num_bytes
        return buckets

    def _open(self, members: Sequence[int]) -> None:
        parameters = [self._parameters[i] for i in members]
        total = sum(parameter.numel() for parameter in parameters)
        if members[-1] == 0:
            total += len(self._parameters)  # the last one also tells who has used what
        buffer = torch.zeros(total, dtype=parameters[0].dtype, device=parameters[0].device)
        start = 0
        for i, parameter in zip(members, parameters, strict=True):
            self._views[i] = buffer[start : start + parameter.numel()].view_as(parameter)
            self._bucket_of[i] = len(self._buckets)
            start += parameter.numel()
        self._buckets.append(_Bucket(buffer, len(parameters)))

    def _completed(self, i: int, parameter: Tensor) -> None:
        """The gradient of a parameter is there."""
        self._used[i] = True
        if parameter.grad is not self._views[i] and parameter.grad is not None:
            # A backward that puts a gradient in place of the one that was there.
            self._views[i].copy_(parameter.grad)
            parameter.grad = self._views[i]
        if self._last:
            bucket = self._buckets[self._bucket_of[i]]
            if bucket.work is not None:
                self._twice = self._names[i]
            bucket.ready += 1
            while self._next < len(self._buckets) and self._buckets[self._next].ready >= self._buckets[self._next].size:
                self._start()

    def _start(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        if self._next == len(self._buckets):
            flags = torch.tensor(self._used, dtype=bucket.buffer.dtype)
            bucket.buffer[-len(self._used) :] = flags.to(bucket.buffer.device)
        bucket.work = dist.all_reduce(bucket.buffer, group=self._group, async_op=True)

    def begin_last(self) -> None:
        """The backward that comes now completes the gradients: buckets start as they fill."""
        self._last = True

    def finish(self) -> None:
        """Starts what has not started yet and waits for all; gradients are sums over workers then."""
        self._last = False
        while self._next < len(self._buckets):
            self._start()
        for bucket in self._buckets:
            bucket.work.wait()
            bucket.work, bucket.ready = None, 0
        self._next = 0
        twice, self._twice = self._twice, ""
        if twice:
            raise ValueError(
                f"parameter {twice!r} got a gradient twice in one backward, the second time when the first was on its way to "
                f"the other workers; with torch.utils.checkpoint, use use_reentrant=False"
            )
        flags = self._buckets[-1].buffer[-len(self._used) :].tolist()
        for parameter, used in zip(self._parameters, flags, strict=True):
            if not used:
                parameter.grad = None

    def clear(self) -> None:
        """Gradients are zero, and where they belong."""
        for bucket in self._buckets:
            if bucket.work is not None:  # a batch that failed in between
                bucket.work.wait()
                bucket.work = None
            bucket.ready = 0
            bucket.buffer.zero_()
        self._next, self._last = 0, False
        self._used = [False] * len(self._used)
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view


def _hook(reducer: weakref.ref[Reducer], i: int) -> Callable[[Tensor], None]:
    def completed(parameter: Tensor) -> None:
        here = reducer()
        if here is not None:
            here._completed(i, parameter)

    return completed
