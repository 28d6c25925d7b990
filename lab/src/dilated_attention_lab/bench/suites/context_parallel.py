"""`bench parallel`: context parallelism: bytes moved, what a rank of a large world computes, real processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from dilated_attention_lab.bench import activations, rank_processes
from dilated_attention_lab.bench.cases import Case, doubling
from dilated_attention_lab.bench.measure import UNTOLD, Spread
from dilated_attention_lab.bench.results import Row
from dilated_attention_lab.bench.simulate import World, rehearse
from dilated_attention_lab.bench.suites import Step

MEGABITS = 400
"""Rate of the limited link, in Mbit/s. At this rate the exchange takes about half as long as the compute that hides it.
"""


def steps(device: torch.device, quick: bool) -> list[Step]:
    shard = 1 << (15 if quick else 17)
    worlds = [World(seq_len=shard * ranks, ranks=ranks, heads=4) for ranks in (8192, 8)]
    tokens = 8192 if quick else 16384
    case = _case(tokens, tokens.bit_length() - 11, heads=4 if quick else 8)
    rounds = 3 if quick else 7
    found = [
        Step("bytes at 2^30 tokens", _bytes),
        Step(f"a rank of 8,192 and one of 8, {shard:,} tokens each", partial(_rank_time, worlds, rounds=3)),
        Step("their memory", partial(_rank_memory, worlds)),
        Step("a mesh of one rank", partial(_single, replace(case, seq_len=8192), rounds)),
        Step("2 processes", partial(_scaling, case, 2, rounds)),
    ]
    selecting = Case(method="dense", seq_len=tokens if quick else 131_072, heads=2, is_causal=True)
    found.append(Step("native sparse attention in 8 processes", partial(_selecting, selecting, rounds=1)))
    model = Case(method="dense", seq_len=4096 if quick else 8192, is_causal=True)
    label = f"Gemma 3's shape, a training step in 8 processes, {model.seq_len:,} tokens"
    found.append(Step(label, partial(_training, model)))
    return [*found, Step(f"a link of {MEGABITS} Mbit/s", partial(_overlap, _case(16384, 4, heads=4), rounds))]


def _case(seq_len: int, branches: int, heads: int) -> Case:
    lengths, rates = doubling(2048, branches).segment_lengths, doubling(2048, branches).dilation_rates
    return Case(method="dilated", seq_len=seq_len, segment_lengths=lengths, dilation_rates=rates, heads=heads)


def _bytes() -> Iterator[Row]:
    """Yield the bytes that the last of 8,192 ranks sends or receives, whichever is more, in a forward over 2^30 tokens.

    They are counted for the transports doubling and exchange, without running. Tests compare such counts with the
    bytes of real processes.
    """
    world = World(seq_len=1 << 30, ranks=8192, dtype="bfloat16")
    for transport, bar in (("doubling", 41.0), ("exchange", None)):
        plan, parameters = world.plan(transport), asdict(replace(world, transport=transport))
        name = f"{transport}: counted bytes that a rank sends or receives, the greater, a layer's forward"
        yield Row(name, parameters, max(plan.bytes_sent, plan.bytes_received) / 1e6, "MB", bar=bar)


def _rank_time(worlds: list[World], rounds: int) -> Iterator[Row]:
    found = rehearse(worlds, rounds)
    for phase, times in (
        ("forward", [x.forward for x in found]),
        ("forward+backward", [[a + b for a, b in zip(x.forward, x.backward, strict=True)] for x in found]),
    ):
        yield Row.of(
            f"{phase}: measured compute of the last rank of 8,192 over that of 8",
            asdict(worlds[0]),
            Spread.of_ratios(*times),
            bar=1.10,
            times={f"{x.world.ranks} ranks": Spread.of(t) for x, t in zip(found, times, strict=True)},
        )


def _rank_memory(worlds: list[World]) -> Iterator[Row]:
    name = "forward+backward: measured peak memory, inputs included, of the last rank of 8,192 over that of 8"
    peaks = [(rehearse([world])[0].peak_bytes, 4 * world.shard * world.row_bytes // 2) for world in worlds]
    whole = [peak + inputs for peak, inputs in peaks if peak is not None]
    if len(whole) == len(worlds):
        yield Row(name, asdict(worlds[0]), whole[0] / whole[1], "x", bar=1.05)
    else:
        yield Row(name, asdict(worlds[0]), None, "x", bar=1.05, refused=UNTOLD)


def _single(case: Case, rounds: int) -> Iterator[Row]:
    found = rank_processes.measure("single", case, 1, rounds=rounds)
    ratio = Spread.of_ratios(found["mesh"], found["no mesh"])
    times = {name: Spread.of(found[name]) for name in ("mesh", "no mesh")}
    yield Row.of("forward+backward: a mesh of one rank over no mesh", case.parameters, ratio, bar=1.02, times=times)
    yield Row("a mesh of one rank: counted transfers", case.parameters, float(found["transfers"]), "transfers", bar=0.0)


def _scaling(case: Case, number: int, rounds: int) -> Iterator[Row]:
    found = rank_processes.measure("scaling", case, number, rounds=rounds)
    cores = min(number, os.cpu_count() or 1)
    names = {"alone": "one process", "all": f"{number} processes", "all, waiting apart": "of it, without waiting"}
    times = {words: Spread.of(found[name]) for name, words in names.items()}
    for key, words, bar in (
        ("all, waiting apart", "without waiting for rows", 1.15),
        ("all", "with its communication", None),
    ):
        name = f"forward+backward: {number} processes of one thread {words}, over one process's time / {cores} cores"
        ratio = Spread.of_ratios(found[key], found["alone"], cores)
        yield Row.of(name, case.parameters, ratio, bar=bar, times=times)


def _shares(title: str, parameters: dict[str, Any], number: int, found: dict[str, Any]) -> Iterator[Row]:
    """Yield the times of `number` ranks that share a work over the time of one, which `rank_processes` has measured."""
    times = {name: Spread.of(found[name]) for name in ("alone", "mean", "most")}
    for key, words, bar in (("mean", "a rank on average", 1.15), ("most", "the busiest rank", None)):
        name = f"{title}: {words} of {number}, over 1 / {number} of one process's time"
        yield Row.of(name, parameters, Spread.of_ratios(found[key], found["alone"], number), bar=bar, times=times)


def _selecting(case: Case, rounds: int) -> Iterator[Row]:
    found = rank_processes.measure("selecting", case, 8, rounds=rounds)
    parameters = {name: value for name, value in case.parameters.items() if name != "method"}
    yield from _shares("native sparse attention, forward+backward", parameters, 8, found)


def _training(case: Case) -> Iterator[Row]:
    parameters = {"model": "Gemma 3's shape, 6 layers", "heads": 4, "seq_len": case.seq_len}
    title = "training step of a transformers model"
    if why := activations.missing():
        yield Row(title, parameters, None, "x", refused=why)
        return
    found = rank_processes.measure("training", case, 8, rounds=1)
    yield from _shares(title, parameters, 8, found)
    name = f"{title}: relative difference of the loss of 8 processes to one process's"
    yield Row(name, parameters, found["difference"], "", bar=1e-5)


def _overlap(case: Case, rounds: int) -> Iterator[Row]:
    name = f"forward: share of the exchange that is not hidden, on a link of {MEGABITS} Mbit/s"
    if why := rank_processes.limit_refusal():
        yield Row(name, case.parameters, None, "x", bar=0.5, refused=why)
        return
    found = rank_processes.measure("overlap", case, 2, rounds=rounds, limit=rank_processes.limited(MEGABITS))
    samples = zip(found["hidden"], found["waited for"], found["exchange"], strict=True)
    shown = Spread.of([1 - (waited - hidden) / exchange for hidden, waited, exchange in samples])
    times = {contender: Spread.of(found[contender]) for contender in ("hidden", "waited for", "left out", "exchange")}
    yield Row.of(name, case.parameters, shown, bar=0.5, times=times)
    modelled = 2 * found["bytes"] / (MEGABITS * 1e6 / 8)  # both ranks' bytes pass through the one link
    name = f"measured time of the exchange over the modelled, on a link of {MEGABITS} Mbit/s"
    yield Row.of(name, case.parameters, Spread.of(found["exchange"]).scaled(1 / modelled))
