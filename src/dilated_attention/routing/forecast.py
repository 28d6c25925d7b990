"""Forecast the shares of a query block, from the estimate of the block before and from what earlier tokens have
seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention.kernels.cpu import estimates as compiled
from dilated_attention.ranking import stable_topk
from dilated_attention.routing.estimates import Sample, shares
from dilated_attention.routing.grid import Candidates, Keys, Queries, is_compiled, ranked

FORECAST_PRIOR = 0.5, 0.25, 0.25
FORECAST_RATE = 4.0
FORECAST_ROWS = 8  # how many query blocks from block 2^n to block 2^(n+1) are sampled
FORECAST_TOKENS = 4  # sampled tokens per such block, whose softmax is computed
FORECAST_STRIDE = 8  # distance of the keys that they see
FORECAST_GROUP = 8  # consecutive sampled blocks whose tokens see the same keys; a power of two
GOLDEN = (5**0.5 - 1) / 2


class Forecast:
    """Forecast each query block's shares of the key blocks, from causal estimates that describe the block before it.

    The forecast mixes three: the estimate, the estimate moved on by one key block, and the mean of what earlier sampled
    rows (query blocks) have seen at each distance from the last key block that a row may choose. To weigh the three,
    each alone chooses lists for the earlier sampled rows. The more of these rows' softmax falls on its lists, the
    greater is its weight.

    Call the object on consecutive slices of rows, in order, from the first row to the last: it updates the weights.

    Attributes:
        sampled: the rows (query blocks) of which the softmax of a few tokens is computed.
        seen: these tokens' mean share of each key block, `(B, lists, sampled, columns)`; 0 where the row may not choose
            the block. The forecast of a row uses those of earlier rows only.
        held: `(B, lists, 3)`, for each of the three the sum of `seen` over its lists so far, plus log(FORECAST_PRIOR) /
            FORECAST_RATE. The weights are softmax(FORECAST_RATE * held); they start at FORECAST_PRIOR.
    """

    def __init__(self, q: Queries, k: Keys, grid: Candidates) -> None:
        self.grid = grid
        sampled, self.sampled, may = grid.once("sampled", _sampled)
        seen = grid.by_list(sampled_shares(q, k, sampled, grid))
        self.seen = seen.masked_fill_(~may, 0.0)
        prior = [math.log(weight) / FORECAST_RATE for weight in FORECAST_PRIOR]
        self.held = seen.new_tensor(prior).repeat(*seen.shape[:2], 1)

    def __call__(self, at: slice, share: Tensor, counts: Tensor) -> Tensor:
        """Return the forecast shares of the rows (query blocks) `at`, and update the weights. `share`, (B, H, rows,
        columns): their estimates, may be overwritten. `counts`, (…, rows): how many blocks each row will list."""
        grid = self.grid
        counts = counts.expand(share.shape[:3])
        if is_compiled(share, self.seen):
            share = share.contiguous()
            compiled.forecast(share, self.seen, self.sampled, counts, grid.bounds, at, self.held, FORECAST_RATE)
            return share

        known = torch.searchsorted(self.sampled, torch.arange(at.start, at.stop, device=grid.device))
        moved = F.pad(share, (1, -1)).masked_fill_(~grid.allowed[at], 0.0)
        forecasts = torch.stack([share, moved, self._turned(self.distant[:, :, known], grid.allowed[at])])

        # what the lists of each would have held of the tokens seen inside these rows
        first = int(known[0])
        last = int(torch.searchsorted(self.sampled, at.stop))
        rows = self.sampled[first:last]
        inside = rows - at.start
        order = ranked(forecasts[..., inside, :], grid.allowed[rows], grid.always[rows])
        counts = counts[..., inside]
        most = 0
        if len(inside):
            most = int(counts.max())
        _, lists = stable_topk(order, most)
        listed = torch.arange(lists.shape[-1], device=lists.device) < counts[..., None]
        seen = self.seen[:, :, first:last].expand(3, -1, -1, -1, -1)
        held = (seen.gather(-1, lists) * listed).sum(-1)
        held = torch.cat([self.held.movedim(-1, 0)[..., None], held], -1).cumsum(-1)  # before the first, after it, ...
        self.held = held[..., -1].movedim(0, -1)

        weight = (FORECAST_RATE * held).softmax(0)[..., known - first]  # (3, B, H, rows)
        weight /= forecasts.sum(-1).clamp_(min=torch.finfo(share.dtype).tiny)
        return (forecasts * weight[..., None]).sum(0)

    @cached_property
    def distant(self) -> Tensor:
        """Return (B, H, sampled + 1, columns): entry n is the mean of `seen` over the first n sampled rows, by distance
        from the last block that a row may choose."""
        may = self.grid.allowed[self.sampled]
        reached = torch.arange(self.grid.columns, device=self.grid.device) < may.sum(-1, keepdim=True)
        mean = self._turned(self.seen, may).cumsum(2) / reached.cumsum(0).clamp(min=1)
        return F.pad(mean, (0, 0, 1, 0))

    @staticmethod
    def _turned(x: Tensor, may: Tensor) -> Tensor:
        """Reorder x (…, rows, columns) from key blocks to distances from the last block that a row may choose (`may`,
        (rows, columns)), or back. Entries without a block are 0."""
        at = may.sum(-1, keepdim=True) - 1 - torch.arange(may.shape[-1], device=may.device)
        return x.gather(-1, at.clamp(min=0).expand(x.shape)).masked_fill_(at < 0, 0.0)


def sampled_shares(q: Tensor, k: Tensor, sampled: Sequence[int], grid: Candidates) -> Tensor:
    """Return a sample of the causal softmax, summed by key block: (B, H, sampled blocks, columns).

    For each query block in `sampled` it is the mean over FORECAST_TOKENS (4) of the block's tokens, each of which sees
    every eighth key up to itself. The first key, which may hold most of the softmax (an attention sink), always takes
    part and counts once; each other key that takes part counts eight times. If 8 does not divide k_block, their
    greatest common divisor replaces 8.
    """
    batch, _, heads, _ = q.shape
    stride = math.gcd(FORECAST_STRIDE, grid.k_block)
    tokens, seen, weight, logarithm = grid.once(("tokens", tuple(sampled)), lambda grid: _tokens(grid, sampled, stride))
    query = q.index_select(1, tokens.flatten())
    peaks = grid.k_block // stride
    if is_compiled(q, k):
        return compiled.shares(
            query, k[:, ::stride], weight, seen, grid.columns, peaks, logarithm=logarithm, scale=grid.scale,
            tile=FORECAST_GROUP, stagger=stride,
        )  # fmt: skip
    found = [torch.zeros(batch, heads, 0, grid.columns, dtype=grid.dtype, device=q.device)]
    for group, start in enumerate(range(0, len(tokens), FORECAST_GROUP)):
        at = slice(start, start + FORECAST_GROUP)
        key = torch.cat([k[:, :1], k[:, group % stride :: stride][:, 1:]], 1)
        some = query.unflatten(1, tokens.shape)[:, at].flatten(1, 2)
        sample = Sample(some, weight[at], key, peaks, grid.scale, logarithm)
        found += [share for _, share in shares(sample, seen[at], grid.columns)]
    return torch.cat(found, 2)


def _sampled(grid: Candidates) -> tuple[list[int], Tensor, Tensor]:
    """Return the sampled query blocks, as a list and as a tensor, and which key blocks each may choose."""
    numbers = [i for i in range(1, grid.rows - 1) if i % max(1, 2 ** (i.bit_length() - 1) // FORECAST_ROWS) == 0]
    sampled = torch.tensor(numbers, dtype=torch.long, device=grid.device)
    return numbers, sampled, torch.arange(grid.columns, device=grid.device) < grid.choices[sampled, None]


def _tokens(grid: Candidates, sampled: Sequence[int], stride: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `sampled_shares`' tokens, how many keys each sees, their weights, and the keys' logarithms."""
    # tokens at other places of each block, and other keys for each group of blocks
    block = torch.tensor(sampled, dtype=torch.float64, device=grid.device)[:, None]
    place = (block * GOLDEN + torch.arange(FORECAST_TOKENS, device=grid.device) / FORECAST_TOKENS) % 1
    tokens = (block * grid.q_block + (place * grid.q_block).floor()).long().sort(-1).values
    first = torch.arange(len(tokens), device=grid.device)[:, None] // FORECAST_GROUP % stride
    # the keys 0, first + stride, first + 2 stride, ... up to the token
    seen = ((tokens - first) // stride + 1).clamp(min=0)
    weight = torch.full(tokens.shape, 1 / FORECAST_TOKENS, dtype=grid.dtype, device=grid.device)
    logarithm = torch.zeros(grid.columns, grid.k_block // stride, dtype=grid.dtype, device=grid.device)
    logarithm[:1, :1] = -math.log(stride)
    return tokens, seen, weight, logarithm
