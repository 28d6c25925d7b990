"""Modules: attention, rotary positions, the transformer block."""

from dilated_attention.nn.attention import (
    BlockSparseDilatedAttention,
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    DilatedAttention,
    MultiheadDilatedAttention,
    RingDilatedAttention,
)
from dilated_attention.nn.positions import Rotary, grid_sines, rotary_tables, rotate
from dilated_attention.nn.transformer import CrossAttention, SelfAttention, TransformerBlock

__all__ = [
    "BlockSparseDilatedAttention",
    "BlockSparseRingDilatedAttention",
    "BlockSparseRingMultiheadDilatedAttention",
    "CrossAttention",
    "DilatedAttention",
    "MultiheadDilatedAttention",
    "RingDilatedAttention",
    "Rotary",
    "SelfAttention",
    "TransformerBlock",
    "grid_sines",
    "rotary_tables",
    "rotate",
]
