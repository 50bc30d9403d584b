"""Processes that have vLLM imported already: they are forked from one that imported it once and did nothing else.

Importing vLLM takes longer than building a small engine. What it reads from the environment while it is imported
must therefore be the same for all engines of the tests.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.context import ForkServerContext

_PRELOADED = ["services.generation.engine.core"]


def engine_context() -> ForkServerContext:
    """Where processes with an engine come from; each uses one core."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return context
