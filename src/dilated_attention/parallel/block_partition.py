"""Compute which rank needs which rows where block layouts thin out the segments: like `partition`, but from lists.

A crossing segment has a layout over its rows. A rank needs the key blocks that its own query blocks list. A row travels
once, however many query blocks, query heads and branches list it. A part of the call attends the rank's own rows to the
listed keys of certain token ranges, own or received. Its layout is over a *short sequence*: the blocks of these rows
and keys, in their order, so that the causal diagonal stays the diagonal. Where q_block and k_block differ, whole units
of their least common multiple are kept.

Row i of a crossing segment is the i-th token of its subsequence. An interval is a range of rows, [start, stop). For
crossing segments and row keys see `partition`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import lcm

import numpy as np
import torch

from dilated_attention.layout import BlockLayout
from dilated_attention.layout.spans import row_offsets
from dilated_attention.parallel.partition import (
    BlockQueries,
    Crossing,
    Integers,
    Remote,
    Sharding,
    Share,
    as_rows,
    cells,
    clip,
    crossings,
)
from dilated_attention.plan import Plan, StridedGroup

Interval = tuple[int, int]


def _rows_of(crossing: Crossing, tokens: range) -> Interval:
    """Return the rows of a crossing segment that are these tokens, a run of its keys."""
    first = (tokens.start - crossing.keys.start) // tokens.step
    return first, first + len(tokens)


def _among(rows: Integers, intervals: Sequence[Interval]) -> Integers:
    """Return which row numbers lie in one of the intervals, as bool."""
    inside = np.zeros(len(rows), dtype=bool)
    for start, stop in intervals:
        inside |= (start <= rows) & (rows < stop)
    return inside


def _rows_in(blocks: Integers, size: int) -> Integers:
    return (blocks[:, None] * size + np.arange(size)).ravel()


def _query_blocks(layout: BlockLayout, rows: Interval) -> Integers:
    return np.arange(rows[0] // layout.q_block, -(-rows[1] // layout.q_block))


def _lists(layout: BlockLayout, heads: Sequence[int], query_blocks: Integers) -> tuple[Integers, Integers]:
    """Return (list numbers, key blocks), one of each for every entry in the lists of these heads and query blocks.

    `heads`: heads of the layout. The lists so selected are numbered from 0, by batch element, head and query block.
    """
    tables = layout.to("cpu")
    indptr, indices = tables.indptr.numpy()[:, list(heads)], tables.indices.numpy()
    starts, stops = indptr[:, :, query_blocks].ravel(), indptr[:, :, query_blocks + 1].ravel()
    counts = stops - starts
    first = np.repeat(starts - (counts.cumsum() - counts), counts)
    return np.repeat(np.arange(len(counts)), counts), indices[np.arange(counts.sum()) + first]


def _heads(sharding: Sharding, layout: BlockLayout, crossing: Crossing) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """Yield (KV heads, layout heads): KV heads of `crossing`, and the heads of `layout` that list the keys they read.

    If `layout` has lists for one head only, all KV heads share them: one pair. Else there is one pair per KV head, with
    the layout's heads for the query heads that read it.
    """
    if layout.num_heads == 1:
        yield crossing.heads, [0]
        return
    ratio = layout.num_heads // sharding.num_heads
    for head in crossing.heads:
        yield (head,), list(range(head * ratio, (head + 1) * ratio))


def _needed(
    sharding: Sharding, crossing: Crossing, queries: Interval, within: Sequence[Interval]
) -> Iterator[tuple[Integers, tuple[int, ...]]]:
    """Yield the shares (ascending tokens, KV heads) of a crossing segment that the queries of an interval need: the
    keys that their lists name and that lie in an interval of `within`. KV heads that share lists (`_heads`) come
    together."""
    layout = sharding.layout(len(crossing.keys))
    for heads, lists in _heads(sharding, layout, crossing):
        _, blocks = _lists(layout, lists, _query_blocks(layout, queries))
        listed = _rows_in(np.unique(blocks), layout.k_block)
        yield crossing.keys.start + listed[_among(listed, within)] * crossing.keys.step, heads


def received(sharding: Sharding, rank: int) -> Iterator[Share]:
    """Yield the rows that a rank receives."""
    for crossing in crossings(sharding, rank):
        start, stop = own = _rows_of(crossing, crossing.own)
        others = [(0, start)] if sharding.is_causal else [(0, start), (stop, len(crossing.keys))]
        yield from _needed(sharding, crossing, own, others)


def sent(sharding: Sharding, rank: int) -> Iterator[tuple[Integers, list[Share]]]:
    """Yield (peers, shares): an array of one peer, and the rows of this rank that it needs."""
    found = crossings(sharding, rank)
    for peer in range(rank + 1 if sharding.is_causal else 0, sharding.world_size):
        shares: list[Share] = []
        for crossing in found if peer != rank else ():
            if theirs := clip(crossing.keys, *sharding.shard(peer)):
                mine = _rows_of(crossing, crossing.own)
                shares += _needed(sharding, crossing, _rows_of(crossing, theirs), [mine])
        yield np.array([peer]), shares


def contributed(sharding: Sharding, rank: int) -> Iterator[Share]:
    """Yield the rows of a rank that some other rank needs."""
    for _, shares in sent(sharding, rank):
        yield from shares


class _Shrunk:
    """Shorten a crossing segment to the blocks in `query_blocks` or `key_blocks`, in order; `size` is its new length.

    `layout`: the layout over the whole segment. If q_block and k_block differ, the segment is cut into pieces of their
    least common multiple, and each piece with such a block is kept whole.
    """

    def __init__(self, layout: BlockLayout, query_blocks: Integers, key_blocks: Integers) -> None:
        self.whole, self.query_blocks, self.unit = layout, query_blocks, lcm(*layout.block_size)
        starts = np.concatenate([query_blocks * layout.q_block, key_blocks * layout.k_block])
        self.units, last = np.unique(starts // self.unit), (layout.seq_len - 1) // self.unit
        self.size = len(self.units) * self.unit - (-layout.seq_len % self.unit if self.units[-1] == last else 0)

    def place(self, rows: Integers) -> Integers:
        """Return the positions of these rows of the crossing segment in the shortened one."""
        return np.searchsorted(self.units, rows // self.unit) * self.unit + rows % self.unit

    def layout(self, heads: int, lists: Integers, blocks: Integers) -> BlockLayout:
        """Return the layout over the shortened segment, made of the entries of the kept query blocks' lists.

        Entry i belongs to list `lists[i]` and names key block `blocks[i]` of the whole segment (see `_lists`). `heads`:
        the number of heads that have separate lists.
        """
        q_block, k_block = self.whole.block_size
        counts = np.zeros((self.whole.batch_size, heads, -(-self.size // q_block)), dtype=np.int64)
        lengths = np.bincount(lists, minlength=self.whole.batch_size * heads * len(self.query_blocks))
        counts[:, :, self.place(self.query_blocks * q_block) // q_block] = lengths.reshape(*counts.shape[:2], -1)
        indptr, indices = row_offsets(torch.from_numpy(counts)), self.place(blocks * k_block) // k_block
        return replace(self.whole, indptr=indptr, indices=torch.from_numpy(indices), seq_len=self.size)


def problem(
    sharding: Sharding, rank: int, crossing: Crossing, tokens: Sequence[Interval], device: torch.device
) -> Remote | None:
    """Return the block-sparse problem of a rank's queries in `crossing` over their listed keys in the ranges `tokens`.

    `tokens`: ranges [start, stop) of the whole sequence. None if the lists of these queries name no key in them. The
    problem has no query blocks before the first one that lists such a key, nor after the last.

    The key tensor (see `Remote`) has a row for each token of the short sequence. A row that no list of a head names
    has no key for this head; `queries.layout` and `queries.hidden` keep it from being seen.
    """
    layout, own = sharding.layout(len(crossing.keys)), _rows_of(crossing, crossing.own)
    wanted = [_rows_of(crossing, clip(crossing.keys, *interval)) for interval in tokens]
    listing = [head for _, heads in _heads(sharding, layout, crossing) for head in heads]
    query_blocks = _query_blocks(layout, own)
    lists, blocks = _lists(layout, listing, query_blocks)
    key_blocks = np.unique(blocks)
    key_blocks = key_blocks[_among(_rows_in(key_blocks, layout.k_block), wanted).reshape(-1, layout.k_block).any(1)]
    if not len(key_blocks):
        return None
    kept = np.isin(blocks, key_blocks)
    lists, blocks = lists[kept], blocks[kept]
    group, number = np.divmod(lists, len(query_blocks))  # (batch element and head), and which query block
    first, last = int(number.min()), int(number.max()) + 1
    lists, query_blocks = group * (last - first) + number - first, query_blocks[first:last]
    shrunk = _Shrunk(layout, query_blocks, key_blocks)
    start = max(own[0], int(query_blocks[0]) * layout.q_block)
    stop = min(own[1], int(query_blocks[-1] + 1) * layout.q_block)
    mine, ahead = crossing.own[start - own[0] : stop - own[0]], int(shrunk.place(np.array([start]))[0])

    hidden, listed = np.zeros(shrunk.size, dtype=bool), _rows_in(key_blocks, layout.k_block)
    until = own[1] if layout.is_causal else layout.seq_len  # the diagonal masks later rows
    hidden[shrunk.place(listed[~_among(listed, wanted) & (listed < until)])] = True
    keys, slots, count = [], [], len(crossing.heads)
    for listed_tokens, heads in _needed(sharding, crossing, own, wanted):
        rows = (listed_tokens - crossing.keys.start) // crossing.keys.step
        keys.append(cells(listed_tokens, heads, sharding.num_heads))
        slots.append(cells(shrunk.place(rows), np.searchsorted(crossing.heads, heads), count))
    shard, shard_stop = sharding.shard(rank)
    queries = BlockQueries(
        shrunk.layout(len(listing), lists, blocks).to(device),
        crossing.heads,
        torch.from_numpy(hidden).to(device) if hidden.any() else None,
    )
    groups = (StridedGroup(as_rows(mine, shard), as_rows(range(shrunk.size), 0), 0, count, 1, at=(ahead, 0)),)
    plan = Plan(shard_stop - shard, count, groups, covered=False, square=False)
    return Remote(plan, shrunk.size, np.concatenate(keys), np.concatenate(slots), queries)
