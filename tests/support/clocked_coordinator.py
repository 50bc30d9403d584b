"""The bubble coordinator under the clock of a test: `python -m tests.support.clocked_coordinator --redis-url URL`.

Its unix time is the modification time of the file that CLOCK_FILE names, so it stands still until a test sets it.
Polls are held for an hour. Leases are looked at as often as their length demands, but long ones once an hour. So a
poll is answered because something has happened, never because time has passed.
"""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from unittest.mock import patch

from services.bubbles import service
from services.bubbles.__main__ import main
from services.bubbles.config import BubblesConfig
from services.platform.service import run

CLOCK_FILE = "CLOCK_FILE"
"""Environment variable with the path of the file."""
HOUR = 3600.0

if __name__ == "__main__":
    path = os.environ[CLOCK_FILE]
    # The epoch of a process has to differ from that of the one before, so it is of the real clock.
    clock = SimpleNamespace(time=lambda: os.stat(path).st_mtime, time_ns=time.time_ns)
    with patch.multiple(service, time=clock, HOLD_SECONDS=HOUR, _TICK_SECONDS=HOUR):
        run("bubbles", main, BubblesConfig)
