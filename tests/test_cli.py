"""The command line: what it prints, its exit codes, one clear line for bad input."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dilated_attention import pictures
from dilated_attention.backends.reference import count_matrix
from dilated_attention.layout import BlockLayout
from dilated_attention.patterns import Dilated
from dilated_attention.suggestion import suggest_pattern
from dilated_attention_lab import environment, terminal
from dilated_attention_lab.commands import in_options, info, main
from dilated_attention_lab.pictures import save_pattern
from dilated_attention_lab.terminal import console
from dilated_attention_lab.training import demo, recall, session
from dilated_attention_lab.training.text import read_text
from dilated_attention_lab.version import own_version

SIZE = {"--layers": 1, "--dim": 16, "--heads": 2}
TINY = [word for item in {**SIZE, "--context": 64, "--steps": 4, "--warmup": 1, "--sample": 4}.items() for word in item]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(i * i % 251 for i in range(5000)))
    return path


def exit_code(arguments) -> int:
    try:
        return main([str(word) for word in arguments])
    except SystemExit as ended:
        return ended.code


def failure(capsys, *arguments) -> str:
    """The one line that a call with bad input prints on stderr."""
    assert exit_code(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("dilated-attention")
    return lines[0]


@pytest.mark.parametrize("command", ["", "demo", "train", "info"])
def test_help(command, capsys):
    assert exit_code([*command.split(), "--help"]) == 0
    assert f"usage: dilated-attention {command}".strip() in capsys.readouterr().out


def test_commands_that_measure_need_no_triton(fresh_python):
    """PyTorch for the CPU does not bring it."""
    commands = ["compare", "bench", "plot", "profile"]
    said = fresh_python(f"""
        import contextlib, sys
        sys.modules["triton"] = None
        from dilated_attention_lab.commands import main
        for command in {commands}:
            with contextlib.suppress(SystemExit):
                main([command, "--help"])
    """)
    assert re.findall(r"^usage: dilated-attention (\w+)", said, re.MULTILINE) == commands


def test_info(capsys):
    assert exit_code(["info"]) == 0
    printed = capsys.readouterr().out
    for word in ("PyTorch", "threads", "cpu:", "cuda:", "native", "reference", "not chosen by auto: quadratic"):
        assert word in printed


def test_suggest(capsys):
    words = ["suggest", "--tokens", "32768", "--heads", "8", "--causal", "--budget", "0.1"]
    assert exit_code(words) == 0
    assert capsys.readouterr().out == f"{suggest_pattern(32768, 8, budget=0.1, is_causal=True)}\n"
    said = failure(capsys, *words[:-1], "64")
    assert said.startswith("dilated-attention suggest: error: --budget 64 is too small for 32,768 tokens and 8 heads")
    assert "--budget 1 is one key per query. Give 1.0" in failure(capsys, *words[:-1], "1")
    assert "argument --budget: invalid number value: 'much'" in failure(capsys, *words[:-1], "much")


def test_wrong_arguments(capsys, tmp_path, text):
    out = ["--out", tmp_path / "run"]
    assert "invalid choice: 'fly'" in failure(capsys, "fly")
    assert "required: command" in failure(capsys)
    assert "invalid int value: 'x'" in failure(capsys, "train", "--steps", "x")
    assert "invalid positive integer value: '0'" in failure(capsys, "train", "--save-every", "0")
    assert "invalid list of integers value: '4,x'" in failure(capsys, "train", "--segments", "4,x")
    said = failure(capsys, "train", "--stpes", "3")
    assert said.startswith("dilated-attention train: error: unrecognized arguments: --stpes; did you mean --steps?")
    assert said.endswith("see dilated-attention train --help")
    said = failure(capsys, "plot", "dilated", "--segments", "8", "--dilation-rates", "1")
    assert "unrecognized arguments: --dilation-rates 1; did you mean --rates?" in said
    assert "did you mean -h" not in failure(capsys, "train", "--depth", "3")
    assert "--prompt is empty" in failure(capsys, "generate", "--prompt", "")
    assert "not allowed with" in failure(capsys, "train", "--resume", "--overwrite")
    for words, message in {
        "--steps 0": "--steps 0: must be",
        "--lr nan": "--lr nan: must be",
        "--segments 64": "--segments and --rates go together",
        "--segments 64 --rates 1 --dense": "not with --dense",
        "--segments 64,8 --rates 1": "--segments and --rates must have one entry per branch each",
        "--heads 3": "--dim 16: must be a multiple of 2 x --heads = 6",
        "--device warp": "--device warp: ",
        "--device meta": "--device meta: meta is not supported",
        "--backend magic": "--backend must be one of",
        "--context 4999": "has 5,000 bytes: a context of 4,999 needs at least 10,000",
    }.items():
        assert message in failure(capsys, "train", text, *out, *TINY, *words.split())
    assert "cannot be read" in failure(capsys, "train", tmp_path / "none.txt", *out)
    assert "no checkpoint of `train`" in failure(capsys, "train", "--resume", *out)
    assert not (tmp_path / "run").exists()
    assert "cannot be written" in failure(capsys, "train", text, "--out", text / "below", *TINY)


def test_resume_starts_a_run_that_has_no_checkpoint_yet(tmp_path, text):
    """One command, before and after a restart."""
    words = ["train", text, "--out", tmp_path / "run", *TINY, "--resume"]
    assert exit_code(words) == 0
    held = sorted(path.name for path in (tmp_path / "run" / "checkpoint").iterdir())
    assert exit_code([*words, "--steps", "6"]) == 0
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoint").iterdir())[-1] > held[-1]


def test_train_again_and_resume(capsys, tmp_path, text):
    out = ["--out", tmp_path / "run"]
    assert exit_code(["train", text, *out, *TINY, "--segments", "16,64", "--rates", "1,2"]) == 0
    assert "bits per byte" in capsys.readouterr().out
    folder = tmp_path / "run" / "checkpoint"
    assert sorted(path.name for path in folder.iterdir()) == ["step-0", "step-4"]
    before = (folder / "step-4" / "index.json").stat().st_mtime_ns
    assert "exists: give --resume" in failure(capsys, "train", text, *out, *TINY)
    assert "with --steps 4, not 3" in failure(capsys, "train", *out, "--resume", "--steps", "3")
    assert "with --layers 1, not 2" in failure(capsys, "train", *out, "--resume", "--layers", "2")
    assert "with pattern=Dilated" in failure(capsys, "train", *out, "--resume", "--dense")
    text.write_bytes(text.read_bytes()[:-1])
    assert "another text" in failure(capsys, "train", *out, "--resume")
    assert (folder / "step-4" / "index.json").stat().st_mtime_ns == before
    for step in folder.iterdir():
        shard = step / "rank-0-of-1.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1])
    assert "step-4/rank-0-of-1.safetensors: damaged" in failure(capsys, "train", *out, "--resume")
    assert exit_code(["train", text, *out, *TINY, "--overwrite", "--dense"]) == 0
    assert json.loads((tmp_path / "run" / "figures.jsonl").read_text())["attention"] == "dense"


def test_a_run_inside_its_text_is_no_text_of_its_own(capsys, tmp_path, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text.write_bytes(bytes(97 + i * i % 26 for i in range(5000)))  # no zero byte, which makes a file binary
    (tmp_path / "link").symlink_to(tmp_path)
    assert exit_code(["train", ".", "--out", "link/runs/train", *TINY]) == 0
    (tmp_path / "runs" / "train" / "log.txt").write_text("of the run")
    assert exit_code(["train", "--out", "runs/train", "--resume", "--steps", "6"]) == 0
    figures = tmp_path / "runs" / "train" / "figures.jsonl"
    digests = {json.loads(line)["text_sha256"] for line in figures.read_text().splitlines()}
    assert digests == {read_text([text]).digest}
    assert ".: is the folder of the run" in failure(capsys, "train", ".", "--out", tmp_path, *TINY)
    (tmp_path / "mine").mkdir()
    text.rename(tmp_path / "mine" / "text.txt")
    assert exit_code(["train", "mine", "--out", ".", *TINY]) == 0  # the text inside the run's folder
    assert exit_code(["train", "--out", ".", "--resume", "--steps", "6"]) == 0


def test_resume_remembers_and_extends(capsys, tmp_path, text):
    out = tmp_path / "run"
    words = [
        text,
        "--out",
        out,
        *TINY[:-2],
        "--held-out",
        "2",
        "--sample",
        "3",
        "--segments",
        "16,64",
        "--rates",
        "1,2",
    ]
    assert exit_code(["train", *words]) == 0
    first = (out / "figures.jsonl").read_text()
    assert json.loads(first)["held_out_bytes"] == 2 * 64

    assert exit_code(["train", "--out", out, "--resume", "--steps", "6"]) == 0
    kept, second = (out / "figures.jsonl").read_text().splitlines(keepends=True)
    assert kept == first
    assert (json.loads(second)["recipe"]["steps"], json.loads(second)["held_out_bytes"]) == (6, 2 * 64)
    assert len((out / "steps.jsonl").read_text().splitlines()) == 6
    prompt, _, written = (out / "sample.txt").read_text(encoding="utf-8").partition("▌")
    assert prompt
    assert len(written.rstrip("\n")) == 3

    assert exit_code(["train", "--out", out, "--resume", "--sample", "0"]) == 0
    options = {"save_every": 100, "keep": 2, "held_out": 2, "sample": 0, "backend": "auto", "device": "cpu"}
    assert json.loads((out / "options.json").read_text()) == options
    capsys.readouterr()
    (out / "options.json").write_text("{}")
    assert "options.json: expected integers for save_every" in failure(capsys, "train", "--out", out, "--resume")


def test_overwritten_run_killed_after_its_first_checkpoint_has_its_own_options(tmp_path, text, monkeypatch):
    words = [text, "--out", tmp_path / "run", *TINY]
    assert exit_code(["train", *words, "--held-out", "1"]) == 0
    save = session.save

    def killed(*arguments, **options):
        save(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(session, "save", killed)
        assert exit_code(["train", *words, "--overwrite", "--held-out", "2"]) == 130
    assert exit_code(["train", "--out", tmp_path / "run", "--resume"]) == 0
    last = (tmp_path / "run" / "figures.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["held_out_bytes"] == 2 * 64


def test_control_c_while_a_class_is_made(tmp_path, text, monkeypatch, capsys):
    """Python before 3.12 turns it into a RuntimeError."""

    class Interrupted:
        def __set_name__(self, owner, name):
            raise KeyboardInterrupt

    monkeypatch.setattr(session, "run", lambda *_, **__: type("Made", (), {"name": Interrupted()}))
    assert exit_code(["train", text, "--out", tmp_path / "run", *TINY]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "dilated-attention: interrupted"


def test_resume_keeps_the_backend(tmp_path, text, monkeypatch):
    backends = []
    monkeypatch.setattr(session, "run", lambda training, *_, **__: backends.append(training.model.backend) or 130)
    out = ["--out", tmp_path / "run"]
    for words in ([text, *TINY, "--backend", "native"], ["--resume"], ["--resume", "--backend", "auto"], ["--resume"]):
        assert exit_code(["train", *out, *words]) == 130
    assert backends == ["native", "native", "auto", "auto"]


def test_generate_takes_a_run(capsys, tmp_path, text, monkeypatch):
    out = tmp_path / "run"

    def said(*words) -> str:
        assert exit_code(["generate", *words, "--bytes", "20"]) == 0
        return capsys.readouterr().out

    with monkeypatch.context() as patch:  # interrupted in its first step
        patch.setattr(session, "run", lambda *_, **__: 130)
        assert exit_code(["train", text, "--out", out, *TINY]) == 130
    begun = said(out)
    assert exit_code(["train", "--out", out, "--resume"]) == 0
    capsys.readouterr()
    finished = said(out / "model")
    assert said(out) == finished
    assert begun != finished
    with monkeypatch.context() as patch:  # extended, and killed before its report: model/ is as old as before
        patch.setattr(session, "_report", lambda *_: None)
        assert exit_code(["train", "--out", out, "--resume", "--steps", "8"]) == 0
    capsys.readouterr()
    assert said(out / "model") == finished
    extended = said(out)
    assert extended != finished
    assert exit_code(["train", "--out", out, "--resume"]) == 0
    capsys.readouterr()
    assert said(out / "model") == extended
    (out / "checkpoint").rename(tmp_path / "elsewhere")
    assert said(out) == extended
    assert "neither a model nor a run of `train`" in failure(capsys, "generate", tmp_path)


@pytest.mark.thorough
def test_control_c_in_a_terminal(tmp_path, text):
    """The process itself: Ctrl-C ends with 130 and a checkpoint, which --resume ends to the losses of a whole run."""
    words = [word for item in {**SIZE, "--context": 64, "--steps": 200, "--sample": 0}.items() for word in item]

    def command(*arguments):
        return [sys.executable, "-m", "dilated_attention", "train", *map(str, arguments)]

    def losses(name):
        lines = (tmp_path / name / "steps.jsonl").read_text().splitlines()
        return [json.loads(line)["bits_per_byte"] for line in lines]

    out = tmp_path / "run"
    process = subprocess.Popen(command(text, "--out", out, *words, "--save-every", "1"), stdout=subprocess.PIPE)
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        if list(out.glob("checkpoint/step-[1-9]*")):
            process.send_signal(signal.SIGINT)
            break
        time.sleep(0.002)
    printed = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 130, printed
    assert "--resume continues" in printed
    assert subprocess.run(command("--out", out, "--resume"), stdout=subprocess.DEVNULL).returncode == 0
    assert exit_code(["train", text, "--out", tmp_path / "straight", *words]) == 0
    assert losses("run") == losses("straight")


def test_demo(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(recall, "MOST_STEPS", dict.fromkeys(recall.MOST_STEPS, 1))
    for name, value in (("QUESTIONS", 1), ("FAR_QUESTIONS", 1), ("HELD_OUT", 1), ("CONTEXTS", (256,))):
        monkeypatch.setattr(demo, name, value)
    assert exit_code(["demo", "--out", tmp_path, "--tokens", 512, "--seconds", 0.1]) == 0
    printed = capsys.readouterr().out
    for word in ("recall, dilated", "recall, window", "dense attention", "0 s of training"):
        assert word in printed
    (row,) = (json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines())
    assert row["lessons"] == {"128": 1, "512": 1}
    assert row["near"].keys() == row["far"].keys() == row["by_distance"].keys() == {"dilated", "window"}
    assert row["step_seconds"].keys() == {"dilated", "dense"}
    assert set(row["bits"]) == {"256", "8192"}
    assert 1 <= row["window_cost"] < 1.5
    assert (tmp_path / "demo.png").stat().st_size > 0
    assert "--tokens 255: must lie in" in failure(capsys, "demo", "--out", tmp_path, "--tokens", 255)


def test_the_demo_says_what_its_figures_justify_and_nothing_else():
    good = demo.Demo(
        tokens=32768,
        window=48,
        window_reach=159,
        window_cost=1.1,
        near={"dilated": 1.0, "window": 1.0},
        far={"dilated": 0.97, "window": 0.07},
        by_distance={},
        lessons={128: 80, 2048: 20},
        step_seconds={"dilated": 1.0, "dense": 10.0},
        text_bytes=3_000_000,
        text_seconds=90.0,
        bits={256: 2.0, 8192: 1.9},
    )
    said = demo.sentences(good)
    assert len(said) == 4
    assert said[0] == "Trained on at most 2,048 tokens, dilated attention answers about a fact anywhere in 32,768."
    assert "takes 0.10 of the time of dense attention" in said[2]
    assert "5.0% fewer bits than with the last 256 bytes" in said[3]
    bad = {
        "far": {"dilated": 0.9, "window": 0.2},
        "step_seconds": {"dilated": 1.0, "dense": 0.5},
        "bits": {256: 1.9, 8192: 1.9},
    }
    for number, (name, value) in enumerate(bad.items()):
        left = demo.sentences(dataclasses.replace(good, **{name: value}))
        assert len(left) == 3 - (number == 0), name
    assert demo.sentences(dataclasses.replace(good, **bad)) == ["These figures show no advantage."]


def test_peak_memory_is_of_this_process_alone(fresh_python):
    """getrusage would report the peak of the parent from before the exec."""
    held = bytearray(os.urandom(1)) * (400 * 2**20)
    peak = int(fresh_python("from dilated_attention_lab.environment import peak_memory; print(peak_memory())"))
    assert peak > 20 * 2**20
    assert environment.peak_memory() > len(held)
    assert peak < environment.peak_memory()


def test_picture_of_a_pattern(tmp_path):
    axes = Dilated((4, 8), (1, 2)).plot(10, head=1, num_heads=2)
    counts = axes.images[0].get_array()
    assert counts.shape == (10, 10)
    assert counts[1].tolist() == [1, 2, 1, 2, 0, 1, 0, 1, 0, 0]  # head 1: segment 0 to 3, and odd tokens to 7
    causal = Dilated((4, 8), (1, 2)).plot(10, head=1, num_heads=2, is_causal=True).images[0].get_array()
    assert causal[1].tolist() == [1, 2, 0, 0, 0, 0, 0, 0, 0, 0]
    product = Dilated((4, 8), (1, 2)) * (lambda n: BlockLayout.local(n, n, 4))
    assert (product.plot(10, head=1, num_heads=2).images[0].get_array() == counts).all()
    for pattern in (Dilated((8,), (1,)), Dilated((8,), (1,)) * BlockLayout.local(8, 1, 4)):
        assert pattern.plot(8, 0, axes) is axes
    table = Dilated((4, 8), (1, 2), offsets=((0, 0, 0), (0, 1, 0)))
    assert (table.plot(10, head=1).images[0].get_array() == counts).all()  # by default of as many heads as it has
    with pytest.raises(ValueError, match=r"head must lie in \[0, 3\); got 3"):
        table.plot(10, head=3)
    coarse = Dilated((400, 1000), (1, 2)).plot(1024, head=1, num_heads=2).images[0].get_array()
    exact = count_matrix((400, 1000), (1, 2), ((0, 0), (0, 1)), 1024, is_causal=False)[1].numpy()
    assert abs(coarse - exact.reshape(512, 2, 512, 2).mean((1, 3))).max() < 1e-12
    product = Dilated((64,), (2,)) * BlockLayout.local(32, 1, 16, is_causal=True)
    pairs = product.plot(128, head=1, num_heads=2).images[0].get_array()
    assert (pairs[1, :3].tolist(), pairs[127].sum(), pairs.sum()) == ([0, 1, 0], 16, 4 * 16 * 17 / 2)
    with pytest.raises(ValueError, match=r"head must lie in \[0, 2\); got 2"):
        product.plot(128, head=2, num_heads=2)
    save_pattern(tmp_path / "pattern.png", "dilated", Dilated((512, 8192), (1, 16)), 8192, 8)
    assert (tmp_path / "pattern.png").stat().st_size > 0
    causal = Dilated((400, 1000), (1, 2)).plot(1024, head=1, num_heads=2, is_causal=True).images[0].get_array()
    assert abs(causal - np.tril(exact).reshape(512, 2, 512, 2).mean((1, 3))).max() < 1e-12
    dense = Dilated((64,), (2,)) * BlockLayout.local(32, 32, 32)
    pairs = dense.plot(128, head=1, num_heads=2, is_causal=True).images[0].get_array()
    assert pairs.sum() == 2 * 32 * 33 / 2
    with pytest.raises(ValueError, match="is_causal must be"):
        dense.plot(128, is_causal=1)


def test_what_is_seen_at_all_is_drawn_as_the_explorer_draws_it():
    """However few of a pixel's pairs are seen, they show; and the two branches of one pattern can be distinguished."""
    axes = Dilated((64, 262144), (1, 16)).plot(1 << 20, num_heads=16)
    (image,) = axes.images
    dark, mean = image.norm(image.get_array()), image.get_array()
    assert np.array_equal(dark > 0, mean > 0)
    assert (mean > 0).mean() > 0.24
    assert dark[mean > 0].min() >= 0.22
    np.testing.assert_allclose(dark[mean > 0], 0.22 + 0.78 * np.sqrt(mean[mean > 0] / mean.max()))
    assert dark[0, 0] == 1 > dark[0, 9] + 0.2
    page = (Path(__file__).parents[1] / "docs" / "explorer.html").read_text(encoding="utf-8")
    assert f"({pictures.FAINTEST} + {1 - pictures.FAINTEST} * Math.sqrt(mean / most))" in page
    (image,) = BlockLayout.random(1 << 18, 0.001, 0, 64).plot().images
    assert image.norm(image.get_array()).max() == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("dilated --segments 64,256 --rates 1,4 --tokens 256", "sees 64 to 128 keys"),
        ("dilated --segments 64,256 --rates 2,4 --head 1 --heads 4 --tokens 256", "128 tokens see none"),
        ("dilated --segments 64,256 --rates 1,2 --head-groups --head 1 --tokens 256", "sees 0 to 128 keys"),
        ("dilated --segments 64,256 --rates 1,4 --offsets head_block --tokens 256", "sees 64 to 128 keys"),
        ("dilated --segments 64,256 --rates 1,4 --causal --tokens 256", "sees 2 to 125 keys"),
        ("local --window 16 --block-size 16 --segments 64 --rates 1 --causal --tokens 64", "sees 1 to 32 keys"),
        ("local --window 65 --block-size 16 --tokens 256", "sees 80 to 144 keys"),
        ("strided --stride 127", "; every block is active, as in dense attention"),
        ("local --density 0.5 --causal --tokens 4096", "sees 1 to"),
        ("global --global-tokens 16 --block-size 16,32", "sees 32 to 1,024 keys"),
        ("strided --stride 128", "sees 512 to 512 keys"),
        ("dilated-blocks --block-rates 1,4 --reach 1", "sees 192 to 320 keys"),
        ("hierarchical --levels 1:64,256:", "keys"),
        ("random --density 0.25 --seed 3", "sees 256 to 256 keys"),
        ("longformer --window 64 --global-tokens 1", "keys"),
        ("bigbird --window 64 --global-tokens 1 --random-blocks 2", "keys"),
        ("local --window 16 --block-size 16 --segments 128 --rates 2 --heads 2 --tokens 256", "128 tokens see none"),
    ],
)
def test_plot_draws_any_pattern(words, said, tmp_path, capsys):
    assert exit_code(["plot", *words.split(), "--out", tmp_path / "a" / "pattern.png"]) == 0
    assert said in capsys.readouterr().out
    assert (tmp_path / "a" / "pattern.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("dilated --segments 64", "--segments and --rates go together"),
        ("dilated", "'dilated' needs --segments and --rates"),
        ("dilated --segments 64 --rates 1 --window 3", "--window is not of 'dilated'"),
        ("local", "'local' needs --window or --density"),
        ("global", "'global' needs --global-tokens or --density"),
        ("local --window 3 --out text/below/a.png", "--out text/below: cannot be written (Not a directory)"),
        ("local --window 3 --stride 4", "--stride is not of 'local'"),
        ("local --window 3 --offsets head", "--offsets is of a dilated pattern"),
        ("bigbird --window 3", "'bigbird' needs --global-tokens, --random-blocks"),
        ("random --density 2", "--density must lie in (0, 1], got 2.0"),
        ("local --window 3 --block-size 0", "an integer from 1 to 65536; got 0"),
        ("local --window 3 --tokens 0", "--tokens must lie in [1, 1048576]; got 0"),
        ("dilated --segments 64 --rates 1 --head 2 --heads 2", "head must lie in [0, 2); got 2"),
        ("hierarchical --levels a", "invalid list of levels value: 'a'"),
        ("dilated --segments 64 --rates 1 --tokens 0", "--tokens must lie in [1, 1048576]; got 0"),
        ("local --window 65 --documents", "--documents is of a folder of results, not of 'local'"),
        (
            ". --tokens 100 --causal",
            "--causal is of a pattern, not of '.', a folder of results; it would change nothing",
        ),
        (". --head-groups", "--head-groups is of a pattern, not of '.'"),
        ("nowhere", "'nowhere' is neither a pattern (dilated, local, global, strided, dilated-blocks, hierarchical, "),
    ],
)
def test_plot_refuses(words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").touch()
    assert said in failure(capsys, "plot", *words.split())


@pytest.mark.parametrize(
    ("command", "message", "said"),
    [
        (
            "train",
            "a/steps=3/b: a checkpoint with steps=4, not 2",
            "a/steps=3/b: a checkpoint with --steps 4, not 2",
        ),
        ("train", "segment_lengths=(64, 8): the seed of a context", "--segments (64, 8): the seed of a context"),
        ("suggest", "num_heads must be positive; got num_kv_heads=2", "--heads must be positive; got num_kv_heads=2"),
        ("suggest", "tokens: runs/num_heads/a, x_tokens=1", "--tokens: runs/num_heads/a, x_tokens=1"),
        ("info", "num_heads=2: must be 3", "num_heads=2: must be 3"),
    ],
)
def test_errors_name_options(command, message, said):
    """Errors name the command's options; paths stay as they are, and arguments without an option too."""
    assert in_options(command, message) == said


def test_plot_writes_the_file_that_it_names(tmp_path, capsys):
    words = ["plot", "local", "--window", "65", "--tokens", "256", "--out"]
    assert exit_code([*words, tmp_path / "name"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"written: {tmp_path / 'name'}"
    assert (tmp_path / "name").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "folder").mkdir()
    assert failure(capsys, *words, tmp_path / "folder").endswith("folder: Is a directory")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "name"]


@pytest.mark.parametrize("folder", ["exp[lr]1", "sweep[a,b]", "run[/b]"])
def test_brackets_in_a_path_are_printed(folder, capsys, tmp_path, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert exit_code(["train", text, "--out", folder, *TINY]) == 0
    assert f"\nsaved in {folder}: model/" in capsys.readouterr().out
    for name in ("_text", "_table", "sentences", "save_recall_and_context"):
        monkeypatch.setattr(demo, name, lambda *arguments: {})
    found = {field.name: 0 for field in dataclasses.fields(demo.Demo) if field.name != "tokens"}
    monkeypatch.setattr(demo, "_recall", lambda *arguments: {**found, "by_distance": {"dilated": {}}})
    assert exit_code(["demo", "--out", folder]) == 0
    assert f"saved in {folder}: figures.jsonl" in capsys.readouterr().out
    assert exit_code(["bench", "check", "--baseline", f"{folder}/none.json"]) == 2
    assert f"{folder}/none.json" in capsys.readouterr().err


def test_a_reader_that_leaves_while_a_table_is_printed():
    """`main` then ends the command as SIGPIPE would; rich by itself exits with code 1."""

    class Left(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        console(file=Left()).print("a row")


def test_the_demo_never_expects_less_than_no_time(capsys, monkeypatch):
    """Training takes a little longer than the time that it was given."""
    monkeypatch.setattr(terminal, "PLAIN_SECONDS", 0.0)
    for total in (2.0, 0.0):
        with terminal.progress(console(), "text " * 20, total) as advance:  # wider than the 80 columns of a pipe
            advance(0.0, "begun")
            time.sleep(0.02)
            advance(200.0, "done")
    lines = [line for line in capsys.readouterr().out.splitlines() if line]  # rich 13.7 ends a bar by an empty one
    assert len(lines) == 6
    assert not [line for line in lines if "-" in line]


def test_divergence_is_one_line(capsys, tmp_path, text):
    words = ["--out", tmp_path / "run", *TINY, "--lr", "1e30", "--steps", "50", "--warmup", "0"]
    assert exit_code(["train", text, *words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "try a lower --lr" in line
    assert (tmp_path / "run" / "checkpoint" / "step-0").exists()


def test_divergence_in_the_last_step_is_no_success(capsys, tmp_path, text):
    words = ["--out", tmp_path / "run", *TINY, "--lr", "1e30", "--steps", "1", "--warmup", "0"]
    assert exit_code(["train", text, *words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "step 1: held-out text takes nan bits per byte; try a lower --lr" in line
    assert not (tmp_path / "run" / "figures.jsonl").exists()


def test_version(capsys):
    assert exit_code(["--version"]) == 0
    assert capsys.readouterr().out.split() == ["dilated-attention", *own_version().split()]


def test_a_fault_of_ours_shows_where(capsys, monkeypatch):
    """Bad input gives one line; a TypeError does not."""

    def fail(error):
        raise error

    monkeypatch.setattr(info, "report", lambda: fail(TypeError("a fault")))
    with pytest.raises(TypeError, match="a fault"):
        main(["info"])
    monkeypatch.setattr(info, "report", lambda: fail(FileNotFoundError(2, "No such file or directory", "a/b")))
    assert failure(capsys, "info") == "dilated-attention info: error: a/b: No such file or directory"
    monkeypatch.setattr(info, "report", lambda: fail(ValueError("x=1:\n  must be 2")))
    assert failure(capsys, "info") == "dilated-attention info: error: x=1: must be 2"


def test_interrupted_anywhere(capsys, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "report", interrupt)
    assert exit_code(["info"]) == 130
    assert capsys.readouterr().err == "dilated-attention: interrupted\n"


@pytest.mark.parametrize("module", ["torch", "dilated_attention_lab.bench.command", "matplotlib.figure"])
def test_interrupted_while_it_starts(module, tmp_path):
    """Ctrl-C comes at the moment when a module is about to be loaded."""
    source = f"""
import os, signal, sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder)
from dilated_attention_lab import main
sys.exit(main(["plot", "local", "--window", "64", "--out", {str(tmp_path / "a.png")!r}]))
"""
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "dilated-attention: interrupted\n")


def test_control_c_leaves_no_rank(tmp_path):
    """Ctrl-C while ranks of torchrun wait for each other, where no interrupt reaches them."""
    (tmp_path / "waiting.py").write_text(
        "import os, pathlib, signal, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "pathlib.Path(os.environ['FOLDER'], str(os.getpid())).touch()\n"
        "time.sleep(600)\n"
    )
    pids = tmp_path / "pids"
    pids.mkdir()
    launcher = ("torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1", "--master-port=0", "-m")
    source = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process ignores it
sys.path.insert(0, {str(tmp_path)!r})
from dilated_attention_lab.bench.measure import in_new_process
in_new_process("waiting", {{}}, launcher={launcher!r}, FOLDER={str(pids)!r})
"""
    process = subprocess.Popen([sys.executable, "-c", source], stderr=subprocess.PIPE, start_new_session=True)
    end = time.monotonic() + 60
    while time.monotonic() < end and len([*pids.iterdir()]) < 2:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    assert b"KeyboardInterrupt" in process.communicate(timeout=60)[1]
    started, left = [int(file.name) for file in pids.iterdir()], []
    for pid in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            left.append(pid)
    assert (len(started), left) == (2, [])


def test_output_that_cannot_be_written_is_one_line(capsys, tmp_path, text, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")  # as `print` does: of no file

    out = tmp_path / "run"
    monkeypatch.setattr(session, "run", full)
    said = f"output: cannot be written (No space left on device); --resume continues {out}"
    assert failure(capsys, "train", text, "--out", out, *TINY) == f"dilated-attention train: error: {said}"
    monkeypatch.setattr(info, "report", full)
    assert failure(capsys, "info") == "dilated-attention info: error: No space left on device"


def test_a_reader_who_has_heard_enough():
    """A reader like `head`: the rest of the output is dropped silently, and the exit code is that for SIGPIPE."""
    reader, writer = os.pipe()
    os.close(reader)
    source = "import sys; from dilated_attention_lab.commands import main; sys.exit(main(['info']))"
    ended = subprocess.run([sys.executable, "-c", source], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")
