"""Provide self-attention that selects its keys, in place of `SelfAttention` in the blocks of a LongNet."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn

from dilated_attention.models.configuration import LongNetConfig
from dilated_attention.nn import BlockAttentionMixture, NativeSparseAttention
from dilated_attention.plumbing import Tables


class SelectedAttention(nn.Module):
    """Give `NativeSparseAttention` or `BlockAttentionMixture` the interface of `SelfAttention`.

    It is causal, and keeps no keys and values for generation.
    """

    def __init__(self, config: LongNetConfig, backend: str) -> None:
        super().__init__()
        assert config.selection is not None
        self.selected: NativeSparseAttention | BlockAttentionMixture = config.selection.module(
            config.embed_dim, config.num_heads, config.kv_heads, bias=config.bias, backend=backend
        )

    def forward(
        self,
        x: Float[Tensor, "batch seq embed_dim"],
        rotary: Tables | None = None,
        is_causal: bool = False,
        *,
        cu_seqlens: Int[Tensor, " samples_and_one"] | None = None,
        seq_len: int | None = None,
        memory: None = None,
        first_only: bool = False,
    ) -> Float[Tensor, "batch seq embed_dim"]:
        """Return the attention's output, shaped like x. Arguments as in `SelfAttention`; memory is not used."""
        assert is_causal
        assert not first_only
        if self.selected.mesh is not None:
            self.selected.seq_len = seq_len
        return self.selected(x, rotary, cu_seqlens=cu_seqlens)
