"""The named suites of `bench`: each is a list of steps, and a step yields rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from dilated_attention.bench.cases import Case
from dilated_attention.bench.measure import MATMUL, Rounds, Spread
from dilated_attention.bench.results import Row

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
