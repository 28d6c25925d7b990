"""Provide LongNet as encoder and language model, GigaPath, LongViT, checkpoints and generation."""

from dilated_attention.models.attended_tiles import TileAttention, tile_attention
from dilated_attention.models.checkpoints import (
    load_gigapath,
    load_longvit,
    load_torchscale,
    read_checkpoint,
    read_weights,
)
from dilated_attention.models.configuration import BlockMixture, IndexedKeys, LongNetConfig, NativeSparse
from dilated_attention.models.generation import KeyValueCache, sample
from dilated_attention.models.gigapath import GigaPathConfig, GigaPathSlideEncoder
from dilated_attention.models.longnet import LongNetAttention, LongNetEncoder, LongNetLM
from dilated_attention.models.longvit import LongViT, LongViTConfig
from dilated_attention.models.pretrained import Pretrained

__all__ = [
    "BlockMixture",
    "GigaPathConfig",
    "GigaPathSlideEncoder",
    "IndexedKeys",
    "KeyValueCache",
    "LongNetAttention",
    "LongNetConfig",
    "LongNetEncoder",
    "LongNetLM",
    "LongViT",
    "LongViTConfig",
    "NativeSparse",
    "Pretrained",
    "TileAttention",
    "load_gigapath",
    "load_longvit",
    "load_torchscale",
    "read_checkpoint",
    "read_weights",
    "sample",
    "tile_attention",
]
