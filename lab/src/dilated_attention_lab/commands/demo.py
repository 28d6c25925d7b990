"""`demo`: what dilated attention is for, in five minutes."""

from __future__ import annotations

import argparse
from pathlib import Path

from dilated_attention_lab.environment import require_device
from dilated_attention_lab.options import option, positive, seed
from dilated_attention_lab.terminal import console
from dilated_attention_lab.training import demo


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "A small model learns to recall a fact from anywhere in --tokens tokens; the same model with a "
        "local window, and the cost of dense attention, are shown beside it. A byte model of the Python standard "
        "library's sources is compared with itself given less context. At most 5 minutes on 2 CPU cores."
    )
    option(parser, "out", Path, "folder for figures and pictures", Path("runs/demo"))
    option(parser, "tokens", positive, "length of the sequence to recall a fact from", 32768)
    option(parser, "seconds", float, "seconds of training on text", 110.0)
    option(parser, "seed", seed, "seed for weights, questions and text", 0)
    option(parser, "device", str, "a PyTorch device", "cpu")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    for name, least, most in (("tokens", 256, 1 << 24), ("seconds", 0.0, 86400.0)):
        if not least <= getattr(options, name) <= most:
            raise ValueError(f"--{name} {getattr(options, name)}: must lie in [{least}, {most:g}]")
    device = require_device(options.device)
    return demo.demo(
        options.out, console(), tokens=options.tokens, seconds=options.seconds, seed=options.seed, device=device
    )
