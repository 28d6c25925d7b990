"""Show where a call spends time and memory.

PyTorch's profiler times every operator; here each operator's own time goes to the stage of the library that ran it.
While a call is profiled the functions of `STAGES` are replaced by the same functions under a `record_function`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, record_function

from dilated_attention.models import LongNetConfig, LongNetLM
from dilated_attention.plumbing import PlanCache, blocks, cpu, fused, native
from dilated_attention_lab.bench.cases import SPARSE, Case, Contender, planning
from dilated_attention_lab.bench.measure import Spread, elapsed, synchronize
from dilated_attention_lab.bench.results import Row

_MARK = "stage: "
OWN_TIME = "own time of "
KERNELS = "kernels in C++"
STAGES: dict[tuple[ModuleType | type, str], str] = {
    (fused, "forward"): "fused forward",
    (fused, "backward"): "fused backward",
    (cpu, "run"): KERNELS,
    (native, "merge_into"): "merging",
    (blocks, "merge_into"): "merging",
    (native, "add_phantoms"): "merging",
    (PlanCache, "get"): "finding the plan",
    (blocks, "score_bias"): "masks",
    (blocks.BlockRows, "take"): "gathering blocks",
    (blocks.BlockRows, "store"): "scattering blocks",
    (blocks.BlockRows, "add"): "scattering blocks",
}
_OPERATORS = {
    **dict.fromkeys(("empty", "empty_strided", "empty_like", "new_empty", "resize_"), "allocation"),
    **dict.fromkeys(("zero_", "fill_"), "initialising"),
    **dict.fromkeys(("copy_", "clone", "contiguous", "_to_copy"), "copies"),
    **dict.fromkeys(("add_", "add"), "sums of gradients"),
}
"""The stage to which an operator's time goes if no other stage runs it; allocation always is its own stage."""
LAUNCHES = (
    "cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx",
    "hipLaunchKernel", "hipExtLaunchKernel", "hipModuleLaunchKernel", "hipExtModuleLaunchKernel",
)  # fmt: skip
DISPATCH = "Python and dispatch"
OUTSIDE = "outside attention"


@dataclass(frozen=True, slots=True)
class Profile:
    """Hold where one call spent time and memory.

    Attributes:
        stages: each stage's own milliseconds, without the stages it called; longest first.
        milliseconds: time of the whole call under the profiler, which itself takes time for every operator.
        peak_bytes: most that was allocated at once, above what was before.
        allocations, allocated_bytes: number and bytes of all allocations, freed ones included.
        copies: calls of `aten::copy_`.
        launches: kernels launched on a GPU.
        idle_milliseconds: idle time of the GPU from the first kernel's start to the last one's end; None without a GPU.
    """

    stages: Mapping[str, float]
    milliseconds: float
    peak_bytes: int
    allocations: int
    allocated_bytes: int
    copies: int
    launches: int
    idle_milliseconds: float | None


def profile(call: Callable[[], object], device: torch.device, trace: Path | None = None, runs: int = 3) -> Profile:
    """Run `call` once to warm up, then `runs` times under the profiler, and return the profile of the fastest run:
    other work on the machine adds to whichever stage it hits.

    Args:
        trace: where to write the Chrome trace of the fastest run.
    """
    call()
    synchronize(device)
    fastest = min((_record(call, device) for _ in range(runs)), key=_total)
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        fastest.export_chrome_trace(str(trace))
    times: Counter[str] = Counter()
    events = list(fastest.events() or ())
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CPU and event.name != "[memory]":
            times[_stage(event)] += event.self_cpu_time_total
    return Profile(
        {name: time / 1e3 for name, time in times.most_common()},
        _total(fastest),
        *_memory(fastest),
        sum(event.name == "aten::copy_" for event in events),
        sum(event.name in LAUNCHES for event in events),
        _idle(events) if device.type == "cuda" else None,
    )


def _record(call: Callable[[], object], device: torch.device) -> torch.profiler.profile:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    recorded = torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True)
    with ExitStack() as stack:
        for place, stage in STAGES.items():
            stack.enter_context(patch.object(*place, _under(_MARK + stage, getattr(*place))))
        stack.enter_context(recorded)
        with record_function(_MARK + "all"):
            call()
        synchronize(device)
    return recorded


def _total(recorded: torch.profiler.profile) -> float:
    """Return the milliseconds of the profiled call."""
    return next(e.cpu_time_total for e in recorded.events() or () if e.name == _MARK + "all") / 1e3


def _under(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*arguments: Any, **keywords: Any) -> Any:
        with record_function(name):
            return function(*arguments, **keywords)

    return run


def _stage(event: Any) -> str:
    """Return the stage that an event's own time belongs to.

    It is "allocation" if the event allocates memory; else the stage of the innermost function in STAGES that runs it.
    If none runs it, it is OUTSIDE for an event that no operator of this library runs. For the others it is the entry
    of the event's own operator in `_OPERATORS`, DISPATCH without one.
    """
    operator = _OPERATORS.get(event.name.removeprefix("aten::")) if event.name.startswith("aten::") else None
    if operator == "allocation":
        return operator
    inside = False
    while event is not None:
        if event.name.startswith(_MARK) and event.name != _MARK + "all":
            return str(event.name.removeprefix(_MARK))
        inside = inside or event.name.startswith("dilated_attention::")
        event = event.cpu_parent
    return (operator or DISPATCH) if inside else OUTSIDE


def _memory(recorded: torch.profiler.profile) -> tuple[int, int, int]:
    """Return (peak bytes, number, total bytes) of the allocations."""
    raw: Any = recorded.profiler
    changes = [event for event in raw.kineto_results.events() if event.name() == "[memory]"]
    held = peak = number = total = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
        number += event.nbytes() > 0
        total += max(0, event.nbytes())
    return peak, number, total


def _idle(events: list[Any]) -> float:
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.is_user_annotation  # of `record_function`: from its first kernel to its last
    )
    idle = 0.0
    end = spans[0][0] if spans else 0.0
    for start, stop in spans:
        idle += max(0.0, start - end)
        end = max(end, stop)
    return idle / 1e3


def once(case: Case) -> dict[str, Spread]:
    """Return the seconds of what a call needs once per shape: making plan and layout, and finding the plan again."""
    make, find = planning(case.pattern, case.heads, case.seq_len)
    found = {"making the plan": elapsed(make, runs=20), "finding the plan": elapsed(find, runs=100)}
    if case.method in SPARSE:
        found["building the layout"] = elapsed(lambda: case.layout(case.seq_len), runs=5)
    return found


def training_step(case: Case, device: torch.device) -> Contender:
    """Return a contender: forward and backward of a two-block language model with the case's heads and pattern."""
    pattern = case.pattern if case.method == "dilated" else None
    config = LongNetConfig(embed_dim=case.heads * case.head_dim, num_heads=case.heads, num_layers=2, pattern=pattern)
    model = LongNetLM(config).to(device)
    tokens = torch.randint(256, (case.batch, case.seq_len + 1), device=device)

    def step() -> Iterator[str]:
        model.zero_grad()
        model.loss(tokens).backward()
        yield "forward+backward"

    return step


def rows(case: Case, found: Profile, prepared: Mapping[str, Spread], *, backward: bool) -> Iterator[Row]:
    """Yield the rows that record a profile.

    prepared: the seconds for plan and layout, from `once`. backward: whether the profiled call had one.
    """
    parameters = {**case.parameters, "backward": backward}
    for stage, milliseconds in found.stages.items():
        yield Row(f"{OWN_TIME}{stage}", parameters, milliseconds, "ms")
    for name, spread in prepared.items():
        yield Row.of(f"once a shape: {name}", parameters, spread.scaled(1e3), "ms")
    for name, value, unit in (
        ("peak of allocations over the bytes of out", found.peak_bytes / case.out_bytes, "x"),
        ("allocations", float(found.allocations), "calls"),
        ("allocated in all over the bytes of out", found.allocated_bytes / case.out_bytes, "x"),
        ("copies", float(found.copies), "calls"),
        ("kernels launched on the GPU", float(found.launches), "calls"),
        ("GPU idle between kernels", found.idle_milliseconds, "ms"),
    ):
        if value is not None:
            yield Row(name, parameters, value, unit)
