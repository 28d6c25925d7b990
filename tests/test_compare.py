"""`dilated-attention compare`: its oracle, its variants, resuming."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dilated_attention.backends.reference import count_matrix
from dilated_attention_lab.bench import compare, rank_processes
from dilated_attention_lab.bench.cases import Case
from dilated_attention_lab.bench.exact import exact, keys_of, keys_reached
from dilated_attention_lab.bench.results import read
from dilated_attention_lab.bench.suites import strategies
from dilated_attention_lab.commands import main

TINY = Case(method="dilated", seq_len=256, segment_lengths=(64, 128), dilation_rates=(1, 2), heads=3, head_dim=8)
CPU = torch.device("cpu")


@pytest.fixture
def few(monkeypatch):
    """Four of the variants."""
    kept, variants = ("dense", "LongNet branches", "head groups", "ring of one process"), compare.variants
    monkeypatch.setattr(compare, "variants", lambda base: {name: variants(base)[name] for name in kept})


@pytest.fixture
def no_strategies(monkeypatch):
    monkeypatch.setattr(strategies, "cases", lambda quick: {})


def test_whole_calls_by_every_strategy(few, tmp_path, monkeypatch, capsys):
    """Once: what the file holds is not measured again."""
    monkeypatch.setattr(compare, "settings", lambda quick: [])
    monkeypatch.setattr(strategies, "cases", lambda quick: {"by every strategy": replace(TINY, backend="native")})
    words = ["compare", "--out", str(tmp_path)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("dilated_attention", *strategies.STRATEGIES, strategies.OVER[:30]))
    monkeypatch.setattr(strategies, "measured", lambda *arguments: (pytest.fail(x) for x in ["measured again"]))
    assert main(words) == 0
    assert "index_select" in capsys.readouterr().out


def test_keys_of_a_row_against_the_count_matrix():
    case = replace(TINY, seq_len=150, is_causal=True)
    counts = count_matrix(case.segment_lengths, case.dilation_rates, case.pattern.offset_table(3), 150, is_causal=True)
    for head in range(3):
        for row in (0, 63, 64, 100, 149):
            found = torch.bincount(keys_of(case, row, head), minlength=150)
            assert found.tolist() == counts[head, row].tolist()


@pytest.mark.parametrize("method", ["block-sparse", "block-sparse dilated", "head groups", "multihead block-sparse"])
def test_the_oracle_agrees_with_every_variant_and_notices_another(method):
    case = replace(TINY, method=method, blocks="random", density=0.5, block_size=32)
    torch.manual_seed(0)
    q, k, v = case.inputs(CPU)[0]
    rows = [0, 5, 77, 255]
    with torch.no_grad():
        out = case.prepare()(q, k, v)[:, rows].double()
    torch.testing.assert_close(out, exact(case, q, k, v, rows), rtol=0, atol=2e-6)
    assert (exact(case, q, k.flip(1), v, rows) - out).abs().max() > 1e-3


def test_keys_reached_are_those_of_all_heads():
    case = replace(TINY, segment_lengths=(64,), dilation_rates=(4,), heads=2)
    assert keys_reached(case, [0]) == 16  # head 0 sees its residue; head 1 has another
    assert keys_reached(replace(case, heads=1), [1]) == 0


def test_measured_has_a_row_a_variant_and_its_errors_meet_the_bar():
    setting = compare.Setting(replace(TINY, heads=4), seconds=0.01)
    rows = list(compare.measured(setting, CPU))
    shown = [row for row in rows if row.name == compare.NAME]
    assert [row.parameters["variant"] for row in shown] == list(compare.variants(setting.base))
    assert all(row.value > 0 and row.figures["error"] < 3e-6 and "forward+backward" in row.times for row in shown)
    (worst,) = (row for row in rows if row.name == compare.WORST)
    assert worst.met
    share = {row.parameters["variant"]: row.figures["share of score entries"] for row in shown}
    assert share["dense"] == 1
    assert share["LongNet branches"] == share["ring of one process"] == pytest.approx(64 / 256 + 128 / 4 / 256)
    records = [json.loads(json.dumps({"name": row.name, "value": row.value, "parameters": row.parameters,
                                      "times": {}, "figures": row.figures})) for row in rows]  # fmt: skip
    assert len(compare.rows_at(records, setting)) == len(shown)
    assert not compare.rows_at(records, replace(setting, base=replace(setting.base, dtype="bfloat16")))
    headings, cells = compare.table(compare.rows_at(records, setting))
    assert all(len(line) == len(headings) for line in cells)


def test_an_error_that_is_no_number_meets_no_bar(few, monkeypatch):
    prepare = Case.prepare

    def broken(case, *arguments):
        call = prepare(case, *arguments)
        return (lambda q, k, v: call(q, k, v) * torch.nan) if case.method == "head groups" else call

    monkeypatch.setattr(Case, "prepare", broken)
    rows = compare.measured(compare.Setting(TINY, backward=False, seconds=0.0), CPU)
    assert next(row for row in rows if row.name == compare.WORST).met is False


def test_memory_is_not_of_what_a_first_call_alone_takes(few, monkeypatch):
    prepare = Case.prepare

    def prepared(case, *arguments):
        call, once = prepare(case, *arguments), [1 << 26]
        return lambda q, k, v: [call(q, k, v), torch.ones(once.pop() if once else 1, dtype=torch.uint8)][0]

    monkeypatch.setattr(Case, "prepare", prepared)
    rows = [*compare.measured(compare.Setting(TINY, backward=False, seconds=0.0), CPU)]
    peaks = [row.figures["peak memory, bytes"] for row in rows if row.name == compare.NAME]
    assert len(peaks) == 4
    assert max(peaks) < 1 << 25


def test_what_is_too_large_or_too_short_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(compare, "MOST_FLOPS", compare.variants(TINY)["dense"].flops - 1)
    setting = compare.Setting(replace(TINY, segment_lengths=(32, 64)), backward=False, seconds=0.0)
    refused = {r.parameters["variant"]: r.refused for r in compare.measured(setting, CPU) if r.refused}
    assert "TFLOP a call" in refused.pop("dense")
    assert set(refused.values()) == {"a branch has fewer keys than a block"}
    assert len(refused) == 3


def test_settings_are_those_of_the_reports():
    whole = compare.settings(False)
    assert {x.base.seq_len for x in whole} == set(compare.LENGTHS)
    assert {x.base.dtype for x in whole} == set(compare.DTYPES)
    assert {x.base.batch for x in whole} == {1, 4}
    assert {x.base.segment_lengths for x in whole} == {(1024, 2048, 4096), (2048, 4096, 8192)}
    assert sum(x.compiled for x in whole) == 1
    reported = {(x.base.seq_len, x.base.dtype) for x in whole if x.base.segment_lengths == (1024, 2048, 4096)}
    assert reported == set(itertools.product(compare.LENGTHS, compare.DTYPES))


def test_what_a_file_holds_is_not_measured_again(few, no_strategies, tmp_path, monkeypatch, capsys):
    setting = compare.Setting(replace(TINY, dtype="bfloat16"), backward=False, seconds=0.0)
    monkeypatch.setattr(compare, "settings", lambda quick: [setting])
    words = ["compare", "--out", str(tmp_path)]
    assert main(words) == 0
    assert "head groups" in capsys.readouterr().out
    monkeypatch.setattr(compare, "measured", lambda *arguments: pytest.fail("measured again"))
    assert main(words) == 0
    assert "head groups" in capsys.readouterr().out
    assert main([*words, "--only", "no such title"]) == 2


def test_a_setting_is_measured_again_after_an_interruption(few, no_strategies, tmp_path, monkeypatch):
    setting = compare.Setting(TINY, backward=False, seconds=0.0)
    monkeypatch.setattr(compare, "settings", lambda quick: [setting])
    words, calls, measured = ["compare", "--out", str(tmp_path / "out")], [], compare.measured

    def counted(*arguments):
        calls.append(arguments)
        yield from itertools.islice(measured(*arguments), 5 if len(calls) == 1 else None)

    monkeypatch.setattr(compare, "measured", counted)
    assert [main(words) for _ in range(2)] == [0, 0]
    assert len(calls) == 2  # the first ended among the variants


def test_the_settings_of_a_whole_file_are_held_and_none_without_any_of_its_rows():
    path = Path(__file__).parents[1] / "results" / "cpu-2-threads-amd-epyc-zen-4" / "compare.jsonl"
    rows, whole = read(path), compare.settings(False)
    assert [setting.label for setting in whole if not compare.held(rows, setting)] == []
    reported = next(setting for setting in whole if setting.base == compare.REPORTED and not setting.compiled)
    its = [row for row in rows if not compare.held([x for x in rows if x is not row], reported)]
    assert Counter(row["name"] for row in its) == {
        compare.NAME: 18, compare.WORST: 1, f"forward: {compare.RING}": 1, f"forward+backward: {compare.RING}": 1,
        "the plan: time over LongNet branches": 6, "the plan: time over head groups": 6,
    }  # fmt: skip


@pytest.mark.parametrize(("platform", "named"), [("linux", {"GLOO_SOCKET_IFNAME": "lo"}), ("darwin", {})])
def test_the_loopback_interface_is_named_where_it_has_that_name(platform, named, monkeypatch):
    monkeypatch.setattr(rank_processes.sys, "platform", platform)
    monkeypatch.setattr(rank_processes, "in_new_process", lambda *arguments, **options: options)
    options = rank_processes.measure("scaling", TINY, 2, rounds=1)
    assert {name: value for name, value in options.items() if "GLOO" in name} == named


@pytest.mark.thorough
def test_every_variant_compiles(compiling_python):
    compiling_python("""
        from dataclasses import replace

        import torch

        from dilated_attention_lab.bench import compare

        base = replace(compare.REPORTED, seq_len=256, segment_lengths=(128, 256), dilation_rates=(1, 2), heads=2)
        inputs = base.inputs(torch.device("cpu"))[0]
        for name, case in compare.variants(base).items():
            call = case.prepare()
            with torch.no_grad():
                compiled = torch.compile(call, backend="eager", fullgraph=True)(*inputs)
                assert torch.equal(compiled, call(*inputs)), name
    """)
