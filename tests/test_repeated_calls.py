"""A call that was made before is not checked again, and only if nothing that a check looks at has changed."""

from __future__ import annotations

import gc
import random
import warnings
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import grad, vmap

from conformance import in_sixteen_threads
from dilated_attention import (
    BackendError,
    BlockLayout,
    Dilated,
    UnsupportedError,
    Window,
    attention,
    block_sparse_attention,
    checks,
    dilated_attention,
    execution,
    explain,
    plan_cache,
)
from dilated_attention import call as calls
from dilated_attention.backends import cpu, triton
from dilated_attention.backends.jobs import Launches
from dilated_attention.backends.table import BACKENDS, Choice
from dilated_attention.call import Call
from processors import by_name_in_a_graph

N = 32
LAYOUT = BlockLayout.local(N, 9, 8)
PATTERNS = {
    "dilated": Dilated([16, 32], [1, 2]),
    "window": Window(3),
    "sum": Window(3) + Dilated([32], [4]),
    "layout": LAYOUT,
    "product": Dilated([N], [1]) * LAYOUT,
}
every_pattern = pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)


def tensors(**options):
    return tuple(torch.randn(2, N, 4, 8, **options) for _ in range(3))


@pytest.fixture
def checked(monkeypatch):
    """The shapes of q in calls whose tensors were checked."""
    seen, check = [], checks.tensors
    monkeypatch.setattr(checks, "tensors", lambda q, *others: seen.append(q.shape) or check(q, *others))
    return seen


class TestFound:
    @every_pattern
    def test_the_second_call_is_not_checked(self, pattern, checked):
        inputs = tensors()
        outs = [attention(*inputs, pattern, is_causal=True, scale=0.5) for _ in range(3)]
        assert len(checked) == 1
        assert torch.equal(outs[0], outs[1])
        assert torch.equal(outs[0], outs[2])

    def test_the_pattern_is_not_checked_either(self, monkeypatch):
        inputs, made, check = tensors(), [], Dilated.__post_init__
        monkeypatch.setattr(Dilated, "__post_init__", lambda pattern: made.append(pattern) or check(pattern))
        for numbers in (list, tuple):
            dilated_attention(*inputs, numbers([11, 32]), numbers([1, 2]))
        assert len(made) == 1

    def test_gradients(self):
        pattern = PATTERNS["dilated"]
        inputs = [x.requires_grad_() for x in tensors()]
        with torch.no_grad():
            attention(*inputs, pattern)
        first, again = (torch.autograd.grad(attention(*inputs, pattern).sin().sum(), inputs) for _ in range(2))
        assert all(map(torch.equal, first, again))

    def test_dropout_is_drawn_in_each_call(self):
        inputs = tensors()
        first, again = (attention(*inputs, Window(9), dropout_p=0.5) for _ in range(2))
        assert not torch.equal(first, again)

    def test_the_problem_is_made_once(self):
        inputs = tensors()
        options = {**calls._DEFAULTS, "dropout_p": 0.5}
        call = Call.remembered(*inputs, PATTERNS["dilated"], options)
        assert call is Call.remembered(*inputs, PATTERNS["dilated"], dict(options))
        assert execution._problem(call, *inputs[:2]) is execution._problem(call, *inputs[:2])
        drawn = [replace(call, seed=torch.tensor(seed)) for seed in (1, 2)]
        first, second = (execution._problem(x, *inputs[:2]).attributes.queries["words"] for x in drawn)
        assert not torch.equal(first, second)

    def test_the_problem_of_lists_is_checked_for_each_batch(self):
        inputs = tensors()
        call = Call.of(*inputs, BlockLayout.stack([LAYOUT] * 2))
        execution._problem(call, *inputs[:2])
        with pytest.raises(ValueError, match="lists for a batch of 2, got 1"):
            execution._problem(call, *(x[:1] for x in inputs[:2]))

    def test_the_cache_is_cleared_and_bounded(self, checked):
        inputs = tensors()
        before = plan_cache.info().max_bytes
        for _ in range(2):
            attention(*inputs, PATTERNS["dilated"])
            plan_cache.clear()
        assert len(checked) == 2
        try:
            plan_cache.resize(0)
            for _ in range(2):
                attention(*inputs, PATTERNS["dilated"])
        finally:
            plan_cache.resize(before)
        assert len(checked) == 4

    def test_sixteen_threads(self):
        inputs = [tuple(x[:, :n] for x in tensors()) for n in range(8, N)]
        expected = [dilated_attention(*x, [16, 32], [1, 2]) for x in inputs]
        wrong = []

        def work(seed):
            draw = random.Random(seed)
            for _ in range(60):
                i = draw.randrange(len(inputs))
                if not torch.equal(dilated_attention(*inputs[i], [16, 32], [1, 2]), expected[i]):
                    wrong.append(i)
                if draw.random() < 0.1:
                    plan_cache.clear()

        in_sixteen_threads(work)
        assert not wrong


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"scale": -0.5}], ids=str)
@pytest.mark.parametrize("pattern", [Window(5), Window(3, 2, rate=2), Window(0)], ids=str)
def test_the_next_tokens_of_a_generation_make_nothing_anew(pattern, options):
    q, k, v = torch.randn(3, 1, 40, 2, 8)
    hidden = torch.rand(1, 40) < 0.2
    whole = attention(q, k, v, pattern, is_causal=True, key_padding_mask=hidden, **options)

    def token(position: int) -> torch.Tensor:
        held = slice(0, position + 1)
        return attention(
            q[:, position : position + 1], k[:, held], v[:, held], pattern, is_causal=True, q_start=position,
            key_padding_mask=hidden[:, held], **options,
        )  # fmt: skip

    token(20)
    before = plan_cache.info().misses
    for position in range(21, 40):
        torch.testing.assert_close(token(position)[:, 0], whole[:, position])
    assert plan_cache.info().misses == before


def test_a_mask_is_checked_again_and_nothing_else(checked):
    """Also the first mask after a call without one, or with lengths."""
    q, k, v = torch.randn(3, 1, 16, 2, 8)
    hidden = torch.zeros(1, 16, dtype=torch.bool)
    attention(q, k, v, Window(2))
    checked.clear()
    for options in ({"key_padding_mask": hidden}, {"lengths": [9]}, {"key_padding_mask": hidden, "lengths": [9]}):
        before = plan_cache.info().misses
        attention(q, k, v, Window(2), **options)
        assert plan_cache.info().misses == before
    assert not checked
    with pytest.raises(ValueError, match="key_padding_mask must have shape"):
        attention(q, k, v, Window(2), key_padding_mask=hidden[:, :8])


@pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))
def test_a_mask_may_be_served_by_another_backend(monkeypatch):
    """`auto` asks again, and neither backend gets what the other one prepared; a named one refuses."""
    entry, lacking = BACKENDS["cpu"], "it takes no mask"
    refusal = lambda facts: lacking if "key_padding_mask" in facts.needs else entry.refusal(facts)  # noqa: E731
    monkeypatch.setitem(BACKENDS, "cpu", replace(entry, refusal=refusal, on_request=lambda _: None, any_strides=False))
    run, masks = cpu._run, []
    monkeypatch.setattr(cpu, "_run", lambda *x: masks.append(x[3].hidden) or run(*x))
    q, k, v = (torch.randn(2, N, heads, 8) for heads in (4, 2, 2))
    mask = torch.rand(2, N) < 0.3
    for pattern in (Window(3), BlockLayout.stack([LAYOUT, BlockLayout.global_(N, 8, 8)], over="heads")):
        for hidden in (None, mask, None, ~mask):
            expected = attention(q, k, v, pattern, key_padding_mask=hidden, backend="reference")
            found = attention(q, k, v, pattern, key_padding_mask=hidden)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert explain(q, k, v, pattern, key_padding_mask=mask).backend == "native"
        attention(q, k, v, pattern, backend="cpu")
        for _ in range(2):
            with pytest.raises(BackendError, match=lacking):
                attention(q, k, v, pattern, key_padding_mask=mask, backend="cpu")
    assert {*masks} == {None}


class TestRefusedAfterAnEqualValidCall:
    @pytest.mark.parametrize(
        ("valid", "refused"),
        [
            ({}, {"segment_lengths": [32.0]}),
            ({}, {"segment_lengths": "1"}),
            ({}, {"segment_lengths": {32}}),
            ({}, {"dilation_rates": [True]}),
            ({}, {"dilation_rates": (np.bool_(True),)}),
            ({}, {"dilation_rates": np.ones(1)}),
            ({}, {"head_groups": 0}),
            ({}, {"head_groups": np.bool_(False)}),
            ({}, {"compat": ["torchscale"]}),
            ({}, {"offsets": None}),
            ({"is_causal": True}, {"is_causal": 1}),
            ({}, {"is_causal": 0}),
            ({}, {"return_lse": 0}),
            ({"head_offset": 1}, {"head_offset": True}),
            ({"head_offset": 0}, {"head_offset": 0.0}),
            ({"q_start": 0}, {"q_start": False}),
            ({"q_start": 1, "k_start": 1}, {"q_start": 1.0, "k_start": 1}),
            ({"softcap": 1.0}, {"softcap": torch.ones(())}),
            ({"scale": 1.0}, {"scale": torch.ones(())}),
            ({}, {"transport": "ring"}),
            ({}, {"mesh": "context"}),
            ({}, {"sinks": 0.0}),
            ({}, {"lengths": "32"}),
            ({}, {"cu_seqlens": 32}),
            ({}, {"sinks": torch.zeros(3)}),
            ({}, {"key_padding_mask": torch.zeros(2, N)}),
            ({}, {"backend": "none"}),
        ],
        ids=str,
    )
    def test_arguments(self, valid, refused):
        inputs, plain = tensors(), {"segment_lengths": [32], "dilation_rates": [1]}
        dilated_attention(*inputs, **plain, **valid)
        for _ in range(2):
            with pytest.raises(ValueError, match=f"{next(iter(refused))}"):
                dilated_attention(*inputs, **{**plain, **refused})
        dilated_attention(*inputs, **plain, **valid)

    def test_integers_of_numpy_and_tensors_are_taken(self):
        inputs = tensors()
        expected = dilated_attention(*inputs, [16, 32], [1, 2])
        for numbers in (np.array, torch.tensor, lambda x: [np.int64(i) for i in x], lambda x: [*map(torch.tensor, x)]):
            assert torch.equal(dilated_attention(*inputs, numbers([16, 32]), numbers([1, 2])), expected)

    def test_lists_that_are_written_to(self):
        inputs, rates, rate, table = tensors(), [1, 2], torch.tensor(1), [[0] * 4, [1] * 4]

        def outs():
            yield dilated_attention(*inputs, [16, 32], rates)
            yield dilated_attention(*inputs, [16, 32], [rate, 2])
            yield dilated_attention(*inputs, [16, 32], [1, 2], offsets=table)

        before = [*outs()]
        rates[0], table[1][1] = 2, 0
        rate += 1
        for first, then in zip(before, outs(), strict=True):
            assert not torch.equal(first, then)

    def test_a_position_that_is_written_to(self):
        inputs, start = tensors(), torch.tensor(0)
        first = attention(*inputs, PATTERNS["dilated"], q_start=start)
        start += 5
        assert not torch.equal(attention(*inputs, PATTERNS["dilated"], q_start=start), first)

    @pytest.mark.parametrize(
        "change",
        [
            lambda q, k, v: (q.double(), k, v),
            lambda q, k, v: (q, k, v.half()),
            lambda q, k, v: (q, k.to("meta"), v),
            lambda q, k, v: (q, k, v.to_sparse()),
            lambda q, k, v: (q, k.to_mkldnn(), v),
            lambda q, k, v: (torch.nested.nested_tensor([*q]), k, v),
            lambda q, k, v: (q, k[:, 1:], v),
            lambda q, k, v: (q, k, v[:, :, :3]),
            lambda q, k, v: (q[0], k[0], v[0]),
            lambda q, k, v: (q[..., :0], k[..., :0], v),
            lambda q, k, v: (q.long(), k.long(), v.long()),
            lambda q, k, v: (q, k.tolist(), v),
        ],
    )
    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_tensors(self, change):
        inputs = tensors()
        attention(*inputs, PATTERNS["dilated"])
        for _ in range(2):
            with pytest.raises(ValueError, match=r"^(q|k|v) |^q, k and v|^q and |^k and "):
                attention(*change(*inputs), PATTERNS["dilated"])

    def test_a_backend_that_cannot_serve(self):
        inputs = tensors()
        attention(*inputs, Window(3), backend="reference")
        for _ in range(2):
            with pytest.raises(BackendError, match="Triton needs a GPU"):
                attention(*inputs, Window(3), backend="triton")

    def test_strides(self):
        inputs = tensors()
        expected = attention(*inputs, PATTERNS["dilated"])
        views = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs)
        torch.testing.assert_close(attention(*views, PATTERNS["dilated"]), expected)

    @pytest.mark.parametrize("backend", [name for name in ("cpu", "native") if name != "cpu" or cpu.missing() is None])
    def test_packed_samples_at_other_positions(self, backend):
        inputs = tuple(torch.randn(1, N, 4, 8) for _ in range(3))
        for positions in ({}, {"q_start": 3, "k_start": 3}, {"q_start": 3, "k_start": 0}):
            options = {"cu_seqlens": [0, 20, N], **positions}
            expected = attention(*inputs, PATTERNS["dilated"], **options, backend="reference")
            found = attention(*inputs, PATTERNS["dilated"], **options, backend=backend)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)

    def test_jit_trace(self):
        inputs = tensors()
        attention(*inputs, PATTERNS["dilated"])
        with pytest.raises(UnsupportedError, match=r"torch\.jit\.trace"):
            torch.jit.trace(lambda *x: attention(*x, PATTERNS["dilated"]), inputs)

    def test_swapped_axes_are_warned_of_in_every_call(self):
        q = torch.randn(1, 2, 256, 4)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                attention(q, q, q, Window(1))
        assert len(caught) == 3
        assert {x.filename for x in caught} == {__file__}

    def test_a_mask_that_is_written_to(self):
        inputs, mask = tensors(), torch.zeros(2, N, dtype=torch.bool)
        first = attention(*inputs, Window(3), key_padding_mask=mask)
        mask[:, 5] = True
        assert not torch.equal(attention(*inputs, Window(3), key_padding_mask=mask), first)


class TestLayouts:
    @pytest.mark.parametrize("within", [False, True], ids=["layout", "product"])
    def test_a_table_that_is_written_to(self, within):
        inputs, layout = tensors(), BlockLayout.local(N, 9, 8)
        pattern = Dilated([N], [1]) * layout if within else layout
        attention(*inputs, pattern)
        layout.indices.add_(0)
        for _ in range(2):
            with pytest.raises(ValueError, match="a table was written to"):
                attention(*inputs, pattern)

    def test_each_layout_has_its_own_lists(self, checked):
        inputs = tensors()
        layouts = [BlockLayout.from_mask(torch.rand(2, 4, 4, 4) < 0.6, N, 8) for _ in range(4)]
        found = [attention(*inputs, pattern) for layout in layouts for pattern in (layout, layout.select(batch=[0]))]
        assert len(checked) == 1
        plan_cache.clear()
        for out, layout in zip(found, [y for x in layouts for y in (x, x.select(batch=[0]))], strict=True):
            assert torch.equal(out, attention(*inputs, layout, backend="auto"))
            plan_cache.clear()

    @pytest.mark.parametrize(
        "other", [BlockLayout.local(N + 8, 9, 8), BlockLayout.stack([LAYOUT] * 3)], ids=["length", "batch"]
    )
    def test_what_does_not_fit(self, other):
        inputs = tensors()
        block_sparse_attention(*inputs, LAYOUT)
        with pytest.raises(ValueError, match="layout"):
            block_sparse_attention(*inputs, other)

    def test_a_layout_has_an_entry_of_its_own_while_all_share_the_checks(self):
        options, other = calls._DEFAULTS, BlockLayout.global_(N, 1, 8)
        kept, again = (Call.remembered(*tensors(), x, options) for x in (LAYOUT, other))
        assert kept.layouts == (LAYOUT,)
        assert again.layouts == (other,)
        assert Call.remembered(*tensors(), other, options) is again
        assert plan_cache.info().entries == 3


class TestState:
    def test_autocast(self):
        inputs = tensors()
        for _ in range(2):
            assert attention(*inputs, Window(3)).dtype == torch.float32
            with torch.autocast("cpu", torch.bfloat16):
                assert attention(*inputs, Window(3)).dtype == torch.bfloat16

    def test_the_choice_of_a_backend(self, monkeypatch):
        """Only tests change what the choice depends on, and they clear the cache."""
        inputs, ran = tensors(), []
        attention(*inputs, Window(3), backend="native")
        native = BACKENDS["native"]
        noted = replace(native, forward=lambda *x: ran.append("noted") or native.forward(*x))
        monkeypatch.setitem(BACKENDS, "native", noted)
        plan_cache.clear()
        attention(*inputs, Window(3), backend="native")
        assert ran == ["noted"]
        monkeypatch.setattr(triton, "_refusal_of", lambda device: "there is none")
        with pytest.raises(BackendError, match="there is none"):
            attention(*inputs, Window(3), backend="triton")

    @pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))
    def test_a_backend_that_comes_later_is_asked_again(self, monkeypatch):
        """Errors are not kept."""
        inputs = tensors()
        monkeypatch.setattr(cpu, "_MISSING", "not yet")
        with pytest.raises(BackendError, match="not yet"):
            attention(*inputs, Window(3), backend="cpu")
        monkeypatch.undo()
        attention(*inputs, Window(3), backend="cpu")

    def test_fake_tensors_leave_nothing_behind(self):
        pattern = Window(3)
        with FakeTensorMode():
            assert attention(*tensors(), pattern).shape == (2, N, 4, 8)
        assert plan_cache.info().entries == 0
        inputs = tensors()
        expected = attention(*inputs, pattern)
        with FakeTensorMode():
            assert type(attention(*tensors(), pattern)) is not torch.Tensor
        assert torch.equal(attention(*inputs, pattern), expected)

    @every_pattern
    def test_torch_func(self, pattern):
        q, k, v = tensors()
        expected = torch.stack([attention(x, k, v, pattern) for x in (q, 2 * q)])
        torch.testing.assert_close(vmap(lambda x: attention(x, k, v, pattern))(torch.stack([q, 2 * q])), expected)
        leaf = q.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(attention(leaf, k, v, pattern).sum(), leaf)
        torch.testing.assert_close(grad(lambda x: attention(x, k, v, pattern).sum())(q), wanted)

    def test_forward_mode(self):
        q, k, v = tensors()
        attention(q, k, v, Window(3))
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
            attention(forward_ad.make_dual(q, q), k, v, Window(3))

    def test_a_subclass_is_no_plain_tensor(self, checked):
        class Marked(torch.Tensor):
            pass

        inputs = tensors()
        marked = [x.as_subclass(Marked) for x in inputs]
        expected = attention(*inputs, Window(3))
        assert all(torch.equal(attention(*marked, Window(3)), expected) for _ in range(2))
        assert len(checked) == 3

    def test_a_pattern_of_the_callers_class_is_none_of_ours(self, checked):
        class Mine(Dilated):
            pass

        inputs = tensors()
        for _ in range(2):
            attention(*inputs, Mine([N], [1]))
            attention(*inputs, Mine([N], [1]) + Window(1))
            with pytest.raises(ValueError, match="pattern must be"):
                attention(*inputs, SimpleNamespace())
        assert len(checked) == 6

    @pytest.mark.parametrize("dynamic", [True, pytest.param(False, marks=pytest.mark.thorough)])
    @by_name_in_a_graph
    def test_compiled(self, processor, dynamic, compiling_python):
        """Eager calls before and after a compiled one do not change what its graph computes, at any length."""
        compiling_python(
            f"""
            dynamic = {dynamic}
            """
            """
            import torch
            from dilated_attention import BlockLayout, Dilated, Window, attention, dilated_attention

            layouts = {n: BlockLayout.local(n, 9, 8) for n in (32, 40)}
            calls = [
                lambda *x: dilated_attention(*x, [16, 32], [1, 2], is_causal=True),
                lambda *x: attention(*x, Window(3) + Dilated([32], [4])),
                lambda *x: attention(*x, layouts[x[0].shape[1]]),
            ]
            for call in calls:
                torch.compiler.reset()
                compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
                for n in (32, 40):
                    inputs = [torch.randn(1, n, 2, 8, requires_grad=True) for _ in range(3)]
                    expected = call(*inputs)
                    out = compiled(*inputs)
                    assert torch.equal(out, expected) and torch.equal(call(*inputs), expected)
                    out.sum().backward()
            """,
            processor,
        )


@pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))
class TestRepeats:
    """Later tensors of the same kind are served by what a backend prepared for a call, and others are not."""

    @every_pattern
    def test_views_and_other_alignments(self, pattern):
        bases = [torch.randn(2, N + 2, 12, 9) for _ in range(3)]
        wide = [x[:, 1:-1, 2:10:2, :8] for x in bases]
        swapped = [torch.randn(2, 4, N, 8).transpose(1, 2) for _ in range(3)]
        apart = [torch.randn(2 * N * 4 * 8 + 1)[1:].view(2, N, 4, 8) for _ in range(3)]
        turned = [torch.randn(2, N, 8, 4).transpose(2, 3) for _ in range(3)]
        for inputs in (tensors(), wide, swapped, apart, turned, tensors(), wide):
            expected = attention(*inputs, pattern, backend="reference")
            for _ in range(2):
                torch.testing.assert_close(attention(*inputs, pattern, backend="cpu"), expected, rtol=1e-5, atol=1e-5)

    def test_the_last_call_prepares_nothing(self, monkeypatch):
        inputs, prepared = tensors(), []
        entry = BACKENDS["cpu"]
        noted = replace(entry, prepare=lambda *x: prepared.append(x[0]) or cpu.prepare(*x))
        monkeypatch.setitem(BACKENDS, "cpu", noted)
        for pattern in (PATTERNS["dilated"], LAYOUT):
            outs = [attention(*inputs, pattern, backend="cpu", return_lse=True) for _ in range(3)]
            assert len(prepared) == 1
            prepared.clear()
            assert all(torch.equal(x, y) for x, y in zip(outs[0], outs[2], strict=True))

    def test_what_is_prepared_counts_in_the_cache(self, monkeypatch):
        """Also once the tables themselves were evicted; a call that was evicted counts nothing."""
        x = torch.randn(1, 4000, 2, 8)
        attention(x, x, x, Dilated((4,), (1,)), backend="cpu")
        before = plan_cache.info()
        attention(x, x, x, Dilated((4,), (1,)), backend="cpu")
        assert plan_cache.info().bytes == before.bytes
        (call,) = [value for value, _ in plan_cache._entries.values() if getattr(value, "repeats", None)]
        tables = [x for x, _ in plan_cache._entries.values() if isinstance(x, Launches)]
        assert before.bytes >= 4096 + 2 * sum(y.table.lines.nbytes for x in tables for y in x.launches)
        try:
            plan_cache.resize(before.bytes - 1)
            plan_cache.grow(call.key, call, 1 << 40)
            plan_cache.grow(call.key, call, 1 << 40)
            assert plan_cache.info().bytes < before.bytes
        finally:
            plan_cache.resize(before.max_bytes)

    @pytest.mark.parametrize("pattern", [Window(5), Dilated((8,), (1,)), Dilated((N,), (1,))], ids=str)
    @pytest.mark.parametrize("lengths", [None, torch.tensor([N, N])])
    @pytest.mark.parametrize("backend", ["cpu", "native", "reference"])
    def test_results_may_be_changed_in_place(self, backend, lengths, pattern):
        inputs = [x.requires_grad_() for x in tensors()]
        for _ in range(2):
            expected = attention(*inputs, pattern, backend=backend, lengths=lengths) + 1
            assert torch.equal(attention(*inputs, pattern, backend=backend, lengths=lengths).add_(1), expected)

    @pytest.mark.parametrize("backend", ["cpu", "native"])
    def test_saved_tensors_may_come_back_in_another_layout(self, backend):
        inputs = [x.requires_grad_() for x in tensors()]
        expected = torch.autograd.grad(attention(*inputs, Window(5), backend=backend).square().sum(), inputs)

        def turned(x):
            return x.transpose(1, -1).contiguous().transpose(1, -1) if x.dim() == 4 else x

        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, turned):
            out = attention(*inputs, Window(5), backend=backend)
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), inputs), expected)

    @every_pattern
    @pytest.mark.parametrize("positions", [{}, {"q_start": 0, "k_start": 0}], ids=["whole", "placed"])
    def test_masks_repeat_one_call(self, pattern, positions, monkeypatch):
        """Each mask is read as it is now, whatever its strides; its memory outlives the caller's by nothing."""
        inputs, prepared = tensors(), []
        entry = BACKENDS["cpu"]
        noted = replace(entry, prepare=lambda *x: prepared.append(x[0]) or cpu.prepare(*x))
        monkeypatch.setitem(BACKENDS, "cpu", noted)
        mask = torch.rand(2, N) < 0.3
        turned = (torch.rand(N, 2) < 0.3).T
        every, nothing = torch.ones_like(mask), torch.zeros_like(mask)
        for hidden in (None, mask, ~mask, turned, mask[:1].expand(2, -1), every, nothing, None):
            options = {"key_padding_mask": hidden, "return_lse": True, **positions}
            expected = attention(*inputs, pattern, backend="reference", **options)
            found = attention(*inputs, pattern, backend="cpu", **options)
            for x, y in zip(found, expected, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
        assert len(prepared) <= 1
        prepared.clear()
        held = weakref.ref(mask)
        del mask, turned, hidden, options
        assert held() is None

    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize("pattern", [PATTERNS["dilated"], PATTERNS["window"], PATTERNS["sum"], LAYOUT], ids=str)
    def test_lengths_repeat_one_call(self, pattern, masked):
        inputs = tensors()
        mask = (torch.rand(2, N) < 0.3) if masked else None
        narrow, strided = torch.tensor([1, 17], dtype=torch.int32), torch.tensor([[5, 0], [8, 0]])[:, 0]
        for lengths in (None, [9, N], [N, 0], narrow, strided, None):
            options = {"lengths": lengths, "key_padding_mask": mask, "return_lse": True}
            expected = attention(*inputs, pattern, backend="reference", **options)
            found = attention(*inputs, pattern, backend="cpu", **options)
            for x, y in zip(found, expected, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
        for wrong in ([9, N + 1], [-1, 3]):
            with pytest.raises(ValueError, match=r"lengths must lie in \[0, 32\]"):
                attention(*inputs, pattern, backend="cpu", lengths=wrong)

    def test_a_mask_that_is_written_to_before_the_backward(self):
        inputs = tensors(requires_grad=True)
        for _ in range(2):
            mask = torch.rand(2, N) < 0.3
            out = attention(*inputs, Window(5), key_padding_mask=mask, backend="cpu")
            mask.logical_not_()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()

    def test_what_a_call_at_a_position_prepares_counts_in_the_cache(self):
        x = torch.randn(1, 8, 2, 8)
        k = torch.randn(1, N, 2, 8)
        call = Call.remembered(x, k, k, LAYOUT, {**calls._DEFAULTS, "q_start": 8, "backend": "cpu"})
        before = plan_cache.info().bytes
        plan_cache.grow(call.key, call, 1000)
        assert plan_cache.info().bytes == before + 1000

    def test_instructions_and_threads_are_those_of_now(self, monkeypatch):
        inputs, ran = tensors(), []
        expected = attention(*inputs, Window(3), backend="cpu")
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(threads + 1)
            assert torch.equal(attention(*inputs, Window(3), backend="cpu"), expected)
            run, found = cpu._run, []
            monkeypatch.setattr(cpu, "_run", lambda *x: found.append(x[3].threads) or run(*x))
            large = [torch.randn(1, 512, 8, 64) for _ in range(3)]
            for number in (1, 2, 1):
                torch.set_num_threads(number)
                attention(*large, Dilated((512,), (1,)), backend="cpu")
            assert found == [1, 2, 1]
        finally:
            torch.set_num_threads(threads)
        machine = cpu.PROCESSOR
        now = machine.set_of(torch.float32)
        monkeypatch.setattr(cpu, "_run", lambda *x: ran.append(x[2]) or run(*x[:2], now, x[3]))
        monkeypatch.setattr(cpu, "PROCESSOR", replace(machine, highest=now - 1))
        torch.testing.assert_close(attention(*inputs, Window(3), backend="cpu"), expected, rtol=1e-5, atol=1e-5)
        assert ran == [now - 1]

    @pytest.mark.parametrize("pattern", [PATTERNS["dilated"], LAYOUT], ids=["dilated", "layout"])
    def test_tables_outlive_the_cache_and_inputs_do_not_outlive_the_caller(self, pattern):
        inputs = tensors()
        call = Call.remembered(*inputs, pattern, {**calls._DEFAULTS, "backend": "cpu"})
        expected, _ = execution.repeat(call, *inputs)
        plan_cache.clear()
        gc.collect()
        torch.randint(1 << 40, (1 << 16,))  # takes up freed memory
        assert torch.equal(execution.repeat(call, *inputs)[0], expected)
        held = [weakref.ref(x) for x in inputs]
        del inputs
        assert not any(x() is not None for x in held)

    def test_large_tables_are_not_kept(self, monkeypatch):
        inputs = tensors()
        expected = attention(*inputs, Window(3), backend="cpu")
        plan_cache.clear()
        monkeypatch.setattr(cpu, "MOST_PREPARED", 0)
        call = Call.remembered(*inputs, Window(3), {**calls._DEFAULTS, "backend": "cpu"})
        assert execution.repeat(call, *inputs) is None
        assert torch.equal(attention(*inputs, Window(3), backend="cpu"), expected)

    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("new", [1, 2])
    @pytest.mark.parametrize("name", ["whole", "lists a head", "bits"])
    def test_each_new_token_under_a_layout_repeats_one_call(self, name, new, is_causal):
        """Nothing is made anew, and each step is right, also without keys, and where the queries cross a block."""
        layout = {
            "whole": BlockLayout.local(90, 20, 8) | BlockLayout.global_(90, 9, 8),
            "lists a head": BlockLayout.stack([BlockLayout.random(90, 0.4, i, (4, 8)) for i in range(4)], over="heads"),
            "bits": BlockLayout.from_mask(torch.rand(90, 90) < 0.5, 90, (6, 16)),
        }[name]
        q, k, v = (torch.randn(2, 90, heads, 16) for heads in (4, 2, 2))
        steps = [(0, 90), (0, 90), *((0, stop) for stop in range(1, 90)), (7, 31), (60, 89), (5, 5), (89, 90)]
        missed = []
        for i, (begin, stop) in enumerate(steps):
            start = (i * new) % (90 - new) if i < 92 else 40
            if is_causal and stop < start + new and i % 2:
                stop = start + new
            options = {"is_causal": is_causal, "q_start": start, "k_start": begin, "return_lse": True}
            inputs = q[:, start : start + new], k[:, begin:stop], v[:, begin:stop]
            expected = attention(*inputs, layout, **options, backend="reference")
            before = plan_cache.info().misses
            found = attention(*inputs, layout, **options, backend="cpu")
            if start % layout.q_block + new <= layout.q_block:
                missed.append(plan_cache.info().misses - before)
            for x, y in zip(found, expected, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
        assert len(missed) > 40
        assert not any(missed[1:])

    def test_kinds_are_bounded(self):
        call = Call.remembered(*tensors(), Window(3), {**calls._DEFAULTS, "backend": "cpu"})
        call.__dict__["choice"] = Choice(replace(call.backend, any_strides=False))
        for more in range(2 * execution.MOST_KINDS):
            inputs = [torch.randn(2, N, 4, 8 + more)[..., :8] for _ in range(3)]
            expected = attention(*inputs, Window(3), backend="native")
            assert (execution.repeat(call, *inputs) is None) == (more >= execution.MOST_KINDS)
            torch.testing.assert_close(attention(*inputs, Window(3), backend="cpu"), expected, rtol=1e-5, atol=1e-5)
        assert len(call.repeats) == execution.MOST_KINDS

    @pytest.mark.parametrize("wide", [False, True])
    def test_values_of_another_width(self, wide):
        """Backends get tensors of one head_dim, in a call with a gradient and in the next one without."""
        q, k, v = tensors()
        narrow = q[..., :3], k[..., :3]
        q, k, v = (*narrow, v) if wide else (q, k, v[..., :3])
        expected = attention(q, k, v, PATTERNS["dilated"], backend="reference")
        trained = attention(q.requires_grad_(), k, v, PATTERNS["dilated"])
        with torch.no_grad():
            found = [attention(q, k, v, PATTERNS["dilated"]) for _ in range(2)]
        for out in (trained, *found):
            torch.testing.assert_close(out, expected)

    def test_strides_are_of_one_kind(self):
        """A cache that is joined anew for each token has other strides each time."""
        call = Call.remembered(*tensors(), Window(3), {**calls._DEFAULTS, "backend": "cpu"})
        call.repeats.clear()
        for more in range(3):
            inputs = [torch.randn(2, N + more, 4 + more, 8 + more)[:, more:, more:, :8] for _ in range(2)]
            inputs.append(torch.randn(2, 4, N + more, 8).transpose(1, 2)[:, more:])
            expected = attention(*inputs, Window(3), backend="reference")
            torch.testing.assert_close(execution.repeat(call, *inputs)[0], expected, rtol=1e-5, atol=1e-5)
        assert len(call.repeats) == 1

    @pytest.mark.parametrize("backend", ["cpu", "native"])
    def test_gradients_of_a_call_that_passes_no_operator(self, backend):
        q, *_ = inputs = tensors(requires_grad=True)
        packed = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
            out, lse = attention(*inputs, LAYOUT, backend=backend, return_lse=True)
        assert len(packed) == 5
        loss = out.sin().sum() + lse.cos().sum()
        found = torch.autograd.grad(loss, inputs, retain_graph=True)
        wanted = torch.autograd.grad(
            (lambda out, lse: out.sin().sum() + lse.cos().sum())(
                *attention(*inputs, LAYOUT, backend="reference", return_lse=True)
            ),
            inputs,
        )
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
        (first,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivatives"):
            first.sum().backward()

    def test_what_is_written_to_before_the_backward_is_refused(self):
        inputs = tensors(requires_grad=True)
        out = attention(*inputs, Window(3))
        with torch.no_grad():
            inputs[0].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        layout = BlockLayout.local(N, 9, 8)
        out = attention(*tensors(requires_grad=True), layout)
        layout.indices.zero_()
        with pytest.raises(ValueError, match="a table was written to"):
            out.sum().backward()
