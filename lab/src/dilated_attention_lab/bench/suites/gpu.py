"""`bench gpu`: the Triton kernels on a GPU: right, fast against dense kernels, small, and where they overtake native.

In three parts of at most nine minutes each on 16 cores: go or no-go; which tiles, and windows; the long runs. Each job
of a part runs in a process of its own, so that an error of the device, a crash or a hang costs its own rows only. Jobs
that check or compile run at the same time, and what they compile is in Triton's cache for those that take times, one by
one.

The dense kernels, cuDNN's and FlashAttention's, compute about as many score entries in one long sequence as the pattern
has in all; times are compared per score entry.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from dilated_attention.plumbing import Kernel
from dilated_attention_lab.bench import groups
from dilated_attention_lab.bench.cases import Case
from dilated_attention_lab.bench.groups import Group, Job
from dilated_attention_lab.bench.on_gpu import PAPER, SMALL, correctness, kernels, sparse, speed
from dilated_attention_lab.bench.results import Row
from dilated_attention_lab.bench.suites import Step, peak
from dilated_attention_lab.verification import Check, checks

CORES = 14
"""The number of jobs that run at once, on the 16 cores for which a part's time is stated."""
MILLION = 1 << 20
SHORT = replace(SMALL, seq_len=2048, segment_lengths=(512, 1024, 2048))
"""A call of one launch, whose time on the host is measured."""
WINDOWED = replace(PAPER, method="dense", backend="auto", seq_len=32768, is_causal=True)
"""The dense case beside which windows are timed."""


def steps(device: torch.device, part: int | None = None) -> list[Step]:
    """Return the steps of part 1, 2 or 3 of the suite, or of all three for None: one step for each `Group` that
    `part_1`, `part_2` or `part_3` returns. Raises ValueError without a GPU."""
    if device.type != "cuda":
        raise ValueError("the gpu suite needs a GPU: --device cuda")
    return [
        Step(group.label, partial(groups.run_apart, group, partial(_command, n, group, device)))
        for n in (PARTS if part is None else (part,))
        for group in PARTS[n](device)
    ]


def _command(part: int, group: Group, device: torch.device, job: Job) -> list[str]:
    request = {"part": part, "group": group.label, "job": job.label, "device": str(device)}
    return [sys.executable, "-m", "dilated_attention_lab.bench.suites.gpu", json.dumps(request)]


def _serve(request: dict[str, Any]) -> None:
    rows = groups.rows_apart_from_output()
    (group,) = (x for x in PARTS[request["part"]](torch.device(request["device"])) if x.label == request["group"])
    (job,) = (x for x in group.jobs if x.label == request["job"])
    groups.serve(group, job, lambda line: print(line, file=rows, flush=True))


def part_1(device: torch.device) -> list[Group]:
    """Return the jobs that show whether the kernels are right and fast enough to go on: check those that are timed,
    time them, then check everything else."""
    plain, views = ([x for x in checks(777) if x.views == whether] for whether in (False, True))
    as_timed = {label: correctness.as_timed(case, label) for label, case in timed_cases().items()}
    right = [Job(label, partial(correctness.correctness, x, "triton", device)) for label, x in as_timed.items()]
    nested = as_timed["nested branches, head_dim 128"]
    grouped = replace(nested, name=f"{nested.name}, grouped queries", kv_heads=4, batch=2, of_lse=True)
    lists = replace(as_timed["blocks of 128"], name="blocks of 128, grouped queries", kv_heads=4, batch=2, of_lse=True)
    right += [Job(f"{x.name}, in boxes", partial(correctness.boxed, x, device)) for x in (nested, grouped, lists)]
    wide = partial(correctness.wide, nested, device)
    return [
        Group("rates of this GPU", 15, [Job("rates", partial(ceilings, device))]),
        Group("right: what is timed", 60, [*right, Job("wide offsets", wide)], CORES),
        *(Group(f"times, head_dim {d}", 75, _speeds(device, d, 65536, 4.0)) for d in (128, 64)),
        *(Group(f"times, blocks, {n:,} tokens", 50, [
            _block_sparse(sparse(x, n), device, 3.0, flex=False) for x in speed.SPEED_UPS
        ]) for n in (32768, 4096)),
        Group("right: triton", 120, [
            *_right([*plain, *views], "triton", device),
            Job("rows from elsewhere", partial(correctness.elsewhere, device)),
        ], CORES),
        Group("right: native", 30, list(_right(plain, "native", device)), CORES),
        # Last: a misaligned address ends its process.
        Group("right: native, views", 15, list(_right(views, "native", device)), CORES),
    ]  # fmt: skip


def part_2(device: torch.device) -> list[Group]:
    """Return the jobs that time the kernels with many shapes of tiles, to find the fastest; then those of windows."""
    lists = sparse(0.10)
    cases: dict[str, tuple[Kernel, Case]] = {
        f"{kernel}, head_dim {d}": (kernel, replace(PAPER, head_dim=d))
        for kernel, d in product(kernels.CANDIDATES, (128, 64))
    }
    cases["forward over lists"] = "forward", lists
    return [
        Group("shapes of tiles", 100, [Job(label, partial(kernels.compiled, *x, device)) for label, x in cases.items()],
              CORES),
        *(Group(f"tiles of {label}", 30, [Job(label, partial(kernels.tile_shapes, *x, device, 8.0))])
          for label, x in cases.items()),
        Group("windows", 40, [
            Job(f"{keys:,} keys, head_dim {d}", partial(speed.window, keys, replace(WINDOWED, head_dim=d), device, 3.0))
            for keys, d in ((512, 128), (4096, 128), (512, 64))
        ]),
    ]  # fmt: skip


def part_3(device: torch.device) -> list[Group]:
    """Return the jobs of the long measurements: lengths, memory, graphs, FlexAttention.

    They also give the least work (score entries x head_dim) for which `auto` should take triton.
    """
    million = replace(PAPER, seq_len=MILLION)
    narrow = replace(million, head_dim=64)
    memory = [
        Job(f"peak memory, {backward=}", peak(narrow, device, backward=backward, bar=bar).measure)
        for backward, bar in ((False, 1.10), (True, None))
    ]
    of_the_host = [
        Job(f"time of the host, {name}", partial(speed.host, device, replace(SHORT, backend=name)))
        for name in ("triton", "native")
    ]
    return [
        *(Group(f"long times, head_dim {d}", 80, _speeds(device, d, 262144, 4.0)) for d in (128, 64)),
        Group("a million tokens, head_dim 64", 75, _speeds(device, 64, MILLION, 6.0)),
        Group("a million tokens, head_dim 128", 40, [_speed(million, ["triton"], device, 8.0)]),
        Group("a million tokens against native", 45, [Job("against native", partial(correctness.million, device))]),
        Group("beyond 2^31 elements", 30, [Job("beyond 2^31 elements", partial(correctness.far_rows, device))]),
        Group("beside FlexAttention", 75, [_block_sparse(sparse(x), device, 3.0, flex=True) for x in (0.10, 0.02)]),
        Group("graphs", 30, [Job("graphs", partial(correctness.captured, SMALL, device))]),
        Group("short calls", 25, [Job("4,096 tokens", partial(speed.small, device, 4.0)), *of_the_host]),
        Group("where triton overtakes native", 30, [Job("threshold", partial(speed.threshold, device, 1.0))]),
        Group("memory", 30, memory),
    ]


PARTS: dict[int, Callable[[torch.device], list[Group]]] = {1: part_1, 2: part_2, 3: part_3}


def ceilings(device: torch.device) -> Iterator[Row]:
    """Measure what the machine can do: a large matrix product, and a copy of a gigabyte."""
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
    """Return the cases that jobs time, by label. Cases that differ only in length or density and run the same compiled
    kernel are listed once."""
    found = {
        f"nested branches, head_dim {head_dim}{', causal' * causal}": replace(
            PAPER, head_dim=head_dim, is_causal=causal
        )
        for head_dim, causal in product((128, 64), (False, True))
    }
    found |= {f"blocks of {x.block_size}": x for x in (sparse(0.10), sparse(0.10, 4096))}
    return found | {f"three branches, {n} tokens": replace(SMALL, seq_len=n) for n in speed.SHORT if n <= 4096}


def _right(found: Sequence[Check], backend: str, device: torch.device) -> Iterator[Job]:
    """Yield a job per check that the backend serves; for triton, which compiles, one per check, dtype and head_dim."""
    for check in found:
        pairs = product(check.dtypes, check.head_dims) if backend == "triton" else ()
        for dtype, d in pairs:
            one = replace(check, dtypes=(dtype,), head_dims=(d,))
            run = partial(correctness.correctness, one, backend, device)
            yield Job(f"{check.name}, {str(dtype).removeprefix('torch.')}, head_dim {d}", run)
        if backend != "triton":
            yield Job(check.name, partial(correctness.correctness, check, backend, device))


def _speeds(device: torch.device, head_dim: int, seq_len: int, budget: float) -> list[Job]:
    names = ["triton", "native"] if seq_len == 65536 else ["triton"]
    cases = [replace(PAPER, seq_len=seq_len, head_dim=head_dim, is_causal=is_causal) for is_causal in (False, True)]
    return [_speed(case, names, device, budget) for case in cases]


def _speed(case: Case, names: Sequence[str], device: torch.device, budget: float) -> Job:
    label = f"{case.seq_len:,} tokens, head_dim {case.head_dim}" + ", causal" * case.is_causal
    return Job(label, partial(speed.speed, case, names, device, budget))


def _block_sparse(case: Case, device: torch.device, budget: float, *, flex: bool) -> Job:
    label = f"{case.seq_len:,} tokens, {case.density:.0%} of blocks" + ", flex" * flex
    return Job(label, partial(speed.block_sparse, case, device, budget, flex=flex))


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
