"""Move rows between the ranks of one process group, in sealed messages; refuse a group that has failed.

`torch.distributed` moves the bytes. Gloo does not check sizes: if a message is shorter than expected, the rest of the
receive buffer keeps its old contents, without an error. So every message ends in a *seal*, which the receiver checks
before it uses a row. The seal holds a hash of the plan, layer, forward and phase, and the number of the transfer.
Before the first transfer of a plan the ranks also compare hashes of their calls, so that a rank with a different call
raises an error instead of exchanging rows.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import threading
import time
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import InitVar, dataclass, field
from datetime import timedelta
from functools import cache, cached_property, lru_cache, partial
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dilated_attention.errors import ContextParallelError
from dilated_attention.parallel import presence
from dilated_attention.parallel.partition import Integers
from dilated_attention.torch_internals import autograd_position, rendezvous_store, require_when_run

_SEAL_BYTES = 16
_ROLL_CALL_SECONDS = 1.0
_FAILED = "failed"
"""The key in the store that a rank writes when its exchange has failed."""
_REFUSED = "refused"
"""The key in the store that a rank writes when it first refuses a call."""
_MOST_AGREED = 2**12
"""The most call descriptions that a link keeps. The oldest is dropped first, at the same call on every rank, and
compared again when it comes back."""
_MOST_FORWARDS = 2**12
"""The number of a layer's last forwards that are remembered, to find the one that a recomputation repeats."""


def seal_rows(row_bytes: int) -> int:
    """Return how many rows of `row_bytes` bytes a seal takes: the check value at the end of each message."""
    return -(-_SEAL_BYTES // max(row_bytes, 1))


@dataclass(frozen=True)
class Framing:
    """Describe a buffer that holds one message for each rank in `peers`, in ascending order.

    Message i is `counts[i]` rows of data, then `seal` rows that hold its seal: a hash of the call and phase, and the
    number of the transfer, which the receiver checks.
    """

    peers: tuple[int, ...]
    counts: tuple[int, ...]
    seal: int

    @classmethod
    def of(cls, counts: Sequence[int] | dict[int, int], seal: int) -> Framing:
        """Make a framing from the number of data rows per rank. A rank without rows gets no message."""
        if not isinstance(counts, dict):
            counts = dict(enumerate(counts))
        peers = tuple([peer for peer in sorted(counts) if counts[peer]])
        return cls(peers, tuple([counts[peer] for peer in peers]), seal)

    @cached_property
    def rows(self) -> int:
        """Return the number of rows of the buffer, seals included."""
        return sum(self.counts) + self.seal * len(self.peers)

    def splits(self, size: int) -> list[int]:
        """Return the number of rows to or from each of `size` ranks, seals included."""
        rows = [0] * size
        for peer, count in zip(self.peers, self.counts, strict=True):
            rows[peer] = count + self.seal
        return rows

    @cached_property
    def positions(self) -> Integers:
        """Return the index in the buffer of each data row, message by message."""
        counts = np.array(self.counts, dtype=np.int64)
        return np.arange(counts.sum()) + self.seal * np.repeat(np.arange(len(counts)), counts)

    @cached_property
    def seals(self) -> Integers:
        """Return the indices in the buffer of each message's seal rows, `(messages, seal)`."""
        ends = np.cumsum(np.array(self.counts, dtype=np.int64) + self.seal)
        return (ends - self.seal)[:, None] + np.arange(self.seal)

    def without(self, rank: int) -> Framing:
        """Return this framing without the message to or from `rank`."""
        return Framing.of(dict(zip(self.peers, self.counts, strict=True)) | {rank: 0}, self.seal)


@dataclass
class Traffic:
    """Count what one rank has sent to other ranks, and received from them, through `torch.distributed`.

    Attributes:
        rounds: the number of collectives, and of batches of sends and receives that are posted together.
        agreements: comparisons of the ranks' calls (`Link.agree`); no counter includes their bytes.
        waited: seconds spent waiting for transfers.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    rounds: int = 0
    agreements: int = 0
    waited: float = 0.0


@dataclass
class Transfer:
    link: Link
    works: list[dist.Work]
    buffer: Tensor
    framing: Framing
    seal: tuple[int, int]
    what: str

    def wait(self) -> Tensor:
        """Wait for the transfer, check the seal of each message (`Link.received`), and return the receive buffer."""
        begin = time.perf_counter()
        with self.link.guard(self.what):
            self.link.wait(self.works, collective=self.seal[1] % 2 == 0)
        self.link.traffic.waited += time.perf_counter() - begin
        self.link.received(self)
        return self.buffer


@dataclass(slots=True)
class Forwards:
    """Give each forward of one layer a number, which goes into the seals of its messages.

    Ranks that run the same program get the same numbers. A forward that activation checkpointing recomputes gets
    another number (`next`).

    Attributes:
        count: the forwards so far, without recomputed ones.
        places: autograd's sequence number at each of the last forwards, ascending, by which a repeated one is found.
        again: the autograd node that recomputed the latest repeated forward, and how many it had recomputed before.
    """

    count: int = 0
    places: list[int] = field(default_factory=list)
    again: tuple[int, int] = (-1, 0)

    def next(self) -> int:
        """Return the number of the forward that starts.

        Inside a backward, the forward repeats an earlier one: the last that began before the running autograd node. Its
        number is then made from the earlier one's and from how many forwards this node has recomputed so far.
        """
        here, node = autograd_position()
        if node is None:
            self.count += 1
            self.places.append(here)
            del self.places[:-_MOST_FORWARDS]
            return 2 * self.count

        again = 0
        if self.again[0] == node:
            again = self.again[1] + 1
        self.again = (node, again)
        repeated = self.count - len(self.places) + bisect_right(self.places, node)
        return 2 * (repeated << 20 | again) + 1


@dataclass(eq=False)
class Link:
    """Send and receive rows for one rank of the process group that is passed as `end_of`.

    In its methods, `what` names the phase of a transfer, for seals and error messages. A link refers to the group
    weakly, so that it does not keep a destroyed group and its threads alive.

    Attributes:
        description, fingerprint: the current call as text (see `agree`), and as a hash.
        place: the current call in a few words, for error messages.
        calls: how many forwards and backwards of attention have begun. A rank that refuses one writes this number and
            the reason to the rendezvous store, so that others know which call it refused.
    """

    end_of: InitVar[ProcessGroup]
    traffic: Traffic = field(default_factory=Traffic)
    fingerprint: int = 0
    description: str = ""
    place: str = ""
    calls: int = 0
    _agreed: dict[int, bool] = field(default_factory=dict)  # by hash of a description: whether gradients are wanted
    _forwards: dict[str, Forwards] = field(default_factory=dict)  # by name of a layer or function
    _call: int = 0
    _compared_first: bool = False
    _collectives: int = 0
    _messages_to: Counter[int] = field(default_factory=Counter)
    _messages_from: Counter[int] = field(default_factory=Counter)
    _death: str | None = None
    _refused: str = ""  # number and reason of the latest call, if this rank refused it; others may wait for it
    _number: int = field(default_factory=lambda: secrets.randbits(62))
    _attempt: int = 0  # the greatest number of all ranks, once they have compared anything

    def __post_init__(self, end_of: ProcessGroup) -> None:
        self._group = weakref.ref(end_of)
        self.rank = dist.get_rank(end_of)
        self.size = dist.get_world_size(end_of)

    @property
    def group(self) -> ProcessGroup:
        group = self._group()
        if group is None:
            raise ContextParallelError(f"the process group of rank {self.rank} of {self.size} was destroyed")
        return group

    def require_alive(self) -> None:
        """Raise if the group has failed: its connections may hold rows of an older call."""
        if self._death is not None:
            raise ContextParallelError(
                f"this process group has failed and is not used again: {self._death}\n"
                "Destroy it, start the lost ranks again (torchrun does) and resume from a checkpoint"
            )

    def agree(self, description: str, problem: str | None, device: torch.device, wanted: bool | None = None) -> bool:
        """Compare a call's description between the ranks before any row moves (`compare`), and return whether some rank
        has wanted gradients in calls with this description.

        Each description is compared once. A refusal of a description that was compared before raises on this rank
        alone.

        Args:
            description: one `name=value` per line, `function` among them, for everything that must be equal so that
                the ranks' messages fit.
            problem: why this rank refuses its own call, if it does.
            wanted: whether this rank wants gradients of a call that can have them; compared in every such call until
                some rank does. None: not compared.
        """
        self.require_alive()
        if not self._compared_first:  # once per call, which may compare before it runs
            self.calls += 1
        self._compared_first = wanted is not None
        self.fingerprint = fingerprint(description)
        self.description = description

        agreed = self._agreed.get(self.fingerprint)
        if agreed is not None:
            if problem is not None:
                raise self._refusal(problem)
            if wanted is None or agreed:
                return agreed
        self.traffic.agreements += 1
        self._agreed[self.fingerprint] = self.compare(description, problem, device, bool(wanted))
        if len(self._agreed) > _MOST_AGREED:
            del self._agreed[next(iter(self._agreed))]
        return self._agreed[self.fingerprint]

    def compare(self, description: str, problem: str | None, device: torch.device, flag: bool = False) -> bool:
        """Return whether any rank's flag is set, after comparing the ranks' descriptions. If they differ, or if one
        rank refuses its call with a `problem`, every rank raises a ValueError that names these ranks and the reason.
        The texts are gathered only if they differ."""
        self.description = description
        text = description
        if problem is not None:
            text = f"refused={problem}"
        mine = fingerprint(text)
        words = torch.tensor([mine, -mine, self._number, int(flag)], device=device)
        texts = [text]
        with self.guard("while comparing arguments"):
            self.wait([dist.all_reduce(words, op=dist.ReduceOp.MAX, group=self.group, async_op=True)], collective=True)
            largest, smallest, self._attempt, any_flag = words.tolist()
            if largest != -smallest:
                texts *= self.size
                dist.all_gather_object(texts, text, group=self.group)
        if problem is not None or len(texts) > 1:
            raise ValueError(difference(texts))
        return bool(any_flag)

    def enter(self, name: str, number: int | None = None) -> int:
        """Begin a collective call that is not attention: put its name and number into the seals, return the number
        (see `begin`)."""
        self.fingerprint = fingerprint(name)
        self.description = f"function={name}"
        self.place = name
        return self.begin(name, number)

    def begin(self, name: str, number: int | None = None) -> int:
        """Begin a forward or backward: put the layer's or function's name and the number of the forward into the seals,
        and return the number. `number`: in a backward, the number that its forward got; default: a new one."""
        if number is None:
            number = self._forwards.setdefault(name, Forwards()).next()
        self._call = fingerprint(f"{number} {name}")
        return number

    def refuse(self, problem: str, device: torch.device) -> None:
        """Raise an error because this rank's call is impossible. In the group's first call, raise it on every rank.

        In later calls this rank alone raises it. Other ranks that wait for its rows raise an error that quotes
        `problem` (`wait`).
        """
        if self._agreed:
            self.require_alive()
            self.calls += 1
            raise self._refusal(problem)
        self.agree("", problem, device)

    def leave(self, problem: str) -> None:
        """Tell the other ranks that this one will not make its next call, because of an error of its own."""
        if self._death is None and not self._refused:
            self.calls += 1
            self._refusal(problem)

    def all_to_all(self, send: Tensor, sent: Framing, received: Framing, what: str) -> Transfer:
        """Start an exchange with every rank: send `send`, framed as `sent`; receive messages framed as `received`."""
        seal = self._next_collective(send, sent, what)
        buffer = self._blank(received, send)
        with self.guard(what):
            works = self.exchange(buffer, send, received, sent)
        return self.started(works, buffer, sent, received, seal, what)

    def all_gather(self, send: Tensor, sent: Framing, what: str) -> Transfer:
        """Start an all-gather: send one message, `send` framed as `sent`, and receive every rank's, this one included.

        All messages have the same number of rows, and are received in the order of the ranks.
        """
        everyone = Framing(tuple(range(self.size)), sent.counts * self.size, sent.seal)
        seal = self._next_collective(send, sent, what)
        buffer = self._blank(everyone, send)
        with self.guard(what):
            works = self.gather(buffer, send, sent)
        return self.started(works, buffer, everyone, everyone, seal, what)

    def moved(self, rows: Tensor, leaving: Sequence[int], arriving: Sequence[int], what: str) -> Tensor:
        """Send `leaving[j]` rows to each rank j, and return the rows that arrive, `arriving[j]` from each rank j.

        Sent and received rows are `(rows, ...)`, in the order of the ranks.
        """
        seal = seal_rows(rows.shape[1:].numel() * rows.element_size())
        sent = Framing.of(leaving, seal)
        received = Framing.of(arriving, seal)
        message = rows.new_empty(sent.rows, *rows.shape[1:])
        message[torch.from_numpy(sent.positions).to(rows.device)] = rows

        buffer = self.all_to_all(message, sent, received, what).wait()
        return buffer[torch.from_numpy(received.positions).to(rows.device)]

    def summed(self, rows: Tensor, bounds: Sequence[int], what: str) -> Tensor:
        """Return this rank's shard of the sum of all ranks' `rows`, the backward of `whole`; `bounds`: shard edges."""
        counts = [stop - start for start, stop in pairwise(bounds)]
        own = counts[self.rank]
        if not rows.shape[1:].numel():
            return rows.new_empty(own, *rows.shape[1:])
        copies = self.moved(rows, counts, [own] * self.size, what)
        return copies.view(self.size, own, *copies.shape[1:]).sum(0)

    def whole(self, rows: Tensor, bounds: Sequence[int], what: str) -> Tensor:
        """Return the whole sequence, made of the shards of all ranks, `(shard, ...)`; `bounds`: shard edges."""
        if not rows.shape[1:].numel():
            return rows.new_empty(bounds[-1], *rows.shape[1:])
        sizes = [stop - start for start, stop in pairwise(bounds)]
        framing = Framing((self.rank,), (max(sizes),), seal_rows(rows.shape[1:].numel() * rows.element_size()))
        message = rows.new_zeros(framing.rows, *rows.shape[1:])
        message[: len(rows)] = rows

        # As bytes: gloo has no int16, and writes the bytes of a bool as 0 or 1, the seal's too.
        found = self.all_gather(_bytes(message), framing, what).wait()
        found = found.view(rows.dtype).view(-1, *rows.shape[1:])
        return torch.cat([shard[:size] for shard, size in zip(found.split(framing.rows), sizes, strict=True)])

    def agreed_seed(self, seed: Tensor) -> Tensor:
        """Write the greatest of all ranks' seeds of dropout into `seed`, and return it."""
        with self.guard("while agreeing on the seed of dropout"):
            self.wait([dist.all_reduce(seed, op=dist.ReduceOp.MAX, group=self.group, async_op=True)], collective=True)
        return seed

    def swap(self, send: Tensor, sent: Framing, received: Framing, what: str, buffer: Tensor | None = None) -> Transfer:
        """Start a point-to-point exchange: send to at most one rank, and receive from at most one rank.

        `sent`, `received`: the framings of the two messages. `buffer`: where to receive; None: a new tensor.
        """
        self.require_alive()
        buffer = self._blank(received, send, buffer)
        phase = self._phase(what)
        operations = []
        for peer in sent.peers:
            self._messages_to[peer] += 1
            self._write_seals(send, sent, (phase, 2 * self._messages_to[peer] + 1))
            operations.append(dist.P2POp(dist.isend, send, group=self.group, group_peer=peer))

        seal = (phase, 1)  # odd also without a message to receive: `wait` waits for the sends only once
        for peer in received.peers:
            self._messages_from[peer] += 1
            seal = (phase, 2 * self._messages_from[peer] + 1)
            operations.append(dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=peer))

        with self.guard(what):
            works = self.post(operations) if operations else []
        return self.started(works, buffer, sent, received, seal, what)

    def exchange(self, buffer: Tensor, send: Tensor, received: Framing, sent: Framing) -> list[dist.Work]:
        """Start an all-to-all from `send` to `buffer`. A link for rehearsals replaces this, `gather` and `post`."""
        arriving = received.splits(self.size)
        leaving = sent.splits(self.size)
        return [dist.all_to_all_single(buffer, send, arriving, leaving, group=self.group, async_op=True)]

    def gather(self, buffer: Tensor, send: Tensor, sent: Framing) -> list[dist.Work]:
        return [dist.all_gather(list(buffer.split(sent.rows)), send, group=self.group, async_op=True)]

    def post(self, operations: list[dist.P2POp]) -> list[dist.Work]:
        return dist.batch_isend_irecv(operations)

    def wait(self, works: Sequence[dist.Work], collective: bool) -> None:
        """Wait for operations; raise an error if another rank reports that its exchange failed, or that it refuses the
        call, since it will send nothing more."""
        if dist.get_backend(self.group) == "gloo" and not collective:
            self._wait_once(works)
            return
        for work in works:
            self._wait_again(work)

    def _wait_again(self, work: dist.Work) -> None:
        while dist.get_backend(self.group) == "gloo" and not work.is_completed():
            try:
                work.wait(timedelta(seconds=_ROLL_CALL_SECONDS))
            except RuntimeError:
                if work.is_completed():
                    raise
                report = presence.within(_ROLL_CALL_SECONDS, self._report)
                if report:
                    raise RuntimeError(report) from None
        work.wait()

    def _wait_once(self, works: Sequence[dist.Work]) -> None:
        """Wait for point-to-point operations of gloo. One can be waited for only once: a timeout ends all connections.

        So this rank waits for as long as it takes, while another thread reads the reports (`_watch`). A rank that
        refuses a later call has sent what belongs to this one.
        """
        _start_watching()
        _waiting[self] = time.monotonic()
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            report = presence.within(_ROLL_CALL_SECONDS, partial(self._report, self.calls))
            raise RuntimeError(report or str(error)) from error
        finally:
            del _waiting[self]

    def stop_waiting(self) -> None:
        """Make the operations fail that this rank waits for, if another rank reports that they are in vain."""
        if not presence.within(_ROLL_CALL_SECONDS, partial(self._report, self.calls)):
            return
        for peer in range(self.size):
            if peer == self.rank:
                continue
            with suppress(RuntimeError):  # the connection to this peer has ended, or now all of them have
                late = self.group.recv([torch.empty(1)], peer, 1)  # which nobody sends
                late.wait(timedelta(milliseconds=1))

    def _report(self, last: float = math.inf) -> str:
        """Return why this rank waits in vain, as other ranks have written to the store; "" if it may not. `last`: the
        last call that they may refuse."""
        store = self._store()
        if store.check([_FAILED]):
            return "another rank reports that its exchange failed"
        if store.check([_REFUSED]) and self._refusals(store, range(self.size), ("away",), last):
            return "another rank reports that it refuses the call"
        return ""

    def received(self, transfer: Transfer) -> None:
        """Check the seals of received messages before any row is used; raise an error if one is wrong."""
        buffer = transfer.buffer
        expected = torch.tensor(transfer.seal, device=buffer.device)
        where = torch.from_numpy(transfer.framing.seals).to(buffer.device)
        sealed = _bytes(buffer)[where].flatten(1)[:, :_SEAL_BYTES]
        seals = sealed.flatten().view(torch.int64).view(-1, 2)  # (messages, 2): hash and number
        right = (seals == expected).all(1)
        if buffer.device.type == "cuda":
            # Reading the answer would stall the stream; the device traps instead, and no wrong result leaves it.
            require_when_run(right.all(), "rows that were received are not those of this call")
            return

        wrong = [message for message, good in enumerate(right.tolist()) if not good]
        if wrong:
            peers = ", ".join([str(transfer.framing.peers[message]) for message in wrong])
            reason = (
                f"the rows received from rank {peers} are not those of this call "
                f"(shorter than expected, or of another plan, layer, forward or phase: seal "
                f"{tuple(seals[wrong[0]].tolist())}, expected {transfer.seal}); every rank must make the same calls "
                "in the same order"
            )
            raise self._fail(transfer.what, reason + self._roll_call())

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Turn a failure of the group in the `with` block into an error that names rank, layer, plan and phase.

        Later calls on the group are refused.
        """
        self.require_alive()
        self._return()
        try:
            yield
        except RuntimeError as error:
            silent = self._roll_call()
            raise self._fail(what, f"{str(error).splitlines()[0]}{silent}") from error

    def _fail(self, what: str, reason: str) -> ContextParallelError:
        place = f" in {self.place}" if self.place else ""
        self._death = f"rank {self.rank} of {self.size}{place}, {what}: {reason}"
        return ContextParallelError(f"context parallel exchange failed on {self._death}")

    def _store(self) -> dist.Store:
        """Return this group's part of the rendezvous store. A restarted group of the same name gets another part."""
        return dist.PrefixStore(f"dilated_attention/{self.group.group_name}/{self._attempt}", rendezvous_store())

    def _refusal(self, problem: str) -> ValueError:
        """Write to the store why this rank refuses its current call, and return the error to raise."""
        self._refused = f"{self.calls} {problem}"
        presence.within(_ROLL_CALL_SECONDS, lambda: self._write_refusal("away"))
        return ValueError(problem)

    def _write_refusal(self, state: str) -> None:
        store = self._store()
        store.set(f"refusal/{self.rank}", f"{state} {self._refused}")
        store.set(_REFUSED, "")

    def _return(self) -> None:
        """Say that this rank, which has refused a call, makes another one."""
        if self._refused:
            presence.within(_ROLL_CALL_SECONDS, lambda: self._write_refusal("back"))
            self._refused = ""
            self.calls += 1  # so that ranks that have all refused a call do not wait in one of the same number

    def _roll_call(self) -> str:
        """Return, as text, what is known about a failure: from the function that `presence.set_witness` set, if any, or
        else from the store. "" if nothing is known."""
        if presence.witness:
            lost = presence.witness()
            return f"; {lost}" if lost else ""
        answer = presence.within(_ROLL_CALL_SECONDS + 0.5, self._ask_store)
        if answer is None:
            return "; the rendezvous store does not answer: its host is likely lost"
        return answer

    def _ask_store(self) -> str:
        """Report this failure in the store. Return, as text, how the calls of the ranks that report it differ, if they
        do; and the reasons of those that refused this call, or else which ranks do not report it."""
        store = self._store()
        store.set(str(self.rank), self.description)
        store.set(_FAILED, "")
        silent = presence.missing(store, [str(j) for j in range(self.size)], _ROLL_CALL_SECONDS)

        reporting = [j for j in range(self.size) if j not in silent]
        written = store.multi_get([str(j) for j in reporting])
        texts = [text.decode() for text in written]
        differing = ""
        if all(texts) and len(set(texts)) > 1:
            differing = f"; the ranks call with different arguments: {_differing(texts, reporting)}"

        refusals = self._refusals(store, silent)
        if silent and not refusals:
            refusals = f"; no word within {_ROLL_CALL_SECONDS:.0f} s from {presence.named(silent)}"
        return differing + refusals

    def _refusals(
        self, store: dist.Store, ranks: Iterable[int], states: Sequence[str] = ("away", "back"), last: float = math.inf
    ) -> str:
        """Return, as text, which of these ranks refuse this rank's current call or one after it up to `last`, and why.

        states: "away" of a rank that has made no call since; "back" of one that has.
        """
        found = ""
        for rank in ranks:
            if not store.check([f"refusal/{rank}"]):
                continue
            state, call, problem = store.get(f"refusal/{rank}").decode().split(" ", 2)
            if state in states and self.calls <= int(call) <= last:
                found += f"; rank {rank} refused the call: {problem}"
        return found

    def _write_seals(self, buffer: Tensor, framing: Framing, seal: tuple[int, int]) -> None:
        if framing.rows:
            rows = _bytes(buffer)
            padded = torch.zeros(framing.seal * rows.shape[1], dtype=torch.uint8, device=buffer.device)
            padded[:_SEAL_BYTES] = torch.tensor(seal, device=buffer.device).view(torch.uint8)
            rows[torch.from_numpy(framing.seals).to(buffer.device)] = padded.view(framing.seal, -1)

    def _next_collective(self, send: Tensor, sent: Framing, what: str) -> tuple[int, int]:
        """Write the next collective's seal (hash, number) into its messages, `send` framed as `sent`, and return it."""
        self.require_alive()
        self._collectives += 1
        seal = (self._phase(what), 2 * self._collectives)
        self._write_seals(send, sent, seal)
        return seal

    def _phase(self, what: str) -> int:
        """Return a hash of what all ranks have in common: the plan, the layer and forward, and the phase in which rows
        move."""
        return self.fingerprint ^ self._call ^ fingerprint(what)

    def _blank(self, received: Framing, like: Tensor, buffer: Tensor | None = None) -> Tensor:
        """Return a receive buffer whose seals are invalid, because fresh memory may hold the seals of an older call."""
        if buffer is None:
            buffer = like.new_empty(received.rows, *like.shape[1:])
        self._write_seals(buffer, received, (0, 0))
        return buffer

    def started(
        self, works: list[dist.Work], buffer: Tensor, sent: Framing, received: Framing, seal: tuple[int, int], what: str
    ) -> Transfer:
        """Return the `Transfer` of operations that have been started, and add it to the traffic counts."""
        row_bytes = buffer.shape[1:].numel() * buffer.element_size()
        out = sent.without(self.rank)
        into = received.without(self.rank)
        self.traffic.bytes_sent += row_bytes * out.rows
        self.traffic.bytes_received += row_bytes * into.rows
        self.traffic.messages_sent += len(out.peers)
        self.traffic.messages_received += len(into.peers)
        self.traffic.rounds += 1
        return Transfer(self, works, buffer, received, seal, what)


def _bytes(rows: Tensor) -> Tensor:
    """View rows `(rows, ...)` as bytes, `(rows, bytes)`."""
    return rows.unsqueeze(-1).flatten(1).view(torch.uint8)


@lru_cache(maxsize=1024)
def fingerprint(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def difference(texts: Sequence[str]) -> str:
    """Return, as text, which ranks refused and why; if none did, whose descriptions differ from the most frequent."""
    refusals = {rank: text[len("refused=") :] for rank, text in enumerate(texts) if text.startswith("refused=")}
    if len(refusals) == len(texts) and len(set(texts)) == 1:
        return refusals[0]
    if refusals:
        ranks = ", ".join(map(str, refusals))
        return f"rank {ranks} refused its context parallel call, before any data moved: {next(iter(refusals.values()))}"
    return (
        f"the ranks of the context parallel group call with different arguments: {_differing(texts)}. "
        "Every rank must pass the same pattern, lengths, dtype and options, in the same grad mode, "
        "and seq_len if shards differ in length"
    )


def _differing(texts: Sequence[str], ranks: Sequence[int] | None = None) -> str:
    """Return, as text, which ranks' descriptions differ, and in what: only in the function, if they call several."""
    facts = []
    for text in texts:
        facts.append(dict(line.split("=", 1) for line in text.splitlines()))
    functions = [{"function": each["function"]} for each in facts]
    if functions.count(functions[0]) < len(facts):
        facts = functions
    return presence.differences(facts, ranks)


_waiting: dict[Link, float] = {}
"""The links whose rank waits for point-to-point operations of gloo, and since when."""


@cache
def _start_watching() -> None:
    threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    """Look once a second after ranks that have waited for a second. (A thread per wait cost 0.3 ms.)"""
    while True:
        time.sleep(_ROLL_CALL_SECONDS)
        for link, since in list(_waiting.items()):
            if time.monotonic() - since > _ROLL_CALL_SECONDS:
                link.stop_waiting()


_links: weakref.WeakKeyDictionary[ProcessGroup, Link] = weakref.WeakKeyDictionary()


def link_of(group: ProcessGroup) -> Link:
    """Return this rank's link to a group; it is the same object as long as the group lives."""
    if group not in _links:
        _links[group] = Link(group)
    return _links[group]


def use_link(link: Link) -> None:
    """Make `link_of` return this link for its process group, instead of the usual one.

    Rehearsals and measurements install links that, for example, send nothing.
    """
    _links[link.group] = link
