"""Define `bench`, `compare`, `profile`, `plot` and `simulate`: their arguments, progress and tables."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, TypeVar

import torch

from dilated_attention.plumbing import TRANSPORTS, storage
from dilated_attention_lab.bench import check, compare, pattern_options, simulate, tables
from dilated_attention_lab.bench.cases import DILATED, SPARSE, Case, Method
from dilated_attention_lab.bench.measure import MATMUL, Spread, lack_of_memory, refusal
from dilated_attention_lab.bench.profile import OWN_TIME, once, profile, rows, training_step
from dilated_attention_lab.bench.results import Recorder, Row, device_folder, failed
from dilated_attention_lab.bench.suites import (
    Step,
    block_sparse,
    chosen_keys,
    context_parallel,
    cpu,
    foundation,
    gpu,
    masks,
    minilm,
    model,
    own_attention,
    quality,
    selected,
    serving,
    strategies,
    windows,
)
from dilated_attention_lab.bench.tables import describe, write
from dilated_attention_lab.environment import device_name, require_device, unavailable
from dilated_attention_lab.options import flag, integers, option
from dilated_attention_lab.terminal import console, number, show

if TYPE_CHECKING:  # help does without rich and matplotlib
    from rich.table import Table
    from rich.text import Text

Item = TypeVar("Item")
DTYPES = ("float32", "float64", "bfloat16", "float16")
ROWS = "results; with --quick runs/results, which git ignores"
_METHODS: dict[str, Method] = {
    "dilated": "dilated",
    "block-sparse": "block-sparse",
    "block-sparse-dilated": "block-sparse dilated",
    "dense": "dense",
    "model": "dilated",
}
SUITES = {
    "foundation": foundation,
    "blocks": block_sparse,
    "windows": windows,
    "masks": masks,
    "selected": selected,
    "chosen": chosen_keys,
    "huggingface": minilm,
    "transformers": own_attention,
    "serving": serving,
    "model": model,
    "cpu": cpu,
    "quality": quality,
    "gpu": gpu,
    "parallel": context_parallel,
}


def add_options(command: str, parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a command, and the function that runs it."""
    {
        "bench": _add_bench,
        "compare": _add_compare,
        "profile": _add_profile,
        "plot": _add_plot,
        "simulate": _add_simulate,
    }[command](parser)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure, print a table, and store one JSON row per figure in <out>/<device>/<suite>.jsonl."
    about = {name: (suite.__doc__ or "").partition(": ")[2].strip() for name, suite in SUITES.items()}
    parser.epilog = "Suites: " + " ".join(f"{name}: {text}" for name, text in about.items())
    what = "what to measure; all: every suite but quality, in less than an hour on 2 idle cores"
    parser.add_argument("suite", nargs="+", choices=[*SUITES, "all", "check"], help=what)
    flag(parser, "quick", "smaller cases and fewer rounds: a first look")
    option(parser, "only", str, "run only steps whose label in the progress bar contains it", "", metavar="TEXT")
    option(parser, "device", str, "a PyTorch device", shown="cpu; for the gpu suite cuda")
    option(parser, "out", Path, "folder of the rows", shown=ROWS)
    flag(parser, "share", "also write all rows to one file here, to attach to an issue of the project")
    parser.add_argument("--part", type=int, choices=gpu.PARTS, help="run only this part of gpu (at most nine minutes)")
    option(parser, "baseline", Path, "baseline file of check", shown="results/baseline.json")
    flag(parser, "update", "with check: write the baseline file")
    parser.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> int:
    names = dict.fromkeys(options.suite)
    if "check" in names:
        unread = ("quick", "only", "device", "out", "share", "part")
        others = [name for name in names if name != "check"]
        others += [_option(name) for name in unread if getattr(options, name)]
        if others:
            raise ValueError(f"check takes --baseline and --update alone; got {' '.join(others)}: leave it out")
        return _check(options.baseline or Path("results/baseline.json"), options.update)
    if options.update or options.baseline:
        raise ValueError(f"--baseline and --update are of check alone; got {' '.join(names)}")
    if options.part and [*names] != ["gpu"]:
        raise ValueError(f"--part is of the gpu suite alone; got {' '.join(names)}")
    if options.quick and [*names] == ["gpu"]:
        raise ValueError("--quick is not of the gpu suite, whose parts have one size: leave it out, or take --only")
    if "gpu" in names and options.device is None and (why := unavailable("cuda")):
        raise ValueError(f"the gpu suite needs a GPU: {why}")
    device = require_device(options.device or ("cuda" if "gpu" in names else "cpu"))
    if "all" in names:
        names = dict.fromkeys(name for name in SUITES if name != "quality" and (name != "gpu" or device.type == "cuda"))
    steps = {name: SUITES[name].steps(device, options.quick) for name in names if name != "gpu"}
    if "gpu" in names:
        steps["gpu"] = gpu.steps(device, options.part)
    steps = {name: [step for step in found if options.only in step.label] for name, found in steps.items()}
    if not any(steps.values()):
        raise ValueError(f"--only {options.only!r}: no step of {[*steps]} fits")
    folder = _writable(options.out or Path("runs/results" if options.quick else "results"))
    shared = _writable(Path.cwd(), "--share in") / f"rows-{device_folder(device)}.txt" if options.share else None
    code = 0
    text = ""
    for name, chosen in steps.items():
        recorder = Recorder(folder, name, device)
        rows: list[Row] = []
        try:
            measure_suite(chosen, device, recorder, rows)
        except KeyboardInterrupt:
            show(table(f"{name}, interrupted", rows))
            return 130
        show(table(name, rows))
        text += recorder.text
        if recorder.failure is None:
            _tell(recorder.path, word="rows in")
        else:
            code = 1
    if shared is not None:
        storage.write_text(shared, text)
        print(f"attach {shared} to an issue of the kind 'Rows from my machine'")
    return code


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure every variant of the reports in the same rounds: dense, LongNet branches, head groups, ring, "
        "block-sparse, both multihead modules. Prints one table per setting with time, memory, error against float64 "
        "and keys reached, writes rows to <out>/<device>/compare.jsonl and draws two pictures. Settings that the file "
        "already holds are not measured again."
    )
    flag(parser, "quick", "2,048 and 4,096 tokens: 2 minutes on 2 cores, not an hour")
    option(parser, "only", str, "run only settings whose title contains it", "", metavar="TEXT")
    flag(parser, "again", "also measure what the file already holds")
    option(parser, "device", str, "a PyTorch device", "cpu")
    option(parser, "out", Path, "folder of the rows", shown=ROWS)
    parser.set_defaults(run=_compare)


def _compare(options: argparse.Namespace) -> int:
    from dilated_attention_lab.bench import charts

    device = require_device(options.device)
    settings = {setting.label: setting for setting in compare.settings(options.quick)}
    by_strategy = strategies.cases(options.quick)
    chosen = [label for label in (*settings, *by_strategy) if options.only in label]
    if not chosen:
        raise ValueError(f"--only {options.only!r}: no setting fits; titles are as {next(iter(settings))!r}")
    folder = _writable(options.out or Path("runs/results" if options.quick else "results"))
    recorder = Recorder(folder, "compare", device)
    for label in _along(chosen, str):
        if case := by_strategy.get(label):
            if options.again or not strategies.held(recorder.rows, case):
                for row in strategies.measured(case, device, 5.0 if options.quick else 30.0):
                    recorder.add(row)
            shown = tables.columns(strategies.rows_of(recorder.rows, case))
        else:
            setting = settings[label]
            if options.again or not compare.held(recorder.rows, setting):
                for row in compare.measured(setting, device):
                    recorder.add(row)
            shown = compare.table(compare.rows_at(recorder.rows, setting))
        show(_table(label, *shown))
    if recorder.failure is not None:
        return 1
    _tell(recorder.path)
    _tell(*charts.draw_file(recorder.path, recorder.path.parent), word="drawn:")
    return 0


def _writable(folder: Path, name: str = "--out") -> Path:
    """Return the folder after making it. Raises ValueError, before minutes of measuring, if it cannot be written.
    name: what the error calls the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ValueError(f"{name} {folder}: cannot be written ({error.strerror})") from error


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _sizes(options: argparse.Namespace, *names: str) -> str:
    return " ".join(f"{_option(name)} {getattr(options, name)}" for name in names)


def _check(path: Path, update: bool) -> int:
    from rich.text import Text

    device = device_name()
    if update:
        check.entries(path)  # a damaged file is refused before minutes of measuring
    baseline = {} if update else check.read_baseline(path, device)
    verdicts = [check.check(guard, baseline) for guard in _along(check.GUARDS, lambda guard: guard.name)]
    lines = []
    for verdict in verdicts:
        value, limit = f"{number(verdict.value)} {verdict.guard.unit}", verdict.limit
        known = ("none", "") if limit is None else (number(verdict.baseline or 0.0), number(limit))
        judged = "" if update else "held" if verdict.held else Text("WORSE", "bold")
        lines.append((verdict.guard.name, value, *known, judged))
    show(_table("check", ("figure", "value", "baseline", "at most", ""), lines))
    if update:
        check.write_baseline(path, device, {verdict.guard.name: verdict.value for verdict in verdicts})
        _tell(path)
        return 0
    worse = [verdict.guard.name for verdict in verdicts if not verdict.held]
    if worse:
        print(f"dilated-attention bench check: worse than {path}: {'; '.join(worse)}", file=sys.stderr)
    return 1 if worse else 0


def _along(items: Sequence[Item], label: Callable[[Item], str]) -> Generator[Item, None, None]:
    """Yield the items one after another, under a progress bar; without a terminal, print a line before each."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    bar = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    terminal = console(stderr=True)
    with Progress(*bar, console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        task = progress.add_task("", total=len(items))
        for number, item in enumerate(items, 1):
            progress.update(task, description=label(item))
            if not terminal.is_terminal:
                print(f"{number} of {len(items)}: {label(item)}", flush=True)
            yield item
            progress.advance(task)


def _table(title: str, headings: Sequence[str], lines: Iterable[Sequence[str | Text]] = ()) -> Table:
    from rich.table import Table

    shown = Table(headings[0], title=title, title_justify="left")
    for heading in headings[1:]:
        shown.add_column(heading, justify="right", no_wrap=True)
    for line in lines:
        shown.add_row(*line)
    return shown


def _tell(*paths: Path, word: str = "written:") -> None:
    for path in paths:
        print(f"{word} {path}")


def _add_profile(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run one call under PyTorch's profiler. Prints the stages, and writes rows, a Chrome trace and a picture under "
        "<out>/<device>/."
    )
    parser.add_argument("method", choices=[*_METHODS], help="what to profile; model: a training step of LongNetLM")
    for name, text, default in (
        ("tokens", "sequence length", 8192),
        ("batch", "samples", 1),
        ("heads", "attention heads", 8),
        ("head-dim", "width of a head", 64),
        ("block-size", "tokens of a block", 128),
    ):
        option(parser, name, int, text, default)
    option(parser, "segments", integers, "segment lengths", (2048, 4096, 8192))
    option(parser, "rates", integers, "dilation rates", (1, 2, 4))
    option(parser, "blocks", str, "kind of block layout", "local", choices=block_sparse.KINDS, metavar=None)
    option(parser, "density", float, "share of the layout's blocks that are active", 0.1)
    flag(parser, "causal", "use a causal mask")
    flag(parser, "forward", "leave out the backward")
    option(parser, "dtype", str, "dtype of q, k and v", "float32", choices=DTYPES, metavar=None)
    option(parser, "device", str, "a PyTorch device", "cpu")
    option(parser, "out", Path, "folder to write to", Path("runs/results"))
    parser.set_defaults(run=partial(_profile, parser))


def _add_plot(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "plot PATTERN: draw which keys each query sees. plot RESULTS: draw the contents of <results>/<device>/*.jsonl "
        "as <out>/<device>/*.png, and write the figures that documents ask for between <!-- results: ... --> and "
        "<!-- end of results -->. In a clone it also writes docs/pictures/measured, docs/tables and docs/machines.md."
    )
    what = f"a pattern ({', '.join(pattern_options.NAMES)}), or a folder of results (results)"
    parser.add_argument("what", nargs="?", default="results", metavar="PATTERN|RESULTS", help=what)
    out = "for a pattern the PNG file to write (runs/pattern.png); for results a folder (docs/pictures)"
    option(parser, "out", Path, out)
    documents = "Markdown files or folders (default, if RESULTS is results: README.md and docs, if they exist)"
    option(parser, "documents", Path, documents, nargs="*")
    pattern_options.add_options(parser)
    parser.set_defaults(run=_plot)


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run the real code of the last rank in worlds of up to --ranks ranks, with the same number of tokens per rank, "
        "on PyTorch's fake process group. Bytes and messages are counted, compute and memory are measured on this "
        "device, communication time and the other schemes are modelled. Writes rows and a picture to <out>."
    )
    for name, default, text in (
        ("tokens", 1 << 30, "sequence length in the largest world"),
        ("ranks", 8192, "ranks of the largest world"),
        ("least", 8, "ranks of the smallest world; they grow fourfold"),
        ("heads", 12, "attention heads"),
        ("head-dim", 64, "width of a head"),
        ("segment", 2048, "segment length of the first branch; rates and segments double"),
    ):
        option(parser, name, int, text, default)
    option(parser, "transport", str, "how rows move", "auto", choices=["auto", *TRANSPORTS], metavar=None)
    flag(parser, "not-causal", "let queries see later keys too")
    model = "a config.json of transformers, or its folder: print what its layers move, and run nothing"
    option(parser, "model", Path, model)
    option(parser, "dtype", str, "dtype of q, k and v", "float32", choices=DTYPES, metavar=None)
    option(parser, "latency", float, "modelled seconds per message", 5e-6)
    option(parser, "bandwidth", float, "modelled bytes per second and rank", 50e9)
    option(parser, "out", Path, "folder to write to", Path("runs/simulate"))
    parser.set_defaults(run=_simulate)


def _simulate(options: argparse.Namespace) -> int:
    from dilated_attention_lab.bench import charts

    for name in ("tokens", "ranks", "least", "latency", "bandwidth"):
        if not 0 < getattr(options, name) < math.inf:
            raise ValueError(f"--{name} must be positive and finite; got {getattr(options, name)}")
    if options.tokens % options.ranks:
        raise ValueError(f"--tokens {options.tokens} must be a multiple of --ranks {options.ranks}")
    if options.model is not None:
        network = simulate.Network(options.latency, options.bandwidth)
        worlds_of = simulate.world_sizes(options.least, options.ranks)
        lengths = {ranks: options.tokens // options.ranks * ranks for ranks in worlds_of}
        print(simulate.of_model(options.model, lengths, getattr(torch, options.dtype), not options.not_causal, network))
        return 0
    worlds = [
        simulate.World(
            seq_len=options.tokens // options.ranks * ranks,
            ranks=ranks,
            heads=options.heads,
            head_dim=options.head_dim,
            first_segment=options.segment,
            is_causal=not options.not_causal,
            dtype=options.dtype,
            transport=options.transport,
        )
        for ranks in simulate.world_sizes(options.least, options.ranks)
    ]
    needed = 12 * max(world.shard for world in worlds) * worlds[0].row_bytes // 2
    if lacking := lack_of_memory(needed, torch.device("cpu")):
        sizes = _sizes(options, "tokens", "ranks", "heads", "head_dim")
        raise ValueError(f"{sizes}: a rank {lacking}; take more ranks")
    for world in worlds:
        world.plan()  # a transport that does not serve
    recorder = Recorder(_writable(options.out), "simulate", torch.device("cpu"))
    model = simulate.Network(options.latency, options.bandwidth)
    found: list[Row] = []
    for world in _along(worlds, lambda world: f"rank {world.ranks - 1:,} of {world.ranks:,}"):
        (one,) = simulate.rehearse([world])
        for row in simulate.rows(one, model):
            recorder.add(row)
            found.append(row)
    show(table("the last rank of each world, one call", found))
    if recorder.failure is not None:
        return 1
    _tell(recorder.path)
    _tell(*charts.draw_file(recorder.path, recorder.path.parent))
    return 0


def _plot(options: argparse.Namespace) -> int:
    from dilated_attention_lab.bench import charts, overview, result_pages

    if options.what in pattern_options.NAMES:
        if options.documents is not None:
            raise ValueError(f"--documents is of a folder of results, not of {options.what!r}; it would change nothing")
        path = options.out or Path("runs/pattern.png")
        _writable(path.parent)
        print(pattern_options.picture(options.what, vars(options), path))
        _tell(path)
        return 0
    results, out = Path(options.what), options.out or Path("docs/pictures")
    if not results.is_dir():
        raise ValueError(
            f"{options.what!r} is neither a pattern ({', '.join(pattern_options.NAMES)}) nor a folder of results"
        )
    for name in sorted(vars(options).keys() - {"command", "run", "what", "out", "documents"}):
        what = f"{options.what!r}, a folder of results"
        raise ValueError(f"{_option(name)} is of a pattern, not of {what}; it would change nothing")
    written = list(charts.draw(results, out))
    documents = options.documents
    if documents is None:
        documents = [Path("README.md"), Path("docs")] if results == Path("results") else []
        documents = [place for place in documents if place.exists()]
        if Path("docs/measured.md").exists():
            written += overview.draw(results, Path("docs/pictures/measured"))
            written += result_pages.write(results, Path("docs"))
    for place in documents:
        files = sorted(place.rglob("*.md")) if place.is_dir() else [place]
        written += [file for file in files if write(file, results)]
    _tell(*written)
    return 0


def _profile(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from dilated_attention_lab.bench import charts

    device, method, is_model = require_device(options.device), _METHODS[options.method], options.method == "model"
    unread = ["causal", "forward", "dtype"] * is_model
    unread += ["segments", "rates"] * (method not in DILATED)
    unread += ["blocks", "density", "block_size"] * (method not in SPARSE)
    for name in unread:
        if getattr(options, name) != parser.get_default(name):
            raise ValueError(f"{_option(name)} is not of {options.method!r}; it would change nothing")
    case = Case(
        method=method,
        seq_len=options.tokens,
        batch=options.batch,
        heads=options.heads,
        head_dim=options.head_dim,
        segment_lengths=options.segments,
        dilation_rates=options.rates,
        blocks=options.blocks,
        density=options.density,
        block_size=options.block_size,
        is_causal=options.causal or is_model,
        dtype=options.dtype,
    )
    if refused := refusal([(case, not options.forward)], device):
        raise ValueError(f"{_sizes(options, 'tokens', 'batch', 'heads', 'head_dim')}: {refused}")
    backward = not options.forward
    work = training_step(case, device) if is_model else case.contender(device, backward=backward)
    recorder = Recorder(_writable(options.out), f"profile-{options.method}", device)
    trace = recorder.path.with_suffix(".trace.json")
    found = profile(lambda: list(work()), device, trace)
    new = list(rows(case, found, once(case), backward=backward))
    recorder.forget_like(OWN_TIME, new[0].parameters)  # of stages that the call no longer has
    for row in new:
        recorder.add(row)
    title = f"{options.method}: {describe(case.parameters)}, " + ("forward and backward" if backward else "forward")
    show(table(title, new))
    _tell(recorder.path, trace, *charts.draw_file(recorder.path, recorder.path.parent))
    return 0


def measure_suite(steps: list[Step], device: torch.device, recorder: Recorder, rows: list[Row]) -> None:
    """Run the steps one after another. Each row goes to the recorder and to `rows` as soon as it is there. A step whose
    cases do not fit in memory is not run; a row says why."""
    with closing(_along(steps, lambda step: step.label)) as under_way:
        for step in under_way:
            recorder.forget(failed(step.label))
            if refused := refusal(step.needs, device):
                found = iter([Row(failed(step.label), step.needs[0][0].parameters, None, "", refused=refused)])
            else:
                found = step.measure()
            for row in found:
                recorder.add(row)
                rows.append(row)


def table(title: str, rows: list[Row]) -> Table:
    """Return a table with one line per row, grouped under headings that name the case. Empty columns are left out."""
    from rich.text import Text

    lines = [_cells(row) for row in rows]
    headings = ("figure", "value", "10 to 90 %", "GFLOP/s", "bar")
    filled = [i for i in range(len(headings)) if i < 2 or any(len(line[i]) for line in lines)]
    shown, case = _table(title, [headings[i] for i in filled]), ""
    for row, line in zip(rows, lines, strict=True):
        if describe(row.parameters) != case:
            case = describe(row.parameters)
            shown.add_section()
            shown.add_row(Text(case, "bold"))
        shown.add_row(*(line[i] for i in filled))
    return shown


def _cells(row: Row) -> list[Text]:
    from rich.text import Text

    lines = [("", "") if row.value is None else (f"{number(row.value)} {row.unit}", _range(row.spread))]
    lines += [(f"{number(ratio.median)} x {name[:12]}", _range(ratio)) for name, ratio in row.over.items()]
    rates = [number(rate) for name, rate in row.rates.items() if len(row.rates) == 2 or name != MATMUL]
    met = "" if row.bar is None else Text.assemble(f"{number(row.bar)} ", "met" if row.met else ("NOT MET", "bold"))
    name = Text.assemble(row.name, *(("\n", (row.refused, "bold")) if row.refused else ()))
    columns = ["\n".join(column) for column in zip(*lines, strict=True)]
    return [name, *map(Text, (*columns, "\nof ".join(rates))), Text.assemble(met)]


def _range(spread: Spread | None) -> str:
    return "" if spread is None else f"{number(spread.p10)} to {number(spread.p90)}"
