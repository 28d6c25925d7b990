"""`bench blocks`: block-sparse attention against dense, against other ways to run a layout, and choosing the blocks."""

from __future__ import annotations

import math
import shutil
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dilated_attention import BlockLayout, block_sparse_attention, plan_cache, routing
from dilated_attention.plumbing import Call, blocks, layouts_of
from dilated_attention_lab.bench import activations, measure
from dilated_attention_lab.bench.cases import Blocks, Case, Method
from dilated_attention_lab.bench.measure import Spread
from dilated_attention_lab.bench.results import Row
from dilated_attention_lab.bench.suites import Step, over, peak, rates

KINDS: tuple[Blocks, ...] = ("local", "global", "dilated", "random")
SPARSE = Case(method="block-sparse", seq_len=4096, blocks="local", density=0.1)
DENSITIES = (0.1, 0.25, 0.5)
RIVALS: tuple[Method, ...] = ("gather", "mask", "flex")
MILLION = 1 << 20
LOST = "routing: mass lost, 1 - captured over the best possible"

Router = Callable[[Tensor, Tensor], BlockLayout]


def steps(device: torch.device, quick: bool) -> list[Step]:
    if quick:
        return [
            _over_dense(_cases(4096, ("local", "random"), DENSITIES), device, 4.0),
            _over_rivals(replace(SPARSE, blocks="random"), device, 2.0, *RIVALS),
            _over_rivals(replace(SPARSE, seq_len=512, blocks="random"), device, 1.0, "torch.sparse"),
            peak(replace(SPARSE, seq_len=16384, blocks="random"), device, bar=1.5, beside_out=True),
            Step("layouts and their cache", lambda: _tables(4096)),
            _choosing(replace(SPARSE, is_causal=True), device, 2.0, judged=False),
            Step("a trained LongNetLM", lambda: _longnet_quality(1024, 10, judged=False)),
        ]
    long = replace(SPARSE, seq_len=16384)
    return [
        _over_dense(_cases(4096, KINDS, DENSITIES), device, 20.0),
        _over_dense(_cases(4096, KINDS, DENSITIES[:1], is_causal=True), device, 10.0),
        _over_dense([replace(long, blocks="random")], device, 30.0),
        *[_over_rivals(case, device, 5.0, *RIVALS) for case in _cases(4096, ("random",), DENSITIES)],
        _over_rivals(replace(SPARSE, seq_len=1024, blocks="random"), device, 5.0, "torch.sparse"),
        *[peak(case, device, bar=1.5, beside_out=True) for case in _cases(32768, ("random", "global"), (0.25,))],
        Step("layouts and their cache", lambda: _tables(16384)),
        *[_choosing(replace(long, is_causal=cut), device, 15.0, judged=True) for cut in (False, True)],
        Step("a trained LongNetLM", lambda: _longnet_quality(8192, 150, judged=True)),
        Step("Gemma 3 270M, 8,192 tokens", lambda: _gemma_quality(8192, 128)),
    ]


def bar(kind: str | None, density: float) -> float:
    """Return the largest allowed ratio of time to dense attention's. kind, density: of the layout's blocks."""
    return 1.5 * density + 0.04 if kind == "random" else 1.25 * density + 0.02


def _cases(seq_len: int, kinds: Sequence[Blocks], densities: Sequence[float], is_causal: bool = False) -> list[Case]:
    base = replace(SPARSE, seq_len=seq_len, is_causal=is_causal)
    return [replace(base, blocks=kind, density=density) for kind in kinds for density in densities]


def _over_dense(found: list[Case], device: torch.device, budget: float) -> Step:
    dense = replace(found[0], method="dense")
    cases = {f"{case.blocks} {case.density:.0%}": case for case in found}

    def run() -> Iterator[Row]:
        contenders = {name: case.contender(device, backward=True) for name, case in {**cases, "dense": dense}.items()}
        rounds = measure.interleave(contenders, seconds=budget, device=device, least=2)
        for phase, factor in (("forward", 1.0), ("forward+backward", 3.5)):
            for name, case in cases.items():
                most = bar(case.blocks, case.layout(case.seq_len).density)
                useful = rates(rounds, phase, {name: factor * case.flops, "dense": factor * dense.flops})
                yield over(rounds, name, "dense", phase, case.parameters, bar=most, rates=useful)

    label = f"{dense.seq_len:,} tokens{', causal' if dense.is_causal else ''}, over dense"
    return Step(label, run, tuple((case, True) for case in (dense, *cases.values())))


def _over_rivals(case: Case, device: torch.device, budget: float, *names: Method) -> Step:
    """Compare a block-sparse case with other ways to run its layout, the methods `names` of `Case`: results and times.
    FlexAttention has no backward on a CPU."""
    rivals = {name: replace(case, method=name) for name in names}
    no_compiler = device.type == "cpu" and shutil.which("c++") is None and rivals.pop("flex", None) is not None
    trained = {name: name != "flex" or device.type != "cpu" for name in rivals}

    def run() -> Iterator[Row]:
        if no_compiler:
            why = "needs c++, which is not installed"
            yield Row("forward: time over flex", case.parameters, None, "x", refused=why)
        q, k, v = case.inputs(device)[0]
        with torch.no_grad():
            expected = case.prepare()(q, k, v).double()
            for name, rival in rivals.items():
                difference = float((rival.prepare()(q, k, v).double() - expected).norm() / expected.norm())
                yield Row(f"forward: relative difference from {name}", case.parameters, difference, "", bar=3e-6)
        work = {str(name): x.contender(device, backward=trained[name]) for name, x in rivals.items()}
        work["block-sparse"] = case.contender(device, backward=True)
        rounds = measure.interleave(work, seconds=budget, device=device)
        for phase in ("forward", "forward+backward"):
            for name in rivals:
                if (name, phase) in rounds.seconds:
                    most = 1.05 if name == "flex" and (case.density or 1.0) > 0.1 else 1.0
                    yield over(rounds, "block-sparse", name, phase, case.parameters, bar=most)

    label = f"{case.seq_len:,} tokens, {case.density:.0%} {case.blocks}, over {', '.join(names)}"
    return Step(label, run, tuple((x, trained[name]) for name, x in rivals.items()))


def _million() -> BlockLayout:
    near = BlockLayout.local(MILLION, 2048) | BlockLayout.global_(MILLION, 256)
    return near | BlockLayout.dilated(MILLION, [2**i for i in range(13)], 2)


def _tables(seq_len: int) -> Iterator[Row]:
    built = {"seq_len": MILLION, "heads": 1, "block_size": 128, "blocks": "local, global and dilated"}
    _million()
    yield Row.of("layout: time to build", built, measure.elapsed(_million, runs=9).scaled(1e3), "ms", bar=50.0)
    yield Row("layout: size", built, _million().nbytes / 1e6, "MB", bar=20.0)

    layout = BlockLayout.random(seq_len, 0.1, 0).causal()
    q = torch.empty(1, seq_len, 1, 1)
    call = Call.of(q, q, q, layout, is_causal=True)
    plan = call.plan(seq_len)

    def find() -> object:
        (found,) = (layouts_of(call, q, plan) or {}).values()
        return blocks.groups_of(found, 0)

    def miss() -> object:
        plan_cache.clear()
        return find()

    case = replace(SPARSE, seq_len=seq_len, blocks="random", is_causal=True)
    find()
    hits = Spread.of([timeit.timeit(find, number=100) / 100 for _ in range(50)]).scaled(1e6)
    yield Row.of("layout: time of a hit in the plan cache", case.parameters, hits, "µs", bar=20.0)
    yield Row.of("layout: time of a miss", case.parameters, measure.elapsed(miss, runs=9).scaled(1e3), "ms")


def routers(density: float, block_size: int, is_causal: bool) -> dict[str, Router]:
    options: dict[str, Any] = {"block_size": block_size, "is_causal": is_causal}
    return {
        "top-k": lambda q, k: routing.topk_blocks(q, k, density, **options),
        "sampled queries": lambda q, k: routing.sampled_blocks(q, k, density, **options),
        "two stages": lambda q, k: routing.hierarchical_blocks(
            q, k, density, region=8 if q.shape[1] // block_size > 64 else 4, **options
        ),
        "LSH": lambda q, k: routing.lsh_blocks(q, k, density, **options),
    }


_CHOOSING = {"sampled queries": (0.20, 0.26)}
"""Bars for a selector's time over the attention that follows, (full, causal); other selectors have (0.05, 0.08).
Sampled queries compute 1/64 of the products of attention to all blocks, and a softmax; when causal also a forecast."""


def _choosing(case: Case, device: torch.device, budget: float, *, judged: bool) -> Step:
    assert case.density is not None
    chosen = routers(case.density, case.block_size, case.is_causal)

    def run() -> Iterator[Row]:
        q, k, v = case.inputs(device)[0]

        def contender(router: Router) -> Callable[[], Iterator[str]]:
            def work() -> Iterator[str]:
                layout = router(q, k)
                yield "choose"
                block_sparse_attention(q, k, v, layout, is_causal=case.is_causal)
                yield "choose and attend"

            return work

        work = {name: contender(router) for name, router in chosen.items()}
        rounds = measure.interleave(work, seconds=budget, device=device)
        for name in chosen:
            choose, both = (rounds.seconds[name, phase] for phase in ("choose", "choose and attend"))
            yield Row.of(
                f"routing: time of choosing the blocks over the attention that follows, {name}",
                {**case.parameters, "blocks": "chosen"},
                Spread.of([x / (y - x) for x, y in zip(choose, both, strict=True)]),
                bar=_CHOOSING.get(name, (0.05, 0.08))[case.is_causal] if judged else None,
                times={phase: rounds.spread(name, phase) for phase in ("choose", "choose and attend")},
            )

    return Step(f"choosing blocks{', causal' if case.is_causal else ''}", run, ((case, False),))


def _longnet_quality(seq_len: int, training_steps: int, *, judged: bool) -> Iterator[Row]:
    found = activations.longnet(seq_len, training_steps)
    model = f"LongNetLM, {training_steps} steps"
    bars = {"LSH": 0.15, "top-k": 0.05} if judged else {}
    yield from _quality(model, found, 128 if seq_len >= 4096 else 32, True, bars)


def _gemma_quality(seq_len: int, block_size: int) -> Iterator[Row]:
    if why := activations.missing(activations.GEMMA, "gguf"):
        parameters = {"seq_len": seq_len, "heads": 4, "activations": "Gemma 3 270M"}
        yield Row(f"{LOST}, top-k", parameters, None, "", refused=why)
    else:
        yield from _quality("Gemma 3 270M", activations.gemma(seq_len), block_size, True, {"top-k": 0.03})


def _quality(
    model: str, found: activations.Heads, block_size: int, is_causal: bool, bars: Mapping[str, float]
) -> Iterator[Row]:
    """Yield for each selector the attention mass that it loses, as a share of what the best lists of equal length hold,
    1 - `captured`. bars: for it, by selector."""
    q = found[0][0]
    case = replace(SPARSE, batch=q.shape[0], seq_len=q.shape[1], heads=q.shape[2], head_dim=q.shape[3])
    case = replace(case, block_size=block_size, is_causal=is_causal)
    parameters = {**case.parameters, "blocks": "chosen", "activations": model, "layers": len(found)}
    mass = [block_mass(q, k, block_size, is_causal) for q, k in found]
    choices = routers(0.1, block_size, is_causal)
    choices["local window"] = lambda q, k: case.layout(q.shape[1])
    for name, router in choices.items():
        lost = [1 - captured(share, router(q, k)) for (q, k), share in zip(found, mass, strict=True)]
        mean = math.fsum(lost) / len(lost)
        yield Row(f"{LOST}, {name}", parameters, mean, "", bar=bars.get(name), spread=Spread.of(lost))


def captured(mass: Tensor, layout: BlockLayout) -> float:
    """Return the sum of `mass` (`block_mass`) over a layout's blocks, divided by the sum over the best lists.

    The best lists have the same lengths, and include the diagonal as every list must.
    """
    counts = layout.counts.expand(mass.shape[:3])
    kept = torch.eye(mass.shape[2], mass.shape[3])
    best = (mass + kept).sort(-1, descending=True).values.cumsum(-1).gather(-1, (counts - 1)[..., None])
    return float((mass * layout.dense_blocks()).sum() / (best - 1).sum())


def block_mass(q: Tensor, k: Tensor, block_size: int, is_causal: bool) -> Tensor:
    """Return the softmax that each query block gives each key block, `(batch, heads, rows, columns)`: summed over the
    keys, mean over the queries."""
    n, ratio = q.shape[1], q.shape[2] // k.shape[2]
    keys = k.repeat_interleave(ratio, 2).transpose(1, 2)
    token = torch.arange(n)
    rows = []
    for first in range(0, n, block_size):
        queries = q[:, first : first + block_size].transpose(1, 2)
        score = queries @ keys.mT * q.shape[3] ** -0.5
        if is_causal:
            score = score.masked_fill(token > token[first : first + block_size, None], -math.inf)
        share = score.softmax(-1).mean(2)
        columns = share.new_zeros(*share.shape[:2], -(-n // block_size))
        rows.append(columns.index_add_(2, token // block_size, share))
    return torch.stack(rows, 2)
