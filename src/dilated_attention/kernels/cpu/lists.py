"""List the rows of each column, given the columns of each row, with the compiled library.

It uses a counting sort, where tensor operations would need a general sort.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from dilated_attention.kernels.cpu import build


@cache
def _compiled() -> Callable[..., int] | None:
    library = build.loaded()
    if library is None:
        return None
    run = library.dilated_attention_transpose
    run.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 4
    run.restype = ctypes.c_int64
    return run


def available() -> bool:
    return _compiled() is not None


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
    run = _compiled()
    assert run is not None, "available() comes first"
    indptr = indptr.contiguous()
    indices = indices.contiguous()
    pointers = (None if x is None else x.data_ptr() for x in (indptr, indices, starts, to))
    rows = indptr.shape[-1] - 1
    if run(*pointers, indptr.numel() // (rows + 1), rows, columns, torch.get_num_threads()):
        raise MemoryError("the CPU kernels found no memory for their threads")
