"""Turn masks over pairs, functions or tensors, into block layouts with masks of bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import sdpa_mask

from dilated_attention import BlockLayout, UnsupportedError, plan_cache
from dilated_attention.integrations.own_attention import REMEDY
from dilated_attention.plumbing import Kept, Named

BLOCK = 64


def layout_of_function(
    mask_function: Callable[..., Any], batch: int, queries: int, keys: int, q_start: int, k_start: int, device: Any
) -> BlockLayout:
    """Return which of some keys, the first at position k_start, a mask function of transformers shows to some queries,
    the first at q_start. In the layout both begin at 0."""

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return mask_function(b, h, q + q_start, k + k_start)

    try:
        return BlockLayout.from_mask_mod(sees, queries, keys, batch=batch, block_size=BLOCK, device=device or "cpu")
    except ValueError as error:
        raise UnsupportedError(f"the function of the model's mask cannot be evaluated: {error}; {REMEDY}") from error


def layout_in_graph(*arguments: Any, **options: Any) -> BlockLayout:
    """Return what a mask shows, padding included, with queries and keys numbered from 0. The arguments are those of
    transformers' `sdpa_mask`, which makes a tensor of all pairs: a graph cannot look at a function's values."""
    options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask = sdpa_mask(*arguments, **options)
    assert mask is not None
    return layout_of_pairs(mask)


def layout_of_pairs(mask: Tensor) -> BlockLayout:
    """Return what booleans `(batch or 1, heads or 1, queries, keys)` show. The layout's queries and keys begin at 0."""
    queries, keys = mask.shape[2:]
    size = max(queries, keys)
    return BlockLayout.from_mask(F.pad(mask, (0, size - keys, 0, size - queries)), size, BLOCK)


def layout_of_tensor(mask: Tensor) -> BlockLayout:
    """Return what a mask tensor of transformers shows: booleans, or numbers that are added to scores, of which 0 shows
    a pair, and the least one of the dtype or -inf hides it. All layers of a forward share the layout."""

    if torch.compiler.is_compiling():
        return layout_of_pairs(mask if mask.dtype == torch.bool else mask == 0)
    return plan_cache.of(_kept, Named(mask)).layout


def _kept(named: Named) -> Kept:
    mask = named.thing
    shown = mask
    if mask.dtype != torch.bool:
        shown = mask == 0
        if not (shown | (mask <= torch.finfo(mask.dtype).min / 2)).all():
            raise UnsupportedError(
                "attention_mask holds numbers other than 0 and the least one of its dtype, a bias of scores; give "
                f"booleans, or {REMEDY}"
            )
    return Kept(layout_of_pairs(shown))
