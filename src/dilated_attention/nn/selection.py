"""Provide the base class of attention that selects key blocks, its choice, and its cache of earlier tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from dilated_attention import checks
from dilated_attention.backends.table import check_name
from dilated_attention.call import Pattern
from dilated_attention.decoding import listed_attention
from dilated_attention.errors import UnsupportedError
from dilated_attention.functional import attention
from dilated_attention.layout import BlockLayout
from dilated_attention.layout.spans import MAX_BLOCK, BlockGrid
from dilated_attention.mesh import context_group
from dilated_attention.nn.attention import Sharded
from dilated_attention.nn.positions import Tables, rotate
from dilated_attention.parallel.partition import balanced_bounds
from dilated_attention.parallel.sharding import agreed_length, gathered
from dilated_attention.ranking import forced_topk, slices
from dilated_attention.routing.indexer import tables_at
from dilated_attention.routing.operator import choosers, in_graph
from dilated_attention.torch_internals import not_traced


@dataclass(frozen=True)
class BlockChoice:
    """Choose for each query the `number` blocks that are most important to it, up to its own.

    Every `query_block`-th token chooses; the tokens up to the next of them see the same blocks. The last `local` blocks
    up to a query's own come before all others, and so does block 0 if `first`. Among equally important blocks, the
    earlier ones are chosen. A subclass defines `importance`.
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

    @torch.no_grad()
    def blocks(
        self,
        q: Float[Tensor, "batch queries heads head_dim"],
        start: int,
        key: Float[Tensor, "batch rows kv_heads head_dim"],
    ) -> Int[Tensor, "batch lists queries chosen"]:
        """Return the blocks that these queries see, the most important first.

        A query that sees fewer than min(`number`, blocks) of them gets -1 for the rest. Arguments as in `importance`.
        """
        queries = q.shape[1]
        step = self.query_block
        blocks = (start + (queries - 1) * step) // self.block_size + 1
        own = torch.arange(start, start + queries * step, step, device=q.device)[:, None] // self.block_size
        block = torch.arange(blocks, device=q.device)

        scores_per_query = 0  # on the meta device they take no memory
        if not q.is_meta:
            scores_per_query = q.shape[0] * q.shape[2] * max(blocks, key.shape[1])
        chosen = []
        for at in slices(0, queries, scores_per_query):
            always = block > own[at] - self.local
            if self.first:
                always = always | (block == 0)
            importance = self.importance(q[:, at], start + at.start * step, key, blocks)
            indices = forced_topk(importance, always, block <= own[at], min(self.number, blocks))[1]
            chosen.append(indices.masked_fill(indices > own[at], -1))
        return torch.cat(chosen, 2)

    def layout(self, chosen: Tensor, seq_len: int) -> BlockLayout:
        """Return the causal layout in which each run of `query_block` queries sees its `chosen` blocks (`blocks`).

        The queries of block i see min(i + 1, blocks per list) blocks.
        """
        _, _, runs, most = chosen.shape
        runs_per_block = self.block_size // self.query_block
        ordered = chosen.sort(-1).values  # -1 first

        parts = []
        for i in range(most - 1):  # the queries of block i see i + 1 blocks: leave out the -1
            in_block = ordered[:, :, i * runs_per_block : (i + 1) * runs_per_block]
            parts.append(in_block[..., most - 1 - i :].flatten(2))
        parts.append(ordered[:, :, max(0, most - 1) * runs_per_block :].flatten(2))
        indices = torch.cat(parts, 2)

        counts = (torch.arange(runs, device=chosen.device) // runs_per_block + 1).clamp(max=most)
        grid = BlockGrid.of(seq_len, (self.query_block, self.block_size), True)
        return BlockLayout._of(grid, (counts.expand(chosen.shape[:3]), indices.flatten()))

    def in_graph(self, q: Tensor, key: Tensor) -> BlockLayout:
        """Return the layout for all tokens, from one operator of a graph."""
        options = {
            "block_size": (self.query_block, self.block_size),
            "is_causal": True,
            "per_kv_head": self.per_kv_head,
            "choice": {x.name: getattr(self, x.name) for x in fields(self)},
        }
        return in_graph(type(self).__name__, q, key, None, None, None, options)


def _layout(kind: type[BlockChoice], q: Tensor, key: Tensor, *, choice: dict[str, Any], **_: Any) -> BlockLayout:
    chooses = kind(**choice)
    return chooses.layout(chooses.blocks(q[:, :: chooses.query_block], 0, key), q.shape[1])


def attend_listed(q: Tensor, k: Tensor, v: Tensor, lists: Tensor, **options: Any) -> Tensor:
    """Return the attention of q over listed keys, shaped like q, with the head_dim of v; 0 where a list is empty.

    Args:
        q: `(batch, queries, heads, head_dim)`. k, v: `(batch, keys, kv_heads, ...)`, in any order.
        lists: for each query the keys that it sees, `(batch, lists, queries, k)`, -1 for none. There is one list for
            all heads, one per KV head or one per head.
        options: as in `attention`.
    """
    queries = q.shape[1]
    keys = k.shape[1]
    if not queries:
        return q.new_zeros(*q.shape[:3], v.shape[3]) + k[:, :0].sum() + v[:, :0].sum()  # all ranks go backward
    if queries == 1 and not options.get("dropout_p") and options.get("softcap") is None:
        out = listed_attention(q, k, v, lists, scale=options.get("scale"), sinks=options.get("sinks"))
    else:
        layout = _layout_of_lists(lists, max(queries, keys))
        if queries != keys:
            options |= {"q_start": layout.seq_len - queries, "k_start": 0}
        out = attention(q, k, v, layout, **options)
    assert isinstance(out, Tensor)
    return out


def _layout_of_lists(lists: Tensor, seq_len: int) -> BlockLayout:
    """Return a layout of `seq_len` tokens. Its last rows are `lists`, `(batch, lists, queries, k)`; others are
    empty."""
    missing = seq_len - lists.shape[2]
    if not missing:
        return BlockLayout.from_topk(lists)
    ordered = lists.long().sort(-1).values
    named = ordered.diff(prepend=torch.full_like(ordered[..., :1], -1)) > 0
    ends = named.sum(-1).flatten().cumsum(0)
    starts = F.pad(ends[:-1], (1, 0)).view(lists.shape[:3])[..., :1]
    indptr = torch.cat([starts.expand(-1, -1, missing + 1), ends.view(lists.shape[:3])], -1)
    return BlockLayout.from_indices(indptr, ordered[named], seq_len, 1)


class Rows:
    """Hold rows `(batch, tokens, ...)`, to which more can be appended. Only the last `keep` rows can be read;
    None: all."""

    def __init__(self, keep: int | None = None) -> None:
        self.keep = keep
        self.buffer: Tensor | None = None
        self.held = 0

    def append(self, x: Tensor) -> None:
        x = x.detach()
        if self.keep is not None:
            x = x[:, -self.keep :]
        stop = self.held + x.shape[1]
        if self.buffer is None or stop > self.buffer.shape[1]:
            old = x[:, :0] if self.buffer is None else self.last()
            stop = old.shape[1] + x.shape[1]
            with torch.inference_mode(False):  # else only inference mode could add to it
                self.buffer = x.new_empty(x.shape[0], 2 * stop, *x.shape[2:])
            self.buffer[:, : old.shape[1]] = old
        self.buffer[:, stop - x.shape[1] : stop] = x
        self.held = stop

    def of(self, samples: Tensor) -> Rows:
        """Return a copy with the samples of the batch whose indices `samples` lists, in that order."""
        found = copy(self)
        if self.buffer is not None:
            found.buffer = self.buffer[samples.to(self.buffer.device)]
        return found

    def last(self, number: int | None = None) -> Tensor:
        """Return the last `number` rows, or all if there are fewer; None: the last `keep` rows."""
        assert self.buffer is not None
        if number is None:
            number = self.keep
        start = 0 if number is None else max(0, self.held - number)
        rows = self.buffer[:, start : self.held]
        if torch.is_grad_enabled():  # a backward must not find later rows there
            return rows.clone()
        return rows


class _State(NamedTuple):
    """Hold what a `SelectionCache` contained when it had `length` tokens.

    `rows` shares the cache's buffers. Later rows do not overwrite these: the cache writes them behind, or to a new
    buffer.
    """

    length: int
    chosen: Tensor | None
    rows: dict[str, Rows]


class SelectionCache:
    """Hold what an attention layer remembers of the tokens so far. Start with an empty cache; each layer needs its own.

    Args:
        croppable: how many tokens after the prompt `crop` can remove again.

    Attributes:
        length: the number of tokens so far.
        rows: the rows kept for these tokens, such as keys and values, by name.
        chosen: the blocks that the newest query sees, `(batch, lists, blocks)`, filled up with -1. There is a list per
            head or KV head. None before the first token.
        nbytes: the size of the rows in bytes, including memory reserved for later ones.

    Examples:
        >>> from dilated_attention.nn import BlockAttentionMixture, SelectionCache
        >>> layer = BlockAttentionMixture(32, num_heads=4, block_size=8, top_k=2, query_block=4)
        >>> x, cache = torch.randn(1, 33, 32), SelectionCache()
        >>> parts = [layer(x[:, :32], cache=cache), layer(x[:, 32:], cache=cache)]  # a prompt, then a new token
        >>> torch.allclose(torch.cat(parts, 1), layer(x), atol=1e-5)
        True
        >>> cache.length
        33
    """

    def __init__(self, croppable: int = 16) -> None:
        self.earlier: deque[_State] = deque(maxlen=checks.integer("croppable", croppable, 0))
        self.layer: object = None
        self.batch = 0
        self.length = 0
        self.rows: dict[str, Rows] = {}
        self.chosen: Tensor | None = None

    def used_by(self, layer: object, batch: int) -> bool:
        """Return whether the cache already holds tokens. An empty cache becomes the cache of `layer`.

        Raises ValueError if the tokens belong to another layer, or to a batch of another size.
        """
        if not self.length:
            self.layer = layer
            self.batch = batch
        if self.layer is None:  # the cache is a copy, or was saved
            self.layer = layer
        if self.layer is not layer:
            raise ValueError("cache holds the tokens of another layer; each layer needs a SelectionCache of its own")
        if self.batch != batch:
            raise ValueError(f"cache holds {self.batch} samples, got x with {batch}; begin with an empty one")
        return self.length > 0

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the layer: a copy, or a cache that was saved, belongs to the first layer that calls with it."""
        return self.__dict__ | {"layer": None}

    @contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """Restore the tokens held before the `with` block if it raises: later queries must not see a refused token."""
        before = self._state()
        earlier = self.earlier.copy()
        try:
            yield
        except BaseException:
            self.length, self.chosen, self.rows = before
            self.earlier = earlier
            raise

    def _state(self) -> _State:
        return _State(self.length, self.chosen, {name: copy(rows) for name, rows in self.rows.items()})

    def keep_for_crop(self) -> None:
        """Record the current state, so that `crop` can return to it."""
        if self.earlier.maxlen:
            self.earlier.append(self._state())

    def crop(self, length: int) -> None:
        """Forget the tokens at positions `length` and later, such as the rejected tokens of speculative decoding.

        Raises ValueError if these are more than `croppable` tokens, or if some of them belong to the prompt.
        """
        length = checks.integer("length", length, 0, self.length)
        least = self.earlier[0].length if self.earlier else self.length
        if length < least:
            raise ValueError(
                f"crop takes back at most {self.earlier.maxlen} tokens that came after the prompt, here to a length of "
                f"{least}; got length={length}: give SelectionCache a larger croppable, or compute the prompt anew"
            )
        while self.length > length:
            self.length, self.chosen, self.rows = self.earlier.pop()

    def reorder(self, samples: Tensor | Sequence[int]) -> None:
        """Continue with these samples of the batch, such as the surviving beams; a sample may be continued several
        times.

        `crop` cannot go back to earlier tokens after this.
        """
        if not self.batch:
            return
        indices = checks.samples_to_continue(samples, self.batch)
        self.batch = len(indices)
        if self.chosen is not None:
            self.chosen = self.chosen[indices.to(self.chosen.device)]
        self.rows = {name: rows.of(indices) for name, rows in self.rows.items()}
        self.earlier.clear()

    def append(self, name: str, x: Tensor, keep: int | None = None) -> None:
        self.rows.setdefault(name, Rows(keep)).append(x)

    def last(self, name: str, number: int | None = None) -> Tensor:
        return self.rows[name].last(number)

    @property
    def nbytes(self) -> int:
        return sum(rows.buffer.nbytes for rows in self.rows.values() if rows.buffer is not None)


class SelectingAttention(Sharded):
    """Base class of causal self-attention over selected keys.

    A subclass defines `_whole` and `_next`, and sets the attributes below. A branch is one attention of q, with keys
    and values of its own.

    Attributes:
        shown: the arguments that its repr shows.
        input: one projection of x to the queries, then to the keys and values of each branch in turn.
        output: the projection of the heads' results to the output.
        unrotated: the number of branches, counted from the first, whose keys `_project` does not rotate; default 0.
    """

    shown: tuple[str, ...]
    input: nn.Linear
    output: nn.Linear
    unrotated = 0

    def __init__(self, embed_dim: int, num_heads: int, num_kv_heads: int | None, backend: str) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.num_kv_heads = checks.heads(embed_dim, num_heads, num_kv_heads)
        self.head_dim = self.embed_dim // self.num_heads
        check_name(backend)
        self.backend = backend

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self.shown)

    def forward(
        self,
        x: Float[Tensor, "batch seq embed_dim"],
        rotary: Tables | None = None,
        *,
        cache: SelectionCache | None = None,
        cu_seqlens: Sequence[int] | Int[Tensor, " samples_and_one"] | None = None,
    ) -> Float[Tensor, "batch seq embed_dim"]:
        """Return the attention's output, shaped like x.

        Args:
            rotary: tables for the tokens of x, from `Rotary.tables` or `rotary_tables`; None: no positions.
            cache: the earlier tokens, which x continues. The tokens of x attend to them too and are added to the cache;
                the rows equal those of one forward over all tokens. The first call computes its tokens together, later
                calls one by one. No gradient flows into the cache. If the call raises, the cache is as it was before;
                but the caches of a model's earlier layers, whose calls returned, hold the tokens of x already.
            cu_seqlens: the edges of the samples that are packed in x, one after another, as in `attention`. Each gets
                the output that it gets alone. The batch must then be 1, without a cache and without a mesh.

        Raises:
            ValueError: x is not `(batch, seq, embed_dim)`; the rotary tables or cu_seqlens do not fit its shape; or the
                cache belongs to another layer or batch size.
            UnsupportedError: a cache over a mesh, or cu_seqlens with either.
        """
        if x.dim() != 3 or x.shape[2] != self.embed_dim:
            raise ValueError(f"x must be (batch, seq, embed_dim={self.embed_dim}); got shape {tuple(x.shape)}")
        tables = (x.shape[1], 1, self.head_dim)
        for table in rotary or ():
            if table.shape not in (tables, (1, *tables), (x.shape[0], *tables)):
                raise ValueError(
                    f"rotary must be tables of shape (seq, 1, head_dim) = {tables}, a batch before them or none, of "
                    f"the tokens of x alone; got {tuple(table.shape)}"
                )
        if self.mesh is not None and cache is not None:
            raise UnsupportedError("cache: a SelectionCache holds the tokens of one device; over a mesh pass None")

        if cu_seqlens is not None:
            self._refuse_packed(cache)
            return self._packed(x, rotary, cu_seqlens)
        if self.mesh is not None:
            return self._over_mesh(x, rotary)
        if not x.numel():
            return self.output(x)
        if cache is None:
            return self._whole(x, rotary, None)
        with cache.restored_on_error():
            if not cache.used_by(self, x.shape[0]):
                return self._whole(x, rotary, cache)
            return self._one_by_one(x, rotary, cache)

    def _refuse_packed(self, cache: SelectionCache | None = None) -> None:
        """Raise UnsupportedError for cu_seqlens over a mesh or with a cache."""
        if self.mesh is not None or cache is not None:
            raise UnsupportedError(
                "cu_seqlens with a cache or over a mesh is not supported where keys are selected; "
                "make one call per sample"
            )

    def _packed(self, x: Tensor, rotary: Tables | None, cu_seqlens: Any) -> Tensor:
        """Return the output of samples that are packed in x; `cu_seqlens` as in forward."""
        _, edges = checks.ragged(x, None, cu_seqlens)
        outs = []
        for batch, tokens in checks.samples(x.shape[1], None, edges):
            if tokens.start < tokens.stop:
                outs.append(self._whole(x[batch, tokens], tables_at(rotary, tokens), None))
        if not outs:
            return self.output(x)
        return torch.cat(outs, 1)

    @not_traced  # else the compiler would make a graph for every place of a token in its block
    def _one_by_one(self, x: Tensor, rotary: Tables | None, cache: SelectionCache) -> Tensor:
        outs = []
        for i in range(x.shape[1]):
            cache.keep_for_crop()
            row = slice(i, i + 1)
            outs.append(self._next(x[:, row], tables_at(rotary, row), cache))
        return torch.cat(outs, 1)

    def _project(self, x: Tensor, rotary: Tables | None) -> tuple[Tensor, list[Tensor]]:
        """Return the queries, and a list of keys and values: k, v of the first branch, k, v of the next.

        With `rotary`, the queries are rotated, and the keys of all branches but the first `unrotated` ones.
        """
        rows = self.input(x).unflatten(-1, (-1, self.head_dim))
        q = rows[..., : self.num_heads, :]
        rest = list(rows[..., self.num_heads :, :].split(self.num_kv_heads, -2))
        if rotary is not None:
            q = rotate(q, rotary[:2])
            keys = slice(2 * self.unrotated, None, 2)
            rest[keys] = [rotate(k, rotary[-2:]) for k in rest[keys]]
        return q, rest

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, seq_len: int) -> Tensor:
        options: dict[str, Any] = {}
        if self.mesh is not None:
            options = {"mesh": self.mesh, "seq_len": seq_len, "transport": self.transport, "layer": self.layer}
        out = attention(q, k, v, pattern, is_causal=True, backend=self.backend, **options)
        assert isinstance(out, Tensor)
        return out

    def _edges(self, x: Tensor) -> tuple[Tensor, list[int], int]:
        """Return (x, edges, rank): rank i holds the tokens [edges[i], edges[i + 1]) of x; `rank` is this one. Over a
        mesh x requires gradients if some rank's does.

        Raises ValueError if a shard has another length than `parallel.sequence_range` gives it, or the ranks disagree.
        """
        if self.mesh is None:
            return x, [0, x.shape[1]], 0
        group = context_group(self.mesh)
        x, length = agreed_length(x, group, 1, self.seq_len, type(self).__name__)
        edges = list(balanced_bounds(length, dist.get_world_size(group)))
        return x, edges, dist.get_rank(group)

    @not_traced
    def _over_mesh(self, x: Tensor, rotary: Tables | None) -> Tensor:
        return self._whole(x, rotary, None)

    def _whole(self, x: Tensor, rotary: Tables | None, cache: SelectionCache | None) -> Tensor:
        """Return the output of x, with which the sequence begins. Fills the cache, if given."""
        raise NotImplementedError

    def _next(self, x: Tensor, rotary: Tables | None, cache: SelectionCache) -> Tensor:
        """Return the output of one more token, `(batch, 1, embed_dim)`, and add the token to the cache."""
        raise NotImplementedError


class BlockSelectingAttention(SelectingAttention):
    """Base class of causal self-attention over selected blocks of keys.

    Attributes:
        query_block: this many neighbouring queries share the blocks that the first of them chooses.
        choice: how queries choose their blocks.
    """

    choice: BlockChoice

    def __init__(
        self, embed_dim: int, num_heads: int, num_kv_heads: int | None, block_size: int, query_block: int, backend: str
    ) -> None:
        super().__init__(embed_dim, num_heads, num_kv_heads, backend)
        self.block_size = checks.integer("block_size", block_size, 1, MAX_BLOCK)
        self.query_block = checks.positive("query_block", query_block)
        # Queries that share their blocks must lie in one block: only this block's keys then need a causal mask.
        if self.block_size % self.query_block:
            raise ValueError(f"query_block={self.query_block} must divide block_size={self.block_size}")

    def _selected(
        self, q: Tensor, key: Tensor, edges: list[int], rank: int, cache: SelectionCache | None
    ) -> BlockLayout:
        """Return the layout of the blocks that the queries see; `cache` gets the newest query's.

        Over a mesh each rank chooses for its own queries, and gets all lists.

        Args:
            q: the queries of this rank's tokens.
            key: the pooled keys of the whole sequence, see `BlockChoice.importance`.
            edges, rank: from `_edges`.
        """
        if torch.compiler.is_compiling() and cache is None:
            return self.choice.in_graph(q, key)
        checks.not_mapped(type(self).__name__, q, key)
        choice = self.choice
        lists = q.shape[2]
        if choice.per_kv_head:
            lists = key.shape[2]

        start = edges[rank]
        first = -start % self.query_block  # the first of this rank's tokens that chooses
        chosen = torch.empty(len(q), lists, 0, 0, dtype=torch.int64, device=q.device)
        if first < q.shape[1]:
            chosen = choice.blocks(q[:, first :: self.query_block], start + first, key)
        if self.mesh is not None:
            width = min(choice.number, -(-edges[-1] // self.block_size))
            chosen = F.pad(chosen, (0, width - chosen.shape[-1]), value=-1)
            bounds = [-(-edge // self.query_block) for edge in edges]
            chosen = gathered(chosen, 2, bounds, self.mesh, "chosen blocks")
        if cache is not None:
            cache.chosen = chosen[:, :, -1]
        return choice.layout(chosen, edges[-1])
