"""The examples run, learn something in few steps, and have their line in examples/README.md."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
FILES = sorted(FOLDER.glob("*.py"))


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_long_bert():
    found = load("long_bert").main(steps=60)
    assert found["fine-tuned at 512 bytes, dilated"] > found["untrained"] + 0.05


def test_slides():
    found = load("slides").main(steps=4)
    assert found["largest difference of a slide in a batch to the slide alone"] <= 1e-5


def test_byte_lm():
    losses, sample = load("byte_lm").main(steps=10, prompt="import ")
    assert losses["trained"] < losses["untrained"] - 1
    assert sample.startswith("import ")
    assert len(sample.encode()) > 30


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_has_its_line(file):
    assert f"| [{file.name}]({file.name}) |" in (FOLDER / "README.md").read_text(encoding="utf-8")
    assert f"def test_{file.stem}(" in Path(__file__).read_text(encoding="utf-8")
