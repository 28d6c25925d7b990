"""Training and tracing of models with their own attention: checkpointing, autocast, Trainer, PEFT, compile, export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dilated_attention.integrations.huggingface import NAME
from tolerances import relative_error
from transformers_families import build

TOKENS = 43
KINDS = ["gemma3", "llama4", "gpt_oss", "glm_moe_dsa"]  # windows, chunks, sinks, lists of keys


def _models(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    eager, ours = build(family, "eager"), build(family, NAME)
    ours.load_state_dict(eager.state_dict())
    return eager, ours


def _batch() -> dict[str, Tensor]:
    """Return tokens, labels and a mask with padding on the left and on the right.

    The first real token has no label: a padding row would predict it, and eager mode fills such rows otherwise.
    """
    tokens = torch.randint(3, 97, (3, TOKENS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[1, :11], mask[2, -9:] = 0, 0
    labels = tokens.where(mask.bool(), -100)
    labels[1, 11] = -100
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def _gradients(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    model.zero_grad()
    model(**batch, use_cache=False).loss.backward()
    return torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])


@pytest.mark.parametrize("family", KINDS)
def test_gradient_checkpointing(family):
    eager, ours = (model.train() for model in _models(family))
    plain = _gradients(ours, _batch())
    for reentrant in (False, True):
        ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert torch.equal(_gradients(ours, _batch()), plain)
    assert relative_error(plain, _gradients(eager, _batch())) <= 1e-5


@pytest.mark.parametrize("family", KINDS)
def test_autocast(family):
    """Results in bfloat16 are no further from float32 than in eager mode."""
    eager, ours = _models(family)
    exact = _gradients(eager, _batch())
    with torch.autocast("cpu", torch.bfloat16):
        errors = [relative_error(_gradients(model, _batch()), exact) for model in (eager, ours)]
    assert 1e-4 < errors[1] < 1.25 * errors[0]


@pytest.mark.parametrize("family", KINDS)
def test_trainer(family, tmp_path):
    """Weights after three steps of Trainer, with checkpointing and with gradients summed over two batches."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    batch = _batch()
    samples = [{name: x[i] for name, x in batch.items()} for i in (0, 1, 2)] * 4
    options = TrainingArguments(
        tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3, learning_rate=0.1,
        optim="sgd", gradient_checkpointing=True, report_to=[], save_strategy="no", logging_strategy="no", use_cpu=True,
    )  # fmt: skip
    weights = []
    for model in _models(family):
        before = torch.cat([x.detach().flatten() for x in model.parameters()])
        Trainer(model, options, train_dataset=samples).train()
        weights.append(torch.cat([x.detach().flatten() for x in model.parameters()]))
        assert not torch.equal(weights[-1], before)
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["low-rank", "prefix"])
def test_peft(kind):
    """Gradients of adapters; a prefix is a cache of trained keys, before the first token."""
    peft = pytest.importorskip("peft")
    gradients = []
    for model in _models("gemma3"):
        torch.manual_seed(0)
        config = (
            peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
            if kind == "low-rank"
            else peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
        )
        adapted = peft.get_peft_model(model, config).train()
        inputs = {name: x[:2] for name, x in _batch().items()}
        adapted(**inputs).loss.backward()
        gradients.append(torch.cat([x.grad.flatten() for x in adapted.parameters() if x.grad is not None]))
    assert gradients[0].abs().max() > 0
    assert relative_error(gradients[1], gradients[0]) <= 1e-5


_TRACED = f"""
import sys, warnings
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
from transformers_families import build
import dilated_attention.integrations.huggingface

warnings.simplefilter("ignore")
tokens = torch.randint(3, 97, (2, 40))
masks = torch.ones(2, 2, 40, dtype=torch.long)
masks[0, 1, :7] = 0
masks[1, 0, :21] = 0
"""
"""Masks with padding on the left: without attention_mask, transformers takes a traced batch for packed samples."""


def some_families(first, *others):
    others = pytest.param(others, marks=pytest.mark.thorough)
    return pytest.mark.parametrize("families", [(first,), others], ids=str)


@some_families("mistral", "modernbert", "gemma3", "llama4", "deepseek_v32")
def test_compiles_in_one_graph(families, compiling_python):
    compiling_python(
        f"families = {families}\n"
        + _TRACED
        + """
for family in families:
    torch._dynamo.reset()
    model = build(family, "dilated_attention")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for mask in masks:
        with torch.set_grad_enabled(family == "mistral"):
            found, expected = (call(input_ids=tokens, attention_mask=mask)[0] for call in (compiled, model))
        torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-5)
"""
    )


def test_masks_of_bits_compile_in_one_graph(compiling_python):
    """An image in a text, packed samples, and a mask over pairs."""
    compiling_python(
        _TRACED
        + """
from transformers import Gemma3Config, Gemma3ForConditionalGeneration
from test_own_attention import _images

model, types = _images("dilated_attention")
text = build("gemma3", "dilated_attention")
tokens = torch.randint(1, 90, types.shape)
padding = torch.ones_like(types)
padding[1, 30:] = 0
places = torch.cat([torch.arange(30), torch.arange(types.shape[1] - 30)])[None]
pairs = torch.rand(2, 1, types.shape[1], types.shape[1]) < 0.5
for model, given in (
    (model, {"token_type_ids": types, "attention_mask": padding}),
    (text, {"input_ids": tokens[:1], "position_ids": places}),
    (text, {"attention_mask": pairs}),
):
    torch._dynamo.reset()
    given = {"input_ids": tokens, "use_cache": False, **given}
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        found, expected = (call(**given)[0] for call in (compiled, model))
    if given.get("attention_mask") is padding:
        found, expected = found[padding.bool()], expected[padding.bool()]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
"""
    )


def test_checkpointing_in_a_compiled_graph(compiling_python):
    """BERT gives its layers the mask by position, so that the compiler sees it as an argument of the checkpoint."""
    compiling_python(
        _TRACED
        + """
from dilated_attention.integrations.huggingface import dilate
from transformers import BertConfig, BertModel

sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
dropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
config = BertConfig(vocab_size=97, attn_implementation="dilated_attention", **sizes, **dropped)
for dilated in (False, True):
    model = BertModel(config, add_pooling_layer=False)
    model = dilate(model, [8, 64], [1, 2]) if dilated else model
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = []
    for call in (model, compiled):
        model.zero_grad()
        call(input_ids=tokens, attention_mask=masks[1], use_cache=False)[0][masks[1].bool()].sin().sum().backward()
        found.append([x.grad.clone() for x in model.parameters()])
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    torch.testing.assert_close(*found)
"""
    )


@some_families("modernbert", "mistral", "gemma3", "llama4")
def test_exports(families, compiling_python):
    """A program exported with one mask computes the model with another; the number of tokens is fixed."""
    compiling_python(
        f"families = {families}\n"
        + _TRACED
        + """
for family in families:
    model = build(family, "dilated_attention")
    more = {} if family == "modernbert" else {"use_cache": False}
    exported = torch.export.export(model, (), {"input_ids": tokens, "attention_mask": masks[0], **more}).module()
    mask = masks[1]
    found, expected = (call(input_ids=tokens, attention_mask=mask, **more)[0] for call in (exported, model))
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-5)
"""
    )


def test_an_encoder_made_of_a_decoder_compiles_in_one_graph(compiling_python):
    """EmbeddingGemma."""
    compiling_python(
        _TRACED
        + """
from transformers import Gemma3TextConfig, Gemma3TextModel

sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
config = Gemma3TextConfig(**sizes, **layers, num_key_value_heads=2, head_dim=8, use_bidirectional_attention=True)
model = Gemma3TextModel._from_config(config, attn_implementation="dilated_attention").eval()
compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
with torch.no_grad():
    found, expected = (call(input_ids=tokens, attention_mask=masks[0])[0] for call in (compiled, model))
torch.testing.assert_close(found[masks[0].bool()], expected[masks[0].bool()], rtol=0, atol=1e-5)
"""
    )
