"""Masks of whole blocks by interval arithmetic: ranges hold every value, and decided blocks are not looked at."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, or_masks

from dilated_attention import BlockLayout
from dilated_attention.layout import masks, ranges
from dilated_attention.layout.ranges import Range

TOKENS = 97
NUMBER = torch.randint(-3, 5, (TOKENS,), generator=torch.Generator().manual_seed(0))
SAMPLE = torch.arange(TOKENS) // 13
HIDDEN = torch.rand(TOKENS, generator=torch.Generator().manual_seed(1)) < 0.2
TABLE = torch.stack([SAMPLE, NUMBER])

FUNCTIONS = [
    lambda b, h, q, k: (q < k) | (k > 40) & ~(q == 7),
    lambda b, h, q, k: (q - k).abs() <= 9,
    lambda b, h, q, k: abs(3 * (k - q) + 2) != 11,
    lambda b, h, q, k: torch.logical_and(q >= k, 20 - q <= k * 2),
    lambda b, h, q, k: (q // 16 == k // 16) | (k % 8 == 3),
    lambda b, h, q, k: torch.remainder(q + k, 5).eq(torch.floor_divide(q, 7)),
    lambda b, h, q, k: (SAMPLE[q] == SAMPLE[k]) & HIDDEN[k].logical_not(),
    lambda b, h, q, k: TABLE[b, q] > TABLE[1, k] - h,
    lambda b, h, q, k: NUMBER[torch.where(q > k, q, 0)] * NUMBER[k] < NUMBER[q],
    lambda b, h, q, k: torch.where(q < 50, HIDDEN[q], k > q),
    lambda b, h, q, k: torch.where(q < 50, SAMPLE.int()[q], -1) == SAMPLE.int()[k],
    lambda b, h, q, k: torch.maximum(q, k) - torch.minimum(q, -k) > 60,
    lambda b, h, q, k: HIDDEN[q].to(torch.int64) + (k > 3).to("cpu").to(torch.int64) < 1.5,
    lambda b, h, q, k: NUMBER[q].to(torch.bool) & q.new_ones((), dtype=torch.bool) | q.new_zeros((), dtype=torch.bool),
    and_masks(or_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: k < 5), lambda b, h, q, k: SAMPLE[q] >= SAMPLE[k]),
]


def ends_of(function, first, last):
    b, h = torch.tensor(1), torch.tensor(0)
    found = ranges.bounds(
        function, b, h, *(Range(torch.tensor(x), torch.tensor(y)) for x, y in zip(first, last, strict=True))
    )
    assert found is not None
    return found


@pytest.mark.parametrize("function", FUNCTIONS)
def test_ranges_hold_every_value(function):
    draw = random.Random(0)
    for _ in range(60):
        first = [draw.randrange(TOKENS) for _ in range(2)]
        last = [min(TOKENS - 1, x + draw.choice([0, 1, 5, 30])) for x in first]
        found = ends_of(function, first, last)
        q, k = (torch.arange(x, y + 1) for x, y in zip(first, last, strict=True))
        seen = function(torch.tensor(1), torch.tensor(0), q[:, None], k)
        assert not found.low or seen.all()
        assert found.high or not seen.any()
        if len(q) == len(k) == 1:
            assert found.low == found.high


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("size", [16, (5, 32), 128])
def test_layouts_show_the_pairs_of_the_function(function, size):
    layout = BlockLayout.from_mask_mod(function, TOKENS, 80, batch=2, block_size=size)
    q, k = torch.arange(TOKENS)[:, None], torch.arange(80)
    for b in range(2):
        seen = function(torch.tensor(b), torch.tensor(0), q, k).expand(TOKENS, 80)
        assert torch.equal(layout.dense_mask()[b, 0, :, :80], seen)
        assert not layout.dense_mask()[b, 0, :, 80:].any()


def test_blocks_that_are_decided_are_not_looked_at(monkeypatch):
    looked_at = []
    shown = masks._Function.shown

    def counted(self, blocks):
        looked_at.append(len(blocks))
        return shown(self, blocks)

    monkeypatch.setattr(masks._Function, "shown", counted)
    sample = torch.arange(2048) // 600
    BlockLayout.from_mask_mod(lambda b, h, q, k: (sample[q] == sample[k]) & (q >= k), 2048, block_size=64)
    on_diagonal = 32
    beside_edges = 48  # in the rows and columns of the three blocks in which a sample begins
    assert sum(looked_at) == on_diagonal + beside_edges


def test_a_table_is_read_once_at_all_keys(monkeypatch):
    """A long sequence is decided a few rows of blocks at a time, always against all its keys."""
    read = []
    read_row = ranges._read_row

    def counted(table, at):
        read.append(at.low.numel())
        return read_row(table, at)

    monkeypatch.setattr(ranges, "_read_row", counted)
    monkeypatch.setattr(masks, "_AT_ONCE", 1)
    sample = torch.arange(2048) // 600
    of_batch = torch.stack([sample, sample // 2])
    BlockLayout.from_mask_mod(
        lambda b, h, q, k: of_batch[b, q] == of_batch[b, k], 2048, batch=2, heads=3, block_size=64
    )
    keys, queries = 32, 1
    assert sorted(read) == [queries] * 32 * 2 * 3 + [keys] * 2


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, q, k: torch.rand(TOKENS)[q] > 0.5,  # numbers that are no integers
        lambda b, h, q, k: torch.ones(TOKENS, TOKENS).bool()[q, k],  # two ranges
        lambda b, h, q, k: SAMPLE[q + TOKENS] == 0,  # beyond the table
        lambda b, h, q, k: (q & k) == 0,  # bits of integers
        lambda b, h, q, k: q // (k + 1) == 0,  # a divisor that varies
        lambda b, h, q, k: q - k,  # no boolean
        lambda b, h, q, k: HIDDEN[q] + HIDDEN[k] < 2,  # a sum of booleans is a boolean
        lambda b, h, q, k: SAMPLE.to(torch.uint8)[q] - 5 < 3,  # it wraps around
        lambda b, h, q, k: SAMPLE.int()[q] * 2**30 > 3,  # so does int32
        lambda b, h, q, k: (q * 2**40) * 2**30 > 3,  # and int64
        lambda b, h, q, k: True,  # no tensor
        lambda b, h, q, k: q > 3 if k > 3 else q > 5,  # a decision for each pair
        lambda b, h, q, k: torch.sin(q) > 0,  # a function without a rule
    ],
)
def test_what_has_no_range(function):
    tokens = Range(torch.tensor(0), torch.tensor(9))
    assert ranges.bounds(function, torch.tensor(0), torch.tensor(0), tokens, tokens) is None
