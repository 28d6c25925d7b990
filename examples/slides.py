"""Classify pathology slides of very different sizes, in ragged batches, with GigaPath's branches.

A slide is a bag of tiles, each with a feature vector and its place. Synthetic slides have 60 to 1,200 tiles of noise;
in the positive ones a small neighbourhood of tiles shares a weak signal, which no tile shows alone. Batches are padded,
and `lengths` sees to it that padding costs and influences nothing: a slide's result is what it is alone.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dilated_attention.nn import DilatedAttention

FEATURES, GRID = 32, 64


class Block(nn.Module):
    """x + A(norm x), then x + MLP(norm x)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.input, self.output = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.attention = DilatedAttention([128, 724, 4096], [1, 2, 4], offsets="head_block")

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        q, k, v = self.input(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        x = x + self.output(self.attention(q, k, v, lengths=lengths).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class SlideClassifier(nn.Module):
    """Logits of ragged slides: features `(slides, tiles, FEATURES)`, places `(slides, tiles, 2)`, tiles of each."""

    def __init__(self, dim: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tile = nn.Linear(FEATURES, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 1))

    def forward(self, features: Tensor, places: Tensor, lengths: Tensor) -> Tensor:
        x = self.tile(features) + sines(places, self.tile.out_features)
        for block in self.blocks:
            x = block(x, lengths)
        scores = self.head(x).squeeze(-1)
        padding = torch.arange(scores.shape[1]) >= lengths[:, None]
        return scores.masked_fill(padding, -torch.inf).logsumexp(1) - lengths.log()


def sines(places: Tensor, dim: int) -> Tensor:
    """Two-dimensional sine positions: half of the channels for each coordinate."""
    angle = places[..., None] * GRID ** -torch.linspace(0, 1, dim // 4)
    return torch.cat((angle.sin(), angle.cos()), -1).flatten(-2)


def slides(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features, places, lengths and labels of a padded batch; tiles come in rows, as scanners give them."""
    lengths = (60 * 20 ** torch.rand(number, generator=generator)).long()
    labels = torch.rand(number, generator=generator) < 0.5
    signal = torch.ones(FEATURES) / FEATURES**0.5
    features = torch.randn(number, int(lengths.max()), FEATURES, generator=generator)
    places = torch.zeros(*features.shape[:2], 2)
    for i, length in enumerate(lengths.tolist()):
        chosen = torch.randperm(GRID * GRID, generator=generator)[:length].sort().values
        places[i, :length] = torch.stack((chosen // GRID, chosen % GRID), -1).float()
        if labels[i]:
            centre = places[i, torch.randint(length, (), generator=generator)]
            near = (places[i, :length] - centre).norm(dim=-1).argsort()[: max(8, length // 8)]
            features[i, near] += 2.0 * signal
    return features, places, lengths, labels.float()


def main(steps: int = 150) -> dict[str, float]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = SlideClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    test = slides(64, torch.Generator().manual_seed(1))

    def accuracy() -> float:
        with torch.no_grad():
            return ((model(*test[:3]) > 0) == (test[3] > 0)).float().mean().item()

    found = {"accuracy, untrained": accuracy()}
    for _ in range(steps):
        *inputs, labels = slides(8, generator)
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(model(*inputs), labels).backward()
        optimizer.step()
    found["accuracy, trained"] = accuracy()

    features, places, lengths, _ = test
    with torch.no_grad():
        together = model(features, places, lengths)
        alone = [
            model(features[i : i + 1, :n], places[i : i + 1, :n], lengths[i : i + 1])
            for i, n in enumerate(lengths.tolist())
        ]
    found["largest difference of a slide in a batch to the slide alone"] = (
        (together - torch.cat(alone)).abs().max().item()
    )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="batches of 8 slides")
    for name, value in main(parser.parse_args().steps).items():
        print(f"{value:.3g}  {name}")
