"""Turn a bias into what kernels/cpu/bias.h reads: a table by difference, coordinates, or entries by row."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention.backends.attributes import Attributes
from dilated_attention.bias import BY_DIFFERENCE, BY_QUERY, DISTANCES, FORMS, METRICS, Added, Source
from dilated_attention.kernels.configurations import Side

KINDS = ("none", "by difference", *METRICS, "by row")
"""The names of `BiasKind` of kernels/cpu/bias.h, in order."""
LOG2E = 1 / math.log(2)
MARGIN = 64
"""Entries before and after a table: more than the lanes that kernels/cpu/bias.h reads beyond the rows of a tile."""


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """Hold the arguments of the kernels for a bias.

    Attributes:
        by_side: the entries and `bias_at` for tiles of queries, and of keys.
        others: the other arguments, alike for both.
        sums: what the kernels of tiles of keys add the gradient of entries to; None: no gradient is wanted.
        collect: adds `sums` to the sums of the source.
    """

    by_side: dict[Side, tuple[Tensor, int]]
    others: dict[str, Tensor | int]
    sums: Tensor | None
    collect: Callable[[Tensor], object]

    def arguments(self, side: Side) -> dict[str, Tensor | int | None]:
        entries, at = self.by_side[side]
        sums = self.sums if side == "keys" else None
        return {"bias": entries, "bias_at": at, "bias_sums": sums, **self.others}

    def finish(self) -> None:
        """Add to the sums of the source, once all tiles of keys have been computed."""
        if self.sums is not None:
            self.collect(self.sums)


def entries_of(source: Source, attributes: Attributes, q: Tensor, k: Tensor, one_by_one: bool) -> Entries:
    """Return a bias as the kernels read it. `one_by_one`: no two threads compute the same pair of a query and a key."""
    name = FORMS[source.form]
    if name in BY_DIFFERENCE:
        return _by_difference(source, attributes, q.shape[1], k.shape[1])
    if name in DISTANCES:
        return _by_distance(source, attributes, name)
    assert name in BY_QUERY, name
    return _by_row(source, attributes, q, one_by_one)


def _by_difference(source: Source, attributes: Attributes, queries: int, keys: int) -> Entries:
    """Make a table of all differences of a key and a query, `(batch or 1, heads, differences)`."""
    of_queries = attributes.queries["where"]
    of_keys = attributes.keys["where"]
    first = of_keys[0, :1, 0, 0] - of_queries[0, :1, 0, 0]
    difference = torch.arange(-queries - MARGIN + 1, keys + MARGIN) + first
    places = attributes.queries["places"][:, :1].transpose(1, 2)
    added = Added(source, places, first.new_zeros(1, 1, 1, 1), difference[None, None, :, None])
    table = (added.values(torch.float64) * LOG2E).float()
    batch, heads, _, length = table.shape

    sums = None
    if source.sums is not None:
        sums = table.new_zeros(table.shape, dtype=torch.float64)
    others: dict[str, Tensor | int] = {
        "bias_kind": KINDS.index("by difference"), "bias_head": length,
        "bias_batch": heads * length if batch > 1 else 0,
    }  # fmt: skip
    by_side: dict[Side, tuple[Tensor, int]] = {
        "queries": (table.flip(-1), keys - 1 + MARGIN),
        "keys": (table, queries - 1 + MARGIN),
    }
    return Entries(by_side, others, sums, added.add)


def _by_distance(source: Source, attributes: Attributes, name: str) -> Entries:
    places = attributes.queries["places"][:, 0]
    factors = (source.tensor.take(places).double() * -LOG2E).float()
    batch, heads = factors.shape
    of_queries = attributes.queries["where"][:, :, 0]
    of_keys = attributes.keys["where"][:, :, 0]
    if of_keys.dtype in (torch.int64, torch.float64):  # more digits than float32 has
        first = of_keys[:, :1].clone()
        of_queries = of_queries - first
        of_keys = of_keys - first
    of_queries = of_queries.float().contiguous()
    of_keys = of_keys.float().contiguous()

    sums = None
    if source.sums is not None:
        sums = torch.zeros(batch, heads, dtype=torch.float64)

    def collect(sums: Tensor) -> None:
        assert source.sums is not None
        source.sums.index_add_(0, places.flatten(), -sums.flatten().to(source.sums.dtype))

    others: dict[str, Tensor | int] = {
        "bias_kind": KINDS.index(name), "bias_head": 1, "bias_batch": heads if batch > 1 else 0,
        "axes": of_keys.shape[2], "query_at": of_queries, "key_at": of_keys,
        "query_at_batch": of_queries[0].numel() if len(of_queries) > 1 else 0,
        "key_at_batch": of_keys[0].numel() if len(of_keys) > 1 else 0,
    }  # fmt: skip
    return Entries(dict.fromkeys(("queries", "keys"), (factors, 0)), others, sums, collect)


def _by_row(source: Source, attributes: Attributes, q: Tensor, one_by_one: bool) -> Entries:
    places = attributes.queries["places"]
    base = int(places[0, 0, 0])
    batch = _step(places[:, 0, 0])
    row = _step(places[0, :, 0])
    head = _step(places[0, 0])
    entries = source.tensor.detach().float().contiguous().flatten()

    sums = None
    if source.sums is not None:
        sums = source.sums[base:]
        if sums.dtype != torch.float32:
            sums = torch.zeros(sums.shape, dtype=torch.float32)

    def collect(sums: Tensor) -> None:
        assert source.sums is not None
        if source.sums.dtype != torch.float32:
            source.sums[base:] += sums

    if FORMS[source.form] == "by pair":
        column_of_key, column_of_query = 1, 0
        first = int(attributes.keys["where"][0, 0, 0, 0])
    else:
        column_of_key, column_of_query = -1, 1
        first = int(attributes.queries["where"][0, 0, 0, 0] - attributes.keys["where"][0, 0, 0, 0])
    samples_share = batch == 0 and len(q) > 1
    heads_share = head == 0 and q.shape[2] > 1
    others: dict[str, Tensor | int] = {
        "bias_kind": KINDS.index("by row"), "bias_head": head, "bias_batch": batch, "bias_row": row,
        "column_of_key": column_of_key, "column_of_query": column_of_query, "first_column": first,
        "columns": source.shape[3], "bias_shared": int(samples_share or heads_share or not one_by_one),
    }  # fmt: skip
    return Entries(dict.fromkeys(("queries", "keys"), (entries[base:], 0)), others, sums, collect)


def _step(places: Tensor) -> int:
    """Return the distance between the first two places; 0 if there is only one."""
    if len(places) == 1:
        return 0
    return int(places[1] - places[0])
