"""The services of Paceline: one folder each, and `platform` for what they share.

The parent of this folder comes first on the path of imports, here and in the processes that this one starts. So
they find these `services` and `kernels`, in whatever folder they start and whatever else is installed.
"""

import os
import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[1])


def _first(paths: list[str]) -> list[str]:
    return [_ROOT, *(path for path in paths if path != _ROOT)]


sys.path[:] = _first(sys.path)
_inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
os.environ["PYTHONPATH"] = os.pathsep.join(_first([path for path in _inherited if path]))
# Else `python -m` looks into the current folder first, which may have a folder `services` of the user's.
os.environ["PYTHONSAFEPATH"] = "1"
