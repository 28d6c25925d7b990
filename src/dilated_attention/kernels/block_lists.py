# mypy: ignore-errors
"""Choose the tiles that the loop of strided.py visits when a block layout selects a part of a span.

The layout cuts positions into blocks: block c holds positions c · SIZE to (c + 1) · SIZE - 1. A span begins at position
`ahead`, possibly inside a block. The rows of a tile also lie in one block; its
number is `list` in the table line. The tile visits the blocks

    indices[indptr[x] : indptr[x + 1]],   x = sample · lsb + (query head // LH) · lsh + list.

Lists ascend; if CAUSAL, no list names a block that lies wholly above the diagonal. For dk/dv the lists are transposed:
they name the blocks of queries that see a block of keys.

With BITS, some blocks have masks. An entry of INDICES is then block + 2^32 · (kind + 1), where kind is the number of
the block's mask, or -1 for a whole block. Lists are not ascending: blocks that may need a mask, by bits, a diagonal or
a partial end, come last if the blocks hold keys, first if they hold queries, and SPLIT (as INDPTR) says where they
begin or end. BITS holds WORDS int32 words for each position of each mask's block, a bit per row of the blocks that
tiles hold; row i of a tile has bit number `within` + i.

Legend beyond strided.py's.
  SIZE             positions per block that the loop streams: any number, while tiles have powers of two
  lsb, lsh         strides of indptr
  LH               query heads that share a list
  EDGE             how many blocks of a list may need a mask: its last ones (keys) or first ones (queries); < 0: all;
                   with BITS, > 0: those that SPLIT says
"""

from __future__ import annotations

import triton
import triton.language as tl

# Fields of a table line, described in strided.py.
LIST, AHEAD, WITHIN = tl.constexpr(6), tl.constexpr(7), tl.constexpr(8)
SPAN = tl.constexpr(9)


@triton.jit
def read_list(INDPTR, INDICES, SPLIT, T, sample, n, lsh, LH: tl.constexpr, EDGE: tl.constexpr, MASKED: tl.constexpr,
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
    if SPLIT is not None and EDGE > 0:
        split = tl.load(SPLIT + x)
    elif KEYS:
        split = low if EDGE < 0 else tl.maximum(low, high - EDGE)
    else:
        split = high if EDGE < 0 else tl.minimum(high, low + EDGE)
    if MASKED == KEYS:
        low = split
    else:
        high = split
    S = T + SPAN
    part = INDICES + low, tl.load(S), tl.load(S + 1), tl.load(S + 2), tl.load(S + 3), tl.load(T + AHEAD)
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
def marked(BITS, part, step, T, i, SIZE: tl.constexpr, R: tl.constexpr, WORDS: tl.constexpr):
    """Return which of the rows i of the tile, at its table line T, see the rows that a step visits, by the mask of the
    step's block: booleans (rows, R). All do if the block is whole. `part` and R: as in `locate_block`."""
    tiles: tl.constexpr = (SIZE + R - 1) // R
    kind = (tl.load(part[0] + step // tiles) >> 32) - 1
    row = (step % tiles) * R + tl.arange(0, R)
    has_mask = (kind >= 0) & (row < SIZE)
    within = tl.load(T + WITHIN)
    first = within // 32
    shift = (within % 32).to(tl.uint32)
    words = BITS + (kind * SIZE + row) * WORDS + first
    low = tl.load(words, mask=has_mask & (first < WORDS), other=-1).to(tl.uint32, bitcast=True)
    bits = tl.zeros([i.shape[0], R], tl.uint32)
    for n in tl.static_range((i.shape[0] + 31) // 32):
        high = tl.load(words + (n + 1), mask=has_mask & (first + n + 1 < WORDS), other=-1).to(tl.uint32, bitcast=True)
        word = (low >> shift) | ((high << (31 - shift)) << 1)
        bits = tl.where((i // 32 == n)[:, None], word[None, :], bits)
        low = high
    return ((bits >> (i % 32).to(tl.uint32)[:, None]) & 1) != 0


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
