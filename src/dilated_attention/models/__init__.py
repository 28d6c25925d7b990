"""Models: LongNet as encoder, language model and encoder-decoder, with generation."""

from dilated_attention.models.configuration import EncoderDecoderConfig, LongNetConfig
from dilated_attention.models.generation import KeyValueCache, sample
from dilated_attention.models.longnet import LongNet, LongNetEncoder, LongNetLM

__all__ = [
    "EncoderDecoderConfig",
    "KeyValueCache",
    "LongNet",
    "LongNetConfig",
    "LongNetEncoder",
    "LongNetLM",
    "sample",
]
