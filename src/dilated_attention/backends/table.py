"""Which backend serves a call: one row a backend, and what each row refuses, in words.

The choice rests on facts of the call (device, dtype, head_dim), never on the environment. `auto` takes the first row
that refuses nothing; `reference` is never chosen by itself, since its memory is quadratic in the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dilated_attention.errors import BackendError

NAMES = ("native", "reference")
"""In the order in which `auto` prefers them."""

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Choice:
    """The backend that serves a call, why, and why the others do not."""

    backend: str
    reason: str
    refusals: dict[str, str]


def _native(device: torch.device, dtype: torch.dtype) -> str | None:
    if dtype not in _FLOATS:
        return f"PyTorch's fused attention has no kernel for {dtype}; use float32"
    return None


def _reference(device: torch.device, dtype: torch.dtype) -> str | None:
    return None if dtype in _FLOATS else f"lse and gradients have no place in {dtype}; use float32"


def choose(backend: str, device: torch.device, dtype: torch.dtype) -> Choice:
    """The backend for a call on `device` in `dtype`; `backend` is a name, or "auto".

    Raises BackendError, listing every refusal, when none can serve it.
    """
    if backend not in ("auto", *NAMES):
        raise ValueError(f"backend must be one of {('auto', *NAMES)}; got {backend!r}")
    found = {"native": _native(device, dtype), "reference": _reference(device, dtype)}
    refusals = {name: why for name, why in found.items() if why is not None}
    if backend == "auto":
        refusals.setdefault("reference", "quadratic in the sequence; only on request")
        if "native" in refusals:
            raise BackendError(
                "no backend can serve this call: " + "; ".join(f"{n}: {why}" for n, why in refusals.items())
            )
        return Choice("native", f"PyTorch's fused attention serves {dtype} on {device.type}", refusals)
    if backend in refusals:
        raise BackendError(f"backend={backend!r} cannot serve this call: {refusals[backend]}")
    return Choice(backend, "asked for by name", refusals)
