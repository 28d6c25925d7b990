"""Define the problem that a backend computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Bool
from torch import Tensor

from dilated_attention.backends.dropout import Dropout
from dilated_attention.layout import BlockLayout
from dilated_attention.plan import Plan

Hidden = Bool[Tensor, "batch keys"] | Bool[Tensor, "batch keys kv_heads"]
Layouts = dict[int, BlockLayout]
Repeat = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""A function that repeats a forward: it returns out and lse of q, k and v of one shape, dtype, device, strides and
alignment."""

MOST_PREPARED = 2**21
"""The most bytes of tables that a `Repeat` may hold: with more, the host's work takes no time worth saving."""


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Hold everything that a backend needs besides its tensors.

    Attributes:
        scale: factor of the scores, positive (`call.split_scale`).
        hidden: True for a key that no query sees; per KV head if keys received from other ranks differ by head.
        layouts: the block layout inside a segment, for each number of keys that a segment has; on the device of q, and
            causal if the call is. None where every key of a segment is seen.
        softcap: c > 0 replaces the scores s by c tanh(s / c); 0: scores stay.
        dropout: which pairs of query and key survive; None where all do.
    """

    plan: Plan
    scale: float
    hidden: Hidden | None = None
    layouts: Layouts | None = None
    dropout: Dropout | None = None
    softcap: float = 0.0
