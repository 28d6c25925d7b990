"""Run the tests of the C++ kernels under a sanitizer: `python tests/sanitize.py address` or `thread`, a quarter of an
hour each. `address` also looks for undefined behaviour. Further arguments go to pytest in place of FILES.

The tracked files are copied into a temporary folder and the kernels are compiled there, so no other library changes.
Python is not compiled with the sanitizer, so its runtime is preloaded. It checks what the kernels read and write, and
what functions of the C library do; it knows nothing of the inside of Python and PyTorch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
HERE = Path(__file__).parent / "sanitizers"
FILES = ("tests/test_cpu_kernels.py", "tests/test_estimates.py", "tests/test_layout.py")
SANITIZERS = {"address": ("address,undefined", "libasan.so"), "thread": ("thread", "libtsan.so")}

# -O1 keeps accesses that -O3 would fold, and compiles in a third of the time.
FLAGS = ("-O1", "-g1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", "-include", str(HERE / "masked.h"))
OPTIONS = {
    # detect_leaks: Python and PyTorch hold memory at exit. alloc_dealloc_mismatch: libraries of PyTorch bring operators
    # new and delete of their own, which the runtime does not replace in pairs.
    "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    # Without ignore_noninstrumented_modules, it would check memcpy in libraries whose locks it does not see.
    "TSAN_OPTIONS": "halt_on_error=1:die_after_fork=0:ignore_noninstrumented_modules=1",
}
NEEDS_RUNTIME = "test_the_library_needs_nothing_of_python_or_torch"  # it needs the sanitizer's here
LEFT_OUT = {
    "address": (NEEDS_RUNTIME,),
    # pool.cpp is preloaded into every process, and a forked child may not start threads under this sanitizer.
    "thread": (
        NEEDS_RUNTIME,
        "test_the_pool_of_a_library_that_is_not_global",
        "test_a_forked_child_and_exit_during_a_call",
    ),
}


def copy_tracked(folder: str) -> None:
    """Copy the files that git knows, as they are now."""
    tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for name in filter(None, tracked):
        Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, Path(folder, name))


def main(sanitizer: str, *tests: str) -> int:
    kind, runtime = SANITIZERS[sanitizer]
    gcc = shutil.which("g++")
    assert gcc, "g++ is not installed"

    def library(name: str) -> str:
        return subprocess.check_output([str(gcc), f"-print-file-name={name}"], text=True).strip()

    # Without libstdc++ the runtime does not find the function that throws, and ends the process at the first exception.
    preloaded = [library(runtime), library("libstdc++.so.6")]
    with tempfile.TemporaryDirectory() as folder:
        copy_tracked(folder)
        compiler = Path(folder, "compiler")
        compiler.write_text(f'#!/bin/sh\nunset LD_PRELOAD\nexec {gcc} "$@" -fsanitize={kind} {" ".join(FLAGS)}\n')
        compiler.chmod(0o755)
        if sanitizer == "thread":
            pool = f"{folder}/pool.so"
            command = [gcc, f"-fsanitize={kind}", "-shared", "-fPIC", str(HERE / "pool.cpp"), "-o", pool, "-ldl"]
            subprocess.run(command, check=True)
            preloaded.append(pool)
        environment = os.environ | OPTIONS | {"CXX": str(compiler), "PYTHONPATH": f"{folder}/src"}
        environment.pop("OMP_NUM_THREADS", None)
        build = [sys.executable, "-m", "dilated_attention.kernels.cpu"]
        subprocess.run(build, cwd=folder, env=environment, check=True)
        left_out = [f"--deselect=tests/test_cpu_kernels.py::{name}" for name in LEFT_OUT[sanitizer]]
        # --capture=sys: a report goes to the process' own stderr, and then ends the process.
        command = [sys.executable, "-m", "pytest", "--capture=sys", "-p", "no:cacheprovider", *left_out]
        environment["LD_PRELOAD"] = " ".join(preloaded)
        return subprocess.run([*command, *(tests or FILES)], cwd=folder, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
