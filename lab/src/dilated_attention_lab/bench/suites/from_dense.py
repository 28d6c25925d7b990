"""`bench from-dense`: models that people have, one training step with dense and with dilated attention."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dilated_attention import Dilated, dilated_attention, suggest_pattern
from dilated_attention.integrations import convert_attention
from dilated_attention.nn import MultiheadDilatedAttention
from dilated_attention_bench import measure
from dilated_attention_bench.results import Row
from dilated_attention_bench.suites import Step

WIDTH, HEADS, SHARE = 128, 4, 0.1
Forward = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """Self-attention written on `F.scaled_dot_product_attention`, as in most code; with a pattern on ours."""

    def __init__(self, pattern: Dilated | None) -> None:
        super().__init__()
        self.pattern = pattern
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        if self.pattern is None:
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        else:
            found = dilated_attention(q, k, v, self.pattern.segment_lengths, self.pattern.dilation_rates)
            assert isinstance(found, Tensor)
            out = found
        return self.proj(out.flatten(-2))


def _block(pattern: Dilated | None) -> tuple[nn.Module, Forward]:
    model = Block(pattern)
    return model, model


def _multihead(pattern: Dilated | None) -> tuple[nn.Module, Forward]:
    model: Any
    if pattern is None:
        model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    else:
        model = MultiheadDilatedAttention(
            WIDTH, HEADS, segment_lengths=pattern.segment_lengths, dilation_rates=pattern.dilation_rates
        )
    return model, lambda x: model(x, x, x, need_weights=False)[0]


def _encoder(pattern: Dilated | None) -> tuple[nn.Module, Forward]:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    if pattern is not None:
        convert_attention(model, pattern.segment_lengths, pattern.dilation_rates)
    return model, model


def _llama(pattern: Dilated | None) -> tuple[nn.Module, Forward]:
    from transformers import LlamaConfig, LlamaModel

    from dilated_attention.integrations.huggingface import dilate

    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=1, num_attention_heads=HEADS, vocab_size=256,
        max_position_embeddings=1 << 20,
    )  # fmt: skip
    model = LlamaModel(config)
    if pattern is not None:
        dilate(model, pattern.segment_lengths, pattern.dilation_rates)
    return model, lambda x: model(inputs_embeds=x).last_hidden_state


STARTS: Mapping[str, tuple[bool, Callable[[Dilated | None], tuple[nn.Module, Forward]]]] = {
    "a block on scaled_dot_product_attention": (False, _block),
    "nn.MultiheadAttention": (False, _multihead),
    "nn.TransformerEncoder": (False, _encoder),
    "a Llama of transformers": (True, _llama),
}
"""By name: whether it is causal, and what makes the model with a pattern, or with dense attention."""


def steps(device: torch.device, quick: bool) -> list[Step]:
    tokens = 2048 if quick else 32_768
    return [Step(name, partial(_rows, name, tokens, device)) for name in STARTS]


def _rows(name: str, tokens: int, device: torch.device) -> Iterator[Row]:
    pattern = suggest_pattern(tokens, HEADS, budget=SHARE, is_causal=STARTS[name][0])
    parameters = {
        "seq_len": tokens, "heads": HEADS, "head_dim": WIDTH // HEADS, "segment_lengths": list(pattern.segment_lengths),
        "dilation_rates": list(pattern.dilation_rates),
    }  # fmt: skip
    if "transformers" in name and importlib.util.find_spec("transformers") is None:
        yield Row(f"{name}, one training step", parameters, None, "s", refused="not installed: transformers")
        return
    found: dict[str, tuple[float, int | None]] = {}
    for way in ("dilated", "dense"):
        request = {"name": name, "tokens": tokens, "dilated": way == "dilated", "device": str(device)}
        threads = {"threads": torch.get_num_threads()}
        found[way] = measure.in_new_process(__name__, request | threads)
        yield Row(f"{name}, one training step: {way}", parameters, found[way][0], "s")
        why = measure.UNTOLD if found[way][1] is None else None
        yield Row(f"{name}, peak memory of a training step: {way}", parameters, found[way][1], "bytes", refused=why)
    yield Row(f"{name}, one training step: over dense", parameters, found["dilated"][0] / found["dense"][0], "x")
    peaks = [found[way][1] for way in ("dilated", "dense")]
    if peaks[0] is not None and peaks[1] is not None:
        yield Row(f"{name}, peak memory of a training step: over dense", parameters, peaks[0] / peaks[1], "x")


def _measure(request: Mapping[str, Any]) -> tuple[float, int | None]:
    """Seconds and peak memory, above model and input, of one forward and backward of a layer."""
    device, (is_causal, make) = torch.device(request["device"]), STARTS[request["name"]]
    torch.set_num_threads(request["threads"])

    def step(tokens: int) -> Callable[[], None]:
        torch.manual_seed(0)
        pattern = suggest_pattern(tokens, HEADS, budget=SHARE, is_causal=is_causal) if request["dilated"] else None
        model, forward = make(pattern)
        model.to(device)
        x = torch.randn(1, tokens, WIDTH, device=device)
        return lambda: forward(x).square().mean().backward()

    step(1024)()  # loads the operators and starts the threads
    call, spent = step(request["tokens"]), 0.0

    def timed() -> None:
        nonlocal spent
        start = time.perf_counter()
        call()
        measure.synchronize(device)
        spent = time.perf_counter() - start

    peak = measure.peak_above_now(timed, device)
    return spent, peak


if __name__ == "__main__":
    print(json.dumps(_measure(json.loads(sys.argv[1]))))
