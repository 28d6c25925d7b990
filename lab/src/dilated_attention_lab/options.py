"""Add options to the parsers of commands, and parse the kinds of values that several of them take."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any


def option(
    parser: Any, name: str, kind: Callable[[str], Any], text: str, default: Any = None, shown: Any = None, **more: Any
) -> None:
    """Add an option that takes a value. Its help names the default.

    Args:
        shown: what to name instead of `default`. more: further arguments of `add_argument`.
    """
    shown = default if shown is None else shown
    if shown not in (None, "", argparse.SUPPRESS):
        text += f" (default: {','.join(map(str, shown)) if isinstance(shown, tuple) else shown})"
    metavar = {int: "N", positive: "N", natural: "N", seed: "N", float: "X", budget: "X", integers: "N,N,..."}
    more = {"metavar": metavar.get(kind, name.upper())} | more
    parser.add_argument(f"--{name}", type=kind, default=default, help=text, **more)


def flag(parser: Any, name: str, text: str) -> None:
    parser.add_argument(f"--{name}", action="store_true", help=text)


def integer(name: str, least: float, below: float = math.inf) -> Callable[[str], int]:
    """Return a function that parses an integer in [least, below)."""

    def parse(text: str) -> int:
        value = int(text)
        if not least <= value < below:
            raise ValueError
        return value

    parse.__name__ = name  # argparse puts it in its error: "invalid positive integer value: '0'"
    return parse


positive = integer("positive integer", 1)
natural = integer("non-negative integer", 0)
seed = integer("non-negative integer below 2**64", 0, 1 << 64)  # PyTorch's generators accept these


def budget(text: str) -> float:
    return int(text) if text.isdecimal() else float(text)


def integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


integers.__name__ = "list of integers"
budget.__name__ = "number"
