"""Routing: shares against exact ones, quality on peaked scores, the causal guarantee, the learned router's gradient."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dilated_attention import attention, explain, ranking, routing
from dilated_attention.cache import plan_cache
from dilated_attention.kernels.cpu import estimates as compiled
from dilated_attention.layout import BlockLayout
from dilated_attention.routing import LearnedRouter, estimates, forecast
from dilated_attention.routing.grid import candidates
from dilated_attention.routing.hashing import _mean_so_far

SHAPES = [  # seq_len, block_size, heads, kv_heads
    (1, 16, 1, 1),
    (40, 16, 2, 1),
    (256, 32, 4, 2),
    (333, (16, 48), 2, 2),
    (333, (48, 16), 3, 1),
    (300, (64, 32), 2, 2),
    (1300, (64, 512), 2, 1),
]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(seq_len, heads=2, kv_heads=2, head_dim=8, batch=2, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    q = 2 * torch.randn(batch, seq_len, heads, head_dim, generator=generator, dtype=dtype)
    k = 2 * torch.randn(batch, seq_len, kv_heads, head_dim, generator=generator, dtype=dtype)
    return q, k


def share_of(q, k, layout, is_causal):
    """Exact share of each query block's softmax on each key block, (B, H, query blocks, key blocks)."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    score = torch.einsum("bihd,bjhd->bhij", q, k).double() / math.sqrt(q.shape[-1])
    if is_causal:
        score = score.masked_fill(torch.ones(q.shape[1], q.shape[1]).triu(1) > 0, -math.inf)
    probability = score.softmax(-1)
    token = torch.arange(q.shape[1])
    by_key = torch.zeros(*probability.shape[:3], layout.key_blocks, dtype=torch.float64)
    by_key.index_add_(3, token // layout.k_block, probability)
    by_row = torch.zeros(*probability.shape[:2], layout.query_blocks, layout.key_blocks, dtype=torch.float64)
    by_row.index_add_(2, token // layout.q_block, by_key)
    return by_row / torch.bincount(token // layout.q_block)[:, None]


def captured(share, layout):
    """Share of the softmax in the layout, over the share in as many of the best blocks a row."""
    best = share.sort(-1, descending=True).values.cumsum(-1).gather(-1, (layout.counts - 1)[..., None])
    return float((share * layout.dense_blocks()).sum() / best.sum())


def routers(block_size, is_causal):
    options = {"block_size": block_size, "is_causal": is_causal}
    return {
        "topk": lambda q, k: routing.topk_blocks(q, k, 0.3, **options),
        "topp": lambda q, k: routing.topp_blocks(q, k, 0.7, **options),
        "sampled": lambda q, k: routing.sampled_blocks(q, k, 0.3, queries=2, **options),
        "hierarchical": lambda q, k: routing.hierarchical_blocks(q, k, 0.3, region=2, breadth=1.5, **options),
        "lsh": lambda q, k: routing.lsh_blocks(q, k, 0.3, num_hashes=8, num_bits=4, **options),
        "buckets": lambda q, k: routing.lsh_blocks(q, k, num_hashes=1, num_bits=4, **options),
        "learned": lambda q, k: learned(q.shape[2], k.shape[2], q.shape[3], q.dtype, **options)(q, k),
    }


def learned(heads, kv_heads, head_dim, dtype=torch.float32, **options):
    torch.manual_seed(0)
    return LearnedRouter(heads, head_dim, 0.3, num_kv_heads=kv_heads, **options).to(dtype)


NAMES = list(routers(16, False))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("seq_len", "block_size", "heads", "kv_heads"), SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_layouts_are_well_formed(name, seq_len, block_size, heads, kv_heads, is_causal):
    q, k = make(seq_len, heads, kv_heads)
    layout = routers(block_size, is_causal)[name](q, k)
    assert BlockLayout.from_indices(layout.indptr, layout.indices, seq_len, block_size, is_causal=is_causal) == layout
    layout.check(2, seq_len, heads)
    assert (layout.batch_size, layout.num_heads) == (2, heads)
    diagonal = BlockLayout.local(seq_len, 1, block_size, is_causal=is_causal)
    assert layout & diagonal == diagonal | (layout & diagonal)  # every list has the diagonal
    dense = BlockLayout.local(seq_len, seq_len, block_size, is_causal=is_causal)
    forced = torch.ones_like(dense.counts)
    if is_causal:  # the blocks that no earlier token can judge
        first_query = torch.arange(layout.query_blocks)[:, None] * layout.q_block
        last_key = (torch.arange(layout.key_blocks) + 1) * layout.k_block - 1
        forced = (dense.dense_blocks() & (last_key > first_query)).sum(-1)
    else:
        forced = diagonal.counts
    if name not in ("topp", "buckets"):
        budget = (dense.counts.double() * 0.3).round().long().clamp(min=1).maximum(forced)
        assert torch.equal(layout.counts, budget.expand_as(layout.counts))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("block_size", [1, 3, (2, 64), (64, 4)], ids=str)
@pytest.mark.parametrize("name", ["topk", "topp", "hierarchical", "lsh", "learned"])
def test_small_blocks(name, block_size, is_causal):
    """Fewer tokens than the estimate takes parts of a query block, or peaks of a key block."""
    q, k = make(130, 2, 1)
    layout = routers(block_size, is_causal)[name](q, k)
    diagonal = BlockLayout.local(130, 1, block_size, is_causal=is_causal)
    assert layout & diagonal == diagonal | (layout & diagonal)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "learned"])  # which makes parameters there
def test_another_default_device(name):
    q, k = make(100, 4, 2)
    choose = routers(16, True)[name]
    expected = choose(q, k)
    with torch.device("meta"):
        assert choose(q, k) == expected


@pytest.fixture
def default_bfloat16():
    before = torch.get_default_dtype()

    def change():
        plan_cache.clear()
        torch.set_default_dtype(torch.bfloat16)

    yield change
    torch.set_default_dtype(before)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_another_default_dtype(is_causal, fast, monkeypatch, default_bfloat16):
    q, k = make(131)
    if not fast:
        monkeypatch.setattr(compiled, "serves", lambda *tensors: False)
    expected = estimates.pooled(q, k, candidates(q, k, block_size=(48, 16), is_causal=is_causal))
    default_bfloat16()
    found = estimates.pooled(q, k, candidates(q, k, block_size=(48, 16), is_causal=is_causal))
    for name in ("query", "weight", "key", "logarithm"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize(("number", "density"), [(45, 0.7), (119, 0.6)])  # a little below 31.5, in float64; 71.4
def test_as_many_blocks_as_python_rounds_to(number, density, default_bfloat16):
    q, k = make(number, 1, 1, batch=1)
    default_bfloat16()
    for layout in (
        routing.topk_blocks(q, k, density, block_size=1),
        BlockLayout.random(number, density, 0, block_size=1),
    ):
        assert set(layout.counts.flatten().tolist()) == {round(density * number)}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("block_size", [16, (16, 48)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_none(name, block_size, is_causal):
    q, k = make(100, 4, 2, batch=0)
    choose = routers(block_size, is_causal)[name]
    layout = choose(q, k)
    assert (layout.batch_size, layout.num_heads, layout.nnz, layout.is_causal) == (0, 4, 0, is_causal)
    assert attention(q, k, k, layout).shape == q.shape
    assert explain(q, k, k, layout).flops == 0
    assert "blocks=0, density=0" in repr(layout)
    with pytest.raises(ValueError, match=r"q and k must agree in batch and head_dim; got|must have the batch"):
        choose(q, make(100, 4, 2)[1])


def test_centres_of_half_precision_and_many_tokens():
    """65,504 is the largest number of float16."""
    means = torch.full((1, 1000, 1, 2), 100.0, dtype=torch.float16)
    size = torch.full((1000,), 128.0, dtype=torch.float16)
    for is_causal in (False, True):
        torch.testing.assert_close(_mean_so_far(means, size, is_causal)[:, -1], means[:, -1].float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_autocast_changes_no_choice(name, is_causal, dtype):
    q, k = make(256)
    route = routers(16, is_causal)[name]
    with torch.autocast("cpu", dtype):
        found = route(q, k)
    assert found == route(q, k)


def test_autocast_changes_no_gate():
    q, k = make(256)
    router = learned(2, 2, 8, block_size=16)
    with torch.autocast("cpu", torch.bfloat16):
        found = router.log_gates(q, k)
    assert torch.equal(found, router.log_gates(q, k))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_dtypes(name, dtype):
    q, k = make(200, dtype=dtype)
    layout = routers(32, False)[name](q, k)
    assert layout.seq_len == 200


@pytest.mark.parametrize("name", ["topk", "topp", "hierarchical", "lsh", "buckets"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_chunks_do_not_change_the_choice(name, is_causal, monkeypatch):
    q, k = make(700, 4, 2)
    route = routers((32, 16), is_causal)[name]
    whole = route(q, k)
    monkeypatch.setattr(ranking, "CHUNK", 1)
    assert route(q, k) == whole


class LargestResult(TorchDispatchMode):
    """Record the most numbers in a result of one operator."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self.numbers = max(self.numbers, *[x.numel() for x in tree_leaves(found) if isinstance(x, torch.Tensor)], 0)
        return found


SLICED = {name: routers(4, False)[name] for name in ("topk", "topp", "hierarchical")}
SLICED |= {f"causal {name}": routers(4, True)[name] for name in SLICED}
for causal in (False, True):  # they hold num_hashes * 2**num_bits numbers for each block
    hashes = partial(routing.lsh_blocks, block_size=4, is_causal=causal)
    SLICED[f"lsh {causal}"] = partial(hashes, density=0.3, num_hashes=2, num_bits=4)
    SLICED[f"buckets {causal}"] = partial(hashes, num_hashes=1, num_bits=6)


@pytest.mark.parametrize("name", SLICED)
def test_no_matrix_of_all_blocks_is_held_for_each_head(name, monkeypatch):
    monkeypatch.setattr(ranking, "CHUNK", 1)
    q, k = make(1200, 4, 2)
    with LargestResult() as largest:
        SLICED[name](q, k)
    assert q.numel() <= largest.numbers < 4 * 300**2


# Quality


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_chosen_blocks_carry_the_attention(seed, is_causal):
    """Topics that persist over spans of tokens, a few heavy keys, queries that share a mean: what real heads show."""
    generator = torch.Generator().manual_seed(seed)
    span = 256 if is_causal else 64
    topics = torch.randn(12, 2, 32, generator=generator)
    topic = torch.randint(12, (1, 2048 // span), generator=generator).repeat_interleave(span, dim=1)
    noise = torch.randn(2, 1, 2048, 2, 32, generator=generator)
    mean = torch.randn(2, 32, generator=generator)
    heavy = (torch.rand(1, 2048, 1, 1, generator=generator) < 0.02) * 2.0
    q = topics[topic] + 0.7 * noise[0] + mean
    k = topics[topic] + 0.7 * noise[1] + heavy * mean
    options = {"block_size": 32, "is_causal": is_causal}
    share = share_of(q, k, BlockLayout.local(2048, 1, 32), is_causal)
    got = {
        "topk": captured(share, routing.topk_blocks(q, k, 0.1, **options)),
        "sampled": captured(share, routing.sampled_blocks(q, k, 0.1, **options)),
        "lsh": captured(share, routing.lsh_blocks(q, k, 0.1, **options)),
        "hierarchical": captured(share, routing.hierarchical_blocks(q, k, 0.1, region=4, **options)),
    }
    # a causal choice cannot foresee a change of topic, which one row in eight holds here, and keeps the diagonal
    least = (
        {"topk": 0.7, "sampled": 0.7, "lsh": 0.5, "hierarchical": 0.7}
        if is_causal
        else {"topk": 0.97, "sampled": 0.97, "lsh": 0.85, "hierarchical": 0.97}
    )
    assert all(got[name] >= least[name] for name in least), got


@pytest.mark.parametrize("name", ["topk", "topp", "sampled", "lsh"])
def test_a_causal_choice_follows_heads_of_distances(name):
    """Scores of two heads that depend on the distance alone, largest at 0 and at 600 tokens back."""
    position, frequency = torch.arange(2048.0), 1.3 ** -torch.arange(16.0)
    turned = [torch.stack([f(position[:, None] * frequency) for f in (torch.cos, torch.sin)], -1).flatten(1)]
    turned += [torch.stack([f((position - 600)[:, None] * frequency) for f in (torch.cos, torch.sin)], -1).flatten(1)]
    q = 2.2 * torch.stack(turned, 1)[None]
    k = 2.2 * torch.stack(turned[:1] * 2, 1)[None]
    share = share_of(q, k, BlockLayout.local(2048, 1, 32), True)
    route = {
        "topk": lambda: routing.topk_blocks(q, k, 0.15, block_size=32, is_causal=True),
        "topp": lambda: routing.topp_blocks(q, k, 0.5, block_size=32, is_causal=True),
        "sampled": lambda: routing.sampled_blocks(q, k, 0.15, block_size=32, is_causal=True),
        "lsh": lambda: routing.lsh_blocks(q, k, 0.15, block_size=32, is_causal=True),
    }[name]
    assert captured(share, route()) > 0.9


def test_who_samples_every_query_chooses_the_best_blocks():
    q, k = make(336, 4, 2, dtype=torch.float64)
    options = {"queries": 16, "block_size": (16, 48), "keep_diagonal": False}
    layout = routing.sampled_blocks(q * 3, k, 0.3, **options)
    share = share_of(q * 3, k, BlockLayout.local(336, 1, (16, 48)), False)
    assert captured(share, layout) > 1 - 1e-12
    assert captured(share, routing.topk_blocks(q * 3, k, 0.3, block_size=(16, 48), keep_diagonal=False)) < 0.999


@pytest.mark.parametrize("tokens", [1, 17, 321])
def test_a_last_block_of_one_token_is_sampled(tokens):
    q, k = make(tokens, 4, 2, dtype=torch.float64)
    layout = routing.sampled_blocks(q * 3, k, 0.2, block_size=16, keep_diagonal=False)
    share = share_of(q * 3, k, BlockLayout.local(tokens, 1, 16), False)[:, :, -1]
    listed = layout.dense_blocks()[:, :, -1]
    number = int(listed.sum(-1).max())
    torch.testing.assert_close((share * listed).sum(-1), share.topk(number).values.sum(-1))


def test_who_looks_ahead_chooses_the_best_of_the_earlier_blocks():
    """The best ones follow from the softmax of every query of a block over the keys before it."""
    q, k = (x[:1] for x in make(336, 2, 2, dtype=torch.float64))
    layout = routing.sampled_blocks(q, k, 0.4, queries=16, lookahead=True, block_size=16, is_causal=True)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    block = torch.arange(336) // 16
    scores.masked_fill_(block >= block[:, None], -torch.inf)
    of_query = torch.nn.functional.one_hot(block).double()
    share = of_query.T @ (scores.softmax(-1).nan_to_num() @ of_query) / of_query.sum(0)[:, None]
    listed = layout.dense_blocks() & ~torch.eye(21, dtype=torch.bool)
    best = share.sort(-1, descending=True).values.cumsum(-1)
    best = torch.nn.functional.pad(best, (1, 0)).gather(-1, listed.sum(-1, keepdim=True))
    torch.testing.assert_close((share * listed).sum(-1, keepdim=True), best, rtol=1e-6, atol=0)


def test_a_forecast_sees_the_softmax_of_its_tokens(monkeypatch):
    monkeypatch.setattr(forecast, "FORECAST_STRIDE", 1)
    monkeypatch.setattr(forecast, "FORECAST_TOKENS", 16)
    q, k = make(333, 4, 2, dtype=torch.float64)
    grid = candidates(q, k, block_size=(16, 48), is_causal=True)
    sampled = [1, 2, 5, 9, 19]
    expected = share_of(q, k, BlockLayout.local(333, 1, (16, 48)), True)[:, :, sampled]
    for chunk in (2**24, 1):
        monkeypatch.setattr(ranking, "CHUNK", chunk)
        got = forecast.sampled_shares(q, k, sampled, grid)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_shares_are_exact_when_every_key_is_a_peak(monkeypatch):
    monkeypatch.setattr(estimates, "KEY_PEAKS", 16)
    monkeypatch.setattr(estimates, "QUERY_PARTS", 16)
    q, k = make(200, 4, 2, dtype=torch.float64)
    grid = candidates(q, k, block_size=16, keep_diagonal=False, floor=0)
    share = torch.cat([part for _, part in estimates.estimated_shares(estimates.pooled(q, k, grid), grid)], dim=2)
    expected = share_of(q, k, BlockLayout.local(200, 1, 16), False)
    torch.testing.assert_close(share, expected, rtol=1e-12, atol=1e-12)


def test_top_p_takes_the_fewest_blocks(monkeypatch):
    monkeypatch.setattr(estimates, "KEY_PEAKS", 16)
    monkeypatch.setattr(estimates, "QUERY_PARTS", 16)
    q, k = make(192, dtype=torch.float64)
    for mass in (0.2, 0.5, 0.9, 1.0):
        layout = routing.topp_blocks(q, k, mass, block_size=16, keep_diagonal=False)
        share = share_of(q, k, layout, False)
        kept = (share * layout.dense_blocks()).sum(-1)
        least = share.masked_fill(~layout.dense_blocks(), 2.0).amin(-1)
        assert bool((kept >= mass - 1e-9).all())
        assert bool((kept - least < mass).all())


def test_floor_and_free_diagonal():
    q, k = make(512, 1, 1, batch=1)
    for floor in (0, 3):
        layout = routing.topk_blocks(q, k, 0.01, block_size=32, keep_diagonal=False, floor=floor)
        assert layout.counts.unique().tolist() == [floor]
    assert routing.topp_blocks(q, k, 1e-9, block_size=32, floor=5).counts.unique().tolist() == [5]
    causal = routing.topk_blocks(q, k, 0.01, block_size=32, is_causal=True, floor=4)
    assert causal.counts.flatten().tolist() == [1, 2, 3] + [4] * 13
    k[:, 37:40] += 10 * q[:, 64:96].mean(1, keepdim=True)
    row = routing.topk_blocks(q, k, 1 / 16, block_size=32, keep_diagonal=False).dense_blocks()[0, 0, 2]
    assert row.nonzero().flatten().tolist() == [1]


def test_lists_for_kv_heads():
    q, k = make(512, 6, 2)
    layout = routing.topk_blocks(q, k, 0.2, block_size=32, per_kv_head=True)
    assert layout.num_heads == 2
    layout.check(2, 512, 6, 2)
    one_each = [q[:, :, [head, 3 + head]] for head in range(3)]
    same = torch.cat([one_each[0]] * 3, dim=3).unflatten(3, (3, 8)).flatten(2, 3)  # three equal heads a group
    assert routing.topk_blocks(same, k, 0.2, block_size=32, per_kv_head=True) == routing.topk_blocks(
        one_each[0], k, 0.2, block_size=32
    )


# LSH


@pytest.mark.parametrize(("seq_len", "block_size"), [(200, 16), (333, (16, 48))])
def test_lsh_is_exact_inside_buckets(seq_len, block_size):
    q, k = make(seq_len, 2, 1)
    layout = routing.lsh_blocks(q, k, num_hashes=2, num_bits=11, block_size=block_size, keep_diagonal=False, floor=0)
    generator = torch.Generator().manual_seed(0)
    planes = torch.linalg.qr(torch.randn(3, 8, 8, generator=generator, dtype=torch.float64)).Q  # orthogonal by eights
    planes = torch.cat(list(planes), 1)[:, :22].float()
    signs = [((x - x.mean(1, keepdim=True)) @ planes > 0).unflatten(-1, (2, 11)) for x in (q, k.expand_as(q))]
    shared = (signs[0][:, :, None] == signs[1][:, None]).all(-1).any(-1).permute(0, 3, 1, 2)  # (B, H, N, N)
    token = torch.arange(seq_len)
    pairs = torch.zeros(2, 2, layout.query_blocks, layout.key_blocks)
    at = (token // layout.q_block * layout.key_blocks)[:, None] + token // layout.k_block
    pairs.flatten(2).index_add_(2, at.flatten(), shared.flatten(2).float())
    assert torch.equal(layout.dense_blocks(), pairs > 0)
    assert 0 < layout.density < 1


def test_seeds_and_densities_of_a_schedule_are_not_all_kept():
    q, k = make(64)
    for step in range(1, 100):
        routing.lsh_blocks(q, k, step / 100, seed=step, block_size=16)
    assert len(candidates(q, k, block_size=16).made) < 40


def test_lsh_seeds():
    q, k = make(512)
    assert routing.lsh_blocks(q, k, 0.2, block_size=32) == routing.lsh_blocks(q, k, 0.2, block_size=32)
    assert routing.lsh_blocks(q, k, 0.2, block_size=32) != routing.lsh_blocks(q, k, 0.2, block_size=32, seed=1)


# The causal guarantee


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(SHAPES[1:]), st.sampled_from(NAMES), st.data())
def test_later_tokens_never_change_what_earlier_queries_see(seed, shape, name, data):
    seq_len, block_size, heads, kv_heads = shape
    route = routers(block_size, True)[name]
    q, k = make(seq_len, heads, kv_heads, seed=seed, batch=1)
    t = data.draw(st.integers(0, seq_len - 2))
    later_q, later_k = make(seq_len, heads, kv_heads, seed=seed + 1, batch=1)
    size = data.draw(st.sampled_from([0.0, 1.0, 30.0]))
    changed_q, changed_k = (
        torch.cat([a[:, : t + 1], size * b[:, t + 1 :]], dim=1) for a, b in ((q, later_q), (k, later_k))
    )
    before, after = (layout.dense_mask()[..., : t + 1, :] for layout in (route(q, k), route(changed_q, changed_k)))
    assert torch.equal(before, after)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("block_size", [16, (32, 16), (16, 48)], ids=str)
def test_scores_that_overflow(name, block_size, is_causal):
    """Scores overflow in later tokens: rows before them keep their lists; every list holds the diagonal.

    No list holds anything beyond it.
    """
    route = routers(block_size, is_causal)[name]
    q, k = make(270, 4, 2, batch=1)
    diagonal = BlockLayout.local(270, 1, block_size, is_causal=is_causal)
    for dtype, sizes in {torch.float16: (1e3, 3e4), torch.float32: (1e30, math.inf, math.nan)}.items():
        before = route(q.to(dtype), k.to(dtype)).dense_mask()[..., :160, :]
        for size in sizes:
            changed = [torch.cat([x[:, :160], size * x[:, 160:].sign()], 1).to(dtype) for x in (q, k)]
            alone = [torch.cat([x[:, :160], size * x[:, 160:161].sign(), x[:, 161:]], 1).to(dtype) for x in (q, k)]
            for tensors in (changed, alone):
                layout = route(*tensors)
                lists = layout.indptr, layout.indices
                assert BlockLayout.from_indices(*lists, 270, block_size, is_causal=is_causal) == layout
                assert layout & diagonal == diagonal | (layout & diagonal)
                if is_causal:
                    assert torch.equal(layout.dense_mask()[..., :160, :], before)


@pytest.mark.parametrize("name", ["topk", "topp", "lsh", "buckets", "learned"])
@pytest.mark.parametrize("block_size", [16, (16, 4), (6, 4), (4, 16)], ids=str)
def test_how_many_tokens_follow_changes_no_choice(name, block_size):
    q, k = make(64, 2, 1)
    route = routers(block_size, True)[name]
    whole = route(q, k).dense_mask()
    for seq_len in (49, 53, 58):
        assert torch.equal(route(q[:, :seq_len], k[:, :seq_len]).dense_mask(), whole[..., :seq_len, :seq_len])


def test_the_guarantee_would_catch_a_look_ahead():
    q, k = make(256, 1, 1, batch=1)
    ahead = routing.topk_blocks(q, k, 0.3, block_size=16).causal()
    q[:, 101:] *= -3
    k[:, 101:] *= -3
    changed = routing.topk_blocks(q, k, 0.3, block_size=16).causal()
    assert not torch.equal(ahead.dense_mask()[..., :101, :], changed.dense_mask()[..., :101, :])


# The learned router


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_relaxed_objective_has_its_true_gradient(is_causal, kv_heads):
    q, k = make(72, 2, kv_heads, head_dim=4, batch=1, dtype=torch.float64)
    v = make(72, 2, kv_heads, head_dim=4, batch=1, seed=5, dtype=torch.float64)[1]
    router = LearnedRouter(
        2, 4, 0.5, num_kv_heads=kv_heads, rank=3, temperature=0.5, block_size=16, is_causal=is_causal
    ).double()
    target = make(72, 2, 2, head_dim=4, batch=1, seed=9, dtype=torch.float64)[0]

    def objective(query_map, key_map, q, k, v):
        parameters = {"query_map": query_map, "key_map": key_map}
        out = torch.func.functional_call(_Relaxed(router), {f"router.{n}": p for n, p in parameters.items()}, (q, k, v))
        return ((out - target) ** 2).mean()

    inputs = [x.detach().clone().requires_grad_() for x in (router.query_map, router.key_map, q, k, v)]
    assert torch.autograd.gradcheck(lambda *maps: objective(*maps, *inputs[2:]), inputs[:2], atol=1e-7, rtol=1e-5)
    assert torch.autograd.gradcheck(objective, inputs, atol=1e-7, rtol=1e-5, fast_mode=True)
    grads = torch.autograd.grad(objective(*inputs), inputs)
    assert all(float(g.abs().max()) > 1e-6 for g in grads)


class _Relaxed(torch.nn.Module):
    def __init__(self, router):
        super().__init__()
        self.router = router

    def forward(self, q, k, v):
        return self.router.relaxed_attention(q, k, v)


@pytest.mark.parametrize("is_causal", [False, True])
def test_gates_sum_to_the_budget_and_harden_to_the_layout(is_causal):
    q, k = make(400, 4, 2, dtype=torch.float64)
    router = learned(4, 2, 8, torch.float64, block_size=32, is_causal=is_causal)
    layout = router(q, k)
    gates = router.log_gates(q, k).exp()
    torch.testing.assert_close(gates.sum(-1), layout.counts.double(), rtol=1e-9, atol=1e-9)
    router.temperature = 1e-6
    hard = router.log_gates(q, k).exp()
    torch.testing.assert_close(hard, layout.dense_blocks().double(), rtol=0, atol=1e-6)
    v = make(400, 4, 2, seed=3, dtype=torch.float64)[1]
    score = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / 8**0.5
    probability = score.masked_fill(~layout.dense_mask(), -math.inf).softmax(-1)
    expected = torch.einsum("bhij,bjhd->bihd", probability, v.repeat_interleave(2, 2))
    torch.testing.assert_close(router.relaxed_attention(q, k, v), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_gates_of_rows_before_a_key_that_is_not_finite(value):
    q, k = make(80, 4, 2)
    router = learned(4, 2, 8, torch.float32, block_size=16, is_causal=True)
    before = router.log_gates(q, k)
    k[:, 70:] = value
    assert torch.equal(router.log_gates(q, k)[:, :, :4], before[:, :, :4])


def test_training_the_router_finds_the_blocks_that_matter():
    """Blocks share one of four topics; only the topic's direction tells which keys suit a query."""
    torch.manual_seed(0)
    topics = 2 * torch.randn(4, 16)
    topic = torch.randint(4, (8, 16)).repeat_interleave(16, dim=1)
    k = topics[topic][:, :, None] + 0.5 * torch.randn(8, 256, 1, 16)
    q = -topics[(topic + 1) % 4][:, :, None] + 0.5 * torch.randn(8, 256, 1, 16)
    v = torch.randn(8, 256, 1, 16)
    score = torch.einsum("bihd,bjhd->bhij", q, k) / 4
    target = torch.einsum("bhij,bjhd->bihd", score.softmax(-1), v)
    router = LearnedRouter(1, 16, 0.25, rank=8, temperature=0.3, block_size=16)
    share = share_of(q, k, router(q, k), False)
    before = captured(share, router(q, k))
    optimizer = torch.optim.Adam(router.parameters(), lr=0.03)
    for _ in range(100):
        optimizer.zero_grad()
        loss = (router.relaxed_attention(q, k, v) - target).square().mean()
        loss.backward()
        optimizer.step()
    after = captured(share, router(q, k))
    assert after > 0.8, (before, after)
    assert before < 0.65, (before, after)


def test_router_is_a_module():
    router = LearnedRouter(4, 8, 0.2, num_kv_heads=2)
    again = LearnedRouter(4, 8, 0.2, num_kv_heads=2)
    again.load_state_dict(router.state_dict())
    q, k = make(300, 4, 2)
    assert again(q, k) == router(q, k)
    assert not router(q, k).indices.requires_grad
    assert "density=0.2" in repr(router)


# Schedule and bad input


def test_endless_breadth_looks_into_every_region():
    q, k = make(256)
    endless, wide = (routing.hierarchical_blocks(q, k, 0.2, region=2, block_size=16, breadth=b) for b in (math.inf, 5))
    assert endless == wide


def test_density_schedule():
    assert routing.density_schedule(1) == routing.density_schedule(4096) == 1.0
    assert routing.density_schedule(16384) == 0.5
    assert routing.density_schedule(1 << 20, exponent=1.0) == 4096 / (1 << 20)
    densities = [routing.density_schedule(2**i) for i in range(10, 24)]
    assert densities == sorted(densities, reverse=True)


Q, K = make(64, 4, 2)
ROUTER = LearnedRouter(4, 8, 0.1, num_kv_heads=2, block_size=16)
BAD = [
    (r"density must lie in \(0, 1\], got 0", lambda: routing.topk_blocks(Q, K, 0)),
    (r"density must lie in \(0, 1\], got 1.1", lambda: routing.hierarchical_blocks(Q, K, 1.1)),
    (r"mass must lie in \(0, 1\], got 0", lambda: routing.topp_blocks(Q, K, 0.0)),
    (r"density must lie in \(0, 1\], got None", lambda: routing.topk_blocks(Q, K, None)),
    (r"density must lie in \(0, 1\], got 'a'", lambda: routing.topk_blocks(Q, K, "a")),
    (r"mass must lie in \(0, 1\], got '0.5'", lambda: routing.topp_blocks(Q, K, "0.5")),
    ("q must be a torch.Tensor; got NoneType", lambda: routing.topk_blocks(None, K, 0.1)),
    ("k must be a torch.Tensor; got list", lambda: routing.topk_blocks(Q, k=[1], density=0.1)),
    ("q must have a floating dtype; got torch.int64", lambda: routing.sampled_blocks(Q.long(), K, 0.1)),
    ("q and k must have one length, heads, and values to read; got .* on meta",
     lambda: routing.topk_blocks(Q.to("meta"), K.to("meta"), 0.1)),
    ("must be on one device; got k on meta", lambda: LearnedRouter(4, 8, 0.1)(Q, K.to("meta"))),
    ("q must be a torch.Tensor; got NoneType", lambda: LearnedRouter(4, 8, 0.1)(None, K)),
    ("scale must be a finite number.*got nan", lambda: routing.sampled_blocks(Q, K, 0.1, scale=math.nan)),
    ("scale must be a finite number.*got 'a'", lambda: routing.topp_blocks(Q, K, 0.5, scale="a")),
    ("heads of k and v must divide .*; got 4 query and 0 key", lambda: routing.topk_blocks(Q, K[:, :, :0], 0.1)),
    (r"one length, .*; got \(2, 64, 4, 8\) and \(2, 63, 2, 8\)", lambda: routing.topk_blocks(Q, K[:, 1:], 0.1)),
    ("q must have 4 dimensions", lambda: routing.topk_blocks(Q[0], K[0], 0.1)),
    ("one floating dtype; got k torch.float64 and q torch.float32", lambda: routing.lsh_blocks(Q, K.double())),
    (r"one length, heads, .*; got \(2, 64, 0, 8\)", lambda: routing.topk_blocks(Q[:, :, :0], K, 0.1)),
    ("head_dim of at least 1; got .* 4, 0", lambda: routing.lsh_blocks(Q[..., :0], K[..., :0])),
    ("keep_diagonal must be a bool; got 'no'", lambda: routing.topk_blocks(Q, K, 0.1, keep_diagonal="no")),
    ("per_kv_head must be a bool; got 1", lambda: routing.topp_blocks(Q, K, 0.1, per_kv_head=1)),
    ("heads of k and v must divide .*; got 3 query and 2 key", lambda: routing.topk_blocks(Q[:, :, :3], K, 0.1)),
    ("block_size.*must be", lambda: routing.topk_blocks(Q, K, 0.1, block_size=0)),
    ("is_causal must be a bool; got 'no'", lambda: routing.lsh_blocks(Q, K, is_causal="no")),
    ("is_causal must be a bool; got 'no'", lambda: LearnedRouter(4, 8, 0.1, is_causal="no")),
    ("block_size.*got .a.", lambda: LearnedRouter(4, 8, 0.1, block_size="a")),
    ("keep_diagonal=False contradicts", lambda: routing.topk_blocks(Q, K, 0.1, is_causal=True, keep_diagonal=False)),
    ("floor must be a non-negative integer; got -1", lambda: routing.topk_blocks(Q, K, 0.1, floor=-1)),
    ("queries must be an integer from 1 to 128; got 129", lambda: routing.sampled_blocks(Q, K, 0.1, queries=129)),
    ("lookahead must be a bool; got 1", lambda: routing.sampled_blocks(Q, K, 0.1, lookahead=1)),
    ("region must be a positive integer; got 0", lambda: routing.hierarchical_blocks(Q, K, 0.1, region=0)),
    ("num_bits must be.*from 1 to 16; got 17", lambda: routing.lsh_blocks(Q, K, num_bits=17)),
    ("exponent must lie in", lambda: routing.density_schedule(10, exponent=2.0)),
    (r"exponent must lie in \[0, 1\], got '0.5'", lambda: routing.density_schedule(10, exponent="0.5")),
    ("num_kv_heads must divide num_heads=4; got 3", lambda: LearnedRouter(4, 8, 0.1, num_kv_heads=3)),
    ("temperature must be a positive number; got 0", lambda: LearnedRouter(4, 8, 0.1, temperature=0.0)),
    ("temperature must be a positive number; got None", lambda: LearnedRouter(4, 8, 0.1, temperature=None)),
    ("temperature must be a finite number.*got inf", lambda: LearnedRouter(4, 8, 0.1, temperature=math.inf)),
    ("floor must be a non-negative integer; got 1.5", lambda: LearnedRouter(4, 8, 0.1, floor=1.5)),
    ("breadth must be at least 1, got '4'", lambda: routing.hierarchical_blocks(Q, K, 0.1, breadth="4")),
    ("seq_len must be a positive integer; got '50'", lambda: BlockLayout.local(64, 4, 16).prefix("50")),
    (r"density must lie in \(0, 1\]", lambda: LearnedRouter(4, 8, 2.0)),
    (r"k and v must have the same shape, .* and \(2, 1, 2, 8\)", lambda: ROUTER.relaxed_attention(Q, K, K[:, :1])),
    (r"k and v must have the same shape, .* and \(2, 64, 1, 8\)", lambda: ROUTER.relaxed_attention(Q, K, K[:, :, :1])),
    ("scale must be a finite number.*got nan", lambda: ROUTER.relaxed_attention(Q, K, K, scale=math.nan)),
    ("the router has 4 heads and 4 KV heads, got q with 4 and k with 2", lambda: LearnedRouter(4, 8, 0.1)(Q, K)),
]  # fmt: skip


@pytest.mark.parametrize(("message", "call"), BAD)
def test_bad_input(message, call):
    with pytest.raises(ValueError, match=message):
        call()
