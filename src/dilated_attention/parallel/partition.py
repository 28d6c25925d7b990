"""Compute which rank needs which rows of a sequence that is cut into contiguous shards. All functions are pure and work
on integers.

Rank j holds the tokens [bounds[j], bounds[j + 1]). A segment that a shard edge cuts is *crossing*. A crossing
segment of rank j contains bounds[j] or bounds[j + 1], so a rank has at most two per branch. A window has one segment,
the whole sequence. In each residue class of a crossing segment a query at token p sees the keys at p + i * rate for low
<= i <= high: the whole class (no limits), the keys up to itself (high = 0), or a window. A rank's queries are a
contiguous run of the class, and so are the keys that they see. The attention of these queries splits by the keys:

    own keys             a group of the *local* plan, over k and v of the shard, with the band (low, high);
    keys before, after   groups of the *remote* plan, over received rows, with the band shifted. A limit that hides no
                         key is left out, so that whole segments are groups without a band.

With block layouts, `block_partition` makes the problems over received rows. Which of a rank's own rows each peer sees
follows in the same way, for all peers at once. `plan.sights` says what a branch shows, windows and leading tokens
(`Window.leading`) included, so this module treats all branches alike.

A *row key* names the key and value of one token of one KV head: token * kv_heads + head. Row keys ascend by token,
hence by owner: a sorted list of row keys is a list of messages. A row that several branches show is received once. A
*share* is a range of tokens with the KV heads that move them; what a rank sends or receives is a union of shares. A
transport lists the row keys of the union (`keys_of`). `traffic` needs only their number, which `count_of` finds in
closed form, for unions of arithmetic progressions by inclusion and exclusion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product
from math import gcd

import numpy as np
from torch import Tensor

from dilated_attention.layout import BlockLayout
from dilated_attention.plan import (
    Band,
    Branches,
    Part,
    Plan,
    Rows,
    StridedGroup,
    compile_groups,
    parts_of,
    progressions,
    sights,
    visible,
)

Integers = np.ndarray
"""int64 throughout, because 2^30 tokens times heads do not fit 32 bits. NumPy, so that programs that PyTorch traces may
count rows."""


def balanced_bounds(seq_len: int, world_size: int) -> tuple[int, ...]:
    """Return the default shard edges, floor(j * seq_len / world_size): sizes differ by at most one."""
    return tuple([j * seq_len // world_size for j in range(world_size + 1)])


@dataclass(frozen=True, slots=True)
class Sharding:
    """Describe a pattern, as `Branches`, over a sharded sequence. Every rank has the same description.

    Args:
        bounds: shard edges, ascending from 0 to the sequence length; rank j holds [bounds[j], bounds[j + 1]).
        samples: edges of packed samples, ascending from 0 to the sequence length; each has its own segment grid.
        layouts: the block layouts inside segments, one for each number of participating tokens that a segment has. They
            are causal if `is_causal`.
    """

    branches: Branches
    bounds: tuple[int, ...]
    is_causal: bool
    samples: tuple[int, ...] | None = None
    layouts: tuple[BlockLayout, ...] = ()

    def __post_init__(self) -> None:
        for name, edges in (("bounds", self.bounds), ("samples", self.grid_edges)):
            whole = edges[0] == 0 and edges[-1] == self.seq_len
            if not whole or any(x > y for x, y in pairwise(edges)):
                raise ValueError(f"{name} must ascend from 0 to the sequence length {self.seq_len}; got {edges[:20]}")

    @property
    def seq_len(self) -> int:
        return self.bounds[-1]

    @property
    def world_size(self) -> int:
        return len(self.bounds) - 1

    @property
    def num_heads(self) -> int:
        return len(self.branches.offsets[0])

    def shard(self, rank: int) -> tuple[int, int]:
        """Return the tokens [start, stop) of a rank."""
        return self.bounds[rank], self.bounds[rank + 1]

    @property
    def nbytes(self) -> int:
        """Return the bytes that the plan cache counts for this sharding as part of a cache key."""
        return 8 * len(self.bounds) + sum([layout.nbytes for layout in self.layouts])

    def layout(self, rows: int) -> BlockLayout:
        """Return the layout inside a segment with this many participating tokens."""
        return next(layout for layout in self.layouts if layout.seq_len == rows)

    @property
    def grid_edges(self) -> tuple[int, ...]:
        """Return the edges of the packed samples; without samples, those of the whole sequence."""
        if self.samples:
            return self.samples
        return (0, self.seq_len)

    def grids(self) -> Iterator[tuple[int, int]]:
        """Yield the token ranges [start, stop) cut into segments on their own: each packed sample, or all tokens."""
        yield from pairwise(self.grid_edges)


@dataclass(frozen=True, slots=True)
class Crossing:
    """Describe one rank's part of a segment that a shard edge cuts, for the heads of one offset; tokens are global.

    A query at token p sees the keys at p + i * rate for low <= i <= high.

    Attributes:
        branch, heads: the number of the branch, and the KV heads that have this offset in it.
        queries, keys: the tokens of the segment that are queries and keys, on all ranks. They differ only where leading
            tokens (`Window.leading`) are the queries or the keys.
        band: the limits (low, high); None: no limit.
        own, shown: the queries and the keys that this rank holds.
        before, after: the keys that `own` sees before the shard, and those that it sees after the shard.
    """

    branch: int
    heads: tuple[int, ...]
    queries: range
    keys: range
    band: Band
    own: range
    shown: range
    before: range
    after: range


def clip(rows: range, start: int, stop: int) -> range:
    """Return the part of an ascending range that lies in [start, stop)."""
    start = max(start, rows.start)
    return range(start + (rows.start - start) % rows.step, min(stop, rows.stop), rows.step)


def _seen(queries: range, keys: range, band: Band) -> range:
    """Return those of `keys` that some of `queries` sees. Both are token ranges whose step is the rate."""
    if not queries:
        return keys[:0]
    low, high = band
    start = keys.start
    if low is not None:
        start = max(start, queries.start + low * queries.step)
    stop = keys.stop
    if high is not None:
        stop = min(stop, queries.stop + high * queries.step)
    return range(start, stop, keys.step)


def _straddling(sharding: Sharding, segment: int, edge: int) -> tuple[int, int, int] | None:
    """Return the segment that the shard edge `edge` cuts, as tokens (start of its packed sample or of the sequence,
    start, stop); None if the edge cuts no segment. `segment`: the segment length."""
    for start, stop in sharding.grids():
        if start < edge < stop:
            begin = start + (edge - start) // segment * segment
            if begin == edge:
                return None
            return start, begin, min(begin + segment, stop)
    return None


def _classes(offsets: Sequence[int]) -> dict[int, tuple[int, ...]]:
    classes: dict[int, tuple[int, ...]] = {}
    for head, offset in enumerate(offsets):
        if offset != -1:
            classes[offset] = (*classes.get(offset, ()), head)
    return classes


def crossings(sharding: Sharding, rank: int) -> tuple[Crossing, ...]:
    """Return the crossing segments (cut by a shard edge) in which a rank has rows, ordered by branch and offset."""
    if sharding.layouts:  # they do not decide which segments cross, so shardings that differ in them share an entry
        sharding = replace(sharding, layouts=())
    return _crossings(sharding, rank)


@lru_cache(maxsize=64)
def _crossings(sharding: Sharding, rank: int) -> tuple[Crossing, ...]:
    lower, upper = sharding.shard(rank)
    if lower == upper:
        return ()
    branches = sharding.branches
    made: list[Crossing] = []
    for branch, segment in enumerate(branches.segment_lengths):
        cut = {found for edge in (lower, upper) if (found := _straddling(sharding, segment, edge))}
        classes = _classes(branches.offsets[branch])
        for (origin, start, stop), (offset, heads) in product(sorted(cut), classes.items()):
            at = (start - origin, stop - origin)
            for sight in sights(branches, branch, offset, at, at, sharding.is_causal):
                queries = _tokens(sight.queries, origin)
                keys = _tokens(sight.keys, origin)
                own = clip(queries, lower, upper)
                shown = clip(keys, lower, upper)
                if own or shown:
                    seen = _seen(own, keys, sight.band)
                    before = clip(seen, 0, lower)
                    after = clip(seen, upper, stop)
                    made.append(Crossing(branch, heads, queries, keys, sight.band, own, shown, before, after))
    return tuple(made)


def local_plan(sharding: Sharding, rank: int) -> Plan:
    """Plan what a rank can compute from its shard alone: every whole segment, plus its own rows of crossing segments.

    Rows are numbered from the shard's first token. Block layouts say themselves whether they are causal.
    """
    lower, upper = sharding.shard(rank)
    branches = sharding.branches
    listed = bool(sharding.layouts)
    is_causal = sharding.is_causal and not listed

    def parts(branch: int, offset: int) -> Iterator[Part]:
        for start, stop in sharding.grids():
            own = (max(lower, start) - start, min(upper, stop) - start)
            origin = lower - start
            yield from parts_of(branches, branch, offset, own, own, is_causal, (origin, origin), listed, stop - start)

    groups, covered = compile_groups(branches, parts, upper - lower)
    square = not listed and all(group.queries == group.keys for group in groups)
    return Plan(upper - lower, sharding.num_heads, groups, covered, square)


@dataclass(frozen=True, eq=False)
class BlockQueries:
    """Hold which keys of a block-sparse problem its queries see (see `block_partition`).

    Attributes:
        layout: over the short sequence, the lists of the rank's own query blocks; other query blocks list nothing.
        heads: KV heads, in the order of the problem's heads.
        hidden: bool `(rows,)`, True for keys that lie in a listed block but outside the token ranges that this problem
            attends; None if there are none.
        tokens: int64 `(rows,)`, the global token of each key.
    """

    layout: BlockLayout
    heads: tuple[int, ...]
    hidden: Tensor | None
    tokens: Tensor

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes + self.tokens.nbytes


@dataclass(frozen=True)
class Remote:
    """Hold a plan over received rows, and where each of these rows lies in the key tensor that the plan reads.

    The key tensor is `(batch, rows, kv_heads, head_dim)`.

    Attributes:
        rows: rows of the key tensor.
        keys: the row keys of the received rows.
        slots: where each of them lies in the key tensor, (row of the tensor) * kv_heads + head. The plan reads no other
            slots.
        queries: with a block layout, what the queries of the plan's one group see; else None.
    """

    plan: Plan
    rows: int
    keys: Integers
    slots: Integers
    queries: BlockQueries | None = None


def remote(sharding: Sharding, rank: int, wanted: Iterable[tuple[Crossing, Sequence[range]]]) -> Remote:
    """Plan the attention over received rows of some crossing segments, arranged in one key tensor.

    Each group of the plan reads a contiguous run of rows of that tensor.

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
        runs: dict[tuple[Rows, Band], list[Integers]] = {}  # join parts that the same queries see whole
        for part in parts:
            found = visible(as_rows(crossing.own, lower), as_rows(part, lower), crossing.band)
            if found:
                queries, seen, band = found
                runs.setdefault((queries, band), []).append(_numbers(_tokens(seen, lower)))

        for (queries, (low, high)), found_tokens in runs.items():
            tokens = np.concatenate(found_tokens)
            count = len(tokens)
            base = max(level[head] for head in crossing.heads)
            keys.append(cells(tokens, crossing.heads, heads_total))
            slots.append(cells(np.arange(base, base + count), crossing.heads, heads_total))
            for head, number, step in progressions(list(crossing.heads)):
                groups.append(StridedGroup(queries, Rows(base, count, 1, 1, count), head, number, step, low, high))
            for head in crossing.heads:
                level[head] = base + count

    empty = np.empty(0, dtype=np.int64)
    plan = Plan(upper - lower, heads_total, tuple(groups), covered=False, square=False)
    return Remote(plan, max(level), np.concatenate([empty, *keys]), np.concatenate([empty, *slots]))


def cells(rows: Integers, heads: Sequence[int] | Integers, num_heads: int) -> Integers:
    """Return row * num_heads + head for each of `rows` and each of `heads`, row by row."""
    return (rows[:, None] * num_heads + np.array(heads)).ravel()


def _tokens(rows: Rows, origin: int) -> range:
    start = rows.start + origin
    return range(start, start + rows.count * rows.stride, rows.stride)


def _numbers(tokens: range | Integers) -> Integers:
    if isinstance(tokens, range):
        return np.arange(tokens.start, tokens.stop, tokens.step)
    return tokens


def as_rows(tokens: range, origin: int) -> Rows:
    """Return these tokens, counted from `origin`, as one segment."""
    return Rows(tokens.start - origin, len(tokens) * tokens.step, 1, tokens.step, len(tokens))


def rank_groups(sharding: Sharding, rank: int) -> tuple[StridedGroup, ...]:
    """Return all groups that a rank computes, as if no block layout thinned them out."""
    whole = replace(sharding, layouts=())
    parts = remote(whole, rank, [(c, (c.before, c.after)) for c in crossings(whole, rank)])
    return local_plan(whole, rank).groups + parts.plan.groups


Share = tuple[range | Integers, tuple[int, ...]]
"""Tokens, a range with a step if dilated or with layouts an array, and the KV heads whose rows of these tokens move
between ranks."""


def keys_of(sharding: Sharding, shares: Iterable[Share]) -> Integers:
    """List the row keys of a union of shares: int64, ascending (hence grouped by owner), without repeats."""
    keys = [cells(_numbers(rows), heads, sharding.num_heads) for rows, heads in shares if len(rows)]
    return np.unique(np.concatenate(keys)) if keys else np.empty(0, dtype=np.int64)


def count_of(sharding: Sharding, shares: Iterable[Share], edges: Sequence[int]) -> Integers:
    """Count the rows of a union of shares with tokens in [edges[i], edges[i + 1]), for each i; without layouts it does
    not list them.

    A row of several shares counts once. Returns int64, one count fewer than `edges`.
    """
    tokens = np.array(edges)
    if sharding.layouts:
        return np.diff(np.searchsorted(keys_of(sharding, shares), tokens * sharding.num_heads))

    ranges = [(rows, heads) for rows, heads in shares if isinstance(rows, range)]
    counts = np.zeros(len(tokens) - 1, dtype=np.int64)
    columns = list(zip(*sharding.branches.offsets, strict=True))
    for column in dict.fromkeys(columns):  # heads with the same offsets in every branch have the same rows
        head = columns.index(column)
        of_head = [rows for rows, heads in ranges if head in heads]
        counts += columns.count(column) * count_union(of_head, tokens)
    return counts


def owner_splits(sharding: Sharding, keys: Integers) -> list[int]:
    """Return, for each rank, how many of the sorted row keys `keys` are in its shard."""
    edges = np.array(sharding.bounds) * sharding.num_heads
    return np.diff(np.searchsorted(keys, edges)).tolist()


def received(sharding: Sharding, rank: int) -> list[Share]:
    """Return the rows that a rank receives."""
    shares: list[Share] = []
    for crossing in crossings(sharding, rank):
        shares.append((crossing.before, crossing.heads))
        shares.append((crossing.after, crossing.heads))
    return shares


def _asked(sharding: Sharding, rank: int, crossing: Crossing) -> tuple[list[range], Integers]:
    """Return, for each other rank, which of this rank's keys of a crossing segment (`shown`) its queries see.

    The result is a list of token ranges, and for each rank the index of its range in the list. Range 0 is empty: it is
    the range of ranks that see no row, and of this rank itself.
    """
    # the queries [start, stop) of each rank
    queries = crossing.queries
    bounds = np.array(sharding.bounds)
    start = np.maximum(bounds[:-1], queries.start)
    stop = np.minimum(bounds[1:], queries.stop)
    start += (queries.start - start) % queries.step

    # the rows [first, last) that these queries see
    rows = crossing.shown
    low, high = crossing.band
    far = sharding.seq_len  # a window may be longer than int64
    back = far if low is None else min(-low * rows.step, far)
    forth = far if high is None else min(high * rows.step, far)
    first = np.maximum((start - back - rows.start) // rows.step, 0)
    last = np.minimum(-((rows.start - stop - forth) // rows.step), len(rows))
    asks = (start < stop) & (first < last)
    asks[rank] = False

    # in rows, not in tokens: ranks that see the same rows get the same range
    base = len(rows) + 1
    pairs, numbers = np.unique(np.where(asks, first * base + last, 0), return_inverse=True)
    ranges = []
    for pair in pairs.tolist():
        begin, end = divmod(pair, base)
        ranges.append(rows[begin:end])
    return ranges, numbers


def sent(sharding: Sharding, rank: int) -> Iterator[tuple[Integers, list[Share]]]:
    """Yield (peers, shares): peers that see the same rows of this rank, and these rows."""
    found = crossings(sharding, rank)
    if not found:
        return
    asked = [_asked(sharding, rank, crossing) for crossing in found]
    numbers = np.stack([numbers for _, numbers in asked], 1)
    peers = np.flatnonzero(numbers.any(1))  # number 0 means no rows; the rank itself has it
    requests, kinds = np.unique(numbers[peers], axis=0, return_inverse=True)
    for kind, request in enumerate(requests.tolist()):
        shares: list[Share] = []
        for crossing, (ranges, _), number in zip(found, asked, request, strict=True):
            shares.append((ranges[number], crossing.heads))
        yield peers[kinds.ravel() == kind], shares


def messages(sharding: Sharding, shares: Iterable[tuple[Integers, list[Share]]]) -> tuple[Integers, list[int]]:
    """Return the row keys of what `sent` yields, ordered by peer and sorted for each peer, and their number by peer."""
    found = [np.empty(0, dtype=np.int64)] * sharding.world_size
    for peers, some in shares:
        keys = keys_of(sharding, some)
        for peer in peers.tolist():
            found[peer] = keys
    return np.concatenate(found), [len(keys) for keys in found]


def message_rows(sharding: Sharding, shares: Iterable[tuple[Integers, list[Share]]]) -> Integers:
    """Count the rows of what `sent` yields, by peer: int64, `(world_size,)`."""
    rows = np.zeros(sharding.world_size, dtype=np.int64)
    for peers, some in shares:
        rows[peers] = count_of(sharding, some, (0, sharding.seq_len))
    return rows


def contributed(sharding: Sharding, rank: int) -> Iterator[Share]:
    """Yield the rows of a rank that queries of other ranks see, for an all-gather."""
    lower, upper = sharding.shard(rank)
    for crossing in crossings(sharding, rank):
        for start, stop in ((0, lower), (upper, sharding.seq_len)):
            seen = _seen(clip(crossing.queries, start, stop), crossing.keys, crossing.band)
            yield clip(seen, lower, upper), crossing.heads


def _intersection(a: range, b: range) -> range:
    """Return the numbers common to two ranges."""
    common = gcd(a.step, b.step)
    if (b.start - a.start) % common:
        return a[:0]
    step = a.step // common
    ahead = b.step // common
    first = a.start + a.step * ((b.start - a.start) // common * pow(step, -1, ahead) % ahead)
    whole = step * b.step
    stop = min(a.stop, b.stop)
    return clip(range(first % whole, stop, whole), max(a.start, b.start), stop)


def _joined(parts: Iterable[range]) -> Iterator[range]:
    """Join ranges where possible, and yield fewer ranges with the same numbers.

    If all residue classes of a rate are present, and begin and end together, they become one range.
    """
    by_step: dict[int, list[range]] = {}
    for part in sorted({part for part in parts if part}, key=lambda part: part.start):
        by_step.setdefault(part.step, []).append(part)
    for step, same in by_step.items():
        while same:
            first = {part.start for part in same[:step]}
            last = {part[-1] for part in same[:step]}
            if _consecutive(first, step) and _consecutive(last, step):
                yield range(min(first), max(last) + 1)
                del same[:step]
            else:
                yield same.pop(0)


def _consecutive(numbers: set[int], count: int) -> bool:
    """Return whether the numbers are `count` integers in a row."""
    return len(numbers) == count and max(numbers) - min(numbers) + 1 == count


def count_union(parts: Iterable[range], edges: Integers) -> Integers:
    """Count how many numbers of a union of arithmetic progressions lie in [edges[i], edges[i + 1]), for each i."""
    terms: Counter[range] = Counter()  # how often each range counts, by inclusion and exclusion
    for part in _joined(parts):
        overlaps = [(_intersection(held, part), times) for held, times in terms.items() if times]
        terms[part] += 1
        for both, times in overlaps:
            terms[both] -= times

    total = np.zeros(len(edges) - 1, dtype=np.int64)
    for found, times in terms.items():
        if times and found:
            step = min(found.step, found[-1] - found[0] + 1)  # a longer one may exceed int64
            total += times * np.diff(np.clip(-((found.start - edges) // step), 0, len(found)))
    return total


def crosses(sharding: Sharding) -> bool:
    """Return whether any shard edge cuts a segment, so that a rank may see another's rows. The same on every rank."""
    for segment, edge in product(sharding.branches.segment_lengths, sharding.bounds[1:-1]):
        if _straddling(sharding, segment, edge) is not None:
            return True
    return False


def doubling_refusal(sharding: Sharding) -> str | None:
    """Return why recursive doubling cannot serve a sharding, or None if it can."""
    size = sharding.world_size
    shard = sharding.seq_len // size
    if size & (size - 1):
        return f"doubling needs a power of two of ranks; got {size}"
    if shard == 0 or any(edge != j * shard for j, edge in enumerate(sharding.bounds)):
        return f"doubling needs equal shards; {sharding.seq_len} tokens on {size} ranks are not"
    if sharding.samples is not None:
        return "doubling needs one segment grid; packed samples have one each"
    if sharding.branches.bands:
        return "doubling passes on all rows of a segment; windows need few of them"
    if sharding.layouts:
        return "doubling passes on all rows of a branch; block layouts need few of them"
    for segment in sharding.branches.segment_lengths:
        tokens = min(segment, sharding.seq_len)
        ratio = -(-tokens // shard)
        if shard % segment and (tokens != ratio * shard or ratio & (ratio - 1)):
            return f"doubling needs segments that divide the shard of {shard} tokens or are 2^i shards; got {segment}"
    return None


def _doubled_segment(sharding: Sharding, branch: int) -> int:
    return min(sharding.branches.segment_lengths[branch], sharding.seq_len)


def doubling_level(sharding: Sharding, branch: int) -> int:
    """Return the number of rounds of doubling after which a rank holds all rows of its segment in the branch.

    It is 0 if a segment is one shard, and -1 if it is shorter.
    """
    shard = sharding.seq_len // sharding.world_size
    return (_doubled_segment(sharding, branch) // shard).bit_length() - 1


def doubling_rounds(sharding: Sharding) -> int:
    """Return the number of rounds of doubling: log2 of the ratio of the longest segment to the shard, at least 0."""
    return max(0, *[doubling_level(sharding, branch) for branch in range(len(sharding.branches.offsets))])


def passed_on(sharding: Sharding, block: int, level: int) -> Iterator[Share]:
    """Yield the rows that the ranks of a block pass on in round `level` of doubling.

    The block has 2^level neighbouring ranks, and `block` is the first of them. They pass on the block's rows in each
    branch whose segments are longer than the block.
    """
    start = sharding.bounds[block]
    stop = sharding.bounds[block + (1 << level)]
    for branch, offsets in enumerate(sharding.branches.offsets):
        if doubling_level(sharding, branch) > level:
            segment = _doubled_segment(sharding, branch)
            rate = sharding.branches.dilation_rates[branch]
            for offset, heads in _classes(offsets).items():
                rows = range(start // segment * segment + offset, stop, rate)
                yield clip(rows, start, stop), heads
