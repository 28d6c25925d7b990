"""Run the C++ kernels on an emulated arm64 processor, and all else on this one: a plugin of pytest (emulate_arm64.py).

It puts an object in place of the library that ctypes would load. For each call the object sends the structure and the
bytes of its tensors to a server, emulated_arm64.cpp, and copies back what the kernel may have written.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

WRITTEN_BY_KERNEL = (("out", "lse"), ("stats",), ("dq",), ("dq", "dk", "dv"))  # as cpu.KERNELS numbers them
WRITTEN = {"estimate": ("out", "values", "places"), "transpose": ("to",)}
TEXTS = ("sources", "call_fields")
SHARES = 3  # the estimate whose first key may lie before the others (estimate.h)

process: subprocess.Popen[bytes] | None = None
one_at_a_time = threading.Lock()
this_call = threading.local()  # .tensors: by the names of the structure's fields


def buffers(function: str, arguments: list[int], call: ctypes.Structure | None) -> Iterator[tuple[int, ...]]:
    """Return for each pointer that is not null: its offset in the arguments, behind which the structure lies, the bytes
    of its buffer before its target, address and size of the buffer, and whether a kernel may write it.

    The buffer is the pointer's tensor, from the first element to the last.
    """
    if call is None:
        pointers = [(8 * i, name, arguments[i]) for i, name in enumerate(("indptr", "indices", "starts", "to"))]
    else:
        fields = [name for name, kind in call._fields_ if kind is ctypes.c_void_p]
        pointers = [(64 + getattr(type(call), name).offset, name, getattr(call, name)) for name in fields]
    results = WRITTEN_BY_KERNEL[arguments[0]] if function == "run" else WRITTEN[function]
    for offset, name, address in pointers:
        if not address:
            continue
        x = this_call.tensors[name]
        assert x.data_ptr() == address, f"{name} points elsewhere"
        last = sum((length - 1) * stride for length, stride in zip(x.shape, x.stride(), strict=True))
        is_shares = (function, arguments[0], name) == ("estimate", SHARES, "k")
        before = call.first * x.element_size() if is_shares else 0
        size = before + (last + 1) * x.element_size() if x.numel() else 0
        yield offset, before, address - before, size, name in results


def ask(function: str, *arguments: Any) -> int | bytes:
    """Call a function of the library on the emulated processor, with arguments as ctypes takes them."""
    global process
    numbers = [getattr(x, "value", x) or 0 for x in arguments if not hasattr(x, "_obj")]
    call = arguments[-1]._obj if function in ("run", "estimate") else None
    structure, found = b"" if call is None else bytes(call), []
    if arguments:
        found = list(buffers(function, numbers, call))
        spans = sorted((address, address + size, written) for _, _, address, size, written in found)
        assert all(x[1] <= y[0] or not (x[2] or y[2]) for x, y in pairwise(spans)), "a result is also an argument"
    with one_at_a_time:
        if process is None or process.poll() is not None:  # a call ended it
            command = os.environ["EMULATED_ARM64"].split()
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        name = f"dilated_attention_{function}".encode()
        eight = numbers + [0] * (8 - len(numbers))
        process.stdin.write(struct.pack("64s11q", name, *eight, function in TEXTS, len(structure), len(found)))
        process.stdin.write(structure)
        for offset, before, address, size, written in found:
            process.stdin.write(struct.pack("4q", offset, before, size, written))
            process.stdin.write(ctypes.string_at(address, size))
        process.stdin.flush()
        (result,) = struct.unpack("q", receive(8))
        if function in TEXTS:
            return receive(result)
        for _, _, address, size, written in found:
            if written:
                ctypes.memmove(address, receive(size), size)
    return result


def receive(size: int) -> bytes:
    """Read from the server; AssertionError if a call has ended it."""
    found = process.stdout.read(size)
    if len(found) < size:
        process.communicate()
        raise AssertionError(f"the call ended the emulated process, with code {process.returncode}")
    return found


class Library(ctypes.CDLL):
    """Stand where ctypes.CDLL does: emulate the kernels, load other libraries."""

    def __init__(self, name: str | None, *arguments: Any, **options: Any) -> None:
        emulated = name is not None and Path(name).name == "kernels.so"
        super().__init__(None if emulated else name, *arguments, **options)
        if emulated:
            for function in ("instruction_set", "has_amx", "has_pool", "run", *TEXTS, *WRITTEN):
                setattr(self, f"dilated_attention_{function}", partial(ask, function))


ctypes.CDLL, platform.machine = Library, lambda: "aarch64"  # PyTorch was imported before, and saw neither


def pytest_collection_finish() -> None:
    """Keep the tensors of each call where `buffers` finds them."""
    import test_cpu_kernels
    from dilated_attention.backends import cpu
    from dilated_attention.kernels.cpu import estimates, lists

    def keep(module: Any, name: str, tensors_of: Callable[..., dict[str, Any]]) -> None:
        function = getattr(module, name)

        def call(*arguments: Any, **fields: Any) -> None:
            outer = getattr(this_call, "tensors", None)  # a launch's lists may be transposed inside `cpu.run`
            this_call.tensors = tensors_of(*arguments, **fields)
            function(*arguments, **fields)
            this_call.tensors = outer

        setattr(module, name, call)

    def of_lists(indptr: Tensor, indices: Tensor, starts: Tensor | None, to: Tensor, columns: int) -> dict[str, Any]:
        return {"indptr": indptr.contiguous(), "indices": indices.contiguous(), "starts": starts, "to": to}

    keep(cpu, "run", lambda kernel, arguments, launch: arguments.tensors)
    keep(estimates, "_run", lambda estimator, q, k, **fields: {"q": q, "k": k, **fields})
    keep(lists, "_run", of_lists)
    # The server does it in every call. Computing with NaN takes the emulator three seconds per test.
    test_cpu_kernels.leave_nan_in_the_memory_of_threads = lambda: None


def pytest_unconfigure() -> None:
    """End the server."""
    if process is not None:
        process.communicate()
