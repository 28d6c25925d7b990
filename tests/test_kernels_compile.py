"""The kernels compiled for GPUs that are not there: what the machine code holds.

A part of what ships is compiled here; `python tests/compile_ahead.py --output results/aot`
compiles and reports the whole, and what it wrote is read here.
"""

from __future__ import annotations

import operator
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton runs on Linux only")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton
from packaging.version import Version
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from compile_ahead import (
    KERNELS,
    TARGETS,
    Report,
    Variant,
    build,
    code_of,
    loops,
    read,
    shape_of,
    variants,
    write,
)
from conformance import problem
from dilated_attention import plan_cache
from dilated_attention.backends import triton as backend
from dilated_attention.backends.attributes import Attributes, attributes_of
from dilated_attention.bias import FORMS, Normal, Source
from dilated_attention.bias import attributes as bias_attributes
from dilated_attention.layout import BlockLayout
from dilated_attention.plan import plan_dilated

REPORTS = Path(__file__).parents[1] / "results/aot"
EVERY_KERNEL = [
    Variant(target, kernel, head_dim, "bf16", call)
    for target, head_dim, calls in [
        ("sm_90", 128, ("even", "union", "causal", "causal blocks", "masks of bits", "window", "softcap")),
        ("sm_90", 128, ("a slope", "a table", "a bias by pair")),
        ("sm_90", 64, ("causal",)),
        ("sm_80", 128, ("causal",)),
        ("sm_100", 128, ("causal",)),
        ("gfx942", 128, ("causal",)),
    ]
    for kernel in KERNELS
    for call in calls
]
IN_MAKE_TEST = [
    *(Variant("sm_90", kernel, 128, "bf16", "causal") for kernel in KERNELS),
    Variant("gfx942", "forward", 128, "bf16", "causal"),
]
ONE_KERNEL = [
    Variant("sm_90", "forward", 24, "bf16", "dropout"),
    Variant("sm_90", "dkdv", 96, "bf16", "grouped"),
    Variant("sm_90", "dkdv", 256, "bf16", "few rows"),
    Variant("sm_90", "forward", 256, "bf16", "padding"),
    Variant("sm_90", "forward", 64, "fp32", "causal"),
    Variant("sm_90", "dq", 128, "fp16", "blocks"),
    Variant("sm_86", "dkdv", 256, "bf16", "causal"),
]


SPILLED_BY_TRITON_3_9 = {Variant("sm_90", "forward", 128, "bf16", "union"): 16}
"""Bytes, of kernels that spill nothing with 3.7.1."""


def case(variant: Variant):
    marks = [] if variant in IN_MAKE_TEST else [pytest.mark.thorough]
    if variant in SPILLED_BY_TRITON_3_9 and Version(triton.__version__) >= Version("3.9"):
        reason = f"Triton 3.9 spills {SPILLED_BY_TRITON_3_9[variant]} bytes"
        marks.append(pytest.mark.xfail(reason=reason, strict=True))
    return pytest.param(variant, id=f"{variant.target} {variant.kernel} {variant.head_dim} {variant.call}", marks=marks)


@pytest.mark.parametrize("variant", [*map(case, EVERY_KERNEL + ONE_KERNEL)])
def test_machine_code(variant: Variant):
    assert build(variant).faults == []


def test_instructions_of_a_step():
    """Products take 2,048 cycles for 128 keys; in addition 8 warps issue on four schedulers."""
    variant = Variant("sm_90", "forward", 128, "bf16", "even")
    (step,) = loops(code_of(variant))
    assert len(step) * 128 / shape_of(variant).loop <= 560


@pytest.mark.parametrize("target", TARGETS)
def test_reports_cover_what_ships(target):
    """results/aot has every variant as it is shaped now, and none should not ship."""
    found = {Variant(r.target, r.kernel, r.head_dim, r.dtype, r.call): r for r in read(REPORTS / f"{target}.jsonl")}
    assert found.keys() == set(variants([target])), "run python tests/compile_ahead.py --output results/aot"
    for variant, report in found.items():
        assert shape_of(variant) == (report.own, report.loop, report.warps, report.stages), variant
        assert report.faults == [], variant


def test_what_is_written_is_read_back(tmp_path):
    """Compiling one target again keeps the others."""
    (first, *_), (second, *_) = (read(REPORTS / f"{target}.jsonl") for target in ("sm_90", "gfx942"))
    for report in (first, second):
        write(tmp_path, [report])
    assert read(tmp_path / "sm_90.jsonl") == [first]
    assert read(tmp_path / "gfx942.jsonl") == [second]


def test_faults_are_found():
    good = Report(
        "sm_90", "dq", 64, "bf16", "even", 128, 64, 8, 2, registers=200, spilled=0, shared=2**16, wgmma=9, mma=0,
        serialized=False, triton="3.6.0",
    )  # fmt: skip
    assert good.faults == []
    for fault in ({"spilled": 8}, {"shared": 2**18}, {"wgmma": 0, "mma": 9}, {"serialized": True}):
        assert len(replace(good, **fault).faults) == 1, fault


class AbsentGPU:
    """Answer what Triton asks a driver before it compiles."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def compiled(monkeypatch):
    """The names of the kernels that a call would launch: they are compiled for the tensors given, and not launched."""
    plan_cache.clear()  # of launches that are bound already
    names = []
    run = JITFunction.run

    def warm_up(self, *arguments, grid, warmup, **options):
        names.append(self.__name__)
        return run(self, *arguments, grid=grid, warmup=True, **options)

    monkeypatch.setattr(JITFunction, "run", warm_up)
    monkeypatch.setattr(backend, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(driver, "_active" if hasattr(driver, "_active") else "active", AbsentGPU())
    return names


def words_and_hidden(seed: int, hidden: torch.Tensor) -> Attributes:
    tokens = torch.arange(1024)
    return attributes_of(2, 4, tokens, tokens[:, None], seed=torch.tensor(seed), hidden=hidden[:, :, None])


def biased(table: torch.Tensor) -> dict[str, object]:
    """Return the bias and the attributes of a call with a table by difference, whose gradient is wanted."""
    normal = Normal(FORMS.index("relative"), table)
    tokens = torch.arange(1024)
    of_tokens = bias_attributes(normal, range(4), tokens, tokens[:, None], (0, 0))
    source = Source(normal.form, table, table.shape).with_sums()
    return {"bias": source, "attributes": Attributes().and_(*of_tokens)}


CALLS_OF_THE_BACKEND = {
    "branches in one launch": {"is_causal": False},
    "branches one after another": {"is_causal": True},
    "softcap": {"is_causal": False, "softcap": 30.0},
    "blocks": {"is_causal": True, "layouts": {1024: BlockLayout.local(1024, 256, 64).causal()}},
    "dropout and hidden keys": {
        "is_causal": False,
        "dropout_p": 0.7,
        "attributes": words_and_hidden(2**40, torch.zeros(2, 1024, dtype=torch.bool)),
    },
    "a bias": {"is_causal": False, **biased(torch.zeros(1, 4, 9))},
}


@pytest.mark.parametrize(
    "call",
    ["blocks", *(pytest.param(x, marks=pytest.mark.thorough) for x in CALLS_OF_THE_BACKEND if x != "blocks")],
)
def test_calls_bind_their_arguments(compiled, call):
    options = {"scale": 0.1} | CALLS_OF_THE_BACKEND[call]
    w, r = ((1024,), (1,)) if "layouts" in options else ((256, 1024), (1, 2))
    plan = plan_dilated(w, r, ((0, 0), (0, 1))[: len(w)], 1024)
    q, k, v = (torch.empty(2, 1024, heads, 48, dtype=torch.bfloat16) for heads in (4, 2, 2))
    out, lse = backend.forward(problem(plan, **options), q, k, v)
    backend.backward(problem(plan, **options), out, lse, q, k, v, out, lse)
    turns = 2 if call == "branches one after another" else 1
    expected = ["forward"] * turns + ["backward_stats"] + ["backward_dkdv"] * turns + ["backward_dq"] * turns
    assert compiled == expected


COPIED = ("TILES", "HIDDEN", "BIAS", "QUERY_AT", "KEY_AT")
"""The tensors that a call may copy, or view again, before it launches a kernel."""


class Launchable:
    """A compiled kernel that notes what it is launched with."""

    name = "forward"

    def __init__(self):
        self.launched = []

    def __getitem__(self, grid):
        return lambda *arguments: self.launched.append((grid, arguments))


def test_a_later_call_launches_what_the_first_one_compiled(monkeypatch):
    """The later call has its own tensors.

    For other alignments, strides and scales, on which the code depends, it compiles anew.
    """
    plan_cache.clear()
    compiled = []

    def run(kernel, programs, **arguments):
        compiled.append((Launchable(), programs, [arguments[name] for name in kernel.arg_names]))
        return compiled[-1][0]

    monkeypatch.setattr(backend, "run", run)
    monkeypatch.setattr(backend, "architecture", lambda device: "sm_90")
    plan = plan_dilated((256, 1024), (1, 2), ((0, 0), (0, 1)), 1024)

    def call(q, k, v, scale=0.1, is_causal=False):
        return backend.forward(problem(plan, is_causal=is_causal, scale=scale), q, k, v)

    def tensors():
        return [torch.empty(2, 1024, heads, 48, dtype=torch.bfloat16) for heads in (4, 2, 2)]

    call(*tensors())
    first, programs, arguments = compiled.pop()
    q, k, v = tensors()
    out, lse = call(q, k, v)
    (grid, launched), *rest = first.launched
    assert not compiled
    assert not rest
    assert grid == (programs, 1, 1)
    assert all(x is y for x, y in zip(launched, (q, k, v, out, lse), strict=False))
    assert all(x is y or x == y for x, y in zip(launched[5:], arguments[5:], strict=True))
    wide = torch.empty(2, 1024, 4, 64, dtype=torch.bfloat16)
    misaligned = torch.empty(2 * 1024 * 4 * 48 + 1, dtype=torch.bfloat16)[1:].view(q.shape)
    for other in ((wide[..., :48], k, v), (misaligned, k, v), (q.half(), k.half(), v.half())):
        call(*other)
        assert len(compiled) == 1, "one launch, compiled for these"
        compiled.clear()
    call(q, k, v, scale=0.2)
    assert len(compiled) == 1
    assert len(first.launched) == 1
    turned = q[..., 0:1].expand(q.shape)  # rows of stride 0 are copied, call by call
    call(turned, k, v)
    call(turned, k, v)
    assert len(first.launched) == 3


def test_launches_of_ever_new_kinds_are_not_all_kept():
    held = {}
    for scale in range(3 * backend.MOST_BOUND):
        backend._bound(held, (), (scale,), lambda: (backend.Bound(None, 1, (), {}),))
    assert len(held) <= backend.MOST_BOUND


@pytest.mark.parametrize("call", CALLS_OF_THE_BACKEND)
def test_a_bound_launch_has_the_arguments_of_a_first_one(monkeypatch, call):
    """Also lists, hidden keys and words of dropout that are new, and the statistics of a backward."""
    plan_cache.clear()
    launched = []

    class Compiled:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            return lambda *x: launched.append(
                (self.kernel, grid[0], dict(zip(self.kernel.arg_names, x, strict=True)), True)
            )

    def run(kernel, programs, **arguments):
        launched.append((kernel, programs, {name: arguments[name] for name in kernel.arg_names}, False))
        return Compiled(kernel)

    monkeypatch.setattr(backend, "run", run)
    monkeypatch.setattr(backend, "architecture", lambda device: "sm_90")
    w, r = ((1024,), (1,)) if call == "blocks" else ((256, 1024), (1, 2))
    plan = plan_dilated(w, r, ((0, 0), (0, 1))[: len(w)], 1024)

    def tensors(window, word):
        q, k, v, out, dout = (torch.rand(2, 1024, n, 48, dtype=torch.bfloat16) for n in (4, 2, 2, 4, 4))
        gradients = tuple(torch.rand(x.shape) for x in (q, k, v))
        new = {
            "layouts": {1024: BlockLayout.local(1024, window, 64).causal()},
            "attributes": words_and_hidden(word, torch.rand(2, 1024) < 0.5),
        }  # fmt: skip
        if call == "a bias":
            new = biased(torch.rand(1, 4, 9))
        options = {name: new.get(name, x) for name, x in CALLS_OF_THE_BACKEND[call].items()} | {"scale": 0.1}
        return (q, k, v), (out, torch.rand(2, 1024, 4)), dout, gradients, options

    def all_launches(x, merged, dout, gradients, options):
        launched.clear()
        backend.forward(problem(plan, **options), *x, state=merged)
        backend.backward(problem(plan, **options), dout, merged[1], *x, *merged, state=gradients)
        return launched.copy()

    assert not any(again for *_, again in all_launches(*tensors(256, 1))[:2])
    second = tensors(128, 2)
    found = all_launches(*second)
    plan_cache.clear()
    expected = all_launches(*second)
    assert all(again for *_, again in found)
    for (*one, x, _), (*other, y, _) in zip(found, expected, strict=True):
        assert one == other
        for name, value in y.items():
            if name == "STATS":
                assert x[name].shape == value.shape
            else:
                assert x[name] is value or (torch.equal if name in COPIED else operator.eq)(x[name], value), name
