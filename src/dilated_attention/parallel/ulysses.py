"""Exchange heads instead of tokens (Ulysses, Jacobs et al. 2023, arXiv:2309.14509)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from dilated_attention import execution
from dilated_attention.bias import Source
from dilated_attention.call import Call
from dilated_attention.parallel.comm import Link
from dilated_attention.parallel.partition import Sharding


class Ulysses:
    """Exchange heads: each rank computes all tokens of an equal number of heads, as one device does (`call`).

    A row of a message holds one token's data for all heads of one rank: q, k and v; or out and lse. In its methods,
    `what` names the phase of a transfer, as in `Link`.
    """

    def __init__(self, link: Link, sharding: Sharding, call: Call, num_heads: int) -> None:
        self.link = link
        self.counts = [stop - start for start, stop in pairwise(sharding.bounds)]
        heads = num_heads // link.size
        kv_heads = sharding.num_heads // link.size
        self.widths = (heads, kv_heads, kv_heads, heads)  # of q, k, v and out

        columns = slice(link.rank * kv_heads, (link.rank + 1) * kv_heads)
        offsets = tuple([row[columns] for row in sharding.branches.offsets])
        mine = range(link.rank * heads, (link.rank + 1) * heads)
        layouts = []
        for layout in sharding.layouts:
            if layout.num_heads > 1:
                layout = layout.select(heads=mine)
            layouts.append(layout)
        cu_seqlens = None
        if sharding.samples is not None:
            cu_seqlens = torch.tensor(sharding.samples)
        self.call = call.but(
            branches=sharding.branches._replace(offsets=offsets), layouts=tuple(layouts), shards=None, problems={},
            cu_seqlens=cu_seqlens, first_head=call.first_head + mine.start, bias_head=mine.start,
        )  # fmt: skip

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """Return out and lse of the shard, and two flat tensors for `backward`."""
        q, k, v = self.scatter_heads([q, k, v], "in forward's exchange of heads")
        whole_out, whole_lse = execution.forward(self.call, q, k, v)
        out, lse = self.gather_heads([whole_out, whole_lse], "in forward's return of heads")
        saved = torch.cat([x.flatten() for x in (q, k, v, whole_out)])
        return [out.contiguous(), lse.contiguous(), saved, whole_lse.flatten()]

    def backward(
        self, source: Source | None, dout: Tensor, dlse: Tensor, saved: Tensor, saved_lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) of the shard; `saved` and `saved_lse` are what `forward` returned last. Add to the sums
        of `source`, as `execution.backward` does."""
        dout, dlse = self.scatter_heads([dout, dlse], "in backward's exchange of heads")
        shapes = [torch.Size((*dout.shape[:2], width, dout.shape[3])) for width in self.widths]
        pieces = saved.split([shape.numel() for shape in shapes])
        q, k, v, out = (piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True))
        results = [out, saved_lse.view(dlse.shape)]
        gradients = execution.backward(self.call, source, dout, dlse, q, k, v, results)
        dq, dk, dv = self.gather_heads(gradients, "in backward's return of heads")
        return dq.contiguous(), dk.contiguous(), dv.contiguous()

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
