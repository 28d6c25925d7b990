"""Use dilated attention in other libraries' models: `nn.MultiheadAttention` here, transformers in `huggingface`."""

from dilated_attention.integrations.multihead import convert_attention

__all__ = ["convert_attention"]
