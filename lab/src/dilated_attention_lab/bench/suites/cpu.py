"""`bench cpu`: the C++ kernels against PyTorch's dense calls on the same score entries, and the native backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from dilated_attention.plumbing import Facts, cpu
from dilated_attention_lab.bench import measure
from dilated_attention_lab.bench.cases import Blocks, Case, under
from dilated_attention_lab.bench.measure import Rounds
from dilated_attention_lab.bench.results import Row
from dilated_attention_lab.bench.suites import LONGNET, Step, over, peak, rates

OURS = "cpu"
DILATED = replace(LONGNET, backend=OURS)
DTYPES = ("float32", "bfloat16")
HEAD_DIMS = (64, 128)
LAYOUTS: tuple[tuple[Blocks, float], ...] = (("local", 0.1), ("local", 0.25), ("random", 0.1), ("random", 0.25))
ROWS = (4, 16, 32, 64, 128)

Bars = Mapping[tuple[str, str], tuple[float, float]]
"""Bars by dtype (TILES for bfloat16 in the tiles of AMX) and phase, one for each of HEAD_DIMS."""

TILES = "bfloat16 in tiles"
_BFLOAT16: Bars = {("bfloat16", "forward"): (0.80, 0.80), ("bfloat16", "forward+backward"): (0.60, 0.60)}
_TRAINED: Bars = {**_BFLOAT16, (TILES, "forward+backward"): (0.32, 0.42)}
FULL: Bars = {
    ("float32", "forward"): (0.92, 1.0), ("float32", "forward+backward"): (0.95, 1.0),
    **_TRAINED, (TILES, "forward"): (0.52, 0.62),
}  # fmt: skip
CAUSAL: Bars = {
    ("float32", "forward"): (0.75, 0.85), ("float32", "forward+backward"): (0.80, 0.90),
    **_TRAINED, (TILES, "forward"): (0.45, 0.55),
}  # fmt: skip
SHORT: Bars = {
    ("float32", "forward"): (0.80, 1.0), ("bfloat16", "forward"): (0.75, 0.75), (TILES, "forward"): (0.75, 0.75),
}  # fmt: skip
BLOCKS: Bars = {
    ("float32", "forward"): (1.05, 1.15), ("float32", "forward+backward"): (1.1, 1.2),
    **_BFLOAT16, (TILES, "forward"): (0.80, 1.0), (TILES, "forward+backward"): (0.45, 0.60),
}  # fmt: skip
DENSE: Bars = {
    ("float32", "forward"): (0.92, 1.0),
    **_BFLOAT16, (TILES, "forward"): (0.56, 0.66), (TILES, "forward+backward"): (0.35, 0.42),
}  # fmt: skip


def steps(device: torch.device, quick: bool) -> list[Step]:
    if why := cpu.refusal(Facts(device, torch.float32)):
        row = Row("the C++ kernels", DILATED.parameters, None, "x", refused=why)
        return [Step("the C++ kernels", lambda: iter([row]))]
    dtypes, head_dims = (DTYPES, HEAD_DIMS[:1]) if quick else (DTYPES, HEAD_DIMS)
    seq_len = 2048 if quick else 8192
    budget = 3.0 if quick else 9.0
    kinds = [replace(DILATED, dtype=dtype, head_dim=head_dim) for dtype, head_dim in product(dtypes, head_dims)]
    found = []
    for case in kinds:
        for is_causal, bars in ((False, FULL), (True, CAUSAL)):
            found.append(_beside(replace(case, is_causal=is_causal), "dense calls", bars, budget))
        whole = replace(case, heads=4, seq_len=seq_len, segment_lengths=(seq_len,), dilation_rates=(1,))
        found.append(_beside(whole, "dense", DENSE, budget))
        found.append(_beside(_short(case, 128), "dense calls", SHORT, budget / 2))
        found.append(_blocks(replace(case, seq_len=4096), budget))
    found += [_short_rows(dtype, budget / 2) for dtype in (*dtypes, "float16")]
    found += [_small(dtype, budget / 3) for dtype in dtypes]
    if cpu.PROCESSOR.highest == cpu.AMX:
        single = [case for case in kinds if case.dtype == "float32"]
        found += [_halves(case, bar, budget) for case, bar in zip(single, (0.60, 0.65), strict=False)]
    for dtype in dtypes:
        case = replace(DILATED, seq_len=16384 if quick else 65536, dtype=dtype)
        found.append(peak(case, device, bar=0.2, beside_out=True))
    return found


def _short(case: Case, rows: int) -> Case:
    return replace(case, segment_lengths=(rows,), dilation_rates=(1,))


def _words(case: Case) -> str:
    return f"{case.dtype}, head_dim {case.head_dim}{', causal' if case.is_causal else ''}"


def _rounds(cases: Mapping[str, Case], budget: float, *, most: int = 50) -> Rounds:
    device = torch.device("cpu")
    contenders = {name: case.contender(device, backward=True) for name, case in cases.items()}
    return measure.interleave(contenders, seconds=budget, device=device, most=most)


def _row(
    rounds: Rounds, name: str, case: Case, rival: str, phase: str, bars: Bars, flops: Mapping[str, float],
    density: float = 1.0,
) -> Row:  # fmt: skip
    """Return a row: the time of contender `name` divided by `density` x the time of contender `rival`.

    The row's `over` holds the time of `name` divided by its time on the native backend. bars: the largest allowed
    ratios, by (dtype, phase), in the order of HEAD_DIMS. flops: floating-point operations of a forward, by contender.
    """
    bar = bars.get((TILES if cpu.PROCESSOR.in_tiles(getattr(torch, case.dtype)) else case.dtype, phase))
    factor = 1.0 if phase == "forward" else 3.5
    return Row.of(
        f"{phase}: time over {rival if density == 1 else f'density x {rival}'}",
        case.parameters,
        rounds.ratio(name, rival, phase, 1 / density),
        bar=None if bar is None else bar[HEAD_DIMS.index(case.head_dim)],
        over={"native": rounds.ratio(name, f"{name}, native", phase)},
        times={key: rounds.spread(key, phase) for key in (name, rival, f"{name}, native")},
        rates=rates(rounds, phase, {key: factor * count for key, count in flops.items()}),
    )


def _beside(case: Case, rival: Any, bars: Bars, budget: float) -> Step:
    """Compare the C++ kernels on a dilated pattern with PyTorch's attention on as many score entries.

    rival: the method of `Case` that computes the latter, `dense` or `dense calls`.
    """
    cases = {OURS: case, f"{OURS}, native": replace(case, backend="native"), rival: replace(case, method=rival)}

    def run() -> Iterator[Row]:
        rounds = _rounds(cases, budget)
        for phase in ("forward", "forward+backward"):
            yield _row(rounds, OURS, case, rival, phase, bars, {key: cases[key].flops for key in (OURS, rival)})

    pattern = f"segments of {', '.join(map(str, case.segment_lengths))}"
    label = f"{case.seq_len:,} tokens, {pattern}, {_words(case)}, over {rival}"
    return Step(label, run, tuple((x, True) for x in cases.values()))


def _blocks(base: Case, budget: float) -> Step:
    """Compare the C++ kernels' time for blocks of 128 tokens with dense attention's time, times their density."""
    sparse = {
        f"{blocks} {density:.0%}": replace(base, method="block-sparse", blocks=blocks, density=density)
        for blocks, density in LAYOUTS
    }
    others = {f"{name}, native": replace(case, backend="native") for name, case in sparse.items()}
    cases = {**sparse, **others, "dense": replace(base, method="dense")}

    def run() -> Iterator[Row]:
        rounds = _rounds(cases, budget)
        for phase, (name, case) in product(("forward", "forward+backward"), sparse.items()):
            flops = {key: cases[key].flops for key in (name, "dense")}
            density = case.layout(case.seq_len).density
            yield _row(rounds, name, case, "dense", phase, BLOCKS, flops, density)

    label = f"{base.seq_len:,} tokens, blocks, {_words(base)}, over density x dense"
    return Step(label, run, tuple((x, True) for x in cases.values()))


def _over_native(cases: Sequence[Case], phases: Sequence[str], bar: float | None, budget: float) -> Iterator[Row]:
    for case in cases:
        pair = {OURS: case, "native": replace(case, backend="native")}
        rounds = _rounds(pair, budget / len(cases), most=400)
        for phase in phases:
            yield over(rounds, OURS, "native", phase, case.parameters, bar=bar)


def _short_rows(dtype: str, budget: float) -> Step:
    """Compare the C++ kernels with native on segments so short that the overhead of a tile decides: the choice of
    `auto` rests on these times."""
    cases = [_short(replace(DILATED, seq_len=4096, dtype=dtype), rows) for rows in ROWS]
    phases = "forward", "forward+backward"
    return Step(f"short segments, {dtype}, over native", lambda: _over_native(cases, phases, None, budget))


def _small(dtype: str, budget: float) -> Step:
    """Compare the C++ kernels with native in forwards that are mostly the overhead of reaching the kernel."""
    cases = [_short(replace(DILATED, seq_len=seq_len, dtype=dtype), seq_len) for seq_len in (64, 512)]
    return Step(f"small calls, {dtype}, over native", lambda: _over_native(cases, ("forward",), 0.8, budget))


@contextmanager
def _high_precision() -> Iterator[None]:
    """Let PyTorch compute a product of float32 as three of bfloat16, in the `with` block."""
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


def _halves(case: Case, bar: float, budget: float) -> Step:
    """Compare float32 under `set_float32_matmul_precision("high")` with PyTorch's dense calls, and with this library's
    kernels at the default precision."""
    cases = {OURS: case, "dense calls": replace(case, method="dense calls")}

    def run() -> Iterator[Row]:
        device = torch.device("cpu")
        contenders = {name: case.contender(device, backward=True) for name, case in cases.items()}
        contenders["high"] = under(_high_precision, contenders[OURS])
        rounds = measure.interleave(contenders, seconds=budget, device=device)
        for phase in ("forward", "forward+backward"):
            title, highest = f"{phase}: time in halves over dense calls", rounds.ratio("high", OURS, phase)
            yield over(rounds, "high", "dense calls", phase, case.parameters, title, bar=bar, over={"highest": highest})

    return Step(f"{case.seq_len:,} tokens, {_words(case)}, in halves", run, tuple((x, True) for x in cases.values()))
