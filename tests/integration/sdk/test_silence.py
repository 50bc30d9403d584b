"""A gateway that falls silent without a word, as when its machine has lost its power."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from paceline.transport import channel
from services.platform.config import ServiceConfig
from services.platform.grpc.server import server_options

WAIT = 60.0
METHOD = "/toy.Toy/Watch"
_PREFACE = len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
_HEAD = 9
_PING, _ACK = 6, 1


class Line:
    """The way to a server. It counts the caller's pings, and carries nothing any more once it is `cut`."""

    def __init__(self) -> None:
        self.pings = 0
        self.pinged = asyncio.Condition()
        self._cut = False

    def cut(self) -> None:
        self._cut = True

    async def carry(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, calls = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.TaskGroup() as both:
            both.create_task(self._frames(reader, calls))
            both.create_task(self._bytes(answers, writer))

    async def _frames(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            sink.write(await source.readexactly(_PREFACE))
            while True:
                head = await source.readexactly(_HEAD)
                body = await source.readexactly(int.from_bytes(head[:3], "big"))
                if not self._cut:
                    sink.write(head + body)
                if head[3] == _PING and not head[4] & _ACK:
                    async with self.pinged:
                        self.pings += 1
                        self.pinged.notify_all()
        except (asyncio.IncompleteReadError, OSError):
            sink.close()

    async def _bytes(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                if not self._cut:
                    sink.write(data)
        except OSError:
            pass
        finally:
            sink.close()


@asynccontextmanager
async def quiet_server() -> AsyncIterator[int]:
    """Serve a stream of one answer that does not end, with the options of every service; yield the port."""

    async def watch(_: bytes, __: Any) -> AsyncIterator[bytes]:
        yield b"begun"
        await asyncio.Event().wait()

    server = grpc.aio.server(options=server_options(ServiceConfig()))
    handler = grpc.unary_stream_rpc_method_handler(watch)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("toy.Toy", {"Watch": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


async def test_a_stream_that_sends_nothing_pings_on_and_notices_the_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel, "KEEPALIVE_MS", 500)
    monkeypatch.setattr(channel, "PING_TIMEOUT_MS", 2000)
    line = Line()
    async with asyncio.timeout(WAIT), quiet_server() as port:
        proxy = await asyncio.start_server(lambda *streams: line.carry(port, *streams), "127.0.0.1", 0)
        address = f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        async with channel.open_aio_channel(address, None) as opened:
            stream = opened.unary_stream(METHOD)(b"")
            assert await stream.read() == b"begun"
            async with line.pinged:
                # gRPC's own limit is two.
                await line.pinged.wait_for(lambda: line.pings >= 3)
            line.cut()
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stream.read()
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        proxy.close()
