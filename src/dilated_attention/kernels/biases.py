# mypy: ignore-errors
"""Make what a bias adds to a tile of scores, and add up the gradient of its tensor.

A pair reads the entry place + column of the bias's tensor, times a factor. Every query and head has a place; FORM, a
name of `bias.FORMS`, says what column and factor are made of:

    "by pair"            column = the key's number
    "by query"           column = query - key; other pairs than 0 <= column < SIZES[0] get 0
    "relative"           column = key - query, moved into the table of SIZES[0] entries
    "relative in space"  the same for each axis of a table of SIZES
    other forms          column = 0, factor = -distance

QUERY_AT and KEY_AT hold numbers of keys, positions, or coordinates. In a tile of scores [M, N], numbers by query are
[M, 1] and numbers by key are [1, N]; in dk/dv, [1, M] and [N, 1]. A place is a number by query for the first two forms,
and one scalar for the others, whose queries all begin at the same entry. A bias comes times log2(e), like a score.

Legend beyond strided.py's.
  BIAS                the tensor, flat; None: no bias
  SUMS                the sums of its gradient, flat, float32 or float64; None: it is not wanted
  PLACES              int64 (B or 1, N, H · G)
  QUERY_AT, KEY_AT    (B or 1, N, AXES) and (B or 1, M, AXES): integers, or floats
  BUCKETS             which column of a table belongs to each difference; None: columns are differences
  psb, qab, kab       strides of a sample in PLACES, QUERY_AT and KEY_AT
"""

from __future__ import annotations

import triton
import triton.language as tl

from dilated_attention.kernels.online import LOG2E

FARTHEST = tl.constexpr(2**30)
"""Positions further from a tile than this are taken to be this far away: as far beyond any table."""


@triton.jit
def load_places(PLACES, first, rows, inside, heads, FORM: tl.constexpr, DIM: tl.constexpr):
    """Return the places of the queries at `rows`, as a tile that lacks the dimension DIM, or of `first`, as a scalar.

    `heads` is the stride of a query in PLACES.
    """
    if FORM == "by pair" or FORM == "by query":
        return tl.expand_dims(tl.load(PLACES + rows * heads, mask=inside, other=0), DIM)
    else:
        return tl.load(PLACES + first * heads)


@triton.jit
def load_origin(AT, first, AXES: tl.constexpr):
    """Return where row `first` lies, a scalar per axis."""
    origin = ()
    for axis in tl.static_range(AXES):
        origin += (tl.load(AT + first * AXES + axis),)
    return origin


@triton.jit
def load_points(AT, rows, inside, origin, FORM: tl.constexpr, SIZES: tl.constexpr, AXES: tl.constexpr,
                DIM: tl.constexpr):  # fmt: skip
    """Return where `rows` lie, a tile per axis that lacks the dimension DIM; zeros where not `inside`.

    Positions are counted from `origin`, a point near one side of the tile of scores, in 32 bits, and so are coordinates
    that have more digits than float32.
    """
    points = ()
    for axis in tl.static_range(AXES):
        x = tl.load(AT + rows * AXES + axis, mask=inside, other=0)
        if FORM == "by pair":
            x = x.to(tl.int32)
        elif FORM == "relative in space":
            x = x.to(tl.int64)
        elif SIZES is not None:
            x = tl.minimum(tl.maximum(x - origin[axis], -FARTHEST), FARTHEST).to(tl.int32)
        elif x.dtype.is_int():
            x = (x.to(tl.int64) - origin[axis].to(tl.int64)).to(tl.float32)
        elif x.dtype == tl.float64:
            x = (x - origin[axis]).to(tl.float32)
        else:
            x = x.to(tl.float32)
        points += (tl.expand_dims(x, DIM),)
    return points


@triton.jit
def load_queries(PLACES, QUERY_AT, first, rows, inside, heads, FORM: tl.constexpr, SIZES: tl.constexpr,
                 AXES: tl.constexpr):  # fmt: skip
    """Return what a tile of queries at `rows`, of which `first` is the first, keeps through the loop over keys: its
    places, where its rows lie, and the origin from which `load_points` counts; PLACES and QUERY_AT begin at the sample
    and the head."""
    first = first.to(tl.int64)
    place = load_places(PLACES, first, rows, inside, heads, FORM, 1)
    origin = load_origin(QUERY_AT, first, AXES)
    return place, load_points(QUERY_AT, rows, inside, origin, FORM, SIZES, AXES, 1), origin


@triton.jit
def distance(queries, keys, FORM: tl.constexpr, AXES: tl.constexpr):
    """Return the distances of pairs of points, float32."""
    apart = tl.abs(keys[0] - queries[0])
    if AXES > 1:
        if FORM == "euclidean":
            apart *= apart
        for axis in tl.static_range(1, AXES):
            x = keys[axis] - queries[axis]
            if FORM == "euclidean":
                apart += x * x
            elif FORM == "manhattan":
                apart += tl.abs(x)
            else:
                apart = tl.maximum(apart, tl.abs(x))
        if FORM == "euclidean":
            apart = tl.sqrt(apart)
    return apart


@triton.jit
def column_of(BUCKETS, queries, keys, FORM: tl.constexpr, SIZES: tl.constexpr):
    """Return the column of each pair, of a form that is no distance."""
    if FORM == "by pair":
        return keys[0]
    elif FORM == "by query":
        return queries[0] - keys[0]
    else:
        column = 0
        for axis in tl.static_range(len(SIZES)):
            extent = SIZES[axis] // 2
            x = tl.minimum(tl.maximum(keys[axis] - queries[axis], -extent), extent).to(tl.int32)
            column = column * SIZES[axis] + x + extent
        if BUCKETS is not None:
            column = tl.load(BUCKETS + column).to(tl.int32)
        return column


@triton.jit
def bias_of(BIAS, BUCKETS, place, queries, keys, FORM: tl.constexpr, SIZES: tl.constexpr, AXES: tl.constexpr):
    """Return the bias of each pair of a tile, times log2(e)."""
    if FORM == "by query":
        column = column_of(BUCKETS, queries, keys, FORM, SIZES)
        entry = tl.load(BIAS + place + column, mask=(column >= 0) & (column < SIZES[0]), other=0)
        return entry.to(tl.float32) * LOG2E
    elif FORM == "by pair" or SIZES is not None:
        entry = tl.load(BIAS + place + column_of(BUCKETS, queries, keys, FORM, SIZES))
        return entry.to(tl.float32) * LOG2E
    else:
        return distance(queries, keys, FORM, AXES) * (tl.load(BIAS + place).to(tl.float32) * -LOG2E)


@triton.jit
def collect(SUMS, BUCKETS, place, queries, keys, ds, low, high, FORM: tl.constexpr, SIZES: tl.constexpr,
            AXES: tl.constexpr):  # fmt: skip
    """Add the gradient ds of a tile of scores [M, N] to SUMS, and to the sums `low` and `high` [M], which are returned.

    A slope's gradient goes into `low`, up to its sign. A table by difference has `low` for its first entry and `high`
    for its last one: most pairs of a long sequence read these, and would wait for one another.
    """
    if FORM == "by pair" or SIZES is not None:
        column = column_of(BUCKETS, queries, keys, FORM, SIZES)
        some = ds != 0.0
        if FORM == "by query":
            some &= (column >= 0) & (column < SIZES[0])
        if FORM == "relative":
            apart = keys[0] - queries[0]
            first = apart <= -(SIZES[0] // 2)
            last = (apart >= SIZES[0] // 2) & (first == 0)
            low += tl.sum(tl.where(first, ds, 0.0), 1)
            high += tl.sum(tl.where(last, ds, 0.0), 1)
            some &= (first | last) == 0
        tl.atomic_add(SUMS + place + column, ds.to(SUMS.dtype.element_ty), mask=some, sem="relaxed")
    else:
        low += tl.sum(ds * distance(queries, keys, FORM, AXES), 1)
    return low, high


@triton.jit
def finish_sums(SUMS, BUCKETS, place, low, high, FORM: tl.constexpr, SIZES: tl.constexpr):
    """Add the sums that `collect` returned to SUMS."""
    if FORM == "relative":
        first = 0
        last = SIZES[0] - 1
        if BUCKETS is not None:
            first = tl.load(BUCKETS)
            last = tl.load(BUCKETS + last)
        tl.atomic_add(SUMS + place + first, tl.sum(low).to(SUMS.dtype.element_ty), sem="relaxed")
        tl.atomic_add(SUMS + place + last, tl.sum(high).to(SUMS.dtype.element_ty), sem="relaxed")
    elif FORM != "by pair" and SIZES is None:
        tl.atomic_add(SUMS + place, -tl.sum(low).to(SUMS.dtype.element_ty), sem="relaxed")
