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

from dilated_attention.bench.measure import refusal
from dilated_attention.bench.results import Recorder, Row
from dilated_attention.bench.suites import Step, foundation
from dilated_attention.environment import require_device

SUITES = {"foundation": foundation}


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
            console.print(f"rows in {recorder.path}", highlight=False)
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
    for heading in ("value", "10 to 90 %", "bar", "met"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        value = "" if row.value is None else f"{_number(row.value)} {row.unit}"
        spread = "" if row.spread is None else f"{_number(row.spread.p10)} to {_number(row.spread.p90)}"
        bar = "" if row.bar is None else _number(row.bar)
        met = {True: "yes", False: "[bold]no[/bold]", None: ""}[row.met]
        why = f"\n[bold]{row.refused}[/bold]" if row.refused else ""
        shown.add_row(f"{row.name}\n[dim]{describe(row.parameters)}[/dim]{why}", value, spread, bar, met)
    return shown


def describe(parameters: Mapping[str, Any]) -> str:
    """A case in words, as far as they tell it from the others of its suite."""
    words = [f"{parameters['seq_len']:,} tokens", f"{parameters['heads']} heads"]
    if rates := parameters.get("dilation_rates"):
        words.append(f"{len(rates)} branches" if len(rates) > 1 else "1 branch")
    if parameters.get("is_causal"):
        words.append("causal")
    return ", ".join(words)


def _number(value: float) -> str:
    if value and abs(value) < 0.1:
        return f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) >= 10 else f"{value:.2f}"
