"""Run each job in a separate process with a time limit, so that the failure of one leaves the others their rows.

An error that a device reports ends every later call of its process, a kernel that hangs never ends, and a crash takes
the process along. So each job has a process, which writes each row as soon as it is there. A job that does not end well
gets a row with the reason.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

from dilated_attention_lab.bench.measure import Spread
from dilated_attention_lab.bench.results import Row, failed


@dataclass(frozen=True)
class Job:
    label: str
    run: Callable[[], Iterator[Row]]


@dataclass(frozen=True)
class Group:
    """Hold jobs that share a time limit.

    Attributes:
        seconds: the time limit for all jobs together, including the starts of their processes.
        at_once: how many may run at the same time: one where times are taken.
    """

    label: str
    seconds: float
    jobs: Sequence[Job] = field(repr=False)
    at_once: int = 1


def failures() -> tuple[type[Exception], ...]:
    """Return the exceptions that a kernel that does not compile or run, or a call that does not fit, may raise."""
    from triton.errors import TritonError

    # PyTorch's errors of memory, of CUDA and of its compiler are RuntimeErrors.
    return RuntimeError, ValueError, TypeError, AssertionError, LookupError, OSError, TritonError


def reason_of(error: Exception) -> str:
    first, *_ = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first}"


def refused(group: Group, job: Job, reason: str) -> Row:
    return Row(failed(group.label), {"job": job.label}, None, "", refused=reason)


def serve(group: Group, job: Job, write: Callable[[str], object]) -> None:
    """Run a job in this process, which is the job's own. Call `write` with a line of JSON for each row; if the job
    fails, then also for a row that names `group` and the reason."""
    try:
        for row in job.run():
            write(json.dumps(asdict(row)))
    except failures() as error:
        write(json.dumps(asdict(refused(group, job, reason_of(error)))))


def rows_apart_from_output() -> TextIO:
    """Return this process's standard output, for rows alone. What else is printed there goes to standard error."""
    rows = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return rows


def run_apart(group: Group, command: Callable[[Job], Sequence[str]]) -> Iterator[Row]:
    """Run each job of a group as a process, `command(job)`; yield all rows, and per failure one with the reason."""
    end = time.monotonic() + group.seconds
    with ThreadPoolExecutor(group.at_once) as pool:
        for found in pool.map(lambda job: _rows(group, job, command(job), end), group.jobs):
            yield from found


def _rows(group: Group, job: Job, command: Sequence[str], end: float) -> list[Row]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    left = max(0.0, end - time.monotonic())
    try:
        process = subprocess.run(command, capture_output=True, timeout=left, env=environment)
        output, why = process.stdout, process.returncode and _ending(process.returncode, process.stderr)
    except subprocess.TimeoutExpired as error:
        output, why = error.stdout or b"", f"its group took more than {group.seconds:g} s"
    lines = [line for line in output.splitlines(keepends=True) if line.endswith(b"\n")]  # the last may be half of one
    return [*(_row(json.loads(line)) for line in lines), *([refused(group, job, why)] if why else [])]


def _row(fields: dict[str, Any]) -> Row:
    def spread(x: Mapping[str, Any] | None) -> Spread | None:
        return None if x is None else Spread(**x)

    spreads = {name: {key: spread(x) for key, x in fields[name].items()} for name in ("over", "times")}
    return Row(**{**fields, "spread": spread(fields["spread"]), **spreads})


def _ending(code: int, errors: bytes) -> str:
    how = f"signal {-code}, {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return "; ".join([f"its process ended with {how}", *errors.decode(errors="replace").strip().splitlines()[-1:]])
