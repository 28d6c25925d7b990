"""`bench chosen`: lists of keys in the forms of models that choose them, over what a user would call instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention import BlockLayout, attention
from dilated_attention.decoding import listed_attention
from dilated_attention_lab.bench import measure
from dilated_attention_lab.bench.cases import contender, trained
from dilated_attention_lab.bench.results import Row
from dilated_attention_lab.bench.rivals import sdpa
from dilated_attention_lab.bench.suites import Step, over

PHASES = ("forward", "forward+backward")
LENGTH = 8192
"""The tokens for which the bars are set."""
DEEPSEEK_BARS = {512: (0.15, 0.2), 2048: (0.5, 0.6)}
"""For each number of keys, of 8,192: the largest ratio of the time of lists to `sdpa` with a mask of them, by phase."""
MAKING_BAR = 0.1
"""The largest ratio of the time to make a layout of lists to the forward over it."""
KV_HEADS_BAR = 1.1
"""The largest ratio of the time of a list per KV head to one list for all heads."""
MINIMAX_BAR = 0.35
"""The largest ratio of the time of 16 blocks of 128 of 8,192 keys per query and KV head to dense causal attention."""
ABSORBED_BAR = 1.5
"""The largest ratio of the time of latent attention over one KV head of 576 numbers to its form with a KV head each."""
NEW_TOKEN_BAR = 0.5
"""The largest ratio of one new token's time over 2,048 listed keys of 32,768 to `sdpa` with a mask of them."""


def steps(device: torch.device, quick: bool) -> list[Step]:
    length = 512 if quick else LENGTH
    budget = 2.0 if quick else 25.0
    found: list[Step] = []
    for keys in (length // 16, length // 4):
        label = f"DeepSeek's form, {keys:,} of {length:,} tokens"
        found.append(Step(label, partial(_deepseek, length, keys, device, budget)))
    absorbed = partial(_absorbed, length // 4, length // 32, device, budget)
    new_token = partial(_new_token, 4 * length, length // 4, device, min(budget, 10.0))
    return [
        *found,
        Step("lists per KV head", partial(_per_kv_head, length, length // 16, device, budget)),
        Step("MiniMax-M3's form", partial(_minimax, length, device, budget)),
        Step("absorbed latent attention", absorbed),
        Step("a new token", new_token),
    ]


def choice(seq_len: int, keys: int, device: torch.device, block: int = 1, lists: int = 1) -> Tensor:
    """Draw `keys` key blocks for each query from those that do not lie after it, int64 `(1, lists, seq_len, keys)`.
    Queries that have fewer end with -1."""
    scores = torch.rand(1, lists, seq_len, -(-seq_len // block), device=device)
    first = torch.arange(scores.shape[-1], device=device) * block
    later = first > torch.arange(seq_len, device=device)[:, None]
    found = scores.masked_fill(later, -1).topk(keys)
    return found.indices.masked_fill(found.values < 0, -1)


def _bar(bar: float, length: int) -> float | None:
    return bar if length == LENGTH else None


def _inputs(device: torch.device, seq_len: int, *shapes: tuple[int, int]) -> list[Tensor]:
    return [torch.randn(1, seq_len, *shape, device=device) for shape in shapes]


def _listed(layout: BlockLayout, **options: Any) -> Callable[..., Tensor]:
    return partial(attention, pattern=layout, is_causal=True, **options)  # type: ignore[return-value]


def _dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, is_causal=True, enable_gqa=True)


def _deepseek(seq_len: int, keys: int, device: torch.device, budget: float) -> Iterator[Row]:
    """Compare one list per query for all heads with `sdpa` and a mask of the same keys."""
    torch.manual_seed(0)
    chosen = choice(seq_len, keys, device)[0]
    layout = BlockLayout.from_topk(chosen, is_causal=True)
    mask = layout.dense_mask()
    q, k, v = _inputs(device, seq_len, (8, 192), (8, 192), (8, 128))
    work = {
        "lists": trained(_listed(layout), (q, k, v)),
        "sdpa": trained(partial(sdpa, attn_mask=mask), (q, k, v)),
        "from_topk": contender(partial(BlockLayout.from_topk, chosen, is_causal=True)),
    }
    rounds = measure.interleave(work, seconds=budget, device=device, least=2)
    parameters = {"seq_len": seq_len, "keys": keys, "heads": 8, "head_dim": 192, "value_dim": 128}
    for phase, bar in zip(PHASES, DEEPSEEK_BARS.get(keys, (None, None)), strict=True):
        yield over(rounds, "lists", "sdpa", phase, parameters, f"one list per query, {phase}: time over sdpa", bar=bar)
    title = "making the lists: time over the forward over them"
    yield over(rounds, "from_topk", "lists", "forward", parameters, title, bar=_bar(MAKING_BAR, seq_len))


def _per_kv_head(seq_len: int, keys: int, device: torch.device, budget: float) -> Iterator[Row]:
    """Compare equal lists, one per KV head, with one list for all heads."""
    torch.manual_seed(0)
    chosen = choice(seq_len, keys, device)
    for kv_heads in (4, 8):
        layouts = {
            "lists per KV head": BlockLayout.from_topk(chosen.expand(1, kv_heads, -1, -1), is_causal=True),
            "one list": BlockLayout.from_topk(chosen[0], is_causal=True),
        }
        tensors = _inputs(device, seq_len, (16, 64), (kv_heads, 64), (kv_heads, 64))
        work = {name: trained(_listed(layout), tensors) for name, layout in layouts.items()}
        rounds = measure.interleave(work, seconds=budget / 2, device=device, least=2)
        parameters = {"seq_len": seq_len, "keys": keys, "heads": 16, "kv_heads": kv_heads, "head_dim": 64}
        for phase in PHASES:
            title = f"lists per KV head, {phase}: time over one list"
            yield over(
                rounds, "lists per KV head", "one list", phase, parameters, title, bar=_bar(KV_HEADS_BAR, seq_len)
            )


def _minimax(seq_len: int, device: torch.device, budget: float) -> Iterator[Row]:
    """Compare 16 blocks of 128 keys for each query and KV head with dense causal attention."""
    torch.manual_seed(0)
    blocks = min(16, seq_len // 256)
    chosen = choice(seq_len, blocks, device, block=128, lists=4)
    layout = BlockLayout.from_topk(chosen, (1, 128), is_causal=True)
    tensors = _inputs(device, seq_len, (16, 128), (4, 128), (4, 128))
    work = {"blocks": trained(_listed(layout), tensors), "dense": trained(_dense, tensors)}
    rounds = measure.interleave(work, seconds=budget, device=device, least=2)
    parameters = {"seq_len": seq_len, "blocks": blocks, "block_size": 128, "heads": 16, "kv_heads": 4, "head_dim": 128}
    for phase in PHASES:
        title = f"blocks per query, {phase}: time over dense"
        bar = _bar(MINIMAX_BAR, seq_len) if phase == "forward" else None
        yield over(rounds, "blocks", "dense", phase, parameters, title, bar=bar)


def _absorbed(seq_len: int, keys: int, device: torch.device, budget: float) -> Iterator[Row]:
    """Compare latent attention over one KV head of 576 numbers, with values of 512, with its form of 192 and 128
    numbers and a KV head for each query head, over the same lists."""
    torch.manual_seed(0)
    layout = BlockLayout.from_topk(choice(seq_len, keys, device)[0], is_causal=True)
    absorbed = _inputs(device, seq_len, (16, 576), (1, 576), (1, 512))
    expanded = _inputs(device, seq_len, (16, 192), (16, 192), (16, 128))
    work = {
        "absorbed": trained(_listed(layout), absorbed, backward=False),
        "expanded": trained(_listed(layout), expanded, backward=False),
    }
    rounds = measure.interleave(work, seconds=budget, device=device, least=2)
    parameters = {"seq_len": seq_len, "keys": keys, "heads": 16}
    title = "absorbed latent attention, forward: time over its expanded form"
    yield over(rounds, "absorbed", "expanded", "forward", parameters, title, bar=_bar(ABSORBED_BAR, 4 * seq_len))


@torch.no_grad()
def _new_token(seq_len: int, number: int, device: torch.device, budget: float) -> Iterator[Row]:
    """Compare one new token over `number` listed keys of a cache with `sdpa` and a mask of the same keys."""
    torch.manual_seed(0)
    shape = {"heads": 8, "kv_heads": 8, "head_dim": 192, "value_dim": 128}
    q = torch.randn(1, 8, 1, 192, device=device)
    k, v = (torch.randn(1, 8, seq_len, dim, device=device) for dim in (192, 128))
    chosen = torch.randperm(seq_len, device=device)[:number].view(1, 1, 1, number)
    seen = torch.zeros(1, 1, 1, seq_len, dtype=torch.bool, device=device).scatter(-1, chosen, True)
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    work = {
        "lists": contender(partial(listed_attention, query, key, value, chosen)),
        "sdpa": contender(partial(F.scaled_dot_product_attention, q, k, v, seen)),
    }
    rounds = measure.interleave(work, seconds=budget, device=device)
    bar = _bar(NEW_TOKEN_BAR, seq_len // 4)
    parameters = {"seq_len": seq_len, "keys": number, **shape}
    yield over(rounds, "lists", "sdpa", "forward", parameters, "a new token over listed keys: time over sdpa", bar=bar)
