"""The position_bias of transformers' attention interface: models of T5's family equal eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from dilated_attention.integrations.huggingface import dilate, report
from tolerances import GOLDEN

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
