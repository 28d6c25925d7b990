"""transformers models over a mesh of real processes, against one process: logits, loss and every gradient."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import random
import re
import signal
import time
import warnings
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    RobertaConfig,
    RobertaForCausalLM,
)

import processes
from dilated_attention import BlockLayout, Dilated, UnsupportedError, Window, attention
from dilated_attention.errors import ContextParallelError
from dilated_attention.integrations import chosen_keys, forward_over_ranks
from dilated_attention.integrations.generation_over_ranks import _read
from dilated_attention.integrations.huggingface import (
    NAME,
    dilate,
    exchange_plan,
    extend_positions,
    generate_over_ranks,
    report,
    shard_batch,
    sparsify,
)
from dilated_attention.integrations.over_ranks import ranks_of
from dilated_attention.parallel import cp_mean, set_context_parallel, shard_sequence, unshard_sequence
from dilated_attention.parallel import exchange_plan as plan_of_call
from dilated_attention.parallel.comm import link_of
from dilated_attention.torch_internals import rendezvous_store
from test_own_attention import SMALL_VISION, _images, _prefix
from tolerances import relative_error
from transformers_families import CHOOSING, FAMILIES, FULL, build
from transformers_families import SMALL as SMALL_OF_FAMILIES

TOKENS = 43
EXACT = 1e-5
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 97}
REFUSED = {
    "deepseek_v4": "config.layer_types has compressed_sparse_attention",
    "doge": "the model computes with its mask over pairs",
    "glm5_next": "config.layer_types has linear_attention",
    "inkling": "config.layer_types has hybrid_sliding",
    "inkling2": "config.layer_types has hybrid_sliding",
    "inkling2_loop": "config.layer_types has hybrid_sliding",
    "lara_mini": "config.layer_types has linear_attention",
    "lfm3": "config.layer_types has conv",
    "minimax": "config.layer_types has linear_attention",
    "minimax_m3_vl": "config.layer_types has minimax_m3_sparse",
    "qwen4_exp": "config.layer_types has linear_attention",
    "recurrent_gemma": "conv_1d .Conv1d. looks along the sequence|layer_types has linear_attention",
    "unlimited_ocr": "config.layer_types has reference_sliding_attention",
    "zaya": "config.layer_types has hybrid",
}
"""Families whose other layers look along the sequence or whose attention has no mesh, and words of the error."""
ROUGH = {"diffusion_gemma", "embedding_gemma2", "gemma4", "gemma4_unified", "muse_spark"}
"""Families with such large scores that rounding alone changes gradients in float32 by 3e-5: compared in float64."""


def mesh_of_all():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def batch_of(kind: str) -> dict[str, Tensor]:
    """Return two texts with labels. "right", "left": padding on this side; "packed": samples whose edges lie
    anywhere in the first text, one of them at the edge of the shards of two ranks."""
    tokens = torch.randint(3, 97, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    if kind in ("right", "left"):
        mask = torch.ones_like(tokens)
        mask[1, -11:] = 0
        if kind == "left":
            mask = mask.flip(1)
        batch["attention_mask"] = mask
        batch["labels"][mask == 0] = -100
        batch["labels"][1, mask[1].argmax()] = -100  # a padding row would predict it
    if kind == "packed":
        lengths = (7, TOKENS // 2 - 7, 3, TOKENS - TOKENS // 2 - 3)
        restarting = torch.cat([torch.arange(n) for n in lengths])
        batch["position_ids"] = torch.stack([restarting, torch.arange(TOKENS)])
    return batch


def results_of(
    model: nn.Module, batch: dict[str, Any], kept: Tensor, weights: Tensor, mesh: Any = None
) -> dict[str, Any]:
    """Return the states or logits of the tokens that are `kept`, the loss, and the gradient of each parameter. A model
    without a loss gets one, by `weights`."""
    model.zero_grad()
    out = model(**batch) if mesh is not None else model(**batch, use_cache=False)
    states, loss = out[1 if getattr(out, "loss", None) is not None else 0], getattr(out, "loss", None)
    weights = weights[..., : states.shape[-1]].to(states.dtype)
    if loss is None:
        total = states * (weights if mesh is None else shard_sequence(weights, mesh))
        total.sum().backward()
        loss = torch.zeros(())
    else:
        loss.backward()
    states = states.detach()
    if mesh is not None:
        states = unshard_sequence(states, mesh, seq_len=TOKENS)
        for p in model.parameters():
            if p.requires_grad:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)
                p.grad /= mesh.size() if out[0].ndim == 0 else 1  # as by DDP, see cp_mean
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"states": states[kept], "loss": loss.detach(), "gradients": gradients}


def error(found: dict[str, Any], right: dict[str, Any]) -> float:
    """Return the largest relative error. A gradient's is relative to its own norm, or to 1 % of all gradients' norm if
    this is more: smaller ones are sums that cancel."""
    errors = [relative_error(found["states"], right["states"])]
    if right["loss"]:
        errors.append(relative_error(found["loss"], right["loss"]))
    every = torch.stack([x.norm() for x in right["gradients"].values()]).norm()
    for name, x in right["gradients"].items():
        errors.append(float((found["gradients"][name] - x).norm() / max(x.norm(), 0.01 * every)))
    return max(errors)


def compared(model: nn.Module, kind: str, mesh: Any, shards: bool = True) -> float:
    batch = batch_of(kind)
    if "labels" in batch and not type(model).__name__.endswith(("CausalLM", "LMHeadModel")):
        del batch["labels"]
    kept = batch.get("attention_mask", torch.ones(2, TOKENS)).bool()
    weights = torch.randn(2, TOKENS, 1024, generator=torch.Generator().manual_seed(2)) * kept[..., None]
    right = results_of(model, batch, kept, weights)
    set_context_parallel(model, mesh)
    found = results_of(model, shard_batch(batch, mesh), kept, weights, mesh)
    set_context_parallel(model, None)
    return error(found, right)


def families(names: Iterable[str], kinds: Iterable[str]) -> dict[str, float]:
    mesh = mesh_of_all()
    answers = {}
    for name in names:
        try:
            model = build(name, NAME)
        except pytest.skip.Exception:
            continue
        if name in ROUGH:
            model.double()
            if model._can_set_experts_implementation():
                model.set_experts_implementation("eager")  # the other one has no float64
        for kind in kinds:
            answers[f"{name}, {kind}"] = compared(model, kind, mesh)
    return answers


@pytest.mark.parametrize(
    "size", [3, pytest.param(2, marks=pytest.mark.thorough), pytest.param(4, marks=pytest.mark.thorough)]
)
def test_windows_chunks_sinks_and_caps(size):
    """Uneven shards, padding on both sides, packed samples."""
    names = "gemma3", "llama4", "gpt_oss", "gemma2", "modernbert"
    for answers in processes.run(size, families, names, ("plain", "right", "left", "packed")):
        assert len(answers) == 20
        assert max(answers.values()) <= EXACT, answers


def biases_by_difference() -> dict[str, float]:
    """Compare encoders of T5's family, which number positions from the first token that they get, as they are, dilated,
    and in shards of one token."""
    answers = families(["t5", "umt5", "mt5"], ["plain", "right", "left"])
    mesh = mesh_of_all()
    answers["dilated"] = compared(dilate(build("t5", NAME), [16, 64], [1, 2]), "right", mesh)
    model = build("t5", NAME)
    tokens = batch_of("plain")["input_ids"][:, : mesh.size()]
    right = model(tokens).last_hidden_state
    set_context_parallel(model, mesh)
    own = model(**shard_batch({"input_ids": tokens}, mesh)).last_hidden_state
    answers["a token each"] = relative_error(unshard_sequence(own, mesh, seq_len=mesh.size()), right)
    return answers


def test_biases_by_difference():
    for answers in processes.run(3, biases_by_difference):
        assert len(answers) == 11
        assert max(answers.values()) <= EXACT, answers


def listed_keys() -> dict[str, float]:
    """Compare models that list the keys of each query: with scores computed at once and in tiles, and recomputed."""
    answers = families(["deepseek_v32"], ["plain", "right"]) | families(["glm_moe_dsa"], ["left", "packed"])
    mesh = mesh_of_all()
    many = build("deepseek_v32", NAME, index_n_heads=16)  # with few, scores are equal where no head's is above 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chosen_keys, "SCORES", 0)
        answers["tiles"] = compared(many, "left", mesh)
    model = build("glm_moe_dsa", NAME).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    answers["checkpointing"] = compared(model, "packed", mesh)
    every = build("deepseek_v32", NAME, index_topk=TOKENS)
    answers["lists of every key"] = compared(every, "packed", mesh)
    set_context_parallel(every, mesh)
    with pytest.raises(UnsupportedError, match=r"a model that chooses its keys .* leave the mesh out"):
        generate_over_ranks(every, batch_of("plain")["input_ids"], 2)
    every.model.layers[0].self_attn.indexer.__dict__.pop("forward")  # as in transformers, over the shard alone
    with pytest.raises(UnsupportedError, match=r"layers\.0\.self_attn\.indexer .DeepseekV32Indexer. looks along"):
        set_context_parallel(every, mesh, "ring")
    return answers


def test_listed_keys():
    for answers in processes.run(2, listed_keys):
        assert len(answers) == 7
        assert max(answers.values()) <= EXACT, answers


@pytest.mark.thorough
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_family(size):
    names = [name for name in (*FAMILIES, *CHOOSING, *FULL) if name not in REFUSED]
    for answers in processes.run(size, families, names, ("plain",), within=900.0):
        assert len(answers) >= 70
        assert not {name: x for name, x in answers.items() if x > EXACT}


def training():
    """Gradient checkpointing, autocast, adapters and dilated patterns."""
    mesh = mesh_of_all()
    answers = {}
    for name in ("gemma3", "llama4", "gpt_oss"):
        model = build(name, NAME).train()
        for reentrant in (False, True):
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            answers[f"{name}, checkpointing, {reentrant}"] = compared(model, "packed", mesh)
    for name in ("gemma3", "gpt_oss"):
        answers[f"{name}, autocast"] = _autocast(build(name, NAME), mesh)
    for layers in ("all", "full"):
        model = build("gemma3", NAME) if layers == "full" else LlamaForCausalLM(LlamaConfig(**SMALL))
        dilate(model, [8, 32], [1, 2], layers=layers)
        answers[f"dilated, {layers}"] = max(compared(model, kind, mesh) for kind in ("plain", "right"))
    return answers


def _autocast(model: nn.Module, mesh: Any) -> float:
    """Return 0 if results in bfloat16 are as near to float32 as those of one process."""
    batch = batch_of("left")
    arguments = batch["attention_mask"].bool(), torch.zeros(2, TOKENS, 1)
    exact = results_of(model, batch, *arguments)
    with torch.autocast("cpu", torch.bfloat16):
        alone = results_of(model, batch, *arguments)
        set_context_parallel(model, mesh)
        together = results_of(model, shard_batch(batch, mesh), *arguments, mesh)
    bar = 1.5 * error(alone, exact)
    return max(0.0, error(together, exact) - bar) if bar > 1e-4 else bar


def test_training():
    for answers in processes.run(2, training):
        assert len(answers) == 10
        assert max(answers.values()) <= EXACT, answers


def adapters():
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(build("gemma3", NAME), config).eval()
    mesh = mesh_of_all()
    batch = batch_of("right")
    arguments = batch["attention_mask"].bool(), torch.zeros(2, TOKENS, 1)
    right = results_of(model, batch, *arguments)
    set_context_parallel(model, mesh)
    return error(results_of(model, shard_batch(batch, mesh), *arguments, mesh), right)


def test_adapters():
    pytest.importorskip("peft")
    for answer in processes.run(2, adapters):
        assert answer <= EXACT


def other_models():
    """Learned positions, masked language models, and inputs of other kinds."""
    mesh = mesh_of_all()
    torch.manual_seed(0)
    answers = {}
    options = {"attn_implementation": NAME}
    tables = GPT2LMHeadModel._from_config(
        GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=97, n_positions=64), **options
    )
    tables.eval()
    answers["learned positions"] = compared(tables, "right", mesh)
    bert = BertModel._from_config(BertConfig(**SMALL), **options, add_pooling_layer=False).eval()
    answers["encoder"] = compared(bert, "left", mesh)

    masked = ModernBertForMaskedLM._from_config(ModernBertConfig(**SMALL, pad_token_id=0, local_attention=8), **options)
    masked.eval()
    batch = batch_of("right")
    batch["labels"][:, ::2] = -100
    kept, weights = batch["attention_mask"].bool(), torch.zeros(2, TOKENS, 1)
    right = results_of(masked, batch, kept, weights)
    set_context_parallel(masked, mesh)
    own = shard_batch(batch, mesh, shift=False)
    answers["masked"] = error(results_of(masked, own, kept, weights, mesh), right)

    model = build("gemma3", NAME)
    batch = batch_of("plain")
    kept = torch.ones(2, TOKENS, dtype=torch.bool)
    right = results_of(model, batch, kept, weights)
    batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids")).detach()
    right["gradients"].pop("model.embed_tokens.weight")
    set_context_parallel(model, mesh, seq_len=TOKENS)
    found = results_of(model, shard_batch(batch, mesh), kept, weights, mesh)
    answers["embeddings"] = error(found, {**right, "gradients": right["gradients"]}) if found["gradients"] else 1.0
    assert "over a mesh" in report(model)

    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    found = results_of(again, shard_batch(batch, mesh), kept, weights, mesh)
    answers["copied"] = error(found, right)
    with pytest.raises(ValueError, match=r"40 tokens, and set_context_parallel got seq_len=43"):
        model(**shard_batch({"input_ids": torch.ones(1, 40, dtype=torch.long)}, mesh))
    return answers


def test_other_models():
    for answers in processes.run(3, other_models):
        assert len(answers) == 5
        assert max(answers.values()) <= EXACT, answers


def refusals():
    mesh = mesh_of_all()
    traffic = link_of(mesh.get_group()).traffic
    before = copy.copy(traffic)
    options = {"attn_implementation": NAME}
    for name, words in REFUSED.items():
        with suppress(pytest.skip.Exception), pytest.raises(UnsupportedError, match=words):
            set_context_parallel(build(name, NAME), mesh)
    pooled = {
        BertModel: "pooler_output of shape .*add_pooling_layer=False",
        BertForSequenceClassification: "returns logits of shape",
    }
    for kind, words in pooled.items():
        with pytest.raises(UnsupportedError, match=words):
            set_context_parallel(kind._from_config(BertConfig(**SMALL), **options), mesh)
    with pytest.raises(UnsupportedError, match='does not call this library: load it with attn_implementation="dilated'):
        set_context_parallel(LlamaForCausalLM(LlamaConfig(**SMALL)), mesh)
    with pytest.raises(UnsupportedError, match="its learned positions are numbered in a way of its own"):
        set_context_parallel(RobertaForCausalLM._from_config(RobertaConfig(**SMALL, is_decoder=True), **options), mesh)
    with torch.device("meta"), pytest.raises(UnsupportedError, match="weights are on the meta device"):
        set_context_parallel(LlamaForCausalLM._from_config(LlamaConfig(**SMALL), **options), mesh)
    assert traffic == before  # nothing has travelled

    model = build("gemma3", NAME)
    set_context_parallel(model, mesh)
    own = shard_batch(batch_of("plain"), mesh)
    tokens = 9 + 2 * dist.get_rank()
    uneven = {"input_ids": torch.ones(1, tokens, dtype=torch.long), "position_ids": torch.arange(tokens)[None]}
    calls = {
        "labels without shift_labels": {**own, "shift_labels": None},
        "use_cache=True over a mesh": {**own, "use_cache": True},
        "attention_mask must be this rank's": {**own, "attention_mask": torch.ones(2, TOKENS)},
        "position_ids must be those of this rank's": {**own, "position_ids": torch.arange(TOKENS)[None]},
        "output_router_logits over a mesh": {**own, "output_router_logits": True},
        "pixel_values over a mesh": {**own, "pixel_values": torch.ones(1, 3, 8, 8)},
        "position_ids are missing, which tell a shard from a whole text": batch_of("plain"),
        "which are not the shards of": uneven,
        "give input_ids or inputs_embeds": {},
    }
    for words, given in calls.items():
        with pytest.raises(ValueError, match=words):
            model(**given)
    if dist.get_rank():
        own.pop("labels"), own.pop("shift_labels")
    with pytest.raises(ValueError, match=r"the ranks .* call with different arguments: .*labels"):
        model(**own)
    mask = model.model.layers[0].self_attn
    with pytest.raises(UnsupportedError, match="its mask was not made in the model's forward"):
        mask(torch.randn(1, 5, 32), (torch.ones(1, 5, 8), torch.zeros(1, 5, 8)), None)

    short = GPT2LMHeadModel._from_config(
        GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=97, n_positions=32), **options
    )
    set_context_parallel(short, mesh)
    with pytest.raises(ValueError, match="position 42, but GPT2Model has 32 learned positions"):
        short(**shard_batch(batch_of("plain"), mesh))
    llama = dilate(LlamaForCausalLM(LlamaConfig(**SMALL)), [8, 32], [1, 2])
    set_context_parallel(llama, mesh)
    for kind, words in {"left": "pad on the right", "packed": "packed samples in a dilated model"}.items():
        with pytest.raises(ValueError, match=words):
            llama(**shard_batch(batch_of(kind), mesh))


def test_refusals():
    processes.run(2, refusals)


def batches():
    mesh = mesh_of_all()
    rank = dist.get_rank()
    start, stop = ((0, 21), (21, 43))[rank]
    batch = batch_of("packed")
    batch["token_type_ids"] = torch.zeros(2, TOKENS, dtype=torch.long)
    batch["images"] = torch.zeros(3, 5)
    batch["name"] = "text"
    with pytest.warns(UserWarning, match=r"did not cut images \(3, 5\)"):
        own = shard_batch(batch, mesh)
    labels = torch.cat([batch["labels"][:, 1:], torch.full((2, 1), -100)], 1)
    assert own["shift_labels"].equal(labels[:, start:stop])
    for name in ("input_ids", "labels", "position_ids", "token_type_ids"):
        assert own[name].equal(batch[name][:, start:stop])
    assert own["num_items_in_batch"] == 2 * (TOKENS - 1)
    assert own["name"] == "text"
    assert batch_of("packed").keys() <= batch.keys()  # the caller's batch is as it was

    bounds = torch.tensor([0, 7, 30, 43], dtype=torch.int32)
    flat = {"input_ids": batch["input_ids"][:1], "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 23}
    own = shard_batch(flat, mesh)
    assert own.keys() == {"input_ids", "position_ids"}
    assert own["position_ids"].equal(torch.cat([torch.arange(n) for n in (7, 23, 13)])[None, start:stop])
    with pytest.raises(ValueError, match="position_ids do not restart where cu_seq_lens_q begins"):
        shard_batch({**flat, "position_ids": torch.arange(43)[None]}, mesh)
    with pytest.raises(ValueError, match=r"attention_mask must be \(batch, seq\) = \(2, 43\); got \(2, 1, 43, 43\)"):
        shard_batch({**batch, "attention_mask": torch.ones(2, 1, 43, 43)}, mesh)
    with pytest.raises(ValueError, match="a sequence of 1 tokens is shorter than the 2 ranks"):
        shard_batch({"input_ids": torch.ones(1, 1)}, mesh)
    with pytest.raises(ValueError, match="batch must hold input_ids or inputs_embeds"):
        shard_batch({"tokens": torch.ones(1, 4)}, mesh)


def test_batches():
    processes.run(2, batches)


def without_edges() -> float:
    """Return the error of ranks that each take their shard for a whole text."""
    mesh = mesh_of_all()
    model = build("gemma3", NAME)
    batch = batch_of("plain")
    kept, weights = torch.ones(2, TOKENS, dtype=torch.bool), torch.zeros(2, TOKENS, 1)
    right = results_of(model, batch, kept, weights)
    own = {name: x for name, x in shard_batch(batch, mesh).items() if name in ("input_ids", "labels")}
    return error(results_of(model, {**own, "use_cache": False}, kept, weights, mesh), right)


def test_shards_alone_differ():
    """The tests above would see it if the ranks exchanged nothing."""
    for answer in processes.run(2, without_edges):
        assert answer > 100 * EXACT


def bytes_moved() -> list[tuple[int, int, int]]:
    """Return (bytes received, those of the plan, rows of the plan) for each layer with a window of 8."""
    mesh = mesh_of_all()
    traffic = link_of(mesh.get_group()).traffic
    rank, size = dist.get_rank(), dist.get_world_size()
    model = build("mistral", NAME)
    set_context_parallel(model, mesh)
    shape = {"num_kv_heads": 2, "head_dim": 8, "batch": 2, "dtype": torch.float32, "is_causal": True}
    plan = plan_of_call(Window(7), TOKENS, 4, size, rank, **shape)
    found = []

    def counted(*arguments: Any, **options: Any) -> Any:
        before = traffic.bytes_received
        out = attention(*arguments, **options)
        found.append((traffic.bytes_received - before, plan.bytes_received, plan.rows_received))
        return out

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(forward_over_ranks, "attended", counted)
        model(**shard_batch(batch_of("right"), mesh))
    return found


def test_a_window_moves_its_rows_once():
    """A rank receives 7 rows of each of 2 KV heads for a window of 8, and the first rank nothing."""
    for rank, layers in enumerate(processes.run(4, bytes_moved)):
        assert len(layers) == 4
        for moved, planned, rows in layers:
            assert moved == planned
            assert rows == (2 * 7 if rank else 0)


@pytest.mark.parametrize(
    ("family", "seen"),
    [
        ("gemma3", {Window(7): 2, Dilated((4096,), (1,)): 2}),
        ("llama4", {Dilated((8,), (1,)): 3, Dilated((4096,), (1,)): 1}),
        ("mistral", {Window(7): 4}),
        ("dilated", {Dilated((8,), (2,)): 2}),
    ],
)
def test_a_plan_of_a_model(family, seen):
    if family == "dilated":
        pattern = {"segment_lengths": [8], "dilation_rates": [2]}
        model = LlamaForCausalLM(LlamaConfig(**SMALL, dilated_attention=pattern))
    else:
        model = build(family, NAME)
    plan = exchange_plan(model, 4096, 8)
    assert {kind.pattern: kind.count for kind in plan.layers} == seen
    for kind in plan.layers:
        if kind.pattern == Window(7):
            assert kind.plan.rows_received == 2 * 7
    assert plan.bytes_received <= plan.ring_bytes + 10_000  # seals
    assert f"ring attention {plan.ring_bytes:,}" in str(plan)
    assert str(exchange_plan(model.config, 4096, 8)) == str(plan)


def test_a_plan_of_other_layers():
    with pytest.raises(UnsupportedError, match="MiniMaxConfig has layers of kind linear_attention, whose traffic"):
        exchange_plan(build("minimax", NAME).config, 4096, 8)


def random_configurations(count: int) -> dict[str, float]:
    """Return the errors of random windows, chunks, lengths, batches and transports."""
    mesh = mesh_of_all()
    size = mesh.size()
    draw = random.Random(size)
    answers = {}
    for i in range(count):
        family = draw.choice(["mistral", "gpt_oss", "gemma2", "llama4"])
        tokens = draw.randint(2 * size, 70)
        reach = draw.choice([1, 2, tokens // size, tokens // size + 1, draw.randint(1, tokens + 5)])
        kind = draw.choice(["plain", "right", "left", "packed"])
        transports = ["auto", "exchange", "ring", "all_gather"]
        if size == 2:
            transports.append("ulysses")
        transport = draw.choice(transports)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(SMALL_OF_FAMILIES, "sliding_window", max(1, reach))
            patch.setitem(SMALL_OF_FAMILIES, "attention_chunk_size", max(1, reach))
            model = build(family, NAME)
        words = f"{i}: {family}, {tokens} tokens, reach {reach}, {kind}, {transport}"
        answers[words] = _random_error(model, draw, tokens, kind, transport, mesh)
    return answers


def _random_error(model: nn.Module, draw: random.Random, tokens: int, kind: str, transport: str, mesh: Any) -> float:
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    ids = torch.randint(3, 97, (2, tokens), generator=generator)
    batch: dict[str, Any] = {"input_ids": ids}
    kept = torch.ones(2, tokens, dtype=torch.bool)
    if kind in ("right", "left"):
        hidden = draw.randint(1, tokens - 1)
        kept[0, -hidden:] = False
        if kind == "left":
            kept = kept.flip(1)
        batch["attention_mask"] = kept.long()
    if kind == "packed":
        edges = sorted({0, tokens, *(draw.randint(0, tokens) for _ in range(3))})
        lengths = [stop - start for start, stop in itertools.pairwise(edges)]
        batch["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None].expand(2, -1)
    with torch.no_grad():
        right = model(**batch, use_cache=False).logits
        set_context_parallel(model, mesh, transport)
        found = unshard_sequence(model(**shard_batch(batch, mesh)).logits, mesh, seq_len=tokens)
    return relative_error(found[kept], right[kept])


@pytest.mark.parametrize(
    ("size", "count"),
    [(2, 10), *(pytest.param(size, 40, marks=pytest.mark.thorough) for size in (2, 3, 4, 5, 8))],
)
def test_random_configurations(size, count):
    for answers in processes.run(size, random_configurations, count, within=600.0):
        assert not {name: x for name, x in answers.items() if x > EXACT}


def fully_sharded() -> float:
    """Return the error under FSDP2 over data and context ranks together, 2 x 2."""
    meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    model = build("gemma3", NAME)
    batch = batch_of("packed")
    kept, weights = torch.ones(2, TOKENS, dtype=torch.bool), torch.zeros(2, TOKENS, 1)
    right = results_of(model, batch, kept, weights)
    for layer in model.model.layers:
        fully_shard(layer, mesh=meshes["data", "context"]._flatten("all"))
    fully_shard(model, mesh=meshes["all"])
    set_context_parallel(model, meshes["context"])
    model.zero_grad()
    row = dist.get_rank() // 2  # of this group of context ranks
    own = shard_batch({name: x[row : row + 1] for name, x in batch.items()}, meshes["context"])
    loss = model(**own).loss
    loss.backward()
    errors = []
    for name, p in model.named_parameters():
        if name in right["gradients"]:
            errors.append(relative_error(p.grad.full_tensor(), right["gradients"][name]))
    total = loss.detach().clone()
    dist.all_reduce(total)
    return max(*errors, relative_error(total / 4, right["loss"]))


def test_fully_sharded_parameters():
    for answer in processes.run(4, fully_sharded):
        assert answer <= EXACT


def lost(fault: str) -> str:
    """Run a rank that leaves, stops or uses another window after a forward, and return what the others raise."""
    mesh = mesh_of_all()
    model = build("mistral", NAME)
    set_context_parallel(model, mesh)
    batch = shard_batch(batch_of("plain"), mesh)
    loss = model(**batch).loss
    if dist.get_rank() == 1 and fault == "differing":
        model.config.sliding_window = 9
    elif dist.get_rank() == 1:
        os.kill(os.getpid(), {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}[fault])
    try:
        model(**batch).loss.backward() if fault == "differing" else loss.backward()
    except ContextParallelError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("killed", "no word within 1 s from rank 1"),
        ("differing", r"rank 1 has windows=\(\(-8, 8\),\), elsewhere windows=\(\(-7, 7\),\)"),
        pytest.param("frozen", "no word within 1 s from rank 1", marks=pytest.mark.thorough),
    ],
)
def test_a_lost_rank_is_named(fault, words):
    """Rank 0 keeps the store, which rank 2 may no longer reach when it asks who is lost."""
    answers = processes.World(3, lost, fault, timeout=5.0).outcomes(40.0, ranks=[0, 2])
    for rank, missing in ((0, words), (2, "")):
        kind, said = answers[rank]
        assert kind == "result"
        assert re.search(rf"model\.layers\.\d\.self_attn, .*{missing}", said, re.DOTALL), said


def generation() -> dict[str, Any]:
    """Return for each family whether its new tokens are those of one process, and how many rows each layer keeps."""
    mesh = mesh_of_all()
    answers = {}
    for family in ("mistral", "gemma3", "llama4", "gpt_oss", "gemma2", "gemma3n"):
        model = build(family, NAME)
        prompt = torch.randint(3, 97, (2, TOKENS), generator=torch.Generator().manual_seed(4))
        greedy = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
        right = model.generate(prompt, attention_mask=torch.ones_like(prompt), **greedy)
        with torch.no_grad():
            expected = model(right[:, :-1], use_cache=False).logits[:, TOKENS:]
        set_context_parallel(model, mesh)
        logits: list[Tensor] = []
        handle = model.register_forward_hook(lambda _, __, output, logits=logits: logits.append(output.logits))
        assert generate_over_ranks(model, prompt, 12).equal(right), family
        handle.remove()
        assert relative_error(torch.cat(logits[1:], 1), expected) <= EXACT  # the first are of the prompt
        drawn = generate_over_ranks(model, prompt, 5, do_sample=True, temperature=2.0, top_k=20, top_p=0.9)
        answers[family] = drawn[:, TOKENS:].tolist()
        end = int(right[0, TOKENS + 2])
        ended = generate_over_ranks(model, prompt[:1], 12, eos_token_id=end)
        assert ended.tolist()[0] == right[0, : TOKENS + 1 + right[0, TOKENS:].tolist().index(end)].tolist()
    _, kept = _read(model, ranks_of(model), prompt)
    answers["rows"] = sorted({x.k.shape[1] for x in kept.values()})
    with pytest.raises(ValueError, match="call with different arguments"):
        generate_over_ranks(model, prompt + dist.get_rank(), 2)
    with pytest.raises(ValueError, match="the model is in training mode"):
        generate_over_ranks(model.train(), prompt, 2)
    set_context_parallel(model.eval(), None)
    with pytest.raises(ValueError, match="the model has no mesh"):
        generate_over_ranks(model, prompt, 2)
    return answers


def test_generation():
    """The last of 3 ranks keeps what a window of 8 shows later; every rank keeps its shard in full layers."""
    first, second, third = processes.run(3, generation)
    for family in first.keys() - {"rows"}:
        assert first[family] == second[family] == third[family]
    assert (first["rows"], second["rows"], third["rows"]) == ([0, 14], [0, 14], [7, 15])


def refused_by_one(what: str, forwards: int) -> tuple[str, str]:
    """Return the error of a forward that fails on rank 1 alone, after good ones."""
    mesh = mesh_of_all()
    model = build("gemma3", NAME)
    set_context_parallel(model, mesh)
    batch = shard_batch(batch_of("plain"), mesh)
    for _ in range(forwards):
        try:
            raise ValueError("an error that is handled")
        except ValueError:
            model(**batch)  # no failure
    assert not link_of(mesh.get_group())._refused
    layer = model.model.layers[1]  # the first full one, whose call the ranks may have yet to compare
    if what == "layer":  # first on all ranks, which then wait for one that is late
        handle = layer.mlp.register_forward_pre_hook(_fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            model(**batch)
        handle.remove()
        if dist.get_rank() == 1:
            time.sleep(2.2)
        model(**batch)
    if dist.get_rank() == 1:
        if what == "mask":
            layer.self_attn.register_forward_pre_hook(_without_mask, with_kwargs=True)
        else:
            layer.mlp.register_forward_pre_hook(_fails)
    with pytest.raises((RuntimeError, ValueError)) as found:
        model(**batch)
    _wait_for_all("failed")  # or the end of one would tell the others
    _wait_for_all("known")  # by ranks 1 and 2; rank 0 keeps the store
    return found.typename, str(found.value)


def _wait_for_all(what: str) -> None:
    store, rank = rendezvous_store(), dist.get_rank()
    store.set(f"{what} {rank}", "")
    if rank == 0 or what == "failed":
        store.wait([f"{what} {j}" for j in range(3)])


def _fails(*_: Any) -> None:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize(("what", "forwards"), [("mask", 0), ("mask", 1), ("layer", 1)])
def test_what_one_rank_refuses_reaches_the_others(what, forwards):
    """They do not wait for the timeout of 60 seconds."""
    answers = processes.World(3, refused_by_one, what, forwards).outcomes(30.0)
    assert [kind for kind, _ in answers] == ["result"] * 3
    (first, (_, own), third) = [answer for _, answer in answers]
    assert own == "out of memory" if what == "layer" else "its mask was not made" in own
    for name, words in (first, third):
        assert name == "ContextParallelError"
        assert f"rank 1 refused the call: {own}" in words


class OwnLoss(LlamaForCausalLM):
    """A model that computes its loss in its forward."""

    def forward(self, *arguments: Any, labels: Tensor | None = None, shift_labels: Tensor | None = None, **given: Any):
        out = super().forward(*arguments, **given)
        if labels is not None:
            out.loss = nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
        return out


def images_in_places(model: nn.Module, types: Tensor, weights: Tensor, mesh: Any) -> float:
    """Compare a model that is given the pixels of three images, whose tokens shard edges cut, in training."""
    places = torch.zeros(2, TOKENS, dtype=torch.bool)
    for row, first in ((0, 12), (0, 30), (1, 25)):
        places[row, first : first + 4] = True
    tokens = torch.randint(1, 90, places.shape, generator=torch.Generator().manual_seed(1)).masked_fill(places, 96)
    pixels = torch.randn(3, 3, 28, 28, generator=torch.Generator().manual_seed(3))
    batch = {"input_ids": tokens, "labels": tokens, "token_type_ids": places.long(), "pixel_values": pixels}
    if model.config.model_type == "paligemma":
        batch["token_type_ids"] = types
    if model.config.model_type == "mistral3":
        batch["image_sizes"] = torch.tensor([[28, 28]] * 3)
    kept = torch.ones(2, TOKENS, dtype=torch.bool)
    model.train()
    right = results_of(model, batch, kept, weights)
    assert any("vision_tower" in name for name in right["gradients"])
    set_context_parallel(model, mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own = shard_batch(batch, mesh)
    found = error(results_of(model, own, kept, weights, mesh), right)
    with pytest.raises(ValueError, match="the ranks hold 12 image tokens, and pixel_values give 8: pass the images of"):
        model(**own | {name: own[name][:2] for name in ("pixel_values", "image_sizes") if name in own})
    set_context_parallel(model, None)
    model.eval()
    return found


def blocks_of_tokens() -> dict[str, float]:
    """Compare a prefix and images that shard edges cut, beside padding. One rank may hold no image."""
    mesh = mesh_of_all()
    answers = {}
    for name, make in {"prefix": _prefix, "images": _images}.items():
        model, types = make(NAME)
        tokens = torch.randint(1, 90, types.shape, generator=torch.Generator().manual_seed(1))
        weights = torch.randn(*types.shape, 1024, generator=torch.Generator().manual_seed(2))
        few = torch.zeros_like(types)
        few[:, 1:5] = 1
        for words, marks in {"cut": types, "on one rank": few, "none": torch.zeros_like(types)}.items():
            batch = {"input_ids": tokens, "token_type_ids": marks, "attention_mask": torch.ones_like(tokens)}
            batch["attention_mask"][1, -5:] = 0
            if words == "cut":  # as a model of images computes it before
                batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids")).detach()
            kept = batch["attention_mask"].bool()
            own = weights * kept[..., None]
            right = results_of(model, batch, kept, own)
            set_context_parallel(model, mesh)
            answers[f"{name}, {words}"] = error(results_of(model, shard_batch(batch, mesh), kept, own, mesh), right)
            set_context_parallel(model, None)
        answers[f"{name}, pixels"] = images_in_places(model, types, weights, mesh)
    set_context_parallel(model, mesh)
    batch = {"input_ids": tokens, "token_type_ids": types, "position_ids": torch.arange(tokens.shape[1])[None] % 20}
    with pytest.raises(UnsupportedError, match=r"a prefix or images over a mesh, .* leave the mesh out"):
        model(**shard_batch(batch, mesh))
    return answers


def test_blocks_of_tokens():
    for answers in processes.run(3, blocks_of_tokens):
        assert len(answers) == 8
        assert max(answers.values()) <= EXACT, answers


def other_models_of_images() -> dict[str, float]:
    """Compare models of images whose image tokens see what other tokens see."""
    text = {**SMALL, "head_dim": 8, "num_key_value_heads": 2}
    clip = {"model_type": "clip_vision_model", "projection_dim": 32, **SMALL_VISION}
    siglip = {"model_type": "siglip_vision_model", **SMALL_VISION}
    pixtral = {"model_type": "pixtral", "head_dim": 8, **SMALL_VISION}
    internvl = {**SMALL_VISION, "model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [14, 14]}
    last = {"vision_feature_layer": -1}
    configurations = {
        "llava": ("llama", clip, last),
        "internvl": ("qwen2", internvl, {"downsample_ratio": 1.0, "image_seq_length": 4}),
        "aya_vision": ("cohere2", siglip, {"downsample_factor": 1, **last}),
        "mistral3": ("mistral", pixtral, {"spatial_merge_size": 1, **last}),
    }
    answers = {}
    weights = torch.randn(2, TOKENS, 1024, generator=torch.Generator().manual_seed(2))
    for kind, (language, vision, more) in configurations.items():
        config = CONFIG_MAPPING[kind](
            text_config={"model_type": language, **text}, vision_config=vision, image_token_id=96, **more
        )
        config._attn_implementation = NAME
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config).eval()
        answers[kind] = images_in_places(model, torch.zeros(2, TOKENS), weights, mesh_of_all())
    return answers


@pytest.mark.thorough
def test_other_models_of_images():
    for answers in processes.run(3, other_models_of_images):
        assert len(answers) == 4
        assert max(answers.values()) <= EXACT, answers


def advice() -> None:
    """Do what the errors tell, each after the call that they refuse."""
    mesh = mesh_of_all()
    options = {"attn_implementation": NAME}
    tokens = batch_of("plain")["input_ids"]

    model = OwnLoss._from_config(LlamaConfig(**SMALL), **options)
    set_context_parallel(model, mesh)
    own = shard_batch(batch_of("plain"), mesh)
    with pytest.raises(UnsupportedError, match="leave labels out, and give cp_mean the sum of the losses"):
        model(**own)
    targets = own["shift_labels"].flatten()
    logits = model(input_ids=own["input_ids"], position_ids=own["position_ids"]).logits.flatten(0, 1)
    total = nn.functional.cross_entropy(logits, targets, reduction="sum")
    mean = cp_mean(total, (targets != -100).sum(), mesh)
    set_context_parallel(model, None)
    whole = model(input_ids=tokens).logits[:, :-1].flatten(0, 1)
    assert relative_error(mean, nn.functional.cross_entropy(whole, tokens[:, 1:].flatten())) <= EXACT

    model = LlamaForCausalLM._from_config(LlamaConfig(**SMALL), **options).eval()
    expected = model(input_ids=tokens).logits
    with pytest.raises(UnsupportedError, match=r"shift_labels: .*call set_context_parallel"):
        model(**shard_batch(batch_of("plain"), mesh))
    sparsify(model, BlockLayout.local)
    with pytest.raises(UnsupportedError, match=r"call sparsify\(model, None\)"):
        set_context_parallel(model, mesh)
    sparsify(model, None)
    set_context_parallel(model, mesh)
    own = shard_batch({"input_ids": tokens}, mesh)
    for given, words in {
        "use_cache": "call the model on whole sequences with use_cache=False",
        "input_features": "sound is not sharded; embed it before, and give inputs_embeds",
        "output_router_logits": "leave it out",
    }.items():
        with pytest.raises(ValueError, match=words):
            model(**own, **{given: True})
    own["inputs_embeds"] = model.get_input_embeddings()(own.pop("input_ids"))
    found = unshard_sequence(model(**own, use_cache=False).logits, mesh, seq_len=TOKENS)
    assert relative_error(found, expected) <= EXACT
    for layer in model.model.layers:  # as Accelerate's hooks do
        layer.self_attn.register_forward_pre_hook(_without_mask, with_kwargs=True)
    with pytest.raises(UnsupportedError, match="its mask was not made in the model's forward"):
        model(**own)
    short = GPT2LMHeadModel._from_config(
        GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=97, n_positions=32), **options
    )
    set_context_parallel(short, mesh)
    with pytest.raises(ValueError, match="lengthen the table with extend_positions"):
        short(**shard_batch(batch_of("plain"), mesh))
    set_context_parallel(short, None)
    assert compared(extend_positions(short.eval(), 64), "plain", mesh) <= EXACT

    model = dilate(LlamaForCausalLM(LlamaConfig(**SMALL)).eval(), [8, 32], [1, 2])
    set_context_parallel(model, mesh)
    with pytest.raises(UnsupportedError, match="generation of a dilated model over a mesh is not supported"):
        generate_over_ranks(model, tokens, 2)


def _without_mask(layer: nn.Module, args: Any, given: dict[str, Any]) -> Any:
    return args, {**given, "attention_mask": None, "is_causal": True}


def test_advice():
    processes.run(2, advice)
