"""Which backend serves a call: one row a backend, and what each row refuses, in words.

The choice rests on facts of the call, never on the environment. `auto` takes `native`: `triton` has not been measured
against it on a GPU yet, and the memory of `reference` is quadratic in the sequence, so both serve on request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dilated_attention.backends import triton
from dilated_attention.errors import BackendError

NAMES = ("native", "triton", "reference")

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Choice:
    """The backend that serves a call, why, and why the others do not."""

    backend: str
    reason: str
    refusals: dict[str, str]


def choose(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    head_dim: int = 64,
    seq_len: int = 1,
    scale: float = 1.0,
) -> Choice:
    """The backend for a call on `device` in `dtype`; `backend` is a name, or "auto".

    Raises BackendError, listing every refusal, when none can serve it.
    """
    if backend not in ("auto", *NAMES):
        raise ValueError(f"backend must be one of {('auto', *NAMES)}; got {backend!r}")
    refusals: dict[str, str] = {}
    if dtype not in _FLOATS:
        refusals["native"] = f"PyTorch's fused attention has no kernel for {dtype}; use float32"
        refusals["reference"] = f"lse and gradients have no place in {dtype}; use float32"
    if backend == "triton" and not torch.compiler.is_compiling():
        why = triton.refusal(device, dtype, head_dim, seq_len, scale)
        refusals.update({} if why is None else {"triton": why})
    if backend != "auto":
        if backend in refusals:
            raise BackendError(f"backend={backend!r} cannot serve this call: {refusals[backend]}")
        return Choice(backend, "asked for by name", refusals)
    refusals.setdefault("triton", "not measured against native on a GPU yet; only on request")
    refusals.setdefault("reference", "quadratic in the sequence; only on request")
    if "native" in refusals:
        raise BackendError("no backend can serve this call: " + "; ".join(f"{n}: {why}" for n, why in refusals.items()))
    return Choice("native", f"PyTorch's fused attention serves {dtype} on {device.type}", refusals)
