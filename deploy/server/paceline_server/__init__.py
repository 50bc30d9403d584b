"""The installed server. With it imported, `import services` works here and in the processes that are started.

`services` and `kernels` lie in this folder and not beside it: as packages of their own they would overwrite what
others install under these names.
"""

import sys
from pathlib import Path

FOLDER = str(Path(__file__).resolve().parent)
"""What PYTHONPATH needs for `python -m services.gateway` and for Ray."""

if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)
import services  # noqa: E402, F401  (it brings its folder to the front)
