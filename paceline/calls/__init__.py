"""Calls of a gateway, as coroutines over a transport.

`AsyncClient` makes them on an event loop, and `Client` without one (see `paceline.blocking`). `calls.rollouts` has
the calls of RolloutService, `calls.fleet` the calls of FleetService and WeightService.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NoReturn, TypeVar

import grpc

from paceline.calls.caller import STREAM_SECONDS, RetryPolicy
from paceline.calls.fleet import FleetCalls, WeightUpdateCalls
from paceline.calls.rollouts import RolloutCalls
from paceline.errors import shard_not_named
from paceline.shards import OpenShard, Shards
from paceline.transport.channel import Tls
from paceline.transport.interface import Ended, Stream, Transport, Unary

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
        if shards is not None:
            self.shards = shards

    @cached_property
    def shards(self) -> Shards:
        """The shards that runs are spread over; with one deployment, a single shard that is this object."""
        return Shards([OpenShard("", calls=self)])


class SeveralTransports:
    """Transport of a client of several shards: it refuses calls, which must be made on one shard."""

    def __init__(self, members: Sequence[OpenShard]) -> None:
        self._calls = [member.calls for member in members]
        self._names = [member.name for member in members]

    async def send(self, unary: Unary) -> Any:
        self._refuse(unary.method)

    def post(self, unary: Unary, ended: Ended) -> None:
        self._refuse(unary.method)

    def open(self, stream: Stream[Any], seconds: float | None) -> NoReturn:
        self._refuse(stream.method)

    async def sleep(self, seconds: float) -> bool:
        return await self._calls[0].sleep(seconds)

    async def run_work(self, work: Callable[[], R]) -> R:
        return await self._calls[0].run_work(work)

    async def lacks_tls(self) -> bool:
        return False

    def dial(self, address: str, tls: Tls | None) -> grpc.Channel:
        return self._calls[0].dial(address, tls)

    async def close(self) -> None:
        for calls in self._calls:
            await calls.close()

    def _refuse(self, method: str) -> NoReturn:
        raise shard_not_named(method, self._names)


__all__ = ["GatewayCalls", "SeveralTransports"]
