"""The kernels one by one, by the device's own clock: tiles, the order of tables, and the candidate for Hopper."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dilated_attention.backends import tiles, triton
from dilated_attention.backends.problem import Problem
from dilated_attention.cache import plan_cache
from dilated_attention.kernels.configurations import ARCHITECTURES, Kernel, Shape
from dilated_attention.verification import relative_error
from dilated_attention_bench import measure
from dilated_attention_bench.cases import Case, Contender, contender
from dilated_attention_bench.groups import failures, reason_of
from dilated_attention_bench.measure import Spread
from dilated_attention_bench.on_gpu import ONE_KERNEL, contender_of, launching
from dilated_attention_bench.results import Row
from dilated_attention_bench.suites import rates

CANDIDATES: dict[Kernel, list[tuple[int, int, int, int]]] = {
    "forward": [(128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 4, 3), (128, 64, 4, 2),
                (128, 32, 8, 3), (64, 128, 4, 3), (64, 128, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (64, 64, 8, 2)],
    "dq": [(128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 4, 2), (128, 32, 8, 2),
           (128, 32, 8, 3), (64, 128, 4, 2), (64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 8, 2), (64, 32, 8, 2)],
    "dkdv": [(128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 32, 8, 3), (128, 32, 8, 2), (64, 128, 8, 2),
             (64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 8, 2), (64, 64, 8, 3), (64, 32, 4, 3), (64, 16, 8, 3)],
    "dqdkdv": [(128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 2), (128, 32, 8, 3), (64, 128, 8, 2), (64, 64, 8, 2),
               (64, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 8, 3), (64, 32, 4, 3), (32, 32, 8, 2)],
}  # fmt: skip
"""Tiles to try: own, loop, warps, stages."""
OF_LISTS = [(own, loop, warps, stages) for own, loop, warps in ((128, 128, 8), (128, 64, 8), (128, 64, 4), (64, 64, 4))
            for stages in (3, 4, 5)]  # fmt: skip
"""The same of a forward over lists of blocks, whose loads take a stage more to run as far ahead."""
ROUNDS = 12
FUNCTIONS = {"forward": "forward", "dq": "backward_dq", "dkdv": "backward_dkdv", "dqdkdv": "backward_dkdv"}


@contextmanager
def shaped(kernel: Kernel, case: Case, device: torch.device, shape: Shape) -> Iterator[None]:
    """The kernels of a case with other tiles than those that ship."""
    architecture, key = ARCHITECTURES[triton.architecture(device)], (kernel, getattr(torch, case.dtype).itemsize)
    has_lists = case.method == "block-sparse" and key in architecture.of_lists
    shapes = architecture.of_lists if has_lists else architecture.shapes
    shipped = shapes[key]
    wide = (case.head_dim > 64) + (case.head_dim > 128)
    shapes[key] = (*shipped[:wide], shape, *shipped[wide + 1 :])  # type: ignore[assignment]
    try:
        yield
    finally:
        shapes[key] = shipped


@contextmanager
def clocked(kernel: Kernel) -> Iterator[list[tuple[Any, Any]]]:
    """CUDA events around each launch of a kernel, in order."""
    events = []

    def under_events(launch: Callable[..., Any]) -> Callable[..., Any]:
        def run(function: Any, *arguments: Any, **options: Any) -> Any:
            if (getattr(function, "name", None) or function.__name__) != FUNCTIONS[kernel]:
                return launch(function, *arguments, **options)
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            compiled = launch(function, *arguments, **options)
            pair[1].record()
            events.append(pair)
            return compiled

        return run

    with (
        patch.object(triton, "run", under_events(triton.run)),
        patch.object(triton, "again", under_events(triton.again)),
    ):
        yield events


def occupy(device: torch.device) -> None:
    """Give a GPU most of a millisecond's work while the host queues a launch: events on an idle one time the host."""
    if device.type == "cuda":
        torch.empty(1 << 31, dtype=torch.uint8, device=device).zero_()


def alone(kernel: Kernel, work: Contender, device: torch.device) -> float:
    """Milliseconds of a kernel's launches in one call, without what runs between them."""
    occupy(device)
    with clocked(kernel) as events:
        list(work())
    measure.synchronize(device)
    return sum(begin.elapsed_time(end) for begin, end in events)


def ways(
    kernel: Kernel, ways_: Mapping[str, Callable[[], Any]], case: Case, device: torch.device, *, warm: bool = False
) -> Iterator[Row]:
    """The time of a kernel alone under each context, and over that under the first, in rounds of another order each.

    `warm`: whether each context takes a call before the one that is timed, since it makes the tables anew.
    """
    name = ONE_KERNEL if kernel == "dqdkdv" else "triton"
    work = case.contender(device) if kernel == "forward" else contender_of(name, case, device)
    milliseconds: dict[str, list[float]] = {}
    for way, context in ways_.items():
        try:
            with context():
                alone(kernel, work, device)
            milliseconds[way] = []
        except failures() as error:
            yield Row(f"{kernel} alone: {way}", case.parameters, None, "ms", refused=reason_of(error))
    order = random.Random(0)
    for _ in range(ROUNDS):
        for way in order.sample([*milliseconds], len(milliseconds)):
            with ways_[way]():
                if warm:
                    list(work())
                milliseconds[way].append(alone(kernel, work, device))
    first, *_ = ways_
    for way, found in milliseconds.items():
        over = {first: Spread.of_ratios(found, milliseconds[first])} if way != first and first in milliseconds else {}
        yield Row.of(f"{kernel} alone: {way}", case.parameters, Spread.of(found), "ms", over=over)


def tile_ways(kernel: Kernel, case: Case, device: torch.device) -> dict[str, Callable[[], Any]]:
    """The tiles that ship, and the others to try."""
    size = getattr(torch, case.dtype).itemsize
    has_lists = case.method == "block-sparse"
    shipped = ARCHITECTURES[triton.architecture(device)].shape(
        kernel, size, case.head_dim, masked=False, has_lists=has_lists
    )
    found: dict[str, Callable[[], Any]] = {f"shipped tiles {tuple(shipped)}": nullcontext}
    for shape in (Shape(*x) for x in (OF_LISTS if has_lists else CANDIDATES[kernel])):
        if shape != shipped:
            found[f"tiles {tuple(shape)}"] = partial(shaped, kernel, case, device, shape)
    return found


def tile_shapes(kernel: Kernel, case: Case, device: torch.device) -> Iterator[Row]:
    """What to enter in configurations.py."""
    yield from ways(kernel, tile_ways(kernel, case, device), case, device)


def tile_launches(kernel: Kernel, case: Case) -> list[Callable[[], object]]:
    """The calls of `tile_shapes`, to be recorded."""
    device = torch.device("cpu")
    plain = launching(case, ONE_KERNEL if kernel == "dqdkdv" else "triton", backward=kernel != "forward")

    def call() -> None:
        for context in tile_ways(kernel, case, device).values():
            with context():
                plain()

    return [call]


def orders(case: Case, device: torch.device) -> Iterator[Row]:
    """Tables in the order of heads and segments, whose keys stay in L2, beside the heaviest tiles first."""

    @contextmanager
    def heaviest_first() -> Iterator[None]:
        plan_cache.clear()
        with patch.object(tiles, "by_head", tiles.heaviest_first):
            yield
        plan_cache.clear()

    contexts: dict[str, Callable[[], Any]] = {"by head and segment": nullcontext, "heaviest first": heaviest_first}
    yield from ways("forward", contexts, case, device, warm=True)


def gluon(case: Case, device: torch.device, budget: float) -> Iterator[Row]:
    """The forward of hopper.py: how far from triton's numbers, then its time over triton's in the same rounds."""
    from dilated_attention_bench import hopper

    q, k, v = case.inputs(device)[0]
    plan, scale = case.plan, case.head_dim**-0.5
    calls: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "gluon": hopper.prepare(q, k, v, plan, scale),
        "triton": partial(triton.forward, Problem(plan, False, scale), q, k, v),
    }
    for name, x, y in zip(("out", "lse"), *(call() for call in calls.values()), strict=True):
        title = f"{name}: relative difference of the candidate in Gluon from triton"
        yield Row(title, case.parameters, relative_error(x.double(), y.double()), "", bar=1e-2)
    contenders = {name: contender(call) for name, call in calls.items()}
    rounds = measure.interleave(contenders, seconds=budget, device=device, dtype=getattr(torch, case.dtype))
    ratio, useful = rounds.ratio("gluon", "triton"), rates(rounds, "forward", dict.fromkeys(calls, case.flops))
    yield Row.of("forward: the candidate in Gluon over triton", case.parameters, ratio, rates=useful)
