"""The probabilities as a sparse tensor, against dense ones from the definition."""

from __future__ import annotations

import math

import pytest
import torch

from dilated_attention import BlockLayout, Dilated, Window, attention, attention_weights
from dilated_attention.backends.reference import count_matrix
from dilated_attention.nn import BlockSparseRingMultiheadDilatedAttention
from dilated_attention.patterns import Sum
from tolerances import TOLERANCE, relative_error

N, HEADS, KV_HEADS = 75, 4, 2


def some(lead: tuple[int, int], share: float = 0.5, seq_len: int = N) -> BlockLayout:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.rand(*lead, -(-seq_len // 16), -(-seq_len // 32), generator=generator)
    return BlockLayout.from_mask(blocks < share, seq_len, (16, 32))


DILATED = Dilated((20, 75), (1, 3))
PATTERNS = {
    "dilated": DILATED,
    "groups of heads": Dilated((20, 75), (1, 2), head_groups=True),
    "layout": BlockLayout.bigbird(N, 20, 5, 1, 0, 16),
    "layout per head": some((1, HEADS)),
    "layout per sample, with empty rows": some((2, HEADS), 0.2),
    "causal layout": some((1, 1)).causal(),
    "product": Dilated((40, 75), (1, 2)) * (lambda n: some((1, HEADS), seq_len=n)),
    "sum with layouts": DILATED + some((1, HEADS)) + Dilated((40,), (1,)) * (lambda n: some((1, 1), seq_len=n)),
}


def counts(pattern, is_causal: bool) -> torch.Tensor:
    """Return how often each query of each query head sees each key, (batch or 1, heads, seq, seq)."""
    if isinstance(pattern, Sum):
        return sum(counts(part, is_causal) for part in pattern.parts)
    if isinstance(pattern, BlockLayout):
        seen = pattern.dense_mask().expand(-1, HEADS, -1, -1).long()
    else:
        dilated = pattern if isinstance(pattern, Dilated) else pattern.dilated
        branches = dilated.segment_lengths, dilated.dilation_rates, dilated.offset_table(KV_HEADS)
        seen = count_matrix(*branches, N, is_causal=False).repeat_interleave(HEADS // KV_HEADS, 0)[None]
        if not isinstance(pattern, Dilated):
            seen = torch.zeros_like(seen)
            for h in range(HEADS):
                for w, r in zip(*branches[:2], strict=True):
                    for first in range(0, N, w):
                        tokens = torch.tensor(range(first + h // 2 % r, min(first + w, N), r))
                        mask = pattern.layout_of(len(tokens)).dense_mask()
                        seen[0, h, tokens[:, None], tokens] += mask[0, h % mask.shape[1]]
    return seen.tril() if is_causal else seen


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", PATTERNS)
def test_weights_are_the_dense_ones(name, padded, is_causal, dtype):
    pattern = PATTERNS[name]
    q, k = torch.randn(2, N, HEADS, 8, dtype=torch.float64), torch.randn(2, N, KV_HEADS, 8, dtype=torch.float64)
    leaves = [x.to(dtype).requires_grad_() for x in (q, k)]
    mask = torch.rand(2, N) < 0.3 if padded else None
    seen = counts(pattern, is_causal).expand(2, -1, -1, -1)
    if mask is not None:
        seen = seen * ~mask[:, None, None]

    weights = attention_weights(*leaves, pattern, is_causal=is_causal, key_padding_mask=mask)
    assert weights.layout == torch.sparse_coo
    assert (weights.shape, weights.dtype) == ((2, HEADS, N, N), dtype)
    assert weights.is_coalesced()
    assert weights._nnz() == (seen > 0).sum()

    wide = [x.detach().double().requires_grad_() for x in leaves]
    score = (
        torch.einsum("bihd,bjhd->bhij", wide[0], wide[1].repeat_interleave(2, 2)) / math.sqrt(8) + seen.double().log()
    )
    expected = score.softmax(-1).nan_to_num(0.0)
    assert relative_error(weights.to_dense(), expected) <= TOLERANCE[dtype]
    cotangent = torch.randn(2, HEADS, N, N, dtype=torch.float64)
    gradients = torch.autograd.grad(weights.to_dense(), leaves, cotangent.to(dtype))
    score = score.masked_fill(seen == 0, -1e300)  # a row of nothing has no gradient, rather than NaN
    dense = torch.where(seen > 0, score.softmax(-1), 0.0)
    for actual, wanted in zip(gradients, torch.autograd.grad(dense, wide, cotangent.to(dtype).double()), strict=True):
        assert relative_error(actual, wanted) <= 10 * TOLERANCE[dtype]  # differences of products


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("name", PATTERNS)
def test_a_hidden_key_may_hold_anything(name, number):
    q, k = (torch.randn(2, N, h, 8, dtype=torch.float64, requires_grad=True) for h in (HEADS, KV_HEADS))
    mask = torch.rand(2, N) < 0.3
    other = k.detach().masked_fill(mask[:, :, None, None], number).requires_grad_()
    found = []
    for key in (k, other):
        weights = attention_weights(q, key, PATTERNS[name], key_padding_mask=mask).to_dense()
        found.append([weights, *torch.autograd.grad(weights.square().sum(), [q, key])])
    for actual, expected in zip(*found, strict=True):
        assert torch.equal(actual, expected)


def test_another_default_device():
    q, k = torch.randn(1, 20, 2, 4), torch.randn(1, 20, 2, 4)
    expected = attention_weights(q, k, Dilated((8, 20), (1, 2)))
    with torch.device("meta"):
        weights = attention_weights(q, k, Dilated((8, 20), (1, 2)))
    assert torch.equal(weights.to_dense(), expected.to_dense())


def test_weights_times_values_is_the_output():
    q, k, v = (torch.randn(2, N, h, 8, dtype=torch.float64) for h in (HEADS, KV_HEADS, KV_HEADS))
    layout = some((2, HEADS), 0.3)
    weights = attention_weights(q, k, layout).to_dense()
    out = torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(2, 2))
    assert relative_error(attention(q, k, v, layout), out) <= TOLERANCE[torch.float64]


def test_no_dense_matrix_is_made():
    """100,000 tokens: a dense one would take 40 GB."""
    n = 100_000
    q = torch.randn(1, n, 1, 4)
    for pattern, pairs in (
        (BlockLayout.local(n, 1, 16), 16 * n),
        (Window(3, 2), 6 * n - 6 - 3),
        (Window(2, rate=3), 5 * n - 2 * 3 - 2 * 6),
    ):
        weights = attention_weights(q, q, pattern)
        assert weights.shape == (1, 1, n, n)
        assert weights._nnz() == pairs


@pytest.mark.parametrize("average", [False, True])
def test_a_module_returns_them(average):
    layout = some((1, HEADS))
    module = BlockSparseRingMultiheadDilatedAttention(32, HEADS, layout=layout, dtype=torch.float64)
    x = torch.randn(2, N, 32, dtype=torch.float64)
    out, weights = module(x, x, x, need_weights=True, average_attn_weights=average)
    q, k, v = (y.unflatten(-1, (HEADS, 8)) for y in module._project(x, x, x))
    expected = attention_weights(q, k, layout).to_dense()
    assert weights.is_sparse
    assert relative_error(weights.to_dense(), expected.mean(1) if average else expected) <= 1e-12
    assert relative_error(out, module.out_proj(torch.einsum("bhij,bjhd->bihd", expected, v).flatten(2))) <= 1e-12
