"""Tile shapes per architecture, kernel, width and head_dim.

Chosen from compile-time facts (no spills, at most half of the shared memory where two programs per processor pay off;
results/aot/), not yet from time: unmeasured on every architecture. `own` is the tile that a program holds, `loop` the one
it streams: queries and keys in forward and dq, keys and queries in dkdv.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kernel = Literal["forward", "dq", "dkdv"]


class Configuration(NamedTuple):
    own: int
    loop: int
    warps: int
    stages: int


# (kernel, bytes per element, at most this padded head_dim) -> own, loop, warps, stages
_A100 = {
    ("forward", 2, 64): Configuration(128, 64, 4, 3),
    ("forward", 2, 128): Configuration(128, 64, 8, 3),
    ("forward", 2, 256): Configuration(64, 64, 4, 2),
    ("dq", 2, 64): Configuration(128, 64, 8, 2),
    ("dq", 2, 128): Configuration(64, 64, 8, 2),
    ("dq", 2, 256): Configuration(64, 32, 8, 2),
    ("dkdv", 2, 64): Configuration(128, 64, 8, 2),
    ("dkdv", 2, 128): Configuration(64, 64, 8, 2),
    ("dkdv", 2, 256): Configuration(64, 32, 8, 2),
    ("forward", 4, 64): Configuration(64, 32, 4, 2),
    ("forward", 4, 128): Configuration(64, 32, 8, 2),
    ("forward", 4, 256): Configuration(32, 32, 8, 1),
    ("dq", 4, 64): Configuration(64, 32, 8, 2),
    ("dq", 4, 128): Configuration(32, 32, 8, 2),
    ("dq", 4, 256): Configuration(32, 16, 8, 1),
    ("dkdv", 4, 64): Configuration(64, 32, 8, 2),
    ("dkdv", 4, 128): Configuration(32, 32, 8, 2),
    ("dkdv", 4, 256): Configuration(32, 16, 8, 1),
}


def configuration(kernel: Kernel, architecture: str, element_size: int, head_dim: int) -> Configuration:
    """The shape for `head_dim` <= 256 on `architecture` (see `ARCHITECTURES`)."""
    table = ARCHITECTURES[architecture]
    width = next(w for w in (64, 128, 256) if head_dim <= w)
    return table[kernel, element_size, width]


ARCHITECTURES = {"sm_80": _A100, "sm_90": _A100, "sm_100": _A100, "gfx942": _A100}
