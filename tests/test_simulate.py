"""One rank of a large world on the fake process group, and what several processes measure."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dilated_attention_lab.bench import charts, command, rank_processes
from dilated_attention_lab.bench.cases import Case
from dilated_attention_lab.bench.results import Record, read
from dilated_attention_lab.bench.simulate import Network, Rehearsal, World, rehearse, rows, world_sizes
from dilated_attention_lab.bench.suites import context_parallel
from dilated_attention_lab.commands import main

SMALL = World(seq_len=1 << 13, ranks=64, heads=4, head_dim=8, first_segment=64)
BILLION = World(seq_len=1 << 30, ranks=8192, dtype="bfloat16")


def test_a_rehearsal_moves_what_the_formula_says() -> None:
    worlds = [replace(SMALL, transport=name) for name in ("exchange", "doubling", "ring")]
    worlds += [replace(SMALL, ranks=4, transport="ulysses"), replace(SMALL, is_causal=False, seq_len=8000)]
    for world, found in zip(worlds, rehearse(worlds, rounds=2), strict=True):
        plan = world.plan()
        assert found.world == world
        assert found.transport == plan.transport
        assert (found.sent, found.received) == (plan.bytes_sent, plan.bytes_received)
        assert (found.messages, found.rounds) == (plan.peers_received, plan.rounds)
        assert found.returned == plan.backward_bytes_sent
        assert len(found.forward) == len(found.backward) == 2
        assert min(found.forward + found.backward) > 0


def test_bytes_at_a_billion_tokens() -> None:
    plan = BILLION.plan("doubling")
    assert max(plan.bytes_sent, plan.bytes_received) <= 41e6
    others = BILLION.others()
    assert others["dense ring"][0] == pytest.approx(3.3e12, rel=0.01)
    assert others["official LongNet"][0] == pytest.approx(51.5e9, rel=0.01)
    assert others["all-gather"][0] == pytest.approx(75.5e6, rel=0.01)


def test_flops_are_those_of_the_pattern() -> None:
    """Over all ranks of a world without crossing segments, from the pattern's own count."""
    world = replace(SMALL, ranks=1, is_causal=False)
    assert world.flops() == world.pattern.flops(world.seq_len, world.heads, world.head_dim)
    assert replace(SMALL, ranks=1).flops(dense=True) == pytest.approx(
        4 * 8 * 4 * SMALL.seq_len**2 / 2  # half of the square
    )


def test_world_sizes_and_network() -> None:
    assert world_sizes(8, 8192) == [8, 32, 128, 512, 2048, 8192]
    assert world_sizes(8, 100) == [8, 32, 100]
    assert Network(1e-6, 1e9).seconds(2_000_000, 3) == pytest.approx(2e-3 + 3e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"ranks": 0}, "ranks must be positive; got 0"), ({"seq_len": 5, "ranks": 9}, "seq_len must give each of the 9")],
)
def test_worlds_that_cannot_be(changes: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(SMALL, **changes)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--tokens",
        "8192",
        "--ranks",
        "32",
        "--least",
        "8",
        "--heads",
        "4",
        "--head-dim",
        "8",
        "--segment",
        "64",
    ]
    assert main(["simulate", *options, "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert (
        text.index("measured: forward") < text.index("counted: sent") < text.index("modelled, 5 us a message, 50 GB/s")
    )
    (rows,) = tmp_path.glob("*/simulate.jsonl")
    assert (rows.parent / "weak-scaling.png").stat().st_size > 10_000
    kinds = {row["name"].partition(":")[0].partition(",")[0] for row in read(rows)}
    assert kinds == {"measured", "counted", "modelled"}


def rows_of_a_run(ranks: list[int], network: Network, second: int) -> list[Record]:
    """Return rows like those of the results file: from worlds of 16 tokens per rank."""
    return [
        {**asdict(row), "environment": {}, "date": f"2026-01-01T00:00:{second:02}Z"}
        for size in ranks
        for row in rows(
            Rehearsal(replace(SMALL, seq_len=16 * size, ranks=size), "ring", (1.0,), (1.0,), *range(6)), network
        )
    ]


def test_a_transformers_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """29 layers with windows and 5 full ones of Gemma 3 4B: a window's rows do not depend on the number of ranks."""
    sizes = {"num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    config = {"model_type": "gemma3_text", "hidden_size": 2560, "sliding_window": 1024, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ["--tokens", "1048576", "--ranks", "32", "--least", "2", "--dtype", "bfloat16"]
    assert main(["simulate", "--model", str(tmp_path), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["2", "8", "32"]
    window, full = 29 * 1023, 5 * (1048576 - 32768)
    received = (window + full) * 2 * 4 * 256 * 2
    assert lines[4].split()[2] == f"{received / 1e9:.3f}"
    assert lines[2].split()[-1] == "6.845"
    assert lines[-2].startswith("29 layers of Window(before=1023")


def test_the_picture_is_of_the_newest_network() -> None:
    fast, slow = Network(5e-6, 50e9), Network(5e-6, 1e9)
    first, second = rows_of_a_run([2, 8], fast, 1), rows_of_a_run([8, 32], slow, 2)
    assert charts.weak_scaling(first)[1].settings["xlabel"].endswith(": 5 us a message, 50 GB/s")
    panels = charts.weak_scaling(first + second)
    assert panels[1].settings["xlabel"].endswith(": 5 us a message, 1 GB/s")
    assert panels[1].series[0].x == [128, 512]
    again = charts.weak_scaling(rows_of_a_run([2, 8], fast, 3) + second)  # in the places of the first
    assert again[1].settings["xlabel"].endswith(": 5 us a message, 50 GB/s")
    assert charts.weak_scaling(first + rows_of_a_run([32], slow, 4)) == []
    assert charts.weak_scaling(first[:-1]) == []  # interrupted in its second world


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tokens", "0"], "--tokens must be positive and finite; got 0"),
        (["--model", "nowhere"], "--model nowhere: there is no such file or folder"),
        (["--tokens", "1000", "--ranks", "64"], "--tokens 1000 must be a multiple of --ranks 64"),
        (
            ["--tokens", "4096", "--ranks", "64", "--transport", "ulysses"],
            "12 query and 12 key-value heads do not divide",
        ),
        (["--tokens", str(1 << 40), "--ranks", "8", "--least", "8"], "GiB are free; take more ranks"),
    ],
)
def test_bad_input_is_one_line(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *options]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1


def test_tables_are_whole_at_80_columns(capsys, monkeypatch) -> None:
    """The output is a pipe, whose width is taken to be 80."""
    monkeypatch.setenv("COLUMNS", "80")
    found = Rehearsal(BILLION, "doubling", (98765.4,), (98765.4,), 10**12, 10**12, 8191, 13, 10**12, 1 << 40)
    command.show(command.table("world", list(rows(found, Network(5e-6, 5e9)))))
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) <= 80
    for word in (f"{1 << 30:,} tokens", "8,192 ranks", "98,765 s", "1,099,511,627,776 bytes", "8,191", "official"):
        assert word in printed


CASE = Case(method="dilated", seq_len=512, segment_lengths=(64, 512), dilation_rates=(1, 4), heads=4, head_dim=8)


@pytest.mark.thorough
def test_what_several_processes_measure() -> None:
    single = rank_processes.measure("single", CASE, 1, rounds=2)
    assert single["transfers"] == 0
    assert len(single["mesh"]) == len(single["no mesh"]) == 2
    rows = list(context_parallel._scaling(CASE, 2, 2))
    assert [row.bar for row in rows] == [1.15, None]
    assert all(row.value is not None and row.value > 0 for row in rows)
    *shares, difference = context_parallel._training(replace(CASE, seq_len=1024))
    assert [row.bar for row in shares] == [1.15, None]
    assert difference.met


def test_overlap_is_measured_or_refused_with_the_reason() -> None:
    rows = list(context_parallel._overlap(CASE, 2))
    if rank_processes.limit_refusal() is None:
        assert [row.unit for row in rows] == ["x", "x"]
        assert set(rows[0].times) == {"hidden", "waited for", "left out", "exchange"}
    else:
        assert rows[0].value is None
        assert "no limited link" in str(rows[0].refused)
