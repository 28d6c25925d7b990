"""Describe which key blocks a query block may choose, which it always lists, and how many it keeps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch
from jaxtyping import Float
from torch import Tensor

from dilated_attention import checks
from dilated_attention.cache import derived, plan_cache
from dilated_attention.kernels.cpu import estimates as compiled
from dilated_attention.layout import BlockLayout
from dilated_attention.layout.spans import BlockGrid, BlockSize, check_share
from dilated_attention.ranking import stable_topk

ALWAYS = 4.0  # added to the share of a block that is always listed; shares lie in [0, 2)
Queries = Float[Tensor, "batch seq heads head_dim"]
Keys = Float[Tensor, "batch seq kv_heads head_dim"]
Blocks = Float[Tensor, "batch heads query_blocks key_blocks"]


class Options(TypedDict, total=False):
    """Name the options that all selectors by shares have, as `topk_blocks` explains them."""

    block_size: BlockSize
    is_causal: bool
    scale: float | None
    keep_diagonal: bool
    floor: int
    per_kv_head: bool


def is_compiled(*tensors: Tensor) -> bool:
    """Return whether the compiled library can compute with these tensors: plain CPU tensors of one dtype that it
    `serves`, outside graphs and torch.func, and without a gradient to record."""
    learned = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return not learned and checks.readable(*tensors) and compiled.serves(*tensors)


@dataclass(frozen=True, eq=False)
class Candidates(BlockGrid):
    """Describe the query blocks of one call: which key blocks each may choose (`allowed`) and always lists (`always`).

    `keep_diagonal`: always list the blocks of a query block's own tokens. `floor` is the least number of blocks per
    query block, `scale` the factor of the scores, `dtype` the shares' dtype. `kv_heads`: make one list for all query
    heads of each of these KV heads; None: make one per query head. `made`: what `once` has computed.
    """

    keep_diagonal: bool
    floor: int
    scale: float  # of the scores
    dtype: torch.dtype  # of shares
    device: torch.device
    kv_heads: int | None = None
    made: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def nbytes(self) -> int:
        """Return an upper estimate, in bytes."""
        return 4096 + 1024 * (self.rows + self.columns) + 2 * self.rows * self.columns

    def once(self, key: Hashable, make: Callable[[Candidates], Any]) -> Any:
        """Return `make(self)`, computed in the first call with this key. Nobody may write to it."""
        found = self.made.get(key)
        if found is None:
            if len(self.made) >= 32:  # a schedule has many
                self.made.clear()
            found = make(self)
            self.made[key] = found
        return found

    def by_list(self, share: Tensor) -> Tensor:
        """Return the shares (B, H, rows, columns) of heads as those of lists: the mean over the heads of a list."""
        if self.kv_heads is None:
            return share
        return share.unflatten(1, (self.kv_heads, -1)).mean(2)

    @derived
    def first_query(self) -> Tensor:
        """The first token of each query block, `(rows,)`."""
        return torch.arange(self.rows, device=self.device) * self.q_block

    @derived
    def always(self) -> Tensor:
        """Booleans `(rows, columns)`: with `keep_diagonal`, the key blocks that the query block's tokens lie in."""
        starts, stops, _ = self.bounds
        column = torch.arange(self.columns, device=self.device)
        return (column >= starts[:, None]) & (column < stops[:, None])

    @derived
    def bounds(self) -> compiled.Rows:
        """The run [starts, stops) of key blocks that each query block always lists, and how many it may choose from."""
        starts = self.first_query // self.k_block
        stops = starts
        if self.keep_diagonal:
            last_query = (self.first_query + self.q_block).clamp(max=self.seq_len) - 1
            stops = last_query // self.k_block + 1
        return compiled.Rows(starts, stops, self.choices)

    @derived
    def choices(self) -> Tensor:
        """The number of key blocks that a query block may choose from, `(rows,)`; if causal, up to its first query."""
        if not self.is_causal:
            return torch.full((self.rows,), self.columns, device=self.device)
        return (self.first_query + 1) // self.k_block

    @derived
    def allowed(self) -> Tensor:
        return torch.arange(self.columns, device=self.device) < self.choices[:, None]

    @derived
    def first_chooser(self) -> Tensor:
        """The first query block that may choose each key block when causal (the last one if none may), `(columns,)`."""
        last_key = torch.arange(1, self.columns + 1, device=self.device) * self.k_block - 1
        return ((last_key + self.q_block - 1) // self.q_block).clamp(max=self.rows - 1)

    def least(self) -> Tensor:
        """Return the least number of key blocks per query block, `(rows,)`: `floor`, or those always listed if more."""
        return self.once("least", lambda grid: grid._blocks(0.0))

    def budget(self, density: float) -> Tensor:
        """Check that density is in (0, 1], and return how many key blocks each query block keeps at it, `(rows,)`."""
        check_share("density", density)
        return self.once(density, lambda grid: grid._blocks(density))

    def _blocks(self, density: float) -> Tensor:
        """Return how many key blocks each query block keeps, `(rows,)`: round(density * visible), at least `floor` and
        those always listed. When causal, a partial last query block keeps as many as a whole one, minus those that only
        the whole one would see, so that its choice among earlier blocks does not depend on how many tokens follow."""
        visible = self.visible()
        whole = visible
        if self.is_causal:
            first_query = self.queries()[0][:, 0]
            whole = (first_query + self.q_block - 1) // self.k_block + 1
        present = (whole.double() * density).round().long().clamp(min=self.floor) - (whole - visible)
        least = self.bounds.stops - self.bounds.starts
        return present.to(self.device).maximum(least).minimum(visible.to(self.device))

    def layout_of(self, rows: Iterable[tuple[slice, Tensor, Tensor]]) -> BlockLayout:
        """Return the layout whose query blocks list the `counts` key blocks of the largest shares; in a tie, the first.

        rows: (at, shares (B, H, some rows, columns), counts (some rows,) or (B, H, some rows)) for consecutive slices
        `at` of the query blocks, until all are done. Blocks always listed come first, whatever their share.
        """
        every = []  # the counts of each slice
        lists = []
        for at, share, counts in rows:
            counts = counts.expand(share.shape[:3])
            if is_compiled(share):
                ends = counts.flatten().cumsum(0)
                indices = torch.empty(int(ends[-1]), dtype=torch.int64, device=self.device)
                compiled.largest(share.contiguous(), counts, self.bounds, at, ends - counts.flatten(), indices)
            else:
                order = stable_topk(ranked(share, self.allowed[at], self.always[at]), int(counts.max()))[1]
                behind = torch.arange(order.shape[-1], device=self.device) >= counts[..., None]
                order = order.masked_fill(behind, self.columns).sort(-1).values
                indices = order[order < self.columns]
            every.append(counts)
            lists.append(indices)
        if len(lists) > 1:  # they come slice by slice, and go head by head
            parts = [x.split(n.sum(-1).flatten().tolist()) for x, n in zip(lists, every, strict=True)]
            lists = []
            for head in zip(*parts, strict=True):
                lists.extend(head)
        return BlockLayout._of(self, (torch.cat(every, 2), torch.cat(lists)))


def candidates(
    q: Tensor,
    k: Tensor,
    *,
    block_size: BlockSize = 128,
    is_causal: bool = False,
    scale: float | None = None,
    keep_diagonal: bool = True,
    floor: int = 1,
    per_kv_head: bool = False,
) -> Candidates:
    """Check what `topk_blocks` takes, except density, and return the query blocks of the call."""
    checks.tensors(q, k, k, placed=True)
    if q.shape[1] != k.shape[1] or not q.shape[2] or q.is_meta:
        raise ValueError(
            f"q and k must have one length, heads, and values to read; got {tuple(q.shape)} and {tuple(k.shape)} on "
            f"{q.device}"
        )
    checks.boolean("keep_diagonal", keep_diagonal)
    checks.boolean("per_kv_head", per_kv_head)
    if is_causal and not keep_diagonal:
        raise ValueError("keep_diagonal=False contradicts is_causal=True: no earlier token can judge the diagonal")
    floor = checks.integer("floor", floor, 0)
    checks.number("scale", scale)
    grid = BlockGrid.of(q.shape[1], block_size, is_causal)
    if scale is None:
        scale = q.shape[3] ** -0.5
    dtype = torch.promote_types(q.dtype, torch.float32)
    fields = (
        grid.seq_len, grid.q_block, grid.k_block, is_causal, keep_diagonal, floor, scale, dtype, q.device,
        k.shape[2] if per_kv_head else None,
    )  # fmt: skip
    if not is_compiled(q, k):
        return Candidates(*fields)
    return plan_cache.of(Candidates, *fields)


def ranked(share: Tensor, allowed: Tensor, always: Tensor) -> Tensor:
    """Return numbers to rank blocks by: shares, plus `ALWAYS` if always listed; -1 where a block may not be chosen."""
    share = share.nan_to_num(nan=0.0)  # of scores that overflow: a NaN would come before the blocks always listed
    return torch.where(always, share + ALWAYS, torch.where(allowed, share, -1.0))
