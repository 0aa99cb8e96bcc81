"""Ragged calls of candidate attention, and what they give."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestpipe.ops import candidate_attention


class Case(NamedTuple):
    kind: str
    position: bool
    times: bool
    counts: tuple[int, ...] = (0, 1, 63, 64, 65, 3, 2)  # candidates of each sample
    lengths: tuple[int, ...] = (5, 200, 1, 0, 130, 0, 7)  # items of each history
    num_heads: int = 2
    width: int = 5  # of a head

    def __str__(self) -> str:
        bias = "+".join(name for name, there in (("position", self.position), ("time", self.times)) if there)
        return f"{self.kind}-{bias or 'no bias'}"


ALL = [
    Case(kind, position, times)
    for kind in ("silu", "weights")
    for position in (False, True)
    for times in (False, True)
    if kind == "silu" or position or times
]


def offsets_of(lengths: tuple[int, ...] | list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


def make(case: Case, *, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Arguments of candidate_attention by name; tensors of floats are leaves."""
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int, scale: float) -> Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype).requires_grad_()

    num_candidates, num_items, width = sum(case.counts), sum(case.lengths), case.num_heads * case.width
    given: dict[str, Any] = {
        "q_CE": leaf(num_candidates, width, scale=0.7),
        "k_CE": leaf(num_candidates, width, scale=0.7),
        "v_CE": leaf(num_candidates, width, scale=1),
        "offsets": offsets_of(case.counts),
        "history_k": leaf(num_items, width, scale=0.7),
        "history_v": leaf(num_items, width, scale=1),
        "history_offsets": offsets_of(case.lengths),
        "num_heads": case.num_heads,
        "kind": case.kind,
    }
    if case.kind == "weights":
        given |= {"q_CE": None, "k_CE": None, "history_k": None}
    if case.position:
        given["position_bias"] = leaf(max(case.lengths, default=0) + 1, scale=0.3)
    if case.times:
        given["times"] = torch.randint(10**5, (num_items,), generator=generator)
        given["now"] = torch.randint(10**5, 10**6, (len(case.lengths),), generator=generator)
        given["time_bias"] = leaf(40, scale=0.3)
    return given


def leaves(given: dict[str, Any]) -> dict[str, Tensor]:
    return {name: x for name, x in given.items() if isinstance(x, Tensor) and x.requires_grad}


def results(given: dict[str, Any], impl: str) -> dict[str, Tensor]:
    """The output and the gradient of every leaf."""
    out = candidate_attention(**given, impl=impl)
    direction = torch.sin(torch.arange(1.0, 1 + out.numel(), dtype=torch.float64)).view(out.shape).to(out.dtype)
    named = leaves(given)
    grads = torch.autograd.grad((out * direction).sum(), list(named.values()))
    return {"out": out.detach()} | dict(zip(named, grads, strict=True))


def select(given: dict[str, Any], samples: list[int]) -> dict[str, Any]:
    """The same call with some of its samples, in that order."""

    def of(name: str) -> Tensor:
        bounds = given[name].tolist()
        return torch.cat([torch.arange(0), *(torch.arange(bounds[b], bounds[b + 1]) for b in samples)])

    some = dict(given)
    for offsets, names in (
        ("offsets", ("q_CE", "k_CE", "v_CE")),
        ("history_offsets", ("history_k", "history_v", "times")),
    ):
        where = of(offsets)
        some[offsets] = offsets_of(given[offsets].diff()[samples].tolist())
        for name in (name for name in names if given.get(name) is not None):
            part = given[name].detach()[where]
            some[name] = part.requires_grad_() if part.is_floating_point() else part
    if "now" in given:
        some["now"] = given["now"][samples]
    return some | {"which": of("offsets")}
