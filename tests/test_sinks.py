"""Sinks, and values of another head_dim than keys: on every call, backend and transform."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import processes
from dilated_attention import BlockLayout, Dilated, attention, attention_weights
from dilated_attention.backends.facts import Facts
from dilated_attention.backends.reference import count_matrix
from dilated_attention.backends.table import BACKENDS
from dilated_attention.decoding import cached_attention, first_token_attention
from dilated_attention.parallel import sequence_range
from tolerances import TOLERANCE, relative_error

N, HEADS, KV_HEADS = 32, 4, 2
PATTERNS: dict[str, tuple[object, Callable[[], Tensor]]] = {
    "branches": (
        Dilated((16, N), (1, 3)),
        lambda: count_matrix((16, N), (1, 3), ((0, 0), (0, 1)), N, is_causal=False),
    ),
    "blind rows": (Dilated((N,), (3,)), lambda: count_matrix((N,), (3,), ((0, 1),), N, is_causal=False)),
    "layout": (BlockLayout.local(N, 5, (4, 3)), lambda: BlockLayout.local(N, 5, (4, 3)).dense_mask()[0]),
}
WIDTHS = [(8, 8), (8, 5), (5, 8)]  # of keys, of values


def served(dtype: torch.dtype, name: str) -> list[str]:
    needs = ("a block layout",) if name == "layout" else ()
    return [x for x, b in BACKENDS.items() if b.refusal(Facts(torch.device("cpu"), dtype, 8, N, needs)) is None]


def tensors(widths: tuple[int, int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    keys, values = widths
    shapes = (2, N, HEADS, keys), (2, N, KV_HEADS, keys), (2, N, KV_HEADS, values), (HEADS,)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def by_definition(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """out_i = sum_j c exp(s_ij) v_j / (exp(sink) + sum_j c exp(s_ij)), and lse without the sink."""
    k, v, counts = (x.repeat_interleave(HEADS // x.shape[dim], dim) for x, dim in ((k, 2), (v, 2), (counts, -3)))
    weights = torch.einsum("bihd,bjhd->bhij", q, k).mul(q.shape[3] ** -0.5).exp() * counts
    total = weights.sum(-1)
    out = torch.einsum("bhij,bjhd->bihd", weights / (total + sinks.exp()[:, None])[..., None], v)
    return out, total.masked_fill(total == 0, 1.0).log().masked_fill(total == 0, -math.inf)


def results(call: Callable[..., tuple[Tensor, Tensor]], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    out, lse = call(*leaves)
    loss = out.double().sin().sum() + lse.masked_fill(lse == -math.inf, 0.0).double().sin().sum()
    return out, lse, *torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PATTERNS)
def test_out_lse_and_gradients_are_those_of_the_definition(name, dtype):
    pattern, counts_of = PATTERNS[name]
    for widths, is_causal in product(WIDTHS, (False, True)):
        leaves = tensors(widths, dtype)
        counts = counts_of()
        counts = counts.tril() if is_causal else counts
        wanted = results(
            lambda *x, c=counts: by_definition(*x, c), [x.detach().double().requires_grad_() for x in leaves]
        )
        for backend in served(dtype, name):
            options = {"is_causal": is_causal, "return_lse": True, "backend": backend}
            found = results(lambda q, k, v, sinks, o=options: attention(q, k, v, pattern, sinks=sinks, **o), leaves)
            assert found[0].dtype == dtype
            assert found[0].shape == (2, N, HEADS, widths[1])
            for actual, expected in zip(found, wanted, strict=True):
                assert not actual.isnan().any()
                finite = expected.isfinite()
                assert torch.equal(finite, actual.isfinite())
                assert relative_error(actual[finite], expected[finite]) <= 3 * TOLERANCE[dtype], (backend, widths)


def test_ragged_and_masked_samples():
    q, k, v, sinks = tensors((8, 5))
    padding = torch.zeros(2, N, dtype=torch.bool)
    padding[0, 3:7] = padding[1, 20:] = True
    both = [
        attention(q, k, v, Dilated((16, N), (1, 3)), sinks=sinks, lengths=[N, 20], key_padding_mask=padding, backend=x)
        for x in ("native", "reference")
    ]
    torch.testing.assert_close(*both, rtol=0, atol=1e-12)
    assert not both[0][1, 20:].any()


def on_a_rank(transports: tuple[str, ...]) -> list[list[np.ndarray]]:
    """The results of this rank's shards: out, dq, dk, dv, and the gradient of the sinks, whose sum is the whole's."""
    found = []
    for transport in transports:
        *whole, sinks = tensors((8, 5))
        start, stop = sequence_range(N, dist.group.WORLD)
        shards = [x[:, start:stop].detach().requires_grad_() for x in whole]
        options = {"mesh": dist.group.WORLD, "seq_len": N, "transport": transport}
        out = attention(*shards, Dilated((16, N), (1, 3)), is_causal=True, sinks=sinks, **options)
        results = out.detach(), *torch.autograd.grad(out.sin().sum(), (*shards, sinks))
        found.append([x.numpy() for x in results])  # a tensor would be gone with its process
    return found


def test_over_a_mesh():
    *whole, sinks = tensors((8, 5))
    out = attention(*whole, Dilated((16, N), (1, 3)), is_causal=True, sinks=sinks)
    expected = [out.detach(), *torch.autograd.grad(out.sin().sum(), (*whole, sinks))]
    transports = ("exchange", "doubling", "ring", "all_gather", "ulysses")
    for ranks in zip(*processes.run(2, on_a_rank, transports), strict=True):
        *shards, of_sinks = zip(*ranks, strict=True)
        joined = [np.concatenate(parts, 1) for parts in shards]
        for actual, wanted in zip((*joined, sum(of_sinks)), expected, strict=True):
            torch.testing.assert_close(torch.from_numpy(actual), wanted, rtol=0, atol=1e-12)


def test_decoding_the_first_token_and_the_weights():
    q, k, v, sinks = tensors((8, 5))
    pattern = Dilated((16, N), (1, 3))
    whole = attention(q, k, v, pattern, is_causal=True, sinks=sinks)
    torch.testing.assert_close(
        cached_attention(q[:, -5:], k, v, pattern, sinks=sinks), whole[:, -5:], rtol=0, atol=1e-12
    )
    found = torch.autograd.grad(cached_attention(q, k, v, pattern, sinks=sinks).sin().sum(), (q, k, v, sinks))
    for actual, expected in zip(found, torch.autograd.grad(whole.sin().sum(), (q, k, v, sinks)), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    whole = attention(q, k, v, pattern, sinks=sinks)
    first = first_token_attention(q[:, :1], k, v, pattern, sinks=sinks)
    torch.testing.assert_close(first, whole[:, :1], rtol=0, atol=1e-12)
    weights = attention_weights(q, k, pattern, sinks=sinks).to_dense()
    out = torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(2, 2))
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_sink_of_minus_infinity_is_none(name):
    """On rows that see nothing too: out, lse, weights and gradients are those of a call without sinks."""
    *leaves, sinks = tensors((8, 5))
    sinks = torch.full_like(sinks, -math.inf).requires_grad_()
    pattern, _ = PATTERNS[name]
    for backend in served(torch.float64, name):
        options = {"is_causal": True, "return_lse": True, "backend": backend}
        wanted = results(lambda *x, o=options: attention(*x, pattern, **o), leaves)
        *found, of_sinks = results(lambda *x, o=options: attention(*x[:3], pattern, sinks=x[3], **o), [*leaves, sinks])
        for actual, expected in zip(found, wanted, strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
        assert not of_sinks.any()
    q, k, _ = leaves
    both = [attention_weights(q, k, pattern, sinks=x).to_dense() for x in (None, sinks)]
    torch.testing.assert_close(*both, rtol=0, atol=1e-12)
    gradients = torch.autograd.grad(both[1].sin().sum(), (q, k, sinks))
    wanted = torch.autograd.grad(both[0].sin().sum(), (q, k))
    torch.testing.assert_close(gradients[:2], wanted, rtol=0, atol=1e-12)
    assert not gradients[2].any()


def test_under_vmap():
    """`test_blocks` compiles a call with sinks and other widths."""

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return attention(q, k, v, Dilated((16, N), (1, 3)), sinks=sinks)

    leaves = tensors((8, 5))
    mapped = torch.func.vmap(call, in_dims=(0, 0, 0, None))(*(x[None] for x in leaves[:3]), leaves[3])
    torch.testing.assert_close(mapped[0], call(*leaves))


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        ([0.0] * HEADS, "sinks must be a floating tensor of 4 logits, one per head of q; got list"),
        (torch.zeros(KV_HEADS), r"4 logits, one per head of q; got torch.float32 of shape \(2,\)"),
        (torch.zeros(HEADS, dtype=torch.int64), "4 logits, one per head of q; got torch.int64"),
        (torch.zeros(HEADS, device="meta"), "sinks must be on q's device, cpu; got meta"),
    ],
)
def test_what_is_refused(sinks, message):
    q, k, v, _ = tensors((8, 8))
    with pytest.raises(ValueError, match=message):
        attention(q, k, v, Dilated((N,), (1,)), sinks=sinks)
