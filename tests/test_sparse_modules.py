"""Modules that select their keys against their definitions in loops, and token by token."""

from __future__ import annotations

import copy
import math
import pickle
import re
import sys
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from dilated_attention import Dilated, UnsupportedError, ranking
from dilated_attention.nn import (
    BlockAttentionMixture,
    IndexedAttention,
    NativeSparseAttention,
    SelectionCache,
    rotary_tables,
    rotate,
)
from dilated_attention.nn.block_mixture import MixtureChoice
from processors import by_name_in_a_graph

HEAD_DIM = 4


def native(heads, kv_heads, query_block, **options):
    settings = {
        "compress_block": 4, "compress_stride": 2, "block_size": 4, "num_selected": 4, "local_blocks": 2, "window": 6,
        "query_block": query_block,
    }  # fmt: skip
    return NativeSparseAttention(heads * HEAD_DIM, heads, kv_heads, dtype=torch.float64, **{**settings, **options})


def mixture(heads, kv_heads, query_block, **options):
    settings = {"block_size": 4, "top_k": 3, "query_block": query_block}
    return BlockAttentionMixture(heads * HEAD_DIM, heads, kv_heads, dtype=torch.float64, **{**settings, **options})


def indexed(heads, kv_heads, query_block, **options):
    """A query has its own keys: there is no query_block."""
    settings = {"top_k": 5, "index_heads": 2, "leading": 1}
    return IndexedAttention(heads * HEAD_DIM, heads, kv_heads, dtype=torch.float64, **{**settings, **options})


MAKE = [native, mixture, indexed]


def learning(module):
    """The parameters that get a gradient through the output."""
    return [parameter for name, parameter in module.named_parameters() if not name.startswith("indexer.")]


def softmax_over(query, keys, values):
    """Return the softmax of one query over lists of rows."""
    if not keys:
        return torch.zeros_like(query)
    weight = (torch.stack(keys) @ query / math.sqrt(len(query))).softmax(0)
    return weight @ torch.stack(values)


def best_blocks(importance, own, number, always):
    """The blocks in `always`, then the most important ones up to `own`."""
    rest = sorted((i for i in range(own + 1) if i not in always), key=lambda i: -float(importance[i]))
    return sorted([*always, *rest][:number])


def tokens_of(blocks, size, last):
    return [j for block in blocks for j in range(block * size, (block + 1) * size) if j <= last]


def naive_native(module, x, rotary=None):
    """Sample by sample, head by head, token by token, with plain softmax over explicit lists."""
    heads, kv_heads, size = module.num_heads, module.num_kv_heads, module.block_size
    length, stride = module.key_pooling.length, module.key_pooling.stride
    rows = []
    for sample in x:
        projected = module.input(sample).view(len(sample), -1, HEAD_DIM)
        q, *parts = projected.split([heads] + [kv_heads] * (2 * module.branches), 1)
        gates = module.gate(sample).sigmoid().view(len(sample), module.branches, heads)
        turned = [q, *parts[2::2]]
        if rotary is not None:
            turned = [rotate(part[None], rotary)[0] for part in turned]
        q, parts[2::2] = turned[0], turned[1:]

        def pool(pooling, part, head, start, turn):
            block = part[start : start + length, head].flatten()
            row = pooling.row(F.gelu(pooling.hidden(block)))
            if turn and rotary is not None:
                row = rotate(row[None, None, None], tuple(table[start + length - 1 :][:1] for table in rotary))[0, 0, 0]
            return row

        starts = list(range(0, len(sample) - length + 1, stride))
        keys, values = (
            [[pool(pooling, part, head, start, turn) for start in starts] for head in range(kv_heads)]
            for pooling, part, turn in ((module.key_pooling, parts[0], True), (module.value_pooling, parts[1], False))
        )
        outs = torch.zeros(len(sample), heads, HEAD_DIM, dtype=x.dtype)
        for t in range(len(sample)):
            for head in range(heads):
                kv, group = head // (heads // kv_heads), heads // kv_heads
                ended = [i for i, start in enumerate(starts) if start + length - 1 <= t]
                branches = [softmax_over(q[t, head], [keys[kv][i] for i in ended], [values[kv][i] for i in ended])]

                chooser = t // module.query_block * module.query_block
                importance = torch.zeros(chooser // size + 1, dtype=x.dtype)
                seen = [i for i, start in enumerate(starts) if start + length - 1 <= chooser]
                for member in range(kv * group, (kv + 1) * group) if seen else ():
                    score = torch.stack([keys[kv][i] for i in seen]) @ q[chooser, member] / math.sqrt(HEAD_DIM)
                    for i, p in zip(seen, score.detach().softmax(0), strict=True):
                        for piece in range(starts[i], starts[i] + length, stride):
                            importance[piece // size] += float(p)
                own = chooser // size
                always = {0, *range(max(0, own - module.local_blocks + 1), own + 1)}
                chosen = best_blocks(importance, own, module.num_selected, always)
                listed = tokens_of(chosen, size, t)
                branches.append(softmax_over(q[t, head], *([part[j, kv] for j in listed] for part in parts[2:4])))

                low = max(0, t // size * size - (module.window - 1)) // size * size
                branches.append(softmax_over(q[t, head], *(list(part[low : t + 1, kv]) for part in parts[4:6])))
                if module.pattern is not None:
                    listed = [
                        j
                        for w, r, offsets in zip(
                            module.pattern.segment_lengths,
                            module.pattern.dilation_rates,
                            module.pattern.offset_table(kv_heads),
                            strict=True,
                        )
                        if t % w % r == offsets[kv]
                        for j in range(t // w * w, t + 1)
                        if j % w % r == offsets[kv]
                    ]
                    branches.append(softmax_over(q[t, head], *([part[j, kv] for j in listed] for part in parts[6:8])))
                outs[t, head] = sum(gates[t, i, head] * out for i, out in enumerate(branches))
        rows.append(module.output(outs.flatten(1)))
    return torch.stack(rows)


def naive_mixture(module, x, rotary=None):
    heads, kv_heads, size = module.num_heads, module.num_kv_heads, module.block_size
    rows = []
    for sample in x:
        projected = module.input(sample).view(len(sample), -1, HEAD_DIM)
        q, k, v = projected.split([heads, kv_heads, kv_heads], 1)
        if rotary is not None:
            q, k = (rotate(part[None], rotary)[0] for part in (q, k))
        outs = torch.zeros(len(sample), heads, HEAD_DIM, dtype=x.dtype)
        for t in range(len(sample)):
            for head in range(heads):
                kv = head // (heads // kv_heads)
                chooser = t // module.query_block * module.query_block
                own = chooser // size
                query = q[chooser, head].detach()
                gate = [query @ k.detach()[i * size : (i + 1) * size, kv].mean(0) for i in range(own)] + [0.0]
                listed = tokens_of(best_blocks(gate, own, module.top_k, {own}), size, t)
                outs[t, head] = softmax_over(q[t, head], *([part[j, kv] for j in listed] for part in (k, v)))
        rows.append(module.output(outs.flatten(1)))
    return torch.stack(rows)


def naive_indexed(module, x, rotary=None):
    heads, kv_heads, indexer = module.num_heads, module.num_kv_heads, module.indexer
    rows = []
    for sample in x:
        q, k, v = module.input(sample).view(len(sample), -1, HEAD_DIM).split([heads, kv_heads, kv_heads], 1)
        query = indexer.query(sample).detach().view(len(sample), -1, HEAD_DIM)
        key = indexer.key(sample).detach().view(len(sample), 1, HEAD_DIM)
        weight = indexer.weight(sample).detach()
        if rotary is not None:
            q, k, query, key = (rotate(part[None], rotary)[0] for part in (q, k, query, key))
        outs = torch.zeros(len(sample), heads, HEAD_DIM, dtype=x.dtype)
        for t in range(len(sample)):
            index = [float((query[t] @ key[s, 0]).relu() @ weight[t]) for s in range(t + 1)]
            always = {s for s in range(t + 1) if s < indexer.leading or t - s < indexer.recent}
            chosen = best_blocks(index, t, indexer.top_k, always)
            for head in range(heads):
                kv = head // (heads // kv_heads)
                outs[t, head] = softmax_over(q[t, head], *([part[s, kv] for s in chosen] for part in (k, v)))
        rows.append(module.output(outs.flatten(1)))
    return torch.stack(rows)


FAR = Dilated((8, 16), (1, 2))
CASES = [  # tokens, heads, kv_heads, query_block, options of native
    (1, 2, 1, 1, {}),
    (3, 2, 2, 2, {}),  # no compressed key
    (19, 4, 2, 1, {}),
    (23, 2, 1, 4, {"pattern": FAR}),
    (21, 2, 2, 2, {"num_selected": 16, "block_size": 8, "compress_block": 2}),
    (22, 3, 1, 2, {"window": 1, "local_blocks": 1, "num_selected": 2, "compress_block": 8, "bias": True}),
]


def made(kind, case):
    tokens, heads, kv_heads, query_block, options = case
    if kind == "native":
        module = native(heads, kv_heads, query_block, **options)
    elif kind == "indexed":
        module = indexed(heads, kv_heads, query_block, top_k=2 + tokens % 4, bias=options.get("bias", False))
    else:
        options = {name: value for name, value in options.items() if name in ("block_size", "bias")}
        module = mixture(heads, kv_heads, query_block, top_k=1 + tokens % 4, **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(3.0)  # sharper scores
    return module, torch.randn(2, tokens, heads * HEAD_DIM, dtype=torch.float64)


NAIVE = {"native": naive_native, "mixture": naive_mixture, "indexed": naive_indexed}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} tokens")
@pytest.mark.parametrize("kind", NAIVE)
def test_definition(kind, case):
    module, x = made(kind, case)
    x.requires_grad_()
    rotary = None if case is CASES[2] else rotary_tables(torch.arange(x.shape[1]), HEAD_DIM, dtype=torch.float64)
    out, expected = module(x, rotary), NAIVE[kind](module, x, rotary)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-11)
    leaves = [x, *module.parameters()]
    cotangent = torch.randn_like(out)
    found, wanted = (
        torch.autograd.grad(value, leaves, cotangent, allow_unused=True, materialize_grads=True)
        for value in (out, expected)
    )
    for gradient, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("edges", [[0, 7, 7, 19], torch.tensor([0, 1, 19]), (0, 19)], ids=len)
@pytest.mark.parametrize("kind", NAIVE)
def test_packed_samples(kind, edges):
    module, x = made(kind, (19, 4, 2, 1, {}))
    x = x[:1].requires_grad_()
    samples = [slice(*pair) for pair in pairwise(list(edges)) if pair[0] < pair[1]]
    positions = torch.cat([torch.arange(at.stop - at.start) for at in samples])
    rotary = rotary_tables(positions, HEAD_DIM, dtype=torch.float64)
    alone = torch.cat([module(x[:, at], tuple(table[at] for table in rotary)) for at in samples], 1)
    packed = module(x, rotary, cu_seqlens=edges)
    torch.testing.assert_close(packed, alone, rtol=0, atol=0)
    inputs = [x, *learning(module)]
    found, expected = (torch.autograd.grad(out.sin().sum(), inputs) for out in (packed, alone))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", MAKE)
def test_packed_samples_that_do_not_fit(make):
    layer, x = make(2, 1, 1), torch.randn(2, 9, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"cu_seqlens .* needs batch 1; got batch 2"):
        layer(x, cu_seqlens=[0, 9])
    with pytest.raises(ValueError, match=r"cu_seqlens must ascend from 0 to 9.*got \[0, 8\]"):
        layer(x[:1], cu_seqlens=[0, 8])
    with pytest.raises(UnsupportedError, match=r"cu_seqlens with a cache .* make one call per sample"):
        layer(x[:1], cu_seqlens=[0, 9], cache=SelectionCache())
    assert layer(x[:1, :0], cu_seqlens=[0, 0]).shape == (1, 0, 8)


@pytest.mark.parametrize("prompt", [1, 14])
@pytest.mark.parametrize("case", CASES[1:], ids=lambda case: f"{case[0]} tokens")
@pytest.mark.parametrize("kind", NAIVE)
@torch.no_grad()
def test_token_by_token(kind, case, prompt):
    module, x = made(kind, case)
    rotary = rotary_tables(torch.arange(x.shape[1]), HEAD_DIM, dtype=torch.float64)
    cache = SelectionCache()
    rows = [
        module(x[:, at], tuple(table[at] for table in rotary), cache=cache)
        for at in (slice(0, prompt), slice(prompt, prompt + 7), slice(prompt + 7, None))
        if at.start < x.shape[1]
    ]
    torch.testing.assert_close(torch.cat(rows, 1), module(x, rotary), rtol=0, atol=1e-12)
    assert cache.length == x.shape[1]


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("kind", NAIVE)
def test_a_prompt_read_in_inference_mode(kind, gradients):
    module, x = made(kind, CASES[3])
    expected = module(x)
    cache = SelectionCache()
    with torch.inference_mode():
        rows = [module(x[:, :7], cache=cache)]
    with torch.set_grad_enabled(gradients):
        rows += [module(x[:, at : at + 1], cache=cache) for at in range(7, x.shape[1])]
    torch.testing.assert_close(torch.cat(rows, 1), expected, rtol=0, atol=1e-12)
    if gradients:
        rows[-1].sum().backward()


@pytest.mark.parametrize("kind", NAIVE)
@torch.no_grad()
def test_nothing_looks_ahead(kind):
    module, x = made(kind, CASES[3])
    other = x.clone()
    other[:, 13:] = torch.randn_like(other[:, 13:])
    torch.testing.assert_close(module(other)[:, :13], module(x)[:, :13], rtol=0, atol=1e-13)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_querys_own_block_comes_before_scores_that_overflow(value):
    key = torch.ones(1, 3, 1, 2)
    key[0, 0] = value
    assert MixtureChoice(4, 4, 1).blocks(torch.ones(1, 3, 1, 2), 0, key).flatten().tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", NAIVE)
@torch.no_grad()
def test_pieces_and_single_precision(kind, monkeypatch):
    module, x = made(kind, CASES[2])
    whole = module(x)
    monkeypatch.setattr(ranking, "CHUNK", 1)
    torch.testing.assert_close(module(x), whole, rtol=0, atol=1e-13)
    assert module.to(torch.bfloat16)(x.to(torch.bfloat16)).isfinite().all()


@pytest.mark.parametrize("make", MAKE)
def test_the_meta_device(make):
    """Nothing is chosen there, nor held in memory: shapes alone follow, for half a million tokens as for a few."""
    module = make(4, 2, 2).to("meta")
    x = torch.empty(2, 19, 16, dtype=torch.float64, device="meta", requires_grad=True)
    module(x).sum().backward()
    assert x.grad.shape == x.shape
    assert module(x[:1], cu_seqlens=[0, 7, 19]).shape == (1, 19, 16)
    cache = SelectionCache()
    assert [module(some, cache=cache).shape[1] for some in x.split([17, 2], 1)] == [17, 2]
    assert module(torch.empty(1, 2**19, 16, dtype=torch.float64, device="meta")).shape == (1, 2**19, 16)


@pytest.mark.parametrize("kind", NAIVE)
def test_single_precision_is_near(kind):
    """Long enough for the kernels of single precision, which the definition's short cases do not reach."""
    if kind == "native":
        options = {"compress_block": 4, "num_selected": 5, "window": 32, "pattern": Dilated((64, 128), (1, 2))}
        module = native(4, 2, 4, block_size=16, **options)
    elif kind == "indexed":
        module = indexed(4, 2, 4, top_k=20)
    else:
        module = mixture(4, 2, 4, block_size=16)
    x = torch.randn(1, 150, 4 * HEAD_DIM, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn_like(x)
    exact = torch.autograd.grad(module(x), [x, *learning(module)], cotangent)
    single = copy.deepcopy(module).float()
    y = x.detach().float().requires_grad_()
    found = torch.autograd.grad(single(y), [y, *learning(single)], cotangent.float())
    for gradient, reference in zip(found, exact, strict=True):
        assert float((gradient - reference).norm()) < 1e-5 * (1 + float(reference.norm()))


@torch.no_grad()
def test_a_cache_keeps_of_old_tokens_what_may_be_seen():
    cache = SelectionCache()
    module, x = native(2, 1, 1), torch.randn(1, 90, 8, dtype=torch.float64)
    for start in range(0, 90, 30):
        module(x[:, start : start + 30], cache=cache)
    assert cache.last("pooled").shape[1] == 4
    assert cache.last("window").shape[1] <= 6 + 2 * 4
    assert cache.last("compressed").shape[1] == (90 - 4) // 2 + 1
    assert cache.rows["window"].buffer.shape[1] <= 2 * (6 + 2 * 4 + 1)
    assert cache.nbytes <= 2 * 2 * 8 * HEAD_DIM * (90 + 44 + 15 + 5)


def test_a_cache_is_of_one_layer_and_one_batch():
    layer, other, cache = native(2, 1, 1), native(2, 1, 1), SelectionCache()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    layer(x, cache=cache)
    with pytest.raises(ValueError, match="cache holds the tokens of another layer"):
        other(x, cache=cache)
    with pytest.raises(ValueError, match="cache holds 2 samples, got x with 1"):
        layer(x[:1], cache=cache)


@pytest.mark.parametrize("make", MAKE)
@torch.no_grad()
def test_a_saved_cache_goes_on(make):
    layer, cache = make(2, 1, 2), SelectionCache()
    x = torch.randn(2, 50, 8, dtype=torch.float64)
    layer(x[:, :40], cache=cache)
    loaded, expected = pickle.loads(pickle.dumps(cache)), layer(x[:, 40:], cache=cache)
    with pytest.raises(ValueError, match="cache holds 2 samples, got x with 1"):
        copy.deepcopy(loaded).used_by(layer, 1)
    assert torch.equal(layer(x[:, 40:], cache=loaded), expected)
    with pytest.raises(ValueError, match="cache holds the tokens of another layer"):
        make(2, 1, 2)(x[:, :1], cache=loaded)


@pytest.mark.parametrize("make", MAKE)
@torch.no_grad()
def test_cropped_and_reordered_caches(make):
    """Rejected tokens leave nothing behind, wherever blocks, windows and buffers end; beams continue their samples."""
    layer, cache = make(2, 1, 2), SelectionCache(croppable=9)
    x, rejected = (torch.randn(3, 60, 8, dtype=torch.float64) for _ in range(2))
    whole, at = layer(x), 7
    layer(x[:, :at], cache=cache)
    for right, wrong in ((1, 8), (3, 0), (2, 5), (9, 0), (1, 1), (4, 4), (0, 9), (11, 3), (20, 0)):
        out = layer(torch.cat([x[:, at : at + right], rejected[:, :wrong]], 1), cache=cache)
        torch.testing.assert_close(out[:, :right], whole[:, at : at + right], rtol=0, atol=1e-12)
        at += right
        cache.crop(at)
        assert cache.length == at
    with pytest.raises(ValueError, match=r"at most 9 tokens .* here to a length of 49; got length=48: give"):
        cache.crop(48)
    cache.reorder(torch.tensor([2, 2, 0, 1]))
    for _ in range(2):
        out = layer(x[[2, 2, 0, 1], at : at + 1], cache=cache)
        torch.testing.assert_close(out, whole[[2, 2, 0, 1], at : at + 1], rtol=0, atol=1e-12)
        cache.crop(at)
    with pytest.raises(ValueError, match=r"samples must lie in \[0, 4\); got 4"):
        cache.reorder([4])
    empty = SelectionCache(croppable=0)
    empty.reorder([0])
    layer(x[:, :4], cache=empty)
    with pytest.raises(ValueError, match="at most 0 tokens"):
        empty.crop(3)


@pytest.mark.parametrize("make", MAKE)
def test_a_cache_of_a_call_that_failed_is_free(make):
    layer, cache = make(2, 1, 1), SelectionCache()
    with pytest.raises(RuntimeError):
        layer(torch.randn(2, 5, 8), cache=cache)  # not the layer's dtype
    layer(torch.randn(1, 5, 8, dtype=torch.float64), cache=cache)
    assert cache.length == 5


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("make", MAKE)
@torch.no_grad()
def test_a_refused_call_leaves_the_cache_as_it_was(make, new, monkeypatch):
    """Refused at its last token, wherever that lies in a block; the same call then goes on as if nothing had been."""
    layer, x = make(2, 1, 1), torch.randn(1, 30, 8, dtype=torch.float64)
    whole, module = layer(x), sys.modules[type(layer).__module__]
    attend = module.listed_attention
    for start in range(8, 27):
        cache, calls = SelectionCache(), iter(range(new))
        layer(x[:, :start], cache=cache)

        def refusing(*arguments, calls=calls):
            if next(calls) == new - 1:
                raise ValueError("refused")
            return attend(*arguments)

        monkeypatch.setattr(module, "listed_attention", refusing)
        with pytest.raises(ValueError, match="refused"):
            layer(torch.randn(1, new, 8, dtype=torch.float64), cache=cache)
        monkeypatch.setattr(module, "listed_attention", attend)
        assert cache.length == start
        torch.testing.assert_close(layer(x[:, start:], cache=cache), whole[:, start:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", MAKE)
def test_a_gradient_of_tokens_after_a_cache(make):
    """A later token's rows go where earlier ones were read."""
    layer, cache, x = make(2, 1, 1), SelectionCache(), torch.randn(1, 14, 8, dtype=torch.float64)
    layer(x[:, :10], cache=cache)
    new = x[:, 10:].requires_grad_()
    layer(new, cache=cache).sum().backward()
    assert new.grad.isfinite().all()


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("shape", [(2, 0, 8), (0, 20, 8)])
def test_no_tokens(make, shape):
    assert make(2, 1, 1)(torch.zeros(shape, dtype=torch.float64)).shape == shape


@pytest.mark.parametrize("shape", [(5, 8), (1, 2, 5, 8), (2, 5, 7)])
@pytest.mark.parametrize("make", MAKE)
def test_other_shapes(make, shape, unchecked):
    message = rf"x must be \(batch, seq, embed_dim=8\); got shape {re.escape(str(shape))}"
    with pytest.raises(ValueError, match=message):
        make(2, 1, 1)(torch.zeros(shape, dtype=torch.float64))


@pytest.mark.parametrize("make", MAKE)
def test_tables_of_other_tokens(make, unchecked):
    layer, cache, x = make(2, 1, 1), SelectionCache(), torch.randn(2, 9, 8, dtype=torch.float64)

    def tables(*positions, head_dim=HEAD_DIM):
        return rotary_tables(torch.tensor(positions), head_dim, dtype=torch.float64)

    layer(x[:, :8], tables(*range(8)), cache=cache)
    for wrong in (tables(*range(9)), tables(8, head_dim=2), tables([8], [8], [8])):
        with pytest.raises(ValueError, match=r"rotary must be .* = \(1, 1, 4\), a batch before them or none, of the"):
            layer(x[:, 8:], wrong, cache=cache)
    found = layer(x[:, 8:], tables([8], [8]), cache=cache)
    torch.testing.assert_close(found, layer(x, tables(*range(9)))[:, 8:], rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"rotary must be .* = \(9, 1, 4\), .*; got \(1, 1, 4\)"):
        layer(x, tables(5))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: native(2, 3, 1), "num_kv_heads must divide num_heads=2; got 3"),
        (lambda: native(2, 1, 3), "query_block=3 must divide block_size=4"),
        (lambda: native(2, 1, 1, block_size=65537), r"block_size must be.*from 1 to 65536; got 65537"),
        (lambda: native(2, 1, 1, compress_block=3), "compress_stride=2 must divide compress_block=3"),
        (lambda: native(2, 1, 1, block_size=5), "compress_stride=2 must divide block_size=5"),
        (lambda: native(2, 1, 1, num_selected=2), "num_selected=2 must have room for the first block and local_blocks"),
        (lambda: native(2, 1, 1, window=0), "window must be.*positive.*got 0"),
        (lambda: native(2, 1, 1, pattern=(8, 2)), r"pattern must be a Dilated without compat, or None; got \(8, 2\)"),
        (lambda: native(2, 1, 1, backend="x"), "backend must be one of .*got 'x'"),
        (lambda: mixture(2, 1, 1, backend="x"), "backend must be one of .*got 'x'"),
        (lambda: mixture(2, 1, 1, top_k=0), "top_k must be.*positive.*got 0"),
        (lambda: indexed(2, 3, 1), "num_kv_heads must divide num_heads=2; got 3"),
        (lambda: indexed(2, 1, 1, index_heads=0), "num_heads must be.*positive.*got 0"),
        (lambda: indexed(2, 1, 1, recent=5), "top_k=5 is less than leading=1 and recent=5 together"),
        (lambda: mixture(2, 1, 3), "query_block=3 must divide block_size=4"),
    ],
)
def test_what_is_refused(make, message, unchecked):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.thorough)])
@by_name_in_a_graph
def test_compiles_in_one_graph_and_exports(processor, backend, compiling_python):
    """AOTAutograd takes five times as long as Dynamo for `NativeSparseAttention`; `make test` leaves it out there."""
    compiling_python(
        f"""
        backend = {backend!r}
        """
        """
        import torch
        from torch._dynamo.testing import CompileCounterWithBackend
        from dilated_attention.nn import BlockAttentionMixture, IndexedAttention, NativeSparseAttention

        torch.manual_seed(0)
        shared = {"block_size": 16, "query_block": 4}
        sizes = {"compress_block": 8, "compress_stride": 4, "num_selected": 3, "window": 8, **shared}
        batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=32, max=1 << 20)
        any_length = {"dynamic_shapes": ({0: batch, 1: length},), "prefer_deferred_runtime_asserts_over_guards": True}
        for module, chosen, graphs in (
            (NativeSparseAttention(32, 4, 2, **sizes), backend, 1 if backend == "eager" else 2),
            (BlockAttentionMixture(32, 4, 2, top_k=3, **shared), "aot_eager", 2 if backend == "eager" else 1),
            (IndexedAttention(32, 4, 2, top_k=24, index_heads=2), "eager", 1),
        ):
            counter = CompileCounterWithBackend(chosen)
            compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
            for length in (70, 33, 47):
                x = torch.randn(2, length, 32, requires_grad=True)
                found, expected = (
                    (out, *torch.autograd.grad(out.sin().sum(), [x, *module.input.parameters()]))
                    for out in (compiled(x), module(x))
                )
                for a, b in zip(found, expected):
                    torch.testing.assert_close(a, b)
            assert counter.frame_count == graphs, counter.frame_count
            program = torch.export.export(module, (x,), **any_length).module()
            for shape in ((1, 32), (3, 1500), (2, 47)):
                x = torch.randn(*shape, 32)
                torch.testing.assert_close(program(x), module(x))  # short calls may get another backend
        """,
        processor,
    )


def test_compiled_layers_read_token_by_token(compiling_python):
    compiling_python(
        """
        import torch
        from torch._dynamo.testing import CompileCounter
        from dilated_attention.nn import (
            BlockAttentionMixture, IndexedAttention, NativeSparseAttention, SelectionCache,
        )

        shared = {"block_size": 4, "query_block": 2}
        sizes = {"compress_block": 4, "compress_stride": 2, "num_selected": 3, "window": 8, **shared}
        for module in (
            BlockAttentionMixture(32, 4, 2, **shared),
            NativeSparseAttention(32, 4, 2, **sizes),
            IndexedAttention(32, 4, 2, top_k=8),
        ):
            counter = CompileCounter()
            compiled, cache = torch.compile(module, backend=counter), SelectionCache()
            x = torch.randn(1, 100, 32)
            with torch.no_grad():
                rows = [compiled(some, cache=cache) for some in x[:, :60].split([41, 1, 1, 1, 16], 1)]
                graphs = counter.frame_count
                rows += [compiled(some, cache=cache) for some in x[:, 60:].split(1, 1)]
                assert counter.frame_count == graphs
                torch.testing.assert_close(torch.cat(rows, 1), module(x))
        """
    )


def test_a_program_names_the_choice_that_is_not_loaded():
    options = '{"block_size": [4, 16], "is_causal": true, "per_kv_head": true}'
    q = torch.zeros(1, 16, 2, 8)
    with pytest.raises(RuntimeError, match=r"'Unknown'.*import dilated_attention\.nn"):
        torch.ops.dilated_attention.choose(q, q, None, None, None, 16, "Unknown", options)
