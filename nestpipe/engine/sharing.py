"""Losses over the samples of all workers: what they are compared with travels to all of them, and its gradients back.

A model that declares `mixes_samples = "global"` has its pass in two halves. `embed(batch, rows)` makes of each sample what
stays with it (`own`) and what all samples of all workers see (`shared`); `compare(own, shared, first)` makes losses of both. In
between is SHARE, behind `compare` is UNSHARE: no collective is inside the model. Each half is differentiated by itself: COMPARE
goes back to what it was given, UNSHARE adds up what all workers have found there, BWD goes back from that.

A worker without samples neither sends nor gets anything. One in trouble says so in SHARE, and nobody compares; one whose
`compare` fails sends zeros in UNSHARE; all leave at AGREE.

Shape legend: B samples of this worker, n entries that one worker shares, N of all workers, W workers.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nestpipe.arena import as_tensor
from nestpipe.batch import Batch, Jagged
from nestpipe.engine.outputs import Checked, checked_output, tasks_of
from nestpipe.engine.reducer import all_finite
from nestpipe.exchange.transport import Transport
from nestpipe.ops.precision import wide

GLOBAL = "global"  # what a model declares that mixes the samples of all workers
FINE, SPOILT, FAILED = range(
    3
)  # what a worker says of itself in SHARE; SPOILT: something is not finite, which is no failure
STATE, SAMPLES, ENTRIES, KIND = range(4)  # what it says


def shares(model: nn.Module) -> bool:
    return isinstance(declared := getattr(model, "mixes_samples", None), str) and declared == GLOBAL


def embed(model: nn.Module, batch: Batch, rows: dict[str, Any]) -> tuple[dict[str, Tensor | Jagged], dict[str, Tensor]]:
    """What the model makes of a micro-batch, checked."""
    made = model.embed(batch, rows)  # type: ignore[operator]
    halves = made if isinstance(made, tuple) and len(made) == 2 else ()
    if not halves or not all(isinstance(half, dict) for half in halves) or not halves[1]:
        raise ValueError(
            "the model's embed must return two dicts of tensors, as in `return {'user': users}, {'item': items}`: what stays "
            "with its sample, and what all samples see"
        )
    own, shared = map(wide, halves)
    for name, part in own.items():
        if not isinstance(part, (Tensor, Jagged)) or len(part) != batch.size:
            raise ValueError(
                f"the model's embed returned {_kind_of(part)} as {name!r} for {batch.size} samples; what stays with a sample is "
                f"a tensor [B, ...] or a Jagged, one entry per sample"
            )
    lengths = {len(part) if isinstance(part, Tensor) and part.ndim else None for part in shared.values()}
    if len(lengths) > 1 or None in lengths:
        kinds = ", ".join(f"{name!r}: {_kind_of(part)}" for name, part in shared.items())
        raise ValueError(
            f"the model's embed shares {kinds}; what all samples see is tensors of one length: vectors, and the keys and "
            f"numbers that belong to them"
        )
    return own, shared


def _kind_of(part: Any) -> str:
    return f"a tensor {list(part.shape)}" if isinstance(part, Tensor) else type(part).__name__


@dataclasses.dataclass
class _Cut:
    """A tensor that micro-batches have made, end to end and as a leaf: where both halves of the model are cut apart."""

    parts: dict[int, Tensor]  # by micro-batch, with what they are made of
    leaf: Tensor

    @classmethod
    def through(cls, parts: dict[int, Tensor]) -> _Cut:
        each = [part.detach() for part in parts.values()]
        leaf = each[0].view_as(each[0]) if len(each) == 1 else torch.cat(each)
        learns = leaf.is_floating_point() and any(part.requires_grad for part in parts.values())
        return cls(parts, leaf.requires_grad_(learns))

    def back(self, m: int, grad: Tensor | None) -> Tensor | None:
        """A number whose gradient with respect to part m is its piece of `grad`."""
        part = self.parts[m]
        if grad is None or not part.requires_grad:
            return None
        begin = sum(len(self.parts[k]) for k in self.parts if k < m)
        return (part * grad[begin : begin + len(part)]).sum()


@dataclasses.dataclass
class Shares:
    """Of one batch in flight, from FWD to its last BWD.

    void: agreed in SHARE: a worker has trouble, and nobody compares.
    told: by worker, what it has said of itself.
    everyone: what all workers have shared, end to end by rank; this worker's begins at `first`.
    """

    void: bool = False
    told: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((1, 4), np.int64))
    everyone: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    first: int = 0
    _made: dict[int, tuple[dict[str, Tensor | Jagged], dict[str, Tensor]]] = dataclasses.field(default_factory=dict)
    _own: dict[str, _Cut] = dataclasses.field(default_factory=dict)
    _shared: dict[str, _Cut] = dataclasses.field(default_factory=dict)
    _grads: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # of `shared`, of all workers
    _kinds: list[dict[str, str]] = dataclasses.field(default_factory=list)  # of own and shared

    def add(self, m: int, own: dict[str, Tensor | Jagged], shared: dict[str, Tensor]) -> None:
        """Raises ValueError if they are not of the kind that other micro-batches have made: they are put end to end."""
        kinds = [{name: _kind(part) for name, part in half.items()} for half in (own, shared)]
        if self._made and kinds != self._kinds:
            pairs = [
                (name, before.get(name), kind.get(name))
                for before, kind in zip(self._kinds, kinds, strict=True)
                for name in before | kind
            ]
            name, before, now = next(pair for pair in pairs if pair[1] != pair[2])
            raise ValueError(
                f"the model's embed returned {now or 'nothing'} as {name!r} for one micro-batch and {before or 'nothing'} for "
                f"another; return the same names, shapes and types for all"
            )
        self._made[m], self._kinds = (own, shared), kinds

    def __contains__(self, m: int) -> bool:
        return m in self._made

    def cut(self) -> None:
        """Where all micro-batches have been embedded."""
        first_own, first_shared = next(iter(self._made.values()), ({}, {}))
        for name in first_own:
            self._own[name] = _Cut.through({m: _values(own[name]) for m, (own, _) in self._made.items()})
        for name in first_shared:
            self._shared[name] = _Cut.through({m: shared[name] for m, (_, shared) in self._made.items()})

    @property
    def own(self) -> dict[str, Tensor | Jagged]:
        """For `compare`."""
        joined: dict[str, Tensor | Jagged] = {}
        for name, cut in self._own.items():
            parts = [own[name] for own, _ in self._made.values()]
            lists = [part for part in parts if isinstance(part, Jagged)]
            joined[name] = dataclasses.replace(Jagged.joined(lists), values=cut.leaf) if lists else cut.leaf
        return joined

    @property
    def given(self) -> dict[str, Tensor]:
        """What this worker shares."""
        return {name: cut.leaf for name, cut in self._shared.items()}

    @property
    def not_finite(self) -> tuple[str, int, int, float] | None:
        """The name of something that is not finite, which entry of how many, and the value."""
        leaves = [(name, cut.leaf.detach()) for name, cut in (*self._own.items(), *self._shared.items())]
        floats = [(name, leaf) for name, leaf in leaves if leaf.is_floating_point()]
        if all_finite([leaf for _, leaf in floats]):
            return None
        name, leaf = next((name, leaf) for name, leaf in floats if not torch.isfinite(leaf).all())
        place = (~torch.isfinite(leaf)).nonzero()[0]
        return name, int(place[0]), len(leaf), float(leaf[tuple(place)])

    def take_back(self, grads: dict[str, Tensor]) -> None:
        self._grads, self.everyone = grads, {}

    def loss(self, m: int) -> Tensor | None:
        """A number whose gradients are those of the whole batch's loss, with respect to all that micro-batch m has made."""
        terms = [cut.back(m, cut.leaf.grad) for cut in self._own.values()]
        terms += [cut.back(m, self._grads.get(name)) for name, cut in self._shared.items()]
        learned = [term for term in terms if term is not None]
        return sum(learned[1:], learned[0]) if learned else None


class Sharing:
    """The exchange of one worker with all others; `transport` is the compute lane's own."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def share(self, part: Shares, *, state: int, samples: int) -> None:
        """All get what all share; or all hear that one has trouble. Raises ValueError, on all that have samples, if they share
        different things."""
        transport, given = self.transport, part.given
        kind = ", ".join(f"{name} {_spelt(tensor)}" for name, tensor in given.items())
        entries = len(next(iter(given.values()))) if given else 0
        mine = np.array([state, samples, entries, zlib.crc32(kind.encode())], np.int64)
        part.told = transport.exchange_rows(np.tile(mine, (transport.world, 1)))
        part.void = bool((part.told[:, STATE] != FINE).any())
        peers = np.flatnonzero(part.told[:, SAMPLES]).tolist()
        if not part.void and len(set(part.told[peers, KIND].tolist())) > 1:
            part.void = True
            if samples:
                raise ValueError(
                    f"workers share different things, this one {kind}; embed must return the same names, shapes and types on "
                    f"every worker"
                )
        if part.void or not samples:
            return
        if len(peers) == 1:
            part.everyone = given
            return
        packed = {name: _bytes_of(tensor) for name, tensor in given.items()}
        block = np.concatenate(list(packed.values()), axis=1)
        blocks = [np.empty((part.told[w, ENTRIES], block.shape[1]), np.uint8) for w in peers]
        here = peers.index(transport.rank)
        blocks[here] = block
        transport.spread(blocks, peers)
        part.first = int(part.told[: transport.rank, ENTRIES].sum())
        part.everyone = {
            name: values.requires_grad_(given[name].requires_grad)
            for name, values in _unpacked(np.concatenate(blocks), given).items()
        }

    def compare(self, model: nn.Module, part: Shares) -> Checked:
        output = model.compare(part.own, part.everyone, part.first)  # type: ignore[operator]
        return checked_output(output, int(part.told[self.transport.rank, SAMPLES]), tasks_of(model))

    def unshare(self, part: Shares) -> None:
        """Gradients of what this worker has shared, added up over all workers by rank."""
        if part.void:
            return
        transport, told = self.transport, part.told
        learns = {name: tensor for name, tensor in part.given.items() if tensor.requires_grad}
        found = {name: part.everyone[name].grad for name in learns} if part.everyone else {}
        if (told[:, SAMPLES] > 0).sum() <= 1:
            part.take_back({name: grad for name, grad in found.items() if grad is not None})
            return
        takes_part, entries = told[:, SAMPLES] > 0, told[:, ENTRIES]
        mine, num = bool(takes_part[transport.rank]), int(entries.sum())
        grads = {
            name: tensor.new_zeros((num, *tensor.shape[1:])) if (grad := found.get(name)) is None else grad
            for name, tensor in learns.items()
        }
        width = sum(_bytes_of(tensor).shape[1] for tensor in learns.values())
        leaves = np.concatenate([_bytes_of(grad) for grad in grads.values()], axis=1) if learns else _nothing(0, 0)
        own_entries = int(entries[transport.rank])
        comes = _nothing(own_entries * int(takes_part.sum()) if mine else 0, width)
        transport.all_to_all(leaves, entries * mine, comes, own_entries * takes_part * mine)
        sums: dict[str, Tensor] = {}
        if mine and own_entries and learns:
            for block in np.split(comes, int(takes_part.sum())):
                for name, grad in _unpacked(block, learns).items():
                    sums[name] = sums[name] + grad if name in sums else grad
        part.take_back(sums)


def _values(part: Tensor | Jagged) -> Tensor:
    return part.values if isinstance(part, Jagged) else part


def _nothing(entries: int, width: int) -> np.ndarray:
    return np.empty((entries, width), np.uint8)


def _kind(part: Tensor | Jagged) -> str:
    """All but how many there are."""
    tensor = _values(part)
    shape = ", ".join(map(str, ("n", *tensor.shape[1:])))
    return f"{'lists of ' if isinstance(part, Jagged) else ''}[{shape}] {str(tensor.dtype).removeprefix('torch.')}"


def _spelt(tensor: Tensor) -> str:
    return _kind(tensor) + (" with a gradient" if tensor.requires_grad else "")


def _bytes_of(tensor: Tensor) -> np.ndarray:
    """[n, bytes of an entry]"""
    flat = tensor.detach().cpu().reshape(len(tensor), math.prod(tensor.shape[1:])).contiguous()
    return flat.view(torch.uint8).numpy()


def _unpacked(block: np.ndarray, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """[N, bytes of all of an entry], as tensors of these kinds."""
    tensors, begin = {}, 0
    for name, tensor in like.items():
        width = math.prod(tensor.shape[1:]) * tensor.element_size()
        piece = as_tensor(np.ascontiguousarray(block[:, begin : begin + width]))
        values = piece.view(tensor.dtype).reshape(len(block), *tensor.shape[1:])
        tensors[name], begin = values.to(tensor.device), begin + width
    return tensors
