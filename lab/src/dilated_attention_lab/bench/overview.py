"""Draw the charts of docs/measured.md from the files of results, for `dilated-attention plot`.

Each chart is a list of panels, plain data without matplotlib. `digest` is a hash of that data. An SVG file carries
it, and a test compares it with the results: it finds an outdated chart, whichever version of matplotlib drew it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dilated_attention_lab.bench.charts import compared_lengths, compared_shares
from dilated_attention_lab.bench.compare import PLAIN
from dilated_attention_lab.bench.results import Record, read
from dilated_attention_lab.pictures import Panel, Series, save

EPYC, ZEN4, ZEN3, XEON = (
    "cpu-2-threads-amd-epyc",
    "cpu-2-threads-amd-epyc-zen-4",
    "cpu-2-threads-amd-epyc-without-avx-512",
    "cpu-2-threads-intel-r-xeon-r-processor",
)
XEON_WITHOUT_AMX = f"{XEON}-without-amx"
MACHINES = {EPYC: "EPYC\nZen 5", ZEN4: "EPYC\nZen 4", XEON: "Xeon\nAMX", ZEN3: "EPYC\nAVX2"}
"""Folders of results, and their names in a chart."""

Chart = Callable[[Path], list[Panel]]


def digest(panels: Sequence[Panel]) -> str:
    """Return a hash of what a chart shows."""
    return hashlib.sha256(json.dumps([asdict(panel) for panel in panels]).encode()).hexdigest()[:16]


def stored_digest(path: Path) -> str | None:
    """Return the hash that an SVG file carries, or None if it carries none."""
    found = re.search(r"data: ([0-9a-f]{16})", path.read_text(encoding="utf-8"))
    return found[1] if found else None


def draw(results: Path, folder: Path) -> Iterator[Path]:
    """Draw the charts whose data differ from the digest in their file; yield their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, chart in CHARTS.items():
        panels, path = chart(results), folder / f"{name}.svg"
        if not path.exists() or stored_digest(path) != digest(panels):
            save(panels, path, description=f"data: {digest(panels)}")
            yield path


def _rows(path: Path, name: str, **wanted: Any) -> list[Record]:
    """Return the rows that have a value, whose name contains `name` and whose parameters equal those in `wanted`."""
    found = [row for row in read(path) if name in row["name"] and row["value"] is not None]
    return [row for row in found if all(row["parameters"].get(key) == value for key, value in wanted.items())]


def _points(rows: Sequence[Record], parameter: str) -> tuple[list[Any], list[float]]:
    """Return (values of one parameter, values of the rows), in the order of the parameter."""
    rows = sorted(rows, key=lambda row: row["parameters"][parameter])
    return [row["parameters"][parameter] for row in rows], [row["value"] for row in rows]


def length(results: Path) -> list[Panel]:
    """Chart the time of a forward by sequence length: dense, dilated, head groups and local blocks."""
    return compared_lengths(read(results / ZEN4 / "compare.jsonl"))


def shares(results: Path) -> list[Panel]:
    """Chart the forward time of dilated patterns and of local and random blocks as a ratio to dense attention's, by the
    share of dense attention's score entries."""
    return compared_shares(read(results / ZEN4 / "compare.jsonl"))


def windows(results: Path) -> list[Panel]:
    """Chart a window's time per visible key as a ratio to dense attention's time per visible key."""
    series = []
    for dtype in ("float32", "bfloat16"):
        for phase in ("forward", "forward+backward"):
            rows = _rows(results / ZEN4 / "windows.jsonl", f"{phase}: time per entry", dtype=dtype, seq_len=16384)
            x, y = _points(rows, "before")
            series.append(Series(f"{dtype}, {phase}", [f"{before + 1:,}" for before in x], y))
    words = {"xlabel": "keys in the window", "ylabel": "time per visible key over dense"}
    return [Panel("bars", series, words, level=1.0)]


def transformers(results: Path) -> list[Panel]:
    """Chart the time of transformers models that keep their own windows, with this library's attention, as a ratio to
    `sdpa` (gpt-oss: to `eager`)."""
    series = []
    for phase in ("forward", "forward+backward"):
        rows = _rows(results / ZEN4 / "transformers.jsonl", f"{phase}: time over")
        names = []
        for row in rows:
            model = row["parameters"]["model"].removesuffix("-base").removesuffix(" 270M")
            names.append(f"{model}\n{row['parameters']['seq_len']:,}")
        series.append(Series(phase, names, [row["value"] for row in rows]))
    return [Panel("bars", series, {"ylabel": "time over sdpa (gpt-oss: over eager)"}, level=1.0)]


def chosen(results: Path) -> list[Panel]:
    """Chart the time and the peak memory of a layer that chooses its keys, by sequence length, beside `sdpa`."""
    panels = []
    for figure, label, unit in (("forward", "seconds of a forward", 1.0), ("peak memory", "peak memory, GiB", 2**-30)):
        series = []
        for name, method in (("this library", "dilated_attention"), ("sdpa", "sdpa")):
            rows = _rows(results / XEON_WITHOUT_AMX / "transformers.jsonl", f"chosen keys, {method}: {figure}")
            x, y = _points(rows, "seq_len")
            series.append(Series(name, x, [value * unit for value in y], name == "this library"))
        axes = {"xscale": "log", "yscale": "log", "xlabel": "tokens", "ylabel": label}
        panels.append(Panel("lines", series, axes))
    return panels


def blocks(results: Path) -> list[Panel]:
    """Chart the time of block layouts as a ratio to dense attention's, by density."""
    series = []
    for kind in ("local", "random", "dilated"):
        rows = _rows(
            results / EPYC / "blocks.jsonl",
            "forward+backward: time over dense",
            blocks=kind,
            seq_len=4096,
            is_causal=False,
        )
        series.append(Series(f"{kind} blocks", *_points(rows, "density")))
    words = {"xlabel": "share of blocks that are computed", "ylabel": "forward and backward over dense"}
    return [Panel("lines", series, {"xlim": (0, 0.55), "ylim": (0, 0.55), **words}, diagonal=True)]


def dense(results: Path) -> list[Panel]:
    """Chart the C++ kernels' time as a ratio to PyTorch's: in dense attention, and for a dilated pattern to dense calls
    of the same score entries."""
    dilated = {"seq_len": 8192, "segment_lengths": [2048, 4096, 8192]}
    return [
        _by_machine(results, "forward+backward: time over dense", "dense", seq_len=8192, dilation_rates=[1], heads=4),
        _by_machine(results, "forward+backward: time over dense calls", "dilated", **dilated),
    ]


def _by_machine(results: Path, name: str, label: str, **wanted: Any) -> Panel:
    """Return a panel of bars: the figure called `name` in float32 and bfloat16 on every machine."""
    series = []
    for dtype in ("float32", "bfloat16"):
        values: dict[str, float] = {}
        for folder, machine in MACHINES.items():
            rows = _rows(results / folder / "cpu.jsonl", name, dtype=dtype, head_dim=64, is_causal=False, **wanted)
            values.update((machine, row["value"]) for row in rows if row["name"] == name)
        series.append(Series(dtype, [*values], [*values.values()]))
    return Panel("bars", series, {"ylabel": f"{label}: time over PyTorch's"}, level=1.0)


def selected(results: Path) -> list[Panel]:
    """Chart the time of modules that select their keys as a ratio to a dense module's."""
    series = []
    for module in ("native sparse attention", "mixture of blocks"):
        rows = _rows(results / EPYC / "selected.jsonl", f"{module}, forward+backward: time over dense")
        x, y = _points(rows, "seq_len")
        series.append(Series(module, [f"{n:,} tokens" for n in x], y))
    return [Panel("bars", series, {"ylabel": "forward and backward over dense"}, level=1.0)]


def decoding(results: Path) -> list[Panel]:
    """Chart the time of one new token and the size of the cache, by the token's position."""
    panels = []
    for name, label, unit in (("time a token", "ms per new token", 1.0), ("bytes of the cache", "cache, MB", 1e-6)):
        series = []
        for method in ("dense", "dilated"):
            x, y = _points(_rows(results / EPYC / "model.jsonl", f"decoding, {method}: {name}"), "seq_len")
            series.append(Series(method, x, [value * unit for value in y], method == "dilated"))
        axes = {"xscale": "log", "ylim": (0, None), "xlabel": "position", "ylabel": label}
        panels.append(Panel("lines", series, axes))
    return panels


def peers(results: Path) -> list[Panel]:
    """Chart time and memory next to torchscale and a fork of dilated-attention-pytorch."""
    rows = {
        row["parameters"]["variant"]: row
        for row in _rows(results / ZEN4 / "compare.jsonl", "compare", seq_len=4096, **PLAIN)
    }
    names = {
        "LongNet branches": "this\nlibrary",
        "torchscale": "torchscale",
        "dense": "dense",
        "fork: DilatedAttention": "fork",
    }
    both = [rows[name]["times"]["forward+backward"]["median"] * 1e3 for name in names]
    peak = [rows[name]["figures"]["peak memory, bytes"] / 2**20 for name in names]
    labels, panels = [*names.values()], []
    for label, values in (("forward and backward, ms", both), ("peak memory of a forward, MiB", peak)):
        series = [Series("this library", labels[:1], values[:1]), Series("others", labels[1:], values[1:], False)]
        panels.append(Panel("bars", series, {"ylabel": label}))
    return panels


def recall(results: Path) -> list[Panel]:
    """Chart the share of right answers about a fact, by its distance from the question."""
    series = []
    for method, label in (("dilated", "dilated"), ("window", "window of equal cost")):
        rows = _rows(results / XEON / "quality.jsonl", "recall", method=method, seq_len=262144)
        x = [row["parameters"]["distance"][1] for row in rows]
        series.append(Series(label, x, [row["value"] for row in rows], method == "dilated"))
    words = {"xlabel": "tokens between fact and question, at most", "ylabel": "share of right answers"}
    return [Panel("lines", series, {"xscale": "log", "ylim": (-0.03, 1.05), **words})]


def text(results: Path) -> list[Panel]:
    """Chart the bits per byte of held-out text, after equal steps and after equal time: means over the seeds that were
    run for all models."""
    cases = (
        ("8,192 bytes,\nequal steps", ZEN3, "equal steps", {"seq_len": 8192}),
        ("32,768 bytes,\nequal steps", ZEN4, "equal steps", {"seq_len": 32768, "window": 3584}),
        ("32,768 bytes,\nequal time", XEON, "equal time", {"seq_len": 32768}),
    )
    values: dict[str, dict[str, float]] = {"dilated": {}, "dense": {}, "window": {}}
    for label, folder, budget, wanted in cases:
        seeds: dict[str, dict[int, float]] = {}
        for method in values:
            rows = _rows(results / folder / "quality.jsonl", f"text, {method}, {budget}: held-out text", **wanted)
            if rows:
                seeds[method] = {row["parameters"]["seed"]: row["value"] for row in rows}
        common = set.intersection(*(set(found) for found in seeds.values()))
        for method, found in seeds.items():
            values[method][label] = sum(found[seed] for seed in sorted(common)) / len(common)
    series = [Series(method, [*found], [*found.values()], method == "dilated") for method, found in values.items()]
    return [Panel("bars", series, {"ylabel": "bits per byte, held-out text", "ylim": (0, 2.6)})]


CHARTS: dict[str, Chart] = {
    chart.__name__: chart
    for chart in (length, shares, windows, transformers, chosen, blocks, dense, selected, decoding, peers, recall, text)
}
