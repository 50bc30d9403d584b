"""Processes with an engine that answer over a pipe, forked from where vLLM is imported already (see `zygote`).

vLLM keeps global state and must be imported before numba, so an engine has a process to itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe, current_process
from multiprocessing.connection import Connection
from typing import Any, Self

from services.generation.engine.environment import RUNNER_VARIABLE
from tests.support.zygote import forked

_END_SECONDS = 20


@dataclass(frozen=True, slots=True)
class Failure:
    """What a process sends instead of an answer."""

    text: str


class EngineProcess:
    """The parent's side. A context manager: the process ends with it."""

    def __init__(
        self,
        serve: Callable[..., None],
        *args: Any,
        core: int | None = None,
        ranks: int = 1,
        v2: bool = False,
    ) -> None:
        """Have a process call `serve(pipe, *args)`, a function of a module.

        `core` is the one that it uses; by default the last. With more than one rank each has a core of its own.
        With `v2` vLLM's V2 runner was chosen before vLLM was imported.
        """
        cores = sorted(os.sched_getaffinity(0))
        core = cores[-1] if core is None else core
        binding = str(core) if ranks == 1 else "|".join(map(str, cores[:ranks]))
        own = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": binding, "HF_HUB_OFFLINE": "1"}
        if v2:
            own[RUNNER_VARIABLE] = "1"
        self.pipe, theirs = Pipe()
        command = [sys.executable, "-m", "tests.support.engine_process"]
        with os.fdopen(os.dup(2), "wb") as log:
            self._process = forked(command, os.environ | own, log, pipe=theirs.fileno(), v2=v2)
        theirs.close()
        # Tensors are shared between processes that have the same key.
        self.pipe.send((bytes(current_process().authkey), serve, args))

    def answer(self, seconds: float) -> Any:
        """Return what the process sends next. RuntimeError if it failed."""
        if not self.pipe.poll(seconds):
            raise TimeoutError(f"no answer from the engine process in {seconds} s")
        answer = self.pipe.recv()
        if isinstance(answer, Failure):
            raise RuntimeError(f"in the engine process:\n{answer.text}")
        return answer

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pipe.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()


def _main() -> None:
    pipe: Connection[Any, Any] = Connection(os.dup(0))
    current_process().authkey, serve, args = pipe.recv()
    try:
        serve(pipe, *args)
    except EOFError:
        return
    except BaseException:
        pipe.send(Failure(traceback.format_exc()))


if __name__ == "__main__":
    # Under its own name, by which it is pickled.
    from tests.support import engine_process

    engine_process._main()
    # Nothing is left to do, and to take vLLM apart takes a second and prints what leaks of it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
