"""Context parallel attention: one operator that takes the group's name, so that it traces and compiles as one step.

Forward merges the parts that a transport yields into a running (out, lse). Backward runs the same parts with the merged
out and lse, which is the exact gradient of the whole (see `merge`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from dilated_attention import autograd
from dilated_attention.backends import native
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

Reply = TypeVar("Reply")
Result = TypeVar("Result")


def _drive(parts: Generator[transports.Part, Any, Result], compute: Callable[[Tensor, Tensor, Plan], Any]) -> Result:
    """Run a schedule: compute each part that it yields, and send it the answer."""
    answer = None
    while True:
        try:
            keys, values, plan = parts.send(answer)
        except StopIteration as done:
            return done.value
        answer = compute(keys, values, plan)


def _sharding(
    kv_heads: int,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    offsets: Sequence[int],
    bounds: Sequence[int],
    samples: Sequence[int],
    is_causal: bool,
    compat: str,
    size: int,
) -> Sharding:
    table = tuple([tuple(offsets[b * kv_heads : (b + 1) * kv_heads]) for b in range(len(segment_lengths))])
    edges = balanced_bounds(bounds[0], size) if len(bounds) == 1 else tuple(bounds)
    return Sharding(
        tuple(segment_lengths), tuple(dilation_rates), table, edges, is_causal, tuple(samples) or None, compat or None
    )


def _description(q: Tensor, sharding: Sharding, bounds: Sequence[int], scale: float, transport: str) -> str:
    """What must be equal on every rank, one `name=value` a line."""
    values = {
        "seq_len": sharding.seq_len,
        "shard bounds": "balanced" if len(bounds) == 1 else list(bounds),
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
        "scale": scale,
        "transport": transport,
    }
    return "\n".join([f"{name}={value}" for name, value in values.items()])


def _open(
    q: Tensor,
    k: Tensor,
    sharding: Sharding,
    bounds: Sequence[int],
    scale: float,
    transport: str,
    group_name: str,
    layer: str,
) -> Link:
    """The link of a call, once every rank has been found to make the same one."""
    link = link_of(dist.distributed_c10d._resolve_process_group(group_name))
    link.place = layer
    start, stop = sharding.shard(link.rank)
    problem = None
    if q.shape[1] != stop - start:
        problem = (
            f"q has {q.shape[1]} tokens; rank {link.rank}'s shard of seq_len={sharding.seq_len} over {link.size} ranks is "
            f"[{start}, {stop}), {stop - start} tokens: see sequence_range"
        )
    link.agree(_description(q, sharding, bounds, scale, transport), problem, q.device)
    return link


def _transport(name: str, link: Link, sharding: Sharding, k: Tensor) -> transports.Transport:
    return _TRANSPORTS[name](link, sharding, 2 * k.shape[0] * k.shape[3] * k.element_size(), k.device)


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


@torch.library.impl("dilated_attention::context_parallel_forward", "CompositeExplicitAutograd")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    offsets: Sequence[int],
    bounds: Sequence[int],
    samples: Sequence[int],
    is_causal: bool,
    scale: float,
    compat: str,
    backend: str,
    transport: str,
    group_name: str,
    layer: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, lse, and what the backward needs of other ranks' rows.

    `bounds` is the sequence length alone for balanced shards; `samples` is empty for one sample.
    """
    size = dist.get_world_size(dist.distributed_c10d._resolve_process_group(group_name))
    sharding = _sharding(k.shape[2], segment_lengths, dilation_rates, offsets, bounds, samples, is_causal, compat, size)
    link = _open(q, k, sharding, bounds, scale, transport, group_name, layer)
    if transport == "ulysses":
        heads = transports.Ulysses(link, sharding, q.shape[2])
        whole = heads.scatter_heads([q, k, v], "in forward's exchange of heads")
        out, lse = native.forward(*whole, heads.plan, is_causal=is_causal, scale=scale)
        shards = heads.gather_heads([out, lse], "in forward's return of heads")
        saved = torch.cat([x.flatten() for x in (*whole, out)])
        return shards[0].contiguous(), shards[1].contiguous(), saved, lse.clone()
    state: tuple[Tensor, Tensor] | None = None

    def compute(keys: Tensor, values: Tensor, plan: Plan) -> None:
        nonlocal state
        state = native.forward(q, keys, values, plan, is_causal=is_causal, scale=scale, state=state)

    saved = _drive(_transport(transport, link, sharding, k).forward(k, v), compute)
    assert state is not None
    return *state, saved, q.new_empty(0)


@torch.library.register_fake("dilated_attention::context_parallel_forward")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    offsets: Sequence[int],
    bounds: Sequence[int],
    samples: Sequence[int],
    is_causal: bool,
    scale: float,
    compat: str,
    backend: str,
    transport: str,
    group_name: str,
    layer: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    group = dist.distributed_c10d._resolve_process_group(group_name)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sharding = _sharding(k.shape[2], segment_lengths, dilation_rates, offsets, bounds, samples, is_causal, compat, size)
    statistic = transports.statistic(q.dtype)
    out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=statistic)
    if transport == "ulysses":
        heads, kv_heads = q.shape[2] // size, k.shape[2] // size
        saved = q.new_empty(q.shape[0] * sharding.seq_len * 2 * (heads + kv_heads) * q.shape[3])
        return out, lse, saved, q.new_empty(q.shape[0], sharding.seq_len, heads, dtype=statistic)
    if transport == "ring":
        return out, lse, k.new_empty(0), q.new_empty(0)
    shape = traffic.Shape(k.shape[0], q.shape[2], k.shape[3], k.dtype)
    rows = traffic.count(transport, sharding, rank, shape).saved_bytes // shape.row_bytes
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
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    offsets: Sequence[int],
    bounds: Sequence[int],
    samples: Sequence[int],
    is_causal: bool,
    scale: float,
    compat: str,
    backend: str,
    transport: str,
    group_name: str,
    layer: str,
) -> tuple[Tensor, Tensor, Tensor]:
    size = dist.get_world_size(dist.distributed_c10d._resolve_process_group(group_name))
    sharding = _sharding(k.shape[2], segment_lengths, dilation_rates, offsets, bounds, samples, is_causal, compat, size)
    link = _open(q, k, sharding, bounds, scale, transport, group_name, layer)
    if transport == "ulysses":
        heads = transports.Ulysses(link, sharding, q.shape[2])
        dlse = torch.zeros_like(lse) if dlse is None else dlse
        dout, dlse = heads.scatter_heads([dout, dlse], "in backward's exchange of heads")
        widths = [heads.heads, heads.kv_heads, heads.kv_heads, heads.heads]
        token = q.shape[0] * sharding.seq_len * q.shape[3]
        pieces = saved.split([token * width for width in widths])
        views = [
            x.view(q.shape[0], sharding.seq_len, width, q.shape[3]) for x, width in zip(pieces, widths, strict=True)
        ]
        gradients = native.backward(dout, dlse, *views, saved_lse, heads.plan, is_causal=is_causal, scale=scale)
        dq, dk, dv = heads.gather_heads(gradients, "in backward's return of heads")
        return dq.contiguous(), dk.contiguous(), dv.contiguous()
    dq: Tensor | None = None

    def compute(keys: Tensor, values: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        nonlocal dq
        part, dk, dv = native.backward(
            dout, dlse, q, keys, values, out, lse, plan, is_causal=is_causal, scale=scale, rounded=False
        )
        dq = part if dq is None else dq.add_(part)
        return dk, dv

    dk, dv = _drive(_transport(transport, link, sharding, k).backward(k, v, saved), compute)
    assert dq is not None
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@torch.library.register_fake("dilated_attention::context_parallel_backward")
def _(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, *options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, *unused: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, saved, saved_lse = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    gradients = torch.ops.dilated_attention.context_parallel_backward(
        dout, dlse, q, k, v, out, lse, saved, saved_lse, *ctx.options
    )
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
            time.
        layer: named in errors.

    Returns:
        out, as q; lse, `(batch, shard, heads)`.

    Raises:
        ValueError on every rank, before any row moves, where ranks differ or one's tensors do not fit.
        ContextParallelError where an exchange fails; the group is refused from then on.
    """
    group = context_group(mesh)
    size = dist.get_world_size(group)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if size == 1 and bounds is None and seq_len in (None, q.shape[1]):
        flat = [offset for row in offsets for offset in row]
        return autograd.attend(
            q, k, v, list(segment_lengths), list(dilation_rates), flat, is_causal, scale, compat or "", backend, lengths,
            cu_seqlens, key_padding_mask,
        )  # fmt: skip
    if key_padding_mask is not None:
        raise UnsupportedError("key_padding_mask with a mesh is not supported; give lengths or cu_seqlens")
    if seq_len is None:
        seq_len = q.shape[1] * size if bounds is None else bounds[-1]
    if bounds is not None and (len(bounds) != size + 1 or bounds[-1] != seq_len):
        raise ValueError(f"bounds must be {size + 1} edges from 0 to seq_len={seq_len}; got {list(bounds)}")
    if lengths is not None:
        return _padded(
            q, k, v, segment_lengths, dilation_rates, offsets, lengths, balanced_bounds(seq_len, size) if bounds is None else bounds,
            mesh=group, is_causal=is_causal, scale=scale, compat=compat, backend=backend, transport=transport, layer=layer,
        )  # fmt: skip
    samples = [] if cu_seqlens is None else cu_seqlens.tolist()
    if samples and (samples[0] != 0 or samples[-1] != seq_len or any(x > y for x, y in pairwise(samples))):
        raise ValueError(f"cu_seqlens must ascend from 0 to the global length, seq_len={seq_len}; got {samples}")
    flat = [offset for row in offsets for offset in row]
    edges = [seq_len] if bounds is None else list(bounds)
    chosen = _choose(
        transport, q, k, segment_lengths, dilation_rates, flat, edges, samples, is_causal, compat or "", size
    )
    out, lse, _, _ = torch.ops.dilated_attention.context_parallel_forward(
        q, k, v, list(segment_lengths), list(dilation_rates), flat, edges, samples, is_causal, float(scale), compat or "",
        backend, chosen, group.group_name, layer,
    )  # fmt: skip
    return out, lse


def _choose(
    transport: str,
    q: Tensor,
    k: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    offsets: Sequence[int],
    bounds: Sequence[int],
    samples: Sequence[int],
    is_causal: bool,
    compat: str,
    size: int,
) -> str:
    sharding = _sharding(k.shape[2], segment_lengths, dilation_rates, offsets, bounds, samples, is_causal, compat, size)
    return traffic.choose(transport, sharding, traffic.Shape(k.shape[0], q.shape[2], k.shape[3], k.dtype)).transport


def _padded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    offsets: OffsetTable,
    lengths: Tensor,
    bounds: Sequence[int],
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """A padded batch: one call a sample, sharded by the batch's edges cut at the sample's length."""
    start = bounds[dist.get_rank(options["mesh"])]
    outs, lses = [], []
    for i, length in enumerate(lengths.tolist()):
        edges = [min(edge, length) for edge in bounds]
        own = max(0, min(q.shape[1], length - start))
        views = [x[i : i + 1, :own] for x in (q, k, v)]
        out, lse = context_parallel_attention(*views, segment_lengths, dilation_rates, offsets, bounds=edges, **options)
        missing = q.shape[1] - own
        outs.append(torch.nn.functional.pad(out, (0, 0, 0, 0, 0, missing)))
        lses.append(torch.nn.functional.pad(lse, (0, 0, 0, missing), value=-torch.inf))
    return torch.cat(outs), torch.cat(lses)
