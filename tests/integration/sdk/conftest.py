"""A gateway double for every test."""

from collections.abc import Iterator

import pytest

from tests.integration.sdk.gateway_double import GatewayDouble


@pytest.fixture
def gateway() -> Iterator[GatewayDouble]:
    with GatewayDouble() as double:
        yield double
