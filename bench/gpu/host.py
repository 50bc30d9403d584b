"""Run the processes that carry out orders, one at a time: with an engine, with kernels, or with the device alone.

A process that fails at an order, or is late, is ended: an engine does not continue after an error, and a device's
context may be corrupted. The next order gets a new process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

from bench.worker import PipedWorker


class OrderFailed(RuntimeError):
    """The process raised an error or ended; the message is the end of its traceback."""


class OrderLate(RuntimeError):
    """The order was not carried out in time."""


class StartFailed(OrderFailed):
    """The process raised an error or ended before it took orders."""


class StartLate(OrderLate):
    """The process was not ready for orders in time."""


class WorkerSetup(Protocol):
    """Frozen, picklable description of a process. Orders with equal setups can share one process."""

    @property
    def start_seconds(self) -> float:
        """Estimated seconds until the process takes orders."""
        ...

    def orders(self) -> Any:
        """Build the setup in the process; return the object whose methods are the orders."""
        ...


class Worker(Protocol):
    """A process behind a pipe, which sends True once it is built."""

    pipe: Connection[Any, Any]

    def kill(self) -> None:
        """End the process at once."""


class SpawnedWorker(PipedWorker):
    """A fresh Python process, so that vLLM and Triton are imported after the environment that they read is set."""

    def __init__(self, setup: WorkerSetup) -> None:
        super().__init__(build_orders, setup)


Start = Callable[[Any], Worker]


class WorkerHost:
    """Keep the process of the last order for the next order with the same setup. A context manager."""

    def __init__(self, start: Start = SpawnedWorker) -> None:
        self._start = start
        self._setup: WorkerSetup | None = None
        self._worker: Worker | None = None

    def __enter__(self) -> WorkerHost:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def has(self, setup: WorkerSetup) -> bool:
        """Return True if a process with this setup is running."""
        return self._worker is not None and self._setup == setup

    def ask(
        self, setup: WorkerSetup, order: str, arguments: dict[str, Any], seconds: float
    ) -> dict[str, Any]:
        """Carry out an order, in a new process if none with this setup is running.

        Raises:
            OrderFailed: the process raised an error or ended; StartFailed: it did so before it took the order.
            OrderLate: the order and the start of its process took longer than `seconds`; StartLate: the start did.
        """
        deadline = time.monotonic() + seconds
        try:
            if not self.has(setup):
                self.close()
                self._worker, self._setup = self._start(setup), setup
                try:
                    self._answer(deadline)
                except OrderFailed as error:
                    raise StartFailed(str(error)) from error
                except OrderLate as error:
                    raise StartLate(str(error)) from error
            assert self._worker is not None
            self._worker.pipe.send((order, arguments))
            found: dict[str, Any] = self._answer(deadline)
        except BaseException:
            self.close()
            raise
        return found

    def close(self) -> None:
        """End the process, if there is one."""
        if self._worker is not None:
            self._worker.pipe.close()
            self._worker.kill()
        self._worker = self._setup = None

    def _answer(self, deadline: float) -> Any:
        assert self._worker is not None
        try:
            if not self._worker.pipe.poll(max(0.0, deadline - time.monotonic())):
                raise OrderLate("the order took too long and was ended")
            answer = self._worker.pipe.recv()
        except (EOFError, OSError) as error:
            raise OrderFailed("the process has ended; its output is above") from error
        if isinstance(answer, str):
            raise OrderFailed(answer)
        return answer


def build_orders(setup: WorkerSetup) -> Callable[[tuple[str, dict[str, Any]]], Any]:
    """Return the function from the name of an order and its arguments to its result."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    orders = setup.orders()
    return lambda order: getattr(orders, order[0])(**order[1])
