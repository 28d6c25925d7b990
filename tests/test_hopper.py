"""The kernel for Hopper: what the compiler makes of it, and which launches it serves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from packaging.version import Version

pytest.importorskip("triton", minversion="3.6", reason="on Linux only, and Gluon as Triton 3.6 has it")

import triton

if Version(triton.__version__) >= Version("3.9"):
    pytest.skip("Gluon of Triton 3.9 gave async_copy_global_to_shared another name", allow_module_level=True)

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.driver import driver

from compile_ahead import SHARED_LIMIT, _machine_code, loops
from dilated_attention.backends import tiles
from dilated_attention.kernels import hopper
from dilated_attention.layout import BlockLayout
from dilated_attention.patterns import Dilated
from dilated_attention.plan import plan_dilated
from test_kernels_compile import AbsentGPU


def fused(seq_len=2048, heads=2, kv_heads=2, head_dim=128, batch=1, dtype=torch.bfloat16, more=0):
    """q, k and v, which are slices of one tensor."""
    x = torch.zeros(batch, seq_len, heads + 2 * kv_heads, head_dim + more, dtype=dtype)[..., :head_dim]
    return x[:, :, :heads], x[:, :, heads : heads + kv_heads], x[:, :, heads + kv_heads :]


def table_of(w, r, seq_len=2048, kv_heads=2, block_size=None, **options):
    """The first table of a call, with lists of blocks if they have a size."""
    plan = plan_dilated(w, r, Dilated(w, r).offset_table(kv_heads), seq_len, **options)
    layouts = None
    if block_size:
        layouts = {n // s: BlockLayout.local(n // s, n // s, block_size) for n, s in zip(w, r, strict=True)}
    shape = hopper.SHAPE.cut(*tiles.longest(plan, "queries", layouts))
    return tiles.tables(plan, "queries", shape, layouts, torch.device("cpu"))[0], shape


SERVED = {
    "one span": ((2048,), (1,), None),
    "four spans": ((2048, 4096, 8192, 16384), (1, 2, 4, 8), None),
    "five spans": ((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16), None),
    "blocks of 128": ((2048,), (1,), 128),
    "blocks of 256": ((2048,), (2,), 256),
}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (case, dtype)
        if (case, dtype) == ("blocks of 128", torch.bfloat16)
        else pytest.param(case, dtype, marks=pytest.mark.thorough)
        for case in SERVED
        for dtype in (torch.bfloat16, torch.float16)
    ],
)
def test_machine_code(case, dtype, monkeypatch):
    """Compiled for sm_90 as a call would, without a GPU: nothing spilled, TMA, and in both warpgroups all exponentials
    of a step between the products that it issues and the wait for them."""
    monkeypatch.setattr(driver, "_active", AbsentGPU())
    w, r, size = SERVED[case]
    table, shape = table_of(w, r, w[-1], block_size=size)
    assert (table.spans, table.strides) == (len(r), (r[-1:], r))
    q, k, v = fused(w[-1], dtype=dtype)
    assert hopper.fits(table, shape, q, k, v)
    descriptors = hopper.boxes(table, q, k, v)(q, k, v)
    lists = torch.zeros(9, dtype=torch.int64) if size else None
    kernel = hopper.forward.run(
        **descriptors, OUT=torch.empty(q.shape, dtype=dtype), LSE=torch.empty(q.shape[:3]), INDPTR=lists,
        INDICES=lists, scale=0.1, B=1, N=w[-1], M=w[-1], H=2, qsn=768, qsh=128, ksn=768, ksh=128, vsn=768, vsh=128,
        lsb=0, lsh=0, G=1, UNIT=1, SIZE=size or 1, LH=1, **hopper.constants(table), grid=(1,), warmup=True,
    )  # fmt: skip
    # Triton makes a launcher only if the descriptors that it finds among the arguments are all there are.
    found = [x for x in kernel.src.signature.values() if str(x).startswith("tensordesc")]
    assert len(found) == len(kernel.metadata.tensordesc_meta) == len(table.strides[0]) + 2 * len(table.strides[1])
    code = _machine_code(kernel)
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
        assert len(exponentials) > hopper.ROWS.value * hopper.SHAPE.loop // 128  # threads
        assert issued[-1] < exponentials[0] <= exponentials[-1] < waited


@pytest.mark.parametrize("stride", [1, 4])
def test_a_box_of_a_descriptor_is_a_span(stride):
    """The rows of each span, read through the view that the descriptor describes, for slices of a fused projection."""
    table, _ = table_of((512,), (stride,), kv_heads=1)
    x = torch.randn(2, 2048, 6, 128).bfloat16()
    q, k, v = x[:, :, :4], x[:, :, 4:5], x[:, :, 5:]
    found = hopper.boxes(table, *fused(batch=2, heads=4, kv_heads=1))(q, k, v)
    assert sum(box is not None for box in found.values()) == 3
    for box, y in ((found["Q1"], q), (found["K1"], k), (found["V1"], v)):
        assert type(box) is TensorDescriptor
        view = box.base.as_strided(box.shape, box.strides)  # raises past the end of the memory
        for b, start, head in ((0, 0, 0), (1, 512 + stride - 1, y.shape[2] - 1)):
            row, column = b * (2048 // stride) + start // stride, (start % stride) * y.stride(1) + head * y.stride(2)
            rows = view[row : row + 128, column : column + 128]
            assert torch.equal(rows, y[b, start : start + 128 * stride : stride, head])


def test_launches_that_it_serves():
    table, shape = table_of((2048,), (2,))
    q, k, v = fused(batch=2)
    assert hopper.fits(table, shape, q, k, v)
    assert hopper.fits(table, shape, *fused(heads=8))
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    short = torch.zeros(2, 2047, 2, 128, dtype=q.dtype)
    for tensors in (
        fused(dtype=torch.float32), fused(head_dim=64), fused(more=4), (turned, k, v), (q, short, short),
        (q.new_zeros(q.numel() + 1)[1:].view(q.shape), k, v), (q[:1].expand(q.shape), k, v),
    ):  # fmt: skip
        assert not hopper.fits(table, shape, *tensors)
    for change in (
        {"even": False}, {"edge": 1}, {"chain": True}, {"is_causal": True}, {"banded": True}, {"phantoms": True},
        {"strides": ((1,), (1, 2, 4, 8, 16, 32))}, {"strides": ((3,), (1,))},
    ):  # fmt: skip
        assert not hopper.fits(replace(table, **change), shape, q, k, v)
    assert not hopper.fits(table, shape._replace(loop=64), q, k, v)
    assert not hopper.fits(*table_of((2048,), (1,), block_size=64), q, k, v)
