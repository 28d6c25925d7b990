"""Run a call over a mesh: each rank computes its own rows.

Forward merges the parts that a transport yields into a running (out, lse). Backward runs the same parts with the merged
out and lse, which is the exact gradient of the whole (see `merge`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from dilated_attention.backends.dropout import dropout_of
from dilated_attention.backends.problem import Problem
from dilated_attention.cache import plan_cache
from dilated_attention.call import Call
from dilated_attention.layout import BlockLayout
from dilated_attention.merge import merge_into
from dilated_attention.mesh import context_group
from dilated_attention.parallel import parts, traffic, transports
from dilated_attention.parallel.comm import Agreed, Link, link_of
from dilated_attention.parallel.partition import Sharding, balanced_bounds, rank_groups
from dilated_attention.parallel.ulysses import Ulysses
from dilated_attention.plan import EVERY, StridedGroup
from dilated_attention.torch_internals import group_named

State = tuple[Tensor, Tensor]
Result = TypeVar("Result")

_TRANSPORTS: dict[str, Callable[[Link, Sharding, int, torch.device], transports.Transport]] = {
    "exchange": transports.Exchange,
    "doubling": transports.Doubling,
    "ring": transports.Ring,
    "all_gather": transports.AllGather,
}


@dataclass(frozen=True)
class _Description:
    """Hold what must be equal on every rank so that messages fit, and a short description of the plan.

    There is one `name=value` per line.
    """

    text: str
    plan: str
    nbytes: int


def _group(call: Call) -> ProcessGroup:
    assert call.shards is not None
    return group_named(call.shards.group_name)


def sharding_of(call: Call, size: int) -> Sharding:
    """Return the sharding of a call over `size` ranks. It is the same on each rank."""
    assert call.shards is not None
    bounds = call.shards.bounds
    layouts = tuple([layout.causal() if call.is_causal else layout for layout in call.layouts])
    edges = balanced_bounds(bounds[0], size) if len(bounds) == 1 else bounds
    return Sharding(call.branches, edges, call.is_causal, call.shards.samples, layouts)


class _Rank:
    """Hold what one rank knows about a call over the mesh."""

    def __init__(self, call: Call, q: Tensor, k: Tensor) -> None:
        assert call.shards is not None
        self.call, self.shards, self.group = call, call.shards, _group(call)
        self.sharding = sharding_of(call, dist.get_world_size(self.group))
        self.shape = traffic.Shape(int(k.shape[0]), q.shape[2], k.shape[3], k.dtype)
        self.transport = traffic.choose(self.shards.transport, self.sharding, self.shape).transport

    def open(self, q: Tensor, number: int | None = None) -> tuple[Link, int]:
        """Check that every rank makes the same call, and return the link and the number of the forward.

        Args:
            number: in a backward, the number of its forward.
        """
        link = self.agree(q)[0]
        return link, link.begin(self.shards.layer, number)

    def agree(self, q: Tensor, wanted: bool | None = None) -> tuple[Link, Agreed]:
        """Compare the call over the ranks; `wanted` as in `Link.agree`."""
        link, sharding, shards = link_of(self.group), self.sharding, self.shards
        start, stop = sharding.shard(link.rank)
        problem = None
        if q.shape[1] != stop - start:
            problem = (
                f"q has {q.shape[1]} tokens; rank {link.rank}'s shard of seq_len={sharding.seq_len} over {link.size} "
                f"ranks is [{start}, {stop}), {stop - start} tokens: see sequence_range"
            )
        scores = self.call.scale, self.call.softcap, self.call.key_padding_mask is not None, self.call.dropout_p
        key = ("description", sharding, len(shards.bounds), shards.lengths, self.shape, scores, self.transport)
        description = plan_cache.get(key, self._describe)
        link.place = f"{shards.layer}, {description.plan}" if shards.layer else description.plan
        return link, link.agree(description.text, problem, q.device, wanted)

    def schedule(self, link: Link, device: torch.device) -> transports.Transport:
        return _TRANSPORTS[self.transport](link, self.sharding, self.shape.row_bytes, device)

    def _describe(self) -> _Description:
        sharding, shape = self.sharding, self.shape
        lengths, rates, offsets, compat, bands, leading = sharding.branches
        values = {
            "seq_len": sharding.seq_len,
            "shard bounds": "balanced" if len(self.shards.bounds) == 1 else list(sharding.bounds),
            "segment_lengths": list(lengths),
            "dilation_rates": list(rates),
            "offsets": offsets,
            "windows": bands,
            "leading": leading,
            "cu_seqlens": sharding.samples,
            "lengths": self.shards.lengths,
            "is_causal": sharding.is_causal,
            "compat": compat,
            "layouts": [(layout.seq_len, layout.block_size, _digest(layout)) for layout in sharding.layouts],
            "batch": shape.batch,
            "heads": shape.num_heads,
            "kv_heads": sharding.num_heads,
            "head_dim": shape.head_dim,
            "dtype": shape.dtype,
            "scale": self.call.scale,
            "softcap": self.call.softcap,
            "key_padding_mask": "None" if self.call.key_padding_mask is None else "given",
            "dropout_p": self.call.dropout_p,
            "transport": self.transport,
        }
        text = "\n".join([f"{name}={value}" for name, value in values.items()])
        each = zip(lengths, rates, bands or (EVERY,) * len(rates), strict=True)
        branches = ", ".join([f"{w if band == EVERY else f'{band[0]}..{band[1]}'}/{r}" for w, r, band in each])
        plan = f"{self.transport} of {sharding.seq_len} tokens, branches {branches}"
        return _Description(text, plan, len(text) + len(plan) + sharding.nbytes)


def _digest(layout: BlockLayout) -> str:
    """Return a digest of a layout's lists. Unlike a hash, it is the same in every process."""
    tables = layout.to("cpu")
    digest = hashlib.sha256(f"{tuple(tables.indptr.shape)} {layout.is_causal}".encode())
    digest.update(tables.indptr.numpy().tobytes())
    digest.update(tables.indices.numpy().tobytes())
    return digest.hexdigest()[:16]


class _Pairs:
    """Say which pairs of query and key the call's mask and dropout keep, for rows given by their tokens in the
    sequence."""

    def __init__(self, rank: _Rank, link: Link, q: Tensor) -> None:
        call, self.sharding = rank.call, rank.sharding
        self.tokens = torch.arange(*rank.sharding.shard(link.rank), device=q.device)
        self.hidden, self.seed = None, None
        self.dropout_p, self.first_head = call.dropout_p, call.first_head
        if call.key_padding_mask is not None:
            self.hidden = self._whole(link, call.key_padding_mask)
        if call.seed is not None:  # ranks may have drawn different seeds
            self.seed = call.seed.clone()
            with link.guard("while agreeing on the seed of dropout"):
                dist.all_reduce(self.seed, op=dist.ReduceOp.MAX, group=link.group)

    def _whole(self, link: Link, mask: Tensor) -> Tensor:
        """Gather the mask of the whole sequence, `(batch, seq)`, from the shards' masks: one byte per token."""
        return link.whole(mask.T.to(torch.uint8), self.sharding.bounds, "while gathering key_padding_mask").T.bool()

    def of(
        self, problem: Problem, q: Tensor, queries: Tensor | None = None, keys: Tensor | None = None, head: int = 0
    ) -> Problem:
        """Return `problem` with the mask and the dropout of these rows.

        Args:
            queries: the token of each row of q; None: the tokens of the shard.
            keys: the token of each row of k, or of each row and head; None: the tokens of the shard.
            head: the first of q's heads, counted from the rank's first head.
        """
        queries, keys = (self.tokens if tokens is None else tokens for tokens in (queries, keys))
        hidden, dropped = None if self.hidden is None else self.hidden[:, keys], None
        if self.seed is not None:
            rows = keys if keys.dim() == 2 else keys[:, None]
            shape = q.shape[0], q.shape[2]
            dropped = dropout_of(self.dropout_p, self.seed, *shape, queries, rows, self.first_head + head)
        return replace(problem, hidden=hidden, dropout=dropped)


def _drive(schedule: Generator[parts.Part, Any, Result], compute: Callable[[parts.Part], Any]) -> Result:
    """Run a schedule: compute each part that it yields, and send the result back into it."""
    answer = None
    while True:
        try:
            part = schedule.send(answer)
        except StopIteration as done:
            return done.value
        answer = compute(part)


class _Compute:
    """Compute the parts of one call with a backend, and add them to the running results."""

    def __init__(self, rank: _Rank, link: Link, q: Tensor, k: Tensor) -> None:
        self.backend, self.pairs = rank.call.backend, _Pairs(rank, link, q)
        self.q, self.ratio = q, q.shape[2] // k.shape[2]
        self.scale, self.softcap = rank.call.positive_scale, rank.call.softcap
        self.layouts = {layout.seq_len: layout for layout in rank.sharding.layouts} or None

    def forward(self, part: parts.Part, state: State | None) -> State:
        """Return the running (out, lse) with a part merged into it."""
        if part.queries is None:
            return self.backend.forward(self._problem(part), self.q, part.keys, part.values, state)
        assert state is not None
        (q,), rows = self._rows(part.queries, self.q), part.queries.positions
        found = self.backend.forward(self._problem(part), q, part.keys, part.values)
        index = self._index(part.queries)
        merged = [x[index] for x in state]
        merge_into(*merged, *(x[:, rows] for x in found))
        for x, value in zip(state, merged, strict=True):
            x[index] = value
        return state

    def backward(
        self, part: parts.Part, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, dq: Tensor
    ) -> parts.Gradients:
        """Return a part's (dk, dv), in the dtype in which gradients are summed; its dq is added to `dq`."""
        problem, keys = self._problem(part), (part.keys, part.values)
        sums = [torch.zeros(x.shape, dtype=dq.dtype, device=dq.device) for x in (part.keys, part.values)]
        if part.queries is None:
            self.backend.backward(problem, dout, dlse, self.q, *keys, out, lse, (dq, *sums))
            return sums[0], sums[1]
        dout, q, out = self._rows(part.queries, dout, self.q, out)
        (lse,) = self._rows(part.queries, lse, fill=-torch.inf)
        dlse = None if dlse is None else self._rows(part.queries, dlse)[0]
        part_dq = torch.zeros(q.shape, dtype=dq.dtype, device=dq.device)
        self.backend.backward(problem, dout, dlse, q, *keys, out, lse, (part_dq, *sums))
        dq[self._index(part.queries)] += part_dq[:, part.queries.positions]
        return sums[0], sums[1]

    def _index(self, queries: parts.BlockQueries) -> tuple[Any, ...]:
        """Return the index of the part's rows and heads in the shard's tensors."""
        heads = [head * self.ratio + i for head in queries.heads for i in range(self.ratio)]
        return slice(None), queries.tokens[:, None], torch.tensor(heads, device=self.q.device)

    def _rows(self, queries: parts.BlockQueries, *tensors: Tensor, fill: float = 0.0) -> list[Tensor]:
        """Return the shard's rows that the part reads."""
        index, made = self._index(queries), []
        for x in tensors:
            rows = x.new_full((x.shape[0], queries.layout.seq_len, len(index[2]), *x.shape[3:]), fill)
            rows[:, queries.positions] = x[index]
            made.append(rows)
        return made

    def _problem(self, part: parts.Part) -> Problem:
        if part.queries is None:
            problem = Problem(part.plan, self.scale, layouts=self.layouts, softcap=self.softcap)
            return self.pairs.of(problem, self.q, keys=part.tokens)
        layout, hidden = part.queries.layout, part.queries.hidden
        if hidden is not None:
            hidden = hidden.expand(self.q.shape[0], -1)
        return Problem(part.plan, self.scale, hidden, {layout.seq_len: layout}, softcap=self.softcap)


def gradients_wanted(call: Call, q: Tensor, k: Tensor, wanted: bool) -> bool:
    """Return whether some rank wants gradients of this call. Every rank then has to take part in the backward."""
    if call.lengths is not None and len(q):  # the first sample knows the lengths of all
        own, call = next(samples(call, q.shape[1]))
        q, k = q[:1, :own], k[:1, :own]
    return bool(_Rank(call, q, k).agree(q, wanted)[1].wanted)


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Compute out, contiguous, and lse, `(batch, shard, heads)`, and what the backward needs.

    For each sample of a padded batch, or once, this is two flat tensors of other ranks' rows, and the number of the
    forward, int64 on the CPU.
    """
    if call.lengths is None or not len(q):
        return _forward(call, q, k, v)
    out, lse = q.new_zeros(q.shape), q.new_full(q.shape[:3], -torch.inf, dtype=parts.statistic(q.dtype))
    saved: list[Tensor] = []
    for i, (own, sample) in enumerate(samples(call, q.shape[1])):
        at = slice(i, i + 1), slice(0, own)
        out[at], lse[at], *rest = _forward(sample, q[at], k[at], v[at])
        saved += rest
    return [out, lse, *saved]


def _forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    rank = _Rank(call, q, k)
    link, count = rank.open(q)
    number = torch.tensor(count, device="cpu")
    if not len(q):
        wide = parts.statistic(q.dtype)
        lse, empty = q.new_empty(q.shape[:3], dtype=wide), k.new_empty(0, dtype=wide)
        return [torch.empty_like(q), lse, k.new_empty(0), empty, number]
    if rank.transport == "ulysses":
        heads = Ulysses(link, rank.sharding, q.shape[2])
        q, k, v = heads.scatter_heads([q, k, v], "in forward's exchange of heads")
        whole_out, whole_lse = call.backend.forward(_whole_problem(rank, link, heads, q), q, k, v)
        out, lse = heads.gather_heads([whole_out, whole_lse], "in forward's return of heads")
        saved = torch.cat([x.flatten() for x in (q, k, v, whole_out)])
        return [out.contiguous(), lse.contiguous(), saved, whole_lse.flatten(), number]
    compute = _Compute(rank, link, q, k)
    state: State | None = None

    def add(part: parts.Part) -> None:
        nonlocal state
        state = compute.forward(part, state)

    saved = _drive(rank.schedule(link, k.device).forward(k, v), add)
    assert state is not None
    return [*state, saved.flatten(), state[1].new_empty(0), number]


def _whole_problem(rank: _Rank, link: Link, heads: Ulysses, q: Tensor) -> Problem:
    """Return the problem over all tokens for this rank's share of the heads, when ranks exchange heads."""
    tokens = torch.arange(rank.sharding.seq_len, device=q.device)
    problem = Problem(heads.plan, rank.call.positive_scale, layouts=heads.layouts or None, softcap=rank.call.softcap)
    return _Pairs(rank, link, q).of(problem, q, tokens, tokens, link.rank * q.shape[2])


def empty_saved(call: Call, q: Tensor, k: Tensor) -> list[Tensor]:
    """Return fake tensors shaped like those that `forward` saves for the backward."""
    found: list[Tensor] = []
    for _ in range(1 if call.lengths is None or not len(q) else len(q)):
        found += (*_empty_rows(call, q, k), torch.empty((), dtype=torch.int64, device="cpu"))
    return found


def _empty_rows(call: Call, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    wide = parts.statistic(q.dtype)
    if call.layouts or call.lengths is not None:  # the saved tensors' shapes depend on the lists or the samples
        sizes = [torch.library.get_ctx().new_dynamic_size() for _ in range(2)]
        return k.new_empty(sizes[0]), k.new_empty(sizes[1], dtype=wide)
    rank = _Rank(call, q, k)
    if rank.transport == "ulysses":
        size = rank.sharding.world_size
        tokens, heads, kv_heads = q.shape[0] * rank.sharding.seq_len, q.shape[2] // size, k.shape[2] // size
        saved = 2 * tokens * (heads + kv_heads) * q.shape[3]
        return q.new_empty(saved), k.new_empty(tokens * heads, dtype=wide)
    saved = traffic.count(rank.transport, rank.sharding, dist.get_rank(rank.group), rank.shape).saved_bytes
    return k.new_empty(saved // k.dtype.itemsize), k.new_empty(0, dtype=wide)


def backward(
    call: Call,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    results: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of the shard, from what `forward` saved."""
    if call.lengths is None or not len(q):
        return _backward(call, dout, dlse, q, k, v, results)
    out, lse, *saved = results
    dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
    for i, (own, sample) in enumerate(samples(call, q.shape[1])):
        at = slice(i, i + 1), slice(0, own)
        some = [out[at], lse[at], *saved[3 * i : 3 * i + 3]]
        some_dlse = None if dlse is None else dlse[at]
        dq[at], dk[at], dv[at] = _backward(sample, dout[at], some_dlse, q[at], k[at], v[at], some)
    return dq, dk, dv


def _backward(
    call: Call,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    results: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, saved, saved_lse, number = results
    rank = _Rank(call, q, k)
    link, _ = rank.open(q, int(number))
    if not len(q):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if rank.transport == "ulysses":
        heads = Ulysses(link, rank.sharding, q.shape[2])
        dlse = torch.zeros_like(lse) if dlse is None else dlse
        dout, dlse = heads.scatter_heads([dout, dlse], "in backward's exchange of heads")
        shapes = [(*dout.shape[:2], number, q.shape[3]) for number in heads.widths]
        pieces = saved.split([torch.Size(shape).numel() for shape in shapes])
        q, k, v, out = (piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True))
        lse = saved_lse.view(out.shape[:3])
        problem = _whole_problem(rank, link, heads, q)
        gradients = call.backend.backward(problem, dout, dlse, q, k, v, out, lse)
        dq, dk, dv = heads.gather_heads(gradients, "in backward's return of heads")
        return dq.contiguous(), dk.contiguous(), dv.contiguous()
    compute = _Compute(rank, link, q, k)
    dq = torch.zeros(q.shape, dtype=parts.statistic(q.dtype), device=q.device)
    rows = saved.view(-1, 2, k.shape[0], k.shape[3]) if len(saved) else saved.view(0, 2, k.shape[0], k.shape[3])
    schedule = rank.schedule(link, k.device).backward(k, v, rows)
    dk, dv = _drive(schedule, lambda part: compute.backward(part, dout, dlse, out, lse, dq))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def account(
    call: Call, q: Tensor, k: Tensor
) -> tuple[traffic.TransportChoice, traffic.ExchangePlan, tuple[StridedGroup, ...]]:
    """Return how rows travel, what this rank moves, and the groups that it computes, without thinning out by layouts.

    For a padded batch this is the traffic of all samples together, their groups one after another, and the transport
    of the longest sample.
    """
    assert call.shards is not None
    group = _group(call)
    if call.lengths is not None and len(call.lengths):
        found = [account(sample, q[:1], k[:1]) for _, sample in samples(call, q.shape[1])]
        longest, tokens = int(call.lengths.argmax()), int(call.lengths.max())
        chosen, plans = found[longest][0], [plan for _, plan, _ in found]
        if call.shards.transport == "auto":
            reason = f"each sample chooses for itself; the longest, of {tokens} tokens: {chosen.reason}"
            chosen = replace(chosen, reason=reason)
        shard = sharding_of(call, dist.get_world_size(group)).shard(dist.get_rank(group))
        moved = replace(traffic.total(plans), transport=chosen.transport, shard=shard)
        return chosen, moved, tuple([group for *_, groups in found for group in groups])
    rank, number = _Rank(call, q, k), dist.get_rank(group)
    chosen = traffic.choose(call.shards.transport, rank.sharding, rank.shape)
    moved = traffic.count(chosen.transport, rank.sharding, number, rank.shape)
    return chosen, moved, rank_groups(rank.sharding, number)


def refuse(mesh: Any, error: ValueError, q: Any) -> None:
    """Raise `error` on every rank that waits for this rank, because this rank's call is impossible."""
    if not isinstance(mesh, (DeviceMesh, ProcessGroup)):
        return
    group = context_group(mesh)
    if dist.get_world_size(group) > 1:
        link_of(group).refuse(str(error), q.device if isinstance(q, Tensor) else torch.device("cpu"))


def samples(call: Call, tokens: int) -> Iterator[tuple[int, Call]]:
    """Split a padded batch into calls of one sample each: yield how many of this shard's tokens it has, and its call.

    A sample is sharded like the batch, with every shard edge limited to the sample's length.
    """
    assert call.shards is not None
    assert call.lengths is not None
    group, bounds, lengths = _group(call), call.shards.bounds, tuple(call.lengths.tolist())
    edges = balanced_bounds(bounds[0], dist.get_world_size(group)) if len(bounds) == 1 else bounds
    start = edges[dist.get_rank(group)]
    for i, length in enumerate(lengths):
        layouts = call.layouts
        if len(layouts) == 1 and length:
            whole = layouts[0].select(batch=range(i, i + 1)) if layouts[0].batch_size > 1 else layouts[0]
            layouts = tuple([whole.prefix(count) for count in sorted(call.row_counts(length))])
        shards = replace(call.shards, bounds=tuple([min(edge, length) for edge in edges]), lengths=lengths)
        own, mask = max(0, min(tokens, length - start)), call.key_padding_mask
        mask = None if mask is None else mask[i : i + 1, :own]
        yield own, replace(call, lengths=None, key_padding_mask=mask, layouts=layouts, shards=shards)
