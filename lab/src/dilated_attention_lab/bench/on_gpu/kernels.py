"""Time other tiles of the kernels, in the same rounds as those that ship."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from dilated_attention.plumbing import ARCHITECTURES, Kernel, Shape, triton
from dilated_attention_lab.bench import measure
from dilated_attention_lab.bench.cases import Case, Contender, under
from dilated_attention_lab.bench.on_gpu.speed import serving
from dilated_attention_lab.bench.results import Row

CANDIDATES: dict[Kernel, list[tuple[int, int, int, int]]] = {
    "forward": [(128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 4, 3), (128, 64, 4, 2),
                (128, 32, 8, 3), (64, 128, 4, 3), (64, 128, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (64, 64, 8, 2)],
    "dq": [(128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 4, 2), (128, 32, 8, 2),
           (128, 32, 8, 3), (64, 128, 4, 2), (64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 8, 2), (64, 32, 8, 2)],
    "dkdv": [(128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 32, 8, 3), (128, 32, 8, 2), (64, 128, 8, 2),
             (64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 8, 2), (64, 64, 8, 3), (64, 32, 4, 3), (64, 16, 8, 3)],
}  # fmt: skip
"""Tiles to try, each (own, loop, warps, stages)."""
OF_LISTS = [(own, loop, warps, stages) for own, loop, warps in ((128, 128, 8), (128, 64, 8), (128, 64, 4), (64, 64, 4))
            for stages in (3, 4, 5)]  # fmt: skip
"""The same for a forward over lists of blocks, whose loads need one more stage to run as far ahead."""


def _kind(case: Case) -> dict[str, bool]:
    """Return what a case's shapes of tiles depend on, beyond kernel, dtype and head_dim."""
    return {"has_lists": case.method == "block-sparse", "banded": case.is_causal}


@contextmanager
def shaped(kernel: Kernel, case: Case, device: torch.device, shape: Shape) -> Iterator[None]:
    """Use `shape` instead of the tiles that ship, for this kernel in the calls of a case, in the `with` block."""
    size = getattr(torch, case.dtype).itemsize
    shapes, key = ARCHITECTURES[triton.architecture(device)].shapes_of(kernel, size, **_kind(case)), (kernel, size)
    shipped = shapes[key]
    wide = (case.head_dim > 64) + (case.head_dim > 128)
    shapes[key] = (*shipped[:wide], shape, *shipped[wide + 1 :])  # type: ignore[assignment]
    try:
        yield
    finally:
        shapes[key] = shipped


def tiled(kernel: Kernel, case: Case, device: torch.device) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return the calls with the tiles that ship and with others, each run once; and why others do not run."""
    size, kind = getattr(torch, case.dtype).itemsize, _kind(case)
    architecture = ARCHITECTURES[triton.architecture(device)]
    shipped = architecture.shape(kernel, size, case.head_dim, masked=False, **kind)
    work = case.contender(device, backward=kernel != "forward")
    makers: dict[str, Callable[[], Contender]] = {f"shipped tiles {tuple(shipped)}": lambda: work}
    for shape in (Shape(*x) for x in (OF_LISTS if kind["has_lists"] else CANDIDATES[kernel])):
        if shape != shipped:
            makers[f"tiles {tuple(shape)}"] = partial(under, partial(shaped, kernel, case, device, shape), work)
    return serving(makers)


def compiled(kernel: Kernel, case: Case, device: torch.device) -> Iterator[Row]:
    """Yield how many tile shapes a kernel compiles and runs with, on a case cut to few tokens and, if dilated, heads.

    This leaves the compiled kernels in Triton's cache.
    """
    least = 4096 if case.method == "block-sparse" else max(case.segment_lengths)
    few = replace(case, seq_len=least, heads=max(case.dilation_rates, default=case.heads))
    found, _ = tiled(kernel, few, device)
    yield Row(f"{kernel}: shapes of tiles that compile", case.parameters, float(len(found)), "shapes")


def tile_shapes(kernel: Kernel, case: Case, device: torch.device, budget: float) -> Iterator[Row]:
    """Yield the time of a whole call with each tile shape of this kernel, to choose those in configurations.py."""
    contenders, refused = tiled(kernel, case, device)
    phase, (shipped, *_) = "forward" if kernel == "forward" else "forward+backward", contenders
    rounds = measure.interleave(contenders, seconds=budget, device=device, dtype=getattr(torch, case.dtype))
    for name in contenders:
        over = {} if name == shipped else {shipped: rounds.ratio(name, shipped, phase)}
        spread = rounds.spread(name, phase).scaled(1e3)
        yield Row.of(f"{phase}, {kernel}: {name}", case.parameters, spread, "ms", over=over)
    for name, why in refused.items():
        yield Row(f"{phase}, {kernel}: {name}", case.parameters, None, "ms", refused=why)
