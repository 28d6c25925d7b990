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


def _takes(convert: Callable[[Any], Range]) -> Callable[[Rule], Rule]:
    """Let a rule take what `convert` makes of each operand: a range, a number, or a tensor of one number."""

    def decorate(rule: Rule) -> Rule:
        @wraps(rule)
        def of(*operands: Any) -> Range:
            return rule(*map(convert, operands))

        return of

    return decorate


def _number(x: Any) -> Range:
    """Return a range of numbers, with booleans as 0 and 1."""
    return Range.of(x).number()


def _integer(x: Any) -> Range:
    """Return a range of int64 up to 2^31: of these no sum or product overflows, in a range or in the function
    itself."""
    x = Range.of(x)
    if x.low.dtype != torch.int64 or int(x.low.min()) < -(2**31) or int(x.high.max()) > 2**31:
        raise TypeError("sums and products have ranges for int64 up to 2^31")
    return x


def _boolean(x: Any) -> Range:
    x = Range.of(x)
    if not x.is_boolean:
        raise TypeError("bits of integers have no range")
    return x


@_takes(_number)
def _less(a: Range, b: Range) -> Range:
    return Range(a.high < b.low, a.low < b.high)


@_takes(_number)
def _less_or_equal(a: Range, b: Range) -> Range:
    return Range(a.high <= b.low, a.low <= b.high)


@_takes(_number)
def _equal(a: Range, b: Range) -> Range:
    overlap = (a.low <= b.high) & (b.low <= a.high)
    return Range(overlap & (a.low == a.high) & (b.low == b.high), overlap)


def _differ(a: Any, b: Any) -> Range:
    return _not(_equal(a, b))


@_takes(_boolean)
def _not(a: Range) -> Range:
    return Range(~a.high, ~a.low)


@_takes(_boolean)
def _and(a: Range, b: Range) -> Range:
    return Range(a.low & b.low, a.high & b.high)


@_takes(_boolean)
def _or(a: Range, b: Range) -> Range:
    return Range(a.low | b.low, a.high | b.high)


@_takes(_integer)
def _add(a: Range, b: Range) -> Range:
    return Range(a.low + b.low, a.high + b.high)


@_takes(_integer)
def _negative(a: Range) -> Range:
    return Range(-a.high, -a.low)


def _subtract(a: Any, b: Any) -> Range:
    return _add(a, _negative(b))


@_takes(_integer)
def _multiply(a: Range, b: Range) -> Range:
    corners = torch.broadcast_tensors(a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high)
    products = torch.stack(corners)
    return Range(products.amin(0), products.amax(0))


@_takes(_integer)
def _largest(a: Range, b: Range) -> Range:
    return Range(torch.maximum(a.low, b.low), torch.maximum(a.high, b.high))


def _least(a: Any, b: Any) -> Range:
    return _negative(_largest(_negative(a), _negative(b)))


def _magnitude(a: Any) -> Range:
    return _largest(_largest(a, _negative(a)), 0)


@_takes(_integer)
def _quotient(a: Range, b: Range) -> Range:
    divisor = _positive(b)
    return Range(a.low // divisor, a.high // divisor)


@_takes(_integer)
def _remainder(a: Range, b: Range) -> Range:
    divisor = _positive(b)
    wraps_around = a.low // divisor != a.high // divisor
    low = torch.where(wraps_around, 0, a.low % divisor)
    return Range(low, torch.where(wraps_around, divisor - 1, a.high % divisor))


def _positive(b: Range) -> Tensor:
    if not torch.equal(b.low, b.high) or bool((b.low <= 0).any()):
        raise TypeError("a range is divided by a positive number")
    return b.low


@_takes(lambda x: Range.of(x))
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

    __hash__ = None  # type: ignore[assignment]  # its equality is a range


OPERATORS: Mapping[str, Rule] = {
    "lt": _less,
    "le": _less_or_equal,
    "gt": lambda a, b: _less(b, a),
    "ge": lambda a, b: _less_or_equal(b, a),
    "eq": _equal,
    "ne": _differ,
    **dict.fromkeys(("and", "rand"), _and),
    **dict.fromkeys(("or", "ror"), _or),
    "invert": _not,
    **dict.fromkeys(("add", "radd"), _add),
    "sub": _subtract,
    "rsub": lambda a, b: _subtract(b, a),
    **dict.fromkeys(("mul", "rmul"), _multiply),
    "neg": _negative,
    "abs": _magnitude,
    "floordiv": _quotient,
    "mod": _remainder,
}
"""The rule for each operator of a range, which is also the rule for PyTorch's function of this name."""

for _name, _rule in OPERATORS.items():
    setattr(Range, f"__{_name}__", _rule)

RULES: Mapping[str, Callable[..., Any]] = {
    **OPERATORS,
    **dict.fromkeys(("bitwise_and", "logical_and"), _and),
    **dict.fromkeys(("bitwise_or", "logical_or"), _or),
    **dict.fromkeys(("bitwise_not", "logical_not"), _not),
    "maximum": _largest,
    "minimum": _least,
    "floor_divide": _quotient,
    "remainder": _remainder,
    "where": _where,
    "getitem": _read,
    "to": _convert,
    "new_ones": lambda x, *size, **options: x.low.new_ones(*size, **options),
    "new_zeros": lambda x, *size, **options: x.low.new_zeros(*size, **options),
}
"""The rule for each function, under the name that PyTorch gives it."""
