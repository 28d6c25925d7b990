"""Define the problem that a backend computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from dilated_attention.backends.attributes import NO_ATTRIBUTES, Attributes
from dilated_attention.bias import Source
from dilated_attention.layout import BlockLayout
from dilated_attention.plan import Plan
from dilated_attention.scores import Scores

Layouts = dict[int, BlockLayout]
Repeat = Callable[[Tensor, Tensor, Tensor, tuple[int, int], Tensor | None, Tensor | None], tuple[Tensor, Tensor] | None]
"""A function that repeats a forward: it returns out and lse of q, k and v of one shape, dtype, device, strides and
alignment, which begin at these positions, of a mask of the keys that no query sees, `(batch, keys)`, or None, and of
`Problem.lengths`. It returns None if the call must be made anew. Under a layout, positions and the number of keys may
be others, if the queries are those of one list."""

MOST_PREPARED = 2**21
"""The most bytes of tables that a `Repeat` may hold: with more, the host's work takes no time worth saving."""


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Hold everything that a backend needs besides its tensors.

    Attributes:
        scores: the numbers of the scores, with a positive scale (`Scores.split`).
        attributes: what else is read per token; heads of keys differ where keys were received from other ranks.
        layouts: the block layout inside a segment, by `StridedGroup.listed`; on the device of q, and causal if the call
            is. None where every key of a segment is seen.
        lengths: the number of tokens of each sample, int64 `(batch,)`, contiguous. Later rows see nothing and are not
            seen. Only backends with `skips_rows` get it. None: all tokens.
        bias: what all pairs read of the bias. The attributes say where each token reads.
    """

    plan: Plan
    scores: Scores
    attributes: Attributes = NO_ATTRIBUTES
    layouts: Layouts | None = None
    lengths: Tensor | None = None
    bias: Source | None = None

    @property
    def hidden(self) -> Tensor | None:
        """Return which keys no query sees, `(batch or 1, keys, KV heads or 1)`; None: all are seen."""
        return self.attributes.keys.get("hidden")
