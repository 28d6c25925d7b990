"""Encode slides with Prov-GigaPath's encoder (Xu et al. 2024, Nature 630): an embedding from tiles and their places."""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
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
from dilated_attention.models.packing import checked_lengths, padded, require_like, warn_of_layout, within
from dilated_attention.models.stack import Pooling
from dilated_attention.nn import grid_sines
from dilated_attention.plumbing import checks

_MOST_AT_A_PLACE = 8
"""The mean number of tiles per grid place above which coordinates are probably in another unit.

Tiles that overlap by half give four per place.
"""

_PLACES_PER_TILE = 100
"""The number of places per tile, in the box around a slide's tiles, below which the tiles lie on a grid."""

_FEWEST_ON_A_GRID = 16
"""The fewest tiles of a slide whose distances say how far apart tiles lie."""

PATTERN = Dilated((1024, 5792, 32768, 185363, 1048576), (1, 2, 4, 8, 16), "head_block")
"""The branches of the published weights. The five segment lengths run from 1,024 to 1,024 x 1,024 tiles in equal
ratios."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GigaPathConfig(Configuration):
    """Describe a `GigaPathSlideEncoder`; the defaults are those of the published one.

    Attributes:
        in_chans: channels of a tile's embedding.
        slide_ngrids: tiles lie on a grid of slide_ngrids x slide_ngrids cells.
        tile_size: the side of a grid cell in pixels.
        global_pool: take the slide's embedding from the mean of its tiles; False: from the cls token.
        norm_eps: epsilon of the last LayerNorm.
        encoder: configuration of the LongNet encoder, which takes vectors and has no positions.

    Examples:
        >>> from dilated_attention.models import GigaPathConfig
        >>> config = GigaPathConfig()  # the published encoder
        >>> config.in_chans, config.encoder.embed_dim, config.encoder.num_layers
        (1536, 768, 12)
        >>> GigaPathConfig.from_json(config.to_json()) == config
        True
    """

    nested: ClassVar[Mapping[str, Any]] = {"encoder": LongNetConfig}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "gigapath-12l768d": {"encoder": released_encoder(768, 12, PATTERN)},
        "gigapath-24l1024d": {"encoder": released_encoder(1024, 24, PATTERN)},
        "gigapath-12l1536d": {"encoder": released_encoder(1536, 12, PATTERN)},
    }

    in_chans: int = 1536
    slide_ngrids: int = 1000
    tile_size: int = 256
    global_pool: bool = False
    norm_eps: float = 1e-6
    encoder: LongNetConfig = field(default=released_encoder(768, 12, PATTERN))

    def __post_init__(self) -> None:
        require_integers(self, "in_chans", "slide_ngrids", "tile_size")
        checks.boolean("global_pool", self.global_pool)
        require_number(self, "norm_eps", 0)
        if not isinstance(self.encoder, LongNetConfig):
            raise ValueError(f"encoder={self.encoder!r}: must be a LongNetConfig")
        if self.encoder.vocab_size is not None or self.encoder.embed_dim % 4:
            raise ValueError(
                "encoder: must take vectors (vocab_size=None) of a multiple of 4 channels; got "
                f"vocab_size={self.encoder.vocab_size}, embed_dim={self.encoder.embed_dim}"
            )


class GigaPathSlideEncoder(Pooling):
    """Encode a slide as one embedding: run LongNet over [cls, W x + b + grid sines], then apply a LayerNorm.

    The embedding is made from the cls token, or with global_pool from the mean over tiles.

    forward: x `(batch, tiles, in_chans)`, coords `(batch, tiles, 2)` in pixels -> `(batch, embed_dim)`. Tile i lies in
        grid cell floor(coords / tile_size); the grid sines encode both numbers (`nn.grid_sines`).

    `load_gigapath` loads the published weights.

    Examples:
        >>> from dilated_attention.models import GigaPathConfig, GigaPathSlideEncoder, LongNetConfig
        >>> encoder = LongNetConfig(vocab_size=None, positions=None, embed_dim=32, num_layers=2)
        >>> model = GigaPathSlideEncoder(GigaPathConfig(in_chans=12, slide_ngrids=40, encoder=encoder)).eval()
        >>> tiles, coords = torch.randn(1, 90, 12), torch.randint(40 * 256, (1, 90, 2))
        >>> model(tiles, coords).shape  # one embedding per slide
        torch.Size([1, 32])
    """

    configuration = GigaPathConfig
    config: GigaPathConfig

    def __init__(self, config: GigaPathConfig, *, backend: str = "auto") -> None:
        super().__init__()
        self.config = config
        dim = config.encoder.embed_dim
        self.projection = nn.Linear(config.in_chans, dim)
        self.cls = nn.Parameter(torch.empty(dim))
        self.encoder = LongNetEncoder(config.encoder, backend=backend)
        self.norm = nn.LayerNorm(dim, config.norm_eps)
        self._draw()

    def _draw(self) -> None:
        nn.init.xavier_uniform_(self.projection.weight)
        nn.init.zeros_(self.projection.bias)
        nn.init.normal_(self.cls, std=0.02)

    def forward(
        self,
        x: Float[Tensor, "batch tiles in_chans"],
        coords: Tensor,
        *,
        lengths: Sequence[int] | Int[Tensor, " batch"] | None = None,
        global_pool: bool | None = None,
        all_layers: bool = False,
    ) -> Tensor:
        """Return the embedding of each slide.

        Args:
            lengths: number of tiles of each slide. The other entries of x and coords are padding, which costs nothing
                and does not affect the result: each slide gets the embedding that it would get alone.
            global_pool: replaces the configuration's value.
            all_layers: return `(layers + 1, batch, embed_dim)`: the embedding made from the states before the first
                layer and after each layer. They pass through this model's last LayerNorm, but not through the encoder's
                own, so the last of them differs from the result without all_layers.
        """
        mean = self.config.global_pool if global_pool is None else global_pool
        first_only = not (mean or all_layers)  # then the last layer computes the cls tokens alone
        states, counts = self._states(x, coords, lengths, all_layers, first_only)
        if first_only:
            return self.norm(states[-1][0])
        if not all_layers:
            return self._pool(states[0], counts, mean)
        return torch.stack([self._pool(state, counts, mean) for state in states[:-1]])

    def tokens(
        self,
        x: Float[Tensor, "batch tiles in_chans"],
        coords: Tensor,
        *,
        lengths: Sequence[int] | Int[Tensor, " batch"] | None = None,
        all_layers: bool = False,
    ) -> list[Float[Tensor, "batch tiles_and_one embed_dim"]]:
        """Return the encoder's states of the cls token and the tiles, with zeros at padding.

        The list holds the last states only, or with all_layers the layers + 2 states that `LongNetEncoder` returns.
        """
        states, counts = self._states(x, coords, lengths, all_layers, first_only=False)
        kept = within([count + 1 for count in counts], x.shape[1] + 1, x.device)
        return [padded(state, kept) for state in states]

    def _states(
        self, x: Tensor, coords: Tensor, lengths: Sequence[int] | Tensor | None, all_layers: bool, first_only: bool
    ) -> tuple[list[Tensor], list[int]]:
        """Return the states that `tokens` lists, packed as `(1, tokens, embed_dim)`, and each slide's number of tiles.

        first_only: return the states of the cls tokens only, `(1, slides, embed_dim)`.
        """
        self._require_one_device(self.encoder.mesh)
        rows, counts = self.embed(x, coords, lengths)
        edges = [0, *accumulate([count + 1 for count in counts])]
        states = self.encoder(rows, cu_seqlens=edges, all_layers=all_layers, first_only=first_only)
        if not all_layers:
            states = [states]
        return states, counts

    def embed(
        self, x: Tensor, coords: Tensor, lengths: Sequence[int] | Tensor | None = None
    ) -> tuple[Float[Tensor, "1 tokens embed_dim"], list[int]]:
        """Return the encoder's input and each slide's number of tiles.

        The input holds each slide's cls token and tiles, packed one slide after another.
        """
        config = self.config
        require_like(self.cls, x=x)
        if not isinstance(coords, Tensor) or coords.dtype in (torch.float16, torch.bfloat16):
            kind = coords.dtype if isinstance(coords, Tensor) else type(coords).__name__
            raise ValueError(
                f"coords must be a tensor of integers, float32 or float64, which hold every pixel; got {kind}: pass "
                "torch.as_tensor of them as they were read"
            )
        if x.dim() != 3 or x.shape[2] != config.in_chans:
            raise ValueError(f"x must be (batch, tiles, in_chans={config.in_chans}); got shape {tuple(x.shape)}")
        warn_of_layout(x)
        if coords.shape != (*x.shape[:2], 2):
            raise ValueError(f"coords must be (batch, tiles, 2) = {(*x.shape[:2], 2)}; got {tuple(coords.shape)}")

        counts = [x.shape[1]] * len(x)
        if lengths is not None:
            counts = checked_lengths(lengths, *x.shape[:2])
        if all(count == x.shape[1] for count in counts):
            tiles = x.flatten(0, 1)
            points = coords.flatten(0, 1)
        else:
            kept = within(counts, x.shape[1], x.device)
            tiles = x[kept]
            points = coords[kept]

        places = self._places(points, counts)
        sines = grid_sines(places, config.slide_ngrids, config.encoder.embed_dim, x.dtype)
        rows = self.projection(tiles) + sines  # one call, whose hooks see all tiles
        if counts:
            parts = []
            for slide in rows.split(counts):
                parts += [self.cls[None], slide]
            rows = torch.cat(parts)
        return rows[None], counts

    def _places(self, points: Tensor, counts: list[int]) -> Tensor:
        """Return the grid cell of each tile of all slides, int64 `(tiles, 2)`; ValueError if one is outside the grid.

        points: the tiles' coordinates in pixels, `(tiles, 2)`. counts: the number of tiles of each slide.
        """
        config = self.config
        exact = points if points.is_floating_point() else points.long()
        places = torch.div(exact, config.tile_size, rounding_mode="floor")
        if torch.compiler.is_compiling() or points.is_meta:  # no values to check
            return places.long()

        wrong = ~((places >= 0) & (places < config.slide_ngrids)).all(-1)
        starts = [0, *accumulate(counts)]
        if wrong.any():
            at = int(wrong.nonzero()[0])
            slide = bisect_right(starts, at) - 1
            raise ValueError(
                f"coords must be pixels in [0, {config.slide_ngrids * config.tile_size:,}), {config.slide_ngrids} "
                f"places of {config.tile_size}; got {points[at].tolist()} at slide {slide}, tile {at - starts[slide]}"
            )

        number = places.long() @ places.new_tensor([config.slide_ngrids, 1]).long()
        for slide, (start, stop) in enumerate(pairwise(starts)):
            found = len(number[start:stop].unique())
            step = _step(points[start:stop])
            if found * _MOST_AT_A_PLACE < stop - start:
                warnings.warn(
                    f"coords: the {stop - start} tiles of slide {slide} lie at {found} places of {config.tile_size} "
                    "pixels. Give the pixels of the tiles' corners, not fractions or numbers of a grid",
                    stacklevel=4,
                )
            elif step is not None and abs(step - config.tile_size) > 0.02 * config.tile_size:
                warnings.warn(
                    f"coords: the tiles of slide {slide} lie {step} apart, not {config.tile_size} pixels as the places "
                    "of this model. If coords are micrometres, or pixels of another resolution, multiply them by "
                    f"{config.tile_size / step:.3g}; if the tiles overlap or have gaps, ignore this warning",
                    stacklevel=4,
                )
        return places.long()

    def _pool(self, state: Tensor, counts: list[int], mean: bool) -> Tensor:
        if not counts:
            return self.norm(state[0])
        slides = state[0].split([count + 1 for count in counts])
        if not mean:
            return self.norm(torch.stack([slide[0] for slide in slides]))
        if not min(counts):
            raise ValueError(f"lengths must be positive: a slide without tiles has no mean; got {counts}")
        return self.norm(torch.stack([slide[1:].mean(0) for slide in slides]))


def _step(points: Tensor) -> int | None:
    """Return how far apart the tiles of a slide lie on their grid; None if they are too few, or lie on none.

    This is the smallest distance along an axis. Points at random have a small one too, but fill few places of its grid.
    """
    if len(points) < _FEWEST_ON_A_GRID:
        return None
    corners = points.round().long()
    gaps = torch.cat([values.unique().diff() for values in corners.T])
    if not len(gaps):
        return None
    step = int(gaps.min())
    columns, rows = (corners.amax(0) - corners.amin(0)).div(step).add(1).tolist()
    if columns * rows >= _PLACES_PER_TILE * len(points):
        return None
    return step
