"""The only tolerances of the tests: relative error in norm, per dtype.

A result that cancels meets no relative bar in finite precision: where a query sees one key, the gradient of q is
exactly 0, and what is computed is the rounding of dP - dP. So an error passes if its norm is at most

    max(TOLERANCE ‖expected‖, ROUNDING ε ‖magnitude‖),

ε the machine epsilon of the dtype and magnitude the size of the terms that the result is a sum of
(`conformance.magnitudes`). The second bar is the higher one only where the result is a small part of these terms: below
1 % of them in float32, 8 % in bfloat16, 7 % in float16.

Measured on 6,000 random calls of `test_properties` per dtype (CPU, torch 2.13): where the result is over 3 % of its
terms, the largest relative error is 1.1e-15 in float64, 6.1e-7 in float32, 2.3e-2 in bfloat16, 2.2e-3 in float16; where
only the second bar is met, the largest error is 0.25, 0.13, 0.12 and 0.10 ε ‖magnitude‖.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
ROUNDING = {torch.float64: 0.5, torch.float32: 0.25, torch.bfloat16: 0.2, torch.float16: 0.2}

# Entry by entry, of modules and models recorded in golden/: single-precision results of another order of operations.
GOLDEN = {"rtol": 1e-4, "atol": 2e-5}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """‖actual - expected‖ / ‖expected‖ in float64 over the finite entries of `expected`; the others must agree."""
    difference, expected = _finite_difference(actual, expected)
    return (difference / expected).item() if difference else 0.0


def excess(actual: Tensor, expected: Tensor, magnitude: Tensor, dtype: torch.dtype) -> float:
    """The error over its bar: at most 1 if `actual`, computed in `dtype`, is right."""
    difference, norm = _finite_difference(actual, expected)
    size = magnitude[_finite(expected)].norm()
    bar = max(TOLERANCE[dtype] * norm, ROUNDING[dtype] * torch.finfo(dtype).eps * size)
    return (difference / bar).item() if difference else 0.0


def _finite(x: Tensor) -> Any:
    """Return an index of the finite entries of x: for most tensors, whose sum is finite, of all, without a mask."""
    return ... if x.detach().sum().isfinite() else x.isfinite()


def _finite_difference(actual: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    actual, expected = actual.detach().double(), expected.detach().double()
    finite = _finite(expected)
    if isinstance(finite, Tensor):
        differ = actual.ne(expected) & ~(actual.isnan() & expected.isnan()) & ~finite
        assert not differ.any(), f"{int(differ.sum())} entries are not inf or NaN where they should be"
    return (actual - expected)[finite].norm(), expected[finite].norm()
