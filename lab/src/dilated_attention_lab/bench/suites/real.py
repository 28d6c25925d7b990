"""`bench real`: the configurations of released models, at the lengths that they are used at."""

from __future__ import annotations

from dataclasses import replace

import torch

from dilated_attention_bench.cases import Case
from dilated_attention_bench.suites import Step, compare, peak

RATES = (1, 2, 4, 8, 16)
GIGAPATH = Case(
    method="dilated",
    seq_len=10_000,
    heads=16,
    head_dim=48,
    segment_lengths=(1024, 5792, 32768, 185363, 1048576),
    dilation_rates=RATES,
    offsets="head_block",
)
LONGVIT = replace(GIGAPATH, seq_len=16384, head_dim=24, segment_lengths=(1024, 2048, 4096, 8192, 16384))
LONGVIT_LARGE = replace(LONGVIT, seq_len=262_144, segment_lengths=(1024, 4096, 16384, 65536, 262144))
CT = replace(
    GIGAPATH, seq_len=12288, heads=12, head_dim=64, segment_lengths=(768, 1536, 3072, 6144, 12288), offsets="head"
)
LONGNET_BASE = replace(
    CT,
    seq_len=32768,
    segment_lengths=(2048, 4096, 8192, 16384, 32768),
    dilation_rates=(1, 2, 4, 6, 12),
    is_causal=True,
)
USES = {
    "GigaPath, 10,000 tiles": GIGAPATH,
    "GigaPath, 100,000 tiles": replace(GIGAPATH, seq_len=100_000),
    "GigaPath, 250,000 tiles": replace(GIGAPATH, seq_len=250_000),
    "LongViT, 4,096 x 4,096 pixels": LONGVIT,
    "LongViT, 16,384 x 16,384 pixels": LONGVIT_LARGE,
    "CT volume": CT,
    "LongNet base, causal": LONGNET_BASE,
}


def steps(device: torch.device, quick: bool) -> list[Step]:
    found = []
    for label, case in USES.items():
        if quick and case.flops > 4e11:
            continue
        cases = {
            "dilated": case,
            "dense calls": replace(case, method="dense calls"),
            "dense": replace(case, method="dense"),
        }
        backward = not quick and case.flops * 3.5 < 2e12
        budget, most = (5.0, 1e12) if quick else (25.0, 8e12)
        found.append(compare(label, cases, "dense calls", device, seconds=budget, backward=backward, most_flops=most))
        found += [peak(case, device, backward=phase) for phase in (False, True)[: 1 + backward]]
    return found
