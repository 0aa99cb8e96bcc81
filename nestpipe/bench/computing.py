"""A model that really computes on the CPU, as deep as it takes to compute for a given time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from nestpipe.batch import Batch, Output
from nestpipe.bench.contestants import DIM, in_memory
from nestpipe.bench.emulated import samples_of
from nestpipe.schedule.setting import Setting


class Layers(nn.Module):
    """A stack of layers over every token. A sample's loss depends on its own tokens alone."""

    def __init__(self, layers: int, *, dim: int = DIM) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))

    def forward(self, batch: Batch, rows: dict[str, Any]) -> Output:
        x = rows["history"].values
        for layer in self.layers:
            x = x + torch.relu(layer(x)) / len(self.layers)  # finite however many it takes
        return Output(x.new_zeros(batch.size).index_add(0, samples_of(rows["history"].offsets), (x * x).mean(1)))


def layers_for(wanted_ms: float, pool: Sequence[Batch], *, steps: int) -> int:
    """How many layers compute that long per step; from figures of all ranks, so it is the same on all. A layer takes at least a
    twentieth of a step with five: where others use the machine as well, five may have seemed no longer than one."""
    few, many = (in_memory(Setting("serial"), Layers(layers), pool, warm_up=2) for layers in (1, 5))
    a, b = (contestant.block(steps)["compute"] for contestant in (few, many))
    return max(1, 1 + round((wanted_ms - a) / max(b / 20, (b - a) / 4)))
