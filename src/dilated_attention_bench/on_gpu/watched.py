"""A call in a process that another program watches: NVIDIA's profiler of kernels, and its memory checker.

`python -m dilated_attention_bench.on_gpu.watched NAME` makes the calls.
"""

from __future__ import annotations

import csv
import io
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from shutil import which

import torch

from dilated_attention.verification import checks
from dilated_attention_bench.on_gpu import PAPER, contender_of, launching, sparse
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
TINY = ("nested branches", "every head_dim, causal", "hidden keys", "dropout", "causal blocks", "lengths")
"""The checks whose calls the memory checker follows."""


def counters(name: str) -> Iterator[Row]:
    """What the hardware counted of one launch of a kernel: pipes, L2, stalls."""
    sections = [word for section in SECTIONS for word in ("--section", section)]
    watcher = ["--clock-control", "none", *sections, "--csv", "--page", "details", "--kernel-name-base", "function",
               "--kernel-name", name.split()[0], "--launch-skip", "1", "--launch-count", "1"]  # fmt: skip
    printed = _watched("ncu", watcher, name)
    table = printed[max(0, printed.find('"ID"')) :]
    for line in csv.DictReader(io.StringIO(table)):
        value = (line.get("Metric Value") or "").replace(",", "")
        if re.fullmatch(r"-?[0-9.]+(e-?[0-9]+)?", value):
            title = f"counted of {name}: {line['Section Name']}, {line['Metric Name']}"
            yield Row(title, COUNTED[name].parameters, float(value), line["Metric Unit"])


def memory_errors() -> Iterator[Row]:
    """How many accesses of small calls lie outside of their tensors, or are misaligned."""
    printed = _watched("compute-sanitizer", ["--tool", "memcheck"], "tiny")
    found = re.findall(r"ERROR SUMMARY: (\d+) error", printed)
    if not found:
        raise RuntimeError(f"compute-sanitizer gave no summary: {printed.strip().splitlines()[-1:]}")
    parameters = {"calls": ", ".join(TINY), "seq_len": 130, "heads": 4}
    yield Row("memory errors of small calls", parameters, float(found[-1]), "errors", bar=0.0)


def _watched(program: str, options: list[str], name: str) -> str:
    path = which(program) or which(program, path="/usr/local/cuda/bin")
    if path is None:
        raise FileNotFoundError(f"{program} is not installed")
    command = [path, *options, sys.executable, "-m", __name__, name]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        last = (process.stdout + process.stderr).strip().splitlines()[-1:]
        raise RuntimeError(f"{Path(program).name} ended with {process.returncode}: {' '.join(last)}")
    return process.stdout


def tiny_launches() -> list[Callable[[], object]]:
    """The calls that the memory checker follows, on the CPU."""
    found = [replace(x, dtypes=(torch.bfloat16,), head_dims=(64,)) for x in checks(130) if x.name in TINY]
    return [call for check in found for call in launches_of(check, "triton")]


def counted_launches(name: str) -> Callable[[], object]:
    return launching(COUNTED[name], backward=name.startswith("backward"))


def _main(name: str) -> None:
    device = torch.device("cuda")
    if name == "tiny":
        for check in checks(130):
            if check.name in TINY:
                check.run(*check.inputs(torch.bfloat16, 64, device), "triton")
    else:
        work = contender_of("triton", COUNTED[name], device)
        for _ in range(2):
            list(work())
    torch.cuda.synchronize()


if __name__ == "__main__":
    _main(sys.argv[1])
