"""After a gateway has answered once, other answers from its address are waited out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from paceline import UnavailableError
from paceline.blocking import finish
from paceline.calls import GatewayCalls, caller
from paceline.errors import misdirection_of
from paceline.v1 import weight_pb2
from tests.unit.sdk.scripted_transport import ScriptedTransport

ANSWER = weight_pb2.GetVersionsResponse(policy_version=3)


class Failed(grpc.RpcError):
    """What gRPC raises of a call."""

    def code(self) -> Any:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "ipv4:127.0.0.1:80: Failed parsing HTTP/2 (Expected SETTINGS frame as the first frame, got 80)"

    def trailing_metadata(self) -> None:
        return None


def test_a_gateway_that_was_reached_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller, "time", SimpleNamespace(monotonic=iter(range(100)).__next__))
    answers = {"GetVersions": [ANSWER, *[Failed()] * 20, ANSWER]}
    calls = GatewayCalls(ScriptedTransport(answers))
    assert finish(calls.versions()).policy_version == 3
    assert finish(calls.versions()).policy_version == 3
    with pytest.raises(UnavailableError, match="speaks HTTP/1"):
        finish(GatewayCalls(ScriptedTransport({"GetVersions": [Failed()] * 50})).versions())


def test_other_messages_of_grpc_are_not_changed() -> None:
    assert misdirection_of("no instance is ready") is None
