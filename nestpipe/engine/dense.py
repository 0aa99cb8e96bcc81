"""The dense part: the user's model under DDP."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nestpipe.batch import Batch, Output
from nestpipe.process import current_device


class _Forward(nn.Module):
    """The user's model; for a worker without samples a zero, because DDP must see every worker at every step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # Never used: with it DDP finds an unused parameter in every model, and does not advise, on every run's terminal,
        # against looking for them.
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        if batch.size:
            output = checked_output(self.model(batch, rows), batch.size)
            if output.losses.requires_grad:
                return output
            # A loss that no parameter has a part in must still reach DDP, where the other workers wait.
            return dataclasses.replace(output, losses=output.losses + self._nothing())
        return Output(self._nothing().reshape(1))

    def _nothing(self) -> Tensor:
        """A zero that every parameter has a part in."""
        parts = [parameter.sum() * 0 for parameter in self.model.parameters() if parameter.requires_grad]
        return torch.stack(parts).sum() if parts else torch.zeros(())


class Dense:
    """Forward, backward and update of the model's own parameters."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[Any], torch.optim.Optimizer],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.device = current_device()
        self.model = model.to(self.device)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._forward: nn.Module = _Forward(model).to(self.device)
        self._averaged_over = 1
        workers = 1 if group is None else dist.get_world_size(group)
        if workers > 1 and self._parameters:
            self._forward = nn.parallel.DistributedDataParallel(
                self._forward,
                process_group=group,
                forward_sync_buffers=False,
                gradient_as_bucket_view=True,
                find_unused_parameters=True,  # else a model with a branch not taken makes replicas differ, or hang
            )
            self._averaged_over = workers  # what DDP divides by; the update multiplies by it again
        elif workers > 1:
            for tensor in model.state_dict().values():  # as DDP would have done
                dist.broadcast(tensor, src=0, group=group)
        self.optimizer = optimizer(self._parameters) if self._parameters else None

    def forward(self, batch: Batch, rows: dict[str, Any], *, reduce: bool) -> Output:
        """`reduce`: whether the backward that follows is the step's last and sums gradients over workers."""
        with self._without_reduction(not reduce):
            return self._forward(batch, rows)

    def backward(self, loss: Tensor, *, reduce: bool) -> None:
        with self._without_reduction(not reduce):
            if loss.requires_grad:
                loss.backward()

    def update(self, scale: float) -> None:
        """Multiplies the sum of gradients over all workers by scale (1 / global weight) and steps the optimizer."""
        if self.optimizer is not None:
            grads = [p.grad for p in self._parameters if p.grad is not None]
            if grads:
                torch._foreach_mul_(grads, scale * self._averaged_over)
            self.optimizer.step()
            self.forget()

    def scale_lr(self, factor: float) -> None:
        """Every learning rate of the optimizer becomes `factor` times what it was at the start."""
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor

    def forget(self) -> None:
        """Drops gradients."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def _without_reduction(self, without: bool) -> contextlib.AbstractContextManager[None]:
        if without and isinstance(self._forward, nn.parallel.DistributedDataParallel):
            return self._forward.no_sync()
        return contextlib.nullcontext()


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
