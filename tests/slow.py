"""Run all tests and write to slow.txt the functions that `make quick` leaves out: python tests/slow.py, 15 minutes.

They are those whose tests take 0.3 seconds on average, or 5 seconds together.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean

import pytest

LIST = Path(__file__).with_suffix(".txt")


def function_of(nodeid: str) -> str:
    return nodeid.removeprefix("tests/").split("[")[0]


class Times:
    """Add up what each test takes, with its set-up."""

    def __init__(self) -> None:
        self.of: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.of[function_of(report.nodeid)][report.nodeid] += report.duration

    def slow(self) -> list[str]:
        return sorted(name for name, each in self.of.items() if mean(each.values()) >= 0.3 or sum(each.values()) >= 5)


if __name__ == "__main__":
    times = Times()
    status = pytest.main(["-n", "2", "--dist", "worksteal", "-m", "not thorough", str(LIST.parent)], plugins=[times])
    if status == pytest.ExitCode.OK:
        LIST.write_text("".join(f"{name}\n" for name in times.slow()), encoding="utf-8")
    sys.exit(status)
