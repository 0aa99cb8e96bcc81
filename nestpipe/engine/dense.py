"""The dense part: the user's model, its gradients summed over workers, its optimizer."""

from __future__ import annotations

import collections
import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nestpipe.batch import Batch
from nestpipe.engine import lr_scheduler as schedulers
from nestpipe.engine.computing import Computing
from nestpipe.engine.outputs import Checked, checked_output, tasks_of
from nestpipe.engine.reducer import Reducer, all_finite
from nestpipe.kernels.norm import squares
from nestpipe.process import current_device

EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class Dense:
    """Forward, backward and update of the model's own parameters: all of them, also those that are frozen at first.

    lr_scheduler: makes a torch scheduler from the optimizer; see Trainer. clip_norm: of the gradient that the optimizer gets; 0:
    it is not clipped. computing: how the model is run.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[Any], torch.optim.Optimizer],
        *,
        lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        clip_norm: float = 0.0,
        computing: Computing | None = None,
    ) -> None:
        for name, tensor in _tensors(model):
            if isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
                raise ValueError(
                    f"the model's {name} has no shape yet (a lazy module); give the module its sizes, or run one forward "
                    f"before the Trainer is made"
                )
        self.tasks = tasks_of(model)
        self.device = current_device()
        self.model = model.to(self.device)
        self._names, self._parameters = [], []
        for name, parameter in model.named_parameters():
            self._names.append(name)
            self._parameters.append(parameter)
        self.optimizer = _checked_optimizer(optimizer(self._parameters), model) if self._parameters else None
        self.lr_scheduler = None if lr_scheduler is None else schedulers.made(lr_scheduler, self.optimizer)
        # What learning rates are multiplied by, where a scheduler has them in its hands.
        self.lr_scale = 1.0
        self._clip_norm = clip_norm
        self._computing = Computing() if computing is None else computing
        self._run = self._computing.prepared(self.model)
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
        kind = {"model: tasks": self.tasks, "dense_optimizer": type(self.optimizer).__name__}
        names = {id(parameter): name for name, parameter in zip(self._names, self._parameters, strict=True)}
        settings: dict[str, Any] = {}
        for number, group in enumerate(self.optimizer.param_groups if self.optimizer is not None else ()):
            # By their places too: so they are told apart in a checkpoint.
            for place, parameter in enumerate(group["params"]):
                settings[f"dense_optimizer: parameter {place} of group {number}"] = names[id(parameter)]
            for name, value in group.items():
                if isinstance(value, (int, float, str, tuple, list, Tensor)) and name != "params":
                    settings[f"dense_optimizer: {name} of group {number}"] = value
        if self.lr_scheduler is not None:
            kind["lr_scheduler"] = type(self.lr_scheduler).__name__
            settings["lr_scheduler"] = schedulers.state_of(self.lr_scheduler)
        return {**model, **kind, **settings}

    @property
    def is_compiled(self) -> bool:
        return self._computing.compile

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Around what the model computes, also where it is not `forward`."""
        return self._computing.autocast(self.device)

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Checked:
        with self.autocast():
            return call(self._run, batch, rows, self.tasks)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """`last`: of the step, so that the sum over workers can begin with what is complete."""
        if self._reducer is not None:
            self._reducer.backward(loss, last=last)
        else:
            loss.backward()

    def reach(self) -> float:
        """How far gradients of this worker's samples go, if there are others' to add, after the last backward: see Reducer. NaN
        or infinity if one is not finite."""
        if self._reducer is not None:
            return self._reducer.reach()
        return 0.0 if all_finite([p.grad for p in self._parameters if p.grad is not None]) else math.nan

    def not_finite(self) -> str:
        """The name of a parameter whose gradient is not."""
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

    def update(self, scale: float, *, lr_factor: float = 1.0) -> float | None:
        """Multiplies the sum of gradients over all workers by scale (1 / global weight), clips it and steps the optimizer, with
        learning rates times lr_factor. Returns the norm of the gradient, if it is to be clipped."""
        if self.optimizer is None:
            return None
        grads = [p.grad for p in self._parameters if p.grad is not None]
        norm = None
        if self._clip_norm:
            norm = scale * math.sqrt(sum_of_squares(grads))
            scale *= min(1.0, self._clip_norm / (norm + EPS))
        if grads:
            torch._foreach_mul_(grads, scale)
        with self._rates_times(lr_factor):
            self.optimizer.step()
        self.forget()
        return norm

    @contextlib.contextmanager
    def _rates_times(self, factor: float) -> Iterator[None]:
        """For one step of the optimizer: in between they are those of the user, or of the scheduler."""
        groups = self.optimizer.param_groups if self.optimizer is not None and factor != 1.0 else []
        rates = [group["lr"] for group in groups if "lr" in group]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * factor
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def next_step(self) -> None:
        """After each step, also one without an update."""
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def learning_rates(self) -> list[float]:
        """Of each group, as they are now."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [float(group.get("lr", 0.0)) for group in groups]

    def scale_lr(self, factor: float) -> None:
        """Every learning rate becomes `factor` times what it was at the start; with a scheduler, times what that makes of it."""
        if self.lr_scheduler is not None:
            self.lr_scale = factor
            return
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


def sum_of_squares(grads: Sequence[Tensor]) -> float:
    """In float64 and, on CPUs, in one order however many threads there are: workers must not differ in a bit of it."""
    total = 0.0
    for grad in grads:
        if grad.device.type == "cpu":
            total += squares(grad.detach().float().reshape(-1).numpy())
        else:
            total += float(torch.linalg.vector_norm(grad, dtype=torch.float64).square())
    return total


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers, also those that are not saved with the model."""
    return [*model.named_parameters(), *model.named_buffers()]


def _broadcast(tensor: Tensor, group: dist.ProcessGroup) -> None:
    whole = tensor.contiguous()
    dist.broadcast(whole, src=0, group=group)
    if whole.data_ptr() != tensor.data_ptr():
        # An expanded tensor has many entries in one place: it is written to once.
        once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
        tensor[once].copy_(whole[once])


def remember(model: nn.Module) -> Callable[[], None]:
    """What it returns puts the model back as it is now: modes, attributes, generators, parameters and buffers, also those that
    were replaced. Lists and dicts get their entries back, but what has changed inside an entry stays."""
    attributes = [(module, dict(module.__dict__)) for module in model.modules()]
    values = [value for _, before in attributes for value in before.values()]  # _parameters and _buffers are among them
    containers = [(v, copy.copy(v)) for v in values if isinstance(v, (dict, list, set, collections.deque))]
    generators = [(value, value.get_state()) for value in values if isinstance(value, torch.Generator)]
    tensors = [*model.parameters(), *model.buffers(), *(value for value in values if isinstance(value, Tensor))]
    contents = [(tensor, tensor.data, tensor.data.clone()) for tensor in tensors if tensor.layout == torch.strided]

    def put_back() -> None:
        for module, before in attributes:
            for name in module.__dict__.keys() - before.keys():
                del module.__dict__[name]
            module.__dict__.update(before)
        for value, content in containers:
            if _entries(value) != _entries(content):
                value.clear()
                (value.extend if isinstance(value, (list, collections.deque)) else value.update)(content)
        for generator, state in generators:
            generator.set_state(state)
        for tensor, data, numbers in contents:
            if tensor.data_ptr() != data.data_ptr():
                tensor.data = data
            if not torch.equal(data, numbers):
                data.copy_(numbers)

    return put_back


def _entries(container: Any) -> list[Any]:
    """Which objects it holds: tensors cannot be compared by value, or not cheaply."""
    entries = container.items() if isinstance(container, dict) else ((entry, None) for entry in container)
    return [(id(entry), id(value)) for entry, value in entries]


def _checked_optimizer(optimizer: Any, model: nn.Module) -> torch.optim.Optimizer:
    if not all(hasattr(optimizer, name) for name in ("step", "param_groups", "state_dict", "load_state_dict")):
        raise ValueError(
            f"dense_optimizer returned {type(optimizer).__name__}; it must return a torch optimizer made from the parameters "
            f"that it is given, as in dense_optimizer=lambda p: torch.optim.Adam(p, 1e-3)"
        )
    own = {id(parameter) for parameter in model.parameters()}
    trainable = any(parameter.requires_grad for parameter in model.parameters())
    if trainable and not any(group["params"] for group in optimizer.param_groups):
        raise ValueError("the dense optimizer has no parameters; make it from those that dense_optimizer is given")
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in own:
                raise ValueError(
                    f"parameter {place} of group {number} of the dense optimizer, of shape {tuple(parameter.shape)}, is not the "
                    f"model's: its gradients would not be summed over workers, nor its values saved. Make the optimizer from the "
                    f"parameters that dense_optimizer is given, or put that one into the model"
                )
    return optimizer


def call(
    model: Callable[[Batch, dict[str, Any]], Any], batch: Batch, rows: dict[str, Any], tasks: tuple[str, ...]
) -> Checked:
    """The model's checked output. An error that comes of labels which are not there says so."""
    try:
        output = model(batch, rows)
    except (AttributeError, TypeError) as error:
        if batch.labels is None and "NoneType" in str(error):
            error.add_note("the batch has no labels: set Batch.labels, which the model seems to read")
        raise
    return checked_output(output, batch.size, tasks)
