"""A scale of any sign: the same on every backend, in every transform."""

from __future__ import annotations

import math

import pytest
import torch

from dilated_attention import BlockLayout, Dilated, attention
from dilated_attention.backends import cpu
from dilated_attention.decoding import cached_attention
from tolerances import TOLERANCE, relative_error

without_kernels = pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))

N = 40
PATTERNS = {
    "dense": Dilated((N,), (1,)),
    "branches": Dilated((16, N), (1, 3)),
    "layout": BlockLayout.local(N, 20, 16),
    "product": Dilated((32, N), (1, 2)) * (lambda n: BlockLayout.local(n, 9, 16)),
}
SCALES = (-0.4, -1.0, 0.0, -0.0, 1e-60, -1e-60)  # 1e-60 is 0 in single precision


def results(call, dtype, **options):
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(2, N, h, 8, generator=generator).to(dtype).requires_grad_() for h in (4, 2, 2)]
    out, lse = call(*leaves, return_lse=True, **options)
    finite = lse.masked_fill(lse == -math.inf, 0.0)
    return out, lse, *torch.autograd.grad(out.double().sin().sum() + finite.double().sin().sum(), leaves)


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_backends_agree(pattern, is_causal):
    """`test_properties` and `test_blocks` draw a scale of any sign for calls of every kind."""
    for scale in (-0.4, 0.0, 1e-60):
        options = {"pattern": PATTERNS[pattern], "is_causal": is_causal, "scale": scale, "lengths": [N, 23]}
        expected = results(attention, torch.float64, **options, backend="reference")
        for dtype in (torch.float64, torch.float32):
            found = results(attention, dtype, **options, backend="native")
            bar = TOLERANCE[dtype] * 3  # of sums that may cancel; `test_properties` has the exact bars
            for actual, wanted in zip(found, expected, strict=True):
                assert actual.isnan().sum() == 0
                finite = wanted.isfinite()
                assert (actual.double() - wanted)[finite].norm() <= bar * max(1, wanted[finite].norm())


def test_a_scale_of_zero_takes_the_mean_and_passes_q_and_k_no_gradient():
    out, lse, dq, dk, _ = results(attention, torch.float64, pattern=PATTERNS["dense"], is_causal=True, scale=0.0)
    assert torch.equal(lse, torch.arange(1, N + 1).double().log().expand(2, 4, N))
    assert dq.abs().max() == dk.abs().max() == 0
    mean = results(attention, torch.float64, pattern=PATTERNS["dense"], is_causal=True, scale=0.0, backend="reference")
    assert relative_error(out, mean[0]) <= TOLERANCE[torch.float64]


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("name", "qk")
def test_zero_times_nan_is_nan(name, backend):
    """The definition, scale q·k, says so: nothing is hidden by a scale of 0."""
    tensors = {x: torch.randn(1, N, 1, 8) for x in "qkv"}
    tensors[name][0, 30] = math.nan
    _, lse = attention(
        *tensors.values(), PATTERNS["dense"], is_causal=True, scale=0.0, backend=backend, return_lse=True
    )
    seen = torch.arange(N) == 30 if name == "q" else torch.arange(N) >= 30
    assert torch.equal(lse[0, 0].isnan(), seen)


def test_under_transforms():
    q, k, v = torch.randn(3, 3, 1, N, 2, 8, dtype=torch.float64)
    for scale in (-0.4, 0.0):

        def call(q, k, v, scale=scale):
            return attention(q, k, v, PATTERNS["branches"], is_causal=True, scale=scale)

        each = torch.stack([call(*x) for x in zip(q, k, v, strict=True)])
        torch.testing.assert_close(torch.vmap(call)(q, k, v), each, rtol=0, atol=1e-14)
        leaf = q[0].clone().requires_grad_()
        expected = torch.autograd.grad(call(leaf, k[0], v[0]).sin().sum(), leaf)[0]
        gradient = torch.func.grad(lambda q, call=call: call(q, k[0], v[0]).sin().sum())(q[0])
        assert torch.equal(gradient, expected)


@pytest.mark.parametrize("scale", SCALES)
def test_decoding(scale):
    q, k, v = (torch.randn(2, N, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    pattern = PATTERNS["branches"]
    whole = attention(q, k, v, pattern, is_causal=True, scale=scale, backend="reference")[:, -3:]
    newest = cached_attention(q[:, -3:], k, v, pattern, scale=scale)
    torch.testing.assert_close(newest, whole, rtol=0, atol=1e-12)
    pair = [torch.autograd.grad(x.sin().sum(), (q, k, v)) for x in (newest, whole)]
    torch.testing.assert_close(*pair, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scale", [1e39, -1e300])
def test_what_single_precision_cannot_hold_is_refused(scale):
    q = torch.randn(1, 4, 1, 8)
    with pytest.raises(ValueError, match="scale must be a finite number, in single precision too; got "):
        attention(q, q, q, Dilated((4,), (1,)), scale=scale)


@pytest.mark.parametrize("backend", ["native", pytest.param("cpu", marks=without_kernels)])
@pytest.mark.parametrize("scale", [1e38, 3e38, -3.4e38])
def test_a_scale_that_only_just_fits(scale, backend):
    """It is multiplied by log2 e on the way."""
    q, k, v = torch.randn(3, 1, N, 2, 8)
    q, k = q * 1e-18, k * 1e-20
    call = {"is_causal": True, "return_lse": True}
    expected = attention(q.double(), k.double(), v.double(), PATTERNS["dense"], scale=scale, backend="native", **call)
    for found, wanted in zip(
        attention(q, k, v, PATTERNS["dense"], scale=scale, backend=backend, **call), expected, strict=True
    ):
        assert relative_error(found, wanted) <= 3 * TOLERANCE[torch.float32]
