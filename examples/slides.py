"""Classify pathology slides of very different sizes, in ragged batches, with the shape of GigaPath's slide encoder.

A slide is a bag of tiles, each with a feature vector and its place. Synthetic slides have 60 to 1,200 tiles of noise;
in the positive ones a neighbourhood of tiles shares a weak signal, which no tile shows alone. Batches are padded, and
`lengths` sees to it that padding costs and influences nothing: a slide's result is what it is alone.

At the end `tile_attention` says which tiles of a positive slide its embedding attends to; `--picture` draws them.

For the published encoder, read its weights instead: `dilated_attention.models.load_gigapath`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dilated_attention import Dilated
from dilated_attention.models import GigaPathConfig, GigaPathSlideEncoder, LongNetConfig, tile_attention

FEATURES, GRID, TILE = 32, 64, 256


class SlideClassifier(nn.Module):
    """Logits of slides: features `(slides, tiles, FEATURES)`, coords `(slides, tiles, 2)` in pixels, tiles of each."""

    def __init__(self) -> None:
        super().__init__()
        longnet = LongNetConfig(
            vocab_size=None,
            embed_dim=64,
            num_layers=2,
            num_heads=4,
            mlp_dim=128,
            pattern=Dilated((128, 724, 4096), (1, 2, 4), "head_block"),
            positions=None,
        )
        self.encoder = GigaPathSlideEncoder(
            GigaPathConfig(in_chans=FEATURES, slide_ngrids=GRID, tile_size=TILE, global_pool=True, encoder=longnet)
        )
        self.head = nn.Linear(longnet.embed_dim, 1)

    def forward(self, features: Tensor, coords: Tensor, lengths: Tensor) -> Tensor:
        return self.head(self.encoder(features, coords, lengths=lengths)).squeeze(-1)


def slides(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features, coords, lengths and labels of a padded batch; tiles come in rows, as scanners give them."""
    lengths = (60 * 20 ** torch.rand(number, generator=generator)).long()
    labels = torch.rand(number, generator=generator) < 0.5
    features = torch.randn(number, int(lengths.max()), FEATURES, generator=generator)
    coords = torch.zeros(*features.shape[:2], 2, dtype=torch.int64)
    for i, length in enumerate(lengths.tolist()):
        chosen = torch.randperm(GRID * GRID, generator=generator)[:length].sort().values
        places = torch.stack((chosen // GRID, chosen % GRID), -1)
        coords[i, :length] = places * TILE
        if labels[i]:
            centre = places[torch.randint(length, (), generator=generator)]
            near = (places - centre).float().norm(dim=-1).argsort()[: length // 5]
            features[i, near] += 2.0 / FEATURES**0.5
    return features, coords, lengths, labels.float()


@torch.no_grad()
def accuracy(model: SlideClassifier, batch: tuple[Tensor, ...]) -> float:
    return ((model(*batch[:3]) > 0) == (batch[3] > 0)).float().mean().item()


def main(steps: int = 150, picture: Path | None = None) -> dict[str, float]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = SlideClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    test = slides(32, torch.Generator().manual_seed(1))
    found = {"accuracy, untrained": accuracy(model, test)}
    for _ in range(steps):
        *inputs, labels = slides(8, generator)
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(model(*inputs), labels).backward()
        optimizer.step()
    found["accuracy, trained"] = accuracy(model, test)

    features, coords, lengths, _ = test
    with torch.no_grad():
        together = model(features, coords, lengths)
        alone = [
            model(features[i : i + 1, :n], coords[i : i + 1, :n], lengths[i : i + 1])
            for i, n in enumerate(lengths.tolist())
        ]
    difference = (together - torch.cat(alone)).abs().max().item()
    found["largest difference of a slide in a batch to the slide alone"] = difference

    attended = tile_attention(model.eval().encoder, features, coords, lengths=lengths)
    positive = int((lengths * test[3]).argmax())
    found["share of a slide's attention that its tiles get, rolled up"] = attended.rolled_up[positive].sum().item()
    if picture is not None:
        axes = attended.plot(positive)
        axes.figure.savefig(picture, dpi=120)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="batches of 8 slides")
    parser.add_argument("--picture", type=Path, help="draw the attention over a positive slide's tiles into this file")
    options = parser.parse_args()
    for name, value in main(options.steps, options.picture).items():
        print(f"{value:.3g}  {name}")
