"""`train`: train a byte-level language model in one process, or in several under torchrun."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from dilated_attention import Dilated
from dilated_attention.models import LongNetConfig
from dilated_attention.plumbing import ContextParallelError
from dilated_attention_lab.commands import in_options
from dilated_attention_lab.environment import environment
from dilated_attention_lab.options import flag, integers, natural, option, positive, seed
from dilated_attention_lab.terminal import console
from dilated_attention_lab.training import session
from dilated_attention_lab.training.loop import OPTIONS, Recipe
from dilated_attention_lab.training.ranks import Ranks, require_divisor
from dilated_attention_lab.training.watch import Watch

DEFAULTS = {field.name: field.default for kind in (LongNetConfig, Recipe) for field in dataclasses.fields(kind)}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train a byte-level LongNet language model; one window of text in 20 is held out. Ctrl-C saves a "
        "checkpoint, and --resume continues from it. On the CPU the losses are then the same bit for bit."
    )
    parser.add_argument(
        "paths", nargs="*", type=Path, help="files or folders of text (default: the Python standard library's sources)"
    )
    option(parser, "out", Path, "folder of the run", Path("runs/train"))
    begin = parser.add_mutually_exclusive_group()
    flag(
        begin,
        "resume",
        "continue the run in --out with its options and text, or start it if there is none yet and text is given: "
        "one command for a run that may be restarted. A larger --steps extends even a finished run; its learning rate "
        "then follows the longer schedule",
    )
    flag(begin, "overwrite", "start a new run even if --out holds a checkpoint or a report")
    _kept(parser, "device", str, "a PyTorch device")
    _kept(parser, "backend", str, "backend of dilated attention")
    _kept(parser, "save-every", positive, "steps between checkpoints")
    _kept(parser, "keep", natural, "older checkpoints to keep; --resume uses the newest undamaged one")
    _kept(parser, "held-out", positive, "held-out windows to measure at the end")
    _kept(parser, "sample", natural, "bytes of sample text to write at the end")

    ranks = parser.add_argument_group(
        "several processes", "under torchrun --nproc-per-node=W -m dilated_attention train"
    )
    option(ranks, "context-parallel", positive, "processes that share each sequence; the others share the batch", 1)
    option(ranks, "timeout", positive, "seconds that a process waits for a lost process", 300)

    model = parser.add_argument_group("model")
    _given(model, "layers", int, "num_layers", "transformer blocks")
    _given(model, "dim", int, "embed_dim", "width")
    _given(model, "heads", int, "num_heads", "attention heads")
    _given(model, "kv-heads", int, "num_kv_heads", "number of KV heads (default: --heads)")
    _given(model, "segments", integers, "segment_lengths", "segment lengths (default: context/16,context/4,context)")
    each = "dilation rate of each segment length (default: 1,4,16, at most --heads)"
    _given(model, "rates", integers, "dilation_rates", each)
    flag(model, "dense", "use dense attention (PyTorch's fused operator)")

    recipe = parser.add_argument_group("recipe")
    _given(recipe, "context", int, "context", "bytes per sequence")
    _given(recipe, "batch", int, "batch_size", "sequences per step")
    _given(recipe, "steps", int, "steps", "optimizer steps")
    _given(recipe, "lr", float, "learning_rate", "peak learning rate")
    _given(recipe, "warmup", int, "warmup_steps", "steps of linear warm-up")
    _given(recipe, "weight-decay", float, "weight_decay", "weight decay of the matrices")
    _given(recipe, "seed", seed, "seed", "seed for the weights and the order of the text")
    _given(recipe, "dtype", str, "dtype", "dtype of products and attention: float32 or bfloat16; weights stay float32")
    parser.set_defaults(run=run)


def _kept(parser: Any, name: str, kind: Callable[[str], Any], text: str) -> None:
    """Add an option that is None in the namespace unless given; `chosen_options` then takes the value that the resumed
    run stored, or else the default in `OPTIONS`."""
    option(parser, name, kind, text, shown=OPTIONS[name.replace("-", "_")])


def _given(group: Any, name: str, kind: Callable[[str], Any], field: str, text: str) -> None:
    """Add an option that the namespace holds, as `field`, only if given: --resume takes others from the checkpoint."""
    option(group, name, kind, text, argparse.SUPPRESS, shown=DEFAULTS.get(field), dest=field)


def run(options: argparse.Namespace) -> int:
    watch: Watch | None = None
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    with session.noted_signals() if several else nullcontext() as received:
        try:
            if not several:
                return _run(options)
            watch = Watch.join(options.timeout)
            watch.gather()
            watch.start(lambda line: _fail(1, f"{line}; {_onwards(options.out)}", watch))
            with watch.guard():
                code = _run(options, watch, received)
            watch.leave()
            return code
        except ValueError as error:
            return _fail(2, str(error), watch)
        except FloatingPointError as error:
            return _fail(1, f"{error}; the last checkpoint in {options.out} is kept", watch)
        except ContextParallelError as error:
            return _fail(1, f"{error}; {_onwards(options.out)}", watch)
        except OSError as error:
            if watch is None and isinstance(error, BrokenPipeError):
                raise  # the reader of the output has left, and `main` ends the command
            what = error.filename or "output"  # a stream has no name
            return _fail(2, f"{what}: cannot be written ({error.strerror}); {_onwards(options.out)}", watch)


def _run(options: argparse.Namespace, watch: Watch | None = None, received: Sequence[int] | None = None) -> int:
    """Train, and return the exit code. With several processes, each of them runs this.

    watch, received: the watch over all processes, and the list of `noted_signals`; None for one process.
    """
    given = vars(options)
    model: dict[str, Any] = {
        name: given[name] for name in ("num_layers", "embed_dim", "num_heads", "num_kv_heads") if name in given
    }
    recipe = {field.name: given[field.name] for field in dataclasses.fields(Recipe) if field.name in given}
    if "segment_lengths" in given or "dilation_rates" in given:
        if options.dense or "segment_lengths" not in given or "dilation_rates" not in given:
            raise ValueError("--segments and --rates go together, and not with --dense")
        model["pattern"] = Dilated(options.segment_lengths, options.dilation_rates)
    elif options.dense:
        model["pattern"] = None
    continues = options.resume and (session.saved(options.out) or not options.paths)
    kept = session.chosen_options(options.out if continues else None, given)
    ranks = _connect(options, kept, watch, continues)
    where = {"device": kept["device"], "backend": kept["backend"], "ranks": ranks}
    first = ranks is None or ranks.first
    if continues:
        training = session.resume(options.paths, options.out, model, recipe, **where)
        if first:
            session.remember(options.out, kept)
    else:
        training = session.start(
            options.paths, options.out, model, recipe, overwrite=options.overwrite, options=kept, **where
        )
    code: int = session.run(training, options.out, console(quiet=not first), kept, received)
    if ranks is not None:
        ranks.leave()
    return code


def _connect(
    options: argparse.Namespace, kept: Mapping[str, Any], watch: Watch | None, continues: bool
) -> Ranks | None:
    """Connect the processes of a run after checking that their options and versions agree; None for one process."""
    require_divisor(options.context_parallel, 1 if watch is None else watch.size)
    if watch is None:
        return None
    names = ("out", "overwrite", "context_parallel", "timeout")
    here = environment()
    versions = {"torch": here["torch"], "dilated_attention": here["dilated_attention"]}
    python = ".".join(map(str, sys.version_info[:2]))
    watch.agree(
        {"resume": continues, **{name: vars(options)[name] for name in names}, **kept, **versions, "python": python}
    )
    return Ranks.connect(watch, options.context_parallel, torch.device(kept["device"]))


def _onwards(out: Path) -> str:
    """Return, for an error message, how to continue the run in `out`."""
    if session.saved(out):
        return f"--resume continues {out}"
    return f"nothing is saved in {out} yet: start again"


def _fail(code: int, problem: str, watch: Watch | None) -> int:
    """Print in one line why `train` ends, and return the code. With a `watch`, which several processes have, pass the
    problem to the other ranks and exit here: a return would leave the group, and could wait for silent ranks."""
    print(f"dilated-attention train: error: {in_options('train', ' '.join(problem.split()))}", file=sys.stderr)
    if watch is not None:
        watch.leave(problem)
        sys.stdout.flush()
        os._exit(code)
    return code
