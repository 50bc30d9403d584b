"""A real engine in a process of its own that runs functions of a test beside it.

    with RemoteEngine(EngineOptions(model=str(folder))) as engine:
        found = engine.run(roll, requests)          # roll(engine, requests), over there

Functions and what they take and give are pickled, so functions are those of a module. As with `EngineHost`,
starting one takes seconds: share it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Concatenate, ParamSpec, TypeVar

from services.generation.engine.runner_choice import V2
from services.generation.engine.types import EngineOptions
from tests.support.engine_process import EngineProcess, Failure

_START_SECONDS = 900
_RUN_SECONDS = 300
P = ParamSpec("P")
T = TypeVar("T")


class RemoteEngine(EngineProcess):
    """The parent's side. A context manager: the process ends with it."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(_serve, options, ranks=options.tensor_parallel_size, v2=options.engine == V2)
        try:
            self.answer(_START_SECONDS)
        except BaseException:
            self.kill()
            raise

    def run(self, function: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a function returns for the engine and these arguments. RuntimeError if it raised."""
        self.pipe.send((function, args, kwargs))
        result: T = self.answer(_RUN_SECONDS)
        return result


def _serve(pipe: Connection[Any, Any], options: EngineOptions) -> None:
    """The child: build the engine, run functions until the pipe closes."""
    from services.generation.engine.core import Engine

    engine = Engine(options)
    pipe.send(None)
    while True:
        function, args, kwargs = pipe.recv()
        try:
            answer = function(engine, *args, **kwargs)
        except Exception:
            answer = Failure(traceback.format_exc())
        pipe.send(answer)
