"""The position_bias of transformers' attention interface: models of T5's family equal eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from dilated_attention import UnsupportedError
from dilated_attention.integrations import huggingface, own_attention, relative_biases
from dilated_attention.integrations.huggingface import dilate, report
from tolerances import GOLDEN
from transformers_families import build

SMALL = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 97, "dropout_rate": 0.0,
    "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "T5": {},
    "MT5": {},
    "UMT5": {},
    "Pop2Piano": {},
    "SwitchTransformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 2},
}


def built(family: str, implementation: str) -> Any:
    config = getattr(transformers, f"{family}Config")(**SMALL, **FAMILIES[family])
    config._attn_implementation = implementation
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    for name, x in model.named_parameters():
        if "relative_attention_bias" in name:
            torch.nn.init.normal_(x)
    return model


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, 97, (2, 23), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, 15:] = 0
    answers = torch.randint(2, 97, (2, 11), generator=generator)
    return {"input_ids": tokens, "attention_mask": mask, "decoder_input_ids": answers}


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_eager(family: str):
    """Compare the logits and the gradients of all parameters, the tables of the biases among them."""
    found = []
    for implementation in ("eager", "dilated_attention"):
        model = built(family, implementation)
        logits = model(**batch()).logits
        logits.double().sin().sum().backward()
        found.append((logits, {name: x.grad for name, x in model.named_parameters() if x.grad is not None}))
    (expected, gradients), (actual, others) = found
    torch.testing.assert_close(actual, expected, **GOLDEN)
    assert gradients.keys() == others.keys()
    assert any("relative_attention_bias" in name for name in gradients)
    for name, gradient in gradients.items():
        assert (others[name] - gradient).norm() <= 2e-5 * gradient.norm(), name
    assert "position_bias" in report(model)


@pytest.mark.parametrize("family", ["T5", "MT5", "UMT5"])
def test_generates_the_same_tokens(family: str):
    given = batch()
    del given["decoder_input_ids"]
    expected, actual = (
        built(family, x).generate(**given, max_new_tokens=12, do_sample=False) for x in ("eager", "dilated_attention")
    )
    assert torch.equal(actual, expected)


@pytest.fixture
def handed_on(monkeypatch) -> list[tuple[int, ...]]:
    """Return the shapes of each position_bias that attention functions get in this test."""
    shapes = []

    def noted(module: nn.Module, position_bias: Tensor, q: Tensor, k: Tensor) -> Any:
        shapes.append((*position_bias.shape[2:], q.shape[1], k.shape[1]))
        return relative_biases.bias_of(module, position_bias, q, k)

    monkeypatch.setattr(huggingface, "bias_of", noted)
    return shapes


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_bias_is_by_difference_also_when_layers_are_computed_anew(handed_on, use_reentrant: bool):
    found = []
    for implementation in ("eager", "dilated_attention"):
        model = built("T5", implementation).train()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        handed_on.clear()
        model(**batch(), use_cache=False).logits.double().sin().sum().backward()
        found.append({name: x.grad for name, x in model.named_parameters() if x.grad is not None})
    for name, gradient in found[0].items():
        assert (found[1][name] - gradient).norm() <= 2e-5 * gradient.norm(), name
    of_encoder = 1, 2 * 23 - 1, 23, 23
    of_decoder = 1, 2 * 11 - 1, 11, 11
    cross = 11, 23, 11, 23
    assert set(handed_on) == {of_encoder, of_decoder, cross}


def test_a_prompt_in_chunks_reads_differences_from_its_positions(handed_on):
    given = batch()
    tokens = given.pop("decoder_input_ids")
    found = []
    for implementation in ("eager", "dilated_attention"):
        model = built("T5", implementation)
        handed_on.clear()
        first = model(**given, decoder_input_ids=tokens[:, :6])
        options = {"past_key_values": first.past_key_values, "encoder_outputs": (first.encoder_last_hidden_state,)}
        found.append(model(**given, decoder_input_ids=tokens[:, 6:], **options).logits)
    torch.testing.assert_close(found[1], found[0], **GOLDEN)
    assert (1, 2 * 11 - 1, 5, 11) in handed_on


def test_a_mask_over_pairs_with_a_cache_is_refused():
    q = torch.randn(1, 3, 4, 8)
    k = torch.randn(1, 9, 4, 8)
    shown = own_attention.Shown(False, pairs=lambda: None, q_start=6, queries=3, keys=9)
    bias = relative_biases.bias_of(
        built("T5", "dilated_attention").encoder.block[0].layer[0].SelfAttention, torch.randn(1, 4, 1, 17), q, k
    )
    with pytest.raises(UnsupportedError, match=r"position_bias with a mask over pairs and a cache: .*sdpa"):
        own_attention.attend(shown, q, k, k, bias=bias)


def test_a_bias_of_another_model_is_of_pairs():
    """Whatever its size: one number for all keys is no logit for the nearest one."""
    q = torch.randn(1, 3, 4, 8)
    k = torch.randn(1, 9, 4, 8)
    assert relative_biases.bias_of(nn.Linear(1, 1), torch.randn(1, 4, 3, 1), q, k).shape == (1, 4, 3, 9)
    with pytest.raises(RuntimeError, match="must match the existing size"):
        relative_biases.bias_of(nn.Linear(1, 1), torch.randn(1, 4, 1, 17), q, k)


def test_logits_for_the_keys_before_a_query(handed_on):
    """Inkling: in layers with windows and without, with padding, gradients, and a cache that grows."""
    pytest.importorskip("transformers.models.inkling", reason="this version of transformers has no Inkling")
    kinds = ["hybrid_sliding", "hybrid"] * 2
    tokens = torch.randint(0, 90, (2, 60), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    found = []
    for implementation in ("eager", "dilated_attention"):
        model = build("inkling", implementation, rel_extent=20, sliding_window_size=16, layer_types=kinds)
        handed_on.clear()
        logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits[mask.bool()]
        logits.double().sin().sum().backward()
        gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        found.append((logits, gradients, model.generate(tokens, attention_mask=mask, **options)))
    (expected, gradients, text), (actual, others, other_text) = found
    torch.testing.assert_close(actual, expected, **GOLDEN)
    for name, gradient in gradients.items():
        assert (others[name] - gradient).norm() <= 2e-5 * gradient.norm(), name
    assert torch.equal(other_text, text)
    assert {(60, 16, 60, 60), (60, 20, 60, 60), (1, 20, 1, 61)} <= set(handed_on)


def test_a_dilated_encoder_keeps_its_bias():
    config = transformers.T5Config(**SMALL)
    torch.manual_seed(0)
    model = transformers.T5EncoderModel(config).eval()
    given = {name: x for name, x in batch().items() if "decoder" not in name}
    expected = model(**given).last_hidden_state
    actual = dilate(model, [32], [1])(**given).last_hidden_state
    real = given["attention_mask"].bool()
    torch.testing.assert_close(actual[real], expected[real], **GOLDEN)


def test_models_that_pass_no_bias_are_refused_by_name():
    for name in ("Bloom", "Mpt", "Falcon", "LongT5"):
        small = {"d_model": 32, "hidden_size": 32, "n_layer": 1, "n_layers": 1, "n_heads": 4, "num_layers": 1}
        config = getattr(transformers, f"{name}Config")(**small, vocab_size=97)
        kind = f"{name}ForCausalLM" if name != "LongT5" else "LongT5ForConditionalGeneration"
        config._attn_implementation = "dilated_attention"
        # Falcon of transformers 5.24 looks the name up in a table of its own.
        with pytest.raises((ValueError, KeyError), match=r"interface|does not support|dilated_attention"):
            getattr(transformers, kind)(config)(torch.randint(2, 97, (1, 8)))
