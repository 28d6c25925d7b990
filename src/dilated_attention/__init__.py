"""Exact dilated, block-sparse and context-parallel attention over very long sequences."""
