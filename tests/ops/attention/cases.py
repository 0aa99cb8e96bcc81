"""Ragged calls of jagged attention, and how far two implementations are apart."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestpipe.ops.attention import jagged_attention


class Case(NamedTuple):
    kind: str
    position: bool
    times: bool
    lengths: tuple[int, ...] = (3, 0, 1, 63, 64, 65)
    tails: tuple[int, ...] | None = None  # of each sample, how many of its last tokens are queries
    num_heads: int = 2
    width: int = 5  # of a head

    def __str__(self) -> str:
        bias = "+".join(name for name, there in (("position", self.position), ("time", self.times)) if there)
        return f"{self.kind}-{bias or 'no bias'}{'-tails' if self.tails else ''}-{max(self.lengths)}"


class Call(NamedTuple):
    """Arguments of jagged_attention; `leaves` are those with gradients."""

    positional: tuple[Tensor | None, ...]
    named: dict[str, Any]

    def leaves(self) -> dict[str, Tensor]:
        tensors = dict(zip(("q", "k", "v"), self.positional, strict=False)) | self.named
        return {name: x for name, x in tensors.items() if isinstance(x, Tensor) and x.requires_grad}


def offsets_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def make(case: Case, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Call:
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape: int, scale: float) -> Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype).requires_grad_()

    num_keys, num_queries = sum(case.lengths), sum(case.lengths if case.tails is None else case.tails)
    columns = case.num_heads * case.width
    q, k, v = (
        leaf(num_queries, columns, scale=0.7),
        leaf(num_keys, columns, scale=0.7),
        leaf(num_keys, columns, scale=1),
    )
    named: dict[str, Any] = {"num_heads": case.num_heads, "kind": case.kind}
    if case.position:
        named["position_bias"] = leaf(max(case.lengths, default=0) + 3, scale=0.3)
    if case.times:
        named["times"] = torch.randint(10**5, (num_keys,), generator=generator).cumsum(0)
        named["time_bias"] = leaf(40, scale=0.3)
    if case.tails is not None:
        named["key_offsets"] = offsets_of(case.lengths)
    given = (None, None, v) if case.kind == "weights" else (q, k, v)
    return Call((*given, offsets_of(case.lengths if case.tails is None else case.tails)), named)


def results(call: Call, impl: str) -> dict[str, Tensor]:
    """The output and the gradient of every leaf."""
    out = jagged_attention(*call.positional, **call.named, impl=impl)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(out.dtype)
    leaves = call.leaves()
    grads = torch.autograd.grad((out * direction).sum(), list(leaves.values()))
    return {"out": out.detach()} | dict(zip(leaves, grads, strict=True))


def differences(case: Case, impl: str) -> dict[str, float]:
    """Of output and gradients, the largest difference from the reference in float64, relative to the largest entry."""
    call = make(case)
    got = results(call, impl)
    wide = Call(*(_double(part) for part in call))
    exact = results(wide, "reference")
    assert got.keys() == exact.keys()
    return {
        name: float((got[name] - exact[name]).abs().amax() / exact[name].abs().amax().clamp(min=1e-9))
        for name in exact
        if exact[name].numel()
    }


def _double(values: Any) -> Any:
    def one(x: Any) -> Any:
        return x.detach().double().requires_grad_() if isinstance(x, Tensor) and x.requires_grad else x

    return {name: one(x) for name, x in values.items()} if isinstance(values, dict) else tuple(map(one, values))


ALL = [
    Case(kind, position, times)
    for kind in ("silu", "softmax", "weights")
    for position in (False, True)
    for times in (False, True)
    if kind != "weights" or position or times
]
TAILS = [Case(kind, True, True, (70, 5, 0, 130), (3, 5, 0, 66)) for kind in ("silu", "softmax", "weights")]
