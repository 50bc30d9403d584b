"""Take one version of the weights to all shards: staged on every shard before it is applied on any."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from paceline import types as t
from paceline.calls import GatewayCalls
from paceline.errors import FailedPreconditionError, PacelineError
from paceline.shards import OpenShard, Shards

_STAGINGS = 3
"""Times that weights are staged which instances lose before they are applied."""
Started = TypeVar("Started", t.UpdateStarted, t.StreamStarted, t.CollectiveStarted)


@dataclass(slots=True)
class VersionPush:
    """A version on its way, and how far it has come on each shard.

    It is the version above the highest that any shard serves. So a push after one that broke while shards applied
    it brings all of them to one version again, whatever each of them had.
    """

    shards: Shards
    run_id: str
    target: t.WeightTarget
    published: Mapping[str, t.Versions]
    """What each shard served when the push began."""
    version: int
    push_id: str = field(default_factory=lambda: secrets.token_hex(8))
    """Distinguishes this push from one of a trainer that died and was started again under the same run."""
    _updates: dict[str, str] = field(default_factory=dict)
    """The update of each shard on which one was started and is not applied."""
    _finished: dict[str, t.UpdateFinished] = field(default_factory=dict)

    @classmethod
    async def begin(cls, client: GatewayCalls, run_id: str, target: t.WeightTarget) -> VersionPush:
        """Read what the shards serve, and name the version above it."""
        published = await client.shards.versions()
        version = 1 + max(version_of(each, target) for each in published.values())
        return cls(client.shards, run_id, target, published, version)

    @property
    def base(self) -> t.Versions | None:
        """The published versions, if they are the same everywhere."""
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
        """Start an update to a version on all shards, stage it on all by `work`, and finish it; an error aborts it.

        Not so an error for which `keeps_staged` is True: `finish` can go on then. `feed` runs beside the work, in
        the calling thread.
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
                    # The first error tells which shards have the version already.
                    raise (lost or error) from error
                try:
                    return await self.finish(in_flight)
                except FailedPreconditionError as error:
                    # The instances that had them are gone. What was fed cannot be fed again.
                    if error.reason != "WEIGHTS_NOT_STAGED" or feed is not None or not left:
                        raise
                    lost = error
            raise AssertionError("the last round returns or raises")

    async def _start(self, start: Callable[[OpenShard, int], Awaitable[Started]]) -> dict[str, Started]:
        """Start the update on all shards; each that was started is known, so that it can be aborted."""
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
        """Start the update of a shard. One that an earlier push of this run left there gives way, among several."""
        try:
            return await start(member, self.version)
        except FailedPreconditionError as error:
            left = error.metadata.get("version", "")
            if self.shards.alone or error.reason != "UPDATE_IN_PROGRESS" or left == str(self.version):
                raise
            # Only the update of the same run can be started again; any other refuses.
            with suppress(PacelineError):
                await member.calls.abort_update((await start(member, int(left))).update_id)
            return await start(member, self.version)

    async def finish(self, in_flight: t.InFlight) -> t.UpdateFinished:
        """Apply the staged weights on the shards that do not serve them yet; return what became of all.

        The error of several shards is that of one which failed otherwise than for unfinished samples, if there is
        such a one; its `shard` has all their names.
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
        """Finish the update of a shard. If the answer was lost, the published version decides whether it failed."""
        try:
            finished = await member.calls.finish_update(self._updates[member.name], in_flight)
        except PacelineError:
            found = await member.calls.versions()
            if version_of(found, self.target) != self.version:
                raise
            finished = t.UpdateFinished(found.policy_version, found.drafter_version, found.instances)
        self._finished[member.name] = finished
        del self._updates[member.name]

    @asynccontextmanager
    async def _aborting(self) -> AsyncIterator[None]:
        """Abort what was started where an error ends the block, unless it leaves the weights staged."""
        try:
            yield
        except GeneratorExit:
            raise
        except BaseException as raised:
            if isinstance(raised, PacelineError) and not self.shards.alone:
                raised.served = self._served()
            if not keeps_staged(raised):
                left = [member for member in self.shards.members if member.name in self._updates]
                # The error that led here is the one to report.
                await self.shards.each(
                    lambda member: member.calls.abort_update(self._updates[member.name]), left
                )
            raise

    def _served(self) -> dict[str, int]:
        """Return the version that each shard serves, as far as this push knows."""
        return {
            name: self.version if name in self._finished else version_of(each, self.target)
            for name, each in self.published.items()
        }


def keeps_staged(error: BaseException) -> bool:
    """Return True if an update was refused because samples are unfinished, and its weights stay staged."""
    return isinstance(error, FailedPreconditionError) and error.reason == "SAMPLES_UNFINISHED"


def version_of(versions: t.Versions, target: t.WeightTarget) -> int:
    """Return the version of a target."""
    return versions.drafter_version if target is t.WeightTarget.DRAFTER else versions.policy_version
