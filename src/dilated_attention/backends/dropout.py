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

import torch
from jaxtyping import Bool, Int32, Int64
from torch import Tensor

_FIRST = 0x21F0AAAD
_SECOND = 0xD35A2D97 - (1 << 32)
_A = 0x1B873593
_B = 0x3C6EF372
_C = 0x6A09E667


def threshold(probability: float) -> int:
    """Return the least hash of a pair that survives, as a signed 32-bit number."""
    return min(round(probability * 2**32), 2**32 - 1) - 2**31


def factor(probability: float) -> float:
    """Return 1 / (1 - p), by which surviving weights are multiplied."""
    return 1 / (1 - probability)


def query_words(
    seed: Int64[Tensor, ""], batch: int, heads: int, queries: Int64[Tensor, " seq"], first_head: int = 0
) -> Int32[Tensor, "batch seq heads 2"]:
    """Return the two words, a and b, of every row of q.

    Args:
        seed: any 64-bit number, on the device of q.
        queries: the global position of each row; first_head: the global index of the first query head.
    """
    sample = torch.arange(batch, device=seed.device)[:, None, None]
    head = first_head + torch.arange(heads, device=seed.device)
    words = [_hash(constant, seed, seed >> 32, sample, head, queries[:, None]) for constant in (_A, _B)]
    return torch.stack(words, -1)


def key_words(seed: Int64[Tensor, ""], keys: Int64[Tensor, "keys key_heads"]) -> Int32[Tensor, "1 keys key_heads"]:
    """Return the word, k, of every row of k, given the global position of each, which may differ by head."""
    return _hash(_C, seed, seed >> 32, keys)[None]


def survives(
    queries: Int32[Tensor, "*problem rows 2"], keys: Int32[Tensor, "*#problem keys"], threshold: int
) -> Bool[Tensor, "*problem rows keys"]:
    """Return which pairs of a query row and a key survive, given their hash words."""
    a = queries[..., 0, None]
    b = queries[..., 1, None]
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
