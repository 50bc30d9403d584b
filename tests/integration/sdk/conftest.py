"""A gateway double for every test."""

from collections.abc import Iterator

import pytest

from paceline.transport.grpc import BlockingTransport
from tests.integration.sdk.gateway_double import GatewayDouble


@pytest.fixture
def gateway() -> Iterator[GatewayDouble]:
    with GatewayDouble() as double:
        yield double


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that calls of blocking clients wait before the next attempt, which they then make at once."""
    found: list[float] = []

    async def sleep(transport: BlockingTransport, seconds: float) -> bool:
        found.append(seconds)
        return True

    monkeypatch.setattr(BlockingTransport, "sleep", sleep)
    return found
