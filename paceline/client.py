"""The synchronous client.

    with paceline.Client("127.0.0.1:7400") as client, client.run("run-1", seed=7) as run:
        for step in range(steps):
            samples = list(run.rollout(step, groups, SamplingParams(max_tokens=512)))
            run.push_weights(learner.update(samples))

Methods raise `PacelineError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from paceline.blocking import Face, blocking, blocking_stream
from paceline.blocking_run import Run
from paceline.calls import GatewayCalls
from paceline.calls.caller import STREAM_SECONDS
from paceline.channel import Tls
from paceline.connection_options import ConnectionOptions, connect_again
from paceline.grpc_transport import BlockingTransport
from paceline.retry import RetryPolicy
from paceline.run import AsyncRun, WeightTransport
from paceline.shards import Shard, shards_of
from paceline.shards.concurrency import Threads
from paceline.shards.opening import connect
from paceline.transport import Transport


class Client(Face[GatewayCalls]):
    """Client of one deployment, or of several shards. Thread-safe.

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
        or `Shard`, for each of several deployments. Runs are spread over these, with a thread for each; any other
        call is made on one of them, `client.shard(name)`. A stream is opened again, where it is, every
        `stream_seconds`. Without `leaders_only` any gateway is called: knobs, decisions and the drafter need no
        leader. `use_proxy` goes through a proxy that the environment names, except to this machine. A token is not
        sent in plain text beyond this machine, unless `insecure`.

        Where no token is given it is looked for: PACELINE_TOKEN, the file that PACELINE_TOKEN_FILE names, or that
        of the platform that this user runs at this address of this machine. An empty one says that there is none.

        ValueError: an address cannot be meant, or the token would go there in plain text.
        """
        self.address = address
        options = ConnectionOptions("", tls, token, timeout, slow_timeout, leaders_only, use_proxy, insecure)
        self._made_with = (options, {"retry": retry, "stream_seconds": stream_seconds})

        def transport_to(address: str) -> BlockingTransport:
            return BlockingTransport(replace(options, address=address))

        def calls_on(transport: Transport) -> GatewayCalls:
            return GatewayCalls(transport, retry, stream_seconds)

        transport, shards = connect(shards_of(address), transport_to, calls_on, Threads())
        super().__init__(GatewayCalls(transport, retry, stream_seconds, shards))

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what makes it again in another process, where it connects anew."""
        return connect_again, (type(self), self.address, *self._made_with)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def shard(self, name: str) -> Client:
        """Return a client of one of several shards, on this client's connection. ValueError: there is none."""
        member = self._core.shards.member(name)
        client = object.__new__(type(self))
        client.address, client._core = member.shard.address, member.calls
        client._made_with = self._made_with
        return client

    def deployments(self) -> list[Client]:
        """Return a client of each shard, on this one's connections; without shards this client alone."""
        shards = self._core.shards
        return [self] if shards.alone else [self.shard(member.name) for member in shards.members]

    def run(self, run_id: str, *, seed: int = 0, weights: WeightTransport | None = None) -> Run:
        """Return a training job: its rollouts are seeded by `seed`, its weights go by `weights`.

        The default is a `WeightStream()`, for a trainer that reaches the instances.
        """
        return Run(self, AsyncRun(self._core, run_id, seed, weights))

    close = blocking(GatewayCalls.close)

    # Rollouts
    submit = blocking(GatewayCalls.submit)
    stream = blocking_stream(GatewayCalls.stream)
    ack = blocking(GatewayCalls.ack)
    generate = blocking_stream(GatewayCalls.generate)
    cancel = blocking(GatewayCalls.cancel)
    hint = blocking(GatewayCalls.hint)
    report_rewards = blocking(GatewayCalls.report_rewards)
    report_single_rewards = blocking(GatewayCalls.report_single_rewards)
    open_batch = blocking(GatewayCalls.open_batch)
    add_samples = blocking(GatewayCalls.add_samples)
    close_batch = blocking(GatewayCalls.close_batch)
    continue_samples = blocking(GatewayCalls.continue_samples)
    batch = blocking(GatewayCalls.batch)
    batches = blocking_stream(GatewayCalls.batches)
    end_run = blocking(GatewayCalls.end_run)

    # Weights
    start_update = blocking(GatewayCalls.start_update)
    update_weights = blocking(GatewayCalls.update_weights)
    start_stream = blocking(GatewayCalls.start_stream)
    start_collective = blocking(GatewayCalls.start_collective)
    update_streamed = blocking(GatewayCalls.update_streamed)
    finish_update = blocking(GatewayCalls.finish_update)
    abort_update = blocking(GatewayCalls.abort_update)
    versions = blocking(GatewayCalls.versions)

    # Fleet
    instances = blocking(GatewayCalls.instances)
    watch_fleet = blocking_stream(GatewayCalls.watch_fleet)
    pause = blocking(GatewayCalls.pause)
    resume = blocking(GatewayCalls.resume)
    drain = blocking(GatewayCalls.drain)
    knobs = blocking(GatewayCalls.knobs)
    set_knobs = blocking(GatewayCalls.set_knobs)
    drafter = blocking(GatewayCalls.drafter)
    roll_back_drafter = blocking(GatewayCalls.roll_back_drafter)
    watch_decisions = blocking_stream(GatewayCalls.watch_decisions)
