"""Kinds of values that several commands take, and how an option shows its default."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


def plain(parser: Any, name: str, kind: Callable[[str], Any], default: Any, text: str) -> None:
    help_text = f"{text} (default: {default})"
    parser.add_argument(f"--{name}", type=kind, default=default, help=help_text, metavar=name.upper())


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
