"""Move rows between ranks, in one of several ways. A schedule brings the rows that a rank needs and returns their
gradients.

A schedule is a pair of coroutines, forward and backward, over *parts* (keys, values, plan). Forward yields the parts
of a call and lets the caller merge them; it returns what the backward needs. Backward yields parts, is sent each part's
(dk, dv), and returns the gradients of the shard's own k and v. Forward yields the local part first, while rows travel.
Backward yields it last, while partial gradients return. These are float32 (float64 for float64), and the rank that owns
a row adds them up.

A message's row is the key and the value of one token of one KV head: `(2, batch, head_dim)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from dilated_attention.cache import plan_cache
from dilated_attention.parallel import block_partition, partition
from dilated_attention.parallel.comm import Framing, Link, Transfer, seal_rows
from dilated_attention.parallel.partition import Sharding
from dilated_attention.parallel.parts import (
    BackwardParts,
    ForwardParts,
    Gathers,
    Local,
    Own,
    gathers_of,
    locate,
    on_device,
    statistic,
)


@runtime_checkable
class Transport(Protocol):
    """Base class of schedules, for one sharding on one rank."""

    def forward(self, k: Tensor, v: Tensor) -> ForwardParts: ...

    def backward(self, k: Tensor, v: Tensor, saved: Tensor) -> BackwardParts: ...


@dataclass(frozen=True)
class _ExchangeTables:
    local: Local
    sent: Framing
    received: Framing
    own: Own
    gathers: Gathers

    @property
    def nbytes(self) -> int:
        return self.local.nbytes + self.own.nbytes + sum([gather.nbytes for gather in self.gathers])


def _exchange_tables(sharding: Sharding, rank: int, seal: int, device: torch.device) -> _ExchangeTables:
    source = block_partition if sharding.layouts else partition
    keys = source.received_keys(sharding, rank)
    sent_keys, splits = source.sent_keys(sharding, rank)
    sent = Framing.of(splits, seal)
    received = Framing.of(partition.owner_splits(sharding, keys), seal)
    found = partition.crossings(sharding, rank)
    own = Own.of(sharding, rank, sent_keys, sent.positions, sent.rows, device)
    gathers = gathers_of(sharding, rank, found, (0, sharding.seq_len), keys, received.positions, device)
    return _ExchangeTables(Local.of(sharding, rank, device), sent, received, own, gathers)


class Exchange:
    """Run one all_to_all, in which every row that a rank needs comes from its owner, once."""

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
        yield from tables.local.forward(k, v)
        rows = transfer.wait() if transfer else k.new_empty(0, 2, k.shape[0], k.shape[3])
        for gather in tables.gathers:
            yield gather.part(rows)
        return rows

    def backward(self, k: Tensor, v: Tensor, saved: Tensor) -> BackwardParts:
        tables = self.tables
        sums = torch.zeros(saved.shape, dtype=statistic(k.dtype), device=k.device)
        for gather in tables.gathers:
            gather.scatter((yield gather.part(saved)), sums)
        transfer = None
        if self.active:
            transfer = self.link.all_to_all(sums, tables.received, tables.sent, "in backward's return of gradients")
        dk, dv = yield from tables.local.backward(k, v)
        if transfer:
            tables.own.add(transfer.wait(), dk, dv)
        return dk, dv


@dataclass(frozen=True)
class _DoublingTables:
    local: Local
    own: Own
    sends: tuple[Tensor, ...]
    sent: tuple[Framing, ...]
    received: tuple[Framing, ...]
    edges: tuple[int, ...]
    gathers: tuple[Gathers, ...]

    @property
    def nbytes(self) -> int:
        gathers = sum([gather.nbytes for level in self.gathers for gather in level])
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
        sends.append(on_device(np.concatenate(positions)[locate(np.concatenate(held), mine)], device))
        held.append(theirs)
        positions.append(np.arange(edges[-1], edges[-1] + len(theirs)))
        edges.append(edges[-1] + received[-1].rows)
        done = [crossing for crossing in found if partition.doubling_level(sharding, crossing.branch) == level + 1]
        everything = np.concatenate(held), np.concatenate(positions)
        gathers.append(gathers_of(sharding, rank, done, (0, sharding.seq_len), *everything, device))
    own = Own.of(sharding, rank, own_keys, positions[0], len(own_keys), device)
    local = Local.of(sharding, rank, device)
    return _DoublingTables(local, own, tuple(sends), tuple(sent), tuple(received), tuple(edges), tuple(gathers))


class Doubling:
    """Run log2 rounds: after round i a rank holds the rows of its block of 2^(i + 1) shards that later segments need.

    If offsets are nested, and segments and rates double together, each round moves only a sibling's half, which has
    constant size. A branch is computed when its segment is complete, while the next round travels.
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
        yield from tables.local.forward(k, v)
        for level in range(rounds):
            assert transfer is not None
            transfer.wait()
            transfer = self._send(level + 1, buffer) if level + 1 < rounds else None
            for gather in tables.gathers[level]:
                yield gather.part(buffer)
        return buffer

    def backward(self, k: Tensor, v: Tensor, saved: Tensor) -> BackwardParts:
        tables, rounds = self.tables, len(self.tables.sends)
        sums = torch.zeros(saved.shape, dtype=statistic(k.dtype), device=k.device)
        transfer: Transfer | None = None
        for level in reversed(range(rounds)):
            for gather in tables.gathers[level]:
                gather.scatter((yield gather.part(saved)), sums)
            if transfer:
                sums.index_add_(0, tables.sends[level + 1], transfer.wait()[: len(tables.sends[level + 1])])
            if level == 0:  # gradients of the farther rounds go before the local branches need room for theirs
                sums = sums[: tables.edges[1]].clone()
            message = sums[tables.edges[level] : tables.edges[level + 1]]
            transfer = self.link.swap(
                message, tables.received[level], tables.sent[level], f"in backward's doubling round {level}"
            )
        dk, dv = yield from tables.local.backward(k, v)
        if transfer:
            sums.index_add_(0, tables.sends[0], transfer.wait()[: len(tables.sends[0])])
        tables.own.add(sums[: tables.own.size], dk, dv)
        return dk, dv


@dataclass(frozen=True)
class _Step:
    """Describe one step of the ring.

    Rows go to the rank `distance` after this one, and come from the rank as far before.
    """

    own: Own
    sent: Framing
    received: Framing
    gathers: Gathers


@dataclass(frozen=True)
class _RingTables:
    """Hold a `_Step` for each distance at which this rank has something to send or to receive."""

    local: Local
    steps: dict[int, _Step]

    @property
    def nbytes(self) -> int:
        gathers = [gather.nbytes for step in self.steps.values() for gather in step.gathers]
        return self.local.nbytes + sum([step.own.nbytes for step in self.steps.values()]) + sum(gathers)


def _ring_tables(sharding: Sharding, rank: int, seal: int, device: torch.device) -> _RingTables:
    size, found = sharding.world_size, partition.crossings(sharding, rank)
    source = block_partition if sharding.layouts else partition
    keys = source.received_keys(sharding, rank)
    arriving = np.split(keys, np.cumsum(partition.owner_splits(sharding, keys))[:-1])
    sent_keys, splits = source.sent_keys(sharding, rank)
    leaving = np.split(sent_keys, np.cumsum(splits)[:-1])
    steps = {}
    for distance in range(1, size):
        behind, ahead = (rank - distance) % size, (rank + distance) % size
        if len(arriving[behind]) or len(leaving[ahead]):
            sent = Framing.single(ahead, len(leaving[ahead]), seal)
            received = Framing.single(behind, len(arriving[behind]), seal)
            own = Own.of(sharding, rank, leaving[ahead], sent.positions, sent.rows, device)
            tokens = sharding.shard(behind)
            gathers = gathers_of(sharding, rank, found, tokens, arriving[behind], received.positions, device)
            steps[distance] = _Step(own, sent, received, gathers)
    return _RingTables(Local.of(sharding, rank, device), steps)


class Ring:
    """Send rows point to point, one peer per step, and keep none: at most two peers' rows are in memory.

    The backward fetches the rows again. Two ranks exchange rows at one distance, and return gradients at the number
    of ranks minus this distance. Messages between two ranks match by their order, so every rank posts them in the order
    of distances.
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
        yield from self.tables.local.forward(k, v)
        for distance in range(1, self.link.size):
            rows = transfer.wait() if transfer else None
            transfer = self._fetch(distance + 1, k, v, "forward")
            if rows is not None:
                for gather in self.tables.steps[distance].gathers:
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
            for gather in step.gathers:
                gather.scatter((yield gather.part(rows)), sums)
            if returning:
                returning[0].own.add(returning[1].wait(), dk, dv)
            what = f"in backward's return of ring step {distance}"
            returning = step, self.link.swap(sums, step.received, step.sent, what)
        local_dk, local_dv = yield from self.tables.local.backward(k, v)
        if returning:
            returning[0].own.add(returning[1].wait(), dk, dv)
        return dk.add_(local_dk), dv.add_(local_dv)


@dataclass(frozen=True)
class _GatherTables:
    local: Local
    own: Own
    message: Framing
    everyone: Framing
    gathers: Gathers

    @property
    def nbytes(self) -> int:
        return self.local.nbytes + self.own.nbytes + sum([gather.nbytes for gather in self.gathers])


def _gather_tables(sharding: Sharding, rank: int, seal: int, device: torch.device) -> _GatherTables:
    size, source = sharding.world_size, block_partition if sharding.layouts else partition
    keys = [source.contributed_keys(sharding, j) for j in range(size)]
    longest = max([len(x) for x in keys])
    message, everyone = Framing.single(rank, longest, seal), Framing.of([longest] * size, seal)
    positions = np.concatenate([np.arange(len(x)) + j * (longest + seal) for j, x in enumerate(keys)])
    own = Own.of(sharding, rank, keys[rank], np.arange(len(keys[rank])), message.rows, device)
    found = partition.crossings(sharding, rank)
    gathers = gathers_of(sharding, rank, found, (0, sharding.seq_len), np.concatenate(keys), positions, device)
    return _GatherTables(Local.of(sharding, rank, device), own, message, everyone, gathers)


class AllGather:
    """Run one all_gather, in which every rank contributes its rows of crossing segments, padded to the longest list."""

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
        yield from tables.local.forward(k, v)
        rows = transfer.wait() if transfer else k.new_empty(0, 2, k.shape[0], k.shape[3])
        for gather in tables.gathers:
            yield gather.part(rows)
        return rows

    def backward(self, k: Tensor, v: Tensor, saved: Tensor) -> BackwardParts:
        tables = self.tables
        sums = torch.zeros(saved.shape, dtype=statistic(k.dtype), device=k.device)
        for gather in tables.gathers:
            gather.scatter((yield gather.part(saved)), sums)
        transfer = None
        if self.active:
            transfer = self.link.all_to_all(sums, tables.everyone, tables.everyone, "in backward's return of gradients")
        dk, dv = yield from tables.local.backward(k, v)
        if transfer:
            returned = transfer.wait().unflatten(0, (self.link.size, -1)).sum(0)
            tables.own.add(returned, dk, dv)
        return dk, dv
