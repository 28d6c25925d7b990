"""Context parallel attention: one operator that takes the group's name, so that it traces and compiles as one step.

Forward merges the parts that a transport yields into a running (out, lse). Backward runs the same parts with the merged
out and lse, which is the exact gradient of the whole (see `merge`).
"""

from __future__ import annotations

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
from dilated_attention.parallel import traffic, transports
from dilated_attention.parallel.comm import Link, link_of
from dilated_attention.parallel.partition import Sharding, balanced_bounds
from dilated_attention.parallel.sharding import Mesh, context_group
from dilated_attention.patterns import OffsetTable
from dilated_attention.plan import Plan

Tokens = Float[Tensor, "batch shard heads dim"]
KeyTokens = Float[Tensor, "batch shard kv_heads dim"]
TokenStatistic = Float[Tensor, "batch shard heads"]

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
    "bool is_causal, float scale, str compat, str backend, str transport, str group_name, str layer"
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
class _Call:
    """The operator's options, as its schema lists them.

    Attributes:
        offsets: the table, row after row.
        bounds: the shard edges, or the sequence length alone for balanced shards.
        samples: the edges of packed samples; empty for one sample.
        compat: "" for none.
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

    @property
    def group(self) -> ProcessGroup:
        resolve: Callable[[Any], ProcessGroup] = dist.distributed_c10d._resolve_process_group
        return resolve(self.group_name)

    def sharding(self, k: Tensor) -> Sharding:
        heads, branches = k.shape[2], range(len(self.segment_lengths))
        table = tuple([tuple([int(o) for o in self.offsets[b * heads : (b + 1) * heads]]) for b in branches])
        bounds = tuple([int(x) for x in self.bounds])
        return Sharding(
            tuple([int(w) for w in self.segment_lengths]),
            tuple([int(r) for r in self.dilation_rates]),
            table,
            balanced_bounds(bounds[0], dist.get_world_size(self.group)) if len(bounds) == 1 else bounds,
            self.is_causal,
            tuple([int(x) for x in self.samples]) or None,
            self.compat or None,
        )

    def chosen(self, q: Tensor, k: Tensor) -> str:
        """The transport, `auto` resolved; the same on every rank."""
        return traffic.choose(self.transport, self.sharding(k), _shape(q, k)).transport

    def open(self, q: Tensor, k: Tensor, sharding: Sharding, transport: str) -> Link:
        """The link, once every rank has been found to make the same call."""
        link = link_of(self.group)
        link.place = self.layer
        start, stop = sharding.shard(link.rank)
        problem = None
        if q.shape[1] != stop - start:
            problem = (
                f"q has {q.shape[1]} tokens; rank {link.rank}'s shard of seq_len={sharding.seq_len} over {link.size} "
                f"ranks is [{start}, {stop}), {stop - start} tokens: see sequence_range"
            )
        values = {
            "seq_len": sharding.seq_len,
            "shard bounds": "balanced" if len(self.bounds) == 1 else list(sharding.bounds),
            "segment_lengths": list(sharding.segment_lengths),
            "dilation_rates": list(sharding.dilation_rates),
            "offsets": sharding.offsets,
            "cu_seqlens": sharding.samples,
            "is_causal": sharding.is_causal,
            "compat": sharding.compat,
            "batch": q.shape[0],
            "heads": q.shape[2],
            "kv_heads": sharding.num_heads,
            "head_dim": q.shape[3],
            "dtype": q.dtype,
            "scale": self.scale,
            "transport": transport,
        }
        link.agree("\n".join([f"{name}={value}" for name, value in values.items()]), problem, q.device)
        return link


def _shape(q: Tensor, k: Tensor) -> traffic.Shape:
    return traffic.Shape(int(k.shape[0]), q.shape[2], k.shape[3], k.dtype)


def _drive(parts: Generator[transports.Part, Any, Result], compute: Callable[[Tensor, Tensor, Plan], Any]) -> Result:
    """Run a schedule: compute each part that it yields, and send it the answer."""
    answer = None
    while True:
        try:
            keys, values, plan = parts.send(answer)
        except StopIteration as done:
            return done.value
        answer = compute(keys, values, plan)


@torch.library.impl("dilated_attention::context_parallel_forward", "CompositeExplicitAutograd")
def _forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, lse, and what the backward needs of other ranks' rows."""
    call = _Call(*options)
    sharding, transport = call.sharding(k), call.chosen(q, k)
    link = call.open(q, k, sharding, transport)
    run = _BACKENDS[call.backend].forward
    if transport == "ulysses":
        heads = transports.Ulysses(link, sharding, q.shape[2])
        q, k, v = heads.scatter_heads([q, k, v], "in forward's exchange of heads")
        whole_out, whole_lse = run(q, k, v, heads.plan, is_causal=call.is_causal, scale=call.scale)
        out, lse = heads.gather_heads([whole_out, whole_lse], "in forward's return of heads")
        saved = torch.cat([x.flatten() for x in (q, k, v, whole_out)])
        return out.contiguous(), lse.contiguous(), saved, whole_lse
    state: tuple[Tensor, Tensor] | None = None

    def compute(keys: Tensor, values: Tensor, plan: Plan) -> None:
        nonlocal state
        state = run(q, keys, values, plan, is_causal=call.is_causal, scale=call.scale, state=state)

    schedule = _TRANSPORTS[transport](link, sharding, _shape(q, k).row_bytes, k.device)
    saved = _drive(schedule.forward(k, v), compute)
    assert state is not None
    return *state, saved, q.new_empty(0)


@torch.library.register_fake("dilated_attention::context_parallel_forward")
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = _Call(*options)
    sharding, transport, shape = call.sharding(k), call.chosen(q, k), _shape(q, k)
    wide = transports.statistic(q.dtype)
    out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=wide)
    if transport == "ulysses":
        size = dist.get_world_size(call.group)
        tokens, heads, kv_heads = q.shape[0] * sharding.seq_len, q.shape[2] // size, k.shape[2] // size
        whole_lse = q.new_empty(q.shape[0], sharding.seq_len, heads, dtype=wide)
        return out, lse, q.new_empty(2 * tokens * (heads + kv_heads) * q.shape[3]), whole_lse
    if transport == "ring":
        return out, lse, k.new_empty(0), q.new_empty(0)
    rows = traffic.count(transport, sharding, dist.get_rank(call.group), shape).saved_bytes // shape.row_bytes
    return out, lse, k.new_empty(rows, 2, k.shape[0], k.shape[3]), q.new_empty(0)


@torch.library.impl("dilated_attention::context_parallel_backward", "CompositeExplicitAutograd")
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
    sharding, transport = call.sharding(k), call.chosen(q, k)
    link = call.open(q, k, sharding, transport)
    run = _BACKENDS[call.backend].backward
    if transport == "ulysses":
        heads = transports.Ulysses(link, sharding, q.shape[2])
        dlse = torch.zeros_like(lse) if dlse is None else dlse
        dout, dlse = heads.scatter_heads([dout, dlse], "in backward's exchange of heads")
        shapes = [(*dout.shape[:2], number, q.shape[3]) for number in heads.widths]
        parts = saved.split([torch.Size(shape).numel() for shape in shapes])
        q, k, v, out = (part.view(shape) for part, shape in zip(parts, shapes, strict=True))
        gradients = run(dout, dlse, q, k, v, out, saved_lse, heads.plan, is_causal=call.is_causal, scale=call.scale)
        dq, dk, dv = heads.gather_heads(gradients, "in backward's return of heads")
        return dq.contiguous(), dk.contiguous(), dv.contiguous()
    wide = transports.statistic(q.dtype)
    total = torch.zeros(q.shape, dtype=wide, device=q.device)

    def compute(keys: Tensor, values: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        sums = total, *(torch.zeros(x.shape, dtype=wide, device=x.device) for x in (keys, values))
        run(dout, dlse, q, keys, values, out, lse, plan, is_causal=call.is_causal, scale=call.scale, state=sums)
        return sums[1], sums[2]

    schedule = _TRANSPORTS[transport](link, sharding, _shape(q, k).row_bytes, k.device)
    dk, dv = _drive(schedule.backward(k, v, saved), compute)
    return total.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@torch.library.register_fake("dilated_attention::context_parallel_backward")
def _(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, *options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(*output[2:])
    ctx.options = options
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, *unused: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, k, v, out, *saved = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    gradients = torch.ops.dilated_attention.context_parallel_backward(dout, dlse, q, k, v, out, *saved, *ctx.options)
    return (*gradients, *(None,) * len(ctx.options))


torch.library.register_autograd(
    "dilated_attention::context_parallel_forward", _differentiate, setup_context=_setup_context
)


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
        ragged = lengths, cu_seqlens, key_padding_mask
        return autograd.attend(
            q, k, v, *pattern, is_causal, float(scale), compat or "", backend, 0.0, 0, [], [], *ragged, None
        )
    if key_padding_mask is not None:
        raise UnsupportedError("key_padding_mask with a mesh is not supported; give lengths or cu_seqlens")
    if seq_len is None:
        seq_len = q.shape[1] * size if bounds is None else bounds[-1]
    if bounds is not None and (len(bounds) != size + 1 or bounds[-1] != seq_len):
        raise ValueError(f"bounds must be {size + 1} edges from 0 to seq_len={seq_len}; got {list(bounds)}")
    edges = [seq_len] if bounds is None else list(bounds)
    rest = is_causal, float(scale), compat or "", backend, transport, group.group_name, layer
    if lengths is not None:
        return _padded(q, k, v, lengths, balanced_bounds(seq_len, size) if bounds is None else bounds, pattern, rest)
    samples = [] if cu_seqlens is None else cu_seqlens.tolist()
    if samples and (samples[0] != 0 or samples[-1] != seq_len or any(x > y for x, y in pairwise(samples))):
        raise ValueError(f"cu_seqlens must ascend from 0 to the global length, seq_len={seq_len}; got {samples}")
    operator = torch.ops.dilated_attention.context_parallel_forward
    return operator(q, k, v, *pattern, edges, samples, *rest)[:2]


def _padded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    bounds: Sequence[int],
    pattern: tuple[list[int], list[int], list[int]],
    rest: tuple[Any, ...],
) -> tuple[Tensor, Tensor]:
    """A padded batch: one call a sample, sharded by the batch's edges cut at the sample's length."""
    group: ProcessGroup = _Call(*pattern, bounds, [], *rest).group
    start = bounds[dist.get_rank(group)]
    outs, lses = [], []
    for i, length in enumerate(lengths.tolist()):
        edges = [min(edge, length) for edge in bounds]
        own = max(0, min(q.shape[1], length - start))
        sample = [x[i : i + 1, :own] for x in (q, k, v)]
        out, lse, _, _ = torch.ops.dilated_attention.context_parallel_forward(*sample, *pattern, edges, [], *rest)
        missing = q.shape[1] - own
        outs.append(torch.nn.functional.pad(out, (0, 0, 0, 0, 0, missing)))
        lses.append(torch.nn.functional.pad(lse, (0, 0, 0, missing), value=-torch.inf))
    return torch.cat(outs), torch.cat(lses)
