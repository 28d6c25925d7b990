"""docs/tools/words.py finds each mark and leaves plain English alone; counts only fall. Pages are short and linked."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOL = ROOT / "docs" / "tools" / "words.py"
SPECIFICATION = importlib.util.spec_from_file_location("words", TOOL)
assert SPECIFICATION is not None
assert SPECIFICATION.loader is not None
words = importlib.util.module_from_spec(SPECIFICATION)
sys.modules["words"] = words
SPECIFICATION.loader.exec_module(words)

DIALECT = {
    "that of": "The time is that of one encoding.",
    "so many": "It has so many heads.",
    "is none": "A sink of -inf is none, on any row.",
    "told": "Its path is told in one line.",
    "in silence": "Floats were refused by name.",
    "a for per": "It needs four bytes a token.",
    "genitive first": "It is checked. Of these the first is taken.",
    "no X but": "It has no parameters but the projections.",
    "goes by": "The choice goes by the block before.",
    "from X on": "Kernels run from AVX2 on.",
    "stands": "Rates stand in no weight.",
    "old words": "The fault is mended.",
    "odd verbs": "Threads ask memory ahead.",
    "the one": "Take the one for the other.",
    "yet to be": "A model that is yet to be made.",
    "beside for with": "It is timed beside dense attention.",
}
PLAIN = """Return the number of keys that a query sees, or None if there are none of that kind. Rows a rank needs travel
once. It tells the caller, from row 3 to row 9, that one of them stands for the other; not one but two tiles."""


@pytest.mark.parametrize("kind", words.MARKS)
def test_each_mark_is_found(kind):
    assert [mark.kind for mark in words.marks(DIALECT[kind], "a.md")] == [kind]


def test_plain_english_has_no_marks():
    assert list(words.marks(PLAIN, "a.py", is_docstring=True)) == []


@pytest.mark.parametrize("text", ["Of each branch: its rate.", "That in which rows lie.", "What a rank computes."])
def test_beginnings_count_in_docstrings_alone(text):
    assert "beginning" in [mark.kind for mark in words.marks(text, "a.py", is_docstring=True)]
    assert "beginning" not in [mark.kind for mark in words.marks(text, "a.md")]


def test_code_links_and_comments_are_no_prose():
    page = "Text\n```python\n# so many\n```\n`told`, [a](told.md) <!-- told -->\n\nit is\nso many.\n"
    found = [mark for line, text in words.paragraphs(words.prose(page)) for mark in words.marks(text, "a.md", line)]
    assert [(mark.place, mark.kind) for mark in found] == [("a.md:7", "so many")]


def test_a_file_s_marks_are_sorted_by_area(tmp_path, monkeypatch):
    monkeypatch.setattr(words, "ROOT", tmp_path)
    path = tmp_path / "src" / "dilated_attention" / "a.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        '"""Told here."""\n\n\nclass Shown:\n    """What it is."""\n\n    def call(self):\n        """Of all."""\n'
        '        raise ValueError(f"{self} has so many rows")\n\n    def _own(self):\n        """That of x."""\n\n\n'
        'LEAST = 1\n"""In what unit."""  # so many\nparser.add_argument("--x", help="bytes a token")\n'
    )
    areas = [(area, mark.kind) for area, mark in words.of_python(path, {"Shown"})]
    assert areas.count(("public docstrings", "beginning")) == 2
    private = [kind for area, kind in areas if area == "private docstrings and comments"]
    assert sorted(private) == ["beginning", "beginning", "so many", "that of", "told"]
    assert ("errors", "so many") in areas
    assert ("help", "a for per") in areas
    header = tmp_path / "src" / "a.h"
    header.write_text("// so\n// many rows\nint x; /* told */\n")
    assert [mark.kind for _, mark in words.of_cpp(header)] == ["so many", "told"]


def test_counts_may_only_fall(tmp_path, monkeypatch, capsys):
    stored = tmp_path / "words.json"
    monkeypatch.setattr(words, "STORED", stored)
    mark = words.Mark("a.md:1", "told", "told")
    for count, code, kept in ((3, 0, 3), (2, 0, 2), (4, 1, 2)):
        monkeypatch.setattr(words, "collect", lambda count=count: {"docs": [mark] * count})
        assert words.main(["--update"]) == code
        assert json.loads(stored.read_text()) == {"docs": kept}
    assert "docs: 4 marks, stored 2: too many" in capsys.readouterr().out
    assert words.main(["--list", "docs"]) == 1
    assert "a.md:1: told: told" in capsys.readouterr().out


def test_readme_and_documents_are_free_of_it():
    stored = json.loads(words.STORED.read_text(encoding="utf-8"))
    assert stored["README"] == stored["docs"] == 0


LONGEST, ALL = 2500, 35_000


def counted() -> dict[str, int]:
    """Words of each page below docs/ that a person writes; generated pages, the API's and the notebook apart."""
    found = {}
    for path in sorted((ROOT / "docs").rglob("*.md")):
        name = path.relative_to(ROOT / "docs").as_posix()
        if name != "notebook.md" and not f"docs/{name}".startswith(words.GENERATED):
            found[name] = len(path.read_text(encoding="utf-8").split())
    return found


def test_pages_are_short():
    assert {name: count for name, count in counted().items() if count > LONGEST} == {}
    assert sum(counted().values()) <= ALL
    tables = {
        path.name: len(path.read_text(encoding="utf-8").split()) for path in (ROOT / "docs" / "tables").rglob("*.md")
    }
    assert {name: count for name, count in tables.items() if count > LONGEST} == {}


def test_every_page_is_reached():
    """By the navigation, or by links from a page that is; the site itself lists the decisions."""
    docs = ROOT / "docs"
    waiting = re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2])
    waiting += [f"decisions/{path.name}" for path in (docs / "decisions").glob("[0-9]*.md")]
    reached: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in reached or not (docs / name).is_file():
            continue
        reached.add(name)
        for target in re.findall(r"\]\(([\w./-]+\.md)", (docs / name).read_text(encoding="utf-8")):
            place = (docs / name).parent / target
            if place.resolve().is_relative_to(docs.resolve()):
                waiting.append(place.resolve().relative_to(docs.resolve()).as_posix())
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} - {"notebook.md"}
    assert pages - reached == set()
