"""Order in which weights go from instance to instance. Pure.

The trainer pushes to the first. Each other one fetches from the one before it, or where that fails from the nearest
before that.
Instances of one host follow each other, so that the bytes come to each host once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MOST_PEERS = 16
"""Instances that one may fetch from. So many in a row that die at once cost their successor this update."""


@dataclass(frozen=True, slots=True)
class ChainLink:
    """An instance, where it is reached, and whether it is at work with weights of its own just now."""

    instance_id: str
    address: str
    busy: bool = False


def chain(links: Iterable[ChainLink]) -> list[ChainLink]:
    """Return instances in the order in which weights go through them, those that are busy last."""
    return sorted(links, key=lambda each: (each.busy, each.address.rpartition(":")[0], each.instance_id))


def predecessors(order: Sequence[ChainLink], place: int) -> list[str]:
    """Return the addresses that the instance at a place fetches from, the nearest first."""
    return [each.address for each in reversed(order[max(0, place - MOST_PEERS) : place])]
