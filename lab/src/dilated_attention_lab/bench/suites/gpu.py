"""`bench gpu`: the Triton kernels on a GPU: right, fast beside dense kernels, small, and where they overtake native.

In three parts of at most nine minutes each on 16 cores: go or no-go; why, and which tiles; the long runs. Each group of
a part runs in a process of its own, so that an error of the device, a crash or a hang costs its own rows only. What a
part launches is compiled ahead, by as many processes as there are cores.

The dense kernels, cuDNN's and FlashAttention's, compute about as many score entries in one long sequence as the pattern
has in all; times are compared per score entry.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch

from dilated_attention.backends import flash, triton
from dilated_attention.verification import Check, checks
from dilated_attention_bench import groups, measure, specializations
from dilated_attention_bench.cases import Case
from dilated_attention_bench.groups import Group, Job
from dilated_attention_bench.on_gpu import (
    ONE_KERNEL,
    PAPER,
    SMALL,
    correctness,
    kernels,
    launching,
    sparse,
    speed,
    watched,
)
from dilated_attention_bench.results import Row
from dilated_attention_bench.specializations import Compiled, Specialization
from dilated_attention_bench.suites import Step, peak

SECONDS = 540.0
"""Of a part."""
CORES = 14
"""That compile, of the 16 that a part's time is stated for."""
MILLION = 1 << 20
SHORT = (256, 512, 1024, 2048, 4096, 8192, 16384)
"""Tokens at which triton and native are compared."""


@dataclass(frozen=True)
class Machine:
    """What the groups depend on."""

    device: torch.device
    target: str = "sm_90"
    has_flash: bool = False

    @classmethod
    def of(cls, device: torch.device) -> Machine:
        capability = torch.cuda.get_device_capability(device)
        return cls(device, triton.architecture(device), flash.version(capability) is not None)


def steps(device: torch.device, part: int | None = None) -> list[Step]:
    """A step is a group. ValueError without a GPU."""
    if device.type != "cuda":
        raise ValueError("the gpu suite needs a GPU: --device cuda")
    machine = Machine.of(device)
    return [
        Step(f"part {n}: {group.label}", partial(groups.run_apart, group, _command(n, group, device)))
        for n in ((1, 2, 3) if part is None else (part,))
        for group in PARTS[n](machine)
    ]


def _command(part: int, group: Group, device: torch.device) -> list[str]:
    request = {"part": part, "group": group.label, "device": str(device)}
    return [sys.executable, "-m", "dilated_attention_bench.suites.gpu", json.dumps(request)]


def _serve(request: dict[str, Any]) -> None:
    rows = groups.rows_apart_from_output()
    machine = Machine.of(torch.device(request["device"]))
    (group,) = (x for x in PARTS[request["part"]](machine) if x.label == request["group"])
    groups.serve(group, lambda line: print(line, file=rows, flush=True))


# ---- the parts


def part_1(machine: Machine) -> list[Group]:
    """Go or no-go: what is timed is right; its times; then everything else is right."""
    device = machine.device
    timed = [
        Group("rates of this GPU", 15, [Job("rates", partial(ceilings, device))]),
        Group("right: what is timed", 35, list(_right_as_timed(device))),
        *(
            Group(f"times, head_dim {head_dim}", 40, list(_speeds(machine, head_dim, (65536,), 4.0)))
            for head_dim in (128, 64)
        ),
        Group("times, blocks", 40, list(_sparse_speeds(device, 3.0))),
    ]
    features = checks(777)
    views = [check for check in features if check.views]
    others = [check for check in features if not check.views]
    native = ["native"] + ["flash"] * machine.has_flash
    rest = [
        Group("right: triton, every head_dim", 35, list(_right(features[:2], "triton", device))),
        Group("right: triton, every feature", 40, [
            *_right(features[2:], "triton", device), Job("rows from elsewhere", *_elsewhere(device)),
        ]),
        Group(f"right: {ONE_KERNEL}", 35, list(_right(checks(777, (64, 128)), ONE_KERNEL, device))),
        *(Group(f"right: {name}", 25, list(_right(others, name, device))) for name in native),
        # Last: a misaligned address ends its process, and a memory checker is slow.
        *(Group(f"right: {name}, views", 15, list(_right(views, name, device))) for name in native),
        Group("memory checker", 45, [Job("memory checker", watched.memory_errors, watched.tiny_launches())]),
    ]  # fmt: skip
    return [*_compiled_first(timed, machine, "what is timed", 35), *_compiled_first(rest, machine, "the rest", 95)]


def part_2(machine: Machine) -> list[Group]:
    """Why, and which tiles: each kernel alone, what the hardware counts, and the candidate for Hopper."""
    device = machine.device
    found = [Group(f"tiles of {kernel}", 45, list(_tiles(kernel, device))) for kernel in kernels.CANDIDATES]
    lists = sparse(0.10)
    found += [
        Group("tiles of lists", 40, [Job("tiles of lists", partial(kernels.tile_shapes, "forward", lists, device),
                                         kernels.tile_launches("forward", lists))]),
        Group("order of tables", 30, [Job("order of tables", partial(kernels.orders, PAPER, device),
                                          [launching(PAPER, backward=False)])]),
        *(
            Group(f"counters of {name}", 30, [Job(name, partial(watched.counters, name),
                                                  [watched.counted_launches(name)])])
            for name in watched.COUNTED
        ),
    ]  # fmt: skip
    if machine.target == "sm_90":  # last: a barrier that is wrong would hang the GPU
        for head_dim in (128, 64):
            case = replace(PAPER, head_dim=head_dim)
            job = Job("the candidate", partial(kernels.gluon, case, device, 5.0), [launching(case, backward=False)])
            found.append(Group(f"the candidate in Gluon, head_dim {head_dim}", 60, [job]))
    return _compiled_first(found, machine, "part 2", 50)


def part_3(machine: Machine) -> list[Group]:
    """The long runs: lengths, memory, graphs, FlexAttention, and from which length on `auto` should take triton."""
    device = machine.device
    million = replace(PAPER, seq_len=MILLION)
    narrow = replace(million, head_dim=64)
    found = [
        *(
            Group(f"long times, head_dim {head_dim}", 45, list(_speeds(machine, head_dim, (65536, 262144), 4.0)))
            for head_dim in (128, 64)
        ),
        Group("a million tokens, head_dim 64", 45, list(_speeds(machine, 64, (MILLION,), 6.0))),
        # The tensors of two contenders do not fit 80 GB.
        *(
            Group(f"a million tokens, head_dim 128, {name}", 35, [_speed(million, [name], device, 8.0)])
            for name in ("triton", ONE_KERNEL)
        ),
        Group("a million tokens against native", 40, [
            Job("against native", partial(correctness.million, device), [launching(narrow)]),
            Job("beyond 2^31 elements", partial(correctness.far_rows, device), [launching(PAPER)]),
        ]),
        Group("beside FlexAttention", 75, [
            _block_sparse(replace(sparse(density)), device, 3.0, flex=True) for density in (0.10, 0.02)
        ]),
        Group("graphs", 45, [
            Job("graphs", partial(correctness.captured, SMALL, device), [launching(SMALL, backward=False)]),
        ]),
        Group("short calls", 30, [
            Job("4,096 tokens", partial(speed.small, device, 4.0), [launching(SMALL, backward=False)], timed=True),
        ]),
        Group("where triton overtakes native", 30, [
            Job("threshold", partial(speed.threshold, device, 1.0, SMALL, SHORT),
                [launching(replace(SMALL, seq_len=n)) for n in SHORT], timed=True),
        ]),
        Group("launches and memory", 60, [
            *(Job(f"launches, {case.seq_len:,} tokens, {case.method}", partial(speed.launched, case, device),
                  [launching(case)]) for case in (SMALL, PAPER, sparse(0.10))),
            *(Job(f"peak memory, {backward=}", peak(narrow, device, backward=backward, bar=bar).measure,
                  [launching(case, backward=backward) for case in (measure.before_peak(narrow), narrow)])
              for backward, bar in ((False, 1.10), (True, None))),
        ]),
    ]  # fmt: skip
    return _compiled_first(found, machine, "part 3", 40)


PARTS: dict[int, Callable[[Machine], list[Group]]] = {1: part_1, 2: part_2, 3: part_3}


# ---- their jobs


def ceilings(device: torch.device) -> Iterator[Row]:
    """What the machine can do: a large matrix product, and a copy of a gigabyte."""
    size = 8192
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    x = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    for name, call, work, unit in (
        ("matrix product", lambda: a @ b, 2 * size**3 / 1e12, "TFLOP/s"),
        ("copy", lambda: y.copy_(x), 2 * x.numel() / 1e9, "GB/s"),
    ):
        spread = speed.seconds_of(call, device)
        rates = replace(spread, minimum=work / spread.minimum, p10=work / spread.p90, median=work / spread.median,
                        p90=work / spread.p10)  # fmt: skip
        yield Row.of(f"rate of a {name}", {"size": size}, rates, unit)


def timed_cases() -> dict[str, Case]:
    """Every case that a job times, each kernel once: lengths and densities that share kernels stand for one another."""
    found = {
        f"nested branches, head_dim {head_dim}{', causal' * causal}": replace(
            PAPER, head_dim=head_dim, is_causal=causal
        )
        for head_dim in (128, 64)
        for causal in (False, True)
    }
    found |= {f"blocks of {x.block_size}": x for x in (sparse(0.10), sparse(0.10, 4096))}
    return found | {f"three branches, {n} tokens": replace(SMALL, seq_len=n) for n in SHORT if n <= 4096}


def _right_as_timed(device: torch.device) -> Iterator[Job]:
    for label, case in timed_cases().items():
        check = correctness.as_timed(case, label)
        for name in ("triton", ONE_KERNEL):
            yield Job(f"{name}, {label}", *_checked(check, name, device))
    check = correctness.as_timed(PAPER, "nested branches")
    run, calls = partial(correctness.wide, check, "triton", device), correctness.wide_launches(check, "triton")
    yield Job("triton, wide offsets", run, calls)


def _checked(
    check: Check, name: str, device: torch.device
) -> tuple[Callable[[], Iterator[Row]], list[Callable[[], object]]]:
    calls = correctness.launches_of(check, name) if name in ("triton", ONE_KERNEL) else []
    return partial(correctness.correctness, check, name, device), calls


def _right(found: Sequence[Check], name: str, device: torch.device) -> Iterator[Job]:
    for check in found:
        if name != "flash" or not check.needs:
            yield Job(check.name, *_checked(check, name, device))


def _elsewhere(device: torch.device) -> tuple[Callable[[], Iterator[Row]], list[Callable[[], object]]]:
    return partial(correctness.elsewhere, device), [lambda: list(correctness.elsewhere(torch.device("cpu")))]


def _speeds(machine: Machine, head_dim: int, lengths: Sequence[int], budget: float) -> Iterator[Job]:
    for seq_len in lengths:
        names = ["triton", ONE_KERNEL]
        if seq_len == 65536:
            names += ["native"] + ["flash"] * machine.has_flash
        for is_causal in (False, True):
            case = replace(PAPER, seq_len=seq_len, head_dim=head_dim, is_causal=is_causal)
            yield _speed(case, names, machine.device, budget)


def _speed(case: Case, names: Sequence[str], device: torch.device, budget: float) -> Job:
    label = f"{case.seq_len:,} tokens, head_dim {case.head_dim}" + ", causal" * case.is_causal
    calls = [launching(case, name) for name in names if name in ("triton", ONE_KERNEL)]
    return Job(label, partial(speed.speed, case, names, device, budget), calls, timed=True)


def _sparse_speeds(device: torch.device, budget: float) -> Iterator[Job]:
    for density in speed.SPEED_UPS:
        for seq_len in (32768, 4096):
            yield _block_sparse(sparse(density, seq_len), device, budget, flex=False)


def _block_sparse(case: Case, device: torch.device, budget: float, *, flex: bool) -> Job:
    label = f"{case.seq_len:,} tokens, {case.density:.0%} of blocks" + ", flex" * flex
    run = partial(speed.block_sparse, case, device, budget, flex=flex)
    return Job(label, run, [launching(case, backward=False)], timed=True)


def _tiles(kernel: Any, device: torch.device) -> Iterator[Job]:
    for head_dim in (128, 64):
        case = replace(PAPER, head_dim=head_dim)
        calls = kernels.tile_launches(kernel, case)
        yield Job(f"head_dim {head_dim}", partial(kernels.tile_shapes, kernel, case, device), calls)


# ---- compiling ahead


def _compiled_first(found: list[Group], machine: Machine, label: str, seconds: float) -> list[Group]:
    """The groups behind one that compiles what they launch."""
    job = Job("compile", partial(_compile, found, machine.target, label))
    return [Group(f"compile ahead: {label}", seconds, [job]), *found]


def launched(found: Sequence[Group], target: str, *, timed: bool = False) -> list[Specialization]:
    """What the jobs of groups launch, or only those that are timed."""
    calls = [call for group in found for job in group.jobs if job.timed or not timed for call in job.calls]
    return specializations.needed(dict.fromkeys(calls), target)


def _compile(found: Sequence[Group], target: str, label: str) -> Iterator[Row]:
    everything = launched(found, target)
    seconds = 0.0
    for compiled in specializations.compile_all(everything, target, specializations.processes()):
        seconds += compiled.seconds
        if compiled.why:
            yield Row(f"not compiled: {compiled.specialization}", {"compiled": label}, None, "", refused=compiled.why)
    yield Row("kernels compiled ahead", {"compiled": label}, float(len(everything)), "kernels")
    yield Row("processor time of compiling ahead", {"compiled": label}, seconds, "s")


@dataclass(frozen=True)
class Rehearsal:
    """What a part takes: its kernels, compiled without a GPU, and its groups' limits.

    Attributes:
        sampled: how many of the kernels were compiled; `seconds`, of the processors, counts all of them.
    """

    part: int
    kernels: int
    sampled: int
    seconds: float
    limits: float
    faults: tuple[Compiled, ...]

    @property
    def in_all(self) -> float:
        """Seconds, on the machine that a part's time is stated for, if every group takes all of its limit."""
        return self.seconds / CORES + self.limits


def rehearse(part: int, sample: int = 1, target: str = "sm_90") -> Rehearsal:
    """Compile each `sample`th kernel of a part as the part will, into a cache of its own."""
    found = PARTS[part](Machine(torch.device("cuda"), target, has_flash=True))
    everything = launched(found, target)
    some = everything[::sample]
    with TemporaryDirectory() as cache, patch.dict(os.environ, TRITON_CACHE_DIR=cache):
        compiled = list(specializations.compile_all(some, target, len(os.sched_getaffinity(0))))
    seconds = sum(x.seconds for x in compiled) * len(everything) / len(some)
    limits = sum(group.seconds for group in found if not group.label.startswith("compile ahead"))
    faults = tuple(x for x in compiled if x.why)
    return Rehearsal(part, len(everything), len(some), seconds, limits, faults)


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
