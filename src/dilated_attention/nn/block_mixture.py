"""Mix block attention: every query sees its own block and the blocks whose mean keys it scores highest."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from dilated_attention import checks
from dilated_attention.decoding import listed_attention
from dilated_attention.functional import block_sparse_attention
from dilated_attention.layout import BlockLayout
from dilated_attention.nn.positions import Tables, rotate
from dilated_attention.nn.selection import (
    SelectingAttention,
    SelectionCache,
    largest_blocks,
    pieces,
)
from dilated_attention.parallel.choosing import choose_blocks


class BlockAttentionMixture(SelectingAttention):
    """Compute causal self-attention over blocks that each query and head chooses (MoBA, Lu et al. 2025,
    arXiv:2502.13189).

        out_t = W_o softmax(q_t K[S_t]ᵀ / sqrt(head_dim)) V[S_t],        S_t = {j <= t: block of j in B_t},

    where B_t holds the block of token t and the `top_k - 1` earlier blocks with the largest q_t · mean(K of the
    block). q and k are R W_q x and R W_k x with rotary positions R. The choice has no gradient.

    Memory is O(seq), because the scores from which queries choose are computed in pieces of bounded size.

    Args:
        block_size: the number of tokens per block.
        top_k: the number of blocks that a query sees, including its own.
        query_block: this many neighbouring queries share the blocks that the first of them chooses; a later query's
            choice would depend on tokens that the first must not see. It must divide `block_size`. With 1, as in the
            paper, each query chooses and reads its keys by itself, which is slow on a CPU.
        bias: add a bias to the projections.
        backend: as in `attention`.

    Shapes: forward takes x `(batch, seq, embed_dim)`, the `rotary` tables of its tokens, and a `cache` that they
    continue (`SelectionCache`); it returns the shape of x. Pad shorter samples at their ends: no row sees a later one.
    Over a mesh (`parallel.set_context_parallel`) x is this rank's shard, and there is no cache.

    Examples:
        >>> from dilated_attention.nn import BlockAttentionMixture
        >>> layer = BlockAttentionMixture(32, num_heads=4, block_size=8, top_k=2, query_block=4)
        >>> x = torch.randn(1, 64, 32)
        >>> torch.allclose(layer(x)[:, :32], layer(x[:, :32]), atol=1e-5)  # causal: later tokens change nothing
        True
    """

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
        super().__init__(
            embed_dim, num_heads, num_kv_heads, block_size=block_size, query_block=query_block, backend=backend
        )
        self.top_k = checks.positive("top_k", top_k)
        factory: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.input = nn.Linear(embed_dim, (self.num_heads + 2 * self.num_kv_heads) * self.head_dim, **factory)
        self.output = nn.Linear(embed_dim, embed_dim, **factory)

    def extra_repr(self) -> str:
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"block_size={self.block_size}, top_k={self.top_k}, query_block={self.query_block}, "
            f"backend={self.backend!r}"
        )

    def _whole(self, x: Tensor, rotary: Tables | None, cache: SelectionCache | None) -> Tensor:
        q, k, v = self._project(x, rotary)
        if self.mesh is not None:
            return self._over_mesh(q, k, v)
        seq_len = x.shape[1]
        mean, chosen = self._chosen(q, k)
        layout = BlockLayout.from_topk(chosen, (self.query_block, self.block_size), seq_len=seq_len, is_causal=True)
        out = block_sparse_attention(q, k, v, layout, is_causal=True, backend=self.backend)
        assert isinstance(out, Tensor)
        if cache is not None:
            for name, rows in (("keys", k), ("values", v), ("means", mean)):
                cache.append(name, rows)
            cache.length, cache.chosen = seq_len, chosen[:, :, -1]
        return self.output(out.flatten(-2))

    def _over_mesh(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the rows of this rank's shard."""
        assert self.mesh is not None
        size = self.query_block, self.block_size

        def choose(q: Tensor, k: Tensor) -> BlockLayout:
            return BlockLayout.from_topk(self._chosen(q, k)[1], size, seq_len=q.shape[1], is_causal=True)

        layout = choose_blocks(choose, q, k, self.mesh, seq_len=self.seq_len)
        options: dict[str, Any] = {"mesh": self.mesh, "transport": self.transport, "layer": self.layer}
        out = block_sparse_attention(
            q, k, v, layout, is_causal=True, backend=self.backend, seq_len=layout.seq_len, **options
        )
        assert isinstance(out, Tensor)
        return self.output(out.flatten(-2))

    def _chosen(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean keys of a sequence's whole blocks, and the blocks that each group of `query_block` queries
        sees."""
        mean = self._means(k[:, : k.shape[1] // self.block_size * self.block_size])
        position = torch.arange(0, q.shape[1], self.query_block, device=q.device)
        return mean, self._choose(q[:, :: self.query_block], position, mean)

    def _next(self, x: Tensor, rotary: Tables | None, cache: SelectionCache) -> Tensor:
        """Return the output row of one more token."""
        q, k, v = self._project(x, rotary)
        if cache.length % self.query_block == 0:
            position = torch.tensor([cache.length], device=x.device)
            cache.chosen = self._choose(q, position, cache.last("means"))[:, :, 0]
        assert cache.chosen is not None
        cache.append("keys", k)
        cache.append("values", v)
        cache.length += 1
        keys, values = cache.last("keys"), cache.last("values")
        if cache.length % self.block_size == 0:
            cache.append("means", self._means(keys[:, -self.block_size :]))
        out = listed_attention(q, keys, values, cache.chosen, self.block_size)
        assert isinstance(out, Tensor)
        return self.output(out.flatten(-2))

    def _project(self, x: Tensor, rotary: Tables | None) -> tuple[Tensor, Tensor, Tensor]:
        sizes = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        q, k, v = self.input(x).unflatten(-1, (-1, self.head_dim)).split(sizes, -2)
        return (q, k, v) if rotary is None else (rotate(q, rotary[:2]), rotate(k, rotary[-2:]), v)

    @torch.no_grad()
    def _means(self, k: Tensor) -> Tensor:
        """Return the mean keys of all whole blocks, in at least single precision."""
        dtype = torch.promote_types(k.dtype, torch.float32)
        return k.unflatten(1, (-1, self.block_size)).mean(2, dtype=dtype)

    @torch.no_grad()
    def _choose(
        self,
        q: Float[Tensor, "batch queries heads head_dim"],
        position: Int[Tensor, " queries"],
        mean: Float[Tensor, "batch blocks kv_heads head_dim"],
    ) -> Int[Tensor, "batch heads queries chosen"]:
        """Return the blocks that these queries see, -1 where there are fewer than `top_k`."""
        own = position // self.block_size
        blocks = int(own[-1]) + 1
        mean = mean[:, :blocks].permute(0, 2, 3, 1)[:, :, None]
        chosen = []
        for at in pieces(len(position), q.shape[0] * q.shape[2] * blocks):
            query = q[:, at].to(mean.dtype).unflatten(2, (mean.shape[1], -1)).permute(0, 2, 3, 1, 4)
            with torch.autocast(q.device.type, enabled=False):
                scores = (query @ mean).flatten(1, 2)
            scores = F.pad(scores, (0, blocks - scores.shape[-1]))  # a last block that is not whole
            chosen.append(largest_blocks(scores, own[at], self.top_k, local=1, first=False))
        return torch.cat(chosen, 2)
