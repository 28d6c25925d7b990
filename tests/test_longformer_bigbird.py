"""Longformer, LED and BigBird with their attention computed here, beside transformers' own."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from dilated_attention import UnsupportedError
from dilated_attention.integrations.longformer_bigbird import replace_attention
from tolerances import relative_error

TOKENS = 70
TINY = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 97,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip


def _longformer(**changes) -> PreTrainedModel:
    config = transformers.LongformerConfig(**TINY | {"attention_window": 8, "max_position_embeddings": 200} | changes)
    return transformers.LongformerForMaskedLM(config).eval()


def _bigbird(**changes) -> PreTrainedModel:
    options = {
        "block_size": 4,
        "num_random_blocks": 2,
        "max_position_embeddings": 1100,
        "attention_type": "block_sparse",
    }
    return transformers.BigBirdForMaskedLM(transformers.BigBirdConfig(**TINY | options | changes)).eval()


def _led() -> PreTrainedModel:
    config = transformers.LEDConfig(
        d_model=32, encoder_layers=2, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=97, attention_window=8, dropout=0.0, init_std=0.3,
        max_encoder_position_embeddings=200,
    )  # fmt: skip
    return transformers.LEDForConditionalGeneration(config).eval()


def _masks(tokens: int = TOKENS) -> dict[str, Tensor]:
    real = torch.ones(3, tokens, dtype=torch.long)
    right, left = real.clone(), real.clone()
    right[1, -9:], right[2, 21:] = 0, 0
    left[1, :13], left[2, :40] = 0, 0
    return {"no padding": real, "right": right, "left": left}


def _globals(kind: str, tokens: int = TOKENS) -> Tensor | None:
    """Global tokens: the first of each sample; or another number in each, none in the last."""
    found = torch.zeros(3, tokens, dtype=torch.long)
    if kind == "first":
        found[:, 0] = 1
    if kind == "scattered":
        found[0, [0, 1, 17, 44]] = 1
        found[1, [14, 45]] = 1
    return None if kind == "none" else found


def _assert_same(model: PreTrainedModel, real: Tensor, **inputs: Tensor | None) -> None:
    """Assert that outputs of real tokens, and the gradients of all parameters, stay what they were."""
    ours = copy.deepcopy(model)
    assert replace_attention(ours)
    results = []
    for each in (model, ours):
        states = each.base_model(**inputs)
        states = states.encoder_last_hidden_state if "encoder_last_hidden_state" in states else states[0]
        weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(2)) * real[..., None]
        (states * weights).sum().backward()
        gradients = {name: x.grad for name, x in each.named_parameters() if x.grad is not None}
        results.append((states[real.bool()].detach(), gradients))
    (expected, gradients), (found, ours_gradients) = results
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * max(1.0, float(expected.abs().max())))
    assert gradients.keys() - ours_gradients.keys() <= _without_effect(gradients)
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())  # a bias of keys has 0 but for rounding
    for name, gradient in ours_gradients.items():
        torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=1e-5 * scale)


def _without_effect(gradients: dict[str, Tensor]) -> set[str]:
    return {name for name, gradient in gradients.items() if not gradient.any()}


@pytest.mark.parametrize("padding", ["no padding", "right", "left"])
@pytest.mark.parametrize("kind", ["none", "first", "scattered"])
def test_longformer(kind, padding):
    mask, tokens = _masks()[padding], torch.randint(3, 97, (3, TOKENS))
    _assert_same(_longformer(), mask, input_ids=tokens, attention_mask=mask, global_attention_mask=_globals(kind))


@pytest.mark.parametrize("tokens", [1, 8, 200 - 2])
def test_longformer_of_other_lengths(tokens):
    inputs = torch.randint(3, 97, (3, tokens))
    mask = torch.ones_like(inputs)
    _assert_same(
        _longformer(), mask, input_ids=inputs, attention_mask=mask, global_attention_mask=_globals("first", tokens)
    )


def test_longformer_of_different_windows():
    mask, tokens = _masks()["right"], torch.randint(3, 97, (3, TOKENS))
    model = _longformer(attention_window=[4, 16])
    _assert_same(model, mask, input_ids=tokens, attention_mask=mask, global_attention_mask=_globals("scattered"))


@pytest.mark.parametrize("kind", ["none", "scattered"])
def test_led(kind):
    mask, tokens = _masks()["right"], torch.randint(3, 97, (3, TOKENS))
    _assert_same(
        _led(), mask, input_ids=tokens, attention_mask=mask, global_attention_mask=_globals(kind),
        decoder_input_ids=tokens[:, :9],
    )  # fmt: skip


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("padding", ["no padding", "right", "left"])
@pytest.mark.parametrize("tokens", [40, 72, 1024])
def test_bigbird(tokens, padding, training):
    """Blocks are drawn from NumPy's generator in training; otherwise block 0 counts once more for each of them."""
    mask, inputs = _masks(tokens)[padding], torch.randint(3, 97, (3, tokens))
    _assert_same(_bigbird().train(training), mask, input_ids=inputs, attention_mask=mask)


def test_bigbird_draws_in_training_alone():
    model = _bigbird()
    replace_attention(model)
    inputs = torch.randint(3, 97, (1, 72))
    states = []
    for training in (True, False):
        np.random.seed(5)
        states.append(model.train(training).base_model(inputs)[0])
    assert relative_error(*states) > 1e-2


def test_it_is_saved_and_loaded_as_transformers_own(tmp_path):
    model, tokens = _longformer(), torch.randint(3, 97, (3, TOKENS))
    expected = model(tokens).logits
    assert replace_attention(model) == [f"longformer.encoder.layer.{i}.attention.self" for i in (0, 1)]
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(tokens).logits, expected, rtol=0, atol=0)


@pytest.mark.parametrize("make", [_longformer, _bigbird])
def test_what_it_cannot_take(make):
    model, tokens = make(), torch.randint(3, 97, (3, 72))
    replace_attention(model)
    with pytest.raises(UnsupportedError, match=r"output_attentions: .* without replace_attention"):
        model(tokens, output_attentions=True)
    with pytest.raises(ValueError, match="Linear has no attention of LongformerSelfAttention"):
        replace_attention(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("make", [_longformer, _bigbird])
def test_it_may_be_replaced_twice_but_not_after_another_class(make):
    model = make()
    names = replace_attention(model)
    assert replace_attention(model) == names
    model = make()
    module = model.get_submodule(names[-1])
    module.__class__ = type("FSDPAttention", (type(module),), {})
    kinds = [type(x) for x in model.modules()]
    with pytest.raises(ValueError, match=f"{names[-1]} has the class FSDPAttention, .* before fully_shard"):
        replace_attention(model)
    assert [type(x) for x in model.modules()] == kinds
