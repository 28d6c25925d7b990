"""Benchmarks: what they time and count, what they write, and how they refuse."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dilated_attention.backends import cpu, fused, native
from dilated_attention.layout import BlockLayout
from dilated_attention.patterns import Dilated
from dilated_attention.plumbing import storage
from dilated_attention.weights import attention_weights
from dilated_attention_lab.bench import charts, check, command, measure, profile, results, rivals
from dilated_attention_lab.bench.cases import Case, contender
from dilated_attention_lab.bench.measure import Spread
from dilated_attention_lab.bench.results import Recorder, Row
from dilated_attention_lab.bench.suites import Step, block_sparse, quality, strategies
from dilated_attention_lab.bench.suites import cpu as cpu_suite
from dilated_attention_lab.commands import main
from dilated_attention_lab.environment import device_name
from dilated_attention_lab.training.text import read_text

CPU = torch.device("cpu")
SMALL = Case(method="dilated", seq_len=200, segment_lengths=(64, 128), dilation_rates=(1, 2), heads=2, head_dim=16)
NATIVE = replace(SMALL, backend="native")


def row(value=1.0, **changes) -> Row:
    return Row(**{"name": "figure", "parameters": {"seq_len": 1, "heads": 1}, "value": value, "unit": "x", **changes})


def exit_code(*words) -> int:
    try:
        return main([str(word) for word in words])
    except SystemExit as ended:
        return ended.code


# --- cases


@pytest.mark.parametrize("method", ["dilated", "dense", "dense calls"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_case_computes_what_it_says(method, is_causal):
    case = Case(**{**SMALL.parameters, "method": method, "is_causal": is_causal})
    phases = [list(case.contender(CPU, backward=backward)()) for backward in (False, True)]
    assert phases == [["forward"], ["forward", "forward+backward"]]
    q, k, v = case.inputs(CPU)[0]
    out = case.prepare()(q, k, v)
    assert out.shape == q.shape
    if method == "dense":
        expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=is_causal)
        torch.testing.assert_close(out, expected.transpose(1, 2))


def test_dense_calls_score_as_many_entries_as_the_pattern():
    """200 tokens: segments of 64 and 128 with a short last one of 8 and of 72, at rates 1 and 2."""
    dense = Case(**{**SMALL.parameters, "method": "dense calls"})
    shapes = [tuple(q.shape) for q, _, _ in dense.inputs(CPU)]
    assert shapes == [(3, 2, 64, 16), (1, 2, 8, 16), (1, 2, 64, 16), (1, 2, 36, 16)]
    entries = sum(batch * heads * rows**2 for batch, heads, rows, _ in shapes)
    assert SMALL.flops == dense.flops == 4 * 16 * entries


def test_wrong_cases():
    for change, message in (
        ({"seq_len": 0}, "seq_len must be positive; got 0"),
        ({"heads": -1}, "heads must be positive; got -1"),
        ({"segment_lengths": ()}, "segment_lengths is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            Case(**{**SMALL.parameters, **change})


# --- measuring


def test_rounds_interleave_and_a_ratio_is_of_rounds():
    order = []

    def sleeper(name, seconds):
        def work():
            order.append(name)
            time.sleep(seconds)
            yield "forward"
            time.sleep(seconds)
            yield "forward+backward"

        return work

    rounds = measure.interleave(
        {"a": sleeper("a", 0.02), "b": sleeper("b", 0.01)}, seconds=60.0, device=CPU, least=3, most=3
    )
    assert order == ["a", "b", "a", "b", "a", "b", "b", "a"]  # a warm-up; then starting from the product, a, b
    assert rounds.spread("a").runs == 3
    assert rounds.matmul_gflops > 0
    for phase in ("forward", "forward+backward"):
        assert rounds.spread("b", phase).minimum >= 0.01
        assert 1.2 < rounds.ratio("a", "b", phase).median < 2.8
        assert rounds.ratio("a", "b", phase, factor=10.0).median == pytest.approx(
            10 * rounds.ratio("a", "b", phase).median
        )
    assert rounds.spread("a", "forward+backward").minimum >= 0.04


def test_rounds_end_with_the_time():
    rounds = measure.interleave({"a": contender(lambda: time.sleep(0.05))}, seconds=0.2, device=CPU, least=2)
    assert 2 <= rounds.spread("a").runs <= 5


def test_quantiles():
    spread = Spread.of([float(x) for x in range(101)])
    assert spread == Spread(0.0, 10.0, 50.0, 90.0, 101)
    assert spread.scaled(0.5) == Spread(0.0, 5.0, 25.0, 45.0, 101)


def test_fused_calls_are_counted_and_the_operator_is_put_back():
    before = fused.forward
    one = replace(NATIVE, segment_lengths=(256,), dilation_rates=(1,))
    q, k, v = one.inputs(CPU)[0]
    assert measure.fused_calls(lambda: one.prepare()(q, k, v)) == 1
    assert measure.fused_calls(lambda: NATIVE.prepare()(q, k, v)) > 2
    with pytest.raises(ZeroDivisionError):
        measure.fused_calls(lambda: 1 / 0)
    assert fused.forward is before


def test_peak_memory_is_that_of_the_call_alone():
    case = Case(method="dilated", seq_len=40_000, segment_lengths=(64,), dilation_rates=(1,), heads=2)
    forward, both = (measure.peak_above_inputs(case, CPU, backward=backward) for backward in (False, True))
    assert case.out_bytes == 40_000 * 2 * 64 * 4
    assert 0.95 <= forward / case.out_bytes < 2  # out, lse and start-up; the system counts in batches of pages
    assert 3.8 <= both / case.out_bytes < case.predicted_bytes(backward=True) / case.out_bytes  # dq, dk and dv besides


def test_a_case_that_does_not_fit_is_refused_with_the_figures(monkeypatch):
    huge = Case(**{**SMALL.parameters, "seq_len": 1 << 40})
    assert measure.refusal([(SMALL, True)], CPU) is None
    message = measure.refusal([(huge, False), (SMALL, False)], CPU)
    assert message.startswith("needs 655360.0 GiB; ")
    monkeypatch.setattr(measure, "available_memory", lambda device: 3 * 2**30)
    assert measure.refusal([(huge, True)], CPU).endswith("; 3.0 GiB are free")
    monkeypatch.setattr(measure, "available_memory", lambda device: None)  # a system that does not tell
    assert measure.refusal([(huge, False)], CPU) is None


# --- rows


def test_a_row_holds_what_a_figure_needs(tmp_path):
    recorder = Recorder(tmp_path, "suite", CPU)
    recorder.add(row(1.0, bar=1.1, spread=Spread(0.9, 0.95, 1.0, 1.2, 7), times={"a": Spread(1.0, 1.0, 1.0, 1.0, 7)}))
    (path,) = tmp_path.rglob("*.jsonl")
    assert path == recorder.path
    (found,) = results.read(path)
    assert found["met"] is True
    assert found["spread"]["median"] == 1.0
    assert found["times"]["a"]["runs"] == 7
    assert {"device", "threads", "python", "torch", "dilated_attention"} <= found["environment"].keys()
    assert "refused" not in found
    assert {"commit", "date", "suite", "unit"} <= found.keys()


def test_measuring_again_replaces_a_row_and_keeps_the_others(tmp_path):
    first = Recorder(tmp_path, "suite", CPU)
    first.add(row(1.0))
    first.add(row(5.0, parameters={"seq_len": 2, "heads": 1}))
    Recorder(tmp_path, "suite", CPU).add(row(2.0))
    assert [found["value"] for found in results.read(first.path)] == [2.0, 5.0]


def test_a_folder_that_cannot_be_written_loses_nothing(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    recorder = Recorder(tmp_path / "file", "suite", CPU)
    recorder.add(row(1.0))
    recorder.add(row(2.0, name="other"))
    captured = capsys.readouterr()
    assert [json.loads(line)["value"] for line in captured.out.splitlines()] == [1.0, 2.0]
    assert "cannot be written" in captured.err


def test_a_damaged_file_is_named_with_its_line(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"name": "a", "parameters": {}}\n{"name": \n')
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2: not a row"):
        results.read(path)


def test_the_folder_names_the_device_and_no_machine(monkeypatch):
    assert results.device_folder(CPU).startswith(f"cpu-{torch.get_num_threads()}-threads-")
    monkeypatch.setattr(results, "device_name", lambda device: "AMD EPYC 9B14, 2 cores")
    assert results.device_folder(CPU).endswith("-amd-epyc-9b14")
    monkeypatch.setattr(results, "device_name", lambda device: "NVIDIA H200")
    assert results.device_folder(torch.device("cuda")) == "cuda-nvidia-h200"
    assert device_name(CPU)


# --- command


class Suite:
    """tiny: a suite of three steps, of which the second does not fit."""

    @staticmethod
    def steps(device, quick):
        huge = Case(**{**SMALL.parameters, "seq_len": 1 << 40})
        return [
            Step("one", lambda: iter([row(2.0 if quick else 1.0, bar=1.5)])),
            Step("two", lambda: 1 / 0, ((huge, False),)),
            Step("three", lambda: iter([row(np.float64(3.0), name="last")])),
        ]


def test_bench_prints_a_table_and_keeps_the_rows(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(command.SUITES, "foundation", Suite)
    assert exit_code("bench", "foundation", "--quick", "--out", tmp_path) == 0
    printed = capsys.readouterr().out
    for word in ("figure", "2.00 x", "NOT MET", "GiB", "3.00 x", "rows in"):
        assert word in printed
    (path,) = tmp_path.rglob("foundation.jsonl")
    rows = results.read(path)
    assert [found["value"] for found in rows] == [2.0, None, 3.0]
    assert "GiB" in rows[1]["refused"]


def test_the_file_to_share_has_the_rows_of_every_suite(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for suite in ("foundation", "blocks"):
        monkeypatch.setitem(command.SUITES, suite, Suite)
    assert exit_code("bench", "foundation", "blocks", "--share", "--out", "rows") == 0
    (path,) = tmp_path.glob("rows-cpu-*.txt")
    assert str(path) in capsys.readouterr().out
    assert [row["suite"] for row in results.read(path)] == ["foundation"] * 3 + ["blocks"] * 3


def test_a_disk_that_fills_up_while_measuring_is_no_success(tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(command.SUITES, "foundation", Suite)
    monkeypatch.setattr(storage, "write_text", full)
    assert exit_code("bench", "foundation", "--out", tmp_path) == 1
    captured = capsys.readouterr()
    assert '"value": 3.0' in captured.out
    assert "cannot be written (No space left on device); rows go to standard output" in captured.err


def test_only_the_steps_that_are_asked_for(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(command.SUITES, "foundation", Suite)
    assert exit_code("bench", "foundation", "--only", "thr", "--out", tmp_path) == 0
    (path,) = tmp_path.rglob("foundation.jsonl")
    assert [found["value"] for found in results.read(path)] == [3.0]
    assert exit_code("bench", "foundation", "--only", "four") == 2
    assert "--only 'four'" in capsys.readouterr().err


def test_an_interrupted_run_keeps_its_rows(tmp_path, capsys, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    steps = [Suite.steps(CPU, False)[0], Step("stop", interrupt)]
    monkeypatch.setattr(Suite, "steps", staticmethod(lambda device, quick: steps))
    monkeypatch.setitem(command.SUITES, "foundation", Suite)
    assert exit_code("bench", "foundation", "--out", tmp_path) == 130
    assert "interrupted" in capsys.readouterr().out
    (path,) = tmp_path.rglob("foundation.jsonl")
    assert [found["value"] for found in results.read(path)] == [1.0]


def test_wrong_arguments(capsys):
    assert exit_code("bench", "warp") == 2
    assert "invalid choice: 'warp'" in capsys.readouterr().err
    assert exit_code("bench", "foundation", "--device", "warp") == 2
    assert "--device warp: " in capsys.readouterr().err


def test_a_step_that_had_too_little_memory_leaves_no_row_once_it_has_enough(tmp_path, monkeypatch):
    monkeypatch.setitem(command.SUITES, "foundation", Suite)
    assert exit_code("bench", "foundation", "--out", tmp_path) == 0
    (path,) = tmp_path.rglob("foundation.jsonl")
    assert "GiB" in results.read(path)[1]["refused"]
    monkeypatch.setattr(Suite, "steps", lambda device, quick: [Step("two", lambda: iter([row(name="two, measured")]))])
    assert exit_code("bench", "foundation", "--out", tmp_path) == 0
    assert [found["name"] for found in results.read(path)] == ["figure", "last", "two, measured"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check", "foundation"], "check takes --baseline and --update alone; got foundation"),
        (["check", "--quick"], "got --quick"),
        (["check", "--device", "cpu"], "got --device"),
        (["foundation", "--update"], "--baseline and --update are of check alone; got foundation"),
        (["gpu", "--quick"], "--quick is not of the gpu suite"),
        (["blocks", "--part", "1"], "--part is of the gpu suite alone; got blocks"),
    ],
)
def test_what_would_change_nothing_is_refused(words, said, capsys, monkeypatch):
    monkeypatch.setattr(check, "GUARDS", ())
    monkeypatch.setitem(command.SUITES, "foundation", Suite)
    assert exit_code("bench", *words) == 2
    assert said in capsys.readouterr().err


# --- suites


@pytest.mark.parametrize("name", strategies.STRATEGIES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_strategies_compute_attention(name, is_causal):
    """Short last segments, a rate that divides neither, every offset."""
    case = Case(**{**SMALL.parameters, "dilation_rates": (2, 3), "heads": 5, "is_causal": is_causal})
    q, k, v = case.inputs(CPU)[0]
    out = strategies.attend(strategies.STRATEGIES[name], q, k, v, case.plan, is_causal)
    torch.testing.assert_close(out, case.prepare()(q, k, v))


def test_a_strategy_that_gives_no_numbers_meets_no_bar(monkeypatch):
    gather = strategies.STRATEGIES["gather"]
    broken = strategies.Strategy(lambda x, group: gather.take(x, group) * torch.nan, gather.put)
    monkeypatch.setitem(strategies.STRATEGIES, "gather", broken)
    assert next(strategies.measured(SMALL, CPU, 0.0)).met is False


@pytest.mark.parametrize("kind", ["local", "global", "dilated", "random"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", [name for name in rivals.RIVALS if name != "flex"])  # that one compiles
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_rivals_compute_attention(name, is_causal, kind):
    case = Case(
        method="block-sparse", seq_len=192, blocks=kind, density=0.3, block_size=16, heads=2, is_causal=is_causal
    )
    q, k, v = case.inputs(CPU)[0]
    out = replace(case, method=name).prepare()(q, k, v)
    torch.testing.assert_close(out, case.prepare()(q, k, v))


@pytest.mark.parametrize("is_causal", [False, True])
def test_mass_of_blocks_is_that_of_the_softmax(is_causal):
    q, k = torch.randn(2, 70, 4, 8), torch.randn(2, 70, 2, 8)
    mass = block_sparse.block_mass(q, k, 16, is_causal)
    weights = attention_weights(q, k, Dilated((70,), (1,)), is_causal=is_causal).to_dense()
    whole = torch.zeros(2, 4, 80, 80)
    whole[:, :, :70, :70] = weights
    expected = whole.unflatten(3, (5, 16)).sum(4).unflatten(2, (5, 16)).sum(3)
    expected /= torch.tensor([16, 16, 16, 16, 6])[:, None]
    torch.testing.assert_close(mass, expected)


def test_quality_is_judged_against_the_best_blocks():
    """Topics of 32 tokens, each seen by one other: two blocks of 20 and the diagonal hold everything."""
    topic = torch.arange(640) // 32
    q = 40 * torch.eye(20)[topic][None, :, None].repeat(1, 1, 2, 1)
    k = q.roll(320, 1)
    found = list(block_sparse._quality("x", [(q, k)], 32, False, {"top-k": 0.05, "LSH": 0.15}))
    lost = {row.name.rpartition(", ")[2]: row for row in found}
    assert lost["top-k"].value == pytest.approx(0, abs=1e-3)
    assert lost["local window"].value == pytest.approx(1, abs=1e-2)
    assert [lost[name].met for name in ("top-k", "LSH", "local window")] == [True, True, None]
    assert all(row.bar is None for row in block_sparse._quality("x", [(q, k)], 32, False, {}))


def test_mass_captured_is_that_of_the_lists():
    mass = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3], [0.0, 0.9, 0.1]])[None, None]
    layout = BlockLayout.from_mask(torch.tensor([[1, 0, 1], [0, 1, 1], [0, 0, 1]]).bool(), block_size=16)
    assert block_sparse.captured(mass, layout) == pytest.approx((0.4 + 0.5 + 0.1) / (0.7 + 0.7 + 0.1))


def test_flex_that_cannot_be_run_is_a_row(monkeypatch):
    monkeypatch.setattr(block_sparse.shutil, "which", lambda name: None)
    case = Case(method="block-sparse", seq_len=256, blocks="random", density=0.5, heads=2)
    rows = list(block_sparse._over_rivals(case, CPU, 0.0, "gather", "flex").measure())
    assert (rows[0].name, rows[0].refused) == ("forward: time over flex", "needs c++, which is not installed")
    assert [row.name.rpartition(" ")[2] for row in rows[1:]] == ["gather"] * 3


def test_sparse_cases_count_their_blocks():
    sparse = Case(
        **{**SMALL.parameters, "method": "block-sparse", "blocks": "random", "density": 0.5, "block_size": 16}
    )
    layout = sparse.layout(200)
    assert sparse.flops == 4 * 16 * 2 * layout.nnz * 256
    causal = Case(**{**sparse.parameters, "is_causal": True})
    assert causal.flops < 0.6 * sparse.flops
    product = Case(**{**SMALL.parameters, **sparse.parameters, "method": "block-sparse dilated"})
    assert 0.4 * SMALL.flops < product.flops < 0.8 * SMALL.flops
    for case in (sparse, causal, product):
        assert list(case.contender(CPU, backward=True)()) == ["forward", "forward+backward"]
    with pytest.raises(ValueError, match="needs blocks and density"):
        Case(**{**SMALL.parameters, "method": "block-sparse"})
    with pytest.raises(ValueError, match=r"whole blocks of \(16, 16\); got seq_len=201"):
        Case(**{**sparse.parameters, "method": "flex", "seq_len": 201}).prepare()


@pytest.mark.parametrize("suite", sorted(command.SUITES.keys() - {"gpu"}))  # tests/test_bench_gpu.py
@pytest.mark.parametrize("quick", [False, True])
def test_suites_describe_their_steps(suite, quick):
    """Nothing is measured; every case is valid, and the quick ones fit in 8 GiB."""
    for step in command.SUITES[suite].steps(CPU, quick):
        assert step.label
        if quick:
            assert sum(case.predicted_bytes(backward=backward) for case, backward in step.needs) < 8 * 2**30


def test_the_cpu_suite_without_kernels_says_why(monkeypatch):
    monkeypatch.setattr(cpu, "_MISSING", "the kernels are not compiled")
    (step,) = command.SUITES["cpu"].steps(CPU, False)
    (row,) = step.measure()
    assert row.refused == "the kernels are not compiled"


@pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))
def test_rows_of_the_cpu_suite(monkeypatch):
    monkeypatch.setattr(cpu_suite, "LAYOUTS", (("local", 0.5),))
    case = replace(SMALL, seq_len=512, backend="cpu", head_dim=64)
    dense = list(cpu_suite._beside(case, "dense calls", cpu_suite.FULL, 0.0).measure())
    blocks = list(cpu_suite._blocks(case, 0.0).measure())
    for row, rival in [*((x, "dense calls") for x in dense), *((x, "dense") for x in blocks)]:
        (ours,) = row.times.keys() - {rival} - {name for name in row.times if name.endswith(", native")}
        assert row.rates[ours] / row.rates[rival] == pytest.approx(
            row.times[rival].median / row.times[ours].median * (1 if rival == "dense calls" else 0.625)
        )
        assert row.over["native"].runs == row.spread.runs
    assert [row.bar for row in dense] == [0.92, 0.95]
    assert [row.bar for row in blocks] == [1.05, 1.1]


# --- profile


def test_idle_is_between_kernels():
    """The profiler also lists what `record_function` spans on the GPU, from the first kernel inside to the last."""

    def event(start, end, annotation=False):
        return SimpleNamespace(
            time_range=SimpleNamespace(start=start, end=end), is_user_annotation=annotation,
            device_type=torch.autograd.DeviceType.CUDA,
        )  # fmt: skip

    assert profile._idle([event(0, 9000, annotation=True), event(0, 1000), event(3000, 9000)]) == 2.0


def test_a_profile_accounts_for_the_whole_call(tmp_path):
    case = replace(NATIVE, seq_len=1024)
    work = case.contender(CPU, backward=True)
    before = [getattr(*place) for place in profile.STAGES]
    found = profile.profile(lambda: list(work()), CPU, tmp_path / "trace.json", runs=1)
    assert [getattr(*place) for place in profile.STAGES] == before
    assert sum(found.stages.values()) == pytest.approx(found.milliseconds, rel=0.02)
    assert min(found.stages[name] for name in ("fused forward", "fused backward", "finding the plan", "merging")) > 0
    assert found.peak_bytes >= 4 * case.out_bytes  # out, dq, dk, dv
    assert found.idle_milliseconds is None
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {row.name: row for row in profile.rows(case, found, profile.once(case), backward=True)}
    assert rows["once a shape: finding the plan"].value < rows["once a shape: making the plan"].value < 5
    assert rows["peak of allocations over the bytes of out"].value >= 4


def test_a_slow_stage_shows(monkeypatch):
    work = NATIVE.contender(CPU)
    merge = native.merge_into
    monkeypatch.setattr(native, "merge_into", lambda *arguments: (time.sleep(0.05), merge(*arguments)))
    found = profile.profile(lambda: list(work()), CPU, runs=1)
    assert next(iter(found.stages)) == "merging"
    assert found.stages["merging"] >= 50


def test_profile_command(tmp_path, capsys):
    words = [
        "--tokens",
        "256",
        "--heads",
        "2",
        "--head-dim",
        "16",
        "--segments",
        "64,128",
        "--rates",
        "1,2",
    ]
    for method, blocks in (("block-sparse-dilated", ["--blocks", "random", "--block-size", "16"]), ("model", [])):
        assert exit_code("profile", method, *words, *blocks, "--out", tmp_path) == 0
        printed = capsys.readouterr().out
        assert (profile.KERNELS if cpu.missing() is None else "fused backward") in printed
        assert "peak of allocations over the bytes of out" in printed
        for suffix in (".jsonl", ".trace.json", ".png"):
            assert list(tmp_path.rglob(f"profile-{method}{suffix}"))
    assert exit_code("profile", "dilated", "--tokens", 10**9) == 2
    assert "GiB are free" in capsys.readouterr().err
    assert exit_code("profile", "dilated", "--tokens", 0) == 2
    assert "--tokens must be positive; got 0" in capsys.readouterr().err
    assert exit_code("profile", "dilated", "--segments", "64") == 2
    assert "one entry per branch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "option"),
    [
        *(("model", option) for option in ("--causal", "--forward", "--dtype=bfloat16", "--blocks=random")),
        *(("dilated", option) for option in ("--blocks=random", "--density=0.9", "--block-size=3")),
        *(("dense", option) for option in ("--segments=7,8", "--rates=1", "--density=0.9")),
        ("block-sparse", "--rates=1"),
    ],
)
def test_nothing_is_profiled_with_what_it_does_not_read(method, option, tmp_path, capsys):
    assert exit_code("profile", method, option, "--tokens", "128", "--out", tmp_path) == 2
    said = capsys.readouterr().err
    assert f"{option.partition('=')[0]} is not of {method!r}; it would change nothing" in said
    assert not list(tmp_path.rglob("*.jsonl"))


TINY_PROFILE = ["--tokens", "256", "--heads", "2", "--head-dim", "16", "--segments", "64,128", "--rates", "1,2"]


def test_a_profile_of_a_model_says_that_it_is_causal(tmp_path):
    assert exit_code("profile", "model", *TINY_PROFILE, "--out", tmp_path) == 0
    (path,) = tmp_path.rglob("profile-model.jsonl")
    assert {row["parameters"]["is_causal"] for row in results.read(path)} == {True}


def test_a_picture_of_a_profile_is_of_one_call(tmp_path):
    """The newest one, and without stages that it no longer has."""
    words = ["profile", "dilated", *TINY_PROFILE, "--out", tmp_path]
    assert exit_code(*words) == exit_code(*words, "--tokens", 128) == 0
    (path,) = tmp_path.rglob("profile-dilated.jsonl")
    rows = results.read(path)
    rows.append(rows[0] | {"name": "own time of a stage of old"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert exit_code(*words) == 0
    found = [row for row in results.read(path) if row["name"].startswith("own time of ")]
    assert "own time of a stage of old" not in {row["name"] for row in found}
    assert {row["parameters"]["seq_len"] for row in found} == {128, 256}
    (panel,) = charts._stages(results.read(path))
    assert "256 tokens" in panel.settings["title"]
    newest = {row["name"].removeprefix("own time of ") for row in found if row["parameters"]["seq_len"] == 256}
    assert set(panel.series[0].x) <= newest


# --- check


@pytest.fixture
def quick_guards(monkeypatch):
    """The guards of dilated attention's time, calls and memory, at a size that takes milliseconds."""
    monkeypatch.setattr(check, "PATIENCE", 3.0)
    case = replace(NATIVE, seq_len=1024, heads=4)
    guards = (
        check.Guard("time", "x", 1.0, check._over(case, "dense calls")),
        check.Guard("calls", "calls", 0.0, check._calls(case)),
        check.Guard("memory", "out", 0.02, check._peak(case, False)),
        check.Guard("copies", "calls", 0.0, check._copies(case)),
    )
    monkeypatch.setattr(check, "GUARDS", guards)


def test_the_guard_holds_and_fails_on_a_slow_branch(quick_guards, tmp_path, capsys, monkeypatch):
    words = ["bench", "check", "--baseline", tmp_path / "baseline.json"]
    assert exit_code(*words) == 2
    assert "there is no baseline" in capsys.readouterr().err
    assert exit_code(*words, "--update") == 0
    assert exit_code(*words) == 0
    capsys.readouterr()

    merge = native.merge_into
    with monkeypatch.context() as slowed:
        slowed.setattr(native, "merge_into", lambda *arguments: (time.sleep(0.05), merge(*arguments)))
        assert exit_code(*words) == 1
    captured = capsys.readouterr()
    assert captured.err.rstrip().endswith("baseline.json: time")
    assert "WORSE" in captured.out

    with monkeypatch.context() as copying:
        copying.setattr(native, "merge_into", lambda out, lse, *part: merge(out, lse, *(x.clone() for x in part)))
        assert exit_code(*words) == 1
    assert "copies" in capsys.readouterr().err


def test_a_damaged_or_incomplete_baseline(quick_guards, tmp_path, capsys, monkeypatch):
    path = tmp_path / "baseline.json"
    path.write_text("{")
    assert exit_code("bench", "check", "--baseline", path) == 2
    assert "not a baseline" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(check, "check", lambda *arguments: pytest.fail("measured first"))
        assert exit_code("bench", "check", "--baseline", path, "--update") == 2
    assert "not a baseline" in capsys.readouterr().err
    path.write_text('{"another device": {"figures": {"time": 1e9, "calls": 99, "memory": 99, "unknown": 1}}}')
    assert exit_code("bench", "check", "--baseline", path) == 1
    assert capsys.readouterr().err.rstrip().endswith(": copies")


def test_a_baseline_is_the_device_s_own_or_the_greatest(tmp_path):
    path = tmp_path / "baseline.json"
    check.write_baseline(path, "one", {"time": 1.0, "memory": 3.0})
    check.write_baseline(path, "two", {"time": 2.0, "memory": 2.0})
    assert check.read_baseline(path, "one") == {"time": 1.0, "memory": 3.0}
    assert check.read_baseline(path, "two") == {"time": 2.0, "memory": 2.0}
    assert check.read_baseline(path, "three") == {"time": 2.0, "memory": 3.0}


def test_every_guard_has_a_baseline_on_every_device():
    """Nothing is measured: `bench check` does that."""
    path = Path(__file__).parents[1] / "results" / "baseline.json"
    for device in json.loads(path.read_text()):
        assert list(check.read_baseline(path, device)) == [guard.name for guard in check.GUARDS]


# --- plots


def test_pictures_are_drawn_from_files_alone(tmp_path, capsys):
    assert exit_code("plot", tmp_path, "--documents") == 2
    assert "no files of results" in capsys.readouterr().err
    over, shares = {"dense": Spread(0.1, 0.1, 0.1, 0.1, 3)}, {"share of score entries": 0.1}
    recorder, plain = Recorder(tmp_path, "compare", CPU), {"branches": [1024, 2048, 4096], "compiled": False}
    for seq_len in (2048, 4096):
        case = Case(method="dilated", seq_len=seq_len, segment_lengths=(2048,), dilation_rates=(1,))
        for variant in ("dense", "local blocks, 10%"):
            its = {**case.parameters, "variant": variant, **plain}
            recorder.add(row(name="compare", parameters=its, unit="ms", over=over, figures=shares))
    Recorder(tmp_path, "profile-dilated", CPU).add(
        row(name="own time of merging", parameters=case.parameters, unit="ms")
    )
    assert exit_code("plot", tmp_path, "--out", tmp_path / "pictures", "--documents") == 0
    drawn = {path.stem for path in (tmp_path / "pictures").rglob("*.png")}
    assert drawn == {"compare-lengths", "compare-shares", "profile-dilated"}


def test_steps_are_told_without_a_terminal_before_they_are_done(monkeypatch, tmp_path, capsys):
    """Brackets are printed as they are: in labels, reasons and paths."""
    told = []

    class Suite:
        @staticmethod
        def steps(device, quick):
            def measure():
                told.append(capsys.readouterr().out)
                yield row(1.0, name="[red] figure", refused="[/b] why")

            return [Step("step [a]", measure), Step("step [/b]", measure)]

    monkeypatch.setitem(command.SUITES, "foundation", Suite)
    out = tmp_path / "exp[lr]1"
    assert exit_code("bench", "foundation", "--out", out) == 0
    assert told == ["1 of 2: step [a]\n", "2 of 2: step [/b]\n"]
    printed = capsys.readouterr().out
    assert f"rows in {out}/" in printed
    assert "[red] figure" in printed
    assert "[/b] why" in printed


@pytest.mark.parametrize(
    ("suite", "changes"),
    [
        ("compare", {"name": "compare", "parameters": 5}),
        ("profile-dilated", {"name": "own time of merging"}),
        ("simulate", {}),
    ],
)
def test_rows_that_no_picture_can_use_name_their_file(suite, changes, tmp_path, capsys):
    found = {"name": "forward: dense", "parameters": {}, "value": 1.0} | changes
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / f"{suite}.jsonl").write_text(json.dumps(found))
    assert exit_code("plot", tmp_path, "--out", tmp_path / "pictures", "--documents") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"cpu/{suite}.jsonl: no picture can be drawn from its rows" in line


def test_plot_writes_documents_of_the_repository_s_results_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Recorder(tmp_path / "other", "suite", CPU).add(row(1.0))
    assert exit_code("plot", "other", "--out", "out") == 0
    (path,) = Path("other").rglob("*.jsonl")
    page = Path("README.md")
    page.write_text(f"<!-- results: {path.relative_to('other')} name=figure -->?<!-- end of results -->")
    assert exit_code("plot", "other", "--out", "out") == 0
    assert "?" in page.read_text()
    Path("other").rename("results")
    assert exit_code("plot", "--out", "out") == 0  # without docs
    assert "1.00 x" in page.read_text()


def test_quality_has_every_attention_and_both_ratios(monkeypatch):
    monkeypatch.setattr(quality, "_sources", lambda context: read_text([Path(__file__)]).split(context))
    steps = quality.steps(torch.device("cpu"), quick=True)
    rows = [row for step in steps for row in step.measure()]
    asked = [row for row in rows if row.name.startswith("recall")]
    assert {row.parameters["method"] for row in asked} == {"dilated", "window"}
    assert [row.parameters["distance"] for row in asked[:2]] == [
        [1, asked[0].parameters["reach"]],
        [asked[0].parameters["reach"] + 1, 511],
    ]
    told = {row.name.removesuffix(": held-out text"): row.value for row in rows if "held-out text" in row.name}
    runs = [f"{name}, equal steps" for name in ("dilated", "dense", "window")]
    runs += [f"{name}, equal time" for name in quality.IN_TIME]
    assert list(told) == [f"text, {run}" for run in runs]
    for equal, bar in (("equal steps", 1.02), ("equal time", 0.95)):
        (ratio,) = (row for row in rows if row.name == f"text: dilated over dense, {equal}")
        assert ratio.value == told[f"text, dilated, {equal}"] / told[f"text, dense, {equal}"]
        assert ratio.bar == bar
