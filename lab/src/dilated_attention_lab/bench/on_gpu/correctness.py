"""Check the kernels: every feature at small sizes, and exactly the machine code that is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dilated_attention.plumbing import Plan, Problem, Rows, Scores, StridedGroup, native, triton
from dilated_attention_lab.bench.cases import Case
from dilated_attention_lab.bench.on_gpu import PAPER
from dilated_attention_lab.bench.results import Row
from dilated_attention_lab.verification import BARS, Check, poisoned_memory, relative_error


def correctness(check: Check, backend: str, device: torch.device) -> Iterator[Row]:
    """Yield the largest relative error of each dtype and head_dim, against the float64 oracle on the same inputs."""
    for dtype, head_dim in product(check.dtypes, check.head_dims):
        errors = check.errors(backend, dtype, head_dim, device)
        parameters = {"seq_len": check.seq_len, "heads": check.heads, "kv_heads": check.kv_heads}
        yield _largest_error(check.name, parameters | {"backend": backend, "head_dim": head_dim}, errors, dtype)


def _largest_error(name: str, parameters: dict[str, Any], errors: dict[str, float], dtype: torch.dtype) -> Row:
    worst = max(errors, key=errors.__getitem__)
    parameters = {**parameters, "dtype": str(dtype).removeprefix("torch.")}
    return Row(f"{name}: largest relative error", parameters, errors[worst], f"({worst})", bar=BARS[dtype])


def as_timed(case: Case, label: str) -> Check:
    """Return a check of a case, shortened to at most 2,048 tokens for the oracle. It launches the same kernels.

    As in the timed call, tiles are full and need no mask, all branches share a launch, and lse gets no gradient.
    """
    few = min(case.seq_len, 2048)
    longest = max(case.segment_lengths, default=few)
    segments = tuple(w if case.seq_len == few else max(1024, w * few // longest) for w in case.segment_lengths)
    case = replace(case, seq_len=few, segment_lengths=segments)
    return Check(
        label, few, lambda n: case.pattern if case.method == "dilated" else case.layout(n),
        {"is_causal": case.is_causal}, (case.head_dim,), (getattr(torch, case.dtype),),
        heads=case.heads, kv_heads=case.heads, batch=case.batch, of_lse=False,
    )  # fmt: skip


def wide(check: Check, device: torch.device) -> Iterator[Row]:
    """Run `correctness` of triton with 64-bit offsets, which otherwise only huge strides need."""
    with patch.object(triton, "WIDE_FROM", 0):
        yield from correctness(replace(check, name=f"{check.name}, wide offsets"), "triton", device)


def boxed(check: Check, device: torch.device) -> Iterator[Row]:
    """Run `correctness` of triton with the kernel that reads through descriptors, which short calls do not use."""
    with patch.object(triton, "LEAST_BOXED", 0), patch.object(triton.Boxed, "of", wraps=triton.Boxed.of) as made:
        yield from correctness(replace(check, name=f"{check.name}, in boxes"), "triton", device)
    assert made.called, "the kernel does not serve this check"


def elsewhere(device: torch.device) -> Iterator[Row]:
    """Check triton against native in float64 on a plan of context parallelism: a local branch, and received keys."""
    local = StridedGroup(*(Rows(0, 16, 3, 1, 16),) * 2, 0, 2, 1, high=0, first=True)
    received = StridedGroup(Rows(1, 24, 2, 2, 12), Rows(48, 70, 2, 1, 70), 0, 1, 1)
    aligned = StridedGroup(Rows(0, 48, 1, 3, 16), Rows(190, 16, 1, 1, 16), 1, 1, 1, high=0)
    plan = Plan(48, 2, (local, received, aligned), covered=True, square=False)
    generator = torch.Generator(device).manual_seed(0)
    normal = [
        torch.randn(2, tokens, heads, 64, generator=generator, device=device)
        for tokens, heads in ((48, 4), (206, 2), (206, 2), (48, 4))
    ]

    def results(backend: Any, inputs: list[Tensor]) -> dict[str, Tensor]:
        q, k, v, dout = inputs
        problem = Problem(plan, Scores(0.125))
        out, lse = backend.forward(problem, q, k, v)
        gradients = backend.backward(problem, dout, lse.cos(), q, k, v, out, lse)
        return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True))

    for dtype in BARS:
        inputs = [x.to(dtype) for x in normal]
        with poisoned_memory():
            actual = results(triton, inputs)
        expected = results(native, [x.double() for x in inputs])
        errors = {name: relative_error(actual[name], expected[name]) for name in expected}
        parameters = {"seq_len": 48, "heads": 4, "kv_heads": 2, "head_dim": 64, "backend": "triton"}
        yield _largest_error("rows from elsewhere", parameters, errors, dtype)


def captured(case: Case, device: torch.device) -> Iterator[Row]:
    """Check that a compiled forward, and a CUDA graph replayed on other inputs, give the same numbers as eager."""
    call = case.prepare()
    with torch.no_grad():
        inputs, others = case.inputs(device)[0], case.inputs(device)[0]
        static = tuple(x.clone() for x in inputs)
        graph, out = graph_of(lambda: call(*static))
        for x, y in zip(static, others, strict=True):
            x.copy_(y)
        graph.replay()
        expected = call(*others).clone()
        found = {"a CUDA graph": out, "torch.compile": torch.compile(call, fullgraph=True)(*others)}
    for name, x in found.items():
        difference = (x.float() - expected.float()).abs().max().item()
        yield Row(f"{name}: largest difference from eager", case.parameters, difference, "", bar=0.0)


def graph_of(call: Callable[[], Tensor]) -> tuple[Any, Tensor]:
    """Return a CUDA graph of a call, and the tensor that each replay writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # compiles the kernels and makes the tables
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


def far_rows(device: torch.device) -> Iterator[Row]:
    """Check that in tensors of more than 2^31 elements the last tokens, one longest segment, get the same results as in
    a call on them alone."""
    last = max(PAPER.segment_lengths)
    far = replace(PAPER, seq_len=2**31 // (PAPER.heads * PAPER.head_dim) + last)
    yield from last_rows(far, last, device)


def last_rows(case: Case, last: int, device: torch.device) -> Iterator[Row]:
    """Check that the `last` tokens, which form whole segments, get the same results in the whole call and alone."""
    inputs = [*case.inputs(device)[0], case.inputs(device)[0][0]]
    elements = f"{case.seq_len * case.heads * case.head_dim / 2**31:.2f} x 2^31 elements"
    few = [x[:, -last:].clone() for x in inputs]
    found = [x[:, -last:].clone() for x in _trained(case, *inputs)]
    for name, x, y in zip(("out", "dq", "dk", "dv"), found, _trained(case, *few), strict=True):
        difference = (x.float() - y.float()).abs().max().item()
        yield Row(f"{name}: last rows of {elements}: largest difference", case.parameters, difference, "", bar=0.0)


@poisoned_memory()
def _trained(case: Case, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return out, dq, dk and dv of the case's call on q, k, v and dout."""
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    out = case.prepare()(q, k, v)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3])


def million(device: torch.device) -> Iterator[Row]:
    case = replace(PAPER, seq_len=1 << 20, head_dim=64)
    inputs = case.inputs(device)[0]
    found = [
        _trained(replace(case, backend=name), *inputs, torch.ones_like(inputs[0])) for name in ("triton", "native")
    ]
    for name, *pair in zip(("out", "dq", "dk", "dv"), *found, strict=True):
        parts = zip(*(x.split(65536, 1) for x in pair), strict=True)
        error = max(relative_error(x.double(), y.double()) for x, y in parts)
        yield Row(f"{name}: relative difference from native", case.parameters, error, "", bar=1e-2)
