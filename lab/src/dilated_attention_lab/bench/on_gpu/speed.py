"""Compare times with dense kernels of equal work, FlexAttention, and native. A `budget` is as in the suites."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dilated_attention import Window
from dilated_attention.plumbing import triton
from dilated_attention_lab.bench import measure
from dilated_attention_lab.bench.cases import Case, Contender, trained, under
from dilated_attention_lab.bench.groups import failures, reason_of
from dilated_attention_lab.bench.measure import Rounds, Spread
from dilated_attention_lab.bench.on_gpu import SMALL
from dilated_attention_lab.bench.on_gpu.correctness import graph_of
from dilated_attention_lab.bench.results import Row
from dilated_attention_lab.bench.suites import over, rates
from dilated_attention_lab.bench.suites.windows import windowed
from dilated_attention_lab.verification import relative_error

RATES = {("forward", 128, False): 0.58, ("forward", 64, False): 0.46, ("forward", 128, True): 0.52,
         ("forward", 64, True): 0.42, ("backward", 128, False): 0.42, ("backward", 64, False): 0.38}  # fmt: skip
"""Bars: the rate of useful work divided by the matrix product's in the same rounds, by phase, head_dim, causality."""
SPEED_UPS = {0.10: 7.0, 0.05: 13.0, 0.02: 25.0}
"""Bars: block-sparse forward over the fastest dense kernel at 32,768 tokens, by density."""
SHORT = (256, 512, 1024, 2048, 4096, 8192, 16384)
"""Tokens at which triton and native are compared."""
DENSE = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def dense(case: Case, kernel: SDPBackend, device: torch.device, *, backward: bool = False) -> Contender:
    """Return a dense call of PyTorch with a given kernel, on `(batch, heads, seq, head_dim)`: the phase `forward` and,
    with `backward`, the phase `forward+backward`."""
    rows_in_place = replace(case, method="dense calls", segment_lengths=(case.seq_len,), dilation_rates=(1,))
    return under(partial(sdpa_kernel, kernel), rows_in_place.contender(device, backward=backward))


def seconds_of(call: Callable[[], object], device: torch.device) -> Spread:
    """Return the spread of the seconds of 20 calls, each to its end on the device, after one that does not count."""

    def waited() -> None:
        call()
        measure.synchronize(device)

    waited()
    return measure.elapsed(waited, runs=20)


Makers = Mapping[str, Callable[[], Contender]]


def dense_makers(case: Case, device: torch.device, *, backward: bool) -> Makers:
    return {f"dense {name}": partial(dense, case, kernel, device, backward=backward) for name, kernel in DENSE.items()}


def serving(makers: Makers) -> tuple[dict[str, Contender], dict[str, str]]:
    """Call each of `makers`, and run its contender once. Return those that run, and why the others do not."""
    found, refused = {}, {}
    for name, make in makers.items():
        try:
            contender = make()
            list(contender())
        except failures() as error:
            refused[name] = reason_of(error)
        else:
            found[name] = contender
    return found, refused


def equal_work(case: Case) -> Case:
    """Return a dense case of one sequence, with about as many score entries as a dilated case."""
    entries = case.flops // (4 * case.head_dim * case.heads * case.batch)
    length = math.isqrt(entries * (2 if case.is_causal else 1))
    return replace(case, method="dense", backend="auto", seq_len=max(128, length // 128 * 128))


def backward_alone(rounds: Rounds, name: str) -> Spread:
    pairs = zip(rounds.seconds[name, "forward"], rounds.seconds[name, "forward+backward"], strict=True)
    return Spread.of([both - forward for forward, both in pairs])


def speed(case: Case, names: Sequence[str], device: torch.device, budget: float) -> Iterator[Row]:
    """Compare the backends `names` with dense kernels of equal work, in the same rounds.

    Yield for each the rate of a matrix product divided by its rate of useful work, then triton's time per score entry
    over the best dense kernel's.
    """
    even = equal_work(case)
    makers = {name: partial(replace(case, backend=name).contender, device, backward=True) for name in names}
    contenders, refused = serving({**makers, **dense_makers(even, device, backward=True)})
    rivals = [name for name in contenders if name not in names]
    rounds = measure.interleave(contenders, seconds=budget, device=device, dtype=getattr(torch, case.dtype))
    matrix = rounds.matmul_gflops
    entry: dict[tuple[str, str], float] = {}  # seconds per score entry, times a constant
    for name in (*contenders, *refused):
        flops = even.flops if name.startswith("dense ") else case.flops
        for phase, factor in (("forward", 1.0), ("backward", 2.5)):
            limit = RATES.get((phase, case.head_dim, case.is_causal)) if name == "triton" else None
            title = f"{phase}: {name}, matrix rate over the rate of useful work"
            bar = None if limit is None else 1 / limit
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


def _reasons(refused: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in refused.items())


def block_sparse(case: Case, device: torch.device, budget: float, *, flex: bool) -> Iterator[Row]:
    """Compare triton's forward with FlexAttention on the same blocks (`flex`), or with dense kernels on all tokens."""
    ours = {"triton": partial(case.contender, device)}
    if flex:
        rival = replace(case, method="flex", backend="auto")
        rivals: Makers = {"flex": partial(rival.contender, device)}
        work = {"triton": case.flops, "flex": case.flops}
        yield from against("compiled FlexAttention", case, ours, rivals, device, budget, {"triton": 1.0}, work)
        return
    assert case.density is not None
    full = replace(case, method="dense", backend="auto")
    rivals = dense_makers(full, device, backward=False)
    bar = 1 / SPEED_UPS[case.density] if case.seq_len == 32768 else 1.0
    work = {"triton": case.flops} | dict.fromkeys(rivals, full.flops)
    yield from against("the fastest dense kernel", case, ours, rivals, device, budget, {"triton": bar}, work)
    if device.type == "cuda":
        yield from in_a_row(case, ours, rivals, bar)


def in_a_row(case: Case, ours: Makers, rivals: Makers, bar: float) -> Iterator[Row]:
    """Compare triton with the fastest of `rivals` by the device's time of calls in a row, where the host is ahead.

    Each of five rounds takes the median of `triton.testing.do_bench`, which empties the L2 cache before every call.
    """
    from triton.testing import do_bench

    contenders, _ = serving({**ours, **rivals})
    rounds = Rounds({(name, "forward"): [] for name in contenders}, 0)
    for _ in range(5):
        for name, contender in contenders.items():
            quick = {"warmup": 10, "rep": 60, "return_mode": "median"}
            seconds = do_bench(lambda contender=contender: list(contender()), **quick) / 1e3
            rounds.seconds[name, "forward"].append(seconds)
    if (best := fastest(rivals, rounds)) and "triton" in contenders:
        title = "forward: triton, time in a row of calls over the fastest dense kernel"
        yield over(rounds, "triton", best, "forward", case.parameters, title, unit=f"x {best}", bar=bar)


def fastest(rivals: Iterable[str], rounds: Rounds) -> str | None:
    """Return the rival with the least median time of a forward; None if the rounds have none of them."""
    able = [name for name in rivals if (name, "forward") in rounds.seconds]
    return min(able, key=lambda name: rounds.spread(name).median, default=None)


def small(device: torch.device, budget: float) -> Iterator[Row]:
    """Time a short sequence, where the host's overhead matters, eager and as a CUDA graph, against dense kernels."""

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
    rivals = dense_makers(full, device, backward=False)
    work = dict.fromkeys(("triton", "native", "triton, CUDA graph"), SMALL.flops) | dict.fromkeys(rivals, full.flops)
    yield from against(
        "the fastest dense kernel", SMALL, {**ours, "triton, CUDA graph": replayed}, rivals, device, budget,
        {"triton": 1.0}, work, most=200,
    )  # fmt: skip


def host(device: torch.device, case: Case, calls: int = 50, runs: int = 20) -> Iterator[Row]:
    """Time what a forward takes the host: calls in a row, until the last is on its way to the GPU."""
    call, inputs = case.prepare(), case.inputs(device)[0]
    times = []
    with torch.no_grad():
        for _ in range(runs + 1):
            measure.synchronize(device)
            start = time.perf_counter()
            for _ in range(calls):
                call(*inputs)
            times.append((time.perf_counter() - start) * 1e6 / calls)
    bar = 40.0 if case.backend == "triton" else None
    yield Row.of(f"forward: time of the host for a call in a row of {calls}", case.parameters, Spread.of(times[1:]),
                 "us", bar=bar)  # fmt: skip


_WINDOWED, _WINDOWED_BACKWARD = (
    getattr(torch.ops.aten, name) for name in ("_flash_attention_forward", "_flash_attention_backward")
)


class _FlashWindow(torch.autograd.Function):
    """FlashAttention's own sliding window, causal, in PyTorch's copy of it. No public function offers it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, before: int) -> Tensor:
        ctx.window = {"window_size_left": before, "window_size_right": 0}
        sizes = None, None, q.shape[1], k.shape[1], 0.0, True
        out, lse, state, unused, _ = _WINDOWED(q, k, v, *sizes, False, **ctx.window)
        ctx.save_for_backward(q, k, v, out, lse, state, unused)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, state, unused = ctx.saved_tensors
        sizes = None, None, q.shape[1], k.shape[1], 0.0, True
        return *_WINDOWED_BACKWARD(dout, q, k, v, out, lse, *sizes, state, unused, **ctx.window), None


def window(keys: int, case: Case, device: torch.device, budget: float) -> Iterator[Row]:
    """Compare triton's causal window of `keys` keys with FlashAttention's own, forward and backward.

    Yield the largest difference of their outputs; for each of them, and for dense calls, the rate of a matrix product
    divided by its rate of useful work; then the ratio of their times. case: the dense calls.
    """
    ours, rival = "triton", "FlashAttention's window"
    seen, (q, k, v) = Window(keys - 1), case.inputs(device)[0]
    parameters = {**case.parameters, "before": seen.before}
    calls = {ours: windowed(seen, True, "triton"), rival: lambda *x: _FlashWindow.apply(*x, seen.before)}
    error = relative_error(*(call(q, k, v).double() for call in calls.values()))
    yield Row("out: relative difference from FlashAttention's window", parameters, error, "", bar=1e-2)
    contenders = {name: trained(call, (q, k, v)) for name, call in calls.items()}
    found, refused = serving(dense_makers(case, device, backward=True))
    contenders |= found
    rounds = measure.interleave(contenders, seconds=budget, device=device, dtype=getattr(torch, case.dtype))
    flops = case.batch * seen.flops(case.seq_len, case.heads, case.head_dim, True)
    for (phase, factor), name in product((("forward", 1.0), ("backward", 2.5)), (*contenders, *refused)):
        title = f"{phase}: {name}, beside a window, matrix rate over the rate of useful work"
        if name in refused:
            yield Row(title, parameters, None, "x", refused=refused[name])
            continue
        useful = factor * (flops if name in calls else case.flops)
        spread = rounds.spread(name) if phase == "forward" else backward_alone(rounds, name)
        yield Row.of(title, parameters, spread.scaled(rounds.matmul_gflops * 1e9 / useful), times={name: spread})
    for phase in ("forward", "forward+backward"):
        yield Row.of(f"{phase}: time over FlashAttention's own window", parameters, rounds.ratio(ours, rival, phase))


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
    """Compare the forward time of each contender in `ours` with the fastest of `rivals`, which rows call `title`.
    Yield the time of every contender, then one ratio of times for each of `ours`.

    Args:
        bars: the largest allowed ratio of each contender in `ours`.
        work: useful floating-point operations of each contender, for the GFLOP/s that its row records.
        most: the largest number of rounds.
    """
    contenders, refused = serving({**ours, **rivals})
    dtype = getattr(torch, case.dtype)
    rounds = measure.interleave(contenders, seconds=budget, device=device, most=most, dtype=dtype)
    for name in contenders:
        spread, useful = rounds.spread(name).scaled(1e3), rates(rounds, "forward", {name: work[name]})
        yield Row.of(f"forward: {name}, beside {title}", case.parameters, spread, "ms", rates=useful)
    for name, why in refused.items():
        yield Row(f"forward: {name}, beside {title}", case.parameters, None, "ms", refused=why)
    best = fastest(rivals, rounds)
    for name in ours:
        row, bar = f"forward: {name}, time over {title}", bars.get(name)
        if best and name in contenders:
            yield Row.of(row, case.parameters, rounds.ratio(name, best), f"x {best}", bar=bar)
        else:
            yield Row(row, case.parameters, None, "x", bar=bar, refused=_reasons(refused))


def threshold(device: torch.device, budget: float, case: Case = SMALL, lengths: Sequence[int] = SHORT) -> Iterator[Row]:
    """Find the least work (score entries x head_dim) from which triton is as fast as native, at this and all longer
    lengths measured, in the forward and with the backward. `case` is measured at each of `lengths`. Yield the two
    ratios of times at each length, then that work, or a row that says why there is none."""
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
    name = f"`least` of {triton.architecture(device)} in RULES of backends/triton.py"
    least = float(faster[first][0]) if first < len(faster) else None
    why = "triton is not faster than native at any length measured" if least is None else None
    yield Row(name, case.parameters, least, "score entries x head_dim", refused=why)
