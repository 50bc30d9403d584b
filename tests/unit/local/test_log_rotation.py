"""Logs of processes stay within their bound, while the processes write on."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from services.local.child import LogRotation, last_lines, older, rotate

WRITER = """
import sys
for number in range(5000):
    if number % 1000 == 0:
        sys.stdin.readline()
    print(number, flush=True)
"""


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_a_process_writes_on_while_its_log_is_bounded(tmp_path: Path) -> None:
    log = tmp_path / "gateway.log"
    rotation = LogRotation(lambda: [log, tmp_path / "absent.log"], max_bytes=2048, files=3)
    with (
        log.open("ab") as file,
        subprocess.Popen([sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=file) as process,
    ):
        assert process.stdin is not None
        for written in range(1, 6):
            process.stdin.write(b"\n")
            process.stdin.flush()
            until(lambda: last_lines(log)[-1:] == [f"{1000 * written - 1}"])  # noqa: B023
            rotation.check()
            assert log.read_bytes() == b""
    assert names(tmp_path) == ["gateway.log", "gateway.log.1", "gateway.log.2"]
    assert last_lines(log)[-1] == "4999"
    assert b"\0" not in older(log, 1).read_bytes(), "it is written at its new end"


def test_lines_are_neither_lost_nor_doubled_where_nobody_writes_meanwhile(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    written = []
    for number in range(5):
        written += [f"{number} {place}" for place in range(100)]
        with log.open("a") as file:
            file.write("\n".join(written[-100:]) + "\n")
        if number < 4:
            rotate(log, 4)
    kept = [path.read_text().splitlines() for path in (older(log, 3), older(log, 2), older(log, 1), log)]
    assert [line for lines in kept for line in lines] == written[100:], "the oldest is gone"
    assert last_lines(log) == written[-200:]
    rotate(log, 1)
    assert log.read_bytes() == b""


def test_a_log_that_cannot_be_copied_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "a.log"
    log.write_text("x" * 100)
    older(log, 1).mkdir()
    LogRotation(lambda: [log], max_bytes=10, files=2).check()
    assert log.stat().st_size == 100


def test_the_thread_checks_until_it_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.local.child._ROTATION_SECONDS", 0.001)
    looked = tmp_path / "looked.log"
    looked.write_text("x" * 100)
    rotation = LogRotation(lambda: [looked], max_bytes=10, files=2)
    rotation.start()
    until(lambda: older(looked, 1).exists() and not looked.stat().st_size)
    rotation.stop()
    LogRotation(lambda: [], 1, 1).stop()
