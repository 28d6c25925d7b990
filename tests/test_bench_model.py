"""The model suite: what it compares is comparable, and its rows are drawn."""

from __future__ import annotations

import json

import pytest
import torch

from dilated_attention import Dilated
from dilated_attention.cli import main
from dilated_attention.models import KeyValueCache, LongNetLM
from dilated_attention_bench import charts, measure
from dilated_attention_bench.suites import from_dense, model

CPU = torch.device("cpu")


def test_both_slide_encoders_compute_the_same():
    calls = model.encoders(1, 40, CPU)
    ours, rival = calls[model.OURS](), calls[model.RIVAL]()
    assert ours.shape == (1, model.WIDTH)
    torch.testing.assert_close(ours, rival, rtol=1e-4, atol=2e-5)
    assert not ours.requires_grad


def test_a_cache_that_is_made_up_is_as_large_as_a_prefilled_one():
    language = LongNetLM(model.LANGUAGE).eval()
    _, prefilled = language.prefill(torch.zeros(1, 70, dtype=torch.int64), max_len=100)
    made_up = model.cache_at(model.LANGUAGE, 70, 30, CPU)
    assert made_up.nbytes == prefilled.nbytes
    assert made_up.positions == prefilled.positions
    assert language.decode(torch.zeros(1, dtype=torch.int64), made_up).isfinite().all()


def test_a_larger_cache_exceeds_its_bound(monkeypatch):
    nbytes = KeyValueCache.nbytes
    for name, value in (("POSITIONS", (100, 200)), ("DENSE_POSITIONS", (100,)), ("WRITTEN", 1)):
        monkeypatch.setattr(model, name, value)
    monkeypatch.setattr(KeyValueCache, "nbytes", property(lambda cache: 100 * nbytes.fget(cache)))
    (row,) = (row for row in model._decoding(CPU, 0.0, True) if "over the bound" in row.name)
    assert row.met is False
    monkeypatch.undo()
    assert model.cache_at(model.LANGUAGE, 100_000, 32, CPU).nbytes == model.cache_bound(model.LANGUAGE) == 12_582_912


@pytest.mark.slow
def test_peak_memory_of_a_call():
    held = measure.peak_above_now(lambda: torch.ones(30, 2**20).sum(), CPU)
    assert 0.95 * 30 * 2**22 <= held < 1.3 * 30 * 2**22
    with pytest.raises(RuntimeError, match=r"dilated_attention_bench\.suites\.model .* ended with 1: (?s:.*)KeyError"):
        measure.in_new_process("dilated_attention_bench.suites.model", {})


@pytest.mark.parametrize("name", [name for name in from_dense.STARTS if "transformers" not in name])
def test_models_that_people_have_compute_the_same_where_one_segment_covers_all(name):
    outs = []
    for pattern in (None, Dilated((40,), (1,))):
        torch.manual_seed(0)
        made, forward = from_dense.STARTS[name][1](pattern)
        torch.manual_seed(1)
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        outs.append(forward(torch.randn(1, 40, from_dense.WIDTH)))
    torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-5)


def test_decoding_is_drawn(tmp_path, capsys):
    rows = [
        {
            "name": f"decoding, {method}: {what}",
            "parameters": {"method": method, "seq_len": tokens, "heads": 4},
            "value": value,
            "unit": unit,
            "environment": {"device": "a device"},
        }
        for method in ("dilated", "dense")
        for tokens in (1000, 5000)
        for what, unit, value in (("time a token", "ms", 3.0), ("bytes of the cache", "bytes", 2.0**20))
    ]
    folder = tmp_path / "results" / "cpu"
    folder.mkdir(parents=True)
    (folder / "model.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["plot", str(tmp_path / "results"), "--out", str(tmp_path / "out"), "--documents"]) == 0
    assert (tmp_path / "out" / "cpu" / "decoding.png").stat().st_size > 0
    assert charts._decoding(rows[:0]) is None
