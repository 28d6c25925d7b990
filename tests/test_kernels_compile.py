"""The kernels compiled for GPUs that are not there: what the machine code holds.

A part of what ships is compiled here; `python -m dilated_attention.kernels.compile_ahead --output results/aot`
compiles and reports the whole.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton runs on Linux only")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from dilated_attention.kernels.compile_ahead import KERNELS, Report, Variant, build

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


def test_faults_are_found():
    good = Report(
        "sm_90", "dq", 64, "bf16", "even", 128, 64, 8, 2, registers=200, spilled=0, shared=2**16, wgmma=9, mma=0,
        triton="3.6.0",
    )  # fmt: skip
    assert good.faults == []
    for fault in ({"spilled": 8}, {"shared": 2**18}, {"wgmma": 0, "mma": 9}):
        assert len(replace(good, **fault).faults) == 1, fault
