"""SIGKILL at random moments of the saves of real processes: minutes, and not in `make test`.

A run that saves after every step is killed again and again while it saves, one rank a little before the others, and
resumed each time. Its losses are those of a run that nothing interrupted.
"""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from pathlib import Path

import pytest

import processes
from dilated_attention_lab.training import session
from dilated_attention_lab.training.loop import read_checkpoint
from test_train_ranks import MODEL, RECIPE, ranks_of, write_text

KILLS = 50
STEPS = 2 * KILLS  # a kill before the new checkpoint has its name loses one step


def train(text: Path, out: Path, resume: bool, saving: Path | None) -> list[float]:
    """Train to the end, saving after each step; `saving` is there from the beginning of a save to its end."""
    recipe = {**RECIPE, "steps": STEPS, "batch_size": 6}
    begin = session.resume if resume else session.start
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a kill must leave no damaged checkpoint under a step's name
        training = begin([text], out, {} if resume else MODEL, {} if resume else recipe, ranks=ranks_of(1))
    while training.finished_steps < STEPS:
        training.step()
        if saving:
            saving.touch()
        session.save(training, out)
        if saving:
            saving.unlink(missing_ok=True)
    return training.losses


@pytest.mark.parametrize("size", [2, 3])
def test_killed_while_saving(size: int, tmp_path: Path) -> None:
    text, out, saving = write_text(tmp_path), tmp_path / "run", tmp_path / "saving"
    whole = processes.run(size, train, text, tmp_path / "whole", False, None, within=600)[0]
    training = processes.World(size, train, text, out, False, saving)
    moments, during, longest = random.Random(size), 0, 0.05
    for kill in range(KILLS):
        wait_for(saving, True, training)
        wait_for(saving, False, training)  # of the second save, so that each life makes a step
        begin = wait_for(saving, True, training)
        time.sleep(moments.uniform(0, longest))
        first = moments.randrange(size)
        during += saving.exists()
        for rank in (first, *(other for other in range(size) if other != first)):
            os.kill(training.processes[rank].pid, signal.SIGKILL)
            time.sleep(moments.choice([0.0, 0.002]))
        training.outcomes(0)
        saving.unlink(missing_ok=True)
        found = read_checkpoint(out / "checkpoint")[1].losses
        assert found == pytest.approx(whole[: len(found)], rel=1e-6), kill
        print(f"{size} ranks, kill {kill + 1}: resumed from step {len(found)}, {time.monotonic() - begin:.2f} s")
        training = processes.World(size, train, text, out, True, saving)
    outcomes = training.outcomes(600)
    assert [kind for kind, _ in outcomes] == ["result"] * size, outcomes
    for _, losses in outcomes:
        assert losses == pytest.approx(whole, rel=1e-6)
    print(f"{size} ranks: {during} of {KILLS} kills during a save; losses equal to the last bit: {losses == whole}")


def wait_for(path: Path, there: bool, world: processes.World) -> float:
    end = time.monotonic() + 60
    while path.exists() != there:
        assert time.monotonic() < end
        assert all(process.is_alive() for process in world.processes), world.outcomes(5)
    return time.monotonic()
