"""Represent a call in normal form: its arguments are checked once, and its backend is chosen once.

The public functions make a `Call`. `explain` describes the call, `operators` passes it through PyTorch's dispatcher,
and `execution` (one device) or `parallel.over_mesh` (several ranks) runs it.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from dilated_attention import bias as biases
from dilated_attention import checks
from dilated_attention.backends import table
from dilated_attention.backends.attributes import NO_ATTRIBUTES, Attributes, attributes_of
from dilated_attention.backends.facts import Facts
from dilated_attention.backends.problem import Problem, Repeat
from dilated_attention.cache import plan_cache
from dilated_attention.errors import UnsupportedError
from dilated_attention.layout import BlockLayout
from dilated_attention.mesh import check_transport, context_group, mesh_size
from dilated_attention.neighborhood import Neighborhood, Tiled, tiled
from dilated_attention.patterns import (
    Dilated,
    LayoutOfLength,
    Product,
    Sum,
    Window,
    layout_inside,
    warn_of_unserved,
)
from dilated_attention.plan import WHOLE, Branches, Plan, plan_of, row_counts
from dilated_attention.scores import UNIT, ScoreOptions, Scores
from dilated_attention.torch_internals import in_autocast, in_export, in_torch_func, is_mapped, is_symbol, observed

if TYPE_CHECKING:
    from typing_extensions import Unpack

Pattern = Dilated | Window | Neighborhood | BlockLayout | Product | Sum


class Options(ScoreOptions, total=False):
    """Hold the options that every public call takes; `attention` says what they mean."""

    is_causal: bool
    sinks: Tensor | None
    lengths: Tensor | None
    cu_seqlens: Tensor | None
    key_padding_mask: Tensor | None
    bias: Any
    backend: str
    mesh: Any
    seq_len: int | None
    head_offset: int | None
    transport: str
    layer: str
    q_start: int | None
    k_start: int | None


_DEFAULTS: Options = {
    **dict.fromkeys(Options.__annotations__),  # type: ignore[typeddict-item]
    "is_causal": False, "dropout_p": 0.0, "backend": "auto", "transport": "auto", "layer": "",
}  # fmt: skip


@dataclass(frozen=True)
class Shards:
    """Describe how a call's sequence is sharded over the ranks of a group.

    Attributes:
        group_name: the name of the process group, by which PyTorch finds it again.
        bounds: the edges of the shards, one more than ranks; or the global length alone, for balanced shards.
        samples: the edges of packed samples; None for one sample.
        lengths: the lengths of all samples of a padded batch, if the call is one of these samples; otherwise empty.
        sinks: whether the call has sinks.
        widths: the head_dims of q and of v, as given.
        gradients: whether this rank can take part in a backward of this call. This, `widths`, `sinks` and `lengths`
            serve only to check that all ranks have the same.
        layer: the name of the calling layer, for error messages.
    """

    group_name: str
    bounds: tuple[int, ...]
    samples: tuple[int, ...] | None = None
    transport: str = "auto"
    layer: str = ""
    lengths: tuple[int, ...] = ()
    sinks: bool = False
    widths: tuple[int, ...] = ()
    gradients: bool = True


@dataclass(frozen=True, eq=False)
class Call:
    """Hold the checked arguments of one call.

    Attributes:
        branches: the pattern in normal form for the KV heads of k; for a block layout alone, one branch of all
            tokens.
        choice: the backend, and why it was chosen.
        layouts: the block layouts inside segments, one for each number of tokens that take part in a segment; empty
            if the pattern has no layout.
        lengths, cu_seqlens: where samples end. Over a mesh, `shards` has the edges of packed samples.
        first_head: global index of the first query head; bias_head: its index among the heads of the bias.
        seed: the seed of dropout, drawn when the call runs; None without dropout.
        bias, coordinates, buckets, query_tokens, key_tokens: the tensors of a bias, as in `bias.Normal`; the scores
            name its form.
        shards: over a mesh of several ranks, how the sequence is sharded; None on one device.
        starts, placed: the positions of the first query and of the first key, and whether they were given.
        problems: for each (backend, positions, shape of q, shape of k, device) that the call has run with, the
            `Problem` without what is read of tensors. Calls that differ only in these and in tensors share a few of
            them.
        repeats: what a backend prepared for tensors of a kind (strides, alignment); None unless the cache keeps the
            call, by `key`. It keeps no product with its layouts.
        latest: where the last call of `_at` lay, and that call. All layers of a model lie at one place.
    """

    branches: Branches
    choice: table.Choice
    layouts: tuple[BlockLayout, ...] = ()
    is_causal: bool = False
    scores: Scores = UNIT
    lengths: Tensor | None = None
    cu_seqlens: Tensor | None = None
    key_padding_mask: Tensor | None = None
    first_head: int = 0
    bias_head: int = 0
    seed: Tensor | None = None
    shards: Shards | None = None
    starts: tuple[int, int] = (0, 0)
    placed: bool = False
    bias: Tensor | None = None
    coordinates: Tensor | None = None
    buckets: Tensor | None = None
    query_tokens: Tensor | None = None
    key_tokens: Tensor | None = None
    problems: dict[Hashable, Problem] = field(default_factory=dict)
    repeats: dict[Hashable, Repeat | None] | None = field(init=False, default=None)
    key: Hashable = field(init=False, default=None)
    latest: tuple[Hashable, Any] = field(init=False, default=(None, None))

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, **given: Unpack[Options]) -> Call:
        """Check the arguments of `attention` and return them as a call. A ValueError names the argument and what would
        be right."""
        options: Options = {**_DEFAULTS, **given}
        if len(options) > len(_DEFAULTS):
            checks.unknown_options(given.keys() - _DEFAULTS.keys())
        group = ranks = None
        if options["mesh"] is not None:
            group = context_group(options["mesh"])
            if dist.get_world_size(group) > 1:  # one rank is one device
                ranks = group
        call, seq_len = cls._plain(q, k, v, pattern, options, group, ranks is not None)
        call = call._with_tensors(q, k, options)
        if isinstance(pattern, (BlockLayout, Product)):
            call = call._with_layouts(pattern, q, k, seq_len, ranks is not None)
            if call.placed and call.cu_seqlens is None:
                call._check_reach(call.layouts[0], q.shape[1], k.shape[1])
        if ranks is not None:
            # In eager mode q is made to require gradients if some rank wants them.
            gradients = not torch.compiler.is_compiling() or any(x.requires_grad for x in (q, k, v))
            call = call.over(Shards(
                ranks.group_name, (seq_len,), None, options["transport"], options["layer"], (),
                options["sinks"] is not None, (q.shape[3], v.shape[3]), gradients and torch.is_grad_enabled(),
            ))  # fmt: skip
        return call

    @classmethod
    def remembered(
        cls, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, options: Options, near: slice | None = None, *,
        alone: bool = True,
    ) -> Call:  # fmt: skip
        """Return the same as `of`; the options must be complete. If its `_key` is in `plan_cache`,
        only tensors and layouts inside segments are checked again, and no backend is chosen again. Warns as
        `warn_of_unserved` does, unless other calls show keys to the same queries (`alone`). `near`: the keys that the
        call reads, at the positions of the options (`near_keys`); `key_padding_mask` is of all keys.
        """
        positions = None
        if isinstance(pattern, BlockLayout):
            positions = positions_of(options)
        key = _key(q, k, v, pattern, options, near, positions)
        if key is None:
            call = cls.of(q, k, v, pattern, **options)
            if alone:
                call._warn(pattern, options, q, k)
            return call

        def make() -> Call:
            call, _ = cls._plain(q, k, v, pattern, options)
            if alone:
                call._warn(pattern, options, q, k)
            return call._remembered(key)

        call = plan_cache.get(key, make)
        if isinstance(pattern, BlockLayout) and options["cu_seqlens"] is None:
            pattern.require_unchanged()
            call = call._with_lists(key, pattern, q, k)
            if positions is not None:
                call = call._at(positions, q, k)
        call = call._with_tensors(q, k, options)
        if isinstance(pattern, Product) or (isinstance(pattern, BlockLayout) and not call.layouts):
            return call._with_layouts(pattern, q, k, k.shape[1], False)
        return call

    def _with_lists(self, key: Hashable, layout: BlockLayout, q: Tensor, k: Tensor) -> Call:
        """Return this call, which `plan_cache` keeps by `key`, with its layout, from the cache too."""
        key = key, layout.key
        return plan_cache.get(key, lambda: self._with_layouts(layout, q, k, k.shape[1], False)._remembered(key))

    def _at(self, starts: tuple[int, int], q: Tensor, k: Tensor) -> Call:
        """Return this call of a layout at these positions. Both share what backends repeat."""
        place = starts, k.shape[1]
        latest, call = self.latest
        if latest != place:
            call = self.alike(starts=starts)
            call._check_reach(call.layouts[0], q.shape[1], k.shape[1])
            self.__dict__.update(latest=(place, call))
        return call

    def _warn(self, pattern: Pattern, options: Options, q: Tensor, k: Tensor) -> None:
        """Warn of tokens that take part for no head; with `head_offset`, another rank's heads may serve them."""
        if torch.compiler.is_compiling() or q.is_meta or options["head_offset"] is not None:
            return
        seq_len = k.shape[1] if self.shards is None else self.shards.bounds[-1]
        warn_of_unserved(branched_factor(pattern), self.branches, seq_len)

    def _remembered(self, key: Hashable) -> Call:
        self.__dict__.update(repeats={}, key=key)
        return self

    @classmethod
    def _plain(
        cls, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, options: Options,
        group: dist.ProcessGroup | None = None, over_ranks: bool = False,
    ) -> tuple[Call, int]:  # fmt: skip
        """Check all arguments except layouts and the options `TENSORS`, which do not matter here. Return the call
        without these and without shards, and the global sequence length. `group`: the process group of the options'
        mesh; `over_ranks`: whether it has several ranks."""
        positions = positions_of(options)
        is_placed = positions is not None
        starts = (0, 0)
        if positions is not None:
            starts = positions
        checks.tensors(q, k, v, is_placed)
        seq_len = _sequence_length(q, options["seq_len"], group, options["transport"])
        if over_ranks:
            _check_over_ranks(options)
        checks.boolean("is_causal", options["is_causal"])
        scores = Scores.of(q.shape[3], options)
        head_offset = options["head_offset"]
        if head_offset is not None:
            head_offset = checks.integer("head_offset", head_offset, 0)
        if is_placed:
            check_placed(pattern, options)
            seq_len = k.shape[1]  # q may be some rows of a layout
        bias = biases.normal(options["bias"], q, k, seq_len, starts, is_placed)
        if bias is not None:
            scores = scores._replace(bias=float(bias.form))
            compat = getattr(pattern, "compat", None)
            _refuse("with a bias", ("compat", compat is not None, "leave compat out"))
        branches = branched_factor(pattern).branches(k.shape[2], head_offset)
        needs = scores.needs if bias is None else (*scores.needs, *bias.needs)
        call = cls(
            branches, table.choose(options["backend"], _facts(q, v, pattern, branches, options, needs, over_ranks)),
            is_causal=options["is_causal"], scores=scores, first_head=(head_offset or 0) * (q.shape[2] // k.shape[2]),
            starts=starts, placed=is_placed,
        )  # fmt: skip
        if bias is not None:
            call = replace(
                call, bias=bias.tensor, coordinates=bias.coordinates, buckets=bias.buckets,
                query_tokens=bias.query_tokens, key_tokens=bias.key_tokens,
            )  # fmt: skip
        return call, seq_len

    def _with_tensors(self, q: Tensor, k: Tensor, options: Options) -> Call:
        """Check the options `TENSORS`, and return the same call with them, or this one if it has none of them."""
        if options["sinks"] is not None:
            checks.sinks(q, options["sinks"])
        hidden = options["key_padding_mask"]
        if options["lengths"] is options["cu_seqlens"] is hidden is None:
            return self
        checks.mask(k, hidden)
        lengths, cu_seqlens = checks.ragged(q, options["lengths"], options["cu_seqlens"])
        if cu_seqlens is not None and q.shape[1] != k.shape[1]:
            raise ValueError(
                "cu_seqlens are the edges of samples in q and in k, which then have equally many tokens; got "
                f"{q.shape[1]} and {k.shape[1]}: make one call per sample"
            )
        choice = self.choice if hidden is None else self.choice.masked
        repeats = choice.backend is self.backend and cu_seqlens is None and (lengths is None or self.shares_plan)
        derive = self.alike if repeats else self.but
        return derive(choice=choice, lengths=lengths, cu_seqlens=cu_seqlens, key_padding_mask=hidden)

    def but(self, **fields: Any) -> Call:
        """Return this call with other `fields`, in a quarter of the time of `dataclasses.replace`. It repeats
        nothing."""
        call = object.__new__(Call)
        call.__dict__.update(self.__dict__, repeats=None, key=None, latest=(None, None))
        call.__dict__.update(fields)
        return call

    def alike(self, **fields: Any) -> Call:
        """Return this call with other `fields`, on which what backends repeat does not depend: both share it."""
        return self.but(repeats=self.repeats, key=self.key, **fields)

    @property
    def nbytes(self) -> int:
        """Return an upper estimate of the bytes of the call, one plan, and the layouts, also those in `problems`."""
        nbytes = 4096 + 256 * sum(map(len, self.branches.offsets))
        for layout in self.layouts:
            nbytes += 4 * layout.nbytes
        return nbytes

    @property
    def shares_plan(self) -> bool:
        """Return whether all samples of a padded batch share the plan of the longest: a shorter one then sees what the
        longest would, up to its end. With `compat` it would not, because keys are added at the end of a sample."""
        return self.backend.skips_rows and not self.layouts and self.branches.compat is None

    @property
    def backend(self) -> table.Backend:
        return self.choice.backend

    def plan(self, queries: int, keys: int | None = None) -> Plan:
        """Return the plan of one sample on one device; `queries`, `keys`: their numbers, equal by default."""
        keys = queries if keys is None else keys
        if self.layouts and self.placed:
            return plan_of(self.branches, *self._in_layouts(queries, keys), listed=True)
        q_start, k_start = self.starts
        return plan_of(self.branches, (q_start, q_start + queries), (k_start, k_start + keys), self.is_causal)

    def _in_layouts(self, queries: int, keys: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the positions [start, stop) of the queries of a sample, and of its keys that some query may see: a
        cache, and a layout, may not hold later ones yet."""
        q_start, k_start = self.starts
        rows = q_start, q_start + queries
        k_stop = k_start + keys
        if self.is_causal or (len(self.layouts) == 1 and self.layouts[0].is_causal):
            k_stop = max(k_start, min(k_stop, rows[1]))
        return rows, (k_start, k_stop)

    def samples(self, seq_len: int) -> list[tuple[slice, slice]]:
        """Return the (batch, seq) slices of the call's samples. Segments start anew in each sample.

        Raises ValueError if lengths or cu_seqlens do not fit: their values are first read here.
        """
        if self.lengths is not None and is_mapped(self.lengths):
            raise UnsupportedError(
                "lengths is mapped by torch.func.vmap, and a product and backend='reference' read its values; "
                "fold the mapped dimension into the batch instead"
            )
        samples = checks.samples(seq_len, self.lengths, self.cu_seqlens)
        if self.cu_seqlens is not None:
            longest = max([seq.stop - seq.start for _, seq in samples], default=0)
            for layout in self.layouts:
                if self.placed:
                    self._check_reach(layout, longest, longest)
                elif 0 < longest < layout.seq_len:
                    raise ValueError(
                        f"layout is for {layout.seq_len} tokens, but the longest sample of cu_seqlens has {longest}: "
                        "every sample uses the lists of the first tokens, so later lists are never used. Give "
                        f"layout.prefix({longest}) if that is meant, or BlockLayout.stack of each sample's layout"
                    )
        return samples

    def sample_count(self, q: Tensor) -> int:
        """Return the number of samples; a layout may have lists for each of them."""
        return q.shape[0] if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    def attributes(self, q: Tensor, k: Tensor) -> Attributes:
        """Return what backends read per token of q and k on one device."""
        hidden = self.key_padding_mask
        if hidden is None and self.seed is None and self.bias is None:
            return NO_ATTRIBUTES
        if hidden is not None:
            hidden = hidden[:, :, None]
        queries = self.starts[0] + torch.arange(q.shape[1], device=q.device)
        keys = self.starts[1] + torch.arange(k.shape[1], device=q.device)
        return self.attributes_at(q, queries, keys[:, None], self.starts, hidden)

    def attributes_at(
        self, q: Tensor, queries: Tensor, keys: Tensor, starts: tuple[int, int], hidden: Tensor | None
    ) -> Attributes:
        """Return what backends read per token of some rows of q and of k.

        Args:
            queries, keys: the position of each row of q, `(rows,)`, and of k, `(rows, KV heads or 1)`.
            starts: the positions of the first query and of the first key of the call.
            hidden: the keys that no query sees, bool `(batch or 1, rows, KV heads or 1)`; None: all are seen.
        """
        found = attributes_of(
            len(q), q.shape[2], queries, keys, hidden=hidden, seed=self.seed, first_head=self.first_head
        )
        if self.bias is None:
            return found
        rows = queries - starts[0]
        columns = keys - starts[1]
        if self.query_tokens is not None and self.key_tokens is not None:
            rows = self.query_tokens
            columns = self.key_tokens[:, None]
        bias = biases.Normal(int(self.scores.bias), self.bias, self.coordinates)
        heads = range(self.bias_head, self.bias_head + q.shape[2])
        return found.and_(*biases.attributes(bias, heads, rows, columns, starts))

    def bias_source(self) -> biases.Source | None:
        """Return what all pairs read of the bias; None without a bias."""
        if self.bias is None:
            return None
        return biases.Source(int(self.scores.bias), self.bias, self.bias.shape, self.buckets)

    def over(self, shards: Shards) -> Call:
        """Return the same call over the ranks that `shards` describes; it moves the edges of packed samples there.

        A single layout of packed samples is replaced by its prefixes for the numbers of tokens that take part in their
        segments. Raises ValueError if lengths or cu_seqlens do not fit the global length.
        """
        samples = None
        layouts = self.layouts
        # Read here, before the ranks wait for one another, so that every rank raises what is wrong with them.
        slices = [seq for _, seq in self.samples(shards.bounds[-1])]
        if self.cu_seqlens is not None:
            samples = (0, *[seq.stop for seq in slices])
            if len(layouts) == 1:
                counts = self._counts((seq.stop - seq.start,) * 2 for seq in slices)
                layouts = tuple([layouts[0].prefix(count) for count in counts])
        return replace(self, shards=replace(shards, samples=samples), layouts=layouts, cu_seqlens=None)

    def _with_layouts(
        self, pattern: BlockLayout | Product, q: Tensor, k: Tensor, seq_len: int, over_ranks: bool
    ) -> Call:
        """Return the same call with `layouts` taken from the pattern, and checked against q and k.

        `over_ranks`: the call has a mesh of several ranks; each layout then gets lists per query head, on q's device.
        """
        heads = q.shape[2]
        kv_heads = k.shape[2]
        if isinstance(pattern, BlockLayout):
            # Packed samples use the layout of their first tokens, whatever their common length.
            if self.cu_seqlens is not None or self.placed:
                seq_len = pattern.seq_len
            pattern.check(self.sample_count(q), seq_len, heads, kv_heads)
            layouts: tuple[BlockLayout, ...] = (pattern,)
        else:
            if in_export() and (self.lengths is not None or self.cu_seqlens is not None):
                raise UnsupportedError(
                    "torch.export of a layout inside segments, or of a layout function, with lengths or cu_seqlens: no "
                    "program holds the lists of all samples; export a call on whole sequences, without lengths and "
                    "cu_seqlens"
                )
            if is_symbol(seq_len) and not isinstance(pattern.layout, BlockLayout):
                raise UnsupportedError(
                    "torch.export of a layout function for any length: no program holds the lists of all lengths; "
                    "export for one length, without dynamic_shapes for seq"
                )
            layouts = self._inside(pattern.layout, q, k, seq_len)
        if over_ranks:
            if self.cu_seqlens is not None and any(layout.batch_size > 1 for layout in layouts):
                raise UnsupportedError(
                    f"layout has lists for each of {layouts[0].batch_size} packed samples, which a mesh does not "
                    "support; make one call per sample, each with its layout"
                )
            lists = torch.device("cpu") if q.device.type == "meta" else q.device
            layouts = tuple([layout.for_heads(heads).to(lists) for layout in layouts])
        return replace(self, layouts=layouts, problems={})

    def _check_reach(self, layout: BlockLayout, queries: int, keys: int) -> None:
        """Raise ValueError if a query, or a key that some query may see, lies beyond the layout of the whole
        sequence."""
        stop = self.starts[0] + queries
        if not (self.is_causal or layout.is_causal):
            stop = max(stop, self.starts[1] + keys)
        if layout.seq_len < stop and self.branches.segment_lengths == (WHOLE,):
            raise ValueError(
                f"layout is for {layout.seq_len} tokens, but q or k reaches to position {stop}; build a longer one"
            )

    def _inside(
        self, layout: BlockLayout | LayoutOfLength, q: Tensor, k: Tensor, seq_len: int
    ) -> tuple[BlockLayout, ...]:  # fmt: skip
        """Return the layouts inside segments, checked: one for each number of participating tokens that a segment has.
        At positions, a single layout also serves shorter segments. `seq_len`: the tokens per batch element, which may
        be cut into samples."""
        samples = [(q.shape[1], k.shape[1])]
        if not self.placed or self.cu_seqlens is not None:
            samples = [(seq.stop - seq.start,) * 2 for _, seq in self.samples(seq_len)]
        found = tuple([layout_inside(layout, count, self.placed) for count in self._counts(samples)])
        for each in found:
            each.check(1, each.seq_len, q.shape[2], k.shape[2])
        if isinstance(layout, BlockLayout):
            return found[:1]
        return found

    def _counts(self, samples: Iterable[tuple[int, int]]) -> list[int]:
        """Return the distinct numbers of tokens that take part in a segment of samples with these numbers of queries
        and keys, ascending."""
        counts: set[int] = set()
        for sample in samples:
            rows, columns = self._in_layouts(*sample)
            both = max(rows[0], columns[0]), min(rows[1], columns[1])
            counts |= row_counts(self.branches, max(rows[1], columns[1]), both)
        return sorted(counts)


TENSORS = ("sinks", "lengths", "cu_seqlens", "key_padding_mask")
"""The options whose values are tensors, apart from a bias, whose form decides what serves it."""

_READ_LATER: frozenset[Any] = frozenset((Tensor, torch.nn.Parameter, list, tuple))  # other tensors may be less
_PLAIN = frozenset((bool, int, float, str, type(None)))
_COMPARED_BY_VALUE = frozenset((Dilated, Window))


def _key(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, options: Options, near: slice | None,
    positions: tuple[int, int] | None,
) -> Hashable | None:  # fmt: skip
    """Return a cache key of everything that `Call._plain` depends on, or None if the call must be checked. `positions`:
    those of the options, if the pattern is a layout.

    It must be checked in four cases: a mesh is given; an option other than `TENSORS` is no plain number or string; q, k
    or v may be more or less than it seems, under torch.compile, torch.func or a dispatch mode or on the meta device; q
    has enough heads for a warning.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or in_torch_func() or observed(q, k, v):
        return None
    if q is None or k is None or v is None or q.is_meta:
        return None
    values = tuple(options.values())
    types = tuple(map(type, values))  # True == 1 == 1.0, and an option may take only one of them
    if not _PLAIN.issuperset(types):
        options = options.copy()
        for name in TENSORS:
            if type(options[name]) in _READ_LATER:  # type: ignore[literal-required]
                options[name] = None  # type: ignore[literal-required]
        values = tuple(options.values())
        types = tuple(map(type, values))
    if options["mesh"] is not None or not _PLAIN.issuperset(types) or q.is_nested or k.is_nested or v.is_nested:
        return None
    kind = type(pattern)
    shown: Any = pattern.dilated if isinstance(pattern, Product) else pattern
    if kind is BlockLayout:
        shown = None  # the call without its lists is the same for every layout
    elif type(shown) not in _COMPARED_BY_VALUE and (
        type(shown) is not Sum or not _COMPARED_BY_VALUE.issuperset(map(type, shown.terms))
    ):
        return None
    if q.dim() != 4 or q.size(2) >= checks.MANY_HEADS:
        return None
    shapes: tuple[Any, ...] = (q.shape, k.shape, v.shape)
    keys = None
    if near is not None:
        keys = near.stop - near.start
    elif positions is not None and isinstance(pattern, BlockLayout):
        before = positions[0] % pattern.q_block
        if before + q.size(1) <= pattern.q_block:
            # Queries of one list: the same call with any list and any number of keys (`_at`).
            values = tuple({**options, "q_start": None, "k_start": None}.values())
            keys = -1
    if keys is not None:
        if k.dim() != 4 or v.dim() != 4:
            return None  # it will be refused
        batch, tokens, heads, width = k.shape
        if v.shape != (batch, tokens, heads, v.size(3)):
            return None
        shapes = (q.shape, keys, batch, heads, width, v.size(3))
    return (
        "call", kind, shown, values, types, *shapes, q.dtype, q.device, q.layout, k.dtype, k.device, k.layout,
        v.dtype, v.device, v.layout,
    )  # fmt: skip


def as_autocast(q: Tensor, k: Tensor, v: Tensor, if_mixed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Cast q, k and v as autocast does for `scaled_dot_product_attention`; double precision is left as it is.
    `if_mixed`: only if they differ in dtype."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):  # which is checked later
        return q, k, v
    if in_autocast(q) and not (if_mixed and q.dtype == k.dtype == v.dtype):
        q, k, v = (x.to(dtype_of_products(x)) if x.is_floating_point() else x for x in (q, k, v))
    return q, k, v


def dtype_of_products(x: Tensor) -> torch.dtype:
    """Return the dtype of a product of x with a weight: the dtype of autocast, unless x is in double precision."""
    if x.dtype == torch.float64 or not in_autocast(x):
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)


def as_one_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad q, k and v with zeros to one head_dim. No score changes, and the caller drops the extra columns of out."""
    missing = v.size(3) - q.size(3)
    if missing < 0:
        return q, k, torch.nn.functional.pad(v, (0, -missing))
    if missing:
        q, k = (torch.nn.functional.pad(x, (0, missing)) for x in (q, k))
    return q, k, v


def _sequence_length(q: Tensor, seq_len: int | None, group: dist.ProcessGroup | None, transport: str) -> int:
    """Return the global sequence length, given this rank's shard q; `group` is None on one device.

    Without `seq_len`, all shards are taken to be as long as q. Raises ValueError if `seq_len` or `transport` does not
    fit the group.
    """
    ranks = 1
    if group is not None:
        check_transport(transport)
        ranks = dist.get_world_size(group)
    elif transport != "auto":
        raise ValueError(f"transport={transport!r} needs a mesh; use transport='auto'")
    if seq_len is None:
        return q.shape[1] * ranks
    seq_len = checks.integer("seq_len", seq_len, 0)
    if seq_len != q.shape[1] and ranks == 1:
        raise ValueError(f"seq_len={seq_len} on one device must be q's own length, {q.shape[1]}; leave it out")
    return seq_len


def positions_of(options: Options) -> tuple[int, int] | None:
    """Return the positions of the first query and of the first key; None if neither is given. With either, q and k may
    have different lengths."""
    first_query = options["q_start"]
    first_key = options["k_start"]
    if first_query is None and first_key is None:
        return None
    if first_query is not None:
        first_query = checks.integer("q_start", first_query, 0, 1 << 62)
    if first_key is not None:
        first_key = checks.integer("k_start", first_key, 0, 1 << 62)
    return first_query or 0, first_key or 0


def _check_over_ranks(options: Options) -> None:
    """Refuse what a mesh of several ranks lacks: dropout with lengths."""
    padded = options["dropout_p"] and options["lengths"] is not None
    _refuse("with lengths over a mesh", ("dropout_p", padded, "pack the batch: cu_seqlens"))


def check_placed(pattern: Pattern, options: Options) -> None:
    """Raise UnsupportedError for what excludes q_start and k_start, which are given: a neighborhood, compat or a
    mesh."""
    _refuse(
        "with q_start or k_start",
        ("a Neighborhood", isinstance(pattern, Neighborhood), "give the whole grid, without positions"),
        ("compat", getattr(pattern, "compat", None) is not None, "leave compat out"),
        (
            "lengths for a product with a function of layouts",
            options["lengths"] is not None and isinstance(pattern, Product) and callable(pattern.layout),
            "give the product a BlockLayout, or make one call per sample",
        ),
        ("mesh", options["mesh"] is not None, "leave q_start and k_start out: the shards say where tokens lie"),
    )


def near_keys(
    q: Tensor, k: Tensor, pattern: Window, options: Options
) -> tuple[slice | None, Options]:  # fmt: skip
    """Return which keys a window at positions shows to some query, and the options with positions for these alone;
    (None, `options`) if the call needs its keys and positions as they are, or will be refused.

    A window depends on distances alone: both positions are moved by the same number, so that every new token of a
    generation makes the same call.
    """
    positions = positions_of(options)
    if positions is None:
        return None, options
    as_given = pattern.leading > 0 or options["bias"] is not None or options["cu_seqlens"] is not None
    as_given |= options["dropout_p"] != 0 or options["mesh"] is not None
    if as_given or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None, options
    dense = isinstance(q, Tensor) and isinstance(k, Tensor) and not (q.is_nested or k.is_nested)
    if not dense or q.dim() != 4 or k.dim() != 4:
        return None, options
    first_query, first_key = positions
    after = 0 if options["is_causal"] else pattern.after
    assert after is not None
    reach = first_query + q.shape[1] + after * pattern.rate
    start = max(first_key, first_query - pattern.before * pattern.rate)
    stop = min(first_key + k.shape[1], reach)
    near = slice(start - first_key, max(stop, start) - first_key)
    moved = min(first_query, start)
    return near, {**options, "q_start": first_query - moved, "k_start": start - moved}


def in_tiles(
    q: Tensor, k: Tensor, v: Tensor, pattern: Neighborhood, options: Options
) -> tuple[Tiled, tuple[Tensor, Tensor, Tensor], Options]:
    """Return a neighborhood as a layout over rows, and what a `Call` with that layout takes: tensors that stand for
    ordered q, k and v, and the options."""
    options = {**_DEFAULTS, **options}
    if positions_of(options) is not None:
        check_placed(pattern, options)
    checks.tensors(q, k, v)
    _refuse(
        "with a Neighborhood",
        ("lengths", options["lengths"] is not None, "every sample must be a whole grid: leave lengths out"),
        ("cu_seqlens", options["cu_seqlens"] is not None, "every sample must be a whole grid: give grids as a batch"),
        ("mesh", options["mesh"] is not None and mesh_size(options["mesh"]) > 1, "keep each sample on one rank"),
    )
    pattern.check_length(q.shape[1])
    pattern.refuse_causal(options["is_causal"])
    checks.mask(k, options["key_padding_mask"])
    _sequence_length(q, options["seq_len"], None, options["transport"])
    bias = biases.normal(options["bias"], q, k, k.shape[1])
    found = tiled(pattern)
    hidden = options["key_padding_mask"]
    if hidden is not None:
        hidden = found.keys(hidden)
    if bias is not None:
        tokens = torch.arange(q.shape[1], device=q.device)[None]
        bias = bias.reordered(found.queries(tokens)[0], found.keys(tokens)[0], q.shape[1])
    ordered = (found.empty(q), found.empty(k), found.empty(v))
    return found, ordered, {**options, "seq_len": None, "key_padding_mask": hidden, "bias": bias}


def _refuse(where: str, *cases: tuple[str, Any, str]) -> None:
    """Raise UnsupportedError for the first of `cases`, (name, whether it is given, remedy), that is given. `where`
    names the option that excludes it."""
    for name, given, remedy in cases:
        if given:
            raise UnsupportedError(f"{name} {where} is not supported; {remedy}")


_EVERY_TOKEN = Dilated((WHOLE,), (1,))


def branched_factor(pattern: Pattern) -> Dilated | Window | Sum:
    """Return the pattern without its layout: a product's dilated factor; for a block layout, one segment with all
    tokens."""
    if isinstance(pattern, (Dilated, Window, Sum)):
        return pattern
    if isinstance(pattern, BlockLayout):
        return _EVERY_TOKEN
    if isinstance(pattern, Product):
        return pattern.dilated
    if isinstance(pattern, Neighborhood):  # on one device it is a layout by now
        raise UnsupportedError("a Neighborhood over a mesh is not supported; keep each sample on one rank")
    raise ValueError(
        "pattern must be a Dilated, a Window, a Neighborhood, a BlockLayout, a product or a sum; "
        f"got {type(pattern).__name__}"
        f"{layout_remedy(pattern)}"
    )


def layout_remedy(given: Any) -> str:
    """Return the end of an error message: how to turn `given` into a layout; "" if this library cannot do it."""
    if type(given).__name__ == "BlockMask":
        return "; give BlockLayout.from_block_mask of it"
    if callable(given):
        return (
            "; for a mask_mod give BlockLayout.from_mask_mod(mask_mod, seq_len), or from_block_mask of its BlockMask; "
            "for a function that makes layouts give its layout of seq_len tokens"
        )
    if isinstance(given, Tensor):
        return (
            "; give BlockLayout.from_mask(mask, seq_len) of booleans per pair or per block, or "
            "BlockLayout.from_torch_sparse of a BSR tensor"
        )
    return ""


def _facts(
    q: Tensor, v: Tensor, pattern: Pattern, branches: Branches, options: Options, needs: tuple[str, ...],
    over_ranks: bool,
) -> Facts:  # fmt: skip
    """Return what the choice of a backend depends on, without a key mask (`Choice.masked`)."""
    if isinstance(pattern, (BlockLayout, Product)):
        needs += ("a block layout",)
    if branches.bands:
        needs += ("a window",)
    pairs = list(zip(branches.segment_lengths, branches.dilation_rates, strict=True))
    if branches.bands:
        # A window with two bounds limits the keys. Causality does not, and leading tokens do not count.
        keys = 0
        for (w, r), (low, high) in zip(pairs, branches.bands, strict=True):
            in_segment = w // r
            if low is not None and high is not None:
                in_segment = min(in_segment, high - low + 1)
            keys += in_segment
        shown = min(keys, q.shape[1])
    else:
        # An estimate: 1 / r of a head's tokens take part in a branch, and see w / r keys.
        shown = 0
        for w, r in pairs:
            shown += min(w, q.shape[1]) // r**2 + 1
    work = q.numel() * shown
    seq_len = q.shape[1]
    if torch.compiler.is_compiling():
        seq_len = 1
        if is_symbol(work):  # a graph of torch.export serves any length: it gets the backend for long ones
            work = sys.maxsize
    return Facts(q.device, q.dtype, max(q.shape[3], v.shape[3]), seq_len, needs, work, over_ranks)
