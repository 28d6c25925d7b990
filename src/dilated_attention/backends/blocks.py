"""Compute block-sparse attention with PyTorch's fused operators.

A group is the query blocks that see equally many key blocks. A call computes some of its rows, with gathered keys and
values, or views of them where the lists form a window. The groups' results are merged, so the softmax runs over whole
rows. No Python loop runs over blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from dilated_attention.backends import fused
from dilated_attention.backends.fused import Merged, Pairs, Settings
from dilated_attention.bias import Added
from dilated_attention.cache import lasting, plan_cache
from dilated_attention.layout import BlockLayout
from dilated_attention.merge import merge_into, running

_CHUNK_BYTES = 8 << 20
"""The most bytes that one call may use for temporaries: gathered rows and partial results."""


@dataclass(frozen=True, eq=False)
class Group:
    """Hold query blocks that see equally many key blocks, all of one size.

    Attributes:
        rows, heads: (R,) the query blocks, and the head of each; `heads` is None where all heads share the layout.
        keys: (R, m) the key blocks that each query block sees.
        q_tokens, k_tokens: tokens per query block and per key block; the block size, or the length of the last block.
        masked: the diagonal cuts the key blocks.
        kinds: (R, m) the number of each block's mask, -1 for a whole one; None if all are whole.
        window: (first, step) if row t of every head sees the m consecutive key blocks from first + t * step on, as in a
            window; else None.
    """

    rows: Tensor
    heads: Tensor | None
    keys: Tensor
    q_tokens: int
    k_tokens: int
    masked: bool
    kinds: Tensor | None
    window: tuple[int, int] | None

    def part(self, start: int, stop: int) -> Group:
        heads = self.heads
        if heads is not None:
            heads = heads[start:stop]
        window = self.window
        if window is not None:
            first, step = window
            window = (first + start * step, step)
        kinds = self.kinds
        if kinds is not None:
            kinds = kinds[start:stop]
        rows = self.rows[start:stop]
        return replace(self, rows=rows, heads=heads, keys=self.keys[start:stop], kinds=kinds, window=window)


@dataclass(frozen=True, eq=False)
class _Groups:
    """Hold the groups of a layout for the plan cache."""

    groups: tuple[Group, ...]

    @property
    def nbytes(self) -> int:
        nbytes = 256 + 512 * len(self.groups)
        for group in self.groups:
            for table in (group.rows, group.heads, group.keys, group.kinds):
                if table is not None:
                    nbytes += table.nbytes
        return nbytes


def groups_of(layout: BlockLayout, batch: int) -> tuple[Group, ...]:
    """Return the groups of the lists of batch element `batch`."""
    if layout.batch_size == 1:
        batch = 0
    return plan_cache.of(_groups, layout, batch).groups


def _groups(layout: BlockLayout, batch: int) -> _Groups:
    return lasting(lambda: _Groups(tuple(_sorted(layout, batch))), layout.device)


def _sorted(layout: BlockLayout, batch: int) -> Iterator[Group]:
    blocks = layout.query_blocks
    heads = layout.num_heads
    lanes = layout.row - batch * blocks * heads  # a lane: head * query blocks + query block
    here = (lanes >= 0) & (lanes < blocks * heads)
    lanes = lanes[here]
    keys = layout.indices[here]
    masked = layout.masked[here]
    kinds = None
    has_mask = torch.zeros_like(masked)
    if layout.kinds is not None:
        kinds = layout.kinds[here]
        has_mask = kinds >= 0

    q_tail = layout.seq_len % layout.q_block
    k_tail = layout.seq_len % layout.k_block
    last_row = (lanes % blocks == blocks - 1) & (q_tail > 0)
    last_key = (keys == layout.key_blocks - 1) & (k_tail > 0)
    row_sizes = ((False, layout.q_block), (True, q_tail))
    key_sizes = ((False, layout.k_block), (True, k_tail))
    both = (True, False)
    for (is_last_row, q_tokens), (is_last_key, k_tokens), cut, by_bits in product(row_sizes, key_sizes, both, both):
        chosen = (last_row == is_last_row) & (last_key == is_last_key) & (masked == cut) & (has_mask == by_bits)
        key = keys[chosen]
        lane, counts = lanes[chosen].unique_consecutive(return_counts=True)
        begin = counts.cumsum(0) - counts
        for count in counts.unique().tolist():
            of_count = counts == count
            entries = begin[of_count][:, None] + torch.arange(count, device=lane.device)
            listed = key[entries]
            row = lane[of_count] % blocks
            kind = None
            if kinds is not None and by_bits:
                kind = kinds[chosen][entries]
            if heads > 1:
                yield Group(row, lane[of_count] // blocks, listed, q_tokens, k_tokens, cut, kind, None)
            else:
                yield Group(row, None, listed, q_tokens, k_tokens, cut, kind, _window(listed))


def _window(keys: Tensor) -> tuple[int, int] | None:
    """Return (first, step) of `Group.window` if these lists of key blocks form one, else None."""
    steps = keys[:, 0].diff()
    step = int(steps[0]) if len(steps) else 0
    if step < 0 or not bool((steps == step).all()):
        return None
    if not bool((keys.diff(dim=1) == 1).all()):
        return None
    return int(keys[0, 0]), step


@dataclass(frozen=True)
class Calls:
    """Describe a `Group` without its tensors. A fused call computes as many of its rows as memory allows.

    Attributes:
        rows: the number of query blocks, counted for each head that has its own lists.
        queries, keys: query tokens and key tokens per row.
        masked: the diagonal cuts the key blocks.
    """

    rows: int
    queries: int
    keys: int
    masked: bool


def calls_of(layout: BlockLayout) -> tuple[Calls, ...]:
    """Describe the groups of a layout, in order, for all batch elements and heads that have separate lists."""
    calls = []
    for batch in range(layout.batch_size):
        for group in groups_of(layout, batch):
            keys = group.keys.shape[1] * group.k_tokens
            calls.append(Calls(len(group.rows), group.q_tokens, keys, group.masked))
    return tuple(calls)


@dataclass(frozen=True)
class BlockRows:
    """Locate the first `tokens` tokens of the blocks `ids` (R, m), of `block` tokens each, in tensors (seq, heads,
    ...): row r of head heads[r], or of every head if `heads` is None. `window`: as in `Group`."""

    block: int
    tokens: int
    ids: Tensor
    heads: Tensor | None
    window: tuple[int, int] | None = None

    def _view(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return a view of x and indices (R * m,); view[index] is a block, (tokens, ...).

        For whole blocks of all heads, the first dimension of the view counts blocks. Otherwise it counts elements of
        memory, and a block starts at the element of its index. This overlapping view is 3 to 5 times as fast as
        advanced indexing of x, most of all for a single head.
        """
        if self.heads is None and self.tokens == self.block:
            in_whole_blocks = x[: len(x) // self.block * self.block]
            return in_whole_blocks.unflatten(0, (-1, self.block)), self.ids.flatten()

        token, head, *rest = x.stride()
        start = self.ids * (self.block * token)
        last = (x.shape[0] - self.tokens) * token  # the last element at which a block may start
        size = (self.tokens, *x.shape[1:])
        stride = (token, head, *rest)
        if self.heads is not None:
            start = start + self.heads[:, None] * head
            last += (x.shape[1] - 1) * head
            size = (self.tokens, *x.shape[2:])
            stride = (token, *rest)
        return x.as_strided((last + 1, *size), (1, *stride), x.storage_offset()), start.flatten()

    def take(self, x: Tensor) -> Tensor:
        """Return the rows of x, (R, heads or 1, m * tokens, ...): a view if they form a window, else a copy."""
        if self.window is not None:
            first, step = self.window
            token, head, *rest = x.stride()
            size = (len(self.ids), x.shape[1], self.ids.shape[1] * self.tokens, *x.shape[2:])
            offset = x.storage_offset() + first * self.block * token
            return x.as_strided(size, (step * self.block * token, head, token, *rest), offset)

        view, start = self._view(x)
        taken = view.index_select(0, start).unflatten(0, self.ids.shape).flatten(1, 2)
        if self.heads is None:
            return taken.transpose(1, 2)
        return taken.unsqueeze(1)

    def _slices(self, x: Tensor) -> Tensor:
        """View rows as `take` returns them as (tokens, R * m, ...), as `index_copy_` and `index_add_` need them."""
        if self.heads is None:
            x = x.transpose(1, 2)
        else:
            x = x.squeeze(1)
        return x.unflatten(1, (-1, self.tokens)).flatten(0, 1).transpose(0, 1)

    def store(self, x: Tensor, values: Tensor) -> None:
        view, start = self._view(x)
        view.transpose(0, 1).index_copy_(1, start, self._slices(values))

    def add(self, x: Tensor, values: Tensor) -> None:
        view, start = self._view(x)
        view.transpose(0, 1).index_add_(1, start, self._slices(values).to(x.dtype))


@dataclass(frozen=True)
class _Call:
    """Hold one call of a fused operator: where its queries and keys are, the settings of its scores, and views (seq,
    heads, ...) of the tensors."""

    queries: BlockRows
    keys: BlockRows
    settings: Settings
    views: list[Any]


def _calls(layout: BlockLayout, settings: Settings, tensors: list[Any], copies: int) -> Iterator[_Call]:
    """Yield the calls of a layout: parts of its groups, all heads or some of them, whose temporaries fit in
    `_CHUNK_BYTES` if possible.

    Each has `settings` with its own causality, bias and dropout. `tensors` are (batch, heads, seq, ...), q first, or
    None. A call reads or writes `copies` temporary vectors of head_dim numbers per token and head.
    """
    q = tensors[0]
    pairs = settings.pairs
    added = settings.added
    words = []
    if added is not None:
        words = [added.places, added.queries, added.keys]
    if pairs is not None:
        words += [pairs.queries, pairs.keys.expand(-1, q.shape[1], -1)]
    vector = 2 * copies * q.shape[3] * q.element_size()

    for i in range(len(q)):
        whole = [None if x is None else x[i].transpose(0, 1) for x in (*tensors, *words)]
        key_bias = None
        if settings.bias is not None:
            key_bias = settings.bias[i, 0, 0]
        for group in groups_of(layout, i):
            fit = max(1, _CHUNK_BYTES // (vector * (group.q_tokens + group.keys.shape[1] * group.k_tokens)))
            rows = fit
            some_heads = q.shape[1]
            if group.heads is None and q.shape[1] > 1:
                rows = max(1, fit // q.shape[1])
                some_heads = fit
            for head in range(0, q.shape[1], some_heads):
                views: list[Any] = [None if x is None else x[:, head : head + some_heads] for x in whole]
                for row in range(0, len(group.rows), rows):
                    part = group.part(row, row + rows)
                    queries = BlockRows(layout.q_block, part.q_tokens, part.rows[:, None], part.heads)
                    keys = BlockRows(layout.k_block, part.k_tokens, part.keys, part.heads, part.window)
                    # If block sizes agree, a row's only key block on the diagonal is its query block.
                    causal = group.masked and layout.q_block == layout.k_block and group.kinds is None
                    bias = score_bias(layout, part, keys, key_bias, q.dtype, diagonal=group.masked and not causal)
                    own = settings._replace(is_causal=causal, bias=bias)
                    if pairs is not None:
                        taken = queries.take(views[-2]), keys.take(views[-1])
                        own = own._replace(pairs=Pairs(*taken))
                    if added is not None:
                        places, rows_at, keys_at = views[len(tensors) : len(tensors) + 3]
                        here = Added(added.source, queries.take(places), queries.take(rows_at), keys.take(keys_at))
                        own = own._replace(added=here)
                    yield _Call(queries, keys, own, views[: len(tensors)])


def score_bias(
    layout: BlockLayout, group: Group, keys: BlockRows, key_bias: Tensor | None, dtype: torch.dtype, *, diagonal: bool
) -> Tensor | None:
    """Return a bias, 0 or -inf per score, `(rows, 1, 1 or queries, keys)`; None if it would hide nothing.

    It hides the keys that `key_bias` (seq,), 0 or -inf, hides, and what the masks of the blocks hide. With `diagonal`
    also the keys after each query.
    """
    bias = None
    if key_bias is not None:
        bias = keys.take(key_bias[:, None].expand(-1, layout.num_heads))[:, :1, None, :]
    hidden = None
    if diagonal:
        query = group.rows[:, None] * layout.q_block + torch.arange(group.q_tokens, device=group.rows.device)
        key = group.keys[:, :, None] * layout.k_block + torch.arange(group.k_tokens, device=group.rows.device)
        hidden = key.flatten(1)[:, None, :] > query[:, :, None]
    if group.kinds is not None and layout.bits is not None:
        masks = layout.bits[group.kinds, : group.q_tokens, : group.k_tokens]
        hidden_by_bits = ~masks.transpose(1, 2).flatten(2)
        hidden = hidden_by_bits if hidden is None else hidden | hidden_by_bits
    if hidden is None:
        return bias
    mask = fused.bias_of(hidden, dtype)[:, None]
    return mask if bias is None else bias + mask


def forward(
    layout: BlockLayout, settings: Settings, q: fused.Queries, k: fused.Keys, v: fused.Keys
) -> tuple[fused.Queries, fused.Statistic]:
    """Return (out, lse) of a layout, as `fused.forward` does, for q, k, v `(batch, heads, seq, head_dim)`, any strides.
    A bias in `settings` has one row for all heads and queries. Their `is_causal` is ignored: the layout says whether it
    is causal."""
    out, lse = (x.transpose(1, 2) for x in running(q.transpose(1, 2), False))
    for call in _calls(layout, settings, [q, k, v, out, lse], 1):
        q_, k_, v_, out_, lse_ = call.views
        part, part_lse = fused.forward(call.settings, call.queries.take(q_), call.keys.take(k_), call.keys.take(v_))
        rows = call.queries.take(out_)
        rows_lse = call.queries.take(lse_)
        merge_into(rows, rows_lse, part, part_lse)
        call.queries.store(out_, rows)
        call.queries.store(lse_, rows_lse)
    return out, lse


def backward(
    layout: BlockLayout, settings: Settings, merged: Merged, q: fused.Queries, k: fused.Keys, v: fused.Keys
) -> tuple[fused.Queries, fused.Keys, fused.Keys]:
    """Return (dq, dk, dv) of a layout, in single precision at least. `settings` is as in `forward`."""
    sums = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (x.new_zeros(x.transpose(1, 2).shape, dtype=sums).transpose(1, 2) for x in (q, k, v))
    for call in _calls(layout, settings, [q, k, v, dq, dk, dv, *merged], 2):
        q_, k_, v_, dq_, dk_, dv_, *merged_ = call.views
        part = Merged(*merged_).views(call.queries.take)
        views = call.queries.take(q_), call.keys.take(k_), call.keys.take(v_)
        part_q, part_k, part_v = fused.backward(call.settings, part, *views)
        call.queries.add(dq_, part_q)
        call.keys.add(dk_, part_k)
        call.keys.add(dv_, part_v)
    return dq, dk, dv
