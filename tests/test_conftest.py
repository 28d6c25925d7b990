"""The checks that the other tests rely on are really on."""

from __future__ import annotations

import importlib.util
import pkgutil

import hypothesis
import hypothesis.strategies as st
import jaxtyping
import pytest
import torch
from beartype import beartype
from jaxtyping import Float, TypeCheckError
from torch import Tensor

import dilated_attention
import slow
from conftest import CHECKED


@jaxtyping.jaxtyped(typechecker=beartype)
def add(a: Float[Tensor, "batch seq"], b: Float[Tensor, "batch seq"]) -> Float[Tensor, "batch seq"]:
    return a + b


def test_annotations_of_the_named_modules_are_checked():
    for module in pkgutil.iter_modules(dilated_attention.__path__):
        loader = importlib.util.find_spec(f"dilated_attention.{module.name}").loader
        assert (type(loader).__name__ == "_JaxtypingLoader") == (module.name in CHECKED), module.name


def test_slow_functions_exist():
    names = slow.LIST.read_text(encoding="utf-8").split()
    assert names == sorted(set(names))
    for name in names:
        file, *_, function = name.split("::")
        assert f"def {function}(" in (slow.LIST.parent / file).read_text(encoding="utf-8"), name


def test_a_shape_that_contradicts_its_annotation_is_an_error():
    with pytest.raises(TypeCheckError):
        add(torch.zeros(2, 3), torch.zeros(1, 3))


@pytest.mark.usefixtures("unchecked")
def test_unchecked_lets_wrong_shapes_reach_the_function():
    assert add(torch.zeros(2, 3), torch.zeros(1, 3)).shape == (2, 3)


def test_fresh_python_is_unchecked_and_takes_an_environment(fresh_python):
    source = """
        import os, sys
        import dilated_attention
        print(os.environ["TRITON_INTERPRET"], "beartype" in sys.modules)
    """
    assert fresh_python(source, TRITON_INTERPRET="1").split() == ["1", "False"]


def test_fresh_python_fails_on_a_warning(fresh_python):
    with pytest.raises(AssertionError, match="UserWarning: found"):
        fresh_python("import warnings; warnings.warn('found')")
    with pytest.raises(AssertionError, match="FutureWarning: ours"):
        fresh_python("import warnings; warnings.warn('ours', FutureWarning)")


def test_compiling_python_fails_on_errors_and_warnings_and_imports_nothing(compiling_python):
    assert compiling_python("print('found')").startswith("found\n")  # Triton may report leaks at the end
    with pytest.raises(AssertionError, match="UserWarning: found"):
        compiling_python("import warnings; warnings.warn('found')")
    with pytest.raises(AssertionError, match="NameError: name 'torch'"):
        compiling_python("torch.zeros(1)")


def warn_from(module, category):
    """A warning that points at `module`, as one of its own lines would raise it."""
    exec(f"import warnings; warnings.warn('a warning', {category})", {"__name__": module})


DEPRECATIONS = ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning")


@pytest.mark.parametrize("category", DEPRECATIONS)
def test_what_other_packages_deprecate_of_their_own_fails_nothing(category):
    warn_from("transformers.modeling_utils", category)


@pytest.mark.parametrize("category", [*DEPRECATIONS, "UserWarning", "RuntimeWarning"])
@pytest.mark.parametrize("module", ["dilated_attention", "dilated_attention.nn.attention", "test_slides", "__main__"])
def test_our_warnings_are_errors(module, category):
    with pytest.raises(Warning, match="a warning"):
        warn_from(module, category)


def test_other_packages_warnings_of_our_doing_are_errors():
    for category in ("UserWarning", "RuntimeWarning"):
        with pytest.raises(Warning, match="a warning"):
            warn_from("torch.nn.functional", category)


draws = []


@hypothesis.settings(max_examples=5)
@hypothesis.given(size=st.integers(1, 9))
def test_each_hypothesis_example_starts_from_one_torch_seed(size):
    draws.append(torch.rand(size)[0].item())
    assert len(set(draws)) == 1
