"""Scopes and rates of tokens, as callers of a real server see them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import paceline
from paceline import Client, RetryPolicy
from paceline.tokens import hash_token
from paceline.transport.channel import CALLER
from paceline.v1 import fleet_pb2
from services.platform.config import ServiceConfig
from services.platform.grpc.parse_budget import ParseBudget
from services.platform.security.caller import TokenHolder

PATIENT = RetryPolicy(seconds=30)
"""Calls that find no connection are made again, and those that are to come again later are not."""


@pytest.fixture
def tokens(tmp_path: Path) -> Callable[..., ServiceConfig]:
    """A server's configuration with one token for each scope, named as the scope is."""

    def make(**limits: float) -> ServiceConfig:
        file = tmp_path / "tokens.yaml"
        scopes = ("rollouts", "weights", "fleet", "metrics")
        entries = [{"name": s, "sha256": hash_token(s), "scopes": [s], **limits} for s in scopes]
        file.write_text(yaml.safe_dump(entries))
        return ServiceConfig(tokens_file=file)

    return make


def as_caller(toy: Any, token: str) -> Client:
    return Client(toy.server.address, token=token, retry=PATIENT, timeout=60, leaders_only=False)


async def call(function: Callable[[], Any]) -> Any:
    """Off the event loop, on which the server runs."""
    return await asyncio.to_thread(function)


async def test_a_missing_scope_is_named(serve: Any, tokens: Any) -> None:
    async with serve(tokens()) as toy:
        toy.servicer.release.set()
        with as_caller(toy, "fleet") as client:
            assert await call(lambda: client.drain("toy")) == 3
        with as_caller(toy, "rollouts") as client:
            assert await call(client.instances)
            with pytest.raises(paceline.PermissionDeniedError, match="scope fleet") as caught:
                await call(lambda: client.drain("toy"))
        assert caught.value.reason == "MISSING_SCOPE"
        assert caught.value.metadata == {"scope": "fleet", "token": "rollouts"}
        assert hash_token("rollouts") not in str(caught.value)


async def test_a_stream_needs_its_scope_too(serve: Any, tokens: Any) -> None:
    async with serve(tokens()) as toy:
        with (
            as_caller(toy, "metrics") as client,
            pytest.raises(paceline.PermissionDeniedError, match="fleet or rollouts or weights"),
        ):
            await call(lambda: next(client.watch_fleet()))
        assert not toy.servicer.entered.is_set()


async def test_who_calls_too_often_is_told_when_to_come_again(serve: Any, tokens: Any) -> None:
    async with serve(tokens(requests_per_second=0.01, burst=2)) as toy:
        with as_caller(toy, "fleet") as client, as_caller(toy, "weights") as other:
            for _ in range(2):
                await call(client.instances)
            with pytest.raises(paceline.ResourceExhaustedError, match=r"0.01 calls a second, 2 at") as caught:
                await call(client.instances)
            assert caught.value.retry_after == pytest.approx(100, abs=50)
            with pytest.raises(paceline.ResourceExhaustedError):
                await call(lambda: next(client.watch_fleet()))
            assert await call(other.instances), "others are not held up"


async def test_callers_behind_one_service_have_each_a_place_in_the_line_for_room(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = []

    async def take(self: ParseBudget, request: bytes, shape: Any, caller: Callable[[], str]) -> int:
        places.append(caller())
        return 0

    monkeypatch.setattr(ParseBudget, "take", take)
    async with serve(ServiceConfig()) as toy:
        for name in ("ann", "bob", "ann"):
            on_behalf = ((CALLER, TokenHolder(name=name).metadata()),)
            await toy.stub.ListInstances(fleet_pb2.ListInstancesRequest(), metadata=on_behalf, timeout=60)
        await toy.stub.ListInstances(fleet_pb2.ListInstancesRequest(), timeout=60)
    assert places[0] == places[2]
    assert len(set(places)) == 3
