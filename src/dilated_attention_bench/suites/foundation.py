"""`bench foundation`: dilated attention against the matrix products under it, and what it adds to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from dilated_attention.patterns import Dilated
from dilated_attention.plan import plan_cache, plan_dilated
from dilated_attention_bench import measure
from dilated_attention_bench.cases import Case
from dilated_attention_bench.results import Row
from dilated_attention_bench.suites import LONGNET, Step, peak, rates, seconds

MILLION = 1 << 20


def steps(device: torch.device, quick: bool) -> list[Step]:
    found = []
    for seq_len, budget, backward in (
        ((8192, 6.0, True), (32768, 6.0, False))
        if quick
        else ((8192, 20.0, True), (32768, 45.0, True), (131072, 90.0, True))
    ):
        found.append(_over_dense_calls(replace(LONGNET, seq_len=seq_len), device, budget, backward))
    found.append(_linear(2 * 32768 if quick else MILLION, device, 6.0 if quick else 30.0))
    found.append(peak(replace(LONGNET, seq_len=65536 if quick else 262144), device, bar=1.7))
    for seq_len in (512, 1024, 2048):
        found.append(_one_segment(seq_len, device, 2.0 if quick else 5.0))
    found.append(Step("plan of 2^30 tokens", _plan))
    return found


def _over_dense_calls(case: Case, device: torch.device, budget: float, backward: bool) -> Step:
    dense = replace(case, method="dense calls")

    def run() -> Iterator[Row]:
        rounds = measure.interleave(
            {name: x.contender(device, backward=backward) for name, x in (("dilated", case), ("dense calls", dense))},
            seconds=budget,
            device=device,
        )
        for phase, bar, factor in (("forward", 1.05, 1.0), ("forward+backward", 1.10, 3.5)):
            if phase == "forward" or backward:
                ratio = rounds.ratio("dilated", "dense calls", phase)
                yield Row(
                    name=f"{phase}: time over dense calls",
                    parameters=case.parameters,
                    value=ratio.median,
                    unit="x",
                    bar=bar,
                    spread=ratio,
                    times=seconds(rounds, phase),
                    rates=rates(rounds, phase, {"dilated": factor * case.flops, "dense calls": factor * dense.flops}),
                )

    return Step(f"{case.seq_len:,} tokens over dense calls", run, ((case, backward), (dense, backward)))


def _linear(seq_len: int, device: torch.device, budget: float) -> Step:
    long = replace(LONGNET, seq_len=seq_len, heads=2)
    short = replace(long, seq_len=32768)
    repeat = max(1, seq_len // 32768 // 4)

    def run() -> Iterator[Row]:
        contenders = {"long": long.contender(device), "short": short.contender(device, repeat=repeat)}
        rounds = measure.interleave(contenders, seconds=budget, device=device)
        ratio = rounds.ratio("long", "short", factor=repeat * short.seq_len / long.seq_len)
        yield Row(
            name="time per token over that at 32,768 tokens",
            parameters=long.parameters,
            value=ratio.median,
            unit="x",
            bar=1.10,
            spread=ratio,
            times=seconds(rounds),
            rates=rates(rounds, "forward", {"long": long.flops, "short": repeat * short.flops}),
        )

    return Step(f"time per token at {seq_len:,} tokens", run, ((long, False), (short, False)))


def _one_segment(seq_len: int, device: torch.device, budget: float) -> Step:
    three = replace(LONGNET, seq_len=seq_len)
    one = replace(three, segment_lengths=(2048,), dilation_rates=(1,))
    dense = replace(three, method="dense")
    repeat = 8192 // seq_len  # a call is short against what an interruption takes

    def run() -> Iterator[Row]:
        cases = {"one branch": one, "three branches": three, "dense": dense}
        contenders = {name: case.contender(device, repeat=repeat) for name, case in cases.items()}
        rounds = measure.interleave(contenders, seconds=budget, device=device, most=200)
        useful = {name: float(repeat * case.flops) for name, case in cases.items()}
        for name, bar in (("one branch", 1.10), ("three branches", None)):
            ratio = rounds.ratio(name, "dense")
            yield Row(
                name="within the first segment: time over dense attention",
                parameters=cases[name].parameters,
                value=ratio.median,
                unit="x",
                bar=bar,
                spread=ratio,
                times=seconds(rounds),
                rates=rates(rounds, "forward", useful),
            )
        with torch.no_grad():
            q, k, v = one.inputs(device)[0]
            calls = measure.fused_calls(lambda: one.prepare()(q, k, v))
        yield Row(
            name="within the first segment: fused calls",
            parameters=one.parameters,
            value=float(calls),
            unit="calls",
            bar=1.0,
        )

    return Step(f"{seq_len:,} tokens, one segment", run, ((one, False), (dense, False)))


def _plan() -> Iterator[Row]:
    seq_len, heads, branches = 1 << 30, 12, 20
    pattern = Dilated(tuple(2048 << i for i in range(branches)), tuple(1 << i for i in range(branches)))
    table = pattern.offset_table(heads)

    def plan() -> None:
        plan_dilated(pattern.segment_lengths, pattern.dilation_rates, table, seq_len)

    def make() -> None:
        plan_cache.clear()
        plan()

    make()
    made = measure.elapsed(make, runs=50)
    hit = measure.elapsed(plan, runs=1000)
    parameters = {"seq_len": seq_len, "heads": heads, "segment_lengths": f"2048 doubling {branches} times"}
    for name, spread, unit, factor, bar in (
        ("time to make a plan", made, "ms", 1e3, 5.0),
        ("time to find a plan in the cache", hit, "µs", 1e6, 20.0),
    ):
        yield Row(
            name=name,
            parameters=parameters,
            value=spread.median * factor,
            unit=unit,
            bar=bar,
            spread=spread.scaled(factor),
        )
