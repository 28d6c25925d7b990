"""Dependencies point one way: a module imports from its own layer and from lower ones only."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import dilated_attention

ROOT = Path(dilated_attention.__file__).parent
NAME = "dilated_attention"
BENCHMARK = "dilated_attention_bench"
NAMED_TUPLE = ("_asdict", "_replace")

# Lowest first. A module or subpackage directly under the package belongs to exactly one layer.
LAYERS = (
    {"cache", "errors", "kernels", "merge", "mesh", "ranking", "storage", "terminal", "torch_internals"},
    {"checks", "pictures"},
    {"layout", "plan"},
    {"patterns"},
    {"backends", "routing", "suggestion"},
    {"call"},
    {"execution", "parallel"},
    {"operators"},
    {"functional"},
    {"decoding", "environment", "explain", "verification", "weights"},
    {"nn"},
    {"models"},
    {"conversion", "integrations", "released", "training"},
    {"cli"},
    {"__init__", "__main__"},
)
LEVEL = {module: level for level, layer in enumerate(LAYERS) for module in layer}
ALONE = {"kernels", "merge"}  # import nothing of ours


def imported(tree: ast.AST, package: tuple[str, ...]) -> set[str]:
    """The names directly under our package that `tree`, a module of `package`, imports, anywhere in it."""
    targets = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets += [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) + 1 - node.level]) if node.level else []
            base += node.module.split(".") if node.module else []
            targets += [[*base, alias.name] for alias in node.names]
    ours = [target[1:] for target in targets if target[0] == NAME]
    return {target[0] if target else "__init__" for target in ours}


def violations(path: Path, source: str) -> list[str]:
    """What the module at `path`, relative to the package, imports against the direction."""
    module = path.parts[0].removesuffix(".py")
    if module not in LEVEL:
        return [f"{path}: {module} has no layer: give it one in tests/test_layering.py"]
    highest = -1 if module in ALONE else LEVEL[module]
    # A name that is no module (`from dilated_attention import attention`) comes from the package's own __init__.
    return [
        f"{path}: {module} must not import {other}"
        for other in sorted(imported(ast.parse(source), (NAME, *path.parts[:-1])) - {module})
        if LEVEL.get(other, LEVEL["__init__"]) > highest
    ]


def test_dependencies_point_one_way():
    found = [
        line
        for file in sorted(ROOT.rglob("*.py"))
        for line in violations(file.relative_to(ROOT), file.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


def imports_of_modules(sources: dict[str, str]) -> dict[str, set[str]]:
    """Of each module, by its dotted name, which others it imports anywhere in it, for annotations too.

    A name that a package re-exports counts as an import of the package, whose `__init__` imports it in turn.
    """
    found = {}
    for module, source in sources.items():
        names = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= {name if name in sources else node.module for name in inside}
        found[module] = (names & sources.keys()) - {module}
    return found


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import one another in a circle, if any do."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_modules_import_in_a_circle():
    sources = {
        ".".join((NAME, *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): file.read_text(
            "utf-8"
        )
        for file in ROOT.rglob("*.py")
    }
    assert circle(imports_of_modules(sources)) == []


def test_a_circle_is_found():
    sources = {"p": "", "p.a": "from p import b", "p.b": "def f():\n    from p.c import g", "p.c": "import p.a"}
    assert set(circle(imports_of_modules(sources))) == {"p.a", "p.b", "p.c"}
    assert circle(imports_of_modules(sources | {"p.c": "import p"})) == []


def test_every_spelling_of_an_upward_import_is_found():
    upward = [
        ("plan.py", "from dilated_attention.patterns import Dilated"),
        ("plan.py", "from dilated_attention.functional import attention"),
        ("plan.py", "from .functional import attention"),
        ("plan.py", "import dilated_attention.nn as nn"),
        ("plan.py", "def f():\n    from . import backends"),
        ("plan.py", "from dilated_attention import dilated_attention"),
        ("plan.py", "import dilated_attention"),
        ("merge.py", "from .errors import UnsupportedError"),
        ("kernels/strided.py", "from .. import plan"),
        ("kernels/strided.py", "from ..merge import merge"),
        ("backends/native.py", "if TYPE_CHECKING:\n    from ..execution import forward"),
        ("parallel/comm.py", "from ..nn import DilatedAttention"),
        ("models/longnet/blocks.py", "from ...cli import main"),
        ("shapes.py", ""),
    ]
    for path, source in upward:
        assert len(violations(Path(path), source)) == 1, (path, source)


def test_downward_and_sideways_imports_pass():
    downward = [
        ("patterns.py", "from .errors import UnsupportedError\nfrom .plan import Plan\nimport torch.nn"),
        ("kernels/strided.py", "from .online import update\nfrom . import online\nfrom ..kernels import blocks"),
        ("backends/native.py", "from ..plan import Plan\nfrom dilated_attention.merge import merge_into"),
        ("functional.py", "from . import operators, parallel"),
        ("cli.py", "from . import conversion\nfrom .models.longnet import LongNetLM"),
        ("__init__.py", "from .functional import attention\nfrom .nn import DilatedAttention"),
    ]
    for path, source in downward:
        assert violations(Path(path), source) == [], (path, source)


def names_of(tree: ast.AST, package: str) -> list[str]:
    """Where `tree` names a package or its modules: in imports, and in strings, which `import_module` takes."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return [name for name in found if name.partition(".")[0] == package]


def test_the_library_does_without_its_benchmark():
    """Except where the command line loads a command on demand."""
    found = {
        str(file.relative_to(ROOT)): names
        for file in ROOT.rglob("*.py")
        if (names := names_of(ast.parse(file.read_text(encoding="utf-8")), BENCHMARK))
    }
    assert found == {"cli.py": [f"{BENCHMARK}.command"]}


def test_every_way_to_name_the_benchmark_is_found():
    for source in (
        f"import {BENCHMARK}",
        f"from {BENCHMARK} import cases",
        f"from {BENCHMARK}.suites import gpu as dilated_attention",
        f"def f():\n    import {BENCHMARK}.suites.gpu",
        f"import_module('{BENCHMARK}.command')",
    ):
        assert len(names_of(ast.parse(source), BENCHMARK)) == 1, source


def private_names(tree: ast.AST) -> list[str]:
    """The names with a leading underscore that a module imports, or reads of anything but `self` and `cls`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "super()"):
            found.append(node.attr)
    return [name for name in found if name.startswith("_") and not name.endswith("__") and name not in NAMED_TUPLE]


def test_the_benchmark_uses_public_names():
    files = (ROOT.parent / BENCHMARK).rglob("*.py")
    found = {file.name: names for file in files if (names := private_names(ast.parse(file.read_text("utf-8"))))}
    assert found == {}


def test_a_private_name_is_found():
    for source in ("from dilated_attention.plan import _compile", "execution._packed(k)", "(blocks._Problem, 'bias')"):
        assert len(private_names(ast.parse(source))) == 1, source
    assert private_names(ast.parse("self._rows, shape._asdict(), module.__name__")) == []
