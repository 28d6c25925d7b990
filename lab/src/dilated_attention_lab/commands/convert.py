"""`convert`: write a released checkpoint as a folder of this library, and print how much their outputs differ."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.table import Table

from dilated_attention_lab.conversion import convert
from dilated_attention_lab.options import flag, integers, option, positive, seed
from dilated_attention_lab.terminal import console, show


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a checkpoint as a folder that `from_pretrained` reads. Then print how much the model and the "
        "released algorithm differ on random input. Files are never unpickled."
    )
    parser.add_argument("checkpoint", type=Path, help="a state_dict: a safetensors file, or one written by torch.save")
    parser.add_argument("out", type=Path, help="folder to write")
    flag(parser, "overwrite", "write even if the folder exists")
    kinds = ("gigapath", "longvit", "torchscale")
    parser.add_argument("--kind", choices=kinds, required=True, help="which model the weights are for")
    architectures = ("attention", "encoder", "decoder")
    parser.add_argument("--architecture", choices=architectures, help="torchscale's model (default: recognised)")
    option(parser, "heads", positive, "attention heads", shown="16, or inferred from xPos")
    option(parser, "segments", integers, "segment lengths", shown="the released ones")
    option(parser, "rates", integers, "dilation rate of each segment length")
    flag(parser, "corrected", "write the exact model, which attends no padding (compat=None)")
    option(parser, "prefix", str, "take only weights whose names begin with it, and strip it")
    flag(parser, "leave-surplus", "ignore weights that the model does not use")
    option(parser, "tokens", positive, "length of the random input", 300)
    option(parser, "seed", seed, "seed for the random input", 0)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    given = {
        "num_heads": options.heads,
        "segment_lengths": options.segments,
        "dilation_rates": options.rates,
        "architecture": options.architecture,
        "prefix": options.prefix or None,
        "surplus": "warn" if options.leave_surplus else None,
    }
    if options.kind == "torchscale" and (options.segments is None or options.rates is None):
        raise ValueError("--segments and --rates: the weights do not tell; give both")
    if options.kind != "torchscale" and options.architecture is not None:
        raise ValueError(
            f"--architecture {options.architecture} is of --kind torchscale; --kind {options.kind} has only one: leave "
            "--architecture out"
        )
    with console(stderr=True).status("converting and comparing"):
        model, found = convert(
            options.checkpoint,
            options.out,
            options.kind,
            tokens=options.tokens,
            seed=options.seed,
            compat=None if options.corrected else "torchscale",
            overwrite=options.overwrite,
            **{name: value for name, value in given.items() if value is not None},
        )
    table = Table("difference between", title=f"{type(model).__name__}, random input", title_justify="left")
    for heading in ("greatest of an entry", "in norm"):
        table.add_column(heading, justify="right")
    for row in found:
        table.add_row(row.name, f"{row.greatest:.2g}", f"{row.relative:.2g}")
    show(table)
    print(f"written: {options.out}/config.json, model.safetensors")
    return 0
