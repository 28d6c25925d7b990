"""The monoid laws of partial results, what the merged result is, its gradient, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilated_attention import Dilated, attention, merge
from dilated_attention.merge import add_phantoms, merge_into
from tolerances import TOLERANCE, relative_error

Part = tuple[Tensor, Tensor]


@st.composite
def parts(draw, number: int, dtypes=(torch.float64, torch.float32), largest: float = 1e4) -> list[Part]:
    """Partial results of one shape and dtype, as the calls return them; |lse| is at most `largest`, or lse is -inf,
    where out is 0."""
    dtype = draw(st.sampled_from(dtypes))
    seq_len, heads, dim = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    rows = seq_len * heads
    statistic = torch.promote_types(dtype, torch.float32)
    made = []
    for _ in range(number):
        row = st.one_of(st.floats(-largest, largest, width=32), st.just(-torch.inf))
        lse = torch.tensor(draw(st.lists(row, min_size=rows, max_size=rows)), dtype=statistic).view(1, heads, seq_len)
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        out = torch.randn(1, seq_len, heads, dim, generator=generator).to(dtype)
        made.append((out.masked_fill(lse.transpose(1, 2).unsqueeze(-1) == -torch.inf, 0.0), lse))
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
    empty = torch.zeros(1, 3, 2, 2), torch.full((1, 2, 3), -torch.inf)
    out, lse = merge(*empty, *empty)
    assert torch.equal(out, empty[0])
    assert torch.equal(lse, empty[1])


@settings(max_examples=50)
@given(st.integers(1, 5), st.integers(1, 20), st.sampled_from(list(TOLERANCE)))
def test_parts_of_a_softmax_merge_to_the_whole(number, keys, dtype):
    scores, values = 3 * torch.randn(7, number * keys, dtype=torch.float64), torch.randn(number * keys, 4).double()
    statistic = torch.promote_types(dtype, torch.float32)
    running = torch.zeros(1, 7, 1, 4, dtype=dtype), torch.full((1, 1, 7), -torch.inf, dtype=statistic)
    for s, v in zip(scores.chunk(number, 1), values.chunk(number), strict=True):
        part = (s.softmax(1) @ v).to(dtype), s.logsumexp(1).to(statistic)
        running = merge(*running, part[0][None, :, None], part[1][None, None])
    assert (running[0].dtype, running[1].dtype) == (dtype, statistic)
    assert relative_error(running[1][0, 0], scores.logsumexp(1)) <= TOLERANCE[statistic]
    expected = scores.softmax(1) @ values
    bar = TOLERANCE[dtype] * (scores.softmax(1) @ values.abs()).norm()  # the sum may cancel
    assert (running[0][0, :, 0].double() - expected).norm() <= bar


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
    once = (x[None, :, None] for x in (out[1::3], part)), (x[None, None] for x in (lse[1::3], part_lse))
    expected = [x.flatten(0, 2) for x in merge(*(x for pair in zip(*once, strict=True) for x in pair))]
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
    add_phantoms(out, lse.transpose(1, 2), number)
    assert (out - expected[0]).norm() <= TOLERANCE[out.dtype] * before.norm()
    assert relative_error(lse, expected[1]) <= TOLERANCE[lse.dtype]


def some_parts(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """out, lse, part_out, part_lse with rows that the first, the second and both do not see."""
    tensors = [torch.randn(2, 5, 3, 4, dtype=torch.float64).to(dtype) for _ in range(2)]
    statistics = [torch.randn(2, 3, 5, dtype=torch.promote_types(dtype, torch.float32)) for _ in range(2)]
    statistics[0][0, 0, :3] = -torch.inf
    statistics[1][0, 0, 2:] = -torch.inf
    outs = [
        x.masked_fill(y.transpose(1, 2).unsqueeze(-1) == -torch.inf, 0.0)
        for x, y in zip(tensors, statistics, strict=True)
    ]
    return [outs[0], statistics[0], outs[1], statistics[1]]


def test_gradients():
    """Gradients of out and lse, through out and lse, are 0 and never NaN where neither part sees anything."""
    leaves = [x.requires_grad_() for x in some_parts()]

    def run(*finite):
        out, lse = merge(*(torch.where(x.isfinite(), y, x.detach()) for x, y in zip(leaves, finite, strict=True)))
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    finite = [x.detach().nan_to_num(neginf=0.0).requires_grad_() for x in leaves]
    assert torch.autograd.gradcheck(run, finite)
    out, lse = merge(*leaves)
    gradients = torch.autograd.grad((out.sin().sum(), lse.sum()), leaves)
    assert not any(x.isnan().any() for x in gradients)
    for x in gradients:
        assert (x[0, 2, 0] if x.ndim == 4 else x[0, 0, 2]).abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_calls_return_merges_to_the_call_of_both_patterns(dtype):
    inputs = [torch.randn(2, 70, heads, 8).to(dtype).requires_grad_() for heads in (4, 2, 2)]
    near, far = Dilated((16,), (3,)), Dilated((64,), (5,))
    both = Dilated((16, 64), (3, 5))
    merged = merge(*attention(*inputs, near, return_lse=True), *attention(*inputs, far, return_lse=True))
    whole = attention(*(x.double() for x in inputs), both, return_lse=True)
    pair = []
    for out, lse in (merged, whole):
        loss = out.double().sin().sum() + lse[lse.isfinite()].double().sin().sum()
        pair.append((out, lse, *torch.autograd.grad(loss, inputs)))
    for actual, expected in zip(*pair, strict=True):
        assert relative_error(actual, expected) <= TOLERANCE[dtype]


REFUSED = {
    "out of rank 3": (0, lambda x: x[0], ["out", "(5, 3, 4)", "(batch, seq, heads, head_dim)"]),
    "lse as (batch, seq, heads)": (1, lambda x: x.transpose(1, 2), ["lse", "(2, 5, 3)", "(2, 3, 5)", "return_lse"]),
    "part_out of other tokens": (2, lambda x: x[:, :4], ["part_out", "(2, 4, 3, 4)", "(2, 5, 3, 4)"]),
    "part_lse of one sample": (3, lambda x: x[:1], ["part_lse", "(1, 3, 5)", "(2, 3, 5)"]),
    "lse in single precision": (1, lambda x: x.float(), ["lse", "torch.float32", "torch.float64"]),
    "part_out in half precision": (2, lambda x: x.half(), ["part_out", "torch.float16", "torch.float64"]),
    "part_lse elsewhere": (3, lambda x: x.to("meta"), ["part_lse", "meta", "cpu"]),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_named(name):
    which, change, words = REFUSED[name]
    arguments = some_parts()
    arguments[which] = change(arguments[which])
    with pytest.raises(ValueError, match=f"^{words[0]} must be ") as raised:
        merge(*arguments)
    assert all(word in str(raised.value) for word in words), str(raised.value)
