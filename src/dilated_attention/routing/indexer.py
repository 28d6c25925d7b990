"""Train an indexer of tokens: small heads that predict where the attention falls."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dilated_attention import checks
from dilated_attention.layout import BlockLayout
from dilated_attention.ranking import slices, stable_topk
from dilated_attention.routing.grid import Keys, Queries
from dilated_attention.torch_internals import without_autocast


class Indexer(nn.Module):
    """Choose the keys of each query, for all heads together (the indexer of DeepSeek Sparse Attention; DeepSeek-AI
    2025, DeepSeek-V3.2).

        index(t, s) = Σ_j w_{t, j} relu(a_{t, j} · b_s) / sqrt(head_dim),        a = W_a x, b = W_b x, w = W_w x,

    where few index heads j share b. A query sees the `top_k` tokens s <= t with the largest index.

    **Training.** The choice has no gradient. `loss` is the mean over queries of

        KL(p_t || softmax_{s <= t} index(t, s)),        p_t = the mean over heads of the attention's probabilities,

    so that the index predicts where the model's attention falls. Only the indexer learns from it.

    The index is computed for some queries at a time, N² values in all, so no N x N matrix is ever in memory.

    Args:
        num_heads, head_dim: the number and the width of the index heads; both may be small.

    Examples:
        >>> from dilated_attention.routing import Indexer
        >>> indexer = Indexer(embed_dim=32, num_heads=2, head_dim=8, top_k=4)
        >>> layout = indexer(torch.randn(1, 6, 32))
        >>> layout.seen[0, 0]  # the number of keys that each token sees
        tensor([1, 2, 3, 4, 4, 4])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 4,
        head_dim: int = 32,
        *,
        top_k: int = 2048,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        embed_dim, num_heads = checks.positive("embed_dim", embed_dim), checks.positive("num_heads", num_heads)
        head_dim, top_k = checks.positive("head_dim", head_dim), checks.positive("top_k", top_k)
        self.num_heads, self.head_dim, self.top_k = num_heads, head_dim, top_k
        factory: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.query = nn.Linear(embed_dim, num_heads * head_dim, **factory)
        self.key = nn.Linear(embed_dim, head_dim, **factory)
        self.weight = nn.Linear(embed_dim, num_heads, **factory)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, top_k={self.top_k}"

    def forward(self, x: Float[Tensor, "batch seq embed_dim"]) -> BlockLayout:
        """Return the causal layout of the tokens that each query sees, shared by all heads."""
        return BlockLayout.from_topk(self.choose(x), is_causal=True)

    @torch.no_grad()
    def choose(
        self, x: Float[Tensor, "batch seq embed_dim"], new: int | None = None
    ) -> Int[Tensor, "batch new chosen"]:
        """Return the tokens that each of the last `new` queries sees (None: all queries).

        A query that sees fewer than `top_k` tokens has -1 in the other places.
        """
        self._check(x)
        seq_len = x.shape[1]
        new = seq_len if new is None else checks.integer("new", new, 0, seq_len)
        chosen = [torch.empty(x.shape[0], 0, min(self.top_k, seq_len), dtype=torch.int64, device=x.device)]
        for at in slices(seq_len - new, seq_len, x.shape[0] * seq_len * self.num_heads):
            index = self._index(x, at)
            index = F.pad(index, (0, seq_len - index.shape[-1]), value=-torch.inf)
            values, indices = stable_topk(index, min(self.top_k, seq_len))
            chosen.append(indices.masked_fill(values == -torch.inf, -1))
        return torch.cat(chosen, 1)

    def loss(
        self, x: Float[Tensor, "batch seq embed_dim"], q: Queries, k: Keys, *, scale: float | None = None
    ) -> Float[Tensor, ""]:
        """Return the mean over queries of KL(attention's probabilities, averaged over heads || softmax of the index).

        It has gradients for the indexer's parameters only.

        Args:
            x: the input that `forward` gets.
            q, k: the queries and keys of the attention, after rotation if it rotates them.
        """
        self._check(x)
        checks.tensors(q, k, k, placed=True)
        checks.number("scale", scale)
        if not q.shape[:2] == k.shape[:2] == x.shape[:2]:
            raise ValueError(
                f"q and k must have the batch and seq of x, {tuple(x.shape)}; got {tuple(q.shape)} and {tuple(k.shape)}"
            )
        if not x.numel():
            raise ValueError(f"x has no tokens to learn from: shape {tuple(x.shape)}")
        x, q, k = x.detach(), q.detach(), k.detach()
        scale = q.shape[3] ** -0.5 if scale is None else scale
        part, rows = partial(self._divergence, x, q, k, scale), x.shape[0] * x.shape[1]
        parts = [
            checkpoint(part, at, use_reentrant=False) if torch.is_grad_enabled() else part(at)
            for at in slices(0, x.shape[1], rows * max(q.shape[2], self.num_heads))
        ]
        return torch.stack(parts).sum() / rows

    def _check(self, x: Tensor) -> None:
        width = self.key.in_features
        if x.dim() != 3 or x.shape[2] != width:
            raise ValueError(f"x must be (batch, seq, embed_dim={width}); got shape {tuple(x.shape)}")

    def _divergence(self, x: Tensor, q: Tensor, k: Tensor, scale: float, at: slice) -> Tensor:
        """Return KL(p_t || softmax index(t, ·)), summed over batch and queries t in `at`; p_t is the mean over heads of
        the attention's probabilities."""
        index = self._index(x, at)
        with torch.no_grad(), without_autocast(q):
            query = q[:, at].to(index.dtype).unflatten(2, (k.shape[2], -1)).permute(0, 2, 3, 1, 4)
            score = query @ k[:, : at.stop].to(index.dtype).permute(0, 2, 3, 1)[:, :, None] * scale
            wanted = score.masked_fill_(index[:, None, None] == -torch.inf, -torch.inf).softmax(-1).mean((1, 2))
        told = index.log_softmax(-1).masked_fill(wanted == 0, 0.0)  # 0 where a token lies ahead, not 0 times -inf
        return F.kl_div(told, wanted, reduction="sum")

    def _index(self, x: Tensor, at: slice) -> Tensor:
        """Return the indexer's scores index(t, s) of queries t in `at`: (batch, queries, at.stop); -inf where s > t."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        query = self.query(x[:, at]).unflatten(-1, (self.num_heads, -1)).to(dtype)
        key, weight = self.key(x[:, : at.stop]).to(dtype), self.weight(x[:, at]).to(dtype)
        with without_autocast(x):
            score = (query.transpose(1, 2) @ key.mT[:, None]).relu()
            index = torch.einsum("bjqs,bqj->bqs", score, weight) * self.head_dim**-0.5
        token = torch.arange(at.stop, device=x.device)
        return index.masked_fill(token > token[at, None], -torch.inf)
