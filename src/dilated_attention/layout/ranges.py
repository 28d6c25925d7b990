"""Evaluate a mask_mod for whole blocks of queries and keys, by interval arithmetic.

The queries of a block are a range of numbers, and so is everything that a function computes from them. Where ranges do
not overlap, a comparison is decided for all pairs of the block, so that no pair of it has to be looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Rule = Callable[..., "Range"]


def bounds(mask_mod: Callable[..., Any], b: Tensor, h: Tensor, query: Range, key: Range) -> Range | None:
    """Return what a mask_mod shows to ranges of queries and keys: `low`, whether every pair is seen; `high`, whether
    some pair may be. None if the function does what `RULES` lacks."""
    try:
        shown = mask_mod(b, h, query, key)
    except Exception:  # of the caller's function, which meets what it was not written for; pair by pair it may succeed
        return None
    if isinstance(shown, Tensor) and shown.ndim == 0:
        shown = Range.of(shown)
    if not isinstance(shown, Range) or not shown.is_boolean:
        return None
    return shown


# ---- rules


def _of_ranges(rule: Rule) -> Rule:
    """Let a rule take numbers, and tensors of one number, for ranges."""

    @wraps(rule)
    def of(*operands: Any) -> Range:
        return rule(*(Range.of(x) for x in operands))

    return of


def _of_numbers(rule: Rule) -> Rule:
    """The same, with booleans as 0 and 1."""

    @wraps(rule)
    def of(*operands: Any) -> Range:
        return rule(*(Range.of(x).number() for x in operands))

    return of


def _of_integers(rule: Rule) -> Rule:
    """The same, for int64 up to 2^31: of these no sum or product overflows, in a range or in the function itself."""

    @wraps(rule)
    def of(*operands: Any) -> Range:
        ranges = [Range.of(x) for x in operands]
        for x in ranges:
            if x.low.dtype != torch.int64 or int(x.low.min()) < -(2**31) or int(x.high.max()) > 2**31:
                raise TypeError("sums and products have ranges for int64 up to 2^31")
        return rule(*ranges)

    return of


def _of_booleans(rule: Rule) -> Rule:
    """The same, for booleans alone."""

    @wraps(rule)
    def of(*operands: Any) -> Range:
        ranges = [Range.of(x) for x in operands]
        if not all(x.is_boolean for x in ranges):
            raise TypeError("bits of integers have no range")
        return rule(*ranges)

    return of


@_of_numbers
def _less(a: Range, b: Range) -> Range:
    return Range(a.high < b.low, a.low < b.high)


@_of_numbers
def _less_or_equal(a: Range, b: Range) -> Range:
    return Range(a.high <= b.low, a.low <= b.high)


def _greater(a: Any, b: Any) -> Range:
    return _less(b, a)


def _greater_or_equal(a: Any, b: Any) -> Range:
    return _less_or_equal(b, a)


@_of_numbers
def _equal(a: Range, b: Range) -> Range:
    overlap = (a.low <= b.high) & (b.low <= a.high)
    return Range(overlap & (a.low == a.high) & (b.low == b.high), overlap)


def _differ(a: Any, b: Any) -> Range:
    return _not(_equal(a, b))


@_of_booleans
def _not(a: Range) -> Range:
    return Range(~a.high, ~a.low)


@_of_booleans
def _and(a: Range, b: Range) -> Range:
    return Range(a.low & b.low, a.high & b.high)


@_of_booleans
def _or(a: Range, b: Range) -> Range:
    return Range(a.low | b.low, a.high | b.high)


@_of_integers
def _add(a: Range, b: Range) -> Range:
    return Range(a.low + b.low, a.high + b.high)


@_of_integers
def _negative(a: Range) -> Range:
    return Range(-a.high, -a.low)


def _subtract(a: Any, b: Any) -> Range:
    return _add(a, _negative(b))


def _subtract_from(a: Any, b: Any) -> Range:
    return _subtract(b, a)


@_of_integers
def _multiply(a: Range, b: Range) -> Range:
    corners = torch.broadcast_tensors(a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high)
    products = torch.stack(corners)
    return Range(products.amin(0), products.amax(0))


@_of_integers
def _largest(a: Range, b: Range) -> Range:
    return Range(torch.maximum(a.low, b.low), torch.maximum(a.high, b.high))


def _least(a: Any, b: Any) -> Range:
    return _negative(_largest(_negative(a), _negative(b)))


def _magnitude(a: Any) -> Range:
    return _largest(_largest(a, _negative(a)), 0)


@_of_integers
def _quotient(a: Range, b: Range) -> Range:
    divisor = _positive(b)
    return Range(a.low // divisor, a.high // divisor)


@_of_integers
def _remainder(a: Range, b: Range) -> Range:
    divisor = _positive(b)
    wraps_around = a.low // divisor != a.high // divisor
    low = torch.where(wraps_around, 0, a.low % divisor)
    return Range(low, torch.where(wraps_around, divisor - 1, a.high % divisor))


def _positive(b: Range) -> Tensor:
    if not torch.equal(b.low, b.high) or bool((b.low <= 0).any()):
        raise TypeError("a range is divided by a positive number")
    return b.low


@_of_ranges
def _where(condition: Range, a: Range, b: Range) -> Range:
    if not (a.is_boolean and b.is_boolean):
        a = a.number()
        b = b.number()
    low = torch.where(condition.high, torch.minimum(a.low, b.low), b.low)
    high = torch.where(condition.high, torch.maximum(a.high, b.high), b.high)
    return Range(torch.where(condition.low, a.low, low), torch.where(condition.low, a.high, high))


def _read(table: Any, index: Any) -> Range:
    """Return the range of a table's entries between the ends of a range; other indices are numbers."""
    indices = index if isinstance(index, tuple) else (index,)
    found = [x for x in indices if isinstance(x, Range)]
    if len(found) != 1:
        raise TypeError("a table is read at one range")
    (at,) = found
    numbers = tuple([None if x is at else int(x) for x in indices])
    read = at.read.setdefault(table, {})
    if numbers not in read:
        row = table[tuple([slice(None) if x is None else x for x in numbers])]
        read[numbers] = _read_row(row, at)
    return read[numbers]


def _read_row(table: Tensor, at: Range) -> Range:
    """Return the range of the entries between the ends of a range, for a table of one dimension."""
    if table.ndim != 1 or table.dtype not in (torch.bool, torch.int32, torch.int64):
        raise TypeError("a table of integers or booleans is read at one range")
    first = int(at.low.min())
    end = int(at.high.max()) + 1
    if first < 0 or end > len(table):
        raise IndexError("a range leaves the table")

    # Row x has the least and the greatest of 2^x entries: two runs of that many cover a range.
    row = torch.frexp((at.high - at.low + 1).double())[1].long() - 1
    rows = int(row.max()) + 1
    least = table[first:end].long().repeat(rows, 1)
    greatest = least.clone()
    for x in range(1, rows):
        apart = 1 << (x - 1)
        torch.minimum(least[x - 1, :-apart], least[x - 1, apart:], out=least[x, :-apart])
        torch.maximum(greatest[x - 1, :-apart], greatest[x - 1, apart:], out=greatest[x, :-apart])
    start = at.low - first
    last_run = at.high - first + 1 - (1 << row)
    low = torch.minimum(least[row, start], least[row, last_run])
    high = torch.maximum(greatest[row, start], greatest[row, last_run])
    return Range(low.to(table.dtype), high.to(table.dtype))


def _convert(x: Range, to: Any) -> Range:
    """Return a range as another dtype, or on a device, which it is on already."""
    if to == torch.bool:
        return _differ(x, 0)
    if to == torch.int64:
        return x.number()
    if isinstance(to, torch.dtype):
        raise TypeError("a range holds integers and booleans")
    return x


def _new_ones(x: Range, *size: Any, **options: Any) -> Tensor:
    return x.low.new_ones(*size, **options)


def _new_zeros(x: Range, *size: Any, **options: Any) -> Tensor:
    return x.low.new_zeros(*size, **options)


class Range:
    """Stand for any number from `low` to `high`, inclusive: integers or booleans, a pair of ends for each block.

    Operators, methods and functions of PyTorch give the range of their result, or a wider one; what `RULES` lacks
    raises.
    """

    def __init__(self, low: Tensor, high: Tensor) -> None:
        self.low = low
        self.high = high

    @classmethod
    def of(cls, x: Any) -> Range:
        if isinstance(x, Range):
            return x
        if isinstance(x, Tensor) and (x.ndim or x.is_floating_point()):
            raise TypeError("a range holds integers and booleans, one of each block")
        number = torch.as_tensor(x)
        return cls(number, number)

    @property
    def device(self) -> torch.device:
        return self.low.device

    @property
    def is_boolean(self) -> bool:
        return self.low.dtype == torch.bool

    @cached_property
    def read(self) -> WeakTensorKeyDictionary:
        """Hold what `_read` found in each table: a layout reads the same table at the same keys for many queries."""
        return WeakTensorKeyDictionary()

    def number(self) -> Range:
        if self.low.is_floating_point():
            return self
        return Range(self.low.long(), self.high.long())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return RULES[func.__name__.strip("_")](*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name not in RULES:
            raise AttributeError(f"a range has no {name}")
        return partial(RULES[name], self)

    def __bool__(self) -> bool:
        raise TypeError("a range is neither true nor false")

    __lt__ = _less
    __le__ = _less_or_equal
    __gt__ = _greater
    __ge__ = _greater_or_equal
    __eq__ = _equal  # type: ignore[assignment]
    __ne__ = _differ  # type: ignore[assignment]
    __and__ = __rand__ = _and
    __or__ = __ror__ = _or
    __invert__ = _not
    __add__ = __radd__ = _add
    __sub__ = _subtract
    __rsub__ = _subtract_from
    __mul__ = __rmul__ = _multiply
    __neg__ = _negative
    __abs__ = _magnitude
    __floordiv__ = _quotient
    __mod__ = _remainder


RULES: Mapping[str, Callable[..., Any]] = {
    "lt": _less,
    "le": _less_or_equal,
    "gt": _greater,
    "ge": _greater_or_equal,
    "eq": _equal,
    "ne": _differ,
    **dict.fromkeys(("and", "rand", "bitwise_and", "logical_and"), _and),
    **dict.fromkeys(("or", "ror", "bitwise_or", "logical_or"), _or),
    **dict.fromkeys(("invert", "bitwise_not", "logical_not"), _not),
    **dict.fromkeys(("add", "radd"), _add),
    "sub": _subtract,
    "rsub": _subtract_from,
    **dict.fromkeys(("mul", "rmul"), _multiply),
    "neg": _negative,
    "abs": _magnitude,
    "maximum": _largest,
    "minimum": _least,
    **dict.fromkeys(("floordiv", "floor_divide"), _quotient),
    **dict.fromkeys(("mod", "remainder"), _remainder),
    "where": _where,
    "getitem": _read,
    "to": _convert,
    "new_ones": _new_ones,
    "new_zeros": _new_zeros,
}
"""The rule for each function, under the name that PyTorch gives it."""
