"""`bench masks`: masks by bits and neighborhoods, against PyTorch's masked calls and FlexAttention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from dilated_attention import BlockLayout, Neighborhood, attention
from dilated_attention.plumbing import tiled
from dilated_attention_lab.bench import measure
from dilated_attention_lab.bench.cases import contender, trained
from dilated_attention_lab.bench.results import Row
from dilated_attention_lab.bench.rivals import flex_with_mask, sdpa
from dilated_attention_lab.bench.suites import Step, over

HEAD_DIM = 64
BLOCK = 64
DOCUMENTS = (1_001, 3_333, 2_047, 777, 4_099, 1_500, 2_500, 1_127)
"""The lengths of the documents of 16,384 tokens."""
PAIRS = {5: 3.5, 13: 2.2}
"""The most pairs computed for each one seen, by the window along every axis."""
PHASES = ("forward", "forward+backward")
Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def steps(device: torch.device, quick: bool) -> list[Step]:
    budget = 2.0 if quick else 20.0
    side = 16 if quick else 64
    volume = (4, 8, 8) if quick else (16, 32, 32)
    window = 5 if quick else 13
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        found.append(Step(f"cut blocks, {name}", partial(_cut_blocks, 1024 if quick else 8192, dtype, device, budget)))
    for name, mask in (("documents", _documents), ("prefix", _prefix)):
        found.append(Step(name, partial(_over_flex, name, mask, 2048 if quick else 16384, device, budget)))
    found.append(Step("documents over the masked call", partial(_over_mask, 2048 if quick else 16384, device, budget)))
    for rate in (1, 2 if quick else 4):
        grid = Neighborhood((side, side), window, rate=rate)
        found.append(Step(f"{window} x {window} at rate {rate}", partial(_neighborhood, grid, device, budget)))
    cube = Neighborhood(volume, 3 if quick else 7)
    found.append(Step(f"neighborhood of {cube.shape}", partial(_neighborhood, cube, device, budget)))
    return found


def _inputs(seq_len: int, heads: int, device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(1, seq_len, heads, HEAD_DIM, device=device, dtype=dtype) for _ in range(3)]


def _attend(pattern: BlockLayout | Neighborhood) -> Callable[..., Tensor]:
    return partial(attention, pattern=pattern)  # type: ignore[return-value]


def _cut_blocks(seq_len: int, dtype: torch.dtype, device: torch.device, budget: float) -> Iterator[Row]:
    """Compare blocks that are cut at random with whole blocks of the same lists."""
    torch.manual_seed(0)
    blocks = torch.rand(seq_len // BLOCK, seq_len // BLOCK) < 0.25
    cut = torch.rand(BLOCK, BLOCK) < 0.5

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return blocks[query // BLOCK, key // BLOCK] & cut[query % BLOCK, key % BLOCK]

    layouts = {
        "cut": BlockLayout.from_mask_mod(sees, seq_len, block_size=BLOCK).to(device),
        "whole": BlockLayout.from_mask(blocks, seq_len, BLOCK).to(device),
    }
    tensors = _inputs(seq_len, 4, device, dtype)
    work = {name: trained(_attend(layout), tensors) for name, layout in layouts.items()}
    rounds = measure.interleave(work, seconds=budget, device=device, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    parameters = {"mask": f"blocks of {BLOCK}, {name}", "seq_len": seq_len, "heads": 4, "head_dim": HEAD_DIM}
    for phase in PHASES:
        yield over(rounds, "cut", "whole", phase, parameters, f"{phase}: a cut block over a whole one", bar=1.15)


def _documents(seq_len: int) -> Mask:
    """Return the mask of causal documents."""
    document = torch.repeat_interleave(torch.arange(len(DOCUMENTS)), torch.tensor(DOCUMENTS))[:seq_len]

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (document[query] == document[key]) & (key <= query)

    return sees


def _prefix(seq_len: int) -> Mask:
    """Return the mask of a causal text whose first quarter all tokens see."""
    prefix = seq_len // 4 + 1

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) | (key < prefix)

    return sees


def _over_flex(
    name: str, mask: Callable[[int], Mask], seq_len: int, device: torch.device, budget: float
) -> Iterator[Row]:
    sees = mask(seq_len)
    layout = BlockLayout.from_mask_mod(sees, seq_len)
    making = {
        "layout": contender(partial(BlockLayout.from_mask_mod, sees, seq_len)),
        "BlockMask": contender(partial(create_block_mask, sees, None, None, seq_len, seq_len, device="cpu")),
    }
    parameters = {"mask": name, "seq_len": seq_len, "heads": 4, "head_dim": HEAD_DIM}
    made = measure.interleave(making, seconds=budget / 4, device=device)
    yield over(made, "layout", "BlockMask", "forward", parameters, f"{name}: time to make it, over BlockMask", bar=1.5)
    tensors = _inputs(seq_len, 4, device)
    work = {
        "layout": trained(_attend(layout.to(device)), tensors, backward=False),
        "flex": contender(flex_with_mask(sees, *tensors)),
    }
    rounds = measure.interleave(work, seconds=budget, device=device)
    title = f"{name}, forward: time over compiled FlexAttention"
    yield over(rounds, "layout", "flex", "forward", parameters, title, bar=0.5)


def _over_mask(seq_len: int, device: torch.device, budget: float) -> Iterator[Row]:
    sees = _documents(seq_len)
    layout = BlockLayout.from_mask_mod(sees, seq_len).to(device)
    tensors = _inputs(seq_len, 2, device)
    dense = create_mask(sees, None, None, seq_len, seq_len, device=str(device))[0, 0]
    parameters = {"mask": "documents", "seq_len": seq_len, "heads": 2, "head_dim": HEAD_DIM}
    yield from _beside_sdpa(_attend(layout), dense, tensors, parameters, {PHASES[1]: 0.2}, budget)


def _beside_sdpa(
    attend: Callable[..., Tensor], mask: Tensor, tensors: list[Tensor], parameters: dict[str, Any],
    bars: dict[str, float], budget: float,
) -> Iterator[Row]:  # fmt: skip
    """Compare a call with `scaled_dot_product_attention` with the mask, and check that both compute the same."""
    with torch.no_grad():
        found = attend(*tensors)
        expected = sdpa(*tensors, attn_mask=mask)
        difference = float((found - expected).norm() / expected.norm())
    yield Row("relative difference from the masked call", parameters, difference, "", bar=1e-5)
    work = {"ours": trained(attend, tensors), "masked": trained(partial(sdpa, attn_mask=mask), tensors)}
    rounds = measure.interleave(work, seconds=budget, device=tensors[0].device, least=2)
    for phase in PHASES:
        title = f"{phase}: time over scaled_dot_product_attention with the mask"
        yield over(rounds, "ours", "masked", phase, parameters, title, bar=bars.get(phase))


def _grid_mask(grid: Neighborhood, order: Tensor) -> Mask:
    """Return a neighborhood without strides as a function of tokens that lie in `order`."""

    def along(axis: int, query: Tensor, key: Tensor) -> Tensor:
        part = grid.axes[axis]
        inner = math.prod(grid.shape[axis + 1 :])
        query = order[query] // inner % part.length
        key = order[key] // inner % part.length
        count = (part.length - 1 - query % part.rate) // part.rate + 1
        start = torch.minimum((query // part.rate - part.window // 2).clamp(min=0), count - part.window)
        number = key // part.rate
        return (query % part.rate == key % part.rate) & (number >= start) & (number < start + part.window)

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return reduce(torch.logical_and, [along(axis, query, key) for axis in range(len(grid.shape))])

    return sees


def _neighborhood(grid: Neighborhood, device: torch.device, budget: float) -> Iterator[Row]:
    """Compare a neighborhood with the masked call, and with FlexAttention over tokens in the order of our tiles."""
    seq_len = grid.seq_len
    heads = 8
    lengths = " x ".join([str(length) for length in grid.shape])
    name = f"neighborhood of {grid.axes[0].window} per axis on {lengths} at rate {grid.axes[0].rate}"
    parameters = {"mask": name, "seq_len": seq_len, "heads": heads, "head_dim": HEAD_DIM}
    rows = tiled(grid)
    computed = rows.layout.nnz * rows.layout.q_block * rows.layout.k_block
    seen = int(grid.coverage(seq_len, 1).sum())
    bar = PAIRS.get(grid.axes[0].window)
    yield Row("pairs computed over pairs seen", parameters, computed / seen, "x", bar=bar)
    tensors = _inputs(seq_len, heads, device)
    by_row = _grid_mask(grid, torch.arange(seq_len))
    dense = create_mask(by_row, None, None, seq_len, seq_len, device=str(device))[0, 0]
    bars = dict(zip(PHASES, (0.09, 0.15), strict=True))
    yield from _beside_sdpa(_attend(grid), dense, tensors, parameters, bars, budget)

    order = rows.queries(torch.arange(1, seq_len + 1)[None])[0]
    by_tile = _grid_mask(grid, order[order > 0] - 1)
    work = {
        "ours": trained(_attend(grid), tensors, backward=False),
        "flex": contender(flex_with_mask(by_tile, *tensors)),
    }
    rounds = measure.interleave(work, seconds=budget, device=device, least=2)
    title = "forward: time over compiled FlexAttention in tiles"
    yield over(rounds, "ours", "flex", "forward", parameters, title, bar=0.6)
