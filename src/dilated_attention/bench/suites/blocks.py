"""`bench blocks`: block-sparse attention against dense, against other ways to run a layout, and choosing the blocks."""

from __future__ import annotations

import math
import shutil
import timeit
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dilated_attention import autograd, routing
from dilated_attention.backends import blocks
from dilated_attention.bench import activations, measure
from dilated_attention.bench.cases import Blocks, Case, contender
from dilated_attention.bench.measure import Spread
from dilated_attention.bench.results import Row
from dilated_attention.bench.suites import Step, rates, seconds
from dilated_attention.functional import attention, block_sparse_attention
from dilated_attention.layout import BlockLayout
from dilated_attention.patterns import Dilated
from dilated_attention.plan import plan_cache, plan_dilated

KINDS: tuple[Blocks, ...] = ("local", "global", "dilated", "random")
SPARSE = Case(method="block-sparse", seq_len=4096, blocks="local", density=0.1)
DENSITIES = (0.1, 0.25, 0.5)
MILLION = 1 << 20

Router = Callable[[Tensor, Tensor], BlockLayout]


def steps(device: torch.device, quick: bool) -> list[Step]:
    found = []
    for seq_len in (4096,) if quick else (4096, 16384):
        for kind in KINDS:
            for is_causal in (False,) if quick else (False, True):
                base = replace(SPARSE, seq_len=seq_len, blocks=kind, is_causal=is_causal)
                found.append(_over_dense(base, device, 3.0 if quick else 30.0))
    for seq_len in (4096,) if quick else (4096, 16384):
        for kind in KINDS[3:] if quick else (KINDS[3], KINDS[0]):
            for density in DENSITIES[:1] if quick else DENSITIES:
                case = replace(SPARSE, seq_len=seq_len, blocks=kind, density=density)
                found.append(_over_rivals(case, device, 3.0 if quick else 20.0))
    found += [_peak(replace(SPARSE, seq_len=8192, blocks="random", method=m), device) for m in ("gather", "torch.sparse")]  # fmt: skip # noqa: E501
    for kind in KINDS[3:] if quick else KINDS:
        for density in DENSITIES[:1] if quick else DENSITIES[:2]:
            case = replace(SPARSE, seq_len=32768, blocks=kind, density=density)
            found.append(_peak(case, device, bar=1.5))
    found.append(Step("layouts and their cache", lambda: _tables(4096 if quick else 16384)))
    for is_causal in (False, True):
        found += _choosing(replace(SPARSE, seq_len=4096 if quick else 16384, is_causal=is_causal), device, quick)
    found.append(Step("a trained LongNetLM", lambda: _longnet_quality(1024 if quick else 8192, 20 if quick else 200)))
    found.append(Step("MiniLM, 512 tokens", lambda: _minilm_quality(512, 2 if quick else 8, 16)))
    if not quick:
        found.append(Step("MiniLM, 4,096 tokens", lambda: _minilm_quality(4096, 1, 128)))
    return found


def bar(kind: str | None, density: float) -> float:
    """What the time over dense may be at most."""
    return 1.5 * density + 0.04 if kind == "random" else 1.25 * density + 0.02


def _over_dense(base: Case, device: torch.device, budget: float) -> Step:
    dense = replace(base, method="dense")
    cases = {f"{density:.0%}": replace(base, density=density) for density in DENSITIES}

    def run() -> Iterator[Row]:
        contenders = {name: case.contender(device, backward=True) for name, case in {**cases, "dense": dense}.items()}
        rounds = measure.interleave(contenders, seconds=budget, device=device)
        for phase, factor in (("forward", 1.0), ("forward+backward", 3.5)):
            for name, case in cases.items():
                ratio = rounds.ratio(name, "dense", phase)
                yield Row(
                    name=f"{phase}: time over dense",
                    parameters=case.parameters,
                    value=ratio.median,
                    unit="x",
                    bar=bar(case.blocks, case.density or 1.0),
                    spread=ratio,
                    times={key: rounds.spread(key, phase) for key in (name, "dense")},
                    rates=rates(rounds, phase, {name: factor * case.flops, "dense": factor * dense.flops}),
                )

    label = f"{base.seq_len:,} tokens, {base.blocks}{', causal' if base.is_causal else ''}, over dense"
    return Step(label, run, tuple((case, True) for case in (dense, *cases.values())))


def _over_rivals(case: Case, device: torch.device, budget: float) -> Step:
    names = ["gather", "mask", "torch.sparse"]
    names += ["flex"] if device.type != "cpu" or shutil.which("c++") else []
    cases = {name: replace(case, method=name) for name in names}  # type: ignore[arg-type]

    def run() -> Iterator[Row]:
        q, k, v = case.inputs(device)[0]
        with torch.no_grad():
            calls = {"block-sparse": case.prepare()} | {name: rival.prepare() for name, rival in cases.items()}
            expected = calls["block-sparse"](q, k, v).double()
            for name in cases:
                difference = float((calls[name](q, k, v).double() - expected).norm() / expected.norm())
                yield Row(
                    name=f"forward: relative difference from {name}",
                    parameters=case.parameters,
                    value=difference,
                    unit="",
                    bar=3e-6,
                )
            work = {name: contender(partial(call, q, k, v)) for name, call in calls.items()}
            rounds = measure.interleave(work, seconds=budget, device=device)
        for name in cases:
            ratio = rounds.ratio("block-sparse", name)
            most = {"torch.sparse": None, "flex": 1.0 if (case.density or 1.0) <= 0.1 else 1.05}.get(name, 1.0)
            yield Row(
                name=f"forward: time over {name}",
                parameters=case.parameters,
                value=ratio.median,
                unit="x",
                bar=most,
                spread=ratio,
                times=seconds(rounds),
            )
        yield from _refusals(case, cases, device)

    label = f"{case.seq_len:,} tokens, {case.density:.0%} {case.blocks}, over rivals"
    return Step(label, run, ((case, False), *((rival, False) for rival in cases.values())))


def _refusals(case: Case, cases: dict[str, Case], device: torch.device) -> Iterator[Row]:
    """Rivals that cannot be run at all, or not backward, with the reason."""
    if "flex" not in cases:
        reason = "compiles on CPU with c++, which is not installed"
        yield Row(name="forward: time over flex", parameters=case.parameters, value=None, unit="x", refused=reason)
    for name, rival in cases.items():
        try:
            for _ in replace(rival, seq_len=256, blocks="random", density=0.5).contender(device, backward=True)():
                pass
        except (RuntimeError, NotImplementedError) as error:
            yield Row(
                name=f"forward+backward: time over {name}",
                parameters=case.parameters,
                value=None,
                unit="x",
                refused=str(error).strip().splitlines()[0][:200],
            )


def _peak(case: Case, device: torch.device, bar: float | None = None) -> Step:
    def run() -> Iterator[Row]:
        found = measure.peak_above_inputs(case, device)
        yield Row(
            name=f"forward: {case.method}, peak memory above q, k, v and out, over the bytes of out",
            parameters=case.parameters,
            value=None if found is None else found / case.out_bytes - 1,
            unit="x",
            bar=bar,
            refused="this system does not tell a process's peak memory" if found is None else None,
        )

    return Step(f"peak memory of {case.method} at {case.seq_len:,} tokens", run, ((case, False),))


def _million() -> BlockLayout:
    near = BlockLayout.local(MILLION, 2048) | BlockLayout.global_(MILLION, 256)
    return near | BlockLayout.dilated(MILLION, [2**i for i in range(13)], 2)


def _tables(seq_len: int) -> Iterator[Row]:
    built = {"seq_len": MILLION, "heads": 1, "block_size": 128, "blocks": "local, global and dilated"}
    _million()
    spread = measure.elapsed(_million, runs=9).scaled(1e3)
    yield Row(name="layout: time to build", parameters=built, value=spread.median, unit="ms", bar=50.0, spread=spread)
    yield Row(name="layout: size", parameters=built, value=_million().nbytes / 1e6, unit="MB", bar=20.0)

    layout = BlockLayout.random(seq_len, 0.1, 0).causal()
    plan = plan_dilated((seq_len,), (1,), ((0,),), seq_len)
    q, sizes = torch.empty(1, seq_len, 1, 1), [seq_len, *layout.block_size, 1]

    def find() -> object:
        (found,) = (autograd._layouts(q, plan, sizes, [layout.indptr, layout.indices], True) or {}).values()
        return blocks._plan(found, 0)

    def miss() -> object:
        plan_cache.clear()
        return find()

    case = replace(SPARSE, seq_len=seq_len, blocks="random", is_causal=True)
    find()
    hits = Spread.of([timeit.timeit(find, number=100) / 100 for _ in range(50)]).scaled(1e6)
    yield Row(
        name="layout: time of a hit in the plan cache",
        parameters=case.parameters,
        value=hits.median,
        unit="µs",
        bar=20.0,
        spread=hits,
    )
    misses = measure.elapsed(miss, runs=9).scaled(1e3)
    yield Row(name="layout: time of a miss", parameters=case.parameters, value=misses.median, unit="ms", spread=misses)


def routers(density: float, block_size: int, is_causal: bool) -> dict[str, Router]:
    options: dict[str, Any] = {"block_size": block_size, "is_causal": is_causal}
    return {
        "top-k": lambda q, k: routing.topk_blocks(q, k, density, **options),
        "two stages": lambda q, k: routing.hierarchical_blocks(
            q, k, density, region=8 if q.shape[1] // block_size > 64 else 4, **options
        ),
        "LSH": lambda q, k: routing.lsh_blocks(q, k, density, **options),
    }


def _choosing(case: Case, device: torch.device, quick: bool) -> list[Step]:
    def step(name: str, router: Router) -> Step:
        def run() -> Iterator[Row]:
            q, k, v = case.inputs(device)[0]

            def work() -> Iterator[str]:
                layout = router(q, k)
                yield "choose"
                block_sparse_attention(q, k, v, layout, is_causal=case.is_causal)
                yield "choose and attend"

            rounds = measure.interleave({name: work}, seconds=3.0 if quick else 8.0, device=device)
            pairs = zip(rounds.seconds[name, "choose"], rounds.seconds[name, "choose and attend"], strict=True)
            share = Spread.of([choose / (both - choose) for choose, both in pairs])
            yield Row(
                name=f"routing: time of choosing the blocks over the attention that follows, {name}",
                parameters=case.parameters,
                value=share.median,
                unit="x",
                bar=0.1,
                spread=share,
                times=seconds(rounds),
            )

        return Step(f"choosing blocks: {name}{', causal' if case.is_causal else ''}", run, ((case, False),))

    assert case.density is not None
    return [step(name, router) for name, router in routers(case.density, case.block_size, case.is_causal).items()]


def _longnet_quality(seq_len: int, training_steps: int) -> Iterator[Row]:
    found = activations.longnet(seq_len, training_steps)
    yield from _quality(f"LongNetLM after {training_steps} steps", found, 128 if seq_len >= 4096 else 32, True)


def _minilm_quality(seq_len: int, batch: int, block_size: int) -> Iterator[Row]:
    reason = activations.missing()
    if reason is not None:
        parameters = {"seq_len": seq_len, "heads": 12, "model": "MiniLM"}
        yield Row(name="routing: mass captured", parameters=parameters, value=None, unit="", refused=reason)
        return
    yield from _quality("MiniLM", activations.minilm(seq_len, batch), block_size, False)


def _quality(model: str, found: activations.Heads, block_size: int, is_causal: bool) -> Iterator[Row]:
    """Attention mass in the blocks chosen over that in the best blocks, as many in each row; and the output's error."""
    q = found[0][0]
    case = replace(SPARSE, batch=q.shape[0], seq_len=q.shape[1], heads=q.shape[2], head_dim=q.shape[3])
    case = replace(case, block_size=block_size, is_causal=is_causal)
    parameters = {**asdict(case), "model": model, "layers": len(found)}
    everything = Dilated((q.shape[1],), (1,))
    mass = [block_mass(q, k, block_size, is_causal) for q, k, _ in found]
    choices = routers(0.1, block_size, is_causal)
    choices["local window"] = lambda q, k: case.layout(q.shape[1])
    for name, router in choices.items():
        shares, errors = [], []
        for (q, k, v), share in zip(found, mass, strict=True):
            layout = router(q, k)
            counts = layout.counts.expand(share.shape[:3])
            best = share.sort(-1, descending=True).values.cumsum(-1).gather(-1, (counts - 1)[..., None])
            chosen = (share * layout.dense_blocks()).sum()
            shares.append(float(chosen / best.sum()))
            out, dense = (attention(q, k, v, x, is_causal=is_causal) for x in (layout, everything))
            errors.append(float((out - dense).norm() / dense.norm()))  # type: ignore[operator, union-attr]
        least = {"top-k": 0.95, "LSH": 0.85}.get(name)
        spread = Spread.of(shares)
        yield Row(
            name=f"routing: mass lost, 1 - captured over the best possible, {name}",
            parameters=parameters,
            value=1 - sum(shares) / len(shares),
            unit="",
            bar=None if least is None else round(1 - least, 2),
            spread=Spread(1 - spread.p90, 1 - spread.p90, 1 - spread.median, 1 - spread.p10, spread.runs),
        )
        yield Row(
            name=f"routing: relative error of the output, {name}",
            parameters=parameters,
            value=math.fsum(errors) / len(errors),
            unit="",
            spread=Spread.of(errors),
        )


def block_mass(q: Tensor, k: Tensor, block_size: int, is_causal: bool) -> Tensor:
    """The share of each query block's softmax that falls on each key block, exact: `(batch, heads, rows, columns)`."""
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
