"""Set up every test: checked annotations, seeded generators, reproducible hypothesis."""

from __future__ import annotations

import gc
import json
import os
import runpy
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from select import select
from types import FunctionType, SimpleNamespace
from typing import Any

import hypothesis
import jaxtyping
import pytest
import torch

import slow

# Before the package is imported, which looks for them: the CPU kernels of these sources.
build = runpy.run_path(str(Path(__file__).parents[1] / "src/dilated_attention/kernels/cpu/build.py"))
if build["refusal"]() is None and build["outdated"]():
    build["build"]()

# beartype checks each call against its jaxtyping shapes, above the kernels and below the public functions. These check
# their own arguments, and beartype's sampling inside a strategy would disturb hypothesis. Triton compiles a kernel from
# the function's own source and globals, and the checking wrapper has others.
CHECKED = ("merge", "backends", "parallel", "nn")
CHECKS = 5
"""The calls of a function that are checked in a test: checking all of them took a fifth of the time of all tests. A
function inside another is not checked: it would be wrapped anew at each call of the other."""

_jaxtyped, _calls = jaxtyping.jaxtyped, Counter()


def _checked_at_first(fn: Any = None, *, typechecker: Any) -> Any:
    if fn is None:
        return partial(_checked_at_first, typechecker=typechecker)
    if "<locals>" in fn.__qualname__:
        return fn
    checked = _jaxtyped(fn, typechecker=typechecker)
    if not isinstance(fn, FunctionType):
        return checked

    @wraps(fn)
    def call(*arguments: Any, **options: Any) -> Any:
        _calls[fn] += 1
        return (checked if _calls[fn] <= CHECKS else fn)(*arguments, **options)

    return call


jaxtyping.jaxtyped = jaxtyping._decorator.jaxtyped = _checked_at_first
jaxtyping.install_import_hook([f"dilated_attention.{name}" for name in CHECKED], "beartype.beartype")


def _seed(seed: int) -> None:
    """Do what `torch.manual_seed` does, which also notes the stack for each kind of device that is not there."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


class _TorchGenerator:
    """Lets hypothesis seed torch before each example, so that a failure replays and shrinks on the same tensors."""

    def seed(self, seed: int) -> None:
        _seed(seed)

    def getstate(self) -> torch.Tensor:
        return torch.get_rng_state()

    def setstate(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


_generator = _TorchGenerator()  # hypothesis holds it weakly
hypothesis.register_random(_generator)
# No deadline and no complaint about slow examples: both measure how busy the machine is.
_relaxed = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("ci", derandomize=True, max_examples=50, **_relaxed)
hypothesis.settings.register_profile("explore", derandomize=False, max_examples=400, **_relaxed)
hypothesis.settings.load_profile("ci")  # pytest --hypothesis-profile=explore looks for new failures


LONGEST = "test_in_the_interpreter", "test_properties.py"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow tests, and put the longest first: a worker cannot take over what another has begun."""
    names = set(slow.LIST.read_text(encoding="utf-8").split())
    for item in items:
        if slow.function_of(item.nodeid) in names:
            item.add_marker("slow")
    items.sort(key=lambda item: not any(name in item.nodeid for name in LONGEST))


def pytest_collection_finish() -> None:
    """Python's collector need not look again and again at thousands of tests and the modules that they import."""
    gc.freeze()


@pytest.fixture(autouse=True)
def seed() -> None:
    """The test starts from torch's seed 0 and with checks of annotations, whatever ran before it."""
    _seed(0)
    _calls.clear()


@pytest.fixture(autouse=True)
def calls_are_forgotten() -> Iterator[None]:
    """Clear the cache after the test, which may have put another backend into the registry or changed the choice."""
    yield
    if (cache := sys.modules.get("dilated_attention.cache")) is not None:
        cache.plan_cache.clear()


@pytest.fixture(autouse=True)
def no_figure_stays_open() -> Iterator[None]:
    """Close what the test has drawn: pyplot keeps all figures, and warns when they are more than twenty."""
    yield
    if (pyplot := sys.modules.get("matplotlib.pyplot")) is not None:
        pyplot.close("all")


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> None:
    """Let Triton's interpreter repeat less: it computes the same in 0.6 of the time.

    At every call of a function it searches its whole language for what it replaces, although a caller has replaced it;
    it compares every sum of integers with a sum in 64 bits; and it makes a table of types for each conversion.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton import language
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    patch, dtype_of, dtypes = interpreter._patch_lang, interpreter._get_np_dtype, {}

    def patch_once(fn: Any) -> Any:
        languages = [x for x in (language, language.core) if any(x is value for value in fn.__globals__.values())]
        return patch(fn) if any(is_builtin(x.load) for x in languages) else SimpleNamespace(restore=lambda: None)

    def dtype(of: Any) -> Any:
        name = "pointer" if of.scalar.is_ptr() else of.scalar.name
        if name not in dtypes:
            dtypes[name] = dtype_of(of)
        return dtypes[name]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, dtype
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """No annotation checks in this test: it passes wrong input, and the error that users get is what it tests."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def _filters(config: pytest.Config) -> Iterator[tuple[str, str, str, str]]:
    """action, message, category and module of each filter, the last one first to be asked."""
    for line in config.getini("filterwarnings"):
        action, message, category, module = (line.split(":") + [""] * 3)[:4]
        yield action, message, category or "Warning", module


@pytest.fixture(scope="session")
def filters(pytestconfig: pytest.Config) -> str:
    """A line of Python that makes warnings errors, by the filters of pyproject.toml."""
    return "import warnings; " + "; ".join(
        f"warnings.filterwarnings({action!r}, {message!r}, {category}, {module!r})"
        for action, message, category, module in _filters(pytestconfig)
    )


@pytest.fixture
def fresh_python(filters: str) -> Callable[..., str]:
    """`fresh_python(source, **environment)` runs `source` in a new interpreter without this file; its standard output.

    For what is decided when a module is imported (`TRITON_INTERPRET="1"`).
    """

    def run(source: str, **environment: str) -> str:
        process = subprocess.run(
            [sys.executable, "-c", f"{filters}\n{textwrap.dedent(source)}"],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    return run


# For each line that it reads, a fork runs a file of Python and writes what that prints to another. The fork's namespace
# is a new interpreter's: what the file does not import is missing.
_FORKS = """
def of_next_line():
    import gc, json, os, sys, torch._dynamo, torch._functorch.aot_autograd, torch.export, dilated_attention
    if torch.__version__ < (2, 9):  # it traces no list of unknown length unasked
        torch._dynamo.config.capture_dynamic_output_shape_ops = True
    gc.freeze()  # or the collector of a fork looks at all of this again, and copies it
    for source, printed, folder, environment in map(json.loads, sys.stdin):
        if child := os.fork():
            print(os.waitpid(child, 0)[1], flush=True)
            continue
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream in (1, 2):
            os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        return compile(open(source, encoding="utf-8").read(), source, "exec")
    return ""

exec(of_next_line())
"""


@pytest.fixture(scope="session")
def forks() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _FORKS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process


_AS_PROCESSOR = "__import__('sys').path.append({!r}); __import__('processors').pretend({!r})"


@pytest.fixture
def compiling_python(request: pytest.FixtureRequest, filters: str, tmp_path: Path) -> Callable[..., str]:
    """`compiling_python(source)` runs `source` without this file, whose checking wrappers `torch.compile` cannot trace.

    It runs in a fork of an interpreter that has imported PyTorch's compiler, which takes seconds, and returns what it
    prints. With `processor`, a name in processors.py, choices and graphs are those of that processor.
    """
    fresh_python = request.getfixturevalue("fresh_python")
    process = request.getfixturevalue("forks") if hasattr(os, "fork") else None

    def run(source: str, processor: str | None = None) -> str:
        source = textwrap.dedent(source)
        if processor is not None:
            here = str(Path(__file__).parent)
            source = f"{_AS_PROCESSOR.format(here, processor)}\n{source}"
        if process is None:
            return fresh_python(source)
        files = tmp_path / "source", tmp_path / "printed"
        files[0].write_text(f"{filters}\n{source}", encoding="utf-8")
        files[1].write_text("")
        print(json.dumps([*map(str, files), os.getcwd(), dict(os.environ)]), file=process.stdin, flush=True)
        assert select([process.stdout], [], [], 300)[0], "no answer in 300 seconds"
        status = int(process.stdout.readline())
        printed = files[1].read_text(encoding="utf-8")
        assert status == 0, printed
        return printed

    return run
