"""Imports that an instance on the CPU needs for its engine, for a process that instances are forked from.

The module only imports. It must not import numba, because an engine cannot be built where numba came first.
"""

import services.generation.__main__
import services.generation.engine.core
import services.generation.engine.worker  # noqa: F401
