"""Suggest a dilated pattern for a sequence, from what it may cost."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from numbers import Integral, Real

from dilated_attention import checks
from dilated_attention.patterns import Dilated


def suggest_pattern(
    seq_len: int,
    num_heads: int,
    *,
    budget: float,
    is_causal: bool = False,
    largest_rate: int | None = None,
) -> Dilated:
    """Suggest a dilated pattern for sequences of seq_len tokens that costs at most `budget`. `print` it to see the
    reasons.

    Its first branch has rate 1, its last one spans the sequence, and no rate exceeds the number of heads. Every token
    therefore has a head in every branch, sees a key in every head, and reaches any other token within two layers: the
    first branch leads to a neighbour whose residue modulo the last rate equals the other token's, and the last branch
    leads from there to that token, or in the opposite order. When causal, the neighbour must lie between the two; then
    at least 95 % of the pairs of a query and an earlier key are joined within two layers, 99.5 % within three.

    The rates are 1, 2, 4, ..., and the segments grow evenly in their logarithm. The last rate is chosen so that the
    first segment, the neighbourhood that a token always sees, is as long as the budget allows, but no longer than the
    number of tokens that the last branch shows. A budget too small for this gives two branches.

    Args:
        num_heads: heads of k and v.
        budget: a share of the cost of dense attention, a float in (0, 1]; or the mean number of keys per query and
            head, an integer. Both count what is computed: a key that two branches show counts twice.
        largest_rate: the largest dilation rate; default: num_heads. A larger one is cheaper, but then no head serves
            the tokens of the `unserved` residues in some branches, and joining all pairs takes three layers or more.

    Raises:
        ValueError: the budget is too small; the message names the smallest that works.

    Examples:
        >>> from dilated_attention import suggest_pattern
        >>> pattern = suggest_pattern(65536, num_heads=16, budget=0.05)
        >>> pattern.segment_lengths, pattern.dilation_rates
        ((1280, 3072, 8192, 20480, 65536), (1, 2, 4, 8, 16))
        >>> pattern.flops(65536, 16, 64) / (4 * 64 * 16 * 65536**2) <= 0.05
        True
    """
    most = num_heads if largest_rate is None else largest_rate
    for name, value in (("seq_len", seq_len), ("num_heads", num_heads), ("largest_rate", most)):
        if checks.positive(name, value) > sys.maxsize:  # the longest range of Python
            raise ValueError(f"{name} must be at most {sys.maxsize}; got {value}")
    checks.boolean("is_causal", is_causal)
    problem = _Problem(int(seq_len), int(num_heads), is_causal)
    most = int(most)
    allowed = problem.allowed(budget)
    found = problem.longest_first(allowed, [*(1 << i for i in range(1, most.bit_length())), most])
    if found is None:
        least = problem.cheapest(most)
        if problem.cost(least) > allowed:
            raise ValueError(
                f"budget={budget!r} is too small for {seq_len:,} tokens and {num_heads} heads: give at least "
                f"{problem.budget_of(problem.cost(least), budget)}, which is the cost of "
                f"segments {least.segment_lengths} at rates {least.dilation_rates}"
                + ("" if largest_rate else "; more heads, or largest_rate= above their number, cost less")
            )
        found = problem.longest_window(allowed, least)
    object.__setattr__(found, "reasons", tuple(problem.reasons(found, budget)))
    return found


@dataclass(frozen=True)
class _Problem:
    seq_len: int
    num_heads: int
    is_causal: bool

    def entries(self, segment: int, rate: int) -> int:
        """Return the score entries of one branch in all heads: m^2, or m (m + 1) / 2 if causal, for each head and
        segment of which m tokens take part."""
        total = 0
        whole, tail = divmod(self.seq_len, segment)
        for offset in range(min(rate, self.num_heads)):
            heads = len(range(offset, self.num_heads, rate))
            for tokens, segments in ((segment, whole), (tail, 1)):
                rows = len(range(offset, tokens, rate))
                pairs = rows * rows
                if self.is_causal:
                    pairs = rows * (rows + 1) // 2
                total += heads * segments * pairs
        return total

    def cost(self, pattern: Dilated) -> int:
        return sum(map(self.entries, pattern.segment_lengths, pattern.dilation_rates))

    def allowed(self, budget: float) -> int:
        """Return how many score entries, over all heads, a budget allows; see `suggest_pattern` for its unit."""
        if isinstance(budget, Integral) and not isinstance(budget, bool) and budget >= 1:
            return int(budget) * self.num_heads * self.seq_len
        if isinstance(budget, Real) and not isinstance(budget, Integral) and 0 < budget <= 1:
            return int(budget * self.entries(self.seq_len, 1))
        raise ValueError(
            f"budget must be a share of dense attention's cost, a float in (0, 1], or a number of keys per query, a "
            f"positive integer; got {budget!r}"
        )

    def budget_of(self, entries: int, like: float) -> str:
        """Return, as text, the smallest budget that allows these score entries: a share or a number of keys, like
        `like`."""
        if isinstance(like, Integral):
            return f"budget={math.ceil(entries / (self.num_heads * self.seq_len))}"
        share = entries / self.entries(self.seq_len, 1)
        unit = 10.0 ** (math.floor(math.log10(share)) - 2)
        rounded = min(math.ceil(share / unit) * unit, 1.0)
        return f"budget={float(f'{rounded:.3g}')!r}"  # 1.0, where 1 would be a number of keys

    def least_first(self, rate: int) -> int:
        """Return the shortest first segment with which two layers connect (almost) every pair of tokens.

        `rate`: the rate of the last branch. If not causal, the result is `rate`: such a segment has a token of every
        residue. If causal, it is at least `rate`, and two tokens in different first segments need a token that lies
        between them, in the segment of one, with the residue of the other. Every two segments have
        rate (rate - 1) / 2 pairs of tokens without it, which two layers do not connect. Over all pairs of segments,
        these may be at most 5 % of the seq_len (seq_len + 1) / 2 pairs of a query and a key. In adjacent segments, more
        layers do not connect them either: over all adjacent segments, they may be at most 0.5 %.
        """
        if not self.is_causal:
            return rate
        pairs = self.seq_len * (self.seq_len + 1) / (rate * (rate - 1))
        segments = int(min(1 + 0.005 * pairs, (1 + math.sqrt(1 + 0.4 * pairs)) / 2))
        return max(rate, -(-self.seq_len // segments))

    def longest_first(self, allowed: int, last_rates: list[int]) -> Dilated | None:
        """Return dense attention if its score entries are at most `allowed`; else the affordable pattern of
        `geometric`, for one of `last_rates`, with the longest first segment; or None."""
        dense = Dilated((self.seq_len,), (1,))
        if self.cost(dense) <= allowed:
            return dense
        fitting: list[Dilated] = []
        for rate in last_rates:
            affordable = (pattern for pattern in self.geometric(rate) if self.cost(pattern) <= allowed)
            fitting += islice(affordable, 1)
        return max(fitting, key=lambda pattern: pattern.segment_lengths[0], default=None)

    def geometric(self, rate: int) -> Iterator[Dilated]:
        """Yield patterns with rates 1, 2, 4, ..., `rate`, from the longest possible first segment to the shortest."""
        rates = [*(1 << i for i in range((rate - 1).bit_length())), rate]
        first = _round_length(self.seq_len // rate)
        while rate > 1 and first >= self.least_first(rate):
            growth = (self.seq_len / first) ** (1 / (len(rates) - 1))
            # A little more, so that 8 * 4 ** (1 / 2) is 16 whatever the rounding.
            between = [_round_length(int(first * growth**i * (1 + 1e-9))) for i in range(1, len(rates) - 1)]
            yield Dilated((first, *between, self.seq_len), tuple(rates))
            first = _round_length(first - 1)

    def cheapest(self, largest_rate: int) -> Dilated:
        least = Dilated((self.seq_len,), (1,))
        for rate in range(2, largest_rate + 1):
            first = self.least_first(rate)
            # A longer first segment costs at least half as much as a shorter one.
            if first >= self.seq_len or self.entries(first, 1) > 2 * self.cost(least):
                break
            least = min(least, Dilated((first, self.seq_len), (1, rate)), key=self.cost)
        return least

    def longest_window(self, allowed: int, least: Dilated) -> Dilated:
        """Return `least`, which has two branches, with the longest first segment within `allowed` score entries."""
        window = _round_length(self.seq_len // 2)
        while window > least.segment_lengths[0]:
            pattern = Dilated((window, self.seq_len), least.dilation_rates)
            if self.cost(pattern) <= allowed:
                return pattern
            window = _round_length(window - 1)
        return least

    def reasons(self, pattern: Dilated, budget: float) -> Iterator[str]:
        per_query = self.num_heads * self.seq_len
        entries = self.cost(pattern)
        causal = ", causal" if self.is_causal else ""
        yield (
            f"{self.seq_len:,} tokens, {self.num_heads} heads{causal}: "
            f"{entries / per_query:,.1f} keys per query, {entries / self.entries(self.seq_len, 1):.2%} of dense "
            f"attention; the budget was {budget!r}"
        )
        branches = list(zip(pattern.segment_lengths, pattern.dilation_rates, strict=True))
        for segment, rate in branches:
            what = f"1 token in {rate} of a segment, another one per head"
            if rate == 1:
                what = "all tokens of a segment"
            if segment >= self.seq_len:
                what += ", which spans the sequence"
            yield f"  ({segment}, {rate}): {self.entries(segment, rate) / per_query:,.1f} keys per query; {what}"
        last = branches[-1][1]
        if len(branches) == 1:
            yield "The budget pays for dense attention: no pattern of branches shows more."
        elif last > self.num_heads:
            yield f"Rates above the {self.num_heads} heads leave tokens out of branches: see `unserved`."
        elif self.is_causal:
            yield "Every token has a head in each branch; two layers join at least 95 % of the pairs, three 99.5 %."
        else:
            yield "Every token has a head in each branch; two layers join every pair of tokens."


def _round_length(tokens: int) -> int:
    """Return the largest of the round lengths 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ...
    that is at most `tokens`."""
    unit = 1 << max(tokens.bit_length() - 3, 0)
    return tokens // unit * unit
