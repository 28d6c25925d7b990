"""Provide dilated attention as modules."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dilated_attention import checks
from dilated_attention.backends.table import check_name
from dilated_attention.bias import Alibi, QueryBias, RelativeBias
from dilated_attention.call import Pattern
from dilated_attention.errors import UnsupportedError
from dilated_attention.functional import attention
from dilated_attention.layout import BlockLayout
from dilated_attention.mesh import held_mesh, mesh_size
from dilated_attention.patterns import LayoutOfLength, Product, dilated, pattern_for
from dilated_attention.torch_internals import require_true
from dilated_attention.weights import attention_weights

_MANY = 128
"""A batch of at least this many one-token samples is more likely one sample whose dimensions are in another order."""


class Sharded(nn.Module):
    """Base class of modules that take shards of sequences over a mesh, or whole sequences without one.

    seq_len: the length of the whole sequence for calls that do not say it; None: shards are equal.
    """

    mesh: Any = None
    transport = "auto"
    layer = ""
    seq_len: int | None = None

    def set_context_parallel(self, mesh: Any, transport: str = "auto", layer: str = "") -> None:
        """Run over `mesh`, or on one device if None; errors name `layer`.

        Call `parallel.set_context_parallel` instead for a module with parts, all of which it reaches.
        """
        self.mesh = held_mesh(mesh)
        self.transport = transport
        self.layer = layer


class DilatedAttention(Sharded):
    """Run `attention` as a module that holds its pattern and options. It has no parameters.

    forward: q `(batch, seq, heads, head_dim)`, k and v `(batch, seq, kv_heads, head_dim)` -> out like q;
    (out, lse) with return_lse. It also takes is_causal, lengths, cu_seqlens, key_padding_mask, seq_len and bias, as
    `attention` does. Attention dropout acts in training only. A block layout follows q to its device.

    Args:
        mesh, transport: as in `attention`: seq is sharded over the mesh. If shards are uneven, forward needs the global
            `seq_len`.
        pattern: replaces segment_lengths, dilation_rates, offsets, head_groups and compat. Give any pattern that
            `attention` takes, or a function that returns the `BlockLayout` for n tokens: q's, or with lengths or
            cu_seqlens a sample's. It must always return the same layout for the same n, since layouts are cached.

    Examples:
        >>> from dilated_attention import dilated_attention
        >>> from dilated_attention.nn import DilatedAttention
        >>> q, k, v = (torch.randn(1, 16, 2, 8) for _ in range(3))
        >>> layer = DilatedAttention(segment_lengths=[4, 16], dilation_rates=[1, 4])
        >>> torch.equal(layer(q, k, v), dilated_attention(q, k, v, [4, 16], [1, 4]))
        True
    """

    def __init__(
        self,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        *,
        offsets: Any = "head",
        head_groups: bool = False,
        compat: str | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        backend: str = "auto",
        mesh: Any = None,
        transport: str = "auto",
        pattern: Pattern | LayoutOfLength | None = None,
    ) -> None:
        super().__init__()
        if pattern is None:
            if segment_lengths is None or dilation_rates is None:
                raise ValueError(
                    f"segment_lengths={segment_lengths} and dilation_rates={dilation_rates}: give both, or pattern="
                )
            pattern = dilated(segment_lengths, dilation_rates, offsets, head_groups, compat)
        elif (
            segment_lengths is not None
            or dilation_rates is not None
            or compat is not None
            or head_groups
            or offsets != "head"
        ):
            raise ValueError(
                f"pattern={pattern!r} is given beside segment_lengths, dilation_rates, offsets, head_groups or compat, "
                "which the pattern holds itself; leave them out"
            )
        elif not isinstance(pattern, Pattern) and not callable(pattern):
            kind = type(pattern).__name__
            raise ValueError(
                f"pattern must be one that attention takes, or a callable, length -> BlockLayout; got {kind}"
            )
        checks.number("scale", scale)
        checks.probability("dropout", dropout)
        check_name(backend)
        self.pattern = pattern
        self.scale = scale
        self.dropout = dropout
        self.backend = backend
        self.set_context_parallel(mesh, transport)

    def pattern_of(self, seq_len: int, is_ragged: bool = False) -> Pattern:
        """Return the pattern for this many tokens, in all or in each of the samples of a ragged batch."""
        if callable(self.pattern):
            return pattern_for(self.pattern, seq_len, is_ragged)
        return self.pattern

    def forward(
        self,
        q: Float[Tensor, "batch seq heads head_dim"],
        k: Float[Tensor, "batch seq kv_heads head_dim"],
        v: Float[Tensor, "batch seq kv_heads head_dim"],
        is_causal: bool = False,
        *,
        lengths: Int[Tensor, " batch"] | None = None,
        cu_seqlens: Int[Tensor, " samples_and_one"] | None = None,
        key_padding_mask: Bool[Tensor, "batch seq"] | None = None,
        return_lse: bool = False,
        seq_len: int | None = None,
        bias: Alibi | RelativeBias | QueryBias | Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if seq_len is None:
            seq_len = self.seq_len
        whole = seq_len
        if whole is None:
            whole = q.shape[1] * mesh_size(self.mesh)
        is_ragged = lengths is not None or cu_seqlens is not None

        dropout = self.dropout if self.training else 0.0
        transport = "auto" if self.mesh is None else self.transport
        return attention(
            q, k, v, self.pattern_of(whole, is_ragged), is_causal=is_causal, scale=self.scale, dropout_p=dropout,
            lengths=lengths, cu_seqlens=cu_seqlens, key_padding_mask=key_padding_mask, return_lse=return_lse,
            backend=self.backend, mesh=self.mesh, seq_len=seq_len, transport=transport, layer=self.layer, bias=bias,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{self.pattern}, dropout={self.dropout}, backend={self.backend!r}"


class RingDilatedAttention(DilatedAttention):
    """Run `DilatedAttention` over a mesh on which seq is sharded; without a mesh, on one device.

    Examples:
        >>> from dilated_attention.nn import DilatedAttention, RingDilatedAttention
        >>> q, k, v = (torch.randn(1, 16, 2, 8) for _ in range(3))
        >>> layer = RingDilatedAttention([4, 16], [1, 4])  # with mesh=..., q, k and v are this rank's shards
        >>> torch.equal(layer(q, k, v), DilatedAttention([4, 16], [1, 4])(q, k, v))
        True
    """


class BlockSparseDilatedAttention(DilatedAttention):
    """Run `DilatedAttention` over a block layout, alone or inside dilated subsequences.

    Args:
        layout: a `BlockLayout`, or a callable that returns the layout for n tokens, always the same for the same n,
            since it is cached. n is as in `DilatedAttention`; with segment_lengths, the number of tokens of a segment
            that take part (`Product`).
        segment_lengths, dilation_rates, offsets, head_groups: as in `Dilated`; without them, no dilation.
        options: scale, dropout, backend, mesh and transport, as in `DilatedAttention`.

    Examples:
        >>> from dilated_attention import BlockLayout
        >>> from dilated_attention.nn import BlockSparseDilatedAttention
        >>> q, k, v = (torch.randn(1, 16, 2, 8) for _ in range(3))
        >>> layer = BlockSparseDilatedAttention(BlockLayout.local(16, window=4, block_size=4))
        >>> layer(q, k, v).shape
        torch.Size([1, 16, 2, 8])
    """

    def __init__(
        self,
        layout: BlockLayout | LayoutOfLength,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        *,
        offsets: Any = "head",
        head_groups: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(pattern=_sparse(layout, segment_lengths, dilation_rates, offsets, head_groups), **options)


class BlockSparseRingDilatedAttention(BlockSparseDilatedAttention):
    """Run `BlockSparseDilatedAttention` over a mesh on which seq is sharded; without a mesh, on one device.

    Examples:
        >>> from dilated_attention import BlockLayout
        >>> from dilated_attention.nn import BlockSparseRingDilatedAttention
        >>> q, k, v = (torch.randn(1, 16, 2, 8) for _ in range(3))
        >>> layout = BlockLayout.local(16, window=4, block_size=4)
        >>> layer = BlockSparseRingDilatedAttention(layout)  # with mesh=..., q, k and v are this rank's shards
        >>> layer(q, k, v).shape
        torch.Size([1, 16, 2, 8])
    """


def _sparse(
    layout: BlockLayout | LayoutOfLength,
    segment_lengths: Sequence[int] | None,
    dilation_rates: Sequence[int] | None,
    offsets: Any,
    head_groups: bool,
) -> Product | BlockLayout | LayoutOfLength:
    """Return `layout` (a layout, or a function from length to layout); or, with segment_lengths and dilation_rates, the
    product of a `Dilated` and `layout`."""
    if not isinstance(layout, BlockLayout) and not callable(layout):
        kind = type(layout).__name__
        raise ValueError(f"layout must be a BlockLayout or a callable, length -> BlockLayout; got {kind}")
    if (segment_lengths is None) != (dilation_rates is None):
        raise ValueError(
            f"segment_lengths and dilation_rates go together; got {segment_lengths} and {dilation_rates}. "
            "Give both, or none for a layout without dilation"
        )
    if segment_lengths is not None and dilation_rates is not None:
        return dilated(segment_lengths, dilation_rates, offsets, head_groups, None) * layout
    if offsets != "head" or head_groups:
        raise ValueError(
            f"offsets={offsets!r}, head_groups={head_groups} are of a dilated pattern; give segment_lengths and "
            "dilation_rates, or leave them out"
        )
    return layout


class MultiheadDilatedAttention(nn.Module):
    """Replace `torch.nn.MultiheadAttention` with dilated attention: out = W_o A(W_q query, W_k key, W_v value) + b.

    Constructor, forward, parameters, their initialisation and the state_dict are the same as in
    `nn.MultiheadAttention`, and its trained weights load unchanged. What this attention cannot do raises an
    `UnsupportedError`: an attn_mask other than the causal one, add_bias_kv, add_zero_attn, and a key that is longer or
    shorter than the query. The defaults differ from PyTorch's: `batch_first` is True; need_weights is False, and gives
    a sparse tensor if True. `is_causal=True` applies the causal mask by itself, without an attn_mask. The other
    arguments are those of `DilatedAttention`.

    Returns (out, weights or None). A query with no visible key gets b, not NaN.

    Examples:
        >>> from dilated_attention.nn import MultiheadDilatedAttention
        >>> dense = torch.nn.MultiheadAttention(32, num_heads=4, batch_first=True)
        >>> layer = MultiheadDilatedAttention(32, num_heads=4, segment_lengths=[16], dilation_rates=[1])
        >>> layer.load_state_dict(dense.state_dict())
        <All keys matched successfully>
        >>> x = torch.randn(1, 16, 32)
        >>> torch.allclose(layer(x, x, x)[0], dense(x, x, x)[0], atol=1e-5)  # one segment with rate 1 is dense
        True
    """

    # nn.TransformerEncoderLayer in eval mode runs a fused dense layer straight on self_attn's weights, never calling
    # its forward, when this attribute of nn.MultiheadAttention is True.
    _qkv_same_embed_dim = False

    in_proj_weight: nn.Parameter | None  # None if kdim or vdim differ; the next three are None if not
    q_proj_weight: nn.Parameter
    k_proj_weight: nn.Parameter
    v_proj_weight: nn.Parameter
    in_proj_bias: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        offsets: Any = "head",
        head_groups: bool = False,
        compat: str | None = None,
        backend: str = "auto",
        mesh: Any = None,
        transport: str = "auto",
        pattern: Pattern | LayoutOfLength | None = None,
    ) -> None:
        super().__init__()
        embed_dim, num_heads, _ = checks.heads(embed_dim, num_heads, None)
        if add_bias_kv or add_zero_attn:
            name = "add_bias_kv" if add_bias_kv else "add_zero_attn"
            raise UnsupportedError(f"{name}=True: the added key has no position, so no branch shows it; leave it False")
        if kdim is None:
            kdim = embed_dim
        if vdim is None:
            vdim = embed_dim
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.kdim = checks.positive("kdim", kdim)
        self.vdim = checks.positive("vdim", vdim)
        self.batch_first = batch_first
        self.attention = DilatedAttention(
            segment_lengths, dilation_rates, offsets=offsets, head_groups=head_groups, compat=compat, dropout=dropout,
            backend=backend, mesh=mesh, transport=transport, pattern=pattern,
        )  # fmt: skip

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"):
            self.register_parameter(name, None)
        if self.kdim == self.vdim == embed_dim:
            self.in_proj_weight = empty(3 * embed_dim, embed_dim)
        else:
            self.q_proj_weight = empty(embed_dim, embed_dim)
            self.k_proj_weight = empty(embed_dim, self.kdim)
            self.v_proj_weight = empty(embed_dim, self.vdim)
        if bias:
            self.in_proj_bias = empty(3 * embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw parameters as `nn.MultiheadAttention` does, in the same order: Xavier for the inputs, zero biases."""
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Float[Tensor, "*batch_and_seq embed_dim"],
        key: Float[Tensor, "*batch_and_seq kdim"],
        value: Float[Tensor, "*batch_and_seq vdim"],
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        lengths: Int[Tensor, " batch"] | None = None,
        cu_seqlens: Int[Tensor, " samples_and_one"] | None = None,
        seq_len: int | None = None,
        bias: Alibi | RelativeBias | QueryBias | Tensor | None = None,
    ) -> tuple[Float[Tensor, "*batch_and_seq embed_dim"], Tensor | None]:
        """Return (out, weights or None).

        Args:
            query, key, value: `(batch, seq, dim)`, `(seq, batch, dim)` if not batch_first, or `(seq, dim)`.
            key_padding_mask: `(batch, seq)` or `(seq,)`, True (or -inf in a floating mask) = ignore that key.
            attn_mask: the causal mask, `(seq, seq)`, True (or -inf) above the diagonal; the same as is_causal=True.
            need_weights: also return the probabilities, computed again as a sparse COO tensor (`attention_weights`):
                `(batch, seq, seq)`, the mean over heads, or `(batch, heads, seq, seq)` with average_attn_weights=False;
                no batch dim if query has none.
            lengths, cu_seqlens: the samples of a padded or packed batch, as in `attention`; not with need_weights.
            seq_len: over a mesh, the global length; default: equal shards.
            bias: added to the scores, as in `attention`; not with need_weights.
        """
        self._check(query, key, value, need_weights)
        if need_weights and not (lengths is None and cu_seqlens is None and bias is None):
            raise UnsupportedError("need_weights=True with lengths, cu_seqlens or bias is not supported; pass False")
        batched = query.dim() == 3
        rows = self._project(query, key, value)
        if not batched:
            rows = tuple(x[None] for x in rows)
        elif not self.batch_first:
            rows = tuple(x.transpose(0, 1) for x in rows)
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)) for x in rows)
        if q.shape[1] == 1 and len(q) >= _MANY and not torch.compiler.is_compiling():
            warnings.warn(
                f"query of shape {tuple(query.shape)} is read as {len(q)} samples of one token each; if it is "
                f"one sample, construct with batch_first={not self.batch_first}",
                stacklevel=2,
            )

        if attn_mask is not None:
            _require_causal(attn_mask, q.shape[1])
            is_causal = True
        mask = key_padding_mask
        if mask is not None:
            mask = _boolean("key_padding_mask", mask)
            if not batched:
                mask = mask[None]

        options: Any = {"lengths": lengths, "cu_seqlens": cu_seqlens, "seq_len": seq_len, "bias": bias}
        out = self.attention(q, k, v, is_causal, key_padding_mask=mask, **options).flatten(-2)
        if not batched:
            out = out[0]
        elif not self.batch_first:
            out = out.transpose(0, 1)
        out = self.out_proj(out)
        if not need_weights:
            return out, None

        pattern = self.attention.pattern_of(q.shape[1])
        scale = self.attention.scale
        weights = attention_weights(q, k, pattern, is_causal=is_causal, scale=scale, key_padding_mask=mask)
        if average_attn_weights:
            weights = torch.sparse.sum(weights, 1) / self.num_heads
        if not batched:
            weights = torch.sparse.sum(weights, 0)  # of one sample: indexing a sparse tensor has no gradient
        return out, weights.coalesce()

    def _check(self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool) -> None:
        if need_weights and self.attention.mesh is not None:
            raise UnsupportedError("need_weights=True: over a mesh no rank holds a row of weights; pass False")
        if query.is_nested or query.dim() not in (2, 3):
            kind = "a nested layout" if query.is_nested else f"shape {tuple(query.shape)}"
            raise ValueError(
                f"query has {kind}: expected (batch, seq, embed_dim) or (seq, embed_dim); pad ragged samples and pass "
                "key_padding_mask (in nn.TransformerEncoder: enable_nested_tensor=False)"
            )
        if not query.shape[:-1] == key.shape[:-1] == value.shape[:-1]:
            raise UnsupportedError(
                f"query, key, value have shapes {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}: "
                "dilated attention is among the same positions, so all but the last dim must be equal"
            )
        for name, x, dim in (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)):
            if x.shape[-1] != dim:
                raise ValueError(f"{name} has shape {tuple(x.shape)}: its last dim must be {dim}")

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        weights: tuple[Tensor, ...] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self.in_proj_weight is not None:
            if query is key is value:
                return F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
            weights = self.in_proj_weight.chunk(3)
        biases: tuple[Tensor | None, ...] = (None, None, None)
        if self.in_proj_bias is not None:
            biases = self.in_proj_bias.chunk(3)
        return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, batch_first={self.batch_first}"


class BlockSparseRingMultiheadDilatedAttention(MultiheadDilatedAttention):
    """Run `MultiheadDilatedAttention` with block sparsity: out = W_o A(W_q query, W_k key, W_v value) + b.

    layout, segment_lengths, dilation_rates, offsets and head_groups are as in `BlockSparseDilatedAttention`. All other
    arguments, by position or by name, are those of `MultiheadDilatedAttention`, and everything else is as there,
    including loading weights of `nn.MultiheadAttention`.

    Examples:
        >>> from dilated_attention import BlockLayout
        >>> from dilated_attention.nn import BlockSparseRingMultiheadDilatedAttention
        >>> layout = BlockLayout.local(64, window=16, block_size=16)
        >>> layer = BlockSparseRingMultiheadDilatedAttention(32, num_heads=4, layout=layout)
        >>> x = torch.randn(1, 64, 32)
        >>> layer(x, x, x)[0].shape
        torch.Size([1, 64, 32])
    """

    def __init__(
        self,
        *arguments: Any,
        layout: BlockLayout | LayoutOfLength,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        offsets: Any = "head",
        head_groups: bool = False,
        **options: Any,
    ) -> None:
        pattern = _sparse(layout, segment_lengths, dilation_rates, offsets, head_groups)
        super().__init__(*arguments, pattern=pattern, **options)


def _boolean(name: str, mask: Tensor) -> Tensor:
    """Convert a floating mask of 0 and -inf, as nn.TransformerEncoder passes it, to booleans: True at -inf.

    Raise UnsupportedError, which calls the mask `name`, if a floating mask holds other values. Return a mask of another
    dtype as it is.
    """
    if not mask.is_floating_point():
        return mask
    ignored = mask == -torch.inf
    require_true(
        (ignored | (mask == 0)).all(), f"{name}: a floating mask may hold 0 and -inf only; give other numbers as bias="
    )
    return ignored


def _require_causal(attn_mask: Tensor, seq_len: int) -> None:
    wanted = (
        "of masks over pairs, only the causal one, (seq, seq), is supported; pass is_causal=True for causality and "
        "key_padding_mask for padding"
    )
    if attn_mask.shape != (seq_len, seq_len):
        raise UnsupportedError(f"attn_mask of shape {tuple(attn_mask.shape)}, seq={seq_len}: {wanted}")
    future = torch.ones(seq_len, seq_len, dtype=torch.bool, device=attn_mask.device).triu(1)
    is_causal = (_boolean("attn_mask", attn_mask) == future).all()
    require_true(is_causal, f"attn_mask: {wanted}")  # no size: a graph has symbols
