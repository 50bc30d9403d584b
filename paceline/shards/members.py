"""Shards of a client: prompts are assigned to them, and each has its connection and its calls.

Assignment is weighted rendezvous hashing with bounded load. A prompt's shard depends on its id, the shards and
the batch's other prompts, not on the step or the order. So a prompt that comes again in a later epoch goes where
its history, its suffix index and its cached prefix are, except for the few that the bound moves. A shard that is
added takes its share of the prompts from all others, and apart from the bound no prompt moves between those.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import grpc

from paceline import errors
from paceline import errors as client_errors
from paceline import types as t
from paceline.shards.concurrency import Concurrency, Tasks
from paceline.transport.channel import Tls
from paceline.transport.interface import Ended, Stream, Transport, Unary

if TYPE_CHECKING:
    from paceline.calls import GatewayCalls


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
    """Return the shards that a client was given, with their names.

    ValueError: there is none, a name comes twice, or a weight is not finite and positive.
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
            raise ValueError(f"shard {shard.name!r} is there twice: give each a name of its own")
    return named


def assign(prompt_ids: Sequence[str], shards: Sequence[Shard], slack: float = SLACK) -> list[int]:
    """Return the index of each prompt's shard.

    No shard gets more than ceil(share * (1 + slack)) prompts, where its share is in proportion to its weight.
    """
    if len(shards) == 1:
        return [0] * len(prompt_ids)
    # The sum must not depend on the order.
    total = math.fsum(shard.weight for shard in shards)
    room = [math.ceil(len(prompt_ids) * shard.weight / total * (1 + slack)) for shard in shards]
    assigned = [0] * len(prompt_ids)
    # Ordered by hash, so that the same prompts give way in every epoch, however a batch is shuffled.
    for number in sorted(range(len(prompt_ids)), key=lambda number: (_hash("", prompt_ids[number]), number)):
        ranked = _ranking(prompt_ids[number], shards)
        chosen = next(index for index in ranked if room[index])
        room[chosen] -= 1
        assigned[number] = chosen
    return assigned


def layout(shards: Sequence[Shard]) -> str:
    """Return a short name of what assignments depend on beside the prompts: the shards' names and weights."""
    described = repr(sorted((shard.name, shard.weight) for shard in shards))
    return hashlib.blake2b(described.encode(), digest_size=4).hexdigest()


def _ranking(prompt_id: str, shards: Sequence[Shard]) -> list[int]:
    """Return the shards' indexes, the best one for a prompt first.

    Each shard draws an exponential time at the rate of its weight: it comes first with a probability in proportion
    to its weight, and shards that are added or removed leave the others' order alone.
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


def connect(
    shards: Sequence[Shard],
    transport_to: Callable[[str], Transport],
    calls_on: Callable[[Transport], GatewayCalls],
    concurrency: Concurrency,
) -> tuple[Transport, Shards | None]:
    """Return the transport of a client's own calls, and its shards if there are several."""
    transports = [transport_to(shard.address) for shard in shards]
    if len(shards) == 1:
        return transports[0], None
    members = [
        OpenShard(shard, calls_on(transport)) for shard, transport in zip(shards, transports, strict=True)
    ]
    return _SeveralTransports(transports, [shard.name for shard in shards]), Shards(members, concurrency)


class _SeveralTransports:
    """Transport of a client of several shards: it refuses calls that would have to name their shard."""

    def __init__(self, transports: Sequence[Transport], names: Sequence[str]) -> None:
        self._transports = transports
        self._names = names

    async def send(self, unary: Unary) -> Any:
        self._refuse(unary.method)

    def post(self, unary: Unary, ended: Ended) -> None:
        self._refuse(unary.method)

    def open(self, stream: Stream[Any], seconds: float | None) -> NoReturn:
        self._refuse(stream.method)

    async def sleep(self, seconds: float) -> bool:
        return await self._transports[0].sleep(seconds)

    async def run_work(self, work: Callable[[], R]) -> R:
        return await self._transports[0].run_work(work)

    async def lacks_tls(self) -> bool:
        return False

    def dial(self, address: str, tls: Tls | None) -> grpc.Channel:
        return self._transports[0].dial(address, tls)

    async def close(self) -> None:
        for transport in self._transports:
            await transport.close()

    def _refuse(self, method: str) -> NoReturn:
        raise errors.shard_not_named(method, self._names)
