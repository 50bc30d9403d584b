"""A real engine in a process of its own that runs functions of a test beside it.

    with RemoteEngine(EngineOptions(model=str(folder))) as engine:
        found = engine.run(roll, requests)          # roll(engine, requests), over there

Functions and what they take and give are pickled, so functions are those of a module. As with `EngineHost`,
starting one takes seconds: share it.

The ranks of an engine on V1 are forked from its process. vLLM starts them anew on CPU, and each then imports vLLM
once more, which takes as long as all that a test does with them. `tensor_parallel/test_instance` has them so.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any, Concatenate, ParamSpec, TypeVar

from services.generation.engine.environment import V2
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


class _Rank(ForkProcess):
    """Process of a rank: its configuration is pickled, as for a process that starts anew."""

    def __init__(self, *args: Any, kwargs: dict[str, Any], **others: Any) -> None:
        config = pickle.loads(pickle.dumps(kwargs["vllm_config"]))
        super().__init__(*args, kwargs=kwargs | {"vllm_config": config}, **others)


class _Context(ForkContext):
    Process = _Rank


def _fork_ranks() -> None:
    """Have vLLM fork the ranks, and have them sleep while they wait for a message.

    Otherwise a rank polls for a second after each message, and then sleeps until a notification, which it may miss.
    The lookup of embeddings, which each rank would compile by itself, runs uncompiled.
    """
    import torch._dynamo
    import vllm.distributed.device_communicators.shm_broadcast as messages
    import vllm.v1.executor.multiproc_executor as executor

    executor.get_mp_context = _Context
    messages.SpinCondition.__init__.__defaults__ = (0,)
    messages.SHM_READER_RECHECK_INTERVAL_MS = 5
    torch._dynamo.config.disable = True


def _serve(pipe: Connection[Any, Any], options: EngineOptions) -> None:
    """The child: build the engine, run functions until the pipe closes."""
    from services.generation.engine.core import Engine

    if options.tensor_parallel_size > 1 and options.engine != V2:
        _fork_ranks()
    engine = Engine(options)
    pipe.send(None)
    while True:
        function, args, kwargs = pipe.recv()
        try:
            answer = function(engine, *args, **kwargs)
        except Exception:
            answer = Failure(traceback.format_exc())
        pipe.send(answer)
