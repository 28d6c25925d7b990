"""The only tolerances of the tests: the relative error in norm, per dtype."""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """‖actual - expected‖ / ‖expected‖ in float64 over the finite entries of `expected`; the others must agree."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    finite = expected.isfinite()
    same = actual[~finite].eq(expected[~finite]) | (actual[~finite].isnan() & expected[~finite].isnan())
    assert same.all(), f"{int((~same).sum())} entries are not inf or NaN where they should be"
    error = (actual[finite] - expected[finite]).norm().item()
    return error / expected[finite].norm().item() if error else 0.0
