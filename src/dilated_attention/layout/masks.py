"""Make and combine the masks of bits that entries of a layout carry where whole blocks are not enough.

A mask belongs to one block: booleans (q_block, k_block), query by key. Equal masks are stored once and have one
number, their kind. `shown` holds what some blocks show, booleans (blocks, q_block, k_block), False for pairs beyond the
end of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dilated_attention import checks
from dilated_attention.layout import ranges
from dilated_attention.layout.conversions import block_numbers
from dilated_attention.layout.ranges import Range
from dilated_attention.layout.spans import BlockGrid, BlockSize, Lists, lists_of_keys, sort_keys
from dilated_attention.torch_internals import mapped_indices, not_traced

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function of batch element, head, query and key, each one number, that says whether the query sees the key."""

Tables = tuple[BlockGrid, Lists, Tensor | None, Tensor | None]
"""The tables of a layout: its grid, its lists, and the kinds and bits of blocks that are not whole, or None."""

_AT_ONCE = 2**24
"""The most pairs whose masks are formed at one time."""


class Entries(NamedTuple):
    """Hold the entries of a layout's lists: row and column of each block, and the layout's kinds and bits. Rows
    continue from head to head and from batch element to batch element."""

    grid: BlockGrid
    row: Tensor
    column: Tensor
    kinds: Tensor | None
    bits: Tensor | None

    def slices(self) -> Iterator[slice]:
        return slices(len(self.row), self.grid)

    def shown(self, some: slice | Tensor) -> Tensor:
        """Return what some of the entries show."""
        seen = _inside(self.grid, self.row[some], self.column[some])
        if self.kinds is not None and self.bits is not None:
            kinds = self.kinds[some]
            has_mask = kinds >= 0
            seen[has_mask] &= self.bits[kinds[has_mask]]
        return seen


def slices(blocks: int, grid: BlockGrid) -> Iterator[slice]:
    """Cut a list of blocks into runs whose masks may be formed at one time."""
    step = max(1, _AT_ONCE // (grid.q_block * grid.k_block))
    for start in range(0, blocks, step):
        yield slice(start, start + step)


def _inside(grid: BlockGrid, row: Tensor, column: Tensor) -> Tensor:
    """Return which pairs of blocks lie before the end of the sequence and, in a causal grid, not after the query."""
    query, key = _tokens(grid, row, column)
    inside = (query < grid.seq_len) & (key < grid.seq_len)
    if grid.is_causal:
        inside &= key <= query
    return inside


def _tokens(grid: BlockGrid, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    """Return the queries (blocks, q_block, 1) and the keys (blocks, 1, k_block) of blocks."""
    query = (row % grid.rows * grid.q_block)[:, None] + torch.arange(grid.q_block, device=row.device)
    key = (column * grid.k_block)[:, None] + torch.arange(grid.k_block, device=row.device)
    return query[:, :, None], key[:, None, :]


# ---- collecting


class _Collected:
    """Collect blocks and what they show, and number the masks of those that are neither whole nor empty.

    Blocks are numbered row * columns + column. Row numbers continue from head to head and from batch element to batch
    element.
    """

    def __init__(self, grid: BlockGrid) -> None:
        self.grid = grid
        self.blocks: list[Tensor] = []
        self.kinds: list[Tensor] = []
        self.is_lower: list[Tensor] = []  # of each block, whether it shows exactly its lower triangle
        self.shows_later = False
        self.numbers: dict[bytes, int] = {}

    def add(self, blocks: Tensor, shown: Tensor) -> None:
        """Add blocks and what they show; those that show nothing are left out."""
        # The greatest and the least byte of 1,024 masks of 128 x 128 take 0.6 ms, their sum 60 ms.
        some = shown.flatten(1).view(torch.uint8).amax(1) > 0
        blocks = blocks[some]
        if not len(blocks):
            return
        shown = shown[some]
        row = blocks // self.grid.columns
        column = blocks % self.grid.columns
        is_cut = shown.flatten(1).view(torch.uint8).amin(1) == 0
        pairs = self._pairs(row, column)
        at_end = (pairs < self.grid.q_block * self.grid.k_block).nonzero()[:, 0]
        is_cut[at_end] = shown[at_end].flatten(1).sum(1) < pairs[at_end]
        kinds = torch.full_like(blocks, -1)
        cut = is_cut.nonzero()[:, 0]
        kinds[cut] = self._numbered(shown[cut]).to(kinds.device)

        causal = replace(self.grid, is_causal=True)
        is_lower = torch.zeros_like(blocks, dtype=torch.bool)
        is_above = causal.above(row, column)
        on_diagonal = (causal.cut(row, column) & ~is_above).nonzero()[:, 0]
        earlier = _inside(causal, row[on_diagonal], column[on_diagonal])
        of_diagonal = shown[on_diagonal]
        is_lower[on_diagonal] = (of_diagonal == earlier).flatten(1).all(1)
        later = bool(is_above.any()) or bool((of_diagonal & ~earlier).any())
        self.shows_later = self.shows_later or later

        self.blocks.append(blocks)
        self.kinds.append(kinds)
        self.is_lower.append(is_lower)

    def add_whole(self, blocks: Tensor) -> None:
        """Add blocks that show all their pairs, none of which lies beyond the end of the sequence."""
        if not len(blocks):
            return
        first_query = blocks // self.grid.columns % self.grid.rows * self.grid.q_block
        last_key = (blocks % self.grid.columns + 1) * self.grid.k_block - 1
        self.shows_later = self.shows_later or bool((last_key > first_query).any())
        self.blocks.append(blocks)
        self.kinds.append(torch.full_like(blocks, -1))
        self.is_lower.append(torch.zeros_like(blocks, dtype=torch.bool))

    def _pairs(self, row: Tensor, column: Tensor) -> Tensor:
        """Return how many pairs of each block lie inside the sequence."""
        grid = self.grid
        queries = (grid.seq_len - row % grid.rows * grid.q_block).clamp(max=grid.q_block)
        keys = (grid.seq_len - column * grid.k_block).clamp(max=grid.k_block)
        return queries * keys

    def _numbered(self, shown: Tensor) -> Tensor:
        """Return the number of each mask; a new one gets the next number."""
        found = [self.numbers.setdefault(mask, len(self.numbers)) for mask in _packed(shown)]
        return torch.tensor(found, dtype=torch.int64, device="cpu")

    def tables(self, lead: tuple[int, int], finds_causality: bool = True) -> Tables:
        """Return the tables of a layout for `lead` = (batch elements, heads). With `finds_causality` it is causal if
        no later key is seen, and then blocks that show their lower triangle need no mask."""
        grid = self.grid
        if not self.blocks:
            return grid, lists_of_keys(grid, torch.empty(0, dtype=torch.int64, device="cpu"), lead), None, None
        blocks = torch.cat(self.blocks)
        kinds = torch.cat(self.kinds)
        is_lower = torch.cat(self.is_lower) & (kinds >= 0)
        if finds_causality and not self.shows_later and bool(is_lower.any()):
            grid = replace(grid, is_causal=True)
            kinds[is_lower] = -1
        blocks, order = blocks.sort()
        used, kinds = kinds[order].unique(return_inverse=True)
        used = used.tolist()
        if used[0] < 0:
            kinds -= 1
            used = used[1:]
        if not used:
            return grid, lists_of_keys(grid, blocks, lead), None, None
        masks = list(self.numbers)
        bits = _unpacked([masks[number] for number in used], grid)
        return grid, lists_of_keys(grid, blocks, lead), kinds, bits.to(blocks.device)


@not_traced
def _packed(shown: Tensor) -> list[bytes]:
    return [mask.tobytes() for mask in np.packbits(shown.flatten(1).cpu().numpy(), axis=1)]


@not_traced
def _unpacked(packed: Sequence[bytes], grid: BlockGrid) -> Tensor:
    size = grid.q_block * grid.k_block
    rows = np.frombuffer(b"".join(packed), dtype=np.uint8).reshape(len(packed), -1)
    bits = np.unpackbits(rows, axis=1, count=size)
    return torch.from_numpy(bits.view(bool)).view(-1, grid.q_block, grid.k_block)


def words_of(bits: Tensor) -> Tensor:
    """Pack masks (masks, rows, columns) for the kernels: ceil(columns / 32) int32 words for each row, a bit per column.

    Two words follow the last row, so that a kernel may read 64 bits from any byte of a row.
    """
    columns = bits.shape[2]
    words = -(-columns // 32)
    padded = torch.nn.functional.pad(bits, (0, 32 * words - columns)).view(torch.uint8).unflatten(2, (4 * words, 8))
    packed = torch.zeros_like(padded[..., 0])
    for i in range(8):
        packed |= padded[..., i] << i
    return torch.nn.functional.pad(packed.flatten().view(torch.int32), (0, 2))


def sorted_lists(indptr: Tensor, lists: Tensor, blocks: Tensor, kinds: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Sort the blocks of each list, those that are `first` before the others.

    Return the entries, block + 2^32 (kind + 1), and where in each list the others begin, of indptr's shape.
    """
    order = (2 * lists + ~first).argsort(stable=True)
    entries = (blocks + ((kinds + 1) << 32))[order]
    split = indptr.clone()
    split[..., :-1] += torch.bincount(lists[first], minlength=split[..., :-1].numel()).view_as(split[..., :-1])
    return entries, split


# ---- functions and dense masks


def from_mask_mod(
    mask_mod: MaskMod,
    q_len: int,
    k_len: int | None,
    batch: int | None,
    heads: int | None,
    block_size: BlockSize,
    device: torch.device | str,
) -> Tables:
    if not callable(mask_mod):
        raise ValueError(f"mask_mod must be a function of (b, h, q_idx, kv_idx); got {checks.kind_of(mask_mod)}")
    q_len = checks.positive("q_len", q_len)
    k_len = q_len if k_len is None else checks.positive("k_len", k_len)
    if batch is None:
        batch = 1
    if heads is None:
        heads = 1
    lead = checks.positive("batch", batch), checks.positive("heads", heads)
    grid = BlockGrid.of(max(q_len, k_len), block_size, False)
    function = _Function(mask_mod, (q_len, k_len), grid, lead[1])
    collected = _Collected(grid)
    for whole, cut in function.blocks(lead[0] * lead[1], torch.device(device)):
        collected.add_whole(whole)
        for some in slices(len(cut), grid):
            collected.add(cut[some], function.shown(cut[some]))
    return collected.tables(lead)


@dataclass(frozen=True, slots=True)
class _Function:
    """Evaluate a mask_mod of `size` = (queries, keys) on blocks, numbered as in `_Collected`, of `heads` heads."""

    mask_mod: MaskMod
    size: tuple[int, int]
    grid: BlockGrid
    heads: int

    def blocks(self, lists: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Find, some rows of the grid at a time, the blocks that show all their pairs, and those that may show some, of
        `lists` heads: number b * heads + h is head h of batch element b."""
        grid = self.grid
        queries, keys = self.size
        column = torch.arange(-(-keys // grid.k_block), device=device)
        key = self._range(column, grid.k_block, keys)
        rows = -(-queries // grid.q_block)
        at_once = max(1, _AT_ONCE // (16 * len(column)))
        for list_number, start in product(range(lists), range(0, rows, at_once)):
            b, h = (torch.tensor(x, device=device) for x in divmod(list_number, self.heads))
            row = torch.arange(start, min(rows, start + at_once), device=device)[:, None]
            query = self._range(row, grid.q_block, queries)
            inside = ((row + 1) * grid.q_block <= queries) & ((column + 1) * grid.k_block <= keys)
            shown = ranges.bounds(self.mask_mod, b, h, query, key)
            if shown is None:
                shown = Range(torch.zeros_like(inside), torch.ones_like(inside))
            whole = shown.low & inside
            cut = shown.high & ~whole
            number = (list_number * grid.rows + row) * grid.columns + column
            yield number[whole], number[cut]

    def _range(self, block: Tensor, size: int, end: int) -> Range:
        return Range(block * size, ((block + 1) * size).clamp(max=end) - 1)

    def inside(self, blocks: Tensor) -> Tensor:
        """Return which pairs of some blocks exist, `(blocks, q_block, k_block)`."""
        query, key = _tokens(self.grid, blocks // self.grid.columns, blocks % self.grid.columns)
        return (query < self.size[0]) & (key < self.size[1])

    def shown(self, blocks: Tensor) -> Tensor:
        """Return what some blocks show, or raise ValueError with the first index that fails."""
        queries, keys = self.size
        row = blocks // self.grid.columns
        list_number = row // self.grid.rows
        b = list_number // self.heads
        h = list_number % self.heads
        query, key = _tokens(self.grid, row, blocks % self.grid.columns)
        inside = self.inside(blocks)
        query = query[:, :, 0].clamp(max=queries - 1)
        key = key[:, 0].clamp(max=keys - 1)
        of_keys = torch.vmap(self.mask_mod, in_dims=(None, None, None, 0))
        of_pairs = torch.vmap(of_keys, in_dims=(None, None, 0, None))
        of_blocks = torch.vmap(of_pairs)
        where = f"b={int(b[0])}, h={int(h[0])}, q_idx={int(query[0, 0])}, kv_idx={int(key[0, 0])}"
        try:
            with mapped_indices():
                shown = of_blocks(b, h, query, key)
        except Exception as error:
            raise ValueError(f"mask_mod fails, called first with {where}: {error}") from error
        if not isinstance(shown, Tensor) or shown.dtype != torch.bool:
            raise ValueError(
                f"mask_mod must return a boolean; got {checks.kind_of(shown)} at {where}; "
                "compare, as in q_idx >= kv_idx"
            )
        if shown.shape != inside.shape:
            raise ValueError(
                f"mask_mod must return one boolean per pair; got {tuple(shown.shape[3:])} at {where}; it is called "
                "with one number of each"
            )
        return inside & shown


def from_pairs(mask: Tensor, block_size: BlockSize) -> Tables:
    mask = mask[(None,) * (4 - mask.ndim)]
    if not torch.compiler.is_compiling():
        return _collected_of(mask, block_size).tables((mask.shape[0], mask.shape[1]))
    grid = BlockGrid.of(mask.shape[3], block_size, False)
    counts, indices, kinds, bits = torch.ops.dilated_attention.lists_of_pairs(mask, grid.q_block, grid.k_block)
    return grid, (counts, indices), kinds, bits


def _collected_of(mask: Tensor, block_size: BlockSize) -> _Collected:
    """Collect the blocks of pairs `(batch, heads, queries, keys)`."""
    batch, heads, queries, keys = mask.shape
    grid = BlockGrid.of(max(queries, keys), block_size, False)
    collected = _Collected(grid)
    at_once = max(1, _AT_ONCE // (grid.columns * grid.k_block * grid.q_block)) * grid.q_block
    for b in range(batch):
        for h in range(heads):
            first_row = (b * heads + h) * grid.rows
            for start in range(0, queries, at_once):
                shown = mask[b, h, start : start + at_once]
                below = -shown.shape[0] % grid.q_block
                right = grid.columns * grid.k_block - keys
                if below or right:
                    shown = torch.nn.functional.pad(shown, (0, right, 0, below))
                tiled = shown.unflatten(1, (-1, grid.k_block)).unflatten(0, (-1, grid.q_block)).transpose(1, 2)
                row, column = tiled.any(3).any(2).nonzero(as_tuple=True)
                blocks = (first_row + start // grid.q_block + row) * grid.columns + column
                collected.add(blocks, tiled[row, column])
    return collected


torch.library.define(
    "dilated_attention::lists_of_pairs", "(Tensor mask, int q_block, int k_block) -> (Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.impl("dilated_attention::lists_of_pairs", "CompositeExplicitAutograd")
def _(mask: Tensor, q_block: int, k_block: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (counts, indices, kinds, bits) of a layout that is not causal, for graphs."""
    collected = _collected_of(mask, (q_block, k_block))
    _, (counts, indices), kinds, bits = collected.tables((mask.shape[0], mask.shape[1]), finds_causality=False)
    if kinds is None or bits is None:
        kinds = torch.full_like(indices, -1)
        bits = mask.new_empty(0, q_block, k_block)
    return counts, indices, kinds, bits


@torch.library.register_fake("dilated_attention::lists_of_pairs")
def _(mask: Tensor, q_block: int, k_block: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    blocks = torch.library.get_ctx().new_dynamic_size(min=0)
    masks = torch.library.get_ctx().new_dynamic_size(min=0)
    counts = mask.new_empty(*mask.shape[:2], -(-mask.shape[2] // q_block), dtype=torch.int64)
    indices = mask.new_empty(blocks, dtype=torch.int64)
    return counts, indices, torch.empty_like(indices), mask.new_empty(masks, q_block, k_block)


# ---- FlexAttention


def from_block_mask(m: BlockMask) -> Tables:
    queries, keys = m.seq_lengths
    size = int(m.BLOCK_SIZE[0]), int(m.BLOCK_SIZE[1])
    grid = BlockGrid.of(max(queries, keys), size, False)
    lead = (m.kv_num_blocks.shape[0], m.kv_num_blocks.shape[1])
    rows = -(-queries // size[0])
    function = _Function(m.mask_mod, (queries, keys), grid, lead[1])
    collected = _Collected(grid)
    cut = block_numbers(m.kv_num_blocks, m.kv_indices, grid, rows)
    for some in slices(len(cut), grid):
        collected.add(cut[some], function.shown(cut[some]))
    if m.full_kv_num_blocks is not None and m.full_kv_indices is not None:
        whole = block_numbers(m.full_kv_num_blocks, m.full_kv_indices, grid, rows)
        for some in slices(len(whole), grid):
            collected.add(whole[some], function.inside(whole[some]))
    return collected.tables(lead)


# ---- algebra


def stacked(parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor | None, Tensor | None]:
    """Return the kinds and bits of layouts whose lists follow one another; None and None if all blocks are whole.
    `parts`: the `tables` of each layout."""
    kinds = []
    bits = []
    count = 0
    for _, indices, *inside in parts:
        if not inside:
            kinds.append(torch.full_like(indices, -1))
            continue
        own_kinds, own_bits = inside
        kinds.append(torch.where(own_kinds < 0, -1, own_kinds + count))
        bits.append(own_bits)
        count += len(own_bits)
    if not bits:
        return None, None
    return torch.cat(kinds), torch.cat(bits)


def combined(a: Entries, b: Entries, lead: tuple[int, int], combine: Callable[[Tensor, Tensor], Tensor]) -> Tables:
    """Return the tables of a layout for `lead` = (batch elements, heads) that shows a pair iff `combine` of what a and
    b show is true. Both have lists for `lead`."""
    grid = replace(a.grid, is_causal=False)
    numbers = [part.row * grid.columns + part.column for part in (a, b)]
    blocks = sort_keys(torch.cat(numbers), "stable").unique_consecutive()
    collected = _Collected(grid)
    for some in slices(len(blocks), grid):
        wanted = blocks[some]
        seen = []
        for part, own in zip((a, b), numbers, strict=True):
            place = torch.searchsorted(wanted, own).clamp(max=len(wanted) - 1)
            here = (wanted[place] == own).nonzero()[:, 0]
            of_part = torch.zeros(len(wanted), grid.q_block, grid.k_block, dtype=torch.bool, device=blocks.device)
            of_part[place[here]] = part.shown(here)
            seen.append(of_part)
        collected.add(wanted, combine(*seen))
    return collected.tables(lead)


def equal(a: Entries, b: Entries) -> bool:
    """Return whether two layouts with equal lists show the same pairs of each block."""
    return all(torch.equal(a.shown(some).cpu(), b.shown(some).cpu()) for some in a.slices())
