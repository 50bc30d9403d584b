"""Compile once, before the tests, what each of their processes would compile by itself on a fresh machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOURCES = ("kernels", "services")
"""Folders with what Numba compiles, and keeps beside it."""
# Of about the same length. Numba keeps what the first two compile beside the sources; the imports leave bytecode.
_PARTS = (
    """
from kernels.suffix_index.suffix_index import warm_up as index
from services.generation.drafters.reference.alignment import warm_up as alignments
index(), alignments()
""",
    """
from kernels.coupled_sampler.cpu import warm_up as sampler
from services.generation.speculation.acceptance import warm_up as acceptance
from services.generation.speculation.selection import warm_up as selection
from services.step_time.estimator import warm_up as estimator
sampler(), acceptance(), selection(), estimator()
""",
    """
import services.generation.__main__, services.generation.engine.core, vllm.v1.worker.cpu_worker
""",
)


def compile_once(root: Path) -> None:
    """Run the parts side by side in the repository at `root`. One that fails leaves its work to the tests."""
    running = [
        subprocess.Popen([sys.executable, "-c", part], cwd=root, stderr=subprocess.DEVNULL) for part in _PARTS
    ]
    for process in running:
        process.wait()
