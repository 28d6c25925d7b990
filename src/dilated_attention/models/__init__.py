"""Models: the LongNet language model and its configuration."""

from dilated_attention.models.longnet import LongNetConfig, LongNetLM

__all__ = ["LongNetConfig", "LongNetLM"]
