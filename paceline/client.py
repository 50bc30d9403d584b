"""The synchronous client: a training job, its rollouts and its sessions.

    with paceline.Client("127.0.0.1:7400") as client, client.run("run-1", seed=7) as run:
        for step in range(steps):
            samples = list(run.rollout(step, groups, SamplingParams(max_tokens=512)))
            run.push_weights(learner.update(samples))

Every class here is the blocking face of an asynchronous one (see `paceline.blocking`). Methods raise
`PacelineError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self, Unpack

from paceline import types as t
from paceline.aio import AsyncRun, RolloutOptions, WeightTransport
from paceline.batches.rollout import AsyncOpenBatch, AsyncRollout
from paceline.batches.sessions import AsyncSession, AsyncSessions
from paceline.blocking import Face, blocking, blocking_stream, entered, finish, iterate
from paceline.calls import GatewayCalls
from paceline.calls.caller import STREAM_SECONDS, RetryPolicy
from paceline.shards import Shard, shards_of
from paceline.shards.concurrency import Threads
from paceline.shards.members import connect
from paceline.transport.channel import Tls
from paceline.transport.grpc import BlockingTransport
from paceline.transport.interface import Transport
from paceline.transport.options import ConnectionOptions, connect_again


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
        """Return figures of the samples that were given so far; those of `run.stats`, of this batch alone."""
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
        """Add groups, and return how many samples they have; those of groups that are there are not counted.

        A prompt id names one group of the batch: the same group again is passed over, so a call that failed may be
        repeated. Waits while the gateway is full.

        FailedPreconditionError: nothing can be added. Reasons: BATCH_CLOSED, after `close` or `cancel`, after the
        deadline, or where the gateway has closed a batch that nobody had to do with; BATCH_STALE, where newer
        versions were published than `max_staleness` allows; VERSION_MISMATCH, for a batch without one.
        ResourceExhaustedError: the batch is as large as it may be; close it and open another.
        """
        return finish(self._core.add(groups))

    def close(self) -> int:
        """Let nothing be added any more, so that iterations end; return how many samples the batch has.

        It may be repeated. Leaving `open_batch` without an exception does it, too.
        """
        return finish(self._core.close())


class Session(Face[AsyncSession]):
    """One sample that calls tools. `generate` and `answer` take turns until it has ended."""

    @property
    def key(self) -> t.SampleKey:
        """Its prompt and slot."""
        return self._core.key

    @property
    def sample(self) -> t.Sample | None:
        """The whole sample, once it has ended."""
        return self._core.sample

    @property
    def token_ids(self) -> t.TokenIds:
        """[tokens], the response so far, answers included."""
        return self._core.token_ids

    def generate(self) -> t.Turn:
        """Return what the session says until it calls a tool or ends.

        ValueError: it waits for an answer, or has ended and its last turn was given.
        """
        return finish(self._core.generate())

    def answer(self, token_ids: Sequence[int] | t.TokenIds) -> None:
        """Give the session tokens of its environment, with which it goes on.

        They are given as the policy is to read them, with what the chat template puts around them.

        InvalidArgumentError: they do not fit; shorten them, or end the session. ValueError: the session does not
        wait for an answer.
        """
        finish(self._core.answer(token_ids))

    def end(self) -> None:
        """End the session at its call, as COMPLETED; `generate` returns its last turn, which may be empty."""
        finish(self._core.end())


class Sessions(Face[AsyncSessions]):
    """Sessions of one step, used one after the other or all in one loop over `turns`, in one thread."""

    def __init__(self, core: AsyncSessions) -> None:
        super().__init__(core)
        self._faces: dict[t.SampleKey, Session] = {}

    def begin(self, group: t.Group) -> list[Session]:
        """Begin a session for each sample of a group. Errors are those of `OpenBatch.add`."""
        begun = [Session(core) for core in finish(self._core.begin(group))]
        self._faces |= {session.key: session for session in begun}
        return begun

    def turns(self) -> Iterator[tuple[Session, t.Turn]]:
        """Iterate over turns as they come, each with its session, until every session that was begun has ended."""
        for session, turn in iterate(self._core.turns()):
            yield self._faces[session.key], turn

    def report_rewards(
        self, rewards: Iterable[t.Reward] = (), *, kl: float | None = None, clip_fraction: float | None = None
    ) -> int:
        """Report rewards of sessions, and what the update measured; return how many samples were known."""
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
        """Acknowledge what was read, unless an exception ends the run."""
        if raised is None:
            self.close()

    def close(self) -> None:
        """Acknowledge all batches that were read to their ends: nobody will read them again."""
        self._core.close()

    @property
    def run_id(self) -> str:
        """The job's name."""
        return self._core.run_id

    def rollout(
        self,
        step: int,
        groups: Iterable[t.Group],
        sampling: t.SamplingParams | None = None,
        *,
        exactness: t.Exactness | None = None,
        policy_version: int | None = None,
        deadline: float | None = None,
        priority: int = 0,
        weight: int = 1,
        max_staleness: int | None = None,
        stale: t.Stale = t.Stale.REFUSE,
    ) -> Rollout:
        """Submit a batch and return its samples as an iterable, in completion order.

        Seeds come of run, step, prompt and slot: the same prompt ids again in a step give the same samples again. A
        warning says so; for other samples use other prompt ids, or more samples a group.

        The samples are of the published policy version unless `policy_version` names another. Batches of higher
        `priority` are placed first; within one, runs share the instances by `weight`. A batch that is too large for
        one call (16 MiB, 65,536 samples) is submitted in parts and read as one, a part at a time in turn. Those of
        earlier steps that were read to their ends are acknowledged: they cannot be read again. With `max_staleness`
        the batch goes on across versions that are pushed meanwhile, and `stale` says what becomes of unfinished
        samples whose first token is more than so many versions behind.
        """
        submitting = self._core.rollout(
            step,
            groups,
            sampling,
            exactness=exactness,
            policy_version=policy_version,
            deadline=deadline,
            priority=priority,
            weight=weight,
            max_staleness=max_staleness,
            stale=stale,
        )
        return Rollout(finish(submitting))

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

        Each batch is announced while the one before it is generated, so that idle instances generate it ahead.
        `batches` gives the groups of each step: a list, a generator, a data loader, or for the asynchronous client
        an asynchronous iterable. It is read one batch ahead of the steps, so it must not depend on the samples of
        the step before. A trainer that was restarted gives the batches from `first_step` on. `options` are those of
        `rollout`.
        """
        for each in iterate(
            self._core.rollouts(batches, sampling, exactness=exactness, first_step=first_step, **options)
        ):
            yield Rollout(each)

    def stats(self, step: int) -> dict[str, float]:
        """Return figures of the samples of a step that were read so far, flat, for a logger of experiments.

        Names begin with `rollout/`; docs/sdk.md lists them. Those of the last 8 steps are kept. ValueError: no
        samples of the step were asked for by this object.
        """
        return self._core.stats(step)

    @contextmanager
    def open_batch(
        self,
        step: int,
        sampling: t.SamplingParams | None = None,
        *,
        exactness: t.Exactness | None = None,
        policy_version: int | None = None,
        deadline: float | None = None,
        priority: int = 0,
        weight: int = 1,
        max_staleness: int | None = None,
        stale: t.Stale = t.Stale.REFUSE,
    ) -> Iterator[OpenBatch]:
        """Open a batch, to which groups are added while its samples are generated and read; close it when left.

        An exception leaves it open, for a trainer that is restarted and opens it again; the gateway closes a batch
        that nobody has to do with. Without `max_staleness` the samples are of the batch's version. With it, the
        batch goes on across versions that are pushed meanwhile, and `stale` says what becomes of unfinished samples
        whose first token is more than so many versions behind. The other parameters are those of `rollout`.
        """
        opening = self._core.open_batch(
            step,
            sampling,
            exactness=exactness,
            policy_version=policy_version,
            deadline=deadline,
            priority=priority,
            weight=weight,
            max_staleness=max_staleness,
            stale=stale,
        )
        with entered(opening) as opened:
            yield OpenBatch(opened)

    @contextmanager
    def sessions(
        self,
        step: int,
        tools: t.ToolUse,
        sampling: t.SamplingParams | None = None,
        *,
        exactness: t.Exactness | None = None,
        policy_version: int | None = None,
        deadline: float | None = None,
        priority: int = 0,
        weight: int = 1,
        max_staleness: int | None = None,
    ) -> Iterator[Sessions]:
        """Open a batch whose samples call tools; end what is unfinished of it when left.

        An exception leaves it open, for a trainer that is restarted and begins the same sessions again. With
        `max_staleness` they go on under versions that are pushed meanwhile, and end when they are further behind.
        The other parameters are those of `rollout`; `max_tokens` counts what environments say, too.
        """
        opening = self._core.sessions(
            step,
            tools,
            sampling,
            exactness=exactness,
            policy_version=policy_version,
            deadline=deadline,
            priority=priority,
            weight=weight,
            max_staleness=max_staleness,
        )
        with entered(opening) as sessions:
            yield Sessions(sessions)

    hint = blocking(AsyncRun.hint)
    report_rewards = blocking(AsyncRun.report_rewards)
    push_weights = blocking(AsyncRun.push_weights)
    push_adapter = blocking(AsyncRun.push_adapter)
    finish_push = blocking(AsyncRun.finish_push)
    end = blocking(AsyncRun.end)


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
