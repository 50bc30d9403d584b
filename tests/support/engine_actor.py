"""A real engine in a process of its own that does what it is told, function by function.

with EngineActor(EngineOptions(model=str(folder), dtype="float32")) as actor:
    space = actor.call(free_blocks)     # a function of a module, called there with the engine
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from services.generation.engine.types import EngineOptions
from tests.support.forkserver import engine_context

T = TypeVar("T")
# Generous: machines that run tests are shared.
_SECONDS = 120


class EngineActor:
    """The parent's side. A context manager: the process ends with it."""

    def __init__(self, options: EngineOptions, core: int | None = None) -> None:
        """`core` is the one that it runs on; by default the last."""
        context = engine_context()
        self._pipe, theirs = context.Pipe()
        core = max(os.sched_getaffinity(0)) if core is None else core
        self._process = context.Process(target=_serve, args=(theirs, options, core), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """The result of `function(engine, *args)`, or the exception that it raised."""
        self._pipe.send((function, args))
        if not self._pipe.poll(_SECONDS):
            raise TimeoutError(f"no answer from the engine process in {_SECONDS} s")
        answer: T | BaseException = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def __enter__(self) -> EngineActor:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection, options: EngineOptions, core: int) -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": str(core), "HF_HUB_OFFLINE": "1"}
    from services.generation.engine.core import Engine

    engine = Engine(options)
    try:
        while True:
            function, args = pipe.recv()
            try:
                pipe.send(function(engine, *args))
            except Exception as error:
                error.add_note(traceback.format_exc())
                pipe.send(error)
    except EOFError:
        return
