"""Turn a neighborhood on a grid into block lists over its tokens, ordered by tiles.

Coordinates of an axis that are equal modulo its rate form a *class*; within it they are numbered 0, 1, .... A *tile* is
a small box of tokens of one class per axis. Tokens are ordered by class, then by tile, then inside the tile, so that a
block of the sequence is a tile; queries and keys may have tiles of different shapes. All axes are independent: the key
tiles that a query tile sees are a product of ranges, and the mask of a pair of tiles is a product of masks. Where a
class is no multiple of a tile, *rows* are added that are no tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Axis(NamedTuple):
    """Describe one axis of a neighborhood: its length in tokens, and `Neighborhood`'s arguments for it."""

    length: int
    window: int
    rate: int
    stride: int
    is_causal: bool
    shifted: bool

    @property
    def longest(self) -> int:
        """Return how many coordinates the first class has. No class has more, and none two less."""
        return -(-self.length // self.rate)

    def ranges(self, size: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the first key that each query sees and the key after the last, as numbers in their class: int64
        `(rate, size)`. Both are 0 where a class has no such query. `size`: at least `longest`, the default."""
        count = -((np.arange(self.rate)[:, None] - self.length) // self.rate)  # coordinates in each class
        query = np.arange(self.longest if size is None else size)
        group = query // self.stride * self.stride
        if self.is_causal:
            leader = np.minimum(group + self.stride - 1, count - 1)
            start = np.maximum(leader - self.window + 1, 0)
            stop = np.broadcast_to(query + 1, start.shape)
        else:
            leader = np.minimum(group + self.stride // 2, count - 1)
            start = leader - self.window // 2
            if self.shifted:
                start = np.clip(start, 0, count - self.window)
            stop = np.minimum(start + self.window, count)
            start = np.maximum(start, 0)
        exists = query < count
        return np.where(exists, start, 0), np.where(exists, stop, 0)

    def coordinates(self, size: int) -> np.ndarray:
        """Return the coordinate of each number of each class, `(rate, size)`; -1 where the class has no such number."""
        found = np.arange(self.rate)[:, None] + np.arange(size) * self.rate
        return np.where(found < self.length, found, -1)

    def counts(self) -> np.ndarray:
        """Return the number of keys that the query at each coordinate sees, int64 `(length,)`."""
        start, stop = self.ranges()
        return (stop - start).T.reshape(-1)[: self.length]


class Tiles(NamedTuple):
    """Hold the shapes of tiles of queries and of keys, a side per axis."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]

    def rows(self, axes: Sequence[Axis]) -> list[int]:
        """Return the number of rows that each class gets along each axis, a multiple of both sides."""
        found = []
        for axis, *sides in zip(axes, *self, strict=True):
            unit = math.lcm(*sides)
            found.append(-(-axis.longest // unit) * unit)
        return found

    def before(self, leading: int) -> int:
        """Return the number of rows before the grid: those of the leading tokens, in whole blocks."""
        unit = math.lcm(math.prod(self.queries), math.prod(self.keys))
        return -(-leading // unit) * unit


QUERIES = {16: 62, 32: 44, 64: 34}
KEYS = {1: 120, 4: 107, 16: 60, 32: 48, 64: 46}
"""The sizes that tiles may have, and the time per computed pair that tiles of queries and of keys take: of two forward
passes and one backward, in float32, head_dim 64, on the C++ kernels with AVX-512 (docs/notebook.md)."""


def best_tiles(axes: Sequence[Axis]) -> Tiles:
    """Return the tiles with which attention over these axes takes the least time."""
    queries, query_times = _boxes(QUERIES, len(axes))
    keys, key_times = _boxes(KEYS, len(axes))
    times = query_times[:, None] + key_times
    for i, axis in enumerate(axes):
        # The pairs computed are a product over axes, too.
        query_sides, query_at = np.unique(queries[:, i], return_inverse=True)
        key_sides, key_at = np.unique(keys[:, i], return_inverse=True)
        pairs = [[_computed(axis, int(x), int(y)) for y in key_sides] for x in query_sides]
        times = times * np.array(pairs, float)[query_at][:, key_at]
    best_queries, best_keys = np.unravel_index(times.argmin(), times.shape)
    return Tiles(tuple(queries[best_queries].tolist()), tuple(keys[best_keys].tolist()))


def _boxes(time_of: dict[int, int], axes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return all boxes with sides that are powers of two and as many tokens as a key of `time_of`, `(boxes, axes)`, and
    the time of each."""
    sides = [2**i for i in range(max(time_of).bit_length())]
    boxes = [box for box in itertools.product(sides, repeat=axes) if math.prod(box) in time_of]
    return np.array(boxes), np.array([time_of[math.prod(box)] for box in boxes])


def _computed(axis: Axis, query_side: int, key_side: int) -> int:
    """Return how many pairs of rows lie in the pairs of tiles that some query and some key of one axis make needed."""
    (size,) = Tiles((query_side,), (key_side,)).rows([axis])
    _, counts = _tile_ranges(*axis.ranges(size), query_side, key_side)
    return int(counts.sum()) * query_side * key_side


def _tile_ranges(start: np.ndarray, stop: np.ndarray, query_side: int, key_side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first key tile that each query tile sees, and the number of key tiles that it sees."""
    start = start.reshape(-1, query_side)
    stop = stop.reshape(-1, query_side)
    first = np.where(start < stop, start, start.size).min(1) // key_side
    last = (stop.max(1) - 1) // key_side
    return first, np.maximum(last - first + 1, 0)


class Tables(NamedTuple):
    """Hold the lists of a block layout, and the tokens that its rows are.

    Attributes:
        queries, keys: the token of each row, int64 `(rows,)`; -1 for rows that were added.
        counts: the number of key blocks that each query block sees.
        indices: these key blocks, an ascending list for each query block.
        kinds: the mask of each of them, as a row of `bits`; -1 where all queries see all keys.
        bits: bool `(kinds, q_block, k_block)`.
    """

    queries: np.ndarray
    keys: np.ndarray
    counts: np.ndarray
    indices: np.ndarray
    kinds: np.ndarray
    bits: np.ndarray


def tables(axes: Sequence[Axis], leading: int, tiles: Tiles) -> Tables:
    """Return the lists of a neighborhood on a grid after `leading` tokens that see all and that all see."""
    sizes = tiles.rows(axes)
    queries = _order(axes, sizes, tiles.queries)
    keys = _order(axes, sizes, tiles.keys)
    row, index, number, masks = _product(axes, sizes, tiles)
    kinds, bits = _kinds(number, masks)
    if leading:
        before = tiles.before(leading)
        first = np.full(before, -1)
        first[:leading] = np.arange(leading)
        queries, keys = (np.concatenate([first, np.where(x < 0, -1, x + leading)]) for x in (queries, keys))
        q_block, k_block = bits.shape[1:]
        added = _leading_entries(queries.reshape(-1, q_block) >= 0, keys.reshape(-1, k_block) >= 0, leading)
        row = np.concatenate([added[0], row + before // q_block])
        index = np.concatenate([added[1], index + before // k_block])
        more, more_bits = _kinds(*added[2:])
        kinds = np.concatenate([more, np.where(kinds < 0, -1, kinds + len(more_bits))])
        bits = np.concatenate([more_bits, bits])
        by_row = np.argsort(row, kind="stable")
        row, index, kinds = (x[by_row] for x in (row, index, kinds))
    counts = np.bincount(row, minlength=len(queries) // bits.shape[1])
    return Tables(queries, keys, counts, index, kinds, bits)


def _order(axes: Sequence[Axis], sizes: Sequence[int], tile: Sequence[int]) -> np.ndarray:
    """Return the number in the grid of the token that each row is, -1 for rows that were added."""
    number = np.zeros((), np.int64)
    exists = np.ones((), bool)
    for axis, size, side in zip(axes, sizes, tile, strict=True):
        along = axis.coordinates(size).reshape(axis.rate, -1, side)
        number = np.add.outer(number * axis.length, along)
        exists = np.logical_and.outer(exists, along >= 0)
    dims = range(number.ndim)
    by_tile = [*dims[0::3], *dims[1::3], *dims[2::3]]  # the classes of all axes, the tiles, the places inside
    return np.where(exists, number, -1).transpose(by_tile).reshape(-1)


class _Lists(NamedTuple):
    """Hold which key tiles each query tile of one axis sees: `counts` for each (class, tile), and the numbers of these
    key tiles in their class. `masks[numbers]` are the pairs seen, `(query side, key side)`; number 0: all pairs."""

    counts: np.ndarray
    tiles: np.ndarray
    numbers: np.ndarray
    masks: np.ndarray


def _lists(axis: Axis, size: int, query_side: int, key_side: int) -> _Lists:
    start, stop = axis.ranges(size)
    first, counts = _tile_ranges(start, stop, query_side, key_side)
    tile, place = _expanded(counts)
    seen = first[tile] + place

    # Which keys of a tile each query sees: from low to high.
    origin = (seen * key_side)[:, None]
    low = np.clip(start.reshape(-1, query_side)[tile] - origin, 0, key_side)
    high = np.clip(stop.reshape(-1, query_side)[tile] - origin, 0, key_side)
    cut = (low > 0).any(1) | (high < key_side).any(1)
    key = np.arange(key_side)
    shown = (low[cut, :, None] <= key) & (key < high[cut, :, None])
    masks, numbers = _distinct(shown.reshape(-1, query_side * key_side))
    number = np.zeros(len(seen), np.int64)
    number[cut] = numbers
    return _Lists(counts, seen, number, masks.reshape(-1, query_side, key_side))


def _product(
    axes: Sequence[Axis], sizes: Sequence[int], tiles: Tiles
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]:
    """Return, for each entry of the grid's lists, its query block, its key block and the number of its mask, which has
    a digit for each axis; and the masks of each axis."""
    classes = [axis.rate for axis in axes]
    tiled = [size // side for size, side in zip(sizes, tiles.queries, strict=True)]
    at = np.indices((*classes, *tiled)).reshape(2, len(axes), -1)

    row = np.arange(at.shape[2])
    index = np.ravel_multi_index(tuple(at[0]), classes)
    number = np.zeros_like(row)
    masks = []
    for i, axis in enumerate(axes):
        found = _lists(axis, sizes[i], tiles.queries[i], tiles.keys[i])
        begin = np.cumsum(found.counts) - found.counts
        own = (at[0, i] * tiled[i] + at[1, i])[row]
        entry, place = _expanded(found.counts[own])
        listed = begin[own[entry]] + place
        row = row[entry]
        index = index[entry] * (sizes[i] // tiles.keys[i]) + found.tiles[listed]
        number = number[entry] * len(found.masks) + found.numbers[listed]
        masks.append(found.masks)
    return row, index, number, masks


def _leading_entries(
    queries: np.ndarray, keys: np.ndarray, leading: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]:
    """Return what `_product` does for the entries of leading queries and of leading keys. `queries` and `keys`: which
    rows of each block are tokens, `(blocks, rows)`."""
    first_queries = -(-leading // queries.shape[1])
    first_keys = -(-leading // keys.shape[1])
    some_query = np.asarray(queries.any(1))
    some_key = np.asarray(keys.any(1))
    row, index = (some_query[:first_queries, None] & some_key).nonzero()
    later_row, first_index = (some_query[first_queries:, None] & some_key[:first_keys]).nonzero()
    row = np.concatenate([row, later_row + first_queries])
    index = np.concatenate([index, first_index])
    query_masks, of_query = _distinct(queries)
    key_masks, of_key = _distinct(keys)
    number = of_query[row] * len(key_masks) + of_key[index]
    return row, index, number, [query_masks[:, :, None], key_masks[:, None, :]]


def _kinds(number: np.ndarray, masks: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return `kinds` and `bits` for entries whose masks are products of `masks`, of which each `number` has a digit."""
    counts = [len(x) for x in masks]
    used = np.zeros(math.prod(counts), bool)
    used[number] = True
    used[0] = False
    kinds = (np.cumsum(used) - 1)[number]
    kinds[number == 0] = -1
    bits = np.ones((np.count_nonzero(used), 1, 1), bool)
    for digit, mask in zip(np.unravel_index(np.flatnonzero(used), counts), masks, strict=True):
        own = mask[digit]
        shape = len(bits), bits.shape[1] * own.shape[1], bits.shape[2] * own.shape[2]
        bits = (bits[:, :, None, :, None] & own[:, None, :, None, :]).reshape(shape)
    return kinds, bits


def _expanded(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, for lists of these lengths, one after the other, the list of each entry and the entry's place in it."""
    owner = np.repeat(np.arange(len(counts)), counts)
    begin = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) - begin[owner]


def _distinct(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct rows of booleans, after one that is all True, and for each row the number of its equal."""
    rows = np.concatenate([np.ones_like(rows, shape=(1, rows.shape[1])), rows])
    packed = np.packbits(rows, axis=1)
    _, first, number = np.unique(packed.view(f"V{packed.shape[1]}"), return_index=True, return_inverse=True)
    order = np.argsort(first)  # the first row comes first
    place = np.argsort(order)
    return rows[first[order]], place[number.reshape(-1)[1:]]
