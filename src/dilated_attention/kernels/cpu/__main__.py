"""Compile the CPU kernels: `python -m dilated_attention.kernels.cpu`."""

from __future__ import annotations

import sys

from dilated_attention.kernels.cpu import build

try:
    print(build.build())
except build.BuildError as error:
    sys.exit(str(error))
