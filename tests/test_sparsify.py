"""`sparsify`: content-chosen blocks in the prompts of transformers' full layers, and what they hold of the softmax."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import LongcatFlashConfig, LongcatFlashForCausalLM, PreTrainedModel
from transformers.masking_utils import blockwise_overlay, causal_mask_function, or_masks

from dilated_attention import BlockLayout, attention_weights
from dilated_attention.integrations.chosen_blocks import ChosenBlocks
from dilated_attention.integrations.huggingface import NAME, dilate, report, sparsify, visibility
from dilated_attention.integrations.own_attention import Shown
from dilated_attention.routing import sampled_blocks, topk_blocks, topp_blocks
from transformers_families import build

TOKENS = 43
SOME = partial(topk_blocks, density=0.3, block_size=4)
ALL = partial(topp_blocks, mass=1.0, block_size=4)


def _logits(model: PreTrainedModel, tokens: Tensor, **inputs: Tensor) -> Tensor:
    output = model(tokens, **inputs)
    return (output.logits if "logits" in output else output.last_hidden_state).detach()


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(3, 97, (2, TOKENS), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", ["gemma3", "modernbert", "gpt_oss", "gemma2", "qwen3"])
def test_all_blocks_are_the_models_own_attention(family, tokens):
    model = build(family, NAME)
    expected = _logits(model, tokens)
    sparsify(model, ALL, first=0)
    torch.testing.assert_close(_logits(model, tokens), expected, rtol=0, atol=1e-5)
    assert "100% of the blocks, which hold of each head's softmax: 1.00 1.00" in report(model)
    sparsify(model, SOME, first=0)
    assert (_logits(model, tokens) - expected).abs().max() > 1e-4
    sparsify(model, None)
    torch.testing.assert_close(_logits(model, tokens), expected, rtol=0, atol=0)


def test_a_text_without_images_is_a_prompt():
    """Gemma 3 and PaliGemma describe the images of every text; blocks in which no query lies change nothing."""
    ids = torch.full((2, TOKENS), -1)
    mask, chosen = or_masks(causal_mask_function, blockwise_overlay(ids)), ChosenBlocks(SOME, 0)
    assert chosen.serves(visibility(2, TOKENS, TOKENS, mask_function=mask))
    ids[1, 4:9] = 0
    assert not chosen.serves(visibility(2, TOKENS, TOKENS, mask_function=mask))
    assert visibility(2, 4, TOKENS, q_offset=TOKENS - 4, mask_function=mask).blocks is None


def test_layers_that_are_not_named_attention(tokens):
    """LongCat Flash calls its two attention layers of each block MLA."""
    size = {"hidden_size": 32, "ffn_hidden_size": 32, "expert_ffn_hidden_size": 8, "num_layers": 1, "vocab_size": 97}
    heads = {"num_attention_heads": 4, "head_dim": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "n_routed_experts": 2, "zero_expert_num": 1, "moe_topk": 2}
    model = sparsify(LongcatFlashForCausalLM(LongcatFlashConfig(**size, **heads, **ranks)).eval(), SOME, first=0)
    _logits(model, tokens)
    assert report(model).count("of the blocks, which hold") == 2


@pytest.mark.parametrize("selector", [SOME, partial(sampled_blocks, density=0.3, block_size=4)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
def test_attends_to_the_chosen_blocks(selector, is_causal, sinks):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, TOKENS, 4, 8), *torch.randn(2, 2, TOKENS + 7, 2, 8)
    keys = TOKENS + 7 if is_causal else TOKENS  # a static cache has rows beyond the prompt
    k, v = k[:, :keys], v[:, :keys]
    more = {"sinks": torch.randn(4) if sinks else None, "softcap": None, "dropout_p": 0.0}
    shown = Shown(is_causal, queries=TOKENS, keys=keys)
    out, words = ChosenBlocks(selector, 0).attend(shown, q, k, v, scale=0.7, **more)

    k, v = k[:, :TOKENS], v[:, :TOKENS]
    layout = selector(q, k, is_causal=is_causal, scale=0.7)
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) * 0.7
    if is_causal:
        logits = logits.where(torch.ones(TOKENS, TOKENS).tril() > 0, -torch.inf)
    kept = logits.where(layout.dense_mask(), -torch.inf)
    sink = more["sinks"].view(1, 4, 1, 1).expand(2, 4, TOKENS, 1) if sinks else kept[..., :0]
    weights = torch.cat([kept, sink], -1).softmax(-1)[..., :TOKENS]
    expected = torch.einsum("bhqk,bkhd->bqhd", weights, v.repeat_interleave(2, 2))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    rows = torch.linspace(0, TOKENS - 1, 32).long().unique()
    held = (kept.logsumexp(-1) - logits.logsumexp(-1)).exp()[..., rows].mean((0, 2))
    assert words.endswith(" ".join(f"{mass:.2f}" for mass in held.tolist()))
    assert float(held.min()) < 0.99


def test_only_whole_prompts_of_full_layers(tokens):
    model = build("gemma3", NAME)
    kinds = model.config.get_text_config().layer_types
    sparsify(model, SOME, layers=[1], first=TOKENS)
    _logits(model, tokens)
    lines = report(model).split("\n")
    assert [("blocks" in line) for line in lines] == [i == 1 for i in range(len(kinds))]
    assert kinds[1] == "full_attention"
    for shorter in ({"tokens": tokens[:, 1:]}, {"attention_mask": (torch.arange(TOKENS) > 3).long().expand(2, -1)}):
        _logits(model, **{"tokens": tokens, **shorter})
        assert "blocks" not in report(model)
    sparsify(model, SOME, first=0)
    dense = build("gemma3", NAME)
    with torch.no_grad():
        sparse_step, dense_step = (x.generate(tokens, max_new_tokens=3, do_sample=False) for x in (model, dense))
    assert "1 queries from" in report(model)
    assert sparse_step.shape == dense_step.shape


def test_gradients_are_those_of_the_chosen_blocks():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, TOKENS, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    layout = SOME(q.detach(), k.detach(), is_causal=True, scale=None)
    shown = Shown(is_causal=True, queries=TOKENS, keys=TOKENS)
    out, _ = ChosenBlocks(SOME, 0).attend(shown, q, k, v, scale=None)
    weights = attention_weights(q, k, layout, is_causal=True).to_dense()
    expected = (weights @ v.transpose(1, 2)).transpose(1, 2)
    probe = torch.randn_like(out)
    for actual, wanted in zip(
        torch.autograd.grad(out, (q, k, v), probe), torch.autograd.grad(expected, (q, k, v), probe), strict=True
    ):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-10)


def test_what_it_cannot_take():
    model = build("qwen3", NAME)
    with pytest.raises(ValueError, match=r"model must be a transformers PreTrainedModel; got Linear"):
        sparsify(torch.nn.Linear(2, 2), SOME)
    with pytest.raises(ValueError, match=r"selector must be a function .* got 0.25"):
        sparsify(model, 0.25)
    with pytest.raises(ValueError, match=r"layers=\[4\]: the model has 4 attention layers"):
        sparsify(model, SOME, layers=[4])
    with pytest.raises(ValueError, match=r"layers=\[0\]: .*Gemma3ForCausalLM all have windows or chunks.*full layers"):
        sparsify(build("gemma3", NAME), SOME, layers=[0])
    with pytest.raises(ValueError, match=r"layers=None: .*MistralForCausalLM all have windows"):
        sparsify(build("mistral", NAME), SOME)
    with pytest.raises(ValueError, match="first"):
        sparsify(model, SOME, first=-1)
    sparsify(model, lambda q, k, **options: None, first=0)
    with pytest.raises(ValueError, match=r"selector must return a BlockLayout; got NoneType"):
        model(torch.zeros(1, 8, dtype=torch.long))
    sparsify(model, lambda q, k, **options: BlockLayout.local(5, 4, 4), first=0)
    with pytest.raises(ValueError, match="5"):
        model(torch.zeros(1, 8, dtype=torch.long))
    with pytest.raises(ValueError, match="Qwen3ForCausalLM is dilated"):
        sparsify(dilate(build("qwen3", NAME), [8], [1], layers="full"), SOME)
