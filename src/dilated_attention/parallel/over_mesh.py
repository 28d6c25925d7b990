"""Run a call over a mesh: each rank computes its own rows.

Forward merges the parts that a transport brings into a running (out, lse). Backward runs the same parts with the merged
out and lse, which gives the exact gradient of the whole (see `merge`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from dilated_attention import bias as biases
from dilated_attention.backends.attributes import Attributes
from dilated_attention.backends.problem import Problem
from dilated_attention.cache import plan_cache
from dilated_attention.call import Call, Shards
from dilated_attention.layout import BlockLayout
from dilated_attention.merge import running
from dilated_attention.mesh import context_group
from dilated_attention.parallel import parts, traffic, transports
from dilated_attention.parallel.comm import Link, link_of
from dilated_attention.parallel.partition import Sharding, balanced_bounds, rank_groups
from dilated_attention.parallel.ulysses import Ulysses
from dilated_attention.plan import EVERY, WHOLE, Branches, StridedGroup, row_counts
from dilated_attention.torch_internals import group_named

Transport = transports.Exchange | transports.Doubling | transports.Ring

_TRANSPORTS: dict[str, type[Transport]] = {
    "exchange": transports.Exchange,
    "doubling": transports.Doubling,
    "ring": transports.Ring,
    "all_gather": transports.AllGather,
}


def _mesh(call: Call) -> tuple[Shards, ProcessGroup, tuple[int, ...]]:
    """Return how a call is sharded, its process group, and the edges of the shards."""
    shards = call.shards
    assert shards is not None
    group = group_named(shards.group_name)
    edges = shards.bounds
    if len(edges) == 1:  # the sequence length alone
        edges = balanced_bounds(edges[0], dist.get_world_size(group))
    return shards, group, edges


@dataclass(frozen=True)
class _Plan:
    """Hold a call's shards and the way in which rows travel, the same on every rank.

    Attributes:
        text: what must be equal on every rank for messages to fit, one `name=value` per line.
        words: the plan in a few words, for error messages.
    """

    sharding: Sharding
    shape: traffic.Shape
    transport: str
    text: str
    words: str

    @property
    def nbytes(self) -> int:
        return len(self.text) + len(self.words) + self.sharding.nbytes

    @classmethod
    def of(cls, call: Call, q: Tensor, k: Tensor) -> _Plan:
        """Return the plan of a call, made once and then taken from the plan cache."""
        shards, _, edges = _mesh(call)
        by_query = biases.FORMS[int(call.scores.bias)] in biases.BY_QUERY
        shape = traffic.Shape(int(k.shape[0]), q.shape[2], k.shape[3], k.dtype, by_query)
        named = replace(shards, group_name="", layer="")  # every layer and group with these edges has the same plan
        tensors = call.key_padding_mask is not None, _described(call)
        key = (call.branches, call.layouts, call.is_causal, call.scores, call.first_head, shape, edges, named, tensors)
        return plan_cache.get(("over mesh", key), lambda: cls._make(call, shape))

    @classmethod
    def _make(cls, call: Call, shape: traffic.Shape) -> _Plan:
        shards, _, edges = _mesh(call)
        layouts = call.layouts
        if call.is_causal:
            layouts = tuple([layout.causal() for layout in layouts])
        sharding = Sharding(call.branches, edges, call.is_causal, shards.samples, layouts)
        transport = traffic.choose(shards.transport, sharding, shape).transport
        lengths, rates, offsets, compat, bands, leading = sharding.branches
        values = {
            "function": "attention",
            "seq_len": sharding.seq_len,
            "shard bounds": "balanced" if len(shards.bounds) == 1 else list(sharding.bounds),
            "segment_lengths": list(lengths),
            "dilation_rates": list(rates),
            "offsets": offsets,
            "windows": bands,
            "leading": leading,
            "cu_seqlens": sharding.samples,
            "lengths": shards.lengths,
            "is_causal": sharding.is_causal,
            "compat": compat,
            "layouts": [(layout.seq_len, layout.block_size, _digest(layout)) for layout in sharding.layouts],
            "batch": shape.batch,
            "heads": shape.num_heads,
            "kv_heads": sharding.num_heads,
            "first_head": call.first_head,
            "head_dim": shards.widths,
            "dtype": shape.dtype,
            **call.scores._asdict(),
            "key_padding_mask": "None" if call.key_padding_mask is None else "given",
            "sinks": "given" if shards.sinks else "None",
            "tensors of the bias": _described(call),
            "transport": transport,
            "gradients": "on" if shards.gradients else "off",
        }
        text = "\n".join([f"{name}={value}" for name, value in values.items()])
        words = f"{transport} of {sharding.seq_len} tokens, branches {_in_words(sharding.branches)}"
        return cls(sharding, shape, transport, text, words)

    def schedule(self, link: Link, device: torch.device) -> Transport:
        return _TRANSPORTS[self.transport](link, self.sharding, self.shape.row_bytes, device)


def _described(call: Call) -> tuple[Any, ...]:
    """Return the sizes of a bias's tensors that must be equal on every rank: all sizes of a replicated tensor; of
    coordinates the batch and the axes, and their dtype."""
    found: list[Any] = []
    if call.bias is not None and biases.FORMS[int(call.scores.bias)] not in biases.BY_QUERY:
        found += [int(size) for size in call.bias.shape]
    if call.coordinates is not None:
        batch, _, axes = call.coordinates.shape
        found += (int(batch), int(axes), call.coordinates.dtype)
    return tuple(found)


def _in_words(branches: Branches) -> str:
    """Return each branch as "segment length/rate", "all/rate" without segments, or a window as "low..high/rate"."""
    words = []
    for branch, (segment, rate) in enumerate(zip(branches.segment_lengths, branches.dilation_rates, strict=True)):
        reach = "all" if segment == WHOLE else str(segment)
        if branches.bands and branches.bands[branch] != EVERY:
            low, high = branches.bands[branch]
            reach = f"{low}..{high}"
        words.append(f"{reach}/{rate}")
    return ", ".join(words)


def _digest(layout: BlockLayout) -> str:
    """Return a digest of a layout's lists. Unlike a hash, it is the same in every process."""
    tables = layout.to("cpu")
    digest = hashlib.sha256(f"{tuple(tables.indptr.shape)} {layout.is_causal}".encode())
    for table in tables.tables:
        digest.update(table.numpy().tobytes())
    return digest.hexdigest()[:16]


def _agree(call: Call, q: Tensor, k: Tensor, wanted: bool | None = None) -> tuple[_Plan, Link, bool]:
    """Check that every rank makes the same call (`Link.agree`). Return its plan, its link, and whether some rank wants
    gradients.

    `wanted`: whether this rank wants gradients of a call that can have them; None where that does not matter.
    """
    shards, group, _ = _mesh(call)
    link = link_of(group)
    try:
        plan = _Plan.of(call, q, k)
    except ValueError as error:  # the transport does not serve this call
        link.refuse(str(error), q.device)
        raise
    start, stop = plan.sharding.shard(link.rank)
    problem = None
    if q.shape[1] != stop - start:
        problem = (
            f"q has {q.shape[1]} tokens; rank {link.rank}'s shard of seq_len={plan.sharding.seq_len} over {link.size} "
            f"ranks is [{start}, {stop}), {stop - start} tokens: see sequence_range"
        )
    link.place = plan.words
    if shards.layer:
        link.place = f"{shards.layer}, {plan.words}"
    return plan, link, link.agree(plan.text, problem, q.device, wanted)


def _gathered(call: Call, link: Link, bounds: tuple[int, ...]) -> Call:
    """Return the call with the key mask and the coordinates of the whole sequence, and with the seed of dropout that
    the ranks agree on."""
    whole = {}
    if call.key_padding_mask is not None:  # one byte per token travels
        rows = link.whole(call.key_padding_mask.T, bounds, "while gathering key_padding_mask")
        whole["key_padding_mask"] = rows.T
    if call.seed is not None:  # ranks may have drawn different seeds
        whole["seed"] = link.agreed_seed(call.seed.clone())
    if call.coordinates is not None:
        rows = link.whole(call.coordinates.transpose(0, 1), bounds, "while gathering coordinates of the bias")
        whole["coordinates"] = rows.transpose(0, 1)
    return call.but(**whole)


class _Compute:
    """Compute the parts of one call on a backend and add them to the running results.

    `call` comes from `_gathered`.
    `source` is what pairs read of the bias, as in `Problem`.
    `state` is the running (out, lse) of the parts that `forward` has computed; None before the first.
    """

    def __init__(
        self, call: Call, sharding: Sharding, rank: int, q: Tensor, k: Tensor, source: biases.Source | None
    ) -> None:
        self.call = call
        self.q = q
        self.source = source
        self.state: tuple[Tensor, Tensor] | None = None
        self.ratio = q.shape[2] // k.shape[2]
        self.start, stop = sharding.shard(rank)
        self.tokens = torch.arange(self.start, stop, device=q.device)
        self.layouts = {layout.seq_len: layout for layout in sharding.layouts}

    def _problem(self, part: parts.Part, heads: Tensor | None) -> Problem:
        """Return the backend's problem for a part whose keys these query heads read (`_heads`), with the mask, the
        dropout and the bias of its rows."""
        tokens = self.tokens[:, None] if part.tokens is None else part.tokens
        layouts = self.layouts
        hidden = self.call.key_padding_mask
        if hidden is not None:
            hidden = hidden[:, tokens]
        if part.queries is not None:
            layouts = {part.queries.layout.seq_len: part.queries.layout}
            if part.queries.hidden is not None:
                others = part.queries.hidden[None, :, None]
                hidden = others if hidden is None else hidden | others

        attributes = self.call.attributes_at(self.q, self.tokens, tokens, (self.start, 0), hidden)
        of_queries = {}
        for name, x in attributes.queries.items():
            of_queries[name] = x if x.shape[2] == 1 else _of_heads(x, heads)
        attributes = Attributes(of_queries, attributes.keys)
        _, scores = self.call.scores.split()
        return Problem(part.plan, scores, attributes, layouts if layouts else None, bias=self.source)

    def forward(self, part: parts.Part) -> None:
        """Compute a part and merge it into `state`."""
        run = self.call.backend.forward
        heads = self._heads(part)
        problem = self._problem(part, heads)
        if heads is None:
            self.state = run(problem, self.q, part.keys, part.values, self.state)
            return
        assert self.state is not None
        out, lse = self.state
        q, part_out, part_lse = (x.index_select(2, heads) for x in (self.q, out, lse))
        run(problem, q, part.keys, part.values, (part_out, part_lse))
        out.index_copy_(2, heads, part_out)
        lse.index_copy_(2, heads, part_lse)

    def backward(
        self, part: parts.Part, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, dq: Tensor
    ) -> parts.Gradients:
        """Return a part's (dk, dv), in the dtype in which gradients are summed; its dq is added to `dq`.

        out and lse are the merged ones, of all parts. dlse None: lse has no gradient.
        """
        keys = (part.keys, part.values)
        dk, dv = (torch.zeros(x.shape, dtype=dq.dtype, device=dq.device) for x in keys)
        heads = self._heads(part)
        dout, dlse, q, out, lse, part_dq = (_of_heads(x, heads) for x in (dout, dlse, self.q, out, lse, dq))
        problem = self._problem(part, heads)
        self.call.backend.backward(problem, dout, dlse, q, *keys, out, lse, (part_dq, dk, dv))
        if heads is not None:
            dq.index_copy_(2, heads, part_dq)
        return dk, dv

    def _heads(self, part: parts.Part) -> Tensor | None:
        """Return the query heads that read a part's keys; None: all."""
        if part.queries is None or len(part.queries.heads) * self.ratio == self.q.shape[2]:
            return None
        every = torch.arange(self.q.shape[2], device=self.q.device).unflatten(0, (-1, self.ratio))
        return every[list(part.queries.heads)].flatten()


def _of_heads(x: Tensor | None, heads: Tensor | None) -> Any:
    """Return these heads of x `(batch, rows, heads, ...)`; None: all."""
    if x is None or heads is None:
        return x
    return x.index_select(2, heads)


def gradients_wanted(call: Call, q: Tensor, k: Tensor, wanted: bool) -> bool:
    """Return whether some rank wants gradients of this call. Every rank then has to take part in the backward.

    `wanted`: whether this rank wants them.
    """
    if call.lengths is not None and len(q):  # the first sample knows the lengths of all
        own, call = next(samples(call, q.shape[1]))
        q = q[:1, :own]
        k = k[:1, :own]
    return _agree(call, q, k, wanted)[2]


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Return [out, lse, *saved] of the shard: out like q, lse `(batch, shard, heads)`, both contiguous.

    saved is what `backward` needs: three tensors, or three for each sample of a padded batch. The first is flat: the
    keys and values that the transport keeps, possibly empty; with Ulysses, q, k, v and out of all tokens for this
    rank's heads. The second is empty; with Ulysses, the flat lse of these heads. The third is the number of the
    forward, int64 on the CPU.
    """
    if call.lengths is not None and len(q):
        out, lse = running(q, covered=False)
        saved: list[Tensor] = []
        for i, (own, sample) in enumerate(samples(call, q.shape[1])):
            at = (slice(i, i + 1), slice(0, own))
            out[at], lse[at], *rest = forward(sample, q[at], k[at], v[at])
            saved += rest
        return [out, lse, *saved]

    plan, link, _ = _agree(call, q, k)
    number = torch.tensor(link.begin(_mesh(call)[0].layer), device="cpu")
    if not len(q):
        out, lse = running(q, covered=True)
        return [out, lse, k.new_empty(0), lse.new_empty(0), number]
    call = _gathered(call, link, plan.sharding.bounds)
    if plan.transport == "ulysses":
        return [*Ulysses(link, plan.sharding, call, q.shape[2]).forward(q, k, v), number]

    compute = _Compute(call, plan.sharding, link.rank, q, k, call.bias_source())
    rows = plan.schedule(link, k.device).forward(k, v, compute.forward)
    assert compute.state is not None
    out, lse = compute.state
    return [out, lse, rows.flatten(), lse.new_empty(0), number]


def backward(
    call: Call, source: biases.Source | None, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    results: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv) of the shard, from what `forward` returned; add what this shard's queries give to the sums of
    `source`, if it has any."""
    out, lse, *saved = results
    if call.lengths is not None and len(q):
        dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
        for i, (own, sample) in enumerate(samples(call, q.shape[1])):
            at = (slice(i, i + 1), slice(0, own))
            some = [out[at], lse[at], *saved[3 * i : 3 * i + 3]]
            some_dlse = None if dlse is None else dlse[at]
            own_source = None if source is None else source.sample(i)
            dq[at], dk[at], dv[at] = backward(sample, own_source, dout[at], some_dlse, q[at], k[at], v[at], some)
        return dq, dk, dv

    plan, link, _ = _agree(call, q, k)
    rows, saved_lse, number = saved
    link.begin(_mesh(call)[0].layer, int(number))
    if not len(q):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    call = _gathered(call, link, plan.sharding.bounds)
    if plan.transport == "ulysses":
        if dlse is None:
            dlse = torch.zeros_like(lse)
        return Ulysses(link, plan.sharding, call, q.shape[2]).backward(source, dout, dlse, rows, saved_lse)

    compute = _Compute(call, plan.sharding, link.rank, q, k, source)
    dq = torch.zeros(q.shape, dtype=parts.statistic(q.dtype), device=q.device)
    held = -1 if len(rows) else 0  # an empty tensor's view takes no -1
    rows = rows.view(held, 2, k.shape[0], k.shape[3])

    def attend(part: parts.Part) -> parts.Gradients:
        return compute.backward(part, dout, dlse, out, lse, dq)

    dk, dv = plan.schedule(link, k.device).backward(k, v, rows, attend)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def empty_saved(call: Call, q: Tensor, k: Tensor) -> list[Tensor]:
    """Return uninitialized tensors like those that `forward` saves for the backward, for tracing with fake tensors."""
    found: list[Tensor] = []
    forwards = 1
    if call.lengths is not None and len(q):
        forwards = len(q)
    for _ in range(forwards):
        found += (*_empty_rows(call, q, k), torch.empty((), dtype=torch.int64, device="cpu"))
    return found


def _empty_rows(call: Call, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    wide = parts.statistic(q.dtype)
    if call.layouts or call.lengths is not None:  # the saved tensors' shapes depend on the lists or the samples
        sizes = [torch.library.get_ctx().new_dynamic_size() for _ in range(2)]
        return k.new_empty(sizes[0]), k.new_empty(sizes[1], dtype=wide)
    plan = _Plan.of(call, q, k)
    rank = dist.get_rank(_mesh(call)[1])
    saved = traffic.count(plan.transport, plan.sharding, rank, plan.shape).saved_bytes
    lses = 0
    if plan.transport == "ulysses":
        lses = len(q) * plan.sharding.seq_len * q.shape[2] // plan.sharding.world_size
    rows = (saved - lses * wide.itemsize) // k.dtype.itemsize
    return k.new_empty(rows), k.new_empty(lses, dtype=wide)


def account(
    call: Call, q: Tensor, k: Tensor
) -> tuple[traffic.TransportChoice, traffic.ExchangePlan, tuple[StridedGroup, ...]]:
    """Return how rows travel, what this rank moves, and all strided groups that it computes.

    Block layouts reduce the traffic; the groups ignore them. For a padded batch this is the traffic of all samples
    together, their groups one after another, and the transport of the longest sample.
    """
    shards, group, edges = _mesh(call)
    rank = dist.get_rank(group)
    if call.lengths is not None and len(call.lengths):
        found = [account(sample, q[:1], k[:1]) for _, sample in samples(call, q.shape[1])]
        chosen = found[int(call.lengths.argmax())][0]
        if shards.transport == "auto":
            tokens = int(call.lengths.max())
            reason = f"each sample chooses for itself; the longest, of {tokens} tokens: {chosen.reason}"
            chosen = replace(chosen, reason=reason)

        together = traffic.total([moved for _, moved, _ in found])
        moved = replace(together, transport=chosen.transport, shard=(edges[rank], edges[rank + 1]))
        groups: list[StridedGroup] = []
        for _, _, of_sample in found:
            groups += of_sample
        return chosen, moved, tuple(groups)

    plan = _Plan.of(call, q, k)
    chosen = traffic.choose(shards.transport, plan.sharding, plan.shape)
    moved = traffic.count(chosen.transport, plan.sharding, rank, plan.shape)
    return chosen, moved, rank_groups(plan.sharding, rank)


def refuse(mesh: Any, error: ValueError, q: Any) -> None:
    """Refuse a call on this rank with the message of `error` (`Link.refuse`). `q` gives the device.

    Return without an error if `mesh` is no group of several ranks.
    """
    if not isinstance(mesh, (DeviceMesh, ProcessGroup)):
        return
    group = context_group(mesh)
    if dist.get_world_size(group) > 1:
        link_of(group).refuse(str(error), q.device if isinstance(q, Tensor) else torch.device("cpu"))


def samples(call: Call, tokens: int) -> Iterator[tuple[int, Call]]:
    """Split a padded batch into calls of one sample: yield (number of this shard's tokens in the sample, its Call).

    A sample is sharded like the batch, with every shard edge limited to the sample's length. `tokens`: the length of
    this rank's shard of the padded batch.
    """
    assert call.lengths is not None
    shards, group, edges = _mesh(call)
    lengths = tuple(call.lengths.tolist())
    start = edges[dist.get_rank(group)]
    for i, length in enumerate(lengths):
        own = max(0, min(tokens, length - start))
        layouts = call.layouts
        if len(layouts) == 1:
            whole = layouts[0]
            if whole.batch_size > 1:
                whole = whole.select(batch=range(i, i + 1))
            layouts = tuple([whole.prefix(count) for count in sorted(row_counts(call.branches, length))])

        bounds = tuple([min(edge, length) for edge in edges])
        cut = replace(shards, bounds=bounds, lengths=lengths)
        mask = _of_sample(call.key_padding_mask, i, own)
        coordinates = _of_sample(call.coordinates, i, own)
        bias = _of_sample(call.bias, i)
        yield own, replace(
            call, lengths=None, key_padding_mask=mask, bias=bias, coordinates=coordinates, layouts=layouts, shards=cut
        )  # fmt: skip


def _of_sample(x: Tensor | None, i: int, rows: int | None = None) -> Tensor | None:
    """Return the first `rows` rows of sample i in x `(batch or 1, rows, ...)`, as `(1, rows, ...)`. rows None: all."""
    if x is None:
        return None
    if len(x) > 1:
        x = x[i : i + 1]
    return x[:, :rows]
