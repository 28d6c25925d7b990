"""Compute the attention that a transformers model has by itself, at the cost of the pairs that its mask shows.

transformers describes what a layer's queries may see by a mask function: `causal_mask_function`, or closures that
combine it with a window, with chunks, or with packed samples. `read_mask` turns such a function into a `Shown`, so that
no mask over pairs of tokens is ever formed, and `attend` computes it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from dilated_attention import BlockLayout, Dilated, UnsupportedError, Window, attention
from dilated_attention.bias import QueryBias, RelativeBias
from dilated_attention.plumbing import derived, without_overrides

NAME = "dilated_attention"

REMEDY = 'load the model with attn_implementation="sdpa"'


class _NoTensorError(UnsupportedError, AttributeError):
    """Report that a model uses our mask as a tensor. It is also an AttributeError, so that `hasattr` returns False."""

    def __init__(self) -> None:
        super().__init__(
            "the model computes with its mask over pairs, which dilated attention does not form; choose a model that "
            f"hands it to its attention alone, or {REMEDY}"
        )


class NotATensor:
    """Take the place of a mask that transformers passes from the mask function to the attention function.

    A model that computes with its mask gets an error that says so.
    """

    ndim: ClassVar[int] = 4  # what transformers asks of a mask that is made before the forward

    def _refuse(self, other: object = None) -> Any:
        raise _NoTensorError

    @classmethod
    def __torch_function__(cls, function: object, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if function is checkpoint:  # in a graph, a layer that is given its mask by position
            with without_overrides():
                return checkpoint(*args, **(kwargs or {}))
        raise _NoTensorError

    __getitem__: Any = _refuse
    __invert__: Any = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()


@dataclass(frozen=True)
class Refused(NotATensor):
    """Take the place of a mask that this library cannot compute. The layer that gets it raises `error`."""

    error: UnsupportedError

    def _refuse(self, other: object = None) -> Any:
        raise self.error


@dataclass(frozen=True)
class Chosen(NotATensor):
    """Take the place of a mask where a model lists the keys of each query.

    Attributes:
        lists: `(batch, lists, queries, k)` integers, the keys that a query sees, or blocks of them, counted from the
            first; -1 for none. One list is for all heads; or there is one per KV head or per head. An entry that is
            repeated is seen once.
        shown: what the mask shows; None: unknown. A query sees the listed keys whether or not the mask shows them, but
            of listed blocks those alone that it shows.
        size: the number of keys per block; 1: the lists are of keys.
    """

    lists: Tensor
    shown: Shown | None = None
    size: int = 1

    @property
    def words(self) -> str:
        """Say what a layer shows, in a few words."""
        words = f"{self.lists.shape[3]:,} chosen "
        words += "keys" if self.size == 1 else f"blocks of {self.size}"
        return words if self.shown is None else f"{words}, {self.shown.words}"


@dataclass(frozen=True)
class Rows(NotATensor):
    """Take the place of `mask[:, 0]`, bool `(batch, queries, keys)`, which an indexer reads to leave out hidden keys.

    It forms that tensor for those queries alone that `part` is called for.
    """

    shown: Shown
    dtype: ClassVar[torch.dtype] = torch.bool

    def part(self, queries: slice, stop: int) -> Tensor:
        """Return the mask of some queries over the keys before `stop`: bool `(batch or 1, queries, keys)`."""
        first = self.shown.q_start + queries.start
        some = replace(self.shown, q_start=first, queries=queries.stop - queries.start)
        return some.sees(torch.arange(stop, device=self.shown.device)[None, None])

    def __invert__(self) -> Tensor:
        return ~self.part(slice(0, self.shown.queries), self.shown.keys)


@dataclass(frozen=True)
class Shown(NotATensor):
    """Describe the keys that the queries of one forward see.

    A query at position p sees the key at position j iff all of these hold: j <= p if `is_causal`, unless both lie in
    one of `blocks`; j > p - window (without causality: -window <= j - p <= after); both lie in one chunk; both belong
    to one sample; and the key is not hidden.

    Attributes:
        window: as in `config.sliding_window`; None: no window.
        after: see above; None: as many keys as `window`.
        chunk: tokens per chunk, counted from each sample's first real token; None: no chunks.
        first_tokens: `(batch,)`, the position of each sample's first real token, from which its chunks are counted.
        samples: `(batch, seq)`, the number of the packed sample that each token belongs to; None: one sample per row.
        places: `(batch, seq)`, the positions by which chunks of packed samples are cut; None: those in the row.
        blocks: `(batch, seq)`, the number of the block (a prefix, an image) that each position lies in, -1 for none.
        pairs: makes the layout of a mask that is none of these, with queries and keys numbered from 0.
        q_start, k_start: the positions of the first query and of the first key.
        queries, keys: the number of queries and of keys; a static cache holds more keys than have been written.
        hidden: `(batch, keys)`, True for padding; None: no key is hidden.
        skips_padding: queries that are padding may get 0; otherwise they get what the model gives them.
        device: the device of the model's tensors.
        ranks: over a mesh, the `forward_over_ranks.Forward` that computes the layer; None on one device.
    """

    dtype: ClassVar[torch.dtype] = torch.bool  # what layers with an indexer ask of a mask

    is_causal: bool
    window: int | None = None
    after: int | None = None
    chunk: int | None = None
    first_tokens: Tensor | None = None
    samples: Tensor | None = None
    places: Tensor | None = None
    blocks: Tensor | None = None
    pairs: Callable[[], BlockLayout] | None = None
    q_start: int = 0
    k_start: int = 0
    queries: int = 0
    keys: int = 0
    hidden: Tensor | None = None
    skips_padding: bool = True
    device: torch.device | None = None
    ranks: Any = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return the shape of the mask tensor that this replaces. transformers reads it before it reuses a mask."""
        return (1, 1, self.queries, self.keys)

    def contiguous(self) -> Shown:
        return self

    def __getitem__(self, at: Any) -> Rows:
        """Return what an indexer reads of the mask, `mask[:, 0]`; refuse to give other parts."""
        every = slice(None)
        if isinstance(at, tuple) and at[:2] == (every, 0) and all(part == every for part in at[2:]):
            return Rows(self)
        return self._refuse()

    def __and__(self, other: object) -> Chosen:
        """Return the lists of an indexer that has read this mask, where a layer combines the two."""
        if isinstance(other, Chosen):
            return replace(other, shown=self)
        return self._refuse()

    def is_floating_point(self) -> bool:
        return False

    def sees(self, keys: Tensor) -> Tensor:
        """Return whether the queries see some keys: bool, shaped like `keys`, or broadcast to all queries and samples.

        keys: `(batch or 1, ..., queries or 1, k)` integers, counted from the first key; below 0: none. Raises
        UnsupportedError for masks with chunks or blocks.
        """
        if self.chunk is not None or self.pairs is not None:
            raise _unknown("chunks or blocks of tokens in a layer that chooses its keys")
        place = self.q_start + torch.arange(self.queries, dtype=keys.dtype, device=keys.device)[:, None]
        far = self.k_start + keys - place  # how far a key lies after its query
        seen = (keys >= 0).expand(torch.broadcast_shapes(keys.shape, far.shape))
        after = self.after
        if self.window is not None and not self.is_causal:
            seen = seen & (far >= -self.window)
            after = self.window if after is None else after
        elif self.window is not None:
            seen = seen & (far > -self.window)
        if self.is_causal:
            after = 0
        if after is not None:
            seen = seen & (far <= after)
        if self.samples is not None:
            own = self.samples[:, place[:, 0].long() - self.k_start]
            own = own.view(len(own), *[1] * (keys.ndim - 3), -1, 1)
            seen = seen & (_of_keys(self.samples, keys) == own)
        if self.hidden is not None:
            seen = seen & ~_of_keys(self.hidden, keys)
        return seen

    @property
    def visible(self) -> slice:
        """Return the slice of keys that some query sees unless they are hidden."""
        if not self.is_causal:
            return slice(0, self.keys)
        first = 0 if self.chunk is None else self.q_start // self.chunk * self.chunk
        if self.window is not None:
            first = self.q_start - self.window + 1
        return slice(max(0, first - self.k_start), self.q_start + self.queries - self.k_start)

    @property
    def is_plain(self) -> bool:
        """Return whether no window, chunk, packed sample or block changes what is seen."""
        return self.window is self.chunk is self.samples is self.blocks is self.pairs is None

    @property
    def needs_pairs(self) -> bool:
        """Return whether `attend` does not compute what the fields say: blocks of tokens, or packed samples that have
        padding or a cache."""
        is_whole = self.hidden is None and self.queries == self.keys
        return self.blocks is not None or (self.samples is not None and not is_whole)

    @derived
    def layout(self) -> BlockLayout:
        """Return what `pairs` makes. All layers of a forward share it."""
        assert self.pairs is not None
        return self.pairs()

    @cached_property
    def real(self) -> tuple[Tensor | None, Tensor | None]:
        """Return what `real_first` does. All layers of a forward share it; torch.compile cannot trace that."""
        return real_first(self.hidden)

    @property
    def lengths(self) -> Tensor | None:
        """Return the number of tokens of each sample, `(batch,)`, if `hidden` hides nothing but the rows after them.
        None: something else is hidden, or nothing, or there is a cache, or `hidden` cannot be read at once, or padding
        may not be skipped."""
        if (
            not self.skips_padding
            or self.hidden is None
            or self.hidden.device.type != "cpu"
            or torch.compiler.is_compiling()
        ):
            return None
        if self.q_start or self.k_start or self.queries != self.keys:
            return None
        lengths, order = self.real
        return lengths if order is None else None

    @cached_property
    def real_by_sample(self) -> list[tuple[slice | Tensor, slice | Tensor]]:
        """Return for each sample the indices of the tokens that are not hidden: among the queries, and among the keys,
        of which the queries are the last."""
        assert self.hidden is not None
        return [(_selection(row[self.keys - self.queries :]), _selection(row)) for row in ~self.hidden]

    @cached_property
    def words(self) -> str:
        """Say what a layer shows, in a few words. All layers of a forward share them."""
        words = ["causal" if self.is_causal or self.queries == 1 else "bidirectional"]
        limits = ("window", self.window), ("after", self.after), ("chunk", self.chunk)
        words += [f"{name} {x}" for name, x in limits if x is not None]
        if self.pairs is not None:
            words = [f"a mask, {self.layout.density:.0%} of its blocks"]
        elif self.window is None and self.chunk is None:
            words.append("all keys")
        others = ("packed", self.samples), ("padded", self.hidden)
        words += [name for name, x in others if x is not None]
        return f"{', '.join(words)}: {self.queries:,} queries from {self.q_start:,} on, {self.keys:,} keys"


def _of_keys(x: Tensor, keys: Tensor) -> Tensor:
    """Return the values of some keys, shaped like `keys` `(batch or 1, ..., k)`; x: `(batch, all keys)`. A key below 0
    gets the value of key 0."""
    sample = torch.arange(len(x), device=x.device)
    return x[sample.view(-1, *[1] * (keys.ndim - 1)), keys.to(x.device, torch.int64).clamp(min=0)]


def real_first(hidden: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the number of keys of each sample that are not hidden, `(batch,)`, and a permutation that puts them first,
    `(batch, keys)`; None: they come first. Both are None if `hidden` is."""
    if hidden is None:
        return None, None
    order = None
    if torch.compiler.is_compiling() or (hidden[:, :-1] & ~hidden[:, 1:]).any():
        order = hidden.to(torch.uint8).argsort(dim=1, stable=True)
    return (~hidden).sum(1), order


def _selection(real: Tensor) -> slice | Tensor:
    """Return an index of the tokens where `real`, bool `(tokens,)`, is True.

    It is a slice where they are neighbours, so that no key is copied.
    """
    index = real.nonzero()[:, 0]
    first, stop = (int(index[0]), int(index[-1]) + 1) if len(index) else (0, 0)
    return slice(first, stop) if stop - first == len(index) else index


def read_mask(mask_function: Callable[..., Any]) -> Shown:
    """Return what a mask function of transformers shows.

    It reads combinations of causality, one window, chunks and packed samples, and such a mask with blocks of tokens
    that see one another too. Raises UnsupportedError for any other mask.
    """
    limits = _limits(mask_function)
    before, after = limits.pop("before", None), limits.pop("after", None)
    if after == 0:
        return Shown(True, None if before is None else before + 1, **limits)
    if (before is None) != (after is None) or limits.keys() == {"blocks"}:
        raise _unknown(f"{before} keys before, {after} after a query")
    return Shown(False, before, None if after == before else after, **limits)


def _limits(mask_function: Callable[..., Any]) -> dict[str, Any]:
    """Return what limits the keys that a query sees, by name; a missing name sets no limit.

    `before` and `after`: how many keys before and after its own it sees at most; other names are fields of `Shown`.
    """
    if mask_function is causal_mask_function:
        return {"after": 0}
    if mask_function is bidirectional_mask_function or _same_code(mask_function, _every_key):
        return {}
    kind, values = mask_function.__qualname__.split(".")[0], inspect.getclosurevars(mask_function).nonlocals
    if kind == "and_masks":
        return _both([_limits(part) for part in values["mask_functions"]])
    if kind == "or_masks":
        return _widest([_limits(part) for part in values["mask_functions"]])
    if kind == "sliding_window_overlay":
        return {"before": values["sliding_window"] - 1}
    if kind == "sliding_window_bidirectional_overlay":
        return dict.fromkeys(("before", "after"), values["sliding_window"])
    if kind == "_bidirectional_window_overlay":  # of Gemma 3 as an encoder
        return dict.fromkeys(("before", "after"), values["sliding_window"] - 1)
    if kind == "sliding_window_mask_function":  # of T5Gemma 2; with a pair, of Moonshine
        size = values["sliding_window"]
        if isinstance(size, int):
            size = (size, 1) if values["is_causal"] else ((size + 1) // 2, size // 2 + 1)
        return {"before": size[0] - 1, "after": max(size[1] - 1, 0)}
    if kind == "chunked_overlay":
        return {"chunk": values["chunk_size"], "first_tokens": values["left_padding"]}
    if kind == "packed_sequence_mask_function":
        return {"samples": values["packed_sequence_mask"]}
    if kind == "remap_positions_for_packed_sequence":  # from transformers 5.23 on
        return _limits(values["mask_function"]) | {"places": values["position_ids"]}
    if kind == "blockwise_overlay":
        return {"blocks": values["block_sequence_ids"]}
    raise _unknown(kind)


def _unknown(what: str) -> UnsupportedError:
    return UnsupportedError(f"the model asks for a mask that is no window, chunk or packed sample ({what}): {REMEDY}")


_every_key = lambda *args: torch.tensor(True, dtype=torch.bool)  # noqa: E731  # as Gemma 3 writes it


def _same_code(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    a, b = one.__code__, other.__code__
    return (a.co_code, a.co_consts, a.co_names) == (b.co_code, b.co_consts, b.co_names)


def _both(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the limits of a mask that combines masks by `and`; `parts`: their limits, from `_limits`.

    Raises UnsupportedError if two masks set the same limit, other than `after`, or if one shows `blocks` alone.
    """
    found: dict[str, Any] = {}
    if any(part.keys() == {"blocks"} for part in parts):
        raise _unknown("blocks of tokens, limited further")
    for name, x in (item for part in parts for item in part.items()):
        if name == "after":
            found[name] = min(x, found.get(name, x))
        elif name in found:
            raise _unknown("two masks of one kind")
        else:
            found[name] = x
    if {"before", "chunk"} <= found.keys():
        raise _unknown("chunks with a window inside")
    return found


def _widest(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the limits of a mask that combines masks by `or`, where one of them shows what all the others show.

    Gemma 3 turns its decoder into an encoder in this way: it combines the causal mask with a window on both sides.
    Any mask and one of blocks give both their limits. `parts`: the masks' limits, from `_limits`. Raises
    UnsupportedError for any other combination.
    """
    if len(parts) == 2 and parts[1].keys() == {"blocks"} and "blocks" not in parts[0]:
        return parts[0] | parts[1]
    reach = [tuple(part.get(name, math.inf) for name in ("before", "after")) for part in parts]
    widest = tuple(max(sides) for sides in zip(*reach, strict=True))
    if widest not in reach or any(part.keys() - {"before", "after"} for part in parts):
        raise _unknown("one of several masks")
    return parts[reach.index(widest)]


def read_arguments(
    mask_function: Callable[..., Any], local_size: int | None, config: Any, mask: Tensor | None, arguments: Any
) -> Shown | None:
    """Return what a plain mask (causal, bidirectional, a window, chunks) shows, read from the arguments of
    transformers' `sdpa_mask`; None for other masks.

    It is used under torch.compile, which cannot trace how `read_mask` looks into a function.

    Args:
        local_size: the size of the window or of the chunks, in tokens; None: neither.
        config: tells which of the two, unless its `sliding_window` equals its `attention_chunk_size`.
        mask: `(batch, seq)`, True for real tokens: chunks count from the first of them; None: all are real.
        arguments: the remaining arguments of `sdpa_mask`, which show whether another mask was combined with it.
    """
    if mask_function is causal_mask_function:
        return Shown(is_causal=True)
    if mask_function is bidirectional_mask_function:
        return Shown(is_causal=False)
    bidirectional = "allow_is_bidirectional_skip" in arguments
    plain = bidirectional or arguments.get("allow_is_causal_skip", False)
    window, chunk = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    is_embedding_gemma = getattr(config, "model_type", None) == "gemma3_text" and config.use_bidirectional_attention
    if is_embedding_gemma and mask is not None:  # without a mask it may hold packed samples
        return Shown(is_causal=False, window=None if local_size is None else local_size - 1)
    if local_size is None or not plain or arguments.get("use_vmap", False) or window == chunk:
        return None
    if local_size == window:
        return Shown(is_causal=not bidirectional, window=local_size)
    if local_size == chunk:
        first = None if mask is None else (mask.cumsum(1) == 0).sum(1)
        return Shown(is_causal=True, chunk=local_size, first_tokens=first)
    return None


def attend(shown: Shown, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Return the attention of q `(batch, queries, heads, head_dim)` over k, v `(batch, keys, kv_heads, head_dim)`.

    The result is shaped like q, with the head_dim of v. options: scale, dropout_p, sinks and softcap of `attention`,
    and bias, of which a tensor is `(batch or 1, heads or 1, queries, keys)`.
    """
    bias = options.get("bias")
    if bias is not None and shown.chunk is not None:
        raise UnsupportedError(f"position_bias with chunks: {REMEDY}")
    if shown.samples is not None:
        return _attend_packed(shown, q, k, v, options)
    if shown.pairs is not None:
        if bias is not None and not isinstance(bias, Tensor) and shown.q_start != shown.k_start:
            raise UnsupportedError(f"position_bias with a mask over pairs and a cache: {REMEDY}")
        return attended(q, k, v, shown.layout, q_start=0, k_start=0, key_padding_mask=shown.hidden, **options)
    if shown.chunk is not None and shown.first_tokens is not None:
        if torch.compiler.is_compiling():  # then values cannot be looked at
            return _attend_aligned(shown, q, k, v, options)
        if shown.first_tokens.any():
            return _attend_each(shown, q, k, v, options)
    seen = shown.visible
    k, v = k[:, seen], v[:, seen]
    if isinstance(bias, Tensor):
        options["bias"] = bias[..., seen]
    if is_for_operator(shown, q, k, options):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, scale=options["scale"], enable_gqa=True).transpose(1, 2)
    start = shown.k_start + seen.start
    pattern, origin = pattern_of_shown(shown, start, k.shape[1])
    lengths = shown.lengths
    if lengths is not None:
        options["lengths"] = lengths
    else:
        hidden = None if shown.hidden is None else shown.hidden[:, seen]
        options |= {"key_padding_mask": hidden, "q_start": shown.q_start - origin, "k_start": start - origin}
    return attended(q, k, v, pattern, is_causal=shown.is_causal, **options)


def attended(q: Tensor, k: Tensor, v: Tensor, pattern: Any, **options: Any) -> Tensor:
    """Return `attention`'s out, without lse."""
    out = attention(q, k, v, pattern, **options)
    assert isinstance(out, Tensor)
    return out


LEAST_SAVED = 16 << 20
"""The bytes that this library must read less than PyTorch's operator to be the faster one for a new token (notebook,
2026-11-27). Its call takes 0.4 ms more, as the rest of a model drives its code out of the caches."""


def is_for_operator(shown: Shown, q: Tensor, k: Tensor, options: dict[str, Any]) -> bool:
    """Return whether PyTorch's operator computes a layer: one new token without padding, on a CPU. It reads keys once
    for each query head, this library once for each KV head."""
    whole = shown.is_causal or shown.window is shown.chunk is None
    others = options.get("sinks"), options.get("softcap"), options.get("bias"), shown.hidden, shown.samples
    plain = not options.get("dropout_p") and all(x is None for x in others)
    keys = shown.visible.stop - shown.visible.start
    saved = 2 * (q.shape[2] - k.shape[2]) * keys * k.shape[3] * k.element_size()
    return shown.queries == 1 and whole and plain and q.device.type == "cpu" and saved < LEAST_SAVED


def pattern_of_shown(shown: Shown, start: int, keys: int) -> tuple[Dilated | Window, int]:
    """Return the pattern of what a layer shows of the `keys` keys from position `start` on, and the position that
    counts as 0 in it: `start` wherever that changes nothing, so that the calls of successive tokens are equal."""
    if shown.chunk is not None and shown.queries > 1:
        return Dilated((shown.chunk,), (1,)), 0
    span = max(1, shown.q_start - start + shown.queries, keys)
    window, after = shown.window, shown.window if shown.after is None else shown.after
    if window is None or after is None or min(window, after) >= span or (shown.is_causal and shown.queries == 1):
        return Dilated((span,), (1,)), start
    return Window(window - 1) if shown.is_causal else Window(window, after), start


def _attend_each(shown: Shown, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    """Attend in each sample separately, with positions from its first real token; rows before this token are 0."""
    assert shown.first_tokens is not None
    parts = []
    for i, first in enumerate(shown.first_tokens.tolist()):
        q_first = min(max(0, first - shown.q_start), shown.queries)
        k_first = min(max(0, first - shown.k_start), shown.keys)
        sample = replace(
            shown,
            first_tokens=None,
            q_start=shown.q_start + q_first - first,
            k_start=shown.k_start + k_first - first,
            queries=shown.queries - q_first,
            keys=shown.keys - k_first,
            hidden=None if shown.hidden is None else shown.hidden[i : i + 1, k_first:],
        )
        rows = slice(i, i + 1)
        part = attend(sample, q[rows, q_first:], k[rows, k_first:], v[rows, k_first:], **options)
        parts.append(F.pad(part, (0, 0, 0, 0, q_first, 0)))
    return torch.cat(parts)


def _attend_aligned(shown: Shown, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    """Attend in samples that are shifted to begin with their first real token, and shift the results back. Rows before
    this token are 0. Raises UnsupportedError with a cache."""
    assert shown.first_tokens is not None
    if shown.q_start or shown.k_start or shown.queries != shown.keys:
        raise UnsupportedError(f"chunks with a cache, in a graph that torch.compile traces: {REMEDY}")
    first, place = shown.first_tokens[:, None], torch.arange(shown.keys, device=q.device)
    order = (place + first) % shown.keys
    hidden = None if shown.hidden is None else shown.hidden.gather(1, order)
    q, k, v = (permuted(x, order) for x in (q, k, v))
    out = attend(replace(shown, first_tokens=None, hidden=hidden), q, k, v, **options)
    return permuted(out, (place - first) % shown.keys).masked_fill((place < first)[..., None, None], 0)


def _of_sample(bias: Tensor | RelativeBias | QueryBias, i: int) -> Tensor | RelativeBias | QueryBias:
    """Return the bias of one row of a batch."""
    if isinstance(bias, Tensor):
        return bias[i : i + 1] if len(bias) > 1 else bias
    if isinstance(bias, QueryBias):
        return QueryBias(bias.logits[i : i + 1])
    return bias


def _attend_packed(shown: Shown, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    """Attend in packed samples: all rows of the batch as one sequence, cut where a sample or a chunk begins."""
    samples = shown.samples
    assert samples is not None
    bias = options.get("bias")
    if bias is not None and len(q) > 1:  # a bias has no entries for pairs of rows
        found = []
        for i in range(len(q)):
            row = slice(i, i + 1)
            places = None if shown.places is None else shown.places[row]
            alone = replace(shown, samples=samples[row], places=places)
            found.append(_attend_packed(alone, q[row], k[row], v[row], {**options, "bias": _of_sample(bias, i)}))
        return torch.cat(found)
    assert shown.hidden is None  # transformers looks for packed samples only where there is no padding mask
    if (samples.diff(dim=1) < 0).any():  # of ESMC: a sample may lie in several places
        if shown.window is not None or shown.chunk is not None:
            raise _unknown("packed samples in any order")
        if bias is not None:
            raise _unknown("packed samples in any order, with a position_bias")
        order = samples.argsort(dim=1, stable=True)
        q, k, v = (permuted(x, order) for x in (q, k, v))
        shown = replace(shown, samples=samples.gather(1, order))
        return permuted(_attend_packed(shown, q, k, v, options), order.argsort(1))
    begins = torch.ones_like(samples, dtype=torch.bool)
    begins[:, 1:] = samples[:, 1:] != samples[:, :-1]
    if shown.chunk is not None:
        places = torch.arange(shown.keys, device=samples.device) if shown.places is None else shown.places
        begins |= places % shown.chunk == 0
    edges = begins.flatten().nonzero()[:, 0].to(torch.int32)
    cu_seqlens = torch.cat([edges, edges.new_tensor([samples.numel()])])
    pattern, _ = pattern_of_shown(replace(shown, chunk=None), 0, shown.keys)
    q, k, v = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v))
    out = attended(q, k, v, pattern, is_causal=shown.is_causal, cu_seqlens=cu_seqlens, **options)
    return out.view(*samples.shape, *out.shape[2:])


def permuted(x: Tensor, order: Tensor) -> Tensor:
    """Return x `(batch, seq, heads, head_dim)` with its tokens in `order`, `(batch, seq)`."""
    return x.gather(1, order.to(x.device)[:, :, None, None].expand(x.shape))
