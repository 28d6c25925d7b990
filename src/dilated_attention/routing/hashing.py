"""Blocks whose queries and keys collide under random hyperplanes."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention import checks
from dilated_attention.kernels.cpu import estimates as compiled
from dilated_attention.layout import BlockLayout
from dilated_attention.layout.spans import BlockSize
from dilated_attention.routing.estimates import block_peaks, in_blocks, part_means, pieces
from dilated_attention.routing.forecast import Forecast
from dilated_attention.routing.grid import Keys, Queries, candidates, is_compiled, selector

LSH_QUERIES = 16  # queries of a block that are hashed to estimate shares
LSH_KEYS = 20  # and keys, those with the largest weights
NO_KEYS = 1e-30  # added to the weight of the keys in a bucket, so that a query alone there hits none
WEIGHT_ALONE = 0.3  # of a key's weight beside its collisions; 0 and 1 captured less of MiniLM's attention


@selector
def lsh_blocks(
    q: Queries,
    k: Keys,
    density: float | None = None,
    *,
    num_hashes: int = 13,
    num_bits: int = 6,
    seed: int = 0,
    block_size: BlockSize = 128,
    is_causal: bool = False,
    scale: float | None = None,
    keep_diagonal: bool = True,
    floor: int = 1,
) -> BlockLayout:
    """Choose blocks whose queries and keys share buckets of `num_hashes` hashes of `num_bits` signs each.

    Without `density` the layout is exact inside buckets: a block is active iff one of its (query, key) pairs shares a
    bucket in one of the hashes, so every such pair is attended (and the rest of its block with it). With `density` each
    row keeps as many blocks as in `topk_blocks`, those with the largest estimated share of its softmax.

    The estimate: exp(q·k) = exp(q̄·k) exp((q - q̄)·k). The first factor is a weight of the key alone; collisions of the
    centred q and k stand in for the second. In each hash a query spreads its attention over the keys of its bucket in
    proportion to their weights; the shares are averaged over queries and hashes; a part depends on the weight alone.

    When causal, the q_block queries that end at block i's first one are hashed in its place, and the centres are means
    so far; pairs that the block's later queries would form are then not looked for.
    """
    grid = candidates(q, k, block_size, is_causal, keep_diagonal, floor, scale)
    num_hashes, num_bits = checks.positive("num_hashes", num_hashes), checks.integer("num_bits", num_bits, 1, 16)
    dtype, scale, group = grid.dtype, grid.scale, q.shape[2] // k.shape[2]
    generator = torch.Generator().manual_seed(checks.integer("seed", seed))
    planes = torch.randn(q.shape[3], num_hashes * num_bits, generator=generator, dtype=torch.float64, device="cpu")
    planes, buckets = planes.to(grid.device, dtype), 2**num_bits
    # queries from the first query block that has any: block 1 when causal, hashed by the q_block that end at its start
    skip, everything = int(is_causal), slice(0, grid.rows)
    query = q[:, 1 : 1 + (grid.rows - 1) * grid.q_block] if is_causal else q
    sample = 1 if density is None else max(1, grid.q_block // LSH_QUERIES)
    query = in_blocks(query, grid.q_block)[:, :, sample // 2 :: sample]
    mean_k, size_k = part_means(k, grid.k_block, 1)
    centre_k = _mean_so_far(mean_k[:, :, 0], size_k[:, 0], is_causal).to(dtype)
    at_q = torch.arange(grid.q_block, device=grid.device)[sample // 2 :: sample]
    at_q = torch.arange(query.shape[1], device=grid.device)[:, None] * grid.q_block + at_q
    real_q = (at_q < (grid.rows - skip) * grid.q_block if is_causal else at_q < grid.seq_len).to(dtype)
    size_q = real_q.sum(-1).clamp(min=1)
    mean_q = torch.einsum("bithd,it->bihd", query.to(dtype), real_q / size_q[:, None])
    centre_q = _mean_so_far(mean_q, size_q, is_causal)  # (B, rows - skip, H, D); not causal: one for all
    count_q = _counts(query, centre_q, planes, num_bits, real_q[None, :, None])  # (B, H, rows - skip, hashes * buckets)
    at_k = torch.arange(grid.columns * grid.k_block, device=grid.device).view(grid.columns, grid.k_block)
    real_k = at_k < grid.seq_len
    if density is None:
        key, real = in_blocks(k, grid.k_block), real_k[None, :, None].to(dtype)
        count_k = _counts(key, centre_k, planes, num_bits, real).repeat_interleave(group, 1)
        collisions = F.pad((count_q @ count_k.mT).clamp_(max=1), (0, 0, skip, 0))
        met = (collisions > 0) & grid.allowed | grid.always
        return grid.layout_of([(everything, collisions)], torch.maximum(met.sum(-1), grid.least()))

    budget = grid.budget(density)
    # the exponent of a key's weight, q̄·k, is split at the largest one of its block: within the block q̄ is the mean as
    # of its first chooser, so that the weights are the same for all rows; across blocks it is the row's own
    chooser = F.pad(centre_q, (0, 0, 0, 0, 1, 0))[:, grid.first_chooser] if is_causal else centre_q
    key, within, _ = block_peaks(
        k, scale * chooser, grid.k_block, min(LSH_KEYS, grid.k_block)
    )  # (B, columns, keys, H, D)
    mean_k = mean_k[:, :, 0].to(dtype).repeat_interleave(group, 2)
    middle = scale * (mean_k * chooser).sum(-1, keepdim=True)
    peak = within[..., :1]
    # a key whose weight overflows has none: a NaN times 0 would reach the rows that do not see the key
    weight = F.pad((within - peak).exp_().nan_to_num_(nan=0.0), (0, 1))  # the mean of the others has none
    count_k = _counts(key, centre_k.repeat_interleave(group, 2), planes, num_bits, weight)
    relative = scale * torch.einsum("bihd,bjhd->bhij", centre_q, mean_k)
    relative += (peak - middle).permute(0, 2, 3, 1)
    if is_causal:
        relative.masked_fill_(~grid.allowed[skip:], -math.inf)
    # (B, H, rows - skip, columns); not causal: one row for all
    relative = (relative - relative.amax(-1, keepdim=True).clamp(min=torch.finfo(dtype).min)).exp()
    share = relative.new_zeros(*count_q.shape[:3], grid.columns)
    for at, seen in pieces(grid.choices[skip:], grid.rows):
        near, some = relative[:, :, at, :seen], count_k[:, :, :seen]
        hits = count_q[:, :, at].div_((near @ some).add_(NO_KEYS))
        share[:, :, at, :seen] = near * (hits @ some.mT) / (size_q[at, None] * num_hashes)
    alone = relative * count_k[..., :buckets].sum(-1)[:, :, None]
    share += WEIGHT_ALONE * alone / alone.sum(-1, keepdim=True).clamp(min=torch.finfo(dtype).tiny)
    share = F.pad(share, (0, 0, skip, 0))
    if is_causal:
        share = Forecast(q, k, grid)(everything, share, budget)
    return grid.layout_of([(everything, share)], budget)


def _mean_so_far(means: Tensor, size: Tensor, is_causal: bool) -> Tensor:
    """(B, blocks, H, D), of `size` tokens a block -> the mean of all tokens (B, 1, H, D); causal: up to each block.

    In single precision at least: float16 counts to 65,504.
    """
    dtype = torch.promote_types(means.dtype, torch.float32)
    means, size = means.to(dtype), size.to(dtype)
    if not is_causal:
        weight = size / size.sum()
        return (means * weight[:, None, None]).sum(1, keepdim=True)
    return means.cumsum(1) / torch.arange(1, means.shape[1] + 1, device=means.device)[:, None, None]


def _counts(x: Tensor, centre: Tensor, planes: Tensor, num_bits: int, weight: Tensor) -> Tensor:
    """Weight of the tokens in each bucket, (B, H, blocks, hashes * buckets).

    Args:
        x: tokens (B, blocks, T, H, D), hashed by their sides of planes through centre (B, blocks or 1, H, D).
        weight: (B or 1, blocks, H or 1, T).
    """
    batch, blocks, tokens, heads, _ = x.shape
    weight, level = weight.expand(batch, blocks, heads, tokens), centre @ planes
    if is_compiled(flat := x.flatten(1, 2)):
        return compiled.buckets(flat, level, planes, weight, num_bits)
    signs = (x.to(planes.dtype) @ planes).gt_(level[:, :, None])
    power = 2.0 ** torch.arange(num_bits, device=planes.device, dtype=planes.dtype)
    code = (signs.unflatten(-1, (-1, num_bits)) @ power).long().transpose(2, 3)  # (B, blocks, H, T, hashes)
    buckets, hashes = 2**num_bits, code.shape[-1]
    lists = torch.arange(batch * heads, device=code.device).view(batch, 1, heads, 1, 1) * blocks
    lists = (lists + torch.arange(blocks, device=code.device)[:, None, None, None]) * hashes
    at = (lists + torch.arange(hashes, device=code.device)) * buckets + code
    flat = torch.zeros(batch * heads * blocks * hashes * buckets, dtype=weight.dtype, device=code.device)
    flat.index_add_(0, at.flatten(), weight[..., None].expand(code.shape).flatten())
    return flat.view(batch, heads, blocks, hashes * buckets)
