"""Provide neighborhood attention on grids of features as modules, with NATTEN's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dilated_attention import checks
from dilated_attention.backends.table import check_name
from dilated_attention.bias import RelativeBias
from dilated_attention.functional import attention
from dilated_attention.neighborhood import Neighborhood


class NeighborhoodAttention(nn.Module):
    """Compute W_o A(W_q x, W_k x, W_v x) on a grid: each token attends to the window around it.

    Constructor, parameters and state_dict are those of NATTEN's modules, so their trained weights load unchanged; with
    rel_pos_bias, also those of NATTEN up to 0.17.5, before 0.20 dropped that bias. The grid is the input's, of one, two
    or three axes; `NeighborhoodAttention1D`, `2D` and `3D` refuse another number of axes.

    forward: x `(batch, *grid, embed_dim)` -> the same shape.

    Args:
        kernel_size, stride, dilation, is_causal: window, stride, rate and is_causal of `Neighborhood`; one number for
            all axes, or one per axis.
        qkv_bias: add a bias to the projections of queries, keys and values.
        qk_scale: the factor of the scores; default 1 / sqrt(head_dim).
        proj_drop: the dropout of the output, in training.
        rel_pos_bias: learn a bias `rpb`, `(num_heads, 2 * window - 1, ...)` with one dimension per axis. The score of a
            key n steps of `dilation` tokens after the query gets entry n + window - 1.
        backend: as in `attention`.

    Examples:
        >>> from dilated_attention.nn import NeighborhoodAttention
        >>> layer = NeighborhoodAttention(32, num_heads=4, kernel_size=3, dilation=2)
        >>> layer(torch.randn(1, 8, 10, 32)).shape
        torch.Size([1, 8, 10, 32])
    """

    axes: int | None = None
    rpb: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1,
        is_causal: bool | Sequence[bool] = False,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        proj_drop: float = 0.0,
        *,
        rel_pos_bias: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        embed_dim, num_heads, _ = checks.heads(embed_dim, num_heads, None)
        checks.boolean("rel_pos_bias", rel_pos_bias)
        checks.number("qk_scale", qk_scale)
        checks.probability("proj_drop", proj_drop)
        check_name(backend)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.kernel_size = kernel_size
        self.stride = stride
        self.dilation = dilation
        self.is_causal = is_causal
        self.scale = qk_scale
        self.backend = backend
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=qkv_bias)
        self.register_parameter("rpb", None)
        if rel_pos_bias:
            self.rpb = nn.Parameter(torch.empty(num_heads, *self._sizes_of_bias()))
            nn.init.trunc_normal_(self.rpb, std=0.02)
        self.proj = nn.Linear(embed_dim, embed_dim)
        self.proj_drop = nn.Dropout(proj_drop)
        if self.axes is not None:  # checked as early as it can be: a grid on which the windows fit
            self.pattern((2**31,) * self.axes)

    def _sizes_of_bias(self) -> list[int]:
        axes = self.axes
        if isinstance(self.kernel_size, Sequence):
            axes = len(self.kernel_size)
        if axes is None:
            raise ValueError(
                f"rel_pos_bias=True: kernel_size={self.kernel_size} leaves the number of axes open; give one number "
                "per axis"
            )
        return [2 * window - 1 for window in self._window(axes)]

    def _window(self, axes: int) -> tuple[int, ...]:
        if isinstance(self.kernel_size, Sequence):
            return tuple(self.kernel_size)
        return (checks.positive("kernel_size", self.kernel_size),) * axes

    def pattern(self, shape: tuple[int, ...]) -> Neighborhood:
        """Return the pattern on a grid of this shape."""
        options: Any = {"rate": self.dilation, "stride": self.stride, "is_causal": self.is_causal}
        return Neighborhood(shape, self._window(len(shape)), **options)

    def forward(self, x: Float[Tensor, "batch *grid embed_dim"]) -> Float[Tensor, "batch *grid embed_dim"]:
        axes = x.dim() - 2
        wanted = "one to three" if self.axes is None else str(self.axes)
        if not 1 <= axes <= 3 or axes != (self.axes or axes) or x.shape[-1] != self.embed_dim:
            raise ValueError(
                f"x must be (batch, *grid, {self.embed_dim}) with {wanted} axes of the grid; got {tuple(x.shape)}"
            )
        shape = tuple(x.shape[1:-1])
        qkv = self.qkv(x).view(len(x), -1, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.unbind(2)
        pattern = self.pattern(shape)
        bias = None
        if self.rpb is not None:
            bias = RelativeBias(self.rpb, coordinates=_steps(pattern, x.device))
        out = attention(q, k, v, pattern, scale=self.scale, backend=self.backend, bias=bias)
        assert isinstance(out, Tensor)
        return self.proj_drop(self.proj(out.reshape(x.shape)))

    def extra_repr(self) -> str:
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, dilation={self.dilation}, is_causal={self.is_causal}, "
            f"rel_pos_bias={self.rpb is not None}"
        )


def _steps(pattern: Neighborhood, device: torch.device) -> Tensor:
    """Return the place of each token among those of its class (its coordinates modulo the rate), along each axis:
    int64, `(1, seq, axes)`."""
    along = [torch.arange(axis.length, device=device) // axis.rate for axis in pattern.axes]
    return torch.stack(torch.meshgrid(*along, indexing="ij"), -1).flatten(0, -2)[None]


class NeighborhoodAttention1D(NeighborhoodAttention):
    """Run `NeighborhoodAttention` on sequences, `(batch, length, embed_dim)`.

    Examples:
        >>> from dilated_attention.nn import NeighborhoodAttention1D
        >>> layer = NeighborhoodAttention1D(32, num_heads=4, kernel_size=5, is_causal=True)
        >>> layer(torch.randn(1, 8, 32)).shape
        torch.Size([1, 8, 32])
    """

    axes = 1


class NeighborhoodAttention2D(NeighborhoodAttention):
    """Run `NeighborhoodAttention` on pictures, `(batch, height, width, embed_dim)`.

    Examples:
        >>> from dilated_attention.nn import NeighborhoodAttention2D
        >>> layer = NeighborhoodAttention2D(32, num_heads=4, kernel_size=(3, 5), dilation=(2, 1))
        >>> layer(torch.randn(1, 8, 10, 32)).shape
        torch.Size([1, 8, 10, 32])
    """

    axes = 2


class NeighborhoodAttention3D(NeighborhoodAttention):
    """Run `NeighborhoodAttention` on videos and volumes, `(batch, depth, height, width, embed_dim)`.

    Examples:
        >>> from dilated_attention.nn import NeighborhoodAttention3D
        >>> layer = NeighborhoodAttention3D(32, num_heads=4, kernel_size=3, is_causal=(True, False, False))
        >>> layer(torch.randn(1, 4, 6, 6, 32)).shape
        torch.Size([1, 4, 6, 6, 32])
    """

    axes = 3
