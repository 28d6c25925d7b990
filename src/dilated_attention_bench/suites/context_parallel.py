"""`bench parallel`: context parallelism: bytes moved, what a rank of a large world computes, real processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial

import torch

from dilated_attention_bench import rank_processes
from dilated_attention_bench.cases import Case
from dilated_attention_bench.measure import Spread
from dilated_attention_bench.results import Row
from dilated_attention_bench.simulate import World, rehearse
from dilated_attention_bench.suites import Step

MEGABITS = 100
"""Of the limited link: the exchange then takes about half of the compute beside it."""


def steps(device: torch.device, quick: bool) -> list[Step]:
    shard = 1 << (15 if quick else 17)
    worlds = [World(seq_len=shard * ranks, ranks=ranks, heads=4 if quick else 12) for ranks in (8192, 8)]
    tokens = 8192 if quick else 16384
    case = Case(
        method="dilated",
        seq_len=tokens,
        segment_lengths=tuple(2048 << i for i in range(0, tokens.bit_length() - 11)),
        dilation_rates=tuple(1 << i for i in range(0, tokens.bit_length() - 11)),
        heads=4 if quick else 8,
    )
    rounds = 3 if quick else 7
    found = [
        Step("bytes at 2^30 tokens", _bytes),
        Step(f"a rank of 8,192 and one of 8, {shard:,} tokens each", partial(_rank_time, worlds, rounds=3)),
        Step("their memory", partial(_rank_memory, worlds)),
        Step("a mesh of one rank", partial(_single, replace(case, seq_len=8192), 2 * rounds)),
    ]
    found += [Step(f"{number} processes", partial(_scaling, case, number, rounds)) for number in (2, 4)]
    overlap = replace(case, seq_len=16384, heads=4, segment_lengths=_doubling(4), dilation_rates=(1, 2, 4, 8))
    return [*found, Step(f"a link of {MEGABITS} Mbit/s", partial(_overlap, overlap, rounds))]


def _doubling(branches: int) -> tuple[int, ...]:
    return tuple(2048 << i for i in range(branches))


def _bytes() -> Iterator[Row]:
    """Counted; that real processes move as much is what the tests show, to the byte."""
    world = World(seq_len=1 << 30, ranks=8192, dtype="bfloat16")
    for transport, bar in (("doubling", 41.0), ("exchange", None)):
        plan = world.plan(transport)
        yield Row(
            name=f"{transport}: counted bytes that a rank sends or receives, the greater, a layer's forward",
            parameters=asdict(replace(world, transport=transport)),
            value=max(plan.bytes_sent, plan.bytes_received) / 1e6,
            unit="MB",
            bar=bar,
        )


def _rank_time(worlds: list[World], rounds: int) -> Iterator[Row]:
    large, small = rehearse(worlds, rounds)
    for phase, times in (
        ("forward", [found.forward for found in (large, small)]),
        ("forward+backward", [[a + b for a, b in zip(x.forward, x.backward, strict=True)] for x in (large, small)]),
    ):
        ratio = Spread.of([a / b for a, b in zip(*times, strict=True)])
        yield Row(
            name=f"{phase}: measured compute of the last rank of 8,192 over that of 8",
            parameters=asdict(worlds[0]),
            value=ratio.median,
            unit="x",
            bar=1.10,
            spread=ratio,
            times={f"{x.world.ranks} ranks": Spread.of(t) for x, t in zip((large, small), times, strict=True)},
        )


def _rank_memory(worlds: list[World]) -> Iterator[Row]:
    peaks = [rehearse([world])[0].peak_bytes for world in worlds]
    inputs = [4 * world.shard * world.row_bytes // 2 for world in worlds]
    known = None not in peaks
    whole = [peak + size for peak, size in zip(peaks, inputs, strict=True) if peak is not None]
    yield Row(
        name="forward+backward: measured peak memory, inputs included, of the last rank of 8,192 over that of 8",
        parameters=asdict(worlds[0]),
        value=whole[0] / whole[1] if known else None,
        unit="x",
        bar=1.05,
        refused=None if known else "this system does not tell a process's peak memory",
    )


def _single(case: Case, rounds: int) -> Iterator[Row]:
    found = rank_processes.measure("single", case, 1, rounds=rounds)
    ratio = Spread.of([a / b for a, b in zip(found["mesh"], found["no mesh"], strict=True)])
    yield Row(
        name="forward+backward: a mesh of one rank over no mesh",
        parameters=case.parameters,
        value=ratio.median,
        unit="x",
        bar=1.02,
        spread=ratio,
        times={name: Spread.of(found[name]) for name in ("mesh", "no mesh")},
    )
    yield Row(
        name="a mesh of one rank: counted transfers",
        parameters=case.parameters,
        value=float(found["transfers"]),
        unit="transfers",
        bar=0.0,
    )


def _scaling(case: Case, number: int, rounds: int) -> Iterator[Row]:
    found = rank_processes.measure("scaling", case, number, rounds=rounds)
    cores = min(number, os.cpu_count() or 1)
    names = {"alone": "one process", "all": f"{number} processes", "all, waiting apart": "of it, without waiting"}
    times = {words: Spread.of(found[name]) for name, words in names.items()}
    for name, bar in (("all, waiting apart", 1.15), ("all", None)):
        ratio = Spread.of([cores * a / b for a, b in zip(found[name], found["alone"], strict=True)])
        words = "without waiting for rows" if name != "all" else "with its communication"
        yield Row(
            name=f"forward+backward: {number} processes of one thread {words}, over one process's time / {cores} cores",
            parameters=case.parameters,
            value=ratio.median,
            unit="x",
            bar=bar,
            spread=ratio,
            times=times,
        )


def _overlap(case: Case, rounds: int) -> Iterator[Row]:
    name = f"forward: share of the exchange that is not hidden, on a link of {MEGABITS} Mbit/s"
    if why := rank_processes.limit_refusal():
        yield Row(name=name, parameters=case.parameters, value=None, unit="x", bar=0.5, refused=why)
        return
    found = rank_processes.measure("overlap", case, 2, rounds=rounds, limit=rank_processes.limited(MEGABITS))
    samples = zip(found["hidden"], found["waited for"], found["exchange"], strict=True)
    shown = Spread.of([1 - (waited - hidden) / exchange for hidden, waited, exchange in samples])
    contenders = ("hidden", "waited for", "left out", "exchange")
    times = {contender: Spread.of(found[contender]) for contender in contenders}
    yield Row(name=name, parameters=case.parameters, value=shown.median, unit="x", bar=0.5, spread=shown, times=times)
    modelled = 2 * found["bytes"] / (MEGABITS * 1e6 / 8)  # both ranks' bytes pass through the one link
    residual = Spread.of([seconds / modelled for seconds in found["exchange"]])
    yield Row(
        name=f"measured time of the exchange over the modelled, on a link of {MEGABITS} Mbit/s",
        parameters=case.parameters,
        value=residual.median,
        unit="x",
        spread=residual,
    )
