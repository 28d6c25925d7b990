"""Compute block-sparse attention with PyTorch's fused operators, many rows of a layout in each call.

The query blocks of a layout are sorted into groups, and each group is one batched call. A run of key blocks that
moves along with its query block (a window), or stays (global keys), is an overlapping strided view of k and v. The
remaining blocks of each row are gathered; rows with the same number of blocks form one group. The blocks that the
diagonal cuts, and the partial last block, are groups of their own. The groups' results merge, so the softmax runs over
whole rows. There is no loop over blocks or heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from dilated_attention.backends import fused
from dilated_attention.backends.dropout import Pairs
from dilated_attention.backends.fused import Scores
from dilated_attention.cache import lasting, plan_cache
from dilated_attention.layout import BlockLayout
from dilated_attention.merge import merge_into

_CHUNK_BYTES = 16 << 20
"""The most bytes that one call may use for temporaries: gathered keys and values, and partial results."""
_GATHER_BYTES = 2 << 20
"""The same limit per thread, used where forward gathers keys and values on the CPU, one head at a time.

A cache then holds both the copies and the head's keys. This takes 0.85 to 0.97 of the time of gathering 16 MiB of all
heads. Backward adds to the keys of all heads, and would be 3 to 6 % slower with this limit.
"""
_VIEW_BLOCKS = 8
"""The fewest blocks for which runs of key blocks that form a view (see `_views`) get a call of their own.

With fewer blocks, they are gathered.
"""
_LONG_ROWS = (768, 256)
"""The numbers of tokens up to which neighbouring query blocks are merged into one row, longest first.

The CPU operator cuts 768 or more queries into pieces of 256, 192 or more into pieces of 64, and fewer into pieces of
32. A score entry then costs 0.98, 1.15, and 1.3 to 1.4 times as much as in long dense attention (docs/notebook.md).
"""
_FOLD_TOKENS = 1 << 20
"""The number of elements of a problem below which a batch of problems is copied into one problem with more heads.

Larger problems are run one after another.
"""


@dataclass(frozen=True, eq=False)
class _Group:
    """Hold query blocks that see the same number of key blocks, all of one size. A group is one batched call.

    Attributes:
        rows: (R, b), R rows of b query blocks each; heads: (R,) their heads, or None if all heads share the layout.
        keys: (R, m), the m key blocks that each row sees.
        q_tokens, k_tokens: tokens per query block and per key block; the block size, or what the last block holds.
        first: no earlier group holds any of the rows.
        masked: the diagonal cuts the key blocks.
        row_view: (first, step) if row t is the b query blocks starting at first + t * step; key_view: (first, step) if
            it sees the m key blocks starting at first + t * step.
    """

    rows: Tensor
    heads: Tensor | None
    keys: Tensor
    q_tokens: int
    k_tokens: int
    first: bool
    masked: bool
    row_view: tuple[int, int] | None
    key_view: tuple[int, int] | None

    @property
    def row_tokens(self) -> int:
        return self.rows.shape[1] * self.q_tokens

    def part(self, start: int, stop: int) -> _Group:
        """Return a group with the rows [start, stop) of this one."""
        if stop - start == len(self.rows):
            return self
        return replace(
            self,
            rows=self.rows[start:stop],
            heads=None if self.heads is None else self.heads[start:stop],
            keys=self.keys[start:stop],
            row_view=_moved(self.row_view, start),
            key_view=_moved(self.key_view, start),
        )


def _moved(view: tuple[int, int] | None, by: int) -> tuple[int, int] | None:
    return None if view is None else (view[0] + by * view[1], view[1])


@dataclass(frozen=True, eq=False)
class _BlockPlan:
    """Hold the groups of a layout.

    covered: the groups marked `first` hold every row, so that nothing needs to be initialised.
    """

    groups: tuple[_Group, ...]
    covered: bool

    @property
    def nbytes(self) -> int:
        return 256 + sum(
            512 + 8 * (g.rows.numel() + g.keys.numel() + (0 if g.heads is None else g.heads.numel()))
            for g in self.groups
        )


@dataclass(frozen=True)
class Calls:
    """Describe rows of one head that can be computed in the same call of a fused operator, as far as memory allows.

    Attributes:
        rows: the number of rows, over all lists of the layout; queries, keys: the tokens of each row.
        copied: the keys are gathered; else they are a view.
        masked: the diagonal cuts the rows. first: the results are written; else they are merged into earlier
            results.
    """

    rows: int
    queries: int
    keys: int
    copied: bool
    masked: bool
    first: bool


def calls(layout: BlockLayout) -> tuple[Calls, ...]:
    """Return the calls that compute a layout, in order, for all batch elements and heads that have lists of their
    own."""
    return tuple(
        Calls(len(g.rows), g.row_tokens, g.keys.shape[1] * g.k_tokens, g.key_view is None, g.masked, g.first)
        for batch in range(layout.batch_size)
        for g in block_plan(layout, batch).groups
    )


def block_plan(layout: BlockLayout, batch: int) -> _BlockPlan:
    batch = batch if layout.batch_size > 1 else 0
    key = ("blocks", layout.key, batch)
    return plan_cache.get(key, lambda: lasting(lambda: _compile(layout, batch), layout.device))


def _covered(layout: BlockLayout) -> bool:
    return all(block_plan(layout, batch).covered for batch in range(layout.batch_size))


def _compile(layout: BlockLayout, batch: int) -> _BlockPlan:
    rows, heads = layout.query_blocks, layout.num_heads
    lanes = layout.row - batch * rows * heads  # head * rows + query block
    here = (lanes >= 0) & (lanes < rows * heads)
    lanes, keys, masked = lanes[here], layout.indices[here], layout.masked[here]
    shapes = _row_shapes(layout, lanes, keys)
    q_tail, k_tail = layout.seq_len % layout.q_block, layout.seq_len % layout.k_block
    last_row = (lanes % rows == rows - 1) & (q_tail > 0)
    last_key = (keys == layout.key_blocks - 1) & (k_tail > 0)
    made = _Groups(layout)
    for is_last_row, q_tokens in ((False, layout.q_block), (True, q_tail)):
        for is_last_key, k_tokens in ((False, layout.k_block), (True, k_tail)):
            for cut in (True, False):  # in causal layouts every row has a diagonal, and nearly all have more
                chosen = (last_row == is_last_row) & (last_key == is_last_key) & (masked == cut)
                lane, key = lanes[chosen], keys[chosen]
                if is_last_key and len(lane):  # one key block, the same for every row
                    view = (int(key[0]), 0) if heads == 1 else None
                    made.add(lane, key[:, None], _Shape(1, 1), q_tokens, k_tokens, cut, view)
                elif cut:
                    for count, members, first in _by_count(lane):
                        at = first[:, None] + torch.arange(count, device=lane.device)
                        made.add(members, key[at], _Shape(1, 1), q_tokens, k_tokens, cut, None)
                elif is_last_row:
                    made.add_lists(lane, key, _Shape(1, 1), q_tokens)
                else:
                    for shape in (*shapes, _Shape(1, 1)):
                        common, lane_, key_ = _common(lane, key, shape, layout)
                        made.add_lists(lane_, key_, shape, q_tokens)
                        lane, key = lane[~common], key[~common]
    return _BlockPlan(tuple(made.groups), covered=bool(made.written.all()))


@dataclass(frozen=True)
class _Shape:
    """Describe how query blocks are merged into rows: `merged` blocks per row, `stride` blocks apart.

    The rows of a head are numbered by residue modulo the stride first, then by position.
    """

    merged: int
    stride: int

    def per_residue(self, query_blocks: int) -> int:
        return -(-query_blocks // (self.merged * self.stride))

    def row(self, block: Tensor, query_blocks: int) -> Tensor:
        """Return the row of each query block."""
        place = block // self.stride // self.merged
        return block % self.stride * self.per_residue(query_blocks) + place

    def blocks(self, row: Tensor, query_blocks: int) -> Tensor:
        """Return (R, merged): the query blocks of each row."""
        number = self.per_residue(query_blocks)
        member = torch.arange(self.merged, device=row.device)
        return (row // number)[:, None] + self.stride * ((row % number)[:, None] * self.merged + member)


def _row_shapes(layout: BlockLayout, lane: Tensor, key: Tensor) -> list[_Shape]:
    """Return the shapes of rows to try, long rows first.

    The first merge query blocks at the distance at which many key blocks lie; the others merge neighbours.
    """
    gaps = key.diff()[lane.diff() == 0]
    usual = [gap for gap in gaps.unique().tolist() if 4 * int((gaps == gap).sum()) >= len(gaps)]
    strides = {gap * layout.k_block // layout.q_block for gap in usual if not gap * layout.k_block % layout.q_block}
    lengths = [-(-tokens // layout.q_block) for tokens in _LONG_ROWS]
    return [_Shape(n, stride) for n in lengths for stride in sorted({1, *strides}, reverse=True) if n > 1]


class _Groups:
    """Collect the groups into which a layout's lists are sorted."""

    def __init__(self, layout: BlockLayout) -> None:
        self.layout = layout
        self.groups: list[_Group] = []
        self.begun = torch.zeros(layout.num_heads, layout.query_blocks, dtype=torch.bool, device=layout.device)
        self.written = self.begun.clone()  # by a group marked `first`

    def add(
        self,
        lane: Tensor,
        key: Tensor,
        shape: _Shape,
        q_tokens: int,
        k_tokens: int,
        cut: bool,
        view: tuple[int, int] | None,
    ) -> None:
        """Add a group of lanes that see the key blocks `key`.

        A lane is a row of one head, numbered head * rows + row; rows have the given shape. `cut`: the diagonal cuts the
        key blocks. `view`: (first, step) if the keys are a view, see `_Group.key_view`.
        """
        shared, query_blocks = self.layout.num_heads == 1, self.layout.query_blocks
        rows = shape.stride * shape.per_residue(query_blocks)
        head, blocks = lane // rows, shape.blocks(lane % rows, query_blocks)
        start = blocks[:, 0]
        step = 1 if len(start) < 2 else int(start[1] - start[0])
        regular = shared and (shape.merged == 1 or shape.stride == 1) and step > 0
        regular = regular and bool((start.diff() == step).all())
        row_view = (int(start[0]), step) if regular else None
        first = not bool(self.begun[head[:, None], blocks].any())
        self.begun[head[:, None], blocks] = True
        if first:
            self.written[head[:, None], blocks] = True
        heads = None if shared else head
        view = _progression(key) if shared and view is None else view
        self.groups.append(_Group(blocks, heads, key, q_tokens, k_tokens, first, cut, row_view, view))

    def add_lists(self, lane: Tensor, key: Tensor, shape: _Shape, q_tokens: int) -> None:
        """Add groups for sorted lists of whole, unmasked key blocks; rows have the given shape."""
        k_tokens = self.layout.k_block
        if self.layout.num_heads == 1:
            viewed = torch.zeros(len(lane), dtype=torch.bool, device=lane.device)
            pace = shape.merged * shape.stride * self.layout.q_block / k_tokens
            for entry, length, step in _views(lane, key, pace):
                at = entry[:, None] + torch.arange(length, device=lane.device)
                viewed[at.flatten()] = True
                view = (int(key[entry[0]]), step)
                self.add(lane[entry], key[at], shape, q_tokens, k_tokens, False, view)
            lane, key = lane[~viewed], key[~viewed]
        for count, members, first in _by_count(lane):
            at = first[:, None] + torch.arange(count, device=lane.device)
            self.add(members, key[at], shape, q_tokens, k_tokens, False, None)


def _progression(key: Tensor) -> tuple[int, int] | None:
    """Return (first, step) if row t of `key` (R, m) is the m blocks starting at first + t * step."""
    start = key[:, 0]
    step = 0 if len(start) < 2 else int(start[1] - start[0])
    if step < 0 or bool((start.diff() != step).any()) or bool((key.diff(dim=1) != 1).any()):
        return None
    return int(start[0]), step


def _common(lane: Tensor, key: Tensor, shape: _Shape, layout: BlockLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Find the key blocks that all query blocks of a row see.

    Returns which entries these are, and the lists of the rows that have some, as lanes and key blocks.
    """
    if shape.merged == 1:
        return torch.ones_like(lane, dtype=torch.bool), lane, key
    blocks, columns = layout.query_blocks, layout.key_blocks
    rows = shape.stride * shape.per_residue(blocks)
    code = (lane // blocks * rows + shape.row(lane % blocks, blocks)) * columns + key
    unique, inverse, counts = code.unique(return_inverse=True, return_counts=True)
    full = counts == shape.merged
    # One or two common blocks do not pay for the merge of their result.
    row = unique // columns
    worth = torch.bincount(row[full], minlength=int(row.max()) + 1 if len(row) else 0) >= 3
    full &= worth[row]
    return full[inverse], row[full], unique[full] % columns


def _by_count(lane: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Group lanes by their number of entries: yield (count, lanes, index of each lane's first entry)."""
    if not len(lane):
        return
    lanes, counts = torch.unique_consecutive(lane, return_counts=True)
    first = counts.cumsum(0) - counts
    for count in counts.unique().tolist():
        chosen = counts == count
        yield count, lanes[chosen], first[chosen]


def _views(row: Tensor, key: Tensor, pace: float) -> Iterator[tuple[Tensor, int, int]]:
    """Yield families of equally long runs of key blocks in consecutive rows: (first entry of each run, length, step).

    From row to row, a run moves by `pace`, the number of key blocks that a row spans (a window), or not at all (step 0:
    global keys). A run becomes a view if this saves a gather of at least two blocks, or if its row has nothing else.
    Otherwise merging the result would cost as much as the gather.
    """
    opens = torch.ones_like(key, dtype=torch.bool)
    opens[1:] = (key.diff() != 1) | (row.diff() != 0)
    entry = opens.nonzero().flatten()
    length = torch.cat([entry, entry.new_tensor([len(key)])]).diff()
    runs_of_row = torch.bincount(row[entry])
    worth = (length >= 2) | (runs_of_row[row[entry]] == 1)
    entry, length = entry[worth], length[worth]
    for step in (int(pace), 0) if pace == int(pace) else (0,):
        if not len(entry):
            return
        anchor = key[entry] - step * row[entry]
        # Runs of one length and anchor, in order of rows; a family ends where a row is missing.
        order = torch.argsort(row[entry], stable=True)
        order = order[torch.argsort(anchor[order], stable=True)]
        order = order[torch.argsort(length[order], stable=True)]
        sorted_entry = entry[order]
        breaks = (length[order].diff() != 0) | (anchor[order].diff() != 0) | (row[sorted_entry].diff() != 1)
        bounds = [0, *(breaks.nonzero().flatten() + 1).tolist(), len(order)]
        taken = torch.zeros_like(order, dtype=torch.bool)
        for start, stop in pairwise(bounds):
            blocks = int(length[order[start]])
            if (stop - start) * blocks >= _VIEW_BLOCKS:
                taken[start:stop] = True
                yield sorted_entry[start:stop], blocks, step
        entry, length = sorted_entry[~taken], length[order][~taken]


def _blocks(x: Tensor, block: int, tokens: int, ids: Tensor, heads: Tensor | None) -> tuple[Tensor, Tensor]:
    """Locate the first `tokens` tokens of the blocks `ids` (R, m) of x (seq, heads, ...), for one head per row or all
    heads.

    Returns a view of x and indices (R * m,) into its first dimension; at each index lies one block, (tokens, ...).
    For whole blocks of all heads, the first dimension of the view counts blocks. Otherwise it counts elements, and the
    block at an index starts at that element. The latter copies whole runs of memory at any strides. It is 3 to 5 times
    as fast as advanced indexing, most of all for a single head, and a tenth to a half slower than the view that counts
    blocks.
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
    """Return a copy of the blocks that `_blocks` locates: (R, heads or 1, m * tokens, ...)."""
    view, start = _blocks(x, block, tokens, ids, heads)
    taken = view.index_select(0, start).unflatten(0, ids.shape).flatten(1, 2)
    return taken.transpose(1, 2) if heads is None else taken.unsqueeze(1)


def _slices(x: Tensor, tokens: int, per_head: bool) -> Tensor:
    """View (R, heads or 1, m * tokens, ...) as the slices of `_blocks`: (tokens, R * m, ...), slices in dimension 1."""
    x = x.squeeze(1) if per_head else x.transpose(1, 2)
    return x.unflatten(1, (-1, tokens)).flatten(0, 1).transpose(0, 1)


def _window(x: Tensor, block: int, first: int, step: int, number: int, tokens: int) -> Tensor:
    """View x (seq, heads, ...) as (number, heads, tokens, ...): problem t starts at block first + t * step. No copy."""
    token, head, *rest = x.stride()
    size = (number, x.shape[1], tokens, *x.shape[2:])
    return x.as_strided(size, (step * block * token, head, token, *rest), x.storage_offset() + first * block * token)


def _cut(queries: int) -> int:
    """Return the number of queries in which the CPU operator works at a time, its unit of work."""
    return 256 if queries >= 768 else 64 if queries >= 192 else 32


class Sequence:
    """Hold q, k and v of one sequence, `(seq, heads, head_dim)`, with lists per head or lists that all heads share."""

    def __init__(self, layout: BlockLayout, batch: int, key_bias: Tensor | None) -> None:
        self.layout, self.key_bias = layout, key_bias
        self.groups = block_plan(layout, batch).groups

    def parts(self, num_heads: int, token_bytes: int, *, by_head: bool) -> Iterator[tuple[_Group, slice]]:
        """Yield each group as calls with bounded temporaries: the part of the group, and the heads that a call
        computes.

        A call takes some rows with all heads; or some heads of one row, if a single row with all heads is too large.
        `by_head` applies where keys are gathered: a call then takes few heads and as many of their rows as possible, as
        long as every thread has work. `token_bytes` is the size of one token of one head.
        """
        threads = torch.get_num_threads()
        for group in self.groups:
            gathered = 0 if group.key_view else 2 * group.keys.shape[1] * group.k_tokens
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

    def queries(self, x: Tensor, group: _Group) -> Tensor:
        if group.row_view:
            return _window(x, self.layout.q_block, *group.row_view, len(group.rows), group.row_tokens)
        return _take(x, self.layout.q_block, group.q_tokens, group.rows, group.heads)

    def keys(self, x: Tensor, group: _Group) -> Tensor:
        if group.key_view:
            tokens = group.keys.shape[1] * group.k_tokens
            return _window(x, self.layout.k_block, *group.key_view, len(group.rows), tokens)
        return _take(x, self.layout.k_block, group.k_tokens, group.keys, group.heads)

    def store(self, x: Tensor, group: _Group, values: Tensor) -> None:
        """Write values (R, heads or 1, tokens, ...) to the rows of a group of x (seq, heads, ...)."""
        if group.row_view:
            self.queries(x, group).copy_(values)
            return
        view, start = _blocks(x, self.layout.q_block, group.q_tokens, group.rows, group.heads)
        view.transpose(0, 1).index_copy_(1, start, _slices(values, group.q_tokens, group.heads is not None))

    def add_to_keys(self, x: Tensor, group: _Group, values: Tensor) -> None:
        """Add values (R, heads or 1, m * tokens, head_dim) to the key blocks of a group of x (seq, heads, head_dim)."""
        view, start = _blocks(x, self.layout.k_block, group.k_tokens, group.keys, group.heads)
        view.transpose(0, 1).index_add_(1, start, _slices(values, group.k_tokens, group.heads is not None).to(x.dtype))

    def causal(self, group: _Group) -> bool:
        """Return whether the operator's own causal mask applies: the key block is the query block."""
        return group.masked and self.layout.q_block == self.layout.k_block

    def bias(self, group: _Group, dtype: torch.dtype) -> Tensor | None:
        """Return what is added to each score of a group, 0 or -inf; None if nothing is hidden.

        It hides the keys that the key bias hides. It also hides the keys after each query, unless the diagonal runs
        from corner to corner of the blocks: then the operator's own causal mask is used.
        """
        bias = None
        if self.key_bias is not None:
            bias = self.keys(self.key_bias[:, None].expand(-1, self.layout.num_heads), group)[:, :1, None, :]
        if group.masked and not self.causal(group):
            device = group.rows.device
            query = group.rows * self.layout.q_block + torch.arange(group.q_tokens, device=device)
            key = group.keys[:, :, None] * self.layout.k_block + torch.arange(group.k_tokens, device=device)
            future = key.flatten(1)[:, None, :] > query[:, :, None]
            mask = torch.zeros(future.shape, dtype=dtype, device=device).masked_fill_(future, -torch.inf)[:, None]
            bias = mask if bias is None else bias + mask
        return bias


def _sequences(
    layout: BlockLayout, scores: Scores, tensors: tuple[Tensor, ...]
) -> Iterator[tuple[Sequence, tuple[Tensor, ...]]]:
    """Yield the sequences of (batch, heads, seq, ...) tensors, as views (seq, heads, ...)."""
    for i in range(tensors[0].shape[0]):
        bias = None if scores.bias is None else scores.bias[i, 0, 0]
        yield Sequence(layout, i, bias), tuple(x[i].transpose(0, 1) for x in tensors)


def _words(pairs: Pairs | None, k: Tensor) -> tuple[Tensor, ...]:
    return () if pairs is None else (pairs.queries, pairs.keys.expand(k.shape[:3]))


def _scores(scores: Scores, sequence: Sequence, group: _Group, dtype: torch.dtype, words: tuple[Tensor, ...]) -> Scores:
    """Return the scores of a group. `words`: the sequence's words of dropout, (seq, heads, ...)."""
    pairs = scores.pairs
    if pairs is not None:
        pairs = replace(pairs, queries=sequence.queries(words[0], group), keys=sequence.keys(words[1], group))
    return Scores(sequence.causal(group), scores.scale, sequence.bias(group, dtype), pairs, scores.softcap)


def forward(
    layout: BlockLayout, scores: Scores, q: fused.Queries, k: fused.Keys, v: fused.Keys
) -> tuple[fused.Queries, fused.Statistic]:
    """Return (out, lse) of a layout, as `fused.forward`: q, k, v `(batch, heads, seq, head_dim)`, any strides.

    Args:
        scores: causality is the layout's; a bias has one row for all heads and queries.
    """
    shape = q.shape
    words = _words(scores.pairs, k)
    if _foldable(layout, scores.bias, q):
        q, k, v, *words_ = (_fold(x) for x in (q, k, v, *words))
        words = tuple(words_)
    statistic = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=statistic).transpose(1, 2)
    if not _covered(layout):
        out.zero_()
        lse.fill_(-torch.inf)
    for sequence, whole in _sequences(layout, scores, (q, k, v, out, lse, *words)):
        for group, heads in sequence.parts(q.shape[1], q.shape[3] * q.element_size(), by_head=q.device.type == "cpu"):
            q_, k_, v_, out_, lse_, *words_ = (x[:, heads] for x in whole)
            views = sequence.queries(q_, group), sequence.keys(k_, group), sequence.keys(v_, group)
            part, part_lse = fused.forward(_scores(scores, sequence, group, q.dtype, tuple(words_)), *views)
            if not group.first:
                rows, rows_lse = sequence.queries(out_, group), sequence.queries(lse_, group)
                merge_into(rows, rows_lse, part, part_lse)
                if group.row_view:
                    continue
                part, part_lse = rows, rows_lse
            sequence.store(out_, group, part)
            sequence.store(lse_, group, part_lse)
    return out.reshape(shape), lse.reshape(shape[:3])


def _foldable(layout: BlockLayout, bias: Tensor | None, q: Tensor) -> bool:
    """Return whether a batch of small problems with the same layout and mask is better run as one with more heads."""
    small = q.shape[1] * q.shape[2] * q.shape[3] < _FOLD_TOKENS
    return q.shape[0] > 1 and small and layout.num_heads == layout.batch_size == 1 and bias is None


def _fold(x: Tensor) -> Tensor:
    """Reshape (batch, heads, ...) to (1, batch * heads, ...)."""
    return x.reshape(1, -1, *x.shape[2:])


def backward(
    layout: BlockLayout,
    scores: Scores,
    dout: fused.Queries,
    dlse: fused.Statistic | None,
    q: fused.Queries,
    k: fused.Keys,
    v: fused.Keys,
    out: fused.Queries,
    lse: fused.Statistic,
) -> tuple[fused.Queries, fused.Keys, fused.Keys]:
    """Return (dq, dk, dv) of a layout from merged out and lse, as `fused.backward`."""
    shape = q.shape
    words = _words(scores.pairs, k)
    if _foldable(layout, scores.bias, q):
        dout, q, k, v, out, lse, *words_ = (_fold(x) for x in (dout, q, k, v, out, lse, *words))
        words, dlse = tuple(words_), None if dlse is None else _fold(dlse)
    sums = torch.promote_types(q.dtype, torch.float32)
    dk, dv = (x.new_zeros(x.transpose(1, 2).shape, dtype=sums).transpose(1, 2) for x in (k, v))
    dq = (q.new_empty if _covered(layout) else q.new_zeros)(q.transpose(1, 2).shape, dtype=sums).transpose(1, 2)
    tensors = dout, q, k, v, out, lse, dq, dk, dv, *words, *(() if dlse is None else (dlse,))
    for sequence, whole in _sequences(layout, scores, tensors):
        for group, heads in sequence.parts(q.shape[1], 2 * q.shape[3] * q.element_size(), by_head=False):
            dout_, q_, k_, v_, out_, lse_, dq_, dk_, dv_, *rest = (x[:, heads] for x in whole)
            group_words, dlse_ = tuple(rest[: len(words)]), rest[len(words) :]
            part_q, part_k, part_v = fused.backward(
                _scores(scores, sequence, group, q.dtype, group_words),
                sequence.queries(dout_, group),
                sequence.queries(dlse_[0], group) if dlse_ else None,
                sequence.queries(q_, group),
                sequence.keys(k_, group),
                sequence.keys(v_, group),
                sequence.queries(out_, group),
                sequence.queries(lse_, group),
            )
            if group.first:
                sequence.store(dq_, group, part_q.to(sums))
            elif group.row_view:
                sequence.queries(dq_, group).add_(part_q)
            else:
                sequence.store(dq_, group, sequence.queries(dq_, group) + part_q)
            sequence.add_to_keys(dk_, group, part_k)
            sequence.add_to_keys(dv_, group, part_v)
    return dq.reshape(shape), dk.reshape(shape), dv.reshape(shape)
