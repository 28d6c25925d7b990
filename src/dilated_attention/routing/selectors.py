"""Choose the blocks with the largest estimated shares: a given number, or up to a given mass, in one stage or two."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from numbers import Real
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention import checks
from dilated_attention.layout import BlockLayout
from dilated_attention.layout.spans import BlockSize, check_share
from dilated_attention.ranking import stable_topk
from dilated_attention.routing.estimates import QUERY_PARTS, Sample, estimated_shares, listed_shares, pooled, shares
from dilated_attention.routing.forecast import Forecast
from dilated_attention.routing.grid import ALWAYS, Candidates, Keys, Options, Queries, candidates, ranked
from dilated_attention.routing.operator import selector

if TYPE_CHECKING:
    from typing_extensions import Unpack


@selector
def topk_blocks(q: Queries, k: Keys, density: float, **options: Unpack[Options]) -> BlockLayout:
    """Choose the key blocks with the largest estimated shares of a query block's softmax, a fixed part of those
    visible.

    A query block that can see n key blocks gets max(floor, round(density * n)) of them, or all n if there are fewer.
    The blocks of the diagonal count among them and are taken first, all of them even if that makes more. When causal, a
    partial last query block chooses as many blocks before the diagonal as if it were whole.

    The package docstring of `routing` describes the estimate. When causal, the estimate is made from queries up to
    the block's first one, and the shares are forecast from it, as described there.

    Args:
        density: the share of the visible blocks that is kept, in (0, 1].
        block_size: tokens per block, or a pair (q_block, k_block).
        is_causal: choose only among earlier blocks, without looking at later tokens.
        scale: the factor of the scores; default 1 / sqrt(head_dim).
        keep_diagonal: without causality, also always list the key blocks that hold the query block's own tokens.
        floor: the least number of blocks per row.
        per_kv_head: make one list for all query heads that share a KV head, by the mean of their shares.

    Examples:
        >>> from dilated_attention.routing import topk_blocks
        >>> q, k = torch.ones(1, 64, 1, 8), torch.zeros(1, 64, 1, 8)
        >>> k[:, 16:32] = 2.0  # the keys of block 1 get nearly all the attention
        >>> layout = topk_blocks(q, k, density=0.5, block_size=16)
        >>> layout.dense_blocks()[0, 0, :, 1]  # each of the 4 query blocks sees block 1
        tensor([True, True, True, True])
    """
    grid = candidates(q, k, **options)
    return largest_shares(q, k, density, grid, estimated_shares(pooled(q, k, grid), grid))


def largest_shares(
    q: Tensor, k: Tensor, density: float, grid: Candidates, found: Iterable[tuple[slice, Tensor]], *,
    lookahead: bool = False,
) -> BlockLayout:  # fmt: skip
    """Choose as `topk_blocks` does, from consecutive slices of query blocks with their estimated shares. When causal,
    shares are forecast from these, but not with `lookahead`, where they describe the block's own queries."""
    budget = grid.budget(density)
    if lookahead or not grid.is_causal:
        return grid.layout_of((at, share, budget[at]) for at, share in found)
    forecast = Forecast(q, k, grid)
    return grid.layout_of((at, forecast(at, share, budget[at]), budget[at]) for at, share in found)


@selector
def sampled_blocks(
    q: Queries, k: Keys, density: float, *, queries: int = 4, lookahead: bool = False, **options: Unpack[Options]
) -> BlockLayout:
    """Choose the blocks with the largest shares of the exact softmax of a few queries per query block.

    Each query block gets as many key blocks as in `topk_blocks`. share(i, J) is the softmax over all keys, summed over
    key block J, averaged over `queries` equally spaced queries of block i. When causal, the queries are spaced over the
    q_block queries that end at the block's first one. They see the key blocks that block i may choose, and the shares
    serve as the estimate of the forecast in the package docstring of `routing`. Everything else is as in `topk_blocks`.

    Use it where the queries of a block look for different keys, which a mean of queries blurs. It computes
    queries / q_block of all scores.

    Args:
        queries: the number of queries per query block, at most q_block.
        lookahead: when causal, take the block's own queries, and no forecast. The attention stays causal, but the
            blocks that a token sees then depend on up to q_block - 1 later tokens. So use it for a prompt that is there
            as a whole, not for training. Without `is_causal` the queries are always the block's own.

    Examples:
        >>> from dilated_attention.routing import sampled_blocks
        >>> q, k = torch.ones(1, 64, 1, 8), torch.zeros(1, 64, 1, 8)
        >>> k[:, 16:32] = 2.0  # the keys of block 1 get nearly all the attention
        >>> layout = sampled_blocks(q, k, density=0.5, block_size=16)
        >>> layout.dense_blocks()[0, 0, :, 1]  # each of the 4 query blocks sees block 1
        tensor([True, True, True, True])
    """
    grid = candidates(q, k, **options)
    queries = checks.integer("queries", queries, 1, grid.q_block)
    checks.boolean("lookahead", lookahead)
    number = torch.arange(queries, device=grid.device)
    first = grid.first_query[:, None]
    if grid.is_causal and not lookahead:
        tokens = (first - number * grid.q_block // queries).clamp(min=0)
    else:
        length = (grid.seq_len - first).clamp(max=grid.q_block)
        tokens = first + (number * length + length // 2) // queries
    weight = torch.full(tokens.shape, 1 / queries, dtype=grid.dtype, device=grid.device)
    sample = Sample(q[:, tokens.flatten()], weight, k, grid.k_block, grid.scale)
    return largest_shares(q, k, density, grid, estimated_shares(sample, grid), lookahead=lookahead)


@selector
def topp_blocks(q: Queries, k: Keys, mass: float, **options: Unpack[Options]) -> BlockLayout:
    """Choose the fewest key blocks whose estimated shares of the query block's softmax sum to at least `mass`, in (0,
    1].

    When causal, the shares are those of a softmax over the blocks before the diagonal alone, and the blocks of the
    diagonal are listed in addition. Other arguments are as in `topk_blocks`.

    Examples:
        >>> from dilated_attention.routing import topp_blocks
        >>> q, k = torch.ones(1, 64, 1, 8), torch.zeros(1, 64, 1, 8)
        >>> k[:, 16:32] = 2.0  # the keys of block 1 get nearly all the attention
        >>> layout = topp_blocks(q, k, mass=0.9, block_size=16)
        >>> layout.dense_blocks()[0, 0, :, 1]  # each of the 4 query blocks sees block 1
        tensor([True, True, True, True])
    """
    check_share("mass", mass)
    grid = candidates(q, k, **options)
    least = grid.least()
    forecast = Forecast(q, k, grid) if grid.is_causal else None

    def fewest(at: slice, share: Tensor) -> Tensor:
        ordered = ranked(share, grid.allowed[at], grid.always[at]).sort(dim=-1, descending=True).values
        must = ordered >= ALWAYS
        part = torch.where(must, ordered - ALWAYS, ordered).clamp_(min=0)
        before = part.cumsum(-1) - part
        wanted = must | ((before < mass) & (part > 0))
        return torch.maximum(wanted.sum(-1), least[at])

    def rows() -> Iterator[tuple[slice, Tensor, Tensor]]:
        for at, share in estimated_shares(pooled(q, k, grid), grid):
            if forecast is not None:
                share = forecast(at, share, fewest(at, share))
            yield at, share, fewest(at, share)

    return grid.layout_of(rows())


@selector
def hierarchical_blocks(
    q: Queries,
    k: Keys,
    density: float,
    *,
    block_size: BlockSize = 128,
    region: int = 8,
    breadth: float = 4.0,
    is_causal: bool = False,
    scale: float | None = None,
    floor: int = 1,
) -> BlockLayout:
    """Choose blocks in two stages: coarse shares choose regions of `region` x `region` blocks, finer shares choose
    blocks inside them.

    If q_block and k_block differ, a region has `region` times their least common multiple of tokens on each side.

    A query region looks into its own key region and those with the largest shares, which together hold `breadth` times
    the tokens that `density` keeps. From the blocks of these regions, each query block keeps as many as in
    `topk_blocks`; the diagonal is always listed. Computing the scores costs 1 / region + breadth * density times as
    much as in `topk_blocks`. When causal, the estimate, from queries up to the block's first, is used as it is: unlike
    in `topk_blocks`, shares are not forecast from it. Other arguments are as in `topk_blocks`.

    The number of regions depends on the length of the whole sequence. So when causal, a choice never depends on the
    values of later tokens, but it does depend on how many there are: a prefix alone may get another choice.

    Examples:
        >>> from dilated_attention.routing import hierarchical_blocks
        >>> q, k = torch.ones(1, 64, 1, 8), torch.zeros(1, 64, 1, 8)
        >>> k[:, 16:32] = 2.0  # the keys of block 1 get nearly all the attention
        >>> layout = hierarchical_blocks(q, k, density=0.5, region=2, block_size=16)
        >>> layout.dense_blocks()[0, 0, :, 1]  # each of the 4 query blocks sees block 1
        tensor([True, True, True, True])
    """
    region = checks.positive("region", region)
    if not isinstance(breadth, Real) or not breadth >= 1:
        raise ValueError(f"breadth must be at least 1, got {breadth!r}")
    grid = candidates(q, k, block_size=block_size, is_causal=is_causal, scale=scale, floor=floor)
    budget = grid.budget(density)
    most = int(budget.max())
    side = region * math.lcm(grid.q_block, grid.k_block)
    coarse = replace(grid, q_block=side, k_block=side)
    regions = coarse.columns
    inner_q = side // grid.q_block
    inner_k = side // grid.k_block
    wide = min(regions, max(math.ceil(min(breadth * density, 1) * regions), math.ceil(most / inner_k) + 1))

    sample = pooled(q, k, grid)
    parts = sample.weight.shape[1]
    # a region's queries: the mean ones of QUERY_PARTS of its blocks; causal: of as many blocks up to its first
    behind = inner_q - 1 if is_causal else 0
    means = torch.einsum("biahd,ia->bihd", sample.query.unflatten(1, (-1, parts)), sample.weight)
    means = F.pad(means, (0, 0, 0, 0, behind, regions * inner_q - grid.rows))[:, : regions * inner_q]
    number = torch.arange(-behind, regions * inner_q - behind, device=grid.device)
    real = ((number >= 0) & (number < grid.rows)).view(regions, inner_q).to(grid.dtype)
    skip = max(1, inner_q // QUERY_PARTS)
    some = slice(behind % skip, None, skip)
    means = means.unflatten(1, (regions, inner_q))[:, :, some].flatten(1, 2)
    real = real[:, some]
    coarse_sample = sample._replace(query=means, weight=real / real.sum(-1, keepdim=True))
    first_row = torch.arange(regions, device=grid.device) * inner_q
    seen = (grid.choices[first_row] * sample.peaks)[:, None].expand(real.shape)

    def rows() -> Iterator[tuple[slice, Tensor, Tensor]]:
        for at, share in shares(coarse_sample, seen, grid.columns):
            share = F.pad(share, (0, regions * inner_k - grid.columns)).unflatten(3, (regions, inner_k)).sum(-1)
            near = stable_topk(ranked(share, coarse.allowed[at], coarse.always[at]), wide)[1].sort(-1).values
            candidate = (near[..., None] * inner_k + torch.arange(inner_k, device=grid.device)).flatten(3)

            inside = slice(at.start * inner_q, min(at.stop * inner_q, grid.rows))
            for some, fine in listed_shares(sample, grid.choices, candidate, inside, inner_q):
                begin = some.start - inside.start
                here = candidate.repeat_interleave(inner_q, 2)[:, :, begin : begin + fine.shape[2]]
                share = fine.new_full((*fine.shape[:3], regions * inner_k), -1.0).scatter_(3, here, fine)
                yield some, share[..., : grid.columns], budget[some]

    return grid.layout_of(rows())


def density_schedule(seq_len: int, *, dense_until: int = 4096, exponent: float = 0.5) -> float:
    """Return a density that falls with the sequence length: min(1, (dense_until / seq_len) ** exponent).

    Up to `dense_until` tokens this is dense. Beyond, the number of keys per query grows as seq_len ** (1 -
    exponent).

    An exponent of 1 keeps the number of keys per query constant, an exponent of 0 the density.

    Examples:
        >>> from dilated_attention.routing import density_schedule
        >>> [density_schedule(n) for n in (1024, 4096, 16384, 65536)]
        [1.0, 1.0, 0.5, 0.25]
    """
    seq_len = checks.positive("seq_len", seq_len)
    dense_until = checks.positive("dense_until", dense_until)
    if not isinstance(exponent, Real) or not 0 <= exponent <= 1:
        raise ValueError(f"exponent must lie in [0, 1], got {exponent!r}")
    return min(1.0, (dense_until / seq_len) ** exponent)
