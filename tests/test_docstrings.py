"""The examples in the docstrings of public names run, and each public name has one or a reason why not."""

from __future__ import annotations

import doctest
import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]

PACKAGES = ("", ".bias", ".nn", ".parallel", ".models", ".layout", ".routing", ".integrations")
MODULES = (".decoding", ".integrations.huggingface", ".integrations.longformer_bigbird")
"""Modules without `__all__`: their functions without an underscore are public."""

REASONS = {
    "BackendError": "an exception: raised, not called",
    "UnsupportedError": "an exception: raised, not called",
    "decoding.newest_attention": "a step of the attention modules that select keys",
    "integrations.huggingface.attention_forward": "transformers calls it",
    "integrations.huggingface.visibility": "transformers calls it",
    "layout.DENSE_LIMIT": "a number",
    "layout.warn_of_blind": "patterns and layouts call it to warn",
    "models.load_gigapath": "needs a checkpoint: see docs/checkpoints.md",
    "models.load_longvit": "needs a checkpoint: see docs/checkpoints.md",
    "parallel.choose_blocks": "needs several processes: see docs/block-sparsity.md",
    "parallel.cp_mean": "needs several processes: see docs/parallel.md",
    "parallel.sequence_range": "needs several processes: see docs/parallel.md",
    "parallel.set_context_parallel": "needs several processes: see docs/parallel.md",
    "parallel.shard_labels": "needs several processes: see docs/parallel.md",
    "parallel.shard_sequence": "needs several processes: see docs/parallel.md",
    "parallel.unshard_sequence": "needs several processes: see docs/parallel.md",
}
"""Public names without an example, and why they have none."""


def public() -> dict[str, Any]:
    """Return the public objects by name."""
    found = {}
    for package in PACKAGES:
        module = import_module(f"dilated_attention{package}")
        found |= {f"{package}.{name}".lstrip("."): getattr(module, name) for name in module.__all__}
    for name in MODULES:
        module = import_module(f"dilated_attention{name}")
        for attribute, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not attribute.startswith("_"):
                found[f"{name}.{attribute}".lstrip(".")] = value
    return found


def examples(thing: Any) -> list[doctest.DocTest]:
    """Return the examples in the docstring of a function, of a class and its methods, or of the class of a value."""
    described = thing if inspect.isfunction(thing) or inspect.isclass(thing) else type(thing)
    if not described.__module__.startswith("dilated_attention"):
        return []
    return [test for test in doctest.DocTestFinder().find(described, globs={"torch": torch}) if test.examples]


PUBLIC = public()


@pytest.mark.parametrize("name", sorted(PUBLIC.keys() - REASONS.keys()))
def test_the_examples_of_a_public_name_run(name):
    tests = examples(PUBLIC[name])
    assert tests, f"{name} has no example in its docstring, and no reason in REASONS"
    lines: list[str] = []
    failed = sum(doctest.DocTestRunner().run(test, out=lines.append).failed for test in tests)
    assert not failed, "".join(lines)


def test_a_reason_names_a_public_name_without_an_example():
    assert REASONS.keys() <= PUBLIC.keys()
    assert not [name for name in REASONS if examples(PUBLIC[name])]


@pytest.mark.parametrize("name", sorted(name for name, reason in REASONS.items() if ": see " in reason))
def test_a_page_that_a_reason_names_uses_the_name(name):
    page = REASONS[name].split(": see ")[1]
    assert name.split(".")[-1] in (ROOT / page).read_text(encoding="utf-8")
