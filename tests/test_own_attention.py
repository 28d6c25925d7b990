"""transformers' models with windows, chunks, sinks and caps compute their own attention, as in eager mode."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import (
    BertConfig,
    BertModel,
    EsmcConfig,
    EsmcModel,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Gemma3TextModel,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PreTrainedModel,
    T5Gemma2Config,
    T5Gemma2ForConditionalGeneration,
)
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from dilated_attention.errors import UnsupportedError
from dilated_attention.integrations.huggingface import NAME, dilate, report, visibility
from dilated_attention.integrations.own_attention import Shown, attend, read_arguments, read_mask
from tolerances import relative_error
from transformers_families import CHOOSING, FAMILIES, OTHERS, REFUSED, build, build_other

TOKENS = 43
SMALL_GEMMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
ONLY_GEMMA3 = ("sliding_window", "layer_types")
SMALL_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
FROM_THE_START = ("minimax_m3_vl",)  # counts its blocks of keys from the start of a row
NO_STATIC_CACHE = ("deepseek_v4",)  # refused by transformers for these families


def _models(family: str) -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedModel]:
    """Return three models of the same weights: eager, ours, and sdpa (eager again where a family has no sdpa)."""
    eager, ours = build(family, "eager"), build(family, NAME)
    sdpa = build(family, "sdpa" if eager._supports_sdpa else "eager")
    for model in (ours, sdpa):
        model.load_state_dict(eager.state_dict())
    return eager, ours, sdpa


def _tokens() -> Tensor:
    return torch.randint(3, 97, (2, TOKENS), generator=torch.Generator().manual_seed(1))


def _output(model: PreTrainedModel, **inputs: Tensor | bool) -> Tensor:
    output = model(**inputs)
    return output.logits if "logits" in output else output.last_hidden_state


def _in_float64(model: PreTrainedModel) -> PreTrainedModel:
    model = deepcopy(model).double()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = "eager"  # torch.nn.functional.grouped_mm has no float64
    return model


def _assert_close(eager: Tensor, actual: Tensor, *others: Tensor) -> None:
    """Assert that a result differs from eager mode's by at most 1e-5 of its largest value, plus twice the largest
    distance between eager mode and `others`, which round otherwise."""
    expected, actual, *others = (x.detach() for x in (eager, actual, *others))
    rounding = max(float((expected - x).abs().max()) for x in others)
    scale = max(float(expected.abs().max()), 1.0)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * scale + 2 * rounding)


def _masks() -> list[Tensor]:
    """Return masks with padding on the left and on the right."""
    left, right = torch.ones(2, 2, TOKENS, dtype=torch.long)
    left[1, :11] = 0
    right[1, -9:] = 0
    return [left, right]


@pytest.mark.parametrize("shown", [Shown(False), Shown(True), Shown(False, 4), Shown(True, 4), Shown(True, chunk=5)])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_read(side, shown):
    """Each sample gets what it gets alone. Padding may hold any numbers; on the right it gets 0."""
    samples = [torch.randn(3, 1, length, 2, 8) for length in (20, 7, 1)]
    batch = torch.full((3, 3, 20, 2, 8), math.nan)
    hidden = torch.ones(3, 20, dtype=torch.bool)
    places = []
    for i, sample in enumerate(samples):
        length = sample.shape[2]
        places.append(slice(20 - length, None) if side == "left" else slice(length))
        batch[:, i, places[i]], hidden[i, places[i]] = sample[:, 0], False
    first = hidden.sum(1) if side == "left" and shown.chunk else None
    shown = replace(shown, queries=20, keys=20)
    out = attend(replace(shown, hidden=hidden, first_tokens=first), *batch, scale=None)
    for i, sample in enumerate(samples):
        alone = replace(shown, queries=sample.shape[2], keys=sample.shape[2])
        torch.testing.assert_close(out[i, places[i]], attend(alone, *sample, scale=None)[0])
    if side == "right":
        assert not out[hidden].any()


@pytest.mark.parametrize("family", [*FAMILIES, *CHOOSING])
def test_equals_eager(family):
    models, tokens = _models(family), _tokens()
    if family in (
        "diffusion_gemma",
        "embedding_gemma2",
        "muse_spark",
    ):  # gradients in thousands: eager's round as far as ours
        models = *models, _in_float64(models[0])
    outputs = [_output(model, input_ids=tokens) for model in models]
    words = ["chosen"] if family in CHOOSING else ["window", "chunk", "a mask"]
    assert any(word in report(models[1]) for word in words)
    _assert_close(*outputs[:3])
    weights = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(2))
    for output in outputs:
        (output * weights).sum().backward()
    named = [dict(model.named_parameters()) for model in models]
    for name in named[0]:
        gradients = [parameters[name].grad for parameters in named]
        assert len({x is None for x in gradients}) == 1, name
        if gradients[0] is not None:
            _assert_close(*gradients)
    with torch.no_grad():
        for mask in _masks()[family in FROM_THE_START :]:
            outputs = [_output(model, input_ids=tokens, attention_mask=mask) for model in models]
            _assert_close(*(x[mask.bool()] for x in outputs[:3]))


@pytest.mark.filterwarnings("ignore")  # PyTorch's exporters
@pytest.mark.parametrize("dynamo", [True, False])
def test_onnx(dynamo, tmp_path):
    """An export ends with words of ours, and after `set_attn_implementation("sdpa")` the file computes the same."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model, tokens, mask = build("modernbert", NAME).eval(), _tokens(), _masks()[1]
    expected = model(tokens, mask).last_hidden_state
    model.config.return_dict = False
    file = tmp_path / "model.onnx"
    with pytest.raises(Exception, match="set_attn_implementation") as error:
        torch.onnx.export(model, (tokens, mask), file, dynamo=dynamo)
    assert isinstance(error.value if not dynamo else error.value.__cause__, UnsupportedError)
    model.set_attn_implementation("sdpa")
    torch.onnx.export(model, (tokens, mask), file, dynamo=dynamo)
    session = runtime.InferenceSession(file)
    names = [x.name for x in session.get_inputs()]
    found, *_ = session.run(None, {names[0]: tokens.numpy(), names[1]: mask.numpy()})
    torch.testing.assert_close(torch.from_numpy(found)[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-5)


RESULTS = "audio_values", "logits", "last_hidden_state"


@pytest.mark.parametrize("family", OTHERS)
def test_equals_eager_on_other_inputs(family):
    outputs, gradients, state = [], [], None
    sdpa = "sdpa" if build_other(family, "eager")[0]._supports_sdpa else "eager"
    for implementation in ("eager", NAME, sdpa):
        model, inputs = build_other(family, implementation)
        state = state or model.state_dict()
        model.load_state_dict(state)
        output = model(**inputs)
        outputs.append(next(output[name] for name in RESULTS if name in output))
        weights = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(2))
        (outputs[-1] * weights).sum().backward()
        gradients.append({name: x.grad for name, x in model.named_parameters() if x.grad is not None})
        if implementation == NAME:
            assert "window 8" in report(model)
    _assert_close(*outputs)
    assert gradients[0].keys() == gradients[1].keys()
    for name in gradients[0]:
        _assert_close(*(x[name] for x in gradients))


def _takes_position_ids(family: str) -> bool:
    return family not in ("minimax", "zaya", *FROM_THE_START)  # the first two have layers that do not know samples


@pytest.mark.parametrize("family", [family for family in (*FAMILIES, *CHOOSING) if _takes_position_ids(family)])
def test_packed_samples(family):
    positions = torch.cat([torch.arange(3, 20), torch.arange(TOKENS - 17)])[None].expand(2, -1)
    inputs = {"input_ids": _tokens(), "position_ids": positions, "use_cache": False}
    with torch.no_grad():
        _assert_close(*(_output(model, **inputs) for model in _models(family)))


@pytest.mark.parametrize("family", [x for x, (_, name, _) in (FAMILIES | CHOOSING).items() if name.endswith("LM")])
def test_generates_the_same_tokens(family):
    if family == "recurrent_gemma" and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("before transformers 5.24 its mask and its cache differ in length, which is refused")
    eager, ours, _ = _models(family)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    static = None if family in NO_STATIC_CACHE else "static"
    every = torch.ones(2, TOKENS, dtype=torch.long)
    for cache, mask in ((None, every), (static, every if family in FROM_THE_START else _masks()[0])):
        inputs = {**options, "attention_mask": mask, "cache_implementation": cache}
        expected = eager.generate(_tokens(), **inputs)
        assert torch.equal(expected, ours.generate(_tokens(), **inputs))


SOUNDS = "mimi", "pocket_tts_audio_tokenizer", "qwen3_omni_moe"  # which code or make sound
GENERATING_OTHERS = [family for family in OTHERS if family not in SOUNDS]


@pytest.mark.parametrize("more", [{}, {"cache_implementation": "static"}, {"num_beams": 2}], ids=str)
@pytest.mark.parametrize("family", GENERATING_OTHERS)
def test_generates_the_same_tokens_from_other_inputs(family, more):
    found, state = [], None
    for implementation in ("eager", NAME):
        model, inputs = build_other(family, implementation)
        state = state or model.state_dict()
        model.load_state_dict(state)
        inputs = {name: x for name, x in inputs.items() if not name.startswith("decoder")}
        options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        if "input_features" in inputs:  # a token for each frame: the last eight are left to generate
            inputs["input_ids"] = inputs["input_ids"][:, :-8]
        found.append(model.generate(**inputs, **options, **more))
    assert torch.equal(*found)


def test_an_encoder_made_of_a_decoder():
    """Gemma 3 with `use_bidirectional_attention` (EmbeddingGemma): windows on both sides, and every key."""
    outputs = []
    for implementation in ("eager", NAME, "sdpa"):
        torch.manual_seed(0)
        config = Gemma3TextConfig(**SMALL_GEMMA, use_bidirectional_attention=True)
        config._attn_implementation = implementation
        model = Gemma3TextModel(config).eval()
        outputs.append([_output(model, input_ids=_tokens(), attention_mask=mask)[mask.bool()] for mask in _masks()])
    for results in zip(*outputs, strict=True):
        _assert_close(*results)


@pytest.mark.parametrize("family", REFUSED)
def test_refuses_by_name(family):
    """The implementation that the error names serves the model."""
    words = REFUSED[family][3]
    with pytest.raises(UnsupportedError, match=words) as raised:
        _output(build(family, NAME), input_ids=_tokens())
    other = str(raised.value).split('attn_implementation="')[1].rstrip('"')
    assert _output(build(family, other), input_ids=_tokens()).isfinite().all()


def _prefix(implementation: str) -> tuple[PreTrainedModel, Tensor]:
    """PaliGemma: the first tokens see one another, as many as each sample has with type 0."""
    text = {"model_type": "gemma", **{name: x for name, x in SMALL_GEMMA.items() if name not in ONLY_GEMMA3}}
    vision = {"model_type": "siglip_vision_model", "projection_dim": 32, **SMALL_VISION}
    config = PaliGemmaConfig(text_config=text, vision_config=vision, image_token_index=96, projection_dim=32)
    config._attn_implementation = implementation
    torch.manual_seed(0)
    types = (torch.arange(TOKENS) > torch.tensor([[20], [31]])).long()
    return PaliGemmaForConditionalGeneration(config).eval(), types


def _images(implementation: str) -> tuple[PreTrainedModel, Tensor]:
    """Gemma 3: the tokens of an image see one another; images shorter and longer than the window, and of one token."""
    config = Gemma3Config(text_config=SMALL_GEMMA, vision_config=SMALL_VISION, image_token_id=96, mm_tokens_per_image=4)
    config._attn_implementation = implementation
    torch.manual_seed(0)
    types = torch.zeros(2, TOKENS, dtype=torch.long)
    types[0, 0:4], types[0, 15:34], types[1, 12:17], types[1, 20], types[1, 38:] = 1, 1, 1, 1, 1
    return Gemma3ForConditionalGeneration(config).eval(), types


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("make", [_prefix, _images])
def test_blocks_of_tokens_see_one_another(make, use_cache):
    """Both kinds of padding are tried; and they change the result."""
    for mask in (torch.ones(2, TOKENS, dtype=torch.long), *_masks()):
        results = []
        for implementation in ("eager", NAME, "sdpa"):
            model, types = make(implementation)
            inputs = {"input_ids": _tokens(), "attention_mask": mask, "use_cache": use_cache}
            logits = model(**inputs, token_type_ids=types).logits[mask.bool()]
            logits.sin().sum().backward()
            gradients = torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])
            results.append((logits, gradients))
        for found in zip(*results, strict=True):
            _assert_close(*found)
        with torch.no_grad():
            assert (make(NAME)[0](**inputs).logits[mask.bool()] - results[0][0]).abs().max() > 1e-3


def test_a_dilated_model_takes_a_text_where_images_could_be():
    """A processor marks the places of images in every text; its full layers are dilated, others keep their windows."""
    model, types = _images("eager")
    inputs = {"input_ids": torch.randint(1, 90, types.shape)}
    expected = model(**inputs).logits
    dilate(model, [64], [1], layers="full")
    torch.testing.assert_close(model(**inputs, token_type_ids=torch.zeros_like(types)).logits, expected)
    with pytest.raises(UnsupportedError, match="neither causal nor bidirectional"):
        model(**inputs, token_type_ids=types)


@pytest.mark.parametrize("more", [{}, {"cache_implementation": "static"}, {"num_beams": 2}], ids=str)
@pytest.mark.parametrize("make", [_prefix, _images])
def test_blocks_of_tokens_are_continued(make, more):
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = []
    for implementation in ("eager", NAME):
        model, types = make(implementation)
        inputs = {"attention_mask": _masks()[0], "token_type_ids": types}
        found.append(model.generate(_tokens(), **inputs, **options, **more))
    assert torch.equal(*found)


def _sparse(batch, head, query, key):
    return (query * 7 + key * 5 + batch) % 3 > 0


@pytest.mark.parametrize("past", [0, 20])
@pytest.mark.parametrize(
    "mask_function",
    [
        _sparse,
        or_masks(sliding_window_causal_mask_function(3), blockwise_overlay(torch.arange(60).expand(2, -1) // 15 % 2)),
        and_masks(causal_mask_function, chunked_causal_mask_function(8, torch.zeros(2)), sliding_window_overlay(3)),
        and_masks(causal_mask_function, packed_sequence_mask_function(torch.arange(60).expand(2, -1) // 7 % 3)),
    ],
)
def test_any_mask_function_is_computed(mask_function, past):
    """Padding hides keys, and later tokens have a cache; rows that see nothing are not compared."""
    config = Gemma3TextConfig()
    q, k, v = torch.randn(2, 60 - past, 4, 8), *torch.randn(2, 2, 60, 2, 8)
    padding = torch.arange(60) >= torch.tensor([[0], [9]])
    sizes = (2, 60 - past, 60, past, 0, mask_function, padding)
    shown = visibility(*sizes, config=config)
    out = attend(shown, q, k, v, scale=None)
    mask = sdpa_mask(*sizes, allow_is_causal_skip=False).expand(2, 1, 60 - past, 60)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)
    seen = mask.any(-1)[:, 0]
    torch.testing.assert_close(out[seen], expected[seen])


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_over_pairs_is_taken_from_the_caller(dtype):
    outputs = []
    seen = (torch.rand(2, 1, TOKENS, TOKENS) < 0.4) | torch.eye(TOKENS, dtype=torch.bool)
    mask = seen
    if dtype != torch.bool:
        mask = torch.where(seen, 0.0, torch.finfo(dtype).min)
    for implementation in ("eager", NAME, "sdpa"):
        model = build("gemma3", implementation)
        given = mask
        if implementation == "eager":
            given = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
        outputs.append(_output(model, input_ids=_tokens(), attention_mask=given, use_cache=False))
    _assert_close(*outputs)
    with pytest.raises(UnsupportedError, match="numbers other than 0"):
        _output(build("gemma3", NAME), input_ids=_tokens(), attention_mask=torch.rand(2, 1, TOKENS, TOKENS))


def test_t5gemma2():
    """Its encoder has windows of unequal sides; its decoder, which joins two masks, is refused."""
    encoder = {"text_config": SMALL_GEMMA, "vision_config": SMALL_VISION, "image_token_index": 96}
    config = T5Gemma2Config(encoder=encoder, decoder=SMALL_GEMMA, image_token_index=96)
    config._attn_implementation = NAME
    model = T5Gemma2ForConditionalGeneration(config).eval()
    with pytest.raises(UnsupportedError, match=r'computes with its mask over pairs.*attn_implementation="sdpa"'):
        model(input_ids=_tokens(), decoder_input_ids=_tokens())
    assert "window 3, after 4" in report(model)
    with torch.no_grad():
        for mask in _masks():
            outputs = []
            for implementation in ("eager", NAME, "sdpa"):
                model.set_attn_implementation(implementation)
                states = model.model.encoder(input_ids=_tokens(), attention_mask=mask).last_hidden_state
                outputs.append(states[mask.bool()])
            _assert_close(*outputs)


@pytest.mark.parametrize("places", ["together", "apart", "apart, padded"])
def test_chains_that_see_themselves(places):
    """ESMC gives each token the number of its chain, -1 at padding."""
    chains = torch.arange(TOKENS).expand(2, -1) // 8 % (2 if "apart" in places else TOKENS)
    if "padded" in places:
        chains = chains.masked_fill(torch.arange(TOKENS) >= torch.tensor([[TOKENS], [TOKENS - 9]]), -1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = EsmcConfig(**sizes, vocab_size=97, pad_token_id=1)
    model, outputs = EsmcModel(config).eval(), []
    for implementation in ("eager", NAME, "sdpa"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            outputs.append(model(_tokens(), sequence_id=chains).last_hidden_state[chains >= 0])
    _assert_close(*outputs)


def test_samples_in_any_order_with_a_window_are_refused():
    q = torch.randn(1, 4, 2, 8)
    shown = Shown(True, window=2, samples=torch.tensor([[0, 1, 1, 0]]), queries=4, keys=4)
    with pytest.raises(UnsupportedError, match=r"packed samples in any order.*sdpa"):
        attend(shown, q, q, q)


def test_the_number_of_families_in_the_documents():
    page = (Path(__file__).parents[1] / "docs" / "huggingface.md").read_text(encoding="utf-8")
    assert f"{len(FAMILIES) + len(OTHERS)} families with windows or chunks" in " ".join(page.split())


def test_masks_are_read_back():
    assert read_mask(sliding_window_causal_mask_function(7)).window == 7
    both = read_mask(sliding_window_bidirectional_mask_function(7))
    assert (both.window, both.is_causal) == (7, False)
    padding = torch.tensor([0, 3])
    chunks = read_mask(chunked_causal_mask_function(5, padding))
    assert (chunks.chunk, chunks.is_causal) == (5, True)
    assert chunks.first_tokens is padding
    samples = torch.tensor([[0, 0, 1]])
    assert read_mask(and_masks(causal_mask_function, packed_sequence_mask_function(samples))).samples is samples
    past = read_mask(and_masks(causal_mask_function, sliding_window_bidirectional_mask_function(7)))
    assert (past.window, past.is_causal) == (8, True)
    union = read_mask(or_masks(sliding_window_causal_mask_function(8), sliding_window_bidirectional_mask_function(7)))
    assert (union.window, union.is_causal) == (7, False)


@pytest.mark.parametrize(
    "mask",
    [
        or_masks(causal_mask_function, packed_sequence_mask_function(torch.zeros(1, 3))),
        and_masks(sliding_window_causal_mask_function(3), sliding_window_causal_mask_function(4)),
        and_masks(sliding_window_overlay(3), bidirectional_mask_function),  # a window on one side, later keys all
        or_masks(sliding_window_causal_mask_function(9), sliding_window_bidirectional_mask_function(3)),
        or_masks(bidirectional_mask_function, blockwise_overlay(torch.zeros(1, 3))),
        and_masks(chunked_causal_mask_function(8, torch.zeros(1)), sliding_window_overlay(3)),
        lambda batch, head, query, key: key <= query,
    ],
)
def test_a_mask_that_is_nothing_of_these_is_not_read(mask):
    with pytest.raises(UnsupportedError, match="sdpa"):
        read_mask(mask)


def test_arguments_that_do_not_tell_chunks_from_windows_are_not_read():
    causal = {"allow_is_causal_skip": True}
    sizes = SimpleNamespace(sliding_window=8, attention_chunk_size=16)
    assert read_arguments(chunked_causal_mask_function, 16, sizes, None, causal).chunk == 16
    assert read_arguments(chunked_causal_mask_function, 8, sizes, None, causal).window == 8
    sizes.attention_chunk_size = 8
    assert read_arguments(chunked_causal_mask_function, 8, sizes, None, causal) is None


def test_a_report_says_what_layers_do():
    model = build("gemma2", NAME)
    with pytest.raises(ValueError, match="has not called this library yet"):
        report(model)
    model(input_ids=_tokens())
    lines = report(model).splitlines()
    assert lines[0] == "model.layers.0.self_attn: causal, window 8: 43 queries from 0 on, 43 keys, softcap 50.0"
    assert lines[1] == "model.layers.1.self_attn: causal, all keys: 43 queries from 0 on, 43 keys, softcap 50.0"
    assert len(lines) == 4


@pytest.mark.parametrize("family", ["gemma3", "llama4", "modernbert", "gpt_oss"])
def test_full_layers_alone_are_dilated_and_saved(family, tmp_path):
    """The other layers have windows, chunks or sinks; with padding, with gradients, and loaded again."""
    eager, ours, _ = _models(family)
    dilate(ours, [64], [1], layers="full")
    results = []
    for model in (eager, ours):
        outputs = [_output(model, input_ids=_tokens(), attention_mask=mask)[mask.bool()] for mask in _masks()]
        sum(x.sin().sum() for x in outputs).backward()
        results.append((outputs, torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])))
    for found, expected in zip(results[1][0], results[0][0], strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    assert relative_error(results[1][1], results[0][1]) <= 1e-5
    dilate(ours, [8], [1], layers="full").save_pretrained(tmp_path)
    again = type(ours).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        found, expected = (_output(model, input_ids=_tokens()) for model in (again, ours))
    assert torch.equal(found, expected)
    assert report(again) == report(ours)


def test_capped_scores_are_refused_before_a_model_is_changed():
    model = build("gemma2", "eager")
    for layers in ("all", "full"):
        with pytest.raises(UnsupportedError, match="attn_logit_softcapping=50"):
            dilate(model, [8], [1], layers=layers)
    assert model.config._attn_implementation == "eager"
    assert not hasattr(model.config, NAME)


def test_full_layers_alone_are_asked_of_a_model_without_any():
    model = build("mistral", "eager")
    with pytest.raises(ValueError, match=r'layers="full": every attention layer of MistralForCausalLM has a window'):
        dilate(model, [8], [1], layers="full")
    assert model.config._attn_implementation == "eager"


def test_full_layers_alone_are_dilated():
    """Layers with windows stay what they are; one segment of all tokens is the model's own full attention."""
    eager, ours, _ = _models("gemma3")
    dilate(ours, [64], [1], layers="full")
    tokens = _tokens()
    with torch.no_grad():
        expected = _output(eager, input_ids=tokens)
        found = _output(ours, input_ids=tokens)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    assert ["Dilated" in line for line in report(ours).splitlines()] == [False, True] * 2
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(ours.generate(tokens, **options), eager.generate(tokens, **options))
    with torch.no_grad():
        dilate(ours, [8], [1], layers="full")
        assert not torch.allclose(_output(ours, input_ids=tokens), expected, atol=1e-3)
    with pytest.raises(ValueError, match='layers must be "all" or "full"'):
        dilate(ours, [8], [1], layers="windows")
    with pytest.raises(UnsupportedError, match="sliding_attention"):
        dilate(ours, [8], [1])


class ConvolvedConfig(BertConfig):
    model_type = "convolved_bert"


def test_a_convolution_reads_rows_of_padding_as_in_eager():
    """Rows of padding reach their neighbours there, so they are not skipped."""
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    torch.manual_seed(0)
    model = BertModel(ConvolvedConfig(vocab_size=97, **size)).eval()
    layer = model.encoder.layer[0]
    layer.mix = torch.nn.Conv1d(32, 32, 5, padding=2)

    def mix(layer, args, out):
        if isinstance(out, tuple):
            return (out[0] + layer.mix(out[0].mT).mT, *out[1:])
        return out + layer.mix(out.mT).mT

    layer.register_forward_hook(mix)
    tokens = torch.randint(97, (2, 43))
    mask = torch.ones_like(tokens)
    mask[1, 25:] = 0
    found = []
    for implementation in ("eager", NAME):
        model.set_attn_implementation(implementation)
        found.append(model(tokens, mask).last_hidden_state[mask.bool()])
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)
