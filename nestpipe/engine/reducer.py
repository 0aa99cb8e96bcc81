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

from nestpipe.sizes import BUCKET_BYTES

SAFE = 0.5  # of the largest number: sums of few bits may be rounded up


@dataclasses.dataclass
class _Bucket:
    """Gradients of some parameters, one after the other in one buffer: what one collective sums."""

    buffer: Tensor
    size: int  # parameters
    ready: int = 0
    work: Any = None
    reach: Tensor | None = None  # of this worker's gradients, once they are on their way


class Reducer:
    """parameters: all of the model, with their names, in its order, the same on every worker. From the first backward to
    `clear` their `grad` is a view into a buffer; in between it is None, so that nobody else's backward writes there. A parameter
    without a gradient anywhere has None after `finish` too, as if there were one worker.

    Frozen parameters cost nothing. One that gets a gradient all the same has been unfrozen since: it is summed after the
    others, on every worker, and with them from the next step on.

    How far gradients reach is known before their sums are: 1 is the largest number of their type. Where the reaches of all
    workers add up to no more than SAFE, no sum is infinite.

    Sums have one order, whatever the timing: buckets are summed whole, and start in one order on every worker.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], group: dist.ProcessGroup) -> None:
        self._group, self._names = group, [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._frozen = [i for i, parameter in enumerate(self._parameters) if not parameter.requires_grad]
        self._unhooked = [i for i, parameter in enumerate(self._parameters) if parameter.requires_grad]
        self._used = [False] * len(parameters)
        self._ours = False  # whether a backward of ours is running: the model may have other users
        self._last = False  # whether it is the one that completes gradients
        self._hold = False  # whether the last bucket, which tells who has used what, must wait for the end of it
        self._next = 0  # the first bucket that has not started
        self._twice = ""  # a parameter whose gradient came after its bucket had started
        self._deal()
        self.clear()

    def _deal(self) -> None:
        """Backward completes gradients from the last parameter to the first; so go the buckets."""
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, int] = {}
        self._views: dict[int, Tensor] = {}
        members: list[list[int]] = []
        size, kind = 0, None
        for i in sorted(set(range(len(self._parameters))) - set(self._frozen), reverse=True):
            parameter = self._parameters[i]
            this, num_bytes = (parameter.dtype, parameter.device), parameter.numel() * parameter.element_size()
            if not members or this != kind or size + num_bytes > BUCKET_BYTES:
                members.append([])
                size, kind = 0, this
            members[-1].append(i)
            size += num_bytes
        for number, some in enumerate(members):
            self._open(some, extra=len(self._parameters) if number == len(members) - 1 else 0)
        if not members:  # all frozen: who has used what must be told all the same
            self._buckets.append(_Bucket(torch.zeros(len(self._parameters), device=self._parameters[0].device), 0))

    def _open(self, members: Sequence[int], *, extra: int) -> None:
        """extra: floats behind the gradients; the last bucket has them, to tell who has used what."""
        parameters = [self._parameters[i] for i in members]
        total = sum(parameter.numel() for parameter in parameters) + extra
        buffer = torch.zeros(total, dtype=parameters[0].dtype, device=parameters[0].device)
        start = 0
        for i, parameter in zip(members, parameters, strict=True):
            self._views[i] = buffer[start : start + parameter.numel()].view_as(parameter)
            self._bucket_of[i] = len(self._buckets)
            start += parameter.numel()
        self._buckets.append(_Bucket(buffer, len(parameters)))

    def _hook(self) -> None:
        # Weakly: torch keeps hooks where the garbage collector does not look. A reducer that they held would never go, nor would
        # its group, whose threads wake up a hundred times a second.
        me = weakref.ref(self)
        for i in [i for i in self._unhooked if self._parameters[i].requires_grad]:
            self._parameters[i].register_post_accumulate_grad_hook(_hook(me, i))
            self._unhooked.remove(i)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """last: this one completes the gradients: buckets start as they fill."""
        self._hook()
        self._ours, self._last = True, last
        self._hold = any(self._parameters[i].requires_grad for i in self._frozen)
        for i, view in self._views.items():
            if self._parameters[i].grad is None:
                self._parameters[i].grad = view
        try:
            loss.backward()
        finally:
            self._ours = False

    def _completed(self, i: int, parameter: Tensor) -> None:
        """The gradient of a parameter is there."""
        if not self._ours:
            return
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
            while self._next < len(self._buckets) - self._hold and self._is_full(self._next):
                self._start()

    def _is_full(self, bucket: int) -> bool:
        return self._buckets[bucket].ready >= self._buckets[bucket].size

    def _start(self) -> None:
        bucket = self._buckets[self._next]
        bucket.reach = _reach(bucket.buffer)
        self._next += 1
        if self._next == len(self._buckets):
            for i in self._frozen:
                self._used[i] = self._parameters[i].grad is not None
            flags = torch.tensor(self._used, dtype=bucket.buffer.dtype)
            bucket.buffer[-len(self._used) :] = flags.to(bucket.buffer.device)
        bucket.work = dist.all_reduce(bucket.buffer, group=self._group, async_op=True)

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
        for i in [i for i in self._frozen if flags[i]]:
            self._thaw(i)
        for i, parameter in enumerate(self._parameters):
            if not flags[i]:
                parameter.grad = None
            elif i in self._views:  # also where only other workers have used it
                parameter.grad = self._views[i]

    def _thaw(self, i: int) -> None:
        """Sums the gradient of a parameter that some worker has unfrozen; all know of it by now."""
        parameter = self._parameters[i]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad.contiguous()
        dist.all_reduce(gradient, group=self._group)
        parameter.grad = gradient
        self._frozen.remove(i)
        self._unhooked.append(i)

    def reach(self) -> float:
        """After the last backward; NaN or infinity if an entry is not finite."""
        outside = [grad for i in self._frozen if (grad := self._parameters[i].grad) is not None]
        inside = [_reach(b.buffer) if b.reach is None else b.reach for b in self._buckets]
        return float(torch.stack([*inside, *map(_reach, outside)]).max())

    def clear(self) -> None:
        """No gradients, and zeros where they will be."""
        for bucket in self._buckets:
            if bucket.work is not None:  # a batch that failed in between
                bucket.work.wait()
                bucket.work = None
            bucket.ready, bucket.reach = 0, None
            bucket.buffer.zero_()
        if len(self._views) + len(self._frozen) != len(self._parameters):
            self._deal()
        self._next, self._last = 0, False
        self._used = [False] * len(self._used)
        for parameter in self._parameters:
            parameter.grad = None


def _reach(gradients: Tensor) -> Tensor:
    if not gradients.numel():
        return torch.zeros((), dtype=torch.float64, device=gradients.device)
    if gradients.is_complex():
        gradients = torch.view_as_real(gradients)
    return torch.stack(gradients.aminmax()).abs().max().double() / torch.finfo(gradients.dtype).max


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """One pass: a sum is finite unless an entry is not (or it overflows, which the slow path sorts out)."""
    if not tensors:
        return True
    sums = torch.stack([tensor.sum().double() for tensor in tensors])
    return bool(torch.isfinite(sums).all()) or all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def _hook(reducer: weakref.ref[Reducer], i: int) -> Callable[[Tensor], None]:
    def completed(parameter: Tensor) -> None:
        here = reducer()
        if here is not None:
            here._completed(i, parameter)

    return completed
