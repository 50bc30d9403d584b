"""Channels to receivers: kept for the next move, but not all that were ever dialled."""

from __future__ import annotations

import asyncio
from typing import Any

from services.generation.migration.migration import ReceiverChannels


class Channel:
    closed = False

    async def close(self) -> None:
        self.closed = True


class Dialled:
    """Every channel that was dialled, by address."""

    def __init__(self) -> None:
        self.by_address: dict[str, list[Channel]] = {}

    def __call__(self, address: str) -> Any:
        channel = Channel()
        self.by_address.setdefault(address, []).append(channel)
        return channel

    def open(self) -> set[str]:
        return {name for name, made in self.by_address.items() if not all(each.closed for each in made)}


async def use(channels: ReceiverChannels, address: str) -> Any:
    async with channels.to(address) as channel:
        return channel


async def test_those_used_last_are_kept_and_used_again() -> None:
    dialled = Dialled()
    channels = ReceiverChannels(dialled, most_idle=2)
    for address in ("a", "b", "a", "c"):
        await use(channels, address)
    assert dialled.open() == {"a", "c"}
    assert await use(channels, "a") is dialled.by_address["a"][0]
    await use(channels, "b")
    assert dialled.open() == {"a", "b"}
    assert len(dialled.by_address["b"]) == 2
    await channels.close()
    assert dialled.open() == set()


async def test_none_is_closed_under_a_move() -> None:
    dialled = Dialled()
    channels = ReceiverChannels(dialled, most_idle=0)
    async with channels.to("a") as first, channels.to("a") as second:
        assert first is second
        await asyncio.gather(*(use(channels, f"other-{number}") for number in range(5)))
        assert dialled.open() == {"a"}
    assert dialled.open() == set()
    assert len(channels) == 0
