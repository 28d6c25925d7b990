"""Blocks chosen over a mesh, in real processes over gloo: the layouts, results and gradients of one device."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

import processes
from dilated_attention import BlockLayout, Dilated, attention, routing
from dilated_attention.errors import UnsupportedError
from dilated_attention.models import BlockMixture, IndexedKeys, LongNetConfig, LongNetLM, NativeSparse
from dilated_attention.nn import (
    BlockAttentionMixture,
    IndexedAttention,
    NativeSparseAttention,
    Rotary,
    SelectionCache,
)
from dilated_attention.nn.selection import tables_at
from dilated_attention.parallel import choose_blocks, exchange_plan, sequence_range, set_context_parallel, traffic
from dilated_attention.parallel.comm import Traffic, link_of
from test_longnet import Adapted
from tolerances import TOLERANCE, relative_error

SHAPES = {  # seq_len, heads, kv_heads, batch, dtype
    "a head a rank or more": (203, 8, 8, 2, torch.float64),
    "grouped, uneven heads": (150, 6, 3, 1, torch.float64),
    "one key-value head": (67, 2, 1, 2, torch.float64),
    "fewer tokens than ranks": (3, 4, 2, 1, torch.float64),
    "single precision": (160, 4, 4, 1, torch.float32),
}


def selectors(is_causal):
    options = {"block_size": (8, 16), "is_causal": is_causal}
    return {
        "topk": partial(routing.topk_blocks, density=0.3, **options),
        "topk, KV heads": partial(routing.topk_blocks, density=0.3, per_kv_head=True, **options),
        "topp": partial(routing.topp_blocks, mass=0.6, **options),
        "sampled": partial(routing.sampled_blocks, density=0.3, **options),
        "two stages": partial(routing.hierarchical_blocks, density=0.3, region=2, **options),
        "hashes": partial(routing.lsh_blocks, density=0.3, **options),
        "one list": lambda q, k: BlockLayout.local(q.shape[1], 20, **options),
    }


def inputs(name):
    seq_len, heads, kv_heads, batch, dtype = SHAPES[name]
    generator = torch.Generator().manual_seed(3)
    numbers = heads, kv_heads, kv_heads, heads
    return [torch.randn(batch, seq_len, n, 8, generator=generator, dtype=torch.float64).to(dtype) for n in numbers]


def learned(q, k, v, dout, layout, is_causal, **options):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, layout, is_causal=is_causal, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def run_choices(is_causal):
    answers = {}
    for name, (seq_len, *_) in SHAPES.items():
        tensors = inputs(name)
        own = slice(*sequence_range(seq_len, dist.group.WORLD))
        shards = [x[:, own] for x in tensors]
        for kind, choose in selectors(is_causal).items():
            layout = choose_blocks(choose, *shards[:2], dist.group.WORLD, seq_len=seq_len)
            wanted = choose(*tensors[:2])
            same = layout == (wanted.select(heads=[0] * tensors[1].shape[2]) if kind == "one list" else wanted)
            answers[name, kind] = same, None
            if kind == "topk":
                options = {"mesh": dist.group.WORLD, "seq_len": seq_len}
                answers[name, kind] = same, [x.numpy() for x in learned(*shards, layout, is_causal, **options)]
    return answers


@pytest.mark.parametrize(
    ("size", "is_causal"), [(3, False), (2, True), pytest.param(5, True, marks=pytest.mark.thorough)]
)
def test_choices_over_a_mesh_are_those_of_one_device(size, is_causal):
    ranks = processes.run(size, run_choices, is_causal)
    for name, kind in ranks[0]:
        assert all(rank[name, kind][0] for rank in ranks), (name, kind)
        if kind == "topk":
            tensors = inputs(name)
            right = learned(*tensors, selectors(is_causal)[kind](*tensors[:2]), is_causal)
            for wanted, *parts in zip(right, *(rank[name, kind][1] for rank in ranks), strict=True):
                assert (
                    relative_error(torch.cat([torch.from_numpy(x) for x in parts], 1), wanted)
                    <= TOLERANCE[wanted.dtype]
                ), name


def run_refusals():
    """All ranks, then some, make a call that cannot be served; then one chooses other blocks than the others."""
    rank, messages = dist.get_rank(), []
    q, k = (torch.randn(1, 8, heads, 4) for heads in (4, 2))
    usual = {"density": 0.5, "block_size": 4, "is_causal": True}
    others = [{"block_size": 8}, {"block_size": (4, 8)}, {"is_causal": False}]
    calls = (
        partial(choose_blocks, partial(routing.topk_blocks, density=2.0), q, k),
        partial(choose_blocks, partial(routing.topk_blocks, density=0.5), q[:, : 8 - rank], k[:, : 8 - rank]),
        partial(choose_blocks, partial(routing.topk_blocks, density=0.5), q, k[:, :4]),
        partial(choose_blocks, lambda q, k: BlockLayout.local(7, 4), q, k),
        *[
            partial(choose_blocks, partial(routing.topk_blocks, **usual | (other if rank == 1 else {})), q, k)
            for other in others
        ],
        partial(choose_blocks, lambda q, k: None, q, k),
        partial(choose_blocks, partial(routing.topk_blocks, density=0.5), q, k.double()),
    )
    for call in calls:
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            call(dist.group.WORLD)
        messages.append(str(caught.value))
    return messages


def test_what_is_refused_is_refused_on_every_rank():
    for messages in processes.run(3, run_refusals):  # the third rank has no heads
        assert "choose refused its heads on rank 0" in messages[0]
        assert "rank 1 has seq_len=21, elsewhere seq_len=24" in messages[1]
        assert "x has 4 rows in dim 1; the shard of rank 0" in messages[2]
        assert "choose refused its heads on rank 0" in messages[3]
        assert all("do not fit together" in message for message in messages[4:7])
        assert "rank 1 has q_block=8, elsewhere q_block=4; k_block=8, elsewhere k_block=4" in messages[4]
        assert "rank 1 has k_block=8, elsewhere k_block=4 (elsewhere: rank 0)" in messages[5]
        assert "rank 1 has is_causal=0, elsewhere is_causal=1" in messages[6]
        assert "choose refused its heads on rank 0" in messages[7]
        assert "got k torch.float64 and q torch.float32" in messages[8]


def run_one_misfit():
    """One rank passes a k that does not fit its q, before and after a call that fits."""
    rank, messages = dist.get_rank(), []
    q, k = (torch.randn(1, 8, heads, 4) for heads in (4, 2))
    choose = partial(routing.topk_blocks, density=0.5, block_size=4)
    for _ in range(2):
        with pytest.raises(ValueError, match="q and k must agree") as caught:
            choose_blocks(choose, q, k[..., : 4 - rank % 2], dist.group.WORLD)
        messages.append(str(caught.value))
        attention(q, k, k, choose_blocks(choose, q, k, dist.group.WORLD), mesh=dist.group.WORLD)
    return messages


def test_a_rank_whose_tensors_do_not_fit_is_named_on_every_rank():
    for messages in processes.run(3, run_one_misfit):
        for message in messages:
            assert message.startswith("rank 1 refused its context parallel call"), message
            assert "got (1, 8, 4, 4) and (1, 8, 2, 3)" in message


MODULES = {
    "mixture": (BlockAttentionMixture, 90, {"block_size": 16, "top_k": 3, "query_block": 4}),
    "mixture, blocks longer than shards": (BlockAttentionMixture, 75, {"block_size": 36, "top_k": 2, "query_block": 9}),
    "mixture, fewer tokens than ranks": (BlockAttentionMixture, 2, {"block_size": 1, "top_k": 2, "query_block": 1}),
    "native": (
        NativeSparseAttention, 90,
        {"compress_block": 8, "compress_stride": 4, "block_size": 16, "num_selected": 3, "window": 12,
         "query_block": 8},
    ),
    "native, each query, pattern": (
        NativeSparseAttention, 61,
        {"compress_block": 6, "compress_stride": 3, "block_size": 12, "num_selected": 4, "local_blocks": 1, "window": 5,
         "query_block": 1, "pattern": Dilated((8, 32), (1, 2))},
    ),
    "native, adapted": (
        NativeSparseAttention, 45,
        {"compress_block": 8, "compress_stride": 4, "block_size": 16, "num_selected": 3, "window": 12},
    ),
    "native, blocks longer than shards": (
        NativeSparseAttention, 41,
        {"compress_block": 32, "compress_stride": 8, "block_size": 16, "num_selected": 2, "local_blocks": 1,
         "window": 40, "query_block": 16},
    ),
    "native, a block and no more": (NativeSparseAttention, 20, {"query_block": 4}),
    "native, fewer tokens than ranks": (NativeSparseAttention, 2, {"query_block": 1}),
    "indexed": (IndexedAttention, 61, {"top_k": 9, "index_heads": 3, "leading": 1}),
    "indexed, no more tokens than are chosen": (IndexedAttention, 16, {"top_k": 16}),
    "indexed, fewer tokens than ranks": (IndexedAttention, 2, {"top_k": 1}),
}  # fmt: skip


def module_of(name):
    torch.manual_seed(0)
    kind, seq_len, options = MODULES[name]
    x, dout = torch.randn(2, 2, seq_len, 32, dtype=torch.float64)
    module = kind(32, 4, 2, dtype=torch.float64, **options)
    if "adapted" in name:
        module.key_pooling.hidden = Adapted(module.key_pooling.hidden, torch.nn.Linear(64, 8, dtype=torch.float64))
    return module, x, dout, Rotary(8).tables(torch.arange(seq_len), dtype=x.dtype)


def trained(module, x, dout, tables):
    x = x.clone().requires_grad_()
    out = module(x, tables)
    return [out.detach(), *torch.autograd.grad(out, [x, *module.parameters()], dout, allow_unused=True)]


def run_modules():
    found = {}
    for name in MODULES:
        module, x, dout, tables = module_of(name)
        set_context_parallel(module, dist.group.WORLD, seq_len=x.shape[1])
        own = slice(*sequence_range(x.shape[1], dist.group.WORLD))
        with pytest.raises(UnsupportedError, match="cache"):
            module(x[:, own], cache=SelectionCache())
        shard = trained(module, x[:, own], dout[:, own], tables_at(tables, own))
        found[name] = [None if x is None else x.numpy() for x in shard]
    return found


@pytest.mark.parametrize("size", [3, pytest.param(8, marks=pytest.mark.thorough)])
def test_modules_over_a_mesh_are_those_of_one_device(size):
    ranks = processes.run(size, run_modules)
    for name in MODULES:
        out, dx, *gradients = trained(*module_of(name))
        of_ranks = [[None if x is None else torch.from_numpy(x) for x in rank[name]] for rank in ranks]
        for i, wanted in enumerate((out, dx)):
            found = torch.cat([rank[i] for rank in of_ranks], 1)
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")
        for wanted, *parts in zip(gradients, *(rank[2:] for rank in of_ranks), strict=True):
            parts = [part for part in parts if part is not None]
            found = torch.stack(parts).sum(0) if parts else None
            assert (found is None or not found.any()) if wanted is None else relative_error(found, wanted) <= 1e-12, (
                name
            )


def drawn(seed):
    """A random case: q, k, v, dout, a selector and is_causal; or a module, x, dout and rotary tables."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    kv_heads, seq_len, batch = draw.choice([1, 2, 3]), draw.choice([1, 2, 9, 40, 77, 130]), draw.choice([1, 2])
    heads, is_causal = kv_heads * draw.choice([1, 2]), draw.random() < 0.6
    if draw.random() < 0.5:
        block = draw.choice([(8, 16), (16, 8), (5, 5), (32, 12)])
        options = {"block_size": block, "is_causal": is_causal, "scale": draw.choice([None, 0.7, -0.3])}
        shared = {"per_kv_head": draw.random() < 0.3, "floor": draw.choice([0, 1, 3])}
        density = draw.choice([0.1, 0.3, 1.0])
        choose = draw.choice(
            [
                partial(routing.topk_blocks, density=density, **options, **shared),
                partial(routing.topp_blocks, mass=draw.choice([0.3, 0.9]), **options, **shared),
                partial(routing.sampled_blocks, density=density, **options, **shared),
                partial(routing.hierarchical_blocks, density=density, region=2, **options),
            ]
        )
        tensors = [torch.randn(batch, seq_len, n, 8, dtype=torch.float64) for n in (heads, kv_heads, kv_heads, heads)]
        return *tensors, choose, is_causal
    size = draw.choice([4, 12, 32])
    query_block = draw.choice([n for n in (1, 2, 4) if size % n == 0])
    options = {"block_size": size, "query_block": query_block, "dtype": torch.float64}
    kind = draw.choice([BlockAttentionMixture, IndexedAttention, NativeSparseAttention])
    if kind is IndexedAttention:
        numbers = {"top_k": draw.choice([2, 5, 20]), "leading": draw.choice([0, 1]), "index_heads": draw.choice([1, 3])}
        module = IndexedAttention(8 * heads, heads, kv_heads, dtype=torch.float64, **numbers)
    elif kind is BlockAttentionMixture:
        module = BlockAttentionMixture(8 * heads, heads, kv_heads, top_k=draw.choice([1, 2, 4]), **options)
    else:
        stride = draw.choice([2, 4])
        module = NativeSparseAttention(
            8 * heads, heads, kv_heads, compress_block=stride * draw.choice([1, 2, 4]), compress_stride=stride,
            num_selected=draw.choice([2, 4]), local_blocks=1, window=draw.choice([1, 7, 50]), **options,
        )  # fmt: skip
    x, dout = torch.randn(2, batch, seq_len, 8 * heads, dtype=torch.float64)
    return module, x, dout, Rotary(8).tables(torch.arange(seq_len), dtype=x.dtype)


def run_drawn(seeds):
    found, mesh = [], dist.group.WORLD
    for seed in seeds:
        *tensors, choose, is_causal = case = drawn(seed)
        seq_len = case[1].shape[1]
        own = slice(*sequence_range(seq_len, mesh))
        if isinstance(case[0], torch.nn.Module):
            module, x, dout, tables = case
            set_context_parallel(module, mesh, seq_len=seq_len)
            results = trained(module, x[:, own], dout[:, own], tables_at(tables, own))
        else:
            shards = [x[:, own] for x in tensors]
            layout = choose_blocks(choose, *shards[:2], mesh, seq_len=seq_len)
            assert layout == choose(*tensors[:2]), seed
            results = learned(*shards, layout, is_causal, mesh=mesh, seq_len=seq_len)
        found.append([None if x is None else x.numpy() for x in results])
    return found


def check_drawn(size, seeds):
    """Compare random cases over `size` ranks with one device; the gradients of all weights as one tensor."""
    for seed, *ranks in zip(seeds, *processes.run(size, run_drawn, seeds), strict=True):
        case = drawn(seed)
        is_module = isinstance(case[0], torch.nn.Module)
        right = trained(*case) if is_module else learned(*case[:4], case[4](*case[:2]), case[5])
        ranks = [[None if x is None else torch.from_numpy(x) for x in rank] for rank in ranks]
        pairs = [(torch.cat([rank[i] for rank in ranks], 1), right[i]) for i in range(2 if is_module else 4)]
        if is_module:
            pairs.append((sum(flat(rank[2:], case[0]) for rank in ranks), flat(right[2:], case[0])))
        for number, (found, wanted) in enumerate(pairs):
            assert relative_error(found, wanted) <= 1e-12, (size, seed, number)


def flat(gradients, module):
    """One tensor of the gradients of all parameters, 0 where there is none."""
    pairs = zip(gradients, module.parameters(), strict=True)
    return torch.cat([(torch.zeros_like(x) if gradient is None else gradient).flatten() for gradient, x in pairs])


@pytest.mark.parametrize("size", [2, pytest.param(5, marks=pytest.mark.thorough)])
def test_random_choices_over_a_mesh(size):
    check_drawn(size, range(1000 * size, 1000 * size + 10))


def run_traffic():
    return (*mixture_traffic(), indexed_traffic())


def mixture_traffic():
    """This rank's traffic in forward, and what is counted for the attention with these lists."""
    module, x, _, tables = module_of("mixture")
    layout = module._selected(*chosen_from(module, x, tables), [0, x.shape[1]], 0, None)
    set_context_parallel(module, dist.group.WORLD, transport="exchange", seq_len=x.shape[1])
    own, link = slice(*sequence_range(x.shape[1], dist.group.WORLD)), link_of(dist.group.WORLD)
    link.traffic = Traffic()
    with torch.no_grad():
        module(x[:, own], tables_at(tables, own))
    plan = exchange_plan(
        layout, x.shape[1], 4, dist.get_world_size(), dist.get_rank(), num_kv_heads=2, head_dim=8, batch=len(x),
        dtype=x.dtype, is_causal=True, transport="exchange",
    )  # fmt: skip
    return link.traffic.bytes_received, plan.bytes_received


def indexed_traffic():
    """This rank's traffic in forward."""
    module, x, _, tables = module_of("indexed")
    set_context_parallel(module, dist.group.WORLD, seq_len=x.shape[1])
    own, link = slice(*sequence_range(x.shape[1], dist.group.WORLD)), link_of(dist.group.WORLD)
    link.traffic = Traffic()
    with torch.no_grad():
        module(x[:, own], tables_at(tables, own))
    return link.traffic.bytes_received


def chosen_from(module, x, tables):
    q, (k, _) = module._project(x, tables)
    return q, module._means(k)


def test_modules_receive_what_they_choose_from_and_what_they_chose():
    size, seq_len, block, query_block, batch = 3, 90, 16, 4, 2
    kept, mean, lists = seq_len // block, batch * 2 * 8 * 8, batch * 4 * 3 * 8  # rows in bytes
    edges = [0, 30, 60, 90]
    means = max(min(kept, -(-stop // block)) - start // block for start, stop in pairwise(edges))
    chosen = max(-(-stop // query_block) - -(-start // query_block) for start, stop in pairwise(edges))
    pooled = (means + traffic.seal_rows(mean)) * mean + (chosen + traffic.seal_rows(lists)) * lists
    ranks = processes.run(size, run_traffic)
    for received, attended, _ in ranks:
        assert received == attended + (size - 1) * pooled

    module, x, _, tables = module_of("indexed")
    edges, index_row, row = [0, 20, 40, 61], batch * 8 * 8, batch * 2 * 16 * 8
    index_keys = (21 + traffic.seal_rows(index_row)) * index_row
    asked = (1 + traffic.seal_rows(61)) * 61
    seen = module.indexer(x, tables=tables).dense_mask().any(0)[0]
    for (*_, received), (start, stop) in zip(ranks, pairwise(edges), strict=True):
        chosen = seen[start:stop].any(0)
        counts = [int(chosen[first:last].sum()) for first, last in pairwise(edges) if first != start]
        rows = sum(count + traffic.seal_rows(row) for count in counts if count)
        assert received == (size - 1) * (index_keys + asked) + rows * row


LANGUAGE = LongNetConfig(vocab_size=20, embed_dim=16, num_layers=2, num_heads=2, num_kv_heads=1)
SELECTIONS = (
    NativeSparse(compress_block=4, compress_stride=2, block_size=8, num_selected=3, window=5, query_block=4),
    BlockMixture(block_size=8, top_k=2, query_block=2),
    IndexedKeys(top_k=7, index_heads=2, leading=1),
)


def language_gradients(selection, mesh=None):
    torch.manual_seed(0)
    model, tokens = LongNetLM(replace(LANGUAGE, selection=selection)).double(), torch.randint(20, (2, 52))
    if mesh is not None:
        set_context_parallel(model, mesh)
    if isinstance(selection, IndexedKeys):
        loss = sum(model.losses(tokens, lengths=[52, 14]))
    else:
        loss = model.loss(tokens)
    return [x.detach().numpy() for x in (loss, *torch.autograd.grad(loss, list(model.parameters())))]


def run_language():
    return [language_gradients(selection, dist.group.WORLD) for selection in SELECTIONS]


def test_language_models_that_select_over_a_mesh():
    ranks = processes.run(3, run_language)
    for i, selection in enumerate(SELECTIONS):
        for number, (wanted, *parts) in enumerate(
            zip(language_gradients(selection), *(rank[i] for rank in ranks), strict=True)
        ):
            found = torch.from_numpy(parts[0] if number == 0 else sum(parts) / len(parts))
            assert relative_error(found, torch.from_numpy(wanted)) <= 1e-12


if __name__ == "__main__":  # python tests/test_parallel_choice.py 500: 500 random cases over 2 to 8 ranks
    number, sizes = int(sys.argv[1]), range(2, 9)
    for size in sizes:
        count = number // len(sizes) + (size - sizes[0] < number % len(sizes))
        check_drawn(size, range(10_000 * size, 10_000 * size + count))
        print(f"{count} cases over {size} ranks: equal one device")
