"""Pictures of results, from their files alone; readable in black and white."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from dilated_attention.layout import BlockLayout
from dilated_attention.patterns import Dilated
from dilated_attention.pictures import plot_counts
from dilated_attention_bench.cases import Case
from dilated_attention_bench.profile import OWN_TIME, Stage, save_bars
from dilated_attention_bench.results import Record, read
from dilated_attention_bench.simulate import World
from dilated_attention_bench.tables import describe

Points = dict[str, dict[float, float]]
"""(x, y) of each method."""

KIBI = "tokens / 1,024"
STYLES: dict[str, tuple[str, ...]] = {  # method: line, marker, grey, and its label where that is not its name
    "dense": ("-", "o", "black"),
    "dilated": ("-", "s", "0.5"),
    "block-sparse": ("--", "^", "black"),
    "block-sparse dilated": ("--", "v", "0.5"),
    "flex": (":", "x", "black", "FlexAttention, blocks of block-sparse"),
}
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
PHASES = ("forward", "forward+backward")


def draw(results: Path, out: Path) -> Iterator[Path]:
    """Draw every picture that the files of `results` have rows for; the paths written.

    Raises ValueError where there are no results, or a file that it draws is damaged or of other rows.
    """
    files = sorted(results.glob("*/*.jsonl"))
    if not files:
        raise ValueError(f"{results}: no files of results, <device>/<suite>.jsonl; `bench` writes them")
    for path in files:
        folder = out / path.parent.name
        if path.stem.startswith("profile-"):
            with drawing(path) as rows:
                case = max(rows, key=lambda row: row["date"])["parameters"]  # the file may have several
                own = [(row["name"].partition(OWN_TIME)[2], row["value"]) for row in rows if row["parameters"] == case]
                stages = tuple(Stage(name, value, 0) for name, value in own if name)
                title = f"{path.stem.replace('-', ', ', 1)}: {describe(case)}"
                save_bars(folder / f"{path.stem}.png", title, stages)
            yield folder / f"{path.stem}.png"
        yield from draw_file(path, folder)


def draw_file(path: Path, folder: Path) -> Iterator[Path]:
    """Draw into a folder the pictures that one file has rows for; the paths written."""
    for name, picture in PICTURES.get(path.stem, {}).items():  # results/aot has rows that `read` does not know
        with drawing(path) as rows:
            figure = picture(rows)
            if figure is not None:
                folder.mkdir(parents=True, exist_ok=True)
                figure.suptitle(rows[0]["environment"]["device"], fontsize=9)
                figure.savefig(folder / f"{name}.png", dpi=150)
        if figure is not None:
            yield folder / f"{name}.png"


@contextmanager
def drawing(path: Path) -> Iterator[list[Record]]:
    """The rows of a file. ValueError, naming it, where they lack what the block takes of them."""
    rows = read(path)
    try:
        yield rows
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: no picture can be drawn from its rows ({error!r})") from error


def draw_patterns(out: Path) -> Iterator[Path]:
    """Draw the patterns that the documents explain; the paths written."""
    out.mkdir(parents=True, exist_ok=True)
    for name, picture in PATTERNS.items():
        picture().savefig(out / f"{name}.png", dpi=150)
        yield out / f"{name}.png"


def _axes(figure: Figure, columns: int) -> list[Axes]:
    found = list(figure.subplots(1, columns, squeeze=False)[0])
    for axes in found:
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return found


def _figure(*panels: tuple[Points, str, dict[str, Any]]) -> Figure | None:
    """Panels side by side, each of points, label of x and settings of the axes; None where there is nothing to draw."""
    if not any(values for points, *_ in panels for values in points.values()):
        return None
    figure = Figure(figsize=(1 + 4 * len(panels), 4), layout="constrained")
    for axes, (points, xlabel, settings) in zip(_axes(figure, len(panels)), panels, strict=True):
        for name, (line, marker, color, *label) in STYLES.items():
            if values := points.get(name):
                x, shown = sorted(values), label[0] if label else name
                axes.plot(x, [values[at] for at in x], line, marker=marker, color=color, fillstyle="none", label=shown)
        axes.set(xlabel=xlabel, **settings)
        if xlabel == KIBI:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:,g}")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(lambda y, _: f"{y:,g}")
    figure.axes[0].legend(frameon=False, fontsize=8)
    return figure


def _by_length(rows: list[Record], name: str, value: Callable[[Record], float]) -> Points:
    """Points (tokens, value) of each method, sparse ones at the density of a window of 1,024 tokens.

    name: what a row's begins with, `METHOD` for its method.
    """
    points: Points = {method: {} for method in STYLES}
    for row in rows:
        method, seq_len = row["parameters"]["method"], row["parameters"]["seq_len"]
        window = row["parameters"].get("density") in (None, min(1.0, 1024 / seq_len))
        if window and row["value"] is not None and row["name"].startswith(name.replace("METHOD", method)):
            points[method][seq_len] = value(row)
    return points


def _time(rows: list[Record]) -> Figure | None:
    def seconds(phase: str) -> Points:
        of_phase = [row for row in rows if row["name"].partition(": ")[0] == phase and "peak" not in row["name"]]
        return _by_length(of_phase, f"{phase}: METHOD", lambda row: row["value"] / 1e3)

    return _figure(*[(seconds(phase), KIBI, {"ylabel": "seconds", "title": phase}) for phase in PHASES])


def _memory(rows: list[Record]) -> Figure | None:
    def mebibytes(row: Record) -> float:
        return float(row["value"] * Case(**row["parameters"]).out_bytes / 2**20)

    points = _by_length(rows, "forward: METHOD, peak memory", mebibytes)
    return _figure((points, KIBI, {"ylabel": "MiB above q, k and v", "title": "peak memory, forward"}))


def _density(rows: list[Record]) -> Figure | None:
    points: Points = {}
    for row in rows:
        density = row["parameters"].get("density")
        if row["parameters"]["seq_len"] == 4096 and density and "dense" in row.get("over", {}):
            name = row["name"].removeprefix("forward: ")
            points.setdefault(name, {})[density] = row["over"]["dense"]["median"]
    settings = {"ylabel": "time over dense attention", "title": "4,096 tokens, forward"}
    figure = _figure((points, "active blocks", settings))
    if figure is not None:
        (axes,) = figure.axes
        axes.axline((0, 0), slope=1, color="0.7", linewidth=0.8, label="density")
        axes.axhline(1, color="0.7", linestyle=":", linewidth=0.8)
        axes.legend(frameon=False, fontsize=8)
    return figure


def _bars(rows: list[Record], groups: dict[str, str], over: str, ylabel: str) -> Figure | None:
    """One set of axes a length, one bar a name and group; `groups`: suffix of a row's name -> hatch."""
    lengths = sorted({row["parameters"]["seq_len"] for row in rows if over in row.get("over", {})})
    if not lengths:
        return None
    figure = Figure(figsize=(3.6 * len(lengths) + 1, 4), layout="constrained")
    for axes, seq_len in zip(_axes(figure, len(lengths)), lengths, strict=True):
        here = [row for row in rows if row["parameters"]["seq_len"] == seq_len and over in row.get("over", {})]
        for shift, (suffix, hatch) in enumerate(groups.items()):
            chosen = [row for row in here if row["name"].endswith(suffix)]
            names = [row["name"].removesuffix(suffix).rstrip(", ") for row in chosen]
            at = [i + 0.4 * shift for i in range(len(chosen))]
            height = [row["over"][over]["median"] for row in chosen]
            axes.bar(at, height, 0.4, color="white", ec="black", hatch=hatch, label=suffix.strip(", ") or None)
            axes.set_xticks(at, names, rotation=45, ha="right", fontsize=8)
        axes.axhline(1, color="0.5", linestyle=":", linewidth=0.8)
        axes.set(title=f"{seq_len:,} tokens", ylabel=ylabel)
    if len(groups) > 1:
        figure.axes[0].legend(frameon=False, fontsize=8)
    return figure


def _dilation(rows: list[Record]) -> Figure | None:
    groups = {", alone, of q, k and v": "", ", inside the attention call": "///"}
    return _bars(rows, groups, "index_select", "time over index_select")


def _strategies(rows: list[Record]) -> Figure | None:
    return _bars(rows, {"": ""}, "dilated_attention", "time over dilated_attention")


def _decoding(rows: list[Record]) -> Figure | None:
    def of(what: str, unit: float) -> Points:
        wanted = [row for row in rows if row["name"].endswith(what)]
        return _by_length(wanted, "decoding, METHOD", lambda row: row["value"] / unit)

    figure = _figure(
        (of("time a token", 1.0), "tokens before", {"ylabel": "ms a token", "title": "decoding"}),
        (of("bytes of the cache", 2.0**20), "tokens before", {"ylabel": "MiB", "title": "KV cache"}),
    )
    for axes in figure.axes if figure is not None else ():
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    return figure


def _compared(rows: list[Record]) -> list[Record]:
    """Rows of `compare` in the plain setting: float32, one sample, the reports' segments, not compiled."""
    plain = {"dtype": "float32", "batch": 1, "compiled": False, "branches": [1024, 2048, 4096]}
    return [
        row
        for row in rows
        if row["name"] == "compare" and row["value"] is not None and plain.items() <= row["parameters"].items()
    ]


def _compare_lengths(rows: list[Record]) -> Figure | None:
    """Time against length, of variants whose share of entries does not hang on a density."""
    shown = {
        "dense": ("-", "o", "black"),
        "LongNet branches": ("-", "s", "0.5"),
        "head groups": ("--", "^", "black"),
        "ring of two processes": (":", "x", "black"),
        "local blocks, 10%": ("--", "v", "0.5"),
    }
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    (axes,) = _axes(figure, 1)
    for name, (line, marker, color) in shown.items():
        points = sorted((x["parameters"]["seq_len"], x["value"] / 1e3) for x in _compared(rows) if _variant(x) == name)
        if points:
            axes.plot(*zip(*points, strict=True), line, marker=marker, color=color, fillstyle="none", label=name)
    if not axes.lines:
        return None
    axes.set(xlabel="tokens", ylabel="seconds of a forward", yscale="log")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.legend(frameon=False, fontsize=8)
    return figure


def _compare_shares(rows: list[Record]) -> Figure | None:
    """Time over dense against the share of its score entries, at the reports' 4,096 tokens."""
    drawn = [row for row in _compared(rows) if row["parameters"]["seq_len"] == 4096 and "dense" in row.get("over", {})]
    ours = [row for row in drawn if "share of score entries" in row["figures"]]  # not known of a peer
    chosen = [row for row in ours if _variant(row) != "ring of one process"]  # lies on LongNet branches
    if not chosen:
        return None
    kinds: dict[str, list[tuple[float, float]]] = {}
    for row in chosen:
        kind, at = _variant(row).partition(", ")[0], row["figures"]["share of score entries"]
        kinds.setdefault(kind, []).append((at, row["over"]["dense"]["median"]))
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    (axes,) = _axes(figure, 1)
    for kind, marker in MARKERS.items():
        if points := kinds.get(kind):
            axes.plot(*zip(*points, strict=True), marker, color="black", markersize=5, fillstyle="none", label=kind)
    axes.legend(frameon=False, fontsize=8)
    axes.plot((0.01, 1), (0.01, 1), color="0.7", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlim=(0.004, 2))
    axes.set(xlabel="share of dense attention's score entries", ylabel="time of a forward over dense attention")
    return figure


def _variant(row: Record) -> str:
    return str(row["parameters"]["variant"])


def _panels(count: int, height: float = 3.0) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(2.7 * count, height), layout="constrained")
    axes = list(figure.subplots(1, count, squeeze=False)[0])
    return figure, axes


def _branches() -> Figure:
    """Each branch of one head alone, and their union."""
    pattern = Dilated((8, 16, 32), (1, 2, 4))
    figure, axes = _panels(4)
    for panel, segment, rate in zip(axes, pattern.segment_lengths, pattern.dilation_rates, strict=False):
        plot_counts(Dilated((segment,), (rate,)), 32, 1, 4, panel)
        panel.set_title(f"segment {segment}, rate {rate}", fontsize=9)
    plot_counts(pattern, 32, 1, 4, axes[3])
    axes[3].set_title("all three, head 1", fontsize=9)
    return figure


def _heads() -> Figure:
    figure, axes = _panels(4)
    for head, panel in enumerate(axes):
        plot_counts(Dilated((8, 16, 32), (1, 2, 4)), 32, head, 4, panel, is_causal=True)
    return figure


def _offsets() -> Figure:
    """One branch of rate 4 with 8 heads under each rule; and head groups."""
    figure = Figure(figsize=(10.8, 8.4), layout="constrained")
    rules = {
        'offsets="head"': Dilated((32,), (4,)),
        'offsets="head_block"': Dilated((32,), (4,), "head_block"),
        "head_groups=True, (8, 32) / (1, 4)": Dilated((8, 32), (1, 4), head_groups=True),
    }
    for row, (panels, (rule, pattern)) in enumerate(zip(figure.subplots(3, 4), rules.items(), strict=True)):
        for panel, head in zip(panels, (0, 1, 4, 7), strict=True):
            plot_counts(pattern, 32, head, 8, panel)
            panel.set_title(f"{rule}: head {head}" if head == 0 else f"head {head}", fontsize=9)
            panel.set_xlabel("key" if row == 2 else "")
    return figure


def _coverage() -> Figure:
    """Keys per token under two patterns, one of which leaves tokens out."""
    figure = Figure(figsize=(9, 3), layout="constrained")
    for panel, rates in zip(_axes(figure, 2), ((1, 4), (2, 4)), strict=True):
        pattern = Dilated((16, 48), rates)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the tokens that see nothing: they are what the picture shows
            keys = pattern.coverage(48, 4)
        for head, (marker, color) in enumerate((("o", "black"), ("x", "0.4"))):
            panel.plot(keys[head], marker, color=color, markersize=4, fillstyle="none", label=f"head {head}")
        panel.set(title=f"segments 16, 48; rates {rates[0]}, {rates[1]}", xlabel="token", ylabel="keys", ylim=(-2, 36))
        panel.legend(frameon=False, fontsize=8, loc="upper right", ncols=2)
    return figure


def _layouts() -> Figure:
    n, block = 1024, 32
    figure, axes = _panels(4, 3.2)
    named = {
        "local, window 96": BlockLayout.local(n, 96, block),
        "longformer, window 96": BlockLayout.longformer(n, 96, 16, block),
        "dilated, rates 1, 4, 16": BlockLayout.dilated(n, (1, 4, 16), 1, block),
        "random, causal": BlockLayout.random(n, 0.15, 0, block, is_causal=True),
    }
    for panel, (name, layout) in zip(axes, named.items(), strict=True):
        layout.plot(panel)
        panel.set_title(f"{name}: density {layout.density:.2f}", fontsize=9)
    return figure


def weak_scaling(rows: list[Record]) -> Figure | None:
    """As many tokens a rank in every world: bytes that a rank receives, and the time of its forward.

    Of the network that was modelled last, in worlds that differ in the length and the ranks alone.
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

    figure = Figure(figsize=(9, 4), layout="constrained")
    traffic, seconds = _axes(figure, 2)
    compute = values("measured: forward")
    traffic.plot(tokens, values("counted: received in a forward"), "-s", color="black", label="this library, counted")
    waits = values(f"{waiting} of a forward")
    total = [a + b for a, b in zip(compute, waits, strict=True)]
    seconds.plot(tokens, total, "-s", color="black", label="this library, measured + modelled")
    seconds.plot(tokens, compute, ":", color="0.5", label="its compute alone, measured")
    for scheme, style in styles.items():
        grey = "0.5" if scheme == "all-gather" else "black"
        label = f"{scheme}, modelled"
        traffic.plot(tokens, values(f"{received}, {scheme}"), style, color=grey, label=label)
        work = compute
        if scheme == "dense ring":
            more = [worlds[length].flops(dense=True) / worlds[length].flops() for length in tokens]
            work = [a * b for a, b in zip(compute, more, strict=True)]
        waits = values(f"{waiting}, {scheme}")
        seconds.plot(tokens, [a + b for a, b in zip(work, waits, strict=True)], style, color=grey, label=label)
    traffic.set(ylabel="bytes that a rank receives, a layer's forward")
    seconds.set(ylabel="seconds of a rank's forward, nothing hidden", title=f"network of {network}")
    for axes in (traffic, seconds):
        axes.set(xlabel=f"tokens, {kind(newest)['tokens']:,} a rank", yscale="log")
        axes.set_xscale("log", base=2)
        axes.legend(frameon=False, fontsize=7)
    return figure


PATTERNS: dict[str, Callable[[], Figure]] = {
    "pattern-branches": _branches,
    "pattern-heads": _heads,
    "pattern-offsets": _offsets,
    "pattern-coverage": _coverage,
    "pattern-layouts": _layouts,
}

PICTURES: dict[str, dict[str, Callable[[list[Record]], Figure | None]]] = {
    "attention": {"time": _time, "memory": _memory, "density": _density},
    "compare": {"compare-lengths": _compare_lengths, "compare-shares": _compare_shares},
    "dilation": {"dilation": _dilation},
    "strategies": {"strategies": _strategies},
    "model": {"decoding": _decoding},
    "simulate": {"weak-scaling": weak_scaling},
}
