"""`generate`: text from a model that `train` has made."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from dilated_attention.plumbing import storage
from dilated_attention_lab.environment import require_device
from dilated_attention_lab.options import natural, option, positive, seed
from dilated_attention_lab.terminal import console
from dilated_attention_lab.training import session, writing


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
    option(prompt, "prompt", str, "text to continue", "\n", shown="an empty line", metavar="TEXT")
    option(prompt, "prompt-file", Path, "file to continue; - for standard input", metavar="FILE")
    option(parser, "bytes", natural, "bytes to write", 1024)
    option(parser, "temperature", float, "sampling temperature; 0 always picks the most likely byte", 0.8)
    option(parser, "top-k", positive, "sample among the N most likely bytes")
    option(parser, "top-p", float, "sample among the fewest bytes that reach probability X together")
    option(parser, "seed", seed, "seed for sampling", 0)
    option(parser, "device", str, "a PyTorch device", "cpu")
    option(parser, "backend", str, "backend of dilated attention", "auto")
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
        model = session.load_model(options.model, require_device(options.device), options.backend)
        sampling = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
        pieces = writing.write(model, prompt, options.bytes, seed=options.seed, **sampling)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return 0
