"""Forecast the shares of a query block, from the estimate of the block before and from what earlier tokens have
seen."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention.ranking import stable_topk
from dilated_attention.routing.estimates import Sample, shares
from dilated_attention.routing.grid import Candidates, Keys, Queries, ranked

FORECAST_PRIOR = 0.5, 0.25, 0.25
FORECAST_RATE = 4.0
FORECAST_ROWS = 8  # query blocks from block 2^n to block 2^(n+1) of which some tokens' softmax is computed
FORECAST_TOKENS = 4  # tokens of such a block
FORECAST_STRIDE = 8  # of the keys that they see
FORECAST_GROUP = 8  # of those blocks whose tokens see the same keys; a power of two
GOLDEN = (5**0.5 - 1) / 2


class Forecast:
    """Correct causal estimates, which describe the block before, by what earlier tokens have seen.

    Call it once over all rows, in order. For the query blocks in `sampled`, the softmax of a few tokens is computed; a
    row uses the first `known` of these blocks, those that lie before it.

    Attributes:
        seen: the mean share that these tokens gave to each key block that the row may choose.
        distant: the mean share over the first 0, 1, ... sampled blocks, by distance. Distance is counted back from the
            last block that a row may choose.
    """

    def __init__(self, q: Queries, k: Keys, grid: Candidates, *, group: bool = False) -> None:
        self.grid = grid
        sampled = [i for i in range(1, grid.rows - 1) if i % max(1, 2 ** (i.bit_length() - 1) // FORECAST_ROWS) == 0]
        seen = sampled_shares(q, k, sampled, grid)
        if group:
            seen = seen.unflatten(1, (k.shape[2], -1)).mean(2)
        self.sampled = torch.tensor(sampled, dtype=torch.long, device=grid.device)
        self.known = torch.searchsorted(self.sampled, torch.arange(grid.rows, device=grid.device))
        may = grid.allowed[self.sampled]
        self.seen = seen.masked_fill_(~may, 0.0)
        reached = torch.arange(grid.columns, device=grid.device) < may.sum(-1, keepdim=True)
        mean = self._turned(self.seen, may).cumsum(2) / reached.cumsum(0).clamp(min=1)
        self.distant = F.pad(mean, (0, 0, 1, 0))
        prior = seen.new_tensor(FORECAST_PRIOR).log() / FORECAST_RATE
        self.held = prior[:, None, None].expand(-1, *seen.shape[:2])

    def __call__(self, at: slice, share: Tensor, counts: Tensor) -> Tensor:
        """Return the corrected shares of the rows `at`.

        Args:
            share: the estimated shares of these rows, (B, H, rows, columns).
            counts: how many blocks each row lists, (…, rows).
        """
        may, known = self.grid.allowed[at], self.known[at]
        moved = F.pad(share, (1, -1)).masked_fill_(~may, 0.0)
        distant = self._turned(self.distant[:, :, known], may)
        forecasts = share, moved, distant
        # what the lists of each would have held of the tokens seen inside these rows
        first, last = int(known[0]), int(torch.searchsorted(self.sampled, at.stop))
        inside = self.sampled[first:last] - at.start
        counts = counts.expand(share.shape[:3])[:, :, inside]
        order = torch.stack([x[:, :, inside] for x in forecasts])
        _, lists = stable_topk(
            ranked(order, may[inside], self.grid.always[at][inside]), int(counts.max()) if len(inside) else 0
        )
        listed = torch.arange(lists.shape[-1], device=lists.device) < counts[..., None]
        seen = self.seen[:, :, first:last].expand(3, -1, -1, -1, -1)
        held = (seen.gather(-1, lists) * listed).sum(-1)
        held = torch.cat([self.held[..., None], held], -1).cumsum(-1)  # before the first, after it, after the next, ...
        self.held = held[..., -1]
        weight = (FORECAST_RATE * held).softmax(0)[..., known - first]  # (3, B, H, rows)
        mixed = torch.zeros_like(share)
        for x, part in zip(forecasts, weight, strict=True):
            mixed.addcmul_(x, (part / x.sum(-1).clamp_(min=torch.finfo(share.dtype).tiny))[..., None])
        return mixed

    @staticmethod
    def _turned(x: Tensor, may: Tensor) -> Tensor:
        """Reorder (…, rows, columns) from key blocks to distances from the last block that a row may choose, or back.

        Entries without a block are 0.
        """
        at = may.sum(-1, keepdim=True) - 1 - torch.arange(may.shape[-1], device=may.device)
        return x.gather(-1, at.clamp(min=0).expand(x.shape)).masked_fill_(at < 0, 0.0)


def sampled_shares(q: Tensor, k: Tensor, sampled: Sequence[int], grid: Candidates) -> Tensor:
    """Return the causal softmax of some tokens of each sampled block over some keys, by key block.

    It is averaged over the tokens: (B, H, sampled blocks, columns).
    """
    batch, _, heads, _ = q.shape
    stride = math.gcd(FORECAST_STRIDE, grid.k_block)
    # tokens at other places of each block, and other keys for each group of blocks
    places = [[(i * GOLDEN + part / FORECAST_TOKENS) % 1 for part in range(FORECAST_TOKENS)] for i in sampled]
    tokens = [
        sorted(i * grid.q_block + int(x * grid.q_block) for x in at) for i, at in zip(sampled, places, strict=True)
    ]
    weight = torch.full((len(sampled), FORECAST_TOKENS), 1 / FORECAST_TOKENS, dtype=grid.dtype, device=q.device)
    found = [torch.zeros(batch, heads, 0, grid.columns, dtype=grid.dtype, device=q.device)]
    for start in range(0, len(tokens), FORECAST_GROUP):
        token = torch.tensor(tokens[start : start + FORECAST_GROUP], device=q.device)
        first = start // FORECAST_GROUP % stride
        seen = (token - first) // stride + 1  # the keys first, first + stride, ... up to the token
        sample = Sample(
            q[:, token.flatten()], weight[: len(token)], k[:, first::stride], grid.k_block // stride, grid.scale
        )
        found += [share for _, share in shares(sample, seen.clamp(min=0), grid.columns)]
    return torch.cat(found, 2)
