"""Block layouts: for every block of queries, the sorted list of key blocks that it sees.

A layout cuts a sequence of N tokens into query blocks of `q_block` and key blocks of `k_block` tokens (the last ones
may be partial) and stores, as compressed sparse rows, the key blocks of each query block. Query i sees key j iff block
j // k_block is listed for block i // q_block and, when `is_causal`, j <= i. A query block without a list is legal: its
queries give out 0 and lse -inf.

**Rounding.** The analytic builders state their pattern over tokens. A block is active iff the pattern holds for at
least one of its (query, key) pairs (causal: a pair with key <= query); an active block shows all its pairs. Builders
work on intervals of keys per query block: time and memory are O(active blocks), no dense mask is made.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIN_BLOCK, MAX_BLOCK = 16, 256
DENSE_LIMIT = 2**26  # elements of a dense mask that tests and small plots may ask for

Spans = Sequence[tuple[Tensor, Tensor]]

_names, _numbers = WeakTensorKeyDictionary(), count()


def name_of(table: Any) -> int:
    """A number that stands for a thing which never changes, while it lives: a key that reads no content.

    A table is the same tensor on both sides of the dispatcher, whose operators take no layouts.
    """
    name: int = _names.setdefault(table, next(_numbers))
    return name


class Runs(NamedTuple):
    """Maximal runs of consecutive key blocks: row (b, h, i) owns runs indptr[b, h, i] to indptr[b, h, i + 1]."""

    indptr: Tensor
    start: Tensor
    length: Tensor


class Transposed(NamedTuple):
    """The query blocks of each key block: (b, h, j) owns indices[indptr[b, h, j] : indptr[b, h, j + 1]], ascending."""

    indptr: Tensor
    indices: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class BlockLayout:
    """Key blocks per query block, shared or per head, shared or per batch element. Immutable, compared by content.

    indptr: int64 `(batch or 1, heads or 1, query blocks + 1)`; row (b, h, i) owns `indices[indptr[b, h, i] :
    indptr[b, h, i + 1]]`. All rows lie one after the other: the flattened lists form one CSR of batch * heads * query
    blocks rows. indices: int64 `(blocks,)`, key blocks, strictly ascending within a row.

    The constructor checks form only. `from_indices` and `from_mask` take lists from elsewhere and check their content.
    """

    indptr: Tensor
    indices: Tensor
    seq_len: int
    q_block: int = 128
    k_block: int = 128
    is_causal: bool = False

    def __post_init__(self) -> None:
        rows = block_grid(self.seq_len, (self.q_block, self.k_block))[2]
        if self.indptr.dtype != torch.int64 or self.indices.dtype != torch.int64:
            raise ValueError(f"indptr and indices must be int64, got {self.indptr.dtype} and {self.indices.dtype}")
        if self.indptr.ndim != 3 or self.indptr.shape[-1] != rows + 1:
            raise ValueError(
                f"indptr must have shape (batch or 1, heads or 1, {rows + 1}) for {self.seq_len} tokens in query "
                f"blocks of {self.q_block}, got {tuple(self.indptr.shape)}"
            )
        if self.indices.ndim != 1:
            raise ValueError(f"indices must be one flat list, got shape {tuple(self.indices.shape)}")

    # ---- builders

    @classmethod
    def local(
        cls,
        seq_len: int,
        window: int | None = None,
        block_size: int | tuple[int, int] = 128,
        *,
        density: float | None = None,
        is_causal: bool = False,
    ) -> BlockLayout:
        """Query i sees key j iff |i - j| < window (tokens; a window beyond the sequence is clipped to it).

        Give either `window` or `density`, which picks the window whose density comes nearest.
        """
        q_block, _, rows, _ = block_grid(seq_len, block_size)
        first, last = _query_span(seq_len, q_block, rows)

        def spans(window: int) -> Spans:
            return [(first - (window - 1), last + (window - 1))]

        size = _either("window", window, density, seq_len, block_size, is_causal, spans, seq_len)
        return cls._of_spans(seq_len, block_size, is_causal, spans(size))

    @classmethod
    def global_(
        cls,
        seq_len: int,
        tokens: int | Sequence[int] | None = None,
        block_size: int | tuple[int, int] = 128,
        *,
        density: float | None = None,
        is_causal: bool = False,
    ) -> BlockLayout:
        """Query i sees key j iff i or j is a global token.

        `tokens`: the number of leading global tokens, or their positions. Give either `tokens` or `density`, which
        picks the number of leading ones. When causal only leading tokens can be global: any other one is an error,
        since the queries before it cannot see it.
        """
        q_block, _, rows, _ = block_grid(seq_len, block_size)
        first, last = _query_span(seq_len, q_block, rows)
        if tokens is not None and not isinstance(tokens, int):
            position = torch.as_tensor(tokens).flatten().to(torch.int64).unique()
            if position.numel() == 0 or int(position[0]) < 0 or int(position[-1]) >= seq_len:
                raise ValueError(f"tokens must be positions in [0, {seq_len}), got {tokens}")
            if is_causal and int(position[-1]) >= position.numel():
                raise ValueError(
                    f"tokens={list(tokens)} cannot all be global when is_causal: queries before a token never see it. "
                    "Use leading tokens, or build without is_causal and take .causal()"
                )
            after = torch.searchsorted(position, last, right=True)
            holds = torch.searchsorted(position, first) < after
            row_end = torch.where(holds, position[(after - 1).clamp_(min=0)] if is_causal else seq_len - 1, -1)
            return cls._of_spans(
                seq_len, block_size, is_causal, [(position[None], position[None]), (torch.zeros_like(first), row_end)]
            )

        def spans(leading: int) -> Spans:
            row_end = last.clamp(max=leading - 1) if is_causal else torch.full_like(last, seq_len - 1)
            row_end = torch.where(first < leading, row_end, -1)
            return [(torch.zeros_like(first), torch.full_like(last, leading - 1)), (torch.zeros_like(first), row_end)]

        size = _either("tokens", tokens, density, seq_len, block_size, is_causal, spans, seq_len)
        return cls._of_spans(seq_len, block_size, is_causal, spans(size))

    @classmethod
    def strided(
        cls,
        seq_len: int,
        stride: int,
        block_size: int | tuple[int, int] = 128,
        *,
        is_causal: bool = False,
    ) -> BlockLayout:
        """Query i sees key j iff (i - j) mod stride == 0 (tokens), as in the Sparse Transformer.

        A stride of s blocks activates every s-th block; one that no block divides touches two blocks a period, and one
        below a block touches all.
        """
        q_block, k_block, rows, _ = block_grid(seq_len, block_size)
        _positive("stride", stride)
        first, last = _query_span(seq_len, q_block, rows)
        origin = first % stride
        if stride <= k_block:  # every whole key block holds a hit: one interval, up to the last hit
            hit = origin + (seq_len - 1 - origin) // stride * stride + (last - first)
            return cls._of_spans(seq_len, block_size, is_causal, [(torch.zeros_like(hit), hit)])
        start = origin + torch.arange(-1, seq_len // stride + 1) * stride
        return cls._of_spans(seq_len, block_size, is_causal, [(start, start + (last - first))])

    @classmethod
    def dilated(
        cls,
        seq_len: int,
        rates: Sequence[int],
        reach: int | None = None,
        block_size: int | tuple[int, int] = 128,
        *,
        density: float | None = None,
        is_causal: bool = False,
    ) -> BlockLayout:
        """A dilated sliding window over blocks: block i sees the blocks i + m * rate, |m| <= reach, for every rate.

        A rate counts blocks of max(q_block, k_block) tokens. Rates 1, 2, 4, … with a small reach give the logarithmic
        pattern: O(reach * len(rates)) blocks a row, every distance within a power of two. Give `reach` (default 1) or
        `density`, which picks the reach whose density comes nearest.
        """
        q_block, k_block, rows, _ = block_grid(seq_len, block_size)
        if not rates:
            raise ValueError("rates must name at least one rate, got none")
        for rate in rates:
            _positive("rates", rate)
        unit = max(q_block, k_block)
        units = -(-seq_len // unit)
        first, last = _query_span(seq_len, q_block, rows)

        def spans(reach: int) -> Spans:
            step = torch.arange(-reach, reach + 1)
            offset = torch.cat([step[step.abs() * rate < units] * rate for rate in rates]).unique()
            return [((first // unit + offset) * unit, (last // unit + offset + 1) * unit - 1)]

        reach = 1 if reach is None and density is None else reach
        size = _either("reach", reach, density, seq_len, block_size, is_causal, spans, units)
        return cls._of_spans(seq_len, block_size, is_causal, spans(size))

    @classmethod
    def hierarchical(
        cls,
        seq_len: int,
        levels: Sequence[tuple[int, int | None]],
        block_size: int | tuple[int, int] = 128,
        *,
        is_causal: bool = False,
    ) -> BlockLayout:
        """Query i sees key j iff some level (stride, window), in tokens, has j mod stride == 0 and |i - j| < window.

        Levels go fine to coarse: strides and windows ascend; a window of None reaches over the whole sequence. Near
        keys are all seen, farther ones through the blocks that hold a multiple of a coarser stride.
        """
        q_block, k_block, rows, _ = block_grid(seq_len, block_size)
        if not levels:
            raise ValueError("levels must hold at least one (stride, window), got none")
        for stride, window in levels:
            _positive("a level's stride", stride)
            _positive("a level's window", seq_len if window is None else window)
        sizes = [(stride, seq_len if window is None else min(window, seq_len)) for stride, window in levels]
        if any(s > t or w > x for (s, w), (t, x) in pairwise(sizes)):
            raise ValueError(f"levels must go fine to coarse, strides and windows ascending, got {list(levels)}")
        first, last = _query_span(seq_len, q_block, rows)
        spans = []
        for stride, window in sizes:
            low = -((window - 1 - first).clamp(max=0) // stride)
            high = (last + window - 1).clamp(max=seq_len - 1) // stride
            if stride <= k_block:  # every block between the two ends holds a multiple
                spans.append((low * stride, torch.where(high >= low, high * stride, -1)))
            else:
                step = low + torch.arange(int((high - low).max()) + 1)
                spans.append((step * stride, torch.where(step <= high, step * stride, -1)))
        return cls._of_spans(seq_len, block_size, is_causal, spans)

    @classmethod
    def random(
        cls,
        seq_len: int,
        density: float,
        seed: int,
        block_size: int | tuple[int, int] = 128,
        *,
        is_causal: bool = False,
    ) -> BlockLayout:
        """Every query block sees round(density * n), at least one, of its n key blocks (causal: of those not later).

        Drawn uniformly without replacement; the same seed gives the same layout.
        """
        check_density(density)
        visible = visible_blocks(seq_len, block_size, is_causal)
        wanted = (visible * density).round().long().clamp_(min=1)
        return cls._of_counts(seq_len, block_size, is_causal, *_draw(visible, wanted, seed))

    @classmethod
    def longformer(
        cls,
        seq_len: int,
        window: int,
        global_tokens: int | Sequence[int],
        block_size: int | tuple[int, int] = 128,
        *,
        is_causal: bool = False,
    ) -> BlockLayout:
        """`local(window)` and `global_(global_tokens)` (Beltagy et al., 2020)."""
        return cls.local(seq_len, window, block_size, is_causal=is_causal) | cls.global_(
            seq_len, global_tokens, block_size, is_causal=is_causal
        )

    @classmethod
    def bigbird(
        cls,
        seq_len: int,
        window: int,
        global_tokens: int | Sequence[int],
        random_blocks: int,
        seed: int,
        block_size: int | tuple[int, int] = 128,
        *,
        is_causal: bool = False,
    ) -> BlockLayout:
        """`longformer` and, in each query block, `random_blocks` key blocks drawn uniformly (Zaheer et al., 2020).

        A drawn block may be one that the window or the global tokens show already.
        """
        _positive("random_blocks", random_blocks)
        visible = visible_blocks(seq_len, block_size, is_causal)
        drawn = _draw(visible, visible.clamp(max=random_blocks), seed)
        return cls.longformer(seq_len, window, global_tokens, block_size, is_causal=is_causal) | cls._of_counts(
            seq_len, block_size, is_causal, *drawn
        )

    @classmethod
    def from_mask(
        cls,
        mask: Tensor,
        seq_len: int | None = None,
        block_size: int | tuple[int, int] = 128,
        *,
        is_causal: bool = False,
    ) -> BlockLayout:
        """From booleans `(query blocks, key blocks)`, `(heads, …)` or `(batch, heads, …)`: True is active.

        Without `seq_len` the blocks must be whole. With `is_causal` no block may lie wholly above the diagonal.
        """
        if mask.dtype != torch.bool:
            raise ValueError(
                f"mask must be boolean (True: the block is active), got {mask.dtype}; use mask > threshold"
            )
        if not 2 <= mask.ndim <= 4:
            raise ValueError(
                f"mask must be ([batch,] [heads,] query blocks, key blocks), got shape {tuple(mask.shape)}"
            )
        if seq_len is None:
            q_block, k_block = _block_pair(block_size)
            seq_len = mask.shape[-2] * q_block
            if mask.shape[-1] * k_block != seq_len:
                raise ValueError(
                    f"mask of {mask.shape[-2]} x {mask.shape[-1]} blocks of {q_block} x {k_block} is not square in "
                    "tokens; give seq_len"
                )
        q_block, k_block, rows, columns = block_grid(seq_len, block_size)
        if mask.shape[-2:] != (rows, columns):
            raise ValueError(
                f"mask must have {rows} x {columns} blocks for seq_len={seq_len} and blocks of {q_block} x {k_block}, "
                f"got {mask.shape[-2]} x {mask.shape[-1]}"
            )
        mask = mask.reshape(*(1,) * (4 - mask.ndim), *mask.shape)
        layout = cls._of_counts(seq_len, block_size, is_causal, mask.sum(-1), mask.nonzero()[:, -1])
        layout._check_causal()
        return layout

    @classmethod
    def from_indices(
        cls,
        indptr: Tensor | Sequence[int],
        indices: Tensor | Sequence[int],
        seq_len: int,
        block_size: int | tuple[int, int] = 128,
        *,
        is_causal: bool = False,
    ) -> BlockLayout:
        """From compressed sparse rows, checked: `indptr` `([batch,] [heads,] query blocks + 1)`, see the class.

        With `is_causal` no block may lie wholly above the diagonal.
        """
        q_block, k_block, rows, columns = block_grid(seq_len, block_size)
        indptr, indices = _integers("indptr", indptr), _integers("indices", indices)
        if indptr.ndim > 3 or indptr.ndim < 1:
            raise ValueError(
                f"indptr must be ([batch,] [heads,] query blocks + 1), got shape {tuple(indptr.shape)}; "
                "one list serves all heads"
            )
        layout = cls(
            indptr.reshape(*(1,) * (3 - indptr.ndim), *indptr.shape), indices, seq_len, q_block, k_block, is_causal
        )
        bounds = layout.indptr.reshape(-1, rows + 1)
        ends = torch.cat([bounds[:1, 0] * 0, bounds[:, -1]])
        if (
            bool((bounds.diff(dim=-1) < 0).any())
            or not torch.equal(ends[:-1], bounds[:, 0])
            or int(ends[-1]) != indices.numel()
        ):
            raise ValueError(
                f"indptr must ascend from 0 to the {indices.numel()} indices, each head going on where the last one "
                f"ended; got {_few(layout.indptr)}"
            )
        outside = (indices < 0) | (indices >= columns)
        if bool(outside.any()):
            raise ValueError(
                f"indices must lie in [0, {columns}) for seq_len={seq_len} and key blocks of {k_block}, "
                f"got {_few(indices[outside])}"
            )
        row = layout.row
        falls = (indices.diff() <= 0) & (row[1:] == row[:-1])
        if bool(falls.any()):
            at = int(falls.nonzero()[0])
            raise ValueError(
                f"indices must be sorted and distinct within a row, got {int(indices[at])} before "
                f"{int(indices[at + 1])} in row {int(row[at])}"
            )
        layout._check_causal()
        return layout

    # ---- shape and content

    @property
    def block_size(self) -> tuple[int, int]:
        return self.q_block, self.k_block

    @property
    def batch_size(self) -> int:
        """1 when all batch elements share the lists."""
        return self.indptr.shape[0]

    @property
    def num_heads(self) -> int:
        """1 when all heads share the lists."""
        return self.indptr.shape[1]

    @property
    def query_blocks(self) -> int:
        return self.indptr.shape[2] - 1

    @property
    def key_blocks(self) -> int:
        return -(-self.seq_len // self.k_block)

    @property
    def nnz(self) -> int:
        """Active blocks, over all batch elements and heads that have lists of their own."""
        return self.indices.numel()

    @property
    def nbytes(self) -> int:
        return self.indptr.nbytes + self.indices.nbytes

    @property
    def device(self) -> torch.device:
        return self.indices.device

    @cached_property
    def key(self) -> Hashable:
        """Stands for this layout in caches. Equal layouts that were made apart have different keys."""
        return (name_of(self.indptr), name_of(self.indices), self.seq_len, *self.block_size, self.is_causal)

    @cached_property
    def density(self) -> float:
        """Active blocks over those that dense attention (causal: dense causal attention) computes."""
        per_list = int(visible_blocks(self.seq_len, self.block_size, self.is_causal).sum())
        return self.nnz / (per_list * self.batch_size * self.num_heads)

    @cached_property
    def counts(self) -> Tensor:
        """Active blocks per row, int64 `(batch or 1, heads or 1, query blocks)`."""
        return self.indptr.diff(dim=-1)

    @property
    def row(self) -> Tensor:
        """The row of each entry of `indices`, int64, in the flattened (batch, head, query block) order."""
        counts = self.counts.flatten()
        return torch.repeat_interleave(
            torch.arange(counts.numel(), device=self.device), counts, output_size=self.indices.numel()
        )

    @cached_property
    def runs(self) -> Runs:
        """The maximal runs of consecutive key blocks in each row."""
        if self.nnz == 0:
            return Runs(torch.zeros_like(self.indptr), self.indices, self.indices)
        opens = torch.ones_like(self.indices, dtype=torch.bool)
        row = self.row
        opens[1:] = (self.indices.diff() != 1) | (row[1:] != row[:-1])
        at = opens.nonzero().flatten()
        before = torch.zeros(self.nnz + 1, dtype=torch.int64, device=self.device)
        torch.cumsum(opens, 0, out=before[1:])
        length = torch.cat([at, at.new_tensor([self.nnz])]).diff()
        return Runs(before[self.indptr], self.indices[at], length)

    @cached_property
    def transposed(self) -> Transposed:
        """The lists seen from the key blocks, for the gradients of k and v."""
        rows, columns, row = self.query_blocks, self.key_blocks, self.row
        key = row // rows * columns + self.indices
        indices = _sort(key * rows + row % rows, "quicksort") % rows
        counts = torch.bincount(key, minlength=self.batch_size * self.num_heads * columns)
        return Transposed(row_offsets(counts.reshape(self.batch_size, self.num_heads, columns)), indices)

    @cached_property
    def masked(self) -> Tensor:
        """Which entries of `indices` the diagonal cuts, booleans `(blocks,)`; False where all pairs are visible."""
        if not self.is_causal:
            return torch.zeros_like(self.indices, dtype=torch.bool)
        last_key = ((self.indices + 1) * self.k_block).clamp_(max=self.seq_len) - 1
        return last_key > self.row % self.query_blocks * self.q_block

    @cached_property
    def seen(self) -> Tensor:
        """How many keys each token sees, int64 `(batch or 1, heads or 1, seq)`."""
        size = torch.full((self.key_blocks,), self.k_block, device=self.device)
        size[-1] = self.seq_len - (self.key_blocks - 1) * self.k_block
        row, number = self.row, size[self.indices]
        cut, rows = self.masked, self.indptr[..., 1:].numel()
        whole = number.new_zeros(rows).index_add_(0, row[~cut], number[~cut])
        query = (row[cut] % self.query_blocks * self.q_block)[:, None] + torch.arange(self.q_block, device=self.device)
        before = (query + 1 - (self.indices[cut] * self.k_block)[:, None]).clamp_(min=0)
        partial = number.new_zeros(rows, self.q_block).index_add_(0, row[cut], before.minimum(number[cut][:, None]))
        seen = (whole[:, None] + partial).view(self.batch_size, self.num_heads, -1)
        return seen[..., : self.seq_len].contiguous()

    def coverage(self, seq_len: int, num_heads: int) -> Tensor:
        """How many keys each token of each head sees: int64, `(num_heads, seq_len)`, with lists per batch element
        `(batch, num_heads, seq_len)`.

        Warns, naming how many, when some tokens of some heads see no key at all: their output is 0.
        """
        self.check(self.batch_size, seq_len, num_heads)
        keys = self.seen.expand(-1, num_heads, -1)
        warn_of_blind(keys, "Unite with a layout that covers every row, such as BlockLayout.local(seq_len, 1)")
        return keys if self.batch_size > 1 else keys[0]

    def flops(self, seq_len: int, num_heads: int, head_dim: int, is_causal: bool = False) -> int:
        """Floating-point operations of a forward: 4 head_dim for each score entry (two products, multiply and add).

        Of one batch element; of all of them where they have lists of their own.
        """
        self.check(self.batch_size, seq_len, num_heads)
        layout = self.causal() if is_causal else self
        return 4 * head_dim * int(layout.seen.sum()) * (num_heads // self.num_heads)

    def check(self, batch_size: int, seq_len: int, num_heads: int, num_kv_heads: int | None = None) -> None:
        """Raise unless the layout fits tensors of this batch size, length and number of heads.

        Lists for each of fewer KV heads serve the group of query heads that share the KV head.
        """
        if seq_len != self.seq_len:
            raise ValueError(f"layout is for {self.seq_len} tokens, got seq_len={seq_len}; build one for that length")
        if self.num_heads not in (1, num_heads, num_kv_heads):
            raise ValueError(f"layout has lists for {self.num_heads} heads, got {num_heads}; give 1 or {num_heads}")
        if self.batch_size not in (1, batch_size):
            raise ValueError(
                f"layout has lists for a batch of {self.batch_size}, got {batch_size}; give 1 or {batch_size}"
            )

    def to(self, device: torch.device | str) -> BlockLayout:
        """This layout with its tables on `device`. Calls need no copy made ahead: they keep one in `plan_cache`."""
        device = torch.empty(0, device=device).device
        if device == self.device:
            return self
        return replace(self, indptr=self.indptr.to(device), indices=self.indices.to(device))

    def select(self, *, batch: Sequence[int] | None = None, heads: Sequence[int] | None = None) -> BlockLayout:
        """The lists of these batch elements and heads alone."""
        if batch is heads is None:
            return self
        indptr = self.indptr[slice(None) if batch is None else list(batch)]
        indptr = indptr[:, slice(None) if heads is None else list(heads)]
        if indptr.shape == self.indptr.shape and torch.equal(indptr, self.indptr):
            return self
        counts = indptr.diff(dim=-1).flatten()
        start = row_offsets(counts.reshape(indptr.shape[0], indptr.shape[1], -1))
        shift = indptr[..., :-1].flatten() - (counts.cumsum(0) - counts)
        entry = torch.arange(int(counts.sum()), device=self.device) + torch.repeat_interleave(shift, counts)
        return replace(self, indptr=start, indices=self.indices[entry])

    def for_heads(self, num_heads: int) -> BlockLayout:
        """With a list for each of `num_heads` query heads, where it has one for each of fewer key-value heads."""
        if self.num_heads in (1, num_heads):
            return self
        return self.select(heads=[head * self.num_heads // num_heads for head in range(num_heads)])

    def prefix(self, seq_len: int) -> BlockLayout:
        """The layout of the first `seq_len` tokens: the lists of their query blocks, without later key blocks."""
        if seq_len > self.seq_len:
            raise ValueError(f"layout is for {self.seq_len} tokens, got a sample of {seq_len}; build a longer one")
        if seq_len == self.seq_len:
            return self
        rows, columns = -(-seq_len // self.q_block), -(-seq_len // self.k_block)
        keep = (self.row % self.query_blocks < rows) & (self.indices < columns)
        before = torch.zeros(self.nnz + 1, dtype=torch.int64, device=self.device)
        torch.cumsum(keep, 0, out=before[1:])
        indptr = before[self.indptr[..., : rows + 1]]
        return replace(self, indptr=indptr, indices=self.indices[keep], seq_len=seq_len)

    # ---- algebra

    def __or__(self, other: BlockLayout) -> BlockLayout:
        """Blocks of either. Both are causal or neither: a block cannot be masked for one and whole for the other."""
        if not isinstance(other, BlockLayout):
            return NotImplemented
        if self.is_causal != other.is_causal:
            raise ValueError(
                f"cannot unite a layout with is_causal={self.is_causal} and one with is_causal={other.is_causal}; "
                "take .causal() of both"
            )
        merged, lead = self._merge(other)
        keep = torch.ones_like(merged, dtype=torch.bool)
        keep[1:] = merged[1:] != merged[:-1]
        return self._of_keys(merged[keep], lead, self.is_causal)

    def __and__(self, other: BlockLayout) -> BlockLayout:
        """Blocks of both; causal if either is."""
        if not isinstance(other, BlockLayout):
            return NotImplemented
        merged, lead = self._merge(other)
        both = self._of_keys(merged[1:][merged[1:] == merged[:-1]], lead, self.is_causal and other.is_causal)
        return both.causal() if self.is_causal or other.is_causal else both

    def causal(self) -> BlockLayout:
        """Keys no later than the query: blocks wholly above the diagonal go, those it cuts are masked by token."""
        if self.is_causal:
            return self
        keep = ~self._above()
        before = torch.zeros(self.nnz + 1, dtype=torch.int64, device=self.device)
        torch.cumsum(keep, 0, out=before[1:])
        return replace(self, indptr=before[self.indptr], indices=self.indices[keep], is_causal=True)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockLayout):
            return NotImplemented
        if (self.seq_len, self.block_size, self.is_causal) != (other.seq_len, other.block_size, other.is_causal):
            return False
        return torch.equal(self.indptr.cpu(), other.indptr.cpu()) and torch.equal(
            self.indices.cpu(), other.indices.cpu()
        )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        content = (self.indptr.cpu().numpy().tobytes(), self.indices.cpu().numpy().tobytes())
        return hash((self.seq_len, self.block_size, self.is_causal, self.indptr.shape, content))

    def __repr__(self) -> str:
        lead = "".join(
            f", {name}={size}" for name, size in (("batch", self.batch_size), ("heads", self.num_heads)) if size > 1
        )
        block = self.q_block if self.q_block == self.k_block else self.block_size
        where = "" if self.device.type == "cpu" else f", device={self.device}"
        return (
            f"BlockLayout(seq_len={self.seq_len}, block_size={block}{lead}, blocks={self.nnz}, "
            f"density={self.density:.4g}, is_causal={self.is_causal}{where})"
        )

    # ---- conversions

    def dense_blocks(self) -> Tensor:
        """Booleans `(batch or 1, heads or 1, query blocks, key blocks)`; refused when large."""
        shape = (self.batch_size, self.num_heads, self.query_blocks, self.key_blocks)
        _check_dense(shape)
        dense = torch.zeros(shape, dtype=torch.bool, device=self.device)
        dense.view(-1, self.key_blocks)[self.row, self.indices] = True
        return dense

    def dense_mask(self) -> Tensor:
        """Which query sees which key, booleans `(batch or 1, heads or 1, seq, seq)`; for tests, refused when large."""
        _check_dense((self.batch_size, self.num_heads, self.seq_len, self.seq_len))
        token = torch.arange(self.seq_len, device=self.device)
        dense = self.dense_blocks()[..., (token // self.q_block)[:, None], token // self.k_block]
        return dense.tril_() if self.is_causal else dense

    def to_torch_sparse(self) -> Tensor:
        """The blocks as a `torch.sparse_bsr` tensor of ones, `([batch, heads,] q_block * rows, k_block * columns)`.

        It carries whole blocks: neither the causal triangle nor the length of a partial last block. The values are one
        element expanded. BSR has one list length for a whole batch, so lists of unequal total length are refused.
        """
        lead = () if self.batch_size == self.num_heads == 1 else (self.batch_size, self.num_heads)
        totals = self.indptr[..., -1] - self.indptr[..., 0]
        per_list = int(totals.flatten()[0])
        if bool((totals != per_list).any()):
            raise ValueError(
                f"BSR needs equally many blocks in every batch element and head, got {_few(totals)}; convert them apart"
            )
        return torch.sparse_bsr_tensor(
            (self.indptr - self.indptr[..., :1]).reshape(*lead, -1),
            self.indices.reshape(*lead, per_list),
            torch.ones((), device=self.device).expand(*lead, per_list, *self.block_size),
            size=(*lead, self.query_blocks * self.q_block, self.key_blocks * self.k_block),
            check_invariants=True,
        )

    @classmethod
    def from_torch_sparse(cls, t: Tensor, seq_len: int | None = None, *, is_causal: bool = False) -> BlockLayout:
        """From the structure of a BSR tensor, whatever its values; `seq_len` where the last blocks are partial."""
        if t.layout != torch.sparse_bsr:
            raise ValueError(f"t must be a torch.sparse_bsr tensor, got {t.layout}; use t.to_sparse_bsr(block_size)")
        if not 2 <= t.ndim <= 4:
            raise ValueError(f"t must be ([batch,] [heads,] queries, keys), got shape {tuple(t.shape)}")
        block_size = (t.values().shape[-2], t.values().shape[-1])
        if seq_len is None:
            if t.shape[-1] != t.shape[-2]:
                raise ValueError(f"t is not square, got {t.shape[-2]} x {t.shape[-1]}; give seq_len")
            seq_len = t.shape[-1]
        q_block, k_block, rows, columns = block_grid(seq_len, block_size)
        if t.shape[-2:] != (rows * q_block, columns * k_block):
            raise ValueError(
                f"t must be {rows * q_block} x {columns * k_block} for seq_len={seq_len}, "
                f"got {t.shape[-2]} x {t.shape[-1]}"
            )
        starts = t.crow_indices().to(torch.int64).reshape(-1, rows + 1)
        starts = starts + torch.arange(starts.shape[0], device=t.device)[:, None] * t.col_indices().shape[-1]
        indptr = starts.reshape(*t.shape[:-2], rows + 1)
        return cls.from_indices(
            indptr, t.col_indices().to(torch.int64).flatten(), seq_len, block_size, is_causal=is_causal
        )

    def to_block_mask(self) -> BlockMask:
        """As a FlexAttention `BlockMask`, lists as wide as the widest row: O(rows * widest row), never a dense mask.

        Blocks that the diagonal or the end of the sequence cuts are the partial ones. The mask_mod looks the block up
        by bisection, since FlexAttention without compilation reads nothing but the mask_mod.
        """
        rows, columns, row = self.query_blocks, self.key_blocks, self.row
        query, last_key = row % rows, (self.indices + 1) * self.k_block
        cut = self.masked | (last_key > self.seq_len) | ((query + 1) * self.q_block > self.seq_len)
        lead = (self.batch_size, self.num_heads)
        key_row = row // rows * columns + self.indices
        lists = []
        for keep in (cut, ~cut):
            lists.append(_rectangle(row[keep], self.indices[keep], (*lead, rows)))
            order = key_row[keep].argsort(stable=True)
            lists.append(_rectangle(key_row[keep][order], query[keep][order], (*lead, columns)))
        (kv, q), (full_kv, full_q) = lists[:2], lists[2:]
        return BlockMask(
            (self.seq_len, self.seq_len), *kv, *full_kv, *q, *full_q, BLOCK_SIZE=self.block_size, mask_mod=self._sees()
        )

    @classmethod
    def from_block_mask(cls, m: BlockMask) -> BlockLayout:
        """From a FlexAttention `BlockMask`: its blocks, causal if its partial blocks hold the lower triangle.

        The mask_mod is evaluated on the partial blocks; one that hides anything but the causal triangle is an error.
        """
        queries, keys = m.seq_lengths
        if queries != keys:
            raise ValueError(f"m must have as many queries as keys, got {queries} x {keys}")
        q_block, k_block, rows, columns = block_grid(keys, (int(m.BLOCK_SIZE[0]), int(m.BLOCK_SIZE[1])))
        partial = _flat(m.kv_num_blocks, m.kv_indices, columns)
        blocks = partial
        if m.full_kv_num_blocks is not None and m.full_kv_indices is not None:
            blocks = torch.cat([partial, _flat(m.full_kv_num_blocks, m.full_kv_indices, columns)]).sort().values
        lead = (m.kv_num_blocks.shape[0], m.kv_num_blocks.shape[1])
        row, column = partial // columns, partial % columns
        step_q, step_k = torch.arange(q_block, device=row.device), torch.arange(k_block, device=row.device)
        whole = lower = True
        chunk = max(1, 2**22 // (q_block * k_block))
        for at in (slice(start, start + chunk) for start in range(0, row.numel(), chunk)):
            i = (row[at] % rows * q_block)[:, None, None] + step_q[:, None]
            j = (column[at] * k_block)[:, None, None] + step_k
            inside = (i < queries) & (j < keys)
            i, j = torch.broadcast_tensors(i.clamp(max=queries - 1), j.clamp(max=keys - 1))
            head = (row[at] // rows % lead[1])[:, None, None].expand_as(i)
            batch = (row[at] // (rows * lead[1]))[:, None, None].expand_as(i)
            sees = torch.vmap(m.mask_mod)(*(x.reshape(-1) for x in (batch, head, i, j))).reshape(i.shape)
            whole = whole and bool((sees | ~inside).all())
            lower = lower and bool((sees == (j <= i))[inside].all())
        if not (whole or lower):
            raise ValueError(
                "m.mask_mod hides pairs inside a block beyond the causal triangle; a layout has blocks only"
            )
        template = cls(torch.zeros(1, 1, rows + 1, dtype=torch.int64), row[:0], keys, q_block, k_block)
        layout = template._of_keys(blocks, lead, is_causal=not whole)
        layout._check_causal()
        return layout

    def plot(self, ax: Axes | None = None, *, batch: int = 0, head: int = 0) -> Axes:
        """Draw one head's blocks, queries downwards, keys to the right; grey where a pixel holds several blocks."""
        import matplotlib.pyplot as plt

        if not (0 <= batch < self.batch_size and 0 <= head < self.num_heads):
            raise ValueError(
                f"batch={batch}, head={head} must lie in a layout of {self.batch_size} batch elements and "
                f"{self.num_heads} heads"
            )
        start, stop = (int(x) for x in self.indptr[batch, head, [0, -1]])
        rows, columns = self.query_blocks, self.key_blocks
        pixels_q, pixels_k = min(rows, 512), min(columns, 512)
        row = (self.row[start:stop] % rows).cpu() * pixels_q // rows
        column = self.indices[start:stop].cpu() * pixels_k // columns
        area = torch.bincount(torch.arange(rows) * pixels_q // rows).outer(
            torch.bincount(torch.arange(columns) * pixels_k // columns)
        )
        image = torch.bincount(row * pixels_k + column, minlength=pixels_q * pixels_k).view(pixels_q, pixels_k) / area
        ax = plt.figure(figsize=(5, 5), layout="constrained").add_subplot() if ax is None else ax
        extent = (0.0, float(columns * self.k_block), float(rows * self.q_block), 0.0)
        ax.imshow(image.numpy(), cmap="Greys", vmin=0, vmax=1, extent=extent, interpolation="nearest")
        if self.is_causal:
            ax.axline((0, 0), slope=1, color="black", linestyle="--", linewidth=0.8)
        ax.set(xlim=(0, self.seq_len), ylim=(self.seq_len, 0), xlabel="key (tokens)", ylabel="query (tokens)")
        blocks = f"{self.q_block}" if self.q_block == self.k_block else f"{self.q_block} x {self.k_block}"
        ax.set_title(f"blocks of {blocks}, density {self.density:.3g}")
        return ax

    # ---- inner workings

    @classmethod
    def _of_spans(cls, seq_len: int, block_size: int | tuple[int, int], is_causal: bool, spans: Spans) -> BlockLayout:
        low, length = _block_spans(seq_len, block_size, is_causal, spans)
        counts = length.sum(-1)
        low, length = low.flatten(), length.flatten()
        ends = length.cumsum(0)
        indices = torch.repeat_interleave(low.sub_(ends).add_(length), length)
        indices += torch.arange(indices.numel())
        return cls._of_counts(seq_len, block_size, is_causal, counts, indices)

    @classmethod
    def _of_counts(
        cls, seq_len: int, block_size: int | tuple[int, int], is_causal: bool, counts: Tensor, indices: Tensor
    ) -> BlockLayout:
        q_block, k_block = _block_pair(block_size)
        counts = counts.reshape(*(1,) * (3 - counts.ndim), *counts.shape)
        return cls(row_offsets(counts), indices, seq_len, q_block, k_block, is_causal)

    def _of_keys(self, keys: Tensor, lead: tuple[int, int], is_causal: bool) -> BlockLayout:
        row = keys // self.key_blocks
        counts = torch.bincount(row, minlength=lead[0] * lead[1] * self.query_blocks)
        return self._of_counts(
            self.seq_len,
            self.block_size,
            is_causal,
            counts.reshape(*lead, self.query_blocks),
            row.mul_(-self.key_blocks).add_(keys),
        )

    def _keys(self, lead: tuple[int, int]) -> Tensor:
        """row * key_blocks + column of each block, ascending, the lists repeated to `lead`."""
        keys = self.row.mul_(self.key_blocks).add_(self.indices)
        if lead == (self.batch_size, self.num_heads):
            return keys
        per_list = self.query_blocks * self.key_blocks
        source = torch.arange(self.batch_size * self.num_heads, device=self.device)
        source = source.view(self.batch_size, self.num_heads).expand(lead).flatten()
        starts = self.indptr[..., 0].flatten()[source]
        counts = self.indptr[..., -1].flatten()[source] - starts
        shift = starts - (counts.cumsum(0) - counts)
        target = torch.repeat_interleave(counts)
        at = torch.arange(target.numel(), device=self.device) + shift[target]
        return keys[at] + (target - source[target]) * per_list

    def _merge(self, other: BlockLayout) -> tuple[Tensor, tuple[int, int]]:
        mine = (self.seq_len, self.block_size, self.device)
        theirs = (other.seq_len, other.block_size, other.device)
        if mine != theirs:
            raise ValueError(f"layouts must agree in (seq_len, block_size, device), got {mine} and {theirs}")
        sizes = {name: {getattr(self, name), getattr(other, name)} - {1} for name in ("batch_size", "num_heads")}
        if any(len(size) > 1 for size in sizes.values()):
            raise ValueError(f"layouts must agree in batch_size and num_heads, or have 1, got {self} and {other}")
        lead = (max(self.batch_size, other.batch_size), max(self.num_heads, other.num_heads))
        return _sort(torch.cat([self._keys(lead), other._keys(lead)]), "stable"), lead

    def _above(self) -> Tensor:
        last_query = ((self.row % self.query_blocks + 1) * self.q_block).clamp_(max=self.seq_len) - 1
        return self.indices * self.k_block > last_query

    def _check_causal(self) -> None:
        if self.is_causal and bool((above := self._above()).any()):
            at = int(above.nonzero()[0])
            raise ValueError(
                f"is_causal=True contradicts key block {int(self.indices[at])} of query block "
                f"{int(self.row[at]) % self.query_blocks}, which lies wholly above the diagonal; leave is_causal out "
                "and take .causal()"
            )

    def _sees(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        indptr, indices = self.indptr, self.indices if self.nnz else self.indices.new_full((1,), -1)
        indices = indices[None]  # torch 2.8 cannot map one index: it takes a single number out of the tensor
        steps = int(self.counts.max()).bit_length()
        shared_batch, shared_head = self.batch_size == 1, self.num_heads == 1

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            b, h = b * 0 if shared_batch else b, h * 0 if shared_head else h
            i, j, first = q // self.q_block, k // self.k_block, q * 0
            end = indptr[b, h, i + 1]
            low, high = indptr[b, h, i], end
            for _ in range(steps):
                middle = (low + high) // 2
                right = (low < high) & (indices[first, middle.clamp(max=indices.numel() - 1)] < j)
                low, high = torch.where(right, middle + 1, low), torch.where(right, high, middle)
            found = (low < end) & (indices[first, low.clamp(max=indices.numel() - 1)] == j)
            return found & (k <= q) if self.is_causal else found

        return mask_mod


def warn_of_blind(keys: Tensor, remedy: str) -> None:
    """Warn the caller's caller if some of `keys`, the numbers of keys seen, are 0."""
    blind = int((keys == 0).sum())
    if blind:
        warnings.warn(
            f"{blind} of {keys.numel()} (head, token) pairs see no key at {keys.shape[-1]} tokens and "
            f"{keys.shape[-2]} heads; their output is 0. {remedy}",
            stacklevel=3,
        )


def _block_pair(block_size: int | tuple[int, int]) -> tuple[int, int]:
    pair = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    if len(pair) != 2 or not all(isinstance(b, int) and MIN_BLOCK <= b <= MAX_BLOCK for b in pair):
        raise ValueError(
            f"block_size must be a whole number from {MIN_BLOCK} to {MAX_BLOCK}, or a pair (q_block, k_block), "
            f"got {block_size}"
        )
    return pair[0], pair[1]


def block_grid(seq_len: int, block_size: int | tuple[int, int]) -> tuple[int, int, int, int]:
    _positive("seq_len", seq_len)
    q_block, k_block = _block_pair(block_size)
    return q_block, k_block, -(-seq_len // q_block), -(-seq_len // k_block)


def _positive(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def check_density(density: float) -> None:
    if not 0 < density <= 1:
        raise ValueError(f"density must lie in (0, 1], got {density}")


def _check_dense(shape: tuple[int, ...]) -> None:
    if math.prod(shape) > DENSE_LIMIT:
        raise ValueError(f"a dense mask of {shape} is for tests and small plots, at most {DENSE_LIMIT} elements")


def _few(x: Tensor) -> str:
    flat = x.flatten().tolist()
    return str(flat) if len(flat) <= 8 else f"[{', '.join(map(str, flat[:8]))}, …]"


def _integers(name: str, values: Tensor | Sequence[int]) -> Tensor:
    """int64, and never the caller's own tensor, which may change."""
    tensor = values.clone() if isinstance(values, Tensor) else torch.tensor(values)
    if tensor.numel() == 0:
        return tensor.to(torch.int64)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"{name} must be whole numbers, got {tensor.dtype}")
    return tensor.to(torch.int64)


def row_offsets(counts: Tensor) -> Tensor:
    """(b, h, rows) counts -> (b, h, rows + 1) offsets into one flat list."""
    ends = counts.flatten().cumsum(0).view_as(counts)
    return torch.cat([ends[..., :1] - counts[..., :1], ends], dim=-1)


def _query_span(seq_len: int, q_block: int, rows: int) -> tuple[Tensor, Tensor]:
    """First and last query token of each row, `(rows, 1)`."""
    first = torch.arange(rows)[:, None] * q_block
    return first, (first + q_block).clamp_(max=seq_len) - 1


def visible_blocks(seq_len: int, block_size: int | tuple[int, int], is_causal: bool) -> Tensor:
    """Key blocks that dense attention gives each query block, `(rows,)`."""
    q_block, k_block, rows, columns = block_grid(seq_len, block_size)
    if not is_causal:
        return torch.full((rows,), columns)
    return _query_span(seq_len, q_block, rows)[1].squeeze(1) // k_block + 1


def _block_spans(
    seq_len: int, block_size: int | tuple[int, int], is_causal: bool, spans: Spans
) -> tuple[Tensor, Tensor]:
    """Intervals of keys, first to last inclusive and broadcast over rows -> disjoint ascending runs (low, length)."""
    q_block, k_block, rows, _ = block_grid(seq_len, block_size)
    first, last = (torch.cat([pair[side].expand(rows, -1) for pair in spans], dim=1) for side in (0, 1))
    if is_causal:
        torch.minimum(last, _query_span(seq_len, q_block, rows)[1], out=last)
    first.clamp_(min=0), last.clamp_(max=seq_len - 1)
    empty = last < first
    low, high = first.floor_divide_(k_block), last.floor_divide_(k_block).add_(1).masked_fill_(empty, 0)
    if len(spans) > 1:
        low, order = low.sort(dim=1)
        high = high.gather(1, order)
    if low.shape[1] > 1:
        low[:, 1:] = torch.maximum(low[:, 1:], high.cummax(dim=1).values[:, :-1])
    return low, high.sub_(low).clamp_(min=0)


def _either(
    name: str,
    value: int | None,
    density: float | None,
    seq_len: int,
    block_size: int | tuple[int, int],
    is_causal: bool,
    spans: Callable[[int], Spans],
    largest: int,
) -> int:
    """The given size, or the one in [1, largest] whose density comes nearest to the one asked for."""
    if (value is None) == (density is None):
        raise ValueError(f"give either {name} or density, got {name}={value}, density={density}")
    if value is not None:
        _positive(name, value)
        return min(value, largest)
    assert density is not None
    check_density(density)
    total = int(visible_blocks(seq_len, block_size, is_causal).sum())

    def reached(size: int) -> float:
        return int(_block_spans(seq_len, block_size, is_causal, spans(size))[1].sum()) / total

    most = reached(largest)
    if most < density:
        raise ValueError(f"density={density} is out of reach: at most {most:.4g} for these arguments")
    low, high = 1, largest
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) >= density else (middle + 1, high)
    return low - 1 if low > 1 and density - reached(low - 1) < reached(low) - density else low


def _draw(visible: Tensor, wanted: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """`wanted[i]` distinct numbers below `visible[i]`, uniform, ascending: (counts, flat list)."""
    generator = torch.Generator().manual_seed(seed)
    dense = wanted * 2 > visible  # the few that are left out are drawn instead
    few = torch.where(dense, visible - wanted, wanted)
    draws = torch.empty(visible.numel(), 0, dtype=torch.int64)
    while True:
        # distinct values seen after n draws of v: about v (1 - exp(-n / v)), and v ln 2 draws show half of them
        more = 16 + int(0.75 * int(few.max()) + 0.75 * int((few.double() ** 2 / visible).max()))
        fresh = torch.rand(visible.numel(), more, generator=generator, dtype=torch.float64) * visible[:, None]
        draws = torch.cat([draws, fresh.long()], dim=1)
        value, order = draws.sort(dim=1, stable=True)
        novel = torch.ones_like(value, dtype=torch.bool)
        novel[:, 1:] = value.diff(dim=1) != 0
        seen = torch.zeros_like(novel).scatter_(1, order, novel).cumsum(1)
        if bool((seen[:, -1] >= few).all()):
            break
    # the first `few` distinct values in drawing order are a uniform subset
    taken = (novel & (seen.gather(1, order) <= few[:, None])).nonzero()
    row, value = taken[:, 0], value[tuple(taken.T)]
    if not bool(dense.any()):
        return wanted, value
    width = int(visible.max())
    counts = torch.where(dense, visible, wanted)
    base = torch.repeat_interleave(row_offsets(counts[None, None])[0, 0, :-1], counts)
    source = torch.repeat_interleave(counts)
    full = torch.arange(source.numel()) - base
    sparse = ~dense[row]
    full[~dense[source]] = value[sparse]
    left_out = torch.isin(source * width + full, (row * width + value)[~sparse])
    return wanted, full[~left_out]


def _sort(keys: Tensor, kind: Literal["quicksort", "stable"]) -> Tensor:
    """Ascending; on the CPU in place. "stable" is a merge there: linear for a few sorted lists behind each other."""
    if keys.device.type != "cpu":
        return keys.sort().values
    keys.numpy().sort(kind=kind)  # 5 ms for two lists of 600,000; torch.sort: 10 ms, and 110 ms where cores are shared
    return keys


def _rectangle(row: Tensor, column: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Lists sorted by row -> int32 (counts, entries) as wide as the longest list, zero behind its end."""
    counts = torch.bincount(row, minlength=math.prod(shape))
    entries = torch.zeros(counts.numel(), max(1, int(counts.max())), dtype=torch.int32, device=row.device)
    entries[row, torch.arange(row.numel(), device=row.device) - (counts.cumsum(0) - counts)[row]] = column.int()
    return counts.int().view(shape), entries.view(*shape, -1)


def _flat(counts: Tensor, entries: Tensor, columns: int) -> Tensor:
    """BlockMask lists -> row * columns + column, ascending."""
    width = entries.shape[-1]
    row, at = (torch.arange(width, device=entries.device) < counts.reshape(-1, 1)).nonzero(as_tuple=True)
    return (row * columns + entries.reshape(-1, width)[row, at].long()).sort().values
