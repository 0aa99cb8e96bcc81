"""The dense part: the user's model, its gradients summed over workers, its optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nestpipe.batch import Batch, Output
from nestpipe.engine.reducer import Reducer, all_finite
from nestpipe.process import current_device


class Dense:
    """Forward, backward and update of the model's own parameters: all of them, also those that are frozen at first."""

    def __init__(self, model: nn.Module, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        for name, tensor in _tensors(model):
            if isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
                raise ValueError(
                    f"the model's {name} has no shape yet (a lazy module); give the module its sizes, or run one forward "
                    f"before the Trainer is made"
                )
        self.device = current_device()
        self.model = model.to(self.device)
        self._names, self._parameters = [], []
        for name, parameter in model.named_parameters():
            self._names.append(name)
            self._parameters.append(parameter)
        self.optimizer = _checked_optimizer(optimizer(self._parameters)) if self._parameters else None
        self._reducer: Reducer | None = None
        self.waiting_since: float | None = None  # for other workers' gradients, by time.monotonic()
        self.waited_until = 0.0  # when it last had waited for them

    def connect(self, group: dist.ProcessGroup) -> None:
        """From here on the first worker's values are everybody's, and gradients are summed over workers. All have made the same
        model: see `declared`."""
        for _, tensor in _tensors(self.model):
            _broadcast(tensor.detach(), group)
        if self._parameters:
            self._reducer = Reducer(list(zip(self._names, self._parameters, strict=True)), group)

    def close(self) -> None:
        """Lets go of the group: somebody may wait for this worker there."""
        self._reducer = None

    def declared(self) -> dict[str, Any]:
        """What must be the same on every worker: else sums would add up gradients of different things, or hang."""
        model = {f"model: {name}": (tuple(t.shape), t.dtype, t.requires_grad) for name, t in _tensors(self.model)}
        kind = {"dense_optimizer": type(self.optimizer).__name__}
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        settings = {
            f"dense_optimizer: {name} of group {number}": len(value) if name == "params" else value
            for number, group in enumerate(groups)
            for name, value in group.items()
            if isinstance(value, (int, float, str, tuple, Tensor)) or name == "params"
        }
        return {**model, **kind, **settings}

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        return call(self.model, batch, rows)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """`last`: of the step, so that the sum over workers can begin with what is complete."""
        if self._reducer is not None:
            self._reducer.backward(loss, last=last)
        else:
            loss.backward()

    def not_finite(self) -> str | None:
        """The name of a parameter whose gradient, of this worker's samples, is not finite; after the last backward."""
        grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if self._reducer.finite() if self._reducer is not None else all_finite(grads):
            return None
        named = zip(self._names, self._parameters, strict=True)
        return next(
            (name for name, p in named if p.grad is not None and not torch.isfinite(p.grad).all()), self._names[0]
        )

    def reduce(self) -> None:
        """Gradients become sums over all workers. Every worker takes part, also one that had no backward."""
        if self._reducer is not None:
            self.waiting_since = time.monotonic()
            try:
                self._reducer.finish()
            finally:
                self.waiting_since, self.waited_until = None, time.monotonic()

    def update(self, scale: float) -> None:
        """Multiplies the sum of gradients over all workers by scale (1 / global weight) and steps the optimizer."""
        if self.optimizer is not None:
            grads = [p.grad for p in self._parameters if p.grad is not None]
            if grads:
                torch._foreach_mul_(grads, scale)
            self.optimizer.step()
            self.forget()

    def learning_rates(self) -> dict[str, Any]:
        """As they are now, for comparison over workers."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return {f"learning rate of dense group {number}": float(group["lr"]) for number, group in enumerate(groups)}

    def scale_lr(self, factor: float) -> None:
        """Every learning rate of the optimizer becomes `factor` times what it was at the start."""
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            if "initial_lr" not in group:
                lr = group["lr"]
                group["initial_lr"] = lr.clone() if isinstance(lr, Tensor) else lr
            group["lr"] = group["initial_lr"] * factor

    def forget(self) -> None:
        """Drops gradients."""
        if self._reducer is not None:
            self._reducer.clear()
        else:
            for parameter in self._parameters:
                parameter.grad = None


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers, also those that are not saved with the model."""
    return [*model.named_parameters(), *model.named_buffers()]


def _broadcast(tensor: Tensor, group: dist.ProcessGroup) -> None:
    whole = tensor.contiguous()
    dist.broadcast(whole, src=0, group=group)
    if whole.data_ptr() != tensor.data_ptr():
        tensor.copy_(whole)


def _checked_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    if not all(hasattr(optimizer, name) for name in ("step", "param_groups", "state_dict", "load_state_dict")):
        raise ValueError(
            f"dense_optimizer returned {type(optimizer).__name__}; it must return a torch optimizer made from the parameters "
            f"that it is given, as in dense_optimizer=lambda p: torch.optim.Adam(p, 1e-3)"
        )
    return optimizer


def call(model: nn.Module, batch: Batch, rows: dict[str, Any]) -> Output:
    """The model's checked output. An error that comes of labels which are not there says so."""
    try:
        output = model(batch, rows)
    except (AttributeError, TypeError) as error:
        if batch.labels is None and "NoneType" in str(error):
            error.add_note("the batch has no labels: set Batch.labels, which the model seems to read")
        raise
    return checked_output(output, batch.size)


def checked_output(output: Any, size: int) -> Output:
    """An Output whose losses are one per sample, from whatever the model returned."""
    output = output if isinstance(output, Output) else Output(output)
    losses, weights = output.losses, output.weights
    if not isinstance(losses, Tensor):
        raise ValueError(
            f"the model returned {type(losses).__name__}; return a tensor of losses, one per sample, or an Output"
        )
    if losses.shape != (size,):
        kind = "a scalar loss" if losses.ndim == 0 else f"losses of shape {tuple(losses.shape)}"
        raise ValueError(
            f"the model returned {kind} for {size} samples; return one loss per sample, shape [{size}], and let the trainer "
            f"take the mean (with reduction='none' in torch's loss functions)"
        )
    if weights is not None and weights.shape != (size,):
        raise ValueError(
            f"the model returned weights of shape {tuple(weights.shape)} for {size} samples; give one per sample"
        )
    if weights is not None and (weights < 0).any():
        sample = int((weights < 0).nonzero()[0])
        weight = float(weights[sample])
        raise ValueError(
            f"the model returned the weight {weight} for sample {sample} of its micro-batch; it must be >= 0"
        )
    return output
