"""Write files atomically: after a crash a file is the old or the new version. Store tensors without pickle, and
digests.

The file `SHA256SUMS` of a folder lists the digests of the files that were written with it, as `sha256sum` prints them.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

SUMS = "SHA256SUMS"
_STALE = 3600.0  # seconds after which a file that is not yet in its place belongs to a killed process
_SUMS_LINE = re.compile(r"([0-9a-f]{64})  (\w[\w.-]*)\n", re.ASCII)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Replace the safetensors file `path` atomically and durably (the directory entry is synced too)."""
    with _replacing(path) as temporary:
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, dict(metadata))
        except SafetensorError as error:
            code = errno.EIO
            number = re.search(r"os error (\d+)", str(error))
            if number is not None:
                code = int(number[1])
            raise OSError(code, os.strerror(code), str(path)) from error


def write_text(path: Path, text: str) -> None:
    """Replace the UTF-8 file `path` atomically and durably. An OSError names `path`."""
    with _replacing(path) as temporary:
        try:
            temporary.write_text(text, encoding="utf-8", newline="\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error


def read_bytes(path: Path) -> bytes:
    """Read a file; raise ValueError unless it is a regular file that can be read."""
    require_file(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return (tensors by name, metadata) of a safetensors file, on the CPU; raise ValueError if it is missing or
    damaged."""
    with open_tensors(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Yield an open safetensors file (`safe_open`) to read tensors, or rows of them. Errors as in `read_tensors`."""
    require_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error
    except SafetensorError as error:
        raise ValueError(f"{path}: truncated, or not a safetensors file ({error})") from error


def require_file(path: Path) -> None:
    """Raise ValueError unless `path` is a regular file: reading a pipe or a device may never end."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path}: not a regular file")


def require_same(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], where: str) -> None:
    """Raise ValueError unless `found` has the names and shapes of `expected`; `where`, such as the file's path, begins
    the message."""
    require_names(expected, found, where)
    for name, tensor in expected.items():
        if tensor.shape != found[name].shape:
            raise ValueError(f"{where}: {name} has shape {tuple(found[name].shape)}, expected {tuple(tensor.shape)}")


def require_names(expected: Mapping[str, object], found: Mapping[str, object], where: str) -> None:
    """Raise ValueError unless `found` has the same names as `expected`; `where` begins the message."""
    for word, names in (("lacks", expected.keys() - found.keys()), ("has unknown", found.keys() - expected.keys())):
        if names:
            shown = sorted(names)[:4]
            if len(names) > len(shown):
                shown.append("...")
            raise ValueError(f"{where}: {word} {', '.join(shown)}")


def digest(path: Path) -> str:
    """Return the file's SHA-256, in hexadecimal."""
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            sha.update(piece)
    return sha.hexdigest()


def write_digests(folder: Path, digests: Mapping[str, str]) -> None:
    """Write `SHA256SUMS` with these digests by file name; call it after all of these files are written."""
    write_text(folder / SUMS, "".join(f"{sha}  {name}\n" for name, sha in digests.items()))


def read_digests(folder: Path) -> dict[str, str]:
    """Return the digests by name, as `SHA256SUMS` lists them. Raise ValueError if it is missing or damaged."""
    text = read_bytes(folder / SUMS).decode("utf-8", errors="replace")
    lines = _SUMS_LINE.findall(text)
    digests = {name: sha for sha, name in lines}
    if not lines or len(digests) != len(lines) or "".join(f"{sha}  {name}\n" for sha, name in lines) != text:
        raise ValueError(f"{folder / SUMS}: damaged, or not lines of a SHA-256 and a plain name")
    return digests


def require_whole(path: Path, digests: Mapping[str, str]) -> None:
    """Raise ValueError unless the file has the digest that `digests`, the `SHA256SUMS` of its folder, lists for it."""
    require_file(path)
    if path.name not in digests:
        raise ValueError(f"{path.with_name(SUMS)}: damaged: it does not list {path.name}")
    try:
        found = digest(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    if found != digests[path.name]:
        raise ValueError(f"{path}: damaged, or changed after it was written: {SUMS} has another SHA-256")


def sync(folder: Path) -> None:
    """Make new and renamed files of a folder durable."""
    if os.name == "posix":
        directory = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file in a folder beside `path`, which it replaces when the block has ended. If the
    process is killed, the folder stays until a call for the same path, at least an hour later, removes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".new-{glob.escape(path.name)}-*"):
        with suppress(OSError):  # another process may remove it, or own it
            if left.stat().st_mtime < time.time() - _STALE:
                shutil.rmtree(left)
    folder = Path(tempfile.mkdtemp(prefix=f".new-{path.name}-", dir=path.parent))
    try:
        temporary = folder / path.name
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sync(path.parent)
