"""Represent a layout as a value: its lists, what can be derived from them, and its algebra.

A layout cuts a sequence of N tokens into query blocks of `q_block` and key blocks of `k_block` tokens (the last ones
may be partial). It stores the key blocks of each query block as compressed sparse rows. Query i sees key j iff block j
// k_block is listed for block i // q_block and, when `is_causal`, j <= i. Where that is not enough, an entry of a list
carries the number of a mask, one bit per pair of its block. A query block may have an empty list: its queries get out 0
and lse -inf.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention import checks
from dilated_attention.cache import derived, is_named, lasting, name_of
from dilated_attention.kernels.cpu import lists as compiled
from dilated_attention.layout import builders, conversions, masks
from dilated_attention.layout.masks import MaskMod
from dilated_attention.layout.spans import (
    BlockGrid,
    BlockSize,
    Lists,
    Spans,
    block_pair,
    kept_before,
    lists_of_keys,
    lists_of_spans,
    row_offsets,
    rows_of,
    sort_keys,
)
from dilated_attention.pictures import plot_blocks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch.nn.attention.flex_attention import BlockMask


class Transposed(NamedTuple):
    """List the query blocks of each key block, ascending: indices[indptr[b, h, j] : indptr[b, h, j + 1]] are those of
    key block j for batch element b and head h."""

    indptr: Tensor
    indices: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class BlockLayout:
    """List the key blocks that each query block sees. A layout is immutable and is compared by content.

    Most layouts are made by a class method: `local`, `global_`, `strided`, `longformer`, `from_mask`, `from_topk`
    and others. `a | b` has the blocks of both, `a & b` the common ones.

    Heads and batch elements may share their lists or have separate ones. indptr: int64 `(batch or 1, heads or 1,
    query blocks + 1)`; the list of query block i for batch element b and head h is `indices[indptr[b, h, i] : indptr[b,
    h, i + 1]]`. indices: int64 `(blocks,)`, key blocks, strictly ascending within a list. All lists lie one after the
    other, so they form one CSR matrix with batch * heads * query blocks rows.

    kinds, bits: None where every listed block is seen whole. Otherwise kinds: int64 `(blocks,)`, for each entry of
    `indices` the number of its mask, or -1 for a whole block; bits: booleans `(masks, q_block, k_block)`. Query i of a
    block sees key j of it iff `bits[kind, i, j]` and, when `is_causal`, the key is not later. `from_mask_mod` makes
    both from a function.

    The constructor copies the tables, so writing to the originals later does not change the layout. It checks dtypes
    and shapes, and on the CPU also the lists. `from_indices` checks the lists on every device.

    Examples:
        >>> from dilated_attention import BlockLayout
        >>> layout = BlockLayout.local(16, window=2, block_size=4) | BlockLayout.global_(16, tokens=1, block_size=4)
        >>> layout.dense_blocks()[0, 0].int()  # a row for each query block
        tensor([[1, 1, 1, 1],
                [1, 1, 1, 0],
                [1, 1, 1, 1],
                [1, 0, 1, 1]], dtype=torch.int32)
        >>> layout.density
        0.875
    """

    indptr: Tensor
    indices: Tensor
    seq_len: int
    q_block: int = 128
    k_block: int = 128
    is_causal: bool = False
    kinds: Tensor | None = None
    bits: Tensor | None = None
    _versions: tuple[int, ...] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        grid = BlockGrid.of(self.seq_len, self.block_size, self.is_causal)
        for name in ("seq_len", "q_block", "k_block"):  # as plain integers
            object.__setattr__(self, name, getattr(grid, name))
        rows = grid.rows
        if self.indptr.dtype != torch.int64 or self.indices.dtype != torch.int64:
            raise ValueError(f"indptr and indices must be int64, got {self.indptr.dtype} and {self.indices.dtype}")
        if self.indptr.ndim != 3 or self.indptr.shape[-1] != rows + 1:
            raise ValueError(
                f"indptr must have shape (batch or 1, heads or 1, {rows + 1}) for {self.seq_len} tokens in query "
                f"blocks of {self.q_block}, got {tuple(self.indptr.shape)}"
            )
        if self.indices.ndim != 1:
            raise ValueError(f"indices must be one flat list, got shape {tuple(self.indices.shape)}")
        conversions.check_kinds(self.block_size, self.indices, self.kinds, self.bits)
        given = self.tables
        for name in ("indptr", "indices", "kinds", "bits"):
            table = getattr(self, name)
            if table is not None:
                object.__setattr__(self, name, _own(table))
        if checks.readable(*self.tables) and not all(map(is_named, given)):
            conversions.check_lists(self.grid, self.indptr, self.indices)
            conversions.check_numbers(self.kinds, self.bits)
        versions = None
        if not torch.compiler.is_compiling():
            versions = self._table_versions()
        object.__setattr__(self, "_versions", versions)

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """Return the tensors that define the layout: indptr and indices, then kinds and bits if some block has a
        mask."""
        if self.kinds is None or self.bits is None:
            return self.indptr, self.indices
        return self.indptr, self.indices, self.kinds, self.bits

    def _table_versions(self) -> tuple[int, ...]:
        """Return PyTorch's version counters of the tables, which rise when a table is written to."""
        return tuple([table._version for table in self.tables])

    # ---- builders

    @classmethod
    def local(
        cls,
        seq_len: int,
        window: int | None = None,
        block_size: BlockSize = 128,
        *,
        density: float | None = None,
        is_causal: bool = False,
    ) -> BlockLayout:
        """Build a sliding window: query i sees key j iff |i - j| < window, in tokens, before rounding to whole blocks.

        Give either `window` or `density`, which picks the window with the nearest density.
        """
        grid = BlockGrid.of(seq_len, block_size, is_causal)
        return cls._of_spans(grid, builders.local(grid, window, density))

    @classmethod
    def global_(
        cls,
        seq_len: int,
        tokens: int | Sequence[int] | None = None,
        block_size: BlockSize = 128,
        *,
        density: float | None = None,
        is_causal: bool = False,
    ) -> BlockLayout:
        """Build global tokens: before rounding to whole blocks, query i sees key j iff i or j is a global token.

        When causal, also j <= i.

        `tokens`: the number of leading global tokens, or their positions. Give either `tokens` or `density`, which
        picks the number of leading ones. A causal layout allows only leading global tokens: any other one is an error,
        since the queries before it cannot see it.
        """
        grid = BlockGrid.of(seq_len, block_size, is_causal)
        return cls._of_spans(grid, builders.global_(grid, tokens, density))

    @classmethod
    def strided(cls, seq_len: int, stride: int, block_size: BlockSize = 128, *, is_causal: bool = False) -> BlockLayout:
        """Build a strided pattern (Sparse Transformer): query i sees key j iff (i - j) mod stride == 0, in tokens.

        This is rounded to whole blocks. A stride of s whole blocks activates every s-th block. A stride that is not a
        multiple of the block size touches two blocks per period, and a stride shorter than a block touches all blocks.
        """
        grid = BlockGrid.of(seq_len, block_size, is_causal)
        return cls._of_spans(grid, builders.strided(grid, stride))

    @classmethod
    def dilated(
        cls,
        seq_len: int,
        rates: Sequence[int],
        reach: int | None = None,
        block_size: BlockSize = 128,
        *,
        density: float | None = None,
        is_causal: bool = False,
    ) -> BlockLayout:
        """Build a dilated sliding window: for every rate, block i sees the blocks i + m * rate with |m| <= reach.

        Here a block has max(q_block, k_block) tokens. Rates 1, 2, 4, … with a small reach give a logarithmic
        pattern: a row has O(reach * len(rates)) blocks, at distances that double. Give `reach` (default 1) or
        `density`, which picks the reach with the nearest density.
        """
        grid = BlockGrid.of(seq_len, block_size, is_causal)
        return cls._of_spans(grid, builders.dilated(grid, rates, reach, density))

    @classmethod
    def hierarchical(
        cls,
        seq_len: int,
        levels: Sequence[tuple[int, int | None]],
        block_size: BlockSize = 128,
        *,
        is_causal: bool = False,
    ) -> BlockLayout:
        """Build a pattern that gets coarser with distance, from levels (stride, window) in tokens.

        Before rounding to whole blocks, query i sees key j iff some level has j mod stride == 0 and |i - j| < window.
        Order the levels from fine to coarse: strides and windows ascend; a window of None covers the whole sequence.
        With a first stride of 1, a query sees all near keys; farther away, blocks with a multiple of a coarser stride.
        """
        grid = BlockGrid.of(seq_len, block_size, is_causal)
        return cls._of_spans(grid, builders.hierarchical(grid, levels))

    @classmethod
    def random(
        cls, seq_len: int, density: float, seed: int, block_size: BlockSize = 128, *, is_causal: bool = False
    ) -> BlockLayout:
        """Draw key blocks at random: every query block sees round(density * n), at least one, of its n key blocks.

        When causal, n counts the blocks that are not later. Blocks are drawn uniformly without replacement; the same
        seed gives the same layout.
        """
        grid = BlockGrid.of(seq_len, block_size, is_causal)
        return cls._of(grid, builders.constant(builders.random, grid, density, seed))

    @classmethod
    def longformer(
        cls,
        seq_len: int,
        window: int,
        global_tokens: int | Sequence[int],
        block_size: BlockSize = 128,
        *,
        is_causal: bool = False,
    ) -> BlockLayout:
        """Combine `local(window)` and `global_(global_tokens)` (Beltagy et al., 2020)."""
        near = cls.local(seq_len, window, block_size, is_causal=is_causal)
        return near | cls.global_(seq_len, global_tokens, block_size, is_causal=is_causal)

    @classmethod
    def bigbird(
        cls,
        seq_len: int,
        window: int,
        global_tokens: int | Sequence[int],
        random_blocks: int,
        seed: int,
        block_size: BlockSize = 128,
        *,
        is_causal: bool = False,
    ) -> BlockLayout:
        """Add `random_blocks` uniformly drawn key blocks per query block to `longformer` (Zaheer et al., 2020).

        A drawn block may be one that the window or the global tokens already show.
        """
        grid = BlockGrid.of(seq_len, block_size, is_causal)
        drawn = cls._of(grid, builders.constant(builders.random_blocks, grid, random_blocks, seed))
        return cls.longformer(seq_len, window, global_tokens, block_size, is_causal=is_causal) | drawn

    @classmethod
    def from_mask(
        cls, mask: Tensor, seq_len: int | None = None, block_size: BlockSize = 128, *, is_causal: bool = False
    ) -> BlockLayout:
        """Build a layout from booleans: True for an active block or, with `seq_len`, True for a pair that is seen.

        The mask is `(query blocks, key blocks)`, `(heads, …)` or `(batch, heads, …)`. Without `seq_len` all blocks are
        whole. With `is_causal` no block may lie wholly above the diagonal.

        A mask of `seq_len x seq_len` is one of pairs, unless blocks have one token: the layout shows exactly these
        pairs, as in `from_mask_mod`.
        """
        if conversions.of_pairs(mask, seq_len, block_size):
            if is_causal and conversions.anywhere(mask.triu(1)):
                raise ValueError("is_causal=True contradicts a mask that shows a later key; give mask.tril()")
            made = cls._of(*masks.from_pairs(mask, block_size))
            return made.causal() if is_causal else made
        return cls._of(*conversions.from_mask(mask, seq_len, block_size, is_causal))

    @classmethod
    def from_mask_mod(
        cls,
        mask_mod: MaskMod,
        q_len: int,
        k_len: int | None = None,
        *,
        batch: int | None = None,
        heads: int | None = None,
        block_size: BlockSize = 128,
        device: torch.device | str = "cpu",
    ) -> BlockLayout:
        """Build a layout that shows exactly the pairs for which a function is true, each once.

        The function has FlexAttention's signature and conventions: `mask_mod(b, h, q_idx, kv_idx)` gets one number of
        each as int64 tensors without dimensions, may read tensors that it captures, and returns a boolean. `and_masks`
        and `or_masks` of PyTorch work unchanged. It is first evaluated on ranges, one of queries and one of keys for
        each block: blocks that this decides are not looked at pair by pair. No tensor of N x N pairs exists.
        Blocks that it cuts get a mask of bits; equal masks are stored once. The layout is causal if no query sees a
        later key and some block shows its whole lower triangle.

        Args:
            q_len, k_len: the numbers of queries and keys; k_len defaults to q_len. If they differ, the layout has
                max(q_len, k_len) tokens, of which the last queries or keys take no part: call with `q_start=0,
                k_start=0`.
            batch, heads: how many b and h differ; None: the function does not depend on them, and gets 0.
            block_size: tokens per block, or a pair (q_block, k_block).
            device: where the function is evaluated, and where its captured tensors lie.

        Raises ValueError, with the index that failed, if the function fails or does not return a boolean.

        Examples:
            >>> from dilated_attention import BlockLayout
            >>> prefix = BlockLayout.from_mask_mod(lambda b, h, q, k: (k < 3) | (k <= q), 8, block_size=4)
            >>> prefix.dense_mask()[0, 0].int()[:2]
            tensor([[1, 1, 1, 0, 0, 0, 0, 0],
                    [1, 1, 1, 0, 0, 0, 0, 0]], dtype=torch.int32)
        """
        return cls._of(*masks.from_mask_mod(mask_mod, q_len, k_len, batch, heads, block_size, device))

    @classmethod
    def from_indices(
        cls,
        indptr: Tensor | Sequence[int],
        indices: Tensor | Sequence[int],
        seq_len: int,
        block_size: BlockSize = 128,
        *,
        is_causal: bool = False,
    ) -> BlockLayout:
        """Build a layout from compressed sparse rows, and check them.

        indptr is `([batch,] [heads,] query blocks + 1)`; `BlockLayout` describes both tables. With `is_causal` no
        block may lie wholly above the diagonal.
        """
        q_block, k_block = block_pair(block_size)
        starts, blocks = conversions.from_indices(indptr, indices)  # new tensors, which are checked here
        layout = cls(_named(starts), _named(blocks), seq_len, q_block, k_block, is_causal)
        conversions.check_lists(layout.grid, layout.indptr, layout.indices)
        return layout

    @classmethod
    def from_topk(
        cls, indices: Tensor, block_size: BlockSize = 1, *, seq_len: int | None = None, is_causal: bool = False
    ) -> BlockLayout:
        """Build a layout from an indexer's choice: row i of `indices` names the key blocks of query block i.

        Shorter rows are padded with -1. The order within a row does not matter, and a block that is named twice is
        seen once. An indexer chooses for each query, so query blocks and key blocks have one token by default.

        Args:
            indices: int64 or int32 `(query blocks, k)`, `(batch, query blocks, k)` or `(batch, heads, query blocks,
                k)`; heads of q, or of k and v.
            block_size: tokens per key block; or a pair (q_block, k_block).
            seq_len: the sequence length; needed if the last query block is partial.
            is_causal: make the layout causal. No row may then name a block that lies wholly after its queries; put -1
                in its place.
        """
        return cls._of(*conversions.from_topk(indices, block_size, seq_len, is_causal))

    @classmethod
    def stack(
        cls, layouts: Sequence[BlockLayout], over: Literal["batch", "heads"] = "batch", *, seq_len: int | None = None
    ) -> BlockLayout:
        """Join several layouts into one: for a batch, for the samples that `cu_seqlens` packs, or for the heads.

        The lists after the end of a shorter sample are empty. In a call with `lengths` or `cu_seqlens` each sample
        therefore gets the result that it gets alone.

        Args:
            layouts: layouts of one block size, on one device, either all causal or all not. For the batch, give one per
                sample, of any lengths, with lists per head or shared; for the heads, one per head or group of heads,
                all of one length. Layouts that already have a batch are refused.
            over: `"batch"` or `"heads"`.
            seq_len: the length of a padded batch; default: the longest layout's length.
        """
        if isinstance(layouts, BlockLayout):
            layouts = [layouts]
        layouts = list(layouts)
        if not all(isinstance(x, BlockLayout) for x in layouts):
            raise ValueError(f"layouts must hold one BlockLayout per sample or head; got {layouts!r}")
        if not layouts:
            raise ValueError("layouts is empty; give one layout per sample or head")
        if over not in ("batch", "heads"):
            raise ValueError(f'over must be "batch" or "heads"; got {over!r}')
        kinds = {(x.block_size, x.is_causal, x.device) for x in layouts}
        heads = {x.num_heads for x in layouts} - {1}
        mixed_heads = over == "batch" and len(heads) > 1
        if len(kinds) > 1 or mixed_heads or any(x.batch_size > 1 for x in layouts):
            raise ValueError(
                "layouts must agree in (block_size, is_causal, device), have one number of heads or 1, and no batch of "
                f"their own; got {layouts}"
            )
        longest = max(x.seq_len for x in layouts)
        if over == "heads" and any(x.seq_len != longest for x in layouts):
            raise ValueError(f"layouts of heads must have one seq_len; got {[x.seq_len for x in layouts]}")
        if seq_len is None:
            seq_len = longest
        else:
            seq_len = checks.integer("seq_len", seq_len, longest)
        grid = replace(layouts[0].grid, seq_len=seq_len)

        if over == "batch":
            repeated = [0] * max(heads, default=1)
            layouts = [x.select(heads=repeated) if x.num_heads == 1 else x for x in layouts]
        counts = torch.cat([F.pad(x.counts, (0, grid.rows - x.query_blocks)) for x in layouts], int(over == "heads"))
        lists = counts, torch.cat([x.indices for x in layouts])
        return cls._of(grid, lists, *masks.stacked([x.tables for x in layouts]))

    # ---- shape and content

    @property
    def grid(self) -> BlockGrid:
        return BlockGrid(self.seq_len, self.q_block, self.k_block, self.is_causal)

    @property
    def block_size(self) -> tuple[int, int]:
        return self.q_block, self.k_block

    @property
    def batch_size(self) -> int:
        """Return the number of batch elements with separate lists; 1 if all share the lists."""
        return self.indptr.shape[0]

    @property
    def num_heads(self) -> int:
        """Return the number of heads with separate lists; 1 if all share the lists."""
        return self.indptr.shape[1]

    @property
    def query_blocks(self) -> int:
        return self.indptr.shape[2] - 1

    @property
    def key_blocks(self) -> int:
        return self.grid.columns

    @property
    def nnz(self) -> int:
        """Return the number of active blocks, over all batch elements and heads that have separate lists."""
        return self.indices.numel()

    @property
    def nbytes(self) -> int:
        return sum([table.nbytes for table in self.tables])

    @property
    def device(self) -> torch.device:
        return self.indices.device

    @cached_property
    def key(self) -> Hashable:
        """Return a key for caches. It identifies the tables, not their content: equal layouts that were made separately
        have different keys."""
        return (*map(name_of, self.tables), self.seq_len, *self.block_size, self.is_causal)

    @cached_property
    def density(self) -> float:
        """Return the active blocks as a share of those that dense (causal: causal dense) attention computes."""
        return self.nnz / max(1, int(self.grid.visible().sum()) * self.batch_size * self.num_heads)

    @derived
    def counts(self) -> Tensor:
        """Return the number of key blocks in each list, int64 `(batch or 1, heads or 1, query blocks)`."""
        return self.indptr.diff(dim=-1)

    @property
    def row(self) -> Tensor:
        """Return, for each entry of `indices`, the number of its list in (batch, head, query block) order: int64."""
        return rows_of(self.counts, self.nnz)

    @property
    def entries(self) -> masks.Entries:
        """Return the blocks of all lists, with their masks."""
        return masks.Entries(self.grid, self.row, self.indices, self.kinds, self.bits)

    @derived
    def transposed(self) -> Transposed:
        """Return the query blocks that list each key block, for the gradients of k and v."""
        return lasting(self._transpose, self.device)

    def _transpose(self) -> Transposed:
        rows = self.query_blocks
        columns = self.key_blocks
        lists = self.batch_size * self.num_heads
        if self.device.type == "cpu" and compiled.available():
            starts = row_offsets(compiled.column_counts(self.indptr, self.indices, columns))
            return Transposed(starts, compiled.rows_of_columns(self.indptr, self.indices, starts))
        entries = self._by_column()
        counts = torch.bincount(entries // rows, minlength=lists * columns)
        indices = sort_keys(entries, "quicksort").remainder_(rows)
        return Transposed(row_offsets(counts.reshape(self.batch_size, self.num_heads, columns)), indices)

    @derived
    def words_by_key(self) -> Tensor:
        """Return the masks as words of bits (`masks.words_of`) for a kernel whose tiles hold queries: a row for each
        key of a block."""
        assert self.bits is not None, "the layout has no masks"
        bits = self.bits.transpose(1, 2)
        return lasting(lambda: masks.words_of(bits), self.device)

    @derived
    def words_by_query(self) -> Tensor:
        """Return the masks as words of bits for a kernel whose tiles hold keys: a row for each query of a block."""
        assert self.bits is not None, "the layout has no masks"
        bits = self.bits
        return lasting(lambda: masks.words_of(bits), self.device)

    @derived
    def transposed_kinds(self) -> Tensor:
        """Return `kinds` in the order of `transposed`."""
        assert self.kinds is not None, "the layout has no masks"
        kinds = self.kinds
        return lasting(lambda: kinds[self._by_column().argsort()], self.device)

    @derived
    def whole_first(self) -> tuple[Tensor, Tensor]:
        """Return (indices, split) as kernels/block_lists.py reads them, for tiles of queries: in each list the blocks
        that need no mask, then those that bits, the diagonal or the end of the sequence cut."""
        assert self.kinds is not None, "the layout has no masks"
        is_partial = (self.indices == self.key_blocks - 1) & (self.seq_len % self.k_block > 0)
        whole = (self.kinds < 0) & ~self.masked & ~is_partial
        tables = self.indptr, self.row, self.indices, self.kinds, whole
        return lasting(lambda: masks.sorted_lists(*tables), self.device)

    @derived
    def transposed_whole_last(self) -> tuple[Tensor, Tensor]:
        """Return (indices, split) for tiles of keys: the lists of `transposed`, blocks that are cut first."""
        assert self.kinds is not None, "the layout has no masks"
        lists = self.row // self.query_blocks * self.key_blocks + self.indices
        cut = (self.kinds >= 0) | self.masked
        tables = self.transposed.indptr, lists, self.row % self.query_blocks, self.kinds, cut
        return lasting(lambda: masks.sorted_lists(*tables), self.device)

    def _by_column(self) -> Tensor:
        """Return numbers of the entries of `indices` that ascend in the order of `transposed`."""
        rows = self.query_blocks
        row = self.row
        first = row // rows  # the number of (batch element, head)
        column = self.indices + first * self.key_blocks
        return column * rows + row - first * rows

    @derived
    def masked(self) -> Tensor:
        """Return which blocks in `indices` the diagonal cuts: booleans `(blocks,)`, False where all pairs are seen."""
        return self.grid.cut(self.row, self.indices)

    @derived
    def seen(self) -> Tensor:
        """Return the number of keys that each token sees, int64 `(batch or 1, heads or 1, seq)`."""
        if self.kinds is not None:
            return self._seen_by_bits()
        size = torch.full((self.key_blocks,), self.k_block, device=self.device)
        size[-1] = self.seq_len - (self.key_blocks - 1) * self.k_block
        row = self.row
        number = size[self.indices]
        cut = self.masked
        rows = self.indptr[..., 1:].numel()
        whole = number.new_zeros(rows).index_add_(0, row[~cut], number[~cut])
        query = (row[cut] % self.query_blocks * self.q_block)[:, None] + torch.arange(self.q_block, device=self.device)
        before = (query + 1 - (self.indices[cut] * self.k_block)[:, None]).clamp_(min=0)
        partial = number.new_zeros(rows, self.q_block).index_add_(0, row[cut], before.minimum(number[cut][:, None]))
        return self._by_token(whole[:, None] + partial)

    def _seen_by_bits(self) -> Tensor:
        seen = self.indices.new_zeros(self.indptr[..., 1:].numel(), self.q_block)
        entries = self.entries
        for some in entries.slices():
            seen.index_add_(0, entries.row[some], entries.shown(some).sum(2))
        return self._by_token(seen)

    def _by_token(self, x: Tensor) -> Tensor:
        """Return x (lists, q_block) as (batch or 1, heads or 1, seq)."""
        x = x.view(self.batch_size, self.num_heads, self.query_blocks * self.q_block)
        return x[..., : self.seq_len].contiguous()

    def coverage(self, seq_len: int, num_heads: int) -> Tensor:
        """Return the number of keys that each token sees, per head: int64 `(num_heads, seq_len)`.

        With lists per batch element the shape is `(batch, num_heads, seq_len)`. If the layout has fewer heads than
        num_heads, its lists are per KV head, and its heads must divide num_heads.

        Warns if some tokens of some heads see no key at all, and says how many: the output of such a token is 0.
        """
        keys = self.seen_by(seq_len, checks.positive("num_heads", num_heads))
        causal = ", is_causal=True" * self.is_causal
        local = f"BlockLayout.local({self.seq_len}, 1, {self.block_size}{causal})"
        warn_of_blind(keys, f"Unite with a layout that covers every row, such as {local}")
        return keys

    def seen_by(self, seq_len: int, num_heads: int) -> Tensor:
        """Return the same as `coverage`, without its warning."""
        keys = self._for_queries(seq_len, num_heads).seen.expand(-1, num_heads, -1)
        if self.batch_size > 1:
            return keys
        return keys[0]

    def flops(self, seq_len: int, num_heads: int, head_dim: int, is_causal: bool = False) -> int:
        """Return the floating-point operations of a forward: 4 head_dim per score entry.

        Each score entry costs head_dim multiplications and head_dim additions, once for q kᵀ and once for P v. The
        count is for one batch element, or for all of them if each has its own lists. num_heads is as in `coverage`.
        `is_causal`: count the layout made causal, as a causal call computes it.
        """
        num_heads = checks.positive("num_heads", num_heads)
        head_dim = checks.positive("head_dim", head_dim)
        checks.boolean("is_causal", is_causal)
        layout = self._for_queries(seq_len, num_heads)
        if is_causal:
            layout = layout.causal()
        return 4 * head_dim * int(layout.seen.sum()) * (num_heads // layout.num_heads)

    def _for_queries(self, seq_len: int, num_heads: int) -> BlockLayout:
        """Return `for_heads(num_heads)`, and raise ValueError unless the layout fits this length and number of query
        heads: it may have lists for one head, or for KV heads whose number divides it."""
        kv_heads = None
        if num_heads % self.num_heads == 0:
            kv_heads = self.num_heads
        self.check(self.batch_size, seq_len, num_heads, kv_heads)
        return self.for_heads(num_heads)

    def check(self, batch_size: int, seq_len: int, num_heads: int, num_kv_heads: int | None = None) -> None:
        """Raise unless the layout fits tensors of this batch size, length and number of query heads.

        `num_kv_heads`: also accept one list per KV head, which all query heads that share the KV head use. None: only
        shared lists or one per query head.
        """
        self.require_unchanged()
        if seq_len != self.seq_len:
            swapped = ". If q is (batch, heads, seq, head_dim), give q.transpose(1, 2)" * (num_heads == self.seq_len)
            raise ValueError(
                f"layout is for {self.seq_len} tokens, got seq_len={seq_len}; build one for that length{swapped}"
            )
        heads = self.num_heads  # compared one by one: `in` does not compare the symbols of torch.compile by value
        if heads != 1 and heads != num_heads and (num_kv_heads is None or heads != num_kv_heads):
            raise ValueError(f"layout has lists for {self.num_heads} heads, got {num_heads}; give 1 or {num_heads}")
        if not torch.compiler.is_compiling():  # a graph keeps the batch symbolic, and the operator checks it
            self.check_batch(batch_size)

    def require_unchanged(self) -> None:
        """Raise if a table was written to, since everything derived from it describes its old content."""
        if not torch.compiler.is_compiling() and self._versions not in (None, self._table_versions()):
            raise ValueError("layout: a table was written to after the layout was made; make a new BlockLayout of it")

    def check_batch(self, batch_size: int) -> None:
        """Raise unless the layout fits this batch size."""
        if self.batch_size not in (1, batch_size):
            raise ValueError(
                f"layout has lists for a batch of {self.batch_size}, got {batch_size}; give 1 or {batch_size}"
            )

    def to(self, device: torch.device | str) -> BlockLayout:
        """Return this layout with its tables on `device`. A call does this itself, and `plan_cache` keeps the copy."""
        if isinstance(device, torch.dtype):
            raise ValueError(f"device must be a device; got {device}: a layout has no dtype")
        device = torch.empty(0, device=device).device
        if device == self.device:
            return self
        return self._with(*[table.to(device) for table in self.tables])

    def select(self, *, batch: Sequence[int] | None = None, heads: Sequence[int] | None = None) -> BlockLayout:
        """Return a layout with the lists of these batch elements and heads alone, in the given order; None: all."""
        self.require_unchanged()
        samples = _chosen("batch", batch, self.batch_size)
        lists = _chosen("heads", heads, self.num_heads)
        if samples == slice(None) and lists == slice(None):
            return self
        indptr = self.indptr[samples][:, lists]
        counts = indptr.diff(dim=-1)
        return self._chosen(row_offsets(counts), self._entries(indptr[..., :-1], counts))

    def _entries(self, starts: Tensor, counts: Tensor) -> Tensor:
        """Return the numbers of `counts` entries from each of `starts`, list after list."""
        counts = counts.flatten()
        entry = (starts.flatten() - (counts.cumsum(0) - counts)).repeat_interleave(counts)
        return entry + torch.arange(entry.numel(), device=self.device)

    def for_heads(self, num_heads: int) -> BlockLayout:
        """Return this layout for `num_heads` query heads: a KV head's lists are repeated for each of its query heads.

        A layout whose heads share their lists is returned unchanged.
        """
        if self.num_heads == 1 or self.num_heads == num_heads:
            return self
        return self.select(heads=[head * self.num_heads // num_heads for head in range(num_heads)])

    def prefix(self, seq_len: int) -> BlockLayout:
        """Return the layout of the first `seq_len` tokens: the lists of their queries, without later key blocks."""
        self.require_unchanged()
        if checks.positive("seq_len", seq_len) > self.seq_len:
            raise ValueError(f"layout is for {self.seq_len} tokens, got a sample of {seq_len}; build a longer one")
        if seq_len == self.seq_len:
            return self
        counts = self.counts[..., : -(-seq_len // self.q_block)]
        entries = self._entries(self.indptr[..., : counts.shape[-1]], counts)
        keep = self.indices[entries] < -(-seq_len // self.k_block)
        return self._chosen(kept_before(keep)[row_offsets(counts)], entries[keep], seq_len=seq_len)

    def part(self, queries: tuple[int, int], keys: tuple[int, int]) -> tuple[BlockLayout, int, int]:
        """Return the layout of a short sequence, and its first query and its first key, for the queries and the keys at
        these positions, each [start, stop).

        The short sequence has the blocks of these queries and keys alone, in their order, so that a diagonal stays one.
        Blocks of queries outside the range list nothing.
        """
        self.require_unchanged()
        unit = math.lcm(*self.block_size)
        sides = [range(start // unit, max(start, stop - 1) // unit + 1) for start, stop in (queries, keys)]
        lower, upper = sorted(sides, key=lambda x: x.start)
        gap = max(0, upper.start - lower.stop)  # units between the two sides, which the short sequence leaves out
        last = max(lower.stop, upper.stop)
        size = min(last * unit, self.seq_len) - (gap + lower.start) * unit
        moved = []  # by how many tokens the queries, then the keys, move to the front
        for side in sides:
            left_out = lower.start
            if side.start >= lower.stop:
                left_out += gap
            moved.append(left_out * unit)

        rows = slice(queries[0] // self.q_block, -(-queries[1] // self.q_block))
        counts = self.counts[..., rows]
        entries = self._entries(self.indptr[..., rows], counts)
        blocks = self.indices[entries]
        keep = (blocks >= keys[0] // self.k_block) & (blocks < -(-keys[1] // self.k_block))
        first = rows.start - moved[0] // self.q_block
        after = -(-size // self.q_block) - first - counts.shape[-1]
        starts = row_offsets(F.pad(counts, (first, after)))
        short = self._chosen(kept_before(keep)[starts], entries[keep], moved[1] // self.k_block, seq_len=size)
        return short, queries[0] - moved[0], keys[0] - moved[1]

    # ---- algebra

    def __or__(self, other: BlockLayout) -> BlockLayout:
        """Return the union: it shows the pairs that at least one of the layouts shows.

        If one is causal and the other is not, the blocks that the diagonal cuts get masks of bits.
        """
        if not isinstance(other, BlockLayout):
            return NotImplemented
        if self.is_causal != other.is_causal or self.kinds is not None or other.kinds is not None:
            return self._combined(other, torch.logical_or)
        merged, lead = self._merge(other)
        return self._of(self.grid, lists_of_keys(self.grid, merged.unique_consecutive(), lead))

    def __and__(self, other: BlockLayout) -> BlockLayout:
        """Return the intersection: it shows the pairs that both layouts show. It is causal if at least one of them is,
        unless masks of bits say so already."""
        if not isinstance(other, BlockLayout):
            return NotImplemented
        if self.kinds is not None or other.kinds is not None:
            return self._combined(other, torch.logical_and)
        merged, lead = self._merge(other)
        grid = self.grid
        if self.is_causal != other.is_causal:
            grid = replace(grid, is_causal=False)
        keys, times = merged.unique_consecutive(return_counts=True)
        both = self._of(grid, lists_of_keys(grid, keys[times == 2], lead))
        if self.is_causal or other.is_causal:
            both = both.causal()
        return both

    def causal(self) -> BlockLayout:
        """Return this layout made causal: blocks above the diagonal are removed, and in blocks that the diagonal cuts
        a query sees only keys up to itself."""
        self.require_unchanged()
        if self.is_causal:
            return self
        keep = ~self.grid.above(self.row, self.indices)
        return self._chosen(kept_before(keep)[self.indptr], keep.nonzero()[:, 0], is_causal=True)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockLayout):
            return NotImplemented
        if (self.seq_len, self.block_size, self.is_causal) != (other.seq_len, other.block_size, other.is_causal):
            return False
        if not torch.equal(self.indptr.cpu(), other.indptr.cpu()):
            return False
        if not torch.equal(self.indices.cpu(), other.indices.cpu()):
            return False
        if self.kinds is None and other.kinds is None:
            return True
        return masks.equal(self.entries, other.entries)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        content = (self.indptr.cpu().numpy().tobytes(), self.indices.cpu().numpy().tobytes())
        return hash((self.seq_len, self.block_size, self.is_causal, self.indptr.shape, content))

    def __reduce__(self) -> tuple[type[BlockLayout], tuple[Tensor | int, ...]]:
        """Pickle only the lists. Derived values such as `key` and the hash are valid in this process only."""
        numbers = self.seq_len, self.q_block, self.k_block, self.is_causal
        return type(self), (*self.tables[:2], *numbers, *self.tables[2:])

    def __setstate__(self, state: object) -> None:
        """Refuse a pickled state: `__reduce__` writes none, and one would bring in lists that the constructor has not
        checked."""
        raise ValueError("a layout is made of its tables alone; the file sets other attributes of it")

    def __repr__(self) -> str:
        lead = ""
        if self.batch_size > 1:
            lead += f", batch={self.batch_size}"
        if self.num_heads > 1:
            lead += f", heads={self.num_heads}"
        block: int | tuple[int, int] = self.block_size
        if self.q_block == self.k_block:
            block = self.q_block
        inside = ""
        if self.bits is not None:
            inside = f", masks={len(self.bits)} of {self.bits.nbytes:,} bytes"
        where = ""
        if self.device.type != "cpu":
            where = f", device={self.device}"
        return (
            f"BlockLayout(seq_len={self.seq_len}, block_size={block}{lead}, blocks={self.nnz}, "
            f"density={self.density:.4g}{inside}, is_causal={self.is_causal}{where})"
        )

    # ---- conversions

    def dense_blocks(self) -> Tensor:
        """Return booleans `(batch or 1, heads or 1, query blocks, key blocks)`, True if active; refused above 2^26."""
        shape = (self.batch_size, self.num_heads, self.query_blocks, self.key_blocks)
        conversions.check_dense(shape)
        dense = torch.zeros(shape, dtype=torch.bool, device=self.device)
        dense.view(-1, self.key_blocks)[self.row, self.indices] = True
        return dense

    def dense_mask(self) -> Tensor:
        """Return booleans `(batch or 1, heads or 1, seq, seq)`, True where a query sees a key.

        Meant for tests; refused above 2^26 elements.
        """
        conversions.check_dense((self.batch_size, self.num_heads, self.seq_len, self.seq_len))
        token = torch.arange(self.seq_len, device=self.device)
        dense = self.dense_blocks()[..., (token // self.q_block)[:, None], token // self.k_block]
        if self.kinds is not None and self.bits is not None:
            kind = torch.full((*dense.shape[:2], self.query_blocks, self.key_blocks), -1, device=self.device)
            kind.view(-1, self.key_blocks)[self.row, self.indices] = self.kinds
            kind = kind[..., (token // self.q_block)[:, None], token // self.k_block]
            dense &= (kind < 0) | self.bits[kind, (token % self.q_block)[:, None], token % self.k_block]
        if self.is_causal:
            dense.tril_()
        return dense

    def dense_part(self, queries: tuple[int, int], keys: tuple[int, int]) -> Tensor:
        """Return the rows and columns of `dense_mask` at these positions [start, stop); no query sees a key at the end
        of the layout or later."""
        last = min(keys[1], self.seq_len)
        if queries == keys == (0, self.seq_len):
            return self.dense_mask()
        short, row, column = self.part(queries, (keys[0], last))
        shown = short.dense_mask()[..., row : row + queries[1] - queries[0], column : column + last - keys[0]]
        return F.pad(shown, (0, keys[1] - last))

    def to_torch_sparse(self) -> Tensor:
        """Return the blocks as a `torch.sparse_bsr` tensor of ones.

        Its shape is `([batch, heads,] q_block * query blocks, k_block * key blocks)`. It holds whole blocks: the causal
        triangle and the length of a partial last block are lost. All values share the memory of one element. The BSR
        format needs equally many blocks in every batch element and head, so other layouts are refused, and so are
        layouts with masks inside blocks.
        """
        if self.kinds is not None:
            raise ValueError("BSR holds whole blocks, and the layout has masks inside blocks; give to_block_mask()")
        return conversions.to_bsr(self.grid, self.indptr, self.indices)

    @classmethod
    def from_torch_sparse(cls, t: Tensor, seq_len: int | None = None, *, is_causal: bool = False) -> BlockLayout:
        """Build a layout from the structure of a BSR tensor, whatever its values.

        `seq_len`: the sequence length, needed if the last blocks are partial.
        """
        indptr, indices, seq_len, block_size = conversions.from_bsr(t, seq_len)
        return cls.from_indices(indptr, indices, seq_len, block_size, is_causal=is_causal)

    def to_block_mask(self) -> BlockMask:
        """Return a FlexAttention `BlockMask`, without forming a dense mask over tokens.

        Its padded lists are as wide as PyTorch makes them, because printing, slicing and `to_dense` of a `BlockMask`
        need this width. If a table would have more than 4 million entries, it is only as wide as the longest list.

        Blocks that the diagonal or the end of the sequence cuts become partial blocks. The mask_mod looks the block up
        by bisection, since FlexAttention without compilation reads nothing but the mask_mod.
        """
        return conversions.to_block_mask(self.grid, *self.tables)

    @classmethod
    def from_block_mask(cls, m: BlockMask) -> BlockLayout:
        """Build a layout that shows what a FlexAttention `BlockMask` shows.

        The mask_mod is evaluated on the partial blocks alone. What it hides inside a block becomes a mask of bits, and
        the layout is causal if no query sees a later key, as in `from_mask_mod`.
        """
        return cls._of(*masks.from_block_mask(m))

    def plot(self, ax: Axes | None = None, *, batch: int = 0, head: int = 0) -> Axes:
        """Draw one head's blocks, queries downwards, keys to the right; grey where a pixel covers several blocks."""
        drawn = self.select(batch=[batch], heads=[head])
        blocks = drawn.row.cpu().numpy(), drawn.indices.cpu().numpy()
        ax = plot_blocks(blocks, (self.query_blocks, self.key_blocks), self.grid, ax)
        block = f"{self.q_block} x {self.k_block}"
        if self.q_block == self.k_block:
            block = f"{self.q_block}"
        ax.set_title(f"blocks of {block}, density {drawn.density:.3g}")
        return ax

    # ---- inner workings

    @classmethod
    def _of(cls, grid: BlockGrid, lists: Lists, kinds: Tensor | None = None, bits: Tensor | None = None) -> BlockLayout:
        counts, indices = lists
        counts = counts[(None,) * (3 - counts.ndim)]
        tables = _named(row_offsets(counts)), _named(indices)
        inside = () if kinds is None or bits is None else (_named(kinds), _named(bits))
        return cls(*tables, grid.seq_len, grid.q_block, grid.k_block, grid.is_causal, *inside)

    def _with(self, indptr: Tensor, indices: Tensor, *inside: Tensor, **changes: Any) -> BlockLayout:
        """Return this layout with new tables that no other code refers to, those of masks last; `changes` replace other
        fields."""
        changes |= zip(("kinds", "bits"), map(_named, inside), strict=False)
        return replace(self, indptr=_named(indptr), indices=_named(indices), **changes)

    def _chosen(self, indptr: Tensor, entries: Tensor, shift: int = 0, **changes: Any) -> BlockLayout:
        """Return the layout of these entries of the lists, with key blocks numbered from `shift`."""
        inside = () if self.kinds is None else (self.kinds[entries],)
        return self._with(indptr, self.indices[entries] - shift, *inside, **changes)

    def _combined(self, other: BlockLayout, combine: Callable[[Tensor, Tensor], Tensor]) -> BlockLayout:
        """Return the layout that shows a pair iff `combine` of what the two show is true."""
        lead = self._common_lead(other)
        return self._of(*masks.combined(self.repeated(lead).entries, other.repeated(lead).entries, lead, combine))

    @classmethod
    def _of_spans(cls, grid: BlockGrid, spans: Spans) -> BlockLayout:
        return cls._of(grid, lists_of_spans(grid, spans))

    def repeated(self, lead: tuple[int, int]) -> BlockLayout:
        """Return this layout with lists for `lead` = (batch elements, heads); shared lists are repeated for them."""
        batch = [0] * lead[0] if self.batch_size == 1 else None
        heads = [0] * lead[1] if self.num_heads == 1 else None
        return self.select(batch=batch, heads=heads)

    def _keys(self, lead: tuple[int, int]) -> Tensor:
        """Return row * key_blocks + column of all active blocks, ascending, int64; row numbers continue from one head
        to the next. `lead`: the result's (batch elements, heads); shared lists are repeated for them."""
        layout = self.repeated(lead)
        return layout.row.mul_(self.key_blocks).add_(layout.indices)

    def _merge(self, other: BlockLayout) -> tuple[Tensor, tuple[int, int]]:
        lead = self._common_lead(other)
        return sort_keys(torch.cat([self._keys(lead), other._keys(lead)]), "stable"), lead

    def _common_lead(self, other: BlockLayout) -> tuple[int, int]:
        """Return the (batch elements, heads) of a layout made of both; ValueError if they do not fit together."""
        mine = (self.seq_len, self.block_size, self.device)
        theirs = (other.seq_len, other.block_size, other.device)
        if mine != theirs:
            raise ValueError(f"layouts must agree in (seq_len, block_size, device), got {mine} and {theirs}")
        sizes = {name: {getattr(self, name), getattr(other, name)} - {1} for name in ("batch_size", "num_heads")}
        if any(len(size) > 1 for size in sizes.values()):
            raise ValueError(f"layouts must agree in batch_size and num_heads, or have 1, got {self} and {other}")
        return max(self.batch_size, other.batch_size), max(self.num_heads, other.num_heads)


def _chosen(name: str, wanted: Sequence[int] | None, count: int) -> list[int] | slice:
    """Return the wanted numbers; `slice(None)` for all in order."""
    if wanted is None:
        return slice(None)
    chosen = checks.integers(name, wanted)
    if not all(-count <= i < count for i in chosen):
        raise ValueError(f"{name} must lie in [0, {count}), the layout's own; got {list(chosen)}")
    if [i % count for i in chosen] == list(range(count)):
        return slice(None)
    return list(chosen)


def _named(table: Tensor) -> Tensor:
    """Name (`cache.name_of`) and return a table that no other code refers to, so that `_own` does not copy it."""
    if not torch.compiler.is_compiling():
        name_of(table)
    return table


def _own(table: Tensor) -> Tensor:
    """Return the table that a layout keeps: contiguous, as kernels read it, and never written to by others. Unless
    `_named` has named it, it is copied: it may belong to the caller, or lie in a buffer that a compiled graph
    reuses."""
    if torch.compiler.is_compiling():
        return table.contiguous()
    if is_named(table) and table.is_contiguous() and not table.is_inference():
        return table
    with torch.inference_mode(False):  # no later training could save a tensor of inference mode
        return _named(table.clone(memory_format=torch.contiguous_format))


def warn_of_blind(keys: Tensor, remedy: str) -> None:
    """Warn if some token of some head sees no key; `remedy` ends the warning.

    `keys`: how many keys each token of each head sees, `(..., heads, seq)`.
    The warning points at the line that called the caller of this function.
    """
    blind = int((keys == 0).sum())
    if blind:
        warnings.warn(
            f"{blind} of {keys.numel()} (head, token) pairs see no key at {keys.shape[-1]} tokens and "
            f"{keys.shape[-2]} heads; their output is 0. {remedy}",
            stacklevel=3,
        )
