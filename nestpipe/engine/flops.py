"""How much a model computes: matrix products counted in the first batches, beside what the machine does at its best."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from nestpipe.batch import Batch
from nestpipe.engine.outputs import Checked
from nestpipe.errors import describe
from nestpipe.exchange.transport import Transport

aten = torch.ops.aten

COUNTED = 3  # batches of a worker that are counted
SIDE = 1024  # of the matrix product that a machine's rate is measured with
COMPILED = "the model is compiled, and what is inside cannot be seen; give it a method flops(batch)"


@dataclasses.dataclass(frozen=True)
class Work:
    """Of all workers together, the same on every worker.

    per_token, per_sample: floating-point operations of forward and backward; None if they could not be counted: `why_not`.
    machine: operations per second of a plain matrix product.
    memory: bytes of the worker that has had most at a time; of its device, if that is not the CPU.
    """

    per_token: float | None
    per_sample: float | None
    machine: float
    memory: int
    why_not: str | None = None

    def utilization(self, *, tokens: int, samples: int, seconds: float) -> float | None:
        """MFU: what so many tokens (without any: samples) took, over what the machine can do in that time."""
        each, count = (self.per_sample, samples) if self.per_token is None else (self.per_token, tokens)
        return None if each is None or not seconds else each * count / seconds / self.machine


class FlopCounter:
    """Sees the matrix products of this worker's first batches as they run; nothing is run for it, and nothing changes by it.

    A model with a method `flops(batch) -> float`, of forward and backward of these samples, is asked instead.
    """

    def __init__(self, model: nn.Module, *, compiled: bool = False) -> None:
        declared = getattr(model, "flops", None)
        self._declared: Callable[[Batch], float] | None = declared if callable(declared) else None
        compiled |= any(getattr(m, "_compiled_call_impl", None) or hasattr(m, "_orig_mod") for m in model.modules())
        self.why_not = COMPILED if compiled and self._declared is None else None
        self.flops, self.tokens, self.samples = 0.0, 0, 0
        self._steps: set[int] = set()

    def counts(self, step: int) -> bool:
        """Whether this step's batch is one of those that are counted."""
        if self.why_not is not None or (len(self._steps) == COUNTED and step not in self._steps):
            return False
        self._steps.add(step)
        return True

    def forward(self, run: Callable[[], Checked], batch: Batch, *, tokens: int) -> Checked:
        """What `run` returns, counted."""
        if self._declared is not None:
            output = run()
            try:
                self.flops += float(self._declared(batch))
            except Exception as error:
                self.why_not = f"the model's flops(batch) failed: {describe(error)}"
        else:
            generator, problem = torch.get_rng_state(), None
            try:
                with self._mode():
                    output = run()
            except Exception as error:
                problem = error
            if problem is not None:
                # Of the model, or of the counting? Without it the model shows which; its own error is then raised.
                torch.set_rng_state(generator)
                output = run()
                self.why_not = f"they could not be counted: {describe(problem)}"
        self.tokens, self.samples = self.tokens + tokens, self.samples + batch.size
        return output

    def backward(self, run: Callable[[], None]) -> None:
        with self._seen():
            run()

    def _seen(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._declared is not None else self._mode()

    @contextlib.contextmanager
    def _mode(self) -> Iterator[None]:
        with _Seen() as seen:
            yield
        self.flops += seen.flops
        self.why_not = self.why_not or seen.why_not

    def gather(self, workers: Transport, device: torch.device) -> Work:
        """All workers call it, when nothing else runs: it measures the machine, once in a process."""
        machine = matrix_rate(device, torch.get_num_threads())
        told = workers.gather_objects((self.why_not, peak_memory(device)))
        sums = workers.sum(np.array([self.flops, self.tokens, self.samples, machine], np.float64))
        flops, tokens, samples, machine = sums.tolist()
        why_not = next((why for why, _ in told if why is not None), None if flops else "no matrix product was seen")
        known = why_not is None
        return Work(
            per_token=flops / tokens if known and tokens else None,
            per_sample=flops / samples if known and samples else None,
            machine=machine,
            memory=max(memory for _, memory in told),
            why_not=why_not,
        )


# What torch's own registry leaves out: on CPUs, and of vectors.
COUNTS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_: sdpa_flop_count(q.shape, k.shape, v.shape),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *_: sdpa_backward_flop_count(
        grad.shape, q.shape, k.shape, v.shape
    ),
    aten.mv: lambda matrix, *_: 2 * matrix.numel(),
    aten.addmv: lambda _, matrix, *__: 2 * matrix.numel(),
}
UNCOUNTED = {
    aten.mkldnn_rnn_layer,
    aten._thnn_fused_lstm_cell,
    aten._thnn_fused_gru_cell,
    aten._cudnn_rnn,
    aten.miopen_rnn,
}


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.why_not: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket
        if name in flop_registry:
            self.flops += flop_registry[name](*args, **(kwargs or {}), out_val=out)
        elif name in COUNTS:
            self.flops += COUNTS[name](*args)
        elif name in UNCOUNTED:
            self.why_not = f"what is inside {name} cannot be seen; give the model a method flops(batch)"
        return out


@functools.cache
def matrix_rate(device: torch.device, threads: int) -> float:
    """Floating-point operations per second of a float32 matrix product, the best of three; some tens of milliseconds."""
    assert threads == torch.get_num_threads()
    left, right, out = (torch.ones(SIDE, SIDE, device=device) for _ in range(3))
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        out[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * SIDE**3 / best


def peak_memory(device: torch.device) -> int:
    """Bytes that this process has had at most, since its start."""
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # the one counts bytes, Linux kilobytes
