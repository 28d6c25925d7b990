"""Dependencies point one way: a module imports from its own layer and from lower ones only.

Two packages, one wall: `models`, `integrations` and the lab use public names of the library and those of `plumbing`.
"""

from __future__ import annotations

import ast
import importlib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import dilated_attention
import dilated_attention_lab

ROOT = Path(dilated_attention.__file__).parent
LAB_ROOT = Path(dilated_attention_lab.__file__).parent
NAME = "dilated_attention"
LAB = "dilated_attention_lab"
DOCUMENTED = ("_asdict", "_exit", "_replace")  # names of the standard library that are public all the same

# Lowest first. A module or subpackage directly under the package belongs to exactly one layer.
LAYERS = (
    {"cache", "errors", "kernels", "merge", "mesh", "ranking", "storage", "torch_internals"},
    {"checks", "pictures"},
    {"bias", "layout", "plan", "scores"},
    {"patterns"},
    {"neighborhood"},
    {"backends", "routing", "suggestion"},
    {"call"},
    {"execution", "parallel"},
    {"operators"},
    {"functional"},
    {"decoding", "explain", "weights"},
    {"nn"},
    {"plumbing"},
    {"__init__"},
    {"models"},
    {"integrations"},
    {"__main__"},
)
LEVEL = {module: level for level, layer in enumerate(LAYERS) for module in layer}
ALONE = {"kernels", "merge"}  # import nothing of ours
OUTSIDE = ("models", "integrations")  # the packages of the library outside the wall
PUBLIC = ("bias", "layout", "nn", "parallel", "routing", *OUTSIDE)  # `__all__` is public, as the root's is
OPEN = ("plumbing", "decoding", "integrations.huggingface")  # modules without one: every name but a private one


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
    """Return what the module at `path`, relative to the package, imports against the direction."""
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
    """Return, for each module by its dotted name, which others it imports anywhere in it, for annotations too.

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


def sources_below(root: Path) -> dict[str, str]:
    """Return the source of each module of a package by its dotted name."""
    found = {}
    for file in root.rglob("*.py"):
        name = ".".join((root.name, *file.relative_to(root).with_suffix("").parts))
        found[name.removesuffix(".__init__")] = file.read_text("utf-8")
    return found


def test_no_modules_import_in_a_circle():
    for root in (ROOT, LAB_ROOT):
        assert circle(imports_of_modules(sources_below(root))) == []


def imports_of_parts(sources: dict[str, str], package: str) -> dict[str, set[str]]:
    """Return which others each part of a package imports, or names for `import_module`.

    A part is a module or package directly under it.
    """
    parts = {name.split(".")[1] for name in sources if name != package}
    found: dict[str, set[str]] = {part: set() for part in parts}
    for module, source in sources.items():
        if module != package:
            part = module.split(".")[1]
            named = {name.split(".")[1] for name in names_of(ast.parse(source), package) if "." in name}
            found[part] |= (named & parts) - {part}
    return found


def test_no_parts_of_the_lab_import_in_a_circle():
    assert circle(imports_of_parts(sources_below(LAB_ROOT), LAB)) == []


def test_a_circle_of_parts_is_found():
    sources = {"p": "import p.a", "p.a": "from p.b.c import f", "p.b": "", "p.b.c": "", "p.b.d": "import_module('p.a')"}
    assert set(circle(imports_of_parts(sources, "p"))) == {"a", "b"}
    assert circle(imports_of_parts(sources | {"p.b.d": "import p"}, "p")) == []


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
        ("models/longnet/blocks.py", "from ...integrations import convert_attention"),
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
        ("models/longnet.py", "from dilated_attention import Dilated\nfrom .configuration import LongNetConfig"),
        ("__init__.py", "from .functional import attention\nfrom .nn import DilatedAttention"),
    ]
    for path, source in downward:
        assert violations(Path(path), source) == [], (path, source)


def names_of(tree: ast.AST, package: str) -> list[str]:
    """Return where `tree` names a package or its modules: in imports, and in strings, which `import_module` takes."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return [name for name in found if name.partition(".")[0] == package]


def test_the_library_does_without_the_lab():
    """Except for `python -m dilated_attention`, which hands over to the command where that is installed."""
    found = {
        str(file.relative_to(ROOT)): names
        for file in ROOT.rglob("*.py")
        if (names := names_of(ast.parse(file.read_text(encoding="utf-8")), LAB))
    }
    assert found == {"__main__.py": [LAB, LAB]}


def test_every_way_to_name_the_lab_is_found():
    for source in (
        f"import {LAB}",
        f"from {LAB} import bench",
        f"from {LAB}.bench.suites import gpu as dilated_attention",
        f"def f():\n    import {LAB}.bench.suites.gpu",
        f"import_module('{LAB}.bench.command')",
    ):
        assert len(names_of(ast.parse(source), LAB)) == 1, source


def public(package: str) -> set[str]:
    """The names in `__all__` of a package of the library; "" for the root."""
    return set(importlib.import_module(f"{NAME}.{package}".rstrip(".")).__all__)


def behind_the_wall(tree: ast.AST, own: str | None = None) -> list[str]:
    """Return the names that a module outside the wall imports and that are neither public nor plumbing.

    own: the package of the library that the module belongs to; it may use all of that package.
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] == NAME]
        elif isinstance(node, ast.ImportFrom) and node.level:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == NAME:
            package = (node.module or "").removeprefix(NAME).lstrip(".")
            if own is not None and (package == own or package.startswith(f"{own}.")):
                continue
            names = [alias.name for alias in node.names]
            if package in OPEN:
                found += [f"{package}.{name}" for name in names if name.startswith("_")]
            elif package in ("", *PUBLIC):
                allowed = public(package) | (set(PUBLIC) if not package else set())
                found += [f"{package}.{name}" for name in names if name not in allowed]
            else:
                found.append(node.module or "")
    return found


def test_the_wall():
    files = [(file, None) for file in LAB_ROOT.rglob("*.py")]
    files += [(file, package) for package in OUTSIDE for file in (ROOT / package).rglob("*.py")]
    found = {
        str(file): names
        for file, own in files
        if (names := behind_the_wall(ast.parse(file.read_text(encoding="utf-8")), own))
    }
    assert found == {}
    assert len((ROOT / "plumbing.py").read_text(encoding="utf-8").splitlines()) <= 40


def test_a_hole_in_the_wall_is_found():
    for source in (
        "from dilated_attention.plan import Plan",
        "from dilated_attention.patterns import Dilated",
        "from dilated_attention import checks",
        "from dilated_attention.nn import attention",
        "from dilated_attention.parallel.comm import Link",
        "from dilated_attention.plumbing import _Rank",
        "import dilated_attention.plan",
        "from . import plan",
    ):
        assert len(behind_the_wall(ast.parse(source))) == 1, source
    for source in ("from dilated_attention import Dilated, routing", "from dilated_attention.plumbing import Plan"):
        assert behind_the_wall(ast.parse(source)) == []
    inner = ast.parse("from dilated_attention.models.stack import LongNetStack")
    assert (len(behind_the_wall(inner)), behind_the_wall(inner, "models")) == (1, [])


def private_names(tree: ast.AST) -> list[str]:
    """The names with a leading underscore that a module imports, or reads of anything but `self` and `cls`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "super()"):
            found.append(node.attr)
    return [name for name in found if name.startswith("_") and not name.endswith("__") and name not in DOCUMENTED]


def test_the_lab_uses_no_private_names():
    files = LAB_ROOT.rglob("*.py")
    found = {file.name: names for file in files if (names := private_names(ast.parse(file.read_text("utf-8"))))}
    assert found == {}


def test_a_private_name_is_found():
    for source in ("from dilated_attention.plan import _compile", "execution._packed(k)", "(blocks._Problem, 'bias')"):
        assert len(private_names(ast.parse(source))) == 1, source
    assert private_names(ast.parse("self._rows, shape._asdict(), module.__name__")) == []
