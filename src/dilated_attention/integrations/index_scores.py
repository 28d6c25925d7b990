"""Let an indexer of transformers' models list the keys of each query without its scores of all pairs.

The forward of an indexer of DeepSeek's form computes, for queries t with heads j and keys s,

    index(t, s) = Σ_j w(t, j) relu(c q(t, j) · k(s)),   -inf where the mask hides s,

as tensors of queries x heads x keys, and lists the keys with the largest index. `IndexKeys` takes the place of k in
that forward. Operations on it compute nothing; they note what they are, and any other operation raises an error. The
last of them, `topk`, computes tiles of the scores and keeps the indices alone. The positive factor c does not change
the order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention import UnsupportedError
from dilated_attention.integrations.own_attention import REMEDY, Rows

TILE = 2**18
"""The scores of a tile per thread, over all index heads: 1 MiB, which stay in a core's cache."""

KEYS = 128
"""The keys of a tile."""


class _Noted:
    """Take the place of a tensor in an indexer's forward."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _unknown(name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        noted = args[-1] if function is torch.matmul else args[0]
        if not isinstance(noted, _Noted) or set(kwargs or ()) - {"inplace"}:
            raise _unknown(function)
        return noted._applied(function, args)

    def _applied(self, function: Any, args: Any) -> Any:
        raise _unknown(function)


def _unknown(what: object) -> UnsupportedError:
    name = getattr(what, "__name__", what)
    return UnsupportedError(f"the model's indexer computes with its keys in a way that is not known ({name}): {REMEDY}")


@dataclass(frozen=True)
class IndexKeys(_Noted):
    """Take the place of the keys of an indexer, `(batch, keys, head_dim)`, in its forward; `steps`: what was done."""

    keys: Tensor
    steps: frozenset[str] = frozenset()

    def transpose(self, one: int, other: int) -> IndexKeys:
        return self._with(f"transpose {one} {other}")

    def unsqueeze(self, dim: int) -> IndexKeys:
        return self._with(f"unsqueeze {dim}")

    def float(self) -> IndexKeys:
        return self._with("float")

    def _with(self, step: str) -> IndexKeys:
        if step in self.steps:
            raise _unknown(step)
        return replace(self, steps=self.steps | {step})

    def _applied(self, function: Any, args: Any) -> Any:
        query = args[0]
        known = {"transpose -1 -2", "unsqueeze 1", "float"}
        if function is not torch.matmul or self.steps != known or query.ndim != 4 or query.dtype != torch.float32:
            raise _unknown(function)
        return _Products(query, self.keys)


@dataclass(frozen=True)
class _Products(_Noted):
    """Take the place of the products of `query` `(batch, queries, heads, head_dim)` and `keys`, then of their relu."""

    query: Tensor
    keys: Tensor
    is_positive: bool = False

    def __mul__(self, factor: float) -> _Products:
        if self.is_positive or not factor > 0:
            raise _unknown("multiplication")
        return self

    def _applied(self, function: Any, args: Any) -> Any:
        if function is F.relu and not self.is_positive:
            return replace(self, is_positive=True)
        weight = args[0]
        batch, queries, heads, _ = self.query.shape
        if function is not torch.matmul or not self.is_positive or weight.shape != (batch, queries, 1, heads):
            raise _unknown(function)
        return _Index(self.query, self.keys, weight)


@dataclass(frozen=True)
class IndexMask(_Noted):
    """Take the place of the mask that an indexer reads, bool `(batch, queries, keys)`; then of its complement."""

    rows: Rows
    is_hidden: bool = False
    dtype: ClassVar[torch.dtype] = torch.bool

    def __invert__(self) -> IndexMask:
        return replace(self, is_hidden=not self.is_hidden)


class _Largest(NamedTuple):
    """Hold what an indexer reads of `topk`."""

    indices: Tensor


@dataclass(frozen=True)
class _Index(_Noted):
    """Take the place of the index of each query and key, `(batch, queries, keys)`.

    query: float32 `(batch, queries, heads, head_dim)`. keys: `(batch, keys, head_dim)`. weight: float32 `(batch,
    queries, 1, heads)`. rows: the mask, once it hides keys.
    """

    query: Tensor
    keys: Tensor
    weight: Tensor
    rows: Rows | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        return (*self.query.shape[:2], self.keys.shape[1])

    def squeeze(self, dim: int) -> _Index:
        if dim != -2:
            raise _unknown(f"squeeze {dim}")
        return self

    def masked_fill(self, mask: object, value: float) -> _Index:
        if not isinstance(mask, IndexMask) or not mask.is_hidden or value != -torch.inf:
            raise _unknown("masked_fill")
        return replace(self, rows=mask.rows)

    def topk(self, number: int, dim: int = -1) -> _Largest:
        """Return the keys with the largest index, int32 `(batch, queries, number)`, in any order. The first queries
        list every key up to their own and some after it, then -1."""
        if dim != -1 or self.rows is None:
            raise _unknown("topk")
        batch, queries, heads, _ = self.query.shape
        past = self.keys.shape[1] - queries
        keys = self.keys.float()
        largest = self.query.new_full((batch, queries, number), -1, dtype=torch.int32)
        step = max(1, TILE * torch.get_num_threads() // (heads * KEYS))
        for first in range(0, queries, step):
            at = slice(first, min(first + step, queries))
            stop = past + at.stop
            if stop <= number:  # the mask hides those after the query
                largest[:, at, :stop] = torch.arange(stop, device=keys.device)
                continue
            index = keys.new_empty(batch, at.stop - at.start, stop)
            for sample in range(batch):
                self._fill(index[sample], keys[sample, :stop], sample, at)
            index.masked_fill_(~self.rows.part(at, stop), -torch.inf)
            largest[:, at] = index.topk(number, sorted=False).indices.to(torch.int32)
        return _Largest(largest)

    def _fill(self, index: Tensor, keys: Tensor, sample: int, at: slice) -> None:
        """Write the index of some queries of a sample and its first keys to `index`, `(queries, keys)`."""
        heads = self.query.shape[2]
        query = self.query[sample, at].flatten(0, 1)
        weight = self.weight[sample, at]
        for part, out in zip(keys.split(KEYS), index.split(KEYS, 1), strict=True):
            score = (query @ part.mT).relu_()
            out.copy_((weight @ score.unflatten(0, (-1, heads)))[:, 0])
