"""Check what depends on the processor or the GPU under the facts of each one, on whichever machine the tests run."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given

import processors
from conformance import random_calls
from dilated_attention import Dilated, Window, attention, explain
from dilated_attention.backends import cpu, table, triton
from dilated_attention.backends.facts import Facts
from dilated_attention.backends.table import BACKENDS
from dilated_attention.kernels.configurations import ARCHITECTURES
from test_explain import both, calls, recording

DENSE = Dilated((256,), (1,))


@pytest.fixture
def processor(request, monkeypatch) -> str:
    """The processor of this name, for whose kernels the machine's stand in."""
    monkeypatch.setattr(cpu, "_MISSING", None)
    processors.pretend(request.param, monkeypatch.setattr)
    return request.param


on_each = pytest.mark.parametrize("processor", processors.PROCESSORS, indirect=True)


def chosen(dtype, head_dim=16, pattern=DENSE, **options):
    q = torch.empty(1, 256, 2, head_dim, dtype=dtype)
    return explain(q, q, q, pattern, **options)


@on_each
def test_auto_takes_the_kernels_where_they_are_faster(processor):
    """Native multiplies bfloat16 in tiles that the kernels did not get; nobody has timed the kernels on arm64."""
    assert chosen(torch.float64).backend == "native"
    for dtype in cpu.TYPES:
        found = chosen(dtype)
        name = cpu.instruction_set_of(dtype)
        why = found.refusals.get("cpu", "")
        if "NEON" in processor:
            assert found.backend == "native"
            assert "bench cpu" in why
        elif processor == "AMX without tiles" and dtype == torch.bfloat16:
            assert found.backend == "native"
            assert "AMX, which this process did not get" in why
        else:
            assert found.backend == "cpu"
            assert name in found.reason
            assert chosen(dtype, softcap=2.0).backend == "cpu"
        assert name in chosen(dtype, backend="cpu").reason
        assert ("AMX" in name) == (processor == "AMX" and dtype != torch.float32)


@on_each
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", cpu.TYPES, ids=str)
def test_a_choice_rests_on_no_number_of_keys(processor, dtype, head_dim):
    """Native computes narrow windows in chunks, on a Xeon with AMX at 6 to 29 GFLOP/s, and the kernels at 17 to 70."""
    usual = chosen(dtype, head_dim).backend
    for pattern in (Window(1), Window(16), Window(128), Dilated((4,), (1,)), Window(3) + Dilated((8,), (2,))):
        assert chosen(dtype, head_dim, pattern).backend == usual
        assert chosen(dtype, head_dim, pattern, is_causal=True).backend == usual


def test_float32_in_halves_by_the_switch(monkeypatch):
    processors.pretend("AMX", monkeypatch.setattr)
    assert cpu.instruction_set_of(torch.float32) == "AVX-512"
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert cpu.instruction_set_of(torch.float32).startswith("AMX with bfloat16, each number as two, by set_float32")
    monkeypatch.setattr(cpu, "PROCESSOR", processors.PROCESSORS["AMX without tiles"])
    assert cpu.instruction_set_of(torch.float32) == "AVX-512"


@random_calls(10)
@given(call=calls())
@processors.by_name
def test_explain_says_what_runs(processor, call):
    ran: list[str] = []
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(BACKENDS, recording(ran)):
        processors.pretend(processor, patch.setattr)
        said, done = both(call, ran)
    assert said == done


@on_each
@pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))
@pytest.mark.parametrize("dtype", cpu.TYPES, ids=str)
def test_tables_of_other_tiles_give_the_same_numbers(processor, dtype, monkeypatch):
    """Tiles hold as many rows as on that processor."""
    inputs = [torch.randn(1, 300, 2, 16, dtype=dtype, requires_grad=True) for _ in range(3)]
    found = []
    for one in (processor, None):
        if one is None:
            monkeypatch.undo()
        out = attention(*inputs, Window(9) + Dilated((64,), (2,)), backend="cpu")
        found.append((out, *torch.autograd.grad(out.float().square().sum(), inputs)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_compiled_and_exported(compiling_python):
    """Any processor's choice is made in one graph for all lengths and widths, and in a program of torch.export."""
    compiling_python(
        """
        import processors
        import torch
        from dilated_attention import Dilated, Window, attention

        class Attention(torch.nn.Module):
            def forward(self, *x):
                half = [y.bfloat16() for y in x]
                return attention(*x, Window(3), is_causal=True), attention(*half, Dilated([8, 32], [1, 4]))

        layer, length = Attention(), torch.export.Dim("length", min=2, max=4096)
        for name in ("AVX2", "AVX-512", "AVX-512 with bfloat16", "AMX", "NEON"):
            processors.pretend(name)
            torch.compiler.reset()
            compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)
            for n, head_dim in ((32, 8), (40, 12)):
                inputs = [torch.randn(1, n, 2, head_dim) for _ in range(3)]
                assert all(map(torch.equal, compiled(*inputs), layer(*inputs)))
            program = torch.export.export(layer, tuple(inputs), dynamic_shapes=[({1: length},) * 3]).module()
            inputs = [x[:, :30] for x in inputs]
            assert all(map(torch.equal, program(*inputs), layer(*inputs)))
        """,
        "AVX2",
    )


# ---- GPUs

CAPABILITIES = {(8, 0): "sm_80", (8, 6): "sm_86", (8, 9): "sm_86", (9, 0): "sm_90", (10, 0): "sm_100", (12, 0): "sm_86"}


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_the_architecture_of_a_capability(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert triton._architecture.__wrapped__(torch.device("cuda")) == CAPABILITIES[capability]


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "interpreter"])
@pytest.mark.usefixtures("unchecked")
def test_auto_decides_alike_on_every_gpu(name, monkeypatch):
    """Eager and compiled: `auto` takes triton where results/ show it right and faster, else native."""
    monkeypatch.setattr(triton, "_architecture", lambda device: name)
    monkeypatch.setattr(triton, "_refusal_of", lambda device: None)
    monkeypatch.setattr(table, "Choice", lambda backend, *reason: backend)  # the checked class cannot be traced
    facts = [
        Facts(torch.device("cuda"), dtype, 64, 4096, needs, work)
        for dtype in (torch.float32, torch.bfloat16)
        for needs in ((), ("a window",))
        for work in (1, 2**40)
    ]

    def names(x):
        return x + 1, [table.choose("auto", one).name for one in facts]

    expected = ["triton" if name == "sm_90" and (x.needs or x.work > 1) else "native" for x in facts]
    torch.compiler.reset()
    assert names(torch.zeros(1))[1] == expected
    assert torch.compile(names, backend="eager", fullgraph=True)(torch.zeros(1))[1] == expected
