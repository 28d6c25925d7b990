"""Make the parts in which one rank computes a call. A part is a plan with the keys and values that it reads: k and v of
the shard, or keys and values gathered from rows.

Rows lie in buffers, which hold the shard's own rows or received ones. A row is the key and the value of one token of
one KV head, `(2, batch, head_dim)`. A *slot* is a place in a part's key tensor, numbered row * heads + head. The tables
that say which buffer row goes to which slot are made once per sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dilated_attention.parallel import block_partition, partition
from dilated_attention.parallel.block_partition import Interval
from dilated_attention.parallel.partition import BlockQueries, Crossing, Integers, Remote, Sharding
from dilated_attention.plan import Plan


@dataclass(frozen=True)
class Part:
    """Hold one computation: the plan over keys and values `(batch, rows, heads, head_dim)`.

    Attributes:
        queries: with a block layout, what the queries of a crossing segment see; else None.
        tokens: `(rows, heads or 1)`, the global token of each key, for the key mask, dropout and biases; None: the
            shard's tokens.
    """

    keys: Tensor
    values: Tensor
    plan: Plan
    queries: BlockQueries | None = None
    tokens: Tensor | None = None


Gradients = tuple[Tensor, Tensor]
Attend = Callable[[Part], Any]
"""A function that computes a part. In the backward it returns the part's (dk, dv)."""


def statistic(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients travel between ranks and are summed: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def on_device(table: Integers, device: torch.device) -> Tensor:
    return torch.from_numpy(table).to(device)


def locate(held: Integers, wanted: Integers) -> Integers:
    """Return the positions of the row keys `wanted` in `held`, a list of distinct row keys in any order."""
    order = np.argsort(held)
    where = order[np.searchsorted(held, wanted, sorter=order)]
    assert (held[where] == wanted).all()
    return where


def _shard_rows(k: Tensor, v: Tensor) -> list[Tensor]:
    """Return the keys and the values of the shard as rows `(tokens * kv_heads, batch, head_dim)`: views of what is
    contiguous."""
    return [x.flatten(1, 2).transpose(0, 1) for x in (k, v)]


@dataclass(frozen=True)
class Counted:
    """Base class of dataclasses whose size the plan cache counts, as the sum of their fields' sizes."""

    @property
    def nbytes(self) -> int:
        return sum([_nbytes(getattr(self, field.name)) for field in fields(self)])


def _nbytes(x: Any) -> int:
    if isinstance(x, dict):
        x = tuple(x.values())
    if isinstance(x, tuple):
        return sum([_nbytes(part) for part in x])
    return getattr(x, "nbytes", 0)


@dataclass(frozen=True)
class Gather(Counted):
    """Say how a part's keys and values are made from rows, `(rows, batch, head_dim)` for keys and for values.

    Attributes:
        index: the row of each slot, int64; 0 for an empty slot.
        filled, holes: the slots that hold a row, and the empty ones; None if no slot is empty.
        tokens, queries: as in `Part`.
    """

    plan: Plan
    index: Tensor
    filled: Tensor | None
    holes: Tensor | None
    tokens: Tensor
    queries: BlockQueries | None

    @classmethod
    def of(cls, remote: Remote, rows: Integers, device: torch.device) -> Gather:
        """Make the tables of a part whose key `remote.keys[i]` lies in row `rows[i]`."""
        heads = remote.plan.num_heads
        slots = remote.rows * heads
        index = np.zeros(slots, dtype=np.int64)
        index[remote.slots] = rows

        empty = np.delete(np.arange(slots), remote.slots)
        filled = None
        holes = None
        if len(empty):
            filled = on_device(remote.slots, device)
            holes = on_device(empty, device)

        if remote.queries is not None:
            tokens = remote.queries.tokens[:, None]
        else:
            of_slots = np.zeros(slots, dtype=np.int64)
            of_slots[remote.slots] = remote.keys // heads
            tokens = on_device(of_slots, device).view(-1, heads)
        return cls(remote.plan, on_device(index, device), filled, holes, tokens, remote.queries)

    def part(self, keys: Tensor, values: Tensor) -> Part:
        """Gather the part's keys and values from these rows."""
        slots = [x.index_select(0, self.index) for x in (keys, values)]
        if self.holes is not None:
            slots = [x.index_fill_(0, self.holes, 0) for x in slots]
        heads = self.plan.num_heads
        keys, values = (x.unflatten(0, (-1, heads)).permute(2, 0, 1, 3) for x in slots)
        return Part(keys, values, self.plan, self.queries, self.tokens)

    def scatter(self, gradients: Gradients, dk: Tensor, dv: Tensor) -> None:
        """Add a part's gradients to those of the rows."""
        index = self.index
        if self.filled is not None:
            index = index[self.filled]
        for x, total in zip(gradients, (dk, dv), strict=True):
            rows = x.permute(1, 2, 0, 3).flatten(0, 1)  # by slot
            if self.filled is not None:
                rows = rows[self.filled]
            total.index_add_(0, index, rows.to(total.dtype))


@dataclass(frozen=True)
class Own(Counted):
    """Say which of the shard's rows a buffer of `size` rows holds, which the rank sends.

    Row `positions[i]` holds row `index[i]` of the shard. Any other rows are room for seals or padding.
    """

    index: Tensor
    positions: Tensor
    size: int

    @classmethod
    def of(
        cls, sharding: Sharding, rank: int, keys: Integers, positions: Integers, size: int, device: torch.device
    ) -> Own:
        index = keys - sharding.shard(rank)[0] * sharding.num_heads
        return cls(on_device(index, device), on_device(positions, device), size)

    def pack(self, k: Tensor, v: Tensor, out: Tensor | None = None) -> Tensor:
        """Write rows of k and v into `out`, or into a new buffer `(size, 2, batch, head_dim)`; return the buffer."""
        if out is None:
            out = k.new_empty(self.size, 2, k.shape[0], k.shape[3])
        for i, rows in enumerate(_shard_rows(k, v)):
            out[:, i].index_copy_(0, self.positions, rows.index_select(0, self.index))
        return out

    def add(self, returned: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Add the gradients that other ranks returned to dk and dv of the shard, which must be contiguous.

        `returned` is a buffer `(size, 2, batch, head_dim)` of (dk, dv). If the rows went to all ranks, it is one such
        buffer from each rank, one after another, and they are summed.
        """
        if len(returned) > self.size:
            returned = returned.unflatten(0, (-1, self.size)).sum(0)
        for i, rows in enumerate(_shard_rows(dk, dv)):
            rows.index_add_(0, self.index, returned[:, i].index_select(0, self.positions))


def gathers_of(
    sharding: Sharding,
    rank: int,
    held: Integers,
    positions: Integers,
    device: torch.device,
    among: Interval | None = None,
    found: Sequence[Crossing] | None = None,
) -> tuple[Gather, ...]:
    """Return a `Gather` for each part that reads other ranks' rows of crossing segments.

    Args:
        held, positions: the row keys (token * kv_heads + head) that the buffer holds, and the buffer row of each.
        among: the tokens [start, stop) whose rows are attended; default: all.
        found: the crossing segments; default: all of the rank's.
    """
    if among is None:
        among = (0, sharding.seq_len)
    if found is None:
        found = partition.crossings(sharding, rank)
    start, stop = among
    parts: list[Remote | None]
    if sharding.layouts:
        lower, upper = sharding.shard(rank)
        sides = [(start, min(stop, lower))]
        if not sharding.is_causal:
            sides.append((max(start, upper), stop))
        parts = [block_partition.problem(sharding, rank, crossing, sides, device) for crossing in found]
    else:
        wanted = []
        for crossing in found:
            before = partition.clip(crossing.before, start, stop)
            after = partition.clip(crossing.after, start, stop)
            wanted.append((crossing, (before, after)))
        parts = [partition.remote(sharding, rank, wanted)]

    some = [part for part in parts if part and part.plan.groups]
    return tuple([Gather.of(part, positions[locate(held, part.keys)], device) for part in some])
