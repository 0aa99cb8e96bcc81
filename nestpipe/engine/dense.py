"""The dense part: the user's model, its gradients summed over workers, its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nestpipe.batch import Batch, Output
from nestpipe.engine.reducer import Reducer
from nestpipe.errors import TrainingError
from nestpipe.process import current_device


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
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._parameters = [parameter for _, parameter in named]
        self._reducer: Reducer | None = None
        if group is not None and dist.get_world_size(group) > 1:
            _check_alike(model, group)
            for tensor in model.state_dict().values():
                if isinstance(tensor, Tensor):
                    dist.broadcast(tensor, src=0, group=group)
            self._reducer = Reducer(named, group) if named else None
        self.optimizer = optimizer(self._parameters) if self._parameters else None

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        return call(self.model, batch, rows)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """`last`: of the step, so that the sum over workers can begin with what is complete."""
        if last and self._reducer is not None:
            self._reducer.begin_last()
        if loss.requires_grad:
            loss.backward()

    def reduce(self) -> None:
        """Gradients become sums over all workers. Every worker takes part, also one that had no backward."""
        if self._reducer is not None:
            self._reducer.finish()

    def update(self, scale: float) -> None:
        """Multiplies the sum of gradients over all workers by scale (1 / global weight) and steps the optimizer."""
        if self.optimizer is not None:
            grads = [p.grad for p in self._parameters if p.grad is not None]
            if grads:
                torch._foreach_mul_(grads, scale)
            self.optimizer.step()
            self.forget()

    def scale_lr(self, factor: float) -> None:
        """Every learning rate of the optimizer becomes `factor` times what it was at the start."""
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor

    def forget(self) -> None:
        """Drops gradients."""
        if self._reducer is not None:
            self._reducer.clear()
        elif self.optimizer is not None:
            self.optimizer.zero_grad()


def _check_alike(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Every worker must have built the same model: else sums would add up gradients of different things, or hang."""
    mine = [(name, tuple(t.shape), str(t.dtype)) for name, t in model.state_dict().items() if isinstance(t, Tensor)]
    mine += [(name, (), str(p.requires_grad)) for name, p in model.named_parameters()]
    all_workers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(all_workers, mine, group=group)
    for rank, other in enumerate(all_workers):
        if other != all_workers[0]:
            differs = sorted(set(map(str, other)) ^ set(map(str, all_workers[0])))
            raise TrainingError(
                f"the model of rank {rank} is not that of rank 0: {', '.join(differs[:3])}; build the same model on every worker",
                is_ours=dist.get_rank(group) == rank,
            )


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
