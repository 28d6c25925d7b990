"""Every measured number in README and docs comes from a file of results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dilated_attention_lab.bench import overview, result_pages, tables
from dilated_attention_lab.commands import main

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
GENERATED = result_pages.pages(RESULTS)
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
DOCUMENTS = [path for path in DOCUMENTS if path.relative_to(ROOT).as_posix().removeprefix("docs/") not in GENERATED]
# The notebook and the decisions are dated records of what was seen, and name their files where there are any.
LOGS = ("notebook.md", "decisions")

CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
UNIT = (
    r"(x|×|times as (?:fast|slow|many|much|long)|ms|µs|[GT]FLOP/s|tokens/s|bits per byte|[GM]i?B"
    r"|% (?:faster|slower|less|more))"
)
VERDICT = re.compile(r"\b(?:met|missed|unmet)\b")
MEASURED = re.compile(rf"\d[\d.,]* ?{UNIT}(?![\w/])(?! ?\d)")


def claims(text: str) -> list[str]:
    """Return what looks like a measured number, or a statement about a bar.

    Skips code and the text between the comments of results.
    """
    prose = CODE.sub("", tables.SPAN.sub("", text))
    return [found[0] for pattern in (MEASURED, VERDICT) for found in pattern.finditer(prose)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_say_what_the_results_say(document):
    text = document.read_text(encoding="utf-8")
    assert tables.render(text, RESULTS) == text, "run: python -m dilated_attention plot"
    if not set(LOGS) & set(document.relative_to(ROOT).parts):
        assert claims(text) == [], "write it as <!-- results: FILE name=... --><!-- end of results -->"


def test_generated_pages_say_what_the_results_say():
    folder = ROOT / "docs"
    stored = {
        path.relative_to(folder).as_posix() for path in [*folder.glob("machines.md"), *folder.glob("tables/**/*.md")]
    }
    assert stored == set(GENERATED), "run: python -m dilated_attention plot"
    for name, text in GENERATED.items():
        assert (folder / name).read_text(encoding="utf-8") == text, "run: python -m dilated_attention plot"
        assert "not installed" not in text


@pytest.mark.parametrize("name", overview.CHARTS)
def test_charts_show_what_the_results_say(name):
    panels = overview.CHARTS[name](RESULTS)
    assert all(series.y for panel in panels for series in panel.series)
    stored = overview.stored_digest(ROOT / "docs" / "pictures" / "measured" / f"{name}.svg")
    assert stored == overview.digest(panels), "run: python -m dilated_attention plot"
    assert f"pictures/measured/{name}.svg" in (ROOT / "docs" / "measured.md").read_text(encoding="utf-8")


def test_an_outdated_chart_is_seen_and_drawn_again(tmp_path, monkeypatch):
    panels = [overview.Panel("bars", [overview.Series("a", ["x"], [1.0])])]
    monkeypatch.setattr(overview, "CHARTS", {"one": lambda results: panels})
    (path,) = overview.draw(RESULTS, tmp_path)
    assert overview.stored_digest(path) == overview.digest(panels)
    assert list(overview.draw(RESULTS, tmp_path)) == []
    panels[0] = overview.Panel("bars", [overview.Series("a", ["x"], [2.0])])
    assert list(overview.draw(RESULTS, tmp_path)) == [path]
    assert overview.stored_digest(path) == overview.digest(panels)


def test_claims_are_found():
    assert claims("It is 1.5 x faster and takes 3 ms; 2.0 GiB, 12 GFLOP/s or 1,000 tokens/s.") == [
        "1.5 x",
        "3 ms",
        "2.0 GiB",
        "12 GFLOP/s",
        "1,000 tokens/s",
    ]
    assert claims("12 x 64 heads, 8,192 tokens, Python 3.10, 2 cores, 5 minutes, `3 ms`\n```\n4 ms\n```") == []
    assert claims('a<!-- results: f name="x" -->3 ms<!-- end of results -->b') == []
    assert claims("The bar is met at one length and missed by little at the others.") == ["met", "missed"]
    assert claims("The bar is <!-- results: f bar -->met<!-- end of results -->.") == []


@pytest.fixture
def results(tmp_path):
    dense = {"name": "forward: dense", "parameters": {"seq_len": 64, "heads": 2}, "value": 20.0, "unit": "ms"}
    dilated = {
        "name": "forward: dilated",
        "parameters": {"seq_len": 64, "heads": 2, "dilation_rates": [1, 2]},
        "value": 9.0,
        "unit": "ms",
        "over": {"dense": {"median": 0.45}},
        "bar": 10.0,
        "met": True,
    }
    refused = {**dense, "parameters": {"seq_len": 4096, "heads": 2}, "value": None, "refused": "needs 9 GiB"}
    (tmp_path / "results" / "cpu").mkdir(parents=True)
    (tmp_path / "results" / "cpu" / "a.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in (dense, dilated, refused))
    )
    return tmp_path / "results"


def test_a_table_and_a_value_are_written_and_stay(results, tmp_path, capsys):
    document = tmp_path / "page.md"
    document.write_text(
        "Dense takes <!-- results: cpu/a.jsonl name=dense seq_len=64 -->?<!-- end of results -->.\n\n"
        "<!-- results: cpu/a.jsonl -->\n<!-- end of results -->\n"
    )
    words = ["plot", str(results), "--out", str(tmp_path / "pictures"), "--documents", str(document)]
    assert main(words) == 0
    assert str(document) in capsys.readouterr().out
    text = document.read_text()
    assert "name=dense seq_len=64 -->20 ms<!-- end" in text
    assert "| figure | case | value | over dense | bar |\n" in text
    assert "| forward: dilated | 64 tokens, 2 heads, 2 branches | 9.00 ms | 0.45 x | 10, met |\n" in text
    assert "| forward: dense | 4,096 tokens, 2 heads | needs 9 GiB |  |  |\n" in text
    assert main(words) == 0
    assert "written" not in capsys.readouterr().out
    assert document.read_text() == text


def test_words_on_bars_come_from_the_rows(results):
    page = "The bar is <!-- results: cpu/a.jsonl name=dilated bar -->?<!-- end of results -->."
    assert "bar -->met<!--" in tables.render(page, results)
    path = results / "cpu" / "a.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows.append({**rows[1], "name": "forward: other", "value": 11.0, "met": False})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "bar -->not met<!--" in tables.render(page.replace("dilated", "other"), results)
    assert "bar -->met in 1 of 2<!--" in tables.render(page.replace("dilated", "forward"), results)
    table = tables.render("<!-- results: cpu/a.jsonl name=other -->\n<!-- end of results -->", results)
    assert "| forward: other | 64 tokens, 2 heads, 2 branches | 11 ms | 0.45 x | 10, not met |" in table


def test_ranges_and_ratios_to_others(results):
    page = "<!-- results: cpu/a.jsonl range -->?<!-- end of results -->"
    assert "range -->9.00 to 20 ms<!--" in tables.render(page, results)
    page = "<!-- results: cpu/a.jsonl over=dense -->?<!-- end of results -->"
    assert "over=dense -->0.45 x<!--" in tables.render(page, results)
    with pytest.raises(ValueError, match="no row fits"):
        tables.render(page.replace("over=dense", "over=flex"), results)


def test_pages_of_tables_are_split_and_removed(results, tmp_path, monkeypatch):
    path = results / "cpu" / "a.jsonl"
    environment = {"device": "a CPU", "torch": "2", "python": "3", "platform": "any", "threads": 2}
    known = {"environment": environment, "commit": "abc", "date": "2026-01-01T00:00:00Z"}
    rows = [{**json.loads(line), **known} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tmp_path / "docs"
    assert len(list(result_pages.write(results, folder))) == 2
    text = (folder / "tables" / "cpu" / "a.md").read_text()
    assert "All lines: seq_len 64; heads 2." in text
    assert "| forward: dilated | dilation_rates 1 / 2 | 9.00 ms, bar 10 |" in text
    assert "1 figures have no value" in text
    assert "needs 9 GiB" not in text
    monkeypatch.setattr(result_pages, "LONGEST", 60)
    split = {path.name for path in result_pages.write(results, folder)}
    assert {"a.md", "a-2.md"} <= split
    assert "(a-2.md)" in (folder / "tables" / "cpu" / "a.md").read_text()
    monkeypatch.undo()
    assert {path.name for path in result_pages.write(results, folder)} == split
    assert not (folder / "tables" / "cpu" / "a-2.md").exists()


def test_a_span_that_fits_nothing_is_named(results):
    for request, message in (
        ("cpu/b.jsonl", "there is no file"),
        ("cpu/a.jsonl name=flex", "no row fits"),
        ("cpu/a.jsonl name=forward", "3 rows fit; one is wanted"),
    ):
        with pytest.raises(ValueError, match=message):
            tables.render(f"<!-- results: {request} --> <!-- end of results -->", results)
