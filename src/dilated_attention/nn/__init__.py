"""Modules: attention, rotary positions, the transformer block."""

from dilated_attention.nn.attention import (
    BlockSparseDilatedAttention,
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    DilatedAttention,
    MultiheadDilatedAttention,
    RingDilatedAttention,
)
from dilated_attention.nn.positions import rotary_tables, rotate
from dilated_attention.nn.transformer import SelfAttention, TransformerBlock

__all__ = [
    "BlockSparseDilatedAttention",
    "BlockSparseRingDilatedAttention",
    "BlockSparseRingMultiheadDilatedAttention",
    "DilatedAttention",
    "MultiheadDilatedAttention",
    "RingDilatedAttention",
    "SelfAttention",
    "TransformerBlock",
    "rotary_tables",
    "rotate",
]
