"""Push one version of the weights to all shards: every shard stages it before any shard applies it.

`WeightTransport` is the interface of what moves the bytes; `VersionPush` has the phases, which all share.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from paceline import types as t
from paceline.calls import GatewayCalls
from paceline.errors import FailedPreconditionError, PacelineError
from paceline.shards import OpenShard, Shards
from paceline.weights.adapters import Adapter
from paceline.weights.safetensors import Tensors
from paceline.weights.sharded import ShardedTensors

_STAGINGS = 3
"""Attempts to stage weights, if the instances that have them are lost before the weights are applied."""

Started = TypeVar("Started", t.UpdateStarted, t.StreamStarted)


@dataclass(slots=True)
class VersionPush:
    """Push of one version, and its progress on each shard.

    The version is one above the highest that any shard serves. So after a push that failed while shards applied it,
    the next push brings all shards to the same version again.
    """

    shards: Shards
    run_id: str
    target: t.WeightTarget
    published: Mapping[str, t.Versions]
    """Versions that each shard served when the push began."""
    version: int
    push_id: str = field(default_factory=lambda: secrets.token_hex(8))
    """Distinguishes this push from a push of the same run by a trainer that died and was restarted."""
    _updates: dict[str, str] = field(default_factory=dict)
    """Ids of the updates that were started and are not applied yet, by shard."""
    _finished: dict[str, t.UpdateFinished] = field(default_factory=dict)

    @classmethod
    async def begin(cls, client: GatewayCalls, run_id: str, target: t.WeightTarget) -> VersionPush:
        """Read the versions that the shards serve, and choose the one above them."""
        published = await client.shards.versions()
        version = 1 + max(version_of(each, target) for each in published.values())
        return cls(client.shards, run_id, target, published, version)

    @property
    def base(self) -> t.Versions | None:
        """The published versions, if all shards have the same policy; else None."""
        first, *others = self.published.values()
        mark = (first.policy_version, first.policy_checksum)
        return first if all((each.policy_version, each.policy_checksum) == mark for each in others) else None

    async def stage(
        self,
        start: Callable[[OpenShard, int], Awaitable[Started]],
        work: Callable[[OpenShard, Started], Awaitable[object]],
        in_flight: t.InFlight,
        feed: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> t.UpdateFinished:
        """Start the update on all shards, stage it on all by `work`, and finish it.

        An error aborts the update, unless `keeps_staged` is True for it: then `finish` can be called again. `feed`
        runs concurrently with `work`, in the calling thread.
        """
        async with self._aborting():
            started = await self._start(start)
            lost: FailedPreconditionError | None = None
            for left in reversed(range(_STAGINGS)):
                members = [member for member in self.shards.members if member.name in self._updates]
                try:
                    await self.shards.all(
                        lambda member: work(member, started[member.name]), members, feed=feed
                    )
                except PacelineError as error:
                    # `lost`, if there is one, names the shards that have the version already.
                    raise (lost or error) from error
                try:
                    return await self.finish(in_flight)
                except FailedPreconditionError as error:
                    # The instances that had the weights are gone. `feed` runs only once.
                    if error.reason != "WEIGHTS_NOT_STAGED" or feed is not None or not left:
                        raise
                    lost = error
            raise AssertionError("the last round returns or raises")

    async def _start(self, start: Callable[[OpenShard, int], Awaitable[Started]]) -> dict[str, Started]:
        """Start the update on all shards, and record each that has started, so that it can be aborted."""
        started: dict[str, Started] = {}

        async def begin(member: OpenShard) -> None:
            started[member.name] = found = await self._start_on(member, start)
            self._updates[member.name] = found.update_id

        for outcome in await self.shards.each(begin):
            if isinstance(outcome, Exception):
                raise outcome
        return started

    async def _start_on(
        self, member: OpenShard, start: Callable[[OpenShard, int], Awaitable[Started]]
    ) -> Started:
        """Start the update of a shard; with several shards, abort one that an earlier push of this run left."""
        try:
            return await start(member, self.version)
        except FailedPreconditionError as error:
            left = error.metadata.get("version", "")
            if self.shards.alone or error.reason != "UPDATE_IN_PROGRESS" or left == str(self.version):
                raise
            # Starting it again returns its id, for the same run only; the gateway refuses any other.
            with suppress(PacelineError):
                await member.calls.abort_update((await start(member, int(left))).update_id)
            return await start(member, self.version)

    async def finish(self, in_flight: t.InFlight) -> t.UpdateFinished:
        """Apply the staged weights on the shards that do not serve them yet; return the outcome on all shards.

        If several shards fail, the error of one whose weights do not stay staged is raised first. Its `shard` names
        all of them.
        """
        left = [member for member in self.shards.members if member.name in self._updates]
        outcomes = await self.shards.each(lambda member: self._finish_on(member, in_flight), left)
        failed = {
            member.name: outcome
            for member, outcome in zip(left, outcomes, strict=True)
            if isinstance(outcome, Exception)
        }
        if failed:
            error = next((each for each in failed.values() if not keeps_staged(each)), None)
            error = error or next(iter(failed.values()))
            if isinstance(error, PacelineError) and not self.shards.alone:
                error.shard, error.served = ", ".join(failed), self._served()
            raise error
        results = [self._finished[member.name] for member in self.shards.members]
        return t.UpdateFinished(
            results[0].policy_version,
            results[0].drafter_version,
            tuple(instance for each in results for instance in each.instances),
            sum(each.aborted_samples for each in results),
            sum(each.continued_samples for each in results),
        )

    async def _finish_on(self, member: OpenShard, in_flight: t.InFlight) -> None:
        """Finish the update of a shard. If the answer was lost, the published version decides if it succeeded."""
        try:
            finished = await member.calls.finish_update(self._updates[member.name], in_flight)
        except PacelineError as error:
            if keeps_staged(error):
                raise
            try:
                found = await member.calls.versions()
            except PacelineError:
                raise error from None
            if version_of(found, self.target) != self.version:
                raise
            finished = t.UpdateFinished(found.policy_version, found.drafter_version, found.instances)
        self._finished[member.name] = finished
        del self._updates[member.name]

    @asynccontextmanager
    async def _aborting(self) -> AsyncIterator[None]:
        """Abort the started updates if an error ends the block, unless the error keeps the weights staged."""
        try:
            yield
        except GeneratorExit:
            raise
        except BaseException as raised:
            if isinstance(raised, PacelineError) and not self.shards.alone:
                raised.served = self._served()
            if not keeps_staged(raised):
                left = [member for member in self.shards.members if member.name in self._updates]
                # Errors of aborting are dropped: `raised` is the one to report.
                await self.shards.each(
                    lambda member: member.calls.abort_update(self._updates[member.name]), left
                )
            raise

    def _served(self) -> dict[str, int]:
        """Return the version that each shard serves, according to what this push has seen."""
        return {
            name: self.version if name in self._finished else version_of(each, self.target)
            for name, each in self.published.items()
        }


class WeightTransport(ABC):
    """Transport of weights from a trainer to the instances.

    Its methods stage and finish a version by `push.stage`. An error aborts the update, unless `keeps_staged` is
    True for it: then `push.finish` can be called again. `in_flight` decides about samples that are unfinished.
    """

    __slots__ = ()

    @abstractmethod
    async def push(
        self, client: GatewayCalls, push: VersionPush, tensors: Tensors, in_flight: t.InFlight
    ) -> t.UpdateFinished:
        """Push tensors, by name or as pairs that are read once.

        Raises:
            ValueError: tensors that cannot be written (see `safetensors.write`).
            PacelineError: the update failed; the previous version is served.
        """

    async def push_sharded(
        self, client: GatewayCalls, push: VersionPush, tensors: ShardedTensors, in_flight: t.InFlight
    ) -> t.UpdateFinished:
        """Push tensors that several ranks hold in parts. ValueError: this transport cannot."""
        raise ValueError("to push these tensors, open the run with weights=WeightFolder(...)")

    async def push_adapter(
        self, client: GatewayCalls, push: VersionPush, source: Adapter | Path, in_flight: t.InFlight
    ) -> t.UpdateFinished:
        """Push a LoRA adapter on the published version. ValueError: this transport cannot."""
        raise ValueError("to push adapters, open the run with weights=WeightFolder(...)")

    def prune(self) -> None:
        """Remove what no instance needs any more, after each version that was published."""
        return None


def keeps_staged(error: BaseException) -> bool:
    """Return True for a refusal because of unfinished samples or of their KV: the weights stay staged."""
    return isinstance(error, FailedPreconditionError) and error.reason in (
        "SAMPLES_UNFINISHED",
        "KV_NOT_KEPT",
    )


def version_of(versions: t.Versions, target: t.WeightTarget) -> int:
    """Return the version of the policy or of the drafter."""
    return versions.drafter_version if target is t.WeightTarget.DRAFTER else versions.policy_version
