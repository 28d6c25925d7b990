"""Estimate which blocks hold most of the softmax, with the compiled library. Each function reads its tensors once
(estimate.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention.kernels.cpu import build

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The numbers of the dtypes in vectors.h."""
_POINTERS = (
    "q", "k", "out", "values", "places", "starts", "stops", "weight", "seen", "logarithm", "planes", "listed",
    "counts", "offsets", "sampled",
)  # fmt: skip
_NUMBERS = (
    "B", "N", "M", "H", "G", "D", "qsb", "qsn", "qsh", "ksb", "ksn", "ksh",
    "rows", "parts", "columns", "peaks", "size", "tile", "stagger", "first", "threads",
)  # fmt: skip


class _Estimate(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in _POINTERS],
        *[(name, ctypes.c_int64) for name in _NUMBERS],
        *[(name, ctypes.c_double) for name in ("scale", "nothing")],
    ]


@cache
def _compiled() -> tuple[Callable[..., int], int] | None:
    """Return the library's `dilated_attention_estimate` and the number of this machine's instruction set; None without
    a library or such a set."""
    library = build.loaded()
    if library is None:
        return None
    run = library.dilated_attention_estimate
    run.restype = ctypes.c_int64
    run.argtypes = [ctypes.c_int64] * 3 + [ctypes.c_void_p]
    library.dilated_attention_instruction_set.restype = ctypes.c_int64
    instruction_set = int(library.dilated_attention_instruction_set())
    if not instruction_set:
        return None
    return run, instruction_set


def serves(*tensors: Tensor) -> bool:
    """Return whether the library can read these tensors: on the CPU, of one supported dtype, with dense rows."""
    return (
        all(x.device.type == "cpu" and x.dtype == tensors[0].dtype and x.stride(-1) == 1 for x in tensors)
        and tensors[0].dtype in TYPES
        and _compiled() is not None
    )


def means(x: Tensor, starts: Tensor, stops: Tensor) -> Tensor:
    """Return the mean of x `(batch, tokens, heads, head_dim)` over each interval of tokens, 0 where it is empty:
    float32 `(batch, intervals, heads, head_dim)`. `starts`, `stops`: int64 `(intervals,)`."""
    return _of_intervals(0, x, starts, stops, x.shape[3])


def extremes(x: Tensor, starts: Tensor, stops: Tensor) -> Tensor:
    """Return the greatest values of the components of x in each interval of tokens, -inf if it is empty, followed by
    the least, inf if empty: float32 `(batch, intervals, heads, 2 * head_dim)`. Arguments are as in `means`."""
    return _of_intervals(1, x, starts, stops, 2 * x.shape[3])


def _of_intervals(estimator: int, x: Tensor, starts: Tensor, stops: Tensor, width: int) -> Tensor:
    out = x.new_empty(x.shape[0], len(starts), x.shape[2], width, dtype=torch.float32)
    _run(estimator, None, x, out=out, starts=starts.contiguous(), stops=stops.contiguous(), rows=len(starts))
    return out


def peaks(k: Tensor, direction: Tensor, block: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the `number` keys of each block with the largest products with a direction, and the mean of the others.

    Args:
        block: the number of keys per block.
        direction: float32 `(batch, blocks or 1, heads, head_dim)`; the number of heads is a multiple of those of k.

    Returns:
        keys: float32 `(batch, blocks, number + 1, heads, head_dim)`, the mean last; 0 for keys that do not exist.
        scores: float32 `(batch, blocks, heads, number)`, descending; -inf for keys that do not exist.
        tokens: int64 `(batch, blocks, heads, number)`, the positions of these keys in the sequence; the block's first
            for keys that do not exist.
    """
    columns = -(-k.shape[1] // block)
    heads = direction.shape[2]
    direction = direction.contiguous()
    keys = k.new_empty(k.shape[0], columns, number + 1, heads, k.shape[3], dtype=torch.float32)
    values = keys.new_empty(k.shape[0], columns, heads, number)
    places = torch.empty_like(values, dtype=torch.int64)
    numbers = {"columns": columns, "peaks": number, "size": block, "qsn": direction.stride(1) * (len(direction[0]) > 1)}
    _run(2, direction, k, out=keys, values=values, places=places, **numbers)
    return keys, values, places


def shares(
    q: Tensor,
    k: Tensor,
    weight: Tensor,
    seen: Tensor,
    columns: int,
    peaks: int,
    *,
    logarithm: Tensor | None = None,
    scale: float = 1.0,
    listed: Tensor | None = None,
    tile: int = 0,
    stagger: int = 0,
) -> Tensor:
    """Return the share of each row's softmax that falls on each column's keys.

    The result is float32 `(batch, heads, rows, columns)`. A row has `parts` queries, whose shares are averaged with
    weights. A column has `peaks` keys.

    Args:
        q: `(batch, rows * parts, heads, head_dim)`; k: `(batch, columns * peaks, kv_heads, head_dim)`, or fewer keys
            where the last column has fewer.
        weight: float32 `(rows, parts)`, the weight of each query in its row's share.
        seen: int64 `(rows, parts)`: each query sees this many keys, counted from the first.
        logarithm: float32 `(columns, peaks)`, added to the scores of each key.
        scale: factor of q kᵀ.
        listed: int64 `(batch, heads, tiles, columns)`: for each tile, which is `tile` neighbouring rows, the only
            columns of k that it sees, ascending; a query sees those that lie wholly within its `seen`. `columns` then
            counts listed columns, here and in the result, and k may have more.
        tile, stagger: with both, k is every `stagger`-th token of a tensor, and tile number t, which is `tile`
            neighbouring rows, sees the tokens that lie t modulo `stagger` further on, but the same first one.
    """
    rows, parts = weight.shape
    out = q.new_empty(q.shape[0], q.shape[2], rows, columns, dtype=torch.float32)
    numbers = {"rows": rows, "parts": parts, "columns": columns, "peaks": peaks}
    tables = {"weight": weight.contiguous(), "seen": seen.contiguous()}
    if logarithm is not None:
        tables["logarithm"] = logarithm.contiguous()
    if listed is not None:
        tables["listed"] = listed.contiguous()
    _run(3, q, k, out=out, scale=scale, tile=tile, stagger=stagger, **tables, **numbers)
    return out


def buckets(x: Tensor, centre: Tensor, planes: Tensor, weight: Tensor, num_bits: int) -> Tensor:
    """Return the summed weight of each block's tokens in each bucket of each hash.

    A hash has `num_bits` planes and 2 ** num_bits buckets. Bit i of a token's bucket says whether the product of the
    token, less `centre`, with plane i of the hash is positive. The result is float32 `(batch, heads, blocks, hashes *
    buckets)`.

    Args:
        x: `(batch, blocks * tokens, heads, head_dim)`.
        centre: float32 `(batch, blocks or 1, heads, head_dim)`.
        planes: float32 `(head_dim, hashes * num_bits)`.
        weight: float32 `(batch, blocks, heads, tokens)`.
    """
    blocks = weight.shape[1]
    tokens = weight.shape[3]
    hashes = planes.shape[1] // num_bits
    centre = centre.contiguous()
    out = x.new_empty(x.shape[0], x.shape[2], blocks, hashes << num_bits, dtype=torch.float32)
    numbers = {"rows": blocks, "parts": tokens, "columns": hashes, "size": num_bits, "G": 1}
    numbers["qsn"] = centre.stride(1) * (centre.shape[1] > 1)
    _run(4, centre, x, out=out, planes=planes.contiguous(), weight=weight.contiguous(), **numbers)
    return out


def collisions(
    logits: Tensor, held: Tensor, met: Tensor, seen: Tensor, num_bits: int, *, nothing: float, alone: float
) -> Tensor:
    """Return near * (met / (near @ held + nothing)) @ heldᵀ + alone * share, like logits, all float32.

    Each row spreads what it has in a bucket over the columns in proportion to what they hold there, times near =
    exp(logits - the largest). share is near times a column's sum over the first hash, scaled to a sum of 1.

    Args:
        logits: `(batch, heads, rows, columns)`.
        held: `(batch, heads, columns, buckets)`; the number of buckets is a multiple of 8.
        met: `(batch, heads, rows, buckets)`.
        seen: int64 `(rows,)`: near is 0 from this column on.
    """
    logits, held, met, seen = (x.contiguous() for x in (logits, held, met, seen))
    out = torch.empty_like(logits)
    numbers = {"rows": logits.shape[2], "size": num_bits, "scale": alone, "nothing": nothing}
    _run(5, None, held, out=out, values=logits, weight=met, seen=seen, **numbers)
    return out


class Rows(NamedTuple):
    """Hold, per row (query block), the columns (key blocks) starts to stops - 1, which it always lists, and the number
    of columns, counted from the first, among which it may choose. All are int64 `(all rows,)`, contiguous."""

    starts: Tensor
    stops: Tensor
    choices: Tensor


def forecast(
    share: Tensor, seen: Tensor, sampled: Tensor, counts: Tensor, rows: Rows, at: slice, held: Tensor, rate: float
) -> None:
    """Replace the shares of each row, in place, by a weighted mean of three forecasts (routing/forecast.py).

    They are the shares themselves, the shares moved by one column (from c - 1 to c), and the mean of what
    earlier sampled rows have seen at each distance from the last column that a row may choose. Each is scaled to a sum
    of 1. Dimension `lists` runs over the heads that choose columns for themselves.

    Args:
        share: float32 `(batch, lists, rows, columns)`, contiguous, of the rows `at` alone.
        seen: float32 `(batch, lists, sampled rows, columns)`, contiguous: measured shares of the rows `sampled`.
        sampled: int64, ascending row numbers.
        counts: int64 `(batch, lists, rows)`, how many columns each of the rows `at` lists.
        rows: for all rows, the columns that a row always lists or may choose.
        at: the slice of all rows that `share` and `counts` hold.
        held: float32 `(batch, lists, 3)`, for each forecast: the measured share of the columns that a row would list by
            it alone, summed over the sampled rows so far, plus the initial value that the caller gave. Updated.
        rate: a forecast's weight is proportional to exp(rate * held).
    """
    fields = {"counts": counts.contiguous(), "sampled": sampled, "values": held, "scale": rate}
    _run(6, None, seen, out=share, rows=share.shape[2], first=at.start, **fields, **_table(rows))


def largest(share: Tensor, counts: Tensor, rows: Rows, at: slice, offsets: Tensor, indices: Tensor) -> None:
    """Choose the columns that each row lists, and write them to `indices`, int64, in ascending order.

    A row lists `counts` columns: those that it always lists, and those with the largest shares among the others that it
    may choose; in a tie, the first ones. `share`, `counts`, `rows` and `at` are as in `forecast`. `offsets`: int64
    `(batch, lists, rows)`, where the list of each row `at` begins in `indices`.
    """
    fields = {"counts": counts.contiguous(), "offsets": offsets.contiguous(), "places": indices}
    _run(7, None, share, rows=share.shape[2], first=at.start, **fields, **_table(rows))


def _table(rows: Rows) -> dict[str, Tensor]:
    return {"starts": rows.starts, "stops": rows.stops, "seen": rows.choices}


def _run(estimator: int, q: Tensor | None, k: Tensor, **fields: Any) -> None:
    compiled = _compiled()
    assert compiled is not None, "serves() comes first"
    run, instruction_set = compiled
    call = _Estimate(B=k.shape[0], M=k.shape[1], H=k.shape[2], D=k.shape[3], G=1, threads=torch.get_num_threads())
    call.k = k.data_ptr()
    call.ksb, call.ksn, call.ksh, _ = k.stride()
    if q is not None:
        call.q = q.data_ptr()
        call.qsb, call.qsn, call.qsh, _ = q.stride()
        call.N = q.shape[1]
        call.G = q.shape[2] // k.shape[2]
    for name, value in fields.items():
        if isinstance(value, Tensor):
            value = value.data_ptr()
        setattr(call, name, value)
    if run(estimator, TYPES[k.dtype], instruction_set, ctypes.byref(call)):
        raise MemoryError("the CPU kernels found no memory for their threads")
