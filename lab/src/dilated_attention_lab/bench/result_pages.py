"""Generate pages of the documents from the files of results: tables, and which machine measured what.

`dilated-attention plot` writes them to docs/tables/<device>/<suite>.md and docs/machines.md. A figure without a value
(refused, not installed) is counted and not listed; the file of results says why it has none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dilated_attention.plumbing import storage
from dilated_attention_lab.bench import compare
from dilated_attention_lab.bench.charts import PICTURES
from dilated_attention_lab.bench.results import Record, read
from dilated_attention_lab.bench.tables import markdown, value
from dilated_attention_lab.terminal import number

WIDEST = 6
"""The most figures in a row of a table; if a case has more, each figure is a line and each case a column."""

LONGEST = 2400
"""The most words of a page; the rest goes to further pages."""

USUAL = {"batch": "1", "offsets": "head", "is_causal": "no", "dtype": "float32", "compiled": "no", "method": "dilated"}
"""Parameters that a table names only where they differ between its lines or are something else."""

WORDS = {"true": "yes", "false": "no"}

Case = tuple[tuple[str, str], ...]
"""Names and values of parameters, in words."""


def pages(results: Path) -> dict[str, str]:
    """Return every generated page, by its path below docs/."""
    paths = [path for path in sorted(results.glob("*/*.jsonl")) if path.parent.name != "aot"]
    files = {path: read(path) for path in paths}
    found = {"machines.md": "\n".join(_machines(files)) + "\n"}
    for path, rows in files.items():
        for number_of_page, text in enumerate(_split(path, rows), 1):
            name = path.stem if number_of_page == 1 else f"{path.stem}-{number_of_page}"
            found[f"tables/{path.parent.name}/{name}.md"] = text
    return found


def write(results: Path, folder: Path) -> Iterator[Path]:
    """Write the generated pages below `folder`, and remove those of files that are gone; yield the changed paths."""
    wanted = {folder / name: text for name, text in pages(results).items()}
    for path in sorted({*(folder / "tables").rglob("*.md")} - wanted.keys()):
        path.unlink()
        yield path
    for path, text in wanted.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            storage.write_text(path, text)
            yield path


def _split(path: Path, rows: list[Record]) -> list[str]:
    """Return the pages of one file: an introduction and its tables. A page has at most LONGEST words, or one table."""
    title = f"# {path.stem}, {rows[0]['environment']['device']}"
    pages: list[list[str]] = [[]]
    for text in [title, *_tables(path, rows)]:
        if len(" ".join([*pages[-1], text]).split()) > LONGEST:
            pages[-1].append(f"[More tables of this file]({path.stem}-{len(pages) + 1}.md)")
            pages.append([f"{title}, page {len(pages) + 1}"])
        pages[-1].append(text)
    return ["\n\n".join(page) + "\n" for page in pages]


def _tables(path: Path, rows: list[Record]) -> Iterator[str]:
    """Yield what follows the title of a file's page: where its figures come from, then pictures and tables."""
    shown = [row for row in rows if row["value"] is not None]
    usual = ", ".join(f"{name} {word}" for name, word in USUAL.items())
    yield (
        f"Written by `dilated-attention plot` from [{path.name}](../../../results/{path.parent.name}/{path.name}). "
        f"{_environment(rows)} A ratio is the median over interleaved rounds; `not met` marks a value above its bar. "
        f"Unless a table says otherwise: {usual}."
    )
    if len(shown) < len(rows):
        yield f"{len(rows) - len(shown)} figures have no value here; the file gives the reason for each."
    for name in [path.stem] if path.stem.startswith("profile-") else PICTURES.get(path.stem, {}):
        yield f"![{name}](../../pictures/{path.parent.name}/{name}.png)"
    yield from _compared([row for row in shown if row["name"] == "compare"])
    yield from _by_case([row for row in shown if row["name"] != "compare"])


def _environment(rows: list[Record]) -> str:
    """Return in words the versions of PyTorch and Python, and the dates, of the rows."""
    versions = sorted({(row["environment"]["torch"], row["environment"]["python"]) for row in rows})
    dates = sorted({row["date"][:10] for row in rows})
    words = " and ".join(f"PyTorch {torch}, Python {python}" for torch, python in versions)
    return f"{words}; {dates[0] if len(dates) == 1 else f'{dates[0]} to {dates[-1]}'}."


def _by_case(rows: list[Record]) -> Iterator[str]:
    """Yield a table for each set of two or more cases that have the same figures, then one for each other case that has
    more than WIDEST figures, then one for the rest."""
    cases: dict[Case, dict[str, Record]] = {}
    for row in rows:
        cases.setdefault(_case(row["parameters"]), {})[row["name"]] = row
    groups: dict[tuple[str, ...], dict[Case, dict[str, Record]]] = {}
    for case, figures in cases.items():
        groups.setdefault(tuple(figures), {})[case] = figures
    single: list[tuple[Case, Mapping[str, Record]]] = []
    for names, group in groups.items():
        if len(group) > 1 or len(names) > WIDEST:
            yield _grouped(names, group)
        else:
            single += group.items()
    if single:
        common = _common([case for case, _ in single])
        lines = [
            (name, ", ".join(_words(case, common)), _cell(row))
            for case, figures in single
            for name, row in figures.items()
        ]
        if any(case for _, case, _ in lines):
            yield _constants(common) + markdown(("figure", "case", "value"), lines)
        else:
            yield _constants(common) + markdown(("figure", "value"), ((name, cell) for name, _, cell in lines))


def _grouped(names: Sequence[str], group: Mapping[Case, Mapping[str, Record]]) -> str:
    """Return a Markdown table of the cases in `group`, each of which has all figures in `names`. It has one row per
    case, or one column per case if there are more than WIDEST figures."""
    common = _common(group)
    varying = list(dict.fromkeys(name for case in group for name, _ in case if name not in common))
    heads = {case: [dict(case).get(name, "") for name in varying] for case in group}
    cells = {case: [_cell(figures[name]) for name in names] for case, figures in group.items()}
    if len(names) <= WIDEST:
        return _constants(common) + markdown((*varying, *names), ([*heads[case], *cells[case]] for case in group))
    lines = ([name, *(cells[case][i] for case in group)] for i, name in enumerate(names))
    columns = [", ".join(heads[case]) or "value" for case in group]
    return _constants(common) + markdown((", ".join(varying) or "figure", *columns), lines)


def _compared(rows: list[Record]) -> Iterator[str]:
    """Yield a table for each dtype, batch, compiled or not, and segment lengths in the rows of `compare`: forward times
    as ratios to dense attention's, by sequence length.

    Then yield all columns for one of these: float32, one sample of 4,096 tokens, not compiled.
    """
    settings: dict[Case, dict[str, dict[int, Record]]] = {}
    for row in rows:
        given = {name: row["parameters"][name] for name in ("dtype", "batch", "compiled", "branches")}
        variants = settings.setdefault(_case(given), {})
        variants.setdefault(row["parameters"]["variant"], {})[row["parameters"]["seq_len"]] = row
    for setting, variants in settings.items():
        ratios = {name: {n: _over_dense(row) for n, row in found.items()} for name, found in variants.items()}
        lengths = sorted({n for found in ratios.values() for n, ratio in found.items() if ratio})
        lines = [[name, *(found.get(n, "") for n in lengths)] for name, found in ratios.items() if any(found.values())]
        heading = f"Forward time over dense attention; {', '.join(_words(setting, {}))}:\n\n"
        yield heading + markdown(("variant", *(f"{n:,} tokens" for n in lengths)), lines)
    plain = compare.PLAIN | {"seq_len": 4096}
    full = [row for row in rows if plain.items() <= row["parameters"].items()]
    if full:
        yield f"Everything that is known of {', '.join(_words(_case(plain), {}))}:\n\n" + markdown(*compare.table(full))


def _over_dense(row: Record) -> str:
    """Return as text the ratio of a row's time to dense attention's, or an empty string if the row has none."""
    return number(row["over"]["dense"]["median"]) if "dense" in row.get("over", {}) else ""


def _case(parameters: Mapping[str, Any]) -> Case:
    """Return the parameters that are not empty as pairs of a name and its value in words."""
    return tuple((name, _word(given)) for name, given in parameters.items() if given not in ([], None))


def _word(given: Any) -> str:
    if isinstance(given, (list, tuple)):
        return " / ".join(map(_word, given))
    if isinstance(given, int) and not isinstance(given, bool):
        return f"{given:,}"
    return given if isinstance(given, str) else WORDS.get(json.dumps(given), json.dumps(given))


def _common(cases: Iterable[Case]) -> dict[str, str]:
    """Return the parameters that all cases share."""
    first, *others = (dict(case) for case in cases)
    return {name: word for name, word in first.items() if all(case.get(name) == word for case in others)}


def _words(case: Case, common: Mapping[str, str]) -> list[str]:
    """Return the parameters that a line has to name: those that are not in `common` and not as in USUAL."""
    return [f"{name} {word}" for name, word in case if name not in common and USUAL.get(name) != word]


def _constants(common: Mapping[str, str]) -> str:
    """Return the line above a table that names the parameters of all its lines."""
    words = _words(tuple(common.items()), {})
    return f"All lines: {'; '.join(words)}.\n\n" if words else ""


def _cell(row: Record) -> str:
    """Return the text of a table's cell: the value of a row, with its bar if it has one."""
    if "bar" not in row:
        return value(row)
    return f"{value(row)}, {'bar' if row['met'] else 'not met: bar'} {number(row['bar'])}"


def _machines(files: Mapping[Path, list[Record]]) -> Iterator[str]:
    """Yield the lines of the page that says which machine measured what."""
    yield from (
        "# What is measured on which machine",
        "",
        "Look up where a figure comes from: which machine, which versions, when. What has not been measured yet is",
        "listed [beside the results](../results/README.md#not-measured-yet).",
        "",
        "`dilated-attention plot` writes this page from the files of results. A bar is a limit that was set before the",
        "measurement; the last column counts the bars that are met.",
    )
    devices: dict[str, list[Path]] = {}
    for path in files:
        devices.setdefault(path.parent.name, []).append(path)
    for folder, paths in devices.items():
        rows = [row for path in paths for row in files[path]]
        yield from ("", f"## {rows[0]['environment']['device']}", "")
        environment = rows[0]["environment"]
        yield f"`{folder}`: {environment['platform']}, {environment['threads']} threads. {_environment(rows)}"
        yield ""
        lines = [_summary(path, files[path]) for path in paths]
        yield markdown(("suite", "figures", "without a value", "date", "commit", "bars met"), lines)


def _summary(path: Path, rows: list[Record]) -> list[str]:
    """Return one file's line in the table of its machine: suite, number of figures and of those without a value, date
    and commit of the newest, bars met."""
    empty = sum(row["value"] is None for row in rows)
    newest = max(rows, key=lambda row: row["date"])
    judged = [row for row in rows if row["value"] is not None and "met" in row]
    name = f"[{path.stem}](tables/{path.parent.name}/{path.stem}.md)"
    bars = f"{sum(row['met'] for row in judged)} of {len(judged)}" if judged else ""
    return [name, str(len(rows)), str(empty), newest["date"][:10], newest["commit"][:7], bars]
