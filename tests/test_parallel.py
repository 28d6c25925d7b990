"""Context parallelism in real processes over gloo, against the float64 oracle on one: values, gradients, and every
byte."""

from __future__ import annotations

import gc
import re
import tracemalloc
import weakref
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.distributed.device_mesh import init_device_mesh

import processes
from dilated_attention import BlockLayout, attention, dilated_attention, operators
from dilated_attention.backends.reference import reference_attention
from dilated_attention.call import Call
from dilated_attention.errors import ContextParallelError
from dilated_attention.mesh import TRANSPORTS
from dilated_attention.parallel import exchange_plan, traffic
from dilated_attention.parallel.comm import Framing, Link, Traffic, link_of
from dilated_attention.parallel.partition import Sharding, balanced_bounds
from dilated_attention.parallel.sharding import (
    cp_mean,
    sequence_range,
    shard_labels,
    shard_sequence,
    unshard_sequence,
)
from dilated_attention.patterns import Dilated
from dilated_attention.scores import Scores
from tolerances import TOLERANCE, relative_error

NAMES = ("out", "lse", "dq", "dk", "dv")
WORLDS = [(2, False), (3, True), *(pytest.param(*x, marks=pytest.mark.thorough) for x in [(3, False), (8, True)])]
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
    scale: float | None = None

    def bounds(self, size: int) -> tuple[int, ...] | None:
        if self.shares is None:
            return None
        ends = [sum([self.shares[i % len(self.shares)] for i in range(j)]) for j in range(size + 1)]
        return tuple([end * self.seq_len // ends[-1] for end in ends])


CASES = {
    "geometric": Case((16, 32, 64, 128, 256), (1, 2, 4, 8, 16), 256),
    "straddling": Case((24, 60, 100, 250), (1, 2, 3, 5), 250, batch=2),
    "odd": Case((7, 251), (1, 64), 251),
    "dense": Case((131,), (1,), 131, kv_heads=8, scale=-0.4),
    "grouped queries": Case((20, 90, 300), (1, 3, 6), 190, heads=16, kv_heads=8, batch=2),
    "head groups": Case((16, 70, 150), (1, 2, 4), 150, head_groups=True),
    "head blocks": Case((30, 140), (1, 4), 141, offsets="head_block"),
    "uncovered rows": Case((40, 200), (3, 7), 200),
    "zero keys": Case((30, 140), (2, 4), 141, offsets="head_block", compat="torchscale"),
    "uneven shards": Case((16, 50, 140), (1, 2, 5), 140, shares=(3, 0, 1, 7)),
    "padded batch": Case((16, 50, 140), (1, 2, 5), 140, batch=3, lengths=(140, 51, 0)),
    "packed batch": Case((16, 50, 140), (1, 2, 5), 140, cu_seqlens=(0, 30, 30, 111, 140)),
    "fewer tokens than ranks": Case((2, 5), (1, 2), 5),
    "local only": Case((4, 8), (1, 2), 96, scale=0.0),
}


def call(case: Case, tensors, size: int, is_causal: bool, transport: str):
    pattern = Dilated(case.segments, case.rates, case.offsets, case.head_groups, case.compat)
    asked = Call.of(
        *tensors,
        pattern,
        mesh=dist.group.WORLD,
        seq_len=case.seq_len,
        is_causal=is_causal,
        scale=case.scale,
        lengths=None if case.lengths is None else torch.tensor(case.lengths),
        cu_seqlens=None if case.cu_seqlens is None else torch.tensor(case.cu_seqlens),
        transport=transport,
    )
    if asked.shards is not None and (bounds := case.bounds(size)) is not None:
        asked = replace(asked, shards=replace(asked.shards, bounds=tuple(bounds)))
    return operators.attend(*tensors, asked)


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
        scores=None if case.scale is None else Scores(case.scale),
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


def bigbird(heads: int, batch: int, seq_len: int, block_size, seed: int = 0) -> BlockLayout:
    """Local, global and random blocks, other random ones for every head and batch element."""
    window = BlockLayout.longformer(seq_len, 20, 3, block_size).dense_blocks()
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(batch, heads, *window.shape[2:], generator=generator) < 0.15
    return BlockLayout.from_mask(window | drawn, seq_len, block_size)


@cache
def local(length: int) -> BlockLayout:
    return BlockLayout.local(length, 20, 16)


@cache
def random(length: int) -> BlockLayout:
    return BlockLayout.random(length, 0.4, 3, 16)


PAIRS = {  # case: options of the call; another pattern than the case's
    "geometric": {"key_padding_mask": True, "dropout_p": 0.3},
    "grouped queries": {"key_padding_mask": True, "dropout_p": 0.3},
    "zero keys": {"dropout_p": 0.3},
    "uneven shards": {"key_padding_mask": True, "dropout_p": 0.3},
    "padded batch": {"key_padding_mask": True},
    "packed batch": {"key_padding_mask": True, "dropout_p": 0.3},
    "straddling": {"pattern": bigbird(8, 2, 250, (32, 16)), "key_padding_mask": True, "dropout_p": 0.3},
    "head groups": {"pattern": Dilated((48, 150), (1, 2)) * random, "key_padding_mask": True, "dropout_p": 0.3},
}


def pairs_call(name: str, tensors, own: slice, is_causal: bool, rank: int, **options):
    case, asked = CASES[name], dict(PAIRS[name])
    pattern = Dilated(case.segments, case.rates, case.offsets, case.head_groups, case.compat)
    pattern = asked.pop("pattern", pattern)
    if "key_padding_mask" in asked:
        mask = torch.rand(case.batch, case.seq_len, generator=torch.Generator().manual_seed(2)) < 0.3
        mask[0, : case.seq_len // 3] = True  # more than one shard of three
        asked["key_padding_mask"] = mask[:, own]
    torch.manual_seed(rank)  # the ranks draw different seeds
    return attention(
        *tensors,
        pattern,
        is_causal=is_causal,
        lengths=None if case.lengths is None else torch.tensor(case.lengths),
        cu_seqlens=None if case.cu_seqlens is None else torch.tensor(case.cu_seqlens),
        return_lse=True,
        **asked,
        **options,
    )


def run_pairs(is_causal: bool, transports):
    rank, size = dist.get_rank(), dist.get_world_size()
    answers = {}
    for name in PAIRS:
        case = CASES[name]
        edges = balanced_bounds(case.seq_len, size)
        own = slice(edges[rank], edges[rank + 1])
        tensors, (d_out, d_lse) = inputs(case, torch.float64)
        for transport in transports[name]:
            leaves = [x[:, own].clone().requires_grad_() for x in tensors]
            mesh = {"mesh": dist.group.WORLD, "seq_len": case.seq_len, "transport": transport}
            out, lse = pairs_call(name, leaves, own, is_causal, rank, **mesh)
            cotangents = [d_out[:, own], d_lse[:, own].transpose(1, 2)]
            results = out, lse.transpose(1, 2)
            gradients = torch.autograd.grad((out, lse), leaves, cotangents)
            answers[name, transport] = [x.detach().numpy() for x in (*results, *gradients)]
    return answers


@pytest.mark.parametrize(("size", "is_causal"), [(2, True), pytest.param(3, False, marks=pytest.mark.thorough)])
def test_masks_and_dropout_leave_the_pairs_that_one_device_leaves(size: int, is_causal: bool) -> None:
    transports = {name: served(replace(CASES[name], shares=None), size, is_causal) for name in PAIRS}
    answers = processes.run(size, run_pairs, is_causal, transports)
    drawn = []
    for rank in range(size):
        torch.manual_seed(rank)
        drawn.append(torch.randint(-(1 << 63), (1 << 63) - 1, ()))
    largest = int(torch.stack(drawn).argmax())
    for name in PAIRS:
        tensors, (d_out, d_lse) = inputs(CASES[name], torch.float64)
        leaves = [x.clone().requires_grad_() for x in tensors]
        out, lse = pairs_call(name, leaves, slice(None), is_causal, largest)
        gradients = torch.autograd.grad((out, lse), leaves, [d_out, d_lse.transpose(1, 2)])
        wanted = [x.detach() for x in (out, lse.transpose(1, 2), *gradients)]
        for transport in transports[name]:
            pieces = zip(*[rank[name, transport] for rank in answers], strict=True)
            for what, right, found in zip(NAMES, wanted, pieces, strict=True):
                error = relative_error(torch.cat([torch.from_numpy(x) for x in found], 1), right)
                assert error <= TOLERANCE[torch.float64], (name, transport, what)


def sharding_of(case: Case, size: int, is_causal: bool) -> Sharding:
    pattern = Dilated(case.segments, case.rates, case.offsets, case.head_groups)
    edges = case.bounds(size) or balanced_bounds(case.seq_len, size)
    branches = pattern.branches(case.kv_heads)._replace(compat=case.compat)
    return Sharding(branches, edges, is_causal, case.cu_seqlens)


def served(case: Case, size: int, is_causal: bool) -> list[str]:
    """The transports that serve a case; `doubling` also needs each sample's shards equal."""
    sharding = sharding_of(case, size, is_causal)
    shape = traffic.Shape(case.batch, case.heads, case.head_dim, torch.float64)
    names = [name for name in TRANSPORTS if traffic.refusal(name, sharding, shape) is None]
    return [name for name in names if case.lengths is None or name != "doubling"] + ["auto"]


@pytest.mark.parametrize(("size", "is_causal"), WORLDS)
def test_equals_the_oracle_and_moves_the_bytes_of_the_formula(size: int, is_causal: bool) -> None:
    dtypes = DTYPES if (size, is_causal) != (3, True) else DTYPES[:1]
    answers = processes.run(size, run_cases, tuple(CASES), is_causal, dtypes)
    for name, case in CASES.items():
        for dtype in dtypes:
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


# name: (pattern, seq_len, query heads, key-value heads, batch, lengths, cu_seqlens)
BLOCK_CASES = {
    "window": (local(250), 250, 8, 8, 2, None, None),
    "window, whole blocks a shard": (local(256), 256, 8, 8, 1, None, None),
    "lists of their own": (bigbird(16, 2, 210, 16), 210, 16, 8, 2, None, None),
    "lists per key-value head": (bigbird(8, 1, 130, 16), 130, 16, 8, 1, None, None),
    "query and key blocks differ": (bigbird(1, 1, 230, (32, 16)), 230, 8, 8, 1, None, None),
    "key blocks the longer ones": (bigbird(8, 1, 230, (16, 48)), 230, 8, 8, 1, None, None),
    "nothing crosses": (BlockLayout.from_mask(torch.eye(16, dtype=torch.bool), 256, 16), 256, 8, 8, 1, None, None),
    "product": (Dilated((48, 250), (1, 2)) * random, 250, 8, 8, 1, None, None),
    "product, grouped queries": (Dilated((100, 240), (2, 3)) * local, 240, 16, 8, 1, None, None),
    "padded batch": (bigbird(1, 3, 140, 16), 140, 8, 8, 3, (140, 51, 0), None),
    "packed batch": (local(81), 140, 8, 8, 1, None, (0, 30, 30, 111, 140)),
    # Samples of whole segments alone, all of one number of rows.
    "product, padded batch": (Dilated((24, 48), (1, 2)) * local, 96, 8, 8, 3, (96, 48, 0), None),
    "product, packed batch": (Dilated((24, 48), (1, 2)) * local, 144, 8, 8, 1, None, (0, 48, 48, 144)),
}


def block_inputs(name: str, dtype: torch.dtype):
    _, seq_len, heads, kv_heads, batch, lengths, _ = BLOCK_CASES[name]
    return inputs(Case((1,), (1,), seq_len, heads, kv_heads, batch, lengths=lengths), dtype)


def block_call(name: str, tensors, is_causal: bool, **options):
    pattern, seq_len, *_, lengths, samples = BLOCK_CASES[name]
    return attention(
        *tensors,
        pattern,
        is_causal=is_causal,
        lengths=None if lengths is None else torch.tensor(lengths),
        cu_seqlens=None if samples is None else torch.tensor(samples),
        return_lse=True,
        seq_len=seq_len,
        **options,
    )


def run_block_cases(is_causal: bool):
    mesh = dist.group.WORLD
    link = link_of(mesh)
    answers = {}
    for name, (pattern, seq_len, heads, kv_heads, batch, *ragged) in BLOCK_CASES.items():
        tensors, (d_out, d_lse) = block_inputs(name, torch.float64)
        own = slice(*sequence_range(seq_len, mesh))
        for transport in ("exchange", "ring", "all_gather", "ulysses", "auto"):
            if transport == "ulysses" and kv_heads % dist.get_world_size():
                continue
            leaves = [x[:, own].clone().requires_grad_() for x in tensors]
            link.traffic = Traffic()
            out, lse = block_call(name, leaves, is_causal, mesh=mesh, transport=transport)
            forward, link.traffic = link.traffic, Traffic()
            cotangents = d_out[:, own], d_lse[:, own].transpose(1, 2)
            gradients = torch.autograd.grad((out, lse), leaves, cotangents)
            found = [x.detach().numpy() for x in (out, lse.transpose(1, 2), *gradients)]
            plan = None
            if transport != "auto" and not any(ragged):
                options = {"num_kv_heads": kv_heads, "head_dim": 4, "batch": batch, "dtype": torch.float64}
                size, rank = dist.get_world_size(), dist.get_rank()
                plan = exchange_plan(
                    pattern, seq_len, heads, size, rank, is_causal=is_causal, transport=transport, **options
                )
            answers[name, transport] = found, plan, forward, link.traffic
    return answers


@cache
def block_expected(name: str, is_causal: bool):
    tensors, (d_out, d_lse) = block_inputs(name, torch.float64)
    leaves = [x.requires_grad_() for x in tensors]
    out, lse = block_call(name, leaves, is_causal, backend="reference")
    gradients = torch.autograd.grad((out, lse), leaves, (d_out, d_lse.transpose(1, 2)))
    return [x.detach() for x in (out, lse.transpose(1, 2), *gradients)]


@pytest.mark.parametrize(
    ("size", "is_causal"),
    [
        (2, True),
        *(pytest.param(*x, marks=pytest.mark.thorough) for x in [(2, False), (3, True), (3, False), (8, True)]),
    ],
)
def test_block_layouts_equal_the_oracle_and_move_the_rows_that_they_list(size: int, is_causal: bool) -> None:
    ranks = processes.run(size, run_block_cases, is_causal)
    for name, transport in ranks[0]:
        right = block_expected(name, is_causal)
        pieces = zip(*[rank[name, transport][0] for rank in ranks], strict=True)
        for what, wanted, parts in zip(NAMES, right, pieces, strict=True):
            found = torch.cat([torch.from_numpy(part) for part in parts], 1)
            assert relative_error(found, wanted) <= TOLERANCE[torch.float64], (name, transport, what)
        for rank in ranks:
            _, plan, forward, backward = rank[name, transport]
            if plan is not None:
                assert (forward.bytes_sent, forward.bytes_received) == (plan.bytes_sent, plan.bytes_received)
                returned = plan.backward_bytes_sent, plan.backward_bytes_received
                assert (backward.bytes_sent, backward.bytes_received) == returned
                assert (forward.messages_sent, forward.messages_received) == (plan.peers_sent, plan.peers_received)
                assert forward.rounds == plan.rounds
    window, whole = (
        sum([rank[name, "exchange"][1].rows_received for rank in ranks]) for name in ("window", "lists of their own")
    )
    assert 0 < window < whole


def compose():
    """torch.compile in one graph, activation checkpointing, a mesh, and the helpers around a sharded sequence."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    case = CASES["straddling"]
    tensors, (d_out, _) = inputs(case, torch.float64)

    def attend(q, k, v, transport="exchange"):
        options = {"mesh": mesh, "seq_len": case.seq_len, "is_causal": True, "transport": transport}
        return dilated_attention(q, k, v, case.segments, case.rates, **options)

    def gradients(function):
        leaves = [shard_sequence(x, mesh).clone().requires_grad_() for x in tensors]
        out = function(*leaves)
        return out, *torch.autograd.grad(out, leaves, shard_sequence(d_out, mesh))

    plain = gradients(attend)
    answers = {}
    for transport in ("exchange", "ring", "all_gather", "ulysses"):
        compiled = torch.compile(lambda *x, t=transport: attend(*x, t).sin(), fullgraph=True, backend="aot_eager")
        eager = gradients(lambda *x, t=transport: attend(*x, t).sin())
        answers["compile", transport] = all(map(torch.equal, gradients(compiled), eager))
    checkpointed = gradients(lambda *x: torch.utils.checkpoint.checkpoint(attend, *x, use_reentrant=False))
    answers["checkpoint"] = all(map(torch.equal, checkpointed, plain))

    x = torch.arange(50.0).view(2, 25)
    shard = shard_sequence(x, mesh).clone().requires_grad_()
    whole = unshard_sequence(shard, mesh, seq_len=torch.tensor(25))
    (slope,) = torch.autograd.grad(whole.pow(3).sum(), shard, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), shard, retain_graph=True)
    whole.mul(x * (rank + 1)).sum().backward()
    start, stop = sequence_range(25, mesh)
    weight = sum(range(1, size + 1))
    answers["a sequence of one dimension"] = torch.equal(unshard_sequence(shard[0], mesh, 0, 25), x[0])
    for dtype in (torch.bool, torch.int16):
        numbers = (x % 3).to(dtype)
        answers[f"{dtype}"] = torch.equal(unshard_sequence(shard_sequence(numbers, mesh), mesh, seq_len=25), numbers)
    for shape in ((2, 25, 0), (0, 25, 3), (2, 1, 3)):  # no columns, no samples, ranks without a token
        empty = torch.randn(shape, requires_grad=True)
        part = shard_sequence(empty, mesh)
        found = unshard_sequence(part, mesh, seq_len=shape[1])
        found.sum().backward()
        answers[f"shape {shape}"] = torch.equal(found, empty)
    answers["unshard, second derivative"] = torch.equal(curvature, 6 * size * x[:, start:stop])
    answers["unshard"] = torch.equal(whole, x) and torch.equal(shard.grad, x[:, start:stop] * weight)

    # A model of one weight: the mean of (w x)^2 over the valid labels, against the same on the whole sequence.
    labels = torch.where(x % 3 == 0, -100, x.long())
    mine = shard_labels(labels, mesh)
    wanted = torch.cat([labels[:, 1:], labels.new_full((2, 1), -100)], 1)
    answers["labels"] = torch.equal(mine, wanted[:, start:stop])
    for how in ("mean", "sum"):
        weight = torch.ones((), dtype=torch.float64, requires_grad=True)
        valid = mine != -100
        losses, number = ((weight * x[:, start:stop]) ** 2)[valid], valid.sum()
        if how == "sum":  # of each token, or of one element
            losses, number = losses[:, None], number[None]
        loss = cp_mean(losses.sum() if how == "mean" else losses, number, mesh, gradients=how)
        loss.backward()
        dist.all_reduce(weight.grad)
        right = (x**2)[wanted != -100].double().mean()
        scale = size if how == "mean" else 1
        answers["mean", how] = bool(
            (loss - right).abs() < 1e-12 * right and (weight.grad / scale - 2 * right).abs() < 1e-12 * right
        )
    return answers


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_composes(size: int) -> None:
    for answers in processes.run(size, compose):
        assert all(answers.values()), answers


def refuse():
    """Return what each kind of bad call raises on this rank, and check that the group still serves a good one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    case, good = CASES["dense"], dist.group.WORLD
    whole = inputs(case, torch.float32)[0]
    own = [shard_sequence(x, good) for x in whole]
    table = Dilated(case.segments, case.rates).offset_table(case.kv_heads)
    outsider = dist.new_group([0])
    grid = init_device_mesh("cpu", (size, 1))

    def attend(tensors=own, segments=case.segments, rates=case.rates, offsets=table, mesh=good, **options):
        options = {"seq_len": case.seq_len} | options
        return dilated_attention(*tensors, segments, rates, offsets=offsets, mesh=mesh, **options)

    def gather():
        return unshard_sequence(own[0], good, seq_len=case.seq_len)

    def odd_rank(x, y):
        return x if rank == 1 else y

    attempts = {
        "shard size": lambda: attend(odd_rank([x[:, :5] for x in own], own)),
        "segments": lambda: attend(segments=odd_rank((64,), (131,))),
        "rates": lambda: attend(rates=odd_rank((2,), (1,))),
        "branches": lambda: attend(
            segments=odd_rank((131, 20), (131,)), rates=odd_rank((1, 1), (1,)), offsets=odd_rank(table * 2, table)
        ),
        "seq_len": lambda: attend(odd_rank([x[:, :2] for x in own], own), seq_len=odd_rank(6, 131)),
        "dtype": lambda: attend(odd_rank([x.double() for x in own], own)),
        "is_causal": lambda: attend(is_causal=rank == 1),
        "scale": lambda: attend(scale=odd_rank(0.5, 0.25)),
        "sign of scale": lambda: attend(scale=odd_rank(-0.5, 0.5)),
        "batch": lambda: attend(odd_rank([x.repeat(2, 1, 1, 1) for x in own], own)),
        "lengths": lambda: attend(
            odd_rank([torch.cat([x, x]) for x in own], own), lengths=torch.tensor(odd_rank([131, 131], [131]))
        ),
        "head_dim of q": lambda: attend(
            odd_rank([*[x.repeat(1, 1, 1, 2) for x in own[:2]], own[2]], [*own[:2], own[2].repeat(1, 1, 1, 2)]),
            scale=0.5,
        ),
        "head_dim of v": lambda: attend([*own[:2], own[2][..., : odd_rank(3, 4)]]),
        "head_offset": lambda: attend(
            segments=(131,), rates=(1,), offsets="head", head_offset=odd_rank(1, 0), dropout_p=0.5
        ),
        "transport name": lambda: attend(transport="carrier"),
        "transport refused": lambda: attend(transport="doubling"),
        "heads": lambda: attend([x[:, :, :1] for x in own], offsets=((0,),), transport="ulysses"),
        "two axes": lambda: attend(mesh=grid),
        "no mesh": lambda: attend(mesh="context"),
        "sinks": lambda: attend(sinks=odd_rank(torch.zeros(len(own[0][0, 0])), None)),
        "mask": lambda: attend(key_padding_mask=torch.zeros(1, 5, dtype=torch.bool)),
        "samples": lambda: attend(cu_seqlens=torch.tensor([0, 7, 5, 131])),
        "outsider": lambda: attend(mesh=odd_rank(outsider, "context")),
        "shards of two dtypes": lambda: unshard_sequence(
            torch.zeros(1, 4).to(odd_rank(torch.int64, torch.float32)), good
        ),
        "shards of two batches": lambda: unshard_sequence(torch.zeros(odd_rank(2, 1), 4), good),
        "shards along two dims": lambda: unshard_sequence(torch.zeros(1, 4, 4), good, dim=odd_rank(2, -2)),
        "shards along no dim": lambda: unshard_sequence(torch.zeros(1, 4), good, dim=odd_rank(2, 1)),
        "a shard along no dim": lambda: shard_sequence(torch.zeros(4), good),
        "labels of one dim": lambda: shard_labels(torch.zeros(4), good),
        "grad mode": lambda: torch.set_grad_enabled(rank != 1)(attend)(is_causal=True),
        "grad mode of a gather": lambda: torch.set_grad_enabled(rank != 1)(gather)(),
        "another function": lambda: gather() if rank == 1 else attend(),
        "another function, refused": lambda: attend([x[0] for x in own]) if rank == 1 else gather(),
    }
    answers = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            answers[name] = "no error"
        except ValueError as error:
            answers[name] = str(error)
    attend()
    return answers


def test_bad_calls_give_one_clear_error_on_every_rank() -> None:
    answers = processes.run(3, refuse)
    expected = {
        "shard size": "rank 1 refused its context parallel call, before any data moved: q has 5 tokens",
        "segments": r"rank 1 has segment_lengths=\[64\], elsewhere segment_lengths=\[131\]",
        "rates": r"rank 1 has dilation_rates=\[2\]",
        "branches": r"rank 1 has segment_lengths=\[131, 20\]",
        "seq_len": "rank 1 has seq_len=6, elsewhere seq_len=131",
        "dtype": "rank 1 has dtype=torch.float64, elsewhere dtype=torch.float32",
        "is_causal": "rank 1 has is_causal=True, elsewhere is_causal=False",
        "scale": "rank 1 has scale=0.5",
        "sign of scale": "rank 1 has scale=-0.5, elsewhere scale=0.5",
        "batch": "rank 1 has batch=2",
        "lengths": r"rank 1 has lengths=\(131, 131\), elsewhere lengths=\(131,\)",
        "head_dim of q": r"rank 1 has head_dim=\(8, 4\), elsewhere head_dim=\(4, 8\)",
        "head_dim of v": r"rank 1 has head_dim=\(4, 3\), elsewhere head_dim=\(4, 4\)",
        "head_offset": "rank 1 has first_head=1, elsewhere first_head=0",
        "transport name": "transport must be one of",
        "transport refused": "transport='doubling' does not serve this call: doubling needs a power of two of ranks",
        "heads": "1 query and 1 key-value heads do not divide by 3 ranks",
        "two axes": r"mesh must have one axis, the context axis; got 2 axes of sizes \(3, 1\)",
        "no mesh": "mesh must be a 1-D torch.distributed.DeviceMesh or a ProcessGroup; got str",
        "sinks": "rank 1 has sinks=given, elsewhere sinks=None",
        "mask": "key_padding_mask must have shape",
        "samples": "cu_seqlens must ascend",
        "outsider": "mesh",
        "shards of two dtypes": r"rank 1 has shard=torch.int64 \(1, seq\), elsewhere shard=torch.float32 \(1, seq\)",
        "shards of two batches": r"rank 1 has shard=torch.float32 \(2, seq\), elsewhere shard=.* \(1, seq\)",
        "shards along two dims": r"rank 1 has shard=torch.float32 \(1, 4, seq\), elsewhere .* \(1, seq, 4\)",
        "shards along no dim": "rank 1 refused its context parallel call, .*: dim=2 is none of the 2 dimensions of x",
        "a shard along no dim": "dim=1 is none of the 1 dimensions of x",
        "labels of one dim": r"labels must be \(batch, seq\); got shape \(4,\)",
        "grad mode": "rank 1 has gradients=off, elsewhere gradients=on",
        "grad mode of a gather": "rank 1 has gradients=off, elsewhere gradients=on",
        "another function": "rank 1 has function=unshard_sequence, elsewhere function=attention",
        "another function, refused": "rank 1 refused its context parallel call, .*: q must have 4 dimensions",
    }
    for answer in answers:
        assert answer.keys() == expected.keys()
        for name, pattern in expected.items():
            assert re.search(pattern, answer[name]), (name, answer[name])
    assert "that this rank, 1, is not in" in answers[1]["outsider"]


def alone():
    link = link_of(dist.group.WORLD)
    case = CASES["grouped queries"]
    tensors, _ = inputs(case, torch.float64)
    out, lse = call(case, tensors, 1, True, "auto")
    right_out, right_lse = expected(case, True, torch.float64)[:2]
    return (out - right_out).abs().max().item(), (lse - right_lse).abs().max().item(), link.traffic


def none():
    """A batch of none, forward and backward: the shapes of what comes back."""
    mesh, found = dist.group.WORLD, []
    layout = BlockLayout.local(16, 5, 4)
    for pattern in (Dilated((8, 32), (1, 2)), layout, Dilated((16,), (1,)) * (lambda n: BlockLayout.local(n, 5, 4))):
        for options in ({}, {"lengths": torch.zeros(0, dtype=torch.long)}, {"transport": "exchange"}):
            q, k, v = (torch.zeros(0, 8, heads, 4, requires_grad=True) for heads in (4, 2, 2))
            out, lse = attention(q, k, v, pattern, mesh=mesh, return_lse=True, **options)
            out.sum().backward()
            found.append((out.shape, lse.shape, k.grad.shape))
    return found


def test_a_batch_of_none() -> None:
    for found in processes.run(2, none):
        assert found == [((0, 8, 4, 4), (0, 4, 8), (0, 8, 2, 4))] * 9


def strides_of_a_padded_batch():
    packed = torch.randn(2, 4, 3, 8, 16)  # a projection whose heads come before its tokens
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    out = attention(q, k, v, Dilated((8,), (1,)), mesh=dist.group.WORLD, lengths=torch.tensor([16, 5]))
    return out.is_contiguous()


def test_out_of_a_padded_batch_is_contiguous() -> None:
    assert processes.run(2, strides_of_a_padded_batch) == [True, True]


def test_a_mesh_of_one_rank_communicates_nothing() -> None:
    out, lse, moved = processes.run(1, alone)[0]
    assert max(out, lse) < 1e-12
    assert moved == Traffic()


def many_descriptions():
    """Return the bytes that a link holds after calls of many lengths, each with the layers of a deep model."""
    link = Link(dist.group.WORLD)
    tracemalloc.start()
    for seq_len in range(6000):
        for layer in range(32):
            link.agree(f"function=attention\nseq_len={seq_len}", None, torch.device("cpu"))
            link.begin(f"layers.{layer}.attention")
    return tracemalloc.get_traced_memory()[0]


def test_a_link_holds_little_after_calls_of_many_lengths() -> None:
    """Packed samples make such calls: their edges differ in every step."""
    assert processes.run(1, many_descriptions)[0] < 64e6


def destroyed():
    group = dist.new_group()
    case = CASES["grouped queries"]
    tensors, _ = inputs(case, torch.float64)
    shards = [shard_sequence(x, group) for x in tensors[:3]]
    options = {"mesh": group, "seq_len": tensors[0].shape[1], "is_causal": True}
    out = attention(*shards, Dilated((4, 16), (1, 2)), **options)
    link, died = link_of(group), weakref.ref(group)
    dist.destroy_process_group(group)
    del group, options
    gc.collect()
    try:
        link.all_to_all(out, *[Framing((), (), 0)] * 2, "after all")
    except ContextParallelError as error:
        return died() is None, str(error)


def test_a_destroyed_group_is_freed() -> None:
    for freed, message in processes.run(2, destroyed):
        assert freed
        assert "was destroyed" in message
