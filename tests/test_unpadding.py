"""Padded batches that a transformers model packs before its layers: states, gradients, and what stays padded."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from dilated_attention import UnsupportedError
from dilated_attention.integrations.huggingface import NAME, dilate, unpad
from tolerances import TOLERANCE, relative_error

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 60,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ModernBert": ("ModernBert", {"local_attention": 8, "cls_token_id": 1, "sep_token_id": 2}, {}),
    "Llama": ("Llama", {"use_cache": False}, {}),
    "Gemma3Text": (
        "Gemma3Text",
        {
            "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8, "use_bidirectional_attention": True,
            "use_cache": False,
        },
        {},
    ),
    "Bert": ("Bert", {}, {"add_pooling_layer": False}),
}  # fmt: skip
LENGTHS = {"ragged": [40, 7, 23], "one token": [40, 1, 1], "a window or less": [9, 8, 2]}


def model_of(name: str, implementation: str = NAME) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    kind, options, words = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**SIZES, initializer_range=0.2, **options)
    return (
        getattr(transformers, f"{kind}Model")._from_config(config, attn_implementation=implementation, **words).eval()
    )


def batch_of(lengths: list[int]) -> tuple[Tensor, Tensor]:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return torch.randint(60, mask.shape), mask.long()


def tokens_in_layers(model: Any) -> list[tuple[int, ...]]:
    """Return a list that grows by the (batch, seq) of each state that the last linear layer is given."""
    seen: list[tuple[int, ...]] = []
    last = [module for module in model.modules() if isinstance(module, torch.nn.Linear)][-1]
    last.register_forward_pre_hook(lambda _, values: seen.append(tuple(values[0].shape[:2])))
    return seen


def results(model: Any, tokens: Tensor, mask: Tensor, **options: Any) -> list[Tensor]:
    """Return the states of real tokens, before each layer too, and the gradient of a loss over them as one vector.

    Apart, the gradient of a bias of keys is 0, and what is computed is rounding.
    """
    model.zero_grad()
    out = model(input_ids=tokens, attention_mask=mask, output_hidden_states=True, **options)
    states = [x[mask.bool()] for x in (out.last_hidden_state, *out.hidden_states)]
    states[0].sin().sum().backward()
    gradients = [x.grad.flatten() for x in model.parameters() if x.grad is not None]
    return [*(x.detach() for x in states), torch.cat(gradients)]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", MODELS)
def test_states_and_gradients_of_sdpa(name, lengths):
    tokens, mask = batch_of(LENGTHS[lengths])
    expected = results(model_of(name, "sdpa"), tokens, mask)
    model = unpad(model_of(name))
    seen = tokens_in_layers(model)
    found = results(model, tokens, mask)
    assert seen == [(1, int(mask.sum()))]
    assert len(found) == len(expected) == 6
    for x, y in zip(found, expected, strict=True):
        assert relative_error(x, y) <= TOLERANCE[torch.float32]
    with torch.no_grad():
        assert not model(input_ids=tokens, attention_mask=mask)[0][~mask.bool()].any()


def test_heads_find_states_at_their_places():
    torch.manual_seed(0)
    config = transformers.ModernBertConfig(**SIZES, **MODELS["ModernBert"][1], classifier_pooling="mean")
    model = transformers.ModernBertForSequenceClassification._from_config(config, attn_implementation=NAME).eval()
    tokens, mask = batch_of([40, 7, 23])
    with torch.no_grad():
        expected = model(tokens, mask).logits
        seen = tokens_in_layers(unpad(model).model)
        found = model(tokens, mask).logits
    assert seen == [(1, 70)]
    assert relative_error(found, expected) <= TOLERANCE[torch.float32]


def test_embeddings_and_positions_given_by_the_caller():
    model = model_of("Llama")
    _, mask = batch_of([40, 7, 23])
    given = {
        "inputs_embeds": torch.randn(3, 40, 32), "attention_mask": mask,
        "position_ids": torch.arange(40).expand(3, -1), "return_dict": False,
    }  # fmt: skip
    with torch.no_grad():
        (expected,) = model(**given)
        seen = tokens_in_layers(unpad(model))
        (found,) = model(**given)
    assert seen == [(1, 70)]
    assert relative_error(found[mask.bool()], expected[mask.bool()]) <= TOLERANCE[torch.float32]


def _full(model: Any, tokens: Tensor, mask: Tensor) -> Any:
    return model(input_ids=tokens, attention_mask=torch.ones_like(mask))


def _before(model: Any, tokens: Tensor, mask: Tensor) -> Any:
    return model(input_ids=tokens, attention_mask=mask.flip(1))


def _empty(model: Any, tokens: Tensor, mask: Tensor) -> Any:
    return model(input_ids=tokens, attention_mask=mask * torch.tensor([[1], [0], [1]]))


def _cached(model: Any, tokens: Tensor, mask: Tensor) -> Any:
    out = model(input_ids=tokens, attention_mask=mask, use_cache=True)
    assert out.past_key_values.get_seq_length() == 40
    return out


def _by_sdpa(model: Any, tokens: Tensor, mask: Tensor) -> Any:
    model.set_attn_implementation("sdpa")
    return model(input_ids=tokens, attention_mask=mask)


@pytest.mark.parametrize("forward", [_full, _before, _empty, _cached, _by_sdpa])
def test_what_stays_padded(forward: Callable[..., Any]):
    tokens, mask = batch_of([40, 7, 23])
    with torch.no_grad():
        expected = forward(model_of("Llama"), tokens, mask).last_hidden_state
        model = unpad(unpad(model_of("Llama")))  # the second call changes nothing
        seen = tokens_in_layers(model)
        found = forward(model, tokens, mask).last_hidden_state
    assert seen == [(3, 40)]
    assert torch.equal(found, expected)


def test_router_logits_are_of_the_padded_batch():
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=2, use_cache=False)
    model = transformers.MixtralForCausalLM._from_config(config, attn_implementation=NAME).eval()
    tokens, mask = batch_of([40, 7, 23])
    given = {"input_ids": tokens, "attention_mask": mask, "output_router_logits": True}
    with torch.no_grad():
        expected = model(**given)
        unpad(model)
        found = model(**given)
    assert torch.equal(found.aux_loss, expected.aux_loss)
    assert torch.equal(found.router_logits[0], expected.router_logits[0])


def test_copied_and_pickled_models_pack():
    model = unpad(model_of("ModernBert"))
    tokens, mask = batch_of([40, 7, 23])
    with torch.no_grad():
        expected = model(input_ids=tokens, attention_mask=mask).last_hidden_state
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            seen = tokens_in_layers(other)
            assert torch.equal(other(input_ids=tokens, attention_mask=mask).last_hidden_state, expected)
            assert seen == [(1, 70)]


def test_a_graph_stays_padded(compiling_python):
    compiling_python("""
        import torch
        from transformers import LlamaConfig, LlamaModel
        from dilated_attention.integrations.huggingface import unpad
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=60,
            use_cache=False,
        )
        model = unpad(LlamaModel._from_config(config, attn_implementation="dilated_attention").eval())
        tokens, mask = torch.randint(60, (2, 9)), torch.arange(9) < torch.tensor([[9], [4]])
        with torch.no_grad():
            expected = model(input_ids=tokens, attention_mask=mask)[0]
            found = torch.compile(model, backend="eager", fullgraph=True)(input_ids=tokens, attention_mask=mask)[0]
        torch.testing.assert_close(found[mask], expected[mask])
        assert found[~mask].any() and not expected[~mask].any()
    """)


def test_a_forward_that_fails_leaves_nothing_behind():
    model = unpad(model_of("Llama"))
    tokens, mask = batch_of([40, 7, 23])
    with pytest.raises(IndexError):
        model(input_ids=tokens + 60, attention_mask=mask)
    with torch.no_grad():
        assert model(input_ids=tokens).last_hidden_state.shape == (3, 40, 32)


def test_models_that_are_refused():
    tokens, mask = batch_of([9, 4])
    with pytest.raises(ValueError, match='must have attn_implementation="dilated_attention", without a pattern'):
        unpad(plain := model_of("Llama", "sdpa"))
    plain.set_attn_implementation(NAME)
    unpad(plain)
    with pytest.raises(ValueError, match="without a pattern"):
        unpad(dilate(model_of("Llama"), [16], [1]))
    bert = transformers.BertModel._from_config(transformers.BertConfig(**SIZES), attn_implementation=NAME).eval()
    config = transformers.RobertaConfig(**SIZES)
    roberta = transformers.RobertaModel._from_config(config, attn_implementation=NAME, add_pooling_layer=False).eval()
    for model, words in (
        (bert, "pooler_output of shape .*add_pooling_layer=False"),
        (roberta, "positions do not count"),
    ):
        with torch.no_grad():
            expected = model(input_ids=tokens, attention_mask=mask).last_hidden_state
            with pytest.raises(UnsupportedError, match=words):
                unpad(model)
            assert torch.equal(model(input_ids=tokens, attention_mask=mask).last_hidden_state, expected)
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=60)
    encoder = transformers.T5EncoderModel._from_config(config, attn_implementation=NAME)
    with pytest.raises(UnsupportedError, match="takes no position_ids"):
        unpad(encoder)
