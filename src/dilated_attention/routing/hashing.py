"""Choose blocks whose queries and keys collide under random hyperplanes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention import checks, ranking
from dilated_attention.kernels.cpu import estimates as compiled
from dilated_attention.layout import BlockLayout
from dilated_attention.layout.spans import BlockSize
from dilated_attention.routing.estimates import block_peaks, in_blocks, part_means, peak_counts
from dilated_attention.routing.grid import Candidates, Keys, Queries, candidates, is_compiled
from dilated_attention.routing.operator import selector
from dilated_attention.routing.selectors import largest_shares

LSH_QUERIES = 16  # queries of a block that are hashed to estimate shares
LSH_KEYS = 15  # keys of a block that are hashed for it: those with the largest weights
NO_KEYS = 1e-30  # added to the weight in a bucket: a query alone there hits none
WEIGHT_ALONE = 0.3  # factor of the share by weights alone; 0 and 1 hold less of MiniLM


@selector
def lsh_blocks(
    q: Queries,
    k: Keys,
    density: float | None = None,
    *,
    num_hashes: int = 14,
    num_bits: int = 5,
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
    query block keeps as many as in `topk_blocks`, those with the largest estimated share of its softmax.

    The estimate: exp(q·k) = exp(q̄·k) exp((q - q̄)·k). With q̄ the mean query, the first factor is a weight of the
    key alone, and collisions of the centred q and k replace the second. In each hash a query spreads its attention over
    the keys of its bucket in proportion to their weights. The shares are averaged over queries and hashes, and mixed
    with a share that depends on the weights alone.

    When causal, a query block is represented by its first query and the queries just before it, one block of queries in
    all, and the centres are means over the tokens so far. Pairs that only its later queries form are then missed.

    Other arguments are as in `topk_blocks`.

    Examples:
        >>> from dilated_attention.routing import lsh_blocks
        >>> q, k = torch.ones(1, 64, 1, 8), torch.zeros(1, 64, 1, 8)
        >>> k[:, 16:32] = 2.0  # the keys of block 1 get nearly all the attention
        >>> layout = lsh_blocks(q, k, density=0.5, block_size=16)
        >>> layout.dense_blocks()[0, 0, :, 1]  # each of the 4 query blocks sees block 1
        tensor([True, True, True, True])
    """
    grid = candidates(
        q, k, block_size=block_size, is_causal=is_causal, scale=scale, keep_diagonal=keep_diagonal, floor=floor
    )
    num_hashes = checks.positive("num_hashes", num_hashes)
    num_bits = checks.integer("num_bits", num_bits, 1, 16)
    seed = checks.integer("seed", seed)
    planes = partial(_planes, head_dim=q.shape[3], number=num_hashes * num_bits, seed=seed)
    hashes = _Hashes(grid.once(("planes", q.shape[3], num_hashes * num_bits, seed), planes), num_bits)

    if density is not None:
        queries, centre_q, real = _queries(q, grid, max(1, grid.q_block // LSH_QUERIES))
        each = real / (real.sum(-1, keepdim=True).clamp(min=1) * num_hashes)
        met = hashes.weights(queries, centre_q, each)
        return largest_shares(q, k, density, grid, _shares(met, centre_q, k, hashes, grid))

    queries, centre_q, real = _queries(q, grid, 1)
    met = hashes.weights(queries, centre_q, real)  # (B, H, rows, hashes * buckets); when causal without row 0
    met = F.pad(met, (0, 0, int(is_causal), 0))
    means, sizes = part_means(k, grid, grid.k_block, 1)
    centre = _mean_so_far(means[:, :, 0], sizes[:, 0], is_causal).to(grid.dtype)
    keys = in_blocks(k, grid.k_block)
    token = torch.arange(keys.shape[1] * grid.k_block, device=grid.device).view(1, -1, 1, grid.k_block)
    real = (token < grid.seq_len).to(grid.dtype)
    held = hashes.weights(keys, centre, real).repeat_interleave(q.shape[2] // k.shape[2], 1).mT

    def rows() -> Iterator[tuple[slice, Tensor, Tensor]]:
        for at in ranking.slices(0, grid.rows, len(q) * q.shape[2] * grid.columns):
            collisions = (met[:, :, at] @ held).clamp_(max=1)
            active = ((collisions > 0) & grid.allowed[at]) | grid.always[at]
            yield at, collisions, torch.maximum(active.sum(-1), grid.least()[at])

    return grid.layout_of(rows())


def _queries(q: Tensor, grid: Candidates, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return every `step`-th query of each query block, (B, blocks, T, H, D); their means so far, (B, blocks or 1, H,
    D); and 1 for each that exists, else 0, (1, blocks, 1, T). When causal, the q_block queries that end at a block's
    first query replace the block, and block 0 is left out."""
    stop = grid.seq_len
    if grid.is_causal:
        stop = (grid.rows - 1) * grid.q_block
        q = q[:, 1 : 1 + stop]
    blocks = in_blocks(q, grid.q_block)[:, :, step // 2 :: step]
    token = torch.arange(blocks.shape[1] * grid.q_block, device=grid.device).view(-1, grid.q_block)
    real = (token[:, step // 2 :: step] < stop).to(grid.dtype)
    size = real.sum(-1).clamp(min=1)
    means = torch.einsum("bithd,it->bihd", blocks.to(grid.dtype), real / size[:, None])
    return blocks, _mean_so_far(means, size, grid.is_causal), real[None, :, None]


def _planes(grid: Candidates, head_dim: int, number: int, seed: int) -> Tensor:
    """Return normals of random planes, (head_dim, number), orthogonal in groups of head_dim: they tell angles apart
    better than independent ones (super-bit LSH, Ji et al. 2012)."""
    generator = torch.Generator().manual_seed(seed)
    shape = -(-number // head_dim), head_dim, min(head_dim, number)
    normal = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return torch.linalg.qr(normal).Q.transpose(0, 1).flatten(1)[:, :number].to(grid.device, grid.dtype)


def _shares(
    met: Tensor, centre_q: Tensor, k: Tensor, hashes: _Hashes, grid: Candidates
) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of query blocks with their estimated shares, (B, H, blocks, key blocks).

    A key's weight exp(q̄·k) has two factors. The largest weight of its block is estimated with the row's own q̄. The
    key's ratio to it takes the q̄ of the first query block that may choose the block: it is the same for all rows.

    Args:
        met: (B, H, rows, hashes * buckets), the share of a query block's queries in each bucket; the shares in one hash
            sum to 1 / hashes. Without row 0 when causal, like centre_q.
        centre_q: q̄, which is subtracted from queries before hashing, (B, 1, H, D); when causal, one per row instead of
            1.
    """
    skip = int(grid.is_causal)
    chooser = centre_q
    if skip:
        chooser = F.pad(centre_q, (0, 0, 0, 0, 1, 0))[:, grid.first_chooser]
    number = min(LSH_KEYS, grid.k_block)
    keys, within, _ = block_peaks(k, grid.scale * chooser, grid.k_block, number)
    count = grid.once(("counts", number), partial(peak_counts, peaks=number))
    size = count.sum(-1, keepdim=True)
    means = ((count / size)[:, None] @ keys.flatten(3)).unflatten(3, keys.shape[3:])[:, :, 0]
    peak = within[..., :1]
    # a key whose weight overflows has none: a NaN times 0 would reach the rows that do not see the key
    weight = F.pad((within - peak).exp_().nan_to_num_(nan=0.0), (0, 1))  # the mean of the others has none
    held = hashes.weights(keys, _mean_so_far(means, size[:, 0], grid.is_causal), weight)
    peak = peak - grid.scale * (means * chooser).sum(-1, keepdim=True)
    peak, columns = (x.permute(0, 2, 3, 1).flatten(0, 1) for x in (peak, means))

    if skip:
        yield slice(0, skip), met.new_zeros(*met.shape[:2], skip, grid.columns)
    for rows in ranking.slices(0, met.shape[2], len(k) * met.shape[1] * grid.columns):
        at = slice(rows.start + skip, rows.stop + skip)
        met_here = met[:, :, rows]
        centre = centre_q[:, rows] if skip else centre_q  # not causal: one row for all
        logits = torch.baddbmm(peak, centre.transpose(1, 2).flatten(0, 1), columns, alpha=grid.scale)
        logits = logits.unflatten(0, met.shape[:2])
        if skip and is_compiled(logits) and hashes.buckets % 8 == 0:
            share = compiled.collisions(
                logits, held, met_here, grid.choices[at], hashes.num_bits, nothing=NO_KEYS, alone=WEIGHT_ALONE
            )
        else:
            share = _collisions(logits, held, met_here, at, hashes, grid)
        yield at, share


def _collisions(logits: Tensor, held: Tensor, met: Tensor, at: slice, hashes: _Hashes, grid: Candidates) -> Tensor:
    """Compute `compiled.collisions` of the rows `at` with tensor operations. When not causal, logits have one row for
    all."""
    if grid.is_causal:
        logits = logits.masked_fill(~grid.allowed[at], -math.inf)
    near = (logits - logits.amax(-1, keepdim=True).clamp(min=torch.finfo(grid.dtype).min)).exp()
    share = near * ((met / (near @ held + NO_KEYS)) @ held.mT)
    alone = near * held[..., : hashes.buckets].sum(-1)[:, :, None]
    return share.add_(WEIGHT_ALONE * alone / alone.sum(-1, keepdim=True).clamp(min=torch.finfo(grid.dtype).tiny))


def _mean_so_far(means: Tensor, size: Tensor, is_causal: bool) -> Tensor:
    """Return the mean of all tokens, (B, 1, H, D), from the means (B, blocks, H, D) of blocks of `size` tokens; when
    causal, for each block the plain mean of all means so far, (B, blocks, H, D). float16 could not count beyond
    65,504."""
    dtype = torch.promote_types(means.dtype, torch.float32)
    means = means.to(dtype)
    if not is_causal:
        size = size.to(dtype)
        weight = size / size.sum()
        return (means * weight[:, None, None]).sum(1, keepdim=True)
    return means.cumsum(1) / torch.arange(1, means.shape[1] + 1, device=means.device)[:, None, None]


class _Hashes(NamedTuple):
    """Hash tokens by the sides of planes on which they lie; planes: (head_dim, hashes * num_bits)."""

    planes: Tensor
    num_bits: int

    @property
    def buckets(self) -> int:
        return 2**self.num_bits

    def weights(self, x: Tensor, centre: Tensor, weight: Tensor) -> Tensor:
        """Return, for each block, the summed `weight`, (B or 1, blocks, H or 1, T), of its tokens x, (B, blocks, T, H,
        D), in each bucket, (B, H, blocks, hashes * buckets). Tokens are hashed by their sides of planes through
        `centre`, (B, blocks or 1, H, D)."""
        planes, num_bits = self
        batch, blocks, tokens, heads, _ = x.shape
        weight = weight.expand(batch, blocks, heads, tokens)
        flat = x.flatten(1, 2)
        if is_compiled(flat):
            return compiled.buckets(flat, centre, planes, weight, num_bits)

        signs = ((x.to(planes.dtype) - centre[:, :, None]) @ planes).gt_(0)
        power = 2.0 ** torch.arange(num_bits, device=planes.device, dtype=planes.dtype)
        code = (signs.unflatten(-1, (-1, num_bits)) @ power).long().transpose(2, 3)  # (B, blocks, H, T, hashes)
        code += torch.arange(code.shape[-1], device=code.device) * self.buckets
        found = weight.new_zeros(batch, blocks, heads, planes.shape[1] // num_bits * self.buckets)
        return found.scatter_add_(3, code.flatten(3), weight.repeat_interleave(code.shape[-1], 3)).transpose(1, 2)
