"""A training job as seen by its trainer: rollouts of a step, and weights after it.

    async with client.run("run-1", seed=7) as run:
        for step in range(steps):
            rollout = await run.rollout(step, groups, SamplingParams(max_tokens=512))
            samples = [sample async for sample in rollout]
            await run.push_weights(learner.update(samples))

A trainer that was restarted requests the same batches and gets the samples that exist already.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from paceline import types as t
from paceline.adapters import Adapter
from paceline.calls import GatewayCalls
from paceline.errors import FailedPreconditionError, NotFoundError, PacelineError, shards_differ
from paceline.rollout import AsyncRollout
from paceline.run_rollouts import RunRollouts
from paceline.safetensors import Tensors
from paceline.sharded_tensors import ShardedTensors
from paceline.shards import OpenShard
from paceline.split import first_part
from paceline.version_push import VersionPush, keeps_staged
from paceline.weight_collective import WeightCollective, push_collective
from paceline.weight_stream import WeightStream, push_stream
from paceline.weights import WeightFolder, push_folder

WeightTransport = WeightFolder | WeightStream | WeightCollective
"""Ways of weights from a trainer to the instances."""
Source = Path | str | Tensors | ShardedTensors
"""Weights: a folder in Hugging Face layout, tensors by name, or of ranks, or an iterator of names and tensors."""


class AsyncRun:
    """One training job on an asynchronous client.

    The nth batch of a step and policy version always has the same id, so that a trainer that was restarted gets the
    samples that exist already.
    """

    def __init__(self, client: GatewayCalls, run_id: str, seed: int, weights: WeightTransport | None) -> None:
        self.client = client
        self.run_id = run_id
        self._seed = seed
        self._weights = WeightStream() if weights is None else weights
        self._numbers: dict[tuple[int, int], int] = {}
        """Batches so far of each step and policy version."""
        self._refused: VersionPush | None = None
        """Push whose weights are staged, and wait for unfinished samples."""
        self._rollouts = RunRollouts()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, raised: object, *_: object) -> None:
        """Acknowledge what was read, unless an exception ends the run."""
        if raised is None:
            self.close()

    def close(self) -> None:
        """Acknowledge all batches that were read to their ends: nobody will read them again."""
        self._rollouts.acknowledge(math.inf)

    async def end(self) -> t.RunEnded:
        """End the job: cancel its unfinished samples, and let go of all that is kept for it, on every shard."""
        self._rollouts.clear()
        ended = await self.client.shards.all(lambda member: member.calls.end_run(self.run_id))
        return t.RunEnded(sum(each.batches for each in ended), sum(each.cancelled for each in ended))

    async def rollout(
        self,
        step: int,
        groups: Sequence[t.Group],
        sampling: t.SamplingParams | None = None,
        *,
        exactness: t.Exactness | None = None,
        policy_version: int | None = None,
        deadline: float | None = None,
        priority: int = 0,
        weight: int = 1,
    ) -> AsyncRollout:
        """Submit a batch and return its samples as an iterable, in completion order.

        The samples are of the published policy version unless `policy_version` names another. Batches of higher
        `priority` are placed first; within one, runs share the instances by `weight`. A batch that is too large for
        one call (16 MiB, 65,536 samples) is submitted in parts and read as one, a part at a time in turn. Those of
        earlier steps that were read to their ends are acknowledged: they cannot be read again.
        """
        if policy_version is None:
            policy_version = await self.client.shards.version()
        key = (step, policy_version)
        number = self._numbers.get(key, 0)
        batch = t.Batch(
            run_id=self.run_id,
            batch_id=f"step-{step:06d}.v{policy_version}.{number}",
            step=step,
            policy_version=policy_version,
            groups=groups,
            sampling=sampling or t.SamplingParams(),
            exactness=exactness or t.Exactness(),
            run_seed=self._seed,
            deadline=deadline,
            priority=priority,
            weight=weight,
        )
        rollout = AsyncRollout(self.client, batch)
        await rollout.begin()
        self._numbers[key] = number + 1
        self._rollouts.add(rollout)
        return rollout

    def stats(self, step: int) -> dict[str, float]:
        """Return figures of the samples of a step that were read so far, flat, for a logger of experiments.

        Names begin with `rollout/`; docs/sdk.md lists them. Those of the last 8 steps are kept. ValueError: no
        samples of the step were asked for by this object.
        """
        return self._rollouts.stats(step)

    async def hint(
        self,
        step: int,
        groups: Sequence[t.Group],
        sampling: t.SamplingParams | None = None,
        *,
        policy_version: int,
        exactness: t.Exactness | None = None,
    ) -> int:
        """Announce the prompts of a coming step; return how many samples may be pre-generated.

        Of a step that is too large for one call, the first part is announced; on each shard, its prompts.
        """
        sampling, exactness = sampling or t.SamplingParams(), exactness or t.Exactness()
        parts = {member.name: first_part(own) for member, own in self.client.shards.split(groups)}

        async def announce(member: OpenShard) -> int:
            own = parts[member.name]
            return await member.calls.hint(
                t.BatchHint(self.run_id, step, policy_version, own, sampling, exactness, self._seed)
            )

        shards = self.client.shards
        return sum(await shards.all(announce, [each for each in shards.members if each.name in parts]))

    async def report_rewards(
        self,
        batch_id: str,
        rewards: Iterable[t.Reward] = (),
        *,
        kl: float | None = None,
        clip_fraction: float | None = None,
    ) -> int:
        """Report the rewards of a batch, and what its update measured; return how many samples were known."""
        if (rollout := self._rollouts.find(batch_id)) is not None:
            return await rollout.report_rewards(rewards, kl=kl, clip_fraction=clip_fraction)
        shards, given = self.client.shards, list(rewards)

        async def report(member: OpenShard) -> int:
            try:
                return await member.calls.report_rewards(
                    self.run_id, shards.id_of(batch_id), given, kl=kl, clip_fraction=clip_fraction
                )
            except NotFoundError:
                # A small batch is not on all shards.
                if shards.alone:
                    raise
                return 0

        return sum(await shards.all(report))

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
