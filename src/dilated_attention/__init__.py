"""Exact dilated, block-sparse and context-parallel attention over very long sequences."""

from dilated_attention.cache import plan_cache
from dilated_attention.errors import BackendError, UnsupportedError
from dilated_attention.explain import Explanation, explain
from dilated_attention.functional import attention, block_sparse_attention, dilated_attention
from dilated_attention.layout import BlockLayout
from dilated_attention.merge import merge
from dilated_attention.neighborhood import Neighborhood
from dilated_attention.patterns import Dilated, Product, Sum, Window
from dilated_attention.suggestion import suggest_pattern
from dilated_attention.weights import attention_weights

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "BlockLayout",
    "Dilated",
    "Explanation",
    "Neighborhood",
    "Product",
    "Sum",
    "UnsupportedError",
    "Window",
    "attention",
    "attention_weights",
    "block_sparse_attention",
    "dilated_attention",
    "explain",
    "merge",
    "plan_cache",
    "suggest_pattern",
]
