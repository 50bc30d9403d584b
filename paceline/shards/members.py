"""The shards of a client, each with its calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from paceline import client_errors, errors
from paceline import types as t
from paceline.shards.assignment import Shard, assign, layout
from paceline.shards.concurrency import Concurrency, Tasks

if TYPE_CHECKING:
    from paceline.calls import GatewayCalls

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class OpenShard:
    """A shard, and the calls of its deployment."""

    shard: Shard
    calls: GatewayCalls

    @property
    def name(self) -> str:
        """The shard's name."""
        return self.shard.name


class Shards:
    """All shards of a client. With a single one, everything is as if there were none."""

    def __init__(self, members: Sequence[OpenShard], concurrency: Concurrency | None = None) -> None:
        self.members = tuple(members)
        self.concurrency = concurrency or Tasks()

    @property
    def alone(self) -> bool:
        """True if there is one shard."""
        return len(self.members) == 1

    def member(self, name: str) -> OpenShard:
        """Return a shard by its name; ValueError: there is none."""
        for member in self.members:
            if member.name == name:
                return member
        raise ValueError(f"there is no shard {name!r}, only {', '.join(each.name for each in self.members)}")

    def id_of(self, batch_id: str) -> str:
        """Return the id under which shards have their parts of a batch.

        With other shards a prompt may belong elsewhere, so a part of the same batch has another content then.
        """
        if self.alone:
            return batch_id
        return f"{batch_id}.shards-{layout([member.shard for member in self.members])}"

    def split(self, groups: Sequence[t.Group]) -> list[tuple[OpenShard, Sequence[t.Group]]]:
        """Return the shards that have groups of a batch, each with its own in their order."""
        if self.alone:
            return [(self.members[0], groups)]
        assigned = assign([group.prompt_id for group in groups], [member.shard for member in self.members])
        parts = [
            (member, [group for group, owner in zip(groups, assigned, strict=True) if owner == index])
            for index, member in enumerate(self.members)
        ]
        return [part for part in parts if part[1]] or [(self.members[0], groups)]

    def spread(self, groups: Sequence[t.Group]) -> dict[str, list[t.Group]]:
        """Return the groups of each shard that has some, by its name; a prompt's depends on nothing but the shards.

        So what is added bit by bit comes to the same shard, however it is divided into bits. The shards' shares are
        as even as chance makes them.
        """
        if self.alone:
            return {self.members[0].name: list(groups)} if groups else {}
        shards, parts = [member.shard for member in self.members], dict[str, list[t.Group]]()
        for group in groups:
            (index,) = assign([group.prompt_id], shards)
            parts.setdefault(self.members[index].name, []).append(group)
        return parts

    async def all(
        self,
        work: Callable[[OpenShard], Awaitable[R]],
        among: Sequence[OpenShard] | None = None,
        feed: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> list[R]:
        """Do the same on all shards at once; the first error, which names its shard, stops the others.

        `feed` runs at the same time, in the calling thread.
        """
        chosen = self.members if among is None else among
        if self.alone and feed is None:
            return [await work(member) for member in chosen]
        named: list[Coroutine[Any, Any, Any]] = [_named(work, member) for member in chosen]
        beside = [] if feed is None else [feed()]
        outcomes = await self.concurrency.gather([*beside, *named], keep_going=False)
        return _without_errors(outcomes)[len(beside) :]

    async def each(
        self, work: Callable[[OpenShard], Awaitable[R]], among: Sequence[OpenShard] | None = None
    ) -> list[R | Exception]:
        """Do the same on all shards at once, whatever becomes of the others; return each one's result or error."""
        chosen = self.members if among is None else among
        if not self.alone:
            return await self.concurrency.gather([_named(work, each) for each in chosen], keep_going=True)
        try:
            return [await work(member) for member in chosen]
        except Exception as error:
            return [error]

    async def versions(self) -> dict[str, t.Versions]:
        """Return the published versions of each shard by its name."""
        found = await self.all(lambda member: member.calls.versions())
        return dict(zip((member.name for member in self.members), found, strict=True))

    async def published(self) -> t.Versions:
        """Return what the first shard serves, of which all serve the policy version.

        FailedPreconditionError with the reason SHARDS_DIFFER: a push did not reach all of them.
        """
        found = await self.versions()
        served = {name: each.policy_version for name, each in found.items()}
        if len(set(served.values())) > 1:
            raise client_errors.shards_differ(served)
        return next(iter(found.values()))

    async def version(self) -> int:
        """Return the policy version that all shards serve. Errors are those of `published`."""
        return (await self.published()).policy_version


async def _named(work: Callable[[OpenShard], Awaitable[R]], member: OpenShard) -> R:
    with errors.on_shard(member.name):
        return await work(member)


def _without_errors(outcomes: Sequence[R | Exception]) -> list[R]:
    """Return the results; raise the error that stopped the others, if there is one."""
    failures = [each for each in outcomes if isinstance(each, Exception)]
    # Those that were stopped are CANCELLED.
    causes = [each for each in failures if not isinstance(each, errors.CancelledError)]
    if failures:
        raise (causes or failures)[0]
    return [each for each in outcomes if not isinstance(each, Exception)]
