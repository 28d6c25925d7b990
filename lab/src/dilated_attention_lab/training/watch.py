"""Watch the ranks of a training run: find out which joined, which differ and which went silent."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from dilated_attention.plumbing import ContextParallelError, presence

BEAT_SECONDS: Final = 0.5
GRACE_SECONDS: Final = 3.0  # six beats: a rank that writes no beat for this long, after a failure, is lost
_ENDED: Final = "ended"


class Watch:
    """Watch all ranks of a run from one process, from before they form a group until it leaves.

    A thread writes a beat twice per second and reads only the next rank's beat, so that the store's work grows linearly
    with the number of ranks. It names a rank that is silent for `timeout` seconds (at least six), even while the main
    thread of this process hangs in a collective of gloo or NCCL. After SIGTERM, which torchrun sends to the others when
    a rank has died, it names the rank within seconds. The first rank that finds out writes it to the store for all.

    Args:
        store: the rendezvous store of all ranks.
        host: who hosts the store, for the error when it does not answer.
        timeout: seconds after which a silent rank is lost.

    Attributes:
        place: where this process is, for errors.
        store: after `gather`, a part of the store for this attempt only. torchrun restarts all ranks with the same
            store, which still holds what earlier attempts wrote.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float, host: str = "rank 0") -> None:
        self.rank, self.size, self.timeout, self.place = rank, size, timeout, ""
        self.store = store
        # A connection of its own: a call that waits holds up all others on its connection.
        self._door = self._store = dist.PrefixStore("dilated_attention", store.clone())  # type: ignore[attr-defined]
        self._keys = [f"beat/{each}" for each in range(size)]
        self._host, self._beats, self._rounds = host, 0, 0
        self._hosts = host == f"rank {rank}"
        self._verdict, self._lost = "", 0
        self._judging, self._ending, self._left = threading.Lock(), threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._wakeup: tuple[int, int] | None = None

    @classmethod
    def join(cls, timeout: float) -> Watch:
        """Return this process's watch, from torchrun's environment variables. Raises if the store does not answer."""
        wanted = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if absent := [name for name in wanted if name not in os.environ]:
            raise ValueError(f"the environment lacks {', '.join(absent)}; run under torchrun")
        rank, size, address, port = (os.environ[name] for name in wanted)
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        host = "torchrun on the first machine" if agent else "rank 0"
        try:
            store = dist.TCPStore(
                address,
                int(port),
                is_master=not agent and rank == "0",
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
            )
        except dist.DistError as error:
            raise ContextParallelError(
                f"rank {rank} of {size}: no rendezvous store at {address}:{port} within {timeout} s; "
                f"its host, {host}, never came"
            ) from error
        return cls(store, int(rank), int(size), timeout, host)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}{', ' if self.place else ''}{self.place}"

    def gather(self) -> None:
        """Wait for all ranks. Raises a ContextParallelError that names those that do not come within the timeout."""
        self._listen()
        # The store gives no number twice, so rank 0 of this attempt alone can have written under this one's.
        deadline, mine = time.monotonic() + self.timeout, self._door.add("arrivals", 1)
        if self.rank:
            self._wait(deadline, lambda: presence.missing(self._door, [f"attempt/{mine}"], 1.0))
            attempt = self._door.get(f"attempt/{mine}").decode()
        else:
            attempt = uuid.uuid4().hex
        self.store = dist.PrefixStore(f"dilated_attention/{attempt}", self.store)
        self._store = dist.PrefixStore(f"{attempt}/watch", self._door)
        self._beat()
        admitted = 0

        def absent() -> list[int]:
            nonlocal admitted
            if self.rank:
                return presence.missing(self._store, self._keys, 1.0)
            for number in range(admitted, arrivals := self._door.add("arrivals", 0)):
                self._door.set(f"attempt/{number + 1}", attempt)
            admitted = arrivals
            return presence.missing(self._store, self._keys, 0.1)

        self._wait(deadline, absent)

    def _wait(self, deadline: float, absent: Callable[[], list[int]]) -> None:
        hurry = False
        while ranks := absent():
            hurry |= self._terminated()
            if hurry or time.monotonic() >= deadline:
                self._lost = len(ranks)
                why = "and SIGTERM came" if hurry else f"within {self.timeout} s"
                raise ContextParallelError(f"{self}: {presence.named(ranks)} never came, {why}")

    def start(self, on_lost: Callable[[str], object]) -> None:
        """Start the thread that beats and watches. If a rank is lost, it calls `on_lost` with the line to print.

        `on_lost` must end the process.
        """
        self._thread = threading.Thread(target=self._run, args=(on_lost,), daemon=True)
        self._thread.start()
        presence.set_witness(self.verdict)

    def agree(self, facts: Mapping[str, object]) -> None:
        """Raise a ValueError on every rank if the ranks' facts differ, or if a rank left with a problem instead. The
        message names these ranks."""
        text = json.dumps({name: str(value) for name, value in facts.items()})
        found = self._exchange(text)
        refused = [(rank, each["refused"]) for rank, each in enumerate(found) if "refused" in each]
        if refused:
            raise ValueError(f"{presence.named([rank for rank, _ in refused])} refused to begin: {refused[0][1]}")
        if any(each != found[0] for each in found):
            raise ValueError(f"the ranks were started differently: {presence.differences(found)}")

    def _exchange(self, text: str) -> list[dict[str, str]]:
        """Publish this rank's text, which is JSON, and return every rank's text of this call, parsed, in the order of
        ranks. Ranks publish a digest too, so that each different text is read only once."""
        here, self._rounds = f"facts/{self._rounds}", self._rounds + 1
        self._publish(here, text)
        keys = [f"{here}/digest/{rank}" for rank in range(self.size)]
        while presence.missing(self._store, keys, 1.0):
            pass  # the thread ends the process if a rank is lost meanwhile
        digests = self._store.multi_get(keys)
        known = {digest: json.loads(self._store.get(f"{here}/{digest.decode()}")) for digest in set(digests)}
        return [known[digest] for digest in digests]

    def _publish(self, here: str, text: str) -> None:
        digest = hashlib.sha256(text.encode()).hexdigest()
        self._store.set(f"{here}/{digest}", text)
        self._store.set(f"{here}/digest/{self.rank}", digest)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Turn a RuntimeError in the `with` block into a ContextParallelError that names `place` and the lost ranks.
        If none is lost, errors of PyTorch's distributed package and of gloo are turned too; others stay as they are.
        Enter it only once."""
        try:
            yield
        except RuntimeError as error:
            if not self._ending.acquire(blocking=False):
                threading.Event().wait()  # the thread has noticed, too, and is about to end the process
            reason = str(error).splitlines()[0]
            if verdict := self.verdict():
                raise ContextParallelError(f"{self}: {verdict}") from error
            if isinstance(error, (ContextParallelError, dist.DistError)) or "gloo" in reason:
                raise ContextParallelError(f"{self}: {reason}; yet every rank shows signs of life") from error
            raise

    def verdict(self) -> str:
        """Return a sentence naming the ranks that are lost or left with a problem, or an empty string.

        Call it after a failure.
        """
        with self._judging:
            if not self._verdict:
                silence = f"lost {self._host}: it hosts the rendezvous store, which does not answer", self._lost
                self._verdict, self._lost = presence.within(GRACE_SECONDS + 2.0, self._judge) or silence
            return self._verdict

    def leave(self, problem: str | None = None) -> None:
        """Stop watching. With a problem, pass it to the other ranks and wait until they leave with one, too: torchrun
        ends all processes as soon as one has failed, and each should first print why. Rank 0, if it hosts the store,
        also waits until all others are gone. No wait is longer than GRACE_SECONDS + 2."""
        presence.set_witness(None)
        self._left.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * BEAT_SECONDS)
        self._stop_listening()

        def tell() -> None:
            self._store.set(self._keys[self.rank], _ENDED if problem is None else f"{_ENDED}: {problem}")
            if problem is not None:
                self._publish(f"facts/{self._rounds}", json.dumps({"refused": problem}))
                self._store.add("ended", 1)
                self._count("ended", self.size - self._lost)
            self._store.add("gone", 1)
            if self._hosts:  # the store ends with this process: not before the others have asked their last question
                self._count("gone", self.size - self._lost)

        presence.within(GRACE_SECONDS + 2.0, tell)

    def _count(self, what: str, ranks: int) -> None:
        while self._store.add(what, 0) < ranks:
            time.sleep(0.02)

    def _run(self, on_lost: Callable[[str], object]) -> None:
        neighbour, seen, silent = (self.rank + 1) % self.size, b"", 0
        limit = max(GRACE_SECONDS, self.timeout - GRACE_SECONDS)  # the verdict takes the time of grace once more
        # Silence is counted in beats of this process: what stops it, too, counts against nobody.
        while not self._left.wait(BEAT_SECONDS):
            silent += 1
            lost = False
            try:
                self._beat()
                beat = self._store.get(self._keys[neighbour])
                lost = self._store.check(["verdict"])
            except RuntimeError:
                beat = seen  # the store is silent
            if beat.startswith(_ENDED.encode()):
                neighbour = (neighbour + 1) % self.size
            if beat != seen:
                seen, silent = beat, 0
            if self._terminated():
                limit = min(limit, GRACE_SECONDS)
            if lost or silent * BEAT_SECONDS >= limit:
                verdict, silent = self.verdict(), 0
                if verdict and not self._left.is_set() and self._ending.acquire(blocking=False):
                    on_lost(f"{self}: {verdict}")

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(self._keys[self.rank], str(self._beats))

    def _judge(self) -> tuple[str, int]:
        """Return the verdict, "" if there is none, and the number of silent ranks. The verdict is what another rank has
        written, or names the ranks that write no beat within `GRACE_SECONDS` and those that left with a problem."""
        before, deadline = self._store.multi_get(self._keys), time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and not self._store.check(["verdict"]):
            self._beat()
            time.sleep(BEAT_SECONDS / 2)
        now = self._store.multi_get(self._keys)
        ended = {rank: beat for rank, beat in enumerate(now) if beat.startswith(_ENDED.encode())}
        silent = [rank for rank in range(self.size) if before[rank] == now[rank] and rank not in ended]
        failed = [f"rank {rank} {beat.decode()}" for rank, beat in ended.items() if beat != _ENDED.encode()]
        if silent:
            failed.insert(0, f"lost {presence.named(silent)}: no sign of life for {GRACE_SECONDS:.0f} s or more")
        if failed:
            self._store.compare_set("verdict", "", json.dumps(["; ".join(failed[: presence.NAMED]), len(silent)]))
        if not self._store.check(["verdict"]):
            return "", 0
        verdict, lost = json.loads(self._store.get("verdict"))
        return verdict, lost

    def _listen(self) -> None:
        """Make a pipe to which Python writes the number of each signal that it handles, for `_terminated` to read: the
        main thread may hang and run no signal handlers. If called in any other thread, do nothing."""
        if threading.current_thread() is threading.main_thread():
            self._wakeup = os.pipe()
            for end in self._wakeup:
                os.set_blocking(end, False)
            signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)

    def _terminated(self) -> bool:
        """Return whether SIGTERM has come since the last call."""
        try:
            return self._wakeup is not None and signal.SIGTERM in os.read(self._wakeup[0], 4096)
        except BlockingIOError:
            return False

    def _stop_listening(self) -> None:
        if self._wakeup is not None and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
            for end in self._wakeup:
                os.close(end)
            self._wakeup = None
