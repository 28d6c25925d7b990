"""Choose the key blocks that the queries of a layer see."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dilated_attention.layout import BlockLayout
from dilated_attention.layout.spans import BlockGrid
from dilated_attention.ranking import slices, stable_topk
from dilated_attention.routing.operator import choosers, in_graph


def largest_blocks(
    importance: Float[Tensor, "*lists queries blocks"],
    own: Int[Tensor, " queries"],
    number: int,
    *,
    local: int,
    first: bool,
) -> Int[Tensor, "*lists queries chosen"]:
    """Return the indices of each query's `number` most important blocks up to its own; -1 where it sees fewer.

    Among equally important blocks the first ones are taken. The last `local` blocks up to the query's own, and with
    `first` block 0, are taken before all others. The result lists these first, then the others from the most important
    to the least; the -1 come last. It has min(`number`, blocks) entries per query.

    `own`: the block in which each query lies.
    """
    block = torch.arange(importance.shape[-1], device=importance.device)
    own = own[:, None]
    always = block > own - local
    if first:
        always = always | (block == 0)
    ranked = importance.masked_fill(always, torch.inf).masked_fill(block > own, -torch.inf)
    indices = stable_topk(ranked, min(number, len(block)))[1]
    return indices.masked_fill(indices > own, -1)


@dataclass(frozen=True)
class BlockChoice:
    """Choose for each query the `number` blocks that are most important to it, up to its own.

    Every `query_block`-th token chooses, and the tokens up to the next one that does see the same blocks. A subclass
    defines `importance`, and whether a query has a list of blocks per KV head or per query head.

    Attributes:
        block_size: the number of tokens per block.
        number, local, first: as in `largest_blocks`.
    """

    block_size: int
    query_block: int
    number: int
    local: int = 1
    first: bool = False
    per_kv_head: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        choosers[cls.__name__] = partial(_layout, cls)

    def importance(self, q: Tensor, start: int, key: Tensor, blocks: int) -> Tensor:
        """Return how important key blocks 0 … `blocks` - 1 are to these queries, `(batch, lists, queries, blocks)`.

        q: the queries of tokens `start`, `start + query_block`, and so on. key: the pooled keys, `(batch, rows,
        kv_heads, head_dim)`, one row for each run of tokens that the layer pools, such as a block.
        """
        raise NotImplementedError

    def lists(self, q: Tensor, key: Tensor) -> int:
        return (key if self.per_kv_head else q).shape[2]

    @torch.no_grad()
    def blocks(
        self,
        q: Float[Tensor, "batch queries heads head_dim"],
        start: int,
        key: Float[Tensor, "batch rows kv_heads head_dim"],
    ) -> Int[Tensor, "batch lists queries chosen"]:
        """Return the blocks that these queries see, filled up with -1. Arguments are as in `importance`."""
        queries, step = q.shape[1], self.query_block
        blocks = (start + (queries - 1) * step) // self.block_size + 1
        own = torch.arange(start, start + queries * step, step, device=q.device) // self.block_size
        chosen = []
        for at in slices(0, queries, q.shape[0] * q.shape[2] * max(blocks, key.shape[1])):
            importance = self.importance(q[:, at], start + at.start * step, key, blocks)
            chosen.append(largest_blocks(importance, own[at], self.number, local=self.local, first=self.first))
        return torch.cat(chosen, 2)

    def layout(self, chosen: Tensor, seq_len: int) -> BlockLayout:
        """Return the causal layout in which each run of `query_block` queries sees its `chosen` blocks (`blocks`).

        The queries of block i see min(i + 1, blocks per list) blocks.
        """
        runs, most, each = chosen.shape[2], chosen.shape[3], self.block_size // self.query_block
        ordered = chosen.sort(-1).values  # -1 first
        fewer = [ordered[:, :, i * each : (i + 1) * each, most - 1 - i :].flatten(2) for i in range(most - 1)]
        indices = torch.cat([*fewer, ordered[:, :, max(0, most - 1) * each :].flatten(2)], 2)
        counts = (torch.arange(runs, device=chosen.device) // each + 1).clamp(max=most)
        grid = BlockGrid.of(seq_len, (self.query_block, self.block_size), True)
        return BlockLayout._of(grid, (counts.expand(chosen.shape[:3]), indices.flatten()))

    def in_graph(self, q: Tensor, key: Tensor) -> BlockLayout:
        """Return the layout for the queries of all tokens, in a graph, which gets one operator for any length."""
        options = {"block_size": (self.query_block, self.block_size), "is_causal": True}
        options |= {"per_kv_head": self.per_kv_head, "choice": asdict(self)}
        return in_graph(type(self).__name__, q, key, None, None, None, options)


def _layout(kind: type[BlockChoice], q: Tensor, key: Tensor, *, choice: dict[str, Any], **_: Any) -> BlockLayout:
    chooses = kind(**choice)
    return chooses.layout(chooses.blocks(q[:, :: chooses.query_block], 0, key), q.shape[1])
