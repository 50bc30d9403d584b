"""What `--stress` and `--processor` put in front of every Python process of the suite."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

STARTUP = Path(__file__).parents[2] / "support" / "startup"
# A clock that is late for every stall, and a sleep that remembers.
STALLED = """
import asyncio, sitecustomize, threading, time
slept, sitecustomize.time.sleep = [], lambda seconds: slept.append(seconds)
now = time.monotonic() + 1e6
time.monotonic = lambda: now
stalls = sitecustomize.Stalls("1")
stalls._due = 0.0
stalls.stall()
assert len(slept) == 1 and 0.0 <= slept[0] <= sitecustomize.LONGEST, slept
stalls.stall()
assert len(slept) == 1, "the next one is due later"
print(asyncio.BaseEventLoop._run_once.__name__, threading.Condition.wait.__name__, threading.Thread.run.__name__)
"""
DENIED = """
import sys, types
sys.modules["torch"] = torch = types.ModuleType("torch")
torch.__path__ = [sys.argv[1]]
import torch.cpu
print(torch.cpu._is_avx512_supported(), torch.cpu._is_avx2_supported())
"""


def said(program: str, *words: str, **variables: str) -> list[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(STARTUP), **variables}
    command = [sys.executable, "-c", program, *words]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


def test_event_loops_conditions_and_threads_stall_when_a_stall_is_due() -> None:
    assert said(STALLED, STRESS_SEED="1") == ["late_turn", "late_wait", "late_run"]
    assert said("import threading; print(threading.Condition.wait.__name__)") == ["wait"]


def test_torch_denies_avx512_on_an_older_processor(tmp_path: Path) -> None:
    lines = [f"def _is_{name}_supported(): return True\n" for name in ("avx2", "avx512", "avx512_bf16")]
    (tmp_path / "cpu.py").write_text("".join(lines))
    assert said(DENIED, str(tmp_path), SUITE_PROCESSOR="avx2") == ["False", "True"]
    assert said(DENIED, str(tmp_path)) == ["True", "True"]
