"""List tile shapes per architecture, kernel, element size and head_dim.

The shapes compile well (no spills, shared memory that fits; results/aot/). No time has been measured on any
architecture. A tile of 64 rows at head_dim 256 needs its 8 warps: with 4 it spills.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Kernel = Literal["forward", "dq", "dkdv"]

Side = Literal["queries", "keys"]
"""The rows that the tiles of a kernel hold: queries or keys. The kernel's loop streams rows of the other side."""


def side_of(kernel: Kernel) -> Side:
    return "queries" if kernel in ("forward", "dq") else "keys"


FUSED = {"enable_fp_fusion": True}
"""Compile a multiplication and an addition to one instruction. Triton 3.9 warns if this option is not given, because
its default changes in 3.10."""


class Shape(NamedTuple):
    """Describe the tiles of a program: it holds `own` rows of its kernel's side and streams `loop` rows of the other
    side."""

    own: int
    loop: int
    warps: int
    stages: int

    def cut(self, own: int, loop: int) -> Shape:
        """Return a shape cut for tiles that need at most `own` held and `loop` streamed rows.

        Each count of rows becomes the least power of two that is enough, but at least 16 and no more than it was. The
        number of warps stays the same, because most shapes spill registers with fewer.
        """
        own, loop = (
            min(size, max(16, 1 << (rows - 1).bit_length())) for size, rows in zip(self, (own, loop), strict=False)
        )
        return Shape(own, loop, self.warps, self.stages)

    def options(self, target: str) -> dict[str, int]:
        """Return the options with which Triton launches and compiles the kernel on `target`, a key in ARCHITECTURES.

        Except for gfx942, they let a thread use all 255 registers. Without this option ptxas spills some, in order to
        fit two or three programs on a multiprocessor; for sm_90, just as many fit with it.
        """
        registers = {} if target == "gfx942" else {"maxnreg": 255}
        return {"num_warps": self.warps, "num_stages": self.stages} | registers | FUSED


@dataclass(frozen=True)
class Architecture:
    """Hold the tile shapes of an architecture by (kernel, bytes per element), for a head_dim of at most 64, 128 and
    256.

    Attributes:
        of_lists: the shapes that replace those of `shapes` in calls with a block layout.
    """

    shapes: dict[tuple[Kernel, int], tuple[Shape, Shape, Shape]]
    of_lists: dict[tuple[Kernel, int], tuple[Shape, Shape, Shape]] = field(default_factory=dict)

    def shape(self, kernel: Kernel, element_size: int, head_dim: int, masked: bool, has_lists: bool = False) -> Shape:
        """Return the shape of a kernel's tiles.

        `masked`: the call has dropout, hidden keys or a softcap, which need registers: `loop` is halved, to 16 or more.
        `has_lists`: the call has a block layout: use `of_lists` if it has this kernel and element size.
        """
        shapes = self.of_lists if has_lists and (kernel, element_size) in self.of_lists else self.shapes
        shape = shapes[kernel, element_size][(head_dim > 64) + (head_dim > 128)]
        return shape._replace(loop=max(16, shape.loop // 2)) if masked else shape


_SM_80 = Architecture({
    ("forward", 2): (Shape(128, 64, 4, 3), Shape(128, 64, 8, 3), Shape(64, 32, 8, 3)),
    ("dq", 2): (Shape(128, 64, 8, 2), Shape(64, 64, 8, 2), Shape(64, 32, 8, 1)),
    ("dkdv", 2): (Shape(128, 32, 8, 2), Shape(64, 32, 8, 3), Shape(32, 32, 8, 1)),
    ("forward", 4): (Shape(64, 32, 8, 2), Shape(32, 16, 8, 2), Shape(16, 16, 8, 2)),
    ("dq", 4): (Shape(64, 32, 8, 2), Shape(64, 16, 8, 2), Shape(32, 16, 4, 1)),
    ("dkdv", 4): (Shape(64, 16, 8, 2), Shape(32, 16, 8, 2), Shape(16, 16, 8, 1)),
})  # fmt: skip

# 8.6, 8.9 and 12.0 have 99 KB of shared memory per program; 8.0 has 163.
_SM_86 = Architecture(_SM_80.shapes | {
    ("forward", 2): (Shape(128, 64, 4, 3), Shape(128, 64, 8, 3), Shape(64, 32, 8, 2)),
    ("dq", 2): (Shape(64, 64, 8, 2), Shape(64, 64, 8, 2), Shape(64, 32, 8, 1)),
    ("dkdv", 2): (Shape(128, 32, 8, 2), Shape(64, 64, 8, 2), Shape(32, 32, 8, 1)),
})  # fmt: skip

# 8 warps are two warpgroups, each with half of the rows in wgmma. At head_dim 64, two programs of 4 warps fit on a
# multiprocessor. At 128, a tile of 128 keys takes 555 instructions; two of 64 take 714. With lists of blocks, loads
# start a step later, so 5 stages prefetch as far as 3 do otherwise.
_SM_90 = Architecture(_SM_80.shapes | {
    ("forward", 2): (Shape(128, 64, 4, 3), Shape(128, 128, 8, 2), Shape(64, 64, 8, 2)),
    ("dq", 2): (Shape(128, 128, 8, 2), Shape(128, 64, 8, 2), Shape(64, 32, 8, 2)),
    ("dkdv", 2): (Shape(128, 64, 8, 2), Shape(128, 64, 8, 2), Shape(64, 16, 8, 2)),
}, of_lists={
    ("forward", 2): (Shape(128, 64, 4, 5), Shape(128, 64, 8, 5), Shape(64, 64, 8, 2)),
})  # fmt: skip

_SM_100 = Architecture(_SM_90.shapes | {
    ("forward", 2): (Shape(128, 64, 8, 3), Shape(128, 64, 8, 3), Shape(64, 64, 8, 2)),
    ("dq", 2): (Shape(128, 128, 8, 3), Shape(128, 32, 8, 2), Shape(64, 32, 8, 1)),
    ("dkdv", 2): (Shape(128, 64, 8, 3), Shape(128, 64, 8, 2), Shape(64, 32, 8, 2)),
})  # fmt: skip

# With 4 wavefronts there are 512 registers per lane. Shared memory: 64 KB.
_GFX942 = Architecture(_SM_80.shapes | {
    ("forward", 2): (Shape(128, 64, 4, 2), Shape(128, 64, 4, 2), Shape(64, 64, 4, 1)),
    ("dq", 2): (Shape(128, 32, 4, 2), Shape(64, 32, 4, 2), Shape(64, 32, 4, 1)),
    ("dkdv", 2): (Shape(128, 32, 4, 2), Shape(64, 64, 4, 1), Shape(32, 32, 4, 1)),
    ("dkdv", 4): (Shape(64, 16, 8, 2), Shape(32, 16, 4, 1), Shape(32, 16, 4, 1)),
})  # fmt: skip

# A step of the interpreter takes 10 to 50 ms whatever its size.
_INTERPRETER = Architecture(dict.fromkeys(_SM_80.shapes, (Shape(64, 64, 1, 1),) * 3))

ARCHITECTURES = {
    "sm_80": _SM_80, "sm_86": _SM_86, "sm_90": _SM_90, "sm_100": _SM_100, "gfx942": _GFX942,
    "interpreter": _INTERPRETER,
}  # fmt: skip
