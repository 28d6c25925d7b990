"""Pictures: loss curves and attention patterns, readable in black and white."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from dilated_attention.errors import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINES = ("-", "--", ":", "-.")
PIXELS = 512  # a side of a pattern's picture, at most


@runtime_checkable
class Branches(Protocol):
    """A frozen dataclass of dilated branches: `Dilated`, which this module lies below."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def segment_lengths(self) -> tuple[int, ...]: ...

    @property
    def dilation_rates(self) -> tuple[int, ...]: ...

    def offset_table(self, num_heads: int) -> tuple[tuple[int, ...], ...]: ...


def save_loss_curves(path: Path, losses: Mapping[str, Sequence[float]], held_out: Mapping[str, float]) -> None:
    """losses: nats per byte a step, by run, drawn grey, and their running mean over a 25th of the
    run, black; held_out: bits per byte at the end, a point.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for (name, values), line in zip(losses.items(), LINES, strict=False):
        bits = np.asarray(values) / math.log(2)
        steps = np.arange(1, len(bits) + 1)
        first = np.maximum(0, steps - max(1, len(bits) // 25))
        sums = np.concatenate(([0.0], bits.cumsum()))
        means = (sums[steps] - sums[first]) / (steps - first)
        label = f"{name}: {held_out[name]:.3f} held out" if name in held_out else name
        axes.plot(steps, bits, line, color="0.8", linewidth=0.6)
        axes.plot(steps, means, line, color="black", linewidth=1.2, label=label)
        if name in held_out:
            axes.plot([len(bits)], [held_out[name]], "o" if line == "-" else "s", color="black", fillstyle="none")
    axes.set_xlabel("step")
    axes.set_ylabel("bits per byte")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def save_pattern(path: Path, name: str, pattern: Branches, seq_len: int, num_heads: int, tokens: int = 64) -> None:
    """Causal visibility, one square a (query, key), of up to 4 heads.

    A pattern for a longer sequence is drawn with its segments shortened by seq_len / tokens, its rates as they are.
    """
    from matplotlib.figure import Figure

    tokens = min(tokens, seq_len)
    lengths = tuple(
        max(rate, round(length * tokens / seq_len))
        for length, rate in zip(pattern.segment_lengths, pattern.dilation_rates, strict=True)
    )
    drawn = replace(pattern, segment_lengths=lengths)
    heads = min(num_heads, 4)
    figure = Figure(figsize=(2.6 * heads + 0.8, 3.6), layout="constrained")
    for head, axes in enumerate(figure.subplots(1, heads, squeeze=False)[0]):
        plot_counts(drawn, tokens, head, num_heads, axes, is_causal=True)
        axes.set_xticks(range(0, tokens, max(1, tokens // 4)))
        axes.set_yticks(range(0, tokens, max(1, tokens // 4)))
        if head:
            axes.set_ylabel("")
    title = f"{name}: segments {list(lengths)}, rates {list(pattern.dilation_rates)}"
    if lengths != pattern.segment_lengths:
        title += f", for {list(pattern.segment_lengths)} at {seq_len:,} tokens"
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=150)


def plot_counts(
    pattern: Branches, seq_len: int, head: int, num_heads: int, ax: Axes | None = None, *, is_causal: bool = False
) -> Axes:
    """One square a (query row, key column) of one head: white where unseen, darker the more branches show the key."""
    counts = _counts(pattern, seq_len, head, num_heads)
    axes = draw_counts(np.tril(counts) if is_causal else counts, seq_len, len(pattern.segment_lengths), ax)
    axes.set_title(f"head {head}")
    return axes


def draw_counts(counts: np.ndarray, seq_len: int, most: int, ax: Axes | None = None) -> Axes:
    """An image of (query, key) pairs, one pixel a pair or several, white for 0 and black for `most`.

    Without `ax`, on a figure of pyplot, which a notebook shows.
    """
    require("matplotlib")
    from matplotlib.ticker import MaxNLocator

    if ax is None:
        import matplotlib.pyplot as plt

        ax = plt.figure(figsize=(4, 4), layout="constrained").add_subplot()
    extent = (-0.5, seq_len - 0.5, seq_len - 0.5, -0.5)
    ax.imshow(counts, cmap="Greys", vmin=0, vmax=most, extent=extent, interpolation="nearest")
    ax.set(xlabel="key", ylabel="query")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(4, integer=True))
    return ax


def _counts(pattern: Branches, seq_len: int, head: int, num_heads: int) -> np.ndarray:
    """How many branches show key j to query i, causality aside."""
    position = np.arange(seq_len)
    counts = np.zeros((seq_len, seq_len), dtype=np.int64)
    table = pattern.offset_table(num_heads)
    for length, rate, offsets in zip(pattern.segment_lengths, pattern.dilation_rates, table, strict=True):
        segment = np.where(position % length % rate == offsets[head], position // length, -1)
        counts += (segment[:, None] == segment) & (segment >= 0)
    return counts
