"""Who needs which rows: a dilated pattern over a sequence cut into contiguous shards, as pure functions of integers.

Rank j holds the tokens [bounds[j], bounds[j + 1]). A segment that a shard edge cuts is *crossing*; it straddles
bounds[j] or bounds[j + 1], so a rank has at most two in a branch. In a crossing segment [s, e) a rank's own rows are a
contiguous run [a, b) of the segment's strided subsequence, and attention of that run splits into

    its own rows      a square (causal: lower triangle) over k and v of the shard: a group of the *local* plan;
    rows before, after   all visible (after: only when not causal): a group of the *remote* plan, over received rows.

Everything before the exchange can therefore be computed on the shard alone. A *key* names one row of one key-value
head: token * num_heads + head. Keys ascend by token, hence by owner: a sorted list of keys is a list of messages. A row
that several branches show is received once. Counts are closed-form: unions of arithmetic progressions by inclusion and
exclusion.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import gcd

import numpy as np

from dilated_attention.layout import BlockLayout
from dilated_attention.plan import (
    EVERY,
    OffsetTable,
    Part,
    Plan,
    Rows,
    StridedGroup,
    compile_groups,
    progressions,
    rows_of,
    spans,
)

Integers = np.ndarray
"""int64 throughout: 2^30 tokens times heads do not fit 32 bits. NumPy, so that tracing PyTorch programs may count
rows."""


def balanced_bounds(seq_len: int, world_size: int) -> tuple[int, ...]:
    """The default shard edges, floor(j * seq_len / world_size): sizes differ by at most one."""
    return tuple([j * seq_len // world_size for j in range(world_size + 1)])


@dataclass(frozen=True, slots=True)
class Sharding:
    """A dilated pattern in normal form over a sharded sequence: what every rank knows.

    Args:
        offsets: branch x key-value head, -1 where the head takes no part.
        bounds: shard edges, ascending from 0 to the sequence length; rank j holds [bounds[j], bounds[j + 1]).
        samples: edges of packed samples, ascending from 0 to the sequence length; each has its own segment grid.
        compat: `"torchscale"` adds its zero keys when not causal.
        layouts: the block layout inside segments, for each number of rows that a segment has; causal if the call is.
    """

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    offsets: OffsetTable
    bounds: tuple[int, ...]
    is_causal: bool
    samples: tuple[int, ...] | None = None
    compat: str | None = None
    layouts: tuple[BlockLayout, ...] = ()

    def __post_init__(self) -> None:
        for name, edges in (("bounds", self.bounds), ("samples", self.samples or (0, self.bounds[-1]))):
            if edges[0] != 0 or edges[-1] != self.bounds[-1] or any(x > y for x, y in pairwise(edges)):
                raise ValueError(
                    f"{name} must ascend from 0 to the sequence length {self.bounds[-1]}; got {edges[:20]}"
                )

    @property
    def seq_len(self) -> int:
        return self.bounds[-1]

    @property
    def world_size(self) -> int:
        return len(self.bounds) - 1

    @property
    def num_heads(self) -> int:
        return len(self.offsets[0])

    def shard(self, rank: int) -> tuple[int, int]:
        """The tokens [start, stop) of a rank."""
        return self.bounds[rank], self.bounds[rank + 1]

    @property
    def nbytes(self) -> int:
        """Size charged to the cache for a key that holds it."""
        return 8 * len(self.bounds) + sum([layout.nbytes for layout in self.layouts])

    def layout(self, rows: int) -> BlockLayout:
        """The layout inside a segment of this many rows."""
        return next(layout for layout in self.layouts if layout.seq_len == rows)

    def grids(self) -> Iterator[tuple[int, int]]:
        """The [start, stop) of each independent segment grid."""
        yield from pairwise(self.samples or (0, self.seq_len))


@dataclass(frozen=True, slots=True)
class Crossing:
    """The heads of one offset in one segment [start, stop) that an edge of a rank's shard cuts; tokens are global.

    Attributes:
        own: the rank's rows that take part: queries, and keys.
        before, after: the rows of other ranks that the queries see.
    """

    branch: int
    start: int
    stop: int
    heads: tuple[int, ...]
    own: range
    before: range
    after: range

    @property
    def rows(self) -> int:
        """How many rows the segment has, over all ranks."""
        return len(range(self.before.start, self.stop, self.own.step))


def _within(first: int, stride: int, start: int, stop: int) -> range:
    """The numbers of first + stride * Z in [start, stop)."""
    return range(start + (first - start) % stride, stop, stride)


def _straddling(sharding: Sharding, segment: int, edge: int) -> tuple[int, int] | None:
    """The segment with tokens on both sides of a shard edge."""
    for start, stop in sharding.grids():
        if start < edge < stop:
            begin = start + (edge - start) // segment * segment
            return None if begin == edge else (begin, min(begin + segment, stop))
    return None


def _classes(offsets: Sequence[int]) -> dict[int, tuple[int, ...]]:
    classes: dict[int, tuple[int, ...]] = {}
    for head, offset in enumerate(offsets):
        if offset >= 0:
            classes[offset] = (*classes.get(offset, ()), head)
    return classes


def crossings(sharding: Sharding, rank: int) -> tuple[Crossing, ...]:
    """The crossing segments of a rank in which it has rows, by branch and offset."""
    return _crossings(replace(sharding, layouts=()) if sharding.layouts else sharding, rank)


@lru_cache(maxsize=64)
def _crossings(sharding: Sharding, rank: int) -> tuple[Crossing, ...]:
    lower, upper = sharding.shard(rank)
    if lower == upper:
        return ()
    found = []
    for branch, (segment, rate) in enumerate(zip(sharding.segment_lengths, sharding.dilation_rates, strict=True)):
        spans = {_straddling(sharding, segment, edge) for edge in (lower, upper)} - {None}
        for start, stop in sorted(span for span in spans if span is not None):
            for offset, heads in _classes(sharding.offsets[branch]).items():
                own = _within(start + offset, rate, max(start, lower, start + offset), min(stop, upper))
                if len(own):
                    before = range(start + offset, max(lower, start + offset), rate)
                    after = range(0) if sharding.is_causal else _within(start + offset, rate, upper, max(stop, upper))
                    found.append(Crossing(branch, start, stop, heads, own, before, after))
    return tuple(found)


def local_plan(sharding: Sharding, rank: int) -> Plan:
    """What a rank computes from its own shard: whole segments, and its own rows of crossing ones. Rows count from its
    start.

    With layouts the whole segments alone: crossing ones are `block_partition.problem`s.
    """
    lower, upper = sharding.shard(rank)

    def parts(branch: int, offset: int) -> Iterator[Part]:
        segment, rate = sharding.segment_lengths[branch], sharding.dilation_rates[branch]
        for grid in sharding.grids():
            for own, _, short, is_cut in rows_of(spans(segment, grid, (lower, upper)), rate, offset):
                if not (is_cut and sharding.layouts):
                    rows = replace(own, start=own.start - lower)
                    zeros = short if sharding.compat == "torchscale" and not sharding.is_causal else 0
                    yield Part(rows, [(rows, (None, 0) if sharding.is_causal and rows.count > 1 else EVERY)], zeros)

    groups, covered = compile_groups(sharding.dilation_rates, sharding.offsets, parts, upper - lower)
    whole = covered and not (sharding.layouts and crossings(sharding, rank))
    return Plan(upper - lower, sharding.num_heads, groups, covered=whole, square=True)


@dataclass(frozen=True, slots=True)
class Remote:
    """The groups over received rows, and the key tensor they read: `(batch, rows, num_heads, head_dim)`.

    Attributes:
        rows: rows of the key tensor.
        keys: int64, the key held by each filled slot.
        slots: int64, the slot, row * num_heads + head, of each of `keys`. The other slots are read by no group.
    """

    plan: Plan
    rows: int
    keys: Integers
    slots: Integers


def remote(sharding: Sharding, rank: int, wanted: Iterable[tuple[Crossing, Sequence[range]]]) -> Remote:
    """Lay out the received rows of some crossing segments as a key tensor, one contiguous run of rows a group.

    Args:
        wanted: crossing segments of `rank`, each with the token ranges to attend.
    """
    lower, upper = sharding.shard(rank)
    heads_total = sharding.num_heads
    level = [0] * heads_total  # rows filled so far, by head
    groups: list[StridedGroup] = []
    keys: list[Integers] = []
    slots: list[Integers] = []
    for crossing, parts in wanted:
        parts = [part for part in parts if len(part)]
        if not parts:
            continue
        own = crossing.own
        tokens = np.concatenate([np.arange(part.start, part.stop, part.step) for part in parts])
        base, count = max(level[head] for head in crossing.heads), len(tokens)
        heads = np.array(crossing.heads)
        keys.append((tokens[:, None] * heads_total + heads).ravel())
        slots.append((np.arange(base, base + count)[:, None] * heads_total + heads).ravel())
        queries = Rows(own.start - lower, len(own) * own.step, 1, own.step, len(own))
        for head, number, step in progressions(list(crossing.heads)):
            groups.append(StridedGroup(queries, Rows(base, count, 1, 1, count), head, number, step))
        for head in crossing.heads:
            level[head] = base + count
    empty = np.empty(0, dtype=np.int64)
    plan = Plan(upper - lower, heads_total, tuple(groups), covered=False, square=False)
    return Remote(plan, max(level), np.concatenate([empty, *keys]), np.concatenate([empty, *slots]))


def rank_groups(sharding: Sharding, rank: int) -> tuple[StridedGroup, ...]:
    """All that a rank computes, as if no block layout thinned it out."""
    whole = replace(sharding, layouts=())
    parts = remote(whole, rank, [(c, (c.before, c.after)) for c in crossings(whole, rank)])
    return local_plan(whole, rank).groups + parts.plan.groups


def received_keys(sharding: Sharding, rank: int) -> Integers:
    """The keys that a rank receives: int64, sorted, without repeats; neighbours in the list have neighbouring
    owners."""
    return _union(
        sharding,
        (
            (part, crossing.heads)
            for crossing in crossings(sharding, rank)
            for part in (crossing.before, crossing.after)
        ),
    )


def _union(sharding: Sharding, parts: Iterable[tuple[range, tuple[int, ...]]]) -> Integers:
    """The sorted keys of a union of (tokens, heads)."""
    keys = [
        (np.arange(part.start, part.stop, part.step)[:, None] * sharding.num_heads + np.array(heads)).ravel()
        for part, heads in parts
        if len(part)
    ]
    return np.unique(np.concatenate(keys)) if keys else np.empty(0, dtype=np.int64)


def owner_splits(sharding: Sharding, keys: Integers) -> list[int]:
    """How many of some sorted keys each rank owns."""
    edges = np.array(sharding.bounds) * sharding.num_heads
    return np.diff(np.searchsorted(keys, edges)).tolist()


def _askers(sharding: Sharding, rank: int, crossing: Crossing) -> Integers:
    """Which ranks see this rank's rows of one of its crossing segments: bool, `(world_size,)`."""
    bounds = np.array(sharding.bounds)
    rate = sharding.dilation_rates[crossing.branch]
    first = crossing.before.start
    lower, upper = np.maximum(bounds[:-1], first), np.minimum(bounds[1:], crossing.stop)
    ask = lower + (first - lower) % rate < upper
    ask[rank] = False
    if sharding.is_causal:
        ask[:rank] = False
    return ask


def sent_keys(sharding: Sharding, rank: int) -> tuple[Integers, list[int]]:
    """The keys that a rank sends, peer after peer, each peer's sorted: int64; and how many go to each peer."""
    lower, upper = sharding.shard(rank)
    span = max((upper - lower) * sharding.num_heads, 1)
    messages = []
    for crossing in crossings(sharding, rank):
        keys = _union(sharding, [(crossing.own, crossing.heads)]) - lower * sharding.num_heads
        peers = np.flatnonzero(_askers(sharding, rank, crossing))
        messages.append((peers[:, None] * span + keys).ravel())
    if not messages:
        return np.empty(0, dtype=np.int64), [0] * sharding.world_size
    flat = np.unique(np.concatenate(messages))
    splits = np.bincount(flat // span, minlength=sharding.world_size).tolist()
    return flat % span + lower * sharding.num_heads, splits


def _intersection(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int] | None:
    """The residue class (residue, modulus) of numbers in both classes."""
    (x, m), (y, n) = a, b
    common = gcd(m, n)
    if (x - y) % common:
        return None
    step = m // common
    residue = x + m * ((y - x) // common * pow(step, -1, n // common) % (n // common))
    return residue % (m // common * n), m // common * n


def count_union(parts: Iterable[range], edges: Integers) -> Integers:
    """How many numbers of a union of arithmetic progressions lie between neighbouring edges: int64, one fewer than
    `edges`."""
    parts = [part for part in set(parts) if len(part)]
    total = np.zeros(len(edges) - 1, dtype=np.int64)
    for low, high in pairwise(sorted({x for part in parts for x in (part.start, part.stop)})):
        classes = {(part.start % part.step, part.step) for part in parts if part.start <= low and high <= part.stop}
        terms: list[tuple[int, tuple[int, int]]] = []
        for residue, rate in sorted(classes, key=lambda c: c[1]):
            if any(rate % n == 0 and residue % n == y for y, n in classes - {(residue, rate)}):
                continue  # inside a denser class
            overlaps = [(-sign, both) for sign, held in terms if (both := _intersection(held, (residue, rate)))]
            terms += [(1, (residue, rate)), *overlaps]
        left, right = edges[:-1].clip(low, high), edges[1:].clip(low, high)
        for sign, (residue, rate) in terms:
            first = low + (residue - low) % rate
            if first < high:
                step = min(rate, high - low)  # a longer step has no second number here, and might not fit int64
                total += sign * np.maximum((right - first + step - 1) // step, 0)
                total -= sign * np.maximum((left - first + step - 1) // step, 0)
    return total


def _by_head(sharding: Sharding) -> Iterator[tuple[int, int]]:
    """(head, how many heads have its offsets in every branch), one head of each kind."""
    columns = list(zip(*sharding.offsets, strict=True))
    for column in dict.fromkeys(columns):
        yield columns.index(column), columns.count(column)


def rows_from(sharding: Sharding, rank: int) -> Integers:
    """How many rows a rank receives from each peer: int64, `(world_size,)`. Closed-form; equals the splits of
    `received_keys`."""
    edges = np.array(sharding.bounds)
    rows = np.zeros(sharding.world_size, dtype=np.int64)
    for head, number in _by_head(sharding):
        mine = [crossing for crossing in crossings(sharding, rank) if head in crossing.heads]
        rows += number * count_union((part for c in mine for part in (c.before, c.after)), edges)
    return rows


def rows_to(sharding: Sharding, rank: int) -> Integers:
    """How many rows a rank sends to each peer: int64, `(world_size,)`. Closed-form; equals the splits of
    `sent_keys`."""
    edges = np.array(sharding.shard(rank))
    rows = np.zeros(sharding.world_size, dtype=np.int64)
    found = crossings(sharding, rank)
    asked = {crossing: _askers(sharding, rank, crossing) for crossing in found}
    for head, number in _by_head(sharding):
        mine = [crossing for crossing in found if head in crossing.heads]
        if mine:
            # Peers that ask for the same segments are served alike.
            requests, kind = np.unique(np.stack([asked[c] for c in mine], 1), axis=0, return_inverse=True)
            counts = [
                count_union([c.own for c, ask in zip(mine, r, strict=True) if ask], edges) for r in requests.tolist()
            ]
            rows += number * np.concatenate(counts)[kind.ravel()]
    return rows


def crosses(sharding: Sharding) -> bool:
    """Whether any rank's rows are seen by another: the same answer on every rank."""
    return any(
        _straddling(sharding, segment, edge) is not None
        for segment in sharding.segment_lengths
        for edge in sharding.bounds[1:-1]
    )


def doubling_refusal(sharding: Sharding) -> str | None:
    """Why recursive doubling does not serve a sharding, or None. It needs equal shards and aligned power-of-two
    segments."""
    size, edges = sharding.world_size, sharding.bounds
    shard = sharding.seq_len // size
    if size & (size - 1):
        return f"doubling needs a power of two of ranks; got {size}"
    if shard == 0 or any(edges[j] != j * shard for j in range(size + 1)):
        return f"doubling needs equal shards; {sharding.seq_len} tokens on {size} ranks are not"
    if sharding.samples is not None:
        return "doubling needs one segment grid; packed samples have one each"
    if sharding.layouts:
        return "doubling passes on all rows of a branch; block layouts need few of them"
    for segment in sharding.segment_lengths:
        ratio = -(-min(segment, sharding.seq_len) // shard)
        if shard % segment and (min(segment, sharding.seq_len) != ratio * shard or ratio & (ratio - 1)):
            return f"doubling needs segments that divide the shard of {shard} tokens or are 2^i shards; got {segment}"
    return None


def doubling_level(sharding: Sharding, branch: int) -> int:
    """Rounds of doubling after which a rank holds the branch's rows of its segment."""
    return (
        min(sharding.segment_lengths[branch], sharding.seq_len) // (sharding.seq_len // sharding.world_size)
    ).bit_length() - 1


def doubling_rounds(sharding: Sharding) -> int:
    """Rounds of doubling: log2 of the longest segment over the shard."""
    return max(0, *[doubling_level(sharding, branch) for branch in range(len(sharding.offsets))])


def _doubling_parts(sharding: Sharding, block: int, level: int) -> Iterator[tuple[range, tuple[int, ...]]]:
    """What the 2^level ranks from `block` on pass on in round `level`: the rows of theirs that some later segment
    holds."""
    start, stop = sharding.bounds[block], sharding.bounds[block + (1 << level)]
    for branch, offsets in enumerate(sharding.offsets):
        if doubling_level(sharding, branch) > level:
            segment, rate = min(sharding.segment_lengths[branch], sharding.seq_len), sharding.dilation_rates[branch]
            for offset, heads in _classes(offsets).items():
                yield _within(start // segment * segment + offset, rate, start, stop), heads


def doubling_keys(sharding: Sharding, block: int, level: int) -> Integers:
    """The sorted keys that each of the 2^level ranks from `block` on sends to its sibling in round `level`."""
    return _union(sharding, _doubling_parts(sharding, block, level))


def doubling_rows(sharding: Sharding, block: int, level: int) -> int:
    """The number of `doubling_keys`, in closed form."""
    parts = list(_doubling_parts(sharding, block, level))
    edges = np.array([0, sharding.seq_len])
    return sum(
        number * int(count_union((part for part, heads in parts if head in heads), edges)[0])
        for head, number in _by_head(sharding)
    )


def contributed_keys(sharding: Sharding, rank: int) -> Integers:
    """The sorted keys of a rank's rows that lie in any crossing segment: what it hands to an all-gather."""
    return _union(sharding, ((crossing.own, crossing.heads) for crossing in crossings(sharding, rank)))


def contributed_rows(sharding: Sharding, rank: int) -> int:
    """The number of `contributed_keys`, in closed form."""
    edges = np.array(sharding.shard(rank))
    return sum(
        number * int(count_union((c.own for c in crossings(sharding, rank) if head in c.heads), edges)[0])
        for head, number in _by_head(sharding)
    )
