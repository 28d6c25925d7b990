"""Compute one rank's share of a call in parts. A part is a plan over keys and values that were gathered from rows.

Rows lie in buffers: one for the shard's own rows, others for received rows. A row is the key and the value of one
token of one KV head, `(2, batch, head_dim)`. The tables that say which row goes where are made once per sharding.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dilated_attention.layout import BlockLayout
from dilated_attention.parallel import block_partition, partition
from dilated_attention.parallel.block_partition import BlockProblem, Interval
from dilated_attention.parallel.partition import Crossing, Integers, Remote, Sharding
from dilated_attention.plan import Plan, plan_dilated


@dataclass(frozen=True)
class BlockQueries:
    """Hold the queries of a block-sparse part: a sequence of `layout.seq_len` rows, some of which belong to the shard.

    Attributes:
        tokens, positions: the shard's tokens, and their rows in the sequence; the other rows have no query.
        heads: KV heads.
        hidden: bool `(rows,)`, True where no query sees a key, or None.
    """

    layout: BlockLayout
    tokens: Tensor
    positions: Tensor
    heads: tuple[int, ...]
    hidden: Tensor | None


@dataclass(frozen=True)
class Part:
    """Hold one computation: the plan over keys and values `(batch, rows, heads, head_dim)`.

    Attributes:
        queries: the queries and their layout, if the queries are not simply all rows of the shard; else None.
        tokens: the token in the whole sequence of each row and head of the keys; None: the shard's tokens.
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
    """Return the dtype in which gradients of one row from several ranks travel and are summed."""
    return torch.promote_types(dtype, torch.float32)


def locate(held: Integers, wanted: Integers) -> Integers:
    """Return the positions of the row keys `wanted` in `held`, a list of distinct row keys in any order."""
    order = np.argsort(held)
    where = order[np.searchsorted(held, wanted, sorter=order)]
    assert (held[where] == wanted).all()
    return where


@dataclass(frozen=True)
class Gather:
    """Say how a remote plan's key tensor is made from a buffer of rows.

    Attributes:
        index: the buffer row of each slot; 0 where no group reads the slot.
        rows: the buffer row of each filled slot; slots: which slots those are, None for all.
        tokens: the token of each slot, `(slots / heads, heads)`.
    """

    plan: Plan
    heads: int
    index: Tensor
    rows: Tensor
    slots: Tensor | None
    tokens: Tensor

    @classmethod
    def of(cls, remote: Remote, held: Integers, positions: Integers, device: torch.device) -> Gather | None:
        """Make a Gather for a buffer that holds the row keys `held` in rows `positions`; None if the remote plan is
        empty."""
        if not remote.plan.groups:
            return None
        rows = positions[locate(held, remote.keys)]
        index = np.zeros(remote.rows * remote.plan.num_heads, dtype=np.int64)
        index[remote.slots] = rows
        tokens = np.zeros_like(index)
        tokens[remote.slots] = remote.keys // remote.plan.num_heads
        full = len(remote.slots) == len(index)
        table, slots = on_device(index, device), None if full else on_device(remote.slots, device)
        filled, heads = table if full else on_device(rows, device), remote.plan.num_heads
        return cls(remote.plan, heads, table, filled, slots, on_device(tokens, device).view(-1, heads))

    @property
    def nbytes(self) -> int:
        return 8 * (2 * len(self.index) + len(self.rows)) + self.plan.nbytes

    def part(self, buffer: Tensor) -> Part:
        """Return the keys and values in a buffer `(buffer rows, 2, batch, head_dim)`."""
        return Part(*_keys_and_values(buffer.index_select(0, self.index), self.heads), self.plan, None, self.tokens)

    def scatter(self, gradients: Gradients, sums: Tensor) -> None:
        """Add a part's (dk, dv) to the gradients of the buffer's rows, in the dtype of these gradients."""
        for i, rows in enumerate(_slot_rows(gradients)):
            rows = rows if self.slots is None else rows[self.slots]
            sums[:, i].index_add_(0, self.rows, rows.to(sums.dtype))


def _keys_and_values(slots: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """View slots `(rows * heads, 2, batch, head_dim)` as keys and values, `(batch, rows, heads, head_dim)` each."""
    both = slots.unflatten(0, (-1, heads)).permute(2, 3, 0, 1, 4)
    return both[0], both[1]


def _slot_rows(gradients: Gradients) -> list[Tensor]:
    """Return the gradients of keys and of values as slots, `(rows * heads, batch, head_dim)` each.

    This is the reverse of `_keys_and_values`.
    """
    return [gradient.permute(1, 2, 0, 3).flatten(0, 1) for gradient in gradients]


@dataclass(frozen=True)
class BlockGather:
    """Say how the keys and values of a block-sparse part are made from a buffer: `slots[i]` takes the buffer row
    `rows[i]`."""

    plan: Plan
    queries: BlockQueries
    slots: Tensor
    rows: Tensor

    @classmethod
    def of(cls, problem: BlockProblem, rows: Integers, device: torch.device) -> BlockGather:
        plan = _square_plan(problem)
        return cls(plan, _queries(problem, device), on_device(problem.slots, device), on_device(rows, device))

    @property
    def nbytes(self) -> int:
        return 16 * len(self.rows) + 16 * len(self.queries.tokens) + self.queries.layout.nbytes + self.plan.nbytes

    def part(self, buffer: Tensor) -> Part:
        """Return the keys and values in a buffer `(buffer rows, 2, batch, head_dim)`."""
        size = self.queries.layout.seq_len * len(self.queries.heads)
        filled = buffer.new_zeros(size, *buffer.shape[1:])
        filled[self.slots] = buffer[self.rows]
        return Part(*_keys_and_values(filled, len(self.queries.heads)), self.plan, self.queries)

    def scatter(self, gradients: Gradients, sums: Tensor) -> None:
        """Add a part's (dk, dv) to the gradients of the buffer's rows, in the dtype of these gradients."""
        for i, rows in enumerate(_slot_rows(gradients)):
            sums[:, i].index_add_(0, self.rows, rows[self.slots].to(sums.dtype))


def _queries(problem: BlockProblem, device: torch.device) -> BlockQueries:
    hidden = None if problem.hidden is None else on_device(problem.hidden, device)
    tokens, positions = on_device(problem.tokens, device), on_device(problem.positions, device)
    return BlockQueries(problem.layout.to(device), tokens, positions, problem.heads, hidden)


def _square_plan(problem: BlockProblem) -> Plan:
    """Return a plan of one segment with all rows and all heads."""
    return plan_dilated((problem.layout.seq_len,), (1,), ((0,) * len(problem.heads),), problem.layout.seq_len)


@dataclass(frozen=True)
class Own:
    """Say which of the shard's rows a buffer holds.

    Row `positions[i]` of the buffer, which has `size` rows, holds token `tokens[i]` and KV head `heads[i]`.
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
        """Return the buffer of rows `(size, 2, batch, head_dim)`."""
        out = k.new_empty(self.size, 2, k.shape[0], k.shape[3]) if out is None else out
        for i, x in enumerate((k, v)):
            out[self.positions, i] = x[:, self.tokens, self.heads].transpose(0, 1)
        return out

    def add(self, returned: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Add returned gradients, a buffer of rows, to the shard's gradients, contiguous.

        A row may have gone to several ranks.
        """
        index = self.tokens * dk.shape[2] + self.heads
        for i, gradient in enumerate((dk, dv)):
            gradient.view(*gradient.shape[:1], -1, gradient.shape[3]).index_add_(
                1, index, returned[self.positions, i].transpose(0, 1)
            )


@dataclass(frozen=True)
class Local:
    """Hold the parts that need no other rank: a plan of whole segments, and block-sparse problems over the shard's
    rows."""

    plan: Plan
    problems: tuple[tuple[BlockQueries, Own], ...]

    @classmethod
    def of(cls, sharding: Sharding, rank: int, device: torch.device) -> Local:
        problems = []
        if sharding.layouts:
            for crossing in partition.crossings(sharding, rank):
                if problem := block_partition.problem(sharding, rank, crossing, [sharding.shard(rank)]):
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
        """Compute the shard's part of (dk, dv), in the dtype in which gradients are summed, contiguous."""
        dtype = statistic(k.dtype)
        dk, dv = ((x.to(dtype).contiguous()) for x in (yield Part(k, v, self.plan)))
        for queries, own in self.problems:
            rows = _slot_rows((yield self._part(queries, own, k, v)))
            own.add(torch.stack(rows, 1).to(dtype), dk, dv)
        return dk, dv


Gathers = tuple[Gather | BlockGather, ...]


def gathers_of(
    sharding: Sharding,
    rank: int,
    found: Sequence[Crossing],
    tokens: Interval,
    held: Integers,
    positions: Integers,
    device: torch.device,
) -> Gathers:
    """Return the gathers for the parts that attend to other ranks' rows among `tokens`.

    The buffer holds the row keys `held` in rows `positions`.
    """
    if not sharding.layouts:
        wanted_rows = [(c, [partition.clip(part, *tokens) for part in (c.before, c.after)]) for c in found]
        remote = partition.remote(sharding, rank, wanted_rows)
        gather = Gather.of(remote, held, positions, device)
        return () if gather is None else (gather,)
    lower, upper = sharding.shard(rank)
    others = [(tokens[0], min(tokens[1], lower)), (max(tokens[0], upper), tokens[1])]
    wanted = [(start, stop) for start, stop in others[: 1 if sharding.is_causal else 2] if start < stop]
    gathers = []
    for crossing in found:
        if problem := block_partition.problem(sharding, rank, crossing, wanted):
            gathers.append(BlockGather.of(problem, positions[locate(held, problem.keys)], device))
    return tuple(gathers)


def on_device(table: Integers, device: torch.device) -> Tensor:
    return torch.from_numpy(table).to(device)
