"""`bench gpu` where there is no GPU: it refuses; its checks and sums run in Triton's interpreter at small sizes."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend

from dilated_attention.cli import main
from dilated_attention_bench import command, measure, results
from dilated_attention_bench.cases import contender
from dilated_attention_bench.measure import Rounds
from dilated_attention_bench.results import Recorder, Row
from dilated_attention_bench.suites import gpu
from test_kernels import in_a_child_process

CPU = torch.device("cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in a child process with TRITON_INTERPRET=1")
# The interpreter reads arrays of one element as numbers, and numpy warns of what overflows in rows that are not there.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]
TINY = replace(
    gpu.SMALL, seq_len=64, heads=2, head_dim=16, segment_lengths=(32, 64), dilation_rates=(1, 2), dtype="float32"
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("options", [[], ["--device", "cuda"], ["--device", "cpu"]], ids=str)
def test_without_a_gpu_it_refuses_in_one_line(options, capsys):
    assert main(["bench", "gpu", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dilated-attention bench: error: ")
    assert "GPU" in line or "CUDA" in line


def test_all_leaves_it_out_without_a_gpu(monkeypatch, tmp_path):
    taken = []
    monkeypatch.setattr(command, "measure_suite", lambda steps, *rest: taken.append(steps))
    assert main(["bench", "all", "--quick", "--out", str(tmp_path)]) == 0
    assert len(taken) == len(command.SUITES) - 1


def test_the_steps_of_a_gpu(monkeypatch):
    """What a GPU would be asked, without asking it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    labels = [step.label for step in gpu.steps(torch.device("cuda"), quick=False)]
    for name in ("triton", gpu.ONE_KERNEL):
        for check in gpu.checks(777):
            assert f"correctness of {name}, {check.name}" in labels
    assert len(labels) == len({*labels}), "a label names one step: `--only` and the rows of failures go by it"
    lengths = [f"{n:,} tokens" for n in (65536, 262144, 1048576)]
    speeds = {f"{n}, head_dim {d}{causal}" for n in lengths for d in (64, 128) for causal in ("", ", causal")}
    sparse = {
        f"{n:,} tokens, {x}% of blocks{flex}" for n in (32768, 4096) for x in (10, 5, 2) for flex in ("", ", flex")
    }
    candidates = {f"the candidate in Gluon, head_dim {d}" for d in (64, 128)}
    assert speeds | sparse | candidates | {"rows from elsewhere", "beyond 2^31 elements", "4,096 tokens"} <= {*labels}


def test_every_bar_has_a_row(monkeypatch):
    """The figures that were set beforehand, by the name of the row that answers each; no figure is measured here."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(gpu, "serving", lambda makers: ({}, dict.fromkeys(makers, "RuntimeError: no GPU")))
    monkeypatch.setattr(measure, "interleave", lambda *x, **y: Rounds({(measure.MATMUL, "forward"): [1.0]}, 1))
    monkeypatch.setattr(measure, "peak_above_inputs", lambda *x, **y: None)
    rows = [
        row
        for step in gpu.steps(torch.device("cuda"), quick=False)
        if "tokens" in step.label and not step.label.startswith(("launches", "1,048,576 tokens against"))
        for row in step.measure()
    ]
    assert all(row.refused for row in rows)
    figures = {
        (row.name, row.parameters["seq_len"], row.parameters["head_dim"], row.parameters["is_causal"],
         row.parameters.get("density")): row.bar
        for row in rows if row.bar is not None
    }  # fmt: skip
    expected = {}
    for n in (65536, 262144, 1048576):
        for (phase, head_dim, is_causal), rate in {
            ("forward", 128, False): 0.58, ("forward", 64, False): 0.46, ("forward", 128, True): 0.52,
            ("forward", 64, True): 0.42, ("backward", 128, False): 0.42, ("backward", 64, False): 0.38,
        }.items():  # fmt: skip
            name = f"{phase}: triton, matrix rate over the rate of useful work"
            expected[name, n, head_dim, is_causal, None] = 1 / rate
            over = "forward: time per score entry over the best dense kernel's"
            expected[over, n, head_dim, is_causal, None] = 1.15
    for density, faster in ((0.10, 7), (0.05, 13), (0.02, 25)):
        for n, head_dim in ((32768, 128), (4096, 64)):
            over = "forward: triton, time over the fastest dense kernel"
            expected[over, n, head_dim, False, density] = 1 / faster if n == 32768 else 1.0
            expected["forward: triton, time over compiled FlexAttention", n, head_dim, False, density] = 1.0
    expected["forward: triton, time over the fastest dense kernel", 4096, 64, False, None] = 1.0
    expected["forward: dilated, peak memory above q, k, v, over the bytes of out", 1 << 20, 64, False, None] = 1.10
    assert figures == pytest.approx(expected)


def test_a_failure_is_a_row():
    def fails():
        raise torch.OutOfMemoryError("out of memory\nand more")
        yield

    (row,) = gpu._step("label", fails, {"seq_len": 1, "heads": 1}).measure()
    assert (row.name, row.value, row.refused) == ("failed: label", None, "OutOfMemoryError: out of memory")


def test_a_failure_is_forgotten_when_its_step_runs(tmp_path):
    outcomes = [RuntimeError("first"), None]

    def run():
        if error := outcomes.pop(0):
            raise error
        yield Row(name="figure", parameters={"seq_len": 1, "heads": 1}, value=1.0, unit="x")

    for expected in (["failed: label"], ["figure"]):
        recorder = Recorder(tmp_path, "gpu", CPU)
        command.measure_suite([gpu._step("label", run, {"seq_len": 1, "heads": 1})], CPU, recorder, [])
        assert [row["name"] for row in results.read(recorder.path)] == expected


def test_relative_error():
    x = torch.tensor([3.0, 4.0, -math.inf], dtype=torch.float64)
    assert gpu.relative_error(x.float(), x) == 0
    assert gpu.relative_error(torch.tensor([3.0, 4.5, -math.inf]), x) == pytest.approx(0.1)
    assert gpu.relative_error(torch.tensor([3.0, 4.0, 0.0]), x) == math.inf
    assert gpu.relative_error(torch.zeros(2), torch.zeros(2, dtype=torch.float64)) == 0


@pytest.mark.parametrize("is_causal", [False, True])
def test_dense_kernels_get_equal_work(is_causal):
    case = replace(gpu.PAPER, is_causal=is_causal)
    assert gpu._equal_work(case).flops == pytest.approx(case.flops, rel=0.03)


def test_speeds(monkeypatch):
    """Ratios from made-up seconds: our rate is half the matrix rate forward, and we take 1.2 of dense's time."""
    case = replace(gpu.PAPER, seq_len=4096)
    even = gpu._equal_work(case)
    second = case.flops / 1e12

    def interleave(contenders, **options):
        assert options["dtype"] == torch.bfloat16
        dense = second / 1.2 * even.flops / case.flops
        return Rounds(
            {
                (measure.MATMUL, "forward"): [1.0],
                ("triton", "forward"): [second],
                ("triton", "forward+backward"): [4 * second],
                (gpu.ONE_KERNEL, "forward"): [second],
                (gpu.ONE_KERNEL, "forward+backward"): [3 * second],
                ("dense flash", "forward"): [dense],
                ("dense flash", "forward+backward"): [3 * dense],
            },
            round((2e12 / 2) ** (1 / 3)),
        )

    monkeypatch.setattr(measure, "interleave", interleave)
    served = (
        dict.fromkeys(("triton", gpu.ONE_KERNEL, "dense flash")),
        {"native": "why native", "dense cuDNN": "why cuDNN"},
    )
    monkeypatch.setattr(gpu, "serving", lambda makers: served)
    rows = {row.name: row for row in gpu.speed(case, ["triton", "native", gpu.ONE_KERNEL], CPU, 1.0)}
    matrix = "triton, matrix rate over the rate of useful work"
    assert rows[f"forward: {matrix}"].value == pytest.approx(2.0, rel=1e-3)
    assert rows[f"forward: {matrix}"].bar == pytest.approx(1 / 0.58)
    assert not rows[f"forward: {matrix}"].met
    assert rows[f"backward: {matrix}"].value == pytest.approx(2 * 3 / 2.5, rel=1e-3)
    assert rows[f"backward: {gpu.ONE_KERNEL}, matrix rate over the rate of useful work"].value == pytest.approx(
        2 * 2 / 2.5, rel=1e-3
    )
    assert rows["backward: native, matrix rate over the rate of useful work"].refused == "why native"
    assert rows["forward: dense cuDNN, matrix rate over the rate of useful work"].refused == "why cuDNN"
    over = rows["forward: time per score entry over the best dense kernel's"]
    assert over.value == pytest.approx(1.2, rel=1e-3)
    assert over.unit == "x dense flash"
    assert not over.met


def test_comparisons(monkeypatch):
    """Ours take 2 seconds; the dense kernel that runs 14: 7 times as fast."""
    seconds = {"triton": 2.0, "dense flash": 14.0}
    rounds = Rounds({(name, "forward"): [x] for name, x in (seconds | {measure.MATMUL: 1.0}).items()}, 100)
    monkeypatch.setattr(measure, "interleave", lambda *x, **y: rounds)
    monkeypatch.setattr(gpu, "serving", lambda makers: (seconds, {"dense cuDNN": "why"}))
    case = gpu._sparse(0.10)[0]
    rows = {row.name: row for row in gpu._block_sparse(case, CPU, 1.0, flex=False)}
    over = rows["forward: triton, time over the fastest dense kernel"]
    assert (over.value, over.unit, over.bar, over.met) == (pytest.approx(1 / 7), "x dense flash", 1 / 7, True)
    assert rows["forward: dense flash, beside the fastest dense kernel"].value == 14000
    assert rows["forward: dense cuDNN, beside the fastest dense kernel"].refused == "why"
    monkeypatch.setattr(gpu, "serving", lambda makers: ({"triton": None}, {"flex": "why"}))
    (*_, row) = gpu._block_sparse(case, CPU, 1.0, flex=True)
    assert (row.name, row.value) == ("forward: triton, time over compiled FlexAttention", None)
    assert row.refused == "flex: why"


def test_dense_contenders_run():
    work = gpu.dense(replace(TINY, method="dense"), SDPBackend.MATH, CPU, backward=True)
    assert list(work()) == ["forward", "forward+backward"]
    found, refused = gpu.serving(gpu._dense_makers(TINY, CPU, backward=False))
    assert [*found] == ["dense flash"]
    assert refused["dense cuDNN"].startswith("RuntimeError: No viable backend")


def test_comparisons_run():
    """Time and rate rows of the native backend beside PyTorch's flash kernel, which the CPU has."""
    case = replace(TINY, backend="native")
    ours = {"native": partial(case.contender, CPU)}
    rivals = gpu._dense_makers(replace(TINY, method="dense", backend="auto"), CPU, backward=False)
    work = dict.fromkeys((*ours, *rivals), 1.0)
    rows = list(gpu.against("dense", TINY, ours, rivals, CPU, 0.0, {"native": 1e9}, work))
    assert [row.refused is None for row in rows] == [True, True, False, True]
    assert rows[-1].met
    (*_, last) = gpu.speed(TINY, ["native"], CPU, 0.0)
    assert "dense cuDNN: RuntimeError" in last.refused


def test_calls_in_a_row():
    calls = []
    work = gpu._in_a_row(lambda: contender(lambda: calls.append(1)), 3)
    assert list(work()) == ["forward"]
    assert len(calls) == 3


def test_last_rows_are_their_own():
    """What `beyond 2^31 elements` compares, on the CPU's backend: the last segments see nothing else."""
    case = replace(TINY, backend="native", seq_len=4 * 64)
    rows = list(gpu.last_rows(case, 64, CPU))
    assert [row.name.partition(":")[0] for row in rows] == ["out", "dq", "dk", "dv"]
    assert all(row.value < 1e-6 for row in rows)
    assert all(row.value > 1e-3 for row in gpu.last_rows(case, 48, CPU)), "not whole segments"


@pytest.mark.skipif(INTERPRETED, reason="is the child process")
def test_in_the_interpreter():
    in_a_child_process(f"{__file__}::TestInterpreted")


@interpreted
class TestInterpreted:
    @pytest.mark.parametrize("check", gpu.checks(70), ids=lambda check: check.name)
    def test_checks(self, check):
        head_dims = (16, 24) if len(check.head_dims) > 1 else (24,)
        check = replace(check, head_dims=head_dims, dtypes=check.dtypes[:1])
        for name in ("triton", gpu.ONE_KERNEL):
            rows = list(gpu.correctness(check, name, CPU))
            assert len(rows) == len(head_dims)
            assert all(row.met for row in rows), rows

    def test_one_kernel_is_chosen(self):
        """Other names, and what runs afterwards, keep the two kernels."""
        asked = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gpu.triton, "backward", lambda *x, deterministic=True, **y: asked.append(deterministic))
            for name in ("triton", gpu.ONE_KERNEL):
                with gpu.chosen(name):
                    gpu.triton.backward()
                gpu.triton.backward()
        assert asked == [True, True, False, True]

    def test_rows_from_elsewhere(self, monkeypatch):
        monkeypatch.setattr(gpu, "BARS", {torch.float32: gpu.BARS[torch.float32]})
        (row,) = gpu.elsewhere(CPU)
        assert row.met, row

    def test_last_rows(self):
        """The kernels give the same numbers, to the last bit."""
        for is_causal in (False, True):
            rows = list(gpu.last_rows(replace(TINY, seq_len=3 * 64, is_causal=is_causal), 64, CPU))
            assert all(row.met for row in rows), rows

    def test_tile_shapes(self, monkeypatch):
        monkeypatch.setattr(gpu, "CANDIDATES", {"dq": [(64, 64, 1, 1), (32, 64, 1, 1)]})
        before = dict(gpu.ARCHITECTURES["interpreter"].shapes)
        (row,) = gpu.tile_shapes("dq", TINY, CPU, 0.0)  # the first is the one that ships
        assert row.name == "forward+backward: tiles of dq (32, 64, 1, 1) over those that ship, (64, 64, 1, 1)"
        assert row.value > 0
        assert gpu.ARCHITECTURES["interpreter"].shapes == before
        with gpu.shaped("dq", TINY, CPU, gpu.Shape(16, 64, 1, 1)):
            assert gpu.ARCHITECTURES["interpreter"].shape("dq", 4, 16, masked=False).own == 16

    def test_threshold(self):
        *rows, last = gpu.threshold(CPU, budget=0.0, case=TINY, lengths=(32, 64))
        assert len(rows) == 4
        assert last.refused == "triton is not faster than native at any length measured"
