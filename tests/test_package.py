"""Every Python file of the project parses as Python 3.10 and is named after a concept."""

from __future__ import annotations

import ast
import re
import zlib
from pathlib import Path

import pytest
from packaging.version import Version

import dilated_attention

ROOT = Path(__file__).parent.parent
FILES = sorted(
    path.relative_to(ROOT)
    for path in ROOT.rglob("*.py")
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)  # .venv
)
SYNTAX = (3, 10)
EMPTY_WORDS = re.compile(r"(utils?|helpers?|common|misc|improved|optimized|production|v\d+)")


def empty_words(path: Path) -> list[str]:
    return [word for part in path.with_suffix("").parts for word in part.split("_") if EMPTY_WORDS.fullmatch(word)]


def test_there_are_files_to_check():
    assert Path("src/dilated_attention/__init__.py") in FILES
    assert Path("tests/test_package.py") in FILES


@pytest.mark.parametrize("path", FILES, ids=str)
def test_parses_as_the_oldest_python(path):
    ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path), feature_version=SYNTAX)


def test_newer_syntax_is_refused():
    with pytest.raises(SyntaxError):
        ast.parse("try:\n    pass\nexcept* ValueError:\n    pass", feature_version=SYNTAX)


def test_modules_are_named_after_concepts():
    assert {str(path): words for path in FILES if (words := empty_words(path))} == {}


@pytest.mark.parametrize("name", ["utils.py", "bench/helpers.py", "common/__init__.py", "ring_v2.py", "_utils.py"])
def test_an_empty_name_is_found(name):
    assert empty_words(Path(name))


def test_the_library_works_without_what_only_commands_and_pictures_need(fresh_python):
    """Runs in an interpreter where rich, matplotlib and the lab cannot be imported."""
    fresh_python(
        """
        import sys

        sys.modules["rich"] = sys.modules["matplotlib"] = sys.modules["dilated_attention_lab"] = None
        import torch
        from dilated_attention import BlockLayout, Dilated, dilated_attention

        q = torch.randn(1, 16, 2, 8)
        assert dilated_attention(q, q, q, [8, 16], [1, 2]).shape == q.shape
        for draw in (lambda: BlockLayout.local(64, 16, 16).plot(), lambda: Dilated((8,), (1,)).plot(16)):
            try:
                draw()
            except ImportError as error:
                assert str(error) == "matplotlib is not installed: pip install matplotlib"
            else:
                raise AssertionError("drawn")
        """
    )


def test_the_library_says_where_its_commands_are(fresh_python):
    fresh_python(
        """
        import contextlib, io, runpy, sys
        from importlib import util

        find = util.find_spec
        util.find_spec = lambda name: None if name == "dilated_attention_lab" else find(name)
        with contextlib.redirect_stderr(io.StringIO()) as told:
            try:
                runpy.run_module("dilated_attention", run_name="__main__")
            except SystemExit as ended:
                assert ended.code == 2
        said = "dilated-attention: error: the commands are not installed; from a clone: pip install ./lab\\n"
        assert told.getvalue() == said, told.getvalue()
        """
    )


def test_the_import_loads_few_modules_beyond_those_of_torch(fresh_python):
    """Especially not the compiler, which takes longer to load than the rest of PyTorch."""
    loaded = fresh_python(
        """
        import sys
        import torch

        before = set(sys.modules)
        import dilated_attention
        print(*sorted(sys.modules.keys() - before), sep="\\n")
        """
    ).split()
    assert "dilated_attention.operators" in loaded
    assert len(loaded) <= 100, loaded
    assert not [name for name in loaded if name.startswith(("torch._dynamo", "torch._inductor", "triton"))]


def test_help_lists_the_commands_and_loads_none(fresh_python):
    printed = fresh_python(
        """
        import sys
        from dilated_attention_lab.commands import COMMANDS, main

        try:
            main(["--help"])
        except SystemExit as ended:
            assert ended.code == 0
        assert not {"torch", "matplotlib", "rich", "dilated_attention"} & sys.modules.keys()
        """
    )
    assert all(f"\n    {name} " in printed for name in ("demo", "train", "info", "bench", "simulate"))


def test_both_distributions_have_one_version():
    library, lab = ((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8") for folder in (".", "lab"))
    line = f'\nversion = "{dilated_attention.__version__}"\n'
    assert line in library
    assert line in lab
    assert f'"dilated-attention=={dilated_attention.__version__}"' in lab
    assert f"\nversion: {dilated_attention.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert "dilated-attention-lab" not in library  # no extra needs a distribution that may not be published


def test_the_wheel_of_the_library_is_small_and_holds_no_commands():
    """The Python files are all in one package; their size in the wheel is a zip file's size."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r"^packages = (.*?) #", project, re.MULTILINE) == ['["src/dilated_attention"]']
    assert "[project.scripts]" not in project
    files = [path for path in (ROOT / "src" / "dilated_attention").rglob("*.py") if "kernels" not in path.parts]
    assert not {"cli.py", "training", "bench", "verification.py", "conversion.py"} & {path.name for path in files}
    assert not [path for path in files if b"import unittest" in path.read_bytes()]
    # 282,000 of them without docstrings and comments
    assert sum(len(zlib.compress(path.read_bytes())) for path in files) <= 450_000


def versions(text: str, pattern: str) -> dict[str, Version]:
    return {name: Version(number) for name, number in re.findall(pattern, text, re.MULTILINE)}


def test_constraints_hold_the_ends_of_the_ranges():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    text = text[text.index("\ndependencies") : text.index("\ndocs = ")]
    text += (ROOT / "lab" / "pyproject.toml").read_text(encoding="utf-8").partition("\ndependencies")[2]
    ranges = versions(text, r'"([\w-]+)>=([\d.]+)')
    oldest, newest = (
        versions((ROOT / f"constraints-{name}.txt").read_text(encoding="utf-8"), r"^([\w-]+)==([\d.]+)")
        for name in ("oldest", "newest")
    )
    assert {"torch", "numpy", "transformers", "triton", "pytest"} <= ranges.keys()
    assert oldest.keys() == newest.keys() == ranges.keys()
    for name, bound in ranges.items():
        assert oldest[name].release[: len(bound.release)] == bound.release, name
        assert newest[name] >= oldest[name], name
