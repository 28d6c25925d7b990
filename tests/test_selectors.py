"""Pages, the indexer, lists of a call: against their definitions in loops."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from dilated_attention import (
    BlockLayout,
    Dilated,
    UnsupportedError,
    attention_weights,
    block_sparse_attention,
    ranking,
    routing,
)
from dilated_attention.decoding import listed_attention
from dilated_attention.nn import rotary_tables, rotate
from dilated_attention.routing import forecast
from dilated_attention.routing.grid import candidates
from processors import by_name_in_a_graph


def make(seq_len, heads, kv_heads, head_dim=4):
    shapes = ((2, seq_len, heads, head_dim), (2, seq_len, kv_heads, head_dim), (2, seq_len, kv_heads, head_dim))
    return (torch.randn(shape, dtype=torch.float64) * 1.5 for shape in shapes)


def head_pairs(q, k):
    """(sample, head, queries, keys) of each head."""
    group = q.shape[2] // k.shape[2]
    for sample in range(len(q)):
        for head in range(q.shape[2]):
            yield sample, head, q[sample, :, head], k[sample, :, head // group]


def test_a_forecast_sees_an_attention_sink():
    """The first key holds most of every row's softmax; every sampled block must say so, whichever keys it reads."""
    q, k, _ = make(2048, 2, 1, 16)
    k *= 0.1
    q += 1
    k[:, 0] = 2.2
    grid = candidates(q, k, block_size=16, is_causal=True)
    blocks = list(range(8, 120, 3))
    found = forecast.sampled_shares(q, k, blocks, grid)
    weights = attention_weights(q, k, Dilated((2048,), (1,)), is_causal=True).to_dense()
    expected = torch.stack([weights[:, :, 16 * i : 16 * i + 16, :16].sum(-1).mean(-1) for i in blocks], 2)
    assert 0.4 < expected.mean() < 0.95
    difference = (found[..., 0] - expected).abs()  # four tokens against sixteen
    assert difference.mean() < 0.15
    assert difference.max() < 0.4


@pytest.mark.parametrize("choose", [routing.topk_blocks, routing.lsh_blocks])
def test_mapped_tensors_are_refused(choose):
    q = torch.randn(2, 1, 64, 2, 8)
    with pytest.raises(UnsupportedError, match=f"{choose.__name__} under torch.func.vmap.*part of the batch"):
        torch.func.vmap(lambda q: choose(q, q, 0.5, block_size=16).counts)(q)
    with pytest.raises(UnsupportedError, match=f"{choose.__name__} under torch.func.vmap.*part of the batch"):
        torch.func.vmap(torch.func.grad(lambda q: (q * choose(q, q, 0.5, block_size=16).nnz).sum()))(q)


def naive_bound(query, page):
    return sum(
        max(float(a * low), float(a * high)) for a, low, high in zip(query, page.amin(0), page.amax(0), strict=True)
    )


def test_decoding_by_pages():
    """Pages that hold every token give dense attention; fewer give the attention of the layout with those pages."""
    q, k, v = make(23, 4, 2)
    bounds, size = routing.PageBounds(page_size=4), 4
    for start, stop in ((0, 6), (6, 7), (7, 8), (8, 22), (22, 23)):
        bounds.append(k[:, start:stop])
    newest = q[:, -1:]
    for sample, head, queries, keys in head_pairs(q, k):
        wanted = [naive_bound(queries[-1], keys[i * size : (i + 1) * size]) for i in range(5)] + [math.inf]
        best = sorted(range(6), key=lambda i: -wanted[i])[:3]
        assert set(bounds.best(newest, 3)[sample, head].tolist()) == set(best)
    for number in (3, 99):
        chosen = bounds.best(newest, number)
        found = listed_attention(newest, k, v, chosen, size)
        lists = torch.full((2, 4, 6, chosen.shape[2]), -1)
        lists[:, :, -1] = chosen
        layout = BlockLayout.from_topk(lists, (4, 4), seq_len=23)
        torch.testing.assert_close(found, block_sparse_attention(q, k, v, layout)[:, -1:], rtol=0, atol=1e-12)
        for again in (torch.cat([chosen, chosen.flip(-1)], -1), torch.cat([chosen[..., :1]] * 2 + [chosen], -1)):
            torch.testing.assert_close(listed_attention(newest, k, v, again, size), found, rtol=0, atol=1e-12)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("own", [False, True])
def test_newest_tokens_of_samples_of_different_lengths(heads, own):
    """Several new tokens, sinks, lse: the last rows of each sample under a layout with their lists."""
    new, size, lengths = 5, 4, [23, 9]
    q, k, v = make(23, 4, 2)
    sinks = torch.randn(4, dtype=q.dtype)
    chosen = torch.randint(-1, 3, (2, heads, new if own else 1, 3))
    q_new = torch.stack([q[i, n - new : n] for i, n in enumerate(lengths)])
    out, lse = listed_attention(
        q_new,
        k,
        v,
        chosen if own else chosen[:, :, 0],
        size,
        sinks=sinks,
        lengths=torch.tensor(lengths),
        return_lse=True,
    )
    for sample, n in enumerate(lengths):
        lists = torch.full((1, heads, n, 3), -1)
        lists[0, :, n - new :] = chosen[sample]
        layout = BlockLayout.from_topk(lists, (1, size), seq_len=n)
        rows = [x[sample : sample + 1, :n] for x in (q, k, v)]
        expected = block_sparse_attention(*rows, layout, is_causal=True, sinks=sinks, return_lse=True)
        torch.testing.assert_close(out[sample], expected[0][0, -new:], rtol=0, atol=1e-12)
        torch.testing.assert_close(lse[sample], expected[1][0, :, -new:], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("batch", "new"), [(0, 2), (2, 0)])
def test_no_queries_to_list_for(batch, new):
    q, k, v = make(23, 4, 2)
    chosen = torch.zeros(1, 1, 3, dtype=torch.int64)
    out, lse = listed_attention(q[:batch, :new], k[:batch], v[:batch, ..., :3], chosen, 4, return_lse=True)
    assert (out.shape, lse.shape) == ((batch, new, 4, 3), (batch, 4, new))


def test_pages_of_several_tokens_cropped_and_reordered():
    """Each token chooses what it does alone; rejected keys leave nothing behind."""
    q, k, _ = make(40, 4, 2)
    junk = torch.randn(2, 8, *k.shape[2:], dtype=k.dtype) * 9
    alone, bounds, at = routing.PageBounds(4), routing.PageBounds(4), 5
    bounds.append(k[:, :at])
    alone.append(k[:, :at])
    for right, wrong in ((3, 4), (1, 1), (6, 3), (0, 4), (4, 0), (2, 2)):
        bounds.append(torch.cat([k[:, at : at + right], junk[:, :wrong]], 1))
        bounds.crop(at + right)
        chosen = bounds.best(q[:, at : at + right], 3) if right > 1 else None
        for i in range(right):
            alone.append(k[:, at + i : at + i + 1])
            own = alone.best(q[:, at + i : at + i + 1], 3)
            if chosen is not None:
                assert torch.equal(chosen[:, :, i][chosen[:, :, i] >= 0].view(2, 4, -1), own)
        at += right
        assert bounds.seq_len == alone.seq_len == at
        assert torch.equal(bounds.bounds[:, :, : bounds.pages], alone.bounds[:, :, : alone.pages])
    with pytest.raises(
        ValueError, match="crop needs the keys of the page that it cuts, from token 16 on; got seq_len=15"
    ):
        bounds.crop(15)
    with pytest.raises(ValueError, match="q must have from 1 to 21 tokens, the newest; got 22"):
        bounds.best(q[:, :22], 3)
    bounds.reorder([1, 1, 0])
    assert torch.equal(bounds.best(q[[1, 1, 0], at : at + 1], 3), alone.best(q[:, at : at + 1], 3)[[1, 1, 0]])
    bounds.append(k[[1, 1, 0], at : at + 1])
    routing.PageBounds().reorder([0])


def test_keys_that_no_list_names_reach_nothing():
    """NaN in their k and v changes neither out nor a gradient; an empty list gives 0."""
    q, k, v = make(23, 4, 2)
    chosen, size = torch.tensor([[[5, -1, 2]]]), 4
    dirty = [x.clone() for x in (k, v)]
    for x in dirty:
        x[:, :8] = x[:, 12:20] = math.nan
    results = []
    for keys, values in ((k, v), dirty):
        leaves = [x.clone().requires_grad_() for x in (q[:, -1:], keys, values)]
        out = listed_attention(*leaves, chosen, size)
        results.append([out, *torch.autograd.grad(out.sum(), leaves)])
        assert not listed_attention(q[:, -1:], keys, values, torch.full((2, 1, 2), -1)).any()
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_the_best_pages_of_mapped_queries_and_in_one_graph(compiling_python):
    compiling_python(
        """
        import torch
        from dilated_attention.decoding import listed_attention
        from dilated_attention.routing import PageBounds

        pages, q = PageBounds(16), torch.randn(3, 1, 1, 4, 8)
        pages.append(torch.randn(1, 64, 2, 8))
        expected = torch.stack([pages.best(x, 2) for x in q])
        assert torch.equal(torch.func.vmap(lambda x: pages.best(x, 2))(q), expected)
        compiled = torch.compile(lambda x: pages.best(x, 2), fullgraph=True, backend="eager")
        assert torch.equal(compiled(q[0]), expected[0])

        def first_block(q, k):
            return listed_attention(q[:, -1:], k, k, torch.zeros(2, 1, 1, dtype=torch.int64), 16)

        x = torch.randn(2, 64, 4, 8), torch.randn(2, 64, 2, 8)
        compiled = torch.compile(first_block, fullgraph=True, backend="eager", dynamic=True)
        assert torch.equal(compiled(*x), first_block(*x))
        """
    )


def test_the_own_page_comes_before_bounds_that_overflow():
    k = torch.zeros(1, 16, 1, 2)
    k[0, 1, 0, 0] = torch.inf  # a bound of infinity, or 0 times infinity
    pages = routing.PageBounds(4)
    pages.append(k)
    for q in (0.0, 1.0):
        assert pages.best(torch.full((1, 1, 1, 2), q), 1).tolist() == [[[3]]]


def test_pages_of_a_prompt_read_under_inference_mode():
    _, k, _ = make(23, 4, 2)
    bounds, expected = routing.PageBounds(page_size=4), routing.PageBounds(page_size=4)
    with torch.inference_mode():
        bounds.append(k[:, :22])
    bounds.append(k[:, 22:])
    expected.append(k)
    assert torch.equal(bounds.bounds[:, :, :6], expected.bounds[:, :, :6])


def test_the_indexer_by_its_definition(monkeypatch):
    q, k, _ = make(13, 4, 2)
    x = torch.randn(2, 13, 6, dtype=torch.float64, requires_grad=True)
    indexer = routing.Indexer(6, 2, 3, top_k=4, dtype=torch.float64)
    a, b, w = indexer.query(x).unflatten(-1, (2, 3)), indexer.key(x), indexer.weight(x)
    future = torch.ones(13, 13, dtype=torch.bool).triu(1)
    index = sum(w[..., j, None] * (a[:, :, j] @ b.mT).relu() for j in range(2)) / math.sqrt(3)
    index = index.masked_fill(future, -math.inf)
    target = attention_weights(q, k, Dilated((13,), (1,)), is_causal=True).to_dense().mean(1)
    told = index.log_softmax(-1).masked_fill(future, 0.0)
    expected = (target * (target.clamp(min=1e-300).log() - told)).sum(-1).mean()
    parameters = list(indexer.parameters())
    wanted = torch.autograd.grad(expected, parameters)
    for chunk in (2**24, 1):
        monkeypatch.setattr(ranking, "CHUNK", chunk)
        loss = indexer.loss(x, q, k)
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
        for found, reference in zip(torch.autograd.grad(loss, parameters), wanted, strict=True):
            torch.testing.assert_close(found, reference, rtol=0, atol=1e-12)
        layout = indexer(x)
        assert layout.is_causal
        assert layout.counts[0, 0].tolist() == [1, 2, 3] + [4] * 10
        kept = index.detach().masked_fill(~layout.dense_mask()[:, 0], -math.inf)
        torch.testing.assert_close(kept.logsumexp(-1), index.detach().topk(4).values.logsumexp(-1))
        assert torch.equal(indexer.choose(x, 3), indexer.choose(x)[:, -3:])
    with torch.no_grad():
        torch.testing.assert_close(indexer.loss(x, q, k), expected.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("channels", [2, 4])
def test_an_indexer_rotates_its_first_channels(channels):
    """The index equals its definition, and knows distances alone: a shift of positions changes nothing."""
    q, k, _ = make(13, 4, 2)
    x = torch.randn(2, 13, 6, dtype=torch.float64)
    indexer = routing.Indexer(6, 32, 4, top_k=4, dtype=torch.float64)
    tables = rotary_tables(torch.arange(13), channels, dtype=torch.float64)
    a, b = indexer.query(x).unflatten(-1, (32, 4)), indexer.key(x)[:, :, None]
    a, b = (torch.cat([rotate(y[..., :channels], tables), y[..., channels:]], -1) for y in (a, b))
    products = torch.einsum("bqjd,bkd->bqkj", a, b[:, :, 0]).relu()
    index = torch.einsum("bqj,bqkj->bqk", indexer.weight(x), products)
    index = index.masked_fill(torch.ones(13, 13, dtype=torch.bool).triu(1), -math.inf)
    expected = index.topk(4).indices[:, 4:].sort(-1).values
    assert torch.equal(indexer.choose(x, tables=tables)[:, 4:].sort(-1).values, expected)
    assert not torch.equal(indexer.choose(x)[:, 4:].sort(-1).values, expected)
    later = rotary_tables(torch.arange(100, 113).expand(2, -1), channels, dtype=torch.float64)
    assert torch.equal(indexer(x, tables=later).dense_mask(), indexer(x, tables=tables).dense_mask())
    losses = [indexer.loss(x, q, k, tables=pair) for pair in (tables, later, None)]
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=1e-12)
    assert abs(losses[2] - losses[0]) > 1e-6


def test_tokens_that_an_indexer_always_chooses():
    x = torch.randn(2, 20, 6)
    seen = routing.Indexer(6, 2, 4, top_k=5, leading=2, recent=2)(x).dense_mask()[:, 0]
    place = torch.arange(20)
    always = (place < 2) | (place > place[:, None] - 2)
    assert seen[always.expand(2, -1, -1).tril()].all()
    assert torch.equal(seen.sum(-1), (place + 1).clamp(max=5).expand(2, -1))
    assert repr(routing.Indexer(6, top_k=5, recent=1)).splitlines()[1].endswith("top_k=5, leading=0, recent=1")


def test_an_indexer_learns_where_attention_falls():
    q, k, _ = make(64, 2, 2, head_dim=8)
    x = torch.cat([q.flatten(2), k.flatten(2)], -1).float()
    q, k = q.float(), k.float()
    weights = attention_weights(q, k, Dilated((64,), (1,)), is_causal=True).to_dense().mean(1)
    indexer = routing.Indexer(32, 4, 16, top_k=8)

    def held():
        return float((weights * indexer(x).dense_mask()[:, 0]).sum() / weights.topk(8).values.sum())

    before = held()
    optimizer = torch.optim.Adam(indexer.parameters(), lr=2e-2)
    for _ in range(60):
        optimizer.zero_grad()
        indexer.loss(x, q, k).backward()
        optimizer.step()
    assert before < 0.7
    assert held() > 0.9


def test_an_indexer_in_half_precision_chooses_in_single():
    indexer, x = routing.Indexer(16, 2, 8, top_k=4), torch.randn(1, 40, 16)
    with torch.autocast("cpu", torch.bfloat16):
        key = indexer.keys(x)
        assert key.dtype == torch.float32
        assert indexer._index(x, None, key, 0, slice(0, 40), torch.zeros(1, 40)).dtype == torch.float32
    assert indexer.choose(x[:, :0]).shape == (1, 0, 0)
    assert indexer.choose(x, 0).shape == (1, 0, 4)


@pytest.mark.parametrize("chunk", [1, ranking.CHUNK])
def test_an_indexer_chooses_for_new_tokens_from_kept_keys(chunk, monkeypatch):
    monkeypatch.setattr(ranking, "CHUNK", chunk)
    indexer = routing.Indexer(16, 2, 8, top_k=4, leading=1, recent=1, dtype=torch.float64)
    x = torch.randn(2, 20, 16, dtype=torch.float64)
    tables = rotary_tables(torch.arange(20), 6, dtype=torch.float64)
    parts = []
    for at in (slice(13), slice(13, 20)):
        parts.append(indexer.keys(x[:, at], tables=tuple(y[at] for y in tables)))
    keys = torch.cat(parts, 1)
    for new in (0, 1, 7, 20):
        last = tuple(y[20 - new :] for y in tables)
        chosen = indexer.choose_next(x[:, 20 - new :], keys, tables=last)
        assert torch.equal(chosen, indexer.choose(x, new, tables=tables))


def test_the_loss_of_new_tokens_from_kept_keys():
    """It is what the newest queries add to the loss of all tokens."""
    x, q, k = (torch.randn(2, 12, *rest, dtype=torch.float64) for rest in ((6,), (4, 3), (2, 3)))
    indexer = routing.Indexer(6, 2, 3, top_k=4, dtype=torch.float64)
    lengths = torch.tensor([12, 5])
    keys = indexer.keys(x)
    total = 0.0
    for first, stop in ((0, 4), (4, 9), (9, 12)):
        new = slice(first, stop)
        held = lengths.clamp(max=stop)
        part = indexer.loss(x[:, new], q[:, new], k[:, :stop], keys=keys[:, :stop], lengths=held)
        total += part * (held - first).clamp(min=0).sum()
    torch.testing.assert_close(total / 17, indexer.loss(x, q, k, lengths=lengths), rtol=0, atol=1e-12)
    assert indexer.loss(x[:, :0], q[:, :0], k, keys=keys) == 0
    with pytest.raises(ValueError, match=r"keys must be \(batch=2, seq, head_dim=3\)"):
        indexer.loss(x, q, k, keys=keys[:, 1:])


@pytest.mark.parametrize("forced", [{}, {"leading": 2, "recent": 1}], ids=str)
def test_an_indexer_treats_a_sample_as_if_it_were_alone(forced):
    """Packed, and padded at either end or between tokens; padding holds NaN, and what would be chosen."""
    indexer, tokens = routing.Indexer(6, 2, 3, top_k=5, dtype=torch.float64, **forced), [13, 4, 0, 22]
    edges, parameters = [0, 13, 17, 17, 39], list(indexer.parameters())
    samples = [[torch.randn(1, n, *shape, dtype=torch.float64) for shape in ((6,), (4, 8), (2, 8))] for n in tokens]
    alone = [indexer(sample[0]) if n else None for sample, n in zip(samples, tokens, strict=True)]
    loss = sum(indexer.loss(*sample) * n for sample, n in zip(samples, tokens, strict=True) if n) / 39
    wanted = torch.autograd.grad(loss, parameters)

    def padded(rows):
        found = [y.new_full((4, 30, *y.shape[2:]), torch.nan) for y in samples[0]]
        for one, own, at in zip(range(4), samples, rows, strict=True):
            for together, y in zip(found, own, strict=True):
                together[one, at] = y[0]
        return found

    left, right = ([slice(30 - n, 30) for n in tokens], [slice(0, n) for n in tokens])
    apart = [torch.randperm(30)[:n].sort().values for n in tokens]
    mask = {name: torch.ones(4, 30, dtype=torch.bool) for name in ("left", "right", "apart")}
    for name, rows in (("left", left), ("right", right), ("apart", apart)):
        for one, at in enumerate(rows):
            mask[name][one, at] = False
    packed = [torch.cat(x, 1) for x in zip(*samples, strict=True)]
    calls = {
        "cu_seqlens": (packed, {"cu_seqlens": edges}, right),
        "lengths": (padded(right), {"lengths": tokens}, right),
        "right": (padded(right), {"key_padding_mask": mask["right"]}, right),
        "left": (padded(left), {"key_padding_mask": mask["left"]}, left),
        "apart": (padded(apart), {"key_padding_mask": mask["apart"]}, apart),
    }
    for inputs, ragged, rows in calls.values():
        layout = indexer(inputs[0], **ragged)
        assert layout.batch_size == 4
        for one, (own, at) in enumerate(zip(alone, rows, strict=True)):
            seen = layout.dense_mask()[one, 0]
            assert own is None or torch.equal(seen[at][:, at], own.dense_mask()[0, 0])
            assert int(seen.sum()) == (0 if own is None else own.nnz)
        found = indexer.loss(*inputs, **ragged)
        torch.testing.assert_close(found, loss, rtol=0, atol=1e-12)
        for gradient, reference in zip(torch.autograd.grad(found, parameters), wanted, strict=True):
            torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-12)
    last = indexer.choose(padded(left)[0], 2, key_padding_mask=mask["left"])
    assert torch.equal(last, indexer.choose(padded(left)[0], key_padding_mask=mask["left"])[:, -2:])
    assert torch.equal(
        indexer.choose(packed[0], 3, cu_seqlens=edges), indexer.choose(packed[0], cu_seqlens=edges)[:, -3:]
    )
    hidden = {"key_padding_mask": torch.ones(4, 30, dtype=torch.bool)}
    assert indexer(padded(left)[0], **hidden).nnz == 0
    assert indexer.loss(*padded(left), **hidden) == 0


Q, K, V = (torch.zeros(1, 64, heads, 8) for heads in (4, 2, 2))
PAGES, FULL_PAGES = routing.PageBounds(), routing.PageBounds()
FULL_PAGES.append(K)
LISTS = torch.zeros(1, 1, 2, dtype=torch.int64)
BAD = [
    ("page_size must be a positive integer; got 0", lambda: routing.PageBounds(0)),
    ("page_size must be a positive integer; got 1.5", lambda: routing.PageBounds(1.5)),
    ("no keys to choose among; append", lambda: PAGES.best(Q[:, -1:], 1)),
    ("number must be a positive integer; got 0", lambda: PAGES.best(Q[:, -1:], 0)),
    (r"q must be .* \(batch, new, heads, head_dim\), .*; got shape \(64, 4, 8\)", lambda: FULL_PAGES.best(Q[0], 1)),
    ("q must be .* of a batch of 1, ", lambda: FULL_PAGES.best(Q[:, -1:].expand(2, -1, -1, -1), 1)),
    ("q must be .* a multiple of 2 heads", lambda: FULL_PAGES.best(Q[:, -1:, :3], 1)),
    ("q must be .* head_dim 8; got", lambda: FULL_PAGES.best(Q[:, -1:, :, :4], 1)),
    (r"k must be a floating \(batch, new, .*; got torch.float32 of shape \(64, 2, 8\)", lambda: PAGES.append(K[0])),
    ("k must be a floating .*; got torch.int64", lambda: PAGES.append(K.long())),
    (r"k must have the batch, .* before it, \(1, 2, 8, torch.float32\); got .* \(2, 64, 2, 8\)",
     lambda: FULL_PAGES.append(K.expand(2, -1, -1, -1))),
    (r"k must have the batch, .*; got torch.float32 of shape \(1, 64, 4, 8\)", lambda: FULL_PAGES.append(Q)),
    ("k must have the batch, .* and dtype .*; got torch.float64", lambda: FULL_PAGES.append(K.double())),
    ("top_k must be a positive integer; got 0", lambda: routing.Indexer(8, top_k=0)),
    ("top_k=4 is less than leading=3 and recent=2 together", lambda: routing.Indexer(8, top_k=4, leading=3, recent=2)),
    (r"tables must be \(cos, sin\), each .* got shape \(63, 1, 8\)",
     lambda: routing.Indexer(8).choose(torch.zeros(1, 64, 8), tables=(torch.zeros(63, 1, 8),) * 2)),
    (r"tables must be .*up to head_dim=4; got shape \(64, 1, 8\)",
     lambda: routing.Indexer(8, 2, 4).choose(torch.zeros(1, 64, 8), tables=(torch.zeros(64, 1, 8),) * 2)),
    ("q and k must have the batch and seq of x", lambda: routing.Indexer(8).loss(torch.zeros(1, 63, 8), Q, K)),
    ("scale must be a finite number.*got nan",
     lambda: routing.Indexer(8).loss(torch.zeros(1, 64, 8), Q, K, scale=torch.nan)),
    (r"chosen must be .* a batch of 1 and 1, 2 or 4 lists; .* got \(1, 3, 2\)",
     lambda: listed_attention(Q[:, -1:], K, V, torch.zeros(1, 3, 2).long())),
    (r"chosen must be .* new is 64; got \(1, 1, 3, 2\)",
     lambda: listed_attention(Q, K, V, torch.zeros(1, 1, 3, 2).long())),
    (r"lengths must lie in \[2, 65\); got 1",
     lambda: listed_attention(Q[:, -2:], K, V, LISTS, lengths=torch.tensor([1]))),
    (r"agree in batch .* got \(1, 1, 4, 8\) and \(3,",
     lambda: listed_attention(Q[:, -1:], *(x.expand(3, -1, -1, -1) for x in (K, V)), torch.zeros(1, 1, 2).long())),
    ("heads of k and v must divide those of q; got 4 query and 0",
     lambda: listed_attention(Q[:, -1:], K[:, :, :0], V[:, :, :0], LISTS)),
    ("floating dtype; got torch.int64", lambda: listed_attention(*(x.long() for x in (Q[:, -1:], K, V)), LISTS)),
    ("scale must be a finite number.*got nan", lambda: listed_attention(Q[:, -1:], K, V, LISTS, scale=math.nan)),
    ("block_size must be a positive integer; got 0", lambda: listed_attention(Q[:, -1:], K, V, LISTS, 0)),
    ("chosen must be an int64 .*; got NoneType", lambda: listed_attention(Q[:, -1:], K, V, None)),
    ("chosen must be an int64 .*; got torch.bool on cpu", lambda: listed_attention(Q[:, -1:], K, V, LISTS > 0)),
    ("chosen must be .* q's device, cpu; got .* on meta", lambda: listed_attention(Q[:, -1:], K, V, LISTS.to("meta"))),
    (r"chosen, key blocks or -1 for none, must lie in \[-1, 4\); got 4",
     lambda: listed_attention(Q[:, -1:], K, V, LISTS + 4, 16)),
    (r"chosen, .* must lie in \[-1, 4\); got -2", lambda: listed_attention(Q[:, -1:], K, V, LISTS - 2, 16)),
    (r"a batch of 1 and .* got \(5, 1, 2\)", lambda: listed_attention(Q[:, -1:], K, V, torch.zeros(5, 1, 2).long())),
    (r"q and k must agree in batch and head_dim; got .* and \(1, 64, 2, 4\)",
     lambda: routing.Indexer(8).loss(torch.zeros(1, 64, 8), Q, K[..., :4])),
    (r"q must have 4 .*; got shape \(1, 64, 32\)",
     lambda: routing.Indexer(8).loss(torch.zeros(1, 64, 8), Q.flatten(2), K)),
    (r"x must be \(batch, seq, embed_dim=8\); got shape \(64, 8\)", lambda: routing.Indexer(8)(torch.zeros(64, 8))),
    (r"x must be .* got shape \(1, 64, 7\)", lambda: routing.Indexer(8).loss(torch.zeros(1, 64, 7), Q, K)),
    (r"keys must be \(batch=1, seq, head_dim=4\) with a seq of at least 3, .* got shape \(1, 2, 4\)",
     lambda: routing.Indexer(8, 2, 4).choose_next(torch.zeros(1, 3, 8), torch.zeros(1, 2, 4))),
    (r"keys must be .* got shape \(1, 3, 5\)",
     lambda: routing.Indexer(8, 2, 4).choose_next(torch.zeros(1, 3, 8), torch.zeros(1, 3, 5))),
    ("new must be.*from 0 to 3; got 5", lambda: routing.Indexer(8).choose(torch.zeros(1, 3, 8), 5)),
    ("x has no tokens to learn from", lambda: routing.Indexer(8).loss(torch.zeros(1, 0, 8), Q[:, :0], K[:, :0])),
]  # fmt: skip


@pytest.mark.parametrize(("message", "call"), BAD)
def test_what_is_refused(message, call, unchecked):
    with pytest.raises(ValueError, match=message):
        call()


RAGGED = {
    "topk": partial(routing.topk_blocks, density=0.4),
    "topp": partial(routing.topp_blocks, mass=0.8),
    "sampled": partial(routing.sampled_blocks, density=0.4),
    "hashes": partial(routing.lsh_blocks, density=0.4),
    "two stages": partial(routing.hierarchical_blocks, density=0.4, region=2),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("choose", RAGGED.values(), ids=RAGGED.keys())
def test_a_sample_chooses_what_it_chooses_alone(choose, is_causal):
    """Packed and padded, one sample without a token among them; padding holds what would be chosen if it were seen."""
    choose = partial(choose, block_size=8, is_causal=is_causal)
    tokens = [37, 5, 64, 0, 22]
    edges = [sum(tokens[:i]) for i in range(len(tokens) + 1)]
    samples = [[torch.randn(1, n, heads, 16) for heads in (4, 2)] for n in tokens]
    alone = [choose(*sample) if n else None for sample, n in zip(samples, tokens, strict=True)]
    packed = choose(*(torch.cat(x, 1) for x in zip(*samples, strict=True)), cu_seqlens=edges)
    assert (packed.batch_size, packed.seq_len) == (5, 64)
    tensors = [
        torch.cat([torch.nn.functional.pad(y, (0, 0, 0, 0, 0, 80 - y.shape[1]), value=9.0) for y in x])
        for x in zip(*samples, strict=True)
    ]
    padded = choose(*tensors, lengths=tokens)
    assert (padded.batch_size, padded.seq_len) == (5, 80)
    mask = torch.arange(80) >= torch.tensor(tokens)[:, None]
    assert choose(*tensors, key_padding_mask=mask) == padded
    for i, (own, n) in enumerate(zip(alone, tokens, strict=True)):
        for together in (packed, padded):
            assert own is None or together.select(batch=[i]).prefix(n) == own
            assert own is None or together.select(batch=[i]).nnz == own.nnz


def test_samples_that_do_not_fit():
    q = k = torch.randn(2, 16, 2, 4)
    with pytest.raises(ValueError, match=r"lengths must lie in \[0, 16\]"):
        routing.topk_blocks(q, k, 0.5, block_size=8, lengths=[3, 17])
    with pytest.raises(ValueError, match="cu_seqlens must ascend from 0 to 16"):
        routing.topk_blocks(q[:1], k[:1], 0.5, block_size=8, cu_seqlens=[0, 9])
    with pytest.raises(ValueError, match="cu_seqlens packs samples along seq and needs batch 1"):
        routing.topk_blocks(q, k, 0.5, block_size=8, cu_seqlens=[0, 16])
    with pytest.raises(ValueError, match="lengths and cu_seqlens both given"):
        routing.topk_blocks(q[:1], k[:1], 0.5, block_size=8, lengths=[3], cu_seqlens=[0, 16])
    mask = torch.zeros(2, 16, dtype=torch.bool)
    with pytest.raises(ValueError, match="key_padding_mask is given beside lengths or cu_seqlens"):
        routing.topk_blocks(q, k, 0.5, block_size=8, lengths=[3, 4], key_padding_mask=mask)
    with pytest.raises(ValueError, match=r"key_padding_mask must have shape \(batch, seq\) = \(2, 16\)"):
        routing.topk_blocks(q, k, 0.5, block_size=8, key_padding_mask=mask[:, 1:])
    mask[1, 3] = True
    with pytest.raises(ValueError, match="got a hidden token before others in sample 1"):
        routing.topk_blocks(q, k, 0.5, block_size=8, key_padding_mask=mask)


@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.thorough)])
@by_name_in_a_graph
def test_chooses_in_one_graph(processor, which, compiling_python):
    """A graph holds one operator with the lists of a call outside, for whole and ragged batches of any length.

    Two selectors are exported; each of the two others is compiled with two of the kinds of batches, then with the rest.
    """
    compiling_python(
        f"""
        which = {which}
        """
        """
        import torch
        from functools import partial
        from dilated_attention import block_sparse_attention
        from dilated_attention.routing import hierarchical_blocks, sampled_blocks, topk_blocks, topp_blocks

        def attend(q, k, choose, **ragged):
            return block_sparse_attention(q, k, k, choose(q, k, **ragged), **ragged)

        def inputs(n):
            return torch.randn(2, n, 4, 8), torch.randn(2, n, 2, 8)

        class Attention(torch.nn.Module):
            def __init__(self, choose):
                super().__init__()
                self.choose = choose

            def forward(self, q, k):
                return attend(q, k, self.choose)

        length = torch.export.Dim("length", min=64, max=4096)
        for choose, strict in (
            (partial(sampled_blocks, density=0.3, block_size=32, scale=-0.5), which == 1),
            (partial(hierarchical_blocks, density=0.3, block_size=16, is_causal=True), which == 0),
        ):
            layer = Attention(choose)
            sizes = ({1: length}, {1: length})
            program = torch.export.export(layer, inputs(300), dynamic_shapes=sizes, strict=strict).module()
            for x in (inputs(300), inputs(200)):
                assert torch.equal(program(*x), layer(*x))

        for first, choose in (
            (which, partial(topk_blocks, density=0.4, per_kv_head=True, block_size=(16, 32))),
            (1 - which, partial(topp_blocks, mass=0.9, block_size=32, is_causal=True)),
        ):
            torch._dynamo.reset()
            compiled = torch.compile(attend, fullgraph=True, backend="eager", dynamic=True)
            for n in (300, 200):
                kinds = (
                    (2, {}),
                    (2, {"lengths": torch.tensor([n, 7])}),
                    (1, {"cu_seqlens": torch.tensor([0, 50, n])}),
                    (1, {"key_padding_mask": torch.arange(n)[None] >= n - 40}),
                )
                for batch, ragged in kinds[first::2]:
                    x = (*(y[:batch] for y in inputs(n)), choose)
                    assert torch.equal(compiled(*x, **ragged), attend(*x, **ragged))
        """,
        processor,
    )


def test_lists_given_in_one_graph(compiling_python):
    """A graph makes layouts of an indexer's choice, masks and compressed rows, and checks them when it runs."""
    compiling_python(
        """
        import torch
        from dilated_attention import BlockLayout, attention
        from dilated_attention.routing import Indexer, LearnedRouter

        torch.manual_seed(0)
        indexer = Indexer(16, 2, 8, top_k=8)
        router = LearnedRouter(4, 8, 0.4, num_kv_heads=2, block_size=16, is_causal=True)
        causal = {"is_causal": True}
        ends, edges, mask = torch.tensor([50]), torch.tensor([0, 20, 64]), torch.arange(64)[None] < 9

        def routed(q, k, x):
            found = router(q, k)
            return attention(q, k, k, found, **causal) + attention(q, k, k, found.select(heads=[1, 0, 3, 2]), **causal)

        cases = (
            lambda q, k, x: attention(q, k, k, indexer(x), **causal),
            routed,
            lambda q, k, x: attention(q, k, k, BlockLayout.from_mask(x[0, :4, :4].tril() > 0, None, 16, **causal)),
            lambda q, k, x: attention(q, k, k, BlockLayout.from_indices(torch.arange(5), x[0, :4, 0].long(), 64, 16)),
            lambda q, k, x: q * indexer.loss(x, q, k, cu_seqlens=edges),
        )
        traced = (  # the fake operators are those of the cases above
            lambda q, k, x: attention(q, k, k, indexer(x, lengths=ends), lengths=ends, **causal),
            lambda q, k, x: attention(q, k, k, indexer(x, cu_seqlens=edges), cu_seqlens=edges, **causal),
            lambda q, k, x: attention(q, k, k, indexer(x, key_padding_mask=mask), key_padding_mask=mask, **causal),
            lambda q, k, x: router.relaxed_attention(q, k, k),
        )
        q, k, x = torch.randn(1, 64, 4, 8), torch.randn(1, 64, 2, 8), torch.randn(1, 64, 16).abs()
        q.requires_grad_()
        for backend, functions in (("aot_eager", cases), ("eager", traced)):
            for attend in functions:
                compiled = torch.compile(attend, fullgraph=True, backend=backend)
                found, expected = (torch.autograd.grad(f(q, k, x).sin().sum(), q)[0] for f in (compiled, attend))
                torch.testing.assert_close(found, expected)

        def chosen(q, k, x):
            return attention(q, k, k, BlockLayout.from_topk(x, (1, 16), **causal), **causal)

        compiled, own = torch.compile(chosen, fullgraph=True, backend="eager"), torch.arange(64)[:, None] // 16
        assert torch.equal(compiled(q, k, own), chosen(q, k, own))
        for wrong in (own + 1, own + 9, own - 2):
            try:
                compiled(q, k, wrong)
            except RuntimeError as error:
                assert "do not fit its blocks" in str(error)
            else:
                raise AssertionError("attended")
        """
    )
