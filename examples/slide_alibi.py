"""Attend over the tiles of a slide with two-dimensional ALiBi: scores fall with the distance of two tiles on the slide.

This is the form of TITAN's slide encoder (arXiv:2411.19666): bidirectional attention, slopes as in ALiBi, and the
Euclidean distance of the tiles in the grid. It builds the form on random features, without the released weights.

The usual way forms a bias of (heads, tiles, tiles). Here it is made inside the kernels from the coordinates.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dilated_attention import Dilated, attention
from dilated_attention.bias import Alibi

HEADS, HEAD_DIM = 12, 64


def slopes_of(heads: int) -> Tensor:
    """Return ALiBi's slopes, a geometric sequence from 1/2 to 1/256 for 8 heads."""
    return 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)


def grid(tiles: int) -> Tensor:
    """Return the coordinates of tissue tiles, `(1, tiles, 2)`: half of a square grid, in row-major order."""
    side = int((2 * tiles) ** 0.5) + 1
    chosen = torch.randperm(side * side)[:tiles].sort().values
    return torch.stack((chosen // side, chosen % side), -1)[None]


def with_tiles(tiles: int, compared: bool) -> dict[str, float]:
    """Run attention over the tiles of a slide; `compared`: also with a bias of (heads, tiles, tiles)."""
    q, k, v = (torch.randn(1, tiles, HEADS, HEAD_DIM) for _ in range(3))
    slopes = slopes_of(HEADS)
    places = grid(tiles)
    begin = time.perf_counter()
    out = attention(q, k, v, Dilated([tiles], [1]), bias=Alibi(slopes, places))
    found = {"seconds": time.perf_counter() - begin}
    if not compared:
        return found

    begin = time.perf_counter()
    distance = torch.cdist(places.float(), places.float())
    bias = -slopes[:, None, None] * distance
    expected = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=bias[None])
    found["seconds, with a tensor"] = time.perf_counter() - begin
    found["MB of the tensor"] = bias.numel() * 4 / 1e6
    found["largest difference"] = (out - expected.transpose(1, 2)).abs().max().item()
    return found


def main(tiles: int = 4_000, more: int = 10_000) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    with torch.no_grad():
        return {f"{tiles:,} tiles": with_tiles(tiles, True), f"{more:,} tiles": with_tiles(more, False)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", type=int, default=4_000, help="tiles of the slide that is computed both ways")
    parser.add_argument("--more", type=int, default=10_000, help="tiles of the slide that is computed without a tensor")
    for name, found in main(**vars(parser.parse_args())).items():
        print(name)
        for what, number in found.items():
            print(f"  {what}: {number:.3g}")
