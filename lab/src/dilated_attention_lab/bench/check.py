"""Guard against regressions: compare figures that do not depend on the machine's speed with `results/baseline.json`,
which has them by device.

Times enter as ratios to dense attention in the same rounds, from the fastest run of each: other work on the machine
only adds time. They run on one thread, since several would wait for the one that is interrupted. Rounds go on until the
ratio is within its margin or `PATIENCE` is over. So a busy machine takes longer, and a slower library fails. Memory,
calls and copies are counted and have no noise.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from dilated_attention.plumbing import storage, table, triton
from dilated_attention_lab.bench.cases import DOUBLING, Case, Contender, Method, contender, planning
from dilated_attention_lab.bench.measure import fused_calls
from dilated_attention_lab.bench.profile import Profile, profile
from dilated_attention_lab.environment import environment

CPU = torch.device("cpu")
DILATED = Case(
    method="dilated", seq_len=4096, heads=2, segment_lengths=(1024, 2048, 4096), dilation_rates=(1, 2, 4),
    backend="native",  # which every machine has
)  # fmt: skip
ONE = replace(DILATED, seq_len=1024, segment_lengths=(1024,), dilation_rates=(1,))
SMALL = replace(DILATED, heads=8, dtype="bfloat16")
BLOCKS = replace(DILATED, method="block-sparse", blocks="local", density=0.1)
WORDS = contender(lambda: [str(i) for i in range(10_000)])

TIME_MARGIN = 0.3
COUNT_MARGIN = 0.02
"""The fraction of its baseline by which a count may exceed it; TIME_MARGIN: by which a ratio of times may."""
PATIENCE = 30.0
"""Seconds after which a ratio counts as above its limit."""


@dataclass(frozen=True, slots=True)
class Guard:
    """Describe a figure that must not rise above its baseline by more than the fraction `margin`.

    `measure(limit)` returns the figure in `unit`, and may stop once it is at most `limit`.
    """

    name: str
    unit: str
    margin: float
    measure: Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Verdict:
    guard: Guard
    value: float
    baseline: float | None

    @property
    def limit(self) -> float | None:
        return None if self.baseline is None else self.baseline * (1 + self.guard.margin)

    @property
    def held(self) -> bool:
        return self.limit is not None and self.value <= self.limit


def fastest_ratio(one: Contender, other: Contender, phase: str, limit: float, patience: float | None = None) -> float:
    """Return the least time of `one` divided by the least time of `other`, each from its start to the end of `phase`.

    Runs at least 5 rounds and half a second, then until the ratio is at most `limit` or `patience` seconds are over
    (None: PATIENCE).
    """
    patience = PATIENCE if patience is None else patience
    best = {one: float("inf"), other: float("inf")}
    begin, rounds, spent = time.perf_counter(), 0, 0.0
    while rounds < 5 or spent < 0.5 or (best[one] > limit * best[other] and spent < patience):
        for work in (one, other) if rounds % 2 else (other, one):
            start = time.perf_counter()
            for name in work():
                if name == phase:
                    best[work] = min(best[work], time.perf_counter() - start)
        rounds, spent = rounds + 1, time.perf_counter() - begin
    return best[one] / best[other]


def _over(case: Case, method: Method, phase: str = "forward") -> Callable[[float], float]:
    def measure(limit: float) -> float:
        one, other = (x.contender(CPU, backward=phase != "forward") for x in (case, replace(case, method=method)))
        return fastest_ratio(one, other, phase, limit)

    return measure


def _plan(limit: float) -> float:
    make, _ = planning(DOUBLING, 12, 1 << 30)
    return fastest_ratio(contender(make), WORDS, "forward", limit, patience=2.0)


def _profile(case: Case, backward: bool = False) -> Profile:
    work = case.contender(CPU, backward=backward)
    return profile(lambda: list(work()), CPU, runs=1)


def _peak(case: Case, backward: bool) -> Callable[[float], float]:
    return lambda _: _profile(case, backward).peak_bytes / case.out_bytes


def _copies(case: Case) -> Callable[[float], float]:
    return lambda _: float(_profile(case).copies)


def _calls(case: Case) -> Callable[[float], float]:
    work = case.contender
    return lambda _: float(fused_calls(lambda: list(work(CPU)())))


class _Launched:
    """Take the place of a compiled kernel, with launches that do nothing."""

    name = "forward"

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: None


def _host(backward: bool) -> Callable[[float], float]:
    """Return a function of a limit, the `measure` of a `Guard`. It returns the host's time for a small Triton call,
    without driver and GPU, divided by the time of turning 10,000 integers into text; it may stop once that is at most
    the limit. backward: whether the call includes its backward."""

    def measure(limit: float) -> float:
        serving = replace(table.BACKENDS["triton"], refusal=lambda facts: None)
        work = replace(SMALL, backend="triton").contender(CPU, backward=backward)
        with (
            patch.dict(table.BACKENDS, triton=serving),
            patch.object(triton, "run", lambda kernel, programs, **arguments: _Launched()),
            patch.object(triton, "architecture", lambda device: "sm_90"),
        ):
            return fastest_ratio(contender(lambda: list(work())), WORDS, "forward", limit, patience=2.0)

    return measure


BOTH = "forward+backward"
GUARDS = (
    Guard("dilated over dense calls, forward", "x", TIME_MARGIN, _over(DILATED, "dense calls")),
    Guard("dilated over dense calls, forward+backward", "x", TIME_MARGIN, _over(DILATED, "dense calls", BOTH)),
    Guard("one segment over dense attention, forward", "x", TIME_MARGIN, _over(ONE, "dense")),
    Guard("blocks over dense attention, forward", "x", TIME_MARGIN, _over(BLOCKS, "dense")),
    Guard("blocks over dense attention, forward+backward", "x", TIME_MARGIN, _over(BLOCKS, "dense", BOTH)),
    Guard("plan of 2^30 tokens over 10,000 integers to text", "x", TIME_MARGIN, _plan),
    Guard("host's part of a small call on a GPU over 10,000 integers to text", "x", TIME_MARGIN, _host(False)),
    Guard("host's part of a small call with its backward over 10,000 integers to text", "x", TIME_MARGIN, _host(True)),
    Guard("dilated, peak of allocations, forward", "out", COUNT_MARGIN, _peak(DILATED, False)),
    Guard("dilated, peak of allocations, forward+backward", "out", COUNT_MARGIN, _peak(DILATED, True)),
    Guard("blocks, peak of allocations, forward", "out", COUNT_MARGIN, _peak(BLOCKS, False)),
    Guard("blocks, peak of allocations, forward+backward", "out", COUNT_MARGIN, _peak(BLOCKS, True)),
    Guard("dilated, fused calls", "calls", 0.0, _calls(DILATED)),
    Guard("one segment, fused calls", "calls", 0.0, _calls(ONE)),
    Guard("blocks, fused calls", "calls", 0.0, _calls(BLOCKS)),
    Guard("dilated, copies", "calls", 0.0, _copies(DILATED)),
    Guard("one segment, copies", "calls", 0.0, _copies(ONE)),
)


def check(guard: Guard, baseline: Mapping[str, float]) -> Verdict:
    """Measure a guard's figure on one thread, and return it with its figure in `baseline`, if there is one."""
    held = baseline.get(guard.name)
    limit = 0.0 if held is None else held * (1 + guard.margin)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return Verdict(guard, guard.measure(limit), held)
    finally:
        torch.set_num_threads(threads)


def read_baseline(path: Path, device: str) -> dict[str, float]:
    """Return the device's figures by name. If the device has none yet, return for each figure the greatest of all
    devices, since the ratios differ between processors. Raises ValueError if the file is missing or is no baseline."""
    known = entries(path)
    if not known:
        raise ValueError(f"{path}: there is no baseline; write one with --update")
    of_devices = [known[device]] if device in known else [*known.values()]
    figures: dict[str, float] = {}
    for entry in of_devices:
        for name, value in entry["figures"].items():
            figures[name] = max(value, figures.get(name, value))
    return figures


def write_baseline(path: Path, device: str, values: Mapping[str, float]) -> None:
    """Write the baseline of this device; those of other devices stay."""
    figures = {name: round(value, 3) for name, value in values.items()}
    known = entries(path) | {device: {"environment": environment(CPU), "figures": figures}}
    storage.write_text(path, json.dumps(known, indent=1) + "\n")


def entries(path: Path) -> dict[str, dict[str, Any]]:
    """Return the entries of the file by device, {} if there is no file. Raises ValueError if it is no baseline."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        for entry in known.values():
            entry["figures"] = {str(name): float(value) for name, value in entry["figures"].items()}
    except FileNotFoundError:
        return {}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ValueError(f"{path}: not a baseline; remove it, and write one with --update") from None
    return known
