"""`bench attention`: dense, dilated, block-sparse and FlexAttention, over lengths and over densities."""

from __future__ import annotations

import shutil
from dataclasses import replace

import torch

from dilated_attention_bench.cases import Case
from dilated_attention_bench.suites import LONGNET, Step, compare, peak

LENGTHS = (2048, 8192, 32768, 131072, 262144)
DENSITIES = (0.02, 0.05, 0.10, 0.25, 0.50)


def steps(device: torch.device, quick: bool) -> list[Step]:
    found = []
    budget = 5.0 if quick else 30.0
    for seq_len in LENGTHS[:2] if quick else LENGTHS:
        cases, backward = _methods(device, quick, replace(LONGNET, seq_len=seq_len)), seq_len <= 32768
        found.append(compare(f"{seq_len:,} tokens", cases, "dense", device, seconds=budget, backward=backward))
    for density in DENSITIES[::2] if quick else DENSITIES:
        block_size = 64 if density <= 0.05 else 128  # a row sees at least one block of the 32 or 64
        base = replace(LONGNET, seq_len=4096, density=density, block_size=block_size)
        cases = _methods(device, quick, base)
        del cases["dilated"]
        cases.pop("flex", None)  # and random blocks: suite blocks
        found.append(
            compare(f"4,096 tokens, {density:.0%} of blocks", cases, "dense", device, seconds=4.0 if quick else 10.0)
        )
    for seq_len in (32768,) if quick else (8192, 32768, 262144):
        for case in _methods(device, quick, replace(LONGNET, seq_len=seq_len)).values():
            if case.method != "flex" and case.flops < (1e12 if quick else 8e12):
                found.append(peak(case, device))
    return found


def _methods(device: torch.device, quick: bool, base: Case) -> dict[str, Case]:
    """The density, if not given, is that of a window in which a row of 128 tokens sees about 1,024 keys."""
    base = replace(base, density=base.density or min(1.0, 1024 / base.seq_len))
    sparse = replace(base, method="block-sparse", blocks="local")
    cases = {
        "dense": replace(base, method="dense"),
        "dilated": replace(base, method="dilated"),
        "block-sparse": sparse,
        "block-sparse dilated": replace(sparse, method="block-sparse dilated"),
    }
    # Not compiled it is quadratic in memory; compiling takes long, once a shape.
    if not quick and (device.type != "cpu" or shutil.which("c++")):
        cases["flex"] = replace(sparse, method="flex")
    return cases
