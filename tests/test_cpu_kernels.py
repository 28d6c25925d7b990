"""The C++ kernels against the oracle, in every instruction set of the machine and, emulated, in AMX; and what surrounds
them: threads, forks, the build."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import test_bad_input
import test_dropout
import test_properties
import test_windows
from conformance import (
    PARTS_OF_A_LAYOUT,
    band_of,
    causal,
    counts_inside,
    evaluate,
    excesses,
    layout,
    part_of_a_layout,
    problem,
    random_calls,
)
from dilated_attention import BlockLayout, attention, dilated_attention, explain, plan_cache
from dilated_attention.backends import cpu, tiles
from dilated_attention.backends.facts import Facts
from dilated_attention.backends.jobs import NEARBY
from dilated_attention.backends.reference import attend, count_matrix, phantom_counts
from dilated_attention.errors import BackendError
from dilated_attention.kernels.configurations import Shape
from dilated_attention.kernels.cpu import build
from dilated_attention.patterns import Dilated, Window
from dilated_attention.plan import Branches, Plan, Rows, StridedGroup, plan_dilated, plan_of
from dilated_attention.scores import Scores
from dilated_attention_lab.bench.cases import Case
from dilated_attention_lab.bench.profile import profile
from dilated_attention_lab.commands import main
from tolerances import ROUNDING, TOLERANCE, relative_error

MACHINE = cpu.PROCESSOR
SETS = range(1, MACHINE.highest + 1)
AMX = cpu.AMX
IN_FLOAT32 = SETS[: MACHINE.set_of(torch.float32)]
EMULATED = "emulated AMX"  # whose other instructions are those of the set below it
HALVES = "float32 in halves"
FEW = "few rows"  # however many a tile has
EMULATES = MACHINE.highest >= AMX - 1 and bool(build.compiler())
TILES = [AMX] if AMX in SETS else [EMULATED] if EMULATES else []
"""The tiles of the machine, or emulated ones."""
IN_BFLOAT16 = [(x, torch.bfloat16) for x in (*SETS[len(IN_FLOAT32) : AMX - 1], *TILES)]
"""Sets that multiply bfloat16 in instructions of their own; other types are multiplied in float32."""
SOME = [
    *((x, torch.float32) for x in IN_FLOAT32[-1:]),
    (FEW, torch.float32),
    *IN_BFLOAT16,
    *((HALVES, torch.float32) for _ in TILES),
]
ALL = [*((x, dtype) for x in (*IN_FLOAT32, FEW) for dtype in cpu.TYPES), *SOME[2:]]

pytestmark = pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))

both = pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
whole_or_cut = pytest.mark.parametrize("is_cut", [False, True], ids=["whole blocks", "masks of bits"])
five_and_seven = pytest.mark.parametrize("most_idle", [math.inf, 0.0], ids=["five products", "seven products"])


def sets_and_types(pairs):
    names = [f"{x if isinstance(x, str) else MACHINE.sets[x]}, {str(dtype)[6:]}" for x, dtype in pairs]
    return pytest.mark.parametrize(("instruction_set", "dtype"), pairs, ids=names)


@functools.cache
def emulated_amx():
    """The library of emulated_amx.cpp."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(__file__).with_name("emulated_amx.cpp"), f"{folder}/kernels.so"
        flags = (*build.FLAGS, "-O1", *build.SOURCES["x86_64"]["amx.cpp"], f"-I{build.HERE}", "-shared")
        build.run_compiler(*flags, str(source), str(build.LIBRARY), "-o", library)
        return ctypes.CDLL(library)


def force(instruction_set, monkeypatch):
    """The kernels take this one, and those for tiles of few rows all tiles or none."""
    most = tiles.MAX_TOKENS if instruction_set == FEW else 0
    monkeypatch.setattr(cpu.Processor, "most_few", lambda *_: most)
    if instruction_set == FEW:
        instruction_set = IN_FLOAT32[-1]
    if instruction_set == HALVES:
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
        for bars, factor in ((TOLERANCE, 10), (ROUNDING, 128)):
            monkeypatch.setitem(bars, torch.float32, factor * bars[torch.float32])
        (instruction_set,) = TILES
    if instruction_set == EMULATED:
        monkeypatch.setattr(cpu, "_RUN", cpu._PROTOTYPE(("dilated_attention_run", emulated_amx())))
        instruction_set = AMX
    monkeypatch.setattr(cpu, "PROCESSOR", replace(MACHINE, highest=instruction_set))


@pytest.fixture(autouse=True)
def several_threads(monkeypatch):
    """However small the call."""
    monkeypatch.setattr(cpu, "ONE_THREAD", 0)


@pytest.fixture(autouse=True, scope="module")
def written():
    """`torch.empty` is filled with NaN, so that what is read was written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def leave_nan_in_the_memory_of_threads():
    """Fill the memory that kernels keep for the next call; reading an unwritten number would go unnoticed otherwise."""
    x, (plan, _) = torch.full((2, 128, 1, 256), math.nan), dilated(128, 1, (128,), (1,))
    options = {"is_causal": False, "scale": 1.0}
    cpu.backward(problem(plan, **options), x, None, x, x, x, *cpu.forward(problem(plan, **options), x, x, x))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plans, options):
        state = None
        for plan in plans:
            state = cpu.forward(problem(plan, **options), q, k, v, state=state)
        ctx.save_for_backward(q, k, v, *state)
        ctx.plans, ctx.options = plans, options
        return state[0], state[1].transpose(1, 2)

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        state = tuple(torch.zeros(x.shape) for x in (q, k, v)) if len(ctx.plans) > 1 else None
        for plan in ctx.plans:
            gradients = cpu.backward(
                problem(plan, **ctx.options), dout, dlse.transpose(1, 2), q, k, v, out, lse, state=state
            )
        return *(x.to(q.dtype) for x in gradients), None, None


def check(inputs, plans, counts, *, phantoms=None, scale=None, softcap=0.0, gradient_of=("out", "lse"), **options):
    """out, lse and gradients of the plans, chained, against the oracle of the count matrix."""
    scale = scale or inputs[0].shape[-1] ** -0.5
    options = {"is_causal": False, "scale": scale, "softcap": softcap} | options
    assert cpu.refusal(Facts(inputs[0].device, inputs[0].dtype, inputs[0].shape[-1], inputs[0].shape[1])) is None
    errors = excesses(
        lambda q, k, v: _Attention.apply(q, k, v, plans, options),
        inputs, counts, scale=scale, softcap=softcap, phantoms=phantoms, gradient_of=gradient_of,
    )  # fmt: skip
    assert all(error <= 1 for error in errors.values()), f"errors over their bars: {errors}"


def tensors(batch, seq_len, heads, kv_heads, head_dim, dtype=torch.float32, keys=None):
    return tuple(
        torch.randn(batch, tokens, number, head_dim).to(dtype)
        for tokens, number in ((seq_len, heads), (keys or seq_len, kv_heads), (keys or seq_len, kv_heads))
    )


def dilated(seq_len, kv_heads, w, r):
    table = Dilated(w, r).offset_table(kv_heads)
    return plan_dilated(w, r, table, seq_len), table


def check_dilated(batch, seq_len, heads, kv_heads, head_dim, w, r, dtype, is_causal, **options):
    plan, offsets = dilated(seq_len, kv_heads, w, r)
    counts = count_matrix(w, r, offsets, seq_len, is_causal=is_causal)
    check(tensors(batch, seq_len, heads, kv_heads, head_dim, dtype), [plan], counts, is_causal=is_causal, **options)


class Forced:
    @pytest.fixture(autouse=True)
    def forced(self, instruction_set, most_idle, monkeypatch):
        leave_nan_in_the_memory_of_threads()
        force(instruction_set, monkeypatch)
        monkeypatch.setattr(cpu, "MOST_IDLE", most_idle)


@sets_and_types(ALL)
@five_and_seven
class TestShapes(Forced):
    @both
    @pytest.mark.parametrize("head_dim", [1, 16, 17, 31, 33, 64, 128, 250, 256, 301, 576])
    def test_head_dims(self, head_dim, dtype, is_causal):
        check_dilated(1, 90, 2, 1, head_dim, (50, 90), (1, 2), dtype, is_causal)

    @both
    @pytest.mark.parametrize(
        ("batch", "seq_len", "heads", "kv_heads", "w", "r"),
        [
            (1, 300, 2, 2, (64, 300), (1, 2)),  # tiles of several groups, several tiles
            (1, 100, 4, 2, (32, 70, 100), (1, 2, 4)),
            (2, 75, 3, 3, (50, 100), (3, 2)),  # rows that see nothing
            (1, 129, 2, 2, (64, 128), (1, 64)),
            (1, 1, 2, 1, (50, 100), (1, 2)),
            (1, 2, 4, 1, (1, 2), (1, 2)),
        ],
    )
    def test_patterns(self, batch, seq_len, heads, kv_heads, w, r, dtype, is_causal):
        check_dilated(batch, seq_len, heads, kv_heads, 24, w, r, dtype, is_causal)


@sets_and_types(SOME)
@five_and_seven
class TestFeatures(Forced):
    def test_branches_in_one_softmax(self, dtype, monkeypatch):
        """The kernels can do this, though no plan asks for it."""
        make, shape = tiles.cells_of, Shape(64, 64, 1, 1)
        monkeypatch.setattr(tiles, "cells_of", lambda plan, side, _: tiles._joined(make(plan, side, None), side, shape))
        plan, offsets = dilated(512, 2, (256, 512), (1, 2))
        (launch,) = cpu.launches(problem(plan, False, 1.0), torch.empty(1, 512, 2, 8), "queries")
        assert launch.table.spans == 2
        check(tensors(1, 512, 2, 2, 8, dtype), [plan], count_matrix((256, 512), (1, 2), offsets, 512, is_causal=False))

    def test_phantoms(self, dtype):
        w, r = (32, 70), (3, 4)
        offsets = Dilated(w, r, "head_block").offset_table(2)
        plan = plan_dilated(w, r, offsets, 70, "torchscale")
        counts = count_matrix(w, r, offsets, 70, is_causal=False)
        check(
            tensors(1, 70, 2, 2, 16, dtype), [plan], counts, phantoms=phantom_counts(w, r, offsets, 70, is_causal=False)
        )

    @both
    def test_hidden_keys(self, is_causal, dtype):
        w, r = (32, 180), (1, 2)
        plan, offsets = dilated(180, 2, w, r)
        hidden = torch.rand(180) < 0.4
        hidden[:33] = True  # whole segments, hence rows that see nothing
        counts = count_matrix(w, r, offsets, 180, is_causal=is_causal) * ~hidden
        check(tensors(1, 180, 2, 2, 16, dtype), [plan], counts, is_causal=is_causal, hidden=hidden[None])

    def test_strides_and_scale(self, dtype):
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(2, 70, 2, 2, 24, dtype))
        v = torch.randn(2, 70, 2, 25).to(dtype)[..., 1:]
        plan, offsets = dilated(70, 2, (32, 70), (1, 2))
        counts = count_matrix((32, 70), (1, 2), offsets, 70, is_causal=True)
        check((q, k, v), [plan], counts, is_causal=True, scale=0.7)
        check((q, k.transpose(2, 3).contiguous().transpose(2, 3), v), [plan], counts, is_causal=True, scale=1e-3)

    @both
    def test_keys_from_elsewhere(self, is_causal, dtype):
        # A shard of 48 tokens: a local branch, then rows received from other ranks, some of them before all queries.
        local = StridedGroup(*(Rows(0, 16, 3, 1, 16),) * 2, 0, 2, 1, first=True)
        received = StridedGroup(Rows(1, 24, 2, 2, 12), Rows(48, 70, 2, 1, 70), 0, 1, 1)
        aligned = StridedGroup(Rows(0, 48, 1, 3, 16), Rows(190, 16, 1, 1, 16), 1, 1, 1)
        plan = Plan(48, 2, (local, received, aligned), covered=True, square=False)
        counts = torch.zeros(2, 48, 206, dtype=torch.int32)
        for group in (causal(plan) if is_causal else plan).groups:
            for segment in range(group.queries.segments):
                rows, columns = (
                    side.start + segment * side.segment + side.stride * torch.arange(side.count)
                    for side in (group.queries, group.keys)
                )
                seen = band_of(group).int()
                for head in range(group.head, group.head + group.heads * group.head_stride, group.head_stride):
                    counts[head, rows[:, None], columns[None, :]] += seen
        check(tensors(1, 48, 4, 2, 16, dtype, keys=206), [plan], counts, is_causal=is_causal)

    @both
    def test_chained_state(self, is_causal, dtype):
        plan, offsets = dilated(100, 2, (32, 64, 100), (1, 2, 3))
        cut = sum(group.queries.stride == 1 for group in plan.groups)
        parts = [
            replace(plan, groups=plan.groups[:cut]),
            replace(plan, groups=plan.groups[cut:], covered=False, square=False),
        ]
        counts = count_matrix((32, 64, 100), (1, 2, 3), offsets, 100, is_causal=is_causal)
        check(tensors(1, 100, 4, 2, 16, dtype), parts, counts, is_causal=is_causal)

    @both
    @pytest.mark.parametrize("length", [0, 1, 65, 129])
    def test_rows_after_the_end_of_a_sample(self, length, is_causal, dtype):
        w, r = (32, 96), (1, 2)
        plan, offsets = dilated(130, 2, w, r)
        counts = count_matrix(w, r, offsets, 130, is_causal=is_causal)
        counts[:, length:] = counts[:, :, length:] = 0
        check(tensors(1, 130, 2, 2, 16, dtype), [plan], counts, is_causal=is_causal, lengths=torch.tensor([length]))

    @both
    def test_ragged(self, is_causal, dtype):
        w, r, lengths = (32, 96), (1, 2), [50, 1, 70]
        starts = [0, 50, 51]
        counts = torch.zeros(2, 130, 130, dtype=torch.int32)
        plans = []
        for start, length in zip(starts, lengths, strict=True):
            plan, offsets = dilated(length, 2, w, r)
            plans.append(plan)
            sample = count_matrix(w, r, offsets, length, is_causal=is_causal)
            counts[:, start : start + length, start : start + length] = sample
        check(tensors(1, 130, 2, 2, 16, dtype), [tiles.concatenate(plans, starts, 130)], counts, is_causal=is_causal)

    @both
    @pytest.mark.parametrize(
        ("seq_len", "q_block", "k_block", "samples", "heads"),
        [
            (256, 32, 32, 1, 1),
            (100, 64, 32, 1, 2),
            (90, 16, 48, 1, 2),
            (90, 48, 20, 2, 1),
            (300, 256, 128, 1, 2),
            (70, 1, 1, 2, 1),
            (70, 1, 16, 1, 2),
            (70, 16, 1, 1, 1),
        ],
    )
    @whole_or_cut
    def test_layouts(self, seq_len, q_block, k_block, samples, heads, is_cut, is_causal, dtype):
        lists = layout(seq_len, q_block, k_block, is_causal, samples, heads, is_cut=is_cut)
        plan, _ = dilated(seq_len, 2, (seq_len,), (1,))
        counts = lists.dense_mask().int().expand(samples, 2, -1, -1)
        check(tensors(samples, seq_len, 2, 2, 16, dtype), [plan], counts, is_causal=is_causal, layouts={seq_len: lists})

    @both
    @whole_or_cut
    @pytest.mark.parametrize(("q_block", "k_block"), PARTS_OF_A_LAYOUT)
    def test_some_rows_of_a_layout(self, q_block, k_block, is_cut, is_causal, dtype):
        plan, lists, counts = part_of_a_layout(q_block, k_block, is_causal, is_cut)
        check(tensors(1, 100, 4, 2, 16, dtype, keys=130), [plan], counts, layouts={130: lists})

    @both
    @whole_or_cut
    def test_lists_per_query_head(self, is_cut, is_causal, dtype):
        lists = layout(64, 32, 32, is_causal, heads=2, is_cut=is_cut)
        plan, _ = dilated(64, 1, (64,), (1,))
        check(
            tensors(1, 64, 2, 1, 16, dtype),
            [plan],
            lists.dense_mask()[0].int(),
            is_causal=is_causal,
            layouts={64: lists},
        )

    @both
    @pytest.mark.parametrize("shared", [False, True], ids=["per KV head", "shared"])
    @pytest.mark.parametrize(
        ("group", "q_block", "k_block", "head_dim"), [(3, 1, 1, 20), (16, 1, 1, 40), (6, 7, 1, 24), (40, 1, 16, 8)]
    )
    def test_query_heads_that_share_lists(self, group, q_block, k_block, head_dim, shared, is_causal, dtype):
        """A tile holds them side by side, whatever the strides."""
        lists = layout(67, q_block, k_block, is_causal, samples=2, heads=1 if shared else 2)
        counts = lists.dense_mask().int().expand(2, 2, -1, -1)
        q, k, v = tensors(2, 67, 2 * group, 2, head_dim, dtype)
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
        plan, _ = dilated(67, 2, (67,), (1,))
        options = {"is_causal": is_causal, "layouts": {67: lists}}
        (launch,) = cpu.launches(problem(plan, **options), q, "queries")
        assert launch.joined == (1 if launch.few else group)
        check((q, k, v), [plan], counts, **options)
        check((q[..., :1].expand_as(q), k, v), [plan], counts, **options)

    @both
    @pytest.mark.parametrize(
        ("group", "q_block", "k_block", "head_dim"), [(1, 1, 16, 20), (3, 1, 100, 40), (2, 3, 300, 8), (1, 5, 32, 130)]
    )
    def test_rows_that_list_a_block_fill_the_lanes(self, group, q_block, k_block, head_dim, is_causal, dtype):
        lists = layout(450, q_block, k_block, is_causal, samples=2, heads=2)
        plan, _ = dilated(450, 2, (450,), (1,))
        inputs = tensors(2, 450, 2 * group, 2, head_dim, dtype)
        hidden = torch.rand(2, 450) < 0.3
        hidden[1, : 2 * k_block] = True
        options = {"is_causal": is_causal, "layouts": {450: lists}, "softcap": 0.5}
        (launch,) = cpu.launches(problem(plan, **options), inputs[0], "queries", forward=True)
        assert launch.by_block
        assert launch.rows > launch.joined * q_block  # several tiles
        counts = lists.dense_mask().int() * ~hidden[:, None, None]
        check(inputs, [plan], counts, hidden=hidden, **options)

    @both
    def test_blocks_for_single_queries_inside_strided_rows(self, is_causal, dtype):
        """Launches continue one another, and jobs have tiles of several segments."""
        w, r, seq_len = (100, 300), (1, 2), 310
        plan, offsets = dilated(seq_len, 2, w, r)
        lists = {n: layout(n, 1, 16, is_causal) for n in {group.queries.count for group in plan.groups}}
        counts = counts_inside(lists, w, r, offsets, seq_len)
        options = {"is_causal": is_causal, "layouts": lists}
        inputs = tensors(1, seq_len, 6, 2, 24, dtype)
        found = cpu.launches(problem(plan, **options), inputs[0], "queries", forward=True)
        assert any(x.by_block and x.rows > x.joined for x in found)
        check(inputs, [plan], counts, **options)

    @both
    def test_blocks_for_single_queries_in_samples_of_any_length_with_dropout(self, is_causal, dtype):
        lists = layout(150, 1, 16, is_causal, samples=2, heads=2)
        inputs = [torch.randn(2, 150, heads, 24).to(dtype) for heads in (4, 2, 2)]

        def call(q, k, v, **options):
            return attention(q, k, v, lists, is_causal=is_causal, lengths=[150, 71], **options)

        expected = test_dropout.results(call, [x.double() for x in inputs], backend="reference")
        for actual, wanted in zip(test_dropout.results(call, inputs, backend="cpu"), expected, strict=True):
            assert relative_error(actual, wanted) <= TOLERANCE[dtype]

    @both
    @pytest.mark.parametrize("name", "qkv")
    def test_what_single_queries_see_of_a_number_that_is_not_finite(self, name, is_causal, dtype):
        lists = layout(150, 1, 16, is_causal, heads=2)
        inputs = dict(zip("qkv", tensors(1, 150, 4, 2, 24, dtype), strict=True))
        inputs[name][0, 70, 1, 5] = math.nan
        options = {"is_causal": is_causal, "return_lse": True}
        actual = attention(**inputs, pattern=lists, backend="cpu", **options)
        doubled = {key: x.double() for key, x in inputs.items()}
        expected = attention(**doubled, pattern=lists, backend="reference", **options)
        for x, y in zip(actual, expected, strict=True):
            assert torch.equal(x.isnan(), y.isnan())
            assert relative_error(x.nan_to_num(0, 0, 0), y.nan_to_num(0, 0, 0)) <= TOLERANCE[dtype]

    @both
    def test_single_queries_of_some_rows_of_a_layout(self, is_causal, dtype):
        plan, lists, counts = part_of_a_layout(1, 16, is_causal)
        check(tensors(1, 100, 4, 2, 16, dtype, keys=130), [plan], counts, layouts={130: lists})

    def test_query_heads_with_lists_of_their_own_are_apart(self, dtype):
        lists = layout(67, 1, 1, False, heads=4)
        plan, _ = dilated(67, 2, (67,), (1,))
        options = {"is_causal": False, "layouts": {67: lists}}
        q, k, v = tensors(1, 67, 4, 2, 16, dtype)
        (launch,) = cpu.launches(problem(plan, **options), q, "queries")
        assert launch.joined == 1
        check((q, k, v), [plan], lists.dense_mask()[0].int(), **options)

    @both
    @whole_or_cut
    def test_layouts_inside_strided_rows(self, is_cut, is_causal, dtype):
        w, r, seq_len = (48, 96), (1, 2), 110
        plan, offsets = dilated(seq_len, 2, w, r)
        numbers = {group.queries.count for group in plan.groups}
        lists = {count: layout(count, 16, 16, is_causal, is_cut=is_cut) for count in numbers}
        counts = counts_inside(lists, w, r, offsets, seq_len)
        check(tensors(1, seq_len, 2, 2, 24, dtype), [plan], counts, is_causal=is_causal, layouts=lists)

    @both
    @whole_or_cut
    @pytest.mark.parametrize("share", [0.3, 0.95])
    def test_layouts_and_hidden_keys(self, share, is_cut, is_causal, dtype):
        lists = layout(300, 128, 128, is_causal, is_cut=is_cut)
        hidden = torch.rand(1, 300) < share
        counts = (lists.dense_mask()[0] & ~hidden).int().expand(2, -1, -1)
        plan, _ = dilated(300, 2, (300,), (1,))
        options = {"is_causal": is_causal, "layouts": {300: lists}, "hidden": hidden}
        check(tensors(1, 300, 4, 2, 16, dtype), [plan], counts, **options)

    @pytest.mark.parametrize("head_dim", [24, 64, 100, 256])
    def test_masks_of_bits_in_long_blocks(self, head_dim, dtype):
        lists = layout(700, 600, 300, False, density=0.8, is_cut=True)
        plan, _ = dilated(700, 1, (700,), (1,))
        counts = lists.dense_mask()[0].int()
        check(tensors(1, 700, 3, 1, head_dim, dtype), [plan], counts, layouts={700: lists})

    @pytest.mark.parametrize("name", test_dropout.CALLS)
    def test_dropout_is_every_backend_s(self, name, dtype):
        inputs = test_dropout.tensors(dtype)
        call = test_dropout.CALLS[name]
        expected = test_dropout.results(call, [x.double() for x in inputs], backend="reference")
        for actual, wanted in zip(test_dropout.results(call, inputs, backend="cpu"), expected, strict=True):
            assert relative_error(actual, wanted) <= TOLERANCE[dtype]

    @pytest.mark.parametrize("name", "qkv")
    @pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
    def test_what_sees_a_number_that_is_not_finite(self, name, number, dtype):
        test_bad_input.test_nan_and_inf_pass_through(name, number, "cpu", dtype)

    @both
    @pytest.mark.parametrize("number", [math.nan, math.inf])
    def test_hidden_keys_reach_nothing(self, number, is_causal, dtype):
        test_bad_input.test_a_hidden_key_reaches_nothing(number, is_causal, "cpu", dtype)

    @both
    def test_other_samples_reach_nothing(self, is_causal, dtype):
        test_bad_input.test_what_lies_beyond_a_sample_reaches_nothing(is_causal, "cpu", dtype)

    @pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("name", "qkv")
    def test_causal_rows_before_a_number_that_is_not_finite(self, name, number, dtype):
        """out, lse and gradients are NaN where the oracle's are, and right elsewhere, inside a tile too."""
        inputs = dict(zip("qkv", tensors(1, 50, 1, 1, 16, dtype), strict=True))
        inputs[name][0, 20, 0, 3] = number
        plan, offsets = dilated(50, 1, (50,), (1,))
        counts = count_matrix((50,), (1,), offsets, 50, is_causal=True)
        cotangents = {"out": torch.randn(1, 50, 1, 16).to(dtype), "lse": torch.randn(1, 1, 50)}

        def oracle(q, k, v):
            out, lse = attend(q, k, v, counts, Scores(0.25))
            return out, lse.transpose(1, 2)

        options = {"is_causal": True, "scale": 0.25}
        found = evaluate(lambda *x: _Attention.apply(*x, [plan], options), tuple(inputs.values()), cotangents)
        wanted = evaluate(
            oracle, tuple(x.double() for x in inputs.values()), {x: y.double() for x, y in cotangents.items()}
        )
        for result in ("out", "lse"):
            assert relative_error(found[result], wanted[result]) <= TOLERANCE[dtype]
        rows = slice(0, 20) if name != "q" else [i for i in range(50) if i != 20]
        assert found["dq"][:, rows].isfinite().all()
        assert relative_error(found["dq"][:, rows], wanted["dq"][:, rows]) <= TOLERANCE[dtype]
        if name == "q":
            assert relative_error(found["dk"][:, 21:], wanted["dk"][:, 21:]) <= TOLERANCE[dtype]
            assert relative_error(found["dv"][:, 21:], wanted["dv"][:, 21:]) <= TOLERANCE[dtype]

    @pytest.mark.parametrize("number", [math.nan, math.inf])
    @pytest.mark.parametrize("name", "qkv")
    def test_masks_of_bits_hide_a_number_that_is_not_finite(self, name, number, dtype):
        """Rows that do not see it are as without it, and rows that do are not finite."""
        shown = torch.rand(50, 50) < 0.5
        lists = BlockLayout.from_mask(shown, 50, 32)
        plan, _ = dilated(50, 1, (50,), (1,))
        options = {"is_causal": False, "scale": 0.25, "layouts": {50: lists}}
        inputs = dict(zip("qkv", tensors(1, 50, 1, 1, 16, dtype), strict=True))
        cotangents = {"out": torch.randn(1, 50, 1, 16).to(dtype)}

        def results():
            return evaluate(lambda *x: _Attention.apply(*x, [plan], options), tuple(inputs.values()), cotangents)

        wanted = results()
        inputs[name][0, 20, 0, 3] = number
        found = results()
        sees = shown[:, 20] if name != "q" else torch.arange(50) == 20
        for result in ("out", "dq"):
            assert torch.equal(found[result][:, ~sees], wanted[result][:, ~sees])
        assert not found["out"][0, sees].isfinite().all(-1).all(-1).any()


@sets_and_types(ALL)
@five_and_seven
class TestSoftcap(Forced):
    @both
    @pytest.mark.parametrize("softcap", [0.5, 2.0, 1e6])
    def test_patterns(self, softcap, is_causal, dtype):
        check_dilated(2, 129, 4, 2, 24, (64, 128, 129), (1, 3, 2), dtype, is_causal, softcap=softcap, scale=0.5)

    @both
    @pytest.mark.parametrize("block", [32, 1])
    @whole_or_cut
    def test_layouts(self, block, is_cut, is_causal, dtype):
        lists = layout(100, block, block, is_causal, samples=2, is_cut=is_cut)
        plan, _ = dilated(100, 2, (100,), (1,))
        counts = lists.dense_mask().int().expand(2, 2, -1, -1)
        options = {"is_causal": is_causal, "layouts": {100: lists}, "softcap": 0.5}
        check(tensors(2, 100, 4, 2, 16, dtype), [plan], counts, **options)

    @pytest.mark.parametrize("scale", [-0.7, 0.0, 1e30])
    def test_windows_masks_and_dropout(self, scale, dtype):
        q, k, v = tensors(2, 150, 4, 2, 24, dtype)
        errors = test_windows.errors_of_capped_windows("cpu", q, k, v, scale)
        assert all(error <= 1 for error in errors.values()), f"errors over their bars: {errors}"

    @pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("name", "qkv")
    def test_what_sees_a_number_that_is_not_finite(self, name, number, dtype):
        inputs = dict(zip("qkv", tensors(1, 50, 1, 1, 16, dtype), strict=True))
        inputs[name][0, 20, 0, 3] = number
        plan, offsets = dilated(50, 1, (50,), (1,))
        found = cpu.forward(problem(plan, is_causal=True, scale=0.25, softcap=0.5), *inputs.values())
        counts = count_matrix((50,), (1,), offsets, 50, is_causal=True)
        wanted = attend(*(x.double() for x in inputs.values()), counts, Scores(0.25, 0.5))
        for actual, expected in zip(found, wanted, strict=True):
            assert relative_error(actual, expected) <= TOLERANCE[dtype]


@random_calls(100)
@given(
    call=st.one_of(
        test_properties.calls(), test_properties.calls(ragged=True), test_properties.calls(ragged=True, compat=True)
    ),
    kind=st.sampled_from([*ALL, *((x, torch.float16) for x in TILES)]),
    most_idle=st.sampled_from([0.0, 1.0, math.inf]),
)
def test_random_calls(call, kind, most_idle):
    instruction_set, dtype = kind
    with pytest.MonkeyPatch.context() as patch:
        force(instruction_set, patch)
        patch.setattr(cpu, "MOST_IDLE", most_idle)
        if most_idle == 1.0:  # some launches of a call are for the kernel of five products, and some are not
            patch.setattr(cpu.Launch, "idle", lambda launch, *_: 2.0 * (len(launch.weights) % 2))
        test_properties.check(call, dtype, "cpu")


def test_the_error_of_the_exponential():
    """The error of 2^x, where the scale makes x of q: one of two keys has the score 0, the other x."""
    x = torch.linspace(-40, 0, 4001)
    q, k, v = x[None, :, None, None], torch.tensor([0.0, 1.0])[None, :, None, None], torch.tensor([0.0, 1.0])
    group = StridedGroup(Rows(0, len(x), 1, 1, len(x)), Rows(0, 2, 1, 1, 2), 0, 1, 1, first=True)
    plan = Plan(len(x), 1, (group,), covered=True, square=False)
    out, _ = cpu.forward(problem(plan, is_causal=False, scale=math.log(2)), q, k, v[None, :, None, None])
    p = 2 ** x.double()
    assert (
        out.flatten() / (p / (1 + p)) - 1
    ).abs().max() < 2e-7 + 3 * 2**-24  # and the roundings of 1 + p and p / (1 + p)


@pytest.mark.parametrize("instruction_set", [*IN_FLOAT32, FEW])
@pytest.mark.parametrize("softcap", [1e-40, 1.0, 50.0, 1e38, 1e300])
def test_the_error_of_the_hyperbolic_tangent(softcap, instruction_set, monkeypatch):
    """The lse of a query that sees one key is its capped score."""
    force(instruction_set, monkeypatch)
    x = torch.logspace(-20, 25, 4001)
    x = torch.cat([x, -x, torch.tensor([0.0])])
    group = StridedGroup(Rows(0, len(x), 1, 1, len(x)), Rows(0, 1, 1, 1, 1), 0, 1, 1, first=True)
    plan = Plan(len(x), 1, (group,), covered=True, square=False)
    one = torch.ones(1, 1, 1, 1)
    _, lse = cpu.forward(problem(plan, scale=1.0, softcap=softcap), x[None, :, None, None], one, one)
    torch.testing.assert_close(
        lse.flatten().double(), softcap * (x.double() / softcap).tanh(), rtol=3e-7 + 3 * 2**-24, atol=1e-12
    )


@both
@sets_and_types(ALL)
def test_scores_that_single_precision_holds_in_steps_of_hundreds(instruction_set, dtype, is_causal, monkeypatch):
    """Each query finds its own key: rows of 1 and -1 have products of 64 with themselves, of 60 at most with others."""
    force(instruction_set, monkeypatch)
    q, v = torch.randn(1, 300, 1, 64).sign().to(dtype), torch.randn(1, 300, 1, 64).to(dtype)
    others = q[0, :, 0].float() @ q[0, :, 0].float().T - 64 * torch.eye(300)
    assert others.max() <= 60
    plan, scale = dilated(300, 1, (300,), (1,))[0], 1e8
    for sign in (1, -1):  # where all scores are far below 0, those of the query's opposite are the highest
        out, lse = cpu.forward(problem(plan, is_causal=is_causal, scale=scale), q, sign * q, sign * v)
        if sign == 1:
            torch.testing.assert_close(out, v, rtol=2**-16 * (instruction_set == HALVES), atol=0)
            torch.testing.assert_close(lse, torch.full_like(lse, 64 * scale))
        assert out.isfinite().all()
        assert lse.isfinite().all()


@pytest.mark.parametrize("instruction_set", [*IN_FLOAT32, *(x for x, _ in IN_BFLOAT16)])
def test_lse_of_bfloat16(instruction_set, monkeypatch):
    """Sums of probabilities are not rounded."""
    force(instruction_set, monkeypatch)
    q, k, v = tensors(1, 512, 1, 1, 64, torch.bfloat16)
    plan, offsets = dilated(512, 1, (512,), (1,))
    counts = count_matrix((512,), (1,), offsets, 512, is_causal=False)
    _, lse = cpu.forward(problem(plan, is_causal=False, scale=0.125), q, k, v)
    _, expected = attend(q.double(), k.double(), v.double(), counts, Scores(0.125))
    assert (lse - expected).abs().max() < 2e-6 * expected.abs().max()


needs_emulation = pytest.mark.skipif(not EMULATES, reason="needs AVX-512 with bfloat16 and a C++ compiler")


def results_of_each_kernel(monkeypatch):
    inputs = (*tensors(1, 300, 2, 1, 40, torch.bfloat16), dilated(300, 1, (64, 300), (1, 2))[0])
    found = []
    for most_idle in (math.inf, 0.0):
        monkeypatch.setattr(cpu, "MOST_IDLE", most_idle)
        found += results(2, *inputs)
    return found


@needs_emulation
def test_tiles_are_given_up(monkeypatch):
    """Tiles are released as often as they were configured.

    The emulation refuses tiles that are not configured, and configuring tiles that are.
    """
    force(EMULATED, monkeypatch)
    configured, released = (ctypes.c_int64.in_dll(emulated_amx(), x) for x in ("configured", "released"))
    before = configured.value
    results_of_each_kernel(monkeypatch)
    assert released.value == configured.value > before


@needs_emulation
@pytest.mark.skipif(MACHINE.highest < AMX, reason="needs AMX")
def test_the_emulation_is_exact(monkeypatch):
    emulated, real = [], []
    for found, instruction_set in ((emulated, EMULATED), (real, AMX)):
        torch.manual_seed(0)
        with monkeypatch.context() as patch:
            force(instruction_set, patch)
            found += results_of_each_kernel(patch)
    assert all(map(torch.equal, emulated, real))


@pytest.mark.skipif(not TILES, reason="needs AMX, or AVX-512 with bfloat16 and a C++ compiler to emulate it")
def test_float32_in_halves(monkeypatch):
    """Only where PyTorch's switch allows it, and as exact as said, in every result."""
    inputs = (*tensors(1, 1024, 2, 1, 64), dilated(1024, 1, (256, 1024), (1, 2))[0])
    exact = results(2, *inputs)
    with monkeypatch.context() as patch:
        force(HALVES, patch)
        halves = results(2, *inputs)
        patch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
        highest = results(2, *inputs)
    assert all(map(torch.equal, highest, exact))
    errors = [relative_error(*pair) for pair in zip(halves, exact, strict=True)]
    assert 1e-6 < max(errors) < 3e-5


def test_nothing():
    empty = Plan(8, 2, (), covered=False, square=True)
    q, k, v = tensors(1, 8, 2, 2, 16)
    out, lse = cpu.forward(problem(empty, is_causal=False, scale=1.0), q, k, v)
    assert not out.any()
    assert (lse == -math.inf).all()
    assert not any(
        x.any() for x in cpu.backward(problem(empty, is_causal=False, scale=1.0), q, None, q, k, v, out, lse)
    )
    plan = dilated(8, 2, (8,), (1,))[0]
    assert cpu.forward(problem(plan, is_causal=False, scale=1.0), *(x[:0] for x in (q, k, v)))[0].shape == (0, 8, 2, 16)
    headless = q[:, :, :0].clone(), None, q[:, :, :0], k, v, out[:, :, :0], lse[:, :, :0]
    leave_nan_in_the_memory_of_threads()
    assert not any(x.any() for x in cpu.backward(problem(plan, is_causal=False, scale=1.0), *headless))


def test_rows_beyond_two_to_the_31_elements():
    """The last rows of tensors whose other rows are never touched, and so take no memory."""
    tokens, rows = 2**28 + 64, 64
    group = StridedGroup(*(Rows(tokens - rows, rows, 1, 1, rows),) * 2, 0, 1, 1, first=True)
    plan = Plan(tokens, 1, (group,), covered=True, square=True)  # says so, to leave the rest untouched

    def far(x):
        many = torch.from_numpy(np.empty((1, tokens, 1, 16), np.float16))  # not torch.empty, which fills with NaN here
        many[:, -rows:] = x
        return many

    few = tensors(1, rows, 1, 1, 16, torch.float16)
    expected = cpu.forward(problem(dilated(rows, 1, (rows,), (1,))[0], is_causal=True, scale=0.25), *few)
    torch.use_deterministic_algorithms(False)
    found = cpu.forward(problem(plan, is_causal=True, scale=0.25), *map(far, few))
    torch.use_deterministic_algorithms(True)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x[:, -rows:], y)


def test_owners_share_no_queries():
    plan, _ = dilated(512, 2, (64, 128), (1, 2))
    for is_causal in (False, True):
        for launch in cpu.launches(problem(plan, is_causal, 1.0), torch.empty(1, 512, 2, 8), "keys", owned=True):
            seen = []
            lines = launch.table.lines
            for first, last in zip(launch.jobs[:-1].tolist(), launch.jobs[1:].tolist(), strict=True):
                rows = set()
                for line in lines[first:last].tolist():
                    for i in range(tiles.TILE_FIELDS, len(line), tiles.SPAN_FIELDS):
                        start, stride, count, _, _ = line[i : i + tiles.SPAN_FIELDS]
                        rows |= {(line[tiles.HEAD], start + j * stride) for j in range(count)}
                assert not any(rows & other for other in seen)
                seen.append(rows)
            assert sum(map(len, seen)) == len(set().union(*seen))
            assert len(seen) >= 8  # two heads, four segments of 128
            plain = cpu.launches(problem(plan, is_causal, 1.0), torch.empty(1, 512, 2, 8), "keys")
            assert sorted(map(tuple, lines.tolist())) in [sorted(map(tuple, x.table.lines.tolist())) for x in plain]


def test_idle_threads_are_estimated_as_samples_come_one_after_another():
    (launch,) = cpu.launches(problem(dilated(64, 1, (64,), (1,))[0], False, 1.0), torch.empty(1, 64, 1, 8), "queries")
    launch = replace(launch, weights=np.array([4, 1]))
    assert launch.idle(threads=2, batch=3) == 9 / 7.5  # 4 and 4 and 1 beside 1 and 4 and 1


@pytest.mark.parametrize(("before", "together"), [(128, True), (2000, False)])
def test_heads_share_pages_of_memory_where_a_window_is_narrow(before, together):
    plan = plan_of(Window(before).branches(4), (0, 4096), None, True)
    (launch,) = cpu.launches(problem(plan, True, 1.0), torch.empty(1, 4096, 4, 8), "queries")
    heads, starts = launch.table.lines[:, [tiles.HEAD, tiles.START]].T.numpy()
    assert len(set(zip(heads, starts, strict=True))) == len(heads) > 4
    (changes,) = np.diff(heads).nonzero()
    assert (len(changes) > 4) == together
    assert (np.diff(starts // NEARBY) >= 0).all() == together


@both
def test_a_launch_of_few_rows_leaves_the_others_to_the_kernel_of_five_products(is_causal, monkeypatch):
    """This happens on a rank of a large world, whose shard has few rows of the farthest branches."""
    force(IN_FLOAT32[0], monkeypatch)
    monkeypatch.setattr(cpu.Processor, "most_few", lambda *_: 4)
    monkeypatch.setattr(cpu, "MOST_IDLE", math.inf)
    ran, run = [], cpu.run
    monkeypatch.setattr(cpu, "run", lambda kernel, arguments, launch: (
        ran.append((kernel, launch.few, kernel == "dkdv" and arguments.call.dq is not None)),
        run(kernel, arguments, launch),
    ))  # fmt: skip
    check_dilated(2, 150, 4, 2, 24, (64, 150, 150), (1, 2, 64), torch.float32, is_causal)
    backward = [x for x in ran if x[0] != "forward"]
    assert sorted(backward[1:]) == [("dkdv", False, True)] * 2 + [("dkdv", True, False), ("dq", True, False)]


def test_sums_in_float32_are_let_go_one_by_one():
    """A backward in bfloat16 holds out, six times its bytes for three sums, and one result."""
    case = Case(
        method="dilated", seq_len=1024, heads=2, segment_lengths=(512, 1024), dilation_rates=(1, 2), dtype="bfloat16",
        backend="cpu",
    )  # fmt: skip
    work = case.contender(torch.device("cpu"), backward=True)
    assert profile(lambda: list(work()), torch.device("cpu"), runs=1).peak_bytes < 8.5 * case.out_bytes


# ---- threads


def results(threads, q, k, v, plan):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    out, lse = cpu.forward(problem(plan, is_causal=True, scale=0.125), q, k, v)
    gradients = cpu.backward(problem(plan, is_causal=True, scale=0.125), out, None, q, k, v, out, lse)
    torch.set_num_threads(before)
    return out, lse, *gradients


@pytest.mark.parametrize(("tokens", "threads"), [(64, 1), (8192, 2)])
def test_threads_join_where_memory_takes_long(tokens, threads, monkeypatch):
    """A new token has few scores, and its keys are read once."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(cpu, "ONE_THREAD", 2**19)
    q, (k, v) = torch.randn(1, 1, 4, 64), (torch.randn(1, tokens, 4, 64) for _ in range(2))
    plan = plan_of(Branches((tokens,), (1,), ((0,) * 4,)), (tokens - 1, tokens), (0, tokens), True)
    assert cpu._Arguments(problem(plan), q, k, v).call.threads == threads


def test_any_number_of_threads_gives_the_same_bits(monkeypatch):
    monkeypatch.setattr(cpu, "MOST_IDLE", math.inf)
    inputs = (*tensors(2, 300, 4, 2, 64), dilated(300, 2, (64, 300), (1, 2))[0])
    expected = results(1, *inputs)
    for threads in (1, 2, 8):
        assert all(map(torch.equal, results(threads, *inputs), expected))


def test_calls_at_once(monkeypatch):
    inputs = (*tensors(1, 200, 2, 2, 64), dilated(200, 2, (64, 200), (1, 2))[0])
    expected = results(2, *inputs)
    same = []

    def call():
        same.append(all(all(map(torch.equal, results(2, *inputs), expected)) for _ in range(5)))

    threads = [threading.Thread(target=call) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same == [True] * 16


@pytest.mark.skipif(sys.platform != "linux", reason="/proc lists a process's threads")
def test_a_call_of_few_jobs_leaves_the_pool_its_threads(fresh_python):
    """GNU OpenMP ends the threads that a smaller team leaves out, and makes them anew for PyTorch's next operator."""
    fresh_python(
        """
        import os
        import torch
        from dilated_attention import Window, attention

        torch.set_num_threads(4)
        many, x = torch.randn(1 << 20), torch.randn(1, 20_000, 2, 64)
        seen = set()
        for _ in range(5):
            many.sin()
            seen.add(frozenset(os.listdir("/proc/self/task")))
            attention(x[:, -1:], x, x, Window(20_000), is_causal=True, q_start=19_999, backend="cpu")
        assert len(seen) == 1, seen
        """
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_on_one_thread(fresh_python):
    """The remedy of docs/troubleshooting.md: PyTorch's own operators would hang on more threads."""
    fresh_python(
        """
        import os, signal, time, warnings
        import torch
        from dilated_attention import Window, attention

        warnings.simplefilter("ignore")
        torch.set_num_threads(2)
        x = torch.randn(1, 4096, 4, 64)

        def gradient(backend):
            q = x.clone().requires_grad_()
            attention(q, q, q, Window(100), is_causal=True, backend=backend).sum().backward()
            return q.grad

        for backend in ("auto", "native"):
            expected = gradient(backend)
            child = os.fork()
            if child == 0:
                torch.set_num_threads(1)
                os._exit(0 if torch.allclose(gradient(backend), expected, atol=1e-4) else 1)
            for _ in range(300):
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    break
                time.sleep(0.1)
            else:
                os.kill(child, signal.SIGKILL)
                raise AssertionError("the child hangs")
            assert status == 0
        """
    )


def test_a_forked_child_and_exit_during_a_call(fresh_python):
    """GNU OpenMP's pool does not survive a fork: a child that used it would hang."""
    fresh_python(
        """
        import os, threading, time, warnings
        import torch
        from dilated_attention.backends import cpu
        from dilated_attention.backends.problem import Problem
        from dilated_attention.patterns import Dilated, Window
        from dilated_attention.plan import plan_dilated
        from dilated_attention.scores import Scores

        torch.set_num_threads(2)
        cpu.ONE_THREAD = 0
        plan = plan_dilated((256,), (1,), Dilated((256,), (1,)).offset_table(2), 256, is_causal=True)
        x = torch.randn(1, 256, 2, 64)

        def call():
            return cpu.forward(Problem(plan, Scores(0.125)), x, x, x)[0]

        def in_a_child():
            child = os.fork()
            if child == 0:
                os._exit(0 if torch.equal(call(), expected) else 1)
            assert os.waitpid(child, 0)[1] == 0

        warnings.simplefilter("ignore")
        assert cpu.missing() is None
        torch.set_num_threads(1)
        expected = call()
        torch.set_num_threads(2)
        torch.ones(1 << 20).add_(1)  # now PyTorch's pool has threads
        in_a_child()
        assert torch.equal(call(), expected)
        in_a_child()

        long = plan_dilated((65536,), (1,), Dilated((65536,), (1,)).offset_table(2), 65536, is_causal=True)
        x = torch.randn(1, 65536, 2, 64)  # seconds: a thread inside PyTorch's own operators aborts the exit
        threading.Thread(target=cpu.forward, args=(Problem(long, Scores(0.125)), x, x, x), daemon=True).start()
        time.sleep(0.3)
        """
    )


@pytest.mark.parametrize("gradients", [False, True])
def test_a_signal_during_a_call(gradients, fresh_python):
    """A call ends at once when a handler raises, and goes on when a handler calls the library itself and returns."""
    fresh_python(
        f"""
        import os, signal, threading, time
        import torch
        from dilated_attention import Dilated, Window, attention
        from dilated_attention.backends import cpu
        from dilated_attention.backends.problem import Problem
        from dilated_attention.plan import plan_dilated
        from dilated_attention.scores import Scores

        torch.set_num_threads(2)
        small = torch.randn(1, 300, 4, 64)
        expected = attention(small, small, small, Window(40), backend="cpu")
        called = []

        def check(*_):
            assert torch.equal(attention(small, small, small, Window(40), backend="cpu"), expected)
            called.append(time.monotonic())

        signal.signal(signal.SIGUSR1, check)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's jobs in the background ignore it
        x = torch.randn(1, 65536, 2, 64)  # seconds
        plan = plan_dilated((65536,), (1,), Dilated((65536,), (1,)).offset_table(2), 65536)
        problem, lse = Problem(plan, Scores(0.125)), torch.zeros(1, 65536, 2)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        threading.Timer(0.6, os.kill, (os.getpid(), signal.SIGINT)).start()
        begin = time.monotonic()
        try:
            if {gradients}:
                cpu.backward(problem, x, None, x, x, x, x, lse)
            else:
                cpu.forward(problem, x, x, x)
        except KeyboardInterrupt:
            assert time.monotonic() - begin < 1.5
        else:
            raise AssertionError("it was not interrupted")
        assert called[0] - begin < 0.6
        check()
        """
    )


@pytest.mark.parametrize("loaded", [False, True])
def test_the_pool_of_a_library_that_is_not_global(loaded):
    """Runs without PyTorch, in whose processes the symbols of its OpenMP are global."""
    found = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line]
    if loaded and not found:
        pytest.skip("PyTorch has no GNU OpenMP here")
    source = f"import ctypes; print(ctypes.CDLL({str(build.LIBRARY)!r}).dilated_attention_has_pool())"
    if loaded:
        source = source.replace(";", f"; ctypes.CDLL({found[0]!r});", 1)
    printed = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout
    assert int(printed) == loaded


# ---- the build


def test_the_structure_of_a_call_is_compared_with_the_compiled_one(monkeypatch):
    cpu.assert_same_fields(cpu._LIBRARY)

    class Swapped(ctypes.Structure):
        _fields_ = [cpu._Call._fields_[-1], *cpu._Call._fields_[:-1]]

    monkeypatch.setattr(cpu, "_Call", Swapped)
    with pytest.raises(AssertionError, match=r"call\.h"):
        cpu.assert_same_fields(cpu._LIBRARY)


def test_missing_kernels_say_how_to_get_them(monkeypatch, tmp_path):
    made = build.LIBRARY.read_bytes()
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "kernels.so")
    assert cpu._load()[2].endswith("-m dilated_attention.kernels.cpu")
    build.LIBRARY.write_bytes(made)
    assert cpu._load()[2] is None
    monkeypatch.setattr(build, "digest", lambda: "0" * 64)  # of sources that were changed since
    assert "of another version; run" in cpu._load()[2]
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "other.so")  # dlopen finds what it has loaded by its name
    build.LIBRARY.write_bytes(b"of another system")
    assert "cannot be loaded" in cpu._load()[2]
    build.LIBRARY.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "install g++ or clang++" in cpu._load()[2]
    with pytest.raises(build.BuildError, match="install g\\+\\+ or clang\\+\\+"):
        build.build()
    monkeypatch.setattr(build.platform, "machine", lambda: "riscv64")
    assert "not linux on riscv64" in cpu._load()[2]


@pytest.mark.parametrize(
    ("why", "word"),
    [("the kernels are not compiled", "compiled"), ("the kernels need a processor with AVX2", "AVX")],
)
def test_without_kernels_native_serves_and_says_why(why, word, monkeypatch, capsys):
    monkeypatch.setattr(cpu, "_MISSING", why)
    q = torch.randn(1, 64, 2, 16)
    said = explain(q, q, q, Dilated((64,), (1,)))
    assert said.backend == "native"
    assert word in said.refusals["cpu"]
    with pytest.raises(BackendError, match=why):
        attention(q, q, q, Dilated((64,), (1,)), backend="cpu")
    main(["info"])
    assert f"backend='cpu' cannot serve this call: {why}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("x86_64-pc-linux-gnu", ("linux", "x86_64")),
        ("aarch64-linux-gnu", ("linux", "arm64")),
        ("arm64-apple-darwin23.5.0", ("darwin", "arm64")),
        ("x86_64-apple-darwin23.5.0", None),
        ("x86_64-w64-mingw32", None),
        ("riscv64-linux-gnu", None),
    ],
)
def test_the_target_of_a_compiler(name, expected, monkeypatch, tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\necho {name}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert (build.target() == expected) == (expected is not None) == (build.target() in build.SERVED)
    assert (build.refusal() is None) == (expected is not None)


def test_a_compiler_by_name_is_that_one_or_none(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no C++ compiler was found (CXX=no-such-compiler)" in build.refusal()
    monkeypatch.setenv("CXX", "env LC_ALL=C c++")
    assert build.compiler() == ["env", "LC_ALL=C", "c++"]
    assert build.refusal() is None


on_x86 = pytest.mark.skipif(MACHINE.arm64, reason="of x86 processors")


def test_a_ragged_batch_is_one_launch(monkeypatch):
    kernels = []
    run = cpu.run
    monkeypatch.setattr(cpu, "run", lambda *x: kernels.append(x[0]) or run(*x))
    q = torch.randn(3, 50, 2, 16, requires_grad=True)
    out = dilated_attention(q, q, q, [64], [1], lengths=[50, 7, 20], backend="cpu")
    out.sum().backward()
    assert kernels.count("forward") == kernels.count("dkdv") == 1


def test_samples_of_other_lengths_need_no_other_plan():
    q = torch.randn(3, 50, 2, 16)
    dilated_attention(q, q, q, [32], [1], lengths=[50, 7, 20], backend="cpu")
    before = plan_cache.info().misses
    dilated_attention(q, q, q, [32], [1], lengths=[3, 50, 41], backend="cpu")
    assert plan_cache.info().misses == before


def test_the_library_needs_nothing_of_python_or_torch():
    if shutil.which("ldd") is None:
        pytest.skip("needs ldd")
    needed = subprocess.run(["ldd", str(build.LIBRARY)], capture_output=True, text=True, check=True).stdout
    assert not any(name in needed for name in ("torch", "python", "stdc++", "gomp"))


@on_x86
def test_the_instructions_of_amx():
    if shutil.which("objdump") is None:
        pytest.skip("needs objdump")
    code = subprocess.run(["objdump", "-d", str(build.LIBRARY)], capture_output=True, text=True, check=True).stdout
    assert "tdpbf16ps" in code
    assert code.count("tilerelease") == code.count("ldtilecfg") > 0


def test_refusals():
    def why(dtype=torch.float32, head_dim=64, seq_len=1, device="cpu"):
        return cpu.refusal(Facts(torch.device(device), dtype, head_dim, seq_len))

    assert why() is None
    assert "float64" in why(dtype=torch.float64)
    assert "head_dim" in why(head_dim=577)
    assert "meta" in why(device="meta")
    assert "tokens" in why(seq_len=2**31)
