"""What it takes to add a backend: one file with four functions, and one line of the registry."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from dilated_attention import BackendError, Dilated, attention, explain
from dilated_attention.backends import native
from dilated_attention.backends.table import BACKENDS, Backend

# The file: here native with scores in double precision.


def refusal(facts):
    return None if facts.dtype == torch.float32 else f"it rounds from double to float32, not to {facts.dtype}"


def on_request(facts):
    return "slow; only on request"


def forward(q, k, v, plan, **options):
    out, lse = native.forward(q.double(), k.double(), v.double(), plan, **options)
    return out.float(), lse.float()


def backward(dout, dlse, q, k, v, out, lse, plan, **options):
    wide = (None if x is None else x.double() for x in (dout, dlse, q, k, v, out, lse))
    return tuple(x.float() for x in native.backward(*wide, plan, **options))


# The line of the registry.
DOUBLE = Backend("double", "never chosen by auto", refusal, on_request, forward, backward)


def test_a_new_backend():
    pattern, inputs = Dilated((16, 64), (1, 4)), torch.randn(3, 1, 50, 4, 8).requires_grad_()
    with mock.patch.dict(BACKENDS, {"double": DOUBLE}):
        results = {name: attention(*inputs, pattern, is_causal=True, backend=name) for name in ("double", "native")}
        gradients = [torch.autograd.grad(out.sin().sum(), inputs)[0] for out in results.values()]
        assert explain(*inputs, pattern).refusals["double"] == "slow; only on request"
        with pytest.raises(BackendError, match=r"rounds from double to float32, not to torch\.float16"):
            attention(*inputs.half(), pattern, backend="double")
    assert not torch.equal(*results.values())
    torch.testing.assert_close(*results.values(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)
