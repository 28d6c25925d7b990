"""The compiled estimates of block choice against the tensors that stand in for them, in double precision."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch

from dilated_attention import routing
from dilated_attention.kernels.cpu import estimates as compiled
from dilated_attention.routing import estimates, hashing
from dilated_attention.routing.forecast import Forecast, sampled_shares
from dilated_attention.routing.grid import candidates

pytestmark = pytest.mark.skipif(compiled._compiled() is None, reason="the CPU kernels are not compiled")
SETS = range(1, (compiled._compiled() or (None, 1))[1] + 1)
SHAPES = [  # seq_len, block_size, heads, kv_heads, head_dim
    (1, 16, 1, 1, 8),
    (40, 16, 2, 1, 5),
    (333, (16, 48), 4, 2, 24),
    (333, (48, 16), 3, 1, 64),
    (1000, 64, 2, 2, 80),
]
TYPES = {torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5}


@pytest.fixture(params=SETS)
def instruction_set(request, monkeypatch):
    run, _ = compiled._compiled()
    monkeypatch.setattr(compiled, "_compiled", lambda: (run, request.param))
    return request.param


def make(seq_len, heads, head_dim, dtype, dense):
    """Rows as of a projection, or as of heads that lie apart in wider rows; every element of the rest is NaN."""
    if dense:
        return torch.randn(2, seq_len, heads, head_dim).to(dtype)
    room = torch.full((2, heads, seq_len + 3, head_dim + 4), math.nan, dtype=dtype)
    room[:, :, 1 : 1 + seq_len, :head_dim] = torch.randn(2, heads, seq_len, head_dim)
    return room[:, :, 1 : 1 + seq_len, :head_dim].transpose(1, 2)


def both(function, *tensors):
    """Return what the library gives, and what tensors give in double precision."""
    assert compiled.serves(*tensors)
    found, expected = function(*tensors), function(*(x.double() for x in tensors))
    return [[x] if isinstance(x, torch.Tensor) else list(x) for x in (found, expected)]


def close(found, expected, tolerance):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_stands_for_the_tokens_of_blocks(shape, dtype, dense, instruction_set):
    seq_len, block, heads, kv_heads, head_dim = shape
    _, block = block if isinstance(block, tuple) else (block, block)
    k = make(seq_len, kv_heads, head_dim, dtype, dense)
    grid = candidates(k, k, block_size=block)
    for parts, before in itertools.product((1, 4), (False, True)):
        close(*both(lambda k: estimates.part_means(k, grid, block, parts, before), k), TYPES[dtype])  # noqa: B023
    close(*both(partial(estimates.extremes, page=7), k), 0)
    for directions in {1, -(-seq_len // block)}:
        direction = torch.randn(2, directions, heads, head_dim)
        found = estimates.block_peaks(k, direction, block, 5)
        expected = estimates.block_peaks(k.double(), direction.double(), block, 5)
        real = expected[1] > -math.inf
        assert torch.equal(real, found[1] > -math.inf)
        assert torch.equal(found[2][real], expected[2][real])
        close([found[1][real]], [expected[1][real]], TYPES[dtype])
        whole = real.all(-1).all(-1).all(0)  # keys that do not exist stand for none
        close([found[0][:, whole]], [expected[0][:, whole]], TYPES[dtype])


def test_peaks_of_equal_scores_are_the_first_ones(instruction_set):
    """A NaN counts as infinity, and -0 as 0."""
    k = torch.tensor([-2.0, 0.0, -0.0, 3.0, 0.0, 3.0, -math.inf, math.nan, -5.0, math.inf]).view(1, 10, 1, 1)
    tokens = compiled.peaks(k, torch.ones(1, 1, 1, 1), 10, 10)[2].flatten().tolist()
    assert tokens == [7, 9, 3, 5, 1, 2, 4, 0, 8, 6]
    assert compiled.peaks(k[:, :6], torch.ones(1, 1, 1, 1), 3, 2)[2].flatten().tolist() == [1, 2, 3, 5]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shares(shape, dtype, is_causal, instruction_set, monkeypatch):
    seq_len, block, heads, kv_heads, head_dim = shape
    q, k = make(seq_len, heads, head_dim, dtype, False), make(seq_len, kv_heads, head_dim, dtype, True)

    def of(sample):
        def run(q, k):
            grid = candidates(q, k, block_size=block, is_causal=is_causal)
            return torch.cat([x for _, x in estimates.estimated_shares(sample(q, k, grid), grid)], 2)

        return run

    def first_queries(q, k, grid):
        """The first query of each block, and every key, though the last block has fewer."""
        weight = torch.ones(grid.rows, 1, dtype=grid.dtype)
        return estimates.Sample(q[:, :: grid.q_block], weight, k, grid.k_block, grid.scale)

    close(*both(of(estimates.pooled), q, k), TYPES[dtype])
    close(*both(of(first_queries), q, k), TYPES[dtype])
    if is_causal and seq_len > 200:
        sampled = [1, 2, 4, 5]
        # two groups, the second of which reads other keys
        monkeypatch.setattr("dilated_attention.routing.forecast.FORECAST_GROUP", 2)
        close(
            *both(lambda q, k: sampled_shares(q, k, sampled, candidates(q, k, block_size=block, is_causal=True)), q, k),
            TYPES[dtype],
        )


@pytest.mark.parametrize("is_causal", [False, True])
def test_listed_shares_are_shares_over_the_listed_columns(is_causal, instruction_set):
    """Rows 8 to 20 of 21, 4 at a time; the last list names columns past the end."""
    q, k = (make(333, heads, 16, torch.float32, True) for heads in (4, 2))
    listed = torch.rand(2, 4, 4, 24).argsort(-1)[..., :7].sort(-1).values

    def run(q, k):
        grid = candidates(q, k, block_size=16, is_causal=is_causal)
        sample, at = estimates.pooled(q, k, grid), slice(8, 21)
        return torch.cat([x for _, x in estimates.listed_shares(sample, grid.choices, listed, at, 4)], 2)

    close(*both(run, q, k), 1e-5)


@pytest.mark.parametrize("centres", [1, 6])
@pytest.mark.parametrize(("hashes", "num_bits", "tokens"), [(13, 6, 9), (1, 1, 1), (3, 11, 70)])
def test_weights_of_buckets(hashes, num_bits, tokens, centres, instruction_set):
    x = make(6 * tokens, 3, 20, torch.float32, False).unflatten(1, (6, tokens))
    centre, planes = torch.randn(2, centres, 3, 20), torch.randn(20, hashes * num_bits)
    weight = torch.rand(2, 6, 1, tokens)
    found, expected = (
        hashing._Hashes(planes.to(dtype), num_bits).weights(*(y.to(dtype) for y in (x, centre, weight)))
        for dtype in (torch.float32, torch.float64)
    )
    assert (found.double() - expected).abs().gt(1e-5).float().mean() < 1e-4  # a token on a plane, to the last bits
    torch.testing.assert_close(found.sum(-1).double(), expected.sum(-1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("num_bits", [3, 6])
@pytest.mark.parametrize("rows", [slice(0, 3), slice(1, 42), slice(20, 42)])
@pytest.mark.parametrize("block", [8, (8, 24), (8, 336)])
def test_collisions(block, rows, num_bits, instruction_set):
    """Rows that see no column, rows whose queries share no bucket with any key, and a row without weights."""
    grid = candidates(*[torch.zeros(1, 333, 1, 4)] * 2, block_size=block, is_causal=True)
    number, hashes = rows.stop - rows.start, hashing._Hashes(torch.empty(0), num_bits)
    logits, held, met = (
        torch.randn(2, 3, number, grid.columns) * 9,
        torch.rand(2, 3, grid.columns, 5 << num_bits).sub_(0.6).relu_(),
        torch.rand(2, 3, number, 5 << num_bits).sub_(0.9).relu_(),
    )
    logits[0, 0, -1], met[1, 1, -1] = -math.inf, 0
    found = compiled.collisions(logits, held, met, grid.choices[rows], num_bits, nothing=1e-30, alone=0.3)
    expected = hashing._collisions(*(x.double() for x in (logits, held, met)), rows, hashes, grid)
    close([found], [expected.masked_fill(~grid.allowed[rows], 0)], 1e-5)
    assert found.isfinite().all()


@pytest.mark.parametrize("step", [3, 100])
@pytest.mark.parametrize("block", [8, (8, 24), (24, 8)])
def test_forecasts(block, step, instruction_set):
    """Rows in pieces of `step`, each with its own number of blocks."""
    q, k = (make(333, heads, 16, torch.float32, True) for heads in (4, 2))

    def run(q, k):
        grid = candidates(q, k, block_size=block, is_causal=True)
        torch.manual_seed(0)
        share = torch.rand(2, 4, grid.rows, grid.columns).to(q.dtype) * grid.allowed
        forecast, counts = Forecast(q, k, grid), torch.randint(1, 4, (2, 4, grid.rows)).minimum(grid.visible())
        rows = [slice(i, min(i + step, grid.rows)) for i in range(0, grid.rows, step)]
        return torch.cat([forecast(at, share[:, :, at].clone(), counts[..., at]) for at in rows], 2)

    close(*both(run, q, k), 1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_lists_of_the_largest(is_causal, instruction_set, monkeypatch):
    """Equal shares, NaN, rows without blocks, and in pieces: the same lists as tensors give."""
    q = k = torch.randn(2, 100, 3, 4)
    grid = candidates(q, k, block_size=(8, 16), is_causal=is_causal, keep_diagonal=is_causal, floor=0)
    share = torch.randint(4, (2, 3, grid.rows, grid.columns)) / 4
    share[:, 1, 5:, 2] = math.nan
    counts = torch.randint(0, 8, (2, 3, grid.rows)).minimum(grid.visible())
    rows = [(at, share[:, :, at], counts[..., at]) for at in (slice(0, 5), slice(5, 6), slice(6, grid.rows))]
    found = grid.layout_of(rows)
    monkeypatch.setattr(compiled, "serves", lambda *tensors: False)
    assert found == grid.layout_of(rows)
    assert torch.equal(found.counts, counts)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_library_chooses_what_tensors_choose(is_causal, monkeypatch):
    """But for blocks whose shares are equal to the last bits: of 1,000 blocks chosen, five at most."""
    q, k = (make(2000, heads, 32, torch.float32, True) * 2 for heads in (4, 2))
    options = {"block_size": 32, "is_causal": is_causal}
    choices = {
        "topk": lambda: routing.topk_blocks(q, k, 0.2, **options),
        "topp": lambda: routing.topp_blocks(q, k, 0.6, **options),
        "sampled": lambda: routing.sampled_blocks(q, k, 0.2, **options),
        "two stages": lambda: routing.hierarchical_blocks(q, k, 0.2, region=4, **options),
        "hashes": lambda: routing.lsh_blocks(q, k, 0.2, **options),
    }
    found = {name: choose() for name, choose in choices.items()}
    monkeypatch.setattr(compiled, "serves", lambda *tensors: False)
    for name, choose in choices.items():
        expected = choose()
        assert (found[name] & expected).nnz >= 0.995 * expected.nnz, name


def test_a_key_that_is_not_finite_reaches_only_rows_that_see_it(instruction_set):
    q, k = (make(200, 2, 16, torch.float32, True) for _ in range(2))
    grid = candidates(q, k, block_size=16, is_causal=True)
    for value in (math.nan, math.inf):
        changed = k.clone()
        changed[:, 100:, :, 5] = value
        a, b = (
            torch.cat([x for _, x in estimates.estimated_shares(estimates.pooled(q, y, grid), grid)], 2)
            for y in (k, changed)
        )
        assert torch.equal(a[:, :, :7], b[:, :, :7])
        assert b[:, :, 8:, 0].isnan().all()


def test_a_gradient_of_what_is_estimated():
    """The library knows none: in single precision as in double."""
    router = routing.LearnedRouter(2, 16, 0.4, block_size=16)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        q, k = (torch.randn(1, 90, 2, 16).to(dtype).requires_grad_() for _ in range(2))
        gates = router.to(dtype).log_gates(q, k)
        gradients.append(torch.autograd.grad(gates.exp().square().sum(), (q, k)))
    for found, expected in zip(*gradients, strict=True):
        assert expected.abs().max() > 1e-4
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-6)
