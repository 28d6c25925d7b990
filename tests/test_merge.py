"""The monoid laws of partial results, and what the merged result is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilated_attention import merge
from dilated_attention.merge import add_phantoms, merge_into
from tolerances import TOLERANCE, relative_error

Part = tuple[Tensor, Tensor]


@st.composite
def parts(draw, number: int, dtypes=(torch.float64, torch.float32), largest: float = 1e4) -> list[Part]:
    """Partial results of one shape and dtype; |lse| is at most `largest`, or lse is -inf, where out is 0."""
    dtype = draw(st.sampled_from(dtypes))
    rows, dim = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    statistic = torch.promote_types(dtype, torch.float32)
    made = []
    for _ in range(number):
        row = st.one_of(st.floats(-largest, largest, width=32), st.just(-torch.inf))
        lse = torch.tensor(draw(st.lists(row, min_size=rows, max_size=rows)), dtype=statistic)
        out = torch.randn(rows, dim, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))).to(dtype)
        made.append((out.masked_fill(lse[:, None] == -torch.inf, 0.0), lse))
    return made


def same(a: Part, b: Part) -> None:
    assert relative_error(a[0], b[0]) <= TOLERANCE[b[0].dtype]
    assert relative_error(a[1], b[1]) <= TOLERANCE[b[1].dtype]


@given(parts(2))
def test_commutative(made):
    a, b = made
    same(merge(*a, *b), merge(*b, *a))


@given(parts(3, largest=8.0))  # a merged lse is rounded, and its share of the next merge is off by ε |lse|
def test_associative(made):
    a, b, c = made
    same(merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c)))


@given(parts(1, (torch.float64, torch.float32, torch.bfloat16, torch.float16)))
def test_empty_is_the_identity(made):
    ((out, lse),) = made
    empty = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for merged in (merge(out, lse, *empty), merge(*empty, out, lse)):
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)


def test_rows_of_nothing_stay_nothing():
    empty = torch.zeros(3, 2), torch.full((3,), -torch.inf)
    out, lse = merge(*empty, *empty)
    assert torch.equal(out, torch.zeros(3, 2))
    assert torch.equal(lse, empty[1])


@settings(max_examples=50)
@given(st.integers(1, 5), st.integers(1, 20), st.sampled_from(list(TOLERANCE)))
def test_parts_of_a_softmax_merge_to_the_whole(number, keys, dtype):
    scores, values = 3 * torch.randn(7, number * keys, dtype=torch.float64), torch.randn(number * keys, 4).double()
    statistic = torch.promote_types(dtype, torch.float32)
    running = torch.zeros(7, 4, dtype=dtype), torch.full((7,), -torch.inf, dtype=statistic)
    for s, v in zip(scores.chunk(number, 1), values.chunk(number), strict=True):
        running = merge(*running, (s.softmax(1) @ v).to(dtype), s.logsumexp(1).to(statistic))
    assert (running[0].dtype, running[1].dtype) == (dtype, statistic)
    assert relative_error(running[1], scores.logsumexp(1)) <= TOLERANCE[statistic]
    expected = scores.softmax(1) @ values
    bar = TOLERANCE[dtype] * (scores.softmax(1) @ values.abs()).norm()  # the sum may cancel
    assert (running[0].double() - expected).norm() <= bar


@given(parts(2))
def test_arguments_are_left_alone(made):
    before = [x.clone() for part in made for x in part]
    merge(*made[0], *made[1])
    assert all(torch.equal(x, y) for x, y in zip(before, (x for part in made for x in part), strict=True))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_merges_into_strided_views_and_nowhere_else(dtype):
    statistic = torch.promote_types(dtype, torch.float32)
    out, lse = torch.randn(12, 3).to(dtype), torch.randn(12).to(statistic)
    part, part_lse = torch.randn(4, 3).to(dtype), torch.randn(4).to(statistic)
    before = out.clone(), lse.clone()
    expected = merge(out[1::3], lse[1::3], part, part_lse)
    merge_into(out[1::3], lse[1::3], part, part_lse.clone())
    assert torch.equal(out[1::3], expected[0])
    assert torch.equal(lse[1::3], expected[1])
    others = torch.arange(12) % 3 != 1
    assert torch.equal(out[others], before[0][others])
    assert torch.equal(lse[others], before[1][others])


@given(parts(1), st.integers(1, 50))
def test_phantoms_are_keys_of_score_and_value_zero(made, number):
    ((out, lse),) = made
    wide_out, wide_lse = out.double(), lse.double()
    expected = merge(wide_out, wide_lse, torch.zeros_like(wide_out), torch.full_like(wide_lse, number).log())
    before = out.clone()
    add_phantoms(out, lse, number)
    assert (out - expected[0]).norm() <= TOLERANCE[out.dtype] * before.norm()
    assert relative_error(lse, expected[1]) <= TOLERANCE[lse.dtype]
