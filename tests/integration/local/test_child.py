"""Processes on their leash. Real ones, small."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from services.local.child import Child, PlatformError, ProcessSpec, Supervisor
from services.local.config import RestartPolicy

READY = """
import json, os, sys, signal, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
part = sys.argv[1] + ".part"
open(part, "w").write(json.dumps({"pid": os.getpid(), "address": "127.0.0.1:1", "metrics_port": 2}))
os.rename(part, sys.argv[1])
print("started", flush=True)
while True: signal.pause()
"""


@pytest.fixture
def spawner() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def child(code: str, folder: Path, spawner: ThreadPoolExecutor, cores: tuple[int, ...] = ()) -> Child:
    ready = folder / "ready.json"
    argv = (sys.executable, "-c", code, str(ready))
    return Child(ProcessSpec("thing", argv, folder / "thing.log", ready, cores=cores), spawner)


def soon() -> float:
    return time.monotonic() + 60


def test_a_process_is_ready_when_it_says_so(tmp_path: Path, spawner: ThreadPoolExecutor) -> None:
    thing = child(READY, tmp_path, spawner)
    thing.start()
    assert thing.wait_ready(soon()).pid == thing.pid
    thing.stop(60)
    assert thing.returncode == 0
    assert not thing.alive


def test_a_process_that_ends_instead_shows_its_log(tmp_path: Path, spawner: ThreadPoolExecutor) -> None:
    thing = child("raise SystemExit('no such model')", tmp_path, spawner)
    thing.start()
    with pytest.raises(PlatformError, match=r"(?s)thing ended with status 1.*no such model"):
        thing.wait_ready(soon())


def test_a_process_that_is_never_ready_is_given_up(tmp_path: Path, spawner: ThreadPoolExecutor) -> None:
    thing = child("import signal; print('loading', flush=True); signal.pause()", tmp_path, spawner)
    thing.start()
    with pytest.raises(PlatformError, match="not ready in time"):
        thing.wait_ready(time.monotonic() + 0.3)
    thing.kill()


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path, spawner: ThreadPoolExecutor) -> None:
    thing = child(READY.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN"), tmp_path, spawner)
    thing.start()
    thing.wait_ready(soon())
    thing.stop(0.2)
    assert thing.returncode == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can pin")
def test_a_process_stays_on_its_cores(tmp_path: Path, spawner: ThreadPoolExecutor) -> None:
    core = sorted(os.sched_getaffinity(0))[-1]
    thing = child(READY, tmp_path, spawner, cores=(core,))
    thing.start()
    thing.wait_ready(soon())
    assert os.sched_getaffinity(thing.pid) == {core}
    thing.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the leash")
def test_no_process_outlives_a_killed_launcher(tmp_path: Path) -> None:
    launcher = f"""
import pathlib, sys, time
from concurrent.futures import ThreadPoolExecutor
from tests.integration.local.test_child import READY, child, soon
thing = child(READY, pathlib.Path({str(tmp_path)!r}), ThreadPoolExecutor(1))
thing.start()
print(thing.wait_ready(soon()).pid, flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", launcher], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    found = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs([found], timeout=60)
    assert not alive


def test_a_dead_process_comes_back_until_it_died_too_often(
    tmp_path: Path, spawner: ThreadPoolExecutor
) -> None:
    thing = child(READY, tmp_path, spawner)
    thing.start()
    first = thing.wait_ready(soon()).pid
    supervisor = Supervisor(RestartPolicy(limit=1, initial=0.01), lambda: [thing])
    supervisor.start()
    thing.kill()
    second = _wait_for(lambda: thing.alive and thing.ready and thing.ready.pid)
    assert second not in (None, first)
    assert not supervisor.gave_up(thing)
    thing.kill()
    assert _wait_for(lambda: supervisor.gave_up(thing))
    supervisor.stop()
    assert not thing.alive


def _wait_for(condition: Callable[[], object]) -> object:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    return None
