"""List tile shapes per architecture, kernel, element size and head_dim.

The shapes compile well: hardly any spills, and they fit the shared memory (results/aot/). For 16 bits and a head_dim of
at most 128, those of sm_90 are also the fastest of a dozen on an H200 (docs/notebook.md, 2026-11-27); no other has been
timed. A tile of 64 rows at head_dim 256 needs its 8 warps: with 4 it spills.
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
        own = max(16, 1 << (own - 1).bit_length())
        loop = max(16, 1 << (loop - 1).bit_length())
        return Shape(min(self.own, own), min(self.loop, loop), self.warps, self.stages)

    def options(self, target: str) -> dict[str, int]:
        """Return the options with which Triton launches and compiles the kernel on `target`, a key in ARCHITECTURES.

        Except for gfx942, they let a thread use all 255 registers. Without this option ptxas spills some, in order to
        fit two or three programs on a multiprocessor; for sm_90, just as many fit with it.
        """
        options = {"num_warps": self.warps, "num_stages": self.stages}
        if target != "gfx942":
            options["maxnreg"] = 255
        return options | FUSED


Shapes = dict[tuple[Kernel, int], tuple[Shape, Shape, Shape]]
"""Tile shapes by (kernel, bytes per element), for a head_dim of at most 64, 128 and 256."""


@dataclass(frozen=True)
class Architecture:
    """Hold the tile shapes of an architecture.

    Attributes:
        special: the shapes that replace those of `shapes` in some calls, by (the call has a block layout, the call is
            causal or has a window).
        bits: the shapes that replace both in calls whose layout has masks of bits, which spill with the others.
        biased: the shapes that replace all of these in calls with a bias: with others, kernels spill, or their products
            wait for one another.
    """

    shapes: Shapes
    special: dict[tuple[bool, bool], Shapes] = field(default_factory=dict)
    bits: Shapes = field(default_factory=dict)
    biased: Shapes = field(default_factory=dict)

    def shapes_of(self, kernel: Kernel, element_size: int, *, has_lists: bool, banded: bool) -> Shapes:
        """Return the dictionary that holds a kernel's shapes; `has_lists`, `banded`: the key in `special`."""
        special = self.special.get((has_lists, banded), {})
        if (kernel, element_size) in special:
            return special
        return self.shapes

    def shape(
        self,
        kernel: Kernel,
        element_size: int,
        head_dim: int,
        masked: bool,
        *,
        has_lists: bool,
        banded: bool,
        has_bits: bool = False,
        has_bias: bool = False,
        has_entries: bool = False,
    ) -> Shape:
        """Return the shape of a kernel's tiles.

        `masked`: the call has hidden keys, masks of bits or options of scores, which need registers: `loop` is halved,
        to 16 or more.
        `has_lists`, `banded`: as in `shapes_of`. `has_bits`: a layout has masks of bits. `has_bias`: the call has a
        bias. `has_entries`: it loads a number for each pair, whose address needs registers: `loop` is halved again.
        """
        shapes = self.shapes_of(kernel, element_size, has_lists=has_lists, banded=banded)
        if has_bits:
            shapes = shapes | self.bits
        if has_bias:
            shapes = shapes | self.biased
        up_to_64, up_to_128, up_to_256 = shapes[kernel, element_size]
        if head_dim <= 64:
            shape = up_to_64
        elif head_dim <= 128:
            shape = up_to_128
        else:
            shape = up_to_256
        if masked:
            shape = shape._replace(loop=max(16, shape.loop // 2))
        if has_entries:
            shape = shape._replace(loop=max(16, shape.loop // 2))
        return shape


_SM_80 = Architecture({
    ("forward", 2): (Shape(128, 64, 4, 3), Shape(128, 64, 8, 3), Shape(64, 32, 8, 3)),
    ("dq", 2): (Shape(128, 64, 8, 2), Shape(64, 64, 8, 2), Shape(64, 32, 8, 1)),
    ("dkdv", 2): (Shape(128, 32, 8, 2), Shape(64, 32, 8, 3), Shape(32, 32, 8, 1)),
    ("forward", 4): (Shape(64, 32, 8, 2), Shape(32, 16, 8, 2), Shape(16, 16, 8, 2)),
    ("dq", 4): (Shape(64, 32, 8, 2), Shape(64, 16, 8, 2), Shape(32, 16, 4, 1)),
    ("dkdv", 4): (Shape(64, 16, 8, 2), Shape(32, 16, 8, 2), Shape(16, 16, 8, 1)),
}, biased={
    ("dq", 2): (Shape(128, 64, 8, 2), Shape(64, 64, 8, 2), Shape(32, 32, 8, 1)),
    ("dq", 4): (Shape(64, 32, 8, 2), Shape(64, 16, 8, 2), Shape(16, 16, 8, 1)),
})  # fmt: skip

# 8.6, 8.9 and 12.0 have 99 KB of shared memory per program; 8.0 has 163.
_SM_86 = Architecture(_SM_80.shapes | {
    ("forward", 2): (Shape(128, 64, 4, 3), Shape(128, 64, 8, 3), Shape(64, 32, 8, 2)),
    ("dq", 2): (Shape(64, 64, 8, 2), Shape(64, 64, 8, 2), Shape(64, 32, 8, 1)),
    ("dkdv", 2): (Shape(128, 32, 8, 2), Shape(64, 64, 8, 2), Shape(32, 32, 8, 1)),
}, biased=_SM_80.biased | {
    ("dq", 2): (Shape(64, 64, 8, 2), Shape(64, 64, 8, 2), Shape(32, 32, 8, 1)),
})  # fmt: skip

# 4 warps are one warpgroup. Two or three programs of 4 warps fit on a multiprocessor, and one computes while another
# waits: the backward, and loops as short as those of a causal call, are fastest with them. A long loop is faster with 8
# warps and 128 keys at head_dim 128. With lists of blocks, loads start a step later, so 5 stages prefetch as far as 3
# do otherwise; causal calls with lists need more shared memory.
_SM_90 = Architecture(_SM_80.shapes | {
    ("forward", 2): (Shape(128, 64, 4, 3), Shape(128, 128, 8, 3), Shape(64, 64, 8, 2)),
    ("dq", 2): (Shape(64, 64, 4, 3), Shape(64, 64, 4, 2), Shape(64, 32, 8, 2)),
    ("dkdv", 2): (Shape(64, 64, 4, 3), Shape(64, 64, 4, 2), Shape(64, 16, 8, 2)),
}, {
    (True, False): {("forward", 2): (Shape(128, 64, 4, 5), Shape(128, 128, 8, 5), Shape(64, 64, 8, 2))},
    (True, True): {("forward", 2): (Shape(128, 64, 4, 5), Shape(128, 64, 8, 5), Shape(64, 64, 8, 2))},
    (False, True): {("forward", 2): (Shape(128, 64, 4, 3), Shape(64, 64, 4, 3), Shape(64, 64, 8, 2))},
}, biased=_SM_80.biased | {
    ("dq", 2): (Shape(64, 128, 8, 3), Shape(64, 64, 4, 2), Shape(64, 32, 8, 2)),
})  # fmt: skip

_SM_100 = Architecture(_SM_90.shapes | {
    ("forward", 2): (Shape(128, 64, 8, 3), Shape(128, 64, 8, 3), Shape(64, 64, 8, 2)),
    ("dq", 2): (Shape(128, 128, 8, 3), Shape(128, 32, 8, 2), Shape(64, 32, 8, 1)),
    ("dkdv", 2): (Shape(128, 64, 8, 3), Shape(128, 64, 8, 2), Shape(64, 32, 8, 2)),
}, bits={
    ("dq", 2): (Shape(128, 64, 8, 3), Shape(128, 32, 8, 2), Shape(64, 32, 8, 1)),
}, biased=_SM_80.biased | {
    ("dq", 2): (Shape(128, 64, 8, 3), Shape(128, 32, 8, 2), Shape(32, 32, 8, 1)),
})  # fmt: skip

# With 4 wavefronts there are 512 registers per lane. Shared memory: 64 KB.
_GFX942 = Architecture(_SM_80.shapes | {
    ("forward", 2): (Shape(128, 64, 4, 2), Shape(128, 64, 4, 2), Shape(64, 64, 4, 1)),
    ("dq", 2): (Shape(128, 32, 4, 2), Shape(64, 32, 4, 2), Shape(64, 32, 4, 1)),
    ("dkdv", 2): (Shape(128, 32, 4, 2), Shape(64, 64, 4, 1), Shape(32, 32, 4, 1)),
    ("dkdv", 4): (Shape(64, 16, 8, 2), Shape(32, 16, 4, 1), Shape(32, 16, 4, 1)),
}, biased={
    ("dq", 4): (Shape(64, 32, 8, 2), Shape(32, 16, 4, 2), Shape(32, 16, 4, 1)),
})  # fmt: skip

# A step of the interpreter takes 10 to 50 ms whatever its size.
_INTERPRETER = Architecture(dict.fromkeys(_SM_80.shapes, (Shape(64, 64, 1, 1),) * 3))

ARCHITECTURES = {
    "sm_80": _SM_80, "sm_86": _SM_86, "sm_90": _SM_90, "sm_100": _SM_100, "gfx942": _GFX942,
    "interpreter": _INTERPRETER,
}  # fmt: skip
