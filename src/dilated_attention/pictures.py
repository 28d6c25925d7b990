"""Draw patterns, block layouts and values on tiles, readable in black and white.

Matplotlib is imported when something is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dilated_attention.errors import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FAINTEST = 0.22  # how dark the pixel with the fewest shown pairs is drawn; black is 1
PERCENTILE = 99  # of the tiles' values: the end of their scale
PIXELS = 512  # the largest side of a picture; in a longer sequence, a pixel shows several pairs


def plot_product(product: Any, seq_len: int, head: int, num_heads: int, is_causal: bool, ax: Axes | None) -> Axes:
    """Draw a square per (query row, key column) of one head: white if unseen, darker if more branches show the key.

    product: a `patterns.Product`, which this module must not import.
    """
    side = min(seq_len, PIXELS)
    image = np.zeros((side, side))
    segments, rates, table, *_ = product.dilated.branches(num_heads)
    for segment, rate, offsets in zip(segments, rates, table, strict=True):
        if offsets[head] < 0:  # the head takes no part
            continue
        for start in range(0, seq_len, segment):
            tokens = np.arange(start + offsets[head], min(start + segment, seq_len), rate)
            if not len(tokens):
                continue
            layout = product.layout_of(len(tokens)).to("cpu")
            blocks = layout.dense_blocks()[0, head % layout.num_heads].numpy()
            pixel = tokens * side // seq_len
            low = pixel[0]
            high = pixel[-1] + 1
            rows, columns = (
                _tokens_in(size, number, pixel - low)
                for size, number in zip(layout.block_size, blocks.shape, strict=True)
            )
            pairs = rows.T @ blocks @ columns
            if is_causal or layout.is_causal:
                pairs = np.tril(pairs)
                within = np.maximum(np.bincount(pixel - low), 1)  # a pixel of the diagonal shows its lower triangle
                pairs[np.diag_indices(high - low)] *= (within + 1) / (2 * within)
            image[low:high, low:high] += pairs
    return _draw_pairs(image, seq_len, f"head {head}", ax)


def plot_bands(groups: Sequence[Any], seq_len: int, title: str, ax: Axes | None = None) -> Axes:
    """Draw the pairs that strided groups show (`plan.StridedGroup`, which this module must not import). At most about
    eight rows of a group per pixel are drawn; they stand for all that share the pixel."""
    side = min(seq_len, PIXELS)
    image = np.zeros((side, side))
    edges = -(-np.arange(side + 1) * seq_len // side)  # the first token of each pixel, and the end
    for group in groups:
        rows = group.queries
        keys = group.keys
        number = rows.segments * rows.count

        # for each pixel, how many rows a drawn one stands for
        period = rows.segment if rows.segments > 1 else seq_len + 1
        whole, rest = np.divmod(edges - rows.start, period)
        earlier = np.clip(whole * rows.count + np.clip(-(-rest // rows.stride), 0, rows.count), 0, number)
        segment, row = np.divmod(np.arange(0, number, max(1, number // (4 * side))), rows.count)
        pixel = (rows.start + segment * rows.segment + row * rows.stride) * side // seq_len
        share = np.diff(earlier) / np.maximum(np.bincount(pixel, minlength=side), 1)

        # of the keys that a drawn row sees, how many lie before each edge
        row = row[:, None]
        segment = segment[:, None]
        start: Any = 0
        if group.low is not None:
            start = np.clip(row + group.low, 0, keys.count)
        stop: Any = keys.count
        if group.high is not None:
            stop = np.clip(row + group.high + 1, 0, keys.count)
        distance = keys.segment if keys.segments > 1 else 0
        first = keys.start + segment * distance
        before = np.clip(-((first - edges[None]) // keys.stride), start, np.maximum(start, stop))
        np.add.at(image, pixel, share[pixel, None] * np.diff(before, axis=1))
    return _draw_pairs(image, seq_len, title, ax)


def plot_blocks(
    blocks: tuple[np.ndarray, np.ndarray], shape: tuple[int, int], grid: Any, ax: Axes | None = None
) -> Axes:
    """Draw the active blocks, given as their numbers (query blocks, key blocks), in a grid of `shape` blocks
    (`layout.spans.BlockGrid`, which this module must not import).

    A pixel that holds several blocks is darker the larger the share of them that is active. If causal, the diagonal is
    drawn as a dashed line.
    """
    sides = [min(number, PIXELS) for number in shape]
    row, column = (x * side // number for x, side, number in zip(blocks, sides, shape, strict=True))
    image = np.bincount(row * sides[1] + column, minlength=sides[0] * sides[1]).reshape(sides)
    ax = _draw(image, shape, (0.0, float(shape[1] * grid.k_block), float(shape[0] * grid.q_block), 0.0), ax)
    if grid.is_causal:
        ax.axline((0, 0), slope=1, color="black", linestyle="--", linewidth=0.8)
    ax.set(xlim=(0, grid.seq_len), ylim=(grid.seq_len, 0), xlabel="key (tokens)", ylabel="query (tokens)")
    return ax


def plot_places(places: np.ndarray, values: np.ndarray, size: int, title: str, ax: Axes | None = None) -> Axes:
    """Draw a square for each tile, brighter for a larger value. y runs downwards, as in slides.

    The scale begins at 0 and ends at the 99th percentile of the values, so that a few outliers do not darken the rest.
    The colours can also be distinguished in grey and by the colour-blind.

    Args:
        places: the corner (x, y) of each tile where both are least, in the unit of `size`, the side of a tile.
        values: one per tile; the colour bar calls them attention relative to uniform.
    """
    ax = _axes(ax)
    from matplotlib.collections import PolyCollection

    corners = np.array([(0, 0), (1, 0), (1, 1), (0, 1)]) * size
    # Without antialiasing: it draws a pale seam where two tiles touch.
    tiles = PolyCollection(places[:, None] + corners, array=values, cmap="cividis", antialiased=False, linewidths=0)
    most = 1.0
    bright = 1.0
    if len(values):
        most = float(np.percentile(values, 100))
        bright = float(np.percentile(values, PERCENTILE))
    tiles.set_clim(0, next(end for end in (bright, most, 1.0) if end))
    ax.add_collection(tiles)
    ax.autoscale_view()
    figure = ax.get_figure()
    assert figure is not None
    label = "attention relative to uniform (1 = average tile)"
    extend = "max" if most > bright else "neither"
    figure.colorbar(tiles, ax=ax, label=label, shrink=0.8, extend=extend)
    ax.set(aspect="equal", xlabel="x (pixels)", ylabel="y (pixels)", title=title)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    ax.invert_yaxis()
    return ax


def plot_neighbors(seen: np.ndarray, query: tuple[int, ...], ax: Axes | None = None) -> Axes:
    """Draw a grid of one to three axes: white, grey where a query sees the token, black at the query. Planes of the
    first of three axes stand side by side.

    seen: booleans, in the shape of the grid.
    """
    ax = _axes(ax)
    dark = np.where(seen, 0.4, 0.0)
    dark[query] = 1.0
    planes = dark.reshape((-1, *dark.shape[-2:])) if dark.ndim > 1 else dark[None, None]
    between = np.full((planes.shape[1], 1), np.nan)
    columns = [planes[0]]
    for plane in planes[1:]:
        columns += [between, plane]
    cells = np.ma.masked_invalid(np.concatenate(columns, 1))
    ax.pcolormesh(cells, cmap="Greys", vmin=0, vmax=1, edgecolors="0.8", linewidth=0.3)
    ax.invert_yaxis()
    keys = int(seen.sum())
    ax.set(aspect="equal", title=f"the query at {', '.join(map(str, query))} sees {keys} of {seen.size} tokens")
    return ax


def _tokens_in(size: int, number: int, pixel: np.ndarray) -> np.ndarray:
    """Count the tokens of each block of `size` tokens in each pixel, (blocks, pixels). `pixel`: each token's pixel."""
    tokens = np.zeros((number, pixel[-1] + 1))
    np.add.at(tokens, (np.arange(len(pixel)) // size, pixel), 1)
    return tokens


def ink(mean: np.ndarray, most: float) -> np.ndarray:
    """Return how dark a pixel is drawn, from 0 (white) to 1 (black), given the mean count of its pairs and the largest
    mean. Any shown pair is visibly dark. The documentation's pattern explorer has the same rule."""
    return np.where(mean > 0, FAINTEST + (1 - FAINTEST) * np.sqrt(np.maximum(mean, 0) / most), 0.0)


def _draw_pairs(image: np.ndarray, seq_len: int, title: str, ax: Axes | None) -> Axes:
    ax = _draw(image, (seq_len, seq_len), (-0.5, seq_len - 0.5, seq_len - 0.5, -0.5), ax)
    ax.set(xlabel="key", ylabel="query", title=title)
    return ax


def _draw(
    image: np.ndarray, shape: tuple[int, int], extent: tuple[float, float, float, float], ax: Axes | None
) -> Axes:
    """Draw sums over pixels as means over the entries of a matrix of `shape`, white for 0 and black for the largest
    value; `extent`: left, right, bottom and top."""
    ax = _axes(ax)
    from matplotlib.colors import FuncNorm

    # how many rows, then columns, share each pixel
    shared = [np.bincount(np.arange(n) * side // n) for n, side in zip(shape, image.shape, strict=True)]
    image = image / np.outer(*shared)
    most = image.max()
    if most == 0:
        most = 1.0
    law = (lambda mean: ink(mean, most), lambda dark: most * (np.maximum(dark - FAINTEST, 0) / (1 - FAINTEST)) ** 2)
    norm = FuncNorm(law, vmin=0, vmax=most)
    ax.imshow(image, cmap="Greys", norm=norm, extent=extent, interpolation="nearest")
    return ax


def _axes(ax: Axes | None) -> Axes:
    """Return `ax`, or the axes of a new figure of pyplot, which a notebook shows, with few ticks."""
    if ax is None:
        require("matplotlib")
        import matplotlib.pyplot as plt

        ax = plt.figure(figsize=(5, 5), layout="constrained").add_subplot()
    from matplotlib.ticker import MaxNLocator

    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(4, integer=True))
    return ax
