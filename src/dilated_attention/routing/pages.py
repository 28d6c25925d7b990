"""Blocks by an upper bound on the scores of pages of keys, for decoding with a cache and for whole sequences."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dilated_attention import checks
from dilated_attention.kernels.cpu import estimates as compiled
from dilated_attention.layout import BlockLayout
from dilated_attention.layout.spans import BlockSize
from dilated_attention.ranking import stable_topk
from dilated_attention.routing.estimates import Sample, in_blocks, is_compiled, pooled_queries
from dilated_attention.routing.grid import Candidates, Keys, Queries, candidates, selector
from dilated_attention.routing.selectors import largest_shares


@selector
def page_bounds(
    q: Queries,
    k: Keys,
    density: float,
    *,
    page_size: int = 16,
    block_size: BlockSize = 128,
    is_causal: bool = False,
    scale: float | None = None,
    keep_diagonal: bool = True,
    floor: int = 1,
    per_kv_head: bool = False,
) -> BlockLayout:
    """As many blocks as `topk_blocks`, by upper bounds of the scores in pages of keys (Quest, arXiv:2406.10774).

    For a page of keys with least and greatest components low and high,

        max_{k in page} q·k  <=  Σ_d max(q_d low_d, q_d high_d).

    share(i, J) is the mean over the pooled queries of block i of the softmax of the bound over all pages, summed over
    the pages of J. A bound can lie far above every score, the more so in large pages. To decode a token at a time with
    a cache, as the paper does, see `PageBounds`.

    Args:
        page_size: divides the size of a key block.

    All else as in `topk_blocks`.
    """
    grid = candidates(q, k, block_size, is_causal, keep_diagonal, floor, scale)
    page_size = checks.positive("page_size", page_size)
    if grid.k_block % page_size:
        raise ValueError(f"page_size={page_size} must divide the size of a key block, {grid.k_block}")
    return largest_shares(q, k, density, grid, sample=_pages(q, k, grid, page_size), group=per_kv_head)


class PageBounds:
    """The least and greatest components of each page's keys, kept up to date as keys come, for decoding.

    `append` takes the keys of new tokens; `best` returns the pages that a query should see, by the bound of
    `page_bounds`; `decoding.listed_attention` reads only those. Two rows are held per page.

    Raises ValueError where keys are not of the batch, heads, head_dim and dtype of those before, or a query not theirs.

    Attributes:
        seq_len: tokens so far.
    """

    def __init__(self, page_size: int = 16) -> None:
        self.page_size, self.seq_len, self.pages = checks.positive("page_size", page_size), 0, 0
        self.bounds: Tensor | None = None  # (batch, kv_heads, room, 2 * head_dim): greatest, least

    @torch.no_grad()
    def append(self, k: Float[Tensor, "batch new kv_heads head_dim"]) -> None:
        if k.dim() != 4 or not k.is_floating_point():
            raise ValueError(
                f"k must be a floating (batch, new, kv_heads, head_dim); got {k.dtype} of shape {tuple(k.shape)}"
            )
        if self.bounds is not None:
            batch, kv_heads, _, width = self.bounds.shape
            mine = (batch, kv_heads, width // 2, self.bounds.dtype)
            if mine != (k.shape[0], k.shape[2], k.shape[3], k.dtype):
                raise ValueError(
                    f"k must have the batch, kv_heads, head_dim and dtype of the keys before it, {mine}; got {k.dtype} "
                    f"of shape {tuple(k.shape)}"
                )
        held = self.seq_len % self.page_size
        pages = -(-(self.seq_len + k.shape[1]) // self.page_size)
        if self.bounds is None or pages > self.bounds.shape[2]:
            with torch.inference_mode(False):  # else only inference mode could add to it
                grown = k.new_empty(k.shape[0], k.shape[2], 2 * pages, 2 * k.shape[3])
            if self.bounds is not None:
                grown[:, :, : self.pages] = self.bounds[:, :, : self.pages]
            self.bounds = grown
        fresh = _extremes(F.pad(k, (0, 0, 0, 0, held, 0)), self.page_size, held).transpose(1, 2)
        first = self.pages - (held > 0)
        if held:  # the open page
            head_dim, open_page = k.shape[3], self.bounds[:, :, first]
            fresh[:, :, 0, :head_dim] = torch.maximum(fresh[:, :, 0, :head_dim], open_page[..., :head_dim])
            fresh[:, :, 0, head_dim:] = torch.minimum(fresh[:, :, 0, head_dim:], open_page[..., head_dim:])
        self.bounds[:, :, first:pages] = fresh
        self.seq_len, self.pages = self.seq_len + k.shape[1], pages

    @torch.no_grad()
    def best(self, q: Float[Tensor, "batch 1 heads head_dim"], number: int) -> Int[Tensor, "batch heads chosen"]:
        """The `number` pages with the largest bounds for each head, always including the newest; or all there are."""
        number = checks.positive("number", number)
        if self.bounds is None:
            raise ValueError("no keys to choose among; append those of the tokens so far")
        batch, kv_heads, _, width = self.bounds.shape
        if q.dim() != 4 or (*q.shape[:2], 2 * q.shape[3]) != (batch, 1, width) or q.shape[2] % kv_heads:
            raise ValueError(
                f"q must be the newest token's query, (batch, 1, heads, head_dim), of a batch of {batch}, a multiple "
                f"of {kv_heads} heads and head_dim {width // 2}; got shape {tuple(q.shape)}"
            )
        dtype = torch.promote_types(q.dtype, torch.float32)
        key = self.bounds[:, :, : self.pages].to(dtype)
        with torch.autocast(q.device.type, enabled=False):
            bound = (_signed(q[:, 0].to(dtype)).unflatten(1, (key.shape[1], -1)) @ key.mT).flatten(1, 2)
        bound[..., -1] = torch.inf
        return stable_topk(bound, min(number, self.pages))[1]


def _signed(q: Tensor) -> Tensor:
    """q as the bound's factor of (greatest, least): positive parts, negative parts."""
    return torch.cat([q.clamp(min=0), q.clamp(max=0)], -1)


def _extremes(x: Tensor, page: int, skip: int = 0) -> Tensor:
    """(B, N, H, D) -> greatest and least of each page, (B, pages, H, 2 D), without the first `skip` tokens."""
    starts = torch.arange(0, x.shape[1], page, device=x.device)
    if is_compiled(x):
        return compiled.extremes(x, starts.clamp(min=skip), (starts + page).clamp(max=x.shape[1])).to(x.dtype)
    pages = in_blocks(x, page)
    token = torch.arange(pages.shape[1] * page, device=x.device).view(-1, page, 1, 1)
    none = (token < skip) | (token >= x.shape[1])
    high = pages.masked_fill(none, -torch.inf).amax(2)
    low = pages.masked_fill(none, torch.inf).amin(2)
    return torch.cat([high, low], -1)


def _pages(q: Tensor, k: Tensor, grid: Candidates, page_size: int) -> Sample:
    query, weight = pooled_queries(q, grid)
    bounds = _extremes(k, page_size).to(grid.dtype)
    peaks = grid.k_block // page_size
    return Sample(_signed(query * grid.scale).flatten(1, 2), weight, bounds, peaks, 1.0)
