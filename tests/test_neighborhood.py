"""Neighborhoods on grids against their definition, pair by pair, and their tiles against dense masks."""

from __future__ import annotations

import itertools
import math

import matplotlib
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance import random_calls
from dilated_attention.layout import grids
from dilated_attention.layout.grids import Axis, Tiles

matplotlib.use("Agg")


def seen_along(axis: Axis, query: int) -> list[int]:
    """Return the coordinates that a query sees along an axis, in the words of `Neighborhood`."""
    others = list(range(query % axis.rate, axis.length, axis.rate))
    place = others.index(query)
    group = [x for x in range(len(others)) if x // axis.stride == place // axis.stride]
    if axis.is_causal:
        # A group that the border cuts has its last query as leader all the same.
        last = group[-1]
        return [others[x] for x in range(len(others)) if last - axis.window < x <= place]
    leader = min(group[0] + axis.stride // 2, len(others) - 1)
    if not axis.shifted:
        first = leader - axis.window // 2
        return [others[x] for x in range(first, first + axis.window) if 0 <= x < len(others)]
    # Of all windows that lie on the axis, the one whose middle is nearest to the leader.
    begins = range(len(others) - axis.window + 1)
    first = min(begins, key=lambda x: abs(x + axis.window // 2 - leader))
    return others[first : first + axis.window]


def seen_on(axes: list[Axis] | tuple[Axis, ...], leading: int = 0) -> torch.Tensor:
    """Return which token of a grid sees which, after `leading` tokens that see all and that all see."""
    mask = torch.ones(1, 1, dtype=torch.bool)
    for axis in axes:
        along = torch.zeros(axis.length, axis.length, dtype=torch.bool)
        for query in range(axis.length):
            along[query, seen_along(axis, query)] = True
        mask = torch.kron(mask.int(), along.int()).bool()
    whole = torch.ones(leading + len(mask), leading + len(mask), dtype=torch.bool)
    whole[leading:, leading:] = mask
    return whole


@st.composite
def grid_axes(draw, most=(20, 8, 5)):
    number = draw(st.integers(1, len(most)))
    axes = []
    for _ in range(number):
        length = draw(st.integers(1, most[number - 1]))
        rate = draw(st.integers(1, min(3, length)))
        window = draw(st.integers(1, length // rate))
        stride = draw(st.integers(1, window))
        axes.append(Axis(length, window, rate, stride, draw(st.booleans()), True))
    shifted = draw(st.booleans())
    return [axis._replace(shifted=shifted) for axis in axes]


def test_ranges_are_the_definition():
    number = 0
    for length, rate, is_causal, shifted in itertools.product(range(1, 12), (1, 2, 3), (False, True), (False, True)):
        for window in range(1, length // rate + 1):
            for stride in range(1, window + 1):
                axis = Axis(length, window, rate, stride, is_causal, shifted)
                start, stop = axis.ranges()
                for query in range(length):
                    at = query % rate, query // rate
                    found = [x * rate + query % rate for x in range(start[at], stop[at])]
                    assert found == seen_along(axis, query), (axis, query)
                    number += 1
                assert axis.counts().tolist() == [len(seen_along(axis, query)) for query in range(length)]
    assert number > 10_000


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        (Axis(6, 3, 1, 1, False, True), [(0, 3), (0, 3), (1, 4), (2, 5), (3, 6), (3, 6)]),
        (Axis(6, 4, 1, 1, False, True), [(0, 4), (0, 4), (0, 4), (1, 5), (2, 6), (2, 6)]),
        (Axis(7, 3, 1, 2, False, True), [(0, 3), (0, 3), (2, 5), (2, 5), (4, 7), (4, 7), (4, 7)]),
        (Axis(5, 3, 1, 1, True, True), [(0, 1), (0, 2), (0, 3), (1, 4), (2, 5)]),
        (Axis(5, 3, 1, 2, True, True), [(0, 1), (0, 2), (1, 3), (1, 4), (2, 5)]),
        (Axis(5, 3, 1, 1, False, False), [(0, 2), (0, 3), (1, 4), (2, 5), (3, 5)]),
    ],
)
def test_ranges_by_hand(axis, expected):
    start, stop = axis.ranges()
    assert list(zip(start[0].tolist(), stop[0].tolist(), strict=True)) == expected


def dense(tables: grids.Tables) -> torch.Tensor:
    """Return which token sees which, from the lists; rows that are no tokens must see nothing and not be seen."""
    _, q_block, k_block = tables.bits.shape
    rows = len(tables.queries)
    assert len(tables.keys) == rows
    mask = torch.zeros(rows, rows, dtype=torch.bool)
    stops = tables.counts.cumsum()
    for block, (count, stop) in enumerate(zip(tables.counts.tolist(), stops.tolist(), strict=True)):
        listed = tables.indices[stop - count : stop]
        assert (listed[1:] > listed[:-1]).all()
        for entry in range(stop - count, stop):
            kind = tables.kinds[entry]
            key = tables.indices[entry]
            pairs = torch.ones(q_block, k_block, dtype=torch.bool)
            if kind >= 0:
                pairs = torch.from_numpy(tables.bits[kind])
                assert pairs.any()
                assert not pairs.all()
            mask[block * q_block : (block + 1) * q_block, key * k_block : (key + 1) * k_block] = pairs
    assert stops[-1] == len(tables.indices) == len(tables.kinds)
    queries, keys = (torch.from_numpy(x) for x in (tables.queries, tables.keys))
    assert not mask[queries < 0].any()
    assert not mask[:, keys < 0].any()
    tokens = int(queries.max()) + 1
    assert queries[queries >= 0].sort().values.tolist() == list(range(tokens))
    assert keys[keys >= 0].sort().values.tolist() == list(range(tokens))
    return mask[queries.argsort()[-tokens:]][:, keys.argsort()[-tokens:]]


@random_calls(120)
@given(grid_axes(), st.integers(0, 5), st.data())
def test_lists_show_what_the_definition_shows(axes, leading, data):
    sides = st.sampled_from([1, 2, 4])
    tile = st.tuples(*[sides] * len(axes))
    tiles = data.draw(st.one_of(st.builds(Tiles, tile, tile), st.just(grids.best_tiles(axes))))
    tables = grids.tables(axes, leading, tiles)
    assert torch.equal(dense(tables), seen_on(axes, leading))


def test_equal_masks_are_stored_once():
    tables = grids.tables([Axis(40, 5, 1, 1, False, True)] * 2, 3, Tiles((4, 4), (2, 2)))
    packed = tables.bits.reshape(len(tables.bits), -1)
    assert len({x.tobytes() for x in packed}) >= len(packed) - 4  # a mask of leading tokens may equal one of the grid
    assert len(packed) < 60


@pytest.mark.parametrize(
    ("shape", "window", "most"),
    [((64, 64), 13, 2.2), ((128, 128), 13, 2.2), ((64, 64), 5, 3.5), ((20, 20), 5, 3.5), ((63, 50), 13, 2.4)],
)
def test_few_more_pairs_are_computed_than_are_seen(shape, window, most):
    axes = [Axis(length, window, 1, 1, False, True) for length in shape]
    tables = grids.tables(axes, 0, grids.best_tiles(axes))
    computed = len(tables.indices) * tables.bits[0].size
    seen = math.prod(int(axis.counts().sum()) for axis in axes)
    assert seen <= computed <= most * seen


def test_tiles_are_boxes_of_known_sizes():
    for axes in ([Axis(7, 7, 1, 1, False, True)], [Axis(30, 3, 1, 1, False, True)] * 3):
        tiles = grids.best_tiles(axes)
        assert math.prod(tiles.queries) in grids.QUERIES
        assert math.prod(tiles.keys) in grids.KEYS
