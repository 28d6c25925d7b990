"""`bench dilation`: taking every r-th row by six operations, alone and inside the attention call that uses them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from dilated_attention_bench import measure
from dilated_attention_bench.cases import Case, contender
from dilated_attention_bench.results import Row
from dilated_attention_bench.suites import LONGNET, Step
from dilated_attention_bench.suites.strategies import STRATEGIES, Strategy, attend

RATE = 4
BASELINE = "index_select"


def steps(device: torch.device, quick: bool) -> list[Step]:
    base = replace(LONGNET, segment_lengths=(2048,), dilation_rates=(RATE,))
    lengths = (8192,) if quick else (2048, 8192, 32768)
    return [_step(replace(base, seq_len=seq_len), device, 4.0 if quick else 15.0) for seq_len in lengths]


def _step(case: Case, device: torch.device, budget: float) -> Step:
    def run() -> Iterator[Row]:
        plan = case.plan
        with torch.no_grad():
            q, k, v = case.inputs(device)[0]

            def rows(strategy: Strategy) -> list[Tensor]:
                """Of the heads at offset 0; those of the other offsets differ by where they start."""
                return [strategy.take(x[0], plan.groups[0]) for x in (q, k, v)]

            bare = {name: contender(partial(rows, strategy)) for name, strategy in STRATEGIES.items()}
            whole = {name: contender(partial(attend, x, q, k, v, plan)) for name, x in STRATEGIES.items()}
            kinds = {
                "alone, of q, k and v": measure.interleave(bare, seconds=budget / 4, device=device, most=200),
                "inside the attention call": measure.interleave(whole, seconds=budget, device=device, most=100),
            }
        for kind, rounds in kinds.items():
            for name in STRATEGIES:
                over = {} if name == BASELINE else {BASELINE: rounds.ratio(name, BASELINE)}
                yield Row.of(f"{name}, {kind}", case.parameters, rounds.spread(name).scaled(1e3), "ms", over=over)

    return Step(f"{case.seq_len:,} tokens", run, ((case, False),))
