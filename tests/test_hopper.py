"""The candidate for Hopper: what it computes, by emulation; what the compiler makes of it; and what it refuses."""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version

pytest.importorskip("triton", minversion="3.5", reason="on Linux only, and Gluon as Triton 3.5 has it")

import triton
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import emulation
from conformance import problem
from dilated_attention.backends import native
from dilated_attention.errors import UnsupportedError
from dilated_attention.patterns import Dilated
from dilated_attention.plan import plan_dilated
from dilated_attention_bench import hopper
from dilated_attention_bench.compile_ahead import SHARED_LIMIT, loops, machine_code
from tolerances import TOLERANCE, relative_error


def launch(w, r, seq_len, heads=2, kv_heads=2, head_dim=64, batch=1, dtype=torch.bfloat16, **options):
    plan = plan_dilated(w, r, Dilated(w, r).offset_table(kv_heads), seq_len, **options)
    q, k, v = (torch.randn(batch, seq_len, n, head_dim).to(dtype) for n in (heads, kv_heads, kv_heads))
    return plan, hopper.prepare(q, k, v, plan, head_dim**-0.5)


def emulate(call, seed):
    """out and lse of a launch, by the kernel's own code."""
    device = emulation.Device(seed)
    kernel = device.import_again(hopper).forward
    boxes = [emulation.Box(x=x, rows=rows, columns=call.q.shape[3]) for x, rows in call.views()]
    out, lse = torch.full_like(call.q, torch.nan), torch.full(call.q.shape[:3], torch.nan)
    batch, tokens, heads, _ = call.q.shape
    device.launch(
        kernel, call.grid, *boxes,
        *(emulation.Pointer(x.view(-1)) for x in (out, lse, call.table.lines)), batch, heads, call.k.shape[2], tokens,
        call.scale * hopper.LOG2E.value, *call.constants().values(),
    )  # fmt: skip
    return out, lse


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "case",
    [
        {"w": (256, 512), "r": (1, 2), "seq_len": 1024},
        {"w": (512, 1024), "r": (1, 4), "seq_len": 1024, "kv_heads": 1, "batch": 2},
        {"w": (128, 512), "r": (1, 1), "seq_len": 512, "head_dim": 128, "dtype": torch.float16},
        {"w": (128,), "r": (1,), "seq_len": 256},
    ],
    ids=lambda case: f"{case['w']} {case['r']}",
)
def test_emulated(case, seed):
    plan, call = launch(**case)
    found = emulate(call, seed)
    q, k, v = (x.double() for x in (call.q, call.k, call.v))
    expected = native.forward(problem(plan, is_causal=False, scale=call.scale), q, k, v)
    for x, y in zip(found, expected, strict=True):
        assert relative_error(x, y) <= TOLERANCE[call.q.dtype]


@pytest.mark.slow
@pytest.mark.skipif(
    Version(triton.__version__) >= Version("3.9"),
    reason="Gluon of Triton 3.9 gave async_copy_global_to_shared another name",
)
@pytest.mark.parametrize("head_dim", hopper.TILES_IN_FLIGHT)
def test_machine_code(head_dim, monkeypatch):
    """Compiled for sm_90 as a call would, without a GPU: nothing spilled, TMA, and in both warpgroups all exponentials
    of a step between the products that it issues and the wait for them."""
    from test_kernels_compile import AbsentGPU

    compiled, run = [], JITFunction.run

    def warm_up(self, *arguments, grid, warmup, **options):
        compiled.append(run(self, *arguments, grid=grid, warmup=True, **options))

    monkeypatch.setattr(JITFunction, "run", warm_up)
    monkeypatch.setattr(driver, "_active", AbsentGPU())
    launch((512, 1024), (1, 4), 1024, head_dim=head_dim)[1]()
    (kernel,) = compiled
    # else Triton makes no launcher: it looks for descriptors among the arguments, 3.6 and 3.7 not inside of tuples
    descriptors = [x for x in kernel.src.signature.values() if str(x).startswith("tensordesc")]
    assert len(descriptors) == len(kernel.metadata.tensordesc_meta) == 3 * hopper.MOST_STRIDES
    code = machine_code(kernel)
    assert code["spilled"] == 0
    assert code["wgmma"] > 0
    assert not code["serialized"]
    assert "cp.async.bulk.tensor" in kernel.asm["ptx"]
    assert kernel.metadata.shared <= SHARED_LIMIT["sm_90"]
    steps = loops(kernel)
    assert len(steps) == 2
    for step in steps:
        at = {
            name: [i for i, x in enumerate(step) if name in x] for name in ("HGMMA", "MUFU.EX2", "DEPBAR.LE gsb0, 0x0")
        }
        issued, exponentials, (waited,) = at.values()
        assert len(exponentials) > hopper.ROWS.value * hopper.TILES_IN_FLIGHT[head_dim][0] // 128  # threads
        assert issued[-1] < exponentials[0] <= exponentials[-1] < waited


def test_the_paper_s_pattern_is_served():
    _, call = launch((2048, 4096, 8192, 16384), (1, 2, 4, 8), 16384)
    assert (call.strides, call.table.spans) == ((1, 2, 4, 8), 4)


def test_refusals():
    for case, why in (
        ({"w": (128,), "r": (1,), "seq_len": 256, "head_dim": 32}, "head_dim"),
        ({"w": (128,), "r": (1,), "seq_len": 256, "dtype": torch.float32}, "16 bits"),
        ({"w": (128,), "r": (1,), "seq_len": 320}, "full tiles"),
        ({"w": (512,), "r": (2,), "seq_len": 512}, "covers all rows"),
        ({"w": (128, 512), "r": (1, 4), "seq_len": 1024}, "one launch"),
        ({"w": (4096,) * 6, "r": (1, 2, 4, 8, 16, 32), "seq_len": 4096, "heads": 32, "kv_heads": 32}, "5 strides"),
    ):
        with pytest.raises(UnsupportedError, match=why):
            launch(**case)
