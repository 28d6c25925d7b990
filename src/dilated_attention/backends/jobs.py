"""Share the tiles of a launch among threads: order them and group them into jobs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dilated_attention.backends import tiles
from dilated_attention.kernels.configurations import Side

NEARBY = 768
"""Under a narrow window, the heads of this many neighbouring tokens run together. Other numbers: docs/notebook.md,
"heads of a window"."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Hold one call of the compiled kernels: its tiles, and how threads share them as jobs.

    Attributes:
        table: the tiles, ordered so that those of a job are neighbours.
        jobs: int64 `(jobs + 1,)`; job x is lines jobs[x] to jobs[x + 1] - 1 of the table. Owned jobs (`launch_of`) run
            the heaviest first; others in an order in which neighbours read the same rows.
        weights: the score entries of each job, roughly.
        few: whether the tiles are small enough for kernels/cpu/few.h. That kernel must not get owned jobs.
        rows: the most rows that a thread holds at once: those of a tile, or for kernels/cpu/few.h those of a job.
        joined: how many query heads of each token lie side by side in tiles of queries: all of a KV head, if they share
            their lists, or 1.
        by_block: whether kernels/cpu/by_block.h runs the tiles. `rows` are then those of a job, too.
    """

    side: Side
    table: tiles.Table
    jobs: Tensor
    weights: np.ndarray
    few: bool
    rows: int
    joined: int
    by_block: bool = False

    def idle(self, threads: int, batch: int) -> float:
        """Estimate the time of the launch if each free thread takes the next job; 1.0: threads are evenly loaded."""
        jobs = np.tile(self.weights, batch)  # sample after sample, as the kernels take them
        if len(jobs) >= 16 * threads and jobs[0] * threads <= jobs.sum():
            return 1.0
        loads = np.zeros(threads)
        for weight in jobs:
            loads[loads.argmin()] += weight
        if not loads.any():
            return 1.0
        return float(loads.max() / loads.mean())


@dataclass(frozen=True, slots=True)
class Launches:
    """Hold launches in the cache."""

    launches: tuple[Launch, ...]

    @property
    def nbytes(self) -> int:
        return sum([x.table.lines.nbytes + x.jobs.nbytes + x.weights.nbytes + 512 for x in self.launches])


def launch_of(
    lines: np.ndarray, count: int | None, side: Side, owned: bool, most_few: int, together: int, joinable: int,
    most: int, by_block: bool,
) -> Launch:  # fmt: skip
    """Group tiles into jobs for threads, order them (see `Launch.jobs`), and return the launch.

    Args:
        lines, count: the tiles (`tiles.lines_of`), and the key of their layout.
        owned: group tiles into jobs such that no row is seen by tiles of two jobs: a job may then add to the rows that
            it sees. If not, a job is one tile, or up to `together` tiles in a launch that is `few` or `by_block`.
        most_few: the most rows per tile of a launch that is `few`, owned or not (see `Launch`). Twice as many if they
            are of several heads, which then read the same keys.
        joinable: how many query heads share the list of a tile of queries. They are `joined` if they have more rows
            than a launch that is `few`, and at most `most`.
        by_block: see `Launch`.
    """
    seen = lines[:, tiles.COUNTS].sum(1)
    weights = lines[:, tiles.ROWS] * seen
    rows = int(lines[:, tiles.ROWS].max(initial=0))
    few = rows <= most_few
    joined = 1
    if by_block:
        few = False
        joined = joinable
    elif joinable > 1 and rows * joinable <= most:
        few = rows * joinable <= 2 * most_few
        if not few:
            joined = joinable

    size = 1
    if owned:
        order, jobs = _owners(lines, weights)
    else:
        # Tiles that stream the same rows become neighbours, because a thread keeps the rows that it has gathered
        # (Kept in kernels/cpu/tiles.h). So do the heads of a segment, and of NEARBY tokens under a narrow window, whose
        # rows share pages of memory.
        *shorter, longest = lines[:, tiles.STARTS].T
        near, far = tiles.EDGES
        narrow = (abs(lines[:, near] - lines[:, far]) < NEARBY).all(1)
        order = np.lexsort((-seen, *shorter, lines[:, tiles.HEAD], narrow * lines[:, tiles.START] // NEARBY, longest))
        if few or by_block:
            size = max(1, min(together, len(lines) // 64))
        jobs = np.append(np.arange(0, len(lines), size), len(lines))

    weights = np.add.reduceat(weights[order], jobs[:-1])
    ordered = tiles.Table(tiles.int32(lines[order]), tiles.spans_of(lines), count)
    return Launch(side, ordered, torch.from_numpy(jobs), weights, few, rows * joined * size, joined, by_block)


def _owners(lines: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return indices that order the lines of a `tiles.Table`, and edges that cut them into jobs that share no row, the
    heaviest first. A tile is taken to see all tokens from the first to the last of its spans: too few jobs only cost
    time."""
    spans = lines[:, tiles.TILE_FIELDS :].reshape(len(lines), -1, tiles.SPAN_FIELDS)
    start = spans[..., 0]
    stride = spans[..., 1]
    count = spans[..., 2]
    low = np.where(count > 0, start, np.iinfo(np.int64).max).min(1)
    high = np.where(count > 0, start + (count - 1) * stride + 1, 0).max(1)

    # A job begins at each tile that sees only what lies behind the tiles before it, in the order of heads and tokens.
    order = np.lexsort((lines[:, tiles.START], low, lines[:, tiles.HEAD]))
    low = low[order]
    high = high[order]
    head = lines[order, tiles.HEAD]
    far = 2**32  # more than any token
    reach = np.maximum.accumulate(head * far + high)
    begins = np.ones(len(order), bool)
    begins[1:] = head[1:] * far + np.minimum(low[1:], far - 1) >= reach[:-1]
    first = np.flatnonzero(begins)
    sizes = np.diff(np.append(first, len(order)))

    heaviest = np.argsort(-np.add.reduceat(weights[order], first), kind="stable")
    place = np.repeat(np.argsort(heaviest), sizes)  # of each tile's job
    order = order[np.argsort(place, kind="stable")]
    return order, np.append(0, np.cumsum(sizes[heaviest]))
