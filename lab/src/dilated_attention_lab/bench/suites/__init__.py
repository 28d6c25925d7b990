"""The named suites of `bench`: each is a list of steps, and a step yields rows.

In all of them a `budget` is about how many seconds the rounds of a step take, and a `bar` what a ratio may not exceed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dilated_attention_lab.bench import measure
from dilated_attention_lab.bench.cases import Case
from dilated_attention_lab.bench.measure import MATMUL, UNTOLD, Rounds, Spread
from dilated_attention_lab.bench.results import Row

LONGNET = Case(method="dilated", seq_len=8192, segment_lengths=(2048, 4096, 8192), dilation_rates=(1, 2, 4))
"""The configuration for which the bars of `bench foundation` are set."""


@dataclass(frozen=True, slots=True)
class Step:
    """Describe one step of a suite. The progress bar shows its `label`.

    Attributes:
        measure: runs the step, and yields its rows.
        needs: cases that it holds at the same time, each with whether it runs a backward. The step is not run if they
            do not fit in memory.
    """

    label: str
    measure: Callable[[], Iterator[Row]]
    needs: tuple[tuple[Case, bool], ...] = ()


def seconds(rounds: Rounds) -> dict[str, Spread]:
    """Return the `times` of a `Row`, with keys like "dilated forward": the seconds of every contender in all phases."""
    return {" ".join(key): rounds.spread(*key) for key in rounds.seconds}


def rates(rounds: Rounds, phase: str, flops: Mapping[str, float]) -> dict[str, float]:
    """Return a row's `rates`: the useful GFLOP/s of each contender in `flops`, and under `MATMUL` those of the dense
    matrix product that was timed in the same rounds."""
    useful = {name: count / rounds.spread(name, phase).median / 1e9 for name, count in flops.items()}
    return {**useful, MATMUL: rounds.matmul_gflops}


def over(
    rounds: Rounds, name: str, other: str, phase: str, parameters: Mapping[str, Any], title: str = "", **more: Any
) -> Row:
    """Return a row with the time of contender `name` divided by the time of `other`, in one phase.

    title: name of the row; if empty, it is made of `phase` and `other`. more: further fields of `Row`.
    """
    times = {key: rounds.spread(key, phase) for key in (name, other)}
    title = title or f"{phase}: time over {other}"
    return Row.of(title, dict(parameters), rounds.ratio(name, other, phase), times=times, **more)


def peak(
    case: Case, device: torch.device, *, backward: bool = False, bar: float | None = None, beside_out: bool = False
) -> Step:
    """Return a step that measures the peak memory above the inputs, or with `beside_out` above inputs and output,
    divided by the bytes of the output."""
    phase = "forward+backward" if backward else "forward"
    inputs = "q, k, v and out" if beside_out else "q, k, v"

    def steps() -> Iterator[Row]:
        found = measure.peak_above_inputs(case, device, backward=backward)
        value = None if found is None else found / case.out_bytes - beside_out
        name = f"{phase}: {case.method}, peak memory above {inputs}, over the bytes of out"
        yield Row(name, case.parameters, value, "x", bar=bar, refused=UNTOLD if found is None else None)

    return Step(f"peak memory of {case.method} at {case.seq_len:,} tokens", steps, ((case, backward),))
