"""Encode positions: rotary, xPos, and the fixed sines of a point on a grid."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from dilated_attention import checks

Tables = tuple[Tensor, ...]
"""The tables that `rotate` takes: (cos, sin), or (cos, sin, key_cos, key_sin) if those of queries and keys differ."""


def rotary_tables(
    positions: Int[Tensor, "*batch seq"], head_dim: int, base: float = 10_000.0, dtype: torch.dtype = torch.float32
) -> tuple[Float[Tensor, "*batch seq 1 head_dim"], Float[Tensor, "*batch seq 1 head_dim"]]:
    """Return the cosines and sines of the angles p / base^(2i / head_dim), for `rotate` (RoFormer, Su et al. 2021).

    p is a position and i numbers the channel pairs. The sines of the first head_dim / 2 channels are negated, as
    `rotate` needs them.

    The angles are computed and reduced in float64: at position 2^30 a float32 angle is off by whole turns.

    Examples:
        >>> from dilated_attention.nn import rotary_tables
        >>> cos, sin = rotary_tables(torch.arange(16), head_dim=8)
        >>> cos.shape
        torch.Size([16, 1, 8])
        >>> torch.allclose(cos**2 + sin**2, torch.ones(16, 1, 8))
        True
    """
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim}: rotary positions turn pairs of channels, so it must be even")
    device = positions.device
    exact = _exact(positions)
    inverse = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=exact.device) / head_dim)
    angle = torch.remainder(exact[..., None, None] * inverse, 2 * math.pi)
    cos = angle.cos().to(device, dtype)
    sin = angle.sin().to(device, dtype)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate(x: Float[Tensor, "batch seq heads head_dim"], tables: Tables) -> Float[Tensor, "batch seq heads head_dim"]:
    """Rotate channel pairs (i, i + head_dim / 2) of x by the angles of `tables`, (cos, sin) from `rotary_tables`.

    It computes in the wider dtype of x and the tables, and returns the dtype of x. The product of a query rotated to
    position m and a key rotated to position n depends on m - n only.

    Examples:
        >>> from dilated_attention.nn import rotary_tables, rotate
        >>> q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)
        >>> at = {p: rotary_tables(torch.tensor([p]), head_dim=8) for p in (0, 3, 100, 103)}
        >>> near, far = (rotate(q, at[p + 3]) * rotate(k, at[p]) for p in (0, 100))
        >>> torch.allclose(near.sum(), far.sum(), atol=1e-4)  # both are 3 tokens apart
        True
    """
    cos, sin = tables
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Rotary:
    """Describe a model's rotary positions; with `scale_base`, xPos (Sun et al. 2022, arXiv:2212.10554).

    xPos multiplies channel pair i of a query at position m by zeta_i^((m - origin) / scale_base), and of a key at
    position n by zeta_i^((origin - n) / scale_base), where zeta_i = (2i / head_dim + 0.4) / 1.4 <= 1. For any origin,
    the product of query and key decays as zeta_i^((m - n) / scale_base) with the distance to an earlier key. Each
    factor alone leaves the range of a dtype when a position is too far from the origin (`check`).

    Attributes:
        base: wavelengths run from 2 pi to 2 pi base tokens.
        scale_base: the distance in tokens at which the fastest channel has decayed to 1 / 3.5; None: no decay.

    Examples:
        >>> from dilated_attention.nn import Rotary, rotate
        >>> tables = Rotary(head_dim=8, scale_base=512.0).tables(torch.arange(16))  # xPos
        >>> q = rotate(torch.randn(1, 16, 2, 8), tables[:2])
        >>> k = rotate(torch.randn(1, 16, 2, 8), tables[-2:])
        >>> q.shape
        torch.Size([1, 16, 2, 8])
    """

    head_dim: int
    base: float = 10_000.0
    scale_base: float | None = None

    def tables(
        self,
        positions: Int[Tensor, "*batch seq"],
        origin: Int[Tensor, "*batch_or_one seq_or_one"] | int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> Tables:
        """Return the tables that rotate queries and keys to `positions`: `rotate(q, tables[:2])`, `rotate(k,
        tables[-2:])`.

        `origin`: the position from which xPos counts; unused without xPos.
        """
        cos, sin = rotary_tables(positions, self.head_dim, self.base, dtype)
        if self.scale_base is None:
            return cos, sin
        grown = self.growth(positions - origin)
        query = grown.to(cos)
        key = (1 / grown).to(cos)
        return cos * query, sin * query, cos * key, sin * key

    def growth(self, distance: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape 1 head_dim"]:
        """Return zeta^(distance / scale_base) in float64, with zeta = (2i / head_dim + 0.4) / 1.4 for channel pair i.

        xPos multiplies a query by it, and divides a key by it, at `distance` tokens from the origin. If the origin
        moves on by `distance` tokens, rotated keys must be multiplied by it.
        """
        assert self.scale_base is not None
        exact = _exact(distance)
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=exact.device) / self.head_dim
        power = ((pairs + 0.4) / 1.4) ** (exact[..., None, None] / self.scale_base)
        return torch.cat((power, power), -1)

    def reach(self, dtype: torch.dtype) -> int | None:
        """Return the largest distance from the origin at which xPos does not overflow this dtype; None without xPos."""
        if self.scale_base is None:
            return None
        # The factor may fill the range of the dtype except 2^12, which queries, keys and their product need.
        return int(self.scale_base * (math.log(torch.finfo(dtype).max) - 12 * math.log(2)) / math.log(1.4 / 0.4))

    def check(self, distance: int, dtype: torch.dtype) -> None:
        """Raise ValueError if a position `distance` tokens from the origin is out of the dtype's range."""
        reach = self.reach(dtype)
        if reach is not None and distance > reach:
            raise ValueError(
                f"xPos with scale_base={self.scale_base} cannot hold positions {distance:,} tokens from the origin "
                f"in {dtype}, at most {reach:,} ({2 * reach:,} tokens in all); use a larger xpos_scale_base, a dtype "
                'of wider range, or positions="rope"'
            )


def grid_sines(
    points: Integer[Tensor, "*shape 2"], size: int, embed_dim: int, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*shape embed_dim"]:
    """Return the fixed position encodings of points on a size x size grid.

    The first half of an encoding depends on points[..., 1], the second half on points[..., 0].

    A coordinate p gives the sines sin(p / 10000^(4i / embed_dim)) for 0 <= i < embed_dim / 4, followed by the
    cosines. This is the table of masked autoencoders (He et al. 2021, arXiv:2111.06377), without storing its size^2
    rows.

    Raises:
        ValueError: points are not pairs of integers, one lies outside the grid (checked on the CPU only), or embed_dim
            is no multiple of 4.

    Examples:
        >>> from dilated_attention.nn import grid_sines
        >>> points = torch.tensor([[0, 3], [5, 3]])  # two points of an 8 x 8 grid
        >>> table = grid_sines(points, size=8, embed_dim=16)
        >>> torch.equal(table[0, :8], table[1, :8])  # the first half depends on points[..., 1]
        True
    """
    if points.shape[-1:] != (2,) or points.is_floating_point() or points.dtype == torch.bool:
        raise ValueError(f"points must be integers (..., 2); got {points.dtype} of shape {tuple(points.shape)}")
    checks.indices(f"points of a grid of {size} x {size}", points, 0, size)
    if embed_dim % 4:
        raise ValueError(f"embed_dim={embed_dim}: sines and cosines of two coordinates need a multiple of 4")
    exact = _exact(torch.arange(size, device=points.device))
    inverse = 10_000.0 ** (-4 * torch.arange(embed_dim // 4, dtype=torch.float64, device=exact.device) / embed_dim)
    angle = exact[:, None] * inverse
    table = torch.cat((angle.sin(), angle.cos()), -1).to(points.device, dtype)
    return table[points.flip(-1).long()].flatten(-2)


def _exact(positions: Tensor) -> Tensor:
    """Return positions in float64, on the CPU if their device has no float64."""
    if positions.device.type == "mps":
        positions = positions.to("cpu")
    return positions.to(torch.float64)
