"""Load every compiled library of a folder, and print what each registers with torch, or why it does not load.

Runs on the pretended machine: `python load_libraries.py FOLDER` prints a JSON object, by path.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

import torch


def main() -> None:
    """Load each with all its symbols, so that one missing shows now and not in its first call."""
    folder = Path(sys.argv[1])
    found: dict[str, dict[str, object]] = {}
    for path in sorted(each for each in folder.rglob("*.so*") if each.is_file()):
        before = set(torch._C._dispatch_get_all_op_names())
        try:
            ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as error:
            found[str(path.relative_to(folder))] = {"error": str(error)}
            continue
        registered = set(torch._C._dispatch_get_all_op_names()) - before
        found[str(path.relative_to(folder))] = {"operators": sorted(registered)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
