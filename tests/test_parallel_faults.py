"""Ranks that die, freeze, stay away or send the wrong thing: survivors get an error in time, and no wrong result."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import processes
from dilated_attention import dilated_attention
from dilated_attention.errors import ContextParallelError
from dilated_attention.nn import NativeSparseAttention
from dilated_attention.parallel import comm, cp_mean, set_context_parallel, unshard_sequence
from dilated_attention.parallel.comm import Framing, Link, link_of

SIZE, CULPRIT, TIMEOUT = 4, 1, 3.0
TRANSPORTS = ("exchange", "doubling", "ring")
PHASES = ("agreement", "forward", "backward")
SURVIVORS = [rank for rank in range(SIZE) if rank != CULPRIT]


def attend(transport: str, seq_len: int = 64, dtype: torch.dtype = torch.float32, rates=(1, 2)):
    """Forward and backward of this rank's shard of a pattern in which every rank sees rows of every other."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    q, k, v = (
        torch.randn(1, seq_len // SIZE, 2, 4, generator=generator, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    segments = (32, 128)[: len(rates)]
    options = {"mesh": dist.group.WORLD, "seq_len": seq_len, "transport": transport, "layer": "layer 7"}
    out = dilated_attention(q, k, v, segments, rates, **options)
    out.sum().backward()


def at(phase: str, act) -> None:
    """Let this process call `act(original, arguments)` in place of the phase's first use of the group."""
    if phase == "agreement":
        dist_all_reduce = dist.all_reduce
        dist.all_reduce = lambda *a, **o: act(dist_all_reduce, a, o)
        return
    for name in ("all_to_all", "swap", "all_gather"):
        original = getattr(Link, name)

        def wrapped(*arguments: Any, original=original, **options: Any):
            what = next(x for x in arguments if isinstance(x, str))
            return act(original, arguments, options) if phase in what else original(*arguments, **options)

        setattr(Link, name, wrapped)


def _sleep(original, arguments, options) -> None:
    time.sleep(3 * TIMEOUT + 10)


def _kill(original, arguments, options) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(original, arguments, options) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _shorten(original, arguments, options):
    """Send the first message without its last data row."""
    link, send, sent, *rest = arguments
    counts = (sent.counts[0] - 1, *sent.counts[1:])
    shorter = Framing(sent.peers, counts, sent.seal)
    return original(link, send[: shorter.rows], shorter, *rest, **options)


FAULTS = {"killed": _kill, "frozen": _stop, "absent": _sleep, "shorter payload": _shorten}


def report(fault, *arguments, **options):
    """Return what a call under a fault raised on this rank and when, then what the next call says, and how fast."""
    begin = time.monotonic()
    try:
        attend(*arguments, **options)
    except (ContextParallelError, ValueError) as error:
        first = str(error), time.monotonic() - begin
    else:
        return None
    begin = time.monotonic()
    with pytest.raises(ContextParallelError, match="failed and is not used again"):
        attend(*arguments)
    return *first, time.monotonic() - begin


def suffer(transport: str, phase: str, fault: str):
    if phase != "agreement":
        attend(transport)  # a good call first: only then are later ones without an agreement
    dist.barrier()
    if dist.get_rank() == CULPRIT:
        at(phase, FAULTS[fault])
    return report(fault, transport)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    "fault", ["killed", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("frozen", "absent"))]
)
def test_survivors_of_a_lost_rank_say_so_in_time(fault: str, phase: str) -> None:
    worlds = {t: processes.World(SIZE, suffer, t, phase, fault, timeout=TIMEOUT) for t in TRANSPORTS}
    for transport, world in worlds.items():
        outcomes = world.outcomes(6 * TIMEOUT + 20, SURVIVORS)
        for rank in SURVIVORS:
            kind, answer = outcomes[rank]
            assert kind == "result", (transport, rank, kind, answer)
            assert answer is not None, (transport, rank, "finished as if nothing had happened")
            message, seconds, refused = answer
            assert seconds < TIMEOUT + 2, (transport, rank, seconds, message)
            assert refused < 0.5
            assert f"on rank {rank} of {SIZE} in layer 7" in message
            named = message.partition("no word within")[2]
            assert str(CULPRIT) in named or "does not answer" in message, (transport, rank, message)


def hear(transport: str):
    """One rank's exchange fails in the forward, as a neighbour's death makes it; it stays, and sends nothing more."""
    attend(transport)
    dist.barrier()

    def fail(*_):
        raise RuntimeError("a neighbour is lost")

    if dist.get_rank() == CULPRIT:
        Link.exchange = Link.gather = Link.post = fail
    answer = report("a failure", transport)
    if dist.get_rank() == CULPRIT:
        time.sleep(20)  # its end would tell the others
    return answer


def test_a_rank_hears_of_a_failure_from_the_one_that_has_seen_it() -> None:
    worlds = {t: processes.World(SIZE, hear, t, timeout=60) for t in (*TRANSPORTS, "all_gather")}
    for transport, world in worlds.items():
        outcomes = world.outcomes(15, SURVIVORS)
        for rank in SURVIVORS:
            kind, answer = outcomes[rank]
            assert kind == "result", (transport, rank, kind)
            assert "another rank reports that its exchange failed" in answer[0], (transport, rank, answer)


def suffer_again():
    """Every rank reports a failure; then a group of the same name and store, as torchrun starts one again, suffers."""
    attend("ring")
    link, store = link_of(dist.group.WORLD), comm.rendezvous_store()
    name = link.group.group_name
    assert "no word" not in link._roll_call()
    dist.barrier()
    dist.destroy_process_group()
    options = {"rank": link.rank, "world_size": SIZE, "timeout": timedelta(seconds=TIMEOUT)}
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), **options)
    comm.rendezvous_store = lambda: store
    assert dist.group.WORLD.group_name == name
    return suffer("ring", "forward", "killed")


def test_a_group_that_was_started_again_names_who_is_lost_now() -> None:
    outcomes = processes.World(SIZE, suffer_again, timeout=TIMEOUT).outcomes(6 * TIMEOUT + 20, SURVIVORS)
    for rank in SURVIVORS:
        kind, answer = outcomes[rank]
        assert kind == "result", answer
        gone = rank != 0 and "does not answer" in answer[0]  # the store, with rank 0, which was done first
        assert gone or answer[0].endswith(f"no word within 1 s from rank {CULPRIT}"), answer


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_shorter_payload_is_caught_before_use(phase: str) -> None:
    worlds = {t: processes.World(SIZE, suffer, t, phase, "shorter payload", timeout=TIMEOUT) for t in TRANSPORTS}
    for transport, world in worlds.items():
        outcomes = world.outcomes(6 * TIMEOUT + 20)
        assert all(kind == "result" for kind, _ in outcomes), (transport, outcomes)
        # Ranks whose own messages arrived whole may finish, and are right.
        messages = [answer[0] for _, answer in outcomes if answer is not None]
        assert any(f"the rows received from rank {CULPRIT} are not" in message for message in messages), transport


def send_to_a_late_rank():
    """Rank 0 sends a message; rank 1, which sends none, receives it a moment later. Return the size of the buffer."""
    link = link_of(dist.group.WORLD)
    rows = torch.zeros(8, 16)
    message = Framing((1 - link.rank,), (7,), 1)
    nothing = Framing((), (), 1)
    if link.rank == 0:
        return len(link.swap(rows, message, nothing, "late").wait())
    time.sleep(0.3)
    return len(link.swap(rows[:0], nothing, message, "late").wait())


def test_a_send_is_waited_for_once() -> None:
    """Gloo waits in vain for a point-to-point operation that has been waited for."""
    outcomes = processes.World(2, send_to_a_late_rank, timeout=TIMEOUT).outcomes(6 * TIMEOUT + 20)
    assert outcomes == [("result", 0), ("result", 8)]


DIFFERENCES = {"seq_len": {"seq_len": 128}, "dtype": {"dtype": torch.float64}, "branches": {"rates": (1,)}}


def differ(transport: str, difference: str):
    """Every rank has agreed on two calls; then one rank makes the other one."""
    attend(transport)
    attend(transport, **DIFFERENCES[difference])
    dist.barrier()
    return report("differing", transport, **(DIFFERENCES[difference] if dist.get_rank() == CULPRIT else {}))


@pytest.mark.parametrize(
    "difference", [pytest.param(x, marks=pytest.mark.thorough if x == "dtype" else ()) for x in DIFFERENCES]
)
def test_calls_that_differ_after_both_were_agreed_on(difference: str) -> None:
    """Messages shorter than expected fail their seal; where one is longer, gloo itself ends the receiving process."""
    worlds = {t: processes.World(SIZE, differ, t, difference, timeout=TIMEOUT) for t in TRANSPORTS}
    for transport, world in worlds.items():
        outcomes = world.outcomes(6 * TIMEOUT + 20)
        for rank, (kind, answer) in enumerate(outcomes):
            if kind == "died":
                assert answer == -signal.SIGABRT
                continue
            assert kind == "result", (transport, rank, kind, answer)
            assert answer is not None, (transport, rank, "finished as if nothing had happened")
            assert answer[1] < TIMEOUT + 2, (transport, rank, answer)


def differ_anew(transport: str):
    attend(transport)
    dist.barrier()
    return report("differing", transport, seq_len=128 if dist.get_rank() == CULPRIT else 64)


def test_a_call_that_differs_after_the_first_is_named() -> None:
    worlds = {t: processes.World(SIZE, differ_anew, t, timeout=TIMEOUT) for t in TRANSPORTS}
    for transport, world in worlds.items():
        for rank, (kind, answer) in enumerate(world.outcomes(6 * TIMEOUT + 20)):
            assert kind == "result", (transport, rank, kind, answer)
            gone = rank != 0 and "does not answer" in answer[0]  # the store, with rank 0, which was done first
            assert gone or f"rank {CULPRIT} has seq_len=128, elsewhere seq_len=64" in answer[0], (
                transport,
                rank,
                answer,
            )


def train_alone(transport: str):
    """All ranks train and evaluate; then one evaluates again while the others train."""
    shape, rank = (1, 64 // SIZE, 4, 4), dist.get_rank()
    options = {"mesh": dist.group.WORLD, "transport": transport}
    try:
        for trains in (True, False, rank != CULPRIT):
            q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
            with torch.set_grad_enabled(trains):
                out = dilated_attention(q, k, v, (32, 128), (1, 2), **options)
            if out.requires_grad:
                out.sum().backward()
    except ContextParallelError as error:
        return str(error)


def test_ranks_that_train_beside_one_that_evaluates_are_told() -> None:
    worlds = {t: processes.World(SIZE, train_alone, t, timeout=TIMEOUT) for t in (*TRANSPORTS, "all_gather", "ulysses")}
    for transport, world in worlds.items():
        outcomes = world.outcomes(6 * TIMEOUT + 20)
        for rank, (kind, answer) in enumerate(outcomes):
            assert kind == "result", (transport, rank, kind, answer)
            assert answer is not None, (transport, rank, "finished as if nothing had happened")
        assert any("has gradients=" in answer for _, answer in outcomes), outcomes


def swapped(kind: str, transport: str):
    """One rank makes two calls, two backwards, two recomputations or two gatherings in the other order."""
    rank, mesh = dist.get_rank(), dist.group.WORLD
    in_turn = (1, 0) if rank == CULPRIT else (0, 1)
    generator = torch.Generator().manual_seed(rank)
    shards = [torch.randn(1, 64 // SIZE, 4, 4, generator=generator, requires_grad=True) for _ in range(2)]
    hidden = torch.zeros(1, 64 // SIZE, dtype=torch.bool)

    def call(x, layer="", mask=None):
        options = {"mesh": mesh, "transport": transport, "layer": layer, "key_padding_mask": mask}
        return dilated_attention(x, x, x, (32, 128), (1, 2), **options).square().sum()

    try:
        if kind == "layers":
            for i in in_turn:
                call(shards[i], f"layer {i}")
        elif kind == "masks":
            for i in in_turn:
                call(shards[0], "masked", hidden) if i else unshard_sequence(shards[0], mesh)
        elif kind == "means":
            for i in in_turn:
                cp_mean(shards[0].sum(), 1, mesh) if i else unshard_sequence(shards[0], mesh)
        else:
            functions = {
                "backwards": call,
                "recomputations": lambda x: checkpoint(call, x, use_reentrant=False),
                "gathered": lambda x: unshard_sequence(x, mesh).square().sum(),
            }
            losses = [functions[kind](x) for x in shards]
            for i in in_turn:
                losses[i].backward()
    except (ContextParallelError, ValueError) as error:
        return str(error)


OUT_OF_STEP = [
    *((kind, t) for kind in ("layers", "backwards", "recomputations") for t in (*TRANSPORTS, "all_gather", "ulysses")),
    ("gathered", "auto"),
]


def test_ranks_that_are_out_of_step_are_told() -> None:
    """Each rank that exchanges with the culprit; the others learn of it when they use the group again."""
    for batch in (OUT_OF_STEP[:8], OUT_OF_STEP[8:]):
        worlds = {case: processes.World(SIZE, swapped, *case, timeout=TIMEOUT) for case in batch}
        for case, world in worlds.items():
            for rank, (kind, answer) in enumerate(world.outcomes(6 * TIMEOUT + 20)):
                assert kind == "result", (case, rank, kind, answer)
                assert answer is not None, (case, rank, "finished as if nothing had happened")
                if case[0] == "layers":
                    assert "layer " in answer, (case, rank, answer)


@pytest.mark.parametrize("kind", ["masks", "means"])
def test_gatherings_out_of_step_are_no_numbers(kind: str) -> None:
    for rank, (outcome, answer) in enumerate(
        processes.World(SIZE, swapped, kind, "auto", timeout=TIMEOUT).outcomes(40)
    ):
        assert outcome == "died" or (outcome == "result" and answer is not None), (rank, outcome, answer)


def train_one_shard():
    """Only rank 0's shard wants gradients, as behind a trainable prefix."""
    rank = dist.get_rank()
    whole = torch.randn(1, 64, 4, 4, generator=torch.Generator().manual_seed(0))
    own = whole.chunk(SIZE, 1)[rank].clone()
    # evaluations first, in which none does
    for grad_mode, wanted in ((False, False), (True, False), (True, rank == 0)):
        own.requires_grad_(wanted)
        with torch.set_grad_enabled(grad_mode):
            out = dilated_attention(own, own, own, (32, 128), (1, 2), mesh=dist.group.WORLD)
    assert out.requires_grad
    out.square().sum().backward()
    whole.requires_grad_()
    dilated_attention(whole, whole, whole, (32, 128), (1, 2)).square().sum().backward()
    if rank == 0:
        torch.testing.assert_close(own.grad, whole.grad.chunk(SIZE, 1)[0])


def train_one_shard_of_a_frozen_module():
    """A module that pools keys over the mesh, none of them on the last rank, and a gather, of which every rank has a
    copy."""
    rank, mesh = dist.get_rank(), dist.group.WORLD
    torch.manual_seed(0)
    module, x = NativeSparseAttention(16, 4, 2, query_block=1).requires_grad_(False), torch.randn(1, 44, 16)
    own = x.chunk(SIZE, 1)[rank].clone().requires_grad_(rank == 0)
    set_context_parallel(module, mesh)
    (module(own).square().sum() + unshard_sequence(own, mesh).square().sum()).backward()
    set_context_parallel(module, None)
    x.requires_grad_()
    (module(x).square().sum() + SIZE * x.square().sum()).backward()
    if rank == 0:
        torch.testing.assert_close(own.grad, x.grad.chunk(SIZE, 1)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("train", [train_one_shard, train_one_shard_of_a_frozen_module])
def test_every_rank_takes_part_in_a_backward_that_one_rank_wants(train) -> None:
    processes.run(SIZE, train)
