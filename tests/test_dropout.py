"""Attention dropout: the choice of pairs is the documented hash, looks random, and is the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from conformance import problem
from dilated_attention import BlockLayout, Dilated, attention, block_sparse_attention, dilated_attention
from dilated_attention.backends import fused, native
from dilated_attention.backends.attributes import attributes_of
from dilated_attention.backends.dropout import key_words, query_words, survives, threshold
from dilated_attention.nn import DilatedAttention, MultiheadDilatedAttention
from dilated_attention.plan import Plan, Rows, StridedGroup, plan_dilated
from tolerances import TOLERANCE, relative_error

W, R = (32, 70), (1, 2)


def definition(seed, samples, heads, queries, keys, p):
    """K of numpy positions that broadcast, as backends/dropout.py defines it."""

    u = np.uint64  # before numpy 2 a Python integer beside a number of 64 bits makes it signed
    low = u(0xFFFFFFFF)

    def mix(x, b):
        x = x ^ x >> u(16)
        x = x * u(0x21F0AAAD) & low
        x = x ^ x >> u(15) ^ b
        x = x * u(0xD35A2D97) & low
        return x ^ x >> u(15)

    def hashed(x, *positions):
        for position in positions:
            x = mix(u(x) ^ np.asarray(position).astype(u) & low, u(0))
        return x

    seed = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    a, b = (hashed(c, *seed, samples, heads, queries) for c in (0x1B873593, 0x3C6EF372))
    word = mix(a ^ hashed(0x6A09E667, *seed, keys), b).astype(np.int64)
    return np.where(word < 2**31, word, word - 2**32) >= p * 2**32 - 2**31


def survivors(seed, batch, heads, queries, keys, p, head_offset=0):
    """K (batch, heads, queries, keys) of the tokens `queries` and `keys`."""
    words = query_words(torch.tensor(seed), batch, heads, queries, head_offset)
    of_keys = key_words(torch.tensor(seed), keys[:, None])
    return survives(words.transpose(1, 2), of_keys.transpose(1, 2), threshold(p))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40 - 12345, -(2**63)])
@pytest.mark.parametrize("first", [0, 2**31 - 3, 2**32 - 9], ids=["", "past 31 bits", "up to 32 bits"])
def test_the_choice_is_the_documented_hash(seed, first):
    queries, keys = first + torch.arange(6), first + 2 + torch.arange(7)
    actual = survivors(seed, 2, 3, queries, keys, 0.3, head_offset=5)
    sample, head, query, key = np.ix_(range(2), range(5, 8), queries.numpy(), keys.numpy())
    assert (actual.numpy() == definition(seed, sample, head, query, key, 0.3)).all()


@pytest.mark.parametrize("p", [1e-12, 1 - 1e-12])
def test_probabilities_near_0_and_1(p):
    assert survivors(3, 1, 1, torch.arange(64), torch.arange(64), p).all() == (p < 0.5)


SEEDS = [0, 1, 2**32, -1, 8_444_249_301_319_680_000]


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("seed", SEEDS)
def test_survivors_are_uniform(seed, p):
    number = 1024
    keep = survivors(seed, 1, 2, torch.arange(number), torch.arange(number), p).double()[0]
    variance = p * (1 - p)
    assert abs(keep.mean() - (1 - p)) < 4.5 * (variance / keep.numel()) ** 0.5
    for axis in (1, 2):  # counts in rows and in columns are binomial
        ratio = (keep.sum(axis) - number * (1 - p)).square().mean() / (number * variance)
        assert 0.87 < ratio < 1.13


@pytest.mark.parametrize("seed", SEEDS)
def test_neighbours_are_independent(seed):
    number, p = 1024, 0.3
    tokens = torch.arange(number)
    keep = survivors(seed, 2, 2, tokens, tokens, p).double() - (1 - p)
    bar = 4.5 * p * (1 - p)
    one = keep[0, 0]
    others = [keep[0, 1], keep[1, 0], survivors(seed + 1, 1, 1, tokens, tokens, p)[0, 0].double() - (1 - p)]
    others += [one.roll(shift, axis) for shift in (1, 2, 4, 64, 512) for axis in (0, 1)]
    others += [one.roll((1, 1), (0, 1)), one.roll((1, -1), (0, 1)), one.T]
    for other in others:
        assert abs((one * other).mean()) < bar / number
    # A choice that were a function of a query's word plus a key's would show in the corners of rectangles.
    for rows, columns in ((1, 1), (1, 2), (512, 1), (3, 256)):
        corners = one * one.roll(rows, 0) * one.roll(columns, 1) * one.roll((rows, columns), (0, 1))
        assert abs(corners.mean()) < bar**2 / 4.5 / number


# ---- attention

N = 70
CALLS = {
    "dilated": lambda q, k, v, **o: dilated_attention(q, k, v, W, R, **o),
    "causal": lambda q, k, v, **o: dilated_attention(q, k, v, W, R, is_causal=True, **o),
    "lengths": lambda q, k, v, **o: dilated_attention(q, k, v, W, R, lengths=[N, 33], **o),
    "packed": lambda q, k, v, **o: dilated_attention(
        *(x.flatten(0, 1)[None] for x in (q, k, v)), W, R, cu_seqlens=torch.tensor([0, 50, 51, 2 * N]), **o
    ),
    "hidden keys": lambda q, k, v, **o: dilated_attention(
        q, k, v, W, R, is_causal=True, key_padding_mask=torch.arange(2 * N).view(2, N) % 3 < 1, **o
    ),
    "phantoms": lambda q, k, v, **o: dilated_attention(q, k, v, W, R, compat="torchscale", **o),
    "offset heads": lambda q, k, v, **o: dilated_attention(q, k, v, W, R, head_offset=2, **o),
    "blocks": lambda q, k, v, **o: block_sparse_attention(q, k, v, BlockLayout.bigbird(N, 20, 16, 1, 0, 16), **o),
    "causal blocks": lambda q, k, v, **o: block_sparse_attention(
        q, k, v, BlockLayout.random(N, 0.5, 0, (16, 32)), is_causal=True, **o
    ),
    "blocks inside dilation": lambda q, k, v, **o: attention(
        q, k, v, Dilated(W, R) * (lambda n: BlockLayout.local(n, 16, 16)), **o
    ),
}


def tensors(dtype=torch.float64, seq_len=N, kv_heads=2):
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(2, seq_len, heads, 8, generator=generator).to(dtype) for heads in (4, kv_heads, kv_heads))


def results(call, inputs, **options):
    """out, lse, dq, dk, dv after `torch.manual_seed(7)`."""
    torch.manual_seed(7)
    q, k, v = (x.clone().requires_grad_() for x in inputs)
    out, lse = call(q, k, v, dropout_p=0.3, return_lse=True, **options)
    cotangents = torch.cos(torch.arange(out.numel()).view_as(out)), torch.sin(torch.arange(lse.numel()).view_as(lse))
    pairs = zip(cotangents, (out, lse), strict=True)
    gradients = torch.autograd.grad((out, lse), (q, k, v), [x.to(y.dtype) for x, y in pairs])
    return out, lse, *gradients


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_native_is_the_oracle_with_the_same_choice(name, dtype, monkeypatch):
    monkeypatch.setattr(fused, "_CHUNK", 1 << 11)  # several chunks
    inputs = tensors(dtype)
    expected = results(CALLS[name], [x.double() for x in inputs], backend="reference")
    for actual, wanted in zip(results(CALLS[name], inputs, backend="native"), expected, strict=True):
        assert relative_error(actual, wanted) <= TOLERANCE[dtype]


def test_the_oracle_drops_after_the_softmax():
    q, k, v = (x.requires_grad_() for x in tensors())
    torch.manual_seed(7)
    seed = torch.randint(-(1 << 63), (1 << 63) - 1, ()).item()
    keep = definition(seed, *np.ix_(range(2), range(4), range(N), range(N)), 0.3)
    query, key, value = (x.repeat_interleave(4 // x.shape[2], 2).transpose(1, 2) for x in (q, k, v))
    score = query @ key.mT / 8**0.5
    p = torch.where(torch.from_numpy(keep), score.softmax(-1) / 0.7, 0.0)
    expected = (p @ value).transpose(1, 2), score.logsumexp(-1)
    cotangents = [torch.randn_like(x) for x in expected]
    torch.manual_seed(7)
    actual = dilated_attention(q, k, v, (N,), (1,), dropout_p=0.3, return_lse=True, backend="reference")
    for x, y in zip(
        (*actual, *torch.autograd.grad(actual, (q, k, v), cotangents)),
        (*expected, *torch.autograd.grad(expected, (q, k, v), cotangents)),
        strict=True,
    ):
        torch.testing.assert_close(x, y)


def test_the_expectation_is_attention_without_dropout():
    q, k, v = tensors()
    exact = dilated_attention(q, k, v, W, R)
    drawn = torch.stack([dilated_attention(q, k, v, W, R, dropout_p=0.5) for _ in range(200)])
    error = (drawn.mean(0) - exact) / (drawn.std(0) / 200**0.5 + 1e-12)
    assert error.abs().max() < 5.5
    assert 0.9 < error.square().mean() < 1.1


def test_torch_s_generator_reproduces_it():
    inputs = tensors()
    call = CALLS["dilated"]
    assert all(map(torch.equal, results(call, inputs), results(call, inputs)))
    first = call(*inputs, dropout_p=0.3)
    assert not torch.equal(first, call(*inputs, dropout_p=0.3))
    # The choice depends on positions alone: other segments, the same survivors.
    ones = [torch.ones(1, N, 4, N) for _ in range(2)], torch.eye(N)[None, :, None].expand(1, N, 4, N)
    kept = []
    for w in (N, 32):
        torch.manual_seed(7)
        kept.append(dilated_attention(*ones[0], ones[1], (w,), (1,), dropout_p=0.3)[:, :32, :, :32] > 0)
    assert torch.equal(*kept)


def test_zero_draws_nothing():
    inputs = tensors()
    state = torch.get_rng_state()
    out = dilated_attention(*inputs, W, R, dropout_p=0.0)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(out, dilated_attention(*inputs, W, R))


def test_checkpointing_repeats_the_choice():
    inputs = tensors()

    def call(q, k, v, **options):
        return checkpoint(lambda *x: CALLS["causal"](*x, **options), q, k, v, use_reentrant=False)

    assert all(map(torch.equal, results(call, inputs), results(CALLS["causal"], inputs)))


def test_torch_func():
    q, k, v = tensors()

    def loss(q, k, v):
        return dilated_attention(q, k, v, W, R, dropout_p=0.3).square().sum()

    torch.manual_seed(7)
    gradients = torch.func.grad(loss, (0, 1, 2))(q, k, v)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.manual_seed(7)
    assert all(map(torch.equal, gradients, torch.autograd.grad(loss(*leaves), leaves)))


def test_compiled(compiling_python):
    compiling_python(
        """
        import torch
        from dilated_attention import dilated_attention

        def loss(q, k, v):
            return dilated_attention(q, k, v, (8, 20), (1, 2), dropout_p=0.5).square().sum()

        inputs = [torch.randn(1, 20, 2, 8, requires_grad=True) for _ in range(3)]
        compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
        found = []
        for run in (loss, compiled, compiled):
            torch.manual_seed(7)
            value = run(*inputs)
            found.append((value, *torch.autograd.grad(value, inputs)))
        for other in found[1:]:
            assert all(map(torch.equal, found[0], other))
        assert not torch.equal(compiled(*inputs), found[0][0])
        """
    )


def test_a_shard_has_the_choice_of_the_whole():
    """The last 30 tokens as one rank holds them: their own keys, then keys received, in an order of their own."""
    q, k, v = tensors(kv_heads=4)
    whole = plan_dilated((N,), (1,), ((0,) * 4,), N)
    seed, tokens = torch.tensor(12345), torch.arange(N)
    attributes = attributes_of(2, 4, tokens, tokens[:, None], seed=seed)
    asked = problem(whole, True, 0.3, dropout_p=0.3, attributes=attributes)
    out, lse = native.forward(asked, q, k, v)
    dout = torch.randn_like(out)
    expected = native.backward(asked, dout, None, q, k, v, out, lse)

    mine, others = slice(40, N), torch.stack([torch.arange(40).roll(head) for head in range(4)], 1)
    own, received = Rows(0, 30, 1, 1, 30), Rows(0, 40, 1, 1, 40)
    local = Plan(30, 4, (StridedGroup(own, own, 0, 4, 1, first=True),), covered=True, square=True)
    remote = Plan(30, 4, (StridedGroup(own, received, 0, 4, 1),), covered=False, square=False)
    rows = [x.gather(1, others[None, :, :, None].expand(2, -1, -1, 8)) for x in (k, v)]
    state, gradient = None, torch.zeros(2, 30, 4, 8, dtype=torch.float64)
    positions = (tokens[mine, None], others)
    parts = list(zip(((k[:, mine], v[:, mine]), rows), (local, remote), positions, strict=True))
    for (keys, values), plan, at in parts:
        attributes = attributes_of(2, 4, tokens[mine], at, seed=seed)
        asked = problem(plan, True, 0.3, dropout_p=0.3, attributes=attributes)
        state = native.forward(asked, q[:, mine], keys, values, state=state)
    assert relative_error(state[0], out[:, mine]) < 1e-12
    for (keys, values), plan, at in parts:
        attributes = attributes_of(2, 4, tokens[mine], at, seed=seed)
        asked = problem(plan, True, 0.3, dropout_p=0.3, attributes=attributes)
        gradient += native.backward(asked, dout[:, mine], None, q[:, mine], keys, values, *state)[0]
    assert relative_error(gradient, expected[0][:, mine]) < 1e-12


def test_modules_drop_in_training_only():
    q, k, v = tensors()
    module = DilatedAttention(W, R, dropout=0.3)
    torch.manual_seed(7)
    dropped = module(q, k, v)
    torch.manual_seed(7)
    assert torch.equal(dropped, dilated_attention(q, k, v, W, R, dropout_p=0.3))
    assert torch.equal(module.eval()(q, k, v), dilated_attention(q, k, v, W, R))

    x = torch.randn(2, N, 16)
    drawn = MultiheadDilatedAttention(16, 2, dropout=0.3, segment_lengths=W, dilation_rates=R)
    plain = MultiheadDilatedAttention(16, 2, segment_lengths=W, dilation_rates=R)
    plain.load_state_dict(drawn.state_dict())
    assert not torch.equal(drawn(x, x, x)[0], plain(x, x, x)[0])
    assert torch.equal(drawn.eval()(x, x, x)[0], plain(x, x, x)[0])
