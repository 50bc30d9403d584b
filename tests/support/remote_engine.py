"""A real engine in a process of its own that runs functions of a test beside it.

    with RemoteEngine(EngineOptions(model=str(folder))) as engine:
        found = engine.run(roll, requests)          # roll(engine, requests), over there

Functions and what they take and give are pickled, so functions are those of a module. As with `EngineHost`,
starting one takes about ten seconds: share it.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Concatenate, ParamSpec, TypeVar

from services.generation.engine.types import EngineOptions
from tests.support.forkserver import engine_context

_START_SECONDS = 300
_RUN_SECONDS = 300
P = ParamSpec("P")
T = TypeVar("T")


class RemoteEngine:
    """The parent's side. A context manager: the process ends with it."""

    def __init__(self, options: EngineOptions) -> None:
        context = engine_context()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, options), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._answer(_START_SECONDS)
        except BaseException:
            self._process.kill()
            raise

    def run(self, function: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a function returns for the engine and these arguments. RuntimeError if it raised."""
        self._pipe.send((function, args, kwargs))
        result: T = self._answer(_RUN_SECONDS)
        return result

    def _answer(self, seconds: float) -> Any:
        if not self._pipe.poll(seconds):
            raise TimeoutError(f"no answer from the engine process in {seconds} s")
        answer = self._pipe.recv()
        if isinstance(answer, _Failure):
            raise RuntimeError(f"in the engine process:\n{answer.text}")
        return answer

    def __enter__(self) -> RemoteEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@dataclass(frozen=True, slots=True)
class _Failure:
    text: str


def _serve(pipe: Connection, options: EngineOptions) -> None:
    """The child: build the engine, run functions until the pipe closes."""
    core = str(max(os.sched_getaffinity(0)))
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": core, "HF_HUB_OFFLINE": "1"}
    try:
        from services.generation.engine.core import Engine

        engine = Engine(options)
        pipe.send(None)
        while True:
            function, args, kwargs = pipe.recv()
            try:
                answer = function(engine, *args, **kwargs)
            except Exception:
                answer = _Failure(traceback.format_exc())
            pipe.send(answer)
    except EOFError:
        return
    except BaseException:
        pipe.send(_Failure(traceback.format_exc()))
