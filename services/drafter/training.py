"""The service's side of the process that trains."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import structlog

from services.drafter.checkpoint import Checkpoint
from services.drafter.config import DrafterConfig
from services.drafter.messages import FACTORY, Begin, Compared, Failed, Part, Updated
from services.drafter.rollout import Rollout
from services.platform.lifeline import tied

log = structlog.get_logger(__name__)


class Died(Exception):
    """The process that trains is gone; what it had not saved is lost."""


class Training:
    """One process that trains, and what it can be asked for. One call at a time; start it from the main thread.

    Methods raise Failed when the learner does, and Died when the process is gone.
    """

    def __init__(self, config: DrafterConfig, factory: str = FACTORY) -> None:
        self._config = config
        self._factory = factory
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._thread: ThreadPoolExecutor | None = None

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    async def start(self) -> None:
        """Starts the process, and has it load the policy and the first drafter."""
        ours, theirs = socket.socketpair()
        environment = dict(os.environ)
        if self._config.threads:
            environment |= {"OMP_NUM_THREADS": str(self._config.threads)}
        with theirs:
            # Tied to the thread that starts it, so not through the loop's own helper.
            self._process = subprocess.Popen(  # noqa: ASYNC220
                tied([sys.executable, "-m", "services.drafter.trainer", str(theirs.fileno())]),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
                start_new_session=True,
            )
        self._pipe = Connection(ours.detach())
        self._thread = ThreadPoolExecutor(1, "training")
        await self._exchange(Begin(self._config, self._factory))

    async def stop(self) -> None:
        """Ends the process at once, whatever it does; harmless when there is none."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.wait)
        thread, self._thread = self._thread, None
        if thread is not None:
            # Whoever waits in there for an answer has had the end of the pipe by now.
            await asyncio.to_thread(thread.shutdown)
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.close()

    async def load_state(self, path: Path) -> None:
        """Goes on from a state of an earlier process."""
        await self._call("load_state", path)

    async def save_state(self, path: Path) -> None:
        """Writes the state to a file."""
        await self._call("save_state", path)

    async def adopt(self, path: Path, sha256: str) -> None:
        """Goes on from a drafter."""
        await self._call("adopt", path, sha256)

    async def save(self, parent: Path, version: int) -> Checkpoint:
        """Writes the drafter as a version."""
        saved: Checkpoint = await self._call("save", parent, version)
        return saved

    async def update(self, parts: Sequence[Part]) -> Updated:
        """Learns from rollouts."""
        updated: Updated = await self._call("update", tuple(parts))
        return updated

    async def compare(self, rollouts: Sequence[Rollout], current: Path | None) -> Compared:
        """Measures the drafter, and the one in use, on rollouts."""
        compared: Compared = await self._call("compare", tuple(rollouts), current)
        return compared

    async def _call(self, name: str, *arguments: Any) -> Any:
        return await self._exchange((name, arguments))

    async def _exchange(self, message: Any) -> Any:
        pipe, thread = self._pipe, self._thread
        if pipe is None or thread is None:
            raise Died("the process that trains was not started")
        loop = asyncio.get_running_loop()
        try:
            good, result = await loop.run_in_executor(thread, _ask, pipe, message)
        except (EOFError, OSError) as error:
            raise Died(f"the process that trains is gone: {error!r}") from error
        if not good:
            raise Failed(result)
        return result


def _ask(pipe: Connection, message: Any) -> Any:
    pipe.send(message)
    return pipe.recv()
