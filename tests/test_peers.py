"""lab/experiments/peers.py: what it says of other implementations."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from dilated_attention_lab.bench import compare
from dilated_attention_lab.bench.cases import Case

sys.path.insert(0, str(Path(__file__).parents[1] / "lab" / "experiments"))
import peers

TINY = Case(method="dilated", seq_len=256, segment_lengths=(64, 128), dilation_rates=(1, 2), heads=3, head_dim=8)
CPU = torch.device("cpu")
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


def test_a_peer_that_attends_over_heads_is_told_apart(checkout):
    (peer,) = peers.load(checkout("F.scaled_dot_product_attention(q, k, v) * 3"))
    setting = compare.Setting(TINY, seconds=0.0)
    rows = list(peers.measured(setting, CPU, [peer]))
    (row,) = (row for row in rows if row.parameters.get("variant") == "fork: DilatedAttention")
    assert row.figures["depends on other tokens"] == 0
    assert row.figures["row sum, least"] == pytest.approx(3)
    assert row.figures["error"] > 0.1
    assert not row.figures.keys() & {"keys reached", "share of score entries"}  # of ours, not of what it computes
    assert "forward+backward" in row.times
    over = {row.name: row for row in rows if row.name.endswith("time over fork: DilatedAttention")}
    assert [name.partition(":")[0] for name in over] == ["forward", "forward+backward"]
    assert {(row.parameters["variant"], row.bar) for row in over.values()} == {("head groups", 1.0)}
    record = {"value": row.value, "parameters": row.parameters, "figures": row.figures, "times": {}}
    ((name, *_),) = compare.table([record])[1]
    assert name == "fork: DilatedAttention (rows sum to 3 to 3) (no token sees another)"


def test_a_peer_that_does_not_run_has_the_reason(checkout):
    (peer,) = peers.load(checkout("q.training"))
    rows = peers.measured(compare.Setting(TINY, backward=False, seconds=0.0), CPU, [peer])
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
    first = f"fork={tmp_path / 'other'}"
    peers.load(first)
    checkout("k")
    with pytest.raises(ValueError, match=r"imported from .*other.*one peer of that package at a time"):
        peers.load(fork)
    peers.load(first)


def test_classes_that_cannot_be_loaded_are_told(checkout, capsys):
    peers.load(checkout("q"))
    said = capsys.readouterr().err
    assert said.startswith("fork=")
    assert "not loaded: ImprovedDilatedAttention: ModuleNotFoundError: No module named" in said


@pytest.mark.parametrize("error", ["RuntimeError", "KeyError"])
def test_a_peer_that_fails_on_import_is_refused(error, checkout, tmp_path):
    argument = checkout("q")
    (tmp_path / "dilated_attention_pytorch" / "__init__.py").write_text(f"raise {error}('CUDA is required')")
    with pytest.raises(ValueError, match=rf"fork=.*cannot be loaded from .*: .*{error}: .*CUDA is required"):
        peers.load(argument)


def test_a_peer_whose_second_backward_fails_is_timed_forward(checkout):
    kept = 'self.__dict__.update(kept=q * q + self.__dict__.get("kept", 0))'
    (peer,) = peers.load(checkout(f"({kept}, q * self.kept + k + v)[1]"))
    rows = list(peers.measured(compare.Setting(TINY, seconds=0.0), CPU, [peer]))
    (row,) = (row for row in rows if row.parameters.get("variant") == "fork: DilatedAttention")
    assert row.times.keys() == {"forward"}
    assert "forward+backward: time over fork: DilatedAttention" not in {row.name for row in rows}


@pytest.mark.parametrize("body", ["q[:, 10**9]", "dict()['a key']", "q[:, ::2]"])
def test_whatever_a_peer_raises_is_its_reason(body, checkout):
    (peer,) = peers.load(checkout(body))
    peer = replace(peer, stands_in="without flash-attn: its call is PyTorch's fused attention")
    rows = peers.measured(compare.Setting(TINY, backward=False, seconds=0.0), CPU, [peer])
    (row,) = (row for row in rows if row.parameters.get("variant") == "fork: DilatedAttention")
    assert "Error: " in row.refused
    assert row.parameters["stands in"] == peer.stands_in  # as of a row that has figures, which takes its place


def test_no_error_is_told_of_a_peer_with_another_pattern(checkout, monkeypatch):
    (peer,) = peers.load(checkout("F.scaled_dot_product_attention(q, k, v)"))
    of_blocks = replace(compare.variants(TINY)["head groups"], method="block-sparse", blocks="local", density=0.1)
    variants = compare.variants(TINY) | {"local blocks, 10%": of_blocks}
    monkeypatch.setattr(compare, "variants", lambda base: variants)
    peer = replace(peer, method="block-sparse", same_pattern=False)
    rows = list(peers.measured(compare.Setting(TINY, seconds=0.0), CPU, [peer]))
    (row,) = (row for row in rows if row.parameters.get("variant") == "fork: DilatedAttention")
    assert row.value > 0
    assert row.figures.keys() == {
        "row sum, least",
        "row sum, greatest",
        "depends on other tokens",
        "peak memory, bytes",
    }
    assert not row.parameters.keys() & {"density", "blocks"}


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
