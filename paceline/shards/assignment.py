"""Assign prompts to shards: weighted rendezvous hashing with bounded load. Pure.

A prompt's assignment depends on its id, the shards and the batch's other prompts, not on the step or the order.
So a prompt that comes again in a later epoch goes where its history, its suffix index and its cached prefix are,
except for the few that the bound moves. A shard that is added takes its share of the prompts from all others, and
apart from the bound no prompt moves between those.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

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
