"""`bench selected`: the time of modules that select their keys, over dense attention; lists of single tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dilated_attention import BlockLayout, block_sparse_attention
from dilated_attention.nn import BlockAttentionMixture, NativeSparseAttention, SelfAttention
from dilated_attention_lab.bench import measure
from dilated_attention_lab.bench.cases import trained
from dilated_attention_lab.bench.results import Row
from dilated_attention_lab.bench.rivals import sdpa
from dilated_attention_lab.bench.suites import Step, over

WIDTH, HEADS, KV_HEADS = 512, 8, 2
HEAD_DIM = WIDTH // HEADS
PHASES = ("forward", "forward+backward")
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "native sparse attention": {
        "compress_block": 32, "compress_stride": 16, "block_size": 64, "num_selected": 16, "local_blocks": 2,
        "window": 512, "query_block": 16,
    },
    "mixture of blocks": {"block_size": 256, "top_k": 4, "query_block": 16},
}  # fmt: skip
"""The modules' own defaults, written out so that a row says what it measured."""
MODULES: Mapping[str, Any] = dict(zip(SETTINGS, (NativeSparseAttention, BlockAttentionMixture), strict=True))
BARS = {8192: 1.0, 32768: 0.25}
"""The largest ratio of native sparse attention's time, forward and backward, to dense attention of the same width."""
TOKEN_BARS = {"gather": 0.8, "dense": 0.35}
"""The largest ratio of the time of lists of 2,048 of 32,768 tokens to the time of `gather` and of dense attention."""
GATHERED = 128
"""The queries whose keys `gather` holds at a time; in its backward each piece fills a gradient of all keys."""


def steps(device: torch.device, quick: bool) -> list[Step]:
    sizes = [(1024, 2.0)] if quick else [(8192, 10.0), (32768, 40.0)]
    seq_len, number, budget = (512, 64, 2.0) if quick else (32768, 2048, 40.0)
    lists = Step(f"lists of {number:,} of {seq_len:,} tokens", partial(_tokens, seq_len, number, device, budget))
    modules = [Step(f"modules that select, {n:,} tokens", partial(_modules, n, device, x)) for n, x in sizes]
    return [*modules, lists]


def _modules(seq_len: int, device: torch.device, budget: float) -> Iterator[Row]:
    torch.manual_seed(0)
    x = torch.randn(1, seq_len, WIDTH, device=device, requires_grad=True)
    dense = SelfAttention(WIDTH, HEADS, KV_HEADS, None).to(device)
    modules: dict[str, nn.Module] = {
        name: MODULES[name](WIDTH, HEADS, KV_HEADS, device=device, **settings) for name, settings in SETTINGS.items()
    }
    work = {name: trained(module, [x], parameters=module.parameters()) for name, module in modules.items()}
    work["dense"] = trained(partial(dense, is_causal=True), [x], parameters=dense.parameters())
    rounds = measure.interleave(work, seconds=budget, device=device, least=2)
    for name, settings in SETTINGS.items():
        parameters = {"seq_len": seq_len, "width": WIDTH, "heads": HEADS, "kv_heads": KV_HEADS, **settings}
        for phase in PHASES:
            judged = name == "native sparse attention" and phase == "forward+backward"
            bar, title = BARS.get(seq_len) if judged else None, f"{name}, {phase}: time over dense"
            yield over(rounds, name, "dense", phase, parameters, title, bar=bar)


def _tokens(seq_len: int, number: int, device: torch.device, budget: float) -> Iterator[Row]:
    """Compare lists of `number` single tokens, one list per query for all heads, with `gather` and dense attention.

    The lists are one random set of tokens, shifted by a random distance for each query; no indexer chooses them.
    """
    torch.manual_seed(0)
    kept = torch.randperm(seq_len, device=device)[:number]
    chosen = (kept + torch.randint(seq_len, (seq_len, 1), device=device)) % seq_len
    layout = BlockLayout.from_topk(chosen)
    q, k, v = (
        torch.randn(1, seq_len, heads, HEAD_DIM, device=device, requires_grad=True) for heads in (HEADS // 2, 1, 1)
    )
    calls: dict[str, Callable[..., Tensor]] = {
        "lists": partial(block_sparse_attention, layout=layout),  # type: ignore[dict-item]
        "gather": partial(gather, chosen=chosen),
        "dense": _dense,
    }
    parameters = {
        "seq_len": seq_len, "keys": number, "heads": HEADS // 2, "kv_heads": 1, "head_dim": HEAD_DIM,
        "block_size": 1, "lists": "drawn uniformly",
    }  # fmt: skip
    with torch.no_grad():
        found, expected = (calls[name](q, k, v).double() for name in ("lists", "gather"))
    difference = float((found - expected).norm() / expected.norm())
    yield Row("lists of tokens: relative difference from a gather", parameters, difference, "", bar=3e-6)
    work = {name: trained(call, (q, k, v)) for name, call in calls.items()}
    rounds = measure.interleave(work, seconds=budget, device=device, least=1)
    for rival, bar in TOKEN_BARS.items():
        for phase in PHASES:
            most, title = bar if number == 2048 else None, f"lists of tokens, {phase}: time over {rival}"
            yield over(rounds, "lists", rival, phase, parameters, title, bar=most)


def _dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, *(x.expand(-1, -1, q.shape[2], -1) for x in (k, v)))


def gather(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor) -> Tensor:
    """Attend by copying each query's keys and values, GATHERED queries at a time; the backward copies them again.

    q: `(1, seq, heads, head_dim)`; k, v: `(1, seq, 1, head_dim)`; chosen: `(seq, keys)`.
    """

    def part(query: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
        key, value = (x[0, :, 0].index_select(0, rows.flatten()).unflatten(0, rows.shape) for x in (k, v))
        return (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1) @ value

    pieces = zip(q[0].split(GATHERED), chosen.split(GATHERED), strict=True)
    parts = [checkpoint(part, query, k, v, rows, use_reentrant=False) for query, rows in pieces]
    return torch.cat(parts)[None]
