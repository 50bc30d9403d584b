"""What a standby does with the messages that a caller streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from paceline.errors import Violation
from services.contracts.errors import InvalidArgument
from services.gateway.config import GatewayConfig
from services.gateway.gateway import peer_config, send
from services.platform.config import TlsConfig

REFUSAL = InvalidArgument([Violation("request", "is no message")])


class Call:
    """A call that takes messages until it has ended."""

    def __init__(self, most: int) -> None:
        self.taken: list[bytes] = []
        self.most = most
        self.closed = self.cancelled = False

    async def write(self, message: bytes) -> None:
        if len(self.taken) == self.most:
            raise asyncio.InvalidStateError
        self.taken.append(message)

    async def done_writing(self) -> None:
        self.closed = True

    def cancel(self) -> None:
        self.cancelled = True


async def messages(count: int, error: Exception | None = None) -> AsyncIterator[bytes]:
    for number in range(count):
        yield b"%d" % number
    if error is not None:
        raise error


async def test_messages_are_passed_on_to_their_end() -> None:
    call = Call(most=9)
    assert await send(messages(3), call) is None
    assert (call.taken, call.closed, call.cancelled) == ([b"0", b"1", b"2"], True, False)


async def test_a_refused_message_cancels_the_call_and_is_told() -> None:
    call = Call(most=9)
    assert await send(messages(2, REFUSAL), call) is REFUSAL
    assert (len(call.taken), call.closed, call.cancelled) == (2, False, True)


async def test_of_a_call_that_has_ended_the_leader_says_why() -> None:
    call = Call(most=1)
    assert await send(messages(3, REFUSAL), call) is None
    assert (len(call.taken), call.closed, call.cancelled) == (1, False, False)


@pytest.mark.parametrize(
    ("given", "own", "expected"),
    [(None, "10.0.0.7", "gateway.ml.svc"), ("named", "10.0.0.7", "named"), (None, None, None)],
    ids=["a pod behind a common name", "a name that is given", "an address of its own"],
)
def test_the_certificate_of_a_leader_has_the_name_that_all_gateways_advertise(
    tmp_path: Path, given: str | None, own: str | None, expected: str | None
) -> None:
    (tmp_path / "ca.pem").touch()
    tls = TlsConfig(ca_file=tmp_path / "ca.pem", server_name=given)
    config = peer_config(GatewayConfig(tls=tls, advertise_host="gateway.ml.svc", leader_host=own))
    assert config.tls is not None
    assert config.tls.server_name == expected
    assert peer_config(GatewayConfig(leader_host=own)).tls is None
