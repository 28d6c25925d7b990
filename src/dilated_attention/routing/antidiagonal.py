"""Choose blocks by the sums of scores along antidiagonals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dilated_attention import checks
from dilated_attention.layout import BlockLayout
from dilated_attention.routing.estimates import Sample, estimated_shares
from dilated_attention.routing.grid import Candidates, Keys, Options, Queries, candidates
from dilated_attention.routing.operator import selector
from dilated_attention.routing.selectors import largest_shares

if TYPE_CHECKING:
    from typing_extensions import Unpack


@selector
def antidiagonal_blocks(
    q: Queries, k: Keys, density: float, *, stride: int = 16, **options: Unpack[Options]
) -> BlockLayout:
    """Choose the blocks with the largest antidiagonal sums of scores (XAttention, arXiv:2503.16428).

    Each query block gets as many key blocks as in `topk_blocks`.

    Queries and keys are cut into pieces of `stride` tokens, x and y. The scores of x and y form a square. The mean
    along its antidiagonal, which crosses every column and diagonal, is

        s(x, y) = scale / stride Σ_i q_{x, stride - 1 - i} · k_{y, i}.

    share(i, J) is the softmax of s(x, ·) over all pieces, summed over the pieces of key block J, and averaged over the
    pieces x of query block i. Every query and key is read, but only 1 / stride² of the scores is formed. Tokens past
    the end are zeros. CPUs with AVX512-VNNI multiply pieces that are rounded to 1/127 of their largest number.

    Args:
        stride: the number of tokens per piece; it must divide both block sizes. Computing all scores instead would
            take about `stride` times as long.

    When causal, the pieces x are cut from the q_block queries that end at the block's first query, and the shares serve
    as the estimate of the forecast in the package docstring of `routing`. Everything else is as in `topk_blocks`.

    Examples:
        >>> from dilated_attention.routing import antidiagonal_blocks
        >>> q, k = torch.ones(1, 64, 1, 8), torch.zeros(1, 64, 1, 8)
        >>> k[:, 16:32] = 2.0  # the keys of block 1 get nearly all the attention
        >>> layout = antidiagonal_blocks(q, k, density=0.5, stride=4, block_size=16)
        >>> layout.dense_blocks()[0, 0, :, 1]  # each of the 4 query blocks sees block 1
        tensor([True, True, True, True])
    """
    grid = candidates(q, k, **options)
    stride = checks.positive("stride", stride)
    if grid.q_block % stride or grid.k_block % stride:
        raise ValueError(f"stride={stride} must divide both block sizes, {grid.q_block} and {grid.k_block}")
    return largest_shares(q, k, density, grid, estimated_shares(_pieces(q, k, grid, stride), grid))


def _pieces(q: Tensor, k: Tensor, grid: Candidates, stride: int) -> Sample:
    rows, parts = grid.rows, grid.q_block // stride
    if grid.is_causal:  # block i has the queries that end at its first one, the first block none
        rows -= 1
        q = q[:, 1 : 1 + rows * grid.q_block]

    def weights(grid: Candidates) -> Tensor:
        first = torch.arange(0, rows * grid.q_block, stride, device=grid.device).view(rows, parts)
        weight = (first < q.shape[1]).to(grid.dtype)
        return weight / weight.sum(-1, keepdim=True)

    weight = grid.once(("pieces", stride), weights)
    peaks = grid.k_block // stride
    return Sample(q, weight, k, peaks, grid.scale / stride, joined=stride)
