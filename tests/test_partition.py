"""The partition of a sharded pattern against its definition, by brute force, at every world size up to 16."""

from __future__ import annotations

import time
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from conformance import band_of, random_calls
from dilated_attention import BlockLayout, Dilated, Neighborhood
from dilated_attention.parallel import exchange_plan
from dilated_attention.parallel.block_partition import problem
from dilated_attention.parallel.partition import (
    Sharding,
    balanced_bounds,
    contributed,
    count_of,
    count_union,
    crosses,
    crossings,
    keys_of,
    local_plan,
    message_rows,
    messages,
    owner_splits,
    received,
    remote,
    sent,
)
from dilated_attention.plan import ALL, EVERY, WHOLE, Branches, Plan, Rows


def members(rows: Rows) -> torch.Tensor:
    """`(segments, count)` token indices."""
    return rows.start + torch.arange(rows.segments)[:, None] * rows.segment + torch.arange(rows.count) * rows.stride


def definition(sharding: Sharding) -> torch.Tensor:
    """Return how often each query sees each key: `(heads, N, N)`, from the definition alone."""
    n = sharding.seq_len
    token = torch.arange(n)
    grid, position = torch.zeros(n, dtype=torch.int64), token.clone()
    for i, (start, stop) in enumerate(sharding.grids()):
        grid[start:stop], position[start:stop] = i, token[start:stop] - start
    counts = torch.zeros(sharding.num_heads, n, n, dtype=torch.int64)
    bands = sharding.branches.bands or (EVERY,) * len(sharding.branches.offsets)
    leading = sharding.branches.leading or (0,) * len(sharding.branches.offsets)
    for segment, rate, offsets, (low, high), first in zip(
        sharding.branches.segment_lengths,
        sharding.branches.dilation_rates,
        sharding.branches.offsets,
        bands,
        leading,
        strict=True,
    ):
        if (low, high) != EVERY:  # a window
            distance = position - position[:, None]
            shown = (distance % rate == 0) & (low <= distance // rate) & (distance // rate <= high)
            counts += (grid[:, None] == grid) & (shown | (position < first) | (position < first)[:, None])
            continue
        same = (grid[:, None] == grid) & (position[:, None] // segment == position // segment)
        for head, offset in enumerate(offsets):
            part = (position % segment) % rate == offset
            counts[head] += same & part[:, None] & part
    return counts.tril() if sharding.is_causal else counts


def add_plan(counts: torch.Tensor, plan: Plan, key_tokens: torch.Tensor, lower: int) -> None:
    """Add what a plan computes to counts; `key_tokens[row, head]` is the global token of a key row, -1 for none."""
    written = torch.zeros(plan.num_heads, plan.seq_len, dtype=torch.bool)
    for group in plan.groups:
        queries, keys = members(group.queries), members(group.keys)
        assert 0 <= queries.min() <= queries.max() < plan.seq_len
        for i in range(group.heads):
            head = group.head + i * group.head_stride
            if group.first:
                assert not written[head][queries].any()
            written[head][queries.flatten()] = True
            for q, k in zip(queries, keys, strict=True):
                tokens = key_tokens[k, head]
                assert (tokens >= 0).all()
                seen = band_of(group).long()
                counts[head].index_put_((q[:, None] + lower, tokens[None]), seen, accumulate=True)
    if plan.covered:
        assert written.all()


def check(sharding: Sharding) -> None:
    heads, expected = sharding.num_heads, definition(sharding)
    everything = torch.arange(sharding.seq_len * heads)
    leaving = [messages(sharding, sent(sharding, rank)) for rank in range(sharding.world_size)]
    for rank in range(sharding.world_size):
        lower, upper = sharding.shard(rank)
        counts = torch.zeros_like(expected)
        own = torch.arange(lower, upper)[:, None].expand(-1, heads)
        plan = local_plan(sharding, rank)
        assert plan.square == all(group.queries == group.keys for group in plan.groups)
        assert plan.square or any(sharding.branches.leading)
        add_plan(counts, plan, own, lower)

        part = remote(sharding, rank, [(c, (c.before, c.after)) for c in crossings(sharding, rank)])
        table = torch.full((part.rows * heads,), -1)
        table[part.slots] = torch.from_numpy(part.keys // heads)
        assert (part.keys % heads == part.slots % heads).all()
        assert len(np.unique(part.slots)) == len(part.slots)
        add_plan(counts, part.plan, table.view(part.rows, heads), lower)
        assert torch.equal(counts[:, lower:upper], expected[:, lower:upper])

        needed = expected[:, lower:upper].sum(1) > 0
        needed[:, lower:upper] = False
        keys = keys_of(sharding, received(sharding, rank))
        assert keys.tolist() == everything[needed.T.flatten()].tolist()
        splits = owner_splits(sharding, keys)
        assert splits == count_of(sharding, received(sharding, rank), sharding.bounds).tolist()
        for peer, message in enumerate(np.split(keys, np.cumsum(splits)[:-1])):
            flat, counted = leaving[peer]
            assert message.tolist() == np.split(flat, np.cumsum(counted)[:-1])[rank].tolist()
        assert leaving[rank][1] == message_rows(sharding, sent(sharding, rank)).tolist()
        shown = keys_of(sharding, contributed(sharding, rank))
        assert shown.tolist() == np.unique(leaving[rank][0]).tolist()
        assert len(shown) == count_of(sharding, contributed(sharding, rank), (0, sharding.seq_len))[0]
    assert crosses(sharding) or not any(len(keys) for keys, _ in leaving)


@st.composite
def shardings(draw: st.DrawFn) -> tuple:
    """The arguments of a `Sharding`: it is made outside, where beartype's sampling of them is not hypothesis's."""
    world_size, seq_len = draw(st.integers(1, 16)), draw(st.integers(0, 70))
    heads, branches = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    rates = draw(st.lists(st.integers(1, 9), min_size=branches, max_size=branches))
    segments = draw(st.lists(st.integers(1, 90), min_size=branches, max_size=branches))
    kind = draw(st.sampled_from(["head", "head_block", "table"]))
    if kind == "table":
        table = [draw(st.lists(st.integers(-1, r - 1), min_size=heads, max_size=heads)) for r in rates]
    else:
        table = [[h % r if kind == "head" else h // -(-heads // r) for h in range(heads)] for r in rates]
    edges = st.lists(st.integers(0, seq_len), min_size=world_size - 1, max_size=world_size - 1).map(sorted)
    balanced = tuple([j * seq_len // world_size for j in range(world_size + 1)])
    bounds = draw(st.one_of(st.just(balanced), edges.map(lambda e: (0, *e, seq_len))))
    samples = draw(st.none() | st.lists(st.integers(0, seq_len), max_size=4).map(lambda e: (0, *sorted(e), seq_len)))
    bands, leading = [EVERY] * branches, [0] * branches
    for _ in range(draw(st.integers(0, 2))):
        segments.append(WHOLE)
        rates.append(draw(st.sampled_from([1, 1, 2, 3, 7])))
        table.append([ALL if rates[-1] > 1 else 0] * heads)
        reach = st.sampled_from([0, 1, 2, 5, 20, 90])
        bands.append((-draw(reach), draw(reach)))
        leading.append(draw(st.sampled_from([0, 0, 1, 4, 30, 80])))
    windows = (tuple(bands), tuple(leading)) if len(bands) > branches else ((), ())
    branches = Branches(tuple(segments), tuple(rates), tuple(map(tuple, table)), None, *windows)
    return branches, bounds, draw(st.booleans()), samples


@random_calls(100)
@given(shardings())
def test_every_key_is_seen_as_often_as_the_definition_says(arguments: tuple) -> None:
    check(Sharding(*arguments))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("world_size", range(1, 17))
def test_geometric_pattern(world_size: int, is_causal: bool) -> None:
    rates = (1, 2, 4, 8, 16)
    table = tuple([tuple([h % r for h in range(4)]) for r in rates])
    check(Sharding(Branches((8, 16, 32, 64, 128), rates, table), balanced_bounds(128, world_size), is_causal))


def test_phantoms_are_counted_once_a_query() -> None:
    """compat="torchscale": each query's groups count ceil(min(w, N) / r) keys, real and zero, in every branch."""
    segments, rates, table = (7, 50, 19), (2, 6, 5), ((0, 1, 1), (0, 3, 5), (4, 2, 0))
    for world_size in (1, 3, 5):
        sharding = Sharding(Branches(segments, rates, table, "torchscale"), balanced_bounds(45, world_size), False)
        for rank in range(world_size):
            lower, upper = sharding.shard(rank)
            keys = torch.zeros(3, upper - lower, dtype=torch.int64)
            part = remote(sharding, rank, [(c, (c.before, c.after)) for c in crossings(sharding, rank)])
            for group in (*local_plan(sharding, rank).groups, *part.plan.groups):
                for i in range(group.heads):
                    rows = members(group.queries).flatten()
                    keys[group.head + i * group.head_stride, rows] += group.keys.count + group.phantoms
            position = torch.arange(lower, upper)
            for head in range(3):
                full = [
                    -(-min(w, 45) // r) * ((position % w) % r == o[head])
                    for w, r, o in zip(segments, rates, table, strict=True)
                ]
                assert torch.equal(keys[head], torch.stack(full).sum(0))


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(1, 12)), max_size=6))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_union_of_progressions(parts: list[tuple[int, int, int]]) -> None:
    ranges = [range(*part) for part in parts]
    union = {x for part in ranges for x in part}
    edges = np.array([0, 7, 7, 20, 45, 60])
    expected = [sum(low <= x < high for x in union) for low, high in pairwise(edges)]
    assert count_union(ranges, edges).tolist() == expected


def test_union_with_moduli_beyond_int64() -> None:
    primes = (10_000_019, 10_000_079, 10_000_103, 10_000_121)
    parts = [range(5, 1 << 40, prime) for prime in primes]
    distinct = 1 + sum(
        [len(part) - 1 for part in parts]
    )  # they meet at 5, and two of them again only at 5 + p q > 2^40
    assert count_union(parts, np.array([0, 1 << 40])).tolist() == [distinct]


def geometric(seq_len: int, world_size: int, heads: int, is_causal: bool) -> Sharding:
    rates = tuple([1 << i for i in range((seq_len // 2048).bit_length())])
    table = tuple([tuple([h % r for h in range(heads)]) for r in rates])
    return Sharding(
        Branches(tuple([2048 * r for r in rates]), rates, table), balanced_bounds(seq_len, world_size), is_causal
    )


@pytest.mark.parametrize("rank", [0, 5000, 8191])
def test_one_rank_of_8192_at_a_billion_tokens(rank: int) -> None:
    begin = time.perf_counter()
    sharding = geometric(1 << 30, 8192, 12, is_causal=True)
    come = count_of(sharding, received(sharding, rank), sharding.bounds)
    go = message_rows(sharding, sent(sharding, rank))
    assert time.perf_counter() - begin < 10
    assert come.tolist() == owner_splits(sharding, keys_of(sharding, received(sharding, rank)))
    assert go.tolist() == messages(sharding, sent(sharding, rank))[1]
    assert (come[rank:] == 0).all()
    assert (go[: rank + 1] == 0).all()


def test_counts_need_no_tables() -> None:
    """Dense attention over 2^30 tokens: a rank's rows could not be listed; their number is known in closed form."""
    sharding = Sharding(Branches((1 << 30,), (1,), ((0, 0),)), balanced_bounds(1 << 30, 8192), False)
    assert count_of(sharding, received(sharding, 17), sharding.bounds).sum() == 2 * ((1 << 30) - (1 << 17))
    assert message_rows(sharding, sent(sharding, 17)).sum() == 8191 * 2 << 17


@pytest.mark.parametrize("block_size", [8, (8, 16), (16, 8)])
def test_a_part_of_a_window_has_the_queries_that_reach_its_keys(block_size) -> None:
    """The other queries of the shard would be copied, attended and merged for nothing."""
    layout = BlockLayout.local(128, window=16, block_size=block_size, is_causal=True)
    sharding = Sharding(Dilated((128,), (1,)).branches(2), (0, 64, 128), True, None, (layout,))
    (crossing,) = crossings(sharding, 1)
    part = problem(sharding, 1, crossing, [(0, 64)], torch.device("cpu"))
    shown = layout.dense_blocks()[0, 0].repeat_interleave(layout.q_block, 0).repeat_interleave(layout.k_block, 1)
    reaching = shown[64:128, :64].any(1).nonzero().flatten().tolist()
    (group,) = part.plan.groups
    assert (group.queries.start, group.queries.count) == (reaching[0], reaching[-1] - reaching[0] + 1)
    assert len(reaching) < 64


@pytest.mark.parametrize(("field", "edges"), [("bounds", (0, 5, 3, 10)), ("bounds", (1, 10)), ("samples", (0, 4, 9))])
def test_edges_that_do_not_ascend_are_refused(field: str, edges: tuple[int, ...]) -> None:
    arguments = {"bounds": (0, 5, 10), "samples": None} | {field: edges}
    with pytest.raises(ValueError, match=f"{field} must ascend"):
        Sharding(Branches((4,), (1,), ((0,),)), arguments["bounds"], False, arguments["samples"])


@pytest.mark.parametrize(
    ("pattern", "rank", "message"),
    [
        (None, 0, "pattern must be a Dilated.* a product or a sum; got NoneType"),
        ((16, 32), 0, "pattern must be a Dilated.* a product or a sum; got tuple"),
        (Neighborhood((4, 4), (3, 3)), 0, "a Neighborhood over a mesh is not supported; keep each sample on one rank"),
        (Dilated((8,), (1,)), 4, r"rank must be an integer from 0 to 3; got 4"),
        (Dilated((8,), (1,)), 1.5, r"rank must be an integer from 0 to 3; got 1.5"),
        (Dilated((8,), (1,)), "a", r"rank must be an integer from 0 to 3; got 'a'"),
    ],
)
def test_plans_of_no_pattern_or_rank_are_refused(pattern, rank, message, unchecked) -> None:
    with pytest.raises(ValueError, match=message):
        exchange_plan(pattern, 64, 4, 4, rank)
