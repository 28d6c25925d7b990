"""Compute attention over the keys that an indexer chooses: a query sees the tokens whose index is largest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dilated_attention import checks
from dilated_attention.decoding import listed_attention
from dilated_attention.nn.positions import Tables
from dilated_attention.nn.selection import SelectingAttention, SelectionCache, attend_listed
from dilated_attention.parallel.choosing import fetch_listed
from dilated_attention.parallel.sharding import cp_mean, gathered, require_same
from dilated_attention.patterns import Dilated
from dilated_attention.routing import Indexer
from dilated_attention.torch_internals import not_traced


class IndexedAttention(SelectingAttention):
    """Compute causal self-attention over the tokens that an indexer chooses for each query (DeepSeek Sparse Attention;
    DeepSeek-AI 2025, DeepSeek-V3.2).

        out_t = W_o softmax(q_t K[S_t]ᵀ / sqrt(head_dim)) V[S_t],        S_t = the tokens s <= t that `indexer` chooses,

    the same for all heads. q and k are R W_q x and R W_k x with rotary positions R, which also rotate the index heads.
    See `routing.Indexer` for the index. The choice has no gradient: the indexer learns from `index_loss` alone, and
    the other parameters do not.

    The index is computed for some queries at a time, N² values in all; memory is O(seq top_k). Over a mesh the index
    keys of all tokens travel, and then the keys and values that a rank's queries chose, once each.

    Args:
        num_kv_heads: the number of KV heads; None: num_heads.
        top_k: the number of tokens that a query sees. A sequence of at most `top_k` tokens is attended densely.
        index_heads: the number of index heads, each as wide as a head.
        leading, recent: how many tokens each query always sees at both ends; part of `top_k`.
        bias: add a bias to the projections, but not to those of the indexer.
        backend: as in `attention`.

    Shapes, padding, packed samples, caches and meshes are as in `NativeSparseAttention`.

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

        Over a mesh it is the mean over the tokens of all ranks, and the mean of the ranks' gradients equals the
        gradient on one device (see `parallel.cp_mean`). The keys of all tokens travel.

        Args:
            rotary, cu_seqlens: as in `forward`.
            lengths: the number of tokens of each sample; those after it do not count. Over a mesh, in the whole
                sequence.
        """
        if self.mesh is not None:
            if cu_seqlens is not None:
                self._refuse_packed()
            return self._index_loss_over_mesh(x, rotary, lengths)
        with torch.no_grad():
            q, (k, _) = self._project(x, rotary)
        return self.indexer.loss(x, q, k, tables=rotary, lengths=lengths, cu_seqlens=cu_seqlens)

    @not_traced
    def _index_loss_over_mesh(self, x: Tensor, rotary: Tables | None, lengths: Any) -> Tensor:
        assert self.mesh is not None
        given = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        require_same("index_loss", self.mesh, x.new_empty(0), lengths=given)
        x, edges, rank = self._edges(x.detach())
        start, stop = edges[rank : rank + 2]
        if lengths is None:
            lengths = [edges[-1]] * len(x)
        counts, _ = checks.ragged(x, lengths, None)
        assert counts is not None
        checks.indices("lengths", counts, 0, edges[-1] + 1)
        counts = counts.to(x.device)
        share = counts.sum().clamp(min=1).double() / (len(edges) - 1)  # the ranks add their shares of the tokens up
        counts = counts.clamp(max=stop)
        token = torch.arange(start, stop, device=x.device)
        x = x.masked_fill((token >= counts[:, None])[..., None], 0.0)

        keys = gathered(self.indexer.keys(x, tables=rotary), 1, edges, self.mesh, "index keys")[:, :stop]
        with torch.no_grad():
            q, (k, _) = self._project(x, rotary)
            k = gathered(k, 1, edges, self.mesh, "keys")[:, :stop]
        mean = self.indexer.loss(x, q, k, keys=keys, tables=rotary, lengths=counts)
        return cp_mean(mean * (counts - start).clamp(min=0).sum(), share, self.mesh)

    def _whole(self, x: Tensor, rotary: Tables | None, cache: SelectionCache | None) -> Tensor:
        x, edges, rank = self._edges(x)
        q, (k, v) = self._project(x, rotary)
        seq_len = edges[-1]
        if seq_len <= self.indexer.top_k or x.is_meta:  # there no key can be chosen, and the shapes are the same
            out = self._attend(q, k, v, Dilated((seq_len,), (1,)), seq_len)
        elif self.mesh is None:
            out = self._attend(q, k, v, self.indexer(x, tables=rotary), seq_len)
        else:
            with torch.no_grad():
                keys = gathered(self.indexer.keys(x, tables=rotary), 1, edges, self.mesh, "index keys")
            chosen = self.indexer.choose_next(x, keys[:, : edges[rank + 1]], tables=rotary)
            k, v, chosen = fetch_listed(k, v, chosen, edges, self.mesh, "chosen keys")
            out = attend_listed(q, k, v, chosen[:, None], backend=self.backend)
        if cache is not None:
            self._remember(cache, x, rotary, k, v)
        return self.output(out.flatten(-2))

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
