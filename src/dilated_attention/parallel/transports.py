"""Move rows between ranks, in one of several ways. A schedule brings the rows that a rank needs and returns their
gradients.

A schedule passes the *parts* (keys, values, plan) of a call to a function `attend`. Its forward begins with the local
part, while rows travel, and returns what the backward needs. Its backward gets each part's (dk, dv) from `attend`. The
local part comes last, while partial gradients return. These are float32 (float64 for float64), and the rank that owns a
row adds them up.

A message's row is the key and the value of one token of one KV head: `(2, batch, head_dim)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dilated_attention.cache import plan_cache
from dilated_attention.parallel import block_partition, partition
from dilated_attention.parallel.comm import Framing, Link, Transfer, seal_rows
from dilated_attention.parallel.partition import Integers, Sharding
from dilated_attention.parallel.parts import (
    Attend,
    Counted,
    Gather,
    Gradients,
    Own,
    Part,
    gathers_of,
    locate,
    on_device,
    statistic,
)
from dilated_attention.plan import Plan


@dataclass(frozen=True)
class _Round(Counted):
    """Describe one transfer: the rows of the shard that a rank sends (`own`), and the parts that read what it receives.

    `sent`, `received`: how the buffers of sent and of received rows are divided into messages (`Framing`). In the
    backward, gradients of the received rows leave divided as `received`, and gradients of the sent rows come back
    divided as `returned`. That is `sent`, except after an all_gather: one message went to all ranks, and each answers.
    """

    own: Own
    gathers: tuple[Gather, ...]
    sent: Framing
    received: Framing
    returned: Framing

    def forward(self, rows: Tensor, attend: Attend) -> None:
        for gather in self.gathers:
            attend(gather.part(*rows.unbind(1)))

    def backward(self, rows: Tensor, attend: Attend) -> Tensor:
        """Return the gradients of the buffer `rows`, summed over the parts that read it."""
        sums = torch.zeros(rows.shape, dtype=statistic(rows.dtype), device=rows.device)
        for gather in self.gathers:
            gather.scatter(attend(gather.part(*rows.unbind(1))), *sums.unbind(1))
        return sums


@dataclass(frozen=True)
class _Tables(Counted):
    local: Plan
    steps: Any


class _Schedule:
    """Base class of schedules, for one sharding on one rank.

    A subclass defines `make`, `forward(k, v, attend)`, which returns a tensor to save, and `backward(k, v, saved,
    attend)`, which returns (dk, dv) of the shard. Both read `self.local`, what the rank computes alone, and
    `self.steps`, its transfers, which `make` has made or the cache has kept.

    `row_bytes`: the bytes of a message's row.
    """

    def __init__(self, link: Link, sharding: Sharding, row_bytes: int, device: torch.device) -> None:
        made = plan_cache.of(self._tables, sharding, link.rank, seal_rows(row_bytes), device)
        self.link = link
        self.local = made.local
        self.steps = made.steps

    @classmethod
    def _tables(cls, sharding: Sharding, rank: int, seal: int, device: torch.device) -> _Tables:
        return _Tables(partition.local_plan(sharding, rank), cls.make(sharding, rank, seal, device))

    @staticmethod
    def make(sharding: Sharding, rank: int, seal: int, device: torch.device) -> Any:
        """Return the transfers of a rank. `seal`: how many rows a message's seal takes."""
        raise NotImplementedError


def _messages(sharding: Sharding, rank: int) -> tuple[tuple[Integers, list[int]], tuple[Integers, list[int]]]:
    """Return the row keys that a rank receives, by peer, and how many there are of each peer; then the same of what it
    sends."""
    source = block_partition if sharding.layouts else partition
    keys = partition.keys_of(sharding, source.received(sharding, rank))
    return (keys, partition.owner_splits(sharding, keys)), partition.messages(sharding, source.sent(sharding, rank))


class Exchange(_Schedule):
    """Run one all_to_all: every row that a rank needs comes once, from its owner."""

    steps: _Round | None

    @staticmethod
    def make(sharding: Sharding, rank: int, seal: int, device: torch.device) -> _Round | None:
        if not partition.crosses(sharding):  # on no rank: nobody calls the collective
            return None
        (keys, come), (sent_keys, go) = _messages(sharding, rank)
        sent = Framing.of(go, seal)
        received = Framing.of(come, seal)
        own = Own.of(sharding, rank, sent_keys, sent.positions, sent.rows, device)
        gathers = gathers_of(sharding, rank, keys, received.positions, device)
        return _Round(own, gathers, sent, received, sent)

    def _send(self, step: _Round, k: Tensor, v: Tensor) -> Transfer:
        return self.link.all_to_all(step.own.pack(k, v), step.sent, step.received, "in forward's exchange")

    def forward(self, k: Tensor, v: Tensor, attend: Attend) -> Tensor:
        if not self.steps:
            attend(Part(k, v, self.local))
            return k.new_empty(0)
        transfer = self._send(self.steps, k, v)
        attend(Part(k, v, self.local))
        rows = transfer.wait()
        self.steps.forward(rows, attend)
        return rows

    def backward(self, k: Tensor, v: Tensor, saved: Tensor, attend: Attend) -> Gradients:
        step = self.steps
        if not step:
            return attend(Part(k, v, self.local))
        sums = step.backward(saved, attend)
        what = "in backward's return of gradients"
        transfer = self.link.all_to_all(sums, step.received, step.returned, what)
        dk, dv = attend(Part(k, v, self.local))
        step.own.add(transfer.wait(), dk, dv)
        return dk, dv


class AllGather(Exchange):
    """Run one all_gather: every rank gets each rank's rows that some other rank needs, padded to the longest list."""

    @staticmethod
    def make(sharding: Sharding, rank: int, seal: int, device: torch.device) -> _Round | None:
        size = sharding.world_size
        source = block_partition if sharding.layouts else partition
        keys = [partition.keys_of(sharding, source.contributed(sharding, j)) for j in range(size)]
        longest = max([len(x) for x in keys])
        if not longest:
            return None
        sent = Framing.of({rank: longest}, seal)
        everyone = Framing.of([longest] * size, seal)
        own = Own.of(sharding, rank, keys[rank], np.arange(len(keys[rank])), sent.rows, device)
        positions = np.concatenate([np.arange(len(x)) + j * sent.rows for j, x in enumerate(keys)])
        gathers = gathers_of(sharding, rank, np.concatenate(keys), positions, device)
        return _Round(own, gathers, sent, everyone, everyone)

    def _send(self, step: _Round, k: Tensor, v: Tensor) -> Transfer:
        message = step.own.pack(k, v, k.new_zeros(step.sent.rows, 2, k.shape[0], k.shape[3]))
        return self.link.all_gather(message, step.sent, "in forward's all_gather")


class Ring(_Schedule):
    """Send rows point to point, to one peer per step; at most two peers' rows are in memory at a time.

    In step d = 1, 2, ... rank j sends rows to rank j + d (modulo the number of ranks). No rows are kept for the
    backward, which fetches them again in the same steps, and in step d returns gradients to rank j - d. Messages
    between two ranks match by their order, so every rank runs the steps in the same order.
    """

    steps: dict[int, _Round]

    @staticmethod
    def make(sharding: Sharding, rank: int, seal: int, device: torch.device) -> dict[int, _Round]:
        """Return the rounds by distance: rows go `distance` ranks ahead and come from `distance` ranks behind.

        A round without rows is left out.
        """
        arriving, leaving = (np.split(keys, np.cumsum(rows)[:-1]) for keys, rows in _messages(sharding, rank))
        size = sharding.world_size
        rounds = {}
        for distance in range(1, size):
            behind = (rank - distance) % size
            ahead = (rank + distance) % size
            come = arriving[behind]
            go = leaving[ahead]
            if len(come) or len(go):
                sent = Framing.of({ahead: len(go)}, seal)
                received = Framing.of({behind: len(come)}, seal)
                own = Own.of(sharding, rank, go, sent.positions, sent.rows, device)
                gathers = gathers_of(sharding, rank, come, received.positions, device, sharding.shard(behind))
                rounds[distance] = _Round(own, gathers, sent, received, sent)
        return rounds

    def _fetch(self, distance: int, k: Tensor, v: Tensor, phase: str) -> Transfer | None:
        step = self.steps.get(distance)
        if step is None:
            return None
        return self.link.swap(step.own.pack(k, v), step.sent, step.received, f"in {phase}'s ring step {distance}")

    def _rows(self, k: Tensor, v: Tensor, phase: str, first: Transfer | None) -> Iterator[tuple[int, _Round, Tensor]]:
        """Yield (distance, its round, received rows), while the rows of the next distance travel.

        `first`: the transfer of distance 1. `phase`: "forward" or "backward".
        """
        transfer = first
        for distance in range(1, self.link.size):
            rows = transfer.wait() if transfer else None
            transfer = self._fetch(distance + 1, k, v, phase)
            if rows is not None:
                yield distance, self.steps[distance], rows

    def forward(self, k: Tensor, v: Tensor, attend: Attend) -> Tensor:
        first = self._fetch(1, k, v, "forward")
        attend(Part(k, v, self.local))
        for _, step, rows in self._rows(k, v, "forward", first):
            step.forward(rows, attend)
        return k.new_empty(0)

    def backward(self, k: Tensor, v: Tensor, saved: Tensor, attend: Attend) -> Gradients:
        dk, dv = (torch.zeros(x.shape, dtype=statistic(k.dtype), device=x.device) for x in (k, v))
        returning: tuple[Own, Transfer] | None = None  # the rows whose gradients travel

        def add_returned() -> None:
            if returning:
                own, transfer = returning
                own.add(transfer.wait(), dk, dv)

        for distance, step, rows in self._rows(k, v, "backward", self._fetch(1, k, v, "backward")):
            sums = step.backward(rows, attend)
            add_returned()
            what = f"in backward's return of ring step {distance}"
            returning = (step.own, self.link.swap(sums, step.received, step.returned, what))
        local_dk, local_dv = attend(Part(k, v, self.local))
        add_returned()
        return dk.add_(local_dk), dv.add_(local_dv)


@dataclass(frozen=True)
class _Hop(Counted):
    """Describe a round of doubling: it sends the buffer's rows with indices `send`, and fills its rows [start, stop).

    `sent`, `received`: how the two messages are framed. `gathers`: the parts whose rows are complete after this round.
    """

    send: Tensor
    sent: Framing
    received: Framing
    start: int
    stop: int
    gathers: tuple[Gather, ...]


class Doubling(_Schedule):
    """Exchange rows by recursive doubling: in round i = 0, 1, ... each rank swaps rows with one peer, rank XOR 2^i.

    The ranks form blocks of 2^i neighbours. In round i, two sibling blocks give each other their rows of the segments
    that reach beyond one block, so a segment of 2^n shards is complete after n rounds. Its branch is then computed,
    while the rows of the next round travel. Every round moves the same number of rows if, from each branch to the next,
    segment length and dilation rate double, and a head's tokens in the next branch are among its tokens in this one.
    The backward gets the buffer of all rows that the forward held, and returns their gradients through the same rounds
    in reverse order.
    """

    steps: tuple[Own, tuple[_Hop, ...]]

    @staticmethod
    def make(sharding: Sharding, rank: int, seal: int, device: torch.device) -> tuple[Own, tuple[_Hop, ...]]:
        """Return (own, hops), which describe the buffer of all rounds: this rank's rows, then each round's received
        message with its seal (see `Framing`)."""
        found = partition.crossings(sharding, rank)
        rounds = partition.doubling_rounds(sharding)
        held = partition.keys_of(sharding, partition.passed_on(sharding, rank, 0) if rounds else ())
        positions: Integers = np.arange(len(held))
        edge = len(held)
        own = Own.of(sharding, rank, held, positions, edge, device)

        hops = []
        for level in range(rounds):
            peer = rank ^ (1 << level)
            block = rank >> level << level
            sibling = block ^ (1 << level)
            mine = partition.keys_of(sharding, partition.passed_on(sharding, block, level))
            theirs = partition.keys_of(sharding, partition.passed_on(sharding, sibling, level))
            send = on_device(positions[locate(held, mine)], device)
            sent = Framing.of({peer: len(mine)}, seal)
            received = Framing.of({peer: len(theirs)}, seal)

            held = np.append(held, theirs)
            positions = np.append(positions, np.arange(edge, edge + len(theirs)))
            done = [crossing for crossing in found if partition.doubling_level(sharding, crossing.branch) == level + 1]
            gathers = gathers_of(sharding, rank, held, positions, device, found=done)
            hops.append(_Hop(send, sent, received, edge, edge + received.rows, gathers))
            edge += received.rows
        return own, tuple(hops)

    def _send(self, level: int, buffer: Tensor) -> Transfer | None:
        _, hops = self.steps
        if level == len(hops):
            return None
        hop = hops[level]
        message = buffer.new_empty(hop.sent.rows, *buffer.shape[1:])
        torch.index_select(buffer, 0, hop.send, out=message[: len(hop.send)])
        what = f"in forward's doubling round {level}"
        return self.link.swap(message, hop.sent, hop.received, what, buffer[hop.start : hop.stop])

    def forward(self, k: Tensor, v: Tensor, attend: Attend) -> Tensor:
        own, hops = self.steps
        buffer = k.new_empty(hops[-1].stop if hops else own.size, 2, k.shape[0], k.shape[3])
        transfer = self._send(0, own.pack(k, v, buffer))
        attend(Part(k, v, self.local))
        for level, hop in enumerate(hops):
            assert transfer is not None
            transfer.wait()
            transfer = self._send(level + 1, buffer)
            for gather in hop.gathers:
                attend(gather.part(*buffer.unbind(1)))
        return buffer

    def backward(self, k: Tensor, v: Tensor, saved: Tensor, attend: Attend) -> Gradients:
        own, hops = self.steps
        sums = torch.zeros(saved.shape, dtype=statistic(k.dtype), device=k.device)
        transfer: Transfer | None = None
        for level, hop in reversed(list(enumerate(hops))):
            for gather in hop.gathers:
                gather.scatter(attend(gather.part(*saved.unbind(1))), *sums.unbind(1))
            if transfer:
                send = hops[level + 1].send
                sums.index_add_(0, send, transfer.wait()[: len(send)])
            if level == 0:  # gradients of the farther rounds go before the local branches need room for theirs
                sums = sums[: hop.stop].clone()
            what = f"in backward's doubling round {level}"
            transfer = self.link.swap(sums[hop.start : hop.stop], hop.received, hop.sent, what)

        dk, dv = attend(Part(k, v, self.local))
        if transfer:
            send = hops[0].send
            sums.index_add_(0, send, transfer.wait()[: len(send)])
        own.add(sums[: own.size], dk, dv)
        return dk, dv
