"""An instance as it is, whose rounds are begun and ended over a socket: `BENCH_EVENT_LOOP` names its path.

A request is a line of JSON, and so is its answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict
from typing import Any

from bench.event_loop.boundary import Boundary
from bench.event_loop.loads import SilentStream, requests
from bench.event_loop.turns import TurnClock
from services.generation import __main__ as instance
from services.generation.build import GenerationProcess
from services.generation.config import GenerationConfig
from services.platform.process import Shutdown, run

SOCKET = "BENCH_EVENT_LOOP"
_PRIORITY = 1


class Rounds:
    """Rounds of one instance, whose threads are laid out anew for each."""

    def __init__(self, process: GenerationProcess) -> None:
        self._loop = process.loop
        self._boundary = Boundary(process.loop.ready.result())
        self._clock = TurnClock(process.loop)

    async def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Carry out a request."""
        if asked["do"] == "begin":
            sys.setswitchinterval(asked["switch_seconds"])
            first = self._lay_out(asked["engine_core"], asked["other_cores"])
            self._clock.begin(asked["samples"])
            return {"first": first}
        if asked["do"] == "silent":
            await self._silently(asked["samples"], asked["tokens"])
            return {}
        if asked["do"] == "boundary":
            return await self._loop.execute(self._boundary.seconds)
        return asdict(self._clock.end())

    async def _silently(self, samples: int, tokens: int) -> None:
        """Run samples without a client: nobody is told anything."""
        loop, stream = self._loop, SilentStream(asyncio.get_running_loop())

        def start() -> None:
            for handle, request in enumerate(requests(loop.next_sample_id, samples, tokens)):
                loop.start_sample(stream, handle, request)

        await loop.execute(start)
        await stream.over.wait()

    def _lay_out(self, engine: int, others: list[int]) -> bool:
        """Give the engine thread a core, and all others theirs, before all other programs there.

        Returns False where the kernel does not let them go first.
        """
        first = True
        for thread in map(int, os.listdir("/proc/self/task")):
            own = thread == self._clock.thread
            os.sched_setaffinity(thread, {engine} if own else set(others))
            if not own:
                # A thread that holds the GIL and has lost its core to a gateway would keep the engine waiting.
                alone = engine not in others
                try:
                    os.sched_setscheduler(
                        thread,
                        os.SCHED_RR if alone else os.SCHED_OTHER,
                        os.sched_param(_PRIORITY if alone else 0),
                    )
                except PermissionError:
                    first = False
        return first


async def serve(config: GenerationConfig, shutdown: Shutdown) -> None:
    """Serve as an instance does, and answer the benchmark."""
    built: asyncio.Future[Rounds] = asyncio.get_running_loop().create_future()
    build = instance.build

    async def build_and_tell(*args: Any) -> GenerationProcess:
        process = await build(*args)
        built.set_result(Rounds(process))
        return process

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(json.dumps(await (await built).answer(json.loads(line))).encode() + b"\n")
            await writer.drain()
        writer.close()

    instance.build = build_and_tell  # type: ignore[assignment]
    async with await asyncio.start_unix_server(answer, os.environ[SOCKET]):
        await instance.serve(config, shutdown)


if __name__ == "__main__":
    run("generation", serve, GenerationConfig)
