"""Models with nn.MultiheadAttention, converted."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from dilated_attention import BlockLayout, Dilated, Sum, UnsupportedError, Window
from dilated_attention.integrations import convert_attention
from dilated_attention.nn import MultiheadDilatedAttention
from tolerances import TOLERANCE, relative_error

pytestmark = [  # PyTorch's own encoder
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

WHOLE = ([64], [1])
F64 = {"dtype": torch.float64}


def encoder(**options) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, **{"batch_first": True, **F64, **options})
    return nn.TransformerEncoder(layer, 2)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_equals_dense_in_every_mode(norm_first, batch_first):
    theirs = encoder(norm_first=norm_first, batch_first=batch_first)
    ours = copy.deepcopy(theirs)
    assert convert_attention(ours, *WHOLE) == ["layers.0.self_attn", "layers.1.self_attn"]
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x = torch.randn(3, 11, 16, **F64)
    padding = torch.zeros(3, 11, dtype=torch.bool)
    padding[0, 7:], padding[2, 4:] = True, True
    causal = nn.Transformer.generate_square_subsequent_mask(11, **F64)
    given = x if batch_first else x.transpose(0, 1)
    real = (~padding if batch_first else ~padding.T).unsqueeze(-1)
    for options in (
        {},
        {"src_key_padding_mask": padding},
        {"mask": causal, "is_causal": True},
        {"mask": causal},
        {"mask": causal, "src_key_padding_mask": torch.zeros(3, 11, **F64).masked_fill(padding, -torch.inf)},
    ):
        for training in (True, False):
            with torch.set_grad_enabled(training):
                expected, out = (m.train(training)(given, **options) for m in (theirs, ours))
            keep = real if "src_key_padding_mask" in options else torch.ones_like(real)
            assert relative_error(out * keep, expected * keep) <= TOLERANCE[torch.float64]


def near(n: int) -> BlockLayout:
    return BlockLayout.local(n, window=3, block_size=1)


@pytest.mark.parametrize("pattern", [Window(2), near(11), Window(1) + near(11), near, Dilated([64], [1]) * near])
def test_any_pattern_equals_the_mask(pattern):
    theirs = encoder()
    ours, x = copy.deepcopy(theirs), torch.randn(3, 11, 16, **F64)
    assert convert_attention(ours, pattern) == ["layers.0.self_attn", "layers.1.self_attn"]
    distance = (torch.arange(11)[:, None] - torch.arange(11)).abs()
    bias = torch.zeros(11, 11, **F64).masked_fill(distance > 2, -torch.inf)
    if isinstance(pattern, Sum):
        bias = bias.masked_fill(distance < 2, math.log(2))  # shown by both terms
    expected, out = theirs(x, mask=bias), ours(x)
    assert relative_error(out, expected) <= TOLERANCE[torch.float64]


def test_a_pattern_excludes_segments():
    for given in ({"segment_lengths": [4], "dilation_rates": [1]}, {"offsets": "head_block"}, {"head_groups": True}):
        with pytest.raises(ValueError, match=r"self_attn: pattern=Window.* is given beside"):
            convert_attention(encoder(), Window(2), **given)
    with pytest.raises(ValueError, match=r"self_attn: segment_lengths=None and dilation_rates=None: give both"):
        convert_attention(encoder())
    keywords, positions = encoder(), encoder()
    convert_attention(keywords, segment_lengths=[4, 8], dilation_rates=[1, 2])
    convert_attention(positions, [4, 8], [1, 2])
    found = [model.layers[0].self_attn.attention.pattern for model in (keywords, positions)]
    assert found == [Dilated([4, 8], [1, 2])] * 2


def test_decoder_keeps_its_cross_attention():
    layer = nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0, batch_first=True, **F64)
    theirs = nn.TransformerDecoder(layer, 2)
    ours = copy.deepcopy(theirs)
    assert convert_attention(ours, *WHOLE) == ["layers.0.self_attn", "layers.1.self_attn"]
    x, memory = torch.randn(2, 9, 16, **F64), torch.randn(2, 5, 16, **F64)
    causal = nn.Transformer.generate_square_subsequent_mask(9, **F64)
    out, expected = (m(x, memory, tgt_mask=causal, tgt_is_causal=True) for m in (ours, theirs))
    assert relative_error(out, expected) <= TOLERANCE[torch.float64]


def test_parameters_stay_the_same_objects():
    model = encoder(bias=False).eval()
    before = dict(model.named_parameters())
    convert_attention(model, [4, 8], [1, 2], backend="reference", choose=lambda name, _: name.startswith("layers.1"))
    assert {name: id(x) for name, x in model.named_parameters()} == {name: id(x) for name, x in before.items()}
    assert type(model.layers[0].self_attn) is nn.MultiheadAttention
    ours = model.layers[1].self_attn
    assert type(ours) is MultiheadDilatedAttention
    assert not ours.training
    assert ours.attention.pattern.segment_lengths == (4, 8)
    assert ours.attention.backend == "reference"


def test_a_shared_module_stays_shared():
    attention = nn.MultiheadAttention(16, 4, kdim=8, vdim=6)
    model = nn.ModuleDict({"a": attention, "b": nn.ModuleList([attention])})
    assert convert_attention(model, [4], [1]) == ["a", "b.0"]
    assert model["a"] is model["b"][0]
    assert model["a"].q_proj_weight is attention.q_proj_weight


def test_tied_projections_stay_tied():
    theirs = nn.MultiheadAttention(16, 4, vdim=8, batch_first=True, **F64)
    theirs.k_proj_weight = theirs.q_proj_weight
    model = nn.ModuleList([copy.deepcopy(theirs)])
    convert_attention(model, *WHOLE)
    ours = model[0]
    assert ours.k_proj_weight is ours.q_proj_weight
    inputs = torch.randn(2, 11, 16, **F64), torch.randn(2, 11, 16, **F64), torch.randn(2, 11, 8, **F64)
    assert relative_error(ours(*inputs)[0], theirs(*inputs)[0]) <= TOLERANCE[torch.float64]


class Custom(nn.MultiheadAttention):
    pass


HOOKS = (
    *("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook", "state_dict_pre_hook"),
    *("state_dict_post_hook", "load_state_dict_pre_hook", "load_state_dict_post_hook"),
)


def hooked(kind: str) -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(16, 4)
    getattr(module, f"register_{kind}")(lambda *_: None)
    return module


@pytest.mark.parametrize(
    ("second", "options", "message"),
    [
        (lambda: nn.MultiheadAttention(16, 4, add_bias_kv=True), {}, "1: add_bias_kv=True: the added key"),
        (lambda: nn.MultiheadAttention(16, 4, add_zero_attn=True), {}, "1: add_zero_attn=True: the added key"),
        (lambda: Custom(16, 4), {}, "1: Custom may compute more"),
        *[(lambda kind=kind: hooked(kind), {}, "1: it has hooks") for kind in HOOKS],
        (lambda: nn.MultiheadAttention(16, 2), {"offsets": [[0, 0, 0, 0]]}, "1: offsets must have one entry"),
    ],
)
def test_nothing_is_replaced_when_one_is_refused(second, options, message):
    model = nn.ModuleList([nn.MultiheadAttention(16, 4), second()])
    before = list(model)
    with pytest.raises(ValueError, match=message):
        convert_attention(model, *WHOLE, **options)
    assert all(now is then for now, then in zip(model, before, strict=True))


def test_refusals(unchecked):
    with pytest.raises(ValueError, match=r"Linear has no nn\.MultiheadAttention to replace"):
        convert_attention(nn.Linear(2, 2), *WHOLE)
    with pytest.raises(ValueError, match=r"is itself an nn\.MultiheadAttention"):
        convert_attention(nn.MultiheadAttention(16, 4), *WHOLE)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn: segment_lengths and dilation_rates"):
        convert_attention(encoder(), [4, 8], [1])
    with pytest.raises(
        ValueError, match=r"self_attn: dilation_rates must hold positive integers, one per branch; got 1"
    ):
        convert_attention(encoder(), [4], 1)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn: backend must be one of .*got 'x'"):
        convert_attention(encoder(), *WHOLE, backend="x")
    model = encoder()
    convert_attention(model, *WHOLE)
    with pytest.raises(UnsupportedError, match=r"attn_mask: .* only the causal one"):
        model(torch.randn(2, 11, 16, **F64), mask=torch.ones(11, 11, **F64).triu().log())
