"""Connections that want nothing, or want it slowly, beside probes and honest requests."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
from asyncio import sslproto
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.facade.config import FacadeConfig
from services.facade.gateway import ServedFleet
from tests.integration.facade.conftest import RunningFacade, StackMaker
from tests.integration.gateway.conftest import CALL, until
from tests.support.certificates import Authority

BODY = {"prompt": [1, 2], "max_tokens": 4, "ignore_eos": True}
PLACES = 24
NOWHERE = "127.0.0.1:1"
"""A gateway that does not exist, for what needs none."""
LINE = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n"
MUCH = 8 * 1024 * 1024
"""Bytes of a flood that no header may have, and more than sockets hold."""


class Client:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def rest(self) -> bytes:
        """Return all that comes until the server closes the connection."""
        async with asyncio.timeout(CALL):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""

    async def answer(self) -> tuple[int, str]:
        """Return status and code of the last answer before the server closes the connection."""
        head, _, body = (await self.rest()).rpartition(b"\r\n\r\n")
        status = int(head.rpartition(b"HTTP/1.1 ")[2][:3])
        return status, json.loads(body)["error"]["code"]

    async def send_until_closed(self, data: bytes) -> None:
        """Send it again and again until the server closes the connection; what it answers may be lost then."""
        closed = asyncio.create_task(self.rest())
        while not closed.done():
            self.writer.write(data)
            await asyncio.wait([closed], timeout=0.02)

    def close(self) -> None:
        self.writer.transport.abort()


Open = Callable[..., Awaitable[Client]]


@pytest.fixture
async def dial() -> AsyncIterator[Open]:
    """Return a function that connects to a port of this machine."""
    opened: list[Client] = []

    async def connect(port: int, data: bytes = b"", source: str = "127.0.0.1", **options: Any) -> Client:
        found = Client(*await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0), **options))
        opened.append(found)
        await found.send(data)
        return found

    yield connect
    for each in opened:
        each.close()


@pytest.fixture
async def alone() -> AsyncIterator[Callable[..., Awaitable[RunningFacade]]]:
    """Return a function that starts a facade without a gateway."""
    running: list[RunningFacade] = []

    async def make(http: dict[str, Any] | None = None, **settings: Any) -> RunningFacade:
        config = FacadeConfig(port=0, probe_port=0, gateway=NOWHERE, retry_seconds=0, **settings)
        running.append(await RunningFacade(config, **(http or {})).start())
        return running[-1]

    yield make
    for facade in running:
        await facade.stop()


Alone = Callable[..., Awaitable[RunningFacade]]


def ended(facade: RunningFacade, reason: str) -> float:
    return facade.metric("connections_ended_total", reason=reason)


async def probed(facade: RunningFacade, path: str = "/livez") -> int:
    async with httpx.AsyncClient(timeout=CALL) as http:
        return (await http.get(f"http://127.0.0.1:{facade.process.probe_port}{path}")).status_code


async def test_idle_connections_keep_out_neither_probes_nor_honest_requests(
    stack_of: StackMaker, dial: Open
) -> None:
    # More than an address may have, and with those of the second more than there may be at all.
    facade = (await stack_of(max_connections=PLACES, probe_port=0)).facade
    for number in range(2 * PLACES):
        await dial(facade.process.port, LINE if number % 2 else b"", f"127.0.0.{2 + number % 2}")
    assert [await probed(facade, path) for path in ("/livez", "/readyz", "/health")] == [200] * 3
    for path in ("/livez", "/health"):
        async with httpx.AsyncClient(timeout=CALL) as http:
            assert (await http.get(f"{facade.url}{path}")).status_code == 200
    answers = await asyncio.gather(
        *(facade.http.post("/v1/completions", json=BODY) for _ in range(PLACES // 2))
    )
    assert [each.status_code for each in answers] == [200] * len(answers)
    assert ended(facade, "crowded") > PLACES
    assert ended(facade, "refused") == 0


async def test_one_address_leaves_room_for_others_and_is_answered_so(
    stack_of: StackMaker, dial: Open
) -> None:
    stack = await stack_of(max_connections=8, max_connections_per_address=3)
    facade, (fake,) = stack.facade, stack.fakes
    fake.hold_at = 1
    working = [asyncio.create_task(facade.http.post("/v1/completions", json=BODY)) for _ in range(3)]
    await until(lambda: len(fake.running()) == 3, "the samples run")
    # What is in work makes way for nobody.
    crowded = await dial(facade.process.port, LINE + b"\r\n")
    assert await crowded.answer() == (503, "TOO_MANY_CONNECTIONS")
    other = await dial(facade.process.port, LINE + b"connection: close\r\n\r\n", "127.0.0.2")
    assert (await other.rest()).startswith(b"HTTP/1.1 200")
    assert ended(facade, "refused") == 1
    fake.hold_at = None
    assert [(await each).status_code for each in working] == [200] * 3


async def test_a_connection_that_asks_for_nothing_is_closed_in_time(alone: Alone, dial: Open) -> None:
    facade = await alone(header_seconds=0.5)
    port = facade.process.port
    silent, begun = await dial(port), await dial(port, LINE)
    again = await dial(port, LINE + b"\r\n" + LINE)
    # A body that is refused before it is read, and never ends.
    refused = await dial(port, b"POST /pause HTTP/1.1\r\nhost: evil\r\ncontent-length: 100\r\n\r\nx")
    dribbling = await dial(port, b"GET ")
    assert await silent.rest() == b""
    assert await begun.answer() == (408, "HEADER_TOO_SLOW")
    assert await again.answer() == (408, "HEADER_TOO_SLOW")
    assert await refused.answer() == (421, "UNKNOWN_HOST")
    await dribbling.send_until_closed(b"x")
    assert ended(facade, "header") == 5


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"GET /livez HTTP/1.1\r\nhost: localhost\r\nx: ", b"x" * 65536),
        (b"GET /livez HTTP/1.1\r\nhost: localhost\r\n", b"x: y\r\n" * 8192),
        (b"GET /", b"x" * 65536),
        (b"", b"\r\n" * 32768),
    ],
    ids=["one header", "many headers", "a URL", "empty lines"],
)
async def test_a_header_without_an_end_is_cut(alone: Alone, dial: Open, begin: bytes, more: bytes) -> None:
    facade = await alone()
    flood = await dial(facade.process.port, begin)
    sent = 0
    with pytest.raises(ConnectionError):  # noqa: PT012 (it is cut anywhere)
        async with asyncio.timeout(CALL):
            while sent < MUCH:
                await flood.send(more)
                sent += len(more)
    assert sent < MUCH
    # A header that is too long, and no flood, is told so.
    polite = await dial(facade.process.port, begin + more + b"\r\n\r\n" + LINE)
    assert (await polite.answer())[0] in (400, 431)
    assert (await facade.http.get("/livez")).status_code == 200


async def test_a_body_that_does_not_come_is_given_up_and_a_steady_one_is_not(
    alone: Alone, dial: Open
) -> None:
    facade = await alone(body_seconds=0.5)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    silent = await dial(facade.process.port, head + b"content-length: 100\r\n\r\n")
    slow = await dial(facade.process.port, head + b"content-length: 100000\r\n\r\n")
    await slow.send_until_closed(b" ")
    assert await silent.answer() == (408, "BODY_TOO_SLOW")
    assert ended(facade, "body") == 2
    size = 4 * 1024 * 1024
    steady = await dial(facade.process.port, head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % size)
    for _ in range(16):
        await steady.send(b" " * (size // 16))
        await asyncio.sleep(0.05)
    # It came: the answer is that no instance is there to say how long a prompt may be.
    assert (await steady.answer())[0] == 503
    assert ended(facade, "body") == 2


async def test_an_answer_that_nobody_reads_is_given_up(alone: Alone, dial: Open) -> None:
    facade = await alone(reader_seconds=0.5)
    # Its window is small, so that answers wait here and not in the kernel.
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plain.setblocking(False)
    with plain:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(plain, ("127.0.0.1", facade.process.port))
        asking = asyncio.create_task(
            loop.sock_sendall(plain, (b"GET /openapi.json" + LINE[10:] + b"\r\n") * 1000)
        )
        await until(lambda: ended(facade, "reader") == 1, "the reader is given up")
        await asyncio.wait([asking])
        asking.exception()
    assert (await facade.http.get("/livez")).status_code == 200


async def test_clients_that_do_not_finish_their_handshake_hold_up_nobody(
    alone: Alone, dial: Open, tmp_path: Path
) -> None:
    tls = Authority(tmp_path, "ours").tls("facade", client_auth=True)
    context = ssl.create_default_context(cafile=str(tls.ca_file))
    context.load_cert_chain(str(tls.cert_file), str(tls.key_file))
    facade = await alone(http={"verify": context}, tls=tls, max_connections=PLACES, header_seconds=0.5)
    silent = [
        await dial(facade.process.port, b"\x16\x03" if number % 2 else b"") for number in range(2 * PLACES)
    ]
    assert (await facade.http.get("/livez")).status_code == 200
    # The port of probes has no TLS, as the kubelet has no certificate.
    assert await probed(facade) == 200
    for each in silent:
        await each.rest()
    # asyncio's own quarter of a MiB for each connection would be 2 GiB for 8,192.
    assert sslproto.SSLProtocol.max_size <= 64 * 1024  # type: ignore[attr-defined]


async def test_the_port_of_probes_is_no_way_around_the_other(alone: Alone, dial: Open) -> None:
    facade = await alone(token="t")
    for path in ("/v1/models", "/docs", "/openapi.json", "/pause", "/"):
        assert await probed(facade, path) == 404
    # It keeps few connections, and the newest of them.
    for _ in range(100):
        await dial(facade.process.probe_port)
    assert await probed(facade) == 200
    assert await probed(facade, "/readyz") == 503
    assert (await facade.http.get("/livez")).status_code == 200


async def test_a_blocked_event_loop_fails_its_probe(alone: Alone) -> None:
    facade = await alone()
    port = facade.process.probe_port
    free, asked = threading.Event(), threading.Event()

    def ask() -> str:
        asked.wait(CALL)
        try:
            httpx.get(f"http://127.0.0.1:{port}/livez", timeout=0.3)
        except httpx.TimeoutException:
            return "no answer"
        finally:
            free.set()
        return "answered"

    def block() -> None:
        asked.set()
        free.wait(CALL)

    asking = asyncio.create_task(asyncio.to_thread(ask))
    asyncio.get_running_loop().call_soon(block)
    assert await asking == "no answer"
    assert await probed(facade) == 200


async def test_health_costs_the_gateway_nothing_by_request(
    stack_of: StackMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = await stack_of(probe_port=0)
    asked = 0
    gate = asyncio.Event()
    instances = ServedFleet.instances

    async def counted(fleet: ServedFleet) -> Any:
        nonlocal asked
        asked += 1
        await gate.wait()
        return await instances(fleet)

    monkeypatch.setattr(ServedFleet, "instances", counted)
    monkeypatch.setattr("services.facade.gateway.HEALTH_KEPT_SECONDS", CALL)
    http = stack.facade.http
    # Who asks first leaves.
    with pytest.raises(httpx.TimeoutException):
        await http.get("/health", timeout=0.2)
    asking = [asyncio.create_task(http.get(path)) for path in ("/health", "/readyz", "/health_generate") * 30]
    asking += [asyncio.create_task(asyncio.wait_for(_status(stack.facade), CALL))]  # type: ignore[list-item]
    await until(lambda: asked, "the gateway is asked")
    gate.set()
    answers = await asyncio.gather(*asking)
    assert {each if isinstance(each, int) else each.status_code for each in answers} == {200}
    assert asked == 1


async def _status(facade: RunningFacade) -> int:
    return await probed(facade, "/health")


async def test_a_page_of_another_origin_pauses_nothing(stack_of: StackMaker) -> None:
    http = (await stack_of()).facade.http
    form = {"content-type": "application/x-www-form-urlencoded", "origin": "http://evil.example"}
    for path in ("/pause?mode=abort", "/pause_generation", "/continue_generation"):
        refused = await http.post(path, headers=form)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "CROSS_ORIGIN")
        rebound = await http.post(path, headers={"host": "evil.example"})
        assert (rebound.status_code, rebound.json()["error"]["code"]) == (421, "UNKNOWN_HOST")
        assert rebound.headers["x-request-id"]
    assert (await http.get("/is_paused")).json() == {"is_paused": False}
    assert (await http.post("/v1/completions", json=BODY)).status_code == 200
