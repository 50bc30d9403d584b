"""Bursts: as many calls as may be served come while the event loop is stopped, and each is answered.

gRPC's own client cannot tell when a server has received its calls, as long as nothing answers them. So the calls
are written as frames of HTTP/2, followed by a PING, which the server answers in a thread of its own.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from services.platform.config import ServiceConfig

MOST_CALLS = 3_500
"""Above the 3,000 calls of which gRPC by itself cancels all."""
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7
_END_STREAM, _END_HEADERS, _ACK = 0x1, 0x4, 0x1
_HEADER = {
    ":method": "POST",
    ":scheme": "http",
    ":path": "/paceline.v1.FleetService/ListInstances",
    ":authority": "localhost",
    "te": "trailers",
    "content-type": "application/grpc",
    "grpc-timeout": "60S",
}


class Frames:
    """Connection on which calls are made without waiting for anything."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0))
        self._calls = 0

    def call(self, calls: int) -> None:
        """Make calls with an empty message, and return when the server has received them."""
        # Literals that are not indexed, RFC 7541 6.2.2.
        fields = b"".join(b"\0" + _text(name) + _text(value) for name, value in _HEADER.items())
        for _ in range(calls):
            stream = 2 * self._calls + 1
            self._calls += 1
            self._socket.sendall(
                _frame(_HEADERS, _END_HEADERS, stream, fields) + _frame(_DATA, _END_STREAM, stream, bytes(5))
            )
        self._socket.sendall(_frame(_PING, 0, 0, b"received"))
        while next(self._received) != (_PING, _ACK, 0, b"received"):
            pass

    def answered(self) -> tuple[int, int]:
        """Wait until every call has ended; return how many were answered, and how many were cancelled."""
        answered = cancelled = 0
        while answered + cancelled < self._calls:
            kind, flags, _, payload = next(self._received)
            assert kind != _GOAWAY, payload
            answered += kind == _HEADERS and bool(flags & _END_STREAM)
            cancelled += kind == _RST_STREAM
        return answered, cancelled

    def close(self) -> None:
        self._socket.close()

    @property
    def _received(self) -> Iterator[tuple[int, int, int, bytes]]:
        while True:
            header = self._read(9)
            size, kind, flags = int.from_bytes(header[:3], "big"), header[3], header[4]
            stream, payload = int.from_bytes(header[5:], "big"), self._read(size)
            if kind == _PING and not flags & _ACK:
                # The server wants to know whether this end lives.
                self._socket.sendall(_frame(_PING, _ACK, 0, payload))
            yield kind, flags, stream, payload

    def _read(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            more = self._socket.recv(size - len(found))
            assert more, "the server has closed the connection"
            found += more
        return found


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


@pytest.mark.parametrize("seconds", [0.0, pytest.param(31.0, marks=pytest.mark.soak)])
async def test_no_call_is_dropped_that_came_while_the_loop_was_stopped(serve: Any, seconds: float) -> None:
    """`seconds` is how long the calls wait: gRPC by itself cancels what has waited for 30."""
    async with serve(ServiceConfig(max_concurrent_calls=MOST_CALLS)) as toy:
        frames = Frames(toy.server.address)
        stopped, over = threading.Event(), threading.Event()

        def burst() -> tuple[int, int]:
            assert stopped.wait(60)
            frames.call(MOST_CALLS)
            threading.Timer(seconds, over.set).start()
            return frames.answered()

        answering = asyncio.create_task(asyncio.to_thread(burst))
        await asyncio.sleep(0)
        stopped.set()
        # The event loop stands still here.
        assert over.wait(60)
        assert await answering == (MOST_CALLS, 0)
        labels = {"component": "toy", "method": "paceline.v1.FleetService/ListInstances", "code": "OK"}
        assert toy.registry.get_sample_value("paceline_rpc_requests_total", labels) == MOST_CALLS
        frames.close()
