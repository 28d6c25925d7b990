"""Which backend serves a call: one row a backend, and what each row refuses, in words.

The choice rests on facts of the call, never on the environment. `auto` takes `native` unless `triton` was measured to
be faster: `TRITON_FROM` says from which work on. `flash` needs a package that is not required, and the memory of
`reference` is quadratic in the sequence, so both serve on request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dilated_attention.backends import flash, triton
from dilated_attention.errors import BackendError

NAMES = ("native", "triton", "flash", "reference")

TRITON_FROM: dict[str, int] = {}
"""Score entries times head_dim from which on `auto` takes triton, by architecture as in kernels/configurations.py.

Empty: nothing has been measured on a GPU yet. `dilated-attention bench gpu` writes the value to enter here, the least
work from which on triton was faster than native, to results/<device>/gpu.jsonl.
"""

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Choice:
    """The backend that serves a call, why, and why the others do not."""

    backend: str
    reason: str
    refusals: dict[str, str]


def plainly_native(backend: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `choose` takes native whatever else is asked. Its reasons would be a quarter of a small call's
    overhead."""
    return backend == "auto" and device.type == "cpu" and dtype in _FLOATS


def choose(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    head_dim: int = 64,
    seq_len: int = 1,
    needs: Sequence[str] = (),
    work: int = 0,
) -> Choice:
    """The backend for a call on `device` in `dtype`; `backend` is a name, or "auto".

    Args:
        needs: what the call asks for beyond q, k, v and causality: "key_padding_mask", "dropout_p", "a block layout".
        work: about how many score entries the call has, times head_dim.

    Raises BackendError, listing every refusal, when none can serve it.
    """
    if backend not in ("auto", *NAMES):
        raise ValueError(f"backend must be one of {('auto', *NAMES)}; got {backend!r}")
    refusals: dict[str, str] = {}
    if dtype not in _FLOATS:
        refusals["native"] = f"PyTorch's fused attention has no kernel for {dtype}; use float32"
        refusals["reference"] = f"lse and gradients have no place in {dtype}; use float32"
    eager = not torch.compiler.is_compiling()  # what the next lines ask cannot be traced
    least = TRITON_FROM.get(triton.architecture(device)) if eager and device.type == "cuda" else None
    if eager and (backend == "triton" or (backend == "auto" and least is not None)):
        why = triton.refusal(device, dtype, head_dim, seq_len)
        refusals.update({} if why is None else {"triton": why})
    if eager and backend == "flash":
        why = flash.refusal(device, dtype, head_dim, needs)
        refusals.update({} if why is None else {"flash": why})
    if backend != "auto":
        if backend in refusals:
            raise BackendError(f"backend={backend!r} cannot serve this call: {refusals[backend]}")
        return Choice(backend, "asked for by name", refusals)
    refusals.setdefault("flash", "not required to be installed; only on request")
    refusals.setdefault("reference", "quadratic in the sequence; only on request")
    if least is not None and work >= least and "triton" not in refusals:
        refusals.setdefault("native", f"slower than triton from {least:.3g} score entries times head_dim on")
        return Choice("triton", f"{work:.3g} score entries times head_dim, at least {least:.3g}", refusals)
    measured = "not measured against native on this device yet; only on request"
    refusals.setdefault("triton", measured if least is None else f"native is faster below {least:.3g}; got {work:.3g}")
    if "native" in refusals:
        raise BackendError("no backend can serve this call: " + "; ".join(f"{n}: {why}" for n, why in refusals.items()))
    return Choice("native", f"PyTorch's fused attention serves {dtype} on {device.type}", refusals)
