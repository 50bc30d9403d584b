"""Start the ranks of an engine on CPU with Triton's interpreter in them.

vLLM starts ranks as processes whose first act is to import vLLM: what they run is a method of it. A process is
unpickled class first, though. So where ranks are of a class of this module, it is imported before vLLM is.
"""

from __future__ import annotations

from multiprocessing.context import SpawnContext, SpawnProcess

from services.generation.engine.environment import install, is_installed

if not is_installed():
    install()


class InterpretedRank(SpawnProcess):
    """Process of a rank."""


class _Context(SpawnContext):
    Process = InterpretedRank


def interpret_ranks() -> None:
    """Have vLLM start ranks as above, in this process from now on."""
    import vllm.v1.executor.multiproc_executor as executor

    executor.get_mp_context = _Context
