"""The examples run, learn something in few steps, and have their line in examples/README.md."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import processes
from dilated_attention import Dilated
from dilated_attention.models import LongNetConfig, LongNetLM

FOLDER = Path(__file__).parents[1] / "examples"
FILES = sorted(FOLDER.glob("*.py"))


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Threads of gloo that outlive their group abort a process now and then, when Python ends before they do.
THEN_NO_GLOO = """
import gc, pathlib, runpy, sys
runpy.run_path(sys.argv[1], run_name="__main__")
gc.collect()
names = [file.read_text().strip() for file in pathlib.Path("/proc/self/task").glob("*/comm")]
sys.exit(f"left behind: {names}" if any("gloo" in name for name in names) else 0)
"""


# FSDP2 and DeepSpeed keep their groups to the end, so that a process ends here without Python's own end.
THEN_NO_END = """
import os, runpy, sys
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
os._exit(0)
"""


# A group that DDP's reducer lets go of last is destroyed under the GIL, for which gloo's thread may be waiting: a hang.
NO_REDUCER_AT_THE_END = """
import gc, sys
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

destroy = dist.destroy_process_group

def checked(*arguments):
    gc.collect()
    if any(isinstance(thing, DistributedDataParallel) for thing in gc.get_objects()):
        sys.exit("a DistributedDataParallel outlives its group")
    destroy(*arguments)

dist.destroy_process_group = checked
"""


# DeepSpeed compiles a reduction of its own when it starts, half a minute of a compiler, that only inference uses.
NO_COMPILER = """
import deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
"""


def torchrun(ranks: int, *program: str | Path) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_long_bert():
    found = load("long_bert").main(steps=30)
    assert found["fine-tuned at 512 bytes, dilated"] > found["untrained"] + 0.05


def test_slides():
    found = load("slides").main(steps=4)
    assert found["largest difference of a slide in a batch to the slide alone"] <= 1e-5


def test_neighborhood_segmentation(tmp_path):
    picture = tmp_path / "found.png"
    losses, share = load("neighborhood_segmentation").main(steps=12, batch=2, picture=str(picture))
    assert losses[-1] < losses[0]
    assert 0 < share < 1
    assert picture.stat().st_size > 10_000


def test_slide_alibi():
    found = load("slide_alibi").main(tiles=300, more=400)
    assert found["300 tiles"]["largest difference"] <= 1e-5


def test_byte_lm():
    losses, sample = load("byte_lm").main(steps=10, prompt="import ")
    assert losses["trained"] < losses["untrained"] - 1
    assert sample.startswith("import ")
    assert len(sample.encode()) > 30


def test_train_indexer():
    found = load("train_indexer").main(steps=24, layers=1)
    assert found["attention held after the warm-up"] > found["attention held by untrained indexers"]
    assert found["bits per byte, trained on over the chosen keys"] < found["bits per byte, dense"] - 0.1


def test_gemma3_long_prompt():
    """Uses random weights, because Gemma's own have to be downloaded."""
    config = Gemma3TextConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, vocab_size=97, sliding_window=32, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    found = load("gemma3_long_prompt").main(Gemma3ForCausalLM(config).eval(), torch.randint(97, (1, 600)))
    assert found["largest difference of a logit"] < 1e-5
    assert found["nats per token, chosen blocks"] != found["nats per token"]


def test_context_parallel(tmp_path):
    (tmp_path / "run.py").write_text(THEN_NO_GLOO)
    text = torchrun(2, tmp_path / "run.py", FOLDER / "context_parallel.py")
    errors = re.findall(r"largest difference (\S+)", text)
    assert len(errors) == 2
    assert max(map(float, errors)) < 1e-5
    assert "transport" in text
    assert len(re.findall(r"step \d: \d", text)) == 3


def printed(example: str, port: int) -> str:
    """Return what this rank of a world prints as a rank of an example, whose group is the only one and leaves no thread
    of gloo behind."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        runpy.run_path(str(FOLDER / f"{example}.py"), run_name="__main__")
    gc.collect()
    names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    assert not any("gloo" in name for name in names), f"left behind: {names}"
    return text.getvalue()


def test_transformers_context():
    """Two ranks print the losses of one."""
    losses = []
    for ranks in (1, 2):
        text, *others = processes.run(ranks, printed, "transformers_context", processes.free_port())
        assert not any(others)  # rank 0 prints
        losses.append([float(x) for x in re.findall(r"step \d: (\S+) nats", text)])
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], abs=2e-4)
    assert losses[0][2] < losses[0][0]
    assert "2 layers of Window(before=127" in text


@pytest.mark.thorough
@pytest.mark.parametrize("context", ["1", "2"])
def test_context_parallel_fsdp2(context, tmp_path):
    (tmp_path / "run.py").write_text(THEN_NO_END)
    text = torchrun(2, tmp_path / "run.py", FOLDER / "context_parallel_fsdp2.py", context)
    losses = [float(x) for x in re.findall(r"step \d: (\S+) nats", text)]
    assert len(losses) == 3
    assert losses[2] < losses[0]


def train_on_a_mesh(*axes: int) -> tuple[float, float]:
    return load("data_context_tensor").main(*axes)


@pytest.mark.thorough
def test_data_context_tensor():
    answers = processes.run(8, train_on_a_mesh, 2, 2, 2)
    assert len({loss for loss, _ in answers}) == 1
    assert max(difference for _, difference in answers) < 1e-6


def losses_of_one_process() -> list[float]:
    torch.manual_seed(0)
    model = LongNetLM(LongNetConfig(embed_dim=64, num_layers=2, num_heads=4, pattern=Dilated((64, 256), (1, 4))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for tokens in torch.randint(256, (3, 1, 513)):
        optimizer.zero_grad()
        loss = model.loss(tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.thorough
def test_accelerate_context(tmp_path):
    check_trainer("accelerate_context", NO_REDUCER_AT_THE_END + THEN_NO_GLOO, tmp_path)


@pytest.mark.thorough
def test_lightning_context(tmp_path):
    check_trainer("lightning_context", NO_REDUCER_AT_THE_END + THEN_NO_GLOO, tmp_path)


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="DeepSpeed is a test dependency on Linux only")
def test_deepspeed_context(tmp_path):
    check_trainer("deepspeed_context", NO_COMPILER + THEN_NO_END, tmp_path)


def check_trainer(example: str, program: str, tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(program)
    text = torchrun(2, tmp_path / "run.py", FOLDER / f"{example}.py")
    losses = [float(x) for x in re.findall(r"step \d: (\S+) nats", text)]
    assert losses == pytest.approx(losses_of_one_process(), abs=1e-3)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_has_its_line(file):
    assert f"| [{file.name}]({file.name}) |" in (FOLDER / "README.md").read_text(encoding="utf-8")
    assert f"def test_{file.stem}(" in Path(__file__).read_text(encoding="utf-8")
