"""A few of the calls of `explore_calls.py`, which runs any number of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from explore_calls import MODES, Trial, misses


def test_calls_made_in_unusual_ways():
    assert {Trial(seed).mode for seed in range(100)} == set(MODES)
    reports: list[str] = []
    assert misses(100, 0, reports.append) == 0, "\n".join(reports)


@pytest.mark.parametrize(("change", "says"), [
    (lambda x: x + 1, "over their bars"), (lambda x: x.half(), "lse is torch.float16"), (lambda x: None, "Error"),
])  # fmt: skip
def test_a_miss_is_reported(change: Callable[[Tensor], Tensor], says: str, monkeypatch: pytest.MonkeyPatch):
    def spoiled(*arguments):
        results = run(*arguments)
        return results | {"lse": change(results["lse"])}

    run, reports = Trial.run, []
    seed = next(n for n in range(100) if Trial(n).mode == "no_grad" and Trial(n).call.seq_len * Trial(n).call.batch)
    monkeypatch.setattr(Trial, "run", spoiled)
    assert misses(1, seed, reports.append) == 1
    assert f"seed {seed}" in reports[0]
    assert says in reports[0]
