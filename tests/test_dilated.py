"""Dilated patterns through the public function against counts from the definition, case by case."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from conformance import Conformance, excesses
from dilated_attention import (
    BlockLayout,
    Dilated,
    Window,
    attention,
    dilated_attention,
    explain,
    patterns,
    plan_cache,
)
from dilated_attention.backends.reference import batch_counts, count_matrix


class DilatedConformance(Conformance):
    seq_len = 37
    pattern: Dilated
    is_causal = False
    compat: str | None = None
    lengths: tuple[int, ...] | None = None
    cu_seqlens: tuple[int, ...] | None = None
    key_padding_mask: torch.Tensor | None = None

    def ragged(self):
        return {
            "lengths": None if self.lengths is None else torch.tensor(self.lengths),
            "cu_seqlens": None if self.cu_seqlens is None else torch.tensor(self.cu_seqlens),
            "key_padding_mask": self.key_padding_mask,
        }

    def run(self, q, k, v):
        pattern = self.pattern
        return dilated_attention(
            q,
            k,
            v,
            pattern.segment_lengths,
            pattern.dilation_rates,
            offsets=pattern.offsets,
            head_groups=pattern.head_groups,
            compat=self.compat,
            is_causal=self.is_causal,
            return_lse=True,
            backend="native",
            **self.ragged(),
        )

    def definition(self):
        pattern = self.pattern
        return batch_counts(
            self.batch,
            self.seq_len,
            pattern.segment_lengths,
            pattern.dilation_rates,
            pattern.offset_table(self.kv_heads),
            is_causal=self.is_causal,
            compat=self.compat,
            **self.ragged(),
        )

    def counts(self):
        return self.definition()[0]

    def phantoms(self):
        return self.definition()[1]


class TestOneSegment(DilatedConformance):
    pattern = Dilated((64,), (1,))


class TestCausalSegments(DilatedConformance):
    pattern = Dilated((8,), (1,))
    is_causal = True


class TestPaper(DilatedConformance):
    """Every token is covered; head 3 of 4 has its own offset at every rate."""

    pattern = Dilated((8, 16, 32), (1, 2, 4))


class TestPaperCausal(TestPaper):
    is_causal = True


class TestRateBeyondHeads(DilatedConformance):
    """Offsets 4 and 5 have no head, and no branch covers every token."""

    pattern = Dilated((12, 24), (3, 6))
    is_causal = True


class TestRateThatDividesNothing(DilatedConformance):
    pattern = Dilated((7, 11), (2, 5))


class TestGroupedQueries(DilatedConformance):
    heads, kv_heads = 6, 2
    pattern = Dilated((8, 32), (1, 2))
    is_causal = True


class TestMultiQuery(DilatedConformance):
    kv_heads = 1
    pattern = Dilated((8, 32), (2, 3))


class TestHeadGroups(DilatedConformance):
    heads = kv_heads = 5
    pattern = Dilated((8, 16), (1, 2), head_groups=True)


class TestOffsetTable(DilatedConformance):
    pattern = Dilated((8, 16), (2, 3), ((0, 1, -1, 0), (2, 2, 0, -1)))
    is_causal = True


class TestTorchscale(DilatedConformance):
    pattern = Dilated((7, 24), (2, 3), "head_block")
    compat = "torchscale"


class TestLengths(DilatedConformance):
    pattern = Dilated((8, 16), (1, 3))
    lengths = (37, 11)


class TestPacked(DilatedConformance):
    batch = 1
    pattern = Dilated((8, 16), (1, 3))
    cu_seqlens = (0, 5, 5, 24, 37)
    is_causal = True


class TestPadding(DilatedConformance):
    """The first keys of sample 1 are padding, so that its first causal queries see nothing."""

    pattern = Dilated((8, 16), (1, 2))
    key_padding_mask = torch.arange(37) < torch.tensor([[0], [12]])
    is_causal = True


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_segments_of_more_than_one_block_of_the_fused_kernel(is_causal, dtype):
    """PyTorch's CPU kernel walks over blocks of 512 keys; the random calls stay below one."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1250, 2, 16, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3))
    counts = count_matrix([600, 1200], [1, 2], [[0, 0], [0, 1]], 1250, is_causal=is_causal)

    def run(q, k, v):
        return dilated_attention(q, k, v, [600, 1200], [1, 2], is_causal=is_causal, return_lse=True, backend="native")

    errors = excesses(run, (q, k, v), counts, scale=0.25)
    assert all(error <= 1 for error in errors.values()), f"errors over their bars: {errors}"


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_head_offset_is_a_slice_of_all_heads(backend):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 20, 5, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    whole = dilated_attention(q, k, v, [8, 16], [1, 3], backend=backend)
    part = dilated_attention(*(x[:, :, 2:] for x in (q, k, v)), [8, 16], [1, 3], head_offset=2, backend=backend)
    torch.testing.assert_close(part, whole[:, :, 2:])


@pytest.mark.parametrize("backend", ["native", "reference", "cpu"])
@pytest.mark.parametrize("compat", [None, "torchscale"])
@pytest.mark.parametrize("pattern", [
    Dilated((8, 32), (1, 4), "head_block"),
    Dilated((8, 32), (1, 4), head_groups=True),
    Dilated((32,), (2,), ((1, 0, 1, 0, -1, -1, -1, -1),)),
    Dilated((2, 32), (8, 1)),
])  # fmt: skip
def test_ranks_take_their_heads_of_a_table_over_all_heads(pattern, compat, backend):
    """On the second of two ranks some of these have branches in which no token takes part."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 40, 8, 8, generator=generator).requires_grad_() for _ in range(3))
    table = replace(pattern, offsets=pattern.offset_table(8), head_groups=False, compat=compat)
    whole = attention(q, k, v, table, return_lse=True, backend=backend)
    ranks = [
        attention(*(x[:, :, i : i + 4] for x in (q, k, v)), table, head_offset=i, return_lse=True, backend=backend)
        for i in (0, 4)
    ]
    found = [torch.cat(x, dim) for x, dim in zip(zip(*ranks, strict=True), (2, 1), strict=True)]
    torch.testing.assert_close(found, list(whole))
    gradients = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (found[0], whole[0])]
    torch.testing.assert_close(*gradients)


def test_a_rank_may_have_no_head_of_a_branch_by_head():
    assert Dilated((4, 16), (8, 2)).offset_table(4, head_offset=4) == ((4, 5, 6, 7), (0, 1, 0, 1))


@pytest.mark.parametrize("names", ["q", "k", "v", "qv"])
def test_gradients_of_some_inputs_only(names):
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(1, 9, 2, 4, generator=generator, dtype=torch.float64) for name in "qkv"}
    wanted = [tensors[name].requires_grad_() for name in names]
    gradients = [
        torch.autograd.grad(dilated_attention(*tensors.values(), [4, 8], [1, 2], backend=b).square().sum(), wanted)
        for b in ("native", "reference")
    ]
    for native, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(native, reference)


def test_residues_that_no_head_serves_are_counted_and_explained():
    for pattern, heads, nobody in (
        (Dilated((16, 64), (1, 8)), 4, (0, 4)),
        (Dilated((16, 64), (1, 8)), 8, (0, 0)),
        (Dilated((3, 64), (8, 3)), 2, (1, 1)),  # a segment of 3 tokens has 3 residues
        (Dilated((16, 64), (2, 4), head_groups=True), 4, (1, 3)),
        (Dilated((16,), (4,), ((-1, 3),)), 2, (3,)),
        (Dilated((64,), (8,), "head_block"), 4, (4,)),
    ):
        assert pattern.unserved(heads) == nobody
        table = pattern.offset_table(heads)
        for count, row, segment, rate in zip(
            nobody, table, pattern.segment_lengths, pattern.dilation_rates, strict=True
        ):
            assert count == sum(token not in row for token in range(min(segment, rate)))
    q = torch.empty(1, 64, 4, 8, device="meta")
    assert "residues that no head serves: 4 of 8 in branch (64, 8)" in str(
        explain(q, q, q, Dilated((16, 64), (1, 8)), backend="native")
    )
    assert "no head serves" not in str(explain(q, q, q, Dilated((16, 64), (1, 4)), backend="native"))


def near(tokens: int) -> BlockLayout:
    return BlockLayout.local(tokens, window=2, block_size=1)


def warned(call) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(("pattern", "heads"), [
    (Dilated([64], [16]), 8), (Dilated([64], [16]), 4), (Dilated([64, 17], [16, 17]), 8),
    (Dilated([64], [16]) * near, 8),
    (Dilated([64], [16], compat="torchscale"), 8), (Dilated([64], [16]) + Dilated([32], [16]), 8),
    (Dilated([64, 128], [9, 9], [[0, 1, 2, 3], [3, 4, 5, 0]]), 4),
])  # fmt: skip
def test_warns_once_of_tokens_that_no_head_serves(pattern, heads, monkeypatch):
    """Whether the call is remembered or, for its mask, checked every time."""
    monkeypatch.setattr(patterns, "_told", {(pattern, heads + 1)})
    plan_cache.clear()
    q, mask = torch.randn(1, 250, heads, 4), torch.zeros(1, 250, dtype=torch.bool)
    (message,) = warned(lambda: attention(q, q, q, pattern, key_padding_mask=mask))
    assert not warned(lambda: attention(q, q, q, pattern, key_padding_mask=mask))
    assert not warned(lambda: attention(q, q, q, pattern))
    empty = int((attention(q, q, q, pattern) == 0).all(-1).all(-1).sum())
    assert message.startswith(f"{empty} of 250 tokens take part in no branch for any of {heads} KV heads; their output")
    assert "residues that no head serves: " in message
    assert "dilation rate 1" in message
    patterns._told.clear()
    plan_cache.clear()
    assert len(warned(lambda: [attention(q, q, q, pattern) for _ in range(3)])) == 1


def test_does_not_warn_where_each_token_has_a_head(monkeypatch):
    """Or where the heads of other ranks, or a layout that is added, may serve the others; nor does `explain` warn."""
    monkeypatch.setattr(patterns, "_told", set())
    plan_cache.clear()
    q, sparse = torch.randn(1, 64, 4, 8), Dilated((32,), (8,))
    for pattern in (
        Dilated((16, 64), (1, 8)), Window(2) + sparse, sparse + near(64), Dilated((64,), (4,)), Window(3, rate=4),
        Dilated((64, 64), (2, 2), ((0,) * 4, (1,) * 4)), near(64),
    ):  # fmt: skip
        assert not warned(lambda pattern=pattern: attention(q, q, q, pattern))
    apart = Dilated((31,), (8,))
    assert not warned(lambda: explain(q, q, q, apart))
    assert not warned(lambda: attention(q, q, q, apart, head_offset=0))
    assert not warned(lambda: attention(*(x.to("meta") for x in (q, q, q)), apart))
    assert not warned(lambda: attention(q[:, :4], q[:, :4], q[:, :4], apart))
    assert warned(lambda: torch.func.vmap(lambda x: attention(x, x, x, apart))(q[None]))


def test_a_graph_does_not_warn_of_tokens_that_no_head_serves(compiling_python):
    compiling_python(
        """
        import torch
        from dilated_attention import Dilated, attention

        q = torch.randn(1, 64, 4, 8)
        compiled = torch.compile(lambda q: attention(q, q, q, Dilated((32,), (8,))), fullgraph=True, backend="eager")
        assert (compiled(q) == 0).all(-1).all(-1).sum() == 32
        """
    )
