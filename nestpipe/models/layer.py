"""What layers of all models of histories share: the way of a token through one, whichever tokens it sees.

Shape legend: B samples, T tokens (items, or the last of them), C candidates, S items with keys, D row width, E = heads x width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from nestpipe.ops import candidate_attention, jagged_attention

# Of queries [T, E], or None for kind="weights", and the arguments of an attention that are a layer's own: what the queries get.
Attend = Callable[..., Tensor]


class Projected(NamedTuple):
    """What a layer makes of each token by itself."""

    gate: Tensor
    q_TE: Tensor
    k_TE: Tensor
    v_TE: Tensor


@dataclasses.dataclass(eq=False)
class Tokens:
    """Items, each of which sees those before it and itself.

    times_S, key_offsets: of all that are seen; of the items themselves unless these are only the tail of what has keys.
    """

    offsets: Tensor
    seen_T1: Tensor  # how many items a token sees: its place + 1
    times_S: Tensor | None
    key_offsets: Tensor | None = None

    def attend(self, k_SE: Tensor, v_SE: Tensor) -> Attend:
        def to_items(q_TE: Tensor | None, **how: Any) -> Tensor:
            return jagged_attention(
                q_TE,
                None if q_TE is None else k_SE,
                v_SE,
                self.offsets,
                times=self.times_S,
                key_offsets=self.key_offsets,
                **how,
            )

        return to_items


@dataclasses.dataclass(eq=False)
class Candidates:
    """Candidates, each of which sees the whole history of its sample and itself, all from the place behind it."""

    offsets: Tensor
    seen_C1: Tensor  # items of the history + 1
    now_B: Tensor | None
    history_offsets: Tensor
    times_S: Tensor | None

    def attend(self, own: Projected, k_SE: Tensor, v_SE: Tensor) -> Attend:
        def to_history(q_CE: Tensor | None, **how: Any) -> Tensor:
            return candidate_attention(
                q_CE,
                None if q_CE is None else own.k_TE,
                own.v_TE,
                self.offsets,
                history_k=None if q_CE is None else k_SE,
                history_v=v_SE,
                history_offsets=self.history_offsets,
                times=self.times_S,
                now=self.now_B,
                **how,
            )

        return to_history


class Layer(nn.Module):
    """A child says what `norm` and `finish` are, and has the linear maps `gate` [D, ...] and `qkv` [D, 3 E].

    Made with `dim=, num_heads=, head_dim=, max_length=, num_time_buckets=, dropout=`.
    """

    gate: nn.Linear
    qkv: nn.Linear
    inner: int  # E

    def forward(self, x_TD: Tensor, tokens: Tokens) -> Tensor:
        """States after the layer, [T, D], of items that see one another."""
        projected = self.project(x_TD)
        return self.finish(x_TD, projected, tokens.attend(projected.k_TE, projected.v_TE), tokens.seen_T1)

    def project(self, x_TD: Tensor) -> Projected:
        normed_TD = self.norm(x_TD)
        gate = functional.silu(self.gate(normed_TD))
        return Projected(gate, *functional.silu(self.qkv(normed_TD)).chunk(3, dim=-1))

    def keys(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of `project` alone: all that others need of a token whose own state goes no further."""
        weight, bias = self.qkv.weight[self.inner :], self.qkv.bias[self.inner :]
        k_TE, v_TE = functional.silu(functional.linear(self.norm(x_TD), weight, bias)).chunk(2, dim=-1)
        return k_TE, v_TE

    def norm(self, x_TD: Tensor) -> Tensor:
        raise NotImplementedError

    def finish(self, x_TD: Tensor, projected: Projected, attend: Attend, seen_T1: Tensor) -> Tensor:
        """States after the layer, [T, D]. attend: gives queries what they get of the tokens they see; seen_T1: how many."""
        raise NotImplementedError
