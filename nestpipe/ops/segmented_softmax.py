"""The loss of next-item models against many negatives: rows are read a segment at a time, in the backward once more.

What is kept between forward and backward is a few numbers per position. Logits and rows of a segment are all that is in memory
besides, so a step takes no more of it however many negatives there are. That is also how rows stay in host memory while the
model computes on a device.

Shape legend: P positions of all samples, U units (samples, or positions) with K negatives each, J units whose negatives a
unit uses, N = U x K negatives, D row width; of a segment: n units, L positions of each, C of their J x K negatives.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestpipe.batch import Jagged, Streamed
from nestpipe.kernels.rows import NONE, scatter_add
from nestpipe.ops.groups import Group, groups_of
from nestpipe.ops.halves import rounded
from nestpipe.ops.precision import in_float32

SEGMENT = 1 << 20  # values of rows and logits at a time: 4 MB, about what a core's cache holds
EPS = 1e-6  # as in `normalize`


@in_float32
def segmented_softmax(
    states_PD: Tensor,
    targets_PD: Tensor,
    negatives: Jagged | Streamed,
    target_keys_P: Tensor,
    negative_keys_N: Tensor,
    offsets: Tensor,
    *,
    per: str = "sample",
    share: int = 0,
    normalize: bool = False,
    dtype: torch.dtype = torch.float32,
    segment: int = SEGMENT,
) -> Tensor:
    """[P]: -log(e^true / (e^true + sum of e^negative)), logits being dot products with the state.

    `offsets` says which positions are a sample's; negatives whose key is the position's target do not count there.
    per: "sample": each sample has the same number K of negatives, for all its positions; "position": each position has, one after
        the other in the list of its sample.
    share: a sample (or position) also uses the negatives of so many others, those behind it in a shuffle of all that are there:
        then a loss depends on which samples are together. The shuffle is a function of the keys alone.
    normalize: negatives to length 1 first. (States and targets are taken as they are.)
    dtype: half precision rounds each row where it is gathered; products and gradients are float32.
    segment: how many values of rows and logits are in memory at a time.
    """
    assert per in ("sample", "position")
    num_positions = len(states_PD)
    num_units = len(offsets) - 1 if per == "sample" else num_positions
    num_negatives = negatives_each(negatives.lengths, offsets, per=per)
    units_UJ = shared_units(num_units, share, negative_keys_N)
    if per == "sample":
        groups = groups_of(offsets, width=math.gcd(units_UJ.shape[1] * num_negatives, states_PD.shape[1]))
    else:
        groups = [_of_one_each(num_positions, offsets)]
    walk = Walk(groups, units_UJ, num_negatives, states_PD.shape[1], segment)
    leaf = negatives.leaf if isinstance(negatives, Streamed) else negatives.values
    how = _How(negatives, target_keys_P, negative_keys_N, normalize, dtype, walk)
    return _SegmentedSoftmax.apply(states_PD, targets_PD, leaf, how)


def negatives_each(lengths_B: Tensor, offsets: Tensor, *, per: str) -> int:
    """K. lengths_B: how many negatives each sample has. Raises ValueError, naming a sample, if not all have K."""
    counts_B = offsets[1:] - offsets[:-1] if per == "position" else torch.ones_like(lengths_B)
    num = int(lengths_B.sum()) // max(int(counts_B.sum()), 1)
    wrong = lengths_B != counts_B * num
    if num == 0:
        wrong |= counts_B > 0
    if wrong.any():
        sample = int(wrong.nonzero()[0])
        raise ValueError(
            f"every {per} needs the same number of negatives, at least 1; there are {int(lengths_B.sum())} for "
            f"{int(counts_B.sum())} {per}s, sample {sample} has {int(lengths_B[sample])} for {int(counts_B[sample])}"
        )
    return max(num, 1)  # where there are none of either, no dimension that is reduced is empty


def shared_units(num_units: int, share: int, negative_keys_N: Tensor) -> Tensor:
    """[U, J]: whose negatives each unit uses, its own first; fewer others where there are not as many."""
    device = negative_keys_N.device
    if not share or num_units < 2:
        return torch.arange(num_units, device=device).unsqueeze(1)
    # The keys differ from batch to batch and are the same under every schedule, on every kind of worker.
    draw = torch.Generator().manual_seed(int(negative_keys_N.sum()) & (2**63 - 1))
    order_U = torch.randperm(num_units, generator=draw)
    place_U = torch.empty_like(order_U)
    place_U[order_U] = torch.arange(num_units)
    steps_J = torch.arange(min(share, num_units - 1) + 1)
    return order_U[(place_U.unsqueeze(1) + steps_J) % num_units].to(device)


@dataclasses.dataclass(eq=False)
class Walk:
    """The order in which segments are read: the same in forward and backward, and of every unit by itself, so that sums are
    added up alike whatever else is in the batch."""

    groups: list[Group]
    units_UJ: Tensor
    num_negatives: int
    dim: int
    segment: int

    def pieces(self) -> Iterator[tuple[Group, int, int, Iterator[Tensor]]]:
        """Units first to last - 1 of a group, and the places [n, C] of their negatives, some at a time."""
        width = self.units_UJ.shape[1] * self.num_negatives
        for group in self.groups:
            room = max(1, self.segment // (self.dim + group.length))
            together = max(1, room // max(width, 1))
            for first in range(0, len(group), together):
                last = min(first + together, len(group))
                yield group, first, last, self._places(self.units_UJ[group.samples[first:last]], width, room)

    def _places(self, units_nJ: Tensor, width: int, room: int) -> Iterator[Tensor]:
        for begin in range(0, width, room):
            column_C = torch.arange(begin, min(begin + room, width), device=units_nJ.device)
            of_unit_C = column_C % self.num_negatives
            yield units_nJ[:, column_C // self.num_negatives] * self.num_negatives + of_unit_C


class _How(NamedTuple):
    """All of the operation that has no gradient."""

    negatives: Jagged | Streamed
    target_keys_P: Tensor
    negative_keys_N: Tensor
    normalize: bool
    dtype: torch.dtype
    walk: Walk


class _Segment(NamedTuple):
    rows_nCD: Tensor  # as products take them
    scale_nC1: Tensor | None  # what they were multiplied by to have length 1
    projected_nC1: Tensor | None  # whether that depends on the row
    logits_nLC: Tensor


class _SegmentedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states_PD: Tensor, targets_PD: Tensor, leaf: Tensor, how: _How) -> Tensor:
        true_P = torch.linalg.vecdot(states_PD, targets_PD)
        read = _reader(how, leaf)
        # One entry more: where the padding of groups is written.
        total_P = true_P.new_empty(len(true_P) + 1)
        for group, first, last, places in how.walk.pieces():
            top_nL = group.take(true_P, first, last)
            sum_nL = torch.ones_like(top_nL)
            for places_nC in places:
                logits_nLC = _segment(how, read, group, first, last, states_PD, places_nC).logits_nLC
                higher_nL = torch.maximum(logits_nLC.amax(-1), top_nL)
                exp_nLC = logits_nLC.sub_(higher_nL.unsqueeze(-1)).exp_()
                sum_nL = sum_nL * (top_nL - higher_nL).exp_() + exp_nLC.sum(-1)
                top_nL = higher_nL
            group.put(total_P, first, last, top_nL + sum_nL.log())
        ctx.how = how
        ctx.save_for_backward(states_PD, targets_PD, leaf, true_P, total_P[:-1])
        return total_P[:-1] - true_P

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_P: Tensor) -> tuple[Tensor | None, ...]:
        states_PD, targets_PD, leaf, true_P, total_P = ctx.saved_tensors
        how: _How = ctx.how
        read = _reader(how, leaf)
        grad_leaf = None if isinstance(how.negatives, Streamed) else torch.zeros_like(leaf)
        grad_states_PD = states_PD.new_empty(len(states_PD) + 1, states_PD.shape[1])
        for group, first, last, places in how.walk.pieces():
            states_nLD = group.take(states_PD, first, last)
            total_nL1 = group.take(total_P, first, last).unsqueeze(-1)
            grad_nL1 = group.take_or_zero(grad_P, first, last).unsqueeze(-1)
            grad_states_nLD = torch.zeros_like(states_nLD)
            for places_nC in places:
                segment = _segment(how, read, group, first, last, states_PD, places_nC)
                grad_nLC = segment.logits_nLC.sub_(total_nL1).exp_().mul_(grad_nL1)
                grad_states_nLD.baddbmm_(grad_nLC, segment.rows_nCD)
                grad_rows_nCD = torch.bmm(grad_nLC.transpose(1, 2), states_nLD)
                if segment.scale_nC1 is not None:
                    along_nC1 = torch.linalg.vecdot(grad_rows_nCD, segment.rows_nCD).unsqueeze(-1)
                    grad_rows_nCD.addcmul_(segment.rows_nCD, along_nC1 * segment.projected_nC1, value=-1)
                    grad_rows_nCD.mul_(segment.scale_nC1)
                _add(how.negatives, grad_leaf, places_nC.flatten(), grad_rows_nCD.flatten(0, 1))
            group.put(grad_states_PD, first, last, grad_states_nLD)
        grad_true_P1 = (grad_P * ((true_P - total_P).exp_() - 1)).unsqueeze(-1)
        grad_states_PD = grad_states_PD[:-1].addcmul_(targets_PD, grad_true_P1)
        return grad_states_PD, states_PD * grad_true_P1, grad_leaf, None


def _reader(how: _How, leaf: Tensor) -> Callable[[Tensor], Tensor]:
    """Reads rows by their places."""
    if isinstance(how.negatives, Streamed):
        gather = how.negatives.gather
        return lambda places: gather(places, how.dtype)
    return lambda places: rounded(leaf.index_select(0, places), how.dtype)


def _segment(
    how: _How,
    read: Callable[[Tensor], Tensor],
    group: Group,
    first: int,
    last: int,
    states_PD: Tensor,
    places_nC: Tensor,
) -> _Segment:
    rows_nCD = read(places_nC.flatten()).view(*places_nC.shape, -1)
    scale_nC1 = projected_nC1 = None
    if how.normalize:
        norm_nC1 = torch.linalg.vector_norm(rows_nCD, dim=-1, keepdim=True)
        scale_nC1, projected_nC1 = norm_nC1.clamp(min=EPS).reciprocal_(), norm_nC1 > EPS
        rows_nCD = rows_nCD.mul_(scale_nC1)
    keys_nL1 = group.take(how.target_keys_P, first, last).unsqueeze(-1)
    hits_nLC = keys_nL1 == how.negative_keys_N[places_nC].unsqueeze(1)
    logits_nLC = torch.bmm(group.take(states_PD, first, last), rows_nCD.transpose(1, 2))
    return _Segment(rows_nCD, scale_nC1, projected_nC1, logits_nLC.masked_fill_(hits_nLC, -torch.inf))


def _add(negatives: Jagged | Streamed, grad_ND: Tensor | None, places: Tensor, grads: Tensor) -> None:
    """In the order of the places, of which several may be the same."""
    if isinstance(negatives, Streamed):
        negatives.add_grad(places, grads)
        return
    assert grad_ND is not None
    if grad_ND.device.type == "cpu" and grad_ND.is_contiguous():  # index_add_ goes through torch once for every row
        scatter_add(grads.contiguous().numpy(), NONE, places.numpy(), grad_ND.numpy())
    else:
        grad_ND.index_add_(0, places, grads)


def _of_one_each(num_positions: int, like: Tensor) -> Group:
    """Positions as units: nothing to pad."""
    each = torch.arange(num_positions, device=like.device)
    return Group(each, 1, each, each, each[:0], 0)
