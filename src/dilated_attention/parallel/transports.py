"""Schedules that bring the rows a rank needs, and return their gradients: five ways to run one partition.

A schedule is a pair of coroutines over *parts* (keys, values, plan). Forward yields the parts of a call and lets the
caller merge them; it returns what the backward needs. Backward yields parts, is sent each part's (dk, dv), and returns
the gradients of the shard's own k and v. The local part is yielded first in forward, while rows travel, and last in
backward, while partial gradients return; these are float32 (float64 for float64) and added at the owner.

A message's row is the key and the value of one token of one key-value head: `(2, batch, head_dim)`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dilated_attention.parallel import partition
from dilated_attention.parallel.comm import Framing, Link, Transfer, seal_rows
from dilated_attention.parallel.partition import Crossing, Integers, Remote, Sharding
from dilated_attention.plan import Plan, plan_cache

Part = tuple[Tensor, Tensor, Plan]
Gradients = tuple[Tensor, Tensor]
ForwardParts = Generator[Part, None, Tensor]
BackwardParts = Generator[Part, Gradients, Gradients]


class Transport(Protocol):
    """A schedule for one sharding on one rank."""

    def forward(self, k: Tensor, v: Tensor) -> ForwardParts: ...

    def backward(self, k: Tensor, v: Tensor, saved: Tensor) -> BackwardParts: ...


def statistic(dtype: torch.dtype) -> torch.dtype:
    """The type in which gradients of one row from several ranks travel and add up."""
    return torch.promote_types(dtype, torch.float32)


def locate(held: Integers, wanted: Integers) -> Integers:
    """The positions of some keys in a list of distinct keys, in any order."""
    order = np.argsort(held)
    where = order[np.searchsorted(held, wanted, sorter=order)]
    assert (held[where] == wanted).all()
    return where


@dataclass(frozen=True)
class Gather:
    """How a remote plan's key tensor is made of a buffer of rows.

    Attributes:
        index: the buffer row of each slot; 0 where no group reads the slot.
        rows: the buffer row of each filled slot; slots: which those are, None for all.
    """

    plan: Plan
    heads: int
    index: Tensor
    rows: Tensor
    slots: Tensor | None

    @classmethod
    def of(cls, remote: Remote, held: Integers, positions: Integers, device: torch.device) -> Gather | None:
        """From the keys that a buffer holds and the buffer row of each; None where the remote plan is empty."""
        if not remote.plan.groups:
            return None
        rows = positions[locate(held, remote.keys)]
        index = np.zeros(remote.rows * remote.plan.num_heads, dtype=np.int64)
        index[remote.slots] = rows
        full = len(remote.slots) == len(index)
        table, slots = _tensor(index, device), None if full else _tensor(remote.slots, device)
        return cls(remote.plan, remote.plan.num_heads, table, table if full else _tensor(rows, device), slots)

    @property
    def nbytes(self) -> int:
        return 8 * (len(self.index) + len(self.rows)) + self.plan.nbytes

    def part(self, buffer: Tensor) -> Part:
        """Keys and values, `(batch, rows, heads, head_dim)`, of a buffer `(buffer rows, 2, batch, head_dim)`."""
        both = buffer.index_select(0, self.index).unflatten(0, (-1, self.heads)).permute(2, 3, 0, 1, 4)
        return both[0], both[1], self.plan

    def scatter(self, gradients: Gradients, sums: Tensor) -> None:
        """Add a part's (dk, dv) to the gradients of the buffer's rows, in the latter's type."""
        for i, gradient in enumerate(gradients):
            rows = gradient.permute(1, 2, 0, 3).flatten(0, 1)
            rows = rows if self.slots is None else rows[self.slots]
            sums[:, i].index_add_(0, self.rows, rows.to(sums.dtype))


@dataclass(frozen=True)
class Own:
    """The shard's rows behind some buffer rows: `tokens[i]`, `heads[i]` in buffer row `positions[i]` of `size`."""

    tokens: Tensor
    heads: Tensor
    positions: Tensor
    size: int

    @classmethod
    def of(
        cls, sharding: Sharding, rank: int, keys: Integers, positions: Integers, size: int, device: torch.device
    ) -> Own:
        tokens, heads = keys // sharding.num_heads - sharding.shard(rank)[0], keys % sharding.num_heads
        return cls(_tensor(tokens, device), _tensor(heads, device), _tensor(positions, device), size)

    @property
    def nbytes(self) -> int:
        return 24 * len(self.tokens)

    def pack(self, k: Tensor, v: Tensor, out: Tensor | None = None) -> Tensor:
        """The buffer of rows `(size, 2, batch, head_dim)`."""
        out = k.new_empty(self.size, 2, k.shape[0], k.shape[3]) if out is None else out
        for i, x in enumerate((k, v)):
            out[self.positions, i] = x[:, self.tokens, self.heads].transpose(0, 1)
        return out

    def add(self, returned: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Add returned gradients, a buffer of rows, to the shard's, contiguous. A row may have gone to several
        ranks."""
        index = self.tokens * dk.shape[2] + self.heads
        for i, gradient in enumerate((dk, dv)):
            gradient.view(*gradient.shape[:1], -1, gradient.shape[3]).index_add_(
                1, index, returned[self.positions, i].transpose(0, 1)
            )


def _tensor(table: Integers, device: torch.device) -> Tensor:
    return torch.from_numpy(table).to(device)


def _wanted(found: Sequence[Crossing], start: int, stop: int) -> list[tuple[Crossing, tuple[range, ...]]]:
    """Each crossing segment with the rows before and after it that lie in the tokens [start, stop)."""

    def clip(part: range) -> range:
        first = part.start if part.start >= start else start + (part.start - start) % part.step
        return range(first, min(part.stop, stop), part.step)

    return [(crossing, (clip(crossing.before), clip(crossing.after))) for crossing in found]


@dataclass(frozen=True)
class _ExchangeTables:
    local: Plan
    sent: Framing
    received: Framing
    own: Own
    gather: Gather | None

    @property
    def nbytes(self) -> int:
        return self.local.nbytes + self.own.nbytes + (self.gather.nbytes if self.gather else 0)


def _exchange_tables(sharding: Sharding, rank: int, seal: int, device: torch.device) -> _ExchangeTables:
    keys = partition.received_keys(sharding, rank)
    sent_keys, splits = partition.sent_keys(sharding, rank)
    sent = Framing.of(splits, seal)
    received = Framing.of(partition.owner_splits(sharding, keys), seal)
    found = partition.crossings(sharding, rank)
    remote = partition.remote(sharding, rank, _wanted(found, 0, sharding.seq_len))
    own = Own.of(sharding, rank, sent_keys, sent.positions, sent.rows, device)
    gather = Gather.of(remote, keys, received.positions, device)
    return _ExchangeTables(partition.local_plan(sharding, rank), sent, received, own, gather)


class Exchange:
    """One all_to_all: every row that a rank needs, once, from its owner."""

    def __init__(self, link: Link, sharding: Sharding, row_bytes: int, device: torch.device) -> None:
        self.link, self.active = link, partition.crosses(sharding)
        seal = seal_rows(row_bytes)
        key = ("exchange", sharding, link.rank, seal, device)
        self.tables = plan_cache.get(key, lambda: _exchange_tables(sharding, link.rank, seal, device))

    def forward(self, k: Tensor, v: Tensor) -> ForwardParts:
        tables = self.tables
        transfer = None
        if self.active:
            transfer = self.link.all_to_all(
                tables.own.pack(k, v), tables.sent, tables.received, "in forward's exchange"
            )
        yield k, v, tables.local
        rows = transfer.wait() if transfer else k.new_empty(0, 2, k.shape[0], k.shape[3])
        if tables.gather:
            yield tables.gather.part(rows)
        return rows

    def backward(self, k: Tensor, v: Tensor, saved: Tensor) -> BackwardParts:
        tables = self.tables
        sums = torch.zeros(saved.shape, dtype=statistic(k.dtype), device=k.device)
        if tables.gather:
            tables.gather.scatter((yield tables.gather.part(saved)), sums)
        transfer = None
        if self.active:
            transfer = self.link.all_to_all(sums, tables.received, tables.sent, "in backward's return of gradients")
        dk, dv = _contiguous((yield k, v, tables.local), sums.dtype)
        if transfer:
            tables.own.add(transfer.wait(), dk, dv)
        return dk, dv


def _contiguous(gradients: Gradients, dtype: torch.dtype) -> Gradients:
    dk, dv = (gradient.to(dtype).contiguous() for gradient in gradients)
    return dk, dv


@dataclass(frozen=True)
class _DoublingTables:
    local: Plan
    own: Own
    sends: tuple[Tensor, ...]
    sent: tuple[Framing, ...]
    received: tuple[Framing, ...]
    edges: tuple[int, ...]
    gathers: tuple[Gather | None, ...]

    @property
    def nbytes(self) -> int:
        gathers = sum([gather.nbytes for gather in self.gathers if gather])
        return self.local.nbytes + self.own.nbytes + sum([8 * len(x) for x in self.sends]) + gathers


def _doubling_tables(sharding: Sharding, rank: int, seal: int, device: torch.device) -> _DoublingTables:
    rounds, found = partition.doubling_rounds(sharding), partition.crossings(sharding, rank)
    # The buffer: this rank's rows of round 0, then each round's message with its seal.
    own_keys = partition.doubling_keys(sharding, rank, 0) if rounds else np.empty(0, dtype=np.int64)
    held, positions, edges = [own_keys], [np.arange(len(own_keys))], [len(own_keys)]
    sends, sent, received, gathers = [], [], [], []
    for level in range(rounds):
        block = rank >> level << level
        peer, sibling = rank ^ (1 << level), block ^ (1 << level)
        mine = partition.doubling_keys(sharding, block, level)
        theirs = partition.doubling_keys(sharding, sibling, level)
        sent.append(Framing.single(peer, len(mine), seal))
        received.append(Framing.single(peer, len(theirs), seal))
        sends.append(_tensor(np.concatenate(positions)[locate(np.concatenate(held), mine)], device))
        held.append(theirs)
        positions.append(np.arange(edges[-1], edges[-1] + len(theirs)))
        edges.append(edges[-1] + received[-1].rows)
        done = [crossing for crossing in found if partition.doubling_level(sharding, crossing.branch) == level + 1]
        remote = partition.remote(sharding, rank, _wanted(done, 0, sharding.seq_len))
        gathers.append(Gather.of(remote, np.concatenate(held), np.concatenate(positions), device))
    own = Own.of(sharding, rank, own_keys, positions[0], len(own_keys), device)
    local = partition.local_plan(sharding, rank)
    return _DoublingTables(local, own, tuple(sends), tuple(sent), tuple(received), tuple(edges), tuple(gathers))


class Doubling:
    """log2 rounds: after round i a rank holds the rows of its block of 2^(i + 1) shards that later segments need.

    With nested offsets and segments and rates that double together each round is only a sibling's half, of constant
    size. A branch is computed when its segment is complete, while the next round travels.
    """

    def __init__(self, link: Link, sharding: Sharding, row_bytes: int, device: torch.device) -> None:
        self.link = link
        seal = seal_rows(row_bytes)
        key = ("doubling", sharding, link.rank, seal, device)
        self.tables = plan_cache.get(key, lambda: _doubling_tables(sharding, link.rank, seal, device))

    def _send(self, level: int, buffer: Tensor) -> Transfer:
        tables = self.tables
        message = buffer.new_empty(tables.sent[level].rows, *buffer.shape[1:])
        torch.index_select(buffer, 0, tables.sends[level], out=message[: len(tables.sends[level])])
        target = buffer[tables.edges[level] : tables.edges[level + 1]]
        return self.link.swap(
            message, tables.sent[level], tables.received[level], f"in forward's doubling round {level}", target
        )

    def forward(self, k: Tensor, v: Tensor) -> ForwardParts:
        tables, rounds = self.tables, len(self.tables.sends)
        buffer = k.new_empty(tables.edges[-1], 2, k.shape[0], k.shape[3])
        tables.own.pack(k, v, buffer)
        transfer = self._send(0, buffer) if rounds else None
        yield k, v, tables.local
        for level in range(rounds):
            assert transfer is not None
            transfer.wait()
            transfer = self._send(level + 1, buffer) if level + 1 < rounds else None
            if gather := tables.gathers[level]:
                yield gather.part(buffer)
        return buffer

    def backward(self, k: Tensor, v: Tensor, saved: Tensor) -> BackwardParts:
        tables, rounds = self.tables, len(self.tables.sends)
        sums = torch.zeros(saved.shape, dtype=statistic(k.dtype), device=k.device)
        transfer: Transfer | None = None
        for level in reversed(range(rounds)):
            if gather := tables.gathers[level]:
                gather.scatter((yield gather.part(saved)), sums)
            if transfer:
                sums.index_add_(0, tables.sends[level + 1], transfer.wait()[: len(tables.sends[level + 1])])
            message = sums[tables.edges[level] : tables.edges[level + 1]]
            transfer = self.link.swap(
                message, tables.received[level], tables.sent[level], f"in backward's doubling round {level}"
            )
        dk, dv = _contiguous((yield k, v, tables.local), sums.dtype)
        if transfer:
            sums.index_add_(0, tables.sends[0], transfer.wait()[: len(tables.sends[0])])
        tables.own.add(sums[: tables.own.size], dk, dv)
        return dk, dv


@dataclass(frozen=True)
class _Step:
    """One step of the ring: rows to the rank `distance` after this one, and from the rank as far before."""

    own: Own
    sent: Framing
    received: Framing
    gather: Gather | None


@dataclass(frozen=True)
class _RingTables:
    """`steps` by distance; a distance at which a rank has nothing to send or receive is left out."""

    local: Plan
    steps: dict[int, _Step]

    @property
    def nbytes(self) -> int:
        gathers = [step.gather.nbytes for step in self.steps.values() if step.gather]
        return self.local.nbytes + sum([step.own.nbytes for step in self.steps.values()]) + sum(gathers)


def _ring_tables(sharding: Sharding, rank: int, seal: int, device: torch.device) -> _RingTables:
    size, found = sharding.world_size, partition.crossings(sharding, rank)
    keys = partition.received_keys(sharding, rank)
    arriving = np.split(keys, np.cumsum(partition.owner_splits(sharding, keys))[:-1])
    sent_keys, splits = partition.sent_keys(sharding, rank)
    leaving = np.split(sent_keys, np.cumsum(splits)[:-1])
    steps = {}
    for distance in range(1, size):
        source, target = (rank - distance) % size, (rank + distance) % size
        if len(arriving[source]) or len(leaving[target]):
            sent = Framing.single(target, len(leaving[target]), seal)
            received = Framing.single(source, len(arriving[source]), seal)
            remote = partition.remote(sharding, rank, _wanted(found, *sharding.shard(source)))
            own = Own.of(sharding, rank, leaving[target], sent.positions, sent.rows, device)
            gather = Gather.of(remote, arriving[source], received.positions, device)
            steps[distance] = _Step(own, sent, received, gather)
    return _RingTables(partition.local_plan(sharding, rank), steps)


class Ring:
    """Point to point, one peer a step, nothing kept: two peers' rows in memory at most. The backward fetches again.

    Two ranks exchange rows at one distance and return gradients at its complement. Messages between them match by their
    order, so every rank posts them by distance, also past distances at which it has nothing to do.
    """

    def __init__(self, link: Link, sharding: Sharding, row_bytes: int, device: torch.device) -> None:
        self.link = link
        seal = seal_rows(row_bytes)
        key = ("ring", sharding, link.rank, seal, device)
        self.tables = plan_cache.get(key, lambda: _ring_tables(sharding, link.rank, seal, device))

    def _fetch(self, distance: int, k: Tensor, v: Tensor, phase: str) -> Transfer | None:
        step = self.tables.steps.get(distance)
        if step is None:
            return None
        return self.link.swap(step.own.pack(k, v), step.sent, step.received, f"in {phase}'s ring step {distance}")

    def forward(self, k: Tensor, v: Tensor) -> ForwardParts:
        transfer = self._fetch(1, k, v, "forward")
        yield k, v, self.tables.local
        for distance in range(1, self.link.size):
            rows = transfer.wait() if transfer else None
            transfer = self._fetch(distance + 1, k, v, "forward")
            if rows is not None and (gather := self.tables.steps[distance].gather):
                yield gather.part(rows)
        return k.new_empty(0)

    def backward(self, k: Tensor, v: Tensor, saved: Tensor) -> BackwardParts:
        dtype = statistic(k.dtype)
        dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k, v))
        transfer = self._fetch(1, k, v, "backward")
        returning: tuple[_Step, Transfer] | None = None
        for distance in range(1, self.link.size):
            rows = transfer.wait() if transfer else None
            transfer = self._fetch(distance + 1, k, v, "backward")
            if rows is None:
                continue
            step = self.tables.steps[distance]
            sums = torch.zeros(rows.shape, dtype=dtype, device=k.device)
            if step.gather:
                step.gather.scatter((yield step.gather.part(rows)), sums)
            if returning:
                returning[0].own.add(returning[1].wait(), dk, dv)
            what = f"in backward's return of ring step {distance}"
            returning = step, self.link.swap(sums, step.received, step.sent, what)
        local_dk, local_dv = yield k, v, self.tables.local
        if returning:
            returning[0].own.add(returning[1].wait(), dk, dv)
        return dk.add_(local_dk), dv.add_(local_dv)


@dataclass(frozen=True)
class _GatherTables:
    local: Plan
    own: Own
    message: Framing
    everyone: Framing
    gather: Gather | None

    @property
    def nbytes(self) -> int:
        return self.local.nbytes + self.own.nbytes + (self.gather.nbytes if self.gather else 0)


def _gather_tables(sharding: Sharding, rank: int, seal: int, device: torch.device) -> _GatherTables:
    size = sharding.world_size
    keys = [partition.contributed_keys(sharding, j) for j in range(size)]
    longest = max([len(x) for x in keys])
    message, everyone = Framing.single(rank, longest, seal), Framing.of([longest] * size, seal)
    positions = np.concatenate([np.arange(len(x)) + j * (longest + seal) for j, x in enumerate(keys)])
    remote = partition.remote(sharding, rank, _wanted(partition.crossings(sharding, rank), 0, sharding.seq_len))
    own = Own.of(sharding, rank, keys[rank], np.arange(len(keys[rank])), message.rows, device)
    gather = Gather.of(remote, np.concatenate(keys), positions, device)
    return _GatherTables(partition.local_plan(sharding, rank), own, message, everyone, gather)


class AllGather:
    """One all_gather over the group of every rank's rows of crossing segments, padded to the longest list."""

    def __init__(self, link: Link, sharding: Sharding, row_bytes: int, device: torch.device) -> None:
        self.link = link
        seal = seal_rows(row_bytes)
        key = ("all_gather", sharding, link.rank, seal, device)
        self.tables = plan_cache.get(key, lambda: _gather_tables(sharding, link.rank, seal, device))
        self.active = self.tables.message.rows > 0

    def forward(self, k: Tensor, v: Tensor) -> ForwardParts:
        tables = self.tables
        transfer = None
        if self.active:
            message = k.new_zeros(tables.message.rows, 2, k.shape[0], k.shape[3])
            transfer = self.link.all_gather(tables.own.pack(k, v, message), tables.message, "in forward's all_gather")
        yield k, v, tables.local
        rows = transfer.wait() if transfer else k.new_empty(0, 2, k.shape[0], k.shape[3])
        if tables.gather:
            yield tables.gather.part(rows)
        return rows

    def backward(self, k: Tensor, v: Tensor, saved: Tensor) -> BackwardParts:
        tables = self.tables
        sums = torch.zeros(saved.shape, dtype=statistic(k.dtype), device=k.device)
        if tables.gather:
            tables.gather.scatter((yield tables.gather.part(saved)), sums)
        transfer = None
        if self.active:
            transfer = self.link.all_to_all(sums, tables.everyone, tables.everyone, "in backward's return of gradients")
        dk, dv = _contiguous((yield k, v, tables.local), sums.dtype)
        if transfer:
            returned = transfer.wait().unflatten(0, (self.link.size, -1)).sum(0)
            tables.own.add(returned, dk, dv)
        return dk, dv


class Ulysses:
    """Heads instead of tokens: each rank computes all tokens of its share of the heads. Not a schedule over parts.

    A message's row is what one token has of one rank's heads: q, k and v; or out and lse.
    """

    def __init__(self, link: Link, sharding: Sharding, num_heads: int) -> None:
        self.link, self.bounds = link, sharding.bounds
        heads, kv_heads = num_heads // link.size, sharding.num_heads // link.size
        self.widths = heads, kv_heads, kv_heads, heads  # of q, k, v and out
        columns = slice(link.rank * kv_heads, (link.rank + 1) * kv_heads)
        offsets = tuple([row[columns] for row in sharding.offsets])
        whole = replace(sharding, offsets=offsets, bounds=(0, sharding.seq_len))
        self.plan = plan_cache.get(("whole", whole), lambda: partition.local_plan(whole, 0))

    def scatter_heads(self, tensors: Sequence[Tensor], what: str) -> list[Tensor]:
        """`(batch, shard, heads, ...)` each to `(batch, seq, heads / size, ...)`."""
        size, shard = self.link.size, self.bounds[self.link.rank + 1] - self.bounds[self.link.rank]
        rows = [x.unflatten(2, (size, -1)).permute(2, 1, 0, *range(3, x.dim() + 1)).flatten(0, 1) for x in tensors]
        counts = [stop - start for start, stop in pairwise(self.bounds)]
        arrived = self._exchange(rows, [shard] * size, counts, what)
        return [x.transpose(0, 1) for x in arrived]

    def gather_heads(self, tensors: Sequence[Tensor], what: str) -> list[Tensor]:
        """`(batch, seq, heads / size, ...)` each to `(batch, shard, heads, ...)`."""
        size, shard = self.link.size, self.bounds[self.link.rank + 1] - self.bounds[self.link.rank]
        counts = [stop - start for start, stop in pairwise(self.bounds)]
        arrived = self._exchange([x.transpose(0, 1) for x in tensors], counts, [shard] * size, what)
        return [x.unflatten(0, (size, shard)).permute(2, 1, 0, *range(3, x.dim() + 1)).flatten(2, 3) for x in arrived]

    def _exchange(self, rows: Sequence[Tensor], leaving: list[int], arriving: list[int], what: str) -> list[Tensor]:
        """Rows of several tensors, `(rows, ...)`, side by side in one message of bytes."""
        packed = torch.cat([_packed(x).flatten(1).view(torch.uint8) for x in rows], 1)
        seal = seal_rows(packed.shape[1])
        sent, received = Framing.of(leaving, seal), Framing.of(arriving, seal)
        message = packed.new_empty(sent.rows, packed.shape[1])
        message[torch.from_numpy(sent.positions).to(packed.device)] = packed
        buffer = self.link.all_to_all(message, sent, received, what).wait()
        buffer = buffer[torch.from_numpy(received.positions).to(packed.device)]
        widths = [x.shape[1:].numel() * x.element_size() for x in rows]
        parts = buffer.split(widths, 1)
        return [
            y.clone(memory_format=torch.contiguous_format).view(x.dtype).unflatten(1, x.shape[1:])
            for x, y in zip(rows, parts, strict=True)
        ]


def _packed(x: Tensor) -> Tensor:
    """A copy whose strides are those of its shape, also in dimensions of size 1, as a view of bytes requires."""
    return x.clone(memory_format=torch.contiguous_format)
