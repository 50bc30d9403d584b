"""Import of what an instance on the CPU needs for its engine, for a process that instances are forked from.

Being imported is all that it is for. Without numba: an engine cannot be built where that came first.
"""

import services.generation.__main__
import services.generation.engine.core
import services.generation.engine.worker  # noqa: F401
