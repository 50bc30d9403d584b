"""A training job as seen by its trainer: rollouts of a step, and weights after it.

    async with client.run("run-1", seed=7) as run:
        async for rollout in run.rollouts(batches, SamplingParams(max_tokens=512)):
            samples = [sample async for sample in rollout]
            await run.push_weights(learner.update(samples))

A trainer that was restarted requests the same batches and gets the samples that exist already.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Unpack

from paceline import types as t
from paceline.adapters import Adapter
from paceline.calls import GatewayCalls
from paceline.client_errors import shards_differ
from paceline.errors import FailedPreconditionError, PacelineError
from paceline.look_ahead import RolloutOptions, look_ahead
from paceline.rollout import AsyncRollout
from paceline.run_rollouts import RunRollouts
from paceline.safetensors import Tensors
from paceline.sharded_tensors import ShardedTensors
from paceline.tensor_bytes import check
from paceline.version_push import VersionPush, keeps_staged
from paceline.weight_collective import WeightCollective, push_collective
from paceline.weight_stream import WeightStream, push_stream
from paceline.weights import WeightFolder, push_folder

WeightTransport = WeightFolder | WeightStream | WeightCollective
"""Ways of weights from a trainer to the instances."""
Source = Path | str | Tensors | ShardedTensors
"""Weights: a folder in Hugging Face layout, tensors by name, or of ranks, or an iterator of names and tensors."""


class AsyncRun(RunRollouts):
    """One training job on an asynchronous client.

    The nth batch of a step and policy version always has the same id, so that a trainer that was restarted gets the
    samples that exist already.
    """

    def __init__(self, client: GatewayCalls, run_id: str, seed: int, weights: WeightTransport | None) -> None:
        super().__init__(client, run_id, seed)
        self._weights = WeightStream() if weights is None else weights
        self._refused: VersionPush | None = None
        """Push whose weights are staged, and wait for unfinished samples."""

    def rollouts(
        self,
        batches: Iterable[Iterable[t.Group]] | AsyncIterable[Iterable[t.Group]],
        sampling: t.SamplingParams | None = None,
        *,
        exactness: t.Exactness | None = None,
        first_step: int = 0,
        **options: Unpack[RolloutOptions],
    ) -> AsyncIterator[AsyncRollout]:
        """Submit a batch for each step and yield its samples as `rollout` returns them.

        Each batch is announced while the one before it is generated, so that idle instances generate it ahead.
        `batches` gives the groups of each step: a list, a generator, a data loader, or for the asynchronous client
        an asynchronous iterable. It is read one batch ahead of the steps, so it must not depend on the samples of
        the step before. A trainer that was restarted gives the batches from `first_step` on. `options` are those of
        `rollout`.
        """
        return look_ahead(self, batches, sampling, exactness, first_step, **options)

    async def push_weights(
        self,
        source: Source,
        target: t.WeightTarget = t.WeightTarget.POLICY,
        *,
        in_flight: t.InFlight = t.InFlight.REFUSE,
    ) -> t.UpdateFinished:
        """Send weights as the next version. When this returns, the fleet serves them.

        `in_flight` says what becomes of samples, of any run, that are unfinished then. With REFUSE they keep the
        version that they have: FailedPreconditionError, reason SAMPLES_UNFINISHED. `finish_push` applies the
        weights later without sending them again.

        `source` is tensors (numpy or torch), by name or as an iterator of pairs, which go through the run's
        `WeightStream` or `WeightCollective` or are written to its `WeightFolder`; the asynchronous client reads
        them in a thread of its own. On several shards the weights are staged on all before any applies them, and
        tensors are read once. Or it is a folder in Hugging Face layout, which the instances read. `ShardedTensors`
        are written by all ranks, of which rank 0 pushes, to a `WeightFolder`. An error leaves the version that was
        served.
        """
        weights = self._weights
        if not isinstance(source, str | Path | ShardedTensors):
            # Before an update is started, which others would have to wait for.
            check(source)

        def pushing(push: VersionPush) -> Awaitable[t.UpdateFinished]:
            if not isinstance(source, str | Path | ShardedTensors):
                if isinstance(weights, WeightStream):
                    return push_stream(self.client, push, weights, source, in_flight)
                if isinstance(weights, WeightCollective):
                    return push_collective(push, weights, source, in_flight)
            return push_folder(
                self.client,
                push,
                lambda version: self._folder(version, source),
                lambda published, folder: self._delta(published, folder, source),
                in_flight,
            )

        try:
            return await self._push(target, pushing)
        except Exception:
            if isinstance(source, ShardedTensors):
                # The error that led here is the one to report.
                with suppress(PacelineError):
                    await self.client.run_work(source.give_up)
            raise

    async def finish_push(self, *, in_flight: t.InFlight = t.InFlight.REFUSE) -> t.UpdateFinished:
        """Apply the weights of the last push, which was refused because samples were unfinished.

        They are staged until the gateway has not heard of them for its `update_timeout_seconds`; then, and where
        another push came first, `NotFoundError`. ValueError: no push of this object was refused.
        """
        if self._refused is None:
            raise ValueError("there is no push that was refused because samples were unfinished")
        finished = await self._refused.finish(in_flight)
        await self._pushed()
        return finished

    async def _push(
        self, target: t.WeightTarget, pushing: Callable[[VersionPush], Awaitable[t.UpdateFinished]]
    ) -> t.UpdateFinished:
        """Push a version; one that was refused because samples were unfinished can be finished later."""
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
        if isinstance(self._weights, WeightFolder):
            await self.client.run_work(self._weights.prune)

    async def push_adapter(
        self, source: Adapter | Path | str, *, in_flight: t.InFlight = t.InFlight.REFUSE
    ) -> t.UpdateFinished:
        """Send a LoRA adapter as the next version; instances merge it with the full version that it builds on.

        That is the last full version that was pushed, or the model that the fleet started with: an adapter replaces
        the one before. `source` is an `Adapter` or the folder of one in PEFT's layout. It is written to the run's
        `WeightFolder`. An error leaves the version that was served. `in_flight`: as in `push_weights`.
        """
        weights = self._weights
        if not isinstance(weights, WeightFolder):
            raise ValueError("to push adapters, open the run with weights=WeightFolder(...)")
        given = Path(source) if isinstance(source, str) else source

        async def pushing(push: VersionPush) -> t.UpdateFinished:
            published = push.base
            if published is None:
                raise shards_differ({name: each.policy_version for name, each in push.published.items()})
            base = await self.client.run_work(lambda: weights.base_of(published))
            return await push_folder(
                self.client,
                push,
                lambda version: weights.write_adapter(version, given, base),
                in_flight=in_flight,
            )

        return await self._push(t.WeightTarget.POLICY, pushing)

    def _folder(self, version: int, source: Source) -> Path:
        if isinstance(source, str | Path):
            return Path(source).absolute()
        if not isinstance(self._weights, WeightFolder):
            raise ValueError("to push these tensors, open the run with weights=WeightFolder(...)")
        return self._weights.write(version, source)

    def _delta(self, published: t.Versions, folder: Path, source: Source) -> Path | None:
        if not isinstance(self._weights, WeightFolder) or isinstance(source, str | Path):
            return None
        return self._weights.write_delta(published, folder)
