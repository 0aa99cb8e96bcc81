"""How the model is run: in which precision, and whether through torch.compile."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nestpipe.engine.sharing import shares
from nestpipe.errors import did_you_mean

PRECISIONS = ("float32", "bf16")


@dataclasses.dataclass(frozen=True)
class Computing:
    """See Trainer."""

    precision: str = "float32"
    compile: bool = False

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision {self.precision!r}, {did_you_mean(str(self.precision), PRECISIONS)}")
        if not isinstance(self.compile, bool):
            raise ValueError(f"compile must be True or False, got {self.compile!r}")

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """The model's weights are cast anew in every forward: they change in between, and a cache would not know."""
        if self.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=torch.bfloat16)

    def prepared(self, model: nn.Module) -> Callable[..., Any]:
        """What is called in place of the model."""
        return compiled(model) if self.compile else model


def compiled(model: nn.Module) -> Callable[..., Any]:
    """The model through torch.compile, for sizes that change from batch to batch."""
    if shares(model):
        raise ValueError(
            f"compile=True is for the model's forward, and {type(model).__name__} declares mixes_samples = 'global': it trains "
            f"by embed and compare. Leave compile out, or compile its parts yourself, as in model.tower.compile(dynamic=True)"
        )
    if next((p.device.type for p in model.parameters()), "cpu") == "cpu" and not finds_a_compiler():
        raise ValueError(
            "compile=True needs a C++ compiler on the CPU, and there is none on the path (g++, clang++, or the one that the "
            "variable CXX names); install one, or leave compile out"
        )
    run = torch.compile(model, dynamic=True)

    def call(*args: Any) -> Any:
        try:
            return run(*args)
        except Exception as error:
            if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise ValueError(
                    f"torch.compile fails on {type(model).__name__} ({_first_line(error)}); leave compile out, or put "
                    f"torch.compiler.disable on the part of the model that it names"
                ) from error
            raise

    return call


def finds_a_compiler() -> bool:
    """Of C++, as torch.compile needs it on CPUs."""
    from torch._inductor import config  # imports much: only where something is compiled

    named = config.cpp.cxx
    return any(shutil.which(name) for name in (named if isinstance(named, (tuple, list)) else (named,)) if name)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
