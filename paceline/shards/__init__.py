"""Several deployments of one training job: the assignment of prompts to them, and work on all of them at once.

Most clients have one shard, for which every method of `Shards` takes a short path.

Assignment is weighted rendezvous hashing with bounded load. A prompt's shard depends on its id, the shards and
the batch's other prompts, not on the step or the order. So in a later epoch a prompt is sent to the shard that has
its history, its suffix index and its cached prefix, except for the few prompts that the bound moves. A shard that
is added takes its share of the prompts from all others, and apart from the bound no prompt moves between those.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from paceline import errors
from paceline import types as t
from paceline.shards.concurrency import Concurrency, Tasks

if TYPE_CHECKING:
    from paceline.calls import GatewayCalls

R = TypeVar("R")

SLACK = 0.05
"""A shard may get this much more than its share. More would delay steps, less would move more prompts."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One deployment among several that serve a training job together."""

    address: str
    """host:port, or several with commas between, of which one leads."""
    name: str = ""
    """Name in errors; prompts are assigned by it, so it should outlast the address. Default: the address."""
    weight: float = 1.0
    """Capacity relative to the other shards, such as the number of instances; > 0."""


def shards_of(address: str | Sequence[str | Shard]) -> tuple[Shard, ...]:
    """Return the shards of a client's address or addresses, with their names.

    ValueError: there is none, a name occurs twice, or a weight is not finite and positive.
    """
    given = [address] if isinstance(address, str) else list(address)
    shards = [Shard(each) if isinstance(each, str) else each for each in given]
    named = tuple(Shard(each.address, each.name or each.address, each.weight) for each in shards)
    if not named:
        raise ValueError("a client needs at least one address")
    for number, shard in enumerate(named):
        if not 0 < shard.weight < math.inf:
            raise ValueError(f"weight of shard {shard.name!r} must be finite and > 0, got {shard.weight}")
        if shard.name in {other.name for other in named[:number]}:
            raise ValueError(f"shard {shard.name!r} is there twice: give each its own name")
    return named


def assign(prompt_ids: Sequence[str], shards: Sequence[Shard], slack: float = SLACK) -> list[int]:
    """Return the index of each prompt's shard.

    No shard gets more than ceil(share * (1 + slack)) prompts, where its share is in proportion to its weight.
    """
    if len(shards) == 1:
        return [0] * len(prompt_ids)
    # fsum, because the sum must not depend on the order.
    total = math.fsum(shard.weight for shard in shards)
    room = [math.ceil(len(prompt_ids) * shard.weight / total * (1 + slack)) for shard in shards]
    assigned = [0] * len(prompt_ids)
    # Ordered by hash, so that the bound moves the same prompts in every epoch, however a batch is shuffled.
    for number in sorted(range(len(prompt_ids)), key=lambda number: (_hash("", prompt_ids[number]), number)):
        ranked = _ranking(prompt_ids[number], shards)
        chosen = next(index for index in ranked if room[index])
        room[chosen] -= 1
        assigned[number] = chosen
    return assigned


def layout(shards: Sequence[Shard]) -> str:
    """Return a hash of the shards' names and weights, on which assignments depend in addition to the prompts."""
    described = repr(sorted((shard.name, shard.weight) for shard in shards))
    return hashlib.blake2b(described.encode(), digest_size=4).hexdigest()


def _ranking(prompt_id: str, shards: Sequence[Shard]) -> list[int]:
    """Return the indexes of the shards, the best one for a prompt first.

    Each shard draws an exponential time at the rate of its weight: it comes first with a probability in proportion
    to its weight, and adding or removing a shard does not change the order of the others.
    """

    def drawn(index: int) -> tuple[float, str]:
        shard = shards[index]
        uniform = (_hash(shard.name, prompt_id) + 0.5) / 2**64
        return -math.log(uniform) / shard.weight, shard.name

    return sorted(range(len(shards)), key=drawn)


def _hash(name: str, prompt_id: str) -> int:
    digest = hashlib.blake2b(_salt(name) + prompt_id.encode(), digest_size=8, person=b"paceline-shards")
    return int.from_bytes(digest.digest(), "little")


@lru_cache
def _salt(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8).digest()


@dataclass(frozen=True, slots=True)
class OpenShard(Shard):
    """A shard with the calls to its deployment."""

    calls: GatewayCalls = field(kw_only=True, repr=False)


class Shards:
    """All shards of a client. With a single one, calls are made directly and batches keep their ids."""

    def __init__(self, members: Sequence[OpenShard], concurrency: Concurrency | None = None) -> None:
        self.members = tuple(members)
        self.alone = len(self.members) == 1
        """True if there is one shard, as usual."""
        self.concurrency = concurrency or Tasks()

    def member(self, name: str) -> OpenShard:
        """Return a shard by its name; ValueError: there is none."""
        for member in self.members:
            if member.name == name:
                return member
        raise ValueError(f"there is no shard {name!r}, only {', '.join(each.name for each in self.members)}")

    def id_of(self, batch_id: str) -> str:
        """Return the id of a batch's parts on the shards.

        It depends on the shards, because with other shards the same batch is divided differently.
        """
        return batch_id if self.alone else f"{batch_id}.shards-{layout(self.members)}"

    def split(self, groups: Sequence[t.Group]) -> list[tuple[OpenShard, Sequence[t.Group]]]:
        """Return the shards that have groups of a batch, each with its groups in order."""
        if self.alone:
            return [(self.members[0], groups)]
        assigned = assign([group.prompt_id for group in groups], self.members)
        parts = [
            (member, [group for group, owner in zip(groups, assigned, strict=True) if owner == index])
            for index, member in enumerate(self.members)
        ]
        return [part for part in parts if part[1]] or [(self.members[0], groups)]

    def spread(self, groups: Sequence[t.Group]) -> dict[str, list[t.Group]]:
        """Return the groups of each shard that has any, by the shard's name, for batches that are added to.

        A prompt's shard depends on the shards alone, not on the groups that are added with it. There is no bound,
        so the shares of the shards are as even as the hash makes them.
        """
        if self.alone:
            return {self.members[0].name: list(groups)} if groups else {}
        parts = dict[str, list[t.Group]]()
        for group in groups:
            (index,) = assign([group.prompt_id], self.members)
            parts.setdefault(self.members[index].name, []).append(group)
        return parts

    async def all(
        self,
        work: Callable[[OpenShard], Awaitable[R]],
        among: Sequence[OpenShard] | None = None,
        feed: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> list[R]:
        """Run `work` on all shards at once; the first error, which names its shard, stops the others.

        `feed` runs at the same time, in the calling thread.
        """
        chosen = self.members if among is None else among
        if self.alone and feed is None:
            return [await work(member) for member in chosen]
        named: list[Coroutine[Any, Any, Any]] = [_named(work, member) for member in chosen]
        first = [] if feed is None else [feed()]
        outcomes = await self.concurrency.gather([*first, *named], keep_going=False)
        return _without_errors(outcomes)[len(first) :]

    async def each(
        self, work: Callable[[OpenShard], Awaitable[R]], among: Sequence[OpenShard] | None = None
    ) -> list[R | Exception]:
        """Run `work` on all shards at once, also when some fail; return the result or error of each."""
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
        """Return the published versions of the first shard; all shards serve the same policy version.

        FailedPreconditionError with the reason SHARDS_DIFFER: a push did not reach all of them.
        """
        if self.alone:
            return await self.members[0].calls.versions()
        found = await self.versions()
        served = {name: each.policy_version for name, each in found.items()}
        if len(set(served.values())) > 1:
            raise errors.shards_differ(served)
        return next(iter(found.values()))

    async def version(self) -> int:
        """Return the policy version that all shards serve; raises as `published` does."""
        return (await self.published()).policy_version


async def _named(work: Callable[[OpenShard], Awaitable[R]], member: OpenShard) -> R:
    with errors.on_shard(member.name):
        return await work(member)


def _without_errors(outcomes: Sequence[R | Exception]) -> list[R]:
    """Return the results; raise the error that stopped the others, if there is one."""
    failures = [each for each in outcomes if isinstance(each, Exception)]
    # The error that stopped the others is not CANCELLED, theirs are.
    causes = [each for each in failures if not isinstance(each, errors.CancelledError)]
    if failures:
        raise (causes or failures)[0]
    return [each for each in outcomes if not isinstance(each, Exception)]


__all__ = ["OpenShard", "Shard", "Shards", "assign", "layout", "shards_of"]
