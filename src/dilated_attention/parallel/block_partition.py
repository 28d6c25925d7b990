"""Compute which rank needs which rows where block layouts thin out the segments: like `partition`, but from lists.

A crossing segment has a layout over its rows. A rank needs the key blocks that its own query blocks list. A row
travels once, even if several query blocks, query heads of its KV head, or branches list it. The attention of the rank's
own rows to some of those keys is again a square block-sparse problem: the sequence that is left when only the query and
key blocks in question are kept, in their order. The diagonal of the layout stays the diagonal of this problem.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm

import numpy as np
import torch

from dilated_attention.layout import BlockLayout
from dilated_attention.parallel.partition import Crossing, Integers, Sharding, crossings, owner_splits

Interval = tuple[int, int]


def _indices(crossing: Crossing, own: range) -> Interval:
    """Return the rows [a, b) of a crossing segment's subsequence that the tokens `own` are.

    The subsequence consists of the tokens of the segment that take part.
    """
    first = (own.start - crossing.keys.start) // own.step
    return first, first + len(own)


def _lists(layout: BlockLayout, head: int, rows: Interval) -> Iterator[Integers]:
    """Yield the key blocks that the query blocks of these rows list for one head, one array per batch element."""
    first, last = rows[0] // layout.q_block, -(-rows[1] // layout.q_block)
    indptr, indices = layout.to("cpu").indptr.numpy(), layout.to("cpu").indices.numpy()
    for batch in range(layout.batch_size):
        edges = indptr[batch, head]
        yield indices[edges[first] : edges[last]]


def _heads(sharding: Sharding, layout: BlockLayout, crossing: Crossing) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """Yield groups of KV heads that share lists, each with the layout's heads that hold these lists."""
    if layout.num_heads == 1:
        yield crossing.heads, [0]
        return
    ratio = layout.num_heads // sharding.num_heads
    for head in crossing.heads:
        yield (head,), list(range(head * ratio, (head + 1) * ratio))


def _needed(
    sharding: Sharding, crossing: Crossing, rows: Interval, within: Sequence[Interval]
) -> Iterator[tuple[tuple[int, ...], Integers]]:
    """Yield (heads, rows): the rows of the subsequence that the queries `rows` list, ascending, inside the intervals
    `within`."""
    layout = sharding.layout(len(crossing.keys))
    for heads, lists in _heads(sharding, layout, crossing):
        blocks = np.unique(np.concatenate([part for head in lists for part in _lists(layout, head, rows)]))
        wanted = (blocks[:, None] * layout.k_block + np.arange(layout.k_block)).ravel()
        inside = np.zeros(len(wanted), dtype=bool)
        for start, stop in within:
            inside |= (start <= wanted) & (wanted < stop)
        yield heads, wanted[inside]


def _keys(sharding: Sharding, crossing: Crossing, heads: tuple[int, ...], rows: Integers) -> Integers:
    tokens = crossing.keys.start + rows * crossing.own.step
    return (tokens[:, None] * sharding.num_heads + np.array(heads)).ravel()


def _others(sharding: Sharding, crossing: Crossing) -> list[Interval]:
    """Return the rows of a segment's subsequence that lie on other ranks and may be seen."""
    start, stop = _indices(crossing, crossing.own)
    return [(0, start)] if sharding.is_causal else [(0, start), (stop, len(crossing.keys))]


def _distinct(keys: list[Integers]) -> Integers:
    return np.unique(np.concatenate([np.empty(0, dtype=np.int64), *keys]))


def received_keys(sharding: Sharding, rank: int) -> Integers:
    """Return the sorted row keys (token * num_heads + head) that a rank receives."""
    return _distinct(
        [
            _keys(sharding, crossing, heads, rows)
            for crossing in crossings(sharding, rank)
            for heads, rows in _needed(
                sharding, crossing, _indices(crossing, crossing.own), _others(sharding, crossing)
            )
        ]
    )


def sent_keys(sharding: Sharding, rank: int) -> tuple[Integers, list[int]]:
    """Return the row keys that a rank sends, and how many of them go to each peer.

    They are ordered by peer, and sorted for each peer.
    """
    messages: list[list[Integers]] = [[] for _ in range(sharding.world_size)]
    for crossing in crossings(sharding, rank):
        mine, rate, first = _indices(crossing, crossing.own), crossing.own.step, crossing.keys.start
        for peer in range(rank + 1 if sharding.is_causal else 0, sharding.world_size):
            lower, upper = sharding.shard(peer)
            start, stop = max(lower, first), min(upper, crossing.keys.stop)
            theirs = range(start + (first - start) % rate, stop, rate)
            if peer != rank and len(theirs):
                for heads, rows in _needed(sharding, crossing, _indices(crossing, theirs), [mine]):
                    messages[peer].append(_keys(sharding, crossing, heads, rows))
    distinct = [_distinct(message) for message in messages]
    return np.concatenate(distinct), [len(message) for message in distinct]


def contributed_keys(sharding: Sharding, rank: int) -> Integers:
    """Return the sorted row keys of a rank's rows that some other rank needs."""
    return np.unique(sent_keys(sharding, rank)[0])


def contributed_rows(sharding: Sharding, rank: int) -> int:
    return len(contributed_keys(sharding, rank))


def rows_from(sharding: Sharding, rank: int) -> Integers:
    """Return how many rows a rank receives from each peer: int64, `(world_size,)`."""
    return np.array(owner_splits(sharding, received_keys(sharding, rank)))


def rows_to(sharding: Sharding, rank: int) -> Integers:
    """Return how many rows a rank sends to each peer: int64, `(world_size,)`."""
    return np.array(sent_keys(sharding, rank)[1])


@dataclass(frozen=True, eq=False)
class BlockProblem:
    """Describe the attention of a rank's own rows of a crossing segment to some of the keys that they list.

    The problem is a sequence of its own, made of the rows that are left.

    Attributes:
        layout: the layout of the `layout.seq_len` rows that are left; only the rank's own query blocks have lists.
        heads: the KV heads, in the order of the problem's heads.
        tokens, positions: the rank's own rows: tokens of its shard, and where they lie in the sequence.
        keys, slots: the row keys of the keys attended, and where they lie: row * len(heads) + index of the head.
        hidden: rows of listed blocks that must not be seen, `(rows,)`, or None.
    """

    layout: BlockLayout
    heads: tuple[int, ...]
    tokens: Integers
    positions: Integers
    keys: Integers
    slots: Integers
    hidden: Integers | None

    @property
    def nbytes(self) -> int:
        return 1024 + 16 * (len(self.tokens) + len(self.keys)) + self.layout.nbytes


def problem(sharding: Sharding, rank: int, crossing: Crossing, tokens: Sequence[Interval]) -> BlockProblem | None:
    """Return the problem over the keys among `tokens`, intervals of the global sequence; None if no list has any."""
    first, rate, length = crossing.keys.start, crossing.own.step, len(crossing.keys)
    layout = sharding.layout(length)
    q_block, k_block, unit = layout.q_block, layout.k_block, lcm(layout.q_block, layout.k_block)
    own = _indices(crossing, crossing.own)
    wanted = [tuple([min(max(-(-(edge - first) // rate), 0), length) for edge in interval]) for interval in tokens]

    class_heads = [head for _, lists in _heads(sharding, layout, crossing) for head in lists]
    per_list = len(class_heads)
    selected = layout if layout.num_heads == 1 else layout.to("cpu").select(heads=class_heads)
    indptr, indices = selected.to("cpu").indptr.numpy(), selected.to("cpu").indices.numpy()
    query_blocks = np.arange(own[0] // q_block, -(-own[1] // q_block))
    starts, stops = indptr[:, :, query_blocks].ravel(), indptr[:, :, query_blocks + 1].ravel()
    counts = stops - starts
    lane = np.repeat(np.arange(len(counts)), counts)  # (batch, head, query block)
    column = indices[np.arange(counts.sum()) + np.repeat(starts - (counts.cumsum() - counts), counts)]
    seen = np.zeros(len(column), dtype=bool)
    for start, stop in wanted:
        seen |= (column * k_block < stop) & (start < np.minimum((column + 1) * k_block, length)) & (start < stop)
    if not seen.any():
        return None
    lane, column = lane[seen], column[seen]

    units = np.unique(np.concatenate([column * k_block // unit, query_blocks * q_block // unit]))
    rows = len(units) * unit - (-length % unit if units[-1] == (length - 1) // unit else 0)

    def moved(block: Integers, size: int) -> Integers:
        """Renumber blocks of `size` rows, as counted in the sequence in which only the rows of `units` are left.

        A unit is a run of rows that both query blocks and key blocks divide.
        """
        per_unit = unit // size
        return np.searchsorted(units, block // per_unit) * per_unit + block % per_unit

    total = -(-rows // q_block)
    target = lane // len(query_blocks) * total + moved(query_blocks, q_block)[lane % len(query_blocks)]
    number = np.bincount(target, minlength=selected.batch_size * selected.num_heads * total)
    ends = np.cumsum(number).reshape(selected.batch_size, selected.num_heads, total)
    edges = np.concatenate([ends[..., :1] - number.reshape(ends.shape)[..., :1], ends], -1)
    smaller = replace(
        selected, indptr=torch.from_numpy(edges), indices=torch.from_numpy(moved(column, k_block)), seq_len=rows
    )

    keys, slots = [], []
    hidden = np.zeros(rows, dtype=bool)
    visible_until = own[1] if layout.is_causal else length  # later keys are masked by the diagonal
    heads_of = np.array(crossing.heads)
    head = lane // len(query_blocks) % per_list
    ratio = max(1, per_list // len(heads_of)) if layout.num_heads > 1 else 1
    for i in range(1 if layout.num_heads == 1 else len(heads_of)):
        blocks = np.unique(column if layout.num_heads == 1 else column[head // ratio == i])
        index = (blocks[:, None] * k_block + np.arange(k_block)).ravel()
        index = index[index < length]
        inside = np.zeros(len(index), dtype=bool)
        for start, stop in wanted:
            inside |= (start <= index) & (index < stop)
        place = moved(index // k_block, k_block) * k_block + index % k_block
        hidden[place[~inside & (index < visible_until)]] = True
        places = np.arange(len(heads_of)) if layout.num_heads == 1 else np.array([i])
        slots.append((place[inside, None] * len(heads_of) + places).ravel())
        keys.append(_keys(sharding, crossing, tuple(heads_of[places].tolist()), index[inside]))
    queries = np.arange(*own)
    return BlockProblem(
        smaller,
        crossing.heads,
        first + queries * rate - sharding.shard(rank)[0],
        moved(queries // q_block, q_block) * q_block + queries % q_block,
        np.concatenate(keys),
        np.concatenate(slots),
        hidden if hidden.any() else None,
    )
