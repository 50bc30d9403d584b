"""Forks of a process that has imported everything: real ones, small."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.local.zygote import Forked, Zygote
from tests.support.processor_time import processor_seconds

ROOT = Path(__file__).parents[3]
WAIT = 60.0
THING = """
import json, os, signal, sys, time
print("imported", flush=True)
if __name__ == "__main__":
    cores = sorted(os.sched_getaffinity(0))
    print(json.dumps([os.getpid(), os.getsid(0), os.environ.get("NAME"), sys.argv[1:], cores]))
    sys.stdout.flush()
    while "wait" in sys.argv: signal.pause()
    while "work" in sys.argv and time.process_time() < 0.3: pass
    sys.exit(3)
"""
LAUNCHER = """
import os, sys
from services.local.zygote import Zygote
with open(sys.argv[1], "wb") as log:
    process = Zygote("thing.__main__").fork([sys.executable, "-m", "thing", "wait"], dict(os.environ), (), log)
print(process.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """One in which there is a package `thing` that can be run."""
    (tmp_path / "thing").mkdir()
    (tmp_path / "thing/__init__.py").touch()
    (tmp_path / "thing/__main__.py").write_text(THING)
    return {"PYTHONPATH": f"{tmp_path}:{ROOT}"}


@pytest.fixture
def zygote(tmp_path: Path, environment: dict[str, str]) -> Iterator[Zygote]:
    zygote = Zygote("thing.__main__", environment=environment, log=tmp_path / "imports.log")
    yield zygote
    zygote.close()


def forked(zygote: Zygote, log: Path, *words: str, cores: tuple[int, ...] = (), **variables: str) -> Forked:
    with log.open("ab") as file:
        return zygote.fork([sys.executable, "-m", "thing", *words], {**os.environ, **variables}, cores, file)


def said(log: Path) -> list[Any]:
    """Return what a process says of itself, once it does."""
    until(lambda: log.exists() and log.read_text().endswith("]\n"))
    found: list[Any] = json.loads(log.read_text().splitlines()[-1])
    return found


def until(holds: Any) -> None:
    for _ in range(int(WAIT / 0.02)):
        if holds():
            return
        signal.sigtimedwait([], 0.02)
    raise AssertionError("it did not come about")


def test_a_fork_is_a_process_of_its_own(zygote: Zygote, tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    one = forked(zygote, tmp_path / "one", "a", "b", cores=(core,), NAME="one")
    other = forked(zygote, tmp_path / "other", NAME="other")
    assert (one.wait(WAIT), other.wait(WAIT)) == (3, 3)
    assert said(tmp_path / "one") == [one.pid, one.pid, "one", ["a", "b"], [core]]
    assert said(tmp_path / "other")[:3] == [other.pid, other.pid, "other"]
    # Of the import; run as a program it says so again, and its log begins with nothing else.
    assert (tmp_path / "imports.log").read_text() == "imported\n"
    assert (tmp_path / "other").read_text().splitlines()[:-1] == ["imported"]


def test_forks_end_by_signals_and_with_their_zygote(zygote: Zygote, tmp_path: Path) -> None:
    one, other = (forked(zygote, tmp_path / name, "wait") for name in ("one", "other"))
    for name in ("one", "other"):
        said(tmp_path / name)
    one.send_signal(signal.SIGTERM)
    assert one.wait(WAIT) == -signal.SIGTERM
    assert psutil.Process(other.pid).name() == "thing"
    assert other.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(0.0)
    zygote.close()
    assert other.wait(WAIT) == -signal.SIGKILL
    until(lambda: not psutil.pid_exists(other.pid))


def test_processor_time_of_forks_that_ended_is_their_zygotes(zygote: Zygote, tmp_path: Path) -> None:
    forked(zygote, tmp_path / "first").wait(WAIT)
    (process,) = [each for each in psutil.Process().children() if each.cmdline()[-1] == "thing.__main__"]
    until(lambda: not process.children())
    before = processor_seconds()
    forked(zygote, tmp_path / "log", "work").wait(WAIT)
    until(lambda: not process.children())
    assert processor_seconds() >= before + 0.3


def test_what_cannot_be_imported_cannot_be_forked(tmp_path: Path) -> None:
    zygote = Zygote("no.such.module", log=tmp_path / "imports.log")
    with pytest.raises(RuntimeError, match=r"where no\.such\.module is imported"):
        forked(zygote, tmp_path / "log")
    assert "No module named 'no'" in (tmp_path / "imports.log").read_text()
    zygote.close()


def test_forks_die_with_the_launcher_however_it_ends(tmp_path: Path, environment: dict[str, str]) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path / "log")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | environment,
        cwd=tmp_path,
    )
    assert launcher.stdout is not None
    pid = 0
    while not pid:
        # The import speaks first.
        line = launcher.stdout.readline().strip()
        pid = int(line) if line.isdigit() else 0
    said(tmp_path / "log")
    launcher.kill()
    launcher.wait()
    until(lambda: not psutil.pid_exists(pid))
