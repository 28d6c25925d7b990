"""Run the real code of one rank of a large world on PyTorch's fake process group, which moves nothing.

Each receive ends at once and fills its buffer with random normals (`RehearsalLink`).

Three kinds of figures come out, and are labelled as such everywhere:

    measured   this rank's compute, in seconds of its one thread's CPU time, and peak memory on this device;
    counted    bytes, messages and rounds, where tensors are handed to `torch.distributed`;
    modelled   time of communication, latency x messages + bytes / bandwidth, and all figures of other schemes.

The rank is the world's last, which computes and receives most when causal.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from dilated_attention import Dilated, dilated_attention
from dilated_attention.parallel import ExchangePlan, exchange_plan
from dilated_attention.plumbing import Framing, Link, Traffic, Transfer, use_link
from dilated_attention_lab.bench.cases import doubling
from dilated_attention_lab.bench.measure import UNTOLD, in_new_process, peak_above_now
from dilated_attention_lab.bench.results import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Describe a context parallel call. Segments and rates double from `first_segment` and 1, up to `seq_len`.

    Attributes:
        seq_len: tokens over all ranks.
        dtype: the name of a torch dtype, such as `float32`.
    """

    seq_len: int
    ranks: int
    heads: int = 12
    head_dim: int = 64
    first_segment: int = 2048
    is_causal: bool = True
    dtype: str = "float32"
    transport: str = "auto"

    def __post_init__(self) -> None:
        for name in ("seq_len", "ranks", "heads", "head_dim", "first_segment"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}")
        if self.seq_len < self.ranks:
            raise ValueError(f"seq_len must give each of the {self.ranks} ranks a token; got {self.seq_len}")

    @property
    def pattern(self) -> Dilated:
        return doubling(self.first_segment, max(1, (self.seq_len // self.first_segment).bit_length()))

    @property
    def shard(self) -> int:
        """Return the number of tokens of the last rank."""
        return self.seq_len - (self.ranks - 1) * self.seq_len // self.ranks

    @property
    def row_bytes(self) -> int:
        """Return the bytes of the keys and values of one token, all heads."""
        return 2 * self.heads * self.head_dim * getattr(torch, self.dtype).itemsize

    def plan(self, transport: str | None = None) -> ExchangePlan:
        """Return what the last rank sends and receives, by closed formulas. `transport`: None for the world's own."""
        return exchange_plan(
            self.pattern,
            self.seq_len,
            self.heads,
            self.ranks,
            self.ranks - 1,
            head_dim=self.head_dim,
            dtype=getattr(torch, self.dtype),
            is_causal=self.is_causal,
            transport=transport or self.transport,
        )

    def others(self) -> dict[str, tuple[int, int]]:
        """Return (bytes, messages) that a rank receives in a forward, by scheme; modelled, by closed formulas.

        `dense ring`: every other rank's keys and values (Liu et al., arXiv:2310.01889). `all-gather`: for each branch
        with segments longer than a shard, its rows of a segment, gathered by the ranks of the segment. `official
        LongNet`: such a branch's rows of the whole sequence, gathered by all ranks, as in torchscale.
        """
        shard, row = self.seq_len // self.ranks, self.row_bytes
        gathered = messages = official = 0
        branches = zip(self.pattern.segment_lengths, self.pattern.dilation_rates, strict=True)
        crossing = [(segment, rate) for segment, rate in branches if segment > shard]
        for segment, rate in crossing:
            members = max(1, min(segment // shard, segment // rate))
            gathered += row * (segment - segment // members) // rate
            messages += members - 1
            official += row * max(1, shard // rate) * (self.ranks - 1)
        return {
            "dense ring": (row * shard * (self.ranks - 1), self.ranks - 1),
            "all-gather": (gathered, messages),
            "official LongNet": (official, len(crossing) * (self.ranks - 1)),
        }

    def flops(self, dense: bool = False) -> float:
        """Return the floating-point operations of the last rank's forward, about 4 head_dim per score entry.

        dense: count dense attention over the whole sequence instead of the pattern.
        """
        pattern = Dilated((self.seq_len,), (1,)) if dense else self.pattern
        entries = 0.0
        for segment, rate in zip(pattern.segment_lengths, pattern.dilation_rates, strict=True):
            seen = min(segment, self.seq_len) / rate
            within = 1.0 if not self.is_causal else 1.0 - min(1.0, self.shard / segment) / 2
            entries += self.shard / rate * seen * within
        return 4 * self.head_dim * self.heads * entries


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Hold what the last rank of a world did.

    Attributes:
        transport: the transport that served the call.
        forward, backward: measured CPU seconds of compute, one per round.
        sent, received: bytes in the forward. messages: those received in it. returned: bytes sent in the backward.
        rounds: how many times the forward communicates: a collective, or sends and receives posted together, is one.
        peak_bytes: measured: what forward and backward added to their inputs; None if the system does not say, or if
            several worlds ran in one process.
    """

    world: World
    transport: str
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    sent: int
    received: int
    messages: int
    rounds: int
    returned: int
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class Network:
    """Model a network.

    Attributes:
        latency: seconds per message; bandwidth: bytes per second that a rank receives.
    """

    latency: float
    bandwidth: float

    def seconds(self, received: int, messages: int) -> float:
        return self.latency * messages + received / self.bandwidth

    def __str__(self) -> str:
        return f"{self.latency * 1e6:g} us a message, {self.bandwidth / 1e9:g} GB/s"


def world_sizes(least: int, most: int) -> list[int]:
    """Return numbers of ranks that begin at `least` and grow fourfold; the last is `most`."""
    sizes = []
    while least < most:
        sizes.append(least)
        least *= 4
    return [*sizes, most]


def of_model(path: Path, lengths: dict[int, int], dtype: torch.dtype, is_causal: bool, network: Network) -> str:
    """Return a table of what the last rank receives in a forward of a transformers model, beside other schemes.

    Args:
        path: its `config.json`, or the folder of this file.
        lengths: the tokens on all ranks, by the number of ranks.
    """
    from transformers import AutoConfig

    from dilated_attention.integrations.huggingface import exchange_plan

    if not path.exists():
        raise ValueError(f"--model {path}: there is no such file or folder")
    config = AutoConfig.from_pretrained(path)
    lines = [
        "counted: bytes that the last rank receives in a forward; modelled: their time, and the other schemes' bytes",
        f"{'ranks':>7} {'tokens':>15} {'GB':>9} {'seconds':>9} {'ring, GB':>10} {'Ulysses, GB':>12}",
    ]
    for ranks, seq_len in lengths.items():
        plan = exchange_plan(config, seq_len, ranks, dtype=dtype, is_causal=is_causal)
        messages = sum([kind.count * kind.plan.peers_received for kind in plan.layers])
        seconds = network.seconds(plan.bytes_received, messages)
        ulysses = "too few heads"
        if plan.ulysses_bytes is not None:
            ulysses = f"{plan.ulysses_bytes / 1e9:.3f}"
        sizes = f"{plan.bytes_received / 1e9:9.3f} {seconds:9.4f} {plan.ring_bytes / 1e9:10.3f} {ulysses:>12}"
        lines.append(f"{ranks:7,} {seq_len:15,} {sizes}")
    for kind in plan.layers:
        lines.append(f"{kind.count} layers of {kind.pattern!r}")
    return "\n".join(lines)


def rows(found: Rehearsal, network: Network) -> Iterator[Row]:
    """Yield the figures of a world; each name begins with its kind: measured, counted or modelled."""
    parameters = asdict(found.world) | {"transport": found.transport}
    figures: list[tuple[str, float | None, str]] = [
        ("measured: forward", found.forward[0], "s"),
        ("measured: backward", found.backward[0], "s"),
        ("measured: peak memory above inputs", found.peak_bytes, "bytes"),
        ("counted: sent in a forward", found.sent, "bytes"),
        ("counted: received in a forward", found.received, "bytes"),
        ("counted: sent in a backward", found.returned, "bytes"),
        ("counted: messages received", found.messages, "messages"),
        ("counted: rounds", found.rounds, "rounds"),
        (f"modelled, {network}: communication of a forward", network.seconds(found.received, found.messages), "s"),
    ]
    for scheme, (received, messages) in found.world.others().items():
        figures.append((f"modelled: received in a forward, {scheme}", received, "bytes"))
        figures.append((f"modelled, {network}: communication, {scheme}", network.seconds(received, messages), "s"))
    for name, value, unit in figures:
        yield Row(name, parameters, value, unit, refused=UNTOLD if value is None else None)


def rehearse(worlds: Sequence[World], rounds: int = 1) -> list[Rehearsal]:
    """Run `_rehearse` in a new process of one thread: the worlds in turns, `rounds` times. Return its result."""
    request = {"worlds": [asdict(world) for world in worlds], "rounds": rounds}
    answer = in_new_process(__name__, request)
    return [Rehearsal(World(**found.pop("world")), **found) for found in answer]


class RehearsalLink(Link):
    """Count the transfers of a rank whose peers do not exist. They take no time, and fill buffers with random normals.

    Attributes:
        filled: seconds of CPU time spent drawing the normals, which no real rank spends.
    """

    filled: float = 0.0

    def exchange(self, buffer: Tensor, send: Tensor, received: Framing, sent: Framing) -> list[dist.Work]:
        return []

    def gather(self, buffer: Tensor, send: Tensor, sent: Framing) -> list[dist.Work]:
        return []

    def post(self, operations: list[dist.P2POp]) -> list[dist.Work]:
        return []

    def received(self, transfer: Transfer) -> None:
        begin = time.process_time()
        if transfer.buffer.is_floating_point():
            transfer.buffer.normal_()
        self.filled += time.process_time() - begin


def _call(world: World, group: ProcessGroup) -> Callable[[], tuple[float, float, Traffic, Traffic]]:
    """Return a function that runs a forward and a backward of a world's last rank.

    It returns the CPU seconds of each, then the traffic of each. The seconds leave out how long `RehearsalLink` took
    to fill the receive buffers with random numbers, in place of data from other ranks.
    """
    link = RehearsalLink(group)
    shape = 1, world.shard, world.heads, world.head_dim
    q, k, v, gradient = (torch.randn(shape, dtype=getattr(torch, world.dtype)) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    segments, rates = world.pattern.segment_lengths, world.pattern.dilation_rates

    def timed(work: Callable[[], Any]) -> tuple[Any, float, Traffic]:
        link.traffic, filled, begin = Traffic(), link.filled, time.process_time()
        result = work()
        seconds = time.process_time() - begin - (link.filled - filled)
        return result, seconds, link.traffic

    def run() -> tuple[float, float, Traffic, Traffic]:
        use_link(link)
        options: dict[str, Any] = {"mesh": group, "seq_len": world.seq_len, "transport": world.transport}
        options["is_causal"] = world.is_causal
        out, forward, moved = timed(lambda: dilated_attention(q, k, v, segments, rates, **options))
        _, backward, returned = timed(lambda: torch.autograd.grad(out, leaves, gradient))
        return forward, backward, moved, returned

    return run


def _rehearse(worlds: Sequence[World], rounds: int) -> list[Rehearsal]:
    """Run the worlds in turns, `rounds` times, in this process; return what the last rank of each did.

    Two or more rounds follow a warm-up that does not count. The peak memory is reported only for a single world.
    """
    size = max(world.ranks for world in worlds)
    dist.init_process_group("fake", store=FakeStore(), rank=size - 1, world_size=size)
    # This process is the last rank of every group, too.
    calls = [_call(world, dist.new_group(list(range(size - world.ranks, size)))) for world in worlds]
    runs: list[list[tuple[float, float, Traffic, Traffic]]] = [[] for _ in worlds]

    def run() -> None:
        for i in range(rounds + (rounds > 1)):
            for j in range(len(worlds)):
                index = (i + j) % len(worlds)
                runs[index].append(calls[index]())

    peak = peak_above_now(run, torch.device("cpu"))
    found = []
    for world, results in zip(worlds, runs, strict=True):
        # The first of several is a warm-up: it makes the plans.
        forward, backward, moved, returned = zip(*results[rounds > 1 :], strict=True)
        one, back = moved[-1], returned[-1]
        counted = one.bytes_sent, one.bytes_received, one.messages_received, one.rounds, back.bytes_sent
        held = peak if len(worlds) == 1 else None
        found.append(Rehearsal(world, world.plan().transport, forward, backward, *counted, held))
    return found


def _main(request: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    worlds = [World(**world) for world in request["worlds"]]
    print(json.dumps([asdict(found) for found in _rehearse(worlds, request["rounds"])]))


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
