"""Attention over cached keys: every split of a sequence into cached and new tokens equals the whole."""

from __future__ import annotations

import pytest
import torch

from dilated_attention import (
    BlockLayout,
    Dilated,
    Window,
    attention,
    attention_weights,
    dilated_attention,
    plan_cache,
)
from dilated_attention.decoding import cached_attention, first_token_attention, listed_attention

PATTERNS = {
    "one segment": (Dilated((64,), (1,)), 4),
    "nested": (Dilated((4, 8, 16), (1, 2, 4)), 4),
    "odd": (Dilated((5, 7, 30), (2, 3, 7)), 3),
    "one head": (Dilated((6, 9), (2, 5)), 1),
    "head block": (Dilated((4, 12), (1, 3), "head_block"), 4),
    "head groups": (Dilated((4, 8, 16), (1, 2, 4), head_groups=True), 4),
    "a head without part": (Dilated((6, 3), (2, 2), ((0, -1), (-1, 1))), 2),
    "rows that see nothing": (Dilated((8,), (4,)), 2),
}


def tensors(seq_len, heads, kv_heads, dtype=torch.float64):
    q = torch.randn(2, seq_len, heads, 8, dtype=dtype)
    k, v = torch.randn(2, 2, seq_len, kv_heads, 8, dtype=dtype)
    return q, k, v


@pytest.mark.parametrize("name", PATTERNS)
def test_every_split_equals_the_whole(name):
    pattern, kv_heads = PATTERNS[name]
    q, k, v = tensors(23, 2 * kv_heads, kv_heads)
    for seq_len in (0, 1, 2, 7, 16, 23):
        whole = attention(q[:, :seq_len], k[:, :seq_len], v[:, :seq_len], pattern, is_causal=True)
        for new in range(seq_len + 1):
            last = cached_attention(q[:, seq_len - new : seq_len], k[:, :seq_len], v[:, :seq_len], pattern)
            torch.testing.assert_close(last, whole[:, seq_len - new :], rtol=0, atol=1e-13)


@pytest.mark.parametrize("new", [1, 2, 9, 23])
@pytest.mark.parametrize("name", PATTERNS)
def test_gradients_equal_those_of_the_whole(name, new):
    pattern, kv_heads = PATTERNS[name]
    q, k, v = tensors(23, 2 * kv_heads, kv_heads)
    dout = torch.randn(2, new, 2 * kv_heads, 8, dtype=torch.float64)
    results = []
    for cached in (False, True):
        leaves = [x.detach().requires_grad_() for x in (q[:, -new:], k, v)]
        if cached:
            out = cached_attention(*leaves, pattern, scale=0.3)
        else:
            whole_q = torch.cat((q[:, : 23 - new], leaves[0]), 1)
            out = attention(whole_q, *leaves[1:], pattern, scale=0.3, is_causal=True)[:, -new:]
        results.append(torch.autograd.grad(out, leaves, dout))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("compat", [None, "torchscale"])
@pytest.mark.parametrize("name", PATTERNS)
def test_the_first_token_equals_the_whole(name, compat):
    pattern, kv_heads = PATTERNS[name]
    if compat is not None and pattern.head_groups:
        with pytest.raises(ValueError, match="no head groups"):
            first_token_attention(*tensors(1, 2 * kv_heads, kv_heads), pattern, compat=compat)
        return
    for seq_len in (1, 2, 7, 16, 23, 100):
        q, k, v = (x.requires_grad_() for x in tensors(seq_len, 2 * kv_heads, kv_heads))
        dout = torch.randn_like(q[:, :1])
        whole = dilated_attention(
            q, k, v, pattern.segment_lengths, pattern.dilation_rates, offsets=pattern.offsets,
            head_groups=pattern.head_groups, scale=0.3, compat=compat,
        )  # fmt: skip
        first = first_token_attention(q[:, :1], k, v, pattern, scale=0.3, compat=compat)
        torch.testing.assert_close(first, whole[:, :1], rtol=0, atol=1e-13)
        expected = torch.autograd.grad(whole[:, :1], (q, k, v), dout)
        for actual, right in zip(torch.autograd.grad(first, (q, k, v), dout), expected, strict=True):
            torch.testing.assert_close(actual, right, rtol=0, atol=1e-12)


def test_the_first_token_in_other_dtypes():
    pattern, kv_heads = PATTERNS["nested"]
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 8e-3)):
        q, k, v = tensors(50, 8, kv_heads, dtype)
        expected = attention(q.double(), k.double(), v.double(), pattern)[:, :1]
        first = first_token_attention(q[:, :1], k, v, pattern)
        assert first.dtype == dtype
        torch.testing.assert_close(first.double(), expected, rtol=tolerance, atol=tolerance)


def test_reads_only_what_the_branches_show():
    """NaN wherever no branch of head 0 looks from the last token."""
    pattern = Dilated((4, 16), (1, 4))
    q, k, v = tensors(29, 1, 1)
    hidden = [i for i in range(29) if i not in (16, 20, 24, 28)]
    expected = cached_attention(q[:, -1:], k, v, pattern)
    k[:, hidden] = v[:, hidden] = torch.nan
    torch.testing.assert_close(cached_attention(q[:, -1:], k, v, pattern), expected)


def test_keys_that_the_first_token_does_not_see_reach_nothing():
    pattern = Dilated((4, 16), (1, 4))
    clean = tensors(29, 1, 1)
    unseen = [i for i in range(29) if i not in (0, 1, 2, 3, 4, 8, 12)]
    dirty = [x.clone() for x in clean]
    for x in dirty[1:]:
        x[:, unseen] = torch.nan
    results = []
    for q, k, v in (clean, dirty):
        leaves = [x.clone().requires_grad_() for x in (q[:, :1], k, v)]
        out = first_token_attention(*leaves, pattern)
        results.append([out, *torch.autograd.grad(out.sum(), leaves)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_keeps_its_dtype(dtype):
    q, k, v = tensors(40, 4, 2, dtype)
    pattern = Dilated((8, 32), (1, 2))
    whole = attention(q, k, v, pattern, is_causal=True)
    last = cached_attention(q[:, -3:], k.transpose(1, 2).contiguous().transpose(1, 2), v, pattern)
    assert last.dtype == dtype
    torch.testing.assert_close(last, whole[:, -3:], rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)


@pytest.mark.parametrize(
    "pattern",
    [Window(9), BlockLayout.local(40, 9, 8), Window(3) + Dilated((16,), (2,)),
     Dilated((16, 40), (1, 2)) * (lambda n: BlockLayout.local(n, 5, 4))],
)  # fmt: skip
def test_the_newest_tokens_of_other_patterns(pattern):
    q, k, v = tensors(40, 4, 2)
    whole = attention(q, k, v, pattern, is_causal=True)
    torch.testing.assert_close(cached_attention(q[:, -3:], k, v, pattern), whole[:, -3:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("attend", [cached_attention, first_token_attention])
def test_refusals(attend):
    q, k, v = tensors(8, 2, 2)
    q = q[:, :1]
    pattern = Dilated((4,), (1,))
    for arguments, word in (
        ((q[:1], k, v, pattern), "agree in batch"),
        ((q, k, v[:, :4], pattern), r"k and v must .* \(2, 4, 2, 8\)"),
        ((q, k[:, :, :0], v[:, :, :0], pattern), "must divide those of q; got 2 query and 0 key-value heads"),
        ((q.float(), k, v, pattern), "one floating dtype"),
        ((q.long(), k.long(), v.long(), pattern), "q must have a floating dtype; got torch.int64"),
        ((None, k, v, pattern), "q must be a torch.Tensor; got NoneType"),
        ((q[0], k, v, pattern), r"q must have 4 dimensions, .*; got shape \(1, 2, 8\)"),
        ((q, k.to("meta"), v, pattern), "on one device; got k on meta"),
    ):
        with pytest.raises(ValueError, match=word):
            attend(*arguments)
    with pytest.raises(ValueError, match="pattern must be a Dilated; got Product: give attention"):
        first_token_attention(q, k, v, pattern * (lambda n: BlockLayout.local(n, 2, 4)))
    with pytest.raises(ValueError, match=r"scale must be a finite number.*got nan"):
        attend(q, k, v, pattern, scale=float("nan"))


def test_steps_of_a_window_repeat_one_call():
    """Nothing is checked or planned again as the cache grows, and each step equals the whole."""
    q, k, v = tensors(60, 4, 2)
    whole = attention(q, k, v, Window(5, rate=2), is_causal=True)
    for step in range(20, 60):
        if step == 21:
            misses = plan_cache.info().misses
        out = cached_attention(q[:, step : step + 1], k[:, : step + 1], v[:, : step + 1], Window(5, rate=2))
        torch.testing.assert_close(out, whole[:, step : step + 1], rtol=0, atol=1e-12)
    assert plan_cache.info().misses == misses


def test_how_many_queries():
    q, k, v = tensors(8, 2, 2)
    pattern = Dilated((4,), (1,))
    with pytest.raises(ValueError, match="q must have no more tokens than k; got 8 and 4"):
        cached_attention(q, k[:, :4], v[:, :4], pattern)
    with pytest.raises(ValueError, match=r"q must have one token, the first; got 8: give q\[:, :1\]"):
        first_token_attention(q, k, v, pattern)


@pytest.mark.parametrize("mixed", ["q", "k", "v"])
def test_several_dtypes_under_autocast(mixed):
    """A cache may be in single precision, and what autocast projects in half: all are cast, as `attention` casts."""
    given = {name: torch.randn(1, 16, 2, 8) for name in "qkv"}
    half = {name: x.bfloat16() for name, x in given.items()}
    given[mixed], pattern, chosen = half[mixed], Dilated((16,), (1,)), torch.arange(16)[None, None]

    def outs(q, k, v):
        yield cached_attention(q[:, -1:], k, v, pattern)
        yield first_token_attention(q[:, :1], k, v, pattern)
        yield listed_attention(q[:, -1:], k, v, chosen)
        yield attention_weights(q, k, pattern).to_dense() if mixed != "v" else None

    with torch.autocast("cpu", torch.bfloat16):
        for found, expected in zip(outs(**given), outs(**half), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_on_the_meta_device():
    q, k, v = tensors(16, 4, 2)
    for attend in (
        lambda q, k, v, chosen: cached_attention(q[:, -2:], k, v, Window(3)),
        lambda q, k, v, chosen: cached_attention(q[:, -1:], k, v, Dilated((16, 64), (1, 4))),
        lambda q, k, v, chosen: first_token_attention(q[:, :1], k, v, Dilated((16, 64), (1, 4))),
        lambda q, k, v, chosen: listed_attention(q[:, -2:], k, v, chosen, 4),
    ):
        given = q, k, v, torch.tensor([[[0, 3]]])
        expected, found = attend(*given), attend(*(x.to("meta") for x in given))
        assert (found.device.type, found.shape, found.dtype) == ("meta", expected.shape, expected.dtype)


@pytest.mark.parametrize("attend", [cached_attention, first_token_attention])
def test_scores_are_as_wide_under_autocast(attend):
    pattern = Dilated((8, 40), (1, 2))
    q, k, v = (2 * torch.randn(2, n, 2, 8) for n in (1, 40, 40))
    expected = attend(q, k, v, pattern)
    with torch.autocast("cpu", torch.bfloat16):
        found = attend(q, k, v, pattern)
    assert torch.equal(found, expected)
