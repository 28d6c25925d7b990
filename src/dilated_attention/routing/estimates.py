"""Estimate from few rows how much of a query block's softmax falls on each key block.

Every estimate is a softmax of few queries over few keys, summed by key block: `shares`. On the CPU the compiled library
(kernels/cpu/estimates.py) computes the softmax, and the rows that represent a block, in one pass each. Tensor
operations do so on other devices, in double precision, and where the library is missing.

Throughout, a row is a query block, a column is a key block, and B, N, H and D are batch, tokens, heads and head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention import ranking
from dilated_attention.kernels.cpu import estimates as compiled
from dilated_attention.routing.grid import Candidates, is_compiled

QUERY_PARTS = 4
KEY_PEAKS = 7


class Sample(NamedTuple):
    """Hold the queries and keys that represent the tokens of each block.

    Attributes:
        query: `(batch, rows * parts, heads, head_dim)`: `parts` queries per row (query block), row by row.
        weight: `(rows, parts)`, the weight of each query in its row's share.
        key: `(batch, columns * peaks, kv_heads, head_dim)`: `peaks` keys per column (key block), or fewer where the
            last block has fewer.
        peaks: the number of keys per block.
        scale: the factor of the scores.
        logarithm: `(columns, peaks)`, the logarithm of how many tokens each key represents; None: one token each.
    """

    query: Tensor
    weight: Tensor
    key: Tensor
    peaks: int
    scale: float
    logarithm: Tensor | None = None


def estimated_shares(x: Sample, grid: Candidates) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of rows with their estimated shares (B, lists, rows of the slice, columns), for all rows."""
    seen = (grid.choices * x.peaks).clamp(max=x.key.shape[1])[:, None].expand(x.weight.shape)
    for at, share in shares(x, seen, grid.columns):
        yield at, grid.by_list(share)


def shares(x: Sample, seen: Tensor, columns: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield (slice of rows, shares (B, H, rows of the slice, columns)), until all rows are done. A share is the part of
    a row's (query block's) softmax that falls on the keys of a column (key block).

    `seen`: int64 (rows, parts): each query of `x` sees this many of its keys, counted from the first. The numbers do
    not decrease from row to row.
    """
    rows, parts = x.weight.shape
    batch, _, heads, _ = x.query.shape
    fast = is_compiled(x.query, x.key)
    scores = batch * heads * columns
    held = max(1, ranking.CHUNK // (scores * parts * x.peaks))
    for at in ranking.slices(0, rows, 4 * scores):
        if fast:
            query = x.query[:, at.start * parts :]
            yield at, compiled.shares(
                query, x.key, x.weight[at], seen[at], columns, x.peaks, logarithm=x.logarithm, scale=x.scale,
            )  # fmt: skip
        else:
            found = [_shares(x, inner, seen[inner], columns, most) for inner, most in pieces(seen[at], held, at.start)]
            yield at, torch.cat(found, 2)


def _shares(x: Sample, at: slice, seen: Tensor, columns: int, most: int) -> Tensor:
    """Return `shares` of the rows (query blocks) `at`, by tensor operations; no row may see more than `most` keys."""
    parts = x.weight.shape[1]
    peaks = x.peaks
    reached = -(-most // peaks)
    dtype = torch.promote_types(x.query.dtype, torch.float32)

    query = x.query[:, at.start * parts : at.stop * parts].to(dtype) * x.scale
    query = query.unflatten(2, (x.key.shape[2], -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    # peaks before columns, so that the sum over a block's keys runs over whole vectors
    key = x.key[:, : reached * peaks].to(dtype)
    key = F.pad(key, (0, 0, 0, 0, 0, reached * peaks - key.shape[1]))
    key = key.unflatten(1, (reached, peaks)).permute(0, 3, 2, 1, 4).flatten(2, 3)

    logits = (query @ key.mT).view(len(query), -1, at.stop - at.start, parts, peaks, reached)
    if x.logarithm is not None:
        logits += x.logarithm[:reached].T
    number = torch.arange(reached * peaks, device=seen.device).view(reached, peaks).T
    if bool((seen < reached * peaks).any()):
        logits.masked_fill_(number >= seen[..., None, None], -math.inf)
    return F.pad(share_of_blocks(logits, x.weight[at]), (0, columns - reached))


def listed_shares(x: Sample, choices: Tensor, listed: Tensor, at: slice, tile: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield `shares` of the rows `at`, computed for listed columns only: (B, H, rows of the slice, listed).

    A row is a query block, a column a key block. Each `tile` neighbouring rows, a tile, share a list of columns.

    Args:
        choices: (all rows,): each row may see this many columns, counted from the first.
        listed: (B, H, tiles, listed), ascending columns for each tile; tile 0 begins at `at.start`. Numbers past the
            last column pad short lists and are never seen.
    """
    batch, heads, _, number = listed.shape
    parts = x.weight.shape[1]
    peaks = x.peaks
    kv_heads = x.key.shape[2]
    if is_compiled(x.query, x.key):
        seen = (choices[at, None] * peaks).expand(-1, parts)
        yield at, compiled.shares(
            x.query[:, at.start * parts :], x.key, x.weight[at], seen, number, peaks,
            logarithm=x.logarithm, scale=x.scale, listed=listed, tile=tile,
        )  # fmt: skip
        return

    columns = x.key.shape[1] // peaks
    batches = torch.arange(batch, device=listed.device)[:, None, None, None]
    kv_head = torch.arange(heads, device=listed.device)[:, None, None] // (heads // kv_heads)
    key = x.key.unflatten(1, (columns, peaks))
    query = x.query.unflatten(1, (-1, parts))
    step = max(1, ranking.CHUNK // (batch * heads * number * peaks * max(x.key.shape[3], tile * parts)))
    for start in range(at.start, at.stop, step * tile):
        stop = min(start + step * tile, at.stop)
        named = listed[:, :, (start - at.start) // tile : -(-(stop - at.start) // tile)]
        near = named.clamp(max=columns - 1)
        pad = -(stop - start) % tile
        some = F.pad(query[:, start:stop], (0, 0, 0, 0, 0, 0, 0, pad)).unflatten(1, (-1, tile))
        logits = torch.einsum("briahd,bhrcpd->bhriapc", some * x.scale, key[batches, near, :, kv_head])
        if x.logarithm is not None:
            logits += x.logarithm[near].mT[:, :, :, None, None]
        rows = F.pad(choices[start:stop], (0, pad)).view(-1, tile, 1)
        logits.masked_fill_((named[:, :, :, None] >= rows)[..., None, None, :], -math.inf)
        weight = F.pad(x.weight[start:stop], (0, 0, 0, pad)).unflatten(0, (-1, tile))
        yield slice(start, stop), share_of_blocks(logits, weight).flatten(2, 3)[:, :, : stop - start]


def pieces(seen: Tensor, most: int, first: int = 0) -> Iterator[tuple[slice, int]]:
    """Yield slices of at most `most` rows, numbered from `first`, each with the largest number of keys that one of its
    rows sees (at least 1). `seen`: how many each row sees, not decreasing; where it grows, a slice has at most an
    eighth of all rows."""
    rows = len(seen)
    step = most
    if rows and int(seen.min()) != int(seen[-1].max()):
        step = min(most, -(-rows // 8))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield slice(first + start, first + stop), max(1, int(seen[stop - 1].max()))


def share_of_blocks(logits: Tensor, weight: Tensor) -> Tensor:
    """Return the share of each key block, (…, rows, columns), from logits (…, rows, parts, peaks, columns): each
    query's softmax, summed over the keys of a block and averaged over the queries with `weight`, (rows, parts), whose
    sum in a row is 1. A row that sees no key gets zeros. Overwrites the logits."""
    largest = logits.amax((-1, -2), keepdim=True).clamp_(min=torch.finfo(logits.dtype).min)
    mass = logits.sub_(largest).exp_().sum(-2)
    total = mass.sum(-1).clamp_(min=torch.finfo(logits.dtype).tiny)
    return ((weight / total)[..., None, :] @ mass).squeeze(-2)


def pooled(q: Tensor, k: Tensor, grid: Candidates) -> Sample:
    """Return the queries and keys that represent the blocks: means of queries, keys with high scores, and the mean of
    the other keys, as the docstring of `routing` describes under "Estimate"."""
    query, weight = pooled_queries(q, grid)
    # The peaks of a key block score highest along its direction, the mean query of each KV head. When causal, it is the
    # mean over the query blocks up to the first one that may choose the key block. (B, columns or 1, kv_heads, D)
    means = (weight * grid.scale)[:, None] @ query.flatten(3)
    rows = means.view(len(q), grid.rows, k.shape[2], -1, k.shape[3]).mean(3)
    if grid.is_causal:
        so_far = rows.cumsum(1) / torch.arange(1, grid.rows + 1, device=grid.device)[:, None, None]
        direction = so_far[:, grid.first_chooser]
    else:
        direction = rows.mean(1, keepdim=True)

    number = min(KEY_PEAKS, grid.k_block)
    logarithm = grid.once("logarithm", lambda grid: peak_counts(grid, number).log())
    key, *_ = block_peaks(k, direction, grid.k_block, number)
    return Sample(query.flatten(1, 2), weight, key.flatten(1, 2), key.shape[2], grid.scale, logarithm=logarithm)


def peak_counts(grid: Candidates, peaks: int) -> Tensor:
    """Return how many keys each key of `block_peaks` represents, (columns, peaks + 1)."""
    present = (grid.seq_len - torch.arange(grid.columns, device=grid.device) * grid.k_block).clamp(max=grid.k_block)
    peak_count = torch.arange(peaks, device=grid.device) < present[:, None]
    return torch.cat([peak_count, (present - peaks).clamp(min=0)[:, None]], 1).to(grid.dtype)


def pooled_queries(q: Tensor, grid: Candidates) -> tuple[Tensor, Tensor]:
    """Return the pooled queries of each query block, (B, rows, parts, H, D), and the weight of each, (rows, parts):
    means of parts of the block, or, when causal, of the q_block queries up to its first one, and that one itself."""
    query, size = part_means(q, grid, grid.q_block, QUERY_PARTS, before=grid.is_causal)

    def weights(grid: Candidates) -> Tensor:
        share = size
        if grid.is_causal:  # parts count equally
            share = size.clamp(max=1)
        return share.to(grid.dtype) / share.sum(-1, keepdim=True)

    return query.to(grid.dtype), grid.once("part weights", weights)


def block_peaks(k: Tensor, direction: Tensor, block: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the `number` keys of each key block that score highest along a direction, and the mean of the others.

    Args:
        direction: (B, columns or 1, heads, D): a direction per key block (column), or one for all.
        block: tokens per key block.

    Returns:
        keys (B, columns, number + 1, heads, D), the mean of the others last; the scores of the peaks and their tokens,
        (B, columns, heads, number) each. Peaks past the end of the sequence score -inf.
    """
    if is_compiled(k):
        return compiled.peaks(k, direction.float(), block, number)
    blocks = in_blocks(k, block)
    score = along(blocks, direction.to(k.dtype)).to(direction.dtype)  # (B, columns, heads, block)
    token = torch.arange(blocks.shape[1] * block, device=k.device).view(-1, 1, block)
    score, at = score.masked_fill_(token >= k.shape[1], -math.inf).topk(number, dim=-1)

    group = score.shape[2] // k.shape[2]
    batch = torch.arange(len(k), device=k.device)[:, None, None, None]
    column = torch.arange(len(token), device=k.device)[:, None, None]
    head = torch.arange(score.shape[2], device=k.device)[:, None] // group
    best = blocks[batch, column, at, head].transpose(2, 3).to(direction.dtype)
    rest = blocks.sum(2, dtype=direction.dtype).repeat_interleave(group, 2) - best.sum(2)
    others = (token[:, 0] < k.shape[1]).sum(-1).sub_(number).clamp_(min=1)
    return torch.cat([best, (rest / others[:, None, None])[:, :, None]], 2), score, at + column * block


def part_means(x: Tensor, grid: Candidates, block: int, parts: int, before: bool = False) -> tuple[Tensor, Tensor]:
    """Return the means (B, blocks, parts, H, D) of `parts` consecutive parts of each block of x (B, N, H, D), and the
    number of tokens in each part, (blocks, parts). `before`: in place of a block take the `block` tokens that end at
    its first token (the first block then has none), and that token alone as a part."""
    starts, stops, size = grid.once(("parts", block, parts, before), lambda grid: _parts(grid, block, parts, before))
    if is_compiled(x):
        return compiled.means(x, starts.flatten(), stops.flatten()).unflatten(1, size.shape), size
    part = torch.arange(block, device=x.device) * parts // block
    member = (part == torch.arange(parts, device=x.device)[:, None]).to(grid.dtype)
    tokens = x
    if before:  # the first block has none
        tokens = x[:, 1 : 1 + (len(size) - 1) * block]
    rows = in_blocks(tokens, block).flatten(3)
    # weights before sums, which half precision could not hold
    weight = (member / size[int(before) :, :parts, None].clamp(min=1)).to(x.dtype)
    means = F.pad(weight @ rows, (0, 0, 0, 0, int(before), 0)).unflatten(3, x.shape[2:])
    if before:
        means = torch.cat([means, x[:, ::block, None]], 2)
    return means, size


def _parts(grid: Candidates, block: int, parts: int, before: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return start, stop and size of each part of `part_means`, (blocks, parts)."""
    first = torch.arange(0, grid.seq_len, block, device=grid.device)[:, None]
    edges = first + (torch.arange(parts + 1, device=grid.device) * block + parts - 1) // parts
    if before:
        edges = (edges + 1 - block).clamp_(min=0)
        edges[0] = 0
    else:
        edges.clamp_(max=grid.seq_len)
    starts = edges[:, :-1]
    stops = edges[:, 1:]
    if before:  # the first token alone is one more part
        starts = torch.cat([starts, first], 1)
        stops = torch.cat([stops, first + 1], 1)
    return starts, stops, stops - starts


def extremes(x: Tensor, page: int) -> Tensor:
    """Return the greatest, then the least components of each page of keys x (B, N, H, D): (B, pages, H, 2 D)."""
    starts = torch.arange(0, x.shape[1], page, device=x.device)
    if is_compiled(x):
        return compiled.extremes(x, starts, (starts + page).clamp(max=x.shape[1])).to(x.dtype)
    pages = in_blocks(x, page)
    token = torch.arange(pages.shape[1] * page, device=x.device).view(-1, page, 1, 1)
    none = token >= x.shape[1]
    high = pages.masked_fill(none, -torch.inf).amax(2)
    low = pages.masked_fill(none, torch.inf).amin(2)
    return torch.cat([high, low], -1)


def in_blocks(x: Tensor, block: int) -> Tensor:
    """Cut x (B, N, H, D) into blocks (B, blocks, block, H, D), with zeros after the end; a view if all blocks are
    whole."""
    blocks = -(-x.shape[1] // block)
    more = blocks * block - x.shape[1]
    if more:
        x = F.pad(x, (0, 0, 0, 0, 0, more))
    return x.unflatten(1, (blocks, block))


def along(blocks: Tensor, direction: Tensor) -> Tensor:
    """Return the dot products of keys with directions: blocks (B, blocks, block, kv_heads, D) and direction (B, blocks
    or 1, heads, D) give (B, blocks, heads, block). A single product with a block-diagonal matrix reads the keys in
    place, where one product per head would copy them. The many tokens form the wide side of the result."""
    kv_heads = blocks.shape[3]
    heads = direction.shape[2]
    diagonal = direction.new_zeros(*direction.shape[:3], kv_heads, direction.shape[3])
    head = torch.arange(heads, device=direction.device)
    diagonal[:, :, head, head // (heads // kv_heads)] = direction
    return diagonal.flatten(3) @ blocks.flatten(3).mT
