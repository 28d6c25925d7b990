"""Biases: every form on every backend, pattern and option against dense definitions in float64."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from conformance import magnitudes
from dilated_attention import (
    BackendError,
    BlockLayout,
    Dilated,
    Neighborhood,
    UnsupportedError,
    Window,
    attention,
    explain,
)
from dilated_attention.backends import cpu, native, reference
from dilated_attention.backends.facts import Facts
from dilated_attention.backends.table import BACKENDS
from dilated_attention.bias import Alibi, QueryBias, RelativeBias
from dilated_attention.scores import Scores
from test_neighborhood import seen_on
from tolerances import excess

CPU = torch.device("cpu")


def served(dtype: torch.dtype, *needs: str) -> list[str]:
    facts = Facts(CPU, dtype, 8, 32, ("bias", *needs))
    return [name for name, x in BACKENDS.items() if x.refusal(facts) is None]


# ---- the definitions

METRICS = {
    "euclidean": lambda x: x.square().sum(-1).sqrt(),
    "manhattan": lambda x: x.abs().sum(-1),
    "chebyshev": lambda x: x.abs().amax(-1),
}


def dense(bias: Any, tensor: Tensor, batch: int, heads: int, queries: Tensor, keys: Tensor) -> Tensor:
    """Return b_h(i, j) in float64, `(batch, heads, queries, keys)`, of a form whose tensor is `tensor`.

    queries, keys: the position of each.
    """
    tensor = tensor.double()
    shape = batch, heads, len(queries), len(keys)
    apart = keys[None, :] - queries[:, None]
    if isinstance(bias, Alibi):
        distance = apart.abs().double().expand(batch, -1, -1)
        if bias.coordinates is not None:
            x = bias.coordinates.double().expand(batch, -1, -1)
            distance = METRICS[bias.metric](x[:, queries][:, :, None] - x[:, keys][:, None])
        return -tensor[:, None, None] * distance[:, None]
    if isinstance(bias, RelativeBias):
        differences = apart[None, :, :, None]
        if bias.coordinates is not None:
            x = bias.coordinates.long()
            differences = x[:, keys][:, None] - x[:, queries][:, :, None]
        table = tensor
        if bias.buckets is not None:
            table = tensor[:, bias.buckets.long()]  # an entry for each difference
        index = []
        for axis, size in enumerate(table.shape[1:]):
            extent = (size - 1) // 2
            index.append((differences[..., axis]).clamp(-extent, extent) + extent)
        found = torch.stack([table[h][tuple(index)] for h in range(heads)], 1)
        return found.expand(shape)
    if isinstance(bias, QueryBias):
        found = torch.zeros(shape, dtype=torch.float64)
        extent = tensor.shape[-1]
        for back in range(extent):
            i, j = (apart == -back).nonzero(as_tuple=True)
            found = found.index_put(
                (torch.arange(batch)[:, None, None], torch.arange(heads)[:, None], i, j),
                tensor.expand(batch, -1, -1, -1)[:, i, :, back].transpose(1, 2),
            )
        return found
    return tensor.expand(shape)


def make(name: str, q: Tensor, keys: int, reach: int, rng: random.Random) -> tuple[Any, Tensor]:
    """Return a bias of the form `name` for a call, and its tensor, a leaf."""
    batch, queries, heads, _ = q.shape
    generator = torch.Generator().manual_seed(rng.randrange(2**31))

    def leaf(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float64).to(q.dtype).requires_grad_()

    own = rng.choice([1, batch])
    if name == "alibi":
        tensor = leaf(heads)
        return Alibi(tensor), tensor
    if name in METRICS:
        tensor = leaf(heads)
        x = 3 * torch.randn(own, reach, rng.choice([1, 2, 3]), generator=generator)
        if rng.random() < 0.5:
            x = x.long()
        return Alibi(tensor, x, name), tensor
    if name == "table":
        tensor = leaf(heads, 2 * rng.choice([0, 3, 9, 50]) + 1)
        return RelativeBias(tensor), tensor
    if name == "buckets":
        tensor = leaf(heads, 5)
        buckets = torch.randint(0, 5, (2 * rng.choice([0, 3, 9, 50]) + 1,), generator=generator)
        return RelativeBias(tensor, buckets), tensor
    if name == "plane":
        tensor = leaf(heads, 5, 9)
        places = torch.randint(0, 7, (own, reach, 2), generator=generator)
        return RelativeBias(tensor, None, places), tensor
    if name == "query":
        tensor = leaf(own, queries, heads, rng.choice([1, 4, 50]))
        return QueryBias(tensor), tensor
    shape = own, rng.choice([1, heads]), queries, keys
    tensor = leaf(*shape)
    if rng.random() < 0.3:
        tensor = leaf(*shape[:2], keys, queries).detach().transpose(2, 3).requires_grad_()
    return tensor, tensor


FORMS = ("alibi", *METRICS, "table", "buckets", "plane", "query", "pair")

# ---- random calls


def pattern_of(rng: random.Random, seq_len: int, heads: int, kv_heads: int, sizes: tuple[int, ...]) -> Any:
    kind = rng.choice(["dilated", "dilated", "window", "sum", "layout", "product", "sum of calls"])
    segments = rng.choice([(seq_len,), (7, 40), (5, 16, 40)])
    dilated = Dilated(segments, (1, 2, 3)[: len(segments)])
    window = Window(rng.choice([0, 3, 40]), rng.choice([0, 5]), leading=rng.choice([0, 0, 2]))
    if kind == "dilated":
        return dilated
    if kind == "window":
        return window
    if kind == "sum":
        return window + dilated
    assert kind in ("layout", "product", "sum of calls")
    q_block, k_block = sizes
    per_head = rng.choice([1, heads])

    def layout(length: int) -> BlockLayout:
        generator = torch.Generator().manual_seed(length)
        blocks = torch.rand(1, per_head, -(-length // q_block), -(-length // k_block), generator=generator) < 0.6
        return BlockLayout.from_mask(blocks, length, (q_block, k_block))

    if kind == "product":
        return dilated * layout
    return layout(seq_len) if kind == "layout" else window + layout(seq_len)


def definition(
    given: tuple[Tensor, ...], bias: Any, positions: tuple[Tensor, Tensor], counts: Tensor, scores: Scores,
    cotangents: list[Tensor], **others: Any,
) -> tuple[list[Tensor], dict[str, Tensor]]:  # fmt: skip
    """Return out, lse and the gradients of q, k, v and the bias's tensor, which are given, in float64; and for each the
    size of its terms.

    Args:
        positions: of each query, and of each key.
        counts: how often the pattern shows a key to a query, per query head.
        cotangents: of out and of lse.
    """
    wide = [x.detach().double().requires_grad_() for x in given]
    q, k, v, tensor = wide
    batch, _, heads, _ = q.shape
    repeated = [x.repeat_interleave(heads // x.shape[2], 2) for x in (k, v)]
    added = dense(bias, tensor, batch, heads, *positions)
    out, lse = reference.attend(q, *repeated, counts, scores, bias=added, **others)
    lse = lse.transpose(1, 2)
    d_lse = cotangents[1].masked_fill(lse == -torch.inf, 0.0)
    loss = (out * cotangents[0]).sum() + (lse.masked_fill(lse == -torch.inf, 0.0) * d_lse).sum()
    found = [out, lse, *torch.autograd.grad(loss, wide)]

    numbers = {"scale": scores.scale, "softcap": scores.softcap, "dropout_p": scores.dropout_p}
    sizes = magnitudes(
        q.detach(), *[x.detach() for x in repeated], counts, cotangents[0], d_lse, **numbers, **others,
        bias=added.detach(),
    )  # fmt: skip
    for x in ("dk", "dv"):
        sizes[x] = sizes[x].unflatten(2, (k.shape[2], -1)).sum(3)
    entries = dense(bias, tensor, batch, heads, *positions)
    sizes["bias"] = torch.autograd.grad((entries * sizes["bias"]).sum(), tensor)[0].abs()
    return found, sizes


def compare(
    found: list[Tensor], expected: list[Tensor], sizes: dict[str, Tensor], dtype: torch.dtype, *described: Any
) -> None:
    names = ("out", "lse", "dq", "dk", "dv", "bias")
    errors = {x: excess(a, b, sizes[x], dtype) for x, a, b in zip(names, found, expected, strict=True)}
    assert all(x <= 1 for x in errors.values()), (*described, errors)


def check(seed: int, dtype: torch.dtype, only: str = "") -> None:
    """Make a random call, and compare out, lse and all gradients of each backend, or of one, with the definition."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    batch, seq_len = rng.choice([1, 1, 2, 3]), rng.choice([1, 2, 17, 33, 40, 40, 150])
    kv_heads, ratio = rng.choice([1, 2, 3]), rng.choice([1, 2])
    heads = kv_heads * ratio
    pattern = pattern_of(rng, seq_len, heads, kv_heads, rng.choice([(4, 3), (16, 16), (1, 5)]))
    options: dict[str, Any] = {
        "is_causal": rng.random() < 0.4,
        "scale": rng.choice([None, 0.4, -0.5]),
        "softcap": rng.choice([None, None, 1.5]),
        "dropout_p": rng.choice([0.0, 0.0, 0.3]),
    }
    keys = seq_len
    starts = (0, 0)
    ragged = rng.choice(["", "", "lengths", "packed", "hidden", "placed"])
    if ragged == "lengths":
        options["lengths"] = torch.tensor([rng.randrange(seq_len + 1) for _ in range(batch)])
    if ragged == "packed":
        batch = 1
        cut = sorted(rng.randrange(seq_len + 1) for _ in range(2))
        options["cu_seqlens"] = torch.tensor([0, *cut, seq_len])
        if isinstance(pattern, BlockLayout) or len(getattr(pattern, "parts", ())) > 1:
            pattern = Dilated((seq_len,), (1,))  # a layout of the whole sequence fits no sample
    if ragged == "hidden":
        options["key_padding_mask"] = torch.rand(batch, seq_len, generator=generator) < 0.3
    queries = seq_len
    if ragged == "placed" and isinstance(pattern, (Dilated, Window)):
        queries = rng.randrange(1, seq_len + 1)
        starts = (seq_len - queries + rng.choice([0, 4]), rng.choice([0, 4]))
        options |= {"q_start": starts[0], "k_start": starts[1]}

    shapes = (batch, queries, heads, 8), (batch, keys, kv_heads, 8), (batch, keys, kv_heads, rng.choice([8, 5]))
    q, k, v = (torch.randn(x, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for x in shapes)
    reach = max(starts[0] + queries, starts[1] + keys)
    name = rng.choice(FORMS)
    bias, tensor = make(name, q, keys, reach, rng)

    # What the reference backend passes to its softmax under a bias of 0 has nothing to do with biases.
    counts: list[Any] = []
    attend = reference.attend

    def remember(*arguments: Any, **others: Any) -> Any:
        counts.append((arguments, others))
        return attend(*arguments, **others)

    torch.manual_seed(seed)
    parts = pattern.parts if hasattr(pattern, "parts") else (pattern,)
    with mock.patch.object(reference, "attend", remember):
        nothing = torch.zeros(1, 1, queries, keys, dtype=q.dtype)
        attention(q, k, v, pattern, **options, bias=nothing, backend="reference")
    assert len(counts) == len(parts)
    (_, _, _, _, scores), others = counts[0]
    shown: Any = 0
    for (_, _, _, some, _), _ in counts:
        shown = shown + some.repeat_interleave(heads // some.shape[-3], -3)
    del others["bias"]
    cotangents = [torch.randn(x, generator=generator, dtype=torch.float64) for x in (
        (batch, queries, heads, shapes[2][3]), (batch, heads, queries))]  # fmt: skip

    positions = torch.arange(queries) + starts[0], torch.arange(keys) + starts[1]
    expected, sizes = definition((q, k, v, tensor), bias, positions, shown, scores, cotangents, **others)
    needs = ["softcap"] if options["softcap"] else []
    if name == "plane":
        needs.append("a table over coordinates")
    for backend in [only] if only else served(dtype, *needs):
        torch.manual_seed(seed)
        with mock.patch.object(native, "_TILE_BYTES", rng.choice([1, native._TILE_BYTES])):
            out, lse = attention(q, k, v, pattern, **options, bias=bias, backend=backend, return_lse=True)
            loss = (out * cotangents[0].to(out.dtype)).sum()
            given = cotangents[1].to(lse.dtype).masked_fill(lse == -torch.inf, 0.0)
            loss = loss + (lse.masked_fill(lse == -torch.inf, 0.0) * given).sum()
            found = [out, lse, *torch.autograd.grad(loss, (q, k, v, tensor))]
        compare(found, expected, sizes, dtype, backend, name, pattern, options)


@pytest.mark.parametrize("seed", range(60))
def test_random_calls(seed: int):
    check(seed, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", range(1000, 1016))
def test_random_calls_of_other_dtypes(seed: int, dtype: torch.dtype):
    check(seed, dtype)


@pytest.mark.skipif(cpu.PROCESSOR.arm64 or cpu.missing() is not None, reason="of kernels for x86-64")
@pytest.mark.parametrize("level", [1, 2], ids=["AVX2", "AVX-512"])
@pytest.mark.parametrize("seed", range(5000, 5008))
def test_random_calls_of_lower_instruction_sets(seed: int, level: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu, "PROCESSOR", replace(cpu.PROCESSOR, highest=min(level, cpu.PROCESSOR.highest)))
    check(seed, (torch.float32, torch.bfloat16, torch.float16)[seed % 3])


@pytest.mark.thorough
@pytest.mark.parametrize("block", range(10))
def test_many_random_calls(block: int):
    for seed in range(2000 + 300 * block, 2300 + 300 * block):
        check(seed, (torch.float64, torch.float32, torch.bfloat16)[seed % 3])


# ---- neighborhoods, whose rows are tokens in another order


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_neighborhoods(name: str, dtype: torch.dtype):
    check_neighborhood(Neighborhood((6, 7), (3, 2), rate=(1, 2), leading=2), name, dtype)


def check_neighborhood(pattern: Neighborhood, name: str, dtype: torch.dtype, only: str = "") -> None:
    tokens = pattern.seq_len
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, tokens, heads, 8) for heads in (4, 2, 2)]
    q, k, v = (torch.randn(x, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for x in shapes)
    bias, tensor = make(name, q, tokens, tokens, random.Random(4))
    cotangents = [torch.randn(x, generator=generator, dtype=torch.float64) for x in (shapes[0], (2, 4, tokens))]
    positions = torch.arange(tokens), torch.arange(tokens)
    shown = seen_on(pattern.axes, pattern.leading).int().expand(1, 4, -1, -1)
    expected, sizes = definition((q, k, v, tensor), bias, positions, shown, Scores(8**-0.5), cotangents)

    needs = ["a block layout"]
    if name not in ("alibi", *METRICS):
        needs.append("a bias of tokens in another order")
    backends = served(dtype, *needs)
    assert {"native", "reference"} <= set(backends)
    for backend in [only] if only else backends:
        out, lse = attention(q, k, v, pattern, bias=bias, backend=backend, return_lse=True)
        loss = (out * cotangents[0].to(dtype)).sum() + (lse * cotangents[1].to(lse.dtype)).sum()
        found = [out, lse, *torch.autograd.grad(loss, (q, k, v, tensor))]
        compare(found, expected, sizes, dtype, backend)


# ---- what is no random call


def tensors(*heads: int, tokens: int = 12) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = heads or (2, 2, 2)
    return [torch.randn(2, tokens, h, 8, generator=generator, requires_grad=True) for h in heads]


@pytest.mark.parametrize("backend", served(torch.float32))
def test_minus_infinity_hides_a_pair(backend: str):
    q, k, v = tensors()
    shown = torch.rand(12, 12, generator=torch.Generator().manual_seed(1)) < 0.4
    shown[3] = False
    bias = torch.zeros(1, 1, 12, 12).masked_fill(~shown, -torch.inf).requires_grad_()
    results = []
    for pattern, options in ((BlockLayout.from_mask(shown, block_size=1), {}), (Dilated([12], [1]), {"bias": bias})):
        out, lse = attention(q, k, v, pattern, return_lse=True, backend=backend, **options)
        loss = out.sin().sum() + lse.masked_fill(lse == -torch.inf, 0.0).sin().sum()
        results.append((out, lse, *torch.autograd.grad(loss, (q, k, v), retain_graph=True)))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)
    d_bias = torch.autograd.grad(loss, bias)[0]
    assert d_bias.isfinite().all()
    assert (d_bias[0, 0][~shown] == 0).all()


@pytest.mark.parametrize("backend", served(torch.float32))
def test_a_bias_of_hidden_pairs_reaches_nothing(backend: str):
    """Also where it is no number: a tensor may be unwritten above the diagonal."""
    results = []
    for number in (0.0, torch.nan):
        q, k, v = tensors()
        bias = torch.rand(1, 1, 12, 12, generator=torch.Generator().manual_seed(1))
        bias[:, :, torch.ones(12, 12, dtype=torch.bool).triu(1)] = number
        bias.requires_grad_()
        out = attention(q, k, v, Dilated([12], [1]), is_causal=True, bias=bias, backend=backend)
        results.append((out, *torch.autograd.grad(out.sin().sum(), (q, k, v, bias))))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("backend", served(torch.float32))
def test_hidden_numbers_that_are_not_finite_reach_nothing(backend: str):
    """The gradient of a bias is added once, also where products are made again without such numbers."""
    bias = torch.rand(2, 7, generator=torch.Generator().manual_seed(1)).requires_grad_()
    results = []
    for number in (0.0, torch.nan):
        q, k, v = tensors()
        with torch.no_grad():
            k[0, -1] = v[1, -1] = number
        options = {"is_causal": True, "q_start": 0, "bias": RelativeBias(bias), "backend": backend}
        out = attention(q[:, :8], k, v, Window(3), **options)  # the last keys are after all queries
        results.append(torch.autograd.grad(out.sin().sum(), bias)[0])
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.skipif(cpu.PROCESSOR.arm64 or cpu.missing() is not None, reason="of kernels for x86-64")
def test_no_weight_is_subnormal():
    """Products with subnormal numbers would take many times as long. Other code of the thread still makes them."""
    q, k, v = (torch.randn(1, 80, 1, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    bias = -2.0 * (torch.arange(80)[:, None] - torch.arange(80)).abs()[None, None].float()
    out = attention(q, k, v, Dilated([80], [1]), bias=bias.requires_grad_(), backend="cpu")
    (gradient,) = torch.autograd.grad(out.sum(), bias)
    sizes = gradient.abs()
    least = torch.finfo(torch.float32).tiny
    assert ((sizes >= least) & (sizes < 1e6 * least)).any()
    assert not ((sizes > 0) & (sizes < least)).any()
    assert (torch.full((64,), least) / 4 > 0).all()


def test_transforms():
    """`torch.func.grad` and `vmap` map the tensor of a bias or share it."""
    make: dict[str, tuple[Any, Tensor]] = {
        "alibi": (Alibi, torch.rand(2)),
        "table": (RelativeBias, torch.randn(2, 9)),
        "query": (QueryBias, torch.randn(1, 12, 2, 5)),
        "pair": (lambda tensor: tensor, torch.randn(2, 1, 12, 12)),
    }
    many = [torch.randn(3, 2, 12, 2, 8) for _ in range(3)]
    for form, tensor in make.values():
        for backend in served(torch.float32):

            def loss(q, k, v, tensor, form=form, backend=backend):
                return attention(q, k, v, Window(4, 4), bias=form(tensor), backend=backend).sin().sum()

            gradients = torch.func.grad(loss, (0, 1, 2, 3))
            for tensors_, dim in ((tensor, None), (torch.stack([tensor, 2 * tensor, -tensor]), 0)):
                found = torch.func.vmap(gradients, (0, 0, 0, dim))(*many, tensors_)
                for i in range(3):
                    own = tensors_ if dim is None else tensors_[i]
                    expected = gradients(*[x[i] for x in many], own)
                    for actual, wanted in zip(found, expected, strict=True):
                        torch.testing.assert_close(actual[i], wanted)


def test_mapped_coordinates_and_buckets():
    q, k, v = (x.detach() for x in tensors())
    slopes = torch.rand(2)
    coordinates = torch.rand(3, 1, 12, 2)

    def far(x: Tensor) -> Tensor:
        return attention(q, k, v, Window(4, 4), bias=Alibi(slopes, x))

    found = torch.func.vmap(far)(coordinates)
    torch.testing.assert_close(found, torch.stack([far(x) for x in coordinates]))
    buckets = torch.zeros(3, 5, dtype=torch.int64)
    with pytest.raises(UnsupportedError, match="buckets of a bias are mapped"):
        torch.func.vmap(lambda x: attention(q, k, v, Window(4, 4), bias=RelativeBias(slopes[:, None], x)))(buckets)


def test_compiles_in_one_graph(compiling_python):
    compiling_python(
        """
        import torch
        from dilated_attention import Window, attention
        from dilated_attention.bias import Alibi, QueryBias, RelativeBias

        torch.manual_seed(0)
        forms = (
            (Alibi, torch.rand(2)),
            (lambda slopes: Alibi(slopes, torch.arange(24.0).view(1, 12, 2)), torch.rand(2)),
            (lambda table: RelativeBias(table, torch.arange(9) // 2), torch.randn(2, 5)),
            (QueryBias, torch.randn(1, 12, 2, 5)),
            (lambda tensor: tensor, torch.randn(2, 1, 12, 12)),
        )
        for form, tensor in forms:
            inputs = [torch.randn(2, 12, 2, 8, requires_grad=True) for _ in range(3)] + [tensor.requires_grad_()]

            def call(q, k, v, tensor):
                return attention(q, k, v, Window(4, 4), bias=form(tensor)).sin().sum()

            expected = torch.autograd.grad(call(*inputs), inputs)
            compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
            for actual, wanted in zip(torch.autograd.grad(compiled(*inputs), inputs), expected, strict=True):
                torch.testing.assert_close(actual, wanted)
            torch.compiler.reset()
        """
    )


def test_higher_derivatives_are_of_the_reference():
    q, k, v = (x.detach().double() for x in tensors(tokens=5))
    slopes = torch.rand(2, dtype=torch.float64, requires_grad=True)

    def call(slopes: Tensor, backend: str) -> Tensor:
        return attention(q, k, v, Dilated([5], [1]), bias=Alibi(slopes), backend=backend).sum()

    assert torch.autograd.gradgradcheck(lambda x: call(x, "reference"), slopes)
    (first,) = torch.autograd.grad(call(slopes, "native"), slopes, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        first.sum().backward()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", served(torch.float32))
def test_fixed_tensors_get_no_gradient(form: str, backend: str):
    """The gradients of q, k and v are those beside a tensor that is learned."""
    q, k, v = tensors()
    for options in ({}, {"cu_seqlens": torch.tensor([0, 12])}):
        rows = slice(0, 1) if options else slice(None)
        inputs = q[rows], k[rows], v[rows]
        bias, tensor = make(form, inputs[0], 12, 12, random.Random(0))
        if form == "plane" and backend == "cpu":
            continue  # refused
        learned = attention(*inputs, Window(4, 4), bias=bias, backend=backend, **options)
        expected = torch.autograd.grad(learned.sin().sum(), (q, k, v))
        tensor.requires_grad_(False)
        fixed = attention(*inputs, Window(4, 4), bias=bias, backend=backend, **options)
        with mock.patch.object(torch.Tensor, "index_add_", side_effect=AssertionError("sums that nobody wants")):
            found = torch.autograd.grad(fixed.sin().sum(), (q, k, v))
        for actual, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64, torch.float64], ids=str)
@pytest.mark.parametrize("backend", served(torch.float32))
def test_coordinates_of_any_type(backend: str, dtype: torch.dtype):
    """Differences neither wrap round nor lose digits, however far from 0 the coordinates lie."""
    q, k, v = tensors()
    grid = torch.randint(0, 100, (1, 12, 2), generator=torch.Generator().manual_seed(0))
    moved = grid.to(dtype)
    if dtype.itemsize == 8:
        moved += 2**40
    make = [(lambda x: Alibi(slopes, x)), (lambda x: RelativeBias(table, None, x))]
    slopes = torch.rand(2, generator=torch.Generator().manual_seed(1)) / 50
    table = torch.randn(2, 5, 9, generator=torch.Generator().manual_seed(2))
    if dtype.is_floating_point or backend == "cpu":
        del make[1]  # tables take integers, and the cpu backend takes none
    for form in make:
        expected = attention(q, k, v, Window(4, 4), bias=form(grid), backend="reference")
        found = attention(q, k, v, Window(4, 4), bias=form(moved), backend=backend)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("form", [x for x in FORMS if x != "plane"])
def test_empty_calls(form: str):
    """A batch without samples, and a sample without tokens."""
    for tokens, lengths in ((0, None), (12, [0, 5])):
        q, k, v = tensors(tokens=tokens)
        bias, tensor = make(form, q, tokens, tokens, random.Random(1))
        out = attention(q, k, v, Dilated([4], [1]) * (lambda n: BlockLayout.local(n, 2, 2)), bias=bias, lengths=lengths)
        gradients = torch.autograd.grad(out.sum(), (q, tensor))
        assert all(x.isfinite().all() for x in gradients)


WRONG: list[tuple[Any, str]] = [
    (lambda q: Alibi([1.0, 2.0]), "slopes must be a floating tensor .heads,.; got list"),
    (lambda q: Alibi(torch.rand(2, 1)), r"slopes must be .*got torch.float32 of shape \(2, 1\)"),
    (lambda q: Alibi(torch.arange(2)), "slopes must be a floating tensor .*torch.int64"),
    (lambda q: Alibi(torch.rand(3)), r"slopes must have one row per head of q, 2; got .*\(3,\)"),
    (lambda q: Alibi(torch.rand(2), metric="cosine"), "metric must be one of .*manhattan.*; got 'cosine'"),
    (lambda q: Alibi(torch.rand(2), torch.rand(12, 2)), r"coordinates must be .*\(batch or 1, seq, axes\).*\(12, 2\)"),
    (lambda q: Alibi(torch.rand(2), torch.rand(1, 12, 0)), "coordinates must have an axis"),
    (lambda q: Alibi(torch.rand(2), torch.rand(1, 11, 2)), r"a row for each of 12 positions; got .*\(1, 11, 2\)"),
    (lambda q: Alibi(torch.rand(2), torch.rand(3, 12, 2)), r"with batch 2 .*got .*\(3, 12, 2\)"),
    (lambda q: Alibi(torch.rand(2, device="meta")), "slopes must be on q's device, cpu; got meta"),
    (lambda q: RelativeBias(torch.rand(2, 8)), r"table must have 2 \* extent \+ 1 entries per axis, .*\(8,\)"),
    (lambda q: RelativeBias(torch.rand(2, 0)), r"table must have 2 \* extent \+ 1 entries .*\(0,\)"),
    (lambda q: QueryBias(torch.rand(2, 12, 2, 0)), "logits must have an extent of at least 1"),
    (lambda q: RelativeBias(torch.rand(4, 9)), "table must have one row per head of q, 2"),
    (lambda q: RelativeBias(torch.rand(2, 3, 3)), "table must be a floating tensor"),
    (lambda q: RelativeBias(torch.rand(2, 4), torch.zeros(6).long()), "buckets must have 2 .*an odd number"),
    (lambda q: RelativeBias(torch.rand(2, 4), torch.rand(5)), "buckets must be a tensor of integers"),
    (lambda q: RelativeBias(torch.rand(2, 4), torch.full((5,), 4)), r"buckets must lie in \[0, 4\); got 4"),
    (lambda q: RelativeBias(torch.rand(2, 9), coordinates=torch.rand(1, 12, 1)), "coordinates must be a tensor of int"),
    (
        lambda q: QueryBias(torch.rand(2, 12, 2)),
        "logits must be a floating tensor .batch or 1, queries, heads, extent.",
    ),
    (
        lambda q: QueryBias(torch.rand(2, 11, 2, 4)),
        r"logits must have shape \(1 or 2, 12, 2, any\); got .*\(2, 11, 2, 4\)",
    ),
    (lambda q: torch.rand(2, 2, 12, 11), r"bias must have shape \(1 or 2, 1 or 2, 12, 12\); got .*\(2, 2, 12, 11\)"),
    (lambda q: torch.rand(12, 12), r"bias must be a floating tensor \(batch or 1, heads or 1, queries, keys\); got"),
    (lambda q: torch.ones(1, 1, 12, 12, dtype=torch.bool), "A mask over pairs is a pattern, BlockLayout.from_mask"),
    (lambda q: 3.0, "bias must be an Alibi, a RelativeBias or a QueryBias .*; got float"),
]


@pytest.mark.parametrize(("make_bias", "words"), WRONG)
def test_wrong_biases(make_bias: Any, words: str):
    q, k, v = tensors()
    with pytest.raises(ValueError, match=words):
        attention(q, k, v, Window(4, 4), bias=make_bias(q))


def test_backends_without_biases_refuse_them():
    q, k, v = tensors()
    for name in BACKENDS.keys() - served(torch.float32):
        with pytest.raises(BackendError, match=rf"backend='{name}' cannot serve this call"):
            attention(q, k, v, Window(4, 4), bias=Alibi(torch.rand(2)), backend=name)
    report = explain(q, k, v, Window(4, 4), bias=Alibi(torch.rand(2)))
    assert report.backend in served(torch.float32)
