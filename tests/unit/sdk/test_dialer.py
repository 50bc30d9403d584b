"""Replaced connections: each stays open until its calls have ended."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import grpc
import pytest

from paceline.errors import FailedPreconditionError
from paceline.transport.channel import TlsFileError
from paceline.transport.grpc import Dialer


@dataclass
class Line:
    """A dialer, the addresses that it has dialled, and the channels that it has closed."""

    dialled: list[str] = field(default_factory=list)
    closed: list[grpc.Channel] = field(default_factory=list)
    failure: Exception | None = None
    """What dialling raises."""

    def __post_init__(self) -> None:
        self.dialer: Dialer[grpc.Channel] = Dialer(("a:1", "b:1"), self._dial, self._hang_up)

    def _dial(self, address: str) -> grpc.Channel:
        self.dialled.append(address)
        if self.failure is not None:
            raise self.failure
        return grpc.insecure_channel(address)

    async def _hang_up(self, channel: grpc.Channel) -> None:
        self.closed.append(channel)


def test_addresses_are_dialled_in_turn() -> None:
    line = Line()
    for _ in range(3):
        line.dialer.give_up(line.dialer.current)
    assert line.dialled == ["a:1", "b:1", "a:1", "b:1"]


async def test_many_calls_that_fail_together_dial_once() -> None:
    line = Line()
    async with AsyncExitStack() as calls:
        lent = [await calls.enter_async_context(line.dialer.connection()) for _ in range(8)]
        for connection in lent:
            line.dialer.give_up(connection)
    assert line.dialled == ["a:1", "b:1"]


async def test_a_connection_that_was_given_up_is_closed_with_its_last_call() -> None:
    line = Line()
    async with line.dialer.connection() as first:
        async with line.dialer.connection() as again:
            assert again is first
            line.dialer.give_up(first)
        assert not line.closed
    assert line.closed == [first.channel]
    async with line.dialer.connection() as second:
        assert second is not first
    assert line.closed == [first.channel], "the second one is in use"


@pytest.mark.parametrize("failure", [FileNotFoundError("tls.crt"), TlsFileError("another's key")])
async def test_a_connection_is_kept_while_no_other_can_be_made(
    failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    line = Line()
    line.failure = failure
    async with line.dialer.connection() as first:
        line.dialer.give_up(first)
    async with line.dialer.connection() as again:
        assert again is first
        assert not line.closed
        assert str(failure) in caplog.text
        line.failure = None
        line.dialer.give_up(first)
    assert line.closed == [first.channel]
    assert line.dialled == ["a:1", "b:1", "b:1"]


async def test_only_connections_in_use_stay_open() -> None:
    line = Line()
    for number in range(50):
        async with line.dialer.connection() as connection:
            line.dialer.give_up(connection)
        assert line.closed[number:] == [connection.channel]
    await line.dialer.close()
    assert line.closed[50:] == [line.dialer.current.channel]


async def test_nothing_is_dialled_or_closed_after_the_end() -> None:
    line = Line()
    async with line.dialer.connection() as connection:
        await line.dialer.close()
        line.dialer.give_up(connection)
    assert (line.dialled, line.closed) == (["a:1"], [connection.channel])
    with pytest.raises(FailedPreconditionError):
        await line.dialer.connection().__aenter__()
