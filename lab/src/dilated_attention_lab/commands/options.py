"""Kinds of values that several commands take, and how an option shows its default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def plain(parser: Any, name: str, kind: Callable[[str], Any], default: Any, text: str) -> None:
    help_text = f"{text} (default: {default})"
    parser.add_argument(f"--{name}", type=kind, default=default, help=help_text, metavar=name.upper())


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value


def seed(text: str) -> int:
    """Parse a seed that PyTorch's generators accept."""
    value = int(text)
    if not 0 <= value < 1 << 64:
        raise ValueError
    return value


def budget(text: str) -> float:
    return int(text) if text.isdecimal() else float(text)


def integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


# argparse puts the name of the type in its error: "invalid positive integer value: '0'"
positive.__name__ = "positive integer"
natural.__name__ = "non-negative integer"
seed.__name__ = "non-negative integer below 2**64"
integers.__name__ = "list of integers"
budget.__name__ = "number"
