"""Exact dilated, block-sparse and context-parallel attention over very long sequences."""

from dilated_attention.errors import BackendError, UnsupportedError
from dilated_attention.functional import Explanation, attention, dilated_attention, explain
from dilated_attention.merge import merge
from dilated_attention.patterns import Dilated
from dilated_attention.plan import plan_cache

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "Dilated",
    "Explanation",
    "UnsupportedError",
    "attention",
    "dilated_attention",
    "explain",
    "merge",
    "plan_cache",
]
