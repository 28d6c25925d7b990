"""Run the tests of the C++ kernels on emulated arm64 processors, with and without bfloat16 instructions.

    apt-get install g++-aarch64-linux-gnu qemu-user-static
    python tests/emulate_arm64.py

`--processor max` runs one processor; further arguments, such as `-n 4`, go to pytest. The tracked files are copied into
a temporary folder and the kernels are compiled there. Only the kernels are emulated (emulated_arm64.py): pytest,
PyTorch and the oracle run on this machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from sanitize import copy_tracked

PROCESSORS = ("max", "cortex-a76")  # of QEMU: with BFDOT, and without
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", ("qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu", "-cpu")
SETS = ("none", "NEON", "NEON with bfloat16")  # as in backends/cpu.py
FILES = ("tests/test_cpu_kernels.py", "tests/test_estimates.py")
LEFT_OUT = (
    "test_a_forked_child_and_exit_during_a_call",  # a child process has no plugin
    "test_the_pool_of_a_library_that_is_not_global",  # likewise
    "test_the_library_needs_nothing_of_python_or_torch",  # ldd reads only libraries of this machine's architecture
    "test_rows_beyond_two_to_the_31_elements",  # four tensors of 8 GiB do not go through a pipe
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processor", choices=PROCESSORS, help="default: each")
    options, further = parser.parse_known_args()
    for tool in (COMPILER, EMULATOR[0]):
        if shutil.which(tool) is None:
            parser.error(f"{tool} is not installed; see --help")
    processors = [options.processor] if options.processor else PROCESSORS
    with tempfile.TemporaryDirectory() as folder:
        copy_tracked(folder)
        path = os.pathsep.join(f"{folder}/{x}" for x in ("src", "lab/src", "tests"))
        # passive: PyTorch's threads do not take the cores from the emulator while they wait.
        environment = os.environ | {"CXX": COMPILER, "PYTHONPATH": path, "OMP_WAIT_POLICY": "passive"}
        build = [sys.executable, "-m", "dilated_attention.kernels.cpu"]
        subprocess.run(build, cwd=folder, env=environment, check=True)
        library = f"{folder}/src/dilated_attention/kernels/cpu/kernels.so"
        # --no-as-needed: the server finds the library's functions by name, which a linker does not see.
        command = [COMPILER, "-std=c++17", "-O2", "tests/emulated_arm64.cpp", "-Wl,--no-as-needed", library, "-ldl"]
        command += ["-o", "server"]
        subprocess.run(command, cwd=folder, check=True)
        return max([run(processor, further, folder, environment) for processor in processors])


def run(processor: str, further: list[str], folder: str, environment: dict[str, str]) -> int:
    """Run pytest, and print how many calls ran on the processor. Return the exit code, or 1 if there was no call."""
    log = Path(folder, f"{processor}.log")
    command = [sys.executable, "-m", "pytest", "-p", "emulated_arm64", "-p", "no:cacheprovider"]
    command += [f"--deselect=tests/test_cpu_kernels.py::{name}" for name in LEFT_OUT]
    emulated = " ".join((*EMULATOR, processor, f"{folder}/server", str(log)))
    code = subprocess.run(
        [*command, *FILES, *further], cwd=folder, env=environment | {"EMULATED_ARM64": emulated}
    ).returncode
    calls = Counter(log.read_text().splitlines() if log.exists() else ())
    for call, count in sorted(calls.items()):
        function, instruction_set = call.split()
        print(f"{processor}: {count} calls of {function}, instruction set: {SETS[int(instruction_set)]}", flush=True)
    return code or int(not calls)


if __name__ == "__main__":
    sys.exit(main())
