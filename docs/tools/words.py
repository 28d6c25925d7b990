"""Count marks of the project's old dialect, and fail if an area has more of them than stored in words.json.

    python docs/tools/words.py                 print the counts; exit code 1 if one is above its stored value
    python docs/tools/words.py --list docs     print every mark of an area with its place
    python docs/tools/words.py --update        store counts that fell; no stored count rises

The marks are phrases that readers had to read twice: a docstring that begins with "Of" or "That", "that of", "so many",
"a token" for "per token". CONTRIBUTING.md says what to write instead. `make check` runs this.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
STORED = Path(__file__).with_name("words.json")
LOGS = ("docs/notebook.md", "docs/decisions/")  # dated records: not rewritten, not counted
GENERATED = ("docs/tables/", "docs/machines.md")

UNITS = (
    "batch|block|branch|byte|call|case|channel|figure|head|job|key|layer|line|message|node|page|pair|pattern|process"
)
UNITS += "|program|query|rank|round|row|sample|score|segment|shape|slide|step|tile|token|transfer|variant|vector|word"
COUNTED = r"bits|bytes?|calls?|costs?|each|entr(?:y|ies)|figures?|heads?|keys?|lines?|lists?|logit|longs?|messages?|ms"
COUNTED += r"|multiplications|numbers?|objects?|once|one|places?|programs?|queries|rows?|seconds?|tasks?|thread|time"
COUNTED += r"|times|tokens?|twice|vectors?|work"
VERBS = "computes|does|has|holds|keeps|may|needs|reads|receives|sees|sends|serves|takes|tokens|will|would"
MARKS = {
    "that of": r"\b[Tt]hat of\b",
    "so many": r"\bso many\b",
    "is none": r"(?<!there )\b(?:is|are|was|were) none\b(?! of)",
    "told": r"\b[Tt]old\b",
    "in silence": r"\bin silence\b|\bby halves\b|\b(?:refused?|named?|asked) by name\b|\bwithout a word\b",
    "a for per": rf"\b(?:{COUNTED}) an? (?:{UNITS})\b(?!['’])(?! (?:{VERBS})\b)",
    "genitive first": r"(?:^|(?<=[.:;] ))(?:Of (?:the|these|those|its|it|a|an|each|all|one|two|what|which|such|ours?)\b"
    r"|In which|Those of|Whose|That which|That in)",
    "no X but": r"\b(?:no|none) (?:\w+ )?but\b",
    "goes by": r"\b(?:goes|go|went|going) by (?!hand)",
    "from X on": r"\bfrom [\w.,]+ on\b|\bfrom which \w+ on\b",
    "stands": r"\b(?:stands?|stood) (?:in (?!for)|at|beside|where|above|below)\b",
    "old words": r"\b(?:mend(?:s|ed|ing)?|foretells?|likeliest|judgement|newcomers|hitherto|thereof|wherein)\b",
    "odd verbs": r"\bknows? of\b|\blet go of\b|\basks? memory\b|\basked of\b|\bfor want of\b",
    "the one": r"\bthe one for the other\b|\bone after another of\b",
    "yet to be": r"\b(?:is|are) yet to be\b",
    "beside for with": r"\bbeside (?:dense|compiled|PyTorch|one another|the native|a dense|others)\b",
}
BEGINNINGS = r"(?:Of|That|Those|In|What|Whose|Whom|Who|Where|Which|Why|How|By|As|At|From|Beside|With|Without)\b"
"""Words with which no docstring begins: its first sentence has a verb in the imperative, or says what a value is."""


class Mark(NamedTuple):
    """One place (file:line) of a phrase in `MARKS`, or of a docstring that begins with a word in `BEGINNINGS`."""

    place: str
    kind: str
    text: str


def prose(markdown: str) -> str:
    """Return a page without code, comments and link targets, each line at its own number."""

    def blank(found: re.Match[str]) -> str:
        return re.sub(r"[^\n]", "", found[0]) or "`"

    text = re.sub(r"^ *```.*?^ *```|<!--.*?-->|`[^`\n]*`", blank, markdown, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"\]\([^)\n]*\)", "]", text)


def marks(text: str, place: str, line: int = 1, *, is_docstring: bool = False) -> Iterator[Mark]:
    """Yield the marks of a text that begins at `line` of the file `place`; in a docstring also its first word."""
    joined = re.sub(r"(?<=\S)\n[ \t]*(?=[^\s*|#>-])", " ", text)  # a phrase may be broken over two lines
    for kind, pattern in MARKS.items():
        for found in re.finditer(pattern, joined, flags=re.MULTILINE):
            yield Mark(f"{place}:{line}", kind, " ".join(joined[max(0, found.start() - 40) : found.end() + 30].split()))
    if is_docstring and re.match(BEGINNINGS, text.strip()):
        yield Mark(f"{place}:{line}", "beginning", " ".join(text.split())[:80])


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of a text with the number of their first line."""
    line = 1
    for part in re.split(r"(\n[ \t]*\n)", text):
        is_code = all(row.startswith("    ") for row in part.splitlines() if row.strip())
        if part.strip() and not is_code:
            yield line, part
        line += part.count("\n")


def names_in_all() -> set[str]:
    """Return the names that the packages of the library export."""
    found: set[str] = {"PlanCache"}
    for path in (ROOT / "src" / "dilated_attention").rglob("__init__.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                found |= set(ast.literal_eval(node.value))
    return found


PUBLIC_MODULES = ("decoding.py", "merge.py", "integrations/huggingface.py")
"""Modules all of whose functions without an underscore are public."""


def docstrings(tree: ast.Module, path: Path, exported: set[str]) -> Iterator[tuple[bool, int, str]]:
    """Yield (whether it is public, line, text) of each docstring of a module."""
    is_library = "src/dilated_attention/" in path.as_posix() and "lab" not in path.relative_to(ROOT).parts
    everything = is_library and path.as_posix().endswith(PUBLIC_MODULES)

    def visit(node: ast.AST, public: bool) -> Iterator[tuple[bool, int, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                name, outside = child.name, isinstance(node, ast.Module)
                mine = not name.startswith("_") and (public or (outside and (everything or name in exported)))
                text = ast.get_docstring(child)
                if text:
                    yield mine and is_library, child.body[0].lineno, text
                yield from visit(child, mine and isinstance(child, ast.ClassDef))
            elif isinstance(child, ast.Expr) and child is not node.body[0]:  # a string below what it describes
                if isinstance(child.value, ast.Constant) and isinstance(child.value.value, str):
                    yield False, child.lineno, child.value.value
            elif isinstance(child, ast.stmt):
                yield from visit(child, public)

    if text := ast.get_docstring(tree):
        yield False, 1, text
    yield from visit(tree, False)


def strings(node: ast.AST) -> str:
    """Return the text of all string constants below a node, joined as an f-string would join them."""
    found = [x.value for x in ast.walk(node) if isinstance(x, ast.Constant) and isinstance(x.value, str)]
    return " ".join(found)


def of_python(path: Path, exported: set[str]) -> Iterator[tuple[str, Mark]]:
    """Yield (area, mark) of a Python file: its docstrings, comments, errors and help."""
    source, place = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
    tree = ast.parse(source)
    for is_public, line, text in docstrings(tree, path, exported):
        area = "public docstrings" if is_public else "private docstrings and comments"
        for mark in marks(text, place, line, is_docstring=True):
            yield area, mark
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            for mark in marks(token.string.lstrip("# "), place, token.start[0]):
                yield "private docstrings and comments", mark
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            for mark in marks(strings(node.exc), place, node.lineno):
                yield "errors", mark
        if isinstance(node, ast.keyword) and node.arg in ("help", "description", "epilog"):
            for mark in marks(strings(node.value), place, node.value.lineno):
                yield "help", mark
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "attr", "") in ("description", "epilog"):
            for mark in marks(strings(node.value), place, node.lineno):
                yield "help", mark


def of_cpp(path: Path) -> Iterator[tuple[str, Mark]]:
    """Yield (area, mark) of the comments of a C++ file."""
    source = path.read_text(encoding="utf-8")
    for found in re.finditer(r"(?:^[ \t]*//[^\n]*\n)+|//[^\n]*|/\*.*?\*/", source, flags=re.DOTALL | re.MULTILINE):
        text = re.sub(r"^[ \t]*(?://+|/?\*+/?)", "", found[0], flags=re.MULTILINE)
        for mark in marks(text.strip(), path.relative_to(ROOT).as_posix(), source.count("\n", 0, found.start()) + 1):
            yield "private docstrings and comments", mark


def pages() -> list[Path]:
    """Return the Markdown files whose words are counted, README.md apart."""
    found = [*(ROOT / "docs").rglob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]
    found += [ROOT / "examples" / "README.md", ROOT / "results" / "README.md"]
    return [x for x in sorted(found) if not x.relative_to(ROOT).as_posix().startswith((*LOGS, *GENERATED))]


def collect() -> dict[str, list[Mark]]:
    """Return the marks of the repository by area."""
    found: dict[str, list[Mark]] = {name: [] for name in ("README", "docs", "public docstrings", "errors", "help")}
    found["private docstrings and comments"] = []
    for area, paths in (("README", [ROOT / "README.md"]), ("docs", pages())):
        for path in paths:
            for line, text in paragraphs(prose(path.read_text(encoding="utf-8"))):
                found[area] += marks(text, path.relative_to(ROOT).as_posix(), line)
    exported = names_in_all()
    for folder in ("src", "lab", "tests", "examples", "docs/tools"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix == ".py" and path != Path(__file__) and path.name != "test_words.py":
                places = of_python(path, exported)
            elif path.suffix in (".h", ".cpp"):
                places = of_cpp(path)
            else:
                continue
            for area, mark in places:
                found[area].append(mark)
    return found


def main(words: list[str]) -> int:
    """Print the counts beside the stored ones; return 1 if one has risen."""
    parser = argparse.ArgumentParser(description="Count marks of dialect; fail if an area has more than stored.")
    parser.add_argument("--list", metavar="AREA", help="print every mark of an area")
    parser.add_argument("--update", action="store_true", help="store the counts that fell")
    options = parser.parse_args(words)
    found = collect()
    stored: dict[str, int] = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    if options.list:
        for mark in found[options.list]:
            print(f"{mark.place}: {mark.kind}: {mark.text}")
    risen = [area for area in found if len(found[area]) > stored.get(area, sys.maxsize)]
    for area, places in found.items():
        print(f"{area}: {len(places)} marks, stored {stored.get(area, 'none')}{': too many' * (area in risen)}")
    if options.update:
        lower = {area: min(len(places), stored.get(area, len(places))) for area, places in found.items()}
        STORED.write_text(json.dumps(lower, indent=1) + "\n", encoding="utf-8")
    if risen:
        print(f"write it in plain English; python docs/tools/words.py --list '{risen[0]}' names the places")
    return 1 if risen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
