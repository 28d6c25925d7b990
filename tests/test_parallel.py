"""Context parallelism in real processes over gloo, against the float64 oracle on one: values, gradients, and every
byte."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

import processes
from dilated_attention.backends.reference import reference_attention
from dilated_attention.parallel import traffic
from dilated_attention.parallel.attention import context_parallel_attention
from dilated_attention.parallel.comm import Traffic, link_of
from dilated_attention.parallel.partition import Sharding, balanced_bounds
from dilated_attention.patterns import Dilated
from tolerances import TOLERANCE, relative_error

NAMES = ("out", "lse", "dq", "dk", "dv")
SIZES = (2, 3, 4, 8)
DTYPES = (torch.float64, torch.float32)


@dataclass(frozen=True)
class Case:
    """One call. `shares`: the relative sizes of uneven shards, repeated over the ranks."""

    segments: tuple[int, ...]
    rates: tuple[int, ...]
    seq_len: int
    heads: int = 8
    kv_heads: int = 8
    batch: int = 1
    head_dim: int = 4
    offsets: Any = "head"
    head_groups: bool = False
    compat: str | None = None
    lengths: tuple[int, ...] | None = None
    cu_seqlens: tuple[int, ...] | None = None
    shares: tuple[int, ...] | None = None

    def bounds(self, size: int) -> tuple[int, ...] | None:
        if self.shares is None:
            return None
        ends = [sum([self.shares[i % len(self.shares)] for i in range(j)]) for j in range(size + 1)]
        return tuple([end * self.seq_len // ends[-1] for end in ends])


CASES = {
    "geometric": Case((16, 32, 64, 128, 256), (1, 2, 4, 8, 16), 256),
    "straddling": Case((24, 60, 100, 250), (1, 2, 3, 5), 250, batch=2),
    "odd": Case((7, 251), (1, 64), 251),
    "dense": Case((131,), (1,), 131, kv_heads=8),
    "grouped queries": Case((20, 90, 300), (1, 3, 6), 190, heads=16, kv_heads=8, batch=2),
    "head groups": Case((16, 70, 150), (1, 2, 4), 150, head_groups=True),
    "head blocks": Case((30, 140), (1, 4), 141, offsets="head_block"),
    "uncovered rows": Case((40, 200), (3, 7), 200),
    "zero keys": Case((30, 140), (2, 4), 141, offsets="head_block", compat="torchscale"),
    "uneven shards": Case((16, 50, 140), (1, 2, 5), 140, shares=(3, 0, 1, 7)),
    "padded batch": Case((16, 50, 140), (1, 2, 5), 140, batch=3, lengths=(140, 51, 0)),
    "packed batch": Case((16, 50, 140), (1, 2, 5), 140, cu_seqlens=(0, 30, 30, 111, 140)),
    "fewer tokens than ranks": Case((2, 5), (1, 2), 5),
    "local only": Case((4, 8), (1, 2), 96),
}


def call(case: Case, tensors, size: int, is_causal: bool, transport: str):
    pattern = Dilated(case.segments, case.rates, case.offsets, case.head_groups)
    return context_parallel_attention(
        *tensors,
        case.segments,
        case.rates,
        pattern.offset_table(case.kv_heads),
        mesh=dist.group.WORLD,
        seq_len=case.seq_len,
        bounds=case.bounds(size),
        is_causal=is_causal,
        compat=case.compat,
        lengths=None if case.lengths is None else torch.tensor(case.lengths),
        cu_seqlens=None if case.cu_seqlens is None else torch.tensor(case.cu_seqlens),
        transport=transport,
    )


def inputs(case: Case, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(1)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    shapes = [(case.batch, case.seq_len, h, case.head_dim) for h in heads] + [(case.batch, case.seq_len, case.heads)]
    q, k, v, d_out, d_lse = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    return (q, k, v), (d_out, d_lse.to(torch.promote_types(dtype, torch.float32)))


@cache
def expected(case: Case, is_causal: bool, dtype: torch.dtype):
    """out, lse, dq, dk, dv of the oracle in float64, on inputs rounded to `dtype`."""
    tensors, cotangents = inputs(case, dtype)
    leaves = [x.double().requires_grad_() for x in tensors]
    pattern = Dilated(case.segments, case.rates, case.offsets, case.head_groups)
    results = reference_attention(
        *leaves,
        case.segments,
        case.rates,
        pattern.offset_table(case.kv_heads),
        is_causal=is_causal,
        compat=case.compat,
        lengths=case.lengths,
        cu_seqlens=case.cu_seqlens,
    )
    return [x.detach() for x in (*results, *torch.autograd.grad(results, leaves, [x.double() for x in cotangents]))]


def run_cases(names, is_causal: bool, dtypes):
    """For each case, transport and dtype: this rank's results, and what it moved in forward and in backward."""
    rank, size = dist.get_rank(), dist.get_world_size()
    link = link_of(dist.group.WORLD)
    answers = {}
    for name in names:
        case = CASES[name]
        edges = case.bounds(size) or balanced_bounds(case.seq_len, size)
        own = slice(edges[rank], edges[rank + 1])
        for dtype in dtypes:
            tensors, cotangents = inputs(case, dtype)
            for transport in served(case, size, is_causal):
                leaves = [x[:, own].clone().requires_grad_() for x in tensors]
                link.traffic = Traffic()
                results = call(case, leaves, size, is_causal, transport)
                forward, link.traffic = link.traffic, Traffic()
                gradients = torch.autograd.grad(results, leaves, [x[:, own] for x in cotangents])
                found = [x.detach().numpy() for x in (*results, *gradients)]
                answers[name, transport, dtype] = found, forward, link.traffic
    return answers


def sharding_of(case: Case, size: int, is_causal: bool) -> Sharding:
    pattern = Dilated(case.segments, case.rates, case.offsets, case.head_groups)
    edges = case.bounds(size) or balanced_bounds(case.seq_len, size)
    table = pattern.offset_table(case.kv_heads)
    return Sharding(case.segments, case.rates, table, edges, is_causal, case.cu_seqlens, case.compat)


def served(case: Case, size: int, is_causal: bool) -> list[str]:
    """The transports that serve a case; `doubling` also needs each sample's shards equal."""
    sharding = sharding_of(case, size, is_causal)
    names = [name for name in traffic.NAMES if traffic.refusal(name, sharding, case.heads) is None]
    return [name for name in names if case.lengths is None or name != "doubling"] + ["auto"]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_equals_the_oracle_and_moves_the_bytes_of_the_formula(size: int, is_causal: bool) -> None:
    answers = processes.run(size, run_cases, tuple(CASES), is_causal, DTYPES)
    for name, case in CASES.items():
        for dtype in DTYPES:
            right = expected(case, is_causal, dtype)
            for transport in served(case, size, is_causal):
                ranks = [rank[name, transport, dtype] for rank in answers]
                for what, wanted, pieces in zip(
                    NAMES, right, zip(*[rank[0] for rank in ranks], strict=True), strict=True
                ):
                    found = torch.cat([torch.from_numpy(piece) for piece in pieces], 1)
                    error = relative_error(found, wanted)
                    assert error <= TOLERANCE[dtype], (name, transport, dtype, what)
                if transport != "auto" and case.lengths is None:
                    check_traffic(case, size, is_causal, transport, dtype, [rank[1:] for rank in ranks])


def check_traffic(case: Case, size: int, is_causal: bool, transport: str, dtype: torch.dtype, moved) -> None:
    sharding = sharding_of(case, size, is_causal)
    shape = traffic.Shape(case.batch, case.heads, case.head_dim, dtype)
    for rank, (forward, backward) in enumerate(moved):
        plan = traffic.count(transport, sharding, rank, shape)
        assert (forward.bytes_sent, forward.bytes_received) == (plan.bytes_sent, plan.bytes_received)
        returned = plan.backward_bytes_sent, plan.backward_bytes_received
        assert (backward.bytes_sent, backward.bytes_received) == returned
        assert (forward.messages_sent, forward.messages_received) == (plan.peers_sent, plan.peers_received)
        assert forward.rounds == plan.rounds
