"""The Triton backend: a plan's groups become device tables of tiles, one launch per set of groups that share no row.

Forward and backward start from the running state where an earlier launch wrote a row, so nothing is gathered, padded or
kept per branch. Tables are made once per plan and device; a repeated call only launches, without a host
synchronisation, so it may be captured in a CUDA graph (after one call outside it).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dilated_attention.kernels.configurations import Configuration, Kernel, configuration
from dilated_attention.plan import Plan, Rows, StridedGroup, plan_cache

Side = Literal["queries", "keys"]
Part = tuple[np.ndarray, Sequence[int]]  # cells, and the heads that have them
LOG2E = 1.4426950408889634
MAX_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def refusal(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> str | None:
    """Why this backend cannot serve a call on q, k, v, and what would; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (`pip install triton`)"
    if q.device.type == "cpu":
        if not _interpreting():
            return "it needs a GPU"
    elif q.device.type != "cuda":
        return f"it runs on CUDA and ROCm, not on {q.device.type}"
    elif torch.version.hip is None and torch.cuda.get_device_capability(q.device) < (8, 0):
        return f"it needs compute capability 8.0, {torch.cuda.get_device_name(q.device)} has less"
    if q.dtype not in DTYPES:
        return f"it computes float16, bfloat16 and float32, not {q.dtype}"
    if q.shape[-1] > MAX_HEAD_DIM:
        return f"head_dim {q.shape[-1]} is over {MAX_HEAD_DIM}"
    if v.shape[-1] != q.shape[-1]:
        return f"v has head_dim {v.shape[-1]}, q has {q.shape[-1]}: they must be equal"
    if not scale > 0:
        return f"scale must be positive, got {scale}"
    if max(q.shape[1], k.shape[1]) > MAX_TOKENS:
        return f"it addresses at most {MAX_TOKENS} tokens a sequence"
    return None


def _interpreting() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


# ---- tables

FIELDS, SPAN_FIELDS = 8, 4  # of kernels/strided.py
HEAD, START, STRIDE, ROWS, FIRST, PHANTOMS, LIST = range(7)
UNMASKED = {"queries": 2**30, "keys": -(2**30)}  # diagonals that hide nothing from tiles of that side
MAX_TOKENS = 2**30
MAX_CLASSES, MAX_SPANS, MAX_EXTRA_STEPS = 64, 8, 1.05


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: a device table as kernels/strided.py describes, one row per tile."""

    table: Tensor
    spans: int
    chain: bool
    even: bool
    shape: Configuration

    def grid(self, heads: Tensor, groups: Tensor) -> tuple[int]:
        """A program per tile, sample and query head; `heads` of tensor 1 per head of tensor 2."""
        return (len(self.table) * heads.shape[0] * (heads.shape[2] // groups.shape[2]),)

    def constants(self, queries: Literal["own", "loop"], keys: Literal["own", "loop"]) -> dict[str, Any]:
        """Arguments of the kernel; which of the two tiles holds queries and which keys."""
        shape = self.shape
        return {
            "TILES": self.table, "SPANS": self.spans, "CHAIN": self.chain, "EVEN": self.even,
            "BM": getattr(shape, queries), "BN": getattr(shape, keys),
            "num_warps": shape.warps, "num_stages": shape.stages,
        }  # fmt: skip


def levels(groups: Iterable[StridedGroup], side: Side) -> list[list[StridedGroup]]:
    """The groups in turns: in one turn no two share a (row, head), and groups that do keep their order.

    Each group goes to the turn after the last one that touches the tokens of one of its heads. What a group touches is
    taken to be the interval from its first token to its last: a turn more than needed costs time, not correctness.
    """
    turns: list[list[StridedGroup]] = []
    touched: dict[int, list[tuple[int, int, int, int]]] = {}  # head -> (low, high, greatest high so far, turn)
    for group in groups:
        rows: Rows = getattr(group, side)
        low, high = rows.start, rows.start + (rows.segments - 1) * rows.segment + (rows.count - 1) * rows.stride + 1
        turn = 0
        for head in _heads(group):
            for other_low, other_high, reach, other in reversed(touched.get(head, ())):
                if reach <= low:
                    break
                if other_low < high and low < other_high:
                    turn = max(turn, other + 1)
        for head in _heads(group):
            intervals = touched.setdefault(head, [])
            intervals.append((low, high, max(high, intervals[-1][2] if intervals else 0), turn))
        if turn == len(turns):
            turns.append([])
        turns[turn].append(group)
    return turns


def _heads(group: StridedGroup) -> range:
    return range(group.head, group.head + group.heads * group.head_stride, group.head_stride)


def _sides(group: StridedGroup, side: Side) -> tuple[Rows, Rows]:
    """The rows that tiles hold and the rows that they loop over."""
    return (group.queries, group.keys) if side == "queries" else (group.keys, group.queries)


def segment_cells(group: StridedGroup, side: Side, is_causal: bool) -> np.ndarray:
    """A group's segments as rows of a table not yet cut into tiles; each sees the whole of its one span."""
    own, other = _sides(group, side)
    segment = np.arange(own.segments)
    cells = np.zeros((own.segments, FIELDS + SPAN_FIELDS), np.int64)
    cells[:, START], cells[:, STRIDE] = own.start + segment * own.segment, own.stride
    cells[:, ROWS], cells[:, FIRST] = own.count, group.first
    cells[:, PHANTOMS] = 0 if is_causal else group.phantoms
    cells[:, FIELDS] = other.start + segment * other.segment
    cells[:, FIELDS + 1 :] = other.stride, other.count, 0 if is_causal and group.diagonal else UNMASKED[side]
    return cells


def union_cells(groups: Sequence[StridedGroup], side: Side) -> np.ndarray:
    """The rows that `groups` (of one head, none masked) hold together, cut so that the rows of a cell see the same spans.

    In a residue class modulo the least common multiple of the strides, all rows inside a segment of a group belong to
    it or none does. So the ends of the segments cut the class into cells.
    """
    period = math.lcm(*(_sides(group, side)[0].stride for group in groups))
    parts, most = [], 0
    for residue in range(period):
        ends = [np.zeros(0, np.int64)]
        for group in groups:
            own, _ = _sides(group, side)
            begin = own.start + np.arange(own.segments) * own.segment
            begin = begin[(residue - begin) % own.stride == 0]
            ends += [begin, begin + (own.count - 1) * own.stride + 1]
        cut = np.unique(-((residue - np.concatenate(ends)) // period))  # index in the class of the first row at an end
        cells = np.zeros((max(len(cut) - 1, 0), FIELDS + SPAN_FIELDS * len(groups)), np.int64)
        cells[:, START], cells[:, STRIDE], cells[:, ROWS] = residue + period * cut[:-1], period, np.diff(cut)
        spans = np.zeros(len(cells), np.int64)
        for group in groups:
            own, other = _sides(group, side)
            length = own.segment if own.segments > 1 else (own.count - 1) * own.stride + 1
            segment, within = np.divmod(cells[:, START] - own.start, length)
            holds = (segment >= 0) & (segment < own.segments)
            holds &= (within % own.stride == 0) & (within < own.count * own.stride)
            at, field = np.nonzero(holds)[0], FIELDS + SPAN_FIELDS * spans[holds]
            cells[at, field] = other.start + segment[at] * other.segment
            cells[at, field + 1], cells[at, field + 2], cells[at, field + 3] = other.stride, other.count, UNMASKED[side]
            cells[at, FIRST] |= group.first
            cells[at, PHANTOMS] += group.phantoms
            spans += holds
        parts.append(cells[spans > 0])
        most = max(most, int(spans.max(initial=0)))
    return np.concatenate(parts)[:, : FIELDS + SPAN_FIELDS * most]


def tile_table(parts: Sequence[Part], side: Side, own: int) -> np.ndarray:
    """Cells of all heads cut into tiles of `own` rows, the heaviest cells and, when causal, the heaviest tiles first."""
    width = max(cells.shape[1] for cells, _ in parts)
    blocks = []
    for cells, heads in parts:
        count = -(-cells[:, ROWS] // own)
        copies = count * len(heads)
        at = np.repeat(np.arange(len(cells)), copies)
        nth = np.arange(len(at)) - np.repeat(np.cumsum(copies) - copies, copies)
        head, tile = np.divmod(nth, count[at])
        block = np.zeros((len(at), width), np.int64)
        block[:, : cells.shape[1]] = cells[at]
        masked = (block[:, FIELDS + 3 :: SPAN_FIELDS] != UNMASKED[side]) & (block[:, FIELDS + 2 :: SPAN_FIELDS] > 0)
        if side == "queries" and masked.any():
            tile = count[at] - 1 - tile
        block[:, HEAD] = np.asarray(heads)[head]
        block[:, START] += tile * own * block[:, STRIDE]
        block[:, ROWS] = np.minimum(own, block[:, ROWS] - tile * own)
        block[:, FIELDS + 3 :: SPAN_FIELDS] += masked * (tile * own)[:, None]
        blocks.append(block)
    table = np.concatenate(blocks)
    table = table[np.argsort(-table[:, FIELDS + 2 :: SPAN_FIELDS].sum(1), kind="stable")]
    return np.ascontiguousarray(table, np.int32)


def plan_launches(plan: Plan, side: Side, is_causal: bool, own: int, loop: int) -> list[list[Part]]:
    """The plan's launches: consecutive turns run as one where that costs at most a few more steps of the inner loop.

    Branches whose classes fill tiles (w >= own · r for every w and r of them) then share one softmax: no running state
    goes through memory. Causal turns stay apart: a tile of a sparse class spans so much of a denser branch's segment
    that up to half of the scores it computes lie above the diagonal.
    """
    launches: list[tuple[list[StridedGroup], list[Part], int]] = []
    for turn in levels(plan.groups, side):
        parts = [(segment_cells(group, side, is_causal), _heads(group)) for group in turn]
        steps = _steps(parts, own, loop)
        if launches and not is_causal:
            groups, _, before = launches[-1]
            together = _together([*groups, *turn], side)
            if together and _steps(together, own, loop) <= MAX_EXTRA_STEPS * (before + steps):
                launches[-1] = [*groups, *turn], together, before + steps
                continue
        launches.append((turn, parts, steps))
    return [parts for _, parts, _ in launches]


def _together(groups: list[StridedGroup], side: Side) -> list[Part]:
    holders: dict[int, list[StridedGroup]] = {}
    for group in groups:
        for head in _heads(group):
            holders.setdefault(head, []).append(group)
    parts = []
    by_groups: dict[tuple[int, ...], list[int]] = {}
    for head, held in holders.items():
        by_groups.setdefault(tuple(map(id, held)), []).append(head)
    for heads in by_groups.values():
        held = holders[heads[0]]
        if math.lcm(*(_sides(group, side)[0].stride for group in held)) > MAX_CLASSES:
            return []
        parts.append((union_cells(held, side), heads))
        if parts[-1][0].shape[1] > FIELDS + SPAN_FIELDS * MAX_SPANS:
            return []
    return parts


def _steps(parts: Sequence[Part], own: int, loop: int) -> int:
    """Steps of the inner loop that these cells take."""
    return sum(
        int((-(-cells[:, ROWS] // own) * (-(-cells[:, FIELDS + 2 :: SPAN_FIELDS] // loop)).sum(1)).sum()) * len(heads)
        for cells, heads in parts
    )


def make_launches(
    plan: Plan, kernel: Kernel, is_causal: bool, element_size: int, head_dim: int, device: torch.device
) -> tuple[Launch, ...]:
    """The kernel's launches for a plan, with tables on `device`."""
    side: Side = "keys" if kernel == "dkdv" else "queries"
    shape = fit(
        configuration(kernel, architecture(device), element_size, head_dim),
        max(_sides(group, side)[0].count for group in plan.groups),
        max(_sides(group, side)[1].count for group in plan.groups),
    )
    out = []
    for parts in plan_launches(plan, side, is_causal, shape.own, shape.loop):
        table = tile_table(parts, side, shape.own)
        if side == "keys" and not plan.square:
            table[:, FIRST] = 0
        even = not (table[:, FIELDS + 2 :: SPAN_FIELDS] % shape.loop).any()
        spans = (table.shape[1] - FIELDS) // SPAN_FIELDS
        out.append(Launch(torch.from_numpy(table).to(device), spans, not table[:, FIRST].all(), even, shape))
    return tuple(out)


def fit(shape: Configuration, own: int, loop: int) -> Configuration:
    """The shape cut to tiles that `own` and `loop` rows fill; 16 rows at least, a warp for every 16."""
    own, loop = (
        min(size, max(16, 1 << (rows - 1).bit_length())) for size, rows in ((shape.own, own), (shape.loop, loop))
    )
    return shape._replace(own=own, loop=loop, warps=min(shape.warps, max(1, own * loop // 512)))


def architecture(device: torch.device) -> str:
    """The row of kernels/configurations.py that serves a device."""
    if device.type == "cpu":
        return "sm_90"
    if torch.version.hip is not None:
        return "gfx942"
    major, minor = torch.cuda.get_device_capability(device)
    return {(8, 0): "sm_80", (9, 0): "sm_90", (10, 0): "sm_100", (10, 3): "sm_100"}.get((major, minor), "sm_86")


@dataclass(frozen=True, slots=True)
class _Launches:
    """What the cache holds. It keeps the plan alive, whose id is in the key."""

    plan: Plan
    launches: tuple[Launch, ...]

    @property
    def nbytes(self) -> int:
        return 256 + sum(launch.table.nbytes for launch in self.launches)


def _launches(plan: Plan, kernel: Kernel, is_causal: bool, x: Tensor) -> tuple[Launch, ...]:
    if not plan.groups or not x.numel():
        return ()
    call = kernel, is_causal, x.element_size(), x.shape[-1], x.device
    return plan_cache.get(("triton", id(plan), *call), lambda: _Launches(plan, make_launches(plan, *call))).launches


# ---- calls


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    is_causal: bool,
    scale: float,
    key_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    state: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse of a plan.

    Args:
        q, k, v: (B, N, H, D), (B, M, Hkv, D), (B, M, Hkv, D); the last stride is 1, the others are free.
        key_bias: float32 (B, M), 0 or -inf: -inf hides a key.
        dropout_p, seed: see kernels/online.py; seed is an int64 scalar on q's device, needed if dropout_p > 0.
        state: running (out, lse) of an earlier plan, continued in place by every group that is not `first`.

    Returns:
        out (B, N, H, D) in q's dtype and lse (B, N, H), float32, natural logarithm; 0 and -inf in rows that see nothing.
    """
    from dilated_attention.kernels import strided

    out, lse = state or _fresh(q, plan)
    arguments = _arguments(q, k, v, key_bias, is_causal, scale, dropout_p, seed) | {"OUT": out, "LSE": lse}
    with _device(q):
        for launch in _launches(plan, "forward", is_causal, q):
            strided.forward[launch.grid(q, k)](**arguments, **launch.constants("own", "loop"))
    return out, lse


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: Plan,
    *,
    is_causal: bool,
    scale: float,
    key_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    state: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of a plan from the merged out and lse; deterministic. Arguments as for `forward`.

    Args:
        dout, dlse: gradients of out (B, N, H, D) and of lse (B, N, H), the latter float32 or None.
        state: running (dq, dk, dv) of an earlier plan. The caller fills dk and dv with zeros if this plan or the earlier
            one has keys that are not its queries.
    """
    from dilated_attention.kernels import strided

    keys, queries = (_launches(plan, kernel, is_causal, q) for kernel in ("dkdv", "dq"))
    dq, dk, dv = state or _fresh_gradients(q, k, v, plan, any(launch.chain for launch in keys + queries))
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    arguments = _arguments(q, k, v, key_bias, is_causal, scale, dropout_p, seed, dout)
    arguments |= {"DOUT": dout, "STATS": _stats(out, lse, dout, dlse)}
    with _device(q):
        for launch in keys:
            strided.backward_dkdv[launch.grid(k, k)](DK=dk, DV=dv, **arguments, **launch.constants("loop", "own"))
        for launch in queries:
            strided.backward_dq[launch.grid(q, k)](DQ=dq, **arguments, **launch.constants("own", "loop"))
    return (dq, dk, dv) if state else (dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype))


def _fresh(q: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    return (out, lse) if plan.covered else (out.zero_(), lse.fill_(-math.inf))


def _fresh_gradients(q: Tensor, k: Tensor, v: Tensor, plan: Plan, sums: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Buffers for the gradients: zeros where no launch writes first; in single precision where several add up."""
    dq, dk, dv = (torch.empty(x.shape, dtype=torch.float32 if sums else x.dtype, device=x.device) for x in (q, k, v))
    if not plan.covered:
        dq.zero_()
    if not (plan.covered and plan.square):
        dk.zero_()
        dv.zero_()
    return dq, dk, dv


def _stats(out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """lse and rowsum(dout · out) - dlse as the kernels read them, (B, N, H, 2)."""
    from dilated_attention.kernels import online

    _, tokens, heads, head_dim = out.shape
    stats = torch.empty((*lse.shape, 2), dtype=torch.float32, device=lse.device)
    unit, (strides,) = _strides(dout)
    rows = 32
    if lse.numel():
        with _device(out):
            online.backward_stats[(-(-lse.numel() // rows),)](
                out, lse, dout, None if dlse is None else dlse.contiguous(), stats, lse.numel(), tokens, heads, *strides,
                UNIT=unit, D=head_dim, DP=_padded(head_dim), BM=rows,
            )  # fmt: skip
    return stats


def _arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_bias: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    dout: Tensor | None = None,
) -> dict[str, Any]:
    """What the kernels share."""
    unit, strides = _strides(*(x for x in (q, k, v, dout) if x is not None))
    batch, tokens, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    return {
        "Q": q, "K": k, "V": v, "BIAS": key_bias if key_bias is None else key_bias.contiguous(),
        "SEED": seed if dropout_p else None, "threshold": round(dropout_p * 2**32), "keep_scale": 1 / (1 - dropout_p),
        "scale": scale, "B": batch, "N": tokens, "M": k.shape[1], "H": kv_heads, "G": heads // kv_heads,
        **{f"{x}s{axis}": s for x, three in zip("qkvd", strides, strict=False) for axis, s in zip("bnh", three, strict=True)},
        "UNIT": unit, "CAUSAL": is_causal, "D": head_dim, "DP": _padded(head_dim), "PRECISION": _precision(q.dtype),
    }  # fmt: skip


def _strides(*tensors: Tensor) -> tuple[int, list[list[int]]]:
    """Strides of batch, token and head in units of their greatest common divisor with 16, and that unit."""
    strides = [[x.stride(i) if x.shape[i] > 1 else 0 for i in range(3)] for x in tensors]
    unit = math.gcd(16, *(stride for three in strides for stride in three))
    return unit, [[stride // unit for stride in three] for three in strides]


def _padded(head_dim: int) -> int:
    return max(16, 1 << (head_dim - 1).bit_length())


def _precision(dtype: torch.dtype) -> str:
    """tf32 only where PyTorch's own switch allows it for matrix products."""
    matmul = torch.backends.cuda.matmul
    allowed = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    return "tf32" if dtype == torch.float32 and allowed else "ieee"


def _device(x: Tensor) -> Any:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
