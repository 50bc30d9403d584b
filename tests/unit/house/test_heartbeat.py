"""`scripts/heartbeat`, by which long targets of make say that they are at work."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts/heartbeat"


INTERRUPTED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
print("ready", flush=True)
signal.sigwait([signal.SIGINT])
print("stopped", flush=True)
"""


def begin(*command: str, seconds: str = "0.05") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [SCRIPT, "work", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HEARTBEAT_SECONDS": seconds},
        start_new_session=True,
    )


def test_it_speaks_while_the_command_is_silent_and_leaves_its_output_alone() -> None:
    # `cat` is silent until its input ends.
    with begin("cat") as running:
        assert running.stdin is not None
        assert running.stderr is not None
        for _ in range(2):
            assert re.fullmatch(r"work: at work for \d+ s\n", running.stderr.readline())
        output, _ = running.communicate("said\n", timeout=60)
    assert (running.returncode, output) == (0, "said\n")


def test_the_exit_status_is_the_command_s_and_nobody_waits_for_a_sleep() -> None:
    with begin("sh", "-c", "exit 3", seconds="3600") as running:
        # Ends only when nothing holds the streams any more.
        output, error = running.communicate(timeout=60)
    assert (running.returncode, output, error) == (3, "", "")


def test_ctrl_c_reaches_the_command() -> None:
    # A shell cannot catch a signal that it was started to ignore, as the background jobs of a script are.
    with begin(sys.executable, "-c", INTERRUPTED, seconds="3600") as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        # A terminal sends it to the whole group.
        os.killpg(running.pid, signal.SIGINT)
        output, _ = running.communicate(timeout=60)
    assert output == "stopped\n"


@pytest.mark.parametrize("target", ["docs", "bench", "bench-full"])
def test_long_targets_use_it(target: str) -> None:
    shown = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "scripts/heartbeat" in shown.stdout
