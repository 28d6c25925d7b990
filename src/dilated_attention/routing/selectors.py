"""The blocks with the largest estimated shares: a given number, or up to a given mass, in one stage or two."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention import checks
from dilated_attention.layout import BlockLayout
from dilated_attention.layout.spans import BlockSize, check_share
from dilated_attention.ranking import stable_topk
from dilated_attention.routing.estimates import (
    QUERY_PARTS,
    Sample,
    estimated_shares,
    listed_shares,
    pooled,
    shares,
)
from dilated_attention.routing.forecast import Forecast
from dilated_attention.routing.grid import (
    ALWAYS,
    Candidates,
    Keys,
    Queries,
    candidates,
    ranked,
    selector,
)


@selector
def topk_blocks(
    q: Queries,
    k: Keys,
    density: float,
    *,
    block_size: BlockSize = 128,
    is_causal: bool = False,
    scale: float | None = None,
    keep_diagonal: bool = True,
    floor: int = 1,
    per_kv_head: bool = False,
) -> BlockLayout:
    """Choose the round(density * n) of a query block's n key blocks with the largest estimated shares of its softmax.

    Every row has max(floor, round(density * n)) blocks, or all that it can see; the diagonal counts among them and
    comes first. When causal, a partial last query block chooses as many blocks before the diagonal as if it were whole.
    `per_kv_head`: one list for all query heads that share a KV head, by their mean share.
    """
    grid = candidates(q, k, block_size, is_causal, keep_diagonal, floor, scale)
    return largest_shares(q, k, density, grid, sample=pooled(q, k, grid), group=per_kv_head)


def largest_shares(
    q: Tensor, k: Tensor, density: float, grid: Candidates, *, sample: Sample, group: bool
) -> BlockLayout:
    """Choose as `topk_blocks` does; `sample` stands for the tokens of the blocks in the estimate."""
    budget = grid.budget(density)
    forecast = Forecast(q, k, grid, group=group) if grid.is_causal else None
    return grid.layout_of(
        (at, share if forecast is None else forecast(at, share, budget[at]), budget[at])
        for at, share in estimated_shares(sample, grid, group=group)
    )


@selector
def topp_blocks(
    q: Queries,
    k: Keys,
    mass: float,
    *,
    block_size: BlockSize = 128,
    is_causal: bool = False,
    scale: float | None = None,
    keep_diagonal: bool = True,
    floor: int = 1,
    per_kv_head: bool = False,
) -> BlockLayout:
    """The fewest key blocks whose estimated shares of the query block's softmax sum to at least `mass`, in (0, 1].

    When causal, the shares are of the softmax over the blocks before the diagonal, and the diagonal comes on top.
    """
    check_share("mass", mass)
    grid = candidates(q, k, block_size, is_causal, keep_diagonal, floor, scale)
    least = grid.least()

    forecast = Forecast(q, k, grid, group=per_kv_head) if is_causal else None

    def fewest(at: slice, share: Tensor) -> Tensor:
        ordered = ranked(share, grid.allowed[at], grid.always[at]).sort(dim=-1, descending=True).values
        must = ordered >= ALWAYS
        part = torch.where(must, ordered - ALWAYS, ordered).clamp_(min=0)
        before = part.cumsum(-1) - part
        return torch.maximum((must | (before < mass) & (part > 0)).sum(-1), least[at])

    def rows() -> Iterator[tuple[slice, Tensor, Tensor]]:
        for at, share in estimated_shares(pooled(q, k, grid), grid, group=per_kv_head):
            share = share if forecast is None else forecast(at, share, fewest(at, share))
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
    """Two stages: coarse shares choose regions of `region` blocks per side, finer shares choose blocks within them.

    A query region looks into the key regions with the largest shares, including its own, that together hold `breadth`
    times the tokens that `density` keeps. From their blocks, each of its query blocks keeps as many as in
    `topk_blocks`. The scores cost 1 / region + breadth * density of those of `topk_blocks`.

    How many regions a query region looks into follows the length of the whole sequence. So when causal, what is chosen
    for given tokens never depends on the values of later ones, but on how many there are: a prefix alone may get
    another choice.
    """
    region = checks.positive("region", region)
    if not breadth >= 1:
        raise ValueError(f"breadth must be at least 1, got {breadth}")
    grid = candidates(q, k, block_size, is_causal, True, floor, scale)
    budget = grid.budget(density)
    most = int(budget.max())
    side = region * math.lcm(grid.q_block, grid.k_block)
    coarse = replace(grid, q_block=side, k_block=side)
    regions, inner_q, inner_k = coarse.columns, side // grid.q_block, side // grid.k_block
    wide = min(regions, max(math.ceil(breadth * density * regions), math.ceil(most / inner_k) + 1))

    sample = pooled(q, k, grid)
    parts, peaks = sample.weight.shape[1], sample.peaks
    # a region's queries: the mean ones of QUERY_PARTS of its blocks; causal: of as many blocks up to its first
    behind = inner_q - 1 if is_causal else 0
    means = torch.einsum("biahd,ia->bihd", sample.query.unflatten(1, (-1, parts)), sample.weight)
    means = F.pad(means, (0, 0, 0, 0, behind, regions * inner_q - grid.rows))[:, : regions * inner_q]
    number = torch.arange(-behind, regions * inner_q - behind, device=grid.device)
    real = ((number >= 0) & (number < grid.rows)).view(regions, inner_q).to(grid.dtype)
    skip = max(1, inner_q // QUERY_PARTS)
    some = slice(behind % skip, None, skip)
    means, real = means.unflatten(1, (regions, inner_q))[:, :, some].flatten(1, 2), real[:, some]
    coarse_sample = sample._replace(query=means, weight=real / real.sum(-1, keepdim=True))
    first_row = torch.arange(regions, device=grid.device) * inner_q
    seen = (grid.choices[first_row] * peaks)[:, None].expand(real.shape)

    def rows() -> Iterator[tuple[slice, Tensor, Tensor]]:
        for at, share in shares(coarse_sample, seen, grid.columns):
            share = F.pad(share, (0, regions * inner_k - grid.columns)).unflatten(3, (regions, inner_k)).sum(-1)
            near = stable_topk(ranked(share, coarse.allowed[at], coarse.always[at]), wide)[1].sort(-1).values
            candidate = (near[..., None] * inner_k + torch.arange(inner_k, device=grid.device)).flatten(3)
            inside = slice(at.start * inner_q, min(at.stop * inner_q, grid.rows))
            for some, fine in listed_shares(sample, grid.choices, candidate, inside, inner_q):
                here = candidate.repeat_interleave(inner_q, 2)[:, :, some.start - inside.start :][:, :, : fine.shape[2]]
                share = fine.new_full((*fine.shape[:3], regions * inner_k), -1.0).scatter_(3, here, fine)
                yield some, share[..., : grid.columns], budget[some]

    return grid.layout_of(rows())


def density_schedule(seq_len: int, *, dense_until: int = 4096, exponent: float = 0.5) -> float:
    """min(1, (dense_until / seq_len) ** exponent): dense at first, then ∝ seq_len ** (1 - exponent) keys per query.

    An exponent of 1 keeps the number of keys per query constant, an exponent of 0 the density.
    """
    seq_len, dense_until = checks.positive("seq_len", seq_len), checks.positive("dense_until", dense_until)
    if not 0 <= exponent <= 1:
        raise ValueError(f"exponent must lie in [0, 1], got {exponent}")
    return min(1.0, (dense_until / seq_len) ** exponent)
