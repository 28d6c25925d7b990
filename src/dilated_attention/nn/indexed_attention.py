"""Compute attention over the keys that an indexer chooses: a query sees the tokens whose index is largest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dilated_attention.decoding import listed_attention
from dilated_attention.errors import UnsupportedError
from dilated_attention.layout import BlockLayout
from dilated_attention.nn.positions import Tables
from dilated_attention.nn.selection import SelectingAttention, SelectionCache
from dilated_attention.patterns import Dilated
from dilated_attention.routing import Indexer


class IndexedAttention(SelectingAttention):
    """Compute causal self-attention over the tokens that an indexer chooses for each query (DeepSeek Sparse Attention;
    DeepSeek-AI 2025, DeepSeek-V3.2).

        out_t = W_o softmax(q_t K[S_t]ᵀ / sqrt(head_dim)) V[S_t],        S_t = the tokens s <= t that `indexer` chooses,

    the same for all heads. q and k are R W_q x and R W_k x with rotary positions R, which also rotate the index heads.
    See `routing.Indexer` for the index. The choice has no gradient: the indexer learns from `index_loss` alone, and
    the other parameters do not.

    The index is computed for some queries at a time, N² values in all; memory is O(seq top_k).

    Args:
        num_kv_heads: the number of KV heads; None: num_heads.
        top_k: the number of tokens that a query sees. A sequence of at most `top_k` tokens is attended densely.
        index_heads: the number of index heads, each as wide as a head.
        leading, recent: how many tokens each query always sees at both ends; part of `top_k`.
        bias: add a bias to the projections, but not to those of the indexer.
        backend: as in `attention`.

    Shapes, padding, packed samples and caches are as in `NativeSparseAttention`. A mesh is not supported.

    Examples:
        >>> from dilated_attention.nn import IndexedAttention
        >>> layer = IndexedAttention(32, num_heads=4, top_k=8, index_heads=2)
        >>> x = torch.randn(1, 64, 32)
        >>> torch.allclose(layer(x)[:, :32], layer(x[:, :32]), atol=1e-5)  # causal: later tokens change nothing
        True
        >>> layer.index_loss(x).backward()  # trains the indexer
    """

    shown = "embed_dim", "num_heads", "num_kv_heads", "backend"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        top_k: int = 2048,
        index_heads: int = 4,
        leading: int = 0,
        recent: int = 1,
        bias: bool = False,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads, num_kv_heads, backend)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        rows = self.num_heads + 2 * self.num_kv_heads
        self.input = nn.Linear(embed_dim, rows * self.head_dim, bias=bias, **factory)
        self.indexer = Indexer(
            embed_dim, index_heads, self.head_dim, top_k=top_k, leading=leading, recent=recent, **factory
        )
        self.output = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)

    def set_context_parallel(self, mesh: Any, transport: str = "auto", layer: str = "") -> None:
        """Take None. A mesh raises UnsupportedError."""
        if mesh is not None:
            raise UnsupportedError(
                "IndexedAttention over a mesh is not supported; use NativeSparseAttention or BlockAttentionMixture"
            )
        super().set_context_parallel(None)

    def index_loss(
        self,
        x: Float[Tensor, "batch seq embed_dim"],
        rotary: Tables | None = None,
        *,
        lengths: Sequence[int] | Int[Tensor, " batch"] | None = None,
        cu_seqlens: Sequence[int] | Int[Tensor, " samples_and_one"] | None = None,
    ) -> Float[Tensor, ""]:
        """Return the indexer's loss: the mean over tokens of KL(attention over all keys || softmax of the index), in
        nats. It has gradients for the indexer's parameters only. See `routing.Indexer.loss`.

        Args:
            rotary, cu_seqlens: as in `forward`.
            lengths: the number of tokens of each sample; those after it do not count.
        """
        with torch.no_grad():
            q, (k, _) = self._project(x, rotary)
        return self.indexer.loss(x, q, k, tables=rotary, lengths=lengths, cu_seqlens=cu_seqlens)

    def _whole(self, x: Tensor, rotary: Tables | None, cache: SelectionCache | None) -> Tensor:
        q, (k, v) = self._project(x, rotary)
        seq_len = x.shape[1]
        pattern: Dilated | BlockLayout = Dilated((seq_len,), (1,))
        if seq_len > self.indexer.top_k and not x.is_meta:  # there no key can be chosen, and the shapes are the same
            pattern = self.indexer(x, tables=rotary)
        if cache is not None:
            self._remember(cache, x, rotary, k, v)
        return self.output(self._attend(q, k, v, pattern, seq_len).flatten(-2))

    def _next(self, x: Tensor, rotary: Tables | None, cache: SelectionCache) -> Tensor:
        q, (k, v) = self._project(x, rotary)
        self._remember(cache, x, rotary, k, v)
        chosen = self.indexer.choose_next(x, cache.last("index"), tables=rotary)
        out = listed_attention(q, cache.last("keys"), cache.last("values"), chosen)
        assert isinstance(out, Tensor)
        return self.output(out.flatten(-2))

    def _remember(self, cache: SelectionCache, x: Tensor, rotary: Tables | None, k: Tensor, v: Tensor) -> None:
        """Append new tokens to the cache: their keys, values and index keys."""
        with torch.no_grad():
            index = self.indexer.keys(x, tables=rotary)
        for name, rows in (("keys", k), ("values", v), ("index", index)):
            cache.append(name, rows)
        cache.length += x.shape[1]
