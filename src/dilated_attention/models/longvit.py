"""Provide LongViT (Wang et al. 2023, arXiv:2312.03558): a LongNet over the patches of a large image."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from dilated_attention import Dilated
from dilated_attention.models.configuration import (
    Configuration,
    LongNetConfig,
    released_encoder,
    require_integers,
    require_number,
)
from dilated_attention.models.longnet import LongNetEncoder
from dilated_attention.models.packing import require_like
from dilated_attention.models.stack import Pooling

RATES = (1, 2, 4, 8, 16)
SEGMENTS = {
    1024: (64, 128, 256, 512, 1024),
    4096: (1024, 2048, 4096, 8192, 16384),
    8192: (1024, 4096, 8192, 16384, 65536),
    16384: (1024, 4096, 16384, 65536, 262144),
    32768: (1024, 4096, 32768, 262144, 1048576),
}
"""The segment lengths of the released models, by image size."""


def _encoder(image_size: int) -> LongNetConfig:
    pattern = Dilated(SEGMENTS[image_size], RATES, "head_block")
    return released_encoder(384, 12, pattern, final_norm=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class LongViTConfig(Configuration):
    """Describe a `LongViT`.

    Attributes:
        image_size: pixels per side; at this size there is one learned position per patch.
        num_classes: number of classes; None: no classifier.
        norm_eps: epsilon of the LayerNorm before the classifier.

    Examples:
        >>> from dilated_attention.models import LongViTConfig
        >>> config = LongViTConfig(image_size=1024, patch_size=32, num_classes=5)
        >>> (config.image_size // config.patch_size) ** 2  # patches
        1024
        >>> LongViTConfig.from_json(config.to_json()) == config
        True
    """

    nested: ClassVar[Mapping[str, Any]] = {"encoder": LongNetConfig}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        f"longvit-small-{size}": {"image_size": size, "encoder": _encoder(size)} for size in SEGMENTS
    }

    image_size: int = 1024
    patch_size: int = 32
    in_chans: int = 3
    num_classes: int | None = None
    norm_eps: float = 1e-5
    encoder: LongNetConfig = field(default=_encoder(1024))

    def __post_init__(self) -> None:
        require_integers(self, "image_size", "patch_size", "in_chans", optional=("num_classes",))
        require_number(self, "norm_eps", 0)
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size={self.image_size}: must be a multiple of patch_size={self.patch_size}")
        if not isinstance(self.encoder, LongNetConfig) or self.encoder.vocab_size is not None:
            raise ValueError(f"encoder={self.encoder!r}: must be a LongNetConfig with vocab_size=None")


class LongViT(Pooling):
    """Encode images with a vision transformer whose attention is LongNet's, and classify them if it has a classifier.

    forward takes images `(batch, in_chans, rows, columns)` and returns the states of the patches, row by row,
    `(batch, patches, embed_dim)`. With `num_classes` it returns logits `(batch, num_classes)`, computed from LN(mean
    over patches).

    For an image of another size than the configuration's, the positions are interpolated bicubically, as in the
    released code. The sides of an image must be multiples of the patch size.

    Examples:
        >>> from dilated_attention.models import LongNetConfig, LongViT, LongViTConfig
        >>> encoder = LongNetConfig(vocab_size=None, positions=None, embed_dim=32, num_layers=2)
        >>> model = LongViT(LongViTConfig(image_size=64, patch_size=8, num_classes=5, encoder=encoder))
        >>> model(torch.randn(1, 3, 64, 64)).shape
        torch.Size([1, 5])
    """

    configuration = LongViTConfig
    config: LongViTConfig

    def __init__(self, config: LongViTConfig, *, backend: str = "auto") -> None:
        super().__init__()
        self.config = config
        dim = config.encoder.embed_dim
        side = config.image_size // config.patch_size
        self.patches = nn.Conv2d(config.in_chans, dim, config.patch_size, config.patch_size)
        self.positions = nn.Parameter(torch.empty(side * side, dim))
        self.encoder = LongNetEncoder(config.encoder, backend=backend)
        self.norm: nn.LayerNorm | None = None
        self.head: nn.Linear | None = None
        if config.num_classes is not None:
            self.norm = nn.LayerNorm(dim, config.norm_eps)
            self.head = nn.Linear(dim, config.num_classes)
        self._draw()

    def _draw(self) -> None:
        nn.init.trunc_normal_(self.positions, std=0.02)

    def forward(self, images: Float[Tensor, "batch in_chans rows columns"]) -> Tensor:
        config = self.config
        self._require_one_device(self.encoder.mesh)
        require_like(self.positions, images=images)
        if (
            images.dim() != 4
            or images.shape[1] != config.in_chans
            or any(n % config.patch_size or not n for n in images.shape[2:])
        ):
            raise ValueError(
                f"images must be (batch, {config.in_chans}, rows, columns), sides multiples of {config.patch_size}; "
                f"got shape {tuple(images.shape)}"
            )
        x = self.patches(images)
        x = x.flatten(2).transpose(1, 2) + self._positions(*x.shape[2:])
        x = self.encoder(x)
        if self.head is None:
            return x
        pooled = x.mean(1)
        if self.norm is not None:  # None if the head was put on later
            pooled = self.norm(pooled)
        return self.head(pooled)

    def _positions(self, rows: int, columns: int) -> Tensor:
        side = math.isqrt(len(self.positions))
        if (rows, columns) == (side, side):
            return self.positions
        grid = self.positions.unflatten(0, (side, side)).permute(2, 0, 1)[None]
        scale = [(n + 0.1) / side for n in (rows, columns)]  # the released code's guard against a rounded-down size
        return F.interpolate(grid, scale_factor=scale, mode="bicubic")[0].flatten(1).T
