"""`bench foundation`: dilated attention against the matrix products under it, and what it adds to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from dilated_attention_lab.bench import measure
from dilated_attention_lab.bench.cases import DOUBLING, planning
from dilated_attention_lab.bench.results import Row
from dilated_attention_lab.bench.suites import LONGNET, Step, over, peak, rates, seconds

MILLION = 1 << 20


def steps(device: torch.device, quick: bool) -> list[Step]:
    length, budget = (8192, 6.0) if quick else (131072, 60.0)
    return [
        _over_dense_calls(length, device, budget),
        _linear(2 * 32768 if quick else MILLION, device, 6.0 if quick else 20.0),
        peak(replace(LONGNET, seq_len=65536 if quick else 262144), device, bar=1.7),
        Step("plan of 2^30 tokens", _plan),
    ]


def _over_dense_calls(seq_len: int, device: torch.device, budget: float) -> Step:
    case = replace(LONGNET, seq_len=seq_len)
    dense = replace(case, method="dense calls")

    def run() -> Iterator[Row]:
        contenders = {str(x.method): x.contender(device, backward=True) for x in (case, dense)}
        rounds = measure.interleave(contenders, seconds=budget, device=device)
        for phase, bar, factor in (("forward", 1.05, 1.0), ("forward+backward", 1.10, 3.5)):
            useful = rates(rounds, phase, {x.method: factor * x.flops for x in (case, dense)})
            yield over(rounds, "dilated", "dense calls", phase, case.parameters, bar=bar, rates=useful)

    return Step(f"{case.seq_len:,} tokens over dense calls", run, ((case, True), (dense, True)))


def _linear(seq_len: int, device: torch.device, budget: float) -> Step:
    long = replace(LONGNET, seq_len=seq_len, heads=2)
    short = replace(long, seq_len=32768)
    repeat = max(1, seq_len // 32768 // 4)

    def run() -> Iterator[Row]:
        contenders = {"long": long.contender(device), "short": short.contender(device, repeat=repeat)}
        rounds = measure.interleave(contenders, seconds=budget, device=device)
        yield Row.of(
            "time per token over that at 32,768 tokens",
            long.parameters,
            rounds.ratio("long", "short", factor=repeat * short.seq_len / long.seq_len),
            bar=1.10,
            times=seconds(rounds),
            rates=rates(rounds, "forward", {"long": long.flops, "short": repeat * short.flops}),
        )

    return Step(f"time per token at {seq_len:,} tokens", run, ((long, False), (short, False)))


def _plan() -> Iterator[Row]:
    parameters = {"seq_len": 1 << 30, "heads": 12, "segment_lengths": "2048 doubling 20 times"}
    make, find = planning(DOUBLING, 12, 1 << 30)
    make()
    made, hit = measure.elapsed(make, runs=50), measure.elapsed(find, runs=1000)
    yield Row.of("time to make a plan", parameters, made.scaled(1e3), "ms", bar=5.0)
    yield Row.of("time to find a plan in the cache", parameters, hit.scaled(1e6), "µs", bar=20.0)
