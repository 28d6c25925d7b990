"""The Triton kernels in Triton's interpreter, against the oracle; and the tables of tiles, which need no Triton.

Triton decides when it is imported whether to interpret, so the interpreted tests run in child processes with
TRITON_INTERPRET=1, one per class. To run them by hand: TRITON_INTERPRET=1 pytest tests/test_kernels.py.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tracemalloc
from collections import Counter
from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import test_bad_input
import test_biases
import test_blocks
import test_dropout
import test_properties
import test_windows
from conformance import (
    PARTS_OF_A_LAYOUT,
    band_of,
    causal,
    counts_inside,
    excesses,
    layout,
    part_of_a_layout,
    problem,
    random_calls,
)
from dilated_attention import Neighborhood, attention, dilated_attention
from dilated_attention.backends import tiles
from dilated_attention.backends import triton as backend
from dilated_attention.backends.facts import Facts
from dilated_attention.backends.reference import count_matrix, phantom_counts
from dilated_attention.backends.table import BACKENDS
from dilated_attention.cache import PlanCache
from dilated_attention.errors import UnsupportedError
from dilated_attention.kernels.configurations import ARCHITECTURES, Architecture, Shape
from dilated_attention.patterns import Dilated, Window
from dilated_attention.plan import Plan, Rows, StridedGroup, plan_dilated, plan_of
from tolerances import TOLERANCE, relative_error

tl = pytest.importorskip("triton.language", reason="Triton runs on Linux only")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in a child process with TRITON_INTERPRET=1")
# The interpreter reads arrays of one element as numbers, and numpy warns of what overflows in rows that are not there.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]


def why(q):
    return backend.refusal(Facts(q.device, q.dtype, q.shape[-1], q.shape[1]))


class _Attention(torch.autograd.Function):
    """The gradients of a forward that has been run."""

    @staticmethod
    def forward(ctx, q, k, v, state, plans, options):
        out, lse = (x.clone() for x in state)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plans, ctx.options = plans, options
        return out, lse.transpose(1, 2)

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        state = None
        if len(ctx.plans) > 1:
            state = tuple(torch.zeros(x.shape) for x in (q, k, v))
        for plan in ctx.plans:
            gradients = backend.backward(
                problem(plan, **ctx.options), dout, dlse.transpose(1, 2), q, k, v, out, lse, state=state
            )
        return *(x.to(q.dtype) for x in gradients), None, None, None


def check(inputs, plans, counts, *, phantoms=None, scale=None, softcap=0.0, gradient_of=("out", "lse"), **options):
    """out, lse and gradients of the plans, chained, against the oracle of the count matrix."""
    scale = scale or inputs[0].shape[-1] ** -0.5
    options = {"is_causal": False, "scale": scale, "softcap": softcap} | options
    assert why(inputs[0]) is None
    state = None
    for plan in plans:
        state = backend.forward(problem(plan, **options), *inputs, state=state)
    errors = excesses(
        lambda q, k, v: _Attention.apply(q, k, v, state, plans, options),
        inputs, counts, scale=scale, softcap=softcap, phantoms=phantoms, gradient_of=gradient_of,
    )  # fmt: skip
    assert all(error <= 1 for error in errors.values()), f"errors over their bars: {errors}"


def tensors(batch, seq_len, heads, kv_heads, head_dim, dtype=torch.float32, keys=None):
    return tuple(
        torch.randn(batch, tokens, number, head_dim).to(dtype)
        for tokens, number in ((seq_len, heads), (keys or seq_len, kv_heads), (keys or seq_len, kv_heads))
    )


def dilated(seq_len, kv_heads, w, r, **options):
    """The plan of a pattern and its table."""
    table = Dilated(w, r, **options).offset_table(kv_heads)
    return plan_dilated(w, r, table, seq_len), table


thorough = pytest.mark.thorough
FIRST = "TestDilated", "TestTypes", "TestGroups", "TestBlocks"
SECOND = "TestDropout", "TestNotFinite", "TestWindows", "TestSoftcap", "TestBiases"

# ---- in child processes


@pytest.mark.skipif(INTERPRETED, reason="is the child process")
@pytest.mark.parametrize(
    ("marks", "names"),
    [
        ("not thorough", FIRST),
        ("not thorough", SECOND),
        pytest.param("thorough", FIRST, marks=thorough),
        pytest.param("thorough", SECOND, marks=thorough),
    ],
    ids=str,
)
def test_in_the_interpreter(marks, names):
    in_a_child_process("-m", marks, *(f"{__file__}::{name}" for name in names))


def in_a_child_process(*words):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", *words]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert child.returncode == 0, child.stdout + child.stderr


class Case(NamedTuple):
    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    w: tuple[int, ...]
    r: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    batch: int = 1


TYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
HEAD_DIMS = (16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256)
both = pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
whole_or_cut = pytest.mark.parametrize("is_cut", [False, True], ids=["whole blocks", "masks of bits"])


def each_once(name, values):
    """Every value, in turns with and without causality; the other of both is thorough."""
    return pytest.mark.parametrize(
        (name, "is_causal"),
        [
            pytest.param(value, is_causal, marks=() if is_causal == i % 2 else thorough)
            for i, value in enumerate(values)
            for is_causal in (False, True)
        ],
        ids=str,
    )


@pytest.fixture(autouse=True)
def bfloat16_products(monkeypatch):
    """The interpreter multiplies the bits of bfloat16 numbers: give it the numbers."""
    if not INTERPRETED:
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply = InterpreterBuilder.create_dot

    def number(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self, a, b, *rest):
        return multiply(self, number(a), number(b), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def check_case(case, is_causal):
    plan, table = dilated(case.seq_len, case.kv_heads, case.w, case.r)
    counts = count_matrix(case.w, case.r, table, case.seq_len, is_causal=is_causal)
    inputs = tensors(case.batch, case.seq_len, case.heads, case.kv_heads, case.head_dim, case.dtype)
    check(inputs, [plan], counts, is_causal=is_causal)


@interpreted
class TestTypes:
    """Every head_dim that has code of its own, between two powers of two and on them, and every type."""

    @pytest.mark.parametrize(("head_dim", "is_causal"), [*zip(HEAD_DIMS, cycle((False, True)), strict=False)])
    def test_head_dims(self, head_dim, is_causal):
        check_case(Case(70, 2, 1, head_dim, (34, 70), (1, 2)), is_causal)

    @pytest.mark.parametrize(
        ("dtype", "head_dim", "is_causal"),
        [
            pytest.param(torch.float16, 16, False, marks=thorough),
            (torch.float16, 128, True),
            (torch.bfloat16, 48, True),
            pytest.param(torch.bfloat16, 64, False, marks=thorough),
        ],
        ids=str,
    )
    def test_half_precision(self, dtype, head_dim, is_causal):
        check_case(Case(130, 2, 2, head_dim, (64, 130), (1, 2), dtype), is_causal)


@interpreted
class TestDilated:
    @each_once(
        "case",
        [
            Case(128, 2, 2, 64, (64, 128), (1, 2)),
            Case(100, 4, 2, 48, (32, 70, 100), (1, 2, 4)),
            Case(75, 3, 3, 24, (50, 100), (3, 2), batch=2),
            Case(100, 2, 1, 96, (100,), (2,)),
            Case(70, 6, 2, 16, (24, 70), (2, 5), batch=2),
            Case(129, 2, 2, 32, (64, 128), (1, 64)),
            Case(90, 2, 2, 128, (64, 256), (1, 3), torch.float16),
            Case(1, 2, 1, 16, (50, 100), (1, 2)),
            Case(2, 4, 1, 16, (1, 2), (1, 2)),
        ],
    )
    def test_patterns(self, case, is_causal):
        check_case(case, is_causal)

    def test_nested_branches_share_a_launch(self):
        plan, table = dilated(256, 2, (64, 128, 256), (1, 2, 4))
        shape = Shape(16, 16, 1, 1)
        assert [t.spans for t in tiles.tables(plan, "queries", shape, None, torch.device("cpu"))] == [3]
        counts = count_matrix((64, 128, 256), (1, 2, 4), table, 256, is_causal=False)
        check(tensors(1, 256, 2, 2, 16), [plan], counts)

    def test_head_groups(self):
        plan, table = dilated(96, 3, (32, 96), (1, 2), head_groups=True)
        check(
            tensors(1, 96, 3, 3, 16), [plan], count_matrix((32, 96), (1, 2), table, 96, is_causal=True), is_causal=True
        )

    def test_phantoms(self):
        w, r = (32, 70), (3, 4)
        table = Dilated(w, r, "head_block").offset_table(2)
        plan = plan_dilated(w, r, table, 70, "torchscale")
        counts = count_matrix(w, r, table, 70, is_causal=False)
        check(tensors(1, 70, 2, 2, 16), [plan], counts, phantoms=phantom_counts(w, r, table, 70, is_causal=False))

    @both
    def test_hidden_keys(self, is_causal):
        w, r = (32, 80), (1, 2)
        plan, table = dilated(80, 2, w, r)
        hidden = torch.rand(80) < 0.4
        hidden[:33] = True  # whole segments, hence rows that see nothing
        counts = count_matrix(w, r, table, 80, is_causal=is_causal) * ~hidden
        check(tensors(1, 80, 2, 2, 16), [plan], counts, is_causal=is_causal, hidden=hidden[None])

    def test_strides_and_scale(self):
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(2, 70, 2, 2, 24))
        v = torch.randn(2, 70, 2, 25)[..., 1:]
        plan, table = dilated(70, 2, (32, 70), (1, 2))
        check((q, k, v), [plan], count_matrix((32, 70), (1, 2), table, 70, is_causal=True), is_causal=True, scale=0.7)

    def test_the_backward_takes_out_and_lse_of_any_strides(self):
        q, k, v = tensors(2, 40, 2, 1, 16)
        plan, _ = dilated(40, 1, (16, 40), (1, 2))
        options = {"is_causal": True, "scale": 0.25}
        out, lse = backend.forward(problem(plan, **options), q, k, v)
        expected = backend.backward(problem(plan, **options), q, None, q, k, v, out, lse)
        turned = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (out, lse))
        for x, y in zip(backend.backward(problem(plan, **options), q, None, q, k, v, *turned), expected, strict=True):
            assert torch.equal(x, y)

    @both
    def test_scores_that_overflow_in_rows_that_are_not_there(self, is_causal):
        """If every lse is below -90, exp(0 - lse) is infinite."""
        w, r = (32, 70), (1, 2)
        plan, table = dilated(70, 2, w, r)
        q, k, v = tensors(1, 70, 2, 2, 16, torch.float16)
        counts = count_matrix(w, r, table, 70, is_causal=is_causal)
        check((q / 2 + 5, k / 2 - 5, v), [plan], counts, is_causal=is_causal)

    def test_ragged(self):
        w, r, lengths = (32, 96), (1, 2), [50, 1, 70]
        starts = [0, 50, 51]
        counts = torch.zeros(2, 130, 130, dtype=torch.int32)
        plans = []
        for start, length in zip(starts, lengths, strict=True):
            plan, table = dilated(length, 2, w, r)
            plans.append(plan)
            sample = count_matrix(w, r, table, length, is_causal=True)
            counts[:, start : start + length, start : start + length] = sample
        packed = tiles.concatenate(plans, starts, 130)
        assert not packed.covered  # the rows behind the samples
        check(tensors(1, 130, 2, 2, 16), [packed], counts, is_causal=True)

    def test_a_gradient_of_lse_alone(self):
        plan, table = dilated(50, 2, (32, 50), (1, 2))
        counts = count_matrix((32, 50), (1, 2), table, 50, is_causal=False)
        check(tensors(1, 50, 2, 2, 16), [plan], counts, gradient_of=("lse",))

    @both
    def test_rows_beyond_two_to_the_31_elements(self, is_causal, monkeypatch):
        # The last rows of tensors whose other rows are never touched, and so take no memory.
        tokens, head_dim, rows = 2**27 + 64, 16, 64
        group = StridedGroup(*(Rows(tokens - rows, rows, 1, 1, rows),) * 2, 0, 1, 1, first=True)
        plan = Plan(tokens, 1, (group,), covered=True, square=True)  # says so, to leave the rest untouched

        def last_rows_of(x):
            far = torch.empty(1, tokens, *x.shape[2:], dtype=x.dtype)
            far[:, -rows:] = x
            return far

        few = tensors(1, rows, 1, 1, head_dim, torch.float16)
        many = [last_rows_of(x) for x in few]
        options = {"is_causal": is_causal, "scale": 0.25}
        near = dilated(rows, 1, (rows,), (1,))[0]
        expected = backend.forward(problem(near, **options), *few)
        found = backend.forward(problem(plan, **options), *many)
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x[:, -rows:], y)
        dout = torch.randn(few[0].shape).half()
        expected = backend.backward(problem(near, **options), dout, None, *few, *expected)
        stats = backend._stats
        monkeypatch.setattr(
            backend,
            "_stats",
            lambda *x, held: last_rows_of(stats(*(y if y is None else y[:, -rows:] for y in x), held={})),
        )
        for x, y in zip(
            backend.backward(problem(plan, **options), last_rows_of(dout), None, *many, *found), expected, strict=True
        ):
            assert torch.equal(x[:, -rows:], y)

    @both
    def test_rows_further_apart_than_32_bits(self, is_causal, monkeypatch):
        """One tile of the loop reaches over 2^31 elements; the others of its rows are never touched."""
        apart, count, head_dim = 3 << 20, 70, 16
        tokens = apart * (count - 1) + 1
        rows = Rows(0, tokens, 1, apart, count)
        plan = Plan(tokens, 1, (StridedGroup(rows, rows, 0, 1, 1, first=True),), covered=True, square=True)

        def spread(x):
            far = torch.empty(1, tokens, *x.shape[2:], dtype=x.dtype)
            far[:, ::apart] = x
            return far

        few = tensors(1, count, 1, 1, head_dim, torch.float16)
        options = {"is_causal": is_causal, "scale": 0.25}
        near = dilated(count, 1, (count,), (1,))[0]
        expected = backend.forward(problem(near, **options), *few)
        many = [spread(x) for x in few]
        found = backend.forward(problem(plan, **options), *many)
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x[:, ::apart], y)
        dout = torch.randn(few[0].shape).half()
        expected = backend.backward(problem(near, **options), dout, None, *few, *expected)
        stats = backend._stats
        monkeypatch.setattr(
            backend, "_stats", lambda *x, held: spread(stats(*(y if y is None else y[:, ::apart] for y in x), held={}))
        )
        for x, y in zip(
            backend.backward(problem(plan, **options), spread(dout), None, *many, *found), expected, strict=True
        ):
            assert torch.equal(x[:, ::apart], y)

    @thorough
    @random_calls(3)
    @given(
        call=st.one_of(test_properties.calls(), test_properties.calls(ragged=True), test_properties.calls(compat=True)),
        dtype=TYPES,
    )
    def test_random_calls(self, call, dtype):
        test_properties.check(call, dtype, "triton")


@interpreted
class TestGroups:
    """Plans that no pattern on one device has: keys that are not the queries' rows, plans one after another."""

    def counts(self, groups, kv_heads, queries, keys):
        counts = torch.zeros(kv_heads, queries, keys, dtype=torch.int32)
        for group in groups:
            for segment in range(group.queries.segments):
                rows, columns = (
                    side.start + segment * side.segment + side.stride * torch.arange(side.count)
                    for side in (group.queries, group.keys)
                )
                seen = band_of(group).int()
                for head in range(group.head, group.head + group.heads * group.head_stride, group.head_stride):
                    counts[head, rows[:, None], columns[None, :]] += seen
        return counts

    @both
    def test_keys_from_elsewhere(self, is_causal):
        # A shard of 48 tokens: a local branch, then rows received from other ranks, some of them before all queries.
        local = StridedGroup(*(Rows(0, 16, 3, 1, 16),) * 2, 0, 2, 1, first=True)
        received = StridedGroup(Rows(1, 24, 2, 2, 12), Rows(48, 70, 2, 1, 70), 0, 1, 1)
        aligned = StridedGroup(Rows(0, 48, 1, 3, 16), Rows(190, 16, 1, 1, 16), 1, 1, 1)
        groups = local, received, aligned
        plan = Plan(48, 2, groups, covered=True, square=False)
        inputs = tensors(1, 48, 4, 2, 16, keys=206)
        check(
            inputs, [plan], self.counts(causal(plan).groups if is_causal else groups, 2, 48, 206), is_causal=is_causal
        )

    def test_chained_state(self):
        plan, table = dilated(100, 2, (32, 64, 100), (1, 2, 3))
        cut = sum(group.queries.stride == 1 for group in plan.groups)
        parts = [
            replace(plan, groups=plan.groups[:cut]),
            replace(plan, groups=plan.groups[cut:], covered=False, square=False),
        ]
        counts = count_matrix((32, 64, 100), (1, 2, 3), table, 100, is_causal=True)
        check(tensors(1, 100, 4, 2, 16), parts, counts, is_causal=True)

    def test_decoding(self):
        # One new token sees every second token of a cache, aligned to itself.
        group = StridedGroup(Rows(0, 1, 1, 1, 1), Rows(1, 130, 1, 2, 65), 0, 2, 1, first=True)
        plan = Plan(1, 2, (group,), covered=True, square=False)
        check(tensors(3, 1, 4, 2, 64, keys=131), [plan], self.counts([group], 2, 1, 131), is_causal=True)

    def test_nothing(self):
        empty = Plan(8, 2, (), covered=False, square=True)
        q, k, v = tensors(1, 8, 2, 2, 16)
        out, lse = backend.forward(problem(empty, is_causal=False, scale=1.0), q, k, v)
        assert not out.any()
        assert (lse == -math.inf).all()
        assert not any(
            x.any() for x in backend.backward(problem(empty, is_causal=False, scale=1.0), q, None, q, k, v, out, lse)
        )
        out, lse = backend.forward(
            problem(dilated(8, 2, (8,), (1,))[0], is_causal=False, scale=1.0), *(x[:0] for x in (q, k, v))
        )
        assert out.shape == (0, 8, 2, 16)

    def test_refusals(self):
        q = torch.randn(1, 4, 2, 16)
        assert why(q) is None
        assert "float64" in why(q.double())
        wide = torch.randn(1, 4, 2, 257)
        assert "head_dim" in why(wide)


@interpreted
class TestBlocks:
    @each_once(
        "sizes",
        [(128, 32, 32, 1, 1), (100, 64, 32, 1, 2), (90, 16, 48, 1, 2), (90, 48, 20, 2, 1), (130, 128, 128, 1, 2)],
    )
    @whole_or_cut
    def test_layouts(self, sizes, is_cut, is_causal):
        seq_len, q_block, k_block, samples, heads = sizes
        lists = layout(seq_len, q_block, k_block, is_causal, samples, heads, is_cut=is_cut)
        plan, _ = dilated(seq_len, 2, (seq_len,), (1,))
        counts = lists.dense_mask().int().expand(samples, 2, -1, -1)
        inputs = tensors(samples, seq_len, 2, 2, 16)
        check(inputs, [plan], counts, is_causal=is_causal, layouts={seq_len: lists})

    @each_once("block_size", [8, (4, 6)])
    def test_rows_and_columns_at_positions(self, block_size, is_causal):
        test_windows.test_rows_and_columns_of_a_layout_at_positions("triton", is_causal, block_size)

    @each_once("name", ["a function", "lists a head", "masks of bits"])
    def test_products_at_positions(self, name, is_causal):
        test_windows.check_product(test_windows.PRODUCTS[name], is_causal, "triton", test_windows.SIDES[3:4])

    @whole_or_cut
    @each_once("blocks", PARTS_OF_A_LAYOUT)
    def test_some_rows_of_a_layout(self, blocks, is_cut, is_causal):
        seq_len = 42 if 1 in blocks else 130  # the interpreter takes a minute for 130 lists of single tokens
        plan, lists, counts = part_of_a_layout(*blocks, is_causal, is_cut, seq_len)
        check(tensors(1, plan.seq_len, 4, 2, 16, keys=seq_len), [plan], counts, layouts={seq_len: lists})

    @both
    @whole_or_cut
    def test_lists_per_query_head(self, is_cut, is_causal):
        lists = layout(64, 32, 32, is_causal, heads=2, is_cut=is_cut)
        plan, _ = dilated(64, 1, (64,), (1,))
        check(tensors(1, 64, 2, 1, 16), [plan], lists.dense_mask()[0].int(), is_causal=is_causal, layouts={64: lists})

    @each_once("seq_len", [96, 110])
    def test_inside_strided_rows(self, seq_len, is_causal):
        w, r = (48, 96), (1, 2)
        plan, table = dilated(seq_len, 2, w, r)
        lists = {count: layout(count, 16, 16, is_causal) for count in {group.queries.count for group in plan.groups}}
        counts = counts_inside(lists, w, r, table, seq_len)
        check(tensors(1, seq_len, 2, 2, 24), [plan], counts, is_causal=is_causal, layouts=lists)

    @whole_or_cut
    def test_hidden_keys(self, is_cut):
        lists = layout(100, 32, 32, True, is_cut=is_cut)
        hidden = torch.rand(1, 100) < 0.3
        counts = (lists.dense_mask()[0] & ~hidden).int().expand(2, -1, -1)
        plan, _ = dilated(100, 2, (100,), (1,))
        check(tensors(1, 100, 2, 2, 16), [plan], counts, is_causal=True, layouts={100: lists}, hidden=hidden)

    @random_calls(2)
    @given(
        call=st.one_of(*(test_blocks.calls(*kind) for kind in ((False,), (True,), (False, True), (True, True)))),
        dtype=TYPES,
    )
    def test_random_calls(self, call, dtype):
        test_blocks.check(call, dtype, "triton")


@interpreted
class TestDropout:
    @pytest.mark.parametrize(
        "name",
        [
            "hidden keys",
            "blocks inside dilation",
            *(pytest.param(x, marks=thorough) for x in ("causal", "packed", "phantoms")),
        ],
    )
    def test_the_choice_is_every_backend_s(self, name):
        inputs = [x[:, :, : x.shape[2] // 2] for x in test_dropout.tensors(torch.float32)]
        call = test_dropout.CALLS[name]
        expected = test_dropout.results(call, [x.double() for x in inputs], backend="reference")
        for actual, wanted in zip(test_dropout.results(call, inputs, backend="triton"), expected, strict=True):
            assert relative_error(actual, wanted) <= TOLERANCE[torch.float32]

    def test_a_ragged_batch_is_one_launch(self, monkeypatch):
        plans = []
        counted = replace(
            BACKENDS["triton"], forward=lambda problem, *x: plans.append(problem.plan) or backend.forward(problem, *x)
        )
        monkeypatch.setitem(BACKENDS, "triton", counted)
        q, k, v = tensors(3, 40, 2, 1, 16)
        dilated_attention(q, k, v, (16, 40), (1, 2), lengths=[40, 7, 0], backend="triton")
        assert len(plans) == 1
        assert len(tiles.tables(causal(plans[0]), "queries", Shape(16, 16, 1, 1), None, q.device)) == 2  # branches


@interpreted
class TestWindows:
    @pytest.fixture(autouse=True, params=[(16, 32), pytest.param((32, 16), marks=thorough)], ids=str)
    def small_tiles(self, request, monkeypatch):
        shapes = dict.fromkeys(ARCHITECTURES["interpreter"].shapes, (Shape(*request.param, 1, 1),) * 3)
        monkeypatch.setitem(ARCHITECTURES, "interpreter", Architecture(shapes))

    @pytest.mark.parametrize(
        ("window", "is_causal"),
        [
            (Window(3), True),
            (Window(20, 45), False),
            (Window(300), False),
            (Window(7, 2, rate=3), False),
            (Window(30, leading=20), True),
        ],
        ids=str,
    )
    def test_every_edge(self, window, is_causal):
        counts = test_windows.seen(98, 98, window.before, window.after, window.rate, window.leading, is_causal)
        errors = excesses(
            lambda q, k, v: attention(q, k, v, window, is_causal=is_causal, return_lse=True, backend="triton"),
            tensors(1, 98, 2, 1, 16), counts.int().expand(1, -1, -1), scale=0.25,
        )  # fmt: skip
        assert all(error <= 1 for error in errors.values()), f"errors over their bars: {errors}"

    def test_positions_of_a_sum_with_hidden_keys(self):
        pattern = Window(2) + (Dilated((7, 30), (1, 2)) + Window(7, 2, rate=3, leading=1))
        options = {"is_causal": True, "scale": -0.4, "k_start": 3, "q_start": 20}
        test_windows.check(((2, 9, 30, 2, 1, 8), pattern, options, True), "triton")

    @thorough
    @random_calls(2)
    @given(call=test_windows.calls())
    def test_random_calls(self, call):
        test_windows.check(call, "triton")

    @pytest.mark.parametrize(
        ("low", "high"),
        [
            *[(-40, 20), (5, 60), (5, None), (None, 20), (None, None)],
            *(pytest.param(*x, marks=thorough) for x in [(-40, 60), (-40, None), (5, 20), (None, 60)]),
        ],
    )
    def test_no_tile_is_visited_that_a_window_hides(self, low, high, monkeypatch):
        """And no tile that it shows whole has a mask."""
        from dilated_attention.kernels import strided

        visited = Counter()

        def counted(name, of):
            def step(*arguments):
                visited[name, arguments[-3]] += 1
                return of(*arguments)

            return step

        for name in ("attend", "attend_dq", "attend_dkdv"):
            monkeypatch.setattr(strided, name, counted(name, getattr(strided, name)))
        group = StridedGroup(*(Rows(0, 128, 1, 1, 128),) * 2, 0, 1, 1, first=True, low=low, high=high)
        plan = Plan(128, 1, (group,), covered=True, square=False)
        q, k, v = tensors(1, 128, 1, 1, 16)
        out, lse = backend.forward(problem(plan), q, k, v)
        backend.backward(problem(plan), out, None, q, k, v, out, lse)
        shape = ARCHITECTURES["interpreter"].shapes["forward", 4][0]
        band, expected = band_of(group), Counter()
        for name, shown in (("attend", band), ("attend_dq", band), ("attend_dkdv", band.T)):
            for rows in shown.split(shape.own):
                for tile in rows.split(shape.loop, 1):
                    expected[name, not tile.all()] += bool(tile.any())
        assert visited == +expected


@interpreted
class TestSoftcap:
    @pytest.mark.parametrize(
        ("softcap", "is_causal", "dtype"),
        [
            (0.5, False, torch.float32),
            pytest.param(0.5, True, torch.bfloat16, marks=thorough),
            pytest.param(1e6, True, torch.float32, marks=thorough),
            (1e6, True, torch.bfloat16),
            pytest.param(1e6, False, torch.bfloat16, marks=thorough),
        ],
        ids=str,
    )
    def test_branches(self, softcap, is_causal, dtype):
        plan, table = dilated(100, 2, (32, 100), (1, 2))
        counts = count_matrix((32, 100), (1, 2), table, 100, is_causal=is_causal)
        check(tensors(1, 100, 4, 2, 16, dtype), [plan], counts, is_causal=is_causal, softcap=softcap, scale=0.7)

    def test_layouts(self):
        lists = layout(100, 64, 32, True)
        plan, _ = dilated(100, 2, (100,), (1,))
        options = {"is_causal": True, "layouts": {100: lists}, "softcap": 0.5}
        check(tensors(1, 100, 2, 2, 16), [plan], lists.dense_mask()[0].int().expand(2, -1, -1), **options)

    @pytest.mark.parametrize("scale", [-0.7, pytest.param(1e30, marks=thorough)])
    def test_windows_masks_and_dropout(self, scale):
        q, k, v = tensors(1, 60, 2, 1, 16)
        errors = test_windows.errors_of_capped_windows("triton", q, k, v, scale)
        assert all(error <= 1 for error in errors.values()), f"errors over their bars: {errors}"

    def test_the_error_of_the_hyperbolic_tangent(self):
        """The lse of a query that sees one key is its capped score."""
        x = torch.logspace(-20, 25, 501)
        x = torch.cat([x, -x, torch.tensor([0.0])])
        group = StridedGroup(Rows(0, len(x), 1, 1, len(x)), Rows(0, 1, 1, 1, 1), 0, 1, 1, first=True)
        plan = Plan(len(x), 1, (group,), covered=True, square=False)
        one = torch.ones(1, 1, 1, 1)
        for softcap in (1e-40, 1.0, 50.0, 1e300):
            _, lse = backend.forward(problem(plan, softcap=softcap), x[None, :, None, None], one, one)
            expected = softcap * (x.double() / softcap).tanh()
            torch.testing.assert_close(lse.flatten().double(), expected, rtol=5e-7, atol=1e-12)


@interpreted
class TestBiases:
    """The calls of test_biases: every form, with every kind of pattern and option."""

    @pytest.mark.parametrize(
        "seed", [3001, 3005, 3009, 3013, 3020, 3025, 3031, 3034, 3112, 3133, 3145, 3152, 3161, 3188, 3190, 3201, 3210]
    )
    def test_random_calls(self, seed):
        test_biases.check(seed, torch.float32, "triton")

    @thorough
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("seed", range(3100, 3120))
    def test_many_random_calls(self, seed, dtype):
        test_biases.check(seed, dtype, "triton")

    @pytest.mark.parametrize(
        "name", ["plane", *(pytest.param(x, marks=thorough) for x in test_biases.FORMS if x != "plane")]
    )
    def test_neighborhoods(self, name):
        pattern = Neighborhood((3, 4), (3, 2), leading=1)
        test_biases.check_neighborhood(pattern, name, torch.float32, "triton")

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float64], ids=str)
    def test_coordinates_of_any_type(self, dtype):
        test_biases.test_coordinates_of_any_type("triton", dtype)

    def test_a_bias_of_hidden_pairs_reaches_nothing(self):
        test_biases.test_a_bias_of_hidden_pairs_reaches_nothing("triton")

    def test_minus_infinity_hides_a_pair(self):
        test_biases.test_minus_infinity_hides_a_pair("triton")

    def test_hidden_numbers_that_are_not_finite_reach_nothing(self):
        test_biases.test_hidden_numbers_that_are_not_finite_reach_nothing("triton")


@interpreted
class TestNotFinite:
    @pytest.mark.parametrize("name", "qkv")
    @pytest.mark.parametrize("number", [math.nan, pytest.param(math.inf, marks=thorough)])
    def test_what_sees_it(self, name, number):
        test_bad_input.test_nan_and_inf_pass_through(name, number, "triton", torch.float32)

    @pytest.mark.parametrize(("number", "is_causal"), [pytest.param(math.nan, False, marks=thorough), (math.inf, True)])
    def test_hidden_keys(self, number, is_causal):
        test_bad_input.test_a_hidden_key_reaches_nothing(number, is_causal, "triton", torch.float32)

    def test_causal_values(self):
        test_bad_input.test_under_causality_what_is_not_finite_in_v_stays_in_its_segment_and_out_of_lse(
            math.nan, "triton"
        )

    def test_other_samples(self):
        test_bad_input.test_what_lies_beyond_a_sample_reaches_nothing(True, "triton", torch.float32)


# ---- tables


def seen(plan, side, is_causal, shape):
    """Count how often each (head, row of a tile, row of its spans) occurs, and phantoms per (head, row)."""
    pairs: Counter[tuple[int, int, int]] = Counter()
    phantoms: Counter[tuple[int, int]] = Counter()
    begun: set[tuple[int, int]] = set()
    for table in tiles.tables(causal(plan) if is_causal else plan, side, shape, None, torch.device("cpu")):
        launch = set()
        for head, start, stride, rows, first, zeros, _, _, _, *spans in table.lines.tolist():
            assert 0 < rows <= shape.own
            for i in range(rows):
                row = start + i * stride
                assert (head, row) not in launch, "two tiles of a launch hold one row"
                assert (head, row) not in begun if first else (head, row) in begun or not plan.covered
                launch.add((head, row))
                phantoms[head, row] += zeros
                for begin, step, count, near, far in zip(*(iter(spans),) * 5, strict=True):
                    assert not (table.even and count % shape.loop)
                    for j in range(count):
                        if min(near, far) <= j - i <= max(near, far):
                            pairs[head, row, begin + j * step] += 1
        begun |= launch
    return pairs, +phantoms


def entries(dense):
    """The positive entries of a tensor, by index."""
    return Counter({tuple(at.tolist()): int(dense[tuple(at)]) for at in dense.nonzero()})


@given(st.data(), st.integers(1, 40), st.integers(1, 4), st.booleans(), st.booleans())
def test_tables_hold_every_pair_once(data, seq_len, heads, is_causal, union):
    branches = data.draw(st.lists(st.tuples(st.integers(1, 48), st.integers(1, 6)), min_size=1, max_size=4))
    w, r = tuple(max(branch) for branch in branches), tuple(rate for _, rate in branches)
    table = Dilated(w, r, "head_block").offset_table(heads)
    plan = plan_dilated(w, r, table, seq_len, "torchscale")
    shape = Shape(data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from([1, 2, 4])), 1, 1)
    counts = count_matrix(w, r, table, seq_len, is_causal=is_causal)
    phantoms = phantom_counts(w, r, table, seq_len, is_causal=is_causal)
    with patch.object(tiles, "MAX_EXTRA_STEPS", math.inf if union else 1.05):
        assert seen(plan, "queries", is_causal, shape) == (entries(counts), entries(phantoms))
        assert seen(plan, "keys", is_causal, shape)[0] == entries(counts.mT)


@given(st.data(), st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 3))
def test_tables_of_ragged_batches_hold_every_pair_once(data, lengths, heads):
    branches = data.draw(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6)), min_size=1, max_size=3))
    w, r = tuple(max(branch) for branch in branches), tuple(rate for _, rate in branches)
    table = Dilated(w, r).offset_table(heads)
    starts = [sum(lengths[:i]) + i for i in range(len(lengths))]
    plans = [plan_dilated(w, r, table, n, "torchscale") for n in lengths]
    plan = tiles.concatenate(plans, starts, starts[-1] + lengths[-1])
    expected = Counter(), Counter(), Counter()
    for start, n in zip(starts, lengths, strict=True):
        counts = count_matrix(w, r, table, n, is_causal=False)
        phantoms = phantom_counts(w, r, table, n, is_causal=False)
        for into, found in zip(expected, (counts, counts.mT, phantoms), strict=True):
            into.update({(head, *(start + x for x in at)): number for (head, *at), number in entries(found).items()})
    with patch.object(tiles, "MAX_EXTRA_STEPS", math.inf):
        assert seen(plan, "queries", False, Shape(4, 2, 1, 1)) == (expected[0], expected[2])
        assert seen(plan, "keys", False, Shape(4, 2, 1, 1))[0] == expected[1]


def test_tables_of_ragged_batches_take_memory_by_their_tokens():
    w, r, lengths = (256, 512, 1024), (1, 2, 4), [100 + 617 * i % 1900 for i in range(120)]
    plans = [plan_dilated(w, r, Dilated(w, r).offset_table(8), n) for n in lengths]
    peaks = []
    for number in (30, 120):
        starts = [sum(lengths[:i]) for i in range(number + 1)]
        plan = tiles.concatenate(plans[:number], starts[:-1], starts[-1])
        tracemalloc.start()
        tiles.tables(plan, "queries", Shape(128, 128, 8, 3), None, torch.device("cpu"))
        peaks.append(tracemalloc.get_traced_memory()[1] / starts[-1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


def test_geometric_branches_take_few_launches():
    w, r = tuple(2048 * 2**i for i in range(8)), tuple(2**i for i in range(8))
    plan, _ = dilated(2**18, 16, w, r)
    shape = Shape(128, 128, 8, 3)
    launches = tiles.tables(plan, "queries", shape, None, torch.device("cpu"))
    assert [t.spans for t in launches] == [5, 3]
    assert len(tiles.tables(causal(plan), "queries", shape, None, torch.device("cpu"))) == 8


@pytest.mark.parametrize("side", ["queries", "keys"])
def test_the_residues_of_a_window_are_one_launch(side):
    plan = plan_of((Window(2, rate=300) + Dilated((64,), (1,))).branches(2), (0, 4000))
    assert sorted(Counter(tiles.turns(plan.groups, side)).items()) == [(0, 2), (1, 300)]


def test_causal_branches_keep_their_own_launches():
    plan, _ = dilated(4096, 2, (1024, 4096), (1, 4))
    for table in tiles.tables(causal(plan), "queries", Shape(64, 64, 1, 1), None, torch.device("cpu")):
        assert table.spans == 1


def test_cut_shapes():
    """A shape that is not cut is launched as it was compiled ahead, and a cut one with its warps."""
    for architecture in ARCHITECTURES.values():
        for three in architecture.shapes.values():
            for shape in three:
                assert shape.cut(shape.own, 2**20) == shape
    assert Shape(64, 64, 8, 2).cut(40, 17) == (64, 32, 8, 2)
    assert Shape(128, 64, 8, 3).cut(1, 64) == (16, 64, 8, 3)


def test_tables_refuse_tokens_that_they_cannot_name():
    group = StridedGroup(*(Rows(2**31, 8, 1, 1, 8),) * 2, 0, 1, 1, first=True)
    plan = Plan(2**31 + 8, 1, (group,), covered=False, square=True)
    with pytest.raises(UnsupportedError, match=r"address 2\^31 tokens of all samples; got token 2147483648"):
        tiles.tables(plan, "queries", Shape(16, 16, 1, 1), None, torch.device("cpu"))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
@pytest.mark.parametrize("number", [0, 7], ids=["the default stream", "another"])
def test_tables_are_held_for_the_stream_that_reads_them(number, kernel, monkeypatch):
    stream, recorded = SimpleNamespace(cuda_stream=number), []

    def table(name):
        return SimpleNamespace(nbytes=0, record_stream=lambda stream: recorded.append((name, stream)))

    lists = SimpleNamespace(indptr=table("row starts"), indices=table("rows"), kinds=None)
    lists.transposed = table("column starts"), table("columns")
    lists.block_size, lists.is_causal = (8, 8), False
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(backend, "on_default_stream", lambda device: number == 0)
    monkeypatch.setattr(backend, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(tiles, "longest", lambda *x: (64, 64))
    monkeypatch.setattr(tiles, "tables", lambda *x: [SimpleNamespace(lines=table("tiles"), count=64)])
    q = SimpleNamespace(
        device=torch.device("cuda", 0), is_cuda=True, shape=(1, 64, 1, 16), numel=lambda: 1024, element_size=lambda: 2
    )
    monkeypatch.setattr(backend, "plan_cache", PlanCache(1000))
    plan = plan_dilated((64,), (1,), ((0,),), 64)
    for layouts in (None, {64: lists}):
        backend._launches(kernel, problem(plan, False, 1.0, layouts=layouts), q)
    expected = ["column starts", "columns"] if kernel == "dkdv" else ["row starts", "rows"]
    assert recorded == ([(name, stream) for name in ["tiles", "tiles", *expected]] if number else [])


def test_tf32_is_pytorch_s_choice_and_nvidia_s(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision="tf32"))
    assert [backend._precision(dtype) for dtype in (torch.float32, torch.float16)] == ["tf32", "ieee"]
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert backend._precision(torch.float32) == "ieee"


@pytest.mark.skipif(INTERPRETED, reason="nothing is refused for the device there")
def test_refusals():
    q = torch.randn(1, 4, 2, 16)
    assert "GPU" in why(q)
    meta = q.to("meta")
    assert "not meta" in why(meta)
