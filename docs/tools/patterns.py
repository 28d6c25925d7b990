"""Draw the patterns that the documents explain: `python docs/tools/patterns.py` writes docs/pictures/pattern-*.png."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dilated_attention.layout import BlockLayout
from dilated_attention.patterns import Dilated, Window


def _panels(count: int, height: float = 3.0) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(2.7 * count, height), layout="constrained")
    axes = list(figure.subplots(1, count, squeeze=False)[0])
    return figure, axes


def _branches() -> Figure:
    """Draw each branch of one head alone, and their union."""
    pattern = Dilated((8, 16, 32), (1, 2, 4))
    figure, axes = _panels(4)
    for panel, segment, rate in zip(axes, pattern.segment_lengths, pattern.dilation_rates, strict=False):
        Dilated((segment,), (rate,)).plot(32, 1, panel, num_heads=4)
        panel.set_title(f"segment {segment}, rate {rate}", fontsize=9)
    pattern.plot(32, 1, axes[3], num_heads=4)
    axes[3].set_title("all three, head 1", fontsize=9)
    return figure


def _lead() -> Figure:
    """Draw README.md's first example, a causal window, and what else a pattern may be, on few tokens."""
    patterns = {
        "Window(5)": Window(5),
        "Window(5, leading=2)": Window(5, leading=2),
        "Window(5) + Dilated((32,), (4,))": Window(5) + Dilated((32,), (4,)),
        "Dilated((8, 16, 32), (1, 2, 4))": Dilated((8, 16, 32), (1, 2, 4)),
    }
    figure, axes = _panels(4)
    for panel, (name, pattern) in zip(axes, patterns.items(), strict=True):
        pattern.plot(32, 0, panel, num_heads=4, is_causal=True)
        panel.set_title(name, fontsize=9)
    return figure


def _offsets() -> Figure:
    """Draw one branch of rate 4 with 8 heads under each rule for offsets, and two branches with head groups."""
    figure = Figure(figsize=(10.8, 8.4), layout="constrained")
    rules = {
        'offsets="head"': Dilated((32,), (4,)),
        'offsets="head_block"': Dilated((32,), (4,), "head_block"),
        "head_groups=True, (8, 32) / (1, 4)": Dilated((8, 32), (1, 4), head_groups=True),
    }
    for row, (panels, (rule, pattern)) in enumerate(zip(figure.subplots(3, 4), rules.items(), strict=True)):
        for panel, head in zip(panels, (0, 1, 4, 7), strict=True):
            pattern.plot(32, head, panel, num_heads=8)
            panel.set_title(f"{rule}: head {head}" if head == 0 else f"head {head}", fontsize=9)
            panel.set_xlabel("key" if row == 2 else "")
    return figure


def _coverage() -> Figure:
    """Draw how many keys each token sees under two patterns; in one of them some tokens see none."""
    figure = Figure(figsize=(9, 3), layout="constrained")
    for panel, rates in zip(figure.subplots(1, 2), ((1, 4), (2, 4)), strict=True):
        panel.grid(color="0.9")
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        pattern = Dilated((16, 48), rates)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the tokens that see nothing: they are what the picture shows
            keys = pattern.coverage(48, 4)
        for head, (marker, color) in enumerate((("o", "black"), ("x", "0.4"))):
            panel.plot(keys[head], marker, color=color, markersize=4, fillstyle="none", label=f"head {head}")
        panel.set(title=f"segments 16, 48; rates {rates[0]}, {rates[1]}", xlabel="token", ylabel="keys", ylim=(-2, 36))
        panel.legend(frameon=False, fontsize=8, loc="upper right", ncols=2)
    return figure


def _layouts() -> Figure:
    n, block = 1024, 32
    figure, axes = _panels(4, 3.2)
    named = {
        "local, window 96": BlockLayout.local(n, 96, block),
        "longformer, window 96": BlockLayout.longformer(n, 96, 16, block),
        "dilated, rates 1, 4, 16": BlockLayout.dilated(n, (1, 4, 16), 1, block),
        "random, causal": BlockLayout.random(n, 0.15, 0, block, is_causal=True),
    }
    for panel, (name, layout) in zip(axes, named.items(), strict=True):
        layout.plot(panel)
        panel.set_title(f"{name}: density {layout.density:.2f}", fontsize=9)
    return figure


def _masks() -> Figure:
    """Draw the masks that docs/any-mask.md makes, by running the code of that page."""
    page = Path(__file__).parents[1] / "any-mask.md"
    code = "".join(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
    names: dict[str, Any] = {}
    exec(code, names)
    figure = Figure(figsize=(10.8, 4.7), layout="constrained")
    panels = figure.subplots(2, 5).flat
    for panel, (name, layout) in zip(panels, names["layouts"].items(), strict=True):
        panel.imshow(layout.dense_mask()[0, 0], cmap="binary", vmax=1.5, interpolation="nearest")
        panel.set_title(name.replace("_", " "), fontsize=9)
        panel.set(xticks=[], yticks=[])
    return figure


if __name__ == "__main__":
    drawn = {
        "lead": _lead,
        "branches": _branches,
        "offsets": _offsets,
        "coverage": _coverage,
        "layouts": _layouts,
        "masks": _masks,
    }
    for name, picture in drawn.items():
        picture().savefig(Path(__file__).parents[1] / "pictures" / f"pattern-{name}.png", dpi=150)
