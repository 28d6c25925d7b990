"""Attention modules against `nn.MultiheadAttention`, rotary positions, the transformer block."""

from __future__ import annotations

import copy
import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from dilated_attention import BlockLayout, UnsupportedError, Window, attention, dilated_attention
from dilated_attention.nn import (
    BlockSparseDilatedAttention,
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    DilatedAttention,
    MultiheadDilatedAttention,
    RingDilatedAttention,
    SelfAttention,
    TransformerBlock,
    rotary_tables,
    rotate,
)
from dilated_attention.patterns import Dilated
from tolerances import TOLERANCE, relative_error

F64 = {"dtype": torch.float64}
COVER = {"segment_lengths": [64], "dilation_rates": [1]}  # one segment that covers every sequence here


def same(actual: Tensor, expected: Tensor) -> None:
    assert relative_error(actual, expected) <= TOLERANCE[expected.dtype]


def twins(*args, pattern=COVER, **kwargs) -> tuple[MultiheadDilatedAttention, nn.MultiheadAttention]:
    kwargs = {"batch_first": True, **F64, **kwargs}
    theirs = nn.MultiheadAttention(*args, **kwargs)
    ours = MultiheadDilatedAttention(*args, **kwargs, **pattern)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def compare(ours: nn.Module, theirs: nn.Module, inputs: tuple[Tensor, ...], causal=False, mask=None, **kwargs) -> None:
    """Outputs, and gradients of every input and parameter."""
    grads = []
    outs = []
    seq = inputs[0].shape[-2] if inputs[0].dim() == 2 or theirs.batch_first else inputs[0].shape[0]
    for module in (ours, theirs):
        distinct = {id(x): x.detach().clone().requires_grad_() for x in inputs}
        leaves = list(distinct.values())
        q, k, v = (distinct[id(x)] for x in inputs)
        attn_mask = mask
        if causal and module is theirs:
            attn_mask = torch.ones(seq, seq, dtype=torch.bool).triu(1)
        given = {"attn_mask": attn_mask, "need_weights": False} if module is theirs else {}
        out, weights = module(q, k, v, is_causal=causal, **given, **kwargs)
        assert weights is None
        parameters = dict(module.named_parameters())
        out.sin().sum().backward()
        outs.append(out)
        grads.append([x.grad for x in leaves] + [parameters[name].grad for name in sorted(parameters)])
    same(outs[0], outs[1])
    for ours_grad, theirs_grad in zip(*grads, strict=True):
        assert (ours_grad - theirs_grad).norm() <= 1e-12 * max(1.0, theirs_grad.norm().item())


def test_a_bias_is_a_floating_mask_of_pytorch():
    ours, theirs = twins(24, 3)
    x = torch.randn(2, 17, 24, **F64)
    results = []
    for module, name, shape in ((theirs, "attn_mask", (6, 17, 17)), (ours, "bias", (2, 3, 17, 17))):
        bias = torch.linspace(-1, 1, 6 * 17 * 17, **F64).view(shape).requires_grad_()
        out, _ = module(x, x, x, need_weights=False, **{name: bias})
        out.sin().sum().backward()
        results.append((out, bias.grad.flatten()))
    for expected, actual in zip(*results, strict=True):
        same(actual, expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", ["batch_first", "seq_first", "unbatched"])
def test_one_segment_equals_pytorch(layout, bias, causal):
    ours, theirs = twins(24, 3, bias=bias, batch_first=layout != "seq_first")
    x = torch.randn((17, 24) if layout == "unbatched" else (2, 17, 24), **F64)
    if layout == "seq_first":
        x = x.transpose(0, 1)
    compare(ours, theirs, (x, x, x), causal)


@pytest.mark.parametrize("dims", [{}, {"kdim": 10}, {"vdim": 6}, {"kdim": 10, "vdim": 6}])
def test_key_and_value_of_their_own(dims):
    ours, theirs = twins(24, 3, **dims)
    q = torch.randn(2, 9, 24, **F64)
    k, v = torch.randn(2, 9, dims.get("kdim", 24), **F64), torch.randn(2, 9, dims.get("vdim", 24), **F64)
    compare(ours, theirs, (q, k, v))
    if not dims:
        compare(ours, theirs, (q, k, k))


@pytest.mark.parametrize("layout", ["batch_first", "seq_first", "unbatched"])
@pytest.mark.parametrize("floating", [False, True])
def test_key_padding_mask(floating, layout):
    ours, theirs = twins(24, 3, batch_first=layout != "seq_first")
    x = torch.randn((9, 24) if layout == "unbatched" else (2, 9, 24), **F64)
    ignored = torch.zeros(x.shape[:-1], dtype=torch.bool)
    ignored[..., 5:] = True
    if layout == "seq_first":
        x = x.transpose(0, 1)
    mask = torch.zeros(ignored.shape, **F64).masked_fill(ignored, -math.inf) if floating else ignored
    compare(ours, theirs, (x, x, x), key_padding_mask=mask)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("offsets", ["head", "head_block"])
def test_branches_are_a_bias_of_log_counts(offsets, causal):
    """nn.MultiheadAttention with log c(i, j) added to its scores is the definition of dilated attention."""
    heads, seq, branches = 4, 21, [(4, 1), (8, 2), (32, 4)]
    pattern = {"segment_lengths": [w for w, _ in branches], "dilation_rates": [r for _, r in branches]}
    counts = torch.zeros(heads, seq, seq, **F64)
    for h in range(heads):
        for w, r in branches:
            offset = h % r if offsets == "head" else h // -(-heads // r)
            for i in range(seq):
                for j in range(i + 1 if causal else seq):
                    counts[h, i, j] += i // w == j // w and i % w % r == offset and j % w % r == offset
    ours, theirs = twins(16, heads, pattern=pattern)
    ours.attention = DilatedAttention(**pattern, offsets=offsets)
    x = torch.randn(2, seq, 16, **F64)
    out = ours(x, x, x, is_causal=causal)[0]
    same(out, theirs(x, x, x, attn_mask=counts.log().repeat(2, 1, 1), need_weights=False)[0])


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("layout", ["batch_first", "seq_first", "unbatched"])
def test_weights_equal_pytorch(layout, average):
    ours, theirs = twins(24, 3, batch_first=layout != "seq_first")
    x = torch.randn((9, 24) if layout == "unbatched" else (2, 9, 24), **F64)
    if layout == "seq_first":
        x = x.transpose(0, 1)
    (out, weights), expected = (m(x, x, x, need_weights=True, average_attn_weights=average) for m in (ours, theirs))
    same(out, expected[0])
    same(weights.to_dense(), expected[1])


@pytest.mark.parametrize("kwargs", [{}, {"bias": False}, {"kdim": 10, "vdim": 6}])
def test_initialised_draw_for_draw_as_pytorch(kwargs):
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(24, 3, **kwargs).state_dict()
    torch.manual_seed(3)
    ours = MultiheadDilatedAttention(24, 3, **kwargs, **COVER).state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_state_dict_goes_back_to_pytorch():
    ours = MultiheadDilatedAttention(24, 3, **COVER)
    nn.MultiheadAttention(24, 3).load_state_dict(ours.state_dict())
    assert list(copy.deepcopy(ours).state_dict()) == list(ours.state_dict())


def test_encoder_layer_calls_it_in_eval_mode_too():
    """nn.TransformerEncoderLayer has a fast path that would run dense attention on its weights."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, **F64)
    ours = MultiheadDilatedAttention(16, 2, **F64, segment_lengths=[4], dilation_rates=[1])
    ours.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = ours
    x = torch.randn(2, 8, 16, **F64)
    padding = torch.zeros(2, 8, dtype=torch.bool)
    padding[1, 6:] = True
    expected = layer(x, src_key_padding_mask=padding)
    assert not torch.allclose(expected, nn.TransformerEncoderLayer.forward(layer, x.flip(1)).flip(1))
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    with torch.no_grad():
        same(encoder(x, src_key_padding_mask=padding), expected)
        halves = torch.cat((encoder(x[:1, :4]), encoder(x[:1, 4:])), 1)  # segments of 4 do not see each other
        same(encoder(x[:1]), halves)


def test_refusals(unchecked):
    x = torch.randn(2, 8, 16)
    module = MultiheadDilatedAttention(16, 2, **COVER)
    compat = MultiheadDilatedAttention(16, 2, **COVER, compat="torchscale")
    with pytest.raises(UnsupportedError, match="compat='torchscale': a part of each row's weight"):
        compat(x, x, x, need_weights=True)
    for mask in (torch.zeros(8, 8), torch.ones(8, 8, dtype=torch.bool).triu(), torch.ones(4, 8, 8).triu(1).bool()):
        with pytest.raises(UnsupportedError, match=r"attn_mask( of shape \(4, 8, 8\), seq=8)?: .* only the causal one"):
            module(x, x, x, attn_mask=mask)
    with pytest.raises(UnsupportedError, match="attn_mask: a floating mask may hold 0 and -inf only"):
        module(x, x, x, attn_mask=torch.ones(8, 8))
    with pytest.raises(UnsupportedError, match="same positions"):
        module(x, x[:, :5], x[:, :5])
    with pytest.raises(UnsupportedError, match="0 and -inf only"):
        module(x, x, x, key_padding_mask=torch.ones(2, 8))
    with pytest.raises(ValueError, match="query has shape"):
        module(x[None], x[None], x[None])
    for name in ("add_bias_kv", "add_zero_attn"):
        with pytest.raises(UnsupportedError, match=name):
            MultiheadDilatedAttention(16, 2, **{name: True}, **COVER)
    with pytest.raises(ValueError, match="embed_dim=16 must be a multiple of num_heads=3"):
        MultiheadDilatedAttention(16, 3, **COVER)
    for wrong in ({"embed_dim": 0}, {"num_heads": 0}, {"num_heads": 16 / 8}, {"kdim": -1}, {"vdim": "16"}):
        ((name, value),) = wrong.items()
        with pytest.raises(ValueError, match=f"{name} must be a positive integer; got {value!r}"):
            MultiheadDilatedAttention(**{"embed_dim": 16, "num_heads": 2, **COVER, **wrong})
    with pytest.raises(ValueError, match="segment_lengths"):
        DilatedAttention([4, 8], [1])
    with pytest.raises(ValueError, match=r"dropout must be a probability in \[0, 1\); got 1.5"):
        MultiheadDilatedAttention(16, 2, dropout=1.5, **COVER)
    with pytest.raises(ValueError, match="scale must be a finite number, in single precision too; got 'small'"):
        DilatedAttention(**COVER, scale="small")


def test_the_causal_mask_is_is_causal():
    ours, theirs = twins(24, 3)
    x = torch.randn(2, 9, 24, **F64)
    floating = nn.Transformer.generate_square_subsequent_mask(9, **F64)
    for mask in (floating, floating == -math.inf):
        assert torch.equal(ours(x, x, x, attn_mask=mask)[0], ours(x, x, x, is_causal=True)[0])
        out, weights = ours(x, x, x, attn_mask=mask, need_weights=True, average_attn_weights=False)
        expected = theirs(x, x, x, attn_mask=mask, average_attn_weights=False)
        same(out, expected[0])
        same(weights.to_dense(), expected[1])


@pytest.mark.parametrize("same_embed_dim", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_random_shapes(padded, same_embed_dim):
    """PyTorch's own test of its module: many small shapes, a key padding mask drawn at random, layout (seq, batch)."""
    generator = torch.Generator().manual_seed(0)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    for _ in range(25):
        batch, seq, head_dim, heads = draw(2, 10), draw(2, 10), draw(3, 10), 2 * draw(2, 5)
        dim = head_dim * heads
        other = dim if same_embed_dim else draw(5, 20)
        ours, theirs = twins(dim, heads, kdim=other, vdim=other, batch_first=False)
        q, k, v = (torch.randn(seq, batch, d, **F64) for d in (dim, other, other))
        ignored = torch.randint(0, 2, (1, seq), generator=generator).bool().repeat(batch, 1) if padded else None
        if padded:
            ignored[:, draw(0, seq - 1)] = False  # PyTorch gives NaN where nothing is left
        for average in (False, True):
            options = {"key_padding_mask": ignored, "need_weights": True, "average_attn_weights": average}
            (out, weights), expected = (m(q, k, v, **options) for m in (ours, theirs))
            same(out, expected[0])
            same(weights.to_dense(), expected[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch_first", [False, True])
def test_shape_and_dtype_are_kept(batch_first, dtype):
    module = MultiheadDilatedAttention(128, 8, batch_first=batch_first, dtype=dtype, **COVER)
    q, k, v = torch.randn(3, 8, 10, 128, dtype=dtype)
    for mode in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with mode:
            out = module(q, k, v)[0]
        assert (out.shape, out.dtype) == (q.shape, dtype)


def test_shapes_that_do_not_fit(unchecked):
    """The shapes of PyTorch's own test are each refused with the argument's name."""
    module = MultiheadDilatedAttention(4, 4, **COVER)
    x, flat = torch.randn(4, 4, 4), torch.randn(4, 4)
    half = torch.tensor([False, False, True, True])
    for arguments, options, message in (
        ((x, flat, x), {}, "query, key, value have shapes"),
        ((x, x, flat), {}, "query, key, value have shapes"),
        ((flat, x, flat), {}, "query, key, value have shapes"),
        ((flat, flat, x), {}, "query, key, value have shapes"),
        ((x, x, x), {"key_padding_mask": half}, "key_padding_mask must have shape"),
        ((flat, flat, flat), {"key_padding_mask": half[None]}, "key_padding_mask must have shape"),
        ((x, x, x), {"attn_mask": half}, r"attn_mask of shape \(4,\)"),
        ((flat, flat, flat), {"attn_mask": half}, r"attn_mask of shape \(4,\)"),
        ((flat, flat, flat), {"attn_mask": torch.zeros(5, 4, 4).bool()}, r"attn_mask of shape \(5, 4, 4\)"),
        ((torch.randn(4, 4, 5), x, x), {}, r"query has shape \(4, 4, 5\): its last dim must be 4"),
        ((x, x, torch.randn(4, 4, 3)), {}, r"value has shape \(4, 4, 3\): its last dim must be 4"),
        ((x[0, 0], x[0, 0], x[0, 0]), {}, r"query has shape \(4,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            module(*arguments, **options)
    ragged = torch.nested.nested_tensor([torch.randn(4, 4), torch.randn(6, 4)], layout=torch.jagged)
    with pytest.raises(ValueError, match=r"query has a nested layout: .* key_padding_mask"):
        module(ragged, ragged, ragged)


def test_a_probable_mistake_in_the_layout_is_said():
    x = torch.randn(300, 1, 16)
    with pytest.warns(UserWarning, match=r"\(300, 1, 16\) is read as 300 samples of one token .* batch_first=False"):
        MultiheadDilatedAttention(16, 2, **COVER)(x, x, x)
    x = x.transpose(0, 1)
    with pytest.warns(UserWarning, match=r"\(1, 300, 16\) is read as 300 samples of one token .* batch_first=True"):
        MultiheadDilatedAttention(16, 2, batch_first=False, **COVER)(x, x, x)
    MultiheadDilatedAttention(16, 2, **COVER)(x, x, x)
    MultiheadDilatedAttention(16, 2, **COVER)(x[:, :100].transpose(0, 1), *[x[:, :100].transpose(0, 1)] * 2)


def test_module_holds_the_options_of_the_function():
    q, k, v = torch.randn(2, 20, 4, 8, **F64), *torch.randn(2, 2, 20, 2, 8, **F64)
    options = {"offsets": "head_block", "compat": "torchscale"}
    module = DilatedAttention([4, 16], [1, 4], **options, scale=0.3)
    expected = dilated_attention(q, k, v, [4, 16], [1, 4], **options, scale=0.3, is_causal=True, return_lse=True)
    for actual, wanted in zip(module(q, k, v, is_causal=True, return_lse=True), expected, strict=True):
        same(actual, wanted)
    same(module(q, k, v), dilated_attention(q, k, v, [4, 16], [1, 4], **options, scale=0.3))
    assert "segment_lengths=(4, 16)" in repr(module)


LAYOUT = BlockLayout.local(20, 6, 4)


@pytest.mark.parametrize(
    "pattern",
    [
        Dilated((4, 16), (1, 4)),
        Window(5, 2),
        Window(3, 0) + Dilated((10,), (2,)),
        LAYOUT,
        Dilated((20,), (1,)) * LAYOUT,
    ],
    ids=["dilated", "window", "sum", "layout", "product"],
)
def test_any_pattern(pattern):
    q, k, v = torch.randn(3, 2, 20, 4, 8, **F64)
    expected = attention(q, k, v, pattern, scale=0.3, return_lse=True)
    module = DilatedAttention(pattern=pattern, scale=0.3)
    for actual, wanted in zip(module(q, k, v, return_lse=True), expected, strict=True):
        same(actual, wanted)
    assert repr(pattern) in repr(module)
    projected = MultiheadDilatedAttention(8, 4, pattern=pattern, **F64)
    x = torch.randn(2, 20, 8, **F64)
    q, k, v = (part.unflatten(-1, (4, 2)) for part in (x @ projected.in_proj_weight.T).chunk(3, -1))
    out, weights = projected(x, x, x, need_weights=True, average_attn_weights=False)
    same(out, projected.out_proj(attention(q, k, v, pattern).flatten(-2)))
    same(out, projected.out_proj((weights.to_dense() @ v.transpose(1, 2)).transpose(1, 2).flatten(-2)))


def test_a_pattern_of_the_length():
    q, k, v = torch.randn(3, 2, 20, 4, 8, **F64)
    module = DilatedAttention(pattern=lambda tokens: BlockLayout.local(tokens, 6, 4))
    same(module(q, k, v), attention(q, k, v, LAYOUT))
    half = (x[:, :10] for x in (q, k, v))
    same(module(*half), attention(q[:, :10], k[:, :10], v[:, :10], BlockLayout.local(10, 6, 4)))


def test_a_pattern_of_the_length_gives_each_sample_its_own():
    def last(tokens: int) -> BlockLayout:  # every block sees the last one, which no layout of other tokens shows
        blocks = -(-tokens // 4)
        return BlockLayout.from_mask(torch.arange(blocks).expand(blocks, -1) == blocks - 1, tokens, 4)

    packed = torch.randn(3, 1, 20, 4, 8, **F64)
    module = DilatedAttention(pattern=last)
    alone = [module(*packed[:, :, start:stop]) for start, stop in ((0, 7), (7, 20))]
    same(module(*packed, cu_seqlens=torch.tensor([0, 7, 20])), torch.cat(alone, 1))
    same(module(*packed, lengths=torch.tensor([7]))[:, :7], alone[0])


@pytest.mark.parametrize("more", [COVER, {"offsets": "head_block"}, {"head_groups": True}, {"compat": "torchscale"}])
def test_a_pattern_holds_its_own_options(more, unchecked):
    for kind in (DilatedAttention, partial(MultiheadDilatedAttention, 8, 4)):
        with pytest.raises(ValueError, match=r"pattern=Window.* leave them out"):
            kind(pattern=Window(5), **more)
        with pytest.raises(ValueError, match=r"pattern must be one that attention takes.* got list"):
            kind(pattern=[4, 8])
        with pytest.raises(ValueError, match="segment_lengths must hold positive integers, one per branch; got 4"):
            kind(segment_lengths=4, dilation_rates=1)
        with pytest.raises(ValueError, match=r"segment_lengths=\[4\] and dilation_rates=None: give both, or pattern="):
            kind(segment_lengths=[4])


def test_rotary_scores_depend_on_distance_only():
    q, k = torch.randn(2, 1, 1, 1, 8, **F64)

    def score(m: int, n: int) -> Tensor:
        tables = (rotary_tables(torch.tensor([p]), 8, dtype=torch.float64) for p in (m, n))
        a, b = (rotate(x, table) for x, table in zip((q, k), tables, strict=True))
        return (a * b).sum()

    torch.testing.assert_close(score(7, 3), score(1_000_007, 1_000_003), rtol=0, atol=1e-8)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3
    torch.testing.assert_close(rotate(q, rotary_tables(torch.tensor([0]), 8)), q)


def test_rotary_angles_are_exact_far_out():
    far = 2**30 + 1
    cos, sin = rotary_tables(torch.tensor([far]), 2)  # one pair, of frequency 1
    assert cos.dtype == torch.float32
    torch.testing.assert_close(cos[0, 0, 0].item(), math.cos(far), rtol=0, atol=1e-6)
    torch.testing.assert_close(sin[0, 0, 1].item(), math.sin(far), rtol=0, atol=1e-6)


def test_rotary_keeps_dtype_and_takes_positions_per_sample():
    x = torch.randn(2, 5, 3, 8)
    positions = torch.stack((torch.arange(5), torch.arange(10, 15)))
    both = rotate(x, rotary_tables(positions, 8))
    torch.testing.assert_close(both[1:], rotate(x[1:], rotary_tables(positions[1], 8)))
    low = rotate(x.bfloat16(), rotary_tables(positions, 8))
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), both, rtol=2e-2, atol=2e-2)
    with pytest.raises(ValueError, match="head_dim=7"):
        rotary_tables(positions, 7)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_block_dense_equals_one_segment_and_is_causal(kv_heads):
    dense = TransformerBlock(32, 4, kv_heads, 64, None).double()
    dilated = TransformerBlock(32, 4, kv_heads, 64, Dilated((64,), (1,))).double()
    dilated.load_state_dict(dense.state_dict())
    x = torch.randn(2, 19, 32, **F64)
    tables = rotary_tables(torch.arange(19), 8, dtype=torch.float64)
    same(dilated(x, tables, True), dense(x, tables, True))
    same(dilated(x, tables), dense(x, tables))
    changed = x.clone()
    changed[:, 11:] = 0
    same(dilated(changed, tables, True)[:, :11], dense(x, tables, True)[:, :11])


@pytest.mark.parametrize("pattern", [None, Dilated((64,), (1,)), Window(64)], ids=["dense", "dilated", "window"])
def test_blocks_read_packed_samples(pattern, unchecked):
    block = TransformerBlock(32, 4, 2, 64, pattern).double()
    x, edges = torch.randn(1, 19, 32, **F64), [0, 7, 8, 19]
    alone = [block(x[:, i:j]) for i, j in pairwise(edges)]
    for given in (edges, tuple(edges), torch.tensor(edges, dtype=torch.int32)):
        same(block(x, cu_seqlens=given), torch.cat(alone, 1))
        first = block(x, cu_seqlens=given, first_only=True)
        same(first, torch.cat([sample[:, :1] for sample in alone], 1))
    for edges in ([0, 7, 8, 18], [0, 8, 7, 19], [1, 7, 8, 19], [0, 7, 8, 20]):
        with pytest.raises(ValueError, match="cu_seqlens must ascend from 0 to 19"):
            block(x, cu_seqlens=edges)
    with pytest.raises(ValueError, match="needs batch 1; got batch 2"):
        block(x.expand(2, -1, -1), cu_seqlens=[0, 19])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((30, 4, 4), "embed_dim=30 must be a multiple of num_heads=4"),
        ((32, 4, 3), "num_kv_heads must divide num_heads=4; got 3"),
    ],
)
def test_heads_that_do_not_divide(sizes, message):
    with pytest.raises(ValueError, match=message):
        SelfAttention(*sizes, pattern=None)


class TestBlockSparse:
    """The modules hold a layout, or what gives one for a length; the layout is no parameter and no state."""

    layout = BlockLayout.bigbird(75, 20, 5, 1, 0, 16)

    @pytest.mark.parametrize("kind", [BlockSparseDilatedAttention, BlockSparseRingDilatedAttention])
    def test_module_holds_the_options_of_the_function(self, kind):
        q, k, v = (torch.randn(2, 75, h, 8, **F64) for h in (4, 2, 2))
        product = Dilated((30, 75), (1, 3)) * (lambda n: BlockLayout.local(n, 20, 16))
        for module, pattern in (
            (kind(self.layout, scale=0.3), self.layout),
            (kind(lambda n: BlockLayout.local(n, 20, 16), scale=0.3), BlockLayout.local(75, 20, 16)),
            (kind(product.layout, [30, 75], [1, 3], scale=0.3), product),
        ):
            expected = attention(q, k, v, pattern, scale=0.3, is_causal=True, return_lse=True)
            for actual, wanted in zip(module(q, k, v, is_causal=True, return_lse=True), expected, strict=True):
                same(actual, wanted)
        assert "BlockLayout(seq_len=75" in repr(kind(self.layout))

    def test_a_ring_takes_any_pattern(self):
        q, k, v = (torch.randn(2, 75, h, 8, **F64) for h in (4, 2, 2))
        same(RingDilatedAttention(pattern=self.layout)(q, k, v), attention(q, k, v, self.layout))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_moves_as_any_module(self, dtype):
        module = BlockSparseRingMultiheadDilatedAttention(32, 4, layout=self.layout)
        before = module(*(torch.ones(1, 75, 32),) * 3)[0].dtype
        module.to("cpu", dtype)
        x = torch.randn(2, 75, 32, dtype=dtype)
        out = module(x, x, x)[0]
        assert (before, out.dtype) == (torch.float32, dtype)
        assert {p.dtype for p in module.parameters()} == {dtype}
        meta = module.to("meta")
        assert {p.device.type for p in meta.parameters()} == {"meta"}
        assert meta.attention.pattern is self.layout  # shared, and as it was: calls follow q to its device
        assert self.layout.device.type == "cpu"

    def test_state_is_that_of_pytorch(self):
        theirs = nn.MultiheadAttention(24, 3, batch_first=True, **F64)
        everything = BlockLayout.local(75, 75, 16)
        ours = BlockSparseRingMultiheadDilatedAttention(24, 3, layout=everything, **F64)
        ours.load_state_dict(theirs.state_dict())
        theirs.load_state_dict(ours.state_dict())
        x = torch.randn(2, 75, 24, **F64)
        compare(ours, theirs, (x, x, x))
        compare(ours, theirs, (x, x, x), causal=True)
        again = copy.deepcopy(ours)
        same(again(x, x, x)[0], ours(x, x, x)[0])

    def test_what_a_builder_gives_is_kept(self):
        asked = []

        def layout(length: int) -> BlockLayout:
            asked.append(length)
            return BlockLayout.local(length, 20, 16)

        module = BlockSparseDilatedAttention(layout)
        for length in (40, 75, 40, 75):
            q = torch.randn(1, length, 2, 8)
            module(q, q, q)
        assert asked == [40, 75]

    @pytest.mark.parametrize("dilation", [(), ([40], [1])])
    def test_a_builder_without_weak_references(self, dilation):
        """Nothing tells how long it lives, so it is asked every time."""
        asked = []

        class Builder:
            __slots__ = ()

            def __call__(self, length: int) -> BlockLayout:
                asked.append(length)
                return BlockLayout.local(length, 20, 16)

        q = torch.randn(1, 40, 2, 8)
        ours, expected = (BlockSparseDilatedAttention(x, *dilation) for x in (Builder(), BlockLayout.local(40, 20, 16)))
        for _ in range(2):
            assert torch.equal(ours(q, q, q), expected(q, q, q))
        assert len(asked) >= 2

    def test_refusals(self, unchecked):
        q = torch.randn(1, 75, 2, 8)
        with pytest.raises(ValueError, match="layout must be a BlockLayout or a callable"):
            BlockSparseDilatedAttention([1, 2])
        with pytest.raises(ValueError, match="segment_lengths must hold positive integers, one per branch; got 4"):
            BlockSparseDilatedAttention(self.layout, 4, 1)
        with pytest.raises(ValueError, match="segment_lengths and dilation_rates go together"):
            BlockSparseDilatedAttention(self.layout, [4])
        with pytest.raises(ValueError, match="are of a dilated pattern"):
            BlockSparseDilatedAttention(self.layout, head_groups=True)
        with pytest.raises(ValueError, match=r"layout\(75\) must give a BlockLayout; got NoneType"):
            BlockSparseDilatedAttention(lambda n: None)(q, q, q)
        with pytest.raises(ValueError, match="layout is for 75 tokens, got seq_len=74"):
            BlockSparseDilatedAttention(self.layout)(q[:, :74], q[:, :74], q[:, :74])


@pytest.mark.parametrize("batch_first", [True, False])
def test_padded_and_packed_samples_are_as_alone(batch_first):
    pattern = {"segment_lengths": [4, 16], "dilation_rates": [1, 2]}
    module = MultiheadDilatedAttention(16, 4, **F64, **pattern, batch_first=batch_first)
    samples = [torch.randn(n, 16, **F64) for n in (11, 0, 23)]
    alone = [module(x, x, x, is_causal=True)[0] for x in samples]
    padded, lengths = nn.utils.rnn.pad_sequence(samples, batch_first), torch.tensor([11, 0, 23])
    out, weights = module(padded, padded, padded, is_causal=True, lengths=lengths)
    assert weights is None
    for i, expected in enumerate(alone):
        same((out if batch_first else out.transpose(0, 1))[i, : len(expected)], expected)
    packed, edges = torch.cat(samples), torch.tensor([0, 11, 11, 34])
    same(module(packed, packed, packed, is_causal=True, cu_seqlens=edges)[0], torch.cat(alone))
