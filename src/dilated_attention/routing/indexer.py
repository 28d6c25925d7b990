"""Train an indexer of tokens: small heads that predict where the attention falls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from dilated_attention.torch_internals import taken_as_true, without_autocast

Numbers = Tensor | Sequence[int] | None
Tables = tuple[Tensor, ...]


class Indexer(nn.Module):
    """Choose the keys of each query, for all heads together (the indexer of DeepSeek Sparse Attention; DeepSeek-AI
    2025, DeepSeek-V3.2).

        index(t, s) = Σ_j w_{t, j} relu(a_{t, j} · b_s) / sqrt(head_dim),        a = R W_a x, b = R W_b x, w = W_w x,

    where few index heads j share b. A query sees the `top_k` tokens s <= t with the largest index. The first `leading`
    tokens of its sample and the last `recent` ones up to its own come before all others.

    **Positions.** R rotates the first channels by `tables`, (cos, sin) as from `nn.rotary_tables` or those of
    `nn.Rotary.tables`: all head_dim channels, or as many as the tables have. Without tables nothing is rotated: the
    index knows only the positions that x itself holds.

    **Training.** The choice has no gradient. `loss` is the mean over queries of

        KL(p_t || softmax_{s <= t} index(t, s)),        p_t = the mean over heads of the attention's probabilities,

    so that the index predicts where the model's attention falls. Only the indexer learns from it.

    **Ragged batches.** All methods take `lengths`, `cu_seqlens` or `key_padding_mask`, as `attention` does; the mask
    may hide tokens at either end, or between others. No hidden token is chosen, no query sees another sample, and a
    sample gets the choice and the loss that it gets alone. A hidden token's own query sees nothing.

    The index is computed for some queries at a time, N² values in all, so no N x N matrix is ever in memory.

    Args:
        num_heads, head_dim: the number and the width of the index heads; both may be small.
        leading, recent: how many tokens each query always sees at both ends (`recent=1`: its own); part of `top_k`.

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
        leading: int = 0,
        recent: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        embed_dim = checks.positive("embed_dim", embed_dim)
        self.num_heads = checks.positive("num_heads", num_heads)
        self.head_dim = checks.positive("head_dim", head_dim)
        self.top_k = checks.positive("top_k", top_k)
        self.leading = checks.integer("leading", leading, 0)
        self.recent = checks.integer("recent", recent, 0)
        if self.leading + self.recent > self.top_k:
            raise ValueError(f"top_k={top_k} is less than leading={leading} and recent={recent} together; raise it")
        factory: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.query = nn.Linear(embed_dim, self.num_heads * self.head_dim, **factory)
        self.key = nn.Linear(embed_dim, self.head_dim, **factory)
        self.weight = nn.Linear(embed_dim, self.num_heads, **factory)

    def extra_repr(self) -> str:
        shown = f"num_heads={self.num_heads}, head_dim={self.head_dim}, top_k={self.top_k}"
        if self.leading or self.recent:
            shown += f", leading={self.leading}, recent={self.recent}"
        return shown

    def forward(
        self,
        x: Float[Tensor, "batch seq embed_dim"],
        *,
        tables: Tables | None = None,
        lengths: Numbers = None,
        cu_seqlens: Numbers = None,
        key_padding_mask: Tensor | None = None,
    ) -> BlockLayout:
        """Return the causal layout of the tokens that each query sees, shared by all heads.

        With `cu_seqlens` it has the lists of each sample, for a call with the same `cu_seqlens`. tables: `(batch or 1,
        seq, 1, channels)` or `(seq, 1, channels)` each, see the class.
        """
        ragged: dict[str, Any] = {"lengths": lengths, "cu_seqlens": cu_seqlens, "key_padding_mask": key_padding_mask}
        chosen = self.choose(x, tables=tables, **ragged)
        if cu_seqlens is not None:
            edges = checks.ragged(x, None, cu_seqlens)[1]
            assert edges is not None
            chosen = _by_sample(chosen[0], edges.to(x.device))
        return BlockLayout.from_topk(chosen, is_causal=True)

    def choose(
        self,
        x: Float[Tensor, "batch seq embed_dim"],
        new: int | None = None,
        *,
        tables: Tables | None = None,
        lengths: Numbers = None,
        cu_seqlens: Numbers = None,
        key_padding_mask: Tensor | None = None,
    ) -> Int[Tensor, "batch new chosen"]:
        """Return the tokens that each of the last `new` queries sees (None: all queries).

        A query that sees fewer than `top_k` tokens has -1 in the other places. Tokens are counted along seq, also those
        of packed samples.
        """
        self._check(x, tables)
        seq_len = x.shape[1]
        if new is None:
            new = seq_len
        else:
            new = checks.integer("new", new, 0, seq_len)
        first_query = seq_len - new
        sample, edges = _samples(x, lengths, cu_seqlens, key_padding_mask)
        x = x.masked_fill((sample < 0)[..., None], 0.0)
        width = min(self.top_k, seq_len)
        place = _places(sample, edges)
        chosen = [torch.empty(x.shape[0], 0, width, dtype=torch.int64, device=x.device)]
        with _without_gradients():
            key = self._keys(x, tables)
            for first, at in _parts(x, first_query, edges, self.num_heads):
                index = self._index(x[:, at], tables_at(tables, at), key, first, at, sample)
                index = self._forced(index, place[:, at, None], place[:, None, first : at.stop])
                chosen.append(_best(F.pad(index, (first, seq_len - at.stop), value=-torch.inf), width))
        return torch.cat(chosen, 1).masked_fill((sample[:, first_query:] < 0)[..., None], -1)

    def keys(
        self, x: Float[Tensor, "batch seq embed_dim"], *, tables: Tables | None = None
    ) -> Float[Tensor, "batch seq head_dim"]:
        """Return the index keys b of tokens, in single precision or better; tables as in `forward`."""
        self._check(x, tables)
        return self._keys(x, tables)

    @torch.no_grad()
    def choose_next(
        self,
        x: Float[Tensor, "batch new embed_dim"],
        keys: Float[Tensor, "batch seq head_dim"],
        *,
        tables: Tables | None = None,
    ) -> Int[Tensor, "batch new chosen"]:
        """Return the tokens that the newest tokens see, as `choose` returns them, from the index keys of all tokens.

        Args:
            x, tables: of the newest tokens alone; over a mesh, of this rank's.
            keys: from the method `keys`: those of all tokens so far, the newest last; over a mesh, those of this rank
                and of the ranks before it.
        """
        self._check(x, tables)
        self._check_keys(x, keys)
        batch, new, _ = x.shape
        seq_len = keys.shape[1]
        width = min(self.top_k, seq_len)
        token = torch.arange(seq_len, device=x.device)
        chosen = [torch.empty(batch, 0, width, dtype=torch.int64, device=x.device)]
        for at in slices(0, new, batch * seq_len * self.num_heads):
            own = token[seq_len - new :][at, None]
            index = self._scores(x[:, at], tables_at(tables, at), keys).masked_fill(token > own, -torch.inf)
            chosen.append(_best(self._forced(index, own, token), width))
        return torch.cat(chosen, 1)

    def loss(
        self,
        x: Float[Tensor, "batch seq embed_dim"],
        q: Queries,
        k: Keys,
        *,
        keys: Float[Tensor, "batch seq head_dim"] | None = None,
        scale: float | None = None,
        tables: Tables | None = None,
        lengths: Numbers = None,
        cu_seqlens: Numbers = None,
        key_padding_mask: Tensor | None = None,
    ) -> Float[Tensor, ""]:
        """Return the mean over queries of KL(attention's probabilities, averaged over heads || softmax of the index).

        It has gradients for the indexer's parameters only. Hidden tokens do not count; it is 0 if all are hidden.

        Args:
            x: the input that `forward` gets.
            q, k: the queries and keys of the attention, after rotation if it rotates them.
            keys: the index keys of all tokens so far, of which those of x are the newest, as in `choose_next`; k,
                lengths, cu_seqlens and key_padding_mask are then of all of them. None: those of x.
        """
        self._check(x, tables)
        checks.tensors(q, k, k, placed=True)
        checks.number("scale", scale)
        if keys is not None:
            self._check_keys(x, keys)
        known = x if keys is None else keys
        if q.shape[:2] != x.shape[:2] or k.shape[:2] != known.shape[:2]:
            raise ValueError(
                f"q and k must have the batch and seq of x, {tuple(x.shape)}; got {tuple(q.shape)} and {tuple(k.shape)}"
            )
        if keys is not None and not x.shape[1]:
            return self._scores(x, tables, keys).sum()  # 0, with its gradients: over a mesh all ranks go backward
        if not x.numel():
            raise ValueError(f"x has no tokens to learn from: shape {tuple(x.shape)}")
        sample, edges = _samples(k, lengths, cu_seqlens, key_padding_mask)
        start = k.shape[1] - x.shape[1]
        hidden = sample < 0
        own = hidden[:, start:]
        x = x.detach().masked_fill(own[..., None], 0.0)
        q = q.detach().masked_fill(own[..., None, None], 0.0)
        k = k.detach().masked_fill(hidden[..., None, None], 0.0)
        if keys is None:
            keys = self._keys(x, tables)
        if scale is None:
            scale = q.shape[3] ** -0.5

        parts = []
        for first, at in _parts(k, start, edges, max(q.shape[2], self.num_heads)):
            rows = slice(at.start - start, at.stop - start)
            part = partial(
                self._divergence, x[:, rows], q[:, rows], k, scale, tables_at(tables, rows), keys, sample, first, at
            )
            if torch.is_grad_enabled():
                parts.append(checkpoint(part, use_reentrant=False))
            else:
                parts.append(part())
        return torch.stack(parts).sum() / (~own).expand(x.shape[:2]).sum().clamp(min=1)

    def _check(self, x: Tensor, tables: Tables | None) -> None:
        width = self.key.in_features
        if x.dim() != 3 or x.shape[2] != width:
            raise ValueError(f"x must be (batch, seq, embed_dim={width}); got shape {tuple(x.shape)}")
        for table in tables or ():
            channels = table.shape[-1]
            fits = table.dim() in (3, 4) and table.shape[-3:-1] == (x.shape[1], 1)
            if not fits or channels > self.head_dim or channels % 2:
                raise ValueError(
                    f"tables must be (cos, sin), each (batch or 1, {x.shape[1]}, 1, channels) with an even number of "
                    f"channels up to head_dim={self.head_dim}; got shape {tuple(table.shape)}"
                )

    def _check_keys(self, x: Tensor, keys: Tensor) -> None:
        batch, new, _ = x.shape
        if keys.dim() != 3 or keys.shape[::2] != (batch, self.head_dim) or keys.shape[1] < new:
            raise ValueError(
                f"keys must be (batch={batch}, seq, head_dim={self.head_dim}) with a seq of at least {new}, the tokens "
                f"of x; got shape {tuple(keys.shape)}"
            )

    def _divergence(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        scale: float,
        tables: Tables | None,
        key: Tensor,
        sample: Tensor,
        first: int,
        at: slice,
    ) -> Tensor:
        """Return KL(p_t || softmax index(t, ·)), summed over batch and queries t; p_t is the mean over heads of the
        attention's probabilities. A hidden query sees itself alone, so its part is 0. x, q and tables are those of the
        queries t, which are the tokens `at`."""
        index = self._index(x, tables, key, first, at, sample)
        with torch.no_grad(), without_autocast(q):
            query = q.to(index.dtype).unflatten(2, (k.shape[2], -1)).permute(0, 2, 3, 1, 4)
            score = query @ k[:, first : at.stop].to(index.dtype).permute(0, 2, 3, 1)[:, :, None] * scale
            wanted = score.masked_fill_(index[:, None, None] == -torch.inf, -torch.inf).softmax(-1).mean((1, 2))
        told = index.log_softmax(-1).masked_fill(wanted == 0, 0.0)  # 0 where a token is not seen, not 0 times -inf
        return F.kl_div(told, wanted, reduction="sum")

    def _index(self, x: Tensor, tables: Tables | None, key: Tensor, first: int, at: slice, sample: Tensor) -> Tensor:
        """Return the scores index(t, s) of queries t in `at` and keys s in [first, at.stop), `(batch, queries, keys)`;
        -inf where s > t or s is of another sample. x and tables are those of the queries; `key` is from `_keys`,
        `sample` from `_samples`."""
        before = slice(first, at.stop)
        index = self._scores(x, tables, key[:, before])
        token = torch.arange(at.stop, device=x.device)
        seen = (token[first:] <= token[at, None]) & (sample[:, None, before] == sample[:, at, None])
        return index.masked_fill(~seen, -torch.inf)

    def _keys(self, x: Tensor, tables: Tables | None) -> Tensor:
        key = self.key(x)
        key = key.to(torch.promote_types(x.dtype, torch.float32))
        if tables is None:
            return key
        return _rotated(key[:, :, None], tables[-2:])[:, :, 0]

    def _scores(self, x: Tensor, tables: Tables | None, key: Tensor) -> Tensor:
        """Return index(t, s) of the tokens t of x and all keys s, `(batch, queries, keys)`."""
        query = self.query(x).unflatten(-1, (self.num_heads, -1)).to(key.dtype)
        if tables is not None:
            query = _rotated(query, tables[:2])
        weight = self.weight(x).to(key.dtype)
        with without_autocast(x):
            score = (query.transpose(1, 2) @ key.mT[:, None]).relu()
            return torch.einsum("bjqs,bqj->bqs", score, weight) * self.head_dim**-0.5

    def _forced(self, index: Tensor, own: Tensor, place: Tensor) -> Tensor:
        """Return the index with inf for the tokens that come before all others, unless it is -inf. `own` and `place`
        are the places of queries and keys in their sample, and broadcast to the index."""
        forced = (place < self.leading) | (own - place < self.recent)
        return index.masked_fill(forced & (index > -torch.inf), torch.inf)


def _without_gradients() -> AbstractContextManager[object]:
    """Return `torch.no_grad()`. In a graph it does nothing: what is chosen has no gradient anyway, and pipelines cannot
    split a graph that turns gradients off."""
    if torch.compiler.is_compiling():
        return nullcontext()
    return torch.no_grad()


def _best(index: Tensor, number: int) -> Tensor:
    """Return the keys with the largest index, `(..., number)`; -1 in place of those whose index is -inf."""
    values, indices = stable_topk(index, number)
    return indices.masked_fill(values == -torch.inf, -1)


def _samples(
    x: Tensor, lengths: Numbers, cu_seqlens: Numbers, key_padding_mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the number of each token's sample, `(batch or 1, seq)`, and the checked cu_seqlens.

    A query sees keys with its own number. Numbers count packed samples, and are 0 in other batches; each hidden token
    has a negative number of its own.
    """
    lengths, cu_seqlens = checks.ragged_or_masked(x, lengths, cu_seqlens, key_padding_mask)
    if not torch.compiler.is_compiling():
        checks.samples(x.shape[1], lengths, cu_seqlens)
    token = torch.arange(x.shape[1], device=x.device)[None]
    if cu_seqlens is not None:
        return torch.searchsorted(cu_seqlens[1:].to(x.device), token, right=True), cu_seqlens
    if lengths is not None:
        key_padding_mask = token >= lengths.to(x.device)[:, None]
    if key_padding_mask is None:
        return torch.zeros_like(token), None
    return torch.where(key_padding_mask, -1 - token, 0), None


def _places(sample: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return the place of each token among the real tokens of its sample, `(batch or 1, seq)`; see `_samples`."""
    if cu_seqlens is None:
        return (sample >= 0).cumsum(1) - 1
    token = torch.arange(sample.shape[1], device=sample.device)
    return token - cu_seqlens.to(sample.device)[sample]


def tables_at(tables: Tables | None, at: slice) -> Tables | None:
    """Return the rotary tables of the tokens `at`; None without tables."""
    if tables is None:
        return None
    return tuple(table[..., at, :, :] for table in tables)


def _rotated(x: Tensor, tables: Tables) -> Tensor:
    """Rotate the first channels of x `(batch, tokens, heads, head_dim)` by tables (cos, sin)."""
    cos, sin = (table.to(x.dtype) for table in tables)
    turned, rest = x.tensor_split([cos.shape[-1]], -1)
    turned = torch.addcmul(turned * cos, turned.roll(cos.shape[-1] // 2, -1), sin)
    return torch.cat([turned, rest], -1)


def _parts(x: Tensor, start: int, cu_seqlens: Tensor | None, heads: int) -> Iterator[tuple[int, slice]]:
    """Yield (first key, slice of queries) for all queries from `start` on, some at a time.

    Packed samples come one after another, so that each costs what it costs alone. A graph, which cannot read where they
    end, computes the scores between them too, and hides them.
    """
    if torch.compiler.is_compiling():
        cu_seqlens = None
    for _, seq in checks.samples(x.shape[1], None, cu_seqlens):
        for at in slices(max(start, seq.start), seq.stop, x.shape[0] * (seq.stop - seq.start) * heads):
            yield seq.start, at


def _by_sample(chosen: Tensor, edges: Tensor) -> Tensor:
    """Return the choices of packed samples, `(seq, chosen)`, as `(samples, longest, chosen)`, with tokens counted from
    the start of their sample; -1 for none."""
    longest = int(edges.diff().max())
    taken_as_true(longest >= 1)
    token = torch.arange(len(chosen), device=chosen.device)
    sample = torch.searchsorted(edges[1:], token, right=True)
    start = edges[sample]
    placed = chosen.new_full((len(edges) - 1, longest, chosen.shape[1]), -1)
    placed[sample, token - start] = (chosen - start[:, None]).clamp(min=-1)
    return placed
