"""A real engine in a process of its own that does what it is told, function by function.

with EngineActor(EngineOptions(model=str(folder), dtype="float32")) as actor:
    space = actor.call(free_blocks)     # a function of a module, called there with the engine
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from services.generation.engine.environment import V2
from services.generation.engine.types import EngineOptions
from tests.support.engine_process import EngineProcess

T = TypeVar("T")
# Generous: machines that run tests are shared.
_SECONDS = 120


class EngineActor(EngineProcess):
    """The parent's side. A context manager: the process ends with it."""

    def __init__(self, options: EngineOptions, core: int | None = None) -> None:
        """`core` is the one that it runs on; by default the last."""
        super().__init__(_serve, options, core=core, v2=options.engine == V2)

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Return the result of `function(engine, *args)`, or the exception that it raised."""
        self.pipe.send((function, args))
        answer: T | BaseException = self.answer(_SECONDS)
        if isinstance(answer, BaseException):
            raise answer
        return answer


def _serve(pipe: Connection[Any, Any], options: EngineOptions) -> None:
    from services.generation.engine.core import Engine

    engine = Engine(options)
    while True:
        function, args = pipe.recv()
        try:
            pipe.send(function(engine, *args))
        except Exception as error:
            error.add_note(traceback.format_exc())
            pipe.send(error)
