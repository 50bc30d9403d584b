"""Start the ranks of an engine on CPU with Triton's interpreter in them.

vLLM starts ranks as processes that first import vLLM, because they run a method of it. A process is unpickled class
first, so if its class is from this module, this module is imported before vLLM, and installs the interpreter.
"""

from __future__ import annotations

from multiprocessing.context import SpawnContext, SpawnProcess

from services.generation.engine.environment import install_interpreter, interpreter_installed

if not interpreter_installed():
    install_interpreter()


class InterpretedRank(SpawnProcess):
    """Process of a rank."""


class _Context(SpawnContext):
    Process = InterpretedRank


def interpret_ranks() -> None:
    """Make vLLM in this process start ranks as `InterpretedRank` from now on."""
    import vllm.v1.executor.multiproc_executor as executor

    executor.get_mp_context = _Context
