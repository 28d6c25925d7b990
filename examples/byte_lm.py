"""A LongNet language model learns the bytes of Python's standard library, and continues a line.

`dilated-attention train` does the same with checkpoints, a schedule and a measured loss; this is the loop alone.
"""

from __future__ import annotations

import argparse

import torch

from dilated_attention import Dilated
from dilated_attention.models import LongNetConfig, LongNetLM
from dilated_attention_lab.training.text import read_text

CONTEXT = 1024


def main(steps: int = 200, prompt: str = "def main(") -> tuple[dict[str, float], str]:
    torch.manual_seed(0)
    split = read_text([]).split(CONTEXT)
    model = LongNetLM(
        LongNetConfig(
            embed_dim=128, num_layers=4, num_heads=4, pattern=Dilated((128, 512, 2048), (1, 4, 4))
        )
    )  # fmt: skip
    held_out = split.sample_held_out(8)

    def bits() -> float:
        with torch.no_grad():
            return model.loss(held_out).item() / 0.6931

    losses = {"untrained": bits()}
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1, (step + 1) / 20, (steps - step) / steps * 2)
        optimizer.zero_grad()
        model.loss(split.batch(4, generator)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    losses["trained"] = bits()
    start = torch.tensor(list(prompt.encode()))[None]
    sample = model.generate(start, 60, temperature=0.7, generator=generator)
    return losses, bytes(sample[0].tolist()).decode(errors="replace")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help=f"batches of 4 windows of {CONTEXT:,} bytes")
    parser.add_argument("--prompt", default="def main(", help="what the sample begins with")
    options = parser.parse_args()
    losses, sample = main(options.steps, options.prompt)
    for name, value in losses.items():
        print(f"{value:.3f} bits per byte, {name}")
    print(sample)
