"""Clients of the gateway as tokens change: the new one is used, and old ones end."""

from __future__ import annotations

import asyncio
from typing import Any

from services.facade.config import FacadeConfig
from services.facade.gateway import GatewayClient


class _Client:
    closed = False

    async def close(self) -> None:
        self.closed = True


class _Rotating(GatewayClient):
    """Its token is another at every call, and its clients connect to nothing."""

    def __init__(self) -> None:
        super().__init__(FacadeConfig(port=0, gateway="127.0.0.1:1"))
        self.made: list[_Client] = []
        self._token = lambda: f"token {len(self.made)}"

    def _make(self, token: str | None) -> Any:
        self.made.append(_Client())
        return self.made[-1]


async def test_clients_that_many_others_have_come_after_are_closed() -> None:
    clients = _Rotating()
    for number in range(20):
        assert clients.current() is clients.made[number]
    await asyncio.sleep(0)
    assert [each.closed for each in clients.made] == [True] * 12 + [False] * 8
    await clients.close()
    assert [each.closed for each in clients.made] == [True] * 20
