"""Compute native sparse attention: compressed, selected and nearby keys, mixed by gates."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from dilated_attention import checks
from dilated_attention.call import Pattern
from dilated_attention.decoding import cached_attention, listed_attention, newest_attention
from dilated_attention.errors import UnsupportedError
from dilated_attention.functional import attention
from dilated_attention.layout import BlockLayout
from dilated_attention.nn.positions import Tables, rotate
from dilated_attention.nn.selection import (
    SelectingAttention,
    SelectionCache,
    largest_blocks,
    pieces,
    tables_at,
)
from dilated_attention.patterns import Dilated, layout_for


class BlockPooling(nn.Module):
    """Pool each block of rows into one row, y_i = W_2 gelu(W_1 [x_{id}; …; x_{id + l - 1}] + b_1) + b_2, for each head.

    Here l is the length of a block and d the stride from one block to the next; only whole blocks give a row. W_1 has
    separate columns for every position in the block. The paper also adds a vector to each position; that would only add
    a constant to b_1.
    """

    def __init__(self, head_dim: int, length: int, stride: int, **factory: Any) -> None:
        super().__init__()
        self.length, self.stride = length, stride
        self.hidden = nn.Linear(length * head_dim, head_dim, **factory)
        self.row = nn.Linear(head_dim, head_dim, **factory)

    def number(self, seq_len: int) -> int:
        """Return the number of whole blocks in a sequence."""
        return max(0, (seq_len - self.length) // self.stride + 1)

    def forward(
        self, x: Float[Tensor, "batch seq kv_heads head_dim"]
    ) -> Float[Tensor, "batch blocks kv_heads head_dim"]:
        number, strides = self.number(x.shape[1]), self.length // self.stride
        if not number:
            return x[:, :0]
        rows = x[:, : (number + strides - 1) * self.stride]
        rows = rows.unflatten(1, (-1, self.stride)).transpose(2, 3).flatten(3)  # (batch, strides of all, heads, d * D)
        blocks = torch.cat([rows[:, i : i + number] for i in range(strides)], -1)
        return self.row(F.gelu(self.hidden(blocks)))


class NativeSparseAttention(SelectingAttention):
    """Compute causal native sparse self-attention (NSA, Yuan et al. 2025, arXiv:2502.11089).

        out_t = W_o sum_c g_t^c A^c(R W_q x_t, K^c, V^c),       g_t = sigmoid(W_g x_t + b_g), one per head and branch,

    with three branches c. Each has its own keys and values, which the query heads of a group share.

    - compressed: key i is W_2 gelu(W_1 [k_{id}; …; k_{id + l - 1}]), and its value is made in the same way; l is
      `compress_block`, d is `compress_stride`. A query sees the compressed keys whose blocks end at or before it; if
      there are none, this branch gives 0.
    - selected: tokens j <= t of `num_selected` blocks of `block_size` tokens. The probabilities of the compressed
      branch, summed over the query heads of a key-value head, give a block its importance: each d-token piece of the
      block adds the probabilities of the compressed keys that cover it. The first block, and the last `local_blocks`
      blocks up to the block of t, are always selected.
    - window: tokens j <= t in the block of t, and in earlier blocks that hold a token less than `window` tokens
      before the first token of that block. Blocks have `block_size` tokens.
    - pattern: dilated attention with `pattern`, a fourth branch that exists only if `pattern` is given.

    The selection has no gradient; the scores behind it learn through the compressed branch. R stands for rotary
    positions. A compressed key is pooled first and then rotated to the position of its last token.

    Memory is O(seq), because scores are computed for the selecting queries only, in pieces of bounded size.

    Args:
        num_selected: the number of blocks that a query selects, including those that are always selected.
        query_block: this many neighbouring queries share the blocks that the first of them selects; a later query's
            choice would depend on tokens that the first must not see. It must divide `block_size`. With 1, as in the
            paper, each query selects and reads its keys by itself, which is slow on a CPU.
        pattern: the pattern of the fourth branch; None: three branches.
        bias: add a bias to the projections W_q, W_k, W_v and W_o.
        backend: as in `attention`.

    Shapes: forward takes x `(batch, seq, embed_dim)`, the `rotary` tables of its tokens, and a `cache` that they
    continue (`SelectionCache`); it returns the shape of x. Pad shorter samples at their ends: no row sees a later one.

    Examples:
        >>> from dilated_attention.nn import NativeSparseAttention
        >>> sizes = {"compress_block": 8, "compress_stride": 4, "block_size": 8, "num_selected": 4, "window": 8}
        >>> layer = NativeSparseAttention(32, num_heads=4, num_kv_heads=2, query_block=4, **sizes)
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
        compress_block: int = 32,
        compress_stride: int = 16,
        block_size: int = 64,
        num_selected: int = 16,
        local_blocks: int = 2,
        window: int = 512,
        query_block: int = 16,
        pattern: Dilated | None = None,
        bias: bool = False,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, num_kv_heads, block_size=block_size, query_block=query_block, backend=backend
        )
        compress_block = checks.positive("compress_block", compress_block)
        compress_stride = checks.positive("compress_stride", compress_stride)
        if compress_block % compress_stride:
            raise ValueError(f"compress_stride={compress_stride} must divide compress_block={compress_block}")
        if self.block_size % compress_stride:
            raise ValueError(f"compress_stride={compress_stride} must divide block_size={block_size}")
        local_blocks = checks.positive("local_blocks", local_blocks)
        num_selected = checks.positive("num_selected", num_selected)
        if num_selected < local_blocks + 1:
            raise ValueError(
                f"num_selected={num_selected} must have room for the first block and local_blocks={local_blocks}"
            )
        window = checks.positive("window", window)
        if pattern is not None and (not isinstance(pattern, Dilated) or pattern.compat is not None):
            raise ValueError(f"pattern must be a Dilated without compat, or None; got {pattern!r}")
        self.num_selected, self.local_blocks = num_selected, local_blocks
        self.window, self.pattern = window, pattern
        self.branches = 3 if pattern is None else 4
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        rows = num_heads + 2 * self.branches * self.num_kv_heads
        self.input = nn.Linear(embed_dim, rows * self.head_dim, bias=bias, **factory)
        self.gate = nn.Linear(embed_dim, self.branches * num_heads, **factory)
        self.key_pooling = BlockPooling(self.head_dim, compress_block, compress_stride, **factory)
        self.value_pooling = BlockPooling(self.head_dim, compress_block, compress_stride, **factory)
        self.output = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)
        self._window_layout = partial(BlockLayout.local, window=window, block_size=self.block_size, is_causal=True)

    def extra_repr(self) -> str:
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"compress_block={self.key_pooling.length}, compress_stride={self.key_pooling.stride}, "
            f"block_size={self.block_size}, num_selected={self.num_selected}, local_blocks={self.local_blocks}, "
            f"window={self.window}, query_block={self.query_block}, pattern={self.pattern}, backend={self.backend!r}"
        )

    def set_context_parallel(self, mesh: Any, transport: str = "auto", layer: str = "") -> None:
        """Refuse a mesh: a rank would pool and select among the tokens of its own shard alone."""
        if mesh is not None:
            raise UnsupportedError(
                f"{type(self).__name__} runs on one device; over a mesh use nn.BlockAttentionMixture"
            )
        super().set_context_parallel(None)

    def _whole(self, x: Tensor, rotary: Tables | None, cache: SelectionCache | None) -> Tensor:
        q, (pooled_k, pooled_v, k, v, near_k, near_v, *far) = self._project(x, rotary)
        seq_len = x.shape[1]
        last_tokens = slice(self.key_pooling.length - 1, None, self.key_pooling.stride)
        key = self._compressed_keys(pooled_k, tables_at(rotary, last_tokens))
        value = self.value_pooling(pooled_v)
        position = torch.arange(0, seq_len, self.query_block, device=x.device)
        chosen = self._select(q[:, :: self.query_block], position, key)
        layout = BlockLayout.from_topk(chosen, (self.query_block, self.block_size), seq_len=seq_len, is_causal=True)
        outs = [
            self._attend_compressed(q, key, value),
            self._attend(q, k, v, layout),
            self._attend(q, near_k, near_v, layout_for(self._window_layout, seq_len)),
        ]
        if self.pattern is not None:
            outs.append(self._attend(q, far[0], far[1], self.pattern))
        if cache is not None:
            self._remember(cache, pooled_k, pooled_v, k, v, near_k, near_v, *far)
            self._append(cache, "compressed", key, value)
            cache.chosen = chosen[:, :, -1]
        return self._mix(x, outs)

    def _next(self, x: Tensor, rotary: Tables | None, cache: SelectionCache) -> Tensor:
        """Return the output row of one more token."""
        q, rows = self._project(x, rotary)
        position = cache.length
        self._remember(cache, *rows)
        length, stride = self.key_pooling.length, self.key_pooling.stride
        if cache.length >= length and (cache.length - length) % stride == 0:
            pooled_k, pooled_v = self._last(cache, "pooled", length)
            self._append(cache, "compressed", self._compressed_keys(pooled_k, rotary), self.value_pooling(pooled_v))
        key, value = self._last(cache, "compressed")
        if position % self.query_block == 0:
            at = torch.tensor([position], device=x.device)
            cache.chosen = self._select(q, at, key)[:, :, 0]
        assert cache.chosen is not None
        start = max(0, position // self.block_size * self.block_size - (self.window - 1))
        near = cache.length - start // self.block_size * self.block_size
        near_k, near_v = self._last(cache, "window", near)
        listed = listed_attention(q, *self._last(cache, "selected"), cache.chosen, self.block_size)
        assert isinstance(listed, Tensor)
        outs = [
            newest_attention(q, key.transpose(1, 2), value.transpose(1, 2))[0],
            listed,
            newest_attention(q, near_k.transpose(1, 2), near_v.transpose(1, 2))[0],
        ]
        if self.pattern is not None:
            outs.append(cached_attention(q, *self._last(cache, "pattern"), self.pattern))
        return self._mix(x, outs)

    def _project(self, x: Tensor, rotary: Tables | None) -> tuple[Tensor, list[Tensor]]:
        """Return the queries, and the keys and values of each branch.

        They are rotated, except the keys that are pooled first.
        """
        sizes = [self.num_heads] + [self.num_kv_heads] * (2 * self.branches)
        q, *rest = self.input(x).unflatten(-1, (-1, self.head_dim)).split(sizes, -2)
        if rotary is not None:
            q = rotate(q, rotary[:2])
            rest[2::2] = [rotate(k, rotary[-2:]) for k in rest[2::2]]
        return q, rest

    def _mix(self, x: Tensor, outs: list[Tensor]) -> Tensor:
        gates = self.gate(x).sigmoid().unflatten(-1, (self.branches, self.num_heads, 1)).unbind(2)
        mixed = outs[0] * gates[0]
        for out, gate in zip(outs[1:], gates[1:], strict=True):
            mixed = torch.addcmul(mixed, out, gate)
        return self.output(mixed.flatten(-2))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> Tensor:
        out = attention(q, k, v, pattern, is_causal=True, backend=self.backend)
        assert isinstance(out, Tensor)
        return out

    # ---- the compressed branch

    def _compressed_keys(self, k: Tensor, rotary: Tables | None) -> Tensor:
        key = self.key_pooling(k)
        return key if rotary is None or not key.shape[1] else rotate(key, rotary[-2:])

    def _attend_compressed(self, q: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend to the compressed keys.

        Each run of d queries sees the same number of compressed keys. With the d queries of a run as d heads, this is
        causal attention with one key per run.
        """
        (_, seq_len, heads, _), number, stride = q.shape, key.shape[1], self.key_pooling.stride
        if not number:
            return torch.zeros_like(q)
        first = self.key_pooling.length - 1
        rows = F.pad(q[:, first:], (0, 0, 0, 0, 0, number * stride - (seq_len - first)))
        rows = rows.unflatten(1, (number, stride)).transpose(2, 3).flatten(2, 3)
        out = self._attend(rows, key, value, Dilated((number,), (1,)))
        out = out.unflatten(2, (heads, stride)).transpose(2, 3).flatten(1, 2)[:, : seq_len - first]
        return F.pad(out, (0, 0, 0, 0, first, 0))

    # ---- the selection

    @torch.no_grad()
    def _select(
        self,
        q: Float[Tensor, "batch queries heads head_dim"],
        position: Int[Tensor, " queries"],
        key: Float[Tensor, "batch blocks kv_heads head_dim"],
    ) -> Int[Tensor, "batch kv_heads queries chosen"]:
        """Return the blocks that these queries select, -1 where there are fewer than `num_selected`."""
        own = position // self.block_size
        blocks = int(own[-1]) + 1
        seen = ((position + 1 - self.key_pooling.length) // self.key_pooling.stride + 1).clamp(min=0)
        return torch.cat(
            [
                largest_blocks(
                    self._importance(q[:, at], seen[at], key, blocks),
                    own[at],
                    self.num_selected,
                    local=self.local_blocks,
                    first=True,
                )
                for at in pieces(len(position), q.shape[0] * q.shape[2] * max(blocks, key.shape[1]))
            ],
            2,
        )

    def _importance(self, q: Tensor, seen: Tensor, key: Tensor, blocks: int) -> Tensor:
        """Return the importance of each block: the probabilities of the compressed keys that cover it.

        `seen`: how many of the first compressed keys each query sees. Probabilities are summed over the query heads of
        a KV head.
        """
        dtype = torch.promote_types(q.dtype, torch.float32)
        number = int(seen[-1])
        if not number:
            return q.new_zeros(len(q), self.num_kv_heads, len(seen), blocks, dtype=dtype)
        query = q.to(dtype).unflatten(2, (self.num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
        with torch.autocast(q.device.type, enabled=False):
            scores = query @ key[:, :number].to(dtype).permute(0, 2, 3, 1)[:, :, None] * self.head_dim**-0.5
        hidden = torch.arange(number, device=q.device) >= seen[:, None]
        probability = scores.masked_fill_(hidden, -torch.inf).softmax(-1).masked_fill_(hidden, 0.0).sum(2)
        strides = self.block_size // self.key_pooling.stride
        importance = probability.new_zeros(*probability.shape[:3], blocks)
        for shift in range(self.key_pooling.length // self.key_pooling.stride):
            shifted = F.pad(probability, (shift, blocks * strides - number - shift))
            importance += shifted.unflatten(-1, (blocks, strides)).sum(-1)
        return importance

    # ---- the cache

    def _remember(self, cache: SelectionCache, *rows: Tensor) -> None:
        """Append the keys and values of each branch of new tokens to the cache."""
        keep = {"pooled": self.key_pooling.length, "window": self.window + 2 * self.block_size}
        names = ("pooled", "selected", "window", "pattern")[: self.branches]
        for i, name in enumerate(names):
            self._append(cache, name, *rows[2 * i : 2 * i + 2], keep=keep.get(name))
        cache.length += rows[0].shape[1]

    @staticmethod
    def _append(cache: SelectionCache, name: str, k: Tensor, v: Tensor, *, keep: int | None = None) -> None:
        cache.append(f"{name} keys", k, keep)
        cache.append(f"{name} values", v, keep)

    @staticmethod
    def _last(cache: SelectionCache, name: str, number: int | None = None) -> tuple[Tensor, Tensor]:
        return cache.last(f"{name} keys", number), cache.last(f"{name} values", number)
