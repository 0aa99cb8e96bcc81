"""RowStream: the rows of a streamed feature, where they were received; read, and their gradients added, a part at a time.

Shape legend: n rows of a part, D row width.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nestpipe.batch import Streamed
from nestpipe.engine.reducer import all_finite
from nestpipe.kernels.rows import NONE, gather, rows_of, scatter_add
from nestpipe.ops.halves import HALVES, from_half, to_half


class RowStream:
    """Of one feature and micro-batch.

    received, positions: rows, and which of them each key has. grads, grad_positions: where their gradients are added up; no
    grads: in evaluation. not_finite: a gradient that is not, for the user.
    """

    def __init__(
        self,
        feature: str,
        received: np.ndarray,
        positions: np.ndarray,
        grads: np.ndarray | None,
        grad_positions: np.ndarray,
        device: torch.device,
    ) -> None:
        self.feature = feature
        self.not_finite: float | None = None
        self._received, self._positions = received, positions
        self._grads, self._grad_positions = grads, grad_positions
        self._device = device
        self._closed = False

    def streamed(self, offsets: Tensor) -> Streamed:
        """As a model gets it."""
        leaf = torch.empty(0, device=self._device, requires_grad=self._grads is not None)
        return Streamed(offsets, self.gather, self.add_grad, leaf)

    def gather(self, places: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Rounded on the host, so that a device is sent half the bytes. The copy to a device is queued, beside what the device
        computes on the part before. (Written so; it has never run on one.)"""
        if self._grads is not None and torch.is_grad_enabled():
            raise ValueError(
                f"feature {self.feature!r} is streamed: rows read outside of an autograd Function have no gradient and would "
                f"never learn; use nestpipe.ops.segmented_softmax, or declare the feature without streamed=True"
            )
        on_device = self._device.type != "cpu"
        rows_nD = torch.empty(len(places), self._received.shape[1], pin_memory=on_device and dtype not in HALVES)
        gather(rows_of(self._received), self._positions[self._checked(places)], NONE, rows_nD.numpy())
        if dtype not in HALVES:
            return rows_nD.to(self._device, non_blocking=True)
        half_nD, scale_n1 = to_half(rows_nD, dtype)
        half_nD = half_nD.pin_memory() if on_device else half_nD
        scale_n1 = None if scale_n1 is None else scale_n1.to(self._device, non_blocking=True)
        return from_half(half_nD.to(self._device, non_blocking=True), scale_n1)

    def add_grad(self, places: Tensor, grads_nD: Tensor) -> None:
        """In the order of the calls: a sum over micro-batches has one order under every schedule."""
        if self._grads is None:
            raise ValueError(f"feature {self.feature!r}: gradients of streamed rows are added in training only")
        if grads_nD.shape != (len(places), self._received.shape[1]):
            raise ValueError(
                f"feature {self.feature!r}: gradients of {len(places)} rows of {self._received.shape[1]} values are given as "
                f"{list(grads_nD.shape)}"
            )
        if self.not_finite is None and not all_finite([grads_nD]):
            self.not_finite = float(grads_nD[~torch.isfinite(grads_nD)][0])
        positions = self._grad_positions[self._checked(places)]
        scatter_add(grads_nD.detach().cpu().contiguous().numpy(), NONE, positions, self._grads)

    def _checked(self, places: Tensor) -> np.ndarray:
        if self._closed:
            raise ValueError(
                f"feature {self.feature!r}: streamed rows belong to one micro-batch, and its backward is over; do not keep them"
            )
        chosen = places.cpu().numpy()
        if len(chosen) and not 0 <= chosen.min() <= chosen.max() < len(self._positions):
            raise ValueError(
                f"feature {self.feature!r}: places {int(chosen.min())} to {int(chosen.max())} of {len(self._positions)} rows"
            )
        return chosen

    def close(self) -> None:
        """The backward of its micro-batch is over."""
        self._closed = True
