"""`bench gpu` where there is no GPU: it refuses; its checks and sums run in Triton's interpreter at small sizes."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend

from dilated_attention.bench import command, measure
from dilated_attention.bench.measure import Rounds
from dilated_attention.bench.suites import gpu
from dilated_attention.cli import main
from test_kernels import in_a_child_process

CPU = torch.device("cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in a child process with TRITON_INTERPRET=1")
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
    for check in gpu.checks(777):
        assert f"correctness of triton, {check.name}" in labels
    assert {"beyond 2^31 elements", "1,048,576 tokens", "4,096 tokens", "32,768 tokens, 2% of blocks"} <= {*labels}


def test_a_failure_is_a_row():
    def fails():
        raise torch.OutOfMemoryError("out of memory\nand more")
        yield

    (row,) = gpu._step("label", fails, {"seq_len": 1, "heads": 1}).measure()
    assert (row.name, row.value, row.refused) == ("failed: label", None, "OutOfMemoryError: out of memory")


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
                ("dense flash", "forward"): [dense],
                ("dense flash", "forward+backward"): [3 * dense],
            },
            round((2e12 / 2) ** (1 / 3)),
        )

    monkeypatch.setattr(measure, "interleave", interleave)
    monkeypatch.setattr(gpu, "_dense_contenders", lambda *x, **y: {"dense flash": None})
    monkeypatch.setattr(gpu.Case, "contender", lambda *x, **y: None)
    rows = {row.name: row for row in gpu.speed(case, ["triton"], CPU, 1.0)}
    matrix = "triton, matrix rate over the rate of useful work"
    assert rows[f"forward: {matrix}"].value == pytest.approx(2.0, rel=1e-3)
    assert rows[f"forward: {matrix}"].bar == pytest.approx(1 / 0.58)
    assert not rows[f"forward: {matrix}"].met
    assert rows[f"backward: {matrix}"].value == pytest.approx(2 * 3 / 2.5, rel=1e-3)
    over = rows["forward: time per score entry over dense flash, the best dense kernel"]
    assert over.value == pytest.approx(1.2, rel=1e-3)
    assert not over.met


def test_dense_contenders_run():
    work = gpu.dense(replace(TINY, method="dense"), SDPBackend.MATH, CPU, backward=True)
    assert list(work()) == ["forward", "forward+backward"]


@pytest.mark.skipif(INTERPRETED, reason="is the child process")
def test_in_the_interpreter():
    in_a_child_process(f"{__file__}::TestInterpreted")


@interpreted
class TestInterpreted:
    @pytest.mark.parametrize("check", gpu.checks(70), ids=lambda check: check.name)
    def test_checks(self, check):
        check = replace(check, head_dims=(16, 24), dtypes=(torch.float32,))
        rows = list(gpu.correctness(check, "triton", CPU))
        assert len(rows) == 2
        assert all(row.met for row in rows), rows

    def test_tile_shapes(self, monkeypatch):
        monkeypatch.setattr(gpu, "CANDIDATES", {"dq": [(64, 64, 1, 1), (32, 64, 1, 1)]})
        before = dict(gpu.ARCHITECTURES["interpreter"].shapes)
        (row,) = gpu.tile_shapes("dq", TINY, CPU, 0.0)  # the first is the one that ships
        assert row.name == "forward+backward: tiles of dq (32, 64, 1, 1) over those that ship, (64, 64, 1, 1)"
        assert row.value > 0
        assert gpu.ARCHITECTURES["interpreter"].shapes == before
        with gpu.shaped("dq", TINY, CPU, gpu.Shape(16, 64, 1, 1)):
            assert gpu.ARCHITECTURES["interpreter"].shape("dq", 4, 16, dropout=False).own == 16

    def test_threshold(self):
        *rows, last = gpu.threshold(CPU, budget=0.0, case=TINY, lengths=(32, 64))
        assert len(rows) == 4
        assert last.refused == "triton is not faster than native at any length measured"
