"""The asynchronous client, on grpc.aio.

    async with paceline.AsyncClient("127.0.0.1:7400") as client:
        async for event in client.stream(run_id, batch_id):
            await train_on(event.sample)

Methods raise `PacelineError`.
"""

from __future__ import annotations

from typing import Self

from paceline.calls import GatewayCalls
from paceline.calls.caller import STREAM_SECONDS
from paceline.channel import Tls
from paceline.grpc_transport import AioTransport, ConnectionOptions
from paceline.retry import RetryPolicy
from paceline.run import AsyncRun
from paceline.weight_stream import WeightStream
from paceline.weights import WeightFolder


class AsyncClient(GatewayCalls):
    """Client of one deployment for one event loop.

    It follows the gateway that leads. A call that finds none, or a full one, is repeated by the retry policy; a
    stream continues where it was cut.
    All methods raise `PacelineError`.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        tls: Tls | None = None,
        timeout: float = 30.0,
        slow_timeout: float = 600.0,
        stream_seconds: float = STREAM_SECONDS,
        leaders_only: bool = True,
        retry: RetryPolicy | None = None,
    ) -> None:
        """Connect on the first call. Timeouts are seconds for one attempt; weights and drain are slow.

        `address` is host:port, or several with commas between, of which one leads. A stream is opened again, where
        it is, every `stream_seconds`. Without `leaders_only` any gateway is called: knobs, decisions and the
        drafter need no leader.
        """
        self.address = address
        options = ConnectionOptions(address, tls, token, timeout, slow_timeout, leaders_only)
        super().__init__(AioTransport(options), retry, stream_seconds)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def run(
        self, run_id: str, *, seed: int = 0, weights: WeightFolder | WeightStream | None = None
    ) -> AsyncRun:
        """Return a training job: its rollouts are seeded by `seed`, its weights go by `weights`.

        The default is a `WeightStream()`, for a trainer that reaches the instances.
        """
        return AsyncRun(self, run_id, seed, weights)
