"""`bench gpu` where there is no GPU: it refuses; its checks and sums run in Triton's interpreter at small sizes."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from functools import partial
from itertools import cycle
from threading import Timer
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch.nn.attention import SDPBackend

from dilated_attention.cli import main
from dilated_attention.kernels.configurations import ARCHITECTURES, Shape
from dilated_attention.verification import BARS, checks, relative_error
from dilated_attention_bench import command as command_line
from dilated_attention_bench import groups, measure, on_gpu, results, specializations
from dilated_attention_bench.cases import contender
from dilated_attention_bench.groups import Group, Job
from dilated_attention_bench.measure import Rounds, Spread
from dilated_attention_bench.on_gpu import correctness, kernels, speed, watched
from dilated_attention_bench.results import Recorder, Row
from dilated_attention_bench.suites import Step, gpu
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
    """What the suite asks a GPU before it runs anything."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(gpu, "Machine", SimpleNamespace(of=lambda device: MACHINE))


MACHINE = gpu.Machine(torch.device("cuda"), "sm_90", has_flash=True)


def jobs(*parts):
    return [job for part in parts or gpu.PARTS for group in gpu.PARTS[part](MACHINE) for job in group.jobs]


def test_the_groups_of_a_gpu():
    """A label names one group of a part, and a job of a group: rows of failures and the processes go by them."""
    for part in gpu.PARTS.values():
        found = part(MACHINE)
        assert len(found) == len({group.label for group in found})
        for group in found:
            assert group.jobs
            assert len(group.jobs) == len({job.label for job in group.jobs})
        limits = sum(group.seconds for group in found)
        assert limits <= gpu.SECONDS, "even if every group hangs"
    labels = [group.label for group in gpu.part_1(MACHINE)]
    assert labels.index("right: what is timed") < labels.index("times, head_dim 128")
    assert labels[-2:] == ["right: flash, views", "memory checker"], "what may be misaligned comes last"
    checked = {job.label for job in jobs(1)}
    assert {check.name for check in checks(777)} <= checked


@pytest.mark.slow
def test_what_is_timed_was_checked():
    """Every machine code whose time is taken in part 1 or 3 is one that a check of part 1 compares with the oracle."""
    (right,) = (group for group in gpu.part_1(MACHINE) if group.label == "right: what is timed")
    checked = {job.label: set(specializations.needed(job.calls, "sm_90")) for job in right.jobs}
    timed = [group for part in (1, 3) for group in gpu.PARTS[part](MACHINE)]
    clocked = set(gpu.launched(timed, "sm_90", timed=True))
    assert len(clocked) > 20
    assert clocked <= set().union(*checked.values())
    for found in (
        checked["triton, wide offsets"],
        specializations.needed([x for job in right.jobs for x in job.calls], "sm_90"),
    ):
        wide = {x for x in found if dict(x.arguments).get("WIDE")}
        assert {x.kernel.rpartition(".")[2] for x in wide} == {"forward", "backward_dq"}
    for left_out in ("blocks of 64", "nested branches, head_dim 64, causal"):
        others = set().union(*(found for label, found in checked.items() if not label.endswith(left_out)))
        assert not clocked <= others, left_out


def test_one_kernel_is_chosen():
    """It is launched instead of both, with tiles of its own; other names, and what runs afterwards, keep the two."""
    tiles = Shape(32, 32, 4, 1)
    with specializations.recorded("sm_90") as launches:
        for name in ("triton", on_gpu.ONE_KERNEL, "triton"):
            with kernels.shaped("dqdkdv", TINY, CPU, tiles):
                on_gpu.launching(TINY, name)()
            both = name == "triton"
            assert any(kernel.__name__ == "backward_dq" for kernel, _ in launches) == both
            found = [arguments for kernel, arguments in launches if kernel.__name__ == "backward_dkdv"]
            assert found
            assert {arguments["DQ"] is None for arguments in found} == {both}
            assert {(arguments["BN"], arguments["BM"]) == tiles[:2] for arguments in found} == {not both}
            launches.clear()


def test_every_bar_has_a_row(monkeypatch):
    """The figures that were set beforehand, by the name of the row that answers each; no figure is measured here."""
    monkeypatch.setattr(speed, "serving", lambda makers: ({}, dict.fromkeys(makers, "RuntimeError: no GPU")))
    monkeypatch.setattr(measure, "interleave", lambda *x, **y: Rounds({(measure.MATMUL, "forward"): [1.0]}, 1))
    monkeypatch.setattr(measure, "peak_above_inputs", lambda *x, **y: None)
    found = [job for job in jobs() if job.label.startswith("peak") or (job.timed and job.label != "threshold")]
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
                continue  # its memory takes a process of its own, and the time of a part allows one
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


def served(group):
    """The lines of a group whose every job gives a row."""
    lines = []
    group = replace(group, jobs=[replace(job, run=partial(iter, [figure(job.label)])) for job in group.jobs])
    with patch.object(groups, "leave_no_memory"):
        groups.serve(group, lines.append)
    return lines


PLANTED = {
    "crash": ("kill -SEGV $$", "its process ended with signal 11, SIGSEGV"),
    "hang": ("sleep 600 & sleep 600", "took more than"),
    "error": ("echo first >&2; echo 'CUDA error: misaligned address' >&2; exit 1",
              "its process ended with exit code 1; CUDA error: misaligned address"),
}  # fmt: skip


@pytest.mark.parametrize("planted", [0, 1])
@pytest.mark.parametrize("part", gpu.PARTS)
def test_a_group_that_ends_badly_leaves_the_others_their_rows(part, planted, hopper, monkeypatch, tmp_path):
    """In every second group one job is done, then its process ends in one of three ways, in turn."""
    found = gpu.PARTS[part](MACHINE)
    endings = {group.label: [*PLANTED][i % 3] for i, group in enumerate(found) if i % 2 == planted}

    def command(part, group, device):
        lines = served(group)
        if group.label not in endings:
            return ["printf", "%s\n", *lines]
        return ["sh", "-c", f'printf "%s\\n" "$@"; {PLANTED[endings[group.label]][0]}', "sh", *lines[:2]]

    def timer(seconds, function, arguments):
        (process,) = arguments
        return Timer(0.1 if "sleep" in process.args[2] else 60, function, arguments)

    monkeypatch.setattr(gpu, "_command", command)
    monkeypatch.setattr(groups, "Timer", timer)
    recorder = Recorder(tmp_path, "gpu", CPU)
    command_line.measure_suite(gpu.steps(torch.device("cuda"), part), CPU, recorder, [])
    rows = results.read(recorder.path)
    names = {row["name"] for row in rows if row["value"] is not None}
    refused = {(row["name"], row["parameters"]["job"]): row["refused"] for row in rows if row["value"] is None}
    expected = {}
    for group in found:
        first, *rest = (job.label for job in group.jobs)
        if group.label not in endings:
            assert {f"figure of {label}" for label in (first, *rest)} <= names
            continue
        assert f"figure of {first}" in names
        why = PLANTED[endings[group.label]][1]
        expected |= {(f"failed: {group.label}", label): why for label in rest}
    assert refused.keys() == expected.keys()
    assert all(refused[key].startswith(expected[key]) for key in expected)


def test_an_error_of_the_device_is_a_row(monkeypatch):
    """In the group's own process: the job's row, and whatever the device still lets the others do."""

    def fails():
        yield figure("before")
        raise torch.AcceleratorError("CUDA error: misaligned address\nand more")

    def poisoned():
        raise RuntimeError("CUDA error: misaligned address")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", poisoned)
    lines = []
    group = Group("group", 1, [Job("one", fails), Job("two", lambda: iter([figure("two")]))])
    groups.serve(group, lines.append)
    said = [json.loads(line) for line in lines]
    assert [x["row"]["name"] for x in said if "row" in x] == [
        "figure of before", "failed: group", "figure of two", "failed: group"
    ]  # fmt: skip
    assert [x["row"]["refused"] for x in said if "row" in x][1::2] == [
        "AcceleratorError: CUDA error: misaligned address", "RuntimeError: CUDA error: misaligned address"
    ]  # fmt: skip
    assert [x["done"] for x in said if "done" in x] == ["one", "two"]


def test_rows_survive_the_way_between_processes():
    row = Row.of("name", {"seq_len": 1}, Spread.of([1.0, 2.0]), "ms", bar=3.0, over={"other": Spread.of([1.0])},
                 times={"a": Spread.of([2.0])}, rates={"b": 1.0})  # fmt: skip
    lines = []
    groups.serve(Group("group", 60, [Job("job", lambda: iter([row]))]), lines.append)
    (back,) = groups.run_apart(Group("group", 60, [Job("job", iter)]), ["printf", "%s\n", *lines, "{half a li"])
    assert back == row


def test_a_failure_is_forgotten_when_its_group_runs(tmp_path):
    for command, expected in ((["false"], ["failed: group"]), (["printf", "%s\n"], ["figure of job"])):
        group = Group("group", 60, [Job("job", lambda: iter([figure("job")]))])
        lines = served(group) if command != ["false"] else []
        recorder = Recorder(tmp_path, "gpu", CPU)
        step = Step("group", partial(groups.run_apart, group, [*command, *lines]))
        command_line.measure_suite([step], CPU, recorder, [])
        assert [row["name"] for row in results.read(recorder.path)] == expected


def test_rehearsed(monkeypatch, capsys):
    """A dry run compiles and says what a part takes; here a kernel of a part of one job, in this process."""

    class Pool:
        def __init__(self, jobs, mp_context, initializer, initargs):
            initializer(*initargs)

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda self, *x: None  # noqa: E731
        map = staticmethod(map)

    from triton.runtime.driver import driver

    monkeypatch.setattr(specializations, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(driver, "_active" if hasattr(driver, "_active") else "active", None)
    tiny = replace(gpu.SMALL, seq_len=256, head_dim=16)
    job = Job("tiny", iter, [on_gpu.launching(tiny, backward=False)])
    monkeypatch.setitem(gpu.PARTS, 2, lambda machine: [Group("compile ahead", 50, []), Group("tiny", 100, [job])])
    assert main(["bench", "gpu", "--part", "2", "--dry-run", "--quick"]) == 0
    printed = capsys.readouterr().out
    assert " 100 " in printed
    fault = specializations.Compiled(
        specializations.Specialization("m.kernel", (("D", 16),)), 8000.0, "RuntimeError: x"
    )
    monkeypatch.setattr(specializations, "compile_all", lambda *x: iter([fault]))
    assert gpu.rehearse(2).in_all == 8000 / 14 + 100
    assert main(["bench", "gpu", "--part", "2", "--dry-run"]) == 1
    assert "part 2: kernel D=16: RuntimeError: x" in capsys.readouterr().err


def test_parts_are_of_the_gpu_suite(capsys):
    for options in (["blocks", "--part", "1"], ["all", "--dry-run"]):
        assert main(["bench", *options]) == 2
        assert "of the gpu suite alone" in capsys.readouterr().err


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
                (on_gpu.ONE_KERNEL, "forward"): [second],
                (on_gpu.ONE_KERNEL, "forward+backward"): [3 * second],
                ("dense flash", "forward"): [dense],
                ("dense flash", "forward+backward"): [3 * dense],
            },
            round((2e12 / 2) ** (1 / 3)),
        )

    monkeypatch.setattr(measure, "interleave", interleave)
    served = (
        dict.fromkeys(("triton", on_gpu.ONE_KERNEL, "dense flash")),
        {"native": "why native", "dense cuDNN": "why cuDNN"},
    )
    monkeypatch.setattr(speed, "serving", lambda makers: served)
    rows = {row.name: row for row in speed.speed(case, ["triton", "native", on_gpu.ONE_KERNEL], CPU, 1.0)}
    matrix = "triton, matrix rate over the rate of useful work"
    assert rows[f"forward: {matrix}"].value == pytest.approx(2.0, rel=1e-3)
    assert rows[f"forward: {matrix}"].bar == pytest.approx(1 / 0.58)
    assert not rows[f"forward: {matrix}"].met
    assert rows[f"backward: {matrix}"].value == pytest.approx(2 * 3 / 2.5, rel=1e-3)
    assert rows[f"backward: {on_gpu.ONE_KERNEL}, matrix rate over the rate of useful work"].value == pytest.approx(
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
    """Time and rate rows of the native backend beside PyTorch's flash kernel, which the CPU has."""
    case = replace(TINY, backend="native")
    ours = {"native": partial(case.contender, CPU)}
    rivals = speed.dense_makers(replace(TINY, method="dense", backend="auto"), CPU, backward=False)
    work = dict.fromkeys((*ours, *rivals), 1.0)
    rows = list(speed.against("dense", TINY, ours, rivals, CPU, 0.0, {"native": 1e9}, work))
    assert [row.refused is None for row in rows] == [True, True, False, True]
    assert rows[-1].met
    (*_, last) = speed.speed(TINY, ["native"], CPU, 0.0)
    assert "dense cuDNN: RuntimeError" in last.refused


def test_calls_in_a_row():
    calls = []
    work = speed.in_a_row(lambda: contender(lambda: calls.append(1)), 3)
    assert list(work()) == ["forward"]
    assert len(calls) == 3


def test_the_memory_checker_sees_each_tensor(monkeypatch, tmp_path):
    """PyTorch cuts small tensors from large blocks, in which the checker takes all accesses for valid. An error ends
    the calls, and is counted all the same."""
    checker = tmp_path / "compute-sanitizer"
    checker.write_text('#!/bin/sh\necho "ERROR SUMMARY: 3${PYTORCH_NO_CUDA_MEMORY_CACHING} errors"\nexit 1\n')
    checker.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (row,) = watched.memory_errors()
    assert (row.value, row.met) == (31, False)
    assert {check.name for check in checks(130) if check.views} <= set(watched.TINY)
    checker.write_text("#!/bin/sh\necho no device\nexit 1\n")
    with pytest.raises(RuntimeError, match="ended with 1: no device"):
        list(watched.memory_errors())
    checker.write_text('#!/bin/sh\necho "ERROR SUMMARY: 0 errors"\nexit 1\n')
    with pytest.raises(RuntimeError, match="ended with 1"):
        list(watched.memory_errors())


@pytest.mark.parametrize("name", watched.COUNTED)
def test_what_is_counted_was_compiled(name):
    """The calls under the profiler are those that were recorded: a forward alone needs no kernel of the backward."""
    case = replace(watched.COUNTED[name], seq_len=4096, heads=8)
    with specializations.recorded("sm_90"):
        phases = list(watched.work_of(name, case, CPU)())
    assert phases == ["forward", "forward+backward"][: 1 + name.startswith("backward")]


def test_million_tokens_of_one_kernel_has_no_ratio():
    """Its group runs it alone, and a row without a value would replace the one that the group of triton measured."""
    refused = {on_gpu.ONE_KERNEL: "why", "dense flash": "why"}
    with (
        patch.object(speed, "serving", lambda makers: ({}, refused)),
        patch.object(measure, "interleave", lambda *x, **y: Rounds({(measure.MATMUL, "forward"): [1.0]}, 1)),
    ):
        found = {
            name: [row.name for row in speed.speed(TINY, [name], CPU, 1.0)] for name in ("triton", on_gpu.ONE_KERNEL)
        }
    over = {
        "forward: time per score entry over the best dense kernel's",
        "backward: time per score entry over the best dense kernel's",
    }
    assert over <= set(found["triton"])
    assert not over & set(found[on_gpu.ONE_KERNEL])


def test_peaks_were_compiled():
    """Their warm-up is a call of its own length."""
    (group,) = (x for x in gpu.part_3(MACHINE) if x.label == "launches and memory")
    for job in group.jobs:
        if job.label.startswith("peak"):
            found = {x.kernel.rpartition(".")[2] for x in specializations.needed(job.calls, "sm_90")}
            assert ("backward_dq" in found) == ("True" in job.label)
            assert "forward" in found


def test_the_host_is_ahead_of_the_clock(monkeypatch):
    """The GPU waits until the launch is queued, and no table is made between two events."""
    done = []
    buffer = SimpleNamespace(zero_=lambda: done.append("wait"))
    monkeypatch.setattr(torch, "empty", lambda *x, **y: buffer)
    monkeypatch.setattr(measure, "synchronize", lambda device: done.append("end"))
    kernels.alone("forward", contender(lambda: done.append("call")), torch.device("cuda"))
    assert done == ["wait", "call", "end"]
    done.clear()
    monkeypatch.setattr(kernels, "ROUNDS", 1)
    monkeypatch.setattr(kernels, "alone", lambda *x: done.append("alone") or 1.0)
    monkeypatch.setattr(type(TINY), "contender", lambda *x, **y: contender(lambda: done.append("call")))
    assert len(list(kernels.orders(TINY, CPU))) == 2
    assert done == ["alone", "alone", "call", "alone", "call", "alone"]


def test_last_rows_are_their_own():
    """What `beyond 2^31 elements` compares, on the CPU's backend: the last segments see nothing else."""
    case = replace(TINY, backend="native", seq_len=4 * 64)
    rows = list(correctness.last_rows(case, 64, CPU))
    assert [row.name.partition(":")[0] for row in rows] == ["out", "dq", "dk", "dv"]
    assert all(row.value < 1e-6 for row in rows)
    assert all(row.value > 1e-3 for row in correctness.last_rows(case, 48, CPU)), "not whole segments"


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="is the child process")
def test_in_the_interpreter():
    in_a_child_process(f"{__file__}::TestInterpreted")


@interpreted
class TestInterpreted:
    @pytest.mark.parametrize(("check", "name"), [*zip(checks(70), cycle(("triton", on_gpu.ONE_KERNEL)), strict=False)])
    def test_checks(self, check, name):
        check = replace(check, head_dims=(24,), dtypes=check.dtypes[:1])
        (row,) = correctness.correctness(check, name, CPU)
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
        """Events that count launches stand for the device's clock."""

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                pass

            def elapsed_time(self, end):
                return 2.0

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(kernels, "ROUNDS", 1)
        monkeypatch.setattr(kernels, "CANDIDATES", {"dq": [(64, 64, 1, 1), (32, 64, 1, 1)]})
        before = dict(ARCHITECTURES["interpreter"].shapes)
        one, other = kernels.tile_shapes("dq", TINY, CPU)  # the first of the candidates is what ships
        assert one.name == "dq alone: shipped tiles (64, 64, 1, 1)"
        assert other.name == "dq alone: tiles (32, 64, 1, 1)"
        assert other.over["shipped tiles (64, 64, 1, 1)"].median == 1.0
        assert one.value == 4.0, "two launches, a turn each"
        assert ARCHITECTURES["interpreter"].shapes == before
        with kernels.shaped("dq", TINY, CPU, Shape(16, 64, 1, 1)):
            assert ARCHITECTURES["interpreter"].shape("dq", 4, 16, masked=False).own == 16

    def test_threshold(self):
        *rows, last = speed.threshold(CPU, budget=0.0, case=TINY, lengths=(32, 64))
        assert len(rows) == 4
        assert last.refused == "triton is not faster than native at any length measured"
