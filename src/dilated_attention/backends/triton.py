"""The Triton backend: each turn of a plan is one kernel launch over a device table of tiles (tiles.py).

Kernels continue from the running state where an earlier launch wrote a row, so nothing is gathered, padded or kept per
branch. Tables are made once per plan, kernel and device. A later call only launches, without a host synchronisation,
and may be captured in a CUDA graph.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dilated_attention.backends import tiles
from dilated_attention.backends.dropout import Dropout
from dilated_attention.backends.facts import Facts
from dilated_attention.backends.tiles import Layouts
from dilated_attention.cache import plan_cache
from dilated_attention.kernels.configurations import ARCHITECTURES, FUSED, Kernel, Shape, side_of
from dilated_attention.plan import Plan

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
MAX_TOKENS = 2**30
WIDE_FROM = 2**31
"""Elements, that a streamed tile reaches over, whose offsets take 64 bits."""


@dataclass(frozen=True)
class Rule:
    """When `auto` takes this backend on a GPU.

    Attributes:
        asks: what a call asks for beyond q, k, v and causality, as in `Facts.needs`; "" for nothing.
        native: what such a call costs on the native backend there, counted and not timed.
        least: score entries times head_dim from which on this backend is the faster one, by architecture
            (kernels/configurations.py); None where being right is enough, since native is no rival.
    """

    asks: str
    native: str
    least: Mapping[str, int] | None = None


RULES = (
    Rule("a block layout", "gathers keys in hundreds of calls: of 10 % random blocks of 128, 32,768 tokens, 16 heads of"
         " 128, 540 calls and 6.7 GB"),
    Rule("dropout_p", "multiplies in thousands of chunks"),
    Rule("key_padding_mask", "holds all scores of a branch in memory"),
    Rule("", "makes a call a branch and merges", least={}),
)  # fmt: skip
"""The first whose `asks` the call has counts."""

RIGHT: frozenset[str] = frozenset()
"""Architectures on which every row of `bench gpu --part 1` in results/ was right. Empty: none has run yet. Such a file
also has what to enter in `least` above, from part 3."""


def refusal(facts: Facts) -> str | None:
    """Why this backend cannot serve a call, and what would serve; None if it can."""
    if (why := _refusal_of(facts.device)) is not None:
        return why
    if facts.dtype not in DTYPES:
        return f"the kernels have no {facts.dtype}; use float16, bfloat16 or float32"
    if facts.head_dim > MAX_HEAD_DIM:
        return f"the kernels need a head_dim of at most {MAX_HEAD_DIM}; got {facts.head_dim}"
    if facts.seq_len > MAX_TOKENS:
        return f"the tables address {MAX_TOKENS} tokens; got {facts.seq_len}"
    return None


@torch.compiler.assume_constant_result
def _refusal_of(device: torch.device) -> str | None:
    """Why this backend cannot serve a device; torch.compile asks once, and need not trace it."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; pip install triton"
    if device.type == "cpu" and not _interpreted():
        return "Triton needs a GPU"
    if device.type not in ("cpu", "cuda"):
        return f"Triton serves CUDA and ROCm devices, not {device.type}"
    if device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} has compute capability below 8.0"
    return None


def on_request(facts: Facts) -> str | None:
    """Why `auto` passes this backend by for a call that it could serve; None if it does not."""
    if facts.device.type != "cuda":
        return "only on request; a GPU is what it is for"
    here = architecture(facts.device)
    (rule, *_) = [rule for rule in RULES if not rule.asks or rule.asks in facts.needs]
    if here not in RIGHT:
        how = "`dilated-attention info --check` tells in a minute; then ask for it by name"
        return f"not shown right on {here} yet: {how}. For this call native {rule.native}"
    if rule.least is None:
        return None
    least = rule.least.get(here)
    if least is None:
        return f"not measured against native on {here} yet; only on request"
    if facts.work < least:
        return f"native is faster below {least:.3g} score entries times head_dim; got {facts.work:.3g}"
    return None


def _interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter (TRITON_INTERPRET=1), on CPU tensors: for tests."""
    import triton

    return bool(triton.knobs.runtime.interpret)


@torch.compiler.assume_constant_result
def architecture(device: torch.device) -> str:
    """The row of kernels/configurations.py that serves a device."""
    return _architecture(device)


@cache
def _architecture(device: torch.device) -> str:
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip:
        return "gfx942"
    major, minor = torch.cuda.get_device_capability(device)
    name = f"sm_{major}{minor}"
    return name if name in ARCHITECTURES else "sm_100" if major == 10 else "sm_86"


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    is_causal: bool,
    scale: float,
    key_bias: Tensor | None = None,
    layouts: Layouts | None = None,
    dropout: Dropout | None = None,
    state: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse of a plan.

    Args:
        q, k, v: (B, N, H, D), (B, M, Hkv, D), (B, M, Hkv, D), any strides.
        key_bias: (B, M); what is not 0 hides a key.
        layouts: for each number of rows that a group's segments have, the block layout inside such a segment, on q's
            device; causal if the call is.
        state: a running (out, lse), contiguous, continued in place by the groups that are not `first`.

    Returns:
        out (B, N, H, D) in q's dtype and lse (B, N, H), float32, natural logarithm, both contiguous; 0 and -inf in rows
        that see nothing.
    """
    from dilated_attention.kernels import strided

    out, lse = state or _outputs(q, plan)
    q, k, v = _dense_rows(q), _dense_rows(k), _dense_rows(v)
    masked = dropout is not None or key_bias is not None
    held = _launches("forward", q, plan, is_causal, layouts, masked)
    is_plain = not masked and layouts is None
    seen = _seen(q, k, v, out, lse, scale) if is_plain else ()
    bound = held.bound.get(seen) if is_plain else None
    if bound is None:
        arguments = _arguments(q, k, v, None, key_bias, scale, dropout)
        row = _row(arguments)
        for name in ("Q", "K", "V"):
            del arguments[name]
        bound = tuple(
            Bound(
                strided.forward,
                launch.programs(q, k),
                arguments | launch.lists(layouts, q) | launch.constants(key_bias, launch.table.chain, row),
            )
            for launch in held.launches
        )
        if is_plain:
            held.bound[seen] = bound
    for launch in bound:
        launch(out, lse, q, k, v)
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
    layouts: Layouts | None = None,
    dropout: Dropout | None = None,
    state: tuple[Tensor, Tensor, Tensor] | None = None,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of a plan from the merged out and lse. Other arguments as for `forward`.

    Args:
        dout, dlse: the gradients of out (B, N, H, D) and lse (B, N, H), the latter float32 or None.
        state: running (dq, dk, dv), float32, contiguous, added to in place.
        deterministic: if not, one kernel of five products instead of two of four and three; it adds up dq by atomic
            additions in any order, so that the last bits differ from call to call. No caller asks for it before a GPU
            has shown it faster; see results/README.md.
    """
    from dilated_attention.kernels import strided

    masked = dropout is not None or key_bias is not None

    def launches(kernel: Kernel) -> tuple[Launch, ...]:
        return _launches(kernel, q, plan, is_causal, layouts, masked).launches

    keys = launches("dkdv" if deterministic else "dqdkdv")
    queries = launches("dq") if deterministic else ()
    dout = _dense_rows(dout)
    arguments = _arguments(q, k, v, dout, key_bias, scale, dropout)
    row = _row(arguments)
    arguments["STATS"] = _stats(out, lse, dout, dlse)
    add = state is not None or len(keys) > 1, state is not None or len(queries) > 1 or not deterministic
    dq, dk, dv = state or (
        _gradient(q, add[1], plan.covered),
        _gradient(k, add[0], plan.covered and plan.square),
        _gradient(v, add[0], plan.covered and plan.square),
    )
    for launch in keys:
        run(
            strided.backward_dkdv,
            launch.programs(k, k),
            DQ=None if deterministic else dq,
            DK=dk,
            DV=dv,
            **arguments,
            **launch.lists(layouts, q),
            **launch.constants(key_bias, add[0], row),
        )
    for launch in queries:
        run(
            strided.backward_dq,
            launch.programs(q, k),
            DQ=dq,
            **arguments,
            **launch.lists(layouts, q),
            **launch.constants(key_bias, add[1], row),
        )
    return (dq, dk, dv) if state else (dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype))


# ---- launches


def run(kernel: Any, programs: int, **arguments: Any) -> Any:
    """Launch a kernel; returns what was compiled for it. With `again`, all that this backend does on a device but for
    filling buffers."""
    with _on(arguments["LSE" if "LSE" in arguments else "STATS"].device):
        return kernel[(programs,)](**arguments)


def again(compiled: Any, programs: int, arguments: list[Any], device: torch.device) -> None:
    """Launch what `run` returned with all arguments in order: without finding out anew what they were compiled as."""
    with _on(device):
        compiled[(programs, 1, 1)](*arguments)


@dataclass(slots=True)
class Bound:
    """A launch of `forward` that fits tensors of one kind: all but out, lse, q, k and v is settled.

    Attributes:
        settled: the other arguments by name; compiled: from the first launch on, what it was compiled to.
        arguments: the other arguments in order, from then on.
    """

    kernel: Any
    programs: int
    settled: dict[str, Any]
    compiled: Any = None
    arguments: list[Any] = field(default_factory=list)

    def __call__(self, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        if self.compiled is None:
            self.compiled = run(self.kernel, self.programs, Q=q, K=k, V=v, OUT=out, LSE=lse, **self.settled)
            if self.compiled is not None:  # Triton's interpreter compiles nothing
                self.arguments = [self.settled[name] for name in self.kernel.arg_names[5:]]
        else:
            again(self.compiled, self.programs, [q, k, v, out, lse, *self.arguments], q.device)


def _seen(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float) -> tuple[Any, ...]:
    """Of the tensors and the scale, what a launch of `forward` was bound for; out and lse are contiguous."""
    aligned = (q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr() | lse.data_ptr()) % 16 == 0
    return q.shape, k.shape, q.stride(), k.stride(), v.stride(), q.dtype, scale, aligned, _precision(q.dtype)


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: its tiles and their shape."""

    kernel: Kernel
    table: tiles.Table
    shape: Shape

    def programs(self, heads: Tensor, kv_heads: Tensor) -> int:
        """One per tile, sample and head of `heads`; tiles name the heads of `kv_heads`."""
        return len(self.table.lines) * heads.shape[0] * (heads.shape[2] // kv_heads.shape[2])

    def constants(self, key_bias: Tensor | None, chain: bool, row: int) -> dict[str, Any]:
        """The kernel's arguments that the table settles; `chain` as in kernels/strided.py, `row` as from
        `_row`."""
        shape, table = self.shape, self.table
        if side_of(self.kernel) == "queries":
            sizes = {"BM": shape.own, "BN": shape.loop, "WIDE": table.reach * row >= WIDE_FROM}
        else:
            sizes = {"BM": shape.loop, "BN": shape.own}
        return sizes | {
            "TILES": table.lines, "CAUSAL": table.is_causal, "SPANS": table.spans,
            "EDGE": table.edge if key_bias is None or side_of(self.kernel) == "keys" else -1,
            "EVEN": table.even, "CHAIN": chain, **shape.options(architecture(table.lines.device)),
        }  # fmt: skip

    def lists(self, layouts: Layouts | None, q: Tensor) -> dict[str, Any]:
        """The kernel's arguments that the layout settles."""
        if layouts is None or self.table.count is None:
            return {"INDPTR": None, "INDICES": None, "lsb": 0, "lsh": 0, "LH": 1, "QB": 1, "KB": 1}
        layout = layouts[self.table.count]
        lists = layout if side_of(self.kernel) == "queries" else layout.transposed
        lines = lists.indptr.shape[2]
        return {
            "INDPTR": lists.indptr, "INDICES": lists.indices,
            "lsb": layout.num_heads * lines if layout.batch_size > 1 else 0, "lsh": lines,
            "LH": q.shape[2] // layout.num_heads, "QB": layout.q_block, "KB": layout.k_block,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Launches:
    """What the cache holds. It keeps the plan alive, whose id is in the key.

    Attributes:
        bound: the launches bound to tensors of one kind each, by what `_seen` says of them.
    """

    plan: Plan
    launches: tuple[Launch, ...]
    bound: dict[tuple[Any, ...], tuple[Bound, ...]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(launch.table.lines.nbytes + 256 for launch in self.launches)


def _launches(
    kernel: Kernel, q: Tensor, plan: Plan, is_causal: bool, layouts: Layouts | None, masked: bool
) -> _Launches:
    if not plan.groups or not q.numel():
        return _Launches(plan, ())
    blocks = None if layouts is None else tuple((n, *x.block_size, x.is_causal) for n, x in layouts.items())
    shape = ARCHITECTURES[architecture(q.device)].shape(
        kernel, q.element_size(), q.shape[-1], masked, has_lists=layouts is not None
    )

    def make() -> _Launches:
        side = side_of(kernel)
        cut = shape.cut(*tiles.longest(plan, side, layouts))
        tables = tiles.tables(plan, side, is_causal, cut, layouts, q.device)
        return _Launches(plan, tuple(Launch(kernel, table, cut) for table in tables))

    key = "triton", id(plan), blocks, kernel, is_causal, shape, q.device
    return plan_cache.get(key, make)


# ---- arguments


def _outputs(q: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    return (out, lse) if plan.covered else (out.zero_(), lse.fill_(-math.inf))


def _gradient(x: Tensor, add: bool, covered: bool) -> Tensor:
    """A buffer for the gradient of x: float32 zeros if launches add up, else one launch writes the rows it covers."""
    if add or not covered:
        return torch.zeros(x.shape, dtype=torch.float32 if add else x.dtype, device=x.device)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _stats(out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """lse and rowsum(dout · out) - dlse as the kernels read them: (B, N, H, 2)."""
    from dilated_attention.kernels import online

    _, tokens, heads, head_dim = out.shape
    out, lse = out.contiguous(), lse.contiguous()
    stats = torch.empty((*lse.shape, 2), dtype=torch.float32, device=lse.device)
    unit, (strides,) = _strides(dout)
    rows = 32
    if lse.numel():
        run(
            online.backward_stats, -(-lse.numel() // rows), OUT=out, LSE=lse, DOUT=dout,
            DLSE=None if dlse is None else dlse.contiguous(), STATS=stats, size=lse.numel(), N=tokens, H=heads,
            sb=strides[0], sn=strides[1], sh=strides[2], UNIT=unit, D=head_dim, DP=_padded(head_dim), BM=rows, **FUSED,
        )  # fmt: skip
    return stats


def _arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None,
    key_bias: Tensor | None,
    scale: float,
    dropout: Dropout | None,
) -> dict[str, Any]:
    """The kernels' arguments that the call settles."""
    batch, tokens, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    named = {"q": _dense_rows(q), "k": _dense_rows(k), "v": _dense_rows(v)}
    arguments: dict[str, Any] = {name.upper(): x for name, x in named.items()}
    if dout is not None:
        named["d"] = arguments["DOUT"] = dout
    unit, strides = _strides(*named.values())
    for x, three in zip(named, strides, strict=True):
        arguments |= {f"{x}sb": three[0], f"{x}sn": three[1], f"{x}sh": three[2]}
    return arguments | {
        "BIAS": None if key_bias is None else key_bias.contiguous(), "scale": scale, **_words(dropout),
        "B": batch, "N": tokens, "M": k.shape[1], "H": kv_heads, "G": heads // kv_heads,
        "UNIT": unit, "D": head_dim, "DP": _padded(head_dim), "PRECISION": _precision(q.dtype),
    }  # fmt: skip


def _row(arguments: dict[str, Any]) -> int:
    """The most elements from a key to the next in what the loops of forward and dq read."""
    return max(arguments["UNIT"] * arguments["ksn"], arguments["UNIT"] * arguments["vsn"], arguments["wsn"])


def _words(dropout: Dropout | None) -> dict[str, Any]:
    if dropout is None:
        return {"WQ": None, "WK": None, "threshold": 0, "keep_scale": 1.0, "wsn": 0, "wsh": 0}
    keys = dropout.keys
    return {
        "WQ": dropout.queries.contiguous(), "WK": keys, "threshold": dropout.threshold,
        "keep_scale": 1 / (1 - dropout.probability),
        "wsn": keys.stride(0), "wsh": keys.stride(1) if keys.shape[1] > 1 else 0,
    }  # fmt: skip


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> tuple[int, list[list[int]]]:
    """Strides of sample, token and head in units of their greatest common divisor with 16, and that unit."""
    strides = [[x.stride(i) if x.shape[i] > 1 else 0 for i in range(3)] for x in tensors]
    unit = math.gcd(16, *(stride for three in strides for stride in three))
    return unit, [[stride // unit for stride in three] for three in strides]


def _padded(head_dim: int) -> int:
    return max(16, 1 << (head_dim - 1).bit_length())


def _precision(dtype: torch.dtype) -> str:
    """tf32 only where PyTorch's own switch allows it in matrix products; ROCm's Triton has it on some devices only."""
    if torch.version.hip:
        return "ieee"
    matmul = torch.backends.cuda.matmul
    allowed = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    return "tf32" if dtype == torch.float32 and allowed else "ieee"


def _on(device: torch.device) -> Any:
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


_NOTHING = nullcontext()
