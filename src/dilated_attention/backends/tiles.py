"""Turn a plan into tables of tiles. A table says, in plain integers, what each program of a kernel launch computes.
The cpu backend shares the tiles among threads (`backends/jobs.py`), the triton backend takes `tables` of them.

A table has one int32 line per tile, described in kernels/strided.py. A *tile* is a block of rows of one head that a
program holds; the line also lists the *spans*, the runs of rows that the tile sees. The *side* of a kernel says
whether tiles hold queries or keys. A *cell* is a run of rows of one head that all see the same spans; tables are made
by cutting cells into tiles. A *turn* is a list of groups that may run at the same time, because no two of them hold
the same row of the same head. NumPy handles all segments at once, so no tile is a Python object. This module also
makes the buffers for gradients that launches write.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from dilated_attention.backends.facts import Facts
from dilated_attention.backends.problem import Layouts
from dilated_attention.cache import lasting
from dilated_attention.errors import UnsupportedError
from dilated_attention.kernels.configurations import Shape, Side
from dilated_attention.layout import BlockLayout
from dilated_attention.plan import Plan, Rows, StridedGroup

T = TypeVar("T")

TILE_FIELDS = 9
SPAN_FIELDS = 5
HEAD, START, STRIDE, ROWS, FIRST, PHANTOMS, LIST, AHEAD, WITHIN = range(TILE_FIELDS)
STARTS = slice(TILE_FIELDS, None, SPAN_FIELDS)
STRIDES = slice(TILE_FIELDS + 1, None, SPAN_FIELDS)
COUNTS = slice(TILE_FIELDS + 2, None, SPAN_FIELDS)
EDGES = slice(TILE_FIELDS + 3, None, SPAN_FIELDS), slice(TILE_FIELDS + 4, None, SPAN_FIELDS)
UNMASKED = {"queries": (2**30, -(2**30)), "keys": (-(2**30), 2**30)}
"""The diagonals that hide nothing, for each side of tiles."""

MAX_HEAD_DIM = 256
MAX_TOKENS = 2**30
MAX_SPANS = 8
MAX_PERIOD = 512
MAX_EXTRA_STEPS = 1.05


def refusal(facts: Facts, most: int = MAX_HEAD_DIM) -> str | None:
    """Return why no kernel that reads these tables can serve a call; None if one can. `most`: its greatest head_dim."""
    if facts.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the kernels have no {facts.dtype}; use float32, bfloat16 or float16"
    if facts.head_dim > most:
        return f"the kernels need a head_dim of at most {most}; got {facts.head_dim}"
    if facts.seq_len > MAX_TOKENS:
        return f"the tables address {MAX_TOKENS} tokens; got {facts.seq_len}"
    return None


@dataclass(frozen=True, slots=True)
class Table:
    """Hold the tiles of one launch.

    Attributes:
        lines: int32 `(tiles, TILE_FIELDS + SPAN_FIELDS * spans)`, in the order in which they should run.
        count: the key of its layout in `Layouts`; None without layouts.
    """

    lines: Tensor
    spans: int
    count: int | None


@dataclass(frozen=True, slots=True)
class Described(Table):
    """Add to a table what a kernel that is compiled for it may leave out.

    Attributes:
        chain: whether some tile of queries continues results that an earlier launch wrote.
        is_causal, banded: whether a diagonal, `near` in kernels/strided.py, or also `far`, limits a span's rows.
        even: whether every tile is full: those of `lines`, and those that the loop streams.
        edge: which streamed tiles the kernel must mask. 0: none. -1: all. Without layouts, 1: those on a diagonal, and
            the partial last one of keys. With layouts, n > 0: those of the last n key blocks of each list, or of the
            first n query blocks if tiles hold keys; if some blocks have masks, those that the list says.
        reach: an upper bound for the tokens between the first and the last row of a tile that the loop streams. It
            decides whether memory offsets inside the tile need 64 bits.
        strides: the distinct strides of the tiles, and of the spans that they see; empty unless tiles hold queries and
            need no mask.
    """

    chain: bool
    is_causal: bool
    banded: bool
    even: bool
    edge: int
    reach: int
    strides: tuple[tuple[int, ...], tuple[int, ...]]
    phantoms: bool


def tables(
    plan: Plan, side: Side, shape: Shape, layouts: Layouts | None, device: torch.device
) -> list[Described]:  # fmt: skip
    """Return the tables of all launches of a plan for a GPU, in the order in which they run, for tiles of `shape`. With
    layouts, the launches compute only the blocks that the layouts list in each segment.

    Consecutive turns (see `turns`) become one launch where that adds hardly any loop steps, but with layouts, or if
    some group is causal or has another band.
    """
    launches = cells_of(plan, side, layouts)
    if layouts is not None:
        return [_block_table(x, side, shape, layouts[x.groups[0].listed], device) for x in launches]
    if not plan.banded:
        launches = _joined(launches, side, shape)
    return [_span_table(x, side, plan.banded, shape, device) for x in launches]


def _span_table(cells: Cells, side: Side, masked: bool, shape: Shape, device: torch.device) -> Described:
    lines = (heaviest_first if masked else by_head)(lines_of(cells.array, side, shape.own))
    even = not (lines[:, COUNTS] % shape.loop).any()
    # Queries past the end of a span need no mask: their p is 0.
    edge = int(masked or (side == "queries" and not even))
    return _described(lines, side, shape, None, masked, even, edge, device)


def _block_table(cells: Cells, side: Side, shape: Shape, layout: BlockLayout, device: torch.device) -> Described:
    own, loop = _held_first(side, layout.q_block, layout.k_block)
    lines = heaviest_first(lines_of(cells.array, side, shape.own))
    whole = not lines[:, AHEAD].any() and bool((lines[:, COUNTS] == layout.seq_len).all())

    even = loop % shape.loop == 0 and whole and layout.seq_len % loop == 0
    if side == "queries" and (loop % shape.loop or not whole):  # lists name keys outside the span
        edge = -1
    elif layout.kinds is not None:
        edge = 1
    elif layout.is_causal:  # the blocks that meet the tokens of the tile's own block, the partial last one among them
        nested = own % loop == 0 or loop % own == 0
        edge = max(1, own // loop) if nested else -(-(own - 1) // loop) + 1
    else:
        edge = int(side == "queries" and not even)
    return _described(lines, side, shape, cells.listed, layout.is_causal, even, edge, device)


def moved(table: Table, layout: BlockLayout, at: tuple[int, int], queries: int, keys: int) -> Tensor:
    """Return the lines of a table of queries in one query block for as many queries that begin at row at[0] of their
    layout, in one query block too, over `keys` keys from column at[1] on."""
    row, column = at
    moved = table.lines.clone()
    lines = moved.numpy()
    lines[:, LIST], lines[:, WITHIN] = divmod(row, layout.q_block)
    lines[:, AHEAD] = column
    if layout.is_causal:
        lines[:, EDGES[0]] = row - column
        keys = max(0, min(keys, row + queries - column))
    lines[:, COUNTS] = keys
    return moved


def _described(
    lines: np.ndarray, side: Side, shape: Shape, count: int | None, masked: bool, even: bool, edge: int,
    device: torch.device,
) -> Described:  # fmt: skip
    """Make a table from lines. `masked`: its `is_causal`. `even`: every tile that the loop streams is full."""
    used = lines[:, COUNTS] > 0
    banded = bool(((lines[:, EDGES[1]] != UNMASKED[side][1]) & used).any())
    even &= bool((lines[:, ROWS] == shape.own).all())
    reach = int(lines[:, STRIDES].max(initial=0)) * shape.loop
    chain = not lines[:, FIRST].all()
    phantoms = bool(lines[:, PHANTOMS].any())
    strides: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    if side == "queries" and even and not edge:
        strides = (_distinct(lines[:, STRIDE]), _distinct(lines[:, STRIDES][used]))
    return Described(
        _to(device, lines), spans_of(lines), count, chain, masked, banded, even, edge, reach, strides, phantoms
    )


def spans_of(lines: np.ndarray) -> int:
    return (lines.shape[1] - TILE_FIELDS) // SPAN_FIELDS


def _distinct(x: np.ndarray) -> tuple[int, ...]:
    """Return the distinct entries of x, non-negative integers, in ascending order."""
    if x.max(initial=0) < 2**16:  # counting is faster than sorting
        found = np.flatnonzero(np.bincount(x))
    else:
        found = np.unique(x)
    return tuple(found.tolist())


def int32(lines: np.ndarray) -> Tensor:
    """Return lines as a table. Raises UnsupportedError if a token's number does not fit 32 bits.

    The backend's `refusal` counts the tokens of one sample, but a packed batch has those of all samples.
    """
    if lines.max(initial=0) >= 2**31:
        raise UnsupportedError(f"the kernels' tables address 2^31 tokens of all samples; got token {lines.max()}")
    return torch.from_numpy(np.ascontiguousarray(lines, np.int32))


def _to(device: torch.device, lines: np.ndarray) -> Tensor:
    table = int32(lines)
    return lasting(lambda: table.to(device), device)


def longest(plan: Plan, side: Side, layouts: Layouts | None) -> tuple[int, int]:
    """Return two bounds for tile sizes: the most rows that a tile can hold, and the most that a loop step can visit."""
    queries = max([group.queries.count for group in plan.groups])
    keys = max([group.keys.count for group in plan.groups])
    if layouts is not None:
        queries = min(queries, max([layout.q_block for layout in layouts.values()]))
        keys = min(keys, max([layout.k_block for layout in layouts.values()]))
    return _held_first(side, queries, keys)


def concatenate(plans: Sequence[Plan], starts: Sequence[int], seq_len: int) -> Plan:
    """Return one plan over `seq_len` tokens for samples that begin at ascending `starts`, packed or in a padded batch
    that is viewed as one sample, so that a ragged batch is one call."""
    groups: list[StridedGroup] = []
    for plan, start in zip(plans, starts, strict=True):
        groups += [group.shifted(start) for group in plan.groups]
    return Plan(
        seq_len,
        max((plan.num_heads for plan in plans), default=0),
        tuple(groups),
        covered=sum(plan.seq_len for plan in plans) == seq_len and all(plan.covered for plan in plans),
        square=all(plan.square for plan in plans),
    )


def _held_first(side: Side, of_queries: T, of_keys: T) -> tuple[T, T]:
    """Return the two values, first the one of the rows that tiles hold, then the one of the rows that they see."""
    return (of_queries, of_keys) if side == "queries" else (of_keys, of_queries)


def _sides(group: StridedGroup, side: Side) -> tuple[Rows, Rows]:
    """Return the rows of a group that tiles hold, and the rows that they see."""
    return _held_first(side, group.queries, group.keys)


def _heads(group: StridedGroup) -> range:
    return range(group.head, group.head + group.heads * group.head_stride, group.head_stride)


# ---- which groups run together


def turns(groups: Iterable[StridedGroup], side: Side) -> list[int]:
    """Return the turn of each group. Groups that share a (row, head) which tiles hold have ascending turns.

    A group goes into the turn after the last one that touches its tokens in one of its heads. A group is assumed to
    touch everything from its first token to its last, except the residues of its stride that are not its own. This may
    give one turn too many, which only costs time.
    """
    found: list[int] = []
    # (head, stride) -> residue -> (low, high, greatest high so far, turn)
    touched: dict[tuple[int, int], dict[int, list[tuple[int, int, int, int]]]] = {}
    strides: dict[int, None] = {}  # in order
    for group in groups:
        rows = group.queries if side == "queries" else group.keys
        heads = _heads(group)
        low = rows.start
        high = low + (rows.segments - 1) * rows.segment + (rows.count - 1) * rows.stride + 1
        stride = rows.stride
        if rows.segments > 1 and rows.segment % stride:
            stride = 1
        residue = low % stride
        strides[stride] = None

        turn = 0
        for head, other_stride in product(heads, strides):
            by_residue = touched.get((head, other_stride), {})
            residues = [residue] if other_stride == stride else list(by_residue)
            for other_residue in residues:
                for other_low, other_high, reach, other in reversed(by_residue.get(other_residue, [])):
                    if reach <= low:
                        break
                    if other_low < high and low < other_high:
                        turn = max(turn, other + 1)
        for head in heads:
            intervals = touched.setdefault((head, stride), {}).setdefault(residue, [])
            furthest = max(high, intervals[-1][2]) if intervals else high
            intervals.append((low, high, furthest, turn))
        found.append(turn)
    return found


def launched(plan: Plan, side: Side, layouts: Layouts | None) -> list[list[StridedGroup]]:
    """Return the groups of each launch, in order. Without layouts, a launch is a turn. With layouts, a turn has one for
    each number of tokens in a segment, because each has its own layout."""
    launches: dict[tuple[int, int], list[StridedGroup]] = {}
    for group, turn in zip(plan.groups, turns(plan.groups, side), strict=True):
        fewer = 0 if layouts is None else -group.listed  # the most tokens come first
        launches.setdefault((turn, fewer), []).append(group)
    return [launches[key] for key in sorted(launches)]


class Cells(NamedTuple):
    """Hold the cells of one launch as an array, its groups, and the key of its layout in `Layouts`; None without."""

    array: np.ndarray
    groups: list[StridedGroup]
    listed: int | None = None


def cells_of(plan: Plan, side: Side, layouts: Layouts | None) -> list[Cells]:
    """Return the cells of each launch of a plan (`launched`): for each head one per segment, or with layouts one per
    block of it."""
    found = []
    for groups in launched(plan, side, layouts):
        listed = None
        if layouts is None:
            cells, group = _segment_cells(groups, side)
        else:
            listed = groups[0].listed
            cells, group = _block_cells(groups, side, layouts[listed])
        found.append(Cells(_for_heads(cells, group, groups), groups, listed))
    return found


def _joined(turns: Sequence[Cells], side: Side, shape: Shape) -> list[Cells]:
    """Join consecutive turns to one launch if the loops then take hardly more steps.

    Then branches share one softmax and the running state stays in registers. This pays if the residue classes of the
    sparsest branch (rate r) fill tiles of `shape.own` rows inside the segments (length w) of the densest: w >= own · r.
    Callers do not join causal turns: a tile of a sparse class spans so much of a dense segment that up to half of its
    scores would lie above the diagonal.
    """
    launches: list[Cells] = []
    before = 0  # the steps of the turns that are joined in the last launch
    for turn in turns:
        steps = _steps(turn.array, shape)
        if launches:
            groups = [*launches[-1].groups, *turn.groups]
            union = _union(groups, side)
            if union is not None and _steps(union, shape) <= MAX_EXTRA_STEPS * (before + steps):
                launches[-1] = Cells(union, groups)
                before += steps
                continue
        launches.append(turn)
        before = steps
    return launches


def _steps(cells: np.ndarray, shape: Shape) -> int:
    """Return how many loop steps cells take if they are cut into tiles of this shape."""
    tiles = -(-cells[:, ROWS] // shape.own)
    steps_of_a_tile = (-(-cells[:, COUNTS] // shape.loop)).sum(1)
    return int((tiles * steps_of_a_tile).sum())


# ---- cells


def _segment_cells(groups: Sequence[StridedGroup], side: Side) -> tuple[np.ndarray, np.ndarray]:
    """Return one cell per segment of each group, for its first head, and the number of the cell's group. A cell has the
    rows that tiles hold, and one span, the rows that they see."""
    first = []
    segments = []
    steps = []
    for group in groups:
        near, far = UNMASKED[side]
        if side == "queries":
            own = group.queries
            loop = group.keys
            _, ahead = group.at
            sign = 1
        else:
            own = group.keys
            loop = group.queries
            ahead, _ = group.at
            sign = -1  # key i is seen by query j iff -high <= j - i <= -low
        if group.high is not None:
            near = sign * group.high
        if group.low is not None:
            far = sign * group.low
        tile = (group.head, own.start, own.stride, own.count, group.first, group.phantoms, 0, ahead, 0)
        first.append((*tile, loop.start, loop.stride, loop.count, near, far))
        segments.append(own.segments)
        steps.append((own.segment, loop.segment))

    number, segment = _runs(np.array(segments))
    cells = np.array(first, np.int64)[number]
    cells[:, [START, TILE_FIELDS]] += segment[:, None] * np.array(steps)[number]
    return cells, number


def _block_cells(
    groups: Sequence[StridedGroup], side: Side, layout: BlockLayout
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Return one cell per block of the layout inside each segment of each group, for its first head, and the number of
    the cell's group. LIST is the block's number, WITHIN the position of the cell's first row in it."""
    bounded = []
    places = []
    for group in groups:
        row, column = group.at
        # With the layout's own bound: no later key if it is causal.
        high = row - column if layout.is_causal else None
        bounded.append(group._replace(low=None, high=high))
        places.append(row if side == "queries" else column)
    cells, number = _segment_cells(bounded, side)
    size, _ = _held_first(side, layout.q_block, layout.k_block)
    ahead = np.array(places)[number]
    cell, block = _runs(-(-(ahead + cells[:, ROWS]) // size) - ahead // size)
    ahead = ahead[cell]
    block += ahead // size
    begin = np.maximum(block * size - ahead, 0)
    end = (block + 1) * size - ahead
    out = cells[cell]
    out[:, LIST] = block
    _advance(out, begin, end - begin, side)
    out[:, WITHIN] = begin + ahead - block * size
    return out, number[cell]


def _for_heads(cells: np.ndarray, number: np.ndarray, groups: Sequence[StridedGroup]) -> np.ndarray:
    """Return each cell, of the group with this `number`, once for each of the group's heads."""
    heads = np.array([(group.heads, group.head_stride) for group in groups])[number]
    cell, head = _runs(heads[:, 0])
    out = cells[cell]
    out[:, HEAD] += head * heads[cell, 1]
    return out


def _runs(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For elements that lie in consecutive runs of these lengths, return each element's run, and its position there."""
    run = np.repeat(np.arange(len(lengths)), lengths)
    return run, np.arange(len(run)) - (np.cumsum(lengths) - lengths)[run]


def _advance(lines: np.ndarray, begin: np.ndarray, size: np.ndarray | int, side: Side) -> None:
    """Replace each line i (a cell or tile), in place, by its rows from begin[i] on, at most `size` of them.

    The diagonals of its spans count from its first row, so they move along, except those that hide nothing (UNMASKED).
    """
    for edges, unmasked in zip(EDGES, UNMASKED[side], strict=True):
        masked = (lines[:, edges] != unmasked) & (lines[:, COUNTS] > 0)
        lines[:, edges] += masked * begin[:, None]
    lines[:, START] += begin * lines[:, STRIDE]
    lines[:, WITHIN] += begin
    lines[:, ROWS] = np.minimum(size, lines[:, ROWS] - begin)


def _union(groups: Sequence[StridedGroup], side: Side) -> np.ndarray | None:
    """Return the cells of one launch that computes all these groups, even if they are of several turns; None if a tile
    would see more than MAX_SPANS spans, or if the least common multiple of the groups' strides exceeds MAX_PERIOD."""
    held: dict[int, list[StridedGroup]] = {}
    for group in groups:
        for head in _heads(group):
            held.setdefault(head, []).append(group)
    alike: dict[tuple[int, ...], list[int]] = {}
    for head, its_groups in held.items():
        alike.setdefault(tuple(map(id, its_groups)), []).append(head)

    parts = []
    for heads in alike.values():
        its_groups = held[heads[0]]
        if math.lcm(*(_sides(group, side)[0].stride for group in its_groups)) > MAX_PERIOD:
            return None
        cells = _union_cells(its_groups, side)
        if cells.shape[1] > TILE_FIELDS + SPAN_FIELDS * MAX_SPANS:
            return None
        part = np.repeat(cells, len(heads), axis=0)
        part[:, HEAD] = np.tile(heads, len(cells))
        parts.append(part)
    columns = max([part.shape[1] for part in parts])
    return np.concatenate([np.pad(part, ((0, 0), (0, columns - part.shape[1]))) for part in parts])


def _union_cells(groups: Sequence[StridedGroup], side: Side) -> np.ndarray:
    """Cut the rows that `groups` hold into cells, so that all rows of a cell see the same spans.

    The groups belong to one head and have no masks.

    Consider the tokens with one residue modulo the least common multiple of all strides. Inside a segment of a
    group, either all of these tokens belong to the group or none does. So what a token sees changes only at the ends of
    segments, and these ends cut the tokens into cells.
    """
    period = math.lcm(*(_sides(group, side)[0].stride for group in groups))
    segments, _ = _segment_cells(groups, side)
    segment, step = _runs(period // segments[:, STRIDE])  # one entry per segment and residue class of its rows
    start = segments[segment, START]
    stride = segments[segment, STRIDE]
    behind = start + (segments[segment, ROWS] - 1) * stride + 1
    residue = (start + step * stride) % period

    # Row residue + number * period gets the code residue * beyond + number, so that classes follow one another.
    begin = -((residue - start) // period)
    end = -((residue - behind) // period)
    beyond = int(end.max()) + 1
    begin += residue * beyond
    end += residue * beyond
    cuts = np.unique(np.concatenate([begin, end]))

    # Each entry is a span of every cell between its first and its last cut; sort these pairs by cell.
    first = np.searchsorted(cuts, begin)
    entry, cell = _runs(np.searchsorted(cuts, end) - first)
    cell += first[entry]
    order = np.argsort(cell, kind="stable")
    cell = cell[order]
    segment = segment[entry[order]]
    spans = np.bincount(cell, minlength=len(cuts) - 1)
    _, place = _runs(spans)

    cells = np.zeros((len(spans), TILE_FIELDS + SPAN_FIELDS * int(spans.max())), np.int64)
    residue, number = np.divmod(cuts[:-1], beyond)
    cells[:, START] = residue + number * period
    cells[:, STRIDE] = period
    cells[:, ROWS] = np.diff(cuts)
    np.maximum.at(cells[:, FIRST], cell, segments[segment, FIRST])
    np.add.at(cells[:, PHANTOMS], cell, segments[segment, PHANTOMS])
    for field in range(SPAN_FIELDS):
        cells[cell, TILE_FIELDS + SPAN_FIELDS * place + field] = segments[segment, TILE_FIELDS + field]
    return cells[spans > 0]


# ---- lines


def lines_of(cells: np.ndarray, side: Side, own: int) -> np.ndarray:
    """Return one line per tile: the cells cut into tiles of `own` rows. Tiles of one cell are neighbours, because their
    loops read the same rows. In a causal cell the tiles with the most work come first."""
    if cells[:, ROWS].max(initial=0) <= own:
        return cells
    tiles = -(-cells[:, ROWS] // own)
    cell, tile = _runs(tiles)
    if side == "queries":
        tile = tiles[cell] - 1 - tile
    lines = cells[cell]
    _advance(lines, tile * own, own, side)
    return lines


def heaviest_first(lines: np.ndarray) -> np.ndarray:
    """Return the lines sorted by the number of rows in a tile's spans, most first, so that no long tile runs last."""
    return lines[np.argsort(-lines[:, COUNTS].sum(1), kind="stable")]


def by_head(lines: np.ndarray) -> np.ndarray:
    """Return the lines sorted by head, then by stretch of tokens, then by the rows in their spans, most first.

    Stretches cut the sequence into equal parts, as long as the longest span is from its first to its last token.
    Programs that run at the same time then see the same rows, which stay in the L2 cache.
    """
    longest = max(1, int((lines[:, STRIDES] * lines[:, COUNTS]).max(initial=0)))
    stretch = lines[:, START] // longest
    return lines[np.lexsort((-lines[:, COUNTS].sum(1), stretch, lines[:, HEAD]))]


def gradient(x: Tensor, add: bool, covered: bool) -> Tensor:
    """Return a buffer for the gradient of x: zeros in float32 if launches `add` to it; otherwise in x's dtype, filled
    with zeros unless the launches write all rows (`covered`)."""
    if add:
        return x.new_zeros(x.shape, dtype=torch.float32)
    if not covered:
        return x.new_zeros(x.shape)
    return x.new_empty(x.shape)
