"""The public calls: one signature written out, the others on top of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from dilated_attention import operators
from dilated_attention.call import Call, Options, Pattern, as_autocast, as_one_width
from dilated_attention.layout import BlockLayout
from dilated_attention.merge import with_sinks
from dilated_attention.parallel.over_mesh import refuse
from dilated_attention.patterns import Dilated, Offsets

if TYPE_CHECKING:
    from typing_extensions import Unpack

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
    head_offset: int = 0,
    transport: str = "auto",
    layer: str = "",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of a pattern: one softmax over the keys that it shows, counted with multiplicity.

    With c(i, j) the number of times that the pattern shows key j to query i (causal: keys j <= i only) and
    s = scale q kᵀ,

        out_i = sum_j c exp(s_ij) v_j / sum_j c exp(s_ij),        lse_i = log sum_j c exp(s_ij).

    A query that sees no key gets out 0, lse -inf and gradient 0.

    Args:
        q: `(batch, seq, heads, head_dim)`; float64, float32, bfloat16 or float16; any strides.
        k, v: `(batch, seq, kv_heads, head_dim)`; kv_heads divides heads. Query head h reads key-value head
            h // (heads // kv_heads) and has its offset. The head_dim of v may be another one; what is shorter is then
            filled with zeros, so that a call costs what it costs with the longer one.
        pattern: `Dilated`, `BlockLayout`, or their product `Dilated(...) * layout`.
        is_causal: a query sees no key after itself.
        scale: of the scores, any finite number; default 1 / sqrt(head_dim).
        dropout_p: probability that a weight of the softmax is dropped, the others being divided by 1 - dropout_p; lse
            is that of all. Drawn by torch's generator of q's device, so that `torch.manual_seed` reproduces it: one
            number a call, from which every backend derives the same choice for (sample, query head, query, key). The
            native backend then computes by plain products in single precision, in chunks of bounded memory, since the
            fused operators have no dropout that others could repeat: slower than without dropout.
        sinks: `(heads,)` logits: exp(sinks_h) is one more term of the denominator of out, with no value, so that a head
            may attend to nothing. lse is without it. Learned: differentiable.
        lengths: `(batch,)` integers: each sample ends there; rows after it give out 0, lse -inf and influence nothing.
        cu_seqlens: `(samples + 1,)` integers from 0 to seq: samples packed one after another, batch 1, each with a
            segment grid that starts at its own first token.
        key_padding_mask: `(batch, seq)` bool, True: no query sees the key (as in `nn.MultiheadAttention`), which
            may hold anything, NaN included.
        return_lse: also return lse.
        backend: `"auto"`, `"native"` (PyTorch's fused operators), `"cpu"` (kernels in C++, for AVX-512), `"triton"`
            (kernels for GPUs, unmeasured on one yet), `"flash"` (FlashAttention, where it is installed; no masks but
            the causal one, no dropout, no layouts) or `"reference"` (dense, float64 inside, any derivative).
        mesh: a 1-D `torch.distributed.DeviceMesh`, or a ProcessGroup, over whose ranks seq is sharded contiguously:
            q, k, v, out and lse are then this rank's shard, tokens `parallel.sequence_range(seq_len, mesh)`, and the
            result is that of one device. lengths and cu_seqlens stay global.
        seq_len: the global length; default: equal shards, q's length times the number of ranks.
        transport: how rows travel between ranks: `"exchange"`, `"doubling"`, `"ring"`, `"all_gather"`, `"ulysses"`, or
            `"auto"`: see `explain` for what it takes and why.
        head_offset: global index of the first key-value head of these tensors (tensor parallelism).
        layer: the name of the calling layer, for errors of a mesh.

    Returns:
        out, as q with the head_dim of v; with `return_lse` also lse: `(batch, heads, seq)`, float32 (float64 for
        float64), natural logarithm, differentiable.

    Raises:
        ValueError: naming the argument, its value and what would be right; with a mesh on every rank.
        ContextParallelError: a rank was lost, or sent what it should not have; the group is not used again.
    """
    q, k, v = as_autocast(q, k, v)
    try:
        call = Call.of(
            q, k, v, pattern, is_causal=is_causal, scale=scale, dropout_p=dropout_p, sinks=sinks, lengths=lengths,
            cu_seqlens=cu_seqlens, key_padding_mask=key_padding_mask, backend=backend, mesh=mesh, seq_len=seq_len,
            head_offset=head_offset, transport=transport, layer=layer,
        )  # fmt: skip
    except ValueError as error:
        refuse(mesh, error, q)
        raise
    if dropout_p:
        call = replace(call, seed=torch.randint(-(1 << 63), (1 << 63) - 1, (), device=q.device))
    if key_padding_mask is not None:  # a weight of 0 times NaN would be NaN
        k, v = (x.masked_fill(key_padding_mask[:, :, None, None], 0.0) for x in (k, v))
    out, lse = operators.attend(*as_one_width(q, k, v), call)
    if v.shape[3] < q.shape[3]:
        out = out[..., : v.shape[3]]
    if sinks is not None:
        out = with_sinks(out, lse, sinks)
    return (out, lse.transpose(1, 2)) if return_lse else out


class CallOptions(Options, total=False):
    return_lse: bool


def _with_options_of_attention(function: Function) -> Function:
    """Show the options of `attention` in a function's signature, in place of `**options`."""
    own, options = inspect.signature(function), inspect.signature(attention).parameters.values()
    parameters = [x for x in own.parameters.values() if x.kind is not x.VAR_KEYWORD]
    parameters += [x for x in options if x.kind is x.KEYWORD_ONLY]
    function.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


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
    """Exact dilated attention: one softmax over the keys that the branches show, counted with multiplicity.

    Branch (w, r) lets token p take part for head h iff (p mod w) mod r == o(h); a query that takes part sees the keys
    of its segment p // w that take part (causal: keys j <= p). A query that no branch covers gets out 0, lse -inf and
    gradient 0. The definition is LongNet's (arXiv:2307.02486), without its released code's padding keys and cut
    gradient.

    Args:
        segment_lengths, dilation_rates, offsets, head_groups, compat: the pattern, as in `Dilated`.

    All else as in `attention`.
    """
    pattern = Dilated(segment_lengths, dilation_rates, offsets, head_groups, compat)  # type: ignore[arg-type]
    return attention(q, k, v, pattern, **options)


@_with_options_of_attention
def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, **options: Unpack[CallOptions]
) -> Tensor | tuple[Tensor, Tensor]:
    """Block-sparse attention: one softmax a row over all keys of the key blocks that the layout lists for it.

    A query whose block lists nothing gets out 0, lse -inf and gradient 0. Arguments and returns as in `attention`, and:

    Args:
        layout: for q's length, with lists that all heads share, one a query head or one a key-value head, shared by the
            batch or one an element. With `lengths` or `cu_seqlens` each sample has the lists for its first tokens.
        is_causal: blocks above the diagonal are left out, those that it cuts are masked by token.
    """
    if not isinstance(layout, BlockLayout):
        raise ValueError(f"layout must be a BlockLayout; got {type(layout).__name__}")
    return attention(q, k, v, layout, **options)
