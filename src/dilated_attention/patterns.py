"""Describe patterns: small frozen values that say which tokens attend to which, for any length and device.

A pattern's heads are the heads of k and v. With grouped queries, query head h has the offset of the KV head that it
reads, h // (num_heads // num_kv_heads), so that a KV head shows all its query heads the same strided rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from dilated_attention import checks
from dilated_attention.cache import Kept, Named, plan_cache
from dilated_attention.errors import UnsupportedError
from dilated_attention.layout import BlockLayout, warn_of_blind
from dilated_attention.pictures import plot_bands, plot_product
from dilated_attention.plan import ALL, EVERY, WHOLE, Branches, OffsetTable, plan_of
from dilated_attention.torch_internals import is_symbol

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LayoutOfLength = Callable[[int], BlockLayout]

Offsets = Literal["head", "head_block"] | Sequence[Sequence[int]]


def _below(bits: int, name: str, *values: int) -> tuple[int, ...]:
    for value in values:
        if value >= 2**bits:
            raise ValueError(f"{name} must be below 2**{bits}, more than any sequence needs; got {value!r}")
    return values


def _of_branches(bits: int, name: str, values: Sequence[int]) -> tuple[int, ...]:
    return _below(bits, name, *checks.integers(name, values, "positive integers, one per branch", 1))


class Term:
    """Base class of the terms of a sum, which may also be a `BlockLayout`."""

    def __add__(self, other: Any) -> Sum:
        """Return the sum of both patterns: what either shows, counts added; see `Sum`."""
        return Sum((self, other))

    def __radd__(self, other: Any) -> Sum:
        return Sum((other, self))

    def _counts(self, seq_len: int, num_heads: int, is_causal: bool) -> Tensor:
        """Return how many keys each token of each head sees, int64 `(heads, seq)`."""
        raise NotImplementedError


class _Drawn(Term):
    """Base class of patterns that are drawn as pairs of query and key. A subclass defines `_plot_head`, and
    `_least_heads` if the default number of heads in `plot` is another."""

    def plot(
        self,
        seq_len: int,
        head: int = 0,
        ax: Axes | None = None,
        *,
        num_heads: int | None = None,
        is_causal: bool = False,
    ) -> Axes:
        """Draw which keys (columns) each query (rows) of `head` sees; darker where the key counts more often.

        Args:
            num_heads: the number of KV heads, and for a product also of query heads. Default: just enough for `head` to
                exist; for a `Dilated` with a table of offsets, as many as the table has, and with `head_groups`, at
                least one per branch; for a sum, the most of its terms; for a product, the default of its `Dilated`.
            is_causal: hide the keys after each query, even if a layout is not causal.
        """
        checks.boolean("is_causal", is_causal)
        heads = self._least_heads(checks.integer("head", head, 0))
        if num_heads is not None:
            heads = checks.positive("num_heads", num_heads)
        if head >= heads:
            raise ValueError(f"head must lie in [0, {heads}); got {head}")
        return self._plot_head(checks.positive("seq_len", seq_len), head, ax, heads, is_causal)

    def _least_heads(self, head: int) -> int:
        return head + 1

    def _plot_head(self, seq_len: int, head: int, ax: Axes | None, num_heads: int, is_causal: bool) -> Axes:
        raise NotImplementedError


class _Branched(_Drawn):
    """Base class of patterns that can be written as a list of `branches`: `Dilated`, `Window`, and sums of them."""

    def branches(self, num_heads: int, head_offset: int | None = None) -> Branches:
        """Return the pattern as branches, for num_heads KV heads; arguments as in `Dilated.offset_table`.

        A window is one branch, over the whole sequence, with a band; see `plan.Branches`.
        """
        raise NotImplementedError

    def coverage(self, seq_len: int, num_heads: int, is_causal: bool = False) -> Tensor:
        """Return the number of keys that each token sees, per head: int64, `(num_heads, seq_len)`.

        Keys are counted with multiplicity. Warns if some tokens of some heads see no key at all, and says how many:
        the output of such a token is 0.

        Args:
            is_causal: count only the keys that do not come after the token.
        """
        checks.boolean("is_causal", is_causal)
        keys = self._counts(checks.positive("seq_len", seq_len), num_heads, is_causal)
        warn_of_blind(keys, self._covering())
        return keys

    def _counts(self, seq_len: int, num_heads: int, is_causal: bool) -> Tensor:
        branches = self.branches(num_heads)
        keys = torch.zeros(num_heads, seq_len, dtype=torch.int64, device="cpu")
        for group in plan_of(branches, (0, seq_len), None, is_causal).groups:
            rows = group.queries
            count = group.keys.count
            row = torch.arange(rows.count, device="cpu")
            start: Tensor | int = 0
            if group.low is not None:
                start = (row + group.low).clamp(0, count)
            stop: Tensor | int = count
            if group.high is not None:
                stop = (row + group.high + 1).clamp(0, count)
            segment = rows.segment if rows.segments > 1 else 0  # a single one may be WHOLE, too large for a stride
            keys.as_strided(
                (group.heads, rows.segments, rows.count),
                (group.head_stride * seq_len, segment, rows.stride),
                group.head * seq_len + rows.start,
            ).add_(stop - start)
        return keys

    def _covering(self) -> str:
        """Return advice on how to let every token of every head see a key."""
        return "A window covers every token"

    def flops(self, seq_len: int, num_heads: int, head_dim: int, is_causal: bool = False) -> int:
        """Return the floating-point operations of a forward: 4 head_dim per score entry.

        num_heads: the number of KV heads, each counted with one query head.
        """
        head_dim = checks.positive("head_dim", head_dim)
        seq_len = checks.positive("seq_len", seq_len)
        checks.boolean("is_causal", is_causal)
        plan = plan_of(self.branches(num_heads), (0, seq_len), None, is_causal)
        return 4 * head_dim * plan.sizes.entries

    def _plot_head(self, seq_len: int, head: int, ax: Axes | None, num_heads: int, is_causal: bool) -> Axes:
        groups = plan_of(self.branches(num_heads), (0, seq_len), None, is_causal).groups
        own = [x for x in groups if head - x.head in range(0, x.heads * x.head_stride, x.head_stride)]
        return plot_bands(own, seq_len, f"head {head}", ax)


@dataclass(frozen=True)
class Window(_Branched):
    """Show a sliding window: token p sees the keys p + i * rate for -before <= i <= after; a causal call has after = 0.

    A transformers model with `sliding_window = w` is `Window(w - 1)` with a causal call; one with windows on both sides
    is `Window(w, w)`.

    Args:
        before, after: the number of keys on each side, `rate` tokens apart; after=None: the same as before.
        rate: the distance between neighbouring keys of the window.
        leading: the number of first tokens that are global: all tokens see them, and they see all tokens (in a
            causal call, all before them). A key that is both leading and in the window counts once.

    Examples:
        >>> from dilated_attention import Window
        >>> Window(2).coverage(6, num_heads=1)  # the number of keys that each token sees
        tensor([[3, 4, 5, 5, 4, 3]])
        >>> Window(2).coverage(6, num_heads=1, is_causal=True)
        tensor([[1, 2, 3, 3, 3, 3]])
    """

    before: int
    after: int | None = None
    rate: int = field(default=1, kw_only=True)
    leading: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        after = self.before if self.after is None else self.after
        for name, value, least, bits in (
            ("before", self.before, 0, 63), ("after", after, 0, 63), ("rate", self.rate, 1, 31),
            ("leading", self.leading, 0, 63),
        ):  # fmt: skip
            (value,) = _below(bits, name, checks.integer(name, value, least))
            object.__setattr__(self, name, value)

    def branches(self, num_heads: int, head_offset: int | None = None) -> Branches:
        num_heads = checks.positive("num_heads", num_heads)
        offset = ALL if self.rate > 1 else 0
        band = (-self.before, self.after)
        return Branches((WHOLE,), (self.rate,), ((offset,) * num_heads,), None, (band,), (self.leading,))

    def __mul__(self, layout: Any) -> Any:
        raise UnsupportedError(
            f"Window(...) * {type(layout).__name__}: a window shows keys by distance and a layout by block; give their "
            "sum, Window(...) + layout, or a layout alone, BlockLayout.local"
        )


@dataclass(frozen=True)
class Dilated(_Branched):
    """Show dilated segments: a union of branches (w, r), with one softmax over all their keys, counted with
    multiplicity.

    In branch (w, r) token p lies in segment p // w, and takes part for head h iff (p mod w) mod r == o(h). A
    participating query sees the participating keys of its segment. With c(i, j) the number of branches that show key j
    to query i,

        P(i, j) = c(i, j) exp(s(i, j)) / sum_j' c(i, j') exp(s(i, j')),

    which is what LongNet's mixing by softmax denominators computes (arXiv:2307.02486, equations 10 and 11).

    Args:
        segment_lengths: w of each branch, in tokens. A segment longer than the sequence covers the whole sequence; the
            last segment may be short.
        dilation_rates: r of each branch.
        offsets: `"head"`: o(h) = h mod r (the paper); `"head_block"`: o(h) = h // ceil(num_heads / r) (released
            torchscale, GigaPath and LongViT checkpoints); or a table, branches x heads, of integers in [0, r), or -1
            for a head that takes no part in the branch.
        head_groups: cut the heads into one contiguous run per branch (the first num_heads mod branches runs are one
            head larger); run i uses branch i alone, at offset i mod r_i. Rows that take no part return out 0, lse -inf.
        compat: `"torchscale"`: the forward of released torchscale, GigaPath and LongViT checkpoints. Offsets `"head"`
            then mean `"head_block"`, and unless causal, a query also sees the zero keys that pad its segment to a
            multiple of the rate. The gradient is the true gradient of that forward.

    Attributes:
        reasons: why `suggest_pattern` chose this pattern; `print` shows them. Not part of the value.

    Examples:
        >>> from dilated_attention import Dilated
        >>> pattern = Dilated(segment_lengths=[2, 8], dilation_rates=[1, 4])
        >>> pattern.coverage(8, num_heads=2)  # head 0 takes tokens 0 and 4 of the second branch, head 1 tokens 1 and 5
        tensor([[4, 2, 2, 2, 4, 2, 2, 2],
                [2, 4, 2, 2, 2, 4, 2, 2]])
    """

    reasons: ClassVar[tuple[str, ...]] = ()

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    offsets: Offsets = "head"
    head_groups: bool = False
    compat: str | None = None

    def __post_init__(self) -> None:
        segments = _of_branches(63, "segment_lengths", self.segment_lengths)
        rates = _of_branches(31, "dilation_rates", self.dilation_rates)
        if not segments:
            raise ValueError("segment_lengths is empty; give at least one branch, such as segment_lengths=[2048]")
        if len(segments) != len(rates):
            raise ValueError(
                f"segment_lengths and dilation_rates must have one entry per branch each; "
                f"got {len(segments)} and {len(rates)}: {list(segments)} and {list(rates)}"
            )
        offsets = _checked_offsets(self.offsets, rates)
        checks.boolean("head_groups", self.head_groups)
        if self.head_groups and offsets != "head":
            raise ValueError(
                f"head_groups=True sets the offsets itself (i mod r_i for run i); got offsets={offsets!r}. "
                'Leave offsets="head", or give the table without head_groups'
            )
        if self.compat not in (None, "torchscale"):
            raise ValueError(f'compat must be None or "torchscale"; got {self.compat!r}')
        if self.compat is not None and self.head_groups:
            raise ValueError('compat="torchscale" has offsets by head block and no head groups; got head_groups=True')
        object.__setattr__(self, "segment_lengths", segments)
        object.__setattr__(self, "dilation_rates", rates)
        object.__setattr__(self, "offsets", offsets)

    def __str__(self) -> str:
        return "\n".join((repr(self), *self.reasons))

    def offset_table(self, num_heads: int, head_offset: int | None = None) -> OffsetTable:
        """Return the offset of every head in every branch; -1 where the head takes no part in the branch.

        Args:
            num_heads: the number of heads in the table that is returned.
            head_offset: if these are only a part of a module's heads, the index of the first of them in the module (0
                on the first rank); a table given as `offsets` then covers the whole module. Default: all its heads.

        Raises:
            ValueError: the pattern does not fit the heads, or a branch could never show any token; or head_offset is
                given (even 0) with head_groups or offsets "head_block", which need the module's number of heads.
        """
        num_heads = checks.positive("num_heads", num_heads)
        given = head_offset is not None
        first = 0
        if given:
            first = checks.integer("head_offset", head_offset, 0)
        stop = first + num_heads
        offsets = _offsets(self)
        if given and (self.head_groups or offsets == "head_block"):
            raise ValueError(
                f"head_offset={head_offset} needs offsets that do not depend on the total number of heads; "
                "give offsets as a table over all heads: Dilated(...).offset_table(total)"
            )
        rates = self.dilation_rates
        table: list[tuple[int, ...]] = []  # from head 0 on
        if self.head_groups:
            if num_heads < len(rates):
                raise ValueError(
                    f"head_groups=True gives each branch a run of heads; "
                    f"{num_heads} heads cannot serve {len(rates)} branches"
                )
            base = num_heads // len(rates)
            larger = num_heads % len(rates)  # dynamo traces no divmod of symbols
            start = 0
            for i, rate in enumerate(rates):
                end = start + base + (i < larger)
                table.append(tuple([i % rate if start <= h < end else -1 for h in range(num_heads)]))
                start = end
        elif offsets == "head":
            for rate in rates:
                table.append(tuple([h % rate for h in range(stop)]))
        elif offsets == "head_block":
            for rate in rates:
                block = -(-num_heads // rate)
                table.append(tuple([h // block for h in range(num_heads)]))
        else:
            for row in offsets:
                if len(row) < stop or (not given and len(row) != num_heads):
                    raise ValueError(
                        f"offsets must have one entry per key-value head in each branch; got {len(row)} entries "
                        f"for heads {first} to {stop}"
                        + ("; of a larger module give head_offset" if len(row) > stop else "")
                    )
                table.append(tuple(row))

        shown = []
        for row, segment, rate in zip(table, self.segment_lengths, rates, strict=True):
            if not any(0 <= offset < segment for offset in row):
                raise ValueError(
                    f"no token could take part in branch (segment {segment}, rate {rate}): every head's offset is "
                    f"-1 or beyond the segment; got offsets {row}. Lower the dilation rate or lengthen the segment"
                    f", or give an offset from 0 to {min(segment, rate) - 1}"
                )
            shown.append(row[first:stop])
        return tuple(shown)

    def branches(self, num_heads: int, head_offset: int | None = None) -> Branches:
        """Return the pattern as branches, for num_heads KV heads; arguments and errors as in `offset_table`."""
        make = _branches if torch.compiler.is_compiling() else _kept_branches  # a cache cannot be traced
        return make(self, num_heads, head_offset)

    def __mul__(self, layout: BlockLayout | LayoutOfLength) -> Product:
        """Apply block sparsity inside the dilated subsequences; see `Product`."""
        return Product(self, layout)

    def _covering(self) -> str:
        if self.head_groups:  # each head has one branch
            return "With head_groups=True, dilation rate 1 in every branch covers every token"
        return "A branch of dilation rate 1 covers every token"

    def unserved(self, num_heads: int) -> tuple[int, ...]:
        """Return, for each branch, how many residues modulo its rate no head serves. Their tokens take no part."""
        return tuple([count for count, _, _ in _unserved(self.branches(num_heads))])

    def _least_heads(self, head: int) -> int:
        if not isinstance(self.offsets, str):
            return len(self.offsets[0])
        if self.head_groups:
            return max(head + 1, len(self.segment_lengths))
        return head + 1


def _checked_offsets(given: Any, rates: tuple[int, ...]) -> Any:
    """Return the offsets of a `Dilated`, a table as tuples; ValueError unless it has a row of fitting integers for each
    rate."""
    offsets = given
    if hasattr(given, "tolist"):
        offsets = given.tolist()
    if offsets in ("head", "head_block"):
        return offsets
    is_table = isinstance(offsets, Sequence) and not isinstance(offsets, str)
    if not is_table or not all(hasattr(row, "__len__") for row in offsets):
        raise ValueError(f'offsets must be "head", "head_block" or a table, branches x heads; got {given!r}')
    table = tuple([checks.integers("offsets", row) for row in offsets])
    if len(table) != len(rates):
        raise ValueError(f"offsets has {len(table)} rows; it needs one per branch, {len(rates)}")
    for row, rate in zip(table, rates, strict=True):
        for offset in row:
            if not -1 <= offset < rate:
                raise ValueError(
                    f"offsets must be integers in [0, {rate}) for dilation rate {rate}, or -1; got {offset!r}"
                )
    return table


def _branches(pattern: Dilated, num_heads: int, head_offset: int | None) -> Branches:
    table = pattern.offset_table(num_heads, head_offset)
    return Branches(pattern.segment_lengths, pattern.dilation_rates, table, pattern.compat)


_kept_branches = lru_cache(maxsize=1024, typed=True)(_branches)  # typed: True is no number of heads, though it equals 1


def _unserved(branches: Branches) -> list[tuple[int, int, int]]:
    """For each branch, return (number of residues that no head serves, segment length, rate). A segment shorter than
    the rate has only as many residues as tokens."""
    found = []
    for segment, rate, row in zip(*branches[:3], strict=True):
        found.append((min(segment, rate) - len(_served(row, segment)), segment, rate))
    return found


def _served(offsets: tuple[int, ...], segment: int) -> set[int]:
    """Return the offsets at which some head takes part in a segment of this length."""
    return {offset for offset in offsets if 0 <= offset < segment}


def describe_unserved(branches: Branches) -> tuple[str, ...]:
    """Return one line for each branch in which some tokens take part for no head."""
    return tuple(
        f"residues that no head serves: {count} of {min(segment, rate)} in branch ({segment}, {rate})"
        for count, segment, rate in _unserved(branches)
        if count
    )


_told: set[tuple[_Branched, int]] = set()
"""The patterns, with their number of KV heads, of which `warn_of_unserved` has warned."""


def warn_of_unserved(pattern: _Branched, branches: Branches, seq_len: int) -> None:
    """Warn once per pattern and number of KV heads if some tokens take part in no branch for any head."""
    heads = len(branches.offsets[0])
    nobody = _unserved_tokens(branches, seq_len)
    if not nobody or (pattern, heads) in _told:
        return
    _told.add((pattern, heads))
    warnings.warn(
        f"{nobody} of {seq_len} tokens take part in no branch for any of {heads} KV heads; their output is 0 "
        f"({'; '.join(describe_unserved(branches))}). {pattern._covering()}",
        stacklevel=checks.outside(),
    )


@lru_cache(maxsize=1024)
def _unserved_tokens(branches: Branches, seq_len: int) -> int:
    """Return how many of the first seq_len tokens take part in no branch for any head."""
    has_window = not {EVERY}.issuperset(branches.bands)
    if has_window or not seq_len:
        return 0
    for segment, rate, offsets in zip(*branches[:3], strict=True):
        if len(_served(offsets, segment)) == min(segment, rate):  # every token takes part in this branch
            return 0
    served = 0  # a byte per token, 1 if it takes part
    for segment, rate, offsets in zip(*branches[:3], strict=True):
        tokens = bytearray(min(segment, seq_len))
        for offset in set(offsets) - {-1}:
            tokens[offset::rate] = b"\1" * len(tokens[offset::rate])
        segments = -(-seq_len // len(tokens))
        served |= int.from_bytes((tokens * segments)[:seq_len], "little")
    return seq_len - served.bit_count()


@dataclass(frozen=True)
class Sum(_Branched):
    """Add patterns, `a + b`: one softmax over the keys that each of them shows, counts added.

    A key that two terms show counts twice, as in `Dilated` a key that two branches show.

    Args:
        terms: at least two patterns: `Dilated`, `Window`, `Neighborhood`, `BlockLayout` or products. The terms of a sum
            among them take its place.

    Examples:
        >>> from dilated_attention import Dilated, Window
        >>> pattern = Window(1) + Dilated([8], [4])
        >>> pattern.coverage(8, num_heads=1)  # tokens 0 and 4 see two more keys than the window shows
        tensor([[4, 3, 3, 3, 5, 3, 3, 2]])
    """

    terms: tuple[Any, ...]

    def __post_init__(self) -> None:
        given: Any = self.terms
        if not isinstance(given, Iterable):
            given = (given,)
        terms: list[Any] = []
        for term in given:
            if isinstance(term, Sum):
                terms += term.terms
            else:
                terms.append(term)

        for term in terms:
            if not isinstance(term, (Term, BlockLayout)):
                raise ValueError(
                    "a term of a sum must be a Dilated, Window, Neighborhood, BlockLayout or product; "
                    f"got {type(term).__name__}"
                )
            if isinstance(term, Dilated) and term.compat is not None:
                raise UnsupportedError(
                    f"compat={term.compat!r} in a sum: the zero keys of released checkpoints belong to one pattern; "
                    f"use {without_padding(term)!r}"
                )
        if len(terms) < 2:
            raise ValueError(f"terms must hold at least two patterns; got {terms}: give the pattern alone")
        object.__setattr__(self, "terms", tuple(terms))

    def branches(self, num_heads: int, head_offset: int | None = None) -> Branches:
        """Return the branches of all terms, for num_heads KV heads; arguments as in `Dilated.offset_table`.

        Raises:
            UnsupportedError: there are several `parts`, because a term with a layout needs a separate call.
        """
        if len(self.parts) > 1:
            raise UnsupportedError(f"pattern={self!r}: its layouts are calls of their own; give each of pattern.parts")
        joined = Branches((), (), (), None, (), ())
        for term in self.terms:
            part = term.branches(num_heads, head_offset)
            number = len(part.offsets)
            joined = Branches(
                joined.segment_lengths + part.segment_lengths,
                joined.dilation_rates + part.dilation_rates,
                joined.offsets + part.offsets,
                None,
                joined.bands + (part.bands or (EVERY,) * number),
                joined.leading + (part.leading or (0,) * number),
            )
        return joined

    @property
    def parts(self) -> tuple[Any, ...]:
        """Return the terms of the sum. All terms without a layout are joined into one."""
        plain = tuple([term for term in self.terms if isinstance(term, _Branched)])
        listed = tuple([term for term in self.terms if not isinstance(term, _Branched)])
        if len(plain) > 1:
            plain = (Sum(plain),)
        return plain + listed

    def _covering(self) -> str:
        return "A term with a window, or with a branch of dilation rate 1, covers every token"

    def _least_heads(self, head: int) -> int:
        return max([head + 1, *(term._least_heads(head) for term in self.terms if isinstance(term, _Branched))])

    def _counts(self, seq_len: int, num_heads: int, is_causal: bool) -> Tensor:
        if len(self.parts) == 1:
            return super()._counts(seq_len, num_heads, is_causal)
        return reduce(torch.add, [_counts_of(part, seq_len, num_heads, is_causal) for part in self.parts])

    def flops(self, seq_len: int, num_heads: int, head_dim: int, is_causal: bool = False) -> int:
        """Return the floating-point operations of a forward: 4 head_dim per score entry.

        num_heads: the number of KV heads, each counted with one query head.
        """
        if len(self.parts) == 1:
            return super().flops(seq_len, num_heads, head_dim, is_causal)
        return sum([part.flops(seq_len, num_heads, head_dim, is_causal) for part in self.parts])


def parts_of_sum(pattern: Any) -> tuple[Any, ...]:
    """Return `Sum.parts` of a sum, and otherwise the pattern alone."""
    return pattern.parts if isinstance(pattern, Sum) else (pattern,)


def _counts_of(part: Term | BlockLayout, seq_len: int, num_heads: int, is_causal: bool) -> Tensor:
    """Return how many keys each token of each head sees, int64 `(heads, seq)`."""
    if isinstance(part, BlockLayout):
        if is_causal:
            part = part.causal()
        return part.seen_by(seq_len, num_heads)
    return part._counts(seq_len, num_heads, is_causal)


def dilated(
    segment_lengths: Sequence[int], dilation_rates: Sequence[int], offsets: Offsets, head_groups: bool, compat: Any
) -> Dilated:
    """Return `Dilated` of these arguments. Lists of integers that it has checked before are not checked again."""
    rows = (segment_lengths, dilation_rates)
    others = (offsets, head_groups, compat)
    if (
        not torch.compiler.is_compiling()  # a cache cannot be traced
        and {list, tuple}.issuperset(map(type, rows))
        and {int}.issuperset(map(type, (*segment_lengths, *dilation_rates)))  # True == 1 == 1.0, and 1 alone is valid
        and {str, bool, type(None)}.issuperset(map(type, others))
    ):
        return _dilated(tuple(segment_lengths), tuple(dilation_rates), *others)
    return Dilated(*rows, *others)  # type: ignore[arg-type]


_dilated = lru_cache(maxsize=256)(Dilated)


def without_padding(pattern: Dilated) -> Dilated:
    """Return the exact pattern that replaces one with compat: the same offsets, and no padding is attended."""
    return replace(pattern, compat=None, offsets=_offsets(pattern))


def _offsets(pattern: Dilated) -> Offsets:
    if pattern.compat == "torchscale" and pattern.offsets == "head":
        return "head_block"
    return pattern.offsets


def layout_for(layout: BlockLayout | LayoutOfLength, length: int) -> BlockLayout:
    """Return `layout` itself if it is a `BlockLayout`; otherwise call it for its layout of `length` tokens.
    `plan_cache` keeps what a callable returned as long as it lives, if it allows weak references."""
    if isinstance(layout, BlockLayout):
        return layout
    # torch.compile cannot trace the cache's lock: it traces the builder.
    if torch.compiler.is_compiling() or not type(layout).__weakrefoffset__:
        return _called(layout, length)
    return plan_cache.of(_kept, Named(layout), length).layout


def _called(layout: LayoutOfLength, length: int) -> BlockLayout:
    made = layout(length)
    if not isinstance(made, BlockLayout):
        raise ValueError(f"layout({length}) must give a BlockLayout; got {type(made).__name__}")
    return made


def _kept(layout: Named, length: int) -> Kept:
    return Kept(_called(layout.thing, length))


def layout_inside(layout: BlockLayout | LayoutOfLength, length: int, placed: bool = False) -> BlockLayout:
    """Return the layout inside a segment in which `length` tokens take part; ValueError if it has another length. At
    positions (`placed`) a layout that is given as a value may be longer."""
    may_be_longer = placed and isinstance(layout, BlockLayout)
    layout = layout_for(layout, length)
    if layout.seq_len < length or (layout.seq_len > length and not may_be_longer):
        raise ValueError(
            f"layout is for {layout.seq_len} tokens, but a segment has {length} that take part; give a callable, "
            "length -> BlockLayout, or segments that are all of one length"
        )
    if layout.batch_size > 1:
        raise ValueError(f"layout has lists for a batch of {layout.batch_size}; inside segments they must be shared")
    return layout


def pattern_for(layout: LayoutOfLength, length: int, is_ragged: bool = False) -> BlockLayout | Product:
    """Return the layout that a layout function returns for `length` tokens. Instead, return its product with one
    segment of all tokens if samples differ in length, since the product calls the function later, or if `length` is a
    symbol, since a call then refuses the product."""
    if is_ragged or is_symbol(length):
        return Dilated((WHOLE,), (1,)) * layout
    return layout_for(layout, length)


@dataclass(frozen=True)
class Product(_Drawn):
    """Apply block sparsity inside dilated subsequences: a query sees the keys that its branch and the layout both show.

    Within each segment, the tokens that take part are numbered from 0, and the layout cuts this sequence into blocks.

    Args:
        layout: a `BlockLayout`, if the same number of tokens, its length, takes part in every segment of every
            branch; or a callable that returns the layout for n tokens. It must always return the same layout for the
            same n, since layouts are cached. A layout may have lists per query head, but not per batch element.
            With `q_start` or `k_start`, n counts the tokens of a segment up to the last one of q and k (causal: of q),
            and a `BlockLayout` may have more: the lists of its first n tokens serve.

    Examples:
        >>> from dilated_attention import BlockLayout, Dilated
        >>> def layout(n):  # for n tokens: each sees itself and its two neighbours
        ...     return BlockLayout.local(n, window=2, block_size=1)
        >>> (Dilated([4, 8], [1, 2]) * layout).coverage(8, num_heads=1)
        tensor([[4, 3, 6, 2, 5, 3, 5, 2]])
    """

    dilated: Dilated
    layout: BlockLayout | LayoutOfLength

    def __post_init__(self) -> None:
        if not isinstance(self.layout, BlockLayout) and not callable(self.layout):
            kind = type(self.layout).__name__
            raise ValueError(f"layout must be a BlockLayout or a callable, length -> BlockLayout; got {kind}")
        if self.dilated.compat is not None:
            raise ValueError(
                f"compat={self.dilated.compat!r} attends the padding of whole segments, of which a layout shows parts; "
                f"use {without_padding(self.dilated)!r}, which has the same offsets"
            )

    def layout_of(self, length: int) -> BlockLayout:
        """Return the layout inside a segment in which `length` tokens take part."""
        return layout_inside(self.layout, length)

    def coverage(self, seq_len: int, num_heads: int, num_kv_heads: int | None = None) -> Tensor:
        """Return the number of keys that each token sees, per query head: int64, `(num_heads, seq_len)`.

        Keys are counted with multiplicity. Warns if some tokens of some heads see no key at all, and says how many:
        the output of such a token is 0. Keys after a token count too, unless the layout is causal.

        Args:
            num_kv_heads: heads of k and v, which determine the offsets; default: num_heads.
        """
        keys = self._counts(seq_len, num_heads, False, num_kv_heads)
        warn_of_blind(keys, f"{self.dilated._covering()}, if the layout has no empty rows")
        return keys

    def flops(
        self, seq_len: int, num_heads: int, head_dim: int, is_causal: bool = False, num_kv_heads: int | None = None
    ) -> int:
        """Return the floating-point operations of a forward: 4 head_dim per score entry.

        Args:
            is_causal: leave out the keys after each query, even if the layout is not causal.
            num_kv_heads: heads of k and v, which determine the offsets; default: num_heads.
        """
        head_dim = checks.positive("head_dim", head_dim)
        checks.boolean("is_causal", is_causal)
        return 4 * head_dim * int(self._counts(seq_len, num_heads, is_causal, num_kv_heads).sum())

    def _least_heads(self, head: int) -> int:
        return self.dilated._least_heads(head)

    def _plot_head(self, seq_len: int, head: int, ax: Axes | None, num_heads: int, is_causal: bool) -> Axes:
        return plot_product(self, seq_len, head, num_heads, is_causal, ax)

    def _counts(self, seq_len: int, num_heads: int, is_causal: bool, num_kv_heads: int | None = None) -> Tensor:
        seq_len = checks.positive("seq_len", seq_len)
        num_heads, kv_heads = checks.kv_heads(num_heads, num_kv_heads)
        ratio = num_heads // kv_heads
        keys = torch.zeros(num_heads, seq_len, dtype=torch.int64, device="cpu")
        for group in plan_of(self.dilated.branches(kv_heads), (0, seq_len)).groups:
            rows = group.queries
            layout = self.layout_of(rows.count)
            layout.check(1, rows.count, num_heads, kv_heads)
            layout = layout.for_heads(num_heads)
            if is_causal:
                layout = layout.causal()
            seen = layout.seen[0].cpu().expand(num_heads, -1)
            for member in range(ratio):
                first = group.head * ratio + member
                step = group.head_stride * ratio
                keys.as_strided(
                    (group.heads, rows.segments, rows.count),
                    (step * seq_len, rows.segment, rows.stride),
                    first * seq_len + rows.start,
                ).add_(seen[first : first + group.heads * step : step][:, None])
        return keys
