"""Provide the pre-norm transformer block: self-attention and MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from dilated_attention import checks
from dilated_attention.backends.dropout import key_words, query_words, survives, threshold
from dilated_attention.decoding import first_token_attention
from dilated_attention.errors import UnsupportedError
from dilated_attention.nn.attention import DilatedAttention, Sharded
from dilated_attention.nn.positions import Tables, rotate
from dilated_attention.patterns import Dilated, Sum, Window
from dilated_attention.plan import WHOLE
from dilated_attention.torch_internals import hooked, in_torch_func

# Rows of the MLP at a time without gradients. Its hidden layer is then small beside q, k and v, and stays in a cache.
# A compiled graph takes all rows at once: cut into pieces, it would serve one length only.
_ROWS = 2048
_PLACES = 2  # what a block adds to x: attention, MLP


@runtime_checkable
class Memory(Protocol):
    """Remember earlier tokens of a layer: the interface of a KV cache to `SelfAttention`."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """Return the attention of these tokens over all tokens so far, shaped like q.

        q, k, v: from `SelfAttention.project`. `attend(q, k, v)` computes the attention of these tokens over themselves,
        without earlier ones.
        """


class SelfAttention(Sharded):
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
        self.heads = (num_heads, num_kv_heads, num_kv_heads)
        self.head_dim = embed_dim // num_heads
        self.dropout = dropout
        self.input = nn.Linear(embed_dim, sum(self.heads) * self.head_dim, bias=bias)
        self.norm = nn.LayerNorm(embed_dim, norm_eps) if sub_ln else nn.Identity()
        self.output = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.pattern = pattern
        over_mesh = pattern
        if pattern is None:
            over_mesh = Dilated((WHOLE,), (1,))
        self.attention = DilatedAttention(pattern=over_mesh, dropout=dropout, backend=backend)

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
        if rotary is not None:
            q = rotate(q, rotary[:2])
            k = rotate(k, rotary[-2:])
        return q, k, v

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, cu_seqlens: Tensor | None, seq_len: int | None
    ) -> Tensor:
        if self.pattern is not None or self.mesh is not None:
            return self.attention(q, k, v, is_causal=is_causal, cu_seqlens=cu_seqlens, seq_len=seq_len)

        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        grouped = self.heads[0] != self.heads[1]
        dense = partial(F.scaled_dot_product_attention, is_causal=is_causal, dropout_p=dropout, enable_gqa=grouped)
        if cu_seqlens is None:
            return dense(q, k, v).transpose(1, 2)
        outs = [dense(q[:, :, at], k[:, :, at], v[:, :, at]) for _, at in checks.samples(q.shape[2], None, cu_seqlens)]
        return torch.cat(outs, 2).transpose(1, 2)

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
    if cu_seqlens is None:
        return x[:, :1]
    return x[:, cu_seqlens[:-1]]


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

        place: what the block adds as x; 0: attention, 1: MLP.
        """
        if not p:
            return x
        tokens = torch.arange(self.start, self.start + x.shape[1], device=x.device)
        channels = torch.arange(x.shape[2], device=x.device)[:, None]
        queries = query_words(self.seed, x.shape[0], 1, tokens, _PLACES * self.layer + place)
        keys = key_words(self.seed, channels)
        return x * survives(queries[:, :, 0], keys[0, :, 0], threshold(p)) / (1 - p)


class TransformerBlock(nn.Module):
    """Compute a pre-norm block: x + A(LN x), then x + W_2 LN gelu(W_1 LN x). A is `SelfAttention`.

    Args:
        bias, sub_ln: as in `SelfAttention`; sub_ln also adds the LN inside the MLP.
        dropout: dropout, in training, of what is added to x.
        attention_dropout: dropout, in training, of the attention probabilities.

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
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(embed_dim, norm_eps)
        self.attention = SelfAttention(
            embed_dim, num_heads, num_kv_heads, pattern, backend, bias=bias, sub_ln=sub_ln, norm_eps=norm_eps,
            dropout=attention_dropout,
        )  # fmt: skip
        self.mlp_norm = nn.LayerNorm(embed_dim, norm_eps)
        activation: nn.Module = nn.GELU()
        if sub_ln:
            activation = nn.Sequential(activation, nn.LayerNorm(mlp_dim, norm_eps))
        self.mlp = nn.Sequential(
            nn.Linear(embed_dim, mlp_dim, bias=bias), activation, nn.Linear(mlp_dim, embed_dim, bias=bias)
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
        first_only: bool = False,
        shard_dropout: ShardDropout | None = None,
    ) -> Float[Tensor, "batch rows embed_dim"]:
        """Return the block's output, shaped like x, or with `first_only` only the rows of first tokens.

        Args:
            shard_dropout: over a mesh, replaces the block's own dropout.

        The other arguments are as in `SelfAttention`.
        """

        def drop(x: Tensor, place: int) -> Tensor:
            if shard_dropout is None or not self.training:
                return self.dropout(x)
            return shard_dropout(x, self.dropout.p, place)

        options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "seq_len": seq_len, "memory": memory}
        out = self.attention(self.attention_norm(x), rotary, is_causal, first_only=first_only, **options)
        if first_only:
            x = first_tokens(x, cu_seqlens)
        x = x + drop(out, 0)

        # In training, a checkpoint's forward without gradients must draw the dropout that its recomputation draws.
        whole = torch.is_grad_enabled() or self.training or torch.compiler.is_compiling() or in_torch_func()
        if whole or x.shape[0] * x.shape[1] <= _ROWS or hooked(self.mlp, self.mlp_norm):
            return x + drop(self.mlp(self.mlp_norm(x)), 1)
        x = x.contiguous()
        for rows in x.view(-1, x.shape[-1]).split(_ROWS):
            rows += self.mlp(self.mlp_norm(rows))
        return x
