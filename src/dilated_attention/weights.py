"""Compute the attention probabilities of a pattern, as a sparse tensor."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dilated_attention import checks
from dilated_attention.call import Pattern, as_autocast, branched_factor
from dilated_attention.errors import UnsupportedError
from dilated_attention.functional import attention
from dilated_attention.layout import BlockLayout
from dilated_attention.neighborhood import Neighborhood, tiled
from dilated_attention.patterns import Dilated, Product, parts_of_sum, without_padding
from dilated_attention.plan import Rows, StridedGroup, plan_of
from dilated_attention.torch_internals import without_autocast

_LEAST_RUN = 256  # queries of a narrow window that are computed at once

Order = tuple[Tensor, Tensor] | None
"""The token of each row of queries and of keys, if a part of the pattern has another order of tokens."""


def attention_weights(
    q: Tensor,
    k: Tensor,
    pattern: Pattern,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute the attention probabilities P = c exp(s - lse), as a sparse tensor.

    s = scale q kᵀ, and c(i, j) counts how often the pattern shows key j to query i.

    Only pairs that the pattern shows are computed and stored: O(pairs) time and memory. A row sums to 1, or is empty if
    the query sees no key. Differentiable in q and k. Attention itself never forms these weights.

    Args:
        q: `(batch, seq, heads, head_dim)`.
        k: `(batch, seq, kv_heads, head_dim)`; kv_heads divides heads.
        pattern, is_causal, scale, key_padding_mask, sinks: as in `attention`; with sinks a row sums to less than 1.

    Returns:
        A coalesced sparse COO tensor `(batch, heads, seq, seq)` of q's dtype, computed in at least float32.

    Raises:
        ValueError: in the same cases as `attention`.

    Examples:
        >>> from dilated_attention import Window, attention_weights
        >>> q, k = torch.randn(1, 8, 2, 4), torch.randn(1, 8, 2, 4)
        >>> weights = attention_weights(q, k, Window(1), is_causal=True)
        >>> weights.shape, weights.values().numel()  # 2 heads with 15 visible pairs each
        (torch.Size([1, 2, 8, 8]), 30)
        >>> torch.allclose(weights.to_dense().sum(-1), torch.ones(1, 2, 8))
        True
    """
    if isinstance(pattern, Dilated) and pattern.compat is not None:
        raise UnsupportedError(
            f"compat={pattern.compat!r}: a part of each row's weight lies on padding that the matrix has no column "
            f"for; use {without_padding(pattern)!r}, whose weights are those without padding"
        )
    checks.not_mapped("attention_weights", q, k)
    q, k, _ = as_autocast(q, k, k, if_mixed=True)
    checks.dense(q, k, k)
    with without_autocast(q):
        _, lse = attention(
            q, k, k, pattern, is_causal=is_causal, scale=scale, key_padding_mask=key_padding_mask, return_lse=True
        )
        if key_padding_mask is not None:  # a gradient of 0 times NaN would be NaN
            k = k.masked_fill(key_padding_mask[:, :, None, None], 0.0)
        if sinks is not None:
            checks.sinks(q, sinks)
            lse = lse.masked_fill(lse == -torch.inf, 0.0)  # a row without pairs: two of -inf have no gradient
            lse = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])

        batch, seq_len, heads, head_dim = q.shape
        kv_heads = k.shape[2]
        if scale is None:
            scale = head_dim**-0.5
        wide_q = q.to(lse.dtype) * scale
        wide_k = k.to(lse.dtype)
        indices = [torch.empty(4, 0, dtype=torch.int64, device=q.device)]
        values = [lse.new_empty(0)]
        groups: list[tuple[Pattern, Order, StridedGroup]] = []
        for part in parts_of_sum(pattern):
            order: Order = None
            length = seq_len
            if isinstance(part, Neighborhood):
                in_rows = tiled(part)
                token = torch.arange(1, seq_len + 1, device=q.device)[None]
                order = (in_rows.queries(token)[0] - 1, in_rows.keys(token)[0] - 1)  # -1: a row that was added
                part = in_rows.layout
                length = part.seq_len
            branches = branched_factor(part).branches(kv_heads)
            for whole in plan_of(branches, (0, length), None, is_causal).groups:
                groups += [(part, order, group) for group in _narrow(whole)]

        for part, order, group in groups:
            layout = part if isinstance(part, BlockLayout) else None
            if isinstance(part, Product):
                layout = part.layout_of(group.queries.count)
            if layout is not None:
                layout = layout.for_heads(heads)
                if is_causal:
                    layout = layout.causal()
            sample, head, segment, queries, keys, seen = _tiles(group, layout, batch, heads // kv_heads)
            sample = sample.to(q.device)[:, None]
            head = head.to(q.device)[:, None]
            query, key = (
                _tokens(rows, segment, at).to(q.device) for rows, at in ((group.queries, queries), (group.keys, keys))
            )
            if order is not None:
                query = order[0][query]
                key = order[1][key]
            seen = seen.to(q.device)
            if key_padding_mask is not None:
                seen = seen & ~key_padding_mask[sample, key][:, None]
            tile, i, j = seen.nonzero(as_tuple=True)
            scores = wide_q[sample, query, head] @ wide_k[sample, key, head // (heads // kv_heads)].mT
            at = torch.stack((sample[tile, 0], head[tile, 0], query[tile, i], key[tile, j]))
            values.append((scores[tile, i, j] - lse[at[0], at[1], at[2]]).exp())
            indices.append(at)

        shape = (batch, heads, seq_len, seq_len)
        # A key that several branches show is one entry for each, which coalescing adds up.
        weights = torch.sparse_coo_tensor(
            torch.cat(indices, 1), torch.cat(values), shape, device=q.device, check_invariants=False
        )
        return weights.coalesce().to(q.dtype)


def _narrow(group: StridedGroup) -> Iterator[StridedGroup]:
    """Yield the group, in runs of queries if its band has two bounds, so that few pairs lie outside the band."""
    if group.low is None or group.high is None:
        return iter((group,))
    return group.runs(max(_LEAST_RUN, group.high - group.low + 1))


def _tiles(group: StridedGroup, layout: BlockLayout | None, batch: int, ratio: int) -> tuple[Tensor, ...]:
    """Return the tiles of queries and keys that a group computes, whole segments or the blocks of the layout in them,
    with `ratio` query heads per KV head.

    The result is: sample, query head, segment, each `(tiles,)`; positions in the segment of the queries `(tiles, rows)`
    and of the keys `(tiles, columns)`; which pairs are seen, `(tiles, rows, columns)`.
    """
    count = group.queries.count
    columns = group.keys.count
    segments = group.queries.segments
    kv_head = torch.arange(group.heads, device="cpu") * group.head_stride + group.head
    heads = (kv_head[:, None] * ratio + torch.arange(ratio, device="cpu")).flatten()
    if layout is None:
        queries, keys = (torch.arange(n, device="cpu")[None] for n in (count, columns))
        seen = torch.ones(1, count, columns, dtype=torch.bool, device="cpu")
        here = torch.ones(batch, len(heads), segments, 1, dtype=torch.bool, device="cpu")
    else:
        layout = layout.to("cpu")
        lane = layout.row // layout.query_blocks
        block = layout.row % layout.query_blocks
        queries = block[:, None] * layout.q_block + torch.arange(layout.q_block, device="cpu")
        keys = layout.indices[:, None] * layout.k_block + torch.arange(layout.k_block, device="cpu")
        seen = layout.entries.shown(slice(None))
        here = torch.ones(batch, len(heads), segments, layout.nnz, dtype=torch.bool, device="cpu")
        if layout.batch_size > 1:
            here &= torch.arange(batch, device="cpu")[:, None, None, None] == lane // layout.num_heads
        if layout.num_heads > 1:
            here &= heads[:, None, None] == lane % layout.num_heads

    sample, head, segment, tile = here.nonzero(as_tuple=True)
    distance = keys[:, None, :] - queries[:, :, None]
    if group.low is not None:
        seen &= distance >= group.low
    if group.high is not None:
        seen &= distance <= group.high
    queries = queries.clamp(max=count - 1)
    keys = keys.clamp(max=columns - 1)
    return sample, heads[head], segment, queries[tile], keys[tile], seen[tile]


def _tokens(rows: Rows, segment: Tensor, position: Tensor) -> Tensor:
    return rows.start + segment[:, None] * rows.segment + position * rows.stride
