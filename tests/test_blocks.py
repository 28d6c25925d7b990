"""Block layouts, and their products with dilation, through the public functions against counts from the definition."""

from __future__ import annotations

import functools
import random
import timeit
from dataclasses import dataclass
from itertools import pairwise
from unittest import mock

import jaxtyping
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from conformance import excesses, in_sixteen_threads, random_calls, survivors
from dilated_attention import (
    BlockLayout,
    Dilated,
    attention,
    attention_weights,
    block_sparse_attention,
    call,
    execution,
    explain,
    plan_cache,
)
from dilated_attention.backends import blocks
from test_properties import DROPOUT, FULL_PRECISION, HALF_PRECISION, LAYOUTS, SCALES, arrange

BUILDERS = ("local", "global", "strided", "dilated", "hierarchical", "random", "longformer", "bigbird", "mask")
LENGTHS = st.sampled_from(range(1, 121))
SEGMENTS = st.sampled_from([*range(1, 131), *range(17, 131)])
HEAD_DIM = 8
BLOCK_SIZES = [(16, 16), (16, 16), (32, 32), (16, 32), (32, 16), (48, 32), (16, 256), (1, 1), (1, 4), (1, 16), (4, 64)]
BLOCK_SIZES += [(16, 1), (5, 3)]


@pytest.fixture(autouse=True, scope="module")
def many_small_calls():
    """Small calls are faster on one thread, and where annotations are checked in `test_half_precision` only;
    `torch.empty` is filled with NaN, so that what is read was written."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def build(name: str, seq_len: int, block_size: tuple[int, int], seed: int) -> BlockLayout:
    """A layout of the builder `name`, whose arguments follow from the seed."""
    draw = random.Random(seed)
    window, tokens = draw.randint(1, 100), draw.randint(1, min(seq_len, 40))
    match name:
        case "local":
            return BlockLayout.local(seq_len, window, block_size)
        case "global":
            return BlockLayout.global_(seq_len, tokens, block_size)
        case "strided":
            return BlockLayout.strided(seq_len, draw.choice([7, 40, 64]), block_size)
        case "dilated":
            return BlockLayout.dilated(seq_len, draw.choice([[1, 2, 4], [3], [2, 5]]), draw.randint(1, 2), block_size)
        case "hierarchical":
            return BlockLayout.hierarchical(seq_len, [(1, window), (64, window + 70), (90, None)], block_size)
        case "random":
            return BlockLayout.random(seq_len, draw.choice([0.1, 0.4, 0.8]), seed, block_size)
        case "longformer":
            return BlockLayout.longformer(seq_len, window, tokens, block_size)
        case "bigbird":
            return BlockLayout.bigbird(seq_len, window, tokens, 1, seed, block_size)
    return some(seq_len, block_size, (1, 1), draw.choice([0.0, 0.1, 0.4, 0.9]), seed)


def some(seq_len: int, block_size: tuple[int, int], lead: tuple[int, int], share: float, seed: int) -> BlockLayout:
    """Each block with probability `share`, for each of lead's batch elements and heads on its own."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (-(-seq_len // size) for size in block_size)
    return BlockLayout.from_mask(torch.rand(*lead, rows, columns, generator=generator) < share, seq_len, block_size)


@dataclass(frozen=True)
class Call:
    """The arguments of one call, but for numbers that `seed` gives. A small `chunk_bytes`, a bound of
    the backend, cuts small calls into parts."""

    builder: str
    seq_len: int
    batch: int
    kv_heads: int
    group: int
    block_size: tuple[int, int]
    own_lists: tuple[bool, bool]
    branches: tuple[tuple[int, int], ...] = ()
    is_causal: bool = False
    scale: float | None = None
    dropout_p: float = 0.0
    head_offset: int = 0
    arrangement: str = "contiguous"
    causal_layout: bool = False
    lengths: tuple[int, ...] | None = None
    cu_seqlens: tuple[int, ...] | None = None
    padding: float | None = None
    chunk_bytes: int = blocks._CHUNK_BYTES
    gradient_of: tuple[str, ...] = ("out", "lse")
    seed: int = 0

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def layout(self, length: int) -> BlockLayout:
        layout = build(self.builder, length, self.block_size, self.seed)
        own_batch, own_heads = self.own_lists
        lead = (self.batch if own_batch and not self.branches else 1, self.heads if own_heads else 1)
        if lead != (1, 1):
            layout = layout & some(length, self.block_size, lead, 0.7, self.seed)
        return layout.causal() if self.causal_layout else layout

    def pattern(self):
        if not self.branches:
            layout = self.layout(self.seq_len)
            return layout if self.cu_seqlens is None else layout.prefix(max(map(int.__sub__, *self._edges())))
        return Dilated(*map(tuple, zip(*self.branches, strict=True))) * self.layout

    def _edges(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.cu_seqlens[1:], self.cu_seqlens[:-1]

    def options(self) -> dict[str, Tensor | None]:
        generator = torch.Generator().manual_seed(self.seed + 1)
        mask = (
            None if self.padding is None else torch.rand(self.batch, self.seq_len, generator=generator) < self.padding
        )
        return {
            "lengths": None if self.lengths is None else torch.tensor(self.lengths, dtype=torch.int64),
            "cu_seqlens": None if self.cu_seqlens is None else torch.tensor(self.cu_seqlens),
            "key_padding_mask": mask,
        }

    def counts(self) -> Tensor:
        """Return how often each query of each query head sees each key, from the definition, segment by segment."""
        n, heads = self.seq_len, self.heads
        counts = torch.zeros(self.batch, heads, n, n, dtype=torch.int32)
        samples = [(b, 0, n if self.lengths is None else self.lengths[b]) for b in range(self.batch)]
        if self.cu_seqlens is not None:
            samples = [(0, *bounds) for bounds in pairwise(self.cu_seqlens)]
        for b, start, stop in samples:
            for h in range(heads):
                for w, r in self.branches or ((n, 1),):
                    for first in range(start, stop, w):
                        tokens = torch.tensor(
                            range(first + (self.head_offset + h // self.group) % r, min(first + w, stop), r),
                            dtype=torch.int64,
                        )
                        if tokens.numel():
                            counts[b, h, tokens[:, None], tokens] += self.seen(b, h, len(tokens))
        if self.is_causal:
            counts.tril_()
        mask = self.options()["key_padding_mask"]
        return counts if mask is None else counts * ~mask[:, None, None]

    @functools.lru_cache(maxsize=256)  # noqa: B019
    def seen(self, b: int, h: int, count: int) -> Tensor:
        layout = self.layout(count if self.branches else self.seq_len)
        active = layout.dense_blocks()[b % layout.batch_size, h % layout.num_heads]
        position = torch.arange(count)
        pairs = active[(position // layout.q_block)[:, None], position // layout.k_block]
        return pairs.tril() if self.causal_layout else pairs

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(self.seed)
        return tuple(
            arrange(self.arrangement, (self.batch, self.seq_len, heads, HEAD_DIM), generator, dtype)
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        )


@st.composite
def calls(draw, products: bool, ragged: bool = False) -> Call:
    seq_len, batch, group = draw(LENGTHS), draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2]))
    branches: tuple[tuple[int, int], ...] = ()
    if products:
        branches = tuple(draw(st.lists(st.tuples(SEGMENTS, st.sampled_from([1, 2, 3])), min_size=1, max_size=3)))
        branches = tuple((max(w, r), r) for w, r in branches)
    lengths = cu_seqlens = padding = None
    kind = draw(st.sampled_from(["lengths", "cu_seqlens", "mask", "lengths+mask", "cu_seqlens+mask"])) if ragged else ""
    if "lengths" in kind:
        lengths = tuple(draw(st.lists(st.sampled_from(range(seq_len, -1, -1)), min_size=batch, max_size=batch)))
    if "cu_seqlens" in kind:
        batch = 1
        cu_seqlens = (0, *sorted(draw(st.lists(st.sampled_from(range(seq_len + 1)), max_size=4))), seq_len)
    if "mask" in kind:
        padding = draw(st.sampled_from([0.1, 0.5, 0.9, 1.0]))
    return Call(
        builder=draw(st.sampled_from(BUILDERS)),
        seq_len=seq_len,
        batch=batch,
        kv_heads=draw(st.sampled_from([1, 2, 3])),
        group=group,
        block_size=draw(st.sampled_from(BLOCK_SIZES)),
        own_lists=draw(st.sampled_from([(False, False), (False, True), (True, False), (True, True)])),
        branches=branches,
        is_causal=draw(st.booleans()),
        scale=draw(SCALES),
        dropout_p=draw(DROPOUT),
        head_offset=draw(st.sampled_from([0, 0, 1, 5])),
        arrangement=draw(st.sampled_from(LAYOUTS)),
        causal_layout=draw(st.sampled_from([False, False, True])),
        lengths=lengths,
        cu_seqlens=cu_seqlens,
        padding=padding,
        chunk_bytes=draw(st.sampled_from([20_000, blocks._CHUNK_BYTES])),
        gradient_of=draw(st.sampled_from([("out",), ("out", "lse"), ("lse",)])),
        seed=draw(st.integers(0, 2**31)),
    )


def check(call: Call, dtype: torch.dtype, backend: str = "native") -> None:
    def run(q, k, v):
        torch.manual_seed(call.seed)
        return attention(
            q, k, v, pattern, is_causal=call.is_causal, scale=call.scale, dropout_p=call.dropout_p,
            head_offset=call.head_offset, return_lse=True, backend=backend, **call.options(),
        )  # fmt: skip

    pattern, inputs = call.pattern(), call.inputs(dtype)
    with mock.patch.object(blocks, "_CHUNK_BYTES", call.chunk_bytes):
        errors = excesses(
            run,
            inputs,
            call.counts(),
            scale=HEAD_DIM**-0.5 if call.scale is None else call.scale,
            keep=survivors(*inputs[:2], call.dropout_p, call.head_offset, call.seed),
            dropout_p=call.dropout_p,
            gradient_of=call.gradient_of,
            seed=call.seed,
        )
    assert all(error <= 1 for error in errors.values()), f"errors over their bars: {errors}"


@random_calls(40)
@given(call=calls(products=False))
def test_layouts_in_float64(call):
    check(call, torch.float64)


@random_calls(40)
@given(call=calls(products=False))
def test_layouts_in_float32(call):
    check(call, torch.float32)


@random_calls(40)
@given(call=calls(products=True), dtype=FULL_PRECISION)
def test_products(call, dtype):
    check(call, dtype)


@random_calls(40)
@given(call=calls(products=False, ragged=True), dtype=FULL_PRECISION)
def test_ragged_layouts(call, dtype):
    check(call, dtype)


@random_calls(30)
@given(call=calls(products=True, ragged=True), dtype=FULL_PRECISION)
def test_ragged_products(call, dtype):
    check(call, dtype)


@random_calls(40)
@given(
    call=st.one_of(calls(products=False), calls(products=False, ragged=True), calls(products=True, ragged=True)),
    dtype=HALF_PRECISION,
)
def test_half_precision(call, dtype):
    jaxtyping.config.update("jaxtyping_disable", False)
    check(call, dtype)
    jaxtyping.config.update("jaxtyping_disable", True)


@random_calls(30)
@given(call=st.one_of(calls(products=False, ragged=True), calls(products=True, ragged=True)))
def test_reference_backend(call):
    check(call, torch.float64, "reference")


KEPT = {
    "shared": lambda n: (BlockLayout.local(n, 40, 16), {}),
    "causal": lambda n: (BlockLayout.random(n, 0.5, 0, 16), {"is_causal": True}),
    "per head": lambda n: (some(n, (16, 32), (1, 4), 0.5, 0), {}),
    "per sample": lambda n: (some(n, (16, 32), (2, 4), 0.5, 0), {"is_causal": True}),
    "ragged": lambda n: (some(n, (16, 32), (2, 1), 0.5, 0), {"lengths": torch.tensor([n, n // 2])}),
    "product": lambda n: (Dilated((64, 150), (1, 2)) * (lambda m: BlockLayout.local(m, 20, 16)), {}),
}


class TestCache:
    """Values that a call derives from a layout are kept under its identity: no call reads the content twice."""

    @pytest.fixture(autouse=True)
    def empty_cache(self):
        before = plan_cache.info().max_bytes
        plan_cache.clear()
        yield
        plan_cache.resize(before)

    @pytest.mark.parametrize("name", KEPT)
    def test_forward_backward_and_later_calls_find_it(self, name):
        pattern, options = KEPT[name](150)
        q = torch.randn(2, 150, 4, 8, requires_grad=True)
        first = torch.autograd.grad(attention(q, q, q, pattern, **options).square().sum(), q)[0]
        before = plan_cache.info()
        again = torch.autograd.grad(attention(q, q, q, pattern, **options).square().sum(), q)[0]
        after = plan_cache.info()
        assert torch.equal(first, again)
        assert after.misses == before.misses == before.entries
        assert after.hits >= before.hits + 2

    def test_a_hit_takes_less_than_20_microseconds(self):
        layout = BlockLayout.random(1 << 17, 0.1, 0).causal()
        q = torch.empty(1, 1 << 17, 1, 1)
        asked = call.Call.of(q, q, q, layout, is_causal=True)
        plan = asked.plan(1 << 17)

        def find():
            (found,) = execution.layouts_of(asked, q, plan).values()
            return blocks.groups_of(found, 0)

        assert find() is find()
        assert min(timeit.repeat(find, number=20, repeat=200)) / 20 < 20e-6

    def test_the_limit_holds_whatever_is_asked(self):
        q = torch.randn(1, 512, 2, 8)
        for size in (20_000, 0):
            plan_cache.resize(size)
            for seed in range(10):
                layout = BlockLayout.random(512, 0.3, seed, 16)
                assert torch.equal(*(block_sparse_attention(q, q, q, layout) for _ in range(2)))
                assert plan_cache.info().bytes <= size
        assert plan_cache.info().entries == 0

    def test_sixteen_threads_ask_resize_and_clear(self):
        q = torch.randn(1, 128, 2, 8)
        layouts = [BlockLayout.random(128, 0.4, seed, 16) for seed in range(6)]
        expected = [[block_sparse_attention(q, q, q, x, is_causal=cut) for cut in (False, True)] for x in layouts]
        wrong = []

        def work(seed: int) -> None:
            draw = random.Random(seed)
            for _ in range(12):
                if draw.random() < 0.2:
                    plan_cache.clear()
                elif draw.random() < 0.4:
                    plan_cache.resize(draw.choice([0, 30_000, 1 << 20]))
                which, cut = draw.randrange(6), draw.random() < 0.5
                if not torch.equal(
                    block_sparse_attention(q, q, q, layouts[which], is_causal=cut), expected[which][cut]
                ):
                    wrong.append((which, cut))
                info = plan_cache.info()
                if info.bytes > info.max_bytes:
                    wrong.append(info)

        in_sixteen_threads(work)
        assert not wrong


def test_a_short_last_segment_without_a_token_that_takes_part():
    pattern = Dilated((24,), (2,)) * (lambda n: BlockLayout.local(n, 9, 16))
    q = torch.randn(1, 25, 2, 8, dtype=torch.float64)  # token 24 takes part for head 0, no token for head 1
    pair = [attention(q, q, q, pattern, return_lse=True, backend=name) for name in ("native", "reference")]
    torch.testing.assert_close(*pair, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_lists_for_key_value_heads(backend, is_causal):
    """Routing makes such lists with per_kv_head=True: each is the list of all query heads of its group."""
    n = 100
    layout = some(n, (16, 32), (2, 2), 0.5, 0)
    repeated = BlockLayout.from_mask(layout.dense_blocks().repeat_interleave(3, 1), n, (16, 32))
    q, k, v = (torch.randn(2, n, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (6, 2, 2))
    found = []
    for x in (layout, repeated):
        out = block_sparse_attention(q, k, v, x, is_causal=is_causal, backend=backend)
        found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    assert all(map(torch.equal, *found))
    assert explain(q, k, k, layout).flops == explain(q, k, k, repeated).flops
    weights = (attention_weights(q, k, x, is_causal=is_causal).to_dense() for x in (layout, repeated))
    assert torch.equal(*weights)
    with pytest.raises(ValueError, match="layout has lists for 2 heads, got 6"):
        block_sparse_attention(q, q, q, layout)


GRADIENTS = {
    "local": lambda n: (BlockLayout.local(n, 20, 16), {}),
    "empty rows": lambda n: (some(n, (16, 16), (1, 1), 0.3, 1), {}),
    "causal, per head": lambda n: (some(n, (16, 32), (1, 2), 0.6, 0), {"is_causal": True}),
    "padding": lambda n: (BlockLayout.random(n, 0.5, 0, 16), {"key_padding_mask": torch.arange(n)[None] % 3 == 0}),
    "product": lambda n: (Dilated((20, n), (1, 2)) * (lambda m: BlockLayout.local(m, 1, 16)), {"is_causal": True}),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradcheck(name):
    pattern, options = GRADIENTS[name](37)
    q, k, v = (torch.randn(1, 37, h, 2, dtype=torch.float64, requires_grad=True) for h in (2, 1, 1))

    def run(q, k, v):
        out, lse = attention(q, k, v, pattern, return_lse=True, **options)
        return out, lse[lse.isfinite()]

    assert torch.autograd.gradcheck(run, (q, k, v), fast_mode=True)


@pytest.mark.parametrize("thorough", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_compiles_in_one_graph(thorough, compiling_python):
    """Layouts and products, forward and backward, to the same bits; a static layout is found in the cache again."""
    compiling_python(
        f"""
        thorough = {thorough}
        """
        """
        import torch
        from dilated_attention import BlockLayout, Dilated, attention, block_sparse_attention, plan_cache
        from dilated_attention.nn import BlockSparseDilatedAttention

        n = 100
        q, k, v = (torch.randn(2, n, heads, 8, requires_grad=True) for heads in (4, 2, 2))

        def gradients(call):
            out, lse = call(q, k, v, return_lse=True)
            return out, lse, *torch.autograd.grad(out.sin().sum() + lse[lse.isfinite()].sum(), (q, k, v))

        shared = BlockLayout.bigbird(n, 30, 20, 1, 0, 16)
        per_head = BlockLayout.from_mask(torch.rand(1, 4, 7, 4) < 0.4, n, (16, 32))
        near = lambda m: BlockLayout.local(m, 20, 16)
        product = Dilated((50,), (1,)) * BlockLayout.local(50, 20, 16)
        calls = (
            lambda *x, **y: block_sparse_attention(*x, per_head, is_causal=True, **y),
            lambda q, k, v, **y: attention(q, k, v[..., :5], product, sinks=v[0, 0, :, 0].repeat(2), **y),
            BlockSparseDilatedAttention(shared),
        )
        more = (
            lambda *x, **y: block_sparse_attention(*x, shared, **y),
            lambda *x, **y: attention(*x, Dilated((60, n), (1, 2)) * near, **y),
        )
        for call in more if thorough else calls:
            expected = gradients(call)
            compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
            assert all(map(torch.equal, expected, gradients(compiled)))
        call = torch.compile(lambda *x: block_sparse_attention(*x, shared), fullgraph=True, backend="aot_eager")
        call(q, k, v)
        before = plan_cache.info()
        call(q, k, v).sum().backward()
        after = plan_cache.info()
        assert after.misses == before.misses and after.hits > before.hits
        """
    )


def test_lists_that_no_packed_sample_can_use_are_refused():
    """Lists chosen by content for a whole pack are such: sample 2 would be computed with the lists of sample 1."""
    q, layout = torch.randn(1, 64, 2, HEAD_DIM), BlockLayout.local(64, 8, 16)
    edges = torch.tensor([0, 40, 64])
    with pytest.raises(ValueError, match=r"64 tokens.*cu_seqlens has 40.*layout\.prefix\(40\)"):
        attention(q, q, q, layout, cu_seqlens=edges)
    shared = attention(q, q, q, layout.prefix(40), cu_seqlens=edges)
    apart = [attention(q[:, a:b], q[:, a:b], q[:, a:b], layout.prefix(b - a)) for a, b in ((0, 40), (40, 64))]
    torch.testing.assert_close(shared, torch.cat(apart, 1))


@pytest.mark.parametrize("backend", ["native", "cpu", "reference"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("ragged", ["cu_seqlens", "lengths"])
def test_lists_of_each_samples_own(backend, is_causal, ragged):
    """Each sample of a packed or padded batch gets what its own layout gives it alone, forward and backward."""
    torch.manual_seed(0)
    tokens = [37, 5, 64, 22]
    heads = [4, 1, 2, 4]  # lists per query head, shared, per key-value head
    layouts = [
        BlockLayout.from_mask(torch.rand(count, -(-n // 8), -(-n // 8)) < 0.5, n, 8).for_heads(
            4 if count == 2 else count
        )
        for n, count in zip(tokens, heads, strict=True)
    ]
    samples = [[torch.randn(1, n, count, 16, requires_grad=True) for count in (4, 2, 2)] for n in tokens]
    if ragged == "cu_seqlens":
        edges = [sum(tokens[:i]) for i in range(len(tokens) + 1)]
        q, k, v = (torch.cat(x, 1) for x in zip(*samples, strict=True))
        out, lse = attention(
            q, k, v, BlockLayout.stack(layouts), cu_seqlens=edges, is_causal=is_causal, backend=backend, return_lse=True
        )
        outs, lses = out.split(tokens, 1), lse.split(tokens, 2)
    else:
        longest = max(tokens)
        q, k, v = (
            torch.cat([torch.nn.functional.pad(y, (0, 0, 0, 0, 0, longest - y.shape[1])) for y in x])
            for x in zip(*samples, strict=True)
        )
        out, lse = attention(
            q, k, v, BlockLayout.stack(layouts), lengths=tokens, is_causal=is_causal, backend=backend, return_lse=True
        )
        outs = [x[None, :n] for x, n in zip(out, tokens, strict=True)]
        lses = [x[None, :, :n] for x, n in zip(lse, tokens, strict=True)]
    for own, layout, found, found_lse in zip(samples, layouts, outs, lses, strict=True):
        doubles = [x.detach().double().requires_grad_() for x in own]
        expected, expected_lse = attention(*doubles, layout, is_causal=is_causal, backend="reference", return_lse=True)
        probe, probe_lse = torch.randn_like(found), torch.randn_like(found_lse)
        seen = expected_lse.isfinite()
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)
        torch.testing.assert_close(found_lse.double()[seen], expected_lse[seen], rtol=0, atol=2e-6)
        assert torch.equal(found_lse.isfinite(), seen)
        lost = [(x * y).sum() + (z[seen] * w[seen]).sum() for x, y, z, w in (
            (found, probe, found_lse, probe_lse), (expected, probe.double(), expected_lse, probe_lse.double())
        )]  # fmt: skip
        actual = torch.autograd.grad(lost[0], own, retain_graph=True)
        for mine, theirs in zip(actual, torch.autograd.grad(lost[1], doubles), strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=1e-5)


def test_stacking_heads():
    layouts = [BlockLayout.local(50, 9, 8), BlockLayout.random(50, 0.4, 1, 8), BlockLayout.global_(50, 5, 8)]
    pair = BlockLayout.stack(layouts[:2], over="heads")
    assert torch.equal(pair.dense_mask(), torch.cat([x.dense_mask() for x in layouts[:2]], 1))
    stacked = BlockLayout.stack([pair, layouts[2]], over="heads")
    q, k, v = torch.randn(3, 2, 50, 3, 8, dtype=torch.float64)
    found = attention(q, k, v, stacked)
    for head, layout in enumerate(layouts):
        part = [x[:, :, head : head + 1] for x in (q, k, v)]
        torch.testing.assert_close(found[:, :, head : head + 1], attention(*part, layout), rtol=0, atol=1e-12)


def test_stacking_layouts_that_do_not_agree():
    layout = BlockLayout.local(16, 4, 4)
    with pytest.raises(ValueError, match="layouts is empty"):
        BlockLayout.stack([])
    for other in (
        BlockLayout.local(16, 4, 8),
        BlockLayout.local(16, 4, 4, is_causal=True),
        BlockLayout.stack([layout] * 2),
    ):
        with pytest.raises(ValueError, match="layouts must agree"):
            BlockLayout.stack([layout, other])
    with pytest.raises(ValueError, match=r"layouts of heads must have one seq_len; got \[16, 12\]"):
        BlockLayout.stack([layout, BlockLayout.local(12, 4, 4)], over="heads")
    with pytest.raises(ValueError, match='over must be "batch" or "heads"; got "rows"'.replace('"rows"', "'rows'")):
        BlockLayout.stack([layout], over="rows")
    q, k, v = torch.randn(3, 1, 16, 2, 8)
    with pytest.raises(ValueError, match="layout has lists for a batch of 3, got 2"):
        attention(q, k, v, BlockLayout.stack([layout] * 3), cu_seqlens=[0, 4, 16])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("block_size", [(64, 512), (512, 512), (600, 300), (64, 4096)])
def test_blocks_longer_than_a_tile(block_size, is_causal):
    tensors = [torch.randn(1, 1100, heads, 8) for heads in (2, 1, 1)]
    layout = BlockLayout.random(1100, 0.5, 1, block_size)
    layout = layout.causal() if is_causal else layout
    results = []
    for backend, dtype in (("reference", torch.float64), ("native", torch.float32), ("cpu", torch.float32)):
        leaves = [x.to(dtype).requires_grad_() for x in tensors]
        out = attention(*leaves, layout, is_causal=is_causal, backend=backend)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    for expected, *found in zip(*results, strict=True):
        for x in found:
            torch.testing.assert_close(x.double(), expected, rtol=2e-4, atol=2e-5)
