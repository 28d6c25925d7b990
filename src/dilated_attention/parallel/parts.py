"""Make the parts in which one rank computes a call. A part is a plan with the keys and values that it reads: k and v of
the shard, or keys and values gathered from rows.

Rows lie in buffers, which hold the shard's own rows or received ones. A row is the key and the value of one token of
one KV head, `(2, batch, head_dim)`. A *slot* is a place in a part's key tensor, numbered row * heads + head. The tables
that say which buffer row goes to which slot are made once per sharding.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dilated_attention.parallel import block_partition, partition
from dilated_attention.parallel.block_partition import BlockProblem, BlockQueries, Interval
from dilated_attention.parallel.partition import Crossing, Integers, Remote, Sharding
from dilated_attention.plan import Plan


@dataclass(frozen=True)
class Part:
    """Hold one computation: the plan over keys and values `(batch, rows, heads, head_dim)`.

    Attributes:
        queries: the queries and their layout, if the queries are not simply all rows of the shard; else None.
        tokens: `(rows, heads)`, the global token of each key, for the key mask and dropout; None: the shard's tokens.
            Not read if `queries` is given: block layouts over a mesh have neither mask nor dropout.
    """

    keys: Tensor
    values: Tensor
    plan: Plan
    queries: BlockQueries | None = None
    tokens: Tensor | None = None


Gradients = tuple[Tensor, Tensor]
ForwardParts = Generator[Part, None, Tensor]
BackwardParts = Generator[Part, Gradients, Gradients]


def statistic(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients travel between ranks and are summed: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def on_device(table: Integers, device: torch.device) -> Tensor:
    return torch.from_numpy(table).to(device)


def locate(held: Integers, wanted: Integers) -> Integers:
    """Return the positions of the row keys `wanted` in `held`, a list of distinct row keys in any order.

    A row key is token * kv_heads + head.
    """
    order = np.argsort(held)
    where = order[np.searchsorted(held, wanted, sorter=order)]
    assert (held[where] == wanted).all()
    return where


def _keys_and_values(slots: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """View slots `(rows * heads, 2, batch, head_dim)` as keys and values, `(batch, rows, heads, head_dim)` each.

    Slot row * heads + head holds the key and the value of this row and head.
    """
    both = slots.unflatten(0, (-1, heads)).permute(2, 3, 0, 1, 4)
    return both[0], both[1]


def _slot_rows(gradients: Gradients) -> list[Tensor]:
    """Return the gradients of keys and of values by slot, `(rows * heads, batch, head_dim)` each.

    Slots are numbered as in `_keys_and_values`, which this reverses.
    """
    return [gradient.permute(1, 2, 0, 3).flatten(0, 1) for gradient in gradients]


@dataclass(frozen=True)
class Gather:
    """Say how a part's keys and values are made from a buffer of rows.

    A slot is a place in the part's key tensor, numbered row * heads + head.

    Attributes:
        index: the buffer row of each slot, int64; 0 for an empty slot.
        filled, holes: the slots that hold a row, and the empty ones; None if no slot is empty.
        tokens: `(rows, heads)`, the global token of each key.
        queries: the queries and their layout, if they are not simply all rows of the shard; else None.
    """

    plan: Plan
    index: Tensor
    filled: Tensor | None
    holes: Tensor | None
    tokens: Tensor
    queries: BlockQueries | None

    @classmethod
    def of(cls, remote: Remote, held: Integers, positions: Integers, device: torch.device) -> Gather:
        """Make the tables for a buffer whose row `positions[i]` has the row key `held[i]`, token * kv_heads + head."""
        heads = remote.plan.num_heads
        index, tokens = np.zeros((2, remote.rows * heads), dtype=np.int64)
        index[remote.slots], tokens[remote.slots] = positions[locate(held, remote.keys)], remote.keys // heads
        queries = remote.queries if isinstance(remote, BlockProblem) else None
        filled, empty = remote.slots, np.delete(np.arange(len(index)), remote.slots)
        return cls(
            remote.plan,
            on_device(index, device),
            on_device(filled, device) if len(empty) else None,
            on_device(empty, device) if len(empty) else None,
            on_device(tokens, device).view(-1, heads),
            queries,
        )

    @property
    def nbytes(self) -> int:
        tables = [x for x in (self.index, self.tokens, self.filled, self.holes) if x is not None]
        return self.plan.nbytes + sum([x.nbytes for x in tables]) + (self.queries.nbytes if self.queries else 0)

    def part(self, buffer: Tensor) -> Part:
        """Gather the part's keys and values from a buffer `(buffer rows, 2, batch, head_dim)`."""
        slots = buffer.index_select(0, self.index)
        if self.holes is not None:
            slots.index_fill_(0, self.holes, 0)
        return Part(*_keys_and_values(slots, self.plan.num_heads), self.plan, self.queries, self.tokens)

    def scatter(self, gradients: Gradients, sums: Tensor) -> None:
        """Add a part's (dk, dv) to `sums`, the gradients of the buffer's rows, in the dtype of `sums`."""
        index = self.index if self.filled is None else self.index[self.filled]
        for i, rows in enumerate(_slot_rows(gradients)):
            rows = rows if self.filled is None else rows[self.filled]
            sums[:, i].index_add_(0, index, rows.to(sums.dtype))


@dataclass(frozen=True)
class Own:
    """Say which of the shard's rows a buffer holds.

    The rank sends the buffer, or its own parts read it. It has `size` rows. Row `positions[i]` holds token `tokens[i]`
    of the shard and KV head `heads[i]`. Any other rows are room for seals or padding.
    """

    tokens: Tensor
    heads: Tensor
    positions: Tensor
    size: int

    @classmethod
    def of(
        cls, sharding: Sharding, rank: int, keys: Integers, positions: Integers, size: int, device: torch.device
    ) -> Own:
        tokens, heads = keys // sharding.num_heads - sharding.shard(rank)[0], keys % sharding.num_heads
        return cls(on_device(tokens, device), on_device(heads, device), on_device(positions, device), size)

    @property
    def nbytes(self) -> int:
        return 24 * len(self.tokens)

    def pack(self, k: Tensor, v: Tensor, out: Tensor | None = None) -> Tensor:
        """Write rows of k and v into `out`, or into a new buffer `(size, 2, batch, head_dim)`; return the buffer."""
        out = k.new_empty(self.size, 2, k.shape[0], k.shape[3]) if out is None else out
        for i, x in enumerate((k, v)):
            out[self.positions, i] = x[:, self.tokens, self.heads].transpose(0, 1)
        return out

    def add(self, returned: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Add the gradients that other ranks returned to dk and dv of the shard, which must be contiguous.

        `returned` is a buffer `(size, 2, batch, head_dim)` of (dk, dv). If the rows went to all ranks, it is one such
        buffer from each rank, one after another, and they are summed.
        """
        if len(returned) > self.size:
            returned = returned.unflatten(0, (-1, self.size)).sum(0)
        index = self.tokens * dk.shape[2] + self.heads
        for i, gradient in enumerate((dk, dv)):
            gradient.view(*gradient.shape[:1], -1, gradient.shape[3]).index_add_(
                1, index, returned[self.positions, i].transpose(0, 1)
            )


@dataclass(frozen=True)
class Feed:
    """Hold the rows of the shard that a rank puts into a buffer, and the parts that read a buffer.

    For rows that travel, `own` describes the buffer that is sent, and `gathers` read the one that is received from
    other ranks. Otherwise both mean the same buffer.
    """

    own: Own
    gathers: tuple[Gather, ...]

    @property
    def nbytes(self) -> int:
        return self.own.nbytes + sum([gather.nbytes for gather in self.gathers])

    def forward(self, rows: Tensor) -> Generator[Part, None, None]:
        for gather in self.gathers:
            yield gather.part(rows)

    def backward(self, rows: Tensor) -> Generator[Part, Gradients, Tensor]:
        """Yield the parts that read the buffer `rows`, take back each one's (dk, dv), and return their sums.

        The sums have the shape of `rows`, and the dtype that `statistic` returns.
        """
        sums = torch.zeros(rows.shape, dtype=statistic(rows.dtype), device=rows.device)
        for gather in self.gathers:
            gather.scatter((yield gather.part(rows)), sums)
        return sums


@dataclass(frozen=True)
class Local:
    """Hold the parts that a rank computes from its shard alone.

    Attributes:
        plan: the segments that lie in the shard; without block layouts, also the shard's own rows of crossing segments
            (those that the shard's edges cut).
        crossing: with block layouts, the block-sparse problems of those own rows, which read a buffer that the rank
            fills itself. Without block layouts it has no parts.
    """

    plan: Plan
    crossing: Feed

    @classmethod
    def of(cls, sharding: Sharding, rank: int, device: torch.device) -> Local:
        found = partition.crossings(sharding, rank) if sharding.layouts else ()
        problems = [block_partition.problem(sharding, rank, c, [sharding.shard(rank)], device) for c in found]
        held = block_partition.distinct([x.keys for x in problems if x])
        own = Own.of(sharding, rank, held, np.arange(len(held)), len(held), device)
        gathers = tuple([Gather.of(x, held, np.arange(len(held)), device) for x in problems if x])
        return cls(partition.local_plan(sharding, rank), Feed(own, gathers))

    @property
    def nbytes(self) -> int:
        return self.plan.nbytes + self.crossing.nbytes

    def forward(self, k: Tensor, v: Tensor) -> Generator[Part, None, None]:
        yield Part(k, v, self.plan)
        if self.crossing.gathers:
            yield from self.crossing.forward(self.crossing.own.pack(k, v))

    def backward(self, k: Tensor, v: Tensor) -> BackwardParts:
        """Yield the parts, take back each part's (dk, dv), and return their sums for the shard's rows, contiguous.

        The sums have the dtype that `statistic` returns.
        """
        dtype = statistic(k.dtype)
        dk, dv = ((x.to(dtype).contiguous()) for x in (yield Part(k, v, self.plan)))
        if self.crossing.gathers:
            self.crossing.own.add((yield from self.crossing.backward(self.crossing.own.pack(k, v))), dk, dv)
        return dk, dv


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
    among = among or (0, sharding.seq_len)
    found = partition.crossings(sharding, rank) if found is None else found
    lower, upper = sharding.shard(rank)
    parts: list[Remote | None]
    if sharding.layouts:
        sides = [(among[0], min(among[1], lower)), (max(among[0], upper), among[1])][: 1 if sharding.is_causal else 2]
        parts = [block_partition.problem(sharding, rank, crossing, sides, device) for crossing in found]
    else:
        wanted = [(c, [partition.clip(part, *among) for part in (c.before, c.after)]) for c in found]
        parts = [partition.remote(sharding, rank, wanted)]
    return tuple([Gather.of(part, held, positions, device) for part in parts if part and part.plan.groups])
