"""Run a call on one device: split it into samples, look up plan and layouts of each, and pass them to the backend.

A call with `lengths` or `cu_seqlens` is *ragged*.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dilated_attention.backends.attributes import NO_ATTRIBUTES, Attributes
from dilated_attention.backends.problem import Problem
from dilated_attention.backends.tiles import concatenate
from dilated_attention.bias import Source
from dilated_attention.cache import Kept, lasting, plan_cache
from dilated_attention.call import Call
from dilated_attention.layout import BlockLayout
from dilated_attention.merge import running
from dilated_attention.plan import Branches, Plan, plan_of

MOST_KINDS = 8
"""The most kinds of tensors, by strides and alignment, for which a call keeps what a backend prepared, and the most
problems that it keeps."""


def attend(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Run a call on a backend that has an `attend`; return out and lse, `(batch, seq, heads)`, differentiable."""
    run = call.backend.attend
    assert run is not None
    call.samples(q.shape[1])  # checks the lengths
    branches = call.branches
    visible = None
    attributes = call.attributes(q, k)
    if call.layouts:
        ratio = q.shape[2] // k.shape[2]  # layouts count query heads, a table those of k
        k, v = (x.repeat_interleave(ratio, 2) for x in (k, v))
        branches = branches._replace(offsets=tuple([_repeated(row, ratio) for row in branches.offsets]))
        visible = _dense_layouts(call.layouts, q.shape[2])
    return run(
        q, k, v, *branches[:3], call.scores, attributes=attributes, bias=call.bias_source(), is_causal=call.is_causal,
        compat=branches.compat, bands=branches.bands, leading=branches.leading, starts=call.starts,
        lengths=call.lengths, cu_seqlens=call.cu_seqlens, key_padding_mask=call.key_padding_mask, visible=visible,
    )  # fmt: skip


def _repeated(row: tuple[int, ...], times: int) -> tuple[int, ...]:
    """Repeat each entry, one after the other."""
    return tuple([row[i // times] for i in range(len(row) * times)])


def _dense_layouts(layouts: Sequence[BlockLayout], heads: int) -> Callable[[int, int, slice, slice], Tensor]:
    """Return a function of (a sample's number, n, rows, columns) that says which of a segment's n participating tokens
    sees which, for some of them as queries and some as keys: bool `(heads or 1, rows, columns)`. A segment that is
    shorter than the layout has the lists of the layout's first tokens."""
    layouts = [layout.for_heads(heads) for layout in layouts]
    by_length = {layout.seq_len: layout for layout in layouts}
    longest = max(layouts, key=lambda x: x.seq_len)
    masks: dict[tuple[int, ...], Tensor] = {}

    def visible(sample: int, length: int, rows: slice, columns: slice) -> Tensor:
        sides = (rows.start, rows.stop, columns.start, columns.stop)
        if sides not in masks:
            masks[sides] = by_length.get(length, longest).dense_part(sides[:2], sides[2:]).cpu()
        mask = masks[sides]
        return mask[sample if len(mask) > 1 else 0]

    return visible


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Return out, shaped like q and contiguous, and lse, `(batch, seq, heads)`."""
    run = call.backend.forward
    whole = _whole(call, q, k)
    if whole is None:
        out, lse = running(q, covered=call.lengths is None)  # packed samples cover all rows
        for problem, at in _each(call, q, k):
            out[at], lse[at] = run(problem, q[at], k[at], v[at])
        return [out, lse]
    problem, is_packed = whole
    if not is_packed:
        return list(run(problem, q, k, v))
    out, lse = run(problem, *_packed(q, k, v))
    return [out.view(q.shape).detach(), lse.view(q.shape[:3]).detach()]  # views could not be changed in place


def repeat(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return out and lse of a `remembered` call as its backend repeats it; None if it does not. q, k and v have one
    head_dim."""
    assert call.repeats is not None
    backend = call.backend
    lengths = None
    if call.lengths is not None:
        call.samples(q.shape[1])  # checks the lengths
        lengths = _lengths(call)
    dense = q.stride(3) == k.stride(3) == v.stride(3) == 1
    kind: Hashable = dense
    if not backend.any_strides:
        addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
        aligned = (addresses[0] | addresses[1] | addresses[2]) % 16 == 0
        kind = q.stride(), k.stride(), v.stride(), aligned or tuple([address % 16 for address in addresses])
    if kind not in call.repeats:
        if len(call.repeats) == MOST_KINDS:
            return None
        factor, scores = call.scores.split()
        prepared, nbytes = None, 0
        if dense and factor == 1 and scores.dropout_p == 0:
            prepared, nbytes = backend.prepare(_shapes_problem(call, q, k), q, k, v) or (None, 0)
        call.repeats[kind] = prepared
        plan_cache.grow(call.key, call, nbytes)
    run = call.repeats[kind]
    return None if run is None else run(q, k, v, call.starts, call.key_padding_mask, lengths)


def backward(
    call: Call, bias: Source | None, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    results: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv), contiguous, from what `forward` returned; add to the sums of `bias`, if it has any."""

    def run(problem: Problem, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        if bias is not None:
            problem = replace(problem, bias=bias)
        return call.backend.backward(problem, *tensors)

    tensors = dout, dlse, q, k, v, *results
    whole = _whole(call, q, k)
    if whole is None:
        make = torch.empty if call.lengths is None else torch.zeros  # packed samples cover all rows
        dq, dk, dv = (make(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        for problem, at in _each(call, q, k):
            part = [None if x is None else x[at] for x in tensors]
            dq[at], dk[at], dv[at] = run(problem, *part)
        return dq, dk, dv
    problem, is_packed = whole
    if not is_packed:
        return run(problem, *tensors)
    dq, dk, dv = run(problem, *_packed(*tensors))
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


# ---- problems


def _whole(call: Call, q: Tensor, k: Tensor) -> tuple[Problem, bool] | None:
    """Return one problem for all samples, and whether the backend gets them as one sequence (`_packed`); None if every
    sample needs a problem of its own (`_each`)."""
    if call.lengths is None and call.cu_seqlens is None:
        return _problem(call, q, k), False
    slices = call.samples(q.shape[1])
    backend = call.backend
    if call.lengths is not None and call.shares_plan:
        return replace(_problem(call, q, k), lengths=_lengths(call)), False
    if backend.packs_samples and not call.layouts:
        return _packed_problem(call, q, k, slices), True
    return None


def _lengths(call: Call) -> Tensor:
    """Return the lengths of a call's samples as `Problem.lengths`."""
    assert call.lengths is not None
    return call.lengths.to("cpu", torch.int64).contiguous()


def _each(call: Call, q: Tensor, k: Tensor) -> Iterator[tuple[Problem, tuple[slice, slice]]]:
    """Yield the problem of each sample of a ragged call, and its (batch, seq) slices."""
    attributes = call.attributes(q, k)
    for sample, at in enumerate(call.samples(q.shape[1])):
        plan = call.plan(at[1].stop - at[1].start)
        yield _problem_of(call, q, plan, attributes.sample(*at), sample), at


def _problem(call: Call, q: Tensor, k: Tensor) -> Problem:
    """Return the problem of a call whose samples are all as long as q."""
    problem = _shapes_problem(call, q, k)
    attributes = call.attributes(q, k)
    if attributes is NO_ATTRIBUTES:
        return problem
    return replace(problem, attributes=attributes, bias=call.bias_source())


def _shapes_problem(call: Call, q: Tensor, k: Tensor) -> Problem:
    """Return the same as `_problem`, without what is read of tensors. It depends on shapes alone, and is made once."""
    key = call.backend.name, call.starts, q.shape, k.shape, q.device
    held = call.problems.get(key)
    if held is None:
        plan = call.plan(q.shape[1], k.shape[1])
        if len(call.problems) == MOST_KINDS:
            call.problems.clear()
        _, scores = call.scores.split()
        held = call.problems[key] = Problem(plan, scores, layouts=layouts_of(call, q, plan))
    return held


def _problem_of(call: Call, q: Tensor, plan: Plan, attributes: Attributes, sample: int | None = None) -> Problem:
    _, scores = call.scores.split()
    layouts = layouts_of(call, q, plan, sample)
    return Problem(plan, scores, attributes, layouts, bias=call.bias_source())


def _packed_problem(call: Call, q: Tensor, k: Tensor, slices: Sequence[tuple[slice, slice]]) -> Problem:
    """Return one `Problem` for all samples of a ragged call, with these (batch, seq) slices: the backend reads q, k and
    v as one sequence (`_packed`)."""
    edges = tuple([(batch.start * k.shape[1] + seq.start, seq.stop - seq.start) for batch, seq in slices])
    tokens = k.shape[0] * k.shape[1]
    plan = plan_cache.of(_packed_plan, call.branches, call.starts, call.is_causal, edges, tokens)
    return _problem_of(call, q, plan, call.attributes(q, k).packed(k.shape[0]))


def _packed_plan(
    branches: Branches, positions: tuple[int, int], is_causal: bool, samples: tuple[tuple[int, int], ...], tokens: int
) -> Plan:  # fmt: skip
    """Return one plan for samples, (first token, number of tokens), that lie in a sequence of `tokens` tokens.
    `positions`: those of the first query and key of each sample."""
    q_start, k_start = positions
    plans = []
    for _, number in samples:
        plans.append(plan_of(branches, (q_start, q_start + number), (k_start, k_start + number), is_causal))
    return concatenate(plans, [first for first, _ in samples], tokens)


def layouts_of(
    call: Call, q: Tensor, plan: Plan, sample: int | None = None, device: torch.device | None = None
) -> dict[int, BlockLayout] | None:
    """Return a plan's block layouts by `StridedGroup.listed`, on `device` (default: q's); None without layouts.

    They are causal if the call is. A sample of a ragged call that is shorter than the layout has the layout's first
    tokens. A call at positions has whole layouts.

    `sample`: the sample's number; None: the layouts keep the lists of all batch elements.
    """
    if not call.layouts:
        return None
    for layout in call.layouts:
        layout.check_batch(call.sample_count(q))
    found: dict[int, BlockLayout] = {}
    for group in plan.groups:
        count = group.listed
        if count in found:
            continue
        layout = call.layouts[0]
        if len(call.layouts) > 1:
            (layout,) = [x for x in call.layouts if x.seq_len == count]
        own = None if layout.batch_size == 1 else sample
        length = layout.seq_len if call.placed else count
        heads = layout.num_heads
        if heads > 1 and call.backend.lists_per_query_head:
            heads = q.shape[2]
        given = own, heads, length, call.is_causal, device or q.device
        found[count] = plan_cache.of(_part_of_layout, layout, *given).layout
    return found


def _part_of_layout(
    layout: BlockLayout, sample: int | None, heads: int, length: int, is_causal: bool, device: torch.device
) -> Kept:
    """Return a layout's first `length` tokens on `device`, with lists for `heads` heads, for one sample or (None) for
    all."""

    def make() -> BlockLayout:
        made = layout.select(batch=None if sample is None else [sample]).for_heads(heads).prefix(length)
        return (made.causal() if is_causal else made).to(device)

    return Kept(lasting(make, device))


def _packed(*tensors: Tensor | None) -> list[Any]:
    """View each tensor (batch, seq, ...) as one sequence, (1, batch * seq, ...); None stays None."""
    return [None if x is None else x.flatten(0, 1).unsqueeze(0) for x in tensors]
