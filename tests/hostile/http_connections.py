"""Attacks by connections that are held open or flooded, to the facade's port and to the gateway's."""

from __future__ import annotations

import itertools
import resource
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from tests.hostile.answers import CLOSED, UNANSWERED, Answer, Attack, either
from tests.hostile.rig import ATTACKER, Rig, token_of

WAIT = 90.0
"""Seconds within which a server must have closed a connection that does nothing honest."""
_SHORT_WAIT = 5.0
SOURCES = tuple(f"127.0.0.{number}" for number in range(2, 6))
"""Addresses of attackers; an honest tenant has another one."""
FLOOD_SECONDS = 15.0
"""Seconds for which a flood is kept up, if it is not cut."""
_REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS, _PING, _HEADERS, _RST_STREAM, _CONTINUATION = 4, 6, 1, 3, 9


def _authorized() -> bytes:
    run = b"X-Paceline-Run: " + ATTACKER.encode() + b"-http\r\n"
    return _REQUEST + run + b"Authorization: Bearer " + token_of(ATTACKER).encode() + b"\r\n"


@dataclass
class Held:
    """A connection that is held, and what is written to it while it is."""

    first: bytes = b""
    drip: bytes = b""
    """Written again and again, once a second."""
    connection: socket.socket = field(default_factory=lambda: socket.socket())

    def open(self, address: tuple[str, int], source: str) -> None:
        """Connect and write what comes first; a server that does not let it connect has closed it."""
        self.connection.settimeout(5.0)
        with suppress(OSError):
            self.connection.bind((source, 0))
            self.connection.connect(address)
            self.connection.sendall(self.first)
        self.connection.setblocking(False)


def _raise_limit(files: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(files, hard), hard))


def held(
    make: Callable[[], Held], server: str = "facade", *, soon: bool = True
) -> Callable[[Rig, int], list[Answer]]:
    """Return what opens so many connections and waits until the server has closed them all.

    Not `soon`: that takes a minute and more. In the suite the attacker leaves before it.
    """

    def send(rig: Rig, count: int) -> list[Answer]:
        _raise_limit(count + 2000)
        host, _, port = rig.address(server).rpartition(":")
        connections = [make() for _ in range(count)]
        try:
            for each, source in zip(connections, itertools.cycle(SOURCES), strict=False):
                each.open((host, int(port)), source)
            waits = soon or rig.patient
            left = _await_closed(connections, WAIT if waits else _SHORT_WAIT)
        finally:
            for each in connections:
                each.connection.close()
        if not waits:
            # What counts is what they did to others meanwhile.
            return [Answer(CLOSED, "the attacker has left")]
        return [
            Answer(UNANSWERED if left else CLOSED, f"{left} of {count} are still open after {WAIT:.0f} s")
        ]

    return send


def _await_closed(connections: list[Held], seconds: float) -> int:
    """Return how many are still open after so long."""
    deadline = time.monotonic() + seconds
    waiting = {each.connection.fileno(): each for each in connections}
    poll = select.poll()
    for number in waiting:
        poll.register(number, select.POLLIN | select.POLLHUP | select.POLLERR)
    dripped = time.monotonic()
    while waiting and time.monotonic() < deadline:
        for number, _ in poll.poll(200):
            if _is_closed(waiting[number].connection):
                poll.unregister(number)
                del waiting[number]
        if time.monotonic() - dripped > 1.0:
            dripped = time.monotonic()
            for each in waiting.values():
                with suppress(OSError):
                    each.connection.send(each.drip)
    return len(waiting)


def _is_closed(connection: socket.socket) -> bool:
    try:
        while connection.recv(65_536):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def flood(
    first: bytes, block: Callable[[int], bytes], server: str = "facade"
) -> Callable[[Rig, int], list[Answer]]:
    """Return what writes so many MiB of blocks to one connection, unless the server cuts it."""

    def send(rig: Rig, mib: int) -> list[Answer]:
        host, _, port = rig.address(server).rpartition(":")
        sent, number, deadline = 0, 0, time.monotonic() + FLOOD_SECONDS
        answer = b""
        with socket.create_connection((host, int(port)), timeout=FLOOD_SECONDS) as connection:
            try:
                connection.sendall(first)
                while sent < mib << 20 and time.monotonic() < deadline:
                    part = block(number)
                    connection.sendall(part)
                    sent, number = sent + len(part), number + 1
                    readable, _, _ = select.select([connection], [], [], 0)
                    if readable and server == "facade":
                        answer = connection.recv(65_536)
                        return [_cut(answer)]
            except TimeoutError:
                # It is read no more: that holds back the flood as well as an end would.
                return [Answer(CLOSED, "it is read no more")]
            except OSError:
                return [Answer(CLOSED, "cut")]
        return [Answer(UNANSWERED, f"{sent >> 20} MiB were taken")]

    return send


def _cut(answer: bytes) -> Answer:
    if answer.startswith(b"HTTP/1.1 4"):
        return Answer(answer[9:12].decode(), answer[:200].decode(errors="replace"))
    return Answer(CLOSED if not answer else UNANSWERED, answer[:200].decode(errors="replace"))


def pipelined(rig: Rig, count: int) -> list[Answer]:
    """Send requests one behind another and read no answer of them."""
    host, _, port = rig.address("facade").rpartition(":")
    body = b'{"prompt": [1, 2], "max_tokens": 400, "ignore_eos": true}'
    request = _authorized() + b"Content-Length: %d\r\n\r\n" % len(body) + body
    held = Held()
    held.connection = socket.create_connection((host, int(port)), timeout=5)
    with suppress(OSError):
        for _ in range(count):
            held.connection.sendall(request)
    # The attacker has nothing to wait for.
    held.connection.close()
    return [Answer(CLOSED)]


def unread_streams(rig: Rig, count: int) -> list[Answer]:
    """Ask for streams of samples on many connections, read nothing of them, and leave."""
    host, _, port = rig.address("facade").rpartition(":")
    body = (
        b'{"prompt": [1, 2], "max_tokens": 400, "n": 64, "ignore_eos": true, "stream": true, "logprobs": 20}'
    )
    request = _authorized() + b"Content-Length: %d\r\n\r\n" % len(body) + body
    connections = []
    for _ in range(count):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(request)
        connections.append(connection)
    time.sleep(2.0)
    for connection in connections:
        # An end without a farewell.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    return [Answer(CLOSED)]


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def _http2_call(stream: int) -> bytes:
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/paceline.v1.RolloutService/ListBatches",
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
        "authorization": f"Bearer {token_of(ATTACKER)}",
    }
    text = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())
    return _frame(_HEADERS, 0x4, stream, text)


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def _resets(number: int) -> bytes:
    """Return calls that are taken back at once."""
    streams: Iterator[int] = (2 * (100 * number + each) + 1 for each in range(100))
    return b"".join(_http2_call(each) + _frame(_RST_STREAM, 0, each, bytes([0, 0, 0, 8])) for each in streams)


_START = _HTTP2 + _frame(_SETTINGS, 0, 0)
# By HTTP's rules it may begin a header that never ends.
_ENDLESS = _START + _frame(_HEADERS, 0, 1, b"\0" + _text("x-a") + _text("b"))

HELD: list[Attack] = [
    Attack("idle connections", "H3", held(Held), either(CLOSED), short=200, whole=4000),
    Attack("half of a header", "H3", held(partial(Held, _REQUEST)), either(CLOSED), short=200, whole=4000),
    Attack(
        "header that drips",
        "H3",
        held(partial(Held, _REQUEST, b"x-a: b\r\n")),
        either(CLOSED),
        short=50,
        whole=500,
    ),
    Attack(
        "request line that drips",
        "H3",
        held(partial(Held, b"GET /", b"a")),
        either(CLOSED),
        short=50,
        whole=500,
    ),
    Attack(
        "half of a body",
        "H3",
        held(lambda: Held(_authorized() + b"Content-Length: 1000\r\n\r\n{"), soon=False),
        either(CLOSED),
        short=50,
        whole=500,
    ),
    Attack(
        "bodies of 16 MB that do not come",
        "H3",
        held(lambda: Held(_authorized() + b"Content-Length: 16000000\r\n\r\n{", b" "), soon=False),
        either(CLOSED),
        short=16,
        whole=200,
    ),
    Attack(
        "bodies of 1 MB that do not come",
        "H3",
        held(lambda: Held(_authorized() + b"Content-Length: 1000000\r\n\r\n{"), soon=False),
        either(CLOSED),
        short=60,
        whole=600,
    ),
    Attack(
        "body that drips",
        "H3",
        held(lambda: Held(_authorized() + b"Content-Length: 1000000\r\n\r\n{", b" "), soon=False),
        either(CLOSED),
        short=20,
        whole=200,
    ),
    Attack(
        "body without a token",
        "H3",
        held(lambda: Held(_REQUEST + b"Content-Length: 1000000\r\n\r\n{", b" "), soon=False),
        either(CLOSED),
        short=20,
        whole=200,
    ),
    Attack(
        "answers that are kept alive",
        "H3",
        held(partial(Held, b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"), soon=False),
        either(CLOSED),
        short=100,
        whole=2000,
    ),
    Attack(
        "idle connections to the gateway", "H3", held(Held, "gateway"), either(CLOSED), short=200, whole=4000
    ),
    Attack(
        "half of a greeting to the gateway",
        "H3",
        held(partial(Held, _HTTP2[:10]), "gateway"),
        either(CLOSED),
        short=50,
        whole=500,
    ),
]
"""Connections that the server has to close by itself. All of them are held at once in the suite."""

FLOODS: list[Attack] = [
    Attack(
        "header lines",
        "H4",
        flood(
            _REQUEST,
            lambda number: b"".join(b"x-%d-%d: %s\r\n" % (number, n, b"a" * 100) for n in range(100)),
        ),
        either(400, 413, 431, CLOSED, typed=False),
        short=100,
        whole=100,
    ),
    Attack(
        "header without an end",
        "H4",
        flood(_REQUEST + b"x-a: ", lambda _: b"a" * 65_536),
        either(400, 413, 431, CLOSED, typed=False),
        short=100,
        whole=500,
    ),
    Attack(
        "address without an end",
        "H4",
        flood(b"GET /", lambda _: b"a" * 65_536),
        either(400, 413, 414, 431, CLOSED, typed=False),
        short=100,
        whole=500,
    ),
    Attack(
        "body longer than it says",
        "H4",
        flood(_REQUEST + b"Content-Length: 5\r\n\r\n", lambda _: b" " * 65_536),
        either(400, 401, 413, CLOSED, typed=False),
        short=100,
        whole=500,
    ),
    Attack(
        "chunks without an end",
        "H4",
        flood(
            _REQUEST + b"Transfer-Encoding: chunked\r\n\r\n", lambda _: b"10000\r\n" + b"a" * 65_536 + b"\r\n"
        ),
        either(400, 401, 411, 413, CLOSED, typed=False),
        short=100,
        whole=500,
    ),
    Attack(
        "bytes that are no HTTP",
        "H4",
        flood(b"", lambda _: b"\x00\xff" * 30_000),
        either(400, CLOSED, typed=False),
        short=100,
        whole=500,
    ),
    Attack("requests that nobody reads", "H4", pipelined, either(CLOSED), short=100, whole=5000),
    Attack("streams that nobody reads", "H4", unread_streams, either(CLOSED), short=4, whole=64),
    Attack(
        "header of HTTP/2 without an end",
        "H4",
        flood(
            _ENDLESS,
            lambda _: _frame(_CONTINUATION, 0, 1, (b"\0" + _text("x-a") + _text("b" * 100)) * 100),
            "gateway",
        ),
        either(CLOSED, UNANSWERED),
        short=20,
        whole=500,
    ),
    Attack(
        "calls that are taken back",
        "H4",
        flood(_START, _resets, "gateway"),
        either(CLOSED, UNANSWERED),
        short=1,
        whole=50,
    ),
    Attack(
        "pings",
        "H4",
        flood(_START, lambda _: _frame(_PING, 0, 0, b"12345678") * 1000, "gateway"),
        either(CLOSED, UNANSWERED),
        short=1,
        whole=50,
    ),
    Attack(
        "settings",
        "H4",
        flood(_START, lambda _: _frame(_SETTINGS, 0, 0, struct.pack(">HI", 4, 65_535)) * 1000, "gateway"),
        either(CLOSED, UNANSWERED),
        short=1,
        whole=50,
    ),
]
"""Connections that write without an end."""
