"""How bytes of KV travel: the interface, and the plain way, one TCP connection a migration and rank.

Bulk data does not go through gRPC, which copies it several times. Here the kernel reads the packed buffer itself
(`sendmsg` of a memoryview), and writes into the buffer that is unpacked (`recv_into`). With TLS, by the same
certificates as the services, OpenSSL copies once on each side.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import structlog

from services.generation.migration.framing import HEADER_BYTES, BadFrame, Frame, Kind
from services.platform.certificates import server_context
from services.platform.config import TlsConfig
from services.platform.watched import Unreadable

_log = structlog.get_logger(__name__)
# A peer that neither takes nor gives a byte for so long, in seconds, is given up before the deadline of the move.
STALL_SECONDS = 5.0


class Link(Protocol):
    """One connection, used by one thread at a time. Every call raises OSError when the connection is over or stalls
    in the middle of a frame, and BadFrame for what is not of this protocol."""

    deadline: float
    """Of the monotonic clock, for everything that is sent and received."""

    def send(self, frame: Frame, payload: bytes | memoryview = b"") -> None:
        """Send a header and its payload; the payload may be changed after it returns."""

    def receive(self) -> Frame:
        """The next header."""

    def receive_into(self, payload: memoryview) -> None:
        """The payload of the header that was received last, all of it."""

    def drain(self) -> None:
        """Send nothing more, and read until the peer has ended it, which it does when it has heard the last word.

        Closed before, with bytes on their way here, a connection takes back what was sent. Waits as long as for a
        peer that stalls; whether the peer did end it does not matter.
        """

    def close(self) -> None:
        """End it, from any thread: whoever waits for it gets an OSError."""


class TcpLink:
    """A link over a connected socket."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self.deadline = deadline

    def send(self, frame: Frame, payload: bytes | memoryview = b"") -> None:
        """As `Link`. Header and payload go out together, without being joined."""
        self._set_timeout()
        if isinstance(self._socket, ssl.SSLSocket):
            self._socket.sendall(frame.encode())
            self._socket.sendall(payload)
            return
        parts = [memoryview(frame.encode()), memoryview(payload)]
        while parts:
            sent = self._socket.sendmsg(parts)
            self._set_timeout()
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]

    def receive(self) -> Frame:
        """As `Link`. A peer may think as long as it likes before it begins a frame: until the deadline."""
        header = bytearray(HEADER_BYTES)
        self._fill(memoryview(header), self.deadline - time.monotonic())
        return Frame.decode(header)

    def receive_into(self, payload: memoryview) -> None:
        """As `Link`."""
        self._fill(payload, STALL_SECONDS)

    def _fill(self, payload: memoryview, patience: float) -> None:
        """Receive all of it; `patience` is how long the first byte may take."""
        while len(payload):
            self._set_timeout(patience)
            patience = STALL_SECONDS
            count = self._socket.recv_into(payload)
            if not count:
                raise ConnectionError("the peer closed the connection")
            payload = payload[count:]

    def drain(self) -> None:
        """As `Link`."""
        self.deadline = min(self.deadline, time.monotonic() + STALL_SECONDS)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            self._set_timeout()
            while self._socket.recv(1 << 16):
                self._set_timeout()

    def close(self) -> None:
        """As `Link`."""
        # Wakes a thread that is blocked in it, which closing alone does not.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _set_timeout(self, patience: float = STALL_SECONDS) -> None:
        left = min(self.deadline - time.monotonic(), patience)
        if left <= 0:
            raise TimeoutError("the deadline is over")
        self._socket.settimeout(left)


def dial(address: str, tls: TlsConfig | None, deadline: float) -> TcpLink:
    """Connect to "host:port". OSError when that fails, as TLS does with a peer whose certificate is not trusted."""
    host, _, port = address.rpartition(":")
    timeout = min(max(deadline - time.monotonic(), 0.001), STALL_SECONDS)
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout)
    if tls is None:
        return TcpLink(connection, deadline)
    try:
        context = _client_context(tls)
        name = tls.server_name or host.strip("[]")
        return TcpLink(context.wrap_socket(connection, server_hostname=name), deadline)
    except BaseException:
        connection.close()
        raise


def _client_context(tls: TlsConfig) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=None if tls.ca_file is None else str(tls.ca_file))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if tls.cert_file is not None:
        context.load_cert_chain(str(tls.cert_file), None if tls.key_file is None else str(tls.key_file))
    return context


class Listener:
    """Accepts connections and gives each a thread, until closed."""

    def __init__(
        self,
        host: str,
        port: int,
        tls: TlsConfig | None,
        serve: Callable[[TcpLink], None],
        *,
        patience: float = STALL_SECONDS,
    ) -> None:
        """
        Args:
            host: to listen on.
            port: to listen on; 0: any that is free.
            tls: certificates; None: plain text.
            serve: called with each link in a thread of its own; the link is closed when it returns.
            patience: seconds that a connection gets to say who it is. `serve` sets the deadline from then on.

        Raises:
            OSError: the port is taken.
        """
        self._tls = tls
        self._serve = serve
        self._patience = patience
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host.strip("[]"), port), family=family)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="kv-listener", daemon=True).start()

    def close(self) -> None:
        """Take no more connections. Those that there are go on."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), name="kv-link", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(self._patience)
            if self._tls is not None:
                # Read for each connection: certificates are replaced while the service runs.
                connection = server_context(self._tls).wrap_socket(connection, server_side=True)
            link = TcpLink(connection, time.monotonic() + self._patience)
            self._serve(link)
            link.close()
        except (OSError, BadFrame, Unreadable) as error:
            # Anybody can connect; what matters is logged where a migration is known.
            _log.debug("kv_connection_ended", error=repr(error))
        finally:
            connection.close()


def answer(reason: int = 0, crc: int = 0, message: str = "") -> tuple[Frame, bytes]:
    """An ANSWER and its payload."""
    text = message.encode()
    return Frame(Kind.ANSWER, begin=reason, crc=crc, length=len(text)), text
