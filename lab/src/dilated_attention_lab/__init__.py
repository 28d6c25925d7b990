"""Start the commands of dilated-attention. PyTorch and the library load only after Ctrl-C is handled."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. Ctrl-C while it loads, or after it ends, exits at once with one line."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when PyTorch loads: its profiler reports to stderr
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a background job ignores it
    if not ours:
        from dilated_attention_lab.commands import main as command

        return command(arguments)
    try:
        signal.signal(signal.SIGINT, _stop)
        from dilated_attention_lab.commands import main as command

        try:
            return command(arguments, loaded=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
        finally:
            signal.signal(signal.SIGINT, _stop)
    except KeyboardInterrupt:  # between what `command` catches and the handler
        _stop()


def _stop(*_: object) -> NoReturn:
    """Print "interrupted", and exit with code 130, without the interpreter's shutdown: an import may be half done."""
    os.write(2, b"dilated-attention: interrupted\n")
    os._exit(INTERRUPTED)
