"""A fresh EAGLE-3 head for a model, for instances to begin with: they must have one when they start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from services.drafter.checkpoint import folder_of
from services.local.child import PlatformError

_SECONDS = 600.0
_TAIL = 2000


def first_drafter(model: Path, parent: Path) -> Path:
    """Makes one under `parent`, in a process of its own: this one need not load torch. One that is there already is
    taken: instances may have been told of it. PlatformError: none can be made."""
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
