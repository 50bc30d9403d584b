"""The installed server. After importing it, `import services` works in this process and in child processes.

`services` and `kernels` are inside this folder: as top-level packages they could overwrite packages of the same
names.
"""

import sys
from pathlib import Path

FOLDER = str(Path(__file__).resolve().parent)
"""Folder to add to PYTHONPATH for `python -m services.gateway` and for Ray."""

if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)
import services  # noqa: E402, F401  (it puts its folder first on the path)
