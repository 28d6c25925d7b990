"""Context parallel attention: one operator that takes the group's name, so that it traces and compiles as one step.

Forward merges the parts that a transport yields into a running (out, lse). Backward runs the same parts with the merged
out and lse, which is the exact gradient of the whole (see `merge`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup

from dilated_attention import autograd
from dilated_attention.backends import native, triton
from dilated_attention.errors import UnsupportedError
from dilated_attention.layout import BlockLayout
from dilated_attention.merge import merge_into
from dilated_attention.parallel import traffic, transports
from dilated_attention.parallel.comm import Link, link_of
from dilated_attention.parallel.partition import Sharding, balanced_bounds
from dilated_attention.parallel.sharding import Mesh, context_group
from dilated_attention.patterns import OffsetTable
from dilated_attention.plan import plan_cache

Tokens = Float[Tensor, "batch shard heads dim"]
KeyTokens = Float[Tensor, "batch shard kv_heads dim"]
TokenStatistic = Float[Tensor, "batch shard heads"]
State = tuple[Tensor, Tensor]
Sums = tuple[Tensor, Tensor, Tensor]

_TRANSPORTS: dict[str, Callable[[Link, Sharding, int, torch.device], transports.Transport]] = {
    "exchange": transports.Exchange,
    "doubling": transports.Doubling,
    "ring": transports.Ring,
    "all_gather": transports.AllGather,
}
_BACKENDS: dict[str, Any] = {"native": native, "triton": triton}

Result = TypeVar("Result")

_OPTIONS = (
    "SymInt[] segment_lengths, SymInt[] dilation_rates, SymInt[] offsets, SymInt[] bounds, SymInt[] samples, "
    "bool is_causal, float scale, str compat, str backend, str transport, str group_name, str layer, "
    "int[] layout_sizes, Tensor[] layouts"
)
torch.library.define(
    "dilated_attention::context_parallel_forward",
    f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "dilated_attention::context_parallel_backward",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor saved, Tensor saved_lse, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)


@dataclass(frozen=True)
class _Description:
    """What must be equal on every rank for messages to fit, one `name=value` a line; and the plan in a few words."""

    text: str
    plan: str
    nbytes: int


@dataclass(frozen=True)
class _Call:
    """The operator's options, as its schema lists them.

    Attributes:
        offsets: the table, row after row.
        bounds: the shard edges, or the sequence length alone for balanced shards.
        samples: the edges of packed samples; empty for one sample.
        scale: as asked for, which all ranks compare; q has been multiplied by the first part of `split_scale`.
        compat: "" for none.
        layout_sizes, layouts: as in `autograd.attend`.
    """

    segment_lengths: Sequence[int]
    dilation_rates: Sequence[int]
    offsets: Sequence[int]
    bounds: Sequence[int]
    samples: Sequence[int]
    is_causal: bool
    scale: float
    compat: str
    backend: str
    transport: str
    group_name: str
    layer: str
    layout_sizes: Sequence[int]
    layouts: Sequence[Tensor]

    @property
    def group(self) -> ProcessGroup:
        resolve: Callable[[Any], ProcessGroup] = dist.distributed_c10d._resolve_process_group
        return resolve(self.group_name)

    @property
    def rest_of_scale(self) -> float:
        return autograd.split_scale(self.scale)[1]

    def sharding(self, k: Tensor) -> Sharding:
        heads, branches = k.shape[2], range(len(self.segment_lengths))
        table = tuple([tuple([int(o) for o in self.offsets[b * heads : (b + 1) * heads]]) for b in branches])
        bounds = tuple([int(x) for x in self.bounds])
        layouts = autograd.unpack_layouts(self.layout_sizes, self.layouts, self.is_causal)
        return Sharding(
            tuple([int(w) for w in self.segment_lengths]),
            tuple([int(r) for r in self.dilation_rates]),
            table,
            balanced_bounds(bounds[0], dist.get_world_size(self.group)) if len(bounds) == 1 else bounds,
            self.is_causal,
            tuple([int(x) for x in self.samples]) or None,
            self.compat or None,
            tuple(layouts.values()),
        )

    def open(self, q: Tensor, k: Tensor, sharding: Sharding, transport: str) -> Link:
        """The link, once every rank has been found to make the same call."""
        link = link_of(self.group)
        start, stop = sharding.shard(link.rank)
        problem = None
        if q.shape[1] != stop - start:
            problem = (
                f"q has {q.shape[1]} tokens; rank {link.rank}'s shard of seq_len={sharding.seq_len} over {link.size} "
                f"ranks is [{start}, {stop}), {stop - start} tokens: see sequence_range"
            )
        shapes = q.shape[0], q.shape[2], q.shape[3], q.dtype
        key = ("description", sharding, len(self.bounds), *shapes, self.scale, transport)
        description = plan_cache.get(key, lambda: self._describe(sharding, *shapes, transport))
        link.place = f"{self.layer}, {description.plan}" if self.layer else description.plan
        link.agree(description.text, problem, q.device)
        return link

    def _describe(
        self, sharding: Sharding, batch: int, heads: int, head_dim: int, dtype: torch.dtype, transport: str
    ) -> _Description:
        values = {
            "seq_len": sharding.seq_len,
            "shard bounds": "balanced" if len(self.bounds) == 1 else list(sharding.bounds),
            "segment_lengths": list(sharding.segment_lengths),
            "dilation_rates": list(sharding.dilation_rates),
            "offsets": sharding.offsets,
            "cu_seqlens": sharding.samples,
            "is_causal": sharding.is_causal,
            "compat": sharding.compat,
            "layouts": [(layout.seq_len, layout.block_size, _digest(layout)) for layout in sharding.layouts],
            "batch": batch,
            "heads": heads,
            "kv_heads": sharding.num_heads,
            "head_dim": head_dim,
            "dtype": dtype,
            "scale": self.scale,
            "transport": transport,
        }
        text = "\n".join([f"{name}={value}" for name, value in values.items()])
        branches = ", ".join(
            [f"{w}/{r}" for w, r in zip(sharding.segment_lengths, sharding.dilation_rates, strict=True)]
        )
        plan = f"{transport} of {sharding.seq_len} tokens, branches {branches}"
        return _Description(text, plan, len(text) + len(plan) + sharding.nbytes)


def _digest(layout: BlockLayout) -> str:
    """Of its lists: the same in every process, unlike a hash."""
    tables = layout.to("cpu")
    digest = hashlib.sha256(f"{tuple(tables.indptr.shape)} {layout.is_causal}".encode())
    digest.update(tables.indptr.numpy().tobytes())
    digest.update(tables.indices.numpy().tobytes())
    return digest.hexdigest()[:16]


def _shape(q: Tensor, k: Tensor) -> traffic.Shape:
    return traffic.Shape(int(k.shape[0]), q.shape[2], k.shape[3], k.dtype)


def _drive(parts: Generator[transports.Part, Any, Result], compute: Callable[[transports.Part], Any]) -> Result:
    """Run a schedule: compute each part that it yields, and send it the answer."""
    answer = None
    while True:
        try:
            part = parts.send(answer)
        except StopIteration as done:
            return done.value
        answer = compute(part)


class _Compute:
    """Parts of one call on a backend, added to what is there."""

    def __init__(self, call: _Call, sharding: Sharding, q: Tensor, k: Tensor) -> None:
        self.backend = _BACKENDS[call.backend]
        self.q, self.ratio = q, q.shape[2] // k.shape[2]
        self.options = {"is_causal": call.is_causal, "scale": call.rest_of_scale}
        self.whole = {layout.seq_len: layout for layout in sharding.layouts} or None

    def forward(self, part: transports.Part, state: State | None) -> State:
        """The running (out, lse) with a part merged into it."""
        arguments = part.keys, part.values, part.plan
        if part.queries is None:
            run: Callable[..., State] = self.backend.forward
            return run(self.q, *arguments, **self.options, layouts=self.whole, state=state)
        assert state is not None
        (q,), rows = self._rows(part.queries, self.q), part.queries.positions
        found = self.backend.forward(q, *arguments, **self._block_options(part.queries))
        index = self._index(part.queries)
        merged = [x[index] for x in state]
        merge_into(*merged, *(x[:, rows] for x in found))
        for x, value in zip(state, merged, strict=True):
            x[index] = value
        return state

    def backward(
        self, part: transports.Part, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, dq: Tensor
    ) -> transports.Gradients:
        """A part's (dk, dv), in the type in which gradients add up; its dq is added to `dq`."""
        keys = part.keys, part.values, part.plan
        sums = [torch.zeros(x.shape, dtype=dq.dtype, device=dq.device) for x in (part.keys, part.values)]
        if part.queries is None:
            tensors = dout, dlse, self.q, part.keys, part.values, out, lse, part.plan
            self.backend.backward(*tensors, **self.options, layouts=self.whole, state=(dq, *sums))
            return sums[0], sums[1]
        dout, q, out = self._rows(part.queries, dout, self.q, out)
        (lse,) = self._rows(part.queries, lse, fill=-torch.inf)
        dlse = None if dlse is None else self._rows(part.queries, dlse)[0]
        part_dq = torch.zeros(q.shape, dtype=dq.dtype, device=dq.device)
        options = self._block_options(part.queries)
        self.backend.backward(dout, dlse, q, *keys[:2], out, lse, part.plan, **options, state=(part_dq, *sums))
        dq[self._index(part.queries)] += part_dq[:, part.queries.positions]
        return sums[0], sums[1]

    def _index(self, queries: transports.BlockQueries) -> tuple[Any, ...]:
        """Of the part's rows and heads in the shard's tensors."""
        heads = [head * self.ratio + i for head in queries.heads for i in range(self.ratio)]
        return slice(None), queries.tokens[:, None], torch.tensor(heads, device=self.q.device)

    def _rows(self, queries: transports.BlockQueries, *tensors: Tensor, fill: float = 0.0) -> list[Tensor]:
        """The shard's rows where the part has them."""
        index, made = self._index(queries), []
        for x in tensors:
            rows = x.new_full((x.shape[0], queries.layout.seq_len, len(index[2]), *x.shape[3:]), fill)
            rows[:, queries.positions] = x[index]
            made.append(rows)
        return made

    def _block_options(self, queries: transports.BlockQueries) -> dict[str, Any]:
        bias = None
        if queries.hidden is not None:
            bias = torch.zeros(queries.hidden.shape, dtype=self.q.dtype, device=self.q.device)
            bias = bias.masked_fill_(queries.hidden, -torch.inf).expand(self.q.shape[0], -1)
        return {**self.options, "layouts": {queries.layout.seq_len: queries.layout}, "key_bias": bias}


def _forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, lse, and what the backward needs of other ranks' rows: two flat tensors."""
    call = _Call(*options)
    sharding = call.sharding(k)
    transport = traffic.choose(call.transport, sharding, _shape(q, k)).transport
    link = call.open(q, k, sharding, transport)
    if transport == "ulysses":
        heads = transports.Ulysses(link, sharding, q.shape[2])
        q, k, v = heads.scatter_heads([q, k, v], "in forward's exchange of heads")
        whole_out, whole_lse = _BACKENDS[call.backend].forward(
            q, k, v, heads.plan, is_causal=call.is_causal, scale=call.rest_of_scale, layouts=heads.layouts or None
        )
        out, lse = heads.gather_heads([whole_out, whole_lse], "in forward's return of heads")
        saved = torch.cat([x.flatten() for x in (q, k, v, whole_out)])
        return out.contiguous(), lse.contiguous(), saved, whole_lse.flatten()
    compute = _Compute(call, sharding, q, k)
    state: State | None = None

    def add(part: transports.Part) -> None:
        nonlocal state
        state = compute.forward(part, state)

    schedule = _TRANSPORTS[transport](link, sharding, _shape(q, k).row_bytes, k.device)
    saved = _drive(schedule.forward(k, v), add)
    assert state is not None
    return *state, saved.flatten(), state[1].new_empty(0)


torch.library.impl("dilated_attention::context_parallel_forward", "CompositeExplicitAutograd")(_forward)


@torch.library.register_fake("dilated_attention::context_parallel_forward")
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = _Call(*options)
    wide = transports.statistic(q.dtype)
    out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=wide)
    if call.layouts:  # what is saved depends on the lists
        sizes = [torch.library.get_ctx().new_dynamic_size() for _ in range(2)]
        return out, lse, k.new_empty(sizes[0]), lse.new_empty(sizes[1])
    sharding, shape = call.sharding(k), _shape(q, k)
    transport = traffic.choose(call.transport, sharding, shape).transport
    if transport == "ulysses":
        size = dist.get_world_size(call.group)
        tokens, heads, kv_heads = q.shape[0] * sharding.seq_len, q.shape[2] // size, k.shape[2] // size
        return out, lse, q.new_empty(2 * tokens * (heads + kv_heads) * q.shape[3]), lse.new_empty(tokens * heads)
    saved = traffic.count(transport, sharding, dist.get_rank(call.group), shape).saved_bytes
    return out, lse, k.new_empty(saved // k.dtype.itemsize), lse.new_empty(0)


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    saved: Tensor,
    saved_lse: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    call = _Call(*options)
    sharding = call.sharding(k)
    transport = traffic.choose(call.transport, sharding, _shape(q, k)).transport
    link = call.open(q, k, sharding, transport)
    if transport == "ulysses":
        heads = transports.Ulysses(link, sharding, q.shape[2])
        dlse = torch.zeros_like(lse) if dlse is None else dlse
        dout, dlse = heads.scatter_heads([dout, dlse], "in backward's exchange of heads")
        shapes = [(*dout.shape[:2], number, q.shape[3]) for number in heads.widths]
        parts = saved.split([torch.Size(shape).numel() for shape in shapes])
        q, k, v, out = (part.view(shape) for part, shape in zip(parts, shapes, strict=True))
        lse = saved_lse.view(out.shape[:3])
        gradients = _BACKENDS[call.backend].backward(
            dout, dlse, q, k, v, out, lse, heads.plan,
            is_causal=call.is_causal, scale=call.rest_of_scale, layouts=heads.layouts or None,
        )  # fmt: skip
        dq, dk, dv = heads.gather_heads(gradients, "in backward's return of heads")
        return dq.contiguous(), dk.contiguous(), dv.contiguous()
    compute = _Compute(call, sharding, q, k)
    dq = torch.zeros(q.shape, dtype=transports.statistic(q.dtype), device=q.device)
    schedule = _TRANSPORTS[transport](link, sharding, _shape(q, k).row_bytes, k.device)
    rows = saved.view(-1, 2, k.shape[0], k.shape[3]) if len(saved) else saved.view(0, 2, k.shape[0], k.shape[3])
    parts = schedule.backward(k, v, rows)
    dk, dv = _drive(parts, lambda part: compute.backward(part, dout, dlse, out, lse, dq))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


torch.library.impl("dilated_attention::context_parallel_backward", "CompositeExplicitAutograd")(_backward)


@torch.library.register_fake("dilated_attention::context_parallel_backward")
def _(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class _Attention(torch.autograd.Function):
    """`dilated_attention::context_parallel_forward` with its gradient."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.dilated_attention.context_parallel_forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, v, *options, layouts = inputs
        ctx.save_for_backward(q, k, v, *output, *layouts)
        ctx.mark_non_differentiable(*output[2:])
        ctx.options = options
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, saved, saved_lse, *layouts = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        tensors = dout, dlse, q, k, v, out, lse, saved, saved_lse
        operator = torch.ops.dilated_attention.context_parallel_backward
        backward = _AttentionBackward.apply if autograd.in_torch_func() else operator
        gradients = backward(*tensors, *ctx.options, layouts)
        return (*gradients, *(None,) * (len(ctx.options) + 1))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        raise UnsupportedError("forward-mode derivatives of context parallel attention are not supported")


class _AttentionBackward(torch.autograd.Function):
    """`dilated_attention::context_parallel_backward`, which has no gradient."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.dilated_attention.context_parallel_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise UnsupportedError("second derivatives of context parallel attention are not supported")


torch.library.impl("dilated_attention::context_parallel_forward", "Autograd")(_Attention.apply)
torch.library.impl("dilated_attention::context_parallel_backward", "Autograd")(_AttentionBackward.apply)


def refuse(mesh: Mesh, error: ValueError, device: torch.device) -> None:
    """Raise on every rank what makes this rank's call impossible, as far as the others wait for it."""
    link_of(context_group(mesh)).refuse(str(error), device)


def context_parallel_attention(
    q: Tokens,
    k: KeyTokens,
    v: KeyTokens,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    offsets: OffsetTable,
    *,
    mesh: Mesh,
    seq_len: int | None = None,
    bounds: Sequence[int] | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    compat: str | None = None,
    layouts: Sequence[BlockLayout] = (),
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    backend: str = "native",
    transport: str = "auto",
    layer: str = "",
) -> tuple[Tokens, TokenStatistic]:
    """Dilated attention of a sequence that is sharded contiguously over `mesh`; the same result as on one device.

    Args:
        q, k, v: this rank's shard.
        offsets: branch x key-value head, -1 for none: `Dilated.offset_table`.
        seq_len: the global length; default: equal shards. The shard of rank j is [bounds[j], bounds[j + 1]).
        bounds: shard edges; default floor(j * seq_len / size), as `sequence_range` gives.
        layouts: block layouts inside segments, one for each number of rows that a segment has; where there is one and
            samples are ragged, each has the layout of its first tokens. The same on every rank.
        lengths, cu_seqlens: global, the same on every rank; as in `dilated_attention`.
        transport: `"exchange"`, `"doubling"`, `"ring"`, `"all_gather"`, `"ulysses"`, or `"auto"`: the least modelled
            time among those that serve the call.
        layer: named in errors.

    Returns:
        out, as q; lse, `(batch, shard, heads)`.

    Raises:
        ValueError: on every rank, before any row moves, where ranks differ or one's tensors do not fit.
        ContextParallelError: where an exchange fails; the group is refused from then on.
    """
    group = context_group(mesh)
    size = dist.get_world_size(group)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    flat = [offset for row in offsets for offset in row]
    pattern = list(segment_lengths), list(dilation_rates), flat
    if size == 1 and bounds is None and seq_len in (None, q.shape[1]):
        packed = autograd.pack_layouts(layouts)
        ragged = lengths, cu_seqlens, key_padding_mask
        return autograd.attend(
            q, k, v, *pattern, is_causal, float(scale), compat or "", backend, 0.0, 0, *packed, *ragged, None
        )
    factor, _ = autograd.split_scale(float(scale))
    if factor != 1:
        q = q * factor
    if key_padding_mask is not None:
        raise UnsupportedError("key_padding_mask with a mesh is not supported; give lengths or cu_seqlens")
    if seq_len is None:
        seq_len = q.shape[1] * size if bounds is None else bounds[-1]
    if bounds is not None and (len(bounds) != size + 1 or bounds[-1] != seq_len):
        raise ValueError(f"bounds must be {size + 1} edges from 0 to seq_len={seq_len}; got {list(bounds)}")
    rest = is_causal, float(scale), compat or "", backend, transport, group.group_name, layer
    if lengths is not None:
        edges = balanced_bounds(seq_len, size) if bounds is None else bounds
        start = edges[dist.get_rank(group)]
        return _padded(q, k, v, lengths, start, edges, layouts, pattern, rest)
    samples = [] if cu_seqlens is None else cu_seqlens.tolist()
    if samples and (samples[0] != 0 or samples[-1] != seq_len or any(x > y for x, y in pairwise(samples))):
        raise ValueError(f"cu_seqlens must ascend from 0 to the global length, seq_len={seq_len}; got {samples}")
    if samples and len(layouts) == 1:
        layouts = [layouts[0].prefix(length) for length in sorted({y - x for x, y in pairwise(samples)} - {0})]
    return _attend(q, k, v, *pattern, [seq_len] if bounds is None else list(bounds), samples, *rest, layouts=layouts)


def _attend(*arguments: Any, layouts: Sequence[BlockLayout]) -> tuple[Tensor, Tensor]:
    operator = torch.ops.dilated_attention.context_parallel_forward
    out, lse, _, _ = (_Attention.apply if autograd.in_torch_func() else operator)(
        *arguments, *autograd.pack_layouts(layouts)
    )
    return out, lse


def _padded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    start: int,
    bounds: Sequence[int],
    layouts: Sequence[BlockLayout],
    pattern: tuple[list[int], list[int], list[int]],
    rest: tuple[Any, ...],
) -> tuple[Tensor, Tensor]:
    """A padded batch: one call a sample, sharded by the batch's edges cut at the sample's length."""
    outs, lses = [], []
    for i, length in enumerate(lengths.tolist()):
        edges = [min(edge, length) for edge in bounds]
        own = max(0, min(q.shape[1], length - start))
        lists = layouts
        if len(layouts) == 1 and length:
            whole = layouts[0]
            lists = [(whole.select(batch=range(i, i + 1)) if whole.batch_size > 1 else whole).prefix(length)]
        sample = [x[i : i + 1, :own] for x in (q, k, v)]
        out, lse = _attend(*sample, *pattern, edges, [], *rest, layouts=lists)
        missing = q.shape[1] - own
        outs.append(torch.nn.functional.pad(out, (0, 0, 0, 0, 0, missing)))
        lses.append(torch.nn.functional.pad(lse, (0, 0, 0, missing), value=-torch.inf))
    return torch.cat(outs), torch.cat(lses)
