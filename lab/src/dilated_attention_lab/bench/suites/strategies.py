"""Compare ways to bring a branch's rows to the fused operator. All else, and the results, are the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from dilated_attention.plumbing import Plan, Scores, StridedGroup, fused, merge_into
from dilated_attention_lab.bench import measure
from dilated_attention_lab.bench.cases import Case, contender
from dilated_attention_lab.bench.results import Record, Row
from dilated_attention_lab.bench.suites import LONGNET, seconds

OURS = "dilated_attention"
OVER = f"time of {OURS} over the best other strategy"
RESOLUTION = 0.02
"""Smaller differences are not seen: `dilated_attention` runs on views itself, and the same work twice differs by it."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """Say how a group's rows of x `(seq, heads, ...)` are read, and written back.

    Attributes:
        take: x, group -> rows `(segments, count, heads, ...)`.
        put: x, group, rows: writes the rows into x; None if `take` returns a view of x, which is written instead.
    """

    take: Callable[[Tensor, StridedGroup], Tensor]
    put: Callable[[Tensor, StridedGroup, Tensor], object] | None = None


def _heads(x: Tensor, group: StridedGroup) -> Tensor:
    return x[:, group.head : group.head + group.heads * group.head_stride : group.head_stride]


@cache
def _index(group: StridedGroup, device: torch.device) -> Tensor:
    """Return the positions of a group's tokens as one dimension of segments x count entries. They are made once, as in
    an implementation that caches its index tables."""
    rows = group.queries
    first = rows.start + rows.segment * torch.arange(rows.segments, device=device)
    return (first[:, None] + rows.stride * torch.arange(rows.count, device=device)).flatten()


def _segments(x: Tensor, group: StridedGroup) -> tuple[Tensor, int]:
    """Return a view of a group's segments, `(segments, tokens, heads, ...)`, and where its rows begin in each."""
    x, rows = _heads(x, group), group.queries
    if rows.segments == 1:
        return x[None, rows.start : rows.start + (rows.count - 1) * rows.stride + 1], 0
    offset = rows.start % rows.segment
    first = rows.start - offset
    return x[first : first + rows.segments * rows.segment].unflatten(0, (rows.segments, rows.segment)), offset


def slices(x: Tensor, group: StridedGroup) -> Tensor:
    segments, offset = _segments(x, group)
    return segments[:, offset :: group.queries.stride]


def unfold(x: Tensor, group: StridedGroup) -> Tensor:
    segments, offset = _segments(x, group)
    return segments[:, offset:].unfold(1, 1, group.queries.stride).squeeze(-1)


def _indexed(select: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, StridedGroup], Tensor]:
    def take(x: Tensor, group: StridedGroup) -> Tensor:
        return select(_heads(x, group), _index(group, x.device)).unflatten(0, (group.queries.segments, -1))

    return take


def _index_put(x: Tensor, group: StridedGroup, rows: Tensor) -> None:
    _heads(x, group)[_index(group, x.device)] = rows.flatten(0, 1)


def _wide(index: Tensor, x: Tensor) -> Tensor:
    return index.view(-1, *(1,) * (x.dim() - 1)).expand(-1, *x.shape[1:])


STRATEGIES = {
    "slices": Strategy(slices),
    "unfold": Strategy(unfold),
    "slices, copied": Strategy(
        lambda x, group: slices(x, group).contiguous(), lambda x, group, rows: slices(x, group).copy_(rows)
    ),
    "advanced indexing": Strategy(_indexed(lambda x, index: x[index]), _index_put),
    "index_select": Strategy(
        _indexed(lambda x, index: x.index_select(0, index)),
        lambda x, group, rows: _heads(x, group).index_copy_(0, _index(group, x.device), rows.flatten(0, 1)),
    ),
    "gather": Strategy(
        _indexed(lambda x, index: x.gather(0, _wide(index, x))),
        lambda x, group, rows: _heads(x, group).scatter_(
            0, _wide(_index(group, x.device), _heads(x, group)), rows.flatten(0, 1)
        ),
    ),
}


def attend(strategy: Strategy, q: Tensor, k: Tensor, v: Tensor, plan: Plan, is_causal: bool = False) -> Tensor:
    """Run a plan group by group: `fused.forward` on the rows that the strategy takes, merged by `merge_into`."""
    q, k, v = q[0], k[0], v[0]
    scale = q.shape[-1] ** -0.5
    out = torch.empty_like(q) if plan.covered else torch.zeros_like(q)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    for group in plan.groups:
        q_, k_, v_ = (strategy.take(x, group).transpose(1, 2) for x in (q, k, v))
        part, part_lse = (
            x.transpose(1, 2) for x in fused.forward(fused.Settings(Scores(scale), is_causal), q_, k_, v_)
        )
        if group.first and strategy.put:
            strategy.put(out, group, part)
            strategy.put(lse, group, part_lse)
            continue
        running, running_lse = strategy.take(out, group), strategy.take(lse, group)
        if group.first:
            running.copy_(part)
            running_lse.copy_(part_lse)
            continue
        merge_into(running, running_lse, part, part_lse.contiguous())
        if strategy.put:
            strategy.put(out, group, running)
            strategy.put(lse, group, running_lse)
    return out[None]


def cases(quick: bool) -> dict[str, Case]:
    """Return the cases by the label that `compare` shows. `quick` leaves the longest out."""
    lengths = (2048, 8192) if quick else (2048, 8192, 32768)
    return {f"{n:,} tokens by every strategy": replace(LONGNET, seq_len=n, backend="native") for n in lengths}


def rows_of(rows: Sequence[Record], case: Case) -> list[Record]:
    """Return the rows of a case among those of a file."""
    wanted = json.loads(json.dumps(case.parameters))
    return [row for row in rows if row["parameters"] == wanted]


def held(rows: Sequence[Record], case: Case) -> bool:
    """Return whether a file has all of a case's rows: the row that is written last is there."""
    return OVER in {row["name"] for row in rows_of(rows, case)}


def measured(case: Case, device: torch.device, budget: float) -> Iterator[Row]:
    """Time whole calls in the same rounds, one per strategy and `dilated_attention`, for about `budget` seconds."""
    plan = case.plan
    with torch.no_grad():
        q, k, v = case.inputs(device)[0]
        calls = {OURS: partial(case.prepare(), q, k, v)}
        for name, strategy in STRATEGIES.items():
            calls[name] = partial(attend, strategy, q, k, v, plan)
        expected = calls[OURS]().double()
        differences = [float((call().double() - expected).norm() / expected.norm()) for call in calls.values()]
        name = "largest relative difference between two strategies' results"
        yield Row(name, case.parameters, measure.largest(differences), "", bar=3e-6)
        contenders = {name: contender(call) for name, call in calls.items()}
        rounds = measure.interleave(contenders, seconds=budget, device=device, most=100)
    for name in calls:
        over = {} if name == OURS else {OURS: rounds.ratio(name, OURS)}
        yield Row.of(name, case.parameters, rounds.spread(name).scaled(1e3), "ms", over=over)
    best = min(STRATEGIES, key=lambda name: rounds.spread(name).median)
    yield Row.of(OVER, case.parameters, rounds.ratio(OURS, best), bar=1.0 + RESOLUTION, times=seconds(rounds))
