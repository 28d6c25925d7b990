"""Choose pages of a cache by upper bounds of their scores, for decoding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dilated_attention import checks
from dilated_attention.ranking import forced_topk
from dilated_attention.routing.estimates import extremes
from dilated_attention.torch_internals import without_autocast


class PageBounds:
    """Keep the least and greatest components of each page's keys up to date as new keys arrive, for decoding.

    A page is a run of `page_size` neighbouring keys. With low and high the least and the greatest value of each
    component in a page (Quest, arXiv:2406.10774),

        max_{k in page} q·k  <=  Σ_d max(q_d low_d, q_d high_d).

    `append` takes the keys of new tokens; `best` returns the pages with the largest bounds for a query;
    `decoding.listed_attention` reads only those. For each page and KV head two vectors of head_dim are kept; and, for
    `crop`, the keys of the newest two pages.

    Raises ValueError if new keys do not have the batch size, heads, head_dim and dtype of the earlier ones, or if a
    query does not fit the keys.

    Attributes:
        seq_len: the number of tokens so far.

    Examples:
        >>> from dilated_attention.decoding import listed_attention
        >>> from dilated_attention.routing import PageBounds
        >>> q, k = torch.ones(1, 64, 1, 8), torch.zeros(1, 64, 1, 8)
        >>> k[:, 16:32] = 2.0  # the keys of block 1 get nearly all the attention
        >>> pages = PageBounds(page_size=16)
        >>> pages.append(k)
        >>> chosen = pages.best(q[:, -1:], number=2)  # page 1, and the newest token's own
        >>> sorted(chosen.flatten().tolist())
        [1, 3]
        >>> listed_attention(q[:, -1:], k, k, chosen[:, :, None], block_size=16).shape
        torch.Size([1, 1, 1, 8])
    """

    def __init__(self, page_size: int = 16) -> None:
        self.page_size = checks.positive("page_size", page_size)
        self.seq_len = 0
        self.pages = 0
        self.recent: Tensor | None = None  # the keys of the newest page and of the one before it
        self.bounds: Tensor | None = None  # (batch, kv_heads, room, 2 * head_dim): greatest, least

    @torch.no_grad()
    def append(self, k: Float[Tensor, "batch new kv_heads head_dim"]) -> None:
        if k.dim() != 4 or not k.is_floating_point():
            raise ValueError(
                f"k must be a floating (batch, new, kv_heads, head_dim); got {k.dtype} of shape {tuple(k.shape)}"
            )
        if self.bounds is not None:
            batch, kv_heads, _, width = self.bounds.shape
            mine = (batch, kv_heads, width // 2, self.bounds.dtype)
            if mine != (k.shape[0], k.shape[2], k.shape[3], k.dtype):
                raise ValueError(
                    f"k must have the batch, kv_heads, head_dim and dtype of the keys before it, {mine}; got {k.dtype} "
                    f"of shape {tuple(k.shape)}"
                )

        pages = -(-(self.seq_len + k.shape[1]) // self.page_size)
        if self.bounds is None or pages > self.bounds.shape[2]:
            with torch.inference_mode(False):  # else only inference mode could add to it
                grown = k.new_empty(k.shape[0], k.shape[2], 2 * pages, 2 * k.shape[3])
            if self.bounds is not None:
                grown[:, :, : self.pages] = self.bounds[:, :, : self.pages]
            self.bounds = grown

        recent = k
        if self.recent is not None:
            recent = torch.cat([self.recent, k], 1)
        first, held = divmod(self.seq_len, self.page_size)
        fresh = recent[:, recent.shape[1] - k.shape[1] - held :]  # from the start of the open page
        self.bounds[:, :, first:pages] = extremes(fresh, self.page_size).transpose(1, 2)
        self.seq_len += k.shape[1]
        self.pages = pages
        self.recent = recent[:, -(self.seq_len - max(0, pages - 2) * self.page_size) :].clone()

    def crop(self, seq_len: int) -> None:
        """Forget the tokens at positions `seq_len` and later. `seq_len` must lie in the newest page or the one before
        it."""
        seq_len = checks.integer("seq_len", seq_len, 0, self.seq_len)
        recent = self.recent
        if recent is None or seq_len == self.seq_len:
            return
        begin = self.seq_len - recent.shape[1]
        if seq_len < begin:
            raise ValueError(
                f"crop needs the keys of the page that it cuts, from token {begin} on; got seq_len={seq_len}"
            )
        self.pages = seq_len // self.page_size
        self.seq_len = self.pages * self.page_size
        self.recent = recent[:, : self.seq_len - begin]
        self.append(recent[:, self.seq_len - begin : seq_len - begin])

    def reorder(self, samples: Tensor | Sequence[int]) -> None:
        """Continue with these samples of the batch, such as the surviving beams; a sample may be continued several
        times."""
        if self.bounds is None or self.recent is None:
            return
        indices = checks.samples_to_continue(samples, len(self.bounds))
        self.bounds, self.recent = (x[indices.to(x.device)] for x in (self.bounds, self.recent))

    @torch.no_grad()
    def best(
        self, q: Float[Tensor, "batch new heads head_dim"], number: int
    ) -> Int[Tensor, "batch heads chosen"] | Int[Tensor, "batch heads new chosen"]:
        """Return the `number` pages with the largest bounds for each of the newest tokens and each head.

        The token's own page is always included. If there are fewer pages up to the token, all of them are returned.

        Returns:
            `(batch, heads, chosen)` for one new token; `(batch, heads, new, chosen)` for several, with -1 where a token
            has fewer pages. `listed_attention` takes both.
        """
        number = checks.positive("number", number)
        if self.bounds is None:
            raise ValueError("no keys to choose among; append those of the tokens so far")
        batch, kv_heads, _, width = self.bounds.shape
        if q.dim() != 4 or (q.shape[0], 2 * q.shape[3]) != (batch, width) or q.shape[2] % kv_heads:
            raise ValueError(
                f"q must be the newest tokens' queries, (batch, new, heads, head_dim), of a batch of {batch}, a "
                f"multiple of {kv_heads} heads and head_dim {width // 2}; got shape {tuple(q.shape)}"
            )
        if not 1 <= q.shape[1] <= self.seq_len:
            raise ValueError(f"q must have from 1 to {self.seq_len} tokens, the newest; got {q.shape[1]}")

        new = q.shape[1]
        dtype = torch.promote_types(q.dtype, torch.float32)
        key = self.bounds[:, :, None, : self.pages].to(dtype)
        query = q.transpose(1, 2).to(dtype)
        # Its product with (greatest, least) of a page is the bound.
        signed = torch.cat([query.clamp(min=0), query.clamp(max=0)], -1).unflatten(1, (kv_heads, -1))
        with without_autocast(q):
            bound = (signed @ key.mT).flatten(1, 2)

        own = (torch.arange(self.seq_len - new, self.seq_len, device=q.device) // self.page_size)[:, None]
        page = torch.arange(self.pages, device=q.device)
        values, pages = forced_topk(bound, page == own, page <= own, min(number, self.pages))
        if new == 1:
            return pages[:, :, 0]
        return pages.masked_fill(values == -torch.inf, -1)
