"""Keep the position_bias of transformers models from growing to a tensor over pairs.

T5's family makes it from a table by the difference of positions, Inkling from logits that a query has for the keys
before it. `serve` makes their modules return the table or the logits, which the layers hand on like the whole. In their
attention the last dimension then says what it is (`bias_of`):

    as many as keys     `(batch or 1, heads or 1, 1 or queries, keys)`: of pairs
    more                `(1, heads, 1, 2 * extent + 1)`: of the differences j - i from -extent to extent
    fewer               `(batch, heads, queries, extent)`: of the key of a query, and of those before it
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dilated_attention.bias import QueryBias, RelativeBias
from dilated_attention.integrations.chosen_keys import bound, override, source_of
from dilated_attention.integrations.locality import active
from dilated_attention.integrations.own_attention import NAME

_OF_T5 = "relative_position = memory_position - context_position"
_OF_INKLING = "position_bias = rel_logits.gather(-1, gather_index)"
"""Code of the methods that form a bias over pairs."""


def serve(model: nn.Module) -> None:
    """Override the methods of a model's layers that form a bias over pairs (see this module)."""
    for module in model.modules():
        compute_bias = getattr(type(module), "compute_bias", None)
        if compute_bias is not None and _OF_T5 in source_of(compute_bias):
            module.__dict__.setdefault("compute_bias", partial(_by_difference, module))
        relative = getattr(module, "rel_logits_proj", None)
        if relative is not None and _OF_INKLING in source_of(type(relative).forward):
            override(relative, partial(_by_distance, module))


def _by_difference(layer: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Return the bias of one query in the middle of as many keys as there are differences of positions."""
    theirs, given = bound(layer, "compute_bias", args, kwargs)
    queries, keys, device, _past = given.values()
    over_ranks = active()
    if layer.config._attn_implementation != NAME or (queries == 1 and over_ranks is None):
        return theirs(**given)
    if over_ranks is not None:  # the keys are those of a shard
        keys = over_ranks.seq_len
    extent = keys - 1
    return theirs(1, 2 * extent + 1, device, extent)


def _by_distance(layer: Any, states: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Return an Inkling layer's logits, unless its queries see fewer keys than these are for."""
    relative = layer.rel_logits_proj
    if layer.config._attn_implementation != NAME or relative.rel_extent >= len(keys):
        return type(relative).forward(relative, states, queries, keys)
    return (states @ relative.proj).transpose(1, 2)


def bias_of(
    module: nn.Module, position_bias: Tensor | None, q: Tensor, k: Tensor
) -> Tensor | RelativeBias | QueryBias | None:
    """Return the position_bias of a layer, `module`, as `attention` takes it; None if it is zero, as in T5's
    cross-attention.

    q, k: `(batch, queries or keys, heads, head_dim)`.
    """
    if position_bias is None:
        return None
    readable = not torch.compiler.is_compiling() and position_bias.device.type == "cpu"
    if readable and not position_bias.requires_grad and not position_bias.any():
        return None
    width = position_bias.shape[3]
    if "compute_bias" in module.__dict__ and width > k.shape[1]:
        return RelativeBias(position_bias[0, :, 0])
    if hasattr(module, "rel_logits_proj") and width < k.shape[1]:
        return QueryBias(position_bias.transpose(1, 2))
    return position_bias.expand(*position_bias.shape[:2], q.shape[1], k.shape[1])
