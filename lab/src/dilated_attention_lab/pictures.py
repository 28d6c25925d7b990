"""Draw the pictures that the commands write: loss curves, recall and context, patterns. Readable without colour."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dilated_attention import Dilated

LINES = ("-", "--", ":", "-.")


def save_loss_curve(path: Path, name: str, losses: Sequence[float], held_out: float) -> None:
    """Draw a run's loss in bits per byte: grey per step, black as the moving mean over a 25th of the run; a point for
    held-out text.

    Args:
        losses: nats per byte for each step. held_out: bits per byte at the end.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    bits = np.asarray(losses) / math.log(2)
    steps = np.arange(1, len(bits) + 1)
    first = np.maximum(0, steps - max(1, len(bits) // 25))
    sums = np.concatenate(([0.0], bits.cumsum()))
    means = (sums[steps] - sums[first]) / (steps - first)
    axes.plot(steps, bits, color="0.8", linewidth=0.6)
    axes.plot(steps, means, color="black", linewidth=1.2, label=f"{name}: {held_out:.3f} held out")
    axes.plot([len(bits)], [held_out], "o", color="black", fillstyle="none")
    axes.set_xlabel("step")
    axes.set_ylabel("bits per byte")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def save_recall_and_context(
    path: Path,
    accuracy: Mapping[str, Mapping[int, float]],
    questions: int,
    bits: Mapping[int, float],
    table_bits: float,
) -> None:
    """Draw recall by distance, and bits per byte by context.

    Args:
        accuracy: share of right answers by model and distance in tokens, each over `questions` questions.
        bits: bits per byte of the byte model, by bytes of context.
        table_bits: bits per byte of the table of trigrams, which is drawn as a line.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    recall, context = figure.subplots(1, 2)
    for (name, points), line in zip(accuracy.items(), LINES, strict=False):
        recall.plot(list(points), list(points.values()), line, color="black", label=name)
    recall.set(xlabel="distance of the fact from the question, tokens", ylim=(-0.03, 1.03))
    recall.set_ylabel(f"right answers, of {questions} questions each")
    context.plot(list(bits), list(bits.values()), "-o", color="black", fillstyle="none", label="byte model")
    context.axhline(table_bits, color="black", linestyle=":", label="table of trigrams' next bytes")
    context.set(xlabel="bytes of context that it may use", ylabel="bits per held-out byte")
    for axes in (recall, context):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        axes.grid(color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


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
