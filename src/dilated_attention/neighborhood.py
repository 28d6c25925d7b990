"""Describe neighborhoods on a grid: a pattern whose tokens are ordered by small tiles, so that blocks suit it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from dilated_attention import checks
from dilated_attention.cache import name_of, plan_cache
from dilated_attention.errors import UnsupportedError
from dilated_attention.layout import BlockLayout, grids
from dilated_attention.patterns import Term
from dilated_attention.pictures import plot_neighbors
from dilated_attention.torch_internals import constant_when_traced, fixed, unobserved, untransformed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_AXES = 3


@dataclass(frozen=True)
class Neighborhood(Term):
    """Show a window around each token of a grid of one to three axes, as NATTEN does.

    Tokens lie in row-major order, after `leading` tokens that see all and that all see. Along an axis of length L with
    window s and rate r, the query at i sees, among the coordinates that equal i modulo r, the s nearest ones: from s //
    2 before it on. At a border the window is shifted inwards, so that s keys remain. The axes multiply: a query sees
    the keys that it sees along every axis.

    Args:
        shape: the length of each axis.
        window: how many keys a query sees along each axis, one number for all axes or one per axis. An even one reaches
            one key further back than ahead.
        rate: the distance between neighbouring keys (NATTEN's `dilation`), one for all axes or one per axis.
        stride: the window moves once in `stride` queries: a group of them has the window of its middle query, the later
            one of two (of its last query along a causal axis).
        is_causal: along which axes a query sees no later key: its window ends at itself, and is cut at the border.
        leading: the number of tokens before the grid, such as class and register tokens.
        shifted: False: cut the windows at all borders in place of shifting them.

    Examples:
        >>> from dilated_attention import Neighborhood
        >>> pattern = Neighborhood((4, 4), (3, 3))
        >>> pattern.coverage(16, num_heads=1).unique()
        tensor([9])
        >>> Neighborhood((5,), (3,), shifted=False).coverage(5, num_heads=1)
        tensor([[2, 3, 3, 3, 2]])
    """

    shape: tuple[int, ...]
    window: int | tuple[int, ...]
    rate: int | tuple[int, ...] = field(default=1, kw_only=True)
    stride: int | tuple[int, ...] = field(default=1, kw_only=True)
    is_causal: bool | tuple[bool, ...] = field(default=False, kw_only=True)
    leading: int = field(default=0, kw_only=True)
    shifted: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        shape = checks.integers("shape", self.shape, "the lengths of one to three axes, positive integers", 1)
        if not 1 <= len(shape) <= _MOST_AXES:
            raise ValueError(f"shape must hold the lengths of one to three axes; got {self.shape}")
        checked = {"shape": shape}
        for name in ("window", "rate", "stride"):
            given = getattr(self, name)
            if _is_one(given):
                given = (checks.positive(name, given),) * len(shape)
            wanted = f"one positive integer, or positive integers, one per axis of shape={shape}"
            checked[name] = checks.integers(name, given, wanted, 1)
        causal = self.is_causal
        if _is_one(causal):
            causal = (causal,) * len(shape)  # type: ignore[assignment]
        for value in causal:  # type: ignore[union-attr]
            checks.boolean("is_causal", value)
        checked["is_causal"] = tuple(causal)  # type: ignore[arg-type]

        for name, values in checked.items():
            if len(values) != len(shape):
                raise ValueError(f"{name} must hold one value per axis of shape={shape}; got {values}")
            object.__setattr__(self, name, values)
        object.__setattr__(self, "leading", checks.integer("leading", self.leading, 0))
        checks.boolean("shifted", self.shifted)
        for i, axis in enumerate(self.axes):
            if axis.window * axis.rate > axis.length:
                raise ValueError(
                    f"window={checked['window']}: along axis {i}, {axis.window} keys at rate {axis.rate} need "
                    f"{axis.window * axis.rate} tokens, and the grid has {axis.length}. Give a window of at most "
                    f"{axis.length // axis.rate} there, or a lower rate"
                )
            if axis.stride > axis.window:
                raise ValueError(
                    f"stride={checked['stride']}: along axis {i} it exceeds the window, {axis.window}, and some "
                    "queries would not see themselves; give at most the window"
                )

    @property
    def axes(self) -> tuple[grids.Axis, ...]:
        """Return the axes of the grid, each with its arguments."""
        shifted = (self.shifted,) * len(self.shape)
        per_axis: Any = (self.shape, self.window, self.rate, self.stride, self.is_causal, shifted)
        return tuple([grids.Axis(*x) for x in zip(*per_axis, strict=True)])

    @property
    def seq_len(self) -> int:
        """Return the number of tokens, the leading ones included."""
        return self.leading + math.prod(self.shape)

    def __mul__(self, layout: Any) -> Any:
        raise UnsupportedError(
            f"Neighborhood(...) * {type(layout).__name__}: a product is of dilated segments and a layout; give a sum, "
            "Neighborhood(...) + layout"
        )

    def coverage(self, seq_len: int, num_heads: int, is_causal: bool = False) -> Tensor:
        """Return the number of keys that each token sees, per head: int64, `(num_heads, seq_len)`.

        Args:
            seq_len: the pattern's own.
            is_causal: False: the pattern itself says along which axes it is causal.
        """
        return self._counts(seq_len, checks.positive("num_heads", num_heads), is_causal)

    def _counts(self, seq_len: int, num_heads: int, is_causal: bool) -> Tensor:
        self.check_length(seq_len)
        self.refuse_causal(is_causal)
        keys = np.ones((), np.int64)
        for axis in self.axes:
            keys = np.multiply.outer(keys, axis.counts())
        first = np.full(self.leading, self.seq_len)
        counts = np.concatenate([first, keys.reshape(-1) + self.leading])
        return torch.from_numpy(counts).expand(num_heads, -1).clone()

    def flops(self, seq_len: int, num_heads: int, head_dim: int, is_causal: bool = False) -> int:
        """Return the floating-point operations of a forward: 4 head_dim per score entry.

        num_heads: the number of query heads. The other arguments are as in `coverage`.
        """
        head_dim = checks.positive("head_dim", head_dim)
        num_heads = checks.positive("num_heads", num_heads)
        return 4 * head_dim * num_heads * int(self._counts(seq_len, 1, is_causal).sum())

    def plot(self, query: Sequence[int] | None = None, ax: Axes | None = None) -> Axes:
        """Draw the grid, with one query (black) and the keys of the grid that it sees (grey). A grid of three axes is
        drawn as its planes, side by side.

        Args:
            query: its coordinates, one per axis. Default: the middle of the grid.
        """
        if query is None:
            at = tuple([length // 2 for length in self.shape])
        else:
            at = checks.integers("query", query, f"{len(self.shape)} coordinates", 0)
        if len(at) != len(self.shape) or any(i >= n for i, n in zip(at, self.shape, strict=False)):
            raise ValueError(f"query must hold {len(self.shape)} coordinates inside the grid {self.shape}; got {query}")
        seen = np.ones((), bool)
        for axis, i in zip(self.axes, at, strict=True):
            start, stop = (x[i % axis.rate, i // axis.rate] for x in axis.ranges())
            along = np.zeros(axis.length, bool)
            along[i % axis.rate :: axis.rate][start:stop] = True
            seen = np.logical_and.outer(seen, along)
        return plot_neighbors(seen, at, ax)

    def check_length(self, seq_len: int) -> None:
        """Raise ValueError unless `seq_len` is the pattern's own."""
        if checks.integer("seq_len", seq_len, 0) != self.seq_len:
            grid = " x ".join([str(x) for x in self.shape])
            leading = f" and {self.leading} leading tokens" * bool(self.leading)
            raise ValueError(
                f"the pattern is for {self.seq_len} tokens, a grid of {grid}{leading}; got {seq_len}. Give a "
                "Neighborhood of the shape of this sequence"
            )

    def refuse_causal(self, is_causal: bool) -> None:
        """Raise UnsupportedError if a call is causal in the order of its tokens."""
        checks.boolean("is_causal", is_causal)
        if is_causal:
            raise UnsupportedError(
                "is_causal=True with a Neighborhood: it says itself along which axes it is causal; leave is_causal out "
                "and give Neighborhood(..., is_causal=True)"
            )


def _is_one(given: Any) -> bool:
    """Return whether a value is one for all axes."""
    return not isinstance(given, Sequence) and getattr(given, "ndim", 0) == 0


class Tiled(NamedTuple):
    """Hold a neighborhood as a block layout over rows, tokens that are ordered by tiles; see `layout.grids`.

    Attributes:
        rates, sizes: the classes of each axis, and the rows that each of them gets along it.
        before: the rows before the grid, of which the first are the leading tokens.
    """

    shape: tuple[int, ...]
    leading: int
    tiles: grids.Tiles
    rates: tuple[int, ...]
    sizes: tuple[int, ...]
    before: int
    layout: BlockLayout

    @property
    def nbytes(self) -> int:
        """Return an upper estimate of the bytes of the layout, and of what it may derive."""
        return 1024 + 4 * self.layout.nbytes

    def queries(self, x: Tensor) -> Tensor:
        """Return rows of x `(batch, seq, ...)` for tokens, in the order of queries; zeros for rows that were added."""
        return self._rows(x, self.tiles.queries)

    def keys(self, x: Tensor) -> Tensor:
        """Return the same in the order of keys."""
        return self._rows(x, self.tiles.keys)

    def empty(self, x: Tensor) -> Tensor:
        """Return a tensor like what `queries` returns, of one number."""
        return x.new_empty(()).expand(x.shape[0], self.layout.seq_len, *x.shape[2:])

    def _rows(self, x: Tensor, tile: tuple[int, ...]) -> Tensor:
        axes = len(self.shape)
        rest = x.dim() - 2
        grid = x[:, self.leading :].unflatten(1, self.shape)
        added = [rate * size - length for rate, size, length in zip(self.rates, self.sizes, self.shape, strict=True)]
        if any(added):
            ends: list[int] = []
            for number in reversed(added):
                ends += (0, number)
            grid = pad(grid, (*(0, 0) * rest, *ends))
        split = []
        for size, side, rate in zip(self.sizes, tile, self.rates, strict=True):
            split += [size // side, side, rate]
        cells = grid.reshape(len(x), *split, *x.shape[2:])
        inside = range(1, 1 + 3 * axes)
        order = [0, *inside[2::3], *inside[0::3], *inside[1::3], *range(1 + 3 * axes, 1 + 3 * axes + rest)]
        rows = cells.permute(order).reshape(len(x), -1, *x.shape[2:])
        if not self.before:
            return rows
        first = pad(x[:, : self.leading], (*(0, 0) * rest, 0, self.before - self.leading))
        return torch.cat([first, rows], 1)

    def tokens(self, rows: Tensor) -> Tensor:
        """Undo `queries`: return the tokens of `(batch, rows, ...)` in their own order, `(batch, seq, ...)`."""
        axes = len(self.shape)
        rest = rows.shape[2:]
        tiled = [size // side for size, side in zip(self.sizes, self.tiles.queries, strict=True)]
        cells = rows[:, self.before :].reshape(len(rows), *self.rates, *tiled, *self.tiles.queries, *rest)
        order = [0]
        for i in range(axes):
            order += [1 + axes + i, 1 + 2 * axes + i, 1 + i]
        order += range(1 + 3 * axes, 1 + 3 * axes + len(rest))
        whole = [rate * size for rate, size in zip(self.rates, self.sizes, strict=True)]
        grid = cells.permute(order).reshape(len(rows), *whole, *rest)
        for i, (length, size) in enumerate(zip(self.shape, whole, strict=True)):
            if length < size:
                grid = grid.narrow(1 + i, 0, length)
        found = grid.flatten(1, axes)
        if not self.leading:
            return found
        return torch.cat([rows[:, : self.leading], found], 1)


def tiled(pattern: Neighborhood) -> Tiled:
    """Return the pattern as a layout over rows, from the cache."""
    if torch.compiler.is_compiling():  # a cache cannot be traced
        return _tiled(pattern)
    return plan_cache.of(_tiled, pattern)


def _tiled(pattern: Neighborhood) -> Tiled:
    axes = pattern.axes
    numbers = tuple([fixed(tuple(axis)) for axis in axes])
    tiles = grids.Tiles(*_best_tiles(numbers))
    sizes = tuple(tiles.rows(axes))
    rates = tuple([axis.rate for axis in axes])
    before = tiles.before(pattern.leading)
    rows = before + math.prod(rates) * math.prod(sizes)
    indptr, indices, kinds, bits = _tables(numbers, fixed(pattern.leading), *tiles)
    layout = BlockLayout(
        indptr, indices, rows, math.prod(tiles.queries), math.prod(tiles.keys), kinds=kinds, bits=bits
    )  # fmt: skip
    return Tiled(pattern.shape, pattern.leading, tiles, rates, sizes, before, layout)


@constant_when_traced
def _best_tiles(axes: tuple[tuple[Any, ...], ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(grids.best_tiles([grids.Axis(*x) for x in axes]))  # type: ignore[return-value]


@constant_when_traced
def _tables(
    axes: tuple[tuple[Any, ...], ...], leading: int, queries: tuple[int, ...], keys: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return indptr, indices, kinds and bits of the layout over rows."""
    with unobserved(), untransformed():
        found = grids.tables([grids.Axis(*x) for x in axes], leading, grids.Tiles(queries, keys))
        indptr = torch.from_numpy(np.append(0, np.cumsum(found.counts)))[None, None]
        indices, kinds, bits = (torch.from_numpy(x) for x in (found.indices, found.kinds, found.bits))
        made = indptr, indices, kinds, bits
        for table in made:  # named, a layout keeps them as they are, and a compiled graph finds what was made of them
            name_of(table)
        return made
