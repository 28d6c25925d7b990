"""`train` on several processes, one of which is killed, frozen, absent or started differently: every other one says so
in one line, in time."""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import processes
from dilated_attention.parallel import presence
from dilated_attention_lab.training.ranks import Ranks

SMALL = {"context": 65, "steps": 50, "layers": 1, "dim": 16, "heads": 2, "batch": 3, "sample": 4, "held-out": 1}
TIMEOUT = 4


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(i * i % 251 for i in range(5000)))
    return path


def words(text: Path, **changes: object) -> list[str]:
    options = SMALL | {"out": text.parent / "run", "timeout": TIMEOUT, "save-every": 2} | changes
    return ["train", str(text), *(word for name, value in options.items() for word in (f"--{name}", str(value)))]


def test_missing_keys_of_many_are_found_in_few_questions() -> None:
    class Counting(dist.HashStore):
        asked = 0

        def check(self, keys: list[str]) -> bool:
            self.asked += 1
            return super().check(keys)

    store, keys = Counting(), [str(rank) for rank in range(1000)]
    for rank, key in enumerate(keys):
        if rank not in (17, 998):
            store.set(key, "here")
    assert presence.missing(store, keys, 0.0) == [17, 998]
    assert store.asked < 50
    assert presence.named(range(20)) == f"rank {', '.join(map(str, range(16)))} and 4 more"


def signal_in_step(number: int, step: int) -> None:
    """Let this process send itself a signal in the middle of a step."""
    mean = Ranks.mean

    def interrupted(ranks: Ranks, *values: float) -> list[float]:
        if ranks.watch.place == f"step {step}":
            os.kill(os.getpid(), number)
        return mean(ranks, *values)

    Ranks.mean = interrupted


@pytest.mark.parametrize(
    ("fault", "culprit"),
    [("SIGKILL", 1), *(pytest.param(*x, marks=pytest.mark.thorough) for x in [("SIGSTOP", 1), ("SIGKILL", 0)])],
)
def test_a_lost_rank_is_named(fault: str, culprit: int, text: Path) -> None:
    before = {culprit: functools.partial(signal_in_step, getattr(signal, fault), 4)}
    commands = processes.Commands(text.parent, [words(text)] * 3, before)
    others = [rank for rank in range(3) if rank != culprit]
    for rank, (code, lines) in zip(others, commands.ends(60, others), strict=True):
        assert code == 1, lines
        if culprit == 0:  # with it the store is gone, of which PyTorch's C++ warns at length
            lines = [line for line in lines if line.startswith("dilated-attention")]
        assert len(lines) == 1, lines
        assert f"rank {rank} of 3, step 4: lost rank {culprit}" in lines[0]
        assert f"--resume continues {text.parent / 'run'}" in lines[0]


@pytest.mark.thorough
def test_a_lost_rank_is_named_soon_after_sigterm_though_the_others_hang(text: Path) -> None:
    """torchrun sends SIGTERM when a rank has died, and SIGKILL 30 s later: no time for the timeout."""
    before = {1: functools.partial(signal_in_step, signal.SIGSTOP, 2)}
    commands = processes.Commands(text.parent, [words(text, timeout=300)] * 3, before)
    state = Path(f"/proc/{commands.processes[1].pid}/stat")
    while state.read_text().split()[2] != "T":
        time.sleep(0.05)
    for rank in (0, 2):
        commands.processes[rank].terminate()
    for code, lines in commands.ends(60, [0, 2]):
        assert code == 1, lines
        assert len(lines) == 1, lines
        assert "step 2: lost rank 1" in lines[0]


def test_all_ranks_start_again_with_the_store_of_those_that_were_lost(text: Path) -> None:
    """torchrun --max-restarts does this: everything that the first ranks wrote, a verdict among it, is still there."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = {1: functools.partial(signal_in_step, signal.SIGKILL, 4)}
    few = words(text, steps=6)
    lost = processes.Commands(text.parent, [few] * 3, before, store.port).ends(60, range(3))
    assert [code for code, _ in lost] == [1, -signal.SIGKILL, 1], lost
    again = processes.Commands(text.parent, [[*few, "--resume"]] * 3, store=store.port).ends(60, range(3))
    assert [code for code, _ in again] == [0, 0, 0], again


def test_a_rank_that_never_comes_is_named(text: Path) -> None:
    commands = processes.Commands(text.parent, [words(text), words(text), None])
    for rank, (code, lines) in enumerate(commands.ends(60, [0, 1])):
        assert code == 1, lines
        assert len(lines) == 1, lines
        assert f"rank {rank} of 3: rank 2 never came, within {TIMEOUT} s" in lines[0]
        assert "nothing is saved in" in lines[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lr": 1e-4}, "rank 1 has --lr 0.0001, elsewhere --lr 0.003"),
        ({"layers": 2, "seed": 3}, "rank 1 has --layers 2, elsewhere --layers 1; --seed 3, elsewhere --seed 0"),
        ({"context-parallel": 3}, "rank 1 has --context-parallel 3, elsewhere --context-parallel 1"),
        ({"dim": 15}, "rank 1 refused to begin: --dim 15"),
    ],
)
def test_ranks_that_are_started_differently_are_named(changes: dict[str, object], said: str, text: Path) -> None:
    commands = processes.Commands(text.parent, [words(text), words(text, **changes), words(text)])
    for rank, (code, lines) in enumerate(commands.ends(60, range(3))):
        assert code == 2, lines
        assert len(lines) == 1, lines
        assert said in lines[0] or (rank == 1 and said.rpartition(": ")[2] in lines[0])
    assert not (text.parent / "run").exists()
