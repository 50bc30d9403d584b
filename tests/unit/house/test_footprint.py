"""The judge of growth: finds leaks, and takes neither warming up nor a jump for one."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.support.footprint import Footprint, Limits, Record, footprint, growth

STEPS, SAMPLES = 400, 32
LIMITS = Limits(memory=32 << 10, files=0.01, threads=0.01, keys=0.05)
MIB = 1 << 20


def arenas(step: int, leaked: float) -> float:
    """What an allocator that takes a megabyte at once has for so much, with what comes and goes."""
    return (leaked // MIB) * MIB + random.Random(step).randrange(MIB)


def level(step: int) -> float:
    return 250 * MIB * (1 - 0.98**step)


CASES: dict[str, tuple[Callable[[int], float], bool]] = {
    "nothing": (lambda step: arenas(step, 0), False),
    "a cache that fills": (lambda step: arenas(step, level(step)), False),
    "a jump in the last half": (lambda step: arenas(step, 4 * MIB * (step > 290)), False),
    "4 KiB a sample": (lambda step: arenas(step, 4096 * SAMPLES * step), True),
    "100 KiB a step": (lambda step: arenas(step, 100 * 1024 * step), True),
    "both": (lambda step: arenas(step, level(step) + 100 * 1024 * step), True),
}


@pytest.mark.parametrize("case", CASES)
def test_memory_that_grows_with_the_steps_is_found(case: str) -> None:
    held, grows = CASES[case]
    record = Record()
    for step in range(STEPS):
        record.add({"process": Footprint(held(step), 10 + step % 3, 20)}, 7 + step % 5)
    assert bool(record.above(LIMITS)) is grows, record.growth()
    assert set(record.above(LIMITS)) <= {"process memory"}


def test_a_file_thread_or_key_left_now_and_then_is_found() -> None:
    record = Record()
    for step in range(STEPS):
        record.add({"process": Footprint(0, 10 + step // 20, 20 + step // 50)}, 30 + step // 5)
    assert set(record.above(LIMITS)) == {"process files", "process threads", "redis keys"}


def test_the_first_half_does_not_count() -> None:
    assert growth([0, 10, 20, 30, 40, 40, 40, 40]) == 0
    assert growth([0, 0, 0, 0, 1, 2, 3, 4]) == 1


HOLDER = """
import os, sys, threading
end, held_open = os.pipe()
closed, tell_closed = os.pipe()
if not os.fork():
    # Until the parent ends.
    os.close(held_open)
    os.write(tell_closed, b"1")
    os.read(end, 1)
    os._exit(0)
# From now on the child opens and closes nothing.
os.read(closed, 1)
held = []
for line in sys.stdin:
    size, files, threads = map(int, line.split())
    held.append(b"1" * size)
    held += [os.open("/dev/null", os.O_RDONLY) for _ in range(files)]
    for _ in range(threads):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    print("done", flush=True)
"""


def test_what_a_process_and_its_children_hold_is_counted() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        held = []
        for line in ("0 0 0", "50000000 7 3"):
            process.stdin.write(line + "\n")
            process.stdin.flush()
            assert process.stdout.readline() == "done\n"
            held.append(footprint(process.pid))
        process.stdin.close()
    before, after = held
    assert 40e6 < after.memory - before.memory < 60e6
    assert (after.files - before.files, after.threads - before.threads) == (7, 3)
    assert before.threads == 2
