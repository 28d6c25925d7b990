"""`bench gpu`: the Triton kernels on a GPU: right, fast beside dense kernels, small, and where they overtake native.

Steps do not stop at a failure: what a step raises becomes its row's refusal, and the steps after it still run. Nor does
a comparison stop at a contender that does not run: its rows are refused, and the others are measured. The dense
kernels, cuDNN's and FlashAttention's, compute about as many score entries in one long sequence as the pattern has in
all; times are compared per score entry.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dilated_attention.backends import flash, native, triton
from dilated_attention.functional import attention, dilated_attention
from dilated_attention.kernels.configurations import ARCHITECTURES, Kernel, Shape
from dilated_attention.layout import BlockLayout
from dilated_attention.patterns import Dilated
from dilated_attention.plan import Plan, Rows, StridedGroup
from dilated_attention_bench import measure
from dilated_attention_bench.cases import Case, Contender, contender
from dilated_attention_bench.measure import Rounds, Spread
from dilated_attention_bench.profile import profile
from dilated_attention_bench.results import Row, failed
from dilated_attention_bench.suites import Step, peak, rates

PAPER = Case(
    method="dilated", backend="triton", seq_len=65536, heads=16, head_dim=128, dtype="bfloat16",
    segment_lengths=(2048, 4096, 8192, 16384), dilation_rates=(1, 2, 4, 8),
)  # fmt: skip
SMALL = replace(PAPER, seq_len=4096, heads=8, head_dim=64, segment_lengths=(1024, 2048, 4096), dilation_rates=(1, 2, 4))
RATES = {("forward", 128, False): 0.58, ("forward", 64, False): 0.46, ("forward", 128, True): 0.52,
         ("forward", 64, True): 0.42, ("backward", 128, False): 0.42, ("backward", 64, False): 0.38}  # fmt: skip
"""Bars: useful work over the matrix rate of the same rounds, by phase, head_dim and causality."""
SPEED_UPS = {0.10: 7.0, 0.05: 13.0, 0.02: 25.0}
"""Bars: block-sparse forward over the fastest dense kernel at 32,768 tokens, by density."""
CANDIDATES: dict[Kernel, list[tuple[int, int, int, int]]] = {
    "forward": [(128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 4, 3), (128, 64, 8, 4), (64, 128, 4, 3),
                (64, 64, 4, 3), (64, 64, 8, 2), (128, 32, 8, 3)],
    "dq": [(128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 2), (64, 64, 4, 3), (64, 64, 8, 2),
           (64, 32, 8, 2)],
    "dkdv": [(128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 3), (64, 128, 8, 2), (64, 64, 4, 3), (64, 64, 8, 2),
             (64, 32, 4, 3), (64, 16, 8, 3)],
    "dqdkdv": [(128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 2), (64, 64, 8, 2), (64, 64, 8, 3), (64, 64, 4, 2),
               (64, 32, 8, 3), (32, 32, 8, 2)],
}  # fmt: skip
"""Tiles to try: own, loop, warps, stages."""
ONE_KERNEL = "triton, one backward kernel"
DENSE = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def steps(device: torch.device, quick: bool) -> list[Step]:
    """ValueError without a GPU."""
    if device.type != "cuda":
        raise ValueError("the gpu suite needs a GPU: --device cuda")
    names = ["triton", "native"] + ["flash"] * (flash.version(torch.cuda.get_device_capability(device)) is not None)
    found = [
        _step(f"correctness of {name}, {check.name}", partial(correctness, check, name, device), check.parameters(name))
        for name in (*names, ONE_KERNEL)
        for check in checks(777, head_dims=HEAD_DIMS if name != ONE_KERNEL else (64, 128))
        if name != "flash" or not check.needs
    ]
    found += [
        _step("rows from elsewhere", partial(elsewhere, device), {"seq_len": 48, "heads": 4, "backend": "triton"}),
        _step("compiled, and as a CUDA graph", partial(captured, SMALL, device), SMALL.parameters),
        _step("beyond 2^31 elements", partial(_far_rows, device), PAPER.parameters),
        _step("1,048,576 tokens against native", partial(_million, device), PAPER.parameters),
    ]
    for head_dim in (128, 64):
        for is_causal in (False, True):
            for seq_len in (65536,) if quick else (65536, 262144, 1048576):
                case = replace(PAPER, seq_len=seq_len, head_dim=head_dim, is_causal=is_causal)
                label = f"{seq_len:,} tokens, head_dim {head_dim}" + ", causal" * is_causal
                run = partial(speed, case, [*names, ONE_KERNEL], device, 5.0 if quick else 20.0)
                found.append(_step(label, run, case.parameters))
    for density in SPEED_UPS:
        for case in _sparse(density):
            for flex in (False, True):
                label = f"{case.seq_len:,} tokens, {density:.0%} of blocks" + ", flex" * flex
                run = partial(_block_sparse, case, device, 5.0 if quick else 15.0, flex=flex)
                found.append(_step(label, run, case.parameters))
    found.append(_step("4,096 tokens", partial(_small, device, 5.0), SMALL.parameters))
    found.append(_step("where triton overtakes native", partial(threshold, device), SMALL.parameters))
    long = replace(PAPER, seq_len=1 << 20, head_dim=64)
    for step in (peak(long, device, bar=1.10), peak(long, device, backward=True)):
        label = step.label + (", with the backward" if step.needs[0][1] else "")
        found.append(replace(_step(label, step.measure, long.parameters), needs=step.needs))
    for case in (SMALL, PAPER, *(_sparse(density)[1] for density in SPEED_UPS)):
        label = f"launches at {case.seq_len:,} tokens"
        label += "" if case.density is None else f", {case.density:.0%} of blocks"
        found.append(_step(label, partial(_launches, case, device), case.parameters))
    for head_dim in (64, 128, 256):
        for kernel in CANDIDATES:
            case = replace(PAPER, head_dim=head_dim)
            label = f"tiles of {kernel}, head_dim {head_dim}"
            found.append(_step(label, partial(tile_shapes, kernel, case, device, 2.0), case.parameters))
    # Last: a barrier that is wrong would hang the GPU.
    if torch.cuda.get_device_capability(device) == (9, 0):
        for head_dim in (128, 64):
            case = replace(PAPER, head_dim=head_dim)
            run = partial(gluon, case, device, 5.0)
            found.append(_step(f"the candidate in Gluon, head_dim {head_dim}", run, case.parameters))
    return found


def _failures() -> tuple[type[Exception], ...]:
    """What a kernel that does not compile or run, or a call that does not fit, may raise: here or in what it calls."""
    from triton.errors import TritonError

    # PyTorch's errors of memory, of CUDA and of its compiler are RuntimeErrors.
    return RuntimeError, ValueError, TypeError, AssertionError, LookupError, TritonError


def _why(error: Exception) -> str:
    first, *_ = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first}"


def _step(label: str, run: Callable[[], Iterator[Row]], parameters: Mapping[str, Any]) -> Step:
    """A step whose failure is a row, and which leaves no memory taken: the next ones, or their processes, need it."""

    def guarded() -> Iterator[Row]:
        try:
            yield from run()
        except _failures() as error:
            yield Row(failed(label), parameters, None, "", refused=_why(error))
        gc.collect()
        torch.cuda.empty_cache()

    return Step(label, guarded)


def backend_of(name: str) -> str:
    return "triton" if name == ONE_KERNEL else name


@contextmanager
def chosen(name: str) -> Iterator[None]:
    """Calls of the Triton backend run `ONE_KERNEL` if that is the name: no argument of theirs asks for it yet."""
    plain = triton.backward
    if name == ONE_KERNEL:
        triton.backward = partial(plain, deterministic=False)
    try:
        yield
    finally:
        triton.backward = plain


def _contender(name: str, case: Case, device: torch.device) -> Contender:
    """Forward and backward of a case by a backend."""
    plain = replace(case, backend=backend_of(name)).contender(device, backward=True)

    def work() -> Iterator[str]:
        with chosen(name):
            yield from plain()

    return work


# ---- correctness


@dataclass(frozen=True)
class Check:
    """Calls that differ from the oracle by rounding only, on out, lse, dq, dk and dv.

    Attributes:
        needs: whether the call asks for more than causality, which FlashAttention has not.
        pattern, options: of `attention`, for the sequence length.
        views: q, k and v are parts of one tensor whose rows start one element off and have gaps.
        apart: added to q and taken from k, so that scores lie far below zero.
    """

    name: str
    seq_len: int
    pattern: Callable[[int], Dilated | BlockLayout | Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    head_dims: tuple[int, ...] = (64,)
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
    heads: int = 4
    kv_heads: int = 2
    batch: int = 2
    needs: bool = False
    views: bool = False
    apart: float = 0.0

    def parameters(self, backend: str) -> dict[str, Any]:
        return {"seq_len": self.seq_len, "heads": self.heads, "kv_heads": self.kv_heads, "backend": backend}


BARS = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


HEAD_DIMS = (16, 24, 32, 48, 64, 80, 96, 128, 192, 256)


def checks(seq_len: int, head_dims: tuple[int, ...] = HEAD_DIMS) -> list[Check]:
    """Every head_dim, type and feature, at a length that nothing divides."""

    def branches(n: int) -> Dilated:
        return Dilated((n // 3, n), (1, 3))

    padded = torch.arange(seq_len) % 3 == 0
    padded[: seq_len // 3 + 1] = True  # the first segment: rows that see nothing
    return [
        Check("every head_dim", seq_len, branches, head_dims=head_dims),
        Check("every head_dim, causal", seq_len, branches, {"is_causal": True}, head_dims=head_dims),
        Check("nested branches", seq_len, lambda n: Dilated((n // 4, n // 2, n), (1, 2, 4)), kv_heads=4),
        Check("rows in no branch", seq_len, lambda n: Dilated((n // 2, n), (2, 6)), {"is_causal": True}),
        Check("one token", 1, lambda n: Dilated((4,), (1,))),
        Check("head groups", seq_len, lambda n: Dilated((n // 3, n), (1, 3), head_groups=True)),
        Check("views and a scale", seq_len, branches, {"scale": 0.3, "is_causal": True}, views=True),
        Check("scores far below zero", seq_len, branches, {"is_causal": True}, dtypes=(torch.float16, torch.bfloat16),
              apart=5.0),
        Check("phantoms", seq_len, lambda n: Dilated((n // 3, n), (2, 5), "head_block"), {"compat": "torchscale"}),
        Check("lengths", seq_len, branches, {"lengths": [seq_len, seq_len // 2]}),
        Check("packed", seq_len, branches, {"cu_seqlens": torch.tensor([0, seq_len // 2, seq_len // 2 + 1, seq_len])},
              batch=1),
        Check("hidden keys", seq_len, branches, {"key_padding_mask": padded.expand(2, -1)}, needs=True),
        Check("dropout", seq_len, branches, {"dropout_p": 0.2}, needs=True),
        Check("blocks", seq_len, lambda n: BlockLayout.random(n, 0.4, 0, 64), needs=True),
        Check("blocks of each head", seq_len, lambda n: _layout_of_heads(n, 4), needs=True),
        Check("causal blocks", seq_len, lambda n: BlockLayout.random(n, 0.4, 0, (64, 32)), {"is_causal": True},
              needs=True),
        Check("blocks inside dilation", seq_len, lambda n: branches(n) * (lambda m: BlockLayout.local(m, 64, 16)),
              {"is_causal": True}, needs=True),
    ]  # fmt: skip


def correctness(check: Check, backend: str, device: torch.device) -> Iterator[Row]:
    """The largest relative error of each dtype and head_dim, judged on the float64 oracle of the same inputs."""
    options = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in check.options.items()}
    name, backend = backend, backend_of(backend)
    for dtype in check.dtypes if backend != "flash" else check.dtypes[1:]:
        for head_dim in check.head_dims:
            if backend == "flash" and head_dim % 8:
                continue
            generator = torch.Generator(device).manual_seed(0)
            heads = check.heads, check.kv_heads, check.kv_heads
            shape = check.batch, check.seq_len, sum(heads), head_dim + check.views
            packed = torch.randn(shape, generator=generator, device=device).to(dtype)
            q, k, v = (x if check.views else x.contiguous() for x in packed[..., int(check.views) :].split(heads, 2))
            inputs = [q + check.apart, k - check.apart, v] if check.apart else [q, k, v]
            pattern = check.pattern(check.seq_len)
            with chosen(name):
                actual = _results(inputs, pattern, backend=backend, **options)
            expected = _results([x.double() for x in inputs], pattern, backend="reference", **options)
            yield _largest_error(check.name, check.parameters(name) | {"head_dim": head_dim}, actual, expected)


def _largest_error(
    name: str, parameters: Mapping[str, Any], actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> Row:
    errors = {key: relative_error(actual[key], expected[key]) for key in expected}
    worst, dtype = max(errors, key=errors.__getitem__), actual["out"].dtype
    parameters = {**parameters, "dtype": str(dtype)[len("torch.") :]}
    return Row(f"{name}: largest relative error", parameters, errors[worst], f"({worst})", bar=BARS[dtype])


def _layout_of_heads(seq_len: int, heads: int) -> BlockLayout:
    """Lists of their own for every query head, in which some rows see nothing."""
    blocks = -(-seq_len // 64)
    chosen = torch.rand(1, heads, blocks, blocks, generator=torch.Generator().manual_seed(0)) < 0.4
    chosen[:, 0, 0] = False
    return BlockLayout.from_mask(chosen, seq_len, 64)


def elsewhere(device: torch.device) -> Iterator[Row]:
    """A plan of context parallelism: a local branch, then keys that other ranks sent; judged on native in float64."""
    local = StridedGroup(*(Rows(0, 16, 3, 1, 16),) * 2, 0, 2, 1, first=True)
    received = StridedGroup(Rows(1, 24, 2, 2, 12), Rows(48, 70, 2, 1, 70), 0, 1, 1, diagonal=False)
    aligned = StridedGroup(Rows(0, 48, 1, 3, 16), Rows(190, 16, 1, 1, 16), 1, 1, 1, diagonal=True)
    plan = Plan(48, 2, (local, received, aligned), covered=True, square=False)
    generator = torch.Generator(device).manual_seed(0)
    normal = [
        torch.randn(2, tokens, heads, 64, generator=generator, device=device)
        for tokens, heads in ((48, 4), (206, 2), (206, 2), (48, 4))
    ]

    def results(backend: Any, inputs: list[Tensor]) -> dict[str, Tensor]:
        q, k, v, dout = inputs
        options = {"is_causal": True, "scale": 0.125}
        out, lse = backend.forward(q, k, v, plan, **options)
        gradients = backend.backward(dout, lse.cos(), q, k, v, out, lse, plan, **options)
        return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True))

    for dtype in BARS:
        inputs = [x.to(dtype) for x in normal]
        actual, expected = results(triton, inputs), results(native, [x.double() for x in inputs])
        parameters = {"seq_len": 48, "heads": 4, "kv_heads": 2, "head_dim": 64, "backend": "triton"}
        yield _largest_error("rows from elsewhere", parameters, actual, expected)


def _results(inputs: list[Tensor], pattern: Any, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)  # of dropout
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    if "compat" in options:
        branches = pattern.segment_lengths, pattern.dilation_rates
        out, lse = dilated_attention(q, k, v, *branches, offsets=pattern.offsets, return_lse=True, **options)
    else:
        out, lse = attention(q, k, v, pattern, return_lse=True, **options)
    wave = [torch.arange(x.numel(), device=x.device).view_as(x).cos().to(x.dtype) for x in (out, lse)]
    gradients = torch.autograd.grad((out, lse), (q, k, v), wave)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """In norm, over what is finite; infinite where the two are not finite in the same places."""
    finite = expected.isfinite()
    if not torch.equal(finite, actual.isfinite()):
        return math.inf
    difference = (actual.double() - expected)[finite].norm().item()
    return difference and difference / max(expected[finite].norm().item(), torch.finfo(expected.dtype).tiny)


def captured(case: Case, device: torch.device) -> Iterator[Row]:
    """The forward compiled, and replayed as a CUDA graph on other inputs: the same numbers as without."""
    call = case.prepare()
    with torch.no_grad():
        inputs, others = case.inputs(device)[0], case.inputs(device)[0]
        static = tuple(x.clone() for x in inputs)
        graph, out = graph_of(lambda: call(*static))
        for x, y in zip(static, others, strict=True):
            x.copy_(y)
        graph.replay()
        expected = call(*others).clone()
        found = {"a CUDA graph": out, "torch.compile": torch.compile(call, fullgraph=True)(*others)}
    for name, x in found.items():
        difference = (x.float() - expected.float()).abs().max().item()
        yield Row(f"{name}: largest difference from eager", case.parameters, difference, "", bar=0.0)


def graph_of(call: Callable[[], Tensor]) -> tuple[Any, Tensor]:
    """A CUDA graph of a call, and the tensor that each replay writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # compiles the kernels and makes the tables
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


def _far_rows(device: torch.device) -> Iterator[Row]:
    """The last segments of more than 2^31 elements, which see nothing else, against a call on them alone."""
    last = max(PAPER.segment_lengths)
    far_rows = replace(PAPER, seq_len=2**31 // (PAPER.heads * PAPER.head_dim) + last)
    yield from last_rows(far_rows, last, device)


def last_rows(case: Case, last: int, device: torch.device) -> Iterator[Row]:
    """The `last` tokens, which form whole segments, computed among the others and alone: the same numbers."""
    inputs = [*case.inputs(device)[0], case.inputs(device)[0][0]]
    elements = f"{case.seq_len * case.heads * case.head_dim / 2**31:.2f} x 2^31 elements"
    few = [x[:, -last:].clone() for x in inputs]
    found = [x[:, -last:].clone() for x in _trained(case, *inputs)]
    for name, x, y in zip(("out", "dq", "dk", "dv"), found, _trained(case, *few), strict=True):
        difference = (x.float() - y.float()).abs().max().item()
        yield Row(f"{name}: last rows of {elements}: largest difference", case.parameters, difference, "", bar=0.0)


def _trained(case: Case, *inputs: Tensor) -> tuple[Tensor, ...]:
    """out, dq, dk and dv of the case's call on q, k, v and dout."""
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    out = case.prepare()(q, k, v)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3])


def _million(device: torch.device) -> Iterator[Row]:
    case = replace(PAPER, seq_len=1 << 20, head_dim=64)
    inputs = case.inputs(device)[0]
    found = [
        _trained(replace(case, backend=name), *inputs, torch.ones_like(inputs[0])) for name in ("triton", "native")
    ]
    for name, *pair in zip(("out", "dq", "dk", "dv"), *found, strict=True):
        parts = zip(*(x.split(65536, 1) for x in pair), strict=True)
        error = max(relative_error(x.double(), y.double()) for x, y in parts)
        yield Row(f"{name}: relative difference from native", case.parameters, error, "", bar=1e-2)


# ---- speed


def dense(case: Case, kernel: SDPBackend, device: torch.device, *, backward: bool = False) -> Contender:
    """One dense call of PyTorch's with a given kernel, on `(batch, heads, seq, head_dim)`."""
    rows_in_place = replace(case, method="dense calls", segment_lengths=(case.seq_len,), dilation_rates=(1,))
    plain = rows_in_place.contender(device, backward=backward)

    def work() -> Iterator[str]:
        with sdpa_kernel(kernel):
            yield from plain()

    return work


Makers = Mapping[str, Callable[[], Contender]]


def _dense_makers(case: Case, device: torch.device, *, backward: bool) -> Makers:
    return {f"dense {name}": partial(dense, case, kernel, device, backward=backward) for name, kernel in DENSE.items()}


def serving(makers: Makers) -> tuple[dict[str, Contender], dict[str, str]]:
    """The contenders that run, each tried once; and why the others do not."""
    found, refused = {}, {}
    for name, make in makers.items():
        try:
            contender = make()
            list(contender())
        except _failures() as error:
            refused[name] = _why(error)
        else:
            found[name] = contender
    return found, refused


def _equal_work(case: Case) -> Case:
    """One dense sequence with about as many score entries as a dilated case."""
    entries = case.flops // (4 * case.head_dim * case.heads * case.batch)
    length = math.isqrt(entries * (2 if case.is_causal else 1))
    return replace(case, method="dense", backend="auto", seq_len=max(128, length // 128 * 128))


def backward_alone(rounds: Rounds, name: str) -> Spread:
    pairs = zip(rounds.seconds[name, "forward"], rounds.seconds[name, "forward+backward"], strict=True)
    return Spread.of([both - forward for forward, both in pairs])


def speed(case: Case, names: Sequence[str], device: torch.device, budget: float) -> Iterator[Row]:
    """Rates of every backend, forward and backward, and of dense kernels of equal work, in the same rounds."""
    even = _equal_work(case)
    makers = {name: partial(_contender, name, case, device) for name in names}
    contenders, refused = serving({**makers, **_dense_makers(even, device, backward=True)})
    rivals = [name for name in contenders if name not in names]
    rounds = measure.interleave(contenders, seconds=budget, device=device, dtype=getattr(torch, case.dtype))
    matrix = rounds.matmul_gflops
    entry: dict[tuple[str, str], float] = {}  # seconds per score entry, times a constant
    for name in (*contenders, *refused):
        flops = even.flops if name.startswith("dense ") else case.flops
        for phase, factor in (("forward", 1.0), ("backward", 2.5))[name == ONE_KERNEL :]:
            limit = RATES.get((phase, case.head_dim, case.is_causal)) if name == "triton" else None
            title, bar = (
                f"{phase}: {name}, matrix rate over the rate of useful work",
                None if limit is None else 1 / limit,
            )
            if name in refused:
                yield Row(title, case.parameters, None, "x", bar=bar, refused=refused[name])
                continue
            spread = rounds.spread(name) if phase == "forward" else backward_alone(rounds, name)
            entry[name, phase] = spread.median / flops
            ratio = spread.scaled(matrix * 1e9 / (factor * flops))
            useful = {name: factor * flops / spread.median / 1e9, measure.MATMUL: matrix}
            yield Row.of(title, case.parameters, ratio, bar=bar, times={name: spread}, rates=useful)
    for phase, bar in (("forward", 1.15), ("backward", None)):
        title = f"{phase}: time per score entry over the best dense kernel's"
        if "triton" in contenders and rivals:
            best = min(rivals, key=lambda name: entry[name, phase])
            yield Row(title, case.parameters, entry["triton", phase] / entry[best, phase], f"x {best}", bar=bar)
        else:
            yield Row(title, case.parameters, None, "x", bar=bar, refused=_reasons(refused))


def gluon(case: Case, device: torch.device, budget: float) -> Iterator[Row]:
    """The forward of hopper.py: how far from triton's numbers, then its time over triton's in the same rounds."""
    from dilated_attention_bench import hopper

    q, k, v = case.inputs(device)[0]
    plan, scale = case.plan, case.head_dim**-0.5
    calls: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "gluon": hopper.prepare(q, k, v, plan, scale),
        "triton": partial(triton.forward, q, k, v, plan, is_causal=False, scale=scale),
    }
    for name, x, y in zip(("out", "lse"), *(call() for call in calls.values()), strict=True):
        title = f"{name}: relative difference of the candidate in Gluon from triton"
        yield Row(title, case.parameters, relative_error(x.double(), y.double()), "", bar=1e-2)
    contenders = {name: contender(call) for name, call in calls.items()}
    rounds = measure.interleave(contenders, seconds=budget, device=device, dtype=getattr(torch, case.dtype))
    ratio, useful = rounds.ratio("gluon", "triton"), rates(rounds, "forward", dict.fromkeys(calls, case.flops))
    yield Row.of("forward: the candidate in Gluon over triton", case.parameters, ratio, rates=useful)


def _reasons(refused: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in refused.items())


def _sparse(density: float) -> list[Case]:
    base = replace(PAPER, method="block-sparse", blocks="random", density=density)
    return [replace(base, seq_len=32768), replace(base, seq_len=4096, heads=8, head_dim=64, block_size=64)]


def _block_sparse(case: Case, device: torch.device, budget: float, *, flex: bool) -> Iterator[Row]:
    """Against FlexAttention with the same blocks, or against dense kernels over the whole sequence."""
    ours = {"triton": partial(case.contender, device)}
    if flex:
        rival = replace(case, method="flex", backend="auto")
        rivals: Makers = {"flex": partial(rival.contender, device)}
        work = {"triton": case.flops, "flex": case.flops}
        yield from against("compiled FlexAttention", case, ours, rivals, device, budget, {"triton": 1.0}, work)
        return
    assert case.density is not None
    full = replace(case, method="dense", backend="auto")
    rivals = _dense_makers(full, device, backward=False)
    bar = 1 / SPEED_UPS[case.density] if case.seq_len == 32768 else 1.0
    work = {"triton": case.flops} | dict.fromkeys(rivals, full.flops)
    yield from against("the fastest dense kernel", case, ours, rivals, device, budget, {"triton": bar}, work)


def _small(device: torch.device, budget: float) -> Iterator[Row]:
    """A short sequence, where the calls on the host count: eager, and as a CUDA graph."""

    def replayed() -> Contender:
        inputs, call = SMALL.inputs(device)[0], SMALL.prepare()
        with torch.no_grad():
            graph, _ = graph_of(lambda: call(*inputs))

        def replay() -> Iterator[str]:
            graph.replay()
            yield "forward"

        return replay

    ours: Makers = {name: partial(replace(SMALL, backend=name).contender, device) for name in ("triton", "native")}
    full = replace(SMALL, method="dense", backend="auto")
    rivals = _dense_makers(full, device, backward=False)
    work = dict.fromkeys(("triton", "native", "triton, CUDA graph"), SMALL.flops) | dict.fromkeys(rivals, full.flops)
    yield from against(
        "the fastest dense kernel", SMALL, {**ours, "triton, CUDA graph": replayed}, rivals, device, budget,
        {"triton": 1.0}, work, most=200,
    )  # fmt: skip
    layers = 20
    yield from against(
        f"the fastest dense kernel, {layers} calls in a row", SMALL,
        {name: partial(_in_a_row, make, layers) for name, make in ours.items()},
        {name: partial(_in_a_row, make, layers) for name, make in rivals.items()},
        device, budget, {}, {name: layers * flops for name, flops in work.items()},
    )  # fmt: skip


def _in_a_row(make: Callable[[], Contender], times: int) -> Contender:
    """So many calls before the clock looks, as the layers of a model make them: the host may run ahead of the GPU."""
    plain = make()

    def work() -> Iterator[str]:
        for _ in range(times):
            list(plain())
        yield "forward"

    return work


def against(
    title: str,
    case: Case,
    ours: Makers,
    rivals: Makers,
    device: torch.device,
    budget: float,
    bars: Mapping[str, float],
    work: Mapping[str, float],
    most: int = 50,
) -> Iterator[Row]:
    """The forward time of each of ours over that of the fastest of `rivals`, which are called `title`.

    Args:
        work: useful floating-point operations of everyone.
        most: rounds.
    """
    contenders, refused = serving({**ours, **rivals})
    dtype = getattr(torch, case.dtype)
    rounds = measure.interleave(contenders, seconds=budget, device=device, most=most, dtype=dtype)
    for name in contenders:
        spread, useful = rounds.spread(name).scaled(1e3), rates(rounds, "forward", {name: work[name]})
        yield Row.of(f"forward: {name}, beside {title}", case.parameters, spread, "ms", rates=useful)
    for name, why in refused.items():
        yield Row(f"forward: {name}, beside {title}", case.parameters, None, "ms", refused=why)
    able = [name for name in rivals if name in contenders]
    for name in ours:
        row, bar = f"forward: {name}, time over {title}", bars.get(name)
        if name in contenders and able:
            best = min(able, key=lambda rival: rounds.spread(rival).median)
            yield Row.of(row, case.parameters, rounds.ratio(name, best), f"x {best}", bar=bar)
        else:
            yield Row(row, case.parameters, None, "x", bar=bar, refused=_reasons(refused))


def threshold(
    device: torch.device,
    budget: float = 2.0,
    case: Case = SMALL,
    lengths: Sequence[int] = (256, 512, 1024, 2048, 4096, 8192, 16384),
) -> Iterator[Row]:
    """The least work from which on triton is faster than native, forward and with the backward: `AUTO_FROM`."""
    faster: list[tuple[int, bool]] = []
    for length in lengths:
        case = replace(case, seq_len=length)
        pair = [replace(case, backend=name) for name in ("triton", "native")]
        contenders = {x.backend: x.contender(device, backward=True) for x in pair}
        rounds = measure.interleave(contenders, seconds=budget, device=device, most=200)
        ratios = {phase: rounds.ratio("triton", "native", phase) for phase in ("forward", "forward+backward")}
        faster.append((case.flops // 4, all(ratio.median <= 1 for ratio in ratios.values())))
        for phase, ratio in ratios.items():
            times = {name: rounds.spread(name, phase) for name in contenders}
            yield Row.of(f"{phase}: triton over native", case.parameters, ratio, times=times)
    slow = [i for i, (_, better) in enumerate(faster) if not better]
    first = slow[-1] + 1 if slow else 0
    here = triton.architecture(device)
    name = f"AUTO_FROM[{here!r}] of backends/triton.py, now {triton.AUTO_FROM.get(here)}"
    unit, why = "score entries x head_dim", "triton is not faster than native at any length measured"
    if first < len(faster):
        yield Row(name, case.parameters, float(faster[first][0]), unit)
    else:
        yield Row(name, case.parameters, None, unit, refused=why)


@contextmanager
def shaped(kernel: Kernel, case: Case, device: torch.device, shape: Shape) -> Iterator[None]:
    """The kernels of a case with other tiles than those that ship."""
    shapes = ARCHITECTURES[triton.architecture(device)].shapes
    key = kernel, getattr(torch, case.dtype).itemsize
    shipped = shapes[key]
    wide = (case.head_dim > 64) + (case.head_dim > 128)
    shapes[key] = (*shipped[:wide], shape, *shipped[wide + 1 :])  # type: ignore[assignment]
    try:
        yield
    finally:
        shapes[key] = shipped


def tile_shapes(kernel: Kernel, case: Case, device: torch.device, budget: float) -> Iterator[Row]:
    """The times of other tiles over those that ship, each in rounds with them: what to enter in configurations.py."""
    shipped = ARCHITECTURES[triton.architecture(device)].shape(
        kernel, getattr(torch, case.dtype).itemsize, case.head_dim, masked=False
    )
    phase = "forward" if kernel == "forward" else "forward+backward"
    name = ONE_KERNEL if kernel == "dqdkdv" else case.backend

    def contender(shape: Shape) -> Contender:
        plain = case.contender(device) if kernel == "forward" else _contender(name, case, device)

        def work() -> Iterator[str]:
            with shaped(kernel, case, device, shape):
                yield from plain()

        return work

    for shape in [Shape(*x) for x in CANDIDATES[kernel] if x != shipped]:
        row = f"{phase}: tiles of {kernel} {tuple(shape)} over those that ship, {tuple(shipped)}"
        try:
            list(contender(shape)())
        except _failures() as error:
            yield Row(row, case.parameters, None, "x", refused=_why(error))
            continue
        contenders = {"other": contender(shape), "shipped": contender(shipped)}
        ratio = measure.interleave(contenders, seconds=budget, device=device, most=30).ratio("other", "shipped", phase)
        yield Row.of(row, case.parameters, ratio)


def _launches(case: Case, device: torch.device) -> Iterator[Row]:
    for backward in (False, True):
        work = case.contender(device, backward=backward)
        found = profile(lambda work=work: list(work()), device)  # type: ignore[misc]
        phase = "forward+backward" if backward else "forward"
        yield Row(f"{phase}: kernels launched", case.parameters, float(found.launches), "calls")
        if found.idle_milliseconds is not None:
            yield Row(f"{phase}: GPU idle between kernels", case.parameters, found.idle_milliseconds, "ms")
