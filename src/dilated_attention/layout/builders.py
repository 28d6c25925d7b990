"""Build block patterns: for each query block, the intervals of keys (`Spans`) that a rule on tokens shows.

**Rounding.** A block is active iff the rule holds for at least one of its (query, key) pairs (causal: a pair with key
<= query). An active block shows all its pairs (causal: those with key <= query). Time and memory are O(active blocks):
no dense mask is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from dilated_attention import checks
from dilated_attention.layout.spans import BlockGrid, Lists, Spans, check_share, runs_of_spans
from dilated_attention.torch_internals import constant_when_traced, fixed, unobserved, untransformed

Value = TypeVar("Value")


def constant(builder: Callable[..., Value], grid: BlockGrid, *arguments: Any) -> Value:
    """Return builder(grid, *arguments). The builder draws numbers or reads them out of tensors, so `torch.compile`
    calls it while tracing, and the result is a constant of the graph. `arguments` hold no tensors."""
    numbers = fixed((grid.seq_len, grid.q_block, grid.k_block))
    return _constant(builder, *numbers, grid.is_causal, *[fixed(x) for x in arguments])


@constant_when_traced
def _constant(
    builder: Callable[..., Value], seq_len: int, q_block: int, k_block: int, is_causal: bool, *arguments: Any
) -> Value:
    with unobserved(), untransformed():
        return builder(BlockGrid(seq_len, q_block, k_block, is_causal), *arguments)


def local(grid: BlockGrid, window: int | None, density: float | None) -> Spans:
    return _sized("window", window, density, _local, grid)


def _local(grid: BlockGrid, window: int) -> Spans:
    first, last = grid.queries()
    return [(first - (window - 1), last + (window - 1))]


def _leading(grid: BlockGrid, tokens: int) -> Spans:
    first, last = grid.queries()
    row_end = torch.full_like(last, grid.seq_len - 1)
    if grid.is_causal:
        row_end = last.clamp(max=tokens - 1)
    row_end = torch.where(first < tokens, row_end, -1)
    return [(torch.zeros_like(first), torch.full_like(last, tokens - 1)), (torch.zeros_like(first), row_end)]


def global_(grid: BlockGrid, tokens: int | Sequence[int] | None, density: float | None) -> Spans:
    """Return the intervals of keys for global tokens, as `BlockLayout.global_` describes them."""
    if tokens is None or (not isinstance(tokens, Sequence) and getattr(tokens, "ndim", 0) == 0):
        return _sized("tokens", tokens, density, _leading, grid)
    if density is not None:
        raise ValueError(f"give either tokens or density, got tokens={tokens!r} and density={density}")
    if hasattr(tokens, "ndim"):  # a tensor or array, whose numbers no compiler knows
        return _global_at(grid, tokens)
    return constant(_global_at, grid, tokens)


def _global_at(grid: BlockGrid, tokens: Any) -> Spans:
    try:
        positions = torch.as_tensor(tokens, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"tokens must be a number of leading tokens or integer positions, got {tokens!r}") from error
    if positions.numel() and (positions.is_floating_point() or positions.dtype == torch.bool):
        raise ValueError(
            f"tokens must be a number of leading tokens or integer positions, got {positions.dtype}; "
            "of a mask give mask.nonzero()"
        )
    position = positions.flatten().to(torch.int64).unique()
    first, last = grid.queries()
    if position.numel() == 0 or int(position[0]) < 0 or int(position[-1]) >= grid.seq_len:
        raise ValueError(f"tokens must be positions in [0, {grid.seq_len}), got {tokens}")
    if grid.is_causal and int(position[-1]) >= position.numel():
        raise ValueError(
            f"tokens={list(tokens)} cannot all be global when is_causal: queries before a token never see it. "
            "Use leading tokens, or build without is_causal and take .causal()"
        )
    after = torch.searchsorted(position, last, right=True)
    holds = torch.searchsorted(position, first) < after
    row_end = torch.full_like(last, grid.seq_len - 1)
    if grid.is_causal:
        row_end = position[(after - 1).clamp_(min=0)]
    block = position // grid.k_block
    once = position[torch.searchsorted(block, block.unique())]  # the first of each key block
    return [(once[None], once[None]), (torch.zeros_like(first), torch.where(holds, row_end, -1))]


def strided(grid: BlockGrid, stride: int) -> Spans:
    stride = checks.positive("stride", stride)
    first, last = grid.queries()
    origin = first % stride
    if stride <= grid.k_block:  # every whole key block holds a hit: one interval, up to the last hit
        hit = origin + (grid.seq_len - 1 - origin) // stride * stride + (last - first)
        return [(torch.zeros_like(hit), hit)]
    start = origin + torch.arange(-1, grid.seq_len // stride + 1, device="cpu") * stride
    return [(start, start + (last - first))]


def dilated(grid: BlockGrid, rates: Sequence[int], reach: int | None, density: float | None) -> Spans:
    rates = checks.integers("rates", rates, "positive integers", 1)
    if not rates:
        raise ValueError("rates must name at least one rate, got none")
    if reach is None and density is None:
        reach = 1
    return _sized("reach", reach, density, _dilated, grid, rates)


def _dilated(grid: BlockGrid, reach: int, rates: tuple[int, ...]) -> Spans:
    unit = max(grid.q_block, grid.k_block)
    offset = constant(_offsets, grid, reach, rates)
    first, last = grid.queries()
    return [((first // unit + offset) * unit, (last // unit + offset + 1) * unit - 1)]


def _offsets(grid: BlockGrid, reach: int, rates: tuple[int, ...]) -> Tensor:
    units = -(-grid.seq_len // max(grid.q_block, grid.k_block))
    reach = min(reach, units)
    step = torch.arange(-reach, reach + 1, device="cpu")
    return torch.cat([step[step.abs() * rate < units] * rate for rate in rates]).unique()


def hierarchical(grid: BlockGrid, levels: Sequence[tuple[int, int | None]]) -> Spans:
    pairs = []
    if hasattr(levels, "__len__"):
        pairs = list(levels)
    if not pairs or not all(hasattr(level, "__len__") and len(level) == 2 for level in pairs):
        raise ValueError(f"levels must be pairs (stride, window), at least one; got {levels!r}")
    sizes = []
    for stride, window in pairs:
        reach = grid.seq_len
        if window is not None:
            reach = min(reach, checks.positive("a level's window", window))
        sizes.append((checks.positive("a level's stride", stride), reach))
    for finer, coarser in pairwise(sizes):
        if finer[0] > coarser[0] or finer[1] > coarser[1]:
            raise ValueError(f"levels must go fine to coarse, strides and windows ascending, got {pairs}")

    first, last = grid.queries()
    spans = []
    for stride, window in sizes:
        low = -((window - 1 - first).clamp(max=0) // stride)
        end = last
        if not grid.is_causal:
            end = (last + window - 1).clamp(max=grid.seq_len - 1)
        high = end // stride
        if stride <= grid.k_block:  # every block between the two ends holds a multiple
            spans.append((low * stride, torch.where(high >= low, high * stride, -1)))
        else:
            step = low + torch.arange(-(-min(grid.q_block + 2 * window, grid.seq_len) // stride), device="cpu")
            spans.append((step * stride, torch.where(step <= high, step * stride, -1)))
    return spans


def random(grid: BlockGrid, density: float, seed: int) -> Lists:
    check_share("density", density)
    return _draw(grid.visible(), (grid.visible().double() * density).round().long().clamp_(min=1), seed)


def random_blocks(grid: BlockGrid, number: int, seed: int) -> Lists:
    number = checks.positive("random_blocks", number)
    return _draw(grid.visible(), grid.visible().clamp(max=number), seed)


def _sized(
    name: str, value: int | None, density: float | None, spans: Callable[..., Spans], grid: BlockGrid, *more: Any
) -> Spans:
    """Return `spans(grid, value, *more)`; or if `density` is given, the intervals of the size with the nearest density.
    `name`: the argument's name in errors."""
    if (value is None) == (density is None):
        raise ValueError(f"give either {name} or density, got {name}={value}, density={density}")
    if density is None:
        size = min(checks.positive(name, value), grid.seq_len)
    else:
        check_share("density", density)
        size = constant(_size_of_density, grid, density, spans, *more)
    return spans(grid, size, *more)


def _size_of_density(grid: BlockGrid, density: float, spans: Callable[..., Spans], *more: Any) -> int:
    total = int(grid.visible().sum())

    def reached(size: int) -> float:
        return int(runs_of_spans(grid, spans(grid, size, *more))[1].sum()) / total

    most = reached(grid.seq_len)
    if most < density:
        raise ValueError(f"density={density} is out of reach: at most {most:.4g} for these arguments")
    low = 1
    high = grid.seq_len
    while low < high:
        middle = (low + high) // 2
        if reached(middle) >= density:
            high = middle
        else:
            low = middle + 1
    if low > 1 and density - reached(low - 1) < reached(low) - density:
        return low - 1
    return low


def _draw(visible: Tensor, wanted: Tensor, seed: int) -> Lists:
    """Draw `wanted[i]` distinct numbers below `visible[i]` for each row i, uniformly; both are `(rows,)`. Return
    `wanted`, and all numbers in one flat tensor: row by row, ascending within each row."""
    generator = torch.Generator().manual_seed(checks.integer("seed", seed))
    dense = wanted * 2 > visible  # the few that are left out are drawn instead
    few = torch.where(dense, visible - wanted, wanted)

    draws = torch.empty(visible.numel(), 0, dtype=torch.int64, device="cpu")
    while True:
        # distinct values seen after n draws of v: about v (1 - exp(-n / v)), and v ln 2 draws show half of them
        more = 16 + int(0.75 * int(few.max()) + 0.75 * int((few.double() ** 2 / visible).max()))
        fresh = torch.rand(visible.numel(), more, generator=generator, dtype=torch.float64, device="cpu")
        draws = torch.cat([draws, (fresh * visible[:, None]).long()], dim=1)
        value, order = draws.sort(dim=1, stable=True)
        novel = torch.ones_like(value, dtype=torch.bool)
        novel[:, 1:] = value.diff(dim=1) != 0
        seen = torch.zeros_like(novel).scatter_(1, order, novel).cumsum(1)
        if bool((seen[:, -1] >= few).all()):
            break

    # the first `few` distinct values in drawing order are a uniform subset
    taken = (novel & (seen.gather(1, order) <= few[:, None])).nonzero()
    row = taken[:, 0]
    value = value[tuple(taken.T)]
    if not bool(dense.any()):
        return wanted, value

    width = int(visible.max())
    counts = torch.where(dense, visible, wanted)
    source = torch.repeat_interleave(counts)
    full = torch.arange(source.numel(), device="cpu") - (counts.cumsum(0) - counts)[source]
    sparse = ~dense[row]
    full[~dense[source]] = value[sparse]
    left_out = torch.isin(source * width + full, (row * width + value)[~sparse])
    return wanted, full[~left_out]
