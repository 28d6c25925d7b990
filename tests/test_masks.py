"""Layouts that show any mask: bits inside blocks, made of functions, dense masks and BlockMasks."""

from __future__ import annotations

import pickle
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, create_block_mask, or_masks

from conformance import excesses, survivors
from dilated_attention import BlockLayout, Dilated, Window, attention, attention_weights
from dilated_attention.backends import cpu
from dilated_attention.backends.facts import Facts
from dilated_attention.backends.table import BACKENDS as TABLE

BACKENDS = ("reference", "native", "auto")
compiled = pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))
CASES = range(40)


def served(dtype: torch.dtype) -> list[str]:
    """Return the backends that serve every option of a block layout in this dtype on a CPU."""
    facts = Facts(torch.device("cpu"), dtype, 96, 128, ("a block layout", "dropout_p", "softcap", "key_padding_mask"))
    return [name for name, x in TABLE.items() if x.refusal(facts) is None]


def random_mask(case: int) -> tuple[Tensor, tuple[int, int]]:
    """A mask (batch or 1, heads or 1, tokens, tokens) and a block size: bits at random, causal, with empty rows and
    columns, or of few kinds."""
    draw = random.Random(case)
    torch.manual_seed(case)
    tokens = draw.choice([1, 2, 15, 16, 17, 40, 63, 70])
    size = draw.choice([(16, 16), (1, 4), (5, 3), (16, 32), (64, 8), (128, 128)])
    mask = torch.rand(draw.choice([1, 2]), draw.choice([1, 2]), tokens, tokens) < draw.random()
    if case % 3 == 0:
        mask = mask.tril()
    if case % 4 == 0:
        mask[:, :, torch.rand(tokens) < 0.3] = False
    if case % 5 == 0:
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
        mask = (distance.abs() < draw.randint(1, tokens)).expand(mask.shape) | (torch.arange(tokens) < 3)
    return mask.clone(), size


def expected(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of a mask (batch, heads, queries, keys) by definition; rows that see nothing give 0 and -inf."""
    ratio = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(ratio, 2) for x in (k, v))
    score = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5
    empty = ~mask.any(-1, keepdim=True)
    score = score.masked_fill(~mask, -torch.inf)
    weight = torch.where(empty, 0.0, score.masked_fill(empty, 0.0).softmax(-1))
    return torch.einsum("bhqk,bkhd->bqhd", weight, v), score.logsumexp(-1)


@pytest.mark.parametrize("case", CASES)
def test_pairs_are_those_of_the_mask(case):
    mask, size = random_mask(case)
    batch, heads, tokens, _ = mask.shape
    layout = BlockLayout.from_mask(mask, tokens, size)
    assert torch.equal(layout.dense_mask(), mask)
    assert torch.equal(layout.seen, mask.sum(-1))

    def sees(b, h, q, k):
        return mask[b, h, q, k]

    by_function = BlockLayout.from_mask_mod(sees, tokens, batch=batch, heads=heads, block_size=size)
    assert by_function == layout
    assert hash(by_function) == hash(layout)
    assert BlockLayout.from_block_mask(layout.to_block_mask()) == layout
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert torch.equal(layout.causal().dense_mask(), mask.tril())
    part = (tokens + 1) // 2
    assert torch.equal(layout.prefix(part).dense_mask(), mask[..., :part, :part])
    chosen = layout.select(batch=[batch - 1], heads=[heads - 1, 0])
    assert torch.equal(chosen.dense_mask(), mask[-1:, [heads - 1, 0]])


@pytest.mark.parametrize("case", CASES)
def test_unions_and_intersections(case):
    mask, size = random_mask(case)
    tokens = mask.shape[-1]
    other = torch.rand(1, 1, tokens, tokens) < 0.4
    layout = BlockLayout.from_mask(mask, tokens, size)
    second = BlockLayout.from_mask(other, tokens, size)
    assert torch.equal((layout & second).dense_mask(), mask & other)
    assert torch.equal((layout | second).dense_mask(), mask | other)
    below = second.causal() if layout.is_causal else second
    stacked = BlockLayout.stack([below, layout.select(batch=[0], heads=[0])], over="heads")
    assert torch.equal(stacked.dense_mask()[0], torch.cat([below.dense_mask()[0], mask[0, :1]]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES[::2])
def test_attention(case, backend):
    mask, size = random_mask(case)
    tokens = mask.shape[-1]
    layout = BlockLayout.from_mask(mask, tokens, size)
    whole = mask.repeat_interleave(4 // mask.shape[1], 1).expand(2, -1, -1, -1)
    q, k, v = (torch.randn(2, tokens, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    out, lse = attention(q, k, v, layout, return_lse=True, backend=backend)
    wanted, wanted_lse = expected(q, k, v, whole)
    torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-10, atol=1e-12)
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), dout)
    for mine, theirs in zip(got, torch.autograd.grad(wanted, (q, k, v), dout), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def structured_mask(draw: random.Random, tokens: int) -> Tensor:
    """A mask (1 or 4, tokens, tokens): bits at random, documents with a prefix, a band with empty rows, or stripes."""
    token = torch.arange(tokens)
    query = token[:, None]
    kind = draw.randrange(4)
    if kind == 0:
        return torch.rand(draw.choice([1, 4]), tokens, tokens) < draw.random()
    if kind == 1:
        ends = torch.tensor(sorted(draw.sample(range(tokens), min(tokens, 3))))
        document = torch.bucketize(token, ends)
        return ((document == document[:, None]) & ((token <= query) | (token < draw.randrange(tokens))))[None]
    if kind == 2:
        return (((query - token).abs() < draw.randint(1, tokens)) & (torch.rand(tokens, 1) < 0.8))[None]
    return (((query - token) % draw.randint(1, 9) == 0) & (token <= query))[None]


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [16, 64, 128, (1, 64), (5, 3), (64, 1)])
@pytest.mark.parametrize("case", range(12))
def test_kernels_of_the_cpu(case, block_size, dtype):
    draw = random.Random(str((case, block_size)))
    torch.manual_seed(case)
    tokens = draw.choice([2, 17, 64, 100, 200])
    head_dim = draw.choice([24, 64, 96, 128, 256])
    mask = structured_mask(draw, tokens)
    layout = BlockLayout.from_mask(mask, tokens, block_size)
    q_start = draw.randrange(tokens)
    k_start = draw.randrange(tokens)
    q = torch.randn(2, tokens - q_start, 4, head_dim).to(dtype)
    k, v = torch.randn(2, 2, tokens - k_start, 2, head_dim).to(dtype)
    hidden = torch.rand(2, tokens - k_start) < draw.choice([0.0, 0.4])
    placed = {"q_start": q_start, "k_start": k_start, "key_padding_mask": hidden if hidden.any() else None}

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, layout, return_lse=True, backend="cpu", **placed)

    counts = (mask[:, q_start:, k_start:] & ~hidden[:, None, None]).expand(-1, 4, -1, -1).int()
    errors = excesses(run, (q, k, v), counts, scale=head_dim**-0.5)
    assert all(error <= 1 for error in errors.values()), f"errors over their bars: {errors}"


def check_random_call(seed: int, dtype: torch.dtype) -> None:
    """Compare a call of a random mask and random options, on every backend, with the counts of its pairs."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    batch = draw.choice([1, 2])
    tokens = draw.choice([1, 2, 17, 33, 64, 100])
    kv_heads, ratio = draw.choice([(1, 1), (2, 1), (1, 4), (2, 2)])
    heads = kv_heads * ratio
    block_size = draw.choice([(16, 16), (64, 64), (1, 1), (1, 64), (5, 3), (64, 1), (128, 128)])
    mask = torch.stack([structured_mask(draw, tokens).expand(4, -1, -1) for _ in range(draw.choice([1, batch]))])
    mask = mask[:, : draw.choice([1, heads])]
    layout = BlockLayout.from_mask(mask, tokens, block_size)
    queries, keys = torch.arange(tokens)[:, None], torch.arange(tokens)
    shown = mask.expand(batch, heads, -1, -1).int()
    pattern, options, call = layout, {}, {"scale": draw.choice([0.3, -0.7, 1.0])}
    if draw.random() < 0.3:
        pattern = layout + Window(5, 3)
        distance = keys - queries
        shown = shown + ((distance >= -5) & (distance <= 3)).int()
    if draw.random() < 0.3:
        options["is_causal"] = True
        shown = shown * (keys <= queries)
    start, stop, first = 0, tokens, 0
    ragged = draw.choice(["", "lengths", "packed", "hidden", "placed"])
    if ragged == "lengths":
        lengths = torch.tensor([draw.randrange(tokens + 1) for _ in range(batch)])
        options["lengths"] = lengths
        ends = lengths[:, None, None, None]
        shown = shown * (queries < ends) * (keys < ends)
    if ragged == "packed" and batch == 1:
        cut = draw.randrange(tokens)
        options["cu_seqlens"] = torch.tensor([0, tokens, tokens + cut])
        shown = F.pad(shown, (0, cut, 0, cut))
        shown[..., tokens:, tokens:] = shown[..., :cut, :cut]
        stop = tokens + cut
    if ragged == "hidden":
        hidden = torch.rand(batch, tokens) < 0.4
        options["key_padding_mask"] = hidden
        shown = shown * ~hidden[:, None, None]
    if ragged == "placed":
        start, first = draw.randrange(tokens), draw.randrange(tokens)
        options |= {"q_start": start, "k_start": first}
        shown = shown[..., start:, first:]
    head_dim = draw.choice([8, 24, 64, 96])
    q = torch.randn(batch, stop - start, heads, head_dim).to(dtype)
    k, v = torch.randn(2, batch, stop - first, kv_heads, head_dim).to(dtype)
    if draw.random() < 0.3 and ragged != "placed":
        call |= {"dropout_p": 0.3, "keep": survivors(q, k, 0.3, 0, seed)}
    elif draw.random() < 0.3:
        call["softcap"] = 1.5
    for backend in served(dtype):

        def run(q: Tensor, k: Tensor, v: Tensor, backend: str = backend) -> tuple[Tensor, Tensor]:
            torch.manual_seed(seed)
            given = {name: x for name, x in call.items() if name != "keep"}
            return attention(q, k, v, pattern, return_lse=True, backend=backend, **options, **given)

        errors = excesses(run, (q, k, v), shown, **call)
        assert all(x <= 1 for x in errors.values()), (backend, block_size, options, errors)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_random_calls(seed, dtype):
    check_random_call(seed, dtype)


@pytest.mark.thorough
@pytest.mark.parametrize("block", range(10))
def test_many_random_calls(block):
    for seed in range(100 + 300 * block, 400 + 300 * block):
        check_random_call(seed, (torch.float64, torch.float32, torch.bfloat16)[seed % 3])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES[1::4])
def test_some_queries_of_some_keys(case, backend):
    mask, size = random_mask(case)
    mask = mask[:1, :1]
    tokens = mask.shape[-1]
    layout = BlockLayout.from_mask(mask, tokens, size)
    q_start, k_start = tokens // 2, tokens // 3
    q, k, v = (torch.randn(1, n, 2, 8, dtype=torch.float64) for n in (tokens - q_start, *[tokens - k_start] * 2))
    out = attention(q, k, v, layout, q_start=q_start, k_start=k_start, backend=backend)
    wanted, _ = expected(q, k, v, mask[..., q_start:, k_start:])
    torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("backend", [*BACKENDS, pytest.param("cpu", marks=compiled)])
def test_options(backend):
    """Lengths, a key mask, sinks, a softcap and causality apply to what the masks show."""
    mask, size = torch.rand(33, 33) < 0.5, (16, 16)
    layout = BlockLayout.from_mask(mask, 33, size)
    tokens = BlockLayout.from_mask(mask, 33, (1, 1))
    q, k, v = torch.randn(3, 2, 33, 2, 8)
    hidden = torch.rand(2, 33) < 0.3
    for options in (
        {"lengths": torch.tensor([33, 20])},
        {"key_padding_mask": hidden},
        {"sinks": torch.randn(2)},
        {"softcap": 2.0},
        {"is_causal": True},
        {"scale": -0.4},
        {"dropout_p": 0.3},
        {"q_start": 0, "k_start": 0},
    ):
        torch.manual_seed(0)
        mine = attention(q, k, v, layout, backend=backend, **options)
        torch.manual_seed(0)
        by_tokens = attention(q, k, v, tokens, backend="reference", **options)
        torch.testing.assert_close(mine, by_tokens)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inside_the_segments_of_a_branch(backend):
    def layout(rows):
        return BlockLayout.from_mask_mod(lambda b, h, q, k: (q + k) % 3 > 0, rows, block_size=16)

    q, k, v = torch.randn(3, 1, 50, 2, 8)
    out = attention(q, k, v, Dilated((20, 50), (1, 2)) * layout, backend=backend)
    torch.testing.assert_close(out, attention(q, k, v, Dilated((20, 50), (1, 2)) * layout, backend="reference"))
    token = torch.arange(50)
    whole = attention(q, k, v, Dilated((50,), (1,)) * layout(50), backend=backend)
    wanted, _ = expected(q, k, v, ((token[:, None] + token) % 3 > 0).expand(1, 2, 50, 50))
    torch.testing.assert_close(whole, wanted)


def test_functions_of_flex_attention():
    document = torch.tensor([0] * 30 + [1] * 50 + [2] * 20)

    def same(b, h, q, k):
        return document[q] == document[k]

    def causal(b, h, q, k):
        return q >= k

    def prefix(b, h, q, k):
        return k < 7

    both = and_masks(same, or_masks(causal, prefix))
    layout = BlockLayout.from_mask_mod(both, 100, block_size=16)
    token = torch.arange(100)
    q, k = token[:, None], token
    assert torch.equal(layout.dense_mask()[0, 0], (document[q] == document[k]) & ((k <= q) | (k < 7)))
    flex = create_block_mask(both, None, None, 100, 100, device="cpu", BLOCK_SIZE=16)
    assert BlockLayout.from_block_mask(flex) == layout
    assert BlockLayout.from_mask_mod(causal, 100, block_size=16) == BlockLayout.local(100, 100, 16, is_causal=True)


def test_other_numbers_of_queries_than_keys():
    def sees(b, h, q, k):
        return k <= q + 4

    layout = BlockLayout.from_mask_mod(sees, 5, 9, block_size=4)
    assert layout.dense_mask()[0, 0, :5].equal(torch.arange(9) <= torch.arange(5)[:, None] + 4)
    assert not layout.dense_mask()[0, 0, 5:].any()
    flex = create_block_mask(sees, None, None, 5, 9, device="cpu", BLOCK_SIZE=4)
    assert BlockLayout.from_block_mask(flex) == layout


def test_functions_of_batch_element_and_head():
    def sees(b, h, q, k):
        return k <= q + 2 * b - h

    layout = BlockLayout.from_mask_mod(sees, 21, batch=2, heads=3, block_size=4)
    b = torch.arange(2)[:, None, None, None]
    h = torch.arange(3)[:, None, None]
    q = torch.arange(21)[:, None]
    assert layout.dense_mask().equal(sees(b, h, q, torch.arange(21)))
    flex = create_block_mask(sees, 2, 3, 21, 21, device="cpu", BLOCK_SIZE=4)
    assert BlockLayout.from_block_mask(flex) == layout
    flex.mask_mod = lambda b, h, q, k: 1 / 0
    with pytest.raises(ValueError, match="called first with b=0, h=0, q_idx=0, kv_idx=0: division by zero"):
        BlockLayout.from_block_mask(flex)


def test_equal_masks_are_stored_once():
    layout = BlockLayout.from_mask_mod(lambda b, h, q, k: (k - q).abs() < 20, 1024, block_size=64)
    assert len(layout.bits) == 3  # of the blocks on the diagonal and beside it
    assert f"masks=3 of {layout.bits.nbytes:,} bytes" in repr(layout)
    assert BlockLayout.from_mask_mod(lambda b, h, q, k: q >= 0, 100).kinds is None


def test_weights_are_of_the_pairs():
    mask = torch.rand(40, 40) < 0.3
    layout = BlockLayout.from_mask(mask, 40, 16)
    q, k = torch.randn(2, 1, 40, 2, 8)
    weights = attention_weights(q, k, layout).to_dense()
    assert torch.equal(weights[0, 0] > 0, mask)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda b, h, q, k: q - k, r"must return a boolean; got .*int64.* at b=0, h=0, q_idx=0, kv_idx=0"),
        (lambda b, h, q, k: torch.ones(3) > 0, r"must return one boolean per pair; got \(3,\)"),
        (lambda b, h, q, k: 1 / 0, "mask_mod fails, called first with b=0, h=0, q_idx=0, kv_idx=0: division by zero"),
        (lambda q, k: q >= k, "mask_mod fails.*positional arguments"),
        (3, r"mask_mod must be a function of \(b, h, q_idx, kv_idx\); got int"),
    ],
)
def test_wrong_functions(function, words):
    with pytest.raises(ValueError, match=words):
        BlockLayout.from_mask_mod(function, 8)


def test_wrong_tables():
    layout = BlockLayout.from_mask(torch.rand(20, 20) < 0.5, 20, 8)
    lists = layout.indptr, layout.indices, 20, 8, 8, False
    with pytest.raises(ValueError, match="given together"):
        BlockLayout(*lists, layout.kinds)
    with pytest.raises(ValueError, match="kinds must be int64 like indices"):
        BlockLayout(*lists, layout.kinds.int(), layout.bits)
    with pytest.raises(ValueError, match=r"bits must be booleans \(masks, 8, 8\)"):
        BlockLayout(*lists, layout.kinds, layout.bits[:, 1:])
    with pytest.raises(ValueError, match=r"kinds must lie in \[0, 1\), or be -1"):
        BlockLayout(*lists, layout.kinds, layout.bits[:1])
    with pytest.raises(ValueError, match="BSR holds whole blocks"):
        layout.to_torch_sparse()
    with pytest.raises(ValueError, match="contradicts a mask that shows a later key"):
        BlockLayout.from_mask(torch.ones(8, 8) > 0, 8, 4, is_causal=True)
    q = torch.randn(1, 8, 1, 8)
    with pytest.raises(ValueError, match=r"from_mask_mod\(mask_mod, seq_len\)"):
        attention(q, q, q, lambda b, h, q, k: q >= k)
