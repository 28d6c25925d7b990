"""A call on one device: its samples, each with its plan and layouts, on the chosen backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dilated_attention.backends.tiles import concatenate
from dilated_attention.cache import lasting, name_of, plan_cache, plan_layout
from dilated_attention.call import Call, split_scale
from dilated_attention.layout import BlockLayout
from dilated_attention.plan import Plan


def attend(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse, `(batch, seq, heads)`, where the backend is differentiable by itself."""
    run = call.backend.attend
    assert run is not None
    for _ in call.samples(q.shape[1]):
        pass  # checks the lengths
    segment_lengths, dilation_rates, table, compat = call.branches
    visible, dropout = None, call.dropout(q, k)
    if call.layouts:
        ratio = q.shape[2] // k.shape[2]  # layouts count query heads, a table those of k
        k, v = (x.repeat_interleave(ratio, 2) for x in (k, v))
        table = tuple(tuple(offset for offset in row for _ in range(ratio)) for row in table)
        visible = _dense_layouts(call.layouts, q.shape[2])
    return run(
        q, k, v, segment_lengths, dilation_rates, table, is_causal=call.is_causal, scale=call.scale, compat=compat,
        lengths=call.lengths, cu_seqlens=call.cu_seqlens, key_padding_mask=call.key_padding_mask, visible=visible,
        dropout=dropout,
    )  # fmt: skip


def _dense_layouts(layouts: Sequence[BlockLayout], heads: int) -> Callable[[int, int], Tensor]:
    """Which of n tokens sees which, per head; a shorter ragged sample has the first tokens' lists."""
    layouts = [layout.for_heads(heads) for layout in layouts]
    masks = {layout.seq_len: layout.dense_mask().cpu() for layout in layouts}
    longest = max(layouts, key=lambda layout: layout.seq_len)

    def visible(sample: int, length: int) -> Tensor:
        if length not in masks:
            masks[length] = longest.prefix(length).dense_mask().cpu()
        mask = masks[length]
        return mask[sample if len(mask) > 1 else 0]

    return visible


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """out, contiguous as q, and lse, `(batch, seq, heads)`."""
    run = call.backend.forward
    bias, dropped = _key_bias(q, call.key_padding_mask), call.dropout(q, k)
    options: dict[str, Any] = {"is_causal": call.is_causal, "scale": split_scale(call.scale)[1]}
    if call.lengths is None and call.cu_seqlens is None:
        plan = call.plan(q.shape[1])
        return list(run(q, k, v, plan, **options, key_bias=bias, layouts=layouts_of(call, q, plan), dropout=dropped))
    slices = list(call.samples(q.shape[1]))
    if call.backend.packs_samples and not call.layouts:
        plan = _packed_plan(call, k, slices)
        q_, k_, v_, bias = _packed(q, k, v, bias)
        dropped = None if dropped is None else dropped.packed()
        out, lse = run(q_, k_, v_, plan, **options, key_bias=bias, dropout=dropped)
        return [out.view(q.shape), lse.view(q.shape[:3])]
    out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    if call.lengths is not None:  # packed samples cover all rows
        out.zero_()
        lse.fill_(-torch.inf)
    for at in slices:
        plan = call.plan(at[1].stop - at[1].start)
        out[at], lse[at] = run(
            q[at], k[at], v[at], plan, **options, key_bias=None if bias is None else bias[at],
            layouts=layouts_of(call, q, plan, at[0]), dropout=None if dropped is None else dropped.sample(*at),
        )  # fmt: skip
    return [out, lse]


def backward(
    call: Call, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), contiguous, from the merged out and lse of `forward`."""
    run = call.backend.backward
    bias, dropped = _key_bias(q, call.key_padding_mask), call.dropout(q, k)
    options: dict[str, Any] = {"is_causal": call.is_causal, "scale": split_scale(call.scale)[1]}
    tensors = dout, dlse, q, k, v, out, lse
    if call.lengths is None and call.cu_seqlens is None:
        plan = call.plan(q.shape[1])
        return run(*tensors, plan, **options, key_bias=bias, layouts=layouts_of(call, q, plan), dropout=dropped)
    slices = list(call.samples(q.shape[1]))
    if call.backend.packs_samples and not call.layouts:
        plan = _packed_plan(call, k, slices)
        *tensors_, bias = _packed(*tensors, bias)
        dropped = None if dropped is None else dropped.packed()
        dq, dk, dv = run(*tensors_, plan, **options, key_bias=bias, dropout=dropped)
        return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)
    make = torch.zeros_like if call.cu_seqlens is None else torch.empty_like  # packed samples cover all rows
    dq, dk, dv = (make(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for at in slices:
        plan = call.plan(at[1].stop - at[1].start)
        dq[at], dk[at], dv[at] = run(
            *(None if x is None else x[at] for x in tensors), plan, **options,
            key_bias=None if bias is None else bias[at], layouts=layouts_of(call, q, plan, at[0]),
            dropout=None if dropped is None else dropped.sample(*at),
        )  # fmt: skip
    return dq, dk, dv


def layouts_of(
    call: Call, q: Tensor, plan: Plan, batch: slice | None = None, device: torch.device | None = None
) -> dict[int, BlockLayout] | None:
    """The block layout of each segment length of a plan, on `device`, by default q's, causal if the call is.

    A ragged sample, shorter than the layout, has the layout of its first tokens.
    """
    if not call.layouts:
        return None
    by_length = {layout.seq_len: layout for layout in call.layouts}
    found = {}
    for length in {group.queries.count for group in plan.groups}:
        layout = call.layouts[0] if batch is not None and len(call.layouts) == 1 else by_length[length]
        rows = range(batch.start, batch.stop) if batch is not None and layout.batch_size > 1 else None
        found[length] = _layout(layout, rows, q.shape[2], length, call.is_causal, device or q.device)
    return found


def _layout(
    layout: BlockLayout, batch: range | None, heads: int, length: int, is_causal: bool, device: torch.device
) -> BlockLayout:
    """A layout's first `length` tokens, from the cache. Its name is that of its tables: it may be made anew a call."""
    heads = heads if layout.num_heads > 1 else 1

    def make() -> BlockLayout:
        made = layout.select(batch=batch).for_heads(heads).prefix(length)
        return (made.causal() if is_causal else made).to(device)

    names = name_of(layout.indptr), name_of(layout.indices), layout.seq_len, layout.block_size, layout.is_causal
    return plan_layout((*names, batch, heads, length, is_causal, device), lambda: lasting(make, device))


def _packed_plan(call: Call, k: Tensor, slices: Sequence[tuple[slice, slice]]) -> Plan:
    """One plan for all samples of a ragged call, whose tensors are read as one sequence, batch after batch."""
    starts = tuple(batch.start * k.shape[1] + seq.start for batch, seq in slices)
    lengths = tuple(seq.stop - seq.start for _, seq in slices)
    tokens = k.shape[0] * k.shape[1]
    key = ("packed", tokens, starts, lengths, call.branches)
    return plan_cache.get(key, lambda: concatenate([call.plan(n) for n in lengths], list(starts), tokens))


def _packed(*tensors: Tensor | None) -> list[Any]:
    """(batch, seq, ...) as (1, batch * seq, ...)."""
    return [None if x is None else x.flatten(0, 1).unsqueeze(0) for x in tensors]


def _key_bias(q: Tensor, key_padding_mask: Tensor | None) -> Tensor | None:
    """0 at keys that are seen, -inf at those that are not."""
    if key_padding_mask is None:
        return None
    bias = torch.zeros(key_padding_mask.shape, dtype=q.dtype, device=q.device)
    return bias.masked_fill_(key_padding_mask, -torch.inf)
