"""Attention dropout: choose which pairs of query and key survive, the same on every backend, device and rank.

Dropout acts on P after the softmax: lse stays, and with K = 1 where a pair survives, else 0,

    out = Σ_j P_ij K_ij v_j / (1 - p),        dS = P (K dP / (1 - p) - δ),        δ = rowsum(dout · out),

so that the merged out serves the backward as it does without dropout. K is a pure function of the seed and of four
global positions, sample, query head, query and key. Tiles, branches, segments and shards do not enter, a key that two
branches show has one K, and the backward repeats the forward's. The state of a pair is 96 bits, all of them hashed:

    mix(x): x ^= x >> 16, x *= 0x21F0AAAD, x ^= x >> 15, x *= 0xD35A2D97, x ^= x >> 15        (32 bits, a bijection)
    hash(c; x, y, ...) = mix(... mix(mix(c ^ x) ^ y) ...)
    a, b = hash(A or B; low and high word of the seed, sample, head, query)
    k = hash(C; low and high word of the seed, key)
    K = 1 iff mix_b(a ^ k) ≥ p 2³² - 2³¹ as a signed number, mix_b being mix with x ^= b before its second product.

The words a, b and k are made once per call, O(tokens); a pair costs mix_b, ten integer instructions. mix is one of the
two-product hashes of least bias that C. Wellons' search (hash-prospector) has found.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int32, Int64
from torch import Tensor

_FIRST, _SECOND = 0x21F0AAAD, 0xD35A2D97 - (1 << 32)
_A, _B, _C = 0x1B873593, 0x3C6EF372, 0x6A09E667


@dataclass(frozen=True, slots=True, eq=False)
class Dropout:
    """Hold what backends need for a call's dropout.

    A pair survives if a hash of three int32 words, two of the query and one of the key, is at least `threshold`.

    Attributes:
        probability: p, in (0, 1): the probability that a pair is dropped.
        queries: the two words, a and b, of every row of q.
        keys: the word, k, of every row of k; key_heads is 1, or the number of heads of k if their rows differ.
    """

    probability: float
    queries: Int32[Tensor, "batch seq heads 2"]
    keys: Int32[Tensor, "keys key_heads"]

    @property
    def threshold(self) -> int:
        """Return the least hash that survives, as a signed 32-bit number."""
        return min(round(self.probability * 2**32), 2**32 - 1) - 2**31

    @property
    def factor(self) -> float:
        """Return 1 / (1 - p), by which surviving weights are multiplied."""
        return 1 / (1 - self.probability)

    @property
    def key_strides(self) -> tuple[int, int]:
        """Return the strides of a key and of a head in `keys`; the latter is 0 if all heads share the words."""
        return self.keys.stride(0), self.keys.stride(1) if self.keys.shape[1] > 1 else 0

    def sample(self, batch: slice, seq: slice) -> Dropout:
        """Return the dropout of the samples `batch`, with the tokens `seq` as queries and as keys."""
        return replace(self, queries=self.queries[batch, seq], keys=self.keys[seq])

    def packed(self) -> Dropout:
        """Return the dropout of all samples joined into one sequence. The words of keys repeat for each sample."""
        keys = self.keys.repeat(self.queries.shape[0], 1)
        return replace(self, queries=self.queries.flatten(0, 1).unsqueeze(0), keys=keys)


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Hold `threshold`, `factor` and words of a `Dropout`, two per query and one per key, for independent problems."""

    threshold: int
    factor: float
    queries: Int32[Tensor, "problems heads rows 2"]
    keys: Int32[Tensor, "problems key_heads keys"]

    def part(self, problems: slice, heads: slice, rows: slice, keys: slice) -> Pairs:
        its_heads = heads if self.keys.shape[1] > 1 else slice(None)
        return replace(self, queries=self.queries[problems, heads, rows], keys=self.keys[problems, its_heads, keys])

    def drop(self, x: Tensor) -> Tensor:
        """Compute K x / (1 - p) in place, for x `(problems, heads, rows, keys)`; K: 1 where a pair survives, else 0."""
        return x.mul_(survives(self.queries, self.keys, self.threshold)).mul_(self.factor)


def dropout_of(
    probability: float,
    seed: Int64[Tensor, ""],
    batch: int,
    heads: int,
    queries: Int64[Tensor, " seq"],
    keys: Int64[Tensor, "keys key_heads"],
    head_offset: int = 0,
) -> Dropout | None:
    """Return the dropout of a call; None if `probability`, with which a pair is dropped, is 0.

    Args:
        seed: any 64-bit number, on the device of q.
        queries, keys: the global position of each row of q and of k, which may differ by head where rows were gathered.
        head_offset: global index of the first query head.
    """
    if not probability:
        return None
    device = seed.device
    low, high = seed, seed >> 32
    sample = torch.arange(batch, device=device)[:, None, None]
    head = head_offset + torch.arange(heads, device=device)
    query = queries[:, None]
    words = [_hash(constant, low, high, sample, head, query) for constant in (_A, _B)]
    return Dropout(probability, torch.stack(words, -1), _hash(_C, low, high, keys))


def survives(
    queries: Int32[Tensor, "*problem rows 2"], keys: Int32[Tensor, "*#problem keys"], threshold: int
) -> Bool[Tensor, "*problem rows keys"]:
    """Return which pairs of a query row and a key survive, given their hash words and the threshold of `Pairs`."""
    a, b = queries[..., 0, None], queries[..., 1, None]
    x = a ^ keys.unsqueeze(-2)
    x = _shift_xor(x, 16).mul_(_FIRST)
    x = _shift_xor(x, 15).bitwise_xor_(b).mul_(_SECOND)
    return _shift_xor(x, 15) >= threshold


def _hash(constant: int, *positions: Tensor) -> Tensor:
    x = torch.full((), constant, dtype=torch.int32, device=positions[0].device)
    for position in positions:
        x = _shift_xor(x ^ _word(position), 16).mul_(_FIRST)
        x = _shift_xor(_shift_xor(x, 15).mul_(_SECOND), 15)
    return x


def _word(x: Tensor) -> Tensor:
    """Return the low 32 bits of x, as int32."""
    return ((x + (1 << 31)) & 0xFFFFFFFF).sub(1 << 31).to(torch.int32)


def _shift_xor(x: Tensor, bits: int) -> Tensor:
    """Compute x ^= x >> bits, in place, with zeros shifted in."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << 32 - bits) - 1))
