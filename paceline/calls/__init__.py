"""Every call of a gateway, once, as coroutines over a transport; one module for each service.

`AsyncClient` makes them on an event loop. `Client` makes the same ones without a loop: see `paceline.blocking`.
"""

from __future__ import annotations

from paceline.calls.caller import STREAM_SECONDS, RetryPolicy
from paceline.calls.fleet import FleetCalls, WeightUpdateCalls
from paceline.calls.rollouts import RolloutCalls
from paceline.shards import OpenShard, Shard, Shards
from paceline.transport.interface import Transport


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
        """The shards that runs are spread over; of a client of one deployment, that one."""
        return self._shards or Shards([OpenShard(Shard(""), self)])


__all__ = ["GatewayCalls"]
