"""Open the connections of a client: one to its deployment, or one to each shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import grpc

from paceline import client_errors
from paceline.channel import Tls
from paceline.shards.assignment import Shard
from paceline.shards.concurrency import Concurrency
from paceline.shards.members import OpenShard, Shards
from paceline.transport import Ended, Stream, Transport, Unary

if TYPE_CHECKING:
    from paceline.calls import GatewayCalls

R = TypeVar("R")


def connect(
    shards: Sequence[Shard],
    transport_to: Callable[[str], Transport],
    calls_on: Callable[[Transport], GatewayCalls],
    concurrency: Concurrency,
) -> tuple[Transport, Shards | None]:
    """Return the transport of a client's own calls, and its shards if there are several."""
    transports = [transport_to(shard.address) for shard in shards]
    if len(shards) == 1:
        return transports[0], None
    members = [
        OpenShard(shard, calls_on(transport)) for shard, transport in zip(shards, transports, strict=True)
    ]
    return _SeveralTransports(transports, [shard.name for shard in shards]), Shards(members, concurrency)


class _SeveralTransports:
    """Transport of a client of several shards: it refuses calls that would have to name their shard."""

    def __init__(self, transports: Sequence[Transport], names: Sequence[str]) -> None:
        self._transports = transports
        self._names = names

    async def send(self, unary: Unary) -> Any:
        self._refuse(unary.method)

    def post(self, unary: Unary, ended: Ended) -> None:
        self._refuse(unary.method)

    def open(self, stream: Stream[Any], seconds: float | None) -> NoReturn:
        self._refuse(stream.method)

    async def sleep(self, seconds: float) -> bool:
        return await self._transports[0].sleep(seconds)

    async def run_work(self, work: Callable[[], R]) -> R:
        return await self._transports[0].run_work(work)

    async def lacks_tls(self) -> bool:
        return False

    def dial(self, address: str, tls: Tls | None) -> grpc.Channel:
        return self._transports[0].dial(address, tls)

    async def close(self) -> None:
        for transport in self._transports:
            await transport.close()

    def _refuse(self, method: str) -> NoReturn:
        raise client_errors.shard_not_named(method, self._names)
