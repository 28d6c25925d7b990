"""Measure transformers models over ranks, for the suite `parallel`: modes of `rank_processes` that run a model."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from dilated_attention.integrations.huggingface import NAME, generate_over_ranks, shard_batch
from dilated_attention.parallel import cp_mean, set_context_parallel, unshard_sequence
from dilated_attention_lab.bench import activations, rank_processes
from dilated_attention_lab.bench.cases import Case
from dilated_attention_lab.bench.measure import peak_above_now

NEW_TOKENS = 32
EVERY = 64
"""The logits of every 64th token are compared: those of all tokens would not fit in memory, for 262,144 words."""
SLICE = 256
"""The tokens whose logits are held at a time."""


def _of_gemma_shape() -> Any:
    """Return a model with the widths, heads and windows of Gemma 3 270M, and random weights: 5 layers with windows, and
    one that sees all earlier tokens."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        num_hidden_layers=6, layer_types=["sliding_attention"] * 5 + ["full_attention"], sliding_window=512,
        hidden_size=640, intermediate_size=2048, num_attention_heads=4, num_key_value_heads=1, head_dim=256,
        vocab_size=512, max_position_embeddings=1 << 17,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(config)
    model.set_attn_implementation(NAME)
    return model


def training(case: Case, rounds: int, mesh: ProcessGroup) -> dict[str, Any]:
    """Time a training step on the same sequence on one rank, while the others wait, and shared by all.

    Return processor seconds as `rank_processes.MODES["selecting"]` does, and the relative `difference` of the losses.
    Activations are computed anew in the backward: one rank could not hold those of 65,536 tokens.
    """
    model = _of_gemma_shape().train()
    model.gradient_checkpointing_enable()
    rank = dist.get_rank()
    losses = {}

    def seconds(name: str, tokens: Tensor) -> float:
        batch = {"input_ids": tokens, "labels": tokens, "use_cache": False}
        if name == "shared":
            batch = shard_batch({"input_ids": tokens, "labels": tokens}, mesh)
        begin = time.thread_time()
        loss = model(**batch).loss
        loss.backward()
        model.zero_grad()
        losses[name] = loss.item()
        return time.thread_time() - begin

    samples: dict[str, list[float]] = {"alone": [], "mean": [], "most": []}
    for i in range(rounds + 1):  # the first is a short warm-up
        tokens = torch.randint(512, (case.batch, case.seq_len if i else case.seq_len // 16))
        times = torch.zeros(2, dist.get_world_size(), dtype=torch.float64)
        set_context_parallel(model, None)
        dist.barrier()
        if rank == 0:
            times[0, rank] = seconds("alone", tokens)
        dist.barrier()
        set_context_parallel(model, mesh)
        times[1, rank] = seconds("shared", tokens)
        dist.all_reduce(times)
        alone, shares = times
        if i:
            for name, found in (("alone", alone[0]), ("mean", shares.mean()), ("most", shares.max())):
                samples[name].append(float(found))
    return {**samples, "difference": abs(losses["shared"] - losses.get("alone", 0.0)) / abs(losses["shared"])}


def prompt(case: Case, rounds: int, mesh: ProcessGroup) -> dict[str, Any]:
    """Read a prompt and generate, on one rank by transformers, on several by `generate_over_ranks`. Return the new
    `tokens`, and the greatest number of bytes that this adds to a rank at its `peak`, weights not counted."""
    model = _of_gemma_shape().eval()
    is_alone = dist.get_world_size() == 1
    if not is_alone:
        set_context_parallel(model, mesh)
    found = torch.empty(0)

    def generate(tokens: Tensor) -> None:
        nonlocal found
        if is_alone:
            options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": NEW_TOKENS}
            found = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        else:
            found = generate_over_ranks(model, tokens, NEW_TOKENS)

    tokens = torch.randint(512, (case.batch, case.seq_len), generator=torch.Generator().manual_seed(1))
    generate(tokens[:, :256])
    peak = torch.tensor(peak_above_now(lambda: generate(tokens), tokens.device) or 0)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return {"tokens": found[0, case.seq_len :].tolist(), "peak": peak.item()}


@torch.no_grad()
def released(case: Case, rounds: int, mesh: ProcessGroup) -> dict[str, Any]:
    """Run Gemma 3 270M on a text, on one rank and on all. Return relative differences: of the `states` that the head
    reads, over all tokens; of the `logits` of one token in `EVERY`; and of the `loss` over all tokens."""
    if dist.get_rank():
        dist.barrier()
    model, text = activations.load_gemma()
    if not dist.get_rank():
        dist.barrier()  # the file lies there now; several processes that write it spoil it
    model.set_attn_implementation(NAME)
    tokens = text[:, : case.seq_len]

    def total(states: Tensor, labels: Tensor) -> Tensor:
        parts = []
        for rows, row_labels in zip(states[0].split(SLICE), labels[0].split(SLICE), strict=True):
            parts.append(F.cross_entropy(model.lm_head(rows), row_labels, reduction="sum").double())
        return torch.stack(parts).sum()

    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
    right = torch.zeros(1, case.seq_len, model.config.hidden_size)
    right_loss = torch.zeros(())
    if dist.get_rank() == 0:
        right = model.model(tokens, use_cache=False).last_hidden_state
        right_loss = total(right, labels) / (case.seq_len - 1)
    dist.barrier()

    set_context_parallel(model, mesh)
    shard = shard_batch({"input_ids": tokens, "labels": tokens}, mesh)
    own = model.model(input_ids=shard["input_ids"], position_ids=shard["position_ids"]).last_hidden_state
    count = (shard["shift_labels"] != -100).sum()
    loss = cp_mean(total(own, shard["shift_labels"]), count, mesh)
    states = unshard_sequence(own, mesh, seq_len=case.seq_len)
    answer = {"states": 0.0, "logits": 0.0, "loss": 0.0}
    if dist.get_rank() == 0:
        pairs = {
            "states": (states, right),
            "logits": (model.lm_head(states[:, ::EVERY]), model.lm_head(right[:, ::EVERY])),
            "loss": (loss, right_loss),
        }
        for name, (found, expected) in pairs.items():
            answer[name] = float((found - expected).norm() / expected.norm())
    dist.barrier()
    return answer


MODES = {"training": training, "prompt": prompt, "released": released}

if __name__ == "__main__":
    rank_processes.serve(MODES, json.loads(sys.argv[1]))
