# mypy: ignore-errors
"""Compute one step of attention, with one tile of queries and one tile of keys. All Triton kernels use these functions.

Legend of this package.  A tile is [M, D] queries or [N, D] keys, its scores are [M, N] ([N, M] in dk/dv).
  q, k, v, do      queries, keys, values, gradient of out
  s, p, ds         scores, probabilities, gradient of the scores
  m, z, acc        running softmax: maximum, denominator, numerator;  out = acc / z,  lse = m + log z
  lse, delta       of the merged result: log-sum-exp (natural logarithm in LSE); rowsum(dout · out) - dlse
  b, h, g          sample, KV head, query head within the KV head (query head h · G + g)
Inside the kernels, scores, m and lse are multiplied by log2(e), so that exp2 replaces exp. A `softcap` c replaces the
scores s by c tanh(s / c); None: no cap.

Dropout decides by a hash of two words of the query and one of the key, as backends/dropout.py says.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))


@triton.jit
def load_rows(X, rows, d, inside, D: tl.constexpr, MASKED: tl.constexpr):
    """Load columns `d` of the rows of X at offsets `rows`, as a tile [R, len(d)].

    Columns past the D-th are zero and, if MASKED, so are rows that are not `inside`.
    """
    at = X + rows[:, None] + d[None, :]
    if MASKED and d.shape[0] > D:
        return tl.load(at, mask=inside[:, None] & (d < D)[None, :], other=0.0)
    elif MASKED:
        return tl.load(at, mask=inside[:, None], other=0.0)
    elif d.shape[0] > D:
        return tl.load(at, mask=(d < D)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def load_keys(K, V, HIDDEN, base, ahead, ksn, vsn, sample, seen, d, D: tl.constexpr, MASKED: tl.constexpr):
    """Load k and v of the tokens base + ahead. Return them, and which of the `seen` tokens HIDDEN does not hide.

    ksn, vsn: strides of a token, in elements; `sample`: the sample's offset in HIDDEN. d, D, MASKED: as in `load_rows`.
    """
    k = load_rows(K + base * ksn, ahead * ksn, d, seen, D, MASKED)
    v = load_rows(V + base * vsn, ahead * vsn, d, seen, D, MASKED)
    return k, v, shown(HIDDEN, sample + base + ahead, seen)


@triton.jit
def shown(HIDDEN, keys, seen):
    """Return which of the `seen` keys, at offsets `keys` in the mask HIDDEN, it leaves visible; all without a mask."""
    if HIDDEN is not None:
        seen &= tl.load(HIDDEN + keys, mask=seen, other=0) == 0
    return seen


@triton.jit
def store_rows(X, rows, d, inside, x, D: tl.constexpr):
    tl.store(X + rows[:, None] + d[None, :], x.to(X.dtype.element_ty), mask=inside[:, None] & (d < D)[None, :])


@triton.jit
def write_rows(X, rows, d, inside, x, D: tl.constexpr, CHAIN: tl.constexpr):
    """Write X[rows] = x, or with CHAIN add to it.

    The addition is atomic, so no registers are needed for the old value. It is still deterministic: in each launch a
    single program adds to a row.
    """
    if CHAIN:
        tl.atomic_add(X + rows[:, None] + d[None, :], x, mask=inside[:, None] & (d < D)[None, :], sem="relaxed")
    else:
        store_rows(X, rows, d, inside, x, D)


@triton.jit
def survives(a, b, k, threshold):
    """Return which pairs of query and key dropout keeps, as booleans in the shape of the tile of scores.

    A pair is kept if a hash of three int32 words is at least `threshold`: a and b belong to the query, k to the key
    (backends/dropout.py). The caller shapes them so that they broadcast to the tile.
    """
    x = a.to(tl.uint32, bitcast=True) ^ k.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15) ^ b.to(tl.uint32, bitcast=True)) * 0xD35A2D97
    return (x ^ (x >> 15)).to(tl.int32, bitcast=True) >= threshold


@triton.jit
def load_pairs(X, rows, inside, R: tl.constexpr):
    """Return X[rows, 0] and X[rows, 1] of R rows; zeros where not `inside`.

    If a load has fewer elements than there are threads, every thread that uses a part of it repeats it: 32 gathers per
    thread for 64 rows. So a tile wide enough for 256 threads is loaded, and two of its columns are used.
    """
    c = tl.arange(0, 256 // R if R < 128 else 2)
    pair = tl.load(X + (2 * rows)[:, None] + c[None, :], mask=inside[:, None] & (c < 2)[None, :], other=0)
    return tl.sum(tl.where(c[None, :] == 0, pair, 0), 1), tl.sum(tl.where(c[None, :] == 1, pair, 0), 1)


@triton.jit
def load_stats(STATS, stats, inside, R: tl.constexpr):
    """Return lse · log2(e) and delta, rowsum(dout · out) - dlse, of the R rows number `stats` of STATS.

    Rows that are not `inside` get lse = inf, so that their p is 0.
    """
    lse, delta = load_pairs(STATS, stats, inside, R)
    return tl.where(inside, lse, INF), delta


@triton.jit
def begin(OUT, LSE, rows, stats, d, inside, first, phantoms, D: tl.constexpr, CHAIN: tl.constexpr):
    """Return a tile's initial (m, z, acc), maximum, denominator and numerator of the running softmax.

    They continue what an earlier launch wrote (if CHAIN, and `first` is 0) or begin empty, and include `phantoms` keys
    with score 0 and value 0. m is times log2(e). `rows` and `stats` are the offsets of the tile's rows in OUT and LSE.
    """
    if CHAIN:
        before = inside & (tl.broadcast_to(first, inside.shape) == 0)  # the interpreter has no masks of scalars
        m = tl.load(LSE + stats, mask=before, other=-INF) * LOG2E
        z = tl.where(m == -INF, 0.0, 1.0)
        acc = load_rows(OUT, rows, d, before, D, True).to(tl.float32)
    else:
        m = tl.full([inside.shape[0]], -INF, tl.float32)
        z = tl.zeros([inside.shape[0]], tl.float32)
        acc = tl.zeros([inside.shape[0], d.shape[0]], tl.float32)
    top = tl.where(phantoms > 0, tl.maximum(m, 0.0), m)
    shift = tl.where(top == -INF, 0.0, top)
    decay = tl.exp2(m - shift)
    zeros = tl.where(phantoms > 0, phantoms * tl.exp2(-shift), 0.0)  # not 0 times infinity
    return top, z * decay + zeros, acc * decay[:, None]


@triton.jit
def finish(OUT, LSE, rows, stats, d, inside, m, z, acc, D: tl.constexpr):
    """Write out = acc / z and lse = (m + log2 z) / log2(e). Rows that saw nothing get 0 and -inf; a NaN stays a NaN."""
    some = z != 0.0
    z = tl.where(some, z, 1.0)
    store_rows(OUT, rows, d, inside, acc / z[:, None], D)
    tl.store(LSE + stats, tl.where(some, (m + tl.log2(z)) * LN2, -INF), mask=inside)


@triton.jit
def scores(q, k, scale, softcap, PRECISION: tl.constexpr):
    """Return (s, factor): the scores times log2(e), without a bias, are s * factor. s is q kᵀ, or
    tanh(q kᵀ scale / softcap)."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if softcap is None:
        return s, scale * LOG2E
    else:
        return tanh(s * tl.minimum(scale / softcap, 1e38)), softcap * LOG2E


@triton.jit
def tanh(x):
    """Return tanh x = sign(x) (1 - p) / (1 + p), with p = exp(-2 |x|). For |x| < 0.625, where 1 - p would lose digits,
    it is the polynomial of tanhf in Cephes (Moshier)."""
    size = tl.abs(x)
    square = x * x
    y = (-0.00570498872745 * square + 0.0206390887954) * square - 0.0537397155531
    y = (y * square + 0.133314422036) * square - 0.333332819422
    power = tl.exp2(size * (-2 * LOG2E))
    far = (1 - power) / (1 + power)
    return tl.where(size < 0.625, y * square * x + x, tl.where(x < 0, -far, far))


@triton.jit
def attend(q, k, v, m, z, acc, scale, softcap, bias, visible, keep, keep_scale, MASKED: tl.constexpr,
           DROPOUT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Run one step of the online softmax and return the new (m, z, acc); `scale` must be positive.

    `bias` is added to the scores times log2(e); None: no bias. A pair whose bias is -inf does not count. If MASKED,
    only `visible` scores count. If DROPOUT, only weights in `keep` do, times keep_scale = 1 / (1 - p).
    """
    s, scale = scores(q, k, scale, softcap, PRECISION)
    if bias is not None:
        s = s * scale + bias
        scale = 1.0
    if MASKED:
        s = tl.where(visible, s, -INF)
    top = tl.maximum(m, tl.max(s, 1) * scale)
    if MASKED or bias is not None:
        shift = tl.where(top == -INF, 0.0, top)
    else:
        shift = top
    p = tl.exp2(s * scale - shift[:, None])
    decay = tl.exp2(m - shift)
    z = z * decay + tl.sum(p, 1)
    if DROPOUT:
        p = tl.where(keep, p * keep_scale, 0.0)
    acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    return top, z, acc


@triton.jit
def attend_dq(q, k, v, do, lse, delta, dq, scale, softcap, bias, visible, keep, keep_scale, MASKED: tl.constexpr,
              DROPOUT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Return dq + ds k, which the caller multiplies by the scale, and ds = p (do vᵀ - delta), where p = exp(s - lse).

    lse is passed times log2(e), and delta = rowsum(dout · out) - dlse. `bias`, `visible`, `keep` and `keep_scale` are
    as in `attend`; dropout applies to do vᵀ. With a softcap, dq takes ds times the derivative of the cap.
    """
    t, scale = scores(q, k, scale, softcap, PRECISION)
    s = t * scale - lse[:, None]
    if bias is not None:  # a row that is not there may have read one that is not finite
        s = tl.where(lse[:, None] == INF, -INF, s + bias)
    if MASKED:
        s = tl.where(visible, s, -INF)
    p = tl.exp2(s)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    if DROPOUT:
        dp = tl.where(keep, dp * keep_scale, 0.0)
    ds = p * (dp - delta[:, None])
    of_product = ds
    if softcap is not None:
        of_product *= 1 - t * t
    return tl.dot(of_product.to(k.dtype), k, dq, input_precision=PRECISION), ds


@triton.jit
def attend_dkdv(q, k, v, do, lse, delta, dk, dv, scale, softcap, bias, visible, keep, keep_scale, MASKED: tl.constexpr,
                DROPOUT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Return dk + dsᵀ q, which the caller multiplies by the scale, and dv + pᵀ do.

    p and ds are as in `attend_dq`, but dropout also applies to p in dv. They are computed transposed: scores, pᵀ, dsᵀ,
    `bias`, `visible` and `keep` are [N, M], keys by queries.
    """
    t, scale = scores(k, q, scale, softcap, PRECISION)
    s = t * scale - lse[None, :]
    if bias is not None:  # a row that is not there may have read one that is not finite
        s = tl.where(lse[None, :] == INF, -INF, s + bias)
    if MASKED:
        s = tl.where(visible, s, -INF)
    p = tl.exp2(s)
    kept = p
    if DROPOUT:
        kept = tl.where(keep, p * keep_scale, 0.0)
    dv = tl.dot(kept.to(do.dtype), do, dv, input_precision=PRECISION)
    dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
    if DROPOUT:
        dp = tl.where(keep, dp * keep_scale, 0.0)
    ds = p * (dp - delta[None, :])
    if softcap is not None:
        ds *= 1 - t * t
    return tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION), dv


@triton.jit(do_not_specialize=["size", "N", "H", "sb", "sn", "sh"])
def backward_stats(OUT, LSE, DOUT, DLSE, STATS, size, N, H, sb, sn, sh, UNIT: tl.constexpr, D: tl.constexpr,
                   DP: tl.constexpr, BM: tl.constexpr):  # fmt: skip
    """Write lse · log2(e) and delta = rowsum(dout · out) - dlse side by side, for the `size` = B · N · H rows of out.

    Rows that saw nothing get lse = inf, so that their p is 0. out (B, N, H, D) is contiguous. The strides of dout, in
    elements, are sb · UNIT, sn · UNIT and sh · UNIT. DLSE may be None, for a gradient of 0. DP is D padded to a power
    of 2. A program writes BM rows.
    """
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    d = tl.arange(0, DP)
    inside = row < size
    h = row % H
    n = row // H % N
    b = row // H // N
    out = load_rows(OUT, row * D, d, inside, D, True).to(tl.float32)
    do = load_rows(DOUT, (b * sb + n * sn + h * sh) * UNIT, d, inside, D, True).to(tl.float32)
    lse = tl.load(LSE + row, mask=inside, other=-INF) * LOG2E
    some = lse != -INF
    delta = tl.sum(out * do, 1)
    if DLSE is not None:
        delta -= tl.load(DLSE + row, mask=some, other=0.0)
    tl.store(STATS + 2 * row, tl.where(some, lse, INF), mask=inside)
    tl.store(STATS + 2 * row + 1, delta, mask=inside)
