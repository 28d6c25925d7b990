"""Compute attention for some tokens of a sequence only: the newest ones in decoding, the first one in pooling."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention import checks
from dilated_attention.call import Pattern, as_autocast
from dilated_attention.errors import UnsupportedError
from dilated_attention.functional import attention
from dilated_attention.merge import with_sinks
from dilated_attention.patterns import Dilated
from dilated_attention.torch_internals import without_autocast


def cached_attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, *, scale: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Compute the last rows of causal attention: the newest tokens' queries over the keys of all tokens so far.

    Equals `attention(whole_q, k, v, pattern, is_causal=True)[:, -q.shape[1]:]`. A query reads only the keys that its
    pattern shows, so the cost per token is bounded by segments and windows and does not grow with its position.
    Differentiable.

    Args:
        q: `(batch, new, heads, head_dim)`, the queries at positions seq - new to seq - 1.
        k, v: `(batch, seq, kv_heads, head_dim)`, new <= seq; any strides.
            The head_dim of v may differ.
        scale: the factor of the scores; default 1 / sqrt(head_dim).
        sinks: as in `attention`.

    Returns:
        out, shaped like q but with the head_dim of v; 0 where a query sees no key.

    Examples:
        >>> from dilated_attention import Window, attention
        >>> from dilated_attention.decoding import cached_attention
        >>> q, k, v = (torch.randn(1, 16, 2, 8) for _ in range(3))
        >>> newest = cached_attention(q[:, -1:], k, v, Window(3))  # one token's query over all keys
        >>> torch.allclose(newest, attention(q, k, v, Window(3), is_causal=True)[:, -1:], atol=1e-5)
        True
    """
    q, k, v = _checked(q, k, v, scale, sinks)
    with without_autocast(q):
        out = attention(q, k, v, pattern, is_causal=True, scale=scale, sinks=sinks, q_start=k.shape[1] - q.shape[1])
    assert isinstance(out, Tensor)
    return out


def first_token_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Dilated,
    *,
    compat: str | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute the first row of non-causal dilated attention: the output for a cls token at the start.

    Equals `attention(whole_q, k, v, pattern)[:, :1]`: softmax(scale q·k + log c) v, where c counts the branches in
    which token 0 sees a key. Differentiable. It reads these keys alone.

    Args:
        q: `(batch, 1, heads, head_dim)`, the query of token 0.
        k, v: `(batch, seq, kv_heads, head_dim)`.
        compat: as in `dilated_attention`. With `"torchscale"` only the offsets change: token 0 sees no zero key.
        scale: the factor of the scores; default 1 / sqrt(head_dim).
        sinks: as in `attention`.

    Returns:
        out, shaped like q but with the head_dim of v; 0 for heads in which token 0 sees no key.

    Examples:
        >>> from dilated_attention import Dilated, attention
        >>> from dilated_attention.decoding import first_token_attention
        >>> pattern = Dilated([4, 16], [1, 4])
        >>> q, k, v = (torch.randn(1, 16, 2, 8) for _ in range(3))
        >>> first = first_token_attention(q[:, :1], k, v, pattern)
        >>> torch.allclose(first, attention(q, k, v, pattern)[:, :1], atol=1e-5)
        True
    """
    if not isinstance(pattern, Dilated):
        raise UnsupportedError(
            f"pattern must be a Dilated; got {type(pattern).__name__}: give attention the whole sequence"
        )
    q, k, v = _checked(q, k, v, scale, sinks)
    if q.shape[1] != 1:
        raise ValueError(f"q must have one token, the first; got {q.shape[1]}: give q[:, :1]")
    if compat is not None:
        pattern = replace(pattern, compat=compat)
    pattern = Dilated(pattern.segment_lengths, pattern.dilation_rates, pattern.offset_table(k.shape[2]))
    with without_autocast(q):
        out = attention(q, k, v, pattern, scale=scale, sinks=sinks, q_start=0)
    assert isinstance(out, Tensor)
    return out


def _checked(q: Tensor, k: Tensor, v: Tensor, scale: float | None, sinks: Tensor | None) -> tuple[Tensor, ...]:
    """Return q, k and v in one dtype; raise ValueError unless the arguments fit."""
    q, k, v = as_autocast(q, k, v, if_mixed=True)
    checks.tensors(q, k, v, placed=True)
    if q.shape[1] > k.shape[1]:
        raise ValueError(f"q must have no more tokens than k; got {q.shape[1]} and {k.shape[1]}")
    checks.number("scale", scale)
    checks.sinks(q, sinks)
    return q, k, v


def newest_attention(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None, *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attend from one token to the given keys except the `hidden` ones: return out = softmax(scale q kᵀ) v, and lse.

    q: `(batch, 1, heads, head_dim)`. k, v: `(batch, lists, keys, head_dim)`; heads / lists neighbouring heads share a
    list of keys. hidden: bool `(batch, lists, keys)`; None: no key is hidden. out is like q, with the head_dim of v;
    lse: `(batch, 1, heads)`. Where no key is left, out is 0 and lse -inf.
    """
    if scale is None:
        scale = q.shape[3] ** -0.5
    if hidden is not None and checks.readable(hidden) and not hidden.any():
        hidden = None  # then nothing is copied to hide it
    dtype = torch.promote_types(q.dtype, torch.float32)
    query = q[:, 0].to(dtype).unflatten(1, (k.shape[1], -1))
    with without_autocast(q):
        if hidden is not None:
            k, v = (x.masked_fill(hidden[..., None], 0.0) for x in (k, v))  # a weight of 0 times NaN would be NaN
        scores = query @ k.to(dtype).mT * scale
        if hidden is not None:
            empty = hidden.all(-1, keepdim=True)  # no softmax of -inf alone
            scores = scores.masked_fill((hidden & ~empty)[:, :, None], -torch.inf)
        lse = scores.logsumexp(-1)
        if hidden is not None:
            lse = lse.masked_fill(empty, -torch.inf)
        out = scores.softmax(-1) @ v.to(dtype)
    return out.flatten(1, 2)[:, None].to(q.dtype), lse.flatten(1, 2)[:, None]


def listed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    block_size: int = 1,
    *,
    scale: float | None = None,
    sinks: Tensor | None = None,
    lengths: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the last rows of causal attention, each over the key blocks chosen for its query: softmax(scale q·k) v.

    Equals `block_sparse_attention(whole_q, k, v, layout, is_causal=True)[:, -new:]` where the layout's last rows list
    these blocks. Only the keys and values of these blocks are read. Plain differentiable operations.

    Args:
        q: `(batch, new, heads, head_dim)`, the queries of the newest tokens, new <= seq.
        k, v: `(batch, seq, kv_heads, head_dim)`, the keys and values of all tokens so far.
        chosen: int64 or int32 `(batch, lists, new, blocks)`, padded with -1. There is one list per head, one per KV
            head, or one for all heads. `(batch, lists, blocks)` applies to all new tokens, a batch of 1 to all samples.
            The order does not matter, and a block that is listed twice is seen once.
        block_size: the number of tokens per block.
        scale: the factor of the scores; default 1 / sqrt(head_dim).
        sinks: as in `attention`.
        lengths: `(batch,)` integers: how many rows of k and v each sample has. Its queries are the last of these rows.
            Default: all.
        return_lse: also return lse.

    Returns:
        out, shaped like q but with the head_dim of v; 0 where a list is empty. With `return_lse` also lse, `(batch,
        heads, new)`, float32 (float64 for float64), natural logarithm.

    Raises:
        ValueError: an argument does not fit. On the CPU also if a list names a block outside the sequence; other
            devices ignore such a block, because checking would make them wait.

    Examples:
        >>> from dilated_attention import Window, attention
        >>> from dilated_attention.decoding import listed_attention
        >>> q, k, v = (torch.randn(1, 16, 2, 8) for _ in range(3))
        >>> chosen = torch.tensor([[[12, 13, 14, 15]]])  # one list, which all heads share
        >>> newest = listed_attention(q[:, -1:], k, v, chosen)
        >>> torch.allclose(newest, attention(q, k, v, Window(3), is_causal=True)[:, -1:], atol=1e-5)
        True
    """
    q, k, v = _checked(q, k, v, scale, sinks)
    block_size = checks.positive("block_size", block_size)
    if not isinstance(chosen, Tensor) or chosen.dtype not in (torch.int64, torch.int32) or chosen.device != q.device:
        kind = checks.kind_of(chosen)
        if isinstance(chosen, Tensor):
            kind += f" on {chosen.device}"
        raise ValueError(f"chosen must be an int64 or int32 tensor on q's device, {q.device}; got {kind}")
    batch, new, heads, _ = q.shape
    seq_len, kv_heads = k.shape[1:3]
    lists = chosen
    if chosen.dim() == 3:
        lists = chosen[:, :, None]
    fits = lists.dim() == 4
    for size, allowed in zip(lists.shape, ((1, batch), (1, heads, kv_heads), (1, new)), strict=False):
        # `in` does not compare the symbols of torch.compile by value
        fits = fits and any(size == x for x in allowed)
    if not fits:
        raise ValueError(
            f"chosen must be (batch, lists, blocks) or (batch, lists, new, blocks) with a batch of {batch} and 1, "
            f"{kv_heads} or {heads} lists; new is {new}; got {tuple(chosen.shape)}"
        )
    checks.indices("chosen, key blocks or -1 for none,", chosen, -1, -(-seq_len // block_size))
    lengths, _ = checks.ragged(q, lengths, None)
    if lengths is None:
        lengths = torch.tensor([seq_len], device=q.device)
    else:
        checks.indices("lengths", lengths, new, seq_len + 1)

    position = lengths.to(q.device)[:, None] - new + torch.arange(new, device=q.device)
    lists = lists.expand(batch, max(lists.shape[1], kv_heads), new, -1)
    query = torch.arange(batch * new, device=q.device)[:, None, None]  # each becomes a batch element
    token, hidden = _tokens(lists.transpose(1, 2).flatten(0, 1), block_size, position.expand(batch, -1).reshape(-1))
    head = torch.arange(lists.shape[1], device=q.device)[:, None] * kv_heads // lists.shape[1]
    keys, values = (x[query // max(1, new), token, head] for x in (k, v))
    out, lse = newest_attention(q.flatten(0, 1)[:, None], keys, values, hidden, scale=scale)
    out = out.view(batch, new, heads, v.shape[3])
    lse = lse.view(batch, new, heads)
    if sinks is not None:
        out = with_sinks(out, lse, sinks)
    if return_lse:
        return out, lse.transpose(1, 2)
    return out


def _tokens(chosen: Tensor, block_size: int, position: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens in the chosen blocks, `(queries, lists, tokens)`, and which of them are hidden: those after
    their query's `position`, and those of blocks that are padding (-1) or a repeat. Token 0 stands in for a hidden
    one."""
    chosen = chosen.sort(-1).values
    again = F.pad(chosen.diff(dim=-1) == 0, (1, 0))[..., : chosen.shape[2]]
    inside = torch.arange(block_size, device=chosen.device)
    token = (chosen.masked_fill(again, -1)[..., None] * block_size + inside).flatten(2)
    hidden = (token < 0) | (token > position[:, None, None])
    return token.masked_fill(hidden, 0), hidden
