"""Write figures into documents, from the files of results, between two comments.

    <!-- results: cpu-2-threads-amd-epyc/foundation.jsonl name="time over dense calls" -->
    <!-- end of results -->

becomes a table of the rows of that file whose name contains these words and whose parameters have the given values
(`seq_len=8192`); on one line with text in between, it becomes the value of the one row that fits:

    <!-- results: cpu-2-threads-amd-epyc/foundation.jsonl name=memory seq_len=8192 -->1.50 x<!-- end of results -->

The word `bar` writes whether the rows meet theirs, `met in 2 of 3`; `range` writes the least and the greatest value of
all rows that fit, `0.05 to 0.23 x`; `over=dense` takes a row's ratio to another contender instead of its value.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dilated_attention.plumbing import storage
from dilated_attention_lab.bench.results import Record, read
from dilated_attention_lab.terminal import number

SPAN = re.compile(r"<!-- results: (?P<request>.*?) -->(?P<text>.*?)<!-- end of results -->", re.DOTALL)


def render(text: str, results: Path) -> str:
    """Return the document with every span, the text between a pair of comments, written anew from the results.

    Raises a ValueError that names a span whose rows are missing.
    """

    def fill(span: re.Match[str]) -> str:
        rows, words = _rows(span["request"], results), shlex.split(span["request"])
        if "bar" in words:
            body = verdict(rows)
        elif "range" in words:
            body = extent(rows)
        elif "\n" in span["text"]:
            body = f"\n{markdown(*columns(rows))}\n"
        elif len(rows) == 1:
            body = value(rows[0])
        else:
            raise ValueError(f"results: {span['request']}: {len(rows)} rows fit; one is wanted inside a line")
        return f"<!-- results: {span['request']} -->{body}<!-- end of results -->"

    return SPAN.sub(fill, text)


def write(document: Path, results: Path) -> bool:
    """Rewrite a document's spans, and return whether it changed."""
    try:
        before = document.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{document}: not a document in UTF-8 ({error.reason})") from None
    after = render(before, results)
    if after != before:
        storage.write_text(document, after)
    return after != before


def _rows(request: str, results: Path) -> list[Record]:
    file, *filters = shlex.split(request)
    path = results / file
    if not path.is_file():
        raise ValueError(f"results: {request}: there is no file {path}")
    wanted = dict(word.partition("=")[::2] for word in filters if "=" in word)
    found = [row for row in read(path) if _fits(row, wanted)]
    if not found:
        raise ValueError(f"results: {request}: no row fits")
    if other := wanted.get("over"):
        found = [{**row, "value": row["over"][other]["median"], "unit": "x"} for row in found]
    return found


def _fits(row: Record, wanted: Mapping[str, str]) -> bool:
    holds = {"name": row["name"], "over": row.get("over", {})}
    words = {key: json.dumps(given) for key, given in row["parameters"].items()}
    return all(
        value in holds[key] if key in holds else words.get(key) in (value, f'"{value}"')
        for key, value in wanted.items()
    )


def verdict(rows: list[Record]) -> str:
    """Return whether the rows that have a bar meet it, in words."""
    judged = [row["met"] for row in rows if "met" in row]
    if len(judged) == 1:
        return "met" if judged[0] else "not met"
    return f"met in {sum(judged)} of {len(judged)}"


def extent(rows: list[Record]) -> str:
    """Return the least and the greatest value, with their unit."""
    values = [row["value"] for row in rows if row["value"] is not None]
    ends = dict.fromkeys(number(value) for value in (min(values), max(values)))
    return f"{' to '.join(ends)} {rows[0]['unit']}".rstrip()


def columns(rows: list[Record]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the headings (figure, case, value, ratios to others, bar), and one line per row.

    A column that no row fills is left out.
    """
    others = sorted({name for row in rows for name in row.get("over", {})})
    found: dict[str, list[str]] = {
        "figure": [row["name"] for row in rows],
        "case": [describe(row["parameters"]) for row in rows],
        "value": [value(row) for row in rows],
    }
    for name in others:
        found[f"over {name}"] = [
            f"{number(row['over'][name]['median'])} x" if name in row.get("over", {}) else "" for row in rows
        ]
    found["bar"] = [
        f"{number(row['bar'])}, {'met' if row['met'] else 'not met'}" if "bar" in row else "" for row in rows
    ]
    found = {name: cells for name, cells in found.items() if any(cells)}
    return tuple(found), list(zip(*found.values(), strict=True))


def markdown(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (headings, ["---"] * len(headings), *lines))


def value(row: Record) -> str:
    if row["value"] is None:
        return str(row.get("refused", "not measured"))
    return f"{number(row['value'])} {row['unit']}".rstrip()


def describe(parameters: Mapping[str, Any]) -> str:
    """Return in words the parameters that distinguish a case from the others of its suite."""
    words = [f"{parameters['seq_len']:,} tokens", f"{parameters['heads']} heads"]
    if ranks := parameters.get("ranks"):
        words.append(f"{ranks:,} ranks")
    if rates := parameters.get("dilation_rates"):
        words.append(f"{len(rates)} branches" if len(rates) > 1 else "1 branch")
    if density := parameters.get("density"):
        words.append(f"{parameters['blocks']} blocks, {density:.1%}")
    if distance := parameters.get("distance"):
        words += [parameters["method"], f"{distance[0]:,} to {distance[1]:,} tokens back"]
    if source := parameters.get("activations") or parameters.get("model"):
        words.append(source)
    if (before := parameters.get("before")) is not None:
        words += [f"{before:,} keys before", f"head_dim {parameters['head_dim']}", parameters["dtype"]]
    if texts := parameters.get("texts"):
        padded = ", padded" if parameters["padded"] else ""
        words += [f"{texts} texts{padded}", parameters["dtype"]]
    if mask := parameters.get("mask"):
        words.append(mask)
    if parameters.get("is_causal"):
        words.append("causal")
    if (seed := parameters.get("seed")) is not None:
        words.append(f"seed {seed}")
    if backend := parameters.get("backend"):
        words += [f"head_dim {parameters['head_dim']}"] if "head_dim" in parameters else []
        words += [parameters.get("dtype", ""), backend]
    return ", ".join(filter(None, words))
