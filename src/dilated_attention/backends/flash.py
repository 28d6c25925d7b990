"""Give FlashAttention's operators the signature of `fused`, if one of its packages is installed. None is required.

FlashAttention reads rows at any stride that is a multiple of 16 bytes, so most of the native backend's views need no
copy. Its backward takes the merged out and lse, and is deterministic if `torch.use_deterministic_algorithms` asks for
it. It has no mask except the causal one, and its dropout differs from this library's. Calls that need other masks or
dropout are refused.

The signatures are those of flash-attn 2.7 and later, of flash-attn-3 (hopper/) and of flash-attn-4
(flash_attn.cute). Tests use stand-ins with these signatures. Nothing has run on a GPU yet; see results/README.md.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dilated_attention.backends import fused
from dilated_attention.backends.facts import Facts
from dilated_attention.backends.fused import Keys, Merged, Queries, Scores, Statistic, aligned, append_column
from dilated_attention.errors import BackendError

MODULES = {
    2: "flash_attn.flash_attn_interface",
    3: "flash_attn_interface",
    4: "flash_attn.cute.interface",
}
MAX_HEAD_DIM = 256


def order(capability: tuple[int, int]) -> tuple[int, ...]:
    """Return the versions of FlashAttention that support a compute capability, the preferred one first."""
    if capability < (8, 0):
        return ()
    return {9: (3, 4, 2), 10: (4, 2)}.get(capability[0], (2,))


def refusal(facts: Facts) -> str | None:
    """Return why FlashAttention cannot serve a call, and what would serve it; None if it can.

    While torch.compile traces a call, this returns None for any call. `_library` then refuses it when the graph runs.
    """
    if torch.compiler.is_compiling():  # the next lines cannot be traced; `_library` calls this when the call runs
        return None
    if facts.device.type != "cuda":
        return f"FlashAttention needs a CUDA device; got {facts.device.type}"
    capability = torch.cuda.get_device_capability(facts.device)
    if version(capability) is None:
        wanted = " or ".join(MODULES[number] for number in order(capability)) or "compute capability 8.0"
        return f"FlashAttention needs {wanted} on this device of capability {capability[0]}.{capability[1]}; not found"
    if facts.dtype not in (torch.float16, torch.bfloat16):
        return f"FlashAttention has no {facts.dtype}; use float16 or bfloat16"
    if facts.head_dim % 8 or facts.head_dim > MAX_HEAD_DIM:
        return f"FlashAttention needs a head_dim that 8 divides, at most {MAX_HEAD_DIM}; got {facts.head_dim}"
    if facts.needs:
        return f"FlashAttention does not serve {' or '.join(facts.needs)}; use native or triton"
    return None


@cache
def version(capability: tuple[int, int]) -> int | None:
    """Return the preferred version of FlashAttention that is installed and supports a compute capability; None if none
    is."""
    return next((number for number in order(capability) if _installed(MODULES[number])), None)


def _installed(module: str) -> bool:
    parent = module.rpartition(".")[0]
    return (not parent or _installed(parent)) and importlib.util.find_spec(module) is not None


def forward(scores: Scores, q: Queries, k: Keys, v: Keys) -> tuple[Queries, Statistic]:
    """Compute the same as `fused.forward`, for scores without bias, dropout and softcap."""
    is_causal, scale, bias, pairs, _ = scores
    assert bias is pairs is None
    number, module = _library(q)
    views = [aligned(x).transpose(1, 2) for x in (q, k, v)]
    if number == 2:
        out, lse = module._flash_attn_forward(
            *views, dropout_p=0.0, softmax_scale=scale, causal=is_causal, window_size_left=-1, window_size_right=-1,
            softcap=0.0, alibi_slopes=None, return_softmax=False,
        )[:2]  # fmt: skip
    elif number == 3:
        out, lse = module._flash_attn_forward(*views, softmax_scale=scale, causal=is_causal)[:2]
    else:
        out, lse = module._flash_attn_fwd(*views, softmax_scale=scale, causal=is_causal, return_lse=True)[:2]
    return out.transpose(1, 2), lse


def backward(scores: Scores, merged: Merged, q: Queries, k: Keys, v: Keys) -> tuple[Queries, Keys, Keys]:
    """Compute the same as `fused.backward`, for scores without bias, dropout and softcap."""
    is_causal, scale, bias, pairs, _ = scores
    assert bias is pairs is None
    head_dim = q.shape[-1]
    if merged.dlse is not None and head_dim + 8 > MAX_HEAD_DIM:
        return fused.backward(scores, merged, q, k, v)
    number, module = _library(q)
    merged, q, k, v = append_column(merged, q, k, v, 8)
    dout, q, k, v, out = (aligned(x).transpose(1, 2) for x in (merged.dout, q, k, v, merged.out))
    lse, deterministic = merged.lse.contiguous(), torch.are_deterministic_algorithms_enabled()
    if number == 4:
        gradients = module._flash_attn_bwd(
            q, k, v, out, dout, lse, softmax_scale=scale, causal=is_causal, deterministic=deterministic
        )[:3]
    else:
        gradients = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        if number == 2:
            module._flash_attn_backward(
                dout, q, k, v, out, lse, *gradients, dropout_p=0.0, softmax_scale=scale, causal=is_causal,
                window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=deterministic,
            )  # fmt: skip
        else:  # releases call its last argument causal and is_causal
            module._flash_attn_backward(
                dout, q, k, v, out, lse, *(None,) * 6, *gradients, scale, is_causal, deterministic=deterministic
            )
    dq, dk, dv = (x.transpose(1, 2)[..., :head_dim] for x in gradients)
    return dq, dk, dv


def _library(q: Tensor) -> tuple[int, Any]:
    why = refusal(Facts(q.device, q.dtype, q.shape[-1]))  # a compiled call is not refused before it runs
    if why is not None:
        raise BackendError(f"backend='flash' cannot serve this call: {why}")
    number = version(torch.cuda.get_device_capability(q.device))
    assert number is not None, "or it was refused"
    return number, importlib.import_module(MODULES[number])
