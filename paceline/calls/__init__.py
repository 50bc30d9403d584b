"""Calls of a gateway, as coroutines over a transport.

`AsyncClient` makes them on an event loop, and `Client` without one (see `paceline.blocking`). `calls.rollouts` has
the calls of RolloutService, `calls.fleet` the calls of FleetService and WeightService.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import grpc

from paceline.calls.caller import STREAM_SECONDS, RetryPolicy
from paceline.calls.fleet import FleetCalls, WeightUpdateCalls
from paceline.calls.rollouts import RolloutCalls
from paceline.errors import shard_not_named
from paceline.shards import OpenShard, Shard, Shards, shards_of
from paceline.shards.concurrency import Concurrency
from paceline.transport.channel import Tls
from paceline.transport.interface import Ended, Stream, Transport, Unary
from paceline.transport.options import ConnectionOptions

R = TypeVar("R")


class GatewayCalls(RolloutCalls, WeightUpdateCalls, FleetCalls):
    """The calls of all services of a gateway.

    A call that finds the gateway unreachable is repeated by the retry policy; a stream continues where it was cut.
    All methods raise `PacelineError`.
    """

    def __init__(
        self,
        transport: Transport,
        retry: RetryPolicy | None = None,
        stream_seconds: float = STREAM_SECONDS,
        shards: Shards | None = None,
    ) -> None:
        super().__init__(transport, retry, stream_seconds)
        self._shards = shards

    @property
    def shards(self) -> Shards:
        """The shards that runs are spread over; with one deployment, a single shard that is this object."""
        return self._shards or Shards([OpenShard(Shard(""), self)])


def connect(
    address: str | Sequence[str | Shard],
    options: ConnectionOptions,
    retry: RetryPolicy | None,
    stream_seconds: float,
    transport_to: Callable[[ConnectionOptions], Transport],
    concurrency: Concurrency,
) -> tuple[Transport, Shards | None]:
    """Return the transport of a client's calls; with several deployments, a refusing one and the shards."""
    shards = shards_of(address)
    transports = [transport_to(replace(options, address=shard.address)) for shard in shards]
    if len(shards) == 1:
        return transports[0], None
    members = [
        OpenShard(shard, GatewayCalls(transport, retry, stream_seconds))
        for shard, transport in zip(shards, transports, strict=True)
    ]
    return _SeveralTransports(transports, [shard.name for shard in shards]), Shards(members, concurrency)


class _SeveralTransports:
    """Transport of a client of several shards: it refuses calls, which must be made on one shard."""

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
        raise shard_not_named(method, self._names)


__all__ = ["GatewayCalls", "connect"]
