"""Run calls and modules under PyTorch's transforms: vmap, compile, export, autocast, copies, files, the meta device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, vmap

from dilated_attention import BlockLayout, Dilated, UnsupportedError, attention, dilated_attention
from dilated_attention.backends.facts import Facts
from dilated_attention.backends.table import BACKENDS
from dilated_attention.nn import BlockAttentionMixture, MultiheadDilatedAttention, NativeSparseAttention
from processors import by_name_in_a_graph
from tolerances import TOLERANCE, relative_error

F64 = {"dtype": torch.float64}
NESTED = {"segment_lengths": [4, 16], "dilation_rates": [1, 4]}


def tensors(*leading: int) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(*leading, 2, 17, 4, 8, **F64)
    k, v = torch.randn(2, *leading, 2, 17, 2, 8, **F64)
    return q, k, v


def call(q, k, v, **options):
    return dilated_attention(q, k, v, **NESTED, is_causal=True, **options)


def one_by_one(function, *inputs):
    return torch.stack([function(*each) for each in zip(*inputs, strict=True)])


def test_vmap_over_a_leading_dimension():
    inputs = tensors(3)
    assert torch.equal(vmap(call)(*inputs), one_by_one(call, *inputs))
    lse = vmap(lambda *x: call(*x, return_lse=True)[1])(*inputs)
    assert torch.equal(lse, one_by_one(lambda *x: call(*x, return_lse=True)[1], *inputs))


def test_vmap_over_some_arguments_and_other_dimensions():
    q, k, v = tensors(3)
    out = vmap(lambda q, v: call(q, k[0], v), (2, 0), 1)(q.movedim(0, 2), v)
    assert torch.equal(out.movedim(1, 0), one_by_one(lambda q, v: call(q, k[0], v), q, v))
    twice = vmap(vmap(call))(*(x[None] for x in (q, k, v)))
    assert torch.equal(twice[0], one_by_one(call, q, k, v))


def test_vmap_of_ragged_and_masked_calls():
    inputs = tensors(3)
    lengths = torch.tensor([[3, 17], [0, 5], [17, 1]])
    masks = torch.rand(3, 2, 17) < 0.3

    def ragged(q, k, v, lengths):
        return call(q, k, v, lengths=lengths)

    def masked(q, k, v, mask):
        return call(q, k, v, key_padding_mask=mask)

    assert torch.equal(vmap(ragged)(*inputs, lengths), one_by_one(ragged, *inputs, lengths))
    assert torch.equal(vmap(masked)(*inputs, masks), one_by_one(masked, *inputs, masks))


def test_vmap_of_a_mask_with_lengths_at_positions():
    inputs, masks = tensors(3), torch.rand(3, 2, 17) < 0.3

    def run(q, k, v, mask):
        return call(q, k, v, key_padding_mask=mask, lengths=torch.tensor([3, 17]), q_start=0)

    assert torch.equal(vmap(run)(*inputs, masks), one_by_one(run, *inputs, masks))


def test_vmap_of_masks_on_the_reference():
    inputs, masks, layout = tensors(3), torch.rand(3, 2, 17) < 0.3, BlockLayout.local(32, 8, 4)
    given = [
        lambda q, k, v, mask: call(q, k, v, key_padding_mask=mask, backend="reference"),
        lambda q, k, v, _: attention(q, k, v, layout, q_start=13, backend="reference"),  # hides the keys in between
    ]
    for run in given:
        torch.testing.assert_close(vmap(run)(*inputs, masks), one_by_one(run, *inputs, masks))


def test_vmap_of_blocks_and_products():
    inputs = tensors(3)
    for pattern in (
        BlockLayout.local(17, window=16, block_size=16),
        Dilated((8, 16), (1, 2)) * (lambda length: BlockLayout.local(length, window=16, block_size=16)),
    ):
        function = lambda *x, pattern=pattern: attention(*x, pattern)  # noqa: E731
        assert torch.equal(vmap(function)(*inputs), one_by_one(function, *inputs))


@pytest.mark.parametrize("combined", [
    lambda: BlockLayout.longformer(17, 4, 2, 4), lambda: BlockLayout.bigbird(17, 4, 2, 1, 0, 4),
    lambda: BlockLayout.local(17, 4, 4) & BlockLayout.global_(17, 6, 4),
])  # fmt: skip
def test_layouts_that_are_combined_inside_a_transform(combined):
    inputs = tensors(2)

    def loss(q, k, v, make):
        return attention(q, k, v, make()).sin().sum()

    made = combined()
    expected = [grad(loss, (0, 1, 2))(*x, lambda: made) for x in zip(*inputs, strict=True)]
    assert all(map(torch.equal, grad(loss, (0, 1, 2))(*(x[0] for x in inputs), combined), expected[0]))
    mapped = vmap(grad(lambda *x: loss(*x, combined), (0, 1, 2)))(*inputs)
    assert all(map(torch.equal, mapped, map(torch.stack, zip(*expected, strict=True))))


@pytest.mark.parametrize(
    "layout",
    [
        lambda length: BlockLayout.random(length, 0.5, 0, 4),
        lambda length: BlockLayout.from_mask(torch.rand(length // 4, length // 4) < 0.5, length, 4),
    ],
    ids=["seed", "draws"],
)
def test_a_layout_function_inside_a_transform_leaves_its_tables_usable(layout):
    x, pattern = torch.randn(1, 16, 2, 8), Dilated([8], [1]) * layout
    found = vmap(grad(lambda x: attention(x, x, x, pattern).sum()))(x[None])[0]
    y = x.clone().requires_grad_()
    attention(x, x, x, pattern)
    torch.testing.assert_close(torch.autograd.grad(attention(y, y, y, pattern).sum(), y)[0], found)


def test_gradients_under_vmap():
    """vmap of grad, grad of vmap, and a Jacobian, which maps over the gradient of out alone."""
    inputs = tensors(3)

    def loss(*x):
        return call(*x).sin().sum()

    each = [grad(loss, (0, 1, 2))(*x) for x in zip(*inputs, strict=True)]
    expected = [torch.stack(x) for x in zip(*each, strict=True)]
    leaves = [x.requires_grad_() for x in inputs]
    outer = torch.autograd.grad(vmap(call)(*leaves).sin().sum(), leaves)
    for actual, other, wanted in zip(vmap(grad(loss, (0, 1, 2)))(*inputs), outer, expected, strict=True):
        assert torch.equal(actual, wanted)
        assert torch.equal(other, wanted)
    x = torch.randn(1, 5, 1, 2, **F64)
    fused, dense = (
        jacrev(lambda q, name=name: dilated_attention(q, x, x, [4], [1], backend=name))(x)
        for name in ("native", "reference")
    )
    assert relative_error(fused, dense) <= TOLERANCE[torch.float64]


@pytest.mark.parametrize("pattern", [Dilated((4, 16), (1, 4)), BlockLayout.local(17, 4, 4)], ids=["dilated", "blocks"])
def test_batched_gradients_of_autograd_are_refused(pattern):
    """They map by an older vmap. What the error names instead computes them."""
    q, k, v = (x.requires_grad_() for x in tensors())
    for _ in range(3):  # the third call repeats a remembered one
        out, lse = attention(q, k, v, pattern, return_lse=True)
        for x in (out, lse):
            with pytest.raises(UnsupportedError, match="is_grads_batched=True, and with it jacobian"):
                torch.autograd.grad(x, q, torch.ones(3, *x.shape, **F64), is_grads_batched=True)
    torch.autograd.grad(attention(q, k, v, pattern).sum(), q)  # nothing is left behind


def test_dropout_under_vmap_differs_from_element_to_element():
    q, k, v = (x[:1].expand_as(x).contiguous().requires_grad_() for x in tensors(3))

    def dropped(*x):
        return call(*x, dropout_p=0.5)

    out = vmap(dropped, randomness="different")(q, k, v)
    assert not torch.equal(out[0], out[1])

    def loss(q):
        torch.manual_seed(5)
        return vmap(dropped, randomness="different")(q, k, v).sin().sum()

    (gradient,) = torch.autograd.grad(loss(q), q)
    step = 1e-5 * torch.randn_like(q)
    difference = (loss(q + step) - loss(q - step)) / 2
    torch.testing.assert_close(difference, (gradient * step).sum(), rtol=1e-6, atol=0)
    with pytest.raises(UnsupportedError, match='only with randomness="different"'):
        vmap(dropped, randomness="same")(q, k, v)
    x = torch.randn(1, 5, 1, 2, **F64)
    with pytest.raises(UnsupportedError, match='only with randomness="different"'):
        jacrev(lambda q: dilated_attention(q, x, x, [4], [1], dropout_p=0.5))(x)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # PyTorch's own, of jvp
def test_forward_mode():
    """The reference backend supports it; the others say that they do not, and drop no tangent silently."""
    q, k, v = (torch.randn(1, 7, 2, 3, **F64) for _ in range(3))
    tangent = torch.randn_like(q)

    def run(q, backend="auto"):
        out, lse = dilated_attention(q, k, v, [4, 7], [1, 2], is_causal=True, return_lse=True, backend=backend)
        return out.sin().sum() + lse.sum()

    def with_duals(q, backend="auto"):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(run(forward_ad.make_dual(q, tangent), backend)).tangent

    leaf = q.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(run(leaf), leaf)
    by_jvp = torch.func.jvp(lambda q: run(q, "reference"), (q,), (tangent,))[1]
    for found in (by_jvp, with_duals(q, "reference")):
        torch.testing.assert_close(found, (gradient * tangent).sum())
    hessian = torch.func.hessian(lambda q: run(q, "reference"))(q)
    slope = torch.autograd.grad(run(leaf, "reference"), leaf, create_graph=True)[0]
    product = torch.autograd.grad((slope * tangent).sum(), leaf)[0]
    torch.testing.assert_close(torch.einsum("abcdefgh,efgh->abcd", hessian, tangent), product)

    for attempt in (
        lambda: torch.func.jvp(run, (q,), (tangent,)),
        lambda: torch.func.hessian(run)(q),
        lambda: torch.func.jacfwd(run)(q),
        lambda: with_duals(q),
        lambda: with_duals(leaf),
        lambda: torch.autograd.grad(torch.autograd.grad(run(leaf), leaf, create_graph=True)[0].sum(), leaf),
    ):
        with pytest.raises(
            NotImplementedError, match='derivatives of attention are not fused; call with backend="reference"'
        ):
            attempt()
    with forward_ad.dual_level():  # numbers without tangents are numbers
        assert torch.equal(run(q), run(leaf))


def test_what_vmap_refuses():
    q, k, v = tensors(3)
    packed = (x[:, :1] for x in (q, k, v))
    with pytest.raises(UnsupportedError, match=r"cu_seqlens under torch\.func\.vmap"):
        vmap(lambda *x: call(*x, cu_seqlens=torch.tensor([0, 17])))(*packed)
    layout = BlockLayout.from_mask(torch.ones(2, 1, 2, 2, dtype=torch.bool), seq_len=17, block_size=16)
    with pytest.raises(UnsupportedError, match=r"layout has lists per batch element"):
        vmap(lambda *x: attention(*x, layout))(q, k, v)


def module(**options) -> MultiheadDilatedAttention:
    return MultiheadDilatedAttention(16, 4, **NESTED, **options)


def gradients_per_sample(model, x, *more):
    """The gradients of a module's parameters for each sample of x, by vmap of grad and one after another."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, *given):
        out = functional_call(model, parameters, given)
        return (out[0] if isinstance(out, tuple) else out).sin().sum()

    run = grad(loss)
    given = [x[:, None], *more]
    each = [run(parameters, *(y[i] for y in given)) for i in range(len(x))]
    return vmap(run, (None, *[0] * len(given)))(parameters, *given), each


def test_gradients_per_sample_with_a_floating_mask():
    x, hidden = torch.randn(3, 17, 16, **F64), torch.arange(17) >= torch.tensor([[17], [5], [1]])
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, **F64)
    layer.self_attn = module(**F64)
    mask = torch.zeros(3, 1, 17, **F64).masked_fill(hidden[:, None], -torch.inf)
    found, each = gradients_per_sample(_Masked(layer), x, mask)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, torch.stack([x[name] for x in each]), rtol=0, atol=1e-12)
    with pytest.raises(UnsupportedError, match="may hold 0 and -inf only"):
        gradients_per_sample(_Masked(layer), x, torch.where(hidden[:, None], 0.5, mask))


class _Masked(nn.Module):
    def __init__(self, layer: nn.TransformerEncoderLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x, mask):
        return self.layer(x, src_key_padding_mask=mask)


@pytest.mark.parametrize("make", [BlockAttentionMixture, NativeSparseAttention])
def test_gradients_per_sample_of_what_selects(make):
    layer = make(16, 4, block_size=16, query_block=4)
    with pytest.raises(UnsupportedError, match=f"{make.__name__} under torch.func.vmap.*part of the batch"):
        gradients_per_sample(layer, torch.randn(3, 40, 16))


@pytest.mark.parametrize(("pattern", "backend"), [
    (Dilated((8, 16), (1, 2)) * (lambda length: BlockLayout.local(length, window=16, block_size=16)), "native"),
    (Dilated((8, 16), (1, 2)), "reference"),
])  # fmt: skip
def test_lengths_that_vmap_maps_where_their_values_are_read(pattern, backend):
    q, k, v = tensors(3)

    def run(q, k, v, lengths):
        return attention(q, k, v, pattern, lengths=lengths, backend=backend)

    lengths = torch.tensor([[3, 17], [0, 5], [17, 1]])
    with pytest.raises(UnsupportedError, match=r"lengths.*torch\.func\.vmap.*fold.*batch"):
        vmap(run)(q, k, v, lengths)
    folded = run(*(x.flatten(0, 1) for x in (q, k, v)), lengths.flatten())  # what the error says to do
    assert torch.equal(folded.unflatten(0, (3, 2)), one_by_one(run, q, k, v, lengths))
    assert vmap(lambda *x: run(*x, torch.tensor([3, 17])))(q, k, v).shape == q.shape


def test_an_ensemble_of_modules():
    models = [module(**F64) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)
    x = torch.randn(2, 17, 16, **F64)
    skeleton = copy.deepcopy(models[0]).to("meta")
    out = vmap(lambda p, b: functional_call(skeleton, (p, b), (x, x, x))[0])(parameters, buffers)
    torch.testing.assert_close(out, torch.stack([model(x, x, x)[0] for model in models]), rtol=0, atol=1e-14)


def test_copies_and_files(tmp_path):
    model = module().eval()
    x = torch.randn(2, 17, 16)
    expected = model(x, x, x, is_causal=True)[0]
    assert torch.equal(copy.deepcopy(model)(x, x, x, is_causal=True)[0], expected)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    again = module()
    again.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert torch.equal(again(x, x, x, is_causal=True)[0], expected)
    torch.save(model, tmp_path / "module.pt")
    whole = torch.load(tmp_path / "module.pt", weights_only=False)
    assert torch.equal(whole(x, x, x, is_causal=True)[0], expected)


def test_weights_go_to_pytorch_and_back():
    ours, theirs = module(kdim=6, vdim=10), nn.MultiheadAttention(16, 4, kdim=6, vdim=10)
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    with pytest.raises(RuntimeError, match="in_proj_weight"):
        module().load_state_dict(theirs.state_dict())


def test_meta_device():
    model = module(device="meta")
    x = torch.randn(2, 17, 16, device="meta")
    padding = torch.zeros(2, 17, dtype=torch.bool, device="meta")
    out, weights = model(x, x, x, key_padding_mask=padding, is_causal=True)
    assert (out.shape, out.device.type, weights) == (x.shape, "meta", None)
    out.sum().backward()
    assert model.in_proj_weight.grad.shape == (48, 16)
    real = module()
    model.load_state_dict(real.state_dict(), assign=True)
    x = torch.randn(2, 17, 16)
    assert torch.equal(model(x, x, x)[0], real(x, x, x)[0])


@pytest.mark.parametrize("options", [{}, {"lengths": torch.tensor([17, 9])}, {"is_causal": True, "dropout_p": 0.5}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_layouts_on_the_meta_device(dtype, options):
    """Results have the shapes that they have on the CPU, with gradients and without."""
    layout = BlockLayout.local(17, 4, 4)
    halves = Dilated((8,), (2,)) * (lambda n: BlockLayout.local(n, 1, 2))
    for pattern in (layout, halves, Dilated((4, 16), (1, 4))):
        for wanted in (False, True):
            real = [x.to(dtype).requires_grad_(wanted) for x in tensors()]
            meta = [x.detach().to("meta").requires_grad_(wanted) for x in real]
            expected, found = (attention(*x, pattern, return_lse=True, **options) for x in (real, meta))
            for a, b in zip(expected, found, strict=True):
                assert (b.device.type, b.shape, b.dtype, b.stride()) == ("meta", a.shape, a.dtype, a.stride())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    model = module()
    x = torch.randn(2, 17, 16)
    expected = model(x, x, x)[0]
    with torch.autocast("cpu", dtype):
        out = model(x, x, x)[0]
    assert out.dtype == dtype
    assert relative_error(out.float(), expected) <= TOLERANCE[dtype] * 5  # two projections besides
    out.float().sum().backward()
    assert model.in_proj_weight.grad.dtype == torch.float32


@pytest.mark.parametrize("backend", ["native", "cpu"])
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.5}], ids=["plain", "dropout"])
@pytest.mark.parametrize("segment", [8, 64], ids=["few keys", "many keys"])
def test_scores_are_as_wide_under_autocast(segment, options, backend):
    """Autocast casts q, k and v, and nothing inside: lse and gradients are those of a call in half precision."""
    if why := BACKENDS[backend].refusal(Facts(torch.device("cpu"), torch.bfloat16, 32, 64)):
        pytest.skip(why)
    q, k, v = (2 * torch.randn(1, 64, 2, 32, dtype=torch.bfloat16) for _ in range(3))

    def run():
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        torch.manual_seed(0)
        out, lse = dilated_attention(*leaves, [segment], [1], return_lse=True, backend=backend, **options)
        return out, lse, *torch.autograd.grad((out.float().sum() + lse.sum()), leaves)

    expected = run()
    with torch.autocast("cpu", torch.bfloat16):
        found = run()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    wide = torch.full((1, 64, 2, 32), 60.0)
    with torch.autocast("cpu", torch.float16):
        assert dilated_attention(wide, wide, wide, [segment], [1], backend=backend).isfinite().all()


def test_jit_trace_is_refused():
    q = torch.randn(1, 16, 2, 8)
    with pytest.raises(UnsupportedError, match=r"torch\.jit\.trace.*torch\.export"):
        torch.jit.trace(lambda q: dilated_attention(q, q, q, [8], [1]), (q,))


@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.thorough)])
@by_name_in_a_graph
def test_compiled_and_exported(processor, more, compiling_python):
    """Each is one graph, at lengths that change; masks are checked when the graph runs.

    It is one process, since the first compilation of each takes seconds. With `more`, options and lists that pass
    through the same code are added.
    """
    compiling_python(
        f"""
        more = {more}
        """
        """
        import warnings
        import torch
        from torch import nn
        from dilated_attention import BlockLayout, Dilated, UnsupportedError, attention
        from dilated_attention import block_sparse_attention, dilated_attention
        from dilated_attention.integrations import convert_attention
        from dilated_attention.models import LongNetConfig, LongNetLM
        from dilated_attention.nn import MultiheadDilatedAttention, TransformerBlock

        torch.manual_seed(0)
        model = MultiheadDilatedAttention(16, 4, segment_lengths=[4, 16], dilation_rates=[1, 4])
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
        for length in (17, 9, 30):
            x = torch.randn(2, length, 16)
            padding = torch.rand(2, length) < 0.3
            for options in ({}, {"is_causal": True}, {"key_padding_mask": padding})[0 if more else 2 :]:
                gradients = []
                for run in (compiled, model):
                    model.zero_grad()
                    out = run(x, x, x, **options)[0]
                    out.sin().sum().backward()
                    gradients.append((out, model.in_proj_weight.grad, model.out_proj.weight.grad))
                for a, b in zip(*gradients):
                    torch.testing.assert_close(a, b)

        # Layouts with lists per head, per KV head and per sample, whose numbers are symbols in the graph.
        for kv_heads, lead in ((4, (1, 4)), (2, (1, 2)), (2, (2, 1)))[0 if more else 2 :]:
            q, k = torch.randn(2, 64, 4, 8), torch.randn(2, 64, kv_heads, 8)
            layout = BlockLayout.from_mask(torch.rand(*lead, 8, 8) < 0.5, 64, 8)
            def sparse(q, k, layout):
                return block_sparse_attention(q, k, k, layout, is_causal=True)
            compiled = torch.compile(sparse, fullgraph=True, backend="eager", dynamic=True)
            assert torch.equal(compiled(q, k, layout), sparse(q, k, layout))
        for x in (q, k):
            torch._dynamo.mark_dynamic(x, 0)
        torch.compile(sparse, fullgraph=True, backend="eager")(q, k, layout)
        try:
            compiled(torch.randn(3, 64, 4, 8), torch.randn(3, 64, 2, 8), layout)
        except ValueError as error:
            assert "batch of 2" in str(error) and "got 3" in str(error)
        else:
            raise AssertionError("computed")

        # Head groups, where the number of heads is a symbol.
        groups = Dilated([8, 16], [2, 4], head_groups=True)
        compiled = torch.compile(lambda x: attention(x, x, x, groups), fullgraph=True, backend="eager", dynamic=True)
        for heads in (5, 4):
            x = torch.randn(1, 16, heads, 8)
            assert torch.equal(compiled(x), attention(x, x, x, groups))

        # A scale of any sign; and a shape that eager calls warn of.
        for scale, heads in ((-0.4, 2), (0.0, 300)):
            def call(q, k, v):
                return dilated_attention(q, k, v, [20], [1], is_causal=True, scale=scale)
            inputs = [torch.randn(1, 20, heads, 4, requires_grad=True) for _ in range(3)]
            found = torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected = call(*inputs)
            for a, b in zip(*((x, *torch.autograd.grad(x.sin().sum(), inputs)) for x in (found, expected))):
                assert torch.equal(a, b)

        # Derivatives inside, in several graphs.
        def loss(q, k, v):
            return dilated_attention(q, k, v, [16, 60], [1, 3]).square().sum()
        inputs = [torch.randn(1, 60, 4, 8) for _ in range(3)]
        expected = torch.func.grad(loss)(*inputs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a graph ends
            assert torch.equal(torch.compile(torch.func.grad(loss), backend="aot_eager")(*inputs), expected)

        # The switch for precision as it stands when the graph runs.
        def plain(q):
            return dilated_attention(q, q, q, [128], [1])
        graph, q = torch.compile(plain, fullgraph=True, backend="aot_eager"), torch.randn(1, 256, 4, 32)
        for precision in ("highest", "high", "highest"):
            torch.set_float32_matmul_precision(precision)
            assert torch.equal(graph(q), plain(q))

        # The mask as nn.TransformerEncoder hands it on, and the causal mask, in the graph of a whole encoder.
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        convert_attention(encoder, [4, 16], [1, 4])
        whole = torch.compile(encoder, fullgraph=True, backend="aot_eager")
        for length in (12, 15):
            x = torch.randn(2, length, 16)
            padding = torch.zeros(2, length).masked_fill(torch.rand(2, length) < 0.3, -torch.inf)
            causal = nn.Transformer.generate_square_subsequent_mask(length)
            options = {"src_key_padding_mask": padding, "mask": causal, "is_causal": True}
            torch.testing.assert_close(whole(x, **options), encoder(x, **options))
        try:
            whole(x, mask=causal.T.contiguous(), is_causal=True, src_key_padding_mask=padding)
        except RuntimeError as error:
            assert "only the causal one" in str(error), error
        else:
            raise AssertionError("a mask that is not causal passed")

        # One graph for any length, also where the MLP would otherwise run in pieces.
        graphs = []
        def count(graph, inputs):
            graphs.append(graph)
            return graph.forward
        block = TransformerBlock(8, 2, 2, 16, Dilated((16,), (1,))).eval()
        pieces = torch.compile(block, fullgraph=True, backend=count, dynamic=True)
        for tokens in (2000, 2100, 5000):
            given = torch.randn(1, tokens, 8)
            with torch.no_grad():
                torch.testing.assert_close(pieces(given), block(given))
        assert len(graphs) == 1

        # A whole model, with positions of its own or given.
        options = {"vocab_size": 17, "embed_dim": 16, "num_layers": 2, "num_heads": 2, "positions": "xpos"}
        config = LongNetConfig(pattern=Dilated((8, 16), (1, 2)), **options)
        lm = LongNetLM(config).eval()
        for given in (False, True) if more else (True,):
            whole, graphs = torch.compile(lm, fullgraph=True, backend=count, dynamic=True), []
            for batch, tokens in ((2, 20), (2, 30), (3, 40)):
                ids = torch.randint(17, (batch, tokens))
                options = {"positions": torch.arange(5, 5 + tokens)} if given else {}
                torch.testing.assert_close(whole(ids, **options), lm(ids, **options))
            assert len(graphs) == 1
        sizes = {0: torch.export.Dim("batch", min=2, max=64), 1: torch.export.Dim("length", min=2, max=4096)}
        exported = torch.export.export(lm, (ids,), dynamic_shapes=(sizes,)).module()
        ids = torch.randint(17, (5, 33))
        torch.testing.assert_close(exported(ids), lm(ids))

        length = torch.export.Dim("length", min=2, max=4096)
        exported = torch.export.export(
            model, (x, x, x), {"is_causal": True}, dynamic_shapes={
                "query": {1: length}, "key": {1: length}, "value": {1: length}, "is_causal": None,
            }, strict=False,
        ).module()
        longer = torch.randn(2, 40, 16)
        torch.testing.assert_close(
            exported(longer, longer, longer, is_causal=True)[0], model(longer, longer, longer, is_causal=True)[0]
        )
        """,
        processor,
    )


def test_exported_by_definition_with_a_layout(compiling_python):
    """ONNX needs this. What the trace derives of the layout stays in the trace."""
    compiling_python(
        """
        import torch
        from dilated_attention import BlockLayout, Dilated, Window, attention

        class Calls(torch.nn.Module):
            def __init__(self, pattern, q_start=None):
                super().__init__()
                self.pattern, self.q_start = pattern, q_start

            def forward(self, q, k, v):
                return attention(q, k, v, self.pattern, q_start=self.q_start, backend="reference")

        given = tuple(torch.randn(1, 44, 2, 8) for _ in range(3))
        random = BlockLayout.random(44, 0.5, 0, 4)
        for pattern in (random, Dilated((16,), (2,)) * (lambda n: BlockLayout.local(n, 2, 2)), random + Window(3)):
            program = torch.export.export(Calls(pattern), given).module()
            expected = attention(*given, pattern, backend="native")
            torch.testing.assert_close(program(*given), expected)
            torch.testing.assert_close(Calls(pattern)(*given), expected)
        newest = given[0][:, 41:], *given[1:]
        program = torch.export.export(Calls(random, q_start=41), newest).module()
        torch.testing.assert_close(program(*newest), attention(*given, random)[:, 41:])
        """
    )


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_exported_with_a_layout_function(strict, compiling_python):
    """A program of one length holds the lists. No program holds those of any length, or of any samples."""
    compiling_python(
        f"""
        import torch
        from dilated_attention import BlockLayout, Dilated, attention
        from dilated_attention.nn import BlockSparseDilatedAttention

        def local(tokens):
            return BlockLayout.local(tokens, 32, 16)

        class Product(torch.nn.Module):
            def __init__(self, layout):
                super().__init__()
                self.pattern = Dilated((64,), (2,)) * layout

            def forward(self, q, k, v, **ragged):
                return attention(q, k, v, self.pattern, is_causal=True, **ragged)

        def refused(words, *arguments, **options):
            try:
                torch.export.export(*arguments, **options, strict={strict})
            except Exception as error:
                assert words in str(error), error
            else:
                raise AssertionError("exported")

        given = tuple(torch.randn(1, 128, 2, 16) for _ in range(3))
        shapes = [{{1: torch.export.Dim("length", min=2, max=4096)}}] * 3
        for module in (BlockSparseDilatedAttention(local), Product(local)):
            program = torch.export.export(module, given, strict={strict}).module()
            torch.testing.assert_close(program(*given), module(*given))
            refused("of a layout function for any length", module, given, dynamic_shapes=shapes)
        for module in (BlockSparseDilatedAttention(local), Product(local), Product(local(32))):
            for ragged in ({{"lengths": torch.tensor([64])}}, {{"cu_seqlens": torch.tensor([0, 64, 128])}}):
                refused("with lengths or cu_seqlens", module, given, ragged)
        """
    )
