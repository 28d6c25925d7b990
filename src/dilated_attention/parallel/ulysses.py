"""Exchange heads instead of tokens (Ulysses, Jacobs et al. 2023, arXiv:2309.14509)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from dilated_attention.cache import plan_cache
from dilated_attention.parallel import partition
from dilated_attention.parallel.comm import Link
from dilated_attention.parallel.partition import Sharding


class Ulysses:
    """Exchange heads: each rank computes all tokens of an equal number of heads, in one call of the backend.

    A row of a message holds one token's data for all heads of one rank: q, k and v; or out and lse. In its methods,
    `what` names the phase of a transfer, as in `Link`.
    """

    def __init__(self, link: Link, sharding: Sharding, num_heads: int) -> None:
        self.link = link
        self.counts = [stop - start for start, stop in pairwise(sharding.bounds)]
        heads = num_heads // link.size
        kv_heads = sharding.num_heads // link.size
        self.widths = (heads, kv_heads, kv_heads, heads)  # of q, k, v and out

        columns = slice(link.rank * kv_heads, (link.rank + 1) * kv_heads)
        offsets = tuple([row[columns] for row in sharding.branches.offsets])
        branches = sharding.branches._replace(offsets=offsets)
        whole = replace(sharding, branches=branches, bounds=(0, sharding.seq_len), layouts=())
        self.plan = plan_cache.of(partition.local_plan, whole, 0)

        mine = range(link.rank * heads, (link.rank + 1) * heads)
        self.layouts = {}
        for layout in sharding.layouts:
            if layout.num_heads > 1:
                layout = layout.select(heads=mine)
            self.layouts[layout.seq_len] = layout

    def scatter_heads(self, tensors: Sequence[Tensor], what: str) -> list[Tensor]:
        """Give each rank all tokens of its heads: `(batch, shard, heads, ...)` to `(batch, seq, heads / size, ...)`."""
        size = self.link.size
        shard = self.counts[self.link.rank]
        rows = [x.unflatten(2, (size, -1)).permute(2, 1, 0, *range(3, x.dim() + 1)).flatten(0, 1) for x in tensors]
        arrived = self._exchange(rows, [shard] * size, self.counts, what)
        return [x.transpose(0, 1) for x in arrived]

    def gather_heads(self, tensors: Sequence[Tensor], what: str) -> list[Tensor]:
        """Reverse `scatter_heads`: turn `(batch, seq, heads / size, ...)` into `(batch, shard, heads, ...)`."""
        size = self.link.size
        shard = self.counts[self.link.rank]
        arrived = self._exchange([x.transpose(0, 1) for x in tensors], self.counts, [shard] * size, what)
        return [x.unflatten(0, (size, shard)).permute(2, 1, 0, *range(3, x.dim() + 1)).flatten(2, 3) for x in arrived]

    def _exchange(self, rows: Sequence[Tensor], leaving: list[int], arriving: list[int], what: str) -> list[Tensor]:
        """Pack rows of several tensors, `(rows, ...)`, side by side, exchange them, and return those that arrive.

        `leaving`, `arriving`: the number of rows to and from each rank, as in `Link.moved`.
        """
        # A view of bytes requires strides that follow from the shape, also in dimensions of size 1.
        packed = partial(torch.clone, memory_format=torch.contiguous_format)
        message = torch.cat([packed(x).flatten(1).view(torch.uint8) for x in rows], 1)
        widths = [x.shape[1:].numel() * x.element_size() for x in rows]
        parts = self.link.moved(message, leaving, arriving, what).split(widths, 1)
        return [packed(y).view(x.dtype).unflatten(1, x.shape[1:]) for x, y in zip(rows, parts, strict=True)]
