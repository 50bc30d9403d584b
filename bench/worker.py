"""Run work in a separate process: a call by itself, or a process that answers orders through a pipe."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, Self, TypeVar

_ANSWER_SECONDS = 600.0
T = TypeVar("T")


def apart(function: Callable[..., T], *given: Any) -> T:
    """Call a function in a fresh process, whose memory is freed when it ends."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *given).result()


class WorkerFailed(RuntimeError):
    """The process raised an error, ended, or gave no answer in time; the message has its traceback, if any."""


class PipedWorker:
    """A fresh process that carries out orders one by one. Use it as a context manager.

    `build(*given)` runs in the process and returns the function from an order to its answer, which is no text: the
    process sends True once it is built, and the end of a traceback when it fails.
    """

    def __init__(self, build: Callable[..., Callable[[Any], Any]], *given: Any) -> None:
        """Start the process, with this process's environment as it is now."""
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, build, given), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        self.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None
        return self._process.pid

    def ask(self, order: Any) -> Any:
        """Return the answer to an order. WorkerFailed: there is none."""
        self.send(order)
        return self.wait()

    def send(self, order: Any) -> None:
        """Begin an order, whose answer `wait` returns."""
        self.pipe.send(order)

    def wait(self) -> Any:
        """Return the answer to the last order; True once the process is built. WorkerFailed: there is none."""
        try:
            if not self.pipe.poll(_ANSWER_SECONDS):
                raise WorkerFailed(f"no answer within {_ANSWER_SECONDS:.0f} s")
            answer = self.pipe.recv()
        except EOFError as ended:
            raise WorkerFailed("the process has ended") from ended
        if isinstance(answer, str):
            raise WorkerFailed(answer)
        return answer

    def close(self) -> None:
        """End the process, at once if it does not end by itself."""
        self.pipe.close()
        self._process.join(20)
        self.kill()

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.join()


def serve(pipe: Connection, build: Callable[..., Callable[[Any], Any]], given: tuple[Any, ...]) -> None:
    """Build, report it, and carry out orders until the pipe closes or an order fails."""
    try:
        carry_out = build(*given)
        pipe.send(True)
        while True:
            pipe.send(carry_out(pipe.recv()))
    except EOFError:
        return
    except BaseException:
        pipe.send(traceback.format_exc()[-3000:])


class UncountedDrafts:
    """Draft metrics that are dropped. A drafter that fails ends the benchmark, or it would look fast."""

    def verified(self, drafter: str, drafted: int, accepted: int, count: int) -> None:
        """Do nothing."""

    def fault(self, drafter: str) -> None:
        """Raise RuntimeError."""
        raise RuntimeError(f"drafter {drafter} failed")
