"""Define the public calls. `attention` has the full signature; the others are built on it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from dilated_attention import checks, operators
from dilated_attention.bias import Alibi, QueryBias, RelativeBias
from dilated_attention.call import (
    Call,
    Options,
    Pattern,
    as_autocast,
    check_placed,
    in_tiles,
    layout_remedy,
    near_keys,
    positions_of,
)
from dilated_attention.layout import BlockLayout
from dilated_attention.merge import merge, with_sinks
from dilated_attention.neighborhood import Neighborhood, Tiled
from dilated_attention.parallel.over_mesh import refuse
from dilated_attention.patterns import Offsets, Window, dilated, parts_of_sum

if TYPE_CHECKING:
    from typing_extensions import Never, Unpack

Function = TypeVar("Function", bound=Callable[..., Any])


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    sinks: Tensor | None = None,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    mesh: Any = None,
    seq_len: int | None = None,
    head_offset: int | None = None,
    transport: str = "auto",
    layer: str = "",
    q_start: int | None = None,
    k_start: int | None = None,
    softcap: float | None = None,
    bias: Alibi | RelativeBias | QueryBias | Tensor | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute exact attention over a pattern: one softmax over all keys that it shows, counted with multiplicity.

    With c(i, j) the number of times that the pattern shows key j to query i (causal: keys j <= i only) and
    s = scale q kᵀ,

        out_i = sum_j c exp(s_ij) v_j / sum_j c exp(s_ij),        lse_i = log sum_j c exp(s_ij).

    A query that sees no key gets out 0, lse -inf and gradient 0.

    Args:
        q: `(batch, seq, heads, head_dim)`; float64, float32, bfloat16 or float16; any strides.
        k, v: `(batch, seq, kv_heads, head_dim)`; kv_heads divides heads. Query head h reads KV head
            h // (heads // kv_heads) and uses its offset. The head_dim of v may differ: the shorter of the two is then
            padded with zeros, and the call costs as much as with the longer one.
        pattern: `Dilated`, `Window`, `Neighborhood`, `BlockLayout`, a product `Dilated(...) * layout`, or a sum of
            these.
        is_causal: hide the keys after each query.
        scale: factor of the scores, any finite number; default 1 / sqrt(head_dim).
        dropout_p: probability that a softmax weight is dropped; the others are divided by 1 - dropout_p. lse counts all
            keys, dropped or not. Each call draws one number from torch's generator for q's device, so
            `torch.manual_seed` makes it reproducible. Every backend derives the same choice for (sample, query head,
            query, key) from this number. The fused operators of PyTorch have a dropout that no other backend could
            repeat, so with dropout the native backend uses plain products in single precision, in chunks of bounded
            memory. This is slower than without dropout.
        sinks: `(heads,)` logits: exp(sinks_h) is added to the denominator of out, without a value, so that a head
            may attend to nothing. lse does not include it. Differentiable, so it can be learned.
        lengths: `(batch,)` integers: the number of tokens of each sample. Later rows return out 0 and lse -inf and
            affect no other row. With q_start or k_start it is the position at which each sample ends, which may lie
            beyond the tokens of this call.
        cu_seqlens: `(samples + 1,)` integers from 0 to seq: the edges of samples packed one after another, batch 1.
            Each sample's segment grid starts at its own first token.
        key_padding_mask: `(batch, seq)` bool: True hides the key from every query (as in `nn.MultiheadAttention`). The
            token's own query still attends and passes its gradient on. A hidden token may hold any value: NaN in its k
            and v reaches no other row; NaN or infinity in its q makes its own row of out and lse NaN and passes no
            gradient.
        return_lse: also return lse.
        backend: `"auto"`, `"native"` (PyTorch's fused operators), `"cpu"` (kernels in C++, for CPUs with AVX2 or
            later), `"triton"` (GPU kernels, measured on an H200) or `"reference"` (dense, float64 inside, any
            derivative).
        mesh: a 1-D `torch.distributed.DeviceMesh`, or a ProcessGroup, over whose ranks seq is sharded contiguously. q,
            k, v, out and lse are then this rank's shard, tokens `parallel.sequence_range(seq_len, mesh)`, and the
            results equal those on one device. lengths and cu_seqlens stay global.
        seq_len: the global length; default: equal shards, q's length times the number of ranks.
        transport: how rows travel between ranks: `"exchange"`, `"doubling"`, `"ring"`, `"all_gather"`, `"ulysses"`, or
            `"auto"`. `explain` reports what `"auto"` chooses, and the reason.
        head_offset: global index of the first KV head of these tensors (tensor parallelism), 0 on the first rank.
            Offsets that depend on the number of heads are then given as a table over all heads,
            `Dilated(...).offset_table(total)`; each rank uses the columns of its own heads. Default: there are no other
            heads.
        layer: the calling layer's name, for error messages over a mesh.
        q_start, k_start: the positions of the first query and of the first key, 0 by default. Segments, residues,
            windows, a layout's rows and columns, and causality are all computed from positions. With either given, q
            may have fewer tokens than k, but for packed samples, each of which has these positions. For a chunk of a
            prompt, or new tokens over a cache, pass q_start = k.shape[1] - q.shape[1].
        softcap: c > 0 bounds the scores: c tanh(s / c) replaces s (Gemma 2). Backends without it refuse the call.
        bias: added to the scores after the softcap, part of lse, differentiable: an `Alibi`, a `RelativeBias` or a
            `QueryBias` of `dilated_attention.bias`, or a floating tensor `(batch or 1, heads or 1, queries, keys)`,
            of which only pairs that the pattern shows are used. Over a mesh, rows by query and coordinates are those of
            this rank's tokens, and keys are all. Backends without it refuse the call.

    Returns:
        out, shaped like q but with the head_dim of v; with `return_lse` also lse: `(batch, heads, seq)`, float32
        (float64 for float64), natural logarithm, differentiable.

    Raises:
        ValueError: the message names the argument, its value and what would be right. Over a mesh, every rank raises
            it in the group's first call. Later, other ranks may raise a ContextParallelError that quotes it instead.
        ContextParallelError: a rank was lost, or sent something unexpected. The group cannot be used again.

    Examples:
        >>> from dilated_attention import Window, attention
        >>> q, k, v = (torch.randn(1, 16, 2, 8) for _ in range(3))
        >>> out = attention(q, k, v, Window(3), is_causal=True)  # each token sees itself and the 3 tokens before it
        >>> out.shape
        torch.Size([1, 16, 2, 8])
        >>> torch.allclose(out[:, 0], v[:, 0])  # the first token sees only itself
        True
    """
    if unknown:
        checks.unknown_options(unknown)
    options: Options = {
        "is_causal": is_causal, "scale": scale, "dropout_p": dropout_p, "sinks": sinks, "lengths": lengths,
        "cu_seqlens": cu_seqlens, "key_padding_mask": key_padding_mask, "backend": backend, "mesh": mesh,
        "seq_len": seq_len, "head_offset": head_offset, "transport": transport, "layer": layer, "q_start": q_start,
        "k_start": k_start, "softcap": softcap, "bias": bias,
    }  # fmt: skip
    q, k, v = as_autocast(q, k, v)
    after = None
    try:
        checks.boolean("return_lse", return_lse)
        if lengths is not None:
            options, after = _ended(q, k, v, pattern, options)
        parts = parts_of_sum(pattern)
        called = [_Part.of(q, k, v, part, options, alone=len(parts) == 1) for part in parts]
    except ValueError as error:
        refuse(mesh, error, q)
        raise
    if after is not None:
        q = q.masked_fill(after[..., None, None], 0.0)  # they may hold NaN
    out, lse = _attend(called, q, k, v, options)
    if after is not None:
        out = out.masked_fill(after[..., None, None], 0.0)
        lse = lse.masked_fill(after[..., None], -torch.inf)
    return (out, lse.transpose(1, 2)) if return_lse else out


class _Part(NamedTuple):
    """Hold the call of one part of a pattern: for a neighborhood over rows in another order (`tiled`), for a window
    at positions over the keys that it shows (`near`)."""

    call: Call
    tiled: Tiled | None = None
    near: slice | None = None

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, options: Options, *, alone: bool) -> _Part:
        if isinstance(pattern, Neighborhood):
            tiled, rows, options = in_tiles(q, k, v, pattern, options)
            return cls(Call.remembered(*rows, tiled.layout, options, alone=alone), tiled)
        near = None
        if type(pattern) is Window:
            near, options = near_keys(q, k, pattern, options)
        call = Call.remembered(q, k, v, pattern, options, near, alone=alone)
        if near is not None and call.key_padding_mask is not None:
            call = call.alike(key_padding_mask=call.key_padding_mask[:, near])
        return cls(call, None, near)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return out, and lse `(batch, seq, heads)`."""
        if self.near is not None:
            k = k[:, self.near]
            v = v[:, self.near]
        if self.tiled is None:
            return operators.attend(q, k, v, self.call)
        rows = self.tiled.queries(q), self.tiled.keys(k), self.tiled.keys(v)
        out, lse = operators.attend(*rows, self.call)
        return self.tiled.tokens(out), self.tiled.tokens(lse)


def _ended(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, options: Options) -> tuple[Options, Tensor | None]:
    """Return the options of a call whose samples end at positions `lengths`, with the keys after each end hidden in
    place of `lengths`, and which queries lie after it, `(batch, queries)`; (`options`, None) without positions."""
    positions = positions_of(options)
    if positions is None:
        return options, None
    for part in parts_of_sum(pattern):
        check_placed(part, options)
    checks.tensors(q, k, v, placed=True)
    checks.mask(k, options["key_padding_mask"])
    lengths, _ = checks.ragged(q, options["lengths"], options["cu_seqlens"])
    assert lengths is not None
    if checks.readable(lengths) and (lengths < 0).any():
        raise ValueError(f"lengths must hold non-negative integers; got {lengths.tolist()}")
    ends = lengths.to(q.device)[:, None]
    first_query, first_key = positions
    after = torch.arange(q.shape[1], device=q.device) + first_query >= ends
    hidden = torch.arange(k.shape[1], device=k.device) + first_key >= ends
    if options["key_padding_mask"] is not None:
        hidden = hidden | options["key_padding_mask"]  # vmap may map the mask alone
    return {**options, "lengths": None, "key_padding_mask": hidden}, after


def _attend(parts: list[_Part], q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Run checked calls that see one another's keys too: return their merged out, shaped as in `attention`, and lse
    `(batch, seq, heads)`. This draws the seed of dropout, and applies `key_padding_mask` and `sinks`."""
    key_padding_mask = options["key_padding_mask"]
    sinks = options["sinks"]
    if parts[0].call.scores.dropout_p:
        seed = torch.randint(-(1 << 63), (1 << 63) - 1, (), device=q.device)
        parts = [part._replace(call=part.call.but(seed=seed)) for part in parts]
    spoiled = None
    if key_padding_mask is not None:
        if not all(part.call.backend.skips_rows and part.call.shards is None for part in parts):
            # A weight of 0 times NaN would be NaN, in the gradients too.
            k, v = (x.masked_fill(key_padding_mask[:, :, None, None], 0.0) for x in (k, v))
        if not _all_finite(q):
            starts = positions_of(options)
            if starts is None:
                starts = (0, 0)
            found = _hidden_queries(q, key_padding_mask, starts, parts[0].call.cu_seqlens)
            spoiled = found[:, :, None] & ~q.isfinite().all(-1)
            q = q.masked_fill(spoiled[..., None], 0.0)
    out, lse = parts[0].attend(q, k, v)
    for part in parts[1:]:
        more, more_lse = part.attend(q, k, v)
        out, lse = merge(out, lse.transpose(1, 2), more, more_lse.transpose(1, 2))
        lse = lse.transpose(1, 2)
    if sinks is not None:
        out = with_sinks(out, lse, sinks)
    if spoiled is not None:
        unknown = torch.full_like(lse, torch.nan).masked_fill(lse == -torch.inf, 0.0)
        out = torch.where(spoiled[..., None], unknown[..., None].to(out.dtype), out)
        lse = torch.where(spoiled, lse.detach() + unknown, lse)
    return out, lse


def _all_finite(x: Tensor) -> bool:
    """Return whether all of x is known to be finite: its sum is. A sum takes a tenth of the time of `isfinite`."""
    return checks.readable(x) and bool(x.detach().sum().isfinite())


def _hidden_queries(
    q: Tensor, key_padding_mask: Tensor, starts: tuple[int, int], cu_seqlens: Tensor | None
) -> Tensor:  # fmt: skip
    """Return which queries have the position of a hidden key of their sample, `(batch, queries)`."""
    keys = key_padding_mask.shape[1]
    first = starts[0] - starts[1]
    if first == 0 and q.shape[1] == keys:
        return key_padding_mask
    query = torch.arange(q.shape[1], device=q.device)
    key = query + first
    outside = (key < 0) | (key > keys)
    if cu_seqlens is not None:
        edges = cu_seqlens.to(q.device)
        outside |= torch.bucketize(key, edges, right=True) != torch.bucketize(query, edges, right=True)
    return pad(key_padding_mask, (0, 1))[:, key.masked_fill(outside, keys)]


class CallOptions(Options, total=False):
    return_lse: bool


def _with_options_of_attention(function: Function) -> Function:
    """Show the options of `attention` in a function's signature, in place of `**options`."""
    own = inspect.signature(function)
    options = inspect.signature(attention).parameters.values()
    parameters = [x for x in own.parameters.values() if x.kind is not x.VAR_KEYWORD]
    parameters += [x for x in options if x.kind is x.KEYWORD_ONLY]
    function.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


_shown = inspect.signature(attention)
attention.__signature__ = _shown.replace(  # type: ignore[attr-defined]
    parameters=[x for x in _shown.parameters.values() if x.kind is not x.VAR_KEYWORD]
)


@_with_options_of_attention
def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    offsets: Offsets = "head",
    head_groups: bool = False,
    compat: str | None = None,
    **options: Unpack[CallOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute exact dilated attention: one softmax over the keys that the branches show, counted with multiplicity.

    In branch (w, r), for segment length w and dilation rate r, token p takes part for a head with offset o iff
    (p mod w) mod r == o. A participating query sees the participating keys of its segment p // w (causal: keys j <= p).
    A query that no branch covers gets out 0, lse -inf and gradient 0. The definition is LongNet's (arXiv:2307.02486).
    The released code also attends padding, and passes no gradient through the weights that mix its branches.

    Args:
        segment_lengths, dilation_rates, offsets, head_groups, compat: the pattern, as in `Dilated`.

    Everything else is as in `attention`.

    Examples:
        >>> from dilated_attention import dilated_attention
        >>> q, k, v = (torch.randn(1, 16, 2, 8) for _ in range(3))
        >>> dilated_attention(q, k, v, segment_lengths=[4, 16], dilation_rates=[1, 4]).shape
        torch.Size([1, 16, 2, 8])
        >>> dense = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
        >>> one_segment = dilated_attention(q, k, v, [16], [1])
        >>> torch.allclose(one_segment, dense.transpose(1, 2), atol=1e-5)
        True
    """
    pattern = dilated(segment_lengths, dilation_rates, offsets, head_groups, compat)
    return attention(q, k, v, pattern, **options)


@_with_options_of_attention
def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, **options: Unpack[CallOptions]
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute block-sparse attention: for each query, one softmax over all keys in the blocks that the layout lists for
    it.

    A query whose block lists nothing gets out 0, lse -inf and gradient 0. Arguments and returns are as in `attention`,
    and:

    Args:
        layout: a layout for q's length (over a mesh, the global length). Its lists may be shared, or differ by query
            head or KV head and by batch element. With `lengths` or `cu_seqlens`, a sample of n tokens uses the lists of
            the first n tokens. With `cu_seqlens` the layout is for the length of the longest sample, and a longer one
            is refused. Its lists may then differ by sample: `BlockLayout.stack` joins one layout per sample. Over a
            mesh packed samples share their lists. With `q_start` or `k_start` the layout may be longer than q and k.
        is_causal: leave out the blocks above the diagonal, and mask by token the blocks that it cuts.

    Examples:
        >>> from dilated_attention import BlockLayout, block_sparse_attention, dilated_attention
        >>> q, k, v = (torch.randn(1, 16, 2, 8) for _ in range(3))
        >>> layout = BlockLayout.from_mask(torch.eye(4, dtype=torch.bool), block_size=4)  # each block sees itself
        >>> out = block_sparse_attention(q, k, v, layout)
        >>> torch.allclose(out, dilated_attention(q, k, v, [4], [1]), atol=1e-5)
        True
    """
    if not isinstance(layout, BlockLayout):
        raise ValueError(f"layout must be a BlockLayout; got {type(layout).__name__}{layout_remedy(layout)}")
    return attention(q, k, v, layout, **options)
