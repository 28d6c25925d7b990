"""`plot PATTERN`: make a pattern from the options of the command line, and draw it."""

from __future__ import annotations

import argparse
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dilated_attention import BlockLayout, Dilated, Product
from dilated_attention_lab.options import integer

BUILDERS: dict[str, Callable[..., BlockLayout]] = {
    "local": BlockLayout.local,
    "global": BlockLayout.global_,
    "strided": BlockLayout.strided,
    "dilated-blocks": BlockLayout.dilated,
    "hierarchical": BlockLayout.hierarchical,
    "random": BlockLayout.random,
    "longformer": BlockLayout.longformer,
    "bigbird": BlockLayout.bigbird,
}
NAMES = ("dilated", *BUILDERS)
_integer = integer("integer of 64 bits", -(1 << 63), 1 << 63)  # which a tensor can hold
MOST_TOKENS, MOST_HEADS = 1 << 20, 1 << 10  # what a picture can show is drawn in seconds
# What the builders' own arguments are called on the command line.
OPTIONS = {name: name for name in ("window", "stride", "reach", "levels", "density", "random_blocks", "seed")}
OPTIONS |= {"tokens": "global_tokens", "global_tokens": "global_tokens", "rates": "block_rates"}
EITHER = {"local": "--window or --density", "global": "--global-tokens or --density"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of patterns. The namespace holds only those that are given."""
    group = parser.add_argument_group("patterns", argument_default=argparse.SUPPRESS)
    group.add_argument("--tokens", type=int, metavar="N", help="length of the sequence (1024)")
    group.add_argument("--segments", type=_integers, metavar="N,N", help="segment lengths; with a layout, a product")
    group.add_argument("--rates", type=_integers, metavar="N,N", help="dilation rate of each segment length")
    group.add_argument("--offsets", choices=["head", "head_block"], help="offsets of the heads")
    group.add_argument("--head-groups", action="store_true", help="give each branch a run of heads of its own")
    group.add_argument("--heads", type=int, metavar="N", help="heads of the model")
    group.add_argument("--head", type=int, metavar="N", help="head to draw (0)")
    group.add_argument("--causal", action="store_true", help="use a causal mask")
    group.add_argument(
        "--block-size", type=_integers, metavar="N", help="block size of layouts (64); N,N: queries, keys"
    )
    for name, kind, text in (
        ("window", _integer, "local, longformer, bigbird: tokens on either side"),
        ("global-tokens", _integer, "global, longformer, bigbird: leading tokens that all tokens see"),
        ("stride", _integer, "strided: stride in tokens"),
        ("block-rates", _integers, "dilated-blocks: rates, in blocks"),
        ("reach", _integer, "dilated-blocks: steps of each rate"),
        ("levels", _levels, "hierarchical: STRIDE:WINDOW,STRIDE:WINDOW in tokens, fine to coarse"),
        ("density", float, "local, global, dilated-blocks, random: share of the blocks"),
        ("random-blocks", _integer, "bigbird: random blocks per row"),
        ("seed", _integer, "random, bigbird: seed (0)"),
    ):
        group.add_argument(f"--{name}", type=kind, metavar="X" if kind is float else "N", help=text)


def pattern_of(name: str, options: dict[str, Any]) -> Dilated | BlockLayout | Product:
    """Return the pattern that a name and options describe. Raises ValueError if one is missing or does not apply."""
    dilated = _dilated(options)
    if name == "dilated":
        if dilated is None:
            raise ValueError("'dilated' needs --segments and --rates")
        _refuse(name, options, {"causal"})
        return dilated
    builder = BUILDERS[name]
    parameters = {key: p for key, p in inspect.signature(builder).parameters.items() if key in OPTIONS}
    _refuse(name, options, {OPTIONS[key] for key in parameters} | {"block_size", "causal"})
    given = {"seed": 0, **options}
    values = {key: given[OPTIONS[key]] for key in parameters if OPTIONS[key] in given}
    missing = [f"--{OPTIONS[key]}" for key, p in parameters.items() if p.default is p.empty and key not in values]
    if name in EITHER and not values:
        raise ValueError(f"{name!r} needs {EITHER[name]}")
    if missing:
        raise ValueError(f"{name!r} needs {', '.join(missing)}".replace("_", "-"))
    block = options.get("block_size", (64,))
    block_size = block[0] if len(block) == 1 else block

    def layout(length: int) -> BlockLayout:
        return builder(length, block_size=block_size, is_causal=options.get("causal", False), **values)

    return layout(options.get("tokens", 1024)) if dilated is None else dilated * layout


def picture(name: str, options: dict[str, Any], path: Path) -> str:
    """Draw the pattern into a file, and return a line about how many keys a token sees."""
    tokens, head = options.get("tokens", 1024), options.get("head", 0)
    for option, value, most in (("tokens", tokens, MOST_TOKENS), ("heads", options.get("heads", 1), MOST_HEADS)):
        if not 1 <= value <= most:
            raise ValueError(f"--{option} must lie in [1, {most}]; got {value}")
    if not 0 <= head < options.get("heads", MOST_HEADS):
        raise ValueError(f"--head must lie in [0, {options.get('heads', MOST_HEADS)}); got {head}")
    pattern, causal = pattern_of(name, options), options.get("causal", False)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 5.3), layout="constrained")
    axes = figure.add_subplot()
    least = 1 if not isinstance(pattern, Dilated) or not pattern.head_groups else len(pattern.segment_lengths)
    heads = options.get("heads", max(head + 1, least))
    if isinstance(pattern, BlockLayout):
        pattern.plot(axes)
    else:
        pattern.plot(tokens, head, axes, num_heads=heads, is_causal=causal)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # A layout, alone or in a product, is made causal by its builder.
        given = {"is_causal": causal} if isinstance(pattern, Dilated) else {}
        keys = pattern.coverage(tokens, heads, **given)[head]
    figure.suptitle(f"{name}, {tokens:,} tokens", fontsize=10)
    figure.savefig(path, dpi=150, format=path.suffix[1:] or "png")  # else it adds a suffix
    blind = f"; {int((keys == 0).sum()):,} tokens see none" if caught and bool((keys == 0).any()) else ""
    is_full = isinstance(pattern, BlockLayout) and pattern.density == 1
    full = "; every block is active, as in dense attention" if is_full else ""
    mean = keys.double().mean().item()
    seen = f"{int(keys.min()):,} to {int(keys.max()):,} keys, {mean:,.0f} on average"
    return f"a token of head {head} sees {seen}{blind}{full}"


def _dilated(options: dict[str, Any]) -> Dilated | None:
    if ("segments" in options) != ("rates" in options):
        raise ValueError("--segments and --rates go together")
    if "segments" not in options:
        for name in ("offsets", "head_groups"):
            if name in options:
                raise ValueError(f"--{name.replace('_', '-')} is of a dilated pattern: give --segments and --rates")
        return None
    offsets, groups = options.get("offsets", "head"), options.get("head_groups", False)
    return Dilated(options["segments"], options["rates"], offsets, groups)


def _refuse(name: str, options: dict[str, Any], read: set[str]) -> None:
    for option in ({"block_size", "causal", *OPTIONS.values()} - read) & options.keys():
        raise ValueError(f"--{option.replace('_', '-')} is not of {name!r}; it would change nothing")


def _integers(text: str) -> tuple[int, ...]:
    return tuple(_integer(part) for part in text.split(","))


def _levels(text: str) -> list[tuple[int, int | None]]:
    pairs = (part.partition(":") for part in text.split(","))
    return [(_integer(stride), _integer(window) if window else None) for stride, _, window in pairs]


_integers.__name__ = "list of integers"  # argparse names the type in its error
_levels.__name__ = "list of levels"
