"""Read text as bytes, and hold out a part of it."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from dilated_attention.plumbing import storage

HELD_OUT_EVERY = 20


@dataclass(frozen=True, slots=True)
class Text:
    """Hold the bytes of one or more files, one after another in the order of their paths.

    paths: the files and folders that were read; empty for the standard library.
    """

    content: UInt8[Tensor, " bytes"]
    paths: tuple[Path, ...]

    @property
    def source(self) -> str:
        return ", ".join(map(str, self.paths)) or "the Python standard library"

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.content.numpy().data).hexdigest()

    def split(self, context: int) -> Split:
        """Hold out every 20th window of context + 1 bytes (at least one); the rest is for training.

        The split depends on the text's length and the context only.
        """
        window = context + 1
        windows = len(self.content) // window
        if windows < 2:
            raise ValueError(
                f"{self.source} has {len(self.content):,} bytes: a context of {context:,} needs at least "
                f"{2 * window:,}, one window to learn from and one held out; give more text or a shorter --context"
            )
        count = max(1, windows // HELD_OUT_EVERY)
        held = [(2 * i + 1) * windows // (2 * count) for i in range(count)]
        starts = torch.tensor([0, *(window * (index + 1) for index in held)])
        stops = torch.tensor([*(window * index for index in held), len(self.content)])
        fits = stops - starts >= window
        return Split(
            content=self.content,
            context=context,
            starts=starts[fits],
            choices=(stops - starts - window + 1)[fits],
            held_out=torch.stack([self.content[index * window :][:window] for index in held]),
        )


@dataclass(frozen=True, slots=True)
class Split:
    """Hold a text split into training spans and held-out windows; a window is `context` + 1 bytes of `content`.

    Span i begins at byte `starts[i]` and has `choices[i]` training windows, one for each possible first byte, so they
    overlap. None of them touches `held_out`.
    """

    content: UInt8[Tensor, " bytes"]
    context: int
    starts: Int[Tensor, " spans"]
    choices: Int[Tensor, " spans"]
    held_out: UInt8[Tensor, "windows context_and_one"]

    def batch(self, size: int, generator: torch.Generator) -> Int[Tensor, "batch context_and_one"]:
        """Return windows drawn uniformly from all training windows, overlapping ones included."""
        ends = self.choices.cumsum(0)
        draw = torch.randint(int(ends[-1]), (size,), generator=generator)
        span = torch.searchsorted(ends, draw, right=True)
        first = self.starts[span] + draw - (ends - self.choices)[span]
        return torch.stack([self.content[i : i + self.context + 1] for i in first.tolist()]).long()

    def sample_held_out(self, count: int) -> Int[Tensor, "windows context_and_one"]:
        """Return at most `count` held-out windows, evenly spread."""
        count = min(count, len(self.held_out))
        return self.held_out[[(2 * i + 1) * len(self.held_out) // (2 * count) for i in range(count)]].long()


def read_text(paths: Sequence[Path], out: Path | None = None) -> Text:
    """Read files, and folders recursively; without paths, the standard library's sources. In folders, hidden and binary
    files are left out, and links to folders are not followed.

    Raises ValueError for a path that is missing, unreadable or empty, or the run's own folder.

    Args:
        out: folder of the run, which may lie within a folder of text: what it holds is left out there.
    """
    own = None if out is None else out.resolve()
    pieces: list[bytes] = []
    for path in paths or [standard_library()]:
        folder = path.is_dir()
        found = len(pieces)
        if folder and path.resolve() == own:
            raise ValueError(f"{path}: is the folder of the run, whose files would be read as text; give another --out")
        for file in _files(path, own, python_only=not paths) if folder else [path]:
            data = storage.read_bytes(file)
            if data and not (folder and b"\0" in data[:8192]):
                pieces.append(data)
        if len(pieces) == found:
            raise ValueError(f"{path}: {'no text file in this folder' if folder else 'the file is empty'}")
    content = torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8)
    return Text(content, tuple(path.resolve() for path in paths))


def readable(text: str) -> str:
    """Return the text with a dot for each unprintable character, which could control a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)


def standard_library() -> Path:
    """Return the folder of this interpreter's own Python sources."""
    return Path(sysconfig.get_path("stdlib"))


def _files(folder: Path, own: Path | None, *, python_only: bool) -> Iterator[Path]:
    """Yield the files below `folder` in sorted order, except hidden ones and those in the folder `own`.

    python_only: `folder` is the standard library: yield Python files only, and leave out installed packages and tests,
    which are more than all the rest.
    """

    def refuse(error: OSError) -> NoReturn:
        raise ValueError(f"{error.filename}: cannot be read ({error.strerror})") from error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and Path(parent, name).resolve() != own
            and not (python_only and name in {"site-packages", "dist-packages", "test", "tests", "idle_test"})
        )
        for name in sorted(names):
            path = Path(parent, name)
            if not name.startswith(".") and path.is_file() and (path.suffix == ".py" or not python_only):
                yield path
