"""A call in a process that another program watches: NVIDIA's profiler of kernels, and its memory checker.

`python -m dilated_attention_bench.on_gpu.watched NAME` makes the calls.
"""

from __future__ import annotations

import csv
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from shutil import which

import torch

from dilated_attention.verification import checks
from dilated_attention_bench.cases import Case, Contender
from dilated_attention_bench.on_gpu import PAPER, launching, sparse
from dilated_attention_bench.on_gpu.correctness import launches_of
from dilated_attention_bench.results import Row

COUNTED = {
    "forward": PAPER,
    "backward_dq": PAPER,
    "backward_dkdv": PAPER,
    "forward over lists": sparse(0.10),
}
"""What is profiled: the kernel, which the first word names, and the case that launches it."""
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "WarpStateStats", "Occupancy")
TINY = ("nested branches", "every head_dim, causal", "views and a scale", "hidden keys", "dropout", "causal blocks",
        "lengths")  # fmt: skip
"""The checks whose calls the memory checker follows."""


def counters(name: str) -> Iterator[Row]:
    """What the hardware counted of one launch of a kernel: pipes, L2, stalls."""
    sections = [word for section in SECTIONS for word in ("--section", section)]
    watcher = ["--clock-control", "none", *sections, "--csv", "--page", "details", "--kernel-name-base", "function",
               "--kernel-name", name.split()[0], "--launch-skip", "1", "--launch-count", "1"]  # fmt: skip
    process = _watched("ncu", watcher, name)
    if process.returncode:
        raise _ended("ncu", process)
    printed = process.stdout
    table = printed[max(0, printed.find('"ID"')) :]
    for line in csv.DictReader(io.StringIO(table)):
        value = (line.get("Metric Value") or "").replace(",", "")
        if re.fullmatch(r"-?[0-9.]+(e-?[0-9]+)?", value):
            title = f"counted of {name}: {line['Section Name']}, {line['Metric Name']}"
            yield Row(title, COUNTED[name].parameters, float(value), line["Metric Unit"])


def memory_errors() -> Iterator[Row]:
    """How many accesses of small calls lie outside of their tensors, or are misaligned."""
    # Else PyTorch cuts small tensors from blocks of 2 MiB, and an access past one of them is to memory of the block.
    each_apart = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    process = _watched("compute-sanitizer", ["--tool", "memcheck"], "tiny", **each_apart)
    found = re.findall(r"ERROR SUMMARY: (\d+) error", process.stdout)
    if process.returncode and not any(map(int, found)):  # an error that it finds ends the calls
        raise _ended("compute-sanitizer", process)
    if not found:
        raise RuntimeError(f"compute-sanitizer gave no summary: {process.stdout.strip().splitlines()[-1:]}")
    parameters = {"calls": ", ".join(TINY), "seq_len": 130, "heads": 4}
    yield Row("memory errors of small calls", parameters, float(found[-1]), "errors", bar=0.0)


def _watched(program: str, options: list[str], name: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = which(program) or which(program, path="/usr/local/cuda/bin")
    if path is None:
        raise FileNotFoundError(f"{program} is not installed")
    command = [path, *options, sys.executable, "-m", __name__, name]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)


def _ended(program: str, process: subprocess.CompletedProcess[str]) -> RuntimeError:
    last = (process.stdout + process.stderr).strip().splitlines()[-1:]
    return RuntimeError(f"{program} ended with {process.returncode}: {' '.join(last)}")


def tiny_launches() -> list[Callable[[], object]]:
    """The calls that the memory checker follows, on the CPU."""
    found = [replace(x, dtypes=(torch.bfloat16,), head_dims=(64,)) for x in checks(130) if x.name in TINY]
    return [call for check in found for call in launches_of(check, "triton")]


def counted_launches(name: str) -> Callable[[], object]:
    return launching(COUNTED[name], backward=name.startswith("backward"))


def work_of(name: str, case: Case, device: torch.device) -> Contender:
    """What launches the kernel: for one of the forward no backward."""
    return case.contender(device, backward=name.startswith("backward"))


def _main(name: str) -> None:
    device = torch.device("cuda")
    if name == "tiny":
        for check in checks(130):
            if check.name in TINY:
                check.run(*check.inputs(torch.bfloat16, 64, device), "triton")
    else:
        work = work_of(name, COUNTED[name], device)
        for _ in range(2):
            list(work())
    torch.cuda.synchronize()


if __name__ == "__main__":
    _main(sys.argv[1])
