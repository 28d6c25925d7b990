"""Rotary positions."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor


def rotary_tables(
    positions: Int[Tensor, "*batch seq"], head_dim: int, base: float = 10_000.0, dtype: torch.dtype = torch.float32
) -> tuple[Float[Tensor, "*batch seq 1 head_dim"], Float[Tensor, "*batch seq 1 head_dim"]]:
    """cos and signed sin of p / base^(2i / head_dim), for `rotate` (RoFormer, Su et al. 2021).

    The angles are formed and reduced in float64: at position 2^30 a float32 angle is off by whole turns.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim}: rotary positions turn pairs of channels, so it must be even")
    device = positions.device
    exact = positions.to("cpu" if device.type == "mps" else device).to(torch.float64)  # MPS has no float64
    inverse = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=exact.device) / head_dim)
    angle = torch.remainder(exact[..., None, None] * inverse, 2 * math.pi)
    cos, sin = angle.cos().to(device, dtype), angle.sin().to(device, dtype)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate(
    x: Float[Tensor, "batch seq heads head_dim"], tables: tuple[Tensor, Tensor]
) -> Float[Tensor, "batch seq heads head_dim"]:
    """Turn channel pairs (i, i + head_dim / 2) of x by the angles of `rotary_tables`; computed in at least float32.

    <rotate(q, m), rotate(k, n)> depends on m - n only.
    """
    cos, sin = tables
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)
