"""Write and read checkpoints of a run: one folder per step, written by any number of processes and read by any.

    checkpoint/step-40/index.json                what was saved
    checkpoint/step-40/rank-0-of-2.safetensors   the rows that rank 0 holds, and the tensors that all ranks hold
    checkpoint/step-40/rank-1-of-2.safetensors
    checkpoint/step-40/SHA256SUMS

A step's folder is written under another name and renamed once complete: a folder of this name is whole, or was damaged
later, which the digests reveal. Nothing in it is a pickle.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from dilated_attention.plumbing import storage

FORMAT = "dilated-attention training 2"
INDEX = "index.json"


class Peers(Protocol):
    """The processes that write or read a checkpoint together. Each makes the same calls in the same order.

    An implementation gives this process's `rank`, from 0 to `size` - 1, and exchanges values among all processes.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def greatest(self, value: int) -> int:
        """Return the greatest of all ranks' values, on every rank."""

    def gathered(self, value: bytes) -> list[bytes]:
        """Return all ranks' values, which have the same length, in the order of ranks, on every rank."""


class Alone:
    """Implement `Peers` for a single process."""

    rank, size = 0, 1

    def greatest(self, value: int) -> int:
        return value

    def gathered(self, value: bytes) -> list[bytes]:
        return [value]


@dataclass(frozen=True, slots=True)
class Piece:
    """Describe what a process holds of a tensor: all of it, or a run of its rows.

    Attributes:
        first_row: where the run begins, along dim 0.
        shape: shape of the whole tensor.
    """

    tensor: Tensor
    first_row: int
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> Piece:
        return cls(tensor, 0, tuple(tensor.shape))

    @property
    def is_whole(self) -> bool:
        return tuple(self.tensor.shape) == self.shape

    @property
    def rows(self) -> int:
        return _rows(tuple(self.tensor.shape))


def _rows(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 1


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Describe a whole checkpoint whose digests were checked.

    Attributes:
        about: what its writer stored about it.
        tensors: by name, the shape and the shards: file, first row and number of rows of each, in the order of rows.
    """

    path: Path
    about: Mapping[str, Any]
    tensors: Mapping[str, tuple[tuple[int, ...], tuple[tuple[str, int, int], ...]]]

    def require(self, shapes: Mapping[str, tuple[int, ...]], prefix: str = "") -> None:
        """Raise ValueError unless the tensors whose names begin with `prefix` have exactly these names and shapes.

        The names in `shapes` include the prefix.
        """
        there = {name: shards for name, shards in self.tensors.items() if name.startswith(prefix)}
        storage.require_names(shapes, there, str(self.path))
        for name, shape in shapes.items():
            if self.tensors[name][0] != shape:
                raise ValueError(f"{self.path}: {name} has shape {self.tensors[name][0]}, expected {shape}")

    def read(self, pieces: Mapping[str, Piece], prefix: str = "") -> None:
        """Fill the tensors of `pieces`, whose names must be all those in the checkpoint that begin with `prefix`.

        Raises ValueError if the names, a shape or a dtype differ from the checkpoint's.
        """
        self.require({name: piece.shape for name, piece in pieces.items()}, prefix)
        wanted: dict[str, list[tuple[str, int, int]]] = {}
        for name, piece in pieces.items():
            for file, first, rows in self.tensors[name][1]:
                if first < piece.first_row + piece.rows and piece.first_row < first + rows:
                    wanted.setdefault(file, []).append((name, first, rows))
        for file, shards_of_file in wanted.items():
            with storage.open_tensors(self.path / file) as opened:
                for name, first, rows in shards_of_file:
                    _copy(opened, f"{self.path / file}: {name}", name, first, rows, pieces[name])


def _copy(opened: Any, where: str, name: str, first: int, rows: int, piece: Piece) -> None:
    """Copy the rows of a shard, `rows` from `first` on, that lie in the piece. where: names it in an error."""
    start, stop = max(first, piece.first_row), min(first + rows, piece.first_row + piece.rows)
    found = opened.get_slice(name)[start - first : stop - first] if piece.shape else opened.get_tensor(name)
    if found.dtype != piece.tensor.dtype:
        raise ValueError(f"{where} is of {found.dtype}, expected {piece.tensor.dtype}")
    place = piece.tensor[start - piece.first_row : stop - piece.first_row] if piece.shape else piece.tensor
    place.copy_(found)


def write(
    folder: Path, step: int, pieces: Mapping[str, Piece], about: Mapping[str, Any], *, keep: int, peers: Peers
) -> Path:
    """Write `folder`/step-`step` and return its path. Keep the newest `keep` earlier checkpoints only.

    Checkpoints of this step and of later ones, which are damaged or of a run that this one replaces, are removed just
    before the new one takes its name.

    Raises:
        OSError: on every rank, if one of them cannot write; the checkpoints that were there stay.
    """
    new, path = folder / f".new-step-{step}", folder / f"step-{step}"
    try:
        with _together(peers, new):
            if peers.rank == 0:
                for left in (*folder.glob(".new-*"), *folder.glob(".old-*")):  # of killed processes
                    shutil.rmtree(left)
                new.mkdir(parents=True)
        sha = b""
        with _together(peers, new):
            sha = _write_shard(new / _shard(peers.rank, peers.size), pieces, peers)
        shas = peers.gathered(sha)
        with _together(peers, path):
            if peers.rank == 0:
                storage.write_text(new / INDEX, json.dumps({"format": FORMAT, **about}) + "\n")
                digests = {_shard(rank, peers.size): sha.hex() for rank, sha in enumerate(shas)}
                storage.write_digests(new, {INDEX: storage.digest(new / INDEX), **digests})
                before = steps(folder)
                _remove(folder, [other for other in before if other >= step])
                os.replace(new, path)
                storage.sync(folder)
                older = [other for other in before if other < step]
                _remove(folder, older[: max(0, len(older) - keep)])
    finally:
        if peers.rank == 0:
            shutil.rmtree(new, ignore_errors=True)
    return path


def _shard(rank: int, size: int) -> str:
    return f"rank-{rank}-of-{size}.safetensors"


def _write_shard(file: Path, pieces: Mapping[str, Piece], peers: Peers) -> bytes:
    """Write this rank's file: its rows of the tensors that are split, and on the first rank also those that all ranks
    hold whole. Return the file's digest."""
    mine = {name: x.tensor for name, x in pieces.items() if (peers.rank == 0 if x.is_whole else x.rows)}
    storage.write_tensors(file, mine, {})
    return bytes.fromhex(storage.digest(file))


def _remove(folder: Path, numbers: list[int]) -> None:
    """Remove the checkpoints of the steps `numbers`. Each is renamed first: none keeps its name with files missing."""
    for number in numbers:
        old = folder / f".old-step-{number}"
        os.replace(folder / f"step-{number}", old)
        shutil.rmtree(old)


@contextmanager
def _together(peers: Peers, path: Path) -> Iterator[None]:
    """Raise an error on every rank if the `with` block raises an OSError or ValueError on one of them.

    On the other ranks it is an OSError that names `path`.
    """
    found: OSError | ValueError | None = None
    try:
        yield
    except (OSError, ValueError) as error:
        found = error
    failed = peers.greatest(0 if found is None else peers.rank + 1)
    if found is not None:
        raise found
    if failed:
        raise OSError(errno.EIO, f"rank {failed - 1} could not write", str(path))


def steps(folder: Path) -> list[int]:
    """Return the steps that have a checkpoint, whole or damaged, in order."""
    found = (re.fullmatch(r"step-(\d{1,15})", path.name, re.ASCII) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for match in found if match)


def newest(folder: Path, peers: Peers) -> Checkpoint:
    """Return the newest whole checkpoint, the same on every rank. Warns of newer ones that are damaged.

    Raises ValueError if none is whole, or if it is of another format.
    """
    damaged: list[str] = []
    left = steps(folder)
    while (step := peers.greatest(left[-1] if left else -1)) >= 0:
        path = folder / f"step-{step}"
        wrong = _damage(path, peers)
        if wrong is None:
            if damaged and peers.rank == 0:
                warnings.warn(f"{'; '.join(damaged)}; continuing from {path.name}", stacklevel=2)
            return _opened(path)
        damaged.append(wrong)
        left = [other for other in left if other < step]
    if damaged:
        raise ValueError(f"{'; '.join(damaged)}; there is no whole checkpoint before")
    raise ValueError(f"{folder}: no checkpoint of `train` in this folder")


def _damage(path: Path, peers: Peers) -> str | None:
    """Return a sentence about a damaged file of a checkpoint, on every rank about the same one; None if all are whole.
    Each rank checks some files."""
    names, found, error = [storage.SUMS], 0, ""
    try:
        digests = storage.read_digests(path)
        names += sorted({INDEX, *digests})
        for number, name in enumerate(names):
            if number and number % peers.size == peers.rank:
                found = number + 1
                storage.require_whole(path / name, digests)
        found = 0
    except ValueError as wrong:
        found, error = found or 1, str(wrong)
    worst = peers.greatest(found)
    if not worst:
        return None
    return error if worst == found else f"{path / names[min(worst, len(names)) - 1]}: missing or damaged"


def _opened(path: Path) -> Checkpoint:
    """Return the checkpoint in the folder `path`. Raises ValueError if its format or form is another."""
    index = path / INDEX
    try:
        about = json.loads(storage.read_bytes(index))
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            kind = about.get("format") if isinstance(about, dict) else type(about).__name__
            raise ValueError(f"format is {kind!r}, not {FORMAT!r}: not a checkpoint of this version's `train`")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{index}: {error}") from error
    size = sum(name.startswith("rank-") for name in storage.read_digests(path))
    return Checkpoint(path, about, _stored(path, size))


def _stored(folder: Path, size: int) -> dict[str, tuple[tuple[int, ...], tuple[tuple[str, int, int], ...]]]:
    """Return the tensors in the files of `size` ranks, as `Checkpoint` holds them. A rank's rows follow on those of the
    ranks before it."""
    found: dict[str, tuple[tuple[int, ...], tuple[tuple[str, int, int], ...]]] = {}
    for file in (_shard(rank, size) for rank in range(size)):
        with storage.open_tensors(folder / file) as opened:
            for name in opened.keys():  # noqa: SIM118
                shape = tuple(opened.get_slice(name).get_shape())
                if name not in found:
                    found[name] = shape, ((file, 0, _rows(shape)),)
                    continue
                before, shards = found[name]
                if not (before and shape) or before[1:] != shape[1:]:
                    raise ValueError(f"{folder / file}: {name} has shape {shape}, which does not go on {before}")
                found[name] = (before[0] + shape[0], *shape[1:]), (*shards, (file, before[0], shape[0]))
    return found
