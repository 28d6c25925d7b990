# mypy: ignore-errors
"""Compute attention over strided rows: for a tile of queries, one loop and one softmax over the keys of all its spans.

A launch is an int32 table with one line per tile:

    head  start  stride  rows  first  phantoms  list  ahead  within  the tile: tokens start + i · stride, 0 <= i < rows
    start  stride  count  near  far                                  span 1:   tokens start + j · stride, 0 <= j < count
    ...                                                              further spans

`first` is 0 if an earlier launch wrote these rows of out and lse; `forward` then continues from them. `phantoms`
counts keys with score 0 and value 0. With lists of blocks a line has one span, and the loop visits only the blocks in
list number `list`; the span then begins at position `ahead` of what the blocks cut (block_lists.py). If CAUSAL, row i
of the tile sees key j of the span iff j <= i + near and, in a WINDOW, j >= i + far. In dk/dv the tile holds keys and
the spans hold queries: row i is seen by query j iff j >= i + near and, in a WINDOW, j <= i + far.

The loops are inside `if steps > 0`. If a loop could have no steps, ptxas would make each wgmma wait for the one before
it (its warning C7515).

Legend beyond online.py's.
  B, H, G          samples, KV heads, query heads per KV head
  N, M             tokens of q and of k
  .sb, .sn, .sh    strides of sample, token and head, in UNIT elements (which tells the compiler the alignment)
  a, w; x          dropout: the two hash words of a query (WQ); the hash word of a key (WK, strides wsn, wsh)
  BIAS, ...        biases.py describes these arguments, up to kab, and FORM, SIZES and AXES
  SPANS            spans per tile
  WINDOW           both diagonals of a span apply, not only `near`
  CHAIN            forward: some tile has first = 0; backward: add to the float32 gradients of earlier launches
  EDGE             which streamed tiles may need a mask. 0: none; < 0: all; > 0: those at the edges of spans
  EVEN             dk/dv: no tile, held or streamed, reaches past its rows
  SIZE, WORDS      positions per block of a list, words per row of its masks (block_lists.py)
  WIDE             64-bit offsets are needed inside a streamed tile (dk/dv always uses them)
  D, DP            head_dim and the power of two that holds it
  BM, BN           queries and keys per tile
"""

from __future__ import annotations

import triton
import triton.language as tl

from dilated_attention.kernels.biases import (
    bias_of,
    collect,
    finish_sums,
    load_origin,
    load_places,
    load_points,
    load_queries,
)
from dilated_attention.kernels.block_lists import locate_block, marked, read_list, tokens
from dilated_attention.kernels.online import (
    attend,
    attend_dkdv,
    attend_dq,
    begin,
    finish,
    load_keys,
    load_pairs,
    load_rows,
    load_stats,
    shown,
    survives,
    write_rows,
)

TILE_FIELDS = tl.constexpr(9)
SPAN_FIELDS = tl.constexpr(5)
INTEGERS = ["threshold", "B", "N", "M", "H"] + [f"{x}s{axis}" for x in "qkvd" for axis in "bnh"]
INTEGERS += ["lsb", "lsh", "wsn", "wsh", "psb", "qab", "kab"]


@triton.jit
def read_tile(TILES, B, G: tl.constexpr, SPANS: tl.constexpr):
    """Return (T, b, h, g): the address of this program's line in the table, its sample, its KV head, and its query
    head, counted within the KV head. There are B samples and G programs per KV head; a line has SPANS spans."""
    program = tl.program_id(0)
    T = TILES + (program // G // B).to(tl.int64) * (TILE_FIELDS + SPANS * SPAN_FIELDS)
    return T, ((program // G) % B).to(tl.int64), tl.load(T).to(tl.int64), program % G


@triton.jit
def read_rows(T, i):
    """Return the tokens of rows i of the tile with its table line at T, and which of these rows exist, as booleans.

    The kernels call this before and after their loop, and `volatile` makes them read the table twice. Otherwise 20
    to 50 registers per thread would hold the result through the loop (results/aot).
    """
    start = tl.load(T + 1, volatile=True).to(tl.int64)
    stride = tl.load(T + 2, volatile=True).to(tl.int64)
    return start + stride * i, i < tl.load(T + 3, volatile=True)


@triton.jit
def read_spans(T, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, EDGE: tl.constexpr, MASKED: tl.constexpr,
               KEYS: tl.constexpr, SPANS: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """Return the tiles of R tokens that one pass of the loop visits, over all spans of the line at address T.

    If EDGE < 0, the pass with MASKED visits all tiles. Otherwise it visits those on a diagonal and, for keys, a partial
    one at the end of a span; the pass without MASKED visits the rest. If KEYS, the spans hold keys, otherwise queries,
    whose p is 0 past the end of a span.

    Returns the number of steps, and per span: steps before it, its first tile, start, stride, count, and the diagonals
    near and far. In a WINDOW the pass with MASKED has two such parts per span: the tiles before those without a mask,
    and those after.
    """
    steps = 0
    spans = ()
    size = tl.load(T + 3)
    for n in tl.static_range(SPANS):
        S = T + TILE_FIELDS + n * SPAN_FIELDS
        count = tl.load(S + 2)
        near = tl.load(S + 3)
        far = tl.load(S + 4) if WINDOW else near
        low = 0
        high = tl.cdiv(count, R)
        if WINDOW:
            lower, upper = (far, near) if KEYS else (near, far)
            low = tl.minimum(high, tl.maximum(lower, 0) // R)
            high = tl.maximum(low, tl.minimum(high, tl.cdiv(tl.maximum(upper + size, 0), R)))
            # The tiles from `begin` to `end` need no mask.
            begin = tl.minimum(high, tl.cdiv(tl.maximum(lower + size - 1, 0), R))
            end = begin if EDGE < 0 else tl.maximum(upper + 1, 0) // R
            if KEYS:
                end = tl.minimum(end, count // R)
            end = tl.maximum(begin, tl.minimum(high, end))
            if MASKED:
                spans += ((steps, low, tl.load(S), tl.load(S + 1), count, near, far),)
                steps += begin - low
                low = end
            else:
                low = begin
                high = end
        else:
            if KEYS:
                split = 0 if EDGE < 0 else count // R
                if CAUSAL:
                    split = tl.minimum(split, tl.maximum(near + 1, 0) // R)
                    high = tl.minimum(high, tl.cdiv(tl.maximum(near + size, 0), R))
            else:
                split = high if EDGE < 0 else 0
                if CAUSAL:
                    split = tl.maximum(split, tl.minimum(high, tl.cdiv(tl.maximum(near + size - 1, 0), R)))
                    low = tl.minimum(high, tl.maximum(near, 0) // R)
            if MASKED == KEYS:
                low = split
            else:
                high = split
        spans += ((steps, low, tl.load(S), tl.load(S + 1), count, near, far),)
        steps += high - low
    return steps, spans


@triton.jit
def locate(spans, step, R: tl.constexpr, WIDE: tl.constexpr):
    """Return the rows that a step visits: (positions in the span, base, ahead, which rows exist, near, far).

    Their tokens are base + ahead (see `tokens`, also for WIDE); near and far are the span's diagonals. `spans` comes
    from `read_spans`. The span of the step is picked by selects, without a branch, so that the compiler pipelines the
    loop over all spans as one loop.
    """
    _, tile, start, stride, count, near, far = spans[0]
    tile += step
    for n in tl.static_range(1, len(spans)):
        S = spans[n]
        here = step >= S[0]
        tile = tl.where(here, S[1] + step - S[0], tile)
        start = tl.where(here, S[2], start)
        stride = tl.where(here, S[3], stride)
        count = tl.where(here, S[4], count)
        near = tl.where(here, S[5], near)
        far = tl.where(here, S[6], far)
    j = tile * R + tl.arange(0, R)
    base, ahead = tokens(start, stride, tile * R, R, WIDE)
    return j, base, ahead, j < count, near, far


@triton.jit(do_not_specialize=INTEGERS)
def forward(Q, K, V, OUT, LSE, TILES, INDPTR, INDICES, BITS, SPLIT, HIDDEN, WQ, WK, BIAS, PLACES, QUERY_AT, KEY_AT,
            BUCKETS, threshold, keep_scale, scale, softcap, B, N, M, H, qsb, qsn, qsh, ksb, ksn, ksh, vsb, vsn, vsh,
            lsb, lsh, wsn, wsh, psb, qab, kab,
            G: tl.constexpr, UNIT: tl.constexpr, SPANS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
            EDGE: tl.constexpr, CHAIN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
            BM: tl.constexpr, BN: tl.constexpr, SIZE: tl.constexpr, LH: tl.constexpr, WORDS: tl.constexpr,
            WIDE: tl.constexpr, PRECISION: tl.constexpr, FORM: tl.constexpr, SIZES: tl.constexpr,
            AXES: tl.constexpr):  # fmt: skip
    """Compute out and lse, both contiguous. The legends of this file, online.py and block_lists.py name the arguments.

    HIDDEN (B, M) holds bytes; a nonzero byte hides the key. WQ (B, N, H · G, 2) and WK (M, H or 1) hold the int32 words
    whose hash decides dropout (`online.survives`). INDPTR and INDICES are lists of blocks, BITS and SPLIT belong to
    their masks (block_lists.py). Any of these may be None.
    """
    T, b, h, g = read_tile(TILES, B, G, SPANS)
    n = h * G + g
    i = tl.arange(0, BM)
    d = tl.arange(0, DP)
    token, inside = read_rows(T, i)
    q = load_rows(Q + (b * qsb + n * qsh) * UNIT, token * (qsn * UNIT), d, inside, D, True)
    stats = (b * N + token) * (H * G) + n
    if WQ is not None:
        a, w = load_pairs(WQ, stats, inside, BM)
    if BIAS is not None:
        place, queries_at, origin = load_queries(PLACES + b * psb + n, QUERY_AT + b * qab, tl.load(T + 1), token,
                                                 inside, H * G, FORM, SIZES, AXES)  # fmt: skip
        KEY_AT += b * kab
    m, z, acc = begin(OUT, LSE, stats * D, stats, d, inside, tl.load(T + 4), tl.load(T + 5), D, CHAIN)
    K += (b * ksb + h * ksh) * UNIT
    V += (b * vsb + h * vsh) * UNIT
    for MASKED in tl.static_range(2):
        if EDGE != 0 if MASKED else EDGE >= 0:
            if INDPTR is None:
                steps, where = read_spans(T, CAUSAL, WINDOW, EDGE, MASKED, True, SPANS, BN)
            else:
                steps, where = read_list(INDPTR, INDICES, SPLIT, T, b * lsb, n, lsh, LH, EDGE, MASKED, True, SIZE, BN)
            if steps > 0:
                for step in tl.range(0, steps):
                    if INDPTR is None:
                        j, base, ahead, seen, near, far = locate(where, step, BN, WIDE)
                    else:
                        j, base, ahead, seen, near, far = locate_block(where, step, SIZE, BN, WIDE)
                    k, v, seen = load_keys(K, V, HIDDEN, base, ahead, ksn * UNIT, vsn * UNIT, b * M, seen, d, D, MASKED)
                    visible = seen[None, :]
                    if CAUSAL and MASKED:
                        visible &= j[None, :] <= (i + near)[:, None]
                    if WINDOW and MASKED:
                        visible &= j[None, :] >= (i + far)[:, None]
                    if BITS is not None and MASKED:
                        visible &= marked(BITS, where, step, T, i, SIZE, BN, WORDS)
                    keep = visible
                    if WQ is not None:
                        x = tl.load(WK + base * wsn + h * wsh + ahead * wsn, mask=seen, other=0)
                        keep = survives(a[:, None], w[:, None], x[None, :], threshold)
                    bias = None
                    if BIAS is not None:
                        keys_at = load_points(KEY_AT, base + ahead, seen, origin, FORM, SIZES, AXES, 0)
                        bias = bias_of(BIAS, BUCKETS, place, queries_at, keys_at, FORM, SIZES, AXES)
                    m, z, acc = attend(q, k, v, m, z, acc, scale, softcap, bias, visible, keep, keep_scale, MASKED,
                                       WQ is not None, PRECISION)  # fmt: skip
    token, inside = read_rows(T, i)
    stats = (b * N + token) * (H * G) + n
    finish(OUT, LSE, stats * D, stats, d, inside, m, z, acc, D)


@triton.jit(do_not_specialize=INTEGERS)
def backward_dq(Q, K, V, DOUT, STATS, DQ, TILES, INDPTR, INDICES, BITS, SPLIT, HIDDEN, WQ, WK, BIAS, SUMS, PLACES,
                QUERY_AT, KEY_AT, BUCKETS, threshold, keep_scale, scale, softcap, B, N, M, H, qsb, qsn, qsh, ksb, ksn,
                ksh, vsb, vsn, vsh, dsb, dsn, dsh, lsb, lsh, wsn, wsh, psb, qab, kab,
                G: tl.constexpr, UNIT: tl.constexpr, SPANS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
                EDGE: tl.constexpr, CHAIN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
                BM: tl.constexpr, BN: tl.constexpr, SIZE: tl.constexpr, LH: tl.constexpr, WORDS: tl.constexpr,
                WIDE: tl.constexpr, PRECISION: tl.constexpr, FORM: tl.constexpr, SIZES: tl.constexpr,
                AXES: tl.constexpr):  # fmt: skip
    """Compute dq, contiguous, with the tiles, the loop and the arguments of `forward`.

    STATS holds lse · log2(e) and delta of each row (`online.backward_stats`). The gradient of a bias is added to SUMS.
    """
    T, b, h, g = read_tile(TILES, B, G, SPANS)
    n = h * G + g
    i = tl.arange(0, BM)
    d = tl.arange(0, DP)
    token, inside = read_rows(T, i)
    q = load_rows(Q + (b * qsb + n * qsh) * UNIT, token * (qsn * UNIT), d, inside, D, True)
    do = load_rows(DOUT + (b * dsb + n * dsh) * UNIT, token * (dsn * UNIT), d, inside, D, True)
    stats = (b * N + token) * (H * G) + n
    lse, delta = load_stats(STATS, stats, inside, BM)
    if WQ is not None:
        a, w = load_pairs(WQ, stats, inside, BM)
    if BIAS is not None:
        place, queries_at, origin = load_queries(PLACES + b * psb + n, QUERY_AT + b * qab, tl.load(T + 1), token,
                                                 inside, H * G, FORM, SIZES, AXES)  # fmt: skip
        KEY_AT += b * kab
    K += (b * ksb + h * ksh) * UNIT
    V += (b * vsb + h * vsh) * UNIT
    dq = tl.zeros([BM, DP], tl.float32)
    if SUMS is not None:
        low = tl.zeros([BM], tl.float32)
        high = tl.zeros([BM], tl.float32)
    for MASKED in tl.static_range(2):
        if EDGE != 0 if MASKED else EDGE >= 0:
            if INDPTR is None:
                steps, where = read_spans(T, CAUSAL, WINDOW, EDGE, MASKED, True, SPANS, BN)
            else:
                steps, where = read_list(INDPTR, INDICES, SPLIT, T, b * lsb, n, lsh, LH, EDGE, MASKED, True, SIZE, BN)
            if steps > 0:
                for step in tl.range(0, steps):
                    if INDPTR is None:
                        j, base, ahead, seen, near, far = locate(where, step, BN, WIDE)
                    else:
                        j, base, ahead, seen, near, far = locate_block(where, step, SIZE, BN, WIDE)
                    k, v, seen = load_keys(K, V, HIDDEN, base, ahead, ksn * UNIT, vsn * UNIT, b * M, seen, d, D, MASKED)
                    visible = seen[None, :]
                    if CAUSAL and MASKED:
                        visible &= j[None, :] <= (i + near)[:, None]
                    if WINDOW and MASKED:
                        visible &= j[None, :] >= (i + far)[:, None]
                    if BITS is not None and MASKED:
                        visible &= marked(BITS, where, step, T, i, SIZE, BN, WORDS)
                    keep = visible
                    if WQ is not None:
                        x = tl.load(WK + base * wsn + h * wsh + ahead * wsn, mask=seen, other=0)
                        keep = survives(a[:, None], w[:, None], x[None, :], threshold)
                    bias = None
                    if BIAS is not None:
                        keys_at = load_points(KEY_AT, base + ahead, seen, origin, FORM, SIZES, AXES, 0)
                        bias = bias_of(BIAS, BUCKETS, place, queries_at, keys_at, FORM, SIZES, AXES)
                    dq, ds = attend_dq(q, k, v, do, lse, delta, dq, scale, softcap, bias, visible, keep, keep_scale,
                                       MASKED, WQ is not None, PRECISION)  # fmt: skip
                    if SUMS is not None:
                        if MASKED:
                            ds = tl.where(visible, ds, 0.0)
                        low, high = collect(SUMS, BUCKETS, place, queries_at, keys_at, ds, low, high, FORM, SIZES, AXES)
    token, inside = read_rows(T, i)
    if SUMS is not None:
        finish_sums(SUMS, BUCKETS, place, low, high, FORM, SIZES)
    write_rows(DQ, ((b * N + token) * (H * G) + n) * D, d, inside, dq * scale, D, CHAIN)


@triton.jit(do_not_specialize=INTEGERS)
def backward_dkdv(Q, K, V, DOUT, STATS, DK, DV, TILES, INDPTR, INDICES, BITS, SPLIT, HIDDEN, WQ, WK, BIAS, PLACES,
                  QUERY_AT, KEY_AT, BUCKETS, threshold, keep_scale, scale, softcap, B, N, M, H, qsb, qsn, qsh, ksb,
                  ksn, ksh, vsb, vsn, vsh, dsb, dsn, dsh, lsb, lsh, wsn, wsh, psb, qab, kab,
                  G: tl.constexpr, UNIT: tl.constexpr, SPANS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
                  EDGE: tl.constexpr, EVEN: tl.constexpr, CHAIN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
                  BM: tl.constexpr, BN: tl.constexpr, SIZE: tl.constexpr, LH: tl.constexpr, WORDS: tl.constexpr,
                  PRECISION: tl.constexpr, FORM: tl.constexpr, SIZES: tl.constexpr, AXES: tl.constexpr):  # fmt: skip
    """Compute dk and dv, contiguous, with the arguments of `backward_dq`; EVEN: no tile has rows past its end to mask.

    Tiles hold keys, and spans the queries that see them. The loop runs through the spans once for each query head of
    the KV head.
    """
    T, b, h, _ = read_tile(TILES, B, 1, SPANS)
    i = tl.arange(0, BN)
    d = tl.arange(0, DP)
    token, inside = read_rows(T, i)
    k = load_rows(K + (b * ksb + h * ksh) * UNIT, token * (ksn * UNIT), d, inside, D, True)
    v = load_rows(V + (b * vsb + h * vsh) * UNIT, token * (vsn * UNIT), d, inside, D, True)
    if WQ is not None:
        x = tl.load(WK + token * wsn + h * wsh, mask=inside, other=0)
    if BIAS is not None:
        PLACES += b * psb
        QUERY_AT += b * qab
        KEY_AT += b * kab
        origin = load_origin(KEY_AT, tl.load(T + 1).to(tl.int64), AXES)
        keys_at = load_points(KEY_AT, token, inside, origin, FORM, SIZES, AXES, 1)
    Q += b * qsb * UNIT
    DOUT += b * dsb * UNIT
    STATS += 2 * b * N * (H * G)
    if WQ is not None:
        WQ += 2 * b * N * (H * G)
    dk = tl.zeros([BN, DP], tl.float32)
    dv = tl.zeros([BN, DP], tl.float32)
    # One loop serves all query heads that share spans or a list: an outer loop would cost registers.
    TOGETHER: tl.constexpr = 1 if INDPTR is not None and LH % G != 0 else G
    for g in tl.range(0, G, TOGETHER):
        for MASKED in tl.static_range(2):
            if EDGE != 0 if MASKED else EDGE >= 0:
                if INDPTR is None:
                    steps, where = read_spans(T, CAUSAL, WINDOW, EDGE, MASKED, False, SPANS, BM)
                else:
                    steps, where = read_list(
                        INDPTR, INDICES, SPLIT, T, b * lsb, h * G + g, lsh, LH, EDGE, MASKED, False, SIZE, BM
                    )
                if steps > 0:
                    for step in tl.range(0, steps * TOGETHER):
                        n = h * G + g
                        if TOGETHER > 1:
                            n += step // steps
                            step = step % steps
                        if INDPTR is None:
                            j, base, ahead, seen, near, far = locate(where, step, BM, True)
                        else:
                            j, base, ahead, seen, near, far = locate_block(where, step, SIZE, BM, True)
                        query = base + ahead  # offsets of 32 bits would make this kernel spill
                        q = load_rows(Q + n * qsh * UNIT, query * (qsn * UNIT), d, seen, D, not EVEN)
                        do = load_rows(DOUT + n * dsh * UNIT, query * (dsn * UNIT), d, seen, D, not EVEN)
                        stats = query * (H * G) + n
                        lse, delta = load_stats(STATS, stats, seen, BM)
                        if WINDOW:
                            visible = (j[None, :] - (i + near)[:, None]).to(tl.uint32) <= (far - near).to(tl.uint32)
                        else:
                            visible = j[None, :] >= (i + near)[:, None]
                        if BITS is not None and MASKED:
                            visible &= marked(BITS, where, step, T, i, SIZE, BM, WORDS)
                        keep = visible
                        if WQ is not None:
                            a, w = load_pairs(WQ, stats, seen, BM)
                            keep = survives(a[None, :], w[None, :], x[:, None], threshold)
                        bias = None
                        if BIAS is not None:
                            place = load_places(PLACES + n, base, query, seen, H * G, FORM, 0)
                            queries_at = load_points(QUERY_AT, query, seen, origin, FORM, SIZES, AXES, 0)
                            bias = bias_of(BIAS, BUCKETS, place, queries_at, keys_at, FORM, SIZES, AXES)
                        dk, dv = attend_dkdv(q, k, v, do, lse, delta, dk, dv, scale, softcap, bias, visible, keep,
                                             keep_scale, MASKED, WQ is not None, PRECISION)  # fmt: skip
    token, inside = read_rows(T, i)
    if HIDDEN is not None:  # the loop ignores HIDDEN; only the rows of the hidden keys are wrong
        real = shown(HIDDEN, b * M + token, inside)[:, None]
        dk = tl.where(real, dk, 0.0)
        dv = tl.where(real, dv, 0.0)
    rows = ((b * M + token) * H + h) * D
    write_rows(DK, rows, d, inside, dk * scale, D, CHAIN)
    write_rows(DV, rows, d, inside, dv, D, CHAIN)
