"""Ctrl-C at ten moments of every command, and outputs that are no terminal: one line, the right code, no traceback, no
process that stays.

`pytest tests/explore_interrupts.py` takes a quarter of an hour; `-k suggest` is one command. Ctrl-C reaches the whole
process group, as from a terminal. Moments are shares of the time that the command takes, and the events that a command
interrupts itself at: a file is opened for writing, a finished file takes its place.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path

import pytest
from safetensors.torch import save_file

from test_checkpoints import Golden

LONGEST = 30.0  # seconds of a command that is interrupted: the rest of a longer one is more of the same
NUMBERS = count()
SHARES = [(i + 0.5) / 10 for i in range(10)]
EVENTS = ("open:w", "os.rename")
SMALL = ["--tokens", "512", "--segments", "128,512", "--rates", "1,2", "--heads", "2"]
TRAIN = ["--layers", "1", "--dim", "16", "--heads", "2", "--context", "64", "--steps", "40", "--sample", "4"]
HOOK = """
import os, signal, sys
wanted, _, mode = os.environ["INTERRUPT_AT"].partition(":")
def hook(event, arguments):
    if event == wanted and (not mode or mode in str(arguments[1]) and os.environ["INTERRUPT_IN"] in str(arguments[0])):
        if wanted != "done":
            globals()["wanted"] = "done"
            os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(hook)
"""


def commands(folder: Path) -> dict[str, list[str]]:
    """Every command at a small size, by its name; it writes into `folder`, which holds a text and weights."""
    out = str(folder / "out é")
    return {
        "demo": ["--out", out, "--tokens", "256", "--seconds", "0.1"],
        "train": [str(folder / "text"), "--out", out, *TRAIN, "--overwrite"],
        "generate": [str(folder / "run"), "--bytes", "64"],
        "convert": [str(folder / "weights"), out, "--kind", "torchscale", "--segments", "16,32", "--rates", "1,2",
                    "--tokens", "20", "--overwrite"],
        "suggest": ["--tokens", "32768", "--heads", "8", "--budget", "0.1"],
        "info": ["--check"],
        "bench": ["windows", "--quick", "--out", out],
        "compare": ["--quick", "--out", out, "--again"],
        "profile": ["dilated", *SMALL, "--head-dim", "16", "--out", out],
        "plot": ["dilated", *SMALL, "--out", f"{out}/a.png"],
        "simulate": ["--tokens", "512", "--ranks", "8", "--heads", "2", "--head-dim", "8", "--segment", "64",
                     "--out", out],
    }  # fmt: skip


NAMES = tuple(commands(Path()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a space and an accent in its name."""
    made = tmp_path_factory.mktemp("un été")
    (made / "text").write_bytes(bytes(97 + i * i % 26 for i in range(20000)))
    save_file(Golden("ts_longnet_decoder_xpos").weights, made / "weights")
    process = start(made, "train", [str(made / "text"), "--out", str(made / "run"), *TRAIN])
    said = process.communicate()[1]
    assert process.returncode == 0, said
    (made / "hook").mkdir()
    (made / "hook" / "sitecustomize.py").write_text(HOOK)
    return made


def start(folder: Path, name: str, words: list[str], stdout: int = subprocess.DEVNULL, **more: str) -> subprocess.Popen:
    environment = os.environ | {"NO_COLOR": "1", "OMP_NUM_THREADS": "1", "MARK": f"{os.getpid()}-{next(NUMBERS)}"}
    command = [sys.executable, "-m", "dilated_attention_lab", name, *words]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment | more,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    process.mark = environment["MARK"]
    return process


def left(process: subprocess.Popen) -> list[str]:
    """The command lines of processes that `process` started, or they in turn, and that still run. Only Linux tells."""
    mark, lines = f"MARK={process.mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended since, or another user's
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                lines.append((folder / "cmdline").read_text().replace("\0", " "))
    return lines


@cache
def seconds(folder: Path, name: str) -> float:
    """The time that a command takes, at most `LONGEST`."""
    begin = time.perf_counter()
    process = start(folder, name, commands(folder)[name])
    try:
        said = process.communicate(timeout=LONGEST)[1]
        assert process.returncode == 0, said
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    return time.perf_counter() - begin


def judge(process: subprocess.Popen, done_is_right: bool = True) -> None:
    """Ended by Ctrl-C with one line, or just before."""
    said = process.communicate(timeout=60)[1]
    assert left(process) == []
    lines = [line for line in said.splitlines() if not line.startswith("dilated-attention: warning:")]
    # A command that was at its end: done, or ended by the signal itself while the interpreter shuts down.
    if done_is_right and process.returncode in (0, -signal.SIGINT) and not lines:
        return
    # Python ends itself by the signal if the interrupt came inside `exec` under -m (dataclasses): 130 in a shell.
    assert process.returncode in (130, -signal.SIGINT), said
    assert lines in ([], ["dilated-attention: interrupted"]), said


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", NAMES)
def test_control_c(name, share, folder):
    whole = seconds(folder, name)
    process = start(folder, name, commands(folder)[name])
    time.sleep(max(0.25, share * whole))  # before that the interpreter itself starts
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
    judge(process)


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("suggest", "info", "generate", "demo")])
def test_control_c_while_it_writes(name, event, folder):
    paths = os.pathsep.join([str(folder / "hook"), *filter(None, [os.environ.get("PYTHONPATH")])])
    more = {"PYTHONPATH": paths, "INTERRUPT_AT": event, "INTERRUPT_IN": "out é"}
    process = start(folder, name, commands(folder)[name], **more)
    judge(process, done_is_right=name == "plot" and event == "os.rename")  # it writes no file that replaces another


@pytest.mark.parametrize("name", NAMES)
def test_a_reader_that_leaves(name, folder):
    """`| head -1`: the command ends by itself, or is done."""
    process = start(folder, name, commands(folder)[name], subprocess.PIPE)
    with process.stdout as output:
        output.readline()
    process.stdout = None
    said = process.communicate(timeout=600)[1]
    assert process.returncode in (0, 128 + signal.SIGPIPE), said
    assert "Traceback" not in said, said
    assert "Exception ignored" not in said, said
    assert "\x1b" not in said, said
