"""The fused operators of CUDA, which no test runs: their calls bind and give the right shapes, on meta tensors; and the
plain products, which serve where no operator does."""

from __future__ import annotations

import pytest
import torch

from conformance import problem
from dilated_attention import dilated_attention, torch_internals
from dilated_attention.backends import fused, native
from dilated_attention.backends.dropout import key_words, query_words
from dilated_attention.patterns import Dilated
from dilated_attention.plan import plan_dilated
from dilated_attention.scores import Scores
from tolerances import TOLERANCE, relative_error


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("with_lse", [False, True], ids=["out", "out and lse"])
@pytest.mark.parametrize("kind", ["cuda_flash", "cuda_efficient"])
def test_schemas_bind(kind, with_lse, is_causal, monkeypatch):
    kinds = []
    monkeypatch.setattr(fused, "_kind", lambda *x: kinds.append(kind) or kind)
    q, k, v = (torch.empty(2, 100, heads, 24, dtype=torch.bfloat16, device="meta") for heads in (4, 2, 2))
    plan = plan_dilated((32, 100), (1, 2), ((0, 0), (0, 1)), 100)
    out, lse = native.forward(problem(plan, is_causal=is_causal, scale=0.1), q, k, v)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (2, 100, 4), torch.float32)
    dlse = lse if with_lse else None
    gradients = native.backward(problem(plan, is_causal=is_causal, scale=0.1), out, dlse, q, k, v, out, lse)
    assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in (q, k, v)]
    assert len(kinds) > 4


@pytest.fixture
def shapes(monkeypatch):
    """(problems, heads, rows, head_dim) of the operators' calls, with the columns that backward appends."""
    found = []
    for name, place in (("_fused_forward", 2), ("_fused_backward", 3)):
        operator = getattr(fused, name)

        def noted(*arguments, operator=operator, place=place):
            found.append(tuple(arguments[place].shape))
            return operator(*arguments)

        monkeypatch.setattr(fused, name, noted)
    return found


@pytest.mark.parametrize("with_lse", [False, True], ids=["out", "out and lse"])
@pytest.mark.parametrize(
    ("segment_lengths", "dilation_rates", "size"),
    [
        ((2048, 4096), (1, 2), (1, 1 << 22, 16, 64)),
        ((1000,), (1,), (1, 1_000_000, 11, 200)),
        ((1 << 22,), (1,), (1, 1 << 22, 16, 64)),  # one problem
        ((64,), (1,), (70_000, 64, 2, 16)),
        ((64, 1024), (1, 16), (1, 64 * 70_000, 2, 16)),
        ((64,), (1,), (3, 64 * 70_000, 2, 16)),  # a sample alone is too much
        ((256,), (4,), (1, 256 * 70_000, 4, 16)),
    ],
)
def test_calls_of_cuda_stay_within_its_limits(segment_lengths, dilation_rates, size, with_lse, shapes, monkeypatch):
    monkeypatch.setattr(fused, "_kind", lambda *x: "cuda_flash")
    plan = plan_dilated(*Dilated(segment_lengths, dilation_rates).branches(size[2])[:3], size[1])
    q, lse = torch.empty(size, dtype=torch.bfloat16, device="meta"), torch.empty(size[:3], device="meta")
    native.forward(problem(plan, is_causal=False, scale=0.1), q, q, q)
    native.backward(problem(plan, is_causal=False, scale=0.1), q, lse if with_lse else None, q, q, q, q, lse)
    for problems, heads, rows, head_dim in shapes:
        assert problems <= 65_535
        columns = -(-head_dim // 32) * 32 if head_dim <= 128 else -(-head_dim // 64) * 64
        assert problems * heads * -(-rows // 128) * 128 * columns <= 2**31


def test_calls_that_just_fit_the_limits_stay_one(shapes, monkeypatch):
    monkeypatch.setattr(fused, "_kind", lambda *x: "cuda_flash")
    for batch, seq_len, heads, head_dim in ((1024, 2048, 16, 64), (65_535, 1, 1, 64)):
        plan = plan_dilated((seq_len,), (1,), ((0,) * heads,), seq_len)
        q = torch.empty(batch, seq_len, heads, head_dim, dtype=torch.bfloat16, device="meta")
        lse = torch.empty(batch, seq_len, heads, device="meta")
        native.forward(problem(plan, is_causal=False, scale=0.1), q, q, q)
        native.backward(problem(plan, is_causal=False, scale=0.1), q, None, q, q, q, q, lse)
    assert shapes == [(1024, 16, 2048, 64)] * 2 + [(65_535, 1, 1, 64)] * 2


@pytest.mark.parametrize("seq_len", [96, 100])
@pytest.mark.parametrize("heads", [(6, 6), (6, 3)], ids=["", "grouped"])
def test_calls_cut_by_the_limits_give_the_same(heads, seq_len, shapes, monkeypatch):
    q, k, v = (
        torch.randn(3, seq_len, n, 16, dtype=torch.float64, requires_grad=True) for n in (heads[0], *heads[1:] * 2)
    )
    found = []
    for problems, elements in ((65_535, 2**31), (5, 7 * 128 * 32), (2, 128 * 32)):
        shapes.clear()
        monkeypatch.setattr(native, "_MOST_PROBLEMS", problems)
        monkeypatch.setattr(native, "_MOST_ACCUMULATED", elements)
        out, lse = dilated_attention(q, k, v, (16, 48), (1, 3), return_lse=True, backend="native")
        found.append((out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))))
        assert max(shape[0] for shape in shapes) <= problems
        assert max(shape[0] * shape[1] for shape in shapes) <= elements // (128 * 32)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["cuda_flash", "cuda_efficient"])
def test_operators_of_cuda_are_handed_whole_16_bytes(kind, dtype, monkeypatch):
    """Rows that begin one element off, or have gaps of one: a misaligned address would end the CUDA context."""
    handed = []
    monkeypatch.setattr(fused, "_kind", lambda *x: kind)
    for name in ("flash", "flash_backward", "efficient", "efficient_backward"):
        operator = getattr(torch_internals, name)

        def noted(*arguments, operator=operator, **options):
            handed.append([x for x in arguments if isinstance(x, torch.Tensor) and x.dim() == 4])
            return operator(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments), **options)

        monkeypatch.setattr(torch_internals, name, noted)
    q, k, v = (torch.randn(2, 4, 40, 25).to(dtype)[..., 1:] for _ in range(3))
    dout = torch.randn(2, 4, 40, 25).to(dtype)[..., :24]
    settings = fused.Settings(Scores(0.1))
    fused.forward(settings, q, k, v)
    dense = torch.randn(2, 4, 40, 24).to(dtype)
    fused.backward(settings, fused.Merged(dout, None, dense, torch.zeros(2, 4, 40)), q, dense, v)
    assert [len(tensors) for tensors in handed] == [3, 5]
    for x in (x for tensors in handed for x in tensors):
        assert x.stride(-1) == 1
        assert x.data_ptr() % 16 == 0
        assert not any(stride * dtype.itemsize % 16 for stride in x.stride()[:-1])
    assert any(x is dense for x in handed[1]), "what needs no copy is not copied"


@pytest.mark.parametrize("rows", [40, 64])
@pytest.mark.parametrize("kind", ["cuda_flash", "cuda_efficient"])
def test_operators_of_cuda_are_handed_a_contiguous_lse(kind, rows, monkeypatch):
    """The memory-efficient one refuses a view of lse whose length 32 divides ("LSE is not correctly aligned")."""
    handed = []

    def noted(dout, q, k, v, *others, **options):
        handed.extend(x for x in others if isinstance(x, torch.Tensor) and x.dim() == 3)
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    monkeypatch.setattr(fused, "_kind", lambda *x: kind)
    for name in ("flash_backward", "efficient_backward"):
        monkeypatch.setattr(torch_internals, name, noted)
    q, k, v, out, dout = (torch.randn(2, 4, rows, 24) for _ in range(5))
    lse = torch.randn(2, rows, 4).transpose(1, 2)
    fused.backward(fused.Settings(Scores(0.1)), fused.Merged(dout, None, out, lse), q, k, v)
    (found,) = handed
    assert found.is_contiguous()
    assert torch.equal(found[..., :rows], lse)


@pytest.mark.parametrize("dlse", [None, torch.randn(2, 4, 20)], ids=["dout", "dout and dlse"])
def test_the_memory_efficient_operator_is_handed_the_out_that_it_reads(dlse, monkeypatch):
    """Its kernel for half precision takes the rows of out to be heads x head_dim apart.

    With other strides, dq and dk were wrong on an H200 by 12 % and more.
    """
    handed = []

    def noted(dout, q, k, v, bias, out, *others, **options):
        handed.append(out)
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None

    monkeypatch.setattr(fused, "_kind", lambda *x: "cuda_efficient")
    monkeypatch.setattr(torch_internals, "efficient_backward", noted)
    q, k, v, dout = (torch.randn(2, 4, 20, 24).half() for _ in range(4))
    out = torch.randn(2, 4, 60, 24).half()[:, :, ::3]
    fused.backward(fused.Settings(Scores(0.1)), fused.Merged(dout, dlse, out, torch.randn(2, 4, 20)), q, k, v)
    (found,) = handed
    assert found.stride(2) == 4 * found.shape[3]
    assert torch.equal(found[..., :24], out)


class CUDA:
    """A tensor's facts that the choice reads."""

    device = torch.device("cuda")

    def __init__(self, dtype, head_dim):
        self.dtype, self.shape = dtype, (1, 1, 64, head_dim)


@pytest.fixture
def on(monkeypatch):
    """`on(major, minor)`: every CUDA device has this compute capability."""

    def set_capability(*capability):
        fused._capability_of.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    yield set_capability
    fused._capability_of.cache_clear()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("capabilities", "kinds"),
    [
        ([(7, 0), (7, 5)], {
            (torch.float16, 64): "cuda_efficient", (torch.bfloat16, 64): "plain", (torch.float32, 64): "cuda_efficient",
            (torch.float64, 64): "plain", (torch.float16, 20): "plain", (torch.bfloat16, 264): "plain",
        }),
        ([(8, 0), (8, 6), (9, 0), (10, 3), (12, 0)], {
            (torch.bfloat16, 64): "cuda_flash", (torch.float16, 264): "cuda_efficient",
            (torch.float32, 64): "cuda_efficient", (torch.float64, 64): "plain", (torch.bfloat16, 20): "plain",
            (torch.bfloat16, 192): "cuda_flash", (torch.float16, 232): "cuda_flash",
        }),
        ([(8, 0), (9, 0), (10, 0)], {(torch.bfloat16, 200): "cuda_flash", (torch.float16, 224): "cuda_flash"}),
        ([(8, 6), (8, 7), (8, 9), (12, 0), (12, 1)], {
            (torch.bfloat16, 192 + 8): "cuda_efficient", (torch.float16, 224): "cuda_efficient",
        }),
    ],
)  # fmt: skip
def test_kinds(capabilities, kinds, on):
    for capability in capabilities:
        on(*capability)
        for (dtype, head_dim), kind in kinds.items():
            x = CUDA(dtype, head_dim)
            assert fused._kind(x, x, None) == kind
            assert fused._kind(x, x, torch.zeros(1)) == "plain"


@pytest.mark.usefixtures("unchecked")
def test_kinds_of_rocm(on, monkeypatch):
    on(12, 0)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    x = CUDA(torch.bfloat16, 200)
    assert fused._kind(x, x, None) == "cuda_flash"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("keys", [1, 7, 15])
@pytest.mark.parametrize("size", [1, 10])
@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
def test_plain_products_form_scores_in_single_precision(is_causal, size, keys, dtype):
    """Nothing is rounded to half precision but q, k, v and what is returned: lse is as near to the lse of float64 on
    the same numbers as a float32 call's, and gradients are at most their own rounding away."""
    generator = torch.Generator().manual_seed(0)
    inputs = [(size * torch.randn(2, keys, 2, 64, generator=generator)).to(dtype).requires_grad_() for _ in range(3)]
    pair = []
    for call in (inputs, [x.detach().double().requires_grad_() for x in inputs]):
        out, lse = dilated_attention(*call, (keys,), (1,), is_causal=is_causal, return_lse=True)
        pair.append((lse, out, *torch.autograd.grad(out.double().sum() + lse.double().sum(), call)))
    (lse, *others), (exact_lse, *exact) = pair
    assert relative_error(lse, exact_lse) <= TOLERANCE[torch.float32]
    for actual, wanted in zip(others, exact, strict=True):
        # out and delta are rounded once: an error of eps times the size of what dS is a difference of
        terms = max(1, *(x.detach().abs().max().item() for x in call)) ** 2
        assert (actual.double() - wanted).abs().max() <= torch.finfo(dtype).eps * max(terms, wanted.abs().max())


@pytest.mark.parametrize("with_pairs", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("masks", [1, 3], ids=["as of a band", "of padding"])
def test_chunks_of_plain_products(masks, is_causal, with_pairs, monkeypatch):
    q, k, v = (torch.randn(3, 4, 12, 8, dtype=torch.float64) for _ in range(3))
    bias = torch.zeros(masks, 1, 1, 12, dtype=torch.float64)
    bias[0, ..., :5] = -torch.inf
    words = query_words(torch.tensor(3), 3, 4, torch.arange(12)).transpose(1, 2)
    of_keys = key_words(torch.tensor(3), torch.arange(12)[:, None]).transpose(1, 2).expand(3, 4, 12)
    pairs = fused.Pairs(words, of_keys) if with_pairs else None
    settings, found = fused.Settings(Scores(0.3, dropout_p=0.3 if with_pairs else 0.0), is_causal, bias, pairs), []
    for chunk in (1 << 18, 100, 1):
        monkeypatch.setattr(fused, "_CHUNK", chunk)
        out, lse = fused.forward(settings, q, k, v)
        finite = lse.masked_fill(lse == -torch.inf, 0.0)
        found.append((out, lse, *fused.backward(settings, fused.Merged(v, finite, out, finite), q, k, v)))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-13, atol=1e-13)
