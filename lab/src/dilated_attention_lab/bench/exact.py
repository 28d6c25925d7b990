"""Compute the correct result of a case, row by row in float64 from the definition, without our plans or backends."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from dilated_attention_lab.bench.cases import MULTIHEAD, SPARSE, Case


def keys_of(case: Case, row: int, head: int) -> Tensor:
    """Return the positions of the keys that token `row` sees in a head, one entry for each branch that shows it."""
    pattern, layout_of = case.pattern, _layouts(case)
    found = [torch.empty(0, dtype=torch.int64)]
    table = pattern.offset_table(case.heads)
    for segment, rate, offsets in zip(pattern.segment_lengths, pattern.dilation_rates, table, strict=True):
        start, offset = row // segment * segment, offsets[head]
        if offset < 0 or (row - start) % rate != offset:
            continue
        keys = torch.arange(start + offset, min(start + segment, case.seq_len), rate)
        if case.method in SPARSE:
            layout = layout_of(len(keys))
            block_row = (row - start) // rate // layout.q_block
            first, last = layout.indptr.flatten()[block_row : block_row + 2].tolist()
            blocks = keys.split(layout.k_block)
            keys = torch.cat([blocks[i] for i in layout.indices[first:last].tolist()])
        found.append(keys)
    keys = torch.cat(found)
    return keys[keys <= row] if case.is_causal else keys


@cache
def _layouts(case: Case):  # type: ignore[no-untyped-def]
    return cache(case.layout)


def rows_of(case: Case, count: int) -> list[int]:
    """Return at most `count` positions of tokens in order: the first, the last, and others drawn at random."""
    drawn = torch.randint(case.seq_len, (max(count - 2, 0),), generator=torch.Generator().manual_seed(0))
    return sorted({0, case.seq_len - 1, *drawn.tolist()})


def exact(case: Case, q: Tensor, k: Tensor, v: Tensor, rows: Sequence[int]) -> Tensor:
    """Return the output at positions `rows` in float64, (batch, rows, heads, head_dim); 0 where a token sees no key."""
    module = case.module() if case.method in MULTIHEAD else None
    if module is not None:
        assert module.in_proj_weight is not None
        assert module.in_proj_bias is not None
        weights, biases = (x.double().chunk(3) for x in (module.in_proj_weight, module.in_proj_bias))
        flat = (x.flatten(2).double() for x in (q, k, v))
        q, k, v = (
            F.linear(x, weight, bias).unflatten(2, (case.heads, -1))
            for x, weight, bias in zip(flat, weights, biases, strict=True)
        )
    out = torch.zeros(q.shape[0], len(rows), case.heads, case.head_dim, dtype=torch.float64)
    for i, row in enumerate(rows):
        for head in range(case.heads):
            keys = keys_of(case, row, head)
            if len(keys):
                scores = (k[:, keys, head].double() @ q[:, row, head].double()[..., None]) * case.head_dim**-0.5
                out[:, i, head] = (scores.softmax(1) * v[:, keys, head].double()).sum(1)
    if module is None:
        return out
    bias = module.out_proj.bias
    projected = F.linear(out.flatten(2), module.out_proj.weight.double(), None if bias is None else bias.double())
    return projected.unflatten(2, (case.heads, -1))


def keys_reached(case: Case, rows: Sequence[int]) -> float:
    """Return how many different keys a token sees in all its heads together: the mean over the positions `rows`."""
    sets = [torch.cat([keys_of(case, row, head) for head in range(case.heads)]).unique() for row in rows]
    return sum(map(len, sets)) / len(sets)
