"""Every Python block of README.md and docs/**/*.md runs; every command of their shell blocks exists, and runs up to
where minutes of work would begin.

The blocks of a page run in order, in one namespace and an empty folder. `<!-- not run: REASON -->` on the line above a
block leaves it out. A page that compiles, exports or starts process groups runs in an interpreter of its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from pathlib import Path

import matplotlib
import pytest
import torch

from dilated_attention_lab.bench import command as bench
from dilated_attention_lab.commands import main
from dilated_attention_lab.training import session

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?(?P<indent> *)```(?P<kind>\w*)\n(?P<code>.*?)^(?P=indent)```",
    re.MULTILINE | re.DOTALL,
)
ALONE = re.compile(r"torch\.compile\(|torch\.export\.|torch\.distributed|init_process_group")


def python(text: str) -> str:
    """The Python of a page, each line at its own number; other lines are blank."""
    lines = [""] * (text.count("\n") + 2)
    for block in FENCE.finditer(text):
        if block["kind"] == "python" and block["reason"] is None:
            first = text.count("\n", 0, block.start("code"))
            for number, line in enumerate(block["code"].splitlines()):
                lines[first + number] = line.removeprefix(block["indent"])
    return "\n".join(lines)


def commands(text: str) -> list[list[str]]:
    """The commands of `make` and of this package in blocks of shell, or of no language."""
    found = []
    for block in FENCE.finditer(text):
        if block["kind"] in ("", "sh") and block["reason"] is None:
            for line in block["code"].replace("\\\n", " ").splitlines():
                words = shlex.split(line.strip().removeprefix("$ "), comments=True) if "`" not in line else []
                if words[:1] in (["make"], ["dilated-attention"]) or words[:3] == ["python", "-m", "dilated_attention"]:
                    found.append(words)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_blocks_run(document, tmp_path, monkeypatch, compiling_python):
    code = python(document.read_text(encoding="utf-8"))
    if not code.strip():
        return
    monkeypatch.chdir(tmp_path)
    if ALONE.search(code):
        compiling_python(code)
    else:
        exec(compile(code, str(document), "exec"), {"__name__": "__main__"})


def test_the_notebook_runs(tmp_path, monkeypatch):
    """Every code cell, in order, in one namespace; what is shown and not printed needs no notebook."""
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    notebook = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 7
    names = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        exec(compile(cell, f"cell {number}", "exec"), names)
    for text in ("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"):
        for target in re.findall(r"\]\((\.\./[^)]+)\)", text):
            assert (ROOT / "examples" / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_exist(document):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for words in commands(document.read_text(encoding="utf-8")):
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets, words
            continue
        command, *rest = words[3 if words[0] == "python" else 1 :]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as end:
            main([command, "--help"])
        assert end.value.code == 0
        for word in rest:
            if word.startswith("--"):
                assert re.search(rf"{re.escape(word.partition('=')[0])}\b", printed.getvalue()), (words, word)


# Only the options of these are checked: they read files of the reader's, or train in processes of their own.
NOT_RUN = {"compare", "demo", "generate", "convert"}
# Appended: the last one counts.
SMALLER = {"profile": ["--tokens", "256"]}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_run(document, tmp_path, monkeypatch, capsys):
    """Commands run as they are written, except for SMALLER, in a folder with the repository's results.

    A training ends before its first step, and a suite of `bench` before its first figure.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "run", lambda *arguments, **options: 0)
    monkeypatch.setattr(bench, "measure_suite", lambda *arguments: None)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("", encoding="utf-8")
    (tmp_path / "results").symlink_to(ROOT / "results")
    for words in commands(document.read_text(encoding="utf-8")):
        command, *rest = words[3 if words[0] == "python" else 1 :]
        if words[0] == "make" or command in NOT_RUN:
            continue
        here = "gpu" not in rest or torch.cuda.is_available()
        assert main([command, *rest, *SMALLER.get(command, [])]) == (0 if here else 2), capsys.readouterr().err
        if not here:
            assert "needs a GPU" in capsys.readouterr().err


def test_decisions_are_numbered_once():
    files = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    assert [file.name[:3] for file in files] == [f"{number:03}" for number in range(1, len(files) + 1)]
    for file in files:
        assert file.read_text(encoding="utf-8").startswith(f"# {file.name[:3]}: ")


def test_blocks_share_a_namespace_and_one_that_fails_is_seen(tmp_path):
    page = (
        "# A\n\n```python\na = 1\n```\n\n<!-- not run: needs a GPU -->\n```python\nboom\n```\n\n"
        "1. b\n\n    ```python\n    assert a == 2\n    ```\n"
    )
    code = python(page)
    assert code.splitlines()[3] == "a = 1"
    assert "boom" not in code
    with pytest.raises(AssertionError) as failure:
        exec(compile(code, "page.md", "exec"), {})
    assert failure.traceback[-1].lineno + 1 == page.splitlines().index("    assert a == 2") + 1
    assert commands("```\nmake demo ARGS='-k x' # why\n$ dilated-attention plot --out x\nls\n```\n") == [
        ["make", "demo", "ARGS=-k x"],
        ["dilated-attention", "plot", "--out", "x"],
    ]


def test_the_files_that_the_architecture_names_exist():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", text))
    assert len(named) > 15
    places = [ROOT, ROOT / "src" / "dilated_attention", ROOT / "lab" / "src" / "dilated_attention_lab"]
    assert [name for name in sorted(named) if not any((place / name).exists() for place in places)] == []
