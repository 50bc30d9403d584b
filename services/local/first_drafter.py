"""First EAGLE-3 head of a platform with a learner but without a head to begin with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from services.contracts.drafter.checkpoint import folder_of
from services.local.child import PlatformError

_SECONDS = 600.0
_TAIL = 2000


def first_drafter(model: Path, parent: Path) -> Path:
    """Return the folder of the first head under `parent`; makes it if there is none. PlatformError if that fails.

    It is made in a process of its own, so that this one does not load torch. An existing one is kept, since
    instances may already use it.
    """
    made = folder_of(parent.absolute(), 1)
    if made.is_dir():
        return made
    command = [sys.executable, "-m", "services.drafter.first", f"--model={model}", f"--parent={parent}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise PlatformError(f"no drafter for {model} was made in {_SECONDS:.0f} s") from error
    if done.returncode:
        raise PlatformError(f"no drafter for {model} could be made.\n{done.stderr[-_TAIL:]}")
    return Path(done.stdout.strip().splitlines()[-1])
