"""Arguments of layers besides the mask: windows, positions, bounds of packed samples, names that nobody knows."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    ModernBertConfig,
    ModernBertModel,
    PreTrainedModel,
)

from dilated_attention import UnsupportedError
from dilated_attention.integrations.huggingface import NAME, attention_forward, dilate, report
from tolerances import TOLERANCE, relative_error

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 60,
}  # fmt: skip
TOKENS, WINDOW = 40, 8


def _mistral() -> MistralForCausalLM:
    torch.manual_seed(0)
    config = MistralConfig(**SIZES, sliding_window=WINDOW, initializer_range=0.2)
    return MistralForCausalLM._from_config(config, attn_implementation=NAME).eval()


def _heads(queries: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """Return q of the last `queries` tokens, k and v: `(batch, heads, seq, head_dim)`."""
    return torch.randn(1, 4, queries, 8), torch.randn(1, 2, TOKENS, 8), torch.randn(1, 2, TOKENS, 8)


def _windowed(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Return attention in which fewer than WINDOW tokens on each side, or before, are seen."""
    place = torch.arange(TOKENS)
    distance = place[-q.shape[2] :, None] - place
    seen = (distance < WINDOW) & (distance >= 0) if is_causal else distance.abs() < WINDOW
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
    return out.transpose(1, 2)


@pytest.mark.parametrize("queries", [TOKENS, 5, 1])
@pytest.mark.parametrize("is_causal", [True, False])
def test_without_a_mask_the_window_of_the_arguments_counts(is_causal, queries):
    layer = _mistral().model.layers[0].self_attn
    q, k, v = _heads(queries)
    given = {"sliding_window": WINDOW, "is_causal": is_causal}
    places = torch.arange(TOKENS - queries, TOKENS)[None]
    for more in ({}, {"position_ids": places}):
        out, _ = attention_forward(layer, q, k, v, None, **given, **more)
        assert relative_error(out, _windowed(q, k, v, is_causal)) <= TOLERANCE[torch.float32]


def test_a_window_that_neither_mask_nor_arguments_tell():
    model = _mistral()
    with pytest.raises(UnsupportedError, match=r"neither its mask nor sliding_window.*has sliding_window=8: give it"):
        attention_forward(model.model.layers[0].self_attn, *_heads(), None)


SAMPLES = torch.cat([torch.arange(25), torch.arange(15)])[None]


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (SAMPLES, "position_ids restart or jump, and the mask is None"),
        ((torch.arange(TOKENS)[None] - 3).clamp(min=0), "position_ids restart or jump"),
        (torch.arange(TOKENS, 2 * TOKENS)[None], "do not begin at 0, the mask is None and there is no cache"),
    ],
    ids=["packed", "padded", "shard"],
)
def test_positions_that_a_dropped_mask_told_apart(places, message):
    llama = LlamaForCausalLM._from_config(LlamaConfig(**SIZES), attn_implementation=NAME)
    layer = llama.model.layers[0].self_attn
    for _ in range(2):
        for is_causal in (True, False):
            with pytest.raises(UnsupportedError, match=message):
                attention_forward(layer, *_heads(), None, position_ids=places, is_causal=is_causal)
        dilate(llama, [8, 64], [1, 2])


def test_bounds_of_samples_beside_a_dropped_mask():
    layer = _mistral().model.layers[0].self_attn
    q, k, v = _heads()
    bounds = torch.tensor([0, 25, TOKENS], dtype=torch.int32)
    given = {"sliding_window": WINDOW, "position_ids": SAMPLES, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    out, _ = attention_forward(layer, q, k, v, None, **given)
    parts = [attention_forward(layer, *(x[:, :, part] for x in (q, k, v)), None, sliding_window=WINDOW)[0]
             for part in (slice(0, 25), slice(25, TOKENS))]  # fmt: skip
    torch.testing.assert_close(out, torch.cat(parts, 1))


def test_a_part_of_the_heads():
    """Windows do not count heads; a pattern of several rates does, and cannot tell which they are."""
    llama = LlamaForCausalLM._from_config(LlamaConfig(**SIZES), attn_implementation=NAME)
    layer = llama.model.layers[0].self_attn
    q, k, v = _heads()
    whole, _ = attention_forward(layer, q, k, v, None)
    dilated = {}
    for rates in (None, [1, 1], [1, 2]):
        if rates is not None:
            dilate(llama, [8, 64], rates)
            whole, _ = attention_forward(layer, q, k, v, None)
        for head in (0, 1):
            given = q[:, 2 * head : 2 * head + 2], k[:, head : head + 1], v[:, head : head + 1]
            if rates == [1, 2]:
                with pytest.raises(UnsupportedError, match=r"got 2 of config\.num_attention_heads=4 heads.*rates of 1"):
                    attention_forward(layer, *given, None)
                continue
            dilated[head], _ = attention_forward(layer, *given, None)
            torch.testing.assert_close(dilated[head], whole[:, :, 2 * head : 2 * head + 2])


def _packed_batch(**options: Any) -> dict[str, Tensor]:
    """Return three samples in one row, as the collator of flash-attention's users gives them."""
    samples = [{"input_ids": torch.randint(60, (n,)).tolist()} for n in (20, 5, 15)]
    return DataCollatorWithFlattening(return_tensors="pt", **options)(samples)


def _losses_and_gradients(model: PreTrainedModel, batch: dict[str, Any]) -> list[Tensor]:
    found = []
    for implementation in ("sdpa", NAME):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        found.append(torch.cat([loss.detach()[None], *(x.grad.flatten() for x in model.parameters())]))
    return found


@pytest.mark.parametrize("use_cache", [False, True])
def test_packed_samples_as_flash_attention_takes_them(use_cache):
    """transformers looks for packed samples without a cache only; then sdpa, without the bounds, sees one sample."""
    batch = _packed_batch(return_flash_attn_kwargs=True, return_seq_idx=True)
    model = _mistral()
    expected = _losses_and_gradients(model, {**batch, "use_cache": False})[0]
    found = _losses_and_gradients(model, {**batch, "use_cache": use_cache})[1]
    assert relative_error(found, expected) <= TOLERANCE[torch.float32]
    assert "packed" in report(model)


def test_bounds_of_samples_without_positions():
    model = _mistral()
    batch = _packed_batch(return_flash_attn_kwargs=True)
    del batch["position_ids"]
    logits = model(**batch).logits
    tokens, bounds = batch["input_ids"], batch["cu_seq_lens_q"].tolist()
    places = torch.arange(TOKENS)[None]
    for first, stop in itertools.pairwise(bounds):
        alone = model(tokens[:, first:stop], position_ids=places[:, first:stop]).logits
        torch.testing.assert_close(logits[:, first:stop], alone, rtol=0, atol=1e-5)


def test_an_encoder_of_packed_samples():
    sizes = {name: x for name, x in SIZES.items() if name != "num_key_value_heads"}
    config = ModernBertConfig(**sizes, local_attention=8, pad_token_id=0, initializer_range=0.2)
    model = ModernBertModel._from_config(config, attn_implementation=NAME).eval()
    tokens = torch.randint(60, (2, 20))
    bounds = torch.tensor([0, 12, 20, 40], dtype=torch.int32)
    states = model(tokens, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds).last_hidden_state
    places = torch.arange(20)[None]
    for row, part in ((0, slice(0, 12)), (0, slice(12, 20)), (1, slice(0, 20))):
        alone = model(tokens[row : row + 1, part], position_ids=places[:, part]).last_hidden_state
        torch.testing.assert_close(states[row : row + 1, part], alone, rtol=0, atol=1e-5)


WRONG = {
    "other samples": ({"cu_seq_lens_q": torch.tensor([0, 20, 40])}, "cu_seq_lens_q must begin a sample wherever"),
    "too few tokens": ({"cu_seq_lens_q": torch.tensor([0, 25])}, "must rise from 0 to the 40 tokens"),
    "not from 0": ({"cu_seq_lens_q": torch.tensor([5, 25, 40])}, "must rise from 0 to the 40 tokens"),
    "falling": ({"cu_seq_lens_q": torch.tensor([0, 30, 25, 40])}, "must rise from 0 to the 40 tokens"),
    "other keys": (
        {"cu_seq_lens_q": torch.tensor([0, 25, 40]), "cu_seq_lens_k": torch.tensor([0, 24, 40])}, "must rise from 0",
    ),
    "seq_idx": ({"seq_idx": torch.zeros(1, 40, dtype=torch.int32)}, "seq_idx must change wherever"),
    "seq_idx alone": (
        {"seq_idx": (torch.arange(40)[None] > 24).int(), "position_ids": None}, "give position_ids that restart",
    ),
    "padding": (
        {"cu_seq_lens_q": torch.tensor([0, 25, 40]), "attention_mask": (torch.arange(40) < 38)[None].long()},
        "cu_seq_lens_q with padding.*leave out attention_mask",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_samples_that_disagree(case):
    arguments, message = WRONG[case]
    given = {"position_ids": SAMPLES, "use_cache": False, **arguments}
    with pytest.raises(UnsupportedError, match=message):
        _mistral()(torch.randint(60, (1, TOKENS)), **given)


def test_names_that_sdpa_ignores():
    model, tokens = _mistral(), torch.randint(60, (1, TOKENS))
    expected = model(tokens).logits
    harmless = {
        "token_type_ids": torch.ones(1, TOKENS), "task_id": 3, "special_tokens_mask": torch.ones(1, TOKENS),
        "seq_idx": torch.zeros(1, TOKENS, dtype=torch.int32), "length": torch.tensor([TOKENS]),
    }  # fmt: skip
    assert torch.equal(model(tokens, **harmless).logits, expected)
    with pytest.raises(UnsupportedError, match=r'alibi_slopes: .* remove it from the batch, or load .*"sdpa"'):
        model(tokens, alibi_slopes=torch.ones(4))


@pytest.mark.parametrize("name", ["dilated-attention", "Dilated_Attention"])
def test_a_misspelt_implementation(name, tmp_path):
    config = LlamaConfig(**SIZES)
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    for make in (
        lambda: LlamaForCausalLM._from_config(LlamaConfig(**SIZES), attn_implementation=name),
        lambda: LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation=name),
        lambda: model.set_attn_implementation(name),
    ):
        with pytest.raises(ValueError, match=f"attn_implementation='{name}' is unknown.*\"dilated_attention\""):
            make()


def test_a_block_diagonal_mask_over_pairs():
    """It is what position_ids that restart say."""
    model, tokens = _mistral(), torch.randint(60, (1, TOKENS))
    numbers = (torch.arange(TOKENS) >= 25)[None]
    pairs = (numbers[:, :, None] == numbers[:, None]).tril()[:, None]
    found = model(tokens, position_ids=SAMPLES, use_cache=False).logits
    place = torch.arange(TOKENS)
    pairs = pairs & (place[:, None] - place < WINDOW)
    by_pairs = model(tokens, attention_mask=pairs, position_ids=SAMPLES, use_cache=False).logits
    torch.testing.assert_close(by_pairs, found, rtol=0, atol=1e-5)
    model.set_attn_implementation("eager")
    bias = torch.zeros(pairs.shape).masked_fill(~pairs, torch.finfo(torch.float32).min)
    expected = model(tokens, attention_mask=bias, position_ids=SAMPLES, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_compiled_layer_without_a_mask(compiling_python):
    """Positions are checked when the graph runs."""
    compiling_python(
        """
        import torch
        from transformers import MistralConfig, MistralForCausalLM
        from dilated_attention.integrations.huggingface import attention_forward

        sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
        config = MistralConfig(**sizes, num_key_value_heads=2, vocab_size=60, sliding_window=8)
        model = MistralForCausalLM._from_config(config, attn_implementation="dilated_attention").eval()
        layer, q, k = model.model.layers[0].self_attn, torch.randn(1, 4, 40, 8), torch.randn(1, 2, 40, 8)

        def call(places):
            return attention_forward(layer, q, k, k, None, sliding_window=8, position_ids=places)[0]

        compiled, places = torch.compile(call, fullgraph=True, backend="aot_eager"), torch.arange(40)[None]
        torch.testing.assert_close(compiled(places), call(places))
        for wrong, words in ((places + 40, "do not begin at 0"), (places % 25, "restart or jump")):
            try:
                compiled(wrong)
            except RuntimeError as error:
                assert words in str(error), error
            else:
                raise AssertionError("positions passed")
        """
    )
