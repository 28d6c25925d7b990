"""Every bad argument gives one clear ValueError: the argument, the value it got, what would be right."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from dilated_attention import BackendError, BlockLayout, Dilated, Window, attention, dilated_attention
from dilated_attention.backends import cpu

pytestmark = pytest.mark.usefixtures("unchecked")

BATCH, SEQ, HEADS, DIM = 2, 8, 4, 4


def tensor(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.ones(shape or (BATCH, SEQ, HEADS, DIM), dtype=dtype, device=device)


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


# changed arguments; what the message must hold: the argument, its value, the remedy
BAD = {
    "q is no tensor": ({"q": [1.0]}, ["q", "list", "torch.Tensor"]),
    "rank of q": ({"q": tensor(SEQ, HEADS, DIM)}, ["q", "(8, 4, 4)", "(batch, seq, heads, head_dim)"]),
    "rank of k": ({"k": tensor(BATCH, SEQ, DIM)}, ["k", "(2, 8, 4)", "(batch, seq, heads, head_dim)"]),
    "rank of v": ({"v": tensor(1, BATCH, SEQ, HEADS, DIM)}, ["v", "(1, 2, 8, 4, 4)", "(batch, seq, heads, head_dim)"]),
    "k and v differ": ({"v": tensor(BATCH, SEQ, 2, DIM)}, ["k and v", "(2, 8, 4, 4)", "(2, 8, 2, 4)", "same shape"]),
    "batch differs": ({"q": tensor(3, SEQ, HEADS, DIM)}, ["q and k", "(3, 8, 4, 4)", "(2, 8, 4, 4)", "agree in batch"]),
    "seq differs": ({"q": tensor(BATCH, 7, HEADS, DIM)}, ["q and k", "(2, 7, 4, 4)", "agree in batch, seq"]),
    "head_dim differs": ({"q": tensor(BATCH, SEQ, HEADS, 3)}, ["q and k", "(2, 8, 4, 3)", "head_dim"]),
    "no head_dim": ({x: tensor(BATCH, SEQ, HEADS, 0) for x in "qkv"}, ["q", "(2, 8, 4, 0)", "head_dim", "at least 1"]),
    "no heads": ({x: tensor(BATCH, SEQ, 0, DIM) for x in "kv"}, ["heads", "0", "divide"]),
    "heads not divisible": ({x: tensor(BATCH, SEQ, 3, DIM) for x in "kv"}, ["heads", "4", "3", "divide"]),
    "more kv_heads": ({x: tensor(BATCH, SEQ, 8, DIM) for x in "kv"}, ["heads", "4", "8", "divide"]),
    "dtype of k": (
        {"k": tensor(dtype=torch.float64)},
        ["k", "torch.float64", "q", "torch.float32", "one floating dtype"],
    ),
    "integer tensors": ({x: tensor(dtype=torch.int64) for x in "qkv"}, ["q must", "torch.int64", "q.float()"]),
    "complex tensors": ({x: tensor(dtype=torch.complex64) for x in "qkv"}, ["q", "torch.complex64", "floating dtype"]),
    "eight bits": ({x: tensor().to(torch.float8_e5m2) for x in "qkv"}, ["torch.float8_e5m2", "float32"]),
    "a sparse k": ({"k": tensor().to_sparse()}, ["k", "torch.sparse_coo", "dense", "k.to_dense()"]),
    "device of v": ({"v": tensor(device="meta")}, ["v", "meta", "q", "cpu", "one device"]),
    "no branch": ({"segment_lengths": [], "dilation_rates": []}, ["segment_lengths", "empty", "at least one"]),
    "unequal lists": (
        {"dilation_rates": [1]},
        ["segment_lengths", "dilation_rates", "[4, 8]", "[1]", "one entry per branch"],
    ),
    "segment 0": ({"segment_lengths": [4, 0]}, ["segment_lengths", "0", "[4, 0]", "positive integers"]),
    "segment -4": ({"segment_lengths": [-4, 8]}, ["segment_lengths", "-4", "positive integers"]),
    "segment 4.0": ({"segment_lengths": [4.0, 8]}, ["segment_lengths", "4.0", "positive integers"]),
    "segment True": ({"segment_lengths": [True, 8]}, ["segment_lengths", "True", "positive integers"]),
    "segment '4'": ({"segment_lengths": ["4", 8]}, ["segment_lengths", "'4'", "positive integers"]),
    "a string of segments": ({"segment_lengths": "48"}, ["segment_lengths", "positive integers"]),
    "one segment": ({"segment_lengths": 4}, ["segment_lengths", "4", "positive integers"]),
    "rate 2**31": ({"dilation_rates": [1, 2**31]}, ["dilation_rates", "2**31", str(2**31)]),
    "segment 2**63": ({"segment_lengths": [4, 2**63]}, ["segment_lengths", "2**63", str(2**63)]),
    "no segments": ({"segment_lengths": None}, ["segment_lengths", "None", "positive integers"]),
    "rate 0": ({"dilation_rates": [1, 0]}, ["dilation_rates", "0", "[1, 0]", "positive integers"]),
    "rate -1": ({"dilation_rates": [1, -1]}, ["dilation_rates", "-1", "positive integers"]),
    "rate 1.5": ({"dilation_rates": [1, 1.5]}, ["dilation_rates", "1.5", "positive integers"]),
    "one rate": ({"dilation_rates": 1}, ["dilation_rates", "1", "positive integers"]),
    "r > w, table": (
        {"segment_lengths": [8, 2], "dilation_rates": [1, 6], "offsets": [[0] * 4, [2, 3, 4, 5]]},
        ["segment 2", "rate 6", "(2, 3, 4, 5)", "Lower the dilation rate or lengthen the segment"],
    ),
    "r > w, head groups": (
        {"segment_lengths": [8, 1], "dilation_rates": [1, 6], "head_groups": True},
        ["segment 1", "rate 6", "Lower the dilation rate or lengthen the segment"],
    ),
    "no head": ({"offsets": [[0] * 4, [-1] * 4]}, ["segment 8", "rate 2", "(-1, -1, -1, -1)", "offset from 0 to 1"]),
    "unknown offsets": ({"offsets": "heads"}, ["offsets", "'heads'", '"head"', '"head_block"', "table"]),
    "offsets None": ({"offsets": None}, ["offsets", "None", '"head"', "table"]),
    "offsets of one branch": ({"offsets": [[0] * 4]}, ["offsets", "1 row", "one per branch, 2"]),
    "offsets not nested": ({"offsets": [0, 1]}, ["offsets", "[0, 1]", "branches x heads"]),
    "offsets of 3 heads": ({"offsets": [[0] * 3, [0] * 3]}, ["offsets", "3", "one entry per key-value head"]),
    "offset r": ({"offsets": [[0] * 4, [0, 1, 2, 0]]}, ["offsets", "2", "[0, 2)"]),
    "offset -2": ({"offsets": [[0] * 4, [0, 1, -2, 0]]}, ["offsets", "-2", "[0, 2)", "-1"]),
    "offset 0.5": ({"offsets": [[0] * 4, [0, 0.5, 0, 0]]}, ["offsets", "0.5", "integers"]),
    "groups and a table": (
        {"offsets": "head_block", "head_groups": True},
        ["head_groups=True", "'head_block'", '"head"'],
    ),
    "more groups than heads": (
        {"segment_lengths": [8] * 5, "dilation_rates": [1] * 5, "head_groups": True},
        ["head_groups=True", "4 heads", "5 branches"],
    ),
    "head_groups is no bool": ({"head_groups": "no"}, ["head_groups", "'no'", "bool"]),
    "return_lse is no bool": ({"return_lse": "yes"}, ["return_lse", "'yes'", "bool"]),
    "unknown compat": ({"compat": "longnet"}, ["compat", "'longnet'", '"torchscale"']),
    "compat and groups": ({"compat": "torchscale", "head_groups": True}, ["compat", "head_groups=True"]),
    "scale nan": ({"scale": math.nan}, ["scale", "nan", "finite"]),
    "scale inf": ({"scale": math.inf}, ["scale", "inf", "finite"]),
    "scale beyond single precision": ({"scale": -1e39}, ["scale", "-1e+39", "single precision"]),
    "scale is text": ({"scale": "1"}, ["scale", "'1'", "number"]),
    "is_causal is no bool": ({"is_causal": "yes"}, ["is_causal", "'yes'", "bool"]),
    "dropout 1": ({"dropout_p": 1.0}, ["dropout_p", "1.0", "[0, 1)"]),
    "dropout 2": ({"dropout_p": 2.0}, ["dropout_p", "2.0", "[0, 1)"]),
    "lengths and cu_seqlens": ({"lengths": ids(8, 8), "cu_seqlens": ids(0, 8)}, ["lengths", "cu_seqlens", "both"]),
    "too many lengths": ({"lengths": ids(8, 8, 8)}, ["lengths", "(3,)", "2 integers"]),
    "rank of lengths": ({"lengths": ids(8, 8)[None]}, ["lengths", "(1, 2)", "2 integers"]),
    "dtype of lengths": ({"lengths": ids(8, 8).double()}, ["lengths", "torch.float64", "2 integers"]),
    "lengths is text": ({"lengths": "all"}, ["lengths", "'all'", "2 integers"]),
    "lengths are truths": ({"lengths": [True, True]}, ["lengths", "[True, True]", "2 integers"]),
    "length over seq": ({"lengths": ids(8, 9)}, ["lengths", "[8, 9]", "[0, 8]"]),
    "length below 0": ({"lengths": ids(-1, 8)}, ["lengths", "[-1, 8]", "[0, 8]"]),
    "cu_seqlens and a batch": ({"cu_seqlens": ids(0, 8)}, ["cu_seqlens", "batch 2", "batch 1"]),
    "mask of bytes": (
        {"key_padding_mask": torch.zeros(2, 8, dtype=torch.uint8)},
        ["key_padding_mask", "torch.uint8", "bool"],
    ),
    "mask is a list": ({"key_padding_mask": [[False] * 8] * 2}, ["key_padding_mask", "list", "bool"]),
    "shape of mask": (
        {"key_padding_mask": torch.zeros(2, 7, dtype=torch.bool)},
        ["key_padding_mask", "(2, 7)", "(2, 8)"],
    ),
    "mask over heads": (
        {"key_padding_mask": torch.zeros(2, 4, 8, 8, dtype=torch.bool)},
        ["key_padding_mask", "(2, 4, 8, 8)", "(2, 8)"],
    ),
    "device of mask": (
        {"key_padding_mask": torch.zeros(2, 8, dtype=torch.bool, device="meta")},
        ["key_padding_mask", "meta", "cpu"],
    ),
    "unknown backend": ({"backend": "cuda"}, ["backend", "'cuda'", "'native'", "'reference'"]),
    "mesh": ({"mesh": object()}, ["mesh", "object", "DeviceMesh", "ProcessGroup"]),
    "transport": ({"transport": "ring"}, ["transport", "'ring'", "mesh"]),
    "seq_len": ({"seq_len": 9}, ["seq_len", "9", "8"]),
    "head_offset": ({"head_offset": -1}, ["head_offset", "-1", "non-negative"]),
    "head_offset of blocks": ({"head_offset": 4, "offsets": "head_block"}, ["head_offset", "4", "table"]),
    "head_offset of the first blocks": ({"head_offset": 0, "offsets": "head_block"}, ["head_offset", "0", "table"]),
    "head_offset of the first groups": ({"head_offset": 0, "head_groups": True}, ["head_offset", "0", "table"]),
    "head_offset of a released model": ({"head_offset": 0, "compat": "torchscale"}, ["head_offset", "0", "table"]),
    "a table of more heads": ({"offsets": [[0] * 6] * 2}, ["offsets", "6 entries", "heads 0 to 4", "head_offset"]),
}

PACKED = {
    "starts late": (ids(1, 8), ["cu_seqlens", "[1, 8]", "from 0 to"]),
    "ends early": (ids(0, 7), ["cu_seqlens", "[0, 7]", "8"]),
    "ends late": (ids(0, 9), ["cu_seqlens", "[0, 9]", "8"]),
    "descends": (ids(0, 5, 3, 8), ["cu_seqlens", "[0, 5, 3, 8]", "ascend"]),
    "empty": (ids(), ["cu_seqlens", "(0,)", "(samples + 1,)"]),
    "rank": (ids(0, 8)[None], ["cu_seqlens", "(1, 2)", "(samples + 1,)"]),
    "dtype": (ids(0, 8).float(), ["cu_seqlens", "torch.float32", "integers"]),
}


def refused(arguments: dict, words: list[str], error: type[Exception] = ValueError) -> None:
    tensors = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor) and not x.is_sparse}
    before = {name: x.clone() for name, x in tensors.items()}
    with pytest.raises(error) as raised:
        dilated_attention(**arguments)
    message = str(raised.value)
    assert all(word in message for word in words), f"{message!r} lacks {[w for w in words if w not in message]}"
    for name, x in before.items():
        assert x.is_meta or torch.equal(x.view(torch.uint8), arguments[name].view(torch.uint8)), f"{name} was changed"


def arguments(**changes) -> dict:
    return {
        "q": tensor(),
        "k": tensor(),
        "v": tensor(),
        "segment_lengths": [4, 8],
        "dilation_rates": [1, 2],
        **changes,
    }


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("name", BAD)
def test_bad_argument(name, backend):
    changes, words = BAD[name]
    refused(arguments(**{"backend": backend} | changes), words)


@pytest.mark.parametrize("name", ["before", "after", "rate", "leading"])
def test_a_window_of_no_sequence(name):
    for value in (-1, 2**63, 1.5):
        with pytest.raises(ValueError, match=name):
            Window(**{"before": 3, name: value})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout):
    q = torch.nested.nested_tensor([tensor(4, 2, 8), tensor(5, 2, 8)], layout=layout)
    with pytest.raises(ValueError, match=r"q must be a dense tensor.*to_padded_tensor\(q, 0.0\)"):
        attention(q, q, q, Window(3))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: BlockLayout.hierarchical(100, 3), ["levels", "3", "(stride, window)"]),
        (lambda: BlockLayout.stack([1]), ["layouts", "[1]", "BlockLayout"]),
        (lambda: BlockLayout.global_(16, tokens=[0], density=0.5, block_size=4), ["tokens", "[0]", "density=0.5"]),
        (lambda: BlockLayout.local(100, 5, 8).select(heads=[3]), ["heads", "[3]", "[0, 1)"]),
        (lambda: BlockLayout.local(100, 5, 8).select(batch=[-2]), ["batch", "[-2]", "[0, 1)"]),
        (lambda: BlockLayout.local(100, 5, 8).to(torch.float16), ["device", "torch.float16"]),
    ],
)
def test_bad_layouts(build, words):
    with pytest.raises(ValueError, match=words[0]) as raised:
        build()
    assert all(word in str(raised.value) for word in words)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_no_tensor_under_autocast(name):
    with torch.autocast("cpu", torch.bfloat16):
        refused(arguments(**{name: [1.0]}), [name, "list", "torch.Tensor"])


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_no_tensor_at_all(name):
    refused(arguments(**{name: None}), [name, "NoneType", "torch.Tensor"])


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("name", PACKED)
def test_bad_packing(name, backend):
    cu_seqlens, words = PACKED[name]
    packed = {x: tensor(1, SEQ, HEADS, DIM) for x in "qkv"}
    refused(arguments(**packed, cu_seqlens=cu_seqlens, backend=backend), words)


def test_a_batch_of_none():
    empty = {x: tensor(0, SEQ, HEADS, DIM) for x in "qkv"}
    for options in ({}, {"lengths": []}, {"lengths": ids()}):
        assert dilated_attention(**arguments(**empty), **options).shape == (0, SEQ, HEADS, DIM)


def test_a_mesh_that_is_none():
    refused(arguments(mesh=object()), ["mesh", "DeviceMesh"])


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_mesh_of_one_rank(one_rank):
    """It is one device; what would be wrong on more ranks is wrong here."""
    for transport in ("auto", "exchange", "doubling", "ring", "all_gather", "ulysses"):
        dilated_attention(**arguments(mesh=one_rank, seq_len=SEQ, transport=transport))
    refused(arguments(mesh=one_rank, transport="nonsense"), ["transport", "'nonsense'", "'ulysses'"])
    for pattern in (Dilated((4, 8), (1, 2)), BlockLayout.local(100, 8, 8)):
        for seq_len in (100, SEQ - 1):
            with pytest.raises(ValueError, match=f"seq_len={seq_len} on one device must be q's own length, {SEQ}"):
                attention(tensor(), tensor(), tensor(), pattern, mesh=one_rank, seq_len=seq_len)


def test_no_backend_says_why_each_refused():
    eight = {x: tensor().to(torch.float8_e5m2) for x in "qkv"}
    refused(arguments(**eight), ["native", "torch.float8_e5m2", "reference"], BackendError)


def test_too_long_for_the_reference():
    meta = {x: tensor(1, 2**20, 1, 1, device="meta") for x in "qkv"}
    refused(arguments(**meta, backend="reference"), ["seq_len = 1048576", "native"])


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("name", "qkv")
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32])
def test_nan_and_inf_pass_through(name, number, backend, dtype):
    """Token 5 lies in the second segment of 4: its head there may be anything, the first segment is as it was."""
    generator = torch.Generator().manual_seed(0)
    clean = {x: torch.randn(BATCH, SEQ, HEADS, DIM, generator=generator).to(dtype) for x in "qkv"}
    dirty = {x: y.clone() for x, y in clean.items()}
    dirty[name][1, 5, 2, 3] = number
    leaves = [x.requires_grad_() for x in dirty.values()]
    out, lse = dilated_attention(*leaves, [4], [1], backend=backend, return_lse=True)
    expected = dilated_attention(*clean.values(), [4], [1], backend=backend)
    elsewhere = torch.ones_like(out, dtype=torch.bool)
    elsewhere[1, 4:, 2] = False
    assert torch.equal(out[elsewhere], expected[elsewhere])
    rows = 5 if name == "q" else slice(4, None)
    seen = out[1, rows, 2]
    if math.isnan(number):
        assert (seen if name != "v" else seen[:, 3]).isnan().all()
        assert (lse[1, 2, rows].isnan() == (name != "v")).all()
    for gradient in torch.autograd.grad(out.sum(), leaves):
        assert gradient[0].isfinite().all()


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32])
def test_a_hidden_key_reaches_nothing(number, is_causal, backend, dtype):
    generator = torch.Generator().manual_seed(0)
    clean = [torch.randn(1, 64, HEADS, DIM, generator=generator).to(dtype) for _ in "qkv"]
    hidden = torch.zeros(1, 64, dtype=torch.bool)
    hidden[:, [0, 40]] = True
    dirty = [clean[0], *(x.masked_fill(hidden[:, :, None, None], number) for x in clean[1:])]
    results = []
    for tensors in (clean, dirty):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out, lse = dilated_attention(
            *leaves, [32, 64], [1, 2], is_causal=is_causal, key_padding_mask=hidden, return_lse=True, backend=backend
        )
        results.append([out, lse, *torch.autograd.grad((out, lse), leaves, (out.cos(), lse.exp().cos()))])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


HIDING = {
    "dilated": (Dilated((32, 64), (1, 2)), {}),
    "layout": (BlockLayout.local(64, 20, 8), {}),
    "product": (Dilated((32, 64), (1, 2)) * (lambda n: BlockLayout.local(n, 8, 8)), {}),
    "packed": (Dilated((32, 64), (1, 2)), {"cu_seqlens": ids(0, 24, 64)}),
    "packed layout": (BlockLayout.local(40, 20, 8), {"cu_seqlens": ids(0, 24, 64)}),
    "sinks": (Dilated((32, 64), (1, 2)), {"sinks": torch.zeros(HEADS)}),
}


@pytest.mark.parametrize("backend", ["native", "cpu", "reference"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", HIDING)
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_hidden_token_spoils_only_its_own_row(number, name, is_causal, backend):
    """Nothing finite in q, k, v and the gradient of a hidden token: other rows are as if its gradient were 0."""
    pattern, options = HIDING[name]
    generator = torch.Generator().manual_seed(0)
    clean = [torch.randn(1, 64, HEADS, DIM, generator=generator) for _ in "qkvo"]
    hidden = torch.zeros(1, 64, dtype=torch.bool)
    hidden[:, [0, 10, 40]] = True
    clean[3][hidden] = 0
    results = []
    for q, k, v, dout in (clean, [x.masked_fill(hidden[:, :, None, None], number) for x in clean]):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = attention(
            *leaves, pattern, is_causal=is_causal, key_padding_mask=hidden, return_lse=True, backend=backend, **options
        )
        lse = lse.transpose(1, 2)
        seen = lse > -math.inf
        gradients = torch.autograd.grad((out, lse), leaves, (dout, torch.where(seen, dout[..., 0], 0.0)))
        results.append([out, lse, *gradients])
    expected, (out, lse, *gradients) = results
    for a, b in zip(expected, (out, lse, *gradients), strict=True):
        assert torch.equal(a[~hidden], b[~hidden])
    empty = expected[1][hidden] == -math.inf
    for x, of_empty in ((out, 0.0), (lse, -math.inf)):
        assert x[hidden][~empty].isnan().all()
        assert (x[hidden][empty] == of_empty).all()
    assert all(not gradient[hidden].any() for gradient in gradients)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32])
def test_what_lies_beyond_a_sample_reaches_nothing(is_causal, backend, dtype):
    """NaN behind `lengths`, or in another sample of `cu_seqlens`, changes no row and no gradient before it."""
    generator = torch.Generator().manual_seed(0)
    clean = [torch.randn(1, SEQ, HEADS, DIM, generator=generator).to(dtype) for _ in "qkv"]
    dirty = [torch.cat([x[:, :5], torch.full_like(x[:, 5:], torch.nan)], 1) for x in clean]
    for ragged in ({"lengths": ids(5)}, {"cu_seqlens": ids(0, 5, 8)}):
        results = []
        for tensors in (clean, dirty):
            leaves = [x.clone().requires_grad_() for x in tensors]
            out = dilated_attention(*leaves, [4, 8], [1, 2], is_causal=is_causal, backend=backend, **ragged)
            results.append([out, *torch.autograd.grad(out[:, :5].sum(), leaves)])
        for a, b in zip(*results, strict=True):
            assert torch.equal(a[:, :5], b[:, :5])


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_under_causality_what_is_not_finite_in_v_stays_in_its_segment_and_out_of_lse(number, backend):
    """The last row of v in the second segment of three: queries before it do not get it, except from Triton's kernels,
    which multiply it by their weights of 0, so that these queries may be NaN, and their gradients."""
    generator = torch.Generator().manual_seed(0)
    clean = [torch.randn(2, 60, HEADS, DIM, generator=generator) for _ in "qkv"]
    dirty = [x.clone() for x in clean]
    dirty[2][1, 39, 2] = number
    results = []
    for tensors in (clean, dirty):
        leaves = [x.requires_grad_() for x in tensors]
        out, lse = dilated_attention(*leaves, [20], [1], is_causal=True, return_lse=True, backend=backend)
        results.append((out, lse, *torch.autograd.grad(out.sum() + lse.sum(), leaves)))
    (out, lse, *gradients), (dirty_out, dirty_lse, *dirty_gradients) = results
    assert torch.equal(lse, dirty_lse)
    spoilt = torch.zeros(2, 60, HEADS, dtype=torch.bool)
    spoilt[1, slice(20, 40) if backend == "triton" else 39, 2] = True
    assert torch.equal(out[~spoilt], dirty_out[~spoilt])
    assert not dirty_out[1, 39, 2].isfinite().any()
    spoilt[1, 20:40, 2] = True  # the query at 39 sees all keys of the segment
    for a, b in zip(gradients, dirty_gradients, strict=True):
        assert torch.equal(a[~spoilt], b[~spoilt])


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_under_causality_what_is_not_finite_in_k_reaches_no_earlier_query(backend):
    clean = [torch.randn(1, 40, HEADS, DIM) for _ in "qkv"]
    dirty = [x.clone() for x in clean]
    dirty[1][0, 39, 2] = math.nan
    out, other = (dilated_attention(*x, [40], [1], is_causal=True, backend=backend) for x in (clean, dirty))
    assert torch.equal(out[:, :39], other[:, :39])
    assert other[0, 39, 2].isnan().all()


@pytest.mark.parametrize("shape", [(1, 8, 4096, 4), (1, 12, 384, 4), (2, 16, 256, 4)])
def test_heads_and_tokens_that_look_exchanged_are_warned_of(shape):
    x = torch.empty(shape, device="meta")
    with pytest.warns(
        UserWarning, match=r"of shape \(\d+, \d+, \d+, 4\) is read as .* give q\.transpose\(1, 2\)"
    ) as caught:
        dilated_attention(x, x, x, [8], [1])
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("shape", "kv_heads"), [((64, 1, 128, 4), 128), ((1, 1, 512, 4), 8), ((1, 4096, 8, 4), 8), ((1, 256, 512, 4), 512)]
)
def test_shapes_of_models_are_not(shape, kv_heads):
    q, k = torch.empty(shape, device="meta"), torch.empty(*shape[:2], kv_heads, 4, device="meta")
    dilated_attention(q, k, k, [8], [1])


@pytest.mark.parametrize("backend", ["native", "cpu"])
@pytest.mark.parametrize("pattern", [Dilated((64,), (1,)), BlockLayout.local(64, 20, 4)], ids=["dilated", "blocks"])
def test_tokens_that_overlap_in_memory(pattern, backend):
    """Windows over a signal, `unfold`: matrix products read garbage where a row begins inside the one before."""
    if backend == "cpu" and cpu.missing() is not None:
        pytest.skip(cpu.missing())
    q, k, v = (torch.randn(96).as_strided((1, 64, 4, 8), (0, 1, 8, 1)) for _ in range(3))
    found = attention(q, k, v, pattern, backend=backend)
    torch.testing.assert_close(found, attention(q, k, v, pattern, backend="reference"), rtol=1e-5, atol=1e-5)


CAUSAL = {"is_causal": True}
MASKED = {"key_padding_mask": torch.arange(96)[None] % 7 == 3}
HIDING_KEYS = {
    "window": (Window(20), CAUSAL),
    "window both ways": (Window(12), {}),
    "window with a rate": (Window(6, rate=3), CAUSAL),
    "window with leading tokens": (Window(20, leading=2), CAUSAL),
    "capped window": (Window(20), CAUSAL | {"softcap": 2.0}),
    "window with dropout": (Window(20), CAUSAL | {"dropout_p": 0.5}),
    "window, lengths": (Window(20), CAUSAL | {"lengths": ids(94)}),
    "window, mask": (Window(20), CAUSAL | MASKED),
    "window, decoding": (Window(20), CAUSAL | {"q_start": 80}),
    "decoding": (Dilated([96], [1]), CAUSAL | {"q_start": 80}),
    "dilated": (Dilated([32, 96], [1, 2]), CAUSAL),
    "dilated, mask": (Dilated([32, 96], [1, 2]), CAUSAL | MASKED),
    "layout": (BlockLayout.local(96, 32, 16, is_causal=True), CAUSAL),
    "layout of unequal blocks": (BlockLayout.local(96, 32, (16, 32), is_causal=True), CAUSAL),
}


def seen_keys(pattern, options):
    """Return which of 96 keys each query sees, (heads, queries, keys), from the oracle's weights of equal scores."""
    ones = torch.eye(96).expand(1, 2, 96, 96).transpose(1, 2)
    q = torch.zeros(1, 96 - options.get("q_start", 0), 2, 96)
    hiding = {name: option for name, option in options.items() if name not in ("dropout_p", "softcap")}
    return attention(q, torch.zeros_like(ones), ones, pattern, backend="reference", **hiding)[0].transpose(0, 1) > 0


def spoilt_results(tensors, pattern, options, backend):
    """Return out, lse, dq, dk and dv, each without its batch."""
    torch.manual_seed(0)  # of dropout
    leaves = [x.clone().requires_grad_() for x in tensors]
    out, lse = attention(*leaves, pattern, backend=backend, return_lse=True, **options)
    cotangents = torch.ones_like(out), lse.detach().cos().masked_fill(lse == -math.inf, 0.0)
    return [x[0] for x in (out, lse.transpose(1, 2), *torch.autograd.grad((out, lse), leaves, cotangents))]


@pytest.mark.parametrize("backend", ["native", "cpu", "reference"])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("spoilt", "qkv")
@pytest.mark.parametrize("name", HIDING_KEYS)
def test_what_is_not_finite_reaches_only_rows_that_see_it(name, spoilt, number, backend):
    """Out, lse and dq change for the queries that see the token; dk and dv for the keys that these queries see."""
    pattern, options = HIDING_KEYS[name]
    first = options.get("q_start", 0)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 96, heads, 16, generator=generator) for heads in (4, 2, 2))
    clean = {"q": q[:, first:], "k": k, "v": v}
    expected = spoilt_results(clean.values(), pattern, options, backend)
    seen = seen_keys(pattern, options)
    for token in (93, 85):
        dirty = {name: x.clone() for name, x in clean.items()}
        rows = seen[:, :, token].clone()
        if spoilt == "q":
            rows[:] = torch.arange(first, 96) == token
        dirty[spoilt][0, token - first * (spoilt == "q"), :, 3] = number
        keys = (seen & rows[..., None]).any(1).T
        rows = rows.repeat_interleave(2, 0).T
        found = spoilt_results(dirty.values(), pattern, options, backend)
        assert not (found[0][rows] == expected[0][rows]).all(-1).any()
        for changed, x, y in zip((rows, rows, rows, keys, keys), expected, found, strict=True):
            assert torch.equal(x[~changed], y[~changed])
