"""The asynchronous client, on grpc.aio, and its training job.

    async with paceline.AsyncClient("127.0.0.1:7400") as client, client.run("run-1", seed=7) as run:
        async for rollout in run.rollouts(batches, SamplingParams(max_tokens=512)):
            samples = [sample async for sample in rollout]
            await run.push_weights(learner.update(samples))

A trainer that was restarted requests the same batches and gets the samples that exist already. Methods raise
`PacelineError`.
"""

from __future__ import annotations

import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Sequence,
)
from contextlib import aclosing, suppress
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, Unpack

from paceline import convert
from paceline import types as t
from paceline.batches.rollout import AsyncRollout
from paceline.batches.run_rollouts import RunRollouts
from paceline.calls import GatewayCalls, SeveralTransports
from paceline.calls.caller import STREAM_SECONDS, RetryPolicy
from paceline.errors import FailedPreconditionError, PacelineError
from paceline.shards import OpenShard, Shard, Shards, shards_of
from paceline.shards.concurrency import Tasks, Threads
from paceline.transport.channel import Tls
from paceline.transport.grpc import AioTransport, BlockingTransport
from paceline.transport.interface import Transport
from paceline.transport.options import ConnectionOptions
from paceline.weights.adapters import Adapter
from paceline.weights.folder import push_folder
from paceline.weights.safetensors import Tensors, check
from paceline.weights.sharded import ShardedTensors
from paceline.weights.stream import WeightStream
from paceline.weights.version_push import VersionPush, WeightTransport, keeps_staged

log = logging.getLogger("paceline")

Batches = Iterable[Iterable[t.Group]] | AsyncIterable[Iterable[t.Group]]
"""The groups of each step, in order."""
Source = Path | str | Tensors | ShardedTensors
"""Weights: a folder in Hugging Face layout, tensors by name, pairs of name and tensor, or tensors of ranks."""


class AsyncClient(GatewayCalls):
    """Client of one deployment, or of several shards. `Client` is thread-safe, `AsyncClient` is for one event loop.

    It follows the gateway that leads. A call that finds no gateway, or a full one, is repeated by the retry policy;
    a stream continues where it was cut. All methods raise `PacelineError`. A client can be pickled: it connects
    again with the same options, and looks again for a token that was found.
    """

    _transport_kind: ClassVar[type[AioTransport | BlockingTransport]] = AioTransport
    _concurrency: ClassVar[type[Tasks | Threads]] = Tasks

    address: str | Sequence[str | Shard]
    """The address, or the addresses of several shards."""

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
                or `Shard`, for each of several deployments. Runs are spread over these; any other call is made on
                one of them, `client.shard(name)`.
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
        self.address = address
        self._options: dict[str, Any] = {
            "token": token,
            "tls": tls,
            "timeout": timeout,
            "slow_timeout": slow_timeout,
            "stream_seconds": stream_seconds,
            "leaders_only": leaders_only,
            "retry": retry,
            "use_proxy": use_proxy,
            "insecure": insecure,
        }
        first, *others = shards_of(address)
        if others:
            members = [
                OpenShard(*astuple(each), calls=type(self)(each.address, **self._options))
                for each in (first, *others)
            ]
            transport: Transport = SeveralTransports(members)
            super().__init__(transport, retry, stream_seconds, Shards(members, self._concurrency()))
        else:
            transport = self._transport_kind(
                ConnectionOptions(
                    first.address, tls, token, timeout, slow_timeout, leaders_only, use_proxy, insecure
                )
            )
            super().__init__(transport, retry, stream_seconds)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), self.address, **self._options), ()

    def __repr__(self) -> str:
        return f"AsyncClient({self.address!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def shard(self, name: str) -> AsyncClient:
        """Return a client of one of several shards, on this client's connection. ValueError: no such shard."""
        client = self.shards.member(name).calls
        assert isinstance(client, AsyncClient)
        return client

    def deployments(self) -> list[AsyncClient]:
        """Return a client of each shard, on this client's connections; with one deployment, this client."""
        return [self.shard(member.name) for member in self.shards.members]

    def run(self, run_id: str, *, seed: int = 0, weights: WeightTransport | None = None) -> AsyncRun:
        """Return a training job: `seed` seeds its rollouts, `weights` is the transport of its weights.

        The default is a `WeightStream()`, for a trainer that reaches the instances.
        """
        return AsyncRun(self, run_id, seed, weights)


class BlockingCore(AsyncClient):
    """A client whose coroutines never suspend, for threads: the core of `Client`."""

    _transport_kind = BlockingTransport
    _concurrency = Threads


class AsyncRun(RunRollouts):
    """One training job of a client.

    The nth batch of a step and policy version always has the same id, so that a trainer that was restarted gets the
    samples that exist already. Batches that are begun concurrently count in the order of the calls.
    """

    def __init__(self, client: GatewayCalls, run_id: str, seed: int, weights: WeightTransport | None) -> None:
        super().__init__(client, run_id, seed)
        self._weights = WeightStream() if weights is None else weights
        self._refused: VersionPush | None = None
        """Push whose weights are staged while samples are unfinished."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.client, self.run_id, self._seed, self._weights)

    def rollouts(
        self,
        batches: Iterable[Iterable[t.Group]] | AsyncIterable[Iterable[t.Group]],
        sampling: t.SamplingParams | None = None,
        *,
        first_step: int = 0,
        **options: Unpack[t.BatchOptions],
    ) -> AsyncIterator[AsyncRollout]:
        """Submit a batch for each step and yield its samples as `rollout` returns them.

        Each batch is announced while the previous one is generated, so that idle instances generate it ahead.
        `batches` gives the groups of each step: a list, a generator, a data loader, or for the asynchronous client
        an asynchronous iterable. It is read one batch ahead of the steps, so it must not depend on the samples of
        the previous step. A trainer that was restarted gives the batches from `first_step` on. `options` are passed
        to `rollout`.
        """
        return look_ahead(self, batches, sampling, first_step, **options)

    async def push_weights(
        self,
        source: Source,
        target: t.WeightTarget = t.WeightTarget.POLICY,
        *,
        in_flight: t.InFlight = t.InFlight.REFUSE,
    ) -> t.UpdateFinished:
        """Send weights as the next version. When this returns, the fleet serves them.

        `in_flight` decides about samples, of any run, that are unfinished then. With REFUSE they keep their
        version: FailedPreconditionError, reason SAMPLES_UNFINISHED; with KEEP_KV, reason KV_NOT_KEPT if an instance
        keeps none. `finish_push` applies the weights later without sending them again.

        `source` is tensors (numpy or torch), by name or as an iterator of pairs, which are sent through the run's
        `WeightStream` or written to its `WeightFolder`; the asynchronous client reads them in a separate thread. On
        several shards the weights are staged on all before any applies them, and tensors are read once. Or it is a
        folder in Hugging Face layout, which the instances read. `ShardedTensors` are written to a `WeightFolder` by
        all ranks, of which rank 0 pushes. After an error the previous version is served.
        """
        if isinstance(source, str | Path):
            folder = Path(source)
            return await self._push(
                target,
                lambda push: push_folder(self.client, push, lambda _: folder.absolute(), in_flight=in_flight),
            )
        if isinstance(source, ShardedTensors):
            try:
                return await self._push(
                    target, lambda push: self._weights.push_sharded(self.client, push, source, in_flight)
                )
            except Exception:
                # Report the first error, not one of giving up.
                with suppress(PacelineError):
                    await self.client.run_work(source.give_up)
                raise
        # Checked before an update is started, because other pushes would have to wait for it.
        check(source)
        return await self._push(target, lambda push: self._weights.push(self.client, push, source, in_flight))

    async def finish_push(self, *, in_flight: t.InFlight = t.InFlight.REFUSE) -> t.UpdateFinished:
        """Apply the weights of the last push, which was refused because of unfinished samples.

        They stay staged until the gateway has had no call about them for its `update_timeout_seconds`; after that,
        or after another push, `NotFoundError`. ValueError: no push of this object was refused.
        """
        if self._refused is None:
            raise ValueError("there is no push that was refused because of unfinished samples")
        finished = await self._refused.finish(in_flight)
        await self._pushed()
        return finished

    async def _push(
        self, target: t.WeightTarget, pushing: Callable[[VersionPush], Awaitable[t.UpdateFinished]]
    ) -> t.UpdateFinished:
        """Push a version; one that was refused because of unfinished samples can be finished later."""
        self._refused = None
        push = await VersionPush.begin(self.client, self.run_id, target)
        try:
            finished = await pushing(push)
        except FailedPreconditionError as error:
            if keeps_staged(error):
                self._refused = push
            raise
        await self._pushed()
        return finished

    async def _pushed(self) -> None:
        self._refused = None
        self._warnings.pushed()
        await self.client.run_work(self._weights.prune)

    async def push_adapter(
        self, source: Adapter | Path | str, *, in_flight: t.InFlight = t.InFlight.REFUSE
    ) -> t.UpdateFinished:
        """Send a LoRA adapter as the next version; instances merge it with the full version that it builds on.

        The full version is the last one that was pushed, or the model that the fleet started with: an adapter
        replaces the previous adapter. `source` is an `Adapter` or the folder of one in PEFT's layout. It is written
        to the run's `WeightFolder`. After an error the previous version is served. `in_flight`: as in
        `push_weights`.
        """
        given = Path(source) if isinstance(source, str) else source
        return await self._push(
            t.WeightTarget.POLICY,
            lambda push: self._weights.push_adapter(self.client, push, given, in_flight),
        )


async def look_ahead(
    run: RunRollouts,
    batches: Batches,
    sampling: t.SamplingParams | None,
    first_step: int,
    **options: Unpack[t.BatchOptions],
) -> AsyncGenerator[AsyncRollout, None]:
    """Submit a batch for each step, announce the next one, and yield its rollout.

    The next batch is taken from `batches` after the previous one was submitted, so a slow source delays no samples.
    """
    async with aclosing(_in_order(batches)) as source:
        step, groups = first_step, await anext(source, None)
        while groups is not None:
            rollout = await run.rollout(step, groups, sampling, **options)
            step, groups = step + 1, await anext(source, None)
            if groups is not None:
                await _announce(run, step, groups, rollout.batch)
            yield rollout


async def _in_order(batches: Batches) -> AsyncGenerator[list[t.Group], None]:
    """Yield the groups of each step, with every iterator read: they are sent twice."""
    if isinstance(batches, AsyncIterable):
        async for each in batches:
            yield convert.whole_groups(each)
        return
    for each in batches:
        yield convert.whole_groups(each)


async def _announce(run: RunRollouts, step: int, groups: list[t.Group], before: t.Batch) -> None:
    """Announce a step by the batch before it. A failure only costs speed, so it must not end the training."""
    try:
        await run.hint(
            step,
            groups,
            before.sampling,
            policy_version=before.policy_version + 1,
            exactness=before.exactness,
        )
    except PacelineError as error:
        log.warning("step %d of run %s was not announced: %s", step, run.run_id, error)
