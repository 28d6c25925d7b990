"""The command line of `bench`: its arguments, progress and tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dilated_attention.bench.measure import MATMUL, Spread, refusal
from dilated_attention.bench.results import Recorder, Row
from dilated_attention.bench.suites import Step, attention, dilation, foundation, real, strategies
from dilated_attention.environment import require_device

SUITES = {
    "foundation": foundation,
    "attention": attention,
    "dilation": dilation,
    "strategies": strategies,
    "real": real,
}


def add_parsers(commands: Any) -> None:
    """Add `bench` to the subparsers of the command line."""
    parser = commands.add_parser(
        "bench",
        help="measure speed and memory against dense attention",
        description="Measure, print a table, and keep one JSON row a figure under <out>/<device>/<suite>.jsonl.",
        epilog="Suites: "
        + " ".join(f"{name}: {(suite.__doc__ or '').partition(': ')[2].strip()}" for name, suite in SUITES.items()),
    )
    parser.add_argument("suite", nargs="+", choices=[*SUITES, "all"], help="what to measure")
    parser.add_argument("--quick", action="store_true", help="smaller cases and fewer rounds: a first look")
    parser.add_argument("--device", default="cpu", help="a PyTorch device")
    parser.add_argument(
        "--out", type=Path, help="folder of the rows (default: results; with --quick runs/results, which git ignores)"
    )
    parser.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> int:
    try:
        device = require_device(options.device)
    except ValueError as error:
        print(f"dilated-attention bench: error: {error}", file=sys.stderr)
        return 2
    folder = options.out or Path("runs/results" if options.quick else "results")
    console = Console()
    for name in SUITES if "all" in options.suite else dict.fromkeys(options.suite):
        recorder = Recorder(folder, name, device)
        rows: list[Row] = []
        try:
            measure_suite(SUITES[name].steps(device, options.quick), device, recorder, rows)
        except KeyboardInterrupt:
            console.print(table(f"{name}, interrupted", rows))
            return 130
        console.print(table(name, rows))
        if recorder.failure is None:
            console.print(f"rows in {recorder.path}", highlight=False, soft_wrap=True)
    return 0


def measure_suite(steps: list[Step], device: torch.device, recorder: Recorder, rows: list[Row]) -> None:
    """Take the steps one after another; every row goes to the recorder, and to `rows`, as soon as it is there."""
    bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*bar, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(steps))
        for step in steps:
            progress.update(task, description=step.label)
            refused = refusal(step.needs, device)
            if refused:
                case = step.needs[0][0]
                found = iter([Row(name=step.label, parameters=case.parameters, value=None, unit="", refused=refused)])
            else:
                found = step.measure()
            for row in found:
                recorder.add(row)
                rows.append(row)
            progress.advance(task)


def table(title: str, rows: list[Row]) -> Table:
    shown = Table(title=title, title_justify="left")
    shown.add_column("figure")
    for heading in ("value", "10 to 90 %", "GFLOP/s", "bar"):
        shown.add_column(heading, justify="right", no_wrap=True)
    case = ""
    for row in rows:
        if describe(row.parameters) != case:
            case = describe(row.parameters)
            shown.add_section()
            shown.add_row(f"[bold]{case}[/bold]")
        lines = [("", "") if row.value is None else (f"{_number(row.value)} {row.unit}", _range(row.spread))]
        lines += [(f"{_number(ratio.median)} x {_short(name)}", _range(ratio)) for name, ratio in row.over.items()]
        rates = [_number(rate) for name, rate in row.rates.items() if len(row.rates) == 2 or name != MATMUL]
        bar = "" if row.bar is None else f"{_number(row.bar)} {'met' if row.met else '[bold]NOT MET[/bold]'}"
        why = f"\n[bold]{row.refused}[/bold]" if row.refused else ""
        shown.add_row(
            f"{row.name}{why}", *("\n".join(column) for column in zip(*lines, strict=True)), "\nof ".join(rates), bar
        )
    return shown


def _range(spread: Spread | None) -> str:
    return "" if spread is None else f"{_number(spread.p10)} to {_number(spread.p90)}"


def _short(name: str) -> str:
    return name if len(name) <= 12 else "ours" if name == strategies.OURS else name[:12]


def describe(parameters: Mapping[str, Any]) -> str:
    """A case in words, as far as they tell it from the others of its suite."""
    words = [f"{parameters['seq_len']:,} tokens", f"{parameters['heads']} heads"]
    if rates := parameters.get("dilation_rates"):
        words.append(f"{len(rates)} branches" if len(rates) > 1 else "1 branch")
    if density := parameters.get("density"):
        words.append(f"{parameters['blocks']} blocks, {density:.1%}")
    if parameters.get("is_causal"):
        words.append("causal")
    return ", ".join(words)


def _number(value: float) -> str:
    if value and abs(value) < 0.1:
        return f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) >= 10 else f"{value:.2f}"
