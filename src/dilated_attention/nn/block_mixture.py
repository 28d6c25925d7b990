"""Compute mixture of block attention: a query sees its own block and the blocks whose mean keys it scores highest."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dilated_attention import checks
from dilated_attention.decoding import listed_attention
from dilated_attention.nn.positions import Tables
from dilated_attention.nn.selection import BlockChoice, BlockSelectingAttention, SelectionCache
from dilated_attention.parallel.choosing import in_whole_blocks, sums_of_blocks
from dilated_attention.torch_internals import without_autocast


class MixtureChoice(BlockChoice):
    """Choose the blocks with the largest q · mean key, for each query head; `key` are the mean keys of whole blocks."""

    def importance(self, q: Tensor, start: int, key: Tensor, blocks: int) -> Tensor:
        mean = key[:, :blocks].permute(0, 2, 3, 1)[:, :, None]
        query = q.to(mean.dtype).unflatten(2, (mean.shape[1], -1)).permute(0, 2, 3, 1, 4)
        with without_autocast(q):
            scores = (query @ mean).flatten(1, 2)
        return F.pad(scores, (0, blocks - scores.shape[-1]))  # a last block that is not whole


class BlockAttentionMixture(BlockSelectingAttention):
    """Compute causal self-attention over blocks that each query and head chooses (MoBA, Lu et al. 2025,
    arXiv:2502.13189).

        out_t = W_o softmax(q_t K[S_t]ᵀ / sqrt(head_dim)) V[S_t],        S_t = {j <= t: block of j in B_t},

    where B_t holds the block of token t and the `top_k - 1` earlier blocks with the largest q_t · mean(K of the
    block). q and k are R W_q x and R W_k x with rotary positions R. The choice has no gradient.

    Memory is O(seq): scores from which queries choose are computed in pieces.

    Args:
        num_kv_heads: the number of KV heads; None: num_heads.
        block_size: the number of tokens per block.
        top_k: the number of blocks that a query sees, including its own.
        query_block: this many neighbouring queries share the blocks that the first of them chooses, as in
            `NativeSparseAttention`; 1 in the paper.
        bias: add a bias to the projections.
        backend: as in `attention`.

    Shapes, padding, packed samples, caches and meshes are as in `NativeSparseAttention`.

    Examples:
        >>> from dilated_attention.nn import BlockAttentionMixture
        >>> layer = BlockAttentionMixture(32, num_heads=4, block_size=8, top_k=2, query_block=4)
        >>> x = torch.randn(1, 64, 32)
        >>> torch.allclose(layer(x)[:, :32], layer(x[:, :32]), atol=1e-5)  # causal: later tokens change nothing
        True
    """

    shown = "embed_dim", "num_heads", "num_kv_heads", "block_size", "top_k", "query_block", "backend"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        block_size: int = 256,
        top_k: int = 4,
        query_block: int = 16,
        bias: bool = False,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads, num_kv_heads, block_size, query_block, backend)
        self.top_k = checks.positive("top_k", top_k)
        self.choice = MixtureChoice(self.block_size, self.query_block, self.top_k)
        factory: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.input = nn.Linear(embed_dim, (self.num_heads + 2 * self.num_kv_heads) * self.head_dim, **factory)
        self.output = nn.Linear(embed_dim, embed_dim, **factory)

    def _whole(self, x: Tensor, rotary: Tables | None, cache: SelectionCache | None) -> Tensor:
        x, edges, rank = self._edges(x)
        q, (k, v) = self._project(x, rotary)
        if self.mesh is None:
            mean = self._means(k)
        else:
            with torch.no_grad():
                mean = sums_of_blocks(self._means, k, self.block_size, self.block_size, edges, rank, self.mesh)

        layout = self._selected(q, mean, edges, rank, cache)
        if cache is not None:
            for name, rows in (("keys", k), ("values", v), ("means", mean)):
                cache.append(name, rows)
            cache.length = x.shape[1]

        return self.output(self._attend(q, k, v, layout, edges[-1]).flatten(-2))

    def _next(self, x: Tensor, rotary: Tables | None, cache: SelectionCache) -> Tensor:
        q, (k, v) = self._project(x, rotary)
        if cache.length % self.query_block == 0:
            cache.chosen = self.choice.blocks(q, cache.length, cache.last("means"))[:, :, 0]
        assert cache.chosen is not None

        cache.append("keys", k)
        cache.append("values", v)
        cache.length += 1
        keys = cache.last("keys")
        values = cache.last("values")
        if cache.length % self.block_size == 0:
            cache.append("means", self._means(keys[:, -self.block_size :]))

        out = listed_attention(q, keys, values, cache.chosen, self.block_size)
        assert isinstance(out, Tensor)
        return self.output(out.flatten(-2))

    def _means(self, k: Tensor) -> Tensor:
        """Return the mean key of each whole block of k, in at least single precision and without gradient; over a mesh
        see `sums_of_blocks`."""
        dtype = torch.promote_types(k.dtype, torch.float32)
        return in_whole_blocks(k.detach(), self.block_size, self.block_size).mean(-1, dtype=dtype)
