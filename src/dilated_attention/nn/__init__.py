"""Provide attention modules (dilated, block-sparse, on grids, selecting keys), rotary positions, a transformer."""

from dilated_attention.nn.attention import (
    BlockSparseDilatedAttention,
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    DilatedAttention,
    MultiheadDilatedAttention,
    RingDilatedAttention,
)
from dilated_attention.nn.block_mixture import BlockAttentionMixture
from dilated_attention.nn.indexed_attention import IndexedAttention
from dilated_attention.nn.native_sparse import NativeSparseAttention
from dilated_attention.nn.neighborhood import (
    NeighborhoodAttention,
    NeighborhoodAttention1D,
    NeighborhoodAttention2D,
    NeighborhoodAttention3D,
)
from dilated_attention.nn.positions import Rotary, grid_sines, rotary_tables, rotate
from dilated_attention.nn.selection import SelectionCache
from dilated_attention.nn.transformer import SelfAttention, TransformerBlock

__all__ = [
    "BlockAttentionMixture",
    "BlockSparseDilatedAttention",
    "BlockSparseRingDilatedAttention",
    "BlockSparseRingMultiheadDilatedAttention",
    "DilatedAttention",
    "IndexedAttention",
    "MultiheadDilatedAttention",
    "NativeSparseAttention",
    "NeighborhoodAttention",
    "NeighborhoodAttention1D",
    "NeighborhoodAttention2D",
    "NeighborhoodAttention3D",
    "RingDilatedAttention",
    "Rotary",
    "SelectionCache",
    "SelfAttention",
    "TransformerBlock",
    "grid_sines",
    "rotary_tables",
    "rotate",
]
