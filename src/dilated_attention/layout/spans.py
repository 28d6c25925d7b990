"""Describe the grid of blocks over a sequence, and turn intervals of keys into lists of key blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal

import torch
from torch import Tensor

from dilated_attention import checks
from dilated_attention.torch_internals import in_torch_func

MAX_BLOCK = 2**16

BlockSize = int | tuple[int, int]
"""The number of tokens per block, or a pair (query block, key block)."""

Spans = Sequence[tuple[Tensor, Tensor]]
"""Pairs of tensors (first key, last key), inclusive: the intervals of keys that each query block sees. Both broadcast
to `(query blocks, intervals)`. An interval whose last key lies before its first one is empty."""

Lists = tuple[Tensor, Tensor]
"""(counts, indices): how many key blocks each query block sees; and these key blocks, one ascending list per query
block, one list after another."""


def check_share(name: str, value: float) -> None:
    if not isinstance(value, Real) or not 0 < value <= 1:
        raise ValueError(f"{name} must lie in (0, 1], got {value!r}")


def block_pair(block_size: BlockSize, q_block: int | None = None) -> tuple[int, int]:
    """Return (q_block, k_block), given a pair, or one number for both; with a number, `q_block` replaces the first."""
    if not isinstance(block_size, Sequence) and getattr(block_size, "ndim", 0) == 0:
        k_block = checks.integer("block_size", block_size, 1, MAX_BLOCK)
        if q_block is None:
            q_block = k_block
        return q_block, k_block
    pair = checks.integers("block_size", block_size, f"(q_block, k_block), integers from 1 to {MAX_BLOCK}", 1)
    if len(pair) != 2 or max(pair) > MAX_BLOCK:
        raise ValueError(f"block_size must hold two integers from 1 to {MAX_BLOCK}; got {block_size}")
    return pair[0], pair[1]


@dataclass(frozen=True)
class BlockGrid:
    """Cut a sequence into query blocks (rows) and key blocks (columns), the last of which may be partial."""

    seq_len: int
    q_block: int
    k_block: int
    is_causal: bool

    @classmethod
    def of(cls, seq_len: int, block_size: BlockSize, is_causal: bool) -> BlockGrid:
        """Check a caller's numbers and return the grid that they describe."""
        seq_len = checks.positive("seq_len", seq_len)
        checks.boolean("is_causal", is_causal)
        return BlockGrid(seq_len, *block_pair(block_size), is_causal)

    @property
    def rows(self) -> int:
        return -(-self.seq_len // self.q_block)

    @property
    def columns(self) -> int:
        return -(-self.seq_len // self.k_block)

    def queries(self) -> tuple[Tensor, Tensor]:
        """Return the first and last query token of each row, `(rows, 1)`."""
        first = torch.arange(self.rows, device="cpu")[:, None] * self.q_block
        return first, (first + self.q_block).clamp_(max=self.seq_len) - 1

    def visible(self) -> Tensor:
        """Return how many key blocks dense attention gives each query block, `(rows,)`."""
        if not self.is_causal:
            return torch.full((self.rows,), self.columns, device="cpu")
        return self.queries()[1].squeeze(1) // self.k_block + 1

    def above(self, row: Tensor, column: Tensor) -> Tensor:
        """Return, as booleans, which blocks (row, column) lie wholly above the diagonal, whether or not the grid is
        causal. Row numbers may continue from one head to the next."""
        last_query = ((row % self.rows + 1) * self.q_block).clamp_(max=self.seq_len) - 1
        return column * self.k_block > last_query

    def cut(self, row: Tensor, column: Tensor) -> Tensor:
        """Return, as booleans, which of the blocks (row, column) the diagonal cuts; none if the grid is not causal."""
        if not self.is_causal:
            return torch.zeros_like(column, dtype=torch.bool)
        last_key = ((column + 1) * self.k_block).clamp_(max=self.seq_len) - 1
        return last_key > row % self.rows * self.q_block


def row_offsets(counts: Tensor) -> Tensor:
    """Turn the numbers of entries per row, (b, h, rows), into offsets (b, h, rows + 1) into one flat list."""
    ends = counts.flatten().cumsum(0).view_as(counts)
    return torch.cat([ends[..., :1] - counts[..., :1], ends], dim=-1)


def rows_of(counts: Tensor, entries: int) -> Tensor:
    """Return the row of each of `entries` entries, given the number of entries in each row."""
    row = torch.arange(counts.numel(), device=counts.device)
    return torch.repeat_interleave(row, counts.flatten(), output_size=entries)


def kept_before(keep: Tensor) -> Tensor:
    """Return how many True values of `keep` come before each entry, and in all: int64 `(entries + 1,)`. Indexed by
    offsets into the list, it gives offsets into the kept entries."""
    before = torch.zeros(keep.numel() + 1, dtype=torch.int64, device=keep.device)
    torch.cumsum(keep, 0, out=before[1:])
    return before


def lists_of_keys(grid: BlockGrid, keys: Tensor, lead: tuple[int, int]) -> Lists:
    """Turn ascending block numbers, row * columns + column, into lists for `lead` = (batch elements, heads).
    Row numbers continue from one head to the next."""
    row = keys // grid.columns
    counts = torch.bincount(row, minlength=lead[0] * lead[1] * grid.rows).reshape(*lead, grid.rows)
    return counts, row.mul_(-grid.columns).add_(keys)


def sort_keys(keys: Tensor, kind: Literal["quicksort", "stable"]) -> Tensor:
    """Return integer sort keys in ascending order; NumPy sorts CPU tensors in place, outside graphs and `torch.func`.
    `kind`: its algorithm; "stable" takes linear time if `keys` joins a few sorted lists."""
    if keys.device.type != "cpu" or torch.compiler.is_compiling() or in_torch_func():  # no memory for NumPy to sort
        return keys.sort().values
    keys.numpy().sort(kind=kind)  # 5 ms for two lists of 600,000; torch.sort: 10 ms, and 110 ms where cores are shared
    return keys


def runs_of_spans(grid: BlockGrid, spans: Spans) -> tuple[Tensor, Tensor]:
    """Turn intervals of tokens into disjoint ascending runs of key blocks: (first block, length), both `(query blocks,
    intervals)`. A length is 0 if the interval is empty or other runs cover it. If the grid is causal, later keys are
    left out."""
    first = torch.cat([low.expand(grid.rows, -1) for low, _ in spans], dim=1)
    last = torch.cat([high.expand(grid.rows, -1) for _, high in spans], dim=1)
    if grid.is_causal:
        torch.minimum(last, grid.queries()[1], out=last)
    # Not first.clamp_(min=0): Inductor of PyTorch 2.13 fails on max(0, number) where the number follows from arange.
    first = torch.where(first < 0, 0, first)
    last = last.clamp_(max=grid.seq_len - 1)
    empty = last < first
    low = first.floor_divide_(grid.k_block)
    high = last.floor_divide_(grid.k_block).add_(1).masked_fill_(empty, 0)
    if len(spans) > 1:
        low, order = low.sort(dim=1)
        high = high.gather(1, order)
    if low.shape[1] > 1:
        low[:, 1:] = torch.maximum(low[:, 1:], high.cummax(dim=1).values[:, :-1])
    return low, high.sub_(low).clamp_(min=0)


def lists_of_spans(grid: BlockGrid, spans: Spans) -> Lists:
    low, length = runs_of_spans(grid, spans)
    counts = length.sum(-1)
    low = low.flatten()
    length = length.flatten()
    indices = torch.repeat_interleave(low.sub_(length.cumsum(0)).add_(length), length)
    return counts, indices.add_(torch.arange(indices.numel(), device="cpu"))
