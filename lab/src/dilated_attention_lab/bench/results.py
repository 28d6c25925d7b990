"""Store rows of results, one JSON object per line, in results/<device>/<suite>.jsonl.

A row says what was measured, the value, its spread, and on what: device, versions, commit, date. A file holds one row
per figure: measuring it again replaces the row. Every row is written as soon as it is there.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from dilated_attention.plumbing import storage
from dilated_attention_lab.bench.measure import Spread
from dilated_attention_lab.environment import device_name, environment

Record = dict[str, Any]
"""A row as the file has it."""


@dataclass(frozen=True, slots=True)
class Row:
    """Hold one figure.

    Attributes:
        name: name of the figure; with the parameters it is the row's key within its suite.
        value: a median where there is a spread; None where `refused` says why there is none.
        unit: `x` for a ratio, else `s`, `bytes`, `GFLOP/s`, `calls`, ...
        bar: what the value may not exceed.
        spread: quantiles of the value.
        over: the ratios of this contender's time to other contenders' in the same rounds, by their names.
        times: quantiles of the seconds that it comes from, by contender and phase.
        rates: GFLOP/s of useful work by contender, and those of the dense matrix product timed in the same rounds.
        figures: what else is known of the same case, by name.
    """

    name: str
    parameters: Mapping[str, Any]
    value: float | None
    unit: str
    _: KW_ONLY
    bar: float | None = None
    spread: Spread | None = None
    over: Mapping[str, Spread] = field(default_factory=dict)
    times: Mapping[str, Spread] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    refused: str | None = None

    @classmethod
    def of(cls, name: str, parameters: Mapping[str, Any], spread: Spread, unit: str = "x", **others: Any) -> Row:
        """Return a row whose value is the median of a spread."""
        return cls(name, parameters, spread.median, unit, spread=spread, **others)

    @property
    def met(self) -> bool | None:
        return None if self.bar is None or self.value is None else self.value <= self.bar


def device_folder(device: torch.device) -> str:
    """Return the name of a device's folder of results, such as `cpu-2-threads-amd-epyc`, without the machine's name."""
    words = device_name(device).rpartition(", ")[0] if device.type != "cuda" else device_name(device)
    threads = f"-{torch.get_num_threads()}-threads" if device.type == "cpu" else ""
    return f"{device.type}{threads}-" + re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def commit() -> str | None:
    """Return the commit of the package's sources, with `-dirty` if they differ from it; None outside a repository."""
    sources = str(Path(__file__).parent.parent)

    def git(*arguments: str) -> str:
        process = subprocess.run(["git", "-C", sources, *arguments], capture_output=True, text=True)
        return process.stdout.strip()

    try:
        at = git("describe", "--always", "--abbrev=12", "--exclude=*")
        return f"{at}-dirty" if at and git("status", "--porcelain", "--", ".") else at or None
    except FileNotFoundError:
        return None


class Recorder:
    """Write the rows of one suite; if the folder cannot be written, print them to standard output.

    Rows that the file already holds stay. A new row replaces the one with the same name and parameters.
    """

    def __init__(self, folder: Path, suite: str, device: torch.device) -> None:
        self.path = folder / device_folder(device) / f"{suite}.jsonl"
        self._suite = suite
        self._rows = {_key(row): row for row in read(self.path)} if self.path.exists() else {}
        self._facts = {"environment": environment(device), "commit": commit()}
        self.failure: str | None = None

    def add(self, row: Row) -> None:
        record = {
            "suite": self._suite,
            **{key: value for key, value in asdict(row).items() if value not in (None, {}) or key == "value"},
            **({} if row.met is None else {"met": row.met}),
            **self._facts,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        record = json.loads(json.dumps(record))
        self._rows[_key(record)] = record
        if self.failure is None:
            try:
                storage.write_text(self.path, self.text)
                return
            except OSError as error:
                self.failure = f"{self.path} cannot be written ({error.strerror}); rows go to standard output"
                print(self.failure, file=sys.stderr)
        print(json.dumps(record), flush=True)

    @property
    def text(self) -> str:
        """The content of the suite's file: one JSON object per line."""
        return "".join(json.dumps(row) + "\n" for row in self._rows.values())

    @property
    def rows(self) -> list[Record]:
        return list(self._rows.values())

    def forget(self, name: str) -> None:
        """Drop the rows of that name. The file loses them when the next row is written."""
        self._rows = {key: row for key, row in self._rows.items() if row["name"] != name}

    def forget_like(self, beginning: str, parameters: Mapping[str, Any]) -> None:
        """Drop, like `forget`, the rows of one case whose names begin with the given text."""
        self._rows = {
            key: row
            for key, row in self._rows.items()
            if not row["name"].startswith(beginning) or key != _key({"name": row["name"], "parameters": parameters})
        }


def failed(label: str) -> str:
    """Return the name of the row that says why a step stopped. Running the step again removes this row."""
    return f"failed: {label}"


def _key(record: Mapping[str, Any]) -> str:
    return json.dumps([record["name"], record["parameters"]], sort_keys=True)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file. Raises a ValueError that names the first line that is no row."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            row = json.loads(line)
            _key(row)
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ValueError(f"{path}, line {number}: not a row of results: {line[:80]!r}") from None
        rows.append(row)
    return rows
