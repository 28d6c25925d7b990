"""Generation and cached steps of models with windows, chunks and sinks: the same as in eager mode, token by token."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from dilated_attention import plan_cache
from dilated_attention.integrations import own_attention
from dilated_attention.integrations.huggingface import NAME, report
from transformers_families import build

TOKENS = 43
KINDS = ["gemma3", "mistral", "llama4", "gpt_oss"]  # windows beside full layers, windows alone, chunks, sinks
CHOOSING = ["deepseek_v32", "glm_moe_dsa", "hy_v4"]  # which choose the keys of each query
OPTIONS = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

STRATEGIES = {
    "prompt lookup": {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1},
    "beams": {"num_beams": 3},
    "beams, static cache": {"num_beams": 3, "cache_implementation": "static"},
    "chunks of the prompt": {"prefill_chunk_size": 7},
    "chunks of the prompt, static cache": {"prefill_chunk_size": 7, "cache_implementation": "static"},
    "no cache": {"use_cache": False},
}
"""Options of generate; the static caches of the first and of the last kind slide, in layers with windows."""


def _both(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return an eager model and ours, of the same weights."""
    eager, ours = build(family, "eager"), build(family, NAME)
    ours.load_state_dict(eager.state_dict())
    return eager, ours


def _prompt(samples: int) -> tuple[Tensor, Tensor]:
    """Return tokens that repeat, which a lookup can find, and a mask; with two samples, one is padded on the left."""
    tokens = torch.randint(3, 97, (samples, TOKENS), generator=torch.Generator().manual_seed(1))
    tokens[:, 20:40] = tokens[:, :20]
    mask = torch.ones_like(tokens)
    mask[1:, :11] = 0
    return tokens, mask


def _steps(model: PreTrainedModel) -> list[int]:
    """Return a list that grows by the number of tokens of each forward of the model."""
    sizes: list[int] = []
    model.register_forward_pre_hook(
        lambda module, args, inputs: sizes.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    return sizes


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", KINDS + CHOOSING)
def test_strategies_generate_the_same_tokens(family, strategy):
    tokens, mask = _prompt(1 if "lookup" in strategy else 2)
    eager, ours = _both(family)
    sizes = _steps(ours)
    options = {**OPTIONS, **STRATEGIES[strategy], "attention_mask": mask}
    assert torch.equal(ours.generate(tokens, **options), eager.generate(tokens, **options))
    several = any(1 < size < TOKENS for size in sizes)
    assert several == ("lookup" in strategy or "chunks" in strategy)


@pytest.mark.parametrize("similar", [True, False])
@pytest.mark.parametrize("family", KINDS)
def test_assisted_generation(family, similar):
    """The assistant guesses several tokens, of which none or many are right."""
    tokens, mask = _prompt(1)
    eager, ours = _both(family)
    helpers = _both(family)
    if not similar:
        with torch.no_grad():
            for first, second in zip(*(helper.parameters() for helper in helpers), strict=True):
                second.copy_(first.add_(0.1 * torch.randn_like(first)))
    sizes = _steps(ours)
    found, expected = (
        model.generate(tokens, attention_mask=mask, assistant_model=helper, **OPTIONS)
        for model, helper in zip((ours, eager), reversed(helpers), strict=True)
    )
    assert torch.equal(found, expected)
    assert torch.equal(found, eager.generate(tokens, attention_mask=mask, **OPTIONS))
    assert any(1 < size < TOKENS for size in sizes)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="transformers moves an offloaded cache to a GPU and back")
@pytest.mark.parametrize("cache", ["offloaded", "offloaded_static"])
@pytest.mark.parametrize("family", KINDS)
def test_offloaded_caches(family, cache):
    tokens, mask = (x.cuda() for x in _prompt(2))
    eager, ours = (model.cuda() for model in _both(family))
    options = {**OPTIONS, "attention_mask": mask, "cache_implementation": cache}
    assert torch.equal(ours.generate(tokens, **options), eager.generate(tokens, **options))


@pytest.mark.parametrize("kind", ["dynamic", "dynamic without windows", "static"])
@pytest.mark.parametrize(
    "sizes", [[20, 1, 1, 5, 16], [3, 9, 1, 30], pytest.param([1] * TOKENS, marks=pytest.mark.thorough)], ids=str
)
@pytest.mark.parametrize("family", [*KINDS, *CHOOSING, "qwen4_exp"])
def test_cached_steps(family, sizes, kind):
    """Logits of one token after another and of several at once; a cache that forgets, that does not, that is static."""
    if family not in KINDS and kind == "dynamic without windows":
        pytest.skip("such a cache has no place for the indexer's keys")
    tokens, mask = _prompt(2)
    logits = []
    for model in _both(family):
        cache = {
            "dynamic": lambda config: DynamicCache(config=config),
            "dynamic without windows": lambda config: DynamicCache(),
            "static": lambda config: StaticCache(config=config, max_cache_len=TOKENS + 5),
        }[kind](model.config)
        positions, parts, start = (mask.cumsum(1) - 1).clamp(min=0), [], 0
        with torch.no_grad():
            for size in sizes:
                new = slice(start, start + size)
                part = model(
                    tokens[:, new], attention_mask=mask[:, : new.stop], position_ids=positions[:, new],
                    past_key_values=cache, use_cache=True,
                )  # fmt: skip
                parts.append(part.logits)
                start += size
        logits.append(torch.cat(parts, 1)[mask.bool()])
    scale = max(float(logits[0].abs().max()), 1.0)
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("least", [0, own_attention.LEAST_SAVED], ids=["ours", "PyTorch's"])
@pytest.mark.parametrize("family", KINDS)
def test_one_token_without_padding(family, least, monkeypatch):
    """This library computes it, or PyTorch's operator where that is quicker; layers with sinks are always ours."""
    monkeypatch.setattr(own_attention, "LEAST_SAVED", least)
    tokens, _ = _prompt(1)
    logits = []
    for model in _both(family):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            parts = [model(tokens[:, :20], past_key_values=cache).logits]
            parts += [model(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(20, TOKENS)]
        logits.append(torch.cat(parts, 1))
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)
    lines = report(model).splitlines()
    assert all(line.endswith("scaled_dot_product_attention, quicker here") for line in lines) == (
        least > 0 and family != "gpt_oss"
    )


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # renamed in transformers 5.24
def test_a_cache_goes_on_with_a_second_prompt():
    """A conversation: the cache of the first answer is continued, and a copy of it by other words."""
    tokens, mask = _prompt(1)
    found = []
    for model in _both("gemma3"):
        cache = DynamicCache(config=model.config)
        first = model.generate(tokens, attention_mask=mask, past_key_values=cache, **OPTIONS)
        for more in (tokens[:, :9], tokens[:, 5:30]):
            text = torch.cat([first, more], 1)
            mask_of_all = torch.ones_like(text)
            found.append(
                model.generate(text, attention_mask=mask_of_all, past_key_values=copy.deepcopy(cache), **OPTIONS)
            )
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


def test_a_window_plans_for_the_first_new_token_alone():
    """Once a cache is as long as the window, each new token is the same call as the one before."""
    model, tokens = build("mistral", NAME), _prompt(1)[0]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens, past_key_values=cache)
        model(tokens[:, :1], past_key_values=cache)
        misses = plan_cache.info().misses
        model(tokens[:, 1:2], past_key_values=cache)
    assert plan_cache.info().misses == misses


def test_paged_caches_are_refused():
    """Continuous batching: transformers names the implementation, and what to choose."""
    with pytest.raises(ValueError, match=f"{NAME} is not supported for continuous batching. Use .*sdpa"):
        build("mistral", NAME).generate_batch([[5, 6, 7]], progress_bar=False)
