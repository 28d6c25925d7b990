# mypy: ignore-errors
"""Compare and time the warp-specialised forward for sm_90, kernels/hopper.py, beside the Triton kernel.

    python lab/experiments/hopper.py [--out FOLDER]

compares their numbers and times both, on a GPU of sm_90, and writes <out>/<device>/hopper.jsonl.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch

from dilated_attention import plan_cache
from dilated_attention.plumbing import Problem, triton
from dilated_attention_lab.bench import measure
from dilated_attention_lab.bench.cases import Case, contender
from dilated_attention_lab.bench.on_gpu import PAPER, sparse
from dilated_attention_lab.bench.results import Recorder, Row
from dilated_attention_lab.bench.suites import rates
from dilated_attention_lab.verification import relative_error


def measured(case: Case, device: torch.device, budget: float) -> Iterator[Row]:
    """Yield the difference from Triton's numbers, then the ratio of its time to Triton's in the same rounds."""
    inputs = case.inputs(device)[0]
    layouts = None
    if case.method == "block-sparse":
        layouts = {case.seq_len: case.layout(case.seq_len).to(device)}
        case = replace(case, segment_lengths=(case.seq_len,), dilation_rates=(1,))
    problem = Problem(case.plan, case.head_dim**-0.5, layouts=layouts)

    def kept(least: float) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        plan_cache.clear()
        with patch.object(triton, "LEAST_BOXED", least):
            call = triton.prepare(problem, *inputs)
            call(*inputs)
        return lambda: call(*inputs)

    calls = {"gluon": kept(0), "triton": kept(math.inf)}
    for name, x, y in zip(("out", "lse"), *(call() for call in calls.values()), strict=True):
        finite = [torch.where(y == -math.inf, 0.0, z).double() for z in (x, y)]
        yield Row(f"{name}: relative difference of Gluon from triton", case.parameters, relative_error(*finite), "",
                  bar=1e-2)  # fmt: skip
    contenders = {name: contender(call) for name, call in calls.items()}
    rounds = measure.interleave(contenders, seconds=budget, device=device, dtype=getattr(torch, case.dtype))
    ratio, useful = rounds.ratio("gluon", "triton"), rates(rounds, "forward", dict.fromkeys(calls, case.flops))
    yield Row.of("forward: Gluon over triton", case.parameters, ratio, rates=useful)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("results"))
    device = torch.device("cuda")
    recorder = Recorder(parser.parse_args().out, "hopper", device)
    for case in (PAPER, sparse(0.10), sparse(0.02)):
        for row in measured(case, device, 5.0):
            recorder.add(row)
            print(f"{row.name}: {row.value} {row.unit}", flush=True)
