"""`generate`: text from a model that `train` has made."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from dilated_attention.plumbing import storage
from dilated_attention_lab.commands.options import natural, plain, positive, seed
from dilated_attention_lab.environment import require_device
from dilated_attention_lab.terminal import console
from dilated_attention_lab.training import writing


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Continue a prompt with a byte-level model, and print each byte as soon as it is drawn. The prompt is read "
        "once; then every byte costs the same, however long the text has become."
    )
    parser.add_argument(
        "model",
        type=Path,
        nargs="?",
        default=Path("runs/train"),
        help="folder of a model, or of a run whose newest checkpoint is used (default: runs/train)",
    )
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", default="\n", help="text to continue (default: an empty line)", metavar="TEXT")
    prompt.add_argument("--prompt-file", type=Path, help="file to continue; - for standard input", metavar="FILE")
    plain(parser, "bytes", natural, 1024, "bytes to write")
    plain(parser, "temperature", float, 0.8, "sampling temperature; 0 always picks the most likely byte")
    parser.add_argument("--top-k", type=positive, help="sample among the N most likely bytes", metavar="N")
    parser.add_argument(
        "--top-p", type=float, help="sample among the fewest bytes that reach probability X together", metavar="X"
    )
    plain(parser, "seed", seed, 0, "seed for sampling")
    plain(parser, "device", str, "cpu", "a PyTorch device")
    plain(parser, "backend", str, "auto", "backend of dilated attention")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.prompt_file is None:
        prompt = os.fsencode(options.prompt)
    elif str(options.prompt_file) == "-":
        prompt = sys.stdin.buffer.read()
    else:
        prompt = storage.read_bytes(options.prompt_file)
    if not prompt:
        source = "--prompt" if options.prompt_file is None else f"--prompt-file {options.prompt_file}"
        raise ValueError(f"{source} is empty: give at least one character")
    with console(stderr=True).status("reading the model and the prompt"):
        model = writing.load(options.model, require_device(options.device), options.backend)
        sampling = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
        pieces = writing.write(model, prompt, options.bytes, seed=options.seed, **sampling)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return 0
