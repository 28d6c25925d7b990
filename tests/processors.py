"""Let a test have the facts of another processor: choices and graphs follow them, and kernels run what this one has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dilated_attention import plan_cache
from dilated_attention.backends import cpu
from dilated_attention.backends.cpu import Processor

PROCESSORS = {
    "AVX2": Processor(arm64=False, highest=1),
    "AVX-512": Processor(arm64=False, highest=cpu.AVX512),
    "AVX-512 with bfloat16": Processor(arm64=False, highest=cpu.AMX - 1),
    "AMX": Processor(arm64=False, highest=cpu.AMX, has_amx=True),
    "AMX without tiles": Processor(arm64=False, highest=cpu.AMX - 1, has_amx=True),
    "NEON": Processor(arm64=True, highest=1),
    "NEON with bfloat16": Processor(arm64=True, highest=2),
}

by_name = pytest.mark.parametrize("processor", PROCESSORS)
by_name_in_a_graph = pytest.mark.parametrize(
    "processor", ["AMX", *[pytest.param(name, marks=pytest.mark.thorough) for name in PROCESSORS if name != "AMX"]]
)
"""For tests that compile for seconds. `test_processors.py` compiles some calls for each processor."""


def pretend(name: str, put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Put the processor of this name in the place of the machine's; `put` may be `monkeypatch.setattr`."""
    put(cpu, "PROCESSOR", PROCESSORS[name])
    put(cpu, "_run", _run)
    plan_cache.clear()  # which knows what was chosen for calls


def _run(kernel: str, kind: int, instructions: int, call: Any) -> None:
    run(kernel, kind, MACHINE.set_of(list(cpu.TYPES)[kind]), call)


MACHINE, run = cpu.PROCESSOR, cpu._run
