"""The async client: as `Client`, on grpc.aio.

    async with paceline.AsyncClient("127.0.0.1:7400") as client:
        async for event in client.stream(run_id, batch_id):
            await train_on(event.sample)

Methods raise `PacelineError`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc

from paceline import calls, channel, errors
from paceline import types as t
from paceline.retry import Backoff, RetryPolicy
from paceline.run import Plan, Source
from paceline.stubs import stubs_on
from paceline.weights import WeightFolder

R = TypeVar("R")


class AsyncClient:
    """Talks to one gateway from one event loop. Methods mean what those of `Client` mean."""

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        tls: channel.Tls | None = None,
        timeout: float = 30.0,
        slow_timeout: float = 600.0,
        retry: RetryPolicy | None = None,
    ) -> None:
        """Connects on the first call. Timeouts are seconds for one attempt; weights and drain are slow."""
        self.address = address
        self._channel = channel.open_aio_channel(address, tls)
        self._stubs = stubs_on(self._channel)
        self._metadata = channel.call_metadata(token)
        self._timeouts = {False: timeout, True: slow_timeout}
        self._retry = retry or RetryPolicy()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends every call in progress and the connection."""
        await self._channel.close()

    def run(self, run_id: str, *, seed: int = 0, weights: WeightFolder | None = None) -> AsyncRun:
        """A training job: its rollouts are seeded by `seed`, its weights are kept in `weights`."""
        return AsyncRun(self, run_id, seed, weights)

    # Rollouts

    async def submit(self, batch: t.Batch) -> t.Submitted:
        """Submits a batch; the same batch again is answered as before."""
        return await self.call(calls.submit(batch))

    def stream(self, run_id: str, batch_id: str, cursor: int = 0) -> AsyncIterator[t.SampleEvent]:
        """The finished samples of a batch in completion order, those after the cursor, each once."""
        return self.events(calls.stream(run_id, batch_id, cursor))

    def generate(self, request: t.SampleRequest) -> AsyncIterator[t.TokenDelta | t.Sample]:
        """One sample: deltas, then the whole sample. Leaving the iteration cancels it."""
        return self.events(calls.generate(request))

    async def cancel(
        self, run_id: str, batch_id: str, samples: Iterable[t.SampleKey] = (), *, keep_partial: bool = False
    ) -> int:
        """Ends samples of a batch (none named: all) and returns how many were unfinished."""
        return await self.call(calls.cancel(run_id, batch_id, samples, keep_partial))

    async def hint(self, hint: t.BatchHint) -> int:
        """Names the prompts to come; returns how many samples may be pre-generated."""
        return await self.call(calls.hint(hint))

    async def report_rewards(
        self,
        run_id: str,
        batch_id: str,
        rewards: Iterable[t.Reward] = (),
        *,
        kl: float | None = None,
        clip_fraction: float | None = None,
    ) -> int:
        """Reports rewards of finished samples; returns how many were known.

        `kl` (nats per token, between the policy and the one that sampled) and `clip_fraction` (share of
        tokens whose ratio was clipped) are what the update on this batch measured. A report may be repeated.
        """
        return await self.call(calls.report_rewards(run_id, batch_id, rewards, kl, clip_fraction))

    # Weights

    async def start_update(
        self, run_id: str, version: int, target: t.WeightTarget = t.WeightTarget.POLICY
    ) -> t.UpdateStarted:
        """Claims a weight update to a version above the current one."""
        return await self.call(calls.start_update(run_id, version, target))

    async def update_weights(
        self, update_id: str, path: Path | str, checksum: str = ""
    ) -> tuple[t.InstanceUpdate, ...]:
        """Has every instance check and stage a folder (absolute path as the instances see it)."""
        return await self.call(calls.update_weights(update_id, str(path), checksum))

    async def finish_update(self, update_id: str) -> t.UpdateFinished:
        """Applies the staged weights between two engine steps, and publishes the version."""
        return await self.call(calls.finish_update(update_id))

    async def abort_update(self, update_id: str) -> int:
        """Forgets an unfinished update; returns the version served."""
        return await self.call(calls.abort_update(update_id))

    async def versions(self) -> t.Versions:
        """The published versions."""
        return await self.call(calls.versions())

    # Fleet

    async def instances(self) -> tuple[t.Instance, ...]:
        """The fleet now."""
        return await self.call(calls.instances())

    def watch_fleet(self) -> AsyncIterator[tuple[t.Instance, ...]]:
        """The fleet now, then whenever it changes; without end."""
        return self.events(calls.watch_fleet())

    async def pause(self, instance_ids: Sequence[str] = ()) -> tuple[str, ...]:
        """Stops engine steps, of all when none is named; nothing is lost."""
        return await self.call(calls.pause(instance_ids))

    async def resume(self, instance_ids: Sequence[str] = ()) -> tuple[str, ...]:
        """Goes on after a pause."""
        return await self.call(calls.resume(instance_ids))

    async def drain(self, instance_id: str) -> int:
        """Empties an instance for good; returns how many samples were handed over."""
        return await self.call(calls.drain(instance_id))

    async def policy(self, run_id: str = "", *, model: str = "", pool: str = "") -> t.Policy:
        """The knobs that are set for a run, a model or a pool; without a name, for the whole fleet."""
        return await self.call(calls.policy(run_id, model, pool))

    async def set_policy(
        self, run_id: str, policy: t.Policy, *, model: str = "", pool: str = ""
    ) -> t.PolicyChange:
        """Replaces the knobs of a scope, named as for `policy`, by others made from their revision.

        `{"speculation": False}` turns everything to plain decoding.
        """
        return await self.call(calls.set_policy(run_id, policy, model, pool))

    async def drafter(self) -> t.Drafter:
        """The drafter that is trained online."""
        return await self.call(calls.drafter())

    async def roll_back_drafter(self, version: int, reason: str = "") -> int:
        """Goes back from this version to the one before, and returns that. AbortedError: another is published."""
        return await self.call(calls.roll_back_drafter(version, reason))

    def watch_decisions(self, run_id: str = "", since: float | None = None) -> AsyncIterator[t.Decision]:
        """Decisions as they are made, without end: of a run and of the fleet, or all.

        `since` (unix seconds) begins with those that were made from then on, as far as they are kept.
        """
        return self.events(calls.watch_decisions(run_id, since))

    # How calls are made

    async def call(self, unary: calls.Unary[R]) -> R:
        """Makes a call, again while the service is unreachable."""
        method = getattr(self._stubs[unary.service], unary.method)
        backoff = Backoff(self._retry)
        while True:
            request = iter([unary.request]) if unary.streams_request else unary.request
            try:
                timeout = self._timeouts[unary.slow]
                return unary.read(await method(request, timeout=timeout, metadata=self._metadata))
            except grpc.aio.AioRpcError as error:
                await _wait(backoff, errors.from_rpc(error))

    async def events(self, stream: calls.Stream[R]) -> AsyncIterator[R]:
        """Reads a stream, and goes on with a new one when it is cut."""
        method = getattr(self._stubs[stream.service], stream.method)
        backoff = Backoff(self._retry)
        seen = False
        while True:
            attempt = method(stream.request(), metadata=self._metadata)
            try:
                async for answer in attempt:
                    backoff.progress()
                    event = stream.read(answer)
                    if event is not None:
                        seen = True
                        yield event
                if stream.complete():
                    return
                await _wait(backoff, errors.cut_short())
            except grpc.aio.AioRpcError as error:
                translated = errors.from_rpc(error)
                if seen and not stream.resumable:
                    raise translated from None
                await _wait(backoff, translated)
            finally:
                attempt.cancel()

    async def follow(self, steps: calls.Steps[R]) -> R:
        """Makes the calls of a procedure, one after the other."""
        try:
            step = next(steps)
            while True:
                try:
                    answer: Any = await (
                        asyncio.to_thread(step.work) if isinstance(step, calls.Local) else self.call(step)
                    )
                except BaseException as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as done:
            result: R = done.value
            return result


async def _wait(backoff: Backoff, error: errors.PacelineError) -> None:
    """Waits until the next attempt is due; raises the error when there is to be none."""
    delay = backoff.delay_after(error)
    if delay is None:
        raise error from None
    await asyncio.sleep(delay)


class AsyncRun:
    """One training job on an async client; see `Run`."""

    def __init__(self, client: AsyncClient, run_id: str, seed: int, weights: WeightFolder | None) -> None:
        self.client = client
        self._plan = Plan(run_id, seed, weights)

    async def __aenter__(self) -> AsyncRun:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is held that would have to be given back."""

    @property
    def run_id(self) -> str:
        """The job's name."""
        return self._plan.run_id

    async def rollout(
        self,
        step: int,
        groups: Sequence[t.Group],
        sampling: t.SamplingParams | None = None,
        *,
        exactness: t.Exactness | None = None,
        policy_version: int | None = None,
        deadline: float | None = None,
    ) -> AsyncRollout:
        """Submits a batch and returns its samples as an async iterable, in completion order."""
        steps = self._plan.submit(step, groups, sampling, exactness, policy_version, deadline)
        return AsyncRollout(self.client, *await self.client.follow(steps))

    async def hint(
        self,
        step: int,
        groups: Sequence[t.Group],
        sampling: t.SamplingParams | None = None,
        *,
        expected_version: int,
        exactness: t.Exactness | None = None,
    ) -> int:
        """Names the prompts of a step to come; returns how many samples may be pre-generated."""
        return await self.client.hint(self._plan.hint(step, groups, sampling, expected_version, exactness))

    async def report_rewards(
        self,
        batch_id: str,
        rewards: Iterable[t.Reward] = (),
        *,
        kl: float | None = None,
        clip_fraction: float | None = None,
    ) -> int:
        """Reports the rewards of a batch, and what its update measured; returns how many samples were known."""
        return await self.client.report_rewards(
            self.run_id, batch_id, rewards, kl=kl, clip_fraction=clip_fraction
        )

    async def push_weights(
        self, source: Source, target: t.WeightTarget = t.WeightTarget.POLICY
    ) -> t.UpdateFinished:
        """Sends weights as the next version; files are written in a thread."""
        return await self.client.follow(self._plan.push(source, target))


class AsyncRollout:
    """The samples of a submitted batch. Each is given once, over all iterations together."""

    def __init__(self, client: AsyncClient, batch: t.Batch, submitted: t.Submitted) -> None:
        self._client = client
        self.batch = batch
        self.submitted = submitted
        self.cursor = 0
        """Place in the batch's stream."""

    def __len__(self) -> int:
        """Samples wanted."""
        return self.submitted.samples

    async def __aiter__(self) -> AsyncIterator[t.Sample]:
        async for event in self._client.stream(self.batch.run_id, self.batch.batch_id, self.cursor):
            self.cursor = event.cursor
            yield event.sample

    async def cancel(self, *, keep_partial: bool = False) -> int:
        """Ends what is unfinished; those samples are delivered as ABORTED."""
        return await self._client.cancel(self.batch.run_id, self.batch.batch_id, keep_partial=keep_partial)
