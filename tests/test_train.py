"""Text, training steps, checkpoints, files that are never half written."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch

from dilated_attention.models import LongNetConfig, LongNetLM
from dilated_attention.patterns import Dilated
from dilated_attention_lab import terminal
from dilated_attention_lab.training import session
from dilated_attention_lab.training.loop import OPTIONS, Recipe, Training, read_checkpoint
from dilated_attention_lab.training.text import read_text

CONFIG = LongNetConfig(embed_dim=16, num_layers=2, num_heads=2, pattern=Dilated((16, 64), (1, 4)))
RECIPE = Recipe(context=64, batch_size=2, steps=6, warmup_steps=2)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(i * i % 251 for i in range(5000)))
    return read_text([path])


@pytest.fixture
def checkpoint(text, tmp_path):
    training = Training(CONFIG, RECIPE, text)
    training.step()
    return training.save(tmp_path / "checkpoint").parent


def test_default_text_is_the_standard_library():
    text = read_text([])
    content = bytes(text.content[: 1 << 20].tolist())
    assert len(text.content) > 1_000_000
    assert b"import " in content
    assert text.source == "the Python standard library"


def test_folders_are_read_in_order_without_hidden_and_binary_files(tmp_path):
    (tmp_path / "b").mkdir()
    for name, data in {"a": b"1", "b/c": b"2", "d": b"3", ".e": b"4", "b/f": b"5\0", "g": b""}.items():
        (tmp_path / name).write_bytes(data)
    text = read_text([tmp_path])
    assert bytes(text.content.tolist()) == b"132"
    assert bytes(read_text([tmp_path / "b" / "f", tmp_path / "d"]).content.tolist()) == b"5\x003"


def test_unusable_text(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    for name, message in {
        "none.txt": r"none.txt: cannot be read \(No such file",
        "empty.txt": "empty.txt: the file is empty",
        "folder": "folder: no text file in this folder",
    }.items():
        with pytest.raises(ValueError, match=message):
            read_text([tmp_path / name])


def test_unreadable_text(tmp_path, monkeypatch):
    (tmp_path / "secret.txt").write_text("secret")

    def refuse(path):  # as for any user but root, whom permissions do not stop
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    for path in (tmp_path, tmp_path / "secret.txt"):
        with pytest.raises(ValueError, match=r"secret.txt: cannot be read \(Permission denied"):
            read_text([path])


def test_a_folder_that_cannot_be_read_is_not_left_out(tmp_path, monkeypatch):
    (tmp_path / "secret").mkdir()
    (tmp_path / "text.txt").write_text("text")
    scandir = os.scandir

    def refuse(path):
        if os.fspath(path).endswith("secret"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ValueError, match=r"secret: cannot be read \(Permission denied\)"):
        read_text([tmp_path])


@pytest.mark.parametrize("size", [130, 131, 195, 650, 5000])
def test_no_training_window_touches_held_out_bytes(size, tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"x" * size)
    text = read_text([path])
    text.content.copy_(torch.arange(size) % 256)  # a byte tells its position modulo 256
    window = 65
    split = text.split(window - 1)
    assert split.held_out.shape == (max(1, size // window // 20), window)
    covered = torch.zeros(size, dtype=torch.long)
    for first, choices in zip(split.starts.tolist(), split.choices.tolist(), strict=True):
        covered[first : first + choices + window - 1] += 1
    held = torch.zeros(size, dtype=torch.long)
    for row in split.held_out:
        places = [i for i in range(0, size - window + 1, window) if torch.equal(text.content[i:][:window], row)]
        held[places[0] :][:window] = 1
    assert covered.max() == 1
    assert not (covered * held).any()
    batch = split.batch(50, torch.Generator().manual_seed(0))
    assert batch.shape == (50, window)
    assert ((batch[:, 1:] - batch[:, :-1]) % 256 == 1).all()  # contiguous
    assert len(split.sample_held_out(2)) == min(2, len(split.held_out))


def test_text_shorter_than_two_windows(tmp_path):
    (tmp_path / "short").write_bytes(b"x" * 129)
    with pytest.raises(ValueError, match="has 129 bytes: a context of 64 needs at least 130"):
        read_text([tmp_path / "short"]).split(64)


def test_learning_rate():
    recipe = Recipe(steps=100, warmup_steps=10, learning_rate=1.0)
    rates = [recipe.rate(step) for step in range(100)]
    assert rates[0] == 0.1
    assert max(rates) == rates[9] == rates[10] == 1.0
    assert sorted(rates[10:], reverse=True) == rates[10:]
    assert 0.1 < rates[99] < 0.101


@pytest.mark.parametrize("name", ["context", "batch_size", "steps", "warmup_steps", "seed", "learning_rate", "dtype"])
def test_wrong_recipe(name, unchecked):
    for value in (-1, "3", math.nan):
        with pytest.raises(ValueError, match=f"{name}="):
            Recipe(**{name: value})


def test_a_seed_that_no_generator_takes(unchecked):
    with pytest.raises(ValueError, match=r"seed=18446744073709551616: must be below 2\^64"):
        Recipe(seed=1 << 64)
    assert torch.Generator().manual_seed(Recipe(seed=(1 << 64) - 1).seed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumes_to_the_same_losses_bit_for_bit(text, tmp_path, dtype):
    recipe = dataclasses.replace(RECIPE, dtype=dtype)
    straight = Training(CONFIG, recipe, text)
    for _ in range(6):
        straight.step()
    first = Training(CONFIG, recipe, text)
    for _ in range(3):
        first.step()
    first.save(tmp_path)
    second = Training(CONFIG, recipe, text)
    second.load(*read_checkpoint(tmp_path))
    assert second.finished_steps == 3
    assert second.seconds == first.seconds
    for _ in range(3):
        second.step()
    assert second.losses == straight.losses
    assert second.losses[-1] < second.losses[0]
    for name, tensor in straight.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name])
    assert second.held_out_bits_per_byte(3) == straight.held_out_bits_per_byte(3)


def test_bfloat16_learns_as_float32_does(text):
    runs = {
        dtype: Training(CONFIG, dataclasses.replace(RECIPE, dtype=dtype), text) for dtype in ("float32", "bfloat16")
    }
    seen = []
    attention = runs["bfloat16"].model.blocks[0].attention
    attention.register_forward_hook(lambda module, arguments, out: seen.append(out.dtype))
    losses = {dtype: [run.step() for _ in range(6)] for dtype, run in runs.items()}
    assert seen == [torch.bfloat16] * 6
    assert all(p.dtype == torch.float32 for p in runs["bfloat16"].model.parameters())
    assert losses["bfloat16"] != losses["float32"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.01)
    assert runs["bfloat16"].held_out_bits_per_byte(2) == pytest.approx(
        runs["float32"].held_out_bits_per_byte(2), rel=0.01
    )


def test_held_out_text_is_measured_without_dropout(text):
    training = Training(dataclasses.replace(CONFIG, dropout=0.5), RECIPE, text)
    state = torch.get_rng_state()
    assert len({training.held_out_bits_per_byte(2) for _ in range(3)}) == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert training.model.training


def test_resumes_from_step_zero(text, tmp_path):
    first, second = Training(CONFIG, RECIPE, text), Training(CONFIG, RECIPE, text)
    first.save(tmp_path)
    second.load(*read_checkpoint(tmp_path))
    assert [second.step() for _ in range(2)] == [first.step() for _ in range(2)]


def test_checkpoint_holds_no_pickle_and_says_what_it_is(checkpoint, text):
    stored, about = read_checkpoint(checkpoint)
    assert (about.config, about.recipe, about.text, about.paths) == (CONFIG, RECIPE, text.digest, text.paths)
    assert {name.split(".")[0] for name in stored.tensors} == {"model", "optimizer", "rng"}


def test_checkpoint_of_another_run(checkpoint, text, tmp_path):
    (tmp_path / "other.txt").write_bytes(b"y" * 5000)
    other = read_text([tmp_path / "other.txt"])
    for wrong, message in (
        (Training(dataclasses.replace(CONFIG, num_layers=1), RECIPE, text), "another model"),
        (Training(CONFIG, dataclasses.replace(RECIPE, steps=7), text), "another recipe"),
        (Training(CONFIG, RECIPE, other), "another text"),
    ):
        before = {name: tensor.clone() for name, tensor in wrong.model.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            wrong.load(*read_checkpoint(checkpoint))
        assert wrong.finished_steps == 0
        assert all(torch.equal(tensor, before[name]) for name, tensor in wrong.model.state_dict().items())


def test_divergence_stops_without_an_update(text):
    training = Training(CONFIG, RECIPE, text)
    with torch.no_grad():
        training.model.norm.weight[0] = math.inf
    before = training.model.embedding.weight.clone()
    with pytest.raises(FloatingPointError, match=r"step 1: loss nan.*--lr"):
        training.step()
    assert torch.equal(training.model.embedding.weight, before)
    assert training.finished_steps == 0


def started(text, out, **recipe):
    fields = {**dataclasses.asdict(RECIPE), **recipe}
    model = {name: getattr(CONFIG, name) for name in ("embed_dim", "num_layers", "num_heads", "pattern")}
    return session.start(text.paths, out, model, fields)


def finish(training, out, console=None):
    console = console or terminal.console(file=io.StringIO(), width=200)
    code = session.run(training, out, console, OPTIONS | {"save_every": 2, "held_out": 2, "sample": 8})
    return code, console.file.getvalue() if isinstance(console.file, io.StringIO) else ""


def test_a_run_and_what_it_leaves(text, tmp_path):
    out = tmp_path / "run"
    training = started(text, out)
    code, printed = finish(training, out)
    assert code == 0
    assert "step 6/6" in printed
    assert "bits per byte" in printed
    (row,) = (json.loads(line) for line in (out / "figures.jsonl").read_text().splitlines())
    assert row["held_out_bits_per_byte"] == training.held_out_bits_per_byte(2)
    assert row["peak_memory_bytes"] > 50 * 2**20
    assert row["tokens_per_second"]["p10"] <= row["tokens_per_second"]["median"] <= row["tokens_per_second"]["p90"]
    steps = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [step["bits_per_byte"] * math.log(2) for step in steps] == pytest.approx(training.losses)
    for name in ("loss.png", "pattern.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert "▌" in (out / "sample.txt").read_text(encoding="utf-8")
    assert len(read_checkpoint(out / "checkpoint")[1].losses) == 6
    assert sorted(path.name for path in (out / "checkpoint").iterdir()) == ["step-2", "step-4", "step-6"]
    loaded = LongNetLM.from_pretrained(out / "model")
    assert torch.equal(loaded.embedding.weight, training.model.embedding.weight)
    assert not list(out.glob(".*"))


@pytest.mark.parametrize("name", [*session.REPORT, "model"])
def test_a_first_run_deletes_nothing_that_it_did_not_write(name, text, tmp_path):
    out = tmp_path / "mine"
    (out / "model").mkdir(parents=True)
    path = out / "model" / "weights" if name == "model" else out / name
    path.write_text("mine")
    if name != "model":
        (out / "model").rmdir()
    with pytest.raises(ValueError, match=rf"holds {name}.*--overwrite, or another --out"):
        started(text, out)
    assert path.read_text() == "mine"
    assert [file.name for file in out.iterdir()] == [name]
    model = {name: getattr(CONFIG, name) for name in ("embed_dim", "num_layers", "num_heads", "pattern")}
    session.start(text.paths, out, model, dataclasses.asdict(RECIPE), overwrite=True)
    assert sorted(file.name for file in out.iterdir()) == ["checkpoint", "options.json"]


def test_a_run_killed_before_its_first_checkpoint_starts_again(text, tmp_path):
    out = tmp_path / "run"
    left = out / "checkpoint" / ".new-step-0"
    left.mkdir(parents=True)
    (left / "rank-0-of-1.safetensors").write_bytes(b"half")
    session.remember(out, {"save_every": 100, "keep": 2, "held_out": 2, "sample": 0})
    assert finish(started(text, out), out)[0] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_saves_and_resumes(number, text, tmp_path, monkeypatch):
    straight = started(text, tmp_path / "straight")
    finish(straight, tmp_path / "straight")
    out = tmp_path / "run"
    training = started(text, out)
    step = training.step

    def interrupted_step():
        if training.finished_steps == 2:
            os.kill(os.getpid(), number)
        return step()

    monkeypatch.setattr(training, "step", interrupted_step)
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    code, printed = finish(training, out)
    assert code == 128 + number
    assert "stopped after step 3 of 6; --resume" in printed
    assert not (out / "figures.jsonl").exists()
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    resumed = session.resume([], out, {}, {})
    assert finish(resumed, out)[0] == 0
    assert resumed.losses == straight.losses


def test_progress_bar_on_a_terminal(text, tmp_path):
    console = terminal.console(file=io.StringIO(), force_terminal=True, width=120)
    _, printed = finish(started(text, tmp_path / "run"), tmp_path / "run", console)
    assert "6/6" in printed
    assert "bits/byte" in printed
    assert "tokens/s" in printed


def test_sample_shows_control_bytes_as_dots(text):
    training = Training(CONFIG, RECIPE, text)
    sample = session.write_sample(training, training.model, 16)
    assert all(c.isprintable() or c in "\n\t" for c in sample)


def test_default_pattern():
    assert session.default_pattern(8192, 16) == Dilated((512, 2048, 8192), (1, 4, 16))
    assert session.default_pattern(8192, 4) == Dilated((512, 2048, 8192), (1, 4, 4))
    assert session.default_pattern(100, 4) == Dilated((100,), (1,))
    for heads in range(1, 20):
        assert session.default_pattern(8192, heads).unserved(heads) == (0, 0, 0)


def test_the_patterns_of_train_and_demo_serve_every_residue(text, tmp_path):
    long = dataclasses.asdict(RECIPE) | {"context": 512}
    for heads, kv_heads in ((4, None), (4, 2), (2, None)):
        fields = {"embed_dim": 16, "num_layers": 1, "num_heads": heads, "num_kv_heads": kv_heads}
        config = session.start(text.paths, tmp_path / f"{heads}-{kv_heads}", fields, long).config
        assert set(config.pattern.unserved(config.kv_heads)) == {0}


def test_a_pattern_that_leaves_residues_to_nobody_is_told(text):
    config = dataclasses.replace(CONFIG, pattern=Dilated((16, 64), (1, 16)))
    assert "residues that no head serves: 14 of 16 in branch (64, 16)" in session.forecast(
        Training(config, RECIPE, text)
    )


def test_what_is_told_before_the_first_step(text):
    told = session.forecast(Training(CONFIG, RECIPE, text))
    assert "6 steps of 128 bytes" in told
    assert "by heart" not in told
    training = Training(CONFIG, dataclasses.replace(RECIPE, steps=2460), text)
    learnt = len(text.content) - 3 * 65  # without the held-out windows
    assert f"{sum(p.numel() for p in training.model.parameters()):,} parameters" in session.forecast(training)
    assert f"{learnt:,} bytes of text" in session.forecast(training)
    assert f"{2460 * 128 / learnt:.0f} epochs of this text: it will be learned by heart" in session.forecast(training)


def test_the_time_that_is_left_is_told(text, tmp_path, monkeypatch):
    monkeypatch.setattr(terminal, "PLAIN_SECONDS", 0.0)
    training = started(text, tmp_path / "run", steps=8)
    _, printed = finish(training, tmp_path / "run")
    assert "step 5/8" in printed
    assert "bits/byte" in printed
    assert " left" in printed
