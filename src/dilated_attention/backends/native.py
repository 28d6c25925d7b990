"""Run calls with PyTorch's fused attention on zero-copy strided views of q, k and v.

The rows of a group are an arithmetic progression of tokens, hence a strided view. No row is gathered, padded or
transposed. A group is cut into tiles, and each tile is one fused call whose temporaries are a bounded part of the
output. If the first group covers the whole sequence, the result of its call *is* the running output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, product
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from dilated_attention.backends import blocks, fused
from dilated_attention.backends.attributes import Attributes
from dilated_attention.backends.facts import Facts
from dilated_attention.backends.fused import Merged, Pairs, Settings, bias_of
from dilated_attention.backends.problem import Layouts, Problem
from dilated_attention.bias import Added
from dilated_attention.cache import Kept, lasting, plan_cache
from dilated_attention.layout import BlockLayout
from dilated_attention.merge import add_phantoms, merge_into, running
from dilated_attention.plan import Rows, StridedGroup, slice_rows

Tokens = Float[Tensor, "batch seq heads dim"]
KeyTokens = Float[Tensor, "batch keys kv_heads dim"]
TokenStatistic = Float[Tensor, "batch seq heads"]

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_TILE_BYTES = 16 << 20
"""The most bytes of one tile's output. Large compared with a call's start-up cost, yet small enough that the output is
merged while it is in cache and reuses the memory of the previous tile. An accelerator gets at least a quarter of the
whole output per call."""
_BAND_ROWS = 256
"""The number of queries of a window per call. With a window of w keys a call computes w + 256 scores per query."""
_MOST_PROBLEMS = 65_535
"""The most problems per call. CUDA's operators count them in a launch dimension with this limit; more raise "invalid
configuration argument" (PyTorch's issue 142228)."""
_MOST_ACCUMULATED = 2**31
"""The most elements of the buffer in which a call's dq is summed. FlashAttention 2, and PyTorch's copy of it, index it
with 32 bits. Larger buffers give wrong numbers or an illegal address (FlashAttention's pull request 2260 fixes it)."""


def refusal(facts: Facts) -> str | None:
    """Return why this backend cannot serve a call, and what would serve it; None if it can."""
    if facts.dtype not in DTYPES:
        return f"PyTorch's fused attention has no kernel for {facts.dtype}; use float32"
    return None


def _families(groups: tuple[StridedGroup, ...]) -> Iterator[tuple[StridedGroup, int]]:
    """Join runs of groups, each shifted by one token and one KV head from the one before it, into *families*: yield the
    first group of each, and the number of its groups, the residues.

    A branch whose offset is h mod r gives such groups. A view can have a dimension that runs over them: its stride is
    one token plus one head.
    """
    i = 0
    while i < len(groups):
        first = groups[i]
        residues = 1
        while i + residues < len(groups) and groups[i + residues] == first.shifted(residues, residues):
            residues += 1
        yield first, residues
        i += residues


@dataclass(frozen=True, slots=True)
class _Tile:
    """Describe the part of a family that one fused call computes: every combination of these indices.

    Each combination of batch, segment and residue is one *problem* of the call. Only one of the three may have several
    indices; or both batch and segment, if a view can fold them into one dimension. A residue shifts the tokens by 1,
    the query heads by q_shift and the KV heads by 1.

    Attributes:
        q_heads, k_heads: the heads for residue 0: one KV head per query head, or one that all query heads share.
    """

    batch: range
    segment: range
    residue: range
    q_heads: range
    k_heads: range
    q_shift: int

    @property
    def shares_keys(self) -> bool:
        return len(self.k_heads) < len(self.q_heads)

    def cut(self, pieces: int, most: int) -> Iterator[_Tile]:
        """Cut into at least `pieces` tiles, if there are enough problems and heads to cut, of at most `_MOST_PROBLEMS`
        problems. Problems times heads is at most `most`."""
        problems = len(self.batch) * len(self.segment) * len(self.residue)
        heads = len(self.q_heads)
        if pieces == 1 and problems <= _MOST_PROBLEMS and problems * heads <= most:
            yield self
            return

        # A folded batch and segment can only be cut by batch.
        if len(self.batch) > 1:
            axis = 0
        elif len(self.segment) > 1:
            axis = 1
        else:
            axis = 2
        axes = [self.batch, self.segment, self.residue]
        length = len(axes[axis])

        per_step = problems // length
        fit = max(1, min(_MOST_PROBLEMS, most // heads) // per_step)
        splits = min(max(pieces, -(-length // fit)), length)
        fit = most // (-(-length // splits) * per_step)
        head_splits = max(-(-pieces // splits), -(-heads // fit))

        for part in _pieces(axes[axis], splits):
            axes[axis] = part
            for q_heads in _pieces(self.q_heads, head_splits):
                k_heads = self.k_heads
                if not self.shares_keys:
                    first = self.q_heads.index(q_heads[0])
                    k_heads = k_heads[first : first + len(q_heads)]
                batch, segment, residue = axes
                yield _Tile(batch, segment, residue, q_heads, k_heads, self.q_shift)

    def queries(self, x: Tensor, rows: Rows) -> Tensor:
        """View the `rows` of a tensor with query heads, (batch, seq, heads, ...), as (problems, heads, rows, ...)."""
        return self._view(x, rows, self.q_heads, len(self.q_heads), self.q_shift)

    def keys(self, x: Tensor, rows: Rows) -> Tensor:
        """View a tensor with KV heads as `queries` does. A shared head is repeated, by a stride of 0."""
        return self._view(x, rows, self.k_heads, len(self.q_heads), 1)

    def key_sums(self, x: Tensor, rows: Rows) -> Tensor:
        """View a tensor with KV heads as `keys` does, but a shared head once: the caller sums over its query heads."""
        return self._view(x, rows, self.k_heads, len(self.k_heads), 1)

    def bias(self, x: Tensor | None, rows: Rows) -> Tensor | None:
        """View a key bias x, 0 or -inf per key (`bias_of`), as (problems, 1, 1, keys); `rows`: the key rows.

        x is (batch, seq, KV heads or 1), with equal values for all heads of the tile.
        """
        if x is None:
            return None
        if x.shape[2] == 1:
            return self._view(x, rows, range(1), 1, 0).unsqueeze(-2)
        return self._view(x, rows, self.k_heads[:1], 1, 1).unsqueeze(-2)

    def pairs(self, attributes: Attributes, group: StridedGroup, k: Tensor) -> Pairs | None:
        """Return the hash words of this tile's queries and keys in `group`; None without dropout. The words of keys are
        expanded to the batch, tokens and heads of `k`."""
        if "words" not in attributes.queries:
            return None
        keys = attributes.keys["words"].expand(k.shape[:3])
        return Pairs(self.queries(attributes.queries["words"], group.queries), self.keys(keys, group.keys))

    def added(self, problem: Problem, group: StridedGroup, q: Tensor, k: Tensor) -> Added | None:
        """Return what the bias adds to this tile's scores in `group`; None without a bias. q and k give the batch, rows
        and heads."""
        if problem.bias is None:
            return None
        attributes = problem.attributes
        places = attributes.queries["places"].expand(q.shape[:3])
        queries = attributes.queries["where"].expand(*q.shape[:3], -1)
        keys = attributes.keys["where"].expand(*k.shape[:3], -1)
        return Added(
            problem.bias, self.queries(places, group.queries), self.queries(queries, group.queries),
            self.keys(keys, group.keys),
        )  # fmt: skip

    def layout(self, layouts: Layouts, group: StridedGroup) -> BlockLayout:
        """Return the layout inside the group's segments, for this tile's batch elements and query heads."""
        layout = layouts[group.listed]
        batch = self.batch if layout.batch_size > 1 else None
        heads = self.q_heads if layout.num_heads > 1 else None
        if batch is None and heads is None:
            return layout
        return plan_cache.of(_selected, layout, batch, heads).layout

    def _view(self, x: Tensor, rows: Rows, heads: range, number: int, shift: int) -> Tensor:
        """View x as (problems, number, rows, ...), for the given heads or a single one repeated `number` times; each
        residue shifts heads by `shift`."""
        head_step = heads.step
        if len(heads) < number:
            head_step = 0
        every_head = number == x.shape[2] and head_step == 1 and len(self.residue) == 1
        if every_head and rows.count == x.shape[1] and len(self.batch) == x.shape[0]:  # a quicker way to the same view
            return x.transpose(1, 2)

        batch, token, per_head, *rest = x.stride()
        residue = self.residue.start
        start = rows.start + self.segment.start * rows.segment + residue
        offset = self.batch.start * batch + start * token + (heads.start + residue * shift) * per_head

        if len(self.residue) > 1:
            fold = token + shift * per_head
        elif len(self.segment) > 1:
            fold = rows.segment * token
        else:
            fold = batch
        problems = len(self.batch) * len(self.segment) * len(self.residue)
        strides = (fold, head_step * per_head, rows.stride * token, *rest)
        return x.as_strided((problems, number, rows.count, *x.shape[3:]), strides, x.storage_offset() + offset)


def _most_heads(rows: Rows, head_dim: int) -> int:
    """Return the most problems x heads (see `_Tile`) that one call with these query rows may have: the operators sum dq
    in a buffer of padded rows and columns, whose size is limited."""
    unit = 32 if head_dim <= 128 else 64
    padded_columns = -(-head_dim // unit) * unit
    padded_rows = -(-rows.count // 128) * 128
    return max(1, _MOST_ACCUMULATED // (padded_rows * padded_columns))


def _whole(group: StridedGroup, q: Tensor, k: Tensor, tensors: tuple[Tensor, ...], head_dim: int) -> _Tile | None:
    """Return a tile that computes all rows and heads of a group in one call, so that its result is the whole output.

    Returns None unless the group is marked `first`, its queries are all rows at stride 1 and its keys the same rows, it
    has all heads (one KV head per query head), batch and segment fold into one dimension (`_folds`), and the call stays
    within the operators' limits. `tensors`, `head_dim`: as in `_Whole.tiles`.
    """
    rows = group.queries
    every_row = rows.start == 0 and rows.stride == 1 and rows.segments * rows.count == q.shape[1]
    every_key = group.keys == rows and k.shape[1] == q.shape[1]
    every_head = group.head_stride == 1 and group.heads == q.shape[2] and k.shape[2] == q.shape[2]
    if not (group.first and every_row and every_key and every_head and _folds(group, tensors)):
        return None

    problems = q.shape[0] * rows.segments
    if problems > _MOST_PROBLEMS or problems * group.heads > _most_heads(rows, head_dim):
        return None
    heads = range(group.heads)
    return _Tile(range(q.shape[0]), range(rows.segments), range(1), heads, heads, 1)


def _folds(group: StridedGroup, tensors: tuple[Tensor, ...]) -> bool:
    """Return whether (batch, segment) can be viewed as one dimension in every (batch, seq, ...) tensor."""
    if tensors[0].shape[0] == 1 or group.queries.segments == 1:
        return True
    step = group.queries.segment * group.queries.segments
    return step == group.keys.segment * group.keys.segments and all(x.stride(0) == step * x.stride(1) for x in tensors)


def _head_runs(group: StridedGroup, ratio: int) -> list[tuple[range, range]]:
    """Split a group's query heads, `ratio` per KV head, into arithmetic progressions, each with its KV heads: the
    neighbouring query heads of one KV head, or one query head of each KV head."""
    step = group.head_stride
    k_heads = range(group.head, group.head + group.heads * step, step)
    if group.heads <= ratio:
        return [(range(head * ratio, (head + 1) * ratio), range(head, head + 1)) for head in k_heads]
    first = group.head * ratio
    stop = k_heads.stop * ratio
    return [(range(first + j, stop + j, step * ratio), k_heads) for j in range(ratio)]


def _blocks(batches: int, segments: int, residues: int, folds: bool) -> Iterator[tuple[range, range, range]]:
    """Yield (batch, segment, residue) index ranges, one per call, that together cover a family: as few as views permit.

    One call spans either all residues of one segment, or all segments of one residue. `folds`: as in `_folds`.
    """
    batch = range(batches)
    segment = range(segments)
    residue = range(residues)
    batch_pieces = 1 if folds else batches
    if batches * segments < residues * batch_pieces:
        return product(_pieces(batch, batches), _pieces(segment, segments), [residue])
    return product(_pieces(batch, batch_pieces), [segment], _pieces(residue, residues))


def _pieces(indices: range, number: int) -> list[range]:
    """Split `indices` into at most `number` nearly equal pieces."""
    length = len(indices)
    number = min(number, length)
    return [indices[i * length // number : (i + 1) * length // number] for i in range(number)]


def _cut(group: StridedGroup) -> Iterator[StridedGroup]:
    """Cut a group with a band into groups that need only a causal mask or a bias, which PyTorch's operators support.

    A causal group, or one without a band, stays whole. If the band only makes the last keys, as many as the queries,
    causal, these keys become a second group. Any other band is cut into runs of queries, each with the keys that some
    of its queries see; the band between them becomes a bias of 0 or -inf.
    """
    if not group.banded or (group.low is None and group.high == 0):
        yield group
        return
    rows = group.queries
    keys = group.keys
    if group.low is None and group.high is not None and keys.count - group.high == rows.count:
        yield group._replace(keys=slice_rows(keys, 0, group.high), high=None)
        yield group._replace(keys=slice_rows(keys, group.high, keys.count), high=0, first=False)
        return
    yield from group.runs(_BAND_ROWS)


def _hidden(group: StridedGroup, device: torch.device) -> Tensor:
    """Return a mask, True where the band (`low`, `high`) of a group hides a key: bool, `(1, 1, queries, keys)`."""
    row = torch.arange(group.queries.count, device=device)
    column = torch.arange(group.keys.count, device=device)
    distance = column - row[:, None]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if group.low is not None:
        hidden |= distance < group.low
    if group.high is not None:
        hidden |= distance > group.high
    return hidden[None, None]


def _dense_rows(x: Tensor) -> Tensor:
    """Return x, or a copy if its last dimension is strided or its tokens overlap.

    The fused operators read rows as dense vectors, and matrix products need rows that do not overlap.
    """
    apart = x.stride(1) >= x.shape[-1] or x.shape[1] == 1
    if apart and x.stride(-1) == 1:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _selected(layout: BlockLayout, batch: range | None, heads: range | None) -> Kept:
    return Kept(lasting(lambda: layout.select(batch=batch, heads=heads), layout.device))


class _Listed(NamedTuple):
    """Hold a layout, and which of its rows and columns are queries and keys of a group: `row` and `column` are the
    first."""

    layout: BlockLayout
    row: int
    column: int

    @classmethod
    def of(cls, layout: BlockLayout, group: StridedGroup) -> _Listed:
        row, column = group.at
        queries = group.queries.count
        keys = group.keys.count
        if keys == layout.seq_len:
            return cls(layout, row, column)
        return plan_cache.of(cls.cut, layout, (row, row + queries), (column, column + keys))

    @classmethod
    def cut(cls, layout: BlockLayout, queries: tuple[int, int], keys: tuple[int, int]) -> _Listed:
        return lasting(lambda: cls(*layout.part(queries, keys)), layout.device)

    @property
    def nbytes(self) -> int:
        return 256 + 4 * self.layout.nbytes

    def rows(self, x: Tensor) -> Tensor:
        """Return x `(problems, heads, queries, ...)` with all rows of the layout; those without a query are 0."""
        return self._padded(x, self.row)

    def columns(self, x: Tensor) -> Tensor:
        """Return x `(problems, heads, keys, ...)` with all columns of the layout; those without a key are 0."""
        return self._padded(x, self.column)

    def _padded(self, x: Tensor, first: int) -> Tensor:
        after = self.layout.seq_len - first - x.shape[2]
        if not first and not after:
            return x
        return pad(x, (0, 0) * (x.dim() - 3) + (first, after))

    def settings(self, settings: Settings, k: Tensor) -> Settings:
        """Return settings for all rows and columns of the layout; columns without a key of k are hidden."""
        after = self.layout.seq_len - self.column - k.shape[2]
        bias = settings.bias
        if self.column or after:
            if bias is None:
                bias = k.new_zeros(len(k), 1, 1, k.shape[2])
            bias = pad(bias, (self.column, after), value=-torch.inf)

        pairs = settings.pairs
        if pairs is not None:
            of_keys = pad(pairs.keys, (self.column, after))
            pairs = Pairs(self.rows(pairs.queries), of_keys)
        added = settings.added
        if added is not None:
            added = Added(added.source, self.rows(added.places), self.rows(added.queries), self.columns(added.keys))
        return settings._replace(bias=bias, pairs=pairs, added=added)


class _Whole:
    """Hold a `Problem` and its tensors, of which each tile computes a part."""

    def __init__(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.problem = problem
        self.q = _dense_rows(q)
        self.k = _dense_rows(k)
        self.v = _dense_rows(v)

        hidden = problem.hidden
        self.bias: Tensor | None = None
        if hidden is not None:
            self.bias = bias_of(hidden.expand(len(q), -1, -1), q.dtype)

        self.groups = problem.plan.groups
        if not q.numel():
            self.groups = ()
        elif not problem.layouts:
            self.groups = tuple(chain.from_iterable(map(_cut, self.groups)))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor that tiles view: q, k, v, the bias of the key mask, and the attributes of queries.

        The attributes of keys are views, or expanded like k.
        """
        attributes = self.problem.attributes
        found = [self.q, self.k, self.v, *[x.expand(len(self.q), *x.shape[1:]) for x in attributes.queries.values()]]
        if "where" in attributes.keys:
            found.append(attributes.keys["where"].expand(len(self.q), -1, -1, -1))
        if self.bias is not None:
            found.append(self.bias)
        if "words" in attributes.keys:
            found.append(attributes.keys["words"].expand(self.k.shape[:3]))
        return tuple(found)

    def tiles(
        self, groups: tuple[StridedGroup, ...], tensors: tuple[Tensor, ...], head_dim: int
    ) -> Iterator[tuple[StridedGroup, _Tile]]:
        """Yield (group, tile): groups cut into few tiles, whose outputs stay within a limit of bytes if possible.

        Args:
            tensors: all (batch, seq, ...) tensors that the tiles will view.
            head_dim: the number of columns of q in the calls.
        """
        q = self.q
        ratio = q.shape[2] // self.k.shape[2]
        row_bytes = q.shape[-1] * q.element_size()
        limit = _TILE_BYTES
        if q.device.type != "cpu":
            limit = max(limit, q.numel() * q.element_size() // 4)

        layouts = self.problem.layouts
        families: Iterable[tuple[StridedGroup, int]]
        if layouts is not None and any(layout.num_heads > 1 for layout in layouts.values()):
            families = [(group, 1) for group in groups]  # a call has one layout, and each head has its own
        else:
            families = _families(groups)

        for group, residues in families:
            segments = group.queries.segments
            most = _most_heads(group.queries, head_dim)
            folds = _folds(group, tensors) and segments <= min(_MOST_PROBLEMS, most)
            for q_heads, k_heads in _head_runs(group, ratio):
                for batch, segment, residue in _blocks(len(q), segments, residues, folds):
                    whole = _Tile(batch, segment, residue, q_heads, k_heads, ratio)
                    rows = len(batch) * len(segment) * len(residue) * len(q_heads) * group.queries.count
                    for tile in whole.cut(-(-rows * row_bytes // limit), most):
                        yield group, tile

    def _views(self, group: StridedGroup, tile: _Tile) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of a tile, `(problems, heads, rows, head_dim)`."""
        q = tile.queries(self.q, group.queries)
        k = tile.keys(self.k, group.keys)
        v = tile.keys(self.v, group.keys)
        return q, k, v

    def _settings(self, group: StridedGroup, tile: _Tile) -> Settings:
        problem = self.problem
        bias = tile.bias(self.bias, group.keys)
        pairs = tile.pairs(problem.attributes, group, self.k)
        added = tile.added(problem, group, self.q, self.k)

        causal = group.low is None and group.high == 0
        if group.banded and not causal:
            band = bias_of(_hidden(group, self.q.device), self.q.dtype)
            bias = band if bias is None else bias + band
        return Settings(problem.scores, causal, bias, pairs, added)

    def attend(self, group: StridedGroup, tile: _Tile) -> tuple[Tensor, Tensor]:
        """Return out and lse of a tile, `(problems, heads, rows, ...)`; `group`: the group that it is cut from."""
        q, k, v = self._views(group, tile)
        settings = self._settings(group, tile)
        layouts = self.problem.layouts
        if layouts is None:
            out, lse = fused.forward(settings, q, k, v)
            if group.phantoms:
                add_phantoms(out, lse, group.phantoms)
            return out, lse

        listed = _Listed.of(tile.layout(layouts, group), group)
        settings = listed.settings(settings, k)
        out, lse = blocks.forward(listed.layout, settings, listed.rows(q), listed.columns(k), listed.columns(v))
        rows = group.queries.count
        return out.narrow(2, listed.row, rows), lse.narrow(2, listed.row, rows)

    def differentiate(self, merged: Merged, group: StridedGroup, tile: _Tile) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv of a tile, `(problems, heads, rows, head_dim)`, each per query head; `merged`: of the
        whole call."""
        part = merged.views(lambda x: tile.queries(x, group.queries))
        q, k, v = self._views(group, tile)
        settings = self._settings(group, tile)
        layouts = self.problem.layouts
        if layouts is None:
            return fused.backward(settings, part, q, k, v)

        listed = _Listed.of(tile.layout(layouts, group), group)
        settings = listed.settings(settings, k)
        part = part.views(listed.rows)
        padded = (listed.rows(q), listed.columns(k), listed.columns(v))
        dq, dk, dv = blocks.backward(listed.layout, settings, part, *padded)
        dq = dq.narrow(2, listed.row, group.queries.count)
        dk = dk.narrow(2, listed.column, group.keys.count)
        dv = dv.narrow(2, listed.column, group.keys.count)
        return dq, dk, dv


def forward(
    problem: Problem,
    q: Tokens,
    k: KeyTokens,
    v: KeyTokens,
    state: tuple[Tokens, TokenStatistic] | None = None,
) -> tuple[Tokens, TokenStatistic]:
    """Return (out, lse) of a problem, both contiguous: out shaped like q, and lse `(batch, seq, heads)`.

    A query that sees no key gets out 0 and lse -inf.

    Args:
        state: a running (out, lse), contiguous, to merge into in place; then no group may be marked `first`.
    """
    whole = _Whole(problem, q, k, v)
    groups = whole.groups
    inputs = whole.tensors
    whole_tile = None
    if state is None and groups:
        whole_tile = _whole(groups[0], whole.q, whole.k, inputs, q.shape[-1])

    if state is not None:
        out, lse = state
    elif whole_tile is not None:
        part, part_lse = whole.attend(groups[0], whole_tile)
        out = part.transpose(1, 2).reshape(q.shape).contiguous().detach()  # a view could not be changed in place
        statistic = torch.promote_types(q.dtype, torch.float32)
        lse = part_lse.transpose(1, 2).reshape(q.shape[:3]).to(statistic).contiguous().detach()
        groups = groups[1:]
    else:
        out, lse = running(q, problem.plan.covered)

    for group, tile in whole.tiles(groups, (*inputs, out), q.shape[-1]):
        part, part_lse = whole.attend(group, tile)
        rows = tile.queries(out, group.queries)
        rows_lse = tile.queries(lse, group.queries)
        if group.first:
            rows.copy_(part)
            rows_lse.copy_(part_lse)
        else:
            merge_into(rows, rows_lse, part, part_lse)
    return out, lse


def backward(
    problem: Problem,
    dout: Tokens,
    dlse: TokenStatistic | None,
    q: Tokens,
    k: KeyTokens,
    v: KeyTokens,
    out: Tokens,
    lse: TokenStatistic,
    state: tuple[Tokens, KeyTokens, KeyTokens] | None = None,
) -> tuple[Tokens, KeyTokens, KeyTokens]:
    """Return the exact (dq, dk, dv) of a problem from the merged out and lse.

    Args:
        dlse: the gradient of the returned lse, or None.
        state: running (dq, dk, dv), single precision at least, contiguous, added to in place and returned.
    """
    empty = lse == -torch.inf
    lse = lse.masked_fill(empty, 0.0)  # exp(-inf - 0) = 0: rows that see nothing give no gradient
    head_dim = q.shape[-1]
    if dlse is not None:
        dlse = dlse.masked_fill(empty, 0.0)
        head_dim += 8  # a gradient on lse appends at most 8 columns

    plan = problem.plan
    whole = _Whole(problem, q, k, v)
    merged = Merged(_dense_rows(dout), dlse, _dense_rows(out), lse)
    groups = whole.groups
    inputs = (*whole.tensors, merged.dout)
    # Where every group's keys are its queries, the group that writes a row of out may write that row of dq, dk and dv.
    assign = state is None and plan.square and q.shape[2] == k.shape[2] and groups == plan.groups
    # Rows that several parts add to are summed in single precision at least.
    sums = q.dtype
    if not assign or len(groups) != 1:
        sums = torch.promote_types(q.dtype, torch.float32)
    whole_tile = None
    if assign and groups:
        whole_tile = _whole(groups[0], whole.q, whole.k, inputs, head_dim)

    if state is not None:
        dq, dk, dv = state
    elif whole_tile is not None:
        parts = whole.differentiate(merged, groups[0], whole_tile)
        dq, dk, dv = (part.transpose(1, 2).reshape(q.shape).to(sums).contiguous() for part in parts)
        groups = groups[1:]
    else:
        make = torch.empty if assign and plan.covered else torch.zeros
        dq, dk, dv = (make(x.shape, dtype=sums, device=x.device) for x in (q, k, v))

    for group, tile in whole.tiles(groups, (*inputs, dq, dk), head_dim):
        part_q, part_k, part_v = whole.differentiate(merged, group, tile)
        if tile.shares_keys:
            part_k = part_k.sum(1, keepdim=True)
            part_v = part_v.sum(1, keepdim=True)
        targets = (tile.queries(dq, group.queries), tile.key_sums(dk, group.keys), tile.key_sums(dv, group.keys))
        for target, part in zip(targets, (part_q, part_k, part_v), strict=True):
            if assign and group.first:
                target.copy_(part)
            else:
                target.add_(part)
    if state is not None:
        return state
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)
