"""The same language model trained with dilated and with dense attention, side by side."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

from dilated_attention.models import LongNetConfig
from dilated_attention.patterns import Dilated
from dilated_attention.pictures import save_loss_curves
from dilated_attention.storage import write_text

NAMES = ("dilated", "dense")


def demo(out: Path, options: Sequence[str], console: Console) -> int:
    """Run `train` with `options` twice, each in a process of its own, so that peak memory is its own; then compare.

    Returns the exit code: that of the training that did not end with 0, if any.
    """
    rows = {}
    for number, name in enumerate(NAMES, 1):
        console.print(f"\n[bold]{number} of 2: {name} attention[/bold]")
        console.file.flush()
        code = _train([*options, "--out", str(out / name), "--overwrite", *(["--dense"] if name == "dense" else [])])
        if code:
            return code
        rows[name] = json.loads((out / name / "figures.jsonl").read_text(encoding="utf-8"))
    comparison = compare(rows["dilated"], rows["dense"])
    write_text(out / "figures.jsonl", "".join(json.dumps(row) + "\n" for row in (*rows.values(), comparison)))
    save_loss_curves(
        out / "loss.png",
        {name: _losses(out / name / "steps.jsonl") for name in NAMES},
        {name: rows[name]["held_out_bits_per_byte"] for name in NAMES},
    )
    console.print()
    console.print(_table(rows, comparison))
    console.print(explanation(comparison), highlight=False)
    console.print(f"saved in {out}: figures.jsonl, loss.png, dilated/ and dense/ (pattern.png, sample.txt, model/)")
    return 0


def compare(dilated: dict[str, Any], dense: dict[str, Any]) -> dict[str, Any]:
    """The ratios of two rows of `train`, and the score entries that each head of each model computes in a forward."""
    context = dilated["recipe"]["context"]
    config = LongNetConfig.from_json(json.dumps(dilated["config"]))
    causal = Dilated((context,), (1,))

    def entries(pattern: Dilated) -> float:
        return pattern.flops(context, config.kv_heads, 1, is_causal=True) / 4 / config.kv_heads

    return {
        "name": "demo",
        "dilated_over_dense_tokens_per_second": (
            dilated["tokens_per_second"]["median"] / dense["tokens_per_second"]["median"]
        ),
        "dilated_over_dense_bits_per_byte": dilated["held_out_bits_per_byte"] / dense["held_out_bits_per_byte"],
        "score_entries_per_head_dilated": entries(config.pattern or causal),
        "score_entries_per_head_dense": entries(causal),
        "context": context,
        "environment": dilated["environment"],
        "date": dense["date"],
    }


def explanation(comparison: dict[str, Any]) -> str:
    speed, bits = comparison["dilated_over_dense_tokens_per_second"], comparison["dilated_over_dense_bits_per_byte"]
    few, many = comparison["score_entries_per_head_dilated"], comparison["score_entries_per_head_dense"]
    return (
        f"Dilated attention trained at {speed:.2f} times the speed of dense attention: over {comparison['context']:,} "
        f"bytes each of its heads scores {few / 1e6:.2f} million (query, key) pairs where a dense head scores "
        f"{many / 1e6:.2f} million, {many / few:.1f} times as many; all else in the two models is the same. "
        f"After the same steps on the same bytes it needs {abs(bits - 1):.1%} {'more' if bits > 1 else 'fewer'} bits "
        "per held-out byte."
    )


def _table(rows: dict[str, dict[str, Any]], comparison: dict[str, Any]) -> Table:
    table = Table("attention", title="The same model, text and steps")
    for heading in ("tokens/s", "training time", "peak memory", "held-out bits per byte"):
        table.add_column(heading, justify="right")
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row['tokens_per_second']['median']:,.0f}",
            f"{row['train_seconds']:.0f} s",
            f"{row['peak_memory_bytes'] / 2**20:,.0f} MiB" if row["peak_memory_bytes"] else "not measured",
            f"{row['held_out_bits_per_byte']:.3f}",
        )
    measured = rows["dense"]["peak_memory_bytes"]
    table.add_section()
    table.add_row(
        "dilated / dense",
        f"{comparison['dilated_over_dense_tokens_per_second']:.2f}",
        f"{rows['dilated']['train_seconds'] / rows['dense']['train_seconds']:.2f}",
        f"{rows['dilated']['peak_memory_bytes'] / rows['dense']['peak_memory_bytes']:.2f}" if measured else "",
        f"{comparison['dilated_over_dense_bits_per_byte']:.3f}",
    )
    return table


def _losses(path: Path) -> list[float]:
    return [json.loads(line)["bits_per_byte"] * math.log(2) for line in path.read_text(encoding="utf-8").splitlines()]


def _train(options: Sequence[str]) -> int:
    """Run `train` in the foreground; a signal reaches it and it, not this process, decides when to end."""
    process = subprocess.Popen([sys.executable, "-m", "dilated_attention", "train", *options])

    def pass_on(number: int, _: FrameType | None) -> None:
        if number == signal.SIGTERM:  # the terminal sends SIGINT to both
            process.terminate()

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
