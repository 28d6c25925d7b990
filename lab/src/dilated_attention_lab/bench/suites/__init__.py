"""The named suites of `bench`: each is a list of steps, and a step yields rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from dilated_attention_bench import measure
from dilated_attention_bench.cases import Case
from dilated_attention_bench.measure import MATMUL, UNTOLD, Rounds, Spread
from dilated_attention_bench.results import Row

LONGNET = Case(method="dilated", seq_len=8192, segment_lengths=(2048, 4096, 8192), dilation_rates=(1, 2, 4))
"""The configuration that the figures of the foundation are stated for."""


@dataclass(frozen=True, slots=True)
class Step:
    """One stretch of a suite's progress bar.

    Attributes:
        needs: cases whose inputs it holds at the same time, each with whether it runs a backward.
    """

    label: str
    measure: Callable[[], Iterator[Row]]
    needs: tuple[tuple[Case, bool], ...] = ()


def seconds(rounds: Rounds, *phases: str) -> dict[str, Spread]:
    """A row's `times`: of these phases, or of all."""
    return {" ".join(key): rounds.spread(*key) for key in rounds.seconds if not phases or key[1] in phases}


def rates(rounds: Rounds, phase: str, flops: Mapping[str, float]) -> dict[str, float]:
    """A row's `rates`: useful GFLOP/s by contender, and the matrix product's in the same rounds."""
    useful = {name: count / rounds.spread(name, phase).median / 1e9 for name, count in flops.items()}
    return {**useful, MATMUL: rounds.matmul_gflops}


def compare(
    label: str,
    cases: Mapping[str, Case],
    baseline: str,
    device: torch.device,
    *,
    seconds: float,
    backward: bool = False,
    most_flops: float = 8e12,
) -> Step:
    """The time of every case, and its ratio to that of the case `baseline`, all in the same rounds.

    Args:
        most_flops: a case with more than that many floating-point operations a call is refused.
    """
    backward_of = {name: backward and case.method != "flex" for name, case in cases.items()}
    work = {name: case.flops * (3.5 if backward_of[name] else 1.0) for name, case in cases.items()}
    run = {name: case for name, case in cases.items() if work[name] <= most_flops}

    def steps() -> Iterator[Row]:
        for name in cases.keys() - run.keys():
            why = f"{work[name] / 1e12:.3g} TFLOP a call; at most {most_flops / 1e12:.3g} are run"
            yield Row(f"forward: {name}", cases[name].parameters, None, "ms", refused=why)
        if not run:
            return
        contenders = {name: case.contender(device, backward=backward_of[name]) for name, case in run.items()}
        rounds = measure.interleave(contenders, seconds=seconds, device=device, least=2)
        for name, phase in rounds.seconds:
            if name == MATMUL:
                continue
            compared = name != baseline and (baseline, phase) in rounds.seconds
            useful = {name: cases[name].flops * (1.0 if phase == "forward" else 3.5)}
            yield Row.of(
                f"{phase}: {name}",
                cases[name].parameters,
                rounds.spread(name, phase).scaled(1e3),
                "ms",
                over={baseline: rounds.ratio(name, baseline, phase)} if compared else {},
                rates=rates(rounds, phase, useful),
            )

    return Step(label, steps, tuple((case, backward_of[name]) for name, case in run.items()))


def peak(
    case: Case, device: torch.device, *, backward: bool = False, bar: float | None = None, beside_out: bool = False
) -> Step:
    """Peak memory of one case above its inputs, or with `beside_out` above inputs and output, over the output's."""
    phase = "forward+backward" if backward else "forward"
    inputs = "q, k, v and out" if beside_out else "q, k, v"

    def steps() -> Iterator[Row]:
        found = measure.peak_above_inputs(case, device, backward=backward)
        value = None if found is None else found / case.out_bytes - beside_out
        name = f"{phase}: {case.method}, peak memory above {inputs}, over the bytes of out"
        yield Row(name, case.parameters, value, "x", bar=bar, refused=UNTOLD if found is None else None)

    return Step(f"peak memory of {case.method} at {case.seq_len:,} tokens", steps, ((case, backward),))
