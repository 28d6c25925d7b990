"""Draw charts from plain data, all in one style, and the pictures of a run and of a pattern."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dilated_attention import Dilated
from dilated_attention_lab.terminal import number

OURS, OTHERS = ("#0b5fa5", "#5fa8dd", "#a3cdec", "#d5e8f7"), ("#333333", "#888888", "#c4c4c4")
"""Colours: blue for this library, grey for what it is compared with."""

MARKERS = "osv^Dx<>"
MOST_MARKED = 50
"""The most points of a line that get a marker each."""


@dataclass(frozen=True)
class Series:
    """Hold one line of points, or one bar for each group: `x` are numbers, or the names of the groups. With `is_ours`
    it is blue and a line is solid; otherwise it is grey and a line is dashed."""

    label: str
    x: Sequence[float | str]
    y: Sequence[float]
    is_ours: bool = True


@dataclass(frozen=True)
class Panel:
    """Describe one plot, a matplotlib `Axes`.

    Attributes:
        kind: "lines", "bars", or "stages": horizontal bars of one series in milliseconds.
        settings: for `Axes.set`.
        level: the y of a horizontal line.
        diagonal: for lines, whether to draw y = x.
    """

    kind: str
    series: Sequence[Series]
    settings: Mapping[str, Any] = field(default_factory=dict)
    level: float | None = None
    diagonal: bool = False


def save(panels: Sequence[Panel], path: Path, title: str = "", description: str = "") -> None:
    """Draw panels side by side into a file, without a date. description: stored in the file."""
    with matplotlib.rc_context({"svg.hashsalt": "dilated-attention", "svg.fonttype": "none", "font.size": 9}):
        height = max(3.6, *(0.9 + 0.32 * len(panel.series[0].x) for panel in panels if panel.kind == "stages"), 0)
        figure = Figure(figsize=(8 if len(panels) > 1 else 6.4, height), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            {"lines": _lines, "bars": _bars, "stages": _stages}[panel.kind](axes, panel)
            axes.set(**panel.settings)
            if panel.settings.get("xscale") == "log":
                axes.xaxis.set_major_formatter(_tick)
            if panel.level is not None:
                axes.axhline(panel.level, color="0.5", linewidth=0.8, linestyle=":")
            axes.grid(axis="x" if panel.kind == "stages" else "y", color="0.92", zorder=0)
            axes.spines[["top", "right"]].set_visible(False)
            if len(panel.series) > 1:
                place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 3 if len(panel.series) == 3 else 2}
                axes.legend(frameon=False, fontsize=8, **place)
        if title:
            figure.suptitle(title, fontsize=9)
        figure.savefig(path, dpi=150, metadata={"Date": None, "Description": description})


def _tick(x: float, _: object) -> str:
    return f"{x / 1e6:,.0f} M" if x >= 1e6 else f"{x:,.0f}" if x >= 1 else f"{x:g}"


def _styles(panel: Panel) -> Iterator[tuple[Series, str, str]]:
    """Yield each series with its colour and its marker."""
    used = {True: 0, False: 0}  # by whether the series is ours
    for series, marker in zip(panel.series, cycle(MARKERS), strict=False):
        palette = OURS if series.is_ours else OTHERS
        yield series, palette[used[series.is_ours] % len(palette)], marker
        used[series.is_ours] += 1


def _lines(axes: Axes, panel: Panel) -> None:
    for series, color, marker in _styles(panel):
        style, marked = "-" if series.is_ours else "--", marker if len(series.x) <= MOST_MARKED else ""
        axes.plot(series.x, series.y, style, marker=marked, color=color, markersize=5, label=series.label)
    if panel.diagonal:
        axes.axline((0.01, 0.01), (1, 1), color="0.7", linewidth=0.8)


def _bars(axes: Axes, panel: Panel) -> None:
    groups = list(dict.fromkeys(str(name) for series in panel.series for name in series.x))
    side_by_side = len(groups) < sum(len(series.x) for series in panel.series)
    width = 0.8 / len(panel.series) if side_by_side else 0.6
    for i, (series, color, _) in enumerate(_styles(panel)):
        shift = (i - (len(panel.series) - 1) / 2) * width if side_by_side else 0.0
        places = [groups.index(str(name)) + shift for name in series.x]
        bars = axes.bar(places, series.y, width * 0.92, color=color, label=series.label, zorder=2)
        axes.bar_label(bars, [number(y) for y in series.y], fontsize=7)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_xlim(-0.5, len(groups) - 0.5)  # a group without its last bar is not cut


def _stages(axes: Axes, panel: Panel) -> None:
    (series,) = panel.series
    bars = axes.barh(series.x, series.y, color=OURS[0], zorder=2)
    axes.bar_label(bars, [f"{y:,.3g} ms" for y in series.y], padding=3, fontsize=8)
    axes.margins(x=0.2)
    axes.invert_yaxis()


def save_loss_curve(path: Path, name: str, losses: Sequence[float], held_out: float) -> None:
    """Draw a run's loss in bits per byte: per step, as the moving mean over a 25th of the run, and a point for held-out
    text.

    Args:
        losses: nats per byte for each step. held_out: bits per byte at the end.
    """
    bits = np.asarray(losses) / math.log(2)
    steps = np.arange(1, len(bits) + 1)
    first = np.maximum(0, steps - max(1, len(bits) // 25))
    sums = np.concatenate(([0.0], bits.cumsum()))
    means = (sums[steps] - sums[first]) / (steps - first)
    series = [
        Series(f"{held_out:.3f} held out", [len(bits)], [held_out], False),
        Series("of a step", steps.tolist(), bits.tolist(), False),
        Series(f"{name}, moving mean", steps.tolist(), means.tolist()),
    ]
    save([Panel("lines", series, {"xlabel": "step", "ylabel": "bits per byte", "ylim": (0, None)})], path)


def save_recall_and_context(
    path: Path,
    accuracy: Mapping[str, Mapping[int, float]],
    questions: int,
    bits: Mapping[int, float],
) -> None:
    """Draw recall by distance, and bits per byte by context.

    Args:
        accuracy: share of right answers by model and distance in tokens, each over `questions` questions.
        bits: bits per byte of the byte model, by bytes of context.
    """
    recall = [Series(name, [*found], [*found.values()], name == "dilated") for name, found in accuracy.items()]
    context = [Series("byte model", [*bits], [*bits.values()])]
    words = {"xlabel": "distance of the fact, tokens", "ylabel": f"right answers, of {questions} questions each"}
    panels = [
        Panel("lines", recall, {"xscale": "log", "ylim": (-0.03, 1.03), **words}),
        Panel("lines", context, {"xscale": "log", "xlabel": "bytes of context", "ylabel": "bits per held-out byte"}),
    ]
    save(panels, path)


def save_pattern(path: Path, name: str, pattern: Dilated, seq_len: int, num_heads: int) -> None:
    """Draw which keys each query sees in a causal call: one square per (query, key), for the first 4 heads at most.

    A pattern for more than 64 tokens is drawn over 64, with its segments shortened accordingly, its rates as they are.
    name: begins the title.
    """
    tokens = min(64, seq_len)
    lengths = tuple(
        max(rate, round(length * tokens / seq_len))
        for length, rate in zip(pattern.segment_lengths, pattern.dilation_rates, strict=True)
    )
    drawn = replace(pattern, segment_lengths=lengths)
    heads = min(num_heads, 4)
    figure = Figure(figsize=(2.6 * heads + 0.8, 3.6), layout="constrained")
    for head, axes in enumerate(figure.subplots(1, heads, squeeze=False)[0]):
        drawn.plot(tokens, head, axes, num_heads=num_heads, is_causal=True)
        axes.set_xticks(range(0, tokens, max(1, tokens // 4)))
        axes.set_yticks(range(0, tokens, max(1, tokens // 4)))
        if head:
            axes.set_ylabel("")
    title = f"{name}: segments {list(lengths)}, rates {list(pattern.dilation_rates)}"
    if lengths != pattern.segment_lengths:
        title += f", for {list(pattern.segment_lengths)} at {seq_len:,} tokens"
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=150)
