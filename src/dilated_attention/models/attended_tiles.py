"""Compute how much a slide's embedding attends to each of its tiles."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dilated_attention import Dilated, Sum, UnsupportedError, Window, attention
from dilated_attention.models.gigapath import GigaPathSlideEncoder
from dilated_attention.nn import TransformerBlock
from dilated_attention.plumbing import plot_places

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROWS = 2048  # tokens that are written at a time
_MORE = 8  # columns, of which one is for lse: fused operators on a GPU take multiples of 8


@dataclass(frozen=True, eq=False)
class TileAttention:
    """Hold the result of `tile_attention`. Entries of padding are 0.

    Attributes:
        heads: `(batch, layers, heads, tiles)`: the share of the slide embedding's attention that each tile gets, by
            layer and head.
        rolled_up: `(batch, tiles)`: the attention that each tile gets through all layers together. A slide's values
            sum to less than 1: the rest stays at the cls token, or goes to the padding that `compat="torchscale"`
            attends.
        coords: `(batch, tiles, 2)`, the coordinates given to `tile_attention`.
        lengths: the number of tiles of each slide.
        tile_size: the side of a tile, in the unit of `coords`.

    Examples:
        >>> from dilated_attention.models import TileAttention
        >>> heads, coords = torch.tensor([[[[0.25, 0.75]]]]), torch.tensor([[[0, 0], [256, 0]]])
        >>> found = TileAttention(heads, rolled_up=heads[:, 0, 0], coords=coords, lengths=(2,), tile_size=256)
        >>> found.coords[0, found.rolled_up[0].argmax()]  # the tile that gets most attention
        tensor([256,   0])
    """

    heads: Float[Tensor, "batch layers heads tiles"]
    rolled_up: Float[Tensor, "batch tiles"]
    coords: Tensor
    lengths: tuple[int, ...]
    tile_size: int

    def plot(
        self, slide: int = 0, *, layer: int | None = None, head: int | None = None, ax: Axes | None = None
    ) -> Axes:
        """Draw one slide's tiles at their places, brighter for more attention, in colours that also work in grey.

        The colour scale ends at the 99th percentile of the values; the few tiles above it get the brightest colour.

        Args:
            layer: the layer whose attention is drawn; None: attention rolled up over all layers.
            head: the head of the layer that is drawn, an error without `layer`; None: the mean over heads.
        """
        if layer is None and head is not None:
            raise ValueError(f"head={head} needs a layer: what is rolled up is of all heads")
        for name, place, count in zip(("slide", "layer", "head"), (slide, layer, head), self.heads.shape, strict=False):
            if place is not None and not -count <= place < count:
                raise ValueError(f"{name}={place} does not exist: there are {count}, counted from 0")
        if layer is None:
            values = self.rolled_up[slide]
            title = "rolled up over layers"
        elif head is None:
            values = self.heads[slide, layer].mean(0)
            title = f"layer {layer}, mean over heads"
        else:
            values = self.heads[slide, layer, head]
            title = f"layer {layer}, head {head}"

        tiles = self.lengths[slide]
        places = self.coords[slide, :tiles].cpu().numpy()
        relative_to_uniform = values[:tiles].float().cpu().numpy() * tiles
        return plot_places(places, relative_to_uniform, self.tile_size, title, ax)


@torch.no_grad()
def tile_attention(
    encoder: GigaPathSlideEncoder,
    tiles: Tensor,
    coords: Tensor,
    *,
    lengths: Sequence[int] | Int[Tensor, " batch"] | None = None,
    global_pool: bool | None = None,
) -> TileAttention:
    """Compute exactly how much a slide's embedding attends to each tile, in memory linear in the number of tiles.

    Let P_l,h be the attention probabilities of head h in layer l, over the cls token and the tiles, and u the weight
    of each token in the embedding (1 for the cls token; with global_pool, 1 / tiles for each tile). Then `heads` holds
    uᵀ P_l,h. `rolled_up` (Abnar and Zuidema 2020, arXiv:2005.00928) holds uᵀ A_L ... A_1, with A_l = (I + mean over h
    of P_l,h) / 2, where I stands for the residual path. P is never formed: its rows are summed from the log-sum-exp of
    the forward.

    Queries and keys of all layers are written to a temporary file of 2 x layers x tiles x embed_dim numbers (in the
    folder that TMPDIR names), so that memory does not grow with the number of layers. It takes as long as one encoding
    plus one more attention per layer.

    Args:
        encoder: the slide encoder, in evaluation mode.
        tiles, coords, lengths, global_pool: the same arguments as for the encoder's forward.

    Examples:
        >>> from dilated_attention.models import GigaPathConfig, GigaPathSlideEncoder, LongNetConfig, tile_attention
        >>> encoder = LongNetConfig(vocab_size=None, positions=None, embed_dim=32, num_layers=2)
        >>> model = GigaPathSlideEncoder(GigaPathConfig(in_chans=12, slide_ngrids=40, encoder=encoder)).eval()
        >>> tiles, coords = torch.randn(1, 90, 12), torch.randint(40 * 256, (1, 90, 2))
        >>> tile_attention(model, tiles, coords).heads.shape  # (slides, layers, heads, tiles)
        torch.Size([1, 2, 4, 90])
    """
    if not isinstance(encoder, GigaPathSlideEncoder):
        raise ValueError(
            f"encoder must be a GigaPathSlideEncoder; got {type(encoder).__name__}: load_gigapath reads the published "
            "one"
        )
    if encoder.training:
        raise ValueError("encoder is in training mode, where dropout changes the attention: call encoder.eval()")
    config = encoder.config.encoder
    if config.rotary is not None or encoder.encoder.mesh is not None or isinstance(config.pattern, (Window, Sum)):
        raise UnsupportedError(
            "tile_attention takes encoders without rotary positions and windows, on one device; "
            f"got positions={config.positions!r}, pattern={config.pattern!r}, mesh={encoder.encoder.mesh}"
        )
    rows, counts = encoder.embed(tiles, coords, lengths)
    pooled = encoder.config.global_pool if global_pool is None else global_pool
    shape = (len(counts), config.num_layers, config.num_heads, tiles.shape[1])
    heads = torch.zeros(shape, dtype=torch.promote_types(rows.dtype, torch.float32), device=rows.device)
    rolled_up = heads.new_zeros(len(counts), tiles.shape[1])
    samples = list(rows.split([count + 1 for count in counts], 1))
    del rows

    for slide, count in enumerate(counts):
        embedding = heads.new_zeros(count + 1)
        embedding[1:] = pooled / max(count, 1)
        embedding[0] = not pooled
        flow = embedding
        # Allocated before the layers' tensors: among them, it would keep the heap from reusing their memory.
        lse = heads.new_empty(config.num_layers, config.num_heads, count + 1)
        with tempfile.TemporaryFile() as file:
            layers = _encode(encoder, samples.pop(0), file, lse)
            for layer in reversed(range(config.num_layers)):
                seen = _sums_of_rows(*layers[layer].read(), torch.stack((embedding, flow)), layers[layer].pattern)
                heads[slide, layer, :, :count] = seen[0, :, 1:]
                flow = (flow + seen[1].mean(0)) / 2
        rolled_up[slide, :count] = flow[1:]
    return TileAttention(heads, rolled_up, coords, tuple(counts), encoder.config.tile_size)


class _Layer:
    """Compute the attention of one layer and store its queries and keys in `file`, its lse in the tensor `lse`.

    A block calls it as its `memory`, with q, k and v of one slide, batch 1; it returns out. lse is `(heads, tokens)`.
    """

    def __init__(self, pattern: Dilated, backend: str, file: IO[bytes], lse: Tensor) -> None:
        self.pattern = pattern
        self.backend = backend
        self.file = file
        self.lse = lse

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, attend: Any = None) -> Tensor:
        self.dtype = q.dtype
        self.shapes = (q.shape[1:], k.shape[1:])
        self.start = self.file.tell()
        for x in (q, k):
            for rows in x[0].split(_ROWS):
                rows.contiguous().view(torch.uint8).cpu().numpy().tofile(self.file)
        out, lse = attention(q, k, v, self.pattern, backend=self.backend, return_lse=True)
        self.lse.copy_(lse[0])
        return out

    def read(self) -> tuple[Tensor, Tensor]:
        """Return q and k, `(tokens, heads, head_dim + _MORE)`, such that exp(q kᵀ) is the attention probability.

        The `_MORE` added channels hold -lse in q and 1 in k, followed by zeros.
        """
        self.file.seek(self.start)
        found = []
        for tokens, heads, head_dim in self.shapes:
            whole = self.lse.new_zeros(tokens, heads, head_dim + _MORE)
            for rows in whole.split(_ROWS):
                read = np.fromfile(self.file, np.uint8, len(rows) * heads * head_dim * self.dtype.itemsize)
                rows[..., :head_dim] = torch.from_numpy(read).view(self.dtype).view(len(rows), heads, head_dim)
            found.append(whole)

        q, k = found
        q *= head_dim**-0.5
        q[..., head_dim] = -self.lse.T
        k[..., head_dim] = 1.0
        return q, k


def _encode(encoder: GigaPathSlideEncoder, x: Tensor, file: IO[bytes], lse: Tensor) -> list[_Layer]:
    """Run the encoder's layers over one slide, the last only up to its attention; return a `_Layer` for each.

    x: the slide's cls token and tiles, `(1, tokens, embed_dim)`. file, lse: filled by the layers; lse is `(layers,
    heads, tokens)`.
    """
    pattern = encoder.config.encoder.attention_pattern or Dilated((x.shape[1],), (1,))
    assert isinstance(pattern, Dilated)
    layers: list[_Layer] = []
    for block in encoder.encoder.blocks:
        block = getattr(block, "_orig_mod", block)  # a compiled block's own: the layers write to a file
        assert isinstance(block, TransformerBlock), f"a block is a {type(block).__name__}"
        layers.append(_Layer(pattern, encoder.encoder.backend, file, lse[len(layers)]))
        if len(layers) < len(encoder.encoder.blocks):
            x = block(x, memory=layers[-1])
        else:
            layers[-1](*block.attention.project(block.attention_norm(x)))
    return layers


def _sums_of_rows(q: Tensor, k: Tensor, weights: Tensor, pattern: Dilated) -> Tensor:
    """Return weights @ P for every head, `(sums, heads, tokens)`; P is exp(q kᵀ) at the pairs of `pattern`, else 0.

    This is attention with keys and queries exchanged and the weights as values; each sum is the numerator of its
    softmax.

    Args:
        q, k: `(tokens, heads, head_dim)`, from `_Layer.read`.
        weights: `(sums, tokens)`.
    """
    heads = q.shape[1]
    kv_heads = k.shape[1]
    ratio = heads // kv_heads
    offsets = []
    for row in pattern.offset_table(kv_heads):
        offsets.append([row[head // ratio] for head in range(heads)])
    turned = Dilated(pattern.segment_lengths, pattern.dilation_rates, offsets)

    values = weights.T[None, :, None].expand(1, -1, heads, -1)
    keys = k.repeat_interleave(ratio, 1)
    with torch.autocast(q.device.type, enabled=False):
        out, lse = attention(keys[None], q[None], values, turned, scale=1.0, return_lse=True)
    return out[0].permute(2, 1, 0) * lse[0].exp()
