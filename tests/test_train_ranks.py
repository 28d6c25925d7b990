"""`train` on several processes: the losses of one, checkpoints that any number of processes continues, lost ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import processes
from dilated_attention.models import LongNetLM
from dilated_attention.patterns import Dilated
from dilated_attention_lab.commands import main
from dilated_attention_lab.training import session
from dilated_attention_lab.training.loop import read_checkpoint
from dilated_attention_lab.training.ranks import Ranks
from dilated_attention_lab.training.watch import Watch

MODEL = {"embed_dim": 16, "num_layers": 2, "num_heads": 2, "pattern": Dilated((16, 65), (1, 4))}
RECIPE = {"context": 65, "batch_size": 2, "steps": 6, "warmup_steps": 2}


def write_text(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_bytes(bytes(i * i % 251 for i in range(5000)))
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path)


def ranks_of(context: int) -> Ranks | None:
    if not dist.is_initialized():
        return None
    mesh = init_device_mesh("cpu", (dist.get_world_size() // context, context), mesh_dim_names=("data", "context"))
    watch = Watch(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size(), timeout=60)
    ranks = Ranks(mesh, mesh["data", "context"]._flatten("data_context"), watch)
    dist.barrier()  # or a rank that is done leaves before its peers have connected
    return ranks


def train(text: Path, out: Path, context: int, resume: bool = False, killed_after: int | None = None) -> list[float]:
    """The losses of a run on this process's ranks, saved every other step; the last rank may be killed on the way."""
    torch.set_num_threads(1)
    begin = session.resume if resume else session.start
    training = begin([text], out, {} if resume else MODEL, {} if resume else RECIPE, ranks=ranks_of(context))
    while training.finished_steps < training.recipe.steps:
        if training.finished_steps == killed_after and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        training.step()
        if training.finished_steps % 2 == 0:
            session.save(training, out)
    return training.losses


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    out = tmp_path_factory.mktemp("alone")
    return train(write_text(out), out, 1)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A run on two ranks, one of which was killed in its sixth step; and the losses of a run that went through."""
    out = tmp_path_factory.mktemp("interrupted")
    whole, _ = processes.run(2, train, write_text(out), out / "whole", 2)
    survivor, killed = processes.World(2, train, write_text(out), out, 2, False, 5, timeout=5.0).outcomes(60)
    assert killed == ("died", -signal.SIGKILL)
    assert survivor[0] == "error"
    assert list(read_checkpoint(out / "checkpoint")[1].losses) == whole[:4]
    return out, whole


@pytest.mark.parametrize(("size", "context"), [pytest.param(2, 1, marks=pytest.mark.thorough), (3, 3), (4, 2)])
def test_several_processes_have_the_losses_of_one(
    text: Path, tmp_path: Path, alone: list[float], size: int, context: int
) -> None:
    if size == 3:  # the batch is whole, the sequence uneven
        assert RECIPE["context"] % 3
    for losses in processes.run(size, train, text, tmp_path / "run", context):
        assert losses == pytest.approx(alone, rel=1e-5)


def test_a_run_killed_on_one_rank_resumes_to_the_same_losses(interrupted: tuple[Path, list[float]], tmp_path) -> None:
    out, whole = interrupted
    shutil.copytree(out, tmp_path / "run")
    assert processes.run(2, train, out / "text.txt", tmp_path / "run", 2, True) == [whole, whole]


@pytest.mark.parametrize(("size", "context"), [(1, 1), (4, 2)])
def test_a_checkpoint_continues_at_another_number_of_ranks(
    interrupted: tuple[Path, list[float]], tmp_path: Path, size: int, context: int
) -> None:
    (out, whole), run = interrupted, tmp_path / "run"
    shutil.copytree(out, run)
    arguments = out / "text.txt", run, context, True
    for losses in [train(*arguments)] if size == 1 else processes.run(size, train, *arguments):
        assert losses[:4] == whole[:4]
        assert losses == pytest.approx(whole, rel=1e-5)
    assert len(list((run / "checkpoint" / "step-6").glob(f"rank-*-of-{size}.safetensors"))) == size


def test_one_process_s_checkpoint_continues_on_several(text: Path, tmp_path: Path, alone: list[float]) -> None:
    training = session.start([text], tmp_path / "run", MODEL, RECIPE)
    training.step()
    session.save(training, tmp_path / "run")
    for losses in processes.run(2, train, text, tmp_path / "run", 2, True):
        assert losses == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_command_under_torchrun(torchrun: bool, text: Path, tmp_path: Path) -> None:
    """The ranks as torchrun starts them, and under torchrun, which imports PyTorch three times."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "dilated_attention", "train"]
    small = {"context": 65, "steps": 2, "layers": 1, "dim": 16, "heads": 2, "sample": 4, "held-out": 1}
    small |= {"out": tmp_path / "run", "context-parallel": 2}
    options = [str(text), *(word for name, value in small.items() for word in (f"--{name}", str(value)))]
    if torchrun:
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("bits per byte (8") == 1  # one rank reports
    else:
        ended = processes.Commands(tmp_path, [["train", *options]] * 2).ends(100, range(2))
        assert [code for code, _ in ended] == [0, 0], ended
    losses = read_checkpoint(tmp_path / "run" / "checkpoint")[1].losses
    row = json.loads((tmp_path / "run" / "figures.jsonl").read_text())
    assert row["ranks"] == {"data": 1, "context": 2}

    small |= {"out": tmp_path / "alone", "context-parallel": 1}
    assert (
        main(["train", str(text), *(word for name, value in small.items() for word in (f"--{name}", str(value)))]) == 0
    )
    assert losses == pytest.approx(read_checkpoint(tmp_path / "alone" / "checkpoint")[1].losses, rel=1e-5)
    right = json.loads((tmp_path / "alone" / "figures.jsonl").read_text())
    assert row["held_out_bits_per_byte"] == pytest.approx(right["held_out_bits_per_byte"], rel=1e-5)
    found, wanted = (LongNetLM.from_pretrained(tmp_path / name / "model") for name in ("run", "alone"))
    for mine, theirs in zip(found.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_a_number_of_processes_that_does_not_divide_is_bad_input(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(text), "--out", str(tmp_path / "run"), "--context-parallel", "2"]) == 2
    error = capsys.readouterr().err
    assert "--context-parallel 2 must divide the number of processes, 1; run under torchrun" in error
    assert len(error.splitlines()) == 1


def uneven_batch(text: Path, out: Path) -> str:
    with pytest.raises(ValueError, match="batch_size") as raised:
        session.start([text], out, MODEL, RECIPE | {"batch_size": 3}, ranks=ranks_of(1))
    dist.barrier()  # the first rank hosts the store, which the other may still be asking
    return str(raised.value)


def test_a_batch_that_the_ranks_cannot_share_is_bad_input(text: Path, tmp_path: Path) -> None:
    for message in processes.run(2, uneven_batch, text, tmp_path / "run"):
        assert "batch_size=3: must be a multiple of the 2 ranks" in message
    assert not (tmp_path / "run").exists()
