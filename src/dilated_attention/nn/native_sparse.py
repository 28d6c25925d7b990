"""Compute native sparse attention: compressed, selected and nearby keys, mixed by gates."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from dilated_attention import checks
from dilated_attention.decoding import cached_attention, listed_attention, newest_attention
from dilated_attention.functional import attention
from dilated_attention.layout import BlockLayout
from dilated_attention.nn.positions import Tables, rotate
from dilated_attention.nn.selection import BlockChoice, BlockSelectingAttention, SelectionCache
from dilated_attention.parallel.choosing import in_whole_blocks, sums_of_blocks, whole_blocks
from dilated_attention.parallel.sharding import gathered
from dilated_attention.patterns import Dilated, layout_for
from dilated_attention.routing.indexer import tables_at
from dilated_attention.torch_internals import without_autocast


class BlockPooling(nn.Module):
    """Pool each block of rows into one row, y_i = W_2 gelu(W_1 [x_{i·d}; …; x_{i·d+l-1}] + b_1) + b_2, for each head.

    Here l is the length of a block and d the stride from one block to the next; only whole blocks give a row. All heads
    share the weights. W_1 has separate columns for every position in the block. The vectors that the paper adds to the
    positions are left out: b_1 includes their effect.

    forward: x `(batch, seq, kv_heads, head_dim)` -> `(batch, blocks, kv_heads, head_dim)`. factory: device and dtype.
    """

    def __init__(self, head_dim: int, length: int, stride: int, **factory: Any) -> None:
        super().__init__()
        self.length = length
        self.stride = stride
        self.hidden = nn.Linear(length * head_dim, head_dim, **factory)
        self.row = nn.Linear(head_dim, head_dim, **factory)

    def forward(
        self, x: Float[Tensor, "batch seq kv_heads head_dim"]
    ) -> Float[Tensor, "batch blocks kv_heads head_dim"]:
        return self.row(F.gelu(self.hidden(self._blocks(x))))

    def sums(self, x: Tensor) -> Tensor:
        """Return W_1 [x_{i·d}; …; x_{i·d+l-1}] for each block, shaped like the result of forward (`sums_of_blocks`)."""
        return self.hidden(self._blocks(x)) - self._of_nothing(x)

    def of_sums(self, sums: Tensor) -> Tensor:
        return self.row(F.gelu(sums + self._of_nothing(sums)))

    def _of_nothing(self, x: Tensor) -> Tensor:
        """Return b_1, by a call, since other code may have put an adapter or a quantized layer in place of `hidden`."""
        return self.hidden(x.new_zeros(1, self.length * x.shape[-1]))

    def _blocks(self, x: Tensor) -> Tensor:
        return in_whole_blocks(x, self.length, self.stride).mT.flatten(3)


@dataclass(frozen=True)
class NativeChoice(BlockChoice):
    """Choose the blocks on which most of the compressed branch's softmax falls, for each KV head.

    Attributes:
        length, stride: of the blocks of tokens behind each compressed key, see `BlockPooling`.
    """

    length: int = 32
    stride: int = 16
    per_kv_head = True

    def importance(self, q: Tensor, start: int, key: Tensor, blocks: int) -> Tensor:
        """Return how much weight these queries give to blocks 0 … `blocks` - 1, `(batch, kv_heads, queries, blocks)`.

        It is the softmax over the compressed keys, summed over the query heads of a KV head. Each stride of a block
        adds the probabilities of all compressed keys that cover it. A query that sees no compressed key gets 0.
        """
        dtype = torch.promote_types(q.dtype, torch.float32)
        queries = q.shape[1]
        step = self.query_block
        number = whole_blocks(start + (queries - 1) * step + 1, self.length, self.stride)  # that the last query sees
        if not number:
            return q.new_zeros(len(q), key.shape[2], queries, blocks, dtype=dtype)

        position = torch.arange(start, start + queries * step, step, device=q.device)
        seen = (position + 1 - self.length) // self.stride + 1
        query = q.to(dtype).unflatten(2, (key.shape[2], -1)).permute(0, 2, 3, 1, 4)
        with without_autocast(q):
            scores = query @ key[:, :number].to(dtype).permute(0, 2, 3, 1)[:, :, None] * q.shape[3] ** -0.5
        hidden = torch.arange(number, device=q.device) >= seen[:, None]
        probability = scores.masked_fill_(hidden, -torch.inf).softmax(-1).masked_fill_(hidden, 0.0).sum(2)

        strides = self.block_size // self.stride
        importance = probability.new_zeros(*probability.shape[:3], blocks)
        for shift in range(self.length // self.stride):
            shifted = F.pad(probability, (shift, blocks * strides - number - shift))
            importance += shifted.unflatten(-1, (blocks, strides)).sum(-1)
        return importance


class NativeSparseAttention(BlockSelectingAttention):
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
        num_kv_heads: the number of KV heads; None: num_heads.
        num_selected: the number of blocks that a query selects, including those that are always selected.
        query_block: this many neighbouring queries share the blocks that the first of them selects, so that the choice
            depends on no token that one of them must not see. It must divide `block_size`. With 1, as in the paper,
            each query selects and reads its keys by itself, which is slow on a CPU.
        pattern: the pattern of the fourth branch; None: three branches.
        bias: add a bias to the projections W_q, W_k, W_v and W_o.
        backend: as in `attention`.

    Shapes: forward takes x `(batch, seq, embed_dim)`, the `rotary` tables of its tokens, and as `cache` the
    `SelectionCache` of the tokens before x; it returns the shape of x. Pad shorter samples at their ends, since no row
    sees a later one, or pack them and give `cu_seqlens`. Over a mesh (`parallel.set_context_parallel`) x is this rank's
    shard, and cache must be None.

    Examples:
        >>> from dilated_attention.nn import NativeSparseAttention
        >>> sizes = {"compress_block": 8, "compress_stride": 4, "block_size": 8, "num_selected": 4, "window": 8}
        >>> layer = NativeSparseAttention(32, num_heads=4, num_kv_heads=2, query_block=4, **sizes)
        >>> x = torch.randn(1, 64, 32)
        >>> torch.allclose(layer(x)[:, :32], layer(x[:, :32]), atol=1e-5)  # causal: later tokens change nothing
        True
    """

    unrotated = 1  # the compressed branch, whose keys are pooled before they are rotated
    shown = (
        "embed_dim", "num_heads", "num_kv_heads", "compress_block", "compress_stride", "block_size", "num_selected",
        "local_blocks", "window", "query_block", "pattern", "backend",
    )  # fmt: skip

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
        super().__init__(embed_dim, num_heads, num_kv_heads, block_size, query_block, backend)
        self.compress_block = checks.positive("compress_block", compress_block)
        self.compress_stride = checks.positive("compress_stride", compress_stride)
        for name in ("compress_block", "block_size"):
            if getattr(self, name) % self.compress_stride:
                raise ValueError(f"compress_stride={self.compress_stride} must divide {name}={getattr(self, name)}")
        self.local_blocks = checks.positive("local_blocks", local_blocks)
        self.num_selected = checks.positive("num_selected", num_selected)
        if self.num_selected < self.local_blocks + 1:
            raise ValueError(
                f"num_selected={self.num_selected} must have room for the first block and "
                f"local_blocks={self.local_blocks}"
            )
        self.window = checks.positive("window", window)
        if pattern is not None and (not isinstance(pattern, Dilated) or pattern.compat is not None):
            raise ValueError(f"pattern must be a Dilated without compat, or None; got {pattern!r}")
        self.pattern = pattern
        self.branches = 3 if pattern is None else 4
        self.choice = NativeChoice(
            self.block_size, self.query_block, self.num_selected, self.local_blocks, first=True,
            length=self.compress_block, stride=self.compress_stride,
        )  # fmt: skip

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        rows = num_heads + 2 * self.branches * self.num_kv_heads
        self.input = nn.Linear(embed_dim, rows * self.head_dim, bias=bias, **factory)
        self.gate = nn.Linear(embed_dim, self.branches * num_heads, **factory)
        self.key_pooling = BlockPooling(self.head_dim, self.compress_block, self.compress_stride, **factory)
        self.value_pooling = BlockPooling(self.head_dim, self.compress_block, self.compress_stride, **factory)
        self.output = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)
        self._window_layout = partial(BlockLayout.local, window=self.window, block_size=self.block_size, is_causal=True)

    def _whole(self, x: Tensor, rotary: Tables | None, cache: SelectionCache | None) -> Tensor:
        x, edges, rank = self._edges(x)
        q, (pooled_k, pooled_v, k, v, near_k, near_v, *far) = self._project(x, rotary)
        if self.mesh is None:
            last_tokens = slice(self.compress_block - 1, None, self.compress_stride)
            key = self._compressed_keys(pooled_k, tables_at(rotary, last_tokens))
            value = self.value_pooling(pooled_v)
        else:
            key, value = self._compressed_over_mesh(pooled_k, pooled_v, rotary, edges, rank)
        layout = self._selected(q, key, edges, rank, cache)

        seq_len = edges[-1]
        outs = [
            self._attend_compressed(q, key, value, edges[rank]),
            self._attend(q, k, v, layout, seq_len),
            self._attend(q, near_k, near_v, layout_for(self._window_layout, seq_len), seq_len),
        ]
        if self.pattern is not None:
            outs.append(self._attend(q, far[0], far[1], self.pattern, seq_len))

        if cache is not None:
            self._remember(cache, pooled_k, pooled_v, k, v, near_k, near_v, *far)
            cache.append("compressed", torch.stack([key, value], 2))
        return self._mix(x, outs)

    def _next(self, x: Tensor, rotary: Tables | None, cache: SelectionCache) -> Tensor:
        q, rows = self._project(x, rotary)
        position = cache.length
        self._remember(cache, *rows)

        start = cache.length - self.compress_block  # of the block that ends with this token
        if start >= 0 and start % self.compress_stride == 0:
            pooled_k, pooled_v = cache.last("pooled", self.compress_block).unbind(2)
            new = [self._compressed_keys(pooled_k, rotary), self.value_pooling(pooled_v)]
            cache.append("compressed", torch.stack(new, 2))
        key, value = cache.last("compressed").unbind(2)
        if position % self.query_block == 0:
            cache.chosen = self.choice.blocks(q, position, key)[:, :, 0]
        assert cache.chosen is not None

        own_block = position // self.block_size * self.block_size
        first = max(0, own_block - (self.window - 1))
        near = cache.length - first // self.block_size * self.block_size
        near_k, near_v = cache.last("window", near).unbind(2)
        k, v = cache.last("selected").unbind(2)
        listed = listed_attention(q, k, v, cache.chosen, self.block_size)
        assert isinstance(listed, Tensor)
        outs = [
            newest_attention(q, key.transpose(1, 2), value.transpose(1, 2))[0],
            listed,
            newest_attention(q, near_k.transpose(1, 2), near_v.transpose(1, 2))[0],
        ]
        if self.pattern is not None:
            far_k, far_v = cache.last("pattern").unbind(2)
            outs.append(cached_attention(q, far_k, far_v, self.pattern))
        return self._mix(x, outs)

    def _mix(self, x: Tensor, outs: list[Tensor]) -> Tensor:
        gates = self.gate(x).sigmoid().unflatten(-1, (self.branches, self.num_heads, 1)).unbind(2)
        mixed = outs[0] * gates[0]
        for out, gate in zip(outs[1:], gates[1:], strict=True):
            mixed = torch.addcmul(mixed, out, gate)
        return self.output(mixed.flatten(-2))

    def _compressed_keys(self, k: Tensor, rotary: Tables | None) -> Tensor:
        key = self.key_pooling(k)
        if rotary is None or not key.shape[1]:
            return key
        return rotate(key, rotary[-2:])

    def _compressed_over_mesh(
        self, k: Tensor, v: Tensor, rotary: Tables | None, edges: list[int], rank: int
    ) -> tuple[Tensor, Tensor]:
        """Return the compressed keys and values of the whole sequence, on every rank.

        Each rank applies W_1 to its own tokens of a block, and the ranks' results are added. The rank with a block's
        last token gives the key's rotary tables. `edges`, `rank`: from `_edges`.
        """
        assert self.mesh is not None
        length = self.compress_block
        stride = self.compress_stride

        def sums(x: Tensor) -> Tensor:
            k, v = x.split(self.num_kv_heads, 2)
            return torch.cat([self.key_pooling.sums(k), self.value_pooling.sums(v)], 2)

        whole = sums_of_blocks(sums, torch.cat([k, v], 2), length, stride, edges, rank, self.mesh)
        key_sums, value_sums = whole.split(self.num_kv_heads, 2)
        key = self.key_pooling.of_sums(key_sums)
        if rotary is not None and key.shape[1]:
            ended = [whole_blocks(edge, length, stride) for edge in edges]
            last = length - 1 - edges[rank]  # the last token of block i is this rank's row i * stride + last
            first = ended[rank] * stride + last
            stop = ended[rank + 1] * stride + last
            tables = torch.stack([table[..., first:stop:stride, :, :] for table in rotary[-2:]])
            tables = gathered(tables, tables.dim() - 3, ended, self.mesh, "tables of compressed keys")
            key = rotate(key, tables.unbind())
        return key, self.value_pooling.of_sums(value_sums)

    def _attend_compressed(self, q: Tensor, key: Tensor, value: Tensor, start: int) -> Tensor:
        """Return the attention of q over the compressed `key` and `value`; `start` is the position of the first query.

        Every `stride` neighbouring queries see the same keys, so `attention` gets them as one row, with `stride` times
        the heads. Each row sees one key more than the row before it. Queries that see no compressed key get 0.
        """
        _, seq_len, heads, _ = q.shape
        number = key.shape[1]
        stride = self.compress_stride
        first = max(0, self.compress_block - 1 - start)  # queries before it see no key
        row, before = divmod(max(0, start - (self.compress_block - 1)), stride)
        if not number or seq_len <= first:
            return torch.zeros_like(q) + key[:, :0].sum() + value[:, :0].sum()  # over a mesh all ranks go backward

        rows = F.pad(q[:, first:], (0, 0, 0, 0, before, stride - 1)).unfold(1, stride, stride).mT.flatten(2, 3)
        place: dict[str, Any] = {} if self.mesh is None else {"q_start": row, "k_start": 0}
        out = attention(rows, key, value, Dilated((number,), (1,)), is_causal=True, backend=self.backend, **place)
        assert isinstance(out, Tensor)

        out = out.unflatten(2, (heads, stride)).transpose(2, 3).flatten(1, 2)
        left = first - before
        return F.pad(out, (0, 0, 0, 0, left, seq_len - left - out.shape[1]))  # a negative number takes rows away

    def _remember(self, cache: SelectionCache, *rows: Tensor) -> None:
        """Append new tokens to the cache; `rows` are the keys and the values of each branch in turn."""
        keep = {"pooled": self.compress_block, "window": self.window + 2 * self.block_size}
        names = ("pooled", "selected", "window", "pattern")[: self.branches]
        for i, name in enumerate(names):
            cache.append(name, torch.stack(rows[2 * i : 2 * i + 2], 2), keep.get(name))
        cache.length += rows[0].shape[1]
