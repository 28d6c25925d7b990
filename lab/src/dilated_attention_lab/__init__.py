"""Start the command `dilated-attention`.

A package of its own, since importing `dilated_attention` loads PyTorch. That takes seconds, in which Ctrl-C must
already end the command with one line.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `dilated_attention.cli.main`; Ctrl-C ends the process at once until that is loaded."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a background job ignores it
    if ours:
        signal.signal(signal.SIGINT, _stop)
    from dilated_attention.cli import main as run

    try:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return run(arguments)
    except KeyboardInterrupt:  # before or after what `run` catches
        _stop()


def _stop(*_: object) -> NoReturn:
    """Leave without the interpreter's own end: what is being imported may be half made."""
    os.write(2, b"dilated-attention: interrupted\n")
    os._exit(INTERRUPTED)
