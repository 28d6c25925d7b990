"""Modules: attention, rotary positions, the transformer block."""

from dilated_attention.nn.attention import DilatedAttention, MultiheadDilatedAttention
from dilated_attention.nn.positions import rotary_tables, rotate
from dilated_attention.nn.transformer import SelfAttention, TransformerBlock

__all__ = [
    "DilatedAttention",
    "MultiheadDilatedAttention",
    "SelfAttention",
    "TransformerBlock",
    "rotary_tables",
    "rotate",
]
