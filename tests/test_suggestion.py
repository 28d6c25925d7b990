"""`suggest_pattern`: what it costs, what it covers and joins, and what it refuses."""

from __future__ import annotations

import dataclasses
import re
from ast import literal_eval

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dilated_attention import Dilated, suggest_pattern

THOROUGH = settings().max_examples > 100  # --hypothesis-profile=explore
HEADS = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64, 128])


def seen(pattern: Dilated, seq_len: int, num_heads: int, is_causal: bool) -> Tensor:
    """Return which keys each token sees in some head: 1.0 or 0.0, (queries, keys)."""
    token = torch.arange(seq_len)
    found = torch.zeros(seq_len, seq_len, dtype=torch.bool)
    for segment, rate in zip(pattern.segment_lengths, pattern.dilation_rates, strict=True):
        residue = token % segment % rate
        group = torch.where(residue < num_heads, token // segment * rate + residue, -1 - token)
        found |= group[:, None] == group
    return (found.tril() if is_causal else found).float()


def joined(pattern: Dilated, seq_len: int, num_heads: int, is_causal: bool, layers: int) -> float:
    """Return the share of pairs that this many layers join: (query, key), causal (query, earlier key or itself)."""
    one = seen(pattern, seq_len, num_heads, is_causal)
    reached = one
    for _ in range(layers - 1):
        reached = (reached @ one).clamp_(max=1)
    return float(reached.sum(dtype=torch.float64)) / (seq_len * (seq_len + 1) / 2 if is_causal else seq_len**2)


@st.composite
def budgets(draw):
    if draw(st.booleans()):
        return 2.0 ** draw(st.floats(-10, 0))
    return int(2 ** draw(st.floats(0, 11)))


@settings(max_examples=1000 if THOROUGH else 60)
@given(
    seq_len=st.floats(0, 11 if THOROUGH else 8.5).map(lambda power: int(2**power)),
    num_heads=HEADS,
    budget=budgets(),
    is_causal=st.booleans(),
)
def test_it_keeps_to_the_budget_and_joins_all_pairs(seq_len, num_heads, budget, is_causal):
    try:
        pattern = suggest_pattern(seq_len, num_heads, budget=budget, is_causal=is_causal)
    except ValueError as error:
        named = re.search(r"give at least budget=(\S+),", str(error))[1]
        smallest = literal_eval(named)
        assert type(smallest) is type(budget)
        assert smallest > budget
        pattern = suggest_pattern(seq_len, num_heads, budget=smallest, is_causal=is_causal)
        less = smallest * 0.98 if isinstance(smallest, float) else smallest - 1
        with pytest.raises(ValueError, match=r"too small|must be .*; got 0"):
            suggest_pattern(seq_len, num_heads, budget=less, is_causal=is_causal)
        budget = smallest
    pairs = num_heads * seq_len * ((seq_len + 1) / 2 if is_causal else seq_len)
    allowed = budget * pairs if isinstance(budget, float) else budget * num_heads * seq_len
    assert pattern.flops(seq_len, num_heads, 1, is_causal) <= 4 * allowed
    assert pattern.coverage(seq_len, num_heads).min() > 0
    assert pattern.dilation_rates[0] == 1
    assert pattern.segment_lengths[-1] >= seq_len
    assert not any(pattern.unserved(num_heads))
    assert joined(pattern, seq_len, num_heads, is_causal, 2) >= (0.95 if is_causal else 1)
    assert joined(pattern, seq_len, num_heads, is_causal, 3) >= (0.995 if is_causal else 1)


def test_the_shares_of_joined_pairs_are_seen_where_they_fail():
    """The count of the test above, on patterns against the guide."""
    assert joined(Dilated((8, 64), (1, 8)), 64, 8, False, 2) == 1
    assert joined(Dilated((8, 64), (1, 8)), 64, 4, False, 2) < 1  # residues that no head serves
    assert joined(Dilated((8, 32), (1, 2)), 64, 8, False, 3) < 1  # no segment spans the sequence
    assert joined(Dilated((8, 64), (1, 8)), 64, 8, True, 2) < 0.95  # a first segment as short as the rate


def test_the_whole_cost_is_named_as_a_share():
    with pytest.raises(ValueError, match=r"give at least budget=1\.0, which"):
        suggest_pattern(4096, 1, budget=0.5)


def test_a_larger_budget_gives_a_longer_first_segment():
    firsts = [suggest_pattern(32768, 8, budget=b).segment_lengths[0] for b in (0.05, 0.1, 0.2, 0.4)]
    assert firsts == sorted(set(firsts))
    assert suggest_pattern(32768, 8, budget=1.0) == Dilated((32768,), (1,))
    assert suggest_pattern(4096, 8, budget=4096) == Dilated((4096,), (1,))


def test_it_is_a_plain_pattern_that_prints_why():
    pattern = suggest_pattern(32768, 8, budget=0.1, is_causal=True)
    text = str(pattern)
    assert text.startswith(repr(pattern) + "\n32,768 tokens, 8 heads, causal: ")
    share = pattern.flops(32768, 8, 1, True) / (4 * 8 * 32768 * 32769 / 2)
    assert f"{share:.2%} of dense attention; the budget was 0.1" in text
    for branch in zip(pattern.segment_lengths, pattern.dilation_rates, strict=True):
        assert f"  {branch}: " in text
    same = Dilated(pattern.segment_lengths, pattern.dilation_rates)
    assert pattern == same
    assert hash(pattern) == hash(same)
    assert str(same) == repr(same) == repr(pattern)
    assert dataclasses.replace(pattern, offsets="head_block").reasons == ()


def test_a_rate_above_the_heads_is_given_only_when_asked_for():
    with pytest.raises(ValueError, match=r"more heads, or largest_rate= above their number, cost less"):
        suggest_pattern(1 << 20, 4, budget=1024)
    pattern = suggest_pattern(1 << 20, 4, budget=1024, largest_rate=256)
    assert max(pattern.dilation_rates) > 4
    assert "Rates above the 4 heads" in str(pattern)
    assert max(suggest_pattern(1 << 16, 64, budget=0.1, largest_rate=4).dilation_rates) <= 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seq_len": 0}, "seq_len must be a positive integer; got 0"),
        ({"seq_len": 1 << 64}, "seq_len must be at most 9223372036854775807; got 18446744073709551616"),
        ({"seq_len": 8.0}, "seq_len must be a positive integer; got 8.0"),
        ({"num_heads": True}, "num_heads must be a positive integer; got True"),
        ({"largest_rate": 0}, "largest_rate must be a positive integer; got 0"),
        ({"is_causal": 1}, "is_causal must be a bool; got 1"),
        ({"budget": 0}, r"budget must be a share of .*, a float in \(0, 1\], or .* a positive integer; got 0"),
        ({"budget": 1.5}, "got 1.5"),
        ({"budget": True}, "got True"),
        ({"budget": "10%"}, "got '10%'"),
        ({"budget": float("nan")}, "got nan"),
        ({"budget": torch.tensor(0.5)}, "got tensor"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        suggest_pattern(**{"seq_len": 4096, "num_heads": 8, "budget": 0.25, **arguments})


def test_budgets_of_numpy():
    for like, budget in ((0.5, np.float32(0.5)), (100, np.int64(100))):
        assert suggest_pattern(1000, 4, budget=budget) == suggest_pattern(1000, 4, budget=like)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("seq_len", [100, 2**40])
def test_rates_that_cannot_be_cheaper_are_not_tried(seq_len, is_causal):
    said = []
    for largest_rate in (1 << 16, 2**40):
        with pytest.raises(ValueError, match="budget=1 is too small") as error:
            suggest_pattern(seq_len, 4, budget=1, largest_rate=largest_rate, is_causal=is_causal)
        said.append(str(error.value))
    assert said[0] == said[1]
