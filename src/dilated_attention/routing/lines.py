"""Choose blocks on the columns and diagonals that carry a head's attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dilated_attention.layout import BlockLayout
from dilated_attention.ranking import slices
from dilated_attention.routing.estimates import Sample, shares
from dilated_attention.routing.grid import Candidates, Keys, Options, Queries, candidates
from dilated_attention.routing.operator import selector

if TYPE_CHECKING:
    from typing_extensions import Unpack

KEPT = 0.9  # lost less of a small language model's attention than 1, 0.7 and 0.4 (docs/notebook.md)


@selector
def vertical_slash(q: Queries, k: Keys, density: float, **options: Unpack[Options]) -> BlockLayout:
    """Choose the blocks on the heaviest columns and diagonals (MInference, arXiv:2407.02490).

    Each query block gets as many key blocks as in `topk_blocks`.

    With p_i(J) the softmax of the first query of block i over all keys, summed over key block J, and b_i the key block
    that this query lies in,

        vertical(J) = mean_i p_i(J),  slash(δ) = mean_i p_i(b_i - δ),  score(i, J) = max(vertical(J), slash(b_i - J)),

    with means over the i for which the block exists. A threshold on the score lists whole columns and whole
    diagonals, in the proportion in which the head uses them. It is set so that each row gets its number of blocks.

    When causal, the softmax is over the keys up to the query, and the means for block i are over the blocks up to i,
    each weighing `KEPT` times as much as the next. The paper uses the last queries of the prompt for all rows, so its
    lists depend on later tokens. Everything else is as in `topk_blocks`.

    Examples:
        >>> from dilated_attention.routing import vertical_slash
        >>> q, k = torch.ones(1, 64, 1, 8), torch.zeros(1, 64, 1, 8)
        >>> k[:, 16:32] = 2.0  # the keys of block 1 get nearly all the attention
        >>> layout = vertical_slash(q, k, density=0.5, block_size=16)
        >>> layout.dense_blocks()[0, 0, :, 1]  # each of the 4 query blocks sees block 1
        tensor([True, True, True, True])
    """
    grid = candidates(q, k, **options)
    budget = grid.budget(density)
    return grid.layout_of((at, score, budget[at]) for at, score in line_scores(q, k, grid))


def line_scores(q: Tensor, k: Tensor, grid: Candidates) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of rows (query blocks), in order, with score(i, J) of `vertical_slash`, (B, H, rows of the slice,
    columns): the larger of the mean shares on key block J's column and on the diagonal through (i, J)."""
    own = grid.first_query // grid.k_block
    last = grid.columns - 1
    column = torch.arange(grid.columns, device=grid.device)
    offsets = grid.columns if grid.is_causal else 2 * grid.columns - 1  # diagonals: b_i - J + (0 or last)
    shift = 0 if grid.is_causal else last
    sums: tuple[Tensor, ...] = ()
    weight = torch.zeros(grid.columns, dtype=grid.dtype, device=grid.device)
    for at, share in _shares(q, k, grid):
        if not sums:
            sums = share.new_zeros(*share.shape[:2], 1, grid.columns), share.new_zeros(*share.shape[:2], 1, offsets)
        diagonal = own[at, None] - column + shift
        exists = diagonal >= 0
        slash = share.new_zeros(*share.shape[:3], offsets)
        slash.scatter_add_(3, diagonal.clamp(min=0).expand(share.shape), share.masked_fill(~exists, 0.0))
        if not grid.is_causal:
            sums = sums[0] + share.sum(2, keepdim=True), sums[1] + slash.sum(2, keepdim=True)
            continue
        for i in range(at.stop - at.start):  # columns and diagonals exist as soon as a row reaches them
            weight = KEPT * weight + exists[i]
            sums = tuple(KEPT * total + x[:, :, i : i + 1] for total, x in zip(sums, (share, slash), strict=True))
            share[:, :, i], slash[:, :, i] = (total[:, :, 0] / weight.clamp(min=1) for total in sums)
        slash = slash.gather(3, diagonal.clamp(min=0).expand(share.shape))
        yield at, torch.maximum(share, slash).masked_fill_(~exists, 0.0)
    if not grid.is_causal:
        reach = torch.arange(offsets, device=grid.device) - last
        low, high = reach.clamp(min=0), reach.clamp(max=0) + last  # b_i must lie between them
        number = torch.searchsorted(own, high, right=True) - torch.searchsorted(own, low)
        vertical, slash = sums[0] / grid.rows, sums[1] / number.clamp(min=1)
        for at in slices(0, grid.rows, vertical.numel()):
            diagonal = (own[at, None] - column + last).expand(*vertical.shape[:2], -1, -1)
            yield at, torch.maximum(vertical, slash.expand(-1, -1, diagonal.shape[2], -1).gather(3, diagonal))


def _shares(q: Tensor, k: Tensor, grid: Candidates) -> Iterator[tuple[slice, Tensor]]:
    """Yield (slice of query blocks, p_i(J) for these i, (B, H, blocks of the slice, columns)). p_i(J) is the softmax of
    the first query of query block i, summed over key block J."""
    weight = torch.ones(grid.rows, 1, dtype=grid.dtype, device=grid.device)
    first = grid.first_query[:, None]
    seen = first + 1 if grid.is_causal else torch.full_like(first, grid.seq_len)
    sample = Sample(q[:, :: grid.q_block], weight, k, grid.k_block, grid.scale)
    for at, share in shares(sample, seen, grid.columns):
        yield at, grid.by_list(share)
