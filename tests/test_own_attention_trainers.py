"""Trainers and tools of other packages around transformers' models: the losses and outputs of sdpa.

Each test is skipped where its package is missing; no requirement of the tests lists them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MistralConfig, MistralForCausalLM, ModernBertConfig, ModernBertModel, PreTrainedTokenizerFast

from dilated_attention.integrations.huggingface import NAME, report

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 60}
STEPS: dict[str, Any] = {
    "max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1, "report_to": [],
    "save_strategy": "no", "use_cpu": True, "bf16": False,
}  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore")  # of those packages

IMPLEMENTATIONS = "sdpa", NAME


def _decoder(implementation: str) -> MistralForCausalLM:
    torch.manual_seed(0)
    config = MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=8, initializer_range=0.2)
    return MistralForCausalLM._from_config(config, attn_implementation=implementation)


def _tokenizer() -> PreTrainedTokenizerFast:
    """Return one whose tokens are "3" to "59", apart by spaces."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[PAD]": 0, "[EOS]": 1, "[UNK]": 2} | {str(i): i for i in range(3, 60)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]")


def _texts() -> list[list[int]]:
    return [torch.randint(3, 60, (n,)).tolist() for n in (20, 5, 15, 9, 30, 12, 7, 18)]


def _losses(trainer: Any) -> torch.Tensor:
    trainer.train()
    return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


@pytest.mark.parametrize("options", [{}, {"packing": True}, {"padding_free": True, "max_length": None}], ids=str)
def test_trl(options, tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"input_ids": text, "labels": text} for text in _texts()])
    losses = []
    for implementation in IMPLEMENTATIONS:
        model = _decoder(implementation)
        arguments = trl.SFTConfig(str(tmp_path), **{"max_length": 40, **STEPS, **options})
        losses.append(_losses(trl.SFTTrainer(model, arguments, train_dataset=rows, processing_class=_tokenizer())))
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=1e-5)
    assert ("packed" in report(model)) == bool(options)


def _sentence_encoder(implementation: str, folder: Path) -> nn.Module:
    package = pytest.importorskip("sentence_transformers")
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, "cls_token_id": 1, "sep_token_id": 1}
    config = ModernBertConfig(**SIZES, **special, local_attention=8, initializer_range=0.2)
    ModernBertModel(config).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return package.SentenceTransformer(str(folder), model_kwargs={"attn_implementation": implementation}, device="cpu")


def test_sentence_transformers(tmp_path):
    package = pytest.importorskip("sentence_transformers")
    losses_of = pytest.importorskip("sentence_transformers.losses")
    datasets = pytest.importorskip("datasets")
    texts = [" ".join(map(str, text)) for text in _texts()]
    pairs = datasets.Dataset.from_dict({"anchor": texts, "positive": texts[1:] + texts[:1]})
    losses, embeddings = [], []
    for implementation in IMPLEMENTATIONS:
        model = _sentence_encoder(implementation, tmp_path / "model")
        embeddings.append(torch.tensor(model.encode(texts)))
        arguments = package.SentenceTransformerTrainingArguments(str(tmp_path), **STEPS)
        loss = losses_of.MultipleNegativesRankingLoss(model)
        losses.append(_losses(package.SentenceTransformerTrainer(model, arguments, train_dataset=pairs, loss=loss)))
    torch.testing.assert_close(embeddings[1], embeddings[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=1e-5)


def test_torchao():
    """Weights of eight bits alone."""
    quantization = pytest.importorskip("torchao.quantization")
    tokens, logits = torch.randint(3, 60, (2, 40)), []
    for implementation in IMPLEMENTATIONS:
        model = _decoder(implementation).eval()
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
        with torch.no_grad():
            logits.append(model(tokens).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-5)
