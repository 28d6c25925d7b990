"""Compute which rank needs which rows where block layouts thin out the segments: like `partition`, but from lists.

A crossing segment has a layout over its rows. A rank needs the key blocks that its own query blocks list. A row travels
once, however many query blocks, query heads and branches list it. A part of the call attends the rank's own rows to the
listed keys of certain token ranges, which it has received. Its layout is over a *short sequence*: the blocks of these
rows and keys, in their order, so that the causal diagonal stays the diagonal. Where q_block and k_block differ, whole
units of their least common multiple are kept.

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


def _entries(layout: BlockLayout, heads: Sequence[int], rows: Interval) -> tuple[Integers, Integers, Integers]:
    """Return (groups, query blocks, places) of the entries in the lists of these heads of the layout for the query
    blocks that have these rows, list by list. `places`: where an entry lies in `indices`. `groups` number pairs of a
    batch element and one of the heads.
    """
    query_blocks = np.arange(rows[0] // layout.q_block, -(-rows[1] // layout.q_block))
    indptr = layout.indptr.cpu().numpy()[:, list(heads)]
    starts = indptr[:, :, query_blocks].ravel()
    stops = indptr[:, :, query_blocks + 1].ravel()
    counts = stops - starts

    lists = np.repeat(np.arange(len(counts)), counts)
    shift = starts - (counts.cumsum() - counts)  # from an entry's number here to its place in `indices`
    places = np.arange(len(lists)) + np.repeat(shift, counts)
    return lists // len(query_blocks), query_blocks[lists % len(query_blocks)], places


def _key_blocks(layout: BlockLayout, places: Integers) -> Integers:
    """Return the key blocks that the entries at these places of `indices` name."""
    return layout.indices.cpu().numpy()[places]


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
        _, _, places = _entries(layout, lists, queries)
        listed = _rows_in(np.unique(_key_blocks(layout, places)), layout.k_block)
        rows = listed[_among(listed, within)]
        yield crossing.keys.start + rows * crossing.keys.step, heads


def received(sharding: Sharding, rank: int) -> Iterator[Share]:
    """Yield the rows that a rank receives."""
    for crossing in crossings(sharding, rank):
        own = _rows_of(crossing, crossing.own)
        others = [(0, own[0])]
        if not sharding.is_causal:
            others.append((own[1], len(crossing.keys)))
        yield from _needed(sharding, crossing, own, others)


def sent(sharding: Sharding, rank: int) -> Iterator[tuple[Integers, list[Share]]]:
    """Yield (peers, shares): an array of one peer, and the rows of this rank that it needs."""
    found = crossings(sharding, rank)
    first = rank + 1 if sharding.is_causal else 0
    for peer in range(first, sharding.world_size):
        if peer == rank:
            continue
        shares: list[Share] = []
        for crossing in found:
            theirs = clip(crossing.keys, *sharding.shard(peer))
            if theirs:
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
        self.whole = layout
        self.unit = lcm(*layout.block_size)
        starts = np.concatenate([query_blocks * layout.q_block, key_blocks * layout.k_block])
        self.units = np.unique(starts // self.unit)

        self.size = len(self.units) * self.unit
        last = (layout.seq_len - 1) // self.unit
        if self.units[-1] == last:  # it may be shorter than the others
            self.size -= -layout.seq_len % self.unit

    def place(self, rows: Integers) -> Integers:
        """Return the positions of these rows of the crossing segment in the shortened one."""
        return np.searchsorted(self.units, rows // self.unit) * self.unit + rows % self.unit

    @property
    def rows(self) -> Integers:
        """Return the row of the crossing segment at each position of the shortened one."""
        return _rows_in(self.units, self.unit)[: self.size]

    def layout(self, heads: int, groups: Integers, query_blocks: Integers, places: Integers) -> BlockLayout:
        """Return the layout over the shortened segment that is made of these entries (see `_entries`). `heads`: the
        number of heads that have separate lists."""
        q_block, k_block = self.whole.block_size
        shape = self.whole.batch_size, heads, -(-self.size // q_block)
        lists = groups * shape[2] + self.place(query_blocks * q_block) // q_block
        counts = np.bincount(lists, minlength=shape[0] * shape[1] * shape[2]).reshape(shape)

        indptr = row_offsets(torch.from_numpy(counts))
        blocks = _key_blocks(self.whole, places)
        indices = torch.from_numpy(self.place(blocks * k_block) // k_block)
        whole = self.whole.to("cpu")
        kinds = whole.kinds
        if kinds is not None:
            kinds = kinds[torch.from_numpy(places)]
        return replace(whole, indptr=indptr, indices=indices, kinds=kinds, seq_len=self.size)


def problem(
    sharding: Sharding, rank: int, crossing: Crossing, tokens: Sequence[Interval], device: torch.device
) -> Remote | None:
    """Return the block-sparse problem of a rank's queries in `crossing` over their listed keys in the ranges `tokens`.

    `tokens`: ranges [start, stop) of the whole sequence. None if the lists of these queries name no key in them. The
    problem has no query blocks before the first one that lists such a key, nor after the last.

    The key tensor (see `Remote`) has a row for each token of the short sequence. A row that no list of a head names
    has no key for this head; `queries.layout` and `queries.hidden` keep it from being seen.
    """
    layout = sharding.layout(len(crossing.keys))
    own = _rows_of(crossing, crossing.own)
    wanted = [_rows_of(crossing, clip(crossing.keys, *interval)) for interval in tokens]
    listing: list[int] = []
    for _, lists_of_heads in _heads(sharding, layout, crossing):
        listing += lists_of_heads
    groups, query_blocks, places = _entries(layout, listing, own)
    blocks = _key_blocks(layout, places)
    key_blocks = np.unique(blocks)
    is_wanted = _among(_rows_in(key_blocks, layout.k_block), wanted).reshape(-1, layout.k_block).any(1)
    key_blocks = key_blocks[is_wanted]
    kept = np.isin(blocks, key_blocks)
    if not kept.any():
        return None

    groups, query_blocks, places = (x[kept] for x in (groups, query_blocks, places))
    first = int(query_blocks.min())
    last = int(query_blocks.max())
    shrunk = _Shrunk(layout, np.arange(first, last + 1), key_blocks)
    start = max(own[0], first * layout.q_block)
    stop = min(own[1], (last + 1) * layout.q_block)
    mine = crossing.own[start - own[0] : stop - own[0]]
    ahead = int(shrunk.place(np.array([start]))[0])

    listed = _rows_in(key_blocks, layout.k_block)
    until = own[1] if layout.is_causal else layout.seq_len  # the diagonal masks later rows
    unwanted = listed[~_among(listed, wanted) & (listed < until)]
    hidden = None
    if len(unwanted):
        hidden = torch.zeros(shrunk.size, dtype=torch.bool)
        hidden[torch.from_numpy(shrunk.place(unwanted))] = True
        hidden = hidden.to(device)

    count = len(crossing.heads)
    keys = []
    slots = []
    for listed_tokens, heads in _needed(sharding, crossing, own, wanted):
        rows = (listed_tokens - crossing.keys.start) // crossing.keys.step
        keys.append(cells(listed_tokens, heads, sharding.num_heads))
        slots.append(cells(shrunk.place(rows), np.searchsorted(crossing.heads, heads), count))

    shard, shard_stop = sharding.shard(rank)
    of_rows = torch.from_numpy(crossing.keys.start + shrunk.rows * crossing.keys.step).to(device)
    short = shrunk.layout(len(listing), groups, query_blocks, places).to(device)
    queries = BlockQueries(short, crossing.heads, hidden, of_rows)
    group = StridedGroup(as_rows(mine, shard), as_rows(range(shrunk.size), 0), 0, count, 1, at=(ahead, 0))
    plan = Plan(shard_stop - shard, count, (group,), covered=False, square=False)
    return Remote(plan, shrunk.size, np.concatenate(keys), np.concatenate(slots), queries)
