"""Files that are either the old version or the new one, never half of either; tensors without pickle."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Replace the safetensors file `path` atomically and durably (the directory entry is synced too)."""
    temporary = _beside(path)
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, dict(metadata))
        _replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace the UTF-8 file `path` atomically and durably."""
    temporary = _beside(path)
    try:
        temporary.write_text(text, encoding="utf-8")
        _replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors on the CPU, and metadata. ValueError when there is no such file or it is damaged or truncated."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except SafetensorError as error:
        raise ValueError(f"{path}: truncated, or not a safetensors file ({error})") from error


def require_same(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], where: str) -> None:
    """ValueError unless both have the same names and shapes."""
    for word, names in (("lacks", expected.keys() - found.keys()), ("has unknown", found.keys() - expected.keys())):
        if names:
            raise ValueError(f"{where}: {word} {', '.join(sorted(names)[:4])}{', ...' if len(names) > 4 else ''}")
    for name, tensor in expected.items():
        if tensor.shape != found[name].shape:
            raise ValueError(f"{where}: {name} has shape {tuple(found[name].shape)}, expected {tuple(tensor.shape)}")


def _beside(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f".{path.name}.{os.getpid()}")


def _replace(temporary: Path, path: Path) -> None:
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    if os.name == "posix":
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
