"""The pre-norm transformer block."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from dilated_attention.functional import dilated_attention
from dilated_attention.nn.attention import DilatedAttention
from dilated_attention.nn.positions import rotate
from dilated_attention.parallel.sharding import mesh_size
from dilated_attention.patterns import Dilated


class SelfAttention(nn.Module):
    """W_o A(R W_q x, R W_k x, W_v x): rotary positions R, grouped queries, no biases.

    A is dilated attention of `pattern`, or dense attention by PyTorch's fused op where `pattern` is None; over a mesh
    dense attention is the pattern of one segment.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, num_kv_heads: int, pattern: Dilated | None, backend: str = "auto"
    ) -> None:
        super().__init__()
        self.heads = (num_heads, num_kv_heads, num_kv_heads)
        self.head_dim = embed_dim // num_heads
        self.input = nn.Linear(embed_dim, sum(self.heads) * self.head_dim, bias=False)
        self.output = nn.Linear(embed_dim, embed_dim, bias=False)
        self.attention = (
            None
            if pattern is None
            else DilatedAttention(
                pattern.segment_lengths,
                pattern.dilation_rates,
                offsets=pattern.offsets,
                head_groups=pattern.head_groups,
                backend=backend,
            )
        )
        self.backend = backend
        self.mesh, self.transport, self.layer = None, "auto", ""

    def set_context_parallel(self, mesh: Any, transport: str = "auto", layer: str = "") -> None:
        """Run over `mesh`, None for one device. See `parallel.set_context_parallel`."""
        self.mesh, self.transport, self.layer = mesh, transport, layer

    def forward(
        self,
        x: Float[Tensor, "batch seq embed_dim"],
        rotary: tuple[Tensor, Tensor],
        is_causal: bool = False,
        seq_len: int | None = None,
    ) -> Float[Tensor, "batch seq embed_dim"]:
        q, k, v = self.input(x).unflatten(-1, (-1, self.head_dim)).split(self.heads, -2)
        q, k = rotate(q, rotary), rotate(k, rotary)
        if self.attention is not None:
            out = self.attention(q, k, v, is_causal=is_causal, seq_len=seq_len)
        elif self.mesh is not None:
            whole = q.shape[1] * mesh_size(self.mesh) if seq_len is None else seq_len
            out = dilated_attention(
                q, k, v, (max(whole, 1),), (1,), is_causal=is_causal, backend=self.backend,
                mesh=self.mesh, seq_len=whole, transport=self.transport, layer=self.layer,
            )  # fmt: skip
        else:
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                is_causal=is_causal,
                enable_gqa=self.heads[0] != self.heads[1],
            ).transpose(1, 2)
        return self.output(out.flatten(-2))


class TransformerBlock(nn.Module):
    """x + A(norm x), then x + W_2 gelu(W_1 norm x)."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        mlp_dim: int,
        pattern: Dilated | None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(embed_dim)
        self.attention = SelfAttention(embed_dim, num_heads, num_kv_heads, pattern, backend)
        self.mlp_norm = nn.LayerNorm(embed_dim)
        self.mlp = nn.Sequential(
            nn.Linear(embed_dim, mlp_dim, bias=False), nn.GELU(), nn.Linear(mlp_dim, embed_dim, bias=False)
        )

    def forward(
        self,
        x: Float[Tensor, "batch seq embed_dim"],
        rotary: tuple[Tensor, Tensor],
        is_causal: bool = False,
        seq_len: int | None = None,
    ) -> Float[Tensor, "batch seq embed_dim"]:
        x = x + self.attention(self.attention_norm(x), rotary, is_causal, seq_len)
        return x + self.mlp(self.mlp_norm(x))
