"""Run a module of the installed server: `python -m paceline_server services.facade --port 8000`.

Without arguments it prints the folder for PYTHONPATH.
"""

import runpy
import sys

from . import FOLDER

if len(sys.argv) < 2:
    print(FOLDER)
else:
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
