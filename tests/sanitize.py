"""Run the tests of the C++ kernels under sanitizers: `python tests/sanitize.py address` or `thread`, minutes each.

`address` also looks for undefined behaviour. Other arguments go to pytest in place of FILES.

The tracked files are copied into a temporary folder, where the kernels are compiled with the sanitizer, so no other
library changes. The sanitizer's runtime is preloaded, because Python itself is not compiled with one; so
only accesses of the kernels are checked, and of the C library's functions that the runtime replaces.

GNU OpenMP starts and joins its threads by system calls that the thread sanitizer does not see. It would report every
result of a parallel region as a race, so a library is preloaded that marks where a region begins and ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = ("tests/test_cpu_kernels.py", "tests/test_layout.py")
SANITIZERS = {"address": "address,undefined", "thread": "thread"}

# -O1 compiles in a third of the time of -O3 and keeps more accesses that an optimizer would fold.
FLAGS = ("-O1", "-g1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all")
OPTIONS = {
    # detect_leaks: what Python and PyTorch still hold at exit. alloc_dealloc_mismatch: operators new and delete of
    # PyTorch's libraries and of libstdc++, of which not all are the runtime's.
    "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    # die_after_fork: a test forks while other threads run. A report ends the process.
    "TSAN_OPTIONS": "halt_on_error=1:die_after_fork=0:ignore_noninstrumented_modules=1",
}

MARKS = """
#include <dlfcn.h>

extern "C" {
void __tsan_acquire(void *);
void __tsan_release(void *);

struct Region {
  void (*body)(void *);
  void *data;
};

static void run(void *data) {
  Region *const region = static_cast<Region *>(data);
  __tsan_acquire(region);
  region->body(region->data);
  __tsan_release(region);
}

void GOMP_parallel(void (*body)(void *), void *data, unsigned threads, unsigned flags) {
  using Parallel = void (*)(void (*)(void *), void *, unsigned, unsigned);
  static const auto pool = Parallel(dlsym(RTLD_NEXT, "GOMP_parallel"));
  Region region{body, data};
  __tsan_release(&region);
  pool(run, &region, threads, flags);
  __tsan_acquire(&region);
}
}
"""


def main(sanitizer: str, *tests: str) -> int:
    gcc = shutil.which("g++")
    assert gcc, "g++ is not installed"
    runtime = {"address": "libasan.so", "thread": "libtsan.so"}[sanitizer]
    preloaded = [subprocess.check_output([gcc, f"-print-file-name={runtime}"], text=True).strip()]
    with tempfile.TemporaryDirectory() as folder:
        tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
        for name in filter(None, tracked):
            Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, Path(folder, name))
        wrapper = Path(folder, "sanitizing-compiler")
        flags = " ".join((f"-fsanitize={SANITIZERS[sanitizer]}", *FLAGS))
        wrapper.write_text(f'#!/bin/sh\nunset LD_PRELOAD\nexec {gcc} "$@" {flags}\n')
        wrapper.chmod(0o755)
        if sanitizer == "thread":
            source, marks = Path(folder, "marks.cpp"), Path(folder, "marks.so")
            source.write_text(MARKS)
            command = [wrapper, "-shared", "-fPIC", source, "-o", marks, "-ldl"]
            subprocess.run(command, check=True)
            preloaded.append(str(marks))
        environment = os.environ | OPTIONS | {"CXX": str(wrapper), "PYTHONPATH": f"{folder}/src"}
        build = [sys.executable, "-m", "dilated_attention.kernels.cpu"]
        subprocess.run(build, cwd=folder, env=environment, check=True)
        environment["LD_PRELOAD"] = " ".join(preloaded)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *(tests or FILES)]
        return subprocess.run(command, cwd=folder, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
