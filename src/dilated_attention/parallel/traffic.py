"""Count what each transport moves on one rank, without a process group, and choose the transport from these counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np
import torch

from dilated_attention import checks
from dilated_attention.cache import plan_cache
from dilated_attention.call import Pattern, branched_factor
from dilated_attention.layout import BlockLayout
from dilated_attention.mesh import TRANSPORTS, check_transport
from dilated_attention.parallel import block_partition, partition
from dilated_attention.parallel.comm import seal_rows
from dilated_attention.parallel.partition import Sharding
from dilated_attention.patterns import Product, Sum
from dilated_attention.plan import row_counts

_LATENCY = 5e-6  # seconds per message, and
_BANDWIDTH = 50e9  # bytes per second: the model with which `auto` weighs messages against bytes
_BUFFER_SHARDS = 4  # `auto` keeps received rows under this many times the shard's own keys and values


@dataclass(frozen=True)
class ExchangePlan:
    """Describe what one rank sends and receives in one attention call.

    A row is the key and the value of one token of one KV head. Every message ends in a seal, which receivers check;
    seals count as bytes but not as rows. What the rank sends to itself does not count. With `ulysses` a row is q, k and
    v of one token for the heads of one rank.

    Attributes:
        peers_sent, peers_received: how many messages the forward sends and receives, over all its rounds.
        rounds: consecutive communication steps of the forward.
        bytes_sent, bytes_received: bytes of the forward, in the tensors' dtype; with `ulysses` also those of lse, in
            float32 at least.
        backward_bytes_sent, backward_bytes_received: bytes of the backward, which returns partial gradients in float32
            at least; `ulysses` returns whole ones in the tensors' dtype.
        saved_bytes: bytes kept from forward to backward.

    Examples:
        >>> from dilated_attention import Dilated
        >>> from dilated_attention.parallel import exchange_plan
        >>> plan = exchange_plan(Dilated([1024], [1]), 8192, num_heads=4, world_size=8, rank=0)
        >>> plan.bytes_sent, plan.bytes_received  # each segment lies in one shard
        (0, 0)
    """

    transport: str
    world_size: int
    rank: int
    shard: tuple[int, int]
    rows_sent: int
    rows_received: int
    peers_sent: int
    peers_received: int
    rounds: int
    bytes_sent: int
    bytes_received: int
    backward_bytes_sent: int
    backward_bytes_received: int
    saved_bytes: int

    @property
    def modelled_seconds(self) -> float:
        """Return the forward's communication time, modelled as 5 microseconds per message plus the bytes at 50 GB/s.

        Messages and bytes each count what is sent or what is received, whichever is more."""
        messages = max(self.peers_sent, self.peers_received)
        moved = max(self.bytes_sent, self.bytes_received)
        return _LATENCY * messages + moved / _BANDWIDTH


def total(plans: Sequence[ExchangePlan]) -> ExchangePlan:
    """Return the traffic of several calls together.

    Counts are summed; transport, world_size, rank and shard are the first call's.
    """
    sums = {}
    for field in fields(ExchangePlan):
        if field.name not in ("transport", "world_size", "rank", "shard"):
            sums[field.name] = sum([getattr(plan, field.name) for plan in plans])
    return replace(plans[0], **sums)


@dataclass(frozen=True)
class Shape:
    """Hold the sizes of a call's tensors that determine its messages; `num_heads` counts the heads of q. `by_query`: a
    bias has rows by query."""

    batch: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    by_query: bool = False

    @property
    def row_bytes(self) -> int:
        return 2 * self.batch * self.head_dim * self.dtype.itemsize

    @property
    def wide_itemsize(self) -> int:
        """Return the bytes per number of the dtype in which gradients travel and lse is stored."""
        return torch.promote_types(self.dtype, torch.float32).itemsize


def refusal(transport: str, sharding: Sharding, shape: Shape) -> str | None:
    """Return why a transport cannot serve a call, or None if it can."""
    num_heads = shape.num_heads
    if transport == "doubling":
        return partition.doubling_refusal(sharding)
    if transport == "ulysses" and (sharding.num_heads % sharding.world_size or num_heads % sharding.world_size):
        return (
            f"ulysses gives each rank the same number of heads; {num_heads} query and {sharding.num_heads} "
            f"key-value heads do not divide by {sharding.world_size} ranks"
        )
    if transport == "ulysses" and shape.by_query:
        return "ulysses moves queries, and a bias by query or by pair stays with its queries"
    return None


def _messages(transport: str, sharding: Sharding, rank: int, seal: int) -> tuple[list[int], list[int], int, int]:
    """Return how many rows each message out and each message in has, the number of rounds, and how many rows are kept
    for the backward. The rows of messages do not include seals; kept rows do. `seal`: how many rows one seal takes.
    """
    size = sharding.world_size
    source = block_partition if sharding.layouts else partition

    def number(shares: Iterable[partition.Share]) -> int:
        return int(partition.count_of(sharding, shares, (0, sharding.seq_len))[0])

    if transport == "doubling":
        blocks = [(level, rank >> level << level) for level in range(partition.doubling_rounds(sharding))]
        out = [number(partition.passed_on(sharding, block, level)) for level, block in blocks]
        into = [number(partition.passed_on(sharding, block ^ (1 << level), level)) for level, block in blocks]
        return out, into, len(blocks), sum(out[:1]) + _framed(into, seal)

    if transport == "all_gather":
        longest = max([number(source.contributed(sharding, j)) for j in range(size)])
        others = [longest] * (size - 1)
        return others, others, int(longest > 0), _framed([longest] * size, seal)

    to = partition.message_rows(sharding, source.sent(sharding, rank))
    from_ = partition.count_of(sharding, source.received(sharding, rank), sharding.bounds)
    out = to.tolist()
    into = from_.tolist()
    if transport == "ring":
        steps = np.arange(1, size)
        busy = to[(rank + steps) % size] + from_[(rank - steps) % size]
        return out, into, int(np.count_nonzero(busy)), 0
    return out, into, int(partition.crosses(sharding)), _framed(into, seal)


def _framed(rows: list[int], seal: int) -> int:
    """Return the total rows of messages with `rows[i]` data rows each, plus `seal` rows for each that is not empty."""
    return sum([count + seal for count in rows if count])


def count(transport: str, sharding: Sharding, rank: int, shape: Shape) -> ExchangePlan:
    """Return what one rank sends and receives: by formula, or from the lists of block layouts where there are any."""
    if transport == "ulysses":
        return _count_ulysses(sharding, rank, shape)
    row = shape.row_bytes
    out, into, rounds, kept = _messages(transport, sharding, rank, seal_rows(row))
    wide = row // shape.dtype.itemsize * shape.wide_itemsize
    plan = replace(_moved(transport, sharding, rank, out, into, row, wide), rounds=rounds, saved_bytes=kept * row)
    if transport != "ring":
        return plan
    return replace(  # its backward fetches the rows a second time
        plan,
        backward_bytes_sent=plan.backward_bytes_sent + plan.bytes_sent,
        backward_bytes_received=plan.backward_bytes_received + plan.bytes_received,
    )


def _moved(
    transport: str, sharding: Sharding, rank: int, out: list[int], into: list[int], row: int, returned: int
) -> ExchangePlan:
    """Return the traffic of one exchange with these data rows per message. A row has `row` bytes in the forward and
    `returned` bytes in the backward."""
    seal = seal_rows(row)
    framed_out = _framed(out, seal)
    framed_in = _framed(into, seal)
    return ExchangePlan(
        transport,
        sharding.world_size,
        rank,
        sharding.shard(rank),
        rows_sent=sum(out),
        rows_received=sum(into),
        peers_sent=sum([rows > 0 for rows in out]),
        peers_received=sum([rows > 0 for rows in into]),
        rounds=1,
        bytes_sent=framed_out * row,
        bytes_received=framed_in * row,
        backward_bytes_sent=framed_in * returned,
        backward_bytes_received=framed_out * returned,
        saved_bytes=0,
    )


def _count_ulysses(sharding: Sharding, rank: int, shape: Shape) -> ExchangePlan:
    size = sharding.world_size
    item = shape.dtype.itemsize
    wide = shape.wide_itemsize
    heads = shape.num_heads // size
    kv_heads = sharding.num_heads // size
    others = [upper - lower for lower, upper in pairwise(sharding.bounds)]
    mine = [others.pop(rank)] * (size - 1)
    fetch = shape.batch * (heads + 2 * kv_heads) * shape.head_dim * item  # q, k, v; and dq, dk, dv
    result = shape.batch * heads * (shape.head_dim * item + wide)  # out, lse; and dout, dlse
    kept = shape.batch * sharding.seq_len * (2 * (heads + kv_heads) * shape.head_dim * item + heads * wide)

    there = _moved("ulysses", sharding, rank, mine, others, fetch, fetch)
    back = _moved("ulysses", sharding, rank, others, mine, result, result)
    return replace(total([there, back]), rows_sent=there.rows_sent, rows_received=there.rows_received, saved_bytes=kept)


@dataclass(frozen=True)
class TransportChoice:
    """Hold the transport that serves a call, why it was chosen, and why the others were not.

    `nbytes` is the size that the cache counts.
    """

    transport: str
    reason: str
    refusals: dict[str, str]
    nbytes: int


def choose(transport: str, sharding: Sharding, shape: Shape) -> TransportChoice:
    """Return the transport of a call, from the cache. The choice is the same on every rank.

    A transport given by name is returned, or raises ValueError if it cannot serve the call.

    `auto` compares the traffic of one fixed rank: the last rank if causal, the first if the pattern has leading
    tokens, else the middle one. It takes the transport with the least modelled time among `ulysses`, `exchange` and
    `doubling`. The last two are ruled out if the rows that they keep for the backward take more than `_BUFFER_SHARDS`
    (4) times the memory of a shard's keys and values. If none is left, it takes `ring`.
    """
    return plan_cache.of(_choose, transport, sharding, shape)


def _choose(transport: str, sharding: Sharding, shape: Shape) -> TransportChoice:
    check_transport(transport)
    refusals = {name: why for name in TRANSPORTS if (why := refusal(name, sharding, shape))}
    if transport != "auto":
        if transport in refusals:
            raise ValueError(
                f"transport={transport!r} does not serve this call: {refusals[transport]}; use transport='auto'"
            )
        return TransportChoice(transport, "asked for by name", refusals, 2048 + sharding.nbytes)

    rank = sharding.world_size // 2
    if sharding.is_causal:
        rank = sharding.world_size - 1
    elif any(sharding.branches.leading):
        rank = 0
    refusals["all_gather"] = "moves rows that no rank asked for; only on request"
    plans = {name: count(name, sharding, rank, shape) for name in TRANSPORTS if name not in refusals}

    shard = sharding.seq_len / sharding.world_size * sharding.num_heads * shape.row_bytes
    for name in ("exchange", "doubling"):
        if name in plans and plans[name].saved_bytes > _BUFFER_SHARDS * shard:
            held = plans[name].saved_bytes / 1e6
            refusals[name] = f"would hold {held:.1f} MB, over {_BUFFER_SHARDS} shards of keys and values"

    served = [name for name in ("exchange", "doubling", "ulysses") if name not in refusals]
    best = min(served, key=lambda name: plans[name].modelled_seconds, default="ring")
    compared = "; ".join(
        [
            f"{name} {plan.bytes_received / 1e6:.2f} MB in {plan.peers_received} messages and {plan.rounds} rounds, "
            f"modelled {plan.modelled_seconds * 1e6:.0f} us"
            for name, plan in plans.items()
        ]
    )
    reason = f"least modelled time among those whose rows fit in memory; rank {rank} receives: {compared}"
    return TransportChoice(best, reason, refusals, 2048 + sharding.nbytes)


def exchange_plan(
    pattern: Pattern,
    seq_len: int,
    num_heads: int,
    world_size: int,
    rank: int,
    *,
    num_kv_heads: int | None = None,
    head_dim: int = 64,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    is_causal: bool = False,
    transport: str = "exchange",
    bounds: tuple[int, ...] | None = None,
) -> ExchangePlan:
    """Return what one rank of a context parallel call would move: bytes, peers, rounds, rows.

    This needs no process group and no tensors. A sum with block layouts runs as several calls, whose counts are
    added.

    Args:
        num_heads: heads of q.
        num_kv_heads: heads of k and v; default: num_heads.
        bounds: shard edges; default: the balanced ones that `sequence_range` gives.

    Examples:
        >>> from dilated_attention import Window
        >>> from dilated_attention.parallel import exchange_plan
        >>> plan = exchange_plan(Window(1023), 2**20, num_heads=16, world_size=8, rank=3, is_causal=True)
        >>> plan.shard
        (393216, 524288)
        >>> plan.rows_received  # the last 1,023 tokens of the rank before, for each of 16 heads
        16368
    """
    seq_len = checks.integer("seq_len", seq_len, 0)
    world_size = checks.positive("world_size", world_size)
    rank = checks.integer("rank", rank, 0, world_size - 1)
    num_heads, kv_heads = checks.kv_heads(num_heads, num_kv_heads)
    edges = partition.balanced_bounds(seq_len, world_size)
    if bounds is not None:
        edges = checks.integers("bounds", bounds)
    if len(edges) != world_size + 1 or edges[-1] != seq_len:
        raise ValueError(
            f"bounds must be world_size + 1 = {world_size + 1} edges from 0 to {seq_len}; got {len(edges)}"
        )

    shape = Shape(batch, num_heads, head_dim, dtype)
    plans = []
    for part in pattern.parts if isinstance(pattern, Sum) else (pattern,):
        branches = branched_factor(part).branches(kv_heads)
        layouts: list[BlockLayout] = []
        if isinstance(part, BlockLayout):
            part.check(batch, seq_len, num_heads, kv_heads)
            layouts = [part]
        elif isinstance(part, Product):
            layouts = [part.layout_of(rows) for rows in sorted(row_counts(branches, seq_len))]
        if is_causal:
            layouts = [layout.causal() for layout in layouts]
        sharding = Sharding(branches, edges, is_causal, layouts=tuple(layouts))
        chosen = choose(transport, sharding, shape).transport
        plans.append(count(chosen, sharding, rank, shape))
    return total(plans)
