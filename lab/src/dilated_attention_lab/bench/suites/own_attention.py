"""`bench transformers`: models with windows or chosen keys, beside transformers' other attentions.

Gemma 3 has its weights, the others have random ones.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention_lab.bench import activations, measure
from dilated_attention_lab.bench.cases import Contender
from dilated_attention_lab.bench.measure import Noted
from dilated_attention_lab.bench.results import Row
from dilated_attention_lab.bench.suites import Step, over

OURS = "dilated_attention"
GEMMA_SHAPE = {"model": "Gemma 3 270M", "dtype": "float32", "heads": 4}
CHOOSING_SHAPE: dict[str, Any] = {
    "model": "DeepSeek-V3.2", "dtype": "float32", "layers": 1, "heads": 8, "index_heads": 64, "keys": 512,
}  # fmt: skip
"""One layer with the head dims and index heads of the released model, but narrower and with fewer heads."""
LINEAR = 8e9
"""The most bytes that the layer adds at 32,768 tokens."""


def steps(device: torch.device, quick: bool) -> list[Step]:
    if quick:
        return [
            _shape(device, "ModernBERT-base", modernbert, 1024, "sdpa", {"layers": 3}, {"forward": None}),
            _choosing(device, 1024),
            _t5(device, 1024),
        ]
    return [
        _shape(device, "ModernBERT-base", modernbert, 8192, "sdpa", {"layers": 22}, {"forward": 0.4}),
        _shape(device, "ModernBERT-base", modernbert, 8192, "sdpa", {"layers": 3}, {"forward+backward": 0.4}),
        _shape(device, "Mistral-7B", _mistral, 16384, "sdpa", {"layers": 1}, {"forward": 0.6}),
        _shape(device, "gpt-oss", _gpt_oss, 8192, "eager", {"layers": 2, "heads": 8}, {"forward+backward": 0.3}),
        _gemma(device, 8192),
        _gemma_blocks(device, 16384),
        _gemma_tokens(device, 8192),
        *[_choosing(device, seq_len) for seq_len in (2048, 4096, 8192, 32768)],
        _t5(device, 8192),
    ]


def modernbert(layers: int) -> Any:
    from transformers import ModernBertConfig, ModernBertModel

    return ModernBertModel(ModernBertConfig(num_hidden_layers=layers))


def _mistral(layers: int) -> Any:
    from transformers import MistralConfig, MistralModel

    return MistralModel(MistralConfig(num_hidden_layers=layers, vocab_size=256, sliding_window=4096))


def _gpt_oss(layers: int, heads: int) -> Any:
    """Return a model with the head_dim, window and sinks of gpt-oss, but fewer heads and experts, and narrower."""
    from transformers import GptOssConfig, GptOssModel

    config = GptOssConfig(
        num_hidden_layers=layers, hidden_size=64 * heads, intermediate_size=64 * heads, num_attention_heads=heads,
        num_key_value_heads=heads // 8, num_local_experts=2, num_experts_per_tok=1, vocab_size=256,
    )  # fmt: skip
    return GptOssModel(config)


def _deepseek() -> Any:
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    config = DeepseekV32Config(
        num_hidden_layers=1, hidden_size=1024, intermediate_size=2048, num_attention_heads=8, num_key_value_heads=8,
        q_lora_rank=512, index_topk=CHOOSING_SHAPE["keys"], vocab_size=256,
    )  # fmt: skip
    return DeepseekV32ForCausalLM(config)


def _t5_encoder(layers: int, heads: int) -> Any:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(num_layers=layers, d_model=64 * heads, num_heads=heads, d_ff=3072, vocab_size=256)
    return T5EncoderModel(config)


def _choosing(device: torch.device, seq_len: int) -> Step:
    """Compare a model that chooses its keys, computed by this library, with `sdpa`: time, and memory at its peak.

    transformers' indexer holds two tensors of tokens x tokens x index heads. Where they do not fit in memory, this
    library is measured alone.
    """
    parameters = CHOOSING_SHAPE | {"seq_len": seq_len}
    scores = seq_len**2 * CHOOSING_SHAPE["index_heads"]
    is_long = seq_len >= 4096

    def run() -> Iterator[Row]:
        torch.manual_seed(0)
        model = _deepseek().to(device).eval()
        tokens = torch.randint(256, (1, seq_len), device=device)
        why = measure.lack_of_memory(2 * 4 * scores, device)
        names = (OURS,) if why else (OURS, "sdpa")
        prompts = {name: Noted(partial(_states, model, name, tokens), device) for name in names}
        rounds = measure.interleave(prompts, seconds=10, device=device, least=1, most=5)

        figures = {}
        for name, prompt in prompts.items():
            yield Row.of(f"chosen keys, {name}: forward", parameters, rounds.spread(name), "s")
            if prompt.bytes is not None:
                figures[name] = prompt.bytes
                bar = LINEAR if name == OURS and seq_len == 32768 else None
                yield Row(f"chosen keys, {name}: peak memory", parameters, prompt.bytes, "bytes", bar=bar)

        time, memory = "chosen keys, forward: time over sdpa", "chosen keys, forward: peak memory over sdpa's"
        if why is not None:
            yield Row(time, parameters, None, "x", refused=why)
            return
        yield over(rounds, OURS, "sdpa", "forward", parameters, time, bar=0.25 if is_long else None)
        if len(figures) == len(prompts):
            yield Row(memory, parameters, figures[OURS] / figures["sdpa"], "x", bar=0.1 if is_long else None)

    return Step(f"a layer of DeepSeek-V3.2 at {seq_len:,} tokens", run)


def _t5(device: torch.device, seq_len: int) -> Step:
    """Compare two layers of T5's encoder with `sdpa`, whose bias has tokens x tokens x heads numbers: time, and memory
    at the peak. `sdpa` holds three tensors of that size, with a backward six."""
    heads, layers = 12, 2
    parameters = {
        "model": "T5-base's encoder", "seq_len": seq_len, "dtype": "float32", "heads": heads, "layers": layers,
    }  # fmt: skip
    most_time, most_memory = (0.5, 0.1) if seq_len == 8192 else (None, None)

    def measured(phase: str, tensors: int) -> Iterator[Row]:
        title = f"position_bias, {phase}: time over sdpa"
        if why := measure.lack_of_memory(tensors * 4 * heads * seq_len**2, device):
            yield Row(title, parameters, None, "x", refused=why)
            return
        torch.manual_seed(0)
        model = _t5_encoder(layers, heads).to(device).eval()
        tokens = torch.randint(256, (1, seq_len), device=device)
        work = {}
        for name in (OURS, "sdpa"):
            call = _call(model, name, tokens, phase != "forward")
            work[name] = Noted(lambda call=call: list(call()), device, phase)  # type: ignore[misc]
        rounds = measure.interleave(work, seconds=10, device=device, least=1, most=5)
        yield over(rounds, OURS, "sdpa", phase, parameters, title, bar=most_time)
        peaks = {name: noted.bytes for name, noted in work.items() if noted.bytes is not None}
        if len(peaks) == len(work):
            title = f"position_bias, {phase}: peak memory over sdpa's"
            yield Row(title, parameters, peaks[OURS] / peaks["sdpa"], "x", bar=most_memory, figures=peaks)

    def run() -> Iterator[Row]:
        yield from measured("forward", 3)
        yield from measured("forward+backward", 6)

    return Step(f"T5-base's encoder at {seq_len:,} tokens", run)


def _shape(
    device: torch.device,
    model_name: str,
    make: Callable[..., Any],
    seq_len: int,
    other: str,
    size: dict[str, int],
    bars: Mapping[str, float | None],
) -> Step:
    """Compare two ways to compute a model's own attention by the time of the whole model: this library, and `other`, an
    implementation of transformers.

    make, size: the function that makes the model, and its arguments.
    bars: for each phase to time, the largest ratio or None.
    """

    def run() -> Iterator[Row]:
        torch.manual_seed(0)
        model = make(**size).to(device).eval()
        tokens = torch.randint(256, (1, seq_len), device=device)
        backward = "forward+backward" in bars
        contenders = {name: _call(model, name, tokens, backward) for name in (OURS, other)}
        rounds = measure.interleave(contenders, seconds=30, device=device, least=1, most=5)
        heads = model.config.num_attention_heads
        parameters = {"model": model_name, "seq_len": seq_len, "dtype": "float32", "heads": heads, **size}
        for phase, bar in bars.items():
            yield over(rounds, OURS, other, phase, parameters, bar=bar)

    return Step(f"{model_name} at {seq_len:,} tokens", run)


def _call(model: Any, implementation: str, tokens: Tensor, backward: bool) -> Contender:
    """Return a contender that runs the model in one phase: `forward`, without gradients, or `forward+backward`."""

    def work() -> Iterator[str]:
        choose(model, implementation)
        with torch.set_grad_enabled(backward):
            states = model(input_ids=tokens, use_cache=False).last_hidden_state
        if backward:
            states.square().mean().backward()
            model.zero_grad()
        yield "forward+backward" if backward else "forward"

    return work


def choose(model: Any, implementation: str) -> None:
    """Let the model's next calls compute their attention with this implementation of transformers, or with ours."""
    from dilated_attention.integrations.huggingface import register

    register()
    model.set_attn_implementation(implementation)


def _gemma(device: torch.device, seq_len: int) -> Step:
    """Compare Gemma's own attention, computed by this library, with `sdpa` on a prompt: last logits, time, and peak
    memory with the bytes of a boolean mask added to this library's."""
    parameters = GEMMA_SHAPE | {"seq_len": seq_len}

    def rows(model: Any, tokens: Tensor) -> Iterator[Row]:
        prompts = {name: Noted(partial(_states, model, name, tokens), device) for name in (OURS, "sdpa")}
        rounds = measure.interleave(prompts, seconds=30, device=device, least=1, most=5)
        yield over(rounds, OURS, "sdpa", "forward", parameters, bar=0.75)
        with torch.no_grad():
            ours, sdpa = (model.lm_head(prompts[name].result[-1024:]) for name in (OURS, "sdpa"))
        two = sdpa.topk(2).values
        other = (ours.argmax(-1) != sdpa.argmax(-1)) & (two[:, 0] - two[:, 1] > 1e-2)
        name = "logits of the last 1,024 tokens: relative distance to sdpa's"
        distance = ((ours - sdpa).norm() / sdpa.norm()).item()
        yield Row(name, parameters, distance, "x", bar=2e-3, figures={"other argmax": int(other.sum())})
        figures = {name: prompt.bytes for name, prompt in prompts.items() if prompt.bytes is not None}
        name, mask = "forward: peak memory with a mask's bytes added, over sdpa's", seq_len**2
        if len(figures) < len(prompts):
            yield Row(name, parameters, None, "x", refused=measure.UNTOLD)
        else:
            value = (figures[OURS] + mask) / figures["sdpa"]
            yield Row(name, parameters, value, "x", bar=1.0, figures=figures)

    run = partial(_of_gemma, "forward: time over sdpa", parameters, device, rows)
    return Step(f"Gemma 3 270M at {seq_len:,} tokens", run)


def _gemma_blocks(device: torch.device, seq_len: int) -> Step:
    """Compare Gemma with chosen blocks in its layers without windows, and as it is: perplexity of a text, and time.

    The choice for a query block depends on queries all over the block (`lookahead`). They are later than some of its
    tokens, but not later than its last. So one figure is the perplexity of these last tokens alone.
    """
    parameters = GEMMA_SHAPE | {"seq_len": seq_len, "blocks": "sampled, lookahead", "density": 0.25}
    perplexity = "chosen blocks: perplexity over dense"

    def rows(model: Any, tokens: Tensor) -> Iterator[Row]:
        from dilated_attention.integrations.huggingface import sparsify
        from dilated_attention.routing import sampled_blocks

        block = 64
        # At least 1,024 tokens for a row: with them, a quarter of all blocks at 16,384.
        chosen = partial(sampled_blocks, lookahead=True, density=0.235, block_size=block, floor=1024 // block)
        selectors = {"chosen blocks": chosen, "dense": None}

        def read(name: str) -> Tensor:
            sparsify(model, selectors[name], first=0)
            return _states(model, OURS, tokens)

        prompts = {name: Noted(partial(read, name), device) for name in selectors}
        rounds = measure.interleave(prompts, seconds=30, device=device, least=1)
        sparsify(model, None)
        nats = {name: _nats(model, prompt.result, tokens) for name, prompt in prompts.items()}
        more = nats["chosen blocks"] - nats["dense"]
        ratio, last = (math.exp(x.mean()) for x in (more, more[block - 1 :: block]))
        figures = {f"perplexity, {name}": math.exp(value.mean()) for name, value in nats.items()}
        figures["of the last tokens of query blocks: perplexity over dense"] = last
        yield Row(perplexity, parameters, ratio, "x", bar=1.02, figures=figures)
        title = "chosen blocks: forward, time over dense"
        yield over(rounds, "chosen blocks", "dense", "forward", parameters, title, bar=1.0)

    run = partial(_of_gemma, perplexity, parameters, device, rows)
    return Step(f"Gemma 3 270M, 25% of blocks at {seq_len:,} tokens", run)


def _gemma_tokens(device: torch.device, seq_len: int) -> Step:
    """Compare Gemma's own attention, computed by this library, with `sdpa` on new tokens after a prompt with a cache:
    the time of a token. A round has 16 tokens, and the cache keeps them."""
    parameters, title = GEMMA_SHAPE | {"seq_len": seq_len}, "a new token with a cache: time over sdpa"

    def rows(model: Any, tokens: Tensor) -> Iterator[Row]:
        from transformers import DynamicCache

        prompt = DynamicCache(config=model.config)
        choose(model, OURS)
        with torch.no_grad():
            first = model(tokens, past_key_values=prompt, logits_to_keep=1).logits.argmax(-1)

        def contender(name: str) -> Contender:
            cache = copy.deepcopy(prompt)

            def work() -> Iterator[str]:
                following = first
                choose(model, name)
                with torch.no_grad():
                    for _ in range(16):
                        following = model(following, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
                yield "16 new tokens"

            return work

        rounds = measure.interleave({name: contender(name) for name in (OURS, "sdpa")}, seconds=20, device=device)
        yield over(rounds, OURS, "sdpa", "16 new tokens", parameters, title, bar=1.0)

    return Step(f"Gemma 3 270M, new tokens after {seq_len:,}", partial(_of_gemma, title, parameters, device, rows))


def _of_gemma(
    name: str, parameters: dict[str, Any], device: torch.device, rows: Callable[[Any, Tensor], Iterator[Row]]
) -> Iterator[Row]:
    """Yield what `rows` yields for Gemma and the first tokens of a text, `(1, seq_len)`. If Gemma is not installed,
    yield a row with this name that says so."""
    if why := activations.missing(activations.GEMMA, "gguf"):
        yield Row(name, parameters, None, "x", refused=why)
        return
    model, text = activations.load_gemma()
    yield from rows(model.to(device), text[:, : parameters["seq_len"]].to(device))


@torch.no_grad()
def _states(model: Any, implementation: str, tokens: Tensor) -> Tensor:
    """Return the last layer's states `(seq, width)` of the model with this implementation of attention."""
    choose(model, implementation)
    states: Tensor = model.model(tokens, use_cache=False).last_hidden_state
    return states[0]


@torch.no_grad()
def _nats(model: Any, states: Tensor, tokens: Tensor) -> Tensor:
    """Return the cross entropy in nats of every token after the first, `(seq - 1)`, from the last layer's `states`
    `(seq, width)` and `tokens` `(1, seq)`. It is computed in parts, since the vocabulary is large."""
    parts = zip(states[:-1].split(512), tokens[0, 1:].split(512), strict=True)
    return torch.cat([F.cross_entropy(model.lm_head(part), target, reduction="none") for part, target in parts])
