"""Windows, sums of patterns, and queries and keys that begin anywhere, against their dense definitions."""

from __future__ import annotations

import math
import pickle
import random
import sys
import warnings
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

import processes
from conformance import Conformance, excesses, random_calls, survivors
from dilated_attention import (
    BlockLayout,
    Dilated,
    Sum,
    UnsupportedError,
    Window,
    attention,
    dilated_attention,
    explain,
    functional,
    operators,
)
from dilated_attention.backends import cpu
from dilated_attention.backends.reference import attend
from dilated_attention.call import Call
from dilated_attention.decoding import cached_attention
from dilated_attention.merge import with_sinks
from dilated_attention.parallel import exchange_plan, over_mesh, sequence_range, traffic
from dilated_attention.parallel.comm import Traffic, link_of
from dilated_attention.parallel.partition import Sharding, balanced_bounds, rank_groups
from dilated_attention.plan import plan_of
from dilated_attention.scores import Scores
from tolerances import TOLERANCE, relative_error

BACKENDS = ["native", "reference", *(() if cpu.missing() else ("cpu",))]


def seen(queries, keys, before, after, rate=1, leading=0, is_causal=False, q_start=0, k_start=0):
    """Return which keys a window shows, from its definition: bool, `(queries, keys)`."""
    p, j = torch.arange(queries)[:, None] + q_start, torch.arange(keys) + k_start
    step, rest = (j - p) // rate, (j - p) % rate
    shown = (rest == 0) & (-before <= step) & (step <= after)
    shown |= (p < leading) | (j < leading)
    return shown & (j <= p) if is_causal else shown


def errors_of_capped_windows(backend, q, k, v, scale):
    """Errors over their bars of a window with leading tokens, hidden keys, dropout and a softcap together."""
    batch, tokens = q.shape[:2]
    hidden = torch.rand(batch, tokens) < 0.2
    counts = seen(tokens, tokens, 20, 3, leading=5) & ~hidden[:, None, None]

    def run(*inputs):
        torch.manual_seed(0)
        return attention(
            *inputs, Window(20, 3, leading=5), key_padding_mask=hidden, dropout_p=0.3, scale=scale, softcap=0.5,
            return_lse=True, backend=backend,
        )  # fmt: skip

    keep = survivors(q, k, 0.3, 0, 0)
    counts = counts.int().expand(-1, k.shape[2], -1, -1)
    return excesses(run, (q, k, v), counts, scale=scale, softcap=0.5, keep=keep, dropout_p=0.3)


class OfWindow(Conformance):
    seq_len = 150
    kv_heads = 2
    pattern: Window
    is_causal = False

    def run(self, q, k, v):
        return attention(q, k, v, self.pattern, is_causal=self.is_causal, return_lse=True)

    def counts(self):
        x = self.pattern
        shown = seen(150, 150, x.before, x.after, x.rate, x.leading, self.is_causal)
        return shown.int().expand(self.kv_heads, -1, -1)


class TestWindowBefore(OfWindow):
    pattern = Window(37)
    is_causal = True


class TestWindowOnBothSides(OfWindow):
    pattern = Window(20, 11)


class TestOwnTokenAlone(OfWindow):
    pattern = Window(0)


class TestWiderThanTheSequence(OfWindow):
    pattern = Window(500)


class TestRate(OfWindow):
    pattern = Window(4, 2, rate=7)


class TestLeading(OfWindow):
    pattern = Window(9, leading=40)
    is_causal = True


class TestLeadingAndRate(OfWindow):
    pattern = Window(3, leading=5, rate=2)


@st.composite
def calls(draw):
    """A call of random patterns, positions and options, as (shape, pattern, options, seed)."""
    choose = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    keys = choose(1, 2, 17, 70, 130, 200)
    window = Window(choose(0, 1, 7, 64, 300), choose(None, 0, 30), rate=choose(1, 1, 2, 3), leading=choose(0, 0, 1, 50))
    dilated = Dilated((choose(4, 7, 64), choose(30, 128)), (1, choose(2, 3)))
    pattern = choose(window, dilated, window + dilated, Window(2) + (dilated + window))
    queries, options = keys, {"is_causal": choose(True, False), "scale": choose(None, -0.4, 0.0)}
    if choose(True, False):
        k_start, first = choose(0, 3, 40), draw(st.integers(0, keys - 1))
        queries = draw(st.integers(1, keys - first))
        options |= {"k_start": k_start, "q_start": max(0, k_start + first + choose(0, 0, -5, 90))}
    if softcap := choose(None, None, 0.5, 5.0):
        options["softcap"] = softcap
    hidden = choose(False, True)
    kv_heads, ratio = choose(1, 2, 3), choose(1, 2)
    return (choose(1, 2), queries, keys, kv_heads * ratio, kv_heads, choose(8, 24, 64)), pattern, options, hidden


def check(call, backend):
    (batch, queries, keys, heads, kv_heads, dim), pattern, options, hidden = call
    dtype = torch.float32 if backend in ("cpu", "triton") else torch.float64
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(batch, n, h, dim, generator=generator, dtype=torch.float64).to(dtype)
        for n, h in ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    )
    mask = torch.rand(batch, keys, generator=generator) < 0.3 if hidden else None
    q_start, k_start = options.get("q_start", 0), options.get("k_start", 0)
    counts = torch.zeros(kv_heads, queries, keys, dtype=torch.int32)
    for term in pattern.terms if isinstance(pattern, Sum) else (pattern,):
        if isinstance(term, Window):
            counts += seen(
                queries, keys, term.before, term.after, term.rate, term.leading, options["is_causal"], q_start, k_start
            ).int()
            continue
        p, j = torch.arange(queries) + q_start, torch.arange(keys) + k_start
        for w, r, offsets in zip(term.segment_lengths, term.dilation_rates, term.offset_table(kv_heads), strict=True):
            for head, offset in enumerate(offsets):
                shown = (p[:, None] // w == j // w) & (p % w % r == offset)[:, None] & (j % w % r == offset)
                counts[head] += (shown & (j <= p[:, None]) if options["is_causal"] else shown).int()
    counts = counts.expand(batch, -1, -1, -1)
    if mask is not None:
        counts = counts * ~mask[:, None, None]
    errors = excesses(
        lambda q, k, v: attention(
            q, k, v, pattern, key_padding_mask=mask, return_lse=True, backend=backend, **options
        ),
        (q, k, v), counts, scale=dim**-0.5 if options["scale"] is None else options["scale"],
        softcap=options.get("softcap", 0.0), gradient_of=("out", "lse"),
    )  # fmt: skip
    assert all(error <= 1 for error in errors.values()), errors


@pytest.mark.parametrize("backend", BACKENDS)
@random_calls(30)
@given(call=calls())
def test_random_calls(backend, call):
    check(call, backend)


def test_a_window_is_a_value():
    window = Window(511, 0, rate=2, leading=4)
    assert window == Window(511, 0, rate=2, leading=4)
    assert len({window, pickle.loads(pickle.dumps(window)), Window(511)}) == 2
    assert repr(Window(3)) == "Window(before=3, after=3, rate=1, leading=0)"
    for wrong in ({"before": -1}, {"before": 2, "after": 1.5}, {"before": 2, "rate": 0}, {"before": 2, "leading": -1}):
        with pytest.raises(ValueError, match=list(wrong)[-1]):
            Window(**wrong)


def test_a_sum_is_a_value():
    near, far, layout = Window(1), Dilated([8], [2]), BlockLayout.local(16, 2, 4)
    assert Sum([near, far]) == near + far
    assert len({Sum([near, far]), near + far}) == 1
    assert Sum((near + layout, far)) == near + layout + far
    released = Dilated([8], [2], compat="torchscale")
    for terms, message in (
        ((), "at least two"), ([near], "at least two"), (near, "at least two"), ((near, 3), "got int"),
        ((released, near), "compat='torchscale' in a sum"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            Sum(terms)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "pattern", [Window(5), Window(3, 1, rate=2), Window(2, leading=6), Window(4) + Dilated([8], [1])]
)
def test_coverage_flops_and_pictures(pattern, is_causal):
    terms = pattern.terms if isinstance(pattern, Sum) else (pattern,)
    counts = torch.zeros(40, 40, dtype=torch.int64)
    for x in terms:
        if isinstance(x, Window):
            counts += seen(40, 40, x.before, x.after, x.rate, x.leading, is_causal)
        else:
            block = torch.block_diag(*[torch.ones(8, 8, dtype=torch.int64)] * 5)
            counts += block.tril() if is_causal else block
    assert torch.equal(pattern.coverage(40, 2, is_causal), counts.sum(-1).expand(2, -1))
    assert pattern.flops(40, 2, 16, is_causal) == 4 * 16 * 2 * counts.sum()
    (image,) = pattern.plot(40, is_causal=is_causal).get_images()
    assert torch.equal(torch.as_tensor(image.get_array()).round().long(), counts)


@pytest.mark.parametrize("options", [{"offsets": [[0, 1, 2, 3], [1, 0, 1, 0]]}, {"head_groups": True}], ids=str)
def test_a_sum_is_drawn_for_the_heads_that_its_terms_need(options):
    dilated = Dilated([8, 16], [4, 2], **options)
    heads = 4 if "offsets" in options else 2
    (image,) = (Window(1) + dilated).plot(16, head=1).get_images()
    parts = [x.plot(16, head=1, num_heads=heads).get_images()[0].get_array() for x in (Window(1), dilated)]
    assert (image.get_array() == parts[0] + parts[1]).all()
    with pytest.raises(ValueError, match=f"head must lie in \\[0, {heads}\\); got {heads}"):
        (Window(1) + dilated).plot(16, head=heads, num_heads=heads)


@pytest.mark.parametrize("tokens", [1500, 1 << 16])
def test_the_picture_of_a_long_sum_has_the_branches_of_every_head(tokens):
    """A pixel holds many rows, of which few are drawn: not those of one residue alone."""
    window, dilated = Window(0), Dilated([tokens], [4])
    of_sum, *parts = (
        x.plot(tokens, head=1, num_heads=5).get_images()[0].get_array() for x in (window + dilated, window, dilated)
    )
    assert abs(of_sum - sum(parts)).mean() < 1e-3 * of_sum.mean()


@pytest.mark.parametrize("is_causal", [False, True])
def test_coverage_and_flops_of_sums_with_layouts(is_causal):
    layout, product = BlockLayout.random(40, 0.4, 0, 8), Dilated([8], [2]) * BlockLayout.local(4, 2, 2)
    pattern = Window(5) + layout + product + Window(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = [Window(5).coverage(40, 2, is_causal), Window(2).coverage(40, 2, is_causal)]
        parts.append((layout.causal() if is_causal else layout).coverage(40, 2))
        block = product.layout.dense_mask()[0, 0].long()
        inside = (block.tril() if is_causal else block).sum(1)
        parts.append(torch.zeros(2, 5, 8, dtype=torch.int64))
        for head in range(2):
            parts[-1][head, :, head::2] = inside
    expected = sum([x.reshape(2, 40) for x in parts])
    assert torch.equal(pattern.coverage(40, 2, is_causal), expected)
    assert pattern.flops(40, 2, 16, is_causal) == 4 * 16 * expected.sum()
    with pytest.raises(UnsupportedError, match="give each of pattern\\.parts"):
        pattern.plot(40)


def test_nothing_is_copied_for_some_rows_of_a_layout():
    q, k = torch.randn(1, 2, 2, 8), torch.randn(1, 64, 2, 8)
    with mock.patch.object(functional, "pad", side_effect=functional.pad) as pad:
        attention(q, k, k, BlockLayout.local(64, 8, 8), is_causal=True, q_start=62)
    pad.assert_not_called()


def test_sums_with_layouts():
    q, k, v = (torch.randn(2, 64, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    layout = BlockLayout.random(64, 0.4, 0, 16)
    counts = seen(64, 64, 5, 5).int() + layout.dense_mask()[0].int()
    for pattern in (Window(5) + layout, layout + Window(5)):
        errors = excesses(
            lambda q, k, v, pattern=pattern: attention(q, k, v, pattern, return_lse=True), (q, k, v),
            counts.expand(4, -1, -1), scale=8**-0.5, gradient_of=("out", "lse"),
        )  # fmt: skip
        assert all(error <= 1 for error in errors.values()), errors
    with pytest.raises(UnsupportedError, match=r"Window\(\.\.\.\) \* BlockLayout"):
        Window(5) * layout
    with pytest.raises(ValueError, match="a term of a sum must be"):
        Window(5) + 3
    torch.manual_seed(3)
    out, lse = attention(q, k, v, Window(5) + layout, dropout_p=0.3, return_lse=True)
    keep = survivors(q, k, 0.3, 0, 3)
    wanted = attend(q, k, v, counts.expand(4, -1, -1), Scores(8**-0.5, dropout_p=0.3), keep=keep)
    torch.testing.assert_close(out, wanted[0])
    torch.testing.assert_close(lse, wanted[1].transpose(1, 2))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pattern", [Window(30), Dilated([16, 64], [1, 2]), Window(9, leading=3) + Dilated([64], [4])])
def test_a_prompt_in_chunks_and_a_token_at_a_time(pattern, backend):
    dtype = torch.float32 if backend == "cpu" else torch.float64
    q, k, v = (torch.randn(1, 100, heads, 16, dtype=dtype) for heads in (4, 2, 2))
    whole = attention(q, k, v, pattern, is_causal=True, backend=backend)
    edges = [0, 32, 33, 64, 99, 100]
    for start, stop in pairwise(edges):
        part = attention(
            q[:, start:stop], k[:, :stop], v[:, :stop], pattern, is_causal=True, q_start=start, backend=backend
        )
        torch.testing.assert_close(part, whole[:, start:stop], rtol=0, atol=1e-6)
        forgot = max(0, start - 64)  # a cache that holds what some later query sees
        if isinstance(pattern, Window):
            part = attention(
                q[:, start:stop], k[:, forgot:stop], v[:, forgot:stop], pattern, is_causal=True, q_start=start,
                k_start=forgot, backend=backend,
            )  # fmt: skip
            torch.testing.assert_close(part, whole[:, start:stop], rtol=0, atol=1e-6)
    if isinstance(pattern, Dilated):
        torch.testing.assert_close(cached_attention(q[:, 70:], k, v, pattern), whole[:, 70:], rtol=0, atol=1e-6)


LAYOUT = BlockLayout.local(100, 24, 8) | BlockLayout.global_(100, 9, 8)
WITH_LISTS_A_HEAD = BlockLayout.stack([BlockLayout.random(104, 0.4, seed, (8, 16)) for seed in range(4)], over="heads")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [None, (90, 37, 100)])
@pytest.mark.parametrize("layout", [LAYOUT, WITH_LISTS_A_HEAD])
def test_rows_of_a_layout_at_positions(layout, lengths, is_causal, backend):
    """Out, lse and gradients of some rows equal these of the whole sequence; rows past the end are NaN in q."""
    dtype = torch.float32 if backend == "cpu" else torch.float64
    tensors = [torch.randn(3, 100, heads, 16, dtype=dtype) for heads in (4, 2, 2)]
    options = {"is_causal": is_causal, "return_lse": True, "backend": backend}
    for (start, stop), (first, last) in (
        ((0, 1), (0, 100)),
        ((31, 58), (0, 100)),
        ((72, 100), (16, 92)),
        ((9, 80), (41, 50)),
    ):
        results = []
        for whole in (True, False):
            q, k, v = (x.clone().requires_grad_() for x in tensors)
            if lengths is not None:
                options["lengths"] = torch.tensor(lengths)
            if whole:
                mask = torch.ones(3, 100, dtype=torch.bool)
                mask[:, first:last] = False
                out, lse = attention(q, k, v, layout.prefix(100), key_padding_mask=mask, **options)
                out, lse = out[:, start:stop], lse[:, :, start:stop]
            else:
                q_, rest = q[:, start:stop], {"q_start": start, "k_start": first}
                if lengths is not None:
                    past = torch.arange(start, stop) >= options["lengths"][:, None]
                    q_ = q_.masked_fill(past[..., None, None], torch.nan)
                out, lse = attention(q_, k[:, first:last], v[:, first:last], layout, **options, **rest)
            seen = lse.isfinite()
            loss = (out * torch.linspace(-1, 1, 16, dtype=dtype)).sum() + lse.masked_fill(~seen, 0.0).sum()
            results.append((out, lse, *torch.autograd.grad(loss, (q, k, v))))
        for expected, found in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 if backend == "cpu" else 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", [LAYOUT, WITH_LISTS_A_HEAD])
def test_dropout_in_some_rows_of_a_layout(layout, backend):
    q, k, v = (torch.randn(2, layout.seq_len, heads, 16) for heads in (4, 2, 2))
    results = []
    for rows in (slice(0, layout.seq_len), slice(37, 61)):
        leaves = q[:, rows].clone().requires_grad_(), k.clone().requires_grad_(), v.clone().requires_grad_()
        torch.manual_seed(0)
        out, _ = attention(*leaves, layout, dropout_p=0.3, q_start=rows.start, return_lse=True, backend=backend)
        shown = out if len(results) else out[:, 37:61]
        dq, dk, dv = torch.autograd.grad(shown.square().sum(), leaves)
        results.append((shown, dq if len(results) else dq[:, 37:61], dk, dv))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("pattern", [Window(30), Dilated([16, 64], [1, 2]) + Window(3, leading=2)])
def test_samples_of_different_lengths_at_positions(pattern):
    q, k, v = (torch.randn(3, 100, heads, 16, dtype=torch.float64) for heads in (4, 2, 2))
    lengths = torch.tensor([0, 61, 100], dtype=torch.uint16)
    whole = attention(q, k, v, pattern, is_causal=True, lengths=lengths, return_lse=True)
    for start, stop in ((0, 100), (40, 72), (99, 100)):
        out, lse = attention(
            q[:, start:stop], k[:, :stop], v[:, :stop], pattern, is_causal=True, lengths=lengths,
            q_start=start, return_lse=True,
        )  # fmt: skip
        torch.testing.assert_close(out, whole[0][:, start:stop], rtol=0, atol=1e-12)
        torch.testing.assert_close(lse, whole[1][:, :, start:stop], rtol=0, atol=1e-12)


def test_explain_counts_the_keys_at_positions():
    q, k = torch.empty(1, 8, 2, 16), torch.empty(1, 96, 2, 16)
    found = explain(q, k, k, Window(9), is_causal=True, q_start=88)
    assert found.flops == 4 * 16 * 2 * 8 * 10


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_softcap(backend):
    q, k, v = (torch.randn(2, 40, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    out, lse = attention(q, k, v, Window(7), is_causal=True, softcap=0.5, return_lse=True, backend=backend)
    wide_k, wide_v = (x.repeat_interleave(2, 2) for x in (k, v))
    scores = 0.5 * (torch.einsum("bnhd,bmhd->bhnm", q, wide_k) * 8**-0.5 / 0.5).tanh()
    scores = scores.masked_fill(~seen(40, 40, 7, 7, is_causal=True), -torch.inf)
    expected = torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), wide_v)
    pairs = (out, lse), (expected, scores.logsumexp(-1))
    for x, y in zip(*pairs, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
    weights = [torch.randn_like(x) for x in pairs[0]]
    found, wanted = (
        torch.autograd.grad([(x * w).sum() for x, w in zip(pair, weights, strict=True)], (q, k, v)) for pair in pairs
    )
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
    for wrong in (0, -1.0, float("inf"), "much"):
        with pytest.raises(ValueError, match="softcap must be"):
            attention(q, k, v, Window(7), softcap=wrong)


def test_what_is_refused():
    q, k, v = (torch.randn(1, n, 2, 8) for n in (4, 16, 16))
    with pytest.raises(ValueError, match="For fewer queries than keys give q_start"):
        attention(q, k, v, Window(3))
    layout = BlockLayout.local(16, 4, 4)
    for pattern, options, error, words in (
        (Window(3), {"cu_seqlens": torch.tensor([0, 4])}, ValueError, "cu_seqlens are the edges .* got 4 and 16"),
        (layout, {"cu_seqlens": torch.tensor([0, 4])}, ValueError, "cu_seqlens are the edges .* got 4 and 16"),
        (Dilated([16], [1]) * layout.prefix(15), {}, ValueError, "for 15 tokens, but a segment has 16"),
        (
            Window(3) + Dilated([16], [1]) * (lambda n: layout.prefix(n)),
            {"lengths": torch.tensor([4])},
            UnsupportedError,
            "lengths for a product with a function of layouts with q_start",
        ),
        (layout, {"k_start": 1}, ValueError, "layout is for 16 tokens, but q or k reaches to position 17"),
        (
            Window(3),
            {"lengths": torch.tensor([-1])},
            ValueError,
            r"lengths must hold non-negative integers; got \[-1\]",
        ),
        (Window(3), {"lengths": torch.tensor([4, 4])}, ValueError, "lengths must hold 1 integers"),
    ):
        with pytest.raises(error, match=words):
            attention(q, k, v, pattern, q_start=12, **options)
    with pytest.raises(UnsupportedError, match="compat with q_start"):
        dilated_attention(q, k, v, [8], [1], compat="torchscale", q_start=12)
    with pytest.raises(ValueError, match=r"q_start must be an integer from 0 to .*; got -1"):
        attention(q, k, v, Window(3), q_start=-1)


def test_a_window_costs_what_it_shows():
    q = torch.empty(1, 1 << 20, 2, 64, device="meta")
    found = explain(q, q, q, Window(511), is_causal=True)
    assert (
        found.flops == Window(511).flops(1 << 20, 2, 64, is_causal=True) == 4 * 64 * 2 * (512 * (1 << 20) - 511 * 256)
    )
    assert len(found.groups) == 1
    one = plan_of(Window(511).branches(2), (100_000, 100_001), (0, 100_001), is_causal=True)
    assert [group.keys.count for group in one.groups] == [512]
    assert not any(group.banded for group in one.groups)


def test_ragged_batches_compilation_and_transforms():
    q, k, v = (torch.randn(2, 50, 2, 8, requires_grad=True) for _ in range(3))
    out = attention(q, k, v, Window(6), lengths=torch.tensor([50, 31]), is_causal=True)
    alone = attention(q[1:, :31], k[1:, :31], v[1:, :31], Window(6), is_causal=True)
    torch.testing.assert_close(out[1:, :31], alone, rtol=0, atol=1e-6)
    packed = attention(
        *(torch.cat([x[:1, :50], x[1:, :31]], 1) for x in (q, k, v)), Window(6), cu_seqlens=torch.tensor([0, 50, 81]),
        is_causal=True,
    )  # fmt: skip
    torch.testing.assert_close(packed[:, 50:], alone, rtol=0, atol=1e-6)
    mapped = torch.func.vmap(lambda q, k, v: attention(q, k, v, Window(6)))(
        *(x[None].expand(3, -1, -1, -1, -1) for x in (q, k, v))
    )
    torch.testing.assert_close(mapped[1], attention(q, k, v, Window(6)), rtol=0, atol=1e-6)
    gradient = torch.func.grad(lambda q: attention(q, k, v, Window(6)).square().sum())(q)
    torch.testing.assert_close(gradient, torch.autograd.grad(attention(q, k, v, Window(6)).square().sum(), q)[0])


def test_compiles_in_one_graph(compiling_python):
    compiling_python(
        """
        import torch
        from dilated_attention import Dilated, Window, attention

        q, k, v = (torch.randn(1, 60, 2, 8, requires_grad=True) for _ in range(3))
        pattern = Window(5, leading=2) + Dilated((16,), (1,))

        def step(q, k, v):
            return attention(q[:, 40:], k, v, pattern, is_causal=True, q_start=40)

        compiled = torch.compile(step, fullgraph=True)
        torch.testing.assert_close(compiled(q, k, v), step(q, k, v))
        torch.testing.assert_close(
            torch.autograd.grad(compiled(q, k, v).square().sum(), k)[0],
            torch.autograd.grad(step(q, k, v).square().sum(), k)[0],
        )

        class Newest(torch.nn.Module):
            def forward(self, q, k, mask):
                options = {"lengths": torch.tensor([22, 9]), "key_padding_mask": mask, "is_causal": True}
                return attention(q, k, k, Window(5), q_start=k.shape[1] - 4, **options)

        def inputs(length):
            return torch.randn(2, 4, 2, 8), torch.randn(2, length, 2, 8), torch.rand(2, length) < 0.3

        length = torch.export.Dim("length", min=6, max=512)
        program = torch.export.export(Newest(), inputs(20), dynamic_shapes=({}, {1: length}, {1: length})).module()
        for x in map(inputs, (20, 33, 100)):
            torch.testing.assert_close(program(*x), Newest()(*x))
        """
    )


# ---- over a mesh


@dataclass(frozen=True)
class Sharded:
    """One call over ranks. bounds: the edges of uneven shards."""

    pattern: Any
    seq_len: int
    bounds: tuple[int, ...] | None = None
    batch: int = 1
    heads: tuple[int, int] = (4, 2)
    dtype: torch.dtype = torch.float64
    hidden: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def tensors(self):
        """q, k, v, sinks; and the gradients of out and lse."""
        (heads, kv_heads), generator = self.heads, torch.Generator().manual_seed(self.seq_len)
        shapes = [(self.batch, self.seq_len, n, 8) for n in (heads, kv_heads, kv_heads, heads)]
        shapes += [(heads,), (self.batch, heads, self.seq_len)]
        q, k, v, d_out, sinks, d_lse = (torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes)
        return [x.to(self.dtype) for x in (q, k, v, sinks)], [d_out.to(self.dtype), d_lse]

    def attend(self, tensors, own, **mesh):
        """out, lse and the call, of the whole sequence or, over a mesh, of a shard."""
        *tensors, sinks = tensors
        torch.manual_seed(1)  # the ranks draw one seed of dropout
        options = self.options | mesh
        if self.hidden:
            options["key_padding_mask"] = (torch.arange(self.seq_len)[None] % 5 == 1).expand(self.batch, -1)[:, own]
        if not mesh or self.bounds is None:
            return attention(*tensors, self.pattern, sinks=sinks, return_lse=True, **options)
        call = Call.of(*tensors, self.pattern, **options)
        seed = torch.randint(-(1 << 63), (1 << 63) - 1, ()) if call.scores.dropout_p else None
        call = replace(call, shards=replace(call.shards, bounds=self.bounds), seed=seed)
        out, lse = operators.attend(*tensors, call)
        return with_sinks(out, lse, sinks), lse.transpose(1, 2)


def results(case, own, **mesh):
    """out, lse and the gradients of q, k, v and the sinks, of the rows `own`."""
    tensors, (d_out, d_lse) = case.tensors()
    leaves = [*(x[:, own] for x in tensors[:3]), tensors[3]]
    leaves = [x.clone().requires_grad_() for x in leaves]
    out, lse = case.attend(leaves, own, **mesh)
    gradients = torch.autograd.grad((out, lse), leaves, (d_out[:, own], d_lse[:, :, own].to(lse.dtype)))
    return [x.detach() for x in (out, lse.transpose(1, 2), *gradients)]


def sharded_calls(size, number):
    """Random windows and sums over `size` ranks, as (case, transport)."""
    draw = random.Random(size)
    for _ in range(number):
        seq_len = draw.choice([1, size, 23, 60, 90])
        reach = lambda: draw.choice([0, 1, 3, 9, 30, 1 << 61])  # noqa: E731
        window = Window(reach(), reach(), rate=draw.choice([1, 1, 2, 7]), leading=draw.choice([0, 0, 2, 25]))
        dilated = Dilated((draw.choice([4, 16]), draw.choice([30, 128])), (1, draw.choice([2, 5])))
        near = Window(draw.choice([2, 40]))
        pattern = draw.choice([window, window, window + dilated, dilated + near, window + near])
        options = {"is_causal": draw.choice([True, False]), "scale": draw.choice([None, -0.4])}
        bounds, batch, ragged = None, draw.choice([1, 2]), draw.choice(["none", "none", "bounds", "lengths", "packed"])
        if ragged == "bounds":
            bounds = (0, *sorted(draw.randint(0, seq_len) for _ in range(size - 1)), seq_len)
        elif ragged == "lengths":
            options["lengths"] = torch.tensor([draw.randint(0, seq_len) for _ in range(batch)])
        elif ragged == "packed":
            batch = 1
            options["cu_seqlens"] = torch.tensor([0, *sorted(draw.randint(0, seq_len) for _ in range(2)), seq_len])
        hidden = bounds is None and draw.choice([True, False, False])
        if draw.random() < 0.3 and ragged != "lengths":
            options["dropout_p"] = 0.3
        elif draw.random() < 0.3 and not hidden:
            options["softcap"] = 0.7
        kv_heads = draw.choice([1, 2, size])
        heads = kv_heads * draw.choice([1, 2]), kv_heads
        served = ["auto", "exchange", "ring", "all_gather", *(["ulysses"] if kv_heads == size else [])]
        yield Sharded(pattern, seq_len, bounds, batch, heads, torch.float64, hidden, options), draw.choice(served)


def over_ranks(calls):
    """For each call this rank's results, what forward and backward moved, and what was counted to move."""
    mesh, found = dist.group.WORLD, []
    link, rank = link_of(mesh), dist.get_rank()
    for case, transport in calls:
        own = slice(*(case.bounds[rank : rank + 2] if case.bounds else sequence_range(case.seq_len, mesh)))
        link.traffic = Traffic()
        arguments = {"mesh": mesh, "seq_len": case.seq_len, "transport": transport}
        pieces = results(case, own, **arguments)
        counted = None
        if not {"lengths", "dropout_p"} & case.options.keys() and not case.hidden and transport != "auto":
            sizes = case.seq_len, case.heads[0], dist.get_world_size(), rank
            samples = case.options.get("cu_seqlens")
            if samples is None:
                counted = exchange_plan(
                    case.pattern, *sizes, num_kv_heads=case.heads[1], head_dim=8, batch=case.batch, dtype=case.dtype,
                    is_causal=case.options["is_causal"], transport=transport, bounds=case.bounds,
                )  # fmt: skip
            else:
                q, k, v = (x[:, own] for x in case.tensors()[0][:3])
                counted = over_mesh.account(Call.of(q, k, v, case.pattern, **case.options, **arguments), q, k)[1]
        found.append(([x.numpy() for x in pieces], link.traffic, counted))
    return found


def check_ranks(calls, answers):
    for (case, transport), *ranks in zip(calls, *answers, strict=True):
        expected = results(case, slice(None))
        *whole, sinks = zip(*[[torch.from_numpy(x) for x in rank[0]] for rank in ranks], strict=True)
        found = [*(torch.cat(pieces, 1) for pieces in whole), torch.stack(sinks).sum(0)]
        for name, x, right in zip(("out", "lse", "dq", "dk", "dv", "sinks"), found, expected, strict=True):
            assert relative_error(x, right) <= TOLERANCE[case.dtype], (name, case, transport)
        for _, moved, plan in ranks:
            if plan is not None:
                assert moved.bytes_sent == plan.bytes_sent + plan.backward_bytes_sent, (case, transport)
                assert moved.bytes_received == plan.bytes_received + plan.backward_bytes_received, (case, transport)


@pytest.mark.parametrize("size", [3, *(pytest.param(x, marks=pytest.mark.thorough) for x in (4, 7))])
def test_random_calls_over_ranks_equal_one_device_and_move_the_bytes_of_the_formula(size):
    calls = list(sharded_calls(size, 30))
    check_ranks(calls, processes.run(size, over_ranks, calls))


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.thorough)], ids=str)
def test_every_transport_in_both_dtypes(dtype):
    both = Window(9, 4, leading=3) + Dilated((16, 48), (1, 3))
    patterns = [Window(70), Window(2, 3, rate=7), both, Window(5) + BlockLayout.local(70, 9, 16)]
    calls = [
        (Sharded(pattern, 70, options={"is_causal": causal}, dtype=dtype), transport)
        for pattern in patterns for causal in (True, False)
        for transport in ("auto", "exchange", "ring", "all_gather", "ulysses")
    ]  # fmt: skip
    check_ranks(calls, processes.run(2, over_ranks, calls))


def test_a_rank_receives_what_its_queries_see():
    for before, after, is_causal in ((4095, 0, True), (4095, 900, False), (300_000, 0, True)):
        window, tokens = Window(before, after), 1 << 30
        plan = exchange_plan(window, tokens, 12, 8192, 5000, is_causal=is_causal, head_dim=64)
        assert plan.rows_received == plan.rows_sent == 12 * (before + after)
        assert plan.peers_received == -(-before // (1 << 17)) + (after > 0)
        rows = 12 * (before + after) + plan.peers_received * traffic.seal_rows(256)
        assert plan.bytes_received == plan.bytes_sent == rows * 256
    last = exchange_plan(Window(4095), 1 << 30, 12, 8192, 8191, is_causal=True)
    assert (last.rows_received, last.rows_sent, last.peers_received) == (12 * 4095, 0, 1)
    # 4 tokens a shard: those of 4 residues modulo 7, 3 of each; 100 tokens: 3 of each residue
    assert exchange_plan(Window(3, rate=7), 400, 1, 100, 50, is_causal=True).rows_received == 3 * 4
    assert exchange_plan(Window(3, rate=7), 400, 1, 4, 2, is_causal=True).rows_received == 3 * 7
    assert exchange_plan(Window(9, leading=5), 400, 1, 4, 2, is_causal=True).rows_received == 9 + 5
    assert exchange_plan(Window(9, leading=5), 400, 1, 4, 0).rows_received == 300  # leading tokens see all
    # a row that both terms show travels once: rows 150 to 199 of the segment, 191 to 199 of the window
    assert exchange_plan(Window(9) + Dilated((150,), (1,)), 400, 1, 4, 2, is_causal=True).rows_received == 50
    layout = BlockLayout.local(400, 20, 20)
    apart = [exchange_plan(x, 400, 2, 4, 2, is_causal=True).bytes_received for x in (Window(9), layout)]
    assert exchange_plan(Window(9) + layout, 400, 2, 4, 2, is_causal=True).bytes_received == sum(apart)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    "pattern", [Window(70, 5), Window(3, rate=11), Window(4, leading=130), Window(9) + Dilated([64], [2])]
)
def test_ranks_compute_together_what_one_device_does(pattern, is_causal):
    """A band of received rows is no rectangle: no pair is computed that nobody sees."""
    branches = pattern.branches(3)
    bounds = balanced_bounds(500, 7)
    sharding = Sharding(branches, bounds, is_causal)
    entries = sum(group.entries() for rank in range(7) for group in rank_groups(sharding, rank))
    assert 4 * 16 * entries == pattern.flops(500, 3, 16, is_causal)


def composed():
    """Explained, compiled in one graph and recomputed; and what ranks raise whose windows differ."""
    mesh, rank, found = dist.group.WORLD, dist.get_rank(), []
    options = {"is_causal": True, "mesh": mesh}
    q, k, v = (torch.randn(1, 30, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    pattern = Window(40, leading=2) + Dilated((16,), (1,))

    def gradient(attend):
        return torch.autograd.grad(attend(q, k, v).sin().sum(), k)[0]

    def attend(q, k, v):
        return attention(q, k, v, pattern, **options)

    plain = gradient(attend)
    found.append(torch.equal(gradient(torch.compile(attend, fullgraph=True, backend="aot_eager")), plain))
    again = gradient(lambda *x: torch.utils.checkpoint.checkpoint(attend, *x, use_reentrant=False))
    found.append(torch.equal(again, plain))
    found.append(explain(q, k, v, pattern, **options).exchange.rows_received == 2 * 30 * (rank > 0))
    try:
        attention(q, k, v, Window(40 + rank), **options)
    except ValueError as error:
        found.append("rank 1 has windows=((-41, 41),), elsewhere windows=((-40, 40),)" in str(error))
    return found


def test_composes_over_a_mesh():
    assert processes.run(2, composed) == [[True] * 4] * 2


def test_transports_of_windows():
    for pattern in (Window(5), Window(5) + Dilated((64,), (1,))):
        with pytest.raises(
            ValueError, match="transport='doubling' does not serve this call: doubling passes on all rows"
        ):
            exchange_plan(pattern, 64, 4, 4, 0, transport="doubling")
    # Leading tokens see the rows of all ranks, which the first would have to hold at once.
    first = exchange_plan(Window(5, leading=2), 64, 3, 16, 0, transport="auto")
    assert (first.transport, first.rows_received, first.rounds) == ("ring", 3 * 60, 15)
    assert exchange_plan(Window(5, leading=2), 64, 3, 16, 0, transport="auto", is_causal=True).transport == "exchange"


@pytest.mark.parametrize(
    "pattern",
    [Dilated((16,), (1,)), Window(3), Window(2**62, 2**62), Window(3, rate=2**30), BlockLayout.local(16, 4, 4)],
    ids=str,
)
@pytest.mark.parametrize("backend", ["auto", "native", "reference"])
def test_no_keys_yet(pattern, backend):
    for queries in (5, 0):
        q, k = torch.randn(1, queries, 2, 8), torch.randn(1, 0, 2, 8)
        out, lse = attention(q, k, k, pattern, q_start=0, backend=backend, return_lse=True)
        assert not out.any()
        assert torch.equal(lse, torch.full((1, 2, queries), -math.inf))


@pytest.mark.parametrize("backend", ["auto", "native", "reference"])
def test_numbers_beyond_any_sequence(backend):
    q, k, v = (torch.randn(1, 40, 2, 8, dtype=torch.float64) for _ in range(3))
    far = attention(q, k, v, Window(2**62, rate=2**30), backend=backend)
    assert torch.equal(far, v)
    whole = attention(q, k, v, Window(2**62), backend=backend)
    assert torch.allclose(whole, attention(q, k, v, Dilated((40,), (1,)), backend="reference"), atol=1e-12)


@pytest.mark.parametrize(("queries", "keys"), [(29, 22), (12, 8), (40, 3)])
@pytest.mark.parametrize("backend", ["auto", "native"])
def test_more_queries_than_keys(queries, keys, backend):
    q = torch.randn(2, queries, 4, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, keys, 2, 8, dtype=torch.float64)
    options = {"is_causal": True, "q_start": 0, "key_padding_mask": torch.rand(2, keys) < 0.4}
    for pattern in (Dilated((64,), (1,)), Dilated((8, 64), (1, 2)), Window(5)):
        found, expected = (attention(q, k, v, pattern, backend=x, **options) for x in (backend, "reference"))
        assert torch.allclose(found, expected, atol=1e-12)


if __name__ == "__main__":  # python tests/test_windows.py 5000: 5,000 random calls, each on one of the backends
    backends = st.sampled_from(BACKENDS)
    settings(max_examples=int(sys.argv[1]), deadline=None, database=None)(
        given(call=calls(), backend=backends)(check)
    )()
    print(f"{sys.argv[1]} random calls: no miss")


PLACES = {"whole": (0, 0, range(8)), "the last queries": (4, 0, range(4, 8)), "later keys": (0, 2, range(8)),
          "keys that end before": (9, 0, range(9, 12)), "no keys": (3, 0, range(3, 5))}  # fmt: skip


@pytest.mark.parametrize(("q_start", "k_start", "queries"), PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("pattern", [Window(20), Window(2) + BlockLayout.local(12, 2, 4)], ids=["window", "sum"])
def test_the_query_of_a_hidden_token_may_hold_anything(pattern, q_start, k_start, queries):
    """Its row of out is NaN if it sees a key; it passes no gradient, not even to sinks."""
    keys = range(k_start, k_start + (0 if queries == range(3, 5) else 8))
    q, k, v = (torch.randn(2, len(x), 4, 8) for x in (queries, keys, keys))
    hidden = torch.rand(2, len(keys)) < 0.4
    hidden[:, 5:6] = True
    at = [i for i, position in enumerate(queries) if position in keys]
    rows = torch.zeros(q.shape[:2], dtype=torch.bool)
    rows[:, at] = hidden[:, [queries[i] - k_start for i in at]]

    def run(q):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, torch.zeros(4))]
        out, lse = attention(
            *leaves[:3], pattern, sinks=leaves[3], is_causal=True, key_padding_mask=hidden, q_start=q_start,
            k_start=k_start, return_lse=True,
        )  # fmt: skip
        loss = out.masked_fill(rows[..., None, None], 0.0).square().sum()
        return out, lse, *torch.autograd.grad(loss, leaves)

    out, lse, *gradients = run(q)
    spoiled, spoiled_lse, *found = run(q.masked_fill(rows[..., None, None], torch.nan))
    seen = rows[..., None] & (lse.mT > -torch.inf)
    torch.testing.assert_close(spoiled, out.masked_fill(seen[..., None], torch.nan), equal_nan=True)
    torch.testing.assert_close(spoiled_lse.mT, lse.mT.masked_fill(seen, torch.nan), equal_nan=True)
    torch.testing.assert_close(found, gradients)


@pytest.mark.parametrize(("is_causal", "beyond"), [(True, 18), (False, 32)])
@pytest.mark.parametrize("backend", ["auto", "native", "reference"])
def test_keys_after_those_that_some_query_sees_may_hold_anything(backend, is_causal, beyond):
    """A cache has memory for tokens to come."""
    layout = BlockLayout.local(64, 8, 8)
    q, k, v = (torch.randn(1, n, 2, 8) for n in (8, 40, 40))
    for pattern in (layout, layout.causal(), layout + Window(3), Dilated([16], [1])):
        results = []
        for value in (0.0, torch.nan):
            leaves = [q.clone(), k.clone(), v.clone()]
            for x in leaves[1:]:
                x[:, beyond:] = value
            for x in leaves:
                x.requires_grad_()
            out = attention(*leaves, pattern, is_causal=is_causal, q_start=10, backend=backend)
            results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
        assert all(map(torch.equal, *results))


@pytest.mark.parametrize("queries", [(10, 18), (0, 8), (130, 141), (37, 38)])
@pytest.mark.parametrize("keys", [(0, 40), (90, 141), (100, 120), (16, 17)])
@pytest.mark.parametrize("block_size", [8, (4, 6), 1])
def test_a_part_of_a_layout_shows_what_the_whole_shows(queries, keys, block_size):
    whole = random_layout(141, block_size)
    part, row, column = whole.part(queries, keys)
    unit = 12
    assert part.seq_len <= queries[1] - queries[0] + keys[1] - keys[0] + 4 * unit
    some = slice(row, row + queries[1] - queries[0]), slice(column, column + keys[1] - keys[0])
    assert torch.equal(
        part.dense_mask()[0][(slice(None), *some)], whole.dense_mask()[0][:, slice(*queries), slice(*keys)]
    )
    rows = part.dense_mask()[0].any(-1).any(0).nonzero()[:, 0] // part.q_block
    assert ((rows >= row // part.q_block) & (rows <= (some[0].stop - 1) // part.q_block)).all()


@pytest.mark.parametrize("backend", ["reference", "native", "cpu"])
def test_a_layout_far_from_position_0(backend):
    """Nothing is padded up to there: the reference backend refuses a count matrix of a million tokens."""
    if backend == "cpu" and cpu.missing():
        pytest.skip(cpu.missing())
    far = 1_000_000 // 64 * 64
    q, k, v = (torch.randn(1, n, 2, 8) for n in (3, 200, 200))
    near, there = (
        attention(
            q, k, v, BlockLayout.local(start + 200, 70, 64), is_causal=True, q_start=start + 190, k_start=start,
            backend=backend,
        )
        for start in (0, far)
    )  # fmt: skip
    torch.testing.assert_close(near, there)


def random_layout(seq_len, block_size):
    q_block, k_block = (block_size, block_size) if isinstance(block_size, int) else block_size
    blocks = torch.rand(3, -(-seq_len // q_block), -(-seq_len // k_block)) < 0.4
    return BlockLayout.from_mask(blocks, seq_len, block_size)


@pytest.mark.parametrize("backend", ["reference", "native", "cpu"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("block_size", [8, (4, 6), 1])
def test_rows_and_columns_of_a_layout_at_positions(backend, is_causal, block_size):
    if backend == "cpu" and cpu.missing():
        pytest.skip(cpu.missing())
    dtype = torch.float64 if backend in ("native", "reference") else torch.float32
    layout = random_layout(141, block_size)
    for (first, last), (begin, end) in [((90, 101), (40, 141)), ((3, 9), (0, 141)), ((120, 121), (117, 133))]:
        q, k, v = (torch.randn(2, n, 3, 8, dtype=dtype) for n in (last - first, end - begin, end - begin))
        counts = layout.dense_mask()[0, :, first:last, begin:end].int()
        if is_causal:
            counts &= seen(last - first, end - begin, 200, 0, q_start=first, k_start=begin).int()
        errors = excesses(
            lambda q, k, v, at=(first, begin): attention(
                q, k, v, layout, is_causal=is_causal, q_start=at[0], k_start=at[1], backend=backend, return_lse=True
            ),
            (q, k, v), counts, scale=8**-0.5,
        )  # fmt: skip
        assert all(error <= 1 for error in errors.values()), errors


def counts_of_product(pattern, heads, queries, keys, is_causal):
    """Return how often a product shows each key to each query, from its definition: `(heads, queries, keys)` for heads
    of q, the queries and the keys at positions [start, stop)."""
    end = queries[1] if is_causal else max(queries[1], keys[1])
    table = pattern.dilated.offset_table(2)
    counts = torch.zeros(heads, max(queries[1], keys[1]), max(queries[1], keys[1]), dtype=torch.int32)
    branches = zip(pattern.dilated.segment_lengths, pattern.dilated.dilation_rates, table, strict=True)
    for (w, r, offsets), head in product(branches, range(heads)):
        for start in range(0, end, w):
            tokens = torch.arange(start + offsets[head * 2 // heads], min(start + w, end))[::r]
            layout = pattern.layout
            if len(tokens) and not isinstance(layout, BlockLayout):
                layout = layout(len(tokens))
            if len(tokens):
                shown = layout.prefix(len(tokens)).dense_mask()[0]
                counts[head, tokens[:, None], tokens] += shown[head if len(shown) > 1 else 0]
    if is_causal:
        counts.tril_()
    return counts[:, slice(*queries), slice(*keys)]


def layout_a_head(tokens):
    return BlockLayout.stack([BlockLayout.random(tokens, 0.5, seed, (3, 4)) for seed in range(4)], over="heads")


PRODUCTS = {
    "a function": Dilated([12, 40], [1, 3]) * (lambda n: BlockLayout.local(n, 5, 4)),
    "lists a head": Dilated([9, 30], [1, 2]) * layout_a_head,
    "causal": Dilated([12, 40], [1, 3]) * (lambda n: BlockLayout.local(n, 5, (2, 4), is_causal=True)),
    "masks of bits": Dilated([24], [2]) * BlockLayout.from_mask(torch.rand(12, 12) < 0.6, 12, (4, 3)),
    "one layout": Dilated([16, 32], [1, 2]) * BlockLayout.random(16, 0.6, 0, 4),
    "one segment": Dilated([10**9], [1]) * BlockLayout.random(200, 0.3, 0, (8, 16)),
}
SIDES = [
    ((0, 50), (0, 50)), ((49, 50), (0, 50)), ((70, 71), (8, 71)), ((5, 33), (20, 47)), ((90, 92), (0, 60)),
    ((3, 4), (70, 90)), ((12, 12), (0, 30)), ((12, 19), (4, 4)), ((11, 60), (13, 14)), ((40, 41), (0, 100)),
]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_at_positions(name, is_causal, backend):
    check_product(PRODUCTS[name], is_causal, backend, SIDES)


def check_product(pattern, is_causal, backend, sides):
    """Judge each result on the float64 oracle of the dense definition, gradients included."""
    dtype = torch.float64 if backend in ("native", "reference") else torch.float32
    for queries, keys in sides:
        q, k, v = (
            torch.randn(2, n, h, 8, dtype=dtype)
            for n, h in ((queries[1] - queries[0], 4), *((keys[1] - keys[0], 2),) * 2)
        )
        counts = counts_of_product(pattern, 4, queries, keys, is_causal)
        if not q.numel() or not k.numel():
            out, lse = attention(
                q,
                k,
                v,
                pattern,
                is_causal=is_causal,
                q_start=queries[0],
                k_start=keys[0],
                backend=backend,
                return_lse=True,
            )
            assert out.shape == q.shape
            assert not out.any()
            assert (lse == -math.inf).all()
            continue
        errors = excesses(
            lambda q, k, v, at=(queries[0], keys[0]): attention(
                q, k, v, pattern, is_causal=is_causal, q_start=at[0], k_start=at[1], backend=backend, return_lse=True
            ),
            (q, k, v), counts, scale=8**-0.5,
        )  # fmt: skip
        assert all(error <= 1 for error in errors.values()), (queries, keys, errors)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_product_of_one_segment_is_its_layout(backend):
    layout = BlockLayout.random(100, 0.4, 0, 8)
    q, k, v = (torch.randn(3, n, 2, 8) for n in (7, 60, 60))
    options = {"q_start": 41, "k_start": 5, "lengths": torch.tensor([100, 43, 20]), "backend": backend}
    for is_causal in (True, False):
        of_layout = attention(q, k, v, layout, is_causal=is_causal, **options)
        of_product = attention(q, k, v, Dilated([1 << 40], [1]) * layout, is_causal=is_causal, **options)
        torch.testing.assert_close(of_product, of_layout, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("starts", [(20, 20), (30, 17), (17, 30)])
@pytest.mark.parametrize(
    "pattern",
    [Window(9), Dilated([16, 64], [1, 2]), LAYOUT | BlockLayout.local(100, 3, 8), PRODUCTS["a function"],
     PRODUCTS["one layout"], Window(3) + PRODUCTS["lists a head"]],
)  # fmt: skip
def test_packed_samples_at_positions(pattern, starts, is_causal, backend):
    """Each sample has the out, lse and gradients that it has alone, whose queries and keys begin at the same
    positions; hidden keys and queries with NaN, too."""
    dtype = torch.float32 if backend == "cpu" else torch.float64
    edges = [0, 25, 25, 26, 66, 81]
    q, k, v = (torch.randn(1, 81, heads, 8, dtype=dtype) for heads in (4, 2, 2))
    hidden = torch.rand(1, 81) < 0.3
    if not isinstance(pattern, Sum):  # on the reference backend its merge would pass NaN on
        q[:, 40] = q[:, 24] = torch.nan
    options = {"is_causal": is_causal, "q_start": starts[0], "k_start": starts[1], "backend": backend}

    def results(parts, **more):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        outs = []
        for part in parts:
            out, lse = attention(
                *(x[:, part] for x in leaves),
                pattern,
                key_padding_mask=hidden[:, part],
                return_lse=True,
                **options,
                **more,
            )
            outs.append((out, lse.transpose(1, 2)))
        out, lse = (torch.cat(x, 1) for x in zip(*outs, strict=True))
        finite = out.isfinite().all(-1) & lse.isfinite()
        loss = out[finite].sin().sum() + lse[finite].square().sum()
        return out, lse, *torch.autograd.grad(loss, leaves)

    packed = results([slice(None)], cu_seqlens=torch.tensor(edges))
    alone = results([slice(*x) for x in pairwise(edges)])
    for found, expected in zip(packed, alone, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 if backend == "cpu" else 1e-12, equal_nan=True)


def test_positions_have_a_limit():
    q = torch.randn(1, 2, 1, 8)
    for backend in ("native", "reference"):
        with pytest.raises(ValueError, match=r"q_start.*from 0 to \d+"):
            attention(q, q, q, Window(3), q_start=2**63, backend=backend)
