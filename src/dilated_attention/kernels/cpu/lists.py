"""Make lists of columns, and list the rows of each column, with the compiled library.

Bitmaps and a counting sort do what tensor operations would need a general sort for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from dilated_attention.kernels.cpu import build

Run = Callable[..., int]


@cache
def _compiled() -> tuple[Run, Run] | None:
    """Return the library's functions (transpose, choices), or None without a library."""
    library = build.loaded()
    if library is None:
        return None
    transpose = library.dilated_attention_transpose
    transpose.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 4
    transpose.restype = ctypes.c_int64
    choices = library.dilated_attention_choices
    choices.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 8, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    choices.restype = ctypes.c_int64
    return transpose, choices


def available() -> bool:
    return _compiled() is not None


def lists_of_choices(
    chosen: Tensor, columns: int, blocks: tuple[int, int] = (1, 1), tokens: int = 0
) -> tuple[Tensor, Tensor] | None:
    """Sort the columns that each row names, drop -1 and repetitions, and return (counts, indices): how many columns
    each row has, int64 `(..., rows)`, and these columns, one ascending list after another.

    Args:
        chosen: int32 or int64 `(..., rows, width)` on the CPU.
        blocks, tokens: the tokens per (row, column) and of the sequence, if no row may name a column that begins after
            its last token. 0 tokens: it may name all.

    Returns:
        None if a row names a column that it may not.
    """
    compiled = _compiled()
    assert compiled is not None, "available() comes first"
    _, run = compiled
    chosen = chosen.contiguous()
    rows, width = chosen.shape[-2:]
    counts = torch.empty(chosen.shape[:-1], dtype=torch.int64, device="cpu")
    lists = counts.numel() // rows
    sizes = chosen.element_size(), lists, rows, width, columns, *blocks, tokens
    threads = torch.get_num_threads()
    status = run(chosen.data_ptr(), *sizes, None, counts.data_ptr(), threads)
    if status == 2:
        return None
    _check(status)

    ends = counts.flatten().cumsum(0)
    starts = ends - counts.flatten()
    indices = torch.empty(int(ends[-1]), dtype=torch.int64, device="cpu")
    _check(run(chosen.data_ptr(), *sizes, starts.data_ptr(), indices.data_ptr(), threads))
    return counts, indices


def column_counts(indptr: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Return how many rows (query blocks of a layout) list each column (key block), int64 `(..., columns)`. Row i of
    (batch, head) `...` has the columns indices[indptr[..., i] : indptr[..., i + 1]], ascending; both are int64 on the
    CPU."""
    counts = indices.new_empty(*indptr.shape[:-1], columns)
    _run(indptr, indices, None, counts, columns)
    return counts


def rows_of_columns(indptr: Tensor, indices: Tensor, starts: Tensor) -> Tensor:
    """Return the rows that list each column, in a tensor like `indices`: those of column j of (batch, head) `...` begin
    at starts[..., j], and ascend. `starts`: `(..., columns + 1)`. indptr and indices are as in `column_counts`."""
    rows = torch.empty_like(indices)
    _run(indptr, indices, starts.contiguous(), rows, starts.shape[-1] - 1)
    return rows


def _run(indptr: Tensor, indices: Tensor, starts: Tensor | None, to: Tensor, columns: int) -> None:
    compiled = _compiled()
    assert compiled is not None, "available() comes first"
    run, _ = compiled
    indptr = indptr.contiguous()
    indices = indices.contiguous()
    pointers = (None if x is None else x.data_ptr() for x in (indptr, indices, starts, to))
    rows = indptr.shape[-1] - 1
    _check(run(*pointers, indptr.numel() // (rows + 1), rows, columns, torch.get_num_threads()))


def _check(status: int) -> None:
    if status:
        raise MemoryError("the CPU kernels found no memory for their threads")
