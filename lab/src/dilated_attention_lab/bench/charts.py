"""Draw pictures of results from their files alone, readable in black and white."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from dilated_attention_lab.bench.compare import NAME, PLAIN
from dilated_attention_lab.bench.profile import OWN_TIME
from dilated_attention_lab.bench.results import Record, read
from dilated_attention_lab.bench.simulate import World
from dilated_attention_lab.bench.tables import describe

MARKERS = {  # variant of `compare`, without its density: marker
    "LongNet branches": "s",
    "head groups": "^",
    "local blocks": "o",
    "random blocks": "v",
    "local blocks inside branches": "<",
    "random blocks inside branches": ">",
    "multihead module": "x",
    "block-sparse multihead module": "D",
}


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
            figure = picture(rows)
            if figure is None:
                continue
            folder.mkdir(parents=True, exist_ok=True)
            figure.suptitle(rows[0]["environment"]["device"], fontsize=9)
            figure.savefig(folder / f"{name}.png", dpi=150)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: no picture can be drawn from its rows ({error!r})") from error
        yield folder / f"{name}.png"


Series = Mapping[str, tuple[str, str, Sequence[tuple[float, float]]]]
"""For each label: the line's style and grey, as matplotlib writes them, and its points (x, y)."""


def _panels(*panels: tuple[Series, dict[str, Any]], size: float = 4.5) -> Figure | None:
    """Draw series side by side with logarithmic y axes; None if there is nothing to draw.

    panels: for each plot its series, and settings for `Axes.set`. size: width of one panel in inches.
    """
    if not any(points for series, _ in panels for *_, points in series.values()):
        return None
    figure = Figure(figsize=(size * len(panels), 4.5), layout="constrained")
    for axes, (series, settings) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for label, (style, grey, points) in series.items():
            if points:
                axes.plot(*zip(*points, strict=True), style, color=grey, markersize=5, fillstyle="none", label=label)
        axes.set(yscale="log", **settings)
        axes.grid(color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    return figure


def _compared(rows: list[Record]) -> list[Record]:
    measured = [row for row in rows if row["name"] == NAME and row["value"] is not None]
    return [row for row in measured if PLAIN.items() <= row["parameters"].items()]


def _compare_lengths(rows: list[Record]) -> Figure | None:
    """Draw the time of a forward against length, a line each for dense attention, LongNet branches, head groups, the
    ring of two processes and local blocks."""
    shown = {
        "dense": ("-o", "black"),
        "LongNet branches": ("-s", "0.5"),
        "head groups": ("--^", "black"),
        "ring of two processes": (":x", "black"),
        "local blocks, 10%": ("--v", "0.5"),
    }
    series = {
        name: (*style, sorted((x["parameters"]["seq_len"], x["value"] / 1e3) for x in found if _variant(x) == name))
        for found in [_compared(rows)]
        for name, style in shown.items()
    }
    figure = _panels((series, {"xlabel": "tokens", "ylabel": "seconds of a forward"}), size=7)
    for axes in figure.axes if figure else ():
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    return figure


def _compare_shares(rows: list[Record]) -> Figure | None:
    """Draw the time of a forward as a ratio to dense attention's, by the share of its score entries, at 4,096 tokens:
    points for each kind of variant in MARKERS."""
    series: dict[str, tuple[str, str, list[tuple[float, float]]]] = {
        kind: (marker, "black", []) for kind, marker in MARKERS.items()
    }
    for row in _compared(rows):
        kind, share = _variant(row).partition(", ")[0], row["figures"].get("share of score entries")  # none of a peer
        if row["parameters"]["seq_len"] == 4096 and "dense" in row.get("over", {}) and share and kind in series:
            series[kind][2].append((share, row["over"]["dense"]["median"]))
    labels = {"xlabel": "share of dense attention's score entries", "ylabel": "time of a forward over dense attention"}
    figure = _panels((series, {"xscale": "log", "xlim": (0.004, 2), **labels}), size=7)
    for axes in figure.axes if figure else ():
        axes.plot((0.01, 1), (0.01, 1), color="0.7", linewidth=0.8)
    return figure


def _variant(row: Record) -> str:
    return str(row["parameters"]["variant"])


def _stages(rows: list[Record]) -> Figure:
    """Draw a bar per stage of the call that was profiled last: the stage's own time in milliseconds. Stages below 0.2 %
    of the total are omitted."""
    parameters = max(rows, key=lambda row: row["date"])["parameters"]  # the file may have several
    own = [(row["name"].partition(OWN_TIME)[2], row["value"]) for row in rows if row["parameters"] == parameters]
    least = 0.002 * sum(value for name, value in own if name)
    shown = {name: value for name, value in own[::-1] if name and value >= least}
    figure = Figure(figsize=(7, 0.9 + 0.32 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh([*shown], [*shown.values()], color="0.6", ec="black")
    axes.bar_label(bars, [f"{value:,.3g} ms" for value in shown.values()], padding=3, fontsize=8)
    axes.margins(x=0.2)
    axes.set(xlabel="own time, ms", title=describe(parameters))
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def weak_scaling(rows: list[Record]) -> Figure | None:
    """Draw, by sequence length, the bytes that a rank receives and the time of its forward, as `simulate` found them,
    for this library and the schemes of `World.others`.

    All points have the same number of tokens per rank. Rows are taken that differ from the newest modelled row only in
    length, number of ranks and transport; communication is as modelled for its network. None if there are fewer than
    two lengths.
    """

    def kind(row: Record) -> dict[str, Any]:
        parameters = {name: value for name, value in row["parameters"].items() if name != "transport"}
        shard = parameters.pop("seq_len") // parameters.pop("ranks")
        return {**parameters, "tokens": shard, "environment": row["environment"]}

    rows = sorted(rows, key=lambda row: row["date"])
    modelled = [row for row in rows if row["name"].startswith("modelled, ")]
    if not modelled:
        return None
    newest = modelled[-1]
    network = newest["name"].removeprefix("modelled, ").partition(": ")[0]
    alike = [row for row in rows if kind(row) == kind(newest) and row["value"] is not None]
    worlds = {row["parameters"]["seq_len"]: World(**row["parameters"]) for row in alike}
    figures = {(row["parameters"]["seq_len"], row["name"]): row["value"] for row in alike}
    styles = {"dense ring": "--^", "all-gather": "--o", "official LongNet": ":x"}
    received, waiting = "modelled: received in a forward", f"modelled, {network}: communication"
    needed = ["measured: forward", "counted: received in a forward", f"{waiting} of a forward"]
    needed += [f"{what}, {scheme}" for what in (received, waiting) for scheme in styles]
    tokens = [length for length in sorted(worlds) if all((length, name) in figures for name in needed)]
    if len(tokens) < 2:
        return None

    def values(name: str) -> list[float]:
        return [figures[length, name] for length in tokens]

    compute = values("measured: forward")

    def points(name: str, over: Sequence[float] | None = None) -> list[tuple[float, float]]:
        pairs = zip(values(name), over or [0.0] * len(tokens), strict=True)
        return list(zip(tokens, [a + b for a, b in pairs], strict=True))

    traffic: dict[str, tuple[str, str, Any]] = {
        "this library, counted": ("-s", "black", points("counted: received in a forward")),
    }
    seconds: dict[str, tuple[str, str, Any]] = {
        "this library, measured + modelled": ("-s", "black", points(f"{waiting} of a forward", compute)),
        "its compute alone, measured": (":", "0.5", points("measured: forward")),
    }
    for scheme, style in styles.items():
        grey, label, work = "0.5" if scheme == "all-gather" else "black", f"{scheme}, modelled", compute
        if scheme == "dense ring":
            more = [worlds[length].flops(dense=True) / worlds[length].flops() for length in tokens]
            work = [a * b for a, b in zip(compute, more, strict=True)]
        traffic[label] = style, grey, points(f"{received}, {scheme}")
        seconds[label] = style, grey, points(f"{waiting}, {scheme}", work)
    each = {"xlabel": f"tokens, {kind(newest)['tokens']:,} a rank"}
    figure = _panels(
        (traffic, each | {"ylabel": "bytes that a rank receives, a layer's forward"}),
        (seconds, each | {"ylabel": "seconds of a rank's forward, nothing hidden", "title": f"network of {network}"}),
    )
    for axes in figure.axes if figure else ():
        axes.set_xscale("log", base=2)
    return figure


PICTURES: dict[str, dict[str, Callable[[list[Record]], Figure | None]]] = {
    "compare": {"compare-lengths": _compare_lengths, "compare-shares": _compare_shares},
    "simulate": {"weak-scaling": weak_scaling},
}
