"""Every builder against a dense mask over tokens, the algebra and the conversions on random layouts, and bad input."""

from __future__ import annotations

import copy
import pickle

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dilated_attention import Dilated, attention, block_sparse_attention
from dilated_attention.kernels.cpu import lists as compiled
from dilated_attention.layout import BlockLayout, builders, conversions
from dilated_attention.layout.spans import BlockGrid

matplotlib.use("Agg")

SIZES = [(1, 16), (16, 16), (100, 16), (512, 64), (777, (32, 48)), (500, (64, 16)), (613, (16, 64)), (450, (48, 32))]
BSR_IS_BETA = pytest.mark.filterwarnings("ignore:Sparse BSR tensor support is in beta")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tokens(seq_len):
    position = torch.arange(seq_len)
    return position[:, None], position[None, :]


def blocks_of(mask, block_size):
    """Booleans (…, queries, keys) -> (…, query blocks, key blocks): any pair of the block."""
    q_block, k_block = (block_size, block_size) if isinstance(block_size, int) else block_size
    rows, columns = -(-mask.shape[-2] // q_block), -(-mask.shape[-1] // k_block)
    padded = torch.zeros(*mask.shape[:-2], rows * q_block, columns * k_block, dtype=torch.bool)
    padded[..., : mask.shape[-2], : mask.shape[-1]] = mask
    return padded.unflatten(-1, (columns, k_block)).unflatten(-3, (rows, q_block)).any(-1).any(-2)


def pairs_of(blocks, layout):
    """Booleans over blocks -> over tokens."""
    whole = blocks.repeat_interleave(layout.q_block, -2).repeat_interleave(layout.k_block, -1)
    return whole[..., : layout.seq_len, : layout.seq_len]


def expect(layout, mask, block_size, is_causal):
    seq_len, everything = mask.shape[0], torch.ones_like(mask)
    if is_causal:
        mask, everything = mask.tril(), everything.tril()
    blocks = blocks_of(mask, block_size)
    assert torch.equal(layout.dense_blocks()[0, 0], blocks)
    assert torch.equal(layout.dense_mask()[0, 0], pairs_of(blocks, layout) & everything)
    assert layout.nnz == blocks.sum()
    assert layout.density == pytest.approx(blocks.sum().item() / blocks_of(everything, block_size).sum().item())
    assert BlockLayout.from_indices(layout.indptr, layout.indices, seq_len, block_size, is_causal=is_causal) == layout


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("seq_len", "block_size"), SIZES)
class TestBuilders:
    @pytest.mark.parametrize("window", [1, 2, 17, 64, 130, 10**6])
    def test_local(self, seq_len, block_size, is_causal, window):
        i, j = tokens(seq_len)
        layout = BlockLayout.local(seq_len, window, block_size, is_causal=is_causal)
        expect(layout, (i - j).abs() < window, block_size, is_causal)

    @pytest.mark.parametrize("leading", [1, 16, 40, 10**6])
    def test_leading_global(self, seq_len, block_size, is_causal, leading):
        i, j = tokens(seq_len)
        layout = BlockLayout.global_(seq_len, leading, block_size, is_causal=is_causal)
        expect(layout, (i < leading) | (j < leading), block_size, is_causal)

    def test_global_positions(self, seq_len, block_size, is_causal):
        i, j = tokens(seq_len)
        chosen = list(range(min(3, seq_len))) if is_causal else sorted({0, seq_len // 3, seq_len - 1})
        is_global = torch.zeros(seq_len, dtype=torch.bool)
        is_global[chosen] = True
        layout = BlockLayout.global_(seq_len, chosen, block_size, is_causal=is_causal)
        expect(layout, is_global[i] | is_global[j], block_size, is_causal)

    @pytest.mark.parametrize("stride", [1, 7, 16, 33, 64, 128, 200, 5000])
    def test_strided(self, seq_len, block_size, is_causal, stride):
        i, j = tokens(seq_len)
        layout = BlockLayout.strided(seq_len, stride, block_size, is_causal=is_causal)
        expect(layout, (i - j) % stride == 0, block_size, is_causal)

    @pytest.mark.parametrize(("rates", "reach"), [([1], 2), ([1, 2, 4, 8], 1), ([3, 5], 2), ([100], 1)])
    def test_dilated(self, seq_len, block_size, is_causal, rates, reach):
        i, j = tokens(seq_len)
        unit = block_size if isinstance(block_size, int) else max(block_size)
        step = j // unit - i // unit
        mask = torch.zeros(seq_len, seq_len, dtype=torch.bool)
        for rate in rates:
            mask |= (step % rate == 0) & (step.abs() <= reach * rate)
        layout = BlockLayout.dilated(seq_len, rates, reach, block_size, is_causal=is_causal)
        expect(layout, mask, block_size, is_causal)

    @pytest.mark.parametrize(
        "levels",
        [[(1, 40)], [(1, 50), (64, 300), (150, None)], [(8, 20), (8, 100), (90, 200)], [(31, 60), (100, None)]],
    )
    def test_hierarchical(self, seq_len, block_size, is_causal, levels):
        i, j = tokens(seq_len)
        mask = torch.zeros(seq_len, seq_len, dtype=torch.bool)
        for stride, window in levels:
            mask |= (j % stride == 0) & ((i - j).abs() < (seq_len if window is None else window))
        expect(BlockLayout.hierarchical(seq_len, levels, block_size, is_causal=is_causal), mask, block_size, is_causal)

    def test_longformer(self, seq_len, block_size, is_causal):
        i, j = tokens(seq_len)
        layout = BlockLayout.longformer(seq_len, 50, 10, block_size, is_causal=is_causal)
        expect(layout, ((i - j).abs() < 50) | (i < 10) | (j < 10), block_size, is_causal)

    def test_bigbird(self, seq_len, block_size, is_causal):
        base = BlockLayout.longformer(seq_len, 50, 10, block_size, is_causal=is_causal)
        layout = BlockLayout.bigbird(seq_len, 50, 10, 2, 7, block_size, is_causal=is_causal)
        assert layout & base == base
        assert layout == BlockLayout.bigbird(seq_len, 50, 10, 2, 7, block_size, is_causal=is_causal)
        assert bool((layout.counts - base.counts <= 2).all())

    @pytest.mark.parametrize("density", [0.1, 0.25, 0.5, 0.8, 1.0])
    def test_random(self, seq_len, block_size, is_causal, density):
        layout = BlockLayout.random(seq_len, density, 3, block_size, is_causal=is_causal)
        everything = torch.ones(seq_len, seq_len, dtype=torch.bool)
        visible = blocks_of(everything.tril() if is_causal else everything, block_size)
        assert torch.equal(layout.counts[0, 0], (visible.sum(1).double() * density).round().long().clamp(min=1))
        assert not bool((layout.dense_blocks()[0, 0] & ~visible).any())
        assert layout == BlockLayout.random(seq_len, density, 3, block_size, is_causal=is_causal)
        assert BlockLayout.from_indices(layout.indptr, layout.indices, seq_len, block_size, is_causal=is_causal)


@pytest.mark.parametrize("density", [0.25, 0.75])
def test_random_is_uniform_and_seeded(density):
    layouts = [BlockLayout.random(16 * 12, density, seed, 16) for seed in range(1500)]
    frequency = torch.stack([layout.dense_blocks()[0, 0] for layout in layouts]).double().mean(0)
    assert (frequency - density).abs().max() < 5 * (density * (1 - density) / 1500) ** 0.5  # 5 standard deviations
    assert len(set(layouts)) == len(layouts)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("density", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("seq_len", [8192, 10_000])
def test_density_is_reached(seq_len, density, is_causal):
    built = [
        BlockLayout.local(seq_len, density=density, is_causal=is_causal),
        BlockLayout.local(seq_len, block_size=(64, 128), density=density, is_causal=is_causal),
        BlockLayout.global_(seq_len, density=density, is_causal=is_causal),
        BlockLayout.dilated(seq_len, [1], density=density, is_causal=is_causal),
        BlockLayout.dilated(seq_len, [1, 3], density=density, is_causal=is_causal),
        BlockLayout.random(seq_len, density, 0, is_causal=is_causal),
    ]
    for layout in built:  # the nearest of steps that are at most four blocks a row wide
        assert layout.density == pytest.approx(density, abs=2.01 / layout.key_blocks)


@pytest.mark.parametrize("is_causal", [False, True])
def test_global_positions_are_looked_at_block_by_block(is_causal):
    """However many there are, and wherever in a block."""
    (keys, _), _ = builders.global_(BlockGrid(4096, 64, 32, is_causal), range(1000), None)
    assert keys.shape == (1, 32)
    for tokens in (999, 1000, 1025):
        number, positions = (
            BlockLayout.global_(4096, x, (64, 32), is_causal=is_causal) for x in (tokens, range(tokens))
        )
        assert number == positions


def test_a_million_tokens_are_lists_of_active_blocks():
    n = 1 << 20
    layout = BlockLayout.local(n, 2048) | BlockLayout.global_(n, 256) | BlockLayout.dilated(n, [1, 8, 64, 512, 4096], 2)
    assert layout.nbytes < 20e6
    assert layout.indices[: layout.key_blocks].tolist() == list(range(8192))
    row = layout.indices[layout.indptr[0, 0, 5000] : layout.indptr[0, 0, 5001]].tolist()
    far = {5000 + m * rate for rate in (1, 8, 64, 512, 4096) for m in range(-2, 3)}
    assert row == sorted({0, 1} | set(range(5000 - 16, 5000 + 17)) | {j for j in far if 0 <= j < 8192})


# Algebra and round trips on random layouts


@st.composite
def masks(draw):
    block_size = draw(st.sampled_from([16, 32, (16, 48), (48, 16), (32, 64)]))
    seq_len = draw(st.integers(1, 400))
    q_block, k_block = (block_size, block_size) if isinstance(block_size, int) else block_size
    lead = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 3)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    share = draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    return seq_len, block_size, torch.rand(*lead, -(-seq_len // q_block), -(-seq_len // k_block), generator=generator) < share  # fmt: skip # noqa: E501


@settings(max_examples=200, deadline=None)
@given(masks(), st.booleans(), st.data())
def test_algebra(drawn, causal, data):
    seq_len, block_size, one = drawn
    lead = data.draw(st.sampled_from([(1, 1), tuple(one.shape[:2])]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32 - 1)))
    two = torch.rand(*lead, *one.shape[2:], generator=generator) < 0.4
    a, b = (BlockLayout.from_mask(mask, seq_len, block_size) for mask in (one, two))
    dense_a, dense_b = pairs_of(one, a), pairs_of(two, b)
    assert torch.equal(a.dense_blocks(), one)
    assert torch.equal(a.dense_mask(), dense_a)
    assert torch.equal(a.causal().dense_mask(), dense_a.tril())
    assert torch.equal((a.causal() & b).dense_mask(), (dense_a & dense_b).tril())
    if causal:
        a, b, dense_a, dense_b = a.causal(), b.causal(), dense_a.tril(), dense_b.tril()
    assert torch.equal((a | b).dense_mask(), dense_a | dense_b)
    assert torch.equal((a & b).dense_mask(), dense_a & dense_b)
    assert a | b == b | a
    assert hash(a | b) == hash(b | a)
    assert a | a == a == a & a
    assert (a | b) & a == a | (b & a)
    for layout in (a, a | b, a & b):
        assert BlockLayout.from_indices(layout.indptr, layout.indices, seq_len, block_size, is_causal=causal) == layout


@BSR_IS_BETA
@settings(max_examples=100, deadline=None)
@given(masks(), st.booleans())
def test_sparse_round_trip_and_tables(drawn, causal):
    seq_len, block_size, mask = drawn
    layout = BlockLayout.from_mask(mask, seq_len, block_size)
    layout = layout.causal() if causal else layout
    dense = layout.dense_blocks()

    totals = dense.sum((-2, -1))
    if bool((totals == totals.flatten()[0]).all()):
        sparse = layout.to_torch_sparse()
        assert BlockLayout.from_torch_sparse(sparse, seq_len, is_causal=causal) == layout
        whole = dense.repeat_interleave(layout.q_block, 2).repeat_interleave(layout.k_block, 3)
        assert torch.equal(sparse.to_dense().reshape(whole.shape) != 0, whole)
    else:
        with pytest.raises(ValueError, match="BSR needs equally many blocks"):
            layout.to_torch_sparse()

    assert torch.equal(layout.counts, dense.sum(-1))
    flipped = layout.transposed
    for b in range(layout.batch_size):
        for h in range(layout.num_heads):
            for j in range(layout.key_blocks):
                column = flipped.indices[flipped.indptr[b, h, j] : flipped.indptr[b, h, j + 1]]
                assert column.tolist() == dense[b, h, :, j].nonzero().flatten().tolist()
    assert flipped.indptr[-1, -1, -1] == layout.nnz

    cut = blocks_of(pairs_of(dense, layout) & ~layout.dense_mask(), block_size).flatten(0, 2)
    assert torch.equal(layout.masked, cut[layout.row, layout.indices])


@pytest.mark.parametrize("is_compiled", [False, True])
def test_long_lists_turned_over(is_compiled, monkeypatch):
    if is_compiled and not compiled.available():
        pytest.skip("the C++ kernels are not compiled")
    monkeypatch.setattr(compiled, "available", lambda: is_compiled)
    blocks = torch.rand(2, 3, 40, 2500) < 0.01
    flipped = BlockLayout.from_mask(blocks, 2500, (63, 1)).transposed
    assert torch.equal(flipped.indices, blocks.mT.nonzero()[:, 3])
    assert torch.equal(flipped.indptr.diff(), blocks.sum(2))


@settings(max_examples=100, deadline=None)
@given(masks(), st.booleans())
def test_block_mask_round_trip(drawn, causal):
    seq_len, block_size, mask = drawn
    layout = BlockLayout.from_mask(mask, seq_len, block_size)
    layout = layout.causal() if causal else layout
    block_mask = layout.to_block_mask()
    again = BlockLayout.from_block_mask(block_mask)
    assert torch.equal(again.dense_mask(), layout.dense_mask())
    if again.is_causal == causal:
        assert again == layout
    else:  # no block meets the diagonal: nothing shows that the layout is causal
        assert not bool(layout.masked.any())
    dense = layout.dense_blocks()
    for side, lists in ((dense, "kv"), (dense.mT, "q")):
        for lead in side.flatten(0, 1).unbind():
            assert lead.shape == side.shape[-2:]
        for kind in ("", "full_"):
            counts = getattr(block_mask, f"{kind}{lists}_num_blocks")
            entries = getattr(block_mask, f"{kind}{lists}_indices")
            assert counts.dtype == entries.dtype == torch.int32
            assert entries.shape[-1] == side.shape[-1]  # as BlockMask's own tools expect
            used = torch.arange(entries.shape[-1]) < counts[..., None]
            lead, at = used.nonzero()[:, :-1], entries[used].long()
            assert bool(side[(*lead.T, at)].all())
            side = side.index_put((*lead.T, at), torch.tensor(False))
        assert not bool(side.any())


def test_tools_of_block_masks(monkeypatch):
    """Printing, slicing and `to_dense` read the number of columns off the width of the lists."""
    layout = BlockLayout.random(40, 0.3, 0, 8)
    mask = layout.to_block_mask()
    assert torch.equal(mask.to_dense().bool(), layout.dense_blocks())
    assert "BlockMask" in str(mask)
    assert mask[:, :, :1].kv_num_blocks.shape == (1, 1, 1)
    monkeypatch.setattr(conversions, "WIDE_LISTS", 0)
    narrow = layout.to_block_mask()
    assert narrow.kv_indices.shape[-1] < 5
    assert BlockLayout.from_block_mask(narrow) == layout


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "lead", [(1, 1), (2, 2), *(pytest.param(x, marks=pytest.mark.thorough) for x in [(1, 2), (2, 1)])]
)
@pytest.mark.filterwarnings("ignore:.*without torch.compile")
def test_flex_attention_reads_the_block_mask(lead, is_causal):
    torch.manual_seed(0)
    layout = BlockLayout.from_mask(torch.rand(*lead, 7, 4) < 0.5, 200, (32, 64)) | BlockLayout.local(200, 1, (32, 64))
    layout = layout.causal() if is_causal else layout
    q, k, v = torch.randn(3, 2, 2, 200, 16, dtype=torch.float64)
    out = flex_attention(q, k, v, block_mask=layout.to_block_mask())
    score = (q @ k.mT / 4).masked_fill(~layout.dense_mask(), float("-inf"))
    torch.testing.assert_close(out, score.softmax(-1) @ v, rtol=1e-12, atol=1e-12)


def test_block_masks_made_by_flex_attention():
    causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, 400, 400, device="cpu", BLOCK_SIZE=64)
    assert BlockLayout.from_block_mask(causal) == BlockLayout.local(400, 400, 64, is_causal=True)
    banded = create_block_mask(lambda b, h, q, k: q // 64 == k // 64 + h, 1, 2, 256, 256, device="cpu", BLOCK_SIZE=64)
    diagonals = torch.stack([torch.eye(4) > 0, torch.eye(4).roll(1, 0).tril() > 0])
    assert BlockLayout.from_block_mask(banded) == BlockLayout.from_mask(diagonals, block_size=64)


# Value semantics, plots


def test_value_semantics():
    a, b = (BlockLayout.local(1000, 200, 64) for _ in range(2))
    assert a == b
    assert hash(a) == hash(b)
    assert len({a, b, a.causal()}) == 2
    assert a != BlockLayout.local(1001, 200, 64)
    assert a != "layout"
    assert repr(a) == f"BlockLayout(seq_len=1000, block_size=64, blocks={a.nnz}, density={a.density:.4g}, is_causal=False)"  # noqa: E501  # fmt: skip
    per_head = BlockLayout.from_mask(torch.ones(3, 2, 4) > 0, 100, (64, 32)).causal()
    assert "block_size=(64, 32), heads=3" in repr(per_head)
    assert per_head.nnz == 3 * (2 + 4)
    with pytest.raises(AttributeError):
        a.seq_len = 3
    with pytest.raises(TypeError):
        a | 3


def test_tables_move_to_a_device():
    layout = BlockLayout.local(1000, 200, 64)
    assert layout.to("cpu") is layout
    moved = layout.to("meta")
    assert moved.device.type == moved.indptr.device.type == "meta"
    assert layout.device.type == "cpu"


@BSR_IS_BETA
@pytest.mark.parametrize(
    "make",
    [
        lambda: BlockLayout.local(600, 40, 16) | BlockLayout.global_(600, [3, 20], 16),
        lambda: BlockLayout.local(600, density=0.3, block_size=16, is_causal=True),
        lambda: BlockLayout.random(600, 0.8, 0, 16),
        lambda: BlockLayout.strided(600, 40, 16),
        lambda: BlockLayout.dilated(600, [1, 2], block_size=16),
        lambda: BlockLayout.bigbird(600, window=40, global_tokens=1, random_blocks=2, seed=0, block_size=16),
        lambda: BlockLayout.hierarchical(600, [(1, 8), (20, None)], 16),
        lambda: BlockLayout.from_indices([0, 1, 2], [0, 1], 16, 8),
    ],
)
def test_another_default_device(make):
    expected = make()
    with torch.device("meta"):
        layout = make()
        density, coverage = layout.density, (Dilated((8,), (1,)) * layout.prefix(8)).coverage(24, 2)
        sparse = layout.to_torch_sparse()
    assert layout == expected
    assert density == expected.density
    assert coverage.device.type == sparse.device.type == "cpu"


def test_tables_from_elsewhere_are_copied():
    indptr, indices = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2])
    layout = BlockLayout.from_indices(indptr, indices, 48, 16)
    indices[0] = 2
    assert layout == BlockLayout.local(48, 1, 16)


@pytest.mark.parametrize("make", [BlockLayout, BlockLayout.from_indices])
def test_tables_of_any_strides(make):
    layout = BlockLayout.from_mask(torch.eye(5, dtype=torch.bool).roll(1, 0).expand(1, 3, 5, 5), 640, 128)
    indptr = layout.indptr.transpose(1, 2).contiguous().transpose(1, 2)
    indices = torch.stack([layout.indices, layout.indices + 7], 1)[:, 0]
    made = make(indptr, indices, 640)
    q = torch.randn(1, 640, 3, 8)
    assert made == layout
    for backend in ("auto", "native"):
        assert torch.equal(attention(q, q, q, made, backend=backend), attention(q, q, q, layout, backend=backend))


@pytest.mark.parametrize(
    "make",
    [
        lambda layout: BlockLayout.local(64, 5, 8),
        lambda layout: layout | BlockLayout.global_(64, 1, 8),
        lambda layout: layout.causal(),
        lambda layout: BlockLayout.from_mask(torch.eye(8, dtype=torch.bool), 64, 8),
    ],
    ids=["built", "union", "causal", "mask"],
)
def test_what_is_made_under_inference_mode_serves_training(make):
    layout = BlockLayout.local(64, 20, 8)
    with torch.inference_mode():
        made = make(layout)
    q, k, v = (torch.randn(1, 64, 2, 8, requires_grad=True) for _ in range(3))
    actual, expected = (
        torch.autograd.grad(attention(q, k, v, x, backend="native").sum(), (q, k, v)) for x in (made, make(layout))
    )
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
@pytest.mark.parametrize("block_size", [1, 3, (2, 1)])
def test_what_an_indexer_chose(lead, block_size):
    seq_len = 11
    q_block, k_block = block_size if isinstance(block_size, tuple) else (1, block_size)
    rows, columns = -(-seq_len // q_block), -(-seq_len // k_block)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(-1, columns, (*lead, rows, 4), generator=generator)  # unsorted, some twice, some none
    chosen[..., 0, :] = -1
    mask = torch.zeros(*lead, rows, columns + 1, dtype=torch.bool).scatter_(-1, chosen + 1, True)[..., 1:]
    mask = mask[:, None] if len(lead) == 1 else mask
    expected = BlockLayout.from_mask(mask, seq_len, (q_block, k_block))
    assert BlockLayout.from_topk(chosen, block_size, seq_len=seq_len) == expected
    assert BlockLayout.from_topk(chosen.int(), block_size, seq_len=seq_len) == expected


@pytest.mark.skipif(not compiled.available(), reason="needs the compiled library")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("lead", "seq_len", "q_block", "k_block", "width"),
    [((), 1, 1, 1, 1), ((2, 3), 75, 1, 1, 9), ((1,), 131, 4, 3, 40), ((), 20_000, 1000, 1, 300), ((2,), 40, 1, 7, 1)],
)
def test_compiled_lists_of_choices_are_those_of_tensor_operations(
    monkeypatch, lead, seq_len, q_block, k_block, width, is_causal, dtype
):
    grid = BlockGrid.of(seq_len, (q_block, k_block), is_causal)
    chosen = torch.randint(-1, grid.columns, (*lead, grid.rows, width), dtype=dtype)
    if is_causal:
        later = grid.above(torch.arange(grid.rows)[:, None], chosen)
        chosen.masked_fill_(later, -1)
    chosen = chosen.mT.contiguous().mT
    options = {"seq_len": seq_len, "is_causal": is_causal}
    with monkeypatch.context() as checked:
        checked.setattr(conversions, "check_lists", lambda *_: pytest.fail("lists made here were checked"))
        made = BlockLayout.from_topk(chosen, (q_block, k_block), **options)
        with torch.inference_mode():
            BlockLayout.from_topk(chosen, (q_block, k_block), **options)
    monkeypatch.setattr(compiled, "available", lambda: False)
    assert made == BlockLayout.from_topk(chosen, (q_block, k_block), **options)


@pytest.mark.parametrize("wrong", [-2, 5, 2**31 - 1, -(2**31)])
def test_choices_outside_are_refused_at_any_place(wrong):
    for row in range(5):
        chosen = torch.full((5, 3), -1, dtype=torch.int32)
        chosen[row, row % 3] = wrong
        with pytest.raises(ValueError, match=rf"indices must lie in \[0, 5\), or be -1 .*got \[{wrong}\]"):
            BlockLayout.from_topk(chosen)
    assert BlockLayout.from_topk(torch.full((5, 3), -1)).nnz == 0  # no bits are left over


@pytest.mark.parametrize(("row", "column"), [(0, 1), (3, 4), (6, 7)])
def test_a_causal_choice_names_no_later_block(row, column):
    chosen = torch.arange(8)[:, None].repeat(1, 2)
    chosen[row, 1] = column
    with pytest.raises(ValueError, match=f"contradicts key block {column} of query block {row}"):
        BlockLayout.from_topk(chosen, is_causal=True)


def test_a_key_stands_for_one_layout():
    a, b = (BlockLayout.local(1000, 200, 64) for _ in range(2))
    assert a == b
    assert a.key != b.key  # no look at the content
    assert len({layout.key for layout in (a, a.causal(), a.prefix(999), a.select(), a.to("meta"))}) == 4
    seen = set()
    for _ in range(50):  # a tensor may live where one that is gone did
        seen.add(BlockLayout.local(1000, 200, 64).key)
    assert len(seen) == 50


def test_empty_rows_are_defined():
    layout = BlockLayout.from_indices([0, 0, 1, 1], [2], 48, 16)
    assert layout.counts.tolist() == [[[0, 1, 0]]]
    assert layout.dense_mask().sum() == 256
    nothing = layout & BlockLayout.local(48, 1, 16)
    assert nothing.nnz == 0
    assert nothing.density == 0
    assert nothing.causal().nnz == 0
    assert nothing.transposed.indptr.tolist() == [[[0, 0, 0, 0]]]
    assert BlockLayout.from_block_mask(nothing.to_block_mask()) == nothing


@pytest.mark.parametrize("seq_len", [1000, 200_000])
def test_plot(seq_len, tmp_path):
    layout = BlockLayout.longformer(seq_len, seq_len // 10, 64, 64).causal()
    ax = layout.plot()
    image = ax.images[0].get_array()
    assert image.shape == (min(512, layout.query_blocks),) * 2
    assert ax.images[0].get_cmap().name == "Greys"
    assert float(image.sum()) / image.size == pytest.approx(layout.nnz / layout.query_blocks**2, rel=0.02)
    assert layout.plot(ax) is ax
    ax.figure.savefig(tmp_path / "layout.png")
    for head, message in ((1, r"heads must lie in \[0, 1\)"), (0.0, "heads must hold integers; got 0.0")):
        with pytest.raises(ValueError, match=message):
            layout.plot(head=head)
    diagonal = BlockLayout.local(seq_len, 1, 64).causal()
    assert BlockLayout.stack([layout, diagonal], over="heads").plot(head=1).get_title() == diagonal.plot().get_title()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lead", [(1, 1), (1, 4), (2, 4)])
@pytest.mark.parametrize(("seq_len", "block_size"), SIZES)
def test_coverage_and_flops(seq_len, block_size, lead, is_causal):
    q_block, k_block = (block_size, block_size) if isinstance(block_size, int) else block_size
    mask = torch.rand(*lead, -(-seq_len // q_block), -(-seq_len // k_block)) < 0.4
    layout = BlockLayout.from_mask(mask, seq_len, block_size)
    cut = layout.causal() if is_causal else layout
    seen = cut.dense_mask().sum(-1).expand(-1, 4, -1)
    if bool((seen == 0).any()):
        with pytest.warns(UserWarning, match=f"^{int((seen == 0).sum())} of {seen.numel()} .head, token. pairs"):
            found = cut.coverage(seq_len, 4)
    else:
        found = cut.coverage(seq_len, 4)
    assert torch.equal(found, seen if lead[0] > 1 else seen[0])
    assert layout.flops(seq_len, 4, 16, is_causal) == 4 * 16 * int(seen.sum())
    with pytest.raises(ValueError, match="got seq_len="):
        layout.flops(seq_len + 1, 4, 16)
    if lead[1] == 4:
        with pytest.raises(ValueError, match="lists for 4 heads, got 3"):
            layout.coverage(seq_len, 3)


# Bad input: one clear error each

L = BlockLayout
LOCAL = L.local(256, 32, 64)
ONES = torch.ones(4, 4, 4, 4) > 0


def whole(*lead):
    return L.from_mask(ONES[: lead[0], : lead[1]], block_size=64)


BAD = [
    ("sorted and distinct within a row, got 2 before 1 in row 0", lambda: L.from_indices([0, 2, 2, 2], [2, 1], 48, 16)),
    ("sorted and distinct within a row, got 1 before 1 in row 1", lambda: L.from_indices([0, 0, 2, 2], [1, 1], 48, 16)),
    (r"indices must lie in \[0, 3\), or be -1 .*got \[3\]", lambda: L.from_topk(torch.tensor([[3], [0], [-1]]))),
    ("indices must be an int64 or int32 tensor.*got list", lambda: L.from_topk([[0]])),
    (r"indices must be .*got shape \(1,\)", lambda: L.from_topk(torch.tensor([0]))),
    ("indices must have 2 rows for seq_len=3", lambda: L.from_topk(torch.tensor([[0]]), (2, 1), seq_len=3)),
    ("contradicts key block 1 of query block 0", lambda: L.from_topk(torch.tensor([[1], [0]]), is_causal=True)),
    (r"indices must lie in \[0, 3\).*got \[3\]", lambda: L.from_indices([0, 1, 2, 2], [3, 0], 48, 16)),
    (r"indices must lie in \[0, 3\).*got \[-1\]", lambda: L.from_indices([0, 1, 2, 2], [-1, 0], 48, 16)),
    ("indptr must ascend from 0 to the 2 indices", lambda: L.from_indices([0, 2, 1, 2], [0, 1], 48, 16)),
    ("indptr must ascend from 0 to the 3 indices", lambda: L.from_indices([0, 1, 2, 2], [0, 1, 2], 48, 16)),
    ("each head going on", lambda: L.from_indices([[0, 1, 1, 1], [0, 1, 1, 1]], [0, 0], 48, 16)),
    (r"indptr must have shape .*4\) for 48 tokens", lambda: L.from_indices([0, 1], [0], 48, 16)),
    ("one list serves all heads", lambda: L.from_indices(torch.zeros(1, 1, 1, 4, dtype=torch.int64), [0], 48, 16)),
    ("indices must be one flat list", lambda: L.from_indices([0, 1, 1, 1], [[0]], 48, 16)),
    ("indices must be whole numbers, got torch.float32", lambda: L.from_indices([0, 1, 1, 1], [0.5], 48, 16)),
    ("must be int64", lambda: L(LOCAL.indptr.int(), LOCAL.indices, 256, 64, 64)),
    ("layout is for 256 tokens, got seq_len=512", lambda: LOCAL.check(1, 512, 8)),
    ("lists for 3 heads, got 8", lambda: whole(1, 3).check(1, 256, 8)),
    ("lists for a batch of 2, got 3", lambda: whole(2, 1).check(3, 256, 8)),
    ("block_size must be an integer from 1 to 65536; got 0", lambda: L.local(256, 32, 0)),
    ("block_size.*from 1 to 65536; got 65537", lambda: L.local(256, 32, 65_537)),
    (r"block_size.*from 1 to 65536; got 0 in \[64, 0\]", lambda: L.local(256, 32, (64, 0))),
    ("block_size.*got 64.0", lambda: L.local(256, 32, 64.0)),
    ("seq_len must be a positive integer; got 0", lambda: L.local(0, 32)),
    ("is_causal must be a bool; got 'no'", lambda: L.local(256, 32, is_causal="no")),
    ("is_causal must be a bool; got 1", lambda: L.from_topk(torch.tensor([[0]]), is_causal=1)),
    ("is_causal must be a bool; got None", lambda: L(LOCAL.indptr, LOCAL.indices, 256, 64, 64, None)),
    (r"density must lie in \(0, 1\], got 0", lambda: L.random(256, 0.0, 0)),
    (r"density must lie in \(0, 1\], got 1.5", lambda: L.local(256, density=1.5)),
    (r"density must lie in \(0, 1\], got nan", lambda: L.local(256, density=float("nan"))),
    ("density=0.9 is out of reach: at most 0.5", lambda: L.dilated(16 * 64, [2], block_size=16, density=0.9)),
    ("give either window or density", lambda: L.local(256)),
    ("give either window or density", lambda: L.local(256, 3, density=0.1)),
    ("window must be a positive integer; got 0", lambda: L.local(256, 0)),
    ("window must be a positive integer; got 1.5", lambda: L.local(256, 1.5)),
    ("tokens must be a positive integer; got 0", lambda: L.global_(256, 0)),
    (r"tokens must be positions in \[0, 256\)", lambda: L.global_(256, [3, 256])),
    (r"tokens must be positions in \[0, 256\)", lambda: L.global_(256, [])),
    ("tokens must be .*integer positions, got torch.bool; of a mask", lambda: L.global_(256, torch.arange(256) == 70)),
    ("tokens must be .*integer positions, got torch.float32", lambda: L.longformer(256, 8, [70.9])),
    ("tokens must be .*integer positions, got torch.float64", lambda: L.bigbird(256, 8, np.array([70.0]), 1, 0)),
    ("tokens must be a positive integer; got True", lambda: L.global_(256, True)),
    (r"tokens must be a positive integer; got tensor\(70", lambda: L.global_(256, torch.tensor(70.0))),
    ("tokens must be a positive integer; got .*-1", lambda: L.global_(256, np.int64(-1))),
    ("tokens must be .*integer positions, got 'a'", lambda: L.global_(256, "a")),
    (r"tokens must be .*integer positions, got \[None\]", lambda: L.global_(256, [None])),
    (r"tokens must be .*integer positions, got \[\[1\], 2\]", lambda: L.global_(256, [[1], 2])),
    ("cannot all be global when is_causal", lambda: L.global_(256, [0, 100], is_causal=True)),
    ("cannot all be global when is_causal", lambda: L.longformer(256, 16, [100], is_causal=True)),
    ("is_causal=True contradicts key block 1 of query block 0", lambda: L.from_mask(ONES[0, 0], block_size=64, is_causal=True)),  # noqa: E501
    ("is_causal=True contradicts", lambda: L.from_indices([0, 1, 1], [1], 32, 16, is_causal=True)),
    ("mask must be a boolean tensor.*got torch.float32", lambda: L.from_mask(torch.ones(2, 2))),
    ("mask must be a boolean tensor.*got list", lambda: L.from_mask([[True]])),
    ("mask must be.*got shape", lambda: L.from_mask(ONES[0, 0, 0])),
    ("mask must have 2 x 2 blocks for seq_len=200", lambda: L.from_mask(ONES[0, 0], 200)),
    ("not square in tokens; give seq_len", lambda: L.from_mask(ONES[0, 0, :3])),
    ("stride must be", lambda: L.strided(256, 0)),
    ("rates must name at least one", lambda: L.dilated(256, [])),
    ("rates must hold positive integers", lambda: L.dilated(256, [0])),
    (r"levels must be pairs .*at least one; got \[\]", lambda: L.hierarchical(256, [])),
    (r"levels must be pairs \(stride, window\), .* got \[\(1,\)\]", lambda: L.hierarchical(256, [(1,)])),
    ("levels must be pairs .*got \\[4, 16\\]", lambda: L.hierarchical(256, [4, 16])),
    ("seed must be an integer; got 1.5", lambda: L.random(256, 0.5, 1.5)),
    ("seed must be an integer; got None", lambda: L.bigbird(256, 16, 1, 1, None)),
    ("levels must go fine to coarse", lambda: L.hierarchical(256, [(4, 100), (1, 200)])),
    ("a level's window must be", lambda: L.hierarchical(256, [(4, 0)])),
    ("random_blocks must be", lambda: L.bigbird(256, 16, 1, 0, 0)),
    ("layouts must agree in .seq_len, block_size, device", lambda: LOCAL | L.local(256, 32, 32)),
    ("layouts must agree in .seq_len", lambda: LOCAL & L.local(255, 32, 64)),
    ("layouts must agree in batch_size and num_heads", lambda: whole(1, 2) | whole(1, 3)),
    ("for tests and small plots", lambda: L.local(1 << 20, 32).dense_mask()),
    ("for tests and small plots", lambda: L.local(1 << 21, 32).dense_blocks()),
    ("t must be a torch.sparse_bsr tensor", lambda: L.from_torch_sparse(torch.ones(4, 4))),
]  # fmt: skip


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.array, torch.tensor])
def test_global_tokens_of_other_libraries(kind):
    assert L.global_(256, kind(100), 16) == L.global_(256, 100, 16) != L.global_(256, [100], 16)
    assert L.bigbird(256, 16, kind(100), 1, 0, 16) == L.bigbird(256, 16, 100, 1, 0, 16)
    for positions in ([np.int64(3), 100], np.array([3, 100]), torch.tensor([3, 100], dtype=torch.int32)):
        assert L.global_(256, positions, 16) == L.global_(256, [3, 100], 16)


@pytest.mark.parametrize(("message", "call"), BAD)
def test_bad_input(message, call):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_carry_content_alone(copied):
    """Derived values name tables of this process, and hashes differ between processes."""
    layout = BlockLayout.local(100, 20, 16)
    attention(*(torch.randn(1, 100, 2, 8),) * 3, layout)
    hash(layout)
    other = copied(layout)
    fields = {"indptr", "indices", "seq_len", "q_block", "k_block", "is_causal", "kinds", "bits", "_versions"}
    assert vars(other).keys() == fields
    assert other == layout


def test_a_layout_of_another_process(fresh_python, tmp_path):
    layout = BlockLayout.local(256, 16, 16)
    source = f"""
        import torch
        from dilated_attention import BlockLayout, attention
        q, path = torch.arange(256 * 16.0).reshape(1, 256, 1, 16).sin(), {str(tmp_path / "layout.pt")!r}
        def out(layout):
            return attention(q, q, q, layout, backend="native")
    """
    saved = """
        layout = BlockLayout.local(256, 16, 16)
        out(layout), hash(layout)
        torch.save(layout, path)
    """
    loaded = """
        out(BlockLayout.random(256, 0.3, 0, 16))
        layout, same = torch.load(path), BlockLayout.local(256, 16, 16)
        print(torch.equal(out(layout), out(same)), hash(layout) == hash(same))
    """
    fresh_python(source + saved)
    assert fresh_python(source + loaded).split() == ["True", "True"]
    assert torch.load(tmp_path / "layout.pt") == layout


def test_a_file_with_lists_that_no_layout_has_is_refused(tmp_path):
    """Kernels trust the lists."""
    layout = BlockLayout.local(256, 16, 16)
    layout.indices[0] = 2**40
    torch.save(layout, tmp_path / "layout.pt")
    with pytest.raises(ValueError, match=r"indices must lie in \[0, 16\).*1099511627776"):
        torch.load(tmp_path / "layout.pt")

    class Late:  # lists that come after the constructor
        def __reduce__(self):
            good = BlockLayout.local(256, 16, 16)
            return *good.__reduce__(), {"indices": good.indices + 2**40}

    torch.save(Late(), tmp_path / "late.pt")
    with pytest.raises(ValueError, match="tables alone"):
        torch.load(tmp_path / "late.pt")


@BSR_IS_BETA
def test_bad_sparse_tensors():
    sparse = torch.ones(64, 128).to_sparse_bsr((32, 32))
    with pytest.raises(ValueError, match=r"not square.*give seq_len"):
        L.from_torch_sparse(sparse)
    with pytest.raises(ValueError, match="must be 64 x 64 for seq_len=60"):
        L.from_torch_sparse(sparse, 60)
    assert L.from_torch_sparse(torch.ones(512, 512).to_sparse_bsr((512, 512))).block_size == (512, 512)


def test_a_block_mask_that_lists_hidden_blocks():
    """A mask made of lists alone is one: FlexAttention computes with it, and its causal mask_mod hides the blocks."""
    counts, blocks = torch.full((1, 1, 4), 4, dtype=torch.int32), torch.arange(4, dtype=torch.int32).expand(1, 1, 4, 4)
    listed = BlockMask.from_kv_blocks(
        counts, blocks.contiguous(), BLOCK_SIZE=16, mask_mod=lambda b, h, i, j: i >= j, seq_lengths=(64, 64)
    )
    assert L.from_block_mask(listed) == L.from_mask(torch.ones(4, 4, dtype=torch.bool), 64, 16).causal()


def test_lists_of_key_value_heads_have_coverage_and_flops():
    layout = L.from_mask(torch.rand(1, 2, 7, 7) < 0.5, 100, 16) | L.local(100, 1, 16)
    for_queries = layout.for_heads(4)
    assert torch.equal(layout.coverage(100, 4), for_queries.coverage(100, 4))
    assert layout.flops(100, 4, 8, is_causal=True) == for_queries.flops(100, 4, 8, is_causal=True)
    with pytest.raises(ValueError, match="lists for 2 heads, got 3"):
        layout.coverage(100, 3)


def test_what_other_packages_take_in_the_place_of_a_layout():
    q = torch.randn(1, 2, 64, 8)
    mask = L.local(64, 8, 16).to_block_mask()
    for pattern, word in (
        (L.local(64, 8, 16), r"got seq_len=2.*q\.transpose\(1, 2\)"),
        (mask, "BlockMask.*from_block_mask"),
        (torch.ones(4, 4, dtype=torch.bool), "Tensor.*from_mask"),
    ):
        for call in (attention, block_sparse_attention):
            with pytest.raises(ValueError, match=word):
                call(q, q, q, pattern)


def test_inductor_compiles_the_making_of_a_window(compiling_python):
    compiling_python(
        """
        import torch
        from dilated_attention import BlockLayout

        def indices(x):
            return BlockLayout.local(x.shape[0], 8, 16, is_causal=True).indices * x[0]

        x = torch.full((50,), 2)
        assert torch.equal(torch.compile(indices, fullgraph=True)(x), indices(x))
        """
    )


@pytest.mark.parametrize("exported", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_layouts_are_made_in_one_graph(exported, compiling_python):
    compiling_python(
        f"""
        exported = {exported}
        """
        """
        import torch
        from dilated_attention import BlockLayout as L

        makers = (
            lambda n: L.local(n, density=0.3),
            lambda n: L.global_(n, [5, 0, 300]),
            lambda n: L.dilated(n, [1, 3], density=0.5, block_size=(16, 32)),
            lambda n: L.random(n, 0.2, 7, is_causal=True),
            lambda n: L.bigbird(n, 300, 100, 2, 0),
            lambda n: (L.local(n, 300) & L.strided(n, 512)).causal(),
            lambda n: L.stack([L.local(n, 300), L.hierarchical(n, [(1, 256), (200, None)])], over="heads"),
        )

        def tables(x):
            made = [make(x.shape[0]) for make in makers]
            return [t + 0 for layout in made for t in (layout.indptr, layout.indices)]

        class Tables(torch.nn.Module):
            def forward(self, x):
                return tables(x)

        if exported:
            call = torch.export.export(Tables(), (torch.zeros(1500),), strict=False).module()
        else:
            call = torch.compile(tables, fullgraph=True, backend="eager", dynamic=True)
        for n in (1500,) if exported else (1024, 1500):
            assert all(map(torch.equal, call(torch.zeros(n)), tables(torch.zeros(n))))
        """
    )
