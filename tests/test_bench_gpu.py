"""`bench gpu` where there is no GPU: it refuses; its checks and sums run in Triton's interpreter at small sizes."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend

from dilated_attention import Window
from dilated_attention.kernels.configurations import ARCHITECTURES, Shape
from dilated_attention_lab.bench import command as command_line
from dilated_attention_lab.bench import groups, measure, on_gpu, results
from dilated_attention_lab.bench.cases import Case
from dilated_attention_lab.bench.groups import Group, Job
from dilated_attention_lab.bench.measure import Rounds, Spread
from dilated_attention_lab.bench.on_gpu import correctness, kernels, speed
from dilated_attention_lab.bench.results import Recorder, Row
from dilated_attention_lab.bench.suites import Step, gpu
from dilated_attention_lab.commands import main
from dilated_attention_lab.verification import BARS, checks, relative_error
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
    monkeypatch.setattr(command_line, "measure_suite", lambda steps, *rest: taken.append(steps))
    assert main(["bench", "all", "--quick", "--out", str(tmp_path)]) == 0
    assert len(taken) == len(command_line.SUITES) - 2, "nor quality, which trains models"


@pytest.fixture
def hopper(monkeypatch):
    """The experiment's checks of a GPU before it runs anything."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


GPU = torch.device("cuda")


def jobs(*parts):
    return [job for part in parts or gpu.PARTS for group in gpu.PARTS[part](GPU) for job in group.jobs]


def test_the_groups_of_a_gpu():
    """A label names one group of a part, and a job of a group: rows of failures and the processes use it."""
    for part in gpu.PARTS.values():
        found = part(GPU)
        assert len(found) == len({group.label for group in found})
        for group in found:
            assert group.jobs
            assert len(group.jobs) == len({job.label for job in group.jobs})
        limits = sum(group.seconds for group in found)
        assert limits <= 540, "nine minutes, even if every group hangs"
    labels = [group.label for group in gpu.part_1(GPU)]
    assert labels.index("right: what is timed") < labels.index("times, head_dim 128")
    assert labels[-1] == "right: native, views", "what may be misaligned comes last"
    checked = {job.label for job in jobs(1)}
    assert {check.name for check in checks(777)} <= checked
    assert all(group.at_once == 1 for group in all_groups() if "times" in group.label or "tiles of" in group.label)


def all_groups():
    return [group for part in gpu.PARTS.values() for group in part(GPU)]


def test_what_is_timed_was_checked():
    """Whatever is timed in part 1 or 3 launches the kernels of a case that part 1 compares with the oracle, at fewer
    tokens or another density."""
    (right,) = (group for group in gpu.part_1(GPU) if group.label == "right: what is timed")
    timed = {
        job.run.args[0] for job in jobs(1, 3) if getattr(job.run, "func", None) in (speed.speed, speed.block_sparse)
    }
    assert len(timed) > 10
    assert all(isinstance(case, Case) for case in timed)
    checked = [replace(case, seq_len=1, density=0.5) for case in gpu.timed_cases().values() if case.block_size]
    assert {replace(case, seq_len=1, density=0.5) for case in timed} <= set(checked)
    others = {"wide offsets", *(job.label for job in right.jobs if job.label.endswith(", in boxes"))}
    assert len(others) == 4
    assert {job.label for job in right.jobs} == {*gpu.timed_cases(), *others}


def test_every_bar_has_a_row(monkeypatch):
    """The figures that were set beforehand, by the name of the row that answers each; no figure is measured here."""
    monkeypatch.setattr(speed, "serving", lambda makers: ({}, dict.fromkeys(makers, "RuntimeError: no GPU")))
    monkeypatch.setattr(measure, "interleave", lambda *x, **y: Rounds({(measure.MATMUL, "forward"): [1.0]}, 1))
    monkeypatch.setattr(measure, "peak_above_inputs", lambda *x, **y: None)
    timed = speed.speed, speed.block_sparse, speed.small
    found = [job for job in jobs() if job.label.startswith("peak") or getattr(job.run, "func", None) in timed]
    rows = [row for job in found for row in job.run()]
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
            if n == 1048576 and head_dim == 128 and is_causal:
                continue  # the time of a part allows one of them
            name = f"{phase}: triton, matrix rate over the rate of useful work"
            expected[name, n, head_dim, is_causal, None] = 1 / rate
            over = "forward: time per score entry over the best dense kernel's"
            expected[over, n, head_dim, is_causal, None] = 1.15
    for density, faster in ((0.10, 7), (0.05, 13), (0.02, 25)):
        for n, head_dim in ((32768, 128), (4096, 64)):
            over = "forward: triton, time over the fastest dense kernel"
            expected[over, n, head_dim, False, density] = 1 / faster if n == 32768 else 1.0
            if n == 32768 and density != 0.05:
                expected["forward: triton, time over compiled FlexAttention", n, head_dim, False, density] = 1.0
    expected["forward: triton, time over the fastest dense kernel", 4096, 64, False, None] = 1.0
    expected["forward: dilated, peak memory above q, k, v, over the bytes of out", 1 << 20, 64, False, None] = 1.10
    assert figures == pytest.approx(expected)


def figure(label):
    return Row(name=f"figure of {label}", parameters={"seq_len": 1, "heads": 1}, value=1.0, unit="x")


def served(group, job):
    """The lines of a job that gives a row."""
    lines = []
    groups.serve(group, replace(job, run=partial(iter, [figure(job.label)])), lines.append)
    return lines


PLANTED = {
    "crash": ("kill -SEGV $$", "its process ended with signal 11, SIGSEGV"),
    "hang": ("exec sleep 600", "its group took more than 1 s"),
    "error": ("echo first >&2; echo 'CUDA error: misaligned address' >&2; exit 1",
              "its process ended with exit code 1; CUDA error: misaligned address"),
}  # fmt: skip


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("ending", PLANTED)
def test_a_job_that_ends_badly_leaves_the_others_their_rows(ending, at_once, tmp_path):
    """The second of three; its rows before that are kept, and what a hang leaves no time for is refused."""
    group = Group("group", 1 if ending == "hang" else 60, [Job(x, iter) for x in ("a", "b", "c")], at_once)

    def command(job):
        script = f'printf "%s\\n" "$@"; {PLANTED[ending][0]}' if job.label == "b" else 'printf "%s\\n" "$@"'
        return ["sh", "-c", script, "sh", *served(group, job)]

    recorder = Recorder(tmp_path, "gpu", CPU)
    step = Step(group.label, partial(groups.run_apart, group, command))
    command_line.measure_suite([step], CPU, recorder, [])
    rows = results.read(recorder.path)
    lost = ["b", "c"] if ending == "hang" and at_once == 1 else ["b"]
    assert {row["name"] for row in rows if row["value"] is not None} >= {
        f"figure of {x}" for x in "abc" if x not in lost[1:]
    }
    refused = {row["parameters"]["job"]: row["refused"] for row in rows if row["value"] is None}
    assert refused == dict.fromkeys(lost, PLANTED[ending][1])


@pytest.mark.parametrize("part", gpu.PARTS)
def test_the_process_of_a_job_finds_it(part, hopper, monkeypatch, capfd):
    """The process finds the job by the labels that its command names."""
    for step, group in zip(gpu.steps(torch.device("cuda"), part), gpu.PARTS[part](GPU), strict=True):
        command, job = step.measure.args[1], group.jobs[-1]
        found = []
        monkeypatch.setattr(groups, "serve", lambda *x: found.append(x[:2]))  # noqa: B023
        monkeypatch.setattr(groups, "rows_apart_from_output", lambda: None)
        gpu._serve(json.loads(command(job)[-1]))
        assert [(x.label, y.label) for x, y in found] == [(group.label, job.label)]


def test_an_error_of_the_device_is_a_row():
    """The error occurs in the job's own process."""

    def fails():
        yield figure("before")
        raise torch.AcceleratorError("CUDA error: misaligned address\nand more")

    lines = []
    group = Group("group", 1, [Job("one", fails)])
    groups.serve(group, group.jobs[0], lines.append)
    first, last = map(json.loads, lines)
    assert (first["name"], last["name"]) == ("figure of before", "failed: group")
    assert last["refused"] == "AcceleratorError: CUDA error: misaligned address"


def test_rows_survive_the_way_between_processes():
    row = Row.of("name", {"seq_len": 1}, Spread.of([1.0, 2.0]), "ms", bar=3.0, over={"other": Spread.of([1.0])},
                 times={"a": Spread.of([2.0])}, rates={"b": 1.0})  # fmt: skip
    lines = []
    group = Group("group", 60, [Job("job", lambda: iter([row]))])
    groups.serve(group, group.jobs[0], lines.append)
    (back,) = groups.run_apart(group, lambda job: ["printf", "%s\n%s", *lines, "{half a li"])
    assert back == row


def test_a_failure_is_forgotten_when_its_group_runs(tmp_path):
    group = Group("group", 60, [Job("job", iter)])
    for command, expected in ((["false"], ["failed: group"]), (["printf", "%s\n"], ["figure of job"])):
        lines = served(group, group.jobs[0]) if command != ["false"] else []
        recorder = Recorder(tmp_path, "gpu", CPU)
        step = Step("group", partial(groups.run_apart, group, lambda job: [*command, *lines]))  # noqa: B023
        command_line.measure_suite([step], CPU, recorder, [])
        assert [row["name"] for row in results.read(recorder.path)] == expected


def test_relative_error():
    x = torch.tensor([3.0, 4.0, -math.inf], dtype=torch.float64)
    assert relative_error(x.float(), x) == 0
    assert relative_error(torch.tensor([3.0, 4.5, -math.inf]), x) == pytest.approx(0.1)
    assert relative_error(torch.tensor([3.0, 4.0, 0.0]), x) == math.inf
    assert relative_error(torch.tensor([3.0, 4.0, math.inf]), x) == math.inf
    assert relative_error(torch.tensor([3.0, 4.0, math.nan]), x) == math.inf
    assert relative_error(torch.tensor([3.0, math.nan, -math.inf]), x) == math.inf
    assert relative_error(torch.zeros(2), torch.zeros(2, dtype=torch.float64)) == 0


def test_few_wrong_rows_are_an_error():
    """6 rows of 32,768 move the norm by a fiftieth; their own error is as large as they are."""
    expected = torch.randn(1, 32768, 1, 64, dtype=torch.float64)
    actual = expected.clone()
    actual[:, 1000:1006] = torch.randn(1, 6, 1, 64, dtype=torch.float64)
    assert (actual - expected).norm() / expected.norm() < BARS[torch.bfloat16]
    assert relative_error(actual, expected) > 3 * BARS[torch.bfloat16]
    lse = torch.randn(1, 32768, 4, dtype=torch.float64)
    wrong = lse.clone()
    wrong[:, 1000, 2] += 1
    assert relative_error(wrong, lse) > 3 * BARS[torch.bfloat16]


@pytest.mark.parametrize("is_causal", [False, True])
def test_dense_kernels_get_equal_work(is_causal):
    case = replace(gpu.PAPER, is_causal=is_causal)
    assert speed.equal_work(case).flops == pytest.approx(case.flops, rel=0.03)


def test_speeds(monkeypatch):
    """Ratios from made-up seconds: our rate is half the matrix rate forward, and we take 1.2 of dense's time."""
    case = replace(gpu.PAPER, seq_len=4096)
    even = speed.equal_work(case)
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
    served = dict.fromkeys(("triton", "dense flash")), {"native": "why native", "dense cuDNN": "why cuDNN"}
    monkeypatch.setattr(speed, "serving", lambda makers: served)
    rows = {row.name: row for row in speed.speed(case, ["triton", "native"], CPU, 1.0)}
    matrix = "triton, matrix rate over the rate of useful work"
    assert rows[f"forward: {matrix}"].value == pytest.approx(2.0, rel=1e-3)
    assert rows[f"forward: {matrix}"].bar == pytest.approx(1 / 0.58)
    assert not rows[f"forward: {matrix}"].met
    assert rows[f"backward: {matrix}"].value == pytest.approx(2 * 3 / 2.5, rel=1e-3)
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
    monkeypatch.setattr(speed, "serving", lambda makers: (seconds, {"dense cuDNN": "why"}))
    case = on_gpu.sparse(0.10)
    rows = {row.name: row for row in speed.block_sparse(case, CPU, 1.0, flex=False)}
    over = rows["forward: triton, time over the fastest dense kernel"]
    assert (over.value, over.unit, over.bar, over.met) == (pytest.approx(1 / 7), "x dense flash", 1 / 7, True)
    assert rows["forward: dense flash, beside the fastest dense kernel"].value == 14000
    assert rows["forward: dense cuDNN, beside the fastest dense kernel"].refused == "why"
    monkeypatch.setattr(speed, "serving", lambda makers: ({"triton": None}, {"flex": "why"}))
    (*_, row) = speed.block_sparse(case, CPU, 1.0, flex=True)
    assert (row.name, row.value) == ("forward: triton, time over compiled FlexAttention", None)
    assert row.refused == "flex: why"


def test_dense_contenders_run():
    work = speed.dense(replace(TINY, method="dense"), SDPBackend.MATH, CPU, backward=True)
    assert list(work()) == ["forward", "forward+backward"]
    found, refused = speed.serving(speed.dense_makers(TINY, CPU, backward=False))
    assert [*found] == ["dense flash"]
    assert refused["dense cuDNN"].startswith("RuntimeError: No viable backend")


def test_comparisons_run():
    """Time and rate rows of the native backend are compared with PyTorch's flash kernel, which the CPU has."""
    case = replace(TINY, backend="native")
    ours = {"native": partial(case.contender, CPU)}
    rivals = speed.dense_makers(replace(TINY, method="dense", backend="auto"), CPU, backward=False)
    work = dict.fromkeys((*ours, *rivals), 1.0)
    rows = list(speed.against("dense", TINY, ours, rivals, CPU, 0.0, {"native": 1e9}, work))
    assert [row.refused is None for row in rows] == [True, True, False, True]
    assert rows[-1].met
    (*_, last) = speed.speed(TINY, ["native"], CPU, 0.0)
    assert "dense cuDNN: RuntimeError" in last.refused


def test_windows_are_timed_beside_their_rivals(monkeypatch):
    """Rates count what the window shows, and what a dense call computes. Here both windows run on the CPU's backend."""
    plain = speed.windowed
    monkeypatch.setattr(speed, "windowed", lambda seen, is_causal, name: plain(seen, is_causal))
    monkeypatch.setattr(speed._FlashWindow, "apply", lambda q, k, v, before: plain(Window(before), True)(q, k, v))
    dense = replace(TINY, method="dense", backend="auto", is_causal=True)
    rows = {row.name: row for row in speed.window(8, dense, CPU, 0.0)}
    assert rows["out: relative difference from FlashAttention's window"].value == 0
    for phase in ("forward", "backward"):
        shown, cudnn, whole = (
            rows[f"{phase}: {name}, beside a window, matrix rate over the rate of useful work"]
            for name in ("triton", "dense cuDNN", "dense flash")
        )
        assert "No viable backend" in cudnn.refused
        per_second = [row.value / row.times[name].median for name, row in (("triton", shown), ("dense flash", whole))]
        entries = sum(min(8, i + 1) for i in range(64)), 64 * 65 / 2
        assert per_second[0] / per_second[1] == pytest.approx(entries[1] / entries[0], rel=0.02)


def test_the_time_of_a_call_in_a_row():
    (row,) = speed.host(CPU, replace(TINY, backend="native"), calls=2)
    assert row.value > 0
    assert row.bar is None


def test_last_rows_are_their_own():
    """The check of `beyond 2^31 elements`, on the CPU's backend: the last segments see nothing else."""
    case = replace(TINY, backend="native", seq_len=4 * 64)
    rows = list(correctness.last_rows(case, 64, CPU))
    assert [row.name.partition(":")[0] for row in rows] == ["out", "dq", "dk", "dv"]
    assert all(row.value < 1e-6 for row in rows)
    assert all(row.value > 1e-3 for row in correctness.last_rows(case, 48, CPU)), "not whole segments"


@pytest.mark.thorough
@pytest.mark.skipif(INTERPRETED, reason="is the child process")
def test_in_the_interpreter():
    in_a_child_process(f"{__file__}::TestInterpreted")


INTERPRETED_CHECKS = "every head_dim, causal", "phantoms", "packed", "a window to both sides", "blocks of each head"
"""A few, since test_kernels interprets all features, and test_verification makes each kind of call natively."""


@interpreted
class TestInterpreted:
    @pytest.mark.parametrize(
        "check", [x for x in checks(70) if x.name in INTERPRETED_CHECKS], ids=lambda check: check.name
    )
    def test_checks(self, check):
        check = replace(check, head_dims=(24,), dtypes=check.dtypes[:1])
        (row,) = correctness.correctness(check, "triton", CPU)
        assert row.met, row

    def test_rows_from_elsewhere(self, monkeypatch):
        monkeypatch.setattr(correctness, "BARS", {torch.float32: BARS[torch.float32]})
        (row,) = correctness.elsewhere(CPU)
        assert row.met, row

    def test_last_rows(self):
        """The kernels give the same numbers, to the last bit."""
        for is_causal in (False, True):
            rows = list(correctness.last_rows(replace(TINY, seq_len=3 * 64, is_causal=is_causal), 64, CPU))
            assert all(row.met for row in rows), rows

    def test_tile_shapes(self, monkeypatch):
        monkeypatch.setattr(kernels, "CANDIDATES", {"dq": [(64, 64, 1, 1), (32, 64, 1, 1)]})
        before = dict(ARCHITECTURES["interpreter"].shapes)
        one, other = kernels.tile_shapes("dq", TINY, CPU, 0.0)  # the first of the candidates is what ships
        assert one.name == "forward+backward, dq: shipped tiles (64, 64, 1, 1)"
        assert other.name == "forward+backward, dq: tiles (32, 64, 1, 1)"
        assert other.over.keys() == {"shipped tiles (64, 64, 1, 1)"}
        assert [row.value for row in kernels.compiled("dq", TINY, CPU)] == [2.0]
        assert ARCHITECTURES["interpreter"].shapes == before
        with kernels.shaped("dq", TINY, CPU, Shape(16, 64, 1, 1)):
            kind = {"masked": False, "has_lists": False, "banded": False}
            assert ARCHITECTURES["interpreter"].shape("dq", 4, 16, **kind).own == 16

    def test_threshold(self):
        *rows, last = speed.threshold(CPU, budget=0.0, case=TINY, lengths=(32, 64))
        assert len(rows) == 4
        assert last.refused == "triton is not faster than native at any length measured"
