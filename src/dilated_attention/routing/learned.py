"""Train a router: a scorer of blocks that learns which blocks to list."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dilated_attention import checks
from dilated_attention.layout import BlockLayout
from dilated_attention.layout.spans import BlockSize, block_pair, check_share
from dilated_attention.ranking import forced_topk
from dilated_attention.routing.estimates import extremes, part_means
from dilated_attention.routing.grid import Blocks, Candidates, Keys, Queries, candidates
from dilated_attention.torch_internals import without_autocast


class LearnedRouter(nn.Module):
    """Score blocks with small learned maps, which are trained through a relaxation of the choice.

    score(i, J) = <a_h q̂_i, b_h k̂_J> / sqrt(rank), with q̂_i the mean of the block's queries (causal: of the
    q_block queries that end at its first one) and k̂_J the mean, maximum and minimum of the block's keys, as in
    SeerAttention. The learned maps a_h, one per query head, and b_h, one per KV head, have `rank` outputs. `forward`
    lists the blocks of the diagonal and those with the largest scores, as many per row as in `topk_blocks`.

    **Relaxation.** gate(i, J) = sigmoid(score(i, J) / temperature - τ_i), with τ_i such that a row's gates sum to
    its budget; the diagonal's gates are 1. `relaxed_attention` is softmax attention with the log of a block's gate
    added to its scores. As temperature → 0 it becomes attention over the layout of `forward`. It is differentiable in
    the router's parameters and in q, k and v, through τ too (implicit function theorem), so any loss on its output
    trains the router. It forms the whole score matrix, so it is meant for training at moderate lengths.

    Args:
        num_kv_heads: the number of KV heads; default: num_heads.
        density, block_size, is_causal, floor: as in `topk_blocks`.

    Examples:
        >>> from dilated_attention.routing import LearnedRouter
        >>> q, k, v = (torch.randn(1, 64, 2, 8) for _ in range(3))
        >>> router = LearnedRouter(num_heads=2, head_dim=8, density=0.5, block_size=16)
        >>> router.relaxed_attention(q, k, v).square().mean().backward()  # any loss trains the router
        >>> router(q, k).density
        0.5
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
        block_size: BlockSize = 128,
        is_causal: bool = False,
        floor: int = 1,
    ) -> None:
        super().__init__()
        check_share("density", density)
        block_pair(block_size)
        head_dim = checks.positive("head_dim", head_dim)
        rank = checks.positive("rank", rank)
        checks.boolean("is_causal", is_causal)
        num_heads, num_kv_heads = checks.kv_heads(num_heads, num_kv_heads)
        self.density = density
        self.floor = checks.integer("floor", floor, 0)
        self.temperature = checks.positive_number("temperature", temperature)
        self.block_size = block_size
        self.is_causal = is_causal
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
        seen = grid.allowed | grid.always
        order = forced_topk(self._scores(q, k, grid), grid.always, seen, int(budget.max()))[1]
        order = order.masked_fill(torch.arange(order.shape[-1], device=q.device) >= budget[:, None], -1)
        size = grid.q_block, grid.k_block
        return BlockLayout.from_topk(order, size, seq_len=grid.seq_len, is_causal=self.is_causal)

    def log_gates(self, q: Queries, k: Keys) -> Blocks:
        """Return the logarithm of each block's gate, `(batch, heads, query blocks, key blocks)`.

        The gate, from 0 to 1, says how far the relaxed choice lists the block. Its logarithm is 0 on the diagonal, and
        -inf for blocks that the query block may not choose.
        """
        grid = self._grid(q, k)
        free = grid.allowed & ~grid.always
        x = (self._scores(q, k, grid) / self.temperature).masked_fill(~free, 0.0)  # 0 times NaN would reach the sums
        wanted = (grid.budget(self.density) - grid.always.sum(-1)).clamp(min=0).to(x.dtype)
        gate = F.logsigmoid(x - _threshold(x, free, wanted))
        return gate.masked_fill(~free, -math.inf).masked_fill(grid.always, 0.0)

    def relaxed_attention(self, q: Queries, k: Keys, v: Keys, *, scale: float | None = None) -> Queries:
        """Return softmax(scale q·k + log gate) v, where a key has its block's gate. Invisible keys take no part."""
        q_block, k_block = block_pair(self.block_size)
        checks.tensors(q, k, v)
        checks.number("scale", scale)
        token = torch.arange(q.shape[1], device=q.device)
        bias = self.log_gates(q, k)[..., (token // q_block)[:, None], token // k_block]
        if self.is_causal:
            bias = bias.masked_fill(token > token[:, None], -math.inf)
        if scale is None:
            scale = q.shape[3] ** -0.5
        key, value = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
        probability = (scale * torch.einsum("bihd,bjhd->bhij", q, key) + bias.to(q.dtype)).softmax(-1)
        return torch.einsum("bhij,bjhd->bihd", probability, value)

    def _grid(self, q: Tensor, k: Tensor) -> Candidates:
        grid = candidates(q, k, block_size=self.block_size, is_causal=self.is_causal, floor=self.floor)
        heads = self.query_map.shape[0]
        kv_heads = self.key_map.shape[0]
        if (q.shape[2], k.shape[2]) != (heads, kv_heads):
            raise ValueError(
                f"the router has {heads} heads and {kv_heads} KV heads, got q with {q.shape[2]} and k with {k.shape[2]}"
            )
        return grid

    def _scores(self, q: Tensor, k: Tensor, grid: Candidates) -> Tensor:
        """Return the scores (B, H, rows, columns), in the router's dtype even under autocast: rounding would change the
        choice and the sums of gates."""
        with without_autocast(q):
            dtype = self.query_map.dtype
            query = part_means(q, grid, grid.q_block, 1, before=self.is_causal)[0][:, :, 0]
            query = torch.einsum("bihd,hdr->bhir", query.to(dtype), self.query_map)
            key = torch.cat([part_means(k, grid, grid.k_block, 1)[0][:, :, 0], extremes(k, grid.k_block)], dim=-1)
            key = torch.einsum("bjhd,hdr->bhjr", key.to(dtype), self.key_map)
            key = key.repeat_interleave(q.shape[2] // k.shape[2], dim=1)
            return query @ key.mT / self.query_map.shape[2] ** 0.5


def _threshold(x: Tensor, free: Tensor, wanted: Tensor) -> Tensor:
    """Return τ (…, rows, 1) such that a row's (query block's) sigmoid(x - τ), summed over its `free` entries (bool), is
    `wanted` (rows,); differentiable in x, which is 0 at other entries."""
    with torch.no_grad():
        low = x.amin(-1, keepdim=True) - 40
        high = x.amax(-1, keepdim=True) + 40
        for _ in range(64):
            middle = (low + high) / 2
            many = ((x - middle).sigmoid() * free).sum(-1, keepdim=True) > wanted[:, None]
            low = torch.where(many, middle, low)
            high = torch.where(many, high, middle)
        root = (low + high) / 2
    gate = (x - root).sigmoid() * free
    slope = (gate * (1 - gate)).sum(-1, keepdim=True).detach().clamp(min=torch.finfo(x.dtype).tiny)
    excess = gate.sum(-1, keepdim=True)
    return root + (excess - excess.detach()) / slope  # one Newton step: its value is the root, its gradient dτ/dx
