"""The examples run as their first lines say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def torchrun(name: str, ranks: int, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", str(EXAMPLES / name)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_context_parallel() -> None:
    text = torchrun("context_parallel.py", 2)
    errors = re.findall(r"largest difference (\S+)", text)
    assert len(errors) == 2
    assert max(map(float, errors)) < 1e-5
    assert "transport" in text
    assert len(re.findall(r"step \d: \d", text)) == 3


@pytest.mark.parametrize("context", ["1", "2"])
def test_context_parallel_fsdp2(context: str) -> None:
    losses = [float(x) for x in re.findall(r"step \d: (\S+) nats", torchrun("context_parallel_fsdp2.py", 2, context))]
    assert len(losses) == 3
    assert losses[2] < losses[0]
