"""The ports of an instance's ranks, as its event loop and its engine thread use them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Protocol

from services.generation.loop import EngineLoop
from services.generation.migration.engine import MigrationEngine
from services.generation.migration.outgoing import Part, Sent
from services.generation.migration.port import KvPort
from services.generation.migration.reason import NotMoved

_POLL_SECONDS = 0.002


class Ports(Protocol):
    """What is waited for. All else is called through the engine, by its thread (`MigrationEngine.call_ports`)."""

    async def send(
        self, migration_id: str, addresses: Sequence[str], token: bytes, seconds: float, part: Part
    ) -> list[Sent]:
        """Have every rank send its part to its peer; by rank, what has arrived. NotMoved when one fails."""

    async def failures(self) -> dict[str, NotMoved]:
        """The samples that are expected here and whose connection is over, on any rank."""

    async def end(self, migration_id: str) -> None:
        """Close the connections of a sample that was sent."""


class LocalPort:
    """The port of the one rank, which is in this process: nobody has to wait for a step of the engine."""

    def __init__(self, port: KvPort) -> None:
        self._port = port

    async def send(
        self, migration_id: str, addresses: Sequence[str], token: bytes, seconds: float, part: Part
    ) -> list[Sent]:
        """See `Ports`."""
        return [await asyncio.wrap_future(self._port.send(migration_id, addresses, token, seconds, part))]

    async def failures(self) -> dict[str, NotMoved]:
        """See `Ports`."""
        return self._port.failures()

    async def end(self, migration_id: str) -> None:
        """See `Ports`."""
        self._port.end(migration_id)


class RankPorts:
    """The ports of ranks in processes of their own: they are asked between two steps."""

    def __init__(self, loop: EngineLoop, engine: MigrationEngine) -> None:
        self._loop = loop
        self._engine = engine

    async def send(
        self, migration_id: str, addresses: Sequence[str], token: bytes, seconds: float, part: Part
    ) -> list[Sent]:
        """See `Ports`."""
        await self._call("send", migration_id, tuple(addresses), token, seconds, part)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = await self._call("sent", migration_id)
            if all(sent is not None for sent in found):
                return found
            await asyncio.sleep(_POLL_SECONDS)
        raise TimeoutError(f"the ranks had not sent their KV after {seconds:.1f} s")

    async def failures(self) -> dict[str, NotMoved]:
        """See `Ports`."""
        return {name: error for rank in await self._call("failures") for name, error in rank.items()}

    async def end(self, migration_id: str) -> None:
        """See `Ports`."""
        await self._call("end", migration_id)

    async def _call(self, method: str, *args: object) -> list[Any]:
        return await asyncio.wrap_future(self._loop.call(lambda: self._engine.call_ports(method, *args)))
