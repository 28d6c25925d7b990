"""Define the biases that `attention(..., bias=b)` adds to its scores: s_ij = cap(scale q_i · k_j) + b_h(i, j).

A bias takes part in lse and in every gradient. It has one of four forms:

    form                                                b_h(i, j)
    `Alibi(slopes, coordinates, metric)`                -slopes[h] · distance(i, j)
    `RelativeBias(table, buckets, coordinates)`         table[h, bucket(j - i)]
    `QueryBias(logits)`                                 logits[i, h, i - j], 0 outside of the extent
    a tensor (batch or 1, heads or 1, queries, keys)    tensor[h, i, j]

Backends compute all of them by one rule. A pair reads one entry of the form's tensor, numbered as if the tensor were
contiguous, and multiplies it by a factor:

    b_h(i, j) = tensor[place(i, h) + column(i, j)] · factor(i, j)

The gradient of the tensor is therefore a sum of dS · factor over the pairs that read an entry. `places` says where each
query begins to read, and `Added` computes column and factor of some queries and keys. A further form is a class with
`normal`, a name in `FORMS`, and its lines in `places` and `Added._column`; in between, nothing knows the forms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dilated_attention import checks
from dilated_attention.errors import UnsupportedError

__all__ = ["Alibi", "QueryBias", "RelativeBias"]

METRICS = ("euclidean", "manhattan", "chebyshev")
DISTANCES = ("alibi", *METRICS)
FORMS = ("none", *DISTANCES, "relative", "relative in space", "by query", "by pair")
"""The names of the forms. `Scores.bias` is an index of this tuple."""
BY_DIFFERENCE = ("alibi", "relative")
"""The forms that depend on the difference of positions alone."""
BY_QUERY = ("by query", "by pair")
"""The forms whose tensor has rows by query."""


class Normal(NamedTuple):
    """Hold a checked bias in the form in which it travels from the call to the backends.

    Attributes:
        form: an index of `FORMS`.
        tensor: what has gradients, with a batch dimension: slopes `(1, heads)`, a table `(1, heads, ...)`, logits
            `(batch or 1, queries, heads, extent)`, or a tensor by pair.
        coordinates: `(batch or 1, positions, axes)`, or None: positions count.
        buckets: the column of the table for each difference, or None: the columns are differences.
        query_tokens, key_tokens: the token of each row of q and of k, `(rows,)`, if the rows are tokens in another
            order (`reordered`); else None.
    """

    form: int
    tensor: Tensor
    coordinates: Tensor | None = None
    buckets: Tensor | None = None
    query_tokens: Tensor | None = None
    key_tokens: Tensor | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the names of what a backend must be able to do for this bias (`Facts.needs`)."""
        name = FORMS[self.form]
        if name == "relative in space":
            return ("a table over coordinates",)
        if self.query_tokens is not None and name not in METRICS:
            return ("a bias of tokens in another order",)
        return ()

    def reordered(self, query_tokens: Tensor, key_tokens: Tensor, seq_len: int) -> Normal:
        """Return this bias of `seq_len` tokens for rows of q and k that are tokens in another order: the token of each
        row is given."""
        bias = self._replace(query_tokens=query_tokens, key_tokens=key_tokens)
        if FORMS[self.form] != "alibi":
            return bias
        # The kernels of the cpu backend take "alibi" from the numbers of rows, and distances from coordinates.
        positions = torch.arange(seq_len, device=key_tokens.device)
        return bias._replace(form=FORMS.index("manhattan"), coordinates=positions[None, :, None])


@dataclass(frozen=True, eq=False)
class Alibi:
    """Hold a bias that falls with the distance: b_h(i, j) = -slopes[h] · distance(i, j) (ALiBi, arXiv:2108.12409).

    Without coordinates the distance of two tokens is the difference of their positions, on both sides. With coordinates
    it is the distance of two points in a plane or a volume, as for the tiles of a slide.

    Args:
        slopes: `(heads,)`, one per head of q; differentiable.
        coordinates: `(batch or 1, seq, axes)`, numbers; row p belongs to the token at position p. No gradient.
        metric: `"euclidean"`, `"manhattan"` (sum over axes) or `"chebyshev"` (greatest of the axes).

    Examples:
        >>> from dilated_attention import Window, attention
        >>> from dilated_attention.bias import Alibi
        >>> q, k, v = (torch.randn(1, 16, 2, 8) for _ in range(3))
        >>> slopes = torch.tensor([0.5, 0.25])
        >>> attention(q, k, v, Window(7), is_causal=True, bias=Alibi(slopes)).shape
        torch.Size([1, 16, 2, 8])
        >>> grid = torch.cartesian_prod(torch.arange(4), torch.arange(4))  # 16 tiles of a slide
        >>> attention(q, k, v, Window(7, 7), bias=Alibi(slopes, grid[None])).shape
        torch.Size([1, 16, 2, 8])
    """

    slopes: Float[Tensor, " heads"]
    coordinates: Tensor | None = None
    metric: str = "euclidean"

    def __post_init__(self) -> None:
        _check_floating("slopes", self.slopes, 1, "(heads,)")
        if self.metric not in METRICS:
            raise ValueError(f"metric must be one of {METRICS}; got {self.metric!r}")
        _check_coordinates(self.coordinates)

    def normal(self, q: Tensor, reach: int, placed: bool) -> Normal:
        _check_heads("slopes", self.slopes, q)
        _check_reach(self.coordinates, q, reach, placed)
        name = "alibi" if self.coordinates is None else self.metric
        return Normal(FORMS.index(name), self.slopes[None], self.coordinates)


@dataclass(frozen=True, eq=False)
class RelativeBias:
    """Hold a learned bias by relative position: b_h(i, j) = table[h, bucket(j - i)] (T5, arXiv:1910.10683).

    Differences beyond the extent of the table use its first or last entry.

    Args:
        table: differentiable. Without buckets `(heads, 2 * extent + 1)`; entry d + extent belongs to j - i = d. With
            coordinates of several axes it has as many further dimensions, each of odd size, as in Swin: the entry of
            (dy, dx) is `table[h, dy + extent_y, dx + extent_x]`.
        buckets: integers, `(2 * extent + 1,)` or one dimension per axis: which column of a table `(heads, columns)`
            belongs to each difference.
        coordinates: integers `(batch or 1, seq, axes)`; row p belongs to the token at position p. Default: positions.

    Examples:
        >>> from dilated_attention import Window, attention
        >>> from dilated_attention.bias import RelativeBias
        >>> q, k, v = (torch.randn(1, 16, 2, 8) for _ in range(3))
        >>> table = torch.zeros(2, 2 * 5 + 1, requires_grad=True)  # differences from -5 to 5
        >>> attention(q, k, v, Window(5, 5), bias=RelativeBias(table)).sum().backward()
        >>> table.grad.shape
        torch.Size([2, 11])
    """

    table: Tensor
    buckets: Tensor | None = None
    coordinates: Tensor | None = None

    def __post_init__(self) -> None:
        _check_coordinates(self.coordinates, integers=True)
        axes = 1 if self.coordinates is None else self.coordinates.shape[2]
        if self.buckets is None:
            _check_floating("table", self.table, 1 + axes, "(heads, 2 * extent + 1), with one extent per axis")
            sizes = self.table.shape[1:]
        else:
            _check_floating("table", self.table, 2, "(heads, columns), with buckets")
            _check_integers("buckets", self.buckets, axes, "one dimension per axis of the coordinates")
            checks.indices("buckets", self.buckets, 0, self.table.shape[1])
            sizes = self.buckets.shape
        if any(size % 2 == 0 for size in sizes):
            name = "table" if self.buckets is None else "buckets"
            raise ValueError(
                f"{name} must have 2 * extent + 1 entries per axis, an odd number, for the differences from -extent to "
                f"extent; got {tuple(sizes)}"
            )

    def normal(self, q: Tensor, reach: int, placed: bool) -> Normal:
        _check_heads("table", self.table, q)
        _check_reach(self.coordinates, q, reach, placed)
        if self.buckets is not None and self.buckets.device != q.device:
            raise ValueError(f"buckets must be on q's device, {q.device}; got {self.buckets.device}")
        name = "relative" if self.coordinates is None else "relative in space"
        return Normal(FORMS.index(name), self.table[None], self.coordinates, self.buckets)


@dataclass(frozen=True, eq=False)
class QueryBias:
    """Hold a bias that each query brings for the keys before it: b_h(i, j) = logits[i, h, i - j] for 0 <= i - j <
    extent, and 0 for other keys (the relative term of Transformer-XL, arXiv:1901.02860).

    Args:
        logits: `(batch or 1, queries, heads, extent)`; differentiable.

    Examples:
        >>> from dilated_attention import Window, attention
        >>> from dilated_attention.bias import QueryBias
        >>> q, k, v = (torch.randn(1, 16, 2, 8) for _ in range(3))
        >>> logits = q @ torch.randn(8, 4)  # for the query itself and the 3 keys before it
        >>> attention(q, k, v, Window(7), is_causal=True, bias=QueryBias(logits)).shape
        torch.Size([1, 16, 2, 8])
    """

    logits: Float[Tensor, "#batch queries heads extent"]

    def __post_init__(self) -> None:
        _check_floating("logits", self.logits, 4, "(batch or 1, queries, heads, extent)")
        if self.logits.shape[3] == 0:
            raise ValueError(f"logits must have an extent of at least 1; got {_described(self.logits)}")

    def normal(self, q: Tensor, reach: int, placed: bool) -> Normal:
        _check_shape("logits", self.logits, q, ((1, q.shape[0]), (q.shape[1],), (q.shape[2],), None))
        return Normal(FORMS.index("by query"), self.logits)


def normal(
    given: Any, q: Tensor, k: Tensor, keys: int, starts: tuple[int, int] = (0, 0), placed: bool = False
) -> Normal | None:
    """Check a bias against q and k, and return it in normal form; None if none is given. A normal form was checked.

    Args:
        keys: the number of keys that queries may see: over a mesh, of all ranks.
        starts, placed: the positions of the first query and of the first key, and whether they were given.
    """
    if given is None or isinstance(given, Normal):
        return given
    reach = max(starts[0] + q.shape[1], starts[1] + k.shape[1])
    if isinstance(given, (Alibi, RelativeBias, QueryBias)):
        return given.normal(q, reach, placed)
    if not isinstance(given, Tensor):
        raise ValueError(
            "bias must be an Alibi, a RelativeBias or a QueryBias of dilated_attention.bias, or a tensor (batch or 1, "
            f"heads or 1, queries, keys); got {type(given).__name__}"
        )
    if given.dtype == torch.bool:
        raise ValueError(
            "bias must be a floating tensor; got a bool one. A mask over pairs is a pattern, BlockLayout.from_mask("
            "mask, block_size=1)"
        )
    _check_floating("bias", given, 4, "(batch or 1, heads or 1, queries, keys)")
    _check_shape("bias", given, q, ((1, q.shape[0]), (1, q.shape[2]), (q.shape[1],), (keys,)))
    return Normal(FORMS.index("by pair"), given)


# ---- what backends compute


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Hold what all pairs of a call read: the form, its tensor, and the sums of the tensor's gradient.

    Attributes:
        tensor: of `shape`, or flat.
        sums: flat, one number for each entry of the tensor; a backward adds to them. None: no gradient is wanted.
    """

    form: int
    tensor: Tensor
    shape: torch.Size
    buckets: Tensor | None = None
    sums: Tensor | None = None

    def with_sums(self) -> Source:
        """Return this source with sums of 0: float64 where many queries read an entry, and float32 at least."""
        tensor = self.tensor
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        if FORMS[self.form] not in BY_QUERY and tensor.device.type != "mps":
            dtype = torch.float64
        sums = torch.zeros(tensor.numel(), dtype=dtype, device=tensor.device)
        return Source(self.form, tensor, self.shape, self.buckets, sums)

    def sample(self, i: int) -> Source:
        """Return what the pairs of sample i read, which adds to the same sums."""
        if self.shape[0] == 1:
            return self
        tensor = self.tensor.view(self.shape)[i : i + 1]
        sums = None if self.sums is None else self.sums.view(self.shape)[i].flatten()
        return Source(self.form, tensor, tensor.shape, self.buckets, sums)

    @property
    def gradient(self) -> Tensor:
        assert self.sums is not None
        return self.sums.view(self.shape).to(self.tensor.dtype)


def places(
    form: int, tensor: Tensor, rows: Int[Tensor, " queries"], heads: range
) -> Int[Tensor, "#batch queries heads"]:
    """Return the number of the tensor's entry at which each query row and head begins to read."""
    batch = torch.arange(tensor.shape[0], device=rows.device)[:, None, None] * tensor[0].numel()
    head = torch.arange(heads.start, heads.stop, device=rows.device)
    row = rows[:, None]
    name = FORMS[form]
    if name == "by query":
        _, _, all_heads, extent = tensor.shape
        return batch + (row * all_heads + head) * extent
    if name == "by pair":
        _, own_heads, queries, keys = tensor.shape
        if own_heads == 1:
            head = torch.zeros_like(head)
        return batch + (head * queries + row) * keys
    return batch + head * tensor[0, 0].numel() + torch.zeros_like(row)


def attributes(
    bias: Normal, heads: range, rows: Tensor, columns: Tensor, starts: tuple[int, int]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what is read per token of q and of k (`backends.attributes`).

        queries["places"]                       int64 (batch or 1, rows, heads): see `places`
        queries["where"], keys["where"]         (batch or 1, rows, 1 or KV heads, axes): coordinates or positions; for a
                                                tensor by pair the number of its row or column

    Args:
        heads: the heads of q among those of the bias.
        rows, columns: the number of each row of q, `(rows,)`, and of k, `(rows, 1 or KV heads)`, in the call.
        starts: the positions of the rows of q and of k that have number 0.
    """
    of_queries = {"places": places(bias.form, bias.tensor, rows, heads)}
    queries = rows[:, None] + starts[0]
    keys = columns + starts[1]
    if bias.coordinates is not None:
        return {**of_queries, "where": bias.coordinates[:, queries]}, {"where": bias.coordinates[:, keys]}
    if FORMS[bias.form] == "by pair":
        keys = columns
    return {**of_queries, "where": queries[None, ..., None]}, {"where": keys[None, ..., None]}


class Added(NamedTuple):
    """Hold what the bias of some queries and keys is made of, for independent problems."""

    source: Source
    places: Int[Tensor, "problems heads queries"]
    queries: Tensor  # (problems, heads or 1, queries, axes)
    keys: Tensor  # (problems, heads or 1, keys, axes)

    def part(self, problems: slice, heads: slice, rows: slice, keys: slice) -> Added:
        def of(x: Tensor) -> slice:
            return heads if x.shape[1] > 1 else slice(None)

        queries = self.queries[problems, of(self.queries), rows]
        return Added(
            self.source, self.places[problems, heads, rows], queries, self.keys[problems, of(self.keys), keys]
        )  # fmt: skip

    def values(self, dtype: torch.dtype) -> Float[Tensor, "problems heads #queries keys"]:
        """Return the bias of each pair."""
        index, factor = self._read(dtype)
        tensor = self.source.tensor
        # `take` copies nothing, whatever the strides; indexing has a batching rule.
        found = tensor[index] if tensor.dim() == 1 else tensor.take(index)
        found = found.to(dtype)
        return found if factor is None else found * factor

    def add(self, ds: Float[Tensor, "problems heads queries keys"]) -> None:
        """Add to the sums of the source what the gradient of the scores, ds, contributes."""
        sums = self.source.sums
        if sums is None:
            return
        index, factor = self._read(ds.dtype)
        if factor is not None:
            ds = ds * factor
        if index.shape[-1] == 1:
            ds = ds.sum(-1, keepdim=True)
        sums.index_add_(0, index.expand(ds.shape).flatten(), ds.flatten().to(sums.dtype))

    def _read(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return the number of the entry that each pair reads, `(problems, heads, queries, keys or 1)`, and its
        factor; None: 1."""
        column, factor = self._column(dtype)
        index = self.places[..., None]
        if column is not None:
            index = index + column
        return index, factor

    def _column(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        name = FORMS[self.source.form]
        if name == "by pair":
            return self.keys[:, :, None, :, 0], None
        queries = self.queries
        keys = self.keys
        if keys.is_floating_point():
            wide = torch.promote_types(keys.dtype, dtype)
            queries = queries.to(wide)
            keys = keys.to(wide)
        else:
            queries = queries.long()  # narrower integers would wrap round
            keys = keys.long()
        difference = keys[:, :, None] - queries[:, :, :, None]
        if name in DISTANCES:
            return None, _distance(difference, name).to(dtype).neg_()
        if name == "by query":
            extent = self.source.shape[-1]
            back = -difference[..., 0]
            inside = (back >= 0) & (back < extent)
            return back.clamp(0, extent - 1), inside.to(dtype)
        buckets = self.source.buckets
        sizes = self.source.shape[2:] if buckets is None else buckets.shape
        column = difference.new_zeros(())
        for axis, size in enumerate(sizes):
            extent = size // 2
            column = column * size + difference[..., axis].clamp(-extent, extent) + extent
        if buckets is not None:
            column = buckets.flatten()[column]
        return column, None


def _distance(difference: Tensor, metric: str) -> Tensor:
    if difference.shape[-1] == 1:
        return difference[..., 0].abs()
    if metric == "manhattan":
        return difference.abs().sum(-1)
    if metric == "chebyshev":
        return difference.abs().amax(-1)
    if not difference.is_floating_point():
        difference = difference.double()
    return difference.square().sum(-1).sqrt()


# ---- checks


def _check_floating(name: str, x: Any, dims: int, shape: str) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() != dims:
        raise ValueError(f"{name} must be a floating tensor {shape}; got {_described(x)}")


def _check_integers(name: str, x: Any, dims: int, shape: str) -> None:
    wrong = not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool
    if wrong or x.dim() != dims:
        raise ValueError(f"{name} must be a tensor of integers with {shape}; got {_described(x)}")


def _check_coordinates(x: Any, integers: bool = False) -> None:
    if x is None:
        return
    if integers:
        _check_integers("coordinates", x, 3, "shape (batch or 1, seq, axes)")
    elif not isinstance(x, Tensor) or x.is_complex() or x.dtype == torch.bool or x.dim() != 3:
        raise ValueError(f"coordinates must be a tensor of numbers (batch or 1, seq, axes); got {_described(x)}")
    if x.shape[2] == 0:
        raise ValueError(f"coordinates must have an axis; got {_described(x)}")
    if x.requires_grad:
        raise UnsupportedError("coordinates take no gradient, but require one; give coordinates.detach()")


def _check_heads(name: str, x: Tensor, q: Tensor) -> None:
    if x.shape[0] != q.shape[2]:
        raise ValueError(f"{name} must have one row per head of q, {q.shape[2]}; got {_described(x)}")
    _check_device(name, x, q)


def _check_reach(coordinates: Tensor | None, q: Tensor, reach: int, placed: bool) -> None:
    if coordinates is None:
        return
    fits = coordinates.shape[1] == reach or (placed and coordinates.shape[1] > reach)
    if coordinates.shape[0] not in (1, q.shape[0]) or not fits:
        raise ValueError(
            f"coordinates must have shape (batch or 1, seq, axes) with batch {q.shape[0]} and a row for each of "
            f"{reach} positions; got {_described(coordinates)}"
        )
    _check_device("coordinates", coordinates, q)


def _check_shape(name: str, x: Tensor, q: Tensor, allowed: tuple[tuple[int, ...] | None, ...]) -> None:
    for size, sizes in zip(x.shape, allowed, strict=True):
        if sizes is not None and size not in sizes:
            wanted = ["any" if some is None else " or ".join(map(str, dict.fromkeys(some))) for some in allowed]
            raise ValueError(f"{name} must have shape ({', '.join(wanted)}); got {_described(x)}")
    _check_device(name, x, q)


def _check_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise ValueError(f"{name} must be on q's device, {q.device}; got {x.device}")


def _described(x: Any) -> str:
    kind = checks.kind_of(x)
    if isinstance(x, Tensor):
        kind += f" of shape {tuple(x.shape)}"
    return kind
