"""Attend to blocks chosen by content, in those layers of a transformers model that have no windows (`sparsify`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dilated_attention import BlockLayout, Dilated, attention
from dilated_attention.integrations.own_attention import Shown

Selector = Callable[..., BlockLayout]

SAMPLED_ROWS = 32


@dataclass(frozen=True)
class ChosenBlocks:
    """Attend to the blocks that a selector chooses, in prompts of at least `first` tokens.

    Attributes:
        selector: called as selector(q, k, is_causal=..., scale=...), such as `functools.partial(topk_blocks,
            density=0.25)`.
    """

    selector: Selector
    first: int

    def serves(self, shown: Shown) -> bool:
        """Return whether a call attends to chosen blocks: it must be a whole prompt of at least `first` tokens, with no
        windows, chunks, packed samples, padding or `blocks` in its mask."""
        whole = shown.q_start == shown.k_start == 0 and (shown.is_causal or shown.queries == shown.keys)
        return whole and shown.is_plain and shown.hidden is None and shown.queries >= max(self.first, 2)

    def attend(
        self, shown: Shown, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, **options: Any
    ) -> tuple[Tensor, str]:
        """Return the attention over the chosen blocks, and a phrase that says how much of the softmax they hold (empty
        while torch.compile traces).

        `shown`: what the queries see; `serves(shown)` must be True. Shapes and `options` are as in `attention`.
        """
        k, v = k[:, : shown.queries], v[:, : shown.queries]  # a static cache holds more
        layout = self.selector(q, k, is_causal=shown.is_causal, scale=scale)
        if not isinstance(layout, BlockLayout):
            raise ValueError(f"selector must return a BlockLayout; got {type(layout).__name__}")
        options |= {"is_causal": shown.is_causal, "scale": scale}
        out, lse = attention(q, k, v, layout, return_lse=True, **options)
        if torch.compiler.is_compiling():
            return out, ""
        held = _held(q.detach(), k.detach(), v.detach(), lse.detach(), options)
        by_head = " ".join(f"{mass:.2f}" for mass in held.tolist())
        return out, f"{layout.density:.0%} of the blocks, which hold of each head's softmax: {by_head}"


@torch.no_grad()
def _held(q: Tensor, k: Tensor, v: Tensor, lse: Tensor, options: dict[str, Any]) -> Tensor:
    """Return how much of the softmax over all keys falls on the chosen blocks, per head: `(heads,)`, from 0 to 1.

    This is the mean over samples and evenly spaced rows of exp(lse - lse over all keys), without sinks. `attention`
    over the chosen blocks with these options gave `lse`, `(batch, heads, seq)`.
    """
    tokens, options = q.shape[1], {**options, "dropout_p": 0.0}
    whole = Dilated((tokens,), (1,))
    held = q.new_zeros(q.shape[2], dtype=lse.dtype)
    rows = torch.linspace(0, tokens - 1, min(tokens, SAMPLED_ROWS)).long().unique().tolist()
    for row in rows:
        _, dense = attention(q[:, row : row + 1], k, v, whole, q_start=row, return_lse=True, **options)
        held += (lse[..., row] - dense[..., 0]).exp().mean(0)
    return held / len(rows)
