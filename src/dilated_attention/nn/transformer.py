"""Provide the pre-norm transformer block: self-attention, cross-attention, MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dilated_attention import checks
from dilated_attention.backends.dropout import dropout_of, survives
from dilated_attention.decoding import first_token_attention
from dilated_attention.errors import UnsupportedError
from dilated_attention.mesh import held_mesh
from dilated_attention.nn.attention import DilatedAttention
from dilated_attention.nn.positions import Tables, rotate
from dilated_attention.patterns import Dilated, Sum, Window
from dilated_attention.plan import WHOLE
from dilated_attention.torch_internals import hooked, in_torch_func

# Rows of the MLP at a time without gradients. Its hidden layer is then small beside q, k and v, and stays in a cache.
# A compiled graph has one piece: with more it would be of one length.
_ROWS = 2048
_PLACES = 3  # what a block adds to x: attention, cross-attention, MLP


@runtime_checkable
class Memory(Protocol):
    """Remember earlier tokens of a layer: the interface of a KV cache to `SelfAttention`."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """Return the attention of these tokens over all tokens so far, shaped like q.

        q, k, v: from `SelfAttention.project`. `attend(q, k, v)` computes the attention of these tokens over themselves,
        without earlier ones.
        """


class SelfAttention(nn.Module):
    """Compute W_o LN A(R W_q x, R W_k x, W_v x): self-attention with rotary positions R and grouped queries.

    A is attention with `pattern`, or dense attention with PyTorch's fused op if `pattern` is None. Over a mesh, dense
    attention is computed as a pattern of one segment. Without `sub_ln`, LN is left out.

    Args:
        bias: add a bias to the projections.
        sub_ln: include the inner LayerNorm LN (MAGNETO's sub-LN, Wang et al. 2022, arXiv:2210.06423).
        dropout: dropout, in training, of the attention probabilities.

    Examples:
        >>> from dilated_attention import Dilated
        >>> from dilated_attention.nn import SelfAttention
        >>> layer = SelfAttention(32, num_heads=4, num_kv_heads=2, pattern=Dilated([8, 32], [1, 4]))
        >>> layer(torch.randn(1, 32, 32), is_causal=True).shape
        torch.Size([1, 32, 32])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        pattern: Dilated | Window | Sum | None,
        backend: str = "auto",
        *,
        bias: bool = False,
        sub_ln: bool = False,
        norm_eps: float = 1e-5,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        embed_dim, num_heads, num_kv_heads = checks.heads(embed_dim, num_heads, num_kv_heads)
        checks.probability("dropout", dropout)
        self.heads = (num_heads, num_kv_heads, num_kv_heads)
        self.head_dim = embed_dim // num_heads
        self.dropout = dropout
        self.backend = backend
        self.mesh: Any = None
        self.input = nn.Linear(embed_dim, sum(self.heads) * self.head_dim, bias=bias)
        self.norm = nn.LayerNorm(embed_dim, norm_eps) if sub_ln else nn.Identity()
        self.output = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.pattern = pattern
        self.attention = (
            None if pattern is None else DilatedAttention(pattern=pattern, dropout=dropout, backend=backend)
        )

    def set_context_parallel(self, mesh: Any, transport: str = "auto", layer: str = "") -> None:
        """Run over `mesh`, or on one device if None. See `parallel.set_context_parallel`."""
        self.mesh = held_mesh(mesh)
        if self.pattern is None:
            self.attention = None
            if mesh is not None:
                whole = Dilated((WHOLE,), (1,))
                self.attention = DilatedAttention(pattern=whole, dropout=self.dropout, backend=self.backend)
                self.attention.train(self.training).set_context_parallel(mesh, transport, layer)

    def forward(
        self,
        x: Float[Tensor, "batch seq embed_dim"],
        rotary: Tables | None = None,
        is_causal: bool = False,
        *,
        cu_seqlens: Int[Tensor, " samples_and_one"] | None = None,
        seq_len: int | None = None,
        memory: Memory | None = None,
        first_only: bool = False,
    ) -> Float[Tensor, "batch rows embed_dim"]:
        """Return the attention's output, shaped like x, or with `first_only` `(batch, 1, embed_dim)`.

        Args:
            rotary: tables from `Rotary.tables` or `rotary_tables`; None: no positions.
            cu_seqlens, seq_len: as in `dilated_attention`.
            memory: the earlier tokens, which x continues; unused with first_only.
            first_only: return only the row of each sample's first token, `(1, samples, embed_dim)` if packed.
        """
        _, cu_seqlens = checks.ragged(x, None, cu_seqlens)
        attend = partial(self._attend, is_causal=is_causal, cu_seqlens=cu_seqlens, seq_len=seq_len)
        if first_only:
            attend = partial(self._attend_first, attend=attend, is_causal=is_causal, cu_seqlens=cu_seqlens)
        elif memory is not None:
            attend = partial(memory, attend=attend)
        return self.output(self.norm(attend(*self.project(x, rotary)).flatten(-2)))  # q, k and v end with the call

    def project(self, x: Tensor, rotary: Tables | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return R W_q x, R W_k x and W_v x: `(batch, seq, heads, head_dim)`, k and v with the KV heads."""
        q, k, v = self.input(x).unflatten(-1, (-1, self.head_dim)).split(self.heads, -2)
        return (q, k, v) if rotary is None else (rotate(q, rotary[:2]), rotate(k, rotary[-2:]), v)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, cu_seqlens: Tensor | None, seq_len: int | None
    ) -> Tensor:
        if self.attention is not None:
            return self.attention(q, k, v, is_causal=is_causal, cu_seqlens=cu_seqlens, seq_len=seq_len)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        dense = partial(
            F.scaled_dot_product_attention, is_causal=is_causal, dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=self.heads[0] != self.heads[1],
        )  # fmt: skip
        if cu_seqlens is None:
            return dense(q, k, v).transpose(1, 2)
        samples = checks.samples(q.shape[2], None, cu_seqlens)
        return torch.cat([dense(*(x[:, :, at] for x in (q, k, v))) for _, at in samples], 2).transpose(1, 2)

    def _attend_first(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        is_causal: bool,
        cu_seqlens: Tensor | None,
    ) -> Tensor:
        if self.mesh is not None:
            raise UnsupportedError("first_only with a mesh is not supported; only one rank has the first token")
        dropped = self.training and self.dropout > 0
        if not isinstance(self.pattern, Dilated) or is_causal or dropped:
            return first_tokens(attend(q, k, v), cu_seqlens)
        first = partial(first_token_attention, pattern=self.pattern)
        query = first_tokens(q, cu_seqlens)
        if cu_seqlens is None:
            return first(query, k, v)
        samples = checks.samples(k.shape[1], None, cu_seqlens)
        return torch.cat([first(query[:, i : i + 1], k[at], v[at]) for i, at in enumerate(samples)], 1)


def first_tokens(x: Tensor, cu_seqlens: Int[Tensor, " samples_and_one"] | None) -> Tensor:
    """Return the first token of each sample: `(batch, 1, ...)` for x `(batch, seq, ...)`, or `(1, samples, ...)` for
    packed samples `(1, tokens, ...)`."""
    return x[:, :1] if cu_seqlens is None else x[:, cu_seqlens[:-1]]


class Source:
    """Hold the encoder states that a decoder reads, `(batch, keys, embed_dim)`.

    keep: store the keys and values that each layer computes from the states, so that decoding computes them once.

    Examples:
        >>> from dilated_attention.nn import CrossAttention, Source
        >>> source = Source(torch.randn(1, 10, 32), keep=True)
        >>> layer = CrossAttention(32, num_heads=4, num_kv_heads=2)
        >>> layer(torch.randn(1, 1, 32), source).shape  # later calls read the same keys and values
        torch.Size([1, 1, 32])
    """

    def __init__(self, states: Float[Tensor, "batch keys embed_dim"], *, keep: bool = False) -> None:
        self.states, self.keep = states, keep
        self._kept: dict[CrossAttention, tuple[Tensor, Tensor]] = {}

    def read(self, layer: CrossAttention) -> tuple[Tensor, Tensor]:
        """Return the keys and values that `layer` computes from the states."""
        found = self._kept.get(layer) or layer.project(self.states)
        if self.keep:
            self._kept[layer] = found
        return found


class CrossAttention(nn.Module):
    """Compute W_o softmax(W_q x (W_k s)ᵀ / sqrt(head_dim)) W_v s, dense: every token of x sees the whole source s.

    As in torchscale's decoder, it encodes no positions and has no sub-LN (no norm between attention and W_o).

    Examples:
        >>> from dilated_attention.nn import CrossAttention, Source
        >>> layer = CrossAttention(32, num_heads=4, num_kv_heads=4)
        >>> layer(torch.randn(1, 6, 32), Source(torch.randn(1, 10, 32))).shape  # 6 tokens read 10 states
        torch.Size([1, 6, 32])
    """

    def __init__(self, embed_dim: int, num_heads: int, num_kv_heads: int, *, bias: bool = False) -> None:
        super().__init__()
        embed_dim, num_heads, num_kv_heads = checks.heads(embed_dim, num_heads, num_kv_heads)
        self.heads = (num_heads, num_kv_heads)
        self.head_dim = embed_dim // num_heads
        self.input = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.source = nn.Linear(embed_dim, 2 * num_kv_heads * self.head_dim, bias=bias)
        self.output = nn.Linear(embed_dim, embed_dim, bias=bias)

    def project(self, source: Float[Tensor, "batch keys embed_dim"]) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a source, `(batch, kv_heads, keys, head_dim)` each."""
        k, v = self.source(source).unflatten(-1, (-1, self.head_dim)).transpose(1, 2).split(self.heads[1], 1)
        return k, v

    def forward(
        self,
        x: Float[Tensor, "batch seq embed_dim"],
        source: Source,
        mask: Bool[Tensor, "samples 1 1 keys"] | None = None,
        cu_seqlens: Int[Tensor, " samples_and_one"] | None = None,
    ) -> Float[Tensor, "batch seq embed_dim"]:
        """Return the attention's output, shaped like x.

        Args:
            mask: True where a key is seen; None: all are.
            cu_seqlens: the edges of the samples that are packed in x; sample i reads row i of the source.
        """
        q = self.input(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        k, v = source.read(self)
        attend = partial(F.scaled_dot_product_attention, enable_gqa=self.heads[0] != self.heads[1])
        _, cu_seqlens = checks.ragged(x, None, cu_seqlens)
        samples = len(x) if cu_seqlens is None else len(cu_seqlens) - 1
        if len(k) != samples and (len(k) != 1 or cu_seqlens is not None):
            raise ValueError(f"source must have a row for each of {samples} samples; got {len(k)}")
        if cu_seqlens is None:
            out = attend(q, k, v, mask)
        else:  # each its own source
            masks = [None] * len(k) if mask is None else mask.split(1)
            rows = zip(checks.samples(x.shape[1], None, cu_seqlens), k.split(1), v.split(1), masks, strict=True)
            out = torch.cat([attend(q[:, :, at], *row) for (_, at), *row in rows], 2)
        return self.output(out.transpose(1, 2).flatten(-2))


@dataclass(frozen=True, eq=False)
class ShardDropout:
    """Apply the residual stream's dropout over a mesh.

    A hash of the seed, layer, sample, token and channel decides which entries are dropped, as in attention
    (`backends.dropout`). So any number of ranks drops the same entries.

    Attributes:
        seed: int64, the same on every rank.
        start: the first token of this rank's shard.
        layer: the number of the block.
    """

    seed: Int[Tensor, ""]
    start: int
    layer: int = 0

    def __call__(
        self, x: Float[Tensor, "batch shard embed_dim"], p: float, place: int
    ) -> Float[Tensor, "batch shard embed_dim"]:
        """Set entries of x to 0 with probability p, and divide the others by 1 - p.

        place: what the block adds as x; 0: attention, 1: cross-attention, 2: MLP.
        """
        tokens = torch.arange(self.start, self.start + x.shape[1], device=x.device)
        channels = torch.arange(x.shape[2], device=x.device)[:, None]
        words = dropout_of(p, self.seed, x.shape[0], 1, tokens, channels, _PLACES * self.layer + place)
        if words is None:
            return x
        return x * survives(words.queries[:, :, 0], words.keys[:, 0], words.threshold) / (1 - p)


class TransformerBlock(nn.Module):
    """Compute a pre-norm block: x + A(LN x), then x + C(LN x, source), then x + W_2 LN gelu(W_1 LN x).

    A is `SelfAttention` and C is `CrossAttention`, which only a decoder with a source has.

    Args:
        bias, sub_ln: as in `SelfAttention`; sub_ln also adds the LN inside the MLP.
        dropout: dropout, in training, of what is added to x.
        attention_dropout: dropout, in training, of the attention probabilities.
        cross_attention: include C.

    Examples:
        >>> from dilated_attention import Window
        >>> from dilated_attention.nn import Rotary, TransformerBlock
        >>> block = TransformerBlock(32, num_heads=4, num_kv_heads=4, mlp_dim=64, pattern=Window(7))
        >>> block(torch.randn(1, 16, 32), Rotary(head_dim=8).tables(torch.arange(16)), is_causal=True).shape
        torch.Size([1, 16, 32])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        mlp_dim: int,
        pattern: Dilated | Window | Sum | None,
        backend: str = "auto",
        *,
        bias: bool = False,
        sub_ln: bool = False,
        norm_eps: float = 1e-5,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        cross_attention: bool = False,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(embed_dim, norm_eps)
        self.attention = SelfAttention(
            embed_dim, num_heads, num_kv_heads, pattern, backend, bias=bias, sub_ln=sub_ln, norm_eps=norm_eps,
            dropout=attention_dropout,
        )  # fmt: skip
        self.cross_norm = nn.LayerNorm(embed_dim, norm_eps) if cross_attention else None
        self.cross_attention = (
            CrossAttention(embed_dim, num_heads, num_kv_heads, bias=bias) if cross_attention else None
        )
        self.mlp_norm = nn.LayerNorm(embed_dim, norm_eps)
        self.mlp = nn.Sequential(
            nn.Linear(embed_dim, mlp_dim, bias=bias),
            nn.Sequential(nn.GELU(), nn.LayerNorm(mlp_dim, norm_eps)) if sub_ln else nn.GELU(),
            nn.Linear(mlp_dim, embed_dim, bias=bias),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "batch seq embed_dim"],
        rotary: Tables | None = None,
        is_causal: bool = False,
        *,
        cu_seqlens: Int[Tensor, " samples_and_one"] | None = None,
        seq_len: int | None = None,
        memory: Memory | None = None,
        source: Source | None = None,
        source_mask: Bool[Tensor, "samples 1 1 keys"] | None = None,
        first_only: bool = False,
        shard_dropout: ShardDropout | None = None,
    ) -> Float[Tensor, "batch rows embed_dim"]:
        """Return the block's output, shaped like x, or with `first_only` only the rows of first tokens.

        Args:
            source, source_mask: source and mask of `CrossAttention`.
            shard_dropout: over a mesh, replaces the block's own dropout.

        The other arguments are as in `SelfAttention`.
        """
        if (self.cross_attention is None) != (source is None):
            raise ValueError(f"source must be given if the block has cross_attention, else be None; got {source!r:.50}")

        def drop(x: Tensor, place: int) -> Tensor:
            if shard_dropout is None or not self.training:
                return self.dropout(x)
            return shard_dropout(x, self.dropout.p, place)

        options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "seq_len": seq_len, "memory": memory}
        out = self.attention(self.attention_norm(x), rotary, is_causal, first_only=first_only, **options)
        x = (first_tokens(x, cu_seqlens) if first_only else x) + drop(out, 0)
        if self.cross_attention is not None:
            assert self.cross_norm is not None
            assert source is not None
            edges = torch.arange(len(cu_seqlens)) if first_only and cu_seqlens is not None else cu_seqlens
            read = self.cross_attention(self.cross_norm(x), source, source_mask, edges)
            x = x + drop(read, 1)
        # In training, a checkpoint's forward without gradients must draw the dropout that its recomputation draws.
        whole = torch.is_grad_enabled() or self.training or torch.compiler.is_compiling() or in_torch_func()
        if whole or x.shape[0] * x.shape[1] <= _ROWS or hooked(self.mlp, self.mlp_norm):
            return x + drop(self.mlp(self.mlp_norm(x)), 2)
        x = x.contiguous()
        for rows in x.view(-1, x.shape[-1]).split(_ROWS):
            rows += self.mlp(self.mlp_norm(rows))
        return x
