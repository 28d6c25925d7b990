"""Measure time and memory.

Machines are noisy and other people use them. So everything that is to be compared runs in one process, in rounds: each
round runs every contender once, in a random order. A ratio is the median of the rounds' ratios, which a slow drift of
the machine does not change, and it comes with its spread. A large matrix product runs in every round too: its rate is
the ceiling of this machine at this moment.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from dilated_attention.plumbing import fused
from dilated_attention_lab.bench.cases import Case, Contender, contender
from dilated_attention_lab.environment import peak_memory

MATMUL = "matrix product"
UNTOLD = "this system does not tell a process's peak memory"


def largest(values: Iterable[float]) -> float:
    """Return the largest value, or NaN if one is NaN: Python's `max` drops it unless it comes first."""
    return float(np.max([*values]))


@dataclass(frozen=True, slots=True)
class Spread:
    """Hold quantiles of a sample, in its own unit."""

    minimum: float
    p10: float
    median: float
    p90: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        minimum, p10, median, p90 = map(float, np.quantile(values, (0, 0.1, 0.5, 0.9)))
        return cls(minimum, p10, median, p90, len(values))

    @classmethod
    def of_ratios(cls, values: Sequence[float], others: Sequence[float], factor: float = 1.0) -> Spread:
        """Return the spread of `factor` times each value, divided by the value in `others` of the same round."""
        return cls.of([factor * value / other for value, other in zip(values, others, strict=True)])

    def scaled(self, factor: float) -> Spread:
        return Spread(factor * self.minimum, factor * self.p10, factor * self.median, factor * self.p90, self.runs)


@dataclass(frozen=True, slots=True)
class Rounds:
    """Hold the seconds of every phase of every contender, one entry per round: seconds["dilated", "forward"][round].

    `matmul_size` is the side of the square matrices whose product runs in every round too.
    """

    seconds: dict[tuple[str, str], list[float]]
    matmul_size: int

    def spread(self, name: str, phase: str = "forward") -> Spread:
        return Spread.of(self.seconds[name, phase])

    def ratio(self, name: str, other: str, phase: str = "forward", factor: float = 1.0) -> Spread:
        """Return the spread of `factor` times the seconds of `name`, divided by those of `other` in the same round."""
        return Spread.of_ratios(self.seconds[name, phase], self.seconds[other, phase], factor)

    @property
    def matmul_gflops(self) -> float:
        return 2 * self.matmul_size**3 / self.spread(MATMUL).median / 1e9


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def interleave(
    contenders: Mapping[str, Contender],
    *,
    seconds: float,
    device: torch.device,
    least: int = 3,
    most: int = 20,
    dtype: torch.dtype = torch.float32,
) -> Rounds:
    """Run the contenders in rounds until about `seconds` are spent.

    Each round has another order: what runs before a contender leaves memory and caches as it used them.

    Args:
        contenders: what to time, by name. The seconds of a phase include the contender's earlier phases.
        dtype: dtype of the matrix product that runs in every round too.
        least, most: bounds on the number of rounds. The first round is a warm-up that does not count, unless it takes
            more than a tenth of `seconds`.
    """
    size = 1536 if device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    everyone = {MATMUL: contender(lambda: a @ b), **contenders}
    names, order = list(everyone), random.Random(0)
    begin = time.perf_counter()
    rounds: list[dict[tuple[str, str], float]] = []
    warm = False
    while len(rounds) < least or (len(rounds) < most and time.perf_counter() - begin < seconds):
        times = {}
        for name in order.sample(names, len(names)):
            synchronize(device)
            start = time.perf_counter()
            for phase in everyone[name]():
                synchronize(device)
                times[name, phase] = time.perf_counter() - start
        if warm or time.perf_counter() - begin > seconds / 10:
            rounds.append(times)
        warm = True
    return Rounds({key: [times[key] for times in rounds] for key in rounds[0]}, size)


def elapsed(call: Callable[[], object], *, runs: int) -> Spread:
    """Return the spread of the seconds of a call that leaves nothing running on a device."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return Spread.of(times)


def fused_calls(call: Callable[[], object]) -> int:
    """Count the forwards of PyTorch's fused attention that a call of the native backend makes."""
    with patch.object(fused, "forward", wraps=fused.forward) as forward:
        call()
    return forward.call_count


def peak_above_inputs(case: Case, device: torch.device, *, backward: bool = False) -> int | None:
    """Return the bytes that a call adds at its peak to those of q, k and v; its output counts.

    They are measured in a new process, as the growth of its peak memory: resident on the CPU, allocated on a GPU.
    None if the system does not say.
    """
    request = {"case": case.parameters, "device": str(device), "backward": backward}
    return in_new_process(__name__, {**request, "threads": torch.get_num_threads()})


def in_new_process(
    module: str, request: Mapping[str, object], *, limit: Sequence[str] = (), launcher: Sequence[str] = (), **more: str
) -> Any:
    """Run `python -m module REQUEST`, with the request as JSON, and return the JSON value on the last line that it
    prints. Raises RuntimeError if the process fails.

    Args:
        limit: a command that starts Python, such as `rank_processes.limited`; empty for none.
        launcher: a module that runs modules, such as torchrun's, with its options; empty for none.
        more: variables of the environment.
    """
    command = [*limit, sys.executable, "-m", *launcher, module, json.dumps(request)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)} | more
    # A session of its own: Ctrl-C of a terminal reaches this process alone, which ends the launcher and waits for it,
    # as the launcher ends its ranks and waits for them. Killed, it would leave them.
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        answer, said = process.communicate()
    except BaseException:
        process.terminate()
        process.communicate()
        raise
    if process.returncode:
        raise RuntimeError(f"{module} {request} ended with {process.returncode}: {said[-2000:]}")
    return json.loads(answer.splitlines()[-1])


def _measure_peak(request: dict[str, Any]) -> int | None:
    torch.set_num_threads(request["threads"])
    device, case = torch.device(request["device"]), Case(**request["case"])
    short = replace(case, seq_len=max(64, 4 * case.block_size))
    first, work = (x.contender(device, backward=request["backward"]) for x in (short, case))
    list(first())  # loads the operators and starts the threads
    return peak_above_now(lambda: list(work()), device)


def peak_above_now(call: Callable[[], object], device: torch.device) -> int | None:
    """Return the bytes that a call adds, at its peak, to what this process holds; None if the system does not say."""
    forget_peak(device)
    before = peak_memory(device)
    call()
    synchronize(device)
    after = peak_memory(device)
    return None if before is None or after is None else after - before


@dataclass(slots=True)
class Noted:
    """Run a call as a contender of one phase, and keep what its last run returned and what that took.

    Attributes:
        result: what the call returned; None before the first run.
        bytes: what the call added to memory at its peak; None if the system does not say.
    """

    call: Callable[[], Any]
    device: torch.device
    phase: str = "forward"
    result: Any = None
    bytes: int | None = None

    def __call__(self) -> Iterator[str]:
        self.result = None
        self.bytes = peak_above_now(self._run, self.device)
        yield self.phase

    def _run(self) -> None:
        self.result = self.call()


def forget_peak(device: torch.device) -> None:
    """Reset the peak of memory. If the system forbids that, the peak still includes earlier use, such as making inputs.

    Freed memory that the C library keeps is first returned to the system, so that a call that reuses it is counted.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
        if trim is not None:
            trim(0)
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except PermissionError:
            return


def available_memory(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated, or None if the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if sys.platform != "linux":
        return None
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        if Path(limit).exists() and (text := Path(limit).read_text().strip()) != "max":
            free = min(free, int(text) - int(Path(used).read_text()))
    return free


def refusal(needs: Sequence[tuple[Case, bool]], device: torch.device) -> str | None:
    """Return why the cases cannot be held at once, with the figure; None if they can, or if the system does not say.

    Each case comes with whether it runs a backward.
    """
    return lack_of_memory(sum(case.predicted_bytes(backward=backward) for case, backward in needs), device)


def lack_of_memory(needed: int, device: torch.device) -> str | None:
    """Return why that many bytes cannot be held, with the figure; None if they can, or if the system does not say."""
    free = available_memory(device)
    if free is None or needed <= free:
        return None
    return f"needs {needed / 2**30:.1f} GiB; {free / 2**30:.1f} GiB are free"


if __name__ == "__main__":
    print(json.dumps(_measure_peak(json.loads(sys.argv[1]))))
