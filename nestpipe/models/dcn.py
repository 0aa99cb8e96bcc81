"""DCN-v2 (arXiv 2008.13535): layers that multiply the inputs with each other, beside or below an MLP.

Cross layer: x_{l+1} = x_0 * (W_l x_l + b_l) + x_l, so that layer l has products of up to l + 1 inputs. With a rank, W = U V^T.

x_0 is the dense inputs, as they are, and the rows of all features side by side. Not here: the paper's mixture of several low-rank
experts per layer.

Shape legend: B samples, X inputs side by side, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nestpipe.batch import Batch
from nestpipe.models.arguments import check_whole, check_widths
from nestpipe.models.clicks import MLP, ClickModel

STRUCTURES = ("parallel", "stacked")


class CrossLayer(nn.Module):
    """x_0 * (W x + b) + x"""

    def __init__(self, width: int, rank: int | None) -> None:
        super().__init__()
        self.down = None if rank is None else nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(width if rank is None else rank, width)

    def forward(self, x0_BX: Tensor, x_BX: Tensor) -> Tensor:
        low = x_BX if self.down is None else self.down(x_BX)
        return torch.addcmul(x_BX, x0_BX, self.up(low))


class DCN(ClickModel):
    """Click-through model of cross layers and an MLP; per-sample binary cross entropy, Output.predictions are probabilities [B].

    num_dense: columns of `batch.dense[dense]`; 0 for a model of keys only.
    features: pooled features; `rows[name]` is [B, dim] for each.
    num_cross: cross layers: products of up to num_cross + 1 inputs.
    rank: of the weights of a cross layer; None: full, (inputs)^2 of them.
    deep: hidden widths of the MLP.
    structure: "parallel": cross layers and MLP read the inputs, and the logit reads both; "stacked": the MLP reads what the cross
        layers make, and the logit the MLP.
    dropout: behind each hidden layer of the MLP.
    """

    def __init__(
        self,
        *,
        num_dense: int,
        features: Sequence[str],
        dim: int,
        num_cross: int = 3,
        rank: int | None = None,
        deep: Sequence[int] = (256, 128),
        structure: str = "parallel",
        dropout: float = 0.0,
        dense: str = "dense",
    ) -> None:
        super().__init__(num_dense=num_dense, features=features, dim=dim, dense=dense)
        check_whole("DCN", 1, num_cross=num_cross, **({} if rank is None else {"rank": rank}))
        check_widths("DCN", deep=deep)
        if structure not in STRUCTURES:
            raise ValueError(f"DCN: structure must be one of {STRUCTURES}, got {structure!r}")
        width = self.num_inputs
        if rank is not None and rank >= width:
            raise ValueError(
                f"DCN: rank {rank} is not below the {width} inputs (dense columns and rows side by side), so it "
                f"saves nothing; leave it out"
            )
        self.structure = structure
        self.cross = nn.ModuleList(CrossLayer(width, rank) for _ in range(num_cross))
        self.deep = MLP([width, *deep], activate_last=True, dropout=dropout)
        deep_width = deep[-1] if deep else width
        self.out = nn.Linear(deep_width + (width if structure == "parallel" else 0), 1)

    def logits(self, batch: Batch, rows: dict[str, Tensor]) -> Tensor:
        x0_BX = self.inputs_of(batch, rows)
        x_BX = x0_BX
        for layer in self.cross:
            x_BX = layer(x0_BX, x_BX)
        seen = self.deep(x_BX) if self.structure == "stacked" else torch.cat([x_BX, self.deep(x0_BX)], dim=1)
        return self.out(seen).squeeze(-1)
