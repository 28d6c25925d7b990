"""Plans: the closed-form groups of rows that a pattern means at one length.

A group is a family of equal strided blocks, so that a plan stays a few integers at any length. Plans are pure integers:
tables on a device are derived from them elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dilated_attention.cache import plan_cache

OffsetTable = tuple[tuple[int, ...], ...]
"""Branch x head: the offset of a head in a branch, or -1 where the head takes no part in the branch."""


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


def _compile_dilated(
    segment_lengths: tuple[int, ...],
    dilation_rates: tuple[int, ...],
    table: OffsetTable,
    seq_len: int,
    compat: str | None,
) -> Plan:
    num_heads = len(table[0])
    if seq_len == 0:
        return Plan(0, num_heads, (), covered=True, square=True)
    groups: list[StridedGroup] = []
    begun: set[int] = set()  # heads that an earlier branch has written
    covered: set[int] = set()  # heads whose every row the first branch has written
    # The densest branch goes first: it writes the running output that the others are merged into.
    for branch in sorted(range(len(table)), key=lambda b: dilation_rates[b]):
        rate, offsets = dilation_rates[branch], table[branch]
        segment = min(segment_lengths[branch], seq_len)
        classes: dict[tuple[int, bool], list[int]] = {}
        for head, offset in enumerate(offsets):
            if 0 <= offset < segment:
                classes.setdefault((offset, head not in begun), []).append(head)
        for (offset, first), heads in classes.items():
            full, tail = divmod(seq_len, segment)
            spans = [(offset, full, segment), (full * segment + offset, 1, tail)]
            for start, segments, length in spans:
                count = -(-(length - offset) // rate)
                if count <= 0:
                    continue
                rows = Rows(start, segment, segments, rate, count)
                phantoms = -(-segment // rate) - count if compat == "torchscale" else 0
                for head, number, step in progressions(heads):
                    groups.append(StridedGroup(rows, rows, head, number, step, True, first, phantoms))
        for head, offset in enumerate(offsets):
            if offset >= 0 and head not in begun:
                begun.add(head)
                if rate == 1:
                    covered.add(head)
    return Plan(seq_len, num_heads, tuple(groups), covered=len(covered) == num_heads, square=True)


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
    return plan_cache.get(key, lambda: _compile_dilated(segment_lengths, dilation_rates, table, seq_len, compat))


def plan_suffix(
    segment_lengths: tuple[int, ...], dilation_rates: tuple[int, ...], table: OffsetTable, seq_len: int, start: int
) -> Plan:
    """The causal plan of the queries from token `start` on, over the keys of all `seq_len` tokens.

    Query rows are numbered from `start`, key rows from 0. A segment that `start` cuts is two groups: the keys before
    `start`, which every query sees, and those of the queries themselves. Not kept: each step of a generation has its
    own.
    """
    num_heads = len(table[0])
    if start == seq_len:
        return Plan(0, num_heads, (), covered=True, square=False)
    groups: list[StridedGroup] = []
    begun: set[int] = set()
    covered: set[int] = set()
    for branch in sorted(range(len(table)), key=lambda b: dilation_rates[b]):
        rate, offsets = dilation_rates[branch], table[branch]
        segment = min(segment_lengths[branch], seq_len)
        cut, whole = start // segment * segment, -(-start // segment) * segment
        full, tail = divmod(max(seq_len - whole, 0), segment)
        spans = [(whole, full, segment), (whole + full * segment, 1, tail)]
        if cut < whole:
            spans.insert(0, (cut, 1, min(segment, seq_len - cut)))
        classes: dict[tuple[int, bool], list[int]] = {}
        for head, offset in enumerate(offsets):
            if 0 <= offset < segment:
                classes.setdefault((offset, head not in begun), []).append(head)
        for (offset, first), heads in classes.items():
            for begin, segments, length in spans:
                earlier = max(0, -(-(start - begin - offset) // rate))  # rows that take part before `start`
                count = -(-(length - offset) // rate) - earlier
                if count <= 0 or not segments:
                    continue
                own = Rows(begin + offset + earlier * rate, segment, segments, rate, count)
                queries = replace(own, start=own.start - start)
                before = Rows(begin + offset, segment, segments, rate, earlier)
                keys = [(before, False)] * (earlier > 0) + [(own, True)]
                if count == 1:
                    keys = [(replace(before, count=earlier + 1), False)]
                for head, number, step in progressions(heads):
                    for i, (rows, diagonal) in enumerate(keys):
                        groups.append(StridedGroup(queries, rows, head, number, step, diagonal, first and i == 0))
        for head, offset in enumerate(offsets):
            if offset >= 0 and head not in begun:
                begun.add(head)
                if rate == 1:
                    covered.add(head)
    return Plan(seq_len - start, num_heads, tuple(groups), covered=len(covered) == num_heads, square=False)


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
