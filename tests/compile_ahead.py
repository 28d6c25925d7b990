"""Compile every configuration that ships, for each architecture, on a machine without a GPU, and read the machine code.

    python tests/compile_ahead.py --target sm_90 gfx942 --output results/aot

writes one line per kernel to OUTPUT/<target>.jsonl: registers, spilled bytes, shared memory, matrix instructions.
Triton keeps what it compiled: to resume, run it again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dilated_attention.backends.triton_bias import NO_BIAS
from dilated_attention.bias import DISTANCES
from dilated_attention.kernels import strided
from dilated_attention.kernels.configurations import ARCHITECTURES, Kernel, Shape, side_of

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm_80": 166912, "sm_86": 101376, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}
"""Bytes of shared memory that one program may have."""

MAX_SPILLED = {"bf16": 0, "fp16": 0, "fp32": 20, "tf32": 0}
"""Bytes of stack a thread that may stay: in fp32 two kernels for gfx942 have some."""
SPILLED_BUT_FASTEST = {("sm_90", "dkdv", "bf16"): 64}
"""The same by target, kernel and dtype, where a shape of tiles that spills was the fastest on a GPU."""

KERNELS = {"forward": strided.forward, "dq": strided.backward_dq, "dkdv": strided.backward_dkdv}
HEAD_DIMS = (16, 24, 48, 64, 96, 128, 192, 256)
_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "tf32": 4}
_POINTERS = {
    **dict.fromkeys(("Q", "K", "V", "OUT", "DOUT"), "*{dtype}"),
    "HIDDEN": "*u8",
    **dict.fromkeys(("DQ", "DK", "DV"), "*fp32"),
    **dict.fromkeys(("LSE", "STATS"), "*fp32"),
    **dict.fromkeys(("INDPTR", "INDICES", "SPLIT"), "*i64"),
    **dict.fromkeys(("TILES", "BITS", "WQ", "WK"), "*i32"),
    "BIAS": "*fp32",
    "SUMS": "*fp64",
    **dict.fromkeys(("PLACES", "QUERY_AT", "KEY_AT", "BUCKETS"), "*i64"),
}
ARGUMENTS = {
    "lists": ("INDPTR", "INDICES"),
    "bits": ("BITS", "SPLIT"),
    "words": ("WQ", "WK"),
    "bias": ("BIAS", "SUMS", "PLACES", "QUERY_AT", "KEY_AT"),
}
_SCALARS = {"scale": "fp32", "softcap": "fp32", "keep_scale": "fp32"}

CALLS: dict[str, dict[str, Any]] = {
    "even": {},
    "union": {"SPANS": 4, "EDGE": 1, "EVEN": False},
    "causal": {"CAUSAL": True, "EDGE": 1, "EVEN": False, "CHAIN": True},
    "blocks": {"lists": True},
    "causal blocks": {"lists": True, "CAUSAL": True, "EDGE": 1, "EVEN": False},
    "masks of bits": {"lists": True, "bits": True, "CAUSAL": True, "EDGE": 1, "EVEN": False},
    "dropout": {"words": True, "EDGE": 1, "EVEN": False},
    "padding": {"HIDDEN": True, "EDGE": -1, "EVEN": False},
    "grouped": {"CAUSAL": True, "EDGE": 1, "EVEN": False, "CHAIN": True, "G": 4},
    "window": {"CAUSAL": True, "WINDOW": True, "EDGE": 1, "EVEN": False, "CHAIN": True},
    "softcap": {"softcap": True, "CAUSAL": True, "EDGE": 1, "EVEN": False},
    "a slope": {"bias": True, "FORM": "alibi", "CAUSAL": True, "EDGE": 1, "EVEN": False},
    "distances": {"bias": True, "FORM": "euclidean", "AXES": 2, "EDGE": 1, "EVEN": False},
    "a table": {"bias": True, "BUCKETS": True, "FORM": "relative", "SIZES": (257,), "EDGE": 1, "EVEN": False},
    "a table in space": {"bias": True, "FORM": "relative in space", "SIZES": (27, 27), "AXES": 2, "lists": True},
    "logits by query": {
        "bias": True,
        "sums": "*fp32",
        "FORM": "by query",
        "SIZES": (128,),
        "CAUSAL": True,
        "EDGE": 1,
        "EVEN": False,
    },
    "a bias by pair": {"bias": True, "sums": "*fp32", "FORM": "by pair", "EDGE": 1, "EVEN": False},
    "few rows": {"own": 16, "CAUSAL": True, "EDGE": 1, "EVEN": False},
}
"""The kernels that calls need: constants that differ from one full span with equal tiles; `own`: fewer rows."""


@dataclass(frozen=True)
class Variant:
    """One compilation."""

    target: str
    kernel: Kernel
    head_dim: int
    dtype: str
    call: str


@dataclass(frozen=True)
class Report(Variant):
    """Hold the contents of a variant's machine code: bytes, and instructions counted once each.

    `serialized`: the assembler lets every `wgmma` end before the next begins, which it reports in a warning only.
    """

    own: int
    loop: int
    warps: int
    stages: int
    registers: int
    spilled: int
    shared: int
    wgmma: int
    mma: int
    serialized: bool
    triton: str

    @property
    def most_spilled(self) -> int:
        return SPILLED_BUT_FASTEST.get((self.target, self.kernel, self.dtype), MAX_SPILLED[self.dtype])

    @property
    def faults(self) -> list[str]:
        """Return why this variant should not ship."""
        is_wide = self.target == "sm_90" and self.dtype in ("bf16", "fp16") and self.own >= 64  # what wgmma multiplies
        matrix = self.wgmma if is_wide else self.wgmma + self.mma
        checks = {
            f"{self.spilled} bytes spilled": self.spilled > self.most_spilled,
            f"{self.shared} bytes of shared memory": self.shared > SHARED_LIMIT[self.target],
            "no matrix instructions": self.dtype != "fp32" and not matrix,
            "wgmma one after another": self.serialized,
        }
        return [fault for fault, found in checks.items() if found]


SOME_CALLS = {
    "fp32": ("even", "causal", "causal blocks", "dropout", "a slope", "logits by query"),
    "tf32": ("even", "causal"),
}
"""The calls that single precision is compiled for: the plainest, and those that take most registers."""
SOME_HEAD_DIMS = (64, 128, 256)
"""The head_dims that calls with a bias are compiled for: the greatest of each class of shapes."""


def variants(targets: Sequence[str]) -> Iterator[Variant]:
    """Everything that ships, but for `SOME_CALLS` and `SOME_HEAD_DIMS`; float16 has the code of bfloat16, and tf32 is
    NVIDIA's."""
    for target, dtype, kernel, head_dim, call in itertools.product(
        targets, ("bf16", "fp32", "tf32"), KERNELS, HEAD_DIMS, CALLS
    ):
        if "bias" in CALLS[call] and head_dim not in SOME_HEAD_DIMS:
            continue
        if call in SOME_CALLS.get(dtype, CALLS) and (dtype, target) != ("tf32", "gfx942"):
            yield Variant(target, kernel, head_dim, dtype, call)


def shape_of(variant: Variant) -> Shape:
    """The tiles that a variant is compiled with."""
    architecture, call = ARCHITECTURES[variant.target], CALLS[variant.call]
    masked = not call.keys().isdisjoint(("bits", "words", "HIDDEN", "softcap", "bias"))
    kind = {"has_lists": "lists" in call, "banded": "CAUSAL" in call, "has_bits": "bits" in call}
    kind |= {"has_bias": "bias" in call, "has_entries": call.get("FORM", "alibi") not in DISTANCES}
    shape = architecture.shape(variant.kernel, _BYTES[variant.dtype], variant.head_dim, masked, **kind)
    return shape.cut(call.get("own", shape.own), shape.loop)


def build(variant: Variant) -> Report:
    """Compile one variant and read the result."""
    shape, compiled = shape_of(variant), code_of(variant)
    return Report(
        **asdict(variant),
        **shape._asdict(),
        shared=compiled.metadata.shared,
        triton=triton.__version__,
        **(_hip_code(compiled) if variant.target == "gfx942" else _machine_code(compiled)),
    )


def code_of(variant: Variant) -> Any:
    """Return what Triton compiles a variant to."""
    shape = shape_of(variant)
    side = side_of(variant.kernel)
    queries, keys = (shape.own, shape.loop) if side == "queries" else (shape.loop, shape.own)
    constants = {
        "SPANS": 1, "EDGE": 0, "EVEN": True, "CHAIN": False, "CAUSAL": False, "WINDOW": False, "G": 1, "UNIT": 16,
        "D": variant.head_dim, "DP": max(16, 1 << (variant.head_dim - 1).bit_length()), "BM": queries, "BN": keys,
        "WIDE": False,
        "PRECISION": "tf32" if variant.dtype == "tf32" else "ieee", "SIZE": 128, "LH": 1, "WORDS": 4,
        "softcap": None, "HIDDEN": None, "WQ": None, "WK": None, "INDPTR": None, "INDICES": None,
        "BITS": None, "SPLIT": None, **NO_BIAS.others, "SUMS": None,
    }  # fmt: skip
    if variant.head_dim % 16:
        constants["UNIT"] = 8
    dtype = variant.dtype.replace("tf32", "fp32")
    types = {name: kind.format(dtype=dtype) for name, kind in (_POINTERS | _SCALARS).items()}
    for name, value in CALLS[variant.call].items():
        if name == "own":
            continue
        if name == "EDGE" and side == "keys":
            value = int(bool(constants["CAUSAL"]) or "bits" in CALLS[variant.call])
        if name == "sums":
            types["SUMS"] = value
            continue
        for argument in ARGUMENTS.get(name, (name,)):
            if argument in _POINTERS | _SCALARS:
                del constants[argument]
            else:
                constants[argument] = value
    function = KERNELS[variant.kernel]
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in function.arg_names}
    given = {(i,): constants[name] for i, name in enumerate(function.arg_names) if name in constants}
    aligned = [(i,) for i, name in enumerate(function.arg_names) if name in _POINTERS.keys() - constants.keys()]
    source = ASTSource(function, signature, given, {at: [["tt.divisibility", 16]] for at in aligned})
    return triton.compile(source, target=TARGETS[variant.target], options=shape.options(variant.target))


def _machine_code(compiled: Any) -> dict[str, Any]:
    """The fields of `Report` that the code for an NVIDIA device has."""
    ptx = compiled.asm["ptx"]
    wgmma = len(re.findall(r"wgmma\.mma_async", ptx))
    usage = _disassemble(compiled, "--dump-resource-usage")
    code = _disassemble(compiled, "--dump-sass") if wgmma else ""
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[-1]
    return {
        "registers": int(registers),
        "spilled": int(stack),
        "wgmma": wgmma,
        "mma": len(re.findall(r"\bmma\.sync|tcgen05\.mma", ptx)),
        "serialized": code.count("WARPGROUP.DEPBAR") > ptx.count("wgmma.wait_group"),
    }


def loops(compiled: Any) -> list[list[str]]:
    """The instructions of each loop that multiplies by `wgmma`, in the code for sm_90: what a step issues."""
    code = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", _disassemble(compiled, "--dump-sass"))
    at = [int(address, 16) for address, _ in code]
    found = []
    for i, (_, instruction) in enumerate(code):
        jump = re.match(
            r"@!?U?P\d BRA.*?0x([0-9a-f]+)", instruction
        )  # a jump without a condition ends a wait elsewhere
        if jump and int(jump[1], 16) < at[i]:
            body = [text for _, text in code[at.index(int(jump[1], 16)) : i + 1]]
            if any("HGMMA" in text for text in body):
                found.append(body)
    return found


def _disassemble(compiled: Any, option: str) -> str:
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return subprocess.run([program, option, file.name], capture_output=True, text=True, check=True).stdout


def _hip_code(compiled: Any) -> dict[str, Any]:
    code = compiled.asm["amdgcn"]
    found = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", code))
    registers, stack = int(found["vgpr_count"]), int(found["private_segment_fixed_size"])
    matrix = len(re.findall(r"\bv_mfma", code))
    return {"registers": registers, "spilled": stack, "wgmma": 0, "mma": matrix, "serialized": False}


def read(path: Path) -> list[Report]:
    """The reports of a file that `main` wrote."""
    return [Report(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> int:
    """Exit code 1 if a kernel should not ship."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--output", type=Path, help="a folder for <target>.jsonl")
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    reports = []
    with ProcessPoolExecutor(arguments.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for report in pool.map(build, variants(arguments.target)):
            print(*astuple(report), "; ".join(report.faults), flush=True)
            reports.append(report)
    if arguments.output:
        write(arguments.output, reports)
    return int(any(report.faults for report in reports))


def write(folder: Path, reports: Sequence[Report]) -> None:
    """A file per target."""
    folder.mkdir(parents=True, exist_ok=True)
    for target in {report.target for report in reports}:
        lines = [json.dumps(asdict(report), separators=(",", ":")) for report in reports if report.target == target]
        (folder / f"{target}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
