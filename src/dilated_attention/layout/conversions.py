"""Convert lists of key blocks to and from masks, compressed rows, `torch.sparse` and FlexAttention, with checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dilated_attention import checks
from dilated_attention.kernels.cpu import lists as compiled
from dilated_attention.layout.spans import BlockGrid, BlockSize, Lists, block_pair, rows_of
from dilated_attention.torch_internals import require_when_run

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

DENSE_LIMIT = 2**26  # elements of a dense mask that tests and small plots may ask for
WIDE_LISTS = 2**22  # the most entries that the padded lists of a BlockMask may have


def _few(x: Tensor) -> str:
    flat = x.flatten().tolist()
    if len(flat) <= 8:
        return str(flat)
    return f"[{', '.join(map(str, flat[:8]))}, …]"


def _integers(name: str, values: Tensor | Sequence[int]) -> Tensor:
    """Return values as a new int64 tensor, which does not change with `values`; ValueError if they are no integers."""
    if isinstance(values, Tensor):
        tensor = values.clone()
    else:
        tensor = torch.tensor(values, device="cpu")
    whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    if not whole and tensor.numel():
        raise ValueError(f"{name} must be whole numbers, got {tensor.dtype}")
    return tensor.to(torch.int64)


def anywhere(wrong: Tensor) -> bool:
    """Return whether `wrong` is true anywhere; in a compiled graph False, which raises RuntimeError when it runs."""
    if not torch.compiler.is_compiling():
        return bool(wrong.any())
    require_when_run(~wrong.any(), "the lists of a BlockLayout do not fit its blocks")
    return False


def check_causal(grid: BlockGrid, counts: Tensor, indices: Tensor) -> None:
    if not grid.is_causal:
        return
    row = rows_of(counts, indices.numel())
    above = grid.above(row, indices)
    if anywhere(above):
        at = int(above.nonzero()[0])
        raise ValueError(
            f"is_causal=True contradicts key block {int(indices[at])} of query block {int(row[at]) % grid.rows}, "
            "which lies wholly above the diagonal; leave is_causal out and take .causal()"
        )


def from_mask(mask: Tensor, seq_len: int | None, block_size: BlockSize, is_causal: bool) -> tuple[BlockGrid, Lists]:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        remedy = "give torch.as_tensor(mask)"
        if isinstance(mask, Tensor):
            remedy = "use mask > threshold"
        raise ValueError(
            f"mask must be a boolean tensor (True: the block is active), got {checks.kind_of(mask)}; {remedy}"
        )
    if not 2 <= mask.ndim <= 4:
        raise ValueError(f"mask must be ([batch,] [heads,] query blocks, key blocks), got shape {tuple(mask.shape)}")
    if seq_len is None:
        q_block, k_block = block_pair(block_size)
        seq_len = mask.shape[-2] * q_block
        if mask.shape[-1] * k_block != seq_len:
            raise ValueError(
                f"mask of {mask.shape[-2]} x {mask.shape[-1]} blocks of {q_block} x {k_block} is not square in "
                "tokens; give seq_len"
            )
    grid = BlockGrid.of(seq_len, block_size, is_causal)
    if mask.shape[-2:] != (grid.rows, grid.columns):
        raise ValueError(
            f"mask must have {grid.rows} x {grid.columns} blocks for seq_len={seq_len} and blocks of "
            f"{grid.q_block} x {grid.k_block}, got {mask.shape[-2]} x {mask.shape[-1]}"
        )
    counts = mask.sum(-1)
    indices = mask.nonzero()[:, -1]
    check_causal(grid, counts, indices)
    return grid, (counts, indices)


def from_indices(indptr: Tensor | Sequence[int], indices: Tensor | Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return (indptr, indices) as int64, indptr with three dimensions; `check_lists` checks the content."""
    indptr = _integers("indptr", indptr)
    indices = _integers("indices", indices)
    if not 1 <= indptr.ndim <= 3:
        raise ValueError(
            f"indptr must be ([batch,] [heads,] query blocks + 1), got shape {tuple(indptr.shape)}; "
            "one list serves all heads"
        )
    return indptr.reshape(*(1,) * (3 - indptr.ndim), *indptr.shape), indices


def from_topk(indices: Tensor, block_size: BlockSize, seq_len: int | None, is_causal: bool) -> tuple[BlockGrid, Lists]:
    if not isinstance(indices, Tensor) or indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"indices must be an int64 or int32 tensor, what torch.topk(...).indices is; got {checks.kind_of(indices)}"
        )
    if not 2 <= indices.ndim <= 4:
        raise ValueError(
            "indices must be (query blocks, k), (batch, query blocks, k) or (batch, heads, query blocks, k), "
            f"got shape {tuple(indices.shape)}"
        )
    q_block, k_block = block_pair(block_size, q_block=1)
    if seq_len is None:
        seq_len = indices.shape[-2] * q_block
    grid = BlockGrid.of(seq_len, (q_block, k_block), is_causal)
    if indices.shape[-2] != grid.rows:
        raise ValueError(
            f"indices must have {grid.rows} rows for seq_len={grid.seq_len} and query blocks of {q_block}, "
            f"got shape {tuple(indices.shape)}"
        )
    lead = (*indices.shape[:-2], 1, 1)[:2]
    if checks.readable(indices) and compiled.available() and indices.numel():
        tokens = grid.seq_len if grid.is_causal else 0
        found = compiled.lists_of_choices(indices, grid.columns, (grid.q_block, grid.k_block), tokens)
        if found is not None:
            counts, columns = found
            return grid, (counts.reshape(*lead, grid.rows), columns)

    outside = (indices < -1) | (indices >= grid.columns)  # of lists that do not fit, it finds what to name
    if anywhere(outside):
        raise ValueError(
            f"indices must lie in [0, {grid.columns}), or be -1 for none, for seq_len={grid.seq_len} and key blocks of "
            f"{k_block}; got {_few(indices[outside])}"
        )
    ordered = indices.long().sort(-1).values
    named = ordered.diff(prepend=ordered.new_full((*ordered.shape[:-1], 1), -1)) > 0
    lists = named.sum(-1).reshape(*lead, grid.rows), ordered[named]
    check_causal(grid, *lists)
    return grid, lists


def of_pairs(mask: Tensor, seq_len: int | None, block_size: BlockSize) -> bool:
    """Return whether `mask` has a boolean for each pair of tokens; `from_mask` checks it otherwise."""
    if seq_len is None or not isinstance(mask, Tensor) or mask.dtype != torch.bool or not 2 <= mask.ndim <= 4:
        return False
    return mask.shape[-2:] == (seq_len, seq_len) and block_pair(block_size) != (1, 1)


def check_kinds(size: tuple[int, int], indices: Tensor, kinds: Tensor | None, bits: Tensor | None) -> None:
    """Check the dtypes and shapes of the masks inside blocks."""
    if kinds is None and bits is None:
        return
    if kinds is None or bits is None:
        raise ValueError("kinds and bits must be given together: kinds[i] is the row of bits that entry i has, or -1")
    if kinds.dtype != torch.int64 or kinds.shape != indices.shape:
        raise ValueError(
            f"kinds must be int64 like indices, {tuple(indices.shape)}; got {kinds.dtype} {tuple(kinds.shape)}"
        )
    if bits.dtype != torch.bool or bits.ndim != 3 or tuple(bits.shape[1:]) != size:
        raise ValueError(f"bits must be booleans (masks, {size[0]}, {size[1]}); got {bits.dtype} {tuple(bits.shape)}")


def check_numbers(kinds: Tensor | None, bits: Tensor | None) -> None:
    """Check that every kind is the number of a mask, or -1."""
    if kinds is None or bits is None:
        return
    outside = (kinds < -1) | (kinds >= len(bits))
    if anywhere(outside):
        raise ValueError(f"kinds must lie in [0, {len(bits)}), or be -1 for a whole block; got {_few(kinds[outside])}")


def check_lists(grid: BlockGrid, indptr: Tensor, indices: Tensor) -> None:
    bounds = indptr.reshape(-1, grid.rows + 1)
    starts = torch.cat([bounds[:, 0], indptr.new_tensor([indices.numel()])])
    ends = torch.cat([indptr.new_tensor([0]), bounds[:, -1]])
    if anywhere(torch.cat([bounds.diff(dim=-1).flatten() < 0, starts != ends])):
        raise ValueError(
            f"indptr must ascend from 0 to the {indices.numel()} indices, each head going on where the last one "
            f"ended; got {_few(indptr)}"
        )
    outside = (indices < 0) | (indices >= grid.columns)
    if anywhere(outside):
        raise ValueError(
            f"indices must lie in [0, {grid.columns}) for seq_len={grid.seq_len} and key blocks of {grid.k_block}, "
            f"got {_few(indices[outside])}"
        )
    counts = indptr.diff(dim=-1)
    row = rows_of(counts, indices.numel())
    falls = (indices.diff() <= 0) & (row[1:] == row[:-1])
    if anywhere(falls):
        at = int(falls.nonzero()[0])
        raise ValueError(
            f"indices must be sorted and distinct within a row, got {int(indices[at])} before "
            f"{int(indices[at + 1])} in row {int(row[at])}"
        )
    check_causal(grid, counts, indices)


def check_dense(shape: tuple[int, ...]) -> None:
    if math.prod(shape) > DENSE_LIMIT:
        raise ValueError(f"a dense mask of {shape} is for tests and small plots, at most {DENSE_LIMIT} elements")


def to_bsr(grid: BlockGrid, indptr: Tensor, indices: Tensor) -> Tensor:
    lead = tuple(indptr.shape[:2])
    if lead == (1, 1):
        lead = ()
    totals = indptr[..., -1] - indptr[..., 0]
    per_list = int(totals.flatten()[0])
    if bool((totals != per_list).any()):
        raise ValueError(
            f"BSR needs equally many blocks in every batch element and head, got {_few(totals)}; convert them apart"
        )
    return torch.sparse_bsr_tensor(
        (indptr - indptr[..., :1]).reshape(*lead, -1),
        indices.reshape(*lead, per_list),
        torch.ones((), device=indices.device).expand(*lead, per_list, grid.q_block, grid.k_block),
        size=(*lead, grid.rows * grid.q_block, grid.columns * grid.k_block),
        device=indices.device,
        check_invariants=True,
    )


def from_bsr(t: Tensor, seq_len: int | None) -> tuple[Tensor, Tensor, int, tuple[int, int]]:
    """Return (indptr, indices, seq_len, block size) of a BSR tensor, which must be square unless `seq_len` is given."""
    if t.layout != torch.sparse_bsr:
        raise ValueError(f"t must be a torch.sparse_bsr tensor, got {t.layout}; use t.to_sparse_bsr(block_size)")
    if not 2 <= t.ndim <= 4:
        raise ValueError(f"t must be ([batch,] [heads,] queries, keys), got shape {tuple(t.shape)}")
    if seq_len is None:
        if t.shape[-1] != t.shape[-2]:
            raise ValueError(f"t is not square, got {t.shape[-2]} x {t.shape[-1]}; give seq_len")
        seq_len = t.shape[-1]
    grid = BlockGrid.of(seq_len, (t.values().shape[-2], t.values().shape[-1]), False)
    size = grid.rows * grid.q_block, grid.columns * grid.k_block
    if t.shape[-2:] != size:
        raise ValueError(f"t must be {size[0]} x {size[1]} for seq_len={seq_len}, got {t.shape[-2]} x {t.shape[-1]}")
    starts = t.crow_indices().to(torch.int64).reshape(-1, grid.rows + 1)
    starts = starts + torch.arange(starts.shape[0], device=t.device)[:, None] * t.col_indices().shape[-1]
    indptr = starts.reshape(*t.shape[:-2], grid.rows + 1)
    return indptr, t.col_indices().flatten(), seq_len, (grid.q_block, grid.k_block)


def to_block_mask(
    grid: BlockGrid, indptr: Tensor, indices: Tensor, kinds: Tensor | None = None, bits: Tensor | None = None
) -> BlockMask:
    from torch.nn.attention.flex_attention import BlockMask  # sympy, in PyTorch 2.15

    counts = indptr.diff(dim=-1)
    lead = tuple(indptr.shape[:2])
    row = rows_of(counts, indices.numel())
    query = row % grid.rows
    end = grid.seq_len
    cut = grid.cut(row, indices) | ((indices + 1) * grid.k_block > end) | ((query + 1) * grid.q_block > end)
    if kinds is not None:
        cut |= kinds >= 0
    key_row = row // grid.rows * grid.columns + indices

    lists = []
    for keep in (cut, ~cut):
        lists.append(_rectangle(row[keep], indices[keep], (*lead, grid.rows), grid.columns))
        order = key_row[keep].argsort(stable=True)
        lists.append(_rectangle(key_row[keep][order], query[keep][order], (*lead, grid.columns), grid.rows))
    kv, q = lists[:2]
    full_kv, full_q = lists[2:]

    sees = _sees(grid, indptr, indices, kinds, bits, steps=int(counts.max()).bit_length())
    size = grid.q_block, grid.k_block
    return BlockMask((end, end), *kv, *full_kv, *q, *full_q, BLOCK_SIZE=size, mask_mod=sees)


def _rectangle(row: Tensor, column: Tensor, shape: tuple[int, ...], width: int) -> tuple[Tensor, Tensor]:
    """Turn (row, column) pairs, sorted by row, into int32 (counts, entries): each row's list, padded with zeros.

    `shape`: (batch, heads, rows), the shape of counts. Lists are padded to `width`, as BlockMask's methods need, or to
    the longest list if the table would otherwise have more than `WIDE_LISTS` entries.
    """
    counts = torch.bincount(row, minlength=math.prod(shape))
    if counts.numel() * width > WIDE_LISTS:
        width = int(counts.max())
    entries = torch.zeros(counts.numel(), max(1, width), dtype=torch.int32, device=row.device)
    entries[row, torch.arange(row.numel(), device=row.device) - (counts.cumsum(0) - counts)[row]] = column.int()
    return counts.int().view(shape), entries.view(*shape, -1)


def _sees(
    grid: BlockGrid, indptr: Tensor, indices: Tensor, kinds: Tensor | None, bits: Tensor | None, steps: int
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return a mask_mod that says whether a pair's block is listed and shows the pair, by `steps` bisections, the bit
    length of the longest list's length."""
    shared_batch = indptr.shape[0] == 1
    shared_head = indptr.shape[1] == 1
    listed = indices
    if not indices.numel():
        listed = indices.new_full((1,), -1)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if shared_batch:
            b = b * 0
        if shared_head:
            h = h * 0
        i = q // grid.q_block
        j = k // grid.k_block
        end = indptr[b, h, i + 1]
        low = indptr[b, h, i]
        high = end
        for _ in range(steps):
            middle = (low + high) // 2
            right = (low < high) & (listed[middle.clamp(max=listed.numel() - 1)] < j)
            low = torch.where(right, middle + 1, low)
            high = torch.where(right, high, middle)
        low = low.clamp(max=listed.numel() - 1)
        found = (low < end) & (listed[low] == j)
        if kinds is not None and bits is not None:
            kind = kinds[low]
            found = found & ((kind < 0) | bits[kind.clamp(min=0), q % grid.q_block, k % grid.k_block])
        if grid.is_causal:
            found = found & (k <= q)
        return found

    return mask_mod


def block_numbers(counts: Tensor, entries: Tensor, grid: BlockGrid, rows: int) -> Tensor:
    """Turn lists of a BlockMask with `rows` rows per head, as `_rectangle` returns them, into ascending block numbers,
    row * columns + column. Row numbers continue from one head to the next."""
    width = entries.shape[-1]
    row, at = (torch.arange(width, device=entries.device) < counts.reshape(-1, 1)).nonzero(as_tuple=True)
    column = entries.reshape(-1, width)[row, at].long()
    row = row // rows * grid.rows + row % rows
    return (row * grid.columns + column).sort().values
