"""Which machine code calls need: what they would launch, recorded without a GPU, and compiled in many processes.

Triton compiles a kernel when a call first needs it, one after another. Here calls run on the CPU with launches that are
noted; each distinct one is then compiled into Triton's cache, where the call on the GPU finds it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dilated_attention.backends import triton
from dilated_attention.backends.table import BACKENDS
from dilated_attention.cache import plan_cache

Launch = tuple[Any, dict[str, Any]]
"""A kernel of Triton's, and its arguments by name."""


@dataclass(frozen=True)
class Pointer:
    """What a kernel is compiled for, of a tensor: Triton asks a tensor for no more."""

    dtype: torch.dtype
    aligned: bool

    def data_ptr(self) -> int:
        return 16 if self.aligned else 2


@dataclass(frozen=True)
class Specialization:
    """One machine code: a kernel, as `module.name`, and what of its arguments and options the code depends on."""

    kernel: str
    arguments: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, kernel: Any, arguments: dict[str, Any]) -> Specialization:
        """What a launch is compiled for. The kernels declare that they do not depend on the values of integers, but
        for whether 32 bits hold them."""
        free = {parameter.name for parameter in kernel.params if not parameter.is_constexpr}

        def seen(name: str, x: Any) -> Any:
            if isinstance(x, Tensor):
                return Pointer(x.dtype, x.data_ptr() % 16 == 0)
            if name in free and isinstance(x, int):
                return 2**40 if abs(x) >= 2**31 else 1
            return 0.5 if name in free and isinstance(x, float) else x

        found = tuple(sorted((name, seen(name, x)) for name, x in arguments.items()))
        return cls(f"{kernel.module}.{kernel.__name__}", found)

    def __str__(self) -> str:
        shown = {name: value for name, value in self.arguments if not isinstance(value, Pointer)}
        words = [f"{name}={shown[name]}" for name in ("D", "BM", "BN", "SPANS", "EDGE", "num_stages") if name in shown]
        return f"{self.kernel.rpartition('.')[2]} {' '.join(words)}"


@contextmanager
def recorded(target: str) -> Iterator[list[Launch]]:
    """Calls on CPU tensors are served by the Triton backend as on `target`, and what they launch is listed instead."""
    launches: list[Launch] = []

    def note(kernel: Any, programs: int, **arguments: Any) -> None:
        launches.append((kernel, arguments))

    serving = replace(BACKENDS["triton"], refusal=lambda facts: None)
    plan_cache.clear()  # it has launches that were compiled before
    with ExitStack() as stack:
        stack.enter_context(patch.object(triton, "run", note))
        stack.enter_context(patch.object(triton, "architecture", lambda device: target))
        stack.enter_context(patch.dict(BACKENDS, triton=serving))
        yield launches


def needed(calls: Iterable[Callable[[], object]], target: str) -> list[Specialization]:
    """What calls on CPU tensors need, each once, in the order in which they need it."""
    with recorded(target) as launches:
        for call in calls:
            call()
    return list(dict.fromkeys(Specialization.of(*launch) for launch in launches))


# ---- compiling


@dataclass(frozen=True)
class Compiled:
    """How long it took, in seconds of all processors, or why it failed."""

    specialization: Specialization
    seconds: float
    why: str | None = None


class NoDevice:
    """What Triton asks of a driver before it compiles: compiling touches no GPU."""

    def __init__(self, target: str) -> None:
        from dilated_attention_bench.compile_ahead import TARGETS  # needs Triton, which the other suites do not

        self._target = TARGETS[target]

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_all(found: Sequence[Specialization], target: str, jobs: int) -> Iterator[Compiled]:
    """Compile into Triton's cache, in `jobs` processes; the largest head_dims, which take longest, first."""
    ordered = sorted(found, key=lambda x: -dict(x.arguments).get("D", 0))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_without_device, initargs=(target,)) as pool:
        yield from pool.map(compile_one, ordered)


def processes() -> int:
    """As many as there are cores, but for two: this one and the compiler's own children want some."""
    return max(1, len(os.sched_getaffinity(0)) - 2)


def _without_device(target: str) -> None:
    from triton.runtime.driver import driver

    driver.set_active(NoDevice(target))


def compile_one(specialization: Specialization) -> Compiled:
    """In this process, whose driver has been replaced."""
    from triton.errors import TritonError

    begin = _processor_seconds()
    module, _, name = specialization.kernel.rpartition(".")
    try:
        kernel = getattr(import_module(module), name)
        _build_launcher(kernel.run(grid=(1,), warmup=True, **dict(specialization.arguments)))
    except (RuntimeError, ValueError, TypeError, AssertionError, LookupError, TritonError) as error:
        first = (str(error).strip() or "?").splitlines()[0]
        return Compiled(specialization, _processor_seconds() - begin, f"{type(error).__name__}: {first}")
    return Compiled(specialization, _processor_seconds() - begin)


def _build_launcher(compiled: Any) -> None:
    """Up to 3.6 Triton also compiles C for every signature, on its first launch; for that it needs the driver's
    library."""
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher") and torch.version.cuda and torch.cuda.is_available():
        driver.CudaLauncher(compiled.src, compiled.metadata)


def _processor_seconds() -> float:
    """Of this process and of the children that it has waited for: ptxas, and up to Triton 3.6 a C compiler."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
