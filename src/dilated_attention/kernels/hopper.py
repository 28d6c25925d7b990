# mypy: ignore-errors
"""Compute the forward of calls without masks on sm_90 at head_dim 128, in 16 bits: warp-specialised, in Gluon.

In a loop that Triton compiles, a warpgroup waits for each product of scores before it computes a softmax, and all warps
of a program wait for one another at every tile of keys (results/aot, sm_90). Here one warp loads the tiles by TMA, and
two warpgroups with 64 rows each take turns at issuing products, as in FlashAttention-3: a softmax runs under the same
warpgroup's product with values and under both products of the other.

The kernel reads the tables of strided.py and the lists of block_lists.py. A span of stride r is a box of a tensor that
is viewed as (tokens / r) rows of r tokens. So there is a descriptor for each stride of tiles (Q1 to Q5) and of spans
(K1 to K5, V1 to V5). Each is an argument of its own, since Triton, up to 3.7 at least, launches no kernel with
descriptors in a tuple.

Legend beyond strided.py's.
  n                query head
  ST               tiles of keys in flight, at least 2: with 1 the turns and the loads would wait for one another
  TILE_STRIDES     strides of tiles, of which Q1, Q2, ... are the descriptors
  SPAN_STRIDES     strides of spans, of which K1, K2, ... and V1, V2, ... are the descriptors
  *_FULL, *_FREE   barriers of the shared buffers of q, k and v
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dilated_attention.kernels.configurations import FUSED, Shape

ROWS = gl.constexpr(64)
"""Rows of a warpgroup; a tile has two."""

SHAPE = Shape(2 * ROWS.value, 128, 4, 2)
"""The tiles of the kernel. Its stages are ST, the tiles of keys in flight."""

HEAD_DIM = 128
DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
MOST_STRIDES = 5

# As in strided.py, block_lists.py and online.py; a Gluon kernel reads no constants of Triton's language.
TILE_FIELDS = gl.constexpr(9)
SPAN_FIELDS = gl.constexpr(5)
LIST = gl.constexpr(6)
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def locate(SOURCE, b, head, start, stride, UNIT: gl.constexpr):
    """Return the row and the column at which a tile or span begins in the view of its stride; an unused span has 0.

    SOURCE: (descriptors, tokens of a sample, stride of a token, stride of a head).
    """
    _, tokens, sn, sh = SOURCE
    stride = gl.maximum(stride, 1)
    return b * (tokens // stride) + start // stride, ((start % stride) * sn + head * sh) * UNIT


@gluon.jit
def load_box(SOURCE, BAR, BUFFER, row, column, stride, STRIDES: gl.constexpr):
    """Start to load the box at this row and column, by the descriptor of its stride; BAR counts what arrives."""
    DESCRIPTORS, _, _, _ = SOURCE
    for i in gl.static_range(len(STRIDES)):
        tma.async_copy_global_to_shared(DESCRIPTORS[i], [row, column], BAR, BUFFER, pred=stride == STRIDES[i])


@gluon.jit
def load_step(step, KS, VS, BUFFERS, BARRIERS, row, k_column, v_column, stride, SPAN_STRIDES: gl.constexpr,
              D: gl.constexpr, BN: gl.constexpr, ST: gl.constexpr):  # fmt: skip
    """Load BN keys and values, from this row of their views on, each when its buffer is free."""
    _, K, V = BUFFERS
    _, K_FULL, K_FREE, V_FULL, V_FREE, _ = BARRIERS
    at = step % ST
    turn = ((step // ST) & 1) ^ 1
    mbarrier.wait(K_FREE.index(at), turn)
    mbarrier.expect(K_FULL.index(at), BN * D * 2)
    load_box(KS, K_FULL.index(at), K.index(at), row, k_column, stride, SPAN_STRIDES)
    mbarrier.wait(V_FREE.index(at), turn)
    mbarrier.expect(V_FULL.index(at), BN * D * 2)
    load_box(VS, V_FULL.index(at), V.index(at), row, v_column, stride, SPAN_STRIDES)


@gluon.jit
def read_list(T, LISTS, b, n, LH: gl.constexpr):
    """Return a tile's list of blocks: its first index in INDICES, and the number of blocks.

    T is the address of the tile's table line; LISTS: (INDPTR, INDICES, lsb, lsh).
    """
    INDPTR, _, lsb, lsh = LISTS
    x = b.to(gl.int64) * lsb + (n // LH) * lsh + gl.load(T + LIST)
    low = gl.load(INDPTR + x)
    return low, (gl.load(INDPTR + x + 1) - low).to(gl.int32)


@gluon.jit
def load_tiles(T, LISTS, QS, KS, VS, BUFFERS, BARRIERS, b, h, n, UNIT: gl.constexpr, SPANS: gl.constexpr,
               TILE_STRIDES: gl.constexpr, SPAN_STRIDES: gl.constexpr, D: gl.constexpr, BN: gl.constexpr,
               SIZE: gl.constexpr, LH: gl.constexpr, ST: gl.constexpr):  # fmt: skip
    """Be the warp that loads: the queries of both warpgroups, then keys and values, as buffers become free."""
    INDPTR, INDICES, _, _ = LISTS
    Q_FULL, _, _, _, _, _ = BARRIERS
    Q, _, _ = BUFFERS
    start = gl.load(T + 1)
    stride = gl.load(T + 2)
    if INDPTR is not None:
        low, blocks = read_list(T, LISTS, b, n, LH)
        LISTED = INDICES + low
        following = gl.load(LISTED, mask=blocks > 0, other=0).to(gl.int32)
    row, column = locate(QS, b, n, start, stride, UNIT)
    mbarrier.expect(Q_FULL, 2 * ROWS * D * 2)
    for w in gl.static_range(2):
        load_box(QS, Q_FULL, Q.index(w), row + w * ROWS, column, stride, TILE_STRIDES)
    step = 0
    for span in range(SPANS):
        S = T + TILE_FIELDS + span * SPAN_FIELDS
        start = gl.load(S)
        stride = gl.load(S + 1)
        row, k_column = locate(KS, b, h, start, stride, UNIT)
        v_column = locate(VS, b, h, start, stride, UNIT)[1]
        if INDPTR is None:
            for tile in range(gl.load(S + 2) // BN):
                load_step(step, KS, VS, BUFFERS, BARRIERS, row + tile * BN, k_column, v_column, stride, SPAN_STRIDES, D,
                          BN, ST)  # fmt: skip
                step += 1
        else:
            for i in range(blocks):
                first = row + following * SIZE
                # The next index comes while this block's loads wait for free buffers.
                following = gl.load(LISTED + i + 1, mask=i + 1 < blocks, other=0).to(gl.int32)
                for tile in range(SIZE // BN):
                    load_step(step, KS, VS, BUFFERS, BARRIERS, first + tile * BN, k_column, v_column, stride,
                              SPAN_STRIDES, D, BN, ST)  # fmt: skip
                    step += 1


@gluon.jit
def soften(s, m, z, scale, dtype: gl.constexpr, OPERAND: gl.constexpr):
    """Return the running maximum and denominator after scores s, their p, and what the numerator shrinks by."""
    top = gl.maximum(m, gl.max(s, 1) * scale)
    p = gl.exp2(s * scale - gl.expand_dims(top, 1))
    decay = gl.exp2(m - top)
    return top, z * decay + gl.sum(p, 1), gl.convert_layout(p.to(dtype), OPERAND), decay


@gluon.jit
def write(T, OUT, LSE, b, n, heads, N, W: gl.constexpr, out, lse):
    """Write the rows of warpgroup W: out in the layout of the numerator, lse in the layout of rows of scores."""
    NUMERATOR: gl.constexpr = out.type.layout
    D: gl.constexpr = out.shape[1]
    token = gl.load(T + 1) + gl.load(T + 2) * (W * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, NUMERATOR)))
    rows = (b * N + token).to(gl.int64) * heads + n
    d = gl.arange(0, D, gl.SliceLayout(0, NUMERATOR))
    gl.store(OUT + gl.expand_dims(rows * D, 1) + gl.expand_dims(d, 0), out.to(OUT.dtype.element_ty))
    gl.store(LSE + gl.convert_layout(rows, lse.type.layout), lse)


@gluon.jit
def compute(W: gl.constexpr, T, LISTS, OUT, LSE, BUFFERS, BARRIERS, b, n, heads, N, scale, SPANS: gl.constexpr,
            D: gl.constexpr, BN: gl.constexpr, SIZE: gl.constexpr, LH: gl.constexpr, ST: gl.constexpr):  # fmt: skip
    """Compute with warpgroup W: rows W · ROWS to W · ROWS + ROWS - 1 of the tile.

    Turn n comes when the other one has handed over n times, for the second warpgroup n + 1 times. The wait for it is a
    branch, across which the assembler moves no wait for products: otherwise the one below would move above the softmax.
    A tile that sees nothing takes no turns; it waits for its queries, so that no load outlives the program.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    NUMERATOR: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, NUMERATOR, 2)
    SCORE_ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT_ROWS: gl.constexpr = gl.SliceLayout(1, NUMERATOR)
    INDPTR, _, _, _ = LISTS
    Q, K, V = BUFFERS
    Q_FULL, K_FULL, K_FREE, V_FULL, V_FREE, TURN = BARRIERS
    if INDPTR is None:
        steps = 0
        for span in gl.static_range(SPANS):
            steps += gl.load(T + TILE_FIELDS + span * SPAN_FIELDS + 2) // BN
    else:
        _, blocks = read_list(T, LISTS, b, n, LH)
        steps = blocks * (SIZE // BN)
    m = gl.full([ROWS], -float("inf"), gl.float32, SCORE_ROWS)
    z = gl.full([ROWS], 0.0, gl.float32, SCORE_ROWS)
    acc = gl.full([ROWS, D], 0.0, gl.float32, NUMERATOR)
    none = gl.full([ROWS, BN], 0.0, gl.float32, SCORES)
    q = Q.index(W)
    mbarrier.wait(Q_FULL, 0)
    if steps > 0:
        mbarrier.wait(K_FULL.index(0), 0)
        s = warpgroup_mma(q, K.index(0).permute((1, 0)), none, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(K_FREE.index(0), count=1)
        m, z, p, decay = soften(s, m, z, scale, Q.dtype, OPERAND)
        mbarrier.wait(TURN.index(W), 1 - W)
        for step in range(1, steps):
            at = step % ST
            before = (step - 1) % ST
            mbarrier.wait(K_FULL.index(at), (step // ST) & 1)
            s = warpgroup_mma(q, K.index(at).permute((1, 0)), none, use_acc=False, is_async=True)
            mbarrier.wait(V_FULL.index(before), ((step - 1) // ST) & 1)
            acc = warpgroup_mma(p, V.index(before), acc, is_async=True)
            mbarrier.arrive(TURN.index(1 - W), count=1)
            s = warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(K_FREE.index(at), count=1)
            m, z, new, decay = soften(s, m, z, scale, Q.dtype, OPERAND)
            mbarrier.wait(TURN.index(W), (step + 1 - W) & 1)
            acc, p = warpgroup_mma_wait(0, deps=[acc, p])
            mbarrier.arrive(V_FREE.index(before), count=1)
            acc = acc * gl.expand_dims(gl.convert_layout(decay, OUT_ROWS), 1)
            p = new
        last = (steps - 1) % ST
        mbarrier.wait(V_FULL.index(last), ((steps - 1) // ST) & 1)
        acc = warpgroup_mma(p, V.index(last), acc, is_async=True)
        mbarrier.arrive(TURN.index(1 - W), count=1)
        acc = warpgroup_mma_wait(0, deps=[acc])
        out = acc / gl.expand_dims(gl.convert_layout(z, OUT_ROWS), 1)
        write(T, OUT, LSE, b, n, heads, N, W, out, (m + gl.log2(z)) * LN2)
    else:
        write(T, OUT, LSE, b, n, heads, N, W, acc, m)


@gluon.jit(do_not_specialize=["B", "N", "M", "H", "qsn", "qsh", "ksn", "ksh", "vsn", "vsh", "lsb", "lsh"])
def forward(Q1, Q2, Q3, Q4, Q5, K1, K2, K3, K4, K5, V1, V2, V3, V4, V5, OUT, LSE, TILES, INDPTR, INDICES, scale,
            B, N, M, H, qsn, qsh, ksn, ksh, vsn, vsh, lsb, lsh, G: gl.constexpr, UNIT: gl.constexpr,
            SPANS: gl.constexpr, TILE_STRIDES: gl.constexpr, SPAN_STRIDES: gl.constexpr, D: gl.constexpr,
            BN: gl.constexpr, SIZE: gl.constexpr, LH: gl.constexpr, ST: gl.constexpr):  # fmt: skip
    """Compute out and lse, both contiguous. The legends of this file, strided.py and block_lists.py name the arguments.

    Descriptors come from `boxes`; those past the strides there are may be None. INDPTR and INDICES are lists of blocks,
    or None. With them there is one span, and SIZE is a multiple of BN.
    """
    program = gl.program_id(0)
    T = TILES + (program // G // B).to(gl.int64) * (TILE_FIELDS + SPANS * SPAN_FIELDS)
    b = (program // G) % B
    h = gl.load(T)
    n = h * G + program % G
    dtype: gl.constexpr = Q1.dtype
    Q = gl.allocate_shared_memory(dtype, [2, ROWS, D], Q1.layout)
    K = gl.allocate_shared_memory(dtype, [ST, BN, D], K1.layout)
    V = gl.allocate_shared_memory(dtype, [ST, BN, D], V1.layout)
    Q_FULL = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    K_FULL = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    K_FREE = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    V_FULL = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    V_FREE = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    TURN = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(Q_FULL, count=1)
    for i in gl.static_range(2):
        mbarrier.init(TURN.index(i), count=1)
    for i in gl.static_range(ST):
        mbarrier.init(K_FULL.index(i), count=1)
        mbarrier.init(K_FREE.index(i), count=2)
        mbarrier.init(V_FULL.index(i), count=1)
        mbarrier.init(V_FREE.index(i), count=2)
    LISTS = (INDPTR, INDICES, lsb, lsh)
    QS = ((Q1, Q2, Q3, Q4, Q5), N, qsn, qsh)
    KS = ((K1, K2, K3, K4, K5), M, ksn, ksh)
    VS = ((V1, V2, V3, V4, V5), M, vsn, vsh)
    BUFFERS = (Q, K, V)
    BARRIERS = (Q_FULL, K_FULL, K_FREE, V_FULL, V_FREE, TURN)
    gl.warp_specialize(
        [
            (compute, (0, T, LISTS, OUT, LSE, BUFFERS, BARRIERS, b, n, H * G, N, scale * LOG2E, SPANS, D, BN, SIZE, LH,
                       ST)),
            (compute, (1, T, LISTS, OUT, LSE, BUFFERS, BARRIERS, b, n, H * G, N, scale * LOG2E, SPANS, D, BN, SIZE, LH,
                       ST)),
            (load_tiles, (T, LISTS, QS, KS, VS, BUFFERS, BARRIERS, b, h, n, UNIT, SPANS, TILE_STRIDES, SPAN_STRIDES, D,
                          BN, SIZE, LH, ST)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def fits(table: Any, shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether the kernel serves a launch, with this `tiles.Table` of tiles of this shape, of a call without
    hidden keys and options of the scores."""
    return (
        hasattr(tma, "async_copy_global_to_shared")  # Triton 3.9 gave it another name
        and q.dtype in DTYPES
        and q.shape[3] == HEAD_DIM
        and shape[:2] == SHAPE[:2]
        and table.even
        and table.edge == 0
        and not (table.chain or table.is_causal or table.banded or table.phantoms)
        and all(1 <= len(strides) <= MOST_STRIDES for strides in table.strides)
        and all(_has_boxes(x, strides) for x, strides in zip((q, k, v), _strides_of(table), strict=True))
    )


def _strides_of(table: Any) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """Return the strides for which q, k and v need descriptors."""
    of_tiles, of_spans = table.strides
    return of_tiles, of_spans, of_spans


def _has_boxes(x: Tensor, strides: Sequence[int]) -> bool:
    """Return whether every span of x (B, N, H, D) with one of these strides is a box of a view in two dimensions."""
    batch, tokens, heads, head_dim = x.shape
    token, head = x.stride(1), x.stride(2) if heads > 1 else 0
    return (
        x.stride(3) == 1
        and (batch == 1 or x.stride(0) == tokens * token)
        and (heads - 1) * head + head_dim <= token
        and not any(address % 16 for address in (x.data_ptr(), *(n * x.element_size() for n in (token, head))))
        and not any(tokens % stride for stride in strides)
        and max(batch * tokens, max(strides) * token) < 2**31
    )


def boxes(table: Any, q: Tensor, k: Tensor, v: Tensor) -> Callable[..., dict[str, TensorDescriptor | None]]:
    """Return a function that makes the kernel's descriptors, by name, of tensors with the shapes, strides and dtype of
    q, k and v; None past the strides there are.

    It copies the descriptors that are made and checked here, which takes a fifth of the time.
    """
    held = []
    for place, (x, rows, strides) in enumerate(
        zip((q, k, v), (ROWS.value, SHAPE.loop, SHAPE.loop), _strides_of(table), strict=True)
    ):
        batch, tokens, heads, head_dim = x.shape
        token = x.stride(1)
        width = x.stride(2) * (heads - 1) + head_dim
        box = [rows, head_dim]
        layout = gl.NVMMASharedLayout.get_default_for(box, DTYPES[x.dtype])
        for i, stride in enumerate(strides):
            shape = [batch * tokens // stride, (stride - 1) * token + width]
            descriptor = TensorDescriptor(x, shape, [stride * token, 1], box, layout)
            held.append((f"{'QKV'[place]}{i + 1}", place, vars(descriptor) | {"base": None}))
    absent = dict.fromkeys(f"{x}{i + 1}" for x in "QKV" for i in range(MOST_STRIDES))

    def describe(*tensors: Tensor) -> dict[str, TensorDescriptor | None]:
        found = absent.copy()
        for name, place, values in held:
            found[name] = descriptor = TensorDescriptor.__new__(TensorDescriptor)
            vars(descriptor).update(values, base=tensors[place])
        return found

    return describe


def constants(table: Any) -> dict[str, Any]:
    """Return the arguments of the kernel, and the options of its launch, that depend on the table alone."""
    of_tiles, of_spans = table.strides
    return {
        "TILES": table.lines, "SPANS": table.spans, "TILE_STRIDES": of_tiles, "SPAN_STRIDES": of_spans, "D": HEAD_DIM,
        "BN": SHAPE.loop, "ST": SHAPE.stages, "num_warps": SHAPE.warps, **FUSED,
    }  # fmt: skip
