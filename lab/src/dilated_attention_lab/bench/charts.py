"""Draw pictures of results from their files alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dilated_attention_lab.bench.compare import NAME, PLAIN
from dilated_attention_lab.bench.profile import OWN_TIME
from dilated_attention_lab.bench.results import Record, read
from dilated_attention_lab.bench.simulate import World
from dilated_attention_lab.bench.tables import describe
from dilated_attention_lab.pictures import Panel, Series, save


def draw(results: Path, out: Path) -> Iterator[Path]:
    """Draw every picture that the files of `results` have rows for, and yield the paths written.

    Raises ValueError if there are no results, or if a file that it draws is damaged or its rows cannot be drawn.
    """
    files = sorted(results.glob("*/*.jsonl"))
    if not files:
        raise ValueError(f"{results}: no files of results, <device>/<suite>.jsonl; `bench` writes them")
    for path in files:
        yield from draw_file(path, out / path.parent.name)


def draw_file(path: Path, folder: Path) -> Iterator[Path]:
    """Draw into a folder the pictures that one file has rows for, and yield the paths written.

    Raises ValueError if the file is damaged or its rows cannot be drawn.
    """
    pictures = {path.stem: _stages} if path.stem.startswith("profile-") else PICTURES.get(path.stem, {})
    for name, picture in pictures.items():  # results/aot has rows that `read` does not know
        rows = read(path)
        try:
            panels = picture(rows)
            if not panels:
                continue
            folder.mkdir(parents=True, exist_ok=True)
            save(panels, folder / f"{name}.png", rows[0]["environment"]["device"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: no picture can be drawn from its rows ({error!r})") from error
        yield folder / f"{name}.png"


def compared_lengths(rows: list[Record]) -> list[Panel]:
    """Chart the time of a forward against length, for a few variants of `compare`."""
    series = []
    for label, variant in {
        "dense": "dense",
        "dilated, 3 branches": "LongNet branches",
        "local blocks, 10 %": "local blocks, 10%",
        "dilated, one branch per head group": "head groups",
    }.items():
        points = sorted((row["parameters"]["seq_len"], row["value"] / 1e3) for row in _plain(rows, variant))
        series.append(Series(label, [x for x, _ in points], [y for _, y in points], label != "dense"))
    axes = {"xscale": "log", "yscale": "log", "xlabel": "tokens", "ylabel": "seconds per forward"}
    return [Panel("lines", series, axes)] if any(x.y for x in series) else []


def compared_shares(rows: list[Record]) -> list[Panel]:
    """Chart forward times at 4,096 tokens as ratios to dense attention's, by the share of its score entries."""
    series = []
    for label, kinds in {
        "dilated": ("LongNet branches", "head groups"),
        "local blocks": ("local blocks, ",),
        "random blocks": ("random blocks, ",),
    }.items():
        found = [x for x in _plain(rows, *kinds) if x["parameters"]["seq_len"] == 4096 and x.get("over")]
        points = sorted((row["figures"]["share of score entries"], row["over"]["dense"]["median"]) for row in found)
        series.append(Series(label, [x for x, _ in points], [y for _, y in points]))
    words = {"xlabel": "share of dense attention's score entries", "ylabel": "time over dense attention"}
    panel = Panel("lines", series, {"xscale": "log", "yscale": "log", **words}, diagonal=True)
    return [panel] if any(x.y for x in series) else []


def _plain(rows: list[Record], *kinds: str) -> list[Record]:
    """Return the plain rows of `compare` that have a value, of variants whose names begin with one of `kinds`."""
    measured = [row for row in rows if row["name"] == NAME and row["value"] is not None]
    plain = [row for row in measured if PLAIN.items() <= row["parameters"].items()]
    return [row for row in plain if row["parameters"]["variant"].startswith(kinds)]


def _stages(rows: list[Record]) -> list[Panel]:
    """Chart the own time of every stage of the call that was profiled last. Stages below 0.2 % of the total are
    omitted."""
    parameters = max(rows, key=lambda row: row["date"])["parameters"]  # the file may have several
    own = [(row["name"].partition(OWN_TIME)[2], row["value"]) for row in rows if row["parameters"] == parameters]
    least = 0.002 * sum(value for name, value in own if name)
    shown = {name: value for name, value in own if name and value >= least}
    settings = {"xlabel": "own time, ms", "title": describe(parameters)}
    return [Panel("stages", [Series("own time", [*shown], [*shown.values()])], settings)]


def weak_scaling(rows: list[Record]) -> list[Panel]:
    """Chart, by sequence length, the bytes that a rank receives and the time of its forward, as `simulate` found them,
    for this library and the schemes of `World.others`.

    All points have the same number of tokens per rank. Rows are taken that differ from the newest modelled row only in
    length, number of ranks and transport; communication is as modelled for its network. Nothing is charted with fewer
    than two lengths.
    """

    def kind(row: Record) -> dict[str, Any]:
        parameters = {name: value for name, value in row["parameters"].items() if name != "transport"}
        shard = parameters.pop("seq_len") // parameters.pop("ranks")
        return {**parameters, "tokens": shard, "environment": row["environment"]}

    rows = sorted(rows, key=lambda row: row["date"])
    modelled = [row for row in rows if row["name"].startswith("modelled, ")]
    if not modelled:
        return []
    newest = modelled[-1]
    network = newest["name"].removeprefix("modelled, ").partition(": ")[0]
    alike = [row for row in rows if kind(row) == kind(newest) and row["value"] is not None]
    worlds = {row["parameters"]["seq_len"]: World(**row["parameters"]) for row in alike}
    figures = {(row["parameters"]["seq_len"], row["name"]): row["value"] for row in alike}
    schemes = "dense ring", "all-gather", "official LongNet"
    received, waiting = "modelled: received in a forward", f"modelled, {network}: communication"
    needed = ["measured: forward", "counted: received in a forward", f"{waiting} of a forward"]
    needed += [f"{what}, {scheme}" for what in (received, waiting) for scheme in schemes]
    tokens = [length for length in sorted(worlds) if all((length, name) in figures for name in needed)]
    if len(tokens) < 2:
        return []

    def values(name: str) -> list[float]:
        return [figures[length, name] for length in tokens]

    compute = values("measured: forward")
    traffic = [Series("this library", tokens, values("counted: received in a forward"))]
    waits = zip(compute, values(f"{waiting} of a forward"), strict=True)
    seconds = [
        Series("this library", tokens, [a + b for a, b in waits]),
        Series("its compute alone", tokens, compute),
    ]
    for scheme in schemes:
        work = compute
        if scheme == "dense ring":
            more = [worlds[length].flops(dense=True) / worlds[length].flops() for length in tokens]
            work = [a * b for a, b in zip(compute, more, strict=True)]
        waits = zip(work, values(f"{waiting}, {scheme}"), strict=True)
        traffic.append(Series(scheme, tokens, values(f"{received}, {scheme}"), False))
        seconds.append(Series(scheme, tokens, [a + b for a, b in waits], False))
    log = {"xscale": "log", "yscale": "log"}
    shown = {"xlabel": f"tokens, {kind(newest)['tokens']:,} per rank", "ylabel": "bytes received in a forward"}
    timed = {"xlabel": f"tokens; network: {network}", "ylabel": "seconds of a forward, nothing hidden"}
    return [Panel("lines", traffic, log | shown), Panel("lines", seconds, log | timed)]


PICTURES: dict[str, dict[str, Callable[[list[Record]], list[Panel]]]] = {
    "compare": {"compare-lengths": compared_lengths, "compare-shares": compared_shares},
    "simulate": {"weak-scaling": weak_scaling},
}
