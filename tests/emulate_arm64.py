"""Run the tests of the C++ kernels on emulated arm64 processors, with and without bfloat16 instructions.

    apt-get install debootstrap g++-aarch64-linux-gnu qemu-user-static
    python tests/emulate_arm64.py runs/arm64

takes hours, nearly all of them PyTorch's: `-k "bfloat16 and test_patterns"` and other arguments go to pytest. The
folder keeps an arm64 Debian with Python, and PyTorch's wheel for it, for the next run. debootstrap wants to run as
root; nothing outside the folder changes. The system needs no support for foreign programs: the emulator starts each.
"""

from __future__ import annotations

import argparse
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROCESSORS = ("max", "cortex-a76")  # of QEMU: with BFDOT, and without
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
SUITE, VERSION = "bookworm", "3.11"  # of Debian, and of its Python
TORCH = "torch==2.8.0"  # the oldest that the package takes, and the last releases' wheels of arm64 carry CUDA
PACKAGES = (
    "beartype", "filelock", "fsspec", "hypothesis", "jaxtyping", "jinja2", "networkx", "numpy", "pytest>=8.2",
    "pytest-xdist", "safetensors", "sympy", "typing-extensions",
)  # fmt: skip
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux2014_aarch64")
TESTS = ("-m", "not slow", "tests/test_cpu_kernels.py")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the arm64 system is, or will be")
    parser.add_argument("--processor", nargs="*", default=PROCESSORS, help=f"of QEMU (default: {' '.join(PROCESSORS)})")
    options, tests = parser.parse_known_args()
    for tool in (COMPILER, EMULATOR, "debootstrap"):
        if shutil.which(tool) is None:
            parser.error(f"{tool} is not installed; see --help")
    folder = options.folder.resolve()
    install_system(folder / "system")
    install_packages(folder / "packages")
    copy_sources(folder / "sources")
    codes = [run(folder, processor, tests or list(TESTS)) for processor in options.processor]
    return max(codes)


def install_system(system: Path) -> None:
    """Unpack Debian's packages for arm64; nothing of them is configured, which would run their scripts."""
    if (system / "usr/bin/python3").exists():
        return
    command = ["debootstrap", "--arch=arm64", "--foreign", "--variant=minbase", "--include=python3,ca-certificates"]
    subprocess.run([*command, SUITE, str(system), "http://deb.debian.org/debian"], check=True)
    for package in (system / "var/cache/apt/archives").glob("*.deb"):
        subprocess.run(["dpkg-deb", "--extract", str(package), str(system)], check=True)


def install_packages(folder: Path) -> None:
    """Install what the tests import. PyTorch comes without its requirements: pip would read them for this platform."""
    if folder.exists():
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), "--only-binary=:all:"]
    command += [f"--python-version={VERSION}", *(f"--platform={platform}" for platform in PLATFORMS)]
    subprocess.run([*command, "--no-deps", TORCH], check=True)
    subprocess.run([*command, "--upgrade", *PACKAGES], check=True)


def copy_sources(to: Path) -> None:
    """Copy the tracked files, and compile the kernels among them."""
    shutil.rmtree(to, ignore_errors=True)
    tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for name in filter(None, tracked):
        Path(to, name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, Path(to, name))
    os.environ["CXX"] = COMPILER
    print(runpy.run_path(str(to / "src/dilated_attention/kernels/cpu/build.py"))["build"](), flush=True)


def run(folder: Path, processor: str, tests: list[str]) -> int:
    """Run pytest on a processor. Processes that Python starts, pytest's workers too, go through the emulator again."""
    started = folder / processor
    started.mkdir(exist_ok=True)
    python = started / "python"
    system = folder / "system"
    python.write_text(
        f'#!/bin/sh\nexec {EMULATOR} -cpu {processor} -L {system} {system}/usr/bin/python{VERSION} "$@"\n'
    )
    python.chmod(0o755)
    (started / "sitecustomize.py").write_text(f"import sys\n\nsys.executable = {str(python)!r}\n")
    sources = folder / "sources"
    path = (started, sources / "src", sources / "lab/src", folder / "packages")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    code = (
        "from dilated_attention.backends import cpu; "
        f"print({processor!r}, cpu.missing() or cpu.INSTRUCTION_SETS[cpu.instruction_set()])"
    )
    subprocess.run([str(python), "-c", code], cwd=sources, env=environment, check=True)
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=sources, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
