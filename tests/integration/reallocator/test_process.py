"""`python -m services.reallocator`: one of several decides, and the next one takes over."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.zygote import forked

CALL = 60.0


class Process:
    """A reallocator process."""

    def __init__(self, redis_url: str, namespace: str, folder: Path, name: str) -> None:
        self.ready_file, self.log = folder / f"{name}.json", folder / f"{name}.log"
        flags = {
            "redis-url": redis_url,
            "namespace": namespace,
            "instance-id": name,
            "ready-file": self.ready_file,
            "port": 0,
            # No leader is silent for so long, on a busy machine either.
            "lease-seconds": 4.0,
        }
        with self.log.open("wb") as log:
            command = [sys.executable, "-m", "services.reallocator"]
            command += [f"--{name}={value}" for name, value in flags.items()]
            self.process = forked(command, os.environ, log)

    @property
    def ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return self.ready_file.exists()

    @property
    def leads(self) -> bool:
        port = json.loads(self.ready_file.read_text())["metrics_port"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            return "paceline_reallocator_leader 1.0" in answer.read().decode()


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + CALL
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


@pytest.fixture
def pair(redis_url: str, namespace: str, tmp_path: Path) -> Iterator[list[Process]]:
    processes = [Process(redis_url, namespace, tmp_path, name) for name in ("r0", "r1")]
    until(lambda: all(each.ready for each in processes))
    yield processes
    for each in processes:
        each.process.kill()
        each.process.wait()


def test_one_of_two_decides_and_the_other_takes_over_from_a_dead_or_a_stopped_one(
    pair: list[Process], redis_url: str, namespace: str, tmp_path: Path
) -> None:
    until(lambda: sum(each.leads for each in pair) == 1)
    first, second = sorted(pair, key=lambda each: not each.leads)
    first.process.kill()
    until(lambda: second.leads)
    third = Process(redis_url, namespace, tmp_path, "r2")
    pair.append(third)
    until(lambda: third.ready)
    assert not third.leads
    second.process.terminate()
    assert second.process.wait(CALL) == 0
    until(lambda: third.leads)
