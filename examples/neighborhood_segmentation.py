"""A small model of neighborhood attention, built like DiNAT, finds what lies inside drawn rings.

    python examples/neighborhood_segmentation.py --picture found.png

Pictures hold black and white rings under noise. A pixel is to be named by the ring around it: background, inside a
black ring, inside a white one. Nothing near a pixel inside says so, and windows of 5 x 5 tokens are small. So blocks
alternate between rate 1, which sees edges, and rate 4, which sees across a ring.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dilated_attention.nn import NeighborhoodAttention2D

SIDE = 48
PATCH = 2
CLASSES = ("background", "black", "white")


def draw(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return pictures `(number, 1, SIDE, SIDE)` and the class of each pixel, with two rings per picture."""
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    pictures = torch.zeros(number, SIDE, SIDE)
    classes = torch.zeros(number, SIDE, SIDE, dtype=torch.long)
    for _ in range(2):
        radius, row, column = (torch.rand(number, 1, 1, generator=generator) for _ in range(3))
        radius = 5 + 5 * radius
        row = radius + row * (SIDE - 2 * radius)
        column = radius + column * (SIDE - 2 * radius)
        is_white = torch.rand(number, 1, 1, generator=generator) < 0.5
        distance = (y - row).hypot(x - column) - radius
        pictures = torch.where(distance < 1, 0.0, pictures)
        pictures = torch.where(distance.abs() < 1, 2.0 * is_white - 1.0, pictures)
        classes = torch.where(distance < 0, 1 + is_white.long(), classes)
    noise = torch.randn(pictures.shape, generator=generator)
    return (pictures + 0.3 * noise)[:, None], classes


class Block(nn.Module):
    def __init__(self, dim: int, rate: int) -> None:
        super().__init__()
        self.near = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)  # tells left from right, which a window does not
        self.norm = nn.LayerNorm(dim)
        self.attention = NeighborhoodAttention2D(dim, num_heads=4, kernel_size=5, dilation=rate)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.near(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Segmenter(nn.Module):
    """Name every pixel: patches of 2 x 2 pixels become tokens, blocks follow, and each token names its four pixels."""

    def __init__(self, dim: int = 48, rates: tuple[int, ...] = (1, 4, 1, 4)) -> None:
        super().__init__()
        self.patches = nn.Sequential(
            nn.Conv2d(1, dim // 2, 3, padding=1), nn.GELU(), nn.Conv2d(dim // 2, dim, PATCH, stride=PATCH)
        )  # fmt: skip
        self.blocks = nn.Sequential(*[Block(dim, rate) for rate in rates])
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, len(CLASSES) * PATCH**2))

    def forward(self, pictures: Tensor) -> Tensor:
        """Return scores `(batch, classes, SIDE, SIDE)`."""
        x = self.patches(pictures).permute(0, 2, 3, 1)
        return F.pixel_shuffle(self.head(self.blocks(x)).permute(0, 3, 1, 2), PATCH)


def overlap(found: Tensor, classes: Tensor) -> float:
    """Return the mean over classes of intersection over union."""
    shares = []
    for number in range(len(CLASSES)):
        both = ((found == number) & (classes == number)).sum()
        either = ((found == number) | (classes == number)).sum()
        shares.append((both / either).item())
    return sum(shares) / len(shares)


def save_picture(path: str, pictures: Tensor, classes: Tensor, found: Tensor) -> None:
    """Save three rows of pictures: what the model sees, what is right, and what it found."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(3, 4, figsize=(8, 6.2), layout="constrained")
    for row, (name, images) in enumerate((("seen", pictures[:, 0]), ("right", classes), ("found", found))):
        limits = {} if row == 0 else {"vmin": 0, "vmax": len(CLASSES) - 1}
        for ax, image in zip(axes[row], images, strict=False):
            ax.imshow(image.numpy(), cmap="grey" if row == 0 else "cividis", **limits)
            ax.set(xticks=[], yticks=[])
        axes[row, 0].set_ylabel(name)
    figure.savefig(path, dpi=120)


def main(steps: int = 150, batch: int = 8, picture: str | None = None) -> tuple[list[float], float]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = Segmenter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    losses = []
    for step in range(steps):
        pictures, classes = draw(batch, generator)
        loss = F.cross_entropy(model(pictures), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 25 == 0 or step == steps - 1:
            print(f"step {step}: loss {losses[-1]:.3f}")

    pictures, classes = draw(16, generator)  # not seen in training
    with torch.no_grad():
        found = model(pictures).argmax(1)
    share = overlap(found, classes)
    print(f"intersection over union, mean of {', '.join(CLASSES)}: {share:.3f}")
    if picture is not None:
        save_picture(picture, pictures, classes, found)
    return losses, share


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--picture", help="where to save a picture of what the model found (needs matplotlib)")
    main(**vars(parser.parse_args()))
