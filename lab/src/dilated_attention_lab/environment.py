"""Describe the machine of a measurement: device, versions, memory."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from dilated_attention import BackendError
from dilated_attention.plumbing import Facts, table
from dilated_attention_lab.version import own_version

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def environment(device: torch.device | str = "cpu") -> dict[str, str | int]:
    """Return the facts about machine and versions that are recorded with each measurement."""
    return {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "dilated_attention": own_version(),
    }


def device_name(device: torch.device | str = "cpu") -> str:
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu" and sys.platform == "linux":
        wanted = r"^(model name|cpu family|flags)\s*: (.*)$"
        facts = dict(re.findall(wanted, Path("/proc/cpuinfo").read_text(), re.MULTILINE))
        if name := facts.get("model name"):  # several generations share one name
            flags = facts.get("flags", "").split()
            generation = ""
            if "avx512f" not in flags:
                generation = " without AVX-512"
            elif facts.get("cpu family") == "25":
                generation = " (Zen 4)"
            elif "Intel" in name and "amx_tile" not in flags:
                generation = " without AMX"
            return f"{name.strip()}{generation}, {os.cpu_count()} cores"
    return f"{platform.processor() or platform.machine()} ({device.type}), {os.cpu_count()} cores"


def peak_memory(device: torch.device | str = "cpu") -> int | None:
    """Return the peak bytes of this process, resident or allocated on a GPU by PyTorch; None for the CPU on Windows."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":  # not getrusage: its maximum is inherited from the process that started this one
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def memory(device: torch.device | str = "cpu") -> int | None:
    """Return the bytes of memory of this machine, or of the GPU. None if the system does not say."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def require_device(name: str) -> torch.device:
    """Return the device of this name. Raises ValueError unless PyTorch can use it here."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r}: {str(error).splitlines()[0]}") from None
    if device.type != "cpu" and (why := unavailable(device.type)):
        raise ValueError(f"device={name!r}: {why}; use 'cpu'")
    return device


def unavailable(device_type: str) -> str | None:
    """Return why PyTorch cannot use an accelerator here, or None if it can."""
    if device_type == "cuda":
        if torch.cuda.is_available():
            return None
        return "no usable GPU" if torch.version.cuda or torch.version.hip else "this PyTorch is built without CUDA"
    if device_type == "mps":
        if torch.backends.mps.is_available():
            return None
        return "no usable GPU" if torch.backends.mps.is_built() else "this PyTorch is built without MPS"
    return f"{device_type} is not supported"


def report() -> str:
    """Return a text with versions and devices, and what each backend serves on each device, or why it does not."""
    facts = environment()
    lines = [
        f"dilated-attention  {facts['dilated_attention']}",
        f"PyTorch            {facts['torch']}, {facts['threads']} threads",
        f"Python             {facts['python']}, {facts['platform']}",
    ]
    for device_type in ("cpu", "cuda", "mps"):
        why = None if device_type == "cpu" else unavailable(device_type)
        lines.append(f"\n{device_type}: {'not available: ' + why if why else device_name(device_type)}")
        if not why:
            lines += [f"  {line}" for name in table.BACKENDS for line in _backend(name, torch.device(device_type))]
    return "\n".join(lines)


def _backend(name: str, device: torch.device) -> Iterator[str]:
    served: list[str] = []
    refused: dict[str, None] = {}
    for dtype in DTYPES:
        try:
            table.choose(name, Facts(device, dtype))
            served.append(str(dtype).removeprefix("torch."))
        except BackendError as error:
            refused[str(error)] = None
    yield f"{name:<10} " + (f"available for {', '.join(served)}" if served else "not available")
    for why in refused:
        yield f"{'':<10} refused: {why}"
    said: dict[tuple[str, str], list[str]] = {}
    for word in served:
        try:
            auto = table.choose("auto", Facts(device, getattr(torch, word)))
        except BackendError:
            continue
        taken = auto.backend.name == name
        key = ("chosen by auto", auto.reason) if taken else ("not chosen by auto", auto.refusals[name])
        said.setdefault(key, []).append(word)
    for (verdict, reason), words in said.items():
        which = f" for {', '.join(words)}" if len(said) > 1 else ""
        yield f"{'':<10} {verdict}{which}: {reason}"
