"""Compare a call that has a bias with the same call without it, or with PyTorch's attention over a tensor of all pairs.

    python lab/experiments/biases.py CASE [--heads H] [--forward] [--seconds S] [--out FOLDER]

measures one case, with a backward unless `--forward` is given, and writes rows to <out>/<device>/biases.jsonl:

    alibi, table    8,192 tokens, over the call without a bias
    pair            a tensor of 4,096 tokens, over scaled_dot_product_attention with it
    slide           two-dimensional ALiBi of 10,000 tiles, over scaled_dot_product_attention with its tensor
    large-slide     the same of 50,000 tiles, alone: its tensor has 120 GB
    t5              attention of T5-base's encoder, 8,192 tokens, 32 buckets, over the same with its tensor

A contender for which memory is lacking is left out, and its row says so; fewer heads need less. Memory counts what a
call adds at its peak to q, k and v, gradients included.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dilated_attention import Dilated, attention
from dilated_attention.bias import Alibi, RelativeBias
from dilated_attention_lab.bench import measure
from dilated_attention_lab.bench.cases import Contender, trained
from dilated_attention_lab.bench.results import Recorder, Row

DEVICE = torch.device("cpu")
COPIES = {False: 3, True: 6}
"""The most tensors of all pairs that scaled_dot_product_attention holds for its bias; True: with a backward."""


@dataclass(frozen=True)
class Case:
    """Describe one case.

    Attributes:
        make: from the tensor that is learned to a bias. learned: that tensor.
        over: what it is compared with: "no bias", "a tensor", or "" for nothing.
        pairs: from the tensor that is learned to the bias of all pairs, `(1, heads, seq, seq)`.
    """

    tokens: int
    heads: int
    learned: Tensor
    make: Callable[[Tensor], Any]
    over: str
    pairs: Callable[[Tensor], Tensor] = lambda learned: learned


def buckets_of(tokens: int, number: int = 32, furthest: int = 128) -> Tensor:
    """Return T5's buckets of the differences from -(tokens - 1) to tokens - 1: half of them for each side, half of
    these exact, the others in steps of the logarithm."""
    difference = torch.arange(1 - tokens, tokens)
    side = number // 2
    exact = side // 2
    apart = difference.abs()
    steps = (apart.clamp(min=1) / exact).log() / torch.tensor(furthest / exact).log() * (side - exact)
    far = (exact + steps.long()).clamp(max=side - 1)
    return side * (difference > 0) + torch.where(apart < exact, apart, far)


def case_of(name: str, heads: int) -> Case:
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)
    if name == "alibi":
        return Case(8192, heads, slopes, Alibi, "no bias")
    if name == "table":
        return Case(8192, heads, torch.randn(heads, 257), RelativeBias, "no bias")
    if name == "pair":
        return Case(4096, heads, torch.randn(1, heads, 4096, 4096), lambda x: x, "a tensor")
    if name == "t5":
        buckets = buckets_of(8192)
        at = torch.arange(8192)
        columns = buckets[at[None, :] - at[:, None] + 8191]
        table = torch.randn(heads, 32)
        return Case(8192, heads, table, lambda x: RelativeBias(x, buckets), "a tensor", lambda x: x[:, columns][None])

    tiles = 10_000 if name == "slide" else 50_000
    side = int((2 * tiles) ** 0.5) + 1
    tissue = torch.randperm(side * side)[:tiles].sort().values
    places = torch.stack((tissue // side, tissue % side), -1).float()

    def pairs(slopes: Tensor) -> Tensor:
        return (-slopes[:, None, None] * torch.cdist(places, places))[None]

    over = "a tensor" if name == "slide" else ""
    return Case(tiles, heads, slopes, lambda x: Alibi(x, places[None]), over, pairs)


def contenders_of(case: Case, backward: bool) -> tuple[dict[str, Contender], str | None]:
    """Return what to time, by name, and why one was left out."""
    inputs = [torch.randn(1, case.tokens, case.heads, 64) for _ in range(3)]
    pattern = Dilated((case.tokens,), (1,))
    learned = case.learned.requires_grad_(backward)
    calls: dict[str, Callable[..., Tensor]] = {
        "ours": lambda q, k, v: attention(q, k, v, pattern, bias=case.make(learned)),
        "no bias": lambda q, k, v: attention(q, k, v, pattern),
        "a tensor": lambda q, k, v: of_all_pairs(q, k, v, case.pairs(learned)),
    }
    needed = case.heads * case.tokens**2 * 4 * COPIES[backward]
    refused = None
    if case.over == "a tensor":
        refused = measure.lack_of_memory(needed, DEVICE)
    names = ["ours"]
    if case.over and not refused:
        names.append(case.over)
    found = {}
    for name in names:
        parameters = [] if name == "no bias" else [learned]
        found[name] = trained(calls[name], inputs, parameters=parameters if backward else [], backward=backward)
    return found, refused


def of_all_pairs(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)


def rows_of(name: str, heads: int, backward: bool, seconds: float) -> Iterator[Row]:
    case = case_of(name, heads)
    contenders, refused = contenders_of(case, backward)
    phase = "forward+backward" if backward else "forward"
    parameters = {"case": name, "tokens": case.tokens, "heads": heads, "head_dim": 64, "phase": phase}
    inputs = 4 * case.tokens * heads * 64 * 3
    memory = {}
    for contender, work in contenders.items():
        peak = measure.peak_above_now(lambda work=work: list(work()), DEVICE)
        if peak is not None:
            memory[contender] = float(peak)
    yield Row("memory above q, k and v, over their bytes", parameters, memory["ours"] / inputs, "x", figures=memory)

    rounds = measure.interleave(contenders, seconds=seconds, device=DEVICE)
    times = {f"{x}, {phase}": rounds.spread(x, phase) for x in contenders}
    if len(contenders) == 1:
        yield Row.of("ours", parameters, rounds.spread("ours", phase), "s", times=times, refused=refused)
        return
    yield Row.of(f"ours over {case.over}", parameters, rounds.ratio("ours", case.over, phase), times=times)
    yield Row("memory over theirs", parameters, memory["ours"] / memory[case.over], "x", figures=memory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=("alibi", "table", "pair", "slide", "large-slide", "t5"))
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--forward", action="store_true", help="without a backward")
    parser.add_argument("--seconds", type=float, default=30.0, help="about how long to measure")
    parser.add_argument("--out", type=Path, default=Path("results"))
    given = parser.parse_args()
    torch.manual_seed(0)
    recorder = Recorder(given.out, "biases", DEVICE)
    for row in rows_of(given.case, given.heads, not given.forward, given.seconds):
        recorder.add(row)
        print(f"{row.name}: {row.value:.3g} {row.unit} {row.refused or ''}", dict(row.figures), flush=True)
        for contender, spread in row.times.items():
            print(f"    {contender}: {spread.median:.3f} s, {spread.runs} runs", flush=True)
