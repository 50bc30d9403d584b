"""Ports of an instance's ranks, as the event loop uses them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from services.generation.engine.kv_types import MigrationEngine
from services.generation.kv_transfer.outgoing import KvPart, KvSent
from services.generation.kv_transfer.port import KvPort
from services.generation.kv_transfer.reason import NotMoved
from services.generation.loop.engine_loop import EngineLoop

_POLL_SECONDS = 0.002


class Ports:
    """Ports of all ranks.

    The port of an only rank is in this process and called at once. Those of several ranks are in processes of their
    own, and called by the engine thread between two steps.
    """

    def __init__(self, loop: EngineLoop, engine: MigrationEngine, local: KvPort | None) -> None:
        """Use `local` as the port of the only rank; None with several ranks."""
        self._loop = loop
        self._engine = engine
        self._local = local

    async def send(
        self, migration_id: str, addresses: Sequence[str], token: bytes, seconds: float, part: KvPart
    ) -> list[KvSent]:
        """Have every rank send its part to its peer; returns what has arrived, by rank. NotMoved when one fails."""
        if self._local is not None:
            sending = self._local.send(migration_id, addresses, token, seconds, part)
            return [await asyncio.wrap_future(sending)]
        await self._call("send", migration_id, tuple(addresses), token, seconds, part)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = await self._call("sent", migration_id)
            if all(sent is not None for sent in found):
                return found
            await asyncio.sleep(_POLL_SECONDS)
        raise TimeoutError(f"the ranks had not sent their KV after {seconds:.1f} s")

    async def failures(self) -> dict[str, NotMoved]:
        """Return the expected samples whose connection has failed on any rank, by migration id."""
        if self._local is not None:
            return self._local.failures()
        return {name: error for rank in await self._call("failures") for name, error in rank.items()}

    async def end(self, migration_id: str) -> None:
        """Close the connections of a sample that was sent."""
        if self._local is not None:
            self._local.end(migration_id)
        else:
            await self._call("end", migration_id)

    async def _call(self, method: str, *args: object) -> list[Any]:
        return await self._loop.execute(lambda: self._engine.call_ports(method, *args))
