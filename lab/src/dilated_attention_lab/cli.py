"""The command `dilated-attention`: arguments only."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from dilated_attention.environment import (
    device_name,
    environment,
    own_version,
    report,
    require_device,
    unavailable,
)
from dilated_attention.errors import ContextParallelError, MissingPackageError, require
from dilated_attention.models import LongNetConfig
from dilated_attention.parallel.presence import Watch
from dilated_attention.patterns import Dilated
from dilated_attention.storage import read_bytes
from dilated_attention.suggestion import suggest_pattern
from dilated_attention.terminal import console, show
from dilated_attention.training.loop import OPTIONS, Recipe

if TYPE_CHECKING:
    from dilated_attention.training.ranks import Ranks

DEFAULTS = {field.name: field.default for kind in (LongNetConfig, Recipe) for field in dataclasses.fields(kind)}
MEASURING = {
    "bench": "measure speed and memory against dense attention",
    "compare": "put every variant, and other implementations that you have, into one table",
    "profile": "show where the time and the memory of a call go",
    "plot": "draw a pattern; or the pictures and tables of the documents, from the files of results",
    "simulate": "run one rank of a large context parallel world: bytes, peers, compute, memory, modelled time",
}
"""The commands of the benchmark, which is loaded when one of them is called."""
ARGUMENTS = {
    "batch_size": "--batch",
    "dilation_rates": "--rates",
    "embed_dim": "--dim",
    "first_segment": "--segment",
    "is_causal": "--causal",
    "num_heads": "--heads",
    "num_kv_heads": "--kv-heads",
    "segment_lengths": "--segments",
    "seq_len": "--tokens",
}
"""Arguments of the library: the option that gives each, in the commands that have it."""


class _Parser(argparse.ArgumentParser):
    def __init__(self, *arguments: Any, load: Callable[[_Parser], None] | None = None, **options: Any) -> None:
        """load: adds the parser's options when it is first asked to parse."""
        super().__init__(*arguments, **options)
        self._load = load

    def complete(self) -> None:
        """Have the options that are loaded on demand."""
        if self._load is not None:
            self._load(self)
            self._load = None

    def parse_known_args(self, *arguments: Any, **options: Any) -> Any:
        self.complete()
        found, unknown = super().parse_known_args(*arguments, **options)
        if unknown:  # here, where the options of the command are known
            near = [get_close_matches(word, self._option_string_actions, 1) for word in unknown]
            meant = [word for words in near for word in words]
            hint = f"; did you mean {' '.join(meant)}?" if meant else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0; 2 for bad input and 1 for training that
    diverged or results that could not be kept, with one line on stderr; 128 + n after signal n.

    Bad input is a ValueError or an OSError, from wherever; any other error is a fault of ours and shows where.
    """
    try:
        options = command_line().parse_args(arguments)
        if options.run not in (_info, _suggest):
            require("rich", "matplotlib")
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            code: int = options.run(options)
        sys.stdout.flush()
    except MissingPackageError as error:
        print(f"dilated-attention: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("dilated-attention: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # who reads has heard enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ValueError, OSError) as error:
        print(f"dilated-attention {options.command}: error: {_in_a_line(options.command, error)}", file=sys.stderr)
        return 2
    return code


def command_line() -> argparse.ArgumentParser:
    """The parser of every command; the namespace it makes holds the command's name and what runs it."""
    parser = _Parser(prog="dilated-attention", description="Exact dilated attention over very long sequences.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {own_version()}")
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    _add_demo(commands)
    _add_train(commands)
    _add_generate(commands)
    _add_convert(commands)
    _add_suggest(commands)
    _add_info(commands)
    for name, text in MEASURING.items():
        commands.add_parser(name, help=text, load=partial(_load_measuring, name))
    return parser


def _in_a_line(command: str, error: ValueError | OSError) -> str:
    if isinstance(error, OSError) and error.strerror is not None:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return _in_options(command, " ".join(str(error).split()))


def _in_options(command: str, message: str) -> str:
    """Return an error of the library with the names of Python's arguments replaced by the command's options; one about
    the fields of a file as it is."""
    if re.match(r"\S+\.json: ", message):
        return message
    (commands,) = (x for x in command_line()._actions if isinstance(x, argparse._SubParsersAction))
    parser = commands.choices[command]
    parser.complete()
    names = {action.dest: action.option_strings[-1] for action in parser._actions if action.option_strings}
    names |= {name: option for name, option in ARGUMENTS.items() if option in parser._option_string_actions}
    alone, name = r"(?<![\w/.-])", "|".join(names)

    def given(found: re.Match[str]) -> str:
        return f"{names[found[1]]} {found[3] if found[2] is None else found[2].replace(' ', '')}"

    message = re.sub(rf"{alone}({name})=True\b", lambda found: names[found[1]], message)
    message = re.sub(rf"{alone}({name})=(?:\((\d[\d, ]*\d)\)|'([^' ]+)')", given, message)
    message = re.sub(rf"{alone}({name})= ?", lambda found: f"{names[found[1]]} ", message)
    long = "|".join(word for word in names if "_" in word) or name
    message = re.sub(rf"{alone}({long})\b(?![/.-]\w)", lambda found: names[found[1]], message)
    return re.sub(rf"^({name})(?= must\b|:)", lambda found: names[found[1]], message)


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    """A warning as a line for the user of a command, who did not write the line of code that it is about."""
    print(f"dilated-attention: warning: {message}", file=sys.stderr)


def _load_measuring(name: str, parser: _Parser) -> None:
    import_module("dilated_attention_bench.command").add_options(name, parser)


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="show what dilated attention is for: recall over a long sequence, and a model of real text",
        description="A small model learns to recall a fact from anywhere in --tokens tokens; the same model with a "
        "local window, and the cost of dense attention, are shown beside it. A byte model of the Python standard "
        "library's sources is compared with a table of order 3 and with itself given less context. At most 5 minutes "
        "on 2 CPU cores.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for figures and pictures")
    parser.add_argument(
        "--tokens", type=_positive, default=32768, help="in a sequence to recall a fact from", metavar="N"
    )
    parser.add_argument("--seconds", type=float, default=110.0, help="of training on text", metavar="X")
    parser.add_argument("--seed", type=_seed, default=0, help="of weights, questions and text", metavar="N")
    parser.add_argument("--device", default="cpu", help="a PyTorch device")
    parser.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    from dilated_attention.training.demo import demo

    for name, least, most in (("tokens", 256, 1 << 24), ("seconds", 0.0, 86400.0)):
        if not least <= getattr(options, name) <= most:
            raise ValueError(f"--{name} {getattr(options, name)}: must lie in [{least}, {most:g}]")
    device = require_device(options.device)
    return demo(
        options.out, console(), tokens=options.tokens, seconds=options.seconds, seed=options.seed, device=device
    )


def _add_train(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train a byte-level language model on any text",
        description="Train a byte-level LongNet language model; one window of text in 20 is held out. Ctrl-C saves a "
        "checkpoint, and --resume continues it, on the CPU to the same losses bit for bit.",
    )
    parser.add_argument(
        "paths", nargs="*", type=Path, help="files or folders of text (default: the Python standard library's sources)"
    )
    _plain(parser, "out", Path, Path("runs/train"), "folder of the run")
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in --out with its options and text, or start it if there is none yet and text is given: "
        "one command for a run that may be restarted. More --steps extend even a finished run, whose learning rate "
        "then follows the schedule of the larger number",
    )
    begin.add_argument(
        "--overwrite", action="store_true", help="start anew even if --out holds a checkpoint or a report"
    )
    _kept(parser, "device", str, "a PyTorch device")
    _kept(parser, "backend", str, "of dilated attention")
    _kept(parser, "save-every", _positive, "steps between checkpoints")
    _kept(parser, "keep", _natural, "older checkpoints to keep: --resume takes the newest that is whole")
    _kept(parser, "held-out", _positive, "held-out windows to measure at the end")
    _kept(parser, "sample", _natural, "bytes of sample text to write at the end")

    ranks = parser.add_argument_group(
        "several processes", "under torchrun --nproc-per-node=W -m dilated_attention train"
    )
    _plain(ranks, "context-parallel", _positive, 1, "processes that share each sequence; the others share the batch")
    _plain(ranks, "timeout", _positive, 300, "seconds that a process waits for a lost one")

    model = parser.add_argument_group("model")
    _given(model, "layers", int, "num_layers", "transformer blocks")
    _given(model, "dim", int, "embed_dim", "width")
    _given(model, "heads", int, "num_heads", "attention heads")
    _given(model, "kv-heads", int, "num_kv_heads", "heads of keys and values (default: as --heads)")
    _given(model, "segments", _integers, "segment_lengths", "segment lengths (default: context/16,context/4,context)")
    _given(
        model,
        "rates",
        _integers,
        "dilation_rates",
        "dilation rate of each segment length (default: 1,4,16, at most the heads)",
    )
    model.add_argument("--dense", action="store_true", help="dense attention, by PyTorch's fused operator")

    recipe = parser.add_argument_group("recipe")
    _given(recipe, "context", int, "context", "bytes per sequence")
    _given(recipe, "batch", int, "batch_size", "sequences per step")
    _given(recipe, "steps", int, "steps", "optimizer steps")
    _given(recipe, "lr", float, "learning_rate", "peak learning rate")
    _given(recipe, "warmup", int, "warmup_steps", "steps of linear warm-up")
    _given(recipe, "weight-decay", float, "weight_decay", "decay of the matrices")
    _given(recipe, "seed", _seed, "seed", "of the weights and of the order of the text")
    _given(recipe, "dtype", str, "dtype", "of matrix products and attention, float32 or bfloat16; weights stay float32")
    parser.set_defaults(run=_train)


def _plain(parser: Any, name: str, kind: Callable[[str], Any], default: Any, text: str) -> None:
    help_text = f"{text} (default: {default})"
    parser.add_argument(f"--{name}", type=kind, default=default, help=help_text, metavar=name.upper())


def _kept(parser: Any, name: str, kind: Callable[[str], Any], text: str) -> None:
    """An option that --resume takes from the run if it is not given."""
    help_text = f"{text} (default: {OPTIONS[name.replace('-', '_')]})"
    parser.add_argument(f"--{name}", type=kind, help=help_text, metavar=name.upper())


def _given(group: Any, name: str, kind: Callable[[str], Any], field: str, text: str) -> None:
    """An option that the namespace holds only if given: --resume takes the others from the checkpoint."""
    if DEFAULTS.get(field) is not None:
        text += f" (default: {DEFAULTS[field]})"
    metavar = {int: "N", _seed: "N", float: "X", str: "NAME"}.get(kind, "N,N,...")
    group.add_argument(f"--{name}", type=kind, dest=field, default=argparse.SUPPRESS, help=text, metavar=metavar)


def _train(options: argparse.Namespace) -> int:
    from dilated_attention.training import session

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
            what = error.filename or "output"  # a stream has no name
            return _fail(2, f"{what}: cannot be written ({error.strerror}); {_onwards(options.out)}", watch)


def _run(options: argparse.Namespace, watch: Watch | None = None, received: Sequence[int] | None = None) -> int:
    """Train; with several processes, each of them runs this."""
    from dilated_attention.training import session

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
    code: int = session.run(
        training,
        options.out,
        console(quiet=not first),
        save_every=kept["save_every"],
        keep=kept["keep"],
        held_out_windows=kept["held_out"],
        sample_bytes=kept["sample"],
        received=received,
    )
    if ranks is not None:
        ranks.leave()
    return code


def _connect(
    options: argparse.Namespace, kept: Mapping[str, Any], watch: Watch | None, continues: bool
) -> Ranks | None:
    """This process's place in a run of several, all started with the same options and versions; None if alone."""
    if watch is None and options.context_parallel == 1:
        return None
    from dilated_attention.training.ranks import Ranks, require_divisor

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
    """What to do after a rank was lost."""
    from dilated_attention.training import session

    if session.saved(out):
        return f"--resume continues {out}"
    return f"nothing is saved in {out} yet: start again"


def _fail(code: int, problem: str, watch: Watch | None) -> int:
    """Say why `train` ends, in one line. One of several processes exits here, without the collective goodbye that the
    others may not answer."""
    print(f"dilated-attention train: error: {_in_options('train', ' '.join(problem.split()))}", file=sys.stderr)
    if watch is not None:
        watch.leave(problem)
        sys.stdout.flush()
        os._exit(code)
    return code


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="continue a text with a model that `train` has made",
        description="Continue a prompt with a byte-level model, byte by byte, as it is drawn. The prompt is read once; "
        "then every byte costs the same, however long the text has become.",
    )
    parser.add_argument(
        "model",
        type=Path,
        nargs="?",
        default=Path("runs/train"),
        help="folder of a model or of a run, which gives its newest checkpoint (default: runs/train)",
    )
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", default="\n", help="text to continue (default: an empty line)", metavar="TEXT")
    prompt.add_argument("--prompt-file", type=Path, help="file to continue; - for standard input", metavar="FILE")
    _plain(parser, "bytes", _natural, 1024, "bytes to write")
    _plain(parser, "temperature", float, 0.8, "of the softmax; 0 takes the likeliest byte")
    parser.add_argument("--top-k", type=_positive, help="sample among the N likeliest bytes", metavar="N")
    parser.add_argument("--top-p", type=float, help="sample among the fewest that reach probability X", metavar="X")
    _plain(parser, "seed", _seed, 0, "of the draws")
    _plain(parser, "device", str, "cpu", "a PyTorch device")
    _plain(parser, "backend", str, "auto", "of dilated attention")
    parser.set_defaults(run=_generate)


def _generate(options: argparse.Namespace) -> int:
    from dilated_attention.training import writing

    if options.prompt_file is None:
        prompt = os.fsencode(options.prompt)
    elif str(options.prompt_file) == "-":
        prompt = sys.stdin.buffer.read()
    else:
        prompt = read_bytes(options.prompt_file)
    if not prompt:
        source = "--prompt" if options.prompt_file is None else f"--prompt-file {options.prompt_file}"
        raise ValueError(f"{source} is empty: give at least one character")
    with console(stderr=True).status("reading the model and the prompt"):
        model = writing.load(options.model, require_device(options.device), options.backend)
        pieces = writing.write(
            model,
            prompt,
            options.bytes,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
        )
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return 0


def _add_convert(commands: Any) -> None:
    parser = commands.add_parser(
        "convert",
        help="convert a torchscale, GigaPath or LongViT checkpoint, and compare with its own algorithm",
        description="Write a checkpoint as a folder that `from_pretrained` reads, and print how far the model is, on "
        "random input, from what the released algorithm computes with the same weights. Files are never unpickled.",
    )
    parser.add_argument("checkpoint", type=Path, help="a state_dict: safetensors, or a file of torch.save")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="write even if the folder exists")
    parser.add_argument("--kind", choices=["gigapath", "longvit", "torchscale"], required=True, help="whose weights")
    architectures = ("attention", "encoder", "decoder", "encoder-decoder")
    parser.add_argument("--architecture", choices=architectures, help="of torchscale's model (default: recognised)")
    parser.add_argument("--heads", type=_positive, help="attention heads (default: 16, or as xPos tells)", metavar="N")
    parser.add_argument("--segments", type=_integers, help="segment lengths (default: the released)", metavar="N,N,...")
    parser.add_argument("--rates", type=_integers, help="dilation rate of each segment length", metavar="N,N,...")
    parser.add_argument(
        "--corrected", action="store_true", help="write the exact model, which attends no padding (compat=None)"
    )
    parser.add_argument("--prefix", default="", help="take only weights whose names begin with it, and strip it")
    parser.add_argument("--leave-surplus", action="store_true", help="leave weights that the model has no place for")
    _plain(parser, "tokens", _positive, 300, "of the random input")
    _plain(parser, "seed", _seed, 0, "of the random input")
    parser.set_defaults(run=_convert)


def _convert(options: argparse.Namespace) -> int:
    from rich.table import Table

    from dilated_attention.conversion import convert

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


def _add_suggest(commands: Any) -> None:
    parser = commands.add_parser(
        "suggest",
        help="suggest segments and rates for a length, a number of heads and a budget",
        description="Print a pattern of dilated branches that costs at most the budget, and the reasons for it.",
    )
    parser.add_argument("--tokens", type=_positive, required=True, help="of the sequence", metavar="N")
    parser.add_argument("--heads", type=_positive, required=True, help="of keys and values", metavar="N")
    parser.add_argument(
        "--budget",
        type=_budget,
        required=True,
        help="share of the cost of dense attention, such as 0.1, or keys a query sees on average, such as 2048",
        metavar="X",
    )
    parser.add_argument("--causal", action="store_true", help="no query sees a later key")
    parser.add_argument("--largest-rate", type=_positive, help="of any branch (default: the heads)", metavar="N")
    parser.set_defaults(run=_suggest)


def _suggest(options: argparse.Namespace) -> int:
    if options.budget == 1 and type(options.budget) is int and options.tokens > 1:
        raise ValueError("--budget 1 is one key per query. Give 1.0 for the cost of dense attention")
    print(
        suggest_pattern(
            options.tokens,
            options.heads,
            budget=options.budget,
            is_causal=options.causal,
            largest_rate=options.largest_rate,
        )
    )
    return 0


def _add_info(commands: Any) -> None:
    text = "print device, versions and backends, and why each is or is not available"
    parser = commands.add_parser("info", help=text, description=text.capitalize() + ".")
    parser.add_argument(
        "--check",
        action="store_true",
        help="instead run a dozen calls on every backend that serves the device, compare with the definition in double "
        "precision, and print the verdicts; exit code 1 if one is wrong. About a minute on a GPU, seconds on a CPU",
    )
    parser.add_argument("--device", help="of --check: a PyTorch device (default: cuda where there is one, else cpu)")
    parser.set_defaults(run=_info)


def _info(options: argparse.Namespace) -> int:
    if options.check:
        return _verify(require_device(options.device or ("cpu" if unavailable("cuda") else "cuda")))
    if options.device is not None:
        raise ValueError(f"--device {options.device}: goes with --check; info without it prints every device")
    print(report())
    return 0


def _verify(device: torch.device) -> int:
    from dilated_attention import verification

    dtype = verification.dtype_on(device)
    serving, absent = verification.serving(device)
    print(f"{device_name(device)}, {str(dtype).removeprefix('torch.')}")
    for name, why in absent.items():
        print(f"  not {name}: {why}")
    print(f"largest error over what rounding may cause, {verification.BARS[dtype]:g}: right up to 1\n")
    calls = verification.dozen()
    width = max(len(check.name) for check in calls)
    print(" " * width + "".join(f"{name:>12}" for name in serving))
    wrong = []
    for check in calls:
        print(f"{check.name:<{width}}", end="", flush=True)
        for verdict in verification.verdicts(check, serving, device):
            print(f"{verdict!s:>12}", end="", flush=True)
            if not verdict.right:
                wrong.append(f"{verdict.backend}, {check.name}: {verdict.why}")
        print()
    print("\n" + ("\n".join(wrong) if wrong else f"{', '.join(serving)}: right"))
    return 1 if wrong else 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value


def _seed(text: str) -> int:
    """What generators of PyTorch take."""
    value = int(text)
    if not 0 <= value < 1 << 64:
        raise ValueError
    return value


def _budget(text: str) -> float:
    return int(text) if text.isdecimal() else float(text)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


# argparse puts the name of the type in its error: "invalid positive integer value: '0'"
_positive.__name__ = "positive integer"
_natural.__name__ = "non-negative integer"
_seed.__name__ = "non-negative integer below 2**64"
_integers.__name__ = "list of integers"
_budget.__name__ = "number"
