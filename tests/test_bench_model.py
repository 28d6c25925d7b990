"""The model suite: what it compares is comparable."""

from __future__ import annotations

import pytest
import torch

from dilated_attention.models import KeyValueCache, LongNetLM
from dilated_attention_lab.bench import measure
from dilated_attention_lab.bench.suites import model

CPU = torch.device("cpu")


def test_both_slide_encoders_compute_the_same():
    calls = model.encoders(1, 40, CPU, model.OURS, model.RIVAL)
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
    (row,) = (row for row in model._decoding(CPU, 0.0) if "over the bound" in row.name)
    assert row.met is False
    monkeypatch.undo()
    assert model.cache_at(model.LANGUAGE, 100_000, 32, CPU).nbytes == model.cache_bound(model.LANGUAGE) == 12_582_912


@pytest.mark.thorough
def test_peak_memory_of_a_call():
    held = measure.peak_above_now(lambda: torch.ones(30, 2**20).sum(), CPU)
    assert 0.95 * 30 * 2**22 <= held < 1.3 * 30 * 2**22
    with pytest.raises(
        RuntimeError, match=r"dilated_attention_lab.bench\.suites\.model .* ended with 1: (?s:.*)KeyError"
    ):
        measure.in_new_process("dilated_attention_lab.bench.suites.model", {})
