"""Run `python -m dilated_attention`. The command itself is in another distribution, dilated-attention-lab."""

import signal
import sys
from importlib import import_module
from importlib.util import find_spec

from dilated_attention import interruption

if find_spec("dilated_attention_lab") is None:
    print("dilated-attention: error: the commands are not installed; from a clone: pip install ./lab", file=sys.stderr)
    sys.exit(2)
command = import_module("dilated_attention_lab").main
try:
    if signal.getsignal(signal.SIGINT) is interruption.stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(command())
except KeyboardInterrupt:
    interruption.stop()
