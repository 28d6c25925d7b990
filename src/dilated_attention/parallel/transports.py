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
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from dilated_attention.cache import plan_cache
from dilated_attention.layout import BlockLayout
from dilated_attention.parallel import blocks, partition
from dilated_attention.parallel.blocks import BlockProblem, Interval
from dilated_attention.parallel.comm import Framing, Link, Transfer, seal_rows
from dilated_attention.parallel.partition import Crossing, Integers, Remote, Sharding
from dilated_attention.plan import Plan, plan_dilated


@dataclass(frozen=True)
class BlockQueries:
    """The queries of a block-sparse part: a sequence of `layout.seq_len` rows, some of them the shard's.

    Attributes:
        tokens, positions: the shard's tokens, and their rows; the other rows have no query.
        heads: key-value heads.
        hidden: bool `(rows,)`, True where no query sees a key, or None.
    """

    layout: BlockLayout
    tokens: Tensor
    positions: Tensor
    heads: tuple[int, ...]
    hidden: Tensor | None


@dataclass(frozen=True)
class Part:
    """One computation: the plan over keys and values `(batch, rows, heads, head_dim)`.

    Attributes:
        queries: where the queries are not all the rows of the shard; then the layout is its own, too.
    """

    keys: Tensor
    values: Tensor
    plan: Plan
    queries: BlockQueries | None = None


Gradients = tuple[Tensor, Tensor]
ForwardParts = Generator[Part, None, Tensor]
BackwardParts = Generator[Part, Gradients, Gradients]


@runtime_checkable
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
        """The keys and values in a buffer `(buffer rows, 2, batch, head_dim)`."""
        return Part(*_keys_and_values(buffer.index_select(0, self.index), self.heads), self.plan)

    def scatter(self, gradients: Gradients, sums: Tensor) -> None:
        """Add a part's (dk, dv) to the gradients of the buffer's rows, in the latter's type."""
        for i, rows in enumerate(_slot_rows(gradients)):
            rows = rows if self.slots is None else rows[self.slots]
            sums[:, i].index_add_(0, self.rows, rows.to(sums.dtype))


def _keys_and_values(slots: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """`(batch, rows, heads, head_dim)` each of slots `(rows * heads, 2, batch, head_dim)`, views."""
    both = slots.unflatten(0, (-1, heads)).permute(2, 3, 0, 1, 4)
    return both[0], both[1]


def _slot_rows(gradients: Gradients) -> list[Tensor]:
    """The other way round: `(rows * heads, batch, head_dim)` each."""
    return [gradient.permute(1, 2, 0, 3).flatten(0, 1) for gradient in gradients]


@dataclass(frozen=True)
class BlockGather:
    """How the keys and values of a block-sparse part are made of a buffer of rows: `slots[i]` holds row `rows[i]`."""

    plan: Plan
    queries: BlockQueries
    slots: Tensor
    rows: Tensor

    @classmethod
    def of(cls, problem: BlockProblem, rows: Integers, device: torch.device) -> BlockGather:
        plan = _square_plan(problem)
        return cls(plan, _queries(problem, device), _tensor(problem.slots, device), _tensor(rows, device))

    @property
    def nbytes(self) -> int:
        return 16 * len(self.rows) + 16 * len(self.queries.tokens) + self.queries.layout.nbytes + self.plan.nbytes

    def part(self, buffer: Tensor) -> Part:
        """The keys and values in a buffer `(buffer rows, 2, batch, head_dim)`."""
        size = self.queries.layout.seq_len * len(self.queries.heads)
        filled = buffer.new_zeros(size, *buffer.shape[1:])
        filled[self.slots] = buffer[self.rows]
        return Part(*_keys_and_values(filled, len(self.queries.heads)), self.plan, self.queries)

    def scatter(self, gradients: Gradients, sums: Tensor) -> None:
        """Add a part's (dk, dv) to the gradients of the buffer's rows, in the latter's type."""
        for i, rows in enumerate(_slot_rows(gradients)):
            sums[:, i].index_add_(0, self.rows, rows[self.slots].to(sums.dtype))


def _queries(problem: BlockProblem, device: torch.device) -> BlockQueries:
    hidden = None if problem.hidden is None else _tensor(problem.hidden, device)
    tokens, positions = _tensor(problem.tokens, device), _tensor(problem.positions, device)
    return BlockQueries(problem.layout.to(device), tokens, positions, problem.heads, hidden)


def _square_plan(problem: BlockProblem) -> Plan:
    """One segment of all rows, all heads."""
    return plan_dilated((problem.layout.seq_len,), (1,), ((0,) * len(problem.heads),), problem.layout.seq_len)


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


@dataclass(frozen=True)
class Local:
    """What needs no other rank: the plan of whole segments, and block-sparse problems over the shard's own rows."""

    plan: Plan
    problems: tuple[tuple[BlockQueries, Own], ...]

    @classmethod
    def of(cls, sharding: Sharding, rank: int, device: torch.device) -> Local:
        problems = []
        if sharding.layouts:
            for crossing in partition.crossings(sharding, rank):
                if problem := blocks.problem(sharding, rank, crossing, [sharding.shard(rank)]):
                    size = problem.layout.seq_len * len(problem.heads)
                    own = Own.of(sharding, rank, problem.keys, problem.slots, size, device)
                    problems.append((_queries(problem, device), own))
        return cls(partition.local_plan(sharding, rank), tuple(problems))

    @property
    def nbytes(self) -> int:
        own = [own.nbytes + 16 * len(queries.tokens) + queries.layout.nbytes for queries, own in self.problems]
        return self.plan.nbytes + sum(own)

    def _part(self, queries: BlockQueries, own: Own, k: Tensor, v: Tensor) -> Part:
        filled = own.pack(k, v, k.new_zeros(own.size, 2, k.shape[0], k.shape[3]))
        length, heads = queries.layout.seq_len, len(queries.heads)
        plan = plan_dilated((length,), (1,), ((0,) * heads,), length)
        return Part(*_keys_and_values(filled, heads), plan, queries)

    def forward(self, k: Tensor, v: Tensor) -> Generator[Part, None, None]:
        yield Part(k, v, self.plan)
        for queries, own in self.problems:
            yield self._part(queries, own, k, v)

    def backward(self, k: Tensor, v: Tensor) -> BackwardParts:
        """The shard's part of (dk, dv), in the type in which gradients add up, contiguous."""
        dtype = statistic(k.dtype)
        dk, dv = ((x.to(dtype).contiguous()) for x in (yield Part(k, v, self.plan)))
        for queries, own in self.problems:
            rows = _slot_rows((yield self._part(queries, own, k, v)))
            own.add(torch.stack(rows, 1).to(dtype), dk, dv)
        return dk, dv


Gathers = tuple[Gather | BlockGather, ...]


def _gathers(
    sharding: Sharding,
    rank: int,
    found: Sequence[Crossing],
    tokens: Interval,
    held: Integers,
    positions: Integers,
    device: torch.device,
) -> Gathers:
    """The parts over other ranks' rows among `tokens`, of a buffer that holds the keys `held` in rows `positions`."""
    if not sharding.layouts:
        remote = partition.remote(sharding, rank, _wanted(found, *tokens))
        gather = Gather.of(remote, held, positions, device)
        return () if gather is None else (gather,)
    lower, upper = sharding.shard(rank)
    others = [(tokens[0], min(tokens[1], lower)), (max(tokens[0], upper), tokens[1])]
    wanted = [(start, stop) for start, stop in others[: 1 if sharding.is_causal else 2] if start < stop]
    gathers = []
    for crossing in found:
        if problem := blocks.problem(sharding, rank, crossing, wanted):
            gathers.append(BlockGather.of(problem, positions[locate(held, problem.keys)], device))
    return tuple(gathers)


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
    local: Local
    sent: Framing
    received: Framing
    own: Own
    gathers: Gathers

    @property
    def nbytes(self) -> int:
        return self.local.nbytes + self.own.nbytes + sum([gather.nbytes for gather in self.gathers])


def _exchange_tables(sharding: Sharding, rank: int, seal: int, device: torch.device) -> _ExchangeTables:
    source = blocks if sharding.layouts else partition
    keys = source.received_keys(sharding, rank)
    sent_keys, splits = source.sent_keys(sharding, rank)
    sent = Framing.of(splits, seal)
    received = Framing.of(partition.owner_splits(sharding, keys), seal)
    found = partition.crossings(sharding, rank)
    own = Own.of(sharding, rank, sent_keys, sent.positions, sent.rows, device)
    gathers = _gathers(sharding, rank, found, (0, sharding.seq_len), keys, received.positions, device)
    return _ExchangeTables(Local.of(sharding, rank, device), sent, received, own, gathers)


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
        sends.append(_tensor(np.concatenate(positions)[locate(np.concatenate(held), mine)], device))
        held.append(theirs)
        positions.append(np.arange(edges[-1], edges[-1] + len(theirs)))
        edges.append(edges[-1] + received[-1].rows)
        done = [crossing for crossing in found if partition.doubling_level(sharding, crossing.branch) == level + 1]
        everything = np.concatenate(held), np.concatenate(positions)
        gathers.append(_gathers(sharding, rank, done, (0, sharding.seq_len), *everything, device))
    own = Own.of(sharding, rank, own_keys, positions[0], len(own_keys), device)
    local = Local.of(sharding, rank, device)
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
    """One step of the ring: rows to the rank `distance` after this one, and from the rank as far before."""

    own: Own
    sent: Framing
    received: Framing
    gathers: Gathers


@dataclass(frozen=True)
class _RingTables:
    """`steps` by distance; a distance at which a rank has nothing to send or receive is left out."""

    local: Local
    steps: dict[int, _Step]

    @property
    def nbytes(self) -> int:
        gathers = [gather.nbytes for step in self.steps.values() for gather in step.gathers]
        return self.local.nbytes + sum([step.own.nbytes for step in self.steps.values()]) + sum(gathers)


def _ring_tables(sharding: Sharding, rank: int, seal: int, device: torch.device) -> _RingTables:
    size, found = sharding.world_size, partition.crossings(sharding, rank)
    source = blocks if sharding.layouts else partition
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
            gathers = _gathers(sharding, rank, found, tokens, arriving[behind], received.positions, device)
            steps[distance] = _Step(own, sent, received, gathers)
    return _RingTables(Local.of(sharding, rank, device), steps)


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
    size, source = sharding.world_size, blocks if sharding.layouts else partition
    keys = [source.contributed_keys(sharding, j) for j in range(size)]
    longest = max([len(x) for x in keys])
    message, everyone = Framing.single(rank, longest, seal), Framing.of([longest] * size, seal)
    positions = np.concatenate([np.arange(len(x)) + j * (longest + seal) for j, x in enumerate(keys)])
    own = Own.of(sharding, rank, keys[rank], np.arange(len(keys[rank])), message.rows, device)
    found = partition.crossings(sharding, rank)
    gathers = _gathers(sharding, rank, found, (0, sharding.seq_len), np.concatenate(keys), positions, device)
    return _GatherTables(Local.of(sharding, rank, device), own, message, everyone, gathers)


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
        whole = replace(sharding, offsets=offsets, bounds=(0, sharding.seq_len), layouts=())
        self.plan = plan_cache.get(("whole", whole), lambda: partition.local_plan(whole, 0))
        mine = range(link.rank * heads, (link.rank + 1) * heads)
        self.layouts = {
            layout.seq_len: layout.select(heads=mine) if layout.num_heads > 1 else layout for layout in sharding.layouts
        }

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
