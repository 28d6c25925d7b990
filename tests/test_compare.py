"""`dilated-attention compare`: its oracle, its variants, resuming, and what it says of other implementations."""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from dilated_attention.backends.reference import count_matrix
from dilated_attention.cli import main
from dilated_attention_bench import charts, compare, peers, rank_processes
from dilated_attention_bench.cases import Case
from dilated_attention_bench.exact import exact, keys_of, keys_reached
from dilated_attention_bench.results import Row, read

TINY = Case(method="dilated", seq_len=256, segment_lengths=(64, 128), dilation_rates=(1, 2), heads=3, head_dim=8)
CPU = torch.device("cpu")


@pytest.fixture
def few(monkeypatch):
    """Four of the variants."""
    kept, variants = ("dense", "LongNet branches", "head groups", "ring of one process"), compare.variants
    monkeypatch.setattr(compare, "variants", lambda base: {name: variants(base)[name] for name in kept})


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
    rows = list(compare.measured(setting, CPU, []))
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
    rows = compare.measured(compare.Setting(TINY, backward=False, seconds=0.0), CPU, [])
    assert next(row for row in rows if row.name == compare.WORST).met is False


def test_memory_is_not_of_what_a_first_call_alone_takes(few, monkeypatch):
    prepare = Case.prepare

    def prepared(case, *arguments):
        call, once = prepare(case, *arguments), [1 << 26]
        return lambda q, k, v: [call(q, k, v), torch.ones(once.pop() if once else 1, dtype=torch.uint8)][0]

    monkeypatch.setattr(Case, "prepare", prepared)
    rows = [*compare.measured(compare.Setting(TINY, backward=False, seconds=0.0), CPU, [])]
    peaks = [row.figures["peak memory, bytes"] for row in rows if row.name == compare.NAME]
    assert len(peaks) == 4
    assert max(peaks) < 1 << 25


def test_what_is_too_large_or_too_short_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(compare, "MOST_FLOPS", compare.variants(TINY)["dense"].flops - 1)
    setting = compare.Setting(replace(TINY, segment_lengths=(32, 64)), backward=False, seconds=0.0)
    refused = {r.parameters["variant"]: r.refused for r in compare.measured(setting, CPU, []) if r.refused}
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


def test_what_a_file_holds_is_not_measured_again(few, tmp_path, monkeypatch, capsys):
    setting = compare.Setting(replace(TINY, dtype="bfloat16"), backward=False, seconds=0.0)
    monkeypatch.setattr(compare, "settings", lambda quick: [setting])
    words = ["compare", "--out", str(tmp_path)]
    assert main(words) == 0
    assert "head groups" in capsys.readouterr().out
    monkeypatch.setattr(compare, "measured", lambda *arguments: pytest.fail("measured again"))
    assert main(words) == 0
    assert "head groups" in capsys.readouterr().out
    assert main([*words, "--only", "no such title"]) == 2


@pytest.mark.slow
def test_a_setting_is_measured_again_for_a_new_peer_and_after_an_interruption(few, checkout, tmp_path, monkeypatch):
    setting = compare.Setting(TINY, backward=False, seconds=0.0)
    monkeypatch.setattr(compare, "settings", lambda quick: [setting])
    monkeypatch.setattr(compare, "ring_of_two", lambda *arguments: iter(()))
    words, calls, measured = ["compare", "--out", str(tmp_path / "out")], [], compare.measured

    def counted(*arguments):
        calls.append(arguments)
        yield from itertools.islice(measured(*arguments), 5 if len(calls) == 1 else None)

    monkeypatch.setattr(compare, "measured", counted)
    assert [main(words) for _ in range(2)] == [0, 0]
    assert len(calls) == 2  # the first ended among the variants
    two = {"parameters": compare.parameters(setting, "ring of two processes", TINY), "value": 1.0, "unit": "ms"}
    monkeypatch.setattr(compare, "ring_of_two", lambda *arguments: iter([Row(compare.NAME, **two)]))
    assert [main(words) for _ in range(2)] == [0, 0]
    assert len(calls) == 3
    peer = ["--peer", checkout("F.scaled_dot_product_attention(q, k, v)")]
    assert [main([*words, *peer]) for _ in range(2)] == [0, 0]
    assert len(calls) == 4
    assert main(words) == 0
    assert len(calls) == 4


def test_the_settings_of_a_whole_file_are_held_and_none_without_any_of_its_rows():
    path = Path(__file__).parents[1] / "results" / "cpu-2-threads-amd-epyc-zen-4" / "compare.jsonl"
    rows, whole = read(path), compare.settings(False)
    assert [setting.label for setting in whole if not compare.held(rows, setting, [])] == []
    reported = next(setting for setting in whole if setting.base == compare.REPORTED and not setting.compiled)
    its = [row for row in rows if not compare.held([x for x in rows if x is not row], reported, [])]
    assert Counter(row["name"] for row in its) == {
        compare.NAME: 19, compare.WORST: 1, f"forward: {compare.RING}": 1, f"forward+backward: {compare.RING}": 1,
        "the plan: time over LongNet branches": 6, "the plan: time over head groups": 6,
    }  # fmt: skip
    peer = peers.Peer("fork: of no row", "head groups", lambda case: pytest.fail("called"))
    assert not any(compare.held(rows, setting, [peer]) for setting in whole)


def test_a_ring_of_two_that_is_not_measured_has_the_reason(monkeypatch, capsys):
    setting = compare.Setting(TINY)

    def failing(*arguments, **options):
        raise RuntimeError("no interface on some-machine")

    monkeypatch.setattr(rank_processes, "measure", failing)
    rows = {device: [*compare.ring_of_two(setting, torch.device(device))] for device in ("cuda", "cpu")}
    assert [row.parameters["variant"] for (row,) in rows.values()] == [compare.TWO] * 2
    assert [row.refused for (row,) in rows.values()] == [
        "its two processes run on the CPU alone, not on cuda",
        "its two processes failed; standard error said why",
    ]
    assert "no interface on some-machine" in capsys.readouterr().err


@pytest.mark.parametrize(("platform", "named"), [("linux", {"GLOO_SOCKET_IFNAME": "lo"}), ("darwin", {})])
def test_the_loopback_interface_is_named_where_it_has_that_name(platform, named, monkeypatch):
    monkeypatch.setattr(rank_processes.sys, "platform", platform)
    monkeypatch.setattr(rank_processes, "in_new_process", lambda *arguments, **options: options)
    options = rank_processes.measure("ring", TINY, 2, rounds=1)
    assert {name: value for name, value in options.items() if "GLOO" in name} == named


FORK = """
import torch.nn.functional as F
from torch import nn
class DilatedAttention(nn.Module):
    def __init__(self, segment_lengths, dilation_rates):
        super().__init__()
    def forward(self, q, k, v, is_causal=False):
        return {body}
"""


@pytest.fixture
def checkout(tmp_path):
    """A package of the reported fork's name, whose class computes `body`."""

    def make(body: str) -> str:
        package = tmp_path / "dilated_attention_pytorch"
        package.mkdir(exist_ok=True)
        (package / "__init__.py").touch()
        (package / "dilated_attention.py").write_text(FORK.format(body=body))
        return f"fork={tmp_path}"

    yield make
    for name in [name for name in sys.modules if name.startswith("dilated_attention_pytorch")]:
        del sys.modules[name]


def test_a_peer_that_attends_over_heads_is_told_apart(few, checkout):
    (peer,) = peers.load(checkout("F.scaled_dot_product_attention(q, k, v) * 3"))
    setting = compare.Setting(TINY, seconds=0.0)
    rows = list(compare.measured(setting, CPU, [peer]))
    (row,) = (row for row in rows if row.parameters.get("variant") == "fork: DilatedAttention")
    assert row.figures["depends on other tokens"] == 0
    assert row.figures["row sum, least"] == pytest.approx(3)
    assert row.figures["error"] > 0.1
    assert not row.figures.keys() & {"keys reached", "share of score entries"}  # of ours, not of what it computes
    assert "forward+backward" in row.times
    over = {row.name: row for row in rows if row.name.endswith("time over fork: DilatedAttention")}
    assert [name.partition(":")[0] for name in over] == ["forward", "forward+backward"]
    assert {(row.parameters["variant"], row.bar) for row in over.values()} == {("head groups", 1.0)}
    (worst,) = (row for row in rows if row.name == compare.WORST)
    assert worst.met  # it is of our own variants
    record = {"value": row.value, "parameters": row.parameters, "figures": row.figures, "times": {}}
    ((name, *_),) = compare.table([record])[1]
    assert name == "fork: DilatedAttention (rows sum to 3 to 3) (no token sees another)"


def test_a_peer_that_does_not_run_has_the_reason(few, checkout):
    (peer,) = peers.load(checkout("q.training"))
    rows = compare.measured(compare.Setting(TINY, backward=False, seconds=0.0), CPU, [peer])
    (row,) = (row for row in rows if row.parameters.get("variant") == "fork: DilatedAttention")
    assert "AttributeError" in row.refused


def test_the_forks_blocks_follow_the_density(checkout, tmp_path):
    argument = checkout("q")
    (tmp_path / "dilated_attention_pytorch" / "block_sparse_ring_dilated_attention.py").write_text("""
from types import SimpleNamespace as SparsePatternConfig
from torch import nn
class BlockSparseRingDilatedAttention(nn.Module):
    def __init__(self, segment_lengths, dilation_rates, sparse_config):
        super().__init__()
        self.config = sparse_config
    def forward(self, q, k, v, is_causal=False):
        return self.config
""")
    (peer,) = (peer for peer in peers.load(argument) if peer.method == "block-sparse")
    case = compare.variants(TINY)["local blocks, 25%"]
    config = peer.make(case)(*(torch.zeros(1),) * 3)
    # its windows are of 512 tokens whatever the ratio; these are the blocks of its tables
    assert vars(config) == {"pattern_type": "dilated_sparse", "sparsity_ratio": 0.25, "block_size": case.block_size}


def test_two_folders_of_one_package_are_refused(checkout, tmp_path):
    fork = checkout("q")
    (tmp_path / "other").mkdir()
    (tmp_path / "dilated_attention_pytorch").rename(tmp_path / "other" / "dilated_attention_pytorch")
    first = f"dilated-attention-pytorch={tmp_path / 'other'}"
    peers.load(first)
    checkout("k")
    with pytest.raises(ValueError, match=r"imported from .*other.*one --peer of that package at a time"):
        peers.load(fork)
    peers.load(first)


def test_classes_that_cannot_be_loaded_are_told(checkout, capsys):
    peers.load(checkout("q"))
    said = capsys.readouterr().err
    assert said.startswith("--peer fork=")
    assert "not loaded: ImprovedDilatedAttention: ModuleNotFoundError: No module named" in said


@pytest.mark.parametrize("error", ["RuntimeError", "KeyError"])
def test_a_peer_that_fails_on_import_is_refused(error, checkout, tmp_path):
    argument = checkout("q")
    (tmp_path / "dilated_attention_pytorch" / "__init__.py").write_text(f"raise {error}('CUDA is required')")
    with pytest.raises(ValueError, match=rf"--peer fork=.*cannot be loaded from .*: .*{error}: .*CUDA is required"):
        peers.load(argument)


def test_a_peer_whose_second_backward_fails_is_timed_forward(few, checkout):
    kept = 'self.__dict__.update(kept=q * q + self.__dict__.get("kept", 0))'
    (peer,) = peers.load(checkout(f"({kept}, q * self.kept + k + v)[1]"))
    rows = list(compare.measured(compare.Setting(TINY, seconds=0.0), CPU, [peer]))
    (row,) = (row for row in rows if row.parameters.get("variant") == "fork: DilatedAttention")
    assert row.times.keys() == {"forward"}
    assert "forward+backward: time over fork: DilatedAttention" not in {row.name for row in rows}


@pytest.mark.parametrize("body", ["q[:, 10**9]", "dict()['a key']", "q[:, ::2]"])
def test_whatever_a_peer_raises_is_its_reason(body, few, checkout):
    (peer,) = peers.load(checkout(body))
    peer = replace(peer, stands_in="without flash-attn: its call is PyTorch's fused attention")
    rows = compare.measured(compare.Setting(TINY, backward=False, seconds=0.0), CPU, [peer])
    (row,) = (row for row in rows if row.parameters.get("variant") == "fork: DilatedAttention")
    assert "Error: " in row.refused
    assert row.parameters["stands in"] == peer.stands_in  # as of a row that has figures, which takes its place


def test_no_error_is_told_of_a_peer_with_another_pattern(few, checkout, monkeypatch):
    (peer,) = peers.load(checkout("F.scaled_dot_product_attention(q, k, v)"))
    of_blocks = replace(compare.variants(TINY)["head groups"], method="block-sparse", blocks="local", density=0.1)
    variants = compare.variants(TINY) | {"local blocks, 10%": of_blocks}
    monkeypatch.setattr(compare, "variants", lambda base: variants)
    peer = replace(peer, method="block-sparse", same_pattern=False)
    rows = list(compare.measured(compare.Setting(TINY, seconds=0.0), CPU, [peer]))
    (row,) = (row for row in rows if row.parameters.get("variant") == "fork: DilatedAttention")
    assert row.value > 0
    assert row.figures.keys() == {
        "row sum, least",
        "row sum, greatest",
        "depends on other tokens",
        "peak memory, bytes",
    }
    assert not row.parameters.keys() & {"density", "blocks"}
    record = {"name": row.name, "value": row.value, "parameters": row.parameters, "figures": row.figures, "times": {},
              "over": {"dense": {"median": 1.0}}}  # fmt: skip
    reported = record["parameters"] | {"seq_len": 4096, "branches": [1024, 2048, 4096]}
    assert charts._compare_shares([record | {"parameters": reported}]) is None


def test_wrong_peers_are_refused(tmp_path):
    for argument, said in (
        ("fork", "give NAME=PATH"),
        (f"none={tmp_path}", "NAME one of torchscale"),
        (f"fork={tmp_path}/none", "is not a folder"),
        (f"torchscale={tmp_path}", "cannot be loaded"),
    ):
        with pytest.raises(ValueError, match=said):
            peers.load(argument)


def test_checks_of_plain_attention():
    q, k, v = (torch.randn(1, 16, 2, 8) for _ in range(3))

    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    found = peers.checks(dense, q, k, v)
    assert found["depends on other tokens"] == 1
    assert found["row sum, least"] == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
def test_every_variant_compiles(fresh_python):
    """In a fresh process: what checks annotations here cannot be traced."""
    fresh_python("""
        from dataclasses import replace

        import torch

        from dilated_attention_bench import compare

        base = replace(compare.REPORTED, seq_len=256, segment_lengths=(128, 256), dilation_rates=(1, 2), heads=2)
        inputs = base.inputs(torch.device("cpu"))[0]
        for name, case in compare.variants(base).items():
            call = case.prepare()
            with torch.no_grad():
                compiled = torch.compile(call, backend="eager", fullgraph=True)(*inputs)
                assert torch.equal(compiled, call(*inputs)), name
    """)
