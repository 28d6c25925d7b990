# mypy: ignore-errors
"""A candidate kernel: the forward of plain dilated calls on sm_90, warp-specialised, in Gluon.

    python lab/experiments/hopper.py [--out FOLDER]

compares it with the kernel that ships and times both, on a GPU of sm_90, and writes <out>/<device>/hopper.jsonl. No
backend uses it: results/cuda-nvidia-h200/hopper.jsonl has it faster at head_dim 128 and slower at 64. What it should
gain: in a loop that Triton compiles, a warpgroup waits for each product of scores before it computes a softmax, and all
warps of a program wait for one another at every tile of keys (results/aot, sm_90). Here one warp loads the tiles by
TMA, and two warpgroups with 64 rows each take turns at issuing products, as in FlashAttention-3: a softmax runs under
the same warpgroup's product with values and under both products of the other.

It reads the tables of kernels/strided.py. A span of stride r is a box of a tensor that is viewed as (tokens / r rows of
r tokens), so there is one descriptor per stride: Q1 to Q5, K1 to K5 and V1 to V5, each an argument of its own, since
Triton, up to 3.7 at least, launches no kernel with descriptors in a tuple. Legend: H heads; N tokens; D head_dim; BN
keys per tile; ST tiles in flight; STRIDES of the tiles and spans; s, p, m, z, acc as in kernels/online.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dilated_attention.backends import tiles, triton
from dilated_attention.backends.problem import Problem
from dilated_attention.errors import UnsupportedError
from dilated_attention.kernels.configurations import FUSED, Shape
from dilated_attention.plan import Plan
from dilated_attention_lab.bench import measure
from dilated_attention_lab.bench.cases import Case, contender
from dilated_attention_lab.bench.on_gpu import PAPER
from dilated_attention_lab.bench.results import Recorder, Row
from dilated_attention_lab.bench.suites import rates
from dilated_attention_lab.verification import relative_error

ROWS = gl.constexpr(64)
"""Rows of a warpgroup; a tile has two."""

TILE_FIELDS = gl.constexpr(8)
SPAN_FIELDS = gl.constexpr(5)
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def load_box(DESCRIPTORS, BAR, BUFFER, b, head, start, stride, position, H, N, STRIDES: gl.constexpr, D: gl.constexpr):
    """The box of the rows at `position` of the tile or span that begins at `start`, by the descriptor of its stride."""
    for n in gl.static_range(len(STRIDES)):
        row = b * (N // STRIDES[n]) + start // STRIDES[n] + position
        column = ((start % STRIDES[n]) * H + head) * D
        tma.async_copy_global_to_shared(DESCRIPTORS[n], [row, column], BAR, BUFFER, pred=stride == STRIDES[n])


@gluon.jit
def load_tiles(T, QS, KS, VS, Q, K, V, Q_FULL, K_FULL, K_FREE, V_FULL, V_FREE, b, head, kv_head, H, HK, N,
               SPANS: gl.constexpr, STRIDES: gl.constexpr, D: gl.constexpr, BN: gl.constexpr,
               ST: gl.constexpr):  # fmt: skip
    """The warp that loads: the queries of both warpgroups, then keys and values, as buffers become free."""
    start = gl.load(T + 1)
    stride = gl.load(T + 2)
    mbarrier.expect(Q_FULL, 2 * ROWS * D * 2)
    for w in gl.static_range(2):
        load_box(QS, Q_FULL, Q.index(w), b, head, start, stride, w * ROWS, H, N, STRIDES, D)
    step = 0
    for span in range(SPANS):
        S = T + TILE_FIELDS + span * SPAN_FIELDS
        start = gl.load(S)
        stride = gl.load(S + 1)
        for tile in range(gl.load(S + 2) // BN):
            at = step % ST
            turn = ((step // ST) & 1) ^ 1
            mbarrier.wait(K_FREE.index(at), turn)
            mbarrier.expect(K_FULL.index(at), BN * D * 2)
            load_box(KS, K_FULL.index(at), K.index(at), b, kv_head, start, stride, tile * BN, HK, N, STRIDES, D)
            mbarrier.wait(V_FREE.index(at), turn)
            mbarrier.expect(V_FULL.index(at), BN * D * 2)
            load_box(VS, V_FULL.index(at), V.index(at), b, kv_head, start, stride, tile * BN, HK, N, STRIDES, D)
            step += 1


@gluon.jit
def soften(s, m, z, scale, dtype: gl.constexpr, OPERAND: gl.constexpr):
    """The running maximum and denominator after scores s, their p, and what the numerator shrinks by."""
    top = gl.maximum(m, gl.max(s, 1) * scale)
    p = gl.exp2(s * scale - gl.expand_dims(top, 1))
    decay = gl.exp2(m - top)
    return top, z * decay + gl.sum(p, 1), gl.convert_layout(p.to(dtype), OPERAND), decay


@gluon.jit
def compute(W: gl.constexpr, T, OUT, LSE, Q, K, V, Q_FULL, K_FULL, K_FREE, V_FULL, V_FREE, TURN, b, head, H, N,
            scale, SPANS: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, ST: gl.constexpr):  # fmt: skip
    """Compute with warpgroup W: rows W · ROWS to W · ROWS + ROWS - 1 of the tile.

    Turn n comes when the other one has handed over n times, for the second warpgroup n + 1 times. The wait for it is a
    branch, across which the assembler moves no wait for products: otherwise the one below would move above the softmax.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    NUMERATOR: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, NUMERATOR, 2)
    SCORE_ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT_ROWS: gl.constexpr = gl.SliceLayout(1, NUMERATOR)
    steps = 0
    for span in range(SPANS):
        steps += gl.load(T + TILE_FIELDS + span * SPAN_FIELDS + 2) // BN
    m = gl.full([ROWS], -float("inf"), gl.float32, SCORE_ROWS)
    z = gl.full([ROWS], 0.0, gl.float32, SCORE_ROWS)
    acc = gl.full([ROWS, D], 0.0, gl.float32, NUMERATOR)
    none = gl.full([ROWS, BN], 0.0, gl.float32, SCORES)
    q = Q.index(W)
    mbarrier.wait(Q_FULL, 0)
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
    token = gl.load(T + 1) + gl.load(T + 2) * (W * ROWS + gl.arange(0, ROWS, OUT_ROWS))
    rows = (b * N + token).to(gl.int64) * H + head
    d = gl.arange(0, D, gl.SliceLayout(0, NUMERATOR))
    out = acc / gl.expand_dims(gl.convert_layout(z, OUT_ROWS), 1)
    gl.store(OUT + gl.expand_dims(rows * D, 1) + gl.expand_dims(d, 0), out.to(Q.dtype))
    gl.store(LSE + gl.convert_layout(rows, SCORE_ROWS), (m + gl.log2(z)) * LN2)


@gluon.jit
def forward(Q1, Q2, Q3, Q4, Q5, K1, K2, K3, K4, K5, V1, V2, V3, V4, V5, OUT, LSE, TILES, B, H, HK, N, scale,
            G: gl.constexpr, SPANS: gl.constexpr, STRIDES: gl.constexpr, D: gl.constexpr, BN: gl.constexpr,
            ST: gl.constexpr):  # fmt: skip
    """out (B, N, H, D) and lse (B, N, H), contiguous, of q (B, N, H, D) and k, v (B, N, HK, D), H = G · HK."""
    QS = (Q1, Q2, Q3, Q4, Q5)
    KS = (K1, K2, K3, K4, K5)
    VS = (V1, V2, V3, V4, V5)
    program = gl.program_id(0)
    T = TILES + (program // G // B) * (TILE_FIELDS + SPANS * SPAN_FIELDS)
    b = (program // G) % B
    kv_head = gl.load(T)
    head = kv_head * G + program % G
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
    for n in gl.static_range(2):
        mbarrier.init(TURN.index(n), count=1)
    for n in gl.static_range(ST):
        mbarrier.init(K_FULL.index(n), count=1)
        mbarrier.init(K_FREE.index(n), count=2)
        mbarrier.init(V_FULL.index(n), count=1)
        mbarrier.init(V_FREE.index(n), count=2)
    gl.warp_specialize(
        [
            (compute, (0, T, OUT, LSE, Q, K, V, Q_FULL, K_FULL, K_FREE, V_FULL, V_FREE, TURN, b, head, H, N, scale,
                       SPANS, D, BN, ST)),
            (compute, (1, T, OUT, LSE, Q, K, V, Q_FULL, K_FULL, K_FREE, V_FULL, V_FREE, TURN, b, head, H, N, scale,
                       SPANS, D, BN, ST)),
            (load_tiles, (T, QS, KS, VS, Q, K, V, Q_FULL, K_FULL, K_FREE, V_FULL, V_FREE, b, head, kv_head, H, HK, N,
                          SPANS, STRIDES, D, BN, ST)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


TILES_IN_FLIGHT = {64: (128, 3), 128: (128, 2)}
"""For each head_dim: keys per tile, tiles in flight."""

MOST_STRIDES = 5


def prepare(q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a call that computes out and lse of contiguous q (B, N, H, D) and k, v (B, N, HK, D). Raises
    UnsupportedError where it would be wrong."""
    batch, tokens, heads, head_dim = q.shape
    if head_dim not in TILES_IN_FLIGHT or q.dtype not in (torch.float16, torch.bfloat16):
        raise UnsupportedError(f"the candidate needs a head_dim of 64 or 128 in 16 bits; got {head_dim}, {q.dtype}")
    if not all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (q, k, v)):
        raise UnsupportedError("the candidate needs contiguous q, k and v on 16 bytes")
    keys, stages = TILES_IN_FLIGHT[head_dim]
    table, *more = tiles.tables(plan, "queries", Shape(2 * ROWS.value, keys, 4, stages), None, q.device)
    lines = table.lines
    strides = sorted({*lines[:, [2, *range(9, lines.shape[1], 5)]].flatten().tolist()} - {0})  # 0: spans of other tiles
    if more or table.chain or not table.even or not plan.covered or lines[:, 5].any():
        raise UnsupportedError("the candidate needs one launch of full tiles that covers all rows, without phantoms")
    if any(tokens % stride for stride in strides):
        raise UnsupportedError(f"the candidate needs strides that divide {tokens}; got {strides}")
    if len(strides) > MOST_STRIDES:
        raise UnsupportedError(f"the candidate needs at most {MOST_STRIDES} strides; got {strides}")
    group = heads // k.shape[2]
    dtype = gl.float16 if q.dtype == torch.float16 else gl.bfloat16
    # A descriptor for each: in the place of strides that there are not, the last one again.
    padded = [*strides, *[strides[-1]] * (MOST_STRIDES - len(strides))]

    def launch() -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        boxes = []
        for (x, rows), stride in product(((q, ROWS.value), (k, keys), (v, keys)), padded):
            box = [rows, head_dim]
            layout = gl.NVMMASharedLayout.get_default_for(box, dtype)
            boxes.append(TensorDescriptor.from_tensor(x.view(batch * tokens // stride, -1), box, layout))
        forward[(len(lines) * batch * group,)](
            *boxes, out, lse, lines, batch, heads, k.shape[2], tokens, scale * LOG2E.value,
            G=group, SPANS=table.spans, STRIDES=tuple(strides), D=head_dim, BN=keys, ST=stages, num_warps=4, **FUSED,
        )  # fmt: skip
        return out, lse

    return launch


def measured(case: Case, device: torch.device, budget: float) -> Iterator[Row]:
    """Yield the difference from triton's numbers, then the ratio of its time to triton's in the same rounds."""
    q, k, v = case.inputs(device)[0]
    plan, scale = case.plan, case.head_dim**-0.5
    calls: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "gluon": prepare(q, k, v, plan, scale),
        "triton": partial(triton.forward, Problem(plan, scale), q, k, v),
    }
    for name, x, y in zip(("out", "lse"), *(call() for call in calls.values()), strict=True):
        title = f"{name}: relative difference of the candidate in Gluon from triton"
        yield Row(title, case.parameters, relative_error(x.double(), y.double()), "", bar=1e-2)
    contenders = {name: contender(call) for name, call in calls.items()}
    rounds = measure.interleave(contenders, seconds=budget, device=device, dtype=getattr(torch, case.dtype))
    ratio, useful = rounds.ratio("gluon", "triton"), rates(rounds, "forward", dict.fromkeys(calls, case.flops))
    yield Row.of("forward: the candidate in Gluon over triton", case.parameters, ratio, rates=useful)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("results"))
    device = torch.device("cuda")
    recorder = Recorder(parser.parse_args().out, "hopper", device)
    for head_dim in (128, 64):
        for row in measured(replace(PAPER, head_dim=head_dim), device, 5.0):
            recorder.add(row)
            print(f"{row.name}, head_dim {head_dim}: {row.value} {row.unit}", flush=True)
