"""Change every Python process of the suite as it starts: `--stress` and `--processor avx2` put this on PYTHONPATH.

`STRESS_SEED`: event loops, threads and waits on conditions stall for up to `LONGEST` seconds each, about every
`BETWEEN` seconds of each kind. `SUITE_PROCESSOR=avx2`: torch denies AVX-512, so that vLLM takes its build for AVX2.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import random
import sys
import threading
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

LONGEST = 0.4
BETWEEN = 4.0


class Stalls:
    """Stalls of one kind, at random times. The seed and the number of forks up to here give their times."""

    def __init__(self, seed: str) -> None:
        # Tests replace both.
        self._sleep, self._clock = time.sleep, time.monotonic
        self._seed, self._forks = seed, 0
        self._begin()
        os.register_at_fork(after_in_child=self._forked)

    def stall(self) -> None:
        """Sleep if the next stall is due."""
        if self._clock() >= self._due:
            self._sleep(self._random.uniform(0.0, LONGEST))
            self._due = self._clock() + self._random.expovariate(1 / BETWEEN)

    def _begin(self) -> None:
        self._random = random.Random(f"{self._seed} {self._forks} {sys.argv}")
        self._due = self._clock() + self._random.expovariate(1 / BETWEEN)

    def _forked(self) -> None:
        self._forks += 1
        self._begin()


def stall_threads(seed: str) -> None:
    """Let threads stall before they begin, and waits on a condition before they return."""
    begins, waits = Stalls(f"{seed} threads"), Stalls(f"{seed} conditions")
    run, wait = threading.Thread.run, threading.Condition.wait

    def late_run(self: threading.Thread) -> None:
        begins.stall()
        run(self)

    def late_wait(self: threading.Condition, timeout: float | None = None) -> bool:
        woken = wait(self, timeout)
        waits.stall()
        return woken

    threading.Thread.run = late_run  # type: ignore[method-assign]
    threading.Condition.wait = late_wait  # type: ignore[method-assign]


def stall_event_loops(seed: str, base_events: Any) -> None:
    """Let turns of event loops begin late."""
    turns = Stalls(f"{seed} event loops")
    run_once = base_events.BaseEventLoop._run_once

    def late_turn(self: Any) -> None:
        turns.stall()
        run_once(self)

    base_events.BaseEventLoop._run_once = late_turn


def deny_avx512(cpu: Any) -> None:
    """Let `torch.cpu` say that the processor has AVX2 and nothing newer."""
    for name in dir(cpu):
        if name.startswith(("_is_avx512", "_is_amx", "_is_vnni")):
            setattr(cpu, name, lambda: False)


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module once that has been imported."""

    def __init__(self, name: str, then: Any) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module as without this, and let its loader call the function."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute, then = spec.loader.exec_module, self._then

        def executed(module: ModuleType) -> None:
            execute(module)
            then(module)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


if stress_seed := os.environ.get("STRESS_SEED"):
    stall_threads(stress_seed)
    sys.meta_path.insert(
        0, AfterImport("asyncio.base_events", lambda module: stall_event_loops(stress_seed, module))
    )
if os.environ.get("SUITE_PROCESSOR") == "avx2":
    sys.meta_path.insert(0, AfterImport("torch.cpu", deny_avx512))
