"""Log of failed tests, written while the suite runs.

A pytest plug-in. With workers, pytest shows failures when all tests are over. Whoever watches a run of an hour, or
has to end it, finds them in `LOG` as soon as they happen.
"""

from __future__ import annotations

from pathlib import Path

import pytest

LOG = Path("runs/test-failures.log")


class FailureLog:
    """Appends each failed test with its traceback and captured output to `LOG`, which a new run begins anew."""

    def __init__(self, log: Path) -> None:
        self._log = log
        log.parent.mkdir(exist_ok=True)
        log.write_text("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the report of a failure, which workers send as soon as there is one."""
        if not report.failed:
            return
        parts = [f"{title}\n{text}" for title, text in report.sections]
        with self._log.open("a") as file:
            file.write("\n".join([f"=== {report.nodeid} ({report.when})", report.longreprtext, *parts, ""]))
