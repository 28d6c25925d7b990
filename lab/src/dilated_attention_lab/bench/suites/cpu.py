"""`bench cpu`: the C++ kernels beside PyTorch's dense calls on the same score entries, and the native backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch

from dilated_attention.backends import cpu
from dilated_attention.backends.facts import Facts
from dilated_attention.backends.problem import Problem
from dilated_attention.cache import plan_cache
from dilated_attention.models import load_gigapath
from dilated_attention.training.loop import Recipe, Training
from dilated_attention.training.text import read_text
from dilated_attention_bench import measure
from dilated_attention_bench.cases import Blocks, Case, Contender, contender
from dilated_attention_bench.measure import Rounds, Spread
from dilated_attention_bench.results import Row
from dilated_attention_bench.suites import LONGNET, Step, model, peak, rates, seconds

OURS = "cpu"
DILATED = replace(LONGNET, backend=OURS)
DTYPES = ("float32", "bfloat16")
HEAD_DIMS = (64, 128)
LAYOUTS: tuple[tuple[Blocks, float], ...] = (("local", 0.1), ("local", 0.25), ("random", 0.1), ("random", 0.25))
ROWS = (4, 16, 32, 64, 128)

Bars = Mapping[tuple[str, str], tuple[float, float]]
"""By dtype, TILES for bfloat16 in the tiles of AMX, and phase, for the head_dims of HEAD_DIMS."""

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
    budget = 3.0 if quick else 12.0
    kinds = [replace(DILATED, dtype=dtype, head_dim=head_dim) for dtype, head_dim in product(dtypes, head_dims)]
    found = []
    for case in kinds:
        few = replace(case, heads=2)
        long = [] if quick else [replace(few, seq_len=32768)]
        for one in (case, *long):
            found += [_beside(one, "dense calls", FULL, budget), _beside(_causal(one), "dense calls", CAUSAL, budget)]
        for seq_len in (2048,) if quick else (2048, 4096, 8192):
            whole = replace(case, heads=4, seq_len=seq_len, segment_lengths=(seq_len,), dilation_rates=(1,))
            found.append(_beside(whole, "dense", DENSE, budget))
        for rows in (128,) if quick else (128, 256):
            found.append(_beside(_short(case, rows), "dense calls", SHORT, budget / 2))
        for seq_len, heads in ((4096, 8),) if quick else ((4096, 8), (16384, 2)):
            found.append(_blocks(replace(case, seq_len=seq_len, heads=heads), budget * (1 if seq_len < 10_000 else 3)))
    found += [_short_rows(dtype, budget / 2) for dtype in (*dtypes, "float16")]
    found += [_small(dtype, budget / 3) for dtype in dtypes]
    found += [_threads(dtype, budget) for dtype in dtypes]
    found += [_sets(case, budget) for case in kinds if case.dtype == "bfloat16" and cpu.instruction_set() > 1]
    if cpu.instruction_set() == cpu.AMX:
        single = [case for case in kinds if case.dtype == "float32"]
        found += [_halves(case, bar, budget) for case, bar in zip(single, (0.60, 0.65), strict=False)]
    found.append(Step("tables of 32,768 tokens", _tables))
    for dtype in dtypes:
        case = replace(DILATED, seq_len=16384 if quick else 65536, dtype=dtype)
        found += [peak(case, device, bar=0.2, beside_out=True), peak(case, device, backward=True, beside_out=True)]
    tiles, layers, count = (1500, 1, 3) if quick else (10_000, 4, 200)
    found.append(Step(f"slide encoder, {tiles:,} tiles", lambda: _slide(tiles, layers, 5.0 if quick else 120.0)))
    found.append(Step("language model", lambda: _language(count)))
    return found


def _causal(case: Case) -> Case:
    return replace(case, is_causal=True)


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
    """The time of contender `name` over that of `rival`, and over the native backend's; `flops` of a forward."""
    bar = bars.get((TILES if cpu.in_tiles(getattr(torch, case.dtype)) else case.dtype, phase))
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
    """A dilated pattern over dense attention of the same score entries."""
    cases = {OURS: case, f"{OURS}, native": replace(case, backend="native"), rival: replace(case, method=rival)}

    def run() -> Iterator[Row]:
        rounds = _rounds(cases, budget)
        for phase in ("forward", "forward+backward"):
            yield _row(rounds, OURS, case, rival, phase, bars, {key: cases[key].flops for key in (OURS, rival)})

    pattern = f"segments of {', '.join(map(str, case.segment_lengths))}"
    label = f"{case.seq_len:,} tokens, {pattern}, {_words(case)}, over {rival}"
    return Step(label, run, tuple((x, True) for x in cases.values()))


def _blocks(base: Case, budget: float) -> Step:
    """Blocks of 128, over dense attention and the density that they have."""
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
            yield Row.of(
                f"{phase}: time over native", case.parameters, rounds.ratio(OURS, "native", phase), bar=bar,
                times={key: rounds.spread(key, phase) for key in pair},
            )  # fmt: skip


def _short_rows(dtype: str, budget: float) -> Step:
    """Segments so short that what a tile costs besides its products decides: what `auto` rests on."""
    cases = [_short(replace(DILATED, seq_len=4096, dtype=dtype), rows) for rows in ROWS]
    phases = "forward", "forward+backward"
    return Step(f"short segments, {dtype}, over native", lambda: _over_native(cases, phases, None, budget))


def _small(dtype: str, budget: float) -> Step:
    """Calls whose time is that of getting to the kernel."""
    cases = [_short(replace(DILATED, seq_len=seq_len, dtype=dtype), seq_len) for seq_len in (64, 512)]
    return Step(f"small calls, {dtype}, over native", lambda: _over_native(cases, ("forward",), 0.8, budget))


def _under(setting: Callable[[], AbstractContextManager[Any]], work: Contender) -> Contender:
    """Work while a setting holds."""

    def limited() -> Iterator[str]:
        with setting():
            yield from work()

    return limited


@contextmanager
def _threads_set_to(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _high_precision() -> Iterator[None]:
    """Products of float32 are three of bfloat16."""
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


def _set_to(number: int) -> AbstractContextManager[Any]:
    """An instruction set of the machine, by its place in INSTRUCTION_SETS."""
    return patch.object(cpu, "instruction_set", lambda: number)


def _threads(dtype: str, budget: float) -> Step:
    case = replace(DILATED, dtype=dtype)

    def run() -> Iterator[Row]:
        device = torch.device("cpu")
        work = case.contender(device, backward=True)
        settings = {str(n): _under(partial(_threads_set_to, n), work) for n in (1, 2)}
        rounds = measure.interleave(settings, seconds=budget, device=device)
        for phase in ("forward", "forward+backward"):
            yield Row.of(
                f"{phase}: time on two threads over that on one", case.parameters, rounds.ratio("2", "1", phase),
                bar=1 / 1.8, times={f"{n} threads": rounds.spread(str(n), phase) for n in (1, 2)},
            )  # fmt: skip

    return Step(f"threads, {dtype}", run, ((case, True),))


def _halves(case: Case, bar: float, budget: float) -> Step:
    """Float32 under `set_float32_matmul_precision("high")`, over PyTorch's float32 and ours."""
    cases = {OURS: case, "dense calls": replace(case, method="dense calls")}

    def run() -> Iterator[Row]:
        device = torch.device("cpu")
        contenders = {name: case.contender(device, backward=True) for name, case in cases.items()}
        contenders["high"] = _under(_high_precision, contenders[OURS])
        rounds = measure.interleave(contenders, seconds=budget, device=device)
        for phase in ("forward", "forward+backward"):
            name, ratio = f"{phase}: time in halves over dense calls", rounds.ratio("high", "dense calls", phase)
            yield Row.of(
                name, case.parameters, ratio, bar=bar, over={"highest": rounds.ratio("high", OURS, phase)},
                times={key: rounds.spread(key, phase) for key in contenders},
            )  # fmt: skip

    return Step(f"{case.seq_len:,} tokens, {_words(case)}, in halves", run, tuple((x, True) for x in cases.values()))


def _sets(case: Case, budget: float) -> Step:
    """The machine's highest instruction set beside each lower one."""
    *lower, highest = range(1, cpu.instruction_set() + 1)

    def run() -> Iterator[Row]:
        device = torch.device("cpu")
        work = case.contender(device, backward=True)
        sets = {cpu.INSTRUCTION_SETS[n]: _under(partial(_set_to, n), work) for n in (*lower, highest)}
        rounds = measure.interleave(sets, seconds=budget, device=device)
        ours = cpu.INSTRUCTION_SETS[highest]
        for phase, n in product(("forward", "forward+backward"), lower):
            name = cpu.INSTRUCTION_SETS[n]
            yield Row.of(
                f"{phase}: time in {ours} over that in {name}", case.parameters, rounds.ratio(ours, name, phase),
                times={key: rounds.spread(key, phase) for key in (ours, name)},
            )  # fmt: skip

    return Step(f"instruction sets, {_words(case)}", run, ((case, True),))


def _tables() -> Iterator[Row]:
    """What the first call of a plan adds to the later ones."""
    case = replace(DILATED, seq_len=32768, heads=12)
    q = torch.empty(1, case.seq_len, case.heads, case.head_dim)
    problem = Problem(case.plan, case.is_causal, case.head_dim**-0.5)

    def make() -> object:
        plan_cache.clear()
        return cpu.launches(problem, q, "queries")

    made: Spread = measure.elapsed(make, runs=20).scaled(1e3)
    yield Row.of("time to make a plan and the forward's table", case.parameters, made, "ms")


@torch.no_grad()
def _slide(tiles: int, layers: int, budget: float) -> Iterator[Row]:
    x, coords = model.slide(tiles, torch.device("cpu"))
    calls = {}
    for dtype, backend in (("float32", OURS), ("float32", "native"), ("bfloat16", OURS)):
        kind = getattr(torch, dtype)
        encoder = load_gigapath(model.slide_weights(layers), backend=backend).to(kind)
        calls[f"{dtype}, {backend}"] = contender(partial(encoder, x.to(kind), coords))
    rounds = measure.interleave(calls, seconds=budget, device=x.device, most=10)
    parameters, base = model.slide_parameters(tiles, layers), f"float32, {OURS}"
    name = "slide encoder: time over that with the native backend"
    ratio = rounds.ratio(base, "float32, native")
    yield Row.of(name, {**parameters, "backend": OURS}, ratio, bar=0.9, times=seconds(rounds))
    name = "slide encoder: time in bfloat16 over that in float32"
    ratio, bar = rounds.ratio(f"bfloat16, {OURS}", base), 0.45 if cpu.in_tiles(torch.bfloat16) else None
    yield Row.of(name, {**parameters, "backend": OURS}, ratio, bar=bar, times=seconds(rounds))


def _language(count: int) -> Iterator[Row]:
    """The same bytes and steps in either dtype, in turns."""
    text, config = read_text([]), model.learner("dilated")
    runs = {
        dtype: Training(config, Recipe(context=model.CONTEXT, steps=count, dtype=dtype), text, backend=OURS)
        for dtype in DTYPES
    }
    for _ in range(count):
        for run in runs.values():
            run.step()
    parameters = {"seq_len": model.CONTEXT, "heads": 2, "embed_dim": 64, "layers": 2, "steps": count}
    ratio = Spread.of_ratios(runs["float32"].seconds[1:], runs["bfloat16"].seconds[1:])
    yield Row.of("training: tokens a second in bfloat16 over float32", parameters, ratio)
    last = {dtype: sum(run.losses[-10:]) / len(run.losses[-10:]) for dtype, run in runs.items()}
    apart = abs(last["bfloat16"] / last["float32"] - 1)
    yield Row(
        "training: loss in bfloat16, relative distance from float32, last 10 steps", parameters, apart, "", bar=0.01
    )
    for dtype, run in runs.items():
        for step in range(0, count, max(1, count // 10)):
            name = f"training: loss in {dtype}"
            yield Row(name, {**parameters, "step": step + 1}, run.losses[step], "nats per byte")
