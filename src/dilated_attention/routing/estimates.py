"""How much of a query block's softmax falls on each key block, estimated from few of its rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention.routing.grid import Candidates

QUERY_PARTS = 4
KEY_PEAKS = 7
CHUNK = 2**24  # scores held at a time


Pooled = tuple[Tensor, Tensor, Tensor, Tensor]
"""What stands for the tokens of blocks: queries (B, H, rows, parts, D), the weight of each part (rows, parts), keys
(B, kv_heads, columns, peaks, D), and the logarithm of how many keys each stands for (columns, peaks)."""


def estimated_shares(
    q: Tensor, k: Tensor, grid: Candidates, *, group: bool = False, pool: Callable[..., Pooled] | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """Shares (B, H, some rows, columns) for all rows. `group`: the mean over the query heads of a KV head."""
    query, weight, key, multiplicity = (pool or pooled)(q, k, grid)
    parts, start = [], 0
    for at, share in scored_rows(query, weight, key, multiplicity, grid.allowed):
        parts.append(share.unflatten(1, (k.shape[2], -1)).mean(2) if group else share)
        if at.stop == grid.rows or 4 * sum(part.numel() for part in parts) > CHUNK:
            yield slice(start, at.stop), torch.cat(parts, 2)
            parts, start = [], at.stop


def scored_rows(
    query: Tensor, weight: Tensor, key: Tensor, multiplicity: Tensor, allowed: Tensor, *, held: int = 0
) -> Iterator[tuple[slice, Tensor]]:
    """Shares (B, H, some rows, columns) of pooled queries, for as many rows at a time as `CHUNK` allows.

    allowed: (rows, columns), a prefix of the columns, no shorter in later rows. `held`: what else the caller needs for
    a row of one head.
    """
    batch, heads, _, parts, _ = query.shape
    kv_heads, columns = key.shape[1:3]
    # peaks before columns, so that the sum over a block's keys runs over whole vectors
    key, multiplicity = key.transpose(2, 3), multiplicity.T
    step = max(1, CHUNK // (batch * heads * max(held, parts * multiplicity.numel())))
    for at, seen in pieces(allowed, step):
        some = query[:, :, at]
        logits = some.reshape(batch, kv_heads, -1, query.shape[4]) @ key[:, :, :, :seen].flatten(2, 3).mT
        logits = logits.view(*some.shape[:4], -1, seen).add_(multiplicity[:, :seen])
        yield at, F.pad(share_of_blocks(logits, weight[at], allowed[at, :seen]), (0, columns - seen))


def pieces(allowed: Tensor, most: int) -> Iterator[tuple[slice, int]]:
    """`most` rows at a time, an eighth of all where that spares columns that none may choose, and the columns left."""
    rows = len(allowed)
    step = most if bool(allowed.all()) else min(most, -(-rows // 8))
    for start in range(0, rows, step):
        at = slice(start, min(start + step, rows))
        yield at, max(1, int(allowed[at.stop - 1].sum()))


def share_of_blocks(logits: Tensor, weight: Tensor, allowed: Tensor) -> Tensor:
    """(…, rows, parts, peaks, columns) -> softmax over peaks and columns, summed over peaks, mean over parts.

    0 where not `allowed` (…, rows, columns). Overwrites the logits.
    """
    if not bool(allowed.all()):
        logits.masked_fill_(~allowed[..., None, None, :], -math.inf)
    largest = logits.amax((-1, -2), keepdim=True).clamp_(min=torch.finfo(logits.dtype).min)
    mass = logits.sub_(largest).exp_().sum(-2)
    total = mass.sum(-1).clamp_(min=torch.finfo(logits.dtype).tiny)
    return ((weight / total)[..., None, :] @ mass).squeeze(-2)


def pooled(q: Tensor, k: Tensor, grid: Candidates) -> Pooled:
    """The estimate of the package's docstring."""
    query, weight = pooled_queries(q, grid)
    return query, weight, *_pooled_keys(k, _direction(query, weight, k.shape[2], grid), grid)


def pooled_queries(q: Tensor, grid: Candidates) -> tuple[Tensor, Tensor]:
    """Scaled (B, H, rows, parts, D) and the weight of each part (rows, parts)."""
    query, size = part_means(q, grid.q_block, QUERY_PARTS, before=grid.is_causal)
    if grid.is_causal:
        query = torch.cat([query, q[:, :: grid.q_block, None]], dim=2)
        size = F.pad((size > 0).to(grid.dtype), (0, 1), value=1.0)
    weight = (size / size.sum(-1, keepdim=True)).to(grid.dtype)
    return query.to(grid.dtype).permute(0, 3, 1, 2, 4) * grid.scale, weight


def _direction(query: Tensor, weight: Tensor, kv_heads: int, grid: Candidates) -> Tensor:
    """The mean pooled query of each KV head, (B, 1, kv_heads, D); causal: per key block, (B, columns, kv_heads, D)."""
    rows = torch.einsum("bhiad,ia->bihd", query, weight).unflatten(2, (kv_heads, -1)).mean(3)
    if not grid.is_causal:
        return rows.mean(1, keepdim=True)
    so_far = rows.cumsum(1) / torch.arange(1, grid.rows + 1, device=grid.device)[:, None, None]
    return so_far[:, grid.first_chooser]


def _pooled_keys(k: Tensor, direction: Tensor, grid: Candidates) -> tuple[Tensor, Tensor]:
    """Peaks and the mean of the others (B, kv_heads, columns, peaks + 1, D), log multiplicity (columns, peaks + 1)."""
    blocks, more = in_blocks(k, grid.k_block), grid.columns * grid.k_block - grid.seq_len
    score = along(blocks, direction.to(k.dtype)).transpose(1, 2)  # (B, kv_heads, columns, k_block)
    number = min(KEY_PEAKS, grid.k_block)
    present = torch.full((grid.columns,), grid.k_block, device=grid.device)
    if more:
        present[-1] -= more
        score[:, :, -1, grid.k_block - more :] = -math.inf
    at = score.topk(number, dim=-1).indices[..., None].expand(-1, -1, -1, -1, k.shape[3])
    peaks = blocks.permute(0, 3, 1, 2, 4).gather(3, at).to(direction.dtype)
    others = (present - number).clamp(min=0)
    rest = blocks.sum(2, dtype=direction.dtype).transpose(1, 2) - peaks.sum(3)
    rest = rest / others.clamp(min=1)[:, None]
    peak_count = (torch.arange(number, device=grid.device) < present[:, None]).to(direction.dtype)
    return torch.cat([peaks, rest[:, :, :, None]], 3), torch.cat([peak_count, others[:, None]], 1).log()


def part_means(x: Tensor, block: int, parts: int, before: bool = False) -> tuple[Tensor, Tensor]:
    """(B, N, H, D) -> means of `parts` consecutive parts of each block (B, blocks, parts, H, D), sizes (blocks, parts).

    `before`: of the `block` tokens that end at the block's first one, instead; none for the first block.
    """
    whole, rest = (-(-x.shape[1] // block) - 1, 0) if before else divmod(x.shape[1], block)
    start = 1 if before else 0
    part = torch.arange(block, device=x.device) * parts // block
    member = (part == torch.arange(parts, device=x.device)[:, None]).to(x.dtype)  # [parts, block]
    body = x[:, start : start + whole * block].flatten(2).unflatten(1, (whole, block))
    size = member.sum(-1).expand(whole, parts)
    means = (member / member.sum(-1, keepdim=True).clamp(min=1)) @ body
    if before or rest:
        end = x[:, whole * block :].flatten(2)[:, None] if rest else x[:, :0].flatten(2)[:, None]
        few = member[:, : end.shape[2]]
        mean, few_size = (few / few.sum(-1, keepdim=True).clamp(min=1)) @ end, few.sum(-1)[None]
        order = (mean, means) if before else (means, mean)
        means, size = torch.cat(order, dim=1), torch.cat((few_size, size) if before else (size, few_size))
    return means.unflatten(3, x.shape[2:]), size


def in_blocks(x: Tensor, block: int) -> Tensor:
    """(B, N, H, D) -> (B, blocks, block, H, D), zeros behind the end; a view where the blocks are whole."""
    more = -x.shape[1] % block
    return (F.pad(x, (0, 0, 0, 0, 0, more)) if more else x).unflatten(1, (-1, block))


def along(blocks: Tensor, direction: Tensor) -> Tensor:
    """(B, blocks, block, kv_heads, D) · (B, blocks or 1, heads, D) -> (B, blocks, heads, block).

    One product with a block-diagonal matrix reads the keys in place, where a product a head would copy them; from its
    left, since the many tokens make the wide side of the result.
    """
    kv_heads, heads = blocks.shape[3], direction.shape[2]
    diagonal = direction.new_zeros(*direction.shape[:3], kv_heads, direction.shape[3])
    head = torch.arange(heads, device=direction.device)
    diagonal[:, :, head, head // (heads // kv_heads)] = direction
    return diagonal.flatten(3) @ blocks.flatten(3).mT
