"""Jobs in groups, each group in a process of its own with a time limit: what ends one leaves the others their rows.

An error that a device reports ends every later call of its process, a kernel that hangs never ends, and a crash takes
the process along. So a group's process writes each row as soon as it is there, and says which jobs it has done; what it
leaves undone is refused with the reason.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from tempfile import TemporaryFile
from threading import Timer
from typing import Any, TextIO

import torch

from dilated_attention_bench.measure import Spread
from dilated_attention_bench.results import Row, failed


@dataclass(frozen=True)
class Job:
    """One stretch of a group.

    Attributes:
        calls: make the same launches on CPU tensors, of a shape with the same kernels: to compile them ahead.
        timed: its rows are times, so its kernels are to be checked before.
    """

    label: str
    run: Callable[[], Iterator[Row]]
    calls: Sequence[Callable[[], object]] = ()
    timed: bool = False


@dataclass(frozen=True)
class Group:
    """Jobs that share a process; `seconds` is its limit, its start included."""

    label: str
    seconds: float
    jobs: Sequence[Job] = field(repr=False)


def failures() -> tuple[type[Exception], ...]:
    """What a kernel that does not compile or run, or a call that does not fit, may raise: here or in what it calls."""
    from triton.errors import TritonError

    # PyTorch's errors of memory, of CUDA and of its compiler are RuntimeErrors; a profiler may not be installed.
    return RuntimeError, ValueError, TypeError, AssertionError, LookupError, OSError, TritonError


def reason_of(error: Exception) -> str:
    first, *_ = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first}"


# ---- in the group's process


def serve(group: Group, write: Callable[[str], object]) -> None:
    """Run a group's jobs; `write` is given a line for each row and for each job that is done."""
    for job in group.jobs:
        try:
            for row in job.run():
                write(json.dumps({"row": asdict(row)}))
            leave_no_memory()
        except failures() as error:
            write(json.dumps({"row": asdict(refused(group, job, reason_of(error)))}))
        write(json.dumps({"done": job.label}))


def leave_no_memory() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def rows_apart_from_output() -> TextIO:
    """This process's standard output, for rows alone: what anything else prints there goes to standard error."""
    rows = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return rows


def refused(group: Group, job: Job, reason: str) -> Row:
    return Row(failed(group.label), {"job": job.label}, None, "", refused=reason)


# ---- in the process that starts it


def run_apart(group: Group, command: Sequence[str]) -> Iterator[Row]:
    """The rows of a group that `command` serves in a process of its own, and why it left jobs undone, if it did."""
    undone = {job.label: job for job in group.jobs}
    with TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, start_new_session=True, env=_environment(), text=True
        )
        late = Timer(group.seconds, _kill, (process,))
        late.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                said = _read(line)
                if "row" in said:
                    yield _row(said["row"])
                undone.pop(said.get("done", ""), None)
        finally:
            ended_by_itself = late.is_alive()
            late.cancel()
            _kill(process)
            process.stdout.close()  # type: ignore[union-attr]
            process.wait()
        if undone:
            reason = _ending(process.returncode, errors) if ended_by_itself else f"took more than {group.seconds:g} s"
            for job in undone.values():
                yield refused(group, job, reason)


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _kill(process: subprocess.Popen[str]) -> None:
    """The process and its children, if they still run."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _read(line: str) -> Mapping[str, Any]:
    """A line of `serve`; a process that is killed may leave half of one."""
    try:
        said = json.loads(line)
    except json.JSONDecodeError:
        return {}
    return said if isinstance(said, dict) else {}


def _row(fields: dict[str, Any]) -> Row:
    def spread(x: Any) -> Spread | None:
        return None if x is None else Spread(**x)

    spreads = {name: {key: spread(x) for key, x in fields[name].items()} for name in ("over", "times")}
    return Row(**{**fields, "spread": spread(fields["spread"]), **spreads})


def _ending(code: int, errors: Any) -> str:
    how = f"signal {-code}, {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    errors.seek(0)
    last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
    return "; ".join([f"its process ended with {how}", *last])
