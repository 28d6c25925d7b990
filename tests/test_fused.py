"""The fused operators of CUDA, which no test runs: their calls bind and give the right shapes, on meta tensors."""

from __future__ import annotations

import pytest
import torch

from dilated_attention.backends import fused, native
from dilated_attention.plan import plan_dilated


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("with_lse", [False, True], ids=["out", "out and lse"])
@pytest.mark.parametrize("kind", ["cuda_flash", "cuda_efficient"])
def test_schemas_bind(kind, with_lse, is_causal, monkeypatch):
    kinds = []
    monkeypatch.setattr(fused, "_kind", lambda *x: kinds.append(kind) or kind)
    q, k, v = (torch.empty(2, 100, heads, 24, dtype=torch.bfloat16, device="meta") for heads in (4, 2, 2))
    plan = plan_dilated((32, 100), (1, 2), ((0, 0), (0, 1)), 100)
    out, lse = native.forward(q, k, v, plan, is_causal=is_causal, scale=0.1)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (2, 100, 4), torch.float32)
    dlse = lse if with_lse else None
    gradients = native.backward(out, dlse, q, k, v, out, lse, plan, is_causal=is_causal, scale=0.1)
    assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in (q, k, v)]
    assert len(kinds) > 4


@pytest.mark.usefixtures("unchecked")
def test_kinds():
    class CUDA:  # a tensor's facts that the choice reads
        device = torch.device("cuda")

        def __init__(self, dtype, head_dim):
            self.dtype, self.shape = dtype, (1, 1, 64, head_dim)

    for dtype, head_dim, kind in (
        (torch.bfloat16, 64, "cuda_flash"),
        (torch.float16, 264, "cuda_efficient"),
        (torch.float32, 64, "cuda_efficient"),
        (torch.float64, 64, "plain"),
        (torch.bfloat16, 20, "plain"),
    ):
        x = CUDA(dtype, head_dim)
        assert fused._kind(x, x, None) == kind
        assert fused._kind(x, x, torch.zeros(1)) == "plain"
