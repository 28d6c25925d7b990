"""Plans: the closed-form groups of rows that a pattern means at one length.

A group is a family of equal strided blocks, so that a plan stays a few integers at any length. Plans are pure integers:
tables on a device are derived from them elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dilated_attention.cache import plan_cache

OffsetTable = tuple[tuple[int, ...], ...]
"""Branch x head: the offset of a head in a branch, or -1 where the head takes no part in the branch."""


class Branches(NamedTuple):
    """A dilated pattern in normal form: w and r of each branch, and the offset of each key-value head in it.

    compat: `"torchscale"` or None, as in `Dilated`.
    """

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    offsets: OffsetTable
    compat: str | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """The tokens start + i * segment + j * stride, for 0 <= i < segments and 0 <= j < count."""

    start: int
    segment: int
    segments: int
    stride: int
    count: int


@dataclass(frozen=True, slots=True)
class StridedGroup:
    """Independent attention problems of one shape: one per segment and per head.

    In segment i, for the key-value heads head + m * head_stride with 0 <= m < heads, the query rows of segment i see
    the key rows of segment i.

    Attributes:
        diagonal: the causal mask, where the call asks for one, applies inside the group, by position in it. False:
            every key is seen even when causal (keys that lie before all queries).
        first: no earlier group of the plan holds any of these (query row, head): the result is written, not merged.
        phantoms: zero keys (score 0, value 0) that each query sees besides, when not causal; see compat="torchscale".
    """

    queries: Rows
    keys: Rows
    head: int
    heads: int
    head_stride: int
    diagonal: bool = True
    first: bool = False
    phantoms: int = 0

    def entries(self, is_causal: bool) -> int:
        """Score entries that the group computes for one query head per key-value head."""
        rows, keys = self.queries.count, self.keys.count
        per_segment = rows * (rows + 1) // 2 if is_causal and self.diagonal else rows * keys
        return self.heads * self.queries.segments * per_segment


Part = tuple[Rows, Sequence[tuple[Rows, bool]], int]
"""Queries; the rows of keys that they see, a group each, with `diagonal`; `phantoms`."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one pattern means at one length.

    Attributes:
        covered: the groups marked `first` hold every (row, head), so that nothing needs to be initialised.
        square: in every group the queries are the keys (self-attention on one device).
    """

    seq_len: int
    num_heads: int
    groups: tuple[StridedGroup, ...]
    covered: bool
    square: bool

    @property
    def nbytes(self) -> int:
        """Size charged to the cache, in bytes: an upper estimate of the Python objects."""
        return 256 + 512 * len(self.groups)


def progressions(heads: list[int]) -> Iterator[tuple[int, int, int]]:
    """Cut an ascending list into arithmetic progressions (first, count, step), greedily."""
    i = 0
    while i < len(heads):
        step = heads[i + 1] - heads[i] if i + 1 < len(heads) else 1
        count = 1
        while i + count < len(heads) and heads[i + count] - heads[i + count - 1] == step:
            count += 1
        yield heads[i], count, step
        i += count


class Spans(NamedTuple):
    """The segments of a grid that have tokens in [lower, upper), in equal runs.

    Attributes:
        segment: w', at most the length of the grid.
        runs: of each run the first segment's [start, stop), the number of segments, and whether it reaches beyond
            [lower, upper).
    """

    segment: int
    lower: int
    upper: int
    runs: tuple[tuple[int, int, int, bool], ...]


def spans(segment: int, grid: tuple[int, int], tokens: tuple[int, int]) -> Spans:
    """The segments of w tokens, counted from the start of `grid` [start, stop), that have some of `tokens`."""
    begin, end = grid
    lower, upper = max(tokens[0], begin), min(tokens[1], end)
    if lower >= upper:
        return Spans(segment, lower, upper, ())
    segment = min(segment, end - begin)
    whole = lower + (begin - lower) % segment  # the first segment that starts at `lower` or later
    number = max(upper - whole, 0) // segment
    tail = whole + number * segment
    runs = []
    for start, segments in ((whole - segment, int(lower < whole)), (whole, number), (tail, int(tail < upper))):
        if segments:
            stop = min(start + segment, end)
            runs.append((start, stop, segments, start < lower or upper < stop))
    return Spans(segment, lower, upper, tuple(runs))


def rows_of(spans: Spans, rate: int, offset: int) -> list[tuple[Rows, int, int, bool]]:
    """The rows of some tokens that take part in a branch, in equal runs.

    Returns:
        Of each run: rows; how many rows of the same segment lie before them; how many fewer than ceil(w' / r) the whole
        segment has; whether the segment reaches beyond the tokens.
    """
    segment, lower, upper, runs = spans
    found = []
    for start, stop, segments, beyond in runs:
        first = start + offset
        earlier = -((first - lower) // rate) if first < lower else 0
        count = -((first - (stop if stop < upper else upper)) // rate) - earlier
        if count > 0:
            rows = Rows(first + earlier * rate, segment, segments, rate, count)
            found.append((rows, earlier, (first - stop) // rate - -segment // rate, beyond))
    return found


def compile_groups(
    dilation_rates: Sequence[int], table: OffsetTable, parts: Callable[[int, int], Iterable[Part]]
) -> tuple[tuple[StridedGroup, ...], bool]:
    """The groups of a plan, and whether those marked `first` hold every (row, head).

    The densest branch goes first: it writes the running output that the others are merged into.

    Args:
        parts: what the heads of a (branch, offset) compute.
    """
    groups: list[StridedGroup] = []
    begun: set[int] = set()  # heads that an earlier branch has written
    covered: set[int] = set()  # heads whose every row the first branch has written
    for branch in sorted(range(len(table)), key=lambda b: dilation_rates[b]):
        classes: dict[tuple[int, bool], list[int]] = {}
        for head, offset in enumerate(table[branch]):
            if offset >= 0:
                classes.setdefault((offset, head not in begun), []).append(head)
        for (offset, first), heads in classes.items():
            members = list(progressions(heads)) if len(heads) > 1 else [(heads[0], 1, 1)]
            for queries, keys, phantoms in parts(branch, offset):
                for head, number, step in members:
                    writes = first
                    for rows, diagonal in keys:
                        groups.append(StridedGroup(queries, rows, head, number, step, diagonal, writes, phantoms))
                        writes = False
            if first:
                begun.update(heads)
                if dilation_rates[branch] == 1:
                    covered.update(heads)
    return tuple(groups), len(covered) == len(table[0])


def _compile(
    segment_lengths: tuple[int, ...],
    dilation_rates: tuple[int, ...],
    table: OffsetTable,
    seq_len: int,
    start: int,
    compat: str | None,
) -> Plan:
    """The plan of the queries from token `start` on; `start` > 0 is for causal calls."""

    cuts = [spans(segment, (0, seq_len), (start, seq_len)) for segment in segment_lengths]

    def parts(branch: int, offset: int) -> Iterable[Part]:
        found = rows_of(cuts[branch], dilation_rates[branch], offset)
        if start:
            return queries_from_start(found, dilation_rates[branch])
        return [(own, [(own, True)], short if compat == "torchscale" else 0) for own, _, short, _ in found]

    def queries_from_start(found: list[tuple[Rows, int, int, bool]], rate: int) -> Iterator[Part]:
        for own, earlier, _, _ in found:
            keys, queries = [(own, True)], replace(own, start=own.start - start)
            if own.count == 1:
                keys = [(replace(own, start=own.start - earlier * rate, count=earlier + 1), False)]
            elif earlier:
                keys = [(replace(own, start=own.start - earlier * rate, count=earlier), False), (own, True)]
            yield queries, keys, 0

    groups, covered = compile_groups(dilation_rates, table, parts)
    return Plan(seq_len - start, len(table[0]), groups, covered or start == seq_len, square=start == 0)


def plan_dilated(
    segment_lengths: tuple[int, ...],
    dilation_rates: tuple[int, ...],
    table: OffsetTable,
    seq_len: int,
    compat: str | None = None,
) -> Plan:
    """The plan of a dilated pattern in normal form, from the cache.

    Args:
        table: branch x key-value head, as `Dilated.offset_table` gives it.
        compat: `"torchscale"` adds the zero keys of released checkpoints: each group counts ceil(w' / r) keys a
            segment, w' = min(w, seq_len), however many of them are real.
    """
    key = ("dilated", segment_lengths, dilation_rates, table, seq_len, compat)
    return plan_cache.get(key, lambda: _compile(segment_lengths, dilation_rates, table, seq_len, 0, compat))


def plan_suffix(
    segment_lengths: tuple[int, ...], dilation_rates: tuple[int, ...], table: OffsetTable, seq_len: int, start: int
) -> Plan:
    """The causal plan of the queries from token `start` on, over the keys of all `seq_len` tokens.

    Query rows are numbered from `start`, key rows from 0. A segment that `start` cuts is two groups: the keys before
    `start`, which every query sees, and those of the queries themselves. Not kept: each step of a generation has its
    own.
    """
    return _compile(segment_lengths, dilation_rates, table, seq_len, start, None)


def row_counts(
    segment_lengths: tuple[int, ...], dilation_rates: tuple[int, ...], table: OffsetTable, seq_len: int
) -> set[int]:
    """How many tokens take part in a segment, of all segments, branches and heads: without plan or cache, whose lock
    `torch.compile` cannot trace."""
    counts = set()
    for segment, rate, offsets in zip(segment_lengths, dilation_rates, table, strict=True):
        segment = max(1, min(segment, seq_len))
        lengths = {segment, seq_len % segment} if seq_len else set()
        counts |= {-(-(length - offset) // rate) for length in lengths for offset in offsets if 0 <= offset < length}
    return counts
