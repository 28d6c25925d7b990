"""Neighborhoods on grids against their definition, pair by pair: lists, calls and modules."""

from __future__ import annotations

import itertools
import math
import pickle

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance import Conformance, excesses, random_calls
from dilated_attention import (
    Dilated,
    Neighborhood,
    UnsupportedError,
    Window,
    attention,
    attention_weights,
    explain,
    plan_cache,
)
from dilated_attention.decoding import cached_attention
from dilated_attention.layout import grids
from dilated_attention.layout.grids import Axis, Tiles
from dilated_attention.neighborhood import tiled
from dilated_attention.nn import (
    DilatedAttention,
    NeighborhoodAttention,
    NeighborhoodAttention1D,
    NeighborhoodAttention2D,
    NeighborhoodAttention3D,
)
from tolerances import TOLERANCE, relative_error

matplotlib.use("Agg")

BACKENDS = ["native", "reference"]


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
    # Take the window on the axis whose middle is nearest to the leader.
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
    [
        ((64, 64), 13, 2.2),
        ((32, 32), 13, 2.2),
        ((128, 128), 13, 2.2),
        ((64, 64), 5, 3.5),
        ((20, 20), 5, 3.5),
        ((63, 50), 13, 2.4),
    ],
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


# ---- calls


def of_axes(axes, leading=0):
    """Return the pattern on these axes."""
    shape, window, rate, stride, is_causal, shifted = zip(*axes, strict=True)
    return Neighborhood(
        shape, window, rate=rate, stride=stride, is_causal=is_causal, leading=leading, shifted=shifted[0]
    )  # fmt: skip


class OfNeighborhood(Conformance):
    kv_heads = 2
    pattern: Neighborhood
    backend = "native"

    @property
    def seq_len(self):
        return self.pattern.seq_len

    def run(self, q, k, v):
        return attention(q, k, v, self.pattern, return_lse=True, backend=self.backend)

    def counts(self):
        return seen_on(self.pattern.axes, self.pattern.leading).int().expand(self.kv_heads, -1, -1)


class TestPicture(OfNeighborhood):
    pattern = Neighborhood((11, 13), (5, 3))


class TestDilatedPictureWithRegisters(OfNeighborhood):
    pattern = Neighborhood((12, 9), (3, 4), rate=(3, 2), leading=5)


class TestVideo(OfNeighborhood):
    pattern = Neighborhood((4, 6, 5), (3, 4, 3), stride=(1, 2, 3), is_causal=(True, False, False))


class TestCutWindows(OfNeighborhood):
    pattern = Neighborhood((40,), (7,), shifted=False)


@pytest.mark.parametrize("backend", BACKENDS)
@random_calls(40)
@given(axes=grid_axes(most=(30, 9, 5)), leading=st.integers(0, 20), heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]))
def test_random_neighborhoods_are_exact(backend, axes, leading, heads):
    pattern = of_axes(axes, leading)
    q = torch.randn(2, pattern.seq_len, heads[0], 8)
    k, v = (torch.randn(2, pattern.seq_len, heads[1], 8) for _ in range(2))
    counts = seen_on(axes, leading).int().expand(heads[1], -1, -1)

    def run(*inputs):
        return attention(*inputs, pattern, return_lse=True, backend=backend, scale=0.5)

    errors = excesses(run, (q, k, v), counts, scale=0.5)
    assert max(errors.values()) <= 1, errors
    assert pattern.coverage(pattern.seq_len, 2).tolist() == [counts[0].sum(1).tolist()] * 2
    assert pattern.flops(pattern.seq_len, 3, 8) == 4 * 8 * 3 * int(counts[0].sum())


PATTERN = Neighborhood((6, 7), (3, 5), leading=2)


def inputs(dtype=torch.float32, pattern=PATTERN):
    return [torch.randn(2, pattern.seq_len, 2, 16, dtype=dtype, requires_grad=True) for _ in range(3)]


def dense_attention(q, k, v, mask, scale=0.25):
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_keys(backend):
    q, k, v = inputs(torch.float64)
    hidden = torch.rand(2, PATTERN.seq_len) < 0.3
    mask = seen_on(PATTERN.axes, 2) & ~hidden[:, None, None]
    expected = dense_attention(q, k, v, mask)
    k_, v_ = (torch.where(hidden[..., None, None], torch.nan, x) for x in (k, v))
    out = attention(q, k_, v_, PATTERN, key_padding_mask=hidden, backend=backend)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("options", [{"dropout_p": 0.4}, {"softcap": 1.5}, {"sinks": torch.tensor([0.5, -1.0])}])
def test_options_agree_between_backends(options):
    q, k, v = inputs()
    found = []
    for backend in BACKENDS:
        torch.manual_seed(3)
        out = attention(q, k, v, PATTERN, backend=backend, **options)
        found.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for actual, expected in zip(*found, strict=True):
        assert relative_error(actual, expected) < TOLERANCE[torch.float32]
    assert relative_error(attention(q, k, v, PATTERN), found[0][0]) > 1e-3  # the option does something


def test_a_sum_counts_what_both_show():
    q, k, v = inputs(torch.float64)
    pattern = PATTERN + Window(2)
    found = [attention(q, k, v, pattern, backend=backend) for backend in BACKENDS]
    torch.testing.assert_close(*found)
    at = torch.arange(PATTERN.seq_len)
    counts = seen_on(PATTERN.axes, 2).double() + ((at[:, None] - at).abs() <= 2)
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(0.25).exp() * counts
    expected = torch.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdim=True), v)
    torch.testing.assert_close(found[0], expected)
    assert torch.equal(pattern.coverage(PATTERN.seq_len, 2), counts.sum(1).long().expand(2, -1))
    assert pattern.flops(PATTERN.seq_len, 2, 16) == 4 * 16 * 2 * int(counts.sum())
    with pytest.raises(UnsupportedError, match="is_causal=True with a Neighborhood"):
        attention(q, k, v, pattern, is_causal=True)


def test_weights():
    q, k, v = inputs(torch.float64)
    for pattern in (PATTERN, PATTERN + Window(1)):
        weights = attention_weights(q, k, pattern)
        torch.testing.assert_close(
            torch.einsum("bhqk,bkhd->bqhd", weights.to_dense(), v), attention(q, k, v, pattern)
        )  # fmt: skip
    assert attention_weights(q, k, PATTERN)._nnz() == 4 * int(seen_on(PATTERN.axes, 2).sum())


def test_values_may_be_wider_than_keys():
    q, k, _ = inputs()
    v = torch.randn(2, PATTERN.seq_len, 2, 24)
    assert attention(q, k, v, PATTERN).shape == v.shape


def test_explain_counts_what_is_seen():
    q, k, v = (x.to("meta") for x in inputs())
    report = explain(q, k, v, PATTERN)
    assert report.flops == 2 * PATTERN.flops(PATTERN.seq_len, 2, 16)
    assert "layout of" in str(report)


def test_compiled_and_exported(compiling_python):
    """Each is one graph, also for pictures of other sizes, whose tables are found again in the cache."""
    compiling_python(
        """
        import torch
        from dilated_attention import Neighborhood, attention, plan_cache
        from dilated_attention.nn import NeighborhoodAttention2D

        torch.manual_seed(0)
        pattern = Neighborhood((6, 7), (3, 5), leading=2)
        q, k, v = (torch.randn(2, 44, 2, 16, requires_grad=True) for _ in range(3))
        expected = attention(q, k, v, pattern)
        gradients = torch.autograd.grad(expected.sum(), (q, k, v))
        compiled = torch.compile(lambda *x: attention(*x, pattern), fullgraph=True, backend="aot_eager")
        out = compiled(q, k, v)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), (q, k, v)), gradients)
        before = plan_cache.info()
        compiled(q, k, v)
        assert plan_cache.info().misses == before.misses

        layer = NeighborhoodAttention2D(16, 2, 3, dilation=2, rel_pos_bias=True)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for shape in ((2, 6, 7, 16), (3, 6, 7, 16), (2, 9, 8, 16)):
            x = torch.randn(shape)
            torch.testing.assert_close(compiled(x), layer(x))

        program = torch.export.export(layer, (x,))
        torch.testing.assert_close(program.module()(x), layer(x))
        """
    )


def test_under_transforms():
    q, k, v = inputs()
    mapped = torch.func.vmap(lambda *x: attention(*(y[None] for y in x), PATTERN)[0])(q, k, v)
    torch.testing.assert_close(mapped, attention(q, k, v, PATTERN))
    gradient = torch.func.grad(lambda q: attention(q, k, v, PATTERN).sum())(q)
    torch.testing.assert_close(gradient, torch.autograd.grad(attention(q, k, v, PATTERN).sum(), q)[0])


def test_higher_derivatives():
    pattern = Neighborhood((3, 3), (3, 2))
    tensors = [torch.randn(1, 9, 1, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradgradcheck(lambda *x: attention(*x, pattern, backend="reference"), tensors)


def test_tables_are_made_once():
    q, k, v = inputs()
    plan_cache.clear()
    attention(q, k, v, PATTERN)
    before = plan_cache.info()
    attention(q, k, v, Neighborhood((6, 7), (3, 5), leading=2))
    after = plan_cache.info()
    assert after.misses == before.misses
    assert after.bytes == before.bytes
    assert tiled(PATTERN).layout is tiled(PATTERN).layout


def test_a_value():
    assert pickle.loads(pickle.dumps(PATTERN)) == PATTERN
    assert hash(PATTERN) == hash(Neighborhood([6, 7], np.array([3, 5]), rate=1, stride=(1, 1), leading=2))
    assert PATTERN.rate == (1, 1)
    assert PATTERN.is_causal == (False, False)
    assert PATTERN.seq_len == 44
    assert "shape=(6, 7), window=(3, 5)" in repr(PATTERN)


@pytest.mark.parametrize(
    ("shape", "window", "options", "message"),
    [
        (5, (3,), {}, "shape must hold the lengths of one to three axes"),
        ((), (), {}, "shape must hold the lengths of one to three axes"),
        ((4, 4, 4, 4), (1, 1, 1, 1), {}, "shape must hold the lengths of one to three axes"),
        ((0,), (1,), {}, "shape must hold"),
        ((5, 5), (3,), {}, r"window must hold one value per axis of shape=\(5, 5\); got \(3,\)"),
        ((5,), (2.5,), {}, r"window must hold one positive integer, or positive integers, one per axis of"),
        ((5, 5), (3, 7), {}, "along axis 1, 7 keys at rate 1 need 7 tokens, and the grid has 5"),
        ((9, 9), (3, 3), {"rate": (1, 4)}, "at rate 4 need 12 tokens.*Give a window of at most 2 there"),
        ((9, 9), (3, 3), {"rate": 0}, "rate must be a positive integer; got 0"),
        ((9, 9), (3, 3), {"rate": (1, True)}, "rate must hold"),
        ((9, 9), (3, 3), {"stride": 4}, "stride=.* along axis 0 it exceeds the window, 3"),
        ((9, 9), (3, 3), {"is_causal": 1}, "is_causal must be a bool; got 1"),
        ((9, 9), (3, 3), {"is_causal": (True,)}, "is_causal must hold one value per axis"),
        ((9, 9), (3, 3), {"leading": -1}, "leading must be a non-negative integer"),
        ((9, 9), (3, 3), {"shifted": None}, "shifted must be a bool"),
    ],
)
def test_bad_arguments(shape, window, options, message):
    with pytest.raises(ValueError, match=message):
        Neighborhood(shape, window, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_causal": True}, "leave is_causal out and give Neighborhood"),
        ({"lengths": [44, 30]}, "lengths with a Neighborhood is not supported; every sample must be a whole grid"),
        ({"q_start": 0}, "a Neighborhood with q_start or k_start is not supported"),
    ],
)
def test_refused_options(options, message):
    with pytest.raises(UnsupportedError, match=message):
        attention(*inputs(), PATTERN, **options)


def test_refused_calls():
    q, k, v = inputs()
    with pytest.raises(ValueError, match="for 44 tokens, a grid of 6 x 7 and 2 leading tokens; got 43"):
        attention(q[:, 1:], k[:, 1:], v[:, 1:], PATTERN)
    with pytest.raises(ValueError, match="seq_len=3 on one device must be q's own length"):
        attention(q, k, v, PATTERN, seq_len=3)
    with pytest.raises(ValueError, match="must agree in batch, seq"):
        attention(q[:, 1:], k, v, PATTERN)
    with pytest.raises(UnsupportedError, match="give the whole grid"):
        cached_attention(q[:, -1:], k, v, PATTERN)
    with pytest.raises(UnsupportedError, match="give a sum"):
        PATTERN * PATTERN
    with pytest.raises(ValueError, match="layout must be a BlockLayout"):
        Dilated([8], [1]) * PATTERN
    with pytest.raises(ValueError, match="for 44 tokens"):
        PATTERN.coverage(43, 1)
    assert torch.equal(DilatedAttention(pattern=PATTERN)(q, k, v), attention(q, k, v, PATTERN))


def test_picture_of_one_query():
    pattern = Neighborhood((5, 6), (3, 3), rate=(1, 2))
    ax = pattern.plot((0, 3))
    cells = ax.collections[0].get_array().reshape(5, 6)
    shown = torch.tensor(np.asarray(cells) > 0)
    assert torch.equal(shown.flatten(), seen_on(pattern.axes)[3])
    assert cells[0, 3] == cells.max() > cells[1, 3]
    assert ax.get_title() == "the query at 0, 3 sees 9 of 30 tokens"
    planes = Neighborhood((2, 3, 3), (2, 3, 3)).plot().collections[0].get_array().reshape(3, 7)
    assert planes.mask[:, 3].all()
    assert Neighborhood((7,), (3,)).plot().collections[0].get_array().size == 7
    with pytest.raises(ValueError, match=r"query must hold 2 coordinates inside the grid \(5, 6\)"):
        pattern.plot((0, 6))


# ---- modules


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (NeighborhoodAttention1D(16, 2, 3, stride=2, is_causal=True), (2, 9, 16)),
        (NeighborhoodAttention2D(16, 2, (3, 4), dilation=(2, 1), qkv_bias=False, qk_scale=0.7), (2, 7, 6, 16)),
        (NeighborhoodAttention3D(16, 2, 2), (1, 3, 4, 2, 16)),
        (NeighborhoodAttention(16, 2, 3), (2, 4, 5, 16)),
    ],
)
def test_modules_project_and_attend(layer, shape):
    x = torch.randn(shape)
    pattern = layer.pattern(shape[1:-1])
    q, k, v = layer.qkv(x).reshape(shape[0], -1, 3, 2, 8).unbind(2)
    scale = 8**-0.5 if layer.scale is None else layer.scale
    expected = dense_attention(q, k, v, seen_on(pattern.axes), scale)
    torch.testing.assert_close(layer(x), layer.proj(expected.reshape(shape)))


def natten_first_entry(query: int, axis: Axis) -> int:
    """Return the entry of NATTEN's table, along an axis, for the first key that a query sees: `get_pb_start` of its
    releases 0.15 to 0.17, for odd windows."""
    half = axis.window // 2
    if query - half * axis.rate < 0:
        return axis.window - 1 - query // axis.rate
    if query + half * axis.rate >= axis.length:
        return (axis.length - query - 1) // axis.rate
    return half


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (NeighborhoodAttention1D(16, 2, 5, dilation=2, rel_pos_bias=True), (2, 13, 16)),
        (NeighborhoodAttention2D(16, 2, (3, 5), dilation=(2, 1), rel_pos_bias=True), (2, 7, 6, 16)),
        (NeighborhoodAttention3D(16, 2, 3, rel_pos_bias=True), (1, 3, 4, 3, 16)),
    ],
)
def test_modules_have_the_bias_of_natten(layer, shape):
    x = torch.randn(shape)
    axes = layer.pattern(shape[1:-1]).axes
    grid = list(itertools.product(*[range(axis.length) for axis in axes]))
    index = torch.full((len(axes), len(grid), len(grid)), -1)
    for i, query in enumerate(grid):
        seen = [seen_along(axis, at) for axis, at in zip(axes, query, strict=True)]
        first = [natten_first_entry(at, axis) for axis, at in zip(axes, query, strict=True)]
        for steps in itertools.product(*[range(axis.window) for axis in axes]):
            key = tuple(keys[step] for keys, step in zip(seen, steps, strict=True))
            index[:, i, grid.index(key)] = torch.tensor(first) + torch.tensor(steps)
    torch.nn.init.normal_(layer.rpb)
    assert layer.rpb.shape == (2, *[2 * axis.window - 1 for axis in axes])

    bias = torch.stack([table[tuple(index.clamp(0))] for table in layer.rpb])
    q, k, v = layer.qkv(x).reshape(shape[0], -1, 3, 2, 8).unbind(2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 8**-0.5 + bias
    weights = scores.masked_fill(index[0] < 0, -torch.inf).softmax(-1)
    expected = layer.proj(torch.einsum("bhqk,bkhd->bqhd", weights, v).reshape(shape))
    out = layer(x)
    torch.testing.assert_close(out, expected)
    parameters = list(layer.parameters())
    found, wanted = (torch.autograd.grad(y.sin().sum(), parameters) for y in (out, expected))
    for actual, gradient in zip(found, wanted, strict=True):
        assert relative_error(actual, gradient) < TOLERANCE[torch.float32]


def test_modules_have_the_names_of_natten():
    layer = NeighborhoodAttention2D(
        embed_dim=16, num_heads=2, kernel_size=3, stride=1, dilation=1, is_causal=False, qkv_bias=True, qk_scale=None,
        proj_drop=0.1,
    )  # fmt: skip
    names = {"qkv.weight": (48, 16), "qkv.bias": (48,), "proj.weight": (16, 16), "proj.bias": (16,)}
    assert {name: tuple(x.shape) for name, x in layer.state_dict().items()} == names
    assert "kernel_size=3" in repr(layer)
    learned = NeighborhoodAttention(16, 2, (3, 5), rel_pos_bias=True)
    assert {name: tuple(x.shape) for name, x in learned.state_dict().items()} == {"rpb": (2, 5, 9), **names}
    assert 0 < learned.rpb.std() < 0.1
    strided = NeighborhoodAttention2D(16, 2, 4, stride=3, is_causal=(True, False), rel_pos_bias=True)
    assert strided(torch.randn(1, 5, 6, 16)).shape == (1, 5, 6, 16)


def test_modules_refuse():
    with pytest.raises(ValueError, match="2 axes of the grid"):
        NeighborhoodAttention2D(16, 2, 3)(torch.randn(1, 5, 16))
    with pytest.raises(ValueError, match="one to three axes"):
        NeighborhoodAttention(16, 2, 3)(torch.randn(1, 16))
    with pytest.raises(ValueError, match="the grid has 2"):
        NeighborhoodAttention1D(16, 2, 3)(torch.randn(1, 2, 16))
    with pytest.raises(ValueError, match="window must hold one value per axis"):
        NeighborhoodAttention2D(16, 2, (3, 3, 3))
    with pytest.raises(ValueError, match="exceeds the window"):
        NeighborhoodAttention2D(16, 2, 3, stride=4)
    with pytest.raises(ValueError, match="kernel_size must be a positive integer"):
        NeighborhoodAttention2D(16, 2, 2.5)
    with pytest.raises(ValueError, match="multiple of num_heads"):
        NeighborhoodAttention2D(16, 3, 3)
    with pytest.raises(ValueError, match="rel_pos_bias must be a bool"):
        NeighborhoodAttention2D(16, 2, 3, rel_pos_bias=1)
    with pytest.raises(ValueError, match="leaves the number of axes open; give one number per axis"):
        NeighborhoodAttention(16, 2, 3, rel_pos_bias=True)
