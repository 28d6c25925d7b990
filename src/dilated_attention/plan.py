"""Compile a pattern into a plan: the groups of rows that the pattern consists of at one sequence length.

A group is a set of attention problems of one shape at equal distances, so a plan is a few integers at any length. Plans
hold nothing else: tables on a device are derived from them elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from dilated_attention.cache import plan_cache

OffsetTable = tuple[tuple[int, ...], ...]
"""The offset of each head in each branch (branch x head), -1 where the head takes no part in the branch, or `ALL`."""

Band = tuple[int | None, int | None]
"""(low, high): query row i sees key row j iff low <= j - i <= high; None means no bound."""
EVERY: Band = (None, None)


class Branches(NamedTuple):
    """Hold a pattern in normal form: length w and rate r of each branch, and the offset of each KV head in the branch.

    Attributes:
        offsets: by branch, then KV head, as in `OffsetTable`.
        bands: (low, high) for each branch with rate r: a query at position p sees only the keys of its segment at
            p + i * r for low <= i <= high, where None means no bound; empty: no bounds.
        leading: for each branch, the number of first tokens that all tokens see and that see all tokens, besides what
            the band shows; empty: no leading tokens.
    """

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    offsets: OffsetTable
    compat: str | None = None
    bands: tuple[Band, ...] = ()
    leading: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Rows:
    """Describe the tokens start + i * segment + j * stride, for 0 <= i < segments and 0 <= j < count."""

    start: int
    segment: int
    segments: int
    stride: int
    count: int

    def shifted(self, tokens: int) -> Rows:
        """Return the rows that lie `tokens` further on."""
        return Rows(self.start + tokens, self.segment, self.segments, self.stride, self.count)


class StridedGroup(NamedTuple):
    """Describe independent attention problems of one shape: one per segment and per head.

    In segment i, for the KV heads head + m * head_stride with 0 <= m < heads, query row a of the segment sees key row b
    of the segment iff low <= b - a <= high.

    Attributes:
        low, high: the band; None: no bound. A causal group has high = 0 where its queries are its keys.
        first: no earlier group of the plan holds any of these (query row, head): the result is written, not merged.
        phantoms: zero keys (score 0, value 0) that each query also sees, when not causal; see compat="torchscale".
        at: with a block layout, the first query's row and the first key's column of it.
        tokens: how many tokens take part in the segment; 0: as many as the group has keys.
    """

    queries: Rows
    keys: Rows
    head: int
    heads: int
    head_stride: int
    low: int | None = None
    high: int | None = None
    first: bool = False
    phantoms: int = 0
    at: tuple[int, int] = (0, 0)
    tokens: int = 0

    @property
    def listed(self) -> int:
        """Return the key of the group's layout in `Layouts`: the number of tokens that take part in the segment."""
        return self.tokens or self.keys.count

    @property
    def banded(self) -> bool:
        """Return whether some query does not see some key of the same segment."""
        return self.low is not None or self.high is not None

    def shifted(self, tokens: int, heads: int = 0) -> StridedGroup:
        """Return the group whose rows lie `tokens` further on, in KV heads that are `heads` further on."""
        queries = self.queries.shifted(tokens)
        keys = self.keys.shifted(tokens)
        return self._replace(queries=queries, keys=keys, head=self.head + heads)

    def runs(self, length: int) -> Iterator[StridedGroup]:
        """Yield this group in runs of at most `length` queries, each with the keys that some of its queries see."""
        for start in range(0, self.queries.count, length):
            run = slice_rows(self.queries, start, min(start + length, self.queries.count))
            found = trimmed(run, self.keys, moved((self.low, self.high), start))
            if found is not None:
                some, seen, (low, high) = found
                yield self._replace(queries=some, keys=seen, low=low, high=high)

    def entries(self) -> int:
        """Count the group's score entries in one sample, over all its KV heads, as if each had a single query head."""
        rows = self.queries.count
        keys = self.keys.count
        seen = rows * keys
        if self.high is not None:
            seen -= _above(rows, keys, self.high)
        if self.low is not None:
            seen -= _above(keys, rows, -self.low)
        return self.heads * self.queries.segments * seen


def _above(rows: int, columns: int, diagonal: int) -> int:
    """Count the entries (i, j) of a matrix that have j - i > diagonal."""

    def triangle(side: int) -> int:
        if side <= 0:
            return 0
        return side * (side + 1) // 2

    # Row i has side - i entries above, cut to [0, columns]. The last two terms subtract what exceeds `columns`.
    side = columns - 1 - diagonal
    return triangle(side) - triangle(side - rows) - triangle(-1 - diagonal) + triangle(-1 - diagonal - rows)


class Part(NamedTuple):
    """Describe what some query rows see of some key rows. It becomes a group for each progression of heads. `first`: no
    earlier part of the branch holds these queries. `at`, `tokens`: as in `StridedGroup`."""

    queries: Rows
    keys: Rows
    band: Band
    phantoms: int = 0
    first: bool = True
    at: tuple[int, int] = (0, 0)
    tokens: int = 0


class Sizes(NamedTuple):
    """Count the query rows, the key rows that are read, and the score entries (`StridedGroup.entries`) of a plan."""

    queries: int
    keys: int
    entries: int


@dataclass(frozen=True, eq=False)
class Plan:
    """Hold the groups of one pattern at one sequence length. Plans are compared by identity, which is quick in a key.
    `covered`: those marked `first` hold every (row, head), so that out and lse need no initial values. `square`: in
    every group the queries are the keys."""

    seq_len: int
    num_heads: int
    groups: tuple[StridedGroup, ...]
    covered: bool
    square: bool

    @cached_property
    def sizes(self) -> Sizes:
        """Return what all groups hold in one sample."""
        queries = 0
        keys = 0
        entries = 0
        for group in self.groups:
            queries += group.heads * group.queries.segments * group.queries.count
            keys += group.heads * group.keys.segments * group.keys.count
            entries += group.entries()
        return Sizes(queries, keys, entries)

    @cached_property
    def banded(self) -> bool:
        """Return whether some group is causal or has another band."""
        return bool({(group.low, group.high) for group in self.groups} - {EVERY})

    @property
    def nbytes(self) -> int:
        """Return the size that the cache counts, in bytes: an upper estimate of the Python objects."""
        return 256 + 512 * len(self.groups)


def progressions(heads: list[int]) -> list[tuple[int, int, int]]:
    """Cut an ascending list into arithmetic progressions (first, count, step), greedily."""
    found = []
    i = 0
    while i < len(heads):
        step = 1
        if i + 1 < len(heads):
            step = heads[i + 1] - heads[i]
        count = 1
        while i + count < len(heads) and heads[i + count] - heads[i + count - 1] == step:
            count += 1
        found.append((heads[i], count, step))
        i += count
    return found


def compile_groups(
    branches: Branches, parts: Callable[[int, int], Iterable[Part]], seq_len: int
) -> tuple[tuple[StridedGroup, ...], bool]:
    """Return the groups of a plan of `seq_len` query rows, and whether those marked `first` hold every (row, head).

    The densest branch goes first: it writes the running output that the others are merged into. `parts(branch, offset)`
    returns the parts that the heads with this offset compute.
    """
    groups: list[StridedGroup] = []
    begun: set[int] = set()  # heads that an earlier branch has written
    covered: set[int] = set()  # heads whose every row the first branch has written
    table = branches.offsets
    for branch in sorted(range(len(table)), key=branches.dilation_rates.__getitem__):
        classes: dict[tuple[int, bool], list[int]] = {}
        for head, offset in enumerate(table[branch]):
            if offset != -1:
                classes.setdefault((offset, head not in begun), []).append(head)
        for (offset, first), heads in classes.items():
            members = progressions(heads)
            written = 0
            for queries, keys, band, phantoms, begins, at, tokens in parts(branch, offset):
                if begins:
                    written += queries.segments * queries.count
                writes = first and begins
                for head, number, step in members:
                    groups.append(StridedGroup(queries, keys, head, number, step, *band, writes, phantoms, at, tokens))
            if first:
                begun.update(heads)
                if written == seq_len:
                    covered.update(heads)
    return tuple(groups), len(covered) == len(table[0])


ALL = -2
"""An entry of an offset table: the head takes part in the branch with every residue. Each residue is attended
separately."""

WHOLE = 2**62
"""The segment length of a branch without segments: the whole sequence."""


def sights(
    branches: Branches, branch: int, offset: int, queries: tuple[int, int], keys: tuple[int, int], is_causal: bool,
    end: int | None = None,
) -> Iterator[Part]:  # fmt: skip
    """Yield what the queries at positions `queries` see of the keys at positions `keys`, both [start, stop).

    `branch` is the branch's number in `branches`, `offset` the offset of the heads in it, or `ALL`. The `start` of rows
    is a position here: with the common stride of both, a query at p sees the keys at p + i * stride for low <= i <=
    high. A part may be empty. `end` cuts the last segment; default: the last of these positions does.
    """
    leading = branches.leading[branch] if branches.leading else 0
    low, high = branches.bands[branch] if branches.bands else EVERY
    if leading:
        later = _interval(max(leading, queries[0]), queries[1])
        yield Part(later, _interval(keys[0], min(leading, keys[1])), EVERY)
        early = _interval(queries[0], min(leading, queries[1]))
        yield Part(early, _interval(*keys), (None, 0) if is_causal else EVERY)
    if is_causal and (high is None or high > 0):
        high = 0
    some_queries = (max(queries[0], leading), queries[1])
    some_keys = (max(keys[0], leading), keys[1])
    rate = branches.dilation_rates[branch]
    if end is None:
        end = max(queries[1], keys[1])
    segment = min(branches.segment_lengths[branch], end)
    for start, segments in _runs(segment, some_queries, some_keys):
        stop = min(start + segment, end)
        residues: Iterable[int] = (offset,)
        if offset == ALL:
            residues = range(min(rate, stop - start))
        for residue in residues:
            first = start + residue
            rows = _rows(first, rate, max(start, some_queries[0]), min(stop, some_queries[1]), segment, segments)
            columns = _rows(first, rate, max(start, some_keys[0]), min(stop, some_keys[1]), segment, segments)
            zeros = 0
            if branches.compat is not None and not is_causal:
                zeros = -(-segment // rate) - max(0, -(-(stop - start - residue) // rate))
            yield Part(rows, columns, (low, high), zeros)


def parts_of(
    branches: Branches, branch: int, offset: int, queries: tuple[int, int], keys: tuple[int, int], is_causal: bool,
    origins: tuple[int, int], listed: bool = False, end: int | None = None,
) -> Iterator[Part]:  # fmt: skip
    """Yield the parts of a plan in which some query sees some key. Arguments are as in `sights`. Parts number rows of q
    and of k from positions `origins`. `listed`: each segment has a block layout."""
    if end is None:
        end = max(queries[1], keys[1])
    first = not (branches.leading and branches.leading[branch])
    place: tuple[tuple[int, int], int] = ((0, 0), 0)
    for part in sights(branches, branch, offset, queries, keys, is_causal, end):
        found = visible(part.queries, part.keys, part.band)
        if found is not None:
            rows, columns, band = found
            if listed:
                place = _in_segment(branches, branch, rows, columns, end)
            yield Part(rows.shifted(-origins[0]), columns.shifted(-origins[1]), band, part.phantoms, first, *place)


def _in_segment(
    branches: Branches, branch: int, queries: Rows, keys: Rows, end: int
) -> tuple[tuple[int, int], int]:  # fmt: skip
    """Return `at` and `tokens` of a group with rows at these positions, all in one segment unless they are whole
    segments. `end` cuts the last segment."""
    length = branches.segment_lengths[branch]
    rate = branches.dilation_rates[branch]
    start = queries.start - queries.start % length
    offset = (queries.start - start) % rate
    tokens = -((start + offset - min(start + length, end)) // rate)
    return ((queries.start - start) // rate, (keys.start - start) // rate), tokens


def _compile(
    branches: Branches, queries: tuple[int, int], keys: tuple[int, int], is_causal: bool, listed: bool
) -> Plan:  # fmt: skip
    """Return the plan of the queries at positions [start, stop) over the keys at positions [start, stop)."""
    if queries == keys and queries[0] == 0 and not branches.bands and not listed:
        return _compile_square(branches, queries[1], is_causal)

    def parts(branch: int, offset: int) -> Iterator[Part]:
        return parts_of(branches, branch, offset, queries, keys, is_causal, (queries[0], keys[0]), listed)

    groups, covered = compile_groups(branches, parts, queries[1] - queries[0])
    square = queries == keys and not listed and all(group.queries == group.keys for group in groups)
    return Plan(queries[1] - queries[0], len(branches.offsets[0]), groups, covered, square)


def _compile_square(branches: Branches, seq_len: int, is_causal: bool) -> Plan:
    """Return the plan of self-attention over segments. This takes a tenth of the time of the general `_compile`."""
    counts_zeros = branches.compat is not None and not is_causal

    def parts(branch: int, offset: int) -> list[Part]:
        rate = branches.dilation_rates[branch]
        segment = max(1, min(branches.segment_lengths[branch], seq_len))
        whole = seq_len // segment
        found = []
        for start, length, segments in ((0, segment, whole), (whole * segment, seq_len % segment, 1)):
            count = -((offset - length) // rate)
            if segments and count > 0:
                rows = Rows(start + offset, segment, segments, rate, count)
                band: Band = EVERY
                if is_causal and count > 1:
                    band = (None, 0)
                zeros = -(-segment // rate) - count
                found.append(Part(rows, rows, band, zeros if counts_zeros else 0))
        return found

    groups, covered = compile_groups(branches, parts, seq_len)
    return Plan(seq_len, len(branches.offsets[0]), groups, covered or not seq_len, square=True)


def _runs(segment: int, queries: tuple[int, int], keys: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yield the segments that have both queries and keys, as (position of the first token, number of segments). Those
    that lie wholly in both form one run; others, at most the first and the last, come alone."""
    lower = max(queries[0], keys[0])
    upper = min(queries[1], keys[1])
    if queries[0] >= queries[1] or keys[0] >= keys[1]:
        return
    first = max(queries[0] // segment, keys[0] // segment)
    last = min((queries[1] - 1) // segment, (keys[1] - 1) // segment)
    whole = range(max(first, -(-lower // segment)), max(min(last + 1, upper // segment), 0))
    if not whole:
        whole = range(last + 1, last + 1)
    for number in range(first, whole.start):
        yield number * segment, 1
    if whole:
        yield whole.start * segment, len(whole)
    for number in range(whole.stop, last + 1):
        yield number * segment, 1


def _rows(first: int, stride: int, lower: int, upper: int, segment: int, segments: int) -> Rows:
    """Return the positions first, first + stride, ... in [lower, upper) as rows, and the same rows in each of
    `segments` segments, which are `segment` tokens apart."""
    begin = first + max(0, -((first - lower) // stride)) * stride
    return Rows(begin, segment, segments, stride, max(0, -((begin - upper) // stride)))


def _interval(start: int, stop: int) -> Rows:
    return _rows(start, 1, start, stop, WHOLE, 1)


def visible(queries: Rows, keys: Rows, band: Band) -> tuple[Rows, Rows, Band] | None:
    """Return the queries that see a key, the keys that some query sees, and the band in rows of these; None if no query
    sees a key. `band` counts strides between positions, as in `sights`."""
    if queries.count <= 0 or keys.count <= 0:
        return None
    shift = (keys.start - queries.start) // queries.stride
    return trimmed(queries, keys, moved(band, -shift))


def moved(band: Band, by: int) -> Band:
    low, high = band
    if low is not None:
        low += by
    if high is not None:
        high += by
    return low, high


def trimmed(rows: Rows, columns: Rows, band: Band) -> tuple[Rows, Rows, Band] | None:
    """Return the rows (queries) that see a column (key), the columns that some row sees, and the band between them;
    None if there are none. Row i sees column j iff low <= j - i <= high; the returned band counts from the first
    returned row and column, and its bounds that hide nothing are None."""
    low, high = band
    left = 0
    right = columns.count
    if low is not None:
        left = max(left, low)
    if high is not None:
        right = min(right, high + rows.count)
    top = 0
    bottom = rows.count
    if high is not None:
        top = max(top, left - high)
    if low is not None:
        bottom = min(bottom, right - low)
    if left >= right or top >= bottom:
        return None

    rows = slice_rows(rows, top, bottom)
    columns = slice_rows(columns, left, right)
    low, high = moved(band, top - left)
    if low is not None and low <= 1 - rows.count:
        low = None
    if high is not None and high >= columns.count - 1:
        high = None
    return rows, columns, (low, high)


def slice_rows(rows: Rows, start: int, stop: int) -> Rows:
    return Rows(rows.start + start * rows.stride, rows.segment, rows.segments, rows.stride, stop - start)


def plan_of(
    branches: Branches, queries: tuple[int, int], keys: tuple[int, int] | None = None, is_causal: bool = False,
    listed: bool = False,
) -> Plan:  # fmt: skip
    """Return the plan of a pattern in normal form, from the cache.

    `queries`, `keys`: positions [start, stop) of the rows of q and of k, from which the plan numbers its rows; keys:
    the same as queries by default. With compat="torchscale" both must be the whole sequence. If the plan is not causal,
    keys and phantoms of a query then add up to ceil(w / r) per branch, where w is at most the sequence length.
    `listed`: the groups lie in block layouts (`StridedGroup.at`), which also say whether they are causal.
    """
    return plan_cache.of(_compile, branches, queries, keys or queries, is_causal, listed)


def plan_dilated(
    segment_lengths: tuple[int, ...],
    dilation_rates: tuple[int, ...],
    table: OffsetTable,
    seq_len: int,
    compat: str | None = None,
    *,
    is_causal: bool = False,
) -> Plan:
    """Return the plan of self-attention over a pattern with an offset `table` and `compat` of `Dilated`."""
    return plan_of(Branches(segment_lengths, dilation_rates, table, compat), (0, seq_len), None, is_causal)


def row_counts(branches: Branches, seq_len: int, within: tuple[int, int] | None = None) -> set[int]:
    """Return the distinct numbers of tokens that take part in a segment, over all segments, branches and heads.

    Heads with the offset `ALL` do not count. No plan is used: `torch.compile` cannot trace the lock of its cache.
    `within`: count only the segments with positions within[0] to within[1] - 1, and those between; default: all.
    """
    counts: set[int] = set()
    if not seq_len:
        return counts
    start, stop = within or (0, seq_len)
    for segment, rate, offsets in zip(*branches[:3], strict=True):
        segment = max(1, min(segment, seq_len))
        first = start - start % segment
        last = stop - 1 - (stop - 1) % segment
        lengths = set()
        if first <= last:
            lengths.add(min(segment, seq_len - last))
        if first < last:
            lengths.add(segment)
        for length in lengths:
            counts |= {-(-(length - offset) // rate) for offset in offsets if 0 <= offset < length}
    return counts
