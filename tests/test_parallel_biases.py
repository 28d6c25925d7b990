"""Biases over ranks: each form, pattern and transport equals one process, also in the gradients of its tensor."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import processes
from dilated_attention import BlockLayout, Dilated, Window, attention, operators
from dilated_attention.bias import Alibi, QueryBias, RelativeBias
from dilated_attention.call import Call
from test_biases import FORMS, make
from tolerances import TOLERANCE, relative_error

SEQ_LEN = 45
PATTERNS = {
    "dense": (Dilated((SEQ_LEN,), (1,)), {}),
    "dilated": (Dilated((8, 20, 45), (1, 2, 3)), {"is_causal": True}),
    "window": (Window(9, 2, leading=1), {}),
    "padded": (Dilated((11, 45), (1, 2)), {"lengths": torch.tensor([45, 20])}),
    "packed": (Window(12), {"cu_seqlens": torch.tensor([0, 17, 45]), "is_causal": True}),
    "sum": (Window(3, 3) + Dilated((45,), (4,)), {"softcap": 2.0}),
    "blocks": (
        BlockLayout.from_mask(torch.rand(2, 6, 12, 8, generator=torch.Generator().manual_seed(3)) < 0.4, 45, (4, 6)),
        {"is_causal": True, "lengths": torch.tensor([45, 20])},
    ),
    "bits": (BlockLayout.from_mask_mod(lambda b, h, i, j: (i - j).abs() % 3 != 1, 45, block_size=8), {}),
    "product": (Dilated((20, 45), (1, 2)) * (lambda rows: BlockLayout.random(rows, 0.5, 3, 4)), {}),
}
BOUNDS = {2: (0, 31, SEQ_LEN), 3: (0, 19, 19, SEQ_LEN)}  # uneven shards, an empty one


def part_of(bias: Any, own: slice, dtype: torch.dtype | None = None) -> tuple[Any, Tensor]:
    """Return what a rank gives for its tokens, and its tensor, a leaf."""

    def leaf(x: Tensor) -> Tensor:
        return x.detach().to(dtype).clone().requires_grad_()

    if isinstance(bias, Tensor):
        tensor = leaf(bias[:, :, own])
        return tensor, tensor
    if isinstance(bias, QueryBias):
        tensor = leaf(bias.logits[:, own])
        return QueryBias(tensor), tensor
    coordinates = None if bias.coordinates is None else bias.coordinates[:, own]
    if isinstance(bias, Alibi):
        tensor = leaf(bias.slopes)
        return Alibi(tensor, coordinates, bias.metric), tensor
    tensor = leaf(bias.table)
    return RelativeBias(tensor, bias.buckets, coordinates), tensor


def inputs(form: str, pattern: str, dtype: torch.dtype) -> tuple[list[Tensor], Any, list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    batch = 1 if pattern == "packed" else 2
    shapes = [(batch, SEQ_LEN, heads, 4) for heads in (6, 6, 6, 6)]
    q, k, v, d_out = (torch.randn(x, generator=generator, dtype=torch.float64).to(dtype) for x in shapes)
    bias, _ = make(form, q, SEQ_LEN, SEQ_LEN, random.Random(len(form)))
    d_lse = torch.randn(batch, 6, SEQ_LEN, generator=generator, dtype=torch.promote_types(dtype, torch.float32))
    return [q, k, v], bias, [d_out, d_lse]


def results(out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    seen = lse != -torch.inf
    loss = (out * d_out).sum() + (lse.masked_fill(~seen, 0.0) * d_lse * seen).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


def run_cases(cases: list[tuple[str, str, torch.dtype, str]]) -> list[list[np.ndarray]]:
    """Return out, lse and gradients of this rank's tokens, for each (form, pattern, dtype, transport)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    bounds = BOUNDS[size]
    own = slice(bounds[rank], bounds[rank + 1])
    found = []
    for form, pattern, dtype, transport in cases:
        tensors, bias, (d_out, d_lse) = inputs(form, pattern, dtype)
        leaves = [x[:, own].clone().requires_grad_() for x in tensors]
        given, tensor = part_of(bias, own)
        shown, options = PATTERNS[pattern]
        asked = Call.of(
            *leaves, shown, mesh=dist.group.WORLD, seq_len=SEQ_LEN, bias=given, transport=transport, **options
        )  # fmt: skip
        assert asked.shards is not None
        asked = replace(asked, shards=replace(asked.shards, bounds=bounds))
        out, lse = operators.attend(*leaves, asked)
        mine = results(out, lse.transpose(1, 2), d_out[:, own], d_lse[..., own], [*leaves, tensor])
        found.append([x.numpy() for x in mine])
    return found


def joined(parts: list[list[Tensor]], bias: Any) -> list[Tensor]:
    """Return out, lse and gradients of the whole sequence from those of the ranks. Gradients of replicated tensors are
    summed."""
    out, lse, *of_tokens, of_bias = zip(*parts, strict=True)
    if isinstance(bias, QueryBias):
        whole = torch.cat(of_bias, 1)
    elif isinstance(bias, Tensor):
        whole = torch.cat(of_bias, 2)
    else:
        whole = torch.stack(of_bias).sum(0)
    return [torch.cat(out, 1), torch.cat(lse, 2), *[torch.cat(x, 1) for x in of_tokens], whole]


def cases_of(size: int) -> list[tuple[str, str, torch.dtype, str]]:
    """Return each form with two patterns, each of which meets several forms, by all transports that serve it."""
    cases = []
    for i, form in enumerate(FORMS):
        first, second = (list(PATTERNS)[(i + shift) % len(PATTERNS)] for shift in (size, size + 3))
        for transport in ("exchange", "ring", "all_gather", "ulysses"):
            if transport != "ulysses" or form not in ("query", "pair"):
                cases.append((form, first, torch.float64, transport))
        cases.append((form, second, torch.float32, "auto"))
    cases += [(form, name, torch.float64, "auto") for form, name in (("query", "product"), ("pair", "blocks"))]
    return cases


@pytest.mark.parametrize("size", [2, 3])
def test_equals_one_process(size: int):
    cases = cases_of(size)
    answers = processes.run(size, run_cases, cases)
    for i, (form, pattern, dtype, transport) in enumerate(cases):
        tensors, bias, cotangents = inputs(form, pattern, dtype)
        leaves = [x.double().requires_grad_() for x in tensors]
        whole, tensor = part_of(bias, slice(0, SEQ_LEN), torch.float64)
        shown, options = PATTERNS[pattern]
        out, lse = attention(*leaves, shown, bias=whole, backend="reference", return_lse=True, **options)
        expected = results(out, lse, *[x.double() for x in cotangents], [*leaves, tensor])
        parts = [[torch.from_numpy(x) for x in answer[i]] for answer in answers]
        actual = joined(parts, bias)
        errors = [relative_error(a, b) / TOLERANCE[dtype] for a, b in zip(actual, expected, strict=True)]
        assert max(errors) <= 1, (form, pattern, dtype, transport, errors)


def run_options() -> tuple[np.ndarray | None, np.ndarray]:
    """Return the gradient of a table that only rank 0 learns, and out with a mask and dropout."""
    rank = dist.get_rank()
    own = slice(rank * 8, rank * 8 + 8)
    q, k, v = (torch.randn(1, 16, 2, 4, generator=torch.Generator().manual_seed(i))[:, own] for i in range(3))
    table = torch.linspace(-1, 1, 2 * 31).view(2, 31).requires_grad_(rank == 0)
    out = attention(q, k, v, Window(9, 9), bias=RelativeBias(table), mesh=dist.group.WORLD)
    out.sin().sum().backward()

    hidden = torch.arange(16)[None, own] == 11
    options = {"dropout_p": 0.4, "key_padding_mask": hidden, "bias": Alibi(torch.ones(2))}
    torch.manual_seed(5)
    dropped = attention(q, k, v, Window(9, 9), **options, mesh=dist.group.WORLD)

    window = Window(9, 9)
    wrong: list[tuple[Any, Any, dict[str, Any], str]] = [
        (window, RelativeBias(torch.zeros(2, 3 + 2 * rank)), {}, "tensors of the bias"),
        (window, torch.zeros(1, 1, 8, 8), {}, r"bias must have shape \(1, 1 or 2, 8, 16\); got .*\(1, 1, 8, 8\)"),
        (window, torch.zeros(1, 1, 8, 16), {"transport": "ulysses"}, "by pair stays with its queries; use transport="),
    ]
    for pattern, bias, others, words in wrong:
        group = dist.new_group([0, 1])
        with pytest.raises(ValueError, match=words):
            attention(q, k, v, pattern, bias=bias, mesh=group, **others)
    return None if table.grad is None else table.grad.numpy(), dropped.numpy()


def test_options_learning_on_one_rank_and_errors():
    (of_table, first), (nothing, second) = processes.run(2, run_options)
    q, k, v = (torch.randn(1, 16, 2, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    table = torch.linspace(-1, 1, 2 * 31).view(2, 31).requires_grad_()
    attention(q, k, v, Window(9, 9), bias=RelativeBias(table))[:, :8].sin().sum().backward()
    torch.testing.assert_close(torch.from_numpy(of_table), table.grad)
    assert nothing is None

    options = {"dropout_p": 0.4, "key_padding_mask": torch.arange(16)[None] == 11, "bias": Alibi(torch.ones(2))}
    torch.manual_seed(5)
    expected = attention(q, k, v, Window(9, 9), **options)
    found = torch.cat([torch.from_numpy(first), torch.from_numpy(second)], 1)
    torch.testing.assert_close(found, expected)
