"""Handle Ctrl-C while `python -m dilated_attention` loads PyTorch, which is before `__main__` runs.

The process then ends with one line and code 130. Nothing changes for a program that imports the package.
"""

from __future__ import annotations

import os
import signal
import sys


def stop(*_: object) -> None:
    os.write(2, b"dilated-attention: interrupted\n")
    os._exit(128 + signal.SIGINT)


# While Python imports the package of `-m`, argv[0] is "-m"; the name of the module is in orig_argv alone.
_is_command = sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv) :][:1] == ["dilated_attention"]
if _is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a background job ignores it
    signal.signal(signal.SIGINT, stop)
