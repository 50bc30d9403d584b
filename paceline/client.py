"""The synchronous client: a training job, its rollouts and its sessions.

    with paceline.Client("127.0.0.1:7400") as client, client.run("run-1", seed=7) as run:
        for step in range(steps):
            samples = list(run.rollout(step, groups, SamplingParams(max_tokens=512)))
            run.push_weights(learner.update(samples))

Every class here is the blocking face of an asynchronous one, which has the code (see `paceline.blocking`). Methods
raise `PacelineError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self, Unpack

from paceline import types as t
from paceline.aio import AsyncRun, RolloutOptions, WeightTransport
from paceline.batches.rollout import AsyncOpenBatch, AsyncRollout
from paceline.batches.sessions import AsyncSession, AsyncSessions
from paceline.blocking import (
    Face,
    blocking,
    blocking_context,
    blocking_face,
    blocking_stream,
    finish,
    iterate,
)
from paceline.calls import GatewayCalls, connect
from paceline.calls.caller import STREAM_SECONDS, RetryPolicy
from paceline.shards import Shard
from paceline.shards.concurrency import Threads
from paceline.transport.channel import Tls
from paceline.transport.grpc import BlockingTransport
from paceline.transport.options import ConnectionOptions


class Client(Face[GatewayCalls]):
    """Client of one deployment, or of several shards. Thread-safe.

    It follows the gateway that leads. A call that finds no gateway, or a full one, is repeated by the retry policy;
    a stream continues where it was cut. All methods raise `PacelineError`.
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
        """Connect on the first call.

        Args:
            address: host:port, or several with commas between, of which one leads; or a list with one such address,
                or `Shard`, for each of several deployments. Runs are spread over these, with a thread for each; any
                other call is made on one of them, `client.shard(name)`.
            token: None looks for one: PACELINE_TOKEN, the file that PACELINE_TOKEN_FILE names, or the file of the
                platform that this user runs at this address of this machine. Empty: there is none.
            tls: None connects in plain text.
            timeout: seconds for one attempt at a call.
            slow_timeout: the same for weights and drain, which wait for instances.
            stream_seconds: a stream is opened again where it is after this time.
            leaders_only: False calls any gateway: knobs, decisions and the drafter need no leader.
            retry: limits and delays of retries.
            use_proxy: connect through a proxy that the environment names, except to this machine.
            insecure: send the token in plain text beyond this machine.

        Raises:
            ValueError: an address is invalid, or the token would be sent there in plain text.
        """
        options = ConnectionOptions("", tls, token, timeout, slow_timeout, leaders_only, use_proxy, insecure)
        self._connect(address, options, retry, stream_seconds)

    def _connect(
        self,
        address: str | Sequence[str | Shard],
        options: ConnectionOptions,
        retry: RetryPolicy | None,
        stream_seconds: float,
    ) -> None:
        self.address = address
        self._made_with = (options, retry, stream_seconds)
        transport, shards = connect(address, options, retry, stream_seconds, BlockingTransport, Threads())
        super().__init__(GatewayCalls(transport, retry, stream_seconds, shards))

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to create the client in another process, where it connects on its first call."""
        return _reconnect, (type(self), self.address, *self._made_with)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def shard(self, name: str) -> Client:
        """Return a client of one of several shards, on this client's connection. ValueError: no such shard."""
        member = self._core.shards.member(name)
        client = object.__new__(type(self))
        client.address, client._core = member.shard.address, member.calls
        client._made_with = self._made_with
        return client

    def deployments(self) -> list[Client]:
        """Return a client of each shard, on this client's connections; with one deployment, this client."""
        shards = self._core.shards
        return [self] if shards.alone else [self.shard(member.name) for member in shards.members]

    def run(self, run_id: str, *, seed: int = 0, weights: WeightTransport | None = None) -> Run:
        """Return a training job: `seed` seeds its rollouts, `weights` is the transport of its weights.

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


def _reconnect(kind: type[Client], *made_with: Any) -> Client:
    """Return a client that was pickled in another process."""
    client = object.__new__(kind)
    client._connect(*made_with)
    return client


class Rollout(Face[AsyncRollout]):
    """The samples of a submitted batch. Each is given once, over all iterations together."""

    @property
    def batch(self) -> t.Batch:
        """The batch as it was submitted."""
        return self._core.batch

    @property
    def submitted(self) -> t.Submitted:
        """The gateway's answer to the batch."""
        return self._core.submitted

    @property
    def cursor(self) -> int:
        """Cursor behind the last sample that was given."""
        return self._core.cursor

    @property
    def complete(self) -> bool:
        """True if every sample was given."""
        return self._core.complete

    def stats(self) -> dict[str, float]:
        """Return figures of the samples given so far: the same as `run.stats`, for this batch alone."""
        return self._core.stats()

    def __len__(self) -> int:
        """Return the number of samples of the batch."""
        return len(self._core)

    def __iter__(self) -> Iterator[t.Sample]:
        return iterate(aiter(self._core))

    by_group = blocking_stream(AsyncRollout.by_group)
    ack = blocking(AsyncRollout.ack)
    cancel = blocking(AsyncRollout.cancel)
    report_rewards = blocking(AsyncRollout.report_rewards)


class OpenBatch(Rollout):
    """The samples of an open batch. Each is given once, over all iterations together.

    Iterations end when the batch is closed and every sample was given.
    """

    _core: AsyncOpenBatch

    def add(self, groups: Iterable[t.Group]) -> int:
        """Add groups, and return how many samples they have; samples of groups added before do not count.

        A prompt id names one group of the batch: the same group again is skipped, so a call that failed may be
        repeated. Waits while the gateway is full.

        FailedPreconditionError: nothing can be added. Reasons: BATCH_CLOSED, after `close` or `cancel`, after the
        deadline, or where the gateway has closed a batch that no client used; BATCH_STALE, where newer
        versions were published than `max_staleness` allows; VERSION_MISMATCH, for a batch without one.
        ResourceExhaustedError: the batch is as large as it may be; close it and open another.
        """
        return finish(self._core.add(groups))

    def close(self) -> int:
        """Close the batch, so that iterations end; return how many samples it has.

        May be repeated. Leaving `open_batch` without an exception also closes the batch.
        """
        return finish(self._core.close())


class Session(Face[AsyncSession]):
    """One sample that calls tools. `generate` and `answer` take turns until it has ended."""

    @property
    def key(self) -> t.SampleKey:
        """The prompt and slot."""
        return self._core.key

    @property
    def sample(self) -> t.Sample | None:
        """The whole sample, once it has ended."""
        return self._core.sample

    @property
    def token_ids(self) -> t.TokenIds:
        """[tokens], the response so far, answers included."""
        return self._core.token_ids

    generate = blocking(AsyncSession.generate)
    answer = blocking(AsyncSession.answer)
    end = blocking(AsyncSession.end)


class Sessions(Face[AsyncSessions]):
    """Sessions of one step, used in one thread: one after the other, or all in one loop over `turns`."""

    def __init__(self, core: AsyncSessions) -> None:
        super().__init__(core)
        self._faces: dict[t.SampleKey, Session] = {}

    def begin(self, group: t.Group) -> list[Session]:
        """Begin a session for each sample of a group. Raises as `OpenBatch.add` does."""
        begun = [Session(core) for core in finish(self._core.begin(group))]
        self._faces |= {session.key: session for session in begun}
        return begun

    def turns(self) -> Iterator[tuple[Session, t.Turn]]:
        """Iterate over turns as they arrive, each with its session, until every session begun has ended."""
        for session, turn in iterate(self._core.turns()):
            yield self._faces[session.key], turn

    def report_rewards(
        self, rewards: Iterable[t.Reward] = (), *, kl: float | None = None, clip_fraction: float | None = None
    ) -> int:
        """Report rewards of sessions, and measurements of the update; return how many samples were known."""
        return finish(self._core.batch.report_rewards(rewards, kl=kl, clip_fraction=clip_fraction))


class Run(Face[AsyncRun]):
    """One training job.

    The nth batch of a step and policy version always has the same id, so that a trainer that was restarted gets the
    samples that exist already.
    """

    def __init__(self, client: Client, core: AsyncRun) -> None:
        super().__init__(core)
        self.client = client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, raised: object, *_: object) -> None:
        """Acknowledge the batches that were read, unless an exception ends the run."""
        if raised is None:
            self.close()

    def close(self) -> None:
        """Acknowledge all batches that were read to their ends: they will not be read again."""
        self._core.close()

    @property
    def run_id(self) -> str:
        """The job's name."""
        return self._core.run_id

    rollout = blocking_face(AsyncRun.rollout, Rollout)
    open_batch = blocking_context(AsyncRun.open_batch, OpenBatch)
    sessions = blocking_context(AsyncRun.sessions, Sessions)

    def rollouts(
        self,
        batches: Iterable[Iterable[t.Group]],
        sampling: t.SamplingParams | None = None,
        *,
        exactness: t.Exactness | None = None,
        first_step: int = 0,
        **options: Unpack[RolloutOptions],
    ) -> Iterator[Rollout]:
        """Submit a batch for each step and yield its samples as `rollout` returns them.

        Each batch is announced while the previous one is generated, so that idle instances generate it ahead.
        `batches` gives the groups of each step: a list, a generator, a data loader, or for the asynchronous client
        an asynchronous iterable. It is read one batch ahead of the steps, so it must not depend on the samples of
        the previous step. A trainer that was restarted gives the batches from `first_step` on. `options` are passed
        to `rollout`.
        """
        for each in iterate(
            self._core.rollouts(batches, sampling, exactness=exactness, first_step=first_step, **options)
        ):
            yield Rollout(each)

    def stats(self, step: int) -> dict[str, float]:
        """Return figures of the samples of a step that were read so far, by name, for an experiment logger.

        Names begin with `rollout/`; docs/sdk.md lists them. The figures of the last 8 steps are kept. ValueError:
        this object has requested no samples of the step.
        """
        return self._core.stats(step)

    hint = blocking(AsyncRun.hint)
    report_rewards = blocking(AsyncRun.report_rewards)
    push_weights = blocking(AsyncRun.push_weights)
    push_adapter = blocking(AsyncRun.push_adapter)
    finish_push = blocking(AsyncRun.finish_push)
    end = blocking(AsyncRun.end)
