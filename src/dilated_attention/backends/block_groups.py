"""Sort the blocks of a layout into groups. `blocks` runs each group as a batched call.

A run of key blocks that moves along with its query block (a window), or stays (global keys), is an overlapping strided
view of k and v. The other key blocks of each row are gathered, rows with equally many together. The blocks that the
diagonal cuts, and the partial last block, form separate groups. No Python loop runs over blocks or heads.

Glossary:
    entry: a place in the layout's flat arrays; one pair of a query block and a key block of a head.
    shape: how many query blocks, and how far apart, are computed together as one row.
    row: the query blocks of a shape that one problem of a call holds; rows of a head are numbered from 0.
    lane: a row of a head, numbered head * rows per head + row; it has one list of key blocks.
    run: consecutive key blocks in one lane. family: runs of equal length in consecutive rows, moved by equal steps.
    group: lanes with equally many key blocks, all of one size, which one call computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from dilated_attention.cache import lasting, plan_cache
from dilated_attention.layout import BlockLayout

_VIEW_BLOCKS = 8
"""The fewest key blocks for which a family of runs gets a separate call; smaller families are gathered."""
_LONG_ROWS = (768, 256)
"""The lengths, in tokens, to which query blocks are merged. PyTorch's CPU operator cuts 768 and more queries into parts
of 256, 192 and more into 64, fewer into 32. A score entry then costs 0.98, 1.15 and 1.3 to 1.4 times as much as in long
dense attention (docs/notebook.md)."""


@dataclass(frozen=True, eq=False)
class Group:
    """Hold query blocks that see equally many key blocks, all of one size, in one batched call.

    Attributes:
        rows: (R, b) the query blocks of R rows; a row is b query blocks that one problem of the call computes together.
        heads: (R,) the head of each row, or None where all heads share the layout.
        keys: (R, m) the key blocks that each row sees.
        q_tokens, k_tokens: tokens per query block and per key block; the block size, or the length of the last block.
        masked: the diagonal cuts the key blocks.
        first: no earlier group holds any of these query blocks: results are written, not merged.
        row_view: (first, step) if row t is the b consecutive query blocks from first + t * step on, for all heads; else
            None. key_view: the same for the m key blocks that row t sees.
    """

    rows: Tensor
    heads: Tensor | None
    keys: Tensor
    q_tokens: int
    k_tokens: int
    masked: bool
    first: bool
    row_view: tuple[int, int] | None
    key_view: tuple[int, int] | None

    @property
    def row_tokens(self) -> int:
        return self.rows.shape[1] * self.q_tokens

    @property
    def key_tokens(self) -> int:
        return self.keys.shape[1] * self.k_tokens

    def part(self, start: int, stop: int) -> Group:
        """Return a group of the rows start to stop - 1 alone."""
        if stop - start == len(self.rows):
            return self
        row_view, key_view = (
            None if view is None else (view[0] + start * view[1], view[1]) for view in (self.row_view, self.key_view)
        )
        heads = None if self.heads is None else self.heads[start:stop]
        rows, keys = self.rows[start:stop], self.keys[start:stop]
        return replace(self, rows=rows, heads=heads, keys=keys, row_view=row_view, key_view=key_view)


@dataclass(frozen=True, eq=False)
class _BlockPlan:
    """Hold the groups of a layout; `covered`: those marked `first` hold every query block of every head."""

    groups: tuple[Group, ...]
    covered: bool

    @property
    def nbytes(self) -> int:
        tables = [x for g in self.groups for x in (g.rows, g.keys, g.heads) if x is not None]
        return 256 + 512 * len(self.groups) + sum(8 * x.numel() for x in tables)


@dataclass(frozen=True)
class Calls:
    """Describe a `Group` without its tensors. A fused call computes as many of its rows as memory allows.

    Attributes:
        rows: the number of rows, counted for each head that has its own lists.
        queries, keys: query tokens and key tokens per row.
        copied: the keys are gathered; else they are a view.
    """

    rows: int
    queries: int
    keys: int
    copied: bool
    masked: bool
    first: bool


def calls_of(layout: BlockLayout) -> tuple[Calls, ...]:
    """Describe the groups of a layout, in order, for all batch elements and heads that have separate lists."""
    return tuple(
        Calls(len(g.rows), g.row_tokens, g.key_tokens, g.key_view is None, g.masked, g.first)
        for batch in range(layout.batch_size)
        for g in block_plan(layout, batch).groups
    )


def block_plan(layout: BlockLayout, batch: int) -> _BlockPlan:
    batch = batch if layout.batch_size > 1 else 0
    key = ("blocks", layout.key, batch)
    return plan_cache.get(key, lambda: lasting(lambda: _compile(layout, batch), layout.device))


def _compile(layout: BlockLayout, batch: int) -> _BlockPlan:
    rows, heads = layout.query_blocks, layout.num_heads
    lanes = layout.row - batch * rows * heads
    here = (lanes >= 0) & (lanes < rows * heads)
    lanes, keys, masked = lanes[here], layout.indices[here], layout.masked[here]
    single, shapes = _Shape(1, 1, rows), _row_shapes(layout, lanes, keys)
    q_tail, k_tail = layout.seq_len % layout.q_block, layout.seq_len % layout.k_block
    last_row = (lanes % rows == rows - 1) & (q_tail > 0)
    last_key = (keys == layout.key_blocks - 1) & (k_tail > 0)
    made = _Groups(layout)
    for is_last_row, q_tokens in ((False, layout.q_block), (True, q_tail)):
        for is_last_key, k_tokens in ((False, layout.k_block), (True, k_tail)):
            for cut in (True, False):  # in causal layouts every row has a diagonal, and nearly all have more
                chosen = (last_row == is_last_row) & (last_key == is_last_key) & (masked == cut)
                lane, key = lanes[chosen], keys[chosen]
                if cut or is_last_key:
                    made.add_lists(lane, key, single, q_tokens, k_tokens, cut)
                    continue
                for shape in () if is_last_row else shapes:
                    common, lane_, key_ = _common(lane, key, shape, layout)
                    made.add_views_and_lists(lane_, key_, shape, q_tokens)
                    lane, key = lane[~common], key[~common]
                made.add_views_and_lists(lane, key, single, q_tokens)
    return _BlockPlan(tuple(made.groups), covered=bool(made.written.all()))


@dataclass(frozen=True)
class _Shape:
    """Describe rows of `merged` query blocks, `stride` blocks apart, in a layout with `query_blocks` query blocks.

    A head's rows are numbered from 0, by the residue of their blocks modulo the stride, then in block order.
    """

    merged: int
    stride: int
    query_blocks: int

    @property
    def per_residue(self) -> int:
        return -(-self.query_blocks // (self.merged * self.stride))

    @property
    def rows(self) -> int:
        """Return the number of rows of a head."""
        return self.stride * self.per_residue

    def row(self, block: Tensor) -> Tensor:
        """Return the number of the row of each query block; both are numbered within a head."""
        return block % self.stride * self.per_residue + block // self.stride // self.merged

    def blocks(self, row: Tensor) -> Tensor:
        """Return the numbers, (R, merged), of the query blocks of R rows; both are numbered within a head."""
        residue, place = row // self.per_residue, row % self.per_residue
        member = torch.arange(self.merged, device=row.device)
        return residue[:, None] + self.stride * (place[:, None] * self.merged + member)


def _row_shapes(layout: BlockLayout, lane: Tensor, key: Tensor) -> list[_Shape]:
    """Return shapes of rows, long ones first, in which to try to merge query blocks that see common key blocks.

    `_LONG_ROWS` gives the lengths of rows in tokens, rounded up to query blocks. A stride is 1, or a frequent gap
    between successive key blocks of a list: if lists name every n-th block, query blocks n apart may see the same ones.
    A gap is frequent if a quarter or more of all gaps equal it. It must be a whole number of query blocks.
    `lane`, `key`: for each active block, the number of its query block (numbers continue from head to head) and of its
    key block.
    """
    gaps = key.diff()[lane.diff() == 0]
    usual = [gap for gap in gaps.unique().tolist() if 4 * int((gaps == gap).sum()) >= len(gaps)]
    tokens = [gap * layout.k_block for gap in usual]
    strides = sorted({1, *(n // layout.q_block for n in tokens if n % layout.q_block == 0)}, reverse=True)
    lengths = [-(-n // layout.q_block) for n in _LONG_ROWS]
    return [_Shape(n, stride, layout.query_blocks) for n in lengths for stride in strides if n > 1]


class _Groups:
    """Collect `groups`. `begun` marks the (head, query block) pairs of all groups so far, `written` those of groups
    marked `first`."""

    def __init__(self, layout: BlockLayout) -> None:
        self.layout = layout
        self.groups: list[Group] = []
        self.begun = torch.zeros(layout.num_heads, layout.query_blocks, dtype=torch.bool, device=layout.device)
        self.written = self.begun.clone()

    def add(self, lane: Tensor, key: Tensor, shape: _Shape, q_tokens: int, k_tokens: int, cut: bool) -> None:
        """Add one group of R rows of this shape: row t, numbered lane[t], sees the m key blocks key[t] of `key` (R, m).

        `cut`: whether the diagonal cuts these key blocks. `q_tokens`, `k_tokens`: as in `Group`.
        """
        shared = self.layout.num_heads == 1
        head, blocks = lane // shape.rows, shape.blocks(lane % shape.rows)
        row_view = _progression(blocks[:, 0]) if shared and (shape.merged == 1 or shape.stride == 1) else None
        key_view = _progression(key[:, 0]) if shared and not bool((key.diff(dim=1) != 1).any()) else None
        at = head[:, None], blocks
        first = not bool(self.begun[at].any())
        self.begun[at] = True
        if first:
            self.written[at] = True
        heads = None if shared else head
        self.groups.append(Group(blocks, heads, key, q_tokens, k_tokens, cut, first, row_view, key_view))

    def add_lists(self, lane: Tensor, key: Tensor, shape: _Shape, q_tokens: int, k_tokens: int, cut: bool) -> None:
        """Add a group for each list length. `lane`, `key`: one entry per lane (see `add`) and key block that it sees,
        sorted."""
        if not len(lane):
            return
        lanes, counts = torch.unique_consecutive(lane, return_counts=True)
        begin = counts.cumsum(0) - counts
        for count in counts.unique().tolist():
            entries = begin[counts == count][:, None] + torch.arange(count, device=lane.device)
            self.add(lanes[counts == count], key[entries], shape, q_tokens, k_tokens, cut)

    def add_views_and_lists(self, lane: Tensor, key: Tensor, shape: _Shape, q_tokens: int) -> None:
        """Add groups for whole, unmasked key blocks: runs that recur from row to row (`_families`) as views of k and v,
        then the rest by `add_lists`, which describes `lane` and `key`."""
        k_tokens = self.layout.k_block
        if self.layout.num_heads == 1:
            viewed = torch.zeros(len(lane), dtype=torch.bool, device=lane.device)
            pace = shape.merged * shape.stride * self.layout.q_block / k_tokens
            for entry, length in _families(lane, key, pace):
                at = entry[:, None] + torch.arange(length, device=lane.device)
                viewed[at.flatten()] = True
                self.add(lane[entry], key[at], shape, q_tokens, k_tokens, False)
            lane, key = lane[~viewed], key[~viewed]
        self.add_lists(lane, key, shape, q_tokens, k_tokens, False)


def _progression(x: Tensor) -> tuple[int, int] | None:
    """Return (first, step) if x[t] = first + t * step, with step >= 0; otherwise None."""
    step = 0 if len(x) < 2 else int(x[1] - x[0])
    return None if step < 0 or bool((x.diff() != step).any()) else (int(x[0]), step)


def _common(lane: Tensor, key: Tensor, shape: _Shape, layout: BlockLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Find the key blocks that all query blocks of a row of this shape see, if these are three key blocks or more.

    `lane`, `key`: entries whose rows are single query blocks. Return booleans that mark the entries found, then one
    entry (lane, key) per row and common key block, with lanes of this shape.
    """
    blocks, columns = layout.query_blocks, layout.key_blocks
    code = (lane // blocks * shape.rows + shape.row(lane % blocks)) * columns + key
    unique, inverse, counts = code.unique(return_inverse=True, return_counts=True)
    full = counts == shape.merged
    # One or two common blocks do not pay for the merge of their result.
    row = unique // columns
    worth = torch.bincount(row[full], minlength=int(row.max()) + 1 if len(row) else 0) >= 3
    full &= worth[row]
    return full[inverse], row[full], unique[full] % columns


def _families(row: Tensor, key: Tensor, pace: float) -> Iterator[tuple[Tensor, int]]:
    """Yield families of equally long runs of key blocks in consecutive rows: (where each run starts, length).

    `row`, `key`: one entry per row and key block that it sees, sorted; a start is an index of these. Families
    whose runs move by `pace` key blocks (as many as a row spans) from row to row, as in a window, come first, if `pace`
    is a whole number. Families whose runs are the same in every row (global keys) follow. Runs of a single block count
    only if their row has no other run: otherwise merging their result costs as much as gathering them. A family has
    `_VIEW_BLOCKS` or more key blocks in all.
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
                yield sorted_entry[start:stop], blocks
        entry, length = sorted_entry[~taken], length[order][~taken]
