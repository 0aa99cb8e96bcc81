"""SyncBatchNorm: statistics of the samples of all workers, as torch.nn.SyncBatchNorm has them, on any device.

The module only says what is to be added up; who adds it up over workers comes from outside, as a `Meeting`. Without one, and in
evaluation, it is torch's own batch norm.

Shape legend: B samples, C channels, the second dimension; whatever else there is counts as further samples.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

FORWARD, BACKWARD = 0, 1


class Meeting(Protocol):
    """How modules of all workers meet. is_open: whether all of them are in the same pass."""

    is_open: bool

    def total(self, module: SyncBatchNorm, way: int, mine: Tensor) -> Tensor:
        """The sum over workers."""


# Not an attribute: a copy of a module, or a saved one, meets nobody.
_MEETINGS: weakref.WeakKeyDictionary[nn.Module, Meeting] = weakref.WeakKeyDictionary()


class SyncBatchNorm(_BatchNorm):
    """Batch norm over the samples of all workers: every worker normalises by the same mean and variance, and keeps the same
    running statistics. Arguments, parameters and buffers are those of torch.nn.BatchNorm1d; inputs are [B, C] or [B, C, ...].

    `SyncBatchNorm.convert(model)` puts it in place of every batch norm of a model. It needs `micro_batches=1`. Running statistics
    change with the weights, once a step: not by a batch that is left out because something in it is not finite.
    """

    @classmethod
    def convert(cls, model: nn.Module) -> nn.Module:
        """The model, with this in place of every batch norm of torch in it; parameters, buffers and names stay the same."""
        if isinstance(model, _BatchNorm) and not isinstance(model, cls):
            return cls._like(model)
        for name, module in model.named_children():
            converted = cls.convert(module)
            if converted is not module:
                setattr(model, name, converted)
        return model

    @classmethod
    def _like(cls, module: _BatchNorm) -> SyncBatchNorm:
        made = cls(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
        made._parameters, made._buffers = dict(module._parameters), dict(module._buffers)
        made.training = module.training
        return made

    def meet_in(self, meeting: Meeting | None) -> None:
        """From here on its statistics are added up there; None: they are its own worker's."""
        if meeting is None:
            _MEETINGS.pop(self, None)
        else:
            _MEETINGS[self] = meeting

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2 or input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm: expected an input [B, {self.num_features}] or [B, {self.num_features}, ...], got "
                f"{list(input.shape)}"
            )

    def forward(self, input: Tensor) -> Tensor:
        meeting = _MEETINGS.get(self)
        if not self.training or meeting is None or not meeting.is_open:
            return super().forward(input)
        self._check_input_dim(input)
        return _Normalized.apply(input, self.weight, self.bias, self, meeting)

    def learn(self, total: Tensor) -> None:
        """Takes the statistics of a batch, [1 + 2 C] as they were added up, into the running ones."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        count, mean_C, var_C = _statistics(total)
        unbiased_C = var_C * (count / (count - 1))
        self.running_mean.mul_(1 - share).add_(mean_C.to(self.running_mean) * share)
        self.running_var.mul_(1 - share).add_(unbiased_C.to(self.running_var) * share)


def _statistics(total: Tensor) -> tuple[float, Tensor, Tensor]:
    """How many there are of each channel, their mean and variance."""
    count, sums = float(total[0]), total[1:].view(2, -1)
    mean_C = sums[0] / count
    return count, mean_C, (sums[1] / count - mean_C.square()).clamp(min=0)


class _Normalized(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_C: Tensor | None, bias_C: Tensor | None, module: SyncBatchNorm, meeting: Meeting
    ) -> Tensor:
        exact = x.double()  # sums of squares lose digits
        dims, shape = [0, *range(2, x.ndim)], [1, -1, *[1] * (x.ndim - 2)]
        count = exact.new_tensor([x.numel() / max(1, x.shape[1])])
        mine = torch.cat([count, exact.sum(dims), exact.square().sum(dims)])
        total = meeting.total(module, FORWARD, mine)
        num, mean_C, var_C = _statistics(total)
        if num <= 1:
            raise ValueError(
                "SyncBatchNorm: a single value for each channel, of all workers together, has no variance; give batches of more"
            )
        scale_C = (var_C + module.eps).rsqrt()
        normal = ((exact - mean_C.view(shape)) * scale_C.view(shape)).to(x.dtype)
        ctx.save_for_backward(normal, scale_C, weight_C)
        ctx.dims, ctx.shape, ctx.num, ctx.module, ctx.meeting = dims, shape, num, module, meeting
        y = normal if weight_C is None else normal * weight_C.view(shape)
        return y.clone() if weight_C is None else y if bias_C is None else y + bias_C.view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        normal, scale_C, weight_C = ctx.saved_tensors
        sum_C = grad.sum(ctx.dims, dtype=torch.float64)
        along_C = (grad * normal).sum(ctx.dims, dtype=torch.float64)
        grad_x = None
        if ctx.needs_input_grad[0]:
            total = ctx.meeting.total(ctx.module, BACKWARD, torch.cat([sum_C, along_C])) / ctx.num
            mean_C, mean_along_C = (part.view(ctx.shape).to(grad) for part in total.view(2, -1))
            each_C = scale_C if weight_C is None else scale_C * weight_C
            grad_x = (grad - mean_C - normal * mean_along_C) * each_C.view(ctx.shape).to(grad)
        grad_weight = along_C.to(weight_C) if ctx.needs_input_grad[1] else None
        grad_bias = sum_C.to(grad) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None
