"""The kernels compiled for GPUs that are not there: what the machine code holds.

A part of what ships is compiled here. The whole is what `python -m dilated_attention.kernels.compile_ahead --output
results/aot` compiled, whose reports are checked for every variant.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton runs on Linux only")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from dilated_attention.kernels.compile_ahead import CALLS, HEAD_DIMS, KERNELS, TARGETS, Report, Variant, build, variants

RESULTS = Path(__file__).parent.parent / "results/aot"
EVERY_KERNEL = [
    Variant(target, kernel, head_dim, "bf16", call)
    for target, head_dim, calls in [
        ("sm_90", 128, ("even", "union", "causal", "causal blocks")),
        ("sm_90", 64, ("causal",)),
        ("sm_80", 128, ("causal",)),
        ("sm_100", 128, ("causal",)),
        ("gfx942", 128, ("causal",)),
    ]
    for kernel in KERNELS
    for call in calls
]
ONE_KERNEL = [
    Variant("sm_90", "forward", 24, "bf16", "dropout"),
    Variant("sm_90", "dkdv", 96, "bf16", "grouped"),
    Variant("sm_90", "forward", 256, "bf16", "padding"),
    Variant("sm_90", "forward", 64, "fp32", "causal"),
    Variant("sm_90", "dq", 128, "fp16", "blocks"),
    Variant("sm_86", "dkdv", 256, "bf16", "causal"),
]


@pytest.mark.parametrize(
    "variant", EVERY_KERNEL + ONE_KERNEL, ids=lambda v: f"{v.target} {v.kernel} {v.head_dim} {v.call}"
)
def test_machine_code(variant: Variant):
    assert build(variant).faults == []


@pytest.mark.parametrize("target", TARGETS)
def test_reports_of_all_that_ships(target: str):
    rows = [Report(**json.loads(line)) for line in (RESULTS / f"{target}.jsonl").read_text().splitlines()]
    assert {(r.kernel, r.head_dim, r.dtype, r.call) for r in rows} == {
        (v.kernel, v.head_dim, v.dtype, v.call) for v in variants([target])
    }
    assert len(rows) == len(KERNELS) * len(HEAD_DIMS) * 2 * len(CALLS)
    assert [row for row in rows if row.faults] == []


def test_faults_are_found():
    good = Report(
        "sm_90", "dq", 64, "bf16", "even", 128, 64, 8, 2, registers=200, spilled=0, shared=2**16, wgmma=9, mma=0,
        triton="3.6.0",
    )  # fmt: skip
    assert good.faults == []
    for fault in ({"spilled": 8}, {"shared": 2**18}, {"wgmma": 0, "mma": 9}):
        assert len(replace(good, **fault).faults) == 1, fault
