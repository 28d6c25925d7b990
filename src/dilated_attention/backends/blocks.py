"""Compute block-sparse attention with PyTorch's fused operators: one batched call for each group of `block_groups`.

The groups' results are merged, so the softmax runs over whole rows. Large groups are cut into several calls, so that
temporaries stay bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dilated_attention.backends import fused
from dilated_attention.backends.block_groups import Group, block_plan
from dilated_attention.backends.fused import Merged, Scores
from dilated_attention.layout import BlockLayout
from dilated_attention.merge import merge_into, running

_CHUNK_BYTES = 16 << 20
"""The most bytes that one call may use for temporaries: gathered keys and values, and partial results."""
_GATHER_BYTES = 2 << 20
"""The same bound per thread where forward gathers keys and values on CPU. A call takes few heads, so that a cache holds
their keys and the copies. Forward then takes 0.85 to 0.97 of the time of calls with all heads and 16 MiB. Backward,
which adds to the keys of all heads, would be 3 to 6 % slower with this bound."""
_FOLD_TOKENS = 1 << 20
"""The number of elements of a problem below which a batch of problems is copied into one problem with more heads.

Larger problems are run one after another.
"""


def _blocks(x: Tensor, block: int, tokens: int, ids: Tensor, heads: Tensor | None) -> tuple[Tensor, Tensor]:
    """Locate the first `tokens` tokens of the blocks `ids` (R, m) of x (seq, heads, ...), in head heads[r] for row r.

    If `heads` is None: in all heads. `block` is the number of tokens per block. Returns a view of x and indices
    (R * m,); view[index] is a block, (tokens, ...).

    For whole blocks of all heads, the first dimension of the view counts blocks. Otherwise it counts elements of
    memory, and a block starts at the element of its index. This overlapping view is 3 to 5 times as fast as advanced
    indexing of x, most of all for a single head, and a tenth to a half slower than the view that counts blocks.
    """
    if heads is None and tokens == block:
        return x[: len(x) // block * block].unflatten(0, (-1, block)), ids.flatten()
    token, head, *rest = x.stride()
    start, last = ids * (block * token), (x.shape[0] - tokens) * token
    if heads is None:
        size, stride = (tokens, *x.shape[1:]), (token, head, *rest)
    else:
        start, last = start + heads[:, None] * head, last + (x.shape[1] - 1) * head
        size, stride = (tokens, *x.shape[2:]), (token, *rest)
    return x.as_strided((last + 1, *size), (1, *stride), x.storage_offset()), start.flatten()


def _take(x: Tensor, block: int, tokens: int, ids: Tensor, heads: Tensor | None) -> Tensor:
    """Copy the first `tokens` tokens of blocks `ids` (R, m), of `block` tokens each, of x (seq, heads, ...): (R, heads,
    m * tokens, ...). With `heads` (R,), row r is taken from head heads[r] alone, and the second dimension is 1."""
    view, start = _blocks(x, block, tokens, ids, heads)
    taken = view.index_select(0, start).unflatten(0, ids.shape).flatten(1, 2)
    return taken.transpose(1, 2) if heads is None else taken.unsqueeze(1)


def _slices(x: Tensor, tokens: int, per_head: bool) -> Tensor:
    """View R rows of m blocks, (R, heads or 1, m * tokens, ...), as (tokens, R * m, ...): dimension 1 runs over blocks.
    `per_head`: each row belongs to one head, and the head dimension, of size 1, is dropped."""
    x = x.squeeze(1) if per_head else x.transpose(1, 2)
    return x.unflatten(1, (-1, tokens)).flatten(0, 1).transpose(0, 1)


def _window(x: Tensor, block: int, first: int, step: int, number: int, tokens: int) -> Tensor:
    """View the first `tokens` tokens of the blocks first + t * step, for t < number, as (number, heads, tokens, ...). x
    is (seq, heads, ...); `block`: tokens per block."""
    token, head, *rest = x.stride()
    size = (number, x.shape[1], tokens, *x.shape[2:])
    return x.as_strided(size, (step * block * token, head, token, *rest), x.storage_offset() + first * block * token)


def _cut(queries: int) -> int:
    """Return how many queries a thread of PyTorch's CPU operator takes at once, if a problem has `queries` queries."""
    return 256 if queries >= 768 else 64 if queries >= 192 else 32


class Sequence:
    """Hold the block lists of batch element `batch`. The methods read and write rows of tensors (seq, heads, ...).
    `key_bias` (seq,), 0 or -inf, is added to the scores of every query."""

    def __init__(self, layout: BlockLayout, batch: int, key_bias: Tensor | None) -> None:
        self.layout, self.key_bias = layout, key_bias
        self.groups = block_plan(layout, batch).groups

    def parts(self, num_heads: int, token_bytes: int, *, by_head: bool) -> Iterator[tuple[Group, slice]]:
        """Yield (part of a group, slice of heads) for each call, whose temporaries fit in `_CHUNK_BYTES` if possible.

        A row is the query blocks of a group that are computed together (`Group.rows`). A call takes some rows with all
        heads; or some heads of one row, if a single row with all heads is too large. `by_head` applies where keys are
        gathered: a call then takes what fits in `_GATHER_BYTES` per thread, all rows of some heads or some rows of one
        head, unless this gives too little work for all threads. `token_bytes`: temporary bytes per token and head.
        """
        threads = torch.get_num_threads()
        for group in self.groups:
            gathered = 0 if group.key_view else 2 * group.key_tokens
            row_bytes = token_bytes * (gathered + 2 * group.row_tokens)  # of a row of one head
            rows, heads = len(group.rows), 1 if group.heads is not None else num_heads
            few = max(1, _GATHER_BYTES * threads // row_bytes)
            if by_head and gathered and few * -(-group.row_tokens // _cut(group.row_tokens)) >= 2 * threads:
                row_pieces, head_pieces = -(-rows // few), min(heads, -(-rows * heads // few))
            else:
                fit = max(1, _CHUNK_BYTES // row_bytes)
                row_pieces, head_pieces = -(-rows // max(1, fit // heads)), -(-heads // fit)
            for j in range(head_pieces):
                for i in range(row_pieces):
                    part = group.part(i * rows // row_pieces, (i + 1) * rows // row_pieces)
                    yield part, slice(j * num_heads // head_pieces, (j + 1) * num_heads // head_pieces)

    def queries(self, x: Tensor, group: Group) -> Tensor:
        if group.row_view:
            return _window(x, self.layout.q_block, *group.row_view, len(group.rows), group.row_tokens)
        return _take(x, self.layout.q_block, group.q_tokens, group.rows, group.heads)

    def keys(self, x: Tensor, group: Group) -> Tensor:
        if group.key_view:
            return _window(x, self.layout.k_block, *group.key_view, len(group.rows), group.key_tokens)
        return _take(x, self.layout.k_block, group.k_tokens, group.keys, group.heads)

    def store(self, x: Tensor, group: Group, values: Tensor) -> None:
        """Write values (rows, heads or 1, tokens, ...) to the query rows of a group in x (seq, heads, ...)."""
        if group.row_view:
            self.queries(x, group).copy_(values)
            return
        view, start = _blocks(x, self.layout.q_block, group.q_tokens, group.rows, group.heads)
        view.transpose(0, 1).index_copy_(1, start, _slices(values, group.q_tokens, group.heads is not None))

    def add_to_keys(self, x: Tensor, group: Group, values: Tensor) -> None:
        """Add values (rows, heads or 1, key tokens, head_dim) to a group's key blocks in x (seq, heads, head_dim)."""
        view, start = _blocks(x, self.layout.k_block, group.k_tokens, group.keys, group.heads)
        view.transpose(0, 1).index_add_(1, start, _slices(values, group.k_tokens, group.heads is not None).to(x.dtype))

    def causal(self, group: Group) -> bool:
        """Return whether the operator's causal mask hides the later keys of a group that the diagonal cuts. It does if
        block sizes agree: a row's only key block is then its query block."""
        return group.masked and self.layout.q_block == self.layout.k_block

    def bias(self, group: Group, dtype: torch.dtype) -> Tensor | None:
        """Return a bias, 0 or -inf per score, `(rows, 1, 1 or queries, keys)`; None if it would hide nothing.

        It hides the keys that the key bias hides. In groups that the diagonal cuts it also hides the keys after each
        query, unless the operator's causal mask does so (see `causal`).
        """
        bias = None
        if self.key_bias is not None:
            bias = self.keys(self.key_bias[:, None].expand(-1, self.layout.num_heads), group)[:, :1, None, :]
        if group.masked and not self.causal(group):
            device = group.rows.device
            query = group.rows * self.layout.q_block + torch.arange(group.q_tokens, device=device)
            key = group.keys[:, :, None] * self.layout.k_block + torch.arange(group.k_tokens, device=device)
            future = key.flatten(1)[:, None, :] > query[:, :, None]
            mask = fused.bias_of(future, dtype)[:, None]
            bias = mask if bias is None else bias + mask
        return bias


def _folded(layout: BlockLayout, scores: Scores, *tensors: Any) -> tuple[Scores, list[Any]]:
    """Fold a batch, if q has fewer than `_FOLD_TOKENS` elements per sample, into one sample with more heads.

    Tensors (batch, heads, ...), q first, become (1, batch * heads, ...), as do the hash words in the settings `scores`;
    None stays None. Larger samples, a bias, and lists per sample or head forbid this; all is then returned unchanged.
    """
    q, pairs = tensors[0], scores.pairs
    small = q.shape[1] * q.shape[2] * q.shape[3] < _FOLD_TOKENS
    if not (q.shape[0] > 1 and small and layout.num_heads == layout.batch_size == 1 and scores.bias is None):
        return scores, list(tensors)
    if pairs is not None:
        keys = pairs.keys.expand(-1, q.shape[1], -1)
        scores = scores._replace(pairs=replace(pairs, queries=_fold(pairs.queries), keys=_fold(keys)))
    return scores, [_fold(x) for x in tensors]


def _fold(x: Any) -> Any:
    return None if x is None else x.reshape(1, -1, *x.shape[2:])


def _calls(
    layout: BlockLayout, scores: Scores, tensors: list[Any], copies: int, *, by_head: bool = False
) -> Iterator[tuple[Sequence, Group, Scores, list[Any]]]:
    """Yield the arguments of each call of a fused operator: (sequence, group, settings of the scores, views).

    The settings are `scores` with the call's own causality, bias and dropout. The views of `tensors`, which are (batch,
    heads, seq, ...), q first, or None, are (seq, heads, ...), of one batch element and the call's heads. A call reads
    or writes `copies` temporary vectors of head_dim numbers per token and head; they limit its rows and heads
    (`Sequence.parts`).
    """
    q, pairs = tensors[0], scores.pairs
    words = [] if pairs is None else [pairs.queries, pairs.keys.expand(-1, q.shape[1], -1)]
    for i in range(len(q)):
        sequence = Sequence(layout, i, None if scores.bias is None else scores.bias[i, 0, 0])
        whole = [None if x is None else x[i].transpose(0, 1) for x in (*tensors, *words)]
        for group, heads in sequence.parts(q.shape[1], copies * q.shape[3] * q.element_size(), by_head=by_head):
            views: list[Any] = [None if x is None else x[:, heads] for x in whole]
            part = scores._replace(is_causal=sequence.causal(group), bias=sequence.bias(group, q.dtype))
            if pairs is not None:
                key_words, query_words = sequence.keys(views.pop(), group), sequence.queries(views.pop(), group)
                part = part._replace(pairs=replace(pairs, queries=query_words, keys=key_words))
            yield sequence, group, part, views


def forward(
    layout: BlockLayout, scores: Scores, q: fused.Queries, k: fused.Keys, v: fused.Keys
) -> tuple[fused.Queries, fused.Statistic]:
    """Return (out, lse) of a layout, as `fused.forward` does, for q, k, v `(batch, heads, seq, head_dim)`, any strides.
    A bias in `scores` has one row for all heads and queries; its `is_causal` is ignored: the layout says whether it is
    causal."""
    shape = q.shape
    scores, (q, k, v) = _folded(layout, scores, q, k, v)
    out, lse = (x.transpose(1, 2) for x in running(q.transpose(1, 2), _covered(layout)))
    for sequence, group, part_scores, (q_, k_, v_, out_, lse_) in _calls(
        layout, scores, [q, k, v, out, lse], 1, by_head=q.device.type == "cpu"
    ):
        views = sequence.queries(q_, group), sequence.keys(k_, group), sequence.keys(v_, group)
        part, part_lse = fused.forward(part_scores, *views)
        if not group.first:
            rows, rows_lse = sequence.queries(out_, group), sequence.queries(lse_, group)
            merge_into(rows, rows_lse, part, part_lse)
            if group.row_view:
                continue
            part, part_lse = rows, rows_lse
        sequence.store(out_, group, part)
        sequence.store(lse_, group, part_lse)
    return out.reshape(shape), lse.reshape(shape[:3])


def backward(
    layout: BlockLayout, scores: Scores, merged: Merged, q: fused.Queries, k: fused.Keys, v: fused.Keys
) -> tuple[fused.Queries, fused.Keys, fused.Keys]:
    """Return (dq, dk, dv) of a layout, in single precision at least. `scores` is as in `forward`."""
    shape = q.shape
    scores, (q, k, v, *of_queries) = _folded(layout, scores, q, k, v, *merged)
    sums = torch.promote_types(q.dtype, torch.float32)
    dk, dv = (x.new_zeros(x.transpose(1, 2).shape, dtype=sums).transpose(1, 2) for x in (k, v))
    dq = (q.new_empty if _covered(layout) else q.new_zeros)(q.transpose(1, 2).shape, dtype=sums).transpose(1, 2)
    for sequence, group, part_scores, (q_, k_, v_, dq_, dk_, dv_, *merged_) in _calls(
        layout, scores, [q, k, v, dq, dk, dv, *of_queries], 2
    ):
        part = Merged(*merged_).views(partial(sequence.queries, group=group))
        views = sequence.queries(q_, group), sequence.keys(k_, group), sequence.keys(v_, group)
        part_q, part_k, part_v = fused.backward(part_scores, part, *views)
        if group.first:
            sequence.store(dq_, group, part_q.to(sums))
        elif group.row_view:
            sequence.queries(dq_, group).add_(part_q)
        else:
            sequence.store(dq_, group, sequence.queries(dq_, group) + part_q)
        sequence.add_to_keys(dk_, group, part_k)
        sequence.add_to_keys(dv_, group, part_v)
    return dq.reshape(shape), dk.reshape(shape), dv.reshape(shape)


def _covered(layout: BlockLayout) -> bool:
    return all(block_plan(layout, batch).covered for batch in range(layout.batch_size))
