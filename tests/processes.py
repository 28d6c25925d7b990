"""Worlds of real processes for tests: forked from a server that has imported PyTorch once, so that a world starts
fast."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "pytest",
        "torch._dynamo",
        "dilated_attention.integrations.huggingface",
        "dilated_attention_lab.commands.train",
        "dilated_attention_lab.training.session",
        "dilated_attention_lab.training.ranks",
    ]
)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _enter(rank: int, size: int, port: int, timeout: float, function: Callable, arguments: tuple, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    dist.barrier()  # or a rank that is done leaves before its peers have connected
    try:
        pipe.send(("result", function(*arguments)))
    except Exception:
        pipe.send(("error", traceback.format_exc()))
    pipe.close()
    # Without the collective goodbye of destroy_process_group: peers may be dead.
    os._exit(0)


class World:
    """`size` gloo processes that each run `function(*arguments)`."""

    def __init__(self, size: int, function: Callable, *arguments: Any, timeout: float = 60.0) -> None:
        port = free_port()
        self.pipes, self.processes = [], []
        for rank in range(size):
            receiver, sender = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_enter, args=(rank, size, port, timeout, function, arguments, sender), daemon=True
            )
            process.start()
            sender.close()
            self.pipes.append(receiver)
            self.processes.append(process)

    def outcomes(self, within: float, ranks: Sequence[int] | None = None) -> list[tuple[str, Any]]:
        """Each rank's ("result", value), ("error", traceback), ("died", exit code) or ("silent", None).

        Waits for `ranks`, by default all, then kills every process.
        """
        answers: list[tuple[str, Any]] = [("silent", None)] * len(self.pipes)
        open_ = {pipe: rank for rank, pipe in enumerate(self.pipes) if ranks is None or rank in ranks}
        deadline = time.monotonic() + within
        while open_ and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(open_), timeout=left):
                rank = open_.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    self.processes[rank].join(5)
                    answers[rank] = ("died", self.processes[rank].exitcode)
        for process in self.processes:
            process.kill()
            process.join()
        return answers


def run(size: int, function: Callable, *arguments: Any, within: float = 120.0) -> list[Any]:
    """Return the results of `function(*arguments)` in `size` processes.

    Raises AssertionError with the tracebacks if one fails.
    """
    answers = World(size, function, *arguments).outcomes(within)
    failed = [f"rank {rank} {kind}: {value}" for rank, (kind, value) in enumerate(answers) if kind != "result"]
    assert not failed, "\n".join(failed)
    return [value for _, value in answers]


def _command(environment: dict[str, object], words: list[str], errors: str, before: Callable[[], None] | None) -> None:
    from dilated_attention_lab.commands import main

    os.environ |= {name: str(value) for name, value in environment.items()}
    torch.set_num_threads(1)
    with open(errors, "w") as file, open(os.devnull, "w") as nowhere:
        os.dup2(file.fileno(), 2)
        os.dup2(nowhere.fileno(), 1)
    sys.stderr, sys.stdout = (os.fdopen(number, "w", buffering=1) for number in (2, 1))
    if before is not None:
        before()
    code = main(words)
    sys.stderr.flush()
    os._exit(code)


class Commands:
    """The command of each rank, as torchrun starts it, without its agent.

    Args:
        words: of each rank; None: it never comes.
        before: what a rank calls first, to prepare a fault.
        store: the port of a store that outlives the ranks, as torchrun's store does; None: rank 0 hosts one.
    """

    def __init__(
        self,
        folder: Path,
        words: Sequence[list[str] | None],
        before: Mapping[int, Callable[[], None]] | None = None,
        store: int | None = None,
    ) -> None:
        port, size = store or free_port(), len(words)
        self.errors = [folder / f"stderr-{rank}" for rank in range(size)]
        self.processes = {}
        for rank, given in enumerate(words):
            if given is None:
                continue
            environment = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment["TORCHELASTIC_USE_AGENT_STORE"] = store is not None
            arguments = environment, given, str(self.errors[rank]), (before or {}).get(rank)
            self.processes[rank] = _CONTEXT.Process(target=_command, args=arguments, daemon=True)
            self.processes[rank].start()

    def ends(self, within: float, ranks: Sequence[int]) -> list[tuple[int | None, list[str]]]:
        """Exit code and lines on stderr of each of `ranks`; then every process is killed."""
        deadline = time.monotonic() + within
        for rank in ranks:
            self.processes[rank].join(max(0.0, deadline - time.monotonic()))
        found = [(self.processes[rank].exitcode, self.errors[rank].read_text().splitlines()) for rank in ranks]
        for process in self.processes.values():
            process.kill()
            process.join()
        return found
