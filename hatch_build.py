"""The part of a build that hatchling does not know: compiles the CPU kernels into the wheel where a C++ compiler is at
hand. Without one, or where it fails, the wheel is pure Python, and the package says what it lacks."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = "src/dilated_attention/kernels/cpu"


class CpuKernels(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """`version` is "editable" where the library stays beside its sources, else "standard"."""
        build = runpy.run_path(str(Path(self.root, KERNELS, "build.py")))
        try:
            library = build["build"]()
        except build["BuildError"] as error:
            self.app.display_warning(str(error))
            return
        build_data["artifacts"].append(f"/{KERNELS}/{library.name}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{build['SERVED'][build['target']()][-1]}"
