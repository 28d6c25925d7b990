"""Check what it takes to add a backend: one file with four functions, and one line of the registry."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from dilated_attention import BackendError, Dilated, Window, attention, explain, plan_cache
from dilated_attention.backends import cpu, native, table, tiles, triton
from dilated_attention.backends.facts import Facts
from dilated_attention.backends.table import BACKENDS, Backend
from dilated_attention.call import Call

# The file: here native with scores in double precision.


def refusal(facts):
    return None if facts.dtype == torch.float32 else f"it rounds from double to float32, not to {facts.dtype}"


def on_request(facts):
    return "slow; only on request"


def forward(problem, q, k, v):
    out, lse = native.forward(problem, q.double(), k.double(), v.double())
    return out.float(), lse.float()


def backward(problem, *tensors):
    wide = (None if x is None else x.double() for x in tensors)
    return tuple(x.float() for x in native.backward(problem, *wide))


# The line of the registry.
DOUBLE = Backend("double", "never chosen by auto", refusal, on_request, forward, backward)


def test_a_new_backend():
    pattern, inputs = Dilated((16, 64), (1, 4)), torch.randn(3, 1, 50, 4, 8).requires_grad_()
    with mock.patch.dict(BACKENDS, {"double": DOUBLE}):
        results = {name: attention(*inputs, pattern, is_causal=True, backend=name) for name in ("double", "native")}
        gradients = [torch.autograd.grad(out.sin().sum(), inputs)[0] for out in results.values()]
        assert explain(*inputs, pattern).refusals["double"] == "slow; only on request"
        with pytest.raises(BackendError, match=r"rounds from double to float32, not to torch\.float16"):
            attention(*inputs.half(), pattern, backend="double")
    assert not torch.equal(*results.values())
    torch.testing.assert_close(*results.values(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


CASES = [
    Facts(torch.device(device), dtype, head_dim, 4096, needs, work)
    for device in ("cuda", "cpu")
    for dtype, head_dim in ((torch.bfloat16, 64), (torch.float32, 128), (torch.float64, 64), (torch.float16, 320))
    for needs in ((), ("dropout_p",), ("key_padding_mask", "a block layout"), ("a window", "softcap"))
    for work in (10, 10**9)
] + [
    Facts(torch.device("cuda"), torch.bfloat16, 64, 2**31),
    Facts(torch.device("cuda"), torch.bfloat16, over_mesh=True),
]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.usefixtures("unchecked")
def test_auto_decides_alike_eager_and_compiled(every, monkeypatch):
    """On a GPU that is not there: before the kernels were shown right on it, and after.

    Compiled are the last rules, or each.
    """
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(table, "Choice", lambda backend, *reason: backend)  # the checked class cannot be traced
    (*needing, plain) = triton.RULES
    chosen = []
    for right, least in (((), {}), (("sm_90",), {}), (("sm_90",), {"sm_90": 1000})):
        monkeypatch.setattr(triton, "RIGHT", dict.fromkeys(right, ()))
        monkeypatch.setattr(triton, "RULES", (*needing, replace(plain, least=least)))
        torch.compiler.reset()

        def names(x):
            return x + 1, [table.choose("auto", facts).name for facts in CASES]

        chosen.append(names(torch.zeros(1))[1])
        if every or least:
            assert torch.compile(names, backend="eager", fullgraph=True)(torch.zeros(1))[1] == chosen[-1]
    assert len(CASES) == 66
    taken = [{facts for facts, name in zip(CASES, names, strict=True) if name == "triton"} for names in chosen]
    served = {x for x in CASES if x.device.type == "cuda" and x.dtype != torch.float64 and x.head_dim < 320}
    served -= {x for x in served if x.seq_len > tiles.MAX_TOKENS}
    assert taken == [set(), {x for x in served if x.needs}, {x for x in served if x.needs or x.work >= 1000}]


def test_auto_says_what_it_passes_by(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(triton, "architecture", lambda device: "sm_80")
    for rule in triton.RULES:
        why = triton.on_request(Facts(torch.device("cuda"), torch.bfloat16, needs=(rule.asks,) if rule.asks else ()))
        assert "not shown right on sm_80 yet" in why
        assert "info --check" in why
        assert rule.native in why


def test_auto_leaves_biases_to_native_on_every_gpu(monkeypatch):
    """No GPU has run the kernels with a bias yet."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton, "architecture", lambda device: "sm_90")
    for needs in (("bias",), ("softcap", "bias", "a window"), ("bias", "a block layout")):
        facts = Facts(torch.device("cuda"), torch.bfloat16, needs=needs, work=10**12)
        assert triton.refusal(facts) is None
        assert "not shown right on sm_90 yet with a bias" in triton.on_request(facts)
        assert table.choose("auto", facts).backend.name == "native"


class Symbol(int):
    """A number as torch.compile has it, which makes a graph for each value that it writes out."""

    def __format__(self, spec):
        raise AssertionError("written out")


def test_a_choice_writes_out_no_number_of_a_graph(monkeypatch):
    monkeypatch.setattr(triton, "RIGHT", {"sm_90": ()})
    monkeypatch.setattr(triton, "RULES", [replace(triton.RULES[-1], least={"sm_90": 1000})])
    monkeypatch.setattr(triton, "architecture", lambda device: "sm_90")
    facts = Facts(torch.device("cuda"), torch.float32, seq_len=Symbol(16), work=Symbol(16))
    assert "native is faster" in triton.on_request(facts)


@pytest.mark.parametrize("name", ["cpu", "triton"])
def test_a_graph_has_no_bound_on_the_length(name, monkeypatch):
    """torch.export refuses any other bound than the caller's. No kernel runs here."""
    monkeypatch.setattr(cpu, "missing", lambda: None)
    monkeypatch.setattr(triton, "_refusal_of", lambda device: None)
    monkeypatch.setattr(tiles, "MAX_TOKENS", 16)
    q = torch.ones(1, 64, 2, 8)
    with pytest.raises(BackendError, match="16 tokens; got 64"):
        Call.of(q, q, q, Window(3), backend=name)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert Call.of(q, q, q, Window(3), backend=name).backend.name == name


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("given", ["key_padding_mask", "dropout_p", "bias"])
def test_what_differs_by_head_over_a_mesh_is_left_to_native(name, given):
    """Rows that were gathered by head have a mask, dropout and positions by head, which the kernels would misread."""
    facts = Facts(torch.device("cpu"), torch.float32, needs=(given,), over_mesh=True)
    assert (BACKENDS[name].why_not(facts) is None) == (name == "native")
    assert table.choose("auto", facts).backend.name == "native"


@pytest.mark.parametrize("is_grad", [False, True])
@pytest.mark.parametrize("backend", ["auto", "native", "reference"])
@pytest.mark.parametrize("ends", [{"lengths": [290]}, {"cu_seqlens": torch.tensor([0, 290, 300])}], ids=str)
def test_another_default_device(backend, is_grad, ends):
    """Allocate on the device of the call's tensors, whatever torch.set_default_device says."""

    def values():
        q = k = v = torch.linspace(-1, 1, 300 * 64, device="cpu").sin().view(1, 300, 2, 32).requires_grad_(is_grad)
        given = {**ends, "return_lse": True}
        found = attention(q, k, v, Dilated((256, 300), (1, 2)), backend=backend, **given)
        return [*found, *torch.autograd.grad(found[0].sum(), q)] if is_grad else found

    expected = values()
    plan_cache.clear()
    with torch.device("meta"):
        found = values()
    assert all(torch.equal(x, y) for x, y in zip(expected, found, strict=True))


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_default_dtype(dtype, backend):
    """Compute in a dtype that follows from the call's tensors, whatever torch.set_default_dtype says."""
    q = torch.linspace(-1, 1, 40 * 16, dtype=torch.float32).sin().view(1, 40, 2, 8).requires_grad_()
    ragged = [{"key_padding_mask": torch.arange(40)[None] % 3 == 0}, {"lengths": [30]}, {"cu_seqlens": [0, 9, 40]}]
    calls = [{}, *ragged, {"dropout_p": 0.3}, {"sinks": torch.zeros(2)}]

    def values():
        found = []
        for given in calls:
            torch.manual_seed(0)
            pair = attention(q, q, q, Dilated((32, 40), (1, 2)), backend=backend, return_lse=True, **given)
            finite = torch.where(pair[1] == -torch.inf, 0, pair[1])
            found += [*pair, torch.autograd.grad(pair[0].sum() + finite.sum(), q)[0]]
        return found

    expected, before = values(), torch.get_default_dtype()
    plan_cache.clear()
    torch.set_default_dtype(dtype)
    try:
        found = values()
    finally:
        torch.set_default_dtype(before)
    assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(expected, found, strict=True))


def test_the_call_names_every_backend():
    assert [name for name in BACKENDS if f'`"{name}"`' not in (attention.__doc__ or "")] == []


def test_auto_takes_triton_where_results_say_so():
    """The architectures and the least work are those of the files of results; every row of a check keeps its bar."""
    least = {}
    for file in (Path(__file__).parents[1] / "results").glob("cuda-*/gpu.jsonl"):
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        right = [row for row in rows if row["name"].endswith("largest relative error")]
        assert len([row for row in right if row["parameters"]["backend"] == "triton"]) > 100
        assert all(row["met"] for row in right)
        (row,) = (row for row in rows if row["name"].startswith("`least` of "))
        least[row["name"].split()[2]] = row["value"]
    assert least == triton.RULES[-1].least
    assert least.keys() == triton.RIGHT.keys()
