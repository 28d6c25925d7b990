"""The private names of PyTorch that the library uses are there, and mean what it takes them to mean."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import dilated_attention
from dilated_attention import UnsupportedError, torch_internals

ROOT = Path(dilated_attention.__file__).parent
# A private name of a module, or of its C part: torch._C._name, dist.distributed_c10d._name, ops.aten._name.
PRIVATE = re.compile(r"(^|\.)(torch|dist|distributed_c10d|aten|forward_ad)\._(?!_)")


def test_operators_of_attention():
    q = torch.randn(2, 4, 33, 8)
    out, lse = torch_internals.flash_for_cpu(q, q, q, 0.0, True, attn_mask=None, scale=0.3)
    scores = (0.3 * q @ q.mT).masked_fill(torch.ones(33, 33).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, scores.softmax(-1) @ q, rtol=1e-5, atol=1e-5)
    for name in ("flash", "efficient"):
        for suffix in ("", "_backward"):
            schema = str(getattr(torch_internals, name + suffix).default._schema)
            assert re.search("log_?sumexp", schema)
            assert "is_causal" in schema


def test_transforms_and_modes_are_noticed():
    x = torch.randn(3)
    seen = []

    def look(x):
        seen.append((torch_internals.in_torch_func(), torch_internals.in_forward_mode()))
        return x.sum()

    look(x)
    torch.func.grad(look)(x)
    with forward_ad.dual_level():
        look(x)
    assert seen == [(False, False), (True, False), (False, True)]

    mapped = []
    torch.func.vmap(
        lambda x, y: (mapped.extend([torch_internals.is_mapped(x), torch_internals.is_mapped(y)]), x)[1], (0, None)
    )(x, x)
    assert mapped == [True, False]

    assert not torch_internals.observed(x)
    assert torch_internals.observed(torch.nn.Parameter(x))
    assert torch_internals.observed(torch._neg_view(x))
    with FlopCounterMode(display=False):
        assert torch_internals.observed(x)
        with torch_internals.unobserved():
            assert not torch_internals.observed(x)


def test_gradients_that_autograd_maps_over():
    seen = []

    class Triple(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 3 * x, 3 * x

        @staticmethod
        def backward(ctx, dy, dz):
            seen.append(torch_internals.in_batched_gradients(dy, dz))
            return 3 * (dy + dz)

    x, weights = torch.randn(4, requires_grad=True), torch.randn(2, 5, 4)
    y, z = Triple.apply(x)
    for together in (((y, z), tuple(weights)), ((y,), tuple(weights[:1]))):
        (mapped,) = torch.autograd.grad(together[0], x, together[1], retain_graph=True, is_grads_batched=True)
        torch.testing.assert_close(mapped, 3 * sum(together[1]))
    torch.autograd.grad((y, z), x, tuple(weights[:, 0]))
    assert seen == [True, True, False]


def test_a_false_condition_raises():
    torch_internals.require_when_run(torch.tensor(True), "wrong")
    with pytest.raises(RuntimeError, match="wrong"):
        torch_internals.require_when_run(torch.tensor(False), "wrong")
    torch_internals.require_true(torch.tensor(True), "wrong")
    with pytest.raises(UnsupportedError, match="wrong"):
        torch_internals.require_true(torch.tensor(False), "wrong")
    with pytest.raises(UnsupportedError, match="wrong"):
        torch.func.vmap(lambda x: torch_internals.require_true(x, "wrong"))(torch.tensor([True, False]))


def test_no_size_is_a_symbol_where_nothing_is_exported():
    compiled = torch.compile(lambda x: x + torch_internals.is_symbol(x.shape[0]), backend="eager", fullgraph=True)
    assert compiled(torch.zeros(3)).sum() == 0


def test_private_names_are_used_nowhere_else():
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for file in ROOT.rglob("*.py")
        if file.name != "torch_internals.py"
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and PRIVATE.search(ast.unparse(node))
    ]
    assert found == []
