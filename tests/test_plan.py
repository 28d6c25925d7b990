"""Closed-form plans, and what is derived from them: coverage, flops, explanations."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from conformance import band_of
from dilated_attention import BackendError, BlockLayout, Dilated, Product, Window, explain
from dilated_attention.backends.reference import count_matrix
from dilated_attention.plan import plan_dilated, plan_of, row_counts

PATTERNS = [
    Dilated((8,), (1,)),
    Dilated((8, 16, 64), (1, 2, 4)),
    Dilated((7, 11), (3, 5)),
    Dilated((8, 16), (2, 3), ((0, 1, -1, 0), (2, 2, 0, -1))),
    Dilated((8, 16), (1, 2), head_groups=True),
    Dilated((12, 24), (3, 6), "head_block"),
]


def test_a_plan_for_a_billion_tokens_has_few_groups():
    pattern = Dilated((2**11, 2**15, 2**20, 2**30), (1, 16, 512, 2**19))
    plan = plan_dilated(pattern.segment_lengths, pattern.dilation_rates, pattern.offset_table(8), 2**30 + 12345)
    assert len(plan.groups) <= 2 * 8 * 4
    assert plan.covered
    assert plan.nbytes < 2**16
    assert pattern.flops(2**30 + 12345, 8, 64) > 4 * 64 * 8 * 2**30 * 2**11


WINDOWS = [
    Window(5),
    Window(0, 3),
    Window(4, 0, rate=3),
    Window(100),
    Window(3, leading=7),
    Window(3, 1, rate=2, leading=5),
    Window(2) + Dilated((8, 16), (1, 2)),
]


def expanded(plan, kv_heads, queries, keys):
    """Return how often the groups of a plan show each key to each query."""
    counts = torch.zeros(kv_heads, queries, keys, dtype=torch.int32)
    for group in plan.groups:
        for segment in range(group.queries.segments):
            rows, columns = (
                side.start + segment * side.segment + side.stride * torch.arange(side.count)
                for side in (group.queries, group.keys)
            )
            for head in range(group.head, group.head + group.heads * group.head_stride, group.head_stride):
                counts[head, rows[:, None], columns] += band_of(group).int()
    return counts


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS + WINDOWS)
def test_a_plan_shows_what_the_definition_does(pattern, is_causal):
    branches = pattern.branches(4)
    for (q_start, queries), (k_start, keys) in (
        ((0, 61), (0, 61)), ((0, 1), (0, 1)), ((20, 30), (0, 61)), ((60, 1), (0, 61)), ((33, 28), (21, 40)),
        ((5, 20), (30, 10)), ((90, 4), (0, 61)),
    ):  # fmt: skip
        plan = plan_of(branches, (q_start, q_start + queries), (k_start, k_start + keys), is_causal)
        expected = count_matrix(
            *branches[:3], queries, is_causal=is_causal, bands=branches.bands, leading=branches.leading,
            starts=(q_start, k_start), num_keys=keys,
        )  # fmt: skip
        assert torch.equal(expanded(plan, 4, queries, keys), expected)
        assert plan.sizes.entries == expected.sum()
        assert not plan.covered or plan.groups


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("seq_len", [1, 7, 16, 61])
def test_coverage_flops_and_rows_are_those_of_the_definition(pattern, seq_len):
    branches = pattern.segment_lengths, pattern.dilation_rates, pattern.offset_table(4)
    counts = count_matrix(*branches, seq_len, is_causal=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        coverage = pattern.coverage(seq_len, 4)
    assert torch.equal(coverage, counts.sum(-1))
    blind = int((counts.sum(-1) == 0).sum())
    assert [str(w.message).split(" ")[0] for w in caught] == ([str(blind)] if blind else [])
    for is_causal in (False, True):
        causal_counts = count_matrix(*branches, seq_len, is_causal=is_causal)
        assert pattern.flops(seq_len, 4, 16, is_causal) == 4 * 16 * int(causal_counts.sum())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.equal(pattern.coverage(seq_len, 4, is_causal), causal_counts.sum(-1))
    assert row_counts(pattern.branches(4), seq_len) == {
        g.queries.count for g in plan_dilated(*branches, seq_len).groups
    }


def dense_product(product: Product, seq_len: int, heads: int, kv_heads: int) -> torch.Tensor:
    """Counts of a product from the definition, (heads, seq, seq)."""
    counts = torch.zeros(heads, seq_len, seq_len, dtype=torch.int64)
    dilated, ratio = product.dilated, heads // kv_heads
    branches = zip(dilated.segment_lengths, dilated.dilation_rates, dilated.offset_table(kv_heads), strict=True)
    for w, r, offsets in branches:
        for h in range(heads):
            for first in range(0, seq_len, w):
                tokens = torch.tensor(range(first + offsets[h // ratio], min(first + w, seq_len), r))
                if len(tokens):
                    mask = product.layout_of(len(tokens)).dense_mask()
                    counts[h, tokens[:, None], tokens] += mask[0, h % mask.shape[1]]
    return counts


PRODUCTS = [
    Dilated((40, 90), (1, 2)) * (lambda n: BlockLayout.local(n, 20, 16)),
    Dilated((40, 90), (1, 3)) * (lambda n: BlockLayout.random(n, 0.5, 0, (16, 32)).causal()),
    Dilated((64,), (2,)) * BlockLayout.from_mask(torch.tensor([[[1, 0], [0, 1]], [[1, 1], [0, 0]]] * 2) > 0, 32, 16),
]


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("product", PRODUCTS)
def test_coverage_flops_and_explanation_of_products(product, kv_heads):
    n = 128
    counts = dense_product(product, n, 4, kv_heads)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(product.coverage(n, 4, kv_heads), counts.sum(-1))
    for is_causal in (False, True):
        pairs = int((counts.tril() if is_causal else counts).sum())
        assert product.flops(n, 4, 16, is_causal, kv_heads) == 4 * 16 * pairs
        q, k = torch.empty(3, n, 4, 16), torch.empty(3, n, kv_heads, 16)
        assert explain(q, k, k, product, is_causal=is_causal).flops == 3 * 4 * 16 * pairs
    with pytest.raises(ValueError, match="num_kv_heads must divide num_heads=4; got 3"):
        product.flops(n, 4, 16, num_kv_heads=3)


@pytest.mark.parametrize("pattern", [PATTERNS[0], PRODUCTS[0], BlockLayout.local(32, 4, 8)])
def test_numbers_that_are_none(pattern):
    pattern.coverage(32, 1)  # what equals True may be in a cache
    for name, calls in {
        "num_heads": (lambda n: pattern.coverage(32, n), lambda n: pattern.flops(32, n, 8)),
        "head_dim": (lambda n: pattern.flops(32, 4, n),),
    }.items():
        for call in calls:
            for wrong in (-1, 0, 1.5, "4", True, None):
                with pytest.raises(ValueError, match=f"^{name} must be a positive integer; got {wrong!r}$"):
                    call(wrong)
    with pytest.raises(ValueError, match="is_causal must be a bool; got 'no'"):
        pattern.flops(32, 4, 8, "no")
    for call in (lambda n: pattern.coverage(n, 4), lambda n: pattern.flops(n, 4, 8)):
        for wrong in (-1, 0, 1.5, "32"):
            with pytest.raises(ValueError, match=f"seq_len.*{wrong}"):
                call(wrong)


def test_numbers_of_heads_that_are_none():
    for call in (PATTERNS[0].offset_table, PATTERNS[0].unserved, lambda n: PATTERNS[0].plot(16, num_heads=n)):
        for wrong in (-1, 0, 1.5, "4"):
            with pytest.raises(ValueError, match=f"^num_heads must be a positive integer; got {wrong!r}$"):
                call(wrong)
    with pytest.raises(ValueError, match=r"^seq_len must be a positive integer; got 0$"):
        PATTERNS[0].plot(0)


class TestExplain:
    def test_layouts_say_what_runs(self):
        q, k = torch.empty(2, 1000, 4, 8), torch.empty(2, 1000, 2, 8)
        layout = BlockLayout.longformer(1000, 100, 20, 64)
        for is_causal in (False, True):
            found = explain(q, k, k, layout, is_causal=is_causal)
            assert found.flops == 2 * layout.flops(1000, 4, 8, is_causal)
            text = str(found)
            assert "layout of 1000 tokens" in text
            table = text[text.index("layout of 1000 tokens") :].splitlines()[2:]
            assert len(table) == len(found.calls[1000]) > 1
            assert ("cuts" in text) == is_causal
            pairs = (layout.causal() if is_causal else layout).dense_mask().sum()
            blocks = sum(call.rows * call.queries * call.keys for call in found.calls[1000])
            assert pairs <= blocks <= 1.3 * pairs

    def test_bytes_of_one_dense_layout(self):
        q, k = torch.empty(2, 32, 4, 8), torch.empty(2, 32, 4, 8)
        found = explain(q, k, k, BlockLayout.local(32, 32, 32))
        assert found.bytes == explain(q, k, k, Dilated((32,), (1,))).bytes

    def test_lists_per_head_and_sample(self):
        q = torch.empty(2, 64, 4, 8)
        layout = BlockLayout.from_mask(torch.rand(2, 4, 4, 4) < 0.5, 64, 16)
        assert explain(q, q, q, layout).flops == 4 * 8 * int(layout.dense_mask().sum())
        with pytest.raises(ValueError, match="layout is for 64 tokens, got seq_len=60"):
            explain(q[:, :60], q[:, :60], q[:, :60], layout)

    def test_counts_query_heads_and_batch(self):
        pattern = Dilated((8, 32), (1, 2))
        q, k = torch.empty(3, 61, 4, 16), torch.empty(3, 61, 2, 16)
        for is_causal in (False, True):
            found = explain(q, k, k, pattern, is_causal=is_causal)
            assert found.flops == 3 * 2 * pattern.flops(61, 2, 16, is_causal)
            plan = plan_of(pattern.branches(2), (0, 61), None, is_causal)
            assert found.groups == plan.groups

    def test_bytes_of_one_dense_segment(self):
        q, k = torch.empty(2, 10, 4, 8), torch.empty(2, 10, 2, 8)
        tensors = 4 * (2 * q.numel() + 2 * k.numel())  # q and out, k and v
        assert explain(q, k, k, Dilated((10,), (1,))).bytes == tensors + 4 * 2 * 10 * 4

    def test_prints_backend_reason_and_a_line_a_group(self):
        q = torch.empty(1, 64, 2, 8)
        found = explain(q, q, q, Dilated((16, 64), (1, 4)))
        text = str(found)
        assert found.backend in text
        assert found.reason in text
        assert all(name in text for name in found.refusals)
        assert text.count("directly") + text.count("merged") == len(found.groups)

    def test_refuses_what_the_call_would(self):
        q = torch.empty(1, 8, 2, 8)
        with pytest.raises(BackendError, match="float8"):
            explain(*(q.to(torch.float8_e5m2),) * 3, Dilated((8,), (1,)))
        with pytest.raises(ValueError, match="same shape"):
            explain(q, q, q[:, :4], Dilated((8,), (1,)))
        with pytest.raises(ValueError, match="compat"):
            explain(q, q, q, Dilated((8,), (1,)), compat="longnet")


def test_integers_of_numpy_are_integers():
    pattern = Dilated(tuple(np.array([8, 16])), tuple(np.array([1, 2])))
    assert pattern == Dilated((8, 16), (1, 2))
    assert all(type(x) is int for x in pattern.segment_lengths + pattern.dilation_rates)
