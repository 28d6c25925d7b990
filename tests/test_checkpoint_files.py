"""Checkpoints of a run on disk: killed at every operation, damaged in every file, written and read by any number of
ranks. Ranks are threads here; `test_train_ranks.py` and `explore_kills.py` have processes."""

from __future__ import annotations

import ast
import dataclasses
import errno
import hashlib
import json
import math
import os
import pickle
import random
import re
import resource
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dilated_attention import storage
from dilated_attention.models import (
    GigaPathConfig,
    GigaPathSlideEncoder,
    LongNetConfig,
    LongNetLM,
    LongViT,
    LongViTConfig,
)
from dilated_attention.models.pretrained import Pretrained
from dilated_attention.patterns import Dilated
from dilated_attention.storage import SUMS
from dilated_attention_lab.commands import main
from dilated_attention_lab.training.checkpoint import Alone, Piece, newest, steps, write
from dilated_attention_lab.training.loop import Recipe, Training, read_checkpoint
from dilated_attention_lab.training.text import read_text

SIZES = (1, 2, 3)


class Thread:
    """One of several ranks that are threads of this process."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, values: list) -> None:
        self.rank, self.size, self.barrier, self.values = rank, size, barrier, values

    def gathered(self, value: bytes) -> list[bytes]:
        self.values[self.rank] = value
        self.barrier.wait(30)
        found = list(self.values)
        self.barrier.wait(30)
        return found

    def greatest(self, value: int) -> int:
        return max(self.gathered(value))


def together(size: int, function: Callable) -> list:
    """Return what `function` returns for each of `size` ranks.

    Raises the first error, preferably one that is not of a lost peer.
    """
    barrier, values = threading.Barrier(size), [None] * size

    def rank(number: int) -> object:
        try:
            return function(Thread(number, size, barrier, values))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(rank, number) for number in range(size)]
    errors = [future.exception() for future in futures]
    first = [error for error in errors if error and not isinstance(error, threading.BrokenBarrierError)]
    if first:
        raise first[0]
    return [future.result() for future in futures]


def state(step: int) -> dict[str, Tensor]:
    wide = torch.arange(30).reshape(10, 3) + step
    return {"wide": wide.float(), "short": torch.full((2,), step), "scalar": torch.tensor(step), "all": wide[:, 0] + 1}


def pieces(step: int, peers) -> dict[str, Piece]:
    """Rows of two of the tensors, of one fewer than some worlds have ranks; the whole of two."""
    found = {}
    for name, tensor in state(step).items():
        if name in ("wide", "short"):
            rows = -(-len(tensor) // peers.size)
            first = min(len(tensor), rows * peers.rank)
            found[name] = Piece(tensor[first : first + rows].clone(), first, tuple(tensor.shape))
        else:
            found[name] = Piece.whole(tensor)
    return found


def save(folder: Path, step: int, size: int = 1, keep: int = 2) -> None:
    paths = together(size, lambda peers: write(folder, step, pieces(step, peers), {"n": step}, keep=keep, peers=peers))
    assert paths == [folder / f"step-{step}"] * size


def check(folder: Path, size: int = 1) -> int:
    """The step of the newest whole checkpoint, which every one of `size` ranks reads to the last bit."""

    def read(peers) -> int:
        found = newest(folder, peers)
        step = found.about["n"]
        mine = {name: Piece(torch.zeros_like(p.tensor), p.first_row, p.shape) for name, p in pieces(-9, peers).items()}
        found.read(mine)
        for name, piece in pieces(step, peers).items():
            assert torch.equal(mine[name].tensor, piece.tensor)
        return step

    (step,) = set(together(size, read))
    return step


@pytest.mark.parametrize("writers", SIZES)
def test_any_number_of_ranks_reads_what_any_number_wrote(writers, tmp_path):
    save(tmp_path, 3, writers)
    assert [check(tmp_path, readers) for readers in (1, 2, 3, 4)] == [3, 3, 3, 3]


def test_older_ones_are_kept_and_later_ones_make_way(tmp_path):
    for step in (0, 2, 9, 10, 11):
        save(tmp_path, step)
    assert steps(tmp_path) == [9, 10, 11]
    save(tmp_path, 12, keep=0)
    assert steps(tmp_path) == [12]
    save(tmp_path, 0)  # --overwrite
    assert steps(tmp_path) == [0]


def flipped(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def bits(path: Path, count: int) -> list[int]:
    """The first and the last, and random ones; all, of a small file."""
    size = path.stat().st_size * 8
    return [0, size - 1, *random.Random(path.name).sample(range(size), min(count, size))]


@pytest.mark.parametrize("size", SIZES)
def test_a_flipped_bit_of_any_file_is_noticed(size, tmp_path):
    save(tmp_path, 0, size)
    files = sorted((tmp_path / "step-0").iterdir())
    assert len(files) == size + 2
    for file in files:
        for bit in bits(file, 60):
            flipped(file, bit)
            with pytest.raises(ValueError, match=rf"step-0/{file.name}: |SHA256SUMS|No such file"):
                newest(tmp_path, Alone())
            flipped(file, bit)
    for file in files:  # whichever rank looks at it
        flipped(file, 77)
        with pytest.raises(ValueError, match="no whole checkpoint"):
            together(3, lambda peers: newest(tmp_path, peers))
        flipped(file, 77)
    assert check(tmp_path) == 0


def test_a_flipped_bit_of_a_model_is_noticed(tmp_path):
    config = LongNetConfig(embed_dim=4, num_layers=1, num_heads=1, vocab_size=3, pattern=None)
    LongNetLM(config).save_pretrained(tmp_path)
    for file in sorted(tmp_path.iterdir()):
        for bit in bits(file, 50):
            flipped(file, bit)
            with pytest.raises(ValueError, match=r"damaged|No such file"):
                LongNetLM.from_pretrained(tmp_path)
            flipped(file, bit)
    LongNetLM.from_pretrained(tmp_path)


def test_lines_end_alike_on_every_system(monkeypatch, tmp_path):
    """Windows writes a line's end as two bytes where nothing else is asked for."""
    write_text = Path.write_text

    def windows(path: Path, text: str, encoding=None, errors=None, newline=None) -> int:
        return write_text(path, text, encoding, errors, "\r\n" if newline is None else newline)

    monkeypatch.setattr(Path, "write_text", windows)
    save(tmp_path, 0)
    assert check(tmp_path) == 0


@pytest.mark.parametrize("size", SIZES)
def test_the_one_before_serves_where_the_newest_is_damaged(size, tmp_path):
    for step in (0, 1, 2):
        save(tmp_path, step, size)
    flipped(tmp_path / "step-2" / f"rank-{size - 1}-of-{size}.safetensors", 300)
    (tmp_path / "step-1" / "index.json").unlink()
    with pytest.warns(UserWarning, match=r"step-2/rank-.* damaged.*; .*step-1/index.json.*; continuing from step-0"):
        assert check(tmp_path) == 0
    with pytest.warns(UserWarning, match=r"step-2/rank-.*; .*step-1/index.json.*; continuing from step-0"):
        assert check(tmp_path, 2) == 0
    save(tmp_path, 1, size)
    assert steps(tmp_path) == [0, 1]
    assert check(tmp_path) == 1


class Killed(BaseException):
    """Nothing of this process runs after it."""


@contextmanager
def killed_at(number: int) -> Iterator[list[int]]:
    """The process dies in the operation with this number, half done, of those that change what is on the disk."""
    counted, lock = [0], threading.Lock()

    def dying(operation: Callable, half: Callable) -> Callable:
        def call(*arguments: object, **options: object) -> object:
            with lock:
                counted[0] += 1
                if counted[0] == number:
                    half(*arguments)
                if counted[0] >= number:
                    raise Killed
                return operation(*arguments, **options)

        return call

    def half_removed(folder: Path, *_: object) -> None:
        for path in [path for path in Path(folder).rglob("*") if path.is_file()][::2]:
            path.unlink()

    def nothing(*_: object) -> None:
        pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "save_file", dying(storage.save_file, lambda _, path, __: path.write_bytes(b"half")))
        patch.setattr(Path, "write_text", dying(Path.write_text, lambda path, text: path.write_bytes(b"half")))
        patch.setattr(shutil, "rmtree", dying(shutil.rmtree, half_removed))
        for module, name in ((Path, "mkdir"), (os, "replace"), (os, "fsync")):
            patch.setattr(module, name, dying(getattr(module, name), nothing))
        yield counted


@pytest.mark.parametrize(("size", "damaged"), [(1, False), (2, True)])
def test_a_kill_at_any_operation_of_a_save_loses_nothing(size, damaged, tmp_path):
    """A save of step 3, or, where a damaged one of step 3 lies there, of step 3 anew."""
    for step in (0, 1, 2):
        save(tmp_path / "before", step, 1 + step % 2)
    if damaged:
        save(tmp_path / "before", 3, size)
        flipped(tmp_path / "before" / "step-3" / "index.json", 99)
    number, ended, found = 0, False, set()
    while not ended:
        number += 1
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "before", folder)
        with killed_at(number):
            try:
                save(folder, 3, size, keep=1)
                ended = True
            except Killed:
                pass
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*continuing from step-2")
            found.add(check(folder))
        save(folder, 4, size, keep=1)
        assert check(folder) == 4
        assert len(list(folder.iterdir())) == 2  # nothing of the killed one is left
    assert number > 10 * size
    assert found == {2, 3}


def test_a_full_disk_loses_nothing(tmp_path):
    save(tmp_path, 0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match=r"File too large.*step-1/rank-0-of-1.safetensors"):
            save(tmp_path, 1)
        with pytest.raises(OSError, match=rf"File too large: '{tmp_path}/words.txt'"):
            storage.write_text(tmp_path / "words.txt", "x" * 200)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert check(tmp_path) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["step-0"]


def test_two_processes_write_one_file(tmp_path, monkeypatch):
    """The last one wins; what a killed one left goes after an hour."""
    path, save_file = tmp_path / "a.safetensors", storage.save_file
    young, old = tmp_path / ".new-a.safetensors-young", tmp_path / ".new-a.safetensors-old"
    for left in (young, old):
        left.mkdir()
        (left / path.name).write_bytes(b"half")
    os.utime(old, (0, 0))

    def meanwhile(tensors, file, metadata):
        save_file(tensors, file, metadata)
        monkeypatch.undo()
        storage.write_tensors(path, {"x": torch.zeros(2)}, {})

    monkeypatch.setattr(storage, "save_file", meanwhile)
    storage.write_tensors(path, {"x": torch.ones(2)}, {})
    assert torch.equal(load_file(path)["x"], torch.ones(2))
    assert sorted(tmp_path.iterdir()) == [young, path]


def test_every_rank_hears_of_a_disk_that_is_full_on_one(tmp_path, monkeypatch):
    save(tmp_path, 0, 3)
    save_file = storage.save_file

    def full(tensors, path, metadata):
        if "rank-1" in path.name:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        save_file(tensors, path, metadata)

    def errors(peers) -> str:
        with pytest.raises(OSError, match="step-1") as raised:
            write(tmp_path, 1, pieces(1, peers), {"n": 1}, keep=2, peers=peers)
        return raised.value.strerror

    monkeypatch.setattr(storage, "save_file", full)
    other = "rank 1 could not write"
    assert together(3, errors) == [other, "No space left on device", other]
    monkeypatch.undo()
    assert check(tmp_path) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["step-0"]


CONFIG = LongNetConfig(embed_dim=16, num_layers=1, num_heads=2, pattern=Dilated((16, 64), (1, 4)))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run's folder, its text and one checkpoint of one step."""
    out = tmp_path_factory.mktemp("run")
    (out / "text.txt").write_bytes(bytes(i * i % 251 for i in range(5000)))
    training = Training(CONFIG, Recipe(context=64, batch_size=2, steps=2), read_text([out / "text.txt"]))
    training.step()
    training.save(out / "checkpoint")
    return out


@pytest.fixture
def copied(run, tmp_path) -> Path:
    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run"


def signed(step: Path) -> None:
    """Make the digests those of the files: whoever plants a file can do that too."""
    names = sorted(path.name for path in step.glob("[!.]*") if path.name != SUMS)
    lines = [f"{hashlib.sha256((step / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (step / SUMS).write_text("".join(lines))


def refusal(capsys, *words: object) -> str:
    """The one line of a command that ends with code 2."""
    code = main([str(word) for word in words])
    error = capsys.readouterr().err
    assert (code, len(error.splitlines())) == (2, 1), error
    return error


FORMS = {
    "no JSON": (lambda f: "{", "index.json: Expecting property name"),
    "a list": (lambda f: [], "format is 'list'"),
    "deep": (lambda f: "[" * 100_000, "index.json: "),
    "format": (lambda f: {**f, "format": "x"}, "format is 'x'"),
    "recipe": (lambda f: {**f, "recipe": {"depth": 1}}, "index.json: .*depth"),
    "recipe a list": (lambda f: {**f, "recipe": []}, r"recipe=\[\]: must be of type dict"),
    "no config": (lambda f: {**f, "config": {}}, "missing field"),
    "a width": (lambda f: {**f, "config": {**f["config"], "embed_dim": 1 << 40}}, "embed_dim=1099511627776: must"),
    "another width": (lambda f: {**f, "config": {**f["config"], "embed_dim": 32}}, "embedding.weight has shape"),
    "losses": (lambda f: {**f, "losses": [1.0, "x"]}, "losses: must be a list of floats"),
    "more losses": (lambda f: {**f, "losses": [1.0, 2.0]}, "losses: 2 of them, but 1 seconds"),
    "paths": (lambda f: {**f, "paths": [3]}, "index.json: "),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_index_of_a_wrong_form_is_one_line(form, copied, capsys):
    step = copied / "checkpoint" / "step-1"
    change, message = FORMS[form]
    value = change(json.loads((step / "index.json").read_text()))
    (step / "index.json").write_text(value if isinstance(value, str) else json.dumps(value))
    signed(step)
    error = refusal(capsys, "train", "--resume", "--out", copied)
    assert "step-1" in error
    assert re.search(message, error), error


@pytest.mark.parametrize("name", ["embed_dim", "mlp_dim"])
def test_a_model_of_a_hostile_size_is_not_made_to_generate(name, copied, capsys):
    step = copied / "checkpoint" / "step-1"
    fields = json.loads((step / "index.json").read_text())
    fields["config"][name] = 1 << 24
    (step / "index.json").write_text(json.dumps(fields))
    signed(step)
    assert "has shape" in refusal(capsys, "generate", copied, "--bytes", 1)


def test_tensors_of_a_wrong_form_are_one_line(copied, capsys):
    step = copied / "checkpoint" / "step-1"
    shard = step / "rank-0-of-1.safetensors"
    whole = load_file(shard)
    for name, tensor, message in (
        ("rng.global", torch.zeros(5056, dtype=torch.uint8), "rng.global is no state of a generator"),
        ("rng.batches", torch.zeros(5056), r"rng.batches is of torch.float32, expected torch.uint8"),
        ("model.norm.weight", torch.zeros(15), r"model.norm.weight has shape \(15,\), expected \(16,\)"),
        ("optimizer.step.norm.weight", None, "lacks optimizer.step.norm.weight"),
    ):
        changed = {key: x for key, x in {**whole, name: tensor}.items() if x is not None}
        save_file(changed, shard)
        signed(step)
        assert re.search(message, refusal(capsys, "train", "--resume", "--out", copied))


def test_rows_of_ranks_that_do_not_go_together_are_one_line(copied, capsys):
    step = copied / "checkpoint" / "step-1"
    shard = step / "rank-0-of-1.safetensors"
    shard.rename(step / "rank-0-of-2.safetensors")
    for name, tensor in (
        ("model.embedding.weight", torch.zeros(1, 17)),
        ("optimizer.step.norm.weight", torch.ones(())),
    ):
        save_file({name: tensor}, step / "rank-1-of-2.safetensors")
        signed(step)
        error = refusal(capsys, "train", "--resume", "--out", copied)
        assert re.search(f"rank-1-of-2.safetensors: {name} has shape .*, which does not go on", error), error
    signed(step)
    (step / "rank-1-of-2.safetensors").rename(step / "rank-3-of-4.safetensors")
    signed(step)
    assert "rank-1-of-2.safetensors: cannot be read" in refusal(capsys, "train", "--resume", "--out", copied)


def test_what_cannot_be_written_is_one_line(run, tmp_path, capsys, monkeypatch):
    tiny = ["--dim", 16, "--layers", 1, "--heads", 2, "--context", 64, "--steps", 2, "--save-every", 1]
    assert "cannot be written" in refusal(capsys, "train", run / "text.txt", "--out", run / "text.txt", *tiny)
    full = storage.save_file

    def later(tensors, path, metadata):
        if "step-1" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        full(tensors, path, metadata)

    monkeypatch.setattr(storage, "save_file", later)
    error = refusal(capsys, "train", run / "text.txt", "--out", tmp_path, *tiny)
    assert re.search("rank-0-of-1.safetensors: cannot be written .No space left on device.; --resume continues", error)
    assert read_checkpoint(tmp_path / "checkpoint")[1].losses == ()


def test_only_regular_files_are_read(copied, tmp_path, capsys):
    """A pipe would wait for its writer, a device would never end."""
    pipe, zero = tmp_path / "pipe", Path("/dev/zero")
    os.mkfifo(pipe)
    for path in (pipe, zero):
        assert f"{path}: not a regular file" in refusal(capsys, "train", path, "--out", tmp_path / "new")
        assert f"{path}: not a regular file" in refusal(capsys, "convert", path, tmp_path / "new", "--kind", "gigapath")
        assert f"{path}: not a regular file" in refusal(capsys, "generate", tmp_path, "--prompt-file", path)
    assert not (tmp_path / "new").exists()
    LongNetLM(CONFIG).save_pretrained(tmp_path / "model")
    for folder, command in (
        (copied / "checkpoint" / "step-1", ["train", "--resume", "--out", copied]),
        (tmp_path / "model", ["generate", tmp_path / "model"]),
    ):
        for file in sorted(folder.iterdir()):
            moved = file.rename(tmp_path / file.name)
            os.mkfifo(file)
            assert f"{file}: not a regular file" in refusal(capsys, *command)
            file.unlink()
            file.symlink_to(zero)
            assert f"{file}: not a regular file" in refusal(capsys, *command)
            file.unlink()
            moved.rename(file)


class Planted:
    """Unpickling it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("form", ["raw", "old", "legacy", "zip"])
def test_planted_code_never_runs(form, copied, tmp_path, capsys):
    """The code is in every file that a command, torch.distributed.checkpoint or pickle would read."""
    mark = tmp_path / "mark"

    def plant(file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        if form in ("raw", "old"):
            file.write_bytes(pickle.dumps(Planted(mark), protocol=2 if form == "old" else 5))
        else:
            with file.open("wb") as opened:
                torch.save({"model": Planted(mark)}, opened, _use_new_zipfile_serialization=form == "zip")

    plant(tmp_path / "control")
    torch.load(tmp_path / "control", weights_only=False) if form in ("legacy", "zip") else pickle.loads(
        (tmp_path / "control").read_bytes()
    )
    assert mark.exists()  # what would have happened
    mark.unlink()

    LongNetLM(CONFIG).save_pretrained(tmp_path / "model")
    step, model = copied / "checkpoint" / "step-1", tmp_path / "model"
    resume, generate = ["train", "--resume", "--out", copied, "--sample", 0], ["generate", model, "--bytes", 4]
    cases: list[tuple[Path, list, int]] = []
    if form in ("raw", "zip"):
        for name in ("step-1/.metadata", "step-1/__0_0.distcp", "../checkpoint.safetensors"):
            plant(copied / "checkpoint" / name)
        plant(model / "pytorch_model.bin")
        cases += [(file, resume, 2) for file in sorted(step.glob("[!._]*"))]
        cases += [(file, generate, 2) for file in (model / name for name in ("config.json", "model.safetensors", SUMS))]
        cases += [(tmp_path / "base.json", ["bench", "check", "--baseline", tmp_path / "base.json"], 2)]
        rows, page = tmp_path / "results" / "cpu" / "blocks.jsonl", tmp_path / "page.md"
        page.write_text('<!-- results: cpu/blocks.jsonl name="any" -->\n<!-- end of results -->\n')
        cases += [(rows, ["plot", rows.parents[1], "--documents", page], 2)]
        cases += [(rows.with_name("compare.jsonl"), ["plot", rows.parents[1]], 2)]
        cases += [(tmp_path / "text", ["train", tmp_path / "text", "--out", tmp_path / "out"], 2)]  # short, but read
    weights = tmp_path / "weights"
    branches = ["--segments", "16", "--rates", "1"]
    cases += [(weights, ["convert", weights, tmp_path / "out", "--kind", "torchscale", *branches], 2)]
    cases += [(weights, ["convert", weights, tmp_path / "out", "--kind", kind], 2) for kind in ("gigapath", "longvit")]
    for file, words, expected in cases:
        before = file.read_bytes() if file.exists() else None
        plant(file)
        listed = (file.parent / SUMS).exists() and file.name != SUMS
        for trusted in (False, True)[: 1 + listed]:
            if trusted:
                signed(file.parent)  # whoever plants a file writes its digest too
            code = main([str(word) for word in words])
            error = capsys.readouterr().err
            assert not mark.exists(), (file, words)
            assert (code, len(error.splitlines())) == (expected, 1), (file, error)
        if before is not None:
            file.write_bytes(before)
            if listed:
                signed(file.parent)
    for command in (resume, generate) if form == "raw" else ():  # with the files that they do not read
        assert main([str(word) for word in command]) == 0
        assert not mark.exists()


def test_no_module_unpickles_by_its_own():
    """Names that read pickles, evaluate text or load arrays, anywhere in the package."""
    found = []
    for path in sorted(Path(storage.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                module = getattr(node, "module", None) or ""
                names = [f"{module}.{alias.name}".strip(".") for alias in node.names]
                found += [
                    (path.name, name)
                    for name in names
                    if re.match(
                        r"(pickle|cloudpickle|dill|joblib|shelve|marshal|torch\.distributed\.checkpoint)\b", name
                    )
                ]
            elif isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
                if name in ("eval", "exec", "np.load", "numpy.load") or (name == "torch.load" and not safe):
                    found.append((path.name, name))
    assert found == [("checkpoints.py", "pickle")]  # for the name of its error


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", [LongNetLM, GigaPathSlideEncoder, LongViT])
def test_a_config_of_any_value_is_made_or_refused(kind, tmp_path):
    """Quickly, by one line that names the file: nothing of a hostile size is made first."""
    values = [None, True, -1, 0, 3, 1 << 40, 10**400, 1e308, math.nan, "x", "", [], {}, [[]], [1] * 9, {"a": 1}]
    values += [1_000_000]
    pattern = Dilated((16,), (1,))
    vectors = LongNetConfig(
        embed_dim=16, num_layers=1, num_heads=2, vocab_size=None, positions=None, pattern=pattern, final_norm=False
    )
    config = {
        LongNetLM: dataclasses.replace(vectors, vocab_size=4),
        GigaPathSlideEncoder: GigaPathConfig(in_chans=4, encoder=vectors),
        LongViT: LongViTConfig(image_size=64, encoder=vectors),
    }[kind]
    kind(config).save_pretrained(tmp_path)
    (tmp_path / "SHA256SUMS").unlink()
    fields = json.loads(config.to_json())
    holders = [fields, fields["pattern"]] if kind is LongNetLM else [fields]
    assert refused(kind, tmp_path) is None
    for holder, name in [(fields, name) for fields in holders for name in fields]:
        before = holder[name]
        for value in [*values, *[[1] * 1_000_000] * (name == "segment_lengths")]:
            holder[name] = value
            (tmp_path / "config.json").write_text(json.dumps(fields))
            begin = time.monotonic()
            error = refused(kind, tmp_path)
            assert error is None or error.startswith(str(tmp_path)), (name, value)
            assert error is None or len(error.splitlines()) == 1
            assert time.monotonic() - begin < 20, (name, value)
            if value == 1 << 40 and name in ("embed_dim", "num_layers", "num_heads"):
                assert f"config.json: configuration: {name}={value}: must be" in error
        holder[name] = before


def refused(model: type[Pretrained], folder: Path) -> str | None:
    try:
        model.from_pretrained(folder)
    except ValueError as error:
        return str(error)
    return None
