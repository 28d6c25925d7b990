"""Define the command line `dilated-attention`: which commands there are, and how they end.

Each command is a module, loaded when it is called: PyTorch takes seconds to load, and a list of commands needs none
of it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NoReturn

from dilated_attention_lab.version import own_version

COMMANDS = {
    "demo": "show what dilated attention can do: recall over a long sequence, and a model of real text",
    "train": "train a byte-level language model on any text",
    "generate": "continue a text with a model trained by `train`",
    "convert": "convert a torchscale, GigaPath or LongViT checkpoint, and compare with its own algorithm",
    "suggest": "suggest segments and rates for a length, a number of heads and a budget",
    "info": "print device, versions and backends, and why each is or is not available",
    "bench": "measure speed and memory against dense attention",
    "compare": "put all variants and other installed implementations into one table",
    "profile": "show where a call spends time and memory",
    "plot": "draw a pattern, or the pictures and tables of the documents from result files",
    "simulate": "run one rank of a large context parallel world: bytes, peers, compute, memory, modelled time",
}
MEASURING = ("bench", "compare", "profile", "plot", "simulate")
"""The commands that `dilated_attention_lab.bench` holds."""
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
"""Arguments of the library, and the option that gives each in the commands that have it."""


class Parser(argparse.ArgumentParser):
    """Parse the options of a command, which are added at the first parse.

    command: the name of the command, whose module adds them; empty for the parser of all commands.
    """

    def __init__(self, *arguments: Any, command: str = "", **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._command = command

    def complete(self) -> None:
        """Load the command, which adds its options."""
        command, self._command = self._command, ""
        if command in MEASURING:
            import_module("dilated_attention_lab.bench.command").add_options(command, self)
        elif command:
            import_module(f"dilated_attention_lab.commands.{command}").add_options(self)

    def parse_known_args(self, *arguments: Any, **options: Any) -> Any:
        self.complete()
        found, unknown = super().parse_known_args(*arguments, **options)
        if unknown:  # here, where the options of the command are known
            meant = [option for word in unknown for option in self._near(word)]
            hint = f"; did you mean {' '.join(meant)}?" if meant else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown

    def _near(self, word: str) -> list[str]:
        """Return at most one option that an unknown `word` may mean: one that is the end of the word (--rates for
        --dilation-rates), or else the one spelled most alike."""
        options = list(self._option_string_actions)
        ends = [option for option in options if option.startswith("--") and word.endswith(option[1:])]
        return ends[:1] or get_close_matches(word, options, 1)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")

    def options(self) -> dict[str, str]:
        """Map the library's argument names, which its errors contain, to the options that set them."""
        self.complete()
        names = {action.dest: action.option_strings[-1] for action in self._actions if action.option_strings}
        return names | {name: option for name, option in ARGUMENTS.items() if option in names.values()}


def main(arguments: Sequence[str] | None = None, loaded: Callable[[], object] = lambda: None) -> int:
    """Run one command and return its exit code.

    The code is 0; 2 for bad input, and 1 for training that diverged or results that could not be kept, with one line
    on stderr; 128 + n after signal n. Bad input is any ValueError or OSError. Any other error is a bug, and is raised
    with its traceback.

    Args:
        loaded: called when the modules of the command are loaded, before it runs.
    """
    name = ""
    try:
        try:
            options = command_line().parse_args(arguments)
            name = options.command
            loaded()
            with warnings.catch_warnings():
                warnings.showwarning = _warn
                code: int = options.run(options)
        except RuntimeError as error:  # before Python 3.12, a Ctrl-C in `__set_name__` while a module loads
            if isinstance(error.__cause__, KeyboardInterrupt):
                raise KeyboardInterrupt from error
            raise
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("dilated-attention: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ValueError, OSError) as error:
        print(f"dilated-attention {name}: error: {_in_a_line(name, error)}", file=sys.stderr)
        return 2
    return code


def command_line() -> Parser:
    """Return the parser of all commands; its namespace holds the command's name and the function that runs it."""
    parser = Parser(prog="dilated-attention", description="Exact dilated attention over very long sequences.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {own_version()}")
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, command=name)
    return parser


def _in_a_line(command: str, error: ValueError | OSError) -> str:
    if isinstance(error, OSError) and error.strerror is not None:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return in_options(command, " ".join(str(error).split()))


def in_options(command: str, message: str) -> str:
    """Return an error of the library with its arguments replaced by the options of a command.

    The library writes `name=value` for an argument and its value. An error that says what an argument must be begins
    with its name. An error about the fields of a JSON file stays as it is.
    """
    if not command or ".json: " in message:
        return message
    names = Parser(command=command).options()
    words = message.split(" ")
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        bare = word.rstrip(",;:)")
        if equals and name in names:
            value = value.removeprefix("True") if value.startswith("True") else " " + value.replace("'", "")
            words[number] = names[name] + value.rstrip()
        elif bare in names and ("_" in bare or number == 0):
            words[number] = names[bare] + word[len(bare) :]
    return " ".join(words)


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning as a line: the user of a command did not write the line of code that it points at."""
    print(f"dilated-attention: warning: {message}", file=sys.stderr)
