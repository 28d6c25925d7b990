"""Layouts that follow content: which key blocks are worth a query block's attention.

Each function estimates the share of a query block's softmax that falls on each key block, from few rows, and keeps the
blocks with the largest share. Results are `BlockLayout`s per (batch, head) on the device of q, made without gradients.

**Estimate.** The queries of a block are replaced by the means of `QUERY_PARTS` consecutive parts. The keys of a block
are replaced by its `KEY_PEAKS` keys with the largest score under the mean query, and the mean of all others counted
with its multiplicity: attention is carried by few keys that most queries score high, and a mean alone hides them. With
q̃ the pooled queries and (k̃, n) the pooled keys, share(i, J) is the mean over q̃ of the softmax over all (J, k̃) of
scale q̃·k̃ + log n, summed over the k̃ of J.

**Causal guarantee.** With `is_causal`, what the queries up to token t see is a function of the tokens up to t. The list
of query block i is made from the tokens up to its first query, i * q_block: its pooled queries are those of the q_block
queries that end there, and that query itself; its candidates are the key blocks that end there or earlier; the key
blocks that later tokens of the block reach (the diagonal) are always listed. The direction that picks a key block's
peaks is the mean query as of the first query block that may choose the key block.

**Forecast.** So a causal estimate is that of the block before, and some heads look at tokens, others at distances. In
topk_blocks, topp_blocks and lsh_blocks the shares are a mixture of three forecasts: the estimate as it is; moved along
by one block; and the mean share at each distance so far. Of a few earlier tokens the softmax over some of their keys is
computed, O(seq_len) scores in all. It gives the shares by distance, and the weights of the mixture, by head and row:
that of a forecast is ∝ prior * exp(`FORECAST_RATE` * the mass that its lists would have held of those tokens), the
exponentially weighted average forecaster (Cesa-Bianchi and Lugosi 2006, Prediction, Learning, and Games, chapter 2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from dilated_attention.layout import BlockLayout, block_grid, check_density, row_offsets, visible_blocks

QUERY_PARTS = 4
KEY_PEAKS = 7
CHUNK = 2**24  # scores held at a time
ALWAYS = 4.0  # on top of the share of a block that is always listed; shares lie in [0, 2)
FORECAST_PRIOR = 0.5, 0.25, 0.25
FORECAST_RATE = 4.0
FORECAST_ROWS = 8  # query blocks from block 2^n to block 2^(n+1) of which some tokens' softmax is computed
FORECAST_TOKENS = 4  # tokens of such a block
FORECAST_STRIDE = 8  # of the keys that they see
FORECAST_GROUP = 8  # of those blocks whose tokens see the same keys; a power of two
GOLDEN = (5**0.5 - 1) / 2
LSH_QUERIES = 16  # queries of a block that are hashed to estimate shares
LSH_KEYS = 20  # and keys, those with the largest weights
NO_KEYS = 1e-30  # added to the weight of the keys in a bucket, so that a query alone there hits none
WEIGHT_ALONE = 0.3  # of a key's weight beside its collisions; 0 and 1 captured less of MiniLM's attention

Queries = Float[Tensor, "batch seq heads head_dim"]
Keys = Float[Tensor, "batch seq kv_heads head_dim"]
Blocks = Float[Tensor, "batch heads query_blocks key_blocks"]


@torch.no_grad()
def topk_blocks(
    q: Queries,
    k: Keys,
    density: float,
    *,
    block_size: int | tuple[int, int] = 128,
    is_causal: bool = False,
    scale: float | None = None,
    keep_diagonal: bool = True,
    floor: int = 1,
    per_kv_head: bool = False,
) -> BlockLayout:
    """The round(density * n) of a query block's n key blocks that carry the largest estimated shares of its softmax.

    Every row has max(floor, round(density * n)) blocks, or all that it can see; the diagonal counts among them and
    comes first. `per_kv_head`: one list for all query heads that share a KV head, by their mean share.
    """
    grid = _grid(q, k, block_size, is_causal, keep_diagonal, floor)
    budget = grid.budget(density)
    forecast = _Forecast(q, k, grid, scale, group=per_kv_head) if is_causal else None
    chosen = []
    for at, share in _shares(q, k, grid, scale, group=per_kv_head):
        if forecast is not None:
            share = forecast(at, share, budget[at])
        chosen.append(_largest(grid.ranked(at, share), budget[at], int(budget.max())))
    return grid.layout(torch.cat(chosen, dim=2), budget)


@torch.no_grad()
def topp_blocks(
    q: Queries,
    k: Keys,
    mass: float,
    *,
    block_size: int | tuple[int, int] = 128,
    is_causal: bool = False,
    scale: float | None = None,
    keep_diagonal: bool = True,
    floor: int = 1,
    per_kv_head: bool = False,
) -> BlockLayout:
    """The fewest key blocks whose estimated shares of the query block's softmax sum to at least `mass`, in (0, 1].

    When causal, the shares are of the softmax over the blocks before the diagonal, and the diagonal comes on top.
    """
    if not 0 < mass <= 1:
        raise ValueError(f"mass must lie in (0, 1], got {mass}")
    grid = _grid(q, k, block_size, is_causal, keep_diagonal, floor)
    least = grid.budget(None)

    def fewest(at: slice, share: Tensor) -> tuple[Tensor, Tensor]:
        ordered, order = grid.ranked(at, share).sort(dim=-1, descending=True)
        must = ordered >= ALWAYS
        part = torch.where(must, ordered - ALWAYS, ordered).clamp_(min=0)
        before = part.cumsum(-1) - part
        return order, torch.maximum((must | (before < mass) & (part > 0)).sum(-1), least[at])

    forecast = _Forecast(q, k, grid, scale, group=per_kv_head) if is_causal else None
    lists, counts = [], []
    for at, share in _shares(q, k, grid, scale, group=per_kv_head):
        if forecast is not None:
            share = forecast(at, share, fewest(at, share)[1])
        order, count = fewest(at, share)
        counts.append(count)
        lists.append(_ascending(order[..., : int(count.max())], count, grid.columns))
    width = max(x.shape[-1] for x in lists)
    lists = [F.pad(x, (0, width - x.shape[-1]), value=grid.columns) for x in lists]
    return grid.layout(torch.cat(lists, dim=2), torch.cat(counts, dim=2))


@torch.no_grad()
def hierarchical_blocks(
    q: Queries,
    k: Keys,
    density: float,
    *,
    block_size: int | tuple[int, int] = 128,
    region: int = 8,
    breadth: float = 4.0,
    is_causal: bool = False,
    scale: float | None = None,
    floor: int = 1,
) -> BlockLayout:
    """Two stages: coarse shares choose regions of `region` blocks a side, finer shares choose blocks within them.

    A query region looks into the key regions with the largest shares, its own among them, that hold `breadth` times as
    many tokens as `density` keeps; of their blocks each of its query blocks keeps as many as in `topk_blocks`. The
    scores cost 1 / region + breadth * density of those of `topk_blocks`.
    """
    if region < 1 or breadth < 1:
        raise ValueError(f"region and breadth must be at least 1, got region={region}, breadth={breadth}")
    grid = _grid(q, k, block_size, is_causal, True, floor)
    budget = grid.budget(density)
    most = int(budget.max())
    side = region * math.lcm(grid.q_block, grid.k_block)
    coarse = _Grid(grid.seq_len, side, side, is_causal, True, floor, grid.device)
    regions, inner_q, inner_k = coarse.columns, side // grid.q_block, side // grid.k_block
    wide = min(regions, max(math.ceil(breadth * density * regions), math.ceil(most / inner_k) + 1))

    query, weight = _pooled_queries(q, grid, scale)
    key, multiplicity = _pooled_keys(k, _direction(query, weight, k.shape[2], grid), grid)
    # a region's queries: the mean ones of QUERY_PARTS of its blocks; causal: of as many blocks up to its first
    pad_q, pad_k = regions * inner_q - grid.rows, regions * inner_k - grid.columns
    behind = inner_q - 1 if is_causal else 0
    means = F.pad(torch.einsum("bhiad,ia->bhid", query, weight), (0, 0, behind, pad_q))[:, :, : regions * inner_q]
    real = F.pad(torch.ones_like(weight[:, 0]), (behind, pad_q))[: regions * inner_q].view(regions, inner_q)
    skip = max(1, inner_q // QUERY_PARTS)
    some = slice(behind % skip, None, skip)
    means, real = means.unflatten(2, (regions, inner_q))[:, :, :, some], real[:, some]
    first_row = torch.arange(regions, device=grid.device) * inner_q
    # everything by region, the last one padded with blocks that nobody may choose
    query = F.pad(query, (0, 0, 0, 0, 0, pad_q)).unflatten(2, (regions, inner_q))
    weight = F.pad(weight, (0, 0, 0, pad_q)).unflatten(0, (regions, inner_q))
    keys = F.pad(key, (0, 0, 0, 0, 0, pad_k)).unflatten(2, (regions, inner_k))
    counts = F.pad(multiplicity, (0, 0, 0, pad_k), value=-math.inf).unflatten(0, (regions, inner_k))
    allowed, always = (F.pad(x, (0, pad_k, 0, pad_q)) for x in (grid.allowed, grid.always))
    batch = torch.arange(q.shape[0], device=grid.device)[:, None, None, None]
    kv_head = torch.arange(q.shape[2], device=grid.device)[:, None, None] // (q.shape[2] // k.shape[2])
    inside_q, inside_k = (torch.arange(n, device=grid.device) for n in (inner_q, inner_k))

    chosen = []
    held = wide * inner_k * key.shape[3] * max(q.shape[3], inner_q * query.shape[4])
    pooled = means, real / real.sum(-1, keepdim=True), key, multiplicity
    for at, share in _scored(*pooled, grid.allowed[first_row], held=held):
        share = F.pad(share, (0, pad_k)).unflatten(3, (regions, inner_k)).sum(-1)
        near = _ranked(share, coarse.allowed[at], coarse.always[at]).topk(wide, dim=-1).indices.sort(-1).values
        candidate = (near[..., None] * inner_k + inside_k).flatten(3)  # (B, H, regions here, blocks of near regions)
        row = torch.arange(at.start, at.stop, device=grid.device)[:, None] * inner_q + inside_q
        may, must = (x[row[:, :, None], candidate[..., None, :]] for x in (allowed, always))
        logits = torch.einsum("bhriad,bhrxjcd->bhriacxj", query[:, :, at], keys[batch, kv_head, near])
        logits += counts[near].permute(0, 1, 2, 5, 3, 4)[:, :, :, None, None]
        fine = _ranked(_share(logits.flatten(6), weight[at], may), may, must)
        kept = fine.topk(min(most, fine.shape[-1]), dim=-1).indices
        chosen.append(candidate[:, :, :, None].expand(fine.shape).gather(-1, kept).flatten(2, 3))
    lists = torch.cat(chosen, dim=2)[:, :, : grid.rows]
    return grid.layout(_ascending(lists, budget, grid.columns), budget)


@torch.no_grad()
def lsh_blocks(
    q: Queries,
    k: Keys,
    density: float | None = None,
    *,
    num_hashes: int = 13,
    num_bits: int = 6,
    seed: int = 0,
    block_size: int | tuple[int, int] = 128,
    is_causal: bool = False,
    scale: float | None = None,
    keep_diagonal: bool = True,
    floor: int = 1,
) -> BlockLayout:
    """Blocks whose queries and keys share buckets of `num_hashes` hashes of `num_bits` signs each.

    Without `density` the layout is exact inside buckets: a block is active iff one of its (query, key) pairs shares a
    bucket in one of the hashes, so every such pair is attended (and the rest of its block with it). With `density` each
    row keeps as many blocks as in `topk_blocks`, those with the largest estimated share of its softmax.

    The estimate: exp(q·k) = exp(q̄·k) exp((q - q̄)·k). The first factor is a weight of the key alone; the second is what
    collisions of centred q and k stand for. In each hash a query spreads its attention over the keys of its bucket in
    proportion to their weights, and the shares are averaged over queries and hashes; a part goes by weight alone.

    When causal, block i is hashed by the q_block queries that end at its first one, and centres are means so far; pairs
    that later queries of the block would share are then not looked for.
    """
    grid = _grid(q, k, block_size, is_causal, keep_diagonal, floor)
    if num_hashes < 1 or not 1 <= num_bits <= 16:
        raise ValueError(
            f"num_hashes must be at least 1 and num_bits from 1 to 16, got num_hashes={num_hashes}, num_bits={num_bits}"
        )
    dtype, group = torch.promote_types(q.dtype, torch.float32), q.shape[2] // k.shape[2]
    generator = torch.Generator().manual_seed(seed)
    planes = torch.randn(q.shape[3], num_hashes * num_bits, generator=generator, dtype=torch.float64)
    planes, buckets = planes.to(grid.device, dtype), 2**num_bits
    # queries from the first query block that has any: block 1 when causal, hashed by the q_block that end at its start
    skip = int(is_causal)
    query = q[:, 1 : 1 + (grid.rows - 1) * grid.q_block] if is_causal else q
    sample = 1 if density is None else max(1, grid.q_block // LSH_QUERIES)
    query = _in_blocks(query, grid.q_block)[:, :, sample // 2 :: sample].transpose(2, 3).to(dtype).contiguous()
    mean_k, size_k = _part_means(k, grid.k_block, 1)
    centre_k = _mean_so_far(mean_k[:, :, 0], size_k[:, 0], is_causal).to(dtype)
    at_q = torch.arange(grid.q_block, device=grid.device)[sample // 2 :: sample]
    at_q = torch.arange(query.shape[1], device=grid.device)[:, None] * grid.q_block + at_q
    real_q = (at_q < (grid.rows - skip) * grid.q_block if is_causal else at_q < grid.seq_len).to(dtype)
    size_q = real_q.sum(-1).clamp(min=1)
    mean_q = torch.einsum("bihtd,it->bihd", query, real_q / size_q[:, None])
    centre_q = _mean_so_far(mean_q, size_q, is_causal)  # (B, rows - skip, H, D); not causal: one for all
    code = _codes(query, centre_q, planes, num_bits)
    count_q = _histogram(code, real_q[:, None], buckets)  # (B, H, rows - skip, hashes * buckets)
    key = _in_blocks(k, grid.k_block)
    at_k = torch.arange(grid.columns * grid.k_block, device=grid.device).view(grid.columns, grid.k_block)
    real_k = at_k < grid.seq_len
    if density is None:
        code = _codes(key.transpose(2, 3).to(dtype), centre_k, planes, num_bits)
        count_k = _histogram(code, real_k[:, None].to(dtype), buckets).repeat_interleave(group, 1)
        collisions = F.pad((count_q @ count_k.mT).clamp_(max=1), (0, 0, skip, 0))
        share = _ranked(collisions, grid.allowed, grid.always)
        counts = torch.maximum((share > 0).sum(-1), grid.budget(None))
        order = share.topk(int(counts.max()), dim=-1).indices
        return grid.layout(_ascending(order, counts, grid.columns), counts)

    budget = grid.budget(density)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    # the exponent of a key's weight, q̄·k, is split at the largest one of its block: within the block q̄ is the mean as
    # of its first chooser, so that the weights are the same for all rows; across blocks it is the row's own
    chooser = F.pad(centre_q, (0, 0, 0, 0, 1, 0))[:, grid.first_chooser] if is_causal else centre_q
    within = scale * _along(key, chooser.to(k.dtype)).to(dtype)  # (B, columns, H, k_block)
    within = within.masked_fill_(~real_k[:, None], -math.inf)
    within, heaviest = within.topk(min(LSH_KEYS, grid.k_block), dim=-1)
    kv_head = torch.arange(q.shape[2], device=grid.device)[:, None] // group
    block = torch.arange(len(key) * grid.columns, device=grid.device).view(len(key), grid.columns, 1, 1)
    rows = (block * grid.k_block + heaviest) * k.shape[2] + kv_head
    key = key.reshape(-1, k.shape[3]).index_select(0, rows.flatten()).view(*rows.shape, -1).to(dtype)
    code = _codes(key, centre_k.repeat_interleave(group, 2), planes, num_bits)
    mean_k = mean_k[:, :, 0].to(dtype).repeat_interleave(group, 2)
    middle = scale * (mean_k * chooser).sum(-1, keepdim=True)
    peak = within[..., :1]
    count_k = _histogram(code, (within - peak).exp_(), buckets)
    relative = scale * torch.einsum("bihd,bjhd->bhij", centre_q, mean_k)
    relative += (peak - middle).permute(0, 2, 3, 1)
    if is_causal:
        relative.masked_fill_(~grid.allowed[skip:], -math.inf)
    # (B, H, rows - skip, columns); not causal: one row for all
    relative = (relative - relative.amax(-1, keepdim=True).clamp(min=torch.finfo(dtype).min)).exp()
    share = relative.new_zeros(*count_q.shape[:3], grid.columns)
    for at, seen in _pieces(grid.allowed[skip:], grid.rows):
        near, some = relative[:, :, at, :seen], count_k[:, :, :seen]
        hits = count_q[:, :, at].div_((near @ some).add_(NO_KEYS))
        share[:, :, at, :seen] = near * (hits @ some.mT) / (size_q[at, None] * num_hashes)
    alone = relative * count_k[..., :buckets].sum(-1)[:, :, None]
    share += WEIGHT_ALONE * alone / alone.sum(-1, keepdim=True).clamp(min=torch.finfo(dtype).tiny)
    share, everything = F.pad(share, (0, 0, skip, 0)), slice(0, grid.rows)
    if is_causal:
        share = _Forecast(q, k, grid, scale)(everything, share, budget)
    return grid.layout(_largest(grid.ranked(everything, share), budget, int(budget.max())), budget)


def density_schedule(seq_len: int, *, dense_until: int = 4096, exponent: float = 0.5) -> float:
    """min(1, (dense_until / seq_len) ** exponent): dense at first, then ∝ seq_len ** (1 - exponent) keys a query.

    An exponent of 1 holds the number of keys that a query sees, an exponent of 0 the density.
    """
    if seq_len < 1 or dense_until < 1 or not 0 <= exponent <= 1:
        raise ValueError(
            "seq_len and dense_until must be at least 1 and exponent in [0, 1], "
            f"got seq_len={seq_len}, dense_until={dense_until}, exponent={exponent}"
        )
    return min(1.0, (dense_until / seq_len) ** exponent)


class LearnedRouter(nn.Module):
    """A small scorer of blocks, trained through a relaxation of the choice that it makes.

    score(i, J) = <a_h q̂_i, b_h k̂_J> / sqrt(rank), with q̂_i the mean of the block's queries (causal: of the q_block
    queries that end at its first one) and k̂_J the mean, maximum and minimum of the block's keys, as in SeerAttention.
    `forward` lists the blocks with the largest scores, as many a row as in `topk_blocks`, the diagonal first.

    **Relaxation.** gate(i, J) = sigmoid(score(i, J) / temperature - τ_i), with τ_i such that a row's gates sum to its
    budget; the diagonal's gates are 1. `relaxed_attention` is softmax attention with the log of a block's gate added to
    its scores: as temperature → 0 it becomes attention over the layout of `forward`. It is differentiable in the
    router's parameters and in q, k and v, through τ too (implicit function theorem), so any loss of its output trains
    the router. It forms the whole score matrix: for training at moderate lengths.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        density: float,
        *,
        num_kv_heads: int | None = None,
        rank: int = 16,
        temperature: float = 0.1,
        block_size: int | tuple[int, int] = 128,
        is_causal: bool = False,
        floor: int = 1,
    ) -> None:
        super().__init__()
        check_density(density)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads={num_heads}, got {num_kv_heads}")
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        self.density, self.temperature, self.floor = density, temperature, floor
        self.block_size, self.is_causal = block_size, is_causal
        self.query_map = nn.Parameter(torch.empty(num_heads, head_dim, rank))
        self.key_map = nn.Parameter(torch.empty(num_kv_heads, 3 * head_dim, rank))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in (self.query_map, self.key_map):
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def extra_repr(self) -> str:
        heads, head_dim, rank = self.query_map.shape
        return (
            f"num_heads={heads}, head_dim={head_dim}, density={self.density}, num_kv_heads={self.key_map.shape[0]}, "
            f"rank={rank}, temperature={self.temperature}, block_size={self.block_size}, is_causal={self.is_causal}"
        )

    @torch.no_grad()
    def forward(self, q: Queries, k: Keys) -> BlockLayout:
        grid = self._grid(q, k)
        budget = grid.budget(self.density)
        score = self._scores(q, k, grid).masked_fill(~grid.allowed, -math.inf).masked_fill(grid.always, math.inf)
        return grid.layout(_largest(score, budget, int(budget.max())), budget)

    def log_gates(self, q: Queries, k: Keys) -> Blocks:
        """0 on the diagonal, -inf for blocks that the row may not choose."""
        return self._log_gates(q, k, self._grid(q, k))

    def relaxed_attention(self, q: Queries, k: Keys, v: Keys, *, scale: float | None = None) -> Queries:
        """softmax(scale q·k + log gate) v over the visible keys."""
        grid = self._grid(q, k)
        token = torch.arange(grid.seq_len, device=q.device)
        bias = self._log_gates(q, k, grid)[..., (token // grid.q_block)[:, None], token // grid.k_block]
        if self.is_causal:
            bias = bias.masked_fill(token > token[:, None], -math.inf)
        scale = q.shape[3] ** -0.5 if scale is None else scale
        key, value = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
        probability = (scale * torch.einsum("bihd,bjhd->bhij", q, key) + bias.to(q.dtype)).softmax(-1)
        return torch.einsum("bhij,bjhd->bihd", probability, value)

    def _grid(self, q: Tensor, k: Tensor) -> _Grid:
        heads, kv_heads = self.query_map.shape[0], self.key_map.shape[0]
        if (q.shape[2], k.shape[2]) != (heads, kv_heads):
            raise ValueError(
                f"the router has {heads} heads and {kv_heads} KV heads, got q with {q.shape[2]} and k with {k.shape[2]}"
            )
        return _grid(q, k, self.block_size, self.is_causal, True, self.floor)

    def _scores(self, q: Tensor, k: Tensor, grid: _Grid) -> Tensor:
        dtype, more = self.query_map.dtype, grid.columns * grid.k_block - grid.seq_len
        blocks = (
            F.pad(k, (0, 0, 0, 0, 0, more), value=fill).unflatten(1, (grid.columns, grid.k_block))
            for fill in (-math.inf, math.inf)
        )
        high, low = next(blocks).amax(2), next(blocks).amin(2)
        mean = _part_means(k, grid.k_block, 1)[0][:, :, 0]
        query = _part_means(q, grid.q_block, 1, before=self.is_causal)[0][:, :, 0]
        query = torch.einsum("bihd,hdr->bhir", query.to(dtype), self.query_map)
        key = torch.einsum("bjhd,hdr->bhjr", torch.cat([mean, high, low], dim=-1).to(dtype), self.key_map)
        key = key.repeat_interleave(q.shape[2] // k.shape[2], dim=1)
        return query @ key.mT / self.query_map.shape[2] ** 0.5

    def _log_gates(self, q: Tensor, k: Tensor, grid: _Grid) -> Tensor:
        free = grid.allowed & ~grid.always
        x = self._scores(q, k, grid) / self.temperature
        wanted = (grid.budget(self.density) - grid.always.sum(-1)).clamp(min=0).to(x.dtype)
        gate = F.logsigmoid(x - _threshold(x, free, wanted))
        return gate.masked_fill(~free, -math.inf).masked_fill(grid.always, 0.0)


@dataclass(frozen=True, eq=False)
class _Grid:
    """The query blocks of one call: the key blocks that each may choose (`allowed`) and always has (`always`)."""

    seq_len: int
    q_block: int
    k_block: int
    is_causal: bool
    keep_diagonal: bool
    floor: int
    device: torch.device

    @property
    def rows(self) -> int:
        return -(-self.seq_len // self.q_block)

    @property
    def columns(self) -> int:
        return -(-self.seq_len // self.k_block)

    @cached_property
    def edges(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """First and last token of each query block `(rows, 1)` and of each key block `(columns,)`."""
        row = torch.arange(self.rows, device=self.device)[:, None] * self.q_block
        column = torch.arange(self.columns, device=self.device) * self.k_block
        return row, (row + self.q_block).clamp(max=self.seq_len) - 1, column, column + self.k_block - 1

    @cached_property
    def always(self) -> Tensor:
        """Key blocks that the tokens of the query block lie in; causal: but for those complete at its first query."""
        first_query, last_query, first_key, last_key = self.edges
        if not self.keep_diagonal:
            return torch.zeros(self.rows, self.columns, dtype=torch.bool, device=self.device)
        return (first_key <= last_query) & (last_key > first_query if self.is_causal else last_key >= first_query)

    @cached_property
    def allowed(self) -> Tensor:
        first_query, _, _, last_key = self.edges
        if not self.is_causal:
            return torch.ones(self.rows, self.columns, dtype=torch.bool, device=self.device)
        return last_key <= first_query

    @cached_property
    def first_chooser(self) -> Tensor:
        """The first query block that may choose each key block when causal (the last one if none may), `(columns,)`."""
        last_key = self.edges[3]
        return ((last_key + self.q_block - 1) // self.q_block).clamp(max=self.rows - 1)

    def budget(self, density: float | None) -> Tensor:
        """Blocks per row, `(rows,)`: round(density * visible), at least `floor` and the diagonal."""
        visible = visible_blocks(self.seq_len, (self.q_block, self.k_block), self.is_causal).to(self.device)
        wanted = torch.zeros_like(visible)
        if density is not None:
            check_density(density)
            wanted = (visible * density).round().long()
        return torch.maximum(wanted.clamp(min=self.floor), self.always.sum(-1)).minimum(visible)

    def ranked(self, at: slice, share: Tensor) -> Tensor:
        """Shares of some rows, with `ALWAYS` on top where a block is always listed, and -1 where it may not be."""
        return _ranked(share, self.allowed[at], self.always[at])

    def layout(self, lists: Tensor, counts: Tensor) -> BlockLayout:
        """Ascending lists (B, H, rows, width), of which the first `counts` entries are meant."""
        counts = counts.expand(lists.shape[:3])
        kept = torch.arange(lists.shape[3], device=self.device) < counts[..., None]
        return BlockLayout(row_offsets(counts), lists[kept], self.seq_len, self.q_block, self.k_block, self.is_causal)


def _grid(
    q: Tensor, k: Tensor, block_size: int | tuple[int, int], is_causal: bool, keep_diagonal: bool, floor: int
) -> _Grid:
    if q.ndim != 4 or k.ndim != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(
            "q and k must be (batch, seq, heads, head_dim) with equal batch, seq and head_dim, "
            f"got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"the heads of k must divide the {q.shape[2]} heads of q, got {k.shape[2]}")
    if is_causal and not keep_diagonal:
        raise ValueError("keep_diagonal=False contradicts is_causal=True: no earlier token can judge the diagonal")
    if floor < 0:
        raise ValueError(f"floor must be at least 0, got {floor}")
    q_block, k_block, _, _ = block_grid(q.shape[1], block_size)
    return _Grid(q.shape[1], q_block, k_block, is_causal, keep_diagonal, floor, q.device)


class _Forecast:
    """The shares that a causal choice will meet in each row, from an estimate that knows the block before.

    To be called once for all rows, in order. Of some query blocks, `sampled`, a few tokens' softmax is computed; a row
    knows of those before it, `known` many. `seen`: their mean share, in the key blocks that the row may choose.
    `distant`: its mean over the first 0, 1, ... sampled blocks by distance, counted back from the last block that a row
    may choose.
    """

    def __init__(self, q: Queries, k: Keys, grid: _Grid, scale: float | None, *, group: bool = False) -> None:
        self.grid = grid
        sampled = [i for i in range(1, grid.rows - 1) if i % max(1, 2 ** (i.bit_length() - 1) // FORECAST_ROWS) == 0]
        seen = _sampled_shares(q, k, sampled, grid, scale)
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
        """share: estimated for the rows `at`, (B, H, rows, columns). counts: the lengths of their lists, (…, rows)."""
        may, known = self.grid.allowed[at], self.known[at]
        moved = F.pad(share, (1, -1)).masked_fill_(~may, 0.0)
        distant = self._turned(self.distant[:, :, known], may)
        forecasts = torch.stack([share, moved, distant])
        forecasts /= forecasts.sum(-1, keepdim=True).clamp_(min=torch.finfo(share.dtype).tiny)
        # what the lists of each would have held of the tokens seen inside these rows
        first, last = int(known[0]), int(torch.searchsorted(self.sampled, at.stop))
        inside = self.sampled[first:last] - at.start
        counts = counts.expand(share.shape[:3])[:, :, inside]
        ranked = _ranked(forecasts[:, :, :, inside], may[inside], self.grid.always[at][inside])
        lists = ranked.topk(int(counts.max()) if counts.numel() else 0, dim=-1).indices
        listed = torch.arange(lists.shape[-1], device=lists.device) < counts[..., None]
        seen = self.seen[:, :, first:last].expand(3, -1, -1, -1, -1)
        held = (seen.gather(-1, lists) * listed).sum(-1)
        held = torch.cat([self.held[..., None], held], -1).cumsum(-1)  # before the first, after it, after the next, ...
        self.held = held[..., -1]
        weight = (FORECAST_RATE * held).softmax(0)[..., known - first]  # (3, B, H, rows)
        return torch.einsum("fbhr,fbhrc->bhrc", weight, forecasts)

    @staticmethod
    def _turned(x: Tensor, may: Tensor) -> Tensor:
        """(…, rows, columns) by key block -> by distance from the last one that a row may choose, or back; else 0."""
        at = may.sum(-1, keepdim=True) - 1 - torch.arange(may.shape[-1], device=may.device)
        return x.gather(-1, at.clamp(min=0).expand(x.shape)).masked_fill_(at < 0, 0.0)


def _sampled_shares(q: Tensor, k: Tensor, sampled: Sequence[int], grid: _Grid, scale: float | None) -> Tensor:
    """The causal softmax of some tokens over some keys, by key block, their mean: (B, H, sampled blocks, columns)."""
    batch, seq_len, heads, head_dim = q.shape
    scale = head_dim**-0.5 if scale is None else scale
    stride = math.gcd(FORECAST_STRIDE, grid.k_block)
    # tokens at other places of each block, and other keys for each group of blocks
    places = [[(i * GOLDEN + part / FORECAST_TOKENS) % 1 for part in range(FORECAST_TOKENS)] for i in sampled]
    tokens = [
        sorted(i * grid.q_block + int(x * grid.q_block) for x in at) for i, at in zip(sampled, places, strict=True)
    ]
    at_once = FORECAST_GROUP
    while at_once > 1 and at_once * FORECAST_TOKENS * batch * heads * seq_len > CHUNK * stride:
        at_once //= 2
    shares = torch.zeros(
        batch, heads, len(sampled), grid.columns, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device
    )
    for start in range(0, len(tokens), at_once):
        token = torch.tensor(tokens[start : start + at_once], device=q.device).flatten()
        first, reached = start // FORECAST_GROUP % stride, tokens[start : start + at_once][-1][-1] // grid.k_block + 1
        key = torch.arange(first, reached * grid.k_block, stride, device=q.device)
        query = (q[:, token] * scale).unflatten(2, (k.shape[2], -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        score = query @ k[:, first : reached * grid.k_block : stride].permute(0, 2, 3, 1)
        score = F.pad(score, (0, len(key) - score.shape[-1])).to(shares.dtype).view(batch, heads, len(token), -1)
        sure = tokens[start][0] // stride  # before the first token
        score[..., sure:].masked_fill_(key[sure:] > token[:, None], -math.inf)
        share = score.softmax(-1).unflatten(3, (reached, -1)).unflatten(2, (-1, FORECAST_TOKENS))
        shares[:, :, start : start + at_once, :reached] = share.sum((3, 5)) / FORECAST_TOKENS
    return shares


def _part_means(x: Tensor, block: int, parts: int, before: bool = False) -> tuple[Tensor, Tensor]:
    """(B, N, H, D) -> means of `parts` consecutive parts of each block (B, blocks, parts, H, D), sizes (blocks, parts).

    `before`: of the `block` tokens that end at the block's first one, instead; none for the first block.
    """
    whole, rest = (-(-x.shape[1] // block) - 1, 0) if before else divmod(x.shape[1], block)
    start = 1 if before else 0
    part = torch.arange(block, device=x.device) * parts // block
    member = (part == torch.arange(parts, device=x.device)[:, None]).to(x.dtype)  # [parts, block]
    body = x[:, start : start + whole * block].flatten(2).unflatten(1, (whole, block))
    size = member.sum(-1).expand(whole, parts)
    means = (member / member.sum(-1, keepdim=True)) @ body
    if before or rest:
        end = x[:, whole * block :].flatten(2)[:, None] if rest else x[:, :0].flatten(2)[:, None]
        few = member[:, : end.shape[2]]
        mean, few_size = (few / few.sum(-1, keepdim=True).clamp(min=1)) @ end, few.sum(-1)[None]
        order = (mean, means) if before else (means, mean)
        means, size = torch.cat(order, dim=1), torch.cat((few_size, size) if before else (size, few_size))
    return means.unflatten(3, x.shape[2:]), size


def _pooled_queries(q: Tensor, grid: _Grid, scale: float | None) -> tuple[Tensor, Tensor]:
    """Scaled (B, H, rows, parts, D) and the weight of each part (rows, parts)."""
    query, size = _part_means(q, grid.q_block, QUERY_PARTS, before=grid.is_causal)
    if grid.is_causal:
        query = torch.cat([query, q[:, :: grid.q_block, None]], dim=2)
        size = torch.ones(grid.rows, query.shape[2], device=q.device)
        size[0, :-1] = 0
    dtype = torch.promote_types(q.dtype, torch.float32)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    return query.to(dtype).permute(0, 3, 1, 2, 4) * scale, (size / size.sum(-1, keepdim=True)).to(dtype)


def _direction(query: Tensor, weight: Tensor, kv_heads: int, grid: _Grid) -> Tensor:
    """The mean pooled query of each KV head, (B, 1, kv_heads, D); causal: per key block, (B, columns, kv_heads, D)."""
    rows = torch.einsum("bhiad,ia->bihd", query, weight).unflatten(2, (kv_heads, -1)).mean(3)
    if not grid.is_causal:
        return rows.mean(1, keepdim=True)
    so_far = rows.cumsum(1) / torch.arange(1, grid.rows + 1, device=grid.device)[:, None, None]
    return so_far[:, grid.first_chooser]


def _in_blocks(x: Tensor, block: int) -> Tensor:
    """(B, N, H, D) -> (B, blocks, block, H, D), zeros behind the end; a view where the blocks are whole."""
    more = -x.shape[1] % block
    return (F.pad(x, (0, 0, 0, 0, 0, more)) if more else x).unflatten(1, (-1, block))


def _along(blocks: Tensor, direction: Tensor) -> Tensor:
    """(B, blocks, block, kv_heads, D) · (B, blocks or 1, heads, D) -> (B, blocks, heads, block).

    One product with a block-diagonal matrix reads the keys in place, where a product a head would copy them; from its
    left, since the many tokens make the wide side of the result.
    """
    kv_heads, heads = blocks.shape[3], direction.shape[2]
    diagonal = torch.zeros(*direction.shape[:3], kv_heads, direction.shape[3]).to(direction)
    head = torch.arange(heads, device=direction.device)
    diagonal[:, :, head, head // (heads // kv_heads)] = direction
    return diagonal.flatten(3) @ blocks.flatten(3).mT


def _pooled_keys(k: Tensor, direction: Tensor, grid: _Grid) -> tuple[Tensor, Tensor]:
    """Peaks and the mean of the others (B, kv_heads, columns, peaks + 1, D), log multiplicity (columns, peaks + 1)."""
    blocks, more = _in_blocks(k, grid.k_block), grid.columns * grid.k_block - grid.seq_len
    score = _along(blocks, direction.to(k.dtype)).transpose(1, 2)  # (B, kv_heads, columns, k_block)
    present = torch.full((grid.columns,), grid.k_block, device=grid.device)
    if more:
        present[-1] -= more
        score[:, :, -1, grid.k_block - more :] = -math.inf
    at = score.topk(KEY_PEAKS, dim=-1).indices[..., None].expand(-1, -1, -1, -1, k.shape[3])
    peaks = blocks.permute(0, 3, 1, 2, 4).gather(3, at).to(direction.dtype)
    others = (present - KEY_PEAKS).clamp(min=0)
    rest = blocks.sum(2, dtype=direction.dtype).transpose(1, 2) - peaks.sum(3)
    rest = rest / others.clamp(min=1)[:, None]
    peak_count = (torch.arange(KEY_PEAKS, device=grid.device) < present[:, None]).to(direction.dtype)
    return torch.cat([peaks, rest[:, :, :, None]], 3), torch.cat([peak_count, others[:, None]], 1).log()


def _shares(
    q: Tensor, k: Tensor, grid: _Grid, scale: float | None, *, group: bool = False
) -> Iterator[tuple[slice, Tensor]]:
    """Shares (B, H, some rows, columns) for all rows. `group`: the mean over the query heads of a KV head."""
    query, weight = _pooled_queries(q, grid, scale)
    key, multiplicity = _pooled_keys(k, _direction(query, weight, k.shape[2], grid), grid)
    parts, start = [], 0
    for at, share in _scored(query, weight, key, multiplicity, grid.allowed):
        parts.append(share.unflatten(1, (k.shape[2], -1)).mean(2) if group else share)
        if at.stop == grid.rows or 4 * sum(part.numel() for part in parts) > CHUNK:
            yield slice(start, at.stop), torch.cat(parts, 2)
            parts, start = [], at.stop


def _scored(
    query: Tensor, weight: Tensor, key: Tensor, multiplicity: Tensor, allowed: Tensor, *, held: int = 0
) -> Iterator[tuple[slice, Tensor]]:
    """Shares (B, H, some rows, columns) of pooled queries, for as many rows at a time as `CHUNK` allows.

    allowed: (rows, columns), a prefix of the columns, no shorter in later rows. `held`: what the caller needs besides
    for a row of one head.
    """
    batch, heads, _, parts, _ = query.shape
    kv_heads, columns = key.shape[1:3]
    # peaks before columns, so that the sum over a block's keys runs over whole vectors
    key, multiplicity = key.transpose(2, 3), multiplicity.T
    step = max(1, CHUNK // (batch * heads * max(held, parts * multiplicity.numel())))
    for at, seen in _pieces(allowed, step):
        some = query[:, :, at]
        logits = some.reshape(batch, kv_heads, -1, query.shape[4]) @ key[:, :, :, :seen].flatten(2, 3).mT
        logits = logits.view(*some.shape[:4], -1, seen).add_(multiplicity[:, :seen])
        yield at, F.pad(_share(logits, weight[at], allowed[at, :seen]), (0, columns - seen))


def _pieces(allowed: Tensor, most: int) -> Iterator[tuple[slice, int]]:
    """`most` rows at a time, an eighth of all where that spares columns that none may choose, and the columns left."""
    rows = len(allowed)
    step = most if bool(allowed.all()) else min(most, -(-rows // 8))
    for start in range(0, rows, step):
        at = slice(start, min(start + step, rows))
        yield at, max(1, int(allowed[at.stop - 1].sum()))


def _share(logits: Tensor, weight: Tensor, allowed: Tensor) -> Tensor:
    """(…, rows, parts, peaks, columns) -> softmax over peaks and columns, summed over peaks, mean over parts.

    0 where not `allowed` (…, rows, columns). Overwrites the logits.
    """
    if not bool(allowed.all()):
        logits.masked_fill_(~allowed[..., None, None, :], -math.inf)
    largest = logits.amax((-1, -2), keepdim=True).clamp_(min=torch.finfo(logits.dtype).min)
    mass = logits.sub_(largest).exp_().sum(-2)
    total = mass.sum(-1).clamp_(min=torch.finfo(logits.dtype).tiny)
    return ((weight / total)[..., None, :] @ mass).squeeze(-2)


def _ranked(share: Tensor, allowed: Tensor, always: Tensor) -> Tensor:
    return torch.where(always, share + ALWAYS, torch.where(allowed, share, -1.0))


def _largest(ranked: Tensor, counts: Tensor, width: int) -> Tensor:
    return _ascending(ranked.topk(width, dim=-1).indices, counts, ranked.shape[-1])


def _ascending(order: Tensor, counts: Tensor, columns: int) -> Tensor:
    """The first `counts` entries of each list, ascending; `columns` behind them."""
    behind = torch.arange(order.shape[-1], device=order.device) >= counts[..., None]
    return order.masked_fill(behind, columns).sort(-1).values


def _mean_so_far(means: Tensor, size: Tensor, is_causal: bool) -> Tensor:
    """(B, blocks, H, D), of `size` tokens a block -> the mean of all tokens (B, 1, H, D); causal: up to each block."""
    if not is_causal:
        weight = (size / size.sum()).to(means.dtype)
        return (means * weight[:, None, None]).sum(1, keepdim=True)
    return means.cumsum(1) / torch.arange(1, means.shape[1] + 1, device=means.device)[:, None, None]


def _codes(x: Tensor, centre: Tensor, planes: Tensor, num_bits: int) -> Tensor:
    """Bucket of each token in each hash: (B, blocks, H, T, D), centres (B, blocks or 1, H, D) -> (…, T, hashes)."""
    signs = (x @ planes).gt_((centre @ planes)[:, :, :, None])
    power = 2.0 ** torch.arange(num_bits, device=planes.device, dtype=planes.dtype)
    return (signs.unflatten(-1, (-1, num_bits)) @ power).long()


def _histogram(code: Tensor, weight: Tensor, buckets: int) -> Tensor:
    """Weight of the tokens in each bucket, (B, H, blocks, hashes * buckets), of codes (B, blocks, H, T, hashes).

    weight: (…, blocks, H or 1, T).
    """
    batch, blocks, heads, _, hashes = code.shape
    lists = torch.arange(batch * heads, device=code.device).view(batch, 1, heads, 1, 1) * blocks
    lists = (lists + torch.arange(blocks, device=code.device)[:, None, None, None]) * hashes
    at = (lists + torch.arange(hashes, device=code.device)) * buckets + code
    flat = torch.zeros(batch * heads * blocks * hashes * buckets, dtype=weight.dtype, device=code.device)
    flat.index_add_(0, at.flatten(), weight[..., None].expand(code.shape).flatten())
    return flat.view(batch, heads, blocks, hashes * buckets)


def _threshold(x: Tensor, free: Tensor, wanted: Tensor) -> Tensor:
    """τ (…, rows, 1) with Σ sigmoid(x - τ) = wanted over the free entries, differentiable in x."""
    with torch.no_grad():
        inside = x.masked_fill(~free, 0.0)
        low, high = inside.amin(-1, keepdim=True) - 40, inside.amax(-1, keepdim=True) + 40
        for _ in range(64):
            middle = (low + high) / 2
            many = ((x - middle).sigmoid() * free).sum(-1, keepdim=True) > wanted[:, None]
            low, high = torch.where(many, middle, low), torch.where(many, high, middle)
        root = (low + high) / 2
    gate = (x - root).sigmoid() * free
    slope = (gate * (1 - gate)).sum(-1, keepdim=True).detach().clamp(min=torch.finfo(x.dtype).tiny)
    excess = gate.sum(-1, keepdim=True)
    return root + (excess - excess.detach()) / slope  # one Newton step: its value is the root, its gradient dτ/dx
