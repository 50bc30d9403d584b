"""The asynchronous client, on grpc.aio.

    async with paceline.AsyncClient("127.0.0.1:7400") as client:
        async for event in client.stream(run_id, batch_id):
            await train_on(event.sample)

Methods raise `PacelineError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from paceline.calls import GatewayCalls
from paceline.calls.caller import STREAM_SECONDS
from paceline.channel import Tls
from paceline.connection_options import ConnectionOptions, connect_again
from paceline.grpc_transport import AioTransport
from paceline.retry import RetryPolicy
from paceline.run import AsyncRun, WeightTransport
from paceline.shards import Shard, shards_of
from paceline.shards.concurrency import Tasks
from paceline.shards.opening import connect
from paceline.transport import Transport


class AsyncClient(GatewayCalls):
    """Client of one deployment, or of several shards, for one event loop.

    It follows the gateway that leads. A call that finds none, or a full one, is repeated by the retry policy; a
    stream continues where it was cut.
    All methods raise `PacelineError`.
    """

    def __init__(
        self,
        address: str | Sequence[str | Shard],
        *,
        token: str | None = None,
        tls: Tls | None = None,
        timeout: float = 30.0,
        slow_timeout: float = 600.0,
        stream_seconds: float = STREAM_SECONDS,
        leaders_only: bool = True,
        retry: RetryPolicy | None = None,
        use_proxy: bool = False,
        insecure: bool = False,
    ) -> None:
        """Connect on the first call. Timeouts are seconds for one attempt; weights and drain are slow.

        `address` is host:port, or several with commas between, of which one leads; or a list with one such address,
        or `Shard`, for each of several deployments. Runs are spread over these; any other call is made on one of
        them, `client.shard(name)`. A stream is opened again, where it is, every `stream_seconds`. Without
        `leaders_only` any gateway is called: knobs, decisions and the drafter need no leader. `use_proxy` goes
        through a proxy that the environment names, except to this machine. A token is not sent in plain text beyond
        this machine, unless `insecure`.

        Where no token is given it is looked for: PACELINE_TOKEN, the file that PACELINE_TOKEN_FILE names, or that
        of the platform that this user runs at this address of this machine. An empty one says that there is none.

        ValueError: an address cannot be meant, or the token would go there in plain text.
        """
        self.address = address
        options = ConnectionOptions("", tls, token, timeout, slow_timeout, leaders_only, use_proxy, insecure)
        self._made_with = (options, {"retry": retry, "stream_seconds": stream_seconds})

        def transport_to(address: str) -> AioTransport:
            return AioTransport(replace(options, address=address))

        def calls_on(transport: Transport) -> GatewayCalls:
            return GatewayCalls(transport, retry, stream_seconds)

        transport, shards = connect(shards_of(address), transport_to, calls_on, Tasks())
        super().__init__(transport, retry, stream_seconds, shards)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what makes it again in another process, where it connects anew, on the event loop there."""
        return connect_again, (type(self), self.address, *self._made_with)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def shard(self, name: str) -> GatewayCalls:
        """Return the calls of one of several shards, on this client's connection. ValueError: there is none."""
        return self.shards.member(name).calls

    def run(self, run_id: str, *, seed: int = 0, weights: WeightTransport | None = None) -> AsyncRun:
        """Return a training job: its rollouts are seeded by `seed`, its weights go by `weights`.

        The default is a `WeightStream()`, for a trainer that reaches the instances.
        """
        return AsyncRun(self, run_id, seed, weights)
