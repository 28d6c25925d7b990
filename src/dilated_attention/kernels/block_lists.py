# mypy: ignore-errors
"""Choose the tiles that the loop of strided.py visits when a block layout selects a part of a span.

The layout cuts positions into blocks: block c holds positions c · SIZE to (c + 1) · SIZE - 1. A span of keys begins at
position 0, one of queries at position `ahead`, possibly inside a block. The rows of a tile also lie in one block; its
number is `list` in the table line. The tile visits the blocks

    indices[indptr[x] : indptr[x + 1]],   x = sample · lsb + (query head // LH) · lsh + list.

Lists ascend; if CAUSAL, no list names a block that lies wholly above the diagonal. For dk/dv the lists are transposed:
they name the blocks of queries that see a block of keys.

Legend beyond strided.py's.
  SIZE             positions per block that the loop streams: any number, while tiles have powers of two
  lsb, lsh         strides of indptr
  LH               query heads that share a list
  EDGE             how many blocks of a list may need a mask: its last ones (keys) or first ones (queries); < 0: all
"""

from __future__ import annotations

import triton
import triton.language as tl

# Fields of a table line, described in strided.py.
LIST, AHEAD = tl.constexpr(6), tl.constexpr(7)
SPAN = tl.constexpr(8)


@triton.jit
def read_list(INDPTR, INDICES, T, sample, n, lsh, LH: tl.constexpr, EDGE: tl.constexpr, MASKED: tl.constexpr,
              KEYS: tl.constexpr, SIZE: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """Return the part of a tile's list of blocks that one pass of the kernel's loop visits.

    The pass with MASKED visits the blocks that may need a mask: all if EDGE < 0, otherwise the last EDGE of the list if
    KEYS, and the first EDGE if not. The pass without MASKED visits the rest. T is the address of the tile's
    table line, `sample` the sample's offset b · lsb in INDPTR, n the query head; LH query heads share a list, and lsh
    is the stride between such heads in INDPTR. If KEYS, the blocks hold keys, otherwise queries. A step visits at most
    R positions, of one block of SIZE.

    Returns the number of steps, and the part: the address of its first block, then start, stride, count, diagonal
    `near` and position of the span.
    """
    x = sample + (n // LH) * lsh + tl.load(T + LIST)
    low = tl.load(INDPTR + x)
    high = tl.load(INDPTR + x + 1)
    if KEYS:
        split = low if EDGE < 0 else tl.maximum(low, high - EDGE)
    else:
        split = high if EDGE < 0 else tl.minimum(high, low + EDGE)
    if MASKED == KEYS:
        low = split
    else:
        high = split
    S = T + SPAN
    part = INDICES + low, tl.load(S), tl.load(S + 1), tl.load(S + 2), tl.load(S + 3), 0 if KEYS else tl.load(T + AHEAD)
    return (high - low).to(tl.int32) * tl.cdiv(SIZE, R), part


@triton.jit
def locate_block(part, step, SIZE: tl.constexpr, R: tl.constexpr, WIDE: tl.constexpr):
    """Return the rows that a step visits, given the `part` from `read_list`, as `strided.locate` does for spans.

    The part has one diagonal, `near`, which is returned twice, as near and as far.

    A block of SIZE positions takes ceil(SIZE / R) steps. WIDE: as in `tokens`.
    """
    LISTED, start, stride, count, near, position = part
    tiles: tl.constexpr = (SIZE + R - 1) // R
    within = (step % tiles) * R
    low = tl.load(LISTED + step // tiles).to(tl.int32) * SIZE + within - position
    j = low + tl.arange(0, R)
    seen = j.to(tl.uint32) < count.to(tl.uint32)  # and not negative
    if SIZE % R:
        seen &= within + tl.arange(0, R) < SIZE
    base, ahead = tokens(start, stride, low, R, WIDE)
    return j, base, ahead, seen, near, near


@triton.jit
def tokens(start, stride, low, R: tl.constexpr, WIDE: tl.constexpr):
    """Return the tokens at positions low, ..., low + R - 1 of a span, as base + ahead.

    base is one 64-bit number per tile; ahead (R,) has 32 bits, or 64 if WIDE, for offsets that do not fit 32. With
    64-bit products everywhere, these products would take 50 of the 405 instructions of a forward step at head_dim 128
    (sm_90).
    """
    base = start.to(tl.int64)
    if WIDE:
        return base, stride.to(tl.int64) * (low + tl.arange(0, R))
    else:
        return base + stride.to(tl.int64) * low, stride * tl.arange(0, R)
