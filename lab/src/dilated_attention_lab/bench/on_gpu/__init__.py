"""Define the cases of `bench gpu`. The files of this folder hold the pieces of its parts."""

from __future__ import annotations

from dataclasses import replace

from dilated_attention_lab.bench.cases import Case

PAPER = Case(
    method="dilated", backend="triton", seq_len=65536, heads=16, head_dim=128, dtype="bfloat16",
    segment_lengths=(2048, 4096, 8192, 16384), dilation_rates=(1, 2, 4, 8),
)  # fmt: skip
SMALL = replace(PAPER, seq_len=4096, heads=8, head_dim=64, segment_lengths=(1024, 2048, 4096), dilation_rates=(1, 2, 4))


def sparse(density: float, seq_len: int = 32768) -> Case:
    """Return the case PAPER with random blocks of 128 tokens instead of branches. Up to 4,096 tokens, it has blocks of
    64, and 8 heads of head_dim 64."""
    base = replace(PAPER, method="block-sparse", blocks="random", density=density, seq_len=seq_len)
    return base if seq_len > 4096 else replace(base, heads=8, head_dim=64, block_size=64)
