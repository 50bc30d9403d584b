"""Freed memory stays with the process that asked for that, whichever of its threads freed it."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import ctypes, resource, sys, threading

# Where pages are huge, a step takes few of them either way.
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE

from services.platform.memory import keep_freed_memory

if sys.argv[1] == "kept":
    assert keep_freed_memory()

import numpy

def step():
    blocks = [numpy.ones(each << 18, numpy.float32) for each in (12, 40, 100)]
    del blocks

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def run():
    # A heap takes some steps to find its form.
    for _ in range(20):
        step()
    before = faults()
    for _ in range(10):
        step()
    print(faults() - before)

thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


def _faults(how: str) -> int:
    """Page faults of ten steps that take and free 152 MiB each."""
    command = [sys.executable, "-c", _PROGRAM, how]
    return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_a_step_finds_the_memory_of_the_last_one() -> None:
    pages = 152 << 20 >> 12
    assert _faults("given back") > 5 * pages
    assert _faults("kept") < pages
