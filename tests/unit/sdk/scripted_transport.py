"""A transport whose answers are given by method."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, TypeVar

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import status_pb2

from paceline.errors import STATUS_KEY
from paceline.transport.channel import Tls
from paceline.transport.interface import Ended, Stream, Unary

R = TypeVar("R")


class ScriptedFailure(grpc.RpcError):
    """Error of a call, with google.rpc.* details."""

    def __init__(self, code: grpc.StatusCode, *details: Message) -> None:
        self._code = code
        self._status = status_pb2.Status()
        for each in details:
            packed = any_pb2.Any()
            packed.Pack(each)
            self._status.details.append(packed)

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return f"{self._code.name} by the script"

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return ((STATUS_KEY, self._status.SerializeToString()),)


class ScriptedTransport:
    """Answers by method; an answer may be an exception, or a list of one for each time. Never suspends.

    The answers of a method that streams are a list of attempts, which are lists of answers.
    """

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self.answers = answers
        self.requests: dict[str, Any] = {}
        """The last request of each method."""
        self.made: list[str] = []
        self.seconds: list[float | None] = []
        """Time limits of the attempts at streams."""
        self.slept: list[float] = []
        """Seconds of each wait, which ends at once."""

    async def send(self, unary: Unary) -> Any:
        self.made.append(unary.method)
        self.requests[unary.method] = unary.request
        answer = self.answers[unary.method]
        answer = answer.pop(0) if isinstance(answer, list) else answer
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def post(self, unary: Unary, ended: Ended) -> None:
        self.made.append(unary.method)
        self.requests[unary.method] = unary.request
        ended(self.answers[unary.method])

    async def open(self, stream: Stream[Any], seconds: float | None) -> AsyncGenerator[Any, None]:
        self.made.append(stream.method)
        self.requests[stream.method] = stream.request()
        self.seconds.append(seconds)
        for answer in self.answers[stream.method].pop(0):
            if isinstance(answer, BaseException):
                raise answer
            yield answer

    async def sleep(self, seconds: float) -> bool:
        self.slept.append(seconds)
        return True

    async def run_work(self, work: Callable[[], R]) -> R:
        return work()

    async def lacks_tls(self) -> bool:
        return False

    def dial(self, address: str, tls: Tls | None) -> grpc.Channel:
        return grpc.insecure_channel(address)

    async def close(self) -> None:
        pass
