"""The one differentiable operator: forward runs a plan, backward runs the same plan with the merged out and lse.

`dilated_attention::forward` and `dilated_attention::backward` are custom operators with fake implementations, so that
`torch.compile(fullgraph=True)`, `torch.export` and `torch.func` see one opaque step. They take a pattern in normal
form, flat integers, and make the plan inside, at the length that arrives. Nothing is saved for the backward but q, k,
v, out and lse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dilated_attention.backends import flash, native, triton
from dilated_attention.backends.dropout import Dropout, dropout_of
from dilated_attention.backends.tiles import concatenate
from dilated_attention.errors import UnsupportedError
from dilated_attention.layout import BlockLayout, name_of
from dilated_attention.plan import Plan, plan_cache, plan_dilated, plan_layout


def _plan(
    k: Tensor,
    seq_len: int,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    offsets: Sequence[int],
    compat: str,
) -> Plan:
    heads = k.shape[2]
    table = tuple(tuple(offsets[b * heads : (b + 1) * heads]) for b in range(len(segment_lengths)))
    return plan_dilated(tuple(segment_lengths), tuple(dilation_rates), table, seq_len, compat or None)


def samples(seq_len: int, lengths: Tensor | None, cu_seqlens: Tensor | None) -> Iterator[tuple[slice, slice]]:
    """The (batch, seq) slices of a call's samples, each of which has a segment grid of its own.

    Raises ValueError where the values do not fit: this is the first place that reads them.
    """
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != seq_len or bounds != sorted(bounds):
            raise ValueError(f"cu_seqlens must ascend from 0 to seq, {seq_len}; got {bounds}")
        for start, stop in pairwise(bounds):
            yield slice(0, 1), slice(start, stop)
    elif lengths is not None:
        values = lengths.tolist()
        if any(not 0 <= length <= seq_len for length in values):
            raise ValueError(f"lengths must lie in [0, {seq_len}], q's seq; got {values}")
        for i, length in enumerate(values):
            yield slice(i, i + 1), slice(0, length)
    else:
        yield slice(None), slice(0, seq_len)


def pack_layouts(layouts: Sequence[BlockLayout]) -> tuple[list[int], list[Tensor]]:
    """Block layouts as an operator takes them: seq_len, q_block, k_block and is_causal of each; indptr and indices."""
    sizes = [size for x in layouts for size in (x.seq_len, x.q_block, x.k_block, int(x.is_causal))]
    return sizes, [table for x in layouts for table in (x.indptr, x.indices)]


def unpack_layouts(sizes: Sequence[int], tables: Sequence[Tensor], is_causal: bool) -> dict[int, BlockLayout]:
    """The layouts that `pack_layouts` packed, by their length; causal if the call is."""
    made = {}
    for i in range(0, len(tables), 2):
        seq_len, q_block, k_block, cut = sizes[2 * i : 2 * i + 4]
        layout = BlockLayout(tables[i], tables[i + 1], seq_len, q_block, k_block, bool(cut))
        made[seq_len] = layout.causal() if is_causal else layout
    return made


def layouts_of_plan(
    q: Tensor,
    plan: Plan,
    sizes: Sequence[int],
    tables: Sequence[Tensor],
    is_causal: bool,
    batch: slice | None = None,
) -> dict[int, BlockLayout] | None:
    """The block layout of each segment length of a plan, on q's device, from four sizes and two tables each.

    Sizes and tables are those of `pack_layouts`. A ragged sample, shorter than
    the layout, has the layout of its first tokens.
    """
    if not tables:
        return None
    found = {}
    for length in {group.queries.count for group in plan.groups}:
        at = 0 if batch is not None and len(tables) == 2 else sizes[::4].index(length)
        indptr, indices, size = tables[2 * at], tables[2 * at + 1], tuple(sizes[4 * at : 4 * at + 4])
        rows = range(batch.start, batch.stop) if batch is not None and indptr.shape[0] > 1 else None
        found[length] = _layout(indptr, indices, size, rows, q.shape[2], length, is_causal, q.device)
    return found


def _layout(
    indptr: Tensor,
    indices: Tensor,
    size: tuple[int, ...],
    batch: range | None,
    heads: int,
    length: int,
    is_causal: bool,
    device: torch.device,
) -> BlockLayout:
    """A layout's first `length` tokens, from the cache."""

    def make() -> BlockLayout:
        seq_len, q_block, k_block, cut = size
        layout = BlockLayout(indptr, indices, seq_len, q_block, k_block, bool(cut)).select(batch=batch).for_heads(heads)
        layout = layout.prefix(length)
        return (layout.causal() if is_causal else layout).to(device)

    heads = heads if indptr.shape[1] > 1 else 1
    return plan_layout((name_of(indptr), name_of(indices), size, batch, heads, length, is_causal, device), make)


def _packed_plan(k: Tensor, slices: Sequence[tuple[slice, slice]], *pattern: Any) -> Plan:
    """One plan for all samples of a ragged call, whose tensors are read as one sequence, batch after batch."""
    starts = [batch.start * k.shape[1] + seq.start for batch, seq in slices]
    lengths = [seq.stop - seq.start for _, seq in slices]
    tokens = k.shape[0] * k.shape[1]

    def make() -> Plan:
        return concatenate([_plan(k, length, *pattern) for length in lengths], starts, tokens)

    return plan_cache.get(("packed", tokens, k.shape[2], *starts, *lengths, *map(str, pattern)), make)


def _packed(*tensors: Tensor | None) -> list[Any]:
    """(batch, seq, ...) as (1, batch * seq, ...)."""
    return [None if x is None else x.flatten(0, 1).unsqueeze(0) for x in tensors]


def _key_bias(q: Tensor, key_padding_mask: Tensor | None) -> Tensor | None:
    if key_padding_mask is None:
        return None
    return torch.zeros(key_padding_mask.shape, dtype=q.dtype, device=q.device).masked_fill_(
        key_padding_mask, -torch.inf
    )


def dropout(q: Tensor, k: Tensor, dropout_p: float, head_offset: int, seed: Tensor | None) -> Dropout | None:
    """The dropout of a call whose rows are all the tokens there are, from the first on."""
    if seed is None:
        return None
    queries, keys = (torch.arange(x.shape[1], device=q.device) for x in (q, k))
    return dropout_of(dropout_p, seed, q.shape[0], q.shape[2], queries, keys[:, None], head_offset)


_BACKENDS: dict[str, Any] = {
    "native": native,
    "triton": triton,
    "flash": SimpleNamespace(
        forward=partial(native.forward, operators=flash), backward=partial(native.backward, operators=flash)
    ),
}

_OPTIONS = (
    "SymInt[] segment_lengths, SymInt[] dilation_rates, SymInt[] offsets, bool is_causal, float scale, str compat, "
    "str backend, float dropout_p, SymInt head_offset, int[] layout_sizes, Tensor[] layouts, Tensor? lengths, "
    "Tensor? cu_seqlens, Tensor? key_padding_mask, Tensor? seed"
)
torch.library.define("dilated_attention::forward", f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)")
torch.library.define(
    "dilated_attention::backward",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)


@torch.library.impl("dilated_attention::forward", "CompositeExplicitAutograd")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    offsets: Sequence[int],
    is_causal: bool,
    scale: float,
    compat: str,
    backend: str,
    dropout_p: float,
    head_offset: int,
    layout_sizes: Sequence[int],
    layouts: Sequence[Tensor],
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    key_padding_mask: Tensor | None,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """out, contiguous as q, and lse, `(batch, seq, heads)`. `offsets` is the table, row after row; `compat` "" for
    none."""
    bias = _key_bias(q, key_padding_mask)
    dropped = dropout(q, k, dropout_p, head_offset, seed)
    if lengths is None and cu_seqlens is None:
        plan = _plan(k, q.shape[1], segment_lengths, dilation_rates, offsets, compat)
        tables = layouts_of_plan(q, plan, layout_sizes, layouts, is_causal)
        return _BACKENDS[backend].forward(
            q, k, v, plan, is_causal=is_causal, scale=scale, key_bias=bias, layouts=tables, dropout=dropped
        )
    slices = list(samples(q.shape[1], lengths, cu_seqlens))
    if backend == "triton" and not layouts:  # one launch for all samples
        plan = _packed_plan(k, slices, segment_lengths, dilation_rates, offsets, compat)
        q_, k_, v_, bias = _packed(q, k, v, bias)
        dropped = None if dropped is None else dropped.packed()
        out, lse = triton.forward(q_, k_, v_, plan, is_causal=is_causal, scale=scale, key_bias=bias, dropout=dropped)
        return out.view(q.shape), lse.view(q.shape[:3])
    out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    if lengths is not None:  # packed samples cover all rows
        out.zero_()
        lse.fill_(-torch.inf)
    for batch, seq in slices:
        plan = _plan(k, seq.stop - seq.start, segment_lengths, dilation_rates, offsets, compat)
        sample_bias = None if bias is None else bias[batch, seq]
        out[batch, seq], lse[batch, seq] = _BACKENDS[backend].forward(
            q[batch, seq], k[batch, seq], v[batch, seq], plan, is_causal=is_causal, scale=scale, key_bias=sample_bias,
            layouts=layouts_of_plan(q, plan, layout_sizes, layouts, is_causal, batch),
            dropout=None if dropped is None else dropped.sample(batch, seq),
        )  # fmt: skip
    return out, lse


@torch.library.register_fake("dilated_attention::forward")
def _(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.impl("dilated_attention::backward", "CompositeExplicitAutograd")
def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    offsets: Sequence[int],
    is_causal: bool,
    scale: float,
    compat: str,
    backend: str,
    dropout_p: float,
    head_offset: int,
    layout_sizes: Sequence[int],
    layouts: Sequence[Tensor],
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    key_padding_mask: Tensor | None,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), contiguous, from the merged out and lse of `forward`."""
    bias = _key_bias(q, key_padding_mask)
    dropped = dropout(q, k, dropout_p, head_offset, seed)
    if lengths is None and cu_seqlens is None:
        plan = _plan(k, q.shape[1], segment_lengths, dilation_rates, offsets, compat)
        tables = layouts_of_plan(q, plan, layout_sizes, layouts, is_causal)
        return _BACKENDS[backend].backward(
            dout, dlse, q, k, v, out, lse, plan, is_causal=is_causal, scale=scale, key_bias=bias, layouts=tables,
            dropout=dropped,
        )  # fmt: skip
    slices = list(samples(q.shape[1], lengths, cu_seqlens))
    if backend == "triton" and not layouts:
        plan = _packed_plan(k, slices, segment_lengths, dilation_rates, offsets, compat)
        dout_, dlse_, q_, k_, v_, out_, lse_, bias = _packed(dout, dlse, q, k, v, out, lse, bias)
        dropped = None if dropped is None else dropped.packed()
        gradients = triton.backward(
            dout_, dlse_, q_, k_, v_, out_, lse_, plan, is_causal=is_causal, scale=scale, key_bias=bias, dropout=dropped
        )
        dq, dk, dv = (x.view(y.shape) for x, y in zip(gradients, (q, k, v), strict=True))
        return dq, dk, dv
    make = torch.empty_like if lengths is None else torch.zeros_like  # packed samples cover all rows
    dq, dk, dv = (make(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for batch, seq in slices:
        plan = _plan(k, seq.stop - seq.start, segment_lengths, dilation_rates, offsets, compat)
        dout_, q_, k_, v_, out_, lse_ = (x[batch, seq] for x in (dout, q, k, v, out, lse))
        dlse_, bias_ = (None if x is None else x[batch, seq] for x in (dlse, bias))
        dq[batch, seq], dk[batch, seq], dv[batch, seq] = _BACKENDS[backend].backward(
            dout_, dlse_, q_, k_, v_, out_, lse_, plan, is_causal=is_causal, scale=scale, key_bias=bias_,
            layouts=layouts_of_plan(q, plan, layout_sizes, layouts, is_causal, batch),
            dropout=None if dropped is None else dropped.sample(batch, seq),
        )  # fmt: skip
    return dq, dk, dv


@torch.library.register_fake("dilated_attention::backward")
def _(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def in_torch_func() -> bool:
    """Whether a torch.func transform is active: it differentiates a Function, and knows no Autograd kernel."""
    return torch._C._are_functorch_transforms_active()


def _fold(operator: Any, info: Any, in_dims: tuple[Any, ...], arguments: tuple[Any, ...]) -> list[Any]:
    """The arguments of a call under `torch.func.vmap`, as one call whose batch has the mapped dimension inside."""
    folded = []
    for argument, dim, x in zip(operator.default._schema.arguments, in_dims, arguments, strict=True):
        if argument.name == "cu_seqlens" and x is not None:
            raise UnsupportedError("cu_seqlens under torch.func.vmap: samples are packed one after another already")
        if argument.name == "layouts" and any(len(indptr) > 1 for indptr in x[::2]):
            raise UnsupportedError("layout has lists per batch element: under torch.func.vmap they must be shared")
        if argument.name == "seed" and x is not None:
            if dim is None:  # pairs are chosen by their place in the batch, which folding changes
                raise UnsupportedError('dropout under torch.func.vmap: only with randomness="different"')
            x = x.movedim(dim, 0)[0]
        elif isinstance(x, Tensor):
            x = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            x = x.flatten(0, 1)
        folded.append(x)
    return folded


def _unfold(info: Any, results: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    unfolded = tuple(x.unflatten(0, (info.batch_size, len(x) // info.batch_size)) for x in results)
    return unfolded, (0,) * len(unfolded)


class _Attention(torch.autograd.Function):
    """`dilated_attention::forward` with its gradient."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.dilated_attention.forward(q, k, v, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, *options, layouts, lengths, cu_seqlens, key_padding_mask, seed = inputs
        ctx.save_for_backward(q, k, v, *output, lengths, cu_seqlens, key_padding_mask, seed, *layouts)
        ctx.options = options
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, lengths, cu_seqlens, key_padding_mask, seed, *layouts = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        backward = _AttentionBackward.apply if in_torch_func() else torch.ops.dilated_attention.backward
        gradients = backward(
            dout, dlse, q, k, v, out, lse, *ctx.options, layouts, lengths, cu_seqlens, key_padding_mask, seed
        )
        return (*gradients, *(None,) * 15)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return _unfold(info, attend(*_fold(torch.ops.dilated_attention.forward, info, in_dims, arguments)))


class _AttentionBackward(torch.autograd.Function):
    """`dilated_attention::backward`, which has no gradient."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.dilated_attention.backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise NotImplementedError(
            "second derivatives of attention are not fused; "
            'call with backend="reference", which differentiates any number of times'
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        folded = _fold(torch.ops.dilated_attention.backward, info, in_dims, arguments)
        return _unfold(info, _AttentionBackward.apply(*folded))


@torch.library.impl("dilated_attention::forward", "Autograd")
def _differentiable(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Attention.apply(q, k, v, *options)
    with torch._C._AutoDispatchBelowAutograd():  # binding a Function's arguments is a third of a small call's overhead
        return torch.ops.dilated_attention.forward(q, k, v, *options)


torch.library.impl("dilated_attention::backward", "Autograd")(_AttentionBackward.apply)


def attend(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Differentiable out, contiguous as q, and lse, `(batch, seq, heads)`.

    Args:
        options: those of the operator: segment_lengths, dilation_rates and the table of offsets, row after row, as
            lists; is_causal, scale, compat ("" for none), backend; dropout_p and the global index of the first query
            head, which dropout needs; the sizes and tables of block layouts, as in `_layouts`; lengths, cu_seqlens,
            key_padding_mask or None; the seed of dropout, None without.
    """
    if in_torch_func():
        return _Attention.apply(q, k, v, *options)
    return torch.ops.dilated_attention.forward(q, k, v, *options)
