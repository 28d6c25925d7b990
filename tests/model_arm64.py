"""Read the machine code of the arm64 kernels, and let llvm-mca model it, on a machine of any kind.

    apt-get install g++-aarch64-linux-gnu llvm
    python tests/model_arm64.py --output results/aot --mca llvm-mca-22

writes one line for each innermost loop that multiplies and adds at least 16 vectors: its multiply-adds, loads and
stores, and the cycles that llvm-mca expects of one pass on a processor. A model, not a measurement: it knows no caches,
takes all loads for hits, and all branches for guessed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

KERNELS = Path(__file__).parents[1] / "src/dilated_attention/kernels/cpu"
COMPILER, OBJDUMP = "aarch64-linux-gnu-g++", "aarch64-linux-gnu-objdump"
SOURCES = {
    "neon.cpp": ((), ("neoverse-v2", "apple-m1")),
    "neon_bf16.cpp": (("-march=armv8.2-a+bf16",), ("neoverse-v2",)),  # an M1 has no BFDOT
}
"""The options of each file, and the processors to model."""
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off")  # of build.py, warnings aside
BRANCH = re.compile(r"(?:b\.\w+|b|cbn?z|tbn?z)\s")
LEAST = 16


def functions(object_file: str) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """The name of each function, and its instructions by address."""
    text = subprocess.check_output([OBJDUMP, "-d", "-C", "--no-show-raw-insn", object_file], text=True)
    for part in re.split(r"\n(?=[0-9a-f]{16} <)", text)[1:]:
        head, *lines = part.splitlines()
        found = (re.match(r"\s+([0-9a-f]+):\s+(.*)", line) for line in lines)
        yield head[18:-2], [(int(x[1], 16), x[2].split("//")[0].strip()) for x in found if x]


def innermost_loops(code: list[tuple[int, str]]) -> Iterator[list[str]]:
    """Instructions from the target of a branch back to the branch, where no shorter such run lies inside."""
    places = {address: i for i, (address, _) in enumerate(code)}
    runs = []
    for i, (address, instruction) in enumerate(code):
        target = re.search(r"\b([0-9a-f]+) <", instruction) if BRANCH.match(instruction) else None
        if target and int(target[1], 16) <= address and int(target[1], 16) in places:
            runs.append((places[int(target[1], 16)], i))
    for first, last in runs:
        if not any(first <= a and b <= last for a, b in runs if (a, b) != (first, last)):
            yield [instruction for _, instruction in code[first : last + 1]]


def counts(loop: list[str]) -> dict[str, int]:
    """Count vectors for each kind of operation, and the instructions; a spill stores one vector to the stack."""
    operations = [(x.split()[0], x.split(None, 1)[-1]) for x in loop]
    vectors = {"ldr": 1, "ldur": 1, "ld1": 1, "ld1r": 1, "ldp": 2}
    stores = {"str": 1, "stur": 1, "st1": 1, "stp": 2}
    is_vector = re.compile(r"[qdv{]")
    return {
        "multiply_adds": sum(name in ("fmla", "bfdot") for name, _ in operations),
        "loads": sum(vectors.get(name, 0) for name, rest in operations if is_vector.match(rest)),
        "stores": sum(stores.get(name, 0) for name, rest in operations if is_vector.match(rest)),
        "spills": sum(name in stores and "[sp" in rest for name, rest in operations if is_vector.match(rest)),
        "instructions": len(loop),
    }


def cycles(loop: list[str], processor: str, mca: str) -> float:
    """The cycles of one pass, by llvm-mca, which is not asked about branches."""
    passes = 200
    text = "\n".join(re.sub(r" <.*>", "", x) for x in loop if not BRANCH.match(x))
    command = [mca, "-mtriple=aarch64", f"-mcpu={processor}", "-mattr=+bf16", f"-iterations={passes}"]
    said = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    total = re.search(r"Total Cycles:\s+(\d+)", said)
    assert total, said
    return round(int(total[1]) / passes, 2)


def short(name: str) -> str:
    """A demangled name without the types of its arguments."""
    name = name.replace("(anonymous namespace)::", "").replace("operator()", "call")
    return re.sub(r"\((\w+)\)(\d)", r"\1 \2", name).split("(")[0].removeprefix("void ")


def rows(mca: str) -> Iterator[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        for source, (options, processors) in SOURCES.items():
            made = f"{folder}/{source}.o"
            subprocess.run([COMPILER, *FLAGS, *options, "-c", str(KERNELS / source), "-o", made], check=True)
            seen = set()
            for name, code in functions(made):
                for loop in innermost_loops(code):
                    found = counts(loop)
                    if found["multiply_adds"] < LEAST or (key := tuple(found.values())) in seen:
                        continue
                    seen.add(key)
                    modelled = {f"cycles on {x}": cycles(loop, x, mca) for x in processors}
                    yield {"source": source, "function": short(name), **found, **modelled}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the folder of arm64.jsonl")
    parser.add_argument("--mca", default="llvm-mca", help="of LLVM 17 or later, which know both processors")
    options = parser.parse_args()
    versions = [subprocess.check_output([x, "--version"], text=True) for x in (COMPILER, options.mca)]
    compiler, mca = versions[0].splitlines()[0], re.search(r"LLVM version (\S+)", versions[1])
    kind = {"kind": "a model, not a measurement", "compiler": compiler, "llvm-mca": mca and mca[1]}
    options.output.mkdir(parents=True, exist_ok=True)
    with Path(options.output, "arm64.jsonl").open("w") as file:
        for row in rows(options.mca):
            file.write(json.dumps({**row, **kind}) + "\n")


if __name__ == "__main__":
    main()
