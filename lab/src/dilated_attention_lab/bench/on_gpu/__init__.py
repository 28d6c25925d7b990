"""What `bench gpu` runs: its cases, and the pieces of its parts, one idea a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import torch

from dilated_attention.backends.table import BACKENDS
from dilated_attention_bench.cases import Case, Contender

PAPER = Case(
    method="dilated", backend="triton", seq_len=65536, heads=16, head_dim=128, dtype="bfloat16",
    segment_lengths=(2048, 4096, 8192, 16384), dilation_rates=(1, 2, 4, 8),
)  # fmt: skip
SMALL = replace(PAPER, seq_len=4096, heads=8, head_dim=64, segment_lengths=(1024, 2048, 4096), dilation_rates=(1, 2, 4))
ONE_KERNEL = "triton, one backward kernel"


def sparse(density: float, seq_len: int = 32768) -> Case:
    """Random blocks of 128 of 32,768 tokens, or of 64 of 4,096 smaller ones."""
    base = replace(PAPER, method="block-sparse", blocks="random", density=density, seq_len=seq_len)
    return base if seq_len > 4096 else replace(base, heads=8, head_dim=64, block_size=64)


def backend_of(name: str) -> str:
    return "triton" if name == ONE_KERNEL else name


@contextmanager
def chosen(name: str) -> Iterator[None]:
    """Calls of the Triton backend run `ONE_KERNEL` if that is the name: no argument of theirs asks for it yet."""
    plain = BACKENDS["triton"]
    one = replace(plain, backward=partial(plain.backward, deterministic=False))
    with patch.dict(BACKENDS, triton=one if name == ONE_KERNEL else plain):
        yield


def contender_of(name: str, case: Case, device: torch.device) -> Contender:
    """Forward and backward of a case by a backend."""
    plain = replace(case, backend=backend_of(name)).contender(device, backward=True)

    def work() -> Iterator[str]:
        with chosen(name):
            yield from plain()

    return work


def shortest(case: Case) -> Case:
    """The fewest tokens and heads that launch the same kernels."""
    if case.method != "dilated":
        return replace(case, seq_len=min(case.seq_len, 4096))
    tokens, heads = max(case.segment_lengths), max(case.dilation_rates)
    return replace(case, seq_len=min(case.seq_len, tokens), heads=min(case.heads, heads))


@dataclass(frozen=True)
class Launching:
    """The call of a case on CPU tensors whose numbers nobody looks at: what it launches is to be recorded."""

    case: Case
    name: str
    backward: bool

    def __call__(self) -> None:
        case = self.case
        shape, dtype = (case.batch, case.seq_len, case.heads, case.head_dim), getattr(torch, case.dtype)
        q, k, v = (torch.empty(shape, dtype=dtype).requires_grad_(self.backward) for _ in range(3))
        with chosen(self.name):
            out = case.prepare()(q, k, v)
            if self.backward:
                torch.autograd.grad(out, (q, k, v), torch.empty(shape, dtype=dtype))


def launching(case: Case, name: str = "triton", *, backward: bool = True) -> Launching:
    """With the fewest tokens and heads that launch the same kernels."""
    return Launching(replace(shortest(case), backend="triton"), name, backward)
