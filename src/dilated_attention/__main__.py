"""Run `python -m dilated_attention`. The command itself is in another distribution, dilated-attention-lab."""

import sys
from importlib import import_module
from importlib.util import find_spec

if find_spec("dilated_attention_lab") is None:
    print("dilated-attention: error: the commands are not installed; from a clone: pip install ./lab", file=sys.stderr)
    sys.exit(2)
sys.exit(import_module("dilated_attention_lab").main())
